"""Workflows and runs as SVG: no ids, no style sheet, so that many drawings can share one page."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from revise_lab.draw.layout import Edge, Node, arrange
from revise_lab.draw.text import STYLES, Style, cut, in_order, quote, style_of, tally, text_width

Span = tuple[str, float, float, str] | tuple[str, float, float, str, str]

_FONT = "font-family=\"'DejaVu Sans',Verdana,Helvetica,Arial,sans-serif\""
_INK, _MUTED, _LINE = "#1a1a1a", "#595959", "#8c8c8c"
_BOX_HEIGHT, _MARGIN, _HEAD, _LABEL_CHARS = 42.0, 18.0, 34.0, 22
_STATE_CHARS = max(map(len, STYLES))  # a box has room for every state, so that a change of state moves nothing


def workflow_svg(
    nodes: Sequence[Node],
    edges: Sequence[Edge],
    *,
    colours: Mapping[str, str] | None = None,
    title: str = "workflow",
    legend: bool = True,
) -> str:
    """Draw a workflow from left to right, each node in the look of its state.

    Parameters
    ----------
    nodes : sequence of (name, kind, state, note)
        ``state`` is a node state or a plan action; a name that is not in `STYLES` is drawn plain. The note stands
        under the box, shortened; the tooltip has it whole.
    edges : sequence of (parent, child) or (parent, child, role)
        An edge of role ``control`` is dashed.
    colours : mapping of str to str, optional
        Fill by state, in place of the one in `STYLES`.
    title : str
        Heading and accessible name of the drawing.
    legend : bool
        List the states that occur, with how many nodes are in each.

    Returns
    -------
    str
        One ``<svg>`` element. Every node is a group with ``data-node`` and ``data-state``.

    Raises
    ------
    WorkflowError
        A name used twice, an edge to an unknown node, or a cycle.
    """
    names = max((_label_px(cut(node[0], _LABEL_CHARS)) for node in nodes), default=0.0)
    kinds = max((5.9 * (len(node[1]) + 3 + _STATE_CHARS) for node in nodes), default=0.0)
    box = max(names, kinds) + 44.0
    places, routes = arrange(nodes, edges, box)
    places = {key: (x + _MARGIN, y + _HEAD) for key, (x, y) in places.items()}
    right = max((x for x, _ in places.values()), default=0.0) + box + _MARGIN
    bottom = max((y for _, y in places.values()), default=_HEAD) + _BOX_HEIGHT / 2 + 16.0
    counts = Counter(node[2] for node in nodes)
    keys, height = _legend(counts, colours, right, bottom) if legend and nodes else ([], bottom)
    body = [_edge(edge, [places[key] for key in route], box) for edge, route in zip(edges, routes, strict=True)]
    body += [_node(node, places[(node[0],)], box, colours) for node in nodes]
    said = f"{len(nodes)} nodes: {tally(counts)}" if nodes else "no nodes"
    return _svg(max(right, 220.0), height + 8.0, title, said, [*body, *keys])


def timeline_svg(
    spans: Sequence[Span], *, marks: Sequence[tuple[float, str]] = (), title: str = "timeline", unit: str = "s"
) -> str:
    """Draw attempts as bars on one lane a node, coloured by how they ended.

    Parameters
    ----------
    spans : sequence of (node, start_s, end_s, outcome) or (node, start_s, end_s, outcome, note)
        ``outcome`` is usually ``completed``, ``aborted`` or ``recomputed``; any state of `STYLES` will do. Lanes come
        in the order in which nodes first appear.
    marks : sequence of (time_s, label)
        Moments to point at, such as the arrival of a revision.
    title : str
        Heading and accessible name.
    unit : str
        Printed at the axis.

    Returns
    -------
    str
        One ``<svg>`` element; every bar carries ``data-node`` and ``data-state``.
    """
    lanes = list(dict.fromkeys(span[0] for span in spans))
    times = [t for span in spans for t in span[1:3]] + [at for at, _ in marks]
    low, high = min(times, default=0.0), max(times, default=1.0)
    left = max((_label_px(cut(lane, _LABEL_CHARS)) for lane in lanes), default=40.0) + _MARGIN + 12.0
    top, lane_height, plot = 62.0, 24.0, 620.0
    bottom = top + lane_height * max(len(lanes), 1)

    def x_of(time: float) -> float:
        return left + plot * (time - low) / ((high - low) or 1.0)

    body = []
    for tick in _ticks(low, high):
        body.append(_line(x_of(tick), top, x_of(tick), bottom, "#e3e3e3"))
        body.append(_text(x_of(tick), bottom + 15, f"{tick:g}", size=10, anchor="middle", fill=_MUTED))
    body.append(_text(left + plot, bottom + 28, f"time, {unit}", size=10, anchor="end", fill=_MUTED))
    for row, lane in enumerate(lanes):
        middle = top + lane_height * (row + 0.5)
        body.append(_text(left - 10, middle + 4, cut(lane, _LABEL_CHARS), anchor="end"))
        body.append(_line(left, middle, left + plot, middle, "#efefef"))
        for span in (span for span in spans if span[0] == lane):
            body.append(_span(span, x_of(span[1]), x_of(span[2]), middle - 8))
    for at, label in marks:
        body.append(_line(x_of(at), top - 6, x_of(at), bottom, "#000000", dash="2 2"))
        side = "start" if x_of(at) < left + plot * 0.6 else "end"
        body.append(_text(x_of(at), top - 10, f"{label} ({at:.3g} {unit})", size=10, anchor=side))
    counts = Counter(span[3] for span in spans)
    right = left + plot + _MARGIN + 10.0
    keys, height = _legend(counts, None, right, bottom + 30.0) if spans else ([], bottom + 30.0)
    said = f"{len(spans)} attempts on {len(lanes)} nodes: {tally(counts)}" if spans else "no attempts"
    return _svg(right, height + 8.0, title, said, [*body, *keys])


def _node(node: Node, at: tuple[float, float], box: float, colours: Mapping[str, str] | None) -> str:
    name, kind, state, note = node
    (x, middle), style = at, style_of(state)
    fill = (colours or {}).get(state, style.fill)
    ink = _ink_on(fill)
    top = middle - _BOX_HEIGHT / 2
    dash = ' stroke-dasharray="4 2"' if style.dashed else ""
    corner = {"tool": 1, "verifier": 1}.get(kind, 8)
    parts = [
        f"<title>{quote(f'{name} ({kind}): {state}' + (f'. {note}' if note else ''))}</title>",
        f'<rect x="{x:g}" y="{top:g}" width="{box:g}" height="{_BOX_HEIGHT:g}" rx="{corner}" fill="{quote(fill)}" '
        f'stroke="{style.stroke}" stroke-width="1.6"{dash}/>',
        _badge(x + 17, middle, style),
        _text(x + 34, middle - 3, cut(name, _LABEL_CHARS), weight="600", fill=ink),
        _text(x + 34, middle + 12, f"{kind} · {state}", size=9.5, fill=ink if ink != _INK else _MUTED),
    ]
    if note:
        parts.append(_text(x + 4, top + _BOX_HEIGHT + 12, cut(note, int(box / 5.2)), size=9, fill=_MUTED))
    return f'<g data-node="{quote(name)}" data-state="{quote(state)}">{"".join(parts)}</g>'


def _edge(edge: Edge, route: Sequence[tuple[float, float]], box: float) -> str:
    """One smooth line from box to box, level where it passes a layer, with an arrow head at the child."""
    (x, y), *stops = route
    x += box
    path = f"M{x:g} {y:g}"
    for i, (left, level) in enumerate(stops, 1):
        end = left - 6 if i == len(stops) else left
        bend = (end - x) / 2
        path += f"C{x + bend:g} {y:g} {end - bend:g} {level:g} {end:g} {level:g}"
        x, y = end, level
        if i < len(stops):
            x += box
            path += f"H{x:g}"
    dash = ' stroke-dasharray="5 3"' if edge[2:] == ("control",) else ""
    line = f'<path d="{path}" fill="none" stroke="{_LINE}" stroke-width="1.3"{dash}/>'
    return f'{line}<path d="M{x + 6:g} {y:g}l-8 -4v8z" fill="{_LINE}"/>'


def _span(span: Span, start: float, end: float, top: float) -> str:
    node, start_s, end_s, outcome, *rest = span
    style, width = style_of(outcome), max(end - start, 2.0)
    dash = ' stroke-dasharray="4 2"' if style.dashed else ""
    said = f"{node}: {outcome}, {start_s:.3g} to {end_s:.3g}" + (f". {rest[0]}" if rest and rest[0] else "")
    mark = _text(start + width / 2, top + 12, style.symbol, size=10, anchor="middle") if width >= 12 else ""
    return (
        f'<g data-node="{quote(node)}" data-state="{quote(outcome)}"><title>{quote(said)}</title>'
        f'<rect x="{start:.1f}" y="{top:g}" width="{width:.1f}" height="16" rx="2" fill="{style.fill}" '
        f'stroke="{style.stroke}"{dash}/>{mark}</g>'
    )


def _legend(
    counts: Mapping[str, int], colours: Mapping[str, str] | None, right: float, top: float
) -> tuple[list[str], float]:
    """Give the keys of the states that occur, wrapped to the width, and the height that they end at."""
    parts, x, y = [], _MARGIN, top + 12.0
    for state in in_order(counts):
        label = f"{state} ({counts[state]})"
        if x > _MARGIN and x + 24 + _label_px(label) > right - _MARGIN:
            x, y = _MARGIN, y + 20
        style = style_of(state)
        fill = quote((colours or {}).get(state, style.fill))
        parts.append(f'<rect x="{x:g}" y="{y - 8:g}" width="16" height="16" rx="3" fill="{fill}" stroke="none"/>')
        parts.append(_badge(x + 8, y, style, radius=7))
        parts.append(_text(x + 22, y + 4, label, size=10.5))
        x += 40 + _label_px(label) * 0.88
    return parts, y + 12


def _label_px(text: str) -> float:
    return 7.4 * text_width(text)


def _badge(x: float, y: float, style: Style, radius: float = 9) -> str:
    dot = f'<circle cx="{x:g}" cy="{y:g}" r="{radius:g}" fill="{style.stroke}"/>'
    return dot + _text(x, y + radius * 0.45, style.symbol, size=radius * 1.3, anchor="middle", fill="#ffffff")


def _text(
    x: float, y: float, text: str, *, size: float = 12, anchor: str = "start", weight: str = "", fill: str = _INK
) -> str:
    bold = f' font-weight="{weight}"' if weight else ""
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size:g}" text-anchor="{anchor}" fill="{fill}"{bold}>'
        f"{quote(text)}</text>"
    )


def _line(x1: float, y1: float, x2: float, y2: float, stroke: str, dash: str = "") -> str:
    dashes = f' stroke-dasharray="{dash}"' if dash else ""
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{stroke}"{dashes}/>'


def _svg(width: float, height: float, title: str, said: str, body: Iterable[str]) -> str:
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" role="img" width="{width:.0f}" height="{height:.0f}" '
        f'viewBox="0 0 {width:.0f} {height:.0f}" style="max-width:100%;height:auto" {_FONT}>'
        f"<title>{quote(title)}</title><desc>{quote(said)}</desc>"
        f'<rect width="100%" height="100%" rx="6" fill="#ffffff"/>'
        f"{_text(_MARGIN, 27, title, size=13, weight='600')}{''.join(body)}</svg>"
    )


def _ticks(low: float, high: float) -> list[float]:
    rough = ((high - low) or 1.0) / 6
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * m for m in (1, 2, 5, 10) if power * m >= rough)
    return [round(i * step, 12) for i in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)]


def _ink_on(fill: str) -> str:
    """Black or white, whichever can be read on a hexadecimal fill."""
    if len(fill) != 7 or not fill.startswith("#"):
        return _INK
    red, green, blue = (int(fill[i : i + 2], 16) for i in (1, 3, 5))
    return _INK if 0.3 * red + 0.59 * green + 0.11 * blue > 128 else "#ffffff"
