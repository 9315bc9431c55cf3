"""Conditions: the executable reasons for which an action that waits may still be released (arXiv:2609.08015).

A version says that something moved; a condition says whether the reason survives. A condition is code: what a model
wrote in prose counts for nothing until it is mapped to a validator.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import StrEnum
from inspect import iscoroutinefunction
from typing import Any, NamedTuple, TypeAlias, TypeVar

from revise_lab.errors import ReviseLabError

from .effect import Reversibility
from .selector import Marker, Read, Selector, parse_path
from .value import Value, freeze

_Enum = TypeVar("_Enum", bound=StrEnum)


class ConditionRefused(ReviseLabError):
    """A condition or an action cannot be taken on: it could never be checked."""


class Verdict(StrEnum):
    """What becomes of an action that waits; in order of severity, and the most severe one counts."""

    severity: int
    """0 for KEEP to 3 for BLOCK."""

    KEEP = "KEEP"
    """Release it unchanged."""
    REFRESH = "REFRESH"
    """Renew what was derived, and release it."""
    REPLAN = "REPLAN"
    """The intent is no longer justified; hand the task back."""
    BLOCK = "BLOCK"
    """Do not release it."""

    @property
    def releases(self) -> bool:
        """Whether the action may leave."""
        return self is Verdict.KEEP or self is Verdict.REFRESH


for _severity, _verdict in enumerate(Verdict):
    _verdict.severity = _severity


class ConditionClass(StrEnum):
    """What a condition guards; it decides what its failure means."""

    failed: Verdict
    """The verdict where the condition is false, or cannot be told."""

    DECISION = "decision"
    SAFETY = "safety"
    AUTHORITY = "authority"
    POLICY = "policy"
    IRREVERSIBLE = "irreversible"


for _kind in ConditionClass:
    _kind.failed = Verdict.REPLAN if _kind is ConditionClass.DECISION else Verdict.BLOCK


class Captured(StrEnum):
    """How much of what a validator reads is known."""

    COMPLETE = "complete"
    """All of it goes through the views."""
    OVER_APPROXIMATED = "over-approximated"
    """Some goes past the views, and all of that lies within the declared selectors, which count as read."""
    PARTIAL = "partial"
    """Some is known to go unseen. It can change unseen, so the condition never counts as verified."""


Validator: TypeAlias = Callable[[Any, Any], object]
"""Given the state, as a recording view, and the intent; a condition's says True or False."""


@dataclass(frozen=True, slots=True)
class Rule:
    """What conditions and refresh rules have in common.

    Parameters
    ----------
    name : str
        Its identity, also across restarts.
    validator : callable
        ``validator(state, intent)``. It must be deterministic and change nothing.
    version : str
        Version of the validator; another one is a change like any other.
    selectors : iterable of str, tuple or Selector
        Where it may look, such as ``"policy"`` or ``"policy.limit"``. The view offers these artifacts and no others; what
        is read of them is recorded.
    coverage : Captured
        Whether that is all.
    supersedes : iterable of str
        Earlier versions whose decisions may stand if this version agrees with them. Those of any other version are
        unverifiable.
    policy : str, tuple or Selector, optional
        The place that holds the version of the policy under which it decides: another version there is a change.

    Raises
    ------
    ConditionRefused
        It has no name, no version, nowhere to look, or no validator that can be called and answers at once.
    """

    name: str
    validator: Validator
    version: str
    selectors: tuple[Selector, ...]
    coverage: Captured = Captured.COMPLETE
    supersedes: frozenset[str] = frozenset()
    policy: Selector | None = None

    def __post_init__(self) -> None:
        function = self.validator
        if not callable(function) or iscoroutinefunction(function):
            what = "answers later, when the state is another" if callable(function) else "cannot be called"
            raise ConditionRefused(
                f"condition {self.name!r}: its validator ({function!r:.60}) {what}, so it can never be checked - give a"
                " function of (state, intent)",
                name=self.name,
            )
        places = _listed(self.selectors or ())
        if not all(isinstance(each, str) and each for each in (self.name, self.version)) or not places:
            raise ConditionRefused(
                f"condition {self.name!r} needs a name, a version and at least one selector - say where it looks",
                name=self.name,
            )
        if self.policy is not None:
            object.__setattr__(self, "policy", _selector(self.policy))
            places = (*places, self.policy)
        object.__setattr__(self, "selectors", tuple(map(_selector, places)))
        object.__setattr__(self, "coverage", _member(Captured, self.coverage, f"condition {self.name!r}"))
        object.__setattr__(self, "supersedes", frozenset(_listed(self.supersedes)))

    @property
    def artifacts(self) -> tuple[str, ...]:
        """The artifacts that its view offers."""
        return tuple(dict.fromkeys(each.artifact for each in self.selectors))

    @property
    def failed(self) -> Verdict:
        """The verdict where it is false, or cannot be told."""
        return Verdict.REPLAN


@dataclass(frozen=True, slots=True)
class Condition(Rule):
    """One executable reason for an action; see :class:`Rule` for the other parameters.

    Parameters
    ----------
    kind : ConditionClass
        What it guards.
    """

    kind: ConditionClass = ConditionClass.DECISION

    def __post_init__(self) -> None:
        Rule.__post_init__(self)
        object.__setattr__(self, "kind", _member(ConditionClass, self.kind, f"condition {self.name!r}"))

    @property
    def failed(self) -> Verdict:
        """The verdict where it is false, or cannot be told."""
        return self.kind.failed

    def as_branch(self, holds: Any, fails: Any, intent: Value = None) -> Callable[[Any], Any]:
        """Return the decision that this condition makes in a workflow, for ``flow.branch`` or ``flow.router``.

        What the validator reads are control reads then. Under ``control="condition"`` (rule R7) it is asked again by itself
        and only its answer counts, so that a change which it survives recomputes nothing.

        Parameters
        ----------
        holds, fails : str or list of str
            The lanes to take where it holds, and where it does not.
        intent : Value
            Passed to the validator.

        Raises
        ------
        ConditionRefused
            Some of its reads go past the views.
        """
        if self.coverage is not Captured.COMPLETE:
            raise ConditionRefused(
                f"condition {self.name!r} is {self.coverage}, and a workflow sees only what is read through its views - let"
                " the validator read everything from the state",
                name=self.name,
            )

        def decide(state: Any) -> Any:
            answer = self.validator(state, intent)
            if answer is not True and answer is not False:
                raise TypeError(f"condition {self.name!r} answered {answer!r} - a branch needs True or False")
            return holds if answer else fails

        return decide


@dataclass(frozen=True, slots=True)
class RefreshRule(Rule):
    """What an action carries that is derived from the state and decides nothing: its validator returns that value."""


class Evaluation(NamedTuple):
    """What came of evaluating a rule at a state."""

    name: str
    version: str
    """Of the validator that was asked."""
    holds: bool | None
    """Whether the condition holds, or a value could be derived; None if it cannot be told."""
    verdict: Verdict
    reason: str
    reads: tuple[Read, ...]
    coverage: Captured
    output: Value
    """What the validator answered."""
    policy: Value = None
    """The version of the policy."""


@dataclass(frozen=True, slots=True)
class PendingAction:
    """An action that was decided and waits to be released.

    Parameters
    ----------
    key : str
        The intent key under which the target knows it, epoch included; never model text.
    intent : JSON-like
        What to do; the validators get it as well.
    conditions : tuple of Condition
        All that must hold.
    refresh : tuple of RefreshRule
        What it carries that is derived; sent as ``{"intent": ..., "derived": {rule: value}}``.
    target : str
        Name of the target that writes it.
    resource : str
        The resource at the target that it writes; always among the premises.
    reversibility : Reversibility
        Its class.
    observed : tuple of Read
        What else was read to decide and no condition depends on.

    Raises
    ------
    ConditionRefused
        There is no condition, or two rules share a name.
    """

    key: str
    intent: Value
    conditions: tuple[Condition, ...]
    refresh: tuple[RefreshRule, ...] = ()
    target: str = ""
    resource: str = ""
    reversibility: Reversibility = Reversibility.COMPENSABLE
    observed: tuple[Read, ...] = ()

    def __post_init__(self) -> None:
        if not isinstance(self.key, str) or self.key != self.key.encode(errors="ignore").decode():
            raise ConditionRefused(f"action {self.key!r}: its key is no text that has a UTF-8 - give one", key=self.key)
        for field in ("conditions", "refresh", "observed"):
            object.__setattr__(self, field, _listed(getattr(self, field)))  # a generator is over once it was looked at
        if not all(isinstance(each, Condition) for each in self.conditions):
            raise ConditionRefused(f"action {self.key!r}: conditions must be Condition records", key=self.key)
        if not all(isinstance(each, Rule) for each in self.refresh):
            raise ConditionRefused(f"action {self.key!r}: refresh must be RefreshRule records", key=self.key)
        names = [rule.name for rule in self.rules]
        if not self.conditions or len(set(names)) < len(names):
            why = "has no condition, so nothing could ever stop it" if not self.conditions else f"repeats {names}"
            raise ConditionRefused(f"action {self.key!r} {why} - give each reason once, by name", key=self.key)
        object.__setattr__(self, "intent", freeze(self.intent))
        object.__setattr__(self, "reversibility", _member(Reversibility, self.reversibility, f"action {self.key!r}"))

    @property
    def rules(self) -> tuple[Rule, ...]:
        """Conditions and refresh rules."""
        return (*self.conditions, *self.refresh)

    @property
    def artifacts(self) -> tuple[str, ...]:
        """Every artifact that a rule may read, that of the target first."""
        named = (artifact for rule in self.rules for artifact in rule.artifacts)
        return tuple(dict.fromkeys((*((self.resource,) if self.resource else ()), *named)))


def most_severe(verdicts: Iterable[Verdict]) -> Verdict:
    """Return the most severe verdict; KEEP if there is none."""
    return max(verdicts, key=lambda each: each.severity, default=Verdict.KEEP)


def _listed(items: Any) -> tuple[Any, ...]:
    return (items,) if isinstance(items, str | Selector | Rule) else tuple(items)


def _member(kind: type[_Enum], value: Any, of: str) -> _Enum:
    try:
        return kind(value)
    except ValueError:
        known = ", ".join(kind)
        raise ConditionRefused(f"{of}: {value!r} is no {kind.__name__} - give one of {known}") from None


def _selector(place: Any) -> Selector:
    return place if isinstance(place, Selector) else Selector(*parse_path(place), Marker.VALUE)
