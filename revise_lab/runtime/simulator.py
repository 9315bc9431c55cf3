"""Virtual time: the same machine and the same bodies, driven by a heap of events instead of a clock.

Every boundary call takes as long as ``duration_s`` says; a body that makes none takes that long at its end. Equal times
are served in the order in which they were scheduled, so a run is a function of its arguments.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Coroutine, Generator, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from revise_lab.core.body import Ask, Execution, Loss
from revise_lab.core.history import one_line
from revise_lab.core.machine import Machine, replay
from revise_lab.core.oracle import Truth, choices, differences, drive, oracle, receipts_of
from revise_lab.core.plan import Policy, RecoveryPlan
from revise_lab.errors import ReviseLabError
from revise_lab.policies import policy as policy_named
from revise_lab.records import event as ev
from revise_lab.records.effect import Intent, confirmation
from revise_lab.records.revision import Revision
from revise_lab.records.value import Value, equal
from revise_lab.records.workflow import Graph, Workflow
from revise_lab.serving.text import hash_text

from .outside import Ledger

Duration = Callable[[Ask], float]
Answer = Callable[[Ask], Value]


class CallSpan(NamedTuple):
    """A boundary call as it happened: counted where it ran."""

    node: str
    attempt: str
    kind: str
    start_s: float
    end_s: float
    outcome: str
    """``completed``, or ``aborted`` where its attempt was told to stop."""


@dataclass
class SimulatedRun:
    """What happened in virtual time."""

    machine: Machine
    calls: list[CallSpan] = field(default_factory=list)
    accepted_s: list[float] = field(default_factory=list)
    end_s: float = 0.0
    ledger: Ledger = field(default_factory=Ledger)
    """What is out in the world."""
    effect_log: list[tuple[float, str, Intent]] = field(default_factory=list)
    """What was published, undone and asked for there: time, what, intent."""

    @property
    def plans(self) -> list[RecoveryPlan]:
        """The recovery plans, in order."""
        entries = self.machine.journal
        return [RecoveryPlan(each, self.machine.graph) for each in entries if isinstance(each, ev.Planned)]

    @property
    def outputs(self) -> dict[str, Value]:
        """The committed outputs."""
        return self.machine.outputs()

    @property
    def history(self) -> str:
        """The run on one line."""
        return one_line(self.machine.journal)

    def executed(self, since_s: float = 0.0) -> tuple[str, ...]:
        """Return the nodes whose calls started at or after a time, in order: what really ran again."""
        return tuple(call.node for call in self.calls if call.start_s >= since_s)

    def work_s(self, since_s: float) -> float:
        """Return the model-wall seconds spent after a time, by any call."""
        return sum(max(0.0, call.end_s - max(call.start_s, since_s)) for call in self.calls)


class _Await:
    """Hands a boundary call to the simulator."""

    def __init__(self, ask: Ask) -> None:
        self.ask = ask

    def __await__(self) -> Generator[Ask, Value, Value]:
        answer: Value = yield self.ask
        return answer


async def _perform(ask: Ask) -> Value:
    return await _Await(ask)


def answer_by_hash(ask: Ask) -> Value:
    """Answer a boundary call by a hash of what was asked, so that a stale prompt shows as a wrong output."""
    if ask.kind == "model":
        return hash_text(ask.request["prompt"], ask.request["seed"], ask.request["max_tokens"])
    if ask.local is not None:
        return ask.local()
    raise ReviseLabError(f"node {ask.node!r} asks for {ask.kind} and nothing answers it - pass answer=")


@dataclass
class _Running:
    execution: Execution
    steps: Coroutine[Any, Any, ev.Finish | ev.Fail]
    span: tuple[str, float] | None = None
    n_calls: int = 0
    stepping: bool = False
    doomed: bool = False
    """Told to stop while its own body was executing."""


class _Unheard(NamedTuple):
    """A call to a target whose sender has died."""

    act: ev.Act


class _Crash(NamedTuple):
    """The process dies."""


class Simulator:
    """Drives one run in virtual time.

    Parameters
    ----------
    workflow : Workflow or Graph
        What to run.
    inputs : mapping
        Its inputs.
    policy : Policy
        How to recover.
    revisions : iterable of (float, Revision)
        Arrival in seconds and revision.
    duration_s : callable
        Seconds that a boundary call takes (kind ``body`` for a body that made none).
    answer : callable
        Answers boundary calls.
    n_slots : int, optional
        Attempts that may run at once; unlimited by default.
    loss : callable, optional
        See :class:`revise_lab.core.body.Execution`.
    effect_s : float
        Seconds that a target takes to write an effect, or to undo it.
    crashes : iterable of float
        When the process dies; it goes on from its journal at once.
    """

    def __init__(
        self,
        workflow: Workflow | Graph,
        inputs: Mapping[str, Any],
        policy: Policy,
        *,
        revisions: Iterable[tuple[float, Revision]] = (),
        duration_s: Duration = lambda ask: 1.0,
        answer: Answer = answer_by_hash,
        n_slots: int | None = None,
        loss: Loss | None = None,
        effect_s: float = 0.5,
        crashes: Iterable[float] = (),
        validate: bool = False,
    ) -> None:
        self.graph = workflow.graph() if isinstance(workflow, Workflow) else workflow
        self.machine = Machine(self.graph, inputs, policy, validate=validate)
        self.run_ = SimulatedRun(self.machine)
        self._duration_s, self._answer, self._loss = duration_s, answer, loss
        self._n_slots, self._effect_s = n_slots, effect_s
        self._now_s = 0.0
        self._heap: list[tuple[float, int, Any]] = []
        self._order = 0
        self._running: dict[str, _Running] = {}
        self._busy = 0
        self._arrivals = 0
        for at_s, revision in revisions:
            self._arrivals += 1
            self._at(at_s, revision)
        for at_s in crashes:
            self._at(at_s, _Crash())

    def run(self) -> SimulatedRun:
        """Run to the seal, or to a failure that no coming revision can mend.

        Raises
        ------
        ReviseLabError
            The run came to a halt; the message holds its history.
        """
        self._start_ready()
        while not self._sealed() and self._heap:
            self._now_s, _, item = heapq.heappop(self._heap)
            self._step(item)
        self.run_.end_s = self._now_s
        if self.machine.status == "open":
            raise ReviseLabError(f"run came to a halt: {one_line(self.machine.journal)}")
        return self.run_

    def _sealed(self) -> bool:
        """Seal the run where nothing is left to do and no revision is to come."""
        if self.machine.closable and not self._arrivals:
            self._send(ev.Close())
            self._start_ready()
        return self.machine.state == "closed"

    def _at(self, at_s: float, item: Any) -> None:
        self._order += 1
        heapq.heappush(self._heap, (at_s, self._order, item))

    def _step(self, item: Any) -> None:
        if isinstance(item, Revision):
            self._arrivals -= 1
            self._flush()
            accepted = len(self.machine.revisions)
            self._send(ev.Revise(item))
            if len(self.machine.revisions) > accepted:
                self.run_.accepted_s.append(self._now_s)
        elif isinstance(item, ev.Finish | ev.Fail):
            self._ended(item)
        elif isinstance(item, ev.Answered):
            self._send(item)
        elif isinstance(item, ev.Act):
            self._perform(item, heard=True)
        elif isinstance(item, _Unheard):
            self._perform(item.act, heard=False)
        elif isinstance(item, _Crash):
            self._crash()
        else:
            attempt, answer = item
            running = self._running.get(attempt)
            if running is not None:
                self._close_span(attempt, running, "completed")
                self._resume(attempt, running, answer)
        self._start_ready()

    def _send(self, event: ev.Event) -> None:
        for instruction in self.machine.handle(event):
            if isinstance(instruction, ev.Execute):
                self._execute(instruction)
            elif isinstance(instruction, ev.Moved):
                self._running[instruction.attempt].execution.move(self.machine.snapshot_of(instruction.attempt))
            elif isinstance(instruction, ev.Stop):
                self._stop(instruction)
            elif isinstance(instruction, ev.Reconsider):
                again = Execution(self.graph, instruction.order, _perform)
                self._send(again.reconsidered(instruction.output))
            elif isinstance(instruction, ev.Act):
                self._at(self._now_s + self._effect_s / 2, instruction)

    def _perform(self, act: ev.Act, *, heard: bool) -> None:
        """Have the world do what the run asks of it; the answer takes its time, if anybody waits for it."""
        self.run_.effect_log.append((self._now_s, act.what, act.intent))
        answer = self.run_.ledger.perform(act.what, act.intent, act.effect)
        if heard:
            self._at(self._now_s + self._effect_s / 2, answer)

    def _crash(self) -> None:
        """Lose the process: bodies and answers are gone, calls that have left still arrive."""
        for running in self._running.values():
            running.steps.close()
        self._running.clear()
        self._busy = 0
        kept: list[tuple[float, int, Any]] = []
        for at_s, order, item in self._heap:
            if isinstance(item, ev.Act):
                kept.append((at_s, order, _Unheard(item)))
            elif isinstance(item, Revision | _Unheard | _Crash):
                kept.append((at_s, order, item))
        heapq.heapify(kept)
        self._heap = kept
        self.machine = self.run_.machine = replay(self.graph, self.machine.journal, self.machine.policy)
        self._send(ev.Recover())

    def _start_ready(self) -> None:
        for node, slot in self.machine.undoable():
            self._send(ev.Compensate(node, slot))
        for node, slot in self.machine.sendable():
            self._send(ev.Dispatch(node, slot))
        for name in self.machine.ready():
            if self._n_slots is not None and self._busy >= self._n_slots:
                return
            if name in self.machine.runs and self.machine.runs[name].ready:
                self._send(ev.Start(name))

    def _execute(self, order: ev.Execute) -> None:
        execution = Execution(self.graph, order, _perform, self._loss, self._before_read)
        running = self._running[order.attempt] = _Running(execution, execution.run())
        self._busy += 1
        self._resume(order.attempt, running, None)

    def _before_read(self, execution: Execution, artifact: str) -> None:
        """Report what has been read and ask for a newer snapshot, when the next read would be of an old one (R4)."""
        attempt = execution.order.attempt
        if self.machine.is_late(attempt, artifact):
            report = execution.flush()
            if report is not None:
                self._send(report)
            self._send(ev.Extend(attempt))

    def _resume(self, attempt: str, running: _Running, answer: Value) -> None:
        """Let a body go on to its next boundary call or to its end."""
        running.stepping = True
        try:
            ask: Ask = running.steps.send(answer)
        except StopIteration as end:
            running.stepping = False
            event: ev.Finish | ev.Fail = end.value
            spent_s = 0.0
            if not running.n_calls:
                spent_s = self._duration_s(Ask(running.execution.order.node, attempt, "", "body", None, 0))
            if spent_s or running.execution.node.is_sync:
                self._send(ev.Observe(attempt, event.reads, event.coverage))
                self._at(self._now_s + spent_s, event._replace(reads=()))
            else:
                self._ended(event)
            return
        running.stepping = False
        if running.doomed:
            self._end_stopped(attempt, running)
            return
        if ask.kind == "pause":
            self._at(self._now_s + float(ask.request), (attempt, None))
            return
        running.n_calls += 1
        running.span = (ask.kind, self._now_s)
        self._call(ask)

    def _call(self, ask: Ask) -> None:
        """Pass a boundary call on; here it takes what ``duration_s`` says."""
        self._at(self._now_s + self._duration_s(ask), (ask.attempt, self._answer(ask)))

    def _ended(self, event: ev.Finish | ev.Fail) -> None:
        running = self._running.pop(event.attempt, None)
        if running is not None:
            self._busy -= 1
        elif event.attempt not in self.machine.attempts:
            return
        self._send(event)

    def _stop(self, order: ev.Stop) -> None:
        running = self._running.get(order.attempt)
        if running is None:
            return
        self._close_span(order.attempt, running, "aborted")
        if order.orphaned:
            return
        if running.stepping:
            running.doomed = True
        else:
            self._end_stopped(order.attempt, running)

    def _end_stopped(self, attempt: str, running: _Running) -> None:
        del self._running[attempt]
        self._busy -= 1
        running.steps.close()
        self._send(ev.Stopped(attempt))

    def _close_span(self, attempt: str, running: _Running, outcome: str) -> None:
        if running.span is not None:
            kind, start_s = running.span
            running.span = None
            node = running.execution.order.node
            self.run_.calls.append(CallSpan(node, attempt, kind, start_s, self._now_s, outcome))

    def _flush(self) -> None:
        """Report what the running bodies have read, so that the machine decides on all there is to know."""
        for running in list(self._running.values()):
            report = running.execution.flush()
            if report is not None:
                self._send(report)


def simulate(
    workflow: Workflow | Graph, inputs: Mapping[str, Any], policy: str | Policy = "revise", **options: Any
) -> SimulatedRun:
    """Run a workflow in virtual time; options are those of :class:`Simulator`."""
    return Simulator(workflow, inputs, policy_named(policy) if isinstance(policy, str) else policy, **options).run()


def _astray(run: SimulatedRun) -> list[str]:
    """Return where the world differs from what a sealed run believes to be out there."""
    if run.machine.state != "closed":
        return []
    slots = run.machine.live_effects().items()
    out = {confirmation(node, slot): each.payload for node, effects in slots for slot, each in effects.items()}
    found = list(run.ledger.live())
    wrong = [name for name, payload in found if name not in out or not equal(out[name], payload)]
    wrong += [*(out.keys() - dict(found).keys()), *run.ledger.repeated]
    return [f"effects in the world: {name}" for name in wrong]


def truth_of(run: SimulatedRun, answer: Answer = answer_by_hash) -> tuple[Truth, list[str]]:
    """Return the latest-version oracle of a finished run and where the run differs from it."""

    async def fresh(ask: Ask) -> Value:
        return answer(ask)

    machine = run.machine
    known = choices(machine), fresh, machine.overrides, receipts_of(machine)
    truth = drive(oracle(machine.graph, machine.inputs, *known))
    return truth, differences(machine, truth) + _astray(run)
