"""Random workflows, revisions and schedules under every policy: the result is always that of a fresh run.

A failing seed is named with its run on one line.
"""

from __future__ import annotations

from collections import Counter
from itertools import product

import numpy as np
import pytest

from revise_lab.core.machine import replay
from revise_lab.policies import policy
from revise_lab.records import event as ev
from revise_lab.runtime.simulator import Simulator, answer_by_hash, truth_of
from revise_lab.workloads.synthetic import WorldShape, random_world

POLICIES = ("restart", "suffix", "revise", "wait")
CHECKS = [
    ("delta", "descendants", "off"),
    ("digest", "descendants", "off"),
    ("digest", "diff", "off"),
    ("digest", "diff", "on"),
]
KNOBS = list(product(CHECKS, ("global", "local"), (None, 1, 2), (1, 2, 3)))
SHAPES = [
    {},
    {"n_nodes": 10, "n_layers": 5, "late_read": 0.6},
    {"router": 0.9, "n_nodes": 9, "n_fields": 2, "n_artifacts": 1, "n_values": 3},
    {"members": 0.9, "structural": 0.6, "n_layers": 3, "n_fields": 1},
    {"unknown": 0.5, "collide": 0.9},
]


def one_run(seed, name, answer=answer_by_hash):
    """Run one world and compare it with the oracle."""
    (check, propagation, extension), unknown, n_slots, n_revisions = KNOBS[seed % len(KNOBS)]
    shape = WorldShape(n_revisions=n_revisions, **SHAPES[seed % len(SHAPES)])
    world = random_world(np.random.default_rng([7, seed]), shape)
    chosen = policy(name, check=check, propagation=propagation, extension=extension, unknown=unknown)
    simulator = Simulator(
        world.workflow,
        world.inputs,
        chosen,
        revisions=world.revisions,
        duration_s=lambda ask: world.durations_s.get(ask.node.partition("[")[0], 1.0),
        answer=answer,
        n_slots=n_slots,
        validate=True,
    )
    try:
        run = simulator.run()
    except Exception as error:
        raise AssertionError(f"seed {seed}, {chosen.name} {chosen.switches}, {n_slots} slots") from error
    truth, wrong = truth_of(run, answer)
    told = f"seed {seed}, {chosen.name} {chosen.switches}, {n_slots} slots: {run.history}"
    assert (wrong, truth.oracle_fresh, run.machine.late_invalid, run.machine.status) == ([], 0, 0, "closed"), told
    n_accepted = sum(isinstance(entry, ev.Accepted) for entry in run.machine.journal)
    assert n_accepted == n_revisions, told
    return run


def _story(run):
    """Count what happened, so that a test can say that its worlds are not tame."""
    kinds = Counter(type(entry).__name__ for entry in run.machine.journal)
    kinds["member"] = any("[" in name for name in run.machine.runs)
    kinds["skipped"] = any(each.active is False for each in run.machine.runs.values())
    return kinds


@pytest.mark.parametrize("name", POLICIES)
def test_random_runs_equal_the_oracle(name):
    stories = Counter()
    for seed in range(150):
        run = one_run(seed, name)
        stories += Counter({kind: 1 for kind, count in _story(run).items() if count})
        if seed % 10 == 0:
            again = replay(run.machine.graph, run.machine.journal, run.machine.policy)
            assert (again.journal, again.fingerprint()) == (run.machine.journal, run.machine.fingerprint()), seed
    assert stories["Closed"] == 150
    assert min(stories[kind] for kind in ("member", "skipped")) >= 20, stories
    seen = {"restart": ("Stop", "Retracted"), "wait": ("Deferred", "Retracted")}.get(
        name, ("Stop", "Rejected", "Retracted")
    )
    assert all(stories[kind] >= (2 if kind == "Retracted" else 5) for kind in seen), stories


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", POLICIES)
def test_five_thousand_random_runs_equal_the_oracle(name, capsys):
    count = sum(one_run(seed, name) is not None for seed in range(150, 1400))
    with capsys.disabled():
        print(f"\n{name}: {count} random runs equal the oracle")


@pytest.mark.parametrize("name", POLICIES)
def test_models_that_never_say_the_same_twice(name):
    """Reuse is right relative to the answers that the committed attempts saw, and to nothing else."""
    for seed in range(40):
        n_calls = Counter()

        def answer(ask, n_calls=n_calls):
            n_calls[ask.key[:4]] += 1
            return f"answer {n_calls.total()}"

        one_run(seed, name, answer)


def test_the_comparison_can_fail():
    """One output swapped behind the machine's back is found."""
    run = one_run(0, "revise")
    name = next(name for name, node in run.machine.runs.items() if node.current)
    run.machine.values[name] = "something else"
    assert any(f"output of {name}" in line for line in truth_of(run)[1])


def test_a_run_is_a_function_of_its_seed():
    histories = [one_run(seed, "revise").history for seed in (3, 3, 4)]
    assert histories[0] == histories[1] != histories[2]
