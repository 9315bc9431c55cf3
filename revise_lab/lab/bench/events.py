"""How many events the machine handles in a second."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable

import numpy as np

from revise_lab.core.machine import Machine
from revise_lab.policies import policy
from revise_lab.records import event as ev
from revise_lab.records.selector import Read
from revise_lab.records.value import freeze

from .samples import Row, graph_of, reads_of, revision_of

_N_NODES, _N_SLOTS = 10, 4


def stream(name: str) -> tuple[Callable[[], Machine], list[ev.Event]]:
    """Return how to make a machine, and the events of a run on it: ten nodes, four at once, one revision half-way.

    Every attempt reads eight places, three levels deep: up to three of its parents' outputs, two places that all read, the
    rest its own. What runs when the revision comes reports half of its reads before it.
    """
    parents = {f"n{i}": tuple(f"n{j}" for j in (i - 2, i - 4, i - 5) if j >= 0) for i in range(_N_NODES)}
    graph = graph_of(parents)
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
                running[order.attempt] = reads_of(machine, order.attempt, places(order.node))
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
            send(revision_of(machine, "request", (("g3", "fields", "f1"), 99)))
            continue
        if not running:
            return make, events
        attempt = next(iter(running))
        reads, n_done = running.pop(attempt), n_done + 1
        total = sum(read.observed for read in reads)
        send(ev.Finish(attempt, freeze({"out": {"report": {"x": total}, "text": "done"}, "n": n_done}), reads))


def rows(quick: bool) -> list[Row]:
    """Time a whole run, event after event, on a machine of its own."""
    found = []
    for name in ("revise", "revise_plus"):
        make, events = stream(name)
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
        judged = {"budget": 150_000.0, "met": bool(p50 >= 150_000)}
        found.append(Row("events", name, len(rates), float(p50), float(slow), "events/s", note=mix, **judged))
    return found
