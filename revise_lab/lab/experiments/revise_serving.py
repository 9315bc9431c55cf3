"""Serving under pressure (arXiv:2609.00643, Table 2 and A.5): goodput, latency and work when half of what comes is revised.

One cell is one open-loop run on an emulated cluster: 500 workflows, of which 180 warm up, 280 count and 40 cool down
(shares, at other sizes). Arrivals, tenants, families, moments of revision and lengths hang on the replicate only: every
policy meets the same at every load, whose rate merely stretches the arrivals. Virtual time makes the order in which cells
run irrelevant. Assumptions: a tenant is a cache namespace with a system prompt of its own; the router takes the replica
with the fewest requests (``fixed.routing=pinned`` pairs the replicas too); revisions come at a uniform share of a workflow's
progress, so that what they find does not depend on the load.

The queue couples workflows. Work is compared over workflows; goodput and latency over whole runs: a change is taken in
each run of a load, and the mean over runs is resampled in two levels, runs and then blocks of neighbouring arrivals.
"""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from revise_lab.lab import serving_cells
from revise_lab.lab.experiments import Column
from revise_lab.lab.rows import beside, columns, grouped, value_row
from revise_lab.lab.serving_cells import fixed

if TYPE_CHECKING:
    import pandas as pd

    from revise_lab.lab import stats

ALGORITHM_VERSION = 1
SLO_S = 25.0
"""Published; 15 and 40 s stand beside."""
SLOS_S = (15.0, 25.0, 40.0)
LOADS = (0.7, 0.9, 1.0, 1.1, 1.3)
PRESSURE = (1.0, 1.1, 1.3)
"""The loads that the published Table 2 compares."""
BLOCK = 20
"""Neighbouring arrivals that are resampled together; a tenth of the counted ones where these are few."""
N_RESAMPLES, _CHUNK = 1000, 50
SAMPLE_S = 0.25

COLUMNS = serving_cells.COLUMNS | {
    "n_in_flight": Column("exact", "workflows", "in flight when the workflow arrived", "int"),
    "n_queued": Column("exact", "requests", "queued at the replicas then", "int"),
    "n_running": Column("exact", "requests", "running at the replicas then", "int"),
    "kv_tokens": Column("exact", "tokens", "KV memory that requests held then", "int"),
}


class Params(BaseModel):
    """One cell: one open-loop run under one policy."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    family: Literal["S12", "free"] = Field("S12", description="S12 is matched; free is a random DAG that nobody fitted")
    load: float = Field(1.0, gt=0.0, description="rate of arrivals over the capacity")
    policy: Literal["restart", "suffix", "revise", "revise_plus", "wait"] = "revise"
    abort: Literal["0 s", "2 s", "never"] = Field("0 s", description="how long an aborted request goes on")
    routing: Literal["least_loaded", "pinned"] = Field("least_loaded", description="pinned: replicas are paired too")
    n_workflows: int = Field(500, ge=25)
    revised_share: float = Field(0.5, ge=0.0, le=1.0)
    n_replicas: int = Field(4, ge=1)
    n_tenants: int = Field(64, ge=1)
    profile: str = Field(default_factory=fixed("profile"), description="cost of a replica")
    capacity_per_s: float = Field(default_factory=fixed("capacity_per_s"), gt=0.0)
    prompt_tokens: int = Field(default_factory=fixed("prompt_tokens"), ge=1)
    shared_tokens: int = Field(default_factory=fixed("shared_tokens"), ge=0)
    output_tokens: int = Field(default_factory=fixed("output_tokens"), ge=1)
    endpoint: str = Field("emulated", description="emulated, or the URLs of real replicas, with commas between them")
    max_concurrent: int = Field(256, ge=1, description="calls that a real endpoint is asked at once")
    max_requests: int = Field(100_000, ge=1, description="calls that a real endpoint is asked in all, in a cell")


NOT_IN_SEED = frozenset(Params.model_fields)


def cell(params: Params, seed: int, replicate: int) -> list[dict[str, Any]]:
    """Serve one run and return a row for each workflow, with the load of the cluster at its arrival."""
    given = params.model_dump(exclude={"load", "policy", "capacity_per_s"})
    rate_per_s = params.load * params.capacity_per_s
    run = serving_cells.serve(seed, params.policy, rate_per_s, **given, sample_s=SAMPLE_S)
    times = [sample.at_s for sample in run.samples]
    rows = serving_cells.rows_of(run, params.n_workflows)
    for row in rows:
        sample = run.samples[max(0, bisect_right(times, row["arrival_s"]) - 1)]
        row |= {name: getattr(sample, name) for name in ("n_in_flight", "n_queued", "n_running")}
        row["kv_tokens"] = sample.used_tokens
    return rows


def estimate(params: Params) -> dict[str, float]:
    """Return what a cell costs, for ``--dry-run`` only."""
    return serving_cells.estimate(params.n_workflows, params.load * params.capacity_per_s, params.endpoint)


# --- changes against suffix ------------------------------------------------------------------------------------------


class Setting(NamedTuple):
    """What is compared: a policy against suffix on one family, with one delay of aborts."""

    family: str
    abort: str
    policy: str


def settings(frame: pd.DataFrame) -> Iterator[tuple[Setting, list[float]]]:
    """Yield every setting that ran beside suffix, with the loads at which both did."""
    for named, part in beside(frame, ["family", "abort"]):
        loads = set.intersection(*(set(of["load"]) for _, of in part.groupby("policy")))
        if loads:
            yield Setting(**named), sorted(loads)


def latencies(frame: pd.DataFrame, setting: Setting, load: float, policy: str) -> np.ndarray:
    """Return the latencies of the counted workflows, shape (replicates, workflows); a miss is infinite."""
    part = main(frame, setting.family, setting.abort)
    chosen = part[(part["policy"] == policy) & np.isclose(part["load"], load) & part["counted"]]
    chosen = chosen.sort_values(["replicate", "workflow"])
    latency_s = chosen["latency_s"].where(chosen["correct"].astype(bool), np.inf).to_numpy(float)
    return latency_s.reshape(chosen["replicate"].nunique(), -1)


MEASURES = {f"goodput_{slo_s:g}": ("goodput", slo_s) for slo_s in SLOS_S} | {
    f"p{100 * share:g}": ("quantile", share) for share in (0.5, 0.95, 0.99)
}


def _measure(latency_s: np.ndarray, name: str) -> np.ndarray:
    """Return goodput (workflows in time, of those counted) or a quantile along the last axis."""
    kind, at = MEASURES[name]
    if kind == "goodput":
        return (latency_s <= at).mean(axis=-1)
    return np.quantile(latency_s, at, axis=-1, method="higher")


def compared(
    frame: pd.DataFrame, setting: Setting, loads: list[float], names: Iterable[str] = MEASURES, seed: int = 0
) -> dict[str, Changes]:
    """Return each measure of a policy and of suffix at each load, with the bootstrap of its change."""
    sides = [
        np.stack([latencies(frame, setting, load, policy) for load in loads]) for policy in (setting.policy, "suffix")
    ]
    _, n_runs, n = sides[0].shape
    drawn: dict[str, list[np.ndarray]] = {name: [] for name in names}
    rng = np.random.default_rng(seed)
    block = max(1, min(BLOCK, n // 10))
    for _ in range(N_RESAMPLES // _CHUNK):
        # one draw of runs and blocks for all loads and measures: they met the same workflows
        runs = rng.integers(n_runs, size=(_CHUNK, n_runs, 1))
        starts = rng.integers(n - block + 1, size=(_CHUNK, n_runs, -(-n // block), 1))
        places = (starts + np.arange(block)).reshape(_CHUNK, n_runs, -1)[:, :, :n]
        picked = [side[:, runs, places] for side in sides]
        for name in names:
            drawn[name].append(_change(*(_measure(side, name) for side in picked)).T)
    measured = {name: [_measure(side, name) for side in sides] for name in names}
    return {name: Changes(loads, *measured[name], np.concatenate(drawn[name])) for name in names}


def _change(ours: np.ndarray, theirs: np.ndarray) -> np.ndarray:
    """Return the change in percent of means over runs, the last axis; none in time on either side is no change."""
    ours, theirs = ours.mean(axis=-1), theirs.mean(axis=-1)
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(ours == theirs, 0.0, 100 * (ours / theirs - 1))


class Changes(NamedTuple):
    """One measure under a policy and under suffix, shape (loads, runs), and the resampled change at each load."""

    loads: list[float]
    ours: np.ndarray
    theirs: np.ndarray
    drawn: np.ndarray

    def at(self, load: float) -> stats.Interval:
        """Return the change at a load."""
        return self.pooled((load,))

    def pooled(self, loads: tuple[float, ...] = PRESSURE) -> stats.Interval:
        """Return the mean change over loads: the published pooled changes are the means of the others."""
        at = [self.loads.index(load) for load in loads]
        return self._interval(float(_change(self.ours, self.theirs)[at].mean()), self.drawn[:, at].mean(axis=1))

    def trend(self, loads: tuple[float, ...] = PRESSURE) -> tuple[stats.Interval, float, int]:
        """Return the slope of the change over load, the p of a permutation test, and how many orders it compared.

        The slope is in percentage points for each 0.1 x capacity. The test exchanges the loads within each run, in every
        way there is (at random beyond 10,000), and counts the slopes at least as far from 0 on the observed side.
        """
        at = [self.loads.index(load) for load in loads]
        x = np.array(loads) - np.mean(loads)
        weights = x / (10 * (x**2).sum())
        ours, theirs = self.ours[at], self.theirs[at]
        n_runs = ours.shape[1]
        orders = np.array(list(itertools.permutations(range(len(loads)))))
        if len(orders) ** n_runs <= 10_000:
            picks = np.array(list(itertools.product(range(len(orders)), repeat=n_runs)))
        else:
            picks = np.random.default_rng(0).integers(len(orders), size=(10_000, n_runs))
            picks[0] = 0
        order = orders[picks].transpose(0, 2, 1)
        runs = np.arange(n_runs)
        slopes = _change(ours[order, runs], theirs[order, runs]) @ weights
        observed = float(weights @ _change(ours, theirs))
        p = float(np.mean(slopes * np.sign(observed or 1.0) >= abs(observed) - 1e-9))
        return self._interval(observed, self.drawn[:, at] @ weights, "points per 0.1 x"), p, len(picks)

    def _interval(self, value: float, drawn: np.ndarray, unit: str = "%") -> stats.Interval:
        from revise_lab.lab import stats

        kind = f"95 % bootstrap over runs and blocks of {BLOCK} arrivals"
        low, high = np.quantile(drawn, 0.025, method="lower"), np.quantile(drawn, 0.975, method="higher")
        return stats.Interval(value, float(low), float(high), self.ours.shape[1], unit, kind)


# --- tables ----------------------------------------------------------------------------------------------------------


def levels(frame: pd.DataFrame) -> pd.DataFrame:
    """Return what each policy reaches at each load: goodput, latency, queue, batch and KV memory; counted workflows."""
    counted = frame[frame["counted"]].copy()
    counted["latency_s"] = counted["latency_s"].where(counted["correct"].astype(bool), np.inf)
    rows = []
    for row, part in grouped(counted, ["family", "abort", "load", "policy"]):
        latency_s = part["latency_s"].to_numpy(float)
        span_s = sum(np.ptp(arrival_s) for _, arrival_s in part.groupby("replicate")["arrival_s"])
        row |= {"n": len(part), "goodput_per_s": float((latency_s <= SLO_S).sum() / span_s)}
        row |= {name: float(_measure(latency_s, name)) for name in MEASURES}
        row |= part[["n_in_flight", "n_queued", "n_running", "kv_tokens"]].mean().to_dict()
        rows.append(row | {"n_aborted": int(part["n_aborted"].sum()), "wasted_share": _wasted(part)})
    return serving_cells.table(rows)


def _wasted(part: pd.DataFrame) -> float:
    prompts = part["n_calls"] * part["prompt_tokens"]
    return float(part["wasted_tokens"].sum() / (prompts + part["completion_tokens"]).sum())


Comparison = dict[tuple[Setting, str], "Changes"]


def compare(
    frame: pd.DataFrame, names: Iterable[str] = ("goodput_15", "goodput_25", "goodput_40", "p99")
) -> Comparison:
    """Compare every setting with suffix by some measures."""
    return {
        (setting, name): found
        for setting, loads in settings(frame)
        for name, found in compared(frame, setting, loads, tuple(names)).items()
    }


def changes(comparison: Comparison) -> pd.DataFrame:
    """Return the changes against suffix, a row for each setting, load and measure."""
    return serving_cells.table(
        [
            {**setting._asdict(), "load": load, "measure": name, **found.at(load).as_dict()}
            for (setting, name), found in comparison.items()
            for load in found.loads
        ]
    )


def work(frame: pd.DataFrame) -> pd.DataFrame:
    """Return what each policy saves against suffix from the revision to the correct end, all loads together."""
    measures = {"tokens": "completion_after_tokens", "wall": "wall_after_s", "calls": "n_calls_after"}
    rows = []
    for setting, loads in settings(frame):
        part = main(frame, setting.family, setting.abort)
        rows.append(setting._asdict() | saved(part[part["load"].isin(loads)], setting.policy, measures))
    return serving_cells.table(rows)


def saved(part: pd.DataFrame, policy: str, measures: Mapping[str, str]) -> dict[str, Any]:
    """Return what a policy saves against suffix, in percent, with its interval: name -> column of what is saved."""
    row: dict[str, Any] = {}
    for name, column in measures.items():
        found = serving_cells.saving(part, policy, column)
        row |= columns(name, found) | {"n": found.n}
    return row


def causes(frame: pd.DataFrame) -> pd.DataFrame:
    """Return, for `revise` at each load, what it saves and what the cluster looks like beside suffix.

    The saving per revised workflow is much the same at every load; what it does to goodput hangs on how many workflows
    are about to miss the objective, and what it does to a quantile on how much of a latency is waiting for others.
    """
    rows = []
    chosen = frame[(frame["abort"] == "0 s") & frame["policy"].isin(["revise", "suffix"])]
    for row, at in grouped(chosen, ["family", "load"]):
        for name, column in (("tokens_saved", "completion_after_tokens"), ("wall_saved", "wall_after_s")):
            row[name] = serving_cells.saving(at, "revise", column).value
        for policy, of in at[at["counted"]].groupby("policy"):
            row |= {f"in_flight_{policy}": of["n_in_flight"].mean(), f"p50_{policy}": of["latency_s"].median()}
            row[f"near_{policy}"] = 100 * of["latency_s"].between(0.9 * SLO_S, 1.1 * SLO_S).mean()
        rows.append(row)
    return serving_cells.table(rows)


def trends(comparison: Comparison) -> pd.DataFrame:
    """Return whether the change of goodput and of p99 grows from 1.0 to 1.3 x capacity, a row for each setting."""
    rows = []
    for (setting, name), found in comparison.items():
        if set(PRESSURE) <= set(found.loads) and name in ("goodput_25", "p99"):
            slope, p, n = found.trend()
            rows.append({**setting._asdict(), "measure": name, **slope.as_dict(), "p": p, "n_orders": n})
    return serving_cells.table(rows)


def main(frame: pd.DataFrame, family: str, abort: str = "0 s") -> pd.DataFrame:
    """Return the rows of a family; by default under aborts that take effect at once, as the comparisons take them."""
    return frame[(frame["family"] == family) & (frame["abort"] == abort)]


def published() -> dict[str, dict[float, float]]:
    """Return the published changes of `revise` in percent: measure -> load -> change."""
    from revise_lab.lab.scorecard import claims

    measures = {"goodput": "goodput_25", "p99": "p99"}
    found: dict[str, dict[float, float]] = {name: {} for name in measures.values()}
    for row in claims():
        if row["id"].startswith("R19.") and not row["id"].endswith("pooled"):
            _, name, load = row["id"].split(".", 2)
            found[measures[name]][float(load)] = row["value"]
    return found


def verdicts(changes: pd.DataFrame, trends: pd.DataFrame) -> list[str]:
    """Say for `revise` on each family what the intervals and the test of the trend allow to say."""
    lines = []
    chosen = trends[(trends["policy"] == "revise") & (trends["abort"] == "0 s")]
    for row in chosen.to_dict("records"):
        better = 1 if row["measure"].startswith("goodput") else -1
        points = main(changes, row["family"]).query("policy == 'revise' and measure == @row['measure']")
        sides = [(f"{of['load']:g}", better * _side(of)) for of in points.to_dict("records")]
        clear, worse = (", ".join(load for load, side in sides if side == one) for one in (1, -1))
        trend = better * _side(row) if row["p"] <= 0.05 else 0
        lines.append(
            f"{row['family']}, {row['measure']}: better than suffix beyond the interval at {clear or 'no load'}"
            f"{', worse at ' + worse if worse else ''}; from 1.0 to 1.3 x the gain {_TRENDS[trend]}"
            f" ({row['value']:+.2f} [{row['low']:+.2f}, {row['high']:+.2f}] points per 0.1 x, p = {row['p']:.3f}"
            f" among {row['n_orders']} orders)"
        )
    return lines


_TRENDS = {1: "grows", 0: "neither grows nor shrinks beyond its interval", -1: "shrinks"}


def _side(row: Mapping[str, Any]) -> int:
    """Return on which side of 0 an interval lies; 0 if on both."""
    return int(row["low"] > 0) - int(row["high"] < 0)


def values(frame: pd.DataFrame) -> list[dict[str, Any]]:
    """Return R18 (work), R19 (goodput and p99) and R20 (the design), and the trend and correctness beside them."""
    source = serving_cells.source(frame)
    pair = main(frame, "S12")
    pair = pair[pair["policy"].isin(["revise", "suffix"])]
    rows = [
        serving_cells.value_row(f"R18.{name}", serving_cells.saving(pair, "revise", column), source, n=len(pair))
        for name, column in (("tokens", "completion_after_tokens"), ("model_wall", "wall_after_s"))
    ]
    measures = {"goodput_25": "goodput", "p99": "p99"}
    for (_, measure), found in compare(pair, measures).items():
        name = measures[measure]
        loads = [load for load in PRESSURE if load in found.loads]
        rows += [serving_cells.value_row(f"R19.{name}.{load:.1f}", found.at(load), source) for load in loads]
        if len(loads) == len(PRESSURE):
            slope, p, _ = found.trend()
            rows.append(serving_cells.value_row(f"R19.{name}.pooled", found.pooled(), source))
            rows.append(serving_cells.value_row(f"trend.{name}", slope, f"{source}, permutation p = {p:.3f}"))
    capacity = f"{source}; our capacity {frame['capacity_per_s'].iloc[0]:g}/s, found by scanning suffix alone"
    rows.append(value_row("R20", _design(pair), len(pair), "design", capacity))
    return [*rows, incorrect(frame, source)]


def incorrect(frame: pd.DataFrame, source: str) -> dict[str, Any]:
    """Return how many workflows were wrong, as a row of ``values.json``."""
    wrong = int((~frame["correct"].astype(bool)).sum())
    return value_row("n_incorrect", wrong, len(frame), "workflows", source, wrong, wrong)


def _design(pair: pd.DataFrame) -> str:
    """Return ``as published``, or what of the design is another one."""
    wanted: dict[str, list[Any]] = {"load": list(LOADS), "policy": ["revise", "suffix"], "replicate": [0, 1, 2]}
    wanted |= {"n_workflows": [500], "n_tenants": [64], "n_replicas": [4], "revised_share": [0.5]}
    found = {name: sorted(pair[name].unique().tolist()) for name in wanted}
    other = [f"{name} {', '.join(map(str, found[name]))}" for name in wanted if found[name] != wanted[name]]
    return "; ".join(other) or "as published"
