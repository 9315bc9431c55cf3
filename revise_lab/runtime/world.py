"""A scenario on the machine, move by move.

:class:`World` drives the real machine and the real bodies like any driver, except that somebody else says what happens
next. :meth:`World.key` is what tells two states apart that can go on differently.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Hashable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Final

from revise_lab.audit.scenario import Scenario, Step, parse_read
from revise_lab.audit.truth import look
from revise_lab.core.body import Execution
from revise_lab.core.machine import Machine, replay
from revise_lab.core.plan import Policy
from revise_lab.core.table import Attempt
from revise_lab.errors import ReviseLabError
from revise_lab.records import event as ev
from revise_lab.records.attempt import AttemptState
from revise_lab.records.effect import Effect, Reversibility
from revise_lab.records.selector import Marker, Selector
from revise_lab.records.value import ABSENT, Value
from revise_lab.records.workflow import Graph, Workflow

from .outside import Outside

_MARKERS: Final = {"": Marker.VALUE, "members": Marker.MEMBERS, "len": Marker.MEMBERS, "kind": Marker.KIND}
_FACTS: Final[Mapping[type, str]] = {
    ev.Started: "start", ev.Committed: "commit", ev.Rejected: "reject", ev.Stop: "stop", ev.Discarded: "discard",
    ev.Moved: "move", ev.Failed: "fail", ev.Retracted: "retract", ev.Accepted: "accept", ev.Refused: "refuse",
    ev.Duplicate: "duplicate",
}  # fmt: skip
_OUTSIDE: Final = frozenset({"land", "unland", "find", "answer", "lose", "refused", "stuck", "silent", "vanish"})


# --- a scenario as a workflow ----------------------------------------------------------------------------------------


class _Pause:
    """Hands the next read of a body to the explorer, with the number of those before it."""

    def __init__(self, text: str, n_seen: int) -> None:
        self.at = text, n_seen

    def __await__(self) -> Generator[tuple[str, int], None, None]:
        yield self.at


def _end(step: Step, seen: list[Value], ctx: Any) -> Any:
    for slot, payload, kind, *consent in step.effects(*seen) if step.effects else ():
        ctx.stage(Effect(slot, payload, Reversibility(kind), consent=bool(consent)))
    return step.out(*seen)


def _body(step: Step) -> Callable[..., Any]:
    async def one_by_one(state: Any, ctx: Any) -> Any:
        seen: list[Value] = []
        while (text := step.next_read(seen)) is not None:
            await _Pause(text, len(seen))
            seen.append(look(state, text, ctx.key))
        await _Pause("", len(seen))
        return _end(step, seen, ctx)

    def at_once(state: Any, ctx: Any) -> Any:
        seen: list[Value] = []
        while (text := step.next_read(seen)) is not None:
            seen.append(look(state, text, ctx.key))
        return _end(step, seen, ctx)

    return at_once if step.sync else one_by_one


def _decision(step: Step) -> Callable[..., Any]:
    assert step.branch is not None
    texts, lane = step.branch
    return lambda state, out: lane(out, *(look(state, text) for text in texts))


@cache
def workflow_of(scenario: Scenario) -> Graph:
    """Return a scenario's workflow."""
    flow = Workflow(scenario.name)
    for step in scenario.steps:
        options: dict[str, Any] = {"name": step.name, "after": step.after}
        if step.member_of:
            flow.member(of=step.member_of[0], items=step.member_of[1], **options)(_body(step))
            continue
        options |= {"when": step.when, "needs": step.needs, "unknown": step.unknown, "retries": step.retries}
        flow.node(**options)(_body(step))
        if step.branch:
            flow.branch(of=step.name)(_decision(step))
    return flow.graph()


# --- one run, move by move ---------------------------------------------------------------------------------------------


@dataclass
class _Running:
    execution: Execution
    steps: Any
    node: str
    step: Step
    next: str | None = None
    """The next read; empty when the end is next."""
    n_seen: int = 0
    ended: ev.Finish | ev.Fail | None = None
    stepping: bool = False
    doomed: bool = False


class World:
    """One run of a scenario on the machine, driven by moves.

    Parameters
    ----------
    scenario : Scenario
        What may happen.
    how : Policy
        The policy with its switches.
    history : iterable of str
        Moves to make.
    """

    def __init__(self, scenario: Scenario, how: Policy, history: Iterable[str] = ()) -> None:
        how = how._replace(switches=replace(how.switches, **scenario.switches))
        self.scenario, self.how = scenario, how
        self.graph = workflow_of(scenario)
        self.machine = Machine(self.graph, scenario.inputs, how)
        self.accepted: tuple[str, ...] = ()
        self._steps = {step.name: step for step in scenario.steps}
        self._running: dict[str, _Running] = {}
        self._undead: list[_Running] = []
        self._arrivals = scenario.arrivals()
        self._firsts = frozenset(first for first, _ in scenario.holds)
        self._done: set[str] = set()
        self.outside = Outside(scenario.faults)
        self.crashes = list(scenario.crashes)
        for move in history:
            self.do(move)

    def moves(self) -> list[str]:
        """Return the moves that can be made now, in the language of histories."""
        machine, running = self.machine, self._running.values()
        is_open = machine.state in ("open", "closing")
        free = self.scenario.n_slots is None or len(self._running) < self.scenario.n_slots
        found = [f"start {name}" for name in machine.ready()] if free and is_open else []
        found += [f"read {each.node} {each.next}" if each.next else f"finish {each.node}" for each in running]
        found += list(self._arrivals)[: None if self.scenario.any_order else 1]
        found += dict.fromkeys(f"late {undead.node}" for undead in self._undead)
        if self.scenario.has_effects:
            found += self._effect_moves()
        if self.crashes and machine.state in ("open", "closing"):
            found.append(self.crashes[0])
        if self.scenario.cancel and is_open:
            found.append("cancel")
        if machine.closable and (self.scenario.early_close or not self._arrivals):
            found.append("close")
        held = {then for first, then in self.scenario.holds if first not in self._done}
        return [move for move in found if move not in held]

    def _effect_moves(self) -> list[str]:
        machine = self.machine
        found = [f"send {node}/{slot}" for node, slot in machine.sendable()]
        found += (f"compensate {node}/{slot}" for node, slot in machine.undoable())
        for node, slot in self._unapproved():
            found.append(f"approve {node}/{slot}")
            found += (f"denied {node}/{slot}" for _ in "1" if self.outside.fault(f"{node}/{slot}", "denied"))
        return found + self.outside.moves()

    def _unapproved(self) -> list[tuple[str, str]]:
        if self.machine.state not in ("open", "closing"):
            return []
        boxes = (box for boxes in self.machine.outboxes.values() for box in boxes.values())
        return [(box.node, box.slot) for box in boxes if box.waiting and self.machine.is_asked(box.waiting)]

    def _crash(self, how: str) -> int:
        """Lose the process, and with the power what was not yet durable; return the length of the journal that is left."""
        journal = self.machine.journal
        self.crashes.pop(0)
        if how == "power":
            last = max((i for i, entry in enumerate(journal) if ev.is_durable(entry)), default=0)
            journal = journal[: last + 1]
        machine = replay(self.graph, journal, self.how)
        if how == "kill" and machine.fingerprint() != self.machine.fingerprint():
            raise ReviseLabError("the journal does not lead to the state that it was written in - an event is missing")
        for running in self._running.values():
            running.steps.close()
        self._running.clear()
        self._undead.clear()
        self.outside.crash()
        self.machine = machine
        return len(machine.journal)

    def do(self, move: str) -> list[ev.Entry]:
        """Make a move and return what it adds to the journal."""
        before = len(self.machine.journal)
        what, _, rest = move.partition(" ")
        node = rest.partition(" ")[0]
        if what in _OUTSIDE:
            answer = self.outside.do(move)
            if answer is not None:
                self._send(answer)
        elif what in ("kill", "power"):
            before = self._crash(what)
            self._send(ev.Recover())
        elif what in ("approve", "denied"):
            if what == "denied":
                self.outside.spend(rest, what)
            node, _, slot = rest.rpartition("/")
            waiting = self.machine.outboxes[node][slot].waiting
            assert waiting is not None
            self._send(ev.Authorise(node, slot, waiting.effect.payload, what == "approve"))
        elif what in ("send", "compensate"):
            node, _, slot = rest.rpartition("/")
            self._send(ev.Dispatch(node, slot) if what == "send" else ev.Compensate(node, slot))
        elif what == "start":
            self._send(ev.Start(node))
        elif what in ("read", "finish"):
            self._resume(next(each for each in self._running.values() if each.node == node))
        elif what == "rev":
            arrived = self._arrivals.pop(move)
            self._send(ev.Revise(*arrived) if len(arrived) == 1 else ev.ReviseTogether(arrived))
        elif what == "late":
            self._late(node)
        else:
            self._send(ev.Cancel() if what == "cancel" else ev.Close())
        if move in self._firsts:
            self._done.add(move)
        added = self.machine.journal[before:]
        self.accepted += tuple(entry.revision for entry in added if isinstance(entry, ev.Accepted))
        return added

    def _send(self, event: ev.Event) -> None:
        for order in self.machine.handle(event):
            if isinstance(order, ev.Execute):
                self._execute(order)
            elif isinstance(order, ev.Moved):
                self._running[order.attempt].execution.move(self.machine.snapshot_of(order.attempt))
            elif isinstance(order, ev.Reconsider):
                self._send(Execution(self.graph, order.order, _no_calls).reconsidered(order.output))
            elif isinstance(order, ev.Act):
                self.outside.take(order)
            elif isinstance(order, ev.Stop):
                running = self._running.get(order.attempt)
                if running is not None and running.stepping:
                    running.doomed = True
                elif running is not None:
                    self._stopped(running)

    def _execute(self, order: ev.Execute) -> None:
        execution = Execution(self.graph, order, _no_calls, None, self._before_read)
        step = self._steps[order.node.partition("[")[0]]
        running = self._running[order.attempt] = _Running(execution, execution.run(), order.node, step)
        self._resume(running)

    def _before_read(self, execution: Execution, artifact: str) -> None:
        """Ask for a newer snapshot before a late read, as every driver does (rule R4)."""
        if self.machine.is_late(execution.order.attempt, artifact):
            if report := execution.flush():
                self._send(report)
            self._send(ev.Extend(execution.order.attempt))

    def _resume(self, running: _Running) -> None:
        if running.ended is None:
            running.stepping = True
            try:
                running.next, running.n_seen = running.steps.send(None)
            except StopIteration as end:
                running.ended = end.value
            running.stepping = False
            if running.doomed:
                return self._stopped(running)
            if running.ended is None:
                if not running.step.silent and (report := running.execution.flush()):
                    self._send(report)
                return None
            if running.step.sync and running.next is None:
                running.next = ""
                return None
        if self._running.pop(running.execution.order.attempt, None):
            self._send(running.ended)
        return None

    def _stopped(self, running: _Running) -> None:
        attempt = running.execution.order.attempt
        del self._running[attempt]
        if running.step.deaf or running.step.sync:
            self._undead.append(running)
        else:
            running.steps.close()
            self._send(ev.Stopped(attempt))

    def _late(self, node: str) -> None:
        undead = next(each for each in self._undead if each.node == node)
        self._undead.remove(undead)
        while undead.ended is None:
            try:
                undead.steps.send(None)
            except StopIteration as end:
                undead.ended = end.value
        self._send(undead.ended)

    # --- states ----------------------------------------------------------------------------------------------------

    def key(self) -> Hashable:
        """Return what decides everything that can still happen, without ids, versions and counters."""
        machine = self.machine
        order = machine.switches.order
        ranks = order != "topological" and sorted(
            (getattr(live, f"v_{order}"), run.name)
            for run in machine.runs.values()
            if (live := run.attempt or run.current)
        )
        return (
            machine.state,
            tuple(machine.inputs.values()),
            self.accepted,
            tuple(self._arrivals),
            tuple(each.id for each in machine.deferred),
            tuple(machine.counts[name] for name in machine.inputs),
            frozenset(self._done),
            tuple(sorted(undead.node for undead in self._undead)),
            ranks and tuple(name for _, name in ranks),
            tuple(
                (
                    name, run.active, run.settled, run.ready, run.failures, run.conflict is None,
                    machine.values.get(name, ABSENT), self._attempt_key(run.current), self._attempt_key(run.attempt),
                )
                for name, run in sorted(machine.runs.items())
            ),
            self.scenario.has_effects and self._effects_key(),
            tuple(self.crashes),
        )  # fmt: skip

    def _effects_key(self) -> Hashable:
        machine = self.machine
        boxes = [box for boxes in machine.outboxes.values() for box in boxes.values()]
        orders = sorted(box.live.order for box in boxes if box.live)
        rows = []
        for box in boxes:
            live, waiting = box.live, box.waiting
            run = machine.runs.get(box.node)
            current = run and run.current and run.current.id
            rows.append((
                box.node, box.slot, box.epoch,
                live and (live.state, live.effect.payload, live.unwanted, live.undo_sent, live.landed,
                          live.attempt == current, orders.index(live.order)),
                waiting and (waiting.state, waiting.effect.payload, waiting.approved, waiting.attempt == current),
                machine.values.get(f"{box.node}/{box.slot}"),
            ))  # fmt: skip
        return tuple(sorted(rows, key=lambda row: row[:2])), self.outside.key()

    def _attempt_key(self, attempt: Attempt | None) -> Hashable:
        if attempt is None:
            return None
        start = attempt.v_start
        reads = tuple(
            (read, read.selector in attempt.mismatched, cell.version > start)
            for read, cell in zip(attempt.reads, attempt.cells, strict=True)
        )
        parents = tuple(consumed == (run.current and run.current.id) for run, consumed in attempt.parents)
        ahead: Hashable = attempt.outcome
        if attempt.state is AttemptState.RUNNING:
            running = self._running[attempt.id]
            seen = tuple(running.execution.recorder.reads.items())
            said = {read.selector for read in attempt.reads}
            unsaid = (self.machine.index.cell(each).version > start for each, _ in seen if each not in said)
            ahead = (running.next, running.ended, seen, tuple(unsaid), self._ahead(attempt, running))
        return (attempt.state, reads, attempt.dropped is None, attempt.coverage, parents, ahead)

    def _ahead(self, attempt: Attempt, running: _Running) -> Hashable:
        """Return what an attempt would see at its next reads, and which of these places have changed since its start."""
        snapshot = attempt.snapshot
        assert snapshot is not None
        values = {**snapshot.inputs, **snapshot.parents}
        if running.step.unknown:
            return tuple(values.values())
        moving = self.machine.switches.extension == "on"
        found: list[Hashable] = []
        for text in running.step.left((None,) * running.n_seen):
            for selector in _selectors(text, snapshot.key or "", values):
                name = selector.artifact
                touched = self.machine.index.cell(selector).version > attempt.v_start
                late = moving and self.machine.is_late(attempt.id, name)
                found.append((name, _shown(values[name], selector.path), touched, late))
        return tuple(found)


def _selectors(text: str, key: str, artifacts: Iterable[str]) -> list[Selector]:
    """Return the places that a read looks at; one that names a template looks at each of its members."""
    artifact, path, what = parse_read(text)
    path = tuple(key if each == "*" else each for each in path)
    marker = _MARKERS.get(what, Marker.VALUE)
    if what.startswith("has:"):
        path, marker = (*path, what[4:]), Marker.HAS
    members = [name for name in artifacts if name.startswith(f"{artifact}[")]
    return [Selector(name, path[1:], marker) for name in members] or [Selector(artifact, path, marker)]


def _shown(value: Value, path: Iterable[Any]) -> Value:
    for key in path:
        try:
            value = value[key]
        except (KeyError, IndexError, TypeError):
            return ABSENT
    return value


async def _no_calls(ask: Any) -> Value:
    raise ReviseLabError(f"a scenario asked for {ask.kind} - its steps only read")


def events_of(move: str, added: Iterable[ev.Entry]) -> tuple[str, ...]:
    """Return the events of a move: the move itself and what was decided, by node or revision."""
    events = [] if move.startswith("start ") else [move]
    for entry in added:
        if isinstance(entry, ev.Effected):
            events.append(f"{entry.state} {entry.intent.node}/{entry.intent.slot}")
        word = _FACTS.get(type(entry))
        if word is None:
            continue
        if isinstance(entry, ev.Failed) and not entry.final:
            word = "retry"
        who = getattr(entry, "node", "") or getattr(entry, "revision", "") or entry.attempt.rpartition("@")[0]  # type: ignore[union-attr]
        events.append(f"{word} {who}")
    return tuple(events)
