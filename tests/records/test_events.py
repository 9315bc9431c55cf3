"""The journal's codec: every entry comes back as it was written, one line each."""

from __future__ import annotations

import json
import typing

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from revise_lab.errors import ReviseLabError
from revise_lab.records import event as ev
from revise_lab.records.attempt import Call, Coverage
from revise_lab.records.effect import Answer, Effect, EffectState, Intent, Reversibility
from revise_lab.records.revision import Change, Op, Revision
from revise_lab.records.selector import Delta, How, Marker, Read, Role, Selector
from revise_lab.records.value import ABSENT, Arr, Obj, equal, freeze

FIELDS = typing.get_args(ev.Entry)
# what stands in an entry, by the annotation of its field
VALUES = st.from_type(Obj) | st.from_type(Arr) | st.sampled_from([ABSENT, None, True, 0, 1.5, "a", "", "é\n\u2028"])
PATHS = st.lists(st.sampled_from(["a", "a.b", "1", 0, 3, "#members"]), max_size=3).map(tuple)
SELECTORS = st.builds(Selector, st.sampled_from(["doc", "n"]), PATHS, st.sampled_from(Marker), st.sampled_from(Role))
TEXTS = st.sampled_from(["r1", "n", "n@1", "worker[=7]@2", 'quo"te', "é"])
READS = st.builds(Read, SELECTORS, VALUES)
CALLS = st.builds(Call, TEXTS, TEXTS, TEXTS, VALUES, st.integers(0, 3), VALUES)
CHANGES = st.builds(Change, TEXTS, st.sampled_from(Op), PATHS, VALUES, st.none() | st.integers(0, 9))
EFFECTS = st.builds(Effect, TEXTS, VALUES, st.sampled_from(Reversibility), TEXTS, VALUES, st.booleans())
DELTAS = st.builds(
    Delta,
    TEXTS,
    st.integers(0, 9),
    st.lists(st.tuples(PATHS, st.sampled_from(How)), max_size=2).map(tuple),
    st.lists(PATHS, max_size=2).map(tuple),
)


def _many(one):
    return st.lists(one, max_size=2).map(tuple)


EVIDENCE = st.builds(ev.Evidence, TEXTS, TEXTS, st.none() | SELECTORS, TEXTS)
REVISIONS = st.builds(Revision, TEXTS, _many(CHANGES))
PLANNED = st.builds(ev.PlannedNode, TEXTS, TEXTS, st.none() | EVIDENCE, _many(TEXTS))
BY_TYPE = {
    "str": TEXTS, "int": st.integers(0, 99), "bool": st.booleans(), "int | None": st.none() | st.integers(0, 9),
    "Value": VALUES, "Revision": REVISIONS, "tuple[Revision, ...]": _many(REVISIONS), "Coverage": st.sampled_from(Coverage),
    "tuple[Read, ...]": _many(READS), "tuple[Call, ...]": _many(CALLS), "tuple[Effect, ...]": _many(EFFECTS),
    "Delta": DELTAS, "tuple[Delta, ...]": _many(DELTAS), "Evidence": EVIDENCE, "Evidence | None": st.none() | EVIDENCE,
    "Selector | None": st.none() | SELECTORS, "tuple[PlannedNode, ...]": _many(PLANNED), "tuple[str, ...]": _many(TEXTS),
    "Intent": st.builds(Intent, TEXTS, TEXTS, TEXTS, st.integers(0, 9)), "Effect | None": st.none() | EFFECTS,
    "Answer": st.sampled_from(Answer), "EffectState": st.sampled_from(EffectState),
    "tuple[tuple[str, str | None], ...]": _many(st.tuples(TEXTS, st.none() | TEXTS)),
}  # fmt: skip


def entries(kind):
    return st.builds(kind, *(BY_TYPE[kind.__annotations__[name].__forward_arg__] for name in kind._fields))


@pytest.mark.parametrize("kind", FIELDS, ids=lambda kind: kind.__name__)
def test_every_entry_comes_back(kind):
    @settings(max_examples=40)
    @given(entries(kind))
    def check(entry):
        line = ev.to_json(entry)
        assert "\n" not in line
        again = ev.from_json(line)
        assert type(again) is kind
        assert ev.to_json(again) == line
        assert repr(again) == repr(entry)

    check()


def test_values_and_types_survive():
    reads = (
        Read(Selector("doc", ("a.b", 0), Marker.HAS, Role.CONTROL), True),
        Read(Selector("doc", ()), freeze([1.0, 1])),
    )
    event = ev.Finish("n@1", freeze({"x": [float("nan"), -0.0]}), reads, Coverage.COARSE)
    again = ev.from_json(ev.to_json(event))
    assert equal(again.output, event.output)
    assert again.reads == reads
    assert type(again.reads[0].selector.marker) is Marker
    assert type(again.coverage) is Coverage
    assert type(again.reads[1].observed) is Arr
    assert [type(leaf) for leaf in again.reads[1].observed] == [float, int]
    assert ev.from_json(ev.to_json(ev.Finish("n@1", ABSENT))).output is ABSENT


def test_the_defaults_of_older_lines_fill_in():
    assert ev.from_json('["Finish","n@1",["value",{"x":1}]]') == ev.Finish("n@1", freeze({"x": 1}))


@pytest.mark.parametrize("name", ["Exploded", "tupel", "StrEnum", "NamedTuple"])
def test_an_unknown_type_is_named(name):
    with pytest.raises(ReviseLabError, match=f"unknown type '{name}' - it was written by another version"):
        ev.from_json(json.dumps([name, 1]))


def test_evidence_reads_as_a_reason():
    met = ev.Evidence("r1", "doc.a", Selector("doc", ("a",), role=Role.CONTROL))
    assert str(met) == "doc.a changed (r1) and it read doc.a as control"
    assert str(ev.Evidence("r1", via="plan")) == "it follows plan, which r1 affects"
    assert str(ev.Evidence("r1", "full restart")) == "r1: full restart"
