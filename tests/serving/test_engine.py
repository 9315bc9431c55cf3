"""The engine against a loop that takes every token by itself, and what must hold whatever happens."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from revise_lab.errors import EndpointError
from revise_lab.serving.cost import load, step_s
from revise_lab.serving.engine import Cluster, Engine
from revise_lab.serving.requests import Request
from revise_lab.serving.simulator import play

H100 = load("h100-qwen3-14b-sglang")


def small(**changes):
    return H100.with_(**({"kv_capacity_tokens": 4000, "max_running": 6, "prefill_batch_tokens": 1500} | changes))


class Naive:
    """The same rules, a token at a time, with no aggregate that could go wrong; no prefix cache, first come first served."""

    def __init__(self, profile, chunk_tokens=None):
        self.p, self.chunk = profile, chunk_tokens

    def run(self, requests, aborts=()):
        p, left = self.p, sorted(requests, key=lambda pair: pair[0])
        gone = {id: at + p.abort_delay_s for at, id in aborts if p.abort_delay_s is not None}
        now, queue, prefill, running, ends = 0.0, [], [], [], {}
        while left or queue or prefill or running:
            if not (queue or prefill or running):
                now = max(now, left[0][0])
            while left and left[0][0] <= now:
                request = left.pop(0)[1]
                queue.append({"r": request, "out": 0, "todo": 0})
            for group in (queue, prefill, running):
                for each in [each for each in group if gone.get(each["r"].id, math.inf) <= now]:
                    group.remove(each)
                    ends[each["r"].id] = now
            self.admit(queue, prefill, running)
            if not prefill and not running:
                continue
            if self.chunk or not prefill:
                while (
                    sum(map(held, prefill + running)) + len(running) + len(prefill) > p.kv_capacity_tokens and running
                ):
                    last = max(running, key=lambda each: requests_order(requests, each["r"]))
                    running.remove(last)
                    queue.insert(0, last)
            room, pairs, tokens, done = self.chunk or math.inf, 0.0, 0, []
            for each in prefill:
                size = min(each["todo"], room - tokens)
                if size <= 0:
                    break
                pairs += size * (each["r"].prompt_tokens + each["out"] - each["todo"] + size / 2)
                tokens += size
                each["todo"] -= size
                if not each["todo"]:
                    done.append(each)
            decoding = running[:] if self.chunk or not tokens else []
            now += step_s(p, tokens, len(decoding), sum(map(held, decoding)), pairs)
            for each in decoding + done:
                each["out"] += 1
            for each in done:
                prefill.remove(each)
                running.append(each)
            for each in [each for each in running if each["out"] >= each["r"].output_tokens]:
                running.remove(each)
                ends[each["r"].id] = now
        return ends

    def admit(self, queue, prefill, running):
        p, limit = self.p, self.chunk or self.p.prefill_batch_tokens
        while queue and len(running) + len(prefill) < p.max_running and sum(e["todo"] for e in prefill) < limit:
            each = queue[0]
            todo = held(each)
            if prefill and sum(e["todo"] for e in prefill) + todo > limit and not self.chunk:
                return
            live = [*prefill, *running]
            to_come = sum(e["r"].output_tokens - e["out"] for e in [*live, each])
            if sum(map(held, live)) + todo + len(live) + 1 + p.reserve_share * to_come > p.kv_capacity_tokens:
                return
            each["todo"] = todo
            prefill.append(queue.pop(0))


def held(each):
    return each["r"].prompt_tokens + each["out"]


def requests_order(requests, request):
    return [each.id for _, each in requests].index(request.id)


@st.composite
def traffic(draw):
    n = draw(st.integers(1, 14))
    at, requests = 0.0, []
    for i in range(n):
        at += draw(st.floats(0.0, 0.4))
        requests.append((at, Request(i, draw(st.integers(1, 1800)), draw(st.integers(1, 120)))))
    aborts = [
        (requests[i][0] + draw(st.floats(0.001, 3.0)), i)
        for i in draw(st.lists(st.integers(0, n - 1), max_size=4, unique=True))
    ]
    profile = small(
        abort_delay_s=draw(st.sampled_from([0.0, 0.5, None])),
        reserve_share=draw(st.sampled_from([0.0, 0.5, 1.0])),
        max_running=draw(st.sampled_from([2, 6, 50])),
        kv_capacity_tokens=draw(st.sampled_from([2000, 4000])),
    )
    return profile, draw(st.sampled_from([None, 300])), requests, aborts


@given(traffic())
@settings(max_examples=150)
def test_finish_times_are_those_of_a_loop_over_tokens(case):
    profile, chunk, requests, aborts = case
    events = play(Engine(profile, chunk_tokens=chunk), requests, aborts)
    ours = {event.served.request.id: event.at_s for event in events if event.kind in ("finished", "aborted")}
    naive = Naive(profile, chunk).run(requests, aborts)
    assert ours.keys() == naive.keys()
    for id, end_s in naive.items():
        assert ours[id] == pytest.approx(end_s, rel=1e-6), id


@given(traffic(), st.booleans())
@settings(max_examples=60)
def test_every_token_is_accounted_for_and_the_memory_is_never_exceeded(case, shared):
    profile, chunk, requests, aborts = case
    if shared:
        requests = [
            (at, r._replace(prefix=(("root", r.prompt_tokens // 2),)[: r.prompt_tokens // 2]))
            for at, r in ((at, r._replace(prompt_tokens=1000)) for at, r in requests)
        ]
    engine = Engine(profile, chunk_tokens=chunk)

    def check():
        assert engine.kv.used_tokens >= 0
        assert engine.kv.used_tokens + engine.kv.idle_tokens <= profile.kv_capacity_tokens

    events = play(engine, requests, aborts, check)
    ends = [event.served for event in events if event.kind in ("finished", "aborted")]
    assert len(ends) == len(requests)
    for served in ends:
        if served.state == "finished":
            assert served.decoded_tokens == served.request.output_tokens
            assert served.cached_tokens + served.computed_tokens >= served.request.prompt_tokens
            if not served.n_retractions:
                assert served.cached_tokens + served.computed_tokens == served.request.prompt_tokens
    for total in ("cached_tokens", "computed_tokens", "decoded_tokens"):
        assert getattr(engine, total) == sum(getattr(served, total) for served in ends)
    assert not engine.live
    assert engine.kv.used_tokens == 0
    assert engine.next_event_time() == math.inf


def test_a_memory_that_runs_full_retracts_the_youngest_and_still_serves_all():
    requests = [(0.0, Request(i, 500, 400)) for i in range(6)]
    events = play(Engine(small(reserve_share=0.0)), requests)
    retracted = [event.served.request.id for event in events if event.kind == "retracted"]
    assert retracted
    assert 0 not in retracted
    assert sum(event.kind == "finished" for event in events) == 6
    assert not [e for e in play(Engine(small(reserve_share=1.0)), requests) if e.kind == "retracted"]


@pytest.mark.parametrize("delay_s", [0.0, 2.0])
def test_an_abort_frees_its_room_within_the_delay_of_the_profile_and_one_step(delay_s):
    engine = Engine(small(abort_delay_s=delay_s))
    engine.submit(0.0, Request("a", 500, 3000))
    engine.submit(0.0, Request("b", 500, 400))
    engine.advance(1.0)
    assert engine.abort(1.0, "a")
    assert not engine.abort(1.1, "a")
    left = engine.tokens_at("a", 1.0)
    step = step_s(engine.profile, 0, 2, 2000)
    gone = [event for event in engine.advance(1.0 + delay_s + step) if event.kind == "aborted"]
    assert [event.served.request.id for event in gone] == ["a"]
    assert gone[0].served.decoded_tokens - left <= delay_s / step_s(engine.profile, 0, 2, 500) + 1
    assert engine.kv.used_tokens <= 500 + 400


def test_a_server_that_never_aborts_decodes_to_the_end():
    engine = Engine(small(abort_delay_s=None))
    events = play(engine, [(0.0, Request("a", 500, 300))], [(0.5, "a")])
    assert [event.kind for event in events] == ["first", "aborted"]
    assert engine.decoded_tokens == 300


def test_prefixes_are_shared_within_a_tenant_only():
    def ask(id, tenant):
        return Request(id, 1000, 10, tenant, (("system", 600), (f"q{id}", 400)))

    engine = Engine(H100)
    events = play(engine, [(0, ask(0, "x")), (1, ask(1, "x")), (2, ask(2, "y")), (3, ask(3, "y")), (4, ask(0, "x"))])
    cached = [event.served.cached_tokens for event in events if event.kind == "finished"]
    assert cached == [0, 600, 0, 600, 999]
    assert play(Engine(H100, prefix_cache=False), [(0, ask(0, "x")), (1, ask(1, "x"))])[-1].served.cached_tokens == 0


def test_the_least_recently_used_prefix_leaves_first_and_a_root_never_before_its_leaf():
    engine = Engine(small(kv_capacity_tokens=2400))

    def ask(id, root, leaf):
        return Request(id, 1000, 10, "", ((root, 500), (f"{root}/{leaf}", 500)))

    asked = [("a", 1), ("a", 2), ("b", 1), ("a", 1), ("a", 2)]
    events = play(engine, [(float(i), ask(i, *each)) for i, each in enumerate(asked)])
    assert [e.served.cached_tokens for e in events if e.kind == "finished"] == [0, 500, 0, 500, 500]


def test_a_request_that_cannot_fit_is_refused():
    with pytest.raises(EndpointError, match="shorten"):
        Engine(H100).submit(0.0, Request(1, 40_900, 100))


def test_replicas_share_the_load_or_pin_a_tenant():
    def homes(routing):
        cluster = Cluster(H100, 4, routing=routing)
        for i in range(16):
            cluster.submit(0.0, Request(i, 100, 10, f"tenant {i % 4}"))
        return [len(engine.live) for engine in cluster.engines], cluster

    assert homes("least_loaded")[0] == [4, 4, 4, 4]
    counts, cluster = homes("pinned")
    assert sum(counts) == 16
    for i in range(12):
        assert cluster._home[i] is cluster._home[i + 4]
    times = [event.at_s for event in cluster.advance(math.inf)]
    assert all(a <= b for a, b in pairwise(times))


def tenants(seed, heavy, scheduler, n_tenants=64, rate=10.0, until=120.0, prompt=800, max_running=64):
    """Return the p99 latency of the light tenants; the heavy one has ``heavy`` times the load of each other."""
    cluster = Cluster(H100.with_(max_running=max_running), 1, scheduler=scheduler)
    requests = []
    for tenant in range(n_tenants):
        own = np.random.default_rng([seed, tenant])
        each = rate / n_tenants * (heavy if tenant == 0 else 1)
        at = np.cumsum(own.exponential(1 / each, int(each * until * 1.3)))
        requests += [(float(t), Request((tenant, i), prompt, 150, str(tenant))) for i, t in enumerate(at[at < until])]
    events = play(cluster, sorted(requests, key=lambda pair: pair[0]))
    light = [e.at_s - e.served.submitted_s for e in events if e.kind == "finished" and e.served.request.tenant != "0"]
    return float(np.percentile(light, 99))


def test_one_tenant_with_ten_times_the_load_costs_the_others_at_most_a_fifth(capsys):
    base, beside = tenants(1, 1, "fair"), tenants(1, 10, "fair")
    crowded = {"n_tenants": 16, "rate": 6.0, "prompt": 200, "max_running": 16}
    fair, fcfs = tenants(1, 10, "fair", **crowded), tenants(1, 10, "fcfs", **crowded)
    with capsys.disabled():
        print(f"\np99 of the others: alone {base:.2f} s, beside one with ten times the load {beside:.2f} s", end="")
        print(f"; where that one overloads the server: fair {fair:.2f} s, fcfs {fcfs:.2f} s")
    assert beside <= 1.2 * base
    assert fair < fcfs / 2


@given(traffic(), st.floats(0.003, 0.7))
@settings(max_examples=30)
def test_events_do_not_depend_on_how_often_somebody_looks(case, pace_s):
    profile, chunk, requests, aborts = case
    whole = play(Engine(profile, chunk_tokens=chunk), requests, aborts)
    engine, looked, at_s = Engine(profile, chunk_tokens=chunk), [], 0.0
    moves = sorted(
        [*((at, 0, what) for at, what in requests), *((at, 1, what) for at, what in aborts)], key=lambda m: m[:2]
    )
    while moves or engine.next_event_time() < math.inf:
        while moves and moves[0][0] < at_s + pace_s:
            at, kind, what = moves.pop(0)
            looked += engine.advance(math.nextafter(at, -math.inf))
            (engine.abort if kind else engine.submit)(at, what)
        at_s += pace_s
        looked += engine.advance(math.nextafter(at_s, -math.inf))
        tokens = [engine.tokens_at(id, at_s) for id in engine.live]
        assert all(0 <= each <= 120 for each in tokens)
    assert [(e.at_s, e.kind, e.served.request.id) for e in looked] == [
        (e.at_s, e.kind, e.served.request.id) for e in whole
    ]
