"""Where cells are computed: in this process, in worker processes, or on a dask cluster.

An executor takes cells lazily, so that a sweep can stop handing them out, and yields outcomes as they finish, in any
order. Rows go back to the parent, which alone writes.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import time
import traceback
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from revise_lab.errors import CellFailed, ConfigError
from revise_lab.lab import experiments
from revise_lab.lab.config import Cell

T = TypeVar("T")
_FRAMES = 3
_DESERTED_S = 20
_DIED = (
    "a worker process died, for lack of memory or killed; the cells finished before are kept. Run again with fewer jobs, "
    "or with executor='serial' to see which cell it is"
)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one cell: its rows, or the text of the exception."""

    cell: Cell
    rows: Sequence[Mapping[str, Any]] | None
    error: str | None = None


Executor = Callable[[Iterable[Cell], int, bool], Iterator[Outcome]]


def compute(cell: Cell) -> Outcome:
    """Run one cell, in whatever process; an exception becomes text, which any process can carry."""
    try:
        experiment = experiments.get(cell.experiment)
        params = experiment.Params.model_validate_json(json.dumps(cell.params))
        return Outcome(cell, list(experiment.cell(params, cell.seed, cell.replicate)))
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)[1:][-_FRAMES:]
        where = " < ".join(f"{Path(one.filename).name}:{one.lineno}" for one in reversed(frames))
        return Outcome(cell, None, f"{type(error).__name__}: {error} ({where})")


def serial(cells: Iterable[Cell], n_jobs: int, careful: bool) -> Iterator[Outcome]:
    """Compute cells one after another in this process."""
    return map(compute, cells)


def joblib(cells: Iterable[Cell], n_jobs: int, careful: bool) -> Iterator[Outcome]:
    """Compute cells in `n_jobs` worker processes; `careful` hands them out one by one, for a stop rule."""
    from joblib import Parallel, delayed
    from joblib.externals.loky.process_executor import TerminatedWorkerError

    pace = {"batch_size": 1, "pre_dispatch": "n_jobs"} if careful else {}
    parallel = Parallel(n_jobs=n_jobs, backend="loky", return_as="generator_unordered", **pace)
    outcomes = parallel(delayed(compute)(cell) for cell in cells)
    try:
        yield from outcomes
    except TerminatedWorkerError as error:
        raise CellFailed(_DIED, failed={}) from error
    finally:
        outcomes.close()


def dask(cells: Iterable[Cell], n_jobs: int, careful: bool) -> Iterator[Outcome]:
    """Compute cells on the current `distributed.Client`, else on a local cluster that only loopback reaches."""
    try:
        import distributed
    except ImportError:
        raise ConfigError("executor 'dask' needs the extra: pip install 'revise_lab[dask]'", package="dask") from None
    with contextlib.ExitStack() as stack:
        try:
            client, ours = distributed.default_client(), None
        except ValueError:
            where = {"host": "127.0.0.1", "dashboard_address": None}
            ours = stack.enter_context(distributed.LocalCluster(n_workers=n_jobs, threads_per_worker=1, **where))
            client = stack.enter_context(distributed.Client(ours))
        yield from _dask(distributed, client, iter(cells), careful, ours)


def _dask(distributed: Any, client: Any, cells: Iterator[Cell], careful: bool, ours: Any) -> Iterator[Outcome]:
    # results come with completion: asking for them afterwards can wait on a worker that has died meanwhile
    running = distributed.as_completed(with_results=True, raise_errors=False)
    of: dict[Any, Cell] = {}

    def hand_out(n: int) -> None:
        for cell in itertools.islice(cells, n):
            future = client.submit(compute, cell, pure=False)
            of[future] = cell
            running.add(future)

    hand_out(max(1, sum(client.ncores().values())) * (1 if careful else 4))
    while of:
        _await_ready(running, ours)
        future, result = next(running)
        cell = of.pop(future)
        if isinstance(result, Outcome):  # whatever its future says by now: a worker may die after it has answered
            yield result
        else:
            error = result[1] if isinstance(result, tuple) else result
            yield Outcome(cell, None, f"{type(error).__name__}: {error}")
        hand_out(1)


def _await_ready(running: Any, ours: Any) -> None:
    """Wait for an outcome, but not on a local cluster that has given up: it does not replace its workers for ever."""
    alive = time.monotonic()
    while not running.has_ready():
        if ours is None or ours.scheduler.workers:
            alive = time.monotonic()
        elif time.monotonic() - alive > _DESERTED_S:
            raise CellFailed(_DIED, failed={})
        time.sleep(0.02)


EXECUTORS: Mapping[str, Executor] = {"serial": serial, "joblib": joblib, "dask": dask}


def on_own_loop(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine on an event loop in a thread of its own: the thread of a notebook has a loop already.

    Parameters
    ----------
    work : coroutine
        Cancelled when this thread is interrupted, and then waited for.
    """
    tasks: list[asyncio.Task[T]] = []

    async def main() -> T:
        tasks.append(asyncio.get_running_loop().create_task(work))
        return await tasks[0]

    with ThreadPoolExecutor(1) as thread:
        ended = thread.submit(asyncio.run, main())
        try:
            return ended.result()
        except BaseException:
            for task in tasks:
                with contextlib.suppress(RuntimeError):  # its loop has ended by itself
                    task.get_loop().call_soon_threadsafe(task.cancel)
            raise
