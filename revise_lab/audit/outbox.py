"""What the auditor knows of effects: who asked for them, what is out in the world, and what may be.

Like the rest of the auditor it believes what targets have answered and none of the machine's decisions: whether
an effect may leave is decided again from what the node's current attempt read and staged.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from revise_lab.records import event as ev

from .plain import same

_PROOF: Final = {"confirmed": ("landed",), "compensated": ("undone",), "dropped": ("refused", "absent")}
"""What a target must have said."""
OUT: Final = ("dispatched", "unknown", "confirmed", "to_compensate", "compensating", "blocked")


@dataclass
class Sent:
    """One effect that has left."""

    key: str
    effect: Any
    attempt: str
    at: int
    state: str = "dispatched"
    undo_sent: bool = False
    undo_left: bool = False
    """A call to undo it has left at some time: it may land at any time after, so that the effect cannot be kept."""
    landed: bool = False


@dataclass
class Slot:
    """What is out in one slot of a node, and what has been proved never to have arrived."""

    live: Sent | None = None
    sent: set[str] = field(default_factory=set)
    """Keys that may be at the target."""
    approved: tuple[Any, ...] = ()
    """The payload that somebody has allowed."""


class Outbox:
    """The fold over the facts about effects.

    Parameters
    ----------
    wants : callable
        Gives what the current attempt of a node stages in a slot, or ``None``.
    fresh : callable
        Says whether the current attempt of a node is made from what is there now.
    find : callable
        Takes a finding: anomaly, who, where it began, what is out and what is wanted.
    descends : callable
        Says whether an attempt rests on a node.
    """

    def __init__(
        self,
        wants: Callable[[str, str], Any],
        fresh: Callable[[str], bool],
        find: Callable[..., None],
        descends: Callable[[str, str], bool],
    ) -> None:
        self._wants, self._fresh, self._find, self._descends = wants, fresh, find, descends
        self.slots: dict[tuple[str, str], Slot] = {}
        self.switches: Mapping[str, Any] = {}
        self._sealing = False
        self._said: dict[str, str] = {}
        self._early: dict[str, tuple[str, int]] = {}

    def seal(self, *, sealing: bool = True) -> None:
        """Note that the run was asked to close, or was opened again."""
        self._sealing = sealing

    def receipt(self, entry: ev.Receipt) -> None:
        """Note that somebody reads a confirmation: its effect was right to leave before the close."""
        self._early.pop(entry.artifact, None)

    def approve(self, entry: ev.Authorise) -> None:
        """Note that somebody allowed a payload."""
        slot = self.slots.setdefault((entry.node, entry.slot), Slot())
        slot.approved = (entry.payload,) if entry.granted else ()

    def answer(self, entry: ev.Answered) -> None:
        """Note what a target said; nothing else proves what is out there."""
        self._said["/".join(map(str, entry.intent))] = str(entry.answer)

    def outdated(self, artifact: str) -> bool:
        """Say whether a confirmation is of something that its node does not want any more."""
        node, _, name = artifact.partition("/")
        live = self.slots[node, name].live if (node, name) in self.slots else None
        wanted = self._wants(node, name)
        if live is None or wanted is None:
            return False
        return not _alike(live.effect, wanted)

    def take(self, entry: ev.Effected, at: int) -> None:
        """Take in a fact about an effect."""
        _, node, name, _ = entry.intent
        slot = self.slots.setdefault((node, name), Slot())
        state, key = str(entry.state), "/".join(map(str, entry.intent))
        live = slot.live
        if state == "dispatched":
            self._dispatched(slot, entry, key, at)
        elif state == "compensating" and live:
            self._undoing(slot, live, node, name)
        elif live and live.key == key and (state in _PROOF or state in OUT):
            if (
                state in _PROOF
                and not (live.landed and state == "confirmed")
                and self._said.get(key) not in _PROOF[state]
            ):
                self._find("answer made up", key, live.at, state, self._said.get(key))
            self._ended(slot, live, state)

    def _ended(self, slot: Slot, live: Sent, state: str) -> None:
        """Take over what has become of what is out."""
        live.state = state
        live.landed = live.landed or state == "confirmed"
        if state == "confirmed":
            live.undo_sent = False
        elif state in ("compensated", "dropped"):
            slot.live = None
            if state == "dropped":
                slot.sent.discard(live.key)

    def _dispatched(self, slot: Slot, entry: ev.Effected, key: str, at: int) -> None:
        _, node, name, _ = entry.intent
        wanted = self._wants(node, name)
        if slot.live is not None:
            self._find("double effect", key, slot.live.at, slot.live.effect.payload, None)
        if key in slot.sent:
            self._find("double effect", key, at, None, None)
        payload = entry.effect.payload if entry.effect else None
        if wanted is None or entry.effect is None or not _alike(entry.effect, wanted) or not self._fresh(node):
            self._find("stale effect", key, at, payload, wanted.payload if wanted else None)
        late = self.switches.get("release") == "close" and entry.effect and str(entry.effect.reversibility) != "R"
        if late and not self._sealing:
            self._early[f"{node}/{name}"] = (key, at)
        if self.switches.get("approval") == "on" and not any(same(each, payload) for each in slot.approved):
            self._find("effect not authorised", key, at, payload, None)
        slot.sent.add(key)
        slot.live = Sent(key, entry.effect, entry.attempt, at)

    def _undoing(self, slot: Slot, live: Sent, node: str, name: str) -> None:
        wanted = self._wants(node, name)
        if str(live.effect.reversibility) == "X":
            self._find("irreversible effect undone", live.key, live.at, live.effect.payload, None)
        if not live.landed:
            self._find("undone before it was confirmed", live.key, live.at, live.effect.payload, None)
        if live.undo_sent:
            self._find("undone twice", live.key, live.at, live.effect.payload, None)
        elif not live.undo_left and self._keeps(live, wanted) and self._fresh(node):
            self._find("wanted effect undone", live.key, live.at, live.effect.payload, live.effect.payload)
        for (other, _), rest in self.slots.items():
            then = rest.live
            open_ = then and then.at > live.at and then.state in ("to_compensate", "compensating") and other != node
            if then and open_ and self._descends(then.attempt, node):
                self._find("undone out of order", live.key, then.at, live.effect.payload, then.effect.payload)
        live.state, live.undo_sent, live.undo_left = "compensating", True, True

    def _keeps(self, live: Sent, wanted: Any) -> bool:
        return self.switches.get("compensation") == "lazy" and _alike(live.effect, wanted)

    def closed(self, wanted: Iterable[tuple[str, Any]]) -> None:
        """Hold what is out against everything that a sealed run wants."""
        missing = {(node, effect.slot): effect for node, effect in wanted}
        for place, slot in self.slots.items():
            live, right = slot.live, missing.pop(place, None)
            if live is None and right is not None:
                self._find("effect lost", "/".join(place), None, None, right.payload)
            elif live is not None and (right is None or not _alike(live.effect, right)):
                self._find("effect not undone", live.key, live.at, live.effect.payload, right and right.payload)
            elif live is not None and live.state != "confirmed":
                self._find("effect lost", live.key, live.at, live.effect.payload, live.state)
        for (node, name), effect in missing.items():
            self._find("effect lost", f"{node}/{name}", None, None, effect.payload)
        for key, at in self._early.values():
            self._find("effect left before the close", key, at, None, None)


def _alike(one: Any, other: Any) -> bool:
    if one is None or other is None:
        return one is other
    return bool(one.target == other.target and same(one.payload, other.payload))
