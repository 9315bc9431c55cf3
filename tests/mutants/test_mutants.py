"""The package's own lines, one by one replaced by a mistake: the explorer and the auditor must notice each of them.

Killed means that a state, an outcome, a count or a journal is wrong; an exception kills nothing. The table names for each
mutant a scenario that kills it; every scenario kills one, or says that it is there for liveness. `pytest -rP` prints the
table with the shortest witness, a line that `replay_line` executes.
"""

from __future__ import annotations
import __future__

import inspect
import textwrap
from collections.abc import Container, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import reduce
from importlib import import_module
from typing import Any, NamedTuple

import pytest
from effect_mutants import EFFECT_MUTANTS

from revise_lab.audit.scenarios import SCENARIOS
from revise_lab.core.plan import Policy
from revise_lab.policies import policy
from revise_lab.runtime.explore import NoSuchMove, replay_line
from revise_lab.runtime.states import Merged, Problem, unmet

Edit = tuple[str, str, str]
"""Function, line, what stands there instead."""


class Mutant(NamedTuple):
    name: str
    how: str
    """The policy under which it is killed, with switches."""
    by: str
    """The scenario that kills it."""
    edits: tuple[Edit, ...]


def _function(where: str) -> Any:
    module, _, name = where.partition(":")
    found = reduce(inspect.getattr_static, name.split("."), import_module(f"revise_lab.{module}"))
    return getattr(found, "__func__", getattr(found, "fget", found))


@contextmanager
def mutated(edits: Iterable[Edit]) -> Iterator[None]:
    """Replace lines of functions, for everybody who holds these functions."""
    sources: dict[str, str] = {}
    for where, old, new in edits:
        source = sources.get(where) or textwrap.dedent(inspect.getsource(_function(where)))
        assert source.count(old) == 1, f"{where} holds {old!r} {source.count(old)} times - the mutant is out of date"
        sources[where] = source[source.index("def ") :].replace(old, new)
    before = {where: _function(where).__code__ for where in sources}
    try:
        for where, source in sources.items():
            function, scope = _function(where), {}
            code = compile(
                source, f"<mutant of {where}>", "exec", __future__.annotations.compiler_flag, dont_inherit=True
            )
            exec(code, function.__globals__, scope)
            function.__code__ = scope[function.__name__].__code__
        yield
    finally:
        for where, code in before.items():
            _function(where).__code__ = code


def _policy(how: str) -> Policy:
    name, *switches = how.split()
    return policy(name, **dict(each.split("=") for each in switches))


def _kill(mutant: Mutant, scenario: str, how: str) -> Problem | None:
    with mutated(mutant.edits):
        merged = Merged(SCENARIOS[scenario], _policy(how), audits=True, blames_errors=False)
        problems = merged.problems or unmet(merged)
        return problems[0] if problems else None


PLUS, PAPER = "revise_plus", "revise"
SLOW = {
    "a decision that is made again keeps what it read before",
    *("same_decision", "undo_and_kill", "undo_and_power", "list_grows", "whole_subtree", "pinned_members"),
    *("unknown_beside_complete", "absent_read", "effects_of_a_chain", "member_replaced", "storm"),
}
"""Mutants and scenarios whose exploration takes long: `make slow` runs them."""
INDEX, SETTLE, MACHINE, REVISING = (
    "core.provenance:ReaderIndex",
    "core.settle:Settling",
    "core.machine:Machine",
    "core.revising:Revising",
)
EXTEND = f"{MACHINE}._on_extend"
BELOW = "_stamp(at, version, place, hits)\n            for cell in at.cells:\n                if cell.marker is _VALUE:"
KIND = f"{INDEX}.touch", "if cell.marker is not _HAS:", "if cell.marker is not _HAS and cell.marker is not _KIND:"
GATE = "elif attempt.state is _FINISHED and above and active:"
DIRECT = "all(each.active is False or (each.current and each.current.valid) for each in run.parents)"

MUTANTS = [
    Mutant(
        "overlap: a change below a read does not meet it",
        PLUS,
        "member_replaced",
        ((f"{INDEX}.touch", BELOW, BELOW.partition("\n")[2].strip().replace("cell.marker is _VALUE", "False")),),
    ),
    # walking there has read the kind of every container on the way, so that this line alone is redundant
    Mutant(
        "overlap: a change above a read does not meet it",
        PLUS,
        "ancestor_replaced",
        ((f"{INDEX}.touch", "below = list(at.children.values()) if at.children else []", "below = []"), KIND),
    ),
    Mutant(
        "diff: a container whose keys changed is not named",
        PLUS,
        "member_spawned",
        (("records.selector:_diff", "if extra or len(old) != len(new):", "if False:"),),
    ),
    Mutant(
        "diff: a patch that adds or takes a member names no container",
        PLUS,
        "member_inserted",
        (("records.revision:delta_of", "resized[at[:-1]] = None", "pass"),),
    ),
    Mutant(
        "diff: a write of the same value is a change",
        PAPER,
        "no_op",
        (("records.selector:_diff", "if not (kind is type(new) and", "if True or not (kind is type(new) and"),),
    ),
    Mutant(
        "tracking: one read is dropped",
        PLUS,
        "late_read",
        (
            (
                "core.recorder:Recorder.record",
                "if selector not in self.reads:",
                "if selector not in self.reads and path != ('f',):",
            ),
        ),
    ),
    Mutant(
        "#members is not met by a change of the key set",
        PLUS,
        "member_deleted",
        ((f"{INDEX}.touch", "if cell.marker is _MEMBERS:", "if False:"),),
    ),
    Mutant(
        "#kind is not met by a change of kind",
        PLUS,
        "ancestor_replaced",
        (KIND,),
    ),
    Mutant(
        "#has is not met by an appearance",
        PLUS,
        "member_inserted",
        ((f"{INDEX}.touch", "if how is _LEAF or how is _RETYPED:", "if True:"),),
    ),
    Mutant(
        "lock: a revision that is refused has been applied up to there",
        PLUS,
        "half_refused",
        (
            (
                f"{REVISING}._revised",
                "inputs[name] = (patch(inputs.get(name, before)[0], change), before[1] + 1)",
                "inputs[name] = (patch(inputs.get(name, before)[0], change), before[1] + 1);"
                " self.inputs = {**self.inputs, name: inputs[name][0]}",
            ),
        ),
    ),
    Mutant(
        "control reads are ignored",
        PLUS,
        "control_read",
        (
            (
                f"{MACHINE}._record",
                "if attempt in readers:",
                "if attempt in readers or (selector.role == 'control' and selector.marker == 'value'):",
            ),
        ),
    ),
    Mutant(
        "parents by attempt id, not by value",
        PLUS,
        "equal_output",
        (("core.certify:check", '    if how == "delta":', "    if how:"),),
    ),
    Mutant(
        "an output that changes marks no reader",
        PLUS,
        "commit_first",
        ((f"{SETTLE}._publish", "if delta:", "if False:"),),
    ),
    Mutant(
        "late reads are taken for unchanged",
        PAPER,
        "late_read",
        ((f"{INDEX}.intern", "at.readers = {}", "at.readers = {}; at.version = 0"),),
    ),
    Mutant(
        "a late read that does not hold is not marked",
        PLUS,
        "extension_below_unsettled",
        ((f"{MACHINE}._record", "if cell.version > start:", "if False:"),),
    ),
    Mutant(
        "the gate at commit looks at direct parents only",
        PLUS,
        "chain_of_three",
        ((f"{SETTLE}._advance", GATE, GATE.replace("above", DIRECT)),),
    ),
    Mutant(
        "the gate at start looks at whether parents have an output",
        PLUS,
        "state_that_never_was",
        (
            (
                f"{SETTLE}._visit",
                "bool(active and above and not valid",
                "bool(active and all(each.active is False or each.current for each in run.parents) and not valid",
            ),
        ),
    ),
    # the attempt is stopped at the change and its mark would have it rejected; all three lines stand in the way
    Mutant(
        "extension asks only whether the newest change spares the attempt",
        PLUS,
        "newest_delta_only",
        (
            (EXTEND, "and attempt.valid", ""),
            (EXTEND, "attempt.snapshot = new", "attempt.snapshot = new; attempt.mismatched.clear()"),
            (f"{SETTLE}._advance", "self._stop(run, str(conflict_of(attempt)))", "pass"),
        ),
    ),
    Mutant(
        "extension does not wait for parents",
        PLUS,
        "extension_below_unsettled",
        ((EXTEND, "and run.n_settled == len(run.parents)", ""),),
    ),
    Mutant(
        "an output commits without a version of its own",
        PLUS,
        "own_version",
        ((f"{SETTLE}._commit", "self.version += 1", "pass"),),
    ),
    Mutant(
        "a branch once taken stays taken",
        PLUS,
        "dead_branch",
        (
            (
                f"{SETTLE}._activity",
                "bool(evaluate(selector, output))",
                "bool(run.active or evaluate(selector, output))",
            ),
        ),
    ),
    Mutant(
        "retraction waits for the running attempt",
        PLUS,
        "flip_while_recomputing",
        (
            (
                f"{SETTLE}._visit",
                "    if run.active is not False:",
                "    if run.active is not False and not run.attempt:",
            ),
        ),
    ),
    Mutant(
        "members that are gone stay",
        PLUS,
        "member_removed",
        ((f"{SETTLE}._sync_members", "for key in [key for key in group if key not in wanted]:", "for key in []:"),),
    ),
    Mutant(
        "membership by position",
        PLUS,
        "member_spawned",
        (
            (
                "records.workflow:with_keys",
                'keyed[f"{label}#{occurrence}" if occurrence else label] = entry',
                "keyed[str(len(keyed))] = entry",
            ),
        ),
    ),
    Mutant(
        "an unknown node has read its inputs only",
        PLUS,
        "unknown_reads_all",
        ((f"{MACHINE}._on_start", "visible = (*self.inputs, *snapshot.parents)", "visible = (*self.inputs,)"),),
    ),
    Mutant(
        "an unknown node has read only what it said",
        PLUS,
        "hidden_read",
        ((f"{MACHINE}._on_start", "visible = (*self.inputs, *snapshot.parents)", "visible = ()"),),
    ),
    Mutant(
        "unknown edges are taken for known",
        PAPER,
        "unknown_edges",
        (("policies.baselines:unsafe", "if view.unbounded and view.changes:", "if False:"),),
    ),
    Mutant(
        "children are settled before their parents",
        PLUS,
        "parents_first",
        ((f"{SETTLE}._queue", "run.place", '(0, "", run.name)'),),
    ),
    Mutant(
        "an override is lost at the recompute",
        PLUS,
        "pinned",
        (
            (
                f"{SETTLE}._commit",
                "output = self._effective(run, attempt.outcome.output)",
                "output = attempt.outcome.output",
            ),
        ),
    ),
    Mutant(
        "the base version is not compared",
        PLUS,
        "stale_base",
        ((f"{REVISING}._check_base", "if change.base is not None and change.base != current:", "if False:"),),
    ),
    Mutant(
        "a revision that comes twice is applied twice",
        PLUS,
        "duplicate",
        ((f"{REVISING}._admit", "if revision.id in self.revisions:", "if False:"),),
    ),
    Mutant(
        "a revision is taken after the seal",
        PLUS,
        "after_the_end",
        ((f"{REVISING}._admit", 'if self.state != "open":', "if False:"),),
    ),
    Mutant(
        "validity by change, not by value",
        PLUS,
        "aba_before_commit",
        ((f"{REVISING}._mark", 'if check == "digest" and equal(', "if False and equal("),),
    ),
    Mutant(
        "a failure is reported without its certificate",
        PLUS,
        "failure_mended",
        (
            (
                f"{SETTLE}._advance",
                "elif not attempt.valid:",
                "elif not attempt.valid and not (attempt.outcome and attempt.outcome.error):",
            ),
            (
                f"{SETTLE}._advance",
                "if why is not None:",
                "if why is not None and not (attempt.outcome and attempt.outcome.error):",
            ),
        ),
    ),
    Mutant(
        "one try too many",
        PLUS,
        "retry",
        ((f"{SETTLE}._fail", "run.failures < run.node.retries", "run.failures <= run.node.retries"),),
    ),
    Mutant(
        "a cancelled run lets its attempts finish",
        PLUS,
        "cancelled",
        ((f"{MACHINE}._on_cancel", "if run.attempt:", "if False:"),),
    ),
]
MUTANTS += [Mutant(*each) for each in EFFECT_MUTANTS]


def _marked(values: Iterable[Any], slow: Container[str]) -> list[Any]:
    return [
        pytest.param(each, marks=pytest.mark.slow if (name := getattr(each, "name", each)) in slow else (), id=name)
        for each in values
    ]


@pytest.mark.parametrize("mutant", _marked(MUTANTS, SLOW))
def test_every_mutant_is_killed_and_its_witness_shows_nothing_without_it(mutant):
    problem = _kill(mutant, mutant.by, mutant.how)
    assert problem, f"{mutant.name} survived {mutant.by}"
    print(f"{mutant.name} | {mutant.by}: {problem.anomaly}: {problem.line or problem.detail}")
    if not problem.line:
        return
    with mutated(mutant.edits):
        _, wrong = replay_line(SCENARIOS[mutant.by], problem.line, _policy(mutant.how))
    assert wrong, problem.line
    with suppress(NoSuchMove):
        _, wrong = replay_line(SCENARIOS[mutant.by], problem.line, _policy(mutant.how))
        assert not wrong


def test_there_are_at_least_as_many_mutants_as_promised():
    assert len(MUTANTS) >= 22


def test_a_mutant_leaves_no_trace():
    before = {edit[0]: _function(edit[0]).__code__ for mutant in MUTANTS for edit in mutant.edits}
    for mutant in MUTANTS:
        with mutated(mutant.edits):
            assert any(_function(edit[0]).__code__ is not before[edit[0]] for edit in mutant.edits)
    assert all(_function(where).__code__ is code for where, code in before.items())


@pytest.mark.parametrize("name", _marked((name for name, each in SCENARIOS.items() if not each.liveness), SLOW))
def test_every_scenario_kills_a_mutant(name):
    killer = next((mutant for mutant in _likely(name) if _kill(mutant, name, mutant.how)), None)
    print(f"{name} kills: {killer.name if killer else 'none'}")
    assert killer


def _likely(name: str) -> list[Mutant]:
    general = ("tracking", "an output that changes", "validity by change")
    return sorted(MUTANTS, key=lambda mutant: (mutant.by != name, not mutant.name.startswith(general)))
