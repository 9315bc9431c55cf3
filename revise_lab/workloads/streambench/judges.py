"""The judges: assertions on the world, and a model.

The assertions were written from the revised text of each task, one list for each revision, and committed before the
methods. They look at what stands in the world (sent, booked, paid, published, or held where a tool is not enabled) and
never at how it came about. Quality is on the published scale: 1 if none holds, 5 if all do, linear between (our choice).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple

from revise_lab.errors import WorkflowError
from revise_lab.runtime.reply import MalformedReply, Model, ModelRequest

from .stream import RevisionType
from .world import Entry, World

Declared = Sequence[tuple[str, Mapping[str, Any]]]
ADD, LESS, SWAP, DROP, FIRST = RevisionType


class Assertion(NamedTuple):
    """One statement about the world, such as ``send_proposal.body has 'jazz'``.

    Attributes
    ----------
    tool, field : str
        Which entries, and which of their arguments; the field ``*`` is all of them.
    op : str
        ``once``: exactly one stands. ``absent``: none does. ``has``: some stand, and all of them have the text. ``lacks``:
        none has it. ``names``: like ``has``, with the text taken from ``tool.field`` of what stands. ``quotes``: like
        ``has``, with the reference of another tool's entry. ``after``: some stand, all of them later than one of another
        tool. ``at_most``: some stand, and their sum (of tools and fields joined by ``+``) is no more.
    value : Any
        The text, number, tool or ``tool.field``; ``lacks`` with the tool ``*`` looks at everything that stands.
    """

    tool: str
    field: str
    op: str
    value: Any = None

    def holds(self, world: World) -> bool:
        """Say whether it is so."""
        tools = {"*": ("",)}.get(self.tool, self.tool.split("+"))
        found = [entry for tool in tools for entry in world.standing(tool)]
        if self.op in ("once", "absent"):
            return len(found) == (self.op == "once")
        if self.op == "lacks":
            return not any(self.value in _text(entry, self.field) for entry in found)
        if not found:
            return False
        if self.op == "at_most":
            fields = self.field.split("+")
            return bool(sum(entry.args[field] for entry in found for field in fields) <= self.value)
        if self.op == "after":
            first = [entry.n for entry in world.standing(self.value)]
            return bool(first and min(entry.n for entry in found) > min(first))
        return all(any(text in _text(entry, self.field) for text in self._texts(world)) for entry in found)

    def _texts(self, world: World) -> list[str]:
        if self.op == "has":
            return [self.value]
        if self.op == "names":
            tool, field = self.value.split(".")
            return [str(entry.args[field]) for entry in world.standing(tool)]
        if self.op == "quotes":
            return [str(world.result(entry)["reference"]) for entry in world.standing(self.value)]
        raise WorkflowError(f"no assertion is called {self.op!r} - see Assertion for those that exist")

    def __str__(self) -> str:
        return f"{self.tool}.{self.field} {self.op} {self.value if self.value is not None else ''}".strip()


def _text(entry: Entry, field: str) -> str:
    return str(entry.args.get(field, "")) if field != "*" else " ".join(map(str, entry.args.values()))


def _each(*rows: tuple[Any, ...]) -> tuple[Assertion, ...]:
    return tuple(Assertion(*row) for row in rows)


#: For each task: what must hold under every revision, then what each revision asks for.
ASSERTIONS: Final[Mapping[str, Mapping[RevisionType | None, tuple[Assertion, ...]]]] = {
    "event_planning": {
        None: _each(
            ("send_proposal", "body", "once"),
            ("book_venue", "name", "once"),
            ("send_proposal", "body", "names", "book_venue.name"),
            ("send_invitations", "body", "names", "book_venue.name"),
            ("pay_deposit", "to", "names", "book_venue.name"),
        ),
        ADD: _each(
            ("draft_plan", "text", "has", "jazz trio"),
            ("send_proposal", "body", "has", "jazz trio"),
            ("book_extras", "name", "has", "jazz trio"),
            ("send_invitations", "body", "has", "jazz trio"),
        ),
        LESS: _each(
            ("send_proposal", "body", "has", "at most 4000"),
            ("draft_budget", "first+second", "at_most", 4000),
            ("book_venue+order_catering", "amount", "at_most", 4000),
            ("pay_deposit+pay_caterer", "amount", "at_most", 4000),
        ),
        SWAP: _each(
            ("*", "*", "lacks", "indoor dinner"),
            ("draft_plan", "text", "has", "outdoor barbecue"),
            ("draft_menu", "text", "has", "outdoor barbecue"),
            ("send_proposal", "body", "has", "outdoor barbecue"),
            ("book_venue", "detail", "has", "outdoor barbecue"),
            ("order_catering", "detail", "has", "outdoor barbecue"),
            ("send_invitations", "body", "has", "outdoor barbecue"),
        ),
        DROP: _each(
            ("order_catering", "name", "absent"),
            ("pay_caterer", "to", "absent"),
            ("draft_menu", "text", "absent"),
            ("draft_plan", "text", "has", "catering none"),
            ("draft_budget", "second", "at_most", 0),
            ("send_proposal", "body", "has", "catering none (none)"),
        ),
        FIRST: _each(
            ("send_proposal", "body", "after", "book_venue"),
            ("send_proposal", "body", "quotes", "book_venue"),
        ),
    },
    "travel_arrangement": {
        None: _each(
            ("send_itinerary", "body", "once"),
            ("book_flight", "name", "once"),
            ("send_itinerary", "body", "names", "book_flight.name"),
            ("notify_hosts", "body", "quotes", "book_flight"),
            ("pay_flight", "to", "names", "book_flight.name"),
        ),
        ADD: _each(
            ("draft_itinerary", "text", "has", "interpreter"),
            ("send_itinerary", "body", "has", "interpreter"),
            ("book_extras", "name", "has", "interpreter"),
            ("notify_hosts", "body", "has", "interpreter"),
        ),
        LESS: _each(
            ("send_itinerary", "body", "has", "at most 2000"),
            ("draft_expenses", "first+second", "at_most", 2000),
            ("book_flight+book_hotel", "amount", "at_most", 2000),
            ("pay_flight+pay_hotel", "amount", "at_most", 2000),
        ),
        SWAP: _each(
            ("*", "*", "lacks", "Lisbon"),
            ("draft_itinerary", "text", "has", "Porto"),
            ("draft_agenda", "text", "has", "Porto"),
            ("send_itinerary", "body", "has", "Porto"),
            ("book_flight", "detail", "has", "Porto"),
            ("book_hotel", "detail", "has", "Porto"),
            ("notify_hosts", "body", "has", "Porto"),
        ),
        DROP: _each(
            ("book_hotel", "name", "absent"),
            ("pay_hotel", "to", "absent"),
            ("draft_itinerary", "text", "has", "hotel none"),
            ("draft_expenses", "second", "at_most", 0),
            ("send_itinerary", "body", "has", "hotel none (none)"),
        ),
        FIRST: _each(
            ("send_itinerary", "body", "after", "book_flight"),
            ("send_itinerary", "body", "quotes", "book_flight"),
        ),
    },
    "report_and_publish": {
        None: _each(
            ("send_to_reviewers", "body", "once"),
            ("send_to_editor", "body", "once"),
            ("submit_report", "body", "quotes", "reserve_slot"),
            ("publish_report", "body", "names", "revise_draft.text"),
        ),
        ADD: _each(
            ("revise_draft", "text", "has", "fire drills"),
            ("send_to_reviewers", "body", "has", "fire drills"),
            ("book_extras", "name", "has", "fire drills"),
            ("submit_report", "body", "has", "fire drills"),
            ("publish_report", "body", "has", "fire drills"),
        ),
        LESS: _each(
            ("send_to_reviewers", "body", "has", "at most 3000"),
            ("draft_report", "first+second", "at_most", 3000),
            ("reserve_slot", "amount", "at_most", 3000),
        ),
        SWAP: _each(
            ("*", "*", "lacks", "costs for the city"),
            ("draft_report", "text", "has", "safety of the crews"),
            ("draw_figures", "text", "has", "safety of the crews"),
            ("revise_draft", "text", "has", "safety of the crews"),
            ("send_to_reviewers", "body", "has", "safety of the crews"),
            ("send_to_editor", "body", "has", "safety of the crews"),
            ("publish_report", "body", "has", "safety of the crews"),
        ),
        DROP: _each(
            ("draw_figures", "text", "absent"),
            ("draft_outline", "text", "has", "figures none"),
            ("send_to_reviewers", "body", "has", "figures none"),
            ("submit_report", "body", "has", "figures none"),
            ("publish_report", "body", "has", "figures none"),
        ),
        FIRST: _each(
            ("send_to_reviewers", "body", "after", "send_to_editor"),
            ("send_to_reviewers", "body", "quotes", "send_to_editor"),
        ),
    },
}


def broken(scenario: str, revision: RevisionType, world: World, declared: Declared) -> list[str]:
    """Return the assertions that do not hold, as texts.

    Parameters
    ----------
    scenario, revision : str, RevisionType
        Which lists to use.
    world : World
        The world at the end.
    declared : sequence of (tool, arguments)
        What the agent says that it has done, see :func:`outcome_broken`.
    """
    lists = ASSERTIONS[scenario]
    found = [str(each) for each in (*lists[None], *lists[revision]) if not each.holds(world)]
    return found + ["declared is not what stands"] * outcome_broken(world, declared)


def quality(scenario: str, revision: RevisionType, n_broken: int) -> float:
    """Return the quality from the number of assertions that do not hold, on the scale of 1 to 5."""
    n = len(ASSERTIONS[scenario][None]) + len(ASSERTIONS[scenario][revision]) + 1
    return 1 + 4 * (n - n_broken) / n


def outcome_broken(world: World, declared: Declared) -> bool:
    """Say whether the agent's account of its effects differs from those that stand, in content or number."""
    stands = sorted(json.dumps([entry.tool, entry.args], sort_keys=True) for entry in world.standing())
    return stands != sorted(json.dumps([tool, dict(args)], sort_keys=True) for tool, args in declared)


_RUBRIC: Final = (
    "You are a strict judge. A user gave a task and revised it while an agent worked on it. Compare what the agent did to"
    " the world, and what it declares, with the revised task. Every effect that contradicts the revised task, every gap"
    " between the declaration and the effects, and every contradictory message left standing lowers the score."
    ' Answer with JSON only: {"score": n}, from 1 (useless or harmful) to 5 (all of it right).'
)
_SCHEMA: Final = {
    "type": "object",
    "properties": {"score": {"type": "integer", "minimum": 1, "maximum": 5}},
    "required": ["score"],
    "additionalProperties": False,
}
N_SCORES: Final = 3


async def model_quality(model: Model, task: str, spec: Mapping[str, Any], world: World, outcome: str) -> list[int]:
    """Ask a model three times, at temperature 0, and return its scores; the quality is their mean.

    Parameters
    ----------
    model : Model
        The judge; another endpoint than the agent's, if there is one.
    task, spec : str, mapping
        The task, and its clauses after the revision.
    world, outcome : World, str
        What was done, and what the agent says about it.

    Raises
    ------
    MalformedReply
        If an answer holds no score from 1 to 5.
    """
    seen = {"revised task": task, "clauses": dict(spec), "world": world.public(), "declared": outcome}
    messages = [{"role": "system", "content": _RUBRIC}, {"role": "user", "content": json.dumps(seen, indent=1)}]
    scores = []
    for number in range(N_SCORES):
        request = ModelRequest(messages=messages, temperature=0.0, seed=number, json_schema=_SCHEMA, node="judge")
        answer = (await model.complete(request)).json
        score = answer.get("score") if isinstance(answer, dict) else None
        if isinstance(score, bool) or not isinstance(score, int) or not 1 <= score <= 5:
            raise MalformedReply(f"the judge answered {answer!r:.80} - it must give a score from 1 to 5")
        scores.append(score)
    return scores


def listed(scenario: str, revision: RevisionType) -> Iterable[str]:
    """Return the assertions that a run is judged by, as texts."""
    return (*map(str, (*ASSERTIONS[scenario][None], *ASSERTIONS[scenario][revision])), "declared is what stands")
