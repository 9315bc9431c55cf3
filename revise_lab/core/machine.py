"""The recovery protocol as a pure state machine: ``handle(event) -> instructions``.

Theory of operation. The machine holds the artifacts (inputs and node outputs), one :class:`NodeRun` a node and the
reader index. One event is handled at a time; revisions and output commits draw from one version line (R3). Every event
ends in a *settling* pass, in topological order, over the nodes that it can have moved: a node is *valid* when its last
committed attempt still observes what it observed, *settled* when it is valid and all its parents are (R1). An attempt
starts only below settled parents (R2), commits only if its certificate holds and its parents are settled, and is
otherwise rejected or waits without a slot (R8). A lane that is no longer taken is retracted in the same pass (R6).

House rules: no clock, no randomness, no IO, no framework. An illegal event raises and changes nothing. Everything that
was decided is in :attr:`Machine.journal`, with its evidence.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

from revise_lab.errors import IllegalEvent, ReviseLabError
from revise_lab.records import event as ev
from revise_lab.records.attempt import AttemptState, Coverage, Outcome
from revise_lab.records.revision import Change, Revision
from revise_lab.records.selector import Read, Role, Selector
from revise_lab.records.value import ABSENT, Value, digest, equal, freeze, make, thaw
from revise_lab.records.workflow import Graph

from .certify import check, recheck
from .plan import Policy, RecoveryPlan
from .provenance import ReaderIndex
from .revising import Revising
from .table import ATTEMPTS, RUN, Attempt, NodeRun, conflict_of

# bound once: looking a member up on its class costs 0.07 us in Python 3.11, more than the decisions made with it
_RUNNING, _FINISHED = AttemptState.RUNNING, AttemptState.FINISHED
_COMPLETE, _UNKNOWN = Coverage.COMPLETE, Coverage.UNKNOWN
_CONTROL = Role.CONTROL


class Machine(Revising):
    """The state of one run.

    Parameters
    ----------
    graph : Graph
        The checked workflow.
    inputs : mapping
        The input artifacts by name, JSON-like.
    policy : Policy
        How to recover.
    validate : bool
        Check the invariants after every event (tests).

    Attributes
    ----------
    journal : list
        Every event and every fact, in order; position is ``seq``.
    version : int
        The head of the version line.
    """

    def __init__(self, graph: Graph, inputs: Mapping[str, Any], policy: Policy, *, validate: bool = False) -> None:
        frozen = {name: freeze(value) for name, value in inputs.items()}
        if clash := {name for name in frozen if name.partition("[")[0] in graph.nodes or name in graph.confirmations}:
            raise ReviseLabError(f"{', '.join(sorted(clash))} names an input and a node - rename one of them")
        self.graph = graph
        self.policy = policy
        self.switches = policy.switches
        self.validate = validate
        self.inputs: dict[str, Value] = frozen
        self.values: dict[str, Value] = dict(frozen)
        self.counts: dict[str, int] = dict.fromkeys(frozen, 0)
        self.version = 0
        self.state = "open"
        self.late_invalid = 0
        self.index = ReaderIndex()
        self.attempts: dict[str, Attempt] = {}
        self.revisions: dict[str, int] = {}
        self.deferred: list[Revision] = []
        self.outboxes = {}
        self.n_sent = 0
        self.overrides: dict[str, tuple[Change, ...]] = {}
        self.plan: RecoveryPlan | None = None
        self.journal: list[ev.Entry] = [
            ev.Opened(graph.name, freeze(inputs), policy.name, freeze(self.switches.as_dict()))
        ]
        self._out: list[ev.Instruction] = []
        self._build()
        self._settle()

    # --- the one entry ---------------------------------------------------------------------------------------------

    def handle(self, event: ev.Event) -> list[ev.Instruction]:
        """Handle one event and return what the driver has to do.

        Raises
        ------
        IllegalEvent
            The table does not allow the event in this state; nothing has changed.
        """
        handler = _ALLOWED[self.state].get(type(event))
        if handler is None:
            raise self._illegal(event)
        self._out = []
        handler(self, event)
        if self._heap or self.deferred:
            self._settle()
        if self.state == "closing":
            self._seal()
        if self.validate:
            self.check_invariants()
        return self._out

    def _illegal(self, event: ev.Event) -> IllegalEvent:
        name = type(event).__name__
        if type(event) not in _HANDLERS:
            return IllegalEvent(f"{name} is not an event of the machine", event=event)
        return IllegalEvent(
            f"{name.lower()} is not possible: the run is {self.state} - start a new run, or reopen this one",
            event=event,
            story=self.story(getattr(event, "attempt", getattr(event, "node", ""))),
        )

    # --- attempts --------------------------------------------------------------------------------------------------

    def _on_start(self, event: ev.Start) -> None:
        run = self.runs.get(event.node)
        if run is None or not run.ready:
            why = "is not part of the run" if run is None else f"is {run.status}, not ready"
            raise IllegalEvent(
                f"start {event.node!r}: it {why} - start only what machine.ready() names",
                node=event.node,
                story=self.story(event.node),
            )
        run.n_attempts += 1
        attempt_id = f"{run.name}@{run.n_attempts}"
        snapshot = self._snapshot(attempt_id, run)
        attempt = self.attempts[attempt_id] = self._live[attempt_id] = Attempt(attempt_id, run, self.version, snapshot)
        run.attempt = attempt
        attempt.parents = _consumed(run)
        reads: list[Read] = []
        if run.source is not None:
            reads.append(Read(run.source[1], True))
        if "reads" in run.node.unknown:
            attempt.coverage = _UNKNOWN
            visible = (*self.inputs, *snapshot.parents)
            reads.extend(Read(Selector(name, ()), snapshot.value(name)) for name in visible)
        names = tuple([(each.name, consumed) for each, consumed in attempt.parents])
        self.journal += (event, make(ev.Started, (attempt_id, run.name, self.version, names, tuple(reads))))
        if reads:
            self._record(attempt, reads)
        self._out.append(snapshot)
        run.ready = False
        del self._ready[run.name]

    def _snapshot(self, attempt_id: str, run: NodeRun) -> ev.Execute:
        """Return references to all that a node may see now, and to nothing else (R5)."""
        seen = self.ancestors(run) if "reads" in run.node.unknown else run.parents
        parents = {parent.name: self.values.get(parent.name, ABSENT) for parent in seen}
        for name in run.node.confirmations:
            parents[name] = self.values.get(name, ABSENT)
        return make(ev.Execute, (attempt_id, run.name, run.key, self.version, self.inputs, parents))

    def _on_extend(self, event: ev.Extend) -> None:
        """Move an attempt to the newest state if all its reads so far hold there and its parents are settled (R4)."""
        attempt = self._allowed(event.attempt, "extend")
        self.journal.append(event)
        run, old = attempt.run, attempt.snapshot
        if (
            self.switches.extension == "on"
            and old is not None
            and attempt.coverage is _COMPLETE
            and attempt.valid
            and run.n_settled == len(run.parents)
            and self._confirmed(run)
        ):
            new = self._snapshot(attempt.id, run)
            if new.parents.keys() != old.parents.keys():
                return
            attempt.snapshot = new
            attempt.v_start = self.version
            attempt.parents = _consumed(run)
            moved = ev.Moved(attempt.id, self.version)
            self.journal.append(moved)
            self._out.append(moved)

    def snapshot_of(self, attempt_id: str) -> ev.Execute:
        """Return the snapshot that a running attempt is on."""
        snapshot = self.attempts[attempt_id].snapshot
        if snapshot is None:
            raise IllegalEvent(
                f"attempt {attempt_id!r} is not running - it has no snapshot any more", attempt=attempt_id
            )
        return snapshot

    def is_late(self, attempt_id: str, artifact: str) -> bool:
        """Say whether an artifact has changed since a running attempt's snapshot was taken."""
        attempt = self.attempts.get(attempt_id)
        if attempt is None or attempt.snapshot is None or self.switches.check != "digest":
            return False
        return attempt.snapshot.value(artifact) is not self.values.get(artifact, ABSENT)

    def _on_observe(self, event: ev.Observe) -> None:
        attempt = self._allowed(event.attempt, "observe")
        self.journal.append(event)
        if attempt.state is _RUNNING:
            self._take(attempt, event.reads, event.coverage)

    def _on_finish(self, event: ev.Finish) -> None:
        self._conclude(event, make(Outcome, (freeze(event.output), None, False)), "finish")

    def _on_fail(self, event: ev.Fail) -> None:
        self._conclude(event, Outcome(ABSENT, event.error, event.retryable), "fail")

    def _conclude(self, event: ev.Finish | ev.Fail, outcome: Outcome, name: str) -> None:
        attempt = self._allowed(event.attempt, name)
        self.journal.append(event)
        if attempt.state is not _RUNNING:
            self._move(attempt, name, AttemptState.CANCELLED)
            self.attempts.pop(attempt.id)
            self._say(ev.Discarded(attempt.id))
            return
        if event.reads or event.coverage is not attempt.coverage:
            self._take(attempt, event.reads, event.coverage)
        attempt.outcome = outcome
        attempt.calls = event.calls
        if isinstance(event, ev.Finish):
            attempt.effects = event.effects
        self._move(attempt, name, _FINISHED)
        attempt.snapshot = None
        self._visit(attempt.run)

    def _on_stopped(self, event: ev.Stopped) -> None:
        attempt = self._allowed(event.attempt, "stopped")
        self.journal.append(event)
        self._move(attempt, "stopped", AttemptState.CANCELLED)
        self.attempts.pop(attempt.id)

    def _reconsiders(self, run: NodeRun, current: Attempt) -> bool:
        """Ask for a decision again where nothing else of a committed attempt has changed (R7); say whether it is open."""
        control = current.dropped is None and not current.failed and run.node.branch is not None
        if any(each.source == run.node.name and each.membership for each in self.graph.nodes.values()):
            control = False  # its branch saw a list; what is kept of it is keyed, and a decision on that proves nothing
        if not control or any(each.role is not _CONTROL for each in current.mismatched):
            return False
        if run.source is not None and run.source[1] in current.mismatched:
            return False
        if self._asked.get(run.name) != current.id:
            self._asked[run.name] = current.id
            assert current.outcome is not None
            self._out.append(ev.Reconsider(self._snapshot(current.id, run), current.outcome.output))
        return True

    def _on_reconsidered(self, event: ev.Reconsidered) -> None:
        """Keep an attempt whose decision comes out as before; it has read what the decision reads now."""
        attempt = self.attempts.get(event.attempt)
        if attempt is None or self._asked.get(attempt.run.name) != event.attempt:
            raise IllegalEvent(
                f"reconsidered names attempt {event.attempt!r}, whose decision nobody asked for", attempt=event.attempt
            )
        self.journal.append(event)
        run = attempt.run
        del self._asked[run.name]
        self._queue(run)
        if run.current is not attempt or attempt.dropped is not None or attempt.outcome is None:
            return
        if not equal(event.output, attempt.outcome.output):
            self._drop(attempt, conflict_of(attempt) if attempt.mismatched else ev.Evidence("", "the decision"))
            return
        own = None if run.source is None else run.source[1]
        kept = [read for read in attempt.reads if read.selector.role is not _CONTROL or read.selector == own]
        self._forget(attempt)
        attempt.reads, attempt.cells, attempt.mismatched = [], [], {}
        self._record(attempt, (*kept, *event.reads))

    def _take(self, attempt: Attempt, reads: Iterable[Read], coverage: Coverage) -> None:
        self._record(attempt, reads)
        if coverage is _UNKNOWN or attempt.coverage is _COMPLETE:
            attempt.coverage = coverage

    def _record(self, attempt: Attempt, reads: Iterable[Read]) -> None:
        """Add reads to an attempt's read set; a late read of a place that changed since the start is a mismatch."""
        known, intern = self.index.cells.get, self.index.intern
        own, cells, start = attempt.reads, attempt.cells, attempt.v_start
        for read in reads:
            selector = read[0]
            cell = known(selector) or intern(selector)
            readers = cell.readers
            if attempt in readers:
                continue
            readers[attempt] = at = len(own)
            own.append(read)
            cells.append(cell)
            if cell.version > start:
                self._mark(attempt, at, selector.path)

    def _allowed(self, attempt_id: str, name: str) -> Attempt:
        attempt = self.attempts.get(attempt_id)
        if attempt is None:
            raise IllegalEvent(f"{name} names attempt {attempt_id!r}, which never started", attempt=attempt_id)
        if (attempt.state, name) not in ATTEMPTS:
            raise IllegalEvent(
                f"{name} of attempt {attempt_id!r}: it is {attempt.state} - report what an attempt does once, in order",
                attempt=attempt_id,
                story=self.story(attempt.run.name),
            )
        return attempt

    # --- the run ---------------------------------------------------------------------------------------------------

    def _on_cancel(self, event: ev.Cancel) -> None:
        self.journal.append(event)
        self.state = "cancelled"
        for run in self.runs.values():
            if run.attempt:
                self._stop(run, "the run was cancelled")
            run.ready = False
        self._ready.clear()
        self._withdraw_all("the run was cancelled")

    def _on_close(self, event: ev.Close) -> None:
        """Re-validate every certificate once more and seal the run; what waited for the seal may leave now."""
        if not self.closable:
            waits = [f"{run.name} is {run.status}" for run in self.runs.values() if not run.settled]
            waits += [f"{intent.key} is blocked: {why}" for intent, _, why in self.residue()]
            waits += [
                f"{self._intent(box, box.waiting).key} is on its way" for box in self._boxes() if self._moves(box)
            ]
            raise IllegalEvent(f"close: not everything is settled ({'; '.join(waits[:5])}) - finish or revise first")
        self.journal.append(event)
        broken = [
            (run, why)
            for run in self.runs.values()
            if run.current and (why := check(run.current, self.values, self.switches.check) or self._reread(run))
        ]
        for run, why in broken:
            self.late_invalid += 1
            if run.current:
                self._drop(run.current, why)
            self._queue(run)
        if not broken:
            self.state = "closing"
            self._release_all()

    def _on_reopen(self, event: ev.Reopen) -> None:
        self.journal.append(event)
        self.state = "open"

    def _seal(self) -> None:
        """Close a sealed run as soon as everything that is wanted is out, and nothing else."""
        if self.quiet and self.effects_done and all(run.settled for run in self.runs.values()):
            self.state = "closed"
            self._say(ev.Closed(self.version, self.late_invalid))

    def _reread(self, run: NodeRun) -> ev.Evidence | None:
        return recheck(run.current, self.values) if run.current and self.switches.check != "none" else None

    # --- what others may ask ---------------------------------------------------------------------------------------

    @property
    def closable(self) -> bool:
        """Whether the run may be sealed."""
        at_rest = self.quiet and self.state == "open" and not self.deferred and not self.effects_move
        return at_rest and all(run.settled for run in self.runs.values()) and not self.residue()

    @property
    def status(self) -> str:
        """``open``, ``closing``, ``closed``, ``cancelled``, ``failed``, or ``blocked`` when only a person can go on."""
        if self.state not in ("open", "closing") or not self.quiet or self.closable or self.effects_move:
            return self.state
        if self.residue():
            return "blocked"
        return "failed" if not all(run.settled for run in self.runs.values()) else self.state

    def ready(self) -> tuple[str, ...]:
        """Return the nodes that may start, in topological order."""
        return tuple(run.name for run in sorted(self._ready.values(), key=lambda run: run.position))

    def outputs(self) -> dict[str, Value]:
        """Return the output of every node that is settled and has one, overrides applied.

        What an invalid attempt left behind, or stands below a failure, is not among them.
        """
        runs = sorted(self.runs.values(), key=lambda run: run.position)
        return {run.name: self.values[run.name] for run in runs if run.settled and run.current}

    def failures(self) -> dict[str, str]:
        """Return the error of every node whose retries are exhausted or whose override conflicts."""
        found = {}
        for run in self.runs.values():
            if run.current and run.current.valid and run.current.outcome:
                error = run.conflict or run.current.outcome.error
                if error is not None:
                    found[run.name] = error
        return found

    def story(self, name: str) -> tuple[str, ...]:
        """Return the journal lines that concern a node or an attempt."""
        node = name.split("@")[0]
        lines = (ev.to_json(entry) for entry in self.journal)
        return tuple(line for line in lines if node and node in line)[-20:]

    def fingerprint(self) -> bytes:
        """Return a digest of everything that decides what happens next."""
        rows: list[Value] = [self.state, self.version, sorted(self.counts.items()), sorted(self.revisions)]
        for name in sorted(self.runs):
            run = self.runs[name]
            for attempt in (run.attempt, run.current):
                rows.append([name, attempt and [attempt.id, attempt.state, len(attempt.reads), attempt.valid]])
            rows.append(
                [run.ready, run.settled, run.active, run.n_attempts, self.values.get(name) or None, run.conflict]
            )
        for box in self._boxes():
            for record in (box.live, box.waiting):
                rows.append([box.node, box.slot, box.epoch, record and [record.state, record.unwanted, record.why]])
        return digest(freeze([*rows, self.inputs, len(self.journal), sorted(self._asked.items())]))

    def check_invariants(self) -> None:
        """Assert the invariants of the state (tests; users cannot break them)."""
        for run in self.runs.values():
            for attempt in (run.attempt, run.current):
                if attempt and self.switches.check == "digest" and attempt.dropped is None:
                    assert (recheck(attempt, self.values) is None) == (not attempt.mismatched), attempt.id
            if run.settled:
                assert run.active is False or (run.current and run.current.valid), run.name
                assert run.active is False or all(parent.settled for parent in run.parents), run.name
            if run.active is False:
                assert not run.current, run.name
                assert not run.attempt, run.name
            for count, state in ((run.n_present, True), (run.n_undecided, None)):
                assert count == sum(parent.active is state for parent in run.parents), run.name
            assert run.n_settled == sum(parent.settled for parent in run.parents), run.name
            if run.ready:
                assert all(parent.settled for parent in run.parents), run.name


_HANDLERS: dict[type, Callable[[Machine, Any], None]] = {
    ev.Revise: Machine._on_revise,
    ev.ReviseTogether: Machine._on_revise_together,
    ev.Start: Machine._on_start,
    ev.Observe: Machine._on_observe,
    ev.Extend: Machine._on_extend,
    ev.Finish: Machine._on_finish,
    ev.Fail: Machine._on_fail,
    ev.Stopped: Machine._on_stopped,
    ev.Reconsidered: Machine._on_reconsidered,
    ev.Cancel: Machine._on_cancel,
    ev.Close: Machine._on_close,
    ev.Authorise: Machine._on_authorise,
    ev.Dispatch: Machine._on_dispatch,
    ev.Compensate: Machine._on_compensate,
    ev.Answered: Machine._on_answered,
    ev.Recover: Machine._on_recover,
    ev.Reopen: Machine._on_reopen,
}
_ALLOWED: Final = {
    state: {kind: handler for kind, handler in _HANDLERS.items() if (state, kind.__name__.lower()) in RUN}
    for state in {state for state, _ in RUN}
}


def _consumed(run: NodeRun) -> tuple[tuple[NodeRun, str | None], ...]:
    """Return the parents of a node with the attempts whose outputs one sees now."""
    return tuple([(parent, parent.current.id if parent.current else None) for parent in run.parents])


def replay(graph: Graph, journal: Iterable[ev.Entry], policy: Policy) -> Machine:
    """Rebuild a machine from the events of a journal.

    Raises
    ------
    ReviseLabError
        The journal does not begin with its opening, or belongs to another workflow or policy.
    """
    entries = iter(journal)
    opened = next(entries, None)
    if not isinstance(opened, ev.Opened) or (opened.workflow, opened.policy) != (graph.name, policy.name):
        raise ReviseLabError(
            f"the journal opens with {opened!r} - it is not one of {graph.name!r} under {policy.name!r}"
        )
    if (was := thaw(opened.switches)) != (now := policy.switches.as_dict()):
        other = ", ".join(f"{name}={was.get(name)!r}" for name in now if was.get(name) != now[name])
        raise ReviseLabError(f"the journal is of a run with {other} - build the policy with the same switches")
    machine = Machine(graph, opened.inputs, policy)
    for entry in entries:
        if type(entry) in _HANDLERS:
            machine.handle(entry)  # type: ignore[arg-type]
    return machine
