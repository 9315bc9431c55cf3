"""StreamBench (arXiv:2604.23283, section 7): seven published methods and two of ours on three tasks that are revised once.

Three kinds of cells (``part``). ``grid``: the published grid, 144 runs a method: three tasks, the ratios of each type of
revision, three worlds, the revision right after the ninth act. ``ablation``: paired random draws over task, ratio, type,
moment of the revision and attention of the agent. ``http``: draws from the grid, run in process and again through the
`openai` library against a scripted endpoint that answers with real tool calls; the traces must be equal.

With ``endpoint`` a model acts in the grid, and judges three times at temperature 0 besides the assertions; quality is then
what it gives. Otherwise the agent is deterministic, no model (emulated): it does without error what its memory tells it, so
quality shows what a method leaves wrong in memory and world, and nothing else. Tokens are estimated at four characters each.
In the grid the agent trusts its memory (attention 0); three worlds take the place of three samples of a model.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple

import numpy as np
import pandas as pd
from pydantic import BaseModel, ConfigDict, Field

from revise_lab.lab import stats
from revise_lab.lab.experiments import Column
from revise_lab.lab.scorecard import claims
from revise_lab.runtime.endpoint import connect
from revise_lab.runtime.reply import MalformedReply
from revise_lab.workloads.streambench import judges
from revise_lab.workloads.streambench.methods import CHECKPOINT_ACTS, METHODS, PUBLISHED, Run, exact_ratio, run
from revise_lab.workloads.streambench.react import ReactAgent, ToolServer, open_client
from revise_lab.workloads.streambench.scenarios import EVENT, FIRST_OUTWARD, GRID_RATIOS, RATIOS, SCENARIOS, Scenario
from revise_lab.workloads.streambench.stream import RevisionType, stale_turns

if TYPE_CHECKING:
    from openai import OpenAI

ALGORITHM_VERSION = 1
NOT_IN_SEED = frozenset({"method", "k", "endpoint", "model"})
ATTENTIONS: Final = (0.0, 0.25, 0.5, 0.75, 1.0)
CORE: Final = ("foresight", "absorber", "full_restart", "naive", "ignore")
"""The methods of tables 1 and 3; foresight is published as Oracle."""
TYPES: Final = tuple(str(each) for each in RevisionType)
CORPUS: Final = {
    "deepseek": "main grid (published: DeepSeek-V3; ours: without a model)",
    "haiku": "Claude Haiku 4.5",
    "gpt4omini": "GPT-4o-mini",
    "mock": "ablation without a model",
}
"""The parts of the published corpus, by claim."""

COLUMNS = {
    "scenario": Column("exact", "", "the task", "str"),
    "rho": Column("exact", "", "nominal reversibility ratio, over the outward steps", "float"),
    "rho_tools": Column("exact", "", "reversibility ratio over all tools of the task", "float"),
    "kind": Column("exact", "", "type of the revision", "str"),
    "world": Column("exact", "", "number of the world or of the draw", "int"),
    "at": Column("exact", "acts", "act right after which the revision came", "int"),
    "attention": Column("exact", "", "probability that the agent notices a remembered step which contradicts", "float"),
    "quality": Column("exact", "score", "quality by the deterministic judge, 1 to 5", "float"),
    "quality_model": Column("timed", "score", "mean of three scores by the model; not a number without one", "float"),
    "n_wasted": Column("exact", "acts", "acts before the revision that were given up", "int"),
    "n_undone": Column("exact", "calls", "calls that undid an effect, compensations and inversions", "int"),
    "n_compensated": Column("exact", "calls", "those of them that compensated", "int"),
    "n_acts": Column("exact", "acts", "acts of the agent, undoing calls not counted", "int"),
    "n_tokens": Column("exact", "tokens", "tokens of agent and compatibility calls, estimated", "int"),
    "n_stale_kept": Column("exact", "acts", "inert and reversible acts kept although stale", "int"),
    "n_residue": Column("exact", "effects", "effects that should go and cannot", "int"),
    "theorem_3": Column(
        "exact", "", "whether no rollback point beats the earliest conflict; true if none came", "bool"
    ),
    "converged": Column("exact", "", "whether the run ended within its budget of acts", "bool"),
    "n_http_calls": Column("exact", "calls", "requests of the run over HTTP, 0 in process", "int"),
    "same_trace": Column("exact", "", "whether the traces over HTTP and in process are equal; - if not asked", "str"),
}


class Params(BaseModel):
    """One cell; what does not concern its part stays at its default."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    part: Literal["grid", "ablation", "http"] = Field(description="what the cell runs, see the module")
    method: Literal[METHODS] = Field(description="what happens at the revision")  # type: ignore[valid-type]
    revision: Literal[("mixed", *TYPES)] = Field("mixed", description="type of the revision in the grid")  # type: ignore[valid-type]
    k: int = Field(CHECKPOINT_ACTS, ge=1, description="acts between two checkpoints, for checkpoint_k")
    n_worlds: int = Field(3, ge=1, description="worlds for each task and ratio of the grid")
    n_draws: int = Field(1, ge=1, description="draws of the other parts")
    endpoint: str = Field("emulated", description="emulated, or the URL of a model that acts and judges in the grid")
    model: str = Field("", description="name of that model; empty: the first that the endpoint lists")

    @property
    def url(self) -> str:
        """Where a model acts; empty if none does."""
        return "" if self.endpoint == "emulated" or self.part != "grid" else self.endpoint


class _Setting(NamedTuple):
    """One run of a cell, whatever the method."""

    scenario: Scenario
    rho: float
    kind: RevisionType
    world: int
    seed: int
    at: int = FIRST_OUTWARD
    attention: float = 0.0


def cell(params: Params, seed: int, replicate: int) -> list[dict[str, Any]]:
    """Run one method on the settings of a cell and return a row for each."""
    with ExitStack() as stack:
        url = stack.enter_context(ToolServer()).url if params.part == "http" else params.url
        client = stack.enter_context(open_client(url)) if url else None
        model = params.model or (client.models.list().data[0].id if client else "")
        return [_row(params, setting, client, model) for setting in _settings(params, seed)]


def _settings(params: Params, seed: int) -> Iterator[_Setting]:
    if params.part == "grid":
        kind = RevisionType(params.revision)
        for scenario in SCENARIOS.values():
            for rho in GRID_RATIOS[kind]:
                for number in range(params.n_worlds):
                    rng = np.random.default_rng([seed, number, round(100 * rho), len(scenario.name)])
                    yield _Setting(scenario, rho, kind, number, int(rng.integers(2**31)))
        return
    for number in range(params.n_draws):
        rng = np.random.default_rng([seed, number])
        scenario = list(SCENARIOS.values())[rng.integers(len(SCENARIOS))]
        kind = list(RevisionType)[rng.integers(len(RevisionType))]
        world = int(rng.integers(2**31))
        if params.part == "http":
            yield _Setting(scenario, GRID_RATIOS[kind][rng.integers(len(GRID_RATIOS[kind]))], kind, number, world)
        else:
            at = int(rng.integers(1, len(scenario.base_steps) + 1))
            attention = ATTENTIONS[rng.integers(len(ATTENTIONS))]
            yield _Setting(scenario, RATIOS[rng.integers(len(RATIOS))], kind, number, world, at, attention)


def _row(params: Params, setting: _Setting, client: OpenAI | None, model: str) -> dict[str, Any]:
    scenario, rho, kind, number, seed, at, attention = setting
    asked = {"seed": seed, "at": at, "k": params.k}
    agent = ReactAgent(scenario, client, model) if client else None
    done = run(scenario, rho, kind, params.method, attention=attention, agent=agent if params.url else None, **asked)
    same, score = "-", np.nan
    if params.url:
        with ThreadPoolExecutor(1) as pool:  # a notebook's thread has an event loop that runs
            score = pool.submit(lambda: asyncio.run(_score(params.url, model, done))).result()
    elif agent:
        again = run(scenario, rho, kind, params.method, agent=agent, **asked)
        same = "yes" if (again.trace, again.world.public()) == (done.trace, done.world.public()) else "no"
    return {
        "scenario": scenario.name,
        "rho": rho,
        "rho_tools": exact_ratio(scenario, rho),
        "kind": str(kind),
        "world": number,
        "at": at,
        "attention": attention,
        "quality": done.quality,
        "quality_model": score,
        "n_wasted": done.n_wasted,
        "n_undone": done.n_undone,
        "n_compensated": done.n_compensated,
        "n_acts": done.n_acts,
        "n_tokens": done.n_tokens,
        "n_stale_kept": len(done.stale_kept),
        "n_residue": done.n_residue,
        "theorem_3": done.theorem_3() is not False,
        "converged": done.converged,
        "n_http_calls": agent.n_calls if agent else 0,
        "same_trace": same,
    }


async def _score(url: str, model: str, done: Run) -> float:
    async with connect(url, model=model) as judge:
        try:
            scores = await judges.model_quality(judge, done.scenario.task, done.revised, done.world, done.outcome)
        except MalformedReply:
            return float("nan")
    return float(np.mean(scores))


def estimate(params: Params) -> dict[str, float]:
    """Return what a cell costs; measured on two busy cores, for ``--dry-run`` only."""
    n_grid = len(SCENARIOS) * params.n_worlds * len(GRID_RATIOS.get(params.revision, ()))
    if params.url:  # as many calls and tokens as published, at a second a call
        return {"calls": 32 * n_grid, "tokens": 120_000 * n_grid, "wall_s": 32 * n_grid}
    wall_s = {"grid": 0.003 * n_grid, "ablation": 0.003 * params.n_draws, "http": 2 + 0.2 * params.n_draws}
    return {"wall_s": wall_s[params.part]}


def usage(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return what a cell has spent at a real endpoint: calls of the agent and the judge, tokens of the agent."""
    real = [
        row for row in rows if row["n_http_calls"] and row["same_trace"] == "-"
    ]  # the scripted endpoint costs nothing
    calls = sum(row["n_http_calls"] + judges.N_SCORES for row in real)
    return {"calls": calls, "tokens": sum(row["n_tokens"] for row in real)}


# --- tables ---

MEASURES: Final = {
    "quality": "quality",
    "wasted": "n_wasted",
    "compensations": "n_undone",
    "steps": "n_acts",
    "tokens_k": "tokens_k",
    "stale": "n_stale_kept",
}


def grid(frame: pd.DataFrame) -> pd.DataFrame:
    """Return the rows of the grid, with tokens in thousands and the group of worlds that each row belongs to.

    Where a model has acted, the quality is what it gave as the judge.
    """
    rows = frame[frame["part"] == "grid"].copy()
    rows["quality"] = rows["quality"].where(rows["endpoint"] == "emulated", rows["quality_model"])
    rows["tokens_k"] = rows["n_tokens"] / 1000
    rows["group"] = rows["scenario"] + "/" + rows["kind"] + "/" + rows["rho"].astype(str)
    return rows.sort_values(["method", "group", "world"]).reset_index(drop=True)


def means(rows: pd.DataFrame, by: Sequence[str] = ("method",), seed: int = 0) -> pd.DataFrame:
    """Return the mean of every measure, with a bootstrap interval over tasks x types x ratios, one row a group."""
    found = []
    for key, part in rows.groupby(list(by), sort=False):
        row: dict[str, Any] = dict(zip(by, key, strict=True)) | {"n": len(part)}
        settings = part.groupby("group")[list(MEASURES.values())].mean()  # the worlds of one are not independent
        for name, column in MEASURES.items():
            mean = stats.bootstrap(settings[column], seed=seed, n_resamples=1000, over="settings")
            row |= {name: mean.value, f"{name}_low": mean.low, f"{name}_high": mean.high}
        found.append(row | {"quality_sd": part["quality"].std()})
    table = pd.DataFrame(found)
    order = {name: at for at, name in enumerate((*METHODS, *TYPES))}
    return table.sort_values(list(by), key=lambda column: column.map(order)).reset_index(drop=True)


def published() -> pd.DataFrame:
    """Return tables 1 (``kind`` empty) and 3 as published: quality and wasted acts by method and type."""
    value = _published()
    rows = []
    for method in CORE:
        name = method.replace("foresight", "oracle")
        for kind, table in (("", f"S01.{name}"), *((kind, f"S03.{name}.{kind}") for kind in TYPES)):
            rows.append((method, kind, value[f"{table}.quality"], value[f"{table}.wasted"]))
    return pd.DataFrame(rows, columns=["method", "kind", "published_quality", "published_wasted"])


def _published() -> dict[str, Any]:
    return {row["id"]: row["value"] for row in claims()}


def beside_published(table: pd.DataFrame) -> pd.DataFrame:
    """Return a table of means with the published quality and wasted acts beside, empty where there are none."""
    beside = published()
    if "kind" in table:
        return table.merge(beside, how="left", on=["method", "kind"])
    return table.merge(beside[beside["kind"] == ""].drop(columns="kind"), how="left", on="method")


PAIRS: Final = {
    "quality_absorber_restart": ("quality", "absorber", "full_restart"),
    "waste_absorber_restart": ("n_wasted", "absorber", "full_restart"),
    "quality_absorber_naive": ("quality", "absorber", "naive"),
    "quality_absorber_ignore": ("quality", "absorber", "ignore"),
    "quality_revise_absorber": ("quality", "revise", "absorber"),
    "waste_revise_absorber": ("n_wasted", "revise", "absorber"),
}


def effects(rows: pd.DataFrame, seed: int = 0, n_resamples: int = 2000) -> pd.DataFrame:
    """Return Cohen's d of pairs of methods with 95 % bootstrap intervals; whole settings are resampled, for both at once."""
    found = []
    there = set(rows["method"])
    for name, (column, first, second) in PAIRS.items():
        if not {first, second} <= there:
            continue
        a, b = (_by_group(rows, method, column) for method in (first, second))
        rng = np.random.default_rng([seed, len(a)])
        draws = rng.integers(len(a), size=(n_resamples, len(a)))
        spread = _cohens_d(a[draws].reshape(n_resamples, -1), b[draws].reshape(n_resamples, -1))
        low, high = np.quantile(spread[np.isfinite(spread)], [0.025, 0.975])
        d, gap = _cohens_d(a.reshape(1, -1), b.reshape(1, -1))[0], float(a.mean() - b.mean())
        found.append({"pair": name, "difference": gap, "d": d, "low": low, "high": high, "n": a.size})
    return pd.DataFrame(found)


def _by_group(rows: pd.DataFrame, method: str, column: str) -> np.ndarray[Any, Any]:
    part = rows[rows["method"] == method].sort_values(["group", "world"])
    return part[column].to_numpy(float).reshape(part["group"].nunique(), -1)


def _cohens_d(a: np.ndarray[Any, Any], b: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    pooled = np.sqrt((a.var(axis=1, ddof=1) + b.var(axis=1, ddof=1)) / 2)
    gap = a.mean(axis=1) - b.mean(axis=1)
    return np.divide(gap, pooled, out=np.where(gap == 0, 0.0, np.nan), where=pooled > 0)


def ablation(frame: pd.DataFrame) -> pd.DataFrame:
    """Return the rows of the ablation with the arm that each belongs to: the method, and k where it is not the default."""
    rows = frame[frame["part"] == "ablation"].copy()
    other = (rows["method"] == "checkpoint_k") & (rows["k"] != CHECKPOINT_ACTS)
    rows["arm"] = rows["method"].where(~other, "checkpoint_k=" + rows["k"].astype(str))
    return rows


def corpus(frame: pd.DataFrame) -> pd.DataFrame:
    """Return the sizes of the published corpus and ours; the published parts do not add up to the published total."""
    core = int(((frame["part"] == "grid") & frame["method"].isin(PUBLISHED)).sum())
    counted = {"deepseek": core, "mock": int((frame["part"] == "ablation").sum())}
    value = _published()
    sizes, stated = {name: value[f"S06.{name}"] for name in CORPUS}, value["S06.stated_total"]
    total = sum(sizes.values())
    rows = [(CORPUS[name], size, counted.get(name)) for name, size in sizes.items()]
    rows += [
        ("sum of the parts", total, sum(counted.values())),
        ("total as stated", stated, None),
        ("erratum: stated - sum", stated - total, None),
    ]
    return pd.DataFrame(rows, columns=["runs", "published", "ours"]).astype({"ours": "Int64"})


# --- the case study ---


def case_study(method: str, seed: int = 0) -> Run:
    """Return the run of section 7.3: the party at ratio 0.25, an indoor dinner that becomes an outdoor barbecue."""
    return run(EVENT, 0.25, RevisionType.SUBSTITUTIVE, method, seed=seed)


def fates(done: Run) -> pd.DataFrame:
    """Return what became of every act of a run, in order: kept, kept though stale, undone, forgotten, or made after."""
    stale = {id(turn) for turn in stale_turns(done.state.turns, done.revised)}
    kept = {id(turn) for turn in done.state.turns}
    rows = []
    for number, turn in enumerate(done.before, 1):
        entry = done.world.entries.get(turn.entry) if turn.entry else None
        stands = entry is not None and entry.stands
        gone = "forgotten" if turn.entry is None or stands else "undone"
        fate = ("stale" if id(turn) in stale else "kept") if id(turn) in kept else gone
        rows.append({"n": number, "step": turn.step, "class": str(turn.cls), "fate": fate})
    later = [turn for turn in done.state.turns if not turn.early]
    rows += [{"n": len(rows) + i, "step": t.step, "class": str(t.cls), "fate": "after"} for i, t in enumerate(later, 1)]
    return pd.DataFrame(rows).assign(method=done.method)


def stale_example(done: Run) -> pd.DataFrame:
    """Return the stale acts that a run relies upon: what each was derived from, what that was, and what it is now."""
    latest = done.state.by_step()
    rows = []
    for turn in done.stale_kept:
        for source, name, seen in turn.reads:
            now = (latest[source].result.get(name) if source in latest else None) if source else done.revised[name]
            if source in {other.step for other in done.stale_kept} or now != seen:
                where = f"{source}.{name}" if source else name
                result = next(iter(turn.result.values()), "")
                now = "the same, stale itself" if now == seen else now
                rows.append({"act": turn.step, "read": where, "was": seen, "is": now, "still says": result})
    return pd.DataFrame(rows)


# --- values ---

_OTHER_MODELS: Final = {"deepseek": "deepseek_v3", "haiku": "haiku_4_5", "gpt-4o-mini": "gpt_4o_mini"}


def values(frame: pd.DataFrame) -> list[dict[str, Any]]:
    """Return the rows S01 to S06 and S08; S07 where one of its models has acted."""
    rows = grid(frame)
    acted = rows.loc[rows["endpoint"] != "emulated", ["model", "endpoint"]].drop_duplicates()
    source = f"measured ({', '.join(map(' at '.join, acted.to_numpy()))})" if len(acted) else "emulated"
    found: list[dict[str, Any]] = []

    def add(name: str, value: Any, unit: str, n: int, low: Any = None, high: Any = None, by: str = source) -> None:
        low, high = (value if end is None else end for end in (low, high))
        found.append({"id": name, "value": value, "low": low, "high": high, "n": n, "unit": unit, "source": by})

    if {*CORE} <= set(rows["method"]):
        core = rows[rows["method"].isin(CORE)]
        for row in means(core).to_dict("records"):
            for name in ("quality", "wasted", "compensations", "steps", "tokens_k"):
                claim = f"S01.{row['method'].replace('foresight', 'oracle')}.{name}"
                add(claim, row[name], name, row["n"], row[f"{name}_low"], row[f"{name}_high"])
        waste = core.groupby("method")["n_wasted"].sum()
        add("S02", waste["full_restart"] / waste["absorber"], "ratio", len(core) // len(CORE))
        for row in means(core, ("method", "kind")).to_dict("records"):
            for name, unit in (("quality", "score"), ("wasted", "acts")):
                claim = f"S03.{row['method'].replace('foresight', 'oracle')}.{row['kind']}.{name}"
                add(claim, row[name], unit, row["n"], row[f"{name}_low"], row[f"{name}_high"])
        for row in effects(core).to_dict("records"):
            add(f"S04.{row['pair']}", row["d"], "d", row["n"], row["low"], row["high"])
    for name, claim in _OTHER_MODELS.items():
        part = rows[rows["model"].str.lower().str.contains(name)]
        pair = part.pivot_table(index="group", columns="method", values="quality")
        if {"absorber", "naive"} <= set(pair):
            gain = stats.bootstrap(pair["absorber"] - pair["naive"], seed=0, n_resamples=1000, over="settings")
            add(f"S07.{claim}", gain.value, "score", len(pair), gain.low, gain.high)
    ours, restart = case_study("absorber"), case_study("full_restart")
    kept = len(ours.before) - ours.n_wasted
    made = "by construction"
    for name, value in (
        ("absorber_kept", kept),
        ("absorber_compensated", ours.n_compensated),
        ("absorber_waste", ours.n_wasted),
        ("restart_discarded", restart.n_wasted),
        ("restart_waste", restart.n_wasted),
    ):
        add(f"S05.{name}", value, "acts", 1, by=made)
    table = corpus(frame).set_index("runs")
    for name in ("deepseek", "mock"):
        if n := int(table["ours"][CORPUS[name]]):
            add(f"S06.{name}", n, "runs", n)
    parts = int(table["published"]["sum of the parts"])
    add("S06.stated_total", parts, "runs", parts, by="published")  # what its parts add up to, beside what is stated
    for scenario in SCENARIOS.values():
        add(f"S08.{scenario.name}", len(scenario.base_steps), "steps", 1, by=made)
    add("S08.first_k_step", FIRST_OUTWARD, "steps", len(SCENARIOS), by=made)
    return found
