"""What it costs to be able to revise a LangGraph application: ``revise-lab bench langgraph``.

The same compiled graph is run by LangGraph itself and by :class:`~revise_lab.RevisableGraph`, in turn and within one
process, so that a noisy machine hits both alike; who goes first alternates. The first run is one of the runs: what it looks
up once is paid there.
"""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, TypedDict

import numpy as np

from revise_lab.errors import ConfigError

from .samples import Row

N_NODES, N_PAIRS = 10, 30
BUDGET_PERCENT = 10.0
PARTS = ("10 ms", "no-op")


class State(TypedDict, total=False):
    """State of the graphs that are measured."""

    request: dict[str, Any]
    n0: str
    n1: str
    n2: str
    n3: str
    n4: str
    n5: str
    n6: str
    n7: str
    n8: str
    n9: str


def graph(wait_s: float, *, wide: bool = False) -> Any:
    """Return a compiled graph of ten async nodes, each reading one leaf and what the node before it wrote.

    Parameters
    ----------
    wait_s : float
        How long a node waits for what stands for a model.
    wide : bool
        Whether all run at once, on the leaf alone.
    """
    from langgraph.graph import START, StateGraph

    def node(name: str, before: str | None) -> Any:
        async def body(state: State) -> dict[str, str]:
            found = state["request"]["goal"] if before is None else state[before]  # type: ignore[literal-required]
            if wait_s:
                await asyncio.sleep(wait_s)
            return {name: f"{name} {found[:8]}"}

        return body

    names = [f"n{i}" for i in range(N_NODES)]
    builder: Any = StateGraph(State)
    for name, before in zip(names, [None, *names], strict=False):
        builder.add_node(name, node(name, None if wide else before))
    for before, name in pairwise([START, *names]):
        builder.add_edge(START if wide else before, name)
    return builder.compile()


def pairs(compiled: Any, n: int) -> tuple[list[float], list[float]]:
    """Return the milliseconds of ``n`` runs by LangGraph and by us, in turn.

    What has been imported is left out of the collections of garbage: looking through it takes longer than a run, and which
    run that hits is chance. What the runs leave behind is collected in their time.
    """
    from revise_lab.runtime.adapters.langgraph import RevisableGraph

    given = {"request": {"goal": "a week", "city": "Porto"}}

    made: list[RevisableGraph] = []

    async def ours() -> None:
        if not made:
            made.append(RevisableGraph(compiled))
        await made[0].start(given).result()

    async def stock() -> None:
        await compiled.ainvoke(given)

    async def measure() -> tuple[list[float], list[float]]:
        taken: tuple[list[float], list[float]] = [], []
        for i in range(n):
            for which in (i % 2, 1 - i % 2):
                start = time.perf_counter()
                await (ours() if which else stock())
                taken[which].append(1e3 * (time.perf_counter() - start))
        return taken

    gc.collect()
    gc.freeze()
    try:
        return asyncio.run(measure())
    finally:
        gc.unfreeze()


def bench_langgraph(rows: str | None = None, quick: bool = False) -> list[Row]:
    """Measure runs with nodes of 10 ms against the budget, and what a node that does nothing costs.

    Parameters
    ----------
    rows : str, optional
        Only ``10 ms`` or ``no-op``.
    quick : bool
        A third of the pairs.

    Raises
    ------
    ConfigError
        There is no such part.
    """
    chosen = [part for part in PARTS if not rows or rows in part]
    if not chosen:
        raise ConfigError(f"no row of the benchmark holds {rows!r} - name a part: {', '.join(PARTS)}")
    n = N_PAIRS // 3 if quick else N_PAIRS
    found: list[Row] = []
    for part in chosen:
        for shape in ("chain", "wide"):
            stock, ours = pairs(graph(0.01 if part == "10 ms" else 0.0, wide=shape == "wide"), n)
            case = f"{shape} of {N_NODES} nodes, {part}"
            if part == "10 ms":
                found.append(_overhead(case, stock, ours, BUDGET_PERCENT if shape == "chain" else None))
            else:
                found.append(_each(case, stock, ours))
    return found


def _overhead(case: str, stock: Sequence[float], ours: Sequence[float], budget: float | None) -> Row:
    """Return what all runs together took more, in percent, with the 95th percentile over pairs."""
    over = 100 * (sum(ours) / sum(stock) - 1)
    each = 100 * (np.asarray(ours) / np.asarray(stock) - 1)
    note = f"{np.median(stock):.1f} ms by LangGraph, {np.median(ours):.1f} by us (medians); first pair {each[0]:+.0f} %"
    met = None if budget is None else over <= budget
    p95 = float(np.percentile(each, 95))
    return Row(
        "LangGraph, all runs", case, len(ours), over, p95, "% more", budget, met, ratio=1 + over / 100, note=note
    )


def _each(case: str, stock: Sequence[float], ours: Sequence[float]) -> Row:
    """Return what a node costs more, in microseconds."""
    more = 1e3 * (np.asarray(ours) - np.asarray(stock)) / N_NODES
    p50, p95 = (float(each) for each in np.percentile(more, (50, 95)))
    note = f"{1e3 * np.median(stock) / N_NODES:.0f} us a node by LangGraph, {1e3 * np.median(ours) / N_NODES:.0f} by us"
    return Row("LangGraph, a node", case, len(ours), p50, p95, "us more", note=note)
