"""Figures of the LangGraph experiment; drawing only, what is drawn comes from the experiment's tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pandas as pd
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from revise_lab.lab.figures import HOLLOW, new_figure, ordered, policy_style

KINDS = {
    "reused": {"facecolor": "#009E73"},
    "replaced": {"facecolor": "#BBBBBB", "hatch": "//"},
    "cancelled": {"facecolor": "#D55E00", "hatch": "xx"},
    "recomputed": {"facecolor": "#0072B2"},
}
"""What became of an attempt: colour and hatch, so that greyscale tells them apart."""


def policies(table: pd.DataFrame, published: Mapping[str, Mapping[str, float]]) -> Figure:
    """Draw calls after the revision and the time to the result, a bar for each policy.

    Parameters
    ----------
    table : DataFrame
        A row for each ``policy`` of one application: ``calls``, ``model_wall_ms``, ``e2e_p50_ms``.
    published : mapping
        Column -> policy -> value; drawn hollow.
    """
    names = ordered(table["policy"])
    rows, looks = table.set_index("policy").loc[names], [policy_style(name) for name in names]
    shown = {"calls": "calls", "model_wall_ms": "model time (ms)", "e2e_p50_ms": "to the result, p50 (ms)"}
    figure, axes = new_figure("wide", 1, len(shown), height_in=1.8, sharey=True)
    for ax, (column, title) in zip(axes, shown.items(), strict=True):
        ax.barh(range(len(names)), rows[column], color=[look.colour for look in looks], height=0.6)
        for name, value in published.get(column, {}).items():
            if name in names:
                ax.plot(value, names.index(name), **HOLLOW, clip_on=False)
        ax.set_yticks(range(len(names)), [look.label for look in looks])
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
    names = ordered(spans["policy"])
    figure, axes = new_figure("wide", 1, len(names), height_in=2.2, sharey=True, sharex=True, squeeze=False)
    edge = {"edgecolor": "white", "linewidth": 0.3}
    for ax, name in zip(axes[0], names, strict=True):
        part = spans[spans["policy"] == name]
        for kind, of in part.groupby("kind"):
            width = 1e3 * (of["end_s"] - of["start_s"]).clip(lower=1e-4)
            ax.barh(of["node"].map(order.index), width, left=1e3 * of["start_s"], height=0.7, **KINDS[kind], **edge)
        ax.axvline(1e3 * part["revised_s"].iloc[0], color="#000000", linewidth=0.8, linestyle=(0, (3, 2)))
        ax.set_title(policy_style(name).label, loc="left")
        ax.set_xlabel("time (ms)")
    axes[0][0].set_yticks(range(len(order)), order)
    axes[0][0].invert_yaxis()
    handles = [Patch(label=kind, **look, **edge) for kind, look in KINDS.items()]
    figure.legend(handles=handles, loc="outside upper center", ncols=len(KINDS))
    return figure
