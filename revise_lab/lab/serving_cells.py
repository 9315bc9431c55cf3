"""What the serving experiments share: the operating point fixed beforehand, workloads of both families, a run in rows.

The operating point (call lengths and capacity) comes from ``data/capacity.json``, which ``revise-lab serving scan`` wrote
with one policy alone. Cells carry its numbers as parameters, so that another point makes other cells.
"""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from revise_lab.errors import ConfigError, ResultsError
from revise_lab.lab.experiments import Column
from revise_lab.records.revision import Change, Op, Revision
from revise_lab.records.value import freeze
from revise_lab.records.workflow import Graph
from revise_lab.runtime.serving_run import Lengths, Make, ServingRun, jobs, serve_workflows
from revise_lab.serving.cost import load
from revise_lab.serving.engine import Cluster
from revise_lab.workloads.serving import FAMILIES
from revise_lab.workloads.synthetic import free_family

if TYPE_CHECKING:
    import pandas as pd

    from revise_lab.lab import stats

CAPACITY_FILE = Path(__file__).resolve().parents[2] / "data" / "capacity.json"
N_FREE = 64
"""Free families in use: a workflow takes one at random."""
ABORTS: dict[str, float | None] = {"0 s": 0.0, "2 s": 2.0, "never": None}
"""How long a request goes on after its client has left."""
WARM_SHARE, COOL_SHARE = 180 / 500, 40 / 500
"""Published: of 500 workflows 180 warm up and 40 cool down; other sizes keep the shares."""

COLUMNS = {
    "workflow": Column("exact", "", "number of the workflow, in order of arrival", "int"),
    "counted": Column("exact", "", "neither warm-up nor cool-down", "bool"),
    "arrival_s": Column("exact", "s", "arrival in virtual time", "float"),
    "status": Column("exact", "", "finished, unfinished or rejected", "str"),
    "latency_s": Column("exact", "s", "from arrival to the correct end; infinite if there is none", "float"),
    "revised": Column("exact", "", "whether a revision took effect", "bool"),
    "correct": Column("exact", "", "whether the result equals the latest-version oracle", "bool"),
    "stale_effects": Column("exact", "effects", "staged effects that differ from the oracle's", "int"),
    "n_aborted": Column("exact", "calls", "calls aborted on the way", "int"),
    "wasted_tokens": Column("exact", "tokens", "prefilled or decoded by calls that the result does not use", "int"),
    "n_calls": Column("exact", "calls", "model calls", "int"),
    "completion_tokens": Column("exact", "tokens", "output tokens of all calls", "int"),
    "wall_s": Column("exact", "s", "model-wall: sum over calls from asking to the answer or the abort", "float"),
    "n_calls_after": Column("exact", "calls", "calls asked for from the revision on", "int"),
    "completion_after_tokens": Column("exact", "tokens", "output tokens from the revision to the correct end", "int"),
    "wall_after_s": Column("exact", "s", "model-wall from the revision to the correct end", "float"),
}
"""Columns of a workflow; each but ``counted`` is a field of `WorkflowRow`."""


@functools.cache
def operating_point(path: Path = CAPACITY_FILE) -> dict[str, Any]:
    """Return what the scan has fixed: profile, lengths and ``capacity_per_s``.

    Raises
    ------
    ConfigError
        No scan was kept.
    """
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        raise ConfigError(f"there is no {path.name} in '{path.parent.name}' - run `revise-lab serving scan`") from None


def fixed(name: str) -> Any:
    """Return a function that gives one number of the operating point, for the default of a parameter."""
    return lambda: operating_point()[name]


def maker(family: str, output_tokens: int) -> Make:
    """Return what gives each workflow its graph, inputs and revision; every leaf is as likely to change."""

    def make(_: int, rng: np.random.Generator) -> tuple[Graph, dict[str, Any], Revision]:
        number = int(rng.integers(N_FREE))
        revised, graph, inputs = _family(family, number if family == "free" else 0, output_tokens)
        artifact, field = revised[int(rng.integers(len(revised)))].split(".")
        return graph, inputs, Revision("r1", (Change(artifact, Op.SET, (field,), f"second {field}"),))

    return make


@functools.cache
def _family(name: str, number: int, output_tokens: int) -> tuple[tuple[str, ...], Graph, dict[str, Any]]:
    family = FAMILIES[name] if name != "free" else free_family(np.random.default_rng(number), f"free{number}")
    inputs = {artifact: freeze(value) for artifact, value in family.inputs().items()}
    return family.revised, family.workflow(output_tokens).graph(), inputs


def serve(
    seed: int,
    policy: str,
    rate_per_s: float,
    *,
    family: str = "S12",
    n_workflows: int,
    prompt_tokens: int,
    shared_tokens: int,
    output_tokens: int,
    profile: str,
    n_replicas: int,
    n_tenants: int,
    revised_share: float = 0.5,
    abort: str = "0 s",
    routing: str = "least_loaded",
    cv: float = 0.0,
    factors: dict[str, float] | None = None,
    sample_s: float = float("inf"),
    endpoint: str = "emulated",
    max_concurrent: int = 256,
    max_requests: int = 100_000,
) -> ServingRun:
    """Serve one open-loop run to its end and return what became of the workflows that came.

    Parameters
    ----------
    seed : int
        Of arrivals, tenants, revisions and families.
    policy : str
        How to recover; nothing that is drawn depends on it.
    rate_per_s : float
        Arrivals a second.
    family, n_workflows, revised_share
        The workload.
    prompt_tokens, shared_tokens, output_tokens, cv, factors
        Lengths of a call, see `Lengths`.
    profile, n_replicas, n_tenants, abort, routing
        The cluster; ``abort`` is a key of `ABORTS`. ``pinned`` keeps a tenant at one replica, the same under every policy.
    sample_s : float
        Time between samples of the load.
    endpoint, max_concurrent, max_requests
        Where calls go; a real endpoint is asked on the clock, see `revise_lab.runtime.serving_live`. There ``abort`` is how
        long a stream is kept open after its answer is not wanted any more.
    """
    make = maker(family, output_tokens)
    coming = jobs(seed, n_workflows, rate_per_s, make, n_tenants=n_tenants, revised_share=revised_share)
    lengths = Lengths(prompt_tokens, shared_tokens, cv, factors or {})
    if endpoint != "emulated":
        from revise_lab.lab.executors import on_own_loop
        from revise_lab.runtime.serving_live import serve_live

        limits = {"max_concurrent": max_concurrent, "max_requests": max_requests, "sample_s": sample_s}
        live = serve_live(
            coming, endpoint, policy, lengths, abort_delay_s=ABORTS[abort], pinned=routing == "pinned", **limits
        )
        return on_own_loop(live)
    cost = load(profile)
    cost = cost if ABORTS[abort] == cost.abort_delay_s else cost.with_(abort_delay_s=ABORTS[abort])
    return serve_workflows(coming, Cluster(cost, n_replicas, routing=routing), policy, lengths, sample_s=sample_s)


def is_counted(number: int, n: int) -> bool:
    """Say whether a workflow is neither warm-up nor cool-down."""
    return round(WARM_SHARE * n) <= number < n - round(COOL_SHARE * n)


def rows_of(run: ServingRun, n: int) -> list[dict[str, Any]]:
    """Return a row for each workflow with the columns of `COLUMNS`."""
    names = [name for name in COLUMNS if name != "counted"]
    return [{name: getattr(row, name) for name in names} | {"counted": is_counted(row.workflow, n)} for row in run.rows]


def saving(frame: pd.DataFrame, policy: str, value: str, against: str = "suffix", seed: int = 0) -> stats.Interval:
    """Return how much of a column's sum a policy saves against another, in percent.

    Both sums run over the workflows that were revised under both. A workload (replicate and number of a workflow) that
    appears at several loads is one unit of the bootstrap.
    """
    from revise_lab.lab import stats

    keys = ["replicate", "workflow", "load"]
    sides = [frame[(frame["policy"] == name) & frame["revised"]].set_index(keys)[value] for name in (policy, against)]
    both = sides[0].index.intersection(sides[1].index)
    sums = [side.loc[both].groupby(level=keys[:2]).sum().to_numpy(float) for side in sides]
    found = stats.ratio(*sums, seed=seed, n_resamples=2000, over="workflows")
    return stats.Interval(
        100 * (1 - found.value), 100 * (1 - found.high), 100 * (1 - found.low), len(both), "%", found.kind
    )


def source(frame: pd.DataFrame) -> str:
    """Return the label of a frame's values."""
    endpoint = str(frame["endpoint"].iloc[0])
    return f"emulated ({frame['profile'].iloc[0]})" if endpoint == "emulated" else f"measured ({endpoint})"


def estimate(n_workflows: int, rate_per_s: float, endpoint: str) -> dict[str, float]:
    """Return what a run costs; emulated, measured on two cores of a laptop-class machine, for ``--dry-run`` only."""
    if endpoint == "emulated":
        return {"wall_s": 0.004 * n_workflows}
    return {"wall_s": n_workflows / rate_per_s + 60, "calls": 15.0 * n_workflows}


def kv_capacity_tokens(frame: pd.DataFrame) -> int:
    """Return the KV memory of all replicas of a frame's cells."""
    profile, n_replicas = frame["profile"].iloc[0], int(frame["n_replicas"].iloc[0])
    return n_replicas * load(profile).kv_capacity_tokens


def value_row(id: str, found: stats.Interval, source: str, n: int | None = None) -> dict[str, Any]:
    """Return an interval as a row of ``values.json``."""
    kept = {key: value for key, value in found.as_dict().items() if key != "kind"}
    return {"id": id, **kept, "source": source} | ({} if n is None else {"n": n})


def table(rows: list[dict[str, Any]]) -> pd.DataFrame:
    """Return rows as a frame; workers, which only serve, are spared the import."""
    import pandas as pd

    return pd.DataFrame(rows)


def check(frame: pd.DataFrame) -> str:
    """Say in one line how many workflows were served, and that none of them is wrong.

    Raises
    ------
    ResultsError
        A finished workflow differs from the latest-version oracle, or its effects do.
    """
    finished = frame["status"] == "finished"
    wrong = int((finished & ~frame["correct"].astype(bool)).sum())
    stale = int(frame["stale_effects"].sum())
    if wrong or stale:
        raise ResultsError(
            f"{wrong} workflows differ from the latest-version oracle and {stale} effects are stale - a policy or the"
            " machine is at fault; find the first with frame[~frame.correct]"
        )
    misses = len(frame) - int(finished.sum())
    return f"{len(frame)} workflows, {misses} unfinished or rejected; all others equal the oracle, 0 stale effects"
