"""The conditions experiment: its cells count what they say, its tables and figures follow, its values meet the claims."""

from __future__ import annotations

import math

import numpy as np
import pandas as pd
import pytest

from revise_lab import lab
from revise_lab.errors import ConfigError
from revise_lab.lab import condition_figures as figures
from revise_lab.lab.bench import conditions as bench
from revise_lab.lab.experiments import conditions_revalidation as experiment
from revise_lab.lab.experiments import get
from revise_lab.records.condition import Verdict


def rows(seed=1, **params):
    params = experiment.Params(**params)
    return [params.model_dump() | row for row in experiment.cell(params, seed, 0)]


@pytest.fixture(scope="module")
def frame():
    made = []
    for how in ("selective", "full_rescan", "no_check"):
        made += rows(part="executions", how=how, desk="order", n=2)
    made += [row for how in ("selective", "full_rescan") for row in rows(part="durable", how=how)]
    made += [row for how in ("selective", "full_rescan") for row in rows(part="refund", how=how)]
    made += [row for how in ("selective", "target_only") for row in rows(part="history", how=how, n=3)]
    for omitted in (0.0, 0.1, 0.3):
        made += rows(part="omission", omitted=omitted, n=40)
    made += rows(part="omission", omitted=0.3, noticed=True, n=40)
    made += rows(part="growth", sizes=(13, 253), n=20)
    return pd.DataFrame(made)


def test_every_row_has_the_columns_that_are_declared(frame):
    declared = get("conditions_revalidation")
    assert set(frame.columns) == set(declared.params) | set(declared.columns)
    counts = [name for name, column in declared.columns.items() if column.dtype == "int"]
    assert (frame[counts] >= 0).all().all()


def test_every_way_of_checking_meets_the_same_cases(frame):
    table = experiment.outcomes(frame).set_index("how")
    assert list(table.index) == ["selective", "full_rescan", "no_check"]
    assert (table["n_cases"] == 30).all()
    verdicts = [f"n_{verdict.lower()}" for verdict in Verdict]
    assert (table[verdicts].sum(axis=1) == 30).all()
    assert (
        (table.loc[["selective", "full_rescan"], ["n_false_allow", "n_false_block", "n_wrong_verdict"]] == 0)
        .all()
        .all()
    )
    # What no check lets through is what the others hold back.
    assert table.loc["no_check", "n_false_allow"] == 30 - table.loc["selective", "n_released"] > 0
    assert table.loc["selective", "evaluated_each"] < 2 < 7 <= table.loc["full_rescan", "evaluated_each"]
    assert list(table.loc["selective", verdicts]) == list(table.loc["full_rescan", verdicts])


def test_ten_durable_changes_evaluate_six_conditions_and_a_rescan_sixty(frame):
    table = experiment.durable(frame)
    assert (len(table), table.iloc[-1]["selective"], table.iloc[-1]["full_rescan"]) == (11, 0.6, 6.0)


def test_a_policy_that_falls_after_the_last_check_is_seen_only_where_it_is_a_premise(frame):
    table = experiment.history(frame).set_index("covered")
    assert table.loc["written row"].tolist() == [3, 3, 3]
    assert table.loc["every premise"].tolist() == [3, 0, 0]


def test_what_is_lost_at_one_probability_is_lost_at_every_larger_one(frame):
    table = experiment.omissions(frame)
    unnoticed = table[~table["noticed"]]
    assert unnoticed["false_allow"].is_monotonic_increasing
    assert unnoticed["false_allow"].iloc[0] == 0
    coins = np.random.default_rng(1).random(40)
    assert list(40 * unnoticed["false_allow"]) == pytest.approx([0, (coins < 0.1).sum(), (coins < 0.3).sum()])
    assert table[table["noticed"]]["false_allow"].tolist() == [0]


def test_the_price_at_which_replanning_is_cheaper():
    def row(part, n, released, allowed, omitted=0.0):
        return {"part": part, "how": "selective", "omitted": omitted, "noticed": False, "n_cases": n, "n_released": released,
                "n_false_allow": allowed, "n_evaluated": n}  # fmt: skip

    frame = pd.DataFrame(
        [row("executions", 150, 90, 0), row("omission", 100, 15, 15, 0.15), row("omission", 100, 0, 0)]
    )
    (found,) = experiment.region(frame).to_dict("records")
    # 60 of 150 are not released; of fifteen kinds one loses 15 %: 1 % of all, which is then not stopped either.
    assert found["false_allow"] == pytest.approx(0.01)
    assert found["stopped"] == pytest.approx(0.39)
    assert found["break_even"] == pytest.approx((1 - 0.39) / 0.01)
    # At the break-even price both cost the same: one replan for each action.
    assert found["stopped"] + found["false_allow"] * found["break_even"] == pytest.approx(1)
    assert found["break_even_low"] < found["break_even"] < found["break_even_high"] < math.inf


def test_values_belong_to_claims_and_those_that_need_no_size_are_met(frame):
    claims = {row["id"]: row for row in lab.claims() if row["experiment"] == "conditions_revalidation"}
    values = {row["id"]: row for row in experiment.values(frame)}
    assert set(values) < set(claims)
    assert {name for name in claims if name not in values} == {"A01.1", "A01.5", "A03.affected.4093", "A03.rescan.4093"}
    for name, value in values.items():
        assert value["unit"] == claims[name]["unit"], name
        if claims[name]["rule"] == "equal":
            assert value["value"] == claims[name]["value"], name
    assert values["A03.affected.13"]["source"] == "measured (this machine)"


def test_figures_are_saved_with_all_that_they_show(frame, tmp_path):
    drawn = {
        "omission": figures.omission(experiment.omissions(frame), [(1, 0.95)]),
        "growth": figures.growth(experiment.growth(frame), [(13, 8.8)]),
        "outcomes": figures.outcomes(experiment.outcomes(frame)),
        "region": figures.region(experiment.region(frame)),
    }
    for figure in drawn.values():
        figure.draw_without_rendering()
    paths = lab.save_figure(drawn["omission"], "omission", tmp_path, source="emulated")
    assert all(path.stat().st_size for path in paths)
    sizes = [len(line.get_xdata()) for line in drawn["omission"].axes[0].lines]
    assert sizes.count(3) >= 1, "one mark for each probability"
    legend = [text.get_text() for text in drawn["outcomes"].legends[0].get_texts()]
    assert legend == ["KEEP", "REFRESH", "REPLAN", "BLOCK", "false allow", "false block"]


def test_the_profiles_ask_for_what_is_published():
    paper = lab.load("conditions_revalidation", profile="paper")
    cells = [cell.params if hasattr(cell, "params") else cell for cell in paper.cells()]
    selective = [cell for cell in cells if cell["part"] == "executions" and cell["how"] == "selective"]
    assert sum(15 * cell["n"] for cell in selective) == 210_000
    for profile in ("smoke", "quick", "paper"):
        assert lab.load("conditions_revalidation", profile=profile).exclusive


def test_what_is_timed_is_one_condition_of_six_with_two_fields_read(monkeypatch):
    graph = bench.waiting(30)
    change = bench.Change(graph)
    assert len(graph.waiting["a"].action.conditions) == 6
    assert len(graph.waiting["a"].action.observed) == 30
    before = graph.n_evaluated
    assert change.affected() > 0
    assert change.affected(delta=False) > 0
    assert graph.n_evaluated == before + 2
    reads = graph.evaluations("a")["within"].reads
    assert [str(read.selector) for read in reads if read.selector.marker == "value"] == ["order.amount", "policy.limit"]
    assert change.rescan() > 0
    assert bench.full_rescan(graph.waiting["a"].action, {}, ()) is Verdict.REPLAN, "what cannot be told"
    monkeypatch.setattr(bench, "LIMITS", bench.LIMITS[::-1])
    with pytest.raises(AssertionError, match="must turn the verdict over"):
        change.rescan()


def test_the_rows_of_the_benchmark_stand_beside_the_yardstick(monkeypatch):
    found = bench.growth((13, 100), 40)
    assert {way: [len(samples) for samples in taken] for way, taken in found.items()} == {
        "affected only": [40, 40], "affected only, values compared": [40, 40], "full rescan": [40, 40],
    }  # fmt: skip
    monkeypatch.setattr(bench, "growth", lambda sizes, n, ways: {way: [[6.0]] * len(sizes) for way in ways})
    rows = bench.bench_conditions(quick=True)
    assert [row.met for row in rows] == [False] * 3 + [None] * 6, "6 us against a budget of 5"
    assert {row.case.split(",")[0] for row in bench.bench_conditions("rescan")} == {"full rescan"}
    with pytest.raises(ConfigError, match="affected only; affected only, values compared; full rescan"):
        bench.bench_conditions("nothing")
