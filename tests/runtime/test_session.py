"""Sessions and runs as a user holds them: start, revise, wait, cancel, ask, and go on."""

from __future__ import annotations

import asyncio
import threading

import pytest

from revise_lab import Session, Workflow
from revise_lab.errors import (
    PathError,
    ReentrantRevision,
    RefusedCombination,
    ReviseLabError,
    RevisionRefused,
    RunCancelled,
    RunFailed,
    StaleBase,
    ValueNotCanonical,
    WorkflowClosed,
)
from revise_lab.records import event as ev
from revise_lab.records.revision import Change, Op, Revision
from revise_lab.runtime.endpoint import connect
from revise_lab.runtime.models import ScriptedModel
from revise_lab.workloads.supplier.native import INPUTS, REVISIONS, build

AFFECTED = {
    "policy_control": "policy assess reviewer join report",
    "helper_goal": "requirements assess reviewer join report",
    "reviewer_evidence": "review_evidence assess reviewer join report",
    "country": "costs screening join report",
    "volume": "costs join report",
}


def trip(seconds=1.0):
    """``search`` and ``plan`` read different places; ``book`` follows both."""
    flow = Workflow("trip")

    @flow.node(kind="tool")
    async def search(state, ctx):
        city = state["request"]["city"]
        await ctx.pause(seconds)
        return {"found": f"trains to {city}"}

    @flow.node(kind="tool")
    async def plan(state, ctx):
        days = state["request"]["days"]
        await ctx.pause(seconds)
        return {"days": days}

    @flow.node(kind="tool", after=("search", "plan"))
    async def book(state, ctx):
        found, days = state["search"]["found"], state["plan"]["days"]
        await ctx.pause(seconds)
        return {"booked": f"{found}, {days} days"}

    return flow


REQUEST = {"request": {"city": "Porto", "days": 2}}


def started(run, *, since=0):
    return [entry.attempt for entry in run.journal[since:] if isinstance(entry, ev.Started)]


# --- start, revise, wait ---


def test_a_run_gives_its_result(virtually):
    async def main():
        run = Session(trip(), REQUEST, endpoint=None).start()
        assert (run.ended, run.plan) == (False, None)
        result = await run.result()
        return run, result

    run, result = virtually(main())
    assert result.outputs == {
        "search": {"found": "trains to Porto"},
        "plan": {"days": 2},
        "book": {"booked": "trains to Porto, 2 days"},
    }
    assert (result.version, result.late_invalid, run.ended) == (3, 0, True)
    assert {type(value) for value in result.outputs.values()} == {dict}, "plain data, to be changed at will"
    assert "closed" in repr(run)


def test_a_revision_stops_what_read_it_and_leaves_the_rest_alone(virtually):
    async def main():
        run = Session(trip(), REQUEST, endpoint=None).start()
        await asyncio.sleep(1.5)
        plan = await run.revise("request.city", "Faro")
        assert [plan.of("recompute"), plan.of("cancel")] == [("search",), ("book",)]
        result = await run.result()
        return run, result

    run, result = virtually(main())
    assert started(run) == ["search@1", "plan@1", "book@1", "search@2", "book@2"]
    assert result.outputs["book"] == {"booked": "trains to Faro, 2 days"}
    assert [(span.attempt, span.outcome) for span in run.spans if span.outcome != "completed"] == [
        ("book@1", "aborted")
    ]
    assert run.revised_s == [("r1", 1.5)]


def test_every_operation_and_the_path_as_tuple(virtually):
    flow = Workflow("whole")

    @flow.node()
    async def echo(state, ctx):
        await ctx.pause(1.0)
        return {"in": dict(state["in"])}

    async def main():
        run = Session(flow, {"in": {"list": [1], "gone": 1, "a.b": 0}}, endpoint=None).start()
        run.revise("in.list", 2, op="append")
        run.revise("in.list[0]", 0, op="insert")
        run.revise("in.list[1]", op="remove")
        run.revise("in.gone", op="delete")
        run.revise(("in", "a.b"), {"deep": True})
        run.revise(Revision("word", (Change("in", "set", ("away",), 1), Change("in", "delete", ("away",)))))
        run.revise(Revision("two", (Change("in", Op.SET, ("x",), 1), Change("in", Op.SET, ("y",), 2))))
        return await run.result()

    assert virtually(main()).outputs["echo"] == {"in": {"list": [0, 2], "a.b": {"deep": True}, "x": 1, "y": 2}}


REFUSED = [
    (("request.city", "X"), {"base": 0}, StaleBase, r"made against version 0 of 'request', which is at 1"),
    (("request.city", "X"), {"base": 7}, StaleBase, r"version 7 of 'request', which is at 1 - read version 1"),
    (("reqest.city", "X"), {}, RevisionRefused, r"no artifact is named 'reqest' - inputs are request"),
    (("search.found", "X"), {}, RevisionRefused, r"'search' is the output of a node"),
    (("request.city.name", "X"), {}, PathError, r"request\.city is leaf and takes no set of 'name'"),
    (("request.city", {1, 2}), {}, ValueNotCanonical, r"set is not JSON-like"),
    (("request.days", 1), {"op": "append"}, PathError, r"request\.days is leaf, not a list"),
    ((Revision("empty", ()),), {}, RevisionRefused, r"holds no change"),
    (("request.city",), {}, RevisionRefused, r"set request\.city lacks a value"),
    (("request", 1), {"id": 7}, RevisionRefused, r"id of revision 7 is no text - write '7'"),
    (
        (Revision("text", (Change("request", "delte", ("city",)),)),),
        {},
        RevisionRefused,
        r"its op is one of set, delete",
    ),
    ((Revision("list", (Change("request", Op.SET, ["city"], 1),)),), {}, RevisionRefused, r"its path a tuple"),
]


@pytest.mark.parametrize(("arguments", "options", "error", "message"), REFUSED)
@pytest.mark.parametrize("policy", ["revise", "wait", "revise_plus"])
def test_a_refusal_is_raised_where_it_is_awaited_and_changes_nothing(
    virtually, policy, arguments, options, error, message
):
    async def main():
        run = Session(trip(), REQUEST, policy, endpoint=None).start()
        await asyncio.sleep(0.5)
        await run.revise("request.note", "first")
        version = run.machine.version
        with pytest.raises(error, match=message) as caught:
            await run.revise(*arguments, **options)
        assert run.machine.version == version
        run.revise(*arguments, **options)
        return caught.value, (await run.result()).outputs

    refusal, outputs = virtually(main())
    if error is StaleBase:
        assert refusal.current == 1
    assert outputs["book"] == {"booked": "trains to Porto, 2 days"}


def test_a_slip_in_a_path_is_refused_at_once(virtually):
    async def main():
        run = Session(trip(), REQUEST, endpoint=None).start()
        with pytest.raises(PathError, match="is not a path"):
            run.revise("request..city", 1)
        return await run.result()

    virtually(main())


def test_a_duplicate_is_acknowledged_without_a_plan(virtually):
    async def main():
        run = Session(trip(), REQUEST, endpoint=None).start()
        await asyncio.sleep(0.5)
        plans = [await run.revise("request.city", city, id="mine") for city in ("Faro", "Beja")]
        return plans, await run.result()

    (first, second), result = virtually(main())
    assert first.revision == "mine"
    assert second is None
    assert result.outputs["search"] == {"found": "trains to Faro"}


def test_wait_lets_the_turn_end_and_keeps_the_revision(virtually):
    async def main():
        run = Session(trip(), REQUEST, "wait", endpoint=None).start()
        await asyncio.sleep(0.5)
        assert await run.revise("request.city", "Faro") is None
        await asyncio.sleep(0.1)
        assert run.machine.inputs["request"]["city"] == "Porto"
        result = await run.result()
        return run, result, asyncio.get_running_loop().time()

    run, result, ended_s = virtually(main())
    assert started(run) == [f"{node}@{n}" for n in (1, 2) for node in ("search", "plan", "book")]
    assert ended_s == pytest.approx(4.0)
    assert result.outputs["book"] == {"booked": "trains to Faro, 2 days"}


def test_revisions_that_arrive_together_are_planned_together(virtually):
    async def main():
        run = Session(trip(), REQUEST, "revise_plus", endpoint=None, coalesce_s=0.2).start()
        await asyncio.sleep(1.5)
        plans = await asyncio.gather(
            run.revise("request.city", "Faro"), run.revise("request.days", 3), run.revise("request.city", "Porto")
        )
        result = await run.result()
        return run, plans, result

    run, plans, result = virtually(main())
    assert [plan.affected for plan in plans] == [("plan",)] * 3, "there and back is no change"
    assert started(run) == ["search@1", "plan@1", "book@1", "plan@2", "book@2"]
    assert result.outputs["book"] == {"booked": "trains to Porto, 3 days"}


def test_two_revisions_of_one_id_are_never_taken_together(virtually):
    """As if they had come one after the other: the second is a duplicate, and its value is not the one that was accepted."""

    async def main(coalesce_s):
        run = Session(trip(), REQUEST, "revise_plus", endpoint=None, coalesce_s=coalesce_s).start()
        await asyncio.sleep(1.5)
        asked = [run.revise("request.city", city, id="same") for city in ("Faro", "Braga")]
        plans = await asyncio.gather(*asked, return_exceptions=True)
        return plans, (await run.result()).outputs["book"]

    apart, together = (virtually(main(coalesce_s)) for coalesce_s in (0.0, 0.2))
    assert together[1] == apart[1] == {"booked": "trains to Faro, 2 days"}
    assert [type(each) for each in together[0]] == [type(each) for each in apart[0]]
    assert together[0][0].affected == apart[0][0].affected
    assert together[0][1] is None or isinstance(together[0][1], RevisionRefused)


def test_an_output_is_pinned_and_released(virtually):
    async def main():
        run = Session(trip(), REQUEST, "revise_plus", endpoint=None).start()
        await asyncio.sleep(1.5)
        plan = await run.revise("search.found", "a car", op="override")
        assert plan.affected == ("book",)
        await asyncio.sleep(0.1)
        run.revise("request.city", "Faro")
        await asyncio.sleep(0.9)
        run.revise("request.days", 3)
        await asyncio.sleep(0.3)
        assert run.machine.outputs()["search"] == {"found": "a car"}
        run.revise("search.found", op="withdraw")
        return run, await run.result()

    run, result = virtually(main())
    assert [attempt for attempt in started(run) if attempt.startswith("search")] == ["search@1", "search@2"]
    assert result.outputs["book"] == {"booked": "trains to Faro, 3 days"}


# --- revising from inside ---


def revising(awaited):
    flow = Workflow("inside")
    runs = []

    @flow.node(kind="tool")
    async def discover(state, ctx):
        mode = state["in"]["mode"]
        if mode == "old":
            answer = runs[0].revise("in.mode", "new")
            if awaited:
                await answer
        await ctx.pause(1.0)
        return {"mode": mode}

    return flow, runs


def test_a_body_may_revise_its_own_run_and_is_stopped_for_it(virtually):
    flow, runs = revising(awaited=False)

    async def main():
        runs.append(Session(flow, {"in": {"mode": "old"}}, endpoint=None).start())
        return await runs[0].result()

    assert virtually(main()).outputs["discover"] == {"mode": "new"}
    assert started(runs[0]) == ["discover@1", "discover@2"]
    assert [(span.outcome, span.end_s) for span in runs[0].spans] == [("aborted", 0.0), ("completed", 1.0)]


def test_a_body_that_awaits_its_own_revision_is_told_why_not(virtually):
    flow, runs = revising(awaited=True)

    async def main():
        runs.append(Session(flow, {"in": {"mode": "old"}}, endpoint=None).start())
        return await runs[0].result()

    assert virtually(main()).outputs["discover"] == {"mode": "new"}, "it was delivered all the same"
    failed = [entry.error for entry in runs[0].journal if isinstance(entry, ev.Fail)]
    assert len(failed) == 1
    assert failed[0].startswith(f"{ReentrantRevision.__name__}: a node body of run {runs[0].id} awaits")
    assert "without await" in failed[0]


def test_a_body_that_awaits_the_result_of_its_own_run_is_told_why_not(virtually):
    flow, runs = Workflow("circle"), []

    @flow.node(kind="tool")
    async def waits(state, ctx):
        return {"of": (await runs[0].result()).outputs}

    async def main():
        runs.append(Session(flow, {"in": {}}, endpoint=None).start())
        with pytest.raises(RunFailed, match=r"ReentrantRevision: .*awaits the result of that run.*await it outside"):
            await runs[0].result()
        runs[0].cancel()
        await asyncio.wait([runs[0]._main])

    virtually(main())


def test_a_body_may_await_the_revision_of_another_run(virtually):
    outer = Workflow("outer")
    runs = []

    @outer.node(kind="tool")
    async def steer(state, ctx):
        plan = await runs[0].revise("request.city", "Faro")
        return {"hit": list(plan.affected)}

    async def main():
        runs.append(Session(trip(), REQUEST, endpoint=None).start())
        await asyncio.sleep(0.5)
        steering = Session(outer, {}, endpoint=None).start()
        return await steering.result(), await runs[0].result()

    steered, revised = virtually(main())
    assert steered.outputs["steer"] == {"hit": ["search", "book"]}
    assert revised.outputs["search"] == {"found": "trains to Faro"}


# --- the end, and going on ---


def test_after_the_end_a_run_is_reopened_to_be_revised(virtually):
    async def main():
        run = Session(trip(), REQUEST, endpoint=None).start()
        await run.result()
        again = run.reopen()
        assert again.id != run.id
        plan = await again.revise("request.days", 3)
        result = await again.result()
        assert [span.attempt for span in again.spans] == ["plan@2", "book@2"], "the rest is kept"
        return run, again, plan, result

    run, again, plan, result = virtually(main())
    assert plan.of("recompute") == ("plan", "book")
    assert result.outputs["book"] == {"booked": "trains to Porto, 3 days"}
    assert run.machine.outputs()["book"] == {"booked": "trains to Porto, 2 days"}, "the sealed run stays as it was"
    assert again.machine.state == "closed"


def test_only_a_sealed_run_is_reopened(virtually):
    async def main():
        run = Session(trip(), REQUEST, endpoint=None).start()
        with pytest.raises(ReviseLabError, match="is open, not closed - revise it as it is"):
            run.reopen()
        run.cancel()
        with pytest.raises(RunCancelled):
            await run.result()
        with pytest.raises(ReviseLabError, match="is cancelled, not closed"):
            run.reopen()

    virtually(main())


def test_a_cancelled_run_starts_nothing_more(virtually):
    async def main():
        run = Session(trip(), REQUEST, endpoint=None).start()
        await asyncio.sleep(0.5)
        run.cancel()
        run.cancel()
        with pytest.raises(RunCancelled, match="was cancelled - start it again"):
            await run.result()
        with pytest.raises(WorkflowClosed):
            await run.revise("request.city", "Faro")
        await asyncio.sleep(5.0)
        return run

    run = virtually(main())
    assert started(run) == ["search@1", "plan@1"]
    assert [span.outcome for span in run.spans] == ["aborted", "aborted"]
    assert run.machine.outputs() == {}


def fragile():
    flow = Workflow("fragile")

    @flow.node(kind="tool", retries=1)
    async def check(state, ctx):
        await ctx.pause(1.0)
        if state["in"]["n"] < 0:
            raise ValueError("n is negative")
        return {"n": state["in"]["n"]}

    @flow.node(kind="tool", after="check")
    async def follow(state, ctx):
        return {"n": state["check"]["n"] + 1}

    return flow


def test_a_failed_run_is_mended_by_a_revision(virtually):
    async def main():
        run = Session(fragile(), {"in": {"n": -1, "note": ""}}, endpoint=None).start()
        with pytest.raises(
            RunFailed, match=r"failed in check: ValueError: n is negative - revise what it read"
        ) as caught:
            await run.result()
        assert caught.value.failures == {"check": "ValueError: n is negative"}
        assert run.explain("check") == "check is failed after 2 attempts; nothing has been revised."
        await run.revise("in.note", "nobody reads me")
        with pytest.raises(RunFailed):
            await run.result()
        await run.revise("in.n", 4)
        result = await run.result()
        return run, result

    run, result = virtually(main())
    assert started(run) == ["check@1", "check@2", "check@3", "follow@1"]
    assert result.outputs == {"check": {"n": 4}, "follow": {"n": 5}}
    assert [span.outcome for span in run.spans] == ["failed", "failed", "completed", "completed"]


def test_too_long_is_a_failure_with_a_name(virtually):
    flow = Workflow("slow")

    @flow.node(kind="tool", timeout_s=2.0, retries=1)
    async def slow(state, ctx):
        await ctx.pause(state["in"]["seconds"])
        return {}

    async def main():
        run = Session(flow, {"in": {"seconds": 3.0}}, endpoint=None).start()
        with pytest.raises(RunFailed, match=r"TimeoutError: node 'slow' ran longer than timeout_s=2"):
            await run.result()
        assert asyncio.get_running_loop().time() == pytest.approx(4.0), "tried twice"
        await run.revise("in.seconds", 1.0)
        await run.result()
        return run

    assert started(virtually(main())) == ["slow@1", "slow@2", "slow@3"]


def _cancels(*_):
    raise asyncio.CancelledError


async def _awaits_what_was_cancelled(state, ctx):
    inner = asyncio.ensure_future(asyncio.sleep(9))
    inner.cancel()
    await inner


@pytest.mark.parametrize(
    "body", [_cancels, _awaits_what_was_cancelled, lambda s, c: _cancels(), lambda s, c: c.tool("t", _cancels)]
)
def test_what_a_body_awaits_and_others_cancel_is_a_failure_of_the_body(body):
    """Nobody had stopped the attempt, so that nobody was told that it had ended, and the run waited for ever."""
    flow = Workflow("inner")

    async def called(state, ctx):
        return await body(state, ctx)

    flow.node(name="n", retries=1)(body if body is _cancels else called)

    async def main():
        run = Session(flow, {}, endpoint=None).start()
        with pytest.raises(RunFailed, match="n: CancelledError"):
            await asyncio.wait_for(run.result(), 10)
        assert started(run) == ["n@1", "n@2"]
        run.cancel()

    asyncio.run(main())


class _Mute(Exception):
    def __str__(self):
        raise ValueError("no text")


class _Moody(Exception):
    @property
    def retryable(self):
        raise ValueError("who knows")


@pytest.mark.parametrize("error", [_Mute(), _Moody(), StopIteration(), ExceptionGroup("several", [KeyError("x")])])
def test_an_exception_of_any_kind_is_a_failure_of_its_node(virtually, error):
    flow = Workflow("odd")

    @flow.node(name="n")
    async def n(state):
        raise error

    async def main():
        run = Session(flow, {}, endpoint=None).start()
        with pytest.raises(RunFailed, match=f"n: .*{type(error).__name__}"):
            await run.result()
        run.cancel()

    virtually(main())


def test_a_plain_function_that_returns_something_to_await_is_told_so_and_an_object_may_be_called_asynchronously():
    class Body:
        async def __call__(self, state, ctx):
            await asyncio.sleep(0)
            return {"n": 1}

    flow = Workflow("callables")
    flow.node(name="thing")(Body())
    flow.node(name="hidden", after="thing")(lambda state, ctx: Body()(state, ctx))

    async def main():
        run = Session(flow, {}, endpoint=None).start()
        with pytest.raises(RunFailed, match=r"hidden.*plain function.*async def"):
            await run.result()
        assert run.machine.outputs()["thing"] == {"n": 1}
        run.cancel()

    with pytest.warns(RuntimeWarning, match="never awaited"):
        asyncio.run(main())


@pytest.mark.parametrize("what", [lambda run: run.revise("request.city", "Faro"), lambda run: run.cancel()])
def test_a_run_is_changed_on_its_own_event_loop_only(what):
    async def main():
        run = Session(trip(0.0), REQUEST, endpoint=None).start()
        await asyncio.sleep(0)
        with pytest.raises(ReviseLabError, match="call_soon_threadsafe"):
            await asyncio.to_thread(what, run)
        return (await run.result()).outputs["book"]

    assert asyncio.run(main()) == {"booked": "trains to Porto, 2 days"}


def test_without_a_slot_nothing_could_start():
    with pytest.raises(RefusedCombination, match="n_slots=0"):
        Session(trip(), REQUEST, endpoint=None, n_slots=0)


@pytest.mark.parametrize(("n_slots", "seconds"), [(1, 3.0), (None, 2.0)])
def test_slots(virtually, n_slots, seconds):
    async def main():
        await Session(trip(), REQUEST, endpoint=None, n_slots=n_slots).start().result()
        return asyncio.get_running_loop().time()

    assert virtually(main()) == pytest.approx(seconds)


def test_several_runs_live_in_one_process(virtually):
    async def main():
        runs = [
            Session(trip(), {"request": {"city": city, "days": 1}}, policy, endpoint=None).start()
            for city in ("Porto", "Faro")
            for policy in ("revise", "suffix", "restart")
        ]
        await asyncio.sleep(1.5)
        for run in runs[::2]:
            run.revise("request.days", 9)
        results = await asyncio.gather(*(run.result() for run in runs))
        return runs, results

    runs, results = virtually(main())
    assert len({run.id for run in runs}) == 6
    assert [result.outputs["book"]["booked"] for result in results] == [
        f"trains to {city}, {days} days" for city, days in zip(["Porto"] * 3 + ["Faro"] * 3, [9, 1] * 3, strict=True)
    ]


def test_without_a_loop_or_a_model_the_reason_is_given(virtually):
    with pytest.raises(ReviseLabError, match="no event loop is running - start a run inside async code"):
        Session(trip(), REQUEST, endpoint=None).start()

    async def main():
        run = Session(build(), INPUTS, endpoint=None).start()
        with pytest.raises(RunFailed, match=r"node 'costs' asks a model and the session has none - pass endpoint="):
            await run.result()
        run.cancel()
        with pytest.raises(RunCancelled):
            await run.result()

    virtually(main())


def test_an_endpoint_that_is_not_there_ends_the_run_with_its_error():
    async def main():
        run = Session(build(), INPUTS, endpoint="http://127.0.0.1:9/v1").start()
        with pytest.raises(ReviseLabError, match=r"127\.0\.0\.1:9"):
            await run.result()
        assert run.ended

    asyncio.run(main())


# --- looking ---


def test_watching_shows_the_journal_from_its_beginning_to_its_end(virtually):
    async def main():
        run = Session(trip(), REQUEST, endpoint=None).start()
        await asyncio.sleep(1.2)
        early = asyncio.create_task(_collect(run))
        run.revise("request.days", 3)
        await run.result()
        return run, await early, await _collect(run)

    run, early, late = virtually(main())
    assert early == late == run.journal
    assert [type(entry).__name__ for entry in late][:3] == ["Opened", "Start", "Started"]
    assert isinstance(late[-1], ev.Closed)


async def _collect(run):
    return [entry async for entry in run.watch()]


def test_a_node_is_explained(virtually):
    async def main():
        run = Session(trip(), REQUEST, endpoint=None).start()
        assert run.explain("book") == "book is pending after 0 attempts; nothing has been revised."
        await asyncio.sleep(1.5)
        await run.revise("request.city", "Faro")
        said = {node: run.explain(node) for node in ("search", "plan", "book")}
        with pytest.raises(ReviseLabError, match=r"has no node 'bok' - it has search, plan, book"):
            run.explain("bok")
        await run.result()
        return said

    said = virtually(main())
    assert said["search"].endswith(
        "r1 told it to recompute, because request.city changed (r1) and it read request.city as data."
    )
    assert (
        said["plan"]
        == "plan is committed after 1 attempt; r1 changed nothing that it read, directly or through its parents."
    )
    assert said["book"].endswith("r1 told it to cancel, because it follows search, which r1 affects.")


def test_a_run_is_drawn_with_its_states(virtually):
    async def main():
        run = Session(trip(), REQUEST, endpoint=None).start()
        await asyncio.sleep(1.5)
        await run.revise("request.city", "Faro")
        nodes, edges = run.drawing()
        picture = run._repr_html_()
        await run.result()
        return nodes, edges, picture

    nodes, edges, picture = virtually(main())
    assert [(name, state) for name, _, state, _ in nodes][:2] == [("search", "running"), ("plan", "committed")]
    assert edges == [("search", "book"), ("plan", "book")]
    assert picture.startswith("<svg")
    assert all(f">{name}<" in picture for name in ("search", "plan", "book"))


def test_streaming_is_waited_for(virtually):
    flow = Workflow("stream")

    @flow.node(kind="model")
    async def tell(state, ctx):
        return {"text": (await ctx.model(f"tell {state['in']['x']}", max_tokens=16)).text}

    async def main():
        model = ScriptedModel(delay_s=1.0)
        run = Session(flow, {"in": {"x": 1}}, endpoint=model).start()
        span = await run.generating("tell", n_tokens=3)
        assert (span.n_tokens, asyncio.get_running_loop().time()) == (3, 3.0)
        await run.revise("in.x", 2)
        await run.result()
        with pytest.raises(ReviseLabError, match="ended before 'tell' had received 3 tokens"):
            await run.generating("tell", n_tokens=3)
        return model, run

    model, run = virtually(main())
    assert [(call.outcome, call.usage.completion_tokens) for call in model.calls] == [("aborted", 3), ("completed", 16)]
    assert [(span.outcome, span.n_tokens) for span in run.spans] == [("aborted", 3), ("completed", 16)]


def test_the_result_is_that_of_a_fresh_run(virtually):
    async def main():
        model = ScriptedModel(delay_s=0.1)
        run = Session(build(), INPUTS, "revise_plus", endpoint=model).start()
        await run.generating("join")
        run.revise("request.country", "BR")
        await run.generating("report")
        run.revise("rules.tier", "blocked")
        await run.result()
        return await run.check_oracle(), run.audit()

    (truth, wrong), findings = virtually(main())
    assert (wrong, truth.oracle_hits, truth.oracle_fresh, findings) == ([], 7, 0, [])


# --- plain functions ---


def test_a_plain_function_is_fenced_not_stopped():
    """Its thread goes on; what it returns is nobody's, and the run does not wait for it to commit."""
    flow, gate, seen = Workflow("sync"), threading.Event(), []

    @flow.node(kind="tool")
    def work(state):
        n = state["in"]["n"]
        if n == 1:
            gate.wait(10)
        seen.append(n)
        return {"n": n}

    async def main():
        run = Session(flow, {"in": {"n": 1}}, endpoint=None).start()
        while not run.machine.attempts or not run.spans:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.05)
        plan = await run.revise("in.n", 2)
        assert plan.of("cancel") == ("work",)
        while run.machine.state == "open":
            await asyncio.sleep(0.01)
        gate.set()
        result = await run.result()
        return run, result

    run, result = asyncio.run(main())
    assert result.outputs["work"] == {"n": 2}
    assert seen == [2, 1]
    assert [(span.attempt, span.outcome) for span in run.spans] == [("work@1", "orphaned"), ("work@2", "completed")]
    assert [entry.orphaned for entry in run.journal if isinstance(entry, ev.Stop)] == [True]


def test_a_cancelled_run_does_not_take_the_late_result_of_a_thread():
    flow, gate = Workflow("late"), threading.Event()

    @flow.node(kind="tool")
    def work(state):
        gate.wait(10)
        return {"n": state["in"]["n"]}

    async def main():
        run = Session(flow, {"in": {"n": 1}}, endpoint=None).start()
        await asyncio.sleep(0.05)
        run.cancel()
        gate.set()
        with pytest.raises(RunCancelled):
            await run.result()
        await asyncio.sleep(0.05)
        return run

    run = asyncio.run(main())
    assert run.machine.outputs() == {}
    assert not any(isinstance(entry, ev.Committed) for entry in run.journal)


def test_tools_run_beside_the_loop():
    flow = Workflow("tools")

    @flow.node(kind="tool")
    async def both(state, ctx):
        total = await ctx.tool("add", lambda a, b: a + b, a=1, b=2)
        return {"sum": total, "at": await ctx.clock() > 0, "chance": 0 <= await ctx.random() < 1}

    @flow.node(kind="tool")
    async def lost(state, ctx):
        await ctx.tool("weather", city="Porto")

    async def main():
        run = Session(flow, {}, endpoint=None).start()
        with pytest.raises(RunFailed, match="node 'lost' calls tool 'weather', which nothing answers here"):
            await run.result()
        outputs = run.machine.outputs()
        run.cancel()
        return outputs

    assert asyncio.run(main())["both"] == {"sum": 3, "at": True, "chance": True}


# --- counted where the calls arrive ---


async def _supplier_on_the_endpoint(chosen, name, model):
    """Revise while ``report`` streams; return the plan and the server's log from the revision on."""
    path, value = REVISIONS[name]
    run = Session(build(), INPUTS, chosen, endpoint=model).start()
    await run.generating("report")
    before = len(model.log)
    plan = await run.revise(path, value)
    await run.result()
    assert run.audit() == []
    truth, wrong = await run.check_oracle()
    assert (wrong, truth.oracle_fresh) == ([], 0)
    while any(entry.outcome in ("queued", "running") for entry in model.log):
        await asyncio.sleep(0.005)
    ours = [entry for entry in model.log if entry.run == run.id]
    aborted = [entry.node for entry in ours if entry.outcome == "aborted"]
    return plan or run.plan, [entry.node for entry in model.log[before:]], aborted, run


async def _with_endpoint(job):
    async with connect("emulated", server={"ttft_s": 0.01, "itl_s": 0.03}) as model:
        return await job(model)


@pytest.mark.parametrize("name", REVISIONS)
def test_the_server_sees_the_calls_of_the_plan_and_one_abort(name):
    plan, calls, aborted, run = asyncio.run(_with_endpoint(lambda m: _supplier_on_the_endpoint("revise", name, m)))
    assert sorted(calls) == sorted(plan.affected) == sorted(AFFECTED[name].split())
    assert aborted == ["report"]
    assert [span.node for span in run.spans if span.outcome == "aborted"] == ["report"]


@pytest.mark.slow
@pytest.mark.parametrize(("chosen", "total"), [("restart", 50), ("suffix", 39), ("revise", 22), ("wait", 50)])
def test_the_sums_counted_at_the_server(chosen, total):
    async def job(model):
        return [await _supplier_on_the_endpoint(chosen, name, model) for name in REVISIONS]

    rows = asyncio.run(_with_endpoint(job))
    assert all(sorted(calls) == sorted(plan.affected) for plan, calls, _, _ in rows)
    assert sum(len(calls) for _, calls, _, _ in rows) == total
    assert [aborted for _, _, aborted, _ in rows] == [[] if chosen == "wait" else ["report"]] * 5


def test_one_changed_token_changes_what_follows_and_nothing_else():
    async def job(model):
        outputs = []
        for volume in (1200, 1201):
            inputs = {**INPUTS, "request": {**INPUTS["request"], "volume": volume}}
            outputs.append((await Session(build(), inputs, endpoint=model).start().result()).outputs)
        return outputs, model.log

    (one, other), log = asyncio.run(_with_endpoint(job))
    assert {node for node in one if one[node] != other[node]} == {"costs", "join", "report"}
    first, second = ({entry.node: entry.prompt_hash for entry in part} for part in (log[:10], log[10:]))
    assert {node for node in first if first[node] != second[node]} == {"costs", "join", "report"}


def test_a_revision_before_the_endpoint_is_there_starts_nothing_too_early():
    """What it made ready was started at once, and asked a model that the run did not have yet."""
    flow = Workflow("early")

    @flow.node(kind="model")
    async def plan(state, ctx):
        return {"n": state["in"]["n"], "text": (await ctx.model("go", max_tokens=2)).text}

    async def main():
        run = Session(flow, {"in": {"n": 1}}, endpoint="emulated").start()
        run.revise("in.n", 2)
        result = await run.result()
        return result.outputs["plan"]["n"], started(run)

    assert asyncio.run(main()) == (2, ["plan@1"])


def test_the_embedded_endpoint_is_opened_and_closed_by_the_run():
    async def main():
        run = Session(trip(0.0), REQUEST).start()
        await run.result()
        assert run.ended
        return run.model.source

    before = threading.active_count()
    assert asyncio.run(main()) == "emulated"
    assert threading.active_count() == before
