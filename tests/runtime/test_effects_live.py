"""Effects of live runs: approval, targets that fail or say nothing, undoing, cancelling, reopening, going on after death.

These runs are on the real clock, for targets are called from threads; what has to wait for something waits for that.
"""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from revise_lab import Effect, Session, Workflow
from revise_lab.core.machine import Machine
from revise_lab.errors import ReentrantRevision, ReviseLabError, RunBlocked, RunCancelled, RunFailed, WorkflowClosed
from revise_lab.records import event as ev
from revise_lab.records.effect import Answer, EffectState
from revise_lab.runtime.journal import Journal
from revise_lab.runtime.target import Fault, MemoryTarget, Receipt

S = EffectState
REQUEST = {"request": {"city": "Porto", "days": 2}}


class Trip:
    """A booking for the city; ``rest`` reads the days and keeps the run open until ``hold`` is set.

    Parameters
    ----------
    kind : str
        Class of the booking's effect.
    **options
        Of the session.
    """

    def __init__(self, kind="K", *, target=None, retries=0, **options):
        self.bank = target or MemoryTarget("bank")
        self.hold = threading.Event()
        flow = Workflow("trip")

        @flow.node(kind="tool", retries=retries)
        async def book(state, ctx):
            city = state["request"]["city"]
            ctx.stage(Effect("ticket", {"to": city}, kind, "bank"))
            return {"city": city}

        @flow.node(kind="tool")
        async def rest(state, ctx):
            days = state["request"]["days"]
            while not self.hold.is_set():
                await asyncio.sleep(0.002)
            return {"days": days}

        self.session = Session(flow, REQUEST, endpoint=None, **{"targets": {"bank": self.bank}} | options)

    @property
    def there(self):
        """What is out at the target."""
        there = {}
        for what, key, payload in self.bank.happened:
            there[key] = payload["to"] if what == "publish" else None
        return [city for city in there.values() if city]

    @property
    def said(self):
        return [(what, payload["to"]) for what, _, payload in self.bank.happened]


def live(main, seconds=20.0):
    """Run a coroutine to its end and insist that it leaves no task behind."""

    async def checked():
        value = await asyncio.wait_for(main, seconds)
        await asyncio.sleep(0)
        left = asyncio.all_tasks() - {asyncio.current_task()}
        assert not left, left
        return value

    return asyncio.run(checked())


async def fails(run, error, message):
    """Wait for a run to end in an error, let go of it, and return the error."""
    with pytest.raises(error, match=message) as caught:
        await run.result()
    run.cancel()
    await asyncio.wait([run._main])
    return caught.value


async def until(run, state, n=1):
    """Wait for the n-th time that an effect gets into a state."""
    async for entry in run.watch():
        if isinstance(entry, ev.Effected) and entry.state == state:
            n -= 1
            if not n:
                return entry
    raise AssertionError(f"the run ended before an effect was {state}")


async def checked(run):
    """Wait for the result and hold it against the auditor and the oracle."""
    result = await run.result()
    assert run.audit() == []
    assert (await run.check_oracle())[1] == []
    return result


def states(run, node="book"):
    return [str(each.state) for each in run.journal if isinstance(each, ev.Effected) and each.intent.node == node]


# --- released, undone, published again ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({}, [("publish", "Porto"), ("compensate", "Porto"), ("publish", "Faro")]),
        ({"compensation": "eager"}, [("publish", "Porto"), ("compensate", "Porto"), ("publish", "Faro")]),
        ({"policy": "revise_plus"}, [("publish", "Faro")]),
    ],
)
def test_a_revision_replaces_what_is_out_or_comes_before_it_leaves(options, said):
    trip = Trip(**options)

    async def main():
        run = trip.session.start()
        await until(run, S.STAGED if "policy" in options else S.CONFIRMED)
        assert not run.ended
        run.revise("request.city", "Faro")
        trip.hold.set()
        return await checked(run)

    result = live(main())
    assert result.effects == {"book": {"ticket": {"to": "Faro"}}}
    assert (trip.said, trip.there) == (said, ["Faro"])


def test_what_does_not_change_the_world_is_never_published():
    trip = Trip("I")

    async def main():
        trip.hold.set()
        run = trip.session.start()
        return await checked(run), states(run)

    assert live(main())[1] == []
    assert trip.bank.happened == []


# --- approval ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_async", [False, True])
def test_an_effect_leaves_when_it_has_been_allowed(is_async):
    asked = []

    def allow(intent, effect):
        asked.append((intent.key, effect.payload["to"], tuple(trip.bank.happened)))
        return True

    async def allow_later(intent, effect):
        await asyncio.sleep(0.01)
        return allow(intent, effect)

    trip = Trip(authorise=allow_later if is_async else allow)

    async def main():
        run = trip.session.start()
        await until(run, S.CONFIRMED)
        run.revise("request.city", "Faro")
        trip.hold.set()
        return await checked(run)

    live(main())
    assert [(key, city) for key, city, _ in asked] == [("trip/book/ticket/0", "Porto"), ("trip/book/ticket/1", "Faro")]
    assert asked[0][2] == (), "nothing had left before it was asked for"
    assert trip.there == ["Faro"]


def test_a_denial_blocks_the_run_until_a_revision_changes_what_is_asked_for():
    trip = Trip(authorise=lambda intent, effect: effect.payload["to"] != "Porto")

    async def main():
        run = trip.session.start()
        trip.hold.set()
        with pytest.raises(RunBlocked, match=r"book/ticket: denied - revise, or, .* resolve\(\)") as caught:
            await run.result()
        assert caught.value.residue == ["book/ticket: denied"]
        assert [why for _, _, why in run.residue()] == ["denied"]
        assert trip.bank.happened == []
        with pytest.raises(ReviseLabError, match="has not left - revise what its node reads"):
            run.resolve("book", "ticket", "absent")
        run.revise("request.city", "Faro")
        return await checked(run)

    assert live(main()).effects["book"]["ticket"] == {"to": "Faro"}
    assert trip.said == [("publish", "Faro")]


def test_somebody_who_is_asked_late_does_not_allow_what_he_was_not_shown():
    """Asked about Porto; before he answers the trip goes to Faro; his yes is not one to Faro, and his no neither."""
    answers = {}
    trip = Trip(authorise=lambda intent, effect: answers.setdefault(effect.payload["to"], asyncio.Future()))

    async def main():
        run = trip.session.start()
        await until(run, S.STAGED)
        await asyncio.sleep(0.01)
        await run.revise("request.city", "Faro")
        await until(run, S.STAGED, 2)
        await asyncio.sleep(0.01)
        answers["Porto"].set_result(True)
        await asyncio.sleep(0.02)
        assert trip.bank.happened == [], "nobody has said yes to Faro"
        trip.hold.set()
        answers["Faro"].set_result(True)
        return await checked(run)

    assert live(main()).effects["book"]["ticket"] == {"to": "Faro"}
    assert trip.said == [("publish", "Faro")]


def test_an_answer_about_what_is_no_longer_asked_is_nothing():
    """The node fails after the revision: nothing is staged any more when the answer comes."""
    answer = []
    flow = Workflow("gone")

    @flow.node(kind="tool")
    async def book(state, ctx):
        if state["request"]["city"] == "nowhere":
            raise ValueError("no such place")
        ctx.stage(Effect("ticket", 1, "K", "bank"))

    async def ask(intent, effect):
        answer.append(asyncio.get_running_loop().create_future())
        return await answer[0]

    bank = MemoryTarget("bank")

    async def main():
        run = Session(flow, REQUEST, endpoint=None, targets={"bank": bank}, authorise=ask).start()
        await until(run, S.STAGED)
        await asyncio.sleep(0.01)
        await run.revise("request.city", "nowhere")
        await until(run, S.DROPPED)
        answer[0].set_result(True)
        with pytest.raises(RunFailed, match="no such place"):
            await run.result()
        await asyncio.sleep(0.01)
        await fails(run, RunFailed, "no such place")

    live(main())
    assert bank.happened == []


def test_an_error_of_the_one_who_is_asked_ends_the_run_and_is_not_a_yes():
    def broken(intent, effect):
        raise RuntimeError("the approval page is down")

    trip = Trip(authorise=broken)

    async def main():
        run = trip.session.start()
        await fails(run, RuntimeError, "approval page")

    live(main())
    assert trip.bank.happened == []


def test_an_answer_that_was_cancelled_ends_the_run_and_is_not_a_yes():
    def cancelled(intent, effect):
        raise asyncio.CancelledError

    trip = Trip(authorise=cancelled)

    async def main():
        await fails(trip.session.start(), ReviseLabError, "book/ticket/0 may leave was asked, and the answer cancelled")

    live(main())
    assert trip.bank.happened == []


@pytest.mark.parametrize("error", [asyncio.CancelledError(), KeyError("odd")])
def test_whatever_a_target_raises_it_is_asked(error):
    class Odd(MemoryTarget):
        def publish(self, *arguments):
            super().publish(*arguments)
            raise error

    trip = Trip(target=Odd("bank"))
    trip.hold.set()
    live(checked_start(trip))
    assert trip.said == [("publish", "Porto")]


@pytest.mark.parametrize("found", [True, {"state": "confirmed"}, Receipt("k", {1, 2}, S.CONFIRMED)])
def test_an_answer_of_a_target_that_is_no_receipt_blocks_the_effect(found):
    class Odd(MemoryTarget):
        def publish(self, *arguments):
            raise ConnectionError

        def find(self, key, *, close=False):
            return found

    trip = Trip(target=Odd("bank"))
    trip.hold.set()

    async def main():
        await fails(trip.session.start(), RunBlocked, "book/ticket")

    live(main())


async def checked_start(trip):
    return await checked(trip.session.start())


@pytest.mark.parametrize("awaited", [False, True])
@pytest.mark.parametrize("resumed", [False, True])
def test_a_revision_from_inside_the_approval(awaited, resumed, tmp_path):
    """Whoever is asked revises: delivered behind the current event; to await the acceptance there is refused."""
    runs, refused = [], []

    async def ask(intent, effect):
        if effect.payload["to"] == "Porto":
            answer = runs[-1].revise("request.city", "Faro")
            if awaited:
                try:
                    await answer
                except ReentrantRevision as error:
                    refused.append(str(error))
        return True

    trip = Trip(authorise=ask, journal=tmp_path / "j")
    waits = Trip(authorise=lambda intent, effect: asyncio.Future(), journal=tmp_path / "j")

    async def before():
        run = waits.session.start()
        await until(run, S.STAGED)
        run._main.cancel()
        await asyncio.wait([run._main])

    async def main():
        runs.append(trip.session.resume() if resumed else trip.session.start())
        await until(runs[0], S.CONFIRMED)
        trip.hold.set()
        return await checked(runs[0])

    if resumed:
        asyncio.run(before())
    assert live(main()).effects["book"]["ticket"] == {"to": "Faro"}
    assert len(refused) == awaited
    assert trip.there == ["Faro"]


# --- targets -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("targets", [{}, {"shop": MemoryTarget("shop")}])
def test_a_target_that_the_session_does_not_have_is_named(targets):
    trip = Trip(targets=targets)

    async def main():
        run = trip.session.start()
        trip.hold.set()
        there = ", ".join(targets) or "none"
        await fails(run, RunFailed, rf"'ticket' for target 'bank', .* targets= \(there: {there}\)")

    live(main())


@pytest.mark.parametrize(("kind", "refused"), [("R", False), ("K", True), ("X", True)])
def test_what_cannot_simply_be_revoked_needs_a_target_that_compares_and_sets(kind, refused):
    trip = Trip(kind, target=MemoryTarget("bank", compares_and_sets=False))

    async def main():
        run = trip.session.start()
        trip.hold.set()
        if not refused:
            return await checked(run)
        return await fails(run, RunFailed, f"cannot compare and set, and effects of class {kind}")

    live(main())
    assert trip.there == ([] if refused else ["Porto"])


@pytest.mark.parametrize(
    ("faults", "published"),
    [
        ([Fault.ANSWER_LOST], {"trip/book/ticket/0": 1}),
        ([Fault.NOT_DONE], {"trip/book/ticket/1": 1}),
        ([Fault.NOT_DONE, Fault.ANSWER_LOST], {"trip/book/ticket/1": 1}),
        ([Fault.NOT_DONE, Fault.NOT_DONE], {"trip/book/ticket/2": 1}),
    ],
)
def test_a_call_without_answer_is_asked_for_and_lands_once(faults, published):
    trip = Trip()
    trip.bank.faults.extend(faults)

    async def main():
        run = trip.session.start()
        trip.hold.set()
        return run, await checked(run)

    run, result = live(main())
    assert result.effects["book"]["ticket"] == {"to": "Porto"}
    assert dict(trip.bank.n_publications) == published
    assert "unknown" in states(run)


def test_a_target_that_breaks_every_time_is_asked_ever_more_rarely():
    class Broken(MemoryTarget):
        n_calls = 0

        def publish(self, intent_key, payload, premises):
            self.n_calls += 1
            raise ZeroDivisionError

    trip = Trip(target=Broken("bank"))

    async def main():
        run = trip.session.start()
        await asyncio.sleep(0.5)
        run.cancel()
        n_calls = trip.bank.n_calls
        await asyncio.wait_for(run._main, 10)
        assert trip.bank.n_calls == n_calls, "a cancelled run sends nothing more"

    live(main())
    assert 2 <= trip.bank.n_calls <= 5, "at once, and after 0.05, 0.1 and 0.2 s"


def test_runs_that_share_a_target_have_names_of_their_own():
    bank = MemoryTarget("bank")

    async def main():
        for name in ("order 7", "order 8", None):
            trip = Trip(target=bank, name=name)
            trip.hold.set()
            await checked(trip.session.start())

    live(main())
    assert dict(bank.n_publications) == {
        "order 7/book/ticket/0": 1,
        "order 8/book/ticket/0": 1,
        "trip/book/ticket/0": 1,
    }


@pytest.mark.parametrize("fault", [Fault.ANSWER_LOST, Fault.NOT_DONE])
def test_an_undoing_without_answer_is_asked_for_and_done_once(fault):
    trip = Trip()

    async def main():
        run = trip.session.start()
        await until(run, S.CONFIRMED)
        trip.bank.faults.append(fault)
        run.revise("request.city", "Faro")
        trip.hold.set()
        return await checked(run)

    live(main())
    assert trip.said == [("publish", "Porto"), ("compensate", "Porto"), ("publish", "Faro")]


def test_a_target_that_takes_too_long_is_asked_and_its_late_call_is_not_a_second_one():
    trip = Trip(effect_timeout_s=0.05)
    trip.bank.faults.append(Fault.HANG)

    async def main():
        run = trip.session.start()
        await until(run, S.DROPPED)
        trip.bank.resume.set()
        trip.hold.set()
        return run, await checked(run)

    run, _ = live(main())
    why = [each.reason for each in run.journal if isinstance(each, ev.Answered) and each.answer is Answer.UNSURE]
    assert why == ["no answer within 0.05 s"]
    assert dict(trip.bank.n_publications) == {"trip/book/ticket/1": 1}
    assert trip.there == ["Porto"]


def test_a_target_that_cannot_be_reached_blocks_the_run_until_a_person_knows():
    trip = Trip()
    trip.bank.reachable = False

    async def main():
        run = trip.session.start()
        trip.hold.set()
        with pytest.raises(RunBlocked, match=r"book/ticket: .*does not answer"):
            await run.result()
        trip.bank.reachable = True
        run.resolve("book", "ticket", "absent")
        return await checked(run)

    live(main())
    assert dict(trip.bank.n_publications) == {"trip/book/ticket/1": 1}


def test_a_premise_that_changed_makes_the_node_decide_again():
    bank = MemoryTarget("bank")
    bank.set("seats", 1)
    flow = Workflow("premises")
    seen = []

    @flow.node(kind="tool", retries=1)
    async def book(state, ctx):
        token = bank.token("seats")
        seen.append(token)
        if len(seen) == 1:
            bank.set("seats", 0)
        ctx.stage(Effect("ticket", {"to": state["request"]["city"]}, "K", "bank", {"seats": token}))
        return {}

    async def main():
        return await checked(Session(flow, REQUEST, endpoint=None, targets={"bank": bank}).start())

    live(main())
    assert seen[:2] == ["1", "2"]
    assert [key for _, key, _ in bank.happened] == ["premises/book/ticket/1"]


def test_a_premise_that_changed_blocks_a_node_that_may_not_run_again():
    bank = MemoryTarget("bank")
    flow = Workflow("premises")

    @flow.node(kind="tool")
    async def book(state, ctx):
        ctx.stage(Effect("ticket", {"to": state["request"]["city"]}, "K", "bank", {"seats": "7"}))
        return {}

    async def main():
        run = Session(flow, REQUEST, endpoint=None, targets={"bank": bank}).start()
        await fails(run, RunBlocked, r"seats changed .*no retry of the node is left")

    live(main())
    assert bank.happened == []


# --- undoing that fails ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("answer", ["undone", "landed"])
def test_what_cannot_be_undone_blocks_the_run_until_a_person_has_seen_to_it(answer):
    trip = Trip()

    async def main():
        run = trip.session.start()
        await until(run, S.CONFIRMED)
        trip.bank.faults.append(Fault.FAIL)
        run.revise("request.city", "Faro")
        trip.hold.set()
        with pytest.raises(RunBlocked, match="book/ticket: bank refused trip/book/ticket/0") as caught:
            await run.result()
        assert len(caught.value.residue) == 1
        assert trip.there == ["Porto"], "and Faro has not left: a slot holds one"
        if answer == "undone":
            trip.bank.compensate("trip/book/ticket/0")
        run.resolve("book", "ticket", answer)
        return await checked(run)

    assert live(main()).effects["book"]["ticket"] == {"to": "Faro"}
    assert trip.there == ["Faro"]


def test_what_is_irreversible_and_wrong_is_listed_and_right_again_when_it_is():
    trip = Trip("X")

    async def main():
        run = trip.session.start()
        await until(run, S.CONFIRMED)
        run.revise("request.city", "Faro")
        trip.hold.set()
        with pytest.raises(RunBlocked, match="book/ticket: replaced by another payload, irreversible"):
            await run.result()
        assert trip.said == [("publish", "Porto")]
        run.revise("request.city", "Porto")
        return await checked(run)

    live(main())
    assert trip.said == [("publish", "Porto")]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [(("book", "nothing", "landed"), "book/nothing is not blocked"), (("book", "ticket", "landed"), "is not blocked")],
)
def test_only_what_is_blocked_is_resolved(arguments, message):
    trip = Trip()

    async def main():
        run = trip.session.start()
        await until(run, S.CONFIRMED)
        with pytest.raises(ReviseLabError, match=message):
            run.resolve(*arguments)
        trip.hold.set()
        return await checked(run)

    live(main())


def test_an_answer_that_is_none_is_refused_by_name():
    trip = Trip()
    trip.bank.faults.append(Fault.FAIL)

    async def main():
        run = trip.session.start()
        await until(run, S.BLOCKED)
        with pytest.raises(ReviseLabError, match=r"'maybe' .* landed, absent, undone"):
            run.resolve("book", "ticket", "maybe")
        run.resolve("book", "ticket", "absent")
        trip.hold.set()
        return await checked(run)

    assert live(main()).effects["book"]["ticket"] == {"to": "Porto"}


def test_a_revision_while_the_last_effects_leave_is_refused_and_taken_once_the_run_is_reopened():
    trip = Trip(policy="revise_plus")
    trip.bank.faults.append(Fault.HANG)
    trip.hold.set()

    async def main():
        run = trip.session.start()
        await until(run, S.DISPATCHED)
        assert run.machine.state == "closing"
        with pytest.raises(WorkflowClosed):
            await run.revise("request.city", "Faro")
        trip.bank.resume.set()
        assert (await checked(run)).effects["book"]["ticket"] == {"to": "Porto"}
        again = run.reopen()
        again.revise("request.city", "Faro")
        return await checked(again)

    assert live(main()).effects["book"]["ticket"] == {"to": "Faro"}
    assert trip.said == [("publish", "Porto"), ("compensate", "Porto"), ("publish", "Faro")]


def test_a_premise_that_changed_under_the_seal_is_decided_again_and_asked_for_again():
    bank = MemoryTarget("bank")
    bank.set("seats", 2)
    flow = Workflow("seal")
    asked = []

    @flow.node(kind="tool", retries=1)
    async def book(state, ctx):
        token = bank.token("seats")
        ctx.stage(Effect("ticket", {"seen at": token}, "K", "bank", {"seats": token}))
        return {"at": token}

    async def ask(intent, effect):
        asked.append(effect.payload["seen at"])
        if len(asked) == 1:
            bank.set("seats", 1)
        return True

    async def main():
        targets = {"bank": bank}
        run = Session(flow, {}, "revise_plus", endpoint=None, targets=targets, authorise=ask).start()
        result = await run.result()
        assert run.audit() == []
        return result

    result = live(main())
    assert (asked, result.effects) == (["1", "2"], {"book": {"ticket": {"seen at": "2"}}})
    assert result.outputs == {"book": {"at": "2"}}
    assert len(bank.happened) == 1


# --- cancelling ----------------------------------------------------------------------------------------------------------


def test_a_cancelled_run_sends_nothing_more_and_leaves_what_is_out():
    trip = Trip(policy="revise_plus")

    async def main():
        run = trip.session.start()
        await until(run, S.STAGED)
        run.cancel()
        with pytest.raises(RunCancelled):
            await run.result()
        return run

    run = live(main())
    assert (states(run), trip.bank.happened) == (["staged", "dropped"], [])


def test_a_call_that_had_left_is_answered_although_the_run_was_cancelled():
    trip = Trip()
    trip.bank.faults.append(Fault.HANG)

    async def main():
        run = trip.session.start()
        await until(run, S.DISPATCHED)
        run.cancel()
        trip.bank.resume.set()
        with pytest.raises(RunCancelled):
            await run.result()
        await until(run, S.CONFIRMED)
        await asyncio.wait([run._main])
        return run

    run = live(main())
    assert (trip.there, run.effects()) == (["Porto"], {"book": {"ticket": {"to": "Porto"}}})


def test_a_cancelled_run_whose_call_did_not_arrive_ends_and_asks_nobody():
    asked = []
    trip = Trip(authorise=lambda intent, effect: asked.append(intent.key) or True)
    trip.bank.faults.append(Fault.NOT_DONE)

    async def main():
        run = trip.session.start()
        await until(run, S.DISPATCHED)
        run.cancel()
        done, _ = await asyncio.wait([run._main], timeout=0.5)
        run._main.cancel()
        await asyncio.wait([run._main])
        return bool(done)

    ended = live(main())
    assert (ended, asked) == (True, ["trip/book/ticket/0"])


# --- reopening ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["revise", "revise_plus"])
@pytest.mark.parametrize(
    ("place", "value", "said"),
    [
        ("request.days", 3, [("publish", "Porto")]),
        ("request.city", "Faro", [("publish", "Porto"), ("compensate", "Porto"), ("publish", "Faro")]),
    ],
)
def test_a_reopened_run_keeps_what_stays_equal_and_undoes_what_does_not(policy, place, value, said, tmp_path):
    trip = Trip(policy=policy, journal=tmp_path / "j")

    async def main():
        run = trip.session.start()
        trip.hold.set()
        first = await checked(run)
        again = run.reopen()
        again.revise(place, value)
        return first, again, await checked(again)

    first, again, second = live(main())
    assert first.effects["book"]["ticket"] == {"to": "Porto"}
    assert second.effects["book"]["ticket"] == {"to": trip.there[0]}
    assert trip.said == said
    replayed = trip.session.replay()
    assert replayed.fingerprint() == again.machine.fingerprint(), "the file holds both parts"


def test_a_run_is_reopened_only_when_it_is_closed():
    trip = Trip()

    async def main():
        run = trip.session.start()
        with pytest.raises(ReviseLabError, match="not closed - revise it as it is"):
            run.reopen()
        trip.hold.set()
        return await checked(run)

    live(main())


# --- going on after the process has died ---------------------------------------------------------------------------------


@pytest.fixture
def abandon():
    """Return what runs a trip up to a state of its effect and then loses the process: its loop is never run again."""
    lost = []

    def lose(trip, state, then=lambda run: None):
        loop = asyncio.new_event_loop()
        loop.set_default_executor(threads := ThreadPoolExecutor())

        async def start():
            run = trip.session.start()
            await until(run, state)
            then(run)
            return run

        run = loop.run_until_complete(asyncio.wait_for(start(), 20))
        run._file.close()  # the lock goes with the process
        lost.append((trip, threads, loop, asyncio.all_tasks(loop)))

    yield lose
    for trip, threads, loop, tasks in lost:
        trip.bank.resume.set()
        threads.shutdown()
        for task in tasks:
            task._log_destroy_pending = False
        loop.close()
        _LOST.extend(tasks)


_LOST: list[asyncio.Task] = []
"""Keeps what was lost from being collected, which would run its clean-up: the dead clean up nothing."""


@pytest.mark.parametrize(("arrives", "key"), [("before", 0), ("after", 1)])
@pytest.mark.parametrize("revised", [False, True])
def test_a_run_goes_on_from_its_journal_and_the_call_that_had_left_counts_once(
    tmp_path, abandon, arrives, key, revised
):
    """The call gets through before the target is asked what became of it, or after: then it finds its key closed."""
    trip = Trip(journal=tmp_path / "j")
    trip.bank.faults.append(Fault.HANG)
    abandon(trip, S.DISPATCHED)
    if arrives == "before":
        trip.bank.resume.set()
        while not trip.bank.happened:
            threading.Event().wait(0.002)

    async def main():
        run = trip.session.resume()
        if revised:
            run.revise("request.city", "Faro")
        await until(run, S.UNKNOWN)
        trip.hold.set()
        return run, await checked(run)

    run, result = live(main())
    trip.bank.resume.set()
    right = "Faro" if revised else "Porto"
    assert result.effects["book"]["ticket"] == {"to": right}
    assert trip.there == [right]
    assert max(trip.bank.n_publications.values()) == 1
    if not revised:
        assert list(trip.bank.n_publications) == [f"trip/book/ticket/{key}"]
    assert sum(isinstance(each, ev.Recover) for each in run.journal) == 1


def test_a_cancelled_run_that_died_asks_what_became_of_its_call_and_ends(tmp_path, abandon):
    trip = Trip(journal=tmp_path / "j")
    trip.bank.faults.append(Fault.HANG)
    abandon(trip, S.DISPATCHED, then=lambda run: run.cancel())

    async def main():
        run = trip.session.resume()
        with pytest.raises(RunCancelled):
            await run.result()
        await asyncio.wait_for(asyncio.wait([run._main]), 5)
        return run

    run = live(main())
    assert states(run)[2:5] == ["dispatched", "unknown", "dropped"]
    assert trip.bank.happened == []


def test_whoever_was_asked_by_a_process_that_died_is_asked_again(tmp_path, abandon):
    silent = Trip(authorise=lambda intent, effect: asyncio.get_running_loop().create_future(), journal=tmp_path / "j")
    abandon(silent, S.STAGED)
    asked = []
    trip = Trip(authorise=lambda intent, effect: asked.append(intent.key) or True, journal=tmp_path / "j")

    async def main():
        trip.hold.set()
        return await checked(trip.session.resume())

    assert live(main()).effects["book"]["ticket"] == {"to": "Porto"}
    assert asked == ["trip/book/ticket/0"]


def test_a_journal_shows_the_run_as_it_was_at_any_entry(tmp_path):
    trip = Trip(journal=tmp_path / "j")

    async def main():
        run = trip.session.start()
        await until(run, S.CONFIRMED)
        run.revise("request.city", "Faro")
        trip.hold.set()
        await checked(run)
        return run

    run = live(main())
    for at, entry in enumerate(run.journal):
        if isinstance(entry, ev.Effected) and entry.state in (S.DISPATCHED, S.COMPENSATING):
            asked = max(i for i in range(at) if isinstance(run.journal[i], ev.Dispatch | ev.Compensate))
            then = trip.session.replay(until=asked)
            record = then.outboxes["book"]["ticket"].waiting or then.outboxes["book"]["ticket"].live
            assert isinstance(then, Machine)
            assert record.state is (S.AUTHORISED if entry.state is S.DISPATCHED else S.TO_COMPENSATE) or then.undoable()
    whole = trip.session.replay()
    assert (whole.state, whole.fingerprint()) == ("closed", run.machine.fingerprint())
    assert trip.session.replay(until=1).outboxes == {}


# --- slots, members, confirmations ---------------------------------------------------------------------------------------


def test_each_slot_of_a_node_goes_its_own_way():
    bank, mail = MemoryTarget("bank"), MemoryTarget("mail")
    hold = threading.Event()
    flow = Workflow("two")

    @flow.node(kind="tool")
    async def book(state, ctx):
        ctx.stage(Effect("ticket", state["request"]["city"], "K", "bank"))
        ctx.stage(Effect("note", state["request"]["days"], "R", "mail"))
        return {}

    @flow.node(kind="tool")
    async def rest(state, ctx):
        while not hold.is_set():
            await asyncio.sleep(0.002)

    async def main():
        run = Session(flow, REQUEST, endpoint=None, targets={"bank": bank, "mail": mail}).start()
        await until(run, S.CONFIRMED, 2)
        run.revise("request.city", "Faro")
        hold.set()
        return await checked(run)

    assert live(main()).effects == {"book": {"ticket": "Faro", "note": 2}}
    assert [what for what, _, _ in bank.happened] == ["publish", "compensate", "publish"]
    assert [what for what, _, _ in mail.happened] == ["publish"], "what stays equal is kept"


def test_two_effects_in_one_slot_are_refused():
    flow = Workflow("clash")

    @flow.node(kind="tool")
    async def book(state, ctx):
        ctx.stage(Effect("ticket", 1, "K", "bank"))
        ctx.stage(Effect("ticket", 2, "K", "bank"))

    async def main():
        run = Session(flow, REQUEST, endpoint=None, targets={"bank": MemoryTarget("bank")}).start()
        await fails(run, RunFailed, "two effects in slot 'ticket'")

    live(main())


def test_members_have_effects_of_their_own_and_take_them_along():
    bank = MemoryTarget("bank")
    hold = threading.Event()
    flow = Workflow("many")

    @flow.node(kind="tool")
    async def split(state, ctx):
        return {"stops": {name: {"to": name} for name in state["request"]["stops"]}}

    @flow.member(of="split", items="stops", kind="tool")
    async def book(state, ctx):
        ctx.stage(Effect("ticket", {"to": ctx.key}, "K", "bank"))
        return {}

    @flow.node(kind="tool")
    async def rest(state, ctx):
        while not hold.is_set():
            await asyncio.sleep(0.002)

    async def main():
        run = Session(flow, {"request": {"stops": ["Porto", "Beja"]}}, endpoint=None, targets={"bank": bank}).start()
        await until(run, S.CONFIRMED, 2)
        run.revise("request.stops", ["Beja", "Faro"])
        hold.set()
        return await checked(run)

    result = live(main())
    assert result.effects == {f"book[{name}]": {"ticket": {"to": name}} for name in ("Beja", "Faro")}
    assert [key for what, key, _ in bank.happened if what == "compensate"] == ["many/book[Porto]/ticket/0"]
    assert set(bank.n_publications.values()) == {1}


@pytest.mark.parametrize("policy", ["revise", "revise_plus"])
def test_a_node_reads_the_confirmation_of_an_effect_and_follows_it(policy):
    bank = MemoryTarget("bank")
    hold = threading.Event()
    flow = Workflow("letters")
    read = []

    @flow.node(kind="tool")
    async def book(state, ctx):
        ctx.stage(Effect("ticket", {"to": state["request"]["city"]}, "K", "bank"))
        return {}

    @flow.node(kind="tool", after="book/ticket")
    async def mail(state, ctx):
        read.append(state["book/ticket"]["payload"]["to"])
        return {"text": f"booked as {state['book/ticket']['intent']}"}

    @flow.node(kind="tool")
    async def rest(state, ctx):
        while not hold.is_set():
            await asyncio.sleep(0.002)

    async def main():
        run = Session(flow, REQUEST, policy, endpoint=None, targets={"bank": bank}).start()
        await until(run, S.CONFIRMED)
        while not read:
            await asyncio.sleep(0.002)
        run.revise("request.city", "Faro")
        hold.set()
        return await checked(run)

    assert live(main()).outputs["mail"] == {"text": "booked as letters/book/ticket/1"}
    assert list(dict.fromkeys(read)) == ["Porto", "Faro"], "it never ran on anything in between"


# --- the journal of a run that has ended, or never began ---------------------------------------------------------------


def test_a_run_that_has_ended_answers_with_and_without_a_journal_alike(tmp_path):
    trip = Trip(journal=tmp_path / "j")
    trip.hold.set()

    async def main():
        run = trip.session.start()
        await run.result()
        with pytest.raises(WorkflowClosed, match=r"run\.reopen"):
            await run.revise("request.city", "Faro")
        run = run.reopen()
        await run.revise("request.city", "Faro")
        return (await checked(run)).effects, run.journal

    effects, journal = live(main())
    assert effects == {"book": {"ticket": {"to": "Faro"}}}
    assert trip.session.replay().journal == journal


def test_a_reopened_run_goes_on_in_the_journal_that_it_was_resumed_from(tmp_path):
    first, then = Trip(journal=tmp_path / "j"), Trip(journal=tmp_path / "other")
    then.bank = first.bank
    then.session = Trip(target=first.bank, journal=tmp_path / "other").session
    first.hold.set()

    async def main():
        await first.session.start().result()
        run = then.session.resume(tmp_path / "j")
        await run.result()
        run = run.reopen()
        run.revise("request.city", "Faro")
        await until(run, S.CONFIRMED, 2)
        run.cancel()
        return run

    run = live(main())
    assert not (tmp_path / "other").exists()
    assert first.session.replay().version == run.machine.version


def test_a_run_that_is_stopped_before_it_began_lets_go_of_its_journal(tmp_path):
    trip = Trip(journal=tmp_path / "j")

    async def main():
        trip.session.start()

    asyncio.run(main())
    Journal(tmp_path / "j").close()


def test_a_run_that_was_stopped_takes_no_revision():
    trip = Trip()

    async def main():
        run = trip.session.start()
        await until(run, S.CONFIRMED)
        run._main.cancel()
        await asyncio.wait([run._main])
        with pytest.raises(WorkflowClosed, match="was stopped - resume it"):
            await run.revise("request.city", "Faro")

    live(main())
    assert trip.said == [("publish", "Porto")]


def test_a_journal_of_more_than_the_workflow_makes_is_not_gone_on_with(tmp_path):
    """Its receipt was read by a node that is gone: what came next was written over the gap, and nothing could read it."""
    bank, hold = MemoryTarget("bank"), asyncio.Event()

    def session(after):
        flow = Workflow("trip")

        @flow.node()
        async def book(state, ctx):
            ctx.stage(Effect("ticket", {"to": "Porto"}, "R", "bank"))

        @flow.node()
        async def rest(state, ctx):
            await hold.wait()

        flow.node(name="mail", after=after)(lambda state: {})
        return Session(flow, {}, endpoint=None, targets={"bank": bank}, journal=tmp_path / "j")

    async def main():
        run = session(("book/ticket", "rest")).start()
        await until(run, S.CONFIRMED)
        await asyncio.sleep(0.01)
        run._main.cancel()
        await asyncio.wait([run._main])
        hold.set()
        with pytest.raises(ReviseLabError, match="resume it with the workflow that wrote it"):
            session("rest").resume()
        return await checked(session(("book/ticket", "rest")).resume())

    assert live(main()).effects == {"book": {"ticket": {"to": "Porto"}}}
