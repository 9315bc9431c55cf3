"""The supplier workflow as a plain LangGraph application, and a second one whose lane really flips.

Nothing of this package is imported here: this is what a user's own module looks like. ``ask`` answers a prompt; with
:func:`endpoint_model` it is an OpenAI-compatible endpoint. Names are such that their alphabetical order is the order in
which LangGraph starts the nodes of a superstep.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, Protocol

from langgraph.graph import END, START, StateGraph
from typing_extensions import TypedDict

N_TOKENS = 8
Ask = Callable[[str], Awaitable[str]]

INPUTS: dict[str, Any] = {
    "request": {
        "supplier": "Norte Castings Lda",
        "volume": 1200,
        "country": "PT",
        "goal": "qualify a second source",
    },
    "rules": {"tier": "standard"},
    "review": {"evidence": "audit 2025: two minor findings, both closed"},
}

BRIEF_INPUTS: dict[str, Any] = {
    "brief": {"audience": "the board"},
    "incident": {"service": "checkout"},
    "rules": {"severity": "sev2", "text": "customers first"},
    "helper": {"goal": "restore orders"},
    "review": {"evidence": "trace of 09:14"},
}


class Request(TypedDict):
    """What is to be bought, from whom."""

    supplier: str
    volume: int
    country: str
    goal: str


class Rules(TypedDict):
    """The policy that applies."""

    tier: str


class Review(TypedDict):
    """What the reviewer is given."""

    evidence: str


class Supplier(TypedDict, total=False):
    """State of the supplier graph."""

    request: Request
    rules: Rules
    review: Review
    company_note: str
    costs_note: str
    policy_note: str
    requirements_note: str
    evidence_note: str
    assess_note: str
    screening_note: str
    reviewer_note: str
    join_note: str
    report_note: str


LANES = {"standard": "assess", "strict": "assess", "blocked": "report"}


class Registry(Protocol):
    """Where reports are filed."""

    async def file(self, text: str) -> None:
        """File a report."""


def build(ask: Ask, registry: Registry | None = None) -> Any:
    """Return design A: supplier due diligence, ten nodes, each one model call.

    Parameters
    ----------
    ask : callable
        Answers a prompt.
    registry : Registry, optional
        Where the report is filed: the one action on the world.
    """

    async def company(state: Supplier) -> Supplier:
        supplier = state["request"]["supplier"]
        return {"company_note": await ask(f"Register look-up. Company: {supplier}. Give status and owner.")}

    async def costs(state: Supplier) -> Supplier:
        request = state["request"]
        prompt = f"Unit price for {request['volume']} castings and the import duty from {request['country']}."
        return {"costs_note": await ask(prompt)}

    async def policy(state: Supplier) -> Supplier:
        tier = state["rules"]["tier"]
        return {"policy_note": await ask(f"Review tier {tier}: which depth of review applies, and why?")}

    async def requirements(state: Supplier) -> Supplier:
        return {
            "requirements_note": await ask(f"Goal of the purchase: {state['request']['goal']}. List the must-haves.")
        }

    async def review_evidence(state: Supplier) -> Supplier:
        evidence = state["review"]["evidence"]
        return {"evidence_note": await ask(f"Digest this audit file for the reviewer: {evidence}")}

    async def assess(state: Supplier) -> Supplier:
        rule, musts, evidence = state["policy_note"], state["requirements_note"], state["evidence_note"]
        return {"assess_note": await ask(f"Fit of the supplier. Rule: {rule} Must-haves: {musts} Evidence: {evidence}")}

    async def screening(state: Supplier) -> Supplier:
        country, company_note = state["request"]["country"], state["company_note"]
        return {"screening_note": await ask(f"Sanctions and country list of {country} against: {company_note}")}

    async def reviewer(state: Supplier) -> Supplier:
        return {"reviewer_note": await ask(f"Verify this assessment: {state['assess_note']}")}

    async def join(state: Supplier) -> Supplier:
        notes = " | ".join((state["costs_note"], state["screening_note"], state["reviewer_note"]))
        return {"join_note": await ask(f"Bring together: {notes}")}

    async def report(state: Supplier) -> Supplier:
        body = state.get("join_note", "not pursued")
        note = await ask(f"Report under rule {state['policy_note']}: {body}")
        if registry is not None:
            await registry.file(note)
        return {"report_note": note}

    def lane(state: Supplier) -> str:
        return state["rules"]["tier"]

    graph: Any = StateGraph(Supplier)
    first = (company, costs, policy, requirements, review_evidence)
    for node in (*first, assess, screening, reviewer, join, report):
        graph.add_node(node)
    for node in first:
        graph.add_edge(START, node.__name__)
    graph.add_edge("company", "screening")
    graph.add_conditional_edges("policy", lane, LANES)
    graph.add_edge("assess", "reviewer")
    graph.add_edge(["costs", "screening", "reviewer"], "join")
    graph.add_edge("join", "report")
    graph.add_edge("report", END)
    return graph.compile(name="supplier")


class Brief(TypedDict, total=False):
    """State of the incident graph."""

    brief: dict[str, str]
    incident: dict[str, str]
    rules: dict[str, str]
    helper: dict[str, str]
    review: dict[str, str]
    audience_note: str
    dashboards_note: str
    planner_note: str
    runbook_note: str
    timeline_note: str
    impact_note: str
    lane_note: str
    reviewer_note: str
    join_note: str
    report_note: str


def build_brief(ask: Ask) -> Any:
    """Return design B: an incident brief of eleven nodes, ten of which run; its severity chooses the lane."""

    async def audience(state: Brief) -> Brief:
        return {"audience_note": await ask(f"Tone for {state['brief']['audience']}.")}

    async def dashboards(state: Brief) -> Brief:
        return {"dashboards_note": await ask(f"Read the dashboards of {state['incident']['service']}.")}

    async def planner(state: Brief) -> Brief:
        rules = state["rules"]
        return {"planner_note": await ask(f"Plan for severity {rules['severity']} under: {rules['text']}")}

    async def runbook(state: Brief) -> Brief:
        return {"runbook_note": await ask(f"Runbook steps to {state['helper']['goal']}.")}

    async def timeline(state: Brief) -> Brief:
        return {"timeline_note": await ask(f"Timeline from {state['review']['evidence']}.")}

    async def impact(state: Brief) -> Brief:
        return {"impact_note": await ask(f"Impact seen in: {state['dashboards_note']}")}

    async def containment(state: Brief) -> Brief:
        notes = state["planner_note"], state["runbook_note"], state["timeline_note"]
        return {"lane_note": await ask(f"Contain it. {' '.join(notes)}")}

    async def workaround(state: Brief) -> Brief:
        notes = state["planner_note"], state["runbook_note"], state["timeline_note"]
        return {"lane_note": await ask(f"Work around it. {' '.join(notes)}")}

    async def reviewer(state: Brief) -> Brief:
        return {"reviewer_note": await ask(f"Verify: {state['lane_note']}")}

    async def join(state: Brief) -> Brief:
        return {"join_note": await ask(f"Bring together: {state['impact_note']} | {state['reviewer_note']}")}

    async def report(state: Brief) -> Brief:
        return {"report_note": await ask(f"Brief in the tone {state['audience_note']}: {state['join_note']}")}

    graph: Any = StateGraph(Brief)
    first = (audience, dashboards, planner, runbook, timeline)
    for node in (*first, impact, containment, workaround, reviewer, join, report):
        graph.add_node(node)
    for node in first:
        graph.add_edge(START, node.__name__)
    graph.add_edge("dashboards", "impact")
    graph.add_conditional_edges(
        "planner", lambda state: state["rules"]["severity"], {"sev1": "containment", "sev2": "workaround"}
    )
    graph.add_edge("containment", "reviewer")
    graph.add_edge("workaround", "reviewer")
    graph.add_edge(["impact", "reviewer"], "join")
    graph.add_edge("join", "report")
    graph.add_edge("report", END)
    return graph.compile(name="brief")


def endpoint_model(client: Any, model: str, n_tokens: int = N_TOKENS) -> Ask:
    """Return an ``ask`` that streams from an OpenAI-compatible endpoint.

    Parameters
    ----------
    client : openai.AsyncOpenAI
        The client.
    model : str
        Name of the model.
    n_tokens : int
        Length of every answer.
    """

    async def ask(prompt: str) -> str:
        stream = await client.chat.completions.create(
            model=model,
            messages=[{"role": "user", "content": prompt}],
            max_tokens=n_tokens,
            temperature=0.0,
            seed=0,
            stream=True,
            extra_body={"ignore_eos": True},
        )
        parts = [chunk.choices[0].delta.content or "" async for chunk in stream if chunk.choices]
        return "".join(parts)

    return ask
