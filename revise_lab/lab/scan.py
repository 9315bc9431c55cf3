"""Fix the operating point of the serving experiments before any policies are compared: ``revise-lab serving scan``.

Capacity is the highest rate on a grid at which completions keep up with arrivals. At each rate a few independent runs are
served under one policy; in each, a line is fitted to the number of workflows in flight over the counted part of the
arrivals. A rate is kept up with unless the mean of the slopes is above 0 at 95 % (Student's t over the runs; what a run
looks like inside does not matter to it, so nothing need be assumed about how its samples depend on each other). The grid
is halved again and again; run i has the same arrivals, tenants and revisions at every rate, only stretched.
"""

from __future__ import annotations

import argparse
import bisect
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from revise_lab.errors import ConfigError
from revise_lab.lab.files import write_atomic

STEP_PER_S = 0.1
"""Distance of the rates of the grid."""
HIGHEST_PER_S = 6.4
"""Nothing as high is tried; a capacity beyond it is refused."""


SHAPE = {"prompt_tokens": 1500, "shared_tokens": 500, "output_tokens": 40}
"""The lengths of a call that the experiments use."""
WHY = (
    "Longer calls (prompts of 2000 to 4000 tokens, outputs of 60 to 150, all tried with suffix alone) bring the capacity"
    " nearer to the published 2.0/s, but put p50 at 0.7 x near or beyond the objective of 25 s: prompts go before decoding,"
    " so decoding starves below capacity already. These lengths keep p50 at 0.7 x well inside it, and bring p50 to about"
    " the objective at capacity."
)


def add_commands(command: Callable[..., Any]) -> None:
    """Add the command to a command line."""
    serving = command("serving", _scan, "fix lengths and capacity of the serving experiments: revise-lab serving scan")
    serving.add_argument("what", choices=["scan"], help="find the capacity of the emulated cluster")
    serving.options(
        policy=("suffix", "NAME", "the only policy that runs"),
        seed=(20260901, "N", "of arrivals, tenants and revisions"),
        profile=("h100-qwen3-14b-sglang", "NAME", "cost of the replicas"),
        prompt=(SHAPE["prompt_tokens"], "TOKENS", "prompt of a call"),
        shared=(SHAPE["shared_tokens"], "TOKENS", "its start, the same for a tenant"),
        output=(SHAPE["output_tokens"], "TOKENS", "output of a call"),
        workflows=(1000, "N", "of each run"),
        runs=(8, "N", "at each rate"),
        jobs=(1, "N", "processes"),
        out=(Path, "FILE", "default: data/capacity.json"),
        force=(False, None, "replace a result that is there"),
    )


def _scan(arguments: argparse.Namespace) -> int:
    from revise_lab.lab.serving_cells import CAPACITY_FILE

    out = arguments.out or CAPACITY_FILE
    if out.exists() and not arguments.force:
        raise ConfigError(f"{out.name} is there already, and results hang on it - pass another --out, or --force")
    if arguments.runs < 2 or arguments.workflows < 30:
        raise ConfigError("a capacity is found from at least 2 --runs of at least 30 --workflows")
    write_atomic(out.with_name(f".{out.name}.writable"), b"").unlink()  # better now than when the rates are served
    shape = {"prompt_tokens": arguments.prompt, "shared_tokens": arguments.shared, "output_tokens": arguments.output}
    cluster = {"profile": arguments.profile, "n_replicas": 4, "n_tenants": 64}
    setting = {**cluster, **shape, "n_workflows": arguments.workflows, "family": "S12", "revised_share": 0.5}
    how = {"n_runs": arguments.runs, "n_jobs": arguments.jobs, "say": lambda line: print(line, flush=True)}  # noqa: T201
    found = scan(arguments.policy, arguments.seed, setting, **how)
    if shape == SHAPE:
        found = {"about": found.pop("about"), "why": WHY, **found}
    write_atomic(out, (json.dumps(found, indent=1) + "\n").encode())
    p50 = found["at_0.7"]["p50_s"]
    print(f"capacity {found['capacity_per_s']:g} workflows/s; at 0.7 x: p50 {p50:.1f} s -> {out}")  # noqa: T201
    return 0


def scan(
    policy: str,
    seed: int,
    setting: dict[str, Any],
    *,
    n_runs: int = 8,
    n_jobs: int = 1,
    say: Callable[[str], None] = lambda line: None,
) -> dict[str, Any]:
    """Find the capacity under one policy.

    Parameters
    ----------
    policy : str
        The only one that runs.
    seed : int
        Of everything.
    setting : dict
        Workload and cluster, the arguments of `serve`.
    n_runs : int
        Independent runs at each rate, at least 2.
    n_jobs : int
        Processes.
    say : callable
        Told about each rate.

    Raises
    ------
    ConfigError
        The lowest rate is too much already, or the highest too little.
    """
    tried: dict[int, dict[str, Any]] = {}

    def keeps_up(step: int) -> bool:
        tried[step] = at_rate(policy, seed, step * STEP_PER_S, setting, n_runs, n_jobs)
        say(_line(tried[step]))
        return bool(tried[step]["keeps_up"])

    steps = range(1, round(HIGHEST_PER_S / STEP_PER_S))
    low = bisect.bisect_left(steps, True, key=lambda step: not keeps_up(step))
    if not {low, low + 1} <= tried.keys():
        known = f"{STEP_PER_S} and {HIGHEST_PER_S} workflows/s"
        raise ConfigError(f"capacity is not between {known} - choose other lengths")
    capacity = round(low * STEP_PER_S, 6)
    below = at_rate(policy, seed, 0.7 * capacity, setting, n_runs, n_jobs)
    say(_line(below))
    return {
        "about": "Found by `revise-lab serving scan` with one policy, before any comparison. Capacity: the highest rate on"
        " the grid at which the slope of workflows in flight, a line fitted to the counted part of each run, is not above"
        " 0 at 95 % (Student's t over independent runs). Emulated.",
        "policy": policy,
        "seed": seed,
        **setting,
        "n_runs": n_runs,
        "capacity_per_s": capacity,
        "at_0.7": below,
        "rates": [tried[step] for step in sorted(tried)],
    }


def at_rate(
    policy: str, seed: int, rate_per_s: float, setting: dict[str, Any], n_runs: int, n_jobs: int
) -> dict[str, Any]:
    """Serve independent runs at one rate; return the mean slope of workflows in flight with its interval, and latency."""
    import numpy as np
    from joblib import Parallel, delayed
    from scipy.stats import t

    runs = Parallel(n_jobs=n_jobs)(
        delayed(_run)(policy, [seed, number], rate_per_s, setting) for number in range(n_runs)
    )
    slopes = np.array([slope for slope, _, _ in runs])
    half = float(t.ppf(0.975, n_runs - 1) * slopes.std(ddof=1) / np.sqrt(n_runs))
    mean = float(slopes.mean())
    p50, p95, p99 = np.quantile(np.concatenate([latencies for _, latencies, _ in runs]), [0.5, 0.95, 0.99]).tolist()
    rounded = {"slope": mean, "low": mean - half, "high": mean + half, "p50_s": p50, "p95_s": p95, "p99_s": p99}
    return {
        "rate_per_s": round(rate_per_s, 6),
        **{name: round(value, 4) for name, value in rounded.items()},
        "ended_share": round(float(np.mean([share for _, _, share in runs])), 4),
        "keeps_up": mean - half <= 0,
    }


def _run(policy: str, seed: Any, rate_per_s: float, setting: dict[str, Any]) -> tuple[float, list[float], float]:
    """Return the slope in flight, the latencies of the counted workflows, and ends over arrivals in that time."""
    import numpy as np

    from revise_lab.lab.serving_cells import is_counted, serve

    derived = int(np.random.SeedSequence(seed).generate_state(1)[0])
    run = serve(derived, policy, rate_per_s, **setting, sample_s=1.0)
    counted = [row for row in run.rows if is_counted(row.workflow, len(run.rows))]
    start_s, end_s = counted[0].arrival_s, counted[-1].arrival_s
    within = [(each.at_s, each.n_in_flight) for each in run.samples if start_s <= each.at_s <= end_s]
    at_s, in_flight = np.array(within, float).T
    n_ended = sum(start_s < row.end_s <= end_s for row in run.rows)
    return float(np.polyfit(at_s, in_flight, 1)[0]), [row.latency_s for row in counted], n_ended / len(counted)


def _line(row: dict[str, Any]) -> str:
    verdict = "keeps up" if row["keeps_up"] else "falls behind"
    return (
        f"{row['rate_per_s']:5.2f}/s  slope {row['slope']:+.4f} [{row['low']:+.4f}, {row['high']:+.4f}] /s  {verdict};"
        f"  ended {row['ended_share']:.3f} of arrivals;  p50 {row['p50_s']:.1f} s, p99 {row['p99_s']:.1f} s"
    )
