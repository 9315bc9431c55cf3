"""Whatever the shape of the graph and whenever revisions come, state and effects are those of stock LangGraph."""

from __future__ import annotations

import asyncio
import os

import pytest

pytest.importorskip("langgraph")

from shapes import SHAPES, reference, run_virtual
from trials import POLICIES, check, revised, stock

N_RUNS = int(os.environ.get("REVISE_LAB_GRAPHS", "180"))
"""How many seeded runs on virtual time; 2,000 are claimed."""
N_REAL = int(os.environ.get("REVISE_LAB_GRAPHS_REAL", "40"))
"""How many with threads and real time; 200 are claimed."""


@pytest.mark.parametrize("name", SHAPES)
def test_a_revised_run_ends_where_a_fresh_one_does(name):
    for seed, policy in enumerate(POLICIES):
        trial = run_virtual(revised(name, seed, policy))
        check(trial, run_virtual(reference(name, trial.final)))


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_many_revised_runs_end_where_langgraph_does_in_a_fresh_process():
    _compare(list(SHAPES), range(1000, 1000 + N_RUNS), run_virtual)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_real_time_and_real_threads():
    """Sync nodes in threads, answers within milliseconds."""
    names = ["sync", "trip", "nested", "sends", "asks", "tools"]
    _compare(names, range(N_REAL), asyncio.run, scale_s=0.004)


def _compare(names, seeds, run, **how):
    """Run each shape under each policy in turn; a process for LangGraph by itself serves some hundred runs."""
    n_revisions = 0
    for some in batched(seeds, 250):
        trials = []
        for seed in some:
            round_, at = divmod(seed, len(names))
            trials.append(run(revised(names[at], seed, POLICIES[round_ % len(POLICIES)], **how)))
            n_revisions += len(trials[-1].planned)
        for trial, outcome in zip(trials, stock([(trial.name, trial.final) for trial in trials]), strict=True):
            check(trial, outcome)
    print(f"{len(seeds)} runs, {n_revisions} revisions, all as LangGraph by itself")
    assert n_revisions >= len(seeds) // 2, "most runs must have been revised"


def batched(seeds, n):
    return (seeds[at : at + n] for at in range(0, len(seeds), n))
