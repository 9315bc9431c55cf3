"""One rule at one state: what it reads, what it answers, and what that means for the action that it belongs to."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from traceback import format_exception_only
from typing import Any, TypeAlias

from revise_lab.core.recorder import Recorder
from revise_lab.core.tracking import StateView
from revise_lab.records.attempt import Coverage
from revise_lab.records.condition import Captured, Evaluation, RefreshRule, Rule, Validator, Verdict
from revise_lab.records.selector import Read, evaluate
from revise_lab.records.value import ABSENT, Value, equal, freeze

_KEEP, _REFRESH, _PARTIAL = Verdict.KEEP, Verdict.REFRESH, Captured.PARTIAL

Ask: TypeAlias = Callable[[Validator, Any, Value], object]
"""Calls a validator; a runtime puts its time limit here."""


def ask_directly(validator: Validator, state: Any, intent: Value) -> object:
    """Call a validator and wait for it."""
    return validator(state, intent)


def evaluate_rule(
    rule: Rule, intent: Value, values: Mapping[str, Value], basis: Evaluation | None = None, ask: Ask = ask_directly
) -> Evaluation:
    """Evaluate a rule at a state through recording views.

    Parameters
    ----------
    rule : Condition or RefreshRule
        What to evaluate.
    intent : Value
        Of the action.
    values : mapping
        The frozen value of every artifact.
    basis : Evaluation, optional
        What the action was decided on; None at the decision itself.
    ask : callable
        Calls the validator.
    """
    recorder = Recorder()
    view = StateView(recorder, lambda name: values.get(name, ABSENT), inputs=rule.artifacts)
    answer: Any = None
    problem = ""
    try:
        answer = ask(rule.validator, view, intent)
        answer = freeze([answer])[0] if isinstance(rule, RefreshRule) else answer  # ABSENT cannot be sent
    except Exception as error:
        problem = "".join(format_exception_only(error)).strip()  # an error whose own text fails still has one
    reads = dict(recorder.reads)
    coverage = rule.coverage
    if coverage is Captured.COMPLETE and recorder.coverage is not Coverage.COMPLETE:
        coverage = Captured.OVER_APPROXIMATED  # the recorder has recorded all that the view offers
    elif coverage is Captured.OVER_APPROXIMATED:
        reads |= {each: evaluate(each, values.get(each.artifact, ABSENT)) for each in rule.selectors}
    policy = None
    if rule.policy is not None:
        policy = reads[rule.policy] = evaluate(rule.policy, values.get(rule.policy.artifact, ABSENT))
    holds, verdict, reason = judge(rule, answer, policy, coverage, basis, problem)
    output = None if holds is None else answer
    found = tuple(Read(*each) for each in reads.items())
    return Evaluation(rule.name, rule.version, holds, verdict, reason, found, coverage, output, policy)


def judge(
    rule: Rule, answer: Any, policy: Value, coverage: Captured, basis: Evaluation | None, problem: str = ""
) -> tuple[bool | None, Verdict, str]:
    """Return whether a rule holds, what that means and why."""
    derives = type(rule) is RefreshRule
    if problem or policy is ABSENT:
        return None, rule.failed, f"unverifiable: {problem or 'the policy has no version'}"
    if not derives and answer is not True and answer is not False:
        return None, rule.failed, f"unverifiable: it answered a {type(answer).__name__}, neither True nor False"
    if coverage is _PARTIAL:
        return None, rule.failed, "unverifiable: some of its reads go unseen"
    if not derives and answer is False:
        return False, rule.failed, "false"
    if basis is None:
        return True, _KEEP, "holds"
    if basis.version != rule.version:
        if basis.version not in rule.supersedes:
            why = (
                f"unverifiable: decided under version {basis.version}, which version {rule.version} does not supersede"
            )
            return None, rule.failed, why
        return True, _REFRESH, f"holds under version {rule.version}; decided under {basis.version}"
    if policy is not None and not equal(policy, basis.policy):
        return True, _REFRESH, f"holds under policy {policy}; decided under {basis.policy}"
    if derives and not (basis.holds and equal(answer, basis.output)):
        return True, _REFRESH, "what it derives has changed"
    return True, _KEEP, "holds"
