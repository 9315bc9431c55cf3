"""Traces against figures of an independent simulator, and workflows on a cluster under the real machine."""

from __future__ import annotations

import math
import time
from itertools import count

import numpy as np
import pytest

from revise_lab.errors import ReviseLabError
from revise_lab.records.revision import Change, Op, Revision
from revise_lab.records.workflow import Workflow
from revise_lab.runtime.serving_run import Lengths, jobs, serve_workflows, window
from revise_lab.serving.cost import load
from revise_lab.serving.engine import Cluster
from revise_lab.serving.requests import Request
from revise_lab.serving.simulator import play
from revise_lab.workloads.serving import S12
from revise_lab.workloads.synthetic import free_family

H100 = load("h100-qwen3-14b-sglang")
LENGTHS = Lengths(600, 100)
GRAPH, INPUTS = S12.workflow(60).graph(), S12.inputs()


@pytest.mark.parametrize(("rate", "throughput", "mean_s"), [(20, 19.26, 8.68), (26, 24.68, 12.51)])
def test_an_open_loop_meets_an_independent_simulator(rate, throughput, mean_s, capsys):
    """Theirs is one draw of the arrivals and we do not have it, so ours is the mean of many; a draw alone says less."""
    n, n_draws = 3000, 20
    ours, latency = [], []
    for draw in range(n_draws):
        at = np.cumsum(np.random.default_rng([rate, draw]).exponential(1 / rate, n))
        events = play(Cluster(H100, 4), [(float(t), Request(i, 1625, 340)) for i, t in enumerate(at)])
        ends = [event for event in events if event.is_end]
        ours.append(n / max(event.at_s for event in ends))
        latency.append(np.mean([event.at_s - event.served.submitted_s for event in ends]))
    with capsys.disabled():
        for what, found, theirs in (("requests/s", ours, throughput), ("s, mean latency", latency, mean_s)):
            off = 100 * (np.mean(found) / theirs - 1)
            print(f"\n{rate}/s: {np.mean(found):.2f} {what} (sd {np.std(found):.2f}; {theirs}, {off:+.1f} %)", end="")
    assert np.mean(ours) == pytest.approx(throughput, rel=0.03)
    assert np.mean(latency) == pytest.approx(mean_s, rel=0.03)
    assert min(latency) < mean_s < max(latency)


def test_a_closed_loop_meets_an_independent_simulator():
    cluster, n, done = Cluster(H100, 4), 400, 0
    for number in range(n):
        cluster.submit(0.0, Request(number, 1625, 340))
    while done < 3000:
        now_s = cluster.next_event_time()
        for event in cluster.advance(now_s):
            if event.is_end:
                done += 1
                if n < 3000:
                    cluster.submit(now_s, Request(n, 1625, 340))
                    n += 1
    assert 3000 / now_s == pytest.approx(26.6, rel=0.03)


def make(number, rng):
    artifact, field = S12.revised[int(rng.integers(5))].split(".")
    return GRAPH, INPUTS, Revision("r1", (Change(artifact, Op.SET, (field,), "second"),))


def run(policy="revise", n=60, rate=4.0, *, share=0.5, profile=H100, build=make, lengths=LENGTHS, **options):
    cluster = Cluster(profile, 2)
    arrivals = jobs(1, n, rate, build, revised_share=share)
    return serve_workflows(arrivals, cluster, policy, lengths, **options), cluster


def test_every_workflow_ends_as_the_latest_version_oracle_and_every_token_is_accounted_for():
    for policy in ("revise", "suffix", "restart", "revise_plus"):
        done, cluster = run(policy)
        assert [row.status for row in done.rows] == ["finished"] * 60
        assert all(row.correct and not row.stale_effects for row in done.rows)
        assert 20 <= sum(row.revised for row in done.rows) <= 40
        for column, total in (("completion_tokens", "decoded_tokens"), ("cached_tokens", "cached_tokens")):
            served = sum(getattr(engine, total) for engine in cluster.engines)
            assert sum(getattr(row, column) for row in done.rows) == served
        for row in done.rows:
            assert row.completion_after_tokens <= row.completion_tokens
            assert row.wall_after_s <= row.wall_s + 1e-9
            if not row.revised:
                assert (row.n_calls, row.n_calls_after, row.wasted_tokens) == (12, 0, 0)
                assert row.completion_tokens == 12 * 60


def test_policies_meet_the_same_workload_and_the_selective_one_does_less():
    ours, suffix, restart = (run(policy)[0] for policy in ("revise", "suffix", "restart"))
    for a, b in zip(ours.rows, suffix.rows, strict=True):
        assert (a.workflow, a.arrival_s, a.tenant, a.revised) == (b.workflow, b.arrival_s, b.tenant, b.revised)
    work = [sum(row.completion_after_tokens for row in each.rows) for each in (ours, suffix, restart)]
    assert 0 < work[0] < work[1] < work[2]
    assert run("revise")[0].rows == ours.rows


def test_an_output_that_the_inputs_do_not_explain_shows():
    drawn = count()

    async def untracked(state, ctx):
        return {"note": (await ctx.model(f"{state['x']['y']} {next(drawn)}", max_tokens=5)).text}

    flow = Workflow("untracked")
    flow.node(kind="model", name="a")(untracked)
    built = flow.graph(), {"x": {"y": 0}}, Revision("r1", (Change("x", Op.SET, ("y",), 1),))
    done, _ = run(n=5, build=lambda number, rng: built)
    assert not any(row.correct or row.in_slo(math.inf) for row in done.rows)


def test_shares_are_nested_and_rates_only_stretch_arrivals():
    few, many = (list(jobs(1, 200, 1.0, make, revised_share=share)) for share in (0.1, 0.5))
    assert {job.number for job in few if job.revision} < {job.number for job in many if job.revision}
    fast = list(jobs(1, 200, 2.0, make))
    assert [2 * job.arrival_s for job in fast] == pytest.approx([job.arrival_s for job in few])


def test_the_abort_delay_is_paid_in_wasted_tokens():
    wasted = [
        sum(row.wasted_tokens for row in run(share=1.0, profile=H100.with_(abort_delay_s=delay_s))[0].rows)
        for delay_s in (0.0, 0.3, None)
    ]
    assert wasted[0] < wasted[1] < wasted[2]


def test_what_is_rejected_or_does_not_end_misses_every_objective():
    done, _ = run(n=40, rate=4.0, max_in_flight=10, stop_s=12.0, sample_s=0.5)
    seen = {row.status for row in done.rows}
    assert seen == {"finished", "unfinished", "rejected"}
    assert not any(row.in_slo(1e9) for row in done.rows if row.status != "finished")
    assert len(done.rows) == 40
    assert max(sample.n_in_flight for sample in done.samples) <= 10
    assert [sample.at_s for sample in done.samples] == [0.5 * i for i in range(len(done.samples))]


def test_revisions_may_come_by_the_clock_and_are_void_after_the_end():
    done, _ = run(share=1.0, rate=1.0, revise_within_s=40.0)
    revised = [row for row in done.rows if row.revised]
    assert 0 < len(revised) < 60
    assert all(row.revision_s < row.latency_s for row in revised)
    assert all(row.correct for row in done.rows)


def test_free_families_and_uneven_lengths_run_too():
    def build(number, rng):
        family = free_family(rng)
        artifact, field = family.revised[number % len(family.revised)].split(".")
        return (
            family.workflow(40).graph(),
            family.inputs(),
            Revision("r1", (Change(artifact, Op.SET, (field,), "new"),)),
        )

    lengths = Lengths(300, cv=0.5, factors={"n00": 2.0})
    done, _ = run(n=30, build=build, lengths=lengths)
    again, _ = run("suffix", n=30, build=build, lengths=lengths)
    assert all(row.correct for row in done.rows + again.rows)
    pairs = [(a, b) for a, b in zip(done.rows, again.rows, strict=True) if not a.revised]
    assert [a.completion_tokens for a, _ in pairs] == [b.completion_tokens for _, b in pairs]
    assert len({a.completion_tokens for a, _ in pairs}) > 5


def test_a_workflow_that_halts_is_named():
    async def broken(state, ctx):
        raise ValueError("no")

    def build(number, rng):
        flow = Workflow("broken")
        flow.node(kind="model", name="a")(broken)
        return flow.graph(), {}, Revision("r1", (Change("x", Op.SET, ("y",), 1),))

    with pytest.raises(ReviseLabError, match="workflow 0 came to a halt"):
        run(n=1, share=0.0, build=build)


def test_windows_cut_off_both_ends():
    assert [window(number, 10) for number in range(10)] == ["warm-up"] * 2 + ["steady"] * 7 + ["cool-down"]


@pytest.mark.slow
def test_work_grows_with_the_number_of_workflows_and_not_faster(capsys):
    sizes, seconds = (100, 400), []
    for n in sizes:
        start = time.process_time()
        run(n=n, rate=2.0)
        seconds.append(time.process_time() - start)
    exponent = math.log(seconds[1] / seconds[0]) / math.log(sizes[1] / sizes[0])
    with capsys.disabled():
        print(
            f"\n{1e3 * seconds[1] / sizes[1]:.2f} ms a workflow, exponent {exponent:.2f} from {sizes[0]} to {sizes[1]}"
        )
    assert exponent < 1.5
