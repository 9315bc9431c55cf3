"""The file under a journal: one SQLite database with one writer, a chain of checksums, and nothing known of entries."""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import os
import sqlite3
import stat
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from hashlib import blake2b
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from revise_lab.errors import ReviseLabError

SCHEMA_VERSION = 2
"""Layout of the file: 1 had a table ``journal(seq, entry)`` without checksums; it is brought up to date on opening."""

Row: TypeAlias = tuple[int, str, str]
"""Sequence number, kind and body."""

_LEVELS = {"NORMAL": 1, "FULL": 2}
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_SEED = b"revise_lab journal"
_ROW = "(seq INTEGER PRIMARY KEY, kind TEXT NOT NULL, body TEXT NOT NULL, checksum BLOB NOT NULL)"
_TABLES = (
    f"CREATE TABLE entries {_ROW}",
    "CREATE TABLE dropped (seq INTEGER, kind, body, checksum)",
    "CREATE TABLE properties (name TEXT PRIMARY KEY, value INTEGER NOT NULL)",
)
_EXPECTED = {0: set(), 1: {"journal"}, SCHEMA_VERSION: {"entries", "dropped", "properties"}}

_log = logging.getLogger(__name__)


class JournalError(ReviseLabError):
    """A journal cannot be opened, trusted or written; what it held before is still there."""


class JournalLocked(JournalError):
    """Another writer has the journal open."""


class Dropped(NamedTuple):
    """A row at the end of the file that could not be trusted; it is kept aside in the table ``dropped``."""

    seq: int
    kind: str


class JournalFile:
    """A journal's database, locked, brought to the present layout and verified.

    Parameters
    ----------
    path : Path
        The file; made with mode 0600 if it is not there.
    connect : callable
        Opens the database in autocommit mode.

    Raises
    ------
    JournalError
        It is not a journal, is damaged before its end, was written by a newer version, or is open elsewhere.
    """

    def __init__(self, path: Path, connect: Callable[[str], Any]) -> None:
        self.path = path
        #: Rows that were found torn at the end and left out, oldest first.
        self.dropped: tuple[Dropped, ...] = ()
        #: Sequence number that the next row gets.
        self.length = 0
        #: Held by whoever uses the connection, which knows one transaction at a time.
        self.guard = threading.RLock()
        self._last = _SEED
        self._database: Any = None
        self._lock: int | None = None
        try:
            self._claim()
            with self.phrased("open"):
                self._database = connect(str(path))
                self._prepare()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Close the database and let go of the lock; a second call does nothing."""
        with self.guard:
            database, self._database = self._database, None
            lock, self._lock = self._lock, None
            if database is not None:
                database.close()
            if lock is not None:
                os.close(lock)

    @property
    def size_bytes(self) -> int:
        """Bytes on the disk, with what is not yet moved out of the write-ahead log."""
        return sum(file.stat().st_size for file in (self.path, self._beside("-wal")) if file.exists())

    # --- rows ---

    def query(self, sql: str, parameters: Iterable[Any] = ()) -> list[Any]:
        """Run a statement and return all its rows."""
        if self._database is None:
            raise JournalError(f"{self.path} is closed - open it again")
        return list(self._database.execute(sql, tuple(parameters)).fetchall())

    def extend(self, rows: list[Row], properties: dict[str, int], *, durable: bool) -> None:
        """Add rows to the end of the chain, and set properties, in one transaction."""
        with self._transaction(durable=durable):
            last = self._insert("entries", rows, self._last)
            self._set(properties)
        self._last, self.length = last, rows[-1][0] + 1

    def sync(self) -> None:
        """Bring what was committed with less to the disk."""
        with self._transaction(durable=True):
            self._set({"secured_to": self.length})

    def keep(self, where: str, properties: dict[str, int]) -> None:
        """Chain the rows that meet a condition anew, remove the others and give their space back."""
        with self._transaction(durable=True):
            self._database.execute(f"CREATE TABLE rewritten {_ROW}")
            kept = self._database.execute(f"SELECT seq, kind, body FROM entries WHERE {where} ORDER BY seq")
            last = self._insert("rewritten", kept, _SEED)
            self._database.execute("DROP TABLE entries")
            self._database.execute("ALTER TABLE rewritten RENAME TO entries")
            self._set(properties)
        self._last = last
        self.query("VACUUM")
        self.query("PRAGMA wal_checkpoint(TRUNCATE)")

    def number(self, name: str) -> int:
        """Return a property, 0 if it was never set."""
        rows = self.query("SELECT value FROM properties WHERE name = ?", (name,))
        return int(rows[0][0]) if rows else 0

    def _set(self, properties: dict[str, int]) -> None:
        self._database.executemany("INSERT OR REPLACE INTO properties VALUES (?, ?)", list(properties.items()))

    def _insert(self, table: str, rows: Iterable[Row], last: bytes) -> bytes:
        """Insert rows as a chain that continues ``last``; return its new end."""

        def chain() -> Iterator[tuple[int, str, str, bytes]]:
            nonlocal last
            for seq, kind, body in rows:
                last = _checksum(last, seq, kind.encode(), body.encode())
                yield seq, kind, body, last

        self._database.executemany(f"INSERT INTO {table} VALUES (?, ?, ?, ?)", chain())
        return last

    @contextmanager
    def _transaction(self, *, durable: bool) -> Iterator[None]:
        # The level cannot change within a transaction, so it is set around it.
        if durable:
            self._synchronous("FULL")
        try:
            self.query("BEGIN IMMEDIATE")
            try:
                yield
                self._database.execute("COMMIT")
            except BaseException:
                with suppress(Exception):
                    self._database.execute("ROLLBACK")
                raise
        finally:
            if durable:
                self._synchronous("NORMAL")

    def _synchronous(self, level: str) -> None:
        self.query(f"PRAGMA synchronous={level}")
        ((found,),) = self.query("PRAGMA synchronous")
        if found != _LEVELS[level]:
            raise JournalError(f"{self.path}: SQLite is at synchronous={found}, not {level} - nothing is durable here")

    # --- opening ---

    def _beside(self, suffix: str) -> Path:
        return self.path.with_name(self.path.name + suffix)

    def _claim(self) -> None:
        """Lock the file, and make it if need be."""
        for file in map(self._beside, ("", ".lock", "-wal", "-shm")):
            with suppress(FileNotFoundError):
                if not stat.S_ISREG(file.lstat().st_mode):
                    raise JournalError(
                        f"{file} is a link, a folder or a device - a journal needs plain files of its own"
                    )
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            self._lock = os.open(self._beside(".lock"), flags, 0o600)
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # Only a new file is opened here: closing one that SQLite has open gives up its locks in this process.
            if not self.path.exists():
                os.close(os.open(self.path, flags | os.O_EXCL, 0o600))
                folder = os.open(self.path.parent, os.O_RDONLY)
                os.fsync(folder)
                os.close(folder)
            elif self.path.stat().st_mode & 0o077:
                self.path.chmod(0o600)
        except BlockingIOError:
            raise JournalLocked(
                f"{self.path} is open in another run, or twice in this one - close that, or give this run its own file",
                path=str(self.path),
            ) from None
        except OSError as error:
            raise self._refused("open", error.strerror or str(error), full=error.errno in _FULL) from error

    def _prepare(self) -> None:
        """Bring the file to the present layout, in its modes, and check every row."""
        ((version,),) = self.query("PRAGMA user_version")
        tables = {name for (name,) in self.query("SELECT name FROM sqlite_master WHERE type = 'table'")}
        if version not in _EXPECTED:
            raise JournalError(
                f"{self.path} has layout {version}, and this version of revise_lab knows those up to {SCHEMA_VERSION} - open"
                " it with the version that wrote it, or a newer one; nothing was changed",
                version=version,
            )
        if not _EXPECTED[version] <= tables or (version == 0 and tables):
            raise JournalError(f"{self.path} is a database but no journal of revise_lab - give another path")
        ((mode,),) = self.query("PRAGMA journal_mode=WAL")
        if mode != "wal":
            raise JournalError(f"{self.path}: no write-ahead log here, but {mode!r} - put the journal on a local disk")
        self._synchronous("NORMAL")
        if version < SCHEMA_VERSION:
            self._migrate(version)
        self._verify()

    def _migrate(self, version: int) -> None:
        with self._transaction(durable=True):
            for statement in _TABLES:
                self._database.execute(statement)
            if version == 1:
                self._insert("entries", self._first_layout(), _SEED)
                self._database.execute("DROP TABLE journal")
                _log.info("%s: brought from layout 1 to %d", self.path, SCHEMA_VERSION)
            self._database.execute(f"PRAGMA user_version={SCHEMA_VERSION}")

    def _first_layout(self) -> Iterator[Row]:
        """Read the rows of layout 1, which had nothing but their JSON to be judged by."""
        broken: list[tuple[int, bytes]] = []
        for seq, body in self._database.execute("SELECT seq, CAST(entry AS BLOB) FROM journal ORDER BY seq"):
            try:
                kind, text = str(json.loads(body)[0]), bytes(body).decode()
            except (ValueError, LookupError, TypeError):
                broken.append((seq, body))
                continue
            if broken:
                raise self._damaged(broken[0][0])
            yield seq, kind, text
        if broken:
            self._database.executemany("INSERT INTO dropped VALUES (?, NULL, ?, NULL)", broken)
            self._report([Dropped(seq, "") for seq, _ in broken])

    def _verify(self) -> None:
        """Follow the chain; leave out a torn end, refuse damage that has sound rows behind it."""
        torn: list[Dropped] = []
        at = compacted = self.number("compacted_to")
        computed = said = _SEED
        sql = "SELECT seq, CAST(kind AS BLOB), CAST(body AS BLOB), checksum FROM entries ORDER BY seq"
        for seq, kind, body, stored in self._database.execute(sql):
            if seq >= compacted and seq != at:
                raise self._damaged(at)
            at = max(at, seq + 1)
            # A sound row continues what the row before it should be, or at least what that says it is.
            computed, beside = _checksum(computed, seq, kind, body), _checksum(said, seq, kind, body)
            said = stored if isinstance(stored, bytes) else b""
            if said not in (computed, beside):
                torn.append(Dropped(seq, bytes(kind).decode(errors="replace")))
            elif torn:
                raise self._damaged(torn[0].seq)
            else:
                self._last, self.length = said, seq + 1
        if torn:
            with self._transaction(durable=True):
                self.query("INSERT INTO dropped SELECT * FROM entries WHERE seq >= ?", (torn[0].seq,))
                self.query("DELETE FROM entries WHERE seq >= ?", (torn[0].seq,))
                # The facts that were removed behind it followed from it.
                self._set({"compacted_to": min(compacted, self.length)})
            self._report(torn)
        else:
            self.length = at

    def _report(self, torn: list[Dropped]) -> None:
        self.dropped += tuple(torn)
        kinds = ", ".join(sorted({each.kind or "unreadable" for each in torn}))
        _log.warning(
            "%s: entries %d to %d (%s) are torn and left out; they are kept in its table 'dropped'",
            *(self.path, torn[0].seq, torn[-1].seq, kinds),
        )

    # --- errors ---

    @contextmanager
    def phrased(self, what: str) -> Iterator[None]:
        """Say of a failure of SQLite which file it was, what became of it, and the remedy."""
        try:
            yield
        except sqlite3.Error as error:
            # SQLite has no name of its own for a file that reached the limit of its process.
            name = str(getattr(error, "sqlite_errorname", ""))
            raise self._refused(what, str(error), full=name in ("SQLITE_FULL", "SQLITE_IOERR_WRITE")) from error

    def _refused(self, what: str, why: str, *, full: bool) -> JournalError:
        remedy = "free some space" if full else "see that it is a journal, in a folder that exists and can be written"
        return JournalError(
            f"cannot {what} {self.path}: {why} - what was committed before is kept; {remedy} and try again",
            path=str(self.path),
        )

    def _damaged(self, seq: int) -> JournalError:
        return JournalError(
            f"{self.path}: entry {seq} (rowid {seq} of its table) is lost or changed, and sound entries follow it - this"
            " is no torn end but damage; restore the file from a copy, nothing was changed",
            seq=seq,
        )


def _checksum(last: bytes, seq: int, kind: bytes, body: bytes) -> bytes:
    # The lengths keep the parts apart: the same bytes, cut elsewhere, are another row.
    return blake2b(b"%d %d %d " % (seq, len(kind), len(body)) + kind + body, digest_size=16, key=last[:64]).digest()
