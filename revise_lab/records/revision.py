"""Revisions: what a user or an agent changes while a workflow runs.

A revision is an id and a non-empty list of changes, accepted or refused as one (arXiv:2609.00643 section 3). ``base`` is
compare-and-set on the artifact's version; ``base=None`` is last-writer-wins, and the journal says so.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from enum import StrEnum
from typing import NamedTuple

from revise_lab.errors import PathError

from .selector import Delta, How, Path, diff, format_path
from .value import ABSENT, Arr, Obj, Value, freeze, kind_of, step, walk


class Op(StrEnum):
    """What a change does at its path."""

    SET = "set"
    DELETE = "delete"
    APPEND = "append"
    INSERT = "insert"
    REMOVE = "remove"
    OVERRIDE = "override"
    WITHDRAW = "withdraw"


class Change(NamedTuple):
    """One change of one artifact.

    ``insert`` and ``remove`` take the index as the last key of the path; ``append`` takes the list's path; ``override``
    pins a place in a node's output until ``withdraw`` names the same place.
    """

    artifact: str
    op: Op
    path: Path
    value: Value = ABSENT
    base: int | None = None

    def __str__(self) -> str:
        return f"{self.op} {format_path(self.artifact, self.path)}"


class Revision(NamedTuple):
    """An identified, atomic list of changes."""

    id: str
    changes: tuple[Change, ...]


# bound once: looking a member up on its class costs 0.07 us in Python 3.11, more than the decisions made with it
_SET, _OVERRIDE, _APPEND, _DELETE, _INSERT, _REMOVE = Op.SET, Op.OVERRIDE, Op.APPEND, Op.DELETE, Op.INSERT, Op.REMOVE


def patch(root: Value, change: Change) -> Value:
    """Return ``root`` with one change made; nothing else is copied than the levels on the way.

    Raises
    ------
    PathError
        The path does not lead where the operation needs it to lead.
    """
    return _patch(root, change.path, 0, change)


def _patch(node: Value, path: Path, at: int, change: Change) -> Value:
    op = change.op
    if at == len(path):
        if op in (_SET, _OVERRIDE):
            return freeze(change.value)
        if op is _APPEND:
            if type(node) is not Arr:
                _fail(change, at, f"is {kind_of(node)}, not a list")
            return Arr((*node, freeze(change.value)))
        _fail(change, at, f"is a whole artifact, which {op} cannot take away")
    key = path[at]
    if at + 1 == len(path) and op is not _APPEND:
        return _patch_last(node, key, at, change)
    below = step(node, key)
    if below is ABSENT:
        _fail(change, at, f"has no {key!r}")
    return _replaced(node, key, _patch(below, path, at + 1, change))


def _patch_last(node: Value, key: str | int, at: int, change: Change) -> Value:
    op = change.op
    if type(node) is Obj and type(key) is str and op in (_SET, _OVERRIDE, _DELETE):
        if op is not _DELETE:
            return _replaced(node, key, freeze(change.value))
        if key in node:
            return freeze({k: v for k, v in node.items() if k != key})
    if type(node) is Arr and type(key) is int:
        items, value = list(node), change.value
        if op in (_SET, _OVERRIDE) and 0 <= key < len(items):
            items[key] = freeze(value)
            return Arr(items)
        if op is _INSERT and 0 <= key <= len(items):
            return Arr((*items[:key], freeze(value), *items[key:]))
        if op in (_REMOVE, _DELETE) and 0 <= key < len(items):
            return Arr((*items[:key], *items[key + 1 :]))
    _fail(change, at, f"is {kind_of(node)} and takes no {op} of {key!r}")


def _replaced(node: Value, key: str | int, value: Value) -> Value:
    if type(node) is Arr:
        items = list(node)
        items[int(key)] = value
        return Arr(items)
    known = key in node
    copy: dict[str, Value] = Obj(node)
    dict.__setitem__(copy, str(key), value)
    return copy if known else freeze(dict(copy))


def _fail(change: Change, at: int, what: str) -> None:
    place = format_path(change.artifact, change.path[:at])
    raise PathError(
        f"cannot {change}: {place} {what} - name an existing place, or set the nearest existing one above it",
        change=change,
    )


def delta_of(artifact: str, version: int, old: Value, new: Value, changes: Iterable[Change]) -> Delta:
    """Return the delta of an artifact from the patches that made it, never by comparing two whole states.

    Parameters
    ----------
    artifact, version : str, int
        The artifact and the journal version that the delta belongs to.
    old, new : Value
        The artifact before the first and after the last of ``changes``.
    changes : iterable of Change
        The changes of this artifact, in order. Only the places that they touched are compared.
    """
    changed: dict[Path, How] = {}
    resized: dict[Path, None] = {}
    for at in _topmost([_touched(change, old) for change in changes]):
        before, after = walk(old, at), walk(new, at)
        found, containers = diff(before, after, at)
        changed.update(found)
        resized.update(dict.fromkeys(containers))
        if at and (before is ABSENT) != (after is ABSENT):
            resized[at[:-1]] = None
    return Delta(artifact, version, tuple(changed.items()), tuple(resized))


def _touched(change: Change, old: Value) -> Path:
    """Return the place below which a change may have altered something: the list itself where elements moved."""
    path = change.path
    if path and isinstance(path[-1], int) and change.op in (_INSERT, _REMOVE, _DELETE):
        path = path[:-1]
    while path and walk(old, path[:-1]) is ABSENT:
        path = path[:-1]
    return path


def _topmost(paths: Iterable[Path]) -> Collection[Path]:
    kept: list[Path] = []
    distinct = set(paths)
    if len(distinct) == 1:
        return distinct
    for path in sorted(distinct, key=len):
        if not any(path[: len(other)] == other for other in kept):
            kept.append(path)
    return kept
