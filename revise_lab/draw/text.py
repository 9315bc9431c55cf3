"""The look of a state, and tables for terminals and notebooks."""

from __future__ import annotations

import unicodedata
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import NamedTuple

from revise_lab.draw.layout import Edge, Node, ranks


class Style(NamedTuple):
    """How a state looks: colour alone never carries the meaning."""

    symbol: str
    fill: str
    stroke: str
    dashed: bool = False


#: Node states, plan actions, outcomes of attempts. Hues after Okabe and Ito; within each of the three, no symbol twice.
STYLES: dict[str, Style] = {
    "pending": Style("○", "#ffffff", "#767676"),
    "running": Style("▸", "#cfe6f5", "#0072b2"),
    "finished": Style("◐", "#e6f4ef", "#00795a", dashed=True),
    "committed": Style("✓", "#bfe6d8", "#00795a"),
    "skipped": Style("↷", "#efefef", "#767676", dashed=True),
    "failed": Style("!", "#f4c7ae", "#b34700"),
    "aborted": Style("■", "#f2d3e2", "#a3467a"),
    "cancelled": Style("⊗", "#f2d3e2", "#a3467a", dashed=True),
    "rejected": Style("≠", "#f4c7ae", "#b34700", dashed=True),
    "orphaned": Style("?", "#f2d3e2", "#a3467a", dashed=True),
    "blocked": Style("‖", "#4d4d4d", "#000000"),
    "cancel": Style("✕", "#f4c7ae", "#b34700"),
    "avoid": Style("⊘", "#fdf1d4", "#9a6a00", dashed=True),
    "recompute": Style("↻", "#fad98c", "#9a6a00"),
    "continue": Style("»", "#cfe6f5", "#0072b2"),
    "reuse": Style("=", "#bfe6d8", "#00795a"),
    "completed": Style("✓", "#8fd0ba", "#00795a"),
    "recomputed": Style("↻", "#f5c451", "#9a6a00"),
}
_OTHER = Style("·", "#ffffff", "#767676", dashed=True)


def workflow_text(nodes: Sequence[Node], edges: Sequence[Edge], *, title: str = "workflow") -> str:
    """Write the same drawing as a table: one line a node, parents first.

    Parameters
    ----------
    nodes, edges, title
        As for `workflow_svg`.

    Returns
    -------
    str
        A heading with the tally of states, then the table. No trailing blank.
    """
    rank = ranks(nodes, edges)
    after: dict[str, list[str]] = {node[0]: [] for node in nodes}
    for edge in edges:
        after[edge[1]].append(edge[0] + ("*" if edge[2:] == ("control",) else ""))
    ordered = sorted(nodes, key=lambda node: rank[node[0]])
    rows = [
        (style_of(state).symbol, name, kind, state, ", ".join(after[name]) or "-", note)
        for name, kind, state, note in ordered
    ]
    counted = tally(Counter(node[2] for node in nodes)) or "no nodes"
    starred = "   (* control)" if any(edge[2:] == ("control",) for edge in edges) else ""
    return f"{clean(title)}: {counted}\n{table_text(rows, ('', 'node', 'kind', 'state', 'after' + starred, 'note'))}"


def table_html(rows: Iterable[Sequence[object]], columns: Sequence[str], *, caption: str = "") -> str:
    """Write rows as an HTML table, escaped, numbers to the right.

    Parameters
    ----------
    rows : iterable of sequences
        Cells in column order. None is an empty cell, a float is written with four significant digits.
    columns : sequence of str
        Headings.
    caption : str
        Heading of the table, left out when empty.

    Returns
    -------
    str
        One ``<table>`` element.
    """
    head = "".join(f'<th scope="col" style="text-align:left">{quote(name)}</th>' for name in columns)
    lines = []
    for row in rows:
        cells = (
            f'<td style="text-align:{"right" if _is_number(cell) else "left"}">{quote(_cell(cell))}</td>'
            for cell in row
        )
        lines.append(f"<tr>{''.join(cells)}</tr>")
    name = f"<caption>{quote(caption)}</caption>" if caption else ""
    return f"<table>{name}<thead><tr>{head}</tr></thead><tbody>{''.join(lines)}</tbody></table>"


def table_text(rows: Iterable[Sequence[object]], columns: Sequence[str]) -> str:
    """Write rows as an aligned table for a terminal.

    Parameters
    ----------
    rows : iterable of sequences
        As for `table_html`. Line ends and control characters in a cell are made visible: a row stays a row, and text
        that came from a model cannot steer the terminal.
    columns : sequence of str
        Headings; a rule is drawn under them.

    Returns
    -------
    str
        The lines, without trailing blanks.
    """
    rows = [tuple(row) for row in rows]
    cells = [tuple(clean(name) for name in columns), *(tuple(_cell(cell) for cell in row) for row in rows)]
    widths = [max(text_width(line[i]) for line in cells) for i in range(len(columns))]
    right = [bool(rows) and all(row[i] is None or _is_number(row[i]) for row in rows) for i in range(len(columns))]

    def aligned(line: tuple[str, ...]) -> str:
        padded = []
        for text, width, to_right in zip(line, widths, right, strict=True):
            blank = " " * (width - text_width(text))
            padded.append(blank + text if to_right else text + blank)
        return "  ".join(padded).rstrip()

    rule = "  ".join("-" * width for width in widths)
    return "\n".join([aligned(cells[0]), rule, *map(aligned, cells[1:])])


def style_of(state: str) -> Style:
    """Look up a state; one that is not listed is drawn plain, under its own name."""
    return STYLES.get(state, _OTHER)


def in_order(counts: Mapping[str, int]) -> list[str]:
    """Sort states as `STYLES` lists them, others after those."""
    known = [state for state in STYLES if state in counts]
    return known + sorted(state for state in counts if state not in STYLES)


def tally(counts: Mapping[str, int]) -> str:
    """Say how many nodes are in each state."""
    return ", ".join(f"{counts[state]} {clean(state)}" for state in in_order(counts))


def clean(text: str) -> str:
    """Put text on one line without control characters, which neither XML nor a terminal can be given."""
    flat = " ".join(text.split())
    return "".join("\ufffd" if unicodedata.category(c) in ("Cc", "Cs") or c in "\ufffe\uffff" else c for c in flat)


def quote(text: str) -> str:
    """Make text safe inside an element or an attribute."""
    return escape(clean(text), quote=True)


def cut(text: str, chars: int) -> str:
    """Shorten text, with an ellipsis to say so."""
    flat = clean(text)
    return flat if len(flat) <= chars else flat[: chars - 1] + "…"


def text_width(text: str) -> int:
    """Count the columns that text takes in a terminal."""
    wide = sum(unicodedata.east_asian_width(c) in "WF" for c in text)
    return len(text) + wide - sum(unicodedata.combining(c) > 0 for c in text)


def _is_number(cell: object) -> bool:
    return isinstance(cell, int | float) and not isinstance(cell, bool)


def _cell(cell: object) -> str:
    if cell is None:
        return ""
    return f"{cell:.4g}" if isinstance(cell, float) else clean(str(cell))
