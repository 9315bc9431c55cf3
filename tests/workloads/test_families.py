"""The serving families S12 and S8 and the random ones: which nodes follow a revision, what is a function of what."""

from __future__ import annotations

import numpy as np
import pytest

from revise_lab.core.plan import Scope
from revise_lab.policies import policy
from revise_lab.records.attempt import Coverage
from revise_lab.records.event import to_json
from revise_lab.records.revision import Change, Op, Revision
from revise_lab.runtime.simulator import Simulator, truth_of
from revise_lab.workloads.serving import FAMILIES, S8, S12
from revise_lab.workloads.synthetic import WorldShape, free_family, random_world

TAIL = "draft check merge answer"
SETS = {
    ("S12", "client.id"): (11, f"account match rank plan {TAIL}"),
    ("S12", "transport.mode"): (9, f"freight rank plan {TAIL}"),
    ("S12", "rules.tier"): (8, f"policy rank plan {TAIL}"),
    ("S12", "style.tone"): (4, TAIL),
    ("S12", "style.length"): (4, TAIL),
    ("S8", "purchase.id"): (7, "orders plan draft review reply"),
    ("S8", "rules.window"): (6, "policy plan draft review reply"),
    ("S8", "client.tier"): (5, "profile plan draft review reply"),
    ("S8", "style.tone"): (3, "draft review reply"),
    ("S8", "limits.refund"): (2, "review reply"),
}
LAST_RUNS_S = {"S12": 7.5, "S8": 4.5}


def revised(family, leaf, chosen, at_s, loss=None):
    artifact, field = leaf.split(".")
    revision = Revision("r", (Change(artifact, Op.SET, (field,), "second"),))
    run = Simulator(
        family.workflow(), family.inputs(), chosen, revisions=[(at_s, revision)], loss=loss, validate=True
    ).run()
    assert truth_of(run)[1] == []
    return run


@pytest.mark.parametrize(("family", "leaf"), SETS)
def test_which_nodes_run_again(family, leaf):
    size, affected = SETS[family, leaf]
    family, at_s = FAMILIES[family], LAST_RUNS_S[family]
    order = family.workflow().graph().order
    assert order == tuple(family.reads)
    run = revised(family, leaf, policy("revise"), at_s)
    assert list(run.executed(at_s)) == affected.split()
    suffix = revised(family, leaf, policy("suffix"), at_s)
    assert sorted(suffix.executed(at_s), key=order.index) == list(order[-size:])
    assert sorted(revised(family, leaf, policy("restart"), at_s).executed(at_s), key=order.index) == list(order)


@pytest.mark.parametrize(("family", "suffix", "affected"), [(S12, 36, 30), (S8, 23, 20)], ids=["S12", "S8"])
def test_the_sums(family, suffix, affected):
    rows = [row for (name, leaf), row in SETS.items() if name == family.name and leaf in family.revised]
    assert [leaf for name, leaf in SETS if name == family.name] == list(family.revised)
    assert (sum(size for size, _ in rows), sum(len(names.split()) for _, names in rows)) == (suffix, affected)
    plans = [revised(family, leaf, policy("revise"), LAST_RUNS_S[family.name]).plans[0] for leaf in family.revised]
    ratios = [plan.recompute_ratio for plan in plans]
    assert np.mean(ratios) == pytest.approx(0.5), "half of the active nodes"


def test_a_hit_node_that_lost_a_read_means_a_full_restart():
    def loss(node, selector):
        return Coverage.UNKNOWN if selector.path == ("tone",) else Coverage.COMPLETE

    for leaf, scope, count in (("style.length", Scope.RESTART, 12), ("rules.tier", Scope.RESTART, 12)):
        run = revised(S12, leaf, policy("revise"), 7.5, loss)
        assert (run.plans[0].scope, len(run.executed(7.5))) == (scope, count)
    local = revised(S12, "rules.tier", policy("revise", unknown="local"), 7.5, loss)
    assert list(local.executed(7.5)) == SETS["S12", "rules.tier"][1].split()
    elsewhere = revised(S12, "rules.tier", policy("revise"), 0.5, loss)
    assert elsewhere.plans[0].scope == Scope.SUBGRAPH, "nobody incomplete had started"


def test_free_families_are_a_function_of_the_generator():
    one, same, other = (free_family(np.random.default_rng(seed)) for seed in (5, 5, 6))
    assert (one.reads, one.parents, one.revised) == (same.reads, same.parents, same.revised)
    assert (one.reads, one.parents) != (other.reads, other.parents)


@pytest.mark.parametrize("seed", range(12))
def test_free_families_are_layered_and_unfitted(seed):
    family = free_family(np.random.default_rng(seed), n_nodes=9, n_layers=4)
    assert (len(family.reads), family.matched) == (9, False)
    nodes = list(family.reads)
    assert all(nodes.index(parent) < nodes.index(node) for node, own in family.parents.items() for parent in own)
    assert all(own or family.parents[node] for node, own in family.reads.items()), "nobody reads nothing"
    assert set(family.revised) <= {leaf for own in family.reads.values() for leaf in own}
    assert 1 <= len(family.revised) <= 5
    order = family.workflow().graph().order
    for leaf in family.revised:
        run = revised(family, leaf, policy("revise"), 99.0)
        closure = {node for node, own in family.reads.items() if leaf in own}
        for node in order:
            closure |= {node} if closure & set(family.parents[node]) else set()
        assert set(run.executed(99.0)) == closure


def test_worlds_are_a_function_of_the_generator_and_use_every_part():
    def line(seed, **shape):
        world = random_world(np.random.default_rng(seed), WorldShape(**shape))
        run = Simulator(world.workflow, world.inputs, policy("revise"), revisions=world.revisions).run()
        return [to_json(entry) for entry in run.machine.journal], world.workflow.graph()

    assert line(4)[0] == line(4)[0]
    assert line(4)[0] != line(5)[0]
    parts = {"router": 1.0, "members": 1.0, "unknown": 1.0}
    plain = [line(seed, **dict.fromkeys(parts, 0.0))[1] for seed in range(4)]
    for part, uses in {
        "router": lambda node: node.branch is not None,
        "members": lambda node: node.membership is not None,
        "unknown": lambda node: bool(node.unknown),
    }.items():
        full = [line(seed, **{**dict.fromkeys(parts, 0.0), part: 1.0})[1] for seed in range(4)]
        assert all(any(map(uses, graph.nodes.values())) for graph in full)
        assert not any(any(map(uses, graph.nodes.values())) for graph in plain)
