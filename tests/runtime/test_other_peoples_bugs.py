"""Kinds of mistakes that others have reported of systems that run work and send effects: none of them here.

Each test is one kind, on inputs written for it. What a target has to do by itself is tested beside the targets.
"""

from __future__ import annotations

import asyncio
import threading
from collections import Counter

import pytest

from revise_lab import Effect, Session, Workflow
from revise_lab.audit.auditor import audit
from revise_lab.core.machine import Machine
from revise_lab.errors import IllegalEvent, RunBlocked, RunCancelled, RunFailed, ValueNotCanonical
from revise_lab.policies import policy
from revise_lab.records import event as ev
from revise_lab.records.effect import Answer, Intent
from revise_lab.records.revision import Change, Op, Revision
from revise_lab.records.value import freeze
from revise_lab.runtime.simulator import simulate, truth_of
from revise_lab.runtime.target import MemoryTarget

EVERY = ("revise", "revise_plus", "suffix", "restart")


def rev(place, value, name="r1", op=Op.SET):
    artifact, *path = place.split(".")
    return Revision(name, (Change(artifact, op, tuple(path), value),))


def right(run):
    """Say that a simulated run ended as a fresh one on the final inputs would."""
    assert run.machine.state == "closed"
    assert (truth_of(run)[1], audit(run.machine.journal)) == ([], [])
    return run


def starts(journal):
    return Counter(entry.node for entry in journal if isinstance(entry, ev.Started))


async def think(ctx, what=""):
    """Take a second of virtual time."""
    await ctx.tool(f"think {what}", lambda: None)


# --- in flight -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", EVERY)
def test_a_revision_that_arrives_while_a_node_runs_is_never_lost(virtually, name):
    """The node reads late, from what is there then or from its own copy: in the end everybody has seen the new value."""
    flow = Workflow("budget")
    seen = []

    @flow.node(kind="tool")
    async def plan(state, ctx):
        await ctx.pause(0.3)
        seen.append(("plan", state["in"]["budget"]))
        return {"budget": state["in"]["budget"]}

    @flow.node(kind="tool", after="plan")
    async def use(state, ctx):
        seen.append(("use", state["in"]["budget"]))
        return {"spent": state["plan"]["budget"], "of": state["in"]["budget"]}

    async def main():
        run = Session(flow, {"in": {"budget": 100}}, name, endpoint=None).start()
        await asyncio.sleep(0.1)
        plan = await run.revise("in.budget", 50)
        assert plan is not None
        return run, await run.result()

    run, result = virtually(main())
    assert result.outputs["use"] == {"spent": 50, "of": 50}
    assert ("use", 100) not in seen, "nobody acts on what was replaced before he started"
    assert run.machine.inputs["in"]["budget"] == 50
    assert run.audit() == []


@pytest.mark.parametrize("crash_s", [0.5, 1.2, 1.7, 2.1, 2.3, 2.4])
@pytest.mark.parametrize("release", ["commit", "close"])
def test_an_effect_staged_before_a_pause_is_not_repeated_when_the_run_goes_on(crash_s, release):
    """Charge, then wait for somebody, then go on: a resumed body begins again, and the charge is made once."""
    flow = Workflow("shop")

    @flow.node(kind="tool")
    async def charge(state, ctx):
        ctx.stage(Effect("charge", 40))
        await think(ctx, "wait for a yes")
        await think(ctx, "go on")
        return {"ok": True}

    run = right(simulate(flow, {"in": {}}, policy("revise", release=release), crashes=[crash_s]))
    assert sum(isinstance(entry, ev.Recover) for entry in run.machine.journal) == 1
    assert [what for _, what, _ in run.effect_log].count("publish") == 1
    assert dict(run.ledger.live()) == {"charge/charge": 40}


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("R", ["publish 100", "undo 100", "publish 50"]),
        ("K", ["publish 100", "undo 100", "publish 50"]),
        ("X", ["publish 100"]),
    ],
)
def test_a_run_that_goes_on_from_its_end_with_an_edited_field_does_not_send_a_second_time(kind, said):
    """What was sent is superseded: revoked and sent anew, or, if that cannot be, the run waits for a person."""
    flow = Workflow("fork")
    bank = MemoryTarget("bank")

    @flow.node(kind="tool")
    async def plan(state):
        return {"sum": state["in"]["budget"]}

    @flow.node(kind="tool", after="plan")
    async def send(state, ctx):
        ctx.stage(Effect("money", state["plan"]["sum"], kind, "bank"))

    async def main():
        run = Session(flow, {"in": {"budget": 100}}, endpoint=None, targets={"bank": bank}).start()
        await run.result()
        again = run.reopen()
        again.revise("in.budget", 50)
        if kind != "X":
            assert (await again.result()).effects == {"send": {"money": 50}}
            return
        with pytest.raises(RunBlocked, match="send/money: replaced by another payload, irreversible"):
            await again.result()
        again.cancel()
        await asyncio.wait([again._main])

    asyncio.run(asyncio.wait_for(main(), 20))
    words = {"publish": "publish", "compensate": "undo"}
    assert [f"{words[what]} {payload}" for what, _, payload in bank.happened] == said


def test_a_node_that_changes_what_it_was_given_is_stopped_and_nobody_sees_it():
    flow = Workflow("leak")
    mine = {"in": {"items": ["a"]}}

    @flow.node(kind="tool")
    async def a(state, ctx):
        state["in"]["items"].append("LEAK")

    @flow.node(kind="tool")
    async def sibling(state, ctx):
        await think(ctx)
        return {"items": list(state["in"]["items"])}

    run = simulate(flow, mine, "revise")
    assert run.machine.status == "failed"
    assert "ReadOnlyState" in run.machine.failures()["a"]
    assert run.outputs["sibling"] == freeze({"items": ["a"]})
    assert mine == {"in": {"items": ["a"]}}


def test_what_the_caller_does_to_his_own_values_afterwards_changes_nothing():
    flow = Workflow("alias")
    inputs = {"in": {"items": ["a"]}}
    payload = ["a"]

    @flow.node(kind="tool")
    async def a(state, ctx):
        await think(ctx)
        ctx.stage(Effect("e", payload))
        payload.append("LEAK")
        return {"items": list(state["in"]["items"])}

    async def main():
        run = Session(flow, inputs, endpoint=None, targets={"": MemoryTarget("")}).start()
        inputs["in"]["items"].append("LEAK")
        return await run.result()

    result = asyncio.run(main())
    assert (result.outputs, result.effects) == ({"a": {"items": ["a"]}}, {"a": {"e": ["a"]}})


@pytest.mark.parametrize("name", EVERY)
def test_siblings_run_once_and_what_follows_the_fast_one_does_not_wait_for_the_slow_one(name):
    flow = Workflow("siblings")

    @flow.node(kind="tool", name="A")
    async def fast(state, ctx):
        await ctx.pause(0.1)

    @flow.node(kind="tool", name="C")
    async def slow(state, ctx):
        await ctx.pause(0.6)

    @flow.node(kind="tool", name="B", after="A")
    async def follows(state, ctx):
        await ctx.pause(0.1)

    order = [
        f"{'start' if isinstance(entry, ev.Started) else 'end'} {entry.attempt[0]}"
        for entry in right(simulate(flow, {}, name)).machine.journal
        if isinstance(entry, ev.Started | ev.Committed)
    ]
    assert sorted(order) == [f"{what} {node}" for what in ("end", "start") for node in "ABC"]
    assert order.index("start B") < order.index("end C")


def test_a_cancelled_run_starts_nothing_more_and_sends_nothing_more(virtually):
    """A chain, cancelled in its second step; then a long look at it."""
    flow = Workflow("chain")
    names = ["n0", "n1", "n2", "n3"]
    for name, parent in zip(names, [(), *names], strict=False):

        @flow.node(kind="tool", name=name, after=parent)
        async def step(state, ctx, name=name):
            await ctx.pause(0.2)
            ctx.stage(Effect("e", name))

    async def main():
        run = Session(flow, {}, "revise_plus", endpoint=None, targets={"": MemoryTarget("")}).start()
        await asyncio.sleep(0.3)
        run.cancel()
        await asyncio.sleep(1.2)
        with pytest.raises(RunCancelled):
            await run.result()
        return run

    run = virtually(main())
    assert [entry.node for entry in run.journal if isinstance(entry, ev.Started)] == ["n0", "n1"]
    assert not any(isinstance(entry, ev.Dispatch) for entry in run.journal)
    assert run.machine.status == "cancelled"


def two(body=None, **options):
    flow = Workflow("fence")

    def plain(state):
        raise AssertionError("driven by hand")

    flow.node(name="A", **options)(body or plain)
    return flow.graph()


@pytest.mark.parametrize("reset", ["revision", "crash", "both"])
def test_the_result_of_an_old_attempt_is_never_that_of_a_later_one(reset):
    """Attempts are numbered for the whole run, also over crashes; what an earlier one reports is discarded or refused."""
    machine = Machine(two(), {"in": {"x": 1}}, policy("restart"))
    ids = [machine.handle(ev.Start("A"))[0].attempt]
    if reset in ("revision", "both"):
        machine.handle(ev.Revise(rev("in.x", 2)))
        ids.append(machine.handle(ev.Start("A"))[0].attempt)
    if reset in ("crash", "both"):
        machine.handle(ev.Recover())
        ids.append(machine.handle(ev.Start("A"))[0].attempt)
    assert len(set(ids)) == len(ids) > 1
    old = ev.Finish(ids[0], freeze({"o": "old"}), effects=(Effect("e", "old"),))
    if reset == "revision":
        machine.handle(old)
        assert isinstance(machine.journal[-1], ev.Discarded)
    else:
        with pytest.raises(IllegalEvent):
            machine.handle(old)
    machine.handle(ev.Finish(ids[-1], freeze({"o": "new"})))
    assert machine.outputs() == {"A": freeze({"o": "new"})}
    assert machine.sendable() == ()


def test_a_member_that_comes_back_does_not_take_up_where_it_was():
    """Removed while it ran, spawned again under the same key: another attempt, another epoch of its effect."""
    flow = Workflow("back")

    @flow.node(kind="tool")
    async def split(state, ctx):
        return {"items": {key: key for key in state["in"]["keys"]}}

    @flow.member(of="split", items="items", kind="tool")
    async def work(state, ctx):
        ctx.stage(Effect("e", ctx.key))
        await think(ctx)
        return {"key": ctx.key}

    revisions = [(2.9, rev("in.keys", [])), (6.0, rev("in.keys", ["a"], "r2"))]
    run = right(simulate(flow, {"in": {"keys": ["a"]}}, policy("revise"), revisions=revisions))
    assert [entry.attempt for entry in run.machine.journal if isinstance(entry, ev.Started) and "work" in entry.node] == [
        "work[a]@1", "work[a]@2",
    ]  # fmt: skip
    assert [(what, intent.epoch) for _, what, intent in run.effect_log] == [("publish", 0), ("undo", 0), ("publish", 1)]


def test_of_two_who_allow_one_effect_only_one_has_it_sent():
    """The claim comes first and is one step; the second finds nothing that waits."""
    machine = Machine(two(), {}, policy("revise", approval="on"))
    machine.handle(ev.Start("A"))
    machine.handle(ev.Finish("A@1", freeze({}), effects=(Effect("refund", 30),)))
    guard, barrier, acts, refused = threading.Lock(), threading.Barrier(2), [], []

    def approve():
        barrier.wait()
        with guard:
            try:
                machine.handle(ev.Authorise("A", "refund", 30))
                acts.extend(machine.handle(ev.Dispatch("A", "refund")))
            except IllegalEvent as error:
                refused.append(str(error))

    people = [threading.Thread(target=approve) for _ in range(2)]
    for person in people:
        person.start()
    for person in people:
        person.join()
    assert [act.what for act in acts] == ["publish"]
    assert len(refused) == 1
    assert "nothing there waits for an approval" in refused[0]
    with pytest.raises(IllegalEvent):
        machine.handle(ev.Dispatch("A", "refund"))
    machine.handle(ev.Answered(Intent("fence", "A", "refund", 0), Answer.LANDED))
    with pytest.raises(IllegalEvent):
        machine.handle(ev.Answered(Intent("fence", "A", "refund", 0), Answer.LANDED))


# --- what counts as a change -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["input", "revision", "output", "effect"])
def test_a_function_as_a_value_is_refused_by_name(where, virtually):
    """Whether two functions are the same cannot be seen, so none gets in where values are compared."""
    flow = Workflow("scorer")

    @flow.node(kind="tool")
    async def score(state, ctx):
        if where == "effect":
            ctx.stage(Effect("e", {"by": len}))
        return {"by": len} if where == "output" else {}

    async def main():
        run = Session(flow, {"in": {"scorer": len if where == "input" else "len"}}, endpoint=None).start()
        try:
            if where == "revision":
                await run.revise("in.scorer", max)
            await run.result()
        finally:
            run.cancel()
            await asyncio.wait([run._main])

    with pytest.raises((ValueNotCanonical, RunFailed), match="JSON-like"):
        virtually(main())


def test_the_clock_and_chance_are_answers_that_are_kept_with_the_attempt(virtually):
    """Asked through the context they are remembered; a run made again on them comes out the same."""
    flow = Workflow("outside")

    @flow.node(kind="tool")
    async def draw(state, ctx):
        return {"at": await ctx.clock(), "lot": await ctx.random(), "for": state["in"]["x"]}

    @flow.node(kind="tool", after="draw")
    async def use(state, ctx):
        await ctx.pause(1.0)
        return {"lot": state["draw"]["lot"]}

    async def main():
        run = Session(flow, {"in": {"x": 1, "y": 1}}, endpoint=None).start()
        await asyncio.sleep(0.5)
        await run.revise("in.y", 2)
        await run.result()
        return run, await run.check_oracle()

    run, (truth, differences) = virtually(main())
    assert (differences, truth.oracle_fresh, truth.oracle_hits) == ([], 0, 2)
    assert starts(run.journal) == {"draw": 1, "use": 1}


def test_a_node_whose_reads_cannot_be_seen_runs_again_whatever_is_revised(monkeypatch):
    """It reads the environment; it has to say so, and then no revision leaves it alone."""
    monkeypatch.setenv("TIER", "gold")
    flow = Workflow("tier")

    @flow.node(kind="tool", unknown=("reads",))
    async def tier(state, ctx):
        import os

        await think(ctx)
        return {"tier": os.environ["TIER"]}

    @flow.node(kind="tool")
    async def other(state, ctx):
        await think(ctx)
        return {"x": state["in"]["x"]}

    run = right(simulate(flow, {"in": {"x": 1, "y": 1}}, "revise_plus", revisions=[(0.5, rev("in.y", 2))]))
    assert starts(run.machine.journal) == {"tier": 2, "other": 1}


@pytest.mark.parametrize("name", ["revise", "revise_plus"])
def test_what_is_taken_away_is_a_change_for_who_read_it_and_for_who_read_the_keys(name):
    flow = Workflow("filters")
    readers = {
        "value": lambda at: at["filter"] if at.get("filter") else None,
        "asked": lambda at: "filter" in at,
        "got": lambda at: at.get("filter"),
        "keys": lambda at: sorted(at),
        "size": len,
        "other": lambda at: at["limit"],
        "never": lambda at: at.get("unheard of"),
    }
    for reader, look in readers.items():

        @flow.node(kind="tool", name=reader)
        async def body(state, ctx, look=look):
            seen = look(state["in"])
            await think(ctx)
            return {"seen": seen}

    gone = [(0.5, rev("in.filter", None, op=Op.DELETE))]
    run = right(simulate(flow, {"in": {"filter": "red", "limit": 3}}, name, revisions=gone))
    again = {node for node, n in starts(run.machine.journal).items() if n == 2}
    assert again == {"value", "asked", "got", "keys", "size"}


def test_an_output_that_comes_out_equal_stops_the_recomputation_there_unless_the_effect_is_another():
    flow = Workflow("cutoff")

    @flow.node(kind="tool")
    async def tidy(state, ctx):
        prompt = state["in"]["prompt"]
        ctx.stage(Effect("raw", prompt))
        ctx.stage(Effect("clean", " ".join(prompt.split())))
        return {"prompt": " ".join(prompt.split())}

    @flow.node(kind="tool", after="tidy")
    async def use(state, ctx):
        ctx.stage(Effect("sent", state["tidy"]["prompt"]))
        return {"used": state["tidy"]["prompt"]}

    revisions = [(6.0, rev("in.prompt", "say  it"))]
    run = right(
        simulate(flow, {"in": {"prompt": "say it"}}, policy("revise_plus", release="commit"), revisions=revisions)
    )
    assert starts(run.machine.journal) == {"tidy": 2, "use": 1}
    assert [(what, intent.slot) for _, what, intent in run.effect_log if intent.node == "use"] == [("publish", "sent")]
    sent = Counter((what, intent.slot) for _, what, intent in run.effect_log)
    assert sent == {("publish", "raw"): 2, ("undo", "raw"): 1, ("publish", "clean"): 1, ("publish", "sent"): 1}
    assert dict(run.ledger.live()) == {"tidy/raw": "say  it", "tidy/clean": "say it", "use/sent": "say it"}


def test_a_field_that_differs_from_run_to_run_is_named_and_costs_only_who_reads_it(virtually):
    flow = Workflow("stamped")

    @flow.node(kind="tool")
    async def made(state, ctx):
        return {"stamp": await ctx.random(), "text": state["in"]["x"] // 2}

    for reader, field in (("all", None), ("text", "text")):

        @flow.node(kind="tool", name=reader, after="made")
        async def body(state, ctx, field=field):
            seen = state["made"][field] if field else dict(state["made"])
            await ctx.pause(1.0)
            return {"seen": seen}

    async def main():
        run = Session(flow, {"in": {"x": 2}}, "revise_plus", endpoint=None).start()
        await asyncio.sleep(0.5)
        await run.revise("in.x", 3)
        await run.result()
        return run

    run = virtually(main())
    assert starts(run.journal) == {"made": 2, "all": 2, "text": 1}
    (delta,) = (each.delta for each in run.journal if isinstance(each, ev.Committed) and each.attempt == "made@2")
    assert [path for path, _ in delta.changed] == [("stamp",)]
    (stop,) = (each for each in run.journal if isinstance(each, ev.Stop))
    assert stop.attempt == "all@1"
    assert "made.stamp changed" in stop.reason


# --- compare and set -------------------------------------------------------------------------------------------------------


def refunding(bank, decide, retries):
    flow = Workflow("refunds")

    @flow.node(kind="tool", retries=retries)
    async def refund(state, ctx):
        decide(ctx)

    return Session(flow, {}, endpoint=None, targets={"bank": bank})


def test_the_version_that_was_decided_on_travels_to_the_target_and_not_the_one_of_the_release():
    """Approved at one version; another write comes before the release, and whoever reads now would find all well."""
    bank = MemoryTarget("bank")
    bank.set("order 7", "paid")
    flow = Workflow("release")

    @flow.node(kind="tool")
    async def refund(state, ctx):
        ctx.stage(Effect("refund", 30, "K", "bank", {"order 7": bank.token("order 7")}))

    async def approve(intent, effect):
        bank.set("order 7", "refunded by somebody else")
        return True

    async def main():
        run = Session(flow, {}, endpoint=None, targets={"bank": bank}, authorise=approve).start()
        with pytest.raises(RunBlocked, match="order 7 changed after it was decided"):
            await run.result()
        run.cancel()
        await asyncio.wait([run._main])

    asyncio.run(asyncio.wait_for(main(), 20))
    assert bank.happened == []


def test_a_refused_write_is_refused_again_until_somebody_has_read():
    bank = MemoryTarget("bank")
    old = bank.set("order 7", 1)
    bank.set("order 7", 2)
    for attempt in range(3):
        with pytest.raises(Exception, match="changed after it was decided"):
            bank.publish(f"k{attempt}", 1, {"order 7": old})
    assert bank.happened == []
    assert bank.publish("k", 1, {"order 7": bank.token("order 7")}).payload == 1


def test_a_retry_reads_again_and_decides_again():
    """On what is true now there is nothing to refund any more."""
    bank = MemoryTarget("bank")
    bank.set("order 7", "paid")
    decisions = []

    def decide(ctx):
        token = bank.token("order 7")
        decisions.append(token)
        if len(decisions) == 1:
            ctx.stage(Effect("refund", 30, "K", "bank", {"order 7": token}))
            bank.set("order 7", "cancelled")

    async def main():
        return await refunding(bank, decide, retries=1).start().result()

    assert asyncio.run(asyncio.wait_for(main(), 20)).effects == {}
    assert (decisions, bank.happened) == (["1", "2"], [])


@pytest.mark.parametrize("retries", [0, 1, 3])
def test_retries_end(retries):
    """The premise changes every time, as it does when reads come from a copy that lags."""
    bank = MemoryTarget("bank")
    decisions = []

    def decide(ctx):
        decisions.append(bank.set("order 7", len(decisions)))
        ctx.stage(Effect("refund", 30, "K", "bank", {"order 7": "0"}))

    async def main():
        run = refunding(bank, decide, retries).start()
        while len(decisions) <= 1 + retries and run.machine.status == "open":
            await asyncio.sleep(0.002)
        assert [why for _, _, why in run.residue() if "no retry of the node is left" in why]
        run.cancel()
        await asyncio.wait([run._main])

    asyncio.run(asyncio.wait_for(main(), 20))
    assert (len(decisions), bank.happened) == (1 + retries, [])


@pytest.mark.parametrize("token", [None, ""])
def test_a_write_without_a_version_is_refused_and_not_done(token):
    bank = MemoryTarget("bank")

    async def main():
        run = refunding(bank, lambda ctx: ctx.stage(Effect("refund", 30, "K", "bank", {"order 7": token})), 0).start()
        with pytest.raises(RunBlocked, match="'order 7' with the token"):
            await run.result()
        run.cancel()
        await asyncio.wait([run._main])

    asyncio.run(asyncio.wait_for(main(), 20))
    assert bank.happened == []


@pytest.mark.parametrize("name", ["revise", "revise_plus"])
def test_somebody_who_joins_over_a_list_sees_whoever_comes_to_it(name):
    """The list is read whole while it has one entry; the second is not a change of anything that was there."""
    flow = Workflow("panel")

    @flow.node(kind="tool")
    async def split(state, ctx):
        return {"who": {each: {} for each in state["in"]["reviewers"]}}

    @flow.member(of="split", items="who", kind="tool")
    async def review(state, ctx):
        await think(ctx)
        return {"by": ctx.key}

    @flow.node(kind="join", after="review")
    async def join(state, ctx):
        await think(ctx)
        ctx.stage(Effect("verdict", sorted(state["review"])))
        return {"all": sorted(state["review"])}

    @flow.node(kind="tool")
    async def direct(state, ctx):
        names = [each for each in state["in"]["reviewers"]]
        await think(ctx)
        return {"names": names}

    comes = [(2.5, rev("in.reviewers", "eve", op=Op.APPEND))]
    run = right(simulate(flow, {"in": {"reviewers": ["ada"]}}, name, revisions=comes))
    assert run.outputs["join"] == freeze({"all": ["ada", "eve"]})
    assert run.outputs["direct"] == freeze({"names": ["ada", "eve"]})
    assert starts(run.machine.journal)["review[ada]"] == (1 if name == "revise_plus" else 2), (
        "whose review stays as it is"
    )
    assert dict(run.ledger.live()) == {"join/verdict": freeze(["ada", "eve"])}
