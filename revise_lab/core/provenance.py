"""The reader index: who read what, found from a delta without looking at anybody else.

Every read place is interned once as a :class:`Cell` that carries the version of its last change and its readers. A delta
stamps the cells above its places (one a level) and the interned cells below them, so its cost is the depth of the path
plus the readers that it hits, and a certificate is checked by comparing numbers, whatever the count of revisions.
Changed places that nobody had read yet are stamped too, so that a late read learns when its place last changed.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from revise_lab.records.selector import Delta, How, Marker, Path, Selector


class Cell:
    """One read place: the version of its last change, and its readers with the index of the read in their read sets."""

    __slots__ = ("readers", "version")

    def __init__(self, version: int) -> None:
        self.version = version
        self.readers: dict[Any, int] = {}


class Hit(NamedTuple):
    """A cell that a delta met, and the changed place."""

    cell: Cell
    place: Path


class _Spot:
    __slots__ = ("below", "cells", "changed", "children", "existence", "resized")

    def __init__(self) -> None:
        self.children: dict[str | int, _Spot] = {}
        self.cells: dict[Marker, Cell] = {}
        self.changed = self.existence = self.resized = self.below = 0


class ReaderIndex:
    """Readers by artifact and path (arXiv:2609.00643 section 3, 'index')."""

    def __init__(self) -> None:
        self._roots: dict[str, _Spot] = {}

    @property
    def n_cells(self) -> int:
        """How many read places are interned."""
        stack, count = list(self._roots.values()), 0
        while stack:
            spot = stack.pop()
            count += len(spot.cells)
            stack.extend(spot.children.values())
        return count

    def cell(self, selector: Selector) -> Cell:
        """Return the cell of a read place, interning it at its true last version."""
        spot = self._roots.get(selector.artifact)
        if spot is None:
            spot = self._roots[selector.artifact] = _Spot()
        version = 0
        for key in selector.path:
            if spot.changed > version:
                version = spot.changed
            below = spot.children.get(key)
            if below is None:
                below = spot.children[key] = _Spot()
            spot = below
        marker = selector.marker
        cell = spot.cells.get(marker)
        if cell is None:
            own = spot.existence if marker is Marker.HAS else spot.changed
            if marker is Marker.VALUE:
                own = max(own, spot.below)
            elif marker is Marker.MEMBERS:
                own = max(own, spot.resized)
            cell = spot.cells[marker] = Cell(max(version, own))
        return cell

    def touch(self, delta: Delta) -> list[Hit]:
        """Stamp what a delta meets (rule R14) and return the cells that have readers, each once."""
        version = delta.version
        root = self._roots.get(delta.artifact)
        if root is None:
            root = self._roots[delta.artifact] = _Spot()
        hits: list[Hit] = []
        for place, how in delta.changed:
            spot = root
            for key in place:
                spot.below = version
                self._stamp(spot.cells.get(Marker.VALUE), version, place, hits)
                below = spot.children.get(key)
                if below is None:
                    below = spot.children[key] = _Spot()
                spot = below
            spot.changed = version
            kept = spot.cells.get(Marker.HAS) if how in (How.KIND, How.LEAF) else None
            if kept is None:
                spot.existence = version
            for cell in spot.cells.values():
                if cell is not kept:
                    self._stamp(cell, version, place, hits)
            stack = list(spot.children.values())
            while stack:
                spot = stack.pop()
                for cell in spot.cells.values():
                    self._stamp(cell, version, place, hits)
                stack.extend(spot.children.values())
        for place in delta.members:
            found = self._find(root, place)
            found.resized = version
            self._stamp(found.cells.get(Marker.MEMBERS), version, place, hits)
        return hits

    def _find(self, spot: _Spot, path: Path) -> _Spot:
        for key in path:
            below = spot.children.get(key)
            if below is None:
                below = spot.children[key] = _Spot()
            spot = below
        return spot

    @staticmethod
    def _stamp(cell: Cell | None, version: int, place: Path, hits: list[Hit]) -> None:
        if cell is not None and cell.version != version:
            cell.version = version
            if cell.readers:
                hits.append(Hit(cell, place))
