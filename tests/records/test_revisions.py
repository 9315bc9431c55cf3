"""Revisions: every operation, its refusals, and a delta that comes from the patch."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from revise_lab.errors import PathError
from revise_lab.records.revision import Change, Op, delta_of, patch
from revise_lab.records.selector import Marker, Selector, delta_between, evaluate, meets
from revise_lab.records.value import ABSENT, Arr, Obj, equal, freeze, members, walk

ROOT = freeze({"n": 1, "d": {"x": 1, "y": {"z": 2}}, "l": [10, 20, [30]], "s": "text"})


def change(op, *path, value=ABSENT):
    return Change("doc", Op(op), path, value)


@pytest.mark.parametrize(
    ("made", "place", "there"),
    [
        (change("set", "n", value=2), ("n",), 2),
        (change("set", value={"only": 1}), (), {"only": 1}),
        (change("set", "new", value=[1]), ("new",), [1]),
        (change("set", "d", "y", "z", value={"w": 1}), ("d",), {"x": 1, "y": {"z": {"w": 1}}}),
        (change("set", "l", 1, value=21), ("l",), [10, 21, [30]]),
        (change("set", "l", 2, 0, value=31), ("l",), [10, 20, [31]]),
        (change("delete", "d", "x"), ("d",), {"y": {"z": 2}}),
        (change("delete", "l", 0), ("l",), [20, [30]]),
        (change("append", "l", value=40), ("l",), [10, 20, [30], 40]),
        (change("append", "l", 2, value=31), ("l",), [10, 20, [30, 31]]),
        (change("insert", "l", 0, value=5), ("l",), [5, 10, 20, [30]]),
        (change("insert", "l", 3, value=5), ("l",), [10, 20, [30], 5]),
        (change("remove", "l", 1), ("l",), [10, [30]]),
    ],
    ids=str,
)
def test_operations(made, place, there):
    new = patch(ROOT, made)
    assert equal(walk(new, place), freeze(there))
    if len(place) == 1:
        assert all(new[key] is ROOT[key] for key in ROOT if key != place[0]), "untouched siblings are shared"
    assert list(new) == sorted(new)


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (change("set", "d", "gone", "deep", value=1), r"cannot set doc\.d\.gone\.deep: doc\.d has no 'gone'"),
        (change("set", "s", "x", value=1), r"doc\.s is leaf and takes no set of 'x'"),
        (change("set", "l", 3, value=1), r"doc\.l is array and takes no set of 3"),
        (change("set", "l", "0", value=1), r"doc\.l is array and takes no set of '0'"),
        (change("set", "d", 0, value=1), r"doc\.d is object and takes no set of 0"),
        (change("delete", "gone"), r"doc is object and takes no delete of 'gone'"),
        (change("delete"), r"doc is a whole artifact, which delete cannot take away"),
        (change("append", "d", value=1), r"doc\.d is object, not a list"),
        (change("append", "s", value=1), r"doc\.s is leaf, not a list"),
        (change("append", "gone", value=1), r"doc has no 'gone'"),
        (change("insert", "l", 4, value=1), r"doc\.l is array and takes no insert of 4"),
        (change("insert", "l", -1, value=1), r"doc\.l is array and takes no insert of -1"),
        (change("insert", "d", "k", value=1), r"doc\.d is object and takes no insert of 'k'"),
        (change("remove", "l", 3), r"doc\.l is array and takes no remove of 3"),
        (change("remove", "d", "x"), r"doc\.d is object and takes no remove of 'x'"),
    ],
    ids=str,
)
def test_a_path_that_leads_nowhere_is_named(made, message):
    with pytest.raises(PathError, match=message + r".*name an existing place") as caught:
        patch(ROOT, made)
    assert caught.value.change == made


@pytest.mark.parametrize(
    ("changes", "met", "free"),
    [
        ([change("set", "n", value=1)], [], [("n",), ()]),
        ([change("set", "n", value=2)], [("n",), ()], [("d",), ("d", "x"), (Marker.MEMBERS,)]),
        ([change("set", "e", value={})], [("e", Marker.HAS), (Marker.MEMBERS,)], [("n",)]),
        ([change("delete", "d", "y")], [("d", Marker.MEMBERS), ("d", "y", "z")], [("d", "x"), (Marker.MEMBERS,)]),
        ([change("append", "l", value=1)], [("l", Marker.MEMBERS), ("l", 3)], [("l", 0), ("l", 2, 0)]),
        ([change("insert", "l", 0, value=10)], [("l", 1), ("l", Marker.MEMBERS)], [("l", 0)]),
        ([change("set", "n", value=2), change("set", "n", value=1)], [], [("n",)]),
        ([change("set", "e", value=1), change("delete", "e")], [], [("e", Marker.HAS), (Marker.MEMBERS,)]),
        ([change("set", "e", value={}), change("set", "e", "f", value=1)], [("e", "f"), ("e", Marker.MEMBERS)], [("n",)]),
        ([change("set", "n", value=2), change("set", "s", value="u")], [("n",), ("s",)], [("d",), ("l",)]),
        ([change("set", value=3)], [("n",), ("d", "x"), (), (Marker.MEMBERS,)], []),
    ],
    ids=lambda drawn: "; ".join(map(str, drawn)) if str(drawn).startswith("[Change") else "",
)  # fmt: skip
def test_deltas_of_patches(changes, met, free):
    new = ROOT
    for each in changes:
        new = patch(new, each)
    delta = delta_of("doc", 7, ROOT, new, changes)
    assert delta.version == 7
    for spec in (*met, *free):
        marker = spec[-1] if spec and isinstance(spec[-1], Marker) else Marker.VALUE
        path = tuple(key for key in spec if not isinstance(key, Marker))
        assert (meets(delta, Selector("doc", path, marker)) is not None) == (spec in met), spec


@st.composite
def edits(draw):
    """An artifact and a list of changes that apply to it one after the other."""
    old = new = draw(st.from_type(Obj))
    changes = []
    for _ in range(draw(st.integers(1, 4))):
        path, spot = [], new
        while (keys := [*members(spot)]) and draw(st.integers(0, 2)):
            path.append(draw(st.sampled_from(keys)))
            spot = walk(spot, (path[-1],))
        op = draw(st.sampled_from(["set", "delete", "append", "insert", "remove", "new"]))
        if op == "new":
            op, path = "set", [*path, draw(st.sampled_from(["a", "b", "new"]))]
        elif op == "insert":
            path = [*path, draw(st.integers(0, 2))]
        made = Change("doc", Op(op), tuple(path), draw(st.from_type(Obj) | st.sampled_from([0, 1, "a", None])))
        try:
            new = patch(new, made)
        except PathError:
            continue
        changes.append(made)
    return old, new, changes


@pytest.mark.deep
@given(edits(), st.data())
def test_a_delta_of_patches_says_what_a_comparison_of_states_says(drawn, data):
    old, new, changes = drawn
    patched, compared = delta_of("doc", 1, old, new, changes), delta_between("doc", 1, old, new)
    assert bool(patched) == bool(compared) == (not equal(old, new))
    path, spot = [], data.draw(st.sampled_from([old, new]))
    while (keys := [*members(spot)]) and data.draw(st.integers(0, 3)):
        path.append(data.draw(st.sampled_from(keys)))
        spot = walk(spot, (path[-1],))
    path += data.draw(st.lists(st.sampled_from(["a", "new", 0]), max_size=1))
    for marker in Marker:
        selector = Selector("doc", tuple(path), marker)
        if not equal(evaluate(selector, old), evaluate(selector, new)):
            assert meets(patched, selector) is not None, (selector, changes)
        assert (meets(patched, selector) is None) == (meets(compared, selector) is None), (selector, changes)


def test_a_patch_copies_only_the_levels_on_the_way():
    wide = freeze({"left": {str(i): [i] for i in range(50)}, "right": {"x": 1}})
    new = patch(wide, change("set", "left", "7", 0, value=-7))
    assert new["right"] is wide["right"]
    assert all(new["left"][key] is wide["left"][key] for key in wide["left"] if key != "7")
    assert (type(new), type(new["left"]), type(new["left"]["7"])) == (Obj, Obj, Arr)
    assert wide["left"]["7"] == (7,)
