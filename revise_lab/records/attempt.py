"""Attempts: one execution of a node on one snapshot, and what it leaves behind."""

from __future__ import annotations

from enum import StrEnum
from typing import Any, NamedTuple

from .selector import Read, Selector
from .value import Value


class Coverage(StrEnum):
    """How much of what an attempt read is known."""

    COMPLETE = "complete"
    COARSE = "coarse"
    """The artifact is known, the path in it is not."""
    UNKNOWN = "unknown"


class AttemptState(StrEnum):
    """Where an attempt stands; the machine's table says how it gets there."""

    RUNNING = "running"
    FINISHED = "finished"
    """Its body has ended; it waits for its parents and holds no worker slot."""
    COMMITTED = "committed"
    FAILED = "failed"
    CANCELLED = "cancelled"
    ORPHANED = "orphaned"
    """A body that cannot be stopped: fenced, its result discarded, its cost waste."""
    REJECTED = "rejected"
    SUPERSEDED = "superseded"
    """Once committed, since replaced, retracted or dropped."""


class Call(NamedTuple):
    """A boundary call: what was asked of the world and what it answered.

    The key is (node, code version, kind, canonical request, occurrence within the attempt); the node's name carries the
    member key. ``response`` is what the choice function w remembers (see :mod:`revise_lab.core.oracle`).
    """

    node: str
    code_version: str
    kind: str
    request: Value
    occurrence: int
    response: Value

    @property
    def key(self) -> tuple[Any, ...]:
        """The argument of the choice function."""
        return self[:5]


class Outcome(NamedTuple):
    """What a body ended with: an output, or an exception, which is an outcome with a certificate like any other."""

    output: Value
    error: str | None = None
    retryable: bool = False


class Certificate(NamedTuple):
    """What must still hold for an attempt to commit (arXiv:2609.00643 Eq. 2)."""

    attempt: str
    v_start: int
    reads: tuple[Read, ...]
    parents: tuple[tuple[str, str | None], ...]
    coverage: Coverage

    @property
    def selectors(self) -> tuple[Selector, ...]:
        """The selectors of the read set, in the order of first read."""
        return tuple(read.selector for read in self.reads)
