"""Actions that wait, kept in a file, and released once and only while every reason for them holds.

An action is validated when it is proposed, when something changes, and once more right before it leaves. Then its key and
a token for *every* resource that any condition has read go to the target, which compares and publishes in one step: what
changes after the last validation is caught there, and the action is validated again on what is true by then. What leaves
is on the disk before it leaves; after a crash the target is asked what became of it. Closing an action that is not released
closes its key at the target as well, so that a call which is still on its way cannot land behind the verdict.
"""

from __future__ import annotations

import json
import sqlite3
import threading
from collections.abc import Iterable
from enum import StrEnum
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from revise_lab.errors import ConfigError, ReviseLabError
from revise_lab.policies.conditions import ConditionGraph
from revise_lab.policies.evaluation import Ask, ask_directly
from revise_lab.records.condition import (
    Condition,
    ConditionClass,
    ConditionRefused,
    PendingAction,
    RefreshRule,
    Rule,
    Validator,
    Verdict,
)
from revise_lab.records.event import from_json, to_json
from revise_lab.records.selector import Selector
from revise_lab.records.value import ABSENT, Value, freeze
from revise_lab.runtime.target import (
    ABSENT_TOKEN,
    IntentConflict,
    PremiseChanged,
    Receipt,
    Target,
    check_target,
)


class ReleaseError(ReviseLabError):
    """An action could not be released; it still waits, if it is there at all."""


class Records(Target, Protocol):
    """A target whose resources are the state that conditions are about."""

    def value(self, resource: str) -> Value:
        """Return the present value of a resource."""


class Status(StrEnum):
    """Where an action stands."""

    WAITING = "waiting"
    DISPATCHED = "dispatched"
    """It may have left: the target has to be asked."""
    RELEASED = "released"
    RETURNED = "returned"
    """Handed back to be planned again; the new plan is another action."""
    BLOCKED = "blocked"


_OPEN = (Status.WAITING, Status.DISPATCHED)


class Outcome(NamedTuple):
    """What came of a release."""

    key: str
    verdict: Verdict
    status: Status
    receipt: Receipt | None
    """Of the publication, if there was one."""
    n_tries: int
    """Validations; 0 if it had been settled before."""


class PendingActions:
    """The actions that wait for one target, with what they were decided on.

    Parameters
    ----------
    target : Records
        Where they are published, and whose resources are the artifacts of the conditions.
    rules : iterable of Rule
        The conditions and refresh rules in force. Actions in the file name theirs; one that is not in force, or whose
        version another one has replaced without superseding it, is unverifiable.
    path : str or Path, optional
        The SQLite file, made with mode 0600; several processes may use it at once. In memory without.
    max_tries : int
        Validations of one release while premises keep changing.
    timeout_s : float, optional
        Seconds that a validator may take before its condition is unverifiable; its thread is left behind. None calls it
        directly.

    Raises
    ------
    ConfigError
        It is never to be tried, or the seconds are none.
    ConditionRefused
        Two rules have one name.
    ReleaseError
        The file cannot be used.
    """

    def __init__(
        self,
        target: Records,
        rules: Iterable[Rule] = (),
        path: str | Path | None = None,
        *,
        max_tries: int = 8,
        timeout_s: float | None = 5.0,
    ) -> None:
        if max_tries < 1 or not (timeout_s is None or 0 < timeout_s < threading.TIMEOUT_MAX):
            raise ConfigError(
                f"max_tries={max_tries}, timeout_s={timeout_s}: try at least once, and give a validator a number of seconds,"
                " or None to wait for it"
            )
        self.target, self.max_tries = target, max_tries
        self.graph = ConditionGraph(rules, ask=ask_directly if timeout_s is None else _within(timeout_s))
        self._tokens: dict[str, str] = {}
        self._lock = threading.RLock()
        self._path = path or ":memory:"
        try:
            if path is not None:
                Path(path).touch(mode=0o600)  # it holds intents and what was read
            self._file = sqlite3.connect(self._path, timeout=60.0, isolation_level=None, check_same_thread=False)
        except (OSError, sqlite3.Error) as error:
            raise self._refused(error) from None
        try:
            self._sql("PRAGMA journal_mode=WAL")
            self._sql("PRAGMA synchronous=FULL")
            self._sql(
                "CREATE TABLE IF NOT EXISTS actions (key TEXT PRIMARY KEY, status TEXT NOT NULL, verdict TEXT NOT NULL,"
                " body TEXT NOT NULL)"
            )
            for key, _, _, body in self._rows("WHERE status IN (?, ?)", *_OPEN):
                self._resume(key, body)
        except BaseException:
            self._file.close()
            raise

    def close(self) -> None:
        """Close the file."""
        with self._lock:
            self._file.close()

    def propose(self, action: PendingAction) -> Verdict:
        """Take on an action, on the disk when this returns, and say how it stands.

        Raises
        ------
        ConditionRefused
            Its key was used before, it is for another target, or a rule of that name is in force with other contents.
        RefusedCombination
            It cannot simply be revoked and the target cannot compare and set.
        """
        check_target(self.target, action.reversibility)
        if action.target not in ("", self.target.name):
            raise self._elsewhere(action.key, action.target)
        if not hasattr(self.target, "value"):
            raise ConditionRefused(
                f"target {self.target.name!r} has no value(resource), so no condition can see a resource - use a"
                " SqlTarget, or give it one"
            )
        with self._lock:
            self._read(action.artifacts)
            verdict = self.graph.hold(action)
            try:
                row = (action.key, Status.WAITING, verdict, self._body(action.key))
                self._sql("INSERT INTO actions VALUES (?, ?, ?, ?)", row)
            except BaseException as error:
                self.graph.drop(action.key)
                if isinstance(error, sqlite3.IntegrityError):
                    raise ConditionRefused(
                        f"action {action.key!r} was proposed before - choose another key", key=action.key
                    ) from None
                raise
            return verdict

    def changed(self, *resources: str) -> dict[str, Verdict]:
        """Look at resources that may have changed, and return the verdicts of the actions that this reaches.

        Without arguments all that any action may read are looked at. Missing a change costs nothing but time: it is found
        before the release.
        """
        with self._lock:
            reached = self._read(resources or tuple(self.graph.values))
            self._checkpoint(reached)
            return reached

    def deploy(self, *rules: Rule) -> dict[str, Verdict]:
        """Put other versions of rules in force and return the verdicts of the actions that this reaches."""
        with self._lock:
            reached = self._read(place for rule in rules for place in rule.artifacts if place not in self._tokens)
            reached |= self.graph.deploy(rules)
            self._checkpoint(reached)
            return reached

    def status(self, key: str) -> Status:
        """Say where an action stands."""
        return Status(self._row(key)[1])

    def release(self, key: str) -> Outcome:
        """Validate an action on what is true now and publish it if it still is justified; again is the same as once.

        Raises
        ------
        ReleaseError
            There is no such action, or its premises changed during each of the tries; it goes on waiting.
        OutcomeUnknown
            The target gave no answer; releasing again asks it.
        """
        for tried in range(1, self.max_tries + 1):
            with self._lock:
                _, status, settled, body = self._row(key)
                if status not in _OPEN:
                    return self._settle(key, Verdict(settled), Status(status), tried - 1)
                if status == Status.DISPATCHED and self.target.find(key) is not None:
                    return self._settle(key, Verdict(settled), Status.RELEASED, tried - 1)
                if key not in self.graph.waiting:
                    self._resume(key, body)
                waiting = self.graph.waiting[key]
                self._read(waiting.artifacts)
                verdict = self.graph.recheck(key)
                if not verdict.releases:
                    return self._give_up(key, verdict, tried)
                premises = {name: self._tokens[name] for name in waiting.premises}
                payload = {"intent": waiting.action.intent, "derived": waiting.derived}
                self._mark(key, verdict, Status.DISPATCHED)
            try:
                self.target.publish(key, payload, premises)
            except PremiseChanged:
                continue
            except IntentConflict:
                # Somebody else published it with what was derived then, or closed the key.
                with self._lock:
                    if self.target.find(key) is None:
                        return self._give_up(key, Verdict.REPLAN, tried)
            with self._lock:
                return self._settle(key, verdict, Status.RELEASED, tried)
        raise ReleaseError(
            f"action {key!r}: its premises changed during each of {self.max_tries} tries, and nothing was published -"
            " release it again when the state is quieter",
            key=key,
        )

    # --- the state ---

    def _read(self, resources: Iterable[str]) -> dict[str, Verdict]:
        reached: dict[str, Verdict] = {}
        for name in resources:
            # The token first: should the value be newer than its token, the target will refuse the token.
            token = self.target.token(name)
            if token == self._tokens.get(name):
                continue
            value = ABSENT if token == ABSENT_TOKEN else freeze(self.target.value(name))
            reached |= self.graph.apply(name, value)
            self._tokens[name] = token
        return reached

    # --- the file ---

    def _rows(self, where: str, *parameters: str) -> list[tuple[str, str, str, str]]:
        with self._lock:
            return self._sql(f"SELECT key, status, verdict, body FROM actions {where}", parameters)

    def _sql(self, statement: str, parameters: tuple[str, ...] = ()) -> list[tuple[str, str, str, str]]:
        try:
            return self._file.execute(statement, parameters).fetchall()
        except sqlite3.IntegrityError:
            raise
        except sqlite3.Error as error:
            raise self._refused(error) from None

    def _refused(self, error: object) -> ReleaseError:
        return ReleaseError(
            f"the file of pending actions {str(self._path)!r} cannot be used: {error} - see that it is open, and one of"
            " PendingActions, in a folder that exists and can be written; what was written before is kept"
        )

    def _elsewhere(self, key: str, target: str) -> ConditionRefused:
        return ConditionRefused(
            f"action {key!r} is for {target!r} and not for {self.target.name!r} - give each target a file of its own",
            key=key,
        )

    def _row(self, key: str) -> tuple[str, str, str, str]:
        found = self._rows("WHERE key = ?", key)
        if not found:
            raise ReleaseError(f"no action {key!r} was proposed here - propose it first", key=key)
        return found[0]

    def _mark(self, key: str, verdict: Verdict, status: Status) -> None:
        """Write down how an action stands, unless it has been settled."""
        self._sql(
            "UPDATE actions SET status = ?, verdict = ? WHERE key = ? AND status IN (?, ?)",
            (status, verdict, key, *_OPEN),
        )

    def _checkpoint(self, reached: dict[str, Verdict]) -> None:
        for key, verdict in reached.items():
            self._sql(
                "UPDATE actions SET verdict = ?, body = ? WHERE key = ? AND status = ?",
                (verdict, self._body(key), key, Status.WAITING),
            )

    def _give_up(self, key: str, verdict: Verdict, tried: int) -> Outcome:
        if self.target.find(key, close=True) is not None:
            return self._settle(key, verdict, Status.RELEASED, tried)
        return self._settle(key, verdict, Status.BLOCKED if verdict is Verdict.BLOCK else Status.RETURNED, tried)

    def _settle(self, key: str, verdict: Verdict, status: Status, tried: int) -> Outcome:
        self._mark(key, verdict, status)  # the first to settle it is right: the target told all of them the same
        if key in self.graph.waiting:
            self.graph.drop(key)
        _, settled, first, _ = self._row(key)
        receipt = self.target.find(key) if settled == Status.RELEASED else None
        return Outcome(key, Verdict(first), Status(settled), receipt, tried)

    def _body(self, key: str) -> str:
        waiting, last = self.graph.waiting[key], self.graph.evaluations(key)
        action, rules = waiting.action, []
        for name, held in waiting.held.items():
            assert held.basis is not None, "what waits was evaluated when it was proposed"
            kind = held.rule.kind if isinstance(held.rule, Condition) else None
            rules.append((name, kind, held.rule.selectors, held.basis._replace(reads=()), last[name]))
        what = (action.intent, action.target, action.resource, action.reversibility, action.observed)
        text = to_json((*what, tuple(rules)))
        return text if text.isascii() else json.dumps(json.loads(text))  # half a surrogate pair has no UTF-8

    def _resume(self, key: str, body: str) -> None:
        try:
            *what, rules = from_json(body)
            intent, target, resource, reversibility, observed = what
        except (ValueError, TypeError):
            raise self._refused(f"what waits as {key!r} is damaged") from None
        if target not in ("", self.target.name):
            raise self._elsewhere(key, target)
        found = []
        for name, kind, places, _, _ in rules:
            rule = self.graph.rules.get(name)
            known = rule is not None and isinstance(rule, Condition) == (kind is not None)
            found.append(rule if known else _unknown(name, kind, places))
        conditions = tuple(rule for rule in found if isinstance(rule, Condition))
        refresh = tuple(rule for rule in found if isinstance(rule, RefreshRule))
        action = PendingAction(key, intent, conditions, refresh, target, resource, reversibility, observed)
        # What was looked at for another action will do: all of it is looked at again before a release.
        self._read(name for name in action.artifacts if name not in self._tokens)
        before = self.graph.n_evaluated
        verdict = self.graph.hold(action, {name: (basis, last) for name, _, _, basis, last in rules})
        if self.graph.n_evaluated > before:
            self._checkpoint({key: verdict})


def _unknown(name: str, kind: ConditionClass | None, selectors: tuple[Selector, ...]) -> Rule:
    """Return what stands for a rule that an action names and nobody has deployed."""

    def missing(state: Any, intent: Value) -> bool:
        raise LookupError(f"no condition {name!r} is in force - pass it to PendingActions")

    if kind is None:
        return RefreshRule(name, missing, "not in force", selectors)
    return Condition(name, missing, "not in force", selectors, kind=kind)


def _within(limit_s: float) -> Ask:
    """Return what calls a validator in a thread of its own and waits so long."""

    def ask(validator: Validator, state: Any, intent: Value) -> object:
        said: list[tuple[object, BaseException | None]] = []

        def run() -> None:
            try:
                said.append((validator(state, intent), None))
            except BaseException as error:
                said.append((None, error))

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        thread.join(limit_s)
        if not said:
            raise TimeoutError(f"no answer within {limit_s:g} s")
        answer, error = said[0]
        if error is not None:
            raise error
        return answer

    return ask
