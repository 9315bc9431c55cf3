"""What sweeps over serving runs cost: ``revise-lab bench serving``.

A run is 0.7 x capacity of the operating point, family S12, half of the workflows revised, each compared with the oracle.
Every run has a fresh process, so that its peak memory is its own; what a run took is said on stderr as soon as it ends.
"""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import NamedTuple

import numpy as np

from revise_lab.errors import ConfigError, ResultsError

from .samples import Row, say

SIZES = (6_000, 12_000, 24_000, 48_000)
BUDGET_S, BUDGET_EXPONENT, BUDGET_MB = 180.0, 1.1, 1000.0
PARTS = ("pair", "growth")


class Cost(NamedTuple):
    """What one run took, from its first arrival to its last row."""

    n: int
    wall_s: float
    cpu_s: float
    peak_mb: float
    n_correct: int


def bench_serving(rows: str | None = None, quick: bool = False) -> list[Row]:
    """Measure two policies side by side on two processes, and how a run grows with its workflows.

    Parameters
    ----------
    rows : str, optional
        Only ``pair`` or ``growth``.
    quick : bool
        A fortieth of the workflows; the budget shrinks with them.

    Raises
    ------
    ConfigError
        There is no such part.
    """
    chosen = [part for part in PARTS if not rows or rows in part]
    if not chosen:
        raise ConfigError(f"no row of the benchmark holds {rows!r} - name a part: {', '.join(PARTS)}")
    scale = 40 if quick else 1
    found: list[Row] = []
    if "pair" in chosen:
        found += _pair(SIZES[2] // scale, BUDGET_S / scale)
    if "growth" in chosen:
        found += _growth([size // scale for size in SIZES])
    return found


def _pair(n: int, budget_s: float) -> list[Row]:
    started = time.monotonic()
    costs = _run([(n, "suffix"), (n, "revise")], n_processes=2)
    wall_s = time.monotonic() - started
    note = f"{1e3 * sum(cost.cpu_s for cost in costs) / (2 * n):.2f} ms CPU a workflow; start of processes included"
    case = f"{n:,} workflows x suffix, revise"
    return [_row(case, [wall_s], "s", budget_s, note), _memory(case, costs)]


def _growth(sizes: Sequence[int]) -> list[Row]:
    longest_first = [(size, "revise") for size in reversed(sizes)]
    costs = _run(longest_first, n_processes=2)[::-1]
    rows = [_row(f"{cost.n:,} workflows", [cost.cpu_s], "CPU s", None, f"{cost.wall_s:.1f} s wall") for cost in costs]
    slope = float(np.polyfit(np.log10(sizes), np.log10([cost.cpu_s for cost in costs]), 1)[0])
    met = slope <= BUDGET_EXPONENT
    rows[-1] = rows[-1]._replace(exponent=slope, met=met, note=f"{rows[-1].note}; exponent at most {BUDGET_EXPONENT}")
    return [*rows, _memory(f"{sizes[-1]:,} workflows", costs)]


def _row(case: str, samples: Sequence[float], unit: str, budget: float | None, note: str = "") -> Row:
    p50, p95 = np.percentile(samples, (50, 95))
    met = None if budget is None else bool(p50 <= budget)
    return Row("serving", case, len(samples), float(p50), float(p95), unit, budget, met, note=note)


def _memory(case: str, costs: Sequence[Cost]) -> Row:
    return _row(case, [max(cost.peak_mb for cost in costs)], "MB", BUDGET_MB, "peak of a process, imports included")


def _run(runs: Sequence[tuple[int, str]], n_processes: int) -> list[Cost]:
    with ProcessPoolExecutor(n_processes, mp_context=get_context("spawn"), max_tasks_per_child=1) as pool:
        costs = []
        for (_, policy), cost in zip(runs, pool.map(_cost, *zip(*runs, strict=True)), strict=True):
            say(f"{cost.n:,} workflows, {policy}: {cost.wall_s:.1f} s, {cost.cpu_s:.1f} of them CPU")
            costs.append(cost)
    for cost in costs:
        if cost.n_correct != cost.n:
            raise ResultsError(f"{cost.n - cost.n_correct} of {cost.n} workflows differ from the oracle")
    return costs


def _cost(n: int, policy: str) -> Cost:
    from revise_lab.lab.serving_cells import operating_point, serve

    point = operating_point()
    names = ("prompt_tokens", "shared_tokens", "output_tokens", "profile", "n_replicas", "n_tenants")
    started, cpu_s = time.monotonic(), time.process_time()
    run = serve(0, policy, 0.7 * point["capacity_per_s"], n_workflows=n, **{name: point[name] for name in names})
    wall_s, cpu_s = time.monotonic() - started, time.process_time() - cpu_s
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (1e6 if sys.platform == "darwin" else 1e3)
    return Cost(n, wall_s, cpu_s, peak, sum(row.correct for row in run.rows))
