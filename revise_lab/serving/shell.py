"""The engine in real time: the second shell around the same pure machine, next to ``simulator.play``.

A timer sleeps until the engine's next event; a request or a departing client that comes before is stamped with the time
of the clock. Events strictly before that time go first, as in ``play``, so that one trace has one order in both shells.
Nothing is computed for tokens in between: who waits for tokens asks the engine when they are due and sleeps.
"""

from __future__ import annotations

import asyncio
import math
from bisect import bisect_left
from collections.abc import Callable, Hashable
from contextlib import suppress
from typing import Protocol

from .engine import Cluster, Engine
from .requests import Event, Request, Served

GRAIN_S = 0.00025
"""Real seconds to which the time of a token is found."""


class Handle(Protocol):
    """A timer that was set."""

    def cancel(self) -> None:
        """Call it off."""


class Clock(Protocol):
    """What the shell needs of an event loop."""

    def time(self) -> float:
        """Return the time in seconds."""

    def call_at(self, when: float, callback: Callable[[], object]) -> Handle:
        """Call back at a time."""


class Shell:
    """A cluster that runs by a clock.

    Parameters
    ----------
    cluster : Cluster
        What serves; idle, with no events behind it.
    clock : Clock
        An event loop, or another thing that keeps time.
    time_scale : float
        Real seconds for each emulated second.
    on_event : callable
        Called with every event, in order.

    Attributes
    ----------
    late_s : float
        By how many real seconds an event was handled too late, at worst; the emulation is out of step by that much.
    """

    def __init__(
        self,
        cluster: Cluster,
        clock: Clock,
        *,
        time_scale: float = 1.0,
        on_event: Callable[[Event], None] = lambda event: None,
    ) -> None:
        self.cluster, self.clock, self.time_scale = cluster, clock, time_scale
        self.late_s = 0.0
        self._on_event = on_event
        self._origin_s = clock.time()
        self._reached_s = 0.0
        self._timer: Handle | None = None
        self._armed_s = math.inf
        self._waiters: dict[Hashable, tuple[Engine, asyncio.Event]] = {}

    def now_s(self) -> float:
        """Return the emulated time; it never runs back."""
        self._reached_s = max(self._reached_s, (self.clock.time() - self._origin_s) / self.time_scale)
        return self._reached_s

    def submit(self, request: Request) -> Served:
        """Hand a request to the cluster now.

        Raises
        ------
        EndpointError
            It can never fit.
        """
        now_s = self._catch_up()
        served = self.cluster.submit(now_s, request)
        home = next(engine for engine in self.cluster.engines if request.id in engine.live)
        self._waiters[request.id] = home, asyncio.Event()
        self._arm()
        return served

    def abort(self, id: Hashable) -> bool:
        """Note that a client has left now; ``False`` if its request has ended."""
        left = self.cluster.abort(self._catch_up(), id)
        self._arm()
        return left

    def count(self, served: Served) -> int:
        """Return how many output tokens of a request exist now; the last one exists once the engine has ended it."""
        if served.request.id not in self._waiters:
            return served.decoded_tokens
        engine, _ = self._waiters[served.request.id]
        return min(engine.tokens_at(served.request.id, self.now_s()), served.request.output_tokens - 1)

    async def tokens(self, served: Served, at_least: int) -> int:
        """Wait until so many output tokens exist, or the request has ended, and return how many there are."""
        while (have := self.count(served)) < at_least and (waiter := self._waiters.get(served.request.id)):
            engine, changed = waiter
            changed.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout_at(self._due(engine, served, at_least)):
                    await changed.wait()
        return have

    def close(self) -> None:
        """Stop the timer."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer, self._armed_s = None, math.inf

    def _due(self, engine: Engine, served: Served, at_least: int) -> float | None:
        """Return when, by the clock, tokens are there or it is time to ask again; ``None`` if an event will tell."""
        if served.first_s is None:
            return None
        now_s, grain_s = self.now_s(), GRAIN_S / self.time_scale
        n = math.ceil(max(0.0, engine.next_event_time() - now_s) / grain_s)
        i = bisect_left(range(n), at_least, key=lambda i: engine.tokens_at(served.request.id, now_s + i * grain_s))
        return self._origin_s + (now_s + (i + 1) * grain_s) * self.time_scale

    def _catch_up(self) -> float:
        """Handle all events before now, and return it."""
        now_s = self.now_s()
        while self.cluster.next_event_time() < now_s:
            self._advance(self.cluster.next_event_time())
        return now_s

    def _tick(self) -> None:
        self._reached_s = max(self._reached_s, self._armed_s)
        self._armed_s = math.inf
        self._catch_up()
        while self.cluster.next_event_time() <= self._reached_s:
            self._advance(self._reached_s)
        self._arm()

    def _advance(self, to_s: float) -> None:
        self.late_s = max(self.late_s, self.clock.time() - self._real(self.cluster.next_event_time()))
        for event in self.cluster.advance(to_s):
            id = event.served.request.id
            self._waiters[id][1].set()
            if event.is_end:
                del self._waiters[id]
            self._on_event(event)

    def _arm(self) -> None:
        next_s = self.cluster.next_event_time()
        if next_s == self._armed_s:
            return
        self.close()
        if next_s < math.inf:
            self._armed_s = next_s
            # a hair later, so that what arrives at the very same time is there first
            self._timer = self.clock.call_at(math.nextafter(self._real(next_s), math.inf), self._tick)

    def _real(self, at_s: float) -> float:
        return self._origin_s + at_s * self.time_scale
