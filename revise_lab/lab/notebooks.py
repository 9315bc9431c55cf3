"""Notebooks run to their end, or the run says where they stopped.

One process per notebook, with its own Jupyter folders and a kernel of this very interpreter. Success is never read off
papermill's status fields, which call an interrupted notebook completed: a run counts only if every code cell was
executed without an error and every declared deliverable is newer than the start.

A notebook declares its deliverables, and its time limit per profile where the default does not fit, in its metadata::

    "revise_lab": {"deliverables": ["figures/curve.pdf", "values.json"], "budget_s": {"smoke": 60}}

Deliverables are relative to the run's folder and may hold ``*``.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from revise_lab.errors import ConfigError, NotebookFailed
from revise_lab.lab.files import write_atomic
from revise_lab.lab.template import BUDGET_S, check_parameters, declared, parameters_cell, read

__all__ = ["run_notebook"]

#: Seconds for the start of the kernel and for writing the copies, on top of the budget.
GRACE_S = 60.0
#: A Unix socket path has room for about 100 characters; the kernel appends the number of the socket.
_SOCKET_PATH = 90

_ADDED = {"injected-parameters", "papermill-error-cell-tag"}


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
    marker = write_atomic(folder / f".{os.getpid()}.started", b"")  # the clock of the file system may lag behind ours
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


@contextmanager
def _private_folder(python: str) -> Iterator[Path]:
    # shared Jupyter folders race when notebooks start at once, and a virtual environment need not have registered a
    # kernel; so every run brings its own folders and its own kernelspec
    with tempfile.TemporaryDirectory(prefix="rl-", ignore_cleanup_errors=True) as name:
        private = Path(name)
        spec = private / "kernels" / "python3"
        spec.mkdir(parents=True)
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
    folders = ("IPYTHONDIR", "JUPYTER_RUNTIME_DIR", "JUPYTER_DATA_DIR", "JUPYTER_CONFIG_DIR", "JUPYTER_PATH")
    environment = os.environ | dict.fromkeys(folders, str(private))
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
    said: dict[str, Any] = {}
    reader = threading.Thread(target=_follow, args=(process.stdout, said, path.stem, progress), daemon=True)
    reader.start()
    try:
        process.wait(limit_s + GRACE_S)
    except subprocess.TimeoutExpired:
        _stop(process)
        said["kind"] = "timeout"
    except BaseException:
        _stop(process)
        raise
    finally:
        reader.join(5)
    if "kind" not in said:
        tail = (private / "stderr").read_text(encoding="utf-8", errors="replace").strip().splitlines()[-1:]
        detail = f"its process ended with code {process.returncode}{f' ({tail[0]})' if tail else ''}"
        said |= {"kind": "crash", "detail": detail}
    return said


def _follow(stream: Any, said: dict[str, Any], stem: str, progress: Callable[[str], None] | None) -> None:
    with stream:
        for line in stream:
            said |= json.loads(line)
            if progress and "kind" not in said:
                progress(f"{stem}: cell {said['cell']}/{said['cells']} {said['line']}")


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
    return _judge(read(private / "executed.ipynb"))


def _judge(notebook: Any) -> str | None:
    own = (cell for cell in notebook.cells if not _ADDED & set(cell.metadata.get("tags", [])))
    for number, cell in enumerate(own, 1):  # as in the template
        where = f"cell {number} (`{_first_line(cell)}`)"
        for output in cell.get("outputs", ()):
            if output.output_type == "error" and output.ename == "SystemExit":
                return f"{where} called sys.exit, so the cells after it never ran"
            if output.output_type == "error":
                return f"{where} raised {output.ename}: {output.evalue}"
        if cell.cell_type == "code" and cell.source.strip() and cell.execution_count is None:
            return f"{where} never ran"
    return None


def _first_line(cell: Any) -> str:
    lines = (line.strip() for line in cell.source.splitlines())
    return next((line[:60] for line in lines if line and not line.startswith("#")), "")


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

    notebook = read(executed)
    with suppress(KeyError):  # papermill records where this machine keeps its temporary files
        notebook.metadata.papermill.update(input_path=path.name, output_path="notebook.ipynb")
    stem = "notebook.failed" if failed else "notebook"
    kept = write_atomic(folder / f"{stem}.ipynb", nbformat.writes(notebook).encode())
    if (private / "executed.html").exists():
        write_atomic(folder / f"{stem}.html", (private / "executed.html").read_bytes())
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

    signal.signal(signal.SIGTERM, signal.default_int_handler)
    job = json.loads((private / "job.json").read_text(encoding="utf-8"))
    notebook = nbformat.read(job["notebook"], as_version=4)
    tagged = notebook.cells.index(parameters_cell(notebook, Path(job["notebook"])))
    deadline: float | None = None  # until the kernel has started
    config = Config()
    socket = str(private / "kernel")
    if os.name == "posix" and len(socket) < _SOCKET_PATH:
        # no port to race for; without a path of its own two kernels would meet at ./kernel-ipc-1
        config.KernelManager.transport, config.KernelManager.ip = "ipc", socket

    def say(**said: Any) -> None:
        print(json.dumps(said), flush=True)  # noqa: T201

    def on_start(**_: Any) -> None:
        nonlocal deadline
        deadline = time.monotonic() + job["timeout_s"]

    def on_cell(cell: Any, cell_index: int) -> None:
        number = cell_index + 1 - (bool(job["parameters"]) and cell_index > tagged)
        if cell.cell_type == "code" and not _ADDED & set(cell.metadata.get("tags", [])):
            say(cell=number, cells=len(notebook.cells), line=_first_line(cell))

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
            timeout_func=lambda _: max(1, (deadline or 0.0) - time.monotonic()),
            on_notebook_start=on_start,
            on_cell_start=on_cell,
        )
        said = {"kind": "done"}
    except (Exception, KeyboardInterrupt) as error:
        kinds = {PapermillExecutionError: "error", CellTimeoutError: "timeout", KeyboardInterrupt: "interrupted"}
        kind = "dead_kernel" if isinstance(error, DeadKernelError) else "crash"
        kind = next((kinds[each] for each in kinds if isinstance(error, each)), kind if deadline else "no_kernel")
        said = {"kind": kind, "detail": f"{type(error).__name__}: {error}"}
    say(**said)
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
