"""The auditor: a fold over a journal that says whether the run kept its promises.

It shares no code with what it judges. From the journal it knows which attempt of each node is committed, what each read
and what it returned; it applies the revisions itself and looks the values up by plain indexing. A finding names the
anomaly and shows a witness: the read, what was seen, what is there now, where in the journal, and the run on one line.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Final, NamedTuple

from revise_lab.records import event as ev
from revise_lab.records.value import ABSENT


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
        values = f" {self.read} = {_text(self.seen)}, now {_text(self.latest)}" if self.read else ""
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

    def __str__(self) -> str:
        return ".".join(map(str, (self.artifact, *self.path))) + ("" if self.marker == "value" else f" #{self.marker}")


@dataclass
class _Attempt:
    id: str
    node: str
    at: int
    """Where its snapshot was taken."""
    parents: tuple[str, ...]
    reads: list[_Read] = field(default_factory=list)
    output: Any = ABSENT
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
        self._fresh: dict[str, bool] = {}
        self._head = 0
        self._owed = ""
        """A stopped attempt whose result has just come in, until the machine says that it is discarded."""
        self._check = ""
        self._state = "open"

    def feed(self, entry: ev.Entry) -> None:
        """Take in the next entry."""
        if self._owed and not isinstance(entry, ev.Discarded):
            self._find(Anomaly.LOST, self._owed)
        self._owed = ""
        self._entries.append(entry)
        handler = _FEED.get(type(entry))
        if handler is not None:
            handler(self, entry)

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
        return _shown(root, read.path, read.marker)

    def _stale(self, attempt: _Attempt) -> Iterator[_Read]:
        return (read for read in attempt.reads if not same(self._value(read), read.seen))

    def _is_fresh(self, node: str) -> bool:
        """Say whether an artifact was made from what is there now, all the way up."""
        known = self._fresh.get(node)
        if known is None:
            self._fresh[node] = True
            attempt = self._current.get(node)
            known = attempt is None or (
                not any(self._stale(attempt)) and all(self._is_fresh(name) for name in _artifacts(attempt))
            )
            self._fresh[node] = known
        return known

    def _find(
        self, anomaly: Anomaly, attempt: str, read: _Read | None = None, at: int | None = None, latest: Any = ABSENT
    ) -> None:
        if read is not None:
            at, latest = read.at, self._value(read) if latest is ABSENT else latest
        places = (self._at,) if at is None or at == self._at else (at, self._at)
        seen = read.seen if read is not None else None
        latest = latest if read is not None else None
        self.findings.append(
            Finding(anomaly, attempt, str(read or ""), seen, latest, places, history_line(self._entries))
        )

    # --- the run ---------------------------------------------------------------------------------------------------

    def _opened(self, entry: ev.Opened) -> None:
        self._check = entry.switches["check"]
        for name, value in entry.inputs.items():
            self._set(name, value)

    def _revise(self, entry: ev.Revise | ev.ReviseTogether) -> None:
        arrived = (entry.revision,) if isinstance(entry, ev.Revise) else entry.revisions
        for revision in arrived:
            self._open_revisions[revision.id] = self._at
            self._revisions.setdefault(revision.id, revision)

    def _answered(self, entry: ev.Refused | ev.Duplicate) -> None:
        self._open_revisions.pop(entry.revision, None)
        if isinstance(entry, ev.Refused):
            self._revisions.pop(entry.revision, None)

    def _accepted(self, entry: ev.Accepted) -> None:
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
        for path, pin in self._pins.get(name, ()):
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

    def _started(self, entry: ev.Started) -> None:
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
        for name in attempt.parents:
            if not self._is_fresh(name):
                self._find(Anomaly.MIXED_VERSIONS, attempt.id, *self._culprit(name))

    def _culprit(self, name: str) -> tuple[_Read] | tuple[()]:
        """Return the stale read that an artifact goes back to."""
        seen: set[str] = set()
        stack = [name]
        while stack:
            attempt = self._current.get(stack.pop())
            if attempt is None or attempt.id in seen:
                continue
            seen.add(attempt.id)
            for read in self._stale(attempt):
                return (read,)
            stack.extend(_artifacts(attempt))
        return ()

    def _moved(self, entry: ev.Moved) -> None:
        attempt = self._attempts[entry.attempt]
        attempt.at = self._at
        for read in self._stale(attempt):
            self._find(Anomaly.MIXED_VERSIONS, attempt.id, read)
        self._existed(attempt)

    def _take(self, attempt: _Attempt, reads: Iterable[Any]) -> None:
        for (artifact, path, marker, role), observed in reads:
            activates = role == "control" and marker == "has" and not attempt.reads
            read = _Read(artifact, path, str(marker), observed, self._at, activates)
            on_snapshot = self._value(read, attempt.at)
            if not same(on_snapshot, observed):
                self._find(Anomaly.CONTRADICTION, attempt.id, read, latest=on_snapshot)
            attempt.reads.append(read)

    def _observe(self, entry: ev.Observe) -> None:
        attempt = self._attempts[entry.attempt]
        if attempt.state == "running":
            self._take(attempt, entry.reads)

    def _finish(self, entry: ev.Finish | ev.Fail) -> None:
        attempt = self._attempts[entry.attempt]
        if attempt.state == "stopped":
            attempt.state, self._owed = "late", attempt.id
            return
        if attempt.state != "running":
            self._find(Anomaly.ENDED_TWICE, attempt.id, at=attempt.at)
        self._take(attempt, entry.reads)
        attempt.state = "finished"
        attempt.output = entry.output if isinstance(entry, ev.Finish) else ABSENT

    def _stop(self, entry: ev.Stop) -> None:
        attempt = self._attempts[entry.attempt]
        if attempt.state not in ("running", "finished"):
            self._find(Anomaly.ENDED_TWICE, attempt.id, at=attempt.at)
        attempt.state = "stopped" if attempt.state == "running" else "ended"
        self._waiting.pop(attempt.id, None)

    def _discarded(self, entry: ev.Discarded | ev.Stopped) -> None:
        attempt = self._attempts[entry.attempt]
        if attempt.state not in ("stopped", "late"):
            self._find(Anomaly.ENDED_TWICE, attempt.id, at=attempt.at)
        attempt.state = "ended"

    def _rejected(self, entry: ev.Rejected) -> None:
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

    def _concluded(self, entry: ev.Committed | ev.Failed) -> None:
        """Check an outcome that counts: it must hold now, and so must everything that it was made from."""
        attempt = self._end(entry.attempt)
        if self._state != "open":
            self._find(Anomaly.COMMIT_AFTER_STOP, attempt.id, at=attempt.at)
        stale = next(self._stale(attempt), None)
        if stale is not None:
            self._find(Anomaly.DEAD_BRANCH if stale.activates else Anomaly.STALE_COMMIT, attempt.id, stale)
        else:
            fresh = {name: self._is_fresh(name) for name in _artifacts(attempt) if name in self._current}
            for name in (name for name, is_fresh in fresh.items() if not is_fresh):
                joined = Anomaly.MIXED_VERSIONS if any(fresh.values()) else Anomaly.STALE_COMMIT
                self._find(joined, attempt.id, *self._culprit(name))
        if isinstance(entry, ev.Committed):
            self._version(entry.version, attempt.id)
            self._raw[attempt.node] = attempt.output
            self._current[attempt.node] = attempt
            self._set(attempt.node, self._pinned(attempt.node))
        elif entry.final:
            self._raw.pop(attempt.node, None)
            self._current[attempt.node] = attempt
            self._set(attempt.node, ABSENT)

    def _retracted(self, entry: ev.Retracted) -> None:
        self._version(entry.version, entry.node)
        self._raw.pop(entry.node, None)
        self._current.pop(entry.node, None)
        self._set(entry.node, ABSENT)

    def _cancelled(self, entry: ev.Cancel) -> None:
        self._state = "cancelled"

    def _closed(self, entry: ev.Closed) -> None:
        self._state = "closed"
        for node, attempt in self._current.items():
            for read in self._stale(attempt):
                self._find(Anomaly.DEAD_BRANCH if read.activates else Anomaly.STALE_READ, attempt.id, read)
            if not any(self._stale(attempt)) and not self._is_fresh(node):
                self._find(Anomaly.STALE_OUTPUT, attempt.id, *self._culprit(node))
        for attempt in self._waiting.values():
            self._find(Anomaly.LOST, attempt.id, at=attempt.at)
        for name, at in self._open_revisions.items():
            self._find(Anomaly.LOST, name, at=at)


_FEED: Final[dict[type, Callable[[Any, Any], None]]] = {
    ev.Opened: Auditor._opened,
    ev.Revise: Auditor._revise,
    ev.ReviseTogether: Auditor._revise,
    ev.Refused: Auditor._answered,
    ev.Duplicate: Auditor._answered,
    ev.Accepted: Auditor._accepted,
    ev.Started: Auditor._started,
    ev.Moved: Auditor._moved,
    ev.Observe: Auditor._observe,
    ev.Finish: Auditor._finish,
    ev.Fail: Auditor._finish,
    ev.Stop: Auditor._stop,
    ev.Stopped: Auditor._discarded,
    ev.Discarded: Auditor._discarded,
    ev.Rejected: Auditor._rejected,
    ev.Committed: Auditor._concluded,
    ev.Failed: Auditor._concluded,
    ev.Retracted: Auditor._retracted,
    ev.Cancel: Auditor._cancelled,
    ev.Closed: Auditor._closed,
}


def _artifacts(attempt: _Attempt) -> set[str]:
    return {read.artifact for read in attempt.reads}


# --- plain values ------------------------------------------------------------------------------------------------------


def _below(value: Any, key: str | int) -> Any:
    if isinstance(value, dict):
        return value.get(key, ABSENT)
    if isinstance(value, tuple) and isinstance(key, int) and 0 <= key < len(value):
        return value[key]
    return ABSENT


def _shown(value: Any, path: Iterable[str | int], marker: str) -> Any:
    """Return what a read of a place shows: its value, whether it exists, its keys or length, or its kind."""
    for key in path:
        value = _below(value, key)
    if marker == "value":
        return value
    if marker == "has":
        return value is not ABSENT
    kind = "object" if isinstance(value, dict) else "array" if isinstance(value, tuple) else "leaf"
    kind = "absent" if value is ABSENT else kind
    if marker == "kind" or kind in ("leaf", "absent"):
        return kind
    return tuple(value) if kind == "object" else len(value)


def same(a: Any, b: Any) -> bool:
    """Say whether two values look the same to any program: types count, NaN equals NaN."""
    if a is b:
        return True
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, tuple) and isinstance(b, tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return type(a) is type(b) and bool(a == b or (a != a and b != b))


def patched(value: Any, op: str, path: Sequence[str | int], new: Any) -> Any:
    """Return a plain value with one change of a revision made.

    Raises
    ------
    KeyError, IndexError, TypeError
        The place does not exist.
    """
    if not path:
        return (*value, new) if op == "append" else new
    key, *rest = path
    if isinstance(value, dict) and isinstance(key, str):
        others = {name: item for name, item in value.items() if name != key}
        if rest or op == "append":
            others[key] = patched(value[key], op, rest, new)
        elif op != "delete":
            others[key] = new
        return {name: others[name] for name in sorted(others)}
    if not isinstance(value, tuple) or not isinstance(key, int):
        raise TypeError(key)
    if not 0 <= key < len(value) + (op == "insert"):
        raise IndexError(key)
    if rest or op == "append":
        return (*value[:key], patched(value[key], op, rest, new), *value[key + 1 :])
    inserted = () if op in ("remove", "delete") else (new,)
    return (*value[:key], *inserted, *value[key if op == "insert" else key + 1 :])


def _text(value: Any) -> str:
    return "nothing" if value is ABSENT else repr(value)


# --- a run on one line ---------------------------------------------------------------------------------------------------


def history_line(entries: Iterable[ev.Entry]) -> str:
    """Return a journal as moves; what the machine decided stands in brackets."""
    return "; ".join(filter(None, map(_move, entries)))


def _move(entry: ev.Entry) -> str:
    match entry:
        case ev.Started():
            return f"start {entry.node}"
        case ev.Observe():
            return f"read {_node(entry.attempt)} {' '.join(map(_named, entry.reads))}"
        case ev.Finish() | ev.Fail():
            return f"finish {_node(entry.attempt)}"
        case ev.Revise():
            return f"rev {entry.revision.id}"
        case ev.ReviseTogether():
            return f"rev {'+'.join(each.id for each in entry.revisions)}"
        case ev.Cancel() | ev.Close():
            return type(entry).__name__.lower()
        case ev.Committed() | ev.Rejected() | ev.Failed() | ev.Moved() | ev.Stop() | ev.Discarded():
            return f"[{type(entry).__name__.lower()} {entry.attempt}]"
        case ev.Retracted():
            return f"[retracted {entry.node}]"
        case ev.Refused() | ev.Duplicate() | ev.Deferred():
            return f"[{type(entry).__name__.lower()} {entry.revision}]"
    return ""


def _named(read: Any) -> str:
    artifact, path, marker, _ = read[0]
    return str(_Read(artifact, path, str(marker), None, 0))


def _node(attempt: str) -> str:
    return attempt.rpartition("@")[0]
