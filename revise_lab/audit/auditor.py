"""The auditor: a fold over a journal that says whether the run kept its promises.

It shares no code with what it judges. From the journal it knows which attempt of each node is committed, what each read
and what it returned; it applies the revisions itself and looks the values up by plain indexing. A finding names the
anomaly and shows a witness: the read, what was seen, what is there now, where in the journal, and the run on one line.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Final, NamedTuple

from revise_lab.records import event as ev
from revise_lab.records.value import ABSENT

from .outbox import Outbox
from .plain import patched, same, shown


class Anomaly(StrEnum):
    """What a run must not do."""

    STALE_COMMIT = "stale commit"
    """An attempt committed although something that it read, or that its parents were made from, had changed."""
    STALE_READ = "stale read retained"
    """A sealed run holds an output that was made from a value which is no longer there."""
    STALE_OUTPUT = "stale output"
    """A sealed run holds an output that was made from such an output."""
    MIXED_VERSIONS = "mixed versions"
    """An attempt saw, or joined, artifacts that never existed together."""
    DEAD_BRANCH = "dead branch"
    """An attempt committed although what activates its node does not hold."""
    VERSION_LINE = "version line broken"
    ATTEMPT_ID = "attempt id reused"
    ENDED_TWICE = "attempt ended twice"
    START_REFUSED = "start after the end"
    """An attempt started after the run was cancelled or sealed."""
    COMMIT_AFTER_STOP = "commit after stop"
    CONTRADICTION = "read contradicts its snapshot"
    NEEDLESS = "rejected although it holds"
    """Under ``check="digest"`` an attempt was rejected whose every read still evaluates to what it observed."""
    LOST = "lost"
    """A result or a revision to which nothing happened."""
    STALE_EFFECT = "stale effect"
    """An effect left although its node's current attempt does not ask for it, or is not made from what is there."""
    DOUBLE_EFFECT = "double effect"
    """A second effect left in a slot, or one left again without proof that it had not arrived."""
    LOST_EFFECT = "effect lost"
    """A sealed run whose effect is not out in the world."""
    NOT_UNDONE = "effect not undone"
    """A sealed run with an effect out in the world that it does not want."""
    UNDONE_TWICE = "undone twice"
    UNDONE_EARLY = "undone before it was confirmed"
    UNDONE_WANTED = "wanted effect undone"
    UNDONE_ORDER = "undone out of order"
    """An effect was undone before one that rests on it."""
    UNDONE_FINAL = "irreversible effect undone"
    EARLY_EFFECT = "effect left before the close"
    NOT_AUTHORISED = "effect not authorised"
    MADE_UP = "answer made up"
    """An effect was taken for landed, undone or not arrived although its target had not said so."""


class Finding(NamedTuple):
    """An anomaly with its witness."""

    anomaly: Anomaly
    attempt: str
    read: str
    seen: Any
    latest: Any
    positions: tuple[int, ...]
    """Places in the journal: where it was read or begun, and where the anomaly shows."""
    history: str
    """The run up to there, on one line."""

    def __str__(self) -> str:
        values = f" {self.read} = {self.seen!r}, now {self.latest!r}" if self.read else ""
        return (
            f"{self.anomaly}: {self.attempt}{values} (journal {', '.join(map(str, self.positions))}) - {self.history}"
        )


class _Read(NamedTuple):
    artifact: str
    path: tuple[str | int, ...]
    marker: str
    seen: Any
    at: int
    activates: bool = False
    controls: bool = False

    def __str__(self) -> str:
        return _place(self.artifact, self.path, self.marker)


@dataclass
class _Attempt:
    id: str
    node: str
    at: int
    """Where its snapshot was taken."""
    parents: tuple[str, ...]
    reads: list[_Read] = field(default_factory=list)
    output: Any = ABSENT
    effects: tuple[Any, ...] = ()
    state: str = "running"
    """running, finished, stopped, or ended."""


def audit(journal: Iterable[ev.Entry]) -> list[Finding]:
    """Return what is wrong with a run; the journal may end anywhere.

    Parameters
    ----------
    journal : iterable of Entry
        The journal from its opening on.
    """
    auditor = Auditor()
    for entry in journal:
        auditor.feed(entry)
    return auditor.findings


class Auditor:
    """The fold: feed it entries in order.

    Attributes
    ----------
    findings : list of Finding
        What has been found so far.
    """

    def __init__(self) -> None:
        self.findings: list[Finding] = []
        self._entries: list[ev.Entry] = []
        self._values: dict[str, Any] = {}
        self._past: dict[str, tuple[list[int], list[Any]]] = {}
        self._raw: dict[str, Any] = {}
        self._pins: dict[str, list[tuple[tuple[str | int, ...], Any]]] = {}
        self._attempts: dict[str, _Attempt] = {}
        self._current: dict[str, _Attempt] = {}
        self._waiting: dict[str, _Attempt] = {}
        self._revisions: dict[str, Any] = {}
        self._open_revisions: dict[str, int] = {}
        self._fresh: set[str] = set()
        """Nodes known to be made from what is there now."""
        self._head = 0
        self._owed = ""
        """A stopped attempt whose result has just come in, until the machine says that it is discarded."""
        self._check = ""
        self._state = "open"
        self._outbox = Outbox(self._wants, self._is_fresh, self._effect, self._descends)

    def feed(self, entry: ev.Entry) -> None:
        """Take in the next entry."""
        if self._owed and not isinstance(entry, ev.Discarded):
            self._find(Anomaly.LOST, self._owed)
        self._owed = ""
        self._entries.append(entry)
        handler = getattr(self, f"_on_{type(entry).__name__.lower()}", None)
        if handler is not None:
            handler(entry)

    # --- values ----------------------------------------------------------------------------------------------------

    @property
    def _at(self) -> int:
        return len(self._entries) - 1

    def _set(self, artifact: str, value: Any) -> None:
        self._values[artifact] = value
        positions, values = self._past.setdefault(artifact, ([], []))
        positions.append(self._at)
        values.append(value)
        self._fresh.clear()

    def _value(self, read: _Read, at: int | None = None) -> Any:
        """Return what a read shows now, or showed at a place of the journal."""
        root = self._values.get(read.artifact, ABSENT)
        if at is not None:
            positions, values = self._past.get(read.artifact, ([], []))
            index = bisect_right(positions, at)
            root = values[index - 1] if index else ABSENT
        return shown(root, read.path, read.marker)

    def _stale(self, attempt: _Attempt) -> Iterator[_Read]:
        return (
            read
            for read in attempt.reads
            if not same(self._value(read), read.seen) or ("/" in read.artifact and self._outbox.outdated(read.artifact))
        )

    def _culprit(self, node: str) -> _Read | None:
        """Return the stale read that an artifact goes back to; ``None`` when it was made from what is there now."""
        seen: set[str] = set()
        stack = [node]
        while stack:
            attempt = self._current.get(name := stack.pop())
            if attempt is None or name in self._fresh or name in seen:
                continue
            seen.add(name)
            for read in self._stale(attempt):
                return read
            stack.extend(read.artifact for read in attempt.reads)
        self._fresh |= seen
        return None

    def _find(
        self, anomaly: Anomaly, attempt: str, read: _Read | None = None, at: int | None = None, latest: Any = None
    ) -> None:
        places = sorted({self._at, self._at if at is None else at})
        seen, what = None, ""
        if read is not None:
            seen, what, places = read.seen, str(read), sorted({read.at, self._at})
            latest = self._value(read) if latest is None else latest
        self.findings.append(Finding(anomaly, attempt, what, seen, latest, tuple(places), history_line(self._entries)))

    # --- the run ---------------------------------------------------------------------------------------------------

    def _on_opened(self, entry: ev.Opened) -> None:
        self._check = entry.switches["check"]
        self._outbox.switches = entry.switches
        for name, value in entry.inputs.items():
            self._set(name, value)

    def _on_revise(self, entry: ev.Revise | ev.ReviseTogether) -> None:
        arrived = (entry.revision,) if isinstance(entry, ev.Revise) else entry.revisions
        for revision in arrived:
            self._open_revisions[revision.id] = self._at
            self._revisions.setdefault(revision.id, revision)

    _on_revisetogether = _on_revise

    def _on_refused(self, entry: ev.Refused | ev.Duplicate) -> None:
        self._open_revisions.pop(entry.revision, None)
        if isinstance(entry, ev.Refused):
            self._revisions.pop(entry.revision, None)

    _on_duplicate = _on_refused

    def _on_accepted(self, entry: ev.Accepted) -> None:
        self._open_revisions.pop(entry.revision, None)
        self._version(entry.version, entry.revision)
        pinned: dict[str, None] = {}
        for change in self._revisions[entry.revision].changes:
            name = change.artifact
            if change.op in ("override", "withdraw"):
                pins = [pin for pin in self._pins.get(name, ()) if pin[0] != change.path]
                self._pins[name] = [*pins, (change.path, change.value)] if change.op == "override" else pins
                pinned[name] = None
                continue
            try:
                self._set(name, patched(self._values[name], change.op, change.path, change.value))
            except (KeyError, IndexError, TypeError):
                self._find(Anomaly.CONTRADICTION, entry.revision)
        for name in pinned:
            if name in self._raw:
                self._set(name, self._pinned(name))

    def _pinned(self, name: str) -> Any:
        value = self._raw[name]
        for path, pin in self._pins.get(name, ()) if value is not ABSENT else ():
            try:
                value = patched(value, "set", path, pin)
            except (KeyError, IndexError, TypeError):
                return ABSENT
        return value

    def _version(self, version: int, who: str) -> None:
        if version <= self._head:
            self._find(Anomaly.VERSION_LINE, who)
        self._head = max(version, self._head)

    # --- attempts --------------------------------------------------------------------------------------------------

    def _on_started(self, entry: ev.Started) -> None:
        if self._state != "open":
            self._find(Anomaly.START_REFUSED, entry.attempt)
        if entry.attempt in self._attempts:
            self._find(Anomaly.ATTEMPT_ID, entry.attempt, at=self._attempts[entry.attempt].at)
        parents = tuple(name for name, _ in entry.parents)
        attempt = self._attempts[entry.attempt] = _Attempt(entry.attempt, entry.node, self._at, parents)
        self._waiting[entry.attempt] = attempt
        for name, consumed in entry.parents:
            current = self._current.get(name)
            if consumed != (current.id if current else None):
                self._find(Anomaly.MIXED_VERSIONS, entry.attempt, at=self._attempts[consumed].at if consumed else None)
        self._existed(attempt)
        self._take(attempt, entry.reads)

    def _existed(self, attempt: _Attempt) -> None:
        """Check that a snapshot is a state that existed: every parent on it was made from what is there now."""
        for read in filter(None, map(self._culprit, attempt.parents)):
            self._find(Anomaly.MIXED_VERSIONS, attempt.id, read)

    def _on_moved(self, entry: ev.Moved) -> None:
        attempt = self._attempts[entry.attempt]
        attempt.at = self._at
        for read in self._stale(attempt):
            self._find(Anomaly.MIXED_VERSIONS, attempt.id, read)
        self._existed(attempt)

    def _take(self, attempt: _Attempt, reads: Iterable[Any]) -> None:
        for (artifact, path, marker, role), observed in reads:
            activates = role == "control" and marker == "has" and not attempt.reads
            read = _Read(artifact, path, str(marker), observed, self._at, activates, role == "control")
            on_snapshot = self._value(read, attempt.at)
            if not same(on_snapshot, observed):
                self._find(Anomaly.CONTRADICTION, attempt.id, read, latest=on_snapshot)
            attempt.reads.append(read)

    def _on_observe(self, entry: ev.Observe) -> None:
        attempt = self._attempts[entry.attempt]
        if attempt.state == "running":
            self._take(attempt, entry.reads)

    def _on_reconsidered(self, entry: ev.Reconsidered) -> None:
        """Take the reads of a decision that came out as before in the place of those that it had."""
        attempt = self._attempts[entry.attempt]
        if self._current.get(attempt.node) is attempt and same(entry.output, attempt.output):
            attempt.at = self._at
            attempt.reads = [read for read in attempt.reads if read.activates or not read.controls]
            self._take(attempt, entry.reads)
            self._fresh.clear()

    def _on_finish(self, entry: ev.Finish | ev.Fail) -> None:
        attempt = self._attempts[entry.attempt]
        if attempt.state == "stopped":
            attempt.state, self._owed = "late", attempt.id
            return
        if attempt.state != "running":
            self._find(Anomaly.ENDED_TWICE, attempt.id, at=attempt.at)
        self._take(attempt, entry.reads)
        attempt.state = "finished"
        attempt.output = entry.output if isinstance(entry, ev.Finish) else ABSENT
        attempt.effects = entry.effects if isinstance(entry, ev.Finish) else ()

    _on_fail = _on_finish

    def _on_stop(self, entry: ev.Stop) -> None:
        attempt = self._attempts[entry.attempt]
        if attempt.state not in ("running", "finished"):
            self._find(Anomaly.ENDED_TWICE, attempt.id, at=attempt.at)
        attempt.state = "stopped" if attempt.state == "running" else "ended"
        self._waiting.pop(attempt.id, None)

    def _on_discarded(self, entry: ev.Discarded | ev.Stopped) -> None:
        attempt = self._attempts[entry.attempt]
        if attempt.state not in ("stopped", "late"):
            self._find(Anomaly.ENDED_TWICE, attempt.id, at=attempt.at)
        attempt.state = "ended"

    _on_stopped = _on_discarded

    def _on_rejected(self, entry: ev.Rejected) -> None:
        attempt = self._end(entry.attempt)
        if self._check == "digest" and not any(self._stale(attempt)):
            self._find(Anomaly.NEEDLESS, attempt.id, at=attempt.at)

    def _end(self, name: str) -> _Attempt:
        attempt = self._attempts[name]
        if attempt.state in ("stopped", "late"):
            self._find(Anomaly.COMMIT_AFTER_STOP, name, at=attempt.at)
        elif attempt.state != "finished":
            self._find(Anomaly.ENDED_TWICE, name, at=attempt.at)
        attempt.state = "ended"
        self._waiting.pop(name, None)
        return attempt

    def _on_committed(self, entry: ev.Committed | ev.Failed) -> None:
        """Check an outcome that counts: it must hold now, and so must everything that it was made from."""
        attempt = self._end(entry.attempt)
        if self._state != "open":
            self._find(Anomaly.COMMIT_AFTER_STOP, attempt.id, at=attempt.at)
        stale = next(self._stale(attempt), None)
        if stale is not None:
            self._find(Anomaly.DEAD_BRANCH if stale.activates else Anomaly.STALE_COMMIT, attempt.id, stale)
        else:
            made = {name: self._culprit(name) for read in attempt.reads if (name := read.artifact) in self._current}
            for read in filter(None, made.values()):
                self._find(Anomaly.MIXED_VERSIONS if None in made.values() else Anomaly.STALE_COMMIT, attempt.id, read)
        if isinstance(entry, ev.Committed):
            self._version(entry.version, attempt.id)
        elif not entry.final:
            return
        self._raw[attempt.node] = attempt.output
        self._current[attempt.node] = attempt
        self._set(attempt.node, self._pinned(attempt.node))

    _on_failed = _on_committed

    def _on_retracted(self, entry: ev.Retracted) -> None:
        self._version(entry.version, entry.node)
        del self._raw[entry.node], self._current[entry.node]
        self._set(entry.node, ABSENT)

    # --- effects -----------------------------------------------------------------------------------------------------

    def _wants(self, node: str, slot: str) -> Any:
        attempt = self._current.get(node)
        return next((each for each in attempt.effects if each.slot == slot), None) if attempt else None

    def _is_fresh(self, node: str) -> bool:
        return self._culprit(node) is None

    def _descends(self, attempt: str, node: str) -> bool:
        """Say whether an attempt rests on a node, by the parents that attempts had."""
        seen, stack = set[str](), list(self._attempts[attempt].parents)
        while stack:
            name = stack.pop()
            if name == node:
                return True
            if name not in seen and (above := self._current.get(name)):
                seen.add(name)
                stack.extend(above.parents)
        return False

    def _effect(self, anomaly: str, who: str, at: int | None, out: Any, wanted: Any) -> None:
        places = (self._at,) if at is None else (at, self._at)
        line = history_line(self._entries)
        self.findings.append(Finding(Anomaly(anomaly), who, "payload", out, wanted, places, line))

    def _on_effected(self, entry: ev.Effected) -> None:
        self._outbox.take(entry, self._at)
        self._fresh.clear()

    def _on_receipt(self, entry: ev.Receipt) -> None:
        self._version(entry.version, entry.artifact)
        self._outbox.receipt(entry)
        self._set(entry.artifact, entry.value)

    def _on_answered(self, entry: ev.Answered) -> None:
        self._outbox.answer(entry)

    def _on_authorise(self, entry: ev.Authorise) -> None:
        self._outbox.approve(entry)

    def _on_close(self, entry: ev.Close) -> None:
        self._outbox.seal()

    def _on_reopen(self, entry: ev.Reopen) -> None:
        self._state = "open"
        self._outbox.seal(sealing=False)

    # --- the end -----------------------------------------------------------------------------------------------------

    def _on_cancel(self, entry: ev.Cancel) -> None:
        self._state = "cancelled"

    def _on_closed(self, entry: ev.Closed) -> None:
        self._state = "closed"
        for node, attempt in self._current.items():
            stale = list(self._stale(attempt))
            for read in stale:
                self._find(Anomaly.DEAD_BRANCH if read.activates else Anomaly.STALE_READ, attempt.id, read)
            if not stale and (origin := self._culprit(node)):
                self._find(Anomaly.STALE_OUTPUT, attempt.id, origin)
        wanted = ((node, effect) for node, attempt in self._current.items() for effect in attempt.effects)
        self._outbox.closed(wanted)
        for attempt in self._waiting.values():
            self._find(Anomaly.LOST, attempt.id, at=attempt.at)
        for name, at in self._open_revisions.items():
            self._find(Anomaly.LOST, name, at=at)


# --- a run on one line -----------------------------------------------------------------------------------------------

_MOVES: Final = {"Started": "start", "Observe": "read", "Finish": "finish", "Fail": "finish"}
_ARRIVALS: Final = {"Revise", "ReviseTogether", "Cancel", "Close"}
_SILENT: Final = {
    "Opened", "Start", "Extend", "Planned", "Accepted", "Stopped", "Closed", "Dispatch", "Compensate", "Receipt",
    "Reconsidered",
}  # fmt: skip


def history_line(entries: Iterable[ev.Entry]) -> str:
    """Return a journal as moves; what the machine decided stands in brackets."""
    return "; ".join(_move(type(entry).__name__, entry) for entry in entries if type(entry).__name__ not in _SILENT)


def _move(kind: str, entry: Any) -> str:
    if kind in _MOVES:
        reads = (_place(*read.selector[:3]) for read in (entry.reads if kind == "Observe" else ()))
        return " ".join((_MOVES[kind], entry.attempt.rpartition("@")[0], *reads))
    if kind in _ARRIVALS:
        arrived = [*getattr(entry, "revisions", ()), *filter(None, [getattr(entry, "revision", None)])]
        return f"rev {'+'.join(each.id for each in arrived)}" if arrived else kind.lower()
    if isinstance(entry, ev.Answered):
        return f"{entry.answer} {entry.intent.node}/{entry.intent.slot}"
    if isinstance(entry, ev.Effected):
        return f"[{entry.state} {entry.intent.node}/{entry.intent.slot}]"
    who = next((getattr(entry, name) for name in ("attempt", "node", "revision") if hasattr(entry, name)), "")
    return f"[{kind.lower()} {who}]"


def _place(artifact: str, path: Iterable[str | int], marker: str) -> str:
    return ".".join(map(str, (artifact, *path))) + ("" if marker == "value" else f" #{marker}")
