"""Sessions and runs: what a user holds while a workflow runs, live.

>>> import asyncio
>>> from revise_lab import Session, Workflow
>>> flow = Workflow("double")
>>> @flow.node(kind="tool")
... async def double(state):
...     return {"x": 2 * state["request"]["x"]}
>>> async def main():
...     run = Session(flow, {"request": {"x": 4}}, endpoint=None).start()
...     return (await run.result()).outputs["double"]
>>> asyncio.run(main())
{'x': 8}
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Generator, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any

from revise_lab import errors
from revise_lab.audit.auditor import Finding, audit
from revise_lab.core.body import Ask, Loss
from revise_lab.core.machine import Machine, replay
from revise_lab.core.oracle import Truth, choices, differences, oracle
from revise_lab.core.plan import Policy, RecoveryPlan
from revise_lab.errors import ReentrantRevision, ReviseLabError, RevisionRefused, RunCancelled, RunFailed
from revise_lab.policies import policy as policy_named
from revise_lab.records import event as ev
from revise_lab.records.revision import Change, Op, Revision
from revise_lab.records.selector import Path, parse_path
from revise_lab.records.value import ABSENT, Value, thaw
from revise_lab.records.workflow import Graph, Workflow

from .driver import INSIDE, AttemptSpan, Driver
from .reply import Model

_RUN_NUMBERS = itertools.count(1)


@dataclass(frozen=True)
class Result:
    """What a sealed run has committed."""

    outputs: dict[str, Any]
    """Plain output of every node that ran to the end, by name."""
    version: int
    late_invalid: int
    """Certificates that only the close found broken; 0 unless the protocol failed."""


class Session:
    """How a workflow is to be run.

    Parameters
    ----------
    workflow : Workflow or Graph
        What to run.
    inputs : mapping
        Its inputs, JSON-like.
    policy : str or Policy
        How to recover: ``restart``, ``suffix``, ``revise``, ``wait``.
    endpoint : str, Model or None
        ``"emulated"`` starts the embedded endpoint on loopback for the time of the run; a URL is an OpenAI-compatible
        endpoint; a model is used as it is; ``None`` is for workflows that ask no model.
    n_slots : int, optional
        Attempts that may run at once.
    loss : callable, optional
        Degrades provenance; for studies.
    coalesce_s : float
        Longest time that a revision waits for others, to be planned together with them; 0 plans each at once.
    **switches : str
        Switches of the policy, when it is given by name.
    """

    def __init__(
        self,
        workflow: Workflow | Graph,
        inputs: Mapping[str, Any],
        policy: str | Policy = "revise",
        *,
        endpoint: str | Model | None = "emulated",
        n_slots: int | None = None,
        loss: Loss | None = None,
        coalesce_s: float = 0.0,
        **switches: Any,
    ) -> None:
        self.graph = workflow.graph() if isinstance(workflow, Workflow) else workflow
        self.inputs = inputs
        self.policy = policy_named(policy, **switches) if isinstance(policy, str) else policy
        self.endpoint = endpoint
        self.n_slots = n_slots
        self.loss = loss
        self.coalesce_s = coalesce_s

    def start(self) -> Run:
        """Start a run on the running event loop.

        Raises
        ------
        ReviseLabError
            No event loop is running.
        """
        return Run(self, Machine(self.graph, self.inputs, self.policy))


class Acceptance:
    """The answer to a revision, to be awaited: the recovery plan, or the error that refused it.

    A revision that is not awaited is delivered all the same.
    """

    def __init__(self, run: Run, revision: Revision, answer: asyncio.Future[RecoveryPlan | None]) -> None:
        self.revision = revision
        self._run = run
        self._answer = answer

    def __await__(self) -> Generator[Any, None, RecoveryPlan | None]:
        if self._run.id in INSIDE.get():
            raise ReentrantRevision(
                f"a node body of run {self._run.id} awaits the acceptance of revision {self.revision.id!r}, which may"
                " stop that very body - call run.revise(...) without await; it is delivered behind the current event"
            )
        return self._answer.__await__()


class Run:
    """A workflow in flight: revise it, watch it, wait for its result, ask why.

    Attributes
    ----------
    id : str
        Names the run in the endpoint's log.
    machine : Machine
        The state; look, do not touch.
    """

    def __init__(self, session: Session, machine: Machine) -> None:
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            raise ReviseLabError(
                "no event loop is running - start a run inside async code or a notebook cell"
            ) from None
        self.session = session
        self.machine = machine
        self.id = f"{session.graph.name}-{next(_RUN_NUMBERS)}"
        self.model: Model | None = None
        self.revised_s: list[tuple[str, float]] = []
        """Revision id and arrival on the clock of the event loop."""
        self._numbers = itertools.count(1)
        self._pending: list[tuple[Revision, asyncio.Future[RecoveryPlan | None]]] = []
        self._waiters: set[asyncio.Future[None]] = set()
        self._driver = Driver(
            machine, None, run_id=self.id, n_slots=session.n_slots, loss=session.loss, on_change=self._notify
        )
        self._main = loop.create_task(self._live(), name=self.id)
        self._main.add_done_callback(lambda _: self._notify())

    async def _live(self) -> None:
        """Hold the endpoint open while the run is."""
        from .endpoint import connect

        async with AsyncExitStack() as stack:
            endpoint = self.session.endpoint
            if isinstance(endpoint, str):
                self.model = await stack.enter_async_context(connect(endpoint))
            else:
                self.model = endpoint
            self._driver.model = self.model
            stack.push_async_callback(self._driver.aclose)
            self._driver.pump()
            self._notify()
            while self.machine.status in ("open", "failed"):
                await self._change()

    def _notify(self) -> None:
        waiters, self._waiters = self._waiters, set()
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)

    async def _change(self) -> None:
        """Wait for the next change of anything."""
        if self._driver.crash is not None:
            raise self._driver.crash
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters.add(waiter)
        await waiter

    # --- revising --------------------------------------------------------------------------------------------------

    def revise(
        self,
        path: str | Path | Revision,
        value: Any = ABSENT,
        *,
        op: str = "set",
        base: int | None = None,
        id: str | None = None,
    ) -> Acceptance:
        """Revise an input, or pin a place of a node's output, while the workflow runs.

        Parameters
        ----------
        path : str, tuple or Revision
            ``"request.budget"``, a tuple when a key holds a dot, or a whole revision of several changes.
        value : Any
            The new value, JSON-like.
        op : str
            ``set``, ``delete``, ``append``, ``insert``, ``remove``; ``override`` pins a place in a node's output for good,
            ``withdraw`` releases it.
        base : int, optional
            The version of the artifact that the revision was made against; refused when it is no longer current.
        id : str, optional
            The id; a second revision of the same id is acknowledged and changes nothing.

        Returns
        -------
        Acceptance
            Await it for the recovery plan; a refusal raises (:class:`StaleBase`, :class:`WorkflowClosed`,
            :class:`RevisionRefused`, :class:`PathError`) and has changed nothing.
        """
        if isinstance(path, Revision):
            revision = path
        else:
            artifact, inner = parse_path(path)
            if op not in list(Op):
                raise RevisionRefused(f"{op!r} is no operation - use one of {', '.join(Op)}")
            revision = Revision(id or self._fresh_id(), (Change(artifact, Op(op), inner, value, base),))
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[RecoveryPlan | None] = loop.create_future()
        self._driver.held += 1
        self._pending.append((revision, answer))
        if self.session.coalesce_s and len(self._pending) == 1:
            loop.call_later(self.session.coalesce_s, self._deliver)
        elif not self.session.coalesce_s:
            loop.call_soon(self._deliver)
        return Acceptance(self, revision, answer)

    def _fresh_id(self) -> str:
        return next(name for n in self._numbers if (name := f"r{n}") not in self.machine.revisions)

    def _deliver(self) -> None:
        """Hand pending revisions to the machine: each by itself, or together when the session coalesces."""
        pending, self._pending = self._pending, []
        self._driver.held -= len(pending)
        now_s = asyncio.get_running_loop().time()
        self.revised_s.extend((revision.id, now_s) for revision, _ in pending)
        if self.session.coalesce_s:
            facts = self._driver.send(ev.ReviseTogether(tuple(revision for revision, _ in pending)))
            for revision, answer in pending:
                self._answer(revision, answer, facts)
            return
        for revision, answer in pending:
            self._answer(revision, answer, self._driver.send(ev.Revise(revision)))

    def _answer(
        self, revision: Revision, answer: asyncio.Future[RecoveryPlan | None], facts: list[ev.Instruction]
    ) -> None:
        if answer.cancelled():
            return
        for fact in facts:
            if isinstance(fact, ev.Refused) and fact.revision == revision.id:
                kind = getattr(errors, fact.error, errors.RevisionRefused)
                answer.set_exception(kind(fact.message, current=fact.current))
                answer.exception()  # an acceptance that nobody awaits is no unhandled error
                return
        applied = any(isinstance(fact, ev.Accepted) and fact.revision == revision.id for fact in facts)
        answer.set_result(self.plan if applied else None)

    def cancel(self) -> None:
        """Cancel the run: nothing starts any more, and a late success changes nothing."""
        if self.machine.state == "open":
            self._driver.send(ev.Cancel())

    def reopen(self) -> Run:
        """Return a new run that goes on from this one's journal, open to revisions again.

        Raises
        ------
        ReviseLabError
            This run is not sealed.
        """
        if self.machine.state != "closed":
            raise ReviseLabError(f"run {self.id} is {self.machine.status}, not closed - revise it as it is")
        journal = self.machine.journal
        sealed = max(at for at, entry in enumerate(journal) if isinstance(entry, ev.Close))
        machine = replay(self.session.graph, journal[:sealed], self.session.policy)
        return Run(self.session, machine)

    # --- waiting ---------------------------------------------------------------------------------------------------

    async def result(self) -> Result:
        """Wait for the seal and return what was committed.

        Raises
        ------
        RunFailed
            A node exhausted its retries; the run can still be revised, and its result awaited again.
        RunCancelled
            The run was cancelled.
        """
        while True:
            status = self.machine.status
            if self._main.done() and not self._main.cancelled() and (error := self._main.exception()):
                raise error
            if status == "closed":
                await asyncio.shield(self._main)
                outputs = {name: thaw(value) for name, value in self.machine.outputs().items()}
                return Result(outputs, self.machine.version, self.machine.late_invalid)
            if status == "failed" and not self._driver.held:
                failures = self.machine.failures()
                what = "; ".join(f"{node}: {error}" for node, error in failures.items())
                raise RunFailed(
                    f"run {self.id} failed in {what} - revise what it read, or start again", failures=failures
                )
            if status == "cancelled" or self._main.done():
                raise RunCancelled(f"run {self.id} was cancelled - start it again with Session.start()")
            await self._change()

    async def watch(self) -> AsyncIterator[ev.Entry]:
        """Iterate over the journal as it grows, from its beginning to the end of the run."""
        at = 0
        while True:
            journal = self.machine.journal
            while at < len(journal):
                yield journal[at]
                at += 1
            if self._main.done():
                return
            await self._change()

    async def generating(self, node: str, n_tokens: int = 1) -> AttemptSpan:
        """Wait until an attempt of ``node`` is streaming and has received ``n_tokens`` pieces of text.

        Raises
        ------
        ReviseLabError
            The run ended before.
        """
        while True:
            for span in self._driver.spans.values():
                if span.node == node and span.outcome == "running" and span.n_tokens >= n_tokens:
                    return span
            if self._main.done():
                raise ReviseLabError(f"run {self.id} ended before {node!r} had received {n_tokens} tokens")
            await self._change()

    @property
    def ended(self) -> bool:
        """Whether nothing more will happen."""
        return self._main.done()

    # --- looking ---------------------------------------------------------------------------------------------------

    @property
    def plan(self) -> RecoveryPlan | None:
        """The recovery plan of the last revision."""
        return self.machine.plan

    @property
    def journal(self) -> list[ev.Entry]:
        """Everything that happened, in order."""
        return self.machine.journal

    @property
    def spans(self) -> tuple[AttemptSpan, ...]:
        """Every attempt with its times and outcome, in order of start."""
        return tuple(self._driver.spans.values())

    def explain(self, node: str) -> str:
        """Say in a sentence what the last revision meant for a node, and why."""
        run = self.machine.runs.get(node)
        if run is None:
            raise ReviseLabError(f"run {self.id} has no node {node!r} - it has {', '.join(self.machine.runs)}")
        stands = f"{node} is {run.status} after {run.n_attempts} attempt{'s' * (run.n_attempts != 1)}"
        plan = self.plan
        if plan is None:
            return f"{stands}; nothing has been revised."
        for each in plan.nodes:
            if each.node == node:
                why = each.evidence or f"it hangs on {', '.join(each.until)}"
                return f"{stands}; {plan.revision} told it to {each.action}, because {why}."
        return f"{stands}; {plan.revision} changed nothing that it read, directly or through its parents."

    def audit(self) -> list[Finding]:
        """Return what the independent auditor finds in the journal: nothing, unless the protocol failed."""
        return audit(self.machine.journal)

    async def check_oracle(self) -> tuple[Truth, list[str]]:
        """Compare the committed outputs with a fresh run on the final inputs; the list of differences must be empty.

        Calls whose answer no committed attempt has seen are counted as ``oracle_fresh``; they cannot be answered after
        the run and raise.
        """

        async def fresh(ask: Ask) -> Value:
            raise ReviseLabError(f"the oracle asks what no committed attempt asked: {ask.node} {ask.request!r}")

        machine = self.machine
        truth = await oracle(machine.graph, machine.inputs, choices(machine), fresh, machine.overrides)
        return truth, differences(machine, truth)

    def drawing(self) -> tuple[list[tuple[str, str, str, str]], list[tuple[str, str]]]:
        """Return the nodes as (name, kind, state, note) and the edges, as :mod:`revise_lab.draw` takes them."""
        actions = {each.node: each.action for each in self.plan.nodes} if self.plan else {}
        runs = sorted(self.machine.runs.values(), key=lambda run: run.position)
        nodes = [(run.name, str(run.node.kind), run.status, str(actions.get(run.name, ""))) for run in runs]
        edges = [(parent.name, run.name) for run in runs for parent in run.parents]
        return nodes, edges

    def _repr_html_(self) -> str:
        from revise_lab import draw

        nodes, edges = self.drawing()
        return draw.workflow_svg(nodes, edges, title=f"{self.id}: {self.machine.status}")

    def __repr__(self) -> str:
        return f"Run({self.id}, {self.session.policy.name}, {self.machine.status}, version {self.machine.version})"
