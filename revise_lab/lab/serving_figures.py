"""Figures of the serving experiments; drawing only, what is drawn comes from the experiments' tables."""

from __future__ import annotations

import pandas as pd
from matplotlib.figure import Figure

from revise_lab.lab.figures import HOLLOW, RULE, bars, legend_above, lines, new_figure, ordered, policy_style

_MOST = 105.0
"""Changes beyond it, in percent, leave the panel: where suffix has next to nothing in time, a ratio says little."""
_SAVED = {"tokens": "tokens", "wall": "model time"}
"""What is saved: column, and the words of the title."""


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
    titles = {f"goodput_{slo_s:g}": f"within {slo_s:g} s" for slo_s in slos_s} | {"p99": "p99"}
    figure, (above, below) = new_figure("wide", 2, len(titles), height_in=3.6, sharex=True, squeeze=False)
    for (name, title), level, change in zip(titles.items(), above, below, strict=True):
        lines(level, levels, "load", name, scale=1 if name == "p99" else 100)
        level.set_title(title, loc="left")
        level.set_ylim(*((0, None) if name == "p99" else (-4, 104)))
        lines(change, changes[changes["measure"] == name], "load", "value", "low", "high")
        for load, value in (published or {}).get(name, {}).items():
            change.plot(load, value, **HOLLOW)
        change.axhline(0, **RULE)
        low, high = change.get_ylim()
        change.set(xlabel="load / capacity", ylim=(max(low, -_MOST), min(high, _MOST)))
    above[0].set_ylabel("workflows in time (%)")
    above[-1].set_ylabel("latency (s)")
    below[0].set_ylabel("change against suffix (%)")
    legend_above(figure, {"published (revise)": HOLLOW} if published else None, 6)
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
    titles = {"n_in_flight": "workflows in flight", "n_queued": "queued requests", "n_running": "running requests"}
    titles["kv_tokens"] = "KV memory in use (%)"
    for ax, (name, title) in zip(axes, titles.items(), strict=True):
        scale = 100 / kv_capacity_tokens if name == "kv_tokens" else 1.0
        lines(ax, frame, "arrival_s", name, scale=scale, marker="", linewidth=0.8)
        ax.set_title(title, loc="left")
        ax.set_xlabel("time (s)")
    legend_above(figure, ncols=6)
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
    panels = [(family, *measure) for family in families for measure in _SAVED.items()]
    for ax, (family, name, title) in zip(axes[0], panels, strict=True):
        part = savings[savings["family"] == family]
        lines(ax, part.assign(share=100 * part["revised_share"]), "share", name, f"{name}_low", f"{name}_high")
        for share, band in (published or {}).items():
            if family == "S12":
                ax.plot([100 * share] * 2, band, color="#999999", linewidth=5, alpha=0.5, zorder=0)
        ax.axhline(0, **RULE)
        ax.set_title(f"{title}, {family}", loc="left")
        ax.set_xlabel("workflows revised (%)")
    axes[0][0].set_ylabel("saved against suffix (%)")
    legend_above(figure, ncols=6)
    return figure


def sensitivity(savings: pd.DataFrame) -> Figure:
    """Draw what is saved under other lengths of calls: a row of points for each choice.

    Parameters
    ----------
    savings : DataFrame
        A row for each ``lengths`` and ``policy``: ``tokens``, ``wall`` and their ends, in percent.
    """
    order = list(dict.fromkeys(savings["lengths"]))
    policies = ordered(savings["policy"])
    figure, axes = new_figure("text", 1, 2, height_in=1.9, sharey=True)
    for ax, (name, title) in zip(axes, _SAVED.items(), strict=True):
        for index, policy in enumerate(policies):
            part = savings[savings["policy"] == policy]
            places = part["lengths"].map(order.index) + 0.12 * (index - len(policies) / 2)
            look = policy_style(policy).line() | {"linestyle": "none", "capsize": 0}
            bars(ax, part[name], places, x_ends=(part[f"{name}_low"], part[f"{name}_high"]), **look)
        ax.axvline(0, **RULE)
        ax.set_yticks(range(len(order)), order)
        ax.set_title(title, loc="left")
        ax.set_xlabel("saved against suffix (%)")
    axes[0].invert_yaxis()
    legend_above(figure, ncols=6)
    return figure
