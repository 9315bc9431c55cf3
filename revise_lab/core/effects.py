"""Effects in the machine: staged by nodes, held back, sent once, undone when they are no longer wanted (rules R9 to R13, E).

A *slot* of a node has at most one effect that is out in the world (``live``) and one that waits to leave (``waiting``).
Whenever a node settles, what its current attempt wants is compared with what is out: an equal effect is kept, another one
is marked to be compensated, and what is missing is staged. Nothing leaves without being asked again, in the step that
writes ``dispatched``, whether its node is settled and its payload the current attempt's (R9): authorisation is no licence.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from revise_lab.errors import IllegalEvent
from revise_lab.records import event as ev
from revise_lab.records.attempt import AttemptState
from revise_lab.records.effect import Answer, Effect, EffectState, Intent, Reversibility, confirmation
from revise_lab.records.selector import Delta, delta_between
from revise_lab.records.value import ABSENT, Value, equal, freeze

from .settle import Settling
from .table import EFFECTS, NodeRun, Outbox, Record

S: Final = EffectState
_MOVING: Final = frozenset({S.DISPATCHED, S.UNKNOWN, S.TO_COMPENSATE, S.COMPENSATING})


class Effecting(Settling):
    """The part of the machine that keeps the outboxes."""

    outboxes: dict[str, dict[str, Outbox]]
    """By node and slot; kept when a member goes, for its effects stay out there."""
    n_sent: int

    # --- what a node wants against what is out -----------------------------------------------------------------------

    def _weigh_effects(self, run: NodeRun, d_settled: int) -> None:
        """Look at the effects of a node that has just settled, failed or been retracted, or is no longer settled."""
        if d_settled > 0 or run.active is False or (run.current and run.current.failed):
            self._reconcile(run)
        elif d_settled < 0 and self.switches.compensation == "eager" and run.current and not run.current.valid:
            for box in self.outboxes.get(run.name, {}).values():
                if box.live and box.live.state is S.CONFIRMED:
                    self._unwant(box, box.live, "its node is no longer valid")

    def _reconcile(self, run: NodeRun) -> None:
        """Bring the outboxes of a node in line with what its current attempt wants (R12)."""
        current = run.current
        wanted: dict[str, Effect] = {}
        if run.settled and run.active and current is not None:
            wanted = {effect.slot: effect for effect in current.effects}
        boxes = self.outboxes.setdefault(run.name, {})
        for slot in wanted:
            if slot not in boxes:
                boxes[slot] = Outbox(run.name, slot)
        for slot, box in boxes.items():
            self._reconcile_slot(run, box, wanted.get(slot))

    def _reconcile_slot(self, run: NodeRun, box: Outbox, effect: Effect | None) -> None:
        waiting, live = box.waiting, box.live
        if waiting and (effect is None or not waiting.effect.same(effect) or waiting.state is S.BLOCKED):
            self._withdraw(box, "the node wants something else" if effect else "the node no longer wants it")
        if live and effect is not None and live.effect.same(effect) and not live.undo_sent:
            live.unwanted = False
            if live.state is S.TO_COMPENSATE or (live.state is S.BLOCKED and live.landed):
                self._set_effect(box, live, "keep", "it is wanted again")
            if box.waiting:
                self._withdraw(box, "what is out is what the node wants")
            return
        if live:
            self._unwant(box, live, "replaced by another payload" if effect else "no longer wanted")
        if effect is not None and run.current is not None:
            if box.waiting:
                box.waiting.attempt = run.current.id
                box.waiting.effect = effect
            else:
                box.waiting = Record(effect, run.current.id)
                self._set_effect(box, box.waiting, "stage", "")
                if self.switches.approval == "on":
                    self._out.append(ev.Ask(self._intent(box, box.waiting), effect))
            self._release(run, box, box.waiting)

    def _unwant(self, box: Outbox, record: Record, why: str) -> None:
        """Mark what is out as not wanted; it is undone once it is known to be there (R10)."""
        record.unwanted = True
        if record.state is S.CONFIRMED:
            final = record.effect.reversibility == Reversibility.IRREVERSIBLE
            self._set_effect(box, record, "block" if final else "unwant", f"{why}, irreversible" if final else why)

    def _withdraw(self, box: Outbox, why: str) -> None:
        record = box.waiting
        assert record is not None
        self._set_effect(box, record, "drop", why)
        box.waiting = None

    def _withdraw_all(self, why: str) -> None:
        for box in self._boxes():
            if box.waiting:
                self._withdraw(box, why)

    # --- release -----------------------------------------------------------------------------------------------------

    def _release(self, run: NodeRun, box: Outbox, record: Record) -> None:
        """Authorise a staged effect as soon as rule E lets it leave and whoever has to allow it has done so."""
        if record.state is not S.STAGED or self.is_asked(record):
            return
        read = confirmation(run.node.name, box.slot) in self.graph.confirmations
        kind = record.effect.reversibility
        at_commit = self.switches.release == "commit"
        early = at_commit or kind == Reversibility.REVERSIBLE or read
        if read and kind == Reversibility.IRREVERSIBLE and not (at_commit or record.effect.consent):
            self._set_effect(
                box, record, "block", "another node reads the confirmation of an irreversible effect: consent"
            )
        elif early or self.state == "closing":
            self._set_effect(box, record, "authorise", "")

    def _release_all(self) -> None:
        for box in self._boxes():
            if box.waiting and box.node in self.runs:
                self._release(self.runs[box.node], box, box.waiting)

    def _on_authorise(self, event: ev.Authorise) -> None:
        box = self._box(event.node, event.slot, "authorise")
        record = box.waiting
        if record is None or not self.is_asked(record) or not equal(record.effect.payload, event.payload):
            raise self._not_now(box, "authorise", "nothing there waits for an approval of this payload")
        self.journal.append(event)
        if not event.granted:
            self._set_effect(box, record, "block", event.reason or "denied")
            return
        record.approved = True
        self._release(self.runs[box.node], box, record)

    # --- sending and undoing -----------------------------------------------------------------------------------------

    def sendable(self) -> tuple[tuple[str, str], ...]:
        """Return (node, slot) of what may be sent now, in topological order of the nodes."""
        found = [box for box in self._boxes() if box.waiting and self._may_send(box, box.waiting)]
        return tuple((box.node, box.slot) for box in sorted(found, key=lambda box: self.runs[box.node].place))

    def undoable(self) -> tuple[tuple[str, str], ...]:
        """Return (node, slot) of what may be undone now: last sent first among those that rest on one another."""
        found = [box for box in self._boxes() if box.live and self._may_undo(box, box.live)]
        return tuple((box.node, box.slot) for box in sorted(found, key=lambda box: -box.live.order if box.live else 0))

    def residue(self) -> tuple[tuple[Intent, Effect, str], ...]:
        """Return the effects with which only a person can go on, and why: while there are any, nothing is correct."""
        return tuple(
            (self._intent(box, record), record.effect, record.why)
            for box in self._boxes()
            for record in (box.live, box.waiting)
            if record and record.state is S.BLOCKED
        )

    def live_effects(self) -> dict[str, dict[str, Effect]]:
        """Return what is confirmed to be out and wanted, by node and slot."""
        found: dict[str, dict[str, Effect]] = {}
        for box in self._boxes():
            if box.live and box.live.state is S.CONFIRMED:
                found.setdefault(box.node, {})[box.slot] = box.live.effect
        return found

    def _may_send(self, box: Outbox, record: Record) -> bool:
        """Rule R9, asked in the step that writes ``dispatched``."""
        run = self.runs.get(box.node)
        return bool(
            record.state is S.AUTHORISED
            and box.live is None
            and run
            and run.settled
            and run.active
            and run.current
            and record.attempt == run.current.id
            and self.state in ("open", "closing")
        )

    def _may_undo(self, box: Outbox, record: Record) -> bool:
        if record.state is not S.TO_COMPENSATE:
            return False
        own = box.node.partition("[")[0]
        return not any(
            other.live.order > record.order and own in self._above(other.node)
            for other in self._boxes()
            if other.live and other.live.state in (S.TO_COMPENSATE, S.COMPENSATING)
        )

    def _above(self, node: str) -> frozenset[str]:
        name = node.partition("[")[0]
        return frozenset((name, *self.graph.ancestors(name)))

    def _on_dispatch(self, event: ev.Dispatch) -> None:
        box = self._box(event.node, event.slot, "dispatch")
        record = box.waiting
        if record is None or not self._may_send(box, record):
            raise self._not_now(box, "dispatch", "send only what machine.sendable() names")
        self.journal.append(event)
        self.n_sent += 1
        record.order = self.n_sent
        box.live, box.waiting = record, None
        self._set_effect(box, record, "dispatch", "")
        self._out.append(ev.Act("publish", self._intent(box), record.effect))

    def _on_compensate(self, event: ev.Compensate) -> None:
        box = self._box(event.node, event.slot, "compensate")
        record = box.live
        if record is None or not self._may_undo(box, record):
            raise self._not_now(box, "compensate", "undo only what machine.undoable() names")
        self.journal.append(event)
        record.undo_sent = True
        self._set_effect(box, record, "undo", "")
        self._out.append(ev.Act("undo", self._intent(box), record.effect, record.receipt))

    def _on_answered(self, event: ev.Answered) -> None:
        """Take what a target said of a call, or a person of what is blocked."""
        box = self._box(event.intent.node, event.intent.slot, "answered")
        record = box.live
        what = str(event.answer)
        if record is None or event.intent != self._intent(box) or (record.state, what) not in EFFECTS:
            raise self._not_now(box, f"answered {what}", "no call to the target is open under this intent")
        self.journal.append(event)
        if event.answer is Answer.LANDED:
            record.landed, record.receipt = True, freeze(event.receipt)
        self._set_effect(box, record, what, event.reason)
        if event.answer is Answer.UNSURE:
            if record.state is S.UNKNOWN:
                self._out.append(ev.Act("find", self._intent(box), record.effect, record.receipt))
        elif event.answer is Answer.LANDED:
            if record.unwanted:
                self._unwant(box, record, "no longer wanted")
                return
            self._confirm(box, record.receipt)
            if run := self.runs.get(box.node):
                run.refusals = 0
        elif event.answer is not Answer.STUCK:
            self._gone(box, record, event)

    def _gone(self, box: Outbox, record: Record, event: ev.Answered) -> None:
        """Let go of an effect that is not, or no longer, out there; a node that still wants it stages it again."""
        box.live = None
        box.epoch += 1
        if record.state is S.COMPENSATED:
            self._confirm(box, ABSENT)
        run = self.runs.get(box.node)
        if run is None:
            return
        if event.answer is Answer.REFUSED and run.current and record.attempt == run.current.id and not record.unwanted:
            self._refused(run, box, record, event.reason)
        elif run.settled and run.active and self.state in ("open", "closing"):
            self._reconcile(run)
        for child in run.children:
            self._queue(child)

    def _refused(self, run: NodeRun, box: Outbox, record: Record, why: str) -> None:
        """Run a node again, or block it, because a premise of what it decided had changed at the target."""
        if run.refusals < run.node.retries:
            run.refusals += 1
            assert run.current is not None
            self._drop(run.current, ev.Evidence("", changed=why or f"a premise of {record.effect.slot}"))
            self._queue(run)
            return
        box.waiting = again = Record(record.effect, record.attempt)
        self._set_effect(box, again, "stage", "")
        self._set_effect(box, again, "block", f"{why or 'a premise changed'}; no retry of the node is left")

    # --- the confirmation as an artifact -----------------------------------------------------------------------------

    def _confirm(self, box: Outbox, receipt: Value) -> None:
        """Make a receipt, or its absence, current for the nodes that read it."""
        name = confirmation(box.node, box.slot)
        if name not in self.graph.confirmations:
            return
        old = self.values.get(name, ABSENT)
        self.version += 1
        self.journal.append(ev.Receipt(name, self.version, receipt))
        self.values[name] = receipt
        delta: Delta = delta_between(name, self.version, old, receipt)
        for hit in self.index.touch(delta):
            for reader, at in list(hit.cell.readers.items()):
                self._mark(reader, at, hit.place)
        for child in self.runs[box.node].children if box.node in self.runs else ():
            self._queue(child)

    def _confirmed(self, run: NodeRun) -> bool:
        """Say whether every confirmation that a node reads is that of what its parent wants now."""
        for name in run.node.confirmations:
            node, _, slot = name.partition("/")
            parent, box = self.runs.get(node), self.outboxes.get(node, {}).get(slot)
            if parent is None or parent.active is False or box is None:
                continue
            if box.waiting or (box.live and (box.live.state is not S.CONFIRMED or box.live.unwanted)):
                return False
        return True

    # --- after a crash -----------------------------------------------------------------------------------------------

    def _on_recover(self, event: ev.Recover) -> None:
        """Let go of what the old process was doing: attempts are volatile, calls that may have left are unknown (R13)."""
        self.journal.append(event)
        for attempt in list(self.attempts.values()):
            if attempt.state is AttemptState.RUNNING:
                self._stop(attempt.run, "the process was restarted")
            if attempt.state in (AttemptState.CANCELLED, AttemptState.ORPHANED):
                del self.attempts[attempt.id]
        for name in [*self._asked]:
            del self._asked[name]
            self._queue(self.runs[name])
        self._out.clear()
        for box in self._boxes():
            record = box.live
            if record and record.state in (S.DISPATCHED, S.COMPENSATING):
                self._set_effect(box, record, str(Answer.UNSURE), "the process was restarted")
            if record and record.state is S.UNKNOWN:
                self._out.append(ev.Act("find", self._intent(box), record.effect, record.receipt))
            waiting = box.waiting
            if waiting and self.is_asked(waiting):
                self._out.append(ev.Ask(self._intent(box, waiting), waiting.effect))

    # --- small things ------------------------------------------------------------------------------------------------

    @property
    def effects_move(self) -> bool:  # type: ignore[override]
        """Whether a call or a question is open, or something may be sent or undone without waiting for the close."""
        return any(map(self._moves, self._boxes()))

    def _moves(self, box: Outbox) -> bool:
        live, waiting = box.live, box.waiting
        if live and live.state in _MOVING:
            return True
        return waiting is not None and (self.is_asked(waiting) or self._may_send(box, waiting))

    def is_asked(self, record: Record) -> bool:
        """Say whether somebody still has to allow an effect."""
        return self.switches.approval == "on" and record.state is S.STAGED and not record.approved

    @property
    def effects_done(self) -> bool:
        """Whether everything that is wanted is out, and nothing else."""
        return all(not box.waiting and (box.live is None or box.live.state is S.CONFIRMED) for box in self._boxes())

    def _boxes(self) -> Iterator[Outbox]:
        return (box for boxes in self.outboxes.values() for box in boxes.values())

    def _box(self, node: str, slot: str, name: str) -> Outbox:
        box = self.outboxes.get(node, {}).get(slot)
        if box is None:
            raise IllegalEvent(f"{name} names effect {node}/{slot}, which was never staged", node=node, slot=slot)
        return box

    def _not_now(self, box: Outbox, name: str, remedy: str) -> IllegalEvent:
        states = [str(record.state) for record in (box.live, box.waiting) if record]
        is_ = " and ".join(states) or "nothing"
        return IllegalEvent(f"{name} of effect {box.node}/{box.slot}: it is {is_} - {remedy}", node=box.node)

    def _intent(self, box: Outbox, record: Record | None = None) -> Intent:
        """Return the identity of what is out, or of a record that waits: then of the epoch that it will leave in."""
        ahead = box.live is not None and record is not None and record is not box.live
        return Intent(self.graph.name, box.node, box.slot, box.epoch + ahead)

    def _set_effect(self, box: Outbox, record: Record, what: str, why: str) -> None:
        record.state = EFFECTS[record.state, what]
        record.why = why
        staged = record.effect if what == "stage" or what == "dispatch" else None
        self.journal.append(ev.Effected(self._intent(box, record), record.state, record.attempt, staged, why))
