"""Workflows, plans and runs as SVG, HTML and text, from plain tuples.

Everything that can be shown is drawn here, and only here, so that a state has one colour, one symbol and one name in
notebooks, terminals and figures. This floor knows nothing of the others: a node arrives as ``(name, kind, state,
note)``, an edge as ``(parent, child)`` or ``(parent, child, role)``. Equal input gives equal bytes; a change of state
moves nothing, so that a drawing can be updated in place while a run is under way.

JupyterLab shows ``image/svg+xml`` as a picture. To keep tooltips and the ``data-node`` and ``data-state`` attributes
reachable, hand the SVG over as ``text/html``.
"""

from __future__ import annotations

from revise_lab.draw.layout import Edge, Node
from revise_lab.draw.svg import Span, timeline_svg, workflow_svg
from revise_lab.draw.text import STYLES, Style, table_html, table_text, workflow_text

__all__ = [
    "STYLES",
    "Edge",
    "Node",
    "Span",
    "Style",
    "table_html",
    "table_text",
    "timeline_svg",
    "workflow_svg",
    "workflow_text",
]
