"""Adversarial orderings (arXiv:2609.00643, Tables 1 and 3): six cases, both orders of each racing pair, effects included.

The paper reports 300 runs over six cases and not how they split; here a case is 50 *distinct* schedules, half in each
order of its racing pair, chosen by seeded random walks and told apart by the hash of their moves. Each is executed on the
machine from its start, looked at after every move, and its journal is read by the auditor. What one order at a time cannot
show, the merged states of every scenario of a case do: all orders, counted and not called audited.

Three kinds of cells (``part``): ``schedules``, a row each; ``orders``, a row for each scenario of a case with all of its
orders; ``dropped``, runs in which the sole critical read is kept from the machine, which must go wrong exactly as often.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from hashlib import blake2b
from random import Random
from typing import Any, Final, Literal, NamedTuple

import pandas as pd
from pydantic import BaseModel, ConfigDict, Field

from revise_lab.audit.auditor import Anomaly, audit
from revise_lab.audit.plain import same
from revise_lab.audit.scenario import Scenario
from revise_lab.audit.scenarios import SCENARIOS
from revise_lab.audit.truth import current_truth
from revise_lab.core.plan import Policy
from revise_lab.lab import stats
from revise_lab.lab.experiments import Column
from revise_lab.lab.proof import omission
from revise_lab.lab.rows import columns, grouped, value_row
from revise_lab.policies import policy
from revise_lab.records import event as ev
from revise_lab.records.value import ABSENT
from revise_lab.runtime.explore import audited
from revise_lab.runtime.states import Merged, modes_of, unmet, wrong, wrong_end
from revise_lab.runtime.world import World, events_of

ALGORITHM_VERSION = 1
NOT_IN_SEED = frozenset({"policy", "check", "release", "compensation", "others", "n_schedules", "n_audit", "n_runs"})


class Case(NamedTuple):
    """A published case: the scenario that is walked, its racing pair, and others in which the same thing happens."""

    scenario: str
    pair: tuple[str, str]
    others: tuple[str, ...]


CASES: Final[Mapping[str, Case]] = {
    "late_read": Case("published_late_read", ("rev r1", "read A r.f"), ("late_read", "before_first_read")),
    "commit_race": Case(
        "effects_of_a_chain",
        ("rev r1", "commit A"),
        ("revision_first", "commit_first", "revision_at_commit", "effect_revised"),
    ),
    "consecutive_revisions": Case(
        "published_consecutive", ("rev r2", "commit A"), ("two_of_one_field", "two_fields", "aba", "effect_aba")
    ),
    "unknown_provenance": Case(
        "published_unknown",
        ("rev r1", "read U r.g"),
        ("unknown_beside_complete", "hidden_read", "unknown_edges"),
    ),
    "membership_change": Case(
        "published_members",
        ("rev r1", "read I r.d #members"),
        ("member_inserted", "member_spawned", "effect_of_a_member"),
    ),
    "control_route": Case("published_route", ("rev r1", "commit R"), ("control_read", "flip", "effect_of_a_lane")),
}

STALE_OUTPUTS: Final = frozenset({
    Anomaly.STALE_COMMIT, Anomaly.STALE_READ, Anomaly.STALE_OUTPUT, Anomaly.MIXED_VERSIONS, Anomaly.DEAD_BRANCH,
    "settled wrong", "committed wrong", "snapshot never existed", "wrong output", "not the required outcome",
})  # fmt: skip
STALE_EFFECTS: Final = frozenset({
    Anomaly.STALE_EFFECT, Anomaly.NOT_UNDONE, Anomaly.LOST_EFFECT, Anomaly.DOUBLE_EFFECT,
    "stale dispatch", "wrong effects", "two live effects",
})  # fmt: skip

COLUMNS = {
    "scenario": Column("exact", "", "the scenario", "str"),
    "schedule": Column("exact", "", "hash of the scenario and its moves", "str"),
    "revision_first": Column("exact", "", "whether the revision comes before the other event of the pair", "bool"),
    "n_moves": Column("exact", "moves", "moves of the schedule", "int"),
    "n_pairs": Column("exact", "pairs", "ordered pairs of events seen in this schedule and those before it", "int"),
    "correct": Column("exact", "", "whether nothing at all is wrong, on the way or at the end", "bool"),
    "n_stale_outputs": Column(
        "exact", "findings", "findings about outputs that are not made from what is there", "int"
    ),
    "n_stale_effects": Column("exact", "findings", "findings about effects that are not what a fresh run wants", "int"),
    "finding": Column("exact", "", "the first finding, with the moves that lead to it", "str"),
    "n_compensations": Column("exact", "effects", "effects that were undone", "int"),
    "n_dispatches": Column("exact", "effects", "effects that left", "int"),
    "delay_moves": Column("exact", "moves", "moves between commit and dispatch, summed over effects that left", "int"),
    "visible_moves": Column(
        "exact", "moves", "moves after which something is out that a fresh run would not have", "int"
    ),
    "n_states": Column("exact", "states", "merged states of the scenario", "int"),
    "n_transitions": Column("exact", "moves", "moves between merged states", "int"),
    "n_interleavings": Column("exact", "schedules", "complete schedules, counted by paths and not executed", "int"),
    "n_audited": Column("exact", "schedules", "schedules executed from their start whose journals were audited", "int"),
    "n_races": Column("exact", "pairs", "racing pairs that the scenario requires", "int"),
    "n_both_orders": Column("exact", "pairs", "those that occur in both orders", "int"),
    "n_possible_pairs": Column("exact", "pairs", "ordered pairs of events that occur in some order at all", "int"),
    "n_problems": Column("exact", "findings", "what is wrong in any state, outcome, count or audited journal", "int"),
    "n_stale": Column("exact", "runs", "runs that end stale", "int"),
}


class Params(BaseModel):
    """One cell; what does not concern its part stays at its default."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    part: Literal["schedules", "orders", "dropped"] = Field(description="what the cell does, see the module")
    case: Literal[
        "late_read", "commit_race", "consecutive_revisions", "unknown_provenance", "membership_change", "control_route"
    ] = Field("late_read", description="the published case")
    policy: Literal["restart", "suffix", "revise", "revise_plus", "wait"] = "revise"
    check: Literal["delta", "digest"] = Field("delta", description="the published certificate check, or ours")
    release: Literal["commit", "close"] = Field("commit", description="when effects leave: the published rule, or ours")
    compensation: Literal["lazy", "eager"] = Field("lazy", description="when effects are undone; the paper is silent")
    n_schedules: int = Field(50, ge=2, description="distinct schedules, half of them in each order of the pair")
    others: bool = Field(True, description="whether all scenarios of the case are explored, or the one that is walked")
    n_audit: int = Field(20, ge=0, description="schedules of each scenario that are audited beside the merged states")
    share: float = Field(0.0, ge=0.0, le=1.0, description="share of runs whose critical read is dropped")
    n_runs: int = Field(100, ge=1, description="runs for one share")


def policy_of(params: Params) -> Policy:
    """Return the policy of a cell; the published check goes with the published propagation, as the machine demands."""
    switches = {"check": params.check, "release": params.release, "compensation": params.compensation}
    if params.check == "delta":
        switches |= {"propagation": "descendants", "extension": "off"}
    return policy(params.policy, **switches)


def cell(params: Params, seed: int, replicate: int) -> list[dict[str, Any]]:
    """Return the rows of one cell."""
    case, how = CASES[params.case], policy_of(params)
    if params.part == "dropped":
        return [{"n_stale": round(omission(params.share, params.n_runs, seed).value * params.n_runs)}]
    if params.part == "orders":
        names = (case.scenario, *case.others) if params.others else (case.scenario,)
        return [all_orders(SCENARIOS[name], how, params.n_audit, seed) for name in names]
    return list(_schedules(case, how, params.n_schedules, Random(seed)))


# --- schedules -------------------------------------------------------------------------------------------------------

_WALKS = 40
"""Walks that are tried for each schedule that is wanted."""
_EAGERNESS = 5
"""How many steps of eagerness there are, each four times the one before; whole numbers are the same on every machine."""


def _schedules(case: Case, how: Policy, n: int, rng: Random) -> Iterator[dict[str, Any]]:
    """Yield distinct schedules, in turn one in which the revision comes first and one in which it does not."""
    scenario, seen, pairs = SCENARIOS[case.scenario], set[str](), set[tuple[str, str]]()
    n_left, first = {True: n - n // 2, False: n // 2}, False
    for _ in range(_WALKS * n):
        first = not first if n_left[not first] else first
        if not n_left[first]:
            return
        run = walk(scenario, how, case.pair, rng, revision_first=first)
        if run is not None and run.hash not in seen:
            n_left[first] -= 1
            seen.add(run.hash)
            pairs |= run.pairs()
            yield run.row() | {"revision_first": first, "n_pairs": len(pairs)}


class Walk:
    """One schedule, executed and looked at move by move.

    Parameters
    ----------
    scenario, how : Scenario, Policy
        What may happen, and how to recover.
    """

    def __init__(self, scenario: Scenario, how: Policy) -> None:
        self.world = World(scenario, how)
        self.moves: list[str] = []
        self.events: list[tuple[str, ...]] = []
        self.found: list[tuple[str, str]] = []
        self.n_undone = self.n_sent = self.delay_moves = self.visible_moves = 0
        self._committed: dict[str, int] = {}

    def do(self, move: str) -> tuple[str, ...]:
        """Make a move, look at what it led to, and return its events."""
        added = self.world.do(move)
        self.moves.append(move)
        self.events.append(events_of(move, added))
        self.found += wrong(self.world, added)
        for entry in added:
            if isinstance(entry, ev.Committed):
                self._committed[entry.attempt] = len(self.moves)
            elif isinstance(entry, ev.Effected) and entry.state == "dispatched":
                self.n_sent += 1
                self.delay_moves += len(self.moves) - self._committed[entry.attempt]
            elif isinstance(entry, ev.Effected) and entry.state == "compensating":
                self.n_undone += 1
        wanted = current_truth(self.world.scenario, self.world.accepted)[2]
        out = self.world.outside.ledger.live()
        self.visible_moves += any(not same(payload, wanted.get(name, ABSENT)) for name, payload in out)
        return self.events[-1]

    @property
    def hash(self) -> str:
        """16 hexadecimal digits over the scenario and its moves."""
        text = "; ".join((self.world.scenario.name, *self.moves))
        return blake2b(text.encode(), digest_size=8).hexdigest()

    def pairs(self) -> set[tuple[str, str]]:
        """Return (event, later event), whatever lies between them; events of one move have no order."""
        found, later = set[tuple[str, str]](), set[str]()
        for events in reversed(self.events):
            found.update((first, second) for first in events for second in later if first != second)
            later.update(events)
        return found

    def row(self) -> dict[str, Any]:
        """Return what the schedule showed."""
        found = [*self.found, *wrong_end(self.world)]
        found += ((each.anomaly, str(each)) for each in audit(self.world.machine.journal))
        first = f"{found[0][0]}: {found[0][1]} - {'; '.join(self.moves)}" if found else None
        return {
            "scenario": self.world.scenario.name,
            "schedule": self.hash,
            "n_moves": len(self.moves),
            "correct": not found,
            "n_stale_outputs": sum(what in STALE_OUTPUTS for what, _ in found),
            "n_stale_effects": sum(what in STALE_EFFECTS for what, _ in found),
            "finding": first,
            "n_compensations": self.n_undone,
            "n_dispatches": self.n_sent,
            "delay_moves": self.delay_moves,
            "visible_moves": self.visible_moves,
        }


def walk(scenario: Scenario, how: Policy, pair: tuple[str, str], rng: Random, *, revision_first: bool) -> Walk | None:
    """Walk at random to the end of a run, in one order of a pair of which the first is a move; ``None`` if it failed.

    Each walk draws how eager every move is, for a walk that takes all moves alike seldom leaves one of them for the end. The
    revision is held back until the other event has happened; in the other order the walk is given up where the other event
    comes first.
    """
    run, (revision, other) = Walk(scenario, how), pair
    eager, open_pair = dict[str, int](), True
    while moves := run.world.moves():
        if open_pair and not revision_first:
            moves = [move for move in moves if move != revision] or moves
        eager.update((move, 4 ** rng.randrange(_EAGERNESS)) for move in moves if move not in eager)
        events = run.do(rng.choices(moves, [eager[move] for move in moves])[0])
        if open_pair and (other in events or revision in events):
            if (revision in events) is not revision_first:
                return None
            open_pair = False
    return None if open_pair else run


# --- all orders ------------------------------------------------------------------------------------------------------


def all_orders(scenario: Scenario, how: Policy, n_audit: int, seed: int) -> dict[str, Any]:
    """Explore a scenario completely and audit some of its schedules; return its row."""
    merged = Merged(scenario, how)
    problems = merged.problems or unmet(merged)
    races = scenario.required.races_in(modes_of(how))
    n_interleavings = 0 if merged.problems else merged.histories()
    n_walks = n_audit // 2 if n_interleavings > 20 * n_audit else 0
    n_audited, found = audited(scenario, how, n_audit, n_walks, Random(seed)) if n_audit else (0, [])
    problems = [*problems, *found]
    return {
        "scenario": scenario.name,
        "n_states": len(merged.edges),
        "n_transitions": sum(map(len, merged.edges)),
        "n_interleavings": n_interleavings,
        "n_audited": n_audited,
        "n_races": len(races),
        "n_both_orders": sum(merged.seen_orders(a, b) and merged.seen_orders(b, a) for a, b in races),
        "n_possible_pairs": len(possible_pairs(merged)),
        "n_problems": len(problems),
        "finding": str(problems[0]) if problems else None,
    }


def possible_pairs(merged: Merged) -> set[tuple[str, str]]:
    """Return every (event, later event) that occurs in some schedule; events of one move have no order."""
    ahead: list[frozenset[str]] = [frozenset()] * len(merged.edges)
    found = set[tuple[str, str]]()
    for state in merged.order:
        edges = merged.edges[state]
        ahead[state] = frozenset().union(*(ahead[target].union(events) for target, events in edges))
        for target, events in edges:
            found.update((first, second) for first in events for second in ahead[target] if first != second)
    return found


# --- what the rows come to -------------------------------------------------------------------------------------------

KEYS: Final = ["policy", "check", "release", "compensation"]


def by_case(frame: pd.DataFrame) -> pd.DataFrame:
    """Return one row for each case and setting: schedules, both orders, what was wrong, and what effects cost."""
    counts = ["n_correct", "n_stale_outputs", "n_stale_effects", "n_compensations"]
    walked = frame[frame["part"] == "schedules"].rename(columns={"correct": "n_correct"})
    walked = walked.astype({"revision_first": bool} | dict.fromkeys([*counts, "n_pairs"], int))
    walked["scenario"] = walked["case"].map({name: case.scenario for name, case in CASES.items()})
    explored = frame[frame["part"] == "orders"].drop_duplicates(["scenario", *KEYS]).astype({"n_possible_pairs": float})
    walked = walked.drop(columns="n_possible_pairs", errors="ignore")
    walked = walked.merge(explored[["scenario", *KEYS, "n_possible_pairs"]], "left", ["scenario", *KEYS])
    of_case = walked.groupby(["case", *KEYS], sort=False)
    cases = of_case.agg(
        n_schedules=("schedule", "size"),
        n_distinct=("schedule", "nunique"),
        n_revision_first=("revision_first", "sum"),
        n_revision_last=("revision_first", lambda first: (~first).sum()),
        **{name: (name, "sum") for name in counts},
        delay_moves=("delay_moves", "sum"),
        visible_moves=("visible_moves", "mean"),
        n_pairs=("n_pairs", "max"),
        n_possible_pairs=("n_possible_pairs", "first"),
    )
    cases["delay_moves"] /= of_case["n_dispatches"].sum().clip(lower=1)
    return cases.reset_index()


def by_policy(cases: pd.DataFrame) -> pd.DataFrame:
    """Return one row for each setting, over all of its cases; the share of right runs has an exact interval."""
    rows = []
    for row, part in grouped(cases, KEYS, sort=False):
        sums = part.filter(regex="^n_").drop(columns=["n_pairs", "n_possible_pairs"]).sum()
        row |= {name: int(value) for name, value in sums.items()}
        row["covered"] = part["n_pairs"].sum() / part["n_possible_pairs"].sum(skipna=False)
        row |= columns("correct", stats.proportion(row["n_correct"], row["n_schedules"]))
        rows.append(row | part[["delay_moves", "visible_moves"]].mean().to_dict())
    return pd.DataFrame(rows)


def orders(frame: pd.DataFrame) -> pd.DataFrame:
    """Return one row for each scenario and setting whose orders were all explored."""
    counts = ["n_states", "n_transitions", "n_interleavings", "n_audited", "n_races", "n_both_orders", "n_problems"]
    explored = frame[frame["part"] == "orders"]
    return explored[["case", "scenario", *KEYS, *counts]].astype(dict.fromkeys(counts, "int64")).reset_index(drop=True)


def dropped(frame: pd.DataFrame) -> pd.DataFrame:
    """Return the share of stale runs for each share of dropped reads, beside the identity that they must meet."""
    rows = []
    for share, part in frame[frame["part"] == "dropped"].groupby("share"):
        stale = stats.proportion(int(part["n_stale"].sum()), int(part["n_runs"].sum()))
        row = {"share": share, "stale": stale.value, "low": stale.low, "high": stale.high, "n": stale.n}
        rows.append(row | {"identity": share, "holds": share in stale})
    return pd.DataFrame(rows)


def values(frame: pd.DataFrame) -> list[dict[str, Any]]:
    """Return R01.adversarial and the six R02 rows: ``revise`` with the published check and release, each schedule once."""
    published = "policy == 'revise' and check == 'delta' and release == 'commit' and compensation == 'lazy'"
    cases = by_case(frame.query(published).drop_duplicates(["part", "case", "schedule"]))
    rows = [_value("R01.adversarial", int(cases["n_correct"].sum()), int(cases["n_schedules"].sum()))]
    for each in cases.to_dict("records"):
        shown = each["n_correct"] if each["n_revision_first"] and each["n_revision_last"] else 0
        rows.append(_value(f"R02.{each['case']}", shown, each["n_schedules"]))
    return rows


def _value(name: str, n_right: int, n: int) -> dict[str, Any]:
    share = stats.proportion(n_right, n)
    return value_row(name, share.value, n, "share", low=share.low, high=share.high)


def estimate(params: Params) -> dict[str, float]:
    """Return what a cell costs; measured on two cores of a laptop-class machine, for ``--dry-run`` only."""
    costs_s = {"schedules": 0.004 * params.n_schedules, "orders": 1.0, "dropped": 0.005 * params.n_runs}
    return {"wall_s": costs_s[params.part]}


def coverage(frame: pd.DataFrame) -> pd.DataFrame:
    """Return, by policy and number of schedules, the ordered pairs of events seen by then over those that can occur.

    Cases and settings are averaged, as far as all orders of their scenario were explored.
    """
    cases = by_case(frame).dropna(subset="n_possible_pairs")
    walked = frame[frame["part"] == "schedules"].copy()
    walked["n"] = walked.groupby("cell_id").cumcount() + 1
    joined = walked.merge(cases[["case", *KEYS, "n_possible_pairs"]], on=["case", *KEYS], suffixes=("_", ""))
    joined["covered"] = joined["n_pairs"] / joined["n_possible_pairs"]
    return joined.groupby(["policy", "n"], as_index=False)["covered"].mean()
