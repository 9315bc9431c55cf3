"""The auditor on effects: each anomaly in a journal written by hand, and in a good journal that was doctored."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import revise_lab
from revise_lab.audit.auditor import Anomaly, audit
from revise_lab.policies import policy
from revise_lab.records import event as ev
from revise_lab.records.effect import Answer, Effect, EffectState, Intent, Reversibility
from revise_lab.records.revision import Change, Op, Revision
from revise_lab.records.selector import Delta, Read, Selector, parse_path
from revise_lab.records.value import ABSENT, freeze
from revise_lab.records.workflow import Workflow
from revise_lab.runtime.simulator import simulate

A = Anomaly
TO_B = Revision("r1", (Change("r", Op.SET, ("f",), "b"),))


def opened(**switches):
    known = {"check": "digest", "release": "commit", "compensation": "lazy", "approval": "off"} | switches
    return ev.Opened("w", freeze({"r": {"f": "a", "g": 1}}), "p", freeze(known))


def effect(payload, kind="K", target=""):
    return Effect("e", payload, Reversibility(kind), target)


def made(attempt, version, read, seen, *effects, **parents):
    """Return an attempt that made one read, staged effects and was committed at ``version``."""
    node = attempt.split("@")[0]
    reads = (Read(Selector(*parse_path(read)), freeze(seen)),)
    return (
        ev.Started(attempt, node, version - 1, tuple(parents.items())),
        ev.Finish(attempt, freeze({"o": seen}), reads, effects=effects),
        ev.Committed(attempt, version, Delta(node, version, (), ())),
    )


def step(state, sent=None, node="A", epoch=0, attempt="A@1"):
    return ev.Effected(Intent("w", node, "e", epoch), EffectState(state), attempt, sent)


def said(answer, node="A", epoch=0):
    return ev.Answered(Intent("w", node, "e", epoch), Answer(answer))


def out(payload, node="A", epoch=0, kind="K"):
    sent = step("dispatched", effect(payload, kind), node, epoch)
    return sent, said("landed", node, epoch), step("confirmed", None, node, epoch)


NOT_KNOWN = (said("unsure"), step("unknown"))
NOT_THERE = (said("absent"), step("dropped"))


def revised(version=2):
    return ev.Revise(TO_B), ev.Accepted("r1", version, (), True)


A1 = made("A@1", 1, "r.f", "a", effect("a"))
A2 = made("A@2", 3, "r.f", "b", effect("b"))
UNDONE = (step("to_compensate"), step("compensating"), said("undone"), step("compensated"))
TURNED = (*A1, *out("a"), *revised(), *A2)
LET = ev.Authorise("A", "e", "a")
PAIR = (
    *A1, *out("a"), *made("B@1", 2, "A.o", "a", effect("a"), A="A@1"), *out("a", "B"), *revised(3),
    *made("A@2", 4, "r.f", "b", effect("b")), *made("B@2", 5, "A.o", "b", effect("b"), A="A@2"),
    step("to_compensate"), step("to_compensate", None, "B"),
)  # fmt: skip
"""Two effects that are out and have to go; the second was made from what the first was made from."""


def held(step_):
    """The same step, with the attempt of B."""
    return step_._replace(attempt="B@1")


PAIR = tuple(held(each) if isinstance(each, ev.Effected) and each.intent.node == "B" else each for each in PAIR)

BROKEN = {
    "sent after a revision": (A.STALE_EFFECT, {}, (*A1, *revised(), *out("a"))),
    "sent with another payload": (A.STALE_EFFECT, {}, (*A1, *out("b"))),
    "sent to another target": (A.STALE_EFFECT, {}, (*A1, step("dispatched", effect("a", target="elsewhere")))),
    "sent though nobody asks for it": (A.STALE_EFFECT, {}, (*made("A@1", 1, "r.f", "a"), *out("a"))),
    "sent before the commit": (A.STALE_EFFECT, {}, (*A1[:2], *out("a"))),
    "sent while a parent is stale": (
        A.STALE_EFFECT, {},
        (*made("P@1", 1, "r.f", "a"), *made("A@1", 2, "P.o", "a", effect("a"), P="P@1"), *revised(3), *out("a")),
    ),
    "sent from a lane that was left": (A.STALE_EFFECT, {}, (*A1, ev.Retracted("A", 2), *out("a"))),
    "sent before the old one was undone": (A.DOUBLE_EFFECT, {}, (*TURNED, *out("b", epoch=1))),
    "sent again under one key": (A.DOUBLE_EFFECT, {}, (*A1, *out("a"), *out("a"))),
    "sent again, not knowing": (A.DOUBLE_EFFECT, {}, (*A1, *out("a")[:1], *NOT_KNOWN, *out("a"))),
    "sent again under the key of one undone": (A.DOUBLE_EFFECT, {}, (*TURNED, *UNDONE, *out("b"))),
    "never sent": (A.LOST_EFFECT, {}, (*A1, ev.Close(), ev.Closed(1, 0))),
    "sealed before the answer": (A.LOST_EFFECT, {}, (*A1, *out("a")[:1], ev.Close(), ev.Closed(1, 0))),
    "undone and not sent again": (A.LOST_EFFECT, {}, (*TURNED, *UNDONE, ev.Close(), ev.Closed(3, 0))),
    "left out there": (A.NOT_UNDONE, {}, (*TURNED, ev.Close(), ev.Closed(3, 0))),
    "left out there by one that wants none": (
        A.NOT_UNDONE, {}, (*A1, *out("a"), *revised(), *made("A@2", 3, "r.f", "b"), ev.Close(), ev.Closed(3, 0)),
    ),
    "left out there by one that is gone": (
        A.NOT_UNDONE, {}, (*A1, *out("a"), ev.Retracted("A", 2), ev.Close(), ev.Closed(2, 0)),
    ),
    "undone twice": (A.UNDONE_TWICE, {}, (*TURNED, *UNDONE[:2], step("compensating"))),
    "undone before anybody knew that it was there": (A.UNDONE_EARLY, {}, (*A1, *out("a")[:1], *revised(), *A2, *UNDONE)),
    "undone though wanted": (A.UNDONE_WANTED, {}, (*A1, *out("a"), *UNDONE)),
    "undone before what rests on it": (A.UNDONE_ORDER, {}, (*PAIR, step("compensating"))),
    "irreversible and undone": (
        A.UNDONE_FINAL, {},
        (*made("A@1", 1, "r.f", "a", effect("a", "X")), *out("a", kind="X"), *revised(), *A2, *UNDONE),
    ),
    "left before the close": (A.EARLY_EFFECT, {"release": "close"}, (*A1, *out("a"), ev.Close(), ev.Closed(1, 0))),
    "not asked": (A.NOT_AUTHORISED, {"approval": "on"}, (*A1, *out("a"))),
    "denied": (A.NOT_AUTHORISED, {"approval": "on"}, (*A1, ev.Authorise("A", "e", "a", False, "no"), *out("a"))),
    "another payload was allowed": (A.NOT_AUTHORISED, {"approval": "on"}, (*A1, LET, *revised(), *A2, *out("b"))),
    "made from a confirmation of what is not wanted": (
        A.STALE_COMMIT, {},
        (*A1, *out("a"), ev.Receipt("A/e", 2, "ok"), ev.Started("C@1", "C", 2, (("A", "A@1"),)), *revised(3),
         *made("A@2", 4, "r.f", "b", effect("b")), ev.Finish("C@1", 1, (Read(Selector("A/e", ()), "ok"),)),
         ev.Committed("C@1", 5, Delta("C", 5, (), ()))),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BROKEN)
def test_an_anomaly_of_an_effect_is_named_with_its_witness(name):
    anomaly, switches, entries = BROKEN[name]
    found = audit([opened(**switches), *entries])
    named = [each for each in found if each.anomaly is anomaly]
    assert named, "\n".join(map(str, found))
    assert {each.anomaly for each in found} <= {anomaly, A.LOST_EFFECT if anomaly is A.UNDONE_FINAL else anomaly}
    witness = named[0]
    assert "A" in witness.attempt or witness.attempt.startswith("C")
    assert witness.positions == tuple(sorted(witness.positions))
    assert max(witness.positions) <= len(entries)
    assert witness.history
    shown = (witness.seen, witness.latest) != (None, None)
    assert shown or anomaly in (A.EARLY_EFFECT, A.DOUBLE_EFFECT), "what is out, what is wanted, or the key itself"


def test_every_anomaly_of_effects_is_here():
    about = {each for each in A if any(word in each for word in ("effect", "undone"))}
    assert {anomaly for anomaly, _, _ in BROKEN.values()} == about | {A.STALE_COMMIT}


SEAL = (ev.Close(), ev.Closed(3, 0))
CLEAN = {
    "out and kept": ({}, (*A1, *out("a"), ev.Close(), ev.Closed(1, 0))),
    "replaced": ({}, (*TURNED, *UNDONE, *out("b", epoch=1), *SEAL)),
    "held back until the close": ({"release": "close"}, (*A1, ev.Close(), *out("a"), ev.Closed(1, 0))),
    "reversible, before the close": (
        {"release": "close"},
        (*made("A@1", 1, "r.f", "a", effect("a", "R")), *out("a", kind="R"), ev.Close(), ev.Closed(1, 0)),
    ),
    "before the close, for its confirmation is read": (
        {"release": "close"}, (*A1, *out("a"), ev.Receipt("A/e", 2, "ok"), ev.Close(), ev.Closed(2, 0)),
    ),
    "allowed": ({"approval": "on"}, (*A1, LET, *out("a"), ev.Close(), ev.Closed(1, 0))),
    "asked what became of it": (
        {}, (*A1, *out("a")[:1], *NOT_KNOWN, said("landed"), step("confirmed"), ev.Close(), ev.Closed(1, 0)),
    ),
    "never arrived, sent again": ({}, (*A1, *out("a")[:1], *NOT_KNOWN, *NOT_THERE, *out("a", epoch=1))),
    "never arrived, sent again under its key": ({}, (*A1, *out("a")[:1], *NOT_KNOWN, *NOT_THERE, *out("a"))),
    "recomputed, equal": (
        {}, (*A1, *out("a"), *revised(), *made("A@2", 3, "r.f", "b", effect("a")), ev.Close(), ev.Closed(3, 0)),
    ),
    "undone eagerly": ({"compensation": "eager"}, (*A1, *out("a"), *UNDONE, *out("a", epoch=1))),
    "undone again, for it was still there": (
        {}, (*TURNED, *UNDONE[:2], *NOT_KNOWN, said("landed"), step("confirmed"), *UNDONE, *out("b", epoch=1), *SEAL),
    ),
    "what rests on it is undone first": ({}, (*PAIR, held(step("compensating", None, "B")))),
    "reopened, and replaced": ({}, (*A1, *out("a"), ev.Close(), ev.Closed(1, 0), ev.Reopen(), *revised(), *A2, *UNDONE)),
}  # fmt: skip


@pytest.mark.parametrize("name", CLEAN)
def test_a_clean_journal_of_effects_is_clean_wherever_it_ends(name):
    switches, entries = CLEAN[name]
    journal = [opened(**switches), *entries]
    for end in range(1, len(journal) + 1):
        assert audit(journal[:end]) == [], end
    assert audit(ev.from_json(ev.to_json(entry)) for entry in journal) == []


# --- doctored journals -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def good():
    """Return the journal of a run whose effect was published, undone and published again with another payload."""
    flow = Workflow("w")

    @flow.node(kind="tool")
    async def node(state, ctx):
        value = state["r"]["f"]
        await ctx.tool("think", lambda: None)
        ctx.stage(Effect("e", value))
        return {"o": value}

    revisions = [(2.5, TO_B)]
    run = simulate(flow, {"r": {"f": "a"}}, policy("revise"), revisions=revisions)
    assert [each.payload for _, each in ((0, box.live.effect) for box in run.machine.outboxes["node"].values())] == [
        "b"
    ]
    assert audit(run.machine.journal) == []
    return run.machine.journal


def at(journal, state, which):
    return [i for i, each in enumerate(journal) if isinstance(each, ev.Effected) and each.state == state][which]


def without(state, which):
    return lambda journal: journal.pop(at(journal, state, which))


def twice(state, which):
    return lambda journal: journal.insert(at(journal, state, which), journal[at(journal, state, which)])


def moved(state, which, before, other):
    def doctor(journal):
        entry = journal.pop(at(journal, state, which))
        journal.insert(before(journal) if callable(before) else at(journal, before, other), entry)

    return doctor


def behind_the_revision(journal):
    return next(i for i, each in enumerate(journal) if isinstance(each, ev.Accepted)) + 1


def paid_otherwise(journal):
    i = at(journal, "dispatched", 1)
    journal[i] = journal[i]._replace(effect=journal[i].effect._replace(payload="c"))


DOCTORED = {
    "no dispatch": (without("dispatched", 1), A.LOST_EFFECT),
    "no confirmation at the end": (without("confirmed", 1), A.LOST_EFFECT),
    "no end of the first": (without("compensated", 0), A.DOUBLE_EFFECT),
    "no confirmation before it was undone": (without("confirmed", 0), A.UNDONE_EARLY),
    "sent twice": (twice("dispatched", 1), A.DOUBLE_EFFECT),
    "undone twice": (twice("compensating", 0), A.UNDONE_TWICE),
    "the second before the end of the first": (moved("dispatched", 1, "compensated", 0), A.DOUBLE_EFFECT),
    "the first behind the revision": (moved("dispatched", 0, behind_the_revision, 0), A.STALE_EFFECT),
    "another payload": (paid_otherwise, A.STALE_EFFECT),
}


@pytest.mark.parametrize("name", DOCTORED)
def test_a_doctored_journal_is_found_out(good, name):
    doctor, anomaly = DOCTORED[name]
    journal = list(good)
    doctor(journal)
    found = audit(journal)
    assert anomaly in {each.anomaly for each in found}, "\n".join(map(str, found))
    assert all(journal[position] for each in found for position in each.positions)


def test_a_finding_names_the_key_and_both_payloads(good):
    journal = list(good)
    paid_otherwise(journal)
    stale = next(each for each in audit(journal) if each.anomaly is A.STALE_EFFECT)
    assert (stale.attempt, stale.seen, stale.latest) == ("w/node/e/1", "c", "b")
    assert str(stale).startswith("stale effect: w/node/e/1 payload = 'c', now 'b' (journal ")


def test_what_it_knows_of_effects_it_does_not_take_from_the_machine():
    source = (Path(revise_lab.__file__).parent / "audit" / "outbox.py").read_text()
    taken = {
        f"{node.module}.{each.name}"
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("revise_lab")
        for each in node.names
    }
    assert taken == {"revise_lab.records.event"}


def test_a_receipt_that_goes_away_is_a_change():
    """Who read the confirmation of what has been undone is stale."""
    read = Read(Selector("A/e", ()), "ok")
    entries = (
        *A1, *out("a"), ev.Receipt("A/e", 2, "ok"), ev.Started("C@1", "C", 2, (("A", "A@1"),)),
        ev.Finish("C@1", 1, (read,)), ev.Committed("C@1", 3, Delta("C", 3, (), ())), *revised(4),
        *made("A@2", 5, "r.f", "b"), *UNDONE, ev.Receipt("A/e", 6, ABSENT), ev.Close(), ev.Closed(6, 0),
    )  # fmt: skip
    assert [each.anomaly for each in audit([opened(), *entries])] == [A.STALE_READ]


UNPROVED = {
    "there, though nobody said so": (*A1, out("a")[0], out("a")[2]),
    "not there, though nobody said so, and sent again": (
        *A1, out("a")[0], *NOT_KNOWN, step("dropped"), *out("a", epoch=1),
    ),
    "undone, though nobody said so": (*TURNED, *UNDONE[:2], UNDONE[3], *out("b", epoch=1)),
}  # fmt: skip


@pytest.mark.parametrize("name", UNPROVED)
def test_what_is_out_there_is_believed_of_targets_and_not_of_the_machine(name):
    assert audit([opened(), *UNPROVED[name]]) != []
