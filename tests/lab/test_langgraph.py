"""The LangGraph experiment and benchmark: what they count is what happened."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pandas as pd
import pytest

pytest.importorskip("langgraph")

from revise_lab.lab.bench import langgraph as bench
from revise_lab.lab.experiments import revise_langgraph as experiment
from revise_lab.serving.server import EmbeddedServer

ROOT = Path(__file__).resolve().parents[2]


def rows(**params):
    chosen = experiment.Params(ttft_s=0.004, itl_s=0.005, **params)
    return {row["policy"]: row for row in experiment.cell(chosen, 0, 1)}


@pytest.mark.slow
def test_one_revision_under_each_policy_is_counted_at_the_endpoint():
    found = rows(revision="helper_goal", policies=("wait", "suffix", "revise"), stock=True)
    assert list(found) == ["suffix", "revise", "wait", *experiment.STOCK], "the order rotates with the replicate"
    assert {policy: row["n_calls_after"] for policy, row in found.items()} == {
        "wait": 10, "suffix": 7, "revise": 5,
        "stock: new input": 10, "stock: update_state": 1, "stock: fork": 10,
    }  # fmt: skip
    assert {policy: row["n_aborted"] for policy, row in found.items()} == {
        "wait": 0, "suffix": 1, "revise": 1,
        "stock: new input": 1, "stock: update_state": 1, "stock: fork": 1,
    }  # fmt: skip
    assert [policy for policy, row in found.items() if not row["correct"]] == ["stock: update_state"]
    assert all(found[policy]["as_expected"] for policy in ("wait", "suffix", "revise"))
    assert found["revise"]["recomputed"] == "assess join report requirements reviewer"
    assert {row["completion_tokens_after"] / row["n_calls_after"] for row in found.values()} == {8}
    assert found["revise"]["n_leaves"] == 6


def test_an_endpoint_that_is_not_ours_is_asked_by_its_url_and_counted_from_here():
    with EmbeddedServer(ttft_s=0.004, itl_s=0.005) as server:
        row = rows(revision="volume", policies=("revise",), endpoint=server.url)["revise"]
        log = server.log
    assert row["recomputed"] == "costs join report"
    assert (row["n_calls_before"], row["n_calls_after"], row["n_aborted"], row["n_unknown_usage"]) == (10, 3, 1, 0)
    assert row["correct"]
    assert [entry.node for entry in log if entry.outcome == "aborted"] == ["report"]


def test_a_tier_that_blocks_and_a_lane_that_flips():
    found = rows(revision="blocked", policies=("restart", "suffix", "revise"))
    assert {policy: row["n_calls_after"] for policy, row in found.items()} == {"restart": 7, "suffix": 5, "revise": 2}
    assert all(row["correct"] and row["as_expected"] for row in found.values())
    assert found["revise"]["n_retracted"] == 3
    row = rows(app="brief", revision="severity", policies=("revise",))["revise"]
    assert (row["recomputed"], row["n_retracted"]) == ("containment join planner report reviewer", 1)
    assert row["correct"]


@pytest.mark.slow
def test_the_values_are_sums_over_the_five_revisions():
    def row(policy, revision, replicate, calls):
        named = {
            "app": "supplier",
            "endpoint": "emulated",
            "policy": policy,
            "revision": revision,
            "replicate": replicate,
        }
        counted = {"n_calls_after": calls, "prompt_tokens_after": 30 * calls, "completion_tokens_after": 8 * calls}
        timed = {"model_wall_s": 0.1 * calls, "e2e_s": 0.5, "first_s": 0.4}
        told = {"correct": True, "as_expected": True, "n_aborted": int(policy != "wait"), "n_leaves": 6}
        return {**named, **counted, **timed, **told}

    sets = experiment.EXPECTED["supplier"]
    made = [
        row(policy, revision, replicate, calls)
        for replicate in range(3)
        for revision in experiment.REVISIONS
        for policy, calls in (
            ("wait", 10), ("restart", 10), ("suffix", sets[revision].n_suffix),
            ("revise", len(sets[revision].affected.split())),
        )
    ]  # fmt: skip
    values = {each["id"]: each["value"] for each in experiment.values(pd.DataFrame(made))}
    assert (values["R05.restart"], values["R05.suffix"], values["R05.revise"]) == (10, 7.8, 4.4)
    assert (values["R06.suffix"], values["R06.revise"]) == (pytest.approx(62.4), pytest.approx(35.2))
    saved = [values[f"R08.{name}.calls"] for name in ("policy_control", "helper_goal", "reviewer_evidence")]
    assert saved == pytest.approx([37.5, 28.571, 16.667], abs=1e-3)
    assert (values["R08.aborts"], values["R09.reads"], values["R09.sets"], values["R01.integration"]) == (15, 6, 5, 1)


def test_the_benchmark_runs_the_same_graph_both_ways():
    stock, ours = bench.pairs(bench.graph(0.0), 2)
    assert len(stock) == len(ours) == 2
    assert min(stock + ours) > 0
    row = bench._overhead("chain", [100.0, 100.0], [105.0, 113.0], bench.BUDGET_PERCENT)
    assert (row.p50, row.met) == (pytest.approx(9.0), True)


def test_the_oldest_release_that_is_tested_is_the_lower_bound():
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    tested = re.search(r"^OLDEST := langgraph==(\S+) ", makefile, flags=re.M).group(1)
    assert project["optional-dependencies"]["langgraph"] == [f"langgraph>={tested}"]
