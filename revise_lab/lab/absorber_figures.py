"""Figures of the StreamBench experiment: frontier, heatmap, timeline of a case, and the moment of the revision."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from matplotlib.patches import Patch

from revise_lab.lab.figures import PolicyStyle, bars, legend_above, lines, new_figure, policy_style

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

__all__ = ["frontier", "heatmap", "method_style", "moment", "timeline"]

#: What became of an act: the words of the legend, and how it is filled.
FATES: Mapping[str, tuple[str, Mapping[str, str]]] = {
    "kept": ("kept", {"facecolor": "#B8D8E8", "edgecolor": "#444444"}),
    "stale": ("kept, derived from what changed", {"facecolor": "#F2C14E", "edgecolor": "#444444", "hatch": "////"}),
    "undone": ("undone", {"facecolor": "#FFFFFF", "edgecolor": "#C0392B", "hatch": "xxxx"}),
    "forgotten": ("forgotten", {"facecolor": "#FFFFFF", "edgecolor": "#999999"}),
    "after": ("made after the revision", {"facecolor": "#DDEBDD", "edgecolor": "#444444"}),
}
_POLICIES = {"full_restart": "restart"}
"""Methods that are called otherwise among the policies."""
_PUBLISHED: Mapping[str, Any] = {"color": "#444444", "marker": "o", "markerfacecolor": "white", "linestyle": "none"}


def method_style(method: str) -> PolicyStyle:
    """Return the look of a method, that of the policy which does the same."""
    return policy_style(_POLICIES.get(method, method))


def frontier(table: pd.DataFrame) -> Figure:
    """Draw quality against wasted acts, one mark a method.

    Parameters
    ----------
    table : DataFrame
        Columns ``method``, ``quality``, ``wasted`` and the ends of both intervals (``quality_low`` and so on). Where there
        are ``published_quality`` and ``published_wasted`` as well, they are drawn hollow: another agent, another judge.

    Returns
    -------
    Figure
        One column wide.
    """
    figure, ax = new_figure("column", height_in=2.9)
    for row in table.to_dict("records"):
        mark = method_style(row["method"]).line() | {"linestyle": "none"}
        x_ends, y_ends = ((row[f"{name}_low"], row[f"{name}_high"]) for name in ("wasted", "quality"))
        bars(ax, row["wasted"], row["quality"], x_ends=x_ends, y_ends=y_ends, **mark)
        if "published_quality" in row:
            hollow = mark | {"label": "", "markerfacecolor": "white"}
            ax.plot(row["published_wasted"], row["published_quality"], **hollow)
    ax.set(xlabel="wasted acts a run", ylabel="quality (1 to 5)", ylim=(0.9, 5.2))
    legend_above(figure, {"published": _PUBLISHED} if "published_quality" in table else None, 2)
    return figure


def heatmap(
    table: pd.DataFrame,
    methods: Sequence[str],
    types: Sequence[str],
    value: str = "quality",
    label: str = "quality (1 to 5)",
) -> Figure:
    """Draw one measure by method and type of revision, with its numbers.

    Parameters
    ----------
    table : DataFrame
        Columns ``method``, ``kind`` and `value`.
    methods, types : sequence of str
        Rows and columns, in order.
    value, label : str
        Column, and the words of the scale.
    """
    import seaborn  # a second of import that the other figures need not pay

    figure, ax = new_figure("text", height_in=0.5 + 0.27 * len(methods))
    ax.grid(visible=False)
    seaborn.heatmap(
        table.pivot(index="method", columns="kind", values=value).loc[list(methods), list(types)].astype(float),
        xticklabels=[name.replace("_", " ") for name in types],
        yticklabels=[method_style(name).label for name in methods],
        annot=True,
        fmt=".2f",
        annot_kws={"size": 7},
        cmap="cividis",
        cbar_kws={"label": label},
        ax=ax,
    )
    ax.set(xlabel="", ylabel="")
    figure.get_layout_engine().set(rect=(0, 0, 1, 0.95))  # room for the line that names the source
    return figure


def timeline(fates: pd.DataFrame, methods: Sequence[str], at: int) -> Figure:
    """Draw what became of every act of one case, a row for each method.

    Parameters
    ----------
    fates : DataFrame
        Columns ``method``, ``n``, ``class`` and ``fate`` (a key of `FATES`).
    methods : sequence of str
        Rows, from the top.
    at : int
        The act right after which the revision came.
    """
    figure, ax = new_figure("wide", height_in=0.9 + 0.34 * len(methods))
    for row, method in enumerate(methods):
        for act in fates[fates["method"] == method].to_dict("records"):
            _, look = FATES[act["fate"]]
            ax.barh(row, 0.9, left=act["n"] - 0.45, height=0.7, linewidth=0.6, **look)
            box = {"facecolor": "white", "edgecolor": "none", "pad": 0.6} if "hatch" in look else None
            ax.text(act["n"], row, act["class"], ha="center", va="center", fontsize=7, bbox=box)
    ax.axvline(at + 0.5, color="#C0392B", linewidth=1.2)
    ax.set_xlim(0.4, float(fates["n"].max()) + 0.6)
    ax.set_yticks(range(len(methods)), [method_style(name).label for name in methods])
    ax.invert_yaxis()
    ax.set_xlabel("act (I inert, R reversible, K compensable, X irreversible); line: the revision")
    ax.grid(visible=False)
    handles = [Patch(label=label, linewidth=0.6, **look) for label, look in FATES.values()]
    figure.legend(handles=handles, loc="outside upper center", ncols=len(FATES))
    return figure


def moment(rows: pd.DataFrame, methods: Sequence[str], width: int = 3) -> Figure:
    """Draw quality, waste and stale acts kept against the moment of the revision.

    Parameters
    ----------
    rows : DataFrame
        Rows of the ablation: ``arm``, ``at``, ``quality``, ``n_wasted``, ``n_stale_kept``.
    methods : sequence of str
        Arms to draw.
    width : int
        Acts that share a point.
    """
    figure, axes = new_figure("wide", 1, 3, height_in=2.5, sharex=True)
    shown = rows[rows["arm"].isin(methods)].assign(at=(rows["at"] - 1) // width * width + (width + 1) / 2)
    labels = {"quality": "quality (1 to 5)", "n_wasted": "wasted acts", "n_stale_kept": "stale acts kept"}
    means = shown.replace({"arm": _POLICIES}).groupby(["arm", "at"], as_index=False)[list(labels)].mean()
    for ax, (column, label) in zip(axes, labels.items(), strict=True):
        lines(ax, means, "at", column, hue="arm")
        ax.set(xlabel="act before the revision", ylabel=label)
    legend_above(figure, ncols=len(methods))
    return figure
