"""Notebooks run to their end, or the run says where they stopped.

One process per notebook, with its own Jupyter folders and a kernel of this very interpreter. Success is never read off
papermill's status fields, which call an interrupted notebook completed: a run counts only if every code cell was
executed without an error and every declared deliverable is newer than the start.

A notebook declares its deliverables, and its time limit per profile where the default does not fit, in its metadata::

    "revise_lab": {"deliverables": ["figures/curve.pdf", "values.json"], "budget_s": {"smoke": 60}}

Deliverables are relative to the run's folder and may hold ``*``.
"""

from __future__ import annotations

import ast
import io
import json
import numbers
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import tokenize
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

from revise_lab.errors import ConfigError, NotebookFailed
from revise_lab.lab.document import hint, nearest

__all__ = ["Parameter", "check_parameters", "declared", "lint", "parameters", "plain", "run_notebook"]

#: Seconds a notebook may take, by profile, unless its metadata says otherwise.
BUDGET_S = {"smoke": 180.0, "quick": 1200.0, "paper": 86400.0}
#: Seconds for the start of the kernel and for writing the copies, on top of the budget.
GRACE_S = 60.0
#: Parameters that every notebook of this project has.
STANDARD = ("profile", "config", "seed", "results_dir", "n_jobs")
MAX_CELLS, MAX_LINES = 12, 15
#: A Unix socket path has room for about 100 characters; the kernel appends the number of the socket.
_SOCKET_PATH = 90

_TYPES: dict[str, Any] = {"str": str, "int": int, "float": (int, float), "bool": bool, "list": list, "dict": dict}
_ADDED = {"injected-parameters", "papermill-error-cell-tag"}
_FORBIDDEN = (
    (re.compile(r"^\s*[%!]+\s*(pip|conda|mamba|uv)\b", re.M), "installs packages"),
    (re.compile(r"^\s*%cd\b|\bchdir\s*\(", re.M), "changes the working folder"),
    (re.compile(r"""['"](?:/[A-Za-z]|~/|[A-Za-z]:[\\/])"""), "holds an absolute path"),
)


class Parameter(NamedTuple):
    """One assignment of a parameters cell.

    Attributes
    ----------
    name, kind, help : str
        Name, annotation (empty when there is none) and trailing comment.
    default : str or None
        Source of the default; None when the parameter must be given.
    """

    name: str
    kind: str
    help: str
    default: str | None


def parameters(path: str | Path) -> dict[str, Parameter]:
    """Read the parameters of a notebook from the syntax tree of its parameters cell.

    Parameters
    ----------
    path : str or Path
        The notebook.

    Returns
    -------
    dict
        Name -> `Parameter`, in the order of the cell.

    Raises
    ------
    ConfigError
        If the file is no notebook, if no cell or several carry the tag ``parameters``, or if that cell is not Python.
    """
    return _parameters_of(_read(path), Path(path))


def check_parameters(path: str | Path, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the given parameters as plain JSON values, or refuse them by name.

    Parameters
    ----------
    path : str or Path
        The notebook they are for.
    given : mapping
        Name -> value.

    Returns
    -------
    dict
        Ready to be injected.

    Raises
    ------
    ConfigError
        If a name is unknown to the notebook, a required one is missing, a value is not JSON-like, or it does not have
        the annotated type.
    """
    known = parameters(path)
    stem = Path(path).name
    for name in given:
        if name not in known:
            lower = {one.lower(): one for one in known}  # X for x is the commonest slip, and no letter matches
            near = lower.get(nearest(name.lower(), list(lower)) or "")
            raise ConfigError(
                f"notebook '{stem}' has no parameter {name!r}{hint(near) or '; it has ' + ', '.join(known)}",
                parameter=name,
                nearest=near,
            )
    missing = [name for name, parameter in known.items() if parameter.default is None and name not in given]
    if missing:
        raise ConfigError(
            f"notebook '{stem}' needs a value for '{missing[0]}', which has no default", parameter=missing[0]
        )
    values = {name: plain(value, name) for name, value in given.items()}
    for name, value in values.items():
        _check_type(known[name], value, stem)
    return values


def plain(value: Any, name: str = "value") -> Any:
    """Return a value as plain JSON types, or refuse it by name.

    Parameters
    ----------
    value : Any
        None, bool, number (numpy scalars included), text, list, tuple or mapping with text keys.
    name : str
        What to call it in the message.

    Returns
    -------
    Any
        None, bool, int, float, str, list or dict.

    Raises
    ------
    ConfigError
        For anything else, because it would reach the notebook changed or not at all.
    """
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, numbers.Integral):
        return int(value)
    if isinstance(value, numbers.Real):
        number = float(value)
        if number - number != 0:
            raise ConfigError(f"parameter '{name}' is {number}, which JSON cannot hold; pass None", parameter=name)
        return number
    if isinstance(value, list | tuple):
        return [plain(item, f"{name}[{index}]") for index, item in enumerate(value)]
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str):
                raise ConfigError(
                    f"parameter '{name}' has the key {key!r}, which would turn into text; use text keys", parameter=name
                )
        return {str.__str__(key): plain(item, f"{name}.{key}") for key, item in value.items()}
    if type(value).__name__ in ("bool", "bool_") and hasattr(value, "item"):  # numpy's bool is no number
        return bool(value)
    kind = type(value).__name__
    text = isinstance(value, os.PathLike) or kind in ("date", "datetime")
    remedies = {"set": "sorted(...)", "frozenset": "sorted(...)", "ndarray": ".tolist()"}
    remedy = "str(...)" if text else remedies.get(kind, "a JSON-like value")
    raise ConfigError(
        f"parameter '{name}' is a {kind}, which a notebook cannot be given; pass {remedy}", parameter=name
    )


def declared(path: str | Path) -> tuple[tuple[str, ...], dict[str, float]]:
    """Return the deliverables that a notebook declares and its budget in seconds per profile."""
    meta = _read(path).metadata.get("revise_lab", {})
    return tuple(meta.get("deliverables", ())), {**BUDGET_S, **meta.get("budget_s", {})}


def lint(path: str | Path) -> list[str]:
    """List what keeps a notebook from being a good template.

    Parameters
    ----------
    path : str or Path
        The notebook.

    Returns
    -------
    list of str
        One sentence per finding; empty when there is none.
    """
    path = Path(path)
    notebook = _read(path)
    found = []
    if notebook.metadata.get("kernelspec", {}).get("name") != "python3":
        found.append("the kernelspec is not python3")
    if len(notebook.cells) > MAX_CELLS:
        found.append(f"it has {len(notebook.cells)} cells, more than {MAX_CELLS}")
    if "papermill" in notebook.metadata or any("papermill" in cell.metadata for cell in notebook.cells):
        found.append("it carries papermill metadata: strip it")
    for index, cell in enumerate(notebook.cells, 1):
        if cell.cell_type != "code":
            continue
        if cell.get("outputs") or cell.get("execution_count") is not None:
            found.append(f"cell {index} has outputs: strip them")
        lines = cell.source.count("\n") + 1
        if lines > MAX_LINES:
            found.append(f"cell {index} has {lines} lines, more than {MAX_LINES}: move logic into the library")
        found += [f"cell {index} {what}" for pattern, what in _FORBIDDEN if pattern.search(cell.source)]
    try:
        cell = _parameters_cell(notebook, path)
        known = _parameters_of(notebook, path)
    except ConfigError as error:
        return [*found, error.message]
    found += [f"the parameters cell lacks '{name}'" for name in STANDARD if name not in known]
    found += [f"parameter '{p.name}' has no help: put a comment behind it" for p in known.values() if not p.help]
    found += [f"parameter '{p.name}' has no annotation" for p in known.values() if not p.kind]
    for node in ast.parse(cell.source).body:
        if not isinstance(node, ast.Assign | ast.AnnAssign) or not _is_literal(node.value):
            source = ast.unparse(node).splitlines()[0]
            found.append(f"the parameters cell holds `{source}`: only literal values; derive after injection")
    return found


def run_notebook(
    path: str | Path,
    folder: str | Path,
    given: Mapping[str, Any] | None = None,
    *,
    timeout_s: float | None = None,
    deliverables: tuple[str, ...] | None = None,
    python: str = sys.executable,
    progress: Callable[[str], None] | None = None,
) -> Path:
    """Run a notebook in a process of its own and keep the executed copy.

    Parameters
    ----------
    path : str or Path
        The notebook; it is never written to.
    folder : str or Path
        The run's folder: ``notebook.ipynb`` and ``notebook.html`` go there, or ``notebook.failed.*``; deliverables
        are looked up there.
    given : mapping, optional
        Parameters, as for `check_parameters`.
    timeout_s : float, optional
        For all cells together. By default the budget of the profile (``given["profile"]``, else smoke).
    deliverables : tuple of str, optional
        By default what the notebook declares.
    python : str
        Interpreter of the kernel.
    progress : callable, optional
        Called with one line per cell started.

    Returns
    -------
    Path
        The executed copy.

    Raises
    ------
    ConfigError
        If the notebook cannot be parametrised so; nothing was started.
    NotebookFailed
        If a cell failed, hung, exited or never ran, the kernel died or did not start (after one retry), or a
        deliverable is missing or old. The message names the cell and the failed copy.
    KeyboardInterrupt
        Passed on once the kernel is stopped and the failed copy kept.
    """
    path, folder = Path(path).resolve(), Path(folder).resolve()
    values = check_parameters(path, given or {})
    wanted, budget = declared(path)
    wanted = wanted if deliverables is None else deliverables
    limit = timeout_s if timeout_s is not None else budget.get(str(values.get("profile", "smoke")), BUDGET_S["quick"])
    if folder == path.parent or path.parent in folder.parents:
        raise ConfigError(f"executed copies go to a results folder, not beside the notebook ({folder.name})")
    folder.mkdir(parents=True, exist_ok=True)
    marker = folder / f".started.{os.getpid()}"
    marker.touch()
    since_ns = marker.stat().st_mtime_ns
    marker.unlink()
    for attempt in (1, 2):
        with _private_folder(python) as private:
            try:
                outcome = _supervise(path, private, values, limit, progress)
            except KeyboardInterrupt:
                _keep(private, folder, path, failed=True)
                raise
            if outcome["kind"] == "no_kernel" and attempt == 1:
                continue
            problem = _problem(outcome, private, limit) or _missing(folder, wanted, since_ns)
            kept = _keep(private, folder, path, failed=bool(problem))
        if problem:
            where = f"; see {kept.name} in {folder}" if kept else ""
            raise NotebookFailed(f"notebook '{path.stem}': {problem}{where}", notebook=path.stem, copy=kept, **outcome)
        return kept
    raise AssertionError("unreachable")


def _read(path: str | Path) -> Any:
    import nbformat

    path = Path(path)
    try:
        return nbformat.read(path, as_version=4)
    except FileNotFoundError:
        raise ConfigError(f"there is no notebook '{path}'", path=str(path)) from None
    except Exception as error:
        raise ConfigError(f"'{path.name}' is not a notebook: {error}", path=str(path)) from error


def _parameters_cell(notebook: Any, path: Path) -> Any:
    tagged = [cell for cell in notebook.cells if "parameters" in cell.metadata.get("tags", [])]
    if len(tagged) != 1:
        count = "no cell" if not tagged else f"{len(tagged)} cells"
        raise ConfigError(
            f"notebook '{path.name}' has {count} tagged 'parameters', so nothing can be injected: it would run with its "
            "own defaults; tag exactly one cell",
            path=str(path),
        )
    return tagged[0]


def _parameters_of(notebook: Any, path: Path) -> dict[str, Parameter]:
    source = _parameters_cell(notebook, path).source
    try:
        body = ast.parse(source).body
    except SyntaxError as error:
        raise ConfigError(f"the parameters cell of '{path.name}' is not Python: {error}", path=str(path)) from error
    comments = {
        token.start[0]: token.string.lstrip("# ")
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
        if token.type == tokenize.COMMENT
    }
    found = {}
    for node in body:
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        kind = ast.unparse(node.annotation) if isinstance(node, ast.AnnAssign) else ""
        value = getattr(node, "value", None)
        for target in targets:
            if isinstance(target, ast.Name):
                default = None if value is None else ast.unparse(value)
                found[target.id] = Parameter(target.id, kind, comments.get(node.end_lineno or 0, ""), default)
    return found


def _is_literal(node: ast.expr | None) -> bool:
    with suppress(ValueError):
        if node is not None:
            ast.literal_eval(node)
        return True
    return False


def _check_type(parameter: Parameter, value: Any, stem: str) -> None:
    allowed = [part.split("[")[0].strip() for part in parameter.kind.split("|")]
    if not parameter.kind or any(part not in _TYPES and part != "None" for part in allowed):
        return
    for part in allowed:
        fits = value is None if part == "None" else isinstance(value, _TYPES[part])
        if fits and (not isinstance(value, bool) or part == "bool"):
            return
    raise ConfigError(
        f"notebook '{stem}': parameter '{parameter.name}' is {value!r}, but it is declared {parameter.kind}"
        + (f" ({parameter.help})" if parameter.help else ""),
        parameter=parameter.name,
    )


@contextmanager
def _private_folder(python: str) -> Iterator[Path]:
    # shared Jupyter folders race when notebooks start at once, and a virtual environment need not have registered a
    # kernel; so every run brings its own folders and its own kernelspec
    with tempfile.TemporaryDirectory(prefix="rl-", ignore_cleanup_errors=True) as name:
        private = Path(name)
        spec = private / "jupyter" / "kernels" / "python3"
        spec.mkdir(parents=True)
        for sub in ("ipython", "runtime", "data", "config"):
            (private / sub).mkdir(mode=0o700)
        argv = [python, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
        kernel = {"argv": argv, "display_name": "Python 3", "language": "python"}
        kernel["metadata"] = {"supported_encryption": ["curve"]}
        (spec / "kernel.json").write_text(json.dumps(kernel), encoding="utf-8")
        yield private


def _supervise(
    path: Path, private: Path, values: dict[str, Any], limit_s: float, progress: Callable[[str], None] | None
) -> dict[str, Any]:
    job = {"notebook": str(path), "parameters": values, "timeout_s": limit_s}
    (private / "job.json").write_text(json.dumps(job), encoding="utf-8")
    folders = {"IPYTHONDIR": "ipython", "JUPYTER_RUNTIME_DIR": "runtime", "JUPYTER_DATA_DIR": "data"}
    folders |= {"JUPYTER_CONFIG_DIR": "config", "JUPYTER_PATH": "jupyter"}
    environment = os.environ | {name: str(private / sub) for name, sub in folders.items()}
    environment |= {"JUPYTER_PLATFORM_DIRS": "1", "PYDEVD_DISABLE_FILE_VALIDATION": "1"}
    with (private / "stderr").open("wb") as errors:
        process = subprocess.Popen(
            [sys.executable, "-m", "revise_lab.lab.notebooks", str(private)],
            stdout=subprocess.PIPE,
            stderr=errors,
            env=environment,
            cwd=path.parent,
            start_new_session=True,
            text=True,
            encoding="utf-8",
        )
    at: dict[str, Any] = {}
    reader = threading.Thread(target=_follow, args=(process.stdout, at, path.stem, progress), daemon=True)
    reader.start()
    try:
        process.wait(limit_s + GRACE_S)
    except subprocess.TimeoutExpired:
        _stop(process)
        return {"kind": "timeout", **at}
    except BaseException:
        _stop(process)
        raise
    finally:
        reader.join(5)
    try:
        return {**at, **json.loads((private / "outcome.json").read_text(encoding="utf-8"))}
    except FileNotFoundError:
        tail = (private / "stderr").read_text(encoding="utf-8", errors="replace").strip().splitlines()[-1:]
        said = f" ({tail[0]})" if tail else ""
        return {"kind": "crash", "detail": f"its process ended with code {process.returncode}{said}", **at}


def _follow(stream: Any, at: dict[str, Any], stem: str, progress: Callable[[str], None] | None) -> None:
    with stream:
        for line in stream:
            at.update(json.loads(line))
            if progress:
                progress(f"{stem}: cell {at['cell']}/{at['cells']} {at['line']}")


def _stop(process: subprocess.Popen[str]) -> None:
    # the child turns SIGTERM into an orderly end: it stops the kernel, which has a session of its own
    process.terminate()
    try:
        process.wait(15)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _problem(outcome: dict[str, Any], private: Path, limit_s: float) -> str | None:
    where = f"cell {outcome['cell']} (`{outcome['line']}`)" if "cell" in outcome else "the first cell"
    detail = outcome.get("detail", "")
    said = {
        "no_kernel": f"its kernel did not start, twice ({detail})",
        "timeout": f"{where} had not finished after {limit_s:g} s, the limit for this profile",
        "dead_kernel": f"its kernel died in {where}",
        "interrupted": f"it was interrupted in {where}",
        "crash": f"{detail} in {where}",
    }
    if outcome["kind"] in said:
        return said[outcome["kind"]]
    return _judge(_read(private / "executed.ipynb"))


def _judge(notebook: Any) -> str | None:
    own = [
        cell for cell in notebook.cells if not _ADDED & set(cell.metadata.get("tags", []))
    ]  # numbered as in the template
    code = [(number, cell) for number, cell in enumerate(own, 1) if cell.cell_type == "code"]
    for number, cell in code:
        for output in cell.outputs:
            if output.output_type == "error":
                if output.ename == "SystemExit":
                    return f"cell {number} (`{_first_line(cell)}`) called sys.exit, so the cells after it never ran"
                return f"cell {number} (`{_first_line(cell)}`) raised {output.ename}: {output.evalue}"
    for number, cell in code:
        if cell.source.strip() and cell.execution_count is None:
            return f"cell {number} (`{_first_line(cell)}`) never ran"
    return None


def _first_line(cell: Any) -> str:
    lines = [line for line in cell.source.splitlines() if line.strip() and not line.lstrip().startswith("#")]
    return lines[0].strip()[:60] if lines else ""


def _missing(folder: Path, wanted: tuple[str, ...], since_ns: int) -> str | None:
    absent = []
    for name in wanted:
        files = list(folder.glob(name))
        if not files:
            absent.append(f"{name} (missing)")
        absent += [f"{file.relative_to(folder)} (empty)" for file in files if not file.stat().st_size]
        if files and all(file.stat().st_mtime_ns < since_ns for file in files):
            absent.append(f"{name} (older than this run)")
    return f"it ran to its end but did not write {', '.join(absent)}" if absent else None


def _keep(private: Path, folder: Path, path: Path, *, failed: bool) -> Path | None:
    executed = private / "executed.ipynb"
    if not executed.exists():
        return None
    import nbformat

    notebook = _read(executed)
    with suppress(KeyError):  # papermill records where this machine keeps its temporary files
        notebook.metadata.papermill.update(input_path=path.name, output_path="notebook.ipynb")
    stem = "notebook.failed" if failed else "notebook"
    kept = folder / f"{stem}.ipynb"
    fresh = folder / f".{kept.name}.{os.getpid()}"
    nbformat.write(notebook, fresh)
    fresh.replace(kept)
    if (private / "executed.html").exists():
        shutil.copyfile(private / "executed.html", fresh)
        fresh.replace(folder / f"{stem}.html")
    if not failed:
        for old in folder.glob("notebook.failed.*"):
            old.unlink()
    return kept


def _child(private: Path) -> None:
    """Run the job found in a private folder; the supervisor reads what is written there."""
    import nbformat
    import papermill
    from nbclient.exceptions import CellTimeoutError, DeadKernelError
    from papermill.exceptions import PapermillExecutionError
    from traitlets.config import Config

    def on_signal(*_: Any) -> None:
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, on_signal)
    job = json.loads((private / "job.json").read_text(encoding="utf-8"))
    notebook = nbformat.read(job["notebook"], as_version=4)
    tagged = notebook.cells.index(_parameters_cell(notebook, Path(job["notebook"])))
    state, deadline = {"started": False}, time.monotonic() + job["timeout_s"]
    config = Config()
    socket = str(private / "runtime" / "kernel")
    if os.name == "posix" and len(socket) < _SOCKET_PATH:
        # no port to race for; without a path of its own two kernels would meet at ./kernel-ipc-1
        config.KernelManager.transport, config.KernelManager.ip = "ipc", socket

    def on_start(**_: Any) -> None:
        nonlocal deadline
        state["started"], deadline = True, time.monotonic() + job["timeout_s"]

    def on_cell(cell: Any, cell_index: int) -> None:
        number = cell_index + 1 - (bool(job["parameters"]) and cell_index > tagged)
        if cell.cell_type == "code" and not _ADDED & set(cell.metadata.get("tags", [])):
            line = {"cell": number, "cells": len(notebook.cells), "line": _first_line(cell)}
            print(json.dumps(line), flush=True)  # noqa: T201

    outcome = {"kind": "done"}
    target = str(private / "executed.ipynb").replace("{", "{{").replace("}", "}}")
    try:
        papermill.execute_notebook(
            notebook,
            target,
            job["parameters"],
            kernel_name="python3",
            language="python",
            progress_bar=False,
            config=config,
            timeout_func=lambda _: max(1, deadline - time.monotonic()),
            on_notebook_start=on_start,
            on_cell_start=on_cell,
        )
    except PapermillExecutionError:
        outcome = {"kind": "error"}
    except CellTimeoutError:
        outcome = {"kind": "timeout"}
    except KeyboardInterrupt:
        outcome = {"kind": "interrupted"}
    except Exception as error:
        kind = "dead_kernel" if isinstance(error, DeadKernelError) else "crash"
        kind = kind if state["started"] else "no_kernel"
        outcome = {"kind": kind, "detail": f"{type(error).__name__}: {error}"}
    (private / "outcome.json").write_text(json.dumps(outcome), encoding="utf-8")
    if (private / "executed.ipynb").exists():
        _html(private)


def _html(private: Path) -> None:
    import logging

    from nbconvert import HTMLExporter

    logging.getLogger("traitlets").setLevel(logging.ERROR)  # it warns of figures without alternative text
    # the copy must open offline: no scripts from elsewhere
    scripts = ("mathjax_url", "require_js_url", "jquery_url", "mermaid_js_url", "mermaid_layout_elk_js_url")
    exporter = HTMLExporter(**dict.fromkeys(scripts, ""))
    text, _ = exporter.from_filename(str(private / "executed.ipynb"))
    (private / "executed.html").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    _child(Path(sys.argv[1]))
