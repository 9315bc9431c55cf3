"""The serving sweeps: one operating point fixed beforehand, paired workloads, changes and their trend, values."""

from __future__ import annotations

import json

import numpy as np
import pandas as pd
import pytest

from revise_lab.errors import ConfigError, ResultsError
from revise_lab.lab import scan, serving_cells, serving_figures
from revise_lab.lab.cli import main
from revise_lab.lab.experiments import revise_frequency, revise_serving
from revise_lab.policies import policy
from revise_lab.runtime.serving_run import _Oracle
from revise_lab.runtime.simulator import simulate, truth_of
from revise_lab.workloads.serving import S8

SMALL = {"prompt_tokens": 600, "shared_tokens": 100, "output_tokens": 20, "n_replicas": 2, "n_tenants": 8}
SMALL |= {"profile": "h100-qwen3-14b-sglang", "family": "S8", "n_workflows": 25}


def _frame(experiment, cells):
    rows = []
    for given, replicate in cells:
        params = experiment.Params(n_workflows=25, **given)
        common = params.model_dump() | {"replicate": replicate}
        rows += [common | row for row in experiment.cell(params, 100 + replicate, replicate)]
    return pd.DataFrame(rows)


def test_of_500_workflows_280_count():
    counted = [serving_cells.is_counted(number, 500) for number in range(500)]
    assert (counted.index(True), sum(counted), counted[::-1].index(True)) == (180, 280, 40)


@pytest.mark.parametrize("family", ["S12", "free"])
def test_every_policy_meets_the_same_at_every_load(family):
    runs = {
        (name, rate): serving_cells.serve(7, name, rate, **{**SMALL, "family": family}).rows
        for name in ("suffix", "revise", "wait")
        for rate in (2.0, 4.0)
    }
    first = runs["suffix", 2.0]
    for (_, rate), rows in runs.items():
        assert [row.tenant for row in rows] == [row.tenant for row in first]
        assert np.allclose([row.arrival_s * rate for row in rows], [row.arrival_s * 2.0 for row in first])
        assert all(row.correct for row in rows)
        assert not sum(row.stale_effects for row in rows)


def test_aborts_that_never_take_effect_waste_more():
    at_once, never = (
        serving_cells.serve(7, "restart", 4.0, **SMALL, abort=abort, revised_share=1.0).rows
        for abort in ("0 s", "never")
    )
    assert sum(row.wasted_tokens for row in never) > sum(row.wasted_tokens for row in at_once) > 0


def test_the_oracle_is_worked_out_once_for_each_thing_it_depends_on():
    oracle, graph = _Oracle(), S8.workflow(4).graph()
    other = S8.inputs() | {"rules": {"window": "other"}}
    for inputs, n_known in ((S8.inputs(), 1), (S8.inputs(), 1), (other, 2)):
        run = simulate(graph, inputs, policy("revise"))
        assert oracle.truth(run.machine) == truth_of(run)[0]
        assert len(oracle._known) == n_known
    assert oracle.truth(simulate(S8.workflow(5).graph(), other).machine) != oracle.truth(run.machine)


# --- the scan --------------------------------------------------------------------------------------------------------


def test_the_scan_brackets_the_capacity():
    setting = {**SMALL, "n_workflows": 30, "n_replicas": 1, "prompt_tokens": 9000, "revised_share": 0.0}
    found = scan.scan("suffix", 3, setting, n_runs=2)
    rates = {row["rate_per_s"]: row for row in found["rates"]}
    capacity = found["capacity_per_s"]
    assert rates[capacity]["keeps_up"]
    assert not rates[round(capacity + scan.STEP_PER_S, 6)]["keeps_up"]
    assert rates[capacity]["low"] <= 0 < rates[round(capacity + scan.STEP_PER_S, 6)]["low"]
    assert found["at_0.7"]["rate_per_s"] == pytest.approx(0.7 * capacity)


def test_the_scan_refuses_a_capacity_beyond_its_grid():
    with pytest.raises(ConfigError, match="choose other lengths"):
        scan.scan("suffix", 3, {**SMALL, "n_workflows": 30, "n_replicas": 16, "revised_share": 0.0}, n_runs=2)


def test_the_scan_does_not_replace_a_result(tmp_path, capsys):
    kept = tmp_path / "capacity.json"
    kept.write_text("{}")
    assert main(["serving", "scan", "--out", str(kept)]) == 2
    assert "--force" in capsys.readouterr().err
    assert kept.read_text() == "{}"


def test_the_operating_point_was_found_with_suffix_alone_and_is_well_inside_the_objective():
    point = json.loads(serving_cells.CAPACITY_FILE.read_text())
    assert point["policy"] == "suffix"
    assert point["at_0.7"]["p50_s"] < revise_serving.SLO_S / 2
    assert revise_serving.Params().capacity_per_s == point["capacity_per_s"]
    with pytest.raises(ConfigError, match="serving scan"):
        serving_cells.operating_point(serving_cells.CAPACITY_FILE.with_name("nothing.json"))


# --- changes and their trend -----------------------------------------------------------------------------------------


def _planted(gain, n_runs=3, n=60):
    """Latencies of suffix, and of revise shorter by ``gain(load)`` percent."""
    rows = []
    for run in range(n_runs):
        base = np.random.default_rng(run).gamma(4, 6, n)
        for load in revise_serving.PRESSURE:
            for name, factor in (("suffix", 1.0), ("revise", 1 - gain(load) / 100)):
                common = {"family": "S12", "abort": "0 s", "load": load, "policy": name, "replicate": run}
                common |= {"counted": True, "correct": True}
                rows += [common | {"workflow": i, "latency_s": x * factor} for i, x in enumerate(base)]
    return pd.DataFrame(rows)


def test_a_gain_that_grows_with_load_is_found():
    frame = _planted(lambda load: 100 * (load - 0.9))
    setting = revise_serving.Setting("S12", "0 s", "revise")
    found = revise_serving.compared(frame, setting, list(revise_serving.PRESSURE), ("p99",))["p99"]
    assert found.at(1.1).value == pytest.approx(-20)
    assert found.pooled().value == pytest.approx(-(10 + 20 + 40) / 3)
    slope, p, n_orders = found.trend()
    assert slope.value == pytest.approx(-10)
    assert slope.high < 0
    assert (p, n_orders) == (1 / 216, 216)


def test_an_even_gain_has_no_trend():
    setting = revise_serving.Setting("S12", "0 s", "revise")
    found = revise_serving.compared(_planted(lambda load: 5.0), setting, list(revise_serving.PRESSURE), ("p99",))["p99"]
    slope, p, _ = found.trend()
    assert slope.value == pytest.approx(0)
    assert p > 0.5
    assert (found.at(1.0).low, found.at(1.0).high) == (pytest.approx(-5), pytest.approx(-5))


def test_a_wrong_or_unfinished_workflow_misses_every_objective():
    frame = _planted(lambda load: 0.0)
    frame.loc[frame["policy"] == "revise", "correct"] = False
    setting = revise_serving.Setting("S12", "0 s", "revise")
    found = revise_serving.compared(frame, setting, list(revise_serving.PRESSURE), ("goodput_40",))["goodput_40"]
    assert found.at(1.0).value == -100
    assert np.isinf(revise_serving.latencies(frame, setting, 1.0, "revise")).all()


def test_savings_are_ratios_of_sums_over_what_both_revised():
    rows = [
        {"policy": name, "load": 1.0, "replicate": 0, "workflow": i, "revised": i < 8, "work": work * (1 + i % 3)}
        for name, work in (("suffix", 10.0), ("revise", 8.0))
        for i in range(12)
    ]
    found = serving_cells.saving(pd.DataFrame(rows), "revise", "work")
    assert (found.value, found.low, found.high) == tuple(pytest.approx(20) for _ in range(3))
    assert found.n == 8


def test_a_workflow_that_differs_from_the_oracle_is_reported():
    frame = pd.DataFrame({"status": ["finished", "rejected"], "correct": [True, False], "stale_effects": [0, 0]})
    assert "1 unfinished or rejected" in serving_cells.check(frame)
    with pytest.raises(ResultsError, match="1 workflows differ"):
        serving_cells.check(frame.assign(status="finished"))


# --- the two experiments ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def pressure():
    cells = [
        ({"load": load, "policy": name}, replicate)
        for load in revise_serving.PRESSURE
        for name in ("suffix", "revise")
        for replicate in (0, 1)
    ]
    return _frame(revise_serving, cells)


def test_values_of_serving_have_every_claimed_row(pressure):
    values = {row["id"]: row for row in revise_serving.values(pressure)}
    claimed = {f"R19.{name}.{at}" for name in ("goodput", "p99") for at in ("1.0", "1.1", "1.3", "pooled")}
    assert claimed | {"R18.tokens", "R18.model_wall", "R20", "trend.goodput", "trend.p99"} <= values.keys()
    assert values["n_incorrect"]["value"] == 0
    assert values["R18.tokens"]["low"] <= values["R18.tokens"]["value"] <= values["R18.tokens"]["high"]
    assert "n_workflows 25" in values["R20"]["value"], "a smaller run does not claim the published design"


def test_the_published_design_is_recognised():
    grid = pd.MultiIndex.from_product([revise_serving.LOADS, ["suffix", "revise"], range(3)])
    pair = pd.DataFrame(list(grid), columns=["load", "policy", "replicate"])
    pair = pair.assign(n_workflows=500, n_tenants=64, n_replicas=4, revised_share=0.5)
    assert revise_serving._design(pair) == "as published"
    assert revise_serving._design(pair[pair["replicate"] < 2]) == "replicate 0, 1"


def test_tables_and_figures_of_serving(pressure):
    levels, changes = revise_serving.levels(pressure), revise_serving.changes(revise_serving.compare(pressure))
    assert set(levels["policy"]) == {"suffix", "revise"}
    assert (levels["n_running"] > 0).any()
    assert len(changes) == 4 * len(revise_serving.PRESSURE)
    figure = serving_figures.pressure(levels, changes, revise_serving.published())
    assert [ax.get_title(loc="left") for ax in figure.axes[:4]] == ["within 15 s", "within 25 s", "within 40 s", "p99"]
    serving_figures.load_over_time(pressure[pressure["replicate"] == 0], 1_000_000)
    lines = revise_serving.verdicts(changes, revise_serving.trends(revise_serving.compare(pressure)))
    assert len(lines) == 2
    assert all("permutation" not in line and " p = " in line for line in lines)


def test_frequency_without_revisions_changes_nothing_and_with_them_saves():
    frame = _frame(
        revise_frequency,
        [({"revised_share": share, "policy": name}, 0) for share in (0.0, 0.5, 1.0) for name in ("suffix", "revise")],
    )
    values = {row["id"]: row for row in revise_frequency.values(frame)}
    still = values["R21.no_revision_wall"]
    assert (still["value"], still["low"], still["high"]) == (0, 0, 0)
    assert values["R21.tokens.50"]["value"] > 0
    revised = frame[frame["policy"] == "suffix"].pivot_table(
        index="workflow", columns="revised_share", values="revised"
    )
    assert (revised[0.5] <= revised[1.0]).all(), "who is revised at one share is revised at every higher one"
    serving_figures.frequency(revise_frequency.savings(frame), {0.5: (12.0, 14.0)})
    serving_figures.sensitivity(revise_frequency.savings(frame).query("revised_share == 0.5"))


def test_lengths_move_the_saving_of_tokens():
    half = {"revised_share": 1.0}
    frame = _frame(
        revise_frequency,
        [
            ({**half, "policy": p, "lengths": how}, 0)
            for p in ("suffix", "revise")
            for how in ("equal", "short look-ups")
        ],
    )
    savings = revise_frequency.savings(frame).set_index("lengths")["tokens"]
    assert savings["short look-ups"] < savings["equal"]


@pytest.mark.slow
def test_the_benchmark_measures_runs(capsys):
    assert main(["bench", "serving", "--quick"]) == 0
    printed = capsys.readouterr().out
    assert "600 workflows x suffix, revise" in printed
    assert "ms CPU a workflow" in printed
