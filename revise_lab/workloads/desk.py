"""Five desks at which an action waits for a person: refund, order, booking, deployment, access grant (arXiv:2609.08015).

Each action has six conditions over seven resources. The paper names neither its applications nor its mutation cases, only
the refund: the five desks are one structure in the words of five trades (assumption), and the fifteen kinds of mutation are
those that optimistic concurrency control is known to get wrong, with the ways in which a condition cannot be told.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, Final, NamedTuple

import numpy as np

from revise_lab.records.condition import (
    Condition,
    ConditionClass,
    PendingAction,
    RefreshRule,
    Rule,
    Verdict,
    most_severe,
)
from revise_lab.records.effect import Reversibility
from revise_lab.records.selector import Selector
from revise_lab.records.value import Value

State = dict[str, Any]
"""Plain values by resource."""


class Desk(NamedTuple):
    """The words of one trade; all but the first two name resources."""

    name: str
    cap: str
    """Field of the policy: the most that an action may ask for."""
    subject: str
    stores: tuple[str, str]
    """What must cover the amount together: two writers can each leave enough, and both together not."""
    alerts: str
    agent: str
    done: str
    """What was done before, by number; what an action writes."""


DESKS: Final = {
    desk.name: desk
    for desk in (
        Desk("refund", "limit", "customer", ("till", "bank"), "holds", "approver", "refunds"),
        Desk("order", "credit", "buyer", ("warehouse_north", "warehouse_south"), "recalls", "clerk", "orders"),
        Desk("booking", "fare_cap", "traveller", ("coach_a", "coach_b"), "closures", "delegate", "bookings"),
        Desk("deployment", "blast_radius", "service", ("zone_1", "zone_2"), "incidents", "releaser", "releases"),
        Desk("access", "max_days", "employee", ("pool_eu", "pool_us"), "breaches", "owner", "grants"),
    )
}


@cache
def rules_of(desk: Desk) -> tuple[Rule, ...]:
    """Return the six conditions of a desk and its refresh rule."""
    kinds = ConditionClass
    one, other = desk.stores

    def within_cap(state: Any, intent: Value) -> bool:
        return bool(intent["amount"] <= state["policy"][desk.cap])

    def covered(state: Any, intent: Value) -> bool:
        return bool(state[one]["available"] + state[other]["available"] >= intent["amount"])

    def no_alert(state: Any, intent: Value) -> bool:
        return not any(alert["open"] and alert["subject"] == intent["subject"] for alert in state[desk.alerts].values())

    def authorised(state: Any, intent: Value) -> Any:
        return state[desk.agent]["active"] and desk.name in state[desk.agent]["roles"]

    def permitted(state: Any, intent: Value) -> bool:
        return desk.name in state["policy"]["permits"]

    def not_done(state: Any, intent: Value) -> bool:
        return intent["number"] not in state[desk.done]

    def label(state: Any, intent: Value) -> str:
        return f"{desk.name} of {intent['amount']} for {state[desk.subject]['name']}"

    return (
        Condition(f"{desk.name}: within cap", within_cap, "1", _places("policy")),
        Condition(f"{desk.name}: covered", covered, "1", _places(*desk.stores)),
        Condition(f"{desk.name}: no alert", no_alert, "1", _places(desk.alerts), kind=kinds.SAFETY),
        Condition(f"{desk.name}: authorised", authorised, "1", _places(desk.agent), kind=kinds.AUTHORITY),
        Condition(
            f"{desk.name}: permitted",
            permitted,
            "1",
            _places("policy"),
            kind=kinds.POLICY,
            policy=Selector("policy", ("version",)),
        ),
        Condition(f"{desk.name}: not done", not_done, "1", _places(desk.done), kind=kinds.IRREVERSIBLE),
        RefreshRule(f"{desk.name}: label", label, "1", _places(desk.subject)),
    )


def _places(*artifacts: str) -> tuple[Selector, ...]:
    return tuple(Selector(artifact, ()) for artifact in artifacts)


class Case(NamedTuple):
    """An action and the state on which it was decided; everything holds."""

    desk: Desk
    intent: State
    state: State

    def action(self, key: str, *, refresh: bool = True) -> PendingAction:
        """Return the pending action."""
        rules = rules_of(self.desk)
        conditions = tuple(rule for rule in rules if isinstance(rule, Condition))
        derived = tuple(rule for rule in rules if isinstance(rule, RefreshRule) and refresh)
        irreversible = Reversibility.IRREVERSIBLE
        return PendingAction(key, self.intent, conditions, derived, "", self.desk.done, irreversible)


def case_of(desk: Desk, rng: np.random.Generator) -> Case:
    """Draw an action that is justified."""
    amount = int(rng.integers(10, 200))
    number, subject = str(rng.integers(1, 10_000)), int(rng.integers(1, 1000))
    held = int(rng.integers(1, amount))
    state = {
        "policy": {
            desk.cap: amount + int(rng.integers(10, 100)),
            "permits": [desk.name, "other"],
            "version": 1,
            "note": "",
        },
        desk.subject: {"name": "Ada", "email": "ada@example.org"},
        desk.stores[0]: {"available": held},
        desk.stores[1]: {"available": amount - held + int(rng.integers(4, 20))},
        desk.alerts: {"a1": {"open": False, "subject": subject}, "a2": {"open": True, "subject": subject + 1}},
        desk.agent: {"active": True, "roles": [desk.name], "desk": 4},
        desk.done: {"n0": {"amount": 1}},
    }
    return Case(desk, {"amount": amount, "number": number, "subject": subject}, state)


def refund_of_80() -> Case:
    """Return the published example: a refund of 80 under a limit of 100."""
    desk = DESKS["refund"]
    drawn = case_of(desk, np.random.default_rng(0))
    changed = {"policy": drawn.state["policy"] | {"limit": 100}, "till": {"available": 60}, "bank": {"available": 60}}
    return Case(desk, {"amount": 80, "number": "7", "subject": 1}, drawn.state | changed | {"holds": {}})


class Mutation(NamedTuple):
    """What happens to the state of a case while its action waits: writes in order, and rules that are replaced."""

    writes: tuple[tuple[str, Any], ...] = ()
    rules: tuple[Rule, ...] = ()


def _with(case: Case, artifact: str, **fields: Any) -> tuple[str, Any]:
    return artifact, case.state[artifact] | fields


def _without(case: Case, artifact: str, field: str) -> tuple[str, Any]:
    return artifact, {key: value for key, value in case.state[artifact].items() if key != field}


def _lower(case: Case, rng: np.random.Generator) -> tuple[str, Any]:
    return _with(case, "policy", **{case.desk.cap: case.intent["amount"] - int(rng.integers(1, 10))})


def _skewed(case: Case, rng: np.random.Generator) -> Mutation:
    """Each of two writers takes what would leave enough if it were alone."""
    one, other = case.desk.stores
    slack = case.state[one]["available"] + case.state[other]["available"] - case.intent["amount"]
    taken = slack // 2 + 1
    writes = [_with(case, store, available=case.state[store]["available"] - taken) for store in (one, other)]
    return Mutation(tuple(writes))


def _stricter(case: Case, rng: np.random.Generator) -> Mutation:
    """Version 2 of the cap's validator keeps a margin, which the case may or may not have."""
    first = rules_of(case.desk)[0]
    return Mutation(rules=(_validator_2(first, case.desk.cap),))


@cache
def _validator_2(first: Condition, cap: str) -> Condition:
    def within_margin(state: Any, intent: Value) -> bool:
        return bool(intent["amount"] + 50 <= state["policy"][cap])

    return Condition(first.name, within_margin, "2", first.selectors, supersedes=frozenset({"1"}))


# fmt: off
MUTATIONS: Final[Mapping[str, Callable[[Case, np.random.Generator], Mutation]]] = {
    "other field": lambda c, r: Mutation((_with(c, c.desk.agent, desk=int(r.integers(5, 99))),)),
    "other resource": lambda c, r: Mutation((("weather", {"rain": int(r.integers(100))}),)),
    "renamed": lambda c, r: Mutation((_with(c, c.desk.subject, name=f"Bo {r.integers(100)}"),)),
    "cap lowered": lambda c, r: Mutation((_with(c, "policy", **{c.desk.cap: c.intent["amount"] + int(r.integers(0, 9))}),)),
    "cap below": lambda c, r: Mutation((_lower(c, r),)),
    "done elsewhere": lambda c, r: Mutation((_with(c, c.desk.done, **{c.intent["number"]: {"amount": 1}}),)),
    "another done": lambda c, r: Mutation((_with(c, c.desk.done, **{f"n{r.integers(1, 99)}": {"amount": 1}}),)),
    "authority revoked": lambda c, r: Mutation((_with(c, c.desk.agent, active=False),)),
    "phantom": lambda c, r: Mutation((_with(c, c.desk.alerts, a3={"open": True, "subject": c.intent["subject"]}),)),
    "field gone": lambda c, r: Mutation((_without(c, "policy", ("permits", c.desk.cap)[int(r.integers(2))]),)),
    "wrong type": lambda c, r: Mutation(((_with(c, "policy", **{c.desk.cap: "high"}), _with(c, c.desk.agent, active=""),
                                          _with(c, c.desk.agent, roles=None))[int(r.integers(3))],)),
    "there and back": lambda c, r: Mutation((_lower(c, r), ("policy", c.state["policy"]))),
    "write skew": _skewed,
    "policy version": lambda c, r: Mutation((_with(c, "policy", version=2),)),
    "validator version": _stricter,
}
# fmt: on
"""Fifteen kinds of what can happen meanwhile."""


def exhaustive(case: Case, now: State, rules: Mapping[str, Rule], *, refresh: bool = True) -> Verdict:
    """Return the true verdict: every rule evaluated on plain values, without views, edges or what is remembered."""
    found = []
    for rule in case.action("", refresh=refresh).rules:
        current = rules.get(rule.name, rule)
        fails = current.failed
        try:
            before, after = rule.validator(case.state, case.intent), current.validator(now, case.intent)
            if current.policy is not None:
                before, after = (before, case.state["policy"]["version"]), (after, now["policy"]["version"])
        except Exception:
            found.append(fails)
            continue
        answer = after[0] if isinstance(after, tuple) else after
        if isinstance(current, Condition) and answer is not True:
            found.append(fails)
        elif current.version != rule.version or before != after:
            found.append(Verdict.REFRESH)
    return most_severe(found)


REFUND_EXAMPLE: Final[Mapping[str, Callable[[Case], Mutation]]] = {
    "renamed": lambda c: Mutation((_with(c, "customer", name="Ada King"),)),
    "limit_90": lambda c: Mutation((_with(c, "policy", limit=90),)),
    "limit_50": lambda c: Mutation((_with(c, "policy", limit=50),)),
    "already_refunded": lambda c: Mutation((_with(c, "refunds", **{"7": {"amount": 80}}),)),
}
"""What the paper lets happen to its refund."""

DURABLE: Final[tuple[tuple[str, Callable[[Case], tuple[str, Any]]], ...]] = (
    ("cap", lambda c: _with(c, "policy", **{c.desk.cap: c.intent["amount"]})),
    ("note", lambda c: _with(c, "policy", note="new form")),
    ("store", lambda c: _with(c, c.desk.stores[0], available=c.state[c.desk.stores[0]]["available"] + 1)),
    ("email", lambda c: _with(c, c.desk.subject, email="a@example.org")),
    ("roles", lambda c: _with(c, c.desk.agent, roles=[c.desk.name, "other"])),
    ("place", lambda c: _with(c, c.desk.agent, desk=9)),
    ("alert", lambda c: _with(c, c.desk.alerts, a4={"open": False, "subject": 0})),
    ("name", lambda c: _with(c, c.desk.subject, name="Bo")),
    ("permits", lambda c: _with(c, "policy", permits=[c.desk.name])),
    ("done", lambda c: _with(c, c.desk.done, **{c.intent["number"]: {"amount": 1}})),
)
"""Ten changes, by construction: six reach one of the six conditions each, four reach none."""
