"""The engine in real time: one trace has one order in both shells, and chunks leave when their tokens exist."""

from __future__ import annotations

import asyncio
import heapq
import itertools
import json
import random
import re

import pytest

from revise_lab.serving.cost import load
from revise_lab.serving.engine import Cluster
from revise_lab.serving.http import ClusterServer
from revise_lab.serving.requests import Request
from revise_lab.serving.shell import Shell
from revise_lab.serving.simulator import play
from revise_lab.serving.text import prompt_tokens

H100 = load("h100-qwen3-14b-sglang")


# --- one trace, two shells ---


class FakeClock:
    """Time that stands still until the next call is due; of two at one time, the one that was asked for last goes first."""

    def __init__(self, start_s):
        self.now_s, self._calls, self._numbers = start_s, [], itertools.count(0, -1)

    def time(self):
        return self.now_s

    def call_at(self, when, callback):
        self._calls.append(call := [when, next(self._numbers), callback])
        heapq.heapify(self._calls)
        return FakeHandle(call)

    def run(self):
        while self._calls:
            when, _, callback = heapq.heappop(self._calls)
            self.now_s = max(self.now_s, when)
            callback()


class FakeHandle:
    def __init__(self, call):
        self._call = call

    def cancel(self):
        self._call[2] = lambda: None


def trace(seed):
    """Return requests and departures: a burst at the start, then arrivals at random, of three tenants."""
    rng = random.Random(seed)
    requests, aborts = [], []
    for id in range(60):
        at_s = 0.0 if id < 5 else rng.uniform(0, 6)
        prefix = tuple((f"block{i}", 100) for i in range(rng.randrange(4)))
        prompt = 400 + rng.randrange(900)
        requests.append((at_s, Request(id, prompt, rng.randrange(1, 400), f"tenant{rng.randrange(3)}", prefix)))
        if rng.random() < 0.4:
            aborts.append((at_s + rng.choice([0.0, rng.uniform(0, 2), rng.uniform(0, 2)]), id))
    return requests, aborts


@pytest.mark.parametrize("abort_delay_s", [0.0, 0.5, None])
@pytest.mark.parametrize("seed", range(6))
def test_one_trace_has_one_order_in_both_shells(seed, abort_delay_s):
    # little memory and few slots, so that there are queues and retractions; half the seeds mix prefill with decoding
    profile = H100.with_(kv_capacity_tokens=5000, max_running=6, reserve_share=0.1, abort_delay_s=abort_delay_s)
    options = {"scheduler": ("fcfs", "fair")[seed % 2], "chunk_tokens": 512 if seed >= 3 else None}
    requests, aborts = trace(seed)
    start_s, scale = (0.0, 0.5) if seed % 2 else (1234.5, 1.7)
    if seed % 2:  # where times are exact in both, one request and one departure meet an event
        tie_s = play(Cluster(profile, 1 + seed % 3, **options), requests, aborts)[40].at_s
        requests.append((tie_s, Request("tie", 500, 9)))
        aborts.append((tie_s, 59))
    virtual = play(Cluster(profile, 1 + seed % 3, **options), requests, aborts)

    clock, real = FakeClock(start_s), []
    shell = Shell(Cluster(profile, 1 + seed % 3, **options), clock, time_scale=scale, on_event=real.append)
    moves = [(at_s, 0, lambda r=r: shell.submit(r)) for at_s, r in requests]
    moves += [(at_s, 1, lambda id=id: shell.abort(id)) for at_s, id in aborts]
    for at_s, _, move in reversed(sorted(moves, key=lambda move: move[:2])):
        clock.call_at(start_s + at_s * scale, move)
    clock.run()

    assert [(e.kind, e.served.request.id) for e in real] == [(e.kind, e.served.request.id) for e in virtual]
    assert [e.at_s for e in real] == pytest.approx([e.at_s for e in virtual], abs=1e-6)
    assert len(virtual) >= 100
    assert {"first", "finished", "aborted"} <= {e.kind for e in virtual}
    assert shell.late_s < 1e-6


def test_the_order_test_sees_retractions():
    profile = H100.with_(kv_capacity_tokens=5000, max_running=6, reserve_share=0.1)
    kinds = [e.kind for seed in range(6) for e in play(Cluster(profile, 1), *trace(seed))]
    assert kinds.count("retracted") >= 3


# --- streams in virtual time ---


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop that skips all waiting."""

    now_s = 0.0

    def time(self):
        return self.now_s

    def _run_once(self):
        if not self._ready and self._scheduled:
            self.now_s = max(self.now_s, self._scheduled[0]._when)
        super()._run_once()


def in_virtual_time(main):
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(main)


async def streamed(app, number, n_tokens):
    """Send one request to an ASGI application and return when each of its chunks came, and the tokens in it."""
    content = f"number {number}"
    body = {
        "messages": [{"role": "user", "content": content}],
        "stream": True,
        "max_tokens": n_tokens,
        "ignore_eos": True,
    }
    bodies, chunks, loop = [json.dumps(body).encode()], [], asyncio.get_running_loop()

    async def receive():
        if bodies:
            return {"type": "http.request", "body": bodies.pop(), "more_body": False}
        return await asyncio.Event().wait()

    async def send(message):
        for event in re.findall(rb"data: (\{.*\})", message.get("body", b"")):
            words = json.loads(event)["choices"][0]["delta"].get("content", "").split()
            chunks.extend([(loop.time(), len(words))] if words else [])

    await app({"type": "http", "method": "POST", "path": "/v1/chat/completions", "headers": []}, receive, send)
    return chunks


def test_a_chunk_of_four_tokens_leaves_when_its_last_one_exists():
    server = ClusterServer(H100, time_scale=2.0)
    chunks = in_virtual_time(streamed(server.app(), 1, 22))
    (entry,) = server.log
    assert [n for _, n in chunks] == [1, 4, 4, 4, 4, 4, 1]
    itl_s, made = (entry.ended_s - entry.first_s) / 21, 0
    for at_s, n in chunks:
        made += n
        assert 0 <= at_s - 2.0 * (entry.first_s + (made - 1) * itl_s) < 0.0006


def test_streams_end_when_a_trace_in_virtual_time_says_so():
    n, n_tokens, server = 32, 90, ClusterServer(H100, 2, time_scale=1.5)
    prompt = prompt_tokens([{"role": "user", "content": "number 1"}])
    expected = [e for e in play(Cluster(H100, 2), [(0.0, Request(i, prompt, n_tokens)) for i in range(n)]) if e.is_end]

    async def all_at_once():
        app = server.app()
        return await asyncio.gather(*(streamed(app, i, n_tokens) for i in range(n)))

    rows = in_virtual_time(all_at_once())
    ended_s = {e.served.request.id: e.at_s for e in expected}
    assert [entry.ended_s for entry in server.log] == pytest.approx([ended_s[i] for i in range(n)], rel=1e-9)
    for i, chunks in enumerate(rows):
        assert sum(size for _, size in chunks) == n_tokens
        assert max(size for _, size in chunks) == 4
        assert chunks[-1][0] == pytest.approx(1.5 * ended_s[i], abs=0.001)
