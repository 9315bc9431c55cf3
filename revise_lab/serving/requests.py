"""Requests to a replica, what becomes of them, and who is served next."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import NamedTuple

from .prefix import Key

OUTPUT_WEIGHT = 2.0
"""What an output token counts against a prompt token in the fair scheduler (arXiv:2401.00588)."""


class Request(NamedTuple):
    """What a client asks: lengths instead of words.

    ``prefix`` names the segments at the start of the prompt as (key, tokens); a key stands for everything up to its end.
    """

    id: Hashable
    prompt_tokens: int
    output_tokens: int
    tenant: str = ""
    prefix: tuple[tuple[str, int], ...] = ()


@dataclass(slots=True, eq=False)
class Served:
    """A request and what became of it."""

    request: Request
    submitted_s: float
    order: int
    state: str = "queued"
    """``queued``, ``prefill``, ``running``, ``finished`` or ``aborted``."""
    first_s: float | None = None
    left_s: float | None = None
    """When its client left."""
    ended_s: float | None = None
    cached_tokens: int = 0
    computed_tokens: int = 0
    """Prefilled, after a retraction again."""
    decoded_tokens: int = 0
    n_retractions: int = 0
    todo: int = 0
    joined_step: int = 0
    finish_step: int = 0
    private_tokens: int = 0
    held: list[Key] = field(default_factory=list)

    @property
    def chain(self) -> list[tuple[Key, int]]:
        """The segments at the start of the prompt."""
        return [((self.request.tenant, key), size) for key, size in self.request.prefix]

    @property
    def left_tokens(self) -> int:
        """Output tokens still to come."""
        return self.request.output_tokens - self.decoded_tokens


class Event(NamedTuple):
    """What happened at the end of a step: ``first`` (token), ``finished``, ``aborted`` (room is free) or ``retracted``."""

    at_s: float
    kind: str
    served: Served

    @property
    def is_end(self) -> bool:
        """Whether the request is over."""
        return self.kind in ("finished", "aborted")


class Load(NamedTuple):
    """How full a replica is."""

    n_queued: int
    n_running: int
    used_tokens: int
    idle_tokens: int


class Fcfs:
    """First come, first served; who was retracted goes first."""

    def __init__(self) -> None:
        self._queue: deque[Served] = deque()

    def __len__(self) -> int:
        return len(self._queue)

    def push(self, served: Served, *, first: bool = False) -> None:
        """Queue a request."""
        (self._queue.appendleft if first else self._queue.append)(served)

    def peek(self) -> Served:
        """Return who is next."""
        return self._queue[0]

    def remove(self, served: Served) -> None:
        """Take a request out."""
        if self._queue[0] is served:
            self._queue.popleft()
        else:
            self._queue.remove(served)

    def charge(self, tenant: str, tokens: float) -> None:
        """Count service; it makes no difference here."""


class Fair:
    """Virtual token counter (arXiv:2401.00588): the tenant that was served least goes first.

    Lengths are known here, so a request is charged when it is admitted and what it did not use is returned. A tenant
    that comes back is lifted to the least counter in the queue: nobody saves up service by staying away.
    """

    def __init__(self) -> None:
        self._queues: dict[str, deque[Served]] = {}
        self._counters: dict[str, float] = {}
        self._last = ""
        self._n = 0

    def __len__(self) -> int:
        return self._n

    def push(self, served: Served, *, first: bool = False) -> None:
        """Queue a request."""
        self._n += 1
        tenant = served.request.tenant
        if tenant not in self._queues:
            floor = min(map(self._count, self._queues), default=self._count(self._last))
            self._counters[tenant] = max(self._count(tenant), floor)
            self._queues[tenant] = deque()
        (self._queues[tenant].appendleft if first else self._queues[tenant].append)(served)

    def peek(self) -> Served:
        """Return who is next."""
        return self._queues[min(self._queues, key=lambda each: (self._count(each), self._queues[each][0].order))][0]

    def remove(self, served: Served) -> None:
        """Take a request out."""
        self._n -= 1
        self._last = served.request.tenant
        self._queues[self._last].remove(served)
        if not self._queues[self._last]:
            del self._queues[self._last]

    def charge(self, tenant: str, tokens: float) -> None:
        """Count service."""
        self._counters[tenant] = self._count(tenant) + tokens

    def _count(self, tenant: str) -> float:
        return self._counters.get(tenant, 0.0)


SCHEDULERS: dict[str, type[Fcfs] | type[Fair]] = {"fcfs": Fcfs, "fair": Fair}
