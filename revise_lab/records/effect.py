"""Effects: actions on the world outside that a node asks for and the run holds back."""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple

from .value import Value


class Reversibility(StrEnum):
    """The effect classes of arXiv:2604.23283."""

    INERT = "I"
    """Does not change the world; never staged, never published."""
    REVERSIBLE = "R"
    COMPENSABLE = "K"
    IRREVERSIBLE = "X"


class EffectState(StrEnum):
    """The life of a staged effect."""

    STAGED = "staged"
    AUTHORISED = "authorised"
    DISPATCHED = "dispatched"
    CONFIRMED = "confirmed"
    UNKNOWN = "unknown"
    TO_COMPENSATE = "to_compensate"
    COMPENSATED = "compensated"
    DROPPED = "dropped"
    BLOCKED = "blocked"


class Effect(NamedTuple):
    """What a node stages: the slot and the payload; model text is never part of its identity."""

    slot: str
    payload: Value
    reversibility: Reversibility = Reversibility.COMPENSABLE
    target: str = ""


class Intent(NamedTuple):
    """The identity of an effect: workflow, node, slot and epoch."""

    workflow: str
    node: str
    slot: str
    epoch: int
