"""Found while writing the tests; each moves to the file of its subject once it passes."""

from __future__ import annotations

import pytest

from revise_lab import Workflow, simulate
from revise_lab.errors import PathError, ValueNotCanonical
from revise_lab.records import event as ev
from revise_lab.records.revision import Change, Op, Revision
from revise_lab.records.selector import parse_path
from revise_lab.records.value import ABSENT, digest, freeze


def test_a_stale_base_is_refused_wherever_it_stands_in_the_revision(play):
    """History: rev r0 in.g=1 (in is at 1); rev r1 in.g=9, in.f=5 with base=0: accepted, though in.f was at 1."""
    game = play("G", {"in": {"f": 0, "g": 0}})("rev in.g=1")
    changes = (Change("in", Op.SET, ("g",), 9), Change("in", Op.SET, ("f",), 5, base=0))
    game.machine_takes(ev.Revise(Revision("bad", changes)))
    assert isinstance(game.told[0], ev.Refused)
    assert game.machine.inputs == freeze({"in": {"f": 0, "g": 1}})


def test_absent_inside_a_value_is_no_json():
    """It freezes, and then neither its digest nor its text can be taken."""
    with pytest.raises(ValueNotCanonical, match=r"at \['a'\]"):
        freeze({"a": ABSENT})


@pytest.mark.parametrize("value", ["\ud800", {"a": ["\udfff"]}, {"\ud800": 1}], ids=["text", "inside", "key"])
def test_a_lone_surrogate_has_a_digest_or_is_refused(value):
    """json.loads makes such text from a model's reply; the digest (so the fingerprint and member keys) then raises."""
    try:
        frozen = freeze(value)
    except ValueNotCanonical:
        return
    assert len(digest(frozen)) == 16


def test_an_integer_too_long_for_text_has_a_digest_or_is_refused():
    """More than 4,300 digits: json.dumps raises ValueError from the digest."""
    try:
        frozen = freeze({"n": 10**5000})
    except ValueNotCanonical:
        return
    assert len(digest(frozen)) == 16


@pytest.mark.parametrize("text", ["request.", "a[0]b", "a.[0]", "a[0]."])
def test_a_slip_in_a_path_is_not_taken_for_another_path(text):
    """``run.revise("request.", 1)`` replaces the whole artifact."""
    with pytest.raises(PathError, match="is not a path"):
        parse_path(text)


def test_a_body_that_read_at_its_beginning_is_hit_by_a_change_of_what_it_read():
    """Virtual time: a body without calls ends at once and reports later, so what it has read is unknown until then."""

    async def early(state):
        return {"f": state["in"]["f"]}

    flow = Workflow("early")
    flow.node()(early)
    revision = Revision("r", (Change("in", Op.SET, ("f",), 2),))
    run = simulate(flow, {"in": {"f": 1}}, revisions=[(1.0, revision)], duration_s=lambda ask: 3.0)
    assert run.plans[0].affected == ("early",)
    assert run.end_s == 4.0, "stopped at 1 s, run again for 3 s"


def test_a_plain_function_goes_on_when_it_is_told_to_stop_and_its_result_is_nobodys():
    flow = Workflow("sync")
    revision = Revision("r", (Change("in", Op.SET, ("f",), 2),))

    @flow.node(kind="tool")
    def slow(state):
        return {"f": state["in"]["f"]}

    run = simulate(flow, {"in": {"f": 1}}, revisions=[(1.0, revision)], duration_s=lambda ask: 3.0, n_slots=1)
    kinds = [type(entry).__name__ for entry in run.machine.journal]
    assert kinds.count("Started") == 2
    assert [entry.orphaned for entry in run.machine.journal if isinstance(entry, ev.Stop)] == [True]
    assert [entry.attempt for entry in run.machine.journal if isinstance(entry, ev.Discarded)] == ["slow@1"]
    assert run.end_s == 6.0, "with one slot the second attempt waits for the first"
    assert run.outputs["slow"] == {"f": 2}
