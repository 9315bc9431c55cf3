"""The history language: one line an interleaving, with every decision of the machine between brackets.

``start G``, ``read G in.f doc.#members r.lane!`` (``!``: control), ``finish G`` (output: what it observed) or
``finish G {"o": 1}``, ``fail G text`` (``text!``: retryable), ``stopped G@1``, ``extend G``, ``rev in.f=2``, ``del in.f``,
``cancel``, ``close``. A move with ``~`` in front is illegal: it raises and changes nothing. ``[...]`` is what the machine
must have decided since the last move, exactly. A node's name stands for its latest attempt.
"""

from __future__ import annotations

import json
import re

import pytest

from revise_lab.core.machine import Machine
from revise_lab.core.table import ATTEMPTS
from revise_lab.errors import IllegalEvent
from revise_lab.policies import policy as policy_named
from revise_lab.records import event as ev
from revise_lab.records.attempt import Coverage
from revise_lab.records.revision import Change, Op, Revision
from revise_lab.records.selector import Marker, Read, Role, Selector, evaluate, parse_path
from revise_lab.records.value import freeze, thaw
from revise_lab.records.workflow import Workflow

AFFECTED = ("cancel", "avoid", "recompute")


async def _body(state):
    raise AssertionError("these machines are driven by hand")


def _sync_body(state):
    raise AssertionError("these machines are driven by hand")


def declare(spec, *, sync=(), **options):
    """Return a graph from ``"G; P < G; X < P ? r.lane; m * spawner.items"``; ``options`` by node name."""
    flow = Workflow("history")
    for line in filter(None, map(str.strip, spec.split(";"))):
        name, parents, when, spawner = re.fullmatch(
            r"(\w+)(?: < ([\w ]+?))?(?: \? (\w+\.\w+))?(?: \* (\w+\.\w+))?", line
        ).groups()
        after = (parents or "").split()
        if spawner:
            of, items = spawner.split(".")
            flow.member(of=of, items=items, name=name, after=after)(_body)
            continue
        lane = tuple(when.split(".")) if when else None
        body = _sync_body if name in sync else _body
        flow.node(name=name, after=after, when=lane, **options.get(name, {}))(body)
    for line in spec.split(";"):
        for source in re.findall(r"\? (\w+)\.", line):
            flow.branch(of=source)(lambda state: None)
    return flow.graph()


def selector(text):
    role = Role.CONTROL if text.endswith("!") else Role.DATA
    path, _, marker = text.rstrip("!").partition("#")
    member, tail = re.fullmatch(r"(\w+\[[a-z]\w*\])?(.*)", path.rstrip(".")).groups()
    artifact, inner = parse_path(("member" if member else "") + tail)
    artifact = member or artifact
    marker, _, key = marker.partition(":")
    return Selector(artifact, (*inner, key) if key else inner, Marker(marker or "value"), role)


class Play:
    """Plays histories on one machine and compares what it decides."""

    def __init__(self, graph, inputs, policy="revise", **switches):
        self.graph = declare(graph) if isinstance(graph, str) else graph
        self.policy = policy_named(policy, **switches) if isinstance(policy, str) else policy
        self.machine = Machine(self.graph, inputs, self.policy, validate=True)
        self.orders = {}
        self.seen = {}
        self.n_revisions = 0
        self.told = []
        self.reached = set()
        """Steps of the table that were made: (state, what happens, next state)."""
        self._attempts = []
        self._at = len(self.machine.journal)

    def __call__(self, history):
        for move in (part.strip() for part in re.split(r";(?![^{]*\})", history)):
            if move.startswith("["):
                expected = [] if move == "[]" else [each.strip() for each in move[1:-1].split(",")]
                assert self.facts() == expected, f"before: {history.partition(move)[0][-60:]!r}"
            elif move.startswith("~"):
                self.illegal(move[1:])
            elif move:
                self.machine_takes(self.event(move))
        return self

    def facts(self):
        """Return what was decided since the last look."""
        new, self._at = self.machine.journal[self._at :], len(self.machine.journal)
        return [text for text in map(_fact, new) if text]

    def illegal(self, move):
        before = self.machine.fingerprint()
        with pytest.raises(IllegalEvent) as caught:
            self.machine.handle(self.event(move))
        assert self.machine.fingerprint() == before, move
        return caught.value

    def machine_takes(self, event):
        before = [(attempt, attempt.state) for attempt in self._attempts]
        self.told = self.machine.handle(event)
        for attempt, state in before:
            if getattr(event, "attempt", None) == attempt.id:
                what = type(event).__name__.lower()
                after = ATTEMPTS[state, what][0]
                self.reached.add((state, what, after))
                state = after
            if state is not attempt.state:
                what = [each for (was, each), nexts in ATTEMPTS.items() if was is state and attempt.state in nexts]
                self.reached.add((state, what[0], attempt.state))
        self._attempts += [each for each in self.machine.attempts.values() if each not in self._attempts]
        for order in self.told:
            if isinstance(order, ev.Execute):
                self.orders[order.attempt] = order
                self.seen[order.attempt] = []
            elif isinstance(order, ev.Moved):
                self.orders[order.attempt] = self.machine.snapshot_of(order.attempt)

    def attempt(self, name):
        return name if "@" in name else [each for each, order in self.orders.items() if order.node == name][-1]

    def event(self, move):
        verb, _, rest = move.partition(" ")
        if verb in ("rev", "del"):
            path, _, value = rest.partition("=")
            artifact, inner = parse_path(path)
            change = Change(artifact, Op.DELETE, inner)
            if verb == "rev":
                change = Change(artifact, Op.SET, inner, freeze(json.loads(value)))
            self.n_revisions += 1
            return ev.Revise(Revision(f"r{self.n_revisions}", (change,)))
        if verb in ("cancel", "close"):
            return ev.Cancel() if verb == "cancel" else ev.Close()
        name, _, rest = rest.partition(" ")
        if verb == "start":
            return ev.Start(name)
        attempt = self.attempt(name)
        if verb == "read":
            reads = tuple(self.look(attempt, text) for text in rest.split())
            return ev.Observe(attempt, reads, Coverage.COMPLETE)
        if verb == "finish":
            output = json.loads(rest) if rest else {"o": [thaw(read.observed) for read in self.seen[attempt]]}
            return ev.Finish(attempt, freeze(output))
        if verb == "fail":
            return ev.Fail(attempt, rest.rstrip("!"), rest.endswith("!"))
        return {"stopped": ev.Stopped, "extend": ev.Extend}[verb](attempt)

    def look(self, attempt, text):
        """Read from the attempt's own snapshot, as a body does."""
        place = selector(text)
        read = Read(place, evaluate(place, self.orders[attempt].value(place.artifact)))
        self.seen[attempt].append(read)
        return read

    @property
    def outputs(self):
        return {name: thaw(value) for name, value in self.machine.outputs().items()}

    @property
    def n_attempts(self):
        return {name: run.n_attempts for name, run in self.machine.runs.items()}


def _fact(entry):
    match entry:
        case ev.Committed():
            return f"commit {entry.attempt}"
        case ev.Rejected() | ev.Discarded():
            return f"{type(entry).__name__.lower().removesuffix('ed')} {entry.attempt}"
        case ev.Stop():
            return f"{'orphan' if entry.orphaned else 'stop'} {entry.attempt}"
        case ev.Moved():
            return f"move {entry.attempt}"
        case ev.Retracted():
            return f"retract {entry.node}"
        case ev.Failed():
            return f"{'fail' if entry.final else 'retry'} {entry.attempt}"
        case ev.Refused():
            return f"refuse {entry.error}"
        case ev.Planned():
            affected = "".join(f" {each.node}" for each in entry.nodes if each.action in AFFECTED)
            return f"{entry.scope}{affected}"
        case ev.Duplicate() | ev.Deferred() | ev.Closed():
            return type(entry).__name__.lower()
    return None


@pytest.fixture
def play():
    """Return the player: ``play(graph, inputs, policy, **switches)("history")``."""
    return Play


@pytest.fixture
def graph_of():
    """Return the one-line declarations of graphs."""
    return declare
