"""The sentinels that fill the storage of a view in place of values.

Code that bypasses the view and reads the storage meets them, learns nothing of the value, and fails as soon as it uses
one. A key that is no string stops every encoder at once.
"""

from __future__ import annotations

from typing import Any, Final, NoReturn

from revise_lab.errors import UntrackableRead

_HOSTILE: Final = (
    "eq ne lt le gt ge bool str repr format bytes hash len iter next reversed contains getitem setitem delitem call int"
    " float complex index round trunc floor ceil neg pos abs invert add radd sub rsub mul rmul truediv rtruediv floordiv"
    " rfloordiv mod rmod divmod rdivmod pow rpow and rand or ror xor rxor lshift rlshift rshift rrshift matmul rmatmul"
    " enter exit await aiter anext fspath reduce reduce_ex getstate copy deepcopy dir"
)


def _touched(self: object, *args: object) -> NoReturn:
    raise UntrackableRead(
        "a C-level reader looked into the storage of a recording view, where there is nothing to see - read through the"
        " view in Python, or hand over copy.deepcopy(view), which counts as reading all of it"
    )


class Unread:
    """What the storage of a view holds in place of values: any use of it raises."""

    __slots__ = ()
    __getattr__ = _touched


for _name in _HOSTILE.split():
    setattr(Unread, f"__{_name}__", _touched)


class _UnreadKey(Unread):
    __slots__ = ()
    __hash__ = object.__hash__


UNREAD: Final = Unread()
UNREAD_KEY: Final[Any] = _UnreadKey()
UNREADS: Final = (UNREAD,) * 64
"""Longer than the list it stands for: ``array.array`` takes the length from the storage and the items from the view, so a
shorter one would cut it off in silence. From 64 elements on it is the next power of two."""
