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
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from revise_lab import errors
from revise_lab.audit.auditor import Finding, audit
from revise_lab.core.body import Ask, Loss
from revise_lab.core.machine import Machine, replay
from revise_lab.core.oracle import Truth, choices, differences, oracle, receipts_of
from revise_lab.core.plan import Action, Policy, RecoveryPlan
from revise_lab.errors import (
    RefusedCombination,
    ReviseLabError,
    RevisionRefused,
    RunBlocked,
    RunCancelled,
    RunFailed,
)
from revise_lab.policies import policy as policy_named
from revise_lab.records import event as ev
from revise_lab.records.effect import Answer as Said
from revise_lab.records.effect import EffectState
from revise_lab.records.revision import Change, Op, Revision
from revise_lab.records.selector import Path as Place
from revise_lab.records.selector import parse_path
from revise_lab.records.value import ABSENT, Value, freeze, thaw
from revise_lab.records.workflow import Graph, Workflow

from .acceptance import Acceptance, check_outside
from .dispatch import Authorise
from .driver import AttemptSpan, Driver, Outside
from .journal import Journal, JournalError
from .reply import Model
from .target import Target

_RUN_NUMBERS = itertools.count(1)


@dataclass(frozen=True)
class Result:
    """What a sealed run has committed."""

    outputs: dict[str, Any]
    """Plain output of every node that ran to the end, by name."""
    version: int
    late_invalid: int
    """Certificates that only the close found broken; 0 unless the protocol failed."""
    effects: dict[str, dict[str, Any]]
    """Plain payload of every effect that is out in the world, by node and slot."""


class Session:
    """How a workflow is to be run.

    Parameters
    ----------
    workflow : Workflow or Graph
        What to run.
    inputs : mapping
        Its inputs, JSON-like.
    policy : str or Policy
        How to recover: ``restart``, ``suffix``, ``revise``, ``revise_plus``, ``wait``, ``absorber``.
    endpoint : str, Model or None
        ``"emulated"`` starts the embedded endpoint on loopback for the time of the run; a URL is an OpenAI-compatible
        endpoint; a model is used as it is; ``None`` is for workflows that ask no model.
    n_slots : int, optional
        Attempts that may run at once.
    loss : callable, optional
        Degrades provenance; for studies.
    coalesce_s : float
        Longest time that a revision waits for others, to be planned together with them; 0 plans each at once.
    targets : mapping of str to Target
        Where effects are written, by the name under which nodes stage them.
    authorise : callable, optional
        ``authorise(intent, effect)`` says, or resolves to, whether a staged effect may leave; by default all may.
    effect_timeout_s : float
        How long a target may take to answer; then it is asked what became of the call.
    journal : str or Path, optional
        File in which the run is kept, so that :meth:`resume` can go on with it when this process has died.
    redact : callable, optional
        See :class:`revise_lab.runtime.journal.Journal`.
    name : str, optional
        What targets know the run by: the first part of the keys of its effects (R11), by default the name of the workflow.
        Runs that share a target need names of their own, or the second finds its effects done already.
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
        targets: Mapping[str, Target] = MappingProxyType({}),
        authorise: Authorise | None = None,
        effect_timeout_s: float = 30.0,
        journal: str | Path | None = None,
        redact: Callable[[Any], Any] | None = None,
        name: str | None = None,
        **switches: Any,
    ) -> None:
        graph = workflow.graph() if isinstance(workflow, Workflow) else workflow
        self.graph = graph if name is None else replace(graph, name=name)
        self.inputs = inputs
        how = policy_named(policy, **switches) if isinstance(policy, str) else policy
        if authorise is not None:
            how = how._replace(switches=replace(how.switches, approval="on"))
        elif how.switches.approval == "on":
            raise RefusedCombination("approval='on' and nobody to ask - pass authorise=, a callable")
        if n_slots is not None and n_slots < 1:
            raise RefusedCombination(f"n_slots={n_slots} and nothing could ever start - give at least 1, or None")
        self.policy = how
        self.endpoint = endpoint
        self.n_slots = n_slots
        self.loss = loss
        self.coalesce_s = coalesce_s
        self.journal, self.redact = journal, redact
        self.outside = Outside(targets, authorise, effect_timeout_s)

    def start(self) -> Run:
        """Start a run on the running event loop.

        Raises
        ------
        ReviseLabError
            No event loop is running, or the journal holds a run already.
        """
        return Run(self, Machine(self.graph, self.inputs, self.policy), self.new_journal())

    def new_journal(self) -> Journal | None:
        """Open the file in which a new run is kept, where there is to be one.

        Raises
        ------
        ReviseLabError
            It holds a run already.
        """
        if self.journal is None:
            return None
        journal = Journal(self.journal, redact=self.redact)
        if journal.length:
            journal.close()
            raise ReviseLabError(
                f"{self.journal} holds a run already - go on with it by resume(), or name another file"
            )
        return journal

    def resume(self, path: str | Path | None = None) -> Run:
        """Go on with a run whose process has died, from its journal; inputs and revisions come from there.

        Parameters
        ----------
        path : str or Path, optional
            The journal; by default that of the session.

        Raises
        ------
        JournalError
            It is locked, damaged or redacted, or holds no run.
        ReviseLabError
            It is of another workflow, or of a policy with other switches.
        """
        journal = self._opened(path)
        try:
            if not journal.length:
                raise JournalError(f"{journal.path} holds no run, and nothing has left that it could know of - start()")
            machine = replay(self.graph, journal.events(), self.policy)
            if len(machine.journal) < journal.length:
                raise JournalError(
                    f"{journal.path} has {journal.length} entries, and this workflow makes {len(machine.journal)} of them"
                    " - resume it with the workflow that wrote it"
                )
        except ReviseLabError:
            journal.close()
            raise
        return Run(self, machine, journal, resumed=True)

    def replay(self, path: str | Path | None = None, until: int | None = None) -> Machine:
        """Return the machine as it was when the entry at sequence number ``until`` had not yet been written."""
        with self._opened(path) as journal:
            return replay(self.graph, journal.entries(until), self.policy)

    def _opened(self, path: str | Path | None) -> Journal:
        where = path or self.journal
        if where is None:
            raise ReviseLabError("the session has no journal - pass the path of one")
        if not Path(where).exists():
            raise ReviseLabError(f"there is no journal {where} - start a run with Session(..., journal={str(where)!r})")
        return Journal(where, redact=self.redact)


class Run:
    """A workflow in flight: revise it, watch it, wait for its result, ask why.

    Attributes
    ----------
    id : str
        Names the run in the endpoint's log.
    machine : Machine
        The state; look, do not touch.
    """

    def __init__(
        self, session: Session, machine: Machine, journal: Journal | None = None, *, resumed: bool = False
    ) -> None:
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
            machine,
            None,
            run_id=self.id,
            n_slots=session.n_slots,
            loss=session.loss,
            on_change=self._notify,
            outside=session.outside._replace(journal=journal),
        )
        self._driver.pumps = False  # a revision may come before the endpoint is there
        self._resumed, self._file = resumed, journal
        self._main = loop.create_task(self._live(), name=self.id)
        self._main.add_done_callback(lambda _: self._driver.detach())  # even if nothing ever began
        self._main.add_done_callback(lambda _: self._notify())

    async def _live(self) -> None:
        """Hold the endpoint open while the run is."""
        from .endpoint import connect

        async with AsyncExitStack() as stack:
            if self._file is not None:
                stack.callback(self._driver.detach)
            endpoint = self.session.endpoint
            if isinstance(endpoint, str):
                self.model = await stack.enter_async_context(connect(endpoint))
            else:
                self.model = endpoint
            self._driver.model = self.model
            stack.push_async_callback(self._driver.aclose)
            self._driver.pumps = True
            if self._resumed and (self.machine.state in ("open", "closing") or self.machine.effects_move):
                self._driver.send(ev.Recover())
            self._driver.pump()
            self._notify()
            while self.machine.state in ("open", "closing") or self.machine.effects_move:
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
        path: str | Place | Revision,
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
        self._check_loop()
        loop = self._main.get_loop()
        answer: asyncio.Future[RecoveryPlan | None] = loop.create_future()
        self._driver.held += 1
        self._pending.append((revision, answer))
        if self.session.coalesce_s and len(self._pending) == 1:
            loop.call_later(self.session.coalesce_s, self._deliver)
        elif not self.session.coalesce_s:
            loop.call_soon(self._deliver)
        return Acceptance(self.id, revision, answer)

    def _check_loop(self) -> None:
        """Refuse to be called from another thread: a run is changed in one piece, on its own event loop."""
        try:
            here: asyncio.AbstractEventLoop | None = asyncio.get_running_loop()
        except RuntimeError:
            here = None
        if here is not self._main.get_loop():
            raise ReviseLabError(
                f"run {self.id} is changed on its own event loop only - from a thread, hand the call to it with"
                " loop.call_soon_threadsafe"
            )

    def _fresh_id(self) -> str:
        return next(name for n in self._numbers if (name := f"r{n}") not in self.machine.revisions)

    def _deliver(self) -> None:
        """Hand pending revisions to the machine: each by itself, or together when the session coalesces."""
        pending, self._pending = self._pending, []
        self._driver.held -= len(pending)
        now_s = asyncio.get_running_loop().time()
        self.revised_s.extend((revision.id, now_s) for revision, _ in pending)
        groups: list[list[tuple[Revision, asyncio.Future[RecoveryPlan | None]]]] = []
        # of two with one id the second is a duplicate, and has to come after the first
        for revision, answer in pending:
            together = self.session.coalesce_s and groups and all(each.id != revision.id for each, _ in groups[-1])
            groups = groups if together else [*groups, []]
            groups[-1].append((revision, answer))
        for group in groups:
            revisions = tuple(revision for revision, _ in group)
            event = ev.ReviseTogether(revisions) if self.session.coalesce_s else ev.Revise(*revisions)
            try:
                if self.ended and self.machine.state in ("open", "closing"):
                    raise errors.WorkflowClosed(
                        f"run {self.id} ended in an error or was stopped - resume it, or start again"
                    )
                facts = self._driver.send(event)
            except Exception as error:  # the journal cannot be written: the run ends, and whoever waits is told
                self._driver.fail(error)
                for _, answer in group:
                    answer.set_exception(error)
                    answer.exception()
                continue
            for revision, answer in group:
                self._answer(revision, answer, facts)

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
        """Cancel the run: nothing starts or leaves any more, and a late success changes nothing; what is out stays."""
        if self.machine.state in ("open", "closing"):
            self._check_loop()
            self._driver.send(ev.Cancel())

    def resolve(self, node: str, slot: str, answer: str, receipt: Any = None) -> None:
        """Tell the run what a person has found out about a blocked effect.

        Parameters
        ----------
        node, slot : str
            The effect.
        answer : str
            ``landed``, ``absent`` or ``undone``, as it is at the target now.
        receipt : Any
            What confirms it, JSON-like, where it has landed.
        """
        if answer not in (known := (Said.LANDED, Said.ABSENT, Said.UNDONE)):
            raise ReviseLabError(f"{answer!r} says nothing about effect {node}/{slot} - say one of {', '.join(known)}")
        intent = next((i for i, _, _ in self.machine.residue() if (i.node, i.slot) == (node, slot)), None)
        if intent is None:
            raise ReviseLabError(f"effect {node}/{slot} is not blocked - residue() lists what is")
        live = self.machine.outboxes[node][slot].live
        if live is None or live.state is not EffectState.BLOCKED:
            raise ReviseLabError(f"effect {node}/{slot} has not left - revise what its node reads, or cancel the run")
        self._check_loop()
        self._driver.send(ev.Answered(intent, Said(answer), freeze(receipt), "a person says so"))

    def reopen(self) -> Run:
        """Return a new run that goes on from this one's journal, open to revisions again.

        Raises
        ------
        ReviseLabError
            This run is not sealed.
        """
        if self.machine.state != "closed":
            raise ReviseLabError(f"run {self.id} is {self.machine.status}, not closed - revise it as it is")
        session = self.session
        machine = replay(session.graph, self.machine.journal, session.policy)
        machine.handle(ev.Reopen())
        file = Journal(self._file.path, redact=session.redact) if self._file else None
        return Run(session, machine, file)

    # --- waiting ---------------------------------------------------------------------------------------------------

    async def result(self) -> Result:
        """Wait for the seal and return what was committed.

        Raises
        ------
        RunFailed
            A node exhausted its retries; the run can still be revised, and its result awaited again.
        RunBlocked
            An effect needs a person; it is listed. The run goes on when it is resolved or revised.
        RunCancelled
            The run was cancelled.
        ReentrantRevision
            A node body of the run awaits it, and it would wait for the body.
        """
        check_outside(self.id)
        while True:
            status = self.machine.status
            if self._main.done() and not self._main.cancelled() and (error := self._main.exception()):
                raise error
            if status == "closed":
                await asyncio.shield(self._main)
                outputs = {name: thaw(value) for name, value in self.machine.outputs().items()}
                return Result(outputs, self.machine.version, self.machine.late_invalid, self.effects())
            if status == "failed" and not self._driver.held:
                failures = self.machine.failures()
                what = "; ".join(f"{node}: {error}" for node, error in failures.items())
                raise RunFailed(
                    f"run {self.id} failed in {what} - revise what it read, or start again", failures=failures
                )
            if status == "blocked" and not self._driver.held:
                residue = [f"{intent.node}/{intent.slot}: {why}" for intent, _, why in self.machine.residue()]
                raise RunBlocked(
                    f"run {self.id} waits for a person: {'; '.join(residue)} - revise, or, where it has left, settle it at"
                    " the target and tell the run with resolve()",
                    residue=residue,
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

    def effects(self) -> dict[str, dict[str, Any]]:
        """Return the payload of every effect that is confirmed to be out in the world, by node and slot."""
        live = self.machine.live_effects()
        return {node: {slot: thaw(each.payload) for slot, each in slots.items()} for node, slots in live.items()}

    def residue(self) -> tuple[tuple[Any, Any, str], ...]:
        """Return the effects with which only a person can go on, and why."""
        return self.machine.residue()

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
                stale = each.evidence is not None and each.action in (Action.CONTINUE, Action.REUSE)
                return (
                    f"{stands}; {plan.revision} told it to {each.action}, {'although' if stale else 'because'} {why}."
                )
        return f"{stands}; {plan.revision} changed nothing that it read, directly or through its parents."

    def audit(self) -> list[Finding]:
        """Return what the independent auditor finds: nothing, unless the protocol failed, or checks nothing."""
        return audit(self.machine.journal)

    async def check_oracle(self) -> tuple[Truth, list[str]]:
        """Compare the committed outputs with a fresh run on the final inputs; the list of differences must be empty.

        Calls whose answer no committed attempt has seen are counted as ``oracle_fresh``; they cannot be answered after
        the run and raise.
        """

        async def fresh(ask: Ask) -> Value:
            raise ReviseLabError(f"the oracle asks what no committed attempt asked: {ask.node} {ask.request!r}")

        machine = self.machine
        known = choices(machine), fresh, machine.overrides, receipts_of(machine)
        truth = await oracle(machine.graph, machine.inputs, *known)
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
