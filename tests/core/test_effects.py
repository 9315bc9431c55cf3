"""Effects in the machine: every step of their table, every rule by its shortest history, every place to die at.

Histories are those of the machine's tests with more moves: ``pay A a`` (finish A with the output ``{"o": "a"}`` and an
effect ``e`` of that payload; a class may follow, ``!`` for consent), ``send A``, ``undo A``, ``grant A``, ``deny A``, an
answer of the target (``landed A``), ``recover``, ``reopen``. Between brackets stand the steps of effects alone, with the
epoch where it is not the first.
"""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from revise_lab.audit.auditor import audit
from revise_lab.core.body import Execution
from revise_lab.core.machine import Machine, replay
from revise_lab.core.oracle import drive
from revise_lab.core.table import EFFECTS
from revise_lab.errors import IllegalEvent
from revise_lab.policies import policy as policy_named
from revise_lab.records import event as ev
from revise_lab.records.effect import Answer, Effect, EffectState, Intent, Reversibility, confirmation
from revise_lab.records.revision import Change, Op, Revision
from revise_lab.records.selector import Delta, Read, Selector
from revise_lab.records.value import ABSENT, freeze
from revise_lab.records.workflow import Workflow
from revise_lab.runtime.outside import Ledger
from revise_lab.runtime.simulator import Simulator, _Unheard, simulate, truth_of
from revise_lab.workloads.synthetic import WorldShape, random_world

S = EffectState
INPUTS = {"r": {"f": "a", "g": "1"}}
ANSWERS = {str(answer) for answer in Answer}


@pytest.fixture
def pay(play):
    """Return the player of histories with effects."""

    class Paying(play):
        def __init__(self, graph="A", inputs=INPUTS, policy="revise", **switches):
            super().__init__(graph, inputs, policy, **switches)
            self.steps = set()
            self.acts = []
            self._set_effect, self.machine._set_effect = self.machine._set_effect, self._note

        def _note(self, box, record, what, why):
            self.steps.add((record.state, what))
            self._set_effect(box, record, what, why)

        def machine_takes(self, event):
            super().machine_takes(event)
            self.acts += [order for order in self.told if isinstance(order, ev.Act | ev.Ask)]

        def facts(self):
            new, self._at = self.machine.journal[self._at :], len(self.machine.journal)
            return [
                f"{each.state} {each.intent.node}{f':{each.intent.epoch}' if each.intent.epoch else ''}"
                for each in new
                if isinstance(each, ev.Effected)
            ]

        def event(self, move):
            verb, _, rest = move.partition(" ")
            name, _, rest = rest.partition(" ")
            if verb == "pay":
                payload, kind = [*rest.split(), "K"][:2]
                effect = Effect("e", payload, Reversibility(kind.rstrip("!")), "bank", consent=kind.endswith("!"))
                return ev.Finish(self.attempt(name), freeze({"o": payload}), effects=(effect,))
            if verb in ANSWERS:
                box = self.machine.outboxes[name]["e"]
                receipt = freeze({"for": box.live.effect.payload}) if verb == "landed" and box.live else None
                return ev.Answered(Intent("history", name, "e", box.epoch), Answer(verb), receipt)
            if verb in ("grant", "deny"):
                box = self.machine.outboxes[name]["e"]
                payload = box.waiting.effect.payload if box.waiting else None
                return ev.Authorise(name, "e", payload, verb == "grant", rest)
            if verb in ("recover", "reopen"):
                return ev.Recover() if verb == "recover" else ev.Reopen()
            slots = {"send": ev.Dispatch, "undo": ev.Compensate}
            return slots[verb](name, "e") if verb in slots else super().event(move)

        @property
        def box(self):
            return self.machine.outboxes["A"]["e"]

        @property
        def out(self):
            live = self.machine.live_effects()
            return {node: effect.payload for node, slots in live.items() for effect in slots.values()}

    return Paying


RUN = "start A; read A r.f; pay A "
AGAIN = 'rev r.f="{0}"; start A; read A r.f; pay A {0};'.format
OUT = f"{RUN}a; send A; landed A; "
DENIED = {"approval": "on"}

# --- the table -------------------------------------------------------------------------------------------------------

WAYS = {
    "out and kept": ({}, f"{RUN}a; [staged A, authorised A]; send A; [dispatched A]; landed A; [confirmed A]; close; []"),
    "staged, then not wanted": ({"release": "close"}, f"{RUN}a; {AGAIN('b')} [staged A, dropped A, staged A]"),
    "authorised, then not wanted": (
        {},
        f"{RUN}a; {AGAIN('b')} [staged A, authorised A, dropped A, staged A, authorised A]",
    ),
    "refused: it runs again": ({"retries": 1}, f"{RUN}a; send A; refused A; {RUN}b; send A; landed A; close"),
    "refused: no retry": ({}, f"{RUN}a; send A; refused A; [staged A, authorised A, dispatched A, dropped A,"
                              " staged A:1, blocked A:1]"),
    "denied, then replaced": (
        DENIED,
        f"{RUN}a; deny A; [staged A, blocked A]; {AGAIN('b')} [dropped A, staged A]; grant A; send A; landed A; close",
    ),
    "no answer, asked, there": (
        {},
        f"{RUN}a; send A; unsure A; landed A; [staged A, authorised A, dispatched A, unknown A, confirmed A]",
    ),
    "no answer, asked, not there": (
        {},
        f"{RUN}a; send A; unsure A; absent A; [staged A, authorised A, dispatched A, unknown A, dropped A,"
        " staged A:1, authorised A:1]",
    ),
    "no answer to anything": ({}, f"{RUN}a; send A; unsure A; unsure A; landed A; close"),
    "no answer to anything, and not there": ({}, f"{RUN}a; send A; unsure A; unsure A; absent A; send A; landed A; close"),
    "the target cannot write": ({}, f"{RUN}a; send A; stuck A; landed A; close"),
    "the target cannot be asked": ({}, f"{RUN}a; send A; unsure A; stuck A; landed A; close"),
    "replaced": (
        {},
        f"{OUT}{AGAIN('b')} undo A; undone A; send A; landed A; [staged A, authorised A, dispatched A, confirmed A,"
        " to_compensate A, staged A:1, authorised A:1, compensating A, compensated A, dispatched A:1, confirmed A:1]; close",
    ),
    "wanted again in time": ({}, f"{OUT}{AGAIN('b')} {AGAIN('a')} close"),
    "undone, no answer, asked, undone": ({}, f"{OUT}{AGAIN('b')} undo A; unsure A; undone A; send A; landed A; close"),
    "undone, no answer, asked, still there": (
        {},
        f"{OUT}{AGAIN('b')} undo A; unsure A; landed A; undo A; undone A; send A; landed A; close",
    ),
    "cannot be undone": ({}, f"{OUT}{AGAIN('b')} undo A; stuck A; undone A; send A; landed A; close"),
    "irreversible and wrong, and right again": (
        {},
        f"{RUN}a X; send A; landed A; rev r.f=\"b\"; start A; read A r.f; pay A b X; rev r.f=\"a\"; start A; read A r.f;"
        " pay A a X; [staged A, authorised A, dispatched A, confirmed A, blocked A, staged A:1, authorised A:1,"
        " dropped A:1, confirmed A]; close",
    ),
}  # fmt: skip


def walked(pay, name):
    switches, history = WAYS[name]
    switches = dict(switches)
    graph = declare_retrying(switches.pop("retries", 0))
    return pay(graph, **switches)(history)


def declare_retrying(retries):
    flow = Workflow("history")

    @flow.node(name="A", retries=retries)
    async def body(state):
        raise AssertionError("driven by hand")

    return flow.graph()


def test_every_step_of_the_table_is_walked_and_no_other(pay):
    steps = set().union(*(walked(pay, name).steps for name in WAYS))
    assert steps | {(S.STAGED, "stage")} == set(EFFECTS)


@pytest.mark.parametrize("name", WAYS)
def test_what_was_walked_is_clean_and_comes_again_from_its_events(pay, name):
    run = walked(pay, name)
    assert audit(run.machine.journal) == []
    if "close" in WAYS[name][1]:
        assert run.machine.state == "closed"
        assert list(run.out.values()) == [run.machine.runs["A"].current.effects[0].payload]
    again = replay(run.graph, run.machine.journal, run.policy)
    assert (again.journal, again.fingerprint()) == (run.machine.journal, run.machine.fingerprint())
    lines = [ev.to_json(entry) for entry in run.machine.journal]
    assert [ev.from_json(line) for line in lines] == run.machine.journal


STATES = {
    S.STAGED: ({"release": "close"}, f"{RUN}a"),
    S.AUTHORISED: ({}, f"{RUN}a"),
    S.DISPATCHED: ({}, f"{RUN}a; send A"),
    S.UNKNOWN: ({}, f"{RUN}a; send A; unsure A"),
    S.CONFIRMED: ({}, OUT),
    S.TO_COMPENSATE: ({}, f"{OUT}{AGAIN('b')}"),
    S.COMPENSATING: ({}, f"{OUT}{AGAIN('b')} undo A"),
    S.COMPENSATED: ({}, f"{OUT}{AGAIN('b')} undo A; undone A"),
    S.DROPPED: ({}, f"{RUN}a; send A; unsure A; absent A"),
    S.BLOCKED: ({}, f"{RUN}a; send A; stuck A"),
}


@pytest.mark.parametrize("state", list(S))
def test_what_the_table_does_not_allow_is_refused_and_changes_nothing(pay, state):
    switches, history = STATES[state]
    run = pay(**switches)(history)
    box = run.box
    record = box.live or box.waiting
    if state in (S.COMPENSATED, S.DROPPED):
        assert box.live is None, "what has ended is let go of"
        state = record.state
    assert record.state is state
    words = {"send": "dispatch", "undo": "undo"}
    allowed = {what for was, what in EFFECTS if was is state}
    for verb in ("send", "undo", "grant", *sorted(ANSWERS)):
        legal = words.get(verb, verb) in allowed and (box.live or verb == "send")
        if not legal:
            message = str(run.illegal(f"{verb} A"))
            assert "A/e" in message
            assert str(state) in message
        else:
            replay(run.graph, run.machine.journal, run.policy).handle(run.event(f"{verb} A"))


@pytest.mark.parametrize("event", [ev.Dispatch("A", "x"), ev.Compensate("B", "e"), ev.Authorise("A", "x", 1)])
def test_an_effect_that_was_never_staged_is_refused(pay, event):
    run = pay()(f"{RUN}a")
    before = run.machine.fingerprint()
    with pytest.raises(IllegalEvent, match="never staged"):
        run.machine.handle(event)
    assert run.machine.fingerprint() == before


@pytest.mark.parametrize("other", [{"epoch": 1}, {"epoch": -1}, {"workflow": "another"}])
def test_an_answer_under_another_key_is_refused(pay, other):
    """The answer to a call of an earlier epoch is not one to this."""
    run = pay()(f"{RUN}a; send A")
    before = run.machine.fingerprint()
    with pytest.raises(IllegalEvent, match="no call to the target is open"):
        run.machine.handle(ev.Answered(Intent("history", "A", "e", 0)._replace(**other), Answer.LANDED))
    assert run.machine.fingerprint() == before


@pytest.mark.parametrize("how", ["cancel", "close"])
def test_nothing_leaves_once_the_run_has_ended_and_answers_are_still_heard(pay, how):
    run = pay()(f"{RUN}a; send A; " + ("cancel" if how == "cancel" else "landed A; close"))
    assert run.machine.sendable() == ()
    run("~send A; ~grant A; ~start A")
    if how == "cancel":
        run("[staged A, authorised A, dispatched A]; landed A; [confirmed A]")
    assert run.out == {"A": "a"}, "what is out stays"


def test_a_cancelled_run_drops_what_has_not_left(pay):
    run = pay()(f"{RUN}a; cancel; [staged A, authorised A, dropped A]; ~send A")
    assert run.machine.effects_done


def test_a_cancelled_run_stages_nothing_and_asks_nobody(pay):
    run = pay(approval="on")(f"{RUN}a; grant A; send A; cancel; unsure A; absent A")
    assert run.box.waiting is None
    assert sum(isinstance(act, ev.Ask) for act in run.acts) == 1


def test_a_close_that_is_refused_says_what_it_waits_for(pay):
    assert "history/A/e/0" in str(pay()(f"{RUN}a; send A").illegal("close"))


def test_a_target_that_refuses_every_time_blocks_the_run_when_the_retries_are_used_up(pay):
    """With one retry: refused, run again, refused again; without an end it would go round for ever."""
    run = pay(declare_retrying(1))(f"{RUN}a; send A; refused A; {RUN}a; send A; refused A")
    assert run.machine.ready() == ()
    assert run.machine.status == "blocked"


# --- R9: dispatch ----------------------------------------------------------------------------------------------------


def test_an_authorisation_is_void_once_the_node_is_not_settled(pay):
    """Authorised at the commit, a revision, then the dispatch: without asking again it would leave stale."""
    run = pay()(f"{RUN}a; [staged A, authorised A]")
    assert run.machine.sendable() == (("A", "e"),)
    run('rev r.f="b"; ~send A')
    assert run.machine.sendable() == ()
    run("start A; ~send A; read A r.f; ~send A; pay A b; [dropped A, staged A, authorised A]; send A; landed A; close")
    assert run.out == {"A": "b"}


def test_an_authorisation_is_void_while_a_parent_is_recomputed(pay):
    """The node itself is valid; what it stands on is not."""
    run = pay("A; B < A", policy="revise_plus", release="commit")
    run(f"{RUN}a; send A; landed A; start B; read B A.o; pay B a; [staged A, authorised A, dispatched A, confirmed A,"
        ' staged B, authorised B];'
        ' rev r.f="b"; ~send B; start A; read A r.f; ~send B; pay A a; []; send B; landed B; close')  # fmt: skip
    assert run.out == {"A": "a", "B": "a"}
    assert run.n_attempts == {"A": 2, "B": 1}, "what came out equal is kept, its effect too"


def test_the_effect_of_a_lane_that_was_left_never_leaves(pay):
    run = pay("R; A < R ? R.x")(
        'start R; read R r.f; finish R {"lane": {"x": true}}; start A; pay A a; [staged A, authorised A];'
        ' rev r.f="b"; ~send A; start R; read R r.f; finish R {"lane": {}}; [dropped A]; ~send A; close'
    )
    assert run.out == {}


# --- R10: one slot, one effect ---------------------------------------------------------------------------------------


def test_a_new_payload_waits_until_the_old_one_is_undone(pay):
    run = pay()(f"{OUT}{AGAIN('b')} ~send A; undo A; ~send A; undone A; send A; landed A; close")
    assert run.out == {"A": "b"}


def test_a_new_payload_waits_while_nobody_knows_of_the_old_one(pay):
    run = pay()(
        f"{RUN}a; send A; {AGAIN('b')} ~send A; unsure A; ~send A; ~undo A; landed A; ~send A; undo A; undone A"
    )
    run("send A; landed A; close")
    assert run.out == {"A": "b"}


def test_a_compensation_that_was_sent_is_not_taken_back(pay):
    """Sent out and undone, and the old payload is wanted again meanwhile: it is published again, not counted as kept."""
    run = pay()(f"{OUT}{AGAIN('b')} undo A; {AGAIN('a')} undone A; send A; landed A; close")
    assert run.out == {"A": "a"}
    assert [act.intent.epoch for act in run.acts if act.what == "publish"] == [0, 1]


@pytest.mark.parametrize("when", ["send A;", "send A; landed A;", "send A; unsure A;"])
def test_what_is_wanted_again_in_time_is_kept(pay, when):
    run = pay()(f"{RUN}a; {when} {AGAIN('b')} {AGAIN('a')}")
    assert [act.what for act in run.acts] == ["publish", "find"][: 1 + ("unsure" in when)]
    run("close" if "landed" in when else "landed A; close")
    assert run.out == {"A": "a"}
    assert run.box.waiting is None


def test_an_effect_is_undone_only_once_it_is_known_to_be_there(pay):
    run = pay()(f"{RUN}a; send A; {AGAIN('b')} ~undo A; landed A; undo A")
    assert [act.what for act in run.acts] == ["publish", "undo"]
    assert run.acts[-1].receipt == freeze({"for": "a"})


def test_what_rests_on_another_effect_is_undone_first(pay):
    run = pay("A; B < A")(f"{OUT}start B; read B A.o; pay B a; send B; landed B; {AGAIN('b')} [staged A, authorised A,"
                          " dispatched A, confirmed A, staged B, authorised B, dispatched B, confirmed B,"
                          " to_compensate A, staged A:1, authorised A:1]")  # fmt: skip
    run("start B; read B A.o; pay B b; ~undo A; undo B; ~undo A; undone B; undo A; undone A; send A; send B; landed A")
    run("landed B; close")
    assert run.out == {"A": "b", "B": "b"}


# --- R11: epochs -----------------------------------------------------------------------------------------------------


def test_away_and_back_publishes_again_under_another_key(pay):
    """Published, undone, wanted again: with one key for both a target would take the second for a repetition."""
    run = pay()(f"{OUT}{AGAIN('b')} undo A; undone A; {AGAIN('a')} send A; landed A; close")
    published = [act.intent.key for act in run.acts if act.what == "publish"]
    assert published == ["history/A/e/0", "history/A/e/1"]
    assert run.out == {"A": "a"}


def test_a_recomputation_that_asks_for_the_same_keeps_its_key(pay):
    run = pay()(
        f'{OUT}rev r.f="b"; start A; read A r.f; pay A a; [staged A, authorised A, dispatched A, confirmed A]; close'
    )
    assert [act.what for act in run.acts] == ["publish"]


def test_what_never_arrived_leaves_under_a_key_of_its_own(pay):
    """A call that is still on its way when the target says that it is not there must not become a second one."""
    run = pay()(f"{RUN}a; send A; unsure A; absent A; send A; landed A; close")
    assert [act.intent.epoch for act in run.acts if act.what == "publish"] == [0, 1]


# --- R12: what a settled node wants is staged again ------------------------------------------------------------------


@pytest.mark.parametrize("release", ["commit", "close"])
@pytest.mark.parametrize("compensation", ["eager", "lazy"])
def test_an_output_that_holds_again_has_its_effect_again(pay, release, compensation):
    """Withdrawn by a revision, made valid again by the next one without running: the effect is not lost."""
    run = pay(policy="revise_plus", release=release, compensation=compensation)(f"{RUN}a")
    if release == "commit":
        run("send A; landed A")
    run('rev r.f="b"')
    if release == "commit" and compensation == "eager":
        run("undo A; undone A")
    run('rev r.f="a"' + ("; close" if release == "close" else ""))
    for _ in run.machine.sendable():
        run("send A; landed A")
    if release == "commit":
        run("close")
    assert (run.machine.state, run.out, run.n_attempts) == ("closed", {"A": "a"}, {"A": 1})


def test_eager_withdraws_at_the_revision_and_lazy_at_the_recomputation(pay):
    for compensation, steps in (("eager", ["to_compensate A"]), ("lazy", [])):
        run = pay(compensation=compensation)(OUT)
        run.facts()
        run('rev r.f="b"')
        assert run.facts() == steps


# --- R8, seen from effects -------------------------------------------------------------------------------------------


def test_a_child_of_an_output_that_waits_does_not_start(pay):
    """G is away and back while P, made from it, has ended and waits: X must not start on what is not committed."""
    run = pay("G; P < G; X < P", policy="revise_plus", release="commit")
    run('start G; read G r.f; finish G; start P; rev r.f="b"; read P G.o; pay P a; ~start X; [];'
        " start G; read G r.f; finish G; ~start X")  # fmt: skip
    assert run.machine.ready() == ("P",), "made from the old output: it runs again"
    run("start P; read P G.o; pay P b; [staged P, authorised P]; start X; finish X; send P; landed P; close")
    assert run.out == {"P": "b"}


def test_an_attempt_that_waits_holds_no_slot():
    """One slot: the child has ended and waits for its parent, which needs the slot to run again."""
    flow = Workflow("one_slot")

    @flow.node(kind="tool")
    async def parent(state, ctx):
        await ctx.tool("half", lambda: None)
        return {"o": state["r"]["f"] // 2}

    @flow.node(kind="tool", after="parent")
    async def child(state, ctx):
        value = state["parent"]["o"]
        await ctx.tool("pay", lambda: None)
        ctx.stage(Effect("e", value))
        return {"o": value}

    revised = [(1.5, Revision("r1", (Change("r", Op.SET, ("f",), 3),)))]
    run = simulate(flow, {"r": {"f": 2}}, "revise_plus", revisions=revised, n_slots=1)
    assert truth_of(run)[1] == []
    assert [call.node for call in run.calls] == ["parent", "child", "parent"], (
        "and the child is committed, not run again"
    )
    assert dict(run.ledger.live()) == {"child/e": 1}


# --- R13: after a crash ----------------------------------------------------------------------------------------------


def test_after_a_crash_the_target_is_asked_before_anything_is_sent(pay):
    run = pay()(f"{RUN}a; send A; recover; [staged A, authorised A, dispatched A, unknown A]; ~send A")
    assert [act.what for act in run.acts] == ["publish", "find"]
    run("landed A; close")
    assert run.out == {"A": "a"}


@pytest.mark.parametrize(
    ("answer", "steps"),
    [("landed", ["confirmed A", "to_compensate A"]), ("absent", ["dropped A"]), ("unsure", ["blocked A"])],
)
def test_what_is_no_longer_wanted_after_a_crash_is_undone_if_it_is_there(pay, answer, steps):
    run = pay()(f"{RUN}a; send A; recover; {AGAIN('b')}")
    run.facts()
    run(f"{answer} A")
    assert run.facts()[: len(steps)] == steps
    if answer == "unsure":
        assert [str(intent.key) for intent, _, _ in run.machine.residue()] == ["history/A/e/0"]
        run("~send A; ~close")


def test_attempts_do_not_outlive_their_process(pay):
    run = pay("A; B")("start A; start B; read A r.f; read B r.g; recover")
    assert run.machine.attempts == {}
    assert run.machine.ready() == ("A", "B")
    run(f"~pay A@1 a; {RUN}a; start B; finish B; send A; recover; recover; landed A; close")
    assert (run.out, run.n_attempts) == ({"A": "a"}, {"A": 2, "B": 2})


def test_whoever_was_asked_before_a_crash_is_asked_again(pay):
    run = pay(approval="on")(f"{RUN}a; recover")
    assert [type(act).__name__ for act in run.acts] == ["Ask", "Ask"]
    run("grant A; recover; send A; landed A; close")
    assert [type(act).__name__ for act in run.acts] == ["Ask", "Ask", "Act"], "an approval is remembered"


# --- E: when an effect may leave ---------------------------------------------------------------------------------------


def reading(kinds):
    """``A`` stages an effect, and ``C`` reads its confirmation where ``kinds`` says so."""
    flow = Workflow("history")

    async def body(state):
        raise AssertionError("driven by hand")

    flow.node(name="A")(body)
    if kinds:
        flow.node(name="C", after=(confirmation("A", "e"),))(body)
    return flow.graph()


@pytest.mark.parametrize(
    ("kind", "release", "read"), [*product(("R", "K", "X", "X!"), ("commit", "close"), (False, True))]
)
def test_the_class_decides_when_an_effect_leaves(pay, kind, release, read):
    run = pay(reading(read), release=release)(f"{RUN}a {kind}")
    at_commit = release == "commit" or kind == "R" or (read and kind != "X")
    blocked = read and kind == "X" and release == "close"
    state = "authorised" if at_commit else "blocked" if blocked else "staged"
    assert run.facts()[1:] == ([f"{state} A"] if state != "staged" else [])
    if blocked:
        assert "consent" in run.machine.residue()[0][2]
        run("~close; ~send A")
        return
    if read:
        run("~start C; send A; ~start C; landed A; start C; finish C")
        run("close")
    else:
        run("close; send A; landed A" if not at_commit else "send A; landed A; close")
    assert (run.machine.state, run.out) == ("closed", {"A": "a"})


def test_approval_is_asked_for_again_when_the_payload_is_another(pay):
    run = pay(approval="on", release="close")(f"{RUN}a; ~close; grant A; ~grant A; {AGAIN('b')} ~close")
    run("[staged A, dropped A, staged A]; grant A; close; [authorised A]; send A; landed A")
    assert [act.effect.payload for act in run.acts if isinstance(act, ev.Ask)] == ["a", "b"]
    assert (run.machine.state, run.out) == ("closed", {"A": "b"})


def test_a_run_is_closed_only_when_what_is_wanted_is_out(pay):
    run = pay(release="close")(f'{RUN}a; close; [staged A, authorised A]; rev r.f="b"; ~reopen; send A; landed A')
    refused = [each for each in run.machine.journal if isinstance(each, ev.Refused)]
    assert [each.error for each in refused] == ["WorkflowClosed"], "the close seals"
    run(f"reopen; {AGAIN('b')} undo A; ~close; undone A; close; send A; landed A")
    assert (run.machine.state, run.out) == ("closed", {"A": "b"})


# --- the confirmation as an artifact ---------------------------------------------------------------------------------


def test_a_reader_of_a_confirmation_waits_for_the_right_one(pay):
    run = pay(reading(True))(f"{OUT}start C")
    run.machine_takes(ev.Observe("C@1", (Read(Selector("A/e", ()), run.orders["C@1"].value("A/e")),)))
    run(
        f"finish C; {AGAIN('b')} ~start C; undo A; ~start C; undone A; send A; ~start C; landed A; start C; finish C; close"
    )
    receipts = [(each.artifact, each.value) for each in run.machine.journal if isinstance(each, ev.Receipt)]
    assert receipts == [("A/e", freeze({"for": "a"})), ("A/e", ABSENT), ("A/e", freeze({"for": "b"}))]


# --- journals --------------------------------------------------------------------------------------------------------

INTENT = Intent("w", "A", "e", 2)
EFFECT = Effect(
    "e", freeze({"to": "Porto", "n": [1, None]}), Reversibility.IRREVERSIBLE, "bank", freeze({"x": "3"}), True
)
RECORDS = [
    ev.Authorise("A", "e", 1), ev.Authorise("A", "e", 1, False, "too dear"), ev.Dispatch("A", "e"), ev.Compensate("A", "e"),
    *(ev.Answered(INTENT, answer, freeze({"no": 1}), "why") for answer in Answer),
    ev.Answered(INTENT, Answer.LANDED, ABSENT),
    ev.Recover(), ev.Reopen(), ev.Receipt("A/e", 4, freeze({"no": 1})), ev.Receipt("A/e", 4, ABSENT),
    *(ev.Effected(INTENT, state, "A@1", EFFECT, "why") for state in S), ev.Effected(INTENT, S.DROPPED),
    ev.Act("publish", INTENT, EFFECT), ev.Act("undo", INTENT, EFFECT, freeze([1])), ev.Ask(INTENT, EFFECT),
    ev.Finish("A@1", freeze({}), effects=(EFFECT, EFFECT._replace(slot="f"))), ev.Committed("A@1", 1, Delta("A", 1, (), ())),
]  # fmt: skip


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: type(record).__name__)
def test_a_record_is_the_same_after_the_codec(record):
    again = ev.from_json(ev.to_json(record))
    assert again == record
    assert [type(part) for part in again] == [type(part) for part in record]
    assert ev.to_json(again) == ev.to_json(record)


def test_what_must_be_on_disk_before_a_call_leaves_is_durable(pay):
    run = pay()(f"{OUT}{AGAIN('b')} undo A")
    states = {each.state for each in run.machine.journal if isinstance(each, ev.Effected) and ev.is_durable(each)}
    assert states == {S.DISPATCHED, S.CONFIRMED, S.COMPENSATING}


def booking():
    """Two effects, the second made from the first; the confirmation of the first is read by a third node."""
    flow = Workflow("booking")

    @flow.node(kind="tool")
    async def seat(state, ctx):
        ctx.stage(Effect("e", state["r"]["f"]))
        return {"o": state["r"]["f"]}

    @flow.node(kind="tool", after="seat")
    async def meal(state, ctx):
        ctx.stage(Effect("e", f"{state['seat']['o']}{state['r']['g']}", Reversibility.REVERSIBLE))
        return {"o": 1}

    @flow.node(kind="tool", after=confirmation("seat", "e"))
    async def mail(state, ctx):
        return {"o": state["seat/e"]}

    return flow.graph()


REVISIONS = [
    Revision("r1", (Change("r", Op.SET, ("f",), "b"),)),
    Revision("r2", (Change("r", Op.SET, ("g",), "2"),)),
    Revision("r3", (Change("r", Op.SET, ("f",), "a"),)),
]


class Hand:
    """Drives a machine in the plainest order; a revision arrives whenever nothing else is left to do."""

    def __init__(self, machine, ledger=None, revisions=()):
        self.machine, self.ledger, self.revisions = machine, ledger or Ledger(), list(revisions)
        self.calls = []

    def send(self, event):
        for order in self.machine.handle(event):
            if isinstance(order, ev.Execute):
                self.send(drive(Execution(self.machine.graph, order, None, None, lambda *_: None).run()))
            elif isinstance(order, ev.Act):
                self.calls.append(order)

    def step(self):
        machine = self.machine
        if self.calls:
            act = self.calls.pop(0)
            return self.send(self.ledger.perform(act.what, act.intent, act.effect))
        for slots, event in ((machine.undoable(), ev.Compensate), (machine.sendable(), ev.Dispatch)):
            if slots:
                return self.send(event(*slots[0]))
        if machine.ready():
            return self.send(ev.Start(machine.ready()[0]))
        if self.revisions:
            return self.send(ev.Revise(self.revisions.pop(0)))
        return self.send(ev.Close())

    def go(self):
        for _ in range(200):
            if self.machine.state == "closed":
                return self
            self.step()
        raise AssertionError(f"no end: {self.machine.status}")


def after_death(graph, how, prefix, arrives):
    """Go on from a journal that ends anywhere; the last call that had left arrives, or does not."""
    machine = replay(graph, [prefix[0]], how)
    ledger, calls = Ledger(), {}
    for entry in prefix[1:]:
        if isinstance(entry, ev.Event.__args__):
            for order in machine.handle(entry):
                if isinstance(order, ev.Act) and order.what != "find":
                    calls[order.intent] = order
            if isinstance(entry, ev.Answered):
                act = calls.pop(entry.intent)
                ledger.perform(act.what, act.intent, act.effect)
    for act in calls.values() if arrives else ():
        ledger.perform(act.what, act.intent, act.effect)
    hand = Hand(machine, ledger, [each for each in REVISIONS if each.id not in machine.revisions])
    if machine.state != "closed":
        hand.send(ev.Recover())
    return hand.go()


@pytest.mark.parametrize("arrives", [True, False])
@pytest.mark.parametrize(
    ("name", "switches"),
    [
        ("revise", {"compensation": "eager"}),
        ("revise_plus", {}),
        pytest.param("revise_plus", {"release": "commit"}, marks=pytest.mark.slow),
        pytest.param("restart", {}, marks=pytest.mark.slow),
    ],
)
def test_wherever_the_process_dies_the_world_ends_right(name, switches, arrives):
    """The journal is cut behind every entry, between an event and what was decided because of it as well."""
    graph, how = booking(), policy_named(name, **switches)
    whole = Hand(Machine(graph, INPUTS, how), revisions=REVISIONS).go()
    right = {"seat/e": "a", "meal/e": "a2"}
    assert dict(whole.ledger.live()) == right
    outputs = whole.machine.outputs()
    for cut in range(1, len(whole.machine.journal) + 1):
        hand = after_death(graph, how, whole.machine.journal[:cut], arrives)
        assert dict(hand.ledger.live()) == right, cut
        assert hand.ledger.repeated == set(), cut
        assert hand.machine.outputs() == outputs, cut
        assert audit(hand.machine.journal) == [], cut


@pytest.mark.parametrize("name", ["revise", "revise_plus", "suffix", "restart", "wait"])
def test_the_events_of_a_run_with_effects_give_it_again(name):
    n_effects = 0
    for seed in range(8):
        world = random_world(np.random.default_rng([13, seed]), WorldShape(effect=0.6))
        arrive = {"revisions": world.revisions, "crashes": (1.3,)}
        run = Simulator(world.workflow, world.inputs, policy_named(name), **arrive).run()
        journal = [ev.from_json(ev.to_json(entry)) for entry in run.machine.journal]
        again = replay(run.machine.graph, journal, run.machine.policy)
        assert (again.journal, again.fingerprint()) == (run.machine.journal, run.machine.fingerprint()), seed
        n_effects += sum(isinstance(each, ev.Effected) for each in journal)
    assert n_effects > 20


class Losing(Simulator):
    """Loses calls to targets, on their way there or back; what was lost on its way there may arrive later."""

    def __init__(self, *args, rng, **options):
        self.rng, self.n_lost = rng, 0
        super().__init__(*args, **options)

    def _perform(self, act, *, heard):
        if not heard or act.what == "find" or self.rng.random() > 0.35:
            super()._perform(act, heard=heard)
            return
        self.n_lost += 1
        fate = self.rng.choice(["answer lost", "late", "never"])
        if fate == "answer lost":
            super()._perform(act, heard=False)
        elif fate == "late":
            self._at(self._now_s + 2 * self.rng.random(), _Unheard(act))
        self._at(self._now_s + self._effect_s / 2, ev.Answered(act.intent, Answer.UNSURE))


@pytest.mark.parametrize("switches", [{"release": "close"}, {"release": "commit", "compensation": "eager"}])
@pytest.mark.parametrize("name", ["revise", "revise_plus", "restart"])
def test_calls_that_are_lost_or_late_and_crashes_leave_the_world_right(name, switches):
    n_lost = 0
    for seed in range(8):
        rng = np.random.default_rng([14, seed])
        world = random_world(rng, WorldShape(effect=0.7))
        arrive = {"revisions": world.revisions, "crashes": rng.uniform(0, 8, 2).tolist(), "rng": rng}
        simulator = Losing(world.workflow, world.inputs, policy_named(name, **switches), **arrive)
        run = simulator.run()
        assert (run.machine.state, truth_of(run)[1], audit(run.machine.journal)) == ("closed", [], []), seed
        n_lost += simulator.n_lost
    assert n_lost >= 5


def test_a_decision_on_a_list_of_members_is_not_made_again_on_its_keys():
    """A spawner keeps its entries by key; a branch that saw the list could decide as before for another reason."""
    flow = Workflow("spawner")

    @flow.node(name="S")
    def spawn(state):
        return {"items": ["p"], "x": state["r"]["f"]}

    @flow.branch(of="S")
    def decide(state, out):
        return "left" if isinstance(out["items"], dict) or state["r"]["g"] == 1 else "right"

    flow.member(of="S", items="items", name="M")(lambda state: {})
    flow.node(name="L", when=("S", "left"))(lambda state: {})
    flow.node(name="R", when=("S", "right"))(lambda state: {})
    change = Revision("r1", (Change("r", Op.SET, ("g",), 2),))
    run = simulate(
        flow, {"r": {"f": 0, "g": 1}}, policy_named("revise_plus", control="condition"), revisions=[(9.0, change)]
    )
    assert "R" in run.outputs
    assert "L" not in run.outputs
    assert truth_of(run)[1] == []
