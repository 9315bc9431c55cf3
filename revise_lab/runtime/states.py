"""The states of a scenario, merged: complete, for verdicts that are functions of a state and a move.

Breadth first, so that the first history that fails is a shortest one. A state is the tuple of moves that led to it and is
reached again by making them again; nothing is copied.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from revise_lab.audit.auditor import audit
from revise_lab.audit.plain import same
from revise_lab.audit.scenario import FAILED, Scenario
from revise_lab.audit.truth import current_truth, receipt_of
from revise_lab.core.plan import Policy
from revise_lab.errors import ReviseLabError
from revise_lab.records import event as ev
from revise_lab.records.value import ABSENT, freeze

from .world import World, events_of

N_WARM = 1000


class Problem(NamedTuple):
    """A failure and the shortest line of moves that shows it."""

    anomaly: str
    detail: str
    line: str

    def __str__(self) -> str:
        return f"{self.anomaly}: {self.detail} - {self.line}"


def modes_of(how: Policy) -> frozenset[str]:
    """Return the words by which a scenario tells policies apart."""
    switches = how.switches
    extension = {"extension"} if switches.extension == "on" else set()
    words = {f"{switches.release}_release", switches.compensation, *extension}
    return frozenset({how.name, switches.check, switches.propagation, switches.unknown, *words})


# --- what must hold --------------------------------------------------------------------------------------------------


def wrong(world: World, added: Sequence[ev.Entry]) -> Iterator[tuple[str, str]]:
    """Yield what is wrong with a state that was just reached, and with what was decided on the way."""
    machine = world.machine
    inputs, outcome, effects = current_truth(world.scenario, world.accepted)
    truth = {name: value for name, value in outcome.items() if value != FAILED}
    for name, value in inputs.items():
        if not same(machine.inputs[name], value):
            yield "torn revision", f"{name} is {machine.inputs[name]!r}, should be {value!r}"
    for name, run in machine.runs.items():
        if run.settled and not same(machine.values.get(name, ABSENT), truth.get(name, ABSENT)):
            yield "settled wrong", f"{name} is {machine.values.get(name)!r}, a fresh run gives {truth.get(name)!r}"
    out = [name for name, _ in world.outside.ledger.live()]
    for name in {name for name in out if out.count(name) > 1}.union(world.outside.ledger.repeated):
        yield "two live effects", f"{name} is out twice"
    for at, entry in enumerate(added):
        if isinstance(entry, ev.Committed) and not any(isinstance(later, ev.Accepted) for later in added[at:]):
            name = entry.attempt.rpartition("@")[0]
            if name in machine.runs and not same(machine.values[name], truth.get(name, ABSENT)):
                yield "committed wrong", f"{name} is {machine.values[name]!r}, a fresh run gives {truth.get(name)!r}"
        if isinstance(entry, ev.Effected) and entry.state == "dispatched" and entry.effect:
            name = f"{entry.intent.node}/{entry.intent.slot}"
            if not same(entry.effect.payload, effects.get(name, ABSENT)):
                yield "stale dispatch", f"{name} sends {entry.effect.payload!r}, a fresh run {effects.get(name)!r}"
        if isinstance(entry, ev.Started | ev.Moved) and entry.attempt in machine.attempts:
            snapshot = machine.attempts[entry.attempt].snapshot
            for name, value in snapshot.parents.items() if snapshot else ():
                receipt = receipt_of(effects[name]) if name in effects else ABSENT
                if not same(value, receipt if "/" in name else truth.get(name, ABSENT)):
                    yield "snapshot never existed", f"{entry.attempt} sees {name} = {value!r}, not {truth.get(name)!r}"


def wrong_end(world: World) -> Iterator[tuple[str, str]]:
    """Yield what is wrong with a run in which nothing can happen any more."""
    machine = world.machine
    _, truth, effects = current_truth(world.scenario, world.accepted)
    if machine.state == "cancelled":
        return
    if machine.status == "blocked":
        yield from _wrong_residue(world)
        return
    failed = FAILED in truth.values()
    out = dict(world.outside.ledger.live())
    if failed:  # what lies below a failure is kept until it is known what is wanted; what has failed wants nothing
        out = {name: payload for name, payload in out.items() if truth.get(name.rpartition("/")[0]) == FAILED}
    if not same(freeze(out), freeze({} if failed else effects)):
        yield "wrong effects", f"{out!r} is out, a fresh run publishes {effects!r}"
    if machine.status != ("failed" if failed else "closed"):
        waits = ", ".join(f"{run.name} is {run.status}" for run in machine.runs.values() if not run.settled)
        yield "stuck", f"the run is {machine.status}; {waits}"
    came_out = final_of(world)
    if not same(came_out, freeze(truth)):
        yield "wrong output", f"{came_out!r}, a fresh run gives {truth!r}"
    if not any(same(came_out, freeze(final)) for final in world.scenario.required.finals):
        yield "not the required outcome", f"{came_out!r}"


def _wrong_residue(world: World) -> Iterator[tuple[str, str]]:
    """Yield what is wrong with a run that waits for a person: it may only do so for what the scenario names."""
    _, truth, effects = current_truth(world.scenario, world.accepted)
    out = dict(world.outside.ledger.live())
    for intent, effect, why in world.machine.residue():
        name = f"{intent.node}/{intent.slot}"
        wanted = same(effect.payload, effects.get(name, ABSENT)) and same(effect.payload, out.get(name, ABSENT))
        if name not in world.scenario.required.blocked or (wanted and effect.reversibility == "X"):
            yield "blocked", f"{name}: {why}"
    for name, value in world.machine.outputs().items():
        if not same(value, truth.get(name, ABSENT)):
            yield "wrong output", f"{name} is {value!r}, a fresh run gives {truth.get(name)!r}"


def final_of(world: World) -> Any:
    """Return outputs and failures of a run, frozen."""
    failures = dict.fromkeys(world.machine.failures(), FAILED)
    return freeze({**world.machine.outputs(), **failures})


# --- merged ----------------------------------------------------------------------------------------------------------


class Merged:
    """The complete graph of a scenario's states.

    Parameters
    ----------
    scenario, how : Scenario, Policy
        What may happen, and how to recover.
    audits : bool
        Audit also the journal of the history by which each move is made first.
    blames_errors : bool
        Whether an exception is a problem, or just a move that leads nowhere.

    Attributes
    ----------
    problems : list of Problem
        Empty, or what the shortest failing history shows; exploration ends there.
    edges : list of list of (int, tuple of str)
        For each state its successors and the events on the way.
    """

    def __init__(self, scenario: Scenario, how: Policy, *, audits: bool = False, blames_errors: bool = True) -> None:
        self.scenario, self.how, self.audits, self.blames_errors = scenario, how, audits, blames_errors
        self.problems: list[Problem] = []
        self.edges: list[list[tuple[int, tuple[str, ...]]]] = []
        self.finals: list[Any] = []
        self.order: list[int] = []
        self._came: list[tuple[int, str]] = [(-1, "")]
        self._index: dict[Hashable, int] = {World(scenario, how).key(): 0}
        self._warm: dict[int, World] = {}
        """Worlds that stand in a state which is still to be expanded, as far as memory allows."""
        while len(self.edges) < len(self._came) and not self.problems:
            self._expand(len(self.edges))
        if not self.problems:
            self.order = self._sorted()
            if len(self.order) < len(self.edges):
                stuck = min(set(range(len(self.edges))) - set(self.order))
                self.problems.append(Problem("livelock", "a run can go on for ever", "; ".join(self.history(stuck))))

    def history(self, state: int) -> tuple[str, ...]:
        """Return the moves by which a state was reached first."""
        moves = []
        while state:
            state, move = self._came[state]
            moves.append(move)
        return tuple(reversed(moves))

    def _expand(self, state: int) -> None:
        history = self.history(state)
        world = self._warm.pop(state, None) or World(self.scenario, self.how, history)
        moves = world.moves()
        edges: list[tuple[int, tuple[str, ...]]] = []
        self.edges.append(edges)
        if not moves:
            self._blame(wrong_end(world), history)
            if world.machine.state != "cancelled":
                self.finals.append(final_of(world))
        for i, move in enumerate(moves):
            if i:
                world = World(self.scenario, self.how, history)
            try:
                added = world.do(move)
                key = world.key()
            except (ReviseLabError, AssertionError, LookupError) as error:
                self._blame([("raised", repr(error))] if self.blames_errors else [], (*history, move))
                continue
            target = self._index.setdefault(key, len(self._came))
            self._blame(wrong(world, added), (*history, move))
            if self.audits:
                found = audit(world.machine.journal)
                self._blame(((each.anomaly, str(each)) for each in found), (*history, move))
            if target == len(self._came):
                self._came.append((state, move))
                if len(self._warm) < N_WARM:
                    self._warm[target] = world
            edges.append((target, events_of(move, added)))
            if self.problems:
                return

    def _blame(self, found: Iterable[tuple[str, str]], history: Sequence[str]) -> None:
        self.problems.extend(Problem(*each, "; ".join(history)) for each in found)

    def _sorted(self) -> list[int]:
        """Return the states, successors first; those on a cycle and before it are left out."""
        before: list[list[int]] = [[] for _ in self.edges]
        left = [len(edges) for edges in self.edges]
        for state, edges in enumerate(self.edges):
            for target, _ in edges:
                before[target].append(state)
        order = [state for state, count in enumerate(left) if not count]
        for state in order:
            for other in before[state]:
                left[other] -= 1
                if not left[other]:
                    order.append(other)
        return order

    def histories(self) -> int:
        """Return the number of complete schedules, by counting paths."""
        paths = [0] * len(self.edges)
        for state in self.order:
            paths[state] = sum(paths[target] for target, _ in self.edges[state]) or 1
        return paths[0]

    def counts(self) -> dict[str, tuple[int, int]]:
        """Return how often each event happens in a complete schedule, at least and at most."""
        least: list[Counter[str]] = [Counter() for _ in self.edges]
        most: list[Counter[str]] = [Counter() for _ in self.edges]
        for state in self.order:
            ways = [(least[target], most[target], Counter(events)) for target, events in self.edges[state]]
            for event in {event for way in ways for part in way for event in part}:
                least[state][event] = min(low[event] + own[event] for low, _, own in ways)
                most[state][event] = max(high[event] + own[event] for _, high, own in ways)
        return {event: (least[0][event], most[0][event]) for event in most[0]}

    def seen_orders(self, first: str, second: str) -> bool:
        """Say whether some schedule has one event before the other."""
        ahead = [False] * len(self.edges)
        for state in self.order:
            ahead[state] = any(second in events or ahead[target] for target, events in self.edges[state])
        return any(first in events and ahead[target] for edges in self.edges for target, events in edges)


def unmet(merged: Merged) -> list[Problem]:
    """Return the requirements of a scenario that its complete graph does not meet."""
    required, modes = merged.scenario.required, modes_of(merged.how)
    found = []
    for final in required.finals:
        if not any(same(freeze(final), each) for each in merged.finals):
            found.append(Problem("outcome never reached", repr(final), ""))
    counts = merged.counts()
    for event, bounds in required.counts_in(modes).items():
        if counts.get(event, (0, 0)) != bounds:
            found.append(Problem("count", f"{event} happens {counts.get(event, (0, 0))} times, required {bounds}", ""))
    return found
