"""A disk that loses power: what no sync has brought to it is gone.

A VFS of SQLite (through apsw) that remembers each file as it was at its last ``xSync``. :meth:`Disk.cut` writes these images
into a folder: what a disk that tells the truth must still have. It may have more, as the system writes when it likes: files
can be kept whole, one by one. A file of which a part was written, and torn sectors, are not modelled.
"""

from __future__ import annotations

import itertools
import sqlite3
import threading
import time
from contextlib import contextmanager
from pathlib import Path

import apsw
import sqlalchemy as sql

_NAMES = itertools.count()


class Disk(apsw.VFS):
    def __init__(self):
        self.name = f"power-loss-{next(_NAMES)}"
        self.images: dict[str, bytes] = {}
        self.deleted: set[str] = set()
        self.n_syncs = 0
        # The power fails in all files at the same instant, whatever other threads are writing.
        self.lock = threading.RLock()
        super().__init__(self.name, "")

    def xOpen(self, name, flags):
        return _File(self, name, flags)

    def xDelete(self, name, sync_folder):
        with self.lock:
            super().xDelete(name, sync_folder)
            self.deleted.add(name)
            if sync_folder:
                self.sync_folder()

    def sync_folder(self):
        """Make deletions last; until then, what was deleted comes back."""
        for name in self.deleted:
            self.images.pop(name, None)
        self.deleted.clear()

    def xSleep(self, microseconds):
        # The one that is inherited keeps Python's lock while it sleeps, and with it whoever holds the database's.
        time.sleep(microseconds / 1e6)
        return microseconds

    def connect(self, path):
        """Open a database on this disk; to be handed to a journal."""
        return apsw.Connection(path, vfs=self.name)

    def engine(self, url):
        """Return an engine of SQLAlchemy for a database on this disk; to be handed to a target."""
        return sql.create_engine(url, module=_Driver(self))

    def cut(self, folder: Path, onto: Path, kept=()) -> Path:
        """Write what the disk still holds of a folder into another one; files in ``kept`` as they were just then."""
        onto.mkdir(parents=True)
        with self.lock:
            for name, image in self.images.items():
                path = Path(name)
                if path.parent == folder:
                    (onto / path.name).write_bytes(path.read_bytes() if path.name in kept and path.exists() else image)
        return onto


class _File(apsw.VFSFile):
    def __init__(self, disk, name, flags):
        self.disk = disk
        self.path = name.filename() if isinstance(name, apsw.URIFilename) else name
        super().__init__("", name, flags)
        # SQLite's own VFS syncs the folder with the first sync of a log.
        self.is_new_log = bool(flags[0] & (apsw.SQLITE_OPEN_WAL | apsw.SQLITE_OPEN_MAIN_JOURNAL))

    def xWrite(self, data, offset):
        with self.disk.lock:
            super().xWrite(data, offset)

    def xSync(self, flags):
        with self.disk.lock:
            super().xSync(flags)
            self.disk.n_syncs += 1
            if self.is_new_log:
                self.is_new_log = False
                self.disk.sync_folder()
            if self.path:
                self.disk.images[self.path] = Path(self.path).read_bytes()


class _Driver:
    """As much of the database interface of Python as SQLAlchemy's dialect for SQLite asks for, over apsw."""

    def __init__(self, disk):
        self.disk = disk

    def __getattr__(self, name):
        return getattr(sqlite3, name)  # paramstyle, and the errors that are raised here

    def connect(self, path, **_):
        return _Connection(self.disk.connect(path))


class _Connection:
    def __init__(self, database):
        self.database = database
        self.close = database.close
        self.isolation_level = None
        database.set_busy_timeout(5_000)

    in_transaction = property(lambda self: self.database.in_transaction)

    def cursor(self):
        return _Cursor(self.database)

    def create_function(self, name, n_arguments, function, **_):
        self.database.create_scalar_function(name, function, n_arguments)

    def commit(self):
        self._end("COMMIT")

    def rollback(self):
        self._end("ROLLBACK")

    def _end(self, statement):
        if self.in_transaction:
            with _translated():
                self.database.execute(statement)


class _Cursor:
    arraysize, rowcount, lastrowid, description = 1, -1, None, None

    def __init__(self, database):
        self._cursor = database.cursor()
        # Asked for before the first row, as there may be none.
        self._cursor.exec_trace = self._note

    def _note(self, cursor, statement, parameters):
        self.description = cursor.description or None
        return True

    def execute(self, statement, parameters=()):
        with _translated():
            self._rows = iter(self._cursor.execute(statement, tuple(parameters)).fetchall())
        return self

    def fetchone(self):
        return next(self._rows, None)

    def fetchmany(self, size=1):
        return list(itertools.islice(self._rows, size))

    def fetchall(self):
        return list(self._rows)

    def close(self):
        self._cursor.close()


@contextmanager
def _translated():
    try:
        yield
    except apsw.ConstraintError as error:
        raise sqlite3.IntegrityError(str(error)) from error
    except apsw.Error as error:
        raise sqlite3.OperationalError(str(error)) from error
