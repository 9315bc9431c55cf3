"""The absorber on a DAG: where it goes back to, in the order of commits, and what its runs keep that is stale."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from revise_lab.audit.auditor import Anomaly, audit
from revise_lab.core.machine import replay
from revise_lab.core.plan import Policy, Scope, Switches
from revise_lab.errors import RefusedCombination
from revise_lab.policies import names, policy
from revise_lab.policies.rollback import absorber
from revise_lab.records import event as ev
from revise_lab.records.effect import Effect
from revise_lab.records.revision import Change, Op, Revision
from revise_lab.records.workflow import Workflow
from revise_lab.runtime.simulator import Simulator, simulate, truth_of
from revise_lab.workloads.synthetic import WorldShape, random_world

INPUTS = {"task": {"style": "indoor", "date": "12 June"}}
LASTS = {"search": 1.0, "calendar": 1.5, "reserve": 1.0, "propose": 2.0, "book": 1.0}


def set_to_new(leaf):
    return Revision("r", (Change("task", Op.SET, (leaf,), "new"),))


def shop(kind="K"):
    """Two branches: search, proposal, booking one after another; and a calendar with a reservation beside."""
    flow = Workflow("shop")

    @flow.node(kind="model")
    async def search(state, ctx):
        return {"hall": (await ctx.model(f"hall for {state['task']['style']}")).text}

    @flow.node(kind="model")
    async def calendar(state, ctx):
        return {"day": (await ctx.model(f"day {state['task']['date']}")).text}

    @flow.node(kind="model", after="calendar")
    async def reserve(state, ctx):
        ctx.stage(Effect("slot", state["calendar"]["day"], kind))
        return {"slot": (await ctx.model("reserve")).text}

    @flow.node(kind="model", after="search")
    async def propose(state, ctx):
        ctx.stage(Effect("mail", state["search"]["hall"], kind))
        return {"said": (await ctx.model("propose")).text}

    @flow.node(kind="model", after=("propose", "reserve"))
    async def book(state, ctx):
        ctx.stage(Effect("hall", state["propose"]["said"], kind))
        return {"booked": (await ctx.model("book")).text}

    return flow


def decided(at_s, leaf, kind="K", check=None, durations=()):
    """Return (scope, affected nodes, effects asked about) of the absorber on the view of a revision at a time."""
    answers, asked = [], []

    def watched(view, run, effect):
        asked.append(f"{run.name}.{effect.slot}")
        return check(run.name)

    planner = absorber(watched) if check else absorber()
    chosen = policy("revise")

    def plan(view):
        decision = planner(view)
        answers.append((decision.scope, sorted(run.name for run in decision.affected)))
        return chosen.plan(view)

    lasts = {**LASTS, **dict(durations)}
    Simulator(
        shop(kind), INPUTS, chosen._replace(plan=plan), revisions=[(at_s, set_to_new(leaf))],
        duration_s=lambda ask: lasts[ask.node],
    ).run()  # fmt: skip
    assert len(answers) == 1
    return *answers[0], asked


def test_it_goes_back_to_just_before_the_first_commit_whose_effect_is_incompatible():
    """Commits: search 1.0, calendar 1.5, reserve 2.5, propose 3.0, book 4.0."""
    assert decided(3.5, "style")[:2] == (Scope.SUFFIX, ["book", "propose"]), "search read what changed, and stays"
    assert decided(4.5, "style")[:2] == (Scope.SUFFIX, ["book", "propose"])


def test_what_committed_after_the_conflict_goes_whatever_its_branch():
    assert decided(3.5, "date")[:2] == (Scope.SUFFIX, ["book", "propose", "reserve"])


def test_a_running_attempt_that_started_before_the_conflict_goes_on():
    scope, affected, _ = decided(3.2, "date", durations={"propose": 4.0})
    assert (scope, affected) == (Scope.SUFFIX, ["reserve"]), "propose has run since 1.0, before reserve committed"


@pytest.mark.parametrize("kind", ["R", "I"])
def test_what_is_not_hard_never_constrains(kind):
    if kind == "I":
        assert decided(0.5, "style")[:2] == (Scope.SUFFIX, []), "nothing has been published yet"
    else:
        assert decided(3.5, "style", kind="R")[:2] == (Scope.SUFFIX, [])


def test_there_is_one_call_for_each_published_effect_in_the_order_of_commits():
    *_, asked = decided(4.5, "style", check=lambda node: True)
    assert asked == ["reserve.slot", "propose.mail", "book.hall"]
    _, affected, asked = decided(4.5, "style", check=lambda node: node != "propose")
    assert asked == ["reserve.slot", "propose.mail"], "none after the first that fails"
    assert affected == ["book", "propose"]


# --- as a policy: it plans, and nothing checks what it keeps ---


def revised(name, at_s=5.0, leaf="style", kind="K"):
    revisions = [(at_s, set_to_new(leaf))]
    return simulate(shop(kind), INPUTS, name, revisions=revisions, duration_s=lambda ask: LASTS[ask.node])


@pytest.mark.parametrize("name", [name for name in names() if name != "absorber"])
def test_no_other_policy_may_go_without_a_check(name):
    with pytest.raises(
        RefusedCombination, match=rf"policy '{name}' with check='none' - .*use check='delta' or 'digest'"
    ):
        policy(name, check="none", propagation="descendants", extension="off")


@pytest.mark.parametrize("check", ["delta", "digest"])
def test_the_absorber_is_not_checked_or_it_would_be_another_policy(check):
    with pytest.raises(RefusedCombination, match=rf"policy 'absorber' with check='{check}' - .*leave check at 'none'"):
        policy("absorber", check=check)


@pytest.mark.parametrize("switch", [{"propagation": "diff"}, {"control": "condition"}, {"extension": "on"}])
def test_what_compares_reads_is_refused_where_none_are_compared(switch):
    (name, value), *_ = switch.items()
    with pytest.raises(RefusedCombination, match=rf"{name}='{value}' with check='none' - .*use check='digest'"):
        Switches(check="none", **switch)


def test_it_keeps_what_read_the_change_and_the_auditor_counts_it():
    run = revised("absorber")
    assert (run.machine.status, run.machine.late_invalid) == ("closed", 0)
    assert run.executed(5.0) == ("propose", "book")
    assert [(what, intent.node) for at_s, what, intent in run.effect_log if at_s >= 5.0] == [
        ("undo", "book"),
        ("undo", "propose"),
        ("publish", "propose"),
        ("publish", "book"),
    ], "compensated in reverse, then done again"
    found = audit(run.machine.journal)
    retained = [
        (each.attempt, each.read, each.seen, each.latest) for each in found if each.anomaly is Anomaly.STALE_READ
    ]
    assert retained == [("search@1", "task.style", "indoor", "new")]
    stale = {each.attempt for each in found if each.anomaly is Anomaly.STALE_OUTPUT}
    assert stale == {"propose@2", "book@2"}, "made again, from a hall that was found for the old style"
    _, wrong = truth_of(run)
    assert wrong
    clean = revised("revise")
    assert (audit(clean.machine.journal), truth_of(clean)[1]) == ([], [])
    assert clean.executed(5.0) == ("search", "propose", "book")


def test_a_plan_says_what_it_keeps_although_it_read_the_change():
    (plan,) = revised("absorber").plans
    assert plan.affected == ("propose", "book")
    why = "task.style changed (r) and it read task.style as data"
    assert plan.rows()[0] == ("search", "reuse", why)
    running = revised("absorber", at_s=0.5).plans[0]
    assert running.rows() == [("search", "continue", why)], "it started before, and goes on with the old text"


def test_with_nothing_incompatible_nothing_is_rolled_back_and_a_running_attempt_commits_what_it_saw():
    run = revised("absorber", at_s=0.5)
    assert sorted(run.executed()) == ["book", "calendar", "propose", "reserve", "search"], "each ran once"
    kinds = Counter(each.anomaly for each in audit(run.machine.journal))
    assert kinds[Anomaly.STALE_COMMIT] > 0 < kinds[Anomaly.STALE_READ]


def test_a_node_that_failed_on_what_changed_runs_again():
    flow = Workflow("check")

    @flow.node(kind="tool")
    async def limit(state, ctx):
        if state["task"]["style"] == "indoor":
            raise ValueError("no hall")
        return {"ok": True}

    run = simulate(flow, INPUTS, "absorber", revisions=[(2.0, set_to_new("style"))])
    assert (run.machine.status, run.machine.outputs()) == ("closed", {"limit": {"ok": True}})


def test_another_way_to_judge_compatibility_is_a_policy_of_ones_own():
    mine = Policy("mine", absorber(lambda view, run, effect: effect.slot != "hall"), Switches(check="none"))
    assert revised(mine).executed(5.0) == ("book",)


#: What its runs may show: all of it is something stale, none of it lost, doubled or out of order.
BY_DESIGN = {
    Anomaly.STALE_COMMIT, Anomaly.STALE_READ, Anomaly.STALE_OUTPUT, Anomaly.MIXED_VERSIONS, Anomaly.DEAD_BRANCH,
    Anomaly.STALE_EFFECT,
}  # fmt: skip


def test_random_runs_end_and_are_stale_and_nothing_else():
    """The protocol holds in all other respects; and where nothing is stale the run is right."""
    kinds, n_right = Counter(), 0
    for seed in range(60):
        shape = WorldShape(effect=0.6, n_nodes=8, n_revisions=1 + seed % 3, router=0.5, members=0.3)
        world = random_world(np.random.default_rng([17, seed]), shape)
        run = Simulator(
            world.workflow, world.inputs, policy("absorber"), revisions=world.revisions, validate=True,
            duration_s=lambda ask: world.durations_s.get(ask.node.partition("[")[0], 1.0),  # noqa: B023
        ).run()  # fmt: skip
        assert (run.machine.status, run.machine.late_invalid) == ("closed", 0), seed
        found = audit(run.machine.journal)
        kinds += Counter(each.anomaly for each in found)
        if not found:
            assert truth_of(run)[1] == [], seed
            n_right += 1
        again = replay(
            run.machine.graph, [ev.from_json(ev.to_json(each)) for each in run.machine.journal], policy("absorber")
        )
        assert again.fingerprint() == run.machine.fingerprint(), seed
    assert kinds.keys() <= BY_DESIGN
    assert kinds[Anomaly.STALE_READ] > 10
    assert n_right > 5
