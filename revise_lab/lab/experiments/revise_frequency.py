"""Revision frequency (arXiv:2609.00643, A.4): what recovery saves when 0 to 100 % of the workflows are revised.

One cell is one open-loop run at a moderate load. Who is revised is nested: a workflow that is revised at one share is
revised, at the same moment, at every higher one, and every policy meets the same. Assumption: the savings are taken over
revised workflows, from the revision to the correct end; the change of model time without revisions is taken over all.
How long calls are is a free choice: ``lengths`` varies it, and no choice is tuned.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from revise_lab.lab import serving_cells
from revise_lab.lab.experiments.revise_serving import incorrect, saved
from revise_lab.lab.rows import beside, value_row
from revise_lab.lab.serving_cells import fixed

if TYPE_CHECKING:
    import pandas as pd

ALGORITHM_VERSION = 1
LOOK_UPS = ("intake", "account", "catalog", "freight", "policy")
LENGTHS: dict[str, dict[str, Any]] = {
    "equal": {},
    "cv 0.5": {"cv": 0.5},
    "cv 1": {"cv": 1.0},
    "short look-ups": {"factors": dict.fromkeys(LOOK_UPS, 0.5)},
    "long drafts": {"factors": {"draft": 2.0, "answer": 2.0}},
}
"""Output lengths of calls; the last two name nodes of S12."""
PUBLISHED_SHARES = (0.0, 0.1, 0.25, 0.5)
COLUMNS = serving_cells.COLUMNS


class Params(BaseModel):
    """One cell: one open-loop run under one policy, some of whose workflows are revised."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    family: Literal["S12", "free"] = Field("S12", description="S12 is matched; free is a random DAG that nobody fitted")
    revised_share: float = Field(0.5, ge=0.0, le=1.0, description="share of the workflows that are revised once")
    lengths: Literal["equal", "cv 0.5", "cv 1", "short look-ups", "long drafts"] = "equal"
    policy: Literal["restart", "suffix", "revise", "revise_plus", "wait"] = "revise"
    load: float = Field(0.7, gt=0.0, description="rate of arrivals over the capacity")
    n_workflows: int = Field(500, ge=25)
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
    """Serve one run and return a row for each workflow."""
    given = params.model_dump(exclude={"load", "policy", "capacity_per_s", "lengths"})
    run = serving_cells.serve(
        seed, params.policy, params.load * params.capacity_per_s, **given, **LENGTHS[params.lengths]
    )
    return serving_cells.rows_of(run, params.n_workflows)


def estimate(params: Params) -> dict[str, float]:
    """Return what a cell costs, for ``--dry-run`` only."""
    return serving_cells.estimate(params.n_workflows, params.load * params.capacity_per_s, params.endpoint)


SETTING = ["family", "lengths", "revised_share"]
MEASURES = {"tokens": "completion_after_tokens", "wall": "wall_after_s"}


def savings(frame: pd.DataFrame) -> pd.DataFrame:
    """Return what each policy saves against suffix per revised workflow, in percent, a row for each setting."""
    runs = beside(frame[frame["revised_share"] > 0], SETTING)
    return serving_cells.table([named | saved(part, named["policy"], MEASURES) for named, part in runs])


def model_time(frame: pd.DataFrame) -> pd.DataFrame:
    """Return the change of all model time against suffix, in percent, over all workflows, a row for each setting."""
    from revise_lab.lab import stats

    rows = []
    for named, part in beside(frame, SETTING):
        keys = ["replicate", "workflow"]
        sides = [part[part["policy"] == one].set_index(keys)["wall_s"] for one in (named["policy"], "suffix")]
        found = stats.ratio(*(side.sort_index() for side in sides), n_resamples=1000, over="workflows")
        change, low, high = (100 * (end - 1) for end in (found.value, found.low, found.high))
        rows.append({**named, "change": change, "low": low, "high": high, "n": found.n})
    return serving_cells.table(rows)


def values(frame: pd.DataFrame) -> list[dict[str, Any]]:
    """Return the seven R21 rows: family S12, calls of equal length; and how many workflows were wrong."""
    source = serving_cells.source(frame)
    main = frame[
        (frame["family"] == "S12") & (frame["lengths"] == "equal") & frame["policy"].isin(["revise", "suffix"])
    ]
    n = int(main["revised_share"].isin(PUBLISHED_SHARES).sum())
    rows = [
        value_row("R21.no_revision_wall", row["change"], n, "%", source, row["low"], row["high"])
        for row in model_time(main[main["revised_share"] == 0]).to_dict("records")
    ]
    for row in savings(main).to_dict("records"):
        for name, metric in (("tokens", "tokens"), ("wall", "model_wall")):
            if row["revised_share"] in PUBLISHED_SHARES:
                id, ends = f"R21.{metric}.{100 * row['revised_share']:g}", (row[f"{name}_low"], row[f"{name}_high"])
                rows.append(value_row(id, row[name], row["n"], "%", source, *ends))
    return [*rows, incorrect(frame, source)]
