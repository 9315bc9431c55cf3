"""Attempts at the tasks of a framework: run beside it, offered to the machine, handed back when they count.

LangGraph owns the tasks of a superstep and cancels them all with its run. An attempt therefore runs in a task of ours; what
LangGraph awaits is only its being settled. So a pass over the graph can be broken off and begun again at no cost to attempts
that are still valid: the next pass finds them running, or done.
"""

from __future__ import annotations

import asyncio
import copy
import inspect
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from itertools import islice
from typing import Any, NamedTuple
from urllib.parse import quote

from revise_lab.core.recorder import Recorder
from revise_lab.core.table import Attempt
from revise_lab.errors import ReadOnlyState, ReviseLabError, UntrackableRead
from revise_lab.records import event as ev
from revise_lab.records.attempt import AttemptState, Coverage
from revise_lab.records.effect import Effect
from revise_lab.records.selector import Marker, Path, Read
from revise_lab.records.value import ABSENT, Value, freeze, make, walk
from revise_lab.records.workflow import Kind, Node
from revise_lab.runtime.driver import AttemptSpan, Driver, _Task

from .calls import Inside
from .growing import GOTO, Arrive, Growing
from .images import image, restore
from .scope import Placement
from .views import Sight, state_view, unwrapped

_ENDLESS = 10**6
"""Retries that the machine grants: how often a node is tried again is the framework's to say."""


class Job(NamedTuple):
    """What an attempt has to run."""

    call: Callable[[Any], Awaitable[Any]]
    """Runs the node on a state."""
    state: Any
    lanes: Callable[[Any], Mapping[str, Any] | None]
    """What an output schedules by itself: the argument of each task by name, ``True`` where it gets the state."""
    mode: str
    """``view``: on recording views; ``copy``: on a copy, which counts as read whole; otherwise why reads go unseen."""
    is_state: bool
    """Whether ``state`` is the state, not the argument of a send."""
    alone: bool = True
    """Whether whoever has scheduled the task is the only one that could."""


class TaskExecution:
    """One attempt at a task.

    Parameters
    ----------
    order : Execute
        The machine's instruction.
    node : Node
        What the machine knows of the task.
    placement : Placement
        Where the task stands.
    job : Job
        What to run.
    values : mapping
        Every artifact at the start.
    keys_read : set of str
        Where the keys of the state that are asked for are put.
    """

    def __init__(
        self, order: ev.Execute, node: Node, placement: Placement, job: Job, values: Mapping[str, Value], keys: set[str]
    ) -> None:
        self.attempt = order.attempt
        self.order, self.node, self.placement, self.job = order, node, placement, job
        self.recorder = Recorder()
        self.sight = Sight(self.recorder, values)
        self.sight.keys = keys
        self.effects: list[Effect] = []
        self.n_calls = 0
        self.error: BaseException | None = None
        self.raw: Any = None
        """What the node returned."""
        self.notes: list[str] = []
        self.run_id = ""
        self.span: AttemptSpan | None = None
        """Where the driver keeps count of its calls."""
        self._streams: list[Any] = []
        self._sent = 0

    # --- what happens while the node runs ------------------------------------------------------------------------------

    @property
    def headers(self) -> dict[str, str]:
        """What tells an endpoint which attempt asks."""
        who = {"node": self.node.name, "attempt": self.attempt, "run": self.run_id}
        return {f"x-revise-{name}": quote(value) for name, value in who.items() if value}

    def count_call(self) -> None:
        """Take note of a model call."""
        self.n_calls += 1
        if self.span is not None:
            self.span.n_calls += 1

    def stage(self, effect: Effect) -> None:
        """Hold back an effect; a second one in a slot is numbered."""
        n_before = sum(each.slot.partition("#")[0] == effect.slot for each in self.effects)
        self.effects.append(effect._replace(slot=f"{effect.slot}#{n_before}") if n_before else effect)

    def own(self, stream: Any) -> None:
        """Close a stream when the attempt ends."""
        self._streams.append(stream)

    def flush(self) -> ev.Observe | None:
        """Return the reads made since the last report, or ``None``."""
        reads, coverage = self._new_reads()
        return ev.Observe(self.attempt, reads, coverage) if reads else None

    def _new_reads(self) -> tuple[tuple[Read, ...], Coverage]:
        reads = self.recorder.reads
        fresh = tuple([make(Read, each) for each in islice(reads.items(), self._sent, None)])
        self._sent = len(reads)
        return fresh, self.recorder.coverage

    # --- running -------------------------------------------------------------------------------------------------------

    async def run(self) -> ev.Finish | ev.Fail:
        """Run the node to its end and return the event; an exception is an outcome too."""
        try:
            with Inside(self):
                self.raw = unwrapped(await self._called())
            output = self._output(self.raw)
        except Exception as error:
            return self.failed(error)
        finally:
            await self._close_streams()
        self.notes += [f"changed {place} in place; the change stays with its attempt" for place in self.sight.mutated()]
        reads, coverage = self._new_reads()
        return make(ev.Finish, (self.attempt, output, reads, coverage, (), tuple(self.effects)))

    def failed(self, error: BaseException) -> ev.Fail:
        """Return the event of a node that ended with an exception."""
        self.error = error
        reads, coverage = self._new_reads()
        return ev.Fail(self.attempt, f"{type(error).__name__}: {error}", True, reads, coverage, ())

    async def _called(self) -> Any:
        job = self.job
        if job.mode == "copy":
            return await job.call(self._copied())
        if job.mode != "view":
            return await self._raw(job.mode)
        try:
            return await job.call(self._view())
        except Exception as error:
            if not _from_a_view(error):
                raise
            if self.n_calls or self.effects:
                raise UntrackableRead(
                    f"node {self.node.name!r}: {error} - it has called a model or staged an effect before, so it cannot be"
                    " run again on plain values - read through the state in Python, or copy.deepcopy it first",
                    node=self.node.name,
                ) from error
            return await self._raw(str(error).partition(" - ")[0])

    def _view(self) -> Any:
        if self.job.is_state:
            return state_view(self.sight, self.placement.origins, self.job.state)
        place = self._argument()
        if place is None:
            return self.sight.lend(self.placement.name, self.job.state)
        return self.sight.present(*place, self.job.state)

    def _argument(self) -> tuple[str, Path, Value] | None:
        """Return where the argument of a send lies in the decision that made it."""
        source, path = self.placement.source, (GOTO, self.placement.lane)
        value = ABSENT if source is None else walk(self.sight.values.get(source, ABSENT), path)
        return None if source is None or value is ABSENT else (source, path, value)

    def _copied(self) -> Any:
        if self.job.is_state:
            for key, origin in self.placement.origins.items():
                self.sight.whole(key, origin)
        elif place := self._argument():
            self.recorder.record(*place[:2], Marker.VALUE, place[2])
        return copy.deepcopy(self.job.state)

    async def _raw(self, why: str) -> Any:
        """Run the node on plain values: everything that it can see counts as read."""
        self.notes.append(f"runs on plain values: {why}")
        self.recorder.coverage = Coverage.UNKNOWN
        return await self.job.call(self._copied())

    def _output(self, raw: Any) -> Value:
        found = {key: image(value) for key, value in updates_of(raw).items()}
        lanes = self.job.lanes(raw)
        return freeze(found if lanes is None else {**found, GOTO: {key: image(value) for key, value in lanes.items()}})

    def let_go(self) -> None:
        """Forget all but the outcome: it would live as long as the run, and LangGraph's part of it is large."""
        del self.job, self.order, self.placement, self.sight, self.recorder

    async def _close_streams(self) -> None:
        for stream in self._streams:
            closed = stream.close() if hasattr(stream, "close") else None
            if inspect.isawaitable(closed):
                await closed


def _from_a_view(error: Exception) -> bool:
    """Say whether an error may come from code that could do nothing with a view."""
    return isinstance(error, ReadOnlyState | UntrackableRead | TypeError) or type(error).__module__.startswith(
        "pydantic"
    )


def updates_of(raw: Any) -> dict[str, Any]:
    """Return what a node's return value writes, by state key."""
    if isinstance(raw, dict):
        return {key: value for key, value in raw.items() if isinstance(key, str)}
    if hasattr(raw, "_update_as_tuples"):  # a Command
        return dict(raw._update_as_tuples()) if raw.update is not None else {}
    if isinstance(raw, list | tuple):
        merged: dict[str, list[Any]] = {}
        for each in raw:
            for key, value in updates_of(each).items():
                merged.setdefault(key, []).append(value)
        return merged
    return {} if raw is None else {"__root__": raw} if not hasattr(raw, "__dict__") else dict(vars(raw))


class TaskDriver(Driver):
    """Drives a growing machine: starts what the framework schedules, and tells the framework what counts."""

    machine: Growing

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.executions: dict[str, TaskExecution] = {}
        """The last attempt at each task, and the one whose output counts."""
        self.broken_off = False
        """Whether the pass that is under way has been overtaken by a revision."""
        self.keeps_jobs = False
        """Whether an attempt that has ended can be run again."""
        self._jobs: dict[str, tuple[Placement, Job]] = {}
        self._waiters: dict[str, list[asyncio.Future[None]]] = {}
        """By attempt: who waits for its end; under no name whoever waits for anything to happen."""

    # --- what the framework asks ---------------------------------------------------------------------------------------

    async def settle(self, placement: Placement, node: Node, job: Job) -> Any:
        """Return what a task has returned, once an attempt at it counts; run one if need be.

        Raises
        ------
        Exception
            What the attempt raised: whether it is tried again is the framework's to say.
        """
        name = placement.name
        if self.broken_off:
            await self._dying()
        self._jobs[name] = placement, job
        origins = placement.origins if job.is_state else {}
        self.schedule(make(Arrive, (name, node, *placement[1:5], job.alone, origins)))
        self._wake()
        machine = self.machine
        mine: TaskExecution | None = None
        last: Attempt | None = None
        while True:
            run = machine.runs[name]
            attempt = run.attempt
            if run.settled and run.current is not None and attempt is None:
                self._jobs.pop(name, None)
                return self._counts(name, run.current.id)
            if attempt is not None:
                last, mine = attempt, self.executions.get(attempt.id)
            elif last is not None and last.state is AttemptState.FAILED and mine is not None and mine.error is not None:
                raise mine.error
            elif run.ready and machine.state == "open":
                self._handle(ev.Start(name))
                self._on_change()
                continue
            await self._end_of("" if attempt is None else attempt.id)
            if self.broken_off:
                await self._dying()

    @staticmethod
    async def _dying() -> None:
        """Wait for the cancellation that is on its way: what a pass hands out that has been broken off is out of date."""
        await asyncio.get_running_loop().create_future()

    def schedule(self, event: Any) -> None:
        """Tell the machine what the framework does; it is no event of the journal."""
        self._handle(event)

    def _counts(self, name: str, attempt: str) -> Any:
        raw = self.executions[attempt].raw
        if name not in self.machine.overrides:
            return raw
        return _pinned(raw, self.machine.values[name])

    def _end_of(self, attempt: str) -> asyncio.Future[None]:
        """Return what is done as soon as an attempt is on its way no more, or the pass is overtaken."""
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters.setdefault(attempt, []).append(waiter)
        return waiter

    def _wake(self) -> None:
        under_way = self.machine.under_way()
        for attempt in [each for each in self._waiters if self.broken_off or each not in under_way]:
            for waiter in self._waiters.pop(attempt):
                if not waiter.done():
                    waiter.set_result(None)

    # --- what the driver does differently ------------------------------------------------------------------------------

    async def aclose(self) -> None:
        """Cancel what still runs and wait for it; waiting for nothing would take two turns of the event loop."""
        if self._tasks or self.dispatcher.tasks:
            await super().aclose()

    def pump(self) -> None:
        """Carry out effects and seal the run when everything is settled; what starts is the framework's to say."""
        if self.machine.outboxes:
            while slots := self.machine.undoable():
                self._handle(ev.Compensate(*slots[0]))
            while slots := self.machine.sendable():
                self._handle(ev.Dispatch(*slots[0]))
        if self.machine.closable and not self.held:
            self._handle(ev.Close())
            self.pump()
        self._wake()

    def _execute(self, order: ev.Execute) -> None:
        placement, job = self._jobs[order.node]
        keys = self.machine.keys_read[order.attempt] = set()
        node = self.machine.runs[order.node].node
        execution = self.executions[order.attempt] = TaskExecution(order, node, placement, job, order.parents, keys)
        loop = asyncio.get_running_loop()
        span = self.spans[order.attempt] = AttemptSpan(order.node, order.attempt, loop.time())
        execution.span, execution.run_id = span, self.run_id
        running = self._tasks[order.attempt] = _Task(execution, span=span)  # type: ignore[arg-type]
        running.task = loop.create_task(self._attempt(order.attempt, running), name=order.attempt)

    def _note_stopped(self, task: asyncio.Task[None]) -> None:
        execution = self.executions[task.get_name()]
        super()._note_stopped(task)
        if not self.keeps_jobs:
            execution.let_go()

    async def _attempt(self, attempt: str, running: _Task) -> None:
        try:
            await super()._attempt(attempt, running)
        except asyncio.CancelledError:
            raise
        except BaseException as error:
            # the driver's own; a callback at the end of every task would cost a turn of the loop
            self.fail(error)
            if not isinstance(error, Exception):
                raise

    async def _bounded(self, execution: Any) -> ev.Finish | ev.Fail:
        try:
            event: ev.Finish | ev.Fail = await execution.run()
            if isinstance(event, ev.Finish) and event.effects:
                try:
                    self.dispatcher.check(event)
                except ReviseLabError as error:
                    return execution.failed(error)  # type: ignore[no-any-return]
            return event
        finally:
            if not self.keeps_jobs:
                execution.let_go()


def _pinned(raw: Any, effective: Value) -> Any:
    """Return an output with what a revision has pinned in it."""
    if isinstance(raw, dict):
        return {key: restore(effective[key], value) if key in effective else value for key, value in raw.items()}
    if hasattr(raw, "update") and isinstance(raw.update, dict):
        return replace(raw, update=_pinned(raw.update, effective))
    raise ReviseLabError(
        f"an override pins an output of {type(raw).__name__}, which is no mapping - revise an input instead"
    )


def task_node(name: str, body: Callable[..., Any] | None, kind: Kind = Kind.MODEL) -> Node:
    """Return what the machine needs to know of a task."""
    return Node(name, kind, body, retries=_ENDLESS)
