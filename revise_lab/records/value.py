"""Values: the JSON-like data that artifacts hold, frozen and with one equality.

A value is frozen once, on entry, into its canonical form, and a consumer gets the same object that is compared. Equality
is therefore never finer or coarser than what a node can observe: keys have one order, ``-0.0`` is ``0.0``, NaN equals
NaN, and ``1``, ``1.0`` and ``True`` differ because a program can tell them apart.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from hashlib import blake2b
from typing import Any, Final, NoReturn, TypeAlias

from revise_lab.errors import ReadOnlyState, ValueNotCanonical

Value: TypeAlias = Any
"""``None``, ``bool``, ``int``, ``float``, ``str``, :class:`Obj` of values or :class:`Arr` of values."""


class Absent:
    """The one value of what is not there: a missing key, or the output of a skipped node."""

    __slots__ = ()

    def __repr__(self) -> str:
        return "ABSENT"

    def __bool__(self) -> bool:
        return False

    def __reduce__(self) -> str:
        return "ABSENT"

    def __deepcopy__(self, memo: object) -> Absent:
        return self


make: Final = tuple.__new__
"""Makes a record from a tuple of all its fields, at a third of the cost of calling its class: for what every event makes."""
ABSENT: Final = Absent()
NAN: Final = float("nan")


def _refuse_write(self: object, *args: object, **kwargs: object) -> NoReturn:
    raise ReadOnlyState("this value is frozen - a node must not change what it reads - return a new value instead")


class Obj(dict[str, Value]):
    """A frozen object: string keys in sorted order."""

    __slots__ = ("_digest",)
    _digest: bytes
    __setitem__ = __delitem__ = _refuse_write
    update = pop = popitem = clear = setdefault = __ior__ = _refuse_write

    def __reduce__(self) -> tuple[Any, ...]:
        return (freeze, (dict(self),))

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(digest(self))


class Arr(tuple[Value, ...]):
    """A frozen list; its order counts."""

    _digest: bytes

    def __reduce__(self) -> tuple[Any, ...]:
        return (freeze, (list(self),))


_DEPTH: Final = 200
"""Levels of a value: everything that walks one must still do so on whatever stack it is called from."""
_INT_BITS: Final = 14_280
"""Python turns no longer integers into text unless told to, and a digest needs the text."""


def freeze(value: object) -> Value:
    """Return the canonical frozen form of a JSON-like value.

    Parameters
    ----------
    value : object
        ``None``, booleans, numbers, strings, mappings with string keys, lists and tuples, nested in any way. A recording
        view is read whole.

    Returns
    -------
    Value
        The same information, immutable; already frozen values are returned as they are.

    Raises
    ------
    ValueNotCanonical
        The value, or something inside it, is not JSON-like; the message names the place.
    """
    if type(value) is Obj or type(value) is Arr:
        return value
    try:
        return _freeze(value, ())
    except RecursionError:
        raise ValueNotCanonical(
            "value contains itself (or is nested too deeply) - state must be a finite tree"
        ) from None


def _freeze(value: object, path: tuple[str | int, ...]) -> Value:
    kind = type(value)
    if isinstance(value, int) and value.bit_length() > _INT_BITS:
        _refuse("an integer of more than 4,300 digits has no text", path)
    if kind in (str, int, bool, Obj, Arr) or value is None or (value is ABSENT and not path):
        return value
    if kind is float:
        return 0.0 if value == 0.0 else NAN if value != value else value
    whole = getattr(kind, "__revise_value__", None)
    if whole is not None:
        return whole(value)
    if len(path) >= _DEPTH:
        raise RecursionError
    if isinstance(value, Mapping):
        items = dict(value)
        for key in items:
            if type(key) is not str:
                _refuse(f"key {key!r} is {type(key).__name__}, not a string", path)
        obj = Obj()
        for key in sorted(items):
            dict.__setitem__(obj, key, _freeze(items[key], (*path, key)))
        return obj
    if isinstance(value, list | tuple):
        return Arr(_freeze(item, (*path, i)) for i, item in enumerate(value))
    for leaf in (bool, int, float, str):
        if isinstance(value, leaf) and kind.__module__.split(".")[0] != "numpy":
            return _freeze(leaf(value), path)
    return _refuse(f"{kind.__module__}.{kind.__qualname__} is not JSON-like", path)


def _refuse(what: str, path: tuple[str | int, ...]) -> NoReturn:
    place = "".join(f"[{key!r}]" for key in path) or "the value itself"
    raise ValueNotCanonical(
        f"{what} (at {place}) - state holds None, booleans, numbers, strings, lists and string-keyed mappings only -"
        " convert it first",
        path=path,
    )


def thaw(value: Value) -> Any:
    """Return a plain, mutable copy of a value (dicts and lists)."""
    if type(value) is Obj:
        return {key: thaw(item) for key, item in value.items()}
    if type(value) is Arr:
        return [thaw(item) for item in value]
    return value


def equal(a: Value, b: Value) -> bool:
    """Say whether two canonical values are the same to every node that reads them."""
    if a is b:
        return True
    kind = type(a)
    if kind is not type(b):
        return False
    if kind is Obj:
        if len(a) != len(b):
            return False
        for (key, x), (other, y) in zip(a.items(), b.items(), strict=True):
            if key != other or not (x is y or equal(x, y)):
                return False
        return True
    if kind is Arr:
        if len(a) != len(b):
            return False
        return all(x is y or equal(x, y) for x, y in zip(a, b, strict=True))
    return bool(a == b) or (kind is float and a != a and b != b)


def kind_of(value: Value) -> str:
    """Return what walking to a value reveals: ``object``, ``array``, ``leaf`` or ``absent``."""
    kind = type(value)
    return "object" if kind is Obj else "array" if kind is Arr else "absent" if value is ABSENT else "leaf"


def canonical_text(value: Value) -> str:
    """Return the canonical JSON text of a value (``ABSENT`` has a text of its own)."""
    if value is ABSENT:
        return "#absent"
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def digest(value: Value) -> bytes:
    """Return a 16-byte digest of a canonical value; containers remember theirs."""
    if isinstance(value, Obj | Arr):
        known = getattr(value, "_digest", None)
        if known is None:
            known = value._digest = blake2b(
                canonical_text(value).encode(errors="surrogatepass"), digest_size=16
            ).digest()
        return known
    return blake2b(canonical_text(value).encode(errors="surrogatepass"), digest_size=16).digest()


def step(value: Value, key: str | int) -> Value:
    """Return what lies under ``key`` of a value, or ``ABSENT``; ``"1"`` is not index 1."""
    if type(value) is Obj:
        return value.get(key, ABSENT) if type(key) is str else ABSENT
    if type(value) is Arr and type(key) is int and 0 <= key < len(value):
        return value[key]
    return ABSENT


def walk(value: Value, path: tuple[str | int, ...]) -> Value:
    """Return what lies at ``path`` of a value, or ``ABSENT``."""
    for key in path:
        value = step(value, key)
    return value


def members(value: Value) -> Iterator[str | int]:
    """Iterate over the keys or indices of a container; nothing for a leaf."""
    if type(value) is Obj:
        yield from value
    elif type(value) is Arr:
        yield from range(len(value))
