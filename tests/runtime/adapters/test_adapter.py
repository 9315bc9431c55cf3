"""What an unmodified graph may do while it is revised: one test a matter, each deterministic."""

from __future__ import annotations

import asyncio
import gc
import operator
import sqlite3
import subprocess
import sys
import time
import weakref
from typing import Annotated

import pytest

pytest.importorskip("langgraph")

from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.language_models.fake_chat_models import GenericFakeChatModel
from langchain_core.messages import AIMessage, HumanMessage
from langchain_core.runnables import RunnableConfig
from langchain_core.tools import tool
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import END, START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode, tools_condition
from langgraph.runtime import Runtime
from langgraph.types import Send, interrupt
from pydantic import BaseModel
from shapes import REQ, SHAPES, TRIP, Ask, Outbox, Req, changed, loop, nested, pydantic_state, run_virtual, sends, trip
from typing_extensions import TypedDict

from revise_lab.audit.auditor import audit
from revise_lab.errors import (
    ConfigError,
    RefusedCombination,
    ReviseLabError,
    RunBlocked,
    RunCancelled,
    RunFailed,
    StaleBase,
    WorkflowClosed,
)
from revise_lab.records import event as ev
from revise_lab.runtime.adapters import langgraph as adapter
from revise_lab.runtime.adapters import scope
from revise_lab.runtime.adapters.langgraph import Outgoing, RevisableGraph
from revise_lab.runtime.journal import Journal
from revise_lab.runtime.target import MemoryTarget


class State(TypedDict, total=False):
    req: dict
    items: list
    a: str
    b: str
    c: str
    log: Annotated[list, operator.add]


class Inner(BaseModel):
    k: int = 1
    go: str = "b"

    @property
    def double(self):
        return 2 * self.k


class Whole(BaseModel):
    req: Inner
    one: int = 0
    two: dict = {}


def chain(*nodes, checkpointer=None, schema=State, wide=False):
    graph = StateGraph(schema)
    before = START
    for node in nodes:
        graph.add_node(node)
        graph.add_edge(START if wide else before, node.__name__)
        before = node.__name__
    return graph.compile(checkpointer=checkpointer)


def counted(run, node):
    return len(run.attempts(node))


# --- revising ------------------------------------------------------------------------------------------------------------


def test_several_paths_at_once_are_one_revision():
    async def main():
        ask = Ask()
        run = RevisableGraph(trip(ask, Outbox())).start(TRIP)
        await asyncio.sleep(0.05)
        plan = await run.revise({"request.city": "Faro", "request.budget": 5})
        result = await run.result()
        assert result.state == await trip(Ask(), Outbox()).ainvoke(
            changed(TRIP, [("request.city", "Faro"), ("request.budget", 5)])
        )
        assert plan.revision == "r1"
        assert len([entry for entry in run.journal if isinstance(entry, ev.Accepted)]) == 1

    run_virtual(main())


def test_a_value_that_python_takes_for_the_old_one_is_new_all_the_same():
    seen = []

    async def a(state: State):
        await asyncio.sleep(0.1)
        seen.append(state["req"]["k"])
        return {"a": repr(state["req"]["k"])}

    async def b(state: State, runtime: Runtime):  # runs on a copy
        await asyncio.sleep(0.1)
        return {"b": repr(state["req"]["k"])}

    async def main():
        run = RevisableGraph(chain(a, b, wide=True)).start({"req": {"k": 1}})
        await asyncio.sleep(0.05)
        await run.revise("req.k", True)
        return (await run.result()).state

    assert repr(run_virtual(main())) == repr({"req": {"k": True}, "a": "True", "b": "True", "log": []})
    assert repr(seen) == "[1, True]", "the first attempt had read the old value"


def test_a_pin_that_python_takes_for_the_old_value_is_new_all_the_same():
    async def a(state: State):
        return {"req": {"k": 1, **state["req"]}}

    async def b(state: State):
        await asyncio.sleep(0.1)
        return {"b": repr(state["req"]["k"])}

    async def main():
        run = RevisableGraph(chain(a, b)).start({"req": {"go": 1}})
        await asyncio.sleep(0.05)
        await run.revise("a.req.k", 1.0)
        return (await run.result()).state

    assert repr(run_virtual(main())) == repr({"req": {"k": 1.0, "go": 1}, "b": "1.0", "log": []})


def test_the_output_of_a_node_can_be_pinned():
    async def main():
        ask = Ask()
        run = RevisableGraph(trip(ask, Outbox())).start(TRIP)
        while "verify" not in ask.calls:
            await asyncio.sleep(0.01)
        n_before = len(ask.calls)
        await run.revise("hotel.hotel", "the old inn")
        result = await run.result()
        assert result.state["hotel"] == "the old inn"
        assert ask.calls[n_before:] == ["verify"], "the pinned node itself does not run again"
        assert run.audit() == []
        return result.state

    async def without():
        async def hotel_of(node, *parts):
            answer = await ask(node, *parts)
            return "the old inn" if node == "hotel" else answer

        ask = Ask()
        return await trip(hotel_of, Outbox()).ainvoke(TRIP)

    assert run_virtual(main()) == run_virtual(without())


def test_equal_output_of_a_recomputed_node_spares_its_readers():
    async def main():
        async def a(state):
            return {"a": "same" if await ask("a", state["req"]["k"]) else ""}

        async def b(state):
            return {"b": await ask("b", state["a"])}

        ask = Ask()
        run = RevisableGraph(chain(a, b)).start({"req": {"k": 1}})
        while "b" not in ask.calls:
            await asyncio.sleep(0.01)
        await run.revise("req.k", 2)
        await run.result()
        return ask.calls

    assert run_virtual(main()) == ["a", "b", "a"]


def test_a_late_read_is_found_when_the_attempt_ends():
    async def main():
        gate = asyncio.Event()

        async def slow(state):
            await gate.wait()
            return {"a": f"k={state['req']['k']}"}

        run = RevisableGraph(chain(slow)).start({"req": {"k": 1}})
        await asyncio.sleep(0.01)
        plan = await run.revise("req.k", 2)
        assert plan.affected == (), "it has read nothing yet"
        gate.set()
        result = await run.result()
        assert result.state["a"] == "k=2"
        assert [type(entry).__name__ for entry in run.journal].count("Rejected") == 1

    run_virtual(main())


def test_a_revision_between_the_end_of_the_graph_and_the_seal_is_not_lost():
    async def main():
        async def last(state):
            asyncio.get_running_loop().call_soon(lambda: asyncio.get_running_loop().call_soon(late))
            return {"a": f"k={state['req']['k']}"}

        def late():
            if not made:
                made.append(run.revise("req.k", 2))

        made = []
        run = RevisableGraph(chain(last)).start({"req": {"k": 1}})
        result = await run.result()
        assert made
        await made[0]
        assert result.state["a"] == "k=2"

    run_virtual(main())


@pytest.mark.parametrize("n_turns", range(0, 24, 2))
def test_a_revision_at_any_turn_of_the_loop_is_taken_or_refused(n_turns):
    """Supersteps, barriers, the end: whichever turn of the event loop a revision falls into."""

    async def main():
        async def a(state):
            return {"a": state["req"]["k"]}

        async def b(state):
            return {"b": [state["a"], state["req"]["k"]]}

        run = RevisableGraph(chain(a, b)).start({"req": {"k": 1}})
        for _ in range(n_turns):
            await asyncio.sleep(0)
        try:
            await run.revise("req.k", 2)
            k = 2
        except WorkflowClosed:
            k = 1
        result = await run.result()
        assert result.state == {"req": {"k": k}, "a": k, "b": [k, k], "log": []}
        assert run.audit() == []

    run_virtual(main())


def test_a_revision_after_the_seal_is_refused_by_name():
    async def main():
        run = RevisableGraph(loop(Ask(), None)).start(REQ)
        await run.result()
        with pytest.raises(WorkflowClosed):
            await run.revise("req.k", 2)

    run_virtual(main())


@pytest.mark.parametrize("policy", ["revise", "restart"])
def test_an_attempt_that_is_stopped_before_its_first_step_has_ended_too(policy):
    """Its own code never ran, so that it stayed among the live attempts and its span had no end."""

    async def first(state):
        return {"a": str(state["req"]["k"])}

    async def second(state):
        return {"b": state["a"]}

    async def main(n_turns):
        run = RevisableGraph(chain(first, second), policy).start({"req": {"k": 0}})
        for _ in range(n_turns):
            await asyncio.sleep(0)
        for k in range(1, 12):
            run.revise("req.k", k)
            await asyncio.sleep(0)
        result = await run.result()
        assert result.state["b"] == "11"
        assert {str(attempt.state) for attempt in run.machine.attempts.values()} <= {"committed"}
        assert all(span.end_s is not None for span in run.spans)
        return sum(span.outcome == "aborted" for span in run.spans)

    assert sum(run_virtual(main(n_turns)) for n_turns in range(12)) > 0


def test_renaming_a_node_moves_the_order_of_starts_and_not_the_sets():
    def build(first, second):
        async def one(state):
            return {"a": await ask("one", state["req"]["k"])}

        async def two(state):
            return {"b": await ask("two", state["req"]["go"])}

        async def end(state):
            started.set()
            await gate.wait()
            return {"c": state["a"] + state["b"]}

        ask, started, gate = Ask(), asyncio.Event(), asyncio.Event()
        graph = StateGraph(State)
        graph.add_node(first, one)
        graph.add_node(second, two)
        graph.add_node("end", end)
        graph.add_edge(START, first)
        graph.add_edge(START, second)
        graph.add_edge([first, second], "end")
        return graph.compile(), started, gate

    async def sizes(first, second):
        found = []
        for policy in ("revise", "suffix"):
            compiled, started, gate = build(first, second)
            run = RevisableGraph(compiled, policy).start(REQ)
            await started.wait()
            plan = await run.revise("req.k", 9)
            gate.set()
            await run.result()
            found.append(len(plan.affected))
            starts = [span.node for span in run.spans][:2]
        return found, starts

    assert run_virtual(sizes("aa", "bb")) == ([2, 3], ["aa", "bb"])
    assert run_virtual(sizes("bb", "aa")) == ([2, 2], ["aa", "bb"])


# --- what is seen --------------------------------------------------------------------------------------------------------


def test_what_each_node_has_read_is_exact():
    async def main():
        run = RevisableGraph(trip(Ask(), Outbox())).start(TRIP)
        await run.result()
        return {name: [each for each in run.reads(name) if "#kind" not in each] for name in run.machine.runs}

    reads = run_virtual(main())
    assert reads["intake"] == ["request.goal"]
    assert reads["intake>"] == ["request.mode"]
    assert reads["hotel"][1:] == ["request.city", "request.budget"]
    assert reads["verify"] == ["air.way", "hotel.hotel", "log", "intake.log", "air.log", "hotel.log"]


def test_a_callback_handler_sees_what_it_always_saw_and_spoils_no_control_read():
    class Watching(BaseCallbackHandler):
        def __init__(self):
            self.inputs = []

        def on_chain_start(self, serialized, inputs, **kwargs):
            self.inputs.append(repr(inputs))

    async def main():
        handler, plain = Watching(), Watching()
        run = RevisableGraph(trip(Ask(), Outbox())).start(TRIP, {"callbacks": [handler]})
        await run.result()
        await trip(Ask(), Outbox()).ainvoke(TRIP, {"callbacks": [plain]})
        assert [each for each in run.reads("intake>") if "#kind" not in each] == ["request.mode"]
        assert sorted(handler.inputs) == sorted(plain.inputs)

    run_virtual(main())


def test_pydantic_state_is_read_field_by_field_and_stays_its_class():
    async def main():
        async def a(state):
            assert isinstance(state, Whole)
            assert state.req.double == 2 * state.req.k
            return {"one": state.req.k}

        async def b(state):
            return {"two": state.req.model_dump()}

        run = RevisableGraph(chain(a, b, schema=Whole)).start({"req": Inner()})
        result = await run.result()
        assert result.state["two"] == {"k": 1, "go": "b"}
        return {name: [each for each in run.reads(name) if "#kind" not in each] for name in ("a", "b")}

    assert run_virtual(main()) == {"a": ["req.k"], "b": ["req"]}


def test_a_write_into_the_state_is_noticed_and_reaches_nobody():
    """Stock LangGraph shows an unreturned change to every later node and to the caller (C05)."""

    async def main():
        async def a(state):
            state["items"].append("LEAK")
            return {"a": str(state["items"])}

        async def b(state):
            await asyncio.sleep(0.2)
            return {"b": str(state["items"])}

        async def c(state):
            return {"c": str(state["items"])}

        given = {"items": ["x"], "req": {}}
        graph = StateGraph(State)
        for node in (a, b, c):
            graph.add_node(node)
        graph.add_edge(START, "a")
        graph.add_edge(START, "b")
        graph.add_edge(["a", "b"], "c")
        run = RevisableGraph(graph.compile()).start(given)
        result = await run.result()
        assert given == {"items": ["x"], "req": {}}
        assert (result.state["a"], result.state["b"], result.state["c"]) == ("['x', 'LEAK']", "['x']", "['x']")
        assert result.state["items"] == ["x"]
        return run.notes["a@1"]

    notes = run_virtual(main())
    assert "runs on plain values" in notes[0]
    assert "items" in notes[0]


def test_a_list_that_a_reducer_made_is_watched_too():
    async def main():
        async def a(state):
            return {"log": ["a"]}

        async def b(state):
            state["log"].append("LEAK")
            return {"b": "b"}

        async def c(state):
            return {"c": str(state["log"])}

        run = RevisableGraph(chain(a, b, c)).start({"log": ["start"]})
        result = await run.result()
        assert result.state["c"] == "['start', 'a']"
        return run.notes["b@1"]

    assert run_virtual(main()) == ["changed log in place; the change stays with its attempt"]


def test_what_cannot_be_read_in_python_is_run_again_on_plain_values_unless_it_has_called():
    import orjson

    async def quiet(state):
        return {"a": orjson.dumps(state["req"]).decode()}

    async def calling(state):
        await GenericFakeChatModel(messages=iter([AIMessage("x")])).ainvoke("hello")
        return {"a": orjson.dumps(state["req"]).decode()}

    async def main():
        run = RevisableGraph(chain(quiet)).start({"req": {"k": 1}})
        result = await run.result()
        assert result.state["a"] == '{"k":1}'
        assert "plain values" in run.notes["quiet@1"][0]
        run = RevisableGraph(chain(calling)).start({"req": {"k": 1}})
        with pytest.raises(RunFailed, match="UntrackableRead"):
            await run.result()
        assert run.calls == {"calling@1": 1}

    run_virtual(main())


def test_a_graph_inside_a_node_is_unknown_and_the_run_says_so():
    async def inner(state):
        return {"a": f"inner {state['req']['k']}"}

    below = chain(inner)

    async def outer(state):
        return {"b": (await below.ainvoke({"req": state["req"]}))["a"]}

    async def main():
        run = RevisableGraph(chain(outer)).start({"req": {"k": 1}})
        result = await run.result()
        assert result.state["b"] == "inner 1"
        assert run.machine.runs["outer"].coverage == "unknown"
        return run.notes["outer@1"]

    assert "graph of its own" in run_virtual(main())[0]


def test_a_subgraph_that_is_a_node_is_seen_inside():
    async def main():
        ask = Ask()
        run = RevisableGraph(nested(ask, None)).start({**REQ, "res": []})
        while "after" not in ask.calls:
            await asyncio.sleep(0.01)
        n_before = len(ask.calls)
        await run.revise("req.go", "right")
        await run.result()
        assert ask.calls[n_before:] == ["other"], "the digest has one length, so 'after' is kept"
        return set(run.machine.runs)

    assert run_virtual(main()) == {"sub/s1", "sub/s2", "other", "after"}


@pytest.mark.parametrize("name", ["trip", "pydantic", "dataclass", "commands", "loop"])
def test_nothing_is_read_unseen(name):
    build, inputs, _ = SHAPES[name]
    assert run_virtual(RevisableGraph(build(Ask(), Outbox())).audit_reads(inputs)) == []


def test_a_read_behind_the_view_s_back_is_found():
    async def sly(state):
        return {"a": f"{state['req']['go']} {object.__getattribute__(state, '_raw')['req']['k']}"}

    found = run_virtual(RevisableGraph(chain(sly)).audit_reads({"req": {"go": "left", "k": 1}}))
    assert [(each.node, each.path) for each in found] == [("sly", "req.k")]


def test_sends_are_known_by_their_argument():
    async def main(change):
        ask = Ask()
        run = RevisableGraph(sends(ask, None)).start(REQ)
        while "join" not in ask.calls:
            await asyncio.sleep(0.01)
        n_before = len(ask.calls)
        await run.revise(*change)
        await run.result()
        return sorted(ask.calls[n_before:])

    assert run_virtual(main(("req.style", "y"))) == ["join", "work"]
    assert run_virtual(main(("req.n", 4))) == ["join", "plan", "work"]
    assert run_virtual(main(("req.n", 2))) == ["join", "plan"]


def test_a_loop_goes_on_from_where_it_was():
    async def main(change):
        ask = Ask()
        run = RevisableGraph(loop(ask, None)).start(REQ)
        while "tail" not in ask.calls:
            await asyncio.sleep(0.01)
        n_before = len(ask.calls)
        await run.revise(*change)
        await run.result()
        return ask.calls[n_before:]

    assert run_virtual(main(("req.limit", 4))) == ["step", "tail"]
    assert run_virtual(main(("req.limit", 2))) == ["tail"]


# --- other people's bugs -------------------------------------------------------------------------------------------------


def test_a_revision_in_mid_run_is_not_lost():
    """C01: the update reaches a node in flight and the final state."""

    async def main():
        async def plan(state):
            await asyncio.sleep(0.3)
            return {"a": str(state["req"]["budget"])}

        async def use(state):
            return {"b": str(state["req"]["budget"])}

        run = RevisableGraph(chain(plan, use)).start({"req": {"budget": 100}})
        await asyncio.sleep(0.1)
        await run.revise("req.budget", 50)
        return (await run.result()).state

    assert run_virtual(main()) == {"req": {"budget": 50}, "a": "50", "b": "50", "log": []}


def asking(till, saver):
    async def pre(state):
        return {"a": f"offer for {state['req']['k']}"}

    async def decide(state):
        await till.book(state["a"])
        answer = interrupt(f"take {state['a']}?")
        return {"b": f"{answer} {state['a']}"}

    return chain(pre, decide, checkpointer=saver)


def test_an_effect_before_a_pause_happens_once():
    """C03."""

    async def main():
        till, target = Outbox(), MemoryTarget()
        graph = RevisableGraph(
            asking(till, InMemorySaver()), effects={"charge": Outgoing(till, "book", "bank")}, targets={"bank": target}
        )
        run = graph.start({"req": {"k": 1}}, {"configurable": {"thread_id": "t"}})
        paused = await run.result()
        assert [each.value for each in paused.interrupts] == ["take offer for 1?"]
        assert target.happened == []
        await run.resume("yes")
        result = await run.result()
        assert result.state["b"] == "yes offer for 1"
        assert result.interrupts == ()
        assert [what for what, _, _ in target.happened] == ["publish"]
        assert till.sent == []

    run_virtual(main())


def test_a_revision_between_the_question_and_the_answer():
    async def main():
        run = RevisableGraph(asking(Outbox(), InMemorySaver())).start(
            {"req": {"k": 1}}, {"configurable": {"thread_id": "t"}}
        )
        await run.result()
        await run.revise("req.k", 2)
        asked = await run.result()
        assert [each.value for each in asked.interrupts] == ["take offer for 2?"]
        await run.resume("no")
        result = await run.result()
        assert result.state["b"] == "no offer for 2"
        with pytest.raises(ReviseLabError, match="asks nothing"):
            await run.resume("again")

    run_virtual(main())


def test_an_answer_is_kept_for_the_same_question_and_asked_anew_for_another():
    async def main():
        gate = asyncio.Event()

        async def pre(state):
            return {"a": f"offer for {state['req']['k']}"}

        async def decide(state):
            return {"b": f"{interrupt(state['a'])} at {state['req']['go']}"}

        async def hold(state):
            await gate.wait()
            return {"c": state["b"]}

        graph = RevisableGraph(chain(pre, decide, hold, checkpointer=InMemorySaver()))
        run = graph.start({"req": {"k": 1, "go": "left"}}, {"configurable": {"thread_id": "t"}})
        await run.result()
        await run.resume("yes")
        await asyncio.sleep(0.1)
        await run.revise("req.go", "right")
        await asyncio.sleep(0.1)
        await run.revise("req.k", 2)
        asked = await run.result()
        assert [each.value for each in asked.interrupts] == ["offer for 2"]
        await run.resume("well")
        gate.set()
        return (await run.result()).state

    assert run_virtual(main())["c"] == "well at right"


@pytest.mark.parametrize(("kind", "published"), [("K", ["publish", "compensate", "publish"]), ("X", ["publish"])])
def test_an_effect_that_left_is_replaced_or_blocks(kind, published):
    """C04: a second, unlinked send is the failure."""

    async def main():
        post, target, gate = Outbox(), MemoryTarget(), asyncio.Event()

        async def plan(state):
            return {"a": f"for {state['req']['budget']}"}

        async def send(state):
            await post.book(state["a"])
            return {"b": "sent"}

        async def hold(state):
            await gate.wait()
            return {"c": state["b"]}

        graph = RevisableGraph(
            chain(plan, send, hold),
            effects={"post": Outgoing(post, "book", "post", kind)},
            targets={"post": target},
            release="commit",
        )
        run = graph.start({"req": {"budget": 100}})
        while not target.happened:
            await asyncio.sleep(0.01)
        await run.revise("req.budget", 50)
        gate.set()
        if kind == "X":
            with pytest.raises(RunBlocked, match="send/post"):
                await run.result()
        else:
            result = await run.result()
            assert result.effects == {"send": {"post": {"what": "for 50"}}}
            assert run.audit() == []
        run.cancel()
        return [what for what, _, _ in target.happened]

    assert run_virtual(main()) == published


def test_parallel_nodes_run_once_and_a_barrier_is_the_framework_s():
    """C07: LangGraph starts B after the superstep, not before C ends; what matters here is that nothing runs twice."""

    async def main():
        async def fast(state):
            await asyncio.sleep(0.1)
            return {"a": "a"}

        async def slow(state):
            await asyncio.sleep(0.6)
            return {"c": "c"}

        async def after(state):
            return {"b": state["a"]}

        graph = StateGraph(State)
        for node in (fast, slow, after):
            graph.add_node(node)
        graph.add_edge(START, "fast")
        graph.add_edge(START, "slow")
        graph.add_edge("fast", "after")
        run = RevisableGraph(graph.compile()).start({"req": {}})
        await run.result()
        return [counted(run, node) for node in ("fast", "slow", "after")]

    assert run_virtual(main()) == [1, 1, 1]


def test_a_cancelled_run_starts_nothing_more():
    """C08."""

    async def main():
        started = []

        def node(name):
            async def body(state):
                started.append(name)
                await asyncio.sleep(0.2)
                return {"a": name}

            body.__name__ = name
            return body

        run = RevisableGraph(chain(*map(node, "pqrs"))).start({"req": {}})
        await asyncio.sleep(0.3)
        run.cancel()
        with pytest.raises(RunCancelled):
            await run.result()
        await asyncio.sleep(1.2)
        assert started == ["p", "q"]
        assert run.machine.state == "cancelled"
        assert run.audit() == []

    run_virtual(main())


def test_the_result_of_an_attempt_that_was_replaced_is_discarded():
    """C10: a sync body cannot be stopped; what it returns later belongs to an attempt that is no more."""

    def slow(state):
        k = state["req"]["k"]
        time.sleep(0.3 if k == 1 else 0.0)
        return {"a": f"k={k}"}

    async def main():
        run = RevisableGraph(chain(slow)).start({"req": {"k": 1}})
        await asyncio.sleep(0.1)
        await run.revise("req.k", 2)
        result = await run.result()
        assert result.state["a"] == "k=2"
        assert [span.outcome for span in run.attempts("slow")] == ["orphaned", "completed"]
        assert [span.attempt for span in run.attempts("slow")] == ["slow@1", "slow@2"]
        assert run.audit() == []

    asyncio.run(main())


def test_a_fan_out_works_out_the_name_of_a_send_twice_however_many_there_are(monkeypatch):
    named = []
    monkeypatch.setattr(scope, "label", lambda argument: named.append(argument) or str(argument))

    async def main(n):
        async def worker(item):
            return {"log": [item]}

        graph = StateGraph(State)
        graph.add_node("a", lambda state: {"a": "on"})
        graph.add_node(worker)
        graph.add_edge(START, "a")
        graph.add_conditional_edges("a", lambda state: [Send("worker", i) for i in range(n)], ["worker"])
        named.clear()
        result = await RevisableGraph(graph.compile()).start({"req": {}}).result()
        assert result.state["log"] == list(range(n))
        return len(named)

    assert [run_virtual(main(n)) for n in (10, 40)] == [20, 80]


def test_an_error_of_the_driver_itself_ends_the_run_and_leaves_nothing_running(monkeypatch):
    async def a(state: State):
        await asyncio.sleep(0.1)
        return {"a": "on"}

    async def b(state: State):
        await asyncio.sleep(10)

    async def main():
        run = RevisableGraph(chain(a, b, wide=True)).start({"req": {}})
        handle = run.machine.handle

        def broken(event):
            if isinstance(event, ev.Finish):
                raise OSError("the disk is full")
            return handle(event)

        run.machine.handle = broken
        with pytest.raises(OSError, match="the disk is full"):
            await asyncio.wait_for(run.result(), 1)
        assert asyncio.all_tasks() == {asyncio.current_task()}

    run_virtual(main())


def test_what_langgraph_gave_an_attempt_goes_with_its_end():
    held = []

    async def a(state: State, config: RunnableConfig):
        held.append(weakref.ref(config["callbacks"]))
        if len(held) == 1:
            await asyncio.sleep(1)
        return {"a": state["req"]["city"]}

    async def main():
        run = RevisableGraph(chain(a)).start({"req": {"city": "Porto"}})
        await asyncio.sleep(0.1)
        await run.revise("req.city", "Faro")
        assert (await run.result()).state["a"] == "Faro"
        await asyncio.sleep(0.1)
        gc.collect()
        assert [each() for each in held] == [None, None], "of the stopped one as well"
        return run

    run_virtual(main())


# --- models and tools ----------------------------------------------------------------------------------------------------


@tool
async def lookup(q: str) -> str:
    """Look it up."""
    return f"42:{q}"


def test_a_tool_node_and_a_chat_model_counted_by_attempt():
    async def main():
        model = GenericFakeChatModel(
            messages=iter(
                [
                    AIMessage("", id="m1", tool_calls=[{"name": "lookup", "args": {"q": "x"}, "id": "1"}]),
                    AIMessage("done", id="m2"),
                ]
            )
        )

        async def agent(state):
            return {"messages": [await model.ainvoke(state["messages"])]}

        graph = StateGraph(MessagesState)
        graph.add_node(agent)
        graph.add_node("tools", ToolNode([lookup]))
        graph.add_edge(START, "agent")
        graph.add_conditional_edges("agent", tools_condition)
        graph.add_edge("tools", "agent")
        run = RevisableGraph(graph.compile()).start({"messages": [HumanMessage("hi", id="h")]})
        result = await run.result()
        assert [each.content for each in result.state["messages"]] == ["hi", "", "42:x", "done"]
        assert run.calls == {"agent@1": 1, "agent#1@1": 1}
        assert [name for name in run.machine.runs if ">" not in name] == ["agent", "tools", "agent#1"]

    run_virtual(main())


LATE_IMPORT = """
import asyncio, sys
from langgraph.graph import START, StateGraph
from revise_lab import RevisableGraph
from revise_lab.serving.server import MODEL, EmbeddedServer

async def main(url):
    async def a(state):
        from openai import AsyncOpenAI
        client = AsyncOpenAI(base_url=url, api_key="none", max_retries=0)
        answer = await client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "hi"}])
        await client.close()
        return {"a": answer.choices[0].message.content}

    graph = StateGraph(dict)
    graph.add_node(a)
    graph.add_edge(START, "a")
    run = RevisableGraph(graph.compile()).start({})
    assert "openai" not in sys.modules
    await run.result()
    print(run.calls, [entry.attempt for entry in server.log])

with EmbeddedServer(ttft_s=0.001) as server:
    asyncio.run(main(server.url))
"""


@pytest.mark.slow
def test_a_client_that_a_node_imports_is_counted_too():
    done = subprocess.run([sys.executable, "-c", LATE_IMPORT], capture_output=True, text=True, check=False)
    assert done.stdout == "{'a@1': 1} ['a@1']\n", done.stderr


def test_a_prebuilt_agent_is_revised_at_its_user_turn():
    from langgraph.prebuilt import create_react_agent

    class Model(GenericFakeChatModel):
        def bind_tools(self, tools, **kwargs):
            return self

        def _generate(self, messages, *args, **kwargs):
            from langchain_core.outputs import ChatGeneration, ChatResult

            last = messages[-1]
            asked = messages[0].content
            if last.type == "human":
                call = {"name": "lookup", "args": {"q": asked}, "id": f"c-{asked}"}
                answer = AIMessage("", id=f"a-{asked}", tool_calls=[call])
            else:
                answer = AIMessage(f"it is {last.content}", id=f"b-{asked}")
            return ChatResult(generations=[ChatGeneration(message=answer)])

    async def main():
        import warnings

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            compiled = create_react_agent(Model(messages=iter([])), [lookup])
        run = RevisableGraph(compiled).start({"messages": [HumanMessage("one", id="h")]})
        await asyncio.sleep(0)
        while not run.calls:
            await asyncio.sleep(0.001)
        await run.revise("messages", [HumanMessage("two", id="h")])
        result = await run.result()
        assert [each.content for each in result.state["messages"]] == ["two", "", "42:two", "it is 42:two"]
        assert run.audit() == []

    asyncio.run(main())


# --- the run as an object ------------------------------------------------------------------------------------------------


def test_two_runs_of_one_graph_do_not_meet():
    async def main():
        compiled = trip(Ask(), Outbox())
        before = {name: (node.bound, list(node.writers)) for name, node in compiled.nodes.items()}
        graph = RevisableGraph(compiled)
        runs = [graph.start(changed(TRIP, [("request.goal", goal)])) for goal in ("talk", "rest")]
        await asyncio.sleep(0.05)
        await runs[0].revise("request.mode", "rail")
        states = [(await run.result()).state for run in runs]
        assert states[0]["way"].startswith("rail")
        assert states[1]["way"].startswith("air")
        assert before == {name: (node.bound, list(node.writers)) for name, node in compiled.nodes.items()}

    run_virtual(main())


def test_a_sealed_run_streams_like_stock():
    async def main():
        for mode in ("updates", "values", ["updates", "values"]):
            run = RevisableGraph(trip(Ask(), Outbox())).start(TRIP)
            await run.result()
            mine = [chunk async for chunk in run.replay(mode)]
            stock = [chunk async for chunk in trip(Ask(1), Outbox()).astream(TRIP, stream_mode=mode)]
            assert sorted(map(repr, mine)) == sorted(map(repr, stock))

    run_virtual(main())


def test_the_application_s_checkpointer_gets_one_clean_history():
    async def main():
        saver, ask = InMemorySaver(), Ask()
        compiled = trip(ask, Outbox(), saver)
        config = {"configurable": {"thread_id": "t"}}
        run = RevisableGraph(compiled).start(TRIP, config)
        await asyncio.sleep(0.1)
        await run.revise("request.mode", "rail")
        result = await run.result()
        assert (await compiled.aget_state(config)).values == result.state
        steps = [each.metadata["step"] async for each in compiled.aget_state_history(config)]
        other = trip(Ask(), Outbox(), InMemorySaver())
        await other.ainvoke(changed(TRIP, [("request.mode", "rail")]), config)
        assert steps == [each.metadata["step"] async for each in other.aget_state_history(config)]

    run_virtual(main())


def test_what_leaves_is_in_the_journal_before_it_does(tmp_path):
    class Looking(MemoryTarget):
        def publish(self, key, payload, premises):
            seen.append([str(each.state) for each in run.journal if isinstance(each, ev.Effected)])
            with sqlite3.connect(path) as file:
                stored.append(file.execute("SELECT count(*) FROM entries WHERE body LIKE '%dispatched%'").fetchone()[0])
            return super().publish(key, payload, premises)

    path, seen, stored, outbox = tmp_path / "trip.journal", [], [], Outbox()
    effects, targets = {"book": Outgoing(outbox, "book", "world")}, {"world": Looking()}

    async def main():
        nonlocal run
        run = RevisableGraph(trip(Ask(), outbox), effects=effects, targets=targets).start(TRIP, journal=path)
        await asyncio.sleep(0.05)
        await run.revise("request.city", "Faro")
        await run.result()

    run = None
    run_virtual(main())
    assert (seen[0][-1], stored) == ("dispatched", [1])
    with Journal(path) as journal:
        entries = list(journal.entries())
    assert entries == run.journal
    assert audit(entries) == []
    with pytest.raises(ReviseLabError, match="holds a run already"):
        run_virtual(started(path))


async def started(path):
    RevisableGraph(trip(Ask(), Outbox())).start(TRIP, journal=path)


def test_a_whole_value_that_was_refused_does_not_reach_a_node():
    async def main():
        gate = asyncio.Event()

        async def a(state):
            await gate.wait()
            return {"one": state.req.k}

        run = RevisableGraph(chain(a, schema=Whole, wide=True)).start({"req": Inner()})
        await asyncio.sleep(0.01)
        with pytest.raises(StaleBase):
            await run.revise("req", {"other": 1}, base=7)
        await run.revise("req.go", "n")
        gate.set()
        assert (await run.result()).state["req"] == Inner(go="n")

    run_virtual(main())


def test_a_failed_node_can_be_revised_away():
    async def main():
        async def fails(state):
            if state["req"]["k"] == 1:
                raise ValueError("no k=1")
            return {"a": "fine"}

        run = RevisableGraph(chain(fails)).start({"req": {"k": 1}})
        with pytest.raises(RunFailed, match="no k=1"):
            await run.result()
        await run.revise("req.k", 2)
        return (await run.result()).state["a"]

    assert run_virtual(main()) == "fine"


def test_an_error_that_came_of_what_was_replaced_is_nobody_s():
    """The node fails on what it had read before the revision reached it; its error is as stale as an output would be."""

    async def main():
        async def fails(state):
            await asyncio.sleep(1)
            if state["req"]["k"] == 1:
                raise ValueError("no k=1")
            return {"a": f"fine with {state['req']['k']}"}

        run = RevisableGraph(chain(fails)).start({"req": {"k": 1}})
        await asyncio.sleep(0.5)
        await run.revise("req.k", 2)
        assert (await run.result()).state["a"] == "fine with 2"
        return counted(run, "fails")

    assert run_virtual(main()) <= 2


@pytest.mark.parametrize("error", ["InvalidUpdateError", "GraphRecursionError"])
def test_an_error_of_the_graph_itself_seals_nothing_and_can_be_revised_away(error):
    """All nodes are done, and LangGraph refuses what they have written, or to go on."""

    async def main():
        outbox, target = Outbox(), MemoryTarget()

        async def mail(state):
            await outbox.book("x")
            return {"a": "sent"}

        async def other(state):
            return {"a" if state["req"]["k"] == 1 and error == "InvalidUpdateError" else "b": "other"}

        graph = StateGraph(State)
        for node in (mail, other):
            graph.add_node(node)
            graph.add_edge(START, node.__name__)
        graph.add_conditional_edges("other", lambda s: "other" if s["req"]["k"] == 1 else END, ["other", END])
        effects = {"mail": Outgoing(outbox, "book", "bank")}
        run = RevisableGraph(graph.compile(), effects=effects, targets={"bank": target}).start(
            {"req": {"k": 1}}, {"recursion_limit": 5}
        )
        with pytest.raises(
            RunFailed, match="Recursion limit" if error == "GraphRecursionError" else "Can receive only one"
        ):
            await run.result()
        assert (run.machine.state, target.happened) == ("open", []), "nothing leaves before the close, and this is none"
        await run.revise("req.k", 2)
        return (await run.result()).state, len(target.happened)

    state, n_sent = run_virtual(main())
    assert (state["a"], state["b"], n_sent) == ("sent", "other", 1)


def test_any_runnable_is_a_node():
    """Some cannot be hashed."""
    from langchain_core.runnables import RunnableLambda

    async def half(state):
        return state["req"]["k"] / 2

    async def named(number):
        return {"a": f"half is {number}"}

    async def main():
        graph = StateGraph(State)
        graph.add_node("half", RunnableLambda(half) | RunnableLambda(named))
        graph.add_edge(START, "half")
        run = RevisableGraph(graph.compile()).start({"req": {"k": 4}})
        await run.revise("req.k", 8)
        return (await run.result()).state["a"]

    assert run_virtual(main()) == "half is 4.0"


def test_what_could_only_end_half_done_is_refused_at_once():
    async def one(state):
        return {"a": "one"}

    graph = StateGraph(State)
    graph.add_node(one)
    graph.add_edge(START, "one")
    for option in ("interrupt_before", "interrupt_after"):
        compiled = graph.compile(checkpointer=InMemorySaver(), **{option: ["one"]})
        with pytest.raises(RefusedCombination, match=f"with {option} ends there.* call interrupt"):
            RevisableGraph(compiled)
    with pytest.raises(ConfigError, match="needs a thread - start"):
        RevisableGraph(graph.compile(checkpointer=InMemorySaver())).start({"req": {"k": 1}})


def test_changed_internals_mean_a_full_restart_and_a_warning(monkeypatch):
    """The internals are really gone here: nothing but ``ainvoke`` of the user's own graph is left."""
    monkeypatch.setitem(sys.modules, "langgraph.graph._branch", None)
    monkeypatch.delitem(sys.modules, "revise_lab.runtime.adapters.instrument")
    monkeypatch.setattr(adapter, "_PROBED", [])
    outbox, ask, target = Outbox(), Ask(), MemoryTarget()
    effects = {"book": Outgoing(outbox, "book", "world")}
    with pytest.warns(RuntimeWarning, match="restarts the whole graph"):
        graph = RevisableGraph(trip(ask, outbox), effects=effects, targets={"world": target})
    assert graph.policy.name == "restart"

    async def main():
        run = graph.start(TRIP)
        while "verify" not in ask.calls:
            await asyncio.sleep(0.01)
        await run.revise("request.budget", 5)
        n_before = len(ask.calls)
        result = await run.result()
        stock = await trip(Ask(), Outbox()).ainvoke(changed(TRIP, [("request.budget", 5)]))
        assert result.state == stock
        assert sorted(ask.calls[n_before:]) == ["air", "hotel", "intake", "verify"]
        assert [payload["what"] for _, _, payload in target.happened] == [f"{stock['hotel']} {stock['way']}"]
        assert "_branch" in run.notes["the graph@2"][0]
        assert run.audit() == []

    run_virtual(main())


def test_the_probe_passes_here():
    assert adapter.probe(again=True) == ""


def test_model_input_and_explain():
    async def main():
        ask = Ask()
        run = RevisableGraph(pydantic_state(ask, None)).start({"req": Req()})
        while "c" not in ask.calls:
            await asyncio.sleep(0.01)
        await run.revise("req.go", "n")
        result = await run.result()
        assert run.value("req", "go") == "n"
        assert "because" in run.explain("c") or "r1" in run.explain("c")
        assert result.state["req"] == Req(go="n")

    run_virtual(main())
