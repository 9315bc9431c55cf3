"""Small LangGraph applications, one of each shape, and a loop on which time costs nothing.

Each is written as a user would write it. ``Ask`` stands for the model: it takes time that depends on the seed, and its
answer is a digest of what it was asked, so that any stale value shows in the state.
"""

from __future__ import annotations

import asyncio
import copy
import operator
import random
import selectors
import sys
import warnings
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Annotated, Any

from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage, HumanMessage
from langchain_core.outputs import ChatGeneration, ChatResult
from langchain_core.tools import tool
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import END, START, MessagesState, StateGraph
from langgraph.managed import RemainingSteps
from langgraph.prebuilt import ToolNode, create_react_agent, tools_condition
from langgraph.types import Command, RetryPolicy, Send, interrupt
from pydantic import BaseModel
from typing_extensions import TypedDict

from revise_lab.workloads.supplier import langgraph as supplier


class _Inline(ThreadPoolExecutor):
    def submit(self, fn, /, *args, **kwargs):
        done = Future()
        try:
            done.set_result(fn(*args, **kwargs))
        except BaseException as error:
            done.set_exception(error)
        return done


class _Clock(selectors.DefaultSelector):
    now_s = 0.0

    def select(self, timeout=None):
        if timeout:
            self.now_s += timeout
        return super().select(0 if timeout is not None else None)


class VirtualLoop(asyncio.SelectorEventLoop):
    """Jumps to the next timer when nothing else is to be done; sync code runs inline."""

    def __init__(self):
        self.clock = _Clock()
        super().__init__(self.clock)
        self.set_default_executor(_Inline(max_workers=1))

    def time(self):
        return self.clock.now_s


def run_virtual(work):
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(work)


class Ask:
    """The model of a shape: counts calls by node, answers by digest, after a time that hangs on the seed."""

    def __init__(self, seed=0, scale_s=0.1):
        self.calls, self.random, self.scale_s = [], random.Random(seed), scale_s
        self.asked = []
        """(attempt, task, answer) of every call; no attempt and no task in a run by LangGraph itself."""

    def note(self, node, *parts):
        adapter = sys.modules.get("revise_lab.runtime.adapters.calls")
        attempt = adapter and adapter.ATTEMPT.get()
        answer = f"{node}:{blake2b(repr(parts).encode(), digest_size=4).hexdigest()}"
        self.calls.append(node)
        self.asked.append((*((attempt.order.attempt, attempt.order.node) if attempt else (None, None)), answer))
        return answer

    async def __call__(self, node, *parts):
        answer = self.note(node, *parts)
        await asyncio.sleep(self.scale_s * (0.2 + self.random.random()))
        return answer


class Outbox:
    def __init__(self):
        self.sent = []

    async def book(self, what):
        self.sent.append(what)

    async def file(self, text):
        self.sent.append(text)


class Trip(TypedDict, total=False):
    request: dict
    brief: str
    way: str
    hotel: str
    verdict: str
    receipt: str
    log: Annotated[list, operator.add]


def trip(ask, outbox, checkpointer=None):
    async def intake(state):
        return {"brief": await ask("intake", state["request"]["goal"]), "log": ["intake"]}

    async def air(state):
        return {"way": await ask("air", state["request"]["city"], state["brief"]), "log": ["air"]}

    async def rail(state):
        return {"way": await ask("rail", state["request"]["city"]), "log": ["rail"]}

    async def hotel(state):
        request = state["request"]
        return {"hotel": await ask("hotel", request["city"], request.get("budget")), "log": ["hotel"]}

    async def verify(state):
        return {"verdict": await ask("verify", state["way"], state["hotel"], state["log"])}

    async def book(state):
        await outbox.book(f"{state['hotel']} {state['way']}")
        return {"receipt": "booked", "log": ["book"]}

    graph = StateGraph(Trip)
    for node in (intake, air, rail, hotel, verify, book):
        graph.add_node(node)
    graph.add_edge(START, "intake")
    graph.add_conditional_edges("intake", lambda s: [s["request"]["mode"], "hotel"], ["air", "rail", "hotel"])
    for node in ("air", "rail", "hotel"):
        graph.add_edge(node, "verify")
    graph.add_edge("verify", "book")
    graph.add_edge("book", END)
    return graph.compile(checkpointer=checkpointer)


TRIP = {"request": {"goal": "talk", "city": "Porto", "budget": 900, "mode": "air"}, "log": ["start"]}
TRIP_CHANGES = [
    ("request.goal", "rest"), ("request.city", "Faro"), ("request.budget", 700), ("request.mode", "rail"),
    ("request.mode", "air"), ("request.unread", 1), ("log", ["later"]),
]  # fmt: skip


class Fan(TypedDict, total=False):
    req: dict
    items: list
    res: Annotated[list, operator.add]
    fin: str


def sends(ask, outbox):
    async def plan(state):
        await ask("plan", state["req"]["n"])
        return {"items": [f"it{i}" for i in range(state["req"]["n"])]}

    def fan(state):
        return [Send("work", {"one": x, "style": state["req"]["style"] if x == "it0" else "-"}) for x in state["items"]]

    async def work(argument):
        return {"res": [await ask("work", argument["one"], argument["style"])]}

    async def join(state):
        return {"fin": await ask("join", sorted(state["res"]))}

    graph = StateGraph(Fan)
    for node in (plan, work, join):
        graph.add_node(node)
    graph.add_edge(START, "plan")
    graph.add_conditional_edges("plan", fan, ["work"])
    graph.add_edge("work", "join")
    return graph.compile()


class Goto(TypedDict, total=False):
    req: dict
    one: str
    fin: str
    n: int
    res: Annotated[list, operator.add]


def commands(ask, outbox):
    async def first(state):
        one = await ask("first", state["req"]["k"])
        return Command(update={"one": one}, goto="left" if state["req"]["go"] == "left" else ["right", "side"])

    async def left(state):
        return {"fin": await ask("left", state["one"])}

    async def right(state):
        return Command(update={"fin": await ask("right", state["one"])}, goto=Send("side", {"req": {"k": 5}}))

    async def side(state):
        return {"res": [await ask("side", state["req"]["k"])]}

    graph = StateGraph(Goto)
    graph.add_node(first, destinations=("left", "right", "side"))
    graph.add_node(right, destinations=("side",))
    graph.add_node(left)
    graph.add_node(side)
    graph.add_edge(START, "first")
    return graph.compile()


def loop(ask, outbox):
    async def step(state):
        n = state.get("n", 0)
        return {"n": n + 1, "res": [await ask("step", n, state["req"]["k"])]}

    async def tail(state):
        return {"fin": await ask("tail", state["n"], len(state["res"]))}

    graph = StateGraph(Goto)
    graph.add_node(step)
    graph.add_node(tail)
    graph.add_edge(START, "step")
    graph.add_conditional_edges("step", lambda s: "step" if s["n"] < s["req"]["limit"] else "tail", ["step", "tail"])
    return graph.compile()


class Req(BaseModel):
    k: int = 1
    go: str = "b"


class Model(BaseModel):
    req: Req = Req()
    one: str = ""
    fin: str = ""
    res: Annotated[list, operator.add] = []


def pydantic_state(ask, outbox):
    async def a(state: Model):
        return {"one": await ask("a", state.req.k)}

    async def b(state: Model):
        return {"fin": await ask("b", state.one)}

    async def c(state: Model):
        return {"res": [await ask("c", state.req.go)]}

    async def d(state: Model):
        return {"res": [await ask("d", len(state.res), state.fin)]}

    graph = StateGraph(Model)
    for node in (a, b, c, d):
        graph.add_node(node)
    graph.add_edge(START, "a")
    graph.add_conditional_edges("a", lambda s: ["b", "c"] if s.req.go == "b" else ["c"], ["b", "c"])
    graph.add_edge("c", "d")
    return graph.compile()


@dataclass
class Inner:
    k: int = 1
    go: str = "b"


@dataclass
class Data:
    req: Inner = field(default_factory=Inner)
    one: str = ""
    fin: str = ""
    res: Annotated[list, operator.add] = field(default_factory=list)


def dataclass_state(ask, outbox):
    async def a(state: Data):
        return {"one": await ask("a", state.req.k)}

    async def b(state: Data):
        return {"fin": await ask("b", state.one), "res": [await ask("b2", state.req.go)]}

    async def c(state: Data):
        return {"res": [await ask("c", state.req.go)]}

    async def d(state: Data):
        return {"fin": await ask("d", state.fin, *state.res)}

    graph = StateGraph(Data)
    for node in (a, b, c, d):
        graph.add_node(node)
    graph.add_edge(START, "a")
    graph.add_edge(START, "c")
    graph.add_edge("a", "b")
    graph.add_edge(["b", "c"], "d")
    return graph.compile()


def nested(ask, outbox, checkpointer=None):
    async def s1(state):
        return {"one": await ask("s1", state["req"]["k"]), "res": ["s1"]}

    async def s2(state):
        return {"fin": await ask("s2", state["one"], state["res"])}

    async def other(state):
        return {"n": len(await ask("other", state["req"]["go"]))}

    async def after(state):
        return {"fin": await ask("after", state["fin"], state["n"])}

    below = StateGraph(Goto)
    below.add_node(s1)
    below.add_node(s2)
    below.add_edge(START, "s1")
    below.add_edge("s1", "s2")
    graph = StateGraph(Goto)
    graph.add_node("sub", below.compile())
    graph.add_node(other)
    graph.add_node(after)
    graph.add_edge(START, "sub")
    graph.add_edge(START, "other")
    graph.add_edge(["sub", "other"], "after")
    return graph.compile(checkpointer=checkpointer)


def retries(ask, outbox):
    failed = set()

    async def flaky(state):
        one = await ask("flaky", state["req"]["k"])
        if one not in failed:
            failed.add(one)
            raise ConnectionError("once")
        return {"one": one}

    async def tail(state):
        return {"fin": await ask("tail", state["one"], state["req"]["go"])}

    graph = StateGraph(Goto)
    policy = RetryPolicy(initial_interval=0.01, jitter=False, max_attempts=3, retry_on=ConnectionError)
    graph.add_node("flaky", flaky, retry_policy=policy)
    graph.add_node(tail)
    graph.add_edge(START, "flaky")
    graph.add_edge("flaky", "tail")
    return graph.compile()


def sync_nodes(ask, outbox):
    def a(state):
        return {"one": ask.note("a", state["req"]["k"])}

    def b(state):
        return {"res": [ask.note("b", state["req"]["go"])]}

    async def wait(state):
        return {"n": len(await ask("wait", state["one"]))}

    def c(state):
        return {"fin": ask.note("c", state["one"], state["res"])}

    graph = StateGraph(Goto)
    for node in (a, b, wait, c):
        graph.add_node(node)
    graph.add_edge(START, "a")
    graph.add_edge(START, "b")
    graph.add_edge("a", "wait")
    graph.add_edge(["wait", "b"], "c")
    return graph.compile()


def asks(ask, outbox):
    async def pre(state):
        return {"one": await ask("pre", state["req"]["k"])}

    async def decide(state):
        one = state["one"]
        await outbox.book(one)
        return {"fin": f"{interrupt(f'take {one}?')} at {state['req']['go']}"}

    async def tail(state):
        return {"res": [await ask("tail", state["fin"])]}

    graph = StateGraph(Goto)
    for node in (pre, decide, tail):
        graph.add_node(node)
    graph.add_edge(START, "pre")
    graph.add_edge("pre", "decide")
    graph.add_edge("decide", "tail")
    return graph.compile(checkpointer=InMemorySaver())


def answer_to(question):
    return f"yes, {question}"


class Talker(BaseChatModel):
    """Asks for a look-up on a person's turn, and sums up after it."""

    ask: Any

    @property
    def _llm_type(self):
        return "talker"

    def bind_tools(self, tools, **kwargs):
        return self

    def _generate(self, messages, *args, **kwargs):
        raise NotImplementedError

    async def _agenerate(self, messages, *args, **kwargs):
        answer = await self.ask("agent", *(each.content for each in messages))
        call = {"name": "lookup", "args": {"q": answer}, "id": f"call {answer}"}
        calls = [call] if messages[-1].type == "human" else []
        message = AIMessage("" if calls else answer, id=answer, tool_calls=calls)
        return ChatResult(generations=[ChatGeneration(message=message)])


def looking_up(ask):
    @tool
    async def lookup(q: str) -> str:
        """Look it up."""
        return await ask("lookup", q)

    return lookup


class Talk(MessagesState, total=False):
    req: dict
    fin: str


def tools(ask, outbox):
    model = Talker(ask=ask)

    async def agent(state):
        return {"messages": [await model.ainvoke(state["messages"])]}

    async def close(state):
        return {"fin": await ask("close", state["messages"][-1].content, state["req"]["k"])}

    graph = StateGraph(Talk)
    graph.add_node(agent)
    graph.add_node("tools", ToolNode([looking_up(ask)]))
    graph.add_node(close)
    graph.add_edge(START, "agent")
    graph.add_conditional_edges("agent", tools_condition, {"tools": "tools", "__end__": "close"})
    graph.add_edge("tools", "agent")
    return graph.compile()


def react(ask, outbox):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return create_react_agent(Talker(ask=ask), [looking_up(ask)])


def ten(ask, outbox):
    return supplier.build(lambda prompt: ask(prompt.split()[0], prompt), outbox)


def brief(ask, outbox):
    return supplier.build_brief(lambda prompt: ask(prompt.split()[0], prompt))


class Odd(TypedDict, total=False):
    req: dict
    marks: Annotated[dict, operator.or_]
    log: Annotated[list, operator.add]
    left: RemainingSteps


class Secret(TypedDict):
    secret: str


def odd(ask, outbox):
    """A key that only one node knows of, merged mappings, steps that are left, a send of a send, a late join."""

    async def lead(state):
        return {"secret": await ask("lead", state["req"]["k"])}

    async def knows(state: Secret):
        return {"marks": {"knows": await ask("knows", state["secret"])}}

    async def side(state):
        return {"marks": {"side": await ask("side", state["req"]["go"])}, "log": ["side"]}

    async def opens(state):
        leaves = [Send("leaf", {"i": i, "style": state["req"]["style"]}) for i in range(state["req"]["n"])]
        return Command(update={"marks": {"left": state["left"]}}, goto=leaves)

    async def leaf(item):
        said = await ask("leaf", item["i"], item["style"])
        return Command(update={"log": [said]}, goto=[Send("twig", {"of": item["i"], "said": said})])

    async def twig(item):
        return {"marks": {f"twig {item['of']}": await ask("twig", item["said"])}}

    async def late(state):
        return {"log": [await ask("late", sorted(state["marks"].items()), len(state["log"]))]}

    graph = StateGraph(Odd)
    graph.add_node(lead)
    graph.add_node("knows", knows, input_schema=Secret)
    graph.add_node(side)
    graph.add_node("opens", opens, destinations=("leaf",))
    graph.add_node("leaf", leaf, destinations=("twig",))
    graph.add_node(twig)
    graph.add_node("late", late, defer=True)
    for before, name in (("lead", "knows"), ("knows", "late"), ("side", "late"), ("twig", "late")):
        graph.add_edge(before, name)
    for name in ("lead", "side", "opens"):
        graph.add_edge(START, name)
    return graph.compile()


REQ = {"req": {"n": 3, "style": "x", "k": 1, "go": "left", "limit": 3}}
REQ_CHANGES = [("req.k", 7), ("req.go", "right"), ("req.go", "left"), ("req.k", 1), ("req.limit", 4), ("req.limit", 2)]
SHAPES = {
    "trip": (trip, TRIP, TRIP_CHANGES),
    "trip_saved": (lambda ask, outbox: trip(ask, outbox, InMemorySaver()), TRIP, TRIP_CHANGES),
    "sends": (sends, REQ, [("req.style", "y"), ("req.n", 4), ("req.n", 2), ("req.n", 3), ("req.style", "x")]),
    "commands": (commands, REQ, REQ_CHANGES),
    "loop": (loop, REQ, REQ_CHANGES),
    "pydantic": (pydantic_state, {"req": Req()}, [("req.k", 3), ("req.go", "n"), ("req.go", "b")]),
    "dataclass": (dataclass_state, {"req": Inner(), "res": []}, [("req.k", 3), ("req.go", "n"), ("res", ["x"])]),
    "nested": (nested, {**REQ, "res": []}, REQ_CHANGES),
    "nested_saved": (lambda ask, outbox: nested(ask, outbox, InMemorySaver()), {**REQ, "res": []}, REQ_CHANGES),
    "retries": (retries, REQ, REQ_CHANGES),
    "sync": (sync_nodes, REQ, REQ_CHANGES),
    "asks": (asks, REQ, REQ_CHANGES),
    "odd": (odd, REQ, [*REQ_CHANGES, ("req.style", "y"), ("req.n", 2), ("req.n", 4)]),
    "tools": (
        tools,
        {**REQ, "messages": [HumanMessage("hi", id="h")]},
        [("req.k", 7), ("messages", [HumanMessage("ho", id="h")]), ("messages", [HumanMessage("hi", id="h")])],
    ),
    "react": (
        react,
        {"messages": [HumanMessage("hi", id="h")]},
        [("messages", [HumanMessage("ho", id="h")]), ("messages", [HumanMessage("hi", id="h")])],
    ),
    "ten": (
        ten,
        supplier.INPUTS,
        [("rules.tier", "strict"), ("rules.tier", "blocked"), ("request.goal", "speed"), ("request.country", "BR"),
         ("request.volume", 5), ("request.supplier", "Sul"), ("review.evidence", "2026"), ("rules.tier", "standard")],
    ),
    "brief": (
        brief,
        supplier.BRIEF_INPUTS,
        [("rules.severity", "sev1"), ("rules.severity", "sev2"), ("brief.audience", "all"), ("helper.goal", "calm")],
    ),
}  # fmt: skip


def changed(inputs, changes):
    new = copy.deepcopy(inputs)
    for path, value in changes:
        first, *rest = path.split(".")
        if not rest:
            new[first] = value
        elif isinstance(new[first], dict):
            new[first][rest[0]] = value
        else:
            setattr(new[first], rest[0], value)
    return new


def plain(state):
    """Return a state as data; the ids that LangGraph draws for messages at random are left out."""
    if isinstance(state, dict):
        return {key: plain(value) for key, value in state.items()}
    if isinstance(state, list):
        return [plain(value) for value in state]
    return (
        (state.type, state.content, getattr(state, "tool_calls", []))
        if hasattr(state, "tool_calls") or hasattr(state, "tool_call_id")
        else state
    )


async def reference(name, inputs):
    """Return state, effects and answers of LangGraph itself."""
    ask, outbox = Ask(), Outbox()
    compiled = SHAPES[name][0](ask, outbox)
    config = {"configurable": {"thread_id": "reference"}}
    state = await compiled.ainvoke(inputs, config)
    while asked := state.get("__interrupt__"):
        outbox.sent.clear()  # the node runs again from its start, and acts again: what counts is what it does at last
        state = await compiled.ainvoke(Command(resume=answer_to(asked[0].value)), config)
    return plain(state), outbox.sent, [answer for *_, answer in ask.asked]
