"""The baselines of arXiv:2609.00643: full restart, dynamic suffix, and waiting for the end of the turn."""

from __future__ import annotations

from revise_lab.core.plan import Decision, Scope, Switches, View, closure
from revise_lab.core.table import NodeRun
from revise_lab.errors import RefusedCombination
from revise_lab.records.event import Evidence


def everything(view: View, why: str) -> Decision:
    """Affect every active node: cancel, discard, run again."""
    return Decision(Scope.RESTART, {run: Evidence(view.revision, why) for run in view.active()})


def restart(view: View) -> Decision:
    """Cancel everything, discard everything, run again."""
    return everything(view, "full restart")


def suffix(view: View) -> Decision:
    """Affect every active node at or after the first affected one (section 4.1, 'dynamic suffix').

    It has the same provenance as ``revise``. The linear order is the stable topological one (our choice: the paper does
    not say); ``start`` and ``commit`` order are closed under descendants, because an early cutoff can give a parent a
    younger stamp than its kept child.
    """
    if why := unsafe(view):
        return everything(view, why)
    affected = closure(view.hits, view.revision)
    if not affected:
        return Decision(Scope.SUFFIX, {})
    rank = _RANKS[view.switches.order]
    first = min(affected, key=rank)
    bound = rank(first)
    why = f"at or after {first.name}"
    tail = {run: affected.get(run, Evidence(view.revision, why)) for run in view.active() if rank(run) >= bound}
    return Decision(Scope.SUFFIX, closure({**tail, **affected}, view.revision))


def unsafe(view: View) -> str:
    """Return why no boundary is safe for this revision, or an empty string.

    Unknown edges or writes always mean a full restart; under ``unknown="global"`` so does a directly hit node whose read
    set is not complete (section 3, 'recovery scope'). A revision that changes nothing is always safe.
    """
    if view.unbounded and view.changes:
        return f"edges or writes of {', '.join(view.unbounded)} are unknown"
    if view.switches.unknown == "global" and (incomplete := view.incomplete()):
        names = sorted(run.name for run in incomplete)
        return f"what {', '.join(names)} read is not completely known"
    return ""


def _topological(run: NodeRun) -> tuple[int, str]:
    return run.position


def _by_start(run: NodeRun) -> tuple[int, str]:
    live = run.attempt or run.current
    return (live.v_start, run.name) if live else _NEVER


def _by_commit(run: NodeRun) -> tuple[int, str]:
    return (run.current.v_commit, run.name) if run.current else _NEVER


_NEVER = (1 << 62, "")
_RANKS = {"topological": _topological, "start": _by_start, "commit": _by_commit}


def checked(name: str, switches: Switches) -> Switches:
    """Refuse switches that a policy gives no meaning to."""
    if name != "suffix" and switches.order != "topological":
        raise RefusedCombination(f"policy {name!r} has no linear order - order={switches.order!r} belongs to 'suffix'")
    return switches
