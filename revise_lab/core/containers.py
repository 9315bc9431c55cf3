"""Recording views of objects and lists: real dicts and lists that report what is read through them.

Every read goes through four primitives: walk to a member, ask whether it exists, list the members, read the whole. The
rest of the two protocols is written on top of them, and a test compares it with ``dir(dict)`` and ``dir(list)``.

What Python code reads is recorded; ``dict(x)``, ``{**x}``, ``f(**x)``, ``list(x)``, ``items()`` and ``json.dumps(x)`` cannot
be told apart from a loop, so they record what the loop would: the members, each leaf, and the kind of each nested
container, whose view goes on reporting. Code that looks into the C storage behind our back (``dict.get(view, key)``, an
encoder in C) finds the same sentinels whatever the value is (:mod:`revise_lab.core.unread`). It therefore learns nothing,
so nothing it computes can be stale. Touching a sentinel raises ``UntrackableRead``; a bare size or a missing key in the
storage cannot raise, and the bare size of a list of 64 or more shows the next power of two. Out of reach are private
attributes, ``gc`` and frames.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, KeysView
from collections.abc import ItemsView as AbstractItems
from collections.abc import ValuesView as AbstractValues
from typing import Any, ClassVar, NoReturn

from revise_lab.errors import ReadOnlyState
from revise_lab.records.selector import Marker, Path, Role, format_path
from revise_lab.records.value import ABSENT, Arr, Obj, Value, step, thaw, walk

from .recorder import CONTROL, Recorder
from .unread import UNREAD, UNREAD_KEY, UNREADS


class _Items(AbstractItems[str, Any]):
    _mapping: DictView

    def __reversed__(self) -> Iterator[tuple[str, Any]]:
        return ((key, self._mapping[key]) for key in reversed(self._mapping))

    def __repr__(self) -> str:
        return f"dict_items({list(self)!r})"


class _Values(AbstractValues[Any]):
    _mapping: DictView

    def __reversed__(self) -> Iterator[Any]:
        return (self._mapping[key] for key in reversed(self._mapping))

    def __repr__(self) -> str:
        return f"dict_values({list(self)!r})"


def _refuse_write(self: Recording, *args: object, **kwargs: object) -> NoReturn:
    place = self._place()
    raise ReadOnlyState(
        f"{place} is read-only in a node - the write changed nothing - return a new value, or write to"
        " copy.deepcopy(...) of it",
        place=place,
    )


class Recording:
    """What object and list views share: everything that exposes the whole value.

    Calling the class, as ``dataclasses.asdict`` and others do with ``type(x)(...)``, gives plain data.
    """

    __slots__ = ()
    __slotnames__: ClassVar[list[str]]
    __hash__: ClassVar[None]  # type: ignore[assignment]
    _plain: ClassVar[Callable[..., Any]]
    _recorder: Recorder

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Return plain data: views come from :func:`deliver`."""
        return cls._plain(*args, **kwargs)

    __init__ = _refuse_write

    def __init_subclass__(cls) -> None:
        cls.__slotnames__ = []  # object.__getstate__ looks here for state to hand out

    def _place(self) -> str:
        raise NotImplementedError

    def _whole(self, role: Role | None = None) -> Value:
        raise NotImplementedError

    def _copy(self) -> Any:
        return thaw(self._whole())

    def __revise_value__(self) -> Value:
        return self._whole()

    def copy(self) -> Any:
        """Return a plain, mutable copy: a read of the whole value."""
        return self._copy()

    __copy__ = __getstate__ = _copy

    def __deepcopy__(self, memo: object) -> Any:
        return self._copy()

    def __reduce__(self) -> Any:
        return (self._plain, (self._copy(),))

    def __reduce_ex__(self, protocol: object) -> Any:
        return self.__reduce__()

    def __repr__(self) -> str:
        return repr(self._copy())

    def __eq__(self, other: object) -> bool:
        return bool(self._copy() == other) if isinstance(other, dict | list) else NotImplemented

    def __ne__(self, other: object) -> bool:
        return bool(self._copy() != other) if isinstance(other, dict | list) else NotImplemented


class DictView(Recording, dict[str, Any]):
    """The dict protocol over the four primitives."""

    __slots__ = ("_kids", "_recorder")
    __hash__ = None
    _plain = dict
    _kids: tuple[dict[str, Any], dict[str, Any]]
    """Children already read, as data and as control."""

    def _reach(self, key: str) -> Any:
        """Walk to a member and record it; ``ABSENT`` (recorded) when there is none."""
        raise NotImplementedError

    def _has(self, key: str) -> bool:
        raise NotImplementedError

    def _names(self) -> tuple[str, ...]:
        raise NotImplementedError

    def _lost(self, key: object) -> KeyError:
        return KeyError(key)

    def _kid(self, key: object) -> Any:
        kids = self._kids[CONTROL.get() is self._recorder]
        kid = kids.get(key, UNREAD)  # type: ignore[call-overload]
        if kid is not UNREAD:
            return kid
        if type(key) is not str:
            if not isinstance(key, str):
                return ABSENT  # whatever the value is: keys are strings
            key = str.__str__(key)
        kid = self._reach(key)
        return kid if kid is ABSENT else kids.setdefault(key, kid)

    def __getitem__(self, key: str) -> Any:
        kid = self._kid(key)
        if kid is ABSENT:
            raise self._lost(key)
        return kid

    __missing__ = __getitem__  # dict.__getitem__(view, key) ends up here

    def get(self, key: str, default: Any = None) -> Any:
        """Return a member, or the default; absence is a read too."""
        kid = self._kid(key)
        return default if kid is ABSENT else kid

    def __contains__(self, key: object) -> bool:
        hash(key)
        return isinstance(key, str) and self._has(str.__str__(key))

    def __iter__(self) -> Iterator[str]:
        return iter(self._names())

    def __reversed__(self) -> Iterator[str]:
        return reversed(self._names())

    def __len__(self) -> int:
        return len(self._names())

    def keys(self) -> KeysView[str]:  # type: ignore[override]
        """Return the keys: a read of the members."""
        return dict.fromkeys(self._names(), UNREAD).keys()  # .mapping of it shows no value

    def items(self) -> _Items:  # type: ignore[override]
        """Return the items; each is read when it is delivered."""
        return _Items(self)

    def values(self) -> _Values:  # type: ignore[override]
        """Return the values; each is read when it is delivered."""
        return _Values(self)

    def __or__(self, other: Any) -> Any:
        return self._copy() | other if isinstance(other, dict) else NotImplemented

    def __ror__(self, other: Any) -> Any:
        return other | self._copy() if isinstance(other, dict) else NotImplemented

    __setitem__ = __delitem__ = __ior__ = _refuse_write
    update = pop = popitem = clear = setdefault = _refuse_write


# bound once: looking a member up on its class costs 0.07 us in Python 3.11, more than the decisions made with it
_VALUE, _HAS, _MEMBERS, _KIND = Marker.VALUE, Marker.HAS, Marker.MEMBERS, Marker.KIND


class _Inner(Recording):
    """A container at a place inside an artifact."""

    __slots__ = ()
    _artifact: str
    _epoch: int
    _path: Path
    _value: Value

    def _now(self) -> Value:
        return self._value if self._epoch == self._recorder.epoch else _look_again(self)

    def _place(self) -> str:
        return format_path(self._artifact, self._path)

    def _whole(self, role: Role | None = None) -> Value:
        while True:
            value = self._now()
            if self._recorder.record(self._artifact, self._path, _VALUE, value, role):
                return value


class ObjView(_Inner, DictView):
    """An object inside an artifact, as a node sees it."""

    __slots__ = ("_artifact", "_epoch", "_path", "_value")

    def _reach(self, key: str) -> Any:
        child = self._now().get(key, ABSENT)
        return deliver(self._recorder, self._artifact, (*self._path, key), child)

    def _has(self, key: str) -> bool:
        while True:
            there = key in self._now()
            if self._recorder.record(self._artifact, (*self._path, key), _HAS, there):
                return there

    def _names(self) -> tuple[str, ...]:
        while True:
            names = Arr(self._now())
            if self._recorder.record(self._artifact, self._path, _MEMBERS, names):
                return names


class ArrView(_Inner, list[Any]):
    """A list inside an artifact, as a node sees it."""

    __slots__ = ("_artifact", "_epoch", "_kids", "_path", "_recorder", "_value")
    __hash__ = None
    _plain = list
    _kids: tuple[dict[int, Any], dict[int, Any]]

    def _at(self, index: int) -> Any:
        kids = self._kids[CONTROL.get() is self._recorder]
        kid = kids.get(index, UNREAD)
        if kid is not UNREAD:
            return kid
        kid = deliver(self._recorder, self._artifact, (*self._path, index), step(self._now(), index))
        return kid if kid is ABSENT else kids.setdefault(index, kid)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return self._cut(index)
        at = int(operator.index(index))
        if at < 0:
            at += len(self)  # which element -1 is depends on the length
        kid = self._at(at) if at >= 0 else ABSENT
        if kid is ABSENT:
            raise IndexError("list index out of range")
        return kid

    def _cut(self, cut: slice) -> list[Any]:
        start, stop, stride = (None if x is None else int(operator.index(x)) for x in (cut.start, cut.stop, cut.step))
        start, stride = start or 0, 1 if stride is None else stride
        if start < 0 or stop is None or stop < 0 or stride <= 0:
            return [self._at(index) for index in range(*cut.indices(len(self)))]
        found: list[Any] = []
        for index in range(start, stop, stride):
            kid = self._at(index)
            if kid is ABSENT:  # recorded: the slice grows when this element appears
                break
            found.append(kid)
        return found

    def __len__(self) -> int:
        while True:
            length = len(self._now())
            if self._recorder.record(self._artifact, self._path, _MEMBERS, length):
                return length

    def __iter__(self) -> Iterator[Any]:
        return map(self._at, range(len(self)))

    def __reversed__(self) -> Iterator[Any]:
        return map(self._at, reversed(range(len(self))))

    def __contains__(self, item: object) -> bool:
        return item in self._copy()

    def index(self, *args: Any) -> int:
        """Return the place of an element: a read of the whole list."""
        return int(self._copy().index(*args))

    def count(self, item: object) -> int:
        """Count an element: a read of the whole list."""
        return int(self._copy().count(item))

    def __lt__(self, other: Any) -> bool:
        return bool(self._copy() < other) if isinstance(other, list) else NotImplemented

    def __le__(self, other: Any) -> bool:
        return bool(self._copy() <= other) if isinstance(other, list) else NotImplemented

    def __gt__(self, other: Any) -> bool:
        return bool(self._copy() > other) if isinstance(other, list) else NotImplemented

    def __ge__(self, other: Any) -> bool:
        return bool(self._copy() >= other) if isinstance(other, list) else NotImplemented

    def __add__(self, other: Any) -> Any:
        return self._copy() + other if isinstance(other, list) else NotImplemented

    def __radd__(self, other: Any) -> Any:
        # ``other += view`` must change ``other`` in place, and only list itself can: let its C code find the elements in
        # our storage. They stay there, so this is a data read whatever the role.
        if isinstance(other, list):
            list.__init__(self, thaw(self._whole(Role.DATA)))
        return NotImplemented

    def __mul__(self, times: Any) -> Any:
        return self._copy() * times

    __rmul__ = __mul__
    __setitem__ = __delitem__ = __iadd__ = __imul__ = _refuse_write
    append = extend = insert = pop = remove = clear = sort = reverse = _refuse_write


def deliver(recorder: Recorder, artifact: str, path: Path, value: Value) -> Any:
    """Record the walk to a place and return what a node gets there.

    Parameters
    ----------
    recorder : Recorder
        The attempt that reads.
    artifact, path : str, tuple
        The place.
    value : Value
        What the current snapshot holds there.

    Returns
    -------
    Any
        The leaf (its value is read), a view of the container (its kind is read) or ``ABSENT`` (its absence is read).
    """
    while True:
        kind = type(value)
        if kind is Obj:
            recorded = recorder.record(artifact, path, _KIND, "object")
        elif kind is Arr:
            recorded = recorder.record(artifact, path, _KIND, "array")
        elif value is ABSENT:
            recorded = recorder.record(artifact, path, _HAS, False)
        else:
            recorded = recorder.record(artifact, path, _VALUE, value)
        if recorded:
            break
        value = walk(recorder.fetch(artifact), path)
    if kind is not Obj and kind is not Arr:
        return value
    view: Any
    if kind is Obj:
        view = dict.__new__(ObjView)
        dict.__setitem__(view, UNREAD_KEY, UNREAD)
    else:
        view = list.__new__(ArrView)
        list.extend(view, UNREADS if len(value) < len(UNREADS) else (UNREAD,) * (1 << len(value).bit_length()))
    view._recorder, view._artifact, view._path = recorder, artifact, path
    view._value, view._epoch, view._kids = value, recorder.epoch, ({}, {})
    return view


def _look_again(view: Any) -> Value:
    epoch = view._recorder.epoch
    view._value = walk(view._recorder.fetch(view._artifact), view._path)
    view._epoch = epoch
    return view._value
