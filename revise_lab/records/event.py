"""Events, facts and instructions, and their JSON codec.

The machine is ``handle(event) -> instructions``. *Events* go in; *facts* are what the machine decided; both are journaled
in order, and the journal is the only source of truth: replaying the events of a journal gives its facts again.
*Instructions* are what a driver has to carry out.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from enum import StrEnum
from typing import Any, NamedTuple, TypeAlias

from revise_lab.errors import ReviseLabError

from . import attempt as _attempt
from . import condition as _condition
from . import effect as _effect
from . import revision as _revision
from . import selector as _selector
from .attempt import Call, Coverage
from .effect import Answer, Effect, EffectState, Intent
from .revision import Revision
from .selector import Delta, Read, Selector
from .value import ABSENT, Arr, Obj, Value, freeze, thaw

# --- events ----------------------------------------------------------------------------------------------------------


class Opened(NamedTuple):
    """The first entry of every journal."""

    workflow: str
    inputs: Value
    policy: str
    switches: Value
    schema: int = 1


class Revise(NamedTuple):
    """A revision arrives."""

    revision: Revision


class ReviseTogether(NamedTuple):
    """Several revisions arrive as one: planned on what they change together, so that a revert costs nothing."""

    revisions: tuple[Revision, ...]


class Start(NamedTuple):
    """The driver has a slot for a node that is ready."""

    node: str


class Observe(NamedTuple):
    """Reads that a running attempt has made since the last report."""

    attempt: str
    reads: tuple[Read, ...]
    coverage: Coverage = Coverage.COMPLETE


class Extend(NamedTuple):
    """A running attempt is about to read something that is newer than its snapshot (rule R4)."""

    attempt: str


class Finish(NamedTuple):
    """A body ended with an output; ``reads`` are those not yet reported."""

    attempt: str
    output: Value
    reads: tuple[Read, ...] = ()
    coverage: Coverage = Coverage.COMPLETE
    calls: tuple[Call, ...] = ()
    effects: tuple[Effect, ...] = ()


class Fail(NamedTuple):
    """A body ended with an exception."""

    attempt: str
    error: str
    retryable: bool = False
    reads: tuple[Read, ...] = ()
    coverage: Coverage = Coverage.COMPLETE
    calls: tuple[Call, ...] = ()


class Stopped(NamedTuple):
    """The body of an attempt that was told to stop has ended."""

    attempt: str


class Reconsidered(NamedTuple):
    """A decision was made again at the values of now, for an attempt that has committed (rule R7)."""

    attempt: str
    output: Value
    """The whole output with the decision as it comes out now; absent if it could not be made."""
    reads: tuple[Read, ...]


class Cancel(NamedTuple):
    """The run is to be cancelled."""


class Close(NamedTuple):
    """The run is to be sealed."""


class Authorise(NamedTuple):
    """Somebody who was asked allows or denies what is staged: this payload and no other."""

    node: str
    slot: str
    payload: Value
    granted: bool = True
    reason: str = ""


class Dispatch(NamedTuple):
    """The driver is free to send an effect that :meth:`Machine.sendable` names."""

    node: str
    slot: str


class Compensate(NamedTuple):
    """The driver is free to undo an effect that :meth:`Machine.undoable` names."""

    node: str
    slot: str


class Answered(NamedTuple):
    """What a target said, or that it said nothing."""

    intent: Intent
    answer: Answer
    receipt: Value = None
    reason: str = ""


class Recover(NamedTuple):
    """The process was restarted: no attempt runs any more, and no call to a target is being waited for (R13)."""


class Reopen(NamedTuple):
    """A sealed run takes revisions again; what is committed and out in the world stays."""


# --- facts -----------------------------------------------------------------------------------------------------------


class Evidence(NamedTuple):
    """Why a decision was made: the changed place and the read it meets, or the parent that carries the impact."""

    revision: str
    changed: str = ""
    selector: Selector | None = None
    via: str = ""

    def __str__(self) -> str:
        if self.selector is not None:
            return f"{self.changed} changed ({self.revision}) and it read {self.selector} as {self.selector.role}"
        return (
            f"it follows {self.via}, which {self.revision} affects" if self.via else f"{self.revision}: {self.changed}"
        )


class Accepted(NamedTuple):
    """A revision took effect at ``version``."""

    revision: str
    version: int
    deltas: tuple[Delta, ...]
    unconditional: bool


class Deferred(NamedTuple):
    """A revision is accepted and waits for the end of the turn."""

    revision: str


class Refused(NamedTuple):
    """A revision was refused; nothing changed."""

    revision: str
    error: str
    message: str
    current: int | None = None


class Duplicate(NamedTuple):
    """A revision id came again; it was applied once."""

    revision: str


class PlannedNode(NamedTuple):
    """What a plan says of one node."""

    node: str
    action: str
    evidence: Evidence | None = None
    until: tuple[str, ...] = ()


class Planned(NamedTuple):
    """The recovery plan of an accepted revision."""

    revision: str
    version: int
    scope: str
    nodes: tuple[PlannedNode, ...]
    n_active: int


class Started(NamedTuple):
    """An attempt runs on the snapshot of ``version``."""

    attempt: str
    node: str
    version: int
    parents: tuple[tuple[str, str | None], ...]
    reads: tuple[Read, ...] = ()


class Committed(NamedTuple):
    """An attempt's output is current from ``version`` on."""

    attempt: str
    version: int
    delta: Delta


class Rejected(NamedTuple):
    """A certificate did not hold."""

    attempt: str
    evidence: Evidence


class Failed(NamedTuple):
    """An exception became the outcome of an attempt; ``final`` when no retry is left."""

    attempt: str
    error: str
    final: bool


class Retracted(NamedTuple):
    """A node is no longer activated; its output is absent from ``version`` on."""

    node: str
    version: int


class Blocked(NamedTuple):
    """A node's output cannot take an override; everything below it waits for a withdrawal."""

    node: str
    message: str


class Discarded(NamedTuple):
    """The result of an attempt that had been told to stop came in after all."""

    attempt: str


class Effected(NamedTuple):
    """An effect is in another state."""

    intent: Intent
    state: EffectState
    attempt: str = ""
    effect: Effect | None = None
    why: str = ""


class Receipt(NamedTuple):
    """The confirmation of an effect that another node reads is ``value`` from ``version`` on."""

    artifact: str
    version: int
    value: Value


class Closed(NamedTuple):
    """The run is sealed."""

    version: int
    late_invalid: int


class Stop(NamedTuple):
    """Instruction: stop an attempt (a sync body is fenced instead)."""

    attempt: str
    reason: str
    orphaned: bool = False


class Execute(NamedTuple):
    """Instruction: run a node's body on a snapshot; journaled as :class:`Started`."""

    attempt: str
    node: str
    key: str | None
    version: int
    inputs: Mapping[str, Value]
    parents: Mapping[str, Value]

    def value(self, artifact: str) -> Value:
        """Return an artifact of the snapshot."""
        return self.parents[artifact] if artifact in self.parents else self.inputs.get(artifact, ABSENT)


class Reconsider(NamedTuple):
    """Instruction: make the decision of a node again, on its output and a new snapshot, and report at once."""

    order: Execute
    output: Value


class Moved(NamedTuple):
    """Instruction and fact: the attempt goes on, on the snapshot of ``version``."""

    attempt: str
    version: int


class Act(NamedTuple):
    """Instruction: have a target ``publish`` an effect, ``find`` it or ``undo`` it, and report with :class:`Answered`."""

    what: str
    intent: Intent
    effect: Effect
    receipt: Value = None


class Ask(NamedTuple):
    """Instruction: ask whether a staged effect may leave, and report with :class:`Authorise`."""

    intent: Intent
    effect: Effect


Event: TypeAlias = (
    Revise | ReviseTogether | Start | Observe | Extend | Finish | Fail | Stopped | Reconsidered | Cancel | Close
    | Authorise | Dispatch | Compensate | Answered | Recover | Reopen
)  # fmt: skip
Fact: TypeAlias = (
    Accepted | Deferred | Refused | Duplicate | Planned | Started | Committed | Rejected | Failed | Retracted
    | Discarded | Blocked | Closed | Stop | Moved | Effected | Receipt
)  # fmt: skip
Instruction: TypeAlias = (
    Execute | Reconsider | Moved | Stop | Accepted | Deferred | Refused | Duplicate | Closed | Act | Ask
)  # fmt: skip
Entry: TypeAlias = Opened | Event | Fact

_DURABLE = frozenset({EffectState.DISPATCHED, EffectState.COMPENSATING, EffectState.CONFIRMED})


def is_durable(entry: Entry) -> bool:
    """Say whether an entry must be on disk before anybody is told, or anything leaves, because of it.

    ``compensating`` is one of them: were it lost with the power, the effect could be kept for an equal payload although
    the call that undoes it has left.
    """
    return isinstance(entry, Accepted | Deferred | Closed) or (isinstance(entry, Effected) and entry.state in _DURABLE)


# --- codec -----------------------------------------------------------------------------------------------------------

_TYPES: dict[str, Any] = {
    kind.__name__: kind
    for home in (vars(), vars(_attempt), vars(_condition), vars(_effect), vars(_revision), vars(_selector))
    for kind in list(home.values())
    if isinstance(kind, type) and kind.__module__.startswith("revise_lab.records") and issubclass(kind, tuple | StrEnum)
}
_PLAIN = frozenset({str, int, float, bool, type(None)})


def to_json(entry: tuple[Any, ...]) -> str:
    """Return one line of JSON for a journal entry, or for another tuple of records and values."""
    return json.dumps(_encode(entry), separators=(",", ":"), ensure_ascii=False)


def from_json(line: str) -> Any:
    """Return the entry, or the other tuple, of a line of JSON.

    Raises
    ------
    ReviseLabError
        The line names a type that this version does not know.
    """
    return _decode(json.loads(line))


def _encode(item: Any) -> Any:
    kind = type(item)
    if kind in _PLAIN:
        return item
    if item is ABSENT:
        return ["absent"]
    if kind in (Obj, Arr):
        return ["value", thaw(item)]
    if issubclass(kind, StrEnum):
        return [kind.__name__, str(item)]
    if issubclass(kind, tuple):
        name = kind.__name__ if kind.__name__ in _TYPES else "tuple"
        return [name, *[_encode(part) for part in item]]
    return item


def _decode(item: Any) -> Any:
    if not isinstance(item, list):
        return item
    name, *parts = item
    if name == "absent":
        return ABSENT
    if name == "value":
        return freeze(parts[0])
    if name == "tuple":
        return tuple(_decode(part) for part in parts)
    kind = _TYPES.get(name)
    if kind is None:
        raise ReviseLabError(f"journal entry of unknown type {name!r} - it was written by another version")
    return kind(*(_decode(part) for part in parts))
