"""The serving families S12 and S8: order-desk workflows of equal calls, matched to the published serving sweeps.

Which leaves exist, how the reads are split (three hit nodes read one leaf, one reads two) and where the look-ups sit
were chosen so that complete and half provenance give the published ratios; rows met through them are *by construction*.
The free families of :mod:`revise_lab.workloads.synthetic` are printed beside them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final

from revise_lab.records.workflow import Workflow


@dataclass(frozen=True)
class Family:
    """A workflow family: what each node reads and follows, and which leaves a revision may change.

    Attributes
    ----------
    reads : mapping
        Node to the leaves (``artifact.field``) that it reads, in declaration order of the nodes.
    parents : mapping
        Node to its parents.
    revised : tuple of str
        The leaves that revisions change, each with equal chance.
    matched : bool
        Whether the family was built to published figures.
    """

    name: str
    reads: Mapping[str, tuple[str, ...]]
    parents: Mapping[str, tuple[str, ...]]
    revised: tuple[str, ...]
    matched: bool = True

    def inputs(self) -> dict[str, Any]:
        """Return the first version of the inputs."""
        inputs: dict[str, dict[str, str]] = {}
        for leaf in dict.fromkeys(leaf for leaves in self.reads.values() for leaf in leaves):
            artifact, field = leaf.split(".")
            inputs.setdefault(artifact, {})[field] = f"first {field}"
        return inputs

    def workflow(self, n_tokens: int = 64) -> Workflow:
        """Return the workflow; every node is one model call of ``n_tokens`` output tokens."""
        flow = Workflow(self.name)
        for node, leaves in self.reads.items():
            flow.node(kind="model", name=node, after=self.parents.get(node, ()))(
                _body(node, leaves, self.parents.get(node, ()), n_tokens)
            )
        return flow


def _body(node: str, leaves: tuple[str, ...], parents: tuple[str, ...], n_tokens: int) -> Any:
    places = [tuple(leaf.split(".")) for leaf in leaves]

    async def body(state: Any, ctx: Any) -> dict[str, str]:
        own = [state[artifact][field] for artifact, field in places]
        above = [state[parent]["note"] for parent in parents]
        reply = await ctx.model(f"{node}: {'; '.join([*own, *above])}", max_tokens=n_tokens)
        return {"note": reply.text}

    return body


def _chain(*nodes: str) -> dict[str, tuple[str, ...]]:
    return {child: (parent,) for parent, child in pairwise(nodes)}


S12: Final = Family(
    "S12",
    {
        "intake": ("message.text",),
        "account": ("client.id",),
        "catalog": ("shelf.edition",),
        "freight": ("transport.mode",),
        "policy": ("rules.tier",),
        "match": (),
        "rank": (),
        "plan": (),
        "draft": ("style.tone", "style.length"),
        "check": (),
        "merge": (),
        "answer": (),
    },
    {
        **_chain("match", "rank", "plan", "draft", "check", "merge", "answer"),
        "match": ("intake", "account", "catalog"),
        "rank": ("match", "freight", "policy"),
    },
    ("client.id", "transport.mode", "rules.tier", "style.tone", "style.length"),
)
"""Twelve calls in eight steps; suffix sizes 11, 9, 8, 4, 4 and affected sizes 8, 7, 7, 4, 4."""

S8: Final = Family(
    "S8",
    {
        "intake": ("message.text",),
        "orders": ("purchase.id",),
        "policy": ("rules.window",),
        "profile": ("client.tier",),
        "plan": (),
        "draft": ("style.tone", "style.length"),
        "review": ("limits.refund", "limits.promise"),
        "reply": (),
    },
    {
        **_chain("plan", "draft", "review", "reply"),
        "plan": ("orders", "policy", "profile"),
        "draft": ("plan", "intake"),
    },
    ("purchase.id", "rules.window", "client.tier", "style.tone", "limits.refund"),
)
"""Eight calls, for the smoke profile; suffix sizes 7, 6, 5, 3, 2 and affected sizes 5, 5, 5, 3, 2."""

FAMILIES: Final = {"S12": S12, "S8": S8}
