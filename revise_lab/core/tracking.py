"""What a node body gets: the state, as a view that records every read.

Nodes carry no annotations: what they read is found by handing them views (arXiv:2609.00643 section 3; how the views
work is our choice, see :mod:`revise_lab.core.containers`). Names are static, so asking for one that no workflow could
provide records nothing; what depends on the run - whether a parent was skipped, which members were spawned - is read.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from difflib import get_close_matches
from typing import Any, NamedTuple

from revise_lab.errors import UndeclaredRead
from revise_lab.records.attempt import Coverage
from revise_lab.records.selector import Marker, Path, Role, Selector, evaluate
from revise_lab.records.value import ABSENT, Arr, Value, freeze, thaw, walk

from .containers import DictView, deliver
from .recorder import Fetch, Recorder
from .unread import UNREAD, UNREAD_KEY

__all__ = ["Coverage", "Fetch", "Group", "GroupView", "Recorder", "StateView", "thawed"]


class Group(NamedTuple):
    """The spawned members of a template that an attempt can see."""

    spawner: str
    """The node whose output decides who the members are."""
    path: Path
    """Where in that output."""
    keys: tuple[str, ...]
    """The members on the attempt's snapshot, in order."""


class _Top(DictView):
    """A view over several artifacts."""

    __slots__ = ()

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Return a view when given a recorder, plain data otherwise."""
        return dict.__new__(cls) if args and isinstance(args[0], Recorder) else dict(*args, **kwargs)

    def __init__(self, recorder: Recorder) -> None:
        dict.__setitem__(self, UNREAD_KEY, UNREAD)
        self._recorder = recorder
        self._kids = ({}, {})

    def _read_whole(self, artifact: str, role: Role | None) -> Value:
        while True:
            value = self._recorder.fetch(artifact)
            if self._recorder.record(artifact, (), Marker.VALUE, value, role):
                return value


class GroupView(_Top):
    """The outputs of a template's members, by member key.

    Who the members are is a control read of the place that spawned them (rule R6): its key set when the spawner gives
    keys, the whole list when members are told apart by their arguments.
    """

    __slots__ = ("_group", "_template")

    def __init__(self, recorder: Recorder, template: str, group: Group) -> None:
        super().__init__(recorder)
        self._template, self._group = template, group

    def _place(self) -> str:
        return self._template

    def _membership(self, key: str | None = None) -> None:
        spawner, path, _ = self._group
        while True:
            root = self._recorder.fetch(spawner)
            selector = Selector(spawner, path, Marker.MEMBERS)
            if type(walk(root, path)) is Arr:
                selector = Selector(spawner, path, Marker.VALUE)
            elif key is not None:
                selector = Selector(spawner, (*path, key), Marker.HAS)
            if self._recorder.record(*selector[:3], evaluate(selector, root), Role.CONTROL):
                return

    def _member(self, key: str) -> str:
        return f"{self._template}[{key}]"

    def _reach(self, key: str) -> Any:
        if key in self._group.keys:
            member = self._member(key)
            return deliver(self._recorder, member, (), self._recorder.fetch(member))
        self._membership(key)
        return ABSENT

    def _has(self, key: str) -> bool:
        self._membership(key)
        return key in self._group.keys

    def _lost(self, key: object) -> KeyError:
        if key in self._group.keys:
            return _skipped(self._member(str(key)))
        return KeyError(
            f"{self._template!r} has no member {key!r} - {self._group.spawner!r} spawned {self._group.keys}"
        )

    def _names(self) -> tuple[str, ...]:
        self._membership()
        return self._group.keys

    def _whole(self, role: Role | None = None) -> Value:
        found = {key: self._read_whole(self._member(key), role) for key in self._names()}
        return freeze({key: value for key, value in found.items() if value is not ABSENT})


class StateView(_Top):
    """The state of one attempt, by the names of inputs, parents and groups.

    Parameters
    ----------
    recorder : Recorder
        Where reads go; it is attached to this view.
    fetch : callable
        Gives an artifact's frozen value on the attempt's snapshot, ``ABSENT`` for the output of a skipped node.
    inputs, parents : iterable of str
        Artifacts that the attempt may read.
    groups : mapping of str to Group, optional
        Templates whose members are parents.
    hidden : collection of str, optional
        Nodes that exist but are not parents; touching one raises.

    Raises
    ------
    UndeclaredRead
        On a read of a hidden name.
    KeyError
        On a read of a skipped parent (recorded) or of an unknown name (the nearest ones are given).
    """

    __slots__ = ("_artifacts", "_groups", "_hidden")

    def __init__(
        self,
        recorder: Recorder,
        fetch: Fetch,
        *,
        inputs: Iterable[str] = (),
        parents: Iterable[str] = (),
        groups: Mapping[str, Group] | None = None,
        hidden: Collection[str] = (),
    ) -> None:
        super().__init__(recorder)
        self._artifacts = dict.fromkeys((*inputs, *parents))
        self._groups = {name: GroupView(recorder, name, group) for name, group in (groups or {}).items()}
        self._hidden = frozenset(hidden)
        recorder.attach(fetch, lambda: self._whole(Role.DATA))

    def _place(self) -> str:
        return "the state"

    def _check(self, name: str) -> None:
        if name in self._hidden:
            raise UndeclaredRead(
                f"a node read the output of {name!r}, which is not among its parents, so nothing orders the two - declare"
                f' it with after="{name}"',
                name=name,
            )

    def _reach(self, key: str) -> Any:
        if key in self._artifacts:
            return deliver(self._recorder, key, (), self._recorder.fetch(key))
        self._check(key)
        return self._groups.get(key, ABSENT)

    def _has(self, key: str) -> bool:
        if key not in self._artifacts:
            self._check(key)
            return key in self._groups
        while True:
            there = self._recorder.fetch(key) is not ABSENT
            if self._recorder.record(key, (), Marker.HAS, there):
                return there

    def _lost(self, key: object) -> KeyError:
        if key in self._artifacts:
            return _skipped(str(key))
        names = [*self._artifacts, *self._groups]
        near = get_close_matches(str(key), names) or names
        return KeyError(f"the state has no {key!r} - it has {', '.join(near) or 'nothing'}")

    def _names(self) -> tuple[str, ...]:
        return (*(name for name in self._artifacts if self._has(name)), *self._groups)

    def _whole(self, role: Role | None = None) -> Value:
        found = {name: self._read_whole(name, role) for name in self._artifacts}
        found |= {name: group._whole(role) for name, group in self._groups.items()}
        return freeze({name: value for name, value in found.items() if value is not ABSENT})


def _skipped(name: str) -> KeyError:
    return KeyError(f"node {name!r} was skipped, so it has no output - ask with {name!r} in state, or use .get")


def thawed(
    fetch: Fetch, names: Iterable[str], groups: Iterable[str] = (), recorder: Recorder | None = None
) -> dict[str, Any]:
    """Return plain, mutable copies of all that an attempt of unknown reads may see.

    Everything counts as read from the start and the attempt is never extended (rule R5).

    Parameters
    ----------
    fetch : callable
        As for :class:`StateView`.
    names : iterable of str
        Inputs, parents and members; ``worker[a]`` comes as ``state["worker"]["a"]``. Skipped ones are left out.
    groups : iterable of str, optional
        Templates that are there even when they have no member.
    recorder : Recorder, optional
        Where to record the whole reads; its coverage becomes unknown.
    """
    if recorder is not None:
        recorder.coverage = Coverage.UNKNOWN
        recorder.degraded.append("the reads of this node cannot be seen")
    state: dict[str, Any] = {group: {} for group in groups}
    for name in names:
        value = fetch(name)
        if recorder is not None:
            recorder.record(name, (), Marker.VALUE, value, Role.DATA)
        if value is ABSENT:
            continue
        template, bracket, key = name.partition("[")
        if bracket:
            state.setdefault(template, {})[key[:-1]] = thaw(value)
        else:
            state[name] = thaw(value)
    return state
