"""Many workflows at once on one cluster, in virtual time: the machine and the bodies of every other driver.

Arrivals are an open loop: they do not wait for anybody. A call goes to the serving engine with lengths instead of words;
its answer is a short hash of its prompt, so that a stale prompt shows as a wrong output. When the machine stops an
attempt its request is aborted there, and what it still costs until its room is free is counted. Nothing that a policy
does moves an arrival, a tenant, a length or a revision: they hang on the seed and the number of the workflow.
"""

from __future__ import annotations

import gc
import heapq
import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from hashlib import blake2b
from statistics import NormalDist
from typing import Any, NamedTuple

import numpy as np

from revise_lab.core.body import Ask
from revise_lab.core.machine import Machine
from revise_lab.core.oracle import Truth, choices, differences, drive, oracle
from revise_lab.core.plan import Policy
from revise_lab.errors import ReviseLabError
from revise_lab.policies import policy as policy_named
from revise_lab.records.revision import Revision
from revise_lab.records.value import Value, digest, freeze
from revise_lab.records.workflow import Graph
from revise_lab.runtime.simulator import Simulator
from revise_lab.serving.cost import step_s
from revise_lab.serving.engine import Cluster
from revise_lab.serving.requests import Request, Served


class Job(NamedTuple):
    """A workflow that arrives; ``moment`` in [0, 1) says how far through its run its revision comes."""

    number: int
    arrival_s: float
    tenant: str
    graph: Graph
    inputs: Mapping[str, Any]
    revision: Revision | None = None
    moment: float = 0.0


Make = Callable[[int, np.random.Generator], tuple[Graph, Mapping[str, Any], Revision]]


def jobs(
    seed: int, n: int, rate_per_s: float, make: Make, *, n_tenants: int = 64, revised_share: float = 0.5
) -> Iterator[Job]:
    """Yield workflows as they arrive: Poisson, tenants at random, a share of them revised once.

    Draws are nested: who is revised at one share is revised at every higher one, and a rate only stretches the arrivals.

    Parameters
    ----------
    seed, n : int
        Seed of everything, and number of workflows.
    rate_per_s : float
        Arrivals a second.
    make : callable
        Gives graph, inputs and revision of a workflow, from its number and a generator of its own.
    """
    at_s = 0.0
    for number in range(n):
        rng = np.random.default_rng([seed, number])
        at_s += float(rng.exponential()) / rate_per_s
        tenant, coin, moment = int(rng.integers(n_tenants)), float(rng.random()), float(rng.random())
        graph, inputs, revision = make(number, rng)
        yield Job(number, at_s, f"tenant {tenant}", graph, inputs, revision if coin < revised_share else None, moment)


@dataclass(frozen=True)
class Lengths:
    """Tokens of a call; the output is what the body asks for, times the factor of its node.

    Attributes
    ----------
    prompt_tokens, shared_tokens : int
        The whole prompt, and its start that is the same in all calls of a tenant.
    cv : float
        Coefficient of variation of outputs (lognormal, mean 1), by workflow and node, so the same under every policy.
    factors : mapping
        Node to the factor of its output.
    """

    prompt_tokens: int = 2000
    shared_tokens: int = 0
    cv: float = 0.0
    factors: Mapping[str, float] = field(default_factory=dict)

    def output_tokens(self, node: str, max_tokens: int, job: Job) -> int:
        """Return how long the answer to a call is to be."""
        tokens = max_tokens * self.factors.get(node, 1.0)
        if self.cv:
            spread = math.sqrt(math.log1p(self.cv**2))
            number = int.from_bytes(blake2b(f"{job.number}/{node}".encode(), digest_size=6).digest(), "big")
            tokens *= math.exp(spread * NormalDist().inv_cdf((number + 0.5) / 2**48) - spread**2 / 2)
        return max(1, round(tokens))

    def request(self, id: int, ask: Ask, job: Job, prompt_key: str) -> Request:
        """Return what the engine is asked; prompts of different workflows share only their start."""
        tokens = self.output_tokens(ask.node, ask.request["max_tokens"], job)
        own = (f"{job.number}/{prompt_key}", self.prompt_tokens - self.shared_tokens)
        prefix = (("shared", self.shared_tokens), own) if self.shared_tokens else (own,)
        return Request(id, self.prompt_tokens, tokens, job.tenant, prefix)


class WorkflowRow(NamedTuple):
    """What became of one workflow.

    ``status`` is ``finished``, ``unfinished`` or ``rejected``; the last two miss every objective. ``_after`` counts from
    the revision to the correct end and is 0 where none took effect: what calls in flight had cost before stays out.
    """

    workflow: int
    tenant: str
    arrival_s: float
    status: str = "rejected"
    end_s: float = math.nan
    latency_s: float = math.inf
    revised: bool = False
    revision_s: float = math.nan
    """From the arrival."""
    correct: bool = False
    stale_effects: int = 0
    n_aborted: int = 0
    wasted_tokens: int = 0
    """Prefilled or decoded by calls that the final result does not use, until their room was free."""
    n_calls: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    wall_s: float = 0.0
    """Sum over calls of the time from asking to the answer, or to the abort."""
    n_calls_after: int = 0
    prompt_after_tokens: int = 0
    cached_after_tokens: int = 0
    completion_after_tokens: int = 0
    wall_after_s: float = 0.0

    def in_slo(self, slo_s: float) -> bool:
        """Say whether it ended correct and in time."""
        return self.correct and self.latency_s <= slo_s


class Sample(NamedTuple):
    """The cluster at one time, summed over its replicas."""

    at_s: float
    n_in_flight: int
    n_queued: int
    n_running: int
    used_tokens: int
    idle_tokens: int
    busy_s: float


@dataclass
class ServingRun:
    """What happened to all of them."""

    rows: list[WorkflowRow]
    samples: list[Sample]
    n_events: int
    """Ends of calls, arrivals and revisions that were handled."""
    end_s: float


@dataclass(slots=True, eq=False)
class _Call:
    workflow: _Workflow
    attempt: str
    served: Served
    answer: Value
    end_s: float = math.inf
    before_tokens: int = 0
    """Output that existed at the revision."""


def answer_shortly(ask: Ask) -> Value:
    """Answer a model call by a short hash of its prompt and seed: what a study of timing needs of the words."""
    text = f"{ask.request['seed']}\0{ask.request['prompt']}"
    return blake2b(text.encode(errors="surrogatepass"), digest_size=8).hexdigest()


class _Workflow(Simulator):
    """One workflow: its machine, its bodies, and its calls on the cluster."""

    def __init__(self, fleet: _Fleet, job: Job) -> None:
        super().__init__(job.graph, job.inputs, fleet.policy, duration_s=lambda ask: 0.0, answer=answer_shortly)
        self.fleet, self.job = fleet, job
        self.made: list[_Call] = []
        self.open: dict[str, _Call] = {}
        self.n_pending = 0
        self.revised_s = self.end_s = math.inf
        self._now_s = job.arrival_s
        self._last_s = fleet.call_s
        self._wave: set[str] = set()
        """Nodes of the step during which the revision comes, until one of them starts."""
        if job.revision is not None and fleet.revise_within_s is not None:
            self._at(job.arrival_s + job.moment * fleet.revise_within_s, job.revision)
        elif job.revision is not None:
            self._wave, self._part = wave_of(job)
        self._start_ready()

    def step(self, now_s: float, item: Any) -> None:
        if self.end_s <= now_s:
            return
        self._now_s = now_s
        if isinstance(item, Revision):
            self._arrivals += 1
            self.revised_s = now_s
            for call in self.open.values():
                call.before_tokens = self.fleet.cluster.tokens_at(call.served.request.id, now_s)
        self._step(item)
        if self._sealed():
            self.end_s = now_s

    def _at(self, at_s: float, item: Any) -> None:
        self.fleet.at(at_s, self, item)

    def _call(self, ask: Ask) -> None:
        if ask.kind != "model":
            super()._call(ask)
            return
        call = self.open[ask.attempt] = self.fleet.submit(self, ask, self._now_s)
        self.made.append(call)
        if ask.node in self._wave:
            self._wave = set()
            self._at(self._now_s + self._part * self._last_s, self.job.revision)

    def _close_span(self, attempt: str, running: Any, outcome: str) -> None:
        super()._close_span(attempt, running, outcome)
        call = self.open.pop(attempt, None)
        if call is None:
            return
        call.end_s = self._now_s
        if outcome == "aborted":
            self.fleet.cluster.abort(self._now_s, call.served.request.id)
        else:
            self._last_s = self.fleet.call_s = self._now_s - call.served.submitted_s

    def row(self) -> WorkflowRow:
        """Count everything up."""
        finished = self.end_s < math.inf
        wrong = differences(self.machine, self.fleet.oracle.truth(self.machine)) if finished else ["unfinished"]
        kept = {run.current.id for run in self.machine.runs.values() if run.current}
        wasted = [call.served for call in self.made if call.attempt not in kept]
        arrival_s, revised = self.job.arrival_s, self.revised_s < math.inf
        return WorkflowRow(
            self.job.number,
            self.job.tenant,
            arrival_s,
            "finished" if finished else "unfinished",
            self.end_s if finished else math.nan,
            self.end_s - arrival_s,
            revised,
            self.revised_s - arrival_s if revised else math.nan,
            not wrong,
            sum(line.startswith("effects") for line in wrong),
            sum(call.served.left_s is not None for call in self.made),
            sum(each.computed_tokens + each.decoded_tokens for each in wasted),
            *self._work(-math.inf),
            *self._work(self.revised_s),
        )

    def _work(self, since_s: float) -> tuple[int, int, int, int, float]:
        """Return calls, prompt, cached and completion tokens and model-wall seconds from a time on."""
        n_calls = prompt = cached = completion = 0
        wall_s = 0.0
        for call in self.made:
            served = call.served
            if call.end_s < since_s or since_s == math.inf:
                continue
            n_calls += served.submitted_s >= since_s
            if served.computed_tokens and (served.first_s is None or served.first_s >= since_s):
                prompt += served.request.prompt_tokens
                cached += served.cached_tokens
            completion += served.decoded_tokens - (call.before_tokens if since_s > 0 else 0)
            wall_s += min(call.end_s, self.fleet.now_s) - max(served.submitted_s, since_s)
        return n_calls, prompt, cached, completion, wall_s


class _Oracle:
    """The latest-version oracle of every run, worked out once for each distinct thing that it depends on.

    That is the graph, the final inputs and the choice function: bodies are functions of what they read and are answered.
    Runs with overrides are worked out one by one.
    """

    def __init__(self) -> None:
        self._known: dict[tuple[Any, ...], tuple[Graph, Truth]] = {}

    def truth(self, machine: Machine) -> Truth:
        w = choices(machine)
        inputs = tuple((name, digest(freeze(value))) for name, value in machine.inputs.items())
        key = (id(machine.graph), inputs, frozenset((call, digest(answer)) for call, answer in w.items()))
        graph, truth = self._known.get(key, (None, None))
        if truth is None or graph is not machine.graph or machine.overrides:
            truth = drive(oracle(machine.graph, machine.inputs, w, _fresh, machine.overrides))
            if not machine.overrides:
                if len(self._known) >= _N_TRUTHS:
                    self._known.clear()
                self._known[key] = machine.graph, truth
        return truth


async def _fresh(ask: Ask) -> Value:
    return answer_shortly(ask)


_N_TRUTHS = 2000


class _Fleet:
    """All workflows in flight, the cluster, and the one heap of what is to come."""

    def __init__(self, cluster: Cluster, policy: Policy, lengths: Lengths, revise_within_s: float | None) -> None:
        self.cluster, self.policy, self.lengths = cluster, policy, lengths
        self.revise_within_s = revise_within_s
        self.now_s = 0.0
        self.rows: list[WorkflowRow] = []
        self.in_flight: dict[int, _Workflow] = {}
        self.n_events = 0
        self.oracle = _Oracle()
        # until a call has been seen, about what one takes on an idle replica
        self.call_s = step_s(cluster.profile, lengths.prompt_tokens, 0) + 300 * step_s(cluster.profile, 0, 1)
        self.heap: list[tuple[float, int, _Workflow, Any]] = []
        self._calls: dict[Hashable, _Call] = {}
        self._n_ended = 0
        self._order = 0

    def at(self, at_s: float, workflow: _Workflow, item: Any) -> None:
        self._order += 1
        heapq.heappush(self.heap, (at_s, self._order, workflow, item))

    def submit(self, workflow: _Workflow, ask: Ask, now_s: float) -> _Call:
        self._order += 1
        answer = answer_shortly(ask)
        served = self.cluster.submit(now_s, self.lengths.request(self._order, ask, workflow.job, str(answer)))
        workflow.n_pending += 1
        call = self._calls[self._order] = _Call(workflow, ask.attempt, served, answer)
        return call

    def arrive(self, job: Job, admit: bool) -> None:
        self.n_events += 1
        if admit:
            self.in_flight[job.number] = _Workflow(self, job)
        else:
            self.rows.append(WorkflowRow(job.number, job.tenant, job.arrival_s))

    def serve(self, at_s: float) -> None:
        """Let the cluster go on to a time and hand the answers over."""
        for event in self.cluster.advance(at_s):
            if not event.is_end:
                continue
            self.n_events += 1
            call = self._calls.pop(event.served.request.id)
            workflow = call.workflow
            workflow.n_pending -= 1
            if event.kind == "finished":
                workflow.step(event.at_s, (call.attempt, call.answer))
            self._settle(workflow)

    def step(self) -> None:
        """Do what comes next on the heap."""
        at_s, _, workflow, item = heapq.heappop(self.heap)
        self.n_events += 1
        workflow.step(at_s, item)
        self._settle(workflow)

    def _settle(self, workflow: _Workflow) -> None:
        if workflow.end_s < math.inf and not workflow.n_pending and workflow.job.number in self.in_flight:
            del self.in_flight[workflow.job.number]
            self.rows.append(workflow.row())
            self._n_ended += 1
            if self._n_ended > max(100, len(self.in_flight) // 4):
                self._n_ended = 0
                gc.collect()


def serve_workflows(
    arrivals: Iterable[Job],
    cluster: Cluster,
    policy: str | Policy,
    lengths: Lengths = Lengths(),
    *,
    revise_within_s: float | None = None,
    max_in_flight: float = math.inf,
    stop_s: float = math.inf,
    sample_s: float = math.inf,
) -> ServingRun:
    """Serve workflows as they arrive until all have ended, and return a row for each.

    Parameters
    ----------
    arrivals : iterable of Job
        In order of arrival.
    cluster : Cluster
        Fresh.
    policy : str or Policy
        How to recover.
    lengths : Lengths
        Tokens of the calls.
    revise_within_s : float, optional
        Revisions come at ``moment`` times so many seconds after the arrival, or not at all if the workflow has ended.
        By default progress decides: ``moment`` is a share of the steps of the workflow (a step takes about as long as
        its last call), so the state that a revision finds does not depend on the load or the policy.
    max_in_flight : float
        Workflows that arrive beyond it are rejected.
    stop_s : float
        When to stop waiting; what has not ended is unfinished.
    sample_s : float
        Time between samples of the load; none by default.

    Raises
    ------
    ReviseLabError
        A workflow came to a halt before its end.
    """
    fleet = _Fleet(cluster, policy_named(policy) if isinstance(policy, str) else policy, lengths, revise_within_s)
    # ended workflows are cycles, and live ones are many: looking for cycles as often as Python does costs a third of the
    # run, looking too rarely its memory; so it is done whenever enough workflows have ended
    collects = gc.isenabled()
    gc.disable()
    gc.freeze()  # what was there before the run is left out of every search
    try:
        samples = _run(fleet, iter(arrivals), max_in_flight, stop_s, sample_s)
    finally:
        gc.unfreeze()
        if collects:
            gc.enable()
    if fleet.in_flight and stop_s == math.inf:
        stuck = next(iter(fleet.in_flight.values()))
        raise ReviseLabError(f"workflow {stuck.job.number} came to a halt: {stuck.run_.history}")
    rows = fleet.rows + [workflow.row() for workflow in fleet.in_flight.values()]
    return ServingRun(sorted(rows, key=lambda row: row.workflow), samples, fleet.n_events, fleet.now_s)


def _run(fleet: _Fleet, coming: Iterator[Job], max_in_flight: float, stop_s: float, sample_s: float) -> list[Sample]:
    samples: list[Sample] = []
    job = next(coming, None)
    next_sample_s = 0.0 if sample_s < math.inf else math.inf
    while True:
        engine_s, heap_s = fleet.cluster.next_event_time(), fleet.heap[0][0] if fleet.heap else math.inf
        now_s = min(engine_s, heap_s, job.arrival_s if job else math.inf)
        if now_s == math.inf or now_s > stop_s:
            return samples
        while next_sample_s <= now_s:
            samples.append(_sample(next_sample_s, fleet))
            next_sample_s += sample_s
        fleet.now_s = now_s
        if engine_s == now_s:
            fleet.serve(now_s)
        elif heap_s == now_s:
            fleet.step()
        elif job is not None:
            fleet.arrive(job, len(fleet.in_flight) < max_in_flight)
            job = next(coming, None)


def window(number: int, n: int, warm_share: float = 0.2, cool_share: float = 0.1) -> str:
    """Return ``warm-up``, ``steady`` or ``cool-down`` by the place of a workflow among the arrivals (our choice)."""
    place = (number + 0.5) / n
    return "warm-up" if place < warm_share else "cool-down" if place > 1 - cool_share else "steady"


def _sample(at_s: float, fleet: _Fleet) -> Sample:
    loads = zip(*fleet.cluster.loads(), strict=True)
    n_queued, n_running, used, idle = (sum(each) for each in loads)
    busy_s = sum(engine.busy_s for engine in fleet.cluster.engines)
    return Sample(at_s, len(fleet.in_flight), n_queued, n_running, used, idle, busy_s)


def wave_of(job: Job) -> tuple[set[str], float]:
    """Return the nodes of the step during which a workflow is revised, and how far through their calls that is."""
    depths: dict[str, int] = {}
    for name in job.graph.order:
        depths[name] = max((1 + depths[parent] for parent in job.graph.nodes[name].parents), default=0)
    step, part = divmod(job.moment * (1 + max(depths.values())), 1)
    return {name for name, depth in depths.items() if depth == step}, part
