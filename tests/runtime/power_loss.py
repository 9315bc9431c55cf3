"""A disk that loses power: what no sync has brought to it is gone.

A VFS of SQLite (through apsw) that remembers each file as it was at its last ``xSync``. :meth:`Disk.cut` writes these images
into a folder: what a disk that tells the truth must still have. It may have more, as the system writes when it likes: files
can be kept whole, one by one. A file of which a part was written, and torn sectors, are not modelled.
"""

from __future__ import annotations

import itertools
from pathlib import Path

import apsw

_NAMES = itertools.count()


class Disk(apsw.VFS):
    def __init__(self):
        self.name = f"power-loss-{next(_NAMES)}"
        self.images: dict[str, bytes] = {}
        self.deleted: set[str] = set()
        self.n_syncs = 0
        super().__init__(self.name, "")

    def xOpen(self, name, flags):
        return _File(self, name, flags)

    def xDelete(self, name, sync_folder):
        super().xDelete(name, sync_folder)
        self.deleted.add(name)
        if sync_folder:
            self.sync_folder()

    def sync_folder(self):
        """Make deletions last; until then, what was deleted comes back."""
        for name in self.deleted:
            self.images.pop(name, None)
        self.deleted.clear()

    def connect(self, path):
        """Open a database on this disk; to be handed to a journal."""
        return apsw.Connection(path, vfs=self.name)

    def cut(self, folder: Path, onto: Path, kept=()) -> Path:
        """Write what the disk still holds of a folder into another one; files in ``kept`` as they were just then."""
        onto.mkdir(parents=True)
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

    def xSync(self, flags):
        super().xSync(flags)
        self.disk.n_syncs += 1
        if self.is_new_log:
            self.is_new_log = False
            self.disk.sync_folder()
        if self.path:
            self.disk.images[self.path] = Path(self.path).read_bytes()
