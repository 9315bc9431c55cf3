"""Effects: actions on the world outside that a node asks for and the run holds back."""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple

from .value import Obj, Value, equal

_NONE = Obj()


class Reversibility(StrEnum):
    """The effect classes of arXiv:2604.23283."""

    INERT = "I"
    """Does not change the world; never staged, never published."""
    REVERSIBLE = "R"
    COMPENSABLE = "K"
    IRREVERSIBLE = "X"


class EffectState(StrEnum):
    """Where an effect stands; the machine's table says how it gets there."""

    STAGED = "staged"
    AUTHORISED = "authorised"
    """It may leave; whether it still should is asked again when it does."""
    DISPATCHED = "dispatched"
    CONFIRMED = "confirmed"
    UNKNOWN = "unknown"
    """The call may have left; the target has to be asked."""
    TO_COMPENSATE = "to_compensate"
    COMPENSATING = "compensating"
    COMPENSATED = "compensated"
    DROPPED = "dropped"
    """It never left, or the target says that it did not arrive."""
    BLOCKED = "blocked"
    """Only a person can go on; it is listed as residue."""


class Answer(StrEnum):
    """What is learnt of a call to a target."""

    LANDED = "landed"
    REFUSED = "refused"
    """A premise had changed: nothing was written."""
    ABSENT = "absent"
    """Asked for the effect, the target does not know it."""
    UNDONE = "undone"
    UNSURE = "unsure"
    """No answer, or one that says nothing."""
    STUCK = "stuck"
    """The target says that it cannot do it."""


class Effect(NamedTuple):
    """What a node stages.

    Attributes
    ----------
    slot : str
        Names the effect among those of its node; model text is never part of its identity.
    payload : Value
        What is to be written.
    reversibility : Reversibility
        Its class.
    target : str
        Name of the target that writes it.
    premises : Value
        Resource to the token under which it was read: written only if none of them has changed.
    consent : bool
        An irreversible effect may leave before the close because another node reads its confirmation.
    """

    slot: str
    payload: Value
    reversibility: Reversibility = Reversibility.COMPENSABLE
    target: str = ""
    premises: Value = _NONE
    consent: bool = False

    def same(self, other: Effect) -> bool:
        """Say whether both ask for the same thing; under what premises does not matter."""
        return self.target == other.target and equal(self.payload, other.payload)


class Intent(NamedTuple):
    """The identity of an effect: workflow, node, slot and epoch; a confirmed compensation closes the epoch (R11)."""

    workflow: str
    node: str
    slot: str
    epoch: int

    @property
    def key(self) -> str:
        """The text under which a target knows it."""
        return f"{self.workflow}/{self.node}/{self.slot}/{self.epoch}"


def confirmation(node: str, slot: str) -> str:
    """Return the name of the artifact that holds the confirmation of an effect."""
    return f"{node}/{slot}"
