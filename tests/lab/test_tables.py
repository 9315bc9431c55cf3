"""Tables as a reader of the paper and of the CSV sees them."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from revise_lab.errors import ConfigError
from revise_lab.lab import stats
from revise_lab.lab.rows import columns, grouped, value_row
from revise_lab.lab.tables import Column, save_table


@pytest.fixture
def frame():
    return pd.DataFrame(
        {
            "policy": ["revise_plus", "A & B", "50 %"],
            "calls": [4.4, 4.44, 7.8],
            "low": [4.1, 4.2, 7.0],
            "high": [4.9, 4.8, 8.0],
            "n": [5, 50, 1500],
            "speed_x": [1.5, np.nan, 2.25],
        }
    )


def body(tex):
    return [line for line in tex.splitlines() if line.endswith(r"\\")]


def test_latex_has_booktabs_units_arrows_and_escapes(tmp_path, frame):
    columns = {
        "policy": "Policy",
        "calls": Column("Calls", "calls", 1, "down"),
        "n": Column("Saved_n", "%", better="up"),
    }
    tex, _ = save_table(frame, "t", tmp_path, columns)
    text = tex.read_text()
    assert all(rule in text for rule in (r"\toprule", r"\midrule", r"\bottomrule", r"\begin{tabular}{lrr}"))
    head, *rows = body(text)
    assert head == r"Policy & Calls (calls) $\downarrow$ & Saved\_n (\%) $\uparrow$ \\"
    assert rows[0].startswith(r"revise\_plus & ")
    assert rows[1].startswith(r"A \& B & ")
    assert rows[2].startswith(r"50 \% & ")


def test_what_prints_the_same_is_bold_together(tmp_path, frame):
    _, *rows = body(
        save_table(frame, "t", tmp_path, {"calls": Column("Calls", digits=1, better="down")})[0].read_text()
    )
    assert rows == [r"\textbf{4.4} \\", r"\textbf{4.4} \\", r"7.8 \\"]
    _, *rows = body(
        save_table(frame, "t", tmp_path, {"calls": Column("Calls", digits=2, better="down")})[0].read_text()
    )
    assert rows == [r"\textbf{4.40} \\", r"4.44 \\", r"7.80 \\"]


def test_digits_follow_the_uncertainty(tmp_path, frame):
    columns = {"calls": Column("Calls", better="up", low="low", high="high")}
    _, *rows = body(save_table(frame, "t", tmp_path, columns)[0].read_text())
    assert rows == [r"4.40 [4.10, 4.90] \\", r"4.44 [4.20, 4.80] \\", r"\textbf{7.80 [7.00, 8.00]} \\"]
    wide = frame.assign(low=frame["calls"] - 30, high=frame["calls"] + 30)
    assert body(save_table(wide, "t", tmp_path, columns)[0].read_text())[1] == r"4 [-26, 34] \\"


def test_missing_values_are_dashes_and_never_best(tmp_path, frame):
    _, *rows = body(save_table(frame, "t", tmp_path, {"speed_x": Column("Speed", better="down")})[0].read_text())
    assert rows == [r"\textbf{1.50} \\", r"-- \\", r"2.25 \\"]


def test_whole_numbers_and_negative_zero(tmp_path):
    frame = pd.DataFrame({"n": [1500, 2], "change": [-0.001, -0.5]})
    _, *rows = body(save_table(frame, "t", tmp_path)[0].read_text())
    assert rows == [r"1,500 & 0.00 \\", r"2 & -0.50 \\"]


def test_csv_is_unrounded_with_interval_ends_and_units(tmp_path, frame):
    columns = {"policy": "Policy", "calls": Column("Calls", "calls", 0, low="low", high="high")}
    _, csv = save_table(frame, "t", tmp_path, columns)
    read = pd.read_csv(csv)
    assert list(read.columns) == ["Policy", "Calls (calls)", "Calls low", "Calls high"]
    assert read["Calls (calls)"].tolist() == [4.4, 4.44, 7.8]


def test_files_are_the_same_twice_and_nothing_else_is_left(tmp_path, frame):
    first = [path.read_bytes() for path in save_table(frame, "t", tmp_path)]
    assert [path.read_bytes() for path in save_table(frame, "t", tmp_path)] == first
    assert sorted(path.name for path in tmp_path.iterdir()) == ["t.csv", "t.tex"]


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"cals": "Calls"}, "has no column 'cals'; did you mean 'calls'"),
        ({"calls": Column("Calls", low="lowest", high="high")}, "has no column 'lowest'"),
        ({"calls": Column("Calls", better="higher")}, "better='higher' is neither 'up' nor 'down'"),
    ],
)
def test_slips_are_named(tmp_path, frame, columns, message):
    with pytest.raises(ConfigError, match=message):
        save_table(frame, "t", tmp_path, columns)
    with pytest.raises(ConfigError, match="without folders"):
        save_table(frame, "tables/t", tmp_path)


def test_rows_are_built_from_groups_and_intervals():
    frame = pd.DataFrame({"policy": ["wait", "revise", "revise"], "right": [1, 0, 1]})
    rows = [
        named | columns("share", stats.proportion(int(part["right"].sum()), len(part)))
        for named, part in grouped(frame, ["policy"], sort=False)
    ]
    assert [(row["policy"], row["share"]) for row in rows] == [("wait", 1.0), ("revise", 0.5)]
    assert list(rows[0]) == ["policy", "share", "share_low", "share_high"]
    assert list(value_row("R01", 1, 3, "share").values()) == ["R01", 1, None, None, 3, "share", "emulated"]
