"""Targets: where effects land, and what a target must be able to do so that an effect lands once and on true premises.

A target compares and sets: in one step of its own it checks that the premises of an effect still hold, that the intent
was not published before, and writes it. What is checked outside and written afterwards can be wrong by the time that it
is written. Tokens are compared for equality and have no order.
"""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Callable, Mapping
from enum import StrEnum
from typing import NamedTuple, Protocol

from revise_lab.errors import RefusedCombination, ReviseLabError
from revise_lab.records.effect import EffectState, Reversibility
from revise_lab.records.value import Value, canonical_text, freeze

ABSENT_TOKEN = "absent"
"""The token of a resource that does not exist; as a premise: it must not have come to exist."""


class TargetError(ReviseLabError):
    """A target did not do what it was asked to; nothing happened there."""


class PremiseChanged(TargetError):
    """A premise does not hold any more; ``names`` are the resources. Decide again on what is true now."""


class IntentConflict(TargetError):
    """An intent was published with another payload, or its epoch is closed by a compensation."""


class OutcomeUnknown(ReviseLabError):
    """It may have happened or not: ask with ``find`` before anything is sent again."""


class Receipt(NamedTuple):
    """What a target knows of an intent."""

    intent_key: str
    payload: Value
    state: EffectState
    """``confirmed``, ``compensated``, or ``dropped``: closed before it arrived."""


class Target(Protocol):
    """Where effects are published. The methods block; a driver calls them from a thread."""

    @property
    def name(self) -> str:
        """Names it in effects and messages."""

    @property
    def compares_and_sets(self) -> bool:
        """Whether premises and intent are checked in the same step that writes."""

    def publish(self, intent_key: str, payload: object, premises: Mapping[str, str]) -> Receipt:
        """Publish an intent if its premises hold.

        Parameters
        ----------
        intent_key : str
            Its identity, epoch included. The same key with an equal payload is one publication however often it is sent;
            what the premises have become since does not matter to it.
        payload : JSON-like
            What to do.
        premises : mapping of str to str
            The token that each resource had when it was decided.

        Returns
        -------
        Receipt
            Of the first publication.

        Raises
        ------
        PremiseChanged
            Nothing was published.
        IntentConflict
            Nothing was published.
        OutcomeUnknown
            It may be.
        """

    def find(self, intent_key: str, *, close: bool = False) -> Receipt | None:
        """Say what became of an intent; None if it never arrived.

        With ``close`` it never will either: the key is closed in the same step, so that a call which is still on its way,
        sent by a process that has died since, finds it taken. Without that no answer would be worth anything.
        """

    def compensate(self, intent_key: str) -> Receipt:
        """Undo a publication; again is the same as once."""

    def token(self, resource: str) -> str:
        """Return the present token of a resource that can be a premise."""


def check_target(target: Target, reversibility: Reversibility) -> None:
    """Refuse to hand effects that cannot simply be revoked to a target that cannot check them.

    Raises
    ------
    RefusedCombination
        Naming the target and the class.
    """
    if reversibility in (Reversibility.COMPENSABLE, Reversibility.IRREVERSIBLE) and not target.compares_and_sets:
        raise RefusedCombination(
            f"target {target.name!r} cannot compare and set, and effects of class {reversibility} ({reversibility.name})"
            " need that: a premise could change, or the effect land twice, unseen - use one that can, or declare them R",
            target=target.name,
            reversibility=reversibility,
        )


def check_premises(target: str, intent_key: str, premises: Mapping[str, str]) -> None:
    """Refuse premises without a token: they would hold whatever happens."""
    for name, token in premises.items():
        if not isinstance(token, str) or not token:
            raise TargetError(
                f"{target}: {intent_key} names the premise {name!r} with the token {token!r}, which would hold whatever"
                f" happens - ask for the token before deciding ({ABSENT_TOKEN!r} if it is not there)",
                name=name,
            )


def premise_changed(target: str, intent_key: str, names: list[str]) -> PremiseChanged:
    """Phrase that premises do not hold."""
    return PremiseChanged(
        f"{target}: {intent_key} was not published, for {', '.join(names)} changed after it was decided - decide again on"
        " what is true now",
        names=tuple(names),
    )


def closed(intent_key: str) -> Receipt:
    """Return what stands for an intent that was asked for and had not arrived."""
    return Receipt(intent_key, None, EffectState.DROPPED)


def arrived(receipt: Receipt | None) -> Receipt | None:
    """Return the receipt of an intent that did arrive."""
    return None if receipt is None or receipt.state is EffectState.DROPPED else receipt


def first_receipt(target: str, receipt: Receipt, payload: object) -> Receipt:
    """Return the receipt of an intent that is there, if sending it again means the same."""
    if receipt.state is EffectState.DROPPED:
        raise IntentConflict(
            f"{target}: {receipt.intent_key} was asked for before it arrived, which closed it - publish in the next epoch",
            intent_key=receipt.intent_key,
        )
    if receipt.state is EffectState.COMPENSATED:
        raise IntentConflict(
            f"{target}: {receipt.intent_key} was compensated, which closes its epoch - publish in the next one",
            intent_key=receipt.intent_key,
        )
    if canonical_text(receipt.payload) != canonical_text(freeze(payload)):
        raise IntentConflict(
            f"{target}: {receipt.intent_key} was published with another payload - compensate that first, and publish this in"
            " the next epoch",
            intent_key=receipt.intent_key,
        )
    return receipt


def not_published(target: str, intent_key: str) -> TargetError:
    """Phrase that there is nothing to compensate."""
    return TargetError(
        f"{target}: {intent_key} was never published here, so there is nothing to compensate - drop it, and see whether"
        " it went to another target",
        intent_key=intent_key,
    )


class Fault(StrEnum):
    """What a :class:`MemoryTarget` does to one call."""

    FAIL = "fail"
    """Refuse it; nothing happens."""
    HANG = "hang"
    """Keep it until :attr:`MemoryTarget.resume` is set, then do it."""
    NOT_DONE = "not_done"
    """Leave the outcome unknown, and do nothing."""
    ANSWER_LOST = "answer_lost"
    """Do it, and leave the outcome unknown."""


class MemoryTarget:
    """A target in memory, for virtual time and tests: thread-safe, and it fails as it is told to.

    Parameters
    ----------
    name : str
        Its name.
    compares_and_sets : bool
        False for a target that publishes whatever it is sent, as often as it is sent.
    """

    def __init__(self, name: str = "memory", *, compares_and_sets: bool = True) -> None:
        self.name, self.compares_and_sets = name, compares_and_sets
        #: What happened outside, in order: ``("publish" | "compensate", intent key, payload)``.
        self.happened: list[tuple[str, str, Value]] = []
        #: What to do to the next calls of ``publish`` and ``compensate``, in order; None is nothing.
        self.faults: deque[Fault | None] = deque()
        #: Whether it answers at all.
        self.reachable = True
        #: Lets calls go on that hang.
        self.resume = threading.Event()
        self._receipts: dict[str, Receipt] = {}
        self._resources: dict[str, tuple[int, Value]] = {}
        self._lock = threading.Lock()

    @property
    def n_publications(self) -> Counter[str]:
        """How often each intent was published."""
        return Counter(key for what, key, _ in self.happened if what == "publish")

    def set(self, resource: str, value: object) -> str:
        """Give a resource a value and return its new token."""
        with self._lock:
            version = self._resources.get(resource, (0, None))[0] + 1
            self._resources[resource] = (version, freeze(value))
            return str(version)

    def token(self, resource: str) -> str:
        """Return the present token of a resource."""
        self._reach(resource)
        with self._lock:
            return self._token(resource)

    def find(self, intent_key: str, *, close: bool = False) -> Receipt | None:
        """Say what became of an intent."""
        self._reach(intent_key)
        with self._lock:
            known = self._receipts.get(intent_key)
            if known is None and close:
                self._receipts[intent_key] = closed(intent_key)
            return arrived(known)

    def publish(self, intent_key: str, payload: object, premises: Mapping[str, str]) -> Receipt:
        """Publish an intent if its premises hold."""
        check_premises(self.name, intent_key, premises)
        value = freeze(payload)

        def do() -> Receipt:
            known = self._receipts.get(intent_key)
            if self.compares_and_sets:
                if known is not None:
                    return first_receipt(self.name, known, value)
                if changed := [each for each, token in premises.items() if self._token(each) != token]:
                    raise premise_changed(self.name, intent_key, changed)
            return self._record("publish", Receipt(intent_key, value, EffectState.CONFIRMED))

        return self._call(intent_key, do)

    def compensate(self, intent_key: str) -> Receipt:
        """Undo a publication."""

        def do() -> Receipt:
            known = arrived(self._receipts.get(intent_key))
            if known is None:
                raise not_published(self.name, intent_key)
            if known.state is EffectState.COMPENSATED:
                return known
            return self._record("compensate", known._replace(state=EffectState.COMPENSATED))

        return self._call(intent_key, do)

    def _record(self, what: str, receipt: Receipt) -> Receipt:
        self.happened.append((what, receipt.intent_key, receipt.payload))
        self._receipts[receipt.intent_key] = receipt
        return receipt

    def _token(self, resource: str) -> str:
        return str(self._resources[resource][0]) if resource in self._resources else ABSENT_TOKEN

    def _reach(self, what: str) -> None:
        if not self.reachable:
            raise OutcomeUnknown(f"{self.name} does not answer for {what} - ask again when it does")

    def _call(self, intent_key: str, do: Callable[[], Receipt]) -> Receipt:
        with self._lock:
            fault = self.faults.popleft() if self.faults else None
        self._reach(intent_key)
        if fault is Fault.FAIL:
            raise TargetError(f"{self.name} refused {intent_key} - nothing happened; send it again or drop it")
        if fault is Fault.HANG:
            self.resume.wait()
        if fault is not Fault.NOT_DONE:
            with self._lock:
                receipt = do()
        if fault in (Fault.NOT_DONE, Fault.ANSWER_LOST):
            raise OutcomeUnknown(
                f"{self.name} gave no answer for {intent_key} - ask what became of it", intent_key=intent_key
            )
        return receipt
