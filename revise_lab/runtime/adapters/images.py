"""Images: JSON-like stand-ins, frozen, for the Python values that a framework passes around.

The machine compares images; nodes and reducers get the values themselves. A pydantic model or a dataclass becomes an object
of its fields, so that a path into it is a path into its image. What has no fields is compared by its pickle; what cannot be
pickled either equals only itself.
"""

from __future__ import annotations

import dataclasses
import pickle
from collections.abc import Mapping
from hashlib import blake2b
from typing import Any, Final

from revise_lab.records.value import ABSENT, Arr, Obj, Value, equal, freeze, thaw

TYPE: Final = "~type"
"""Where the image of an object says what class it was."""
LEAVES: Final = frozenset({str, int, float, bool, type(None)})
"""Types of values that have nothing inside."""
_PLAIN: Final = LEAVES | {dict, list, tuple}
_FROZEN: Final = frozenset({str, bool, type(None), Obj, Arr})
"""What is its own image; an integer may be too long, and a float has several spellings."""


def fields_of(value: Any) -> tuple[str, ...] | None:
    """Return the names of the fields of a pydantic model or a dataclass instance, ``None`` for anything else."""
    kind = type(value)
    if kind in _PLAIN:
        return None
    declared = getattr(kind, "model_fields", None)
    if isinstance(declared, dict):
        return (*declared, *(getattr(value, "__pydantic_extra__", None) or ()))
    if dataclasses.is_dataclass(kind):
        return tuple(each.name for each in dataclasses.fields(kind))
    return None


def is_plain(value: Any, frozen: Value) -> bool:
    """Say whether a value is what its image thaws to, and this its image: looked at side by side, nothing is built."""
    kind = type(value)
    if kind is dict:
        if type(frozen) is not Obj or len(value) != len(frozen):
            return False
        return all([type(key) is str and is_plain(item, frozen.get(key, ABSENT)) for key, item in value.items()])
    if kind is list:
        return type(frozen) is Arr and len(value) == len(frozen) and all(map(is_plain, value, frozen))
    return kind in LEAVES and equal(value, frozen)


def image(value: Any) -> Value:
    """Return the frozen image of a value."""
    kind = type(value)
    if kind in _FROZEN:
        return value
    if kind in LEAVES:
        return freeze(value)
    if hasattr(kind, "__revise_value__"):
        return value.__revise_value__()
    if isinstance(value, Mapping) and all(type(key) is str for key in value):
        return freeze({key: image(item) for key, item in value.items()})
    if kind is list or kind is tuple:
        return freeze([image(item) for item in value])
    names = fields_of(value)
    if names is not None:
        found = {name: image(getattr(value, name)) for name in names if hasattr(value, name)}
        return freeze({**found, TYPE: f"{kind.__module__}.{kind.__qualname__}"})
    try:
        text = blake2b(pickle.dumps(value), digest_size=16).hexdigest()
    except Exception:  # whatever a class raises from its own pickling
        text = f"at {id(value):x}"
    return freeze({TYPE: f"{kind.__module__}.{kind.__qualname__}", "~digest": text})


def restore(new: Value, like: Any) -> Any:
    """Return the Python value of an image, built like the value that the image was once taken of.

    Parameters
    ----------
    new : Value
        The image, patched since.
    like : Any
        The value before the patch; what did not change in the image is kept from it.
    """
    if like is not ABSENT and equal(image(like), new):
        return like
    names = None if like is ABSENT or type(new) is not Obj else fields_of(like)
    if names is not None:
        parts = {key: restore(item, getattr(like, key, ABSENT)) for key, item in new.items() if key != TYPE}
        return type(like)(**parts)
    if type(new) is Obj:
        known = like if isinstance(like, dict) else {}
        order = [*(key for key in known if key in new), *(key for key in new if key not in known)]
        return {key: restore(new[key], known.get(key, ABSENT)) for key in order}
    if type(new) is Arr:
        before = like if isinstance(like, list | tuple) else ()
        return [restore(item, before[at] if at < len(before) else ABSENT) for at, item in enumerate(new)]
    return thaw(new)
