"""The transition table of the machine, and the records that it moves.

House rules: whatever may happen to an attempt stands in :data:`ATTEMPTS`; the machine refuses what does not. The state
diagram in the documentation is drawn from this table.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from revise_lab.records.attempt import AttemptState as A
from revise_lab.records.attempt import Call, Certificate, Coverage, Outcome
from revise_lab.records.effect import Effect
from revise_lab.records.effect import EffectState as S
from revise_lab.records.event import Evidence, Execute
from revise_lab.records.selector import Path, Read, Selector
from revise_lab.records.value import Value
from revise_lab.records.workflow import Node

from .provenance import Cell

ATTEMPTS: Final[Mapping[tuple[A, str], tuple[A, ...]]] = {
    (A.RUNNING, "observe"): (A.RUNNING,),
    (A.RUNNING, "extend"): (A.RUNNING,),
    (A.RUNNING, "finish"): (A.FINISHED,),
    (A.RUNNING, "fail"): (A.FINISHED,),
    (A.RUNNING, "stop"): (A.CANCELLED, A.ORPHANED),
    (A.FINISHED, "commit"): (A.COMMITTED,),
    (A.FINISHED, "conclude"): (A.FAILED,),
    (A.FINISHED, "reject"): (A.REJECTED,),
    (A.FINISHED, "stop"): (A.CANCELLED,),
    (A.COMMITTED, "replace"): (A.SUPERSEDED,),
    (A.FAILED, "replace"): (A.SUPERSEDED,),
    (A.CANCELLED, "observe"): (A.CANCELLED,),
    (A.CANCELLED, "extend"): (A.CANCELLED,),
    (A.CANCELLED, "finish"): (A.CANCELLED,),
    (A.CANCELLED, "fail"): (A.CANCELLED,),
    (A.CANCELLED, "stopped"): (A.CANCELLED,),
    (A.ORPHANED, "observe"): (A.ORPHANED,),
    (A.ORPHANED, "extend"): (A.ORPHANED,),
    (A.ORPHANED, "finish"): (A.CANCELLED,),
    (A.ORPHANED, "fail"): (A.CANCELLED,),
    (A.ORPHANED, "stopped"): (A.CANCELLED,),
}
"""(state, what happens) -> the states that may follow."""

EFFECTS: Final[Mapping[tuple[S, str], S]] = {
    (S.STAGED, "stage"): S.STAGED,
    (S.STAGED, "authorise"): S.AUTHORISED,
    (S.STAGED, "block"): S.BLOCKED,
    (S.STAGED, "drop"): S.DROPPED,
    (S.AUTHORISED, "dispatch"): S.DISPATCHED,
    (S.AUTHORISED, "drop"): S.DROPPED,
    (S.DISPATCHED, "landed"): S.CONFIRMED,
    (S.DISPATCHED, "refused"): S.DROPPED,
    (S.DISPATCHED, "unsure"): S.UNKNOWN,
    (S.DISPATCHED, "stuck"): S.BLOCKED,
    (S.UNKNOWN, "landed"): S.CONFIRMED,
    (S.UNKNOWN, "absent"): S.DROPPED,
    (S.UNKNOWN, "undone"): S.COMPENSATED,
    (S.UNKNOWN, "unsure"): S.BLOCKED,
    (S.UNKNOWN, "stuck"): S.BLOCKED,
    (S.CONFIRMED, "unwant"): S.TO_COMPENSATE,
    (S.CONFIRMED, "block"): S.BLOCKED,
    (S.TO_COMPENSATE, "keep"): S.CONFIRMED,
    (S.TO_COMPENSATE, "undo"): S.COMPENSATING,
    (S.COMPENSATING, "undone"): S.COMPENSATED,
    (S.COMPENSATING, "unsure"): S.UNKNOWN,
    (S.COMPENSATING, "stuck"): S.BLOCKED,
    (S.BLOCKED, "keep"): S.CONFIRMED,
    (S.BLOCKED, "drop"): S.DROPPED,
    (S.BLOCKED, "landed"): S.CONFIRMED,
    (S.BLOCKED, "absent"): S.DROPPED,
    (S.BLOCKED, "undone"): S.COMPENSATED,
}
"""(state, what happens) -> the state of an effect that follows; what is blocked goes on when a person says what is so."""

_ANSWERED = (
    "revise", "revisetogether", "observe", "extend", "finish", "fail", "stopped", "reconsidered", "answered", "compensate",
    "recover",
)  # fmt: skip
RUN: Final[Mapping[tuple[str, str], str]] = {
    **{
        (state, event): state
        for state in ("open", "closing")
        for event in (*_ANSWERED, "start", "authorise", "dispatch")
    },
    **{(state, event): state for state in ("closed", "cancelled") for event in _ANSWERED},
    ("open", "cancel"): "cancelled",
    ("closing", "cancel"): "cancelled",
    ("open", "close"): "closing",
    ("closed", "reopen"): "open",
}
"""(state of the run, event) -> the state that follows; a revision of a sealed run is answered with a refusal.

``closing`` is sealed already; it turns into ``closed`` by itself when every effect that is wanted is confirmed.
"""


# bound once: looking a member up on its class costs 0.07 us in Python 3.11, more than the decisions made with it
_RUNNING, _COMPLETE = A.RUNNING, Coverage.COMPLETE


class Attempt:
    """One execution of a node, as the machine keeps it."""

    __slots__ = (
        "calls", "cells", "coverage", "dropped", "effects", "id", "mismatched", "outcome", "parents", "reads", "run",
        "snapshot", "state", "v_commit", "v_start",
    )  # fmt: skip

    def __init__(self, id_: str, run: NodeRun, v_start: int, snapshot: Execute) -> None:
        self.id = id_
        self.run = run
        self.v_start = v_start
        self.v_commit = 0
        self.snapshot: Execute | None = snapshot
        self.state = _RUNNING
        self.reads: list[Read] = []
        self.cells: list[Cell] = []
        self.coverage = _COMPLETE
        self.parents: tuple[tuple[NodeRun, str | None], ...] = ()
        self.mismatched: dict[Selector, Path] = {}
        """Reads that no longer evaluate to what was observed, with the place that changed."""
        self.dropped: Evidence | None = None
        """Set once a plan or a delta has invalidated the attempt for good."""
        self.outcome: Outcome | None = None
        self.calls: tuple[Call, ...] = ()
        self.effects: tuple[Effect, ...] = ()

    @property
    def certificate(self) -> Certificate:
        """What must still hold for this attempt."""
        parents = tuple((parent.name, attempt) for parent, attempt in self.parents)
        return Certificate(self.id, self.v_start, tuple(self.reads), parents, self.coverage)

    @property
    def valid(self) -> bool:
        """Rule R1, from the cache that the reader index keeps up to date."""
        return self.dropped is None and not self.mismatched

    @property
    def failed(self) -> bool:
        """Whether an exception is its outcome."""
        return self.outcome is not None and self.outcome.error is not None


class Record:
    """One effect on its way."""

    __slots__ = ("approved", "attempt", "effect", "landed", "order", "receipt", "state", "undo_sent", "unwanted", "why")

    def __init__(self, effect: Effect, attempt: str) -> None:
        self.effect = effect
        self.attempt = attempt
        self.state = S.STAGED
        self.approved = False
        self.order = 0
        """Number of its dispatch in the run."""
        self.landed = False
        self.unwanted = False
        """Its node wants something else: undo it once it is known to be there."""
        self.undo_sent = False
        """From here on it cannot be kept any more, whatever is wanted (R10)."""
        self.receipt: Value = None
        self.why = ""


class Outbox:
    """One slot of a node: what is out in the world, and what waits to leave."""

    __slots__ = ("epoch", "live", "node", "slot", "waiting")

    def __init__(self, node: str, slot: str) -> None:
        self.node = node
        self.slot = slot
        self.epoch = 0
        self.live: Record | None = None
        self.waiting: Record | None = None


class NodeRun:
    """A node of one run: its attempts and where it stands.

    Invariants: ``current`` is the last committed attempt (its output is the artifact's value even while invalid);
    ``attempt`` runs or waits; ``settled`` implies every parent settled; an inactive node has neither. ``n_settled``,
    ``n_present`` and ``n_undecided`` count the parents that are settled, active, and neither active nor inactive.
    """

    __slots__ = (
        "active", "attempt", "children", "conflict", "current", "failures", "key", "n_attempts", "n_present", "n_settled",
        "n_undecided", "name", "node", "parents", "place", "position", "queued", "ready", "refusals", "settled", "source",
    )  # fmt: skip

    def __init__(self, name: str, node: Node, position: tuple[int, str], key: str | None = None) -> None:
        self.name = name
        self.node = node
        self.key = key
        self.position = position
        self.place = (*position, name)
        self.parents: list[NodeRun] = []
        self.children: list[NodeRun] = []
        self.n_settled = self.n_present = self.n_undecided = 0
        self.source: tuple[NodeRun, Selector] | None = None
        self.active: bool | None = None
        """``None`` until what decides it has committed."""
        self.conflict: str | None = None
        """Why the current output cannot take its overrides."""
        self.settled = False
        self.ready = False
        self.queued = False
        self.attempt: Attempt | None = None
        self.current: Attempt | None = None
        self.n_attempts = 0
        self.failures = 0
        self.refusals = 0
        """How often a target has refused what the node decided, since anything that it read was revised."""

    @property
    def coverage(self) -> Coverage:
        """Coverage of the live attempt's read set."""
        live = self.attempt or self.current
        return live.coverage if live else _COMPLETE

    @property
    def status(self) -> str:
        """A word for people: pending, ready, running, finished, committed, dirty, skipped or failed."""
        if self.attempt:
            return str(self.attempt.state)
        if self.active is False:
            return "skipped"
        if self.current and self.current.valid:
            if self.conflict:
                return "blocked"
            error = self.current.outcome is not None and self.current.outcome.error is not None
            return "failed" if error else "committed" if self.settled else "unsettled"
        return "ready" if self.ready else "dirty" if self.current else "pending"


def conflict_of(attempt: Attempt, revision: str = "") -> Evidence:
    """Return the evidence for an attempt that is not valid."""
    if attempt.dropped is not None:
        return attempt.dropped
    selector, place = next(iter(attempt.mismatched.items()))
    return Evidence(revision, ".".join(map(str, (selector.artifact, *place))), selector)
