"""The asyncio driver decides nothing: for the same script its journal is that of the simulator, entry by entry."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from revise_lab import Session, Workflow, simulate
from revise_lab.policies import policy
from revise_lab.records import event as ev
from revise_lab.records.event import to_json
from revise_lab.records.revision import Change, Op, Revision
from revise_lab.runtime.models import ScriptedModel, hash_text
from revise_lab.runtime.reply import ModelRequest
from revise_lab.runtime.simulator import Simulator
from revise_lab.workloads.supplier.native import INPUTS, REVISIONS, build
from revise_lab.workloads.synthetic import WorldShape, random_world

POLICIES = {
    "revise": policy("revise"),
    "revise_plus": policy("revise_plus"),
    "revise, digest": policy("revise", check="digest"),
    "suffix": policy("suffix"),
    "restart": policy("restart"),
    "wait": policy("wait"),
}


class Timed:
    """A model whose calls take as long as a function of the node says, and answer as the simulator does."""

    def __init__(self, duration_s):
        self.model = ScriptedModel(lambda asked: hash_text(asked.prompt, asked.seed, asked.max_tokens))
        self.duration_s = duration_s

    async def complete(self, request: ModelRequest, *, on_token=None):
        await asyncio.sleep(self.duration_s(request.node))
        return await self.model.complete(request, on_token=on_token)

    async def aclose(self):
        await self.model.aclose()


def both(virtually, flow, inputs, chosen, revisions, duration_s, n_slots=None):
    """Run one script in both shells and return the two machines."""
    simulated = Simulator(
        flow, inputs, chosen, revisions=revisions, duration_s=lambda ask: duration_s(ask.node), n_slots=n_slots
    ).run()

    async def live():
        run = Session(flow, inputs, chosen, endpoint=Timed(duration_s), n_slots=n_slots).start()
        for at_s, revision in revisions:
            asyncio.get_running_loop().call_at(at_s, run.revise, revision)
        await run.result()
        return run.machine

    return simulated.machine, virtually(live())


def lines(machine):
    """Return the journal; when a cancelled body has ended is the shell's own affair."""
    return [to_json(entry) for entry in machine.journal if not isinstance(entry, ev.Stopped)]


@pytest.mark.parametrize("chosen", POLICIES)
@pytest.mark.parametrize("name", REVISIONS)
def test_supplier(virtually, name, chosen):
    path, value = REVISIONS[name]
    artifact, field = path.split(".")
    revision = Revision(name, (Change(artifact, Op.SET, (field,), value),))
    ours, theirs = both(
        virtually, build(), INPUTS, POLICIES[chosen], [(4.53, revision)], lambda node: 1 + len(node) / 997
    )
    assert lines(ours) == lines(theirs)
    assert ours.outputs() == theirs.outputs()


@pytest.mark.parametrize("chosen", POLICIES)
@pytest.mark.parametrize("seed", range(8))
def test_random_worlds(virtually, seed, chosen):
    rng = np.random.default_rng([3, seed])
    world = random_world(rng, WorldShape(n_revisions=1 + seed % 3, late_read=0.5))
    odd = {}

    def duration_s(node):
        """No two calls end at one moment, so that the order of what happens is fixed by the script."""
        return odd.setdefault(node, 1.0 + 0.0371 * len(odd) ** 1.5 + len(node) / 991)

    undisturbed = simulate(world.workflow, world.inputs, duration_s=lambda ask: duration_s(ask.node))
    times_s = sorted(rng.uniform(0.1, 0.9 * undisturbed.end_s, len(world.revisions)))
    revisions = [(at_s, revision) for at_s, (_, revision) in zip(times_s, world.revisions, strict=True)]
    ours, theirs = both(virtually, world.workflow, world.inputs, POLICIES[chosen], revisions, duration_s)
    assert lines(ours) == lines(theirs)


@pytest.mark.parametrize("n_slots", [1, 2])
@pytest.mark.parametrize("chosen", ["revise", "revise_plus", "suffix"])
def test_with_few_slots_the_same_nodes_start_as_often(virtually, chosen, n_slots):
    """A cancelled task gives its slot back a turn of the loop later; who is stopped and who commits does not change."""
    revision = Revision("r", (Change("request", Op.SET, ("country",), "BR"),))
    ours, theirs = both(
        virtually, build(), INPUTS, POLICIES[chosen], [(2.53, revision)], lambda node: 1 + len(node) / 997, n_slots
    )
    for machine in (ours, theirs):
        assert machine.state == "closed"
    assert {name: run.n_attempts for name, run in ours.runs.items()} == {
        name: run.n_attempts for name, run in theirs.runs.items()
    }
    assert ours.outputs() == theirs.outputs()


def test_a_failure_and_its_retries(virtually):
    flow = Workflow("fails")

    @flow.node(kind="model", retries=2)
    async def shaky(state, ctx):
        await ctx.model(f"shaky {state['in']['f']}", max_tokens=1)
        if state["in"]["f"] < 2:
            raise ConnectionError("cut")
        return {"f": state["in"]["f"]}

    @flow.node(kind="model", after="shaky")
    async def follow(state, ctx):
        return {"text": (await ctx.model(f"follow {state['shaky']['f']}", max_tokens=1)).text}

    revision = Revision("r", (Change("in", Op.SET, ("f",), 2),))
    for at_s, attempts in ((0.5, 2), (1.5, 3), (2.5, 4)):
        ours, theirs = both(
            virtually, flow, {"in": {"f": 1}}, policy("revise"), [(at_s, revision)], lambda node: 1.0 + len(node) / 997
        )
        assert lines(ours) == lines(theirs)
        assert ours.runs["shaky"].n_attempts == attempts


def test_what_runs_when_is_on_the_spans(virtually):
    flow = build()

    async def live():
        run = Session(flow, INPUTS, endpoint=Timed(lambda node: 1.0)).start()
        asyncio.get_running_loop().call_at(4.5, run.revise, "request.volume", 5000)
        await run.result()
        return run.spans

    spans = virtually(live())
    simulated = simulate(
        flow, INPUTS, revisions=[(4.5, Revision("r", (Change("request", Op.SET, ("volume",), 5000),)))]
    )
    ours = sorted((call.attempt, call.start_s, call.end_s, call.outcome) for call in simulated.calls)
    theirs = sorted((span.attempt, span.start_s, span.end_s, span.outcome) for span in spans)
    assert [row[::3] for row in ours] == [row[::3] for row in theirs]
    for mine, other in zip(ours, theirs, strict=True):
        assert other[1:3] == pytest.approx(mine[1:3])
    assert [span.attempt for span in spans if span.start_s >= 4.5] == ["costs@2", "join@2", "report@2"]


@pytest.mark.parametrize("chosen", list(POLICIES.values()), ids=list(POLICIES))
@pytest.mark.parametrize("n_slots", [1, 2])
def test_an_attempt_that_is_stopped_before_its_first_step_gives_its_slot_back(virtually, chosen, n_slots):
    """It was cancelled before its own code ran, so that nobody gave back the slot, and the run waited for ever."""
    flow = Workflow("short")

    @flow.node()
    async def first(state, ctx):
        return {"n": state["in"]["n"]}

    @flow.node(after="first", unknown=("reads",))
    async def second(state, ctx):
        return {"n": state["first"]["n"]}

    async def main():
        run = Session(flow, {"in": {"n": 0}}, chosen, endpoint=None, n_slots=n_slots).start()
        for n in range(1, 7):  # at every instant of the run, each in one turn of the loop with the start of an attempt
            run.revise("in.n", n)
            await asyncio.sleep(0)
        result = await asyncio.wait_for(run.result(), 10)
        assert (run.audit(), (await run.check_oracle())[1]) == ([], [])
        assert not any(attempt.state == "cancelled" for attempt in run.machine.attempts.values())
        return result.outputs["second"]

    assert virtually(main()) == {"n": 6}
