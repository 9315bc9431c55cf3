"""Policies: pure functions from the machine's view to a recovery plan.

>>> policy("revise").switches.check
'delta'
>>> policy("revise", check="digest", propagation="diff").switches.propagation
'diff'

`absorber` alone does not revalidate (``check="none"``): what it keeps may be stale, and the auditor says so.
"""

from __future__ import annotations

from typing import Any, Final

from revise_lab.core.plan import Planner, Policy, Switches
from revise_lab.errors import RefusedCombination

from . import baselines, rollback, selective

_POLICIES: Final[dict[str, tuple[Planner, dict[str, Any], bool]]] = {
    "restart": (baselines.restart, {}, False),
    "suffix": (baselines.suffix, {}, False),
    "revise": (selective.revise, {}, False),
    "revise_plus": (
        selective.revise,
        {"check": "digest", "propagation": "diff", "unknown": "local", "extension": "on", "release": "close"},
        False,
    ),
    "wait": (baselines.restart, {}, True),
    "absorber": (rollback.absorber(), {"check": "none", "compensation": "eager"}, False),
}


def register(name: str, plan: Planner, *, deferred: bool = False, **defaults: Any) -> None:
    """Add a policy; ``defaults`` are its switches.

    Raises
    ------
    RefusedCombination
        The name is taken.
    """
    if name in _POLICIES:
        raise RefusedCombination(f"policy {name!r} exists already - choose another name")
    _POLICIES[name] = (plan, defaults, deferred)


def names() -> tuple[str, ...]:
    """Return the names of the policies."""
    return tuple(_POLICIES)


def policy(name: str, **switches: Any) -> Policy:
    """Return a policy by name, with some of its switches set.

    Parameters
    ----------
    name : str
        ``restart``, ``suffix``, ``revise``, ``revise_plus``, ``wait``, ``absorber`` or a registered one.
    **switches : str
        See :class:`revise_lab.core.plan.Switches`.

    Raises
    ------
    RefusedCombination
        The name is unknown or the switches contradict each other.
    """
    if name not in _POLICIES:
        raise RefusedCombination(f"no policy is named {name!r} - choose one of {', '.join(_POLICIES)}")
    plan, defaults, deferred = _POLICIES[name]
    chosen = baselines.checked(name, Switches(**{**defaults, **switches}))
    unchecked = defaults.get("check") == "none"
    if unchecked is not (chosen.check == "none"):
        raise RefusedCombination(
            f"policy {name!r} with check={chosen.check!r} - "
            + (
                "it keeps what read a changed place, and a check would run it again - leave check at 'none'"
                if unchecked
                else "it plans on what is revalidated, and nothing would be - use check='delta' or 'digest'"
            )
        )
    return Policy(name, plan, chosen, deferred)
