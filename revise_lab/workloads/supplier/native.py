"""The supplier workflow, written as any user would write it: no selector, no version, no annotation.

Ten nodes, each one model call of eight tokens. Their declaration order is part of the fixture, because the size of a
dynamic suffix depends on it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from revise_lab import Workflow

N_TOKENS = 8

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

REVISIONS: dict[str, tuple[str, Any]] = {
    "policy_control": ("rules.tier", "strict"),
    "helper_goal": ("request.goal", "shorten the lead time"),
    "reviewer_evidence": ("review.evidence", "audit 2026: one major finding, open"),
    "country": ("request.country", "BR"),
    "volume": ("request.volume", 5000),
}
"""The five revisions by name: path and new value."""

EXTRA_REVISIONS: dict[str, tuple[str, Any]] = {
    "supplier": ("request.supplier", "Sul Forge SA"),
    "blocked": ("rules.tier", "blocked"),
}
"""Two more that are not among the published five: another supplier, and a tier that closes the lane."""

LANES = {"standard": "assess", "strict": "assess", "blocked": "report"}


def build(fields: Mapping[str, str] | None = None, order: tuple[str, ...] = ()) -> Workflow:
    """Return the workflow.

    Parameters
    ----------
    fields : mapping, optional
        Other names for the leaves of the inputs, by their usual names (``"country"`` to ``"land"``); tests rename
        fields to see that the sets follow what is read.
    order : tuple of str, optional
        Another declaration order of the five nodes of the first step.
    """
    names = {**{leaf: leaf for group in INPUTS.values() for leaf in group}, **(fields or {})}
    flow = Workflow("supplier")

    async def company(state: Any, ctx: Any) -> dict[str, Any]:
        supplier = state["request"][names["supplier"]]
        reply = await ctx.model(f"Register look-up. Company: {supplier}. Give status and owner.", max_tokens=N_TOKENS)
        return {"note": reply.text}

    async def costs(state: Any, ctx: Any) -> dict[str, Any]:
        volume, country = state["request"][names["volume"]], state["request"][names["country"]]
        prompt = f"Unit price for {volume} castings and the import duty from {country}."
        return {"note": (await ctx.model(prompt, max_tokens=N_TOKENS)).text}

    async def policy(state: Any, ctx: Any) -> dict[str, Any]:
        tier = state["rules"][names["tier"]]
        reply = await ctx.model(f"Review tier {tier}: which depth of review applies, and why?", max_tokens=N_TOKENS)
        return {"note": reply.text}

    async def requirements(state: Any, ctx: Any) -> dict[str, Any]:
        goal = state["request"][names["goal"]]
        reply = await ctx.model(f"Goal of the purchase: {goal}. List the must-haves.", max_tokens=N_TOKENS)
        return {"note": reply.text}

    async def review_evidence(state: Any, ctx: Any) -> dict[str, Any]:
        evidence = state["review"][names["evidence"]]
        reply = await ctx.model(f"Digest this audit file for the reviewer: {evidence}", max_tokens=N_TOKENS)
        return {"note": reply.text}

    first = {each.__name__: each for each in (company, costs, policy, requirements, review_evidence)}
    kinds = {"company": "tool", "policy": "model"}
    for name in order or tuple(first):
        flow.node(kind=kinds.get(name, "model"))(first[name])

    @flow.branch(of="policy")
    def lane(state: Any) -> str:
        return LANES[state["rules"][names["tier"]]]

    @flow.node(kind="model", after=("policy", "requirements", "review_evidence"), when=("policy", "assess"))
    async def assess(state: Any, ctx: Any) -> dict[str, Any]:
        rule, musts = state["policy"]["note"], state["requirements"]["note"]
        prompt = f"Fit of the supplier. Rule: {rule} Must-haves: {musts} Evidence: {state['review_evidence']['note']}"
        return {"note": (await ctx.model(prompt, max_tokens=N_TOKENS)).text}

    @flow.node(kind="tool", after="company")
    async def screening(state: Any, ctx: Any) -> dict[str, Any]:
        country = state["request"][names["country"]]
        prompt = f"Sanctions and country list of {country} against: {state['company']['note']}"
        return {"note": (await ctx.model(prompt, max_tokens=N_TOKENS)).text}

    @flow.node(kind="verifier", after="assess")
    async def reviewer(state: Any, ctx: Any) -> dict[str, Any]:
        reply = await ctx.model(f"Verify this assessment: {state['assess']['note']}", max_tokens=N_TOKENS)
        return {"note": reply.text}

    @flow.node(kind="join", after=("costs", "screening", "reviewer"), needs="all")
    async def join(state: Any, ctx: Any) -> dict[str, Any]:
        notes = " | ".join(state[part]["note"] for part in ("costs", "screening", "reviewer"))
        return {"note": (await ctx.model(f"Bring together: {notes}", max_tokens=N_TOKENS)).text}

    @flow.node(kind="model", after=("join", "policy"))
    async def report(state: Any, ctx: Any) -> dict[str, Any]:
        body = state["join"]["note"] if "join" in state else "not pursued"
        prompt = f"Report under rule {state['policy']['note']}: {body}"
        return {"note": (await ctx.model(prompt, max_tokens=N_TOKENS)).text}

    return flow
