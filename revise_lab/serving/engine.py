"""A serving replica as a pure state machine: continuous batching, a step at a time, in whatever time its driver keeps.

``submit``, ``abort``, ``next_event_time`` and ``advance`` are all there is: no clock, no randomness, no IO. At the end of
each step aborts that are due take effect, requests are admitted, and the next step is planned: prefill first (the
default, as SGLang does), or prefill chunks mixed with decoding (``chunk_tokens``). Decoding steps in which nothing else
can happen are taken in one jump; as the cost of a step is linear in the contexts, which grow by one token a sequence, the
time of a jump is exact. A request that arrives, or an abort that falls due, cuts the jump at the next end of a step.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Hashable, Iterator
from hashlib import blake2b
from typing import Any

from revise_lab.errors import EndpointError

from .cost import Profile, context_s, step_s
from .prefix import KvMemory
from .requests import OUTPUT_WEIGHT, SCHEDULERS, Event, Fair, Fcfs, Load, Request, Served


class Engine:
    """One replica.

    Parameters
    ----------
    profile : Profile
        What steps cost and what fits.
    scheduler : str
        ``fcfs`` or ``fair``.
    chunk_tokens : int, optional
        Prefill in chunks of at most so many tokens a step, mixed with decoding; by default whole prompts, in steps of
        their own that go before decoding.
    prefix_cache : bool
        Keep prompts for later requests of the same tenant.

    Attributes
    ----------
    busy_s, n_steps, computed_tokens, cached_tokens, decoded_tokens
        Totals.
    """

    def __init__(
        self,
        profile: Profile,
        *,
        scheduler: str = "fcfs",
        chunk_tokens: int | None = None,
        prefix_cache: bool = True,
    ) -> None:
        self.profile = profile
        self.kv = KvMemory(profile.kv_capacity_tokens, keep=prefix_cache)
        self.queue: Fcfs | Fair = SCHEDULERS[scheduler]()
        self.chunk_tokens = chunk_tokens
        self.busy_s = 0.0
        self.n_steps = self.computed_tokens = self.cached_tokens = self.decoded_tokens = 0
        self.live: dict[Hashable, Served] = {}
        self._order = 0
        self._due: list[tuple[float, int, Served]] = []
        self._prefill: deque[Served] = deque()
        self._running: list[tuple[int, int, Served]] = []
        self._n_running = 0
        self._contexts = 0
        self._steps = 0
        self._to_come = 0
        self._next_s = math.inf
        # the plan: chunks of prefill, and k steps that take a, a + b, a + 2b, ... seconds
        self._chunks: list[tuple[Served, int]] = []
        self._start_s, self._k, self._a, self._b = 0.0, 0, 0.0, 0.0

    # --- what a driver calls ---------------------------------------------------------------------------------------

    def next_event_time(self) -> float:
        """Return when something happens next, if nobody calls before; infinity when idle."""
        return self._next_s

    def submit(self, now_s: float, request: Request) -> Served:
        """Queue a request; it is looked at when the step that runs now has ended.

        Raises
        ------
        EndpointError
            It can never fit.
        """
        tokens = request.prompt_tokens + request.output_tokens
        limit = min(self.profile.context_tokens, self.profile.kv_capacity_tokens - 1)
        if tokens > limit or request.prompt_tokens < 1 or request.output_tokens < 1:
            raise EndpointError(
                f"request {request.id!r} asks for {request.prompt_tokens} + {request.output_tokens} tokens, the context"
                f" takes 1 + 1 to {limit} - shorten it",
                kind="context",
            )
        if request.id in self.live:
            raise EndpointError(
                f"request {request.id!r} is being served already - ids must be unique", kind="duplicate"
            )
        self._order += 1
        served = self.live[request.id] = Served(request, now_s, self._order)
        self.queue.push(served)
        if self._next_s == math.inf:
            self._start_s = self._next_s = now_s
        else:
            self._cut(now_s)
        return served

    def abort(self, now_s: float, id: Hashable) -> bool:
        """Note that a client has left; the request stops after the profile's delay. ``False`` if it has ended."""
        served = self.live.get(id)
        if served is None or served.left_s is not None:
            return False
        served.left_s = now_s
        if self.profile.abort_delay_s is not None:
            due_s = now_s + self.profile.abort_delay_s
            heapq.heappush(self._due, (due_s, served.order, served))
            self._cut(due_s)
        return True

    def advance(self, to_s: float) -> list[Event]:
        """Let time pass and return what happened, in order."""
        events: list[Event] = []
        while self._next_s <= to_s and self._next_s < math.inf:
            now_s = self._next_s
            self._complete(now_s, events)
            self._plan(now_s, events)
        return events

    def tokens_at(self, id: Hashable, now_s: float) -> int:
        """Return how many output tokens of a live request exist at a time within the present jump."""
        served = self.live[id]
        if served.state != "running":
            return served.decoded_tokens
        done = self._steps - served.joined_step
        if self._k and not self._chunks:
            j = min(self._boundary(now_s), self._k)
            done += j if self._end(j) <= now_s else j - 1
        return served.decoded_tokens + done

    def load(self) -> Load:
        """Return how full the replica is."""
        return Load(len(self.queue), len(self.live) - len(self.queue), self.kv.used_tokens, self.kv.idle_tokens)

    # --- the end of a step -----------------------------------------------------------------------------------------

    def _complete(self, now_s: float, events: list[Event]) -> None:
        """Take over what the planned steps have done."""
        k, n = self._k, self._n_running
        self.busy_s += now_s - self._start_s
        self.n_steps += max(k, bool(self._chunks))
        self._steps += k
        if k and n:
            self._contexts += k * n
            self._to_come -= k * n
            self.decoded_tokens += k * n
            self.kv.take(k * n)
            while self._running and self._running[0][0] <= self._steps:
                _, _, served = heapq.heappop(self._running)
                if served.state == "running" and served.finish_step <= self._steps:
                    self._leave(served, now_s, events)
        for served, tokens in self._chunks:
            served.todo -= tokens
            served.computed_tokens += tokens
            self.computed_tokens += tokens
            if not served.todo:
                self._prefill.popleft()
                self._begin(served, now_s, events)
        self._chunks, self._k = [], 0

    def _begin(self, served: Served, now_s: float, events: list[Event]) -> None:
        """Give a prefilled request its first token and let it decode."""
        for key, size in served.chain[len(served.held) :]:
            if not self.kv.share(key, size):
                break
            served.held.append(key)
            served.private_tokens -= size
        served.decoded_tokens += 1
        served.private_tokens += 1
        self.kv.take(1)
        self.decoded_tokens += 1
        self._to_come -= 1
        if served.first_s is None:
            served.first_s = now_s
            events.append(Event(now_s, "first", served))
        served.state = "running"
        served.joined_step = self._steps
        served.finish_step = self._steps + served.left_tokens
        self._n_running += 1
        self._contexts += served.request.prompt_tokens + served.decoded_tokens
        if served.left_tokens:
            heapq.heappush(self._running, (served.finish_step, served.order, served))
        else:
            self._leave(served, now_s, events)

    def _leave(self, served: Served, now_s: float, events: list[Event]) -> None:
        """End a request where it stands: finished, or aborted."""
        self._unload(served)
        self._to_come -= 0 if served.state == "queued" else served.left_tokens
        if served.state != "queued":
            self.queue.charge(served.request.tenant, -OUTPUT_WEIGHT * served.left_tokens)
        served.state = "finished" if served.left_s is None else "aborted"
        served.ended_s = now_s
        del self.live[served.request.id]
        events.append(Event(now_s, served.state, served))

    def _unload(self, served: Served) -> None:
        """Free what a request holds and settle how far it has come."""
        if served.state == "running":
            done = self._steps - served.joined_step
            served.decoded_tokens += done
            served.private_tokens += done
            self._n_running -= 1
            self._contexts -= served.request.prompt_tokens + served.decoded_tokens
        self.kv.give(served.private_tokens)
        self.kv.release(served.held)
        served.private_tokens, served.held = 0, []

    # --- the plan --------------------------------------------------------------------------------------------------

    def _plan(self, now_s: float, events: list[Event]) -> None:
        while self._due and (self._due[0][0] <= now_s or self._due[0][2].ended_s is not None):
            _, _, served = heapq.heappop(self._due)
            if served.state == "queued":
                self.queue.remove(served)
            elif served.state == "prefill":
                self._prefill.remove(served)
            if served.ended_s is None:
                self._leave(served, now_s, events)
        self._admit()
        self._start_s = now_s
        if self._prefill:
            self._plan_prefill(now_s, events)
        elif self._n_running:
            self._plan_decode(now_s, events)
        else:
            self._next_s = math.inf

    def _admit(self) -> None:
        """Admit who is next while a step has room for prompts, and the KV memory for them and a share of what comes."""
        limit = self.chunk_tokens or self.profile.prefill_batch_tokens
        planned = sum(served.todo for served in self._prefill)
        while len(self.queue) and self._n_running + len(self._prefill) < self.profile.max_running and planned < limit:
            served = self.queue.peek()
            total = served.request.prompt_tokens + served.decoded_tokens
            keys, hit, idle = self.kv.match(served.chain)
            todo = max(1, total - hit)
            if planned + todo > limit and planned and self.chunk_tokens is None:
                return
            reserve = self.profile.reserve_share * (self._to_come + served.left_tokens)
            soon = self._n_running + len(self._prefill) + 1
            if self.kv.used_tokens + idle + total - hit + soon + reserve > self.kv.capacity_tokens:
                return
            self.queue.remove(served)
            self.kv.pin(keys)
            self.kv.take(total - hit)
            served.held, served.private_tokens, served.todo, served.state = keys, total - hit, todo, "prefill"
            served.cached_tokens += total - todo
            self.cached_tokens += total - todo
            self._to_come += served.left_tokens
            self.queue.charge(served.request.tenant, todo + OUTPUT_WEIGHT * served.left_tokens)
            self._prefill.append(served)
            planned += todo

    def _plan_prefill(self, now_s: float, events: list[Event]) -> None:
        """Plan one step of prefill: whole prompts alone, or chunks along with every sequence that decodes."""
        if self.chunk_tokens is not None:
            self._make_room(events, now_s)
        room = self.chunk_tokens or math.inf
        tokens = 0
        attention = 0.0
        for served in self._prefill:
            if tokens >= room:
                break
            size = int(min(served.todo, room - tokens))
            before = served.request.prompt_tokens + served.decoded_tokens - served.todo
            attention += size * (before + size / 2)
            tokens += size
            self._chunks.append((served, size))
        mixed = self._n_running if self.chunk_tokens is not None else 0
        self._k = int(mixed > 0)
        contexts = self._contexts if mixed else 0
        self._next_s = now_s + step_s(self.profile, tokens, mixed, contexts, attention)

    def _plan_decode(self, now_s: float, events: list[Event]) -> None:
        """Plan a jump: decode until somebody finishes, the memory is full, or an abort falls due."""
        self._make_room(events, now_s)
        while self._running[0][2].state != "running" or self._running[0][0] != self._running[0][2].finish_step:
            heapq.heappop(self._running)
        n = self._n_running
        free = (self.kv.capacity_tokens - self.kv.used_tokens) // n
        self._k = min(self._running[0][0] - self._steps, free)
        self._a = step_s(self.profile, 0, n, self._contexts)
        self._b = n * context_s(self.profile)
        self._next_s = self._end(self._k)
        if self._due:
            self._cut(self._due[0][0])

    def _make_room(self, events: list[Event], now_s: float) -> None:
        """Retract the youngest until every sequence that decodes, or soon will, can have its next token."""
        while self.kv.used_tokens + self._n_running + len(self._prefill) > self.kv.capacity_tokens and self._n_running:
            served = max((each for _, _, each in self._running if each.state == "running"), key=_order)
            self._unload(served)
            self._to_come -= served.left_tokens
            served.state = "queued"
            served.n_retractions += 1
            self.queue.push(served, first=True)
            self.queue.charge(served.request.tenant, -OUTPUT_WEIGHT * served.left_tokens)
            events.append(Event(now_s, "retracted", served))

    def _end(self, j: int) -> float:
        return self._start_s + j * self._a + self._b * (j * (j - 1) / 2)

    def _boundary(self, at_s: float) -> int:
        """Return the number of steps of the present jump after which a time is reached, at least one."""
        half, linear = self._b / 2, self._a - self._b / 2
        past_s = max(0.0, at_s - self._start_s)
        j = max(1, math.ceil((math.sqrt(linear * linear + 4 * half * past_s) - linear) / (2 * half)))
        while j > 1 and self._end(j - 1) >= at_s:
            j -= 1
        while self._end(j) < at_s:
            j += 1
        return j

    def _cut(self, at_s: float) -> None:
        """End the present jump at the first end of a step at or after a time."""
        if self._k > 1 and not self._chunks and at_s < self._next_s:
            self._k = min(self._k, self._boundary(at_s))
            self._next_s = self._end(self._k)


def _order(served: Served) -> int:
    return served.order


class Cluster:
    """Replicas behind a router, with the same methods as one.

    Parameters
    ----------
    profile : Profile
        The same for all.
    n_replicas : int
        How many.
    routing : str
        ``least_loaded`` (fewest requests, queued or running) or ``pinned`` (a tenant stays at one replica).
    **options
        Those of :class:`Engine`.
    """

    def __init__(
        self,
        profile: Profile,
        n_replicas: int = 1,
        *,
        routing: str = "least_loaded",
        **options: Any,
    ) -> None:
        self.profile = profile
        self.engines = [Engine(profile, **options) for _ in range(n_replicas)]
        self.routing = routing
        self._home: dict[Hashable, Engine] = {}

    def next_event_time(self) -> float:
        """Return when something happens next; infinity when idle."""
        return min([engine._next_s for engine in self.engines])

    def submit(self, now_s: float, request: Request) -> Served:
        """Route a request and queue it."""
        if self.routing == "pinned":
            number = int.from_bytes(blake2b(request.tenant.encode(), digest_size=4).digest(), "big")
            engine = self.engines[number % len(self.engines)]
        else:
            engine = min(self.engines, key=lambda each: len(each.live))
        served = engine.submit(now_s, request)
        self._home[request.id] = engine
        return served

    def abort(self, now_s: float, id: Hashable) -> bool:
        """Note that a client has left."""
        return id in self._home and self._home[id].abort(now_s, id)

    def advance(self, to_s: float) -> list[Event]:
        """Let time pass and return what happened, in order."""
        events: list[Event] = []
        while True:
            engine = min(self.engines, key=Engine.next_event_time)
            if engine.next_event_time() > to_s or engine.next_event_time() == math.inf:
                return events
            for event in engine.advance(engine.next_event_time()):
                events.append(event)
                if event.is_end:
                    self._home.pop(event.served.request.id, None)

    def tokens_at(self, id: Hashable, now_s: float) -> int:
        """Return how many output tokens of a live request exist."""
        return self._home[id].tokens_at(id, now_s)

    def loads(self) -> Iterator[Load]:
        """Yield how full each replica is."""
        return (engine.load() for engine in self.engines)
