"""The explorer: every order in which a scenario can happen, on the machine itself.

Two modes, because they prove different things. *Merged*: states are merged by a canonical fingerprint, so that the
exploration is complete; what is checked there is a function of a state and a move. *Unmerged*: complete schedules, each
executed from its start, whose journals the auditor reads; only these count as audited, whatever number of interleavings
the merged states stand for. A state is the tuple of moves that led to it and is reached again by making them again:
nothing is copied. A failure is one line of moves, which :func:`replay_line` executes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from itertools import product
from random import Random
from typing import Any, NamedTuple

from revise_lab.audit.auditor import audit, same
from revise_lab.audit.scenario import FAILED, Scenario
from revise_lab.audit.scenarios import SCENARIOS
from revise_lab.core.plan import Policy
from revise_lab.errors import RefusedCombination, ReviseLabError
from revise_lab.policies import names, policy
from revise_lab.records import event as ev
from revise_lab.records.value import ABSENT, freeze

from .world import World, current_truth, events_of

N_WARM = 1000


class Problem(NamedTuple):
    """A failure and the shortest line of moves that shows it."""

    anomaly: str
    detail: str
    line: str

    def __str__(self) -> str:
        return f"{self.anomaly}: {self.detail} - {self.line}"


def combinations() -> list[Policy]:
    """Return every policy with every combination of switches that is not refused."""
    found = []
    for name, check, propagation, unknown, extension in product(
        names(), ("delta", "digest"), ("descendants", "diff"), ("global", "local"), ("off", "on")
    ):
        try:
            switches = {"check": check, "propagation": propagation, "unknown": unknown, "extension": extension}
            found.append(policy(name, **switches))
        except RefusedCombination:
            continue
    return found


def modes_of(how: Policy) -> frozenset[str]:
    """Return the words by which a scenario tells policies apart."""
    switches = how.switches
    extension = {"extension"} if switches.extension == "on" else set()
    return frozenset({how.name, switches.check, switches.propagation, switches.unknown, *extension})


# --- what must hold --------------------------------------------------------------------------------------------------


def wrong(world: World, added: Iterable[ev.Entry]) -> Iterator[tuple[str, str]]:
    """Yield what is wrong with a state that was just reached, and with what was decided on the way."""
    machine = world.machine
    inputs, truth = current_truth(world.scenario, world.accepted)
    for name, value in inputs.items():
        if not same(machine.inputs[name], value):
            yield "torn revision", f"{name} is {machine.inputs[name]!r}, should be {value!r}"
    for name, run in machine.runs.items():
        if run.settled and not same(machine.values.get(name, ABSENT), truth.get(name, ABSENT)):
            yield "settled wrong", f"{name} is {machine.values.get(name)!r}, a fresh run gives {truth.get(name)!r}"
    for entry in added:
        if isinstance(entry, ev.Started | ev.Moved) and entry.attempt in machine.attempts:
            snapshot = machine.attempts[entry.attempt].snapshot
            for name, value in snapshot.parents.items() if snapshot else ():
                if not same(value, truth.get(name, ABSENT)):
                    yield "snapshot never existed", f"{entry.attempt} sees {name} = {value!r}, not {truth.get(name)!r}"


def wrong_end(world: World) -> Iterator[tuple[str, str]]:
    """Yield what is wrong with a run in which nothing can happen any more."""
    machine = world.machine
    _, truth = current_truth(world.scenario, world.accepted)
    if machine.state == "cancelled":
        return
    failed = FAILED in truth.values()
    if machine.status != ("failed" if failed else "closed"):
        waits = ", ".join(f"{run.name} is {run.status}" for run in machine.runs.values() if not run.settled)
        yield "stuck", f"the run is {machine.status}; {waits}"
    came_out = final_of(world)
    if not same(came_out, freeze(truth)):
        yield "wrong output", f"{came_out!r}, a fresh run gives {truth!r}"
    if not any(same(came_out, freeze(final)) for final in world.scenario.required.finals):
        yield "not the required outcome", f"{came_out!r}"


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
        Audit also the journal of the history by which each state is reached first.

    Attributes
    ----------
    problems : list of Problem
        Empty, or what the shortest failing history shows; exploration ends there.
    edges : list of list of (int, tuple of str)
        For each state its successors and the events on the way.
    """

    def __init__(self, scenario: Scenario, how: Policy, *, audits: bool = False) -> None:
        self.scenario, self.how, self.audits = scenario, how, audits
        self.problems: list[Problem] = []
        self.edges: list[list[tuple[int, tuple[str, ...]]]] = []
        self.finals: list[Any] = []
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
                self._blame([("raised", repr(error))], (*history, move))
                return
            target = self._index.setdefault(key, len(self._came))
            self._blame(wrong(world, added), (*history, move))
            if target == len(self._came):
                self._came.append((state, move))
                if len(self._warm) < N_WARM:
                    self._warm[target] = world
                if self.audits:
                    found = audit(world.machine.journal)
                    self._blame(((each.anomaly, str(each)) for each in found), (*history, move))
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


# --- unmerged --------------------------------------------------------------------------------------------------------


def schedules(scenario: Scenario, how: Policy, n: int, rng: Random) -> Iterator[tuple[tuple[str, ...], World]]:
    """Yield distinct complete schedules, each executed from its start: a depth-first prefix, then random walks.

    Parameters
    ----------
    scenario, how : Scenario, Policy
        What may happen, and how to recover.
    n : int
        How many; all of them where there are fewer.
    rng : random.Random
        Chooses the walks.
    """
    seen: set[int] = set()
    choices: list[int] = []

    def first_left(depth: int, _: int) -> int:
        return choices[depth] if depth < len(choices) else 0

    while True:
        history, world, widths = _schedule(scenario, how, first_left)
        seen.add(hash(history))
        yield history, world
        choices += [0] * (len(widths) - len(choices))
        while choices and choices[-1] + 1 == widths[len(choices) - 1]:
            choices.pop()
        if not choices or len(seen) >= n:
            return
        choices[-1] += 1
        if len(seen) * 2 >= n:
            break
    for _ in range(20 * n):
        if len(seen) >= n:
            return
        history, world, _ = _schedule(scenario, how, lambda _, width: rng.randrange(width))
        if hash(history) not in seen:
            seen.add(hash(history))
            yield history, world


def _schedule(scenario: Scenario, how: Policy, choose: Any) -> tuple[tuple[str, ...], World, list[int]]:
    world, history, widths = World(scenario, how), list[str](), list[int]()
    while moves := world.moves():
        move = moves[choose(len(history), len(moves))]
        world.do(move)
        history.append(move)
        widths.append(len(moves))
    return tuple(history), world, widths


def audited(scenario: Scenario, how: Policy, n: int, rng: Random) -> tuple[int, list[Problem]]:
    """Audit the journals of up to ``n`` distinct schedules, or until much is wrong; return how many, and what was found."""
    count, problems = 0, list[Problem]()
    for history, world in schedules(scenario, how, n, rng):
        count += 1
        line = "; ".join(history)
        problems += (Problem(each.anomaly, str(each), line) for each in audit(world.machine.journal))
        problems += (Problem(*each, line) for each in wrong_end(world))
        if len(problems) > 10:
            break
    return count, sorted(problems, key=lambda each: len(each.line))


# --- all of it -------------------------------------------------------------------------------------------------------


def explore(scenario: Scenario, how: Policy, *, n_audited: int = 0, seed: int = 0) -> dict[str, Any]:
    """Explore a scenario completely, and audit a number of its schedules.

    Parameters
    ----------
    scenario : Scenario
        What may happen.
    how : Policy
        How to recover.
    n_audited : int
        Schedules to audit.
    seed : int
        Of the random walks.

    Returns
    -------
    dict
        ``name``, ``policy``, ``states``, ``transitions``, ``histories`` (complete schedules, counted and not executed),
        ``racing_pairs`` and those of them seen in ``both_orders``, ``audited``, ``findings``.
    """
    merged = Merged(scenario, how)
    problems = merged.problems or unmet(merged)
    pairs = scenario.required.races_in(modes_of(how))
    races = [f"{first} | {second}" for first, second in pairs]
    both = []
    if not merged.problems:
        for name, (first, second) in zip(races, pairs, strict=True):
            if merged.seen_orders(first, second) and merged.seen_orders(second, first):
                both.append(name)
            else:
                problems.append(Problem("race not seen in both orders", name, ""))
    count, found = audited(scenario, how, n_audited, Random(seed)) if n_audited else (0, [])
    switches = how.switches
    return {
        "name": scenario.name,
        "policy": f"{how.name} {switches.check} {switches.propagation} {switches.unknown} {switches.extension}",
        "states": len(merged.edges),
        "transitions": sum(map(len, merged.edges)),
        "histories": 0 if merged.problems else merged.histories(),
        "racing_pairs": races,
        "both_orders": both,
        "audited": count,
        "findings": [each._asdict() for each in (*problems, *found)],
    }


def explore_all(
    scenarios: Iterable[str] = (), policies: Iterable[Policy] = (), n_audited: int = 0, jobs: int = 1, seed: int = 0
) -> list[dict[str, Any]]:
    """Explore scenarios under policies; rows are in the order of both.

    Parameters
    ----------
    scenarios : iterable of str
        Names; all by default.
    policies : iterable of Policy
        ``revise`` and ``revise_plus`` by default.
    n_audited : int
        Schedules to audit for each pair, where there are as many.
    jobs : int
        Processes.
    seed : int
        Of the random walks.
    """
    known = list(scenarios) or list(SCENARIOS)
    hows = list(policies) or [policy("revise"), policy("revise_plus")]
    tasks = [(name, how, n_audited, seed) for name in known for how in hows]
    if jobs == 1:
        return [_explore_named(*task) for task in tasks]
    with ProcessPoolExecutor(jobs) as pool:
        return list(pool.map(_explore_named, *zip(*tasks, strict=True)))


def _explore_named(name: str, how: Policy, n_audited: int, seed: int) -> dict[str, Any]:
    if name not in SCENARIOS:
        raise ReviseLabError(f"no scenario is named {name!r} - choose one of {', '.join(SCENARIOS)}")
    return explore(SCENARIOS[name], how, n_audited=n_audited, seed=seed)


def replay_line(scenario: Scenario, line: str, how: Policy) -> tuple[World, list[str]]:
    """Make the moves of a line, and return the world that they lead to and everything that is wrong with the way.

    Parameters
    ----------
    scenario : Scenario
        Where the line comes from.
    line : str
        Moves separated by semicolons; what stands in brackets is not a move. ``read A`` is enough for a read.
    how : Policy
        The policy of the run.

    Raises
    ------
    ReviseLabError
        A move cannot be made there.
    """
    world, found = World(scenario, how), list[str]()
    for text in filter(None, (part.strip() for part in line.split(";"))):
        if text.startswith("["):
            continue
        start = " ".join(text.split()[:2])
        moves = world.moves()
        near = (
            text
            if text in moves
            else next((each for each in moves if each.startswith("read") and each.startswith(start)), None)
        )
        if near is None:
            raise ReviseLabError(f"{text!r} is no move of {scenario.name!r} here - choose one of {'; '.join(moves)}")
        found += (": ".join(each) for each in wrong(world, world.do(near)))
    found += () if world.moves() else (": ".join(each) for each in wrong_end(world))
    return world, [*found, *map(str, audit(world.machine.journal))]
