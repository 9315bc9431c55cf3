"""The StreamBench experiment: its sizes, its tables, what it says beside the published numbers, and its figures."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from revise_lab import lab
from revise_lab.lab import absorber_figures as draw
from revise_lab.lab import experiments
from revise_lab.lab.experiments import absorber_streambench as streambench
from revise_lab.lab.scorecard import claims
from revise_lab.workloads.streambench.methods import METHODS
from revise_lab.workloads.streambench.react import ToolServer

NAME = "absorber_streambench"
FATES = ["stale", "stale", "kept", "kept", "stale", "kept", "stale", "stale", "undone"]


@pytest.fixture(scope="module")
def frame():
    """The grid with one world, and some draws of the ablation, as a sweep would return them."""
    rows = []
    asked = [{"part": "grid", "revision": kind, "n_worlds": 1} for kind in streambench.TYPES]
    for given in [*asked, {"part": "ablation", "n_draws": 15}]:
        for method in METHODS:
            params = streambench.Params(method=method, **given)
            rows += [params.model_dump() | row for row in streambench.cell(params, seed=4, replicate=0)]
    return pd.DataFrame(rows)


def runs(profile, part):
    cells = [cell.params for cell in lab.load(NAME, profile).cells() if cell.params["part"] == part]
    return sum(cell.get("n_draws", 1) for cell in cells)


def test_the_paper_profile_has_the_published_sizes():
    assert runs("paper", "ablation") == 29_310
    assert runs("paper", "http") == 300
    assert runs("paper", "grid") == len(METHODS) * 5
    per_type = {kind: 3 * 3 * len(streambench.GRID_RATIOS[kind]) for kind in streambench.TYPES}
    assert list(per_type.values()) == [36, 36, 36, 18, 18]
    assert sum(per_type.values()) * 7 == 1_008


@pytest.mark.parametrize("profile", ["smoke", "quick", "paper"])
def test_the_estimate_covers_every_cell_and_the_profile_says_what_it_may_take(profile):
    config = lab.load(NAME, profile)
    total = sum(streambench.estimate(streambench.Params(**cell.params))["wall_s"] for cell in config.cells())
    assert 0 < total < config.budget_s


def test_the_published_tables_agree_with_each_other_only_under_36_36_36_18_18():
    weights = np.array([36, 36, 36, 18, 18])
    table = streambench.published().pivot(index="method", columns="kind", values="published_quality")
    by_type = table[[*streambench.TYPES]].to_numpy()
    assert np.average(by_type, axis=1, weights=weights) == pytest.approx(table[""].to_numpy(), abs=0.006)
    assert abs(by_type.mean(axis=1) - table[""]).max() > 0.05, "equal weights do not give it"


def test_the_published_corpus_does_not_add_up(frame):
    table = streambench.corpus(frame).set_index("runs")
    assert table.loc["sum of the parts", "published"] == 30_842
    assert table.loc["total as stated", "published"] == 30_561
    assert table.loc["erratum: stated - sum", "published"] == -281
    assert table.loc[streambench.CORPUS["deepseek"], "ours"] == 7 * 48


def test_rows_are_what_the_columns_say_and_every_method_meets_the_same_settings(frame):
    assert list(frame.columns) == [*streambench.Params.model_fields, *streambench.COLUMNS]
    settings = ["part", "scenario", "rho", "kind", "world", "at", "attention"]
    first = frame[frame["method"] == "absorber"][settings].to_numpy().tolist()
    for method in METHODS:
        assert frame[frame["method"] == method][settings].to_numpy().tolist() == first
    assert {"method", "k", "endpoint", "model"} == set(experiments.get(NAME).not_in_seed)
    assert frame["theorem_3"].all()
    assert frame["converged"].all()


def test_the_ablation_varies_what_it_says(frame):
    drawn = streambench.ablation(frame)
    assert drawn["at"].nunique() > 5
    assert drawn[["scenario", "rho", "kind", "attention"]].nunique().min() >= 3
    other = drawn.assign(method="checkpoint_k", k=3)
    assert set(streambench.ablation(other)["arm"]) == {"checkpoint_k=3"}


def test_the_values_answer_claims_and_the_structure_is_as_published(frame):
    found = {row["id"]: row for row in streambench.values(frame)}
    assert set(found) <= {row["id"] for row in claims()}
    assert found["S02"]["value"] == pytest.approx(9 / 0.8125)
    assert found["S01.absorber.wasted"]["value"] == found["S01.absorber.compensations"]["value"] == 0.8125
    case = [found[f"S05.{name}"]["value"] for name in ("absorber_kept", "absorber_compensated", "absorber_waste")]
    assert case == [8, 1, 1]
    assert found["S05.restart_discarded"]["value"] == 9
    assert (found["S06.stated_total"]["value"], found["S06.stated_total"]["source"]) == (30_842, "published")
    rest = {row["id"] for row in claims() if row["experiment"] == NAME} - set(found)
    models = {"S06.haiku", "S06.gpt4omini", "S07.deepseek_v3", "S07.haiku_4_5", "S07.gpt_4o_mini"}
    assert rest == models, "what needs a model"
    assert all(row["low"] <= row["value"] <= row["high"] for row in found.values())


def test_cohens_d_and_its_interval_are_those_of_the_definition(frame):
    rows = streambench.grid(frame)
    table = streambench.effects(rows).set_index("pair")
    a, b = (rows[rows["method"] == method]["quality"].to_numpy() for method in ("absorber", "naive"))
    d = (a.mean() - b.mean()) / np.sqrt((a.var(ddof=1) + b.var(ddof=1)) / 2)
    assert table.loc["quality_absorber_naive", "d"] == pytest.approx(d)
    assert (table["low"] <= table["d"]).all()
    assert (table["d"] <= table["high"]).all()
    assert table.equals(streambench.effects(rows).set_index("pair")), "seeded"


def test_the_stale_example_names_what_each_act_was_derived_from():
    table = streambench.stale_example(streambench.case_study("absorber"))
    direct = table[table["read"] == "style"]
    assert set(direct["act"]) == {"search_venues", "search_caterers", "draft_plan", "draft_menu"}
    assert set(direct["was"]) == {"indoor dinner"}
    assert set(direct["is"]) == {"outdoor barbecue"}
    assert set(table[table["act"] == "draft_budget"]["read"]) == {"search_venues.amount", "search_caterers.amount"}
    assert streambench.stale_example(streambench.case_study("revise")).empty


def test_the_fates_of_the_case_study_are_those_of_the_paper():
    fates = streambench.fates(streambench.case_study("absorber"))
    assert fates["fate"].tolist() == FATES + ["after"] * 7
    assert streambench.fates(streambench.case_study("naive"))["fate"].tolist()[8] == "stale", "the proposal stands"
    restart = streambench.fates(streambench.case_study("full_restart"))["fate"].tolist()
    assert restart == ["forgotten"] * 4 + ["undone"] * 5 + ["after"] * 15


def test_the_figures_show_what_is_in_the_tables(frame):
    rows = streambench.grid(frame)
    one, three = streambench.means(rows), streambench.means(rows, ("method", "kind"))
    heat = draw.heatmap(three, METHODS, streambench.TYPES)
    shown = [text.get_text() for text in heat.axes[0].texts]
    order = three.set_index(["method", "kind"])["quality"]
    assert shown == [f"{order[method, kind]:.2f}" for method in METHODS for kind in streambench.TYPES]
    fates = streambench.fates(streambench.case_study("absorber"))
    line = draw.timeline(fates, ["absorber"], at=9)
    assert [text.get_text() for text in line.axes[0].texts] == fates["class"].tolist()
    drawn = draw.moment(streambench.ablation(frame), ["absorber", "revise"])
    assert [len(ax.lines) for ax in drawn.axes] == [2, 2, 2]
    marks = draw.frontier(streambench.beside_published(one)).axes[0]
    assert {round(float(bar[0].get_ydata()[0]), 6) for bar in marks.containers} == {round(q, 6) for q in one["quality"]}
    beside = streambench.beside_published(three)
    assert beside["published_quality"].notna().sum() == 25
    assert len(beside) == len(three)


def test_a_model_at_an_endpoint_acts_and_judges(frame):
    """The endpoint is scripted: its acts are those of the deterministic agent, its scores mean nothing."""
    asked = {"part": "grid", "method": "absorber", "revision": "cancellation", "n_worlds": 1}
    with ToolServer() as server:
        there = streambench.Params(endpoint=server.url, **asked)
        assert streambench.estimate(there)["calls"] > 100
        rows = streambench.cell(there, seed=4, replicate=0)
        n_scored = len(server.log) - sum(row["n_http_calls"] for row in rows)
    assert streambench.usage(rows)["calls"] == len(server.log)
    assert n_scored == 3 * len(rows) == 18
    assert all(1 <= row["quality_model"] <= 5 for row in rows)
    emulated = frame[
        (frame["part"] == "grid") & (frame["method"] == "absorber") & (frame["revision"] == "cancellation")
    ]
    for column in ("quality", "n_wasted", "n_acts", "n_stale_kept"):
        assert [row[column] for row in rows] == emulated[column].tolist()
    measured = pd.DataFrame([there.model_dump() | row for row in rows])
    assert sorted(streambench.grid(measured)["quality"]) == sorted(measured["quality_model"])
    assert {row["source"].partition(" ")[0] for row in streambench.values(measured)} <= {"measured", "by", "published"}


def test_what_a_model_gains_answers_its_row(frame):
    named = frame.assign(model="DeepSeek-V3", endpoint="http://there/v1", quality_model=frame["quality"])
    found = {row["id"]: row for row in streambench.values(named)}
    one = named[named["part"] == "grid"].groupby("method")["quality"].mean()
    assert found["S07.deepseek_v3"]["value"] == pytest.approx(one["absorber"] - one["naive"])
    assert found["S07.deepseek_v3"]["source"] == "measured (DeepSeek-V3 at http://there/v1)"


@pytest.mark.slow
def test_draws_of_the_grid_are_the_same_over_http():
    params = streambench.Params(part="http", method="absorber", n_draws=6)
    rows = streambench.cell(params, seed=1, replicate=0)
    assert [row["same_trace"] for row in rows] == ["yes"] * 6
    assert all(row["n_http_calls"] >= row["n_acts"] + 1 for row in rows)
