"""The machine against the oracle, step by step: whatever happens in whatever order, what is settled is right."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from revise_lab.core.body import Execution
from revise_lab.core.history import one_line
from revise_lab.core.machine import Machine, replay
from revise_lab.core.oracle import choices, differences, drive, oracle
from revise_lab.policies import policy
from revise_lab.records import event as ev
from revise_lab.records.revision import Change, Op, Revision
from revise_lab.records.value import ABSENT, equal
from revise_lab.records.workflow import Workflow
from revise_lab.runtime.simulator import answer_by_hash

INPUTS = {"in": {"a": 0, "b": 0, "c": 0, "list": [0, 1]}, "opt": {}}


def build():
    """Return a workflow with everything in it: branches, members, a barrier, unknown reads, retries, failures."""
    flow = Workflow("all")

    @flow.node(kind="model", retries=1)
    async def root(state, ctx):
        a = state["in"]["a"]
        await ctx.pause(0)
        if a == 2:
            raise ValueError(f"a is {a} and opt is {state['opt'].get('x')}")
        await ctx.model(f"root {a}", max_tokens=1)
        return {"x": a, "b": state["in"]["b"] % 2}

    @flow.branch(of="root")
    def lane(state, output):
        return ["left", "right"][: state["in"]["b"]] if state["in"]["c"] else "left"

    @flow.node(kind="tool")
    async def spawner(state, ctx):
        items = list(state["in"]["list"])
        await ctx.pause(0)
        return {"tasks": items, "extra": "x" in state["opt"]}

    @flow.member(of="spawner", items="tasks")
    async def worker(state, ctx):
        await ctx.pause(0)
        return {"y": [ctx.item, state["in"]["c"] if ctx.item else 0]}

    @flow.node(kind="model", after="root", when="left", retries=2)
    async def left(state, ctx):
        x = state["root"]["x"]
        reply = await ctx.model(f"left {x}", max_tokens=1)
        return {"z": [x, state["in"]["c"] % 2], "text": reply.text}

    @flow.node(kind="tool", after="root", when="right", unknown=("reads",))
    async def right(state, ctx):
        await ctx.pause(0)
        return {"z": len(state["in"]["list"])}

    @flow.node(kind="join", after=("left", "right", "worker"))
    async def join(state, ctx):
        left = state["left"]["z"] if "left" in state else None
        await ctx.pause(0)
        right = state["right"]["z"] if "right" in state else None
        return {"sum": [left, right, [state["worker"][key]["y"][0] for key in state["worker"]]]}

    @flow.node(kind="model", after=("join", "root"), needs="all")
    async def last(state, ctx):
        await ctx.model(f"last {state['join']['sum']}", max_tokens=1)
        return {"n": len(state["join"]["sum"][2]), "b": state["root"]["b"]}

    return flow.graph()


GRAPH = build()
DIFF = {"check": "digest", "propagation": "diff", "unknown": "local"}
POLICIES = [policy("revise_plus")] + [
    policy(name, **switches)
    for name in ("revise", "suffix", "restart", "wait")
    for switches in ({}, {"check": "digest"}, DIFF, {**DIFF, "extension": "on"})
]
CHANGES = st.one_of(
    st.builds(lambda key, v: ("in", "set", (key,), v), st.sampled_from("abc"), st.sampled_from([0, 1, 2])),
    st.builds(lambda v: ("in", "append", ("list",), v), st.sampled_from([0, 1, 7])),
    st.builds(lambda v: ("in", "insert", ("list", 0), v), st.sampled_from([0, 1])),
    st.just(("in", "remove", ("list", 0), ABSENT)),
    st.builds(lambda v: ("opt", "set", ("x",), v), st.sampled_from([None, 1])),
    st.just(("opt", "delete", ("x",), ABSENT)),
)
PINS = st.builds(
    lambda place, op: (place[0], op, *place[1:]),
    st.sampled_from(
        [
            ("root", ("x",), 7),
            ("root", ("lane",), {"right": True}),
            ("left", ("z", 0), 5),
            ("left", ("z", 3), 5),
            ("worker[=0]", ("y", 0), 9),
            ("spawner", ("tasks",), {"=0": 0, "=8": 8}),
            ("last", ("n",), 3),
        ]
    ),
    st.sampled_from(["override", "withdraw"]),
)


class _Await:
    def __init__(self, ask):
        self.ask = ask

    def __await__(self):
        return (yield self.ask)


async def perform(ask):
    return await _Await(ask)


class Against(RuleBasedStateMachine):
    """Bodies run boundary call by boundary call; every move of the world is a rule."""

    @initialize(chosen=st.sampled_from(POLICIES))
    def open(self, chosen):
        self.machine = Machine(GRAPH, INPUTS, chosen, validate=True)
        self.policy = chosen
        self.bodies = {}
        """Attempt to (execution, coroutine, answer for its next step)."""
        self.ended = {}
        self.zombies = {}
        self.n_revisions = 0
        self.stepping = None

    def send(self, event):
        for order in self.machine.handle(event):
            if isinstance(order, ev.Execute):
                execution = Execution(GRAPH, order, perform, before_read=self.before_read)
                self.bodies[order.attempt] = [execution, execution.run(), None]
            elif isinstance(order, ev.Moved):
                self.bodies[order.attempt][0].move(self.machine.snapshot_of(order.attempt))
            elif isinstance(order, ev.Stop):
                self.zombies[order.attempt] = self.ended.pop(order.attempt, None)
                body = self.bodies.pop(order.attempt, None)
                if body and order.attempt != self.stepping:
                    body[1].close()

    def before_read(self, execution, artifact):
        attempt = execution.order.attempt
        if attempt in self.bodies and self.machine.is_late(attempt, artifact):
            if report := execution.flush():
                self.send(report)
            self.send(ev.Extend(attempt))

    def go_on(self, attempt):
        _, steps, answer = self.bodies[attempt]
        self.stepping = attempt
        try:
            ask = steps.send(answer)
        except StopIteration as end:
            late = self.zombies if attempt in self.zombies else self.ended
            late[attempt] = end.value
            self.bodies.pop(attempt, None)
            return
        finally:
            self.stepping = None
        if attempt not in self.bodies:
            steps.close()
            return
        self.bodies[attempt][2] = None if ask.kind == "pause" else answer_by_hash(ask)

    @rule(data=st.data())
    @precondition(lambda self: self.machine.ready())
    def start(self, data):
        self.send(ev.Start(data.draw(st.sampled_from(self.machine.ready()))))

    @rule(data=st.data(), told=st.booleans())
    @precondition(lambda self: self.bodies)
    def step(self, data, told):
        attempt = data.draw(st.sampled_from(sorted(self.bodies)))
        execution = self.bodies[attempt][0]
        self.go_on(attempt)
        if told and attempt in self.bodies and (report := execution.flush()):
            self.send(report)

    @rule(data=st.data())
    @precondition(lambda self: self.ended)
    def finish(self, data):
        attempt = data.draw(st.sampled_from(sorted(self.ended)))
        self.send(self.ended.pop(attempt))

    @rule(data=st.data())
    @precondition(lambda self: self.bodies)
    def infrastructure_fails(self, data):
        attempt = data.draw(st.sampled_from(sorted(self.bodies)))
        run = self.machine.runs[self.bodies[attempt][0].order.node]
        if run.failures < run.node.retries:
            execution, steps, _ = self.bodies.pop(attempt)
            steps.close()
            self.send(execution.failed(ConnectionError("line cut")))

    @rule(change=CHANGES | PINS, more=st.none() | CHANGES, based=st.booleans())
    @precondition(lambda self: self.machine.state != "open" or self.n_revisions < 6)
    def revise(self, change, more, based):
        self.n_revisions += 1
        changes = []
        for artifact, op, path, value in filter(None, (change, more)):
            base = self.machine.counts.get(artifact, 0) if based and not changes and not self.policy.deferred else None
            changes.append(Change(artifact, Op(op), path, value, base))
        before = (self.machine.state, self.machine.version, self.machine.inputs)
        self.send(ev.Revise(Revision(f"r{self.n_revisions}", tuple(changes))))
        if before[0] != "open":
            assert (self.machine.state, self.machine.version, self.machine.inputs) == before

    @rule(changes=st.lists(CHANGES, min_size=2, max_size=3))
    @precondition(lambda self: self.machine.state == "open" and self.n_revisions < 6)
    def revise_together(self, changes):
        self.n_revisions += 1
        revisions = [
            Revision(f"t{self.n_revisions}.{i}", (Change(artifact, Op(op), path, value),))
            for i, (artifact, op, path, value) in enumerate(changes)
        ]
        self.send(ev.ReviseTogether(tuple(revisions)))

    @rule(data=st.data())
    @precondition(lambda self: self.zombies)
    def a_stopped_attempt_ends(self, data):
        attempt = data.draw(st.sampled_from(sorted(self.zombies)))
        self.send(self.zombies.pop(attempt) or ev.Stopped(attempt))

    @rule()
    @precondition(lambda self: self.machine.state == "open" and self.n_revisions == 6)
    def cancel(self):
        outputs = self.machine.outputs()
        self.send(ev.Cancel())
        assert not self.machine.ready()
        assert self.machine.outputs() == outputs

    @rule()
    @precondition(lambda self: self.machine.closable and self.n_revisions > 2)
    def close(self):
        self.send(ev.Close())
        assert self.machine.state == "closed"

    def truth(self):
        async def fresh(ask):
            return answer_by_hash(ask)

        return drive(oracle(GRAPH, self.machine.inputs, choices(self.machine), fresh, self.machine.overrides))

    @invariant()
    def what_is_settled_is_right(self):
        truth = self.truth()
        for name, run in self.machine.runs.items():
            if run.settled:
                ours = self.machine.outputs().get(name, ABSENT)
                assert equal(ours, truth.outputs.get(name, ABSENT)), f"{name}: {one_line(self.machine.journal)}"

    def teardown(self):
        if not hasattr(self, "machine"):
            return
        machine = self.machine
        while machine.state == "open" and (machine.ready() or self.bodies or self.ended):
            if self.ended:
                self.send(self.ended.pop(min(self.ended)))
            elif self.bodies:
                self.go_on(min(self.bodies))
            else:
                self.send(ev.Start(machine.ready()[0]))
        for attempt, late in self.zombies.items():
            self.send(late or ev.Stopped(attempt))
        for _, steps, _ in self.bodies.values():
            steps.close()
        if machine.closable:
            self.send(ev.Close())
        history = one_line(machine.journal)
        if machine.state == "closed":
            truth = self.truth()
            assert (differences(machine, truth), truth.oracle_fresh, machine.late_invalid) == ([], 0, 0), history
        elif machine.state == "open":
            assert machine.status == "failed", history
            ours, theirs = machine.failures(), self.truth().failures
            assert {name: why.split(":")[0] for name, why in ours.items()} == {
                name: why.split(":")[0] for name, why in theirs.items()
            }, history
            self.what_is_settled_is_right()
        again = replay(GRAPH, machine.journal, self.policy)
        assert (again.journal, again.fingerprint()) == (machine.journal, machine.fingerprint()), history


TestAgainstTheOracle = pytest.mark.deep(Against.TestCase)
TestAgainstTheOracle.settings = settings(stateful_step_count=40)
