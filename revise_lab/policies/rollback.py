"""Earliest-conflict rollback, the Revision Absorber (arXiv:2604.23283 section 6), as a policy on a DAG.

The trace of the paper is linear; ours is the order of commits. The policy does not claim correctness: what it keeps may
have read what changed, nothing checks it again (``check="none"``), and the auditor counts it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from revise_lab.core.plan import Decision, Planner, Scope, View, closure
from revise_lab.core.table import NodeRun
from revise_lab.records.effect import Effect, Reversibility
from revise_lab.records.event import Evidence

Check = Callable[[View, NodeRun, Effect], bool]
"""Whether an effect that a node has published remains valid under the revision: one compatibility call."""

_HARD: Final = (Reversibility.COMPENSABLE, Reversibility.IRREVERSIBLE)


def derived_from_what_holds(view: View, run: NodeRun, effect: Effect) -> bool:
    """Say that an effect is compatible if nothing that its node was derived from has changed."""
    return run not in closure(view.hits, view.revision)


def absorber(check: Check = derived_from_what_holds) -> Planner:
    """Return the planner for one way of judging compatibility.

    Compensable and irreversible effects are asked about in the order of the commits that published them, up to the first
    one that is not compatible. Everything committed from there on is discarded, on whatever branch, and every running
    attempt that started after it is cancelled. What committed before stays, even if it read what changed; with nothing
    incompatible, nothing is rolled back. Of two effects of one commit either stands for both. A node that has failed on what
    changed runs again: it has nothing to keep.

    Parameters
    ----------
    check : callable
        (view, node, effect) to whether the effect remains valid; called once for each effect, at most.
    """

    def plan(view: View) -> Decision:
        trace = sorted(
            (run.current.v_commit, run.name, run)
            for run in view.active()
            if run.current and run.current.dropped is None
        )
        failed = {run: why for run, why in view.hits.items() if run.current and run.current.failed}
        for bound, name, run in trace:
            if not all(check(view, run, effect) for effect in _hard_effects(run)):
                why = Evidence(view.revision, f"at or after the commit of {name}")
                return Decision(Scope.SUFFIX, failed | {each: why for each in view.active() if _after(each, bound)})
        return Decision(Scope.SUFFIX, failed)

    return plan


def _hard_effects(run: NodeRun) -> list[Effect]:
    return [effect for effect in run.current.effects if effect.reversibility in _HARD] if run.current else []


def _after(run: NodeRun, bound: int) -> bool:
    live = run.attempt or run.current
    return live is not None and (live.v_commit or live.v_start) >= bound
