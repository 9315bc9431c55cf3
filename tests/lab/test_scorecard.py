"""Every rule of the scorecard, met and missed, and where its values come from."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections import Counter

import pytest

from revise_lab.errors import ResultsError
from revise_lab.lab.scorecard import STANDINGS, claims, judge, scorecard


def row(rule, value, basis="free", unit="%", **more):
    return {"id": "R99", "value": value, "rule": rule, "basis": basis, "unit": unit, **more}


def ours(value, low=None, high=None, n=10_000, source="emulated"):
    return {"value": value, "low": low, "high": high, "n": n, "source": source}


def standing(claim, value, **more):
    return judge(claim, value, **more)[0]


@pytest.mark.parametrize(
    ("published", "unit", "value", "expected"),
    [
        (7.8, "calls", 7.84, "reproduced"),
        (7.8, "calls", 7.86, "differs"),
        (37.5, "%", 37.5, "reproduced"),
        (5825, "sessions", 5825, "reproduced"),
        (5825, "sessions", 5826, "differs"),
        (1.0, "share", 1.0, "reproduced"),
        (1.0, "share", 0.96, "differs"),  # 0.96 rounds to 1.0, but the claim is that every run was right
        (0, "%", 0.3, "differs"),
        (0.0, "acts", 0.04, "differs"),
        (100, "%", 99.9, "differs"),
        (1.0, "ratio", 0.97, "differs"),
        ("KEEP", "verdict", "KEEP", "reproduced"),
        ("KEEP", "verdict", "REPLAN", "differs"),
        (3.0, "calls", float("nan"), "not run"),
    ],
)
def test_equal(published, unit, value, expected):
    assert standing(row("equal", published, unit=unit), ours(value)) == expected


def test_equal_tells_a_smaller_n():
    assert judge(row("equal", 1.0, unit="share", n=171), ours(1.0, n=20)) == (
        "reproduced",
        "n = 20 of the 171 published",
    )


@pytest.mark.parametrize(
    ("interval", "n", "expected"),
    [
        ((12.0, 13.5), 15_000, "reproduced"),  # meets [12.86, 13.67], 1.5 wide
        ((12.0, 13.7), 15_000, "same direction"),  # 1.7 wide; at most 2 x 0.81 is allowed
        ((12.0, 13.5), 14_999, "same direction"),  # fewer than published
        ((11.0, 12.0), 15_000, "differs"),  # does not meet
        ((13.67, 14.0), 15_000, "reproduced"),  # touches
        ((None, None), 15_000, "differs"),
    ],
)
def test_overlap_against_a_published_interval(interval, n, expected):
    claim = row("overlap", 13.26, ci=[12.86, 13.67], n=15_000)
    assert standing(claim, ours(13.0, *interval, n=n)) == expected


def test_overlap_without_a_published_interval_takes_that_of_its_n():
    claim = row("overlap", 60, n=12_000, basis="by-construction")  # Wilson: 59.12 to 60.87
    assert standing(claim, ours(59.5, 58.8, 60.2, n=12_000)) == "by construction"
    assert standing(claim, ours(58.0, 57.5, 58.5, n=12_000)) == "differs"
    assert judge(claim, ours(60.0, 55.0, 65.0, n=12_000)) == (
        "same direction", "our interval is 10 wide, more than the 3.51 allowed",
    )  # fmt: skip


def test_overlap_without_interval_and_n_is_bounded_all_the_same():
    claim = row("overlap", 0.95)  # means 0.945 to 0.955
    assert standing(claim, ours(1.0, 0.8, 1.2)) == "reproduced"
    assert standing(claim, ours(1.5, 0.5, 2.5)) == "same direction", "wide enough to meet anything"
    assert standing(claim, ours(1.2, 1.0, 1.4)) == "differs"


@pytest.mark.parametrize(
    ("published", "low", "high", "expected"),
    [
        (12.9, 1.0, 30.0, "same direction"),
        (12.9, -0.1, 30.0, "differs"),
        (-13.8, -9.0, -0.5, "same direction"),
        (-13.8, -9.0, 0.0, "differs"),
        (-13.8, 5.0, 9.0, "differs"),
    ],
)
def test_sign(published, low, high, expected):
    assert standing(row("sign", published), ours((low + high) / 2, low, high)) == expected


def test_sign_of_a_matched_workload_is_by_construction():
    assert standing(row("sign", 12.9, "by-construction"), ours(12.0, 8.0, 16.0)) == "by construction"


def test_sign_against_another_number_than_zero():
    claim = row("sign", 14.6, unit="ratio", above=10)
    assert standing(claim, ours(12, 11, 13)) == "same direction"
    assert judge(claim, ours(12, 9, 15)) == ("differs", "our interval does not lie on the published side of 10")
    small = row("sign", 0.2, unit="d", within=0.2)
    assert standing(small, ours(-0.1, -0.3, 0.1)) == "same direction"
    assert standing(small, ours(0.4, 0.3, 0.5)) == "differs"


@pytest.mark.parametrize(
    ("low", "high", "n", "expected"),
    [(-0.2, 0.3, 24_000, "reproduced"), (0.0, 0.0, 24_000, "reproduced"), (0.01, 0.3, 24_000, "differs"),
     (-0.2, 0.3, 100, "same direction")],
)  # fmt: skip
def test_overlap_zero(low, high, n, expected):
    assert standing(row("overlap_zero", 0.013, n=24_000), ours(low, low, high, n=n)) == expected


def test_design_that_was_not_run_is_not_run():
    claim = row("design", "as published", unit="design")
    assert standing(claim, ours("as published")) == "reproduced"
    assert judge(claim, ours("2 rates, 40 workflows")) == (
        "not run", "the published design takes --profile paper; what ran: 2 rates, 40 workflows",
    )  # fmt: skip


def test_info_is_printed_and_not_judged():
    assert judge(row("info", 0.0026, unit="ms"), ours(9.9)) == ("info", "printed, not judged")


def test_order():
    assert judge(row("order", 3.6), ours(9.0), same_order=True) == ("same direction", "")
    assert judge(row("order", 3.6), ours(9.0), same_order=False) == ("differs", "the methods rank differently")
    assert standing(row("order", 3.6), ours(9.0), same_order=None) == "not run"


@pytest.mark.parametrize(
    ("basis", "need"), [("needs-data", "data that you bring"), ("needs-hardware", "a real endpoint")]
)
def test_an_emulation_never_stands_in_for_data_or_hardware(basis, need):
    claim = row("equal", 30, basis)
    assert judge(claim, None)[1].startswith(f"needs {need}")
    assert judge(claim, ours(30)) == ("not run", judge(claim, None)[1] + "; the value beside is emulated")
    assert standing(claim, ours(30, source="measured (vLLM)")) == "reproduced"


# --- the file of claims


def test_claims_are_whole_and_well_formed():
    rows = claims()
    assert len(rows) == len({row["id"] for row in rows}) == 226
    assert Counter(row["id"][0] for row in rows) == {"R": 112, "A": 17, "S": 97}
    for one in rows:
        assert {"id", "where", "metric", "value", "unit", "rule", "basis", "experiment"} <= set(one)
        assert one["rule"] in ("equal", "overlap", "sign", "overlap_zero", "order", "design", "info")
        assert one["basis"] in ("free", "by-construction", "needs-data", "needs-hardware")
        assert ("ci" not in one) or one["ci"][0] <= one["value"] <= one["ci"][1]
    assert {row["id"]: row["value"] for row in rows}["R18.tokens"] == 13.26


def test_missing_claims_are_named(tmp_path):
    with pytest.raises(ResultsError, match=re.escape(f"the published values are not at '{tmp_path / 'no.yaml'}'")):
        claims(tmp_path / "no.yaml")


# --- where values come from


def leave_run(results, name, values, experiment="revise_provenance", **manifest):
    run = results / "runs" / experiment / name
    run.mkdir(parents=True)
    stamp = {"experiment": experiment, "profile": name.split("-")[0], "cells": {}, "failed": {}, "sweeps": []}
    stamp |= {"status": "complete", "started_utc": "2026-01-01", "finished_utc": "2026-01-01", "invalidated": None}
    (run / "manifest.json").write_text(json.dumps(stamp | manifest))
    (run / "values.json").write_text(json.dumps(values))


def value(name, number, **more):
    return {
        "id": name,
        "value": number,
        "low": number,
        "high": number,
        "n": 12_000,
        "unit": "%",
        "source": "emulated",
        **more,
    }


@pytest.fixture
def results(tmp_path):
    (tmp_path / "reference").mkdir()  # else the shipped one is used
    return tmp_path


def by_id(card):
    return {row["id"]: row for row in card}


def test_nothing_run_means_nothing_reproduced(results):
    card = scorecard(results)
    assert card.counts() == {name: 0 for name in STANDINGS} | {"not run": 226}
    assert all(row["why"] for row in card)
    why = by_id(card)
    assert why["R22.recompute.half"]["why"] == "run: revise-lab reproduce revise_provenance --profile quick"
    assert why["R23.events.timed"]["why"] == "needs data that you bring"
    assert why["R07.wall.restart"]["why"].startswith("needs a real endpoint")
    assert why["R01.total"]["why"] == "waits for the other rows of its table"


def test_the_largest_profile_wins_then_the_newest_and_only_complete_runs_count(results):
    leave_run(results, "smoke-aaaaaaaa", [value("R22.recompute.complete", 10.0)], finished_utc="2026-09-01")
    leave_run(results, "quick-bbbbbbbb", [value("R22.recompute.complete", 20.0)], finished_utc="2026-01-01")
    leave_run(results, "quick-cccccccc", [value("R22.recompute.complete", 50.0)], finished_utc="2026-02-01")
    leave_run(results, "paper-dddddddd", [value("R22.recompute.complete", 40.0)], status="partial")
    leave_run(results, "paper-eeeeeeee", [value("R22.recompute.complete", 60.0)], invalidated="wrong seed")
    found = by_id(scorecard(results))["R22.recompute.complete"]
    assert (found["value"], found["run"]) == (50.0, "runs/revise_provenance/quick-cccccccc")
    assert found["standing"] == "by construction"
    assert by_id(scorecard(results))["R22.fallback.half"]["why"] == "the runs there are give no value for it"


def test_a_failed_run_is_told(results):
    leave_run(results, "quick-bbbbbbbb", [], status="failed")
    assert by_id(scorecard(results))["R22.recompute.half"]["why"].startswith("its last run is failed; run: revise-lab")


def test_reference_fills_in(results):
    folder = results / "reference" / "revise_provenance"
    folder.mkdir()
    (folder / "values.json").write_text(json.dumps([value("R22.fallback.unknown", 100.0)]))
    found = by_id(scorecard(results))["R22.fallback.unknown"]
    assert (found["standing"], found["run"]) == ("by construction", f"{results.name}/reference/revise_provenance")


def test_torn_values_are_named(results):
    leave_run(results, "quick-bbbbbbbb", [{"value": 3}])
    with pytest.raises(ResultsError, match=r"quick-bbbbbbbb.values\.json cannot be read: .*run the notebook again"):
        scorecard(results)


def test_the_total_needs_all_of_its_parts(results):
    parts = {"revise_langgraph": 171, "revise_llmcompiler": 288, "revise_replay": 180, "revise_correctness": 300}
    names = {"revise_langgraph": "integration", "revise_llmcompiler": "llmcompiler", "revise_replay": "replay",
             "revise_correctness": "adversarial"}  # fmt: skip
    for experiment, n in parts.items():
        leave_run(results, "paper-1", [value(f"R01.{names[experiment]}", 1.0, n=n)], experiment)
    assert by_id(scorecard(results))["R01.total"]["standing"] == "not run"
    leave_run(results, "paper-1", [value("R01.serving", 1.0, n=15_000)], "revise_serving")
    total = by_id(scorecard(results))["R01.total"]
    assert (total["value"], total["n"], total["standing"]) == (1.0, 15_939, "reproduced")


def test_rankings_are_judged_within_their_group(results):
    published = {"oracle": 3.94, "absorber": 3.6, "full_restart": 3.34, "naive": 3.63, "ignore": 3.19}
    same = [value(f"S03.{name}.additive.quality", number * 10) for name, number in published.items()]
    swapped = [value(f"S03.{name}.restrictive.quality", number) for name, number in published.items()]
    leave_run(results, "quick-1", same + swapped[:4], "absorber_streambench")
    card = by_id(scorecard(results))
    assert {card[f"S03.{name}.additive.quality"]["standing"] for name in published} == {"same direction"}
    assert card["S03.oracle.restrictive.quality"]["why"] == "other methods of the ranking have no value yet"
    leave_run(results, "paper-1", same + swapped, "absorber_streambench")
    assert by_id(scorecard(results))["S03.oracle.restrictive.quality"]["standing"] == "differs"


def test_text_and_html_show_values_and_collapse_what_was_not_run(results):
    leave_run(results, "quick-1", [value("R22.recompute.half", 81.52, low=80.9, high=82.1, source="<b>emulated</b>")])
    card = scorecard(results)
    text = str(card)
    assert re.search(r"R22\.recompute\.half +81\.7 +81\.52 \[80\.9, 82\.1\] % +n=12000 +.*by construction", text)
    assert "5 rows not run: the runs there are give no value for it" in text
    assert text.endswith(
        "0 reproduced, 1 by construction, 0 same direction, 0 differs, 225 not run, 0 info of 226 rows"
    )
    assert len(text.splitlines()) < 60
    page = card._repr_html_()
    assert "<td>R22.recompute.half</td>" in page
    assert "&lt;b&gt;emulated" in page
    assert sum(one["value"] for one in card.values()) == 226


def test_lab_is_light_and_its_functions_stay_functions():
    code = (
        "import sys; from revise_lab import lab; "
        "assert not {'numpy', 'pandas', 'matplotlib', 'pydantic'} & set(sys.modules), 'heavy'; "
        "import revise_lab.lab.scorecard, revise_lab.lab.sweep; "
        "assert callable(lab.scorecard) and callable(lab.sweep) and callable(lab.load); "
        "assert lab.figures.__name__ == 'revise_lab.lab.figures'; "
        "assert {'sweep', 'figures', 'compare'} <= set(dir(lab))"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
    from revise_lab import lab

    with pytest.raises(AttributeError, match="no attribute 'sweeep'"):
        lab.sweeep  # noqa: B018
