"""What the core costs, beside its budgets and beside what one would use instead: ``revise-lab bench core``.

Everything is measured on real machines that were driven by events, never on parts built for the occasion. A sample is one
operation between two readings of the clock; the median cost of two readings with nothing between them is subtracted. What
is compared (sizes, ours and a peer's) is sampled in turn, within one process, so that a noisy machine hits both alike.
"""

from __future__ import annotations

import gc
import math
import random
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import numpy as np

from revise_lab import draw
from revise_lab.core.certify import check
from revise_lab.core.machine import Machine
from revise_lab.core.plan import Decision, Policy, View, assemble
from revise_lab.core.provenance import Hit, ReaderIndex
from revise_lab.core.recorder import Recorder
from revise_lab.core.tracking import StateView
from revise_lab.errors import ConfigError
from revise_lab.policies import policy
from revise_lab.records import event as ev
from revise_lab.records.revision import Change, Op, Revision
from revise_lab.records.selector import Delta, How, Read, Selector, evaluate, meets
from revise_lab.records.value import freeze
from revise_lab.records.workflow import Graph, Kind, Node

__all__ = ["PARTS", "Row", "bench_core", "render"]

SIZES = (100, 1_000, 10_000, 100_000, 1_000_000)
CHAIN = 10
"""Nodes that one revision affects."""
_BYTES_PER_NODE = 9_000
"""What a committed node with one read takes, measured at 1e5 nodes with the peer's graph beside it, and some room."""
_FLAT = 0.1


class Row(NamedTuple):
    """One line of the benchmark.

    ``p95`` is the slow tail: of a rate, what 95 % of the batches reach. ``ratio`` is ours over the peer's (below 1: we are
    faster), except that for scans it is theirs over ours; the note says which. ``exponent`` is the slope of log p50 over
    log size, on the last row of a sweep; flat means at most 0.1. ``met`` is None where nothing was asked for.
    """

    what: str
    case: str
    n: int
    p50: float
    p95: float
    unit: str = "us"
    budget: float | None = None
    met: bool | None = None
    exponent: float | None = None
    ratio: float | None = None
    note: str = ""


def bench_core(rows: str | None = None, quick: bool = False) -> list[Row]:
    """Measure the core against the budgets of the design (our choice; the papers report 2.6 and 207 us).

    Parameters
    ----------
    rows : str, optional
        Only what holds this text: a part (``certificate``, ``planning``, ``view``, ``events``) or words of a row.
    quick : bool
        Fewer samples, graphs of up to 1e4 nodes, 1e3 unrelated reads.

    Raises
    ------
    ConfigError
        No row holds the text.
    """
    named = [part for part in PARTS if rows and rows in part]
    found = [row for part in named or PARTS for row in PARTS[part](quick)]
    kept = found if named or not rows else [row for row in found if rows in f"{row.what} {row.case}"]
    if not kept:
        raise ConfigError(
            f"no row of the benchmark holds {rows!r} - name a part ({', '.join(PARTS)}) or words of a row"
        )
    return kept


def render(rows: Iterable[Row]) -> str:
    """Return the rows as a table, with what was subtracted below it."""

    def number(value: float | None, digits: int = 3) -> str:
        return "" if value is None else f"{value:,.{max(0, digits - 1 - math.floor(math.log10(abs(value) or 1)))}f}"

    lines = [
        (
            row.what,
            row.case,
            f"{row.n:,}",
            number(row.p50),
            number(row.p95),
            row.unit,
            number(row.budget),
            "" if row.met is None else "yes" if row.met else "NO",
            "" if row.exponent is None else f"{row.exponent:+.3f}",
            number(row.ratio),
            row.note,
        )
        for row in rows
    ]
    head = ("what", "case", "n", "p50", "p95", "unit", "budget", "met", "exponent", "ratio", "note")
    table = draw.table_text(lines, head)
    return f"{table}\n\nReading the clock, {_clock_ns():.0f} ns, is subtracted; garbage is collected in events only."


# --- taking samples --------------------------------------------------------------------------------------------------


@cache
def _clock_ns() -> float:
    """Return what two readings of the clock cost by themselves."""
    clock = time.perf_counter_ns
    return median(-(clock() - clock()) for _ in range(20_000))


def _timed(call: Callable[[], object]) -> float:
    clock = time.perf_counter_ns
    start = clock()
    call()
    return max(0.0, clock() - start - _clock_ns()) / 1e3


class _Still:
    """No garbage collection inside; everything that is alive is left out of later ones."""

    def __enter__(self) -> None:
        _clock_ns()
        gc.collect()
        gc.freeze()
        gc.disable()

    def __exit__(self, *error: object) -> None:
        gc.enable()
        gc.unfreeze()


def _row(what: str, case: str, samples: Sequence[float], budget: float | None = None, **more: Any) -> Row:
    p50, p95 = np.percentile(samples, (50, 95))
    met = None if budget is None else bool(p50 <= budget)
    return Row(what, case, len(samples), float(p50), float(p95), budget=budget, met=met, **more)


def _with_exponent(rows: list[Row], sizes: Sequence[int]) -> list[Row]:
    """Put the slope of log p50 over log size on the last row, and judge it."""
    if len(rows) < 2:
        return rows
    slope = float(np.polyfit(np.log10(sizes[: len(rows)]), np.log10([max(row.p50, 1e-3) for row in rows]), 1)[0])
    last = rows[-1]
    return [*rows[:-1], last._replace(exponent=slope, met=last.met is not False and slope <= _FLAT)]


def _revise(machine: Machine, artifact: str, *changes: tuple[tuple[str, ...], Any]) -> ev.Revise:
    made = tuple(Change(artifact, Op.SET, path, value) for path, value in changes)
    return ev.Revise(Revision(f"r{len(machine.revisions)}", made))


def _start(machine: Machine, node: str) -> str:
    return next(each.attempt for each in machine.handle(ev.Start(node)) if isinstance(each, ev.Execute))


def _reads(machine: Machine, attempt: str, places: Iterable[tuple[str, tuple[str, ...]]]) -> tuple[Read, ...]:
    snapshot = machine.snapshot_of(attempt)
    selectors = (Selector(*place) for place in places)
    return tuple(Read(each, evaluate(each, snapshot.value(each.artifact))) for each in selectors)


def _graph(parents: dict[str, tuple[str, ...]]) -> Graph:
    """Build a graph whose nodes are already in topological order; the checks of a declaration would take longest."""
    children: dict[str, list[str]] = {name: [] for name in parents}
    for name, above in parents.items():
        for parent in above:
            children[parent].append(name)
    nodes = {name: Node(name, Kind.TOOL, None, above) for name, above in parents.items()}
    kids = {name: tuple(found) for name, found in children.items()}
    return Graph("bench", nodes, tuple(nodes), kids, {name: i for i, name in enumerate(nodes)})


# --- the certificate -------------------------------------------------------------------------------------------------

_PLACES = tuple(("request", ("g", f"k{i}", "x")) for i in range(8))


def _certified(how: str, unrelated: int = 0) -> tuple[Machine, str]:
    """Return a machine in which a node with 3 parents runs, and its attempt; others have read ``unrelated`` places."""
    side = round(unrelated ** (1 / 3))
    cube = {f"a{i}": {f"b{j}": {f"c{k}": 0 for k in range(side)} for j in range(side)} for i in range(side)}
    group = {f"k{i}": {"x": i, "y": i, "z": 0} for i in range(8)}
    graph = _graph({"p0": (), "p1": (), "p2": (), "n": ("p0", "p1", "p2"), "other": ()})
    machine = Machine(graph, {"request": {"g": group}, "aside": {"x": 0}, "big": cube}, policy(how))
    for parent in ("p0", "p1", "p2"):
        machine.handle(ev.Finish(_start(machine, parent), {"x": 0}))
    other = _start(machine, "other")
    places = [("big", (i, j, k)) for i, at in cube.items() for j, below in at.items() for k in below]
    if unrelated and len(places) < unrelated:
        places += [("request", ("g", f"k{i % 8}", f"u{i}")) for i in range(unrelated - len(places))]
    machine.handle(ev.Observe(other, _reads(machine, other, places[:unrelated])))
    return machine, _start(machine, "n")


def _touched() -> tuple[Machine, str]:
    """Return a machine and an attempt whose eight reads all changed, there and back, before it reported them."""
    machine, attempt = _certified("revise_plus")
    reads = _reads(machine, attempt, _PLACES)
    for step in (-1, 1):
        changes = ((path, i if step > 0 else -1) for i, (_, path) in enumerate(_PLACES))
        machine.handle(_revise(machine, "request", *changes))
    machine.handle(ev.Observe(attempt, reads))
    return machine, attempt


def _checks(machine: Machine, attempt_id: str, n: int) -> list[float]:
    attempt, values, how = machine.attempts[attempt_id], machine.values, machine.switches.check
    if why := check(attempt, values, how):
        raise AssertionError(f"the certificate that is timed must hold: {why}")
    return [_timed(lambda: check(attempt, values, how)) for _ in range(n)]


def _certificate(quick: bool) -> list[Row]:
    n = 2_000 if quick else 20_000
    found = []
    for how, name in (("delta", "revise"), ("digest", "revise_plus")):
        for where, k in (
            ("", 0),
            *((where, k) for where in ("another artifact", "the same artifact") for k in (1, 4, 64)),
        ):
            machine, attempt = _certified(name)
            machine.handle(ev.Observe(attempt, _reads(machine, attempt, _PLACES)))
            for i in range(k):
                artifact, path = ("aside", ("x",)) if where.startswith("another") else ("request", ("g", "k0", "z"))
                machine.handle(_revise(machine, artifact, (path, i + 1)))
            case = f"{how}, untouched, {k} deltas{f' on {where}' if where else ''}"
            with _Still():
                found.append(_row("certificate", case, _checks(machine, attempt, n), 1.0))
    machine, attempt = _touched()
    with _Still():
        found.append(_row("certificate", "digest, all 8 touched and compared", _checks(machine, attempt, n), 2.0))
    sizes = (10, 1_000) if quick else (10, 1_000, 1_000_000)
    for name in ("revise", "revise_plus"):
        found.extend(_unrelated(name, sizes, n))
    return [*found, *_at_revision(n // 20)]


def _unrelated(name: str, sizes: Sequence[int], n: int) -> list[Row]:
    prepared = []
    for size in sizes:
        machine, attempt = _certified(name, size)
        machine.handle(ev.Observe(attempt, _reads(machine, attempt, _PLACES)))
        prepared.append((machine, attempt))
    with _Still():
        rounds = [[_checks(machine, attempt, n // 10) for machine, attempt in prepared] for _ in range(10)]
    how = prepared[0][0].switches.check
    samples = [[x for each in rounds for x in each[i]] for i in range(len(sizes))]
    rows = [
        _row("certificate", f"{how}, {size:,} unrelated reads", taken, 1.0)
        for size, taken in zip(sizes, samples, strict=True)
    ]
    return _with_exponent(rows, sizes)


def _at_revision(n: int) -> list[Row]:
    """Return what the index costs when a revision arrives, so that the check is a comparison of numbers."""
    idle, hit = [], []
    for i in range(n):
        machine, attempt = _certified("revise_plus")
        machine.handle(ev.Finish(attempt, {"x": 0}, _reads(machine, attempt, _PLACES)))
        aside = _revise(machine, "aside", (("x",), i + 1))
        idle.append(_timed(lambda m=machine, e=aside: m.handle(e)))
        event = _revise(machine, "request", *((path, -1) for _, path in _PLACES))
        hit.append(_timed(lambda m=machine, e=event: m.handle(e)))
    note = "whole handle(Revise)"
    return [
        _row("paid at revision", "1 change that nobody read", idle, note=note),
        _row("paid at revision", "8 changes, 8 reads of one committed attempt", hit, note=note),
    ]


# --- planning, and what grows with the graph -------------------------------------------------------------------------


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
        return max(0.0, self.done_ns - machine.index.asked_ns - _clock_ns()) / 1e3


class _Chains:
    """A finished run of ``n`` nodes in chains of ten; each chain's first node reads a leaf of its own."""

    def __init__(self, n: int, name: str) -> None:
        self.n = n
        self.heads = [f"n{i}" for i in range(0, n, CHAIN)]
        graph = _graph({f"n{i}": (f"n{i - 1}",) if i % CHAIN else () for i in range(n)})
        self.edges = [(f"n{i - 1}", f"n{i}") for i in range(n) if i % CHAIN]
        tree: dict[str, Any] = {}  # of bounded width, for a level is copied when something in it is revised
        for chain in range(n // CHAIN):
            at = tree
            for key in self.leaf(chain)[:-1]:
                at = at.setdefault(key, {})
            at[self.leaf(chain)[-1]] = 0
        self.probe = _Probe(policy(name))
        self.machine = Machine(graph, {"request": tree}, self.probe.policy)
        self.machine.index = _Clocked()
        self.starts: list[float] = []
        self.finishes: list[float] = []
        for chain in range(n // CHAIN):
            self.run_chain(chain, 0)
        self.starts, self.finishes = [], []

    @staticmethod
    def leaf(chain: int) -> tuple[str, ...]:
        return tuple(str(chain >> shift & 63) for shift in (12, 6, 0))

    def revision(self, chain: int, value: int) -> ev.Revise:
        return _revise(self.machine, "request", (self.leaf(chain), value))

    def run_chain(self, chain: int, salt: int) -> None:
        """Run the ten nodes of a chain, one after the other, and note what starting and finishing them took."""
        machine = self.machine
        for i in range(chain * CHAIN, (chain + 1) * CHAIN):
            start = ev.Start(f"n{i}")
            self.starts.append(_timed(lambda e=start: machine.handle(e)))
            attempt = machine.runs[f"n{i}"].attempt
            place = ("request", self.leaf(chain)) if i % CHAIN == 0 else (f"n{i - 1}", ("x",))
            end = ev.Finish(attempt.id, freeze({"x": i + salt}), _reads(machine, attempt.id, [place]))
            self.finishes.append(_timed(lambda e=end: machine.handle(e)))

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


def _planning(quick: bool) -> list[Row]:
    sizes = SIZES[:3] if quick else SIZES
    planned = [row for name in ("revise", "revise_plus") for row in _planning_of(name, sizes, 10 if quick else 60)]
    return [*planned, *_joining((10, 100, 1_000))]


def _joining(sizes: Sequence[int]) -> list[Row]:
    """Return what finishing a parent of a join costs, by how many parents the join has."""
    rows = []
    for n in sizes:
        above = [f"p{i}" for i in range(n)]
        machine = Machine(_graph({**dict.fromkeys(above, ()), "join": tuple(above)}), {}, policy("revise_plus"))
        ends = [ev.Finish(_start(machine, parent), freeze({"x": 0})) for parent in above]
        with _Still():
            samples = [_timed(lambda e=end, m=machine: m.handle(e)) for end in ends]
        rows.append(_row("handle(Finish)", f"below a join of {n:,} parents", samples))
    return _with_exponent(rows, sizes)


def _planning_of(name: str, sizes: Sequence[int], n_rounds: int) -> list[Row]:
    worlds, note = [], ""
    gc.disable()
    for n in sizes:
        if n * _BYTES_PER_NODE > _room_bytes():
            note = f"stopped below {n:,} nodes: they would not fit in memory"
            break
        worlds.append(_Chains(n, name))
    gc.enable()
    peers = [_descendants(world) for world in worlds]
    took: dict[str, list[list[float]]] = {key: [[] for _ in worlds] for key in ("plan", "whole", "peer")}
    rng, salt = random.Random(0), 0
    with _Still():
        for _ in range(n_rounds):
            for at, world in enumerate(worlds):
                for key in ("plan", "whole", "peer") * 3:
                    chain, salt = rng.randrange(world.n // CHAIN), salt + 1
                    if key == "peer":
                        head = world.heads[chain]
                        if call := peers[at]:
                            took[key][at].append(_timed(lambda f=call, h=head: f(h)))
                        continue
                    event, machine = world.revision(chain, salt), world.machine
                    if key == "plan":
                        took[key][at].append(world.probe.planning(machine, event))
                    else:
                        took[key][at].append(_timed(lambda m=machine, e=event: m.handle(e)))
                    world.run_chain(chain, salt)
    return [*_planning_rows(name, worlds, took, note), *_scan_rows(name, worlds, took["plan"], n_rounds)]


def _planning_rows(name: str, worlds: list[_Chains], took: dict[str, list[list[float]]], note: str) -> list[Row]:
    sizes = [world.n for world in worlds]
    plans, wholes, starts, ends = [], [], [], []
    for world, plan, whole, peer in zip(worlds, took["plan"], took["whole"], took["peer"], strict=True):
        case = f"{name}, {world.n:,} nodes"
        ratio = median(plan) / median(peer) if peer else None
        row = _row("planning", case, plan, 25.0, ratio=ratio, note="over networkx.descendants" if peer else _NO_PEER)
        plans.append(row._replace(met=row.met and (ratio is None or ratio <= 5)))
        wholes.append(_row("handle(Revise)", case, whole))
        starts.append(_row("handle(Start)", case, world.starts))
        ends.append(_row("handle(Finish)", case, world.finishes))
    rows = [each for group in (plans, wholes, starts, ends) for each in _with_exponent(group, sizes)]
    rows[len(plans) - 1] = rows[len(plans) - 1]._replace(note=f"{rows[len(plans) - 1].note} {note}".strip())
    return rows


_NO_PEER = "networkx is not installed (extra: peers)"


def _descendants(world: _Chains) -> Callable[[str], object] | None:
    try:
        import networkx as nx
    except ImportError:
        return None
    graph = nx.DiGraph()
    graph.add_nodes_from(world.machine.graph.order)
    graph.add_edges_from(world.edges)
    return lambda head: nx.descendants(graph, head)


def _scan_rows(name: str, worlds: list[_Chains], plans: list[list[float]], n_rounds: int) -> Iterator[Row]:
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
            with _Still():
                taken[way].append(_timed(call))
    for way, samples in taken.items():
        ratio = median(samples) / median(plans[at])
        row = _row("instead of the index", f"{way}, {name}, {world.n:,} nodes", samples, ratio=ratio)
        yield row._replace(met=ratio >= 100 if world.n == 100_000 else None, note="over planning, at least 100 at 1e5")


# --- the recording view ----------------------------------------------------------------------------------------------


def _view(quick: bool) -> list[Row]:
    n = 1_000 if quick else 20_000
    state = {"a": freeze({"b": {"c": {"d": 1}}}), "wide": freeze({f"k{i}": i for i in range(20)})}
    first, again, wrap = [], [], []
    with _Still():
        for _ in range(n):
            view = StateView(Recorder(), state.__getitem__, inputs=state)
            first.append(_timed(lambda v=view: v["a"]["b"]["c"]["d"]) / 4)
            again.append(_timed(lambda v=view: v["a"]["b"]["c"]["d"]) / 4)
            wrap.append(_timed(lambda v=view: v["wide"]))
    return [
        _row("recording view", "a level, first read", first, 1.5, note="mean of a walk of four levels"),
        _row("recording view", "a level, read before", again, note="mean of a walk of four levels"),
        _row("recording view", "wrapping a mapping of 20 keys", wrap, 5.0),
    ]


# --- events ----------------------------------------------------------------------------------------------------------

_N_NODES, _N_SLOTS = 10, 4


def _stream(name: str) -> tuple[Callable[[], Machine], list[ev.Event]]:
    """Return how to make a machine, and the events of a run on it: ten nodes, four at once, one revision half-way.

    Every attempt reads eight places, three levels deep: up to three of its parents' outputs, two places that all read, the
    rest its own. What runs when the revision comes reports half of its reads before it.
    """
    parents = {f"n{i}": tuple(f"n{j}" for j in (i - 2, i - 4, i - 5) if j >= 0) for i in range(_N_NODES)}
    graph = _graph(parents)
    group = {f"g{i}": {"fields": {f"f{j}": j for j in range(8)}} for i in range(_N_NODES)}
    inputs = {"request": freeze({"all": {"fields": {"goal": 1, "budget": 2}}, **group})}

    def make() -> Machine:
        return Machine(graph, inputs, policy(name))

    def places(node: str) -> list[tuple[str, tuple[str, ...]]]:
        shared = [("request", ("all", "fields", "goal")), ("request", ("all", "fields", "budget"))]
        above = [(parent, ("out", "report", "x")) for parent in parents[node]]
        own = [("request", (f"g{node[1:]}", "fields", f"f{j}")) for j in range(6)]
        return [*shared, *above, *own][:8]

    machine, events = make(), list[ev.Event]()
    running: dict[str, tuple[Read, ...]] = {}
    n_done = 0

    def send(event: ev.Event) -> None:
        events.append(event)
        for order in machine.handle(event):
            if isinstance(order, ev.Execute):
                running[order.attempt] = _reads(machine, order.attempt, places(order.node))
            elif isinstance(order, ev.Stop):
                del running[order.attempt]
                send(ev.Stopped(order.attempt))

    while True:
        for node in machine.ready():
            if len(running) < _N_SLOTS:
                send(ev.Start(node))
        if n_done == _N_NODES // 2 and not machine.revisions:
            for attempt, reads in running.items():
                send(ev.Observe(attempt, reads[:4]))
                running[attempt] = reads[4:]
            send(_revise(machine, "request", (("g3", "fields", "f1"), 99)))
            continue
        if not running:
            return make, events
        attempt = next(iter(running))
        reads, n_done = running.pop(attempt), n_done + 1
        total = sum(read.observed for read in reads)
        send(ev.Finish(attempt, freeze({"out": {"report": {"x": total}, "text": "done"}, "n": n_done}), reads))


def _events(quick: bool) -> list[Row]:
    found = []
    for name in ("revise", "revise_plus"):
        make, events = _stream(name)
        rates = []
        gc.collect()
        for _ in range(300 if quick else 5_000):
            handle = make().handle
            start = time.perf_counter_ns()
            for event in events:
                handle(event)
            rates.append(len(events) / (time.perf_counter_ns() - start) * 1e9)
        slow, p50 = np.percentile(rates, (5, 50))
        kinds = [type(event).__name__.lower() for event in events]
        mix = ", ".join(f"{kinds.count(kind)} {kind}" for kind in dict.fromkeys(kinds))
        found.append(
            Row(
                "events",
                name,
                len(rates),
                float(p50),
                float(slow),
                "events/s",
                150_000.0,
                bool(p50 >= 150_000),
                note=mix,
            )
        )
    return found


PARTS: dict[str, Callable[[bool], list[Row]]] = {
    "certificate": _certificate,
    "planning": _planning,
    "view": _view,
    "events": _events,
}
"""What can be asked for, in the order in which it is measured."""
