"""Pending actions, revalidated only where a change reaches them (arXiv:2609.08015).

Six kinds of cells (``part``): ``refund``, the published example; ``executions``, actions at five desks that fifteen kinds of
mutation overtake, half of them before the last check and half between it and the target's, against truth by exhaustive
evaluation; ``omission``, the sole edge that would have stopped an action, lost with some probability; ``durable``, ten
changes while the file of pending actions is closed; ``history``, a policy that falls between the last check and the
publication, on SQLite; ``growth``, what an answer costs by how much was read besides, timed alone (``exclusive: true``).

Assumption (the paper names neither applications nor mutation cases): see :mod:`revise_lab.workloads.desk`. An execution is
wrong in one of two ways: released without being justified (false allow) or held back although it was (false block).
"""

from __future__ import annotations

import tempfile
from collections import Counter as Counts
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np
import pandas as pd
from pydantic import BaseModel, ConfigDict, Field

from revise_lab.lab import stats
from revise_lab.lab.bench import conditions as bench
from revise_lab.lab.experiments import Column
from revise_lab.lab.rows import value_row
from revise_lab.records.condition import Verdict
from revise_lab.runtime.pending import PendingActions
from revise_lab.runtime.sql_target import SqlTarget
from revise_lab.workloads.desk import DESKS, DURABLE, MUTATIONS, REFUND_EXAMPLE, case_of, refund_of_80, rules_of
from revise_lab.workloads.desk_trial import HOW, Counter, Execution, Overtaken

ALGORITHM_VERSION = 1
NOT_IN_SEED = frozenset({"how", "omitted", "noticed", "n", "sizes"})

COLUMNS = {
    "what": Column("exact", "", "the mutation, the change, or what is timed", "str"),
    "between": Column("exact", "", "whether it happens after the last check and before the target's", "bool"),
    "size": Column("exact", "reads", "what was read besides and no condition reads", "int"),
    "n_cases": Column("exact", "", "executions, changes or samples", "int"),
    **{f"n_{v.lower()}": Column("exact", "", f"executions with the verdict {v}", "int") for v in Verdict},
    "n_released": Column("exact", "", "actions that were published", "int"),
    "n_false_allow": Column("exact", "", "published without being justified", "int"),
    "n_false_block": Column("exact", "", "held back although justified", "int"),
    "n_wrong_verdict": Column("exact", "", "verdicts that are not the true one", "int"),
    "n_evaluated": Column("exact", "conditions", "conditions and refresh rules evaluated after the decision", "int"),
    "p50_us": Column("timed", "us", "median", "float"),
    "p95_us": Column("timed", "us", "95th percentile", "float"),
}
CRITICAL: Final = "cap below"
"""The mutation whose only edge the omission loses."""


class Params(BaseModel):
    """One cell; what does not concern its part stays at its default."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    part: Literal["refund", "executions", "omission", "durable", "history", "growth"] = Field(
        description="see the module"
    )
    how: Literal["selective", "full_rescan", "version_check", "always_replan", "target_only", "no_check"] = Field(
        "selective", description="how an action is checked before it leaves"
    )
    desk: Literal["refund", "order", "booking", "deployment", "access"] = "refund"
    omitted: float = Field(0.0, ge=0.0, le=1.0, description="probability that the sole critical edge is lost")
    noticed: bool = Field(False, description="whether it is known which captures are partial")
    n: int = Field(
        100, ge=1, description="executions, of each mutation where there are several, or samples of each size"
    )
    sizes: tuple[int, ...] = Field((), description="numbers of unrelated reads")


class _Shop(Overtaken, SqlTarget):
    """A SQLite target that can be overtaken."""


def cell(params: Params, seed: int, replicate: int) -> list[dict[str, Any]]:
    """Return the rows of a cell."""
    rng = np.random.default_rng(seed)
    if params.part == "refund":
        case, counter = refund_of_80(), Counter(params.how)
        return [_row(what, [counter.execute(case, happens(case))]) for what, happens in REFUND_EXAMPLE.items()]
    if params.part == "executions":
        return _executions(params, rng)
    if params.part == "omission":
        return [_omission(params, rng)]
    if params.part == "durable":
        with tempfile.TemporaryDirectory() as folder:
            return [_durable(params, i, rng, Path(folder)) for i in range(len(DURABLE))]
    if params.part == "history":
        with tempfile.TemporaryDirectory() as folder:
            return [_history(params, Path(folder))]
    rows = []
    for way, samples in bench.growth(params.sizes, params.n).items():
        for size, taken in zip(params.sizes, samples, strict=True):
            p50_us, p95_us = np.percentile(taken, (50, 95)).tolist()
            rows.append(_blank(way) | {"size": size, "n_cases": len(taken), "p50_us": p50_us, "p95_us": p95_us})
    return rows


def _executions(params: Params, rng: np.random.Generator) -> list[dict[str, Any]]:
    counter, rows = Counter(params.how), []
    for name, happens in MUTATIONS.items():
        for between in (False, True):
            found = []
            for _ in range(params.n // 2 + (params.n % 2 and not between)):
                case = case_of(DESKS[params.desk], rng)
                found.append(counter.execute(case, happens(case, rng), between=between))
            rows.append(_row(name, found, between=between))
    return rows


def _omission(params: Params, rng: np.random.Generator) -> dict[str, Any]:
    desk, lost = DESKS["refund"], False
    counter = Counter(
        omit=lambda name, selector: lost and name == rules_of(desk)[0].name and selector.path == (desk.cap,)
    )
    found = []
    for coin in rng.random(params.n):
        # The same coins at every probability: what is lost at one is lost at every larger one.
        lost = bool(coin < params.omitted)
        case = case_of(desk, rng)
        found.append(counter.execute(case, MUTATIONS[CRITICAL](case, rng), partial=params.noticed and lost))
    return _row(CRITICAL, found)


def _durable(params: Params, i: int, rng: np.random.Generator, folder: Path) -> dict[str, Any]:
    """Propose, close the file, change, open it again: what is evaluated then."""
    case, (what, change) = case_of(list(DESKS.values())[i % len(DESKS)], rng), DURABLE[i]
    shop = SqlTarget(f"sqlite:///{folder / f'{i}.db'}")
    for resource, value in case.state.items():
        shop.set(resource, value)
    rules = rules_of(case.desk)
    first = PendingActions(shop, rules, folder / f"pending {i}.db")
    first.propose(case.action("a", refresh=False))
    first.close()
    shop.set(*change(case))
    later = PendingActions(shop, rules, folder / f"pending {i}.db")
    if params.how == "full_rescan":
        later.graph.n_evaluated = 0
        later.graph.rescan("a")
    verdict = later.graph.waiting["a"].verdict
    row = _blank(what) | {"n_cases": 1, "n_evaluated": later.graph.n_evaluated, f"n_{verdict.lower()}": 1}
    later.close()
    shop.close()
    return row


def _history(params: Params, folder: Path) -> dict[str, Any]:
    """Validate the refund of 80 under a limit of 100, let the limit fall to 50, and send the refund."""
    shop, case = _Shop(f"sqlite:///{folder / 'shop.db'}"), refund_of_80()
    counter, falls = Counter(params.how, shop), REFUND_EXAMPLE["limit_50"](case)
    found = [counter.execute(case, falls, between=True) for _ in range(params.n)]
    shop.close()
    return _row(CRITICAL, found, between=True)


def _blank(what: str, *, between: bool = False) -> dict[str, Any]:
    counts = dict.fromkeys((name for name, column in COLUMNS.items() if column.dtype == "int"), 0)
    return {"what": what, "between": between, "p50_us": None, "p95_us": None} | counts


def _row(what: str, found: list[Execution], *, between: bool = False) -> dict[str, Any]:
    verdicts = Counts(each.verdict for each in found)
    return _blank(what, between=between) | {
        "n_cases": len(found),
        **{f"n_{verdict.lower()}": verdicts[verdict] for verdict in Verdict},
        "n_released": sum(each.released for each in found),
        "n_false_allow": sum(each.false_allow for each in found),
        "n_false_block": sum(each.false_block for each in found),
        "n_wrong_verdict": sum(each.verdict is not each.truth for each in found),
        "n_evaluated": sum(each.n_evaluated for each in found),
    }


def estimate(params: Params) -> dict[str, float]:
    """Return what a cell costs; measured on two cores of a laptop-class machine, for ``--dry-run`` only."""
    one_s = {"refund": 0.01, "executions": 0.02, "omission": 1e-3, "durable": 2e-3, "history": 0.1, "growth": 0.01}
    return {"wall_s": 0.2 + one_s[params.part] * params.n + 1e-5 * sum(params.sizes)}


def outcomes(frame: pd.DataFrame) -> pd.DataFrame:
    """Return, for each way of checking, the mix of verdicts, what went wrong and the conditions evaluated for one action."""
    part = frame[frame["part"] == "executions"]
    counts = [name for name in part.columns if name.startswith("n_")]
    table = part.groupby("how")[counts].sum()
    table = table.reindex([how for how in HOW if how in table.index]).reset_index()
    return table.assign(evaluated_each=table["n_evaluated"] / table["n_cases"])


def omissions(frame: pd.DataFrame) -> pd.DataFrame:
    """Return the share of false allows against the share of lost edges, with Clopper-Pearson intervals."""
    rows = []
    part = frame[frame["part"] == "omission"].groupby(["noticed", "omitted"])[["n_cases", "n_false_allow"]].sum()
    for (noticed, omitted), n, wrong in part.itertuples():
        share = stats.proportion(int(wrong), int(n))
        row = {"noticed": noticed, "omitted": omitted, "false_allow": share.value, "low": share.low, "high": share.high}
        rows.append(row | {"n": share.n})
    return pd.DataFrame(rows)


def durable(frame: pd.DataFrame) -> pd.DataFrame:
    """Return the conditions evaluated for each of the ten changes, by way of checking, and their mean in the last row."""
    part = frame[frame["part"] == "durable"]
    table = part.pivot_table(index="what", columns="how", values="n_evaluated", aggfunc="mean", sort=False)
    return pd.concat([table, table.mean().to_frame("mean").T]).rename_axis("what").reset_index()


def history(frame: pd.DataFrame) -> pd.DataFrame:
    """Return what was published of the refunds that the policy had come to forbid, by what compare-and-set covered."""
    part = frame[frame["part"] == "history"]
    covered = part["how"].map({"target_only": "written row", "selective": "every premise"})
    return part.assign(covered=covered)[["covered", "n_cases", "n_released", "n_false_allow"]].reset_index(drop=True)


def growth(frame: pd.DataFrame) -> pd.DataFrame:
    """Return what an answer costs by way of checking and size, with the median over replicates."""
    part = frame[frame["part"] == "growth"]
    found = part.groupby(["what", "size"], sort=False, as_index=False)
    return found.agg(n=("n_cases", "sum"), p50_us=("p50_us", "median"), p95_us=("p95_us", "median"))


def region(frame: pd.DataFrame) -> pd.DataFrame:
    """Return what revalidation costs and where replanning always is cheaper, by the share of lost edges.

    A mutation that is stopped by its sole edge is one of fifteen. With the measured shares ``r`` of actions that were not
    released and ``a`` of false allows, revalidation costs ``r`` replans and ``a`` false allows for one action, always
    replanning one replan. Replanning is cheaper where a false allow costs more than ``(1 - r) / a`` replans; the evaluation
    itself, some microseconds, is left out.
    """
    chosen = outcomes(frame).set_index("how").loc["selective"]
    held_back = 1 - chosen["n_released"] / chosen["n_cases"]
    base = chosen["n_false_allow"] / chosen["n_cases"]
    table = omissions(frame)
    table = table[~table["noticed"].astype(bool) & (table["omitted"] > 0)].reset_index(drop=True)
    allowed = base + table[["false_allow", "low", "high"]] / len(MUTATIONS)
    stopped = held_back - allowed["false_allow"]
    even = allowed.rdiv(1 - stopped, axis=0)
    prices = {"break_even": even["false_allow"], "break_even_low": even["high"], "break_even_high": even["low"]}
    shares = {"omitted": table["omitted"], "stopped": stopped, "false_allow": allowed["false_allow"]}
    return pd.DataFrame(shares | prices)


def values(frame: pd.DataFrame) -> list[dict[str, Any]]:
    """Return the rows A01 to A06."""
    rows = []

    def add(name: str, value: Any, n: int, unit: str, *ends: float) -> None:
        exact = (None, None) if isinstance(value, str) else (value, value)
        rows.append(value_row(name, value, int(n), unit, "emulated", *(ends or exact)))

    table = omissions(frame)
    for row in table[~table["noticed"].astype(bool)].to_dict("records"):
        if (percent := round(100 * row["omitted"], 6)) in (1, 5, 10):
            share, low, high = (100 * row[name] for name in ("false_allow", "low", "high"))
            add(f"A01.{percent:g}", share, row["n"], "%", low, high)
    means = durable(frame).iloc[-1]
    for name, how in (("affected", "selective"), ("rescan", "full_rescan")):
        if how in means:
            add(f"A02.{name}", float(means[how]), len(DURABLE), "conditions")
    for row in growth(frame).to_dict("records"):
        name = {"affected only": "affected", "full rescan": "rescan"}.get(row["what"])
        if name and row["size"] in (13, 4093):
            id, here = f"A03.{name}.{row['size']}", "measured (this machine)"
            rows.append(value_row(id, row["p50_us"], int(row["n"]), "us", here))
    for row in outcomes(frame).query("how == 'selective'").to_dict("records"):
        for what in ("false_allow", "false_block"):
            add(f"A04.{what}", row[f"n_{what}"], row["n_cases"], "count")
    for row in frame[(frame["part"] == "refund") & (frame["how"] == "selective")].to_dict("records"):
        add(f"A05.{row['what']}", next(str(each) for each in Verdict if row[f"n_{each.lower()}"]), 1, "verdict")
    for row in frame[frame["part"] == "history"].to_dict("records"):
        name = {"target_only": "target_only", "selective": "with_policy"}.get(row["how"])
        if name:
            add(f"A06.{name}", 100 * row["n_false_allow"] / row["n_cases"], row["n_cases"], "of 100")
    return rows
