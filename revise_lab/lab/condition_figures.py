"""Figures of the conditions on pending actions: omission, growth, outcomes and where replanning always is cheaper."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from revise_lab.lab.figures import new_figure

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
#: Ways of answering a change, as they are drawn: colour, marker and line style.
WAYS = {
    "affected only": ("#D55E00", "^", "-"),
    "affected only, values compared": ("#D55E00", "v", ":"),
    "full rescan": ("#0072B2", "D", "-"),
}
_HOLLOW: Mapping[str, Any] = {
    "linestyle": "none", "marker": "o", "markersize": 8, "markerfacecolor": "none", "color": "#000000", "zorder": 5,
}  # fmt: skip


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
    looks = {
        False: ("lost unnoticed", "#D55E00", "^"),
        True: ("known to be partial", "#0072B2", "D"),
    }
    for noticed, part in table.groupby("noticed"):
        label, colour, marker = looks[bool(noticed)]
        share = 100 * part["false_allow"]
        spread = [(share - 100 * part["low"]).clip(0), (100 * part["high"] - share).clip(0)]
        at = 100 * part["omitted"]
        ax.errorbar(at, share, yerr=spread, label=label, color=colour, marker=marker, capsize=2, linestyle="none")
    end = 100 * table["omitted"].max()
    ax.plot([0, end], [0, end], color="#000000", linewidth=0.6, label="identity", zorder=1)
    points = list(published)
    if points:
        ax.plot(*zip(*points, strict=True), label="published", **_HOLLOW)
    ax.set(xlabel="critical edge lost (%)", ylabel="false allows (%)")
    ax.legend(loc="upper left")
    return figure


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
        colour, marker, line = WAYS[str(way)]
        spread = [0 * part["p50_us"], (part["p95_us"] - part["p50_us"]).clip(0)]
        ax.errorbar(
            part["size"], part["p50_us"], yerr=spread, label=way, color=colour, marker=marker, linestyle=line, capsize=2
        )
    points = list(published)
    if points:
        ax.plot(*zip(*points, strict=True), label="published", **_HOLLOW)
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
    names = [str(how).replace("_", " ") for how in table["how"]]
    start = 0 * table["n_cases"]
    for verdict, (colour, hatch) in VERDICTS.items():
        share = 100 * table[f"n_{verdict.lower()}"] / table["n_cases"]
        left.barh(names, share, left=start, color=colour, hatch=hatch, edgecolor="white", label=verdict, linewidth=0.3)
        start = start + share
    _errors(right, table, names)
    left.set(xlabel="verdicts (%)", xlim=(0, 100))
    left.invert_yaxis()
    for ax in (left, right):
        ax.grid(visible=False, axis="y")
    handles, labels = left.get_legend_handles_labels()
    more, others = right.get_legend_handles_labels()
    figure.legend([*handles, *more], [*labels, *others], loc="outside upper center", ncols=6)
    return figure


def _errors(ax: Axes, table: pd.DataFrame, names: list[str]) -> None:
    at = range(len(names))
    for shift, (column, label, colour) in enumerate(
        (("n_false_allow", "false allow", "#D55E00"), ("n_false_block", "false block", "#0072B2"))
    ):
        share = 100 * table[column] / table["n_cases"]
        places = [place + 0.36 * shift - 0.18 for place in at]
        ax.barh(places, share, height=0.34, color=colour, label=label)
        for place, value, count in zip(places, share, table[column], strict=True):
            ax.annotate(
                f"{count:,}", (value, place), xytext=(2, 0), textcoords="offset points", va="center", fontsize=6
            )
    ax.set(xlabel="wrong (%)", xlim=(0, max(10.0, 115 * float((table["n_false_block"] / table["n_cases"]).max()))))


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
    spread = [(even - table["break_even_low"]).clip(0), (table["break_even_high"].clip(upper=top) - even).clip(0)]
    ax.errorbar(at, even, yerr=spread, color="#D55E00", marker="^", capsize=2)
    ax.annotate("always replanning is cheaper", (float(at.mean()), top), xytext=(0, -10), textcoords="offset points",
                ha="center", va="top", fontsize=7)  # fmt: skip
    ax.annotate("revalidation is cheaper", (float(at.min()), float(even.min()) / 3), fontsize=7)
    ax.set(yscale="log", ylim=(float(even.min()) / 5, top), xlabel="critical edge lost (%)",
           ylabel="price of a false allow (replans)")  # fmt: skip
    return figure
