"""A world that tools change and anybody can inspect: notes, messages, bookings, payments, publications.

Every effect is an entry. A reversible one has an exact inverse; a message, a booking is compensated (a correction goes
out, a fee is due) and its entry stays, marked; a payment or a publication stays as it is.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, Final

from revise_lab.records.effect import Reversibility

FEE_SHARE: Final = 10
"""A cancelled booking costs its amount divided by this."""
_FIRST: Final = ("Alder", "Birch", "Cedar", "Hazel", "Larch", "Maple", "Rowan", "Willow")
_OFFERS: Final = 4


@dataclass(slots=True)
class Entry:
    """One effect in the world.

    ``n`` is its number, in the order in which effects came about. ``state`` is ``staged`` (held back by the run),
    ``held`` (in the tray of a tool that is not enabled), ``standing``, ``compensated`` or ``replaced``.
    """

    n: int
    tool: str
    verb: str
    cls: Reversibility
    args: Mapping[str, Any]
    state: str = "standing"

    @property
    def stands(self) -> bool:
        """Whether somebody who looks at the world would go by it."""
        return self.state in ("standing", "held", "staged")


class World:
    """The world of one run.

    Parameters
    ----------
    seed : int
        What is on offer, under which names and at what price, depends on it and on the wish.
    """

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.entries: dict[int, Entry] = {}
        self.corrections: list[str] = []
        self.fees = 0
        self._n = 0

    def call(
        self, tool: str, verb: str, cls: Reversibility, args: Mapping[str, Any], *, staged: bool = False
    ) -> tuple[dict[str, Any], int | None]:
        """Carry out one tool call.

        Parameters
        ----------
        tool, verb : str
            Name of the tool and what it does.
        cls : Reversibility
            Class under which it runs; a reversible message, booking, payment or publication is held in a tray.
        args : mapping
            Arguments, already checked.
        staged : bool
            Hold the effect back until :meth:`release`.

        Returns
        -------
        tuple
            The result, and the number of the entry or None.
        """
        if verb == "look_up":
            return self._offer(args), None
        self._n += 1
        entry = Entry(self._n, tool, verb, cls, dict(args))
        if cls is Reversibility.REVERSIBLE:
            entry.state = "standing" if verb in ("note", "total") else "held"
            for other in self.standing(tool):  # one note under one name, one draft in one tray
                other.state = "replaced"
        elif staged:
            entry.state = "staged"
        self.entries[entry.n] = entry
        return self.result(entry), entry.n

    def undo(self, n: int) -> bool:
        """Undo an entry: take it back, or make up for it.

        Returns
        -------
        bool
            False for what can be neither: it stays, and is nobody's to hide.
        """
        entry = self.entries[n]
        if entry.state == "staged":
            del self.entries[n]
        elif entry.cls is Reversibility.REVERSIBLE:
            del self.entries[n]
            before = [
                other for other in self.entries.values() if other.tool == entry.tool and other.state == "replaced"
            ]
            if entry.stands and before:
                before[-1].state = "held" if before[-1].verb not in ("note", "total") else "standing"
        elif entry.cls is Reversibility.COMPENSABLE and entry.state == "standing":
            entry.state = "compensated"
            if entry.verb == "booking":
                self.fees += entry.args["amount"] // FEE_SHARE
            else:
                self.corrections.append(f"To {entry.args['to']}: please disregard what we wrote ({entry.tool}).")
        else:
            return False
        return True

    def release(self) -> None:
        """Let everything leave that was held back by the run."""
        for entry in self.entries.values():
            if entry.state == "staged":
                entry.state = "standing"

    def standing(self, tool: str = "") -> Iterator[Entry]:
        """Iterate over the entries that stand, in order, of one tool or of all."""
        return (entry for entry in list(self.entries.values()) if entry.stands and tool in ("", entry.tool))

    def public(self) -> list[tuple[str, str, str, dict[str, Any]]]:
        """Return every entry with its content (tool, class, state, arguments), as a judge may see it."""
        return [(entry.tool, str(entry.cls), entry.state, dict(entry.args)) for entry in self.entries.values()]

    def _offer(self, args: Mapping[str, Any]) -> dict[str, Any]:
        """Return the dearest of a few offers that leaves more than half of the limit, or the cheapest there is."""
        kind, wish = args["kind"], args["wish"]
        draw = blake2b(f"{self.seed}/{kind}/{wish}".encode(), digest_size=2 * _OFFERS + 1).digest()
        limit = args.get("limit", 0)
        prices = [300 + 10 * (int.from_bytes(draw[at : at + 2], "big") % 270) for at in range(0, 2 * _OFFERS, 2)]
        # every market has something modest, or no revised limit could be met
        prices.append(300 + draw[-1])
        fitting = [price for price in prices if price <= limit * 9 // 20]
        amount = max(fitting, default=min(prices))
        name = f"{_FIRST[draw[prices.index(amount)] % len(_FIRST)]} {kind} {amount % 97} ({wish})"
        return {"name": name, "wish": wish, "amount": amount}

    @staticmethod
    def result(entry: Entry) -> dict[str, Any]:
        """Return what the tool answered when the entry came about."""
        if entry.verb == "total":
            return {"total": entry.args["first"] + entry.args["second"]}
        if entry.verb == "note":
            return {"text": entry.args["text"]}
        # a reference follows from what was asked for, so that asking twice for the same is one and the same
        said = "/".join(f"{key}={entry.args[key]}" for key in sorted(entry.args))
        reference = f"{entry.tool}-{blake2b(said.encode(), digest_size=3).hexdigest()}"
        return {"reference": reference, "name": entry.args.get("name", entry.args.get("to", ""))}


def complaint(wanted: Collection[str], args: Any, numbers: Collection[str]) -> str:
    """Return what is wrong with the arguments of a call, or an empty text; a call with a complaint is never executed.

    Parameters
    ----------
    wanted : collection of str
        The arguments that the tool takes, all of them required.
    args : Any
        What came.
    numbers : collection of str
        Arguments that must be numbers; the others must be texts.
    """
    if not isinstance(args, dict):
        return f"the arguments must be an object, not {type(args).__name__}"
    if missing := [name for name in wanted if name not in args]:
        return f"missing: {', '.join(missing)}"
    if unknown := [name for name in args if name not in wanted]:
        return f"unknown: {', '.join(unknown)}"
    for name, value in args.items():
        if isinstance(value, bool) or not isinstance(value, int if name in numbers else str):
            return f"{name} must be a {'whole number' if name in numbers else 'text'}, not {type(value).__name__}"
    return ""
