"""Many workflows at once on real endpoints, on the clock: the open loop of :mod:`.serving_run` over HTTP.

Arrivals, tenants, revisions and lengths are those of the emulated runs. A prompt is padded with words to about its length in
tokens, and starts with words that only its tenant has; an answer is asked for in full (``ignore_eos``) and goes on as a
short hash of its text, so that prompts keep their lengths and a stale answer shows. Counted is what this side sees: of a
call that was stopped, the pieces that had come.
"""

from __future__ import annotations

import asyncio
import math
import random
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from typing import Any

from revise_lab.core.plan import Policy
from revise_lab.errors import ConfigError, ReviseLabError, RevisionRefused
from revise_lab.runtime.endpoint import OpenAIModel, connect
from revise_lab.runtime.reply import ModelReply, ModelRequest, OnToken
from revise_lab.runtime.serving_run import Job, Lengths, Sample, ServingRun, WorkflowRow, wave_of
from revise_lab.runtime.session import Run, Session
from revise_lab.serving.text import WORDS

FULL_LENGTH = {"ignore_eos": True, "chat_template_kwargs": {"enable_thinking": False}}
"""What vLLM and SGLang are asked besides: the whole length, and no thinking before it."""


@dataclass(slots=True, eq=False)
class _Call:
    attempt: str
    asked_s: float
    prompt_tokens: int
    first_s: float = math.inf
    end_s: float = math.inf
    """The answer, or the abort, as the workflow sees it."""
    aborted: bool = False
    cached_tokens: int = 0
    n_tokens: int = 0
    before_tokens: int = 0
    """Output that existed at the revision."""


@dataclass(eq=False)
class _Endpoints:
    """The endpoints with what they may be asked: so many calls at once, and so many in all."""

    models: Sequence[OpenAIModel]
    slots: asyncio.Semaphore
    max_requests: float
    abort_delay_s: float | None
    pinned: bool
    began_s: float
    spent: asyncio.Future[None]
    n_requests: int = 0
    open: Counter[int] = field(default_factory=Counter)
    left: set[asyncio.Task[ModelReply]] = field(default_factory=set)
    """Requests that nobody waits for any more and that go on, as long as an abort is delayed."""
    call_s: float = 1.0
    """What the last call has taken."""

    def now_s(self) -> float:
        return asyncio.get_running_loop().time() - self.began_s

    async def ask(self, tenant: str, call: _Call, request: ModelRequest) -> ModelReply:
        async with self.slots:
            self.n_requests += 1
            if self.n_requests > self.max_requests:
                error = ConfigError(
                    f"the budget of {self.max_requests:,} requests is spent before all workflows have ended - raise"
                    " max_requests, or ask for fewer workflows"
                )
                if not self.spent.done():
                    self.spent.set_exception(error)
                raise error
            at = int(tenant.split()[-1]) % len(self.models) if self.pinned else 0
            at = at if self.pinned else min(range(len(self.models)), key=lambda i: self.open[i])
            self.open[at] += 1

            def heard(_: str) -> None:
                call.n_tokens += 1
                call.first_s = min(call.first_s, self.now_s())

            try:
                reply = await self.models[at].complete(request, on_token=heard)
            finally:
                self.open[at] -= 1
            usage = reply.usage
            call.n_tokens = usage.completion_tokens or call.n_tokens
            call.prompt_tokens = usage.prompt_tokens or call.prompt_tokens
            call.cached_tokens = usage.cached_tokens or 0
            return reply

    def leave(self, asking: asyncio.Task[ModelReply]) -> None:
        """Close a stream whose answer is not wanted, now or when the delay is over."""
        self.left.add(asking)
        asking.add_done_callback(self.left.discard)
        asking.add_done_callback(lambda done: done.cancelled() or done.exception())
        if self.abort_delay_s is not None:
            asyncio.get_running_loop().call_later(self.abort_delay_s, asking.cancel)


class _Workflow:
    """One workflow: the model that its run asks, and what it counts."""

    def __init__(self, endpoints: _Endpoints, job: Job, policy: str | Policy, lengths: Lengths) -> None:
        self.endpoints, self.job, self.lengths = endpoints, job, lengths
        self.made: list[_Call] = []
        self.wrong = ["unfinished"]
        self.revised_s = self.end_s = math.inf
        self._wave, self._part = wave_of(job) if job.revision is not None else (set[str](), 0.0)
        self._revising: asyncio.Task[None] | None = None
        self.run: Run = Session(job.graph, job.inputs, policy, endpoint=self).start()

    async def live(self) -> None:
        """Wait for the end, and compare it with a fresh run on the final inputs."""
        try:
            await self.run.result()
            self.end_s = self.endpoints.now_s()
            self.wrong = (await self.run.check_oracle())[1]
        except ReviseLabError as error:
            self.wrong = [str(error)]
        finally:
            if self._revising is not None:
                self._revising.cancel()
            self.run.cancel()

    async def complete(self, request: ModelRequest, *, on_token: OnToken | None = None) -> ModelReply:
        """Answer a call of the run with a short hash of what an endpoint says."""
        ends, job = self.endpoints, self.job
        call = _Call(request.attempt, ends.now_s(), self.lengths.prompt_tokens)
        self.made.append(call)
        if request.node in self._wave:
            self._wave = set()
            self._revising = asyncio.get_running_loop().create_task(self._revise(self._part * ends.call_s))
        max_tokens = self.lengths.output_tokens(request.node, request.max_tokens or 1, job)
        prompt = padded(request.prompt or "", job, self.lengths)
        full = replace(request, prompt=prompt, max_tokens=max_tokens, extra=FULL_LENGTH)
        asking = asyncio.get_running_loop().create_task(ends.ask(job.tenant, call, full))
        try:
            reply = await asyncio.shield(asking)
        except asyncio.CancelledError:
            call.aborted = True
            ends.leave(asking)
            raise
        finally:
            call.end_s = ends.now_s()
        ends.call_s = call.end_s - call.asked_s
        short = blake2b(reply.text.encode(errors="surrogatepass"), digest_size=8).hexdigest()
        return replace(reply, text=short)

    async def aclose(self) -> None:
        """Leave the endpoints open: others ask them as well."""

    async def _revise(self, delay_s: float) -> None:
        await asyncio.sleep(delay_s)
        assert self.job.revision is not None
        self.revised_s = self.endpoints.now_s()
        for call in self.made:
            call.before_tokens = call.n_tokens
        try:
            await self.run.revise(self.job.revision)
        except RevisionRefused:  # it has ended in the meantime
            self.revised_s = math.inf

    def row(self) -> WorkflowRow:
        """Count everything up."""
        job, finished, revised = self.job, self.end_s < math.inf, self.revised_s < math.inf
        kept = {run.current.id for run in self.run.machine.runs.values() if run.current}
        wasted = [call for call in self.made if call.attempt not in kept]
        return WorkflowRow(
            job.number,
            job.tenant,
            job.arrival_s,
            "finished" if finished else "unfinished",
            self.end_s if finished else math.nan,
            self.end_s - job.arrival_s,
            revised,
            self.revised_s - job.arrival_s if revised else math.nan,
            not self.wrong,
            sum(line.startswith("effects") for line in self.wrong),
            sum(call.aborted for call in self.made),
            sum(call.n_tokens + (call.prompt_tokens if call.n_tokens else 0) for call in wasted),
            *self._work(-math.inf),
            *self._work(self.revised_s),
        )

    def _work(self, since_s: float) -> tuple[int, int, int, int, float]:
        calls = [call for call in self.made if call.end_s >= since_s and since_s < math.inf]
        begun = [call for call in calls if since_s <= call.first_s < math.inf]
        return (
            sum(call.asked_s >= since_s for call in calls),
            sum(call.prompt_tokens for call in begun),
            sum(call.cached_tokens for call in begun),
            sum(call.n_tokens - (call.before_tokens if since_s > 0 else 0) for call in calls),
            math.fsum(min(call.end_s, self.endpoints.now_s()) - max(call.asked_s, since_s) for call in calls),
        )


def padded(prompt: str, job: Job, lengths: Lengths) -> str:
    """Return a prompt of about the wanted length, a word counting as a token; only calls of a tenant share its start."""
    shared = random.Random(job.tenant).choices(WORDS, k=lengths.shared_tokens)
    own = [f"{job.number}", *prompt.split()]
    fill = max(0, lengths.prompt_tokens - lengths.shared_tokens - len(own))
    return " ".join([*shared, *own, *random.Random(f"{job.number} {prompt}").choices(WORDS, k=fill)])


async def serve_live(
    arrivals: Iterable[Job],
    endpoint: str,
    policy: str | Policy,
    lengths: Lengths,
    *,
    max_concurrent: int = 256,
    max_requests: float = math.inf,
    abort_delay_s: float | None = 0.0,
    pinned: bool = False,
    sample_s: float = math.inf,
) -> ServingRun:
    """Serve workflows as they arrive on real endpoints, and return a row for each.

    Parameters
    ----------
    arrivals : iterable of Job
        In order of arrival; a second of theirs is a second.
    endpoint : str
        Base URL, or several with commas between them; a call goes to the one with the fewest calls of ours.
    policy : str or Policy
        How to recover.
    lengths : Lengths
        Tokens of the calls.
    max_concurrent : int
        Calls at once; others wait here, and their waiting counts.
    max_requests : float
        Calls in all.
    abort_delay_s : float or None
        How long a stream is kept open after its answer is not wanted any more; None to its end.
    pinned : bool
        Whether a tenant stays at one endpoint.
    sample_s : float
        Time between samples of the load; none by default.

    Raises
    ------
    ConfigError
        The budget of requests is spent.
    EndpointError
        An endpoint does not answer at all.
    """
    loop = asyncio.get_running_loop()
    async with AsyncExitStack() as stack:
        models = [await stack.enter_async_context(connect(url.strip())) for url in endpoint.split(",")]
        ends = _Endpoints(
            models,
            asyncio.Semaphore(max_concurrent),
            max_requests,
            abort_delay_s,
            pinned,
            loop.time(),
            loop.create_future(),
        )
        workflows: list[_Workflow] = []
        samples: list[Sample] = []

        async def arrive() -> None:
            async with asyncio.TaskGroup() as living:
                for job in arrivals:
                    await asyncio.sleep(job.arrival_s - ends.now_s())
                    workflows.append(_Workflow(ends, job, policy, lengths))
                    living.create_task(workflows[-1].live())
            await asyncio.gather(*ends.left, return_exceptions=True)

        async def sample() -> None:
            for n in range(1_000_000_000):
                await asyncio.sleep(n * sample_s - ends.now_s())
                samples.append(_sample(n * sample_s, workflows))

        running = [loop.create_task(arrive())] + ([loop.create_task(sample())] if sample_s < math.inf else [])
        try:
            await asyncio.wait([running[0], ends.spent], return_when=asyncio.FIRST_COMPLETED)
            (ends.spent if ends.spent.done() else running[0]).result()
        finally:
            ends.spent.cancel()
            for task in (*running, *ends.left):
                task.cancel()
            await asyncio.gather(*running, *ends.left, return_exceptions=True)
        rows = [workflow.row() for workflow in workflows]
        return ServingRun(rows, samples, ends.n_requests, ends.now_s())


def _sample(at_s: float, workflows: Sequence[_Workflow]) -> Sample:
    alive = [workflow for workflow in workflows if workflow.run.machine.state == "open"]
    calls = [call for workflow in alive for call in workflow.made if call.end_s == math.inf]
    begun: list[Any] = [call for call in calls if call.first_s < math.inf]
    used = sum(call.prompt_tokens + call.n_tokens for call in begun)
    return Sample(at_s, len(alive), len(calls) - len(begun), len(begun), used, 0, math.nan)
