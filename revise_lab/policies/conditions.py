"""Pending actions against a state that moves: only the conditions that a change reaches are evaluated (arXiv:2609.08015).

Edges run from reads to conditions to actions. A change is looked up among the reads, the conditions found there are
evaluated through recording views, which tell what they read now, and the most severe verdict over all of an action's rules
is the action's. Verdicts are relative to what the action was decided on, never to the last evaluation: what changes there
and back leaves no trace. Assumption (the paper does not say): a failed refresh rule is REPLAN.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Literal

from revise_lab.core.provenance import Cell, ReaderIndex
from revise_lab.records.condition import (
    Captured,
    Condition,
    ConditionRefused,
    Evaluation,
    PendingAction,
    RefreshRule,
    Rule,
    Verdict,
)
from revise_lab.records.selector import Delta, Read, Selector, delta_between, evaluate
from revise_lab.records.value import ABSENT, Value, equal

from .evaluation import Ask, ask_directly, evaluate_rule, judge
from .replay import Beyond, Layout, lay_out

_KEEP = Verdict.KEEP


class Held:
    """A rule of an action in the graph, with what came of it last."""

    __slots__ = ("basis", "cells", "coverage", "holds", "laid", "output", "policy", "reason", "rule", "verdict", "version",
                 "waiting")  # fmt: skip
    version: str
    holds: bool | None
    reason: str
    coverage: Captured
    output: Value
    policy: Value

    def __init__(self, waiting: Waiting, rule: Rule) -> None:
        self.waiting, self.rule = waiting, rule
        self.basis: Evaluation | None = None
        #: The reads; each shows now what it showed at the last evaluation, or there would have been another.
        self.cells: dict[Cell, Selector] = {}
        #: None until it is tried, False where it cannot be done.
        self.laid: Layout | Literal[False] | None = None
        self.verdict = _KEEP


class Waiting:
    """An action in the graph: its rules, and the most severe of their verdicts."""

    __slots__ = ("action", "held", "verdict")

    def __init__(self, action: PendingAction) -> None:
        self.action, self.verdict = action, _KEEP
        self.held = {rule.name: Held(self, rule) for rule in action.rules}

    def settle(self) -> None:
        """Take the most severe verdict."""
        worst = _KEEP
        for held in self.held.values():
            if held.verdict is not _KEEP and held.verdict.severity > worst.severity:
                worst = held.verdict
        self.verdict = worst

    @property
    def premises(self) -> tuple[str, ...]:
        """Every resource that any of its rules has read, and that which it writes."""
        read = dict.fromkeys([each.artifact for held in self.held.values() for each in held.cells.values()])
        return tuple(read | dict.fromkeys([self.action.resource])) if self.action.resource else tuple(read)

    @property
    def artifacts(self) -> tuple[str, ...]:
        """Every artifact that its rules, as they are in force now, may read, and that which it writes."""
        now = [artifact for held in self.held.values() for artifact in held.rule.artifacts]
        return tuple(dict.fromkeys((*self.action.artifacts, *now)))

    @property
    def derived(self) -> dict[str, Value]:
        """What its refresh rules say now, by rule."""
        return {name: held.output for name, held in self.held.items() if isinstance(held.rule, RefreshRule)}


class ConditionGraph:
    """Reads, conditions and pending actions; a change evaluates its affected closure and nothing else.

    Parameters
    ----------
    rules : iterable of Rule
        The conditions and refresh rules that are in force, one version of each.
    ask : callable
        Calls validators.
    omit : callable, optional
        Given a rule's name and a selector: whether to lose this read on purpose, for experiments.

    Attributes
    ----------
    values : dict of str to Value
        The frozen value of every artifact that is known.
    n_evaluated : int
        Rules evaluated so far.
    """

    def __init__(
        self,
        rules: Iterable[Rule] = (),
        *,
        ask: Ask = ask_directly,
        omit: Callable[[str, Selector], bool] | None = None,
    ) -> None:
        self.rules = _by_name(rules)
        self.waiting: dict[str, Waiting] = {}
        self.values: dict[str, Value] = {}
        self.version = 0
        self.n_evaluated = 0
        self._index = ReaderIndex()
        self._ask, self.omit = ask, omit

    def hold(self, action: PendingAction, known: Mapping[str, tuple[Evaluation, Evaluation]] | None = None) -> Verdict:
        """Take on an action and return its verdict.

        Parameters
        ----------
        action : PendingAction
            Its rules come into force if they are new by name.
        known : mapping of str to (Evaluation, Evaluation), optional
            By rule, what the action was decided on and what came of it last, from a checkpoint. What still reads the
            same, under the same version, is not evaluated again.

        Raises
        ------
        ConditionRefused
            The key is taken, or a rule of that name is in force with other contents.
        """
        if action.key in self.waiting:
            raise ConditionRefused(f"action {action.key!r} is already waiting - choose another key", key=action.key)
        for rule in action.rules if known is None else ():
            if self.rules.setdefault(rule.name, rule) != rule:
                raise ConditionRefused(
                    f"action {action.key!r}: another condition {rule.name!r} is in force (version"
                    f" {self.rules[rule.name].version}) - deploy this one first, or use that one",
                    name=rule.name,
                )
        for selector, _ in action.observed:
            self._index.cell(selector)
        waiting = Waiting(action)
        try:
            for held in waiting.held.values():
                if known is None:
                    held.basis = self._evaluate(held)
                    continue
                held.basis, last = known[held.rule.name]
                now = self.rules.get(held.rule.name)
                held.rule = now if type(now) is type(held.rule) else held.rule
                if last.version == held.rule.version and last.holds is not None and self._same(last.reads):
                    self._take(held, last)
                else:
                    self._evaluate(held, moved=True)
        except BaseException:
            self._let_go(waiting)
            raise
        self.waiting[action.key] = waiting
        waiting.settle()
        return waiting.verdict

    def drop(self, key: str) -> None:
        """Forget an action."""
        self._let_go(self.waiting.pop(key))

    @staticmethod
    def _let_go(waiting: Waiting) -> None:
        for held in waiting.held.values():
            for cell in held.cells:
                del cell.readers[held]

    def apply(self, artifact: str, value: Value, delta: Delta | None = None) -> dict[str, Verdict]:
        """Change an artifact, evaluate what that reaches, and return the verdicts of the actions reached.

        Parameters
        ----------
        artifact : str
            Which one.
        value : Value
            What it is now, frozen; ABSENT where it is gone.
        delta : Delta, optional
            What changed, if that is known from a patch; its version must be larger than that of any change before.
        """
        if delta is None:
            delta = delta_between(artifact, self.version + 1, self.values.get(artifact, ABSENT), value)
        self.version = delta.version
        affected: dict[Held, list[Cell]] = {}
        for cell, _ in self._index.touch(delta):
            for held in cell.readers:
                affected.setdefault(held, []).append(cell)
        self.values[artifact] = value  # last: should this be interrupted before, the change is found again
        verdicts = {}
        try:
            for held, cells in affected.items():
                was = held.verdict
                if not self._ask_again(held, cells):
                    self._evaluate(held, moved=True)
                waiting = held.waiting
                if held.verdict is not was:
                    waiting.settle()
                verdicts[waiting.action.key] = waiting.verdict
        except BaseException:
            self._interrupted(affected)
            raise
        return verdicts

    def deploy(self, rules: Iterable[Rule]) -> dict[str, Verdict]:
        """Put other versions of rules in force, evaluate them and return the verdicts of the actions that have them.

        Raises
        ------
        ConditionRefused
            A rule changed and its version did not, or two have one name.
        """
        changed = {name: rule for name, rule in _by_name(rules).items() if self.rules.get(name) != rule}
        for name, rule in changed.items():
            if name in self.rules and type(self.rules[name]) is not type(rule):
                raise ConditionRefused(
                    f"condition {name!r} cannot become a {type(rule).__name__}: what it guards would go unguarded, or the"
                    " other way round - give it another name",
                    name=name,
                )
            if name in self.rules and self.rules[name].version == rule.version:
                raise ConditionRefused(
                    f"condition {name!r} changed and is still version {rule.version}, so what was decided under the other"
                    " could not be told from it - raise its version",
                    name=name,
                )
        self.rules |= changed
        reached = [held for waiting in self.waiting.values() for name, held in waiting.held.items()
                   if type(changed.get(name)) is type(held.rule)]  # fmt: skip
        for held in reached:
            held.rule = changed[held.rule.name]
        try:
            for held in reached:
                self._evaluate(held, moved=True)
                held.waiting.settle()
        except BaseException:
            self._interrupted(reached)
            raise
        return {held.waiting.action.key: held.waiting.verdict for held in reached}

    @staticmethod
    def _interrupted(reached: Iterable[Held]) -> None:
        """Trust none of the last answers; they are asked for again before the release."""
        for held in reached:
            held.holds, held.verdict, held.reason = None, held.rule.failed, "unverifiable: interrupted"
            held.laid = None
            held.waiting.settle()

    def recheck(self, key: str) -> Verdict:
        """Ask those rules of an action again whose answer was not to be had, and return its verdict."""
        waiting = self.waiting[key]
        for held in waiting.held.values():
            if held.holds is None:
                self._evaluate(held)
        waiting.settle()
        return waiting.verdict

    def evaluations(self, key: str) -> dict[str, Evaluation]:
        """Return what came of each rule of an action last."""
        found = {}
        for name, held in self.waiting[key].held.items():
            reads = tuple(Read(each, cell.look(each, self.values)) for cell, each in held.cells.items())
            found[name] = Evaluation(name, held.version, held.holds, held.verdict, held.reason, reads, held.coverage,
                                     held.output, held.policy)  # fmt: skip
        return found

    def rescan(self, key: str) -> Verdict:
        """Compare everything that was read for an action and evaluate all of its rules: what it costs without edges."""
        waiting = self.waiting[key]
        self._same(waiting.action.observed)
        for name, found in self.evaluations(key).items():
            self._same(found.reads)
            self._evaluate(waiting.held[name])
        waiting.settle()
        return waiting.verdict

    def _same(self, reads: Iterable[Read]) -> bool:
        values = self.values
        return all([equal(evaluate(each, values.get(each.artifact, ABSENT)), was) for each, was in reads])

    def _ask_again(self, held: Held, cells: Iterable[Cell]) -> bool:
        """Evaluate a rule on laid-out reads; False if that takes the views."""
        rule, laid, values = held.rule, held.laid, self.values
        if laid is None:
            laid = held.laid = (type(rule) is Condition and lay_out(held.cells, values)) or False
        if laid is False:
            return False
        for cell in cells:
            if not laid.put(cell, cell.look(held.cells[cell], values)):
                held.laid = None
                return False
        try:
            answer = self._ask(rule.validator, laid.root, held.waiting.action.intent)
        except (Beyond, Exception):
            answer = None
        if laid.root.noted or type(answer) is not bool:
            held.laid = False if laid.root.noted else None
            return False
        self.n_evaluated += 1
        policy = None if rule.policy is None else evaluate(rule.policy, values.get(rule.policy.artifact, ABSENT))
        held.policy, held.output = policy, answer
        held.holds, held.verdict, held.reason = judge(rule, answer, policy, held.coverage, held.basis)
        return True

    def _evaluate(self, held: Held, *, moved: bool = False) -> Evaluation:
        """Evaluate a rule through the views; ``moved`` says that something which it reads may have changed."""
        self.n_evaluated += 1
        found = evaluate_rule(held.rule, held.waiting.action.intent, self.values, held.basis, self._ask)
        if not moved and found.holds is not None and held.basis is not None and self._contradicts(held, found):
            why = "unverifiable: contradictory, two answers on the same reads"
            found = found._replace(holds=None, verdict=held.rule.failed, reason=why)
        if self.omit is not None:
            found = found._replace(
                reads=tuple(read for read in found.reads if not self.omit(found.name, read.selector))
            )
        self._take(held, found)
        return found

    @staticmethod
    def _contradicts(held: Held, found: Evaluation) -> bool:
        if held.version != found.version:
            return False
        return "contradictory" in held.reason or (held.holds is not None and not equal(held.output, found.output))

    def _take(self, held: Held, found: Evaluation) -> None:
        held.version, held.holds, held.verdict, held.reason = found.version, found.holds, found.verdict, found.reason
        held.coverage, held.output, held.policy = found.coverage, found.output, found.policy
        cells = {self._index.cell(each): each for each, _ in found.reads}
        if cells.keys() != held.cells.keys():
            for cell in held.cells:
                del cell.readers[held]
            for cell in cells:
                cell.readers[held] = 0
            held.cells, held.laid = cells, None
        held.laid = held.laid and None


def _by_name(rules: Iterable[Rule]) -> dict[str, Rule]:
    found: dict[str, Rule] = {}
    for rule in rules:
        if found.setdefault(rule.name, rule) != rule:
            raise ConditionRefused(
                f"condition {rule.name!r} is given twice, and not the same - give one of each name", name=rule.name
            )
    return found
