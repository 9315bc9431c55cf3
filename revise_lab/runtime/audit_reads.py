"""Does a workflow read anything that is not recorded? Perturb what it did not read, and see.

This falsifies the completeness of provenance; it cannot prove it. A hidden read (a closure, a global, a C-level dump) shows
when the perturbed place lies in the state; the clock, the environment and files are outside of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from revise_lab.core.body import Ask, Execution
from revise_lab.core.oracle import drive, oracle
from revise_lab.records.event import Execute, Fail
from revise_lab.records.revision import Change, Op, patch
from revise_lab.records.selector import Path, Read, delta_between, format_path, meets
from revise_lab.records.value import ABSENT, Arr, Obj, Value, equal, freeze, members, step
from revise_lab.records.workflow import Graph, Workflow

from .simulator import Answer, answer_by_hash


class HiddenRead(NamedTuple):
    """A node whose output moved although nothing that it is known to have read did."""

    node: str
    path: str
    perturbation: str
    before: Value
    after: Value

    def __str__(self) -> str:
        return f"{self.node}: {self.perturbation} {self.path} moved its output, and no recorded read meets it"


def audit_reads(
    workflow: Workflow | Graph, inputs: Mapping[str, Any], answer: Answer = answer_by_hash
) -> list[HiddenRead]:
    """Run every node again under changes of what it did not read, and return those whose output moved.

    Parameters
    ----------
    workflow : Workflow or Graph
        The workflow; bodies must be deterministic given their boundary answers.
    inputs : mapping
        The inputs to start from.
    answer : callable
        Answers boundary calls; the default is a hash of the request, so that a changed prompt shows.

    Notes
    -----
    Every unread leaf is changed, every collection gets one more key or element. Our choice: one change at a time.
    """
    graph = workflow.graph() if isinstance(workflow, Workflow) else workflow

    async def perform(ask: Ask) -> Value:
        return None if ask.kind == "pause" else answer(ask)

    frozen = {name: freeze(value) for name, value in inputs.items()}
    truth = drive(oracle(graph, frozen, {}, perform))
    found: list[HiddenRead] = []
    for name, reads in truth.reads.items():
        template = name.partition("[")[0]
        node = graph.nodes[template]
        if "reads" in node.unknown:
            continue
        key = name[len(template) + 1 : -1] if name != template else None
        parents = {
            other: value
            for other, value in truth.outputs.items()
            if other.partition("[")[0] in node.parents or (node.source == other)
        }
        absent = [each for each in node.parents if each not in truth.outputs and not graph.nodes[each].membership]
        parents |= dict.fromkeys(absent, ABSENT)
        order = Execute("audit", name, key, 0, frozen, parents)
        before = _ending(drive(Execution(graph, order, perform).run()))
        for artifact, change, value in _perturbations(order, reads):
            changed = Execute("audit", name, key, 0, *_replaced(order, artifact, value))
            after = _ending(drive(Execution(graph, changed, perform).run()))
            if not equal(before, after):
                found.append(HiddenRead(name, format_path(artifact, change.path), str(change.op), before, after))
    return found


def _ending(event: Any) -> Value:
    return f"failed: {event.error}" if isinstance(event, Fail) else event.output


def _replaced(order: Execute, artifact: str, value: Value) -> tuple[Mapping[str, Value], Mapping[str, Value]]:
    if artifact in order.parents:
        return order.inputs, {**order.parents, artifact: value}
    return {**order.inputs, artifact: value}, order.parents


def _perturbations(order: Execute, reads: tuple[Read, ...]) -> Iterator[tuple[str, Change, Value]]:
    """Yield changes of the snapshot that no recorded read meets, with the changed artifact."""
    for artifact, root in {**order.inputs, **order.parents}.items():
        for path, value in _places(root, ()):
            change = _change(artifact, path, value)
            if not path and change.op is Op.SET:
                continue
            new = patch(root, change)
            delta = delta_between(artifact, 1, root, new)
            if not any(meets(delta, read.selector) is not None for read in reads):
                yield artifact, change, new


def _places(value: Value, at: Path) -> Iterator[tuple[Path, Value]]:
    yield at, value
    for key in members(value):
        yield from _places(step(value, key), (*at, key))


def _change(artifact: str, path: Path, value: Value) -> Change:
    if type(value) is Obj:
        return Change(artifact, Op.SET, (*path, "~added"), 1)
    if type(value) is Arr:
        return Change(artifact, Op.APPEND, path, value[-1] if value else 1)
    other: Value = (
        f"{value}~" if isinstance(value, str) else (not value) if isinstance(value, bool) else (value or 0) + 1
    )
    return Change(artifact, Op.SET, path, other)
