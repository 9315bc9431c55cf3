"""The closed form against the table of measured kernels, and the profiles as data."""

from __future__ import annotations

import json

import numpy as np
import pytest

from revise_lab.errors import ConfigError
from revise_lab.serving.cost import FITTED, errors, fit, kernel_table, load, step_s

H100 = load("h100-qwen3-14b-sglang")


def mape(found):
    return 100 * float(np.mean(np.abs(found)))


def test_the_closed_form_meets_the_kernel_table(capsys):
    rows = kernel_table()
    assert len(rows) == 46
    found = errors(H100, rows)
    with capsys.disabled():
        print(f"\nerror of the shipped profile: {mape(found):.1f} %", end="")
        print(
            f" (decode {mape(found[:40]):.1f} %, prefill {mape(found[40:]):.1f} %, worst {100 * max(map(abs, found)):.1f} %)"
        )
    assert mape(found) <= 5.0
    assert mape(found[:40]) <= 5.0


def test_a_row_that_the_fit_has_not_seen_is_met_as_well(capsys):
    rows = kernel_table()
    left_out = [errors(fit(rows[:i] + rows[i + 1 :], H100), [row])[0] for i, row in enumerate(rows)]
    with capsys.disabled():
        print(f"\nleave one row out: {mape(left_out):.1f} %, worst {100 * max(map(abs, left_out)):.1f} %")
    assert mape(left_out) <= 5.0


def test_a_fit_recovers_known_parameters():
    wanted = H100.with_(weights_efficiency=0.6, compute_efficiency=0.5, kv_efficiency=0.8, attention_efficiency=1.0)
    rows = [row._replace(seconds=step_s(wanted, *row[:4])) for row in kernel_table()]
    found = fit(rows, H100)
    for name in FITTED:
        assert getattr(found, name) == pytest.approx(getattr(wanted, name), rel=1e-3), name
        assert found.sources[name] == "fitted"


def test_the_weights_set_the_floor_and_every_term_adds():
    floor = step_s(H100, 0, 1)
    assert 0.0112 < floor < 0.0116
    assert step_s(H100, 0, 64, 64 * 1024) > step_s(H100, 0, 64) > floor
    assert step_s(H100, 2048, 0, 0, 2048 * 1024) > step_s(H100, 2048, 0)
    assert step_s(H100.with_(host_s=0.002), 0, 1) == pytest.approx(floor + 0.002)


@pytest.mark.parametrize("name", ["h100-qwen3-14b-sglang", "h100-qwen3-14b-sglang-host"])
def test_a_profile_says_where_every_number_comes_from(name, tmp_path):
    profile = load(name)
    numbers = {key for key, value in vars(profile).items() if isinstance(value, int | float) and key != "calibrated"}
    assert numbers <= profile.sources.keys()
    assert not profile.calibrated
    assert profile.label == f"emulated ({name})"
    low, high = profile.bands["host_s"]
    assert low <= profile.host_s <= high
    profile.save(tmp_path / "mine.json")
    again = load(str(tmp_path / "mine.json"))
    assert again == profile
    assert (again.sources, again.bands) == (profile.sources, profile.bands)
    assert [each.name for each in tmp_path.iterdir()] == ["mine.json"]


def test_a_profile_without_a_source_or_with_a_wrong_name_is_refused(tmp_path):
    path = tmp_path / "bad.json"
    for entry in ({"host_s": {"value": 0.0}}, {"hosts": {"value": 0.0, "source": "measured"}}):
        path.write_text(json.dumps({"base": "h100-qwen3-14b-sglang", **entry}))
        with pytest.raises(ConfigError, match=next(iter(entry))):
            load(str(path))
    path.write_text(json.dumps({"name": "x"}))
    with pytest.raises(ConfigError, match="lacks"):
        load(str(path))
    with pytest.raises(ConfigError, match="h100-qwen3-14b-sglang"):
        load("a100")
    with pytest.raises(ConfigError, match="guessed"):
        H100.with_("guessed", host_s=1.0)
