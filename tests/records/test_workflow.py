"""Workflows: what can be declared, in which order it runs, and by what name members go."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from revise_lab.errors import RefusedCombination, WorkflowError
from revise_lab.records.selector import Marker, Role, Selector
from revise_lab.records.value import Arr, Obj, canonical_text, equal, freeze
from revise_lab.records.workflow import LANE, Workflow, lanes, with_keys


async def body(state):
    return {}


def declared(*nodes, **options):
    """Return a workflow from lines like ``"c < a b"``."""
    flow = Workflow("flow")
    for line in nodes:
        name, _, parents = line.partition("<")
        flow.node(name=name.strip(), after=parents.split(), **options)(body)
    return flow


# --- refusals ---


def _cycle(flow):
    flow.node(name="c", after=("a", "d"))(body)
    flow.node(name="d", after="c")(body)


def _unknown_when(flow):
    flow.branch(of="a")(lambda state: "x")
    flow.node(name="c", after="a", when=("z", "x"))(body)


def _two_routers(flow):
    flow.branch(of="a")(lambda state: "x")
    flow.branch(of="b")(lambda state: "x")
    flow.node(name="c", after="a", when="x")(body)


def _member_after_member(flow):
    flow.member(of="a", items="tasks", name="m")(body)
    flow.member(of="b", items="tasks", name="n", after="m")(body)


@pytest.mark.parametrize(
    ("declare", "message"),
    [
        (_cycle, r"workflow 'flow' has a cycle through c, d - remove one of these edges"),
        (lambda f: f.node(name="a")(body), r"workflow 'flow' has two nodes named 'a' - rename one"),
        (lambda f: f.member(of="a", items="x", name="b")(body), r"two nodes named 'b'"),
        (lambda f: f.node(name="c", after="z")(body), r"node 'c': after= names node 'z'.*declared so far: a, b"),
        (lambda f: f.node(name="c", after="c")(body), r"cycle through c"),
        (lambda f: f.branch(of="z")(lambda s: "x"), r"branch names node 'z'.*does not have"),
        (lambda f: f.member(of="z", items="x", name="m")(body), r"names node 'z'"),
        (_unknown_when, r"node 'c': when= names node 'z'"),
        (_two_routers, r"node 'c': when='x' - 2 nodes decide lanes \(a, b\), write when=\(router, lane\)"),
        (lambda f: f.node(name="c", after="a", when="x")(body), r"0 nodes decide lanes \(none\)"),
        (lambda f: f.node(name="c", after="a", when=("a", "x"))(body), r"when= names 'a', which decides no lane"),
        (_member_after_member, r"member 'n' comes after member 'm' - put a join between them"),
        (lambda f: f.node(name="a.b")(body), r"'a\.b' holds a character of paths"),
        (lambda f: f.node(name="a[0]")(body), r"holds a character of paths"),
        (lambda f: f.node(name="c", needs="most")(body), r"needs='most' - write 'any' or 'all'"),
        (lambda f: f.node(name="c", unknown=["smell"])(body), r"unknown=\['smell'\] - write reads, edges or writes"),
    ],
)
def test_what_cannot_be_built_is_named(declare, message):
    flow = declared("a", "b < a")

    def build():
        declare(flow)
        flow.graph()

    with pytest.raises(WorkflowError, match=message):
        build()


def test_a_router_that_calls_out_is_refused():
    with pytest.raises(RefusedCombination, match=r"'r' has kind 'router'.*use @workflow\.router, or a model node"):
        declared("a").node(name="r", kind="router", after="a")(body)


# --- order ---


@pytest.mark.parametrize(
    ("nodes", "order"),
    [
        (["a", "b", "c"], "a b c"),
        (["z", "a", "m"], "z a m"),
        (["a < b", "b"], "b a"),
        (["d < c b", "c < a", "b < a", "a"], "a c b d"),
        (["sink < x", "free", "x"], "free x sink"),
        (["a", "x < b", "b", "y < a", "c"], "a b x y c"),
    ],
)
def test_the_order_is_topological_and_ties_go_by_declaration(nodes, order):
    graph = declared(*nodes).graph()
    assert graph.order == tuple(order.split())
    assert [graph.position[name] for name in graph.order] == list(range(len(nodes)))


@given(st.data())
def test_the_order_is_the_first_in_declaration_order(data):
    size = data.draw(st.integers(1, 7))
    names = data.draw(st.permutations([f"n{i}" for i in range(size)]))
    hidden = data.draw(st.permutations(names))
    parents = {
        name: sorted(data.draw(st.sets(st.sampled_from(hidden[:at]), max_size=3)) if at else ())
        for at, name in enumerate(hidden)
    }
    graph = declared(*(f"{name} < {' '.join(parents[name])}" for name in names)).graph()
    done, expected = set(), []
    while len(expected) < size:
        first = next(name for name in names if name not in done and done.issuperset(parents[name]))
        done.add(first)
        expected.append(first)
    assert list(graph.order) == expected
    for name in names:
        closure, todo = set(), list(parents[name])
        while todo:
            closure.add(parent := todo.pop())
            todo.extend(parents[parent])
        assert set(graph.ancestors(name)) == closure
        assert list(graph.ancestors(name)) == [each for each in expected if each in closure]
    assert sorted(graph.edges()) == sorted((parent, name) for name in names for parent in parents[name])


def test_the_router_becomes_a_parent_and_the_lane_a_control_read():
    flow = declared("a", "b")
    flow.router(after="a", name="r")(lambda state: "left")
    flow.node(name="c", after="b", when="left")(body)
    graph = flow.graph()
    assert graph.nodes["c"].parents == ("b", "r")
    assert graph.nodes["c"].when == ("r", "left")
    assert graph.nodes["c"].activation() == Selector("r", (LANE, "left"), Marker.HAS, Role.CONTROL)
    assert graph.nodes["b"].activation() is None


def test_a_member_follows_its_spawner_and_reads_its_own_existence():
    flow = declared("a", "b")
    flow.member(of="b", items="tasks", name="m", after="a")(body)
    flow.node(name="j", after="m", kind="join")(body)
    graph = flow.graph()
    assert graph.nodes["m"].parents == ("b", "a")
    assert graph.nodes["m"].activation("k") == Selector("b", ("tasks", "k"), Marker.HAS, Role.CONTROL)
    assert graph.order == ("a", "b", "m", "j")


def test_declaring_more_makes_the_graph_anew():
    flow = declared("a")
    before = flow.graph()
    assert flow.graph() is before
    flow.node(name="b", after="a")(body)
    assert flow.graph().order == ("a", "b")
    flow.branch(of="a")(lambda state: "x")
    assert flow.graph().nodes["a"].branch is not None
    assert before.order == ("a",)


# --- decisions ---


@pytest.mark.parametrize(
    ("decision", "taken"), [("left", ["left"]), (["b", "a"], ["a", "b"]), (None, []), ([], []), (("x", "x"), ["x"])]
)
def test_a_decision_names_lanes(decision, taken):
    assert equal(lanes(decision), freeze(dict.fromkeys(taken, True)))


@pytest.mark.parametrize("decision", [["a", 1], [None], [["a"]], 5, True])
def test_a_decision_that_names_no_lane_is_refused(decision):
    with pytest.raises(WorkflowError, match="return the name of a lane"):
        lanes(decision)


# --- identity of members ---


def keyed(entries):
    output = with_keys(freeze({"tasks": entries, "note": "kept"}), ("tasks",))
    assert output["note"] == "kept"
    return output["tasks"]


def test_members_are_named_by_their_value():
    assert list(keyed(["paris", "rome", "paris"])) == ["paris", "paris#1", "rome"]
    assert equal(keyed([{"q": 1}, 7])["=7"], 7)
    assert len(keyed([1, 1.0, True, "1", "=1", None, "", [], {}, "#", "a]", "[a"])) == 12


def test_a_mapping_names_its_members_itself():
    assert equal(keyed({"second": 1, "first": 2}), freeze({"first": 2, "second": 1}))


def test_a_spawner_without_a_list_is_refused():
    for entries in (None, 3, "abc"):
        with pytest.raises(WorkflowError, match=r"returned no list or mapping under 'tasks'"):
            keyed(entries)
    with pytest.raises(WorkflowError, match=r"returned no list or mapping under 'tasks'"):
        with_keys(freeze({"other": []}), ("tasks",))


ENTRIES = st.lists(
    st.sampled_from(["a", "b", "=1", 1, 1.0, True, "1", None, "", "x#1", "x"]) | st.from_type(Obj), max_size=5
)


@given(ENTRIES, st.data())
def test_an_insertion_renames_nobody(entries, data):
    before = keyed(entries)
    assert sorted(map(canonical_text, before.values())) == sorted(canonical_text(freeze(entry)) for entry in entries)
    again = data.draw(st.sampled_from(entries) if entries else st.just("a")) if data.draw(st.booleans()) else "new"
    at = data.draw(st.integers(0, len(entries)))
    after = keyed([*entries[:at], again, *entries[at:]])
    assert set(before) <= set(after)
    assert len(after) == len(entries) + 1
    assert all(equal(after[key], before[key]) for key in before)


@given(ENTRIES, st.data())
def test_names_do_not_depend_on_the_order(entries, data):
    assert equal(keyed(entries), keyed(data.draw(st.permutations(entries))))
    assert isinstance(keyed(entries), Obj)
    assert not isinstance(keyed(entries), Arr)


@pytest.mark.parametrize(
    "options", [{"retries": "3"}, {"retries": -1}, {"timeout_s": "1"}, {"timeout_s": float("nan")}]
)
def test_retries_and_timeouts_are_numbers(options):
    with pytest.raises(WorkflowError, match="write a number, from 0 on"):
        Workflow("odd").node(name="n", **options)(lambda state: {})


def test_a_member_decides_for_nobody_else():
    """The machine looked for one node of the member's name: KeyError."""
    flow = Workflow("many")
    flow.node(name="spawn")(lambda state: {"items": ["a"]})
    flow.member(of="spawn", items="items", name="one")(lambda state, ctx: {})
    flow.branch(of="one")(lambda state: "x")
    flow.node(name="then", after="one", when="x")(lambda state: {})
    with pytest.raises(WorkflowError, match=r"'then': when= names the member 'one'.*join"):
        flow.graph()
