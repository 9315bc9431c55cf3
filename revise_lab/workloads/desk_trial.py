"""A counter at which the actions of the desks are decided, overtaken by a mutation, and released or not, in several ways."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple, TypeAlias

from revise_lab.policies.evaluation import evaluate_rule
from revise_lab.records.condition import Captured, Condition, PendingAction, Verdict, most_severe
from revise_lab.records.selector import Selector
from revise_lab.records.value import Value, freeze
from revise_lab.runtime.pending import PendingActions
from revise_lab.runtime.target import MemoryTarget, PremiseChanged, Receipt

from .desk import Case, Mutation, State, exhaustive


class Overtaken:
    """Put before a target's class: something can happen just before a publication."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        #: Called, one for each publication, before it is checked.
        self.meanwhile: deque[Callable[[], object]] = deque()

    def publish(self, intent_key: str, payload: object, premises: Mapping[str, str]) -> Receipt:
        """Publish an intent if its premises hold."""
        if self.meanwhile:
            self.meanwhile.popleft()()
        published: Receipt = super().publish(intent_key, payload, premises)  # type: ignore[misc]
        return published


class MemoryRecords(Overtaken, MemoryTarget):
    """A target in memory whose resources can be read."""

    def __init__(self, name: str = "desk") -> None:
        super().__init__(name)

    def value(self, resource: str) -> Value:
        """Return the present value of a resource; None if it is not there."""
        return self._resources.get(resource, (0, None))[1]


class Execution(NamedTuple):
    """What became of one action, and what should have."""

    verdict: Verdict
    truth: Verdict
    released: bool
    n_evaluated: int
    """Rules evaluated after the decision."""
    n_tries: int

    @property
    def false_allow(self) -> bool:
        """Whether it was released without being justified."""
        return self.released and not self.truth.releases

    @property
    def false_block(self) -> bool:
        """Whether it was held back although it was justified."""
        return not self.released and self.truth.releases


Tokens: TypeAlias = Mapping[str, str]
"""The token of each resource."""

BASELINES: Final[Mapping[str, Callable[[Tokens, Tokens, str], bool]]] = {
    "version_check": lambda before, now, resource: before == now,
    "always_replan": lambda before, now, resource: False,
    "target_only": lambda before, now, resource: before[resource] == now[resource],
    "no_check": lambda before, now, resource: True,
}
"""What decides on release or replanning without evaluating anything, given the tokens of what was read, at the decision and
now, and the resource that is written: optimistic concurrency, everything decided again, compare-and-set on the row that is
written and on nothing else, nothing."""


def baseline_premises(name: str, tokens: Tokens, resource: str) -> dict[str, str]:
    """Return the tokens that a baseline sends along with the action."""
    if name == "no_check":
        return {}
    return {resource: tokens[resource]} if name == "target_only" else dict(tokens)


HOW: Final = ("selective", "full_rescan", *BASELINES)
"""Ours, and what it is compared with."""


class Counter:
    """A desk at which many actions wait one after the other, checked in one way.

    Parameters
    ----------
    how : str
        Of ``HOW``.
    target : Records
        Where state and effects are; it must take ``set``, and ``meanwhile`` for what happens between.
    omit : callable, optional
        For ``selective``: which reads of which rule are lost.
    """

    def __init__(
        self, how: str = "selective", target: Any = None, *, omit: Callable[[str, Selector], bool] | None = None
    ) -> None:
        self.how = how
        self.target = MemoryRecords() if target is None else target
        self.pending = PendingActions(self.target, timeout_s=None)
        self.pending.graph.omit = omit
        self.n = 0
        self._state: State = {}

    def execute(self, case: Case, mutation: Mutation, *, between: bool = False, partial: bool = False) -> Execution:
        """Decide, let a mutation happen, and release.

        Parameters
        ----------
        case : Case
            The action and its state.
        mutation : Mutation
            What happens.
        between : bool
            It happens after the last check and before the target's.
        partial : bool
            For ``selective``: it is known that the first condition has reads which go unseen.
        """
        self.n += 1
        key = f"{case.desk.name}/{self.n}"
        self._set(*case.state.items())
        action = case.action(key)
        if partial:
            first, *others = action.conditions
            blind = Condition(
                f"{first.name}, in part", first.validator, first.version, first.selectors, Captured.PARTIAL
            )
            action = PendingAction(
                key, action.intent, (blind, *others), action.refresh, "", action.resource, action.reversibility
            )
        now = case.state | dict(mutation.writes)
        truth = exhaustive(case, now, {rule.name: rule for rule in mutation.rules})

        def happen() -> None:
            self._set(*mutation.writes)

        if self.how == "selective":
            return self._selective(action, mutation, happen, truth, between)
        return self._compared(action, mutation, happen, truth, between)

    def _selective(
        self, action: PendingAction, mutation: Mutation, happen: Callable[[], None], truth: Verdict, between: bool
    ) -> Execution:
        pending = self.pending
        pending.propose(action)
        decided = pending.graph.n_evaluated
        # A rule that is replaced after the last check is no premise of the target, so it is replaced before.
        pending.deploy(*mutation.rules)
        if between:
            self.target.meanwhile.append(happen)
        else:
            happen()
        outcome = pending.release(action.key)
        self.target.meanwhile.clear()
        n_evaluated = pending.graph.n_evaluated - decided
        pending.deploy(*(rule for rule in action.rules if rule.name in {each.name for each in mutation.rules}))
        return Execution(outcome.verdict, truth, outcome.receipt is not None, n_evaluated, outcome.n_tries)

    def _compared(
        self, action: PendingAction, mutation: Mutation, happen: Callable[[], None], truth: Verdict, between: bool
    ) -> Execution:
        resources = action.artifacts
        before = {name: self.target.token(name) for name in resources}
        rules = {rule.name: rule for rule in mutation.rules}
        basis = {rule.name: evaluate_rule(rule, action.intent, self._values(resources)) for rule in action.rules}
        if between:
            self.target.meanwhile.append(happen)
        else:
            happen()
        n_evaluated = 0
        for tried in (1, 2, 3):
            tokens = {name: self.target.token(name) for name in resources}
            if self.how == "full_rescan":
                values = self._values(resources)
                found = [
                    evaluate_rule(rules.get(name, rule), action.intent, values, basis[name]).verdict
                    for name, rule in ((rule.name, rule) for rule in action.rules)
                ]
                n_evaluated += len(found)
                verdict, premises = most_severe(found), tokens
            else:
                releases = BASELINES[self.how](before, tokens, action.resource)
                verdict = Verdict.KEEP if releases else Verdict.REPLAN
                premises = baseline_premises(self.how, before, action.resource)
            if not verdict.releases:
                break
            try:
                self.target.publish(action.key, action.intent, premises)
            except PremiseChanged:
                verdict = Verdict.REPLAN
                if self.how != "full_rescan":
                    break
            else:
                self.target.meanwhile.clear()
                return Execution(verdict, truth, True, n_evaluated, tried)
        self.target.meanwhile.clear()
        return Execution(verdict, truth, False, n_evaluated, tried)

    def _set(self, *writes: tuple[str, Any]) -> None:
        for resource, value in writes:
            if self._state.get(resource) != value:
                self._state[resource] = value
                self.target.set(resource, value)

    def _values(self, resources: tuple[str, ...]) -> dict[str, Value]:
        return {name: freeze(self.target.value(name)) for name in resources}
