"""The latest-version oracle: what a fresh run on the final inputs would have committed, under one choice of answers.

Reuse with a model that samples is only right relative to a choice function w: w(key) is the answer that the currently
committed attempt of the node saw, and a fresh call for a key that nobody saw. Answers that only cancelled, rejected or
superseded attempts saw bind nothing. Without w the oracle would differ for the wrong reason: temperature zero under
batching is not deterministic.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping
from functools import reduce
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar

from revise_lab.errors import PathError, ReviseLabError
from revise_lab.records.effect import Effect, confirmation
from revise_lab.records.event import Execute, Fail
from revise_lab.records.revision import Change, patch
from revise_lab.records.selector import Read
from revise_lab.records.value import ABSENT, Value, equal, freeze, walk
from revise_lab.records.workflow import LANE, Graph, Node

from .body import Ask, Execution
from .machine import Machine

T = TypeVar("T")
Fresh = Callable[[Ask], Awaitable[Value]]


class Truth(NamedTuple):
    """What a fresh run commits, and how many of its calls w answered."""

    outputs: dict[str, Value]
    effects: dict[str, tuple[Effect, ...]]
    failures: dict[str, str]
    reads: dict[str, tuple[Read, ...]]
    oracle_hits: int
    oracle_fresh: int


async def oracle(
    graph: Graph,
    inputs: Mapping[str, Any],
    w: Mapping[tuple[Any, ...], Value],
    fresh: Fresh,
    overrides: Mapping[str, tuple[Change, ...]] = MappingProxyType({}),
    receipts: Mapping[str, tuple[Effect, Value]] = MappingProxyType({}),
) -> Truth:
    """Run every node that the final inputs activate, once, in topological order.

    Parameters
    ----------
    graph : Graph
        The workflow.
    inputs : mapping
        The latest artifacts.
    w : mapping
        Answers by key; see :func:`choices`.
    fresh : callable
        Answers a call that ``w`` does not know.
    overrides : mapping
        The places of outputs that are pinned; the same are applied here.
    receipts : mapping
        ``node/slot`` to the effect that is out and what its target answered; see :func:`receipts_of`.
    """
    frozen = {name: freeze(value) for name, value in inputs.items()}
    outputs: dict[str, Value] = {}
    effects: dict[str, tuple[Effect, ...]] = {}
    failures: dict[str, str] = {}
    reads: dict[str, tuple[Read, ...]] = {}
    counts = [0, 0]

    async def perform(ask: Ask) -> Value:
        if ask.kind == "pause":
            return None
        known = w.get(ask.key, ABSENT)
        counts[known is ABSENT] += 1
        return await fresh(ask) if known is ABSENT else known

    for name in graph.order:
        node = graph.nodes[name]
        for member, key in _instances(graph, node, outputs):
            if not _activated(graph, node, outputs) or _blocked(graph, node, failures):
                continue
            seen = _flowing(graph, node, outputs) if "reads" in node.unknown else node.parents
            parents = {each: value for parent in seen for each, value in _outputs_of(graph, parent, outputs).items()}
            parents |= {each: _receipt(each, effects, receipts) for each in node.confirmations}
            run = Execution(graph, Execute("oracle", member, key, 0, frozen, parents), perform)
            ended = await run.run()
            reads[member] = tuple(Read(*each) for each in run.recorder.reads.items())
            if isinstance(ended, Fail):
                failures[member] = ended.error
                continue
            try:
                outputs[member] = reduce(patch, overrides.get(member, ()), ended.output)
                effects[member] = ended.effects
            except PathError:
                failures[member] = "OverrideConflict"
    return Truth(outputs, effects, failures, reads, *counts)


def choices(machine: Machine) -> dict[tuple[Any, ...], Value]:
    """Return w: the answers seen by the attempts that are committed now."""
    return {
        call.key: call.response
        for run in machine.runs.values()
        if run.current is not None
        for call in run.current.calls
    }


def receipts_of(machine: Machine) -> dict[str, tuple[Effect, Value]]:
    """Return what targets answered for the effects that are out now: boundary answers like those of w."""
    return {
        confirmation(node, slot): (box.live.effect, box.live.receipt)
        for node, boxes in machine.outboxes.items()
        for slot, box in boxes.items()
        if box.live
    }


def _receipt(
    name: str, effects: Mapping[str, tuple[Effect, ...]], receipts: Mapping[str, tuple[Effect, Value]]
) -> Value:
    node, _, slot = name.partition("/")
    wanted = next((each for each in effects.get(node, ()) if each.slot == slot), None)
    known = receipts.get(name)
    return known[1] if wanted and known and known[0].same(wanted) else ABSENT


def differences(machine: Machine, truth: Truth) -> list[str]:
    """Return one line for each place where a run and the oracle differ: outputs, effects, route, members.

    The route and the member sets are part of the outputs: which nodes have one, and what routers and spawners returned.
    """
    found = []
    outputs = machine.outputs()
    for name in sorted({*outputs, *truth.outputs}):
        ours, theirs = outputs.get(name, ABSENT), truth.outputs.get(name, ABSENT)
        if not equal(ours, theirs):
            found.append(f"output of {name}: {ours!r} committed, {theirs!r} is right")
    ours_out, theirs_out = _effects_of(machine), {name: dict(_by_slot(each)) for name, each in truth.effects.items()}
    for name in sorted({*ours_out, *theirs_out}):
        out, right = ours_out.get(name, {}), theirs_out.get(name, {})
        for slot in sorted({*out, *right}):
            if slot not in out or slot not in right or not out[slot].same(right[slot]):
                found.append(f"effects of {name}: {slot} is {out.get(slot)!r}, {right.get(slot)!r} is right")
    for name in sorted({*machine.failures(), *truth.failures}):
        if machine.failures().get(name, "").partition(":")[0] != truth.failures.get(name, "").partition(":")[0]:
            found.append(f"failure of {name}: {machine.failures().get(name)} against {truth.failures.get(name)}")
    return found


def _effects_of(machine: Machine) -> dict[str, dict[str, Effect]]:
    """Return what is out in the world; of a run that has not been sealed, what its settled nodes ask for."""
    if machine.state == "closed":
        return machine.live_effects()
    settled = (run for run in machine.runs.values() if run.settled and run.current)
    return {run.name: dict(_by_slot(run.current.effects)) for run in settled if run.current}


def _by_slot(effects: Iterable[Effect]) -> Iterable[tuple[str, Effect]]:
    return ((effect.slot, effect) for effect in effects)


def drive(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine that never really waits to its end, without an event loop.

    Raises
    ------
    ReviseLabError
        It waited for something.
    """
    try:
        coroutine.send(None)
    except StopIteration as end:
        return end.value  # type: ignore[no-any-return]
    coroutine.close()
    raise ReviseLabError("a node body waited for something that is no boundary call - run this oracle in an event loop")


def _instances(graph: Graph, node: Node, outputs: Mapping[str, Value]) -> list[tuple[str, str | None]]:
    if node.membership is None:
        return [(node.name, None)]
    entries = walk(outputs.get(node.membership.spawner, ABSENT), node.membership.path)
    return [(f"{node.name}[{key}]", key) for key in entries] if isinstance(entries, dict) else []


def _outputs_of(graph: Graph, name: str, outputs: Mapping[str, Value]) -> dict[str, Value]:
    node = graph.nodes[name]
    if node.membership is None:
        return {name: outputs.get(name, ABSENT)}
    own = {member: outputs.get(member, ABSENT) for member, _ in _instances(graph, node, outputs)}
    return {node.membership.spawner: outputs.get(node.membership.spawner, ABSENT), **own}


def _flowing(graph: Graph, node: Node, outputs: Mapping[str, Value]) -> list[str]:
    """Return the ancestors whose outputs can flow into a node; the walk ends at skipped nodes, as in the machine."""
    seen: set[str] = set()
    stack = list(node.parents)
    while stack:
        name = stack.pop()
        if name not in seen:
            seen.add(name)
            membership = graph.nodes[name].membership
            if membership:
                stack.append(membership.spawner)
            if any(member in outputs for member, _ in _instances(graph, graph.nodes[name], outputs)):
                stack.extend(graph.nodes[name].parents)
    return sorted(seen, key=graph.position.__getitem__)


def _activated(graph: Graph, node: Node, outputs: Mapping[str, Value]) -> bool:
    if node.when and walk(outputs.get(node.when[0], ABSENT), (LANE, node.when[1])) is ABSENT:
        return False
    if not node.parents:
        return True
    present = [value is not ABSENT for parent in node.parents for value in _outputs_of(graph, parent, outputs).values()]
    return all(present) if node.needs == "all" else any(present)


def _blocked(graph: Graph, node: Node, failures: Mapping[str, str]) -> bool:
    failed = {name.partition("[")[0] for name in failures}
    return bool(failed) and any(parent in failed for parent in (*node.parents, *graph.ancestors(node.name)))
