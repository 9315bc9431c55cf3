"""What a read costs, and what it costs to check it at the commit."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from revise_lab.core.certify import check
from revise_lab.core.machine import Machine
from revise_lab.core.recorder import Recorder
from revise_lab.core.tracking import StateView
from revise_lab.policies import policy
from revise_lab.records import event as ev
from revise_lab.records.value import freeze

from .samples import Row, Still, cube, graph_of, reads_of, revision_of, start_of, summary, timed, with_exponent

PLACES = tuple(("request", ("g", f"k{i}", "x")) for i in range(8))

_HOW = {"delta": "revise", "digest": "revise_plus"}


def certified(how: str, unrelated: int = 0) -> tuple[Machine, str]:
    """Return a machine in which a node with 3 parents runs, and its attempt; others have read ``unrelated`` places."""
    cubic, places = cube(unrelated)
    group = {f"k{i}": {"x": i, "y": i, "z": 0} for i in range(8)}
    graph = graph_of({"p0": (), "p1": (), "p2": (), "n": ("p0", "p1", "p2"), "other": ()})
    machine = Machine(graph, {"request": {"g": group}, "aside": {"x": 0}, "big": cubic}, policy(how))
    for parent in ("p0", "p1", "p2"):
        machine.handle(ev.Finish(start_of(machine, parent), {"x": 0}))
    other = start_of(machine, "other")
    machine.handle(ev.Observe(other, reads_of(machine, other, (("big", place) for place in places))))
    return machine, start_of(machine, "n")


def touched() -> tuple[Machine, str]:
    """Return a machine and an attempt whose eight reads all changed, there and back, before it reported them."""
    machine, attempt = certified("revise_plus")
    reads = reads_of(machine, attempt, PLACES)
    for step in (-1, 1):
        changes = ((path, i if step > 0 else -1) for i, (_, path) in enumerate(PLACES))
        machine.handle(revision_of(machine, "request", *changes))
    machine.handle(ev.Observe(attempt, reads))
    return machine, attempt


def untouched(how: str, where: str = "", k: int = 0, unrelated: int = 0) -> tuple[Machine, str]:
    """Return a machine and an attempt with its eight reads, after ``k`` revisions that meet none of them.

    ``where`` says what they revise: ``another artifact``, or another place of ``the same artifact``.
    """
    machine, attempt = certified(how, unrelated)
    machine.handle(ev.Observe(attempt, reads_of(machine, attempt, PLACES)))
    for i in range(k):
        artifact, path = ("aside", ("x",)) if where.startswith("another") else ("request", ("g", "k0", "z"))
        machine.handle(revision_of(machine, artifact, (path, i + 1)))
    return machine, attempt


def checks(machine: Machine, attempt_id: str, n: int) -> list[float]:
    """Return the microseconds of ``n`` checks of a certificate that holds."""
    attempt, values, how = machine.attempts[attempt_id], machine.values, machine.switches.check
    if why := check(attempt, values, how):
        raise AssertionError(f"the certificate that is timed must hold: {why}")
    return [timed(lambda: check(attempt, values, how)) for _ in range(n)]


def unrelated_checks(how: str, sizes: Sequence[int], n: int) -> list[list[float]]:
    """Return samples for each number of unrelated reads, taken in turn in ten rounds."""
    prepared = [untouched(how, unrelated=size) for size in sizes]
    with Still():
        rounds = [[checks(machine, attempt, n // 10) for machine, attempt in prepared] for _ in range(10)]
    return [[x for each in rounds for x in each[i]] for i in range(len(sizes))]


def rows(quick: bool) -> list[Row]:
    """Time the check at the commit, and what the index costs when a revision arrives."""
    n = 2_000 if quick else 20_000
    found = []
    after = [("", 0), *itertools.product(("another artifact", "the same artifact"), (1, 4, 64))]
    for (how, name), (where, k) in itertools.product(_HOW.items(), after):
        machine, attempt = untouched(name, where, k)
        case = f"{how}, untouched, {k} deltas{f' on {where}' if where else ''}"
        with Still():
            found.append(summary("certificate", case, checks(machine, attempt, n), 1.0))
    machine, attempt = touched()
    with Still():
        found.append(summary("certificate", "digest, all 8 touched and compared", checks(machine, attempt, n), 2.0))
    sizes = (10, 1_000) if quick else (10, 1_000, 1_000_000)
    for how, name in _HOW.items():
        timings = zip(sizes, unrelated_checks(name, sizes, n), strict=True)
        flat = [summary("certificate", f"{how}, {size:,} unrelated reads", taken, 1.0) for size, taken in timings]
        found += with_exponent(flat, sizes)
    return [*found, *at_revision(n // 20)]


def at_revision(n: int) -> list[Row]:
    """Return what the index costs when a revision arrives, so that the check is a comparison of numbers."""
    idle, hit = [], []
    for i in range(n):
        machine, attempt = certified("revise_plus")
        machine.handle(ev.Finish(attempt, {"x": 0}, reads_of(machine, attempt, PLACES)))
        aside = revision_of(machine, "aside", (("x",), i + 1))
        idle.append(timed(lambda m=machine, e=aside: m.handle(e)))
        event = revision_of(machine, "request", *((path, -1) for _, path in PLACES))
        hit.append(timed(lambda m=machine, e=event: m.handle(e)))
    note = "whole handle(Revise)"
    return [
        summary("paid at revision", "1 change that nobody read", idle, note=note),
        summary("paid at revision", "8 changes, 8 reads of one committed attempt", hit, note=note),
    ]


def view_rows(quick: bool) -> list[Row]:
    """Time reads through the recording view."""
    n = 1_000 if quick else 20_000
    state = {"a": freeze({"b": {"c": {"d": 1}}}), "wide": freeze({f"k{i}": i for i in range(20)})}
    first, again, wrap = [], [], []
    with Still():
        for _ in range(n):
            state_view = StateView(Recorder(), state.__getitem__, inputs=state)
            first.append(timed(lambda v=state_view: v["a"]["b"]["c"]["d"]) / 4)
            again.append(timed(lambda v=state_view: v["a"]["b"]["c"]["d"]) / 4)
            wrap.append(timed(lambda v=state_view: v["wide"]))
    return [
        summary("recording view", "a level, first read", first, 1.5, note="mean of a walk of four levels"),
        summary("recording view", "a level, read before", again, note="mean of a walk of four levels"),
        summary("recording view", "wrapping a mapping of 20 keys", wrap, 5.0),
    ]
