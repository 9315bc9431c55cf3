"""Figures of the LangGraph experiment; drawing only, what is drawn comes from the experiment's tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pandas as pd
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from revise_lab.lab.figures import STYLES, new_figure, policy_style

KINDS = {
    "reused": ("#009E73", ""),
    "replaced": ("#BBBBBB", "//"),
    "cancelled": ("#D55E00", "xx"),
    "recomputed": ("#0072B2", ""),
}
"""What became of an attempt: colour and hatch, so that greyscale tells them apart."""
_PUBLISHED = {"marker": "o", "markersize": 7, "markerfacecolor": "none", "markeredgecolor": "#000000"}


def policies(table: pd.DataFrame, published: Mapping[str, Mapping[str, float]]) -> Figure:
    """Draw calls after the revision and the time to the result, a bar for each policy.

    Parameters
    ----------
    table : DataFrame
        A row for each ``policy`` of one application: ``calls``, ``model_wall_ms``, ``e2e_p50_ms``.
    published : mapping
        Column -> policy -> value; drawn hollow.
    """
    names = [name for name in STYLES if name in set(table["policy"])]
    shown = {"calls": "calls", "model_wall_ms": "model time (ms)", "e2e_p50_ms": "to the result, p50 (ms)"}
    figure, axes = new_figure("wide", 1, len(shown), height_in=1.8, sharey=True)
    rows = table.set_index("policy")
    for ax, (column, title) in zip(axes, shown.items(), strict=True):
        colours = [policy_style(name).colour for name in names]
        ax.barh(range(len(names)), [rows.loc[name, column] for name in names], color=colours, height=0.6)
        for at, name in enumerate(names):
            if (value := published.get(column, {}).get(name)) is not None:
                ax.plot(value, at, **_PUBLISHED, linestyle="none", clip_on=False)
        ax.set_yticks(range(len(names)), [policy_style(name).label for name in names])
        ax.set_xlabel(title)
        ax.set_xlim(left=0)
    axes[0].invert_yaxis()
    return figure


def timeline(spans: pd.DataFrame, order: Sequence[str]) -> Figure:
    """Draw every attempt of one revised run on its clock, a panel for each policy.

    Parameters
    ----------
    spans : DataFrame
        ``policy``, ``node``, ``start_s``, ``end_s``, ``kind`` (of `KINDS`) and ``revised_s``.
    order : sequence of str
        The nodes from top to bottom.
    """
    names = [name for name in STYLES if name in set(spans["policy"])]
    figure, axes = new_figure("wide", 1, len(names), height_in=2.2, sharey=True, sharex=True, squeeze=False)
    for ax, name in zip(axes[0], names, strict=True):
        part = spans[spans["policy"] == name]
        for row in part.to_dict("records"):
            colour, hatch = KINDS[row["kind"]]
            width = max(row["end_s"] - row["start_s"], 1e-4) * 1e3
            ax.barh(
                order.index(row["node"]), width, left=1e3 * row["start_s"], height=0.7,
                color=colour, hatch=hatch, edgecolor="white", linewidth=0.3,
            )  # fmt: skip
        ax.axvline(1e3 * part["revised_s"].iloc[0], color="#000000", linewidth=0.8, linestyle=(0, (3, 2)))
        ax.set_title(policy_style(name).label, loc="left")
        ax.set_xlabel("time (ms)")
    axes[0][0].set_yticks(range(len(order)), order)
    axes[0][0].invert_yaxis()
    handles = [Patch(facecolor=colour, hatch=hatch, edgecolor="white") for colour, hatch in KINDS.values()]
    figure.legend(handles, list(KINDS), loc="outside upper center", ncols=len(KINDS))
    return figure
