"""What one revision costs to plan, and what grows with the graph."""

from __future__ import annotations

import gc
import itertools
import math
import random
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from graphlib import TopologicalSorter
from pathlib import Path
from statistics import median
from typing import Any

from revise_lab.core.machine import Machine
from revise_lab.core.plan import Decision, Policy, View, assemble
from revise_lab.core.provenance import Hit, ReaderIndex
from revise_lab.policies import policy
from revise_lab.records import event as ev
from revise_lab.records.selector import Delta, How, meets
from revise_lab.records.value import freeze

from .samples import Row, Still, clock_ns, graph_of, reads_of, revision_of, say, start_of, summary, timed, with_exponent

SIZES = (100, 1_000, 10_000, 100_000, 1_000_000)
CHAIN = 10
"""Nodes that one revision affects."""
_BYTES_PER_NODE = 9_000
"""What a committed node with one read takes, measured at 1e5 nodes with the peer's graph beside it, and some room."""


class _Clocked(ReaderIndex):
    """A reader index that notes when it was last asked who reads what changed."""

    asked_ns = 0

    def touch(self, delta: Delta) -> list[Hit]:
        self.asked_ns = time.perf_counter_ns()
        return super().touch(delta)


class _Probe:
    """A planner that notes when its plan stood: decided, and turned into actions with their evidence."""

    def __init__(self, inner: Policy) -> None:
        self._plan = inner.plan
        self.policy = inner._replace(plan=self)
        self.armed = False
        self.done_ns = 0

    def __call__(self, view: View) -> Decision:
        decision = self._plan(view)
        if self.armed:
            assemble(view, decision)
            self.done_ns = time.perf_counter_ns()
        return decision

    def planning(self, machine: Machine, event: ev.Revise) -> float:
        """Handle a revision and return the microseconds from its delta to its plan."""
        self.armed = True
        machine.handle(event)
        self.armed = False
        return max(0.0, self.done_ns - machine.index.asked_ns - clock_ns()) / 1e3


class Chains:
    """A finished run of ``n`` nodes in chains of ten; each chain's first node reads a leaf of its own."""

    def __init__(self, n: int, name: str) -> None:
        self.n = n
        graph = graph_of({f"n{i}": (f"n{i - 1}",) if i % CHAIN else () for i in range(n)})
        tree: dict[str, Any] = {}  # of bounded width, for a level is copied when something in it is revised
        for chain in range(n // CHAIN):
            first, second, third = self.leaf(chain)
            tree.setdefault(first, {}).setdefault(second, {})[third] = 0
        self.probe = _Probe(policy(name))
        self.machine = Machine(graph, {"request": tree}, self.probe.policy)
        self.machine.index = _Clocked()
        self.took = defaultdict[str, list[float]](list)
        """Samples, in microseconds, by what was timed."""
        for chain in range(n // CHAIN):
            self.run_chain(chain, 0)
        self.took.clear()

    @staticmethod
    def leaf(chain: int) -> tuple[str, ...]:
        """Return the place that a chain reads."""
        return tuple(str(chain >> shift & 63) for shift in (12, 6, 0))

    def revision(self, chain: int, value: int) -> ev.Revise:
        """Return the event that sets that place."""
        return revision_of(self.machine, "request", (self.leaf(chain), value))

    def run_chain(self, chain: int, salt: int) -> None:
        """Run the ten nodes of a chain, one after the other, and note what starting and finishing them took."""
        machine = self.machine
        for i in range(chain * CHAIN, (chain + 1) * CHAIN):
            start = ev.Start(f"n{i}")
            self.took["start"].append(timed(lambda e=start: machine.handle(e)))
            attempt = machine.runs[f"n{i}"].attempt
            place = ("request", self.leaf(chain)) if i % CHAIN == 0 else (f"n{i - 1}", ("x",))
            end = ev.Finish(attempt.id, freeze({"x": i + salt}), reads_of(machine, attempt.id, [place]))
            self.took["finish"].append(timed(lambda e=end: machine.handle(e)))

    def scan(self, chain: int) -> int:
        """Return how many certificates a change of a leaf meets, by looking at all of them: what the index saves."""
        delta = Delta("request", 0, ((self.leaf(chain), How.LEAF),), ())
        runs = self.machine.runs.values()
        return sum(any(meets(delta, read.selector) for read in run.current.reads) for run in runs if run.current)


def _room_bytes() -> float:
    """Return the memory that is left, as far as the system says."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable"))
    except (OSError, StopIteration):
        return math.inf


def rows(quick: bool) -> list[Row]:
    """Time planning and the events around it, by the size of the graph."""
    sizes = SIZES[:3] if quick else SIZES
    planned = [row for name in ("revise", "revise_plus") for row in planning_of(name, sizes, 10 if quick else 60)]
    return [*planned, *_joining((10, 100, 1_000))]


def _joining(sizes: Sequence[int]) -> list[Row]:
    """Return what finishing a parent of a join costs, by how many parents the join has."""
    rows = []
    for n in sizes:
        above = [f"p{i}" for i in range(n)]
        machine = Machine(graph_of({**dict.fromkeys(above, ()), "join": tuple(above)}), {}, policy("revise_plus"))
        ends = [ev.Finish(start_of(machine, parent), freeze({"x": 0})) for parent in above]
        with Still():
            samples = [timed(lambda e=end, m=machine: m.handle(e)) for end in ends]
        rows.append(summary("handle(Finish)", f"below a join of {n:,} parents", samples))
    return with_exponent(rows, sizes)


def planning_of(name: str, sizes: Sequence[int], n_rounds: int) -> list[Row]:
    """Time one policy on graphs of several sizes, in turn."""
    worlds, note = [], ""
    gc.disable()
    for n in sizes:
        if n * _BYTES_PER_NODE > _room_bytes():
            note = f"stopped below {n:,} nodes: they would not fit in memory"
            break
        say(f"planning: {name}, a graph of {n:,} nodes is run")
        worlds.append(Chains(n, name))
    gc.enable()
    say(f"planning: {name}, revised {n_rounds} times at each size")
    peers = [descendants(world) for world in worlds]
    rng, salt = random.Random(0), 0
    with Still():
        ways = ("plan", "whole", "peer") * 3
        for _, (world, peer), key in itertools.product(range(n_rounds), zip(worlds, peers, strict=True), ways):
            chain, salt = rng.randrange(world.n // CHAIN), salt + 1
            if key == "peer":
                if peer:
                    world.took[key].append(timed(lambda f=peer, head=f"n{chain * CHAIN}": f(head)))
                continue
            event, machine = world.revision(chain, salt), world.machine
            if key == "plan":
                world.took[key].append(world.probe.planning(machine, event))
            else:
                world.took[key].append(timed(lambda m=machine, e=event: m.handle(e)))
            world.run_chain(chain, salt)
    return [*_planning_rows(name, worlds, note), *_scan_rows(name, worlds, n_rounds)]


def _planning_rows(name: str, worlds: list[Chains], note: str) -> Iterator[Row]:
    sizes, plans = [world.n for world in worlds], []
    for world in worlds:
        plan, peer = world.took["plan"], world.took["peer"]
        ratio = median(plan) / median(peer) if peer else None
        beside = "over networkx.descendants" if peer else _NO_PEER
        row = summary("planning", f"{name}, {world.n:,} nodes", plan, 25.0, ratio=ratio, note=beside)
        plans.append(row._replace(met=row.met and (ratio is None or ratio <= 5)))
    plans[-1] = plans[-1]._replace(note=f"{plans[-1].note} {note}".strip())
    yield from with_exponent(plans, sizes)
    for what, key in (("handle(Revise)", "whole"), ("handle(Start)", "start"), ("handle(Finish)", "finish")):
        taken = [summary(what, f"{name}, {world.n:,} nodes", world.took[key]) for world in worlds]
        yield from with_exponent(taken, sizes)


_NO_PEER = "networkx is not installed (extra: peers)"


def descendants(world: Chains) -> Callable[[str], object] | None:
    """Return the peer's traversal of the same graph, where the peer is installed."""
    try:
        import networkx as nx
    except ImportError:
        return None
    graph = nx.DiGraph(world.machine.graph.children)
    return lambda head: nx.descendants(graph, head)


def _scan_rows(name: str, worlds: list[Chains], n_rounds: int) -> Iterator[Row]:
    """Yield what looking at everything takes on the largest graph of at most 1e5 nodes, over the plan's median."""
    world = max((world for world in worlds if world.n <= 100_000), key=lambda world: world.n)
    parents = {each: node.parents for each, node in world.machine.graph.nodes.items()}
    ways = {
        "scanning all certificates": lambda: world.scan(0),
        "sorting the graph": lambda: list(TopologicalSorter(parents).static_order()),
    }
    taken = defaultdict[str, list[float]](list)
    for _, (way, call) in itertools.product(range(max(3, n_rounds // 10)), ways.items()):
        with Still():
            taken[way].append(timed(call))
    for way, samples in taken.items():
        ratio = median(samples) / median(world.took["plan"])
        row = summary("instead of the index", f"{way}, {name}, {world.n:,} nodes", samples, ratio=ratio)
        yield row._replace(met=ratio >= 100 if world.n == 100_000 else None, note="over planning, at least 100 at 1e5")
