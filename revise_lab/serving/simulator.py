"""Requests in virtual time, without workflows: a trace goes in, what happened comes out.

The same trace gives the same events through any shell around the engine.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable

from .engine import Cluster, Engine
from .requests import Event, Request


def play(
    server: Cluster | Engine,
    requests: Iterable[tuple[float, Request]],
    aborts: Iterable[tuple[float, Hashable]] = (),
    after_each: Callable[[], None] = lambda: None,
) -> list[Event]:
    """Feed a trace of requests and departing clients to a server and return every event until it is idle.

    Parameters
    ----------
    server : Cluster or Engine
        What serves.
    requests, aborts : iterable of (float, ...)
        Arrival in seconds and request; departure in seconds and id.
    after_each : callable
        Called after every move.
    """
    moves = sorted(
        [*((at_s, 0, request) for at_s, request in requests), *((at_s, 1, id) for at_s, id in aborts)],
        key=lambda move: move[:2],
    )
    events: list[Event] = []
    for at_s, kind, what in [*moves, (math.inf, 2, None)]:
        while server.next_event_time() < at_s:
            events += server.advance(server.next_event_time())
            after_each()
        if kind == 0 and isinstance(what, Request):
            server.submit(at_s, what)
        elif kind == 1:
            server.abort(at_s, what)
        after_each()
    return events
