"""Selectors: text form, what they observe, and which changes meet them (R14)."""

from __future__ import annotations

import pickle

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from revise_lab.errors import PathError
from revise_lab.records.selector import (
    How,
    Marker,
    Role,
    Selector,
    delta_between,
    diff,
    evaluate,
    exists,
    format_path,
    meets,
    parse_path,
)
from revise_lab.records.value import ABSENT, Arr, Obj, equal, freeze, members, walk

V, M, K, H = Marker.VALUE, Marker.MEMBERS, Marker.KIND, Marker.HAS
KEYS = ["a", "b", "ab", "a.b", "1", "é", 0, 1]


# --- text ---


@pytest.mark.parametrize(
    ("text", "path"),
    [
        ("request", ("request", ())),
        ("request.items[0].name", ("request", ("items", 0, "name"))),
        ("request.1", ("request", ("1",))),
        ("request[1]", ("request", (1,))),
        ("grid[0][12]", ("grid", (0, 12))),
        ("request.trip plan.budget-2", ("request", ("trip plan", "budget-2"))),
        (("request", "a.b", 0), ("request", ("a.b", 0))),
    ],
)
def test_paths_are_read(text, path):
    assert parse_path(text) == path


@pytest.mark.parametrize(
    "text",
    ["", ".a", "a..b", "[0]", "a[x]", "a[-1]", "a[0", "a]", "request.", "a[0]b", "a.[0]", "a[0].", (), (0, "a")],
    ids=repr,
)
def test_what_is_no_path_is_refused_with_an_example(text):
    with pytest.raises(PathError, match=r"not a path - write it like request\.items\[0\]|must begin with the name"):
        parse_path(text)


@given(st.text("abc_é ", min_size=1), st.lists(st.integers(0, 12) | st.text("ab1 é", min_size=1), max_size=4))
def test_text_and_path_are_each_others_inverse(artifact, keys):
    assert parse_path(format_path(artifact, tuple(keys))) == (artifact, tuple(keys))


@pytest.mark.parametrize(
    ("selector", "text"),
    [
        (Selector("docs", ("a", 0)), "docs.a[0]"),
        (Selector("docs", ("a",), M), "docs.a.#members"),
        (Selector("docs", (), K), "docs.#kind"),
        (Selector("docs", ("a", "k"), H), "docs.a.#has:k"),
        (Selector("docs", (), H), "docs.#has"),
    ],
)
def test_selectors_are_written_for_people(selector, text):
    assert str(selector) == text
    assert pickle.loads(pickle.dumps(selector)) == selector


# --- what is observed ---


@pytest.mark.parametrize(
    ("path", "marker", "observed"),
    [
        (("doc",), V, {"x": 1}),
        (("doc", "x"), V, 1),
        (("gone",), V, ABSENT),
        (("doc", "x", "deeper"), V, ABSENT),
        (("doc",), M, ["x"]),
        (("list",), M, 2),
        (("leaf",), M, "leaf"),
        (("gone",), M, "absent"),
        (("doc",), K, "object"),
        (("list",), K, "array"),
        (("leaf",), K, "leaf"),
        (("gone",), K, "absent"),
        (("doc", "x"), H, True),
        (("doc", "y"), H, False),
        (("list", 1), H, True),
        (("list", "1"), H, False),
        (("list", 2), H, False),
        (("none",), H, True),
    ],
)
def test_selectors_observe(path, marker, observed):
    root = freeze({"doc": {"x": 1}, "list": [5, 6], "leaf": "s", "none": None})
    seen = evaluate(Selector("a", path, marker), root)
    assert equal(seen, observed if observed is ABSENT else freeze(observed))
    assert exists(root, path) == (walk(root, path) is not ABSENT)


# --- what a change meets ---

MET = [
    # design: a path is a tuple, never a dotted string
    ("a dotted key is no path", {"a": {"b": 1}}, {"a": {"b": 2}}, [("a", "b")], [("a.b",)]),
    ("a path is no dotted key", {"a.b": 1, "a": {"b": 0}}, {"a.b": 2, "a": {"b": 0}}, [("a.b",)], [("a", "b"), ("a",)]),
    ("key 1 is not index 1", {"1": 0, "l": [0, 0]}, {"1": 1, "l": [0, 0]}, [("1",)], [(1,), ("l", 1)]),
    ("index 1 is not key 1", {"l": [0, 0]}, {"l": [0, 1]}, [("l", 1), ("l",)], [("l", "1"), ("l", 0)]),
    ("docs is no prefix of docs_old", {"docs": {"x": 1}, "docs_old": {"x": 1}}, {"docs": {"x": 2}, "docs_old": {"x": 1}},
     [("docs", "x"), ("docs",), ()], [("docs_old",), ("docs_old", "x")]),
    # one is a prefix of the other
    ("a leaf meets what is above", {"d": {"x": {"y": 1}}}, {"d": {"x": {"y": 2}}},
     [(), ("d",), ("d", "x"), ("d", "x", "y"), ("d", "x", "y", "z")], [("e",), ("d", "w")]),
    ("a replaced ancestor meets what is below", {"d": {"x": {"y": 1}}}, {"d": 3}, [("d", "x", "y"), ("d", "x")], [("e",)]),
    ("a deleted ancestor meets what is below", {"d": {"x": 1}, "e": 0}, {"e": 0}, [("d", "x"), ("d",), ()], [("e",)]),
    # empty containers are leaves, and differ in kind
    ("an empty object appears", {}, {"d": {}},
     [("d",), ("d", H), ("d", M), ("d", K), (), (M,)], [(K,), (H,), ("e",), ("e", H)]),
    ("an empty object goes", {"d": {}}, {}, [("d",), ("d", H), ("d", M), ("d", K), (), (M,)], [(K,), (H,)]),
    ("an empty object becomes an empty list", {"d": {}}, {"d": []},
     [("d",), ("d", K), ("d", M), ()], [("d", H), (M,), (K,)]),
    ("null becomes a number", {"d": None}, {"d": 0}, [("d",), ("d", K), ("d", M)], [("d", H), (M,)]),
    ("0 becomes False", {"d": 0}, {"d": False}, [("d",)], [("d", H), (M,)]),
    # members
    ("a key is added", {"d": {"a": 1}}, {"d": {"a": 1, "b": 2}},
     [("d", M), ("d",), (), ("d", "b"), ("d", "b", H)], [("d", K), ("d", H), ("d", "a"), ("d", "a", H), (M,)]),
    ("a key is removed", {"d": {"a": 1, "b": 2}}, {"d": {"a": 1}},
     [("d", M), ("d", "b"), ("d", "b", H)], [("d", "a"), ("d", "a", H), ("d", "c", H), (M,), ("d", K)]),
    ("a member is replaced in place", {"d": {"a": 1, "b": 2}}, {"d": {"a": 9, "b": 2}},
     [("d", "a"), ("d",)], [("d", M), ("d", "a", H), ("d", "b"), ("d", K)]),
    ("a member of a list is replaced in place", {"l": [1, 2]}, {"l": [1, 9]}, [("l", 1)], [("l", M), ("l", 0), ("l", 1, H)]),
    ("a list grows", {"l": [1]}, {"l": [1, 2]}, [("l", M), ("l", 1), ("l", 1, H)], [("l", 0), ("l", 2, H), ("l", K)]),
    ("a list grows in front", {"l": [1, 2]}, {"l": [0, 1, 2]},
     [("l", M), ("l", 0), ("l", 1), ("l", 2), ("l", 2, H)], [("l", 0, H), ("l", 1, H), ("l", K)]),
    ("a container goes while its size is held", {"d": {"a": 1}}, {}, [("d", M), ("d", K), (M,)], [(K,)]),
    ("a container of containers appears", {}, {"d": {"a": {}}}, [("d", M), ("d", "a", M), ("d", "a", K), ("d", "a", H)], []),
    ("a list takes the place of an object", {"d": {"a": 1}}, {"d": [1]},
     [("d", M), ("d", K), ("d", "a"), ("d", 0), ("d", "a", H), ("d", 0, H)], [("d", H), (M,)]),
    # nothing
    ("the same again", {"d": {"a": [1, {}]}}, {"d": {"a": [1, {}]}}, [], [(), ("d",), ("d", M), ("d", "a", 0)]),
    ("a change of key order", {"a": 1, "b": 2}, {"b": 2, "a": 1}, [], [(), (M,), ("a",)]),
]  # fmt: skip


def _selector(spec):
    marker = spec[-1] if spec and isinstance(spec[-1], Marker) else V
    return Selector("doc", tuple(key for key in spec if not isinstance(key, Marker)), marker)


@pytest.mark.parametrize(("name", "old", "new", "met", "free"), MET, ids=[row[0] for row in MET])
def test_overlap(name, old, new, met, free):
    delta = delta_between("doc", 1, freeze(old), freeze(new))
    assert [spec for spec in met if meets(delta, _selector(spec)) is None] == []
    assert [spec for spec in free if meets(delta, _selector(spec)) is not None] == []
    assert bool(delta) == bool(met)
    other = delta._replace(artifact="other")
    assert not any(meets(other, _selector(spec)) for spec in (*met, *free))


@pytest.mark.parametrize(
    ("old", "new", "changed", "resized"),
    [
        ({"a": 1}, {"a": 2}, [(("a",), How.LEAF)], []),
        ({"a": 1}, {"a": {}}, [(("a",), How.KIND)], [("a",)]),
        ({"a": [0]}, {}, [(("a",), How.GONE)], [("a",), ()]),
        ({}, {"a": {"b": 1}}, [(("a",), How.APPEARED)], [("a",), ()]),
        ({"a": {"x": 1}}, {"a": {"x": 2, "z": 1}}, [(("a", "x"), How.LEAF), (("a", "z"), How.APPEARED)], [("a",)]),
        ([1, 2], [1], [((1,), How.GONE)], [()]),
    ],
)  # fmt: skip
def test_a_delta_names_the_topmost_changed_places(old, new, changed, resized):
    assert diff(freeze(old), freeze(new)) == (changed, resized)


def test_a_role_is_no_part_of_what_is_met():
    delta = delta_between("doc", 1, freeze({"a": 1}), freeze({"a": 2}))
    for role in Role:
        assert meets(delta, Selector("doc", ("a",), V, role)) == ("a",)


# --- properties ---

ROOTS = st.from_type(Obj) | st.from_type(Arr) | st.sampled_from([ABSENT, None, 0, "a"])


@st.composite
def pairs(draw):
    """Two values that share most of what they hold, and a selector that leads into one of them."""
    old = draw(ROOTS)
    new = draw(ROOTS)
    if isinstance(old, Obj) and isinstance(new, Obj) and draw(st.booleans()):
        new = freeze({**old, **new})
    root, path = draw(st.sampled_from([old, new])), []
    while (keys := [*members(root)]) and draw(st.integers(0, 3)):
        path.append(draw(st.sampled_from(keys)))
        root = walk(root, (path[-1],))
    path.extend(draw(st.lists(st.sampled_from(KEYS), max_size=1)))
    return old, new, Selector("doc", tuple(path), draw(st.sampled_from(Marker)))


@pytest.mark.deep
@given(pairs())
def test_overlap_is_never_finer_than_the_truth(drawn):
    old, new, selector = drawn
    delta = delta_between("doc", 1, old, new)
    if not equal(evaluate(selector, old), evaluate(selector, new)):
        assert meets(delta, selector) is not None
    assert bool(delta) == (not equal(old, new))


@settings(max_examples=300)
@given(pairs())
def test_exact_markers_are_never_coarser_either(drawn):
    """A leaf, an existence or the keys of what stays a container: met only if what is observed differs."""
    old, new, selector = drawn
    before, after = evaluate(selector, old), evaluate(selector, new)
    delta = delta_between("doc", 1, old, new)
    here = [walk(root, selector.path) for root in (old, new)]
    exact = selector.marker is H or (selector.marker is V and not any(isinstance(v, Obj | Arr) for v in here))
    replaced_above = any(len(place) < len(selector.path) for place, _ in delta.changed)
    if exact and not replaced_above and equal(before, after):
        assert meets(delta, selector) is None
