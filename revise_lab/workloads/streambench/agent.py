"""The deterministic agent: it fills in the steps of the task one by one from what it knows.

It is a pure function of the specification and the remembered turns, so the same decisions can be made in process or
behind an HTTP endpoint. By default it trusts its memory: what it remembers as done is done. With ``attention`` it notices,
with that probability for each remembered step, that the step itself quotes a clause which has changed, and does it again.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from hashlib import blake2b
from typing import Any, Final, NamedTuple, Protocol

from .scenarios import NOT_WANTED, NUMBERS, PRIORITY, Scenario, Step
from .stream import Epistemic, Read, Turn, compatible

_PLACE: Final = re.compile(r"\{(\w+)(?:\.(\w+))?\}")


class Call(NamedTuple):
    """What an agent wants next: a thought, and a tool with arguments; no tool means that it is done."""

    thought: str
    tool: str
    args: Any
    n_prompt_tokens: int | None = None
    n_output_tokens: int | None = None


class Agent(Protocol):
    """What the stream needs of an agent."""

    def next(self, state: Epistemic) -> Call:
        """Return what to do next."""
        ...

    def compatible(self, turn: Turn, spec: Mapping[str, Any]) -> bool:
        """Answer one compatibility call."""
        ...

    def answered(self, call: Call, complaint: str) -> None:
        """Hear that a call was malformed and has not been executed."""
        ...


def plan(scenario: Scenario, spec: Mapping[str, Any]) -> list[Step]:
    """Return the steps that a specification asks for, in order."""
    steps = [step for step in scenario.steps if not step.needs or spec[step.needs] != NOT_WANTED]
    if (first := spec[PRIORITY]) != NOT_WANTED:
        waiting = [step for step in steps if step.yields]
        steps = [step for step in steps if not step.yields]
        at = next(at for at, step in enumerate(steps) if step.name == first) + 1
        steps[at:at] = waiting
    return steps


def fill_in(
    step: Step, spec: Mapping[str, Any], results: Callable[[str], Mapping[str, Any] | None]
) -> tuple[dict[str, Any], tuple[Read, ...]]:
    """Return the arguments of a step and everything that they, and the place of the step, were derived from.

    Parameters
    ----------
    step : Step
        The step.
    spec : mapping
        The clauses.
    results : callable
        Name of a step to its latest result, None if there is none; what is missing reads as ``none`` or 0.
    """
    reads: dict[tuple[str, str], Any] = {}

    def value(found: re.Match[str]) -> Any:
        source, name = (found[1], found[2]) if found[2] else ("", found[1])
        reads[source, name] = (results(source) or {}).get(name) if source else spec[name]
        return reads[source, name]

    def text(found: re.Match[str]) -> str:
        return str(NOT_WANTED if (said := value(found)) is None else said)

    args: dict[str, Any] = {}
    for name, template in step.args.items():
        if name in NUMBERS:
            whole = _PLACE.fullmatch(template)
            args[name] = int((value(whole) or 0) if whole else template)
        else:
            args[name] = _PLACE.sub(text, template)
    if step.needs:
        reads["", step.needs] = spec[step.needs]
    if step.yields:
        reads["", PRIORITY] = first = spec[PRIORITY]
        if first != NOT_WANTED:
            reads[first, "reference"] = reference = (results(first) or {}).get("reference")
            args["body"] += f" Secured: {reference or NOT_WANTED}."
    return args, tuple(Read(*place, seen) for place, seen in reads.items())


def uniform(text: str) -> float:
    """Return a number in [0, 1) that depends on a text only."""
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "big") / 2.0**64


class PlannedAgent:
    """The deterministic agent.

    Parameters
    ----------
    scenario : Scenario
        The task, whose steps it knows.
    attention : float
        Probability of noticing, for each remembered step, that a clause which it quotes has changed.
    seed : int
        Decides what is noticed.
    """

    def __init__(self, scenario: Scenario, attention: float = 0.0, seed: int = 0) -> None:
        self.scenario, self.attention, self.seed = scenario, attention, seed

    def next(self, state: Epistemic) -> Call:
        """Return the next step of the plan that is not remembered as done, after what it noticed."""
        done = state.by_step()
        step = self._noticed(state, done) if self.attention else None
        why = "This no longer agrees with the task, so again"
        if step is None:
            why = "Next"
            step = next((each for each in plan(self.scenario, state.spec) if each.name not in done), None)
        if step is None:
            return Call("Everything that the task asks for is done.", "", {})
        args, _ = fill_in(step, state.spec, lambda name: done[name].result if name in done else None)
        return Call(f"{why}: {step.name.replace('_', ' ')}.", step.name, args)

    def compatible(self, turn: Turn, spec: Mapping[str, Any]) -> bool:
        """Say whether what a turn was derived from still holds."""
        return compatible(turn, spec)

    def answered(self, call: Call, complaint: str) -> None:
        """Never called: its arguments follow the schema."""
        raise AssertionError(f"{call.tool}: {complaint}")

    def _noticed(self, state: Epistemic, done: Mapping[str, Turn]) -> Step | None:
        for step in plan(self.scenario, state.spec):
            turn = done.get(step.name)
            if turn is None or not turn.early:
                continue
            quoted = any(not read.source and state.spec[read.field] != read.value for read in turn.reads)
            if quoted and uniform(f"{self.seed}/{step.name}") < self.attention:
                return step
        return None
