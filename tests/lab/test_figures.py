"""What a publisher or a reader would send back: fonts, widths, colours, order, provenance of the values."""

from __future__ import annotations

import itertools
import json
import os
import re
import subprocess
import sys

import matplotlib as mpl
import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pypdf
import pytest

from revise_lab.errors import ConfigError
from revise_lab.lab import figures
from revise_lab.lab.figures import STYLES, WIDTHS_IN, curve, new_figure, policy_style, provenance, save_figure


@pytest.fixture(autouse=True)
def _own_style():
    with mpl.rc_context():
        figures.use_style()
        yield


@pytest.fixture
def frame():
    rows = [(policy, load, load * k) for k, policy in enumerate(("revise", "suffix"), 1) for load in (0.7, 1.0, 1.3)]
    frame = pd.DataFrame(rows, columns=["policy", "load", "p99_s"])
    return frame.assign(low=frame["p99_s"] - 0.1, high=frame["p99_s"] + 0.2)


def drawn(frame):
    return curve(frame, "load", "p99_s", low="low", high="high").figure


def test_fonts_are_truetype_even_after_the_defaults_were_restored(tmp_path, frame):
    mpl.rcdefaults()
    plt.style.use("default")
    assert mpl.rcParams["pdf.fonttype"] == 3
    pdf = save_figure(drawn(frame), "p99", tmp_path, source="emulated")[0].read_bytes()
    assert b"/Type3" not in pdf
    assert b"CIDFontType2" in pdf
    assert mpl.rcParams["pdf.fonttype"] == 3, "the save must not change the session"


def test_the_check_for_type_3_would_see_it(tmp_path, frame):
    mpl.rcdefaults()
    drawn(frame).savefig(tmp_path / "plain.pdf")
    assert b"/Type3" in (tmp_path / "plain.pdf").read_bytes()


@pytest.mark.parametrize(("width", "inches"), [*WIDTHS_IN.items(), (4.2, 4.2)])
def test_width_is_exact_whatever_the_session_says(tmp_path, frame, width, inches):
    mpl.rcParams["savefig.bbox"] = "tight"
    mpl.rcParams["savefig.dpi"] = 50
    pdf, svg, png, _ = save_figure(drawn(frame), "p99", tmp_path, width, source="emulated")
    assert float(pypdf.PdfReader(pdf).pages[0].mediabox.width) == pytest.approx(inches * 72, abs=1e-3)
    assert float(re.search(r'width="([\d.]+)pt"', svg.read_text())[1]) == pytest.approx(inches * 72, abs=1e-3)
    assert plt.imread(png).shape[1] == int(inches * 300 + 1e-9)


DRAW = """
import sys, pandas as pd
from revise_lab.lab import figures
figures.use_style()
frame = pd.DataFrame({"policy": ["revise"] * 3, "load": [0.7, 1.0, 1.3], "p99_s": [1.0, 2.0, 4.0]})
figures.save_figure(figures.curve(frame, "load", "p99_s").figure, "p99", sys.argv[1], source="emulated", data=frame)
"""


@pytest.mark.slow
def test_all_four_files_come_out_the_same_in_another_process(tmp_path):
    for seed in ("1", "2"):
        environment = {**os.environ, "PYTHONHASHSEED": seed, "SOURCE_DATE_EPOCH": seed}
        subprocess.run([sys.executable, "-c", DRAW, str(tmp_path / seed)], check=True, env=environment)
    names = sorted(path.name for path in (tmp_path / "1").iterdir())
    assert names == ["p99.json", "p99.pdf", "p99.png", "p99.svg"]
    assert all((tmp_path / "1" / name).read_bytes() == (tmp_path / "2" / name).read_bytes() for name in names)


def test_latex_text_is_refused_with_the_remedy(tmp_path, frame):
    mpl.rcParams["text.usetex"] = True
    with pytest.raises(ConfigError, match=r"figure 'p99': \d+ texts .* LaTeX .*use_style\(\) before drawing"):
        save_figure(drawn(frame), "p99", tmp_path, source="emulated")
    assert not list(tmp_path.iterdir())


def test_sidecar_says_what_the_figure_shows(tmp_path, frame):
    paths = save_figure(
        drawn(frame),
        "p99",
        tmp_path,
        claim="R19.p99.pooled",
        source="measured (vLLM, Qwen3-14B)",
        data=frame,
        caption="Tail latency.",
        interval={"kind": "95 % bootstrap", "n": 500, "unit": "workflow"},
        config_hash="1a2b3c4d",
    )
    said = json.loads(paths[-1].read_text())
    assert said["caption"].startswith(
        "Tail latency. Intervals: 95 % bootstrap, n = 500, resampled by workflow. Values: measured (vLLM, Qwen3-14B)."
    )
    assert (said["claim"], said["config_hash"], said["width_in"]) == ("R19.p99.pooled", "1a2b3c4d", 3.33)
    assert said["data_hash"] == figures.data_hash(frame)
    assert said["data_hash"] != figures.data_hash(frame.assign(p99_s=frame["p99_s"] + 1e-9))
    assert ("uncommitted" in said["caption"]) == bool(said["dirty"])
    assert "measured (vLLM, Qwen3-14B)" in paths[1].read_text(), "the figure itself says where its values are from"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"source": "simulated"}, "source 'simulated' is not one of emulated, measured, published, by construction"),
        ({"width": "colunm"}, "width 'colunm' is not one of column, ieee, text, wide"),
        ({"width": 90}, "not between 0.5 and 40 inches"),
        ({"name": "figures/p99"}, "must be a file stem without folders"),
    ],
)
def test_wrong_arguments_are_named(tmp_path, frame, change, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        save_figure(drawn(frame), **{"name": "p99", "folder": tmp_path, "source": "emulated", **change})


def test_text_on_the_x_axis_needs_an_order(frame):
    sizes = pd.DataFrame({"policy": "revise", "size": ["10", "9", "100"], "y": [1.0, 2.0, 3.0]})
    with pytest.raises(ConfigError, match=r"column 'size' holds text \(\['10', '9', '100'\]\).*pass order="):
        curve(sizes, "size", "y")
    with pytest.raises(ConfigError, match=r"order= leaves out \['100'\]"):
        curve(sizes, "size", "y", order=["9", "10"])
    ax = curve(sizes, "size", "y", order=["9", "10", "100"])
    assert [label.get_text() for label in ax.get_xticklabels()] == ["9", "10", "100"]
    assert ax.lines[0].get_ydata().tolist() == [2.0, 1.0, 3.0]


def test_curve_draws_each_policy_in_its_look_with_its_interval(frame):
    shuffled = frame.sample(frac=1, random_state=3)
    ax = curve(shuffled, "load", "p99_s", low="low", high="high")
    by_colour = {line.get_color(): line for line in ax.lines if line.get_marker() not in ("_", "|")}
    assert by_colour[STYLES["suffix"].colour].get_ydata() == pytest.approx([1.4, 2.0, 2.6])
    bars = ax.collections[1].get_segments()
    assert bars[0][:, 1] == pytest.approx([0.6, 0.9])
    assert {text.get_text() for text in ax.texts} == {"revise", "suffix"}, "up to four lines are labelled directly"
    assert ax.get_legend() is None
    with pytest.raises(ConfigError, match=r"no column \['p98_s'\]"):
        curve(frame, "load", "p98_s")


def test_a_bar_whose_end_is_beyond_its_value_or_without_limit_is_cut_or_left_out():
    _, ax = new_figure()
    figures.bars(ax, np.array([1.0, 2.0]), np.array([5.0, 6.0]), y_ends=(np.array([5.1, 4.0]), np.array([7.0, np.inf])))
    first, second = ax.collections[0].get_segments()
    assert first[:, 1].tolist() == [5.0, 7.0], "the lower end lies above the value"
    assert not len(second), "the upper end has no limit"


def test_lines_come_in_the_order_of_the_policies_and_share_one_legend(frame):
    figure, axes = new_figure("wide", 1, 2)
    for ax in axes:
        ends = figures.lines(
            ax, frame.assign(policy=frame["policy"].replace("revise", "other")), "load", "p99_s", scale=2
        )
    assert [(at, value, style.label) for at, value, style in ends] == [(1.3, 5.2, "suffix"), (1.3, 2.6, "other")]
    figures.legend_above(figure, {"published": figures.HOLLOW})
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["suffix", "other", "published"]


# Machado, Oliveira, Fernandes 2009: what an eye without M cones makes of linear RGB
DEUTERANOPIA = np.array(
    [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]]
)
TO_XYZ = np.array(
    [[0.4124564, 0.3575761, 0.1804375], [0.2126729, 0.7151522, 0.072175], [0.0193339, 0.119192, 0.9503041]]
)


def lab_colour(colour):
    rgb = np.array(mpl.colors.to_rgb(colour))
    linear = np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)
    xyz = TO_XYZ @ np.clip(DEUTERANOPIA @ linear, 0, 1) / np.array([0.95047, 1, 1.08883])
    x, y, z = np.where(xyz > (6 / 29) ** 3, np.cbrt(xyz), xyz / (3 * (6 / 29) ** 2) + 4 / 29)
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


def colour_difference(one, other):
    return float(np.linalg.norm(lab_colour(one) - lab_colour(other)))


def test_colour_distance_is_sane():
    assert colour_difference("#000000", "#ffffff") == pytest.approx(100, abs=0.1)
    assert colour_difference("#CC79A7", "#999999") < 10, "a pair that is known to be confused"


@pytest.mark.parametrize(("one", "other"), list(itertools.combinations(STYLES, 2)))
def test_two_policies_never_look_alike(one, other):
    a, b = STYLES[one], STYLES[other]
    assert a.marker != b.marker
    if a.colour == b.colour:
        assert a.dash != b.dash
    else:
        assert colour_difference(a.colour, b.colour) >= 15


def test_policies_have_their_published_names_and_others_a_stable_look():
    assert set(STYLES) == {
        "restart", "suffix", "revise", "revise_plus", "absorber", "wait", "naive", "ignore", "checkpoint_k", "interrupt",
        "foresight", "hindsight",
    }  # fmt: skip
    assert policy_style("revise_plus").label == "revise+"
    assert policy_style("foresight").label == "foresight (published: Oracle)"
    assert policy_style("my_policy") == policy_style("my_policy")
    assert policy_style("my_policy").colour not in {style.colour for style in STYLES.values()}


def provenance_frame():
    rows = []
    for family, matched in (("S12", True), ("layered", False)):
        for unit, coverage in itertools.product(("read", "field", "node"), (0.0, 0.5, 1.0)):
            recompute, fallback = figures.closed_form(unit, coverage)
            rows.append((family, matched, unit, coverage, "revise", recompute, fallback))
    frame = pd.DataFrame(
        rows, columns=["family", "matched", "unit", "coverage", "policy", "recompute_ratio", "fallback_share"]
    )
    for stem, column in (("recompute", "recompute_ratio"), ("fallback", "fallback_share")):
        frame[f"{stem}_low"], frame[f"{stem}_high"] = frame[column] - 0.01, frame[column] + 0.01
    return frame.assign(n=1000)


def test_settings_that_vary_are_told_apart():
    one = provenance_frame().assign(loss="coarse", arrival="last")
    frames = [
        one,
        one.assign(loss="unknown"),
        one.assign(arrival="uniform"),
        one.assign(loss="unknown", arrival="uniform"),
    ]
    lines = provenance(pd.concat(frames))[0].axes[0].get_legend_handles_labels()[0]
    looks = [(line[0].get_marker(), line[0].get_color(), line[0].get_linestyle()) for line in lines]
    assert len(set(looks)) == len(looks) == 4


def test_closed_form_meets_the_three_published_points():
    points = {c: figures.closed_form("read", c) for c in (0.0, 0.5, 1.0)}
    assert points[0.0] == (1.0, 1.0)
    assert [round(100 * value, 1) for value in points[0.5]] == [81.7, 60.0]
    assert points[1.0] == (0.5, 0.0)


def test_provenance_has_a_panel_per_unit_and_the_free_families_apart(tmp_path):
    published = [(0, 100, 100), (0.5, 81.7, 60), (1, 50, 0)]
    matched, free = provenance(provenance_frame(), published=published)
    titles = [ax.get_title(loc="left") for ax in matched.axes]
    assert titles == ["masked: read", "masked: field", "masked: node", "", "", ""]
    assert [ax.get_title(loc="left") for ax in free.axes] == ["family layered", ""]
    hollow = [[line for line in ax.lines if line.get_markersize() == 8] for ax in matched.axes]
    assert [len(lines) for lines in hollow] == [1, 0, 0, 1, 0, 0], "published points belong to masked reads only"
    assert hollow[0][0].get_markerfacecolor() == "none"
    assert hollow[0][0].get_ydata().tolist() == [100, 81.7, 50]
    assert hollow[3][0].get_ydata().tolist() == [100, 60, 0]
    for number, figure in enumerate((matched, free)):
        assert len(save_figure(figure, f"provenance_{number}", tmp_path, "wide", source="emulated")) == 4


def test_provenance_takes_another_closed_form_and_names_a_missing_column():
    frame = provenance_frame()
    matched, free = provenance(frame[frame["matched"]], closed={"node": lambda c: (0.25, 0.75)})
    assert free is None
    reference = [line for line in matched.axes[2].lines if len(line.get_xdata()) == 51]
    assert set(reference[0].get_ydata()) == {25.0}
    with pytest.raises(ConfigError, match=r"no column \['fallback_low'\]"):
        provenance(frame.drop(columns="fallback_low"))


def test_settings_that_vary_make_lines_of_their_own():
    frame = provenance_frame().assign(unknown="global")
    read = frame[frame["matched"] & (frame["unit"] == "read")]
    others = [read.assign(unknown="local", fallback_share=0.0), read.assign(family="S8")]
    matched, _ = provenance(pd.concat([frame, *others]))
    labels = [text.get_text() for text in matched.legends[0].get_texts()]
    assert labels == ["revise", "revise, unknown local", "revise, family S8", "closed form (revise)"]


def test_new_figure_is_outside_pyplot():
    before = plt.get_fignums()
    figure, axes = new_figure("wide", 1, 2)
    assert plt.get_fignums() == before
    assert figure.get_size_inches()[0] == 7.0
    assert len(axes) == 2
