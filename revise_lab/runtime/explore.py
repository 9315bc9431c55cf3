"""The explorer: every order in which a scenario can happen, on the machine itself.

Two modes, because they prove different things. *Merged*: states are merged by a canonical fingerprint, so that the
exploration is complete; what is checked there is a function of a state and a move. *Unmerged*: complete schedules, each
executed from its start, whose journals the auditor reads; only these count as audited, whatever number of interleavings
the merged states stand for. A state is the tuple of moves that led to it and is reached again by making them again:
nothing is copied. A failure is one line of moves, which :func:`replay_line` executes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import nullcontext, suppress
from itertools import product
from random import Random
from time import perf_counter
from typing import Any

from revise_lab.audit.auditor import audit
from revise_lab.audit.scenario import Scenario
from revise_lab.audit.scenarios import SCENARIOS
from revise_lab.core.plan import Policy
from revise_lab.errors import RefusedCombination, ReviseLabError
from revise_lab.policies import names, policy

from .states import Merged, Problem, modes_of, unmet, wrong, wrong_end
from .world import World


class NoSuchMove(ReviseLabError):
    """A line of moves does not fit its scenario."""


_RECOVERY = {
    "check": ("delta", "digest"), "propagation": ("descendants", "diff"), "unknown": ("global", "local"),
    "extension": ("off", "on"),
}  # fmt: skip
_EFFECTS = {"check": ("delta", "digest"), "release": ("commit", "close"), "compensation": ("lazy", "eager")}


def combinations() -> list[Policy]:
    """Return every policy with every combination of switches that is not refused, effects as each policy has them."""
    return _combined(_RECOVERY)


def effect_combinations() -> list[Policy]:
    """Return every policy with both checks and every combination of the switches that concern effects."""
    return _combined(_EFFECTS)


def _combined(choices: Mapping[str, tuple[str, ...]]) -> list[Policy]:
    found = dict[Policy, None]()
    for name, *values in product(names(), *choices.values()):
        switches = dict(zip(choices, values, strict=True))
        if switches["check"] == "delta" and "propagation" not in switches:
            switches |= {"propagation": "descendants", "extension": "off"}
        with suppress(RefusedCombination):
            found[policy(name, **switches)] = None
    return list(found)


# --- unmerged --------------------------------------------------------------------------------------------------------


def schedules(
    scenario: Scenario, how: Policy, n: int, n_walks: int, rng: Random
) -> Iterator[tuple[tuple[str, ...], World]]:
    """Yield distinct complete schedules, each executed from its start: a depth-first prefix, then random walks.

    Parameters
    ----------
    scenario, how : Scenario, Policy
        What may happen, and how to recover.
    n, n_walks : int
        How many in all, and how many of them by walking; fewer where there are fewer.
    rng : random.Random
        Chooses the walks.
    """
    seen: set[int] = set()
    deepest = _depth_first(scenario, how)
    while len(seen) < n - n_walks and (found := next(deepest, None)):
        seen.add(hash(found[0]))
        yield found
    n_met_again = 0
    while n_met_again <= n_walks:
        if len(seen) >= n:
            return
        history, world, _ = _schedule(scenario, how, lambda _, width: rng.randrange(width))
        if hash(history) in seen:
            n_met_again += 1
        else:
            seen.add(hash(history))
            yield history, world
    for history, world in deepest:  # where walks keep meeting the same few
        if len(seen) >= n:
            return
        if hash(history) not in seen:
            seen.add(hash(history))
            yield history, world


def _depth_first(scenario: Scenario, how: Policy) -> Iterator[tuple[tuple[str, ...], World]]:
    """Yield every complete schedule once."""
    choices: list[int] = []

    def first_left(depth: int, _: int) -> int:
        return choices[depth] if depth < len(choices) else 0

    while True:
        history, world, widths = _schedule(scenario, how, first_left)
        yield history, world
        choices += [0] * (len(widths) - len(choices))
        while choices and choices[-1] + 1 == widths[len(choices) - 1]:
            choices.pop()
        if not choices:
            return
        choices[-1] += 1


def _schedule(scenario: Scenario, how: Policy, choose: Any) -> tuple[tuple[str, ...], World, list[int]]:
    world, history, widths = World(scenario, how), list[str](), list[int]()
    while moves := world.moves():
        move = moves[choose(len(history), len(moves))]
        world.do(move)
        history.append(move)
        widths.append(len(moves))
    return tuple(history), world, widths


def audited(scenario: Scenario, how: Policy, n: int, n_walks: int, rng: Random) -> tuple[int, list[Problem]]:
    """Audit the journals of distinct schedules, or until much is wrong; return how many, and what was found."""
    count, problems = 0, list[Problem]()
    for history, world in schedules(scenario, how, n, n_walks, rng):
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
        Schedules to audit; all of them where there are fewer.
    seed : int
        Of the random walks.

    Returns
    -------
    dict
        ``name``, ``policy``, ``states``, ``transitions``, ``histories`` (complete schedules, counted and not executed),
        ``racing_pairs`` and those of them seen in ``both_orders``, ``audited``, ``findings``, ``seconds``.
    """
    began_s = perf_counter()
    merged = Merged(scenario, how)
    problems = merged.problems or unmet(merged)
    pairs = {f"{first} | {second}": (first, second) for first, second in scenario.required.races_in(modes_of(how))}
    both = []
    if not merged.problems:
        both = [race for race, pair in pairs.items() if all(merged.seen_orders(*each) for each in (pair, pair[::-1]))]
        problems += (Problem("race not seen in both orders", race, "") for race in pairs if race not in both)
    row = {
        "name": scenario.name,
        "policy": label(how, effects=scenario.has_effects),
        "states": len(merged.edges),
        "transitions": sum(map(len, merged.edges)),
        "histories": 0 if merged.problems else merged.histories(),
        "racing_pairs": list(pairs),
        "both_orders": both,
        "audited": 0,
        "findings": [each._asdict() for each in problems],
        "seconds": perf_counter() - began_s,
    }
    return _with_audit(row, scenario, how, n_audited, seed)


def label(how: Policy, *, effects: bool = True) -> str:
    """Return a policy and its switches in a few words."""
    each = how.switches
    words = (how.name, each.check, each.propagation, each.unknown, each.extension)
    return " ".join((*words, each.release, each.compensation) if effects else words)


def _with_audit(row: dict[str, Any], scenario: Scenario, how: Policy, n: int, seed: int) -> dict[str, Any]:
    if not n:
        return row
    began_s = perf_counter()
    count, found = audited(scenario, how, n, n // 2 if row["histories"] > 20 * n else 0, Random(seed))
    findings = [*row["findings"], *(each._asdict() for each in found)]
    return {**row, "audited": count, "findings": findings, "seconds": row["seconds"] + perf_counter() - began_s}


def explore_all(
    scenarios: Iterable[str] = (),
    policies: Iterable[Policy] = (),
    n_audited: int = 0,
    jobs: int = 1,
    seed: int = 0,
    tell: Callable[[str, int, int, dict[str, Any]], None] = lambda *_: None,
) -> list[dict[str, Any]]:
    """Explore scenarios under policies; rows are in the order of both.

    Parameters
    ----------
    scenarios : iterable of str
        Names; all by default.
    policies : iterable of Policy
        ``revise`` and ``revise_plus`` by default.
    n_audited : int
        Schedules to audit for each pair on average: what small scenarios do not have is taken from large ones.
    jobs : int
        Processes.
    seed : int
        Of the random walks.
    tell : callable
        Told of each row as it is done: ``explored`` or ``audited``, how many are done, of how many, and the row.
    """
    known = list(scenarios) or list(SCENARIOS)
    if unknown := [name for name in known if name not in SCENARIOS]:
        raise ReviseLabError(f"no scenario is named {unknown[0]!r} - choose one of {', '.join(SCENARIOS)}")
    usual = [policy("revise"), policy("revise_plus")]
    pairs = [(name, how) for name, how in product(known, list(policies) or usual) if _tells_apart(name, how)]
    with ProcessPoolExecutor(jobs) if jobs > 1 else nullcontext() as pool:
        run: Any = pool.map if pool else map
        rows = _told(run(_explore_pair, pairs), "explored", len(pairs), tell)
        if not n_audited:
            return rows
        shares = _shares([row["histories"] for row in rows], n_audited * len(rows))
        return _told(run(_audit_pair, rows, pairs, shares, [seed] * len(rows)), "audited", len(pairs), tell)


def _tells_apart(name: str, how: Policy) -> bool:
    """Say whether a scenario can tell a policy from the same one with its usual release and compensation."""
    usual = policy(how.name).switches
    effects = ("release", "compensation")
    return SCENARIOS[name].has_effects or all(getattr(how.switches, each) == getattr(usual, each) for each in effects)


def _told(rows: Iterable[dict[str, Any]], what: str, n: int, tell: Callable[..., None]) -> list[dict[str, Any]]:
    done = []
    for row in rows:
        done.append(row)
        tell(what, len(done), n, row)
    return done


def _explore_pair(pair: tuple[str, Policy]) -> dict[str, Any]:
    return explore(SCENARIOS[pair[0]], pair[1])


def _audit_pair(row: dict[str, Any], pair: tuple[str, Policy], n: int, seed: int) -> dict[str, Any]:
    return _with_audit(row, SCENARIOS[pair[0]], pair[1], n, seed)


def _shares(most: Sequence[int], total: int) -> list[int]:
    """Share a total out evenly among those who can take no more than ``most``."""
    shares = [0] * len(most)
    for rank, i in enumerate(sorted(range(len(most)), key=most.__getitem__)):
        shares[i] = min(most[i], (total - sum(shares)) // (len(most) - rank))
    return shares


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
    NoSuchMove
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
            raise NoSuchMove(f"{text!r} is no move of {scenario.name!r} here - choose one of {'; '.join(moves)}")
        found += (": ".join(each) for each in wrong(world, world.do(near)))
    found += () if world.moves() else (": ".join(each) for each in wrong_end(world))
    return world, [*found, *map(str, audit(world.machine.journal))]
