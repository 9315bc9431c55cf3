"""The durable journal: what happened in a run, in a file from which the run can be resumed.

Every row carries a checksum over the row before it, so that a row which was changed, lost or moved shows. A record is
promised only once it is on the disk: a transaction that holds one of those (:func:`~.event.is_durable`) is committed with
``synchronous=FULL``, which also secures all that was written before; the others may be lost by a power failure, the
newest first, but never in part.

One process writes. It holds an ``flock`` on ``<path>.lock`` for as long as the journal is open: the system releases it
when a process dies, and SQLite's own exclusive mode would shut out readers as well. The lock file stays behind, because
removing it would let two processes lock two different files of one name. All this needs a POSIX system and a local disk.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, get_args

from revise_lab.errors import ReviseLabError
from revise_lab.records import event as ev
from revise_lab.runtime.journal_file import SCHEMA_VERSION, Dropped, JournalError, JournalFile, JournalLocked, Row

__all__ = ["SCHEMA_VERSION", "Dropped", "Journal", "JournalError", "JournalLocked"]

_FACTS = frozenset(kind.__name__ for kind in get_args(ev.Fact))
_NO_FACT = f"kind NOT IN ({', '.join(map(repr, sorted(_FACTS)))})"
_PAGE_ROWS = 512


class Journal:
    """A durable journal, open for writing; close it, or use it as a context manager.

    Parameters
    ----------
    path : str or Path
        The file; it is made if it is not there, with mode 0600, which SQLite also gives to the ``-wal`` and ``-shm``
        files beside it. Links and folders are refused.
    redact : callable, optional
        Given the decoded JSON of an entry, ``[kind, ...]``, returns what to write in its place, of the same kind. A journal
        in which this changed anything is marked, can be read and audited, and can never be resumed: replay would go on
        from values that no run has seen.
    connect : callable, optional
        Opens the database in place of ``sqlite3.connect``, in autocommit mode; for tests of power loss.

    Raises
    ------
    JournalLocked
        Another writer has it open.
    JournalError
        The file is not a journal, is damaged before its end, or was written by a newer version.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        redact: Callable[[Any], Any] | None = None,
        connect: Callable[[str], Any] | None = None,
    ) -> None:
        self.path = Path(path)
        self._redact = redact
        try:
            self._file = JournalFile(self.path, connect or _connect)
        except (OSError, ValueError) as error:
            raise JournalError(f"{str(self.path)!r} cannot hold a journal ({error}) - name another file") from error

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"Journal({str(self.path)!r}, length={self.length})"

    def close(self) -> None:
        """Close the file and let go of the lock; a second call does nothing."""
        self._file.close()

    @property
    def length(self) -> int:
        """Sequence number that the next entry gets; those of removed facts count."""
        return self._file.length

    @property
    def dropped(self) -> tuple[Dropped, ...]:
        """Rows that were found torn at the end when this journal was opened, and left out; oldest first."""
        return self._file.dropped

    @property
    def redacted(self) -> bool:
        """Whether any value in it was replaced as it was written."""
        with self._file.guard:
            return bool(self._file.number("redacted"))

    @property
    def size_bytes(self) -> int:
        """Bytes on the disk, with what is not yet moved out of the write-ahead log."""
        return self._file.size_bytes

    def append(self, entries: Iterable[ev.Entry], *, at: int | None = None, durable: bool = False) -> int:
        """Add entries in one transaction.

        Parameters
        ----------
        entries : iterable of Entry
            What happened, in order.
        at : int, optional
            Sequence number of the first of them; by default they follow the last. Entries that are already there are
            skipped if they are equal, so that an append can be repeated.
        durable : bool
            Return only when they are on the disk; they are in any case if one of them must be.

        Returns
        -------
        int
            Sequence number that the next entry gets.

        Raises
        ------
        JournalError
            The disk is full or refuses, there would be a gap, or another entry has that number. Nothing was added.
        """
        entries = list(entries)
        durable = durable or any(map(ev.is_durable, entries))
        file = self._file
        with file.guard, file.phrased("append to"):
            first = file.length if at is None else at
            if not 0 <= first <= file.length:
                raise JournalError(
                    f"{self.path}: an append at {first} leaves a gap after {file.length - 1} - append what is between",
                    length=file.length,
                )
            rows, redacted = self._rows(first, entries)
            known = file.length - first
            for row in rows[:known]:
                self._compare(*row)
            if rows[known:]:
                file.extend(rows[known:], {"redacted": 1} if redacted else {}, durable=durable)
            elif durable and rows:
                file.sync()
            return file.length

    def compact(self) -> int:
        """Remove the facts, which replay derives again from the events, and give their space back.

        The rest keeps its sequence numbers and is chained anew, in one transaction on the same file: it is all there or
        as before, for readers too, which another file put in its place could not promise to those who hold the first.

        Returns
        -------
        int
            Bytes freed.
        """
        with self._file.guard, self._file.phrased("compact"):
            before = self.size_bytes
            self._file.keep(_NO_FACT, {"compacted_to": self.length})
            return before - self.size_bytes

    def entries(self, until: int | None = None) -> Iterator[ev.Entry]:
        """Iterate over the entries before sequence number ``until``; what is appended meanwhile is left out."""
        return self._read(self.length if until is None else min(until, self.length), "true")

    def events(self) -> Iterator[ev.Entry]:
        """Iterate over what a run is resumed from: the opening and the events, without the facts.

        Raises
        ------
        JournalError
            Values were redacted, so that a replay would not be of this run.
        """
        if self.redacted:
            raise JournalError(
                f"{self.path} was redacted as it was written and cannot be resumed - read or audit it, and run the"
                " workflow again from its inputs"
            )
        return self._read(self.length, _NO_FACT)

    def _rows(self, first: int, entries: list[ev.Entry]) -> tuple[list[Row], bool]:
        """Return the rows of entries, and whether any of them was redacted."""
        rows, redacted = [], False
        for seq, entry in enumerate(entries, first):
            kind, body = type(entry).__name__, ev.to_json(entry)
            if self._redact is not None:
                shown = self._redact(json.loads(body))
                if not isinstance(shown, list) or shown[:1] != [kind]:
                    raise JournalError(f"redact made something else of entry {seq}, a {kind} - return [{kind!r}, ...]")
                text = json.dumps(shown, separators=(",", ":"), ensure_ascii=False)
                redacted |= text != body
                body = text
            try:
                body.encode()
            except UnicodeEncodeError:
                # Half a surrogate pair has no UTF-8; as an escape it comes back as it was.
                body = json.dumps(json.loads(body), separators=(",", ":"))
            rows.append((seq, kind, body))
        return rows, redacted

    def _compare(self, seq: int, kind: str, body: str) -> None:
        found = self._file.query("SELECT kind, body FROM entries WHERE seq = ?", (seq,))
        compacted = not found and kind in _FACTS and seq < self._file.number("compacted_to")
        if found != [(kind, body)] and not compacted:
            there = found[0][0] if found else "an event that was never appended"
            raise JournalError(
                f"{self.path}: entry {seq} is {there}, not this {kind} or not with this content - the run went on from"
                " something else than this journal; open the one that it wrote",
                seq=seq,
            )

    def _read(self, until: int, where: str) -> Iterator[ev.Entry]:
        # Page by page: a statement left open by a reader who stopped half way would stand in the way of a compaction.
        seq, sql = (
            -1,
            f"SELECT seq, body FROM entries WHERE seq > ? AND seq < ? AND {where} ORDER BY seq LIMIT {_PAGE_ROWS}",
        )
        while True:
            with self._file.guard, self._file.phrased("read"):
                rows = self._file.query(sql, (seq, until))
            if not rows:
                return
            for seq, body in rows:
                try:
                    entry = ev.from_json(body)
                except (ReviseLabError, TypeError, ValueError) as error:
                    raise JournalError(
                        f"{self.path}: entry {seq} cannot be decoded ({error}) - open it with the version that wrote it",
                        seq=seq,
                    ) from error
                yield entry


def _connect(path: str) -> sqlite3.Connection:
    return sqlite3.connect(path, isolation_level=None, check_same_thread=False)
