"""Figures of the StreamBench experiment: frontier, heatmap, timeline of a case, and the moment of the revision."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from matplotlib.lines import Line2D

from revise_lab.lab.figures import PolicyStyle, new_figure, policy_style

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

__all__ = ["frontier", "heatmap", "method_style", "moment", "timeline"]

#: What became of an act: face colour, edge colour, hatch, and the words of the legend.
FATES: Mapping[str, tuple[str, str, str, str]] = {
    "kept": ("#B8D8E8", "#444444", "", "kept"),
    "stale": ("#F2C14E", "#444444", "////", "kept, derived from what changed"),
    "undone": ("#FFFFFF", "#C0392B", "xxxx", "undone"),
    "forgotten": ("#FFFFFF", "#999999", "", "forgotten"),
    "after": ("#DDEBDD", "#444444", "", "made after the revision"),
}


def method_style(method: str) -> PolicyStyle:
    """Return the look of a method, that of the policy which does the same."""
    return policy_style({"full_restart": "restart"}.get(method, method))


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
    handles = []
    for row in table.to_dict("records"):
        look = method_style(row["method"])
        ends = [
            [[max(0.0, row[name] - row[f"{name}_low"])], [max(0.0, row[f"{name}_high"] - row[name])]]
            for name in ("wasted", "quality")
        ]
        mark = {"color": look.colour, "marker": look.marker, "linestyle": "none"}
        ax.errorbar(row["wasted"], row["quality"], xerr=ends[0], yerr=ends[1], capsize=2, elinewidth=0.7, **mark)
        handles.append(Line2D([], [], label=look.label, **mark))
        if "published_quality" in row:
            ax.plot(row["published_wasted"], row["published_quality"], markerfacecolor="white", **mark)
    if "published_quality" in table:
        handles.append(
            Line2D([], [], color="#444444", marker="o", markerfacecolor="white", ls="none", label="published")
        )
    ax.set_xlabel("wasted acts a run")
    ax.set_ylabel("quality (1 to 5)")
    ax.set_ylim(0.9, 5.2)
    figure.legend(handles=handles, loc="outside upper center", ncols=2)
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
    matrix = table.pivot(index="method", columns="kind", values=value).loc[list(methods), list(types)].to_numpy(float)
    figure, ax = new_figure("text", height_in=0.5 + 0.27 * len(methods))
    image = ax.imshow(matrix, cmap="cividis", aspect="auto")
    low, high = image.get_clim()
    for (row, column), number in [(at, matrix[at]) for at in _places(matrix)]:
        dark = number < (low + high) / 2
        ax.text(column, row, f"{number:.2f}", ha="center", va="center", fontsize=7, color="white" if dark else "black")
    ax.set_xticks(range(len(types)), [name.replace("_", " ") for name in types])
    ax.set_yticks(range(len(methods)), [method_style(name).label for name in methods])
    ax.grid(visible=False)
    figure.colorbar(image, ax=ax, label=label)
    figure.get_layout_engine().set(rect=(0, 0, 1, 0.95))  # room for the line that names the source
    return figure


def _places(matrix: Any) -> list[tuple[int, int]]:
    return [(row, column) for row in range(matrix.shape[0]) for column in range(matrix.shape[1])]


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
            face, edge, hatch, _ = FATES[act["fate"]]
            ax.barh(row, 0.9, left=act["n"] - 0.45, height=0.7, color=face, edgecolor=edge, hatch=hatch, linewidth=0.6)
            box = {"facecolor": "white", "edgecolor": "none", "pad": 0.6} if hatch else None
            ax.text(act["n"], row, act["class"], ha="center", va="center", fontsize=7, bbox=box)
    ax.axvline(at + 0.5, color="#C0392B", linewidth=1.2)
    ax.set_xlim(0.4, float(fates["n"].max()) + 0.6)
    ax.set_yticks(range(len(methods)), [method_style(name).label for name in methods])
    ax.invert_yaxis()
    ax.set_xlabel("act (I inert, R reversible, K compensable, X irreversible); line: the revision")
    ax.grid(visible=False)
    looks = [
        {"facecolor": face, "edgecolor": edge, "hatch": hatch, "label": label}
        for face, edge, hatch, label in FATES.values()
    ]
    figure.legend(handles=[_patch(**look) for look in looks], loc="outside upper center", ncols=5)
    return figure


def _patch(**look: Any) -> Any:
    from matplotlib.patches import Patch

    return Patch(linewidth=0.6, **look)


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
    bins = (rows["at"] - 1) // width * width + (width + 1) / 2
    labels = {"quality": "quality (1 to 5)", "n_wasted": "wasted acts", "n_stale_kept": "stale acts kept"}
    for ax, (column, label) in zip(axes, labels.items(), strict=True):
        for method in methods:
            part = rows["arm"] == method
            curve = rows[part].groupby(bins[part])[column].mean()
            ax.plot(curve.index.to_numpy(float), curve.to_numpy(float), **method_style(method).line())
        ax.set_ylabel(label)
        ax.set_xlabel("act before the revision")
    handles, names = axes[0].get_legend_handles_labels()
    figure.legend(handles, names, loc="outside upper left", ncols=len(methods))
    return figure
