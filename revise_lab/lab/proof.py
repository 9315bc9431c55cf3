"""Randomised evidence at scale: runs against the oracle, the hindsight floor, storms of revisions, dropped reads.

Everything is a function of a seed; seeds go to worker processes. A failing seed is returned with its history on
one line, so that it can be pasted into a test.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Set
from typing import Any, NamedTuple

import joblib
import numpy as np

from revise_lab.audit.auditor import audit
from revise_lab.core.hindsight import hindsight
from revise_lab.core.machine import Machine
from revise_lab.core.plan import Policy
from revise_lab.errors import ReviseLabError
from revise_lab.lab import stats
from revise_lab.policies import policy
from revise_lab.records import event as ev
from revise_lab.records.effect import Effect
from revise_lab.records.revision import Change, Op, Revision
from revise_lab.records.selector import Marker, Selector
from revise_lab.records.workflow import Workflow
from revise_lab.runtime.simulator import Answer, SimulatedRun, Simulator, answer_by_hash, truth_of
from revise_lab.workloads.serving import S12
from revise_lab.workloads.synthetic import World, WorldShape, random_world

COMBINATIONS: tuple[tuple[str, Mapping[str, str]], ...] = (
    ("restart", {}),
    ("suffix", {}),
    ("revise", {}),
    ("wait", {}),
    ("revise_plus", {}),
    ("revise", {"check": "digest"}),
    ("revise", {"check": "digest", "propagation": "diff"}),
    ("revise", {"unknown": "local"}),
    ("revise_plus", {"propagation": "descendants"}),
    ("revise_plus", {"extension": "off"}),
    ("suffix", {"check": "digest", "propagation": "diff"}),
    ("suffix", {"order": "start"}),
    ("suffix", {"order": "commit"}),
    ("restart", {"check": "digest", "propagation": "diff"}),
    ("wait", {"check": "digest"}),
)
"""Policies and switches that the randomised runs take turns with."""


class Trial(NamedTuple):
    """What one random run showed; ``history`` is there when something is wrong."""

    policy: str
    n_revisions: int
    n_findings: int
    n_differences: int
    history: str
    n_crashes: int = 0
    n_sent: int = 0
    """Calls that published an effect, those after a crash included."""
    n_undone: int = 0


def world_of(seed: int, n_revisions: int, **shape: Any) -> World:
    """Return the random world of a seed."""
    rng = np.random.default_rng(seed)
    n_nodes = int(rng.integers(3, 8))
    return random_world(rng, WorldShape(n_nodes=n_nodes, n_revisions=n_revisions, **shape))


def run_world(
    world: World, how: Policy, simulator: Callable[..., Simulator] = Simulator, **options: Any
) -> SimulatedRun:
    """Run a world under a policy; options are those of the simulator."""
    options |= {"duration_s": lambda ask: world.durations_s.get(ask.node.partition("[")[0], 1.0)}
    return simulator(world.workflow, world.inputs, how, revisions=world.revisions, **options).run()


def moody() -> Answer:
    """Return answers that differ from call to call, as those of a model that samples do."""
    numbers = itertools.count()
    return lambda ask: f"{answer_by_hash(ask)} {next(numbers) % 3}"


def trial(seed: int) -> Trial:
    """Run one random world: policy, switches, slots, number of revisions and mood of the model follow from the seed."""
    return _judged(seed, 1 + seed // len(COMBINATIONS) % 5, {})


def crash_trial(seed: int) -> Trial:
    """Run one random world with effects, in which the process dies up to three times and goes on from its journal."""
    rng = np.random.default_rng([1, seed])
    drawn = {"release": str(rng.choice(["commit", "close"])), "compensation": str(rng.choice(["lazy", "eager"]))}
    n_revisions, n_crashes = int(rng.integers(1, 5)), int(rng.integers(0, 4))
    return _judged(seed, n_revisions, drawn, rng.uniform(0.0, 1.0, n_crashes).tolist(), effect=0.5)


def _judged(
    seed: int, n_revisions: int, drawn: Mapping[str, str], crashes: Iterable[float] = (), **shape: Any
) -> Trial:
    """Run the world of a seed, audit it and compare it with the oracle; crashes are given as shares of its work."""
    name, switches = COMBINATIONS[seed % len(COMBINATIONS)]
    world = world_of(seed, n_revisions, **shape)
    answer = moody() if seed % 4 == 0 else answer_by_hash
    span_s = sum(world.durations_s.values())
    label = name + "".join(f" {key}={value}" for key, value in sorted(switches.items()))
    where = f"seed {seed}, {label}{''.join(f' {key}={value}' for key, value in drawn.items())}"
    how, at_s = policy(name, **switches, **drawn), [span_s * at for at in crashes]
    try:
        run = run_world(world, how, answer=answer, n_slots=(None, 1, 2)[seed % 3], crashes=at_s)
    except ReviseLabError as error:
        return Trial(label, n_revisions, 0, 1, f"{where}: {type(error).__name__}: {error}")
    truth, differences = truth_of(run, answer)
    findings = audit(run.machine.journal)
    wrong = bool(findings or differences or truth.oracle_fresh)
    history = f"{where}: {[*map(str, findings[:2]), *differences[:2]]}: {run.history}" if wrong else ""
    n_recovered = sum(isinstance(entry, ev.Recover) for entry in run.machine.journal)
    sent = Counter(what for _, what, _ in run.effect_log)
    n_wrong = len(differences) + truth.oracle_fresh
    return Trial(label, n_revisions, len(findings), n_wrong, history, n_recovered, sent["publish"], sent["undo"])


def random_runs(n: int, first_seed: int = 0, n_jobs: int = 1) -> dict[str, Any]:
    """Run ``n`` random worlds and count what is wrong, by policy."""
    return _counted(spread(trial, range(first_seed, first_seed + n), n_jobs))


def crashes(n: int, first_seed: int = 0, n_jobs: int = 1) -> dict[str, Any]:
    """Run ``n`` random worlds with effects and crashes; count what is wrong in their journals and out in the world."""
    trials = spread(crash_trial, range(first_seed, first_seed + n), n_jobs)
    found = {what: sum(getattr(each, f"n_{what}") for each in trials) for what in ("crashes", "sent", "undone")}
    return _counted(trials) | found


def _counted(trials: list[Trial]) -> dict[str, Any]:
    return {
        "runs": len(trials),
        "revisions": sum(each.n_revisions for each in trials),
        "findings": sum(each.n_findings for each in trials),
        "differences": sum(each.n_differences for each in trials),
        "by_policy": dict(sorted(Counter(each.policy for each in trials).items())),
        "histories": [each.history for each in trials if each.history][:5],
    }


FLOOR_POLICIES = ("revise_plus", "revise", "suffix", "restart", "wait")


def single_trial(seed: int) -> tuple[int, int, bool]:
    """Return (executions, floor, late read below an unsettled parent) of ``revise_plus`` under one revision."""
    run = run_world(world_of(seed, 1, unknown=0.0), policy("revise_plus"))
    found = hindsight(run.machine.journal, truth_of(run)[0])
    return found.executions, found.floor, refused_extension(run.machine)


def floor_trial(seed: int) -> list[tuple[str, int, int, int, bool]]:
    """Return (policy, revisions, executions, floor, late read below an unsettled parent) for each policy of one world."""
    n_revisions = 1 + seed % 3
    world = world_of(seed, n_revisions, unknown=0.0)
    rows: list[tuple[str, int, int, int, bool]] = []
    floor, common = 0, True
    for name in FLOOR_POLICIES:
        run = run_world(world, policy(name))
        truth, _ = truth_of(run)
        found = hindsight(run.machine.journal, truth)
        floor = floor or found.floor
        accepted = (entry for entry in run.machine.journal if isinstance(entry, ev.Accepted))
        if name == FLOOR_POLICIES[0]:
            common = any(next(accepted, ev.Accepted("", 0, (), unconditional=True)).deltas)
        if not common and name in ("restart", "wait"):
            continue  # a first revision that changes nothing has cancelled what the floor counts as started
        rows.append((name, n_revisions, found.executions, floor, refused_extension(run.machine)))
    return rows


def refused_extension(machine: Machine) -> bool:
    """Say whether an attempt asked for a newer snapshot, was not moved, and never committed."""
    asked = {entry.attempt for entry in machine.journal if isinstance(entry, ev.Extend)}
    committed = {entry.attempt for entry in machine.journal if isinstance(entry, ev.Committed)}
    return bool(asked - committed)


def floors(n: int, first_seed: int = 0, n_jobs: int = 1) -> dict[str, Any]:
    """Hold executions of every policy against the hindsight floor; ``revise_plus`` also in ``n`` runs of one revision."""
    seeds = range(first_seed, first_seed + n)
    rows = [row for rows in spread(floor_trial, seeds, n_jobs) for row in rows]
    ratios = []
    for name, count in itertools.product(FLOOR_POLICIES, (1, 2, 3)):
        part = [row for row in rows if row[:2] == (name, count)]
        done, floor = sum(row[2] for row in part), sum(row[3] for row in part)
        ratios.append({"policy": name, "revisions": count, "n": len(part), "ratio": done / max(1, floor)})
    single = spread(single_trial, seeds, n_jobs)
    above = [explained for executions, floor, explained in single if executions > floor]
    return {
        "runs": len(rows) + len(single),
        "below_floor": sum(row[2] < row[3] for row in rows) + sum(row[0] < row[1] for row in single),
        "single_revision": len(single),
        "single_above_floor": len(above),
        "single_above_explained": sum(above),
        "ratios": ratios,
    }


def storm(
    n_revisions: int, name: str = "revise_plus", *, effects: bool = False, every_s: float = 0.37, **switches: str
) -> dict[str, Any]:
    """Revise one run many times and look at starts, live memory, effects and progress.

    Parameters
    ----------
    n_revisions : int
        How many revisions arrive.
    name : str
        The policy.
    effects : bool
        Every node publishes what it came to, and every tenth revision also meets the node that the others leave alone.
    every_s : float
        Virtual time between two revisions; a model call takes 1 s.
    **switches : str
        Switches of the policy.

    Returns
    -------
    dict
        ``starts`` and their ``bound``, one more than the revisions that reach a node; the most attempts and effects that
        were ever alive at once; ``longest_wait``, the most revisions between one that meets ``b`` and its next commit,
        and ``calm_revisions``, how many it may be; what was published and undone; what is wrong.
    """
    flow = Workflow("storm")
    flow.node(name="a", kind="model")(_noting(effects, ("in", "x")))
    flow.node(name="b", kind="model")(_noting(effects, ("in", "y")))
    flow.node(name="c", kind="join", after=("a", "b"))(_noting(effects, ("a", "note"), ("b", "note")))
    revisions = []
    for number in range(1, n_revisions + 1):
        leaves = "xy" if effects and number % 10 == 0 else "x"
        changes = tuple(Change("in", Op.SET, (leaf,), number) for leaf in leaves)
        revisions.append((every_s * number, Revision(f"r{number}", changes)))
    simulator = _Watched(flow, {"in": {"x": 0, "y": 0}}, policy(name, **switches), revisions=revisions)
    run = simulator.run()
    machine = run.machine
    plans = [plan.affected for plan in run.plans]
    reached = Counter(node for plan in plans for node in plan)
    reached["c"] += sum("c" not in plan for plan in plans if plan)
    starts = {node: node_run.n_attempts for node, node_run in machine.runs.items()}
    sent = Counter(what for _, what, _ in run.effect_log)
    return {
        "revisions": n_revisions,
        "starts": starts,
        "bound": {node: 1 + reached[node] for node in starts},
        "live_attempts": len(machine.attempts),
        "most_attempts": simulator.n_attempts,
        "most_effects": simulator.n_effects,
        "cells": machine.index.n_cells,
        "longest_wait": _longest_wait(machine.journal),
        "calm_revisions": math.ceil(1 / every_s),
        "published": sent["publish"],
        "undone": sent["undo"],
        "state": machine.state,
        "differences": [*map(str, audit(machine.journal)), *truth_of(run)[1]],
    }


def storms(n: int, first_seed: int = 0, n_jobs: int = 1) -> list[dict[str, Any]]:
    """Storm runs of up to ``n`` revisions, with and without effects; nothing is drawn, so no seed matters."""
    chosen = itertools.product(("revise", "revise_plus"), (False, True), (10, 100, min(n, 1000)))
    return [storm(n_revisions, name, effects=effects) for name, effects, n_revisions in chosen]


class _Watched(Simulator):
    """Notes how much was ever alive at once."""

    n_attempts = n_effects = 0

    def _send(self, event: ev.Event) -> None:
        super()._send(event)
        boxes = [box for boxes in self.machine.outboxes.values() for box in boxes.values()]
        self.n_attempts = max(self.n_attempts, len(self.machine.attempts))
        self.n_effects = max(self.n_effects, sum(bool(box.live) + bool(box.waiting) for box in boxes))


def _longest_wait(journal: Iterable[ev.Entry]) -> int:
    longest, waited, waits = 0, 0, True
    for entry in journal:
        if isinstance(entry, ev.Accepted):
            meets = any(path == ("y",) for delta in entry.deltas for path, _ in delta.changed)
            waited, waits = (0, True) if meets else (waited + 1, waits)
        elif isinstance(entry, ev.Committed) and entry.attempt.startswith("b@"):
            waits = False
        longest = max(longest, waited if waits else 0)
    return longest


def _noting(effects: bool, *places: tuple[str, str]) -> Callable[..., Any]:
    async def body(state: Any, ctx: Any) -> dict[str, Any]:
        seen = [f"{leaf} of {artifact} is {state[artifact][leaf]}" for artifact, leaf in places]
        note = (await ctx.model(" and ".join(seen), max_tokens=4)).text
        if effects:
            ctx.stage(Effect("note", note))
        return {"note": note}

    return body


class Forgetful(Simulator):
    """A simulator whose machine is never told of some reads: what the guard is there for.

    Parameters
    ----------
    forgotten : set of (str, Selector)
        The nodes and their reads that are kept from the machine.
    """

    def __init__(self, *args: Any, forgotten: Set[tuple[str, Selector]], **options: Any) -> None:
        self._forgotten = forgotten
        super().__init__(*args, **options)

    def _send(self, event: ev.Event) -> None:
        if isinstance(event, ev.Observe | ev.Finish | ev.Fail):
            node = event.attempt.rpartition("@")[0]
            event = event._replace(reads=tuple(r for r in event.reads if (node, r.selector) not in self._forgotten))
        super()._send(event)


def omission(share: float, n: int, seed: int = 0) -> stats.Interval:
    """Drop the sole critical read in a share of runs and return the share of runs that end stale.

    The identity: a run is stale exactly when its read was dropped, so the two shares must agree.
    """
    graph = S12.workflow(4).graph()
    revisions = [(7.5, Revision("r1", (Change("client", Op.SET, ("id",), "another"),)))]
    rng = np.random.default_rng([seed, round(1e6 * share)])
    stale = 0
    for _ in range(n):
        forgotten = {("account", Selector("client", ("id",)))} if rng.random() < share else set()
        run = Forgetful(graph, S12.inputs(), policy("revise"), revisions=revisions, forgotten=forgotten).run()
        stale += bool(truth_of(run)[1])
    return stats.proportion(stale, n)


def omissions(n: int, seed: int = 0, n_jobs: int = 1) -> dict[str, Any]:
    """Return the stale share at several shares of dropped reads, and that of random worlds with one read dropped."""
    shares = {f"{100 * share:g} %": omission(share, n, seed).as_dict() for share in (0.0, 0.01, 0.05, 0.1)}
    edges = [each for each in spread(dropped_edge, range(seed, seed + n), n_jobs) if each is not None]
    stale = stats.proportion(sum(edges), len(edges)).as_dict()
    return {"sole critical read dropped in": shares, "one read dropped in random worlds": stale}


def dropped_edge(seed: int) -> bool | None:
    """Drop one read of one node in a random world; say whether the run ends stale, ``None`` if it has no such read."""
    world = world_of(seed, 1, unknown=0.0)
    clean = run_world(world, policy("revise_plus"))
    reads = [
        (entry.attempt.rpartition("@")[0], read.selector)
        for entry in clean.machine.journal
        if isinstance(entry, ev.Observe | ev.Finish)
        for read in entry.reads
        if read.selector.artifact in world.inputs and read.selector.marker is not Marker.KIND
    ]
    if not reads:
        return None
    node, selector = reads[seed % len(reads)]
    run = run_world(world, policy("revise_plus"), Forgetful, forgotten={(node, selector)})
    return bool(truth_of(run)[1])


def spread(work: Callable[[int], Any], seeds: Iterable[int], n_jobs: int) -> list[Any]:
    """Map seeds to results over processes, in order; joblib hands out quick ones in batches."""
    return joblib.Parallel(n_jobs)(joblib.delayed(work)(seed) for seed in seeds)
