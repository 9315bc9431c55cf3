"""Revise agent workflows while they run.

Which finished, running and pending work is still valid, what must stop, what must run again, and what does each answer
cost? Everything here loads at first use; ``import revise_lab`` is silent, offline and quick.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_HOMES = {
    "Workflow": "revise_lab.records.workflow",
    "Effect": "revise_lab.records.effect",
    "Session": "revise_lab.runtime.session",
    "Run": "revise_lab.runtime.session",
    "Change": "revise_lab.records.revision",
    "Revision": "revise_lab.records.revision",
    "Condition": "revise_lab.records.condition",
    "RefreshRule": "revise_lab.records.condition",
    "PendingAction": "revise_lab.records.condition",
    "PendingActions": "revise_lab.runtime.pending",
    "Switches": "revise_lab.core.plan",
    "policy": "revise_lab.policies",
    "simulate": "revise_lab.runtime.simulator",
    "Outgoing": "revise_lab.runtime.adapters.langgraph",
    "RevisableGraph": "revise_lab.runtime.adapters.langgraph",
    "audit_reads": "revise_lab.runtime.audit_reads",
    "errors": "revise_lab.errors",
    "lab": "revise_lab.lab",
}

if TYPE_CHECKING:
    from revise_lab.core.plan import Switches
    from revise_lab.policies import policy
    from revise_lab.records.condition import Condition, PendingAction, RefreshRule
    from revise_lab.records.effect import Effect
    from revise_lab.records.revision import Change, Revision
    from revise_lab.records.workflow import Workflow
    from revise_lab.runtime.adapters.langgraph import Outgoing, RevisableGraph
    from revise_lab.runtime.audit_reads import audit_reads
    from revise_lab.runtime.pending import PendingActions
    from revise_lab.runtime.session import Run, Session
    from revise_lab.runtime.simulator import simulate

__all__ = [
    "Change",
    "Condition",
    "Effect",
    "Outgoing",
    "PendingAction",
    "PendingActions",
    "RefreshRule",
    "RevisableGraph",
    "Revision",
    "Run",
    "Session",
    "Switches",
    "Workflow",
    "audit_reads",
    "policy",
    "simulate",
]


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'revise_lab' has no attribute {name!r}")
    module = import_module(home)
    found = getattr(module, name, module)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted(_HOMES)
