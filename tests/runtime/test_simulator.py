"""Virtual time: when what happens, who holds a slot, and that a run is a function of its arguments."""

from __future__ import annotations

import asyncio

import pytest

from revise_lab import Workflow, simulate
from revise_lab.core.oracle import drive
from revise_lab.errors import ReviseLabError
from revise_lab.policies import policy
from revise_lab.records import event as ev
from revise_lab.records.event import to_json
from revise_lab.records.revision import Change, Op, Revision
from revise_lab.runtime.simulator import Simulator, truth_of

DIFF = {"check": "digest", "propagation": "diff"}


def set_(path, value, id_="r"):
    artifact, *keys = path.split(".")
    return Revision(id_, (Change(artifact, Op.SET, tuple(keys), value),))


def chain(seconds=None):
    """G reads f and says whether it is large; P follows; H reads g."""
    flow = Workflow("chain")

    @flow.node(kind="model")
    async def G(state, ctx):
        f = state["in"]["f"]
        await ctx.model(f"G {f}", max_tokens=2)
        return {"large": f > 9}

    @flow.node(kind="model", after="G")
    async def P(state, ctx):
        large = state["G"]["large"]
        await ctx.model(f"P {large}", max_tokens=2)
        await ctx.model("again", max_tokens=2)
        return {"large": large}

    @flow.node(kind="tool")
    async def H(state, ctx):
        return {"g": state["in"]["g"]}

    return flow


INPUTS = {"in": {"f": 1, "g": 1}}


def spans(run):
    return [(call.node, call.start_s, call.end_s, call.outcome) for call in run.calls]


def test_time_is_what_the_calls_take():
    seconds = {"G": 2.0, "P": 0.5, "H": 7.0}
    run = simulate(chain(), INPUTS, duration_s=lambda ask: seconds[ask.node])
    assert spans(run) == [("G", 0, 2, "completed"), ("P", 2, 2.5, "completed"), ("P", 2.5, 3, "completed")]
    assert run.end_s == 7.0, "a body without a call takes as long as duration_s says"
    assert (run.executed(), run.executed(2.1), run.work_s(1.0)) == (("G", "P", "P"), ("P",), 2.0)
    assert run.machine.status == "closed"


def test_a_stopped_call_ends_when_it_is_stopped():
    run = simulate(chain(), INPUTS, revisions=[(1.25, set_("in.f", 2))], duration_s=lambda ask: 2.0)
    assert spans(run)[:2] == [("G", 0, 1.25, "aborted"), ("G", 1.25, 3.25, "completed")]
    assert run.accepted_s == [1.25]
    assert run.work_s(1.25) == 6.0
    assert [plan.affected for plan in run.plans] == [("G", "P")]


def test_row_18_who_waits_for_its_parent_holds_no_slot():
    """One slot: P ends while G is dirty, G needs the slot, and both come through."""
    run = simulate(chain(), INPUTS, policy("revise", **DIFF), revisions=[(1.5, set_("in.f", 2))], n_slots=1)
    assert [each for each in run.executed() if each != "H"] == ["G", "P", "P", "G"]
    assert run.machine.runs["P"].n_attempts == 1
    assert truth_of(run)[1] == []


@pytest.mark.parametrize("n_slots", [1, 2, 3])
def test_no_more_attempts_run_than_there_are_slots(n_slots):
    flow = Workflow("wide")
    for i in range(5):

        @flow.node(kind="model", name=f"n{i}")
        async def body(state, ctx):
            await ctx.model("x", max_tokens=1)
            return {"seen": state["in"]["f"]}

    run = simulate(flow, INPUTS, n_slots=n_slots, revisions=[(0.5, set_("in.f", 2))])
    edges = sorted({time for call in run.calls for time in (call.start_s, call.end_s)})
    for time in edges:
        assert sum(call.start_s <= time < call.end_s for call in run.calls) <= n_slots
    assert max(sum(call.start_s <= time < call.end_s for call in run.calls) for time in edges) == n_slots
    assert all(output["seen"] == 2 for output in run.outputs.values())


def test_the_run_is_not_sealed_before_a_revision_that_is_still_to_come():
    run = simulate(chain(), INPUTS, revisions=[(50.0, set_("in.g", 5)), (60.0, set_("in.f", 10, "s"))])
    assert [call.node for call in run.calls if call.start_s >= 50] == ["G", "P", "P"]
    assert run.end_s == 63.0
    assert run.outputs["H"] == {"g": 5}
    assert run.outputs["P"] == {"large": True}
    assert [entry.revision for entry in run.machine.journal if isinstance(entry, ev.Accepted)] == ["r", "s"]


def test_a_refused_revision_is_not_counted_as_accepted():
    run = simulate(chain(), INPUTS, revisions=[(1.0, set_("nowhere.x", 1)), (1.5, set_("in.g", 1, "r"))])
    assert run.accepted_s == [1.5]
    refused = [entry.message for entry in run.machine.journal if isinstance(entry, ev.Refused)]
    assert len(refused) == 1
    assert "no artifact is named 'nowhere'" in refused[0]


def test_a_failure_is_mended_by_a_revision_and_only_by_one_that_it_read():
    flow = Workflow("fragile")

    @flow.node(kind="tool")
    async def check(state, ctx):
        if state["in"]["f"] > 1:
            raise ValueError("too large")
        return {"ok": True}

    @flow.node(kind="tool", after="check")
    async def follow(state, ctx):
        return {"ok": state["check"]["ok"]}

    bad = {"in": {"f": 2, "g": 1}}
    for revisions, status, starts in (
        ([], "failed", 1),
        ([(5.0, set_("in.g", 2))], "failed", 1),
        ([(5.0, set_("in.f", 1))], "closed", 2),
        ([(5.0, set_("in.f", 3))], "failed", 2),
    ):
        run = simulate(flow, bad, revisions=revisions)
        assert (run.machine.status, run.machine.runs["check"].n_attempts) == (status, starts)
        assert run.machine.failures() == ({} if status == "closed" else {"check": "ValueError: too large"})
        assert ("follow" in run.outputs) == (status == "closed")
        truth, wrong = truth_of(run)
        assert wrong == []
        assert truth.failures == run.machine.failures()


def test_tools_clocks_and_chance_are_boundary_calls():
    flow = Workflow("tools")

    @flow.node(kind="tool")
    async def both(state, ctx):
        first = await ctx.tool("add", lambda a, b: a + b, a=1, b=state["in"]["f"])
        second = await ctx.tool("add", lambda a, b: a + b, a=1, b=state["in"]["f"])
        return {"sum": first, "same": second, "at": await ctx.clock(), "chance": await ctx.random()}

    answers = {"clock": 12.5, "random": 0.25}

    def answer(ask):
        return answers[ask.kind] if ask.kind in answers else ask.local()

    run = simulate(flow, INPUTS, answer=answer)
    assert run.outputs["both"] == {"sum": 2, "same": 2, "at": 12.5, "chance": 0.25}
    calls = run.machine.runs["both"].current.calls
    assert [(call.kind, call.occurrence) for call in calls] == [("tool", 0), ("tool", 1), ("clock", 0), ("random", 0)]
    truth, wrong = truth_of(run, lambda ask: pytest.fail("w knows every answer"))
    assert (wrong, truth.oracle_hits, truth.oracle_fresh) == ([], 4, 0)


def test_a_call_that_nothing_answers_is_named():
    flow = Workflow("lost")

    @flow.node(kind="tool")
    async def ask(state, ctx):
        await ctx.tool("weather", city="Porto")

    with pytest.raises(ReviseLabError, match="node 'ask' asks for tool and nothing answers it - pass answer="):
        simulate(flow, INPUTS)


def test_a_pause_takes_its_time_and_calls_nobody():
    flow = Workflow("pause")

    @flow.node(kind="tool")
    async def wait(state, ctx):
        await ctx.pause(3.0)
        return {"f": state["in"]["f"]}

    run = simulate(flow, INPUTS, revisions=[(1.0, set_("in.f", 2))], duration_s=lambda ask: 0.0)
    assert run.calls == []
    assert run.outputs["wait"] == {"f": 2}
    assert [type(entry).__name__ for entry in run.machine.journal].count("Rejected") == 1, "the read came late"


def test_late_reads_under_revise_plus_move_instead_of_starting_again():
    flow = Workflow("late")

    @flow.node(kind="model")
    async def slow(state, ctx):
        early = state["in"]["f"]
        await ctx.model(f"{early}", max_tokens=2)
        return {"both": [early, state["in"]["g"]]}

    run = simulate(flow, INPUTS, "revise_plus", revisions=[(0.5, set_("in.g", 7))])
    assert run.executed() == ("slow",)
    assert run.outputs["slow"] == {"both": (1, 7)}
    assert [entry.attempt for entry in run.machine.journal if isinstance(entry, ev.Moved)] == ["slow@1"]
    plain = simulate(flow, INPUTS, policy("revise", **DIFF), revisions=[(0.5, set_("in.g", 7))])
    assert plain.executed() == ("slow", "slow")


def test_equal_arguments_make_equal_journals():
    def lines(*args):
        run = simulate(chain(), INPUTS, *args, revisions=[(1.0, set_("in.f", 10)), (1.0, set_("in.g", 2, "s"))])
        return [to_json(entry) for entry in run.machine.journal]

    for name in ("revise", "suffix", "restart", "wait", "revise_plus"):
        assert lines(name) == lines(name)
    assert lines("revise") != lines("restart")


def test_a_body_that_waits_for_something_else_is_found_out():
    async def body():
        await asyncio.sleep(0)

    with pytest.raises(ReviseLabError, match="waited for something that is no boundary call"):
        drive(body())


def test_a_run_that_comes_to_a_halt_says_what_happened():
    class Lazy(Simulator):
        def _start_ready(self):
            """Start nothing, as a broken driver would."""

    with pytest.raises(ReviseLabError, match=r"came to a halt: rev r set in\.f=2"):
        Lazy(chain(), INPUTS, policy("revise"), revisions=[(1.0, set_("in.f", 2))]).run()
