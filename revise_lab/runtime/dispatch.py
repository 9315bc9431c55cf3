"""Carrying out what the machine says of effects: ask whoever has to allow them, call targets, report what they say."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from inspect import isawaitable
from typing import Any

from revise_lab.core.machine import Machine
from revise_lab.errors import ReviseLabError
from revise_lab.records import event as ev
from revise_lab.records.effect import Answer, Effect, EffectState, Intent
from revise_lab.records.value import Value, freeze, thaw

from .target import PremiseChanged, Receipt, Target, TargetError, check_target

Authorise = Callable[[Intent, Effect], Any]
"""Returns, or resolves to, whether an effect may leave."""

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.05, 5.0
"""Bounds of the pause before what nobody knew the outcome of is tried again (our choice)."""
INSIDE: ContextVar[tuple[str, ...]] = ContextVar("inside", default=())
"""The runs whose node bodies, or questions whether an effect may leave, the current task is executing."""


def is_stopped() -> bool:
    """Say whether the current task was cancelled itself, and not only something that it awaited."""
    task = asyncio.current_task()
    return task is None or task.cancelling() > 0


class Dispatcher:
    """The calls to targets of one run.

    Parameters
    ----------
    targets : mapping of str to Target
        By the name under which effects are staged.
    authorise : callable, optional
        Asked before an effect may leave.
    timeout_s : float
        How long a target may take; after that its answer is unknown and it is asked.
    machine : Machine
        The run.
    run_id : str
        Names it.
    send : callable
        Takes events.
    """

    def __init__(
        self,
        targets: Mapping[str, Target],
        authorise: Authorise | None,
        timeout_s: float,
        machine: Machine,
        run_id: str,
        send: Callable[[ev.Event], Any],
    ) -> None:
        self._targets, self._authorise, self._timeout_s, self._send = targets, authorise, timeout_s, send
        self._machine, self._run_id = machine, run_id
        self.tasks: set[asyncio.Task[None]] = set()
        self._n_unsure: Counter[tuple[str, str, str]] = Counter()
        """Calls in a row of which nobody knew what became, by what they were about."""

    def check(self, event: ev.Finish) -> None:
        """Refuse an effect that has no target, or one that cannot do what its class needs.

        Raises
        ------
        ReviseLabError
            Naming the effect and the target.
        """
        for effect in event.effects:
            target = self._targets.get(effect.target)
            if target is None:
                known = ", ".join(sorted(self._targets)) or "none"
                raise ReviseLabError(
                    f"{event.attempt} stages {effect.slot!r} for target {effect.target!r}, which the session does not have -"
                    f" pass it in targets= (there: {known})"
                )
            check_target(target, effect.reversibility)

    def carry_out(self, order: ev.Act | ev.Ask, on_error: Callable[[asyncio.Task[None]], None]) -> None:
        """Start a call in the background."""
        work = self._act(order) if isinstance(order, ev.Act) else self._ask(order)
        task = asyncio.get_running_loop().create_task(work, name=f"effect {order.intent.key}")
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)
        task.add_done_callback(on_error)

    async def _ask(self, order: ev.Ask) -> None:
        assert self._authorise is not None
        INSIDE.set((*INSIDE.get(), self._run_id))
        try:
            granted = self._authorise(order.intent, order.effect)
            granted = await granted if isawaitable(granted) else granted
        except asyncio.CancelledError as error:
            if is_stopped():
                raise
            raise ReviseLabError(f"whether {order.intent.key} may leave was asked, and the answer cancelled") from error
        if self._still_asked(order):
            intent, payload = order.intent, order.effect.payload
            self._send(ev.Authorise(intent.node, intent.slot, payload, bool(granted), "" if granted else "denied"))

    def _still_asked(self, order: ev.Ask) -> bool:
        """Say whether what somebody was shown still waits for the answer: a yes to one payload is none to the next."""
        machine, record = self._machine, self._machine.outboxes[order.intent.node][order.intent.slot].waiting
        asked = record is not None and machine.is_asked(record) and record.effect.same(order.effect)
        return asked and machine.state in ("open", "closing")

    async def _act(self, order: ev.Act) -> None:
        target, about = self._targets[order.effect.target], (order.intent.node, order.intent.slot, order.what)
        if (again := self._n_unsure[about] - 1) >= 0:  # it may break every time: the second one waits, and each longer
            await asyncio.sleep(min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2.0**again))
        try:
            if again >= 0 and order.what == "publish" and self._machine.state not in ("open", "closing"):
                answer = ev.Answered(order.intent, Answer.UNSURE, None, "not sent again: the run was cancelled")
            else:
                answer = await asyncio.wait_for(asyncio.to_thread(_call, target, order), self._timeout_s)
        except TimeoutError:
            answer = ev.Answered(order.intent, Answer.UNSURE, None, f"no answer within {self._timeout_s:g} s")
        self._n_unsure[about] = self._n_unsure[about] + 1 if answer.answer is Answer.UNSURE else 0
        self._send(answer)


def _call(target: Target, order: ev.Act) -> ev.Answered:
    """Call a target and put what it says into the words of the protocol; what is not sure is unsure."""
    key = order.intent.key
    try:
        if order.what == "publish":
            receipt = target.publish(key, thaw(order.effect.payload), dict(thaw(order.effect.premises)))
            return ev.Answered(order.intent, Answer.LANDED, _value(receipt))
        if order.what == "undo":
            target.compensate(key)
            return ev.Answered(order.intent, Answer.UNDONE)
        found = target.find(key, close=True)
        if found is None:
            return ev.Answered(order.intent, Answer.ABSENT)
        undone = found.state is EffectState.COMPENSATED
        return ev.Answered(order.intent, Answer.UNDONE if undone else Answer.LANDED, _value(found))
    except PremiseChanged as error:
        return ev.Answered(order.intent, Answer.REFUSED, None, str(error))
    except TargetError as error:
        sure = order.what != "find"
        return ev.Answered(order.intent, Answer.STUCK if sure else Answer.UNSURE, None, str(error))
    except (Exception, asyncio.CancelledError) as error:  # nobody can cancel a thread: what was, is the target's own
        return ev.Answered(order.intent, Answer.UNSURE, None, f"{type(error).__name__}: {error}")


def _value(receipt: Receipt) -> Value:
    return freeze({"intent": receipt.intent_key, "payload": thaw(freeze(receipt.payload))})
