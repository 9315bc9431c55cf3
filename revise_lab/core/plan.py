"""Recovery plans, the switches of the protocol, and what a policy sees.

A policy is a pure function from a :class:`View` to a list of affected nodes and a scope; it never touches the world.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from enum import StrEnum
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from revise_lab import draw
from revise_lab.errors import RefusedCombination
from revise_lab.records.attempt import Coverage
from revise_lab.records.event import Evidence, Planned, PlannedNode
from revise_lab.records.value import make
from revise_lab.records.workflow import Graph

if TYPE_CHECKING:
    from .table import NodeRun


class Action(StrEnum):
    """The five actions of arXiv:2609.00643 section 3."""

    CANCEL = "cancel"
    AVOID = "avoid"
    RECOMPUTE = "recompute"
    CONTINUE = "continue"
    REUSE = "reuse"


class Scope(StrEnum):
    """How far a plan reaches."""

    SUBGRAPH = "subgraph"
    SUFFIX = "suffix"
    RESTART = "restart"


_CHOICES: Final[Mapping[str, tuple[str, ...]]] = {
    "check": ("delta", "digest", "none"),
    "propagation": ("descendants", "diff"),
    "unknown": ("global", "local"),
    "order": ("topological", "start", "commit"),
    "extension": ("off", "on"),
    "control": ("reads", "condition"),
    "release": ("commit", "close"),
    "compensation": ("lazy", "eager"),
    "approval": ("off", "on"),
}


@dataclass(frozen=True)
class Switches:
    """The switches of the protocol; contradictions cannot be built.

    Attributes
    ----------
    check : str
        ``delta``: no change since the start meets a read and no parent was replaced (the paper). ``digest``: every read
        evaluates to what was observed (ours). ``none``: nothing is revalidated, and what a plan keeps may be stale
        (arXiv:2604.23283); only for policies that are registered with it.
    propagation : str
        ``descendants``: all active descendants are affected (the paper). ``diff``: a recomputed output is a change like
        any other (ours).
    unknown : str
        ``global``: a directly hit node that is not complete means a full restart (the paper). ``local``: it stands for
        itself, its siblings stay selective (ours).
    order : str
        The linear order of ``suffix``; the paper does not say, ``topological`` is our choice.
    extension : str
        ``on``: at a late read an attempt moves to the newest state if all its reads so far hold there (rule R4, ours).
    control : str
        ``reads``: a decision whose control reads changed is made again by running its node. ``condition``: it is made again
        by itself, at the values of now, and if the whole output is the same nothing else runs (rule R7, ours).
    release : str
        When a staged effect may leave (rule E): ``commit``, when its node settles (the paper); ``close``, effects that are
        compensable or irreversible wait for the seal (ours).
    compensation : str
        ``lazy``: after the recomputation, and only if it wants something else (the paper does not say; our choice).
        ``eager``: as soon as the attempt that published is not valid any more.
    approval : str
        ``on``: somebody is asked before a staged effect may leave.
    """

    check: str = "delta"
    propagation: str = "descendants"
    unknown: str = "global"
    order: str = "topological"
    extension: str = "off"
    control: str = "reads"
    release: str = "commit"
    compensation: str = "lazy"
    approval: str = "off"

    def __post_init__(self) -> None:
        for name, allowed in _CHOICES.items():
            if getattr(self, name) not in allowed:
                raise RefusedCombination(f"{name}={getattr(self, name)!r} - choose {' or '.join(allowed)}")
        needing = {"propagation": "diff", "control": "condition", "extension": "on"}
        if self.check == "none" and (name := next((n for n, v in needing.items() if getattr(self, n) == v), "")):
            raise RefusedCombination(
                f"{name}={needing[name]!r} with check='none' - it rests on reads being compared with what is there, and"
                " nothing is - use check='digest'"
            )
        if self.propagation == "diff" and self.check == "delta":
            raise RefusedCombination(
                "propagation='diff' with check='delta' - a finished child would survive a cut-off parent while a running"
                " one with the same reads is rejected - use check='digest', or propagation='descendants'"
            )
        if self.control == "condition" and self.check == "delta":
            raise RefusedCombination(
                "control='condition' with check='delta' - a decision that comes out as before would still be rejected, for"
                " what it read has changed - use check='digest', or control='reads'"
            )
        if self.extension == "on" and self.check == "delta":
            raise RefusedCombination(
                "extension='on' with check='delta' - an attempt that moved would be rejected for a change that it has"
                " already seen reverted - use check='digest', or extension='off'"
            )

    def as_dict(self) -> dict[str, Any]:
        """Return the switches by name."""
        return asdict(self)


_COMPLETE: Final = Coverage.COMPLETE  # bound once: looking a member up on its class costs 0.07 us in Python 3.11


class View(NamedTuple):
    """What a policy sees when a revision has been applied and nothing has been decided yet."""

    revision: str
    version: int
    hits: Mapping[NodeRun, Evidence]
    """Nodes whose live attempt read something that changed."""
    runs: Mapping[str, NodeRun]
    switches: Switches
    unbounded: tuple[str, ...]
    """Nodes with unknown edges or writes."""
    n_active: int
    """How many nodes belong to the workflow as it now stands."""
    changes: bool
    """Whether any value changed at all."""

    def active(self) -> Iterator[NodeRun]:
        """Iterate over the nodes that belong to the workflow as it now stands, in no particular order."""
        return (run for run in self.runs.values() if run.active is not False)

    def incomplete(self) -> list[NodeRun]:
        """Return the directly hit nodes whose read set is not complete."""
        return [run for run in self.hits if run.coverage is not _COMPLETE]


class Decision(NamedTuple):
    """What a policy answers: the affected nodes with their evidence, and the scope."""

    scope: Scope
    affected: Mapping[NodeRun, Evidence]


Planner = Callable[[View], Decision]


class Policy(NamedTuple):
    """A named way to recover.

    ``deferred`` policies let the turn end before a revision takes effect.
    """

    name: str
    plan: Planner
    switches: Switches = Switches()
    deferred: bool = False


class RecoveryPlan:
    """A plan as people and tests look at it: node sets by action, with evidence.

    Parameters
    ----------
    planned : Planned
        The journaled fact.
    graph : Graph, optional
        The workflow, to draw the plan on.
    """

    def __init__(self, planned: Planned, graph: Graph | None = None) -> None:
        self._graph = graph
        self.revision, self.version = planned.revision, planned.version
        self.scope = Scope(planned.scope)
        self.n_active = planned.n_active
        self.nodes = planned.nodes

    def of(self, *actions: Action) -> tuple[str, ...]:
        """Return the nodes with one of these actions, in topological order."""
        return tuple(each.node for each in self.nodes if each.action in actions)

    @property
    def affected(self) -> tuple[str, ...]:
        """The nodes that are not simply kept: cancelled, avoided or recomputed."""
        return self.of(Action.CANCEL, Action.AVOID, Action.RECOMPUTE)

    @property
    def recompute_ratio(self) -> float:
        """Invalidated over active nodes, pending ones included."""
        return len(self.affected) / self.n_active if self.n_active else 0.0

    def rows(self) -> list[tuple[str, str, str]]:
        """Return (node, action, reason) rows."""
        return [
            (
                each.node,
                each.action,
                str(each.evidence or "") + (f" until {', '.join(each.until)}" if each.until else ""),
            )
            for each in self.nodes
        ]

    def __str__(self) -> str:
        return draw.table_text(self.rows(), ("node", "action", "because"))

    def _repr_html_(self) -> str:
        rows = draw.table_html(self.rows(), ("node", "action", "because"), caption=repr(self))
        if self._graph is None or not self._graph.order:  # a graph that a framework unrolls has no drawing of its own
            return rows
        actions = {each.node.partition("[")[0]: each.action for each in self.nodes}
        nodes = [
            (name, str(self._graph.nodes[name].kind), str(actions.get(name, Action.REUSE)), "")
            for name in self._graph.order
        ]
        return draw.workflow_svg(nodes, self._graph.edges(), title=f"plan for {self.revision}: {self.scope}") + rows

    def __repr__(self) -> str:
        parts = [f"{action}: {', '.join(self.of(action))}" for action in Action if self.of(action)]
        return f"RecoveryPlan({self.revision}, {self.scope}; {'; '.join(parts) or 'nothing to do'})"


_SUBGRAPH: Final = Scope.SUBGRAPH
_CANCEL, _AVOID, _RECOMPUTE, _CONTINUE, _REUSE = map(str, Action)
_BY_PLACE: Final = attrgetter("place")


def assemble(view: View, decided: Decision) -> Planned:
    """Turn the affected nodes of a policy into the five actions, in topological order.

    Under ``propagation="diff"`` the nodes that are kept only if their affected ancestors come out as before are listed too;
    under ``check="none"`` those that are kept although they read what changed, with that as their evidence.
    """
    hits, affected = view.hits, decided.affected
    stale = hits if view.switches.check == "none" else {}
    reached = {**stale, **affected} if stale else affected
    if view.switches.propagation == "diff" and decided.scope is _SUBGRAPH:
        reached = closure(affected, view.revision)
    nodes = []
    for run in sorted(reached, key=_BY_PLACE):
        if run in affected:
            current = run.current
            done = run in hits or (current is not None and current.dropped is None and not current.mismatched)
            action = _CANCEL if run.attempt else _RECOMPUTE if done else _AVOID
            nodes.append(make(PlannedNode, (run.name, action, affected[run], ())))
        elif run.attempt or run.current:
            until = [parent.name for parent in run.parents if parent in reached]
            kept = _CONTINUE if run.attempt else _REUSE
            nodes.append(make(PlannedNode, (run.name, kept, stale.get(run), tuple(until))))
    return make(Planned, (view.revision, view.version, str(decided.scope), tuple(nodes), view.n_active))


def closure(direct: Mapping[NodeRun, Evidence], revision: str) -> dict[NodeRun, Evidence]:
    """Return the directly hit nodes and all their active descendants, each with its evidence.

    The walk goes on through skipped nodes: what recomputes above them may activate them, and then their readers change.
    """
    found = dict(direct)
    skipped = set()
    stack = list(direct)
    while stack:
        parent = stack.pop()
        evidence = make(Evidence, (revision, "", None, parent.name))
        for child in parent.children:
            if child not in found and child not in skipped:
                stack.append(child)
                if child.active is False:
                    skipped.add(child)
                else:
                    found[child] = evidence
    return found
