"""Does a node of a LangGraph graph read anything that is not recorded? Change what it did not read, and see."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from revise_lab.records.event import Execute, Fail
from revise_lab.records.selector import format_path
from revise_lab.records.value import ABSENT, Value, equal, walk
from revise_lab.runtime.audit_reads import HiddenRead, _perturbations

from .images import fields_of, image, restore
from .tasks import TaskExecution

if TYPE_CHECKING:
    from .langgraph import RevisableGraph


async def audit_reads(graph: RevisableGraph, input: Any, config: Mapping[str, Any] | None = None) -> list[HiddenRead]:
    """Run a graph to its end, then every node again under changes of what it did not read.

    Parameters
    ----------
    graph : RevisableGraph
        The graph; its nodes must be deterministic, and so must the model behind them.
    input, config
        As for :meth:`RevisableGraph.start`.

    Returns
    -------
    list of HiddenRead
        Nodes whose output moved. It falsifies the completeness of provenance; it cannot prove it.

    Notes
    -----
    Keys that a reducer has put together, and nodes that run on copies, are read whole and have nothing to change.
    """
    run = graph.start(input, config)
    run.tasks.keeps_jobs = True
    await run.result()
    found: list[HiddenRead] = []
    for name, node in run.machine.runs.items():
        execution = run.tasks.executions[node.current.id] if node.current else None
        if execution is None or node.current is None or execution.job.mode != "view" or not execution.job.is_state:
            continue
        reads = tuple(node.current.reads)
        before = await _ending(execution, {}, execution.job.state)
        visible = {place[0] for origin in execution.placement.origins.values() for place in origin.places}
        inputs = {key: value for key, value in execution.order.inputs.items() if key in visible}
        parents = {key: value for key, value in execution.order.parents.items() if key in visible and key not in inputs}
        order = Execute("audit", name, None, 0, inputs, parents)
        for artifact, change, value in _perturbations(order, reads):
            state = _moved(execution, artifact, value)
            if state is None:
                continue
            after = await _ending(execution, {artifact: value}, state)
            if not equal(before, after):
                found.append(HiddenRead(name, format_path(artifact, change.path), str(change.op), before, after))
    return found


def _moved(execution: TaskExecution, artifact: str, value: Value) -> Any:
    """Return the state of an attempt as it would be with another value of an artifact, ``None`` if it would not differ."""
    raw = execution.job.state
    names = fields_of(raw)
    state = dict(raw) if names is None else {name: getattr(raw, name) for name in names}
    new = dict(state)
    for key, origin in execution.placement.origins.items():
        if origin.exact and key in state and origin.places[0][0] == artifact:
            part = walk(value, origin.places[0][1])
            if part is not ABSENT:
                new[key] = restore(part, state[key])
    if equal(image(new), image(state)):
        return None
    return new if names is None else type(raw)(**new)


async def _ending(execution: TaskExecution, values: Mapping[str, Value], state: Any) -> Value:
    job = execution.job._replace(state=state)
    seen = {**execution.sight.values, **values}
    again = TaskExecution(execution.order, execution.node, execution.placement, job, seen, set())
    event = await again.run()
    return f"failed: {event.error}" if isinstance(event, Fail) else event.output
