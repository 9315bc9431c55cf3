"""Provenance sweep (arXiv:2609.00643, A.4): what recovery costs when part of the provenance is missing.

Every workflow is revised once and run to its end; the plan gives the ratio of recomputed to active work. Assumption: the
revision arrives while the last step runs (``arrival="last"``), so that every node has provenance to lose; at a uniform
time (``"uniform"``) a node that has not started cannot be hit, and every ratio is lower. The leaves take turns. A mask
decides which recorded reads of inputs survive. Assumption (the paper does not say how
"half" is drawn): a coin for each recorded read, kept with probability ``coverage``. A read that is lost keeps its artifact
(``loss="coarse"``); under ``loss="unknown"`` nothing of it is known and its node may have read everything. Masks are
nested: what survives at one coverage survives at every higher one. They hang on the workload's seed, never on the policy.
"""

from __future__ import annotations

from hashlib import blake2b
from typing import Any, Literal

import numpy as np
import pandas as pd
from pydantic import BaseModel, ConfigDict, Field

from revise_lab.lab import stats
from revise_lab.lab.experiments import Column
from revise_lab.lab.rows import grouped, value_row
from revise_lab.policies import policy
from revise_lab.records.attempt import Coverage
from revise_lab.records.revision import Change, Op, Revision
from revise_lab.records.selector import Marker, Selector, format_path
from revise_lab.records.workflow import Graph
from revise_lab.runtime.simulator import simulate, truth_of
from revise_lab.workloads.serving import FAMILIES, Family
from revise_lab.workloads.synthetic import free_family

ALGORITHM_VERSION = 1
NOT_IN_SEED = frozenset({"coverage", "unit", "policy", "unknown", "loss", "arrival"})
N_TOKENS = 4
"""Output tokens a call; nothing here depends on them."""

COLUMNS = {
    "workflow": Column("exact", "", "number of the workflow in its cell", "int"),
    "leaf": Column("exact", "", "the revised leaf", "str"),
    "arrival_s": Column("exact", "s", "arrival of the revision in virtual time, calls last 1 s", "float"),
    "n_affected": Column("exact", "nodes", "nodes cancelled, avoided or recomputed", "int"),
    "n_active": Column("exact", "nodes", "nodes of the revised workflow, pending ones included", "int"),
    "fallback": Column("exact", "", "whether the plan was a full restart", "bool"),
    "n_calls_after": Column("exact", "calls", "calls begun at or after the revision", "int"),
    "correct": Column("exact", "", "whether the outputs equal the latest-version oracle", "bool"),
}


class Params(BaseModel):
    """One cell: a batch of workflows under one mask."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    family: Literal["S12", "S8", "free"] = Field("S12", description="workflow family; free is a new random DAG each")
    unit: Literal["read", "field", "node"] = Field("read", description="what one coin decides")
    coverage: float = Field(1.0, ge=0.0, le=1.0, description="probability that a coin keeps what it decides on")
    policy: Literal["revise", "suffix", "restart"] = "revise"
    unknown: Literal["global", "local"] = Field("global", description="the published rule, or ours")
    loss: Literal["coarse", "unknown"] = Field("coarse", description="what is left of a lost read")
    arrival: Literal["last", "uniform"] = Field("last", description="when the revision comes")
    n_workflows: int = Field(100, ge=1, description="workflows in the batch")


def cell(params: Params, seed: int, replicate: int) -> list[dict[str, Any]]:
    """Run a batch of revised workflows and return a row for each."""
    return [_workflow(params, seed, number) for number in range(params.n_workflows)]


def _workflow(params: Params, seed: int, number: int) -> dict[str, Any]:
    rng = np.random.default_rng([seed, number])
    family = FAMILIES[params.family] if params.family != "free" else free_family(rng)
    leaf = family.revised[number % len(family.revised)]
    graph = _graph(family)
    arrival_s = n_steps(graph) - float(rng.uniform(0.1, 0.9))
    if params.arrival == "uniform":
        arrival_s = float(rng.uniform(0.0, n_steps(graph)))
    artifact, field = leaf.split(".")
    revision = Revision("r1", (Change(artifact, Op.SET, (field,), f"second {field}"),))
    run = simulate(
        graph,
        family.inputs(),
        policy(params.policy, unknown=params.unknown),
        revisions=[(arrival_s, revision)],
        loss=mask(params, f"{seed}/{number}"),
    )
    _, differences = truth_of(run)
    plan = run.plans[0]
    return {
        "workflow": number,
        "leaf": leaf,
        "arrival_s": arrival_s,
        "n_affected": len(plan.affected),
        "n_active": plan.n_active,
        "fallback": plan.scope == "restart",
        "n_calls_after": len(run.executed(arrival_s)),
        "correct": not differences,
    }


_GRAPHS: dict[str, Graph] = {}


def _graph(family: Family) -> Graph:
    if not family.matched:
        return family.workflow(N_TOKENS).graph()
    if family.name not in _GRAPHS:
        _GRAPHS[family.name] = family.workflow(N_TOKENS).graph()
    return _GRAPHS[family.name]


def n_steps(graph: Graph) -> int:
    """Return the length of the longest path, in nodes: the unrevised run in seconds when a call lasts one."""
    depth: dict[str, int] = {}
    for name in graph.order:
        depth[name] = 1 + max((depth[parent] for parent in graph.nodes[name].parents), default=0)
    return max(depth.values())


def mask(params: Params, workload: str) -> Any:
    """Return the rule that degrades the record of a read, a function of (node, selector)."""
    lost = Coverage(params.loss)

    def kept(node: str, selector: Selector) -> Coverage:
        if selector.marker is Marker.KIND:
            return Coverage.COMPLETE
        leaf = format_path(selector.artifact, selector.path)
        coin = {"read": f"{node}/{leaf}", "field": leaf, "node": node}[params.unit]
        return Coverage.COMPLETE if uniform(f"{workload}/{params.unit}/{coin}") < params.coverage else lost

    return kept


def uniform(text: str) -> float:
    """Return a number in [0, 1) that depends on a text only, so that masks need no order of drawing."""
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "big") / 2.0**64


def estimate(params: Params) -> dict[str, float]:
    """Return what a cell costs; measured on two cores of a laptop-class machine, for ``--dry-run`` only."""
    return {"wall_s": 0.0015 * params.n_workflows}


def curves(frame: pd.DataFrame, seed: int = 0) -> pd.DataFrame:
    """Return one row for each point of each curve, with intervals, as the figure and the table take them.

    Workflows are resampled (bootstrap) for the ratio of sums; the share of fallbacks has a Clopper-Pearson interval.
    """
    keys = ["family", "unit", "policy", "unknown", "loss", "arrival", "coverage"]
    rows = []
    for row, part in grouped(frame, keys):
        work = stats.ratio(part["n_affected"], part["n_active"], seed=seed, n_resamples=1000, over="workflows")
        fallback = stats.proportion(int(part["fallback"].sum()), len(part))
        row |= {"matched": row["family"] != "free"}
        for name, stem, found in (("recompute_ratio", "recompute", work), ("fallback_share", "fallback", fallback)):
            row |= {name: found.value, f"{stem}_low": found.low, f"{stem}_high": found.high}
        rows.append(row | {"n": len(part), "n_incorrect": int((~part["correct"].astype(bool)).sum())})
    return pd.DataFrame(rows)


def values(frame: pd.DataFrame) -> list[dict[str, Any]]:
    """Return the six R22 rows: family S12, a coin a read, the published rule."""
    chosen = curves(frame).query(
        "family == 'S12' and unit == 'read' and policy == 'revise' and unknown == 'global' and loss == 'coarse'"
        " and arrival == 'last'"
    )
    rows = []
    for name, coverage in (("complete", 1.0), ("half", 0.5), ("unknown", 0.0)):
        for row in chosen[np.isclose(chosen["coverage"], coverage)].to_dict("records"):
            for metric, value in (("recompute", "recompute_ratio"), ("fallback", "fallback_share")):
                share, low, high = (100 * row[column] for column in (value, f"{metric}_low", f"{metric}_high"))
                rows.append(value_row(f"R22.{metric}.{name}", share, row["n"], "%", low=low, high=high))
    return rows
