"""Running the cells of a config: only those that no run of the experiment has computed yet.

Cells are independent and idempotent, workers return rows, and the parent alone writes. So an interruption of any kind
costs at most the cells in flight, and a repeated sweep computes what is missing.

>>> frame = sweep(load("revise_serving", profile="quick"), n_jobs=2)                        # doctest: +SKIP
"""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import os
import sys
import time
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa

from revise_lab.errors import CellFailed, ConfigError, ResultsError
from revise_lab.lab import experiments
from revise_lab.lab.config import Cell, Config
from revise_lab.lab.document import hint, nearest
from revise_lab.lab.executors import EXECUTORS, Outcome
from revise_lab.lab.experiments import Experiment
from revise_lab.lab.parts import Parts, as_table
from revise_lab.lab.results import RunFolder

log = logging.getLogger(__name__)

_FLUSH_S = 0.5
_LINE_S = 10.0
_NAMED = 3


def sweep(
    config: Config,
    results_dir: str | Path = "results",
    n_jobs: int = 1,
    executor: str | None = None,
    *,
    progress: bool = True,
    max_calls: int | None = None,
    max_tokens: int | None = None,
) -> pd.DataFrame:
    """Compute the cells that are missing and return the rows of all.

    Parameters
    ----------
    config : Config
        What to run.
    results_dir : str or Path
        Rows go to ``<results_dir>/runs/<experiment>/<profile>-<hash>``; other runs of the experiment there are reused.
    n_jobs : int
        Worker processes; -1 for one a core. A config with ``exclusive: true`` is run one cell at a time whatever this
        says, because neighbours would disturb its clocks.
    executor : {'serial', 'joblib', 'dask'}, optional
        Serial for one job and joblib for more, if not given. Dask uses the current client, else a local cluster.
    progress : bool
        Say on stderr, or in the notebook, what is reused, computed and failed, the rate and the time left.
    max_calls, max_tokens : int, optional
        Stop before a cell that would pass this many model calls or tokens, as far as the experiment can estimate a
        cell; without estimates, once they are passed. Usage that is not known stops the sweep too: unknown is not 0.

    Returns
    -------
    DataFrame
        See `RunFolder.frame`; equal for every executor. After a stop it is partial, which a warning says.

    Raises
    ------
    CellFailed
        At the end, if cells raised; all others are kept.
    ResultsError
        If results cannot be written or read.
    ConfigError
        If an argument is wrong.
    """
    workers = _workers(n_jobs, config)
    name = "serial" if config.exclusive else executor or ("serial" if workers == 1 else "joblib")
    if name not in EXECUTORS:
        what = f"no executor {name!r}; allowed: {', '.join(EXECUTORS)}{hint(nearest(name, list(EXECUTORS)))}"
        raise ConfigError(what, allowed=tuple(EXECUTORS))
    experiment = experiments.get(config.experiment)
    run = RunFolder.create(config, results_dir)
    cells = config.cells()
    here = run.parts.repair(experiment)
    missing = [cell for cell in cells if cell.id not in here]
    adopted = _adopt(run, {cell.id for cell in missing}, experiment)
    missing = [cell for cell in missing if cell.id not in adopted]
    line = _Progress(f"{config.experiment} {config.profile}", len(cells), len(cells) - len(missing), show=progress)
    if missing or adopted or run.manifest["status"] != "complete":
        run.start(executor=name, n_jobs=workers)
        most = {"calls": max_calls, "tokens": max_tokens}
        limit = _Limit(experiment, {name: n for name, n in most.items() if n is not None})
        outcomes = EXECUTORS[name](itertools.takewhile(limit.admits, missing), workers, bool(limit.most))
        _keep(run, outcomes, len(cells), line, limit)
        if limit.reached:
            warnings.warn(f"{run.path}: {limit.reached}; {len(missing) - line.computed} cells are left", stacklevel=2)
    else:
        line.close()
    return run.frame(partial=True)


def dry_run(config: Config, results_dir: str | Path = "results", n_jobs: int = 1) -> dict[str, Any]:
    """Say what a sweep would cost; nothing is computed or written.

    Returns
    -------
    dict
        ``cells``, ``reusable``, ``missing``, and for the missing ones ``calls``, ``tokens`` and ``minutes``, None where
        neither the experiment estimates them nor, for minutes, an earlier sweep of it has measured them.
    """
    experiment = experiments.get(config.experiment)
    cells = config.cells()
    stored: set[str] = set()
    parent = RunFolder.of(config, results_dir).path.parent
    for folder in _folders(parent):
        table = Parts(folder).rows({cell.id for cell in cells} - stored, experiment)
        stored |= set(table["cell_id"].to_pylist()) if table else set()
    missing = [cell for cell in cells if cell.id not in stored]
    sums = Counter[str]()
    for cell in missing:
        sums.update(_estimate(experiment, cell))
    mean_s = None if "wall_s" in sums else _measured_s(parent)
    wall_s = sums.get("wall_s") if mean_s is None else mean_s * len(missing)
    minutes = None if wall_s is None else wall_s / 60 / _workers(n_jobs, config)
    counts = {"cells": len(cells), "reusable": len(cells) - len(missing), "missing": len(missing)}
    return counts | {"calls": sums.get("calls"), "tokens": sums.get("tokens"), "minutes": minutes}


# --- one sweep -------------------------------------------------------------------------------------------------------


def _keep(run: RunFolder, outcomes: Iterator[Outcome], total: int, line: _Progress, limit: _Limit) -> None:
    """Store outcomes as they come; leave a true manifest whatever happens."""
    failed: dict[str, dict[str, Any]] = {}
    waiting: list[pa.Table] = []
    started = written = time.monotonic()

    def store() -> None:
        if waiting:
            run.parts.append(waiting)
            waiting.clear()

    def finish(ended: str) -> None:
        counts = {"computed": line.computed, "reused": line.reused, "wall_s": round(time.monotonic() - started, 3)}
        run.finish(total, failed, ended=ended, **counts)

    try:
        for outcome in outcomes:
            table, error = _checked(limit.experiment, outcome)
            if table is None:
                cell = outcome.cell
                failed[cell.id] = {"params": dict(cell.params), "replicate": cell.replicate, "error": error}
            else:
                waiting.append(table)
            limit.count(outcome)
            line.update(failed=table is None)
            if time.monotonic() - written > _FLUSH_S:
                store()
                written = time.monotonic()
        store()
        run.parts.merge()
        finish(limit.reached or "all cells tried")
    except BaseException as error:
        with contextlib.suppress(ResultsError):  # the first error says more than a second one of the same full disk
            store()
        with contextlib.suppress(ResultsError):
            finish(type(error).__name__)
        raise
    finally:
        getattr(outcomes, "close", int)()
        line.close()
    if failed:
        raise _failure(run, total, failed)


def _checked(experiment: Experiment, outcome: Outcome) -> tuple[pa.Table | None, str | None]:
    if outcome.rows is None:
        return None, outcome.error
    try:
        return as_table(experiment, outcome.cell, outcome.rows), None
    except ResultsError as error:
        return None, error.message


def _failure(run: RunFolder, total: int, failed: Mapping[str, Mapping[str, Any]]) -> CellFailed:
    shown = [f"{name} {what['params']}: {what['error']}" for name, what in list(failed.items())[:_NAMED]]
    more = f"\n  and {len(failed) - _NAMED} more, see manifest.json" if len(failed) > _NAMED else ""
    return CellFailed(
        f"{len(failed)} of {total} cells failed in {run.path}; the others are kept, and a repeated sweep computes only "
        "these:\n  " + "\n  ".join(shown) + more,
        failed=dict(failed),
        path=str(run.path),
    )


def _adopt(run: RunFolder, ids: set[str], experiment: Experiment) -> set[str]:
    """Copy rows that other runs of the experiment hold, so that this folder is whole by itself."""
    adopted: set[str] = set()
    for folder in _folders(run.path.parent):
        if folder == run.path or not ids - adopted:
            continue
        try:
            table = Parts(folder).rows(ids - adopted, experiment)
        except ResultsError as error:
            log.warning("rows of another run are not reused: %s", error)
            continue
        if table is not None:
            run.parts.append([table])
            adopted |= set(table["cell_id"].to_pylist())
    return adopted


def _folders(parent: Path) -> list[Path]:
    return sorted(path for path in parent.iterdir() if path.is_dir()) if parent.is_dir() else []


def _workers(n_jobs: int, config: Config) -> int:
    if n_jobs == 0 or n_jobs < -1:
        raise ConfigError(f"n_jobs is {n_jobs}; give a number of processes, or -1 for one a core", n_jobs=n_jobs)
    return 1 if config.exclusive else (os.cpu_count() or 1) if n_jobs == -1 else n_jobs


# --- what a cell costs -----------------------------------------------------------------------------------------------


@dataclass
class _Limit:
    """The stop rule for real endpoints: it admits cells until a limit is reached, and then says which."""

    experiment: Experiment
    most: Mapping[str, int]
    """Of calls and of tokens, where there is a limit."""
    over: tuple[str, str] | None = None
    spent: Counter[str] = field(default_factory=Counter)
    expected: dict[str, dict[str, float]] = field(default_factory=dict)

    @property
    def reached(self) -> str | None:
        """Which limit stopped the sweep and what was spent by now, or None."""
        if self.over is None:
            return None
        name, why = self.over
        return f"stopped by max_{name}={self.most[name]} after {self.spent[name]:g} {name}{why}"

    def admits(self, cell: Cell) -> bool:
        """Whether the cell may start; its estimate counts as spent until its usage is known."""
        if not self.most or self.over:
            return not self.over
        cost = _estimate(self.experiment, cell)
        for name, most in self.most.items():
            held = self.spent[name] + sum(one.get(name, 0) for one in list(self.expected.values()))
            if held + cost.get(name, 0) > most or held >= most:
                self.over = (name, "")
                return False
        self.expected[cell.id] = cost
        return True

    def count(self, outcome: Outcome) -> None:
        """Take the usage of a finished cell; a failed one keeps its estimate, for its calls were made."""
        if not self.most:
            return
        if outcome.rows is None:
            used: Mapping[str, float | None] = _estimate(self.experiment, outcome.cell)
        else:
            used = (self.experiment.usage or _summed)(outcome.rows)
        for name in ("calls", "tokens"):
            if (amount := used.get(name)) is not None:
                self.spent[name] += amount
            elif name in self.most and not self.over:
                self.over = (name, f": those of cell {outcome.cell.id} are not known")
        self.expected.pop(outcome.cell.id, None)


def _estimate(experiment: Experiment, cell: Cell) -> dict[str, float]:
    if experiment.estimate is None:
        return {}
    params = experiment.Params.model_validate_json(json.dumps(cell.params))
    return dict(experiment.estimate(params))


def _summed(rows: Sequence[Mapping[str, Any]]) -> dict[str, float | None]:
    """Sum usage over rows; None as soon as one row does not know its own."""
    frame = pd.DataFrame(rows)
    if "tokens" not in frame:
        split = frame.reindex(columns=["prompt_tokens", "completion_tokens"]).astype(float)
        frame["tokens"] = split.sum(axis=1, skipna=False)
    sums = frame.reindex(columns=["calls", "tokens"]).astype(float).sum(skipna=False)
    return {name: None if amount != amount else amount for name, amount in sums.items()}


def _measured_s(parent: Path) -> float | None:
    """Seconds of one worker that a cell took on average in earlier sweeps of the experiment."""
    wall_s, computed = 0.0, 0
    for folder in _folders(parent):
        with contextlib.suppress(ResultsError):
            for one in RunFolder(folder).manifest["sweeps"]:
                wall_s += one.get("wall_s", 0) * one.get("n_jobs", 1) if one.get("computed") else 0
                computed += one.get("computed", 0)
    return wall_s / computed if computed else None


# --- progress --------------------------------------------------------------------------------------------------------


class _Progress:
    """One line that moves in a terminal, one output that is replaced in a notebook, else a line now and then."""

    def __init__(self, name: str, total: int, reused: int, *, show: bool) -> None:
        self.name, self.total, self.reused, self.show = name, total, reused, show
        self.computed = self.failed = 0
        self.started = self.said = time.monotonic()
        self.kind = "notebook" if _in_notebook() else "terminal" if sys.stderr.isatty() else "log"
        self.shown = False

    def update(self, *, failed: bool) -> None:
        self.failed += failed
        self.computed += not failed
        now = time.monotonic()
        if self.show and now - self.said > (_LINE_S if self.kind == "log" else 0.2):
            self.said = now
            self._say(last=False)

    def close(self) -> None:
        if self.show:
            self._say(last=True)
            self.show = False

    def text(self) -> str:
        done = self.computed + self.failed
        took_s = time.monotonic() - self.started
        text = f"{self.name}: {self.total} cells, reused {self.reused}, computed {self.computed}, failed {self.failed}"
        if not done:
            return text
        left_s = (self.total - self.reused - done) * took_s / done
        return f"{text}; {done / took_s:.3g} cells/s, {left_s:.0f} s left"

    def _say(self, *, last: bool) -> None:
        if self.kind == "notebook":
            from IPython.display import display

            text = {"text/plain": self.text()}
            display(text, raw=True, display_id=f"sweep-{id(self)}", update=self.shown)
            self.shown = True
        elif self.kind == "terminal":
            sys.stderr.write(f"\r\x1b[K{self.text()}" + ("\n" if last else ""))
        else:
            sys.stderr.write(f"{self.text()}\n")
        sys.stderr.flush()


def _in_notebook() -> bool:
    shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    return getattr(shell, "kernel", None) is not None
