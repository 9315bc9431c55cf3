"""Found while writing the tests; each moves to the file of its subject once it passes."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from revise_lab import Session, Workflow, simulate
from revise_lab.errors import ReviseLabError, WorkflowClosed
from revise_lab.records import event as ev
from revise_lab.records.revision import Change, Op, Revision
from revise_lab.workloads.synthetic import WorldShape, random_world


def test_a_body_that_read_at_its_beginning_is_hit_by_a_change_of_what_it_read():
    """Virtual time: a body without calls ends at once and reports later, so what it has read is unknown until then."""

    async def early(state):
        return {"f": state["in"]["f"]}

    flow = Workflow("early")
    flow.node()(early)
    revision = Revision("r", (Change("in", Op.SET, ("f",), 2),))
    run = simulate(flow, {"in": {"f": 1}}, revisions=[(1.0, revision)], duration_s=lambda ask: 3.0)
    assert run.plans[0].affected == ("early",)
    assert run.end_s == 4.0, "stopped at 1 s, run again for 3 s"


def test_a_plain_function_goes_on_when_it_is_told_to_stop_and_its_result_is_nobodys():
    flow = Workflow("sync")
    revision = Revision("r", (Change("in", Op.SET, ("f",), 2),))

    @flow.node(kind="tool")
    def slow(state):
        return {"f": state["in"]["f"]}

    run = simulate(flow, {"in": {"f": 1}}, revisions=[(1.0, revision)], duration_s=lambda ask: 3.0, n_slots=1)
    kinds = [type(entry).__name__ for entry in run.machine.journal]
    assert kinds.count("Started") == 2
    assert [entry.orphaned for entry in run.machine.journal if isinstance(entry, ev.Stop)] == [True]
    assert [entry.attempt for entry in run.machine.journal if isinstance(entry, ev.Discarded)] == ["slow@1"]
    assert run.end_s == 6.0, "with one slot the second attempt waits for the first"
    assert run.outputs["slow"] == {"f": 2}


def test_a_revision_that_came_after_the_close_is_not_taken_by_the_reopened_run():
    """It was refused; replaying the journal without its close would apply it all the same, under nobody's plan."""
    flow = Workflow("once")

    @flow.node(kind="tool")
    async def echo(state):
        return {"n": state["in"]["n"]}

    async def main():
        run = Session(flow, {"in": {"n": 1}}, endpoint=None).start()
        await run.result()
        with pytest.raises(WorkflowClosed, match=r"call run\.reopen\(\)"):
            await run.revise("in.n", 2)
        again = run.reopen()
        untouched = dict(again.machine.inputs["in"])
        plan = await again.revise("in.n", 2)
        await again.result()
        return untouched, plan.affected

    assert asyncio.run(main()) == ({"n": 1}, ("echo",))


def test_an_unknown_operation_is_an_error_of_ours():
    """``ValueError: 'sett' is not a valid Op`` names neither the choices nor the revision."""

    async def main():
        run = Session(Workflow("none"), {"in": {"n": 1}}, endpoint=None).start()
        try:
            with pytest.raises(ReviseLabError, match="append"):
                run.revise("in.n", 2, op="sett")
        finally:
            run.cancel()

    asyncio.run(main())


def test_a_world_with_one_leaf_can_be_drawn():
    """A shape with one artifact of one field: ValueError from numpy, 'larger sample than population'."""
    for seed in range(20):
        random_world(np.random.default_rng(seed), WorldShape(n_artifacts=1, n_fields=1)).workflow.graph()


def test_an_override_of_a_node_that_failed_before_it_had_an_output_waits_for_one(play):
    game = play("A", {"in": {"f": 0, "g": 0}})("start A; read A in.f; fail A")
    game.machine_takes(ev.Revise(Revision("r1", (Change("A", Op.OVERRIDE, ("o",), 1),))))
    assert type(game.told[0]) is ev.Accepted


def test_a_deferred_override_is_checked_against_its_base_once(play):
    game = play("A; B", {"in": {"f": 0, "g": 0}}, "wait")
    game.machine_takes(ev.Revise(Revision("r1", (Change("A", Op.OVERRIDE, ("o",), 1, 0),))))
    game("start A; read A in.f; finish A")
    game.machine_takes(ev.Revise(Revision("r2", (Change("in", Op.SET, ("g",), 1),))))
    assert type(game.told[0]) is ev.Deferred


@pytest.mark.parametrize(
    ("graph", "place", "value"),
    [
        ("A; X < A ? A.x", ("lane",), "x"),
        ("A; X < A ? A.x", (), {"o": 1}),
        ("A; m * A.items", ("items",), ["a"]),
        ("A; m * A.items", (), {"items": "a"}),
    ],
)
def test_an_override_of_who_runs_that_names_nobody_is_refused(play, graph, place, value):
    """A lane or a list is what a body returns; pinned in an output as it is it switched everybody off, in silence."""
    game = play(graph, {"in": {}})("start A")
    game.machine_takes(ev.Revise(Revision("r1", (Change("A", Op.OVERRIDE, place, value),))))
    assert [(type(each).__name__, each.error) for each in game.told] == [("Refused", "RevisionRefused")]
    assert "says who runs" in game.told[0].message


def test_an_input_cannot_be_named_like_a_member(play):
    """The member's output took the place of the input."""
    with pytest.raises(ReviseLabError, match=r"m\[a\] names an input and a node"):
        play("A; m * A.items", {"m[a]": 1})
