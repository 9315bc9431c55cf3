"""The reader index finds exactly the reads that a change meets, whenever they were made."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from revise_lab.core.provenance import ReaderIndex
from revise_lab.records.selector import Delta, How, Marker, Selector, delta_between, meets
from revise_lab.records.value import Obj, freeze, members, walk

ROOTS = st.from_type(Obj)


@st.composite
def selectors(draw, roots):
    root, path = draw(st.sampled_from(roots)), []
    while (keys := [*members(root)]) and draw(st.integers(0, 3)):
        path.append(draw(st.sampled_from(keys)))
        root = walk(root, (path[-1],))
    path += draw(st.lists(st.sampled_from(["a", "new", 0]), max_size=1))
    return Selector(draw(st.sampled_from(["doc", "other"])), tuple(path), draw(st.sampled_from(Marker)))


@pytest.mark.deep
@given(st.data())
def test_the_index_agrees_with_the_overlap_of_every_pair(data):
    states = data.draw(st.lists(ROOTS, min_size=2, max_size=4))
    early = data.draw(st.lists(selectors(states), max_size=6, unique=True))
    late = data.draw(st.lists(selectors(states), max_size=4, unique=True))
    index = ReaderIndex()
    cells = {}
    for selector in early:
        cells[selector] = index.cell(selector)
        cells[selector].readers[selector] = 0
    changed = {}
    for version, (old, new) in enumerate(pairwise(states), start=1):
        delta = delta_between("doc", version, old, new)
        hits = [reader for hit in index.touch(delta) for reader in hit.cell.readers]
        met = [selector for selector in early if meets(delta, selector) is not None]
        assert sorted(map(str, hits)) == sorted(map(str, met)), "each once, and nobody else"
        for selector in (*early, *late):
            if meets(delta, selector) is not None:
                changed[selector] = version
    for selector in (*early, *late):
        assert index.cell(selector).version == changed.get(selector, 0), selector


def test_a_reader_is_told_which_place_it_was():
    index = ReaderIndex()
    old, new = ({"doc": {"a": [1, {"b": n}]}} for n in (1, 2))
    selector = Selector("root", ("doc", "a"))
    index.cell(selector).readers["reader"] = 0
    (hit,) = index.touch(delta_between("root", 1, freeze(old), freeze(new)))
    assert hit.place == ("doc", "a", 1, "b")
    assert index.cell(selector) is hit.cell


def test_roles_are_stamped_together_and_artifacts_are_not():
    index = ReaderIndex()
    data, control = (Selector("doc", ("x",), role=role) for role in ("data", "control"))
    other = data._replace(artifact="other")
    for selector in (data, control, other):
        index.cell(selector)
    index.touch(Delta("doc", 7, ((("x",), How.LEAF),), ()))
    assert [index.cell(selector).version for selector in (data, control, other)] == [7, 7, 0]
