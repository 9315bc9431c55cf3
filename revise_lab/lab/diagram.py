"""The state diagrams of the documentation, drawn from the machine's own tables.

Run ``python -m revise_lab.lab.diagram docs`` after a change of a table.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from enum import StrEnum
from pathlib import Path

from revise_lab import draw
from revise_lab.core.table import ATTEMPTS, EFFECTS
from revise_lab.lab.files import write_atomic
from revise_lab.records.attempt import AttemptState
from revise_lab.records.effect import EffectState


def diagrams() -> dict[str, str]:
    """Return the diagrams as SVG, by file name."""
    effects = {move: (target,) for move, target in EFFECTS.items()}
    return {
        "states.svg": _states(ATTEMPTS, AttemptState, "states of an attempt"),
        "effects.svg": _states(effects, EffectState, "states of an effect"),
    }


def _states(table: Mapping[tuple[StrEnum, str], Iterable[StrEnum]], states: Iterable[StrEnum], title: str) -> str:
    """Draw the states of a table and what leads from one to the next; ways back are in the notes of the states only."""
    states = list(states)
    moves: dict[tuple[StrEnum, StrEnum], list[str]] = {}
    for (state, event), targets in table.items():
        for target in targets:
            if target is not state:
                moves.setdefault((state, target), []).append(event)
    leaving: dict[StrEnum, list[str]] = {state: [] for state in states}
    for (state, target), events in moves.items():
        leaving[state].append(f"{' or '.join(events)}: {target}")
    nodes = [(str(state), "state", str(state), "; ".join(leads) or "the end") for state, leads in leaving.items()]
    forward = [(str(one), str(other)) for one, other in moves if states.index(one) < states.index(other)]
    return draw.workflow_svg(nodes, forward, title=title, legend=False)


if __name__ == "__main__":
    for name, drawing in diagrams().items():
        write_atomic(Path(sys.argv[1]) / name, drawing.encode())
