"""The settling pass: what an event moves, in topological order (rules R1, R2, R6, R8, R15).

Split from the machine so that each half fits a reading. Nodes that an event can have moved are queued; they are visited
parents first, each decides again whether it is active, valid, settled and ready, and hands on to its children only what
changed. A commit or a retraction is a change of an artifact like any other: it draws a version, makes a delta and marks
the readers that the delta meets.
"""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING

from revise_lab.records import event as ev
from revise_lab.records.attempt import AttemptState
from revise_lab.records.selector import Delta, How, Path, delta_between, evaluate
from revise_lab.records.value import ABSENT, Value, make, walk
from revise_lab.records.workflow import Graph

from .certify import check
from .plan import Switches
from .provenance import ReaderIndex
from .table import ATTEMPTS, Attempt, NodeRun, Outbox, conflict_of

if TYPE_CHECKING:
    from revise_lab.records.revision import Change, Revision


# bound once: looking a member up on its class costs 0.07 us in Python 3.11, more than the decisions made with it
_RUNNING, _FINISHED, _COMMITTED, _SUPERSEDED, _CANCELLED = (
    AttemptState.RUNNING,
    AttemptState.FINISHED,
    AttemptState.COMMITTED,
    AttemptState.SUPERSEDED,
    AttemptState.CANCELLED,
)


class Settling:
    """The part of the machine that brings its nodes to rest after an event."""

    graph: Graph
    switches: Switches
    values: dict[str, Value]
    index: ReaderIndex
    journal: list[ev.Entry]
    version: int
    state: str
    deferred: list[Revision]
    inputs: dict[str, Value]
    counts: dict[str, int]
    overrides: dict[str, tuple[Change, ...]]
    attempts: dict[str, Attempt]
    outboxes: dict[str, dict[str, Outbox]]
    effects_move: bool
    _out: list[ev.Instruction]

    # --- the graph of a run ----------------------------------------------------------------------------------------

    def _build(self) -> None:
        self.runs: dict[str, NodeRun] = {}
        self.n_active = 0
        self.members: dict[str, dict[str, NodeRun]] = {}
        self._retired: dict[str, int] = {}
        self._ready: dict[str, NodeRun] = {}
        self._asked: dict[str, str] = {}
        """Nodes whose decision is being made again, with the attempt."""
        self._live: dict[str, Attempt] = {}
        self._heap: list[tuple[int, str, str]] = []
        graph = self.graph
        self.unbounded = tuple(name for name in graph.order if graph.nodes[name].unknown & {"edges", "writes"})
        for name in graph.order:
            node = graph.nodes[name]
            if node.membership:
                self.members[name] = {}
            else:
                self._add(NodeRun(name, node, (graph.position[name], "")))

    def _add(self, run: NodeRun) -> None:
        """Wire a node into the run and queue it."""
        for name in run.node.parents:
            group = self.members.get(name)
            if group is None:
                self._link(self.runs[name], run)
                continue
            membership = self.graph.nodes[name].membership
            if membership:
                self._link(self.runs[membership.spawner], run)
            for member in group.values():
                self._link(member, run)
        selector = run.node.activation(run.key)
        if selector is not None:
            run.source = (self.runs[selector.artifact], selector)
        self.runs[run.name] = run
        self.n_active += 1
        self._queue(run)

    @staticmethod
    def _link(parent: NodeRun, child: NodeRun) -> None:
        if parent not in child.parents:
            child.parents.append(parent)
            parent.children.append(child)
            child.n_settled += parent.settled
            child.n_present += parent.active is True
            child.n_undecided += parent.active is None

    def ancestors(self, run: NodeRun) -> list[NodeRun]:
        """Return the ancestors whose outputs can flow into a node, in topological order.

        The walk ends at skipped nodes: what lies behind them need not be settled when the node starts (R2).
        """
        seen: dict[NodeRun, None] = {}
        stack = list(run.parents)
        while stack:
            parent = stack.pop()
            if parent not in seen:
                seen[parent] = None
                if parent.active is not False:
                    stack.extend(parent.parents)
        return sorted(seen, key=lambda each: each.position)

    def _sync_members(self, spawner: NodeRun) -> None:
        """Make the members of a spawner those that its current output names; identity is the key (R6)."""
        for template, group in self.members.items():
            membership = self.graph.nodes[template].membership
            if membership is None or membership.spawner != spawner.name:
                continue
            entries = walk(self.values.get(spawner.name, ABSENT), membership.path)
            wanted = tuple(entries) if isinstance(entries, dict) else ()
            for key in [key for key in group if key not in wanted]:
                self._remove(template, group.pop(key))
            joins = [self.runs[child] for child in self.graph.children[template]]
            for key in wanted:
                if key not in group:
                    member = NodeRun(
                        f"{template}[{key}]", self.graph.nodes[template], (self.graph.position[template], key), key
                    )
                    member.n_attempts = self._retired.pop(member.name, 0)
                    group[key] = member
                    self._add(member)
                    for join in joins:
                        self._link(member, join)
                        self._queue(join)

    def _remove(self, template: str, member: NodeRun) -> None:
        self._deactivate(member)
        for other in member.parents:
            other.children.remove(member)
        for other in member.children:
            other.parents.remove(member)
            other.n_settled -= member.settled
            other.n_present -= member.active is True
            other.n_undecided -= member.active is None
            self._queue(other)
        self._ready.pop(member.name, None)
        self._asked.pop(member.name, None)
        self._retired[member.name] = member.n_attempts
        del self.runs[member.name]

    @property
    def quiet(self) -> bool:
        """Whether nothing runs or could start; what waits then waits for a node that has failed or is blocked."""
        return (
            not self._ready
            and not self._asked
            and all(attempt.state is not _RUNNING for attempt in self._live.values())
        )

    # --- the pass --------------------------------------------------------------------------------------------------

    def _queue(self, run: NodeRun) -> None:
        if not run.queued:
            run.queued = True
            heapq.heappush(self._heap, run.place)

    def _settle(self) -> None:
        heap = self._heap
        while True:
            while heap:
                run = self.runs.get(heapq.heappop(heap)[2])
                if run is not None:
                    run.queued = False
                    self._visit(run)
            if not (self.deferred and self.quiet and self.state == "open" and not self.effects_move):
                return
            revision = self.deferred.pop(0)
            self._apply_deferred(revision)

    def _apply_deferred(self, revision: Revision) -> None:
        raise AssertionError("Revising applies revisions")

    def _weigh_effects(self, run: NodeRun, d_settled: int) -> None:
        raise AssertionError("Effecting weighs effects")

    def _reconsiders(self, run: NodeRun, current: Attempt) -> bool:
        raise AssertionError("Machine asks for decisions")

    def _confirmed(self, run: NodeRun) -> bool:
        raise AssertionError("Effecting knows what is confirmed")

    def _visit(self, run: NodeRun) -> None:
        """Decide again what one node is; its parents have been visited."""
        before = run.current
        active = self._activity(run) if run.parents else True
        if active is False:
            if run.active is not False:
                self._deactivate(run)
        elif run.active is False:
            self.n_active += 1
        above = run.n_settled == len(run.parents) and (not run.node.confirmations or self._confirmed(run))
        if run.attempt is not None:
            self._advance(run, run.attempt, above, active)
        current = run.current
        valid = current is not None and current.dropped is None and not current.mismatched
        if active is False:
            settled = self._surely_inactive(run)
        else:
            settled = bool(active and valid and above and not run.conflict and not (current and current.failed))
        ready = bool(active and above and not valid and run.attempt is None and self.state in ("open", "closing"))
        if ready and current is not None and self.switches.control == "condition" and self._reconsiders(run, current):
            ready = False
        if ready is not run.ready:
            run.ready = ready
            if ready:
                self._ready[run.name] = run
            else:
                self._ready.pop(run.name, None)
        if active is not run.active or settled is not run.settled or current is not before:
            self._turn(run, active, settled)

    def _turn(self, run: NodeRun, active: bool | None, settled: bool) -> None:
        """Set what children count of a node, and queue them."""
        d_settled = settled - run.settled
        d_present = (active is True) - (run.active is True)
        d_undecided = (active is None) - (run.active is None)
        moved = active is not run.active
        run.active, run.settled = active, settled
        if self.outboxes or (run.current is not None and run.current.effects):
            self._weigh_effects(run, d_settled)
        for child in run.children:
            child.n_settled += d_settled
            child.n_present += d_present
            child.n_undecided += d_undecided
            if (
                moved
                or child.n_settled == len(child.parents)
                or child.current
                or child.attempt
                or child.source
                or child.ready
                or not child.active
            ):  # else it waits for another parent, and nothing that it is can have changed
                self._queue(child)

    def _activity(self, run: NodeRun) -> bool | None:
        """Say whether a node belongs to the workflow as it stands; ``None`` while that is undecided."""
        verdict: bool | None = True
        if run.source is not None:
            source, selector = run.source
            output = self.values.get(source.name, ABSENT)
            undecided = None if source.active is not False else False
            verdict = undecided if output is ABSENT else bool(evaluate(selector, output))
        if verdict is False or not run.parents:
            return verdict
        n_present, n_undecided = run.n_present, run.n_undecided
        present: bool | None
        if run.node.needs == "all":
            present = False if n_present + n_undecided < len(run.parents) else None if n_undecided else True
        else:
            present = True if n_present else None if n_undecided else False
        return present if verdict else None if present is not False else False

    def _surely_inactive(self, run: NodeRun) -> bool:
        """Say whether what makes a node inactive is itself settled (R1)."""
        if run.source is not None:
            source, selector = run.source
            if not evaluate(selector, self.values.get(source.name, ABSENT)):
                return source.settled
        absent = [parent.settled for parent in run.parents if parent.active is False]
        return any(absent) if run.node.needs == "all" else bool(absent) and all(absent)

    def _advance(self, run: NodeRun, attempt: Attempt, above: bool, active: bool | None) -> None:
        """Move an attempt on: stop it, reject it, commit it, or let it go on."""
        if run.current and run.current.valid:
            self._stop(run, "an earlier output holds again")
        elif not attempt.valid:
            if attempt.state is _FINISHED:
                self._reject(run, attempt, conflict_of(attempt))
            elif self.switches.check == "digest":
                self._stop(run, str(conflict_of(attempt)))
        elif attempt.state is _FINISHED and above and active:
            why = check(attempt, self.values, self.switches.check)
            if why is not None:
                self._reject(run, attempt, why)
            elif attempt.outcome is not None and attempt.outcome.error is not None:
                self._fail(run, attempt)
            else:
                self._commit(run, attempt)

    @staticmethod
    def _move(attempt: Attempt, what: str, to: AttemptState) -> None:
        assert to in ATTEMPTS[attempt.state, what], (attempt.id, attempt.state, what, to)
        attempt.state = to

    # --- moves -----------------------------------------------------------------------------------------------------

    def _commit(self, run: NodeRun, attempt: Attempt) -> None:
        assert attempt.outcome is not None
        old = self.values.get(run.name, ABSENT)
        self.version += 1
        self._move(attempt, "commit", _COMMITTED)
        attempt.v_commit = self.version
        output = self._effective(run, attempt.outcome.output)
        delta = delta_between(run.name, self.version, old, output)
        self.journal.append(make(ev.Committed, (attempt.id, self.version, delta)))
        run.attempt = None
        run.failures = 0
        self._live.pop(attempt.id, None)
        self._replace(run, attempt)
        self._publish(run, output, delta)
        if self.switches.check != "digest":
            for child in run.children:
                if child.current:
                    self._drop(child.current, ev.Evidence("", via=run.name))

    def _fail(self, run: NodeRun, attempt: Attempt) -> None:
        """Take an exception as an outcome with a certificate (R15): retried, or the node's last word."""
        outcome = attempt.outcome
        assert outcome is not None
        assert outcome.error is not None
        run.attempt = None
        self._live.pop(attempt.id, None)
        final = not (outcome.retryable and run.failures < run.node.retries)
        self.journal.append(ev.Failed(attempt.id, outcome.error, final))
        self._move(attempt, "conclude", AttemptState.FAILED)
        if not final:
            run.failures += 1
            self.attempts.pop(attempt.id)
            self._forget(attempt)
            self._queue(run)
            return
        had_output = self.values.get(run.name, ABSENT) is not ABSENT
        self._replace(run, attempt)
        if had_output:
            self.version += 1
            self._publish(run, ABSENT, Delta(run.name, self.version, (((), How.GONE),), ()))
        if run.name in self.outboxes:
            self._weigh_effects(run, 0)
        for child in run.children:
            self._queue(child)

    def _replace(self, run: NodeRun, attempt: Attempt | None) -> None:
        if run.current:
            self._move(run.current, "replace", _SUPERSEDED)
            self._forget(run.current)
            self.attempts.pop(run.current.id, None)
        run.current = attempt

    def _publish(self, run: NodeRun, output: Value, delta: Delta) -> None:
        """Make an output current: mark its readers and bring the members in line."""
        self.values[run.name] = output
        self.counts[run.name] = self.counts.get(run.name, 0) + 1
        if delta:
            for hit in self.index.touch(delta):
                for reader, at in list(hit.cell.readers.items()):
                    self._mark(reader, at, hit.place)
        if self.members:
            self._sync_members(run)

    def _mark(self, attempt: Attempt, at: int, place: Path) -> None:
        raise AssertionError("Revising marks readers")

    def _effective(self, run: NodeRun, output: Value) -> Value:
        raise AssertionError("Revising knows the overrides")

    def _deactivate(self, run: NodeRun) -> None:
        """Retract a node that is no longer activated (R6)."""
        if run.active is not False:
            self.n_active -= 1
        self._turn(run, False, run.settled)
        if run.attempt:
            self._stop(run, "it is no longer activated")
        had_output = run.current is not None
        self._replace(run, None)
        run.failures = run.refusals = 0
        run.conflict = None
        if had_output:
            self.version += 1
            self.journal.append(ev.Retracted(run.name, self.version))
            self._publish(run, ABSENT, Delta(run.name, self.version, (((), How.GONE),), ()))

    def _reject(self, run: NodeRun, attempt: Attempt, why: ev.Evidence) -> None:
        self._move(attempt, "reject", AttemptState.REJECTED)
        self.attempts.pop(attempt.id)
        self.journal.append(ev.Rejected(attempt.id, why))
        self._retire(run, attempt)

    def _stop(self, run: NodeRun, reason: str) -> None:
        attempt = run.attempt
        assert attempt is not None
        running = attempt.state is _RUNNING
        orphaned = running and run.node.is_sync
        self._move(attempt, "stop", AttemptState.ORPHANED if orphaned else _CANCELLED)
        order = ev.Stop(attempt.id, reason, orphaned)
        self.journal.append(order)
        if running:
            self._out.append(order)
        else:
            self.attempts.pop(attempt.id)
        self._retire(run, attempt)

    def _retire(self, run: NodeRun, attempt: Attempt) -> None:
        run.attempt = None
        attempt.snapshot = None
        self._live.pop(attempt.id, None)
        self._forget(attempt)
        self._queue(run)

    def _drop(self, attempt: Attempt, why: ev.Evidence) -> None:
        """Invalidate a committed attempt for good; its output stays the artifact's value until it is replaced."""
        if attempt.dropped is None:
            attempt.dropped = why
            self._forget(attempt)

    @staticmethod
    def _forget(attempt: Attempt) -> None:
        for cell in attempt.cells:
            cell.readers.pop(attempt, None)

    def _say(self, fact: ev.Accepted | ev.Deferred | ev.Refused | ev.Duplicate | ev.Discarded | ev.Closed) -> None:
        self.journal.append(fact)
        if not isinstance(fact, ev.Discarded):
            self._out.append(fact)
