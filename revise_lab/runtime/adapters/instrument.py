"""Rebuilding a compiled LangGraph graph so that runs settle its tasks, leaving the user's own as it is.

The bound runnable of every node and the path of every conditional edge are wrapped; writers, reducers, edges and the loop
are LangGraph's own. What is memoised is what a node *returned*, never what was written to channels, so reducers, commands,
sends and edges are applied anew on every pass. A few names that LangGraph calls private are needed; :func:`probe` tries
them on a graph of two nodes. A graph is rebuilt once and serves all runs: the run that a task belongs to lies
in a context variable.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from contextvars import ContextVar
from functools import cached_property
from typing import Any, Protocol

from langchain_core.runnables import Runnable
from langgraph._internal._runnable import RunnableCallable
from langgraph.channels import AnyValue, EphemeralValue, LastValue, UntrackedValue
from langgraph.graph import START
from langgraph.graph._branch import BranchSpec
from langgraph.graph.state import CompiledStateGraph
from langgraph.types import Command, Send

from revise_lab.errors import ReviseLabError
from revise_lab.records.workflow import Kind

from .scope import Placement, Scope, TaskRef, member_names
from .tasks import Job, TaskDriver, task_node

_SEND = "__pregel_send"
_REPLACED = (LastValue, AnyValue, EphemeralValue, UntrackedValue)


class Host(Protocol):
    """The run that a task belongs to."""

    scopes: dict[str, Scope]
    """The levels of the pass that is under way, by checkpoint namespace."""

    @property
    def tasks(self) -> TaskDriver:
        """What settles tasks."""


HOST: ContextVar[Host] = ContextVar("host")
"""The run whose pass is under way here."""


def reduced_keys(compiled: CompiledStateGraph[Any, Any, Any, Any]) -> frozenset[str]:
    """Return the state keys that a reducer puts together."""
    return frozenset(key for key, channel in compiled.channels.items() if type(channel) not in _REPLACED)


class _Wrapped(Runnable[Any, Any]):
    def __init__(self, name: str, inner: Any) -> None:
        self.node, self.inner, self.name = name, inner, name

    def invoke(self, input: Any, config: Any = None, **kwargs: Any) -> Any:
        raise ReviseLabError("a graph that is to be revised in flight runs asynchronously - it is started by start()")

    def _level(self, config: Any) -> tuple[Scope, TaskRef, tuple[str, ...]]:
        known = config["metadata"]
        namespace = known["langgraph_checkpoint_ns"].rpartition("|")[0]
        ref = TaskRef(known["langgraph_step"], tuple(known["langgraph_path"]))
        return HOST.get().scopes[namespace], ref, tuple(known["langgraph_triggers"])


class _Start(_Wrapped):
    """The entry of a graph, which writes the input; its writes have no author among the tasks."""

    async def ainvoke(self, input: Any, config: Any = None, **kwargs: Any) -> Any:
        scope, ref, _ = self._level(config)
        scope.begin(ref, config["configurable"][_SEND].__self__)
        return input


class _Node(_Wrapped):
    def __init__(self, name: str, inner: Any, n_sources: int) -> None:
        super().__init__(name, inner)
        self.n_sources = n_sources
        self._body = _body_of(inner)
        self._known = task_node(name, self._body)

    @cached_property
    def mode(self) -> str:
        """How the node can be run; found out at its first task, when what its module defines is there."""
        return _mode(self.inner)

    async def ainvoke(self, input: Any, config: Any = None, **kwargs: Any) -> Any:
        scope, ref, triggers = self._level(config)
        placed = scope.place(self.node, ref, triggers, config["configurable"][_SEND].__self__)
        job = Job(
            call=lambda state: self.inner.ainvoke(state, config, **kwargs),
            state=input,
            lanes=lambda raw: _lanes(gotos, placed.name, scope.prefix) if (gotos := _gotos(raw)) else None,
            mode=self.mode,
            is_state=ref.path[0] != "__pregel_push",
            alone=len(placed.parents) >= self.n_sources,
        )
        if self._known.name != placed.name:
            self._known = task_node(placed.name, self._body)
        raw = await HOST.get().tasks.settle(placed, self._known, job)
        if gotos := _gotos(raw):
            scope.decide(ref, placed.name, gotos)
        return raw


class _Subgraph(_Wrapped):
    """A graph that is a node: its own nodes are the tasks."""

    async def ainvoke(self, input: Any, config: Any = None, **kwargs: Any) -> Any:
        scope, ref, triggers = self._level(config)
        placed = scope.place(self.node, ref, triggers, config["configurable"][_SEND].__self__)
        base = placed.origins if ref.path[0] != "__pregel_push" else {}
        inner = Scope(f"{placed.name}/", reduced_keys(self.inner), base, placed)
        HOST.get().scopes[config["metadata"]["langgraph_checkpoint_ns"]] = inner
        scope.enter(ref, inner)
        return await self.inner.ainvoke(input, config, **kwargs)


class _Router(_Wrapped):
    """The path of a conditional edge: a node of the machine that only decides."""

    def __init__(self, name: str, inner: Any, ends: Mapping[Any, str] | None) -> None:
        super().__init__(name, inner)
        self.ends = ends

    async def ainvoke(self, input: Any, config: Any = None, **kwargs: Any) -> Any:
        scope, ref, _ = self._level(config)
        placed = scope.router(ref, self.node)
        job = Job(
            call=lambda state: _on(self.inner, state).ainvoke(input, config, **kwargs),
            state=input,
            lanes=lambda raw: _lanes(self._destinations(raw), placed.name, scope.prefix),
            mode="view",
            is_state=True,
        )
        raw = await HOST.get().tasks.settle(placed, task_node(placed.name, _body_of(self.inner), Kind.ROUTER), job)
        scope.decide(ref, placed.name, self._destinations(raw))
        return raw

    def _destinations(self, decision: Any) -> list[Any]:
        found = list(decision) if isinstance(decision, list | tuple) else [decision]
        return [each if isinstance(each, Send) or not self.ends else self.ends[each] for each in found]


def _body_of(runnable: Any) -> Any:
    return getattr(runnable, "func", None) or getattr(runnable, "afunc", None)


def _on(path: Any, state: Any) -> Any:
    """Return the path, made to decide on ``state`` while tracers are shown the value that they are always shown."""
    if not isinstance(path, RunnableCallable):
        return path
    fresh = copy.copy(path)
    func, afunc = path.func, path.afunc
    if func is not None:
        fresh.func = lambda _, *args, **kwargs: func(state, *args, **kwargs)
    if afunc is not None:

        async def decide(_: Any, *args: Any, **kwargs: Any) -> Any:
            return await afunc(state, *args, **kwargs)

        fresh.afunc = decide
    return fresh


def _gotos(raw: Any) -> list[Any]:
    if type(raw) is dict:
        return []
    commands = raw if isinstance(raw, list | tuple) else (raw,)
    found: list[Any] = []
    for each in commands:
        if isinstance(each, Command) and each.goto and each.graph is None:
            found.extend(each.goto if isinstance(each.goto, list | tuple) else (each.goto,))
    return found


def _lanes(destinations: list[Any], source: str, prefix: str) -> dict[str, Any]:
    sends = [each for each in destinations if isinstance(each, Send)]
    lanes: dict[str, Any] = {each: True for each in destinations if isinstance(each, str)}
    return lanes | dict(zip(member_names(sends, source, prefix), (send.arg for send in sends), strict=True))


def _mode(bound: Any) -> str:
    """Say how a node can be run: on views, on a copy, or only so that its reads go unseen, and then why."""
    if type(bound).__name__ == "ToolNode" or not isinstance(bound, RunnableCallable):
        return "copy"  # their own code hands the state to validators in C
    unseen = sorted({"store", "runtime", "previous"} & set(bound.func_accepts))
    if unseen:
        return f"it takes the {' and the '.join(unseen)}, which cannot be watched"
    if _calls_graph(bound.func or bound.afunc):
        return "it invokes a graph of its own, whose reads cannot be seen"
    return "view"


def _calls_graph(function: Any) -> bool:
    from inspect import getclosurevars, isfunction, unwrap

    function = unwrap(getattr(function, "func", function))
    if not isfunction(function):
        return False
    known = getclosurevars(function)
    return any(isinstance(each, CompiledStateGraph) for each in (*known.nonlocals.values(), *known.globals.values()))


def instrument(compiled: Any) -> Any:
    """Return a copy of a compiled graph whose tasks are settled by the run at hand."""
    nodes = {}
    for name, node in compiled.nodes.items():
        update: dict[str, Any] = {"writers": _writers(name, compiled, node.writers)}
        if name == START:
            if compiled.builder.branches.get(START):  # else nothing that it writes has an author
                update["bound"] = _Start(name, None)
        elif isinstance(node.bound, CompiledStateGraph):
            inner = instrument(node.bound)
            update |= {"bound": _Subgraph(name, inner), "subgraphs": [inner]}
        else:
            update |= {"bound": _Node(name, node.bound, _n_sources(compiled.builder, name)), "cache_policy": None}
        nodes[name] = node.copy(update)
    return compiled.copy({"nodes": nodes})


def _n_sources(builder: Any, name: str) -> int:
    """Return how many nodes could schedule a node, as far as the graph declares it."""
    found = {start for start, end in builder.edges if end == name}
    found |= {start for starts, end in builder.waiting_edges if end == name for start in starts}
    found |= {
        start
        for start, branches in builder.branches.items()
        if any(spec.ends is None or name in spec.ends.values() for spec in branches.values())
    }
    found |= {other for other, spec in builder.nodes.items() if name in (spec.ends or ())}
    return len(found)


def _writers(name: str, compiled: Any, writers: list[Any]) -> list[Any]:
    found = []
    for writer in writers:
        branch = getattr(getattr(writer, "func", None), "__self__", None)
        if isinstance(branch, BranchSpec):
            names = [each for each, spec in compiled.builder.branches[name].items() if spec.path is branch.path]
            alone = len(compiled.builder.branches[name]) == 1
            router = _Router("" if alone or not names else names[0], branch.path, branch.ends)
            writer = branch._replace(path=router).run(writer.kwargs["writer"], writer.kwargs["reader"])
        found.append(writer)
    return found


__all__ = ["HOST", "Host", "Placement", "instrument", "reduced_keys"]
