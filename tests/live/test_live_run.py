"""A workflow on the real model, revised while it generates; skipped where the model is not installed."""

from __future__ import annotations

import asyncio
import time
from collections import Counter

import pytest

from revise_lab import Session, Workflow
from revise_lab.lab.notebooks import run_notebook
from revise_lab.runtime.endpoint import connect
from revise_lab.runtime.local_server import REMEDY, LocalServer, is_available
from revise_lab.workloads.supplier.native import INPUTS, REVISIONS, build

pytestmark = [
    pytest.mark.live,
    pytest.mark.skipif(not is_available(), reason=f"the local model is not installed: {REMEDY}"),
]
FREED_WITHIN_S = 3.0
SENT_AGAIN = {"restart": 10, "suffix": 9, "revise": 4, "revise_plus": 4}


@pytest.fixture(scope="module")
def server():
    with LocalServer(n_parallel=4, n_threads=2, ctx=4096) as started:
        yield started


def story() -> Workflow:
    """Two branches with a long generation each, and a summary."""
    flow = Workflow("story")

    @flow.node(kind="model")
    async def hero(state, ctx):
        name = state["tale"]["hero"]
        reply = await ctx.model(f"A long tale about {name}.", max_tokens=400, seed=1, extra={"ignore_eos": True})
        return {"text": reply.text}

    @flow.node(kind="model")
    async def place(state, ctx):
        reply = await ctx.model(f"Describe {state['tale']['place']}.", max_tokens=12, seed=2)
        return {"text": reply.text}

    @flow.node(kind="model", after=("hero", "place"))
    async def title(state, ctx):
        prompt = f"A title for: {state['hero']['text'][:80]} in {state['place']['text'][:40]}"
        return {"text": (await ctx.model(prompt, max_tokens=8, seed=3)).text}

    return flow


def test_a_generation_is_aborted_and_its_slot_freed(server):
    async def scenario():
        async with connect(server.url, model=server.model) as model:
            run = Session(story(), {"tale": {"hero": "a fox", "place": "a forest"}}, "revise", endpoint=model).start()
            await run.generating("hero", n_tokens=5)
            while not any(span.node == "place" and span.outcome == "completed" for span in run.spans):
                await asyncio.sleep(0.01)
            revised = time.perf_counter()
            plan = await run.revise("tale.hero", "an owl")
            run.cancel()  # nothing takes the freed slot, so that it can be seen to be free
            while await asyncio.to_thread(server.busy):
                assert time.perf_counter() - revised < FREED_WITHIN_S, "the slot still decodes"
                await asyncio.sleep(0.005)
            freed_s = time.perf_counter() - revised
            return plan, freed_s, [(call.node, call.outcome) for call in model.calls]

    plan, freed_s, calls = asyncio.run(scenario())
    print(f"\nslot freed {freed_s:.3f} s after the revision; calls: {calls}")
    assert plan.of("cancel") == ("hero",)
    assert plan.of("avoid") == ("title",)
    assert ("hero", "aborted") in calls
    assert ("place", "completed") in calls


@pytest.mark.parametrize("policy", SENT_AGAIN)
def test_a_workflow_revised_in_mid_generation_ends_right(server, policy):
    async def scenario():
        async with connect(server.url, model=server.model) as model:
            run = Session(build(), INPUTS, policy, endpoint=model).start()
            await run.generating("report", n_tokens=1)
            plan = await run.revise(*REVISIONS["country"])
            result = await run.result()
            truth, differences = await run.check_oracle()
            return run, plan, result, truth, differences, model.calls

    run, plan, result, truth, differences, calls = asyncio.run(scenario())
    again = [call.attempt for call in calls if not call.attempt.endswith("@1")]
    print(f"\n{policy}: again {again}; outcomes {Counter(call.outcome for call in calls)}")
    assert differences == []
    assert result.late_invalid == 0
    assert (truth.oracle_hits, truth.oracle_fresh) == (10, 0)
    assert len(again) == SENT_AGAIN[policy]
    assert {attempt.partition("@")[0] for attempt in again} <= {each.node for each in plan.nodes}
    # every attempt made one call, and every call belongs to an attempt
    assert Counter(call.attempt for call in calls) == Counter(span.attempt for span in run.spans)
    assert all(call.outcome in ("completed", "aborted") for call in calls)
    assert {call.attempt for call in calls if call.outcome == "aborted"} <= {"report@1"}
    # the final prompts hold the new input and none holds the old one
    final = {call.node: call.request["messages"][0]["content"] for call in calls}
    assert "BR" in final["costs"]
    assert "PT" not in final["costs"] + final["screening"]
    assert all(call.usage.source == "exact" for call in calls if call.outcome == "completed")


def test_the_tour_runs_against_the_real_model(server, tmp_path):
    given = {"results_dir": str(tmp_path), "profile": "smoke", "endpoint": server.url}
    folder = tmp_path / "runs" / "00_tour" / "smoke"
    wanted = ("figures/dag.svg", "figures/timeline.svg", "tables/calls.tex", "values.json")
    run_notebook("notebooks/00_tour.ipynb", folder, given, timeout_s=180, deliverables=wanted)
    assert '"source": "measured"' in (folder / "values.json").read_text()
