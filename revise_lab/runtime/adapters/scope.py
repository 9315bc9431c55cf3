"""Who scheduled a task and who wrote what it finds in its state, from the framework's own write records.

A scope is one level of one pass over a graph: the graph itself, or a subgraph that is a node of it. LangGraph gives each
task a queue of its writes; they are folded step by step, in the order in which LangGraph applies them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any, NamedTuple

from revise_lab.records.value import canonical_text, make

from .images import image
from .views import NOWHERE, Origin

TASKS = "__pregel_tasks"
_BRANCH, _JOIN = "branch:to:", "join:"


class TaskRef(NamedTuple):
    """One task as LangGraph names it."""

    step: int
    path: tuple[Any, ...]


@dataclass
class _Task:
    unit: str
    writes: Iterable[tuple[str, Any]] = ()
    deciders: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """Who decides for this task what comes next, with the destinations named in this pass."""
    inner: Scope | None = None


class Placement(NamedTuple):
    """What is known of a task when it is scheduled."""

    name: str
    position: tuple[int, str]
    parents: tuple[str, ...]
    source: str | None
    """The one whose decision scheduled it."""
    lane: str
    """The name under which that decision knows it."""
    origins: Mapping[str, Origin]


class _Folded(NamedTuple):
    origins: dict[str, Origin]
    triggered: dict[str, list[tuple[str, bool]]]
    """Channel to whoever wrote it, and whether that was a decision."""
    sends: list[tuple[str, bool, str]]
    """Who sent it, whether that was a decision, and the name of the task that it makes."""


class Scope:
    """One level of one pass.

    Parameters
    ----------
    prefix : str
        Goes before the names of its tasks.
    reduced : frozenset of str
        State keys that are put together from all that was written, not replaced.
    base : mapping of str to Origin
        Where the values that it starts with come from.
    outer : Placement, optional
        The task that this level is the inside of.
    """

    def __init__(
        self, prefix: str, reduced: frozenset[str], base: Mapping[str, Origin], outer: Placement | None = None
    ) -> None:
        self.prefix, self.reduced, self._outer = prefix, reduced, outer
        self._origins: dict[str, Origin] = {
            key: Origin(origin.places, exact=False) if key in reduced else origin for key, origin in base.items()
        }
        self._tasks: dict[TaskRef, _Task] = {}
        self._folded: dict[int, _Folded] = {}
        self._done: set[int] = set()
        self._waiting: dict[str, list[tuple[str, bool]]] = {}
        self._counts: dict[str, int] = {}
        self._taken: dict[str, TaskRef] = {}

    # --- tasks -------------------------------------------------------------------------------------------------------

    def place(self, node: str, ref: TaskRef, triggers: tuple[str, ...], writes: Iterable[tuple[str, Any]]) -> Placement:
        """Name a task, say where it stands and keep the queue into which the framework puts what it writes.

        A second call for the same task (a retry, a resumption) agrees.
        """
        task = self._tasks.get(ref)
        before = self._before(ref.step)
        origins: Mapping[str, Origin] = before.origins
        if ref.path[0] == "__pregel_push":
            source, decides, name = self._member(node, ref, before.sends, task)
            lane, origins = name, {}
            parents: tuple[str, ...] = (source,) if source else ()
        else:
            names = [each for channel in triggers for each in before.triggered.get(channel, ()) if each[0]]
            parents = tuple(dict.fromkeys([name for name, _ in names]))
            decides, lane = len(names) == 1 and names[0][1], node
            name = task.unit if task is not None else self._numbered(node)
        while self._taken.setdefault(name, ref) != ref:
            name += "+"
        if self._outer is not None and not parents:
            parents = self._outer.parents
        if task is None:
            task = self._tasks[ref] = _Task(name)
        task.writes = writes
        decider = parents[0] if decides else None
        return make(Placement, (name, self._position(ref, name), parents, decider, lane, origins))

    def router(self, owner: TaskRef, name: str) -> Placement:
        """Say where the router of a task stands; it sees what its owner has written, before anybody else does."""
        task = self._tasks.setdefault(owner, _Task(""))
        origins = dict(self._before(owner.step).origins)
        for channel, _ in list(task.writes):
            if task.unit and not channel.startswith((_BRANCH, _JOIN, "__")):
                origins[channel] = self._contributed(channel, task, {}, origins)
        full = f"{task.unit or self.prefix + '__start__'}>{name}"
        parents = (task.unit,) if task.unit else self._outer.parents if self._outer else ()
        return Placement(full, self._position(owner, full), parents, None, "", origins)

    def _position(self, ref: TaskRef, name: str) -> tuple[int, str]:
        if self._outer is None:
            return (ref.step, name)
        return (self._outer.position[0], f"{self._outer.position[1]}/{ref.step:04d}/{name}")

    def _numbered(self, node: str) -> str:
        count = self._counts[node] = self._counts.get(node, -1) + 1
        return f"{self.prefix}{node}#{count}" if count else f"{self.prefix}{node}"

    def _member(
        self, node: str, ref: TaskRef, sends: list[tuple[str, bool, str]], task: _Task | None
    ) -> tuple[str, bool, str]:
        index = ref.path[1]
        if isinstance(index, int) and index < len(sends):
            return sends[index]
        return "", False, task.unit if task is not None else self._numbered(node)

    def begin(self, ref: TaskRef, writes: Iterable[tuple[str, Any]]) -> None:
        """Keep the queue of a task that is none of the machine's: what it writes has no author."""
        self._tasks.setdefault(ref, _Task("")).writes = writes

    def decide(self, ref: TaskRef, decider: str, decision: Iterable[Any]) -> None:
        """Keep what a router, or a node with a ``Command``, has decided: names of nodes, and sends."""
        task = self._tasks.setdefault(ref, _Task(""))
        task.deciders[decider] = tuple(each if isinstance(each, str) else f"~{id(each)}" for each in decision)

    def enter(self, ref: TaskRef, inner: Scope) -> None:
        """Keep the level below a task that is a subgraph."""
        self._tasks[ref].inner = inner

    # --- folding -----------------------------------------------------------------------------------------------------

    def _before(self, step: int) -> _Folded:
        if step not in self._folded:
            triggered: dict[str, list[tuple[str, bool]]] = {}
            sends: list[tuple[str, bool, Any]] = []
            ready = [ref for ref in self._tasks if ref.step < step and ref.step not in self._done]
            for ref in sorted(ready, key=lambda ref: (ref.step, _order(ref.path))):
                self._fold(self._tasks[ref], triggered, sends)
            self._done.update(ref.step for ref in ready)
            for channel, names in self._waiting.items():
                triggered[channel] = list(names)
            self._folded[step] = _Folded(dict(self._origins), triggered, self._named(sends))
        return self._folded[step]

    def _named(self, sends: list[tuple[str, bool, Any]]) -> list[tuple[str, bool, str]]:
        """Name the tasks that sends make, all of a source together: a label is a digest."""
        by_source: dict[str, list[Any]] = {}
        for source, _, send in sends:
            by_source.setdefault(source, []).append(send)
        names: dict[tuple[str, int], str] = {}
        for source, siblings in by_source.items():
            for send, name in zip(siblings, member_names(siblings, source, self.prefix), strict=True):
                names.setdefault((source, id(send)), name)
        return [(source, decides, names[source, id(send)]) for source, decides, send in sends]

    def _fold(
        self, task: _Task, triggered: dict[str, list[tuple[str, bool]]], sends: list[tuple[str, bool, Any]]
    ) -> None:
        inner = task.inner.final() if task.inner else {}
        for channel, value in list(task.writes):
            if channel == TASKS:
                sends.append((*self._decider(task, f"~{id(value)}"), value))
            elif channel.startswith(_BRANCH):
                triggered.setdefault(channel, []).append(self._decider(task, channel.removeprefix(_BRANCH)))
            elif channel.startswith(_JOIN):
                self._waiting.setdefault(channel, []).append((task.unit, False))
            elif task.unit and not channel.startswith("__"):
                self._origins[channel] = self._contributed(channel, task, inner, self._origins)

    def _contributed(self, key: str, task: _Task, inner: Mapping[str, Origin], origins: Mapping[str, Origin]) -> Origin:
        own = inner.get(key, NOWHERE) if task.inner else Origin(((task.unit, (key,)),), exact=True)
        if key not in self.reduced:
            return own
        before = origins.get(key, NOWHERE).places
        return Origin(tuple(dict.fromkeys((*before, *own.places))), exact=False)

    @staticmethod
    def _decider(task: _Task, destination: str) -> tuple[str, bool]:
        for decider, destinations in task.deciders.items():
            if destination in destinations:
                return decider, True
        return task.unit, False

    def final(self) -> dict[str, Origin]:
        """Return where every value comes from when the level is through."""
        return self._before(1 << 30).origins


def _order(path: tuple[Any, ...]) -> tuple[str, ...]:
    return tuple(f"{part:010d}" if isinstance(part, int) else str(part) for part in path[:3])


def member_names(sends: list[Any], source: str, prefix: str) -> list[str]:
    """Return the name of the task that each send of one decision makes: by the value of its argument, never by place.

    A decision that is made again in a loop carries its number, and so do its sends.
    """
    seen: dict[str, int] = {}
    names = []
    number = source.partition("#")[2].partition(">")[0]
    for send in sends:
        name = f"{prefix}{send.node}[{label(send.arg)}]" + (f"~{number}" if number else "")
        seen[name] = count = seen.get(name, -1) + 1
        names.append(f"{name}#{count}" if count else name)
    return names


def label(argument: Any) -> str:
    """Return a short text that stands for the argument of a send."""
    if isinstance(argument, dict) and argument.get("__type") == "tool_call_with_context":
        argument = argument["tool_call"]
    if isinstance(argument, str) and 0 < len(argument) <= 40 and not set(argument) & set("#[]@/.~>"):
        return argument
    return blake2b(canonical_text(image(argument)).encode(errors="surrogatepass"), digest_size=5).hexdigest()
