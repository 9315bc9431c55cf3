"""Files written whole or not at all, and what a manifest says about code and machine."""

from __future__ import annotations

import contextlib
import datetime
import errno
import hashlib
import importlib.metadata
import os
import platform
import subprocess
import uuid
import warnings
from pathlib import Path
from typing import Any

from revise_lab.errors import ResultsError

_PACKAGES = ("numpy", "pandas", "pyarrow", "scipy", "pydantic", "ruamel.yaml", "joblib", "matplotlib", "openai",
             "langgraph", "distributed", "networkx")  # fmt: skip
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def write_atomic(path: Path, data: bytes) -> Path:
    """Write a file beside its place and rename it there, so that no reader ever sees half of it.

    Raises
    ------
    ResultsError
        Naming the path and the remedy; a file that was there before is untouched.
    """
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_bytes(data)
        temporary.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise unwritable(path, error) from error
    return path


def unwritable(path: Path, error: OSError) -> ResultsError:
    """Phrase a failed write: what, where and the remedy."""
    remedy = "free some space or pass another results_dir" if error.errno in _FULL else "pass another results_dir"
    return ResultsError(
        f"cannot write {path}: {error.strerror or error}; what was finished before is kept - {remedy} and run again",
        path=str(path),
        errno=error.errno,
    )


def set_aside(path: Path, why: str, what: str) -> None:
    """Rename a file that cannot be trusted, and warn of it."""
    aside = path.with_name(f"{path.name}.{why}")
    try:
        with contextlib.suppress(FileNotFoundError):
            path.rename(aside)
    except OSError as error:
        raise unwritable(path, error) from error
    warnings.warn(f"{path} is set aside as {aside.name}: {what}", stacklevel=3)


def environment() -> dict[str, Any]:
    """Describe code, packages and machine; no host name, no user, no environment variable."""
    versions = {}
    for name in _PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    return {
        "git": _git(),
        "packages": versions,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpu_count": os.cpu_count(),
    }


def _git() -> dict[str, Any] | None:
    """State of the checkout that this code runs from, or None if it was installed."""
    root = Path(__file__).resolve().parents[2]
    quiet = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}

    def ask(*arguments: str) -> str:
        command = ["git", "-C", str(root), *arguments]
        done = subprocess.run(command, capture_output=True, encoding="utf-8", errors="replace", env=quiet, timeout=20)
        done.check_returncode()
        return done.stdout.strip()

    try:
        if Path(ask("rev-parse", "--show-toplevel")).resolve() != root:
            return None
        dirty = bool(ask("status", "--porcelain"))
        return {
            "commit": ask("rev-parse", "HEAD"),
            "branch": ask("rev-parse", "--abbrev-ref", "HEAD"),
            "dirty": dirty,
            "diff": digest(ask("diff", "HEAD").encode()) if dirty else None,
        }
    except (OSError, subprocess.SubprocessError):
        return None


def utc() -> str:
    """Return the time now, in UTC, to the second."""
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


def digest(data: bytes, size: int = 8) -> str:
    """Hash bytes to hexadecimal digits, two for each byte of `size`."""
    return hashlib.blake2b(data, digest_size=size).hexdigest()
