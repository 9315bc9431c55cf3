"""The supplier workflow: five revisions while `report` runs, and exactly which nodes run again under each policy.

Nothing here is declared by the workload: the sets follow from what its bodies read.
"""

from __future__ import annotations

import ast
import inspect

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from revise_lab.policies import policy
from revise_lab.records import event as ev
from revise_lab.records.revision import Change, Op, Revision
from revise_lab.records.selector import Marker, Role, parse_path
from revise_lab.runtime.simulator import Simulator, truth_of
from revise_lab.workloads.supplier import native
from revise_lab.workloads.supplier.native import EXTRA_REVISIONS, INPUTS, REVISIONS, build

ORDER = [
    "company",
    "costs",
    "policy",
    "requirements",
    "review_evidence",
    "assess",
    "screening",
    "reviewer",
    "join",
    "report",
]
WHILE_REPORT_RUNS_S = 4.5
AFFECTED = {
    "policy_control": "policy assess reviewer join report",
    "helper_goal": "requirements assess reviewer join report",
    "reviewer_evidence": "review_evidence assess reviewer join report",
    "country": "costs screening join report",
    "volume": "costs join report",
    "supplier": "company screening join report",
}
SUFFIX_FROM = {
    "policy_control": "policy", "helper_goal": "requirements", "reviewer_evidence": "review_evidence",
    "country": "costs", "volume": "costs", "supplier": "company",
}  # fmt: skip


def revised(name, chosen="revise", at_s=WHILE_REPORT_RUNS_S, flow=None, inputs=INPUTS, fields=None, **switches):
    path, value = {**REVISIONS, **EXTRA_REVISIONS}[name]
    artifact, (leaf,) = parse_path(path)
    change = Change(artifact, Op.SET, ((fields or {}).get(leaf, leaf),), value)
    revision = Revision(name, (change,))
    chosen = policy(chosen, **switches)
    run = Simulator(flow or build(), inputs, chosen, revisions=[(at_s, revision)], validate=True).run()
    assert truth_of(run)[1] == []
    return run


def again(run, at_s=WHILE_REPORT_RUNS_S):
    return sorted(run.executed(at_s), key=ORDER.index)


def suffix_of(name):
    return ORDER[ORDER.index(SUFFIX_FROM[name]) :]


@pytest.mark.parametrize("name", [*REVISIONS, "supplier"])
@pytest.mark.parametrize("chosen", ["restart", "suffix", "revise", "wait"])
def test_which_nodes_run_again(name, chosen):
    run = revised(name, chosen)
    affected = AFFECTED[name].split()
    expected = {"restart": ORDER, "wait": ORDER, "suffix": suffix_of(name), "revise": affected}[chosen]
    at_s = WHILE_REPORT_RUNS_S if chosen != "wait" else 5.0
    assert again(run, at_s) == expected
    assert list(run.plans[0].affected) == expected
    aborted = [call.node for call in run.calls if call.outcome == "aborted"]
    assert aborted == ([] if chosen == "wait" else ["report"])
    assert run.accepted_s == [WHILE_REPORT_RUNS_S]
    before = [call.node for call in run.calls if call.start_s < WHILE_REPORT_RUNS_S]
    assert sorted(before, key=ORDER.index) == ORDER, "everything had been started once"


@pytest.mark.parametrize(("chosen", "total"), [("restart", 50), ("suffix", 39), ("revise", 22)])
def test_the_sums_of_the_five(chosen, total):
    sizes = [len(again(revised(name, chosen))) for name in REVISIONS]
    assert sum(sizes) == total
    if chosen != "restart":
        assert sizes == {"suffix": [8, 7, 6, 9, 9], "revise": [5, 5, 5, 4, 3]}[chosen]


def test_the_sixth_leaf_is_worth_a_restart_of_the_suffix():
    assert [len(again(revised("supplier", chosen))) for chosen in ("suffix", "revise")] == [10, 4]


@pytest.mark.parametrize(
    ("chosen", "expected"),
    [
        ("revise", ["policy", "report"]),
        ("restart", [node for node in ORDER if node not in ("assess", "reviewer", "join")]),
        ("suffix", ["policy", "requirements", "review_evidence", "screening", "report"]),
    ],
)
def test_a_blocked_tier_closes_the_lane(chosen, expected):
    run = revised("blocked", chosen)
    assert again(run) == expected
    retracted = [entry.node for entry in run.machine.journal if isinstance(entry, ev.Retracted)]
    assert sorted(retracted) == ["assess", "join", "reviewer"]
    assert sorted(run.outputs, key=ORDER.index) == [n for n in ORDER if n not in ("assess", "reviewer", "join")]
    assert "not pursued" in run.machine.runs["report"].current.calls[0].request["prompt"]


def test_a_run_that_is_blocked_from_the_start_makes_seven_calls():
    run = Simulator(build(), {**INPUTS, "rules": {"tier": "blocked"}}, policy("revise")).run()
    assert len(run.calls) == 7
    assert "not pursued" in run.machine.runs["report"].current.calls[0].request["prompt"]


@pytest.mark.parametrize("name", REVISIONS)
def test_under_diff_the_same_nodes_run_because_every_text_changes(name):
    run = revised(name, check="digest", propagation="diff")
    assert again(run) == AFFECTED[name].split()


def test_six_leaves_seven_data_reads_and_one_control_read():
    run = Simulator(build(), INPUTS, policy("revise")).run()
    reads = [
        (node.name, read.selector)
        for node in run.machine.runs.values()
        for read in node.current.reads
        if read.selector.artifact in INPUTS and read.selector.marker is Marker.VALUE
    ]
    assert len({selector[:2] for _, selector in reads}) == 6
    assert [sum(selector.role is role for _, selector in reads) for role in (Role.DATA, Role.CONTROL)] == [7, 1]
    assert [(node, str(selector)) for node, selector in reads if selector.role is Role.CONTROL] == [
        ("policy", "rules.tier")
    ]


@pytest.mark.parametrize("at_s", [0.5, 1.5, 2.5, 3.5])
@pytest.mark.parametrize("name", REVISIONS)
def test_earlier_revisions_leave_the_rest_alone(name, at_s):
    """What had started and is not affected runs once; what is affected runs once more if it had started."""
    run = revised(name, at_s=at_s)
    starts = [call.node for call in run.calls]
    begun = {call.node for call in run.calls if call.start_s < at_s}
    for node in ORDER:
        assert starts.count(node) == 1 + (node in AFFECTED[name].split() and node in begun), node


def test_an_output_changes_where_the_plan_says_and_nowhere_else():
    fresh = Simulator(build(), INPUTS, policy("revise")).run().outputs
    for name in REVISIONS:
        changed = [node for node, output in revised(name).outputs.items() if output != fresh[node]]
        assert sorted(changed, key=ORDER.index) == AFFECTED[name].split()


LEAVES = [leaf for group in INPUTS.values() for leaf in group]


@settings(max_examples=25)
@given(st.permutations(ORDER[:5]), st.permutations(LEAVES), st.sampled_from([*REVISIONS, "supplier"]))
def test_sets_follow_the_reads_not_the_names(order, renamed, name):
    """Leaves take each other's names and the first nodes another order: the affected set stays, the suffix moves."""
    fields = dict(zip(LEAVES, [f"{leaf}_2" for leaf in renamed], strict=True))
    inputs = {group: {fields[leaf]: value for leaf, value in leaves.items()} for group, leaves in INPUTS.items()}
    flow = build(fields, tuple(order))
    affected = set(AFFECTED[name].split())
    run = revised(name, flow=flow, inputs=inputs, fields=fields)
    assert set(again(run)) == affected
    declared = flow.graph().order
    suffix = list(declared[min(map(declared.index, affected)) :])
    assert sorted(again(revised(name, "suffix", flow=flow, inputs=inputs, fields=fields))) == sorted(suffix)


def test_the_order_of_declaration_moves_the_suffix():
    last_first = build(order=tuple(reversed(ORDER[:5])))
    assert len(again(revised("volume", "suffix", flow=last_first))) == 7
    assert len(again(revised("volume", "suffix"))) == 9


def test_the_workload_is_written_as_a_user_would_write_it():
    imported = set()
    for node in ast.walk(ast.parse(inspect.getsource(native))):
        if isinstance(node, ast.Import):
            imported |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert not node.level
            imported |= {f"{node.module}.{alias.name}" for alias in node.names}
    assert {name for name in imported if name.startswith("revise_lab")} == {"revise_lab.Workflow"}
    assert not any(part in name for name in imported for part in ("records", "core", "selector"))
    assert not any("revise_lab" in name and name != "revise_lab.Workflow" for name in imported)
