"""The reader index: who read what, found from a delta without looking at anybody else.

Every selector is interned once as a :class:`Cell` that carries the version of its last change and its readers. A delta
stamps the cells above its places (one a level) and the interned cells below them, so its cost is the depth of the path
plus the readers that it hits, and a certificate is checked by comparing numbers, whatever the count of revisions.
Changed places that nobody had read yet are stamped too, so that a late read learns when its place last changed.
Reads look cells up by selector; only a first read and a delta walk the tree of places.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, NamedTuple

from revise_lab.records.selector import Delta, How, Marker, Path, Selector, evaluate
from revise_lab.records.value import ABSENT, Value, make

# bound once: looking a member up on its class costs 0.07 us in Python 3.11, more than the decisions made with it
_VALUE, _MEMBERS, _KIND, _HAS = Marker
_RETYPED, _LEAF = How.KIND, How.LEAF


class Cell:
    """One selector: the version of its last change, and its readers with the index of the read in their read sets.

    ``now`` is what the selector shows since ``known``; it is current while ``known`` is ``version``.
    """

    __slots__ = ("known", "marker", "now", "readers", "version")

    def __init__(self, marker: Marker, version: int) -> None:
        self.marker = marker
        self.version = version
        self.readers: dict[Any, int] = {}
        self.now: Value = None
        self.known = -1

    def look(self, selector: Selector, values: Mapping[str, Value]) -> Value:
        """Return what the selector shows now, evaluated once a change."""
        if self.known != self.version:
            self.now, self.known = evaluate(selector, values.get(selector.artifact, ABSENT)), self.version
        return self.now


class Hit(NamedTuple):
    """A cell that a delta met, and the changed place."""

    cell: Cell
    place: Path


class _Place(Cell):
    """A place that was read or changed; it is itself the cell of the first selector that reads its value.

    ``version`` is that of the last change at, above or below, ``changed`` leaves out those below, ``resized`` adds to
    them those of the member set, ``existence`` leaves out those that left something there.
    """

    __slots__ = ("cells", "changed", "children", "existence", "resized")

    def __init__(self, version: int) -> None:
        self.version = self.changed = self.existence = self.resized = version
        self.marker, self.now, self.known = _VALUE, None, -1
        self.readers = _NOBODY
        self.cells: tuple[Cell, ...] = ()
        self.children: dict[str | int, _Place] | None = None

    def child(self, key: str | int) -> _Place:
        if self.children is None:
            self.children = {}
        below = self.children.get(key)
        if below is None:
            below = self.children[key] = _Place(self.changed)
        return below

    def stamp(self, version: int, place: Path, hits: list[Hit]) -> None:
        """Take note of a change at or above."""
        self.changed = self.existence = self.resized = version
        _stamp(self, version, place, hits)
        for cell in self.cells:
            _stamp(cell, version, place, hits)


_NOBODY: Final[dict[Any, int]] = {}
"""The readers of a place whose value nobody has read; never written."""


class ReaderIndex:
    """Readers by artifact and path (arXiv:2609.00643 section 3, 'index').

    Attributes
    ----------
    cells : dict of Selector to Cell
        What has been interned; on a miss, :meth:`intern` adds the selector.
    """

    def __init__(self) -> None:
        self.cells: dict[Selector, Cell] = {}
        self._roots: dict[str, _Place] = {}

    @property
    def n_cells(self) -> int:
        """How many selectors are interned."""
        return len(self.cells)

    def cell(self, selector: Selector) -> Cell:
        """Return the cell of a selector, interning it if need be."""
        return self.cells.get(selector) or self.intern(selector)

    def intern(self, selector: Selector) -> Cell:
        """Add the cell of a selector that is read for the first time, at its true last version."""
        artifact, path, marker, _ = selector
        at = self._roots.get(artifact)
        if at is None:
            at = self._roots[artifact] = _Place(0)
        for key in path:
            children = at.children
            if children is None:
                children = at.children = {}
            below = children.get(key)
            if below is None:
                below = children[key] = _Place(at.changed)
            at = below
        cell: Cell = at
        if marker is _VALUE and at.readers is _NOBODY:
            at.readers = {}
        else:
            version = at.changed
            if marker is not _KIND:
                version = at.version if marker is _VALUE else at.resized if marker is _MEMBERS else at.existence
            cell = Cell(marker, version)
            at.cells += (cell,)
        self.cells[selector] = cell
        return cell

    def touch(self, delta: Delta) -> list[Hit]:
        """Stamp what a delta meets (rule R14) and return the cells that have readers, each once."""
        version = delta.version
        root = self._roots.get(delta.artifact)
        if root is None:
            root = self._roots[delta.artifact] = _Place(0)
        hits: list[Hit] = []
        for place, how in delta.changed:
            at = root
            for key in place:
                _stamp(at, version, place, hits)
                for cell in at.cells:
                    if cell.marker is _VALUE:
                        _stamp(cell, version, place, hits)
                at = at.child(key)
            if how is _LEAF or how is _RETYPED:  # something is there, as before
                at.changed = at.resized = version
                _stamp(at, version, place, hits)
                for cell in at.cells:
                    if cell.marker is not _HAS:
                        _stamp(cell, version, place, hits)
            else:
                at.stamp(version, place, hits)
            below = list(at.children.values()) if at.children else []
            while below:
                at = below.pop()
                at.stamp(version, place, hits)
                if at.children:
                    below.extend(at.children.values())
        for place in delta.members:
            at = root
            for key in place:
                at = at.child(key)
            at.resized = version
            for cell in at.cells:
                if cell.marker is _MEMBERS:
                    _stamp(cell, version, place, hits)
        return hits


def _stamp(cell: Cell, version: int, place: Path, hits: list[Hit]) -> None:
    if cell.version != version:
        cell.version = version
        if cell.readers:
            hits.append(make(Hit, (cell, place)))
