"""A run drawn in a notebook while it runs."""

from __future__ import annotations

import asyncio

from revise_lab import draw
from revise_lab.runtime.session import Run


def follow(run: Run, interval_s: float = 0.05) -> asyncio.Task[None]:
    """Draw a run below the cell and redraw it as nodes change, until it ends.

    Parameters
    ----------
    run : Run
        A run on the notebook's event loop.
    interval_s : float
        Shortest time between two drawings.
    """
    from IPython.display import HTML, display

    shown = run._repr_html_()
    handle = display(HTML(shown), display_id=True)

    async def redraw() -> None:
        last = shown
        while True:
            now = run._repr_html_()
            if now != last:
                handle.update(HTML(now))
                last = now
            if run.ended:
                return
            await asyncio.sleep(interval_s)

    return asyncio.get_running_loop().create_task(redraw())


def timeline(run: Run) -> str:
    """Return the attempts of a run as an SVG timeline: completed, aborted, and run again after a revision."""
    spans = run.spans
    first = min((span.start_s for span in spans), default=0.0)
    seen: set[str] = set()
    rows = []
    for span in spans:
        again = "recomputed" if span.node in seen and span.outcome == "completed" else span.outcome
        seen.add(span.node)
        end_s = span.end_s if span.end_s is not None else span.start_s
        rows.append((span.node, span.start_s - first, end_s - first, again))
    marks = [(at_s - first, revision) for revision, at_s in run.revised_s]
    return draw.timeline_svg(rows, marks=marks, title=f"{run.id}: attempts on the clock")
