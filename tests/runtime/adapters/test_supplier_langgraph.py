"""The ten-node LangGraph application, revised while `report` runs: which nodes run again follows from what they read."""

from __future__ import annotations

import ast
import asyncio
import copy
import inspect
import subprocess
import sys

import pytest

pytest.importorskip("langgraph")

from openai import AsyncOpenAI

from revise_lab.records import event as ev
from revise_lab.runtime.adapters.langgraph import Outgoing, RevisableGraph
from revise_lab.runtime.target import MemoryTarget
from revise_lab.serving.server import MODEL, EmbeddedServer
from revise_lab.workloads.supplier import langgraph as app
from revise_lab.workloads.supplier.native import EXTRA_REVISIONS, REVISIONS

ORDER = ["company", "costs", "policy", "requirements", "review_evidence"]
ORDER += ["assess", "screening", "reviewer", "join", "report"]
AFFECTED = {
    "policy_control": "policy assess reviewer join report",
    "helper_goal": "requirements assess reviewer join report",
    "reviewer_evidence": "review_evidence assess reviewer join report",
    "country": "costs screening join report",
    "volume": "costs join report",
    "supplier": "company screening join report",
}
SUFFIX = {"policy_control": 8, "helper_goal": 7, "reviewer_evidence": 6, "country": 9, "volume": 9, "supplier": 10}


class World:
    """Answers prompts at once, but holds the report back until it is let go."""

    def __init__(self):
        self.prompts, self.gate, self.reporting = [], asyncio.Event(), asyncio.Event()

    async def ask(self, prompt):
        self.prompts.append(prompt)
        if prompt.startswith(("Report", "Brief")):
            self.reporting.set()
            await self.gate.wait()
        return f"<{prompt[-60:]}>"


def revised_inputs(inputs, path, value):
    new = copy.deepcopy(inputs)
    artifact, leaf = path.split(".")
    new[artifact][leaf] = value
    return new


async def revised(build, inputs, path, value, policy):
    world = World()
    run = RevisableGraph(build(world.ask), policy).start(inputs)
    await world.reporting.wait()
    before = len(run.spans)
    if policy == "wait":
        world.gate.set()
    plan = await run.revise(path, value)
    world.gate.set()
    result = await run.result()
    reference = World()
    reference.gate.set()
    assert result.state == await build(reference.ask).ainvoke(revised_inputs(inputs, path, value))
    assert run.audit() == []
    assert result.late_invalid == 0
    again = [span.node for span in run.spans[before:] if not span.node.endswith(">")]
    return run, plan, again, reference


def calls(nodes):
    return sorted((node for node in nodes if not node.endswith(">")), key=ORDER.index)


@pytest.mark.parametrize("policy", ["restart", "suffix", "revise", "wait"])
@pytest.mark.parametrize("name", AFFECTED)
def test_which_nodes_run_again(name, policy):
    path, value = {**REVISIONS, **EXTRA_REVISIONS}[name]
    run, plan, again, _ = asyncio.run(revised(app.build, app.INPUTS, path, value, policy))
    affected = AFFECTED[name].split()
    expected = {"revise": affected, "suffix": ORDER[-SUFFIX[name] :]}.get(policy, ORDER)
    assert calls(again) == expected
    if policy != "wait":
        assert calls(plan.affected) == expected
        assert [span.node for span in run.spans if span.outcome == "aborted"] == ["report"]


@pytest.mark.parametrize(("policy", "total"), [("restart", 50), ("suffix", 39), ("revise", 22)])
def test_the_sums_of_the_five(policy, total):
    runs = [asyncio.run(revised(app.build, app.INPUTS, *REVISIONS[name], policy)) for name in REVISIONS]
    assert sum(len(again) for _, _, again, _ in runs) == total


def test_a_tier_that_blocks_closes_the_lane():
    run, _, again, reference = asyncio.run(revised(app.build, app.INPUTS, "rules.tier", "blocked", "revise"))
    assert calls(again) == ["policy", "report"]
    assert len(reference.prompts) == 7
    retracted = [entry.node for entry in run.journal if isinstance(entry, ev.Retracted)]
    assert sorted(retracted) == ["assess", "join", "reviewer"]


def test_six_leaves_are_read_and_one_of_them_decides():
    async def main():
        world = World()
        world.gate.set()
        run = RevisableGraph(app.build(world.ask)).start(app.INPUTS)
        await run.result()
        read = {name: run.reads(name) for name in run.machine.runs}
        leaves = [each for reads in read.values() for each in reads if each.startswith(("request", "rules", "review."))]
        return [each for each in leaves if "#" not in each], read["policy>"]

    leaves, control = asyncio.run(main())
    assert len(leaves) == 8
    assert len(set(leaves)) == 6
    assert "rules.tier" in control


BRIEF = {
    "audience": ("brief.audience", "all staff", "audience report", 10),
    "severity": ("rules.severity", "sev1", "planner containment reviewer join report", 8),
    "text": ("rules.text", "no blame", "planner workaround reviewer join report", 8),
    "goal": ("helper.goal", "stop the loss", "runbook workaround reviewer join report", 7),
    "evidence": ("review.evidence", "trace of 11:02", "timeline workaround reviewer join report", 6),
}


@pytest.mark.parametrize("name", BRIEF)
def test_a_lane_that_flips(name):
    path, value, expected, n_suffix = BRIEF[name]
    run, _, again, _ = asyncio.run(revised(app.build_brief, app.BRIEF_INPUTS, path, value, "revise"))
    assert sorted(node for node in again) == sorted(expected.split())
    retracted = [entry.node for entry in run.journal if isinstance(entry, ev.Retracted)]
    assert retracted == (["workaround"] if name == "severity" else [])
    _, _, again, _ = asyncio.run(revised(app.build_brief, app.BRIEF_INPUTS, path, value, "suffix"))
    assert len(again) == n_suffix


@pytest.mark.slow
def test_every_revision_aborts_one_generation_at_the_endpoint():
    """Five revisions under three policies while the report streams: fifteen aborts in the endpoint's own log."""

    async def one(client, server, policy, path, value):
        run = RevisableGraph(app.build(app.endpoint_model(client, MODEL)), policy).start(app.INPUTS)
        while not any(each.run == run.id and each.node == "report" and each.tokens for each in server.log):
            await asyncio.sleep(0.002)
        before = {each.id for each in server.log}
        await run.revise(path, value)
        result = await run.result()
        after = [each.node for each in server.log if each.id not in before and each.run == run.id]
        assert result.effects == {}
        assert run.audit() == []
        return len(after)

    async def main():
        with EmbeddedServer(ttft_s=0.005, itl_s=0.01) as server:
            client = AsyncOpenAI(base_url=server.url, api_key="none", max_retries=0)
            sizes = {
                policy: [await one(client, server, policy, *REVISIONS[name]) for name in REVISIONS]
                for policy in ("restart", "suffix", "revise")
            }
            await client.close()
            for _ in range(200):
                if not any(each.outcome in ("running", "queued") for each in server.log):
                    break
                await asyncio.sleep(0.01)
            return sizes, [each for each in server.log if each.outcome == "aborted"]

    sizes, aborted = asyncio.run(main())
    assert sizes == {
        "restart": [10] * 5,
        "suffix": [SUFFIX[name] for name in REVISIONS],
        "revise": [len(AFFECTED[name].split()) for name in REVISIONS],
    }
    assert [each.node for each in aborted] == ["report"] * 15


class Registry:
    def __init__(self):
        self.filed = []

    async def file(self, text):
        self.filed.append(text)


@pytest.mark.parametrize("policy", ["revise_plus", "revise"])
def test_the_report_is_filed_once_and_it_is_the_last_one(policy):
    async def main():
        world, registry, target = World(), Registry(), MemoryTarget("registry")
        graph = RevisableGraph(
            app.build(world.ask, registry),
            policy,
            effects={"filing": Outgoing(registry, "file", "registry", "X")},
            targets={"registry": target},
        )
        run = graph.start(app.INPUTS)
        await world.reporting.wait()
        await run.revise("rules.tier", "strict")
        world.gate.set()
        result = await run.result()
        assert registry.filed == []
        await registry.file("outside a run")
        assert registry.filed == ["outside a run"]
        return result, [payload for what, _, payload in target.happened]

    result, happened = asyncio.run(main())
    assert happened == [{"text": result.state["report_note"]}]
    assert result.effects == {"report": {"filing": {"text": result.state["report_note"]}}}


def test_the_application_imports_nothing_of_ours():
    tree = ast.parse(inspect.getsource(app))
    named = [node.module if isinstance(node, ast.ImportFrom) else alias.name
             for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)
             for alias in node.names]  # fmt: skip
    assert not [name for name in named if "revise" in (name or "")]


def test_importing_the_package_does_not_import_langgraph():
    code = "import sys, revise_lab; print([m for m in sys.modules if m.startswith(('langgraph', 'langchain'))])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
