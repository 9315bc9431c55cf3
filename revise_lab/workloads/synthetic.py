"""Layered random DAGs that nobody fitted: the free families, and the worlds of the randomised tests.

Everything is a function of one ``numpy`` generator. A layer's nodes read leaves of the inputs and outputs of earlier
layers; some read late (after a pause), some stand behind a router, some spawn members, and small value sets make outputs
collide, so that reverts, early cutoffs and equal recomputations happen often.
"""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import numpy as np

from revise_lab.records.effect import Effect, Reversibility
from revise_lab.records.revision import Change, Op, Revision
from revise_lab.records.value import canonical_text, freeze
from revise_lab.records.workflow import Workflow

from .serving import Family


def free_family(rng: np.random.Generator, name: str = "free", n_nodes: int = 12, n_layers: int = 6) -> Family:
    """Return a random layered family of model calls with as many nodes as S12; nothing in it was fitted.

    Parameters
    ----------
    rng : numpy.random.Generator
        Source of all choices.
    name : str
        Names the workflow.
    n_nodes, n_layers : int
        Size; each layer has at least one node.
    """
    layers = sorted([*range(n_layers), *rng.integers(0, n_layers, n_nodes - n_layers).tolist()])
    nodes = [f"n{i:02d}" for i in range(n_nodes)]
    leaves = [f"a{k}.f{j}" for k in range(4) for j in range(4)]
    reads: dict[str, tuple[str, ...]] = {}
    parents: dict[str, tuple[str, ...]] = {}
    for node, layer in zip(nodes, layers, strict=True):
        above = [other for other, place in zip(nodes, layers, strict=True) if place < layer]
        count = min(len(above), int(rng.integers(1, 4)))
        parents[node] = tuple(sorted(rng.choice(above, count, replace=False).tolist())) if above else ()
        n_leaves = int(rng.integers(0 if above else 1, 3))
        reads[node] = tuple(rng.choice(leaves, n_leaves, replace=False).tolist())
    read = sorted({leaf for own in reads.values() for leaf in own})
    revised = tuple(sorted(rng.choice(read, min(5, len(read)), replace=False).tolist()))
    return Family(name, reads, parents, revised, matched=False)


@dataclass(frozen=True)
class World:
    """A random workflow with inputs, revisions and durations."""

    workflow: Workflow
    inputs: dict[str, Any]
    revisions: tuple[tuple[float, Revision], ...]
    durations_s: dict[str, float]


@dataclass(frozen=True)
class WorldShape:
    """The parameters of :func:`random_world`; probabilities unless said otherwise."""

    n_nodes: int = 6
    n_layers: int = 4
    n_artifacts: int = 2
    n_fields: int = 3
    n_values: int = 2
    """Size of the value sets: small makes outputs collide."""
    n_revisions: int = 2
    late_read: float = 0.3
    router: float = 0.4
    members: float = 0.4
    structural: float = 0.2
    unknown: float = 0.1
    collide: float = 0.4
    effect: float = 0.0
    """That a node stages an effect; a third of the later nodes wait for the confirmation of one."""


def random_world(rng: np.random.Generator, shape: WorldShape = WorldShape()) -> World:
    """Return a random workflow and what happens to it."""
    flow = Workflow("world")
    leaves = [(f"a{i}", f"f{j}") for i in range(shape.n_artifacts) for j in range(shape.n_fields)]
    inputs: dict[str, Any] = {
        f"a{i}": {
            **{f"f{j}": int(rng.integers(0, shape.n_values)) for j in range(shape.n_fields)},
            "list": [int(v) for v in rng.integers(0, shape.n_values, int(rng.integers(0, 4)))],
        }
        for i in range(shape.n_artifacts)
    }
    layers = sorted([*range(shape.n_layers), *rng.integers(0, shape.n_layers, max(0, shape.n_nodes - shape.n_layers))])
    names: list[str] = []
    joins: list[str] = []
    placed: list[int] = []
    routers: list[str] = []
    staging: set[str] = set()
    for i, layer in enumerate(layers):
        above = [name for name, place in zip(names, placed, strict=True) if place < layer]
        name = f"n{i}"
        count = min(len(above), int(rng.integers(1, 4)))
        parents = sorted(rng.choice(above, count, replace=False).tolist()) if above else []
        when = None
        if routers and rng.random() < 0.5:
            when = (str(rng.choice(routers)), str(rng.choice(["left", "right"])))
            if when[0] not in above:
                when = None
        unknown = ("reads",) if rng.random() < shape.unknown else ()
        own = [leaves[k] for k in rng.choice(len(leaves), min(len(leaves), int(rng.integers(0, 3))), replace=False)]
        late = [leaves[int(rng.integers(0, len(leaves)))]] if rng.random() < shape.late_read else []
        modulus = shape.n_values if rng.random() < shape.collide else 1 << 30
        whole = f"a{int(rng.integers(0, shape.n_artifacts))}" if rng.random() < shape.structural else ""
        spawns = rng.random() < shape.members and i + 1 < len(layers)
        effect = ""
        awaited: tuple[str, ...] = ()
        if shape.effect:
            effect = str(rng.choice(["R", "K", "K?"])) if rng.random() < shape.effect else ""
            awaited = tuple(each for each in parents if each in staging and rng.random() < 0.3)
            staging.update({name} if effect else ())
        body = _body(tuple(own), tuple(late), tuple(parents), modulus, whole, spawns, effect, awaited)
        parents = [*parents, *(f"{each}/e" for each in awaited)]
        needs = "all" if parents and rng.random() < 0.2 else "any"
        flow.node(name=name, kind="model", after=parents, when=when, unknown=unknown, needs=needs)(body)
        names.append(name)
        placed.append(layer)
        if rng.random() < shape.router:
            flow.branch(of=name)(_route(leaves[int(rng.integers(0, len(leaves)))]))
            routers.append(name)
        if spawns:
            flow.member(of=name, items="tasks", name=f"m{i}")(_member(leaves[int(rng.integers(0, len(leaves)))]))
            joins.append(f"m{i}")
            names.append(f"j{i}")
            placed.append(layer)
            flow.node(name=f"j{i}", kind="join", after=f"m{i}")(_join(f"m{i}"))
    durations_s = {name: float(rng.integers(1, 5)) for name in [*names, *joins]}
    span = float(sum(durations_s.values())) / 2
    revisions = tuple(
        (float(rng.uniform(0, span)), Revision(f"r{k}", (_change(rng, shape, leaves),)))
        for k in range(shape.n_revisions)
    )
    return World(flow, inputs, tuple(sorted(revisions, key=lambda pair: pair[0])), durations_s)


def _change(rng: np.random.Generator, shape: WorldShape, leaves: list[tuple[str, str]]) -> Change:
    artifact, field = leaves[int(rng.integers(0, len(leaves)))]
    value = int(rng.integers(0, shape.n_values))
    kind = rng.random()
    if kind < 0.15:
        return Change(artifact, Op.APPEND, ("list",), value)
    if kind < 0.3:
        return Change(artifact, Op.INSERT, ("list", 0), value)
    return Change(artifact, Op.SET, (field,), value)


def _mix(parts: list[Any], modulus: int) -> int:
    text = canonical_text(freeze(parts))
    return int.from_bytes(blake2b(text.encode(), digest_size=4).digest(), "big") % modulus


def _body(
    own: tuple[tuple[str, str], ...],
    late: tuple[tuple[str, str], ...],
    parents: tuple[str, ...],
    modulus: int,
    whole: str,
    spawns: bool,
    effect: str = "",
    awaited: tuple[str, ...] = (),
) -> Any:
    async def body(state: Any, ctx: Any) -> dict[str, Any]:
        parts: list[Any] = [state[artifact][field] for artifact, field in own]
        if whole:
            parts.append(len(state[whole]["list"]))
        for parent in parents:
            if parent in state:
                parts.append(state[parent]["x"])
        parts += [f"{parent}/e" in state for parent in awaited]
        reply = await ctx.model(f"{parts}", max_tokens=2)
        for artifact, field in late:
            parts.append(state[artifact][field])
        output: dict[str, Any] = {"x": _mix([parts, reply.text if modulus > 1000 else ""], modulus)}
        if spawns:
            output["tasks"] = [task % 2 for task in state["a0"]["list"]]
        if effect and not (effect.endswith("?") and output["x"] % 2):
            ctx.stage(Effect("e", output["x"] % 3, Reversibility(effect[0])))
        return output

    return body


def _route(leaf: tuple[str, str]) -> Any:
    artifact, field = leaf

    def route(state: Any) -> str:
        return "left" if state[artifact][field] == 0 else "right"

    return route


def _member(leaf: tuple[str, str]) -> Any:
    artifact, field = leaf

    async def member(state: Any, ctx: Any) -> dict[str, Any]:
        await ctx.model(f"member {ctx.key}", max_tokens=2)
        return {"x": [ctx.item, state[artifact][field]]}

    return member


def _join(template: str) -> Any:
    async def join(state: Any, ctx: Any) -> dict[str, Any]:
        parts = [state[template][key]["x"][1] for key in state[template]]
        await ctx.model(f"join {parts}", max_tokens=2)
        return {"x": _mix(parts, 1 << 30)}

    return join
