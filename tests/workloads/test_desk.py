"""The desks: every way of checking meets the same cases, and the truth is found without any of their machinery."""

from __future__ import annotations

import os
from collections import Counter as Counts

import numpy as np
import pytest

from revise_lab.records.condition import Condition, Verdict
from revise_lab.workloads.desk import (
    DESKS,
    DURABLE,
    MUTATIONS,
    REFUND_EXAMPLE,
    case_of,
    exhaustive,
    refund_of_80,
    rules_of,
)
from revise_lab.workloads.desk_trial import BASELINES, HOW, Counter, baseline_premises

N = int(os.environ.get("REVISE_LAB_CASES", "2"))


def executions(how, n=N, desks=tuple(DESKS), mutations=tuple(MUTATIONS), **options):
    counter = Counter(how, **options)
    for desk in desks:
        for name in mutations:
            rng = np.random.default_rng(3)
            for between in (False, True):
                for _ in range(n):
                    case = case_of(DESKS[desk], rng)
                    yield name, counter.execute(case, MUTATIONS[name](case, rng), between=between)


@pytest.mark.parametrize(
    ("what", "verdict"),
    [("renamed", "REFRESH"), ("limit_90", "KEEP"), ("limit_50", "REPLAN"), ("already_refunded", "BLOCK")],
)
def test_the_refund_of_80(what, verdict):
    case = refund_of_80()
    for how in ("selective", "full_rescan"):
        found = Counter(how).execute(case, REFUND_EXAMPLE[what](case))
        assert (found.verdict, found.truth) == (verdict, verdict)
        assert found.n_evaluated == (1 if how == "selective" else 7)


def test_there_are_five_desks_and_fifteen_kinds_of_mutation_and_every_case_is_justified():
    assert (len(DESKS), len(MUTATIONS)) == (5, 15)
    rng = np.random.default_rng(0)
    for desk in DESKS.values():
        assert sum(isinstance(rule, Condition) for rule in rules_of(desk)) == 6
        for _ in range(50):
            case = case_of(desk, rng)
            assert exhaustive(case, case.state, {}) is Verdict.KEEP


def test_each_kind_means_what_its_name_says():
    verdicts = {name: Counts() for name in MUTATIONS}
    for name, found in executions("no_check", 8, ("refund", "access")):
        verdicts[name][str(found.truth)] += 1
    assert {name: sorted(counts) for name, counts in verdicts.items()} == {
        "other field": ["KEEP"], "other resource": ["KEEP"], "renamed": ["REFRESH"], "cap lowered": ["KEEP"],
        "cap below": ["REPLAN"], "done elsewhere": ["BLOCK"], "another done": ["KEEP"], "authority revoked": ["BLOCK"],
        "phantom": ["BLOCK"], "field gone": ["BLOCK", "REPLAN"], "wrong type": ["BLOCK", "REPLAN"],
        "there and back": ["KEEP"], "write skew": ["REPLAN"], "policy version": ["REFRESH"],
        "validator version": ["REFRESH", "REPLAN"],
    }  # fmt: skip


@pytest.mark.parametrize("how", ["selective", "full_rescan"])
def test_with_complete_capture_every_verdict_is_the_true_one(how):
    found = list(executions(how))
    assert [(name, each) for name, each in found if each.verdict != each.truth] == []
    assert not any(each.false_allow or each.false_block for _, each in found)
    assert {str(each.verdict) for _, each in found} == {"KEEP", "REFRESH", "REPLAN", "BLOCK"}
    n_evaluated = np.mean([each.n_evaluated for _, each in found])
    assert n_evaluated < 2 if how == "selective" else n_evaluated >= 7


def test_what_the_others_let_through_and_hold_back():
    wrong = {}
    for how in HOW[2:]:
        found = list(executions(how, 2, ("booking",)))
        wrong[how] = (
            {name for name, each in found if each.false_allow}, {name for name, each in found if each.false_block},
        )  # fmt: skip
    unjustified = {
        "cap below",
        "done elsewhere",
        "authority revoked",
        "phantom",
        "field gone",
        "wrong type",
        "write skew",
    }
    assert wrong["no_check"] == (unjustified | {"validator version"}, set())
    assert wrong["target_only"][0] == (unjustified | {"validator version"}) - {"done elsewhere"}
    assert wrong["target_only"][1] == {"another done"}
    assert wrong["version_check"][0] == {"validator version"}, "no version of the state tells of a rule that changed"
    assert wrong["version_check"][1] >= {"renamed", "other field", "cap lowered", "there and back", "policy version"}
    assert wrong["always_replan"][0] == set()


def test_what_the_baselines_look_at():
    before, other, mine = {"order": "1", "policy": "1"}, {"order": "1", "policy": "2"}, {"order": "2", "policy": "1"}
    said = {
        name: [releases(before, now, "order") for now in (before, other, mine)] for name, releases in BASELINES.items()
    }
    assert said == {
        "version_check": [True, False, False],
        "always_replan": [False, False, False],
        "target_only": [True, True, False],
        "no_check": [True, True, True],
    }
    assert baseline_premises("version_check", before, "order") == before
    assert baseline_premises("target_only", before, "order") == {"order": "1"}
    assert baseline_premises("no_check", before, "order") == {}


def test_compare_and_set_on_the_target_alone_commits_what_the_policy_forbids():
    """The scheduled history across two resources: validated, then the limit falls, then it is published."""
    wrong = {}
    for how in ("target_only", "selective"):
        counter, rng = Counter(how), np.random.default_rng(5)
        cases = [case_of(DESKS["refund"], rng) for _ in range(100)]
        found = [counter.execute(case, MUTATIONS["cap below"](case, rng), between=True) for case in cases]
        wrong[how] = sum(each.false_allow for each in found)
    assert wrong == {"target_only": 100, "selective": 0}


def test_a_lost_edge_lets_through_what_it_would_have_stopped_and_a_known_loss_does_not():
    rng = np.random.default_rng(8)
    lost = set()

    def omit(name, selector):
        return "within cap" in name and counter.n in lost and selector.path == ("limit",)

    counter = Counter(omit=omit)
    lost |= {n for n in range(1, 41) if rng.random() < 0.3}
    for n in range(1, 41):
        case = case_of(DESKS["refund"], rng)
        found = counter.execute(case, MUTATIONS["cap below"](case, rng))
        assert found.false_allow == (n in lost)
    assert 5 < len(lost) < 20
    case = case_of(DESKS["refund"], rng)
    lost.add(41)
    found = counter.execute(case, MUTATIONS["cap below"](case, rng), partial=True)
    assert (found.released, str(found.verdict)) == (False, "REPLAN")


def test_of_the_ten_durable_changes_six_reach_one_condition():
    for desk in DESKS.values():
        case = case_of(desk, np.random.default_rng(1))
        reached = []
        for name, change in DURABLE:
            counter = Counter()
            for resource, value in case.state.items():
                counter.target.set(resource, value)
            counter.pending.propose(case.action("a", refresh=False))
            n = counter.pending.graph.n_evaluated
            counter.target.set(*change(case))
            counter.pending.changed()
            reached.append((name, counter.pending.graph.n_evaluated - n))
        assert sum(n for _, n in reached) == 6, reached
        assert {n for _, n in reached} == {0, 1}
