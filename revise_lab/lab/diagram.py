"""The state diagram of the documentation, drawn from the machine's own table.

Run ``python -m revise_lab.lab.diagram docs/states.svg`` after a change of the table.
"""

from __future__ import annotations

import sys
from pathlib import Path

from revise_lab import draw
from revise_lab.core.table import ATTEMPTS
from revise_lab.lab.files import write_atomic
from revise_lab.records.attempt import AttemptState


def attempt_states() -> str:
    """Return the states of an attempt and what leads from one to the next, as SVG."""
    moves: dict[tuple[str, str], list[str]] = {}
    for (state, event), targets in ATTEMPTS.items():
        for target in targets:
            if target is not state:
                moves.setdefault((str(state), str(target)), []).append(event)
    leaving: dict[str, list[str]] = {}
    for (state, target), events in moves.items():
        leaving.setdefault(state, []).append(f"{' or '.join(events)}: {target}")
    nodes = [
        (str(state), "state", str(state), "; ".join(leaving.get(str(state), ["the end"]))) for state in AttemptState
    ]
    return draw.workflow_svg(nodes, list(moves), title="states of an attempt", legend=False)


if __name__ == "__main__":
    write_atomic(Path(sys.argv[1]), attempt_states().encode())
