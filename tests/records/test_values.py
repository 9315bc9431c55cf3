"""Values: frozen once, one equality, and what is not JSON-like is refused by place."""

from __future__ import annotations

import copy
import enum
import json
import pickle
from types import MappingProxyType

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from revise_lab.errors import ReadOnlyState, ValueNotCanonical
from revise_lab.records.value import (
    ABSENT,
    Arr,
    Obj,
    canonical_text,
    digest,
    equal,
    freeze,
    kind_of,
    members,
    step,
    thaw,
    walk,
)

NAN = float("nan")
VALUES = st.from_type(Obj) | st.from_type(Arr)


def same(a, b):
    return equal(freeze(a), freeze(b))


@pytest.mark.parametrize(
    ("a", "b"),
    [
        (NAN, float("nan")),
        ([NAN], [-NAN]),
        (-0.0, 0.0),
        ({"x": -0.0}, {"x": 0.0}),
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}),
        ((1, 2), [1, 2]),
        (MappingProxyType({"a": [1]}), {"a": (1,)}),
    ],
)
def test_what_no_node_can_tell_apart_is_equal(a, b):
    assert same(a, b)
    assert digest(freeze(a)) == digest(freeze(b))
    assert repr(freeze(a)) == repr(freeze(b))


@pytest.mark.parametrize(
    ("a", "b"),
    [
        *[
            (1, 1.0),
            (1, True),
            (0, False),
            (0.0, False),
            ([1], [1.0]),
            ({"x": 0}, {"x": False}),
            ("1", 1),
            (None, False),
        ],
        *[([1, 2], [2, 1]), ([], {}), ("", None), ([], None), ([[]], [{}]), ({"a": None}, {}), ([None], [])],
    ],
)
def test_what_a_node_can_tell_apart_differs(a, b):
    assert not same(a, b)
    assert digest(freeze(a)) != digest(freeze(b))


def test_keys_have_one_order_and_json_shows_it():
    assert list(freeze({"b": 1, "a": {"d": 1, "c": 2}})) == ["a", "b"]
    assert json.dumps(freeze({"b": 1, "a": {"d": 1, "c": 2}})) == '{"a": {"c": 2, "d": 1}, "b": 1}'


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({1, 2}, r"builtins\.set is not JSON-like \(at the value itself\)"),
        ({"a": [{"b": b"raw"}]}, r"builtins\.bytes is not JSON-like \(at \['a'\]\[0\]\['b'\]\)"),
        ({"a": {1: "x"}}, r"key 1 is int, not a string \(at \['a'\]\)"),
        ([{None: 1}], r"key None is NoneType, not a string \(at \[0\]\)"),
        (1j, r"complex is not JSON-like"),
        (lambda: 1, r"function is not JSON-like"),
        ({"x": np.float64(1.0)}, r"numpy\.float64 is not JSON-like \(at \['x'\]\)"),
        ([np.int32(1)], r"numpy\.int32 is not JSON-like \(at \[0\]\)"),
        ({"x": np.zeros(2)}, r"numpy\.ndarray is not JSON-like \(at \['x'\]\)"),
        ({"a": ABSENT}, r"not JSON-like \(at \['a'\]\)|\(at \['a'\]\)"),
        ({"n": 10**5000}, r"\(at \['n'\]\)"),
    ],
    ids=[
        "set",
        "bytes",
        "int key",
        "None key",
        "complex",
        "function",
        "numpy float",
        "numpy int",
        "array",
        "absent inside",
        "long int",
    ],
)
def test_what_is_not_json_like_is_refused_by_place(value, message):
    with pytest.raises(ValueNotCanonical, match=message + r".*convert it first"):
        freeze(value)


def test_a_value_that_contains_itself_is_refused():
    loop = {"a": []}
    loop["a"].append(loop)
    with pytest.raises(ValueNotCanonical, match=r"contains itself.*finite tree"):
        freeze(loop)


@pytest.mark.parametrize("value", ["\ud800", {"a": ["\udfff"]}, {"\ud800": 1}], ids=["text", "inside", "key"])
def test_half_a_surrogate_pair_has_a_digest(value):
    """A model's reply may hold one: json.loads takes it."""
    assert len(digest(freeze(value))) == 16
    assert equal(freeze(value), freeze(copy.deepcopy(value)))


def test_a_subclass_of_a_leaf_becomes_the_leaf():
    class Tier(enum.StrEnum):
        STRICT = "strict"

    class Level(enum.IntEnum):
        ONE = 1

    frozen = freeze({"tier": Tier.STRICT, "level": Level.ONE})
    assert same(frozen, {"tier": "strict", "level": 1})
    assert {type(leaf) for leaf in frozen.values()} == {str, int}


@pytest.mark.parametrize(
    "write",
    [
        lambda obj: obj.__setitem__("a", 2),
        lambda obj: obj.__delitem__("a"),
        lambda obj: obj.update(a=2),
        lambda obj: obj.pop("a"),
        lambda obj: obj.popitem(),
        lambda obj: obj.clear(),
        lambda obj: obj.setdefault("b", 2),
        lambda obj: obj.__ior__({"a": 2}),
    ],
)
def test_frozen_objects_take_no_write(write):
    obj = freeze({"a": 1})
    with pytest.raises(ReadOnlyState, match="frozen"):
        write(obj)
    assert same(obj, {"a": 1})


def test_freezing_copies_so_later_writes_do_not_show():
    source = {"a": [1, {"b": 2}]}
    frozen = freeze(source)
    source["a"][1]["b"] = 3
    source["a"].append(4)
    assert same(frozen, {"a": [1, {"b": 2}]})


@pytest.mark.parametrize("copied", [lambda v: pickle.loads(pickle.dumps(v)), copy.deepcopy], ids=["pickle", "deepcopy"])
def test_copies_are_equal_and_frozen(copied):
    value = freeze({"b": [1, {"x": NAN}], "a": None})
    again = copied(value)
    assert equal(again, value)
    assert (type(again), type(again["b"]), type(again["b"][1])) == (Obj, Arr, Obj)
    assert copied(ABSENT) is ABSENT


def test_absent_is_one_falsy_value_apart_from_all_others():
    assert not ABSENT
    assert [kind_of(freeze(value)) for value in ({}, [], None)] == ["object", "array", "leaf"]
    assert kind_of(ABSENT) == "absent"
    assert not equal(ABSENT, None)
    assert canonical_text(ABSENT) != canonical_text("#absent")


def test_steps_know_keys_from_indices():
    value = freeze({"1": "key", "list": ["zero", "one"]})
    assert step(value, "1") == "key"
    assert step(value, 1) is ABSENT
    assert walk(value, ("list", 1)) == "one"
    assert walk(value, ("list", "1")) is walk(value, ("list", -1)) is walk(value, ("list", 2)) is ABSENT
    assert walk(value, ("1", "further")) is ABSENT
    assert [*members(value)] == ["1", "list"]
    assert [*members(value["list"])] == [0, 1]
    assert [*members("leaf")] == []


@given(VALUES, VALUES)
def test_equality_is_that_of_the_canonical_text(a, b):
    assert equal(a, b) == (canonical_text(a) == canonical_text(b)) == (digest(a) == digest(b))
    assert equal(a, b) == equal(b, a)


@given(VALUES)
def test_freezing_is_idempotent_and_thawing_undoes_it(value):
    assert freeze(value) is value
    plain = thaw(value)
    assert equal(freeze(plain), value)
    assert equal(freeze(json.loads(canonical_text(value))), value)
    if plain:
        plain.clear()
        assert members(value)
        assert len(value)


@given(st.data())
def test_equality_sees_every_place(data):
    value = data.draw(st.from_type(Obj))
    paths = [(key,) for key in value] + [(key, i) for key, inner in value.items() for i in members(inner)]
    if paths:
        path = data.draw(st.sampled_from(paths))
        plain = thaw(value)
        spot = plain if len(path) == 1 else plain[path[0]]
        spot[path[-1]] = "another value"
        assert not equal(freeze(plain), value)


@pytest.mark.parametrize("deep", [lambda value: {"k": value}, lambda value: [value]])
def test_what_is_frozen_is_shallow_enough_for_everything_that_walks_it(deep):
    value = 1
    for _ in range(200):
        value = deep(value)
    assert equal(freeze(value), freeze(thaw(freeze(value))))
    with pytest.raises(ValueNotCanonical, match="nested too deeply"):
        freeze(deep(value))
