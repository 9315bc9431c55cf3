"""The randomised evidence at small size; ``revise-lab prove`` runs it at large."""

from __future__ import annotations

import numpy as np
import pytest

from revise_lab.core import machine
from revise_lab.core.machine import Machine
from revise_lab.core.oracle import drive, oracle
from revise_lab.lab import proof
from revise_lab.policies import policy
from revise_lab.records import event as ev
from revise_lab.records.revision import patch
from revise_lab.records.value import ABSENT, equal, freeze
from revise_lab.runtime.simulator import Simulator, answer_by_hash
from revise_lab.workloads.synthetic import WorldShape, random_world


def test_random_runs_equal_the_oracle_and_the_auditor_finds_nothing():
    found = proof.random_runs(150)
    assert found["histories"] == []
    assert (found["runs"], found["findings"], found["differences"]) == (150, 0, 0)
    assert len(found["by_policy"]) == len(proof.COMBINATIONS)


def test_an_answer_that_depends_on_the_call_is_bound_by_the_choice_function():
    answer = proof.moody()
    run = proof.run_world(proof.world_of(4, 3), policy("revise_plus"), answer=answer)
    texts = {call.response for node in run.machine.runs.values() if node.current for call in node.current.calls}
    assert any(str(text).endswith(" 1") for text in texts)
    assert proof.truth_of(run, answer)[1] == []


def test_no_policy_is_below_the_floor_and_one_revision_sits_on_it():
    found = proof.floors(45)
    assert found["below_floor"] == 0
    assert found["single_above_floor"] == found["single_above_explained"]
    ratios = {(row["policy"], row["revisions"]): row["ratio"] for row in found["ratios"]}
    assert 1.0 <= ratios["revise_plus", 1] < 1.02
    assert ratios["revise_plus", 3] <= ratios["revise", 3] <= ratios["restart", 3]


@pytest.mark.parametrize("name", ["revise", "revise_plus"])
def test_a_storm_starts_nobody_more_often_than_it_reaches_him_and_leaves_no_memory(name):
    small, large = proof.storm(20, name), proof.storm(300, name)
    for found in (small, large):
        assert (found["state"], found["differences"]) == ("closed", [])
        assert all(found["starts"][node] <= bound for node, bound in found["bound"].items())
    assert large["starts"]["a"] == 301, "each revision reaches it, and each time it starts again"
    assert large["starts"]["b"] == 1, "none reaches it"
    assert (small["live_attempts"], small["cells"]) == (large["live_attempts"], large["cells"])


@pytest.mark.parametrize("every_s", [0.37, 2.6])
@pytest.mark.parametrize(
    ("name", "switches"),
    [("revise", {}), ("revise_plus", {}), ("revise_plus", {"release": "commit", "compensation": "eager"})],
)
def test_a_storm_with_effects_leaves_no_memory_and_the_calm_part_goes_on(name, switches, every_s):
    """Live: each node's committed attempt and one more; a slot holds what is out and what waits to follow it."""
    small, large = (proof.storm(n, name, effects=True, every_s=every_s, **switches) for n in (20, 60))
    for found in (small, large):
        assert (found["state"], found["differences"]) == ("closed", [])
        assert all(found["starts"][node] <= bound for node, bound in found["bound"].items())
        assert found["most_attempts"] <= 2 * 3
        assert found["most_effects"] <= 2 * 3
        assert found["longest_wait"] <= found["calm_revisions"] == {0.37: 3, 2.6: 1}[every_s]
        assert found["published"] - found["undone"] == 3, "in the end each effect is out once"
    assert large["starts"]["b"] == 7, "the first start and every tenth revision"
    assert large["starts"]["c"] == (61 if every_s > 1 else 1), "a parent that never ends starts no child"
    assert (small["most_attempts"], small["most_effects"]) == (large["most_attempts"], large["most_effects"])


def test_runs_with_effects_and_crashes_are_right_in_the_journal_and_in_the_world():
    found = proof.crashes(60)
    assert found["histories"] == []
    assert (found["runs"], found["findings"], found["differences"]) == (60, 0, 0)
    assert min(found["crashes"], found["sent"]) > 60
    assert found["undone"] > 10


def test_a_publication_that_is_sent_again_after_a_crash_is_found(monkeypatch):
    """The comparison with the world can fail: a recovery that sends again instead of asking is caught."""
    recover = Machine._on_recover

    def send_again(self, event):
        recover(self, event)
        self._out[:] = [order._replace(what="publish") if isinstance(order, ev.Act) else order for order in self._out]

    monkeypatch.setitem(machine._HANDLERS, ev.Recover, send_again)
    for allowed in machine._ALLOWED.values():
        monkeypatch.setitem(allowed, ev.Recover, send_again)
    assert any("effects in the world" in history for history in proof.crashes(30)["histories"])


def test_the_guard_is_what_keeps_runs_right():
    """T3: drop the one read that matters and the run ends stale, exactly as often as it is dropped."""
    assert proof.omission(0.0, 40).value == 0.0
    assert proof.omission(1.0, 40).value == 1.0
    half = proof.omission(0.5, 120)
    assert half.low <= 0.5 <= half.high
    assert any(proof.dropped_edge(seed) for seed in range(120)), "some dropped read must show"


def fresh(graph, inputs):
    async def answer(ask):
        return None if ask.kind == "pause" else answer_by_hash(ask)

    return drive(oracle(graph, inputs, {}, answer)).outputs


@pytest.mark.parametrize("name", ["revise", "revise_plus"])
def test_what_runs_again_under_local_unknown_covers_all_that_really_changes(name):
    """T4: node-local taint covers the true impact, whatever is unknown."""
    n_changed = 0
    for seed in range(60):
        world = random_world(np.random.default_rng([4, seed]), WorldShape(unknown=0.5, n_revisions=1))
        graph = world.workflow.graph()
        ((_, revision),) = world.revisions
        before = fresh(graph, world.inputs)
        late = [(1e6, revision)]
        machine = Machine(graph, world.inputs, policy(name, unknown="local"))
        (change,) = revision.changes
        inputs = {**machine.inputs, change.artifact: patch(machine.inputs[change.artifact], change)}
        after = fresh(graph, inputs)
        run = Simulator(graph, world.inputs, policy(name, unknown="local"), revisions=late).run()
        changed = {each for each in {*before, *after} if not equal(before.get(each, ABSENT), after.get(each, ABSENT))}
        again = set(run.executed(1e6 - 1)) | {n for n, state in run.machine.runs.items() if state.n_attempts > 1}
        assert {each for each in changed if each in after} <= again, seed
        assert run.outputs == freeze(after)
        n_changed += len(changed)
    assert n_changed > 30


@pytest.mark.parametrize("seed", [7608, 10238, 22593, 25023, 26283])
def test_an_unknown_node_sees_nothing_behind_a_skipped_one(seed):
    """Found among 50,000 random runs: a right result, on a state that had never existed."""
    found = proof.trial(seed)
    assert (found.n_findings, found.n_differences) == (0, 0), found.history
