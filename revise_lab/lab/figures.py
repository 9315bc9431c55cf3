"""Figures for papers: one look per policy, exact widths, files that come out byte for byte the same.

A drawing function takes a tidy frame and returns axes or figures; `save_figure` is the only place that writes. What
makes a file acceptable to a publisher (embedded TrueType fonts, exact width, no LaTeX, no time stamp) is set there, in
a context around the save, so that a notebook which resets matplotlib's defaults still exports correctly.

>>> policy_style("revise_plus").label
'revise+'
"""

from __future__ import annotations

import hashlib
import io
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import matplotlib as mpl
import matplotlib.style
import numpy as np
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.text import Text

from revise_lab.errors import ConfigError
from revise_lab.lab.files import environment, write_atomic

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes

__all__ = [
    "HOLLOW", "RULE", "SOURCES", "STYLES", "WIDTHS_IN", "bars", "curve", "legend_above", "lines", "new_figure", "ordered",
    "policy_style", "provenance", "save_figure", "use_style",
]  # fmt: skip

#: Column widths in inches: ACM column, IEEE column, NeurIPS text, two columns.
WIDTHS_IN = {"column": 3.33, "ieee": 3.5, "text": 5.5, "wide": 7.0}
#: Where a value may come from; every figure says which.
SOURCES = ("emulated", "measured", "published", "by construction")
GOLDEN = (1 + math.sqrt(5)) / 2

_STYLES_DIR = Path(__file__).parent
#: Time stamps and version strings are the only things that differ between two exports of one figure.
_NO_STAMP = {"pdf": {"CreationDate": None}, "svg": {"Date": None}, "png": {"Software": None}}


class PolicyStyle(NamedTuple):
    """How one policy looks in every figure: colour, marker and dash together.

    Attributes
    ----------
    label : str
        Text of the legend.
    colour : str
        A colour of the Okabe-Ito palette, black or grey.
    marker : str
        matplotlib marker; no two policies share one.
    dash : Any
        matplotlib line style.
    """

    label: str
    colour: str
    marker: str
    dash: Any

    def line(self) -> dict[str, Any]:
        """Return the keyword arguments for ``Axes.plot``."""
        return {"label": self.label, "color": self.colour, "marker": self.marker, "linestyle": self.dash}


# Three colours serve two policies each, because the palette has eight: those pairs differ in marker and dash, and
# belong to figures of different papers (or are both reference lines).
STYLES = {
    "restart": PolicyStyle("restart", "#666666", "o", "-"),
    "suffix": PolicyStyle("suffix", "#E69F00", "s", (0, (5, 1.5))),
    "revise": PolicyStyle("revise", "#0072B2", "D", "-"),
    "revise_plus": PolicyStyle("revise+", "#D55E00", "^", (0, (8, 1.5))),
    "absorber": PolicyStyle("absorber", "#009E73", "v", "-"),
    "wait": PolicyStyle("wait", "#56B4E9", "P", (0, (4, 1, 1, 1))),
    "naive": PolicyStyle("naive", "#CC79A7", "X", (0, (3, 1.5))),
    "ignore": PolicyStyle("ignore", "#F0E442", "h", (0, (1, 1))),
    "checkpoint_k": PolicyStyle("checkpoint k", "#E69F00", "<", (0, (1, 1.5))),
    "interrupt": PolicyStyle("interrupt", "#56B4E9", ">", (0, (6, 1, 1, 1, 1, 1))),
    "foresight": PolicyStyle("foresight (published: Oracle)", "#000000", "*", (0, (4, 2))),
    "hindsight": PolicyStyle("hindsight", "#000000", "x", (0, (1, 2))),
}
#: Settings of the provenance sweep under which a line is the published one; others make lines of their own.
_SETTINGS = {"unit": None, "family": "S12", "unknown": "global", "loss": "coarse", "arrival": "last"}
_SPARE_MARKERS = ("8", "p", "d", "1", "2", "3", "4", "+")

#: The look of a published value.
HOLLOW: Mapping[str, Any] = {
    "marker": "o", "markersize": 8, "markerfacecolor": "none", "color": "#000000", "linestyle": "none", "zorder": 5,
}  # fmt: skip
#: The look of a line that is no measurement (zero, the identity, a closed form): above the grid, below all else.
RULE: Mapping[str, Any] = {"color": "#000000", "linewidth": 0.6, "zorder": 1.6}


def use_style() -> None:
    """Set the look of all figures drawn from here on in this process."""
    mpl.style.use(_STYLES_DIR / "paper.mplstyle")


def policy_style(policy: str) -> PolicyStyle:
    """Return the one look of a policy.

    Parameters
    ----------
    policy : str
        Key of the policy. A policy of another package gets brown and a marker that depends on its name only.

    Returns
    -------
    PolicyStyle
        Colour, marker and dash.
    """
    if policy in STYLES:
        return STYLES[policy]
    pick = hashlib.blake2b(policy.encode(), digest_size=2).digest()
    return PolicyStyle(policy, "#8C5A3C", _SPARE_MARKERS[pick[0] % len(_SPARE_MARKERS)], (0, (2 + pick[1] % 5, 1)))


def new_figure(
    width: str | float = "column", rows: int = 1, columns: int = 1, *, height_in: float | None = None, **grid: Any
) -> tuple[Figure, Any]:
    """Make a figure of a named width, outside pyplot's list of open figures.

    Parameters
    ----------
    width : str or float
        A key of `WIDTHS_IN`, or inches.
    rows, columns : int
        Panels.
    height_in : float, optional
        Height; by default each panel has the golden ratio.
    **grid : Any
        Passed to ``Figure.subplots`` (``sharex``, ``sharey``).

    Returns
    -------
    tuple
        The figure and its axes, as ``Figure.subplots`` returns them.
    """
    width_in = _width_in(width)
    figure = Figure(figsize=(width_in, height_in or rows * width_in / columns / GOLDEN), layout="constrained")
    return figure, figure.subplots(rows, columns, **grid)


def save_figure(
    figure: Figure,
    name: str,
    folder: str | Path,
    width: str | float = "column",
    claim: str | None = None,
    *,
    source: str,
    data: pd.DataFrame | None = None,
    caption: str = "",
    interval: Any = None,
    config_hash: str | None = None,
) -> list[Path]:
    """Write a figure as PDF, SVG and PNG, with a JSON file that says what it shows.

    Parameters
    ----------
    figure : Figure
        What to write. Its width is set to `width` exactly; its height is kept.
    name : str
        Stem of the files.
    folder : str or Path
        Created when missing.
    width : str or float
        ``column`` 3.33 in, ``ieee`` 3.5, ``text`` 5.5, ``wide`` 7.0, or a number of inches.
    claim : str, optional
        Id of the claim row that the figure belongs to.
    source : str
        Where the values come from: emulated, measured, published or by construction, with details after it.
    data : DataFrame, optional
        The frame that was drawn; its hash goes into the JSON file.
    caption : str
        One sentence; the interval, the source and a dirty tree are added to it.
    interval : Interval or mapping, optional
        Says ``kind``, ``n`` and ``unit`` of resampling of the intervals shown.
    config_hash : str, optional
        Hash of the config that produced the data.

    Returns
    -------
    list of Path
        The PDF, SVG, PNG and JSON files.

    Raises
    ------
    ConfigError
        If the source, the width or the name is not usable, or if a text of the figure wants LaTeX.
    """
    if not source.startswith(SOURCES):
        raise ConfigError(f"figure '{name}': source {source!r} is not one of {', '.join(SOURCES)}", name=name)
    if not name or Path(name).name != name:
        raise ConfigError(f"figure name {name!r} must be a file stem without folders; pass the folder apart", name=name)
    latex = [text.get_text() for text in figure.findobj(Text) if text.get_usetex() and text.get_text()]
    if latex:
        raise ConfigError(
            f"figure '{name}': {len(latex)} texts (first: {latex[0]!r}) were drawn with text.usetex, which needs a LaTeX "
            "installation and is off by default here; call figures.use_style() before drawing",
            name=name,
        )
    width_in = _width_in(width)
    figure.set_size_inches(width_in, figure.get_size_inches()[1])
    _say_source(figure, source)
    folder = Path(folder)
    files: dict[str, str] = {}
    paths = []
    with mpl.style.context(_STYLES_DIR / "export.mplstyle"):
        for kind in ("pdf", "svg", "png"):
            buffer = io.BytesIO()
            figure.savefig(buffer, format=kind, dpi=300, metadata=_NO_STAMP[kind])
            paths.append(write_atomic(folder / f"{name}.{kind}", buffer.getvalue()))
            files[paths[-1].name] = hashlib.blake2b(buffer.getvalue(), digest_size=16).hexdigest()
    git = environment()["git"] or {"commit": None, "dirty": None}
    sidecar = {
        "schema": 1,
        "figure": name,
        "claim": claim,
        "source": source,
        "caption": _caption(caption, interval, source, dirty=git["dirty"]),
        "data_hash": None if data is None else data_hash(data),
        "config_hash": config_hash,
        "commit": git["commit"],
        "dirty": git["dirty"],
        "width_in": width_in,
        "height_in": round(float(figure.get_size_inches()[1]), 4),
        "files": files,
    }
    text = json.dumps(sidecar, indent=1, ensure_ascii=False) + "\n"
    return [*paths, write_atomic(folder / f"{name}.json", text.encode())]


def data_hash(frame: pd.DataFrame) -> str:
    """Return a hash of the values of a frame, in its order of rows and columns."""
    text = frame.to_csv(index=False, lineterminator="\n")
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def ordered(policies: Iterable[Any]) -> list[Any]:
    """Return policies, each once, in the order of `STYLES`; those of other packages follow by name."""
    rank = {policy: index for index, policy in enumerate(STYLES)}
    return sorted(set(policies), key=lambda policy: (rank.get(policy, len(rank)), str(policy)))


def bars(ax: Axes, x: Any, y: Any, *, x_ends: Any = None, y_ends: Any = None, **look: Any) -> None:
    """Draw points with the intervals of their values.

    Parameters
    ----------
    ax : Axes
        Where to draw.
    x, y : number or array
        The points.
    x_ends, y_ends : pair of number or array, optional
        Lower and upper ends. A bar with an end that is not finite is not drawn.
    **look : Any
        Passed to ``Axes.errorbar``.
    """
    spreads = {}
    for key, value, ends in (("xerr", x, x_ends), ("yerr", y, y_ends)):
        if ends is not None:
            # a percentile interval may miss its own mean by a hair; matplotlib refuses negative bars
            spread = np.array([value - ends[0], ends[1] - value], float).reshape(2, -1).clip(0)
            spreads[key] = np.where(np.isfinite(spread), spread, np.nan)
    ax.errorbar(x, y, **spreads, **{"capsize": 2, "elinewidth": 0.7, **look})


def lines(
    ax: Axes,
    frame: pd.DataFrame,
    x: str,
    y: str,
    low: str | None = None,
    high: str | None = None,
    *,
    hue: str = "policy",
    scale: float = 1.0,
    **look: Any,
) -> list[tuple[float, float, PolicyStyle]]:
    """Draw one line per policy, each in its look, with intervals where given.

    Parameters
    ----------
    ax : Axes
        Where to draw.
    frame : DataFrame
        One row per point.
    x, y, low, high, hue : str
        Columns.
    scale : float
        Factor of `y` and the ends of its interval.
    **look : Any
        What departs from the look of the policies.

    Returns
    -------
    list of (x, y, PolicyStyle)
        Where each line ends, and its look.
    """
    found = []
    for group in ordered(frame[hue]):
        part, style = frame[frame[hue] == group].sort_values(x), policy_style(str(group))
        ends = (scale * part[low], scale * part[high]) if low and high else None
        bars(ax, part[x], scale * part[y], y_ends=ends, **style.line() | look)
        found.append((float(part[x].iloc[-1]), float(scale * part[y].iloc[-1]), style))
    return found


def legend_above(figure: Figure, more: Mapping[str, Mapping[str, Any]] | None = None, ncols: int = 4) -> None:
    """Put one legend above all panels: each label once, then what has no line of its own, by label and look."""
    handles = {label: line for ax in figure.axes for line, label in zip(*ax.get_legend_handles_labels(), strict=True)}
    handles |= {label: Line2D([], [], **look) for label, look in (more or {}).items()}
    figure.legend(list(handles.values()), list(handles), loc="outside upper center", ncols=min(ncols, len(handles)))


def curve(
    frame: pd.DataFrame,
    x: str,
    y: str,
    *,
    hue: str = "policy",
    low: str | None = None,
    high: str | None = None,
    order: Sequence[Any] | None = None,
    ax: Axes | None = None,
    x_label: str | None = None,
    y_label: str | None = None,
) -> Axes:
    """Draw one line per policy (or other group), with intervals where given.

    Parameters
    ----------
    frame : DataFrame
        One row per point, already aggregated.
    x, y, hue : str
        Columns. When `hue` holds policies, each has its fixed look.
    low, high : str, optional
        Columns with the ends of the interval of `y`.
    order : sequence, optional
        Order of the values of `x`; required when they are text, because text has no order of its own.
    ax : Axes, optional
        Where to draw; by default a new figure of column width.
    x_label, y_label : str, optional
        Axis labels; by default the column names.

    Returns
    -------
    Axes
        With direct labels at the line ends for up to four lines, else a legend.

    Raises
    ------
    ConfigError
        If a column is missing, or if `x` is text and no order was given.
    """
    _need(frame, [x, y, hue, *filter(None, (low, high))], "curve")
    ax = ax or new_figure()[1]
    ends = lines(ax, frame.assign(_at=_placed(frame[x], order, ax)), "_at", y, low, high, hue=hue)
    ax.set(xlabel=x_label or x, ylabel=y_label or y)
    if len(ends) <= 4:
        _label_ends(ax, ends)
    else:
        ax.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), borderaxespad=0.0)
    return ax


def provenance(
    frame: pd.DataFrame,
    *,
    published: Sequence[tuple[float, float, float]] = (),
    closed: Mapping[str, Callable[[float], tuple[float, float]]] | None = None,
) -> tuple[Figure | None, Figure | None]:
    """Draw recomputed work and full fallback against provenance coverage.

    Parameters
    ----------
    frame : DataFrame
        Columns ``family``, ``matched``, ``unit`` (read, field, node), ``coverage``, ``policy``, ``recompute_ratio``,
        ``fallback_share``, the ends ``recompute_low``, ``recompute_high``, ``fallback_low``, ``fallback_high`` (all
        shares of one) and ``n``. Settings that vary beside (``unknown``, ``loss``, ``arrival``) make lines of their own.
    published : sequence of (coverage, recompute %, fallback %)
        Drawn hollow, in the panel of masked reads only: that is the definition which meets the paper.
    closed : mapping, optional
        For a unit, coverage -> (recompute, fallback) in shares; by default `closed_form`.

    Returns
    -------
    tuple
        The figure of the matched family (a column of panels per unit) and that of the free families, each None when
        the frame has no such rows.

    Notes
    -----
    Appendix A.4 of arXiv:2609.00643 publishes three points; the curve between them is ours.
    """
    ends = ["recompute_low", "recompute_high", "fallback_low", "fallback_high"]
    _need(frame, ["family", "matched", "unit", "coverage", "policy", *_SHARES.values(), *ends], "plot")
    matched = frame[frame["matched"].astype(bool)]
    free = frame[~frame["matched"].astype(bool)]
    units = [unit for unit in ("read", "field", "node") if unit in set(matched["unit"])]
    first = second = None
    if units:
        first, columns = _share_panels({f"masked: {unit}": matched[matched["unit"] == unit] for unit in units})
        grid = np.linspace(0, 1, 51)
        for unit, column in zip(units, columns, strict=True):
            formula = (closed or {}).get(unit) or partial(closed_form, unit)
            for index, ax in enumerate(column):
                ax.plot(grid, [100 * formula(coverage)[index] for coverage in grid], **RULE)
                if published and unit == "read":
                    ax.plot(*zip(*((point[0], point[1 + index]) for point in published), strict=True), **HOLLOW)
        legend_above(first, {"closed form (revise)": RULE} | ({"published": HOLLOW} if published else {}))
    if len(free):
        second, _ = _share_panels({f"family {name}": part for name, part in free.groupby("family")})
        legend_above(second)
    return first, second


def closed_form(unit: str, coverage: float) -> tuple[float, float]:
    """Return (recompute, fallback) of `revise` on the matched serving family.

    Parameters
    ----------
    unit : str
        ``read`` or ``field``: each is kept with probability `coverage`, and a hit node needs all of its reads (three of
        the five leaves have a reader with one read, two share a reader). ``node``: one coin decides.
    coverage : float
        In [0, 1].

    Returns
    -------
    tuple of float
        Shares of one. Derived for the fixture: affected sets 8, 7, 7, 4, 4 of twelve nodes.
    """
    c = coverage
    if unit == "node":
        return 1 - c / 2, 1 - c
    fallback = 1 - (3 * c + 2 * c * c) / 5
    return fallback + (22 * c + 8 * c * c) / 60, fallback


#: The two rows of the provenance figure: stem of the ends, and column.
_SHARES = {"recompute": "recompute_ratio", "fallback": "fallback_share"}


def _share_panels(parts: Mapping[str, pd.DataFrame]) -> tuple[Figure, Any]:
    figure, axes = new_figure("wide", 2, len(parts), height_in=3.6, sharex=True, sharey="row", squeeze=False)
    for (title, part), column in zip(parts.items(), axes.T, strict=True):
        for ax, (stem, value) in zip(column, _SHARES.items(), strict=True):
            for look, line in _variants(part):
                ends = (100 * line[f"{stem}_low"], 100 * line[f"{stem}_high"])
                bars(ax, line["coverage"], 100 * line[value], y_ends=ends, **look)
            ax.set_ylim(-4, 106)
        column[0].set_title(title, loc="left")
        column[1].set_xlabel("provenance coverage")
    axes[0][0].set_ylabel("recomputed / active (%)")
    axes[1][0].set_ylabel("fallback (%)")
    return figure, axes.T


def _variants(part: pd.DataFrame) -> Iterator[tuple[dict[str, Any], pd.DataFrame]]:
    """Yield one line per policy; other settings that vary get hollow markers and are named in the legend."""
    varying = [key for key in _SETTINGS if key in part and part[key].nunique() > 1]
    markers: dict[str, str] = {}
    for (policy, *settings), line in part.sort_values("coverage").groupby(["policy", *varying], sort=False):
        look = policy_style(str(policy)).line()
        named = [f"{key} {value}" for key, value in zip(varying, settings, strict=True) if value != _SETTINGS[key]]
        if named:
            other = ", ".join(named)
            marker = markers.setdefault(other, _SPARE_MARKERS[len(markers) % len(_SPARE_MARKERS)])
            look |= {
                "label": f"{look['label']}, {other}",
                "linestyle": ":",
                "markerfacecolor": "white",
                "marker": marker,
            }
        yield look, line


def _placed(values: pd.Series, order: Sequence[Any] | None, ax: Axes) -> pd.Series:
    """Return where values stand on the axis of x."""
    x, there = values.name, list(dict.fromkeys(values))
    if order is None and any(isinstance(value, str) for value in there):
        raise ConfigError(
            f"column '{x}' holds text ({there[:6]}), which has no order: pass order=[...] or make the column numeric",
            column=x,
        )
    if order is None:
        return values.astype(float)
    if missing := [value for value in there if value not in order]:
        raise ConfigError(f"order= leaves out {missing} of column '{x}'", column=x, missing=missing)
    ax.set_xticks(range(len(order)), [str(value) for value in order])
    return values.map(list(order).index).astype(float)


def _label_ends(ax: Axes, ends: list[tuple[float, float, PolicyStyle]]) -> None:
    span = (ax.get_ylim()[1] - ax.get_ylim()[0]) * 0.08
    last = -math.inf
    for at, value, style in sorted(ends, key=lambda end: end[1]):
        last = max(value, last + span)
        ax.annotate(style.label, (at, last), xytext=(5, 0), textcoords="offset points", va="center", fontsize=7,
                    color=style.colour, annotation_clip=False)  # fmt: skip


def _say_source(figure: Figure, source: str) -> None:
    if len(figure.axes) == 1:
        figure.axes[0].set_title(source, loc="right", fontsize=5, color="#666666")
    elif not any(text.get_text() == source for text in figure.texts):
        figure.text(0.998, 0.995, source, ha="right", va="top", fontsize=5, color="#666666")


def _caption(caption: str, interval: Any, source: str, *, dirty: bool | None) -> str:
    parts = [caption.strip()] if caption.strip() else []
    if interval is not None:
        said = interval if isinstance(interval, Mapping) else interval.as_dict()
        parts.append(f"Intervals: {said.get('kind')}, n = {said.get('n')}, resampled by {said.get('unit')}.")
    parts.append(f"Values: {source}.")
    if dirty:
        parts.append("Drawn from a working tree with uncommitted changes.")
    return " ".join(parts)


def _width_in(width: str | float) -> float:
    width_in = WIDTHS_IN.get(width) if isinstance(width, str) else float(width)
    if width_in is None:
        raise ConfigError(f"width {width!r} is not one of {', '.join(WIDTHS_IN)} (or a number of inches)")
    if not 0.5 <= width_in <= 40:
        raise ConfigError(f"width {width!r} in is not between 0.5 and 40 inches")
    return width_in


def _need(frame: pd.DataFrame, columns: Iterable[str], what: str) -> None:
    missing = [column for column in columns if column not in frame.columns]
    if missing:
        raise ConfigError(f"cannot draw this {what}: the frame has no column {missing}; it has {list(frame.columns)}")
