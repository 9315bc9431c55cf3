"""The commands that prove and measure the machine: explore, prove, bench."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

from revise_lab import draw
from revise_lab.errors import ConfigError

PROOFS = ("runs", "crashes", "floor", "storm", "omission")


def add_commands(command: Callable[..., Any]) -> None:
    """Add the three commands to a command line."""
    explore = command("explore", _explore, "explore scenarios in every order, and audit schedules from their journals")
    explore.add_argument("scenarios", nargs="*", metavar="SCENARIO", help="default: all")
    explore.add_argument("--policy", action="append", default=[], metavar="NAME", help="default: revise, revise_plus")
    explore.options(
        all_switches=(False, None, "every policy under every allowed combination"),
        audit=(0, "N", "schedules to audit in all (default: none)"),
        jobs=(1, "N", "processes"),
        json=(False, None, "as JSON"),
    )
    prove = command("prove", _prove, "random runs against the oracle, crashes, the floor, storms, dropped reads")
    prove.add_argument("what", nargs="*", metavar="WHAT", help=f"of {', '.join(PROOFS)}; default: all")
    prove.options(
        n=(1000, "N", "runs of each (default: 1000)"), seed=(0, "N", "first seed"), jobs=(1, "N", "processes")
    )
    bench = command("bench", _bench, "measure the machine against its budgets: revise-lab bench core")
    suites = "certificates, planning, views, events; answers; runs; the adapter"
    bench.add_argument("suite", choices=["core", "conditions", "serving", "langgraph"], help=suites)
    bench.options(
        rows=(str, "TEXT", "only what holds this text"),
        quick=(False, None, "small sizes, seconds instead of minutes"),
    )


def _explore(arguments: argparse.Namespace) -> int:
    from revise_lab.audit.scenarios import SCENARIOS
    from revise_lab.policies import policy
    from revise_lab.runtime.explore import combinations, effect_combinations, explore_all

    for name in arguments.scenarios:
        if name not in SCENARIOS:
            raise ConfigError(f"no scenario is named {name!r}; there are: {', '.join(SCENARIOS)}")
    policies = [policy(name) for name in arguments.policy or _USUAL]
    if arguments.all_switches:
        policies = list(dict.fromkeys((*combinations(), *effect_combinations())))
    n_pairs = len(policies) * len(arguments.scenarios or SCENARIOS)
    n_audits = -(-arguments.audit // n_pairs)
    jobs = arguments.jobs if arguments.jobs > 0 else os.cpu_count() or 1
    rows = explore_all(arguments.scenarios, policies, n_audits, jobs=jobs, tell=_progress())
    findings = [finding for row in rows for finding in row["findings"]]
    if arguments.json:
        print(json.dumps({"scenarios": rows}, indent=1))
    else:
        head = ("name", "policy", "states", "transitions", "histories", "audited", "seconds")
        shown = [[*(row[key] for key in head), f"{len(row['both_orders'])}/{len(row['racing_pairs'])}"] for row in rows]
        print(draw.table_text(shown, (*head, "races in both orders")))
        audited, histories = sum(row["audited"] for row in rows), sum(row["histories"] for row in rows)
        print(f"{len(rows)} explorations, {audited} schedules audited, {histories:.3g} interleavings counted, not run")
        print(*(f"FINDING {finding}" for finding in findings[:10]), f"{len(findings)} findings", sep="\n")
    return 1 if findings else 0


_USUAL = ("revise", "revise_plus")


def _progress() -> Callable[..., None]:
    """Return what says on standard error how far an exploration is; every line is a finished row."""
    began_s, last_s = time.monotonic(), 0.0

    def tell(what: str, done: int, n: int, row: dict[str, Any]) -> None:
        nonlocal last_s
        now_s = time.monotonic()
        if row["findings"] or done == n or now_s - last_s > 5:
            last_s = now_s
            found = f" - {len(row['findings'])} FINDINGS" if row["findings"] else ""
            where = f"{row['name']}, {row['policy']}"
            print(f"{what} {done} of {n} after {now_s - began_s:.0f} s: {where}{found}", file=sys.stderr, flush=True)

    return tell


def _prove(arguments: argparse.Namespace) -> int:
    from revise_lab.lab import proof

    if unknown := set(arguments.what) - set(PROOFS):
        raise ConfigError(f"nothing is proved by {', '.join(sorted(unknown))}; there are: {', '.join(PROOFS)}")
    if not arguments.n:
        raise ConfigError("--n 0 would prove nothing; give 1 or more")
    work = {"runs": proof.random_runs, "crashes": proof.crashes, "floor": proof.floors}
    work |= {"storm": proof.storms, "omission": proof.omissions}
    failed = False
    for what in arguments.what or PROOFS:
        started = time.monotonic()
        found = work[what](arguments.n, arguments.seed, arguments.jobs)
        print(f"{what} ({time.monotonic() - started:.0f} s): {json.dumps(found, indent=1, default=str)}", flush=True)
        failed |= any(found[key] for key in ("findings", "differences", "below_floor") if key in found)
    return 1 if failed else 0


def _bench(arguments: argparse.Namespace) -> int:
    from revise_lab.lab import bench

    suite = arguments.suite
    module = bench if suite == "core" else importlib.import_module(f"{bench.__name__}.{suite}")
    print(bench.render(getattr(module, f"bench_{suite}")(arguments.rows, arguments.quick)))
    return 0
