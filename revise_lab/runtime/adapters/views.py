"""What a node of the user's graph gets in place of its state: views that record, over the framework's own values.

Plain dicts and lists are given as the recording views of :mod:`revise_lab.core.containers`, in the order in which the
application wrote their keys. Instances of pydantic models and dataclasses become instances of a subclass whose attributes
record; their storage holds sentinels, so that code in C that looks into it fails instead of reading unseen. Anything
else - messages, lists of objects, values that a reducer has put together - is read whole and given as a copy of the
attempt's own.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from typing import Any, NamedTuple, NoReturn

from revise_lab.core.containers import ArrView, ObjView, Recording, deliver
from revise_lab.core.recorder import Recorder
from revise_lab.core.tracking import _Top
from revise_lab.core.unread import UNREAD
from revise_lab.errors import ReadOnlyState
from revise_lab.records.selector import Marker, Path, Role
from revise_lab.records.value import ABSENT, Value, equal, kind_of, step, walk

from .images import LEAVES, fields_of, image, is_plain

_HANDLE = "~revise"


class Origin(NamedTuple):
    """Where the value of a state key comes from."""

    places: tuple[tuple[str, Path], ...]
    """(artifact, place in it) of every contribution; none when no input and no task has written the key."""
    exact: bool
    """The value is what lies at the one place, not what a reducer has made of several."""


class Sight:
    """What one attempt sees, and what it has seen.

    Parameters
    ----------
    recorder : Recorder
        The attempt's read set.
    values : mapping of str to Value
        Every artifact when the attempt started.
    """

    def __init__(self, recorder: Recorder, values: Mapping[str, Value]) -> None:
        self.recorder = recorder
        self.values = values
        self.keys: set[str] = set()
        """State keys that were asked for."""
        self._lent: list[tuple[str, Any, Value]] = []

    def mutated(self) -> list[str]:
        """Return the places whose copies the node has changed in place."""
        return [place for place, lent, was in self._lent if not equal(image(lent), was)]

    def lend(self, place: str, raw: Any) -> Any:
        """Return a copy for this attempt alone, whose changes are noticed and reach nobody."""
        if raw is None or isinstance(raw, (str, int, float)):
            return raw
        lent = copy.deepcopy(raw)
        self._lent.append((place, lent, image(lent)))
        return lent

    def whole(self, key: str, origin: Origin, role: Role | None = None) -> None:
        """Record that everything behind a state key was read."""
        self.keys.add(key)
        for artifact, path in origin.places:
            value = walk(self.values.get(artifact, ABSENT), path)
            self.recorder.record(artifact, path, Marker.VALUE, value, role)

    def show(self, key: str, origin: Origin, raw: Any) -> Any:
        """Return what a node gets for a state key."""
        self.keys.add(key)
        if len(origin.places) == 1 and origin.exact:
            artifact, path = origin.places[0]
            return self.present(artifact, path, walk(self.values.get(artifact, ABSENT), path), raw)
        self.whole(key, origin)
        return self.lend(key, raw)

    def present(self, artifact: str, path: Path, value: Value, raw: Any) -> Any:
        """Return what a node gets at a place of an artifact, where the framework has ``raw``."""
        if value is not ABSENT and fields_of(raw) is not None:
            self.recorder.record(artifact, path, Marker.KIND, kind_of(value))
            return _object_view(self, artifact, path, value, raw)
        if value is not ABSENT and is_plain(raw, value):
            return _ordered(deliver(self.recorder, artifact, path, value), raw)
        if value is ABSENT:
            self.recorder.record(artifact, path, Marker.HAS, observed=False)
        else:
            self.recorder.record(artifact, path, Marker.VALUE, value)
        return self.lend(".".join(map(str, (artifact, *path))), raw)


# --- dicts and lists ---------------------------------------------------------------------------------------------------


class _OrderedObj(ObjView):
    """An object whose keys come in the order in which the application wrote them."""

    __slots__ = ("_raw",)
    _raw: dict[str, Any]

    def _reach(self, key: str) -> Any:
        kid = super()._reach(key)
        return _ordered(kid, self._raw[key]) if isinstance(kid, ObjView | ArrView) else kid

    def _names(self) -> tuple[str, ...]:
        super()._names()
        return tuple(self._raw)

    def _copy(self) -> Any:
        self._whole()
        return copy.deepcopy(self._raw)


class _OrderedArr(ArrView):
    """A list whose objects are ordered views."""

    __slots__ = ("_raw",)
    _raw: list[Any]

    def _at(self, index: int) -> Any:
        kid = super()._at(index)
        if type(kid) is ObjView or type(kid) is ArrView:
            kid = _ordered(kid, self._raw[index])
            for kids in self._kids:
                if index in kids:
                    kids[index] = kid
        return kid

    def _copy(self) -> Any:
        self._whole()
        return copy.deepcopy(self._raw)


def _ordered(view: Any, raw: Any) -> Any:
    if type(view) is ObjView:
        new: Any = dict.__new__(_OrderedObj)
        dict.update(new, dict.items(view))
    elif type(view) is ArrView:
        new = list.__new__(_OrderedArr)
        list.extend(new, [UNREAD] * list.__len__(view))
    else:
        return view
    new._recorder, new._artifact, new._path = view._recorder, view._artifact, view._path
    new._value, new._epoch, new._kids, new._raw = view._value, view._epoch, view._kids, raw
    return new


class TaskState(_Top):
    """The state of a task, by key: for applications whose state is a dict."""

    __slots__ = ("_origins", "_raw", "_sight")

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Return a view when given what it needs, plain data otherwise."""
        return dict.__new__(cls) if args and isinstance(args[0], Sight) else dict(*args, **kwargs)

    def __init__(self, sight: Sight, origins: Mapping[str, Origin], raw: Mapping[str, Any]) -> None:
        super().__init__(sight.recorder)
        self._sight, self._origins, self._raw = sight, origins, raw

    def _place(self) -> str:
        return "the state"

    def _reach(self, key: str) -> Any:
        if key not in self._raw:
            self._sight.keys.add(key)
            return ABSENT
        return self._sight.show(key, self._origins.get(key, NOWHERE), self._raw[key])

    def _has(self, key: str) -> bool:
        self._sight.keys.add(key)
        origin = self._origins.get(key, NOWHERE)
        if key in self._raw and len(origin.places) == 1:
            artifact, path = origin.places[0]
            there = walk(self._sight.values.get(artifact, ABSENT), path) is not ABSENT
            self._recorder.record(artifact, path, Marker.HAS, there)
        return key in self._raw

    def _names(self) -> tuple[str, ...]:
        self._sight.keys.update((*self._origins, *self._raw))
        return tuple(self._raw)

    def _whole(self, role: Role | None = None) -> Value:
        for key in self._names():
            self._sight.whole(key, self._origins.get(key, NOWHERE), role)
        return image(dict(self._raw))

    def _copy(self) -> Any:
        self._whole()
        return copy.deepcopy(dict(self._raw))


NOWHERE = Origin((), exact=False)


# --- models and dataclasses --------------------------------------------------------------------------------------------


class _Handle(NamedTuple):
    """What a view of an object needs; it lies in the view's own ``__dict__``."""

    kind: type
    names: tuple[str, ...]
    reach: Callable[[str], Any]
    copy: Callable[[], Any]
    """Records a read of the whole and returns a copy."""
    kids: dict[str, Any]


def _handle(view: Any) -> _Handle:
    found: _Handle = object.__getattribute__(view, "__dict__")[_HANDLE]
    return found


def _get(self: Any, name: str) -> Any:
    handle = _handle(self)
    if name in handle.names:
        if name not in handle.kids:
            handle.kids[name] = handle.reach(name)
        return handle.kids[name]
    if name == "__class__":
        return handle.kind
    if name == "__dict__":
        return handle.copy().__dict__
    owner = next((each for each in handle.kind.__mro__ if name in vars(each)), None)
    if owner is not None and owner is not object and not owner.__module__.startswith("pydantic"):
        return object.__getattribute__(self, name)  # a property or method of the application: it reads through the view
    return getattr(handle.copy(), name)


def _refuse(self: Any, *args: object) -> NoReturn:
    raise ReadOnlyState(
        f"a {_handle(self).kind.__name__} of the state is read-only in a node - the write changed nothing - return a new"
        " value, or write to a copy"
    )


def _by_copy(name: str) -> Callable[..., Any]:
    def ask(self: Any, *args: Any) -> Any:
        return getattr(_handle(self).copy(), name)(*args)

    return ask


@lru_cache(maxsize=256)
def _view_class(kind: type) -> type:
    special = ("__repr__", "__str__", "__eq__", "__ne__", "__hash__", "__iter__", "__reduce_ex__", "__format__")
    body: dict[str, Any] = {name: _by_copy(name) for name in special if getattr(kind, name, None) is not None}
    body |= {"__getattribute__": _get, "__setattr__": _refuse, "__delattr__": _refuse}
    body |= {"__copy__": lambda self: _handle(self).copy(), "__deepcopy__": lambda self, memo: _handle(self).copy()}
    body["__revise_value__"] = lambda self: image(_handle(self).copy())
    made = (
        type.__new__(type(kind), kind.__name__, (kind,), {"__module__": kind.__module__, "__slots__": ("__dict__",)})
        if not hasattr(kind, "__dictoffset__") or kind.__dictoffset__ == 0
        else type.__new__(type(kind), kind.__name__, (kind,), {"__module__": kind.__module__})
    )
    for name, value in body.items():
        type.__setattr__(made, name, value)
    return made


def _view(raw: Any, names: tuple[str, ...], reach: Callable[[str], Any], whole: Callable[[], object]) -> Any:
    def copied() -> Any:
        whole()
        return copy.deepcopy(raw)

    of: Any = type(raw)
    kind: Any = _view_class(of)
    view: Any = object.__new__(kind)
    storage = object.__getattribute__(view, "__dict__")
    storage.update(dict.fromkeys(names, UNREAD))
    storage[_HANDLE] = _Handle(type(raw), names, reach, copied, {})
    return view


def _object_view(sight: Sight, artifact: str, path: Path, value: Value, raw: Any) -> Any:
    def reach(name: str) -> Any:
        return sight.present(artifact, (*path, name), step(value, name), getattr(raw, name))

    def whole() -> None:
        sight.recorder.record(artifact, path, Marker.VALUE, value)

    return _view(raw, fields_of(raw) or (), reach, whole)


def state_view(sight: Sight, origins: Mapping[str, Origin], raw: Any) -> Any:
    """Return the view of a task's whole state, whichever form the application gave it."""
    names = fields_of(raw)
    if names is None:
        return TaskState(sight, origins, raw)

    def reach(name: str) -> Any:
        return sight.show(name, origins.get(name, NOWHERE), getattr(raw, name))

    def whole() -> None:
        for name in names:
            sight.whole(name, origins.get(name, NOWHERE))

    return _view(raw, names, reach, whole)


# --- back from the node --------------------------------------------------------------------------------------------------


def is_view(value: Any) -> bool:
    """Say whether a value is one of the views of this module or of the containers."""
    return isinstance(value, Recording) or "__revise_value__" in vars(type(value))


def unwrapped(value: Any) -> Any:
    """Return what a node has returned with every view in it replaced by a copy, which reads it whole."""
    kind = type(value)
    if kind in LEAVES:
        return value
    if is_view(value):
        return copy.copy(value)
    if kind is dict:
        return {key: unwrapped(item) for key, item in value.items()}
    if kind is list or kind is tuple:
        return kind(map(unwrapped, value))
    names = fields_of(value)
    if names is None and hasattr(value, "__slots__") and type(value).__module__ == "langgraph.types":  # Send
        names = tuple(value.__slots__)
    changed = {name: new for name, old, new in _parts(value, names or ()) if new is not old}
    if not changed:
        return value
    fresh = copy.copy(value)
    for name, new in changed.items():
        object.__setattr__(fresh, name, new)
    return fresh


def _parts(value: Any, names: tuple[str, ...]) -> Iterator[tuple[str, Any, Any]]:
    for name in names:
        old = getattr(value, name, None)
        if is_view(old) or _holds_view(old):
            yield name, old, unwrapped(old)


def _holds_view(value: Any) -> bool:
    kind = type(value)
    items = value.values() if kind is dict else value if kind in (list, tuple) else ()
    return any(is_view(item) or _holds_view(item) for item in items)
