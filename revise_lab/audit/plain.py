"""Values looked up, compared and changed in the plainest way, by code that judges what the package does to them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from revise_lab.records.value import ABSENT


def shown(value: Any, path: Iterable[str | int], marker: str) -> Any:
    """Return what a read of a place shows: its value, whether it exists, its keys or length, or its kind."""
    for key in path:
        if isinstance(value, dict):
            value = value.get(key, ABSENT)
        else:
            inside = isinstance(value, tuple) and isinstance(key, int) and 0 <= key < len(value)
            value = value[key] if inside else ABSENT
    if marker == "value":
        return value
    if marker == "has":
        return value is not ABSENT
    if marker == "members" and isinstance(value, dict | tuple):
        return tuple(value) if isinstance(value, dict) else len(value)
    if value is ABSENT:
        return "absent"
    return "object" if isinstance(value, dict) else "array" if isinstance(value, tuple) else "leaf"


def same(a: Any, b: Any) -> bool:
    """Say whether two values look the same to any program: types count, NaN equals NaN."""
    if a is b:
        return True
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, tuple) and isinstance(b, tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return type(a) is type(b) and bool(a == b or (a != a and b != b))


def patched(value: Any, op: str, path: Sequence[str | int], new: Any) -> Any:
    """Return a plain value with one change of a revision made.

    Raises
    ------
    KeyError, IndexError, TypeError
        The place does not exist.
    """
    if not path:
        return (*value, new) if op == "append" else new
    key, *rest = path
    if isinstance(value, dict) and isinstance(key, str):
        others = {name: item for name, item in value.items() if name != key}
        if rest or op == "append":
            others[key] = patched(value[key], op, rest, new)
        elif op != "delete":
            others[key] = new
        return {name: others[name] for name in sorted(others)}
    if not isinstance(value, tuple) or not isinstance(key, int):
        raise TypeError(key)
    if not 0 <= key < len(value) + (op == "insert"):
        raise IndexError(key)
    if rest or op == "append":
        return (*value[:key], patched(value[key], op, rest, new), *value[key + 1 :])
    inserted = () if op in ("remove", "delete") else (new,)
    return (*value[:key], *inserted, *value[key if op == "insert" else key + 1 :])
