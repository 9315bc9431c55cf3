"""Figures of the serving experiments; drawing only, what is drawn comes from the experiments' tables."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from revise_lab.lab.figures import STYLES, new_figure, policy_style

_MOST = 105.0
"""Changes beyond it, in percent, leave the panel: where suffix has next to nothing in time, a ratio says little."""
_PUBLISHED = {"marker": "o", "markersize": 8, "markerfacecolor": "none", "markeredgecolor": "#000000"}


def pressure(
    levels: pd.DataFrame,
    changes: pd.DataFrame,
    published: dict[str, dict[float, float]] | None = None,
    slos_s: tuple[float, ...] = (15.0, 25.0, 40.0),
) -> Figure:
    """Draw goodput within three objectives and p99 against load, and below them the changes against suffix.

    Parameters
    ----------
    levels : DataFrame
        A row for each ``load`` and ``policy`` of one family: ``goodput_15`` and so on (shares), ``p50``, ``p99`` (s).
    changes : DataFrame
        A row for each ``load``, ``policy`` and ``measure``: ``value``, ``low``, ``high`` in percent.
    published : dict, optional
        Measure -> load -> percent; drawn hollow.
    slos_s : tuple of float
        Objectives in seconds, a panel each.
    """
    figure, axes = new_figure("wide", 2, len(slos_s) + 1, height_in=3.6, sharex=True, squeeze=False)
    names = [f"goodput_{slo_s:g}" for slo_s in slos_s] + ["p99"]
    for column, name in enumerate(names):
        scale = 100 if name.startswith("goodput") else 1
        title = f"within {slos_s[column]:g} s" if column < len(slos_s) else "p99"
        for policy in _ordered(levels["policy"].unique()):
            line, look = levels[levels["policy"] == policy].sort_values("load"), policy_style(policy).line()
            axes[0][column].plot(line["load"], scale * line[name], **look)
            line = changes[(changes["policy"] == policy) & (changes["measure"] == name)].sort_values("load")
            if len(line):
                _bars(axes[1][column], line, "load", look)
        for load, value in (published or {}).get(name, {}).items():
            axes[1][column].plot(load, value, **_PUBLISHED, linestyle="none", zorder=5)
        axes[1][column].axhline(0, color="#000000", linewidth=0.6)
        axes[0][column].set_title(title, loc="left")
        axes[1][column].set_xlabel("load / capacity")
        low, high = axes[1][column].get_ylim()
        axes[1][column].set_ylim(max(low, -_MOST), min(high, _MOST))
    axes[0][0].set_ylabel("workflows in time (%)")
    axes[0][-1].set_ylabel("latency (s)")
    for ax in axes[0][:-1]:
        ax.set_ylim(-4, 104)
    axes[0][-1].set_ylim(bottom=0)
    axes[1][0].set_ylabel("change against suffix (%)")
    _legend(figure, published=bool(published))
    return figure


def load_over_time(frame: pd.DataFrame, kv_capacity_tokens: int) -> Figure:
    """Draw workflows in flight, queue, batch and KV memory over the run, as arriving workflows find them.

    Parameters
    ----------
    frame : DataFrame
        Rows of one family, load and replicate: ``policy``, ``arrival_s``, ``n_in_flight``, ``n_queued``, ``n_running``,
        ``kv_tokens``.
    kv_capacity_tokens : int
        Of all replicas.
    """
    figure, axes = new_figure("wide", 1, 4, height_in=1.9, sharex=True)
    shown = (("n_in_flight", "workflows in flight", 1.0), ("n_queued", "queued requests", 1.0))
    shown += (("n_running", "running requests", 1.0), ("kv_tokens", "KV memory in use (%)", 100 / kv_capacity_tokens))
    for ax, (name, title, scale) in zip(axes, shown, strict=True):
        for policy in _ordered(frame["policy"].unique()):
            line = frame[frame["policy"] == policy].sort_values("arrival_s")
            look = policy_style(policy).line() | {"marker": "", "linewidth": 0.8}
            ax.plot(line["arrival_s"], scale * line[name], **look)
        ax.set_title(title, loc="left")
        ax.set_xlabel("time (s)")
    _legend(figure)
    return figure


def frequency(savings: pd.DataFrame, published: dict[float, tuple[float, float]] | None = None) -> Figure:
    """Draw what is saved per revised workflow against the share of workflows that are revised.

    Parameters
    ----------
    savings : DataFrame
        A row for each ``family``, ``revised_share`` and ``policy``: ``tokens``, ``wall`` and their ends, in percent.
    published : dict, optional
        Share -> (low, high) in percent; drawn as a grey band.
    """
    families = sorted(savings["family"].unique())
    figure, axes = new_figure("wide", 1, 2 * len(families), height_in=2.2, sharey=True, squeeze=False)
    panels = [(family, *measure) for family in families for measure in (("tokens", "tokens"), ("wall", "model time"))]
    for ax, (family, name, title) in zip(axes[0], panels, strict=True):
        part = savings[savings["family"] == family]
        for policy in _ordered(part["policy"].unique()):
            line = part[part["policy"] == policy].sort_values("revised_share")
            line = line.assign(share=100 * line["revised_share"])
            named = {"value": line[name], "low": line[f"{name}_low"], "high": line[f"{name}_high"]}
            _bars(ax, line.assign(**named), "share", policy_style(policy).line())
        for share, (low, high) in (published or {}).items():
            if family == "S12":
                ax.plot([100 * share] * 2, [low, high], color="#999999", linewidth=5, alpha=0.5, zorder=0)
        ax.axhline(0, color="#000000", linewidth=0.6)
        ax.set_title(f"{title}, {family}", loc="left")
        ax.set_xlabel("workflows revised (%)")
    axes[0][0].set_ylabel("saved against suffix (%)")
    _legend(figure)
    return figure


def sensitivity(savings: pd.DataFrame) -> Figure:
    """Draw what is saved under other lengths of calls: a row of points for each choice.

    Parameters
    ----------
    savings : DataFrame
        A row for each ``lengths`` and ``policy``: ``tokens``, ``wall`` and their ends, in percent.
    """
    order = list(dict.fromkeys(savings["lengths"]))
    figure, axes = new_figure("text", 1, 2, height_in=1.9, sharey=True)
    for ax, (name, title) in zip(axes, (("tokens", "tokens"), ("wall", "model time")), strict=True):
        policies = _ordered(savings["policy"].unique())
        for index, policy in enumerate(policies):
            line = savings[savings["policy"] == policy]
            y = [order.index(one) + 0.12 * (index - len(policies) / 2) for one in line["lengths"]]
            ends = [(line[name] - line[f"{name}_low"]).clip(0), (line[f"{name}_high"] - line[name]).clip(0)]
            look = policy_style(policy).line() | {"linestyle": "none"}
            ax.errorbar(line[name], y, xerr=[np.asarray(end, float) for end in ends], elinewidth=0.7, **look)
        ax.axvline(0, color="#000000", linewidth=0.6)
        ax.set_yticks(range(len(order)), order)
        ax.set_title(title, loc="left")
        ax.set_xlabel("saved against suffix (%)")
    axes[0].invert_yaxis()
    _legend(figure)
    return figure


def _ordered(policies: Any) -> list[str]:
    return [name for name in STYLES if name in set(policies)]


def _bars(ax: Any, line: pd.DataFrame, x: str, look: dict[str, Any]) -> None:
    ends = np.array([line["value"] - line["low"], line["high"] - line["value"]], float).clip(0)
    ends[~np.isfinite(ends)] = np.nan  # an end without a limit is not drawn
    ax.errorbar(line[x], line["value"], yerr=ends, capsize=2, elinewidth=0.7, **look)


def _legend(figure: Figure, *, published: bool = False) -> None:
    handles = {label: line for ax in figure.axes for line, label in zip(*ax.get_legend_handles_labels(), strict=True)}
    if published:
        handles["published (revise)"] = Line2D([], [], linestyle="none", **_PUBLISHED)
    figure.legend(list(handles.values()), list(handles), loc="outside upper center", ncols=min(6, len(handles)))
