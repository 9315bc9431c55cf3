"""The recorder: what one attempt has read, in the order in which it read it.

Views report here and nowhere else. The role of a read lives in the execution context, so a control block in one task or
thread never relabels what another one reads: a read that nobody claimed as control is data, the stricter of the two.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Final, TypeAlias

from revise_lab.errors import UntrackableRead
from revise_lab.records.attempt import Coverage
from revise_lab.records.selector import Marker, Path, Role, Selector
from revise_lab.records.value import Value

Fetch: TypeAlias = Callable[[str], Value]
"""Gives the frozen value of an artifact on the attempt's current snapshot."""


CONTROL: Final[ContextVar[Recorder | None]] = ContextVar("control", default=None)
"""The recorder whose reads are control reads in this context."""


# bound once: looking a member up on its class costs 0.07 us in Python 3.11, more than the decisions made with it
_DATA, _CONTROL = Role.DATA, Role.CONTROL


class Recorder:
    """The read set of one attempt, filled by its views.

    Attributes
    ----------
    reads : dict of Selector to Value
        What was observed through each selector, in order of first read; the first observation stays.
    coverage : Coverage
        Whether ``reads`` is all there is.
    degraded : list of str
        Why it is not.
    epoch : int
        Raised by the driver whenever it moves the attempt to another snapshot (rule R4); views then look again.
    on_read : callable or None
        Called with a selector and what it shows *before* it is first recorded. It may raise, which stops the read, or
        move the snapshot (and raise ``epoch``), which makes the view look again: a late read is then of the new cut.
        Two threads that first read one selector at once may both call it.
    """

    __slots__ = ("_fetch", "_sweep", "coverage", "degraded", "epoch", "on_read", "reads")

    def __init__(self, on_read: Callable[[Selector, Value], None] | None = None) -> None:
        self.reads: dict[Selector, Value] = {}
        self.coverage = Coverage.COMPLETE
        self.degraded: list[str] = []
        self.epoch = 0
        self.on_read = on_read
        self._fetch: Fetch | None = None
        self._sweep: Callable[[], object] | None = None

    def attach(self, fetch: Fetch, sweep: Callable[[], object]) -> None:
        """Tell the recorder where values come from and how to read all that is visible."""
        self._fetch, self._sweep = fetch, sweep
        if self.coverage is Coverage.UNKNOWN:
            sweep()

    def fetch(self, artifact: str) -> Value:
        """Return an artifact's value on the current snapshot, recording nothing."""
        assert self._fetch is not None, "a recorder is attached by the StateView that is built on it"
        return self._fetch(artifact)

    @property
    def role(self) -> Role:
        """The role that a read has here and now."""
        return _CONTROL if CONTROL.get() is self else _DATA

    @contextmanager
    def control(self) -> Iterator[None]:
        """Make the reads inside the block control reads, in this thread or task."""
        token = CONTROL.set(self)
        try:
            yield
        finally:
            CONTROL.reset(token)

    def record(self, artifact: str, path: Path, marker: Marker, observed: Value, role: Role | None = None) -> bool:
        """Record one read, once.

        Returns
        -------
        bool
            False when the snapshot was moved under the read: look again and record what is there now.
        """
        if role is None:
            role = _CONTROL if CONTROL.get() is self else _DATA
        selector: Selector = tuple.__new__(Selector, (artifact, path, marker, role))  # three times as fast
        if selector not in self.reads:
            if self.on_read is not None:
                epoch = self.epoch
                self.on_read(selector, observed)
                if self.epoch != epoch:
                    return False
            self.reads.setdefault(selector, observed)
        return True

    def degrade(self, reason: str) -> None:
        """Give up completeness: from here on the attempt has read everything it can see (rule R5).

        Raises
        ------
        UntrackableRead
            The snapshot has been moved before, so what the unseen read saw can no longer be recorded.
        """
        self.coverage = Coverage.UNKNOWN
        self.degraded.append(reason)
        if self.epoch:
            raise UntrackableRead(
                f"a read went unseen ({reason}) after the snapshot had moved, so what it saw is lost - the attempt must"
                " not commit - run it again on thawed values",
                reason=reason,
                epoch=self.epoch,
            )
        if self._sweep is not None:
            self._sweep()
