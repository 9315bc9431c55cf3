"""How a sample is taken, and the row that samples make."""

from __future__ import annotations

import gc
import itertools
import math
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from statistics import median
from typing import Any, NamedTuple

import numpy as np

from revise_lab.core.machine import Machine
from revise_lab.records import event as ev
from revise_lab.records.revision import Change, Op, Revision
from revise_lab.records.selector import Read, Selector, evaluate
from revise_lab.records.workflow import Graph, Kind, Node

_FLAT = 0.1


def say(line: str) -> None:
    """Write on stderr how far a long measurement is."""
    print(line, file=sys.stderr, flush=True)


class Row(NamedTuple):
    """One line of the benchmark.

    ``p95`` is the slow tail: of a rate, what 95 % of the batches reach. ``ratio`` is ours over the peer's (below 1: we are
    faster), except that for scans it is theirs over ours; the note says which. ``exponent`` is the slope of log p50 over
    log size, on the last row of a sweep; flat means at most 0.1. ``met`` is None where nothing was asked for.
    """

    what: str
    case: str
    n: int
    p50: float
    p95: float
    unit: str = "us"
    budget: float | None = None
    met: bool | None = None
    exponent: float | None = None
    ratio: float | None = None
    note: str = ""


@cache
def clock_ns() -> float:
    """Return what two readings of the clock cost by themselves."""
    clock = time.perf_counter_ns
    return median(-(clock() - clock()) for _ in range(20_000))


def timed(call: Callable[[], object]) -> float:
    """Return the microseconds of one call."""
    clock = time.perf_counter_ns
    start = clock()
    call()
    return max(0.0, clock() - start - clock_ns()) / 1e3


class Still:
    """No garbage collection inside; everything that is alive is left out of later ones."""

    def __enter__(self) -> None:
        clock_ns()
        gc.collect()
        gc.freeze()
        gc.disable()

    def __exit__(self, *error: object) -> None:
        gc.enable()
        gc.unfreeze()


def summary(what: str, case: str, samples: Sequence[float], budget: float | None = None, **more: Any) -> Row:
    """Return the row of some samples."""
    p50, p95 = np.percentile(samples, (50, 95))
    met = None if budget is None else bool(p50 <= budget)
    return Row(what, case, len(samples), float(p50), float(p95), budget=budget, met=met, **more)


def with_exponent(rows: list[Row], sizes: Sequence[int]) -> list[Row]:
    """Put the slope of log p50 over log size on the last row, and judge it."""
    if len(rows) < 2:
        return rows
    slope = float(np.polyfit(np.log10(sizes[: len(rows)]), np.log10([max(row.p50, 1e-3) for row in rows]), 1)[0])
    last = rows[-1]
    return [*rows[:-1], last._replace(exponent=slope, met=last.met is not False and slope <= _FLAT)]


def revision_of(machine: Machine, artifact: str, *changes: tuple[tuple[str, ...], Any]) -> ev.Revise:
    """Return the event that sets places of an artifact."""
    made = tuple(Change(artifact, Op.SET, path, value) for path, value in changes)
    return ev.Revise(Revision(f"r{len(machine.revisions)}", made))


def start_of(machine: Machine, node: str) -> str:
    """Start a node and return its attempt."""
    return next(each.attempt for each in machine.handle(ev.Start(node)) if isinstance(each, ev.Execute))


def reads_of(machine: Machine, attempt: str, places: Iterable[tuple[str, tuple[str, ...]]]) -> tuple[Read, ...]:
    """Return reads of places as they are on an attempt's snapshot."""
    snapshot = machine.snapshot_of(attempt)
    selectors = (Selector(*place) for place in places)
    return tuple(Read(each, evaluate(each, snapshot.value(each.artifact))) for each in selectors)


def cube(n: int) -> tuple[dict[str, Any], list[tuple[str, ...]]]:
    """Return a tree of bounded width, three levels deep and 0 in each leaf, and the places of ``n`` of its leaves."""
    side = range(math.ceil(round(n ** (1 / 3), 6)))
    tree = {f"a{i}": {f"b{j}": {f"c{k}": 0 for k in side} for j in side} for i in side}
    return tree, [(f"a{i}", f"b{j}", f"c{k}") for i, j, k in itertools.product(side, repeat=3)][:n]


def graph_of(parents: dict[str, tuple[str, ...]]) -> Graph:
    """Build a graph whose nodes are already in topological order; the checks of a declaration would take longest."""
    children: dict[str, tuple[str, ...]] = dict.fromkeys(parents, ())
    for name, above in parents.items():
        for parent in above:
            children[parent] += (name,)
    nodes = {name: Node(name, Kind.TOOL, None, above) for name, above in parents.items()}
    return Graph("bench", nodes, tuple(nodes), children, {name: i for i, name in enumerate(nodes)})
