"""Revisions in the machine: admitted or refused as one, applied, planned for, carried out.

A revision of an input patches the input. A revision of a node's output is an *override*: a patch on (node, path) that is
applied to the current and to every later output of that node until it is withdrawn; it dirties the readers of the changed
paths and not the node. Several revisions that arrive together are planned on what they change together.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from revise_lab.errors import OverrideConflict, PathError, ReviseLabError, RevisionRefused, StaleBase, WorkflowClosed
from revise_lab.records import event as ev
from revise_lab.records.revision import Change, Op, Revision, delta_of, patch
from revise_lab.records.selector import Delta, Path, delta_between, format_path
from revise_lab.records.value import ABSENT, Obj, Value, equal, freeze, make, walk

from .effects import Effecting
from .plan import Action, Policy, RecoveryPlan, View, assemble
from .provenance import Hit
from .table import Attempt, NodeRun

# bound once: looking a member up on its class costs 0.07 us in Python 3.11, more than the decisions made with it
_OVERRIDE, _WITHDRAW = Op.OVERRIDE, Op.WITHDRAW
_OPS, _VALUED = frozenset(Op), frozenset({Op.SET, Op.APPEND, Op.INSERT, Op.OVERRIDE})
_CANCEL, _RECOMPUTE = str(Action.CANCEL), str(Action.RECOMPUTE)


class Draft(NamedTuple):
    """The changed inputs and the overrides as they would be, before anybody is told."""

    inputs: Mapping[str, tuple[Value, int]]
    overrides: Mapping[str, tuple[Change, ...]]


class Revising(Effecting):
    """The part of the machine that takes revisions."""

    policy: Policy
    revisions: dict[str, int]
    plan: RecoveryPlan | None

    def _on_revise(self, event: ev.Revise) -> None:
        self._take_revisions((event.revision,), together=False)

    def _on_revise_together(self, event: ev.ReviseTogether) -> None:
        self._take_revisions(event.revisions, together=True)

    def _take_revisions(self, arrived: tuple[Revision, ...], *, together: bool) -> None:
        revisions = []
        for revision in arrived:
            try:
                revisions.append(_frozen(revision))
            except ReviseLabError as error:
                self._say(ev.Refused(revision.id, type(error).__name__, str(error)))
        if not revisions:
            return
        self.journal.append(ev.ReviseTogether(tuple(revisions)) if together else ev.Revise(revisions[0]))
        accepted, draft = self._admit(revisions)
        if not accepted:
            return
        if self.policy.deferred and (not self.quiet or self.effects_move):
            for revision in accepted:
                self.deferred.append(_settled_bases(revision))
                self._say(ev.Deferred(revision.id))
        else:
            self._apply(accepted, draft)

    def _admit(self, revisions: Iterable[Revision]) -> tuple[list[Revision], Draft]:
        """Return the revisions that may take effect and the state that they make; say why the others may not."""
        accepted = []
        draft = self._draft(self.deferred)
        for revision in revisions:
            if revision.id in self.revisions:
                self._say(ev.Duplicate(revision.id))
                continue
            try:
                if self.state != "open":
                    raise WorkflowClosed(
                        f"revision {revision.id!r} came after the run was {self.state} - call run.reopen() to revise it"
                    )
                draft = self._revised(revision, draft)
            except ReviseLabError as error:
                self._say(ev.Refused(revision.id, type(error).__name__, str(error), error.context.get("current")))
                continue
            self.revisions[revision.id] = self.version
            accepted.append(revision)
        return accepted, draft

    def _draft(self, deferred: Iterable[Revision]) -> Draft:
        """Return the state as it will be once the deferred revisions have been applied."""
        draft = Draft({}, self.overrides)
        for revision in deferred:
            draft = self._revised(revision, draft)
        return draft

    def _revised(self, revision: Revision, draft: Draft) -> Draft:
        """Return the draft with one revision made, or raise; all its changes or none."""
        if not revision.changes:
            raise RevisionRefused(f"revision {revision.id!r} holds no change - give it at least one")
        inputs, overrides = dict(draft.inputs), draft.overrides
        for change in revision.changes:
            name = change.artifact
            if change.op in (_OVERRIDE, _WITHDRAW):
                overrides = {**overrides, name: self._overridden(revision, change, overrides.get(name, ()))}
                continue
            self._check_artifact(revision, name)
            before = draft.inputs.get(name) or (self.inputs[name], self.counts[name])
            self._check_base(revision, change, before[1])
            inputs[name] = (patch(inputs.get(name, before)[0], change), before[1] + 1)
        return Draft(inputs, overrides)

    def _check_artifact(self, revision: Revision, name: str) -> None:
        if name in self.runs or name in self.graph.nodes:
            raise RevisionRefused(
                f"revision {revision.id!r}: {name!r} is the output of a node - revise an input, or pin a place of this"
                " output with op='override'"
            )
        if name not in self.inputs:
            raise RevisionRefused(
                f"revision {revision.id!r}: no artifact is named {name!r} - inputs are {', '.join(sorted(self.inputs))}"
            )

    @staticmethod
    def _check_base(revision: Revision, change: Change, current: int) -> None:
        if change.base is not None and change.base != current:
            name = change.artifact
            raise StaleBase(
                f"revision {revision.id!r} was made against version {change.base} of {name!r}, which is at {current} - read"
                f" version {current}, decide again and send it with base={current}",
                artifact=name,
                base=change.base,
                current=current,
            )

    def _overridden(self, revision: Revision, change: Change, pinned: tuple[Change, ...]) -> tuple[Change, ...]:
        name = change.artifact
        if name not in self.runs:
            raise RevisionRefused(
                f"revision {revision.id!r}: no node {name!r} is part of the run - {change.op} names a node's output"
            )
        self._check_base(revision, change, self.counts.get(name, 0))
        others = tuple(each for each in pinned if each.path != change.path)
        if change.op is _WITHDRAW:
            if len(others) == len(pinned):
                raise PathError(f"revision {revision.id!r}: nothing overrides {format_path(name, change.path)}")
            return others
        for place in self.graph.deciding(name):
            n_keys = len(change.path)
            if change.path == place[:n_keys] and type(walk(freeze(change.value), place[n_keys:])) is not Obj:
                raise RevisionRefused(
                    f"revision {revision.id!r}: {format_path(name, place)} says who runs, by lane or by member key - pin a"
                    " mapping there, like {'lane': True} or {'key': entry}"
                )
        value = self.values.get(name, ABSENT)
        if value is not ABSENT:
            patch(value, change)
        return (*others, change)

    def _apply_deferred(self, revision: Revision) -> None:
        try:
            draft = self._draft([revision])
        except ReviseLabError as error:  # what it pins may have gone with the end of the turn
            self._say(ev.Refused(revision.id, type(error).__name__, str(error), error.context.get("current")))
        else:
            self._apply([revision], draft)

    def _apply(self, revisions: list[Revision], draft: Draft) -> None:
        """Make accepted revisions current, ask the policy, and carry out its plan."""
        first = self.version
        self.version = first + len(revisions)
        pinned: list[NodeRun] = []
        deltas = [*self._apply_inputs(revisions, draft), *self._apply_overrides(draft, pinned)]
        hits = [(delta, hit) for delta in deltas for hit in self.index.touch(delta)]
        for number, revision in enumerate(revisions, 1):
            unconditional = any([change.base is None for change in revision.changes])
            own = tuple(deltas) if number == len(revisions) else ()
            self._say(make(ev.Accepted, (revision.id, first + number, own, unconditional)))
        name = "+".join([revision.id for revision in revisions])
        direct = self._direct(name, hits)
        changes = any([delta.changed for delta in deltas])
        view = View(name, self.version, direct, self.runs, self.switches, self.unbounded, self.n_active, changes)
        planned = assemble(view, self.policy.plan(view))
        self.journal.append(planned)
        self.plan = RecoveryPlan(planned, self.graph)
        self._carry_out(planned)
        for run in pinned:
            self._sync_members(run)

    def _apply_inputs(self, revisions: list[Revision], draft: Draft) -> list[Delta]:
        deltas = []
        for name, (value, count) in draft.inputs.items():
            changes = [change for revision in revisions for change in revision.changes if change.artifact == name]
            deltas.append(delta_of(name, self.version, self.inputs[name], value, changes))
            self.inputs = {**self.inputs, name: value}
            self.values[name] = value
            self.counts[name] = count
        return deltas

    def _apply_overrides(self, draft: Draft, changed: list[NodeRun]) -> list[Delta]:
        """Pin or release places of outputs, note whose, and return what that changes now."""
        deltas: list[Delta] = []
        if draft.overrides is self.overrides:
            return deltas
        before, self.overrides = self.overrides, dict(draft.overrides)
        for name, pinned in self.overrides.items():
            run = self.runs.get(name)
            if pinned is before.get(name) or run is None:
                continue
            current = run.current
            if current is None or current.outcome is None or current.outcome.error is not None:
                continue
            old, value = self.values.get(name, ABSENT), self._effective(run, current.outcome.output)
            if old is ABSENT or value is ABSENT:
                delta = delta_between(name, self.version, old, value)
            else:
                delta = delta_of(name, self.version, old, value, (*before.get(name, ()), *pinned))
            self.values[name] = value
            self.counts[name] = self.counts.get(name, 0) + 1
            changed.append(run)
            self._queue(run)
            for child in run.children:
                self._queue(child)
            deltas.append(delta)
        return deltas

    def _effective(self, run: NodeRun, output: Value) -> Value:
        """Return an output with its overrides; a place that no longer exists blocks the node."""
        run.conflict = None
        try:
            for change in self.overrides.get(run.name, ()):
                output = patch(output, change)
        except PathError as error:
            conflict = OverrideConflict(
                f"node {run.name!r} cannot take an override: {error} - withdraw it, or revise again"
            )
            run.conflict = f"OverrideConflict: {conflict}"
            self.journal.append(ev.Blocked(run.name, str(conflict)))
            return ABSENT
        return output

    def _direct(self, revision: str, hits: Iterable[tuple[Delta, Hit]]) -> dict[NodeRun, ev.Evidence]:
        """Mark the readers of what changed and return the nodes whose live attempt is among them, with evidence."""
        direct: dict[NodeRun, ev.Evidence] = {}
        unchecked = self.switches.check == "none"
        for delta, hit in hits:
            for attempt, at in list(hit.cell.readers.items()):
                run = attempt.run
                was_live = attempt is run.attempt or (not run.attempt and attempt is run.current and attempt.valid)
                self._mark(attempt, at, hit.place)
                selector = attempt.reads[at].selector
                if was_live and run not in direct and (unchecked or selector in attempt.mismatched):
                    changed = format_path(delta.artifact, hit.place)
                    direct[run] = make(ev.Evidence, (revision, changed, selector, ""))
        return direct

    def _mark(self, attempt: Attempt, at: int, place: Path) -> None:
        """Keep the cache of rule R1: compare the read with the current value, or (delta) remember that it changed.

        Without a check nothing is remembered: whether what was read still holds is then the plan's to say, once.
        """
        selector, was = attempt.reads[at]
        check = self.switches.check
        if check == "digest" and equal(attempt.cells[at].look(selector, self.values), was):
            attempt.mismatched.pop(selector, None)
        elif check != "none":
            attempt.mismatched[selector] = place
        self._queue(attempt.run)

    def _carry_out(self, planned: ev.Planned) -> None:
        """Stop and drop what the plan affects; under ``diff`` a subgraph plan leaves the rest to the values."""
        lasting = not (self.switches.propagation == "diff" and planned.scope == "subgraph")
        for node, action, evidence, _ in planned.nodes:
            run = self.runs[node]
            if run.attempt and action == _CANCEL:
                self._stop(run, str(evidence))
            if lasting and run.current and action in (_CANCEL, _RECOMPUTE):
                self._drop(run.current, evidence or ev.Evidence(planned.revision))
            run.failures = run.refusals = 0
            self._queue(run)


def _frozen(revision: Revision) -> Revision:
    """Return a revision whose values are canonical, or say what in it is no revision."""
    if type(revision.id) is not str:
        raise RevisionRefused(f"the id of revision {revision.id!r} is no text - write {str(revision.id)!r}")
    changes = []
    for change in revision.changes:
        if change.op not in _OPS or type(change.path) is not tuple:
            raise RevisionRefused(
                f"revision {revision.id!r}: {change} is no change - its op is one of {', '.join(Op)}, its path a tuple"
            )
        value = freeze(change.value)
        if value is ABSENT and change.op in _VALUED:
            raise RevisionRefused(f"revision {revision.id!r}: {change} lacks a value - give it one, or use op='delete'")
        changes.append(make(Change, (change.artifact, Op(change.op), change.path, value, change.base)))
    return Revision(revision.id, tuple(changes))


def _settled_bases(revision: Revision) -> Revision:
    """Return a deferred revision whose overrides are not checked again: the end of the turn commits outputs anew."""
    pins = (_OVERRIDE, _WITHDRAW)
    changes = tuple(each._replace(base=None) if each.op in pins else each for each in revision.changes)
    return revision._replace(changes=changes)
