"""The world outside, as the explorer knows it: a target that writes once per key, and calls on their way to it.

A call that has left may land at any later time, also after the process that sent it has died; asking for a key that the
target does not know makes the key void, so that what lands afterwards is refused. Without that, no recovery could be right.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from typing import Any, NamedTuple

from revise_lab.audit.truth import receipt_of
from revise_lab.records import event as ev
from revise_lab.records.effect import Answer, Effect, Intent, confirmation
from revise_lab.records.value import thaw


class Ledger:
    """A target that writes once per key.

    Attributes
    ----------
    records : dict
        Key to the effect that was asked for and ``live``, ``undone`` or ``void``.
    repeated : set of str
        ``node/slot`` of what was sent and written again under one key: there twice, were the target less careful.
    """

    def __init__(self) -> None:
        self.records: dict[str, tuple[Intent, Effect, str]] = {}
        self.repeated: set[str] = set()

    def live(self) -> Iterator[tuple[str, Any]]:
        """Yield ``node/slot`` and payload of everything that is written and not undone."""
        return (
            (confirmation(intent.node, intent.slot), effect.payload)
            for intent, effect, state in self.records.values()
            if state == "live"
        )

    def perform(self, what: str, intent: Intent, effect: Effect) -> ev.Answered:
        """Do what a call asks for and return the answer."""
        known = self.records.get(intent.key)
        if what == "publish":
            if known is None:
                self.records[intent.key] = (intent, effect, "live")
            elif known[2] == "live":
                self.repeated.add(confirmation(intent.node, intent.slot))
            else:
                return ev.Answered(intent, Answer.REFUSED, None, "the key is closed")
            return ev.Answered(intent, Answer.LANDED, receipt_of(thaw(effect.payload)))
        if what == "undo":
            self.records[intent.key] = (intent, effect, "undone")
            return ev.Answered(intent, Answer.UNDONE)
        if known is None:
            known = self.records[intent.key] = (intent, effect, "void")
        said = {"live": Answer.LANDED, "undone": Answer.UNDONE, "void": Answer.ABSENT}[known[2]]
        return ev.Answered(intent, said, receipt_of(thaw(known[1].payload)) if said is Answer.LANDED else None)


class Call(NamedTuple):
    """A call on its way: to the target while ``reply`` is ``None``, then back."""

    what: str
    intent: Intent
    effect: Effect
    reply: ev.Answered | None = None
    heard: bool = True
    """Whether somebody waits for the answer."""


_LAND = {"publish": "land", "undo": "unland", "find": "find"}


class Outside:
    """One target for all effects of a scenario.

    Parameters
    ----------
    faults : tuple of (str, str)
        What may go wrong, each once; see :class:`revise_lab.audit.scenario.Scenario`.
    """

    def __init__(self, faults: tuple[tuple[str, str], ...]) -> None:
        self.ledger = Ledger()
        self._calls: list[Call] = []
        self._faults = list(faults)

    def take(self, act: ev.Act) -> None:
        """Let a call leave."""
        self._calls.append(Call(act.what, act.intent, act.effect))

    def crash(self) -> None:
        """Forget who waits for answers; calls go on."""
        self._calls = [call._replace(heard=False) for call in self._calls if call.reply is None and call.what != "find"]

    def fault(self, place: str, what: str) -> bool:
        """Say whether something may go wrong at a place."""
        return (place, what) in self._faults

    def spend(self, place: str, what: str) -> None:
        """Let it go wrong."""
        self._faults.remove((place, what))

    def moves(self) -> list[str]:
        """Return what may happen to the calls."""
        found = []
        for call in self._calls:
            place = _place(call.intent)
            name = _name(call.intent)
            if call.reply is not None:
                found.append(f"answer {name}")
            else:
                found.append(f"{_LAND[call.what]} {name}")
                if not call.heard:
                    found.append(f"vanish {name}")
                for what, on in (("refused", "publish"), ("stuck", "undo"), ("silent", "find")):
                    if call.what == on and call.heard and self.fault(place, what):
                        found.append(f"{what} {name}")
            if call.what != "find" and call.heard and self.fault(place, "unsure"):
                found.append(f"lose {name}")
        return list(dict.fromkeys(found))

    def do(self, move: str) -> ev.Answered | None:
        """Make a move; return what the run is told, if anything."""
        what, _, name = move.partition(" ")
        words = {word: kind for kind, word in _LAND.items()}
        on = {"refused": "publish", "stuck": "undo", "silent": "find"}.get(what, words.get(what))
        call = next(each for each in self._calls if _name(each.intent) == name and self._fits(each, what, on))
        self._calls.remove(call)
        if what == "answer":
            return call.reply
        if what == "vanish":
            return None
        if what == "lose":
            self.spend(_place(call.intent), "unsure")
            if call.reply is None:
                self._calls.append(call._replace(heard=False))
            return ev.Answered(call.intent, Answer.UNSURE)
        if what in ("refused", "stuck", "silent"):
            self.spend(_place(call.intent), what)
            said = {"refused": Answer.REFUSED, "stuck": Answer.STUCK, "silent": Answer.UNSURE}[what]
            return ev.Answered(call.intent, said, None, what)
        reply = self.ledger.perform(call.what, call.intent, call.effect)
        if call.what == "find":
            return reply
        if call.heard:
            self._calls.append(call._replace(reply=reply))
        return None

    @staticmethod
    def _fits(call: Call, what: str, on: str | None) -> bool:
        if what == "answer":
            return call.reply is not None
        if what in ("lose", "vanish"):
            return call.heard is (what == "lose")
        return call.what == on and call.reply is None

    def key(self) -> Hashable:
        """Return what decides everything that can still happen out there."""
        records = tuple(sorted((key, effect.payload, state) for key, (_, effect, state) in self.ledger.records.items()))
        return records, tuple(self._calls), tuple(self._faults)


def _place(intent: Intent) -> str:
    return confirmation(intent.node, intent.slot)


def _name(intent: Intent) -> str:
    return _place(intent) + (f":{intent.epoch}" if intent.epoch else "")
