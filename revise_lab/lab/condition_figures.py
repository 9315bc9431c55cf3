"""Figures of the conditions on pending actions: omission, growth, outcomes and where replanning always is cheaper."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from revise_lab.lab.figures import HOLLOW, RULE, bars, legend_above, new_figure

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

#: How each verdict is filled: colour and hatch, so that grey prints tell them apart.
VERDICTS = {
    "KEEP": ("#009E73", ""),
    "REFRESH": ("#56B4E9", "//"),
    "REPLAN": ("#E69F00", ".."),
    "BLOCK": ("#666666", "xx"),
}
_LOSSES: Mapping[bool, Mapping[str, Any]] = {
    False: {"label": "lost unnoticed", "color": "#D55E00", "marker": "^"},
    True: {"label": "known to be partial", "color": "#0072B2", "marker": "D"},
}
_ERRORS = {"n_false_allow": ("false allow", "#D55E00"), "n_false_block": ("false block", "#0072B2")}
#: Ways of answering a change, as they are drawn.
WAYS: Mapping[str, Mapping[str, Any]] = {
    "affected only": {"color": "#D55E00", "marker": "^", "linestyle": "-"},
    "affected only, values compared": {"color": "#D55E00", "marker": "v", "linestyle": ":"},
    "full rescan": {"color": "#0072B2", "marker": "D", "linestyle": "-"},
}


def omission(table: pd.DataFrame, published: Iterable[tuple[float, float]] = ()) -> Figure:
    """Draw the share of false allows against the share of lost edges.

    Parameters
    ----------
    table : DataFrame
        As `omissions` of the experiment returns it, in shares of one.
    published : iterable of (lost, false allow)
        In percent; drawn hollow.
    """
    figure, ax = new_figure()
    share = table.assign(**{name: 100 * table[name] for name in ("omitted", "false_allow", "low", "high")})
    for noticed, part in share.groupby("noticed"):
        ends = (part["low"], part["high"])
        bars(ax, part["omitted"], part["false_allow"], y_ends=ends, linestyle="none", **_LOSSES[bool(noticed)])
    end = share["omitted"].max()
    ax.plot([0, end], [0, end], label="identity", **RULE)
    _published(ax, published)
    ax.set(xlabel="critical edge lost (%)", ylabel="false allows (%)")
    ax.legend(loc="upper left")
    return figure


def _published(ax: Axes, points: Iterable[tuple[float, float]]) -> None:
    if points := list(points):
        ax.plot(*zip(*points, strict=True), label="published", **HOLLOW)


def growth(table: pd.DataFrame, published: Iterable[tuple[int, float]] = ()) -> Figure:
    """Draw the median time of an answer against the number of unrelated reads, bars up to the 95th percentile.

    Parameters
    ----------
    table : DataFrame
        As `growth` of the experiment returns it.
    published : iterable of (reads, us)
        Drawn hollow; from another machine.
    """
    figure, ax = new_figure()
    for way, part in table.groupby("what", sort=False):
        bars(ax, part["size"], part["p50_us"], y_ends=(part["p50_us"], part["p95_us"]), label=way, **WAYS[str(way)])
    _published(ax, published)
    ax.set(xscale="log", yscale="log", xlabel="unrelated reads", ylabel="time to the verdict (us)")
    figure.legend(loc="outside upper left", ncols=2)
    return figure


def outcomes(table: pd.DataFrame) -> Figure:
    """Draw the mix of verdicts of each way of checking, and what it got wrong.

    Parameters
    ----------
    table : DataFrame
        As `outcomes` of the experiment returns it.
    """
    figure, (left, right) = new_figure("wide", 1, 2, height_in=2.3, sharey=True)
    share = table.filter(regex="^n_").div(table["n_cases"] / 100, axis=0)
    names, start = [str(how).replace("_", " ") for how in table["how"]], 0 * table["n_cases"]
    for verdict, (colour, hatch) in VERDICTS.items():
        width = share[f"n_{verdict.lower()}"]
        left.barh(names, width, left=start, color=colour, hatch=hatch, edgecolor="white", label=verdict, linewidth=0.3)
        start = start + width
    for shift, (column, (label, colour)) in enumerate(_ERRORS.items()):
        places = [place + 0.36 * shift - 0.18 for place in range(len(names))]
        drawn = right.barh(places, share[column], height=0.34, color=colour, label=label)
        right.bar_label(drawn, [f"{count:,}" for count in table[column]], padding=2, fontsize=6)
    left.set(xlabel="verdicts (%)", xlim=(0, 100))
    right.set(xlabel="wrong (%)", xlim=(0, max(10.0, 1.15 * float(share["n_false_block"].max()))))
    left.invert_yaxis()
    for ax in (left, right):
        ax.grid(visible=False, axis="y")
    legend_above(figure, ncols=6)
    return figure


def region(table: pd.DataFrame) -> Figure:
    """Draw from which price of a false allow on replanning always is cheaper than revalidation.

    Parameters
    ----------
    table : DataFrame
        As `region` of the experiment returns it; prices in replans.
    """
    figure, ax = new_figure()
    at, even = 100 * table["omitted"], table["break_even"]
    top = 10 * float(table["break_even_high"][table["break_even_high"] < float("inf")].max())
    ax.fill_between(at, even, top, color="#dddddd", zorder=0)
    ends = (table["break_even_low"], table["break_even_high"].clip(upper=top))
    bars(ax, at, even, y_ends=ends, color="#D55E00", marker="^")
    ax.annotate("always replanning is cheaper", (float(at.mean()), top), xytext=(0, -10), textcoords="offset points",
                ha="center", va="top", fontsize=7)  # fmt: skip
    ax.annotate("revalidation is cheaper", (float(at.min()), float(even.min()) / 3), fontsize=7)
    ax.set(yscale="log", ylim=(float(even.min()) / 5, top), xlabel="critical edge lost (%)",
           ylabel="price of a false allow (replans)")  # fmt: skip
    return figure
