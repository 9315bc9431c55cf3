"""What a validator has read before, laid out as plain data, so that it can be asked again at the cost of plain reads.

The recording views cost a few microseconds for each field. Where only leaves have changed that were read before, the same
validator is given a copy of exactly those places. It can see nothing else: whatever else it does with the copy raises, and
then it is asked once more through the views. So its reads are always among the recorded ones.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, NamedTuple, NoReturn

from revise_lab.core.provenance import Cell
from revise_lab.records.selector import Marker, Selector
from revise_lab.records.value import ABSENT, Arr, Obj, Value

_PLAIN: Final = (
    "__getitem__ __new__ __init__ __class__ __getattribute__ __setattr__ __delattr__ __doc__ __hash__ __init_subclass__"
    " __subclasshook__ __class_getitem__ get"
)
_NO_LEAF: Final = (Obj, Arr, type(ABSENT))
_set = dict.__setitem__


class Beyond(BaseException):
    """A validator looked at something that it had not read before; not an ``Exception``, which it might catch."""


class Laid(dict[str, Any]):
    """An object of which only the recorded members are there; anything but asking for one of them is noted and raises."""

    __slots__ = ("noted",)
    __hash__ = None
    noted: list[str]
    """Shared by all that was laid out together; not empty once something else was asked for."""

    def _beyond(self, *args: object, **kwargs: object) -> NoReturn:
        self.noted.append("beyond what was read")
        raise Beyond

    __missing__ = _beyond

    def get(self, key: Any, default: Any = None) -> Any:
        """Return a member that was read before."""
        return self[key]


for _name in dir(dict):
    if _name not in _PLAIN.split():
        setattr(Laid, _name, Laid._beyond)


class Layout(NamedTuple):
    """Laid-out reads."""

    root: Laid
    places: dict[Cell, tuple[Laid, str]]
    """Where each leaf that was read lies."""

    def put(self, cell: Cell, value: Value) -> bool:
        """Change a leaf; False if the place no longer holds one."""
        place = self.places.get(cell)
        if place is None or type(value) in _NO_LEAF:
            return False
        at, key = place
        _set(at, key, value)
        return True


def lay_out(cells: Mapping[Cell, Selector], values: Mapping[str, Value]) -> Layout | None:
    """Lay out what selectors show now; None if they are more than leaves below objects."""
    root = _laid([])
    places: dict[Cell, tuple[Laid, str]] = {}
    for cell, selector in cells.items():
        value = cell.look(selector, values)
        *above, last = (selector.artifact, *map(_text, selector.path))
        leaf = selector.marker is Marker.VALUE and type(value) not in _NO_LEAF
        if None in above or last is None or not (leaf or (selector.marker is Marker.KIND and value == "object")):
            return None
        at = root
        for key in above if leaf else (*above, last):
            if key not in dict.keys(at):
                _set(at, key, _laid(root.noted))
            at = at[str(key)]
        if leaf:
            _set(at, last, value)
            places[cell] = (at, last)
    return Layout(root, places)


def _text(key: str | int) -> str | None:
    return key if isinstance(key, str) else None


def _laid(noted: list[str]) -> Laid:
    made = Laid()
    made.noted = noted
    return made
