"""Scenarios: small workflows with revisions and the outcome that they require, as data.

A scenario says what may happen, never when: the explorer tries every order. What must come out is declared beside it,
before it runs. Reads are written as text: ``r.d.x`` is the value there (``None`` where there is none, and everything below
for a container), ``r.d #members`` its keys, ``r.d #len`` its size, ``r.d #has:x`` whether it has a member, ``r.d #kind``
what kind of value it is, and ``r.d #write`` what happens to somebody who tries to write there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Final, NamedTuple

from revise_lab.records.revision import Change, Op, Revision
from revise_lab.records.selector import Path, parse_path

FAILED: Final = "FAILED"
"""Stands in a required outcome for a node whose retries are exhausted or whose override conflicts."""


@dataclass(frozen=True, eq=False)
class Step:
    """A node of a scenario: the reads that it makes one by one, and its output as a function of what they showed.

    Attributes
    ----------
    reads : sequence of str, or callable
        The reads in order; a callable gets what has been seen and returns the next read, or ``None``.
    out : callable
        Pure; gets what was seen. An exception that it raises is the outcome of the attempt.
    after, when, needs, retries, unknown
        As in :meth:`revise_lab.records.workflow.Workflow.node`.
    branch : (sequence of str, callable), optional
        Control reads made after the body, and the lane as a function of the output and of what they showed.
    member_of : (str, str), optional
        Spawner and the field of its output that holds the entries; ``*`` in a read stands for the member's key.
    may_read : sequence of str
        For a callable ``reads``: all that it can ask for.
    sync : bool
        The body cannot be stopped and makes all its reads in one step, reported when it ends.
    silent : bool
        Reads are reported when the attempt ends, not as they are made.
    deaf : bool
        The body ignores a stop and reports a result later.
    effects : callable, optional
        Pure; gets what was seen and returns what is staged: (slot, payload, class) or (slot, payload, class, consent).
    """

    name: str
    reads: Sequence[str] | Callable[..., str | None] = ()
    out: Callable[..., Any] = lambda *seen: {"o": "".join(map(str, seen))}
    after: tuple[str, ...] = ()
    when: tuple[str, str] | None = None
    needs: str = "any"
    branch: tuple[Sequence[str], Callable[..., Any]] | None = None
    member_of: tuple[str, str] | None = None
    may_read: Sequence[str] = ()
    unknown: frozenset[str] = frozenset()
    retries: int = 0
    sync: bool = False
    silent: bool = False
    deaf: bool = False
    effects: Callable[..., Sequence[tuple[Any, ...]]] | None = None

    def next_read(self, seen: Sequence[Any]) -> str | None:
        """Return the next read of the body, or ``None`` at its end."""
        if callable(self.reads):
            return self.reads(*seen)
        return self.reads[len(seen)] if len(seen) < len(self.reads) else None

    def left(self, seen: Sequence[Any]) -> Sequence[str]:
        """Return every read that the body and its branch may still make."""
        own = self.may_read if callable(self.reads) else self.reads[len(seen) :]
        return (*own, *(self.branch[0] if self.branch else ()))


class Required(NamedTuple):
    """What must come out of every schedule.

    Attributes
    ----------
    finals : tuple of mapping
        Each sealed or failed run ends in one of these outputs, and each of them occurs.
    counts : mapping
        Mode to events with the least and greatest number of times that they happen in a complete schedule, such as
        ``{"revise_plus": {"start A": (1, 2)}}``. A mode names policies and switch values (``extension`` for it being on)
        that must all be so; alternatives are separated by commas; ``""`` is every mode.
    races : tuple of (str, str) or (str, str, str)
        Events of which either can come first, with the mode in which this is so unless it is every mode.
    blocked : tuple of str
        Effects, as ``node/slot``, with which a run may end blocked.
    """

    finals: tuple[Mapping[str, Any], ...]
    counts: Mapping[str, Mapping[str, tuple[int, int]]] = {}
    races: tuple[tuple[str, str] | tuple[str, str, str], ...] = ()
    blocked: tuple[str, ...] = ()

    def counts_in(self, modes: frozenset[str]) -> dict[str, tuple[int, int]]:
        """Return the counts that are required in these modes."""
        found: dict[str, tuple[int, int]] = {}
        for mode, counts in self.counts.items():
            found.update(counts if _is(mode, modes) else {})
        return found

    def races_in(self, modes: frozenset[str]) -> list[tuple[str, str]]:
        """Return the races that are there in these modes."""
        return [(first, second) for first, second, *mode in self.races if _is("".join(mode), modes)]


def _is(mode: str, modes: frozenset[str]) -> bool:
    return any(modes.issuperset(words.split()) for words in mode.split(","))


@dataclass(frozen=True, eq=False)
class Scenario:
    """A workflow, what happens to it, and what is required.

    Attributes
    ----------
    story : str
        The ordering or history that it stands for.
    revisions : tuple
        Revisions in the order of their arrival; a tuple among them arrives together.
    holds : tuple of (str, str)
        Pairs of moves: the second is not made before the first.
    any_order : bool
        The revisions arrive in any order.
    cancel : bool
        The run may be cancelled at any time.
    early_close : bool
        The run may be sealed before all revisions have arrived.
    n_slots : int, optional
        How many attempts may run at once.
    liveness : bool
        It shows that something good happens; no mutant need die by it.
    crashes : tuple of str
        ``kill`` or ``power``: how often, and how, the process may die; power takes with it what was not yet durable.
    faults : tuple of (str, str)
        (``node/slot``, answer) that a target may give instead of the good one, each once: ``refused``, ``unsure`` (the
        call is lost on its way there or back), ``stuck`` (it cannot be undone), ``silent`` (neither asking helps),
        ``denied`` (whoever is asked says no).
    switches : mapping
        Switches of every policy that it is explored under.
    """

    name: str
    story: str
    steps: tuple[Step, ...]
    inputs: Mapping[str, Any]
    revisions: tuple[Revision | tuple[Revision, ...], ...]
    required: Required
    holds: tuple[tuple[str, str], ...] = ()
    any_order: bool = False
    cancel: bool = False
    early_close: bool = False
    n_slots: int | None = None
    liveness: bool = False
    crashes: tuple[str, ...] = ()
    faults: tuple[tuple[str, str], ...] = ()
    switches: Mapping[str, str] = field(default_factory=dict)

    @property
    def has_effects(self) -> bool:
        """Whether some step stages an effect."""
        return any(step.effects for step in self.steps)

    def arrivals(self) -> dict[str, tuple[Revision, ...]]:
        """Return what arrives by the move that it is; a revision that comes again is marked with a prime."""
        found: dict[str, tuple[Revision, ...]] = {}
        for each in self.revisions:
            group = (each,) if isinstance(each, Revision) else each
            move = "rev " + "+".join(revision.id for revision in group)
            while move in found:
                move += "'"
            found[move] = group
        return found


def rev(name: str, *changes: tuple[str | Path, Any] | tuple[str | Path, Any, str], base: int | None = None) -> Revision:
    """Return a revision of (path, value) pairs; a third item names the operation."""
    made = []
    for path, value, *op in changes:
        artifact, place = parse_path(path)
        made.append(Change(artifact, Op(op[0] if op else "set"), place, value, base))
    return Revision(name, tuple(made))


@cache
def parse_read(text: str) -> tuple[str, tuple[str | int, ...], str]:
    """Split a read into artifact, path and what about it is read."""
    place, _, what = text.partition(" #")
    return *parse_path(place), what
