"""The adversarial matrix and the cost of certificates: what a row says is so, and a mistake would be seen."""

from __future__ import annotations

import runpy
import sys
from random import Random

import pandas as pd
import pytest

from revise_lab import lab
from revise_lab.audit.scenarios import SCENARIOS
from revise_lab.lab.experiments import revise_certificates as certificates
from revise_lab.lab.experiments import revise_correctness as correctness
from revise_lab.lab.mutants import FOLDER, mutants
from revise_lab.policies import policy
from revise_lab.runtime.explore import replay_line
from revise_lab.runtime.states import Merged

PLUS = {"policy": "revise_plus", "check": "digest", "release": "close"}
BOTH = [{"policy": "revise"}, PLUS]


def frame(module, *cells):
    """Return the rows of cells as a sweep stores them."""
    rows = []
    for number, given in enumerate(cells):
        params = module.Params(**given)
        for row in module.cell(params, 5, 0):
            rows.append({"cell_id": str(number), **params.model_dump(), **dict.fromkeys(module.COLUMNS), **row})
    return pd.DataFrame(rows)


@pytest.fixture(scope="module")
def walked():
    cases = [{"part": "schedules", "case": case, "n_schedules": 8, **how} for case in correctness.CASES for how in BOTH]
    return frame(correctness, *cases, {"part": "orders", "case": "late_read", "n_audit": 3, **PLUS})


@pytest.fixture(scope="module")
def mutated():
    sys.path.insert(0, str(FOLDER))
    try:
        return runpy.run_path(str(FOLDER / "test_mutants.py"))["mutated"]
    finally:
        sys.path.remove(str(FOLDER))


# --- schedules


def test_a_case_is_distinct_schedules_in_both_orders_and_none_is_wrong(walked):
    cases = correctness.by_case(walked)
    assert len(cases) == 12
    assert set(cases["case"]) == set(correctness.CASES)
    assert (cases[["n_schedules", "n_distinct", "n_correct"]] == 8).all(axis=None)
    assert (cases[["n_revision_first", "n_revision_last"]] == 4).all(axis=None)
    assert not cases[["n_stale_outputs", "n_stale_effects"]].any(axis=None)
    held = cases[cases["release"] == "close"]
    assert not held[["n_compensations", "visible_moves"]].any(axis=None), "what waits for the seal is never undone"
    assert (held.set_index("case")["delay_moves"] > 1).all()


def test_a_cell_is_a_function_of_its_seed():
    params = correctness.Params(part="schedules", case="control_route", n_schedules=6)
    assert correctness.cell(params, 3, 0) == correctness.cell(params, 3, 0)
    hashes = [{row["schedule"] for row in correctness.cell(params, seed, 0)} for seed in (3, 4)]
    assert hashes[0] != hashes[1]


@pytest.mark.parametrize("revision_first", [True, False])
def test_a_walk_has_the_order_that_was_asked_for_and_can_be_executed_again(revision_first):
    scenario, how = SCENARIOS["published_late_read"], policy("revise")
    runs = [
        correctness.walk(scenario, how, ("rev r1", "read A r.f"), Random(seed), revision_first=revision_first)
        for seed in range(12)
    ]
    kept = [run for run in runs if run is not None]
    assert len(kept) > 2
    for run in kept:
        assert (run.moves.index("rev r1") < run.moves.index("read A r.f")) is revision_first
        world, wrong = replay_line(scenario, "; ".join(run.moves), how)
        assert not wrong
        assert world.machine.journal == run.world.machine.journal


def test_delay_and_visible_staleness_are_counted_in_moves():
    """The first effect leaves one move after its commit, the second four; the first is stale until it is undone."""
    line = "start A; read A r.f; finish A; send A/e; land A/e; answer A/e; rev r1; start A; read A r.f; finish A"
    line += "; compensate A/e; unland A/e; answer A/e; send A/e:1; land A/e:1; answer A/e:1; close"
    run = correctness.Walk(SCENARIOS["effect_revised"], policy("revise"))
    for move in line.split("; "):
        run.do(next(each for each in run.world.moves() if each == move or each == move.removesuffix(":1")))
    row = run.row()
    assert row["correct"], row["finding"]
    assert (row["n_dispatches"], row["delay_moves"]) == (2, 1 + 4)
    assert row["n_compensations"] == 1
    assert row["visible_moves"] == 5, "from the revision to the move before the target has undone it"


def test_ordered_pairs_that_were_seen_are_among_those_that_can_be(walked):
    merged = Merged(SCENARIOS["published_late_read"], policy("revise_plus"))
    possible = correctness.possible_pairs(merged)
    walks = (
        correctness.walk(merged.scenario, merged.how, ("rev r1", "read A r.f"), Random(seed), revision_first=True)
        for seed in range(20)
    )
    seen = set().union(*(run.pairs() for run in walks if run))
    assert seen < possible
    assert {("rev r1", "read A r.f"), ("read A r.f", "rev r1")} <= possible
    assert ("close", "rev r1") not in possible
    covered = correctness.coverage(walked)
    assert list(covered["n"]) == list(range(1, 9))
    assert covered["covered"].is_monotonic_increasing
    assert 0.3 < covered["covered"].iloc[-1] <= 1.0


def test_all_orders_are_counted_and_only_executed_ones_are_called_audited(walked):
    orders = correctness.orders(walked).set_index("scenario")
    assert list(orders.index) == ["published_late_read", *correctness.CASES["late_read"].others]
    assert orders["n_audited"].tolist() == [3, 3, 2]
    assert orders.loc["published_late_read", "n_interleavings"] == 441
    assert (orders["n_both_orders"] == orders["n_races"]).all()
    assert not orders["n_problems"].any()


# --- what would be seen


@pytest.mark.parametrize(
    ("case", "edit", "column"),
    [
        ("commit_race", ("core.effects:Effecting._may_send", "and run.settled", "and True"), "n_stale_effects"),
        ("membership_change", ("core.provenance:ReaderIndex.touch", "if cell.marker is _MEMBERS:", "if False:"),
         "n_stale_outputs"),
    ],
)  # fmt: skip
def test_a_mistake_in_the_package_shows_in_the_rows_and_in_the_values(mutated, case, edit, column):
    params = {"part": "schedules", "case": case, "n_schedules": 12}
    with mutated([edit]):
        rows = frame(correctness, params)
    assert rows[column].sum() > 0
    assert not rows["correct"].all()
    assert "start" in rows["finding"].dropna().iloc[0]
    values = {value["id"]: value["value"] for value in correctness.values(rows)}
    assert values["R01.adversarial"] < 1
    assert values[f"R02.{case}"] < 1
    assert frame(correctness, params)["correct"].all(), "and nothing is left of it"


def test_the_values_are_those_of_the_published_rules(walked):
    values = {value["id"]: value for value in correctness.values(walked)}
    assert set(values) == {"R01.adversarial", *(f"R02.{case}" for case in correctness.CASES)}
    assert (values["R01.adversarial"]["value"], values["R01.adversarial"]["n"]) == (1.0, 48)
    assert values["R02.late_read"]["low"] < 1.0
    one_sided = walked[walked["revision_first"].astype("boolean").fillna(value=False)]
    assert {value["value"] for value in correctness.values(one_sided) if value["id"] != "R01.adversarial"} == {0.0}


def test_every_run_is_stale_without_its_read_and_none_with_it():
    rows = frame(correctness, *({"part": "dropped", "share": share, "n_runs": 12} for share in (0.0, 1.0)))
    dropped = correctness.dropped(rows)
    assert dropped["stale"].tolist() == dropped["identity"].tolist() == [0.0, 1.0]
    assert dropped["holds"].all()


def test_mutants_come_from_a_checkout_or_not_at_all(tmp_path):
    table = mutants({"published_late_read", "late_read"})
    assert len(table) >= 2
    assert table["killed"].all()
    assert table["witness"].str.contains("start A").all()
    assert len(mutants(n_most=1)) == 1
    assert mutants(folder=tmp_path) is None


def test_three_hundred_distinct_schedules_are_asked_for_of_every_policy():
    cells = [
        cell.params for cell in lab.load("revise_correctness", "quick").cells() if cell.params["part"] == "schedules"
    ]
    settings = {(each["policy"], each["check"], each["release"]) for each in cells}
    assert len(settings) == 2 * 2 * 2 + 3 * 2
    assert {setting[0] for setting in settings} == {"restart", "suffix", "revise", "revise_plus", "wait"}
    for setting in settings:
        here = [each for each in cells if (each["policy"], each["check"], each["release"]) == setting]
        assert sum(each["n_schedules"] for each in here) == 300
    by_policy = lab.load("revise_correctness", "smoke").cells()
    published = [
        cell.params for cell in by_policy if cell.params["part"] == "schedules" and cell.params["policy"] == "revise"
    ]
    assert sum(each["n_schedules"] for each in published) == 300


# --- certificates


@pytest.mark.slow
def test_every_part_times_what_its_rows_name():
    rows = frame(
        certificates,
        {"part": "check", "where": "the same artifact", "n_revisions": 1, "n_samples": 50},
        {"part": "check", "check": "digest", "where": "all that was read", "n_revisions": 2, "n_samples": 50},
        {"part": "unrelated", "sizes": (10, 100), "n_samples": 50},
        {"part": "arrival", "check": "digest", "n_samples": 50},
        {"part": "plan", "sizes": (100, 200), "n_samples": 50},
    )
    assert (rows["p50_us"] > 0).all()
    assert (rows["p50_us"] <= rows["p95_us"]).all()
    sizes = rows.groupby("what")["size"].apply(list)
    assert sizes["planning"] == sizes["handle(Finish)"] == [100, 200]
    assert sizes["scanning all certificates"] == [200], "of the largest graph"
    assert sizes[certificates.CHECK] == [1, 2, 10, 100]
    assert set(rows.loc[rows["what"] == certificates.CHECK, "budget_us"]) == {1.0, 2.0}
    values = certificates.values(rows)
    assert [value["id"] for value in values] == ["R03.p50", "R03.p95", "R03.max", "R14.planner"]
    assert values[0]["value"] <= values[1]["value"] <= values[2]["value"]
    assert {value["source"] for value in values} == {"measured (this machine)"}
    assert values[0]["value"] == rows["p50_us"].iloc[0] / 1e3


def test_growth_is_fitted_over_sizes_and_misses_are_named():
    base = {"part": "unrelated", "check": "delta", "what": certificates.CHECK, "where": "nowhere", "n": 5}
    rows = [
        base | {"size": size, "p50_us": cost, "p95_us": cost, "max_us": cost, "budget_us": 1.0}
        for size, cost in ((10, 0.5), (1000, 5.0))
    ]
    costs = certificates.costs(pd.DataFrame(rows))
    assert costs["met"].tolist() == ["yes", "no"]
    growth = certificates.growth(costs)
    assert growth["exponent"].tolist() == [pytest.approx(0.5)]
    assert growth[["from", "to"]].to_numpy().tolist() == [[10, 1000]]
    assert certificates.growth(costs.head(1)).empty


def test_timing_cells_run_alone():
    for profile in ("smoke", "quick", "paper"):
        config = lab.load("revise_certificates", profile)
        assert config.exclusive
        assert config.source.startswith("measured")
