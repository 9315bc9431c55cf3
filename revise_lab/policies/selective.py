"""Selective recovery: REVISE as published (arXiv:2609.00643 section 3), and the same planner under our switches."""

from __future__ import annotations

from revise_lab.core.plan import Decision, Scope, View, closure

from .baselines import everything, unsafe


def revise(view: View) -> Decision:
    """Affect the direct readers of what changed and their active descendants, and nothing else.

    Under ``propagation="diff"`` only the direct readers: what a recomputed output changes reaches its readers when it
    commits. Without complete provenance the scope grows to a full restart (``unknown="global"``) or stays with the
    incomplete node and what follows it (``"local"``).
    """
    if why := unsafe(view):
        return everything(view, why)
    if view.switches.propagation == "diff":
        return Decision(Scope.SUBGRAPH, dict(view.hits))
    return Decision(Scope.SUBGRAPH, closure(view.hits, view.revision))
