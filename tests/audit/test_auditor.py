"""The auditor on journals written by hand: each anomaly, the nearest journal without it, and real runs."""

from __future__ import annotations

import ast
from pathlib import Path

import numpy as np
import pytest

import revise_lab
from revise_lab.audit.auditor import Anomaly, audit
from revise_lab.audit.plain import patched, same
from revise_lab.policies import names, policy
from revise_lab.records import event as ev
from revise_lab.records.revision import Change, Op, Revision
from revise_lab.records.selector import Delta, Marker, Read, Role, Selector, parse_path
from revise_lab.records.value import ABSENT, freeze
from revise_lab.runtime.simulator import simulate
from revise_lab.workloads.synthetic import WorldShape, random_world

A = Anomaly
R1 = Revision("r1", (Change("r", Op.SET, ("f",), "b"),))


def opened(check="digest", **inputs):
    return ev.Opened("w", freeze(inputs or {"r": {"f": "a", "g": 1}}), "p", freeze({"check": check}))


def read(text, seen, marker=Marker.VALUE, role=Role.DATA):
    return Read(Selector(*parse_path(text), marker, role), freeze(seen))


def start(attempt, version, *reads, **parents):
    return ev.Started(attempt, attempt.split("@")[0], version, tuple(parents.items()), reads)


def finish(attempt, output, *reads):
    return ev.Finish(attempt, freeze(output), reads)


def commit(attempt, version):
    return ev.Committed(attempt, version, Delta(attempt, version, (), ()))


def revised(revision=R1, version=2):
    return ev.Revise(revision), ev.Accepted(revision.id, version, (), True)


READ_A = read("r.f", "a")
A1 = (start("A@1", 0), finish("A@1", {"o": "a"}, READ_A), commit("A@1", 1))
A2 = (start("A@2", 2), finish("A@2", {"o": "b"}, read("r.f", "b")), commit("A@2", 3))
C1 = (start("C@1", 1, A="A@1"), finish("C@1", {"o": "a"}, read("A.o", "a")))
OUT_NOW = ev.Rejected("A@1", ev.Evidence("r1"))
GATE = read("R.lane.a", True, Marker.HAS, Role.CONTROL)
ROUTER = (start("R@1", 0), finish("R@1", {"lane": {"a": True}}, READ_A), commit("R@1", 1))
REROUTED = (start("R@2", 2), finish("R@2", {"lane": {"b": True}}, read("r.f", "b")), commit("R@2", 3))

BROKEN = {
    "a read that changed": (A.STALE_COMMIT, (*A1[:2], *revised(version=1), commit("A@1", 2))),
    "a parent that is stale": (A.STALE_COMMIT, (*A1, *C1, *revised(), commit("C@1", 3))),
    "two up": (
        A.STALE_COMMIT,
        (
            *A1, *C1, commit("C@1", 2), start("X@1", 2, C="C@1"), *revised(version=3),
            finish("X@1", 1, read("C.o", "a")), commit("X@1", 4),
        ),
    ),
    "a failure of the old value": (
        A.STALE_COMMIT,
        (start("A@1", 0), *revised(version=1), ev.Fail("A@1", "E", False, (READ_A,)), ev.Failed("A@1", "E", True)),
    ),
    "a sealed stale read": (A.STALE_READ, (*A1, *revised(), ev.Closed(2, 0))),
    "a sealed stale output": (A.STALE_OUTPUT, (*A1, *C1, commit("C@1", 2), *revised(version=3), ev.Closed(3, 0))),
    "a start below a stale parent": (A.MIXED_VERSIONS, (*A1, *revised(), start("C@1", 2, A="A@1"))),
    "a start on a replaced parent": (A.MIXED_VERSIONS, (*A1, *revised(), *A2, start("C@1", 3, A="A@1"))),
    "a move past a read": (
        A.MIXED_VERSIONS,
        (start("A@1", 0), ev.Observe("A@1", (READ_A,)), *revised(version=1), ev.Extend("A@1"), ev.Moved("A@1", 1)),
    ),
    "a join of old and new": (
        A.MIXED_VERSIONS,
        (
            *A1, start("B@1", 1), finish("B@1", {"o": 1}, read("r.g", 1)), commit("B@1", 2),
            start("J@1", 2, A="A@1", B="B@1"), *revised(version=3),
            finish("J@1", 1, read("A.o", "a"), read("B.o", 1)), commit("J@1", 4),
        ),
    ),
    "a branch not taken": (
        A.DEAD_BRANCH,
        (*ROUTER, start("a@1", 1, GATE, R="R@1"), *revised(), *REROUTED, finish("a@1", 1), commit("a@1", 4)),
    ),
    "one version twice": (A.VERSION_LINE, (*A1, *revised(version=1))),
    "an older retraction": (A.VERSION_LINE, (*A1, ev.Retracted("A", 1))),
    "one id twice": (A.ATTEMPT_ID, (*A1, *revised(), start("A@1", 2))),
    "two ends": (A.ENDED_TWICE, (*A1, ev.Stop("A@1", ""))),
    "a commit without an end": (A.ENDED_TWICE, (start("A@1", 0), commit("A@1", 1))),
    "a start after the cancel": (A.START_REFUSED, (ev.Cancel(), start("A@1", 0))),
    "a start after the seal": (A.START_REFUSED, (*A1, ev.Closed(1, 0), start("B@1", 1))),
    "a stopped commit": (A.COMMIT_AFTER_STOP, (*A1[:1], ev.Stop("A@1", ""), A1[2])),
    "a cancelled commit": (A.COMMIT_AFTER_STOP, (*A1[:2], ev.Cancel(), A1[2])),
    "a read of nothing that was there": (A.CONTRADICTION, (start("A@1", 0), ev.Observe("A@1", (read("r.f", "z"),)))),
    "a read of the newer state": (
        A.CONTRADICTION,
        (start("A@1", 0), *revised(version=1), ev.Observe("A@1", (read("r.f", "b"),))),
    ),
    "a revision that cannot be": (
        A.CONTRADICTION,
        revised(Revision("r1", (Change("r", Op.SET, ("none", "x"), 1),)), 1),
    ),
    "valid work rejected": (A.NEEDLESS, (*A1[:2], *revised(Revision("r1", (Change("r", Op.SET, ("g",), 2),)), 1), OUT_NOW)),
    "a result that nobody heard of": (A.LOST, (*A1[:2], ev.Closed(1, 0))),
    "a late result that nobody heard of": (A.LOST, (*A1[:1], ev.Stop("A@1", ""), A1[1], ev.Close())),
    "a revision without an answer": (A.LOST, (*A1, ev.Revise(R1), ev.Closed(1, 0))),
}  # fmt: skip


@pytest.mark.parametrize("name", BROKEN)
def test_an_anomaly_is_named_with_its_witness(name):
    anomaly, entries = BROKEN[name]
    found = audit([opened(), *entries])
    named = [each for each in found if each.anomaly is anomaly]
    assert named, "\n".join(map(str, found))
    assert {each.anomaly for each in found} - {anomaly} <= ({A.STALE_READ} if anomaly is A.STALE_OUTPUT else set())
    assert named[0].positions == tuple(sorted(named[0].positions))
    assert max(named[0].positions) <= len(entries)
    assert str(anomaly) in str(named[0])


CLEAN = {
    "a chain": (*A1, *C1, commit("C@1", 2), ev.Closed(2, 0)),
    "a recompute": (*A1, *revised(), *A2, ev.Closed(3, 0)),
    "there and back": (
        *A1[:2], *revised(version=1), *revised(Revision("r2", (Change("r", Op.SET, ("f",), "a"),)), 2), commit("A@1", 3),
    ),
    "another field": (*A1[:2], *revised(Revision("r1", (Change("r", Op.SET, ("g",), 2),)), 1), commit("A@1", 2)),
    "a rejection": (*A1[:2], *revised(version=1), OUT_NOW),
    "a late result": (*A1[:1], ev.Stop("A@1", ""), A1[1], ev.Discarded("A@1"), start("A@2", 0)),
    "a stop": (*A1[:1], ev.Stop("A@1", ""), ev.Stopped("A@1"), ev.Cancel()),
    "a refusal": (*A1, ev.Revise(R1), ev.Refused("r1", "StaleBase", ""), ev.Closed(1, 0)),
    "twice": (*A1, *revised(), ev.Revise(R1), ev.Duplicate("r1"), *A2, ev.Closed(3, 0)),
    "a move": (
        start("A@1", 0), *revised(version=1), ev.Extend("A@1"), ev.Moved("A@1", 1), finish("A@1", 1, read("r.f", "b")),
    ),
    "a retraction": (*ROUTER, start("a@1", 1, GATE, R="R@1"), finish("a@1", 1), commit("a@1", 2), *revised(version=3),
                     start("R@2", 3), finish("R@2", {"lane": {}}, read("r.f", "b")), commit("R@2", 4), ev.Retracted("a", 5),
                     ev.Closed(5, 0)),
    "a pin": (
        *A1, *revised(Revision("r1", (Change("A", Op.OVERRIDE, ("o",), "pin"),))), start("C@1", 2, A="A@1"),
        finish("C@1", 1, read("A.o", "pin")), commit("C@1", 3), ev.Closed(3, 0),
    ),
    "a pin that comes first": (*A1[:1], *revised(Revision("r1", (Change("A", Op.OVERRIDE, ("o",), "pin"),)), 1), A1[1],
                               commit("A@1", 2), start("C@1", 2, A="A@1"), finish("C@1", 1, read("A.o", "pin"))),
    "a pin taken away": (
        *A1, *revised(Revision("r1", (Change("A", Op.OVERRIDE, ("o",), "pin"),))),
        *revised(Revision("r2", (Change("A", Op.WITHDRAW, ("o",)),)), 3), start("C@1", 3, A="A@1"),
        finish("C@1", 1, read("A.o", "a")), commit("C@1", 4), ev.Closed(4, 0),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CLEAN)
def test_a_journal_without_anomaly_is_clean_wherever_it_ends(name):
    entries = [opened(), *CLEAN[name]]
    for end in range(1, len(entries) + 1):
        assert not audit(entries[:end]), end
    assert not audit(ev.from_json(ev.to_json(entry)) for entry in entries)


def test_under_delta_a_rejection_of_equal_work_is_no_anomaly():
    there_and_back = (*revised(version=1), *revised(Revision("r2", (Change("r", Op.SET, ("f",), "a"),)), 2))
    assert not audit([opened("delta"), *A1[:2], *there_and_back, OUT_NOW])
    assert audit([opened("digest"), *A1[:2], *there_and_back, OUT_NOW])[0].anomaly is A.NEEDLESS


def test_a_finding_tells_the_run_on_one_line():
    found = audit(
        [opened(), *A1[:1], ev.Observe("A@1", (READ_A,)), *revised(version=1), finish("A@1", 1), commit("A@1", 2)]
    )
    assert found[0].history == "start A; read A r.f; rev r1; finish A; [committed A@1]"
    assert str(found[0]).startswith("stale commit: A@1 r.f = 'a', now 'b' (journal 2, 6) - ")


@pytest.mark.parametrize(
    ("value", "op", "path", "new", "expected"),
    [
        ({"a": 1}, "set", ("b",), 2, {"a": 1, "b": 2}),
        ({"a": {"b": 1}}, "set", ("a", "b"), 2, {"a": {"b": 2}}),
        ({"a": 1, "b": 2}, "delete", ("a",), None, {"b": 2}),
        ({"l": (1,)}, "append", ("l",), 2, {"l": (1, 2)}),
        ((1, 3), "insert", (1,), 2, (1, 2, 3)),
        ((1, 2, 3), "remove", (1,), None, (1, 3)),
        (({"a": 1},), "set", (0, "a"), 2, ({"a": 2},)),
        ("anything", "set", (), 2, 2),
    ],
)
def test_revisions_are_applied_by_themselves(value, op, path, new, expected):
    assert patched(value, op, path, new) == expected


@pytest.mark.parametrize(("value", "path"), [((), (0,)), ({}, ("a", "b")), ({}, (0,)), (1, ("a",)), (("a",), ("0",))])
def test_a_place_that_is_not_there_cannot_be_set(value, path):
    with pytest.raises((KeyError, IndexError, TypeError)):
        patched(value, "set", path, 1)


@pytest.mark.parametrize(
    ("a", "b", "expected"),
    [(1, 1, True), (1, 1.0, False), (1, True, False), (float("nan"), float("nan"), True), (ABSENT, None, False),
     ({"a": (1,)}, {"a": (1,)}, True), ((1, 2), (2, 1), False), ({}, (), False), ((1,), (1.0,), False)],
)  # fmt: skip
def test_values_are_the_same_when_no_program_can_tell_them_apart(a, b, expected):
    assert same(a, b) is expected
    assert same(freeze(a), freeze(b)) is expected


def test_it_shares_no_selector_overlap_or_diff_with_what_it_judges():
    home = Path(revise_lab.__file__).parent / "audit"
    taken = {
        f"{node.module}.{each.name}"
        for name in ("auditor", "plain")
        for node in ast.walk(ast.parse((home / f"{name}.py").read_text()))
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("revise_lab")
        for each in node.names
    }
    assert taken == {"revise_lab.records.event", "revise_lab.records.value.ABSENT"}


@pytest.mark.parametrize("seed", range(12))
def test_random_runs_are_clean_under_every_policy_that_checks(seed):
    """Not under `absorber`, which keeps stale reads by its own rule: tests/policies/test_rollback.py."""
    world = random_world(np.random.default_rng(seed), WorldShape(n_revisions=1 + seed % 4))
    for name in (name for name in names() if policy(name).switches.check != "none"):
        run = simulate(
            world.workflow,
            world.inputs,
            name,
            revisions=world.revisions,
            duration_s=lambda ask: world.durations_s.get(ask.node.partition("[")[0], 1.0),
        )
        assert not audit(run.machine.journal), name
