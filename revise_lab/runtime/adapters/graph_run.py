"""A LangGraph graph in flight: passes over it, revisions, questions, and what has come of it."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import AsyncIterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from revise_lab.errors import ReviseLabError, RevisionRefused, RunBlocked, RunCancelled, RunFailed
from revise_lab.records.revision import Change, Op, Revision
from revise_lab.records.selector import Path, parse_path
from revise_lab.records.value import ABSENT, Value, equal, thaw, walk
from revise_lab.records.workflow import Node
from revise_lab.runtime.acceptance import Acceptance, check_outside
from revise_lab.runtime.driver import AttemptSpan
from revise_lab.runtime.session import Run, Session

from .calls import Inside, watching
from .growing import Growing, PassBegins, PassEnds
from .images import image, restore
from .scope import Placement, Scope
from .tasks import Job, TaskDriver, task_node
from .views import Origin

if TYPE_CHECKING:
    from .langgraph import RevisableGraph


@dataclass(frozen=True)
class GraphResult:
    """What a run over a graph has come to."""

    state: Any
    """What ``compiled.ainvoke`` returns for the inputs as they are at the end."""
    version: int
    late_invalid: int
    """Certificates that only the close found broken; 0 unless the protocol failed."""
    effects: dict[str, dict[str, Any]]
    """Plain payload of every effect that is out in the world, by task and slot."""
    interrupts: tuple[Any, ...] = ()
    """Questions that the graph has asked; :meth:`GraphRun.resume` answers them. Nothing is sealed before."""


class GraphRun(Run):
    """A graph in flight: everything that a :class:`revise_lab.runtime.session.Run` offers, over tasks of LangGraph."""

    machine: Growing

    def __init__(
        self, graph: RevisableGraph, session: Session, machine: Growing, raw: dict[str, Any], config: dict[str, Any]
    ) -> None:
        self._pass: asyncio.Task[Any] | None = None
        self._enders: set[asyncio.Future[None]] = set()
        self._seen: Any = None
        self._resting = False
        """The pass has come to an end that only a revision, or an answer, can change."""
        super().__init__(session, machine, session.new_journal())
        outside = session.outside._replace(journal=self._file)
        self._driver = TaskDriver(machine, None, run_id=self.id, on_change=self._notify, outside=outside)
        self.graph, self._config = graph, config
        self._raw = {key: [value] for key, value in raw.items()}
        """What each input has been given as a whole; the last of it may yet have to wait for its turn."""
        self.scopes: dict[str, Scope] = {}
        self._instrumented = graph.instrumented
        self._saver = self._instrumented and self._instrumented.checkpointer
        self._state: Any = None
        self._error: BaseException | None = None
        self._answers: list[tuple[Any, Any]] = []
        self.n_passes = 0

    @property
    def tasks(self) -> TaskDriver:
        """What settles tasks."""
        assert isinstance(self._driver, TaskDriver)
        return self._driver

    # --- passes --------------------------------------------------------------------------------------------------------

    async def _live(self) -> None:
        with ExitStack() as stack:
            if self._file is not None:
                stack.callback(self._file.close)
            stack.enter_context(watching(self.graph.effects))
            try:
                while self.machine.state in ("open", "closing") or self.machine.effects_move:
                    if self._resting or self.machine.state != "open":
                        await self._change()
                    else:
                        await self._one_pass()
                if self._saver and self.machine.state == "closed":
                    await self._keep()
            finally:
                if self._pass is not None:
                    self._pass.cancel()
                self.scopes = {}
                await self._driver.aclose()

    def _notify(self) -> None:
        """Break the pass off when a revision has been applied, before anything else happens in it."""
        machine, ours = self.machine, self._pass
        if machine.plan is not self._seen or machine.state == "cancelled" or self._driver.crash:
            self._seen, self._resting = machine.plan, False
            if ours is not None:
                self.tasks.broken_off = True
                ours.cancel()
        if self._resting or machine.state != "open" or self._driver.crash or self._main.done():
            enders, self._enders = self._enders, set()
            for ender in enders:
                if not ender.done():
                    ender.set_result(None)
        if self._waiters:
            super()._notify()

    async def _rest(self) -> None:
        """Wait until there may be something to hand over; what happens within a pass is none of it."""
        ender: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._enders.add(ender)
        await ender

    async def _one_pass(self) -> None:
        plan = self.machine.plan
        self.n_passes += 1
        self._error = None
        self.tasks.broken_off = False
        self.tasks.schedule(PassBegins())
        self._pass = asyncio.get_running_loop().create_task(self._invoke(), name=f"{self.id} pass {self.n_passes}")
        await asyncio.wait([self._pass])
        ended, self._pass = self._pass, None
        if self._driver.crash:
            raise self._driver.crash
        if self.machine.plan is not plan or self.machine.state != "open":
            if not ended.cancelled():
                ended.exception()  # seen, and out of date
            return
        error = ended.exception()
        self._resting, self._error = True, error
        self._state = None if error else ended.result()
        # from here to the seal nothing is awaited, so no revision can come between the end of the graph and its close
        self._driver.send(PassEnds(bool(error or self._interrupts())))  # type: ignore[arg-type]

    def _input(self) -> dict[str, Any]:
        return {key: copy.deepcopy(self._restored(self.machine.values[key], raws)) for key, raws in self._raw.items()}

    @staticmethod
    def _restored(value: Value, raws: list[Any]) -> Any:
        for raw in reversed(raws):
            if equal(image(raw), value):
                return raw
        return restore(value, raws[-1])

    async def _invoke(self) -> Any:
        config = dict(self._config)
        graph = self._instrumented
        if graph is None:
            return await self.tasks.settle(*self._whole(config))
        self._enter()
        if self._saver:
            from langgraph.checkpoint.memory import InMemorySaver

            graph = graph.copy({"checkpointer": InMemorySaver()})
            config["configurable"] = {**config.get("configurable", {}), "thread_id": f"{self.id}/{self.n_passes}"}
        state = await graph.ainvoke(self._input(), config)
        answers = list(self._answers)
        while asked := _asked(state):
            found = next((each for each in answers if equal(image(each[0]), image(asked[0].value))), None)
            if found is None:
                break
            answers.remove(found)
            from langgraph.types import Command

            state = await graph.ainvoke(Command(resume=found[1]), config)
        return state

    def _enter(self) -> None:
        from .instrument import HOST

        HOST.set(self)
        self.scopes = {"": self._outermost()}

    def _whole(self, config: dict[str, Any]) -> tuple[Placement, Node, Job]:
        """Return the graph as one task of which nothing is seen, for a LangGraph that cannot be taken apart."""
        if self.graph.compiled.checkpointer:
            thread = f"{self.id}/{self.n_passes}"
            config["configurable"] = {**config.get("configurable", {}), "thread_id": thread}
        given = self._input()
        origins = {key: Origin(((key, ()),), exact=True) for key in given}
        name = "the graph"
        job = Job(
            lambda state: self.graph.compiled.ainvoke(state, config), given, lambda _: None, self.graph.unseen, True
        )
        return Placement(name, (0, name), (), None, "", origins), task_node(name, None), job

    def _outermost(self) -> Scope:
        return Scope("", self.graph.reduced, {key: Origin(((key, ()),), exact=True) for key in self._raw})

    async def _keep(self) -> None:
        """Write the sealed run to the application's own checkpointer: one clean history, whatever happened on the way."""
        self._enter()
        await self._instrumented.ainvoke(self._input(), self._config)

    def _interrupts(self) -> tuple[Any, ...]:
        return _asked(self._state)

    # --- what a user does ----------------------------------------------------------------------------------------------

    def revise(
        self,
        path: str | Path | Revision | Mapping[Any, Any],
        value: Any = ABSENT,
        *,
        op: str = "",
        base: int | None = None,
        id: str | None = None,
    ) -> Acceptance:
        """Revise an input, several at once, or pin a place of a node's output, while the graph runs.

        Parameters
        ----------
        path : str, tuple, Revision or mapping
            ``"request.budget"``; ``{"request.budget": 800, "request.city": "Porto"}``; ``"plan.route"`` pins ``route`` in
            what the node ``plan`` returns.
        value : Any
            The new value.
        op, base, id
            See :meth:`revise_lab.runtime.session.Run.revise`.
        """
        if isinstance(path, Revision):
            return self._revise(path)
        many = path if isinstance(path, Mapping) else {path: value}
        changes, given = [], []
        for each, new in many.items():
            artifact, inner = parse_path(each)
            how = op or ("override" if artifact not in self.machine.inputs and artifact in self.machine.runs else "set")
            if how not in list(Op):
                raise RevisionRefused(f"{how!r} is no operation - use one of {', '.join(Op)}")
            if not inner and how == "set" and artifact in self._raw:
                given.append((self._raw[artifact], new))
            changes.append(Change(artifact, Op(how), inner, new if new is ABSENT else image(new), base))
        for raws, new in given:
            raws.append(new)
        acceptance = self._revise(Revision(id or self._fresh_id(), tuple(changes)))

        def forget() -> None:
            for raws, new in given:
                raws[:] = [each for each in raws if each is not new]

        acceptance.if_refused(forget)
        return acceptance

    def _revise(self, revision: Revision) -> Acceptance:
        with Inside(None):  # a node may revise; what the revision sets off, a call to a target say, is not its doing
            return super().revise(revision)

    async def resume(self, answer: Any) -> None:
        """Answer the question that the graph has asked with ``interrupt``.

        An answer belongs to its question: when a revision makes the node ask again, the same question is answered by
        itself and another one is asked anew.

        Raises
        ------
        ReviseLabError
            Nothing is being asked.
        """
        asked = self._interrupts()
        if not asked:
            raise ReviseLabError(f"run {self.id} asks nothing - await result() and look at its interrupts")
        self._answers.append((asked[0].value, answer))
        self._resting = False
        self._notify()

    async def result(self) -> GraphResult:  # type: ignore[override]
        """Wait for the seal, or for a question, and return what the graph has come to.

        Raises
        ------
        RunFailed
            A node failed for good; the run can still be revised, and its result awaited again.
        RunBlocked, RunCancelled
            As for :meth:`revise_lab.runtime.session.Run.result`.
        """
        check_outside(self.id)
        while True:
            machine = self.machine
            if self._main.done() and not self._main.cancelled() and (error := self._main.exception()):
                raise error
            if machine.state == "closed":
                if not self._main.done() or self._main.cancelled():
                    await asyncio.shield(self._main)
                return self._result()
            if machine.state == "cancelled":
                raise RunCancelled(f"run {self.id} was cancelled - start it again with RevisableGraph.start()")
            if self._resting and not self._driver.held and machine.state == "open" and not machine.effects_move:
                self._raise_if_stuck()
                if self._interrupts():
                    return self._result()
            await self._rest()

    def _raise_if_stuck(self) -> None:
        if self._error is not None:
            raise RunFailed(
                f"run {self.id} failed: {type(self._error).__name__}: {self._error} - revise what the node read, or start"
                " again",
                failures={"": str(self._error)},
            ) from self._error
        if residue := [f"{intent.node}/{intent.slot}: {why}" for intent, _, why in self.machine.residue()]:
            raise RunBlocked(
                f"run {self.id} waits for a person: {'; '.join(residue)} - settle it at the target and tell the run with"
                " resolve(), or revise",
                residue=residue,
            )
        if isinstance(conflict := next(iter(self.machine.failures().values()), None), str):
            raise RunFailed(f"run {self.id} failed: {conflict}", failures=self.machine.failures())

    def _result(self) -> GraphResult:
        machine = self.machine
        state = copy.deepcopy(self._state)
        return GraphResult(state, machine.version, machine.late_invalid, self.effects(), self._interrupts())

    def reopen(self) -> Run:
        """Refuse: a sealed run over a graph is not gone on with."""
        raise ReviseLabError("a sealed run over a graph cannot be reopened - start another")

    async def replay(self, stream_mode: Any = "updates", **options: Any) -> AsyncIterator[Any]:
        """Stream the sealed run as LangGraph would have streamed it, without running any node.

        Parameters
        ----------
        stream_mode, **options
            As for ``astream``. What nodes write themselves (``custom``, tokens of ``messages``) is not repeated.
        """
        if self.machine.state != "closed":
            raise ReviseLabError(f"run {self.id} is {self.machine.status}, not closed - await result() first")
        self._enter()
        graph = self._instrumented.copy({"checkpointer": None})
        async for chunk in graph.astream(
            self._input(), {**self._config, "configurable": {}}, stream_mode=stream_mode, **options
        ):
            yield chunk

    # --- looking -------------------------------------------------------------------------------------------------------

    @property
    def notes(self) -> dict[str, list[str]]:
        """What could not be seen of an attempt, or was out of the ordinary, and why, by attempt."""
        return {name: each.notes for name, each in self.tasks.executions.items() if each.notes}

    @property
    def calls(self) -> dict[str, int]:
        """Model calls by attempt, in order of start."""
        return {name: span.n_calls for name, span in self._driver.spans.items() if span.n_calls}

    def attempts(self, node: str) -> list[AttemptSpan]:
        """Return every attempt at a task, with its times and outcome."""
        return [span for span in self.spans if span.node == node]

    def reads(self, node: str) -> list[str]:
        """Return what the current attempt at a task has read, as text."""
        run = self.machine.runs[node]
        live = run.attempt or run.current
        return (
            [f"{read.selector}{' (control)' if read.selector.role == 'control' else ''}" for read in live.reads]
            if live
            else []
        )

    def value(self, artifact: str, *path: str | int) -> Any:
        """Return what lies at a place of an input or of a task's output, plain."""
        return thaw(walk(self.machine.values.get(artifact, ABSENT), path))


def _asked(state: Any) -> tuple[Any, ...]:
    return tuple(state.get("__interrupt__", ())) if isinstance(state, Mapping) else ()
