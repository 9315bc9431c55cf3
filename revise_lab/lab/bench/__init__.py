"""What the core costs, beside its budgets and beside what one would use instead: ``revise-lab bench core``.

Everything is measured on real machines that were driven by events, never on parts built for the occasion. A sample is one
operation between two readings of the clock; the median cost of two readings with nothing between them is subtracted. What
is compared (sizes, ours and a peer's) is sampled in turn, within one process, so that a noisy machine hits both alike.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

from revise_lab import draw
from revise_lab.errors import ConfigError

from . import certificate, events, planning
from .samples import Row, clock_ns, say

__all__ = ["PARTS", "Row", "bench_core", "render"]


def bench_core(rows: str | None = None, quick: bool = False) -> list[Row]:
    """Measure the core against the budgets of the design (our choice; the papers report 2.6 and 207 us).

    Parameters
    ----------
    rows : str, optional
        Only what holds this text: a part (``certificate``, ``planning``, ``view``, ``events``) or words of a row.
    quick : bool
        Fewer samples, graphs of up to 1e4 nodes, 1e3 unrelated reads.

    Raises
    ------
    ConfigError
        No row holds the text.
    """
    named = [part for part in PARTS if rows and rows in part]
    found = []
    for part in named or PARTS:
        say(f"measuring: {part}")
        found += PARTS[part](quick)
    kept = found if named or not rows else [row for row in found if rows in f"{row.what} {row.case}"]
    if not kept:
        parts = ", ".join(PARTS)
        raise ConfigError(f"no row of the benchmark holds {rows!r} - name a part ({parts}) or words of a row")
    return kept


def render(rows: Iterable[Row]) -> str:
    """Return the rows as a table, with what was subtracted below it."""

    def number(value: float | None, digits: int = 3) -> str:
        return "" if value is None else f"{value:,.{max(0, digits - 1 - math.floor(math.log10(abs(value) or 1)))}f}"

    measures, verdicts = ("p50", "p95", "budget", "ratio"), {None: "", True: "yes", False: "NO"}
    lines = [
        row._replace(
            n=f"{row.n:,}",
            met=verdicts[row.met],
            exponent="" if row.exponent is None else f"{row.exponent:+.3f}",
            **{name: number(getattr(row, name)) for name in measures},
        )
        for row in rows
    ]
    table = draw.table_text(lines, Row._fields)
    return f"{table}\n\nReading the clock, {clock_ns():.0f} ns, is subtracted; garbage is collected in events only."


PARTS: dict[str, Callable[[bool], list[Row]]] = {
    "certificate": certificate.rows,
    "planning": planning.rows,
    "view": certificate.view_rows,
    "events": events.rows,
}
"""What can be asked for, in the order in which it is measured."""
