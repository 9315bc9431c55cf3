"""What one revision costs to plan, and what grows with the graph."""

from __future__ import annotations

import gc
import itertools
import math
import random
import time
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

from .samples import Row, Still, clock_ns, graph_of, reads_of, revision_of, start_of, summary, timed, with_exponent

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
        self.starts, self.finishes = list[float](), list[float]()
        for chain in range(n // CHAIN):
            self.run_chain(chain, 0)
        self.starts, self.finishes = [], []

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
            self.starts.append(timed(lambda e=start: machine.handle(e)))
            attempt = machine.runs[f"n{i}"].attempt
            place = ("request", self.leaf(chain)) if i % CHAIN == 0 else (f"n{i - 1}", ("x",))
            end = ev.Finish(attempt.id, freeze({"x": i + salt}), reads_of(machine, attempt.id, [place]))
            self.finishes.append(timed(lambda e=end: machine.handle(e)))

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
        worlds.append(Chains(n, name))
    gc.enable()
    peers = [descendants(world) for world in worlds]
    took: dict[str, list[list[float]]] = {key: [[] for _ in worlds] for key in ("plan", "whole", "peer")}
    rng, salt = random.Random(0), 0
    with Still():
        ways = ("plan", "whole", "peer") * 3
        for _, (at, world), key in itertools.product(range(n_rounds), enumerate(worlds), ways):
            chain, salt = rng.randrange(world.n // CHAIN), salt + 1
            if key == "peer":
                if call := peers[at]:
                    took[key][at].append(timed(lambda f=call, head=f"n{chain * CHAIN}": f(head)))
                continue
            event, machine = world.revision(chain, salt), world.machine
            if key == "plan":
                took[key][at].append(world.probe.planning(machine, event))
            else:
                took[key][at].append(timed(lambda m=machine, e=event: m.handle(e)))
            world.run_chain(chain, salt)
    return [*_planning_rows(name, worlds, took, note), *_scan_rows(name, worlds, took["plan"], n_rounds)]


def _planning_rows(name: str, worlds: list[Chains], took: dict[str, list[list[float]]], note: str) -> list[Row]:
    sizes = [world.n for world in worlds]
    plans, wholes, starts, ends = [], [], [], []
    for world, plan, whole, peer in zip(worlds, took["plan"], took["whole"], took["peer"], strict=True):
        case = f"{name}, {world.n:,} nodes"
        ratio = median(plan) / median(peer) if peer else None
        peer_note = "over networkx.descendants" if peer else _NO_PEER
        last_note = f"{peer_note} {note}".strip() if world is worlds[-1] else peer_note
        row = summary("planning", case, plan, 25.0, ratio=ratio, note=last_note)
        plans.append(row._replace(met=row.met and (ratio is None or ratio <= 5)))
        wholes.append(summary("handle(Revise)", case, whole))
        starts.append(summary("handle(Start)", case, world.starts))
        ends.append(summary("handle(Finish)", case, world.finishes))
    return [each for group in (plans, wholes, starts, ends) for each in with_exponent(group, sizes)]


_NO_PEER = "networkx is not installed (extra: peers)"


def descendants(world: Chains) -> Callable[[str], object] | None:
    """Return the peer's traversal of the same graph, where the peer is installed."""
    try:
        import networkx as nx
    except ImportError:
        return None
    graph = nx.DiGraph(world.machine.graph.children)
    return lambda head: nx.descendants(graph, head)


def _scan_rows(name: str, worlds: list[Chains], plans: list[list[float]], n_rounds: int) -> Iterator[Row]:
    """Yield what looking at everything takes on the largest graph of at most 1e5 nodes, over the plan's median."""
    at = max(i for i, world in enumerate(worlds) if world.n <= 100_000)
    world = worlds[at]
    parents = {each: node.parents for each, node in world.machine.graph.nodes.items()}
    ways = {
        "scanning all certificates": lambda: world.scan(0),
        "sorting the graph": lambda: list(TopologicalSorter(parents).static_order()),
    }
    taken: dict[str, list[float]] = {way: [] for way in ways}
    for _ in range(max(3, n_rounds // 10)):
        for way, call in ways.items():
            with Still():
                taken[way].append(timed(call))
    for way, samples in taken.items():
        ratio = median(samples) / median(plans[at])
        row = summary("instead of the index", f"{way}, {name}, {world.n:,} nodes", samples, ratio=ratio)
        yield row._replace(met=ratio >= 100 if world.n == 100_000 else None, note="over planning, at least 100 at 1e5")
