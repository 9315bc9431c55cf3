"""Workflows: the DAG that a user declares with decorators, and the checked graph that the machine runs.

A node names its parents with ``after=``. A node with several parents runs when at least one of them is present
(``needs="any"``) or only when all are (``needs="all"``, a barrier); a parent is absent when it sits on a branch that was
not taken. A *branch* is the decision of a node, made by the same attempt: what it reads are control reads and its answer
is the member ``lane`` of the node's output. A *router* is a node that does nothing else. A *member* is a node that exists
once for each entry of a list or mapping that its spawner returns; it is identified by the entry's key, or by the
canonical value of its arguments and an occurrence number, never by its position.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from inspect import iscoroutinefunction
from typing import Any, Final, NamedTuple, TypeVar

from revise_lab.errors import RefusedCombination, WorkflowError

from .selector import Marker, Path, Role, Selector
from .value import Arr, Obj, Value, canonical_text, digest, freeze, step

Body = Callable[..., Any]
F = TypeVar("F", bound=Body)
LANE: Final = "lane"


class Kind(StrEnum):
    """What a node is."""

    MODEL = "model"
    TOOL = "tool"
    VERIFIER = "verifier"
    ROUTER = "router"
    JOIN = "join"


class Membership(NamedTuple):
    """Where a member's spawner keeps the entries."""

    spawner: str
    path: Path


@dataclass(frozen=True)
class Node:
    """One declared step of a workflow."""

    name: str
    kind: Kind
    body: Body | None
    parents: tuple[str, ...] = ()
    needs: str = "any"
    when: tuple[str, str] | None = None
    membership: Membership | None = None
    branch: Body | None = None
    unknown: frozenset[str] = frozenset()
    retries: int = 0
    timeout_s: float | None = None
    code_version: str = "1"
    confirmations: tuple[str, ...] = ()
    """Confirmations of effects that it reads, as ``node/slot``."""

    @property
    def is_sync(self) -> bool:
        """Whether the body is a plain function, which cannot be stopped once it runs."""
        return self.body is not None and not any(map(iscoroutinefunction, (self.body, type(self.body).__call__)))

    @property
    def source(self) -> str | None:
        """The node whose output decides whether this one is active."""
        return self.when[0] if self.when else self.membership.spawner if self.membership else None

    def activation(self, key: str | None = None) -> Selector | None:
        """Return the control read that stands for this node's activation (rule R6)."""
        if self.when:
            return Selector(self.when[0], (LANE, self.when[1]), Marker.HAS, Role.CONTROL)
        if self.membership and key is not None:
            return Selector(self.membership.spawner, (*self.membership.path, key), Marker.HAS, Role.CONTROL)
        return None


@dataclass(frozen=True)
class Graph:
    """A checked workflow: nodes in stable topological order (Kahn; ties by declaration)."""

    name: str
    nodes: Mapping[str, Node]
    order: tuple[str, ...]
    children: Mapping[str, tuple[str, ...]]
    position: Mapping[str, int] = field(repr=False)
    confirmations: frozenset[str] = frozenset()
    """Every confirmation of an effect that some node reads, as ``node/slot``."""

    def ancestors(self, name: str) -> tuple[str, ...]:
        """Return every declared ancestor of a node, in topological order."""
        seen: set[str] = set()
        stack = list(self.nodes[name].parents)
        while stack:
            parent = stack.pop()
            if parent not in seen:
                seen.add(parent)
                stack.extend(self.nodes[parent].parents)
        return tuple(sorted(seen, key=self.position.__getitem__))

    def deciding(self, name: str) -> tuple[Path, ...]:
        """Return the places in a node's output that say who else runs: its lanes, and the entries that it spawns."""
        node = self.nodes.get(name)
        lanes_at: tuple[Path, ...] = ((LANE,),) if node and node.branch else ()
        spawned = (each.membership for each in self.nodes.values() if each.membership)
        return (*lanes_at, *(each.path for each in spawned if each.spawner == name))

    def edges(self) -> tuple[tuple[str, str], ...]:
        """Return (parent, child) pairs, in topological order of the child."""
        return tuple((parent, name) for name in self.order for parent in self.nodes[name].parents)


class Workflow:
    """A workflow under construction.

    Parameters
    ----------
    name : str
        Names the workflow in journals and intents.

    Examples
    --------
    >>> trip = Workflow("trip")
    >>> @trip.node(kind="model")
    ... def plan(state):
    ...     return {"legs": state["request"]["legs"]}
    >>> @trip.node(kind="tool", after="plan")
    ... def price(state):
    ...     return {"total": 100 * state["plan"]["legs"]}
    >>> trip.graph().order
    ('plan', 'price')
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._nodes: dict[str, Node] = {}
        self._graph: Graph | None = None

    def node(
        self,
        *,
        kind: str = "tool",
        after: str | Iterable[str] = (),
        name: str | None = None,
        when: str | tuple[str, str] | None = None,
        needs: str = "any",
        unknown: Iterable[str] = (),
        retries: int = 0,
        timeout_s: float | None = None,
        code_version: str = "1",
    ) -> Callable[[F], F]:
        """Declare a node; the decorated function is its body.

        Parameters
        ----------
        kind : str
            ``model``, ``tool``, ``verifier``, ``router`` or ``join``.
        after : str or iterable of str
            Parents; their outputs are what the body may read besides the inputs.
        name : str, optional
            Name of the node; by default the function's.
        when : str or (str, str), optional
            The lane that activates the node, or (router, lane) where several routers exist.
        needs : str
            ``any``: runs when one parent is present; ``all``: a barrier.
        unknown : iterable of str
            What provenance cannot see of this node: ``reads``, ``edges``, ``writes``.
        retries : int
            Attempts after the first failure that counts.
        timeout_s : float, optional
            Longest time an attempt may run.
        code_version : str
            Part of the key of its boundary calls.
        """

        def declare(body: F) -> F:
            self._add(
                Node(
                    name or body.__name__,
                    Kind(kind),
                    body,
                    _names(after),
                    needs,
                    (when, "") if isinstance(when, str) else when,
                    unknown=frozenset(unknown),
                    retries=retries,
                    timeout_s=timeout_s,
                    code_version=code_version,
                )
            )
            return body

        return declare

    def router(
        self, *, after: str | Iterable[str], name: str | None = None, when: str | tuple[str, str] | None = None
    ) -> Callable[[F], F]:
        """Declare a router: a node that only names the lane (or lanes) to take; its reads are control reads."""

        def declare(route: F) -> F:
            self._add(
                Node(
                    name or route.__name__,
                    Kind.ROUTER,
                    None,
                    _names(after),
                    when=(when, "") if isinstance(when, str) else when,
                    branch=route,
                )
            )
            return route

        return declare

    def branch(self, *, of: str) -> Callable[[F], F]:
        """Attach a decision to a node; the node's own attempt makes it, after its body."""

        def declare(route: F) -> F:
            self._require(of, "branch")
            self._nodes[of] = replace(self._nodes[of], branch=route)
            self._graph = None
            return route

        return declare

    def member(
        self, *, of: str, items: str, kind: str = "tool", after: str | Iterable[str] = (), name: str | None = None
    ) -> Callable[[F], F]:
        """Declare a node that exists once for every entry of ``items`` in the output of the node ``of``."""

        def declare(body: F) -> F:
            parents = (of, *(parent for parent in _names(after) if parent != of))
            self._add(Node(name or body.__name__, Kind(kind), body, parents, membership=Membership(of, (items,))))
            return body

        return declare

    def graph(self) -> Graph:
        """Check the declarations and return the graph.

        Raises
        ------
        WorkflowError
            A cycle, an unknown parent, a router or lane that cannot be resolved, nested membership.
        """
        if self._graph is None:
            nodes = {name: self._resolved(node) for name, node in self._nodes.items()}
            self._graph = _checked(self.name, nodes)
        return self._graph

    def _add(self, node: Node) -> None:
        if node.name in self._nodes:
            raise WorkflowError(f"workflow {self.name!r} has two nodes named {node.name!r} - rename one of them")
        if any(char in node.name for char in ".[]#/"):
            raise WorkflowError(f"node name {node.name!r} holds a character of paths (. [ ] # /) - choose another")
        if node.needs not in ("any", "all"):
            raise WorkflowError(f"node {node.name!r} has needs={node.needs!r} - write 'any' or 'all'")
        for what, number in (("retries", node.retries), ("timeout_s", node.timeout_s)):
            if number is not None and not (isinstance(number, int | float) and number >= 0):
                raise WorkflowError(f"node {node.name!r} has {what}={number!r} - write a number, from 0 on")
        if extra := node.unknown - {"reads", "edges", "writes"}:
            raise WorkflowError(f"node {node.name!r}: unknown={sorted(extra)} - write reads, edges or writes")
        if node.kind is Kind.ROUTER and node.branch is None:
            raise RefusedCombination(
                f"node {node.name!r} has kind 'router' and a body that calls out - a router only decides: use"
                " @workflow.router, or a model node with @workflow.branch"
            )
        self._nodes[node.name] = node
        self._graph = None

    def _require(self, name: str, what: str) -> None:
        if name not in self._nodes:
            raise WorkflowError(
                f"{what} names node {name!r}, which workflow {self.name!r} does not have - declared so far:"
                f" {', '.join(self._nodes) or 'none'}"
            )

    def _resolved(self, node: Node) -> Node:
        confirmed = tuple(name for name in node.parents if "/" in name)
        if confirmed:
            plain = _names(name.partition("/")[0] for name in node.parents)
            node = replace(node, parents=plain, confirmations=confirmed)
            for name in plain:
                if (
                    name in self._nodes
                    and self._nodes[name].membership
                    and any(c.startswith(f"{name}/") for c in confirmed)
                ):
                    raise WorkflowError(
                        f"node {node.name!r} waits for an effect of the member {name!r} - members have no confirmation of"
                        " their own name: stage the effect in a join"
                    )
        for parent in node.parents:
            self._require(parent, f"node {node.name!r}: after=")
        if node.when is None:
            return node
        source, lane = node.when
        if not lane:
            routers = [name for name, other in self._nodes.items() if other.branch is not None and name != node.name]
            if len(routers) != 1:
                raise WorkflowError(
                    f"node {node.name!r}: when={source!r} - {len(routers)} nodes decide lanes"
                    f" ({', '.join(routers) or 'none'}), write when=(router, lane)"
                )
            source, lane = routers[0], source
        self._require(source, f"node {node.name!r}: when=")
        if self._nodes[source].branch is None:
            raise WorkflowError(f"node {node.name!r}: when= names {source!r}, which decides no lane - add a branch")
        if self._nodes[source].membership:
            raise WorkflowError(
                f"node {node.name!r}: when= names the member {source!r}, of which there may be many - decide in their join"
            )
        parents = node.parents if source in node.parents else (*node.parents, source)
        return replace(node, when=(source, lane), parents=parents)


def _names(names: str | Iterable[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys((names,) if isinstance(names, str) else names))


def _checked(name: str, nodes: dict[str, Node]) -> Graph:
    children: dict[str, list[str]] = {each: [] for each in nodes}
    for node in nodes.values():
        for parent in node.parents:
            children[parent].append(node.name)
            if nodes[parent].membership and node.membership:
                raise WorkflowError(f"member {node.name!r} comes after member {parent!r} - put a join between them")
    declared = {each: i for i, each in enumerate(nodes)}
    waiting = {each: len(nodes[each].parents) for each in nodes}
    ready = [declared[each] for each, count in waiting.items() if not count]
    heapq.heapify(ready)
    by_rank, order = list(nodes), list[str]()
    while ready:
        first = by_rank[heapq.heappop(ready)]
        order.append(first)
        for child in children[first]:
            waiting[child] -= 1
            if not waiting[child]:
                heapq.heappush(ready, declared[child])
    if len(order) < len(nodes):
        cycle = [each for each in nodes if waiting[each]]
        raise WorkflowError(f"workflow {name!r} has a cycle through {', '.join(cycle)} - remove one of these edges")
    kids = {each: tuple(sorted(found, key=declared.__getitem__)) for each, found in children.items()}
    read = frozenset(each for node in nodes.values() for each in node.confirmations)
    return Graph(name, nodes, tuple(order), kids, {each: i for i, each in enumerate(order)}, read)


def lanes(decision: object) -> Value:
    """Return the canonical form of a decision: an object with one entry for each lane taken."""
    if decision is None:
        return freeze({})
    taken = [decision] if isinstance(decision, str) or not isinstance(decision, Iterable) else list(decision)
    if not all(isinstance(lane, str) for lane in taken):
        raise WorkflowError(f"a branch returned {decision!r} - return the name of a lane, a list of names, or None")
    return freeze(dict.fromkeys(taken, True))


def with_keys(output: Value, path: Path) -> Value:
    """Return a spawner's output with the list at ``path`` turned into an object keyed by canonical value.

    Identity by value and occurrence, never by position: an insertion at the front renames nobody.
    """
    entries = step(output, path[0])
    if type(entries) is not Arr:
        if type(entries) is Obj:
            return output
        raise WorkflowError(f"a spawner returned no list or mapping under {path[0]!r} - members cannot be told apart")
    seen: dict[str, int] = {}
    keyed: dict[str, Value] = {}
    for entry in entries:
        label = _label(entry)
        seen[label] = occurrence = seen.get(label, -1) + 1
        keyed[f"{label}#{occurrence}" if occurrence else label] = entry
    return freeze({**output, path[0]: keyed})


def _label(entry: Value) -> str:
    """Return a text that no other value has: short plain strings stand for themselves."""
    if isinstance(entry, str) and 0 < len(entry) <= 40 and entry[0] != "=" and not set(entry) & set("#[]"):
        return entry
    text = canonical_text(entry)
    return f"={text}" if len(text) <= 24 and not set(text) & set("#[]") else f"={digest(entry).hex()}"
