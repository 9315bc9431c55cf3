"""The three tasks as data: clauses, steps, and one revision of each type.

An argument is a template: ``{clause}`` is a clause of the specification, ``{step.field}`` a field of the result of an
earlier step. What a step was derived from follows from what its templates read; nothing is declared beside them.

Assumption: the reversibility ratio counts the *outward* steps, from the ninth on. With eight inert or reversible steps
first, a task of 13 to 15 tools cannot reach 0.25 over all of them (the least is 0.53); the share over all tools stands
beside the nominal one in the results. A disabled tool has a reversible stand-in: it holds in a tray what it would send,
book, pay or publish. Tools are enabled in the order of the steps, so that the ninth is compensable below 1.0.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

from revise_lab.records.effect import Reversibility

from .stream import Injection, RevisionType

INERT, REVERSIBLE = Reversibility.INERT, Reversibility.REVERSIBLE
COMPENSABLE, IRREVERSIBLE = Reversibility.COMPENSABLE, Reversibility.IRREVERSIBLE
NUMBERS: Final = frozenset({"limit", "amount", "first", "second"})
"""Names of arguments that are numbers; all others are texts."""
NOT_WANTED: Final = "none"
"""The value of a clause that asks for nothing."""
PRIORITY: Final = "first_of_all"
"""The clause that names a step which must come before the ninth."""
FIRST_OUTWARD: Final = 9
RATIOS: Final = (1.0, 0.75, 0.5, 0.25)
GRID_RATIOS: Final = {
    **dict.fromkeys((RevisionType.ADDITIVE, RevisionType.RESTRICTIVE, RevisionType.SUBSTITUTIVE), RATIOS),
    **dict.fromkeys((RevisionType.CANCELLATION, RevisionType.PRIORITY_SHIFT), (0.5, 0.25)),
}
"""Ratios of the grid by type; those of the two practical types are our choice, the paper does not say which half ran."""


class Step(NamedTuple):
    """One step and its tool.

    Attributes
    ----------
    name : str
        Name of the step and of the tool.
    verb : str
        What the tool does to the world, see :mod:`.world`.
    cls : Reversibility
        Class of the tool where it is enabled.
    args : mapping
        Argument to template.
    needs : str
        A clause without which the step falls away.
    yields : bool
        Whether the step waits for the one that the priority clause names, and then quotes its reference.
    """

    name: str
    verb: str
    cls: Reversibility
    args: Mapping[str, str]
    needs: str = ""
    yields: bool = False


class Scenario(NamedTuple):
    """A task.

    Attributes
    ----------
    name, task : str
        Name, and what the user asks for.
    clauses : mapping
        The specification at the start.
    steps : tuple of Step
        In order.
    injections : mapping
        One revision of each type; each contradicts what the ninth step has said.
    """

    name: str
    task: str
    clauses: Mapping[str, Any]
    steps: tuple[Step, ...]
    injections: Mapping[RevisionType, Injection]

    @property
    def base_steps(self) -> tuple[Step, ...]:
        """The steps of the unrevised task."""
        return tuple(step for step in self.steps if not step.needs or self.clauses[step.needs] != NOT_WANTED)

    def classes(self, rho: float) -> dict[str, Reversibility]:
        """Return the class of every tool at a nominal reversibility ratio of the outward steps."""
        outward = [step.name for step in self.base_steps[FIRST_OUTWARD - 1 :]]
        # half up: the ninth step must be enabled below 1.0, and a tie must not hang on the evenness of a number
        enabled = set(outward[: math.floor(len(outward) * (1 - rho) + 0.5)])
        extra = {step.name for step in self.steps} - {step.name for step in self.base_steps}
        inward = {step.name for step in self.steps} - set(outward) - extra
        keep = inward | enabled | (extra if rho < 1 else set())
        return {step.name: step.cls if step.name in keep else REVERSIBLE for step in self.steps}


def _injections(**given: tuple[str, dict[str, Any]]) -> dict[RevisionType, Injection]:
    return {RevisionType(name): Injection(RevisionType(name), *parts) for name, parts in given.items()}


EVENT = Scenario(
    "event_planning",
    "Arrange the farewell party for our chief engineer. Clear the plan with the committee, then book, pay and invite.",
    {
        "style": "indoor dinner",
        "date": "12 June",
        "guests": 40,
        "ceiling": 6000,
        "catering": "wanted",
        "extras": NOT_WANTED,
        PRIORITY: NOT_WANTED,
    },
    (
        Step("search_venues", "look_up", INERT, {"kind": "venue", "wish": "{style}", "limit": "{ceiling}"}),
        Step(
            "search_caterers",
            "look_up",
            INERT,
            {"kind": "caterer", "wish": "{style}", "limit": "{ceiling}"},
            "catering",
        ),
        Step("check_forecast", "look_up", INERT, {"kind": "forecast", "wish": "{date}"}),
        Step("look_up_staff", "look_up", INERT, {"kind": "staff list", "wish": "{guests} seats"}),
        Step(
            "draft_plan",
            "note",
            REVERSIBLE,
            {"text": "{style} at {search_venues.name} on {date}; catering {catering}; extras: {extras}"},
        ),
        Step("draft_guest_list", "note", REVERSIBLE, {"text": "{guests} guests, from {look_up_staff.name}"}),
        Step(
            "draft_budget",
            "total",
            REVERSIBLE,
            {"first": "{search_venues.amount}", "second": "{search_caterers.amount}"},
        ),
        Step("draft_menu", "note", REVERSIBLE, {"text": "Menu for an {style}, by {search_caterers.name}"}, "catering"),
        Step(
            "send_proposal",
            "message",
            COMPENSABLE,
            {
                "to": "the committee",
                "body": "We propose an {style} at {search_venues.name} on {date} for {guests}, total {draft_budget.total} "
                "of at most {ceiling}; catering {catering} ({search_caterers.name}); extras: {extras}.",
            },
            yields=True,
        ),
        Step(
            "book_venue",
            "booking",
            COMPENSABLE,
            {
                "name": "{search_venues.name}",
                "amount": "{search_venues.amount}",
                "detail": "{search_venues.wish}, {date}",
            },
        ),
        Step(
            "order_catering",
            "booking",
            COMPENSABLE,
            {
                "name": "{search_caterers.name}",
                "amount": "{search_caterers.amount}",
                "detail": "{search_caterers.wish}",
            },
            "catering",
        ),
        Step(
            "book_extras", "booking", COMPENSABLE, {"name": "{extras}", "amount": "300", "detail": "{date}"}, "extras"
        ),
        Step(
            "pay_deposit",
            "payment",
            IRREVERSIBLE,
            {"to": "{book_venue.name}", "amount": "{search_venues.amount}", "detail": "{book_venue.reference}"},
        ),
        Step(
            "send_invitations",
            "message",
            COMPENSABLE,
            {
                "to": "all guests",
                "body": "Please join us for an {style} at {book_venue.name} on {date}; extras: {extras}.",
            },
        ),
        Step(
            "send_reminder",
            "message",
            COMPENSABLE,
            {"to": "all guests", "body": "Remember: {style}, {book_venue.name}, {date}."},
        ),
        Step(
            "pay_caterer",
            "payment",
            IRREVERSIBLE,
            {
                "to": "{order_catering.name}",
                "amount": "{search_caterers.amount}",
                "detail": "{order_catering.reference}",
            },
            "catering",
        ),
    ),
    _injections(
        additive=("And let us have a jazz trio as well.", {"extras": "a jazz trio"}),
        restrictive=("Finance has cut us: 4,000 in all is the most we may spend.", {"ceiling": 4000}),
        substitutive=("No indoor dinner after all, make it an outdoor barbecue.", {"style": "outdoor barbecue"}),
        cancellation=("Drop the catering, the canteen will bring the food.", {"catering": NOT_WANTED}),
        priority_shift=("Secure the venue before the committee hears of it.", {PRIORITY: "book_venue"}),
    ),
)

TRAVEL = Scenario(
    "travel_arrangement",
    "Arrange Dr Okafor's visit to our partner. Send her the itinerary, book what it names, tell the hosts, pay the bills.",
    {
        "destination": "Lisbon",
        "date": "3 March",
        "nights": 4,
        "ceiling": 3000,
        "hotel": "wanted",
        "extras": NOT_WANTED,
        PRIORITY: NOT_WANTED,
    },
    (
        Step("search_flights", "look_up", INERT, {"kind": "flight", "wish": "{destination}", "limit": "{ceiling}"}),
        Step(
            "search_hotels", "look_up", INERT, {"kind": "hotel", "wish": "{destination}", "limit": "{ceiling}"}, "hotel"
        ),
        Step("check_visa", "look_up", INERT, {"kind": "visa rule", "wish": "{destination}"}),
        Step("check_calendar", "look_up", INERT, {"kind": "calendar", "wish": "{date}"}),
        Step(
            "draft_itinerary",
            "note",
            REVERSIBLE,
            {"text": "{destination}, {date}, {nights} nights; {search_flights.name}; hotel {hotel}; extras: {extras}"},
        ),
        Step("draft_packing_list", "note", REVERSIBLE, {"text": "{nights} nights, from {check_calendar.name}"}),
        Step(
            "draft_expenses",
            "total",
            REVERSIBLE,
            {"first": "{search_flights.amount}", "second": "{search_hotels.amount}"},
        ),
        Step("draft_agenda", "note", REVERSIBLE, {"text": "Meetings in {destination} from {date}"}),
        Step(
            "send_itinerary",
            "message",
            COMPENSABLE,
            {
                "to": "Dr Okafor",
                "body": "You fly to {destination} on {date} with {search_flights.name}; {nights} nights, hotel {hotel} "
                "({search_hotels.name}); total {draft_expenses.total} of at most {ceiling}; extras: {extras}.",
            },
            yields=True,
        ),
        Step(
            "book_flight",
            "booking",
            COMPENSABLE,
            {
                "name": "{search_flights.name}",
                "amount": "{search_flights.amount}",
                "detail": "{search_flights.wish}, {date}",
            },
        ),
        Step(
            "book_hotel",
            "booking",
            COMPENSABLE,
            {
                "name": "{search_hotels.name}",
                "amount": "{search_hotels.amount}",
                "detail": "{search_hotels.wish}, {nights} nights",
            },
            "hotel",
        ),
        Step(
            "book_extras", "booking", COMPENSABLE, {"name": "{extras}", "amount": "120", "detail": "{date}"}, "extras"
        ),
        Step(
            "notify_hosts",
            "message",
            COMPENSABLE,
            {
                "to": "the hosts",
                "body": "Dr Okafor comes to {destination} on {date}, {book_flight.reference}; extras: {extras}.",
            },
        ),
        Step(
            "pay_flight",
            "payment",
            IRREVERSIBLE,
            {"to": "{book_flight.name}", "amount": "{search_flights.amount}", "detail": "{book_flight.reference}"},
        ),
        Step(
            "pay_hotel",
            "payment",
            IRREVERSIBLE,
            {"to": "{book_hotel.name}", "amount": "{search_hotels.amount}", "detail": "{book_hotel.reference}"},
            "hotel",
        ),
    ),
    _injections(
        additive=("She also needs an interpreter there.", {"extras": "an interpreter"}),
        restrictive=("The grant pays 2,000 and not a cent more.", {"ceiling": 2000}),
        substitutive=("The meeting has moved: Porto instead of Lisbon.", {"destination": "Porto"}),
        cancellation=("No hotel please, she stays with a colleague.", {"hotel": NOT_WANTED}),
        priority_shift=("Get the flight fixed before she is sent anything.", {PRIORITY: "book_flight"}),
    ),
)

REPORT = Scenario(
    "report_and_publish",
    "Write the report on battery recycling in the harbour. Have it reviewed, take it to the editor, submit and publish it.",
    {
        "angle": "the costs for the city",
        "outlet": "the harbour review",
        "ceiling": 5000,
        "figures": "wanted",
        "extras": NOT_WANTED,
        PRIORITY: NOT_WANTED,
    },
    (
        Step("search_references", "look_up", INERT, {"kind": "source", "wish": "{angle}", "limit": "{ceiling}"}),
        Step(
            "read_papers", "look_up", INERT, {"kind": "paper", "wish": "{search_references.name}", "limit": "{ceiling}"}
        ),
        Step("check_house_style", "look_up", INERT, {"kind": "style sheet", "wish": "{outlet}"}),
        Step("look_up_reviewers", "look_up", INERT, {"kind": "reviewer", "wish": "battery recycling"}),
        Step(
            "draft_outline",
            "note",
            REVERSIBLE,
            {"text": "Battery recycling and {angle}; figures {figures}; {extras} extra"},
        ),
        Step(
            "draft_report",
            "total",
            REVERSIBLE,
            {"first": "{search_references.amount}", "second": "{read_papers.amount}", "text": "On {angle}"},
        ),
        Step("draw_figures", "note", REVERSIBLE, {"text": "Charts of {angle}, after {read_papers.name}"}, "figures"),
        Step("revise_draft", "note", REVERSIBLE, {"text": "On {angle}, in {check_house_style.name}; extras: {extras}"}),
        Step(
            "send_to_reviewers",
            "message",
            COMPENSABLE,
            {
                "to": "{look_up_reviewers.name}",
                "body": "For review: battery recycling and {angle}, {draft_report.total} words of at most {ceiling}, after "
                "{read_papers.name}; figures {figures}; extras: {extras}.",
            },
            yields=True,
        ),
        Step(
            "send_to_editor",
            "message",
            COMPENSABLE,
            {"to": "{outlet}", "body": "Offered: {angle}, {draft_report.total} words, after {read_papers.name}."},
        ),
        Step(
            "reserve_slot",
            "booking",
            COMPENSABLE,
            {"name": "{outlet}", "amount": "{draft_report.total}", "detail": "{angle}"},
        ),
        Step(
            "book_extras", "booking", COMPENSABLE, {"name": "{extras}", "amount": "80", "detail": "{outlet}"}, "extras"
        ),
        Step(
            "submit_report",
            "publication",
            IRREVERSIBLE,
            {
                "to": "{outlet}",
                "body": "{angle}: {draft_report.total} words, after {read_papers.name}; figures {figures}; "
                "extras: {extras}. {reserve_slot.reference}",
            },
        ),
        Step(
            "publish_report",
            "publication",
            IRREVERSIBLE,
            {"to": "the open shelf", "body": "{revise_draft.text}; figures {figures}"},
        ),
    ),
    _injections(
        additive=("It needs an annex on fire drills too.", {"extras": "an annex on fire drills"}),
        restrictive=("They print 3,000 words at most.", {"ceiling": 3000}),
        substitutive=("Not the costs: write about the safety of the crews.", {"angle": "the safety of the crews"}),
        cancellation=("Leave the figures out.", {"figures": NOT_WANTED}),
        priority_shift=("The editor must have it before any reviewer does.", {PRIORITY: "send_to_editor"}),
    ),
)

SCENARIOS: Final = {each.name: each for each in (EVENT, TRAVEL, REPORT)}
