"""The unmodified ten-node LangGraph application, revised while its report is written (arXiv:2609.00643, Tables 5 and 6).

One cell is one revision of one application: every policy recovers from it in turn, on one endpoint, in an order that rotates
with the replicate; then LangGraph's own means, if asked for. A revision arrives with the first token of the report, when all
other nodes are done, so that what is called after it is the recovery and nothing else. Every run is compared with LangGraph
by itself on the final inputs, where a prompt is answered as it was last answered in the run: an endpoint need not repeat
itself. The applications are stand-ins: the supplier (A) was built to the published sums, the brief (B) was not.
"""

from __future__ import annotations

import asyncio
import copy
import json
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple

import pandas as pd
from pydantic import BaseModel, ConfigDict, Field

from revise_lab.lab import stats
from revise_lab.lab.executors import on_own_loop
from revise_lab.lab.experiments import Column
from revise_lab.lab.rows import beside, value_row
from revise_lab.runtime.endpoint import ModelRequest, OpenAIModel, connect
from revise_lab.workloads.supplier.native import EXTRA_REVISIONS, REVISIONS

if TYPE_CHECKING:
    from revise_lab.runtime.adapters.langgraph import GraphRun

ALGORITHM_VERSION = 1
N_TOKENS: Final = 8


class Expected(NamedTuple):
    """A revision, the nodes that it affects by hand, and how many a suffix has."""

    path: str
    value: Any
    affected: str
    n_suffix: int


_EVERY_SUPPLIER: Final = "company costs policy requirements review_evidence assess screening reviewer join report"
_SETS: Final = {
    "policy_control": ("policy assess reviewer join report", 8),
    "helper_goal": ("requirements assess reviewer join report", 7),
    "reviewer_evidence": ("review_evidence assess reviewer join report", 6),
    "country": ("costs screening join report", 9),
    "volume": ("costs join report", 9),
    "supplier": ("company screening join report", 10),
    "blocked": ("policy report", 8),
}
EXPECTED: Final[Mapping[str, Mapping[str, Expected]]] = {
    "supplier": {name: Expected(*{**REVISIONS, **EXTRA_REVISIONS}[name], *sets) for name, sets in _SETS.items()},
    "brief": {
        "audience": Expected("brief.audience", "all staff", "audience report", 10),
        "severity": Expected("rules.severity", "sev1", "planner containment reviewer join report", 8),
        "text": Expected("rules.text", "no blame", "planner workaround reviewer join report", 8),
        "goal": Expected("helper.goal", "stop the loss", "runbook workaround reviewer join report", 7),
        "evidence": Expected("review.evidence", "trace of 11:02", "timeline workaround reviewer join report", 6),
    },
}
"""By application and revision; what a revision retracts is not among what runs again."""
STOCK: Final = ("stock: new input", "stock: update_state", "stock: fork")

COLUMNS = {
    "policy": Column("exact", "", "how the run recovers", "str"),
    "turn": Column("exact", "", "place in the rotated order", "int"),
    "correct": Column("exact", "", "whether the state is that of LangGraph by itself on the final inputs", "bool"),
    "recomputed": Column("exact", "", "nodes that called after the revision, by name", "str"),
    "n_calls_after": Column("exact", "calls", "model calls after the revision", "int"),
    "n_calls_before": Column("exact", "calls", "model calls before it", "int"),
    "n_expected": Column("exact", "calls", "calls after the revision by hand", "int"),
    "as_expected": Column("exact", "", "whether the nodes that called again are those expected by hand", "bool"),
    "n_aborted": Column("exact", "calls", "generations that ended because their client left", "int"),
    "prompt_tokens_after": Column("exact", "tokens", "of calls after the revision", "int"),
    "completion_tokens_after": Column("exact", "tokens", "of calls after the revision", "int"),
    "n_unknown_usage": Column("exact", "calls", "calls whose usage the endpoint did not say", "int"),
    "n_leaves": Column("exact", "reads", "distinct leaves of the inputs that were read", "int"),
    "n_retracted": Column("exact", "nodes", "nodes that no longer belong to the run", "int"),
    "n_oracle_hits": Column("exact", "calls", "calls of the comparison that the run had made", "int"),
    "n_oracle_fresh": Column("exact", "calls", "calls of the comparison that it had not", "int"),
    "model_wall_s": Column("timed", "s", "time in model calls after the revision, summed", "float"),
    "e2e_s": Column("timed", "s", "from the revision to the result", "float"),
    "first_s": Column("timed", "s", "from the start to the revision", "float"),
    "spans": Column("timed", "s", "attempts: node, start, end, what became of it; as JSON", "str"),
}


class Params(BaseModel):
    """One cell: one revision of one application under every policy."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    app: Literal["supplier", "brief"] = Field("supplier", description="A: the ten-node stand-in; B: a lane that flips")
    revision: str = Field(description="which leaf is revised, see EXPECTED")
    policies: tuple[str, ...] = ("wait", "restart", "suffix", "revise", "revise_plus")
    stock: bool = Field(False, description="whether LangGraph's own means are tried as well")
    ttft_s: float = Field(0.005, gt=0.0, description="time to the first token of the emulated endpoint")
    itl_s: float = Field(0.008, ge=0.0, description="time between its tokens")
    endpoint: str = Field("emulated", description="emulated, or the URL of an OpenAI-compatible endpoint")


NOT_IN_SEED = frozenset(Params.model_fields)


def cell(params: Params, seed: int, replicate: int) -> list[dict[str, Any]]:
    """Return a row for each policy, then one for each of LangGraph's own means."""
    shift = replicate % len(params.policies)
    order = params.policies[shift:] + params.policies[:shift] + (STOCK if params.stock else ())

    async def all_policies() -> list[dict[str, Any]]:
        # two tokens a chunk: reading chunks is most of what a call costs on this side
        server = (
            {"ttft_s": params.ttft_s, "itl_s": params.itl_s, "coalesce": 2} if params.endpoint == "emulated" else None
        )
        async with connect(params.endpoint, server=server) as model:
            rows = []
            for turn, policy in enumerate(order):
                measure = _stock if policy in STOCK else _revised
                rows.append({"policy": policy, "turn": turn, **await measure(params, policy, model)})
            return rows

    return on_own_loop(all_policies())


def estimate(params: Params) -> dict[str, float]:
    """Return what a cell costs; measured on two cores of a laptop-class machine, for ``--dry-run`` only."""
    n_runs = len(params.policies) + len(STOCK) * params.stock
    call_s = params.ttft_s + N_TOKENS * params.itl_s
    return {"wall_s": n_runs * (10 * call_s + 0.2), "calls": 18 * n_runs, "tokens": 18 * n_runs * (N_TOKENS + 40)}


# --- runs ------------------------------------------------------------------------------------------------------------


class Asking:
    """What answers an application's prompts, says when the last node is being answered, and remembers the answers."""

    def __init__(self, model: OpenAIModel, on_report: Callable[[], None] = lambda: None) -> None:
        self.model, self.on_report = model, on_report
        self.answers: dict[str, str] = {}
        self.reporting = False

    async def __call__(self, prompt: str) -> str:
        """Answer a prompt."""

        def heard(_: str) -> None:
            if prompt.startswith(("Report", "Brief in")) and not self.reporting:
                self.reporting = True
                self.on_report()

        request = ModelRequest(prompt=prompt, max_tokens=N_TOKENS, seed=0, extra={"ignore_eos": True})
        self.answers[prompt] = (await self.model.complete(request, on_token=heard)).text
        return self.answers[prompt]


class Remembering:
    """Answers as the run was answered last, and asks only what it was not asked."""

    def __init__(self, ask: Asking) -> None:
        self.known, self.ask = dict(ask.answers), Asking(ask.model)
        self.n_hits = self.n_fresh = 0

    async def __call__(self, prompt: str) -> str:
        """Answer a prompt."""
        if prompt in self.known:
            self.n_hits += 1
            return self.known[prompt]
        self.n_fresh += 1
        return await self.ask(prompt)


def _application(params: Params, ask: Callable[[str], Awaitable[str]]) -> tuple[Any, dict[str, Any], dict[str, Any]]:
    """Return the compiled graph, its inputs, and the inputs as they are after the revision."""
    from revise_lab.workloads.supplier import langgraph as app

    if params.app == "supplier":
        compiled, inputs = app.build(ask), app.INPUTS
    else:
        compiled, inputs = app.build_brief(ask), app.BRIEF_INPUTS
    final = copy.deepcopy(inputs)
    artifact, leaf = EXPECTED[params.app][params.revision].path.split(".")
    final[artifact][leaf] = EXPECTED[params.app][params.revision].value
    return compiled, inputs, final


async def _compared(params: Params, ask: Asking, state: Any) -> dict[str, Any]:
    known = Remembering(ask)
    compiled, _, final = _application(params, known)
    same = state == await compiled.ainvoke(final)
    return {"correct": same, "n_oracle_hits": known.n_hits, "n_oracle_fresh": known.n_fresh}


async def _revised(params: Params, policy: str, model: OpenAIModel) -> dict[str, Any]:
    from revise_lab.runtime.adapters.langgraph import RevisableGraph

    expected = EXPECTED[params.app][params.revision]
    delivered: list[Any] = []
    n_spans, n_first = 0, len(model.calls)

    def revise() -> None:
        nonlocal n_spans
        n_spans = len(run.spans)
        delivered.extend((time.perf_counter(), len(model.calls), run.revise(expected.path, expected.value)))

    ask = Asking(model, revise)
    compiled, inputs, _ = _application(params, ask)
    started_s = time.perf_counter()
    run = RevisableGraph(compiled, policy).start(inputs)
    result = await run.result()
    ended_s = time.perf_counter()
    revised_s, n_before, acceptance = delivered
    usage = _usage(model.calls[n_before:])  # before the comparison, which may ask as well
    await acceptance
    again = [span.node for span in run.spans[n_spans:] if span.n_calls]
    wanted, n_expected = _by_hand(params, policy)
    return {
        **await _compared(params, ask, result.state),
        **usage,
        "recomputed": " ".join(sorted(again)),
        "n_calls_before": n_before - n_first,
        "n_expected": n_expected,
        "as_expected": len(again) == n_expected and (wanted is None or sorted(again) == sorted(wanted)),
        "n_aborted": await _aborted(model, run),
        "n_leaves": len(_leaves(run)),
        "n_retracted": sum(type(entry).__name__ == "Retracted" for entry in run.journal),
        "e2e_s": ended_s - revised_s,
        "first_s": revised_s - started_s,
        "spans": json.dumps(_spans(run, n_spans, set(again))),
    }


def _by_hand(params: Params, policy: str) -> tuple[list[str] | None, int]:
    """Return which nodes are to call again, where that is written down, and how many."""
    expected = EXPECTED[params.app][params.revision]
    affected = expected.affected.split()
    if policy in ("revise", "revise_plus"):
        return affected, len(affected)
    if params.revision == "blocked":
        every = ["company", "costs", "policy", "report", "requirements", "review_evidence", "screening"]
        return (None, 5) if policy == "suffix" else (every, len(every))
    return None, expected.n_suffix if policy == "suffix" else len(_EVERY_SUPPLIER.split())


def _usage(calls: list[Any]) -> dict[str, Any]:
    return {
        "n_calls_after": len(calls),
        "prompt_tokens_after": sum(call.usage.prompt_tokens or 0 for call in calls),
        "completion_tokens_after": sum(call.usage.completion_tokens or 0 for call in calls),
        "n_unknown_usage": sum(call.usage.completion_tokens is None for call in calls),
        "model_wall_s": sum(call.wall_s for call in calls),
    }


def _leaves(run: GraphRun) -> set[str]:
    found = (each.removesuffix(" (control)") for name in run.machine.runs for each in run.reads(name))
    return {each for each in found if "#" not in each and each.partition(".")[0] in run.machine.inputs}


async def _aborted(model: OpenAIModel, run: GraphRun) -> int:
    """Count the generations that the server saw abandoned; where its log is not ours, those that we abandoned."""
    if model.log is None:
        return sum(span.outcome == "aborted" and span.n_calls > 0 for span in run.spans)
    for _ in range(200):
        log = [entry for entry in model.log if entry.run == run.id]
        if all(entry.finished_s is not None for entry in log):
            break
        await asyncio.sleep(0.01)
    return sum(entry.outcome == "aborted" for entry in log)


def _spans(run: GraphRun, n_before: int, again: set[str]) -> list[tuple[str, float, float, str]]:
    """Return every attempt that called, with what became of it."""
    zero = run.spans[0].start_s
    rows = []
    for i, span in enumerate(run.spans):
        if span.n_calls:
            kind = "recomputed" if i >= n_before else "replaced" if span.node in again else "reused"
            kind = "cancelled" if span.outcome == "aborted" else kind
            rows.append((span.node, round(span.start_s - zero, 4), round((span.end_s or zero) - zero, 4), kind))
    return rows


async def _stock(params: Params, means: str, model: OpenAIModel) -> dict[str, Any]:
    """Recover by LangGraph's own means: cancel, then a new input, an update of the state, or a fork from the start."""
    from langgraph.checkpoint.memory import InMemorySaver

    n_first = len(model.calls)
    ask = Asking(model, lambda: task.cancel())
    plain, inputs, final = _application(params, ask)
    compiled: Any = plain.copy({"checkpointer": InMemorySaver()})
    artifact = EXPECTED[params.app][params.revision].path.split(".")[0]
    config: Any = {"configurable": {"thread_id": "first"}}
    started_s = time.perf_counter()
    task = asyncio.get_running_loop().create_task(compiled.ainvoke(inputs, config))
    await asyncio.wait([task])
    revised_s, n_before = time.perf_counter(), len(model.calls)
    if means == "stock: new input":
        state = await compiled.ainvoke(final, {"configurable": {"thread_id": "second"}})
    elif means == "stock: update_state":
        await compiled.aupdate_state(config, {artifact: final[artifact]})
        state = await compiled.ainvoke(None, config)
    else:
        first = [each async for each in compiled.aget_state_history(config)][-2]  # the last one has no input yet
        forked = await compiled.aupdate_state(first.config, {artifact: final[artifact]}, as_node="__start__")
        state = await compiled.ainvoke(None, forked)
    ended_s, usage = time.perf_counter(), _usage(model.calls[n_before:])
    return {
        **await _compared(params, ask, state),
        **usage,
        "n_calls_before": n_before - n_first,
        "n_aborted": sum(call.outcome == "aborted" for call in model.calls[n_first:]),
        "e2e_s": ended_s - revised_s,
        "first_s": revised_s - started_s,
    }


# --- what comes of it --------------------------------------------------------------------------------------------------


def recovered(frame: pd.DataFrame) -> pd.DataFrame:
    """Return the rows of our policies, without LangGraph's own means."""
    return frame[~frame["policy"].isin(STOCK)]


def by_policy(frame: pd.DataFrame) -> pd.DataFrame:
    """Return Table 5: a row for each application and policy, over the published five revisions, or all of the brief's."""
    part = frame[(frame["app"] != "supplier") | frame["revision"].isin(REVISIONS)]
    return part.groupby(["app", "policy"], as_index=False).agg(
        n=("correct", "size"),
        correct=("correct", "mean"),
        as_expected=("as_expected", "mean"),
        calls=("n_calls_after", "mean"),
        completion_tokens=("completion_tokens_after", "mean"),
        prompt_tokens=("prompt_tokens_after", "mean"),
        aborts=("n_aborted", "mean"),
        model_wall_ms=("model_wall_s", lambda s: 1e3 * s.mean()),
        e2e_p50_ms=("e2e_s", lambda s: 1e3 * s.median()),
    )


MEASURES: Final = {
    "calls": "n_calls_after",
    "prompt_tokens": "prompt_tokens_after",
    "completion_tokens": "completion_tokens_after",
    "model_wall": "model_wall_s",
}


def by_revision(frame: pd.DataFrame) -> pd.DataFrame:
    """Return Table 6: what each revision saves against suffix, in percent, with intervals over replicates."""
    rows = []
    chosen = frame[frame["policy"].isin(["suffix", "revise", "revise_plus"])]
    for row, part in beside(chosen, ["app", "revision"]):
        ours, suffix = (part[part["policy"] == one].sort_values("replicate") for one in (row["policy"], "suffix"))
        row["n"] = len(ours)
        for name, column in MEASURES.items():
            found = stats.ratio(ours[column], suffix[column], over="replicates", n_resamples=1000)
            saved, high, low = (100 * (1 - end) for end in (found.value, found.low, found.high))
            row |= {name: saved, f"{name}_low": low, f"{name}_high": high}
        rows.append(row)
    return pd.DataFrame(rows, columns=None if rows else ["app", "revision", "policy", "n"])


def timeline(frame: pd.DataFrame, revision: str) -> pd.DataFrame:
    """Return the attempts of the first replicate of one revision of the supplier, with the moment of the revision."""
    part = recovered(frame)
    part = part[(part["app"] == "supplier") & (part["revision"] == revision) & (part["replicate"] == 0)]
    columns = ["policy", "revised_s", "node", "start_s", "end_s", "kind"]
    rows = [(row.policy, row.first_s, *span) for row in part.itertuples() for span in json.loads(row.spans)]
    return pd.DataFrame(rows, columns=columns)


def values(frame: pd.DataFrame) -> list[dict[str, Any]]:
    """Return the rows R01.integration and R05 to R09; sums over the five revisions only where all five were run."""
    source = "emulated" if set(frame["endpoint"]) == {"emulated"} else f"measured ({frame['endpoint'].iloc[0]})"
    ours = recovered(frame)
    five = ours[(ours["app"] == "supplier") & ours["revision"].isin(REVISIONS)]
    share = stats.proportion(int(ours["correct"].sum()), len(ours))
    rows: list[dict[str, Any]] = []

    def add(id: str, value: float, n: int, unit: str, *ends: float) -> None:
        rows.append(value_row(id, value, n, unit, source, *ends))

    add("R01.integration", share.value, share.n, "share", share.low, share.high)
    for row in by_revision(five).query("policy == 'revise'").to_dict("records"):
        if row["revision"] in ("policy_control", "helper_goal", "reviewer_evidence"):
            for name in MEASURES if row["n"] > 1 else ("calls",):
                add(f"R08.{row['revision']}.{name}", row[name], row["n"], "%", row[f"{name}_low"], row[f"{name}_high"])
    if set(five["revision"]) == set(REVISIONS):
        published = five[five["policy"].isin(["restart", "suffix", "revise"])]
        for row in by_policy(published).to_dict("records"):
            add(f"R05.{row['policy']}", row["calls"], len(REVISIONS), "calls")
            add(f"R06.{row['policy']}", row["completion_tokens"], len(REVISIONS), "tokens")
            add(f"R07.wall.{row['policy']}", row["model_wall_ms"], row["n"], "ms")
            add(f"R07.e2e.{row['policy']}", row["e2e_p50_ms"], row["n"], "ms")
        n_replicates = five["replicate"].nunique()
        add("R08.aborts", float(published["n_aborted"].sum()) / n_replicates, len(published), "aborts")
        add("R09.reads", float(five["n_leaves"].max()), len(five), "reads")
        found = published[(published["policy"] == "revise") & published["as_expected"].astype(bool)]
        add("R09.sets", found["revision"].nunique(), len(REVISIONS), "sets")
    return rows
