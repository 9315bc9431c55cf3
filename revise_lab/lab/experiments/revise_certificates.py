"""What a certificate check and a plan cost, and what makes them grow (arXiv:2609.00643, A.2 and A.3).

Everything is measured on the machine that runs it, alone (``exclusive: true``), on real machines that were driven by
events; the published figures, from another machine and another program, stand beside and are not judged. Assumption (the
paper gives no shape of a check): eight reads, three levels deep, and three parents. A sample is one operation between two
readings of the clock, whose own cost is subtracted; what is compared within a cell is sampled in turn.

Four kinds of cells (``part``): ``check``, one certificate that holds, by how many revisions came since its attempt started
and where; ``unrelated``, by how much others have read; ``arrival``, what a revision pays so that the check need not;
``plan``, one revision that affects ten nodes, by the size of the graph.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any, Final, Literal

import numpy as np
import pandas as pd
from pydantic import BaseModel, ConfigDict, Field

from revise_lab.lab.bench import certificate, planning
from revise_lab.lab.bench.samples import Row, Still, summary
from revise_lab.lab.experiments import Column
from revise_lab.lab.rows import grouped, value_row

ALGORITHM_VERSION = 1
NOT_IN_SEED = frozenset({"check", "n_samples"})

COLUMNS = {
    "what": Column("exact", "", "the operation that is timed", "str"),
    "size": Column("exact", "", "revisions, unrelated reads or nodes, by part", "int"),
    "n": Column("exact", "samples", "samples taken", "int"),
    "p50_us": Column("timed", "us", "median", "float"),
    "p95_us": Column("timed", "us", "95th percentile", "float"),
    "max_us": Column("timed", "us", "slowest sample", "float"),
    "budget_us": Column("exact", "us", "what the median may be, our choice", "float"),
}
CHECK: Final = "certificate check"
_POLICY: Final = {"delta": "revise", "digest": "revise_plus"}


class Params(BaseModel):
    """One cell; what does not concern its part stays at its default."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    part: Literal["check", "unrelated", "arrival", "plan"] = Field(description="what the cell times, see the module")
    check: Literal["delta", "digest"] = Field("delta", description="the published check, or ours")
    where: Literal["nowhere", "another artifact", "the same artifact", "all that was read"] = Field(
        "nowhere", description="what the revisions since the start have changed; the last: there and back"
    )
    n_revisions: int = Field(0, ge=0, description="revisions since the attempt started")
    n_samples: int = Field(
        2_000, ge=20, description="samples of each operation; of planning, a hundredth as many rounds"
    )
    sizes: tuple[int, ...] = Field((), description="numbers of unrelated reads, or of nodes")


def cell(params: Params, seed: int, replicate: int) -> list[dict[str, Any]]:
    """Return a row for each operation and size of a cell; nothing here is drawn, so the seed changes nothing."""
    how, n = _POLICY[params.check], params.n_samples
    if params.part == "plan":
        return list(_planning(planning.planning_of(how, params.sizes, max(1, n // 100)), params.sizes))
    if params.part == "unrelated":
        samples = certificate.unrelated_checks(how, params.sizes, n)
        return [_row(CHECK, size, taken, 1.0) for size, taken in zip(params.sizes, samples, strict=True)]
    if params.part == "arrival":
        return [_of(row, f"{row.what}: {row.case}", 1) for row in certificate.at_revision(max(20, n // 20))]
    if params.where == "all that was read":
        machine, attempt = certificate.touched()
    else:
        machine, attempt = certificate.untouched(how, params.where, params.n_revisions)
    with Still():
        taken = certificate.checks(machine, attempt, n)
    return [_row(CHECK, params.n_revisions, taken, 2.0 if params.where == "all that was read" else 1.0)]


def _row(what: str, size: int, samples: list[float], budget_us: float) -> dict[str, Any]:
    return _of(summary(what, "", samples, budget_us), what, size) | {"max_us": max(samples)}


def _of(row: Row, what: str, size: int) -> dict[str, Any]:
    return {
        "what": what, "size": size, "n": row.n, "p50_us": row.p50, "p95_us": row.p95, "budget_us": row.budget,
    }  # fmt: skip


def _planning(rows: Iterable[Row], sizes: tuple[int, ...]) -> Iterable[dict[str, Any]]:
    """Yield rows with the size of their graph; each operation comes once for each size, in order."""
    seen = Counter[str]()
    for row in rows:
        if row.what == "instead of the index":  # on the largest graph only
            yield _of(row, row.case.partition(",")[0], sizes[seen["planning"] - 1])
            continue
        yield _of(row, row.what, sizes[seen[row.what]])
        seen[row.what] += 1


def estimate(params: Params) -> dict[str, float]:
    """Return what a cell costs; measured on two cores of a laptop-class machine, for ``--dry-run`` only."""
    grown = sum(params.sizes) * (2e-4 if params.part == "plan" else 1e-5)
    return {"wall_s": 0.2 + 1e-5 * params.n_samples + grown}


def costs(frame: pd.DataFrame) -> pd.DataFrame:
    """Return one row for each operation, setting and size, with the median over replicates."""
    keys = ["part", "check", "what", "where", "size"]
    found = frame.groupby(keys, sort=False, as_index=False, dropna=False).agg(
        n=("n", "sum"), p50_us=("p50_us", "median"), p95_us=("p95_us", "median"), max_us=("max_us", "max"),
        budget_us=("budget_us", "first"),
    )  # fmt: skip
    over = found["budget_us"] < found["p50_us"]
    return found.assign(met=np.where(found["budget_us"].isna(), "", np.where(over, "no", "yes")))


def growth(costs: pd.DataFrame) -> pd.DataFrame:
    """Return the growth exponent of each operation: the slope of log median over log size, 0 where nothing grows.

    Sizes of 0 have no logarithm and are left out; two sizes are the least that have a slope.
    """
    keys, rows = ["part", "check", "what", "where"], []
    for named, part in grouped(costs[costs["size"] > 0], keys, sort=False):
        if len(part) > 1:
            sizes, cost_us = part["size"].to_numpy(float), part["p50_us"].clip(lower=1e-3).to_numpy(float)
            slope = np.polyfit(np.log10(sizes), np.log10(cost_us), 1)[0]
            rows.append(named | {"from": int(sizes.min()), "to": int(sizes.max()), "exponent": float(slope)})
    return pd.DataFrame(rows, columns=[*keys, "from", "to", "exponent"])


def values(frame: pd.DataFrame) -> list[dict[str, Any]]:
    """Return the R03 rows (the published check, one revision of another place) and R14.planner (the smallest graph)."""
    table = costs(frame)
    published = table[table["check"] == "delta"]
    checked = published[(published["part"] == "check") & (published["where"] == "the same artifact")]
    planned = published[published["what"] == "planning"].nsmallest(1, "size")
    costs_us = [
        (f"R03.{name}", row[f"{name}_us"], row["n"])
        for row in checked[checked["size"] == 1].to_dict("records")
        for name in ("p50", "p95", "max")
    ]
    costs_us += [("R14.planner", row["p50_us"], row["n"]) for row in planned.to_dict("records")]
    return [value_row(name, cost_us / 1e3, n, "ms", "measured (this machine)") for name, cost_us, n in costs_us]
