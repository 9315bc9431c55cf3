"""Policies: what cannot be built, and how the plans of all of them lie inside each other."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from revise_lab import policies
from revise_lab.core.plan import Policy, Scope, Switches
from revise_lab.errors import RefusedCombination
from revise_lab.policies import baselines, policy, selective
from revise_lab.records.attempt import Coverage
from revise_lab.records.revision import Change, Op, Revision
from revise_lab.runtime.simulator import Simulator, simulate
from revise_lab.workloads.serving import S12, Family
from revise_lab.workloads.synthetic import WorldShape, free_family, random_world

DIFF = {"check": "digest", "propagation": "diff"}


# --- what cannot be built ---


@pytest.mark.parametrize(
    ("name", "switches", "message"),
    [
        (
            "revise",
            {"propagation": "diff"},
            r"propagation='diff' with check='delta'.*use check='digest', or propagation",
        ),
        ("revise", {"propagation": "diff", "check": "delta"}, r"propagation='diff' with check='delta'"),
        ("revise", {"order": "start"}, r"policy 'revise' has no linear order - order='start' belongs to 'suffix'"),
        ("restart", {"order": "commit"}, r"policy 'restart' has no linear order - order='commit'"),
        ("revise", {"check": "hash"}, r"check='hash' - choose delta or digest or none"),
        ("revise", {"unknown": "none"}, r"unknown='none' - choose global or local"),
        ("revise", {"extension": "on"}, r"extension='on' with check='delta'.*use check='digest', or extension='off'"),
        ("suffix", {"order": "random"}, r"order='random' - choose topological or start or commit"),
        ("revise", {"release": "never"}, r"release='never' - choose commit or close"),
        ("redo", {}, r"no policy is named 'redo' - choose one of .*restart.*suffix.*revise.*wait"),
    ],
)
def test_combinations_without_a_meaning_are_refused(name, switches, message):
    with pytest.raises(RefusedCombination, match=message):
        policy(name, **switches)


def test_switches_are_kept_and_cannot_be_changed():
    chosen = policy("suffix", check="digest", order="start")
    assert (chosen.name, chosen.switches.check, chosen.switches.order) == ("suffix", "digest", "start")
    assert Switches(**chosen.switches.as_dict()) == chosen.switches
    with pytest.raises(AttributeError):
        chosen.switches.check = "delta"


def test_a_name_is_taken_once():
    assert {"restart", "suffix", "revise", "wait", "absorber"} <= set(policies.names())
    with pytest.raises(RefusedCombination, match="'revise' exists already"):
        policies.register("revise", selective.revise)


# --- all planners on one view ---


PLANNERS = {
    "diff": (selective.revise, {"check": "digest", "propagation": "diff"}),
    "descendants": (selective.revise, {"propagation": "descendants"}),
    "suffix": (baselines.suffix, {}),
    "suffix by start": (baselines.suffix, {"order": "start"}),
    "suffix by commit": (baselines.suffix, {"order": "commit"}),
    "restart": (baselines.restart, {}),
}


def probing(chosen, look):
    """Return a policy that asks every planner on each view, shows what they say, and then does as it would."""

    def plan(view):
        decided = {
            name: planner(view._replace(switches=replace(view.switches, **switches))).affected
            for name, (planner, switches) in PLANNERS.items()
        }
        look(view, decided)
        return chosen.plan(view)

    return chosen._replace(plan=plan)


def run_world(seed, chosen, *, n_revisions=3, loss=None, **shape):
    world = random_world(np.random.default_rng([11, seed]), WorldShape(n_revisions=n_revisions, **shape))
    return Simulator(
        world.workflow, world.inputs, chosen, revisions=world.revisions, loss=loss,
        duration_s=lambda ask: world.durations_s.get(ask.node.partition("[")[0], 1.0),
    ).run()  # fmt: skip


@pytest.mark.parametrize("unknown", ["global", "local"])
@pytest.mark.parametrize("name", ["revise", "suffix", "restart", "wait", "diff"])
def test_plans_on_one_view_are_included_in_each_other(name, unknown):
    strict = dict.fromkeys([*PLANNERS, "views"], 0)

    def look(view, decided):
        sets = {planner: set(affected) for planner, affected in decided.items()}
        assert set(view.hits) <= sets["diff"] <= sets["descendants"] <= sets["suffix"] <= sets["restart"]
        assert sets["restart"] == set(view.active())
        for order in ("suffix by start", "suffix by commit"):
            assert sets["descendants"] <= sets[order] <= sets["restart"]
            assert {child for run in sets[order] for child in run.children if child.active is not False} <= sets[order]
        for smaller, larger in (("diff", "descendants"), ("descendants", "suffix"), ("suffix", "restart")):
            strict[larger] += sets[smaller] < sets[larger]
        strict["views"] += 1

    chosen = policy("revise", unknown=unknown, **DIFF) if name == "diff" else policy(name, unknown=unknown)
    for seed in range(30):
        run_world(seed, probing(chosen, look), n_nodes=8)
    assert strict["views"] == 90
    assert min(strict[name] for name in ("descendants", "suffix", "restart")) > 5, strict


def test_every_affected_node_has_a_reason_that_leads_to_the_revision():
    def look(view, decided):
        affected = decided["descendants"]
        for run, why in affected.items():
            assert why.revision == view.revision
            if why.selector is None:
                (via,) = (parent for parent in run.parents if parent.name == why.via)
                assert via in affected or via.active is False, "the way may lead through a skipped node"
            else:
                assert run in view.hits
                assert why.selector in {read.selector for read in (run.attempt or run.current).reads}
        n_affected.append(len(affected))

    n_affected = []
    for seed in range(40):
        run_world(seed, probing(policy("revise", unknown="local"), look))
    assert sum(n_affected) > 100


# --- less provenance ---


def losing(depth, seed):
    """Return a loss; a deeper one loses what a shallower one loses, and more of it."""
    draws = {}

    def loss(node, selector):
        draw = draws.setdefault((node, selector.artifact), np.random.default_rng([seed, len(draws)]).random())
        if draw < depth / 2:
            return Coverage.UNKNOWN
        return Coverage.COARSE if draw < depth else Coverage.COMPLETE

    return loss


@pytest.mark.parametrize(
    ("name", "unknown"),
    [("revise", "global"), ("revise", "local"), pytest.param("suffix", "local", marks=pytest.mark.slow)],
)
def test_less_provenance_never_recomputes_less(name, unknown):
    larger = 0
    for seed in range(60):
        before = None
        for depth in (0.0, 0.3, 0.7, 1.0):
            run = run_world(seed, policy(name, unknown=unknown), n_revisions=1, loss=losing(depth, seed))
            plan = set(run.plans[0].affected)
            assert before is None or before <= plan, (seed, depth)
            larger += before is not None and before < plan
            before = plan
    assert larger > 10


@pytest.mark.parametrize(("unknown", "executed"), [("global", 12), ("local", 12)])
def test_without_provenance_everything_runs_again(unknown, executed):
    change = Revision("r", (Change("style", Op.SET, ("tone",), "other"),))
    runs = [
        simulate(S12.workflow(), S12.inputs(), policy("revise", unknown=unknown), revisions=[(7.5, change)], loss=loss)
        for loss in (None, lambda node, selector: Coverage.UNKNOWN)
    ]
    assert runs[0].executed(7.5) == ("draft", "check", "merge", "answer")
    assert len(runs[1].executed(7.5)) == executed
    assert runs[1].plans[0].scope == (Scope.RESTART if unknown == "global" else Scope.SUBGRAPH)


# --- what must not matter ---


@settings(max_examples=40)
@given(st.integers(0, 10_000), st.data())
def test_other_names_change_nothing_but_the_names(seed, data):
    family = free_family(np.random.default_rng(seed))
    names = dict(zip(family.reads, data.draw(st.permutations([f"z{i:02d}" for i in range(12)])), strict=True))
    renamed = Family(
        family.name,
        {names[node]: leaves for node, leaves in family.reads.items()},
        {names[node]: tuple(names[parent] for parent in parents) for node, parents in family.parents.items()},
        family.revised,
    )
    leaf = data.draw(st.sampled_from(family.revised))
    name = data.draw(st.sampled_from(["revise", "suffix", "restart"]))
    switches = data.draw(st.sampled_from([{}, DIFF, {"check": "digest"}]))
    at_s = data.draw(st.sampled_from([0.5, 1.5, 3.5, 9.5]))
    artifact, field = leaf.split(".")
    revisions = [(at_s, Revision("r", (Change(artifact, Op.SET, (field,), "new"),)))]
    ours, theirs = (
        Simulator(each.workflow(), each.inputs(), policy(name, **switches), revisions=revisions).run()
        for each in (family, renamed)
    )
    assert [names[node] for node in ours.executed()] == list(theirs.executed())
    assert [names[node] for node in ours.plans[0].affected] == list(theirs.plans[0].affected)


@pytest.mark.parametrize("switches", [{}, {"check": "digest"}, DIFF, {"unknown": "local"}])
@pytest.mark.parametrize("name", ["revise", "suffix"])
def test_a_change_that_nobody_read_affects_nobody(name, switches):
    inputs = {**S12.inputs(), "unread": {"x": 1}, "shelf": {"edition": "first", "colour": "red"}}
    for at_s in (0.5, 3.5, 7.5):
        for change in (
            Change("unread", Op.SET, ("x",), 2),
            Change("shelf", Op.SET, ("colour",), "blue"),
            Change("shelf", Op.DELETE, ("colour",)),
            Change("shelf", Op.SET, ("edition",), "first"),
        ):
            revisions = [(at_s, Revision("r", (change,)))]
            run = simulate(S12.workflow(), inputs, policy(name, **switches), revisions=revisions)
            assert run.plans[0].affected == ()
            assert sorted(run.executed()) == sorted(S12.reads), "each node ran once"


def test_a_policy_of_ones_own_is_a_function():
    """It needs a name, a planner and switches."""
    mine = Policy("mine", lambda view: baselines.everything(view, "because"), Switches(check="digest"))
    change = Revision("r", (Change("style", Op.SET, ("tone",), "other"),))
    run = Simulator(S12.workflow(), S12.inputs(), mine, revisions=[(7.5, change)]).run()
    assert len(run.executed(7.5)) == 12
    assert {why for _, _, why in run.plans[0].rows()} == {"r: because"}
