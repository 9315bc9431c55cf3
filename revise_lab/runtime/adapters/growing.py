"""A machine whose graph grows while the framework unrolls it.

LangGraph decides at run time which tasks exist: loops, sends and gotos have no static graph. So the machine starts empty and
a task becomes one of its nodes when the framework first schedules it. The parents of a node are whoever scheduled it and
whoever wrote what it reads; the second kind is learnt from its reads. Everything else - what is stale, what must stop, what
holds, when an output counts, when an effect may leave - is the machine's, unchanged.

The framework is the authority on the structure: when a pass over the graph ends, nodes that it did not schedule are
retracted.
"""

from __future__ import annotations

from collections.abc import Iterable, KeysView, Mapping
from typing import Any, NamedTuple, Protocol

from revise_lab.core.machine import Machine
from revise_lab.core.table import Attempt, NodeRun
from revise_lab.records import event as ev
from revise_lab.records.attempt import AttemptState
from revise_lab.records.selector import Marker, Path, Read, Role, Selector
from revise_lab.records.value import Obj, Value, make, walk
from revise_lab.records.workflow import Node

GOTO = "~goto"
"""The member of an output under which the nodes that it schedules are named."""


class Author(Protocol):
    """What this module needs to know of where a value of the state comes from."""

    @property
    def places(self) -> tuple[tuple[str, Path], ...]:
        """(artifact, place in it) of everybody who wrote it."""


Origins = Mapping[str, Author]
"""By state key: who wrote what a task finds in its state."""


class Arrive(NamedTuple):
    """The framework schedules a task."""

    name: str
    node: Node
    position: tuple[int, str]
    parents: tuple[str, ...]
    """Who scheduled it."""
    source: str | None
    """The one whose decision did."""
    lane: str
    """The name under which that decision knows it."""
    alone: bool
    """Nobody else could have."""
    origins: Origins


class PassBegins(NamedTuple):
    """The framework starts over, on what the inputs are now."""


class PassEnds(NamedTuple):
    """The framework has nothing left to schedule."""

    failed: bool
    """It gave up on a node, or waits for an answer, so what it did not reach says nothing."""


class Growing(Machine):
    """The state of one run over a graph that is not known beforehand."""

    exhausted = False
    """Whether the framework has nothing left to schedule."""
    gave_up = False
    """Whether it has nothing left because of an error of its own, or a question: that is no end to be sealed."""

    def handle(self, event: Any) -> list[ev.Instruction]:
        """Handle an event of the machine, or one of the framework's."""
        kind = type(event)
        if kind is Arrive:
            return self._outside(self._arrive, event)
        if kind is PassBegins:
            self.exhausted, self.gave_up, self._seen = False, False, set[str]()
            for kept in (self._origins, self._at_start, self.keys_read):
                for gone in [each for each in kept if each not in self.attempts]:
                    del kept[gone]
            return []
        if kind is PassEnds:
            return self._outside(self._pass_ends, event)
        if kind is not ev.Start:
            orders = super().handle(event)
            if kind is ev.Finish or kind is ev.Fail:  # it reads no more
                self._at_start.pop(event.attempt, None)
            return orders
        run = self._ready.get(event.node)
        if run is not None:
            self._wire(run, ())
        orders = super().handle(event)
        self._note_start(self.runs[event.node])
        return orders

    def _build(self) -> None:
        super()._build()
        self._seen = set()
        self._triggers: dict[str, tuple[str, ...]] = {}
        self._origins: dict[str, Origins] = {}
        """By attempt: who had written what it found in its state."""
        self._at_start: dict[str, dict[str, str]] = {}
        """By attempt that runs: the current attempt of every node that had one when it started."""
        self._latest: dict[str, Origins] = {}
        self._alone: dict[str, bool] = {}
        self.keys_read: dict[str, set[str]] = {}
        """By attempt: the keys of its state that it has asked for; its execution adds to it."""

    def _outside(self, change: Any, event: Any) -> list[ev.Instruction]:
        self._out = []
        change(event)
        self._settle()
        if self.validate:
            self.check_invariants()
        return self._out

    # --- structure ---------------------------------------------------------------------------------------------------

    def _arrive(self, event: Arrive) -> None:
        run = self.runs.get(event.name)
        if run is None:
            run = NodeRun(event.name, event.node, event.position)
            run.n_attempts = self._retired.pop(event.name, 0)
            self.runs[event.name] = run
            self.n_active += 1
        run.node = event.node
        run.position, run.place = event.position, (*event.position, event.name)
        source = None
        if event.source is not None and event.lane in _lanes(self.values.get(event.source)):
            selector = Selector(event.source, (GOTO, event.lane), Marker.HAS, Role.CONTROL)
            source = (self.runs[event.source], selector)
        run.source = source
        self._triggers[event.name], self._alone[event.name] = event.parents, event.alone
        self._seen.add(event.name)
        self._latest[event.name] = event.origins
        live = run.attempt or run.current
        if live is not None and not self._same_writers(live, event.origins):
            self._unseat(run, live)
        live = run.attempt or run.current
        holds = live is not None and live.valid
        self._wire(run, [read.selector.artifact for read in live.reads] if live and holds else ())
        self._queue(run)

    def _wire(self, run: NodeRun, read: Iterable[str]) -> None:
        """Make the parents of a node those that schedule it and those whose outputs its live attempt has read."""
        names = dict.fromkeys((*self._triggers[run.name], *read))
        if len(names) == len(run.parents) and all([parent.name in names for parent in run.parents]):
            return
        wanted = [self.runs[name] for name in names if name in self.runs and name != run.name]
        for parent in [each for each in run.parents if each not in wanted]:
            run.parents.remove(parent)
            parent.children.remove(run)
            run.n_settled -= parent.settled
            run.n_present -= parent.active is True
            run.n_undecided -= parent.active is None
        for parent in wanted:
            self._link(parent, run)

    def _activity(self, run: NodeRun) -> bool | None:
        """Say whether a task belongs to the run; what else could schedule it, the rest of the pass will show."""
        verdict = super()._activity(run)
        return None if verdict is False and run.source is None and not self._alone[run.name] else verdict

    def _unseat(self, run: NodeRun, attempt: Attempt) -> None:
        """Give up an attempt that found in its state what another task has written since."""
        why = ev.Evidence("", "another task writes what it reads")
        if attempt is run.attempt:
            self._stop(run, str(why))
        else:
            self._drop(attempt, why)

    def _pass_ends(self, event: PassEnds) -> None:
        if not event.failed:
            for run in [each for each in self.runs.values() if each.name not in self._seen]:
                self._remove("", run)
                self._triggers.pop(run.name, None)
        self.exhausted, self.gave_up = True, event.failed

    @property
    def closable(self) -> bool:
        """Whether the run may be sealed."""
        return not self.gave_up and super().closable

    @property
    def quiet(self) -> bool:
        """Whether nothing runs and the framework has nothing left to schedule."""
        if not self.exhausted or self._asked:
            return False
        return not any(attempt.state is AttemptState.RUNNING for attempt in self._live.values())

    def under_way(self) -> KeysView[str]:
        """Return the attempts that have neither counted nor been given up."""
        return self._live.keys()

    # --- attempts ----------------------------------------------------------------------------------------------------

    def _note_start(self, run: NodeRun) -> None:
        assert run.attempt is not None
        started = run.attempt.id
        self._at_start[started] = {each.name: each.current.id for each in self.runs.values() if each.current}
        self._origins[started] = self._latest.get(run.name, {})

    def _snapshot(self, attempt_id: str, run: NodeRun) -> ev.Execute:
        everything = dict(self.values)
        return make(ev.Execute, (attempt_id, run.name, run.key, self.version, self.inputs, everything))

    def _record(self, attempt: Attempt, reads: Iterable[Read]) -> None:
        """Add reads; whoever wrote what was read becomes a parent."""
        reads = tuple(reads)
        at_start = self._at_start.get(attempt.id, {})
        for name in {read.selector.artifact: None for read in reads}:
            parent = self.runs.get(name)
            if parent is None or parent is attempt.run or any([known is parent for known, _ in attempt.parents]):
                continue
            attempt.parents = (*attempt.parents, (parent, at_start.get(name)))
            if attempt is attempt.run.attempt:
                self._link(parent, attempt.run)
        super()._record(attempt, reads)

    def _same_writers(self, attempt: Attempt, now: Origins) -> bool:
        """Say whether what an attempt asked of its state still comes from the same writers."""
        then = self._origins.get(attempt.id, {})
        return all(_places(then, key) == _places(now, key) for key in self.keys_read.get(attempt.id, ()))


def _lanes(output: Value) -> Value:
    lanes = walk(output, (GOTO,))
    return lanes if type(lanes) is Obj else ()


def _places(origins: Origins, key: str) -> tuple[tuple[str, Path], ...]:
    return origins[key].places if key in origins else ()
