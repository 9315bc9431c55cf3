"""The asyncio driver: feeds the machine what happens and carries out what it says. It decides nothing.

Everything runs on one event loop, so an event is handled in one piece and needs no lock. A body that is a plain function
runs in a thread; it cannot be stopped, so it is fenced: its result is discarded when it comes.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from inspect import CORO_CREATED, getcoroutinestate, isawaitable
from types import MappingProxyType
from typing import Any, NamedTuple

from revise_lab.core.body import Ask, Execution, Loss
from revise_lab.core.machine import Machine
from revise_lab.core.oracle import drive
from revise_lab.errors import ReviseLabError
from revise_lab.records import event as ev
from revise_lab.records.value import Value, thaw

from .dispatch import INSIDE, Authorise, Dispatcher, is_stopped
from .journal import Journal
from .reply import Model, ModelRequest
from .target import Target


@dataclass
class AttemptSpan:
    """One attempt as it happened on the clock of the event loop."""

    node: str
    attempt: str
    start_s: float
    end_s: float | None = None
    outcome: str = "running"
    """``running``, ``completed``, ``failed``, ``aborted`` or ``orphaned``."""
    n_calls: int = 0
    n_tokens: int = 0
    """Pieces of text that had streamed in."""


@dataclass
class _Task:
    execution: Execution
    task: asyncio.Task[None] | None = None
    orphaned: bool = False
    span: AttemptSpan = field(default_factory=lambda: AttemptSpan("", "", 0.0))


class Outside(NamedTuple):
    """What a run is connected to besides its model.

    Attributes
    ----------
    targets, authorise, effect_timeout_s
        See :class:`revise_lab.runtime.dispatch.Dispatcher`.
    journal : Journal, optional
        Every event is written there before anything happens because of it.
    """

    targets: Mapping[str, Target] = MappingProxyType({})
    authorise: Authorise | None = None
    effect_timeout_s: float = 30.0
    journal: Journal | None = None


NOTHING_OUTSIDE = Outside()


class Driver:
    """Drives one machine on the running event loop.

    Parameters
    ----------
    machine : Machine
        The run.
    model : Model or None
        What answers model calls.
    run_id : str
        Names the run to the endpoint.
    n_slots : int, optional
        Attempts that may run at once.
    loss : callable, optional
        See :class:`revise_lab.core.body.Execution`.
    on_change : callable
        Called after every event.
    outside : Outside
        Targets, whoever allows effects, and the durable journal.
    """

    def __init__(
        self,
        machine: Machine,
        model: Model | None,
        *,
        run_id: str,
        n_slots: int | None = None,
        loss: Loss | None = None,
        on_change: Callable[[], None] = lambda: None,
        outside: Outside = NOTHING_OUTSIDE,
    ) -> None:
        self.machine = machine
        self.model = model
        self.run_id = run_id
        self.spans: dict[str, AttemptSpan] = {}
        self.held = 0
        """Revisions that have been handed in and not yet delivered; the run is not sealed before them."""
        self.pumps = True
        """Whether anything may start or leave: not before the run is connected, and not once it has ended."""
        self.crash: BaseException | None = None
        """An error of the driver itself, which ends the run."""
        self._n_slots = n_slots
        self._loss = loss
        self._on_change = on_change
        self._tasks: dict[str, _Task] = {}
        self._journal = outside.journal
        self._written = outside.journal.length if outside.journal else 0
        self.dispatcher = Dispatcher(
            outside.targets, outside.authorise, outside.effect_timeout_s, machine, run_id, self.send
        )
        self._random = random.SystemRandom()

    def send(self, event: ev.Event) -> list[ev.Instruction]:
        """Handle one event, carry out the instructions and start what became ready."""
        if isinstance(event, ev.Revise | ev.Close | ev.Cancel):
            self._flush()
        instructions = self._handle(event)
        self.pump()
        self._on_change()
        return instructions

    def pump(self) -> None:
        """Start ready nodes while slots are free; seal the run when everything is settled."""
        if not self.pumps:
            return
        while (names := self.machine.ready()) and (self._n_slots is None or len(self._tasks) < self._n_slots):
            self._handle(ev.Start(names[0]))
        while slots := self.machine.undoable():
            self._handle(ev.Compensate(*slots[0]))
        while slots := self.machine.sendable():
            self._handle(ev.Dispatch(*slots[0]))
        if self.machine.closable and not self.held:
            self._handle(ev.Close())
            self.pump()

    def detach(self) -> None:
        """Close the journal of a run that has ended; what it is told from now on, it answers and does not keep."""
        if self._journal is not None:
            self._journal.close()
            self._journal = None

    async def aclose(self) -> None:
        """Cancel what still runs and wait for it, fenced threads included."""
        self.pumps = False
        tasks = [*(each.task for each in self._tasks.values() if each.task), *self.dispatcher.tasks]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _handle(self, event: ev.Event) -> list[ev.Instruction]:
        instructions = self.machine.handle(event)
        if self._journal is not None:
            self._written = self._journal.append(self.machine.journal[self._written :], at=self._written)
        for instruction in instructions:
            if isinstance(instruction, ev.Execute):
                self._execute(instruction)
            elif isinstance(instruction, ev.Moved):
                self._tasks[instruction.attempt].execution.move(self.machine.snapshot_of(instruction.attempt))
            elif isinstance(instruction, ev.Stop):
                self._stop(instruction)
            elif isinstance(instruction, ev.Reconsider):
                again = Execution(self.machine.graph, instruction.order, self._perform)
                self._handle(again.reconsidered(instruction.output))
            elif isinstance(instruction, ev.Act | ev.Ask):
                self.dispatcher.carry_out(instruction, self._note_crash)
        return instructions

    def _flush(self) -> None:
        for running in list(self._tasks.values()):
            if not running.orphaned and (report := running.execution.flush()):
                self._handle(report)

    def _execute(self, order: ev.Execute) -> None:
        running = _Task(Execution(self.machine.graph, order, self._perform, self._loss, self._before_read))
        running.span = self.spans[order.attempt] = AttemptSpan(order.node, order.attempt, self._now_s())
        self._tasks[order.attempt] = running
        running.task = asyncio.get_running_loop().create_task(self._attempt(order.attempt, running), name=order.attempt)
        running.task.add_done_callback(self._note_crash)

    def _note_stopped(self, task: asyncio.Task[None]) -> None:
        """End an attempt that was stopped before its first step, of which its own code never heard."""
        attempt = task.get_name()
        self._tasks.pop(attempt).span.end_s = self._now_s()
        if attempt in self.machine.attempts:
            self.send(ev.Stopped(attempt))

    def _note_crash(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()):
            self.fail(error)

    def fail(self, error: BaseException) -> None:
        """End the run: it cannot be driven any more."""
        self.crash = error
        self._on_change()

    def _before_read(self, execution: Execution, artifact: str) -> None:
        """Report what has been read and ask for a newer snapshot, when the next read would be of an old one (R4)."""
        if self.machine.is_late(execution.order.attempt, artifact):
            if report := execution.flush():
                self._handle(report)
            self._handle(ev.Extend(execution.order.attempt))

    def _stop(self, order: ev.Stop) -> None:
        running = self._tasks.get(order.attempt)
        if running is None or running.task is None:
            return
        running.orphaned = True
        running.span.outcome = "orphaned" if order.orphaned else "aborted"
        if not order.orphaned:
            if getcoroutinestate(running.task.get_coro()) == CORO_CREATED:  # type: ignore[arg-type]
                running.task.add_done_callback(self._note_stopped)
            running.task.cancel()

    async def _attempt(self, attempt: str, running: _Task) -> None:
        INSIDE.set((*INSIDE.get(), self.run_id))
        event: ev.Event
        try:
            event = await self._bounded(running.execution)
        except asyncio.CancelledError as error:
            if running.orphaned:
                event = ev.Stopped(attempt)
            elif is_stopped():
                raise
            else:  # something that the body awaited was cancelled: that is how the body ended
                event = running.execution.failed(error)
        finally:
            running.span.end_s = self._now_s()
            self._tasks.pop(attempt, None)
        if running.span.outcome == "running":
            running.span.outcome = "failed" if isinstance(event, ev.Fail) else "completed"
        if attempt in self.machine.attempts:
            self.send(event)

    async def _bounded(self, execution: Execution) -> ev.Finish | ev.Fail:
        node = execution.node
        try:
            async with asyncio.timeout(node.timeout_s):
                if node.is_sync:
                    event = await asyncio.to_thread(lambda: drive(execution.run()))
                else:
                    event = await execution.run()
        except TimeoutError:
            late = TimeoutError(f"node {node.name!r} ran longer than timeout_s={node.timeout_s:g}")
            return execution.failed(late)
        if isinstance(event, ev.Finish) and event.effects:
            try:
                self.dispatcher.check(event)
            except ReviseLabError as error:
                return ev.Fail(
                    event.attempt, f"{type(error).__name__}: {error}", False, event.reads, event.coverage, event.calls
                )
        return event

    async def _perform(self, ask: Ask) -> Value:
        span = self.spans[ask.attempt]
        if ask.kind == "pause":
            await asyncio.sleep(ask.request)
            return None
        span.n_calls += 1
        if ask.kind == "model":
            return await self._ask_model(ask, span)
        if ask.kind == "clock":
            return time.time()
        if ask.kind == "random":
            return self._random.random()
        if ask.local is None:
            raise ReviseLabError(f"node {ask.node!r} calls tool {ask.request['tool']!r}, which nothing answers here")
        result: Any = await asyncio.to_thread(ask.local)
        return await result if isawaitable(result) else result

    async def _ask_model(self, ask: Ask, span: AttemptSpan) -> Value:
        if self.model is None:
            raise ReviseLabError(f"node {ask.node!r} asks a model and the session has none - pass endpoint=")

        def count(piece: str) -> None:
            span.n_tokens += 1
            self._on_change()

        options = thaw(ask.request)
        request = ModelRequest(node=ask.node, attempt=ask.attempt, run=self.run_id, **options)
        return (await self.model.complete(request, on_token=count)).text

    @staticmethod
    def _now_s() -> float:
        return asyncio.get_running_loop().time()
