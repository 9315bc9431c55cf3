"""The serving sweeps on endpoints over HTTP: real connections and clocks, against the emulated server and a small model."""

from __future__ import annotations

import asyncio
import signal
import threading
import time
from collections import Counter
from itertools import pairwise

import pandas as pd
import pytest

from revise_lab.errors import ConfigError, EndpointError
from revise_lab.lab import serving_cells
from revise_lab.lab.experiments import revise_frequency, revise_serving
from revise_lab.runtime import local_server
from revise_lab.runtime.serving_live import padded, serve_live
from revise_lab.runtime.serving_run import Lengths, jobs
from revise_lab.serving.cost import load
from revise_lab.serving.http import ClusterServer
from revise_lab.serving.text import count_tokens

H100 = load("h100-qwen3-14b-sglang")
SHORT = Lengths(200, 64)


def coming(n=12, rate=30.0, share=0.5, output_tokens=20):
    return list(jobs(3, n, rate, serving_cells.maker("S12", output_tokens), n_tenants=4, revised_share=share))


def serve(server, policy="revise", arrivals=None, **options):
    url = server if isinstance(server, str) else server.url
    return asyncio.run(serve_live(arrivals or coming(), url, policy, SHORT, **options))


@pytest.mark.parametrize("policy", ["revise", "suffix", "restart"])
def test_every_workflow_ends_as_the_oracle_and_the_server_has_seen_every_call(policy):
    with ClusterServer(H100, 2, time_scale=0.1) as server:
        run = serve(server, policy)
        log = server.log
    assert [row.workflow for row in run.rows] == list(range(12))
    assert all(row.correct and row.stale_effects == 0 for row in run.rows)
    assert sum(row.revised for row in run.rows) >= 3
    asked, aborted = (sum(getattr(row, name) for row in run.rows) for name in ("n_calls", "n_aborted"))
    assert asked - aborted <= len(log) <= run.n_events <= asked, "what is stopped at once may never have been sent"
    statuses = Counter(entry.status for entry in log)
    assert set(statuses) <= {"finished", "aborted"}
    assert statuses["aborted"] <= aborted, "an abort may come too late to be one"
    ended = [entry for entry in log if entry.status == "finished"]
    assert {entry.completion_tokens for entry in ended} == {20}, "whole answers, whatever they say"
    assert sum(entry.cached_tokens for entry in log) > 0, "calls of a tenant share their start"
    assert all(0 < row.wall_after_s < row.wall_s for row in run.rows if row.revised and row.n_calls_after)


def test_the_same_comes_as_to_the_emulated_cluster():
    with ClusterServer(H100, 2, time_scale=0.02) as server:
        run = serve(server, arrivals=coming(share=0.0))
    emulated = [(job.number, job.tenant, job.arrival_s) for job in coming(share=0.0)]
    assert [(row.workflow, row.tenant, row.arrival_s) for row in run.rows] == emulated
    assert {row.n_calls for row in run.rows} == {12}
    assert {row.completion_tokens for row in run.rows} == {240}
    assert all(row.wasted_tokens == row.n_aborted == row.n_calls_after == 0 for row in run.rows)


def test_prompts_have_their_length_and_only_tenants_share_a_start():
    one, other, third = coming(3, share=0.0)
    texts = [padded("ask: a", job, SHORT) for job in (one, one._replace(number=9), other, third)]
    assert all(abs(count_tokens(text) - 200) <= 5 for text in texts)
    starts = [" ".join(text.split()[:64]) for text in texts]
    assert starts[0] == starts[1]
    assert len(set(starts)) == len({job.tenant for job in (one, other, third)})
    assert texts[0] != texts[1] != padded("ask: b", one, SHORT)


def test_no_more_calls_at_once_than_allowed():
    with ClusterServer(H100, 1, time_scale=0.1) as server:
        serve(server, arrivals=coming(6, share=0.0), max_concurrent=2)
        log = server.log
    times = sorted([(entry.arrival_s, 1) for entry in log] + [(entry.ended_s, -1) for entry in log])
    open_ = 0
    for (_, change), _ in pairwise([*times, (0, 0)]):
        open_ += change
        assert open_ <= 2


def test_a_spent_budget_ends_the_run_and_says_so():
    with ClusterServer(H100, 1, time_scale=0.02) as server:
        with pytest.raises(ConfigError, match=r"the budget of 20 requests is spent.*raise max_requests"):
            serve(server, max_requests=20)
        assert 12 <= len(server.log) <= 20, "what was on its way when the budget ended may not have arrived"


def test_a_workflow_whose_call_is_refused_for_good_is_a_miss_and_the_others_go_on():
    with ClusterServer(H100, 2, time_scale=0.02, fail={400: 0.03}, seed=2) as server:
        run = serve(server)
    statuses = Counter(row.status for row in run.rows)
    assert set(statuses) == {"finished", "unfinished"}
    missed = [row for row in run.rows if row.status == "unfinished"]
    assert not any(row.correct or row.in_slo(1e9) for row in missed)
    assert all(row.correct for row in run.rows if row not in missed)
    with ClusterServer(H100, fail={400: 1.0}) as server:
        run = serve(server, arrivals=coming(6, rate=1.0))
    assert {row.status for row in run.rows} == {"unfinished"}
    assert run.rows[0].n_calls >= 1
    assert run.rows[0].wall_s < run.end_s, "five calls, each of which ends with its refusal"


@pytest.mark.parametrize(("delay_s", "aborted"), [(0.0, True), (None, False)])
def test_a_stream_that_nobody_wants_is_closed_when_the_delay_is_over(delay_s, aborted):
    with ClusterServer(H100, 1, time_scale=0.1) as server:
        run = serve(server, arrivals=coming(8, share=1.0, output_tokens=120), abort_delay_s=delay_s)
        statuses = {entry.status for entry in server.log}
    assert sum(row.n_aborted for row in run.rows) > 0
    assert ("aborted" in statuses) == aborted
    assert all(row.correct for row in run.rows)


def test_replicas_share_the_load_and_a_pinned_tenant_stays():
    with ClusterServer(H100, 1, time_scale=0.02) as a, ClusterServer(H100, 1, time_scale=0.02) as b:
        serve(f"{a.url}, {b.url}", arrivals=coming(share=0.0))
        counts = [len(server.log) for server in (a, b)]
        assert min(counts) > 0.3 * sum(counts)
        serve(f"{a.url},{b.url}", arrivals=coming(share=0.0), pinned=True)
        even = sum(int(job.tenant.split()[-1]) % 2 == 0 for job in coming(share=0.0))
        assert [len(server.log) for server in (a, b)] == [counts[0] + 12 * even, counts[1] + 12 * (12 - even)]


def test_an_endpoint_that_is_not_there_is_named_before_anything_is_asked():
    with pytest.raises(EndpointError, match=r"127\.0\.0\.1:9/v1.*nobody answers"):
        serve("http://127.0.0.1:9/v1")


@pytest.mark.parametrize("experiment", [revise_serving, revise_frequency])
def test_the_experiments_run_on_it_and_say_measured(experiment):
    with ClusterServer(H100, 1, time_scale=0.02) as server:
        lengths = {"prompt_tokens": 100, "shared_tokens": 32, "output_tokens": 8, "capacity_per_s": 30}
        given = experiment.Params(policy="revise", n_workflows=25, endpoint=server.url, **lengths)
        frame = pd.DataFrame(experiment.cell(given, 1, 0)).assign(**given.model_dump())
        assert set(experiment.COLUMNS) <= set(frame)
        assert "all others equal the oracle" in serving_cells.check(frame)
        assert serving_cells.source(frame) == f"measured ({server.url})"
    assert experiment.estimate(given)["calls"] > 12 * 25


def test_an_interrupt_ends_a_cell_on_the_clock_at_once():
    """The loop is in another thread than the one that Ctrl-C interrupts."""
    with ClusterServer(H100, 1, time_scale=20) as server:
        given = {"policy": "revise", "n_workflows": 25, "endpoint": server.url, "capacity_per_s": 1}
        before = signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored, in a job in the background
        threading.Timer(1.0, signal.pthread_kill, [threading.main_thread().ident, signal.SIGINT]).start()
        began_s = time.monotonic()
        try:
            with pytest.raises(KeyboardInterrupt):
                revise_serving.cell(
                    revise_serving.Params(**given, prompt_tokens=50, shared_tokens=0, output_tokens=8), 1, 0
                )
        finally:
            signal.signal(signal.SIGINT, before)
        assert time.monotonic() - began_s < 5


@pytest.mark.live
def test_a_real_model_serves_workflows_and_every_one_equals_the_oracle():
    with local_server.LocalServer() as server:
        run = asyncio.run(
            serve_live(
                coming(4, 0.5, 1.0, 8), server.url, "revise", Lengths(48, 16), max_concurrent=2, max_requests=200
            )
        )
    assert all(row.correct for row in run.rows)
    assert sum(row.revised for row in run.rows) >= 2
    assert all(row.completion_tokens >= 8 * 12 for row in run.rows)
