"""StreamBench: the stream, the world, the judges and the methods, on the deterministic agent; and the same over HTTP."""

from __future__ import annotations

import asyncio
import threading
from itertools import product

import numpy as np
import pytest

from revise_lab.records.effect import Reversibility as C
from revise_lab.runtime.reply import MalformedReply, ModelReply
from revise_lab.workloads.streambench import judges
from revise_lab.workloads.streambench.agent import Call, PlannedAgent, fill_in
from revise_lab.workloads.streambench.methods import METHODS, PUBLISHED, exact_ratio, run
from revise_lab.workloads.streambench.scenarios import (
    EVENT,
    FIRST_OUTWARD,
    GRID_RATIOS,
    NUMBERS,
    RATIOS,
    REPORT,
    SCENARIOS,
    TRAVEL,
)
from revise_lab.workloads.streambench.stream import (
    Channel,
    Decision,
    Injection,
    Kind,
    Read,
    RevisionType,
    Turn,
    adaptation_cost,
    best_rollback,
    compatible,
    earliest_conflict,
    reversibility_ratio,
    stale_turns,
)
from revise_lab.workloads.streambench.world import World, complaint

ADD, LESS, SWAP, DROP, FIRST = RevisionType
ALL = [(s, rho, kind) for s in SCENARIOS.values() for kind in RevisionType for rho in GRID_RATIOS[kind]]


@pytest.fixture(scope="module")
def grid():
    """One world of the grid, every method."""
    return {(m, s.name, rho, kind): run(s, rho, kind, m, seed=5) for m in METHODS for s, rho, kind in ALL}


def of(grid, method):
    return [done for key, done in grid.items() if key[0] == method]


def turn(step, cls=C.INERT, result=None, reads=(), entry=None, early=True):
    reads = tuple(Read(*each) for each in reads)
    return Turn(step, cls, {}, result or {}, reads, {r.field: r.value for r in reads if not r.source}, entry, early)


# --- the stream ---


def test_neither_side_of_the_channel_waits_for_the_other():
    channel = Channel()
    injections = [Injection(SWAP, f"change {n}", {}) for n in range(200)]
    user = threading.Thread(target=lambda: [channel.inject(each) for each in injections])
    user.start()
    taken = []
    while len(taken) < 200:
        channel.publish(Kind.THOUGHT, "work")
        if (each := channel.take()) is not None:
            taken.append(each)
    user.join()
    assert taken == injections
    assert [event.n for event in channel.events] == list(range(len(channel.events)))
    assert sum(event.kind is Kind.INJECTION for event in channel.events) == 200


def test_the_user_is_heard_right_after_the_event_that_made_them_speak(grid):
    for (method, *_), done in grid.items():
        kinds = [event.kind for event in done.trace]
        at = kinds.index(Kind.INJECTION)
        assert kinds[:at].count(Kind.ACT) == FIRST_OUTWARD
        assert (kinds[at - 1], kinds[at + 1]) == (Kind.ACT, Kind.OBSERVATION), method


def test_what_an_agent_knows_can_be_cut_back_and_what_it_did_cannot(grid):
    done = grid["absorber", "event_planning", 0.5, SWAP]
    first = done.before[-1]
    assert first.step == "send_proposal"
    assert first not in done.state.turns, "forgotten"
    assert done.world.entries[first.entry].state == "compensated", "but it was said, and made up for"
    assert "please disregard" in done.world.corrections[0]


@pytest.mark.parametrize(
    ("args", "wrong"),
    [
        ('{"kind": "ven', "must be an object, not str"),
        ([], "must be an object, not list"),
        ({"kind": "venue"}, "missing: wish, limit"),
        ({"kind": "venue", "wish": "x", "limit": "6000"}, "limit must be a whole number, not str"),
        ({"kind": "venue", "wish": "x", "limit": True}, "limit must be a whole number, not bool"),
        ({"kind": "venue", "wish": None, "limit": 1}, "wish must be a text, not NoneType"),
        ({"kind": "venue", "wish": "x", "limit": 1, "hall": "y"}, "unknown: hall"),
        ({"kind": "venue", "wish": "x", "limit": 1}, ""),
    ],
)
def test_arguments_are_checked_against_what_the_tool_takes(args, wrong):
    assert wrong in complaint(EVENT.steps[0].args, args, NUMBERS)


class Clumsy(PlannedAgent):
    """Garbles the first call of every tool, and asks for a tool that is not there."""

    def __init__(self, scenario):
        super().__init__(scenario)
        self.garbled, self.heard = set(), []

    def next(self, state):
        call = super().next(state)
        if call.tool and call.tool not in self.garbled:
            self.garbled.add(call.tool)
            return Call(call.thought, call.tool if len(self.garbled) > 1 else "teleport", {"amount": "much"})
        return call

    def answered(self, call, complaint):
        self.heard.append(complaint)


def test_a_malformed_call_is_answered_and_never_executed():
    clumsy = Clumsy(EVENT)
    done, clean = run(EVENT, 0.5, SWAP, "revise", agent=clumsy), run(EVENT, 0.5, SWAP, "revise")
    assert done.n_malformed == len(clumsy.heard) == 15
    assert clumsy.heard[0] == "there is no tool 'teleport'"
    assert done.world.public() == clean.world.public()
    errors = [event for event in done.trace if event.kind is Kind.OBSERVATION and "error" in event.content]
    assert len(errors) == 15
    assert done.n_acts == clean.n_acts


def test_a_run_that_does_not_converge_ends_with_its_budget():
    class Stuck(PlannedAgent):
        def next(self, state):
            return Call("again", "search_venues", {})

        def answered(self, call, complaint):
            pass

    done = run(EVENT, 1.0, ADD, "naive", agent=Stuck(EVENT), budget=7)
    assert (done.converged, done.n_malformed, done.n_acts) == (False, 7, 0)
    assert done.quality == pytest.approx(1 + 4 / 10), "nothing is declared and nothing stands: that much agrees"


# --- the tasks ---


def test_the_tasks_have_the_published_structure():
    assert [len(each.base_steps) for each in (EVENT, TRAVEL, REPORT)] == [15, 14, 13]
    for scenario, rho in product(SCENARIOS.values(), RATIOS):
        classes = scenario.classes(rho)
        hard = [at for at, s in enumerate(scenario.base_steps, 1) if classes[s.name] in (C.COMPENSABLE, C.IRREVERSIBLE)]
        assert hard[:1] == ([9] if rho < 1 else [])
        assert not hard or classes[scenario.base_steps[8].name] is C.COMPENSABLE
        outward = len(scenario.base_steps) - 8
        assert len(hard) == pytest.approx((1 - rho) * outward, abs=0.5)
        assert exact_ratio(scenario, rho) == pytest.approx(1 - len(hard) / len(scenario.base_steps))


def test_the_reversibility_ratio_counts_what_can_be_taken_back():
    assert reversibility_ratio([C.INERT, C.REVERSIBLE, C.COMPENSABLE, C.IRREVERSIBLE]) == 0.5


@pytest.mark.parametrize(("scenario", "kind"), [(s, k) for s in SCENARIOS.values() for k in RevisionType])
def test_every_revision_contradicts_the_ninth_act_and_no_earlier_one_of_its_class(scenario, kind):
    done = run(scenario, 0.75, kind, "naive")
    assert [compatible(each, done.revised) for each in done.before if each.hard] == [False]


def test_what_a_step_is_derived_from_follows_from_what_it_reads():
    step = next(each for each in EVENT.steps if each.name == "draft_budget")
    results = {"search_venues": {"amount": 900}}
    args, reads = fill_in(step, EVENT.clauses, results.get)
    assert args == {"first": 900, "second": 0}
    assert reads == (("search_venues", "amount", 900), ("search_caterers", "amount", None))


# --- the world ---


@pytest.mark.parametrize("scenario", SCENARIOS.values(), ids=list(SCENARIOS))
def test_undoing_a_reversible_act_leaves_the_world_as_it_was(scenario):
    world = World(3)
    for step in scenario.steps:
        args = {name: 7 if name in NUMBERS else f"some {name}" for name in step.args}
        world.call(step.name, step.verb, C.REVERSIBLE, {**args, next(iter(args)): 1 if "first" in args else "old"})
        before, fees = world.public(), world.fees
        _, entry = world.call(step.name, step.verb, C.REVERSIBLE, args)
        if entry is not None:
            assert world.public() != before
            assert world.undo(entry)
        assert (world.public(), world.fees, world.corrections) == (before, fees, [])


def test_a_compensation_is_seen_and_costs_and_an_irreversible_act_stays():
    world = World(3)
    _, booked = world.call("book_venue", "booking", C.COMPENSABLE, {"name": "Hall", "amount": 900, "detail": ""})
    _, paid = world.call("pay_deposit", "payment", C.IRREVERSIBLE, {"to": "Hall", "amount": 900, "detail": ""})
    assert world.undo(booked)
    assert not world.undo(booked), "once"
    assert not world.undo(paid)
    assert ([entry.tool for entry in world.standing()], world.fees) == (["pay_deposit"], 90)


def test_what_is_staged_has_not_left():
    world = World(3)
    message = {"to": "all", "body": "come"}
    _, first = world.call("send_invitations", "message", C.COMPENSABLE, message, staged=True)
    assert world.undo(first)
    assert (world.corrections, world.public()) == ([], [])
    _, second = world.call("send_invitations", "message", C.COMPENSABLE, message, staged=True)
    world.release()
    assert world.entries[second].state == "standing"


# --- the judges ---


def test_who_knows_the_revision_from_the_start_satisfies_every_assertion(grid):
    assert {done.quality for done in of(grid, "foresight")} == {5.0}


@pytest.mark.parametrize(("scenario", "kind"), [(s, k) for s in SCENARIOS.values() for k in RevisionType])
def test_every_assertion_can_fail(scenario, kind):
    """Each is broken by an empty world, or by what the unrevised task asks for, in some world."""
    lists = judges.ASSERTIONS[scenario.name]
    failed = {each for each in (*lists[None], *lists[kind]) if not each.holds(World(0))}
    for seed in range(12):
        done = run(scenario, 0.25, kind, "ignore", seed=seed)
        failed |= {each for each in lists[kind] if not each.holds(done.world)}
    assert failed == {*lists[None], *lists[kind]}
    assert len(list(judges.listed(scenario.name, kind))) == len(failed) + 1


def test_a_declaration_that_differs_from_the_world_costs_quality(grid):
    done = grid["foresight", "event_planning", 0.25, SWAP]
    declared = [(turn.step, turn.args) for turn in done.state.turns if turn.cls is not C.INERT]
    assert judges.broken("event_planning", SWAP, done.world, declared) == []
    assert judges.broken("event_planning", SWAP, done.world, declared[1:]) == ["declared is not what stands"]


class Scores:
    """A model that gives the answers it was told to give."""

    def __init__(self, *texts):
        self.texts, self.requests = list(texts), []

    async def complete(self, request, *, on_token=None):
        self.requests.append(request)
        return ModelReply(text=self.texts.pop(0))

    async def aclose(self):
        pass


def test_the_model_judge_is_asked_three_times_at_temperature_zero(grid):
    done = grid["absorber", "travel_arrangement", 0.25, SWAP]
    model = Scores('{"score": 2}', '{"score": 3}', '{"score": 2}')
    scores = asyncio.run(judges.model_quality(model, TRAVEL.task, done.revised, done.world, done.outcome))
    assert scores == [2, 3, 2]
    assert {request.temperature for request in model.requests} == {0.0}
    asked = model.requests[0].chat[1]["content"]
    assert all(text in asked for text in ("Porto", "compensated", "pay_flight", done.outcome))


@pytest.mark.parametrize("text", ['{"score": 6}', '{"score": "5"}', '{"score": true}', "[]", "five"])
def test_an_answer_without_a_score_is_no_score(grid, text):
    done = grid["absorber", "travel_arrangement", 0.25, SWAP]
    with pytest.raises(MalformedReply):
        asyncio.run(judges.model_quality(Scores(text), TRAVEL.task, done.revised, done.world, ""))


# --- the methods ---


def test_the_deterministic_structure_of_the_grid(grid):
    absorber = {key: done for key, done in grid.items() if key[0] == "absorber"}
    assert len(absorber) * 3 == 144
    for (_, _, rho, _), done in absorber.items():
        assert (done.n_wasted, done.n_undone, done.n_compensated) == ((0, 0, 0) if rho == 1 else (1, 1, 1))
    assert np.mean([done.n_wasted for done in absorber.values()]) == 117 / 144
    assert {done.n_wasted for done in of(grid, "full_restart")} == {9}
    assert {done.n_undone for done in of(grid, "full_restart")} == {5}
    assert {(done.n_wasted, done.n_undone) for done in [*of(grid, "naive"), *of(grid, "ignore")]} == {(0, 0)}
    assert {(done.n_wasted, done.n_undone) for done in of(grid, "interrupt")} == {(1, 0)}
    assert {done.n_wasted for done in of(grid, "checkpoint_k")} == {4}
    assert all(done.converged for done in grid.values())


def test_the_case_study_step_for_step():
    done = run(EVENT, 0.25, SWAP, "absorber")
    assert [each.cls.value for each in done.before] == list("IIIIRRRRK")
    assert done.decision == Decision(tuple(range(8)), (done.before[8],), done.revised)
    assert done.state.turns[:8] == list(done.before[:8])
    said = [event.what for event in done.trace if event.kind is Kind.ACT]
    after = "send_proposal book_venue order_catering pay_deposit send_invitations send_reminder pay_caterer"
    assert " ".join(said[9:]) == after
    assert said[:9] == [step.name for step in EVENT.base_steps[:9]]
    again = run(EVENT, 0.25, SWAP, "full_restart")
    assert (again.n_wasted, len(again.state.turns), again.decision.kept) == (9, 15, ())


def test_stale_reads_are_kept_by_the_absorber_and_by_nobody_who_tracks_them(grid):
    for method in METHODS:
        kept = {key[3]: 0 for key in grid}
        for (name, _, _, kind), done in grid.items():
            if name == method:
                kept[kind] += len(done.stale_kept)
        if method in ("revise", "revise_plus", "full_restart", "foresight"):
            assert set(kept.values()) == {0}, method
        else:
            assert all(kept[kind] > 0 for kind in (ADD, LESS, SWAP, DROP)), method
            assert kept[FIRST] == 0, "the order of the steps is quoted by no inert or reversible act"


def test_an_example_of_stale_reads_that_can_be_followed():
    done = run(EVENT, 0.25, SWAP, "absorber")
    stale = ["search_venues", "search_caterers", "draft_plan", "draft_budget", "draft_menu"]
    assert [each.step for each in done.stale_kept] == stale
    venue = done.state.by_step()["search_venues"].result["name"]
    assert "(indoor dinner)" in venue
    proposal, booked = (next(done.world.standing(tool)).args for tool in ("send_proposal", "book_venue"))
    assert f"an outdoor barbecue at {venue}" in proposal["body"], "a barbecue, in a hall that was found for a dinner"
    assert booked["name"] == venue
    assert "book_venue.detail has outdoor barbecue" in done.broken
    right = run(EVENT, 0.25, SWAP, "revise")
    assert (right.quality, right.stale_kept) == (5.0, [])
    assert {each.step for each in right.state.turns if each.early} == {
        "check_forecast",
        "look_up_staff",
        "draft_guest_list",
    }


def test_stale_is_what_was_derived_from_what_changed():
    turns = [
        turn("a", result={"x": 1}, reads=[("", "clause", "old")]),
        turn("b", result={"y": 1}, reads=[("a", "x", 1)]),
        turn("c", reads=[("", "other", "same")]),
        turn("d", reads=[("gone", "z", 3)]),
        turn("e", reads=[("never", "z", None)]),
    ]
    spec = {"clause": "new", "other": "same"}
    assert [each.step for each in stale_turns(turns, spec)] == ["a", "b", "d"]
    again = [*turns[1:], turn("a", result={"x": 1}, reads=[("", "clause", "new")])]
    assert [each.step for each in stale_turns(again, spec)] == ["d"], "made again to the same: its reader settles"
    again[-1].result = {"x": 2}
    assert [each.step for each in stale_turns(again, spec)] == ["b", "d"]


def test_the_order_of_quality_is_the_published_one_up_to_restart_and_foresight(grid):
    mean = {method: np.mean([done.quality for done in of(grid, method)]) for method in METHODS}
    assert mean["ignore"] < mean["naive"] < mean["absorber"] < mean["full_restart"] <= mean["foresight"]
    assert mean["revise"] == mean["revise_plus"] == 5.0
    assert mean["interrupt"] < mean["naive"], "what is sent again without taking the first one back stands twice"


def test_an_interrupt_makes_the_superstep_again_and_takes_nothing_back():
    done = run(EVENT, 0.5, SWAP, "interrupt")
    bodies = [entry.args["body"] for entry in done.world.standing("send_proposal")]
    assert ["indoor" in bodies[0], "outdoor" in bodies[1]] == [True, True]
    assert "send_proposal.body once" in done.broken


def test_effects_that_wait_for_the_close_need_no_compensation(grid):
    assert {done.n_compensated for done in of(grid, "revise_plus")} == {0}
    assert max(done.n_compensated for done in of(grid, "revise")) == 1
    late = run(EVENT, 0.25, SWAP, "revise_plus", at=15)
    assert (late.quality, late.n_compensated, late.n_residue) == (5.0, 0, 0)


@pytest.mark.parametrize("method", METHODS)
def test_a_late_revision_meets_what_cannot_be_undone(method):
    done = run(EVENT, 0.25, SWAP, method, at=13)
    paid = [entry.args["to"] for entry in done.world.standing("pay_deposit")]
    wants = [each for each in done.before if each.step == "pay_deposit"]
    if method in ("absorber", "full_restart", "checkpoint_k"):
        assert done.n_residue == 1, "paid for the hall"
        assert len(paid) == 2, "and for the lawn"
    elif method == "revise":
        assert (done.n_residue, len(paid)) == (1, 1), "it does not pay twice, and lists what is left"
    else:
        assert (done.n_residue, len(paid)) == (0, 1)
    assert wants


def test_an_attentive_agent_repairs_what_it_notices():
    kept = [len(run(EVENT, 0.25, SWAP, "absorber", attention=attention).stale_kept) for attention in (0, 1)]
    assert kept == [5, 1], "the budget quotes no clause: it is stale through the offers, and nobody notices"
    some = [run(EVENT, 0.25, SWAP, "naive", attention=0.5, seed=seed).trace for seed in (1, 1, 2)]
    assert some[0] == some[1] != some[2]


# --- theorem 3 ---


def test_earliest_conflict_is_the_best_of_all_rollback_points(grid):
    assert {done.theorem_3() for done in grid.values()} == {True}
    rng = np.random.default_rng(7)
    for _ in range(400):
        turns = []
        for at in range(int(rng.integers(0, 12))):
            cls = list(C)[rng.integers(4)]
            reads = [("", "clause", "old" if rng.random() < 0.3 else "new")]
            turns.append(turn(f"s{at}", cls, reads=reads, entry=None if cls is C.INERT else at))
        spec = {"clause": "new"}
        k = earliest_conflict(turns, lambda each: compatible(each, spec))  # noqa: B023
        assert k == best_rollback(turns, spec)
        worse = [sum(adaptation_cost(turns, other)[1:]) for other in range(k)]
        assert all(cost > sum(adaptation_cost(turns, k)[1:]) for cost in worse), "no other point costs as little"


def test_the_brute_force_would_notice_another_rule():
    turns = [turn("a", C.REVERSIBLE, entry=1), turn("b", C.COMPENSABLE, reads=[("", "clause", "old")], entry=2)]
    assert best_rollback(turns, {"clause": "new"}) == 1
    assert best_rollback(turns, {"clause": "old"}) == 2
    assert adaptation_cost(turns, 0) == (0, 2, 2)


# --- over HTTP ---


@pytest.mark.slow
def test_runs_over_http_with_real_tool_calls_leave_the_same_traces():
    from revise_lab.workloads.streambench.react import ReactAgent, ToolServer, open_client

    rng = np.random.default_rng(1)
    with ToolServer() as server, open_client(server.url) as client:
        n_calls = 0
        for method in [*METHODS, "absorber", "absorber", "revise"]:
            scenario, rho, kind = ALL[rng.integers(len(ALL))]
            agent = ReactAgent(scenario, client)
            over, here = run(scenario, rho, kind, method, agent=agent), run(scenario, rho, kind, method)
            assert over.trace == here.trace, (method, scenario.name, rho, kind)
            assert over.world.public() == here.world.public()
            assert over.n_tokens > 0
            n_calls += agent.n_calls
        assert len(server.log) == n_calls
    assert set(PUBLISHED) < set(METHODS)


@pytest.mark.slow
def test_arguments_cut_off_on_the_wire_are_answered_over_the_wire():
    from revise_lab.workloads.streambench.react import ReactAgent, ToolServer, open_client

    with ToolServer(garbled={2, 3, 10}) as server, open_client(server.url) as client:
        over = run(REPORT, 0.5, SWAP, "revise", agent=ReactAgent(REPORT, client))
    assert over.n_malformed == 3
    assert over.world.public() == run(REPORT, 0.5, SWAP, "revise").world.public()
