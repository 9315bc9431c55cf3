"""The mutants of a checkout's tests, run from a notebook: which scenario kills each, and the shortest line that shows it.

Mutants live in ``tests/mutants`` and never in the package, so that nobody can switch one on by a slip; where only the
package is installed there is no table.
"""

from __future__ import annotations

import runpy
import sys
from collections.abc import Collection
from importlib.util import find_spec
from pathlib import Path

import pandas as pd

from revise_lab.audit.scenarios import SCENARIOS
from revise_lab.policies import policy
from revise_lab.runtime.states import Merged, unmet

__all__ = ["FOLDER", "mutants"]

FOLDER = Path(__file__).resolve().parents[2] / "tests" / "mutants"
"""Where the mutants are in a checkout."""


def mutants(
    scenarios: Collection[str] = (), folder: str | Path = FOLDER, n_most: int | None = None
) -> pd.DataFrame | None:
    """Put each mistake into the package, explore the scenario that names it, and take it out again.

    Parameters
    ----------
    scenarios : collection of str, optional
        Only mutants that one of these is named for.
    folder : str or Path
        The folder of the tests.
    n_most : int, optional
        The first so many of them.

    Returns
    -------
    DataFrame or None
        ``mutant``, ``policy``, ``scenario``, ``killed``, ``anomaly`` and ``witness``, the shortest history that fails;
        None where there is no checkout or no pytest, whose decorators the tests use.
    """
    source = Path(folder) / "test_mutants.py"
    if not source.is_file() or find_spec("pytest") is None:
        return None
    sys.path.insert(0, str(source.parent))
    try:
        found = runpy.run_path(str(source))
    finally:
        sys.path.remove(str(source.parent))
    chosen = [each for each in found["MUTANTS"] if not scenarios or each.by in scenarios][:n_most]
    rows = []
    for each in chosen:
        name, *switches = each.how.split()
        how = policy(name, **dict(switch.split("=") for switch in switches))
        with found["mutated"](each.edits):
            merged = Merged(SCENARIOS[each.by], how, audits=True, blames_errors=False)
            problems = merged.problems or unmet(merged)
        first = problems[0] if problems else None
        shown = {"anomaly": first.anomaly, "witness": first.line or first.detail} if first else {}
        rows.append({"mutant": each.name, "policy": each.how, "scenario": each.by, "killed": bool(first)} | shown)
    return pd.DataFrame(rows, columns=["mutant", "policy", "scenario", "killed", "anomaly", "witness"])
