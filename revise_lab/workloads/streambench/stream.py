"""The stream: one channel for what the agent does and what the user says, and the two states kept apart.

Thoughts, acts, observations and injections are events on one channel (arXiv:2604.23283, section 3). A user may inject at
any time; whoever runs the agent looks for injections after every event. What the agent knows (:class:`Epistemic`) can
always be cut back; what it has done to the world cannot.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Final, NamedTuple

from revise_lab.records.effect import Reversibility

Listener = Callable[["Event"], object]
_HARD: Final = (Reversibility.COMPENSABLE, Reversibility.IRREVERSIBLE)


class Kind(StrEnum):
    """The four kinds of events."""

    ACT = "act"
    THOUGHT = "thought"
    OBSERVATION = "observation"
    INJECTION = "injection"


class RevisionType(StrEnum):
    """The three core types of section 4.2 and the two practical ones."""

    ADDITIVE = "additive"
    RESTRICTIVE = "restrictive"
    SUBSTITUTIVE = "substitutive"
    CANCELLATION = "cancellation"
    PRIORITY_SHIFT = "priority_shift"


class Event(NamedTuple):
    """One event; ``n`` is its place in the stream, which is all the time there is."""

    n: int
    kind: Kind
    what: str
    content: Any


class Injection(NamedTuple):
    """A revision of the task by its user.

    Attributes
    ----------
    type : RevisionType
        Its type.
    text : str
        What the user says.
    changes : mapping
        Clause of the specification to its new value.
    """

    type: RevisionType
    text: str
    changes: Mapping[str, Any]


class Channel:
    """The channel between a user and an agent; neither waits for the other.

    Parameters
    ----------
    *listeners : callable
        Called with every event, in order. A listener may inject; it must not raise.
    """

    def __init__(self, *listeners: Listener) -> None:
        self.events: list[Event] = []
        self._listeners = listeners
        self._pending: deque[Injection] = deque()  # appending and popping are atomic: another thread may inject

    def publish(self, kind: Kind, what: str, content: Any = None) -> None:
        """Put an event on the channel."""
        event = Event(len(self.events), kind, what, content)
        self.events.append(event)
        for listener in self._listeners:
            listener(event)

    def inject(self, injection: Injection) -> None:
        """Accept a revision at once, from any thread; it becomes an event when the agent's side looks."""
        self._pending.append(injection)

    def take(self) -> Injection | None:
        """Return the oldest injection that nobody has looked at yet, as an event of the stream."""
        if not self._pending:
            return None
        injection = self._pending.popleft()
        self.publish(Kind.INJECTION, injection.type, injection.text)
        return injection


class Read(NamedTuple):
    """What a step was derived from: a clause (``source`` is empty) or a field of the result of another step."""

    source: str
    field: str
    value: Any


@dataclass(slots=True, eq=False)
class Turn:
    """One step as the agent remembers it: the act, its result, and what its arguments were derived from.

    ``clauses`` are the clauses that it reads itself or through results, each with the value seen. ``entry`` is the number
    of its effect in the world, None if it has none; ``early`` says that it came before the injection.
    """

    step: str
    cls: Reversibility
    args: Mapping[str, Any]
    result: Mapping[str, Any]
    reads: tuple[Read, ...]
    clauses: Mapping[str, Any]
    entry: int | None
    early: bool = False
    n_chars: int = 0

    @property
    def hard(self) -> bool:
        """Whether it is compensable or irreversible, so that it constrains what can still be reached."""
        return self.cls in _HARD


@dataclass(slots=True)
class Epistemic:
    """What the agent knows: the specification and its memory of the steps, oldest first.

    ``told_after`` is the number of remembered turns at which the injection was read, None before there is one.
    """

    spec: dict[str, Any]
    turns: list[Turn] = field(default_factory=list)
    told: Injection | None = None
    told_after: int | None = None

    def by_step(self) -> dict[str, Turn]:
        """Return the latest turn of each step."""
        return {turn.step: turn for turn in self.turns}


class Decision(NamedTuple):
    """The decision triple: what is kept in memory, what is undone in the world (in this order), and the text to go on with.

    ``kept`` are places in the memory. The published methods keep a prefix, whose length is k*.
    """

    kept: tuple[int, ...]
    undo: tuple[Turn, ...]
    spec: Mapping[str, Any]

    @classmethod
    def cut(cls, turns: Sequence[Turn], k: int, spec: Mapping[str, Any]) -> Decision:
        """Keep the first ``k`` turns and undo the effects of the others, last first."""
        return cls(tuple(range(k)), tuple(turn for turn in reversed(turns[k:]) if turn.entry is not None), spec)


def reversibility_ratio(classes: Sequence[Reversibility]) -> float:
    """Return the share of inert and reversible tools (Definition 4)."""
    return sum(cls not in _HARD for cls in classes) / len(classes)


def compatible(turn: Turn, spec: Mapping[str, Any]) -> bool:
    """Say whether a turn remains valid under a specification: no clause that it is derived from has another value now."""
    return all(spec[clause] == seen for clause, seen in turn.clauses.items())


def adaptation_cost(turns: Sequence[Turn], k: int) -> tuple[int, int, int]:
    """Return what it costs to go back to before turn ``k``.

    Returns
    -------
    tuple of int
        Irreversible acts abandoned, which no call can make good; calls that undo an effect; acts abandoned. A unit each is
        our choice: the paper has none.
    """
    tail = turns[k:]
    stuck = sum(turn.cls is Reversibility.IRREVERSIBLE for turn in tail)
    return stuck, sum(turn.entry is not None for turn in tail) - stuck, len(tail)


def earliest_conflict(turns: Sequence[Turn], check: Callable[[Turn], bool]) -> int:
    """Return k* of the earliest-conflict rule: the place of the first hard turn that fails the check, or the length."""
    return next((at for at, turn in enumerate(turns) if turn.hard and not check(turn)), len(turns))


def best_rollback(turns: Sequence[Turn], spec: Mapping[str, Any]) -> int:
    """Return the feasible rollback point of least cost, found by trying every one (theorem 3).

    A point is feasible if every hard turn before it is compatible. Abandoned irreversible acts weigh more than anything.
    """

    def cost(k: int) -> tuple[int, int]:
        stuck, *finite = adaptation_cost(turns, k)
        return stuck, sum(finite)

    feasible = [k for k in range(len(turns) + 1) if all(compatible(t, spec) for t in turns[:k] if t.hard)]
    return min(feasible, key=cost)


def stale_turns(turns: Sequence[Turn], spec: Mapping[str, Any]) -> list[Turn]:
    """Return the remembered turns that were derived from something which no longer holds.

    A clause no longer holds if its value differs; a field of a result, if the step that gave it is gone, is stale itself,
    or now gives something else. Only the latest turn of a step is remembered as that step.
    """
    latest = {turn.step: turn for turn in turns}
    stale: dict[str, bool] = {}

    def is_stale(turn: Turn) -> bool:
        if turn.step not in stale:
            stale[turn.step] = any(map(moved, turn.reads))
        return stale[turn.step]

    def moved(read: Read) -> bool:
        if not read.source:
            return bool(spec[read.field] != read.value)
        source = latest.get(read.source)
        if source is None:
            return read.value is not None
        return bool(source.result.get(read.field) != read.value) or is_stale(source)

    return [turn for turn in turns if latest[turn.step] is turn and is_stale(turn)]
