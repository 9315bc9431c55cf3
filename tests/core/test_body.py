"""One attempt's body: what it is given, what its calls are called, and the event that it ends with."""

from __future__ import annotations

import pytest

from revise_lab import Workflow, simulate
from revise_lab.core.body import Execution, Reply
from revise_lab.core.oracle import drive
from revise_lab.errors import EndpointError, WorkflowError
from revise_lab.records.attempt import Coverage
from revise_lab.records.effect import Effect
from revise_lab.records.event import Execute, Fail, Finish
from revise_lab.records.selector import Marker, Role, Selector
from revise_lab.records.value import ABSENT, freeze

INPUTS = {"in": {"x": 1, "list": ["b", "a", "b"]}}


def executed(flow, node, parents=None, inputs=INPUTS, key=None, answers=None, **options):
    """Run one body by itself."""
    asked = []

    async def perform(ask):
        asked.append(ask)
        return answers(ask) if answers else "text"

    frozen = {name: freeze(value) for name, value in inputs.items()}
    above = {name: freeze(value) for name, value in (parents or {}).items()}
    order = Execute("n@1", node, key, 0, frozen, above)
    execution = Execution(flow.graph(), order, perform, **options)
    return drive(execution.run()), asked, execution


def flow_of(body, **options):
    flow = Workflow("one")
    flow.node(name="n", **options)(body)
    return flow


def observed(event):
    return [(str(read.selector), read.observed) for read in event.reads]


def test_a_body_ends_with_its_output_its_reads_and_its_calls():
    async def body(state, ctx):
        reply = await ctx.model(f"x is {state['in']['x']}", max_tokens=5, seed=3, stop=["\n"])
        return {"text": reply.text}

    event, asked, _ = executed(flow_of(body, code_version="7"), "n")
    assert isinstance(event, Finish)
    assert event.output == {"text": "text"}
    assert observed(event) == [("in.#kind", "object"), ("in.x", 1)]
    (call,) = event.calls
    assert call.key == asked[0].key == ("n", "7", "model", freeze(asked[0].request), 0)
    assert asked[0].request == {"prompt": "x is 1", "max_tokens": 5, "seed": 3, "stop": ("\n",)}
    assert call.response == "text"


def test_equal_calls_are_told_apart_by_their_occurrence():
    async def body(state, ctx):
        for prompt in ("a", "b", "a"):
            await ctx.model(prompt)
        await ctx.tool("t", lambda: 1)
        await ctx.tool("t", lambda: 1)

    event, _, _ = executed(flow_of(body), "n", answers=lambda ask: ask.local() if ask.local else "text")
    assert [call.occurrence for call in event.calls] == [0, 0, 1, 0, 1]
    assert len({call.key for call in event.calls}) == 5
    assert event.output == {}, "a body that returns nothing returns an empty mapping"


@pytest.mark.parametrize(
    "body",
    [lambda: {"x": 1}, lambda state: {"x": state["in"]["x"]}, lambda state, ctx: {"x": state["in"]["x"]}],
    ids=["nothing", "state", "state and context"],
)
def test_a_body_takes_what_it_names(body):
    assert executed(flow_of(body), "n")[0].output == {"x": 1}


@pytest.mark.parametrize(
    ("error", "retryable"),
    [
        (ValueError("bad"), True),
        (EndpointError("refused", retryable=False), False),
        (EndpointError("cut", retryable=True), True),
    ],
)
def test_an_exception_is_an_outcome_with_reads_and_calls(error, retryable):
    async def body(state, ctx):
        await ctx.model("first")
        if state["in"]["x"]:
            raise error

    event, _, _ = executed(flow_of(body), "n")
    assert isinstance(event, Fail)
    assert (event.error, event.retryable) == (f"{type(error).__name__}: {error}", retryable)
    assert observed(event) == [("in.#kind", "object"), ("in.x", 1)]
    assert len(event.calls) == 1


@pytest.mark.parametrize("returned", [{1, 2}, object(), {"x": {3: 4}}])
def test_an_output_that_is_not_json_like_fails_the_node(returned):
    event, _, _ = executed(flow_of(lambda state: returned), "n")
    assert event.error.startswith("ValueNotCanonical: ")


def test_what_a_body_returns_may_hold_what_it_read():
    event, _, _ = executed(flow_of(lambda state: {"all": state["in"], "part": state["in"]["list"]}), "n")
    assert event.output == {"all": freeze(INPUTS["in"]), "part": freeze(["b", "a", "b"])}
    assert ("in", freeze(INPUTS["in"])) in observed(event), "returning a view reads it whole"


def test_reads_are_reported_once():
    async def body(state, ctx):
        assert state["in"]["x"]
        await ctx.model("wait")
        assert state["in"]["x"]
        assert state["in"]["list"][0]

    reports = []

    def answers(ask):
        reports.append(execution_of[0].flush())
        reports.append(execution_of[0].flush())
        return "text"

    execution_of = []

    async def perform(ask):
        return answers(ask)

    order = Execute("n@1", "n", None, 0, freeze(INPUTS), {})
    execution_of.append(Execution(flow_of(body).graph(), order, perform))
    event = drive(execution_of[0].run())
    assert [observed(reports[0]), reports[1]] == [[("in.#kind", "object"), ("in.x", 1)], None]
    assert observed(event) == [("in.list.#kind", "array"), ("in.list[0]", "b")]


def test_a_branch_adds_its_lane_and_reads_as_control():
    flow = flow_of(lambda state: {"note": state["in"]["x"]})
    flow.branch(of="n")(lambda state, output: ["big" if state["in"]["list"] else "small", f"n{output['note']}"])
    event, _, _ = executed(flow, "n")
    assert event.output == {"note": 1, "lane": {"big": True, "n1": True}}
    roles = {read.selector[:2]: read.selector.role for read in event.reads}
    assert roles["in", ("x",)] is Role.DATA
    assert roles["in", ("list",)] is Role.CONTROL


def test_a_branch_needs_a_mapping_to_write_its_lane_in():
    flow = flow_of(lambda state: 5)
    flow.branch(of="n")(lambda state: "x")
    assert "has a branch, so it must return a mapping, not 5" in executed(flow, "n")[0].error


def test_a_body_cannot_write_where_its_branch_decides():
    """Made again without its body, the decision would be made on another output than the first time."""
    flow = flow_of(lambda state: {"lane": "fast"})
    flow.branch(of="n")(lambda state, output: output.get("lane", "fast"))
    assert "goes under 'lane' - return another key" in executed(flow, "n")[0].error


def test_a_router_only_decides():
    flow = Workflow("routed")
    flow.node(name="a")(lambda: {})
    flow.router(after="a", name="n")(lambda state: "left" if state["in"]["x"] else None)
    event, _, _ = executed(flow, "n", {"a": {}})
    assert event.output == {"lane": {"left": True}}
    assert {read.selector.role for read in event.reads} == {Role.CONTROL}


def spawning():
    flow = flow_of(lambda state: {"tasks": list(state["in"]["list"])})

    @flow.member(of="n", items="tasks")
    def m(state, ctx):
        return {"item": ctx.item, "key": ctx.key}

    return flow


def test_members_are_keyed_by_value_and_each_sees_its_own_entry():
    event, _, _ = executed(spawning(), "n")
    assert event.output == {"tasks": {"a": "a", "b": "b", "b#1": "b"}}
    member, _, _ = executed(spawning(), "m[b#1]", {"n": {"tasks": {"b": "b", "b#1": {"q": 1}}}}, key="b#1")
    assert member.output == {"item": {"q": 1}, "key": "b#1"}
    assert Selector("n", ("tasks", "b#1")) in [read.selector for read in member.reads]
    assert Selector("n", ("tasks",), Marker.MEMBERS) not in [read.selector for read in member.reads]


def test_mapping_keys_of_any_kind_name_members():
    """A spawner may use what users write: dots, brackets, hashes, signs."""
    flow = Workflow("keys")
    keys = ["a.b", "a[0]", "x]y", "#1", "n@2", "=7", " ", "é"]

    @flow.node(kind="tool")
    async def spawner(state, ctx):
        return {"tasks": {key: state["in"]["x"] for key in keys}}

    @flow.member(of="spawner", items="tasks")
    async def m(state, ctx):
        return {"key": ctx.key, "item": ctx.item}

    @flow.node(kind="join", after="m")
    async def j(state, ctx):
        return {key: state["m"][key]["key"] for key in state["m"]}

    run = simulate(flow, INPUTS)
    assert run.outputs["j"] == {key: key for key in keys}
    assert run.machine.state == "closed"


def test_a_node_of_unknown_reads_gets_plain_data_and_says_so():
    def body(state):
        state["in"]["x"] = 99
        return {"keys": sorted(state), "x": state["in"]["x"]}

    event, _, _ = executed(flow_of(body, unknown=("reads",)), "n")
    assert event.output == {"keys": ("in",), "x": 99}
    assert (event.reads, event.coverage) == ((), Coverage.UNKNOWN)


def test_loss_degrades_the_record_and_not_what_the_body_sees():
    body = flow_of(lambda state: {"x": state["in"]["x"]})
    for kept, reads in (
        (Coverage.COMPLETE, ["in.#kind", "in.x"]),
        (Coverage.COARSE, ["in.#kind", "in"]),
        (Coverage.UNKNOWN, ["in.#kind", "in"]),
    ):
        event, _, _ = executed(body, "n", loss=lambda node, selector, kept=kept: kept)
        assert event.output == {"x": 1}
        assert event.coverage is kept
        assert [text for text, _ in observed(event)] == reads


def test_effects_are_held_back_and_inert_ones_forgotten():
    async def body(state, ctx):
        ctx.stage(Effect("mail", {"to": "ana"}))
        ctx.stage(Effect("log", {"line": 1}, "I"))
        ctx.stage(Effect("book", {"seat": 1}, "X", "train"))

    event, _, _ = executed(flow_of(body), "n")
    assert [(effect.slot, effect.payload, effect.target) for effect in event.effects] == [
        ("mail", freeze({"to": "ana"}), ""),
        ("book", freeze({"seat": 1}), "train"),
    ]


@pytest.mark.parametrize("effect", [Effect(1, {}), Effect(None, {}), Effect("mail", {}, premises=["row"])])
def test_an_effect_that_no_target_could_take_is_a_failure_of_its_node(effect):
    """Slots 1 and "1" had one key, and premises that were no mapping were sent again for ever."""

    async def body(state, ctx):
        ctx.stage(effect)

    event, _, _ = executed(flow_of(body), "n")
    assert "a slot is a text, and premises are a mapping" in event.error


def test_a_reply_is_text_and_json_if_it_is():
    assert Reply('{"a": [1]}').json == {"a": [1]}
    with pytest.raises(WorkflowError, match=r"the model's reply is not JSON \(.*\): 'Sure, here"):
        assert Reply("Sure, here is JSON").json


def test_an_absent_artifact_of_a_snapshot_is_absent():
    order = Execute("n@1", "n", None, 0, freeze(INPUTS), {"p": ABSENT})
    assert order.value("p") is ABSENT
    assert order.value("nowhere") is ABSENT
    assert order.value("in") == freeze(INPUTS["in"])
