"""The explorer: what it says of every scenario, and that what it says can be believed."""

from __future__ import annotations

import re
from collections import defaultdict
from pathlib import Path
from random import Random

import pytest

from revise_lab.audit.scenario import FAILED, Required, Scenario, Step, rev
from revise_lab.audit.scenarios import SCENARIOS
from revise_lab.audit.truth import current_truth
from revise_lab.errors import ReviseLabError
from revise_lab.policies import policy
from revise_lab.runtime import explore as explorer
from revise_lab.runtime.explore import (
    NoSuchMove,
    combinations,
    effect_combinations,
    explore,
    explore_all,
    label,
    replay_line,
    schedules,
)
from revise_lab.runtime.states import Merged, final_of
from revise_lab.runtime.world import World

FEW_ORDERS = [
    "before_first_read",
    "late_read",
    "revision_first",
    "commit_first",
    "aba_together",
    "half_refused",
    "duplicate",
    "ancestor_deleted",
    "flip",
    "control_read",
    "retry",
    "late_result",
    "after_the_end",
    "failure_mended",
    "no_gate",
    "dead_branch",
    "unknown_reads_all",
    "one_slot",
    "cancelled",
    "equal_output",
    "chain_of_three",
    "stale_base",
    "pin_withdrawn",
    "unknown_reads_all",
]
EFFECTS = [name for name, each in SCENARIOS.items() if each.has_effects]
PLAIN = [name for name in SCENARIOS if name not in EFFECTS]
PLUS, PAPER = policy("revise_plus"), policy("revise")


def _pairs():
    for name in SCENARIOS:
        for how in (PAPER, PLUS):
            is_slow = name == "storm" or (how is PAPER and name not in FEW_ORDERS)
            yield pytest.param(name, how, id=f"{name}-{how.name}", marks=pytest.mark.slow if is_slow else ())


@pytest.mark.parametrize(("name", "how"), list(_pairs()))
def test_every_order_of_a_scenario_comes_to_what_it_requires(name, how):
    row = explore(SCENARIOS[name], how, n_audited=20)
    assert not row["findings"], row["findings"][0]
    assert row["both_orders"] == row["racing_pairs"]
    assert row["audited"] == min(20, row["histories"])


@pytest.mark.slow
@pytest.mark.parametrize("how", combinations(), ids=label)
def test_every_order_under_every_combination_of_switches(how):
    rows = explore_all(PLAIN, [how], n_audited=20)
    bad = [(row["name"], row["findings"][0]) for row in rows if row["findings"]]
    assert not bad, bad[0]
    assert all(row["both_orders"] == row["racing_pairs"] for row in rows)
    print(f"{label(how)}: {sum(row['states'] for row in rows)} states, {sum(row['audited'] for row in rows)} audited")


def _worth_a_test(how):
    """Leave out the eager variants of policies that have nothing of their own to undo early; the command has them all."""
    return how.switches.compensation == "lazy" or (how.name.startswith("revise") and how.switches.release == "commit")


@pytest.mark.slow
@pytest.mark.parametrize("how", [*filter(_worth_a_test, effect_combinations())], ids=label)
def test_every_order_of_effects_under_every_release_and_compensation(how):
    rows = explore_all(EFFECTS, [how], n_audited=20)
    bad = [(row["name"], row["findings"][0]) for row in rows if row["findings"]]
    assert not bad, bad[0]
    assert all(row["both_orders"] == row["racing_pairs"] for row in rows)


@pytest.mark.slow
def test_twenty_thousand_schedules_are_audited_from_their_journals():
    rows = explore_all(SCENARIOS, n_audited=21_000 // (2 * len(SCENARIOS)))
    for row in rows:
        print(f"{row['name']:28} {row['policy']:40} {row['histories']:>12} interleavings, {row['audited']:>6} audited")
    assert sum(row["audited"] for row in rows) >= 20_000
    assert not [finding for row in rows for finding in row["findings"]]


def test_the_combinations_are_all_that_are_not_refused():
    published = ("restart", "suffix", "revise", "revise_plus", "wait")
    found = [label(how) for how in combinations() if how.name in published]
    assert len(found) == len(set(found)) == 5 * 2 * (1 + 2 + 2)
    assert not [how for how in combinations() if how.switches.check == "none"], (
        "what does not check is not proved sound"
    )
    assert not [each for each in found if "delta diff" in each or "delta descendants local on" in each]


@pytest.mark.parametrize("how", [PAPER, PLUS], ids=label)
def test_merged_states_say_what_all_schedules_say(how):
    """The paths of the merged graph are the schedules: their number, their outcomes and their counts agree."""
    for name in FEW_ORDERS:
        merged = Merged(SCENARIOS[name], how)
        runs = list(schedules(merged.scenario, how, 10**6, 0, Random(0)))
        assert len(runs) == len({history for history, _ in runs}) == merged.histories()
        finals = {repr(final_of(world)) for _, world in runs if world.machine.state != "cancelled"}
        assert finals == set(map(repr, merged.finals))
        starts = [[entry for entry in world.machine.journal if type(entry).__name__ == "Started"] for _, world in runs]
        for node in {entry.node for each in starts for entry in each}:
            numbers = [sum(entry.node == node for entry in each) for each in starts]
            assert merged.counts()[f"start {node}"] == (min(numbers), max(numbers))


@pytest.mark.parametrize("name", ["not_current", "newest_delta_only", "flip", "member_removed", "two_of_one_field"])
@pytest.mark.parametrize("how", [PAPER, PLUS, policy("wait")], ids=label)
def test_states_with_one_fingerprint_have_one_future(name, how):
    """Whatever way led to a state, the same moves are possible and lead to the same states."""
    futures = defaultdict(set)
    for history, _ in schedules(SCENARIOS[name], how, 40, 30, Random(1)):
        world = World(SCENARIOS[name], how)
        keys = [world.key()]
        for move in history:
            futures[keys[-1]].add(("moves", tuple(sorted(world.moves()))))
            world.do(move)
            keys.append(world.key())
            futures[keys[-2]].add((move, keys[-1]))
    for future in futures.values():
        assert len(future) == len({what for what, _ in future})


def test_a_line_of_moves_is_executed_and_what_is_decided_is_not_a_move():
    line = "start A; read A r.f; rev r1; [stop A@1]; start A; read A; late A; [discarded A@1]; finish A"
    world, wrong = replay_line(SCENARIOS["two_of_one_field"], line, PLUS)
    assert not wrong
    assert world.machine.values["A"] == {"o": "b"}
    with pytest.raises(NoSuchMove, match=r"'finish A' is no move of 'late_read' here - choose one of start A; rev r1"):
        replay_line(SCENARIOS["late_read"], "finish A", PLUS)


@pytest.mark.parametrize("undo", ["vanish A/e; find A/e; compensate A/e", "find A/e; compensate A/e; unland A/e"])
@pytest.mark.parametrize(
    ("name", "how", "crash"),
    [
        ("undo_and_kill", PAPER, "finish A; kill"),
        ("undo_and_power", PAPER, "finish A; power; start A; read A r.f; finish A"),
        ("undo_and_power", policy("revise_plus", release="commit"), "finish A; power; start A; read A r.f; finish A"),
    ],
)
def test_what_an_undo_has_left_for_is_undone_once_more_and_rightly(name, how, crash, undo):
    """After the crash the target says that the effect is there; the undo of the dead process may land at any time."""
    line = (
        "start A; read A r.f; finish A; send A/e; rev r1; start A; read A r.f; finish A; rev r2; start A; read A r.f; "
        f"land A/e; answer A/e; compensate A/e; {crash}; {undo}; unland A/e; answer A/e; "
        "send A/e; land A/e:1; answer A/e:1; close"
    )
    _, wrong = replay_line(SCENARIOS[name], line, how)
    assert not wrong


def test_walks_that_keep_meeting_the_same_few_are_given_up(monkeypatch):
    walked = []
    run = explorer._schedule
    monkeypatch.setattr(explorer, "_schedule", lambda *args: walked.append(1) or run(*args))
    most = explore(SCENARIOS["equal_output"], PLUS)["histories"]
    found = [history for history, _ in schedules(SCENARIOS["equal_output"], PLUS, most, most - 1, Random(0))]
    assert len(found) == len(set(found)) == most
    assert len(walked) < 4 * most


def test_a_run_that_could_go_on_for_ever_is_found():
    merged = Merged(SCENARIOS["no_op"], PLUS)
    merged.edges = [[(1, ())], [(2, ()), (0, ())], []]
    assert merged._sorted() == [2], "the two states of the cycle have no order"


def test_a_wrong_requirement_is_reported_for_outcomes_counts_and_races():
    right = SCENARIOS["commit_first"]

    def with_required(*required):
        return Scenario("x", "", right.steps, right.inputs, right.revisions, Required(*required), holds=right.holds)

    finals = right.required.finals
    found = explore(with_required(({"A": {"o": "b"}},)), PLUS)["findings"]
    assert found[0]["anomaly"] == "not the required outcome"
    assert replay_line(right, found[0]["line"], PLUS)[1] == []
    assert explore(with_required((*finals, {"A": FAILED})), PLUS)["findings"][0]["anomaly"] == "outcome never reached"
    assert explore(with_required(finals, {"": {"start A": (1, 1)}}), PLUS)["findings"][0]["anomaly"] == "count"
    assert not explore(with_required(finals, {"restart delta": {"start A": (1, 1)}}), PLUS)["findings"]
    race = explore(with_required(finals, {}, (("rev r1", "close"), ("start A", "start C"))), PLUS)
    assert race["both_orders"] == ["start A | start C"]
    assert [each["detail"] for each in race["findings"]] == ["rev r1 | close"]


def test_the_truth_of_a_scenario_takes_branches_members_pins_and_failures():
    steps = (
        Step("P", ["r.m"], lambda m: {"m": m}),
        Step("w", ["P.m.*"], lambda v: {"o": v}, member_of=("P", "m")),
        Step("R", ["r.f"], lambda f: {"o": f}, branch=(["r.g"], lambda out, g: g)),
        Step("a", ["R.o"], after=("R",), when=("R", "a")),
        Step("b", ["a.o"], lambda o: {"o": str(o)}, after=("a", "R")),
        Step("x", ["r.f"], lambda f: 1 / 0, after=("R",)),
        Step("y", ["x.o"], after=("x",)),
    )
    change = rev("r1", ("r.g", "b"), ("r.m[0]", "v", "insert"), (("w[v]", "o"), 9, "override"))
    scenario = Scenario("t", "", steps, {"r": {"m": ["u", "u"], "f": 1, "g": "a"}}, (change,), Required(()))
    _, before, _ = current_truth(scenario, ())
    assert before["P"] == {"m": {"u": "u", "u#1": "u"}}
    assert before["R"] == {"o": 1, "lane": {"a": True}}
    assert before["b"] == {"o": "1"}
    assert before["x"] == FAILED
    assert "y" not in before
    inputs, after, _ = current_truth(scenario, ("r1",))
    assert inputs["r"] == {"m": ("v", "u", "u"), "f": 1, "g": "b"}
    assert "a" not in after
    assert after["b"] == {"o": "None"}
    assert after["w[u#1]"] == {"o": "u"}


def test_shares_are_even_and_nobody_gets_more_than_it_has():
    assert explorer._shares([5, 100, 1], 30) == [5, 24, 1]
    assert explorer._shares([5, 1], 30) == [5, 1]


def test_walks_are_repeatable_distinct_and_complete():
    scenario = SCENARIOS["two_fields"]
    first, again = ([history for history, _ in schedules(scenario, PLUS, 60, 30, Random(3))] for _ in range(2))
    assert first == again
    assert len(set(first)) == 60
    assert {history[-1] for history in first} == {"close"}


def test_rows_come_in_order_from_any_number_of_processes():
    one = explore_all(["aba", "late_read"], [PAPER, PLUS], 30)
    two = explore_all(["aba", "late_read"], [PAPER, PLUS], 30, jobs=2)
    assert [{**row, "seconds": 0} for row in one] == [{**row, "seconds": 0} for row in two]
    assert [row["name"] for row in one] == ["aba", "aba", "late_read", "late_read"]
    with pytest.raises(ReviseLabError, match="no scenario is named 'abba'"):
        explore_all(["abba"])


def test_every_adversarial_ordering_is_explored():
    page = (Path(__file__).parents[2] / "docs" / "orderings.md").read_text()
    rows = [line for line in page.splitlines() if line.startswith("| ") and "must come out" not in line]
    assert len(rows) == 40
    for row in rows:
        named = re.findall(r"`([^`]+)`", row.split("|")[3])
        assert named, row
        for name in named:
            known = name in SCENARIOS or name.startswith("revise-lab ") or (Path(__file__).parents[2] / name).is_file()
            assert known, name
