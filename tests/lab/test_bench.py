"""The benchmark measures what it says: the reads are touched, ten nodes are affected, the scan agrees with the index."""

from __future__ import annotations

import sys

import pytest

from revise_lab.errors import ConfigError
from revise_lab.lab import bench
from revise_lab.lab.bench import certificate, events, planning, samples
from revise_lab.records import event as ev


@pytest.mark.parametrize("name", ["revise", "revise_plus"])
def test_the_timed_certificate_has_eight_reads_and_three_parents_three_levels_deep(name):
    machine, attempt_id = certificate.certified(name, 20)
    machine.handle(ev.Observe(attempt_id, samples.reads_of(machine, attempt_id, certificate.PLACES)))
    attempt = machine.attempts[attempt_id]
    assert len(attempt.reads) == 8
    assert {len(read.selector.path) for read in attempt.reads} == {3}
    assert [consumed for _, consumed in attempt.parents] == ["p0@1", "p1@1", "p2@1"]
    assert machine.index.n_cells == 28


def test_what_is_timed_as_touched_was_touched_and_holds_again():
    machine, attempt_id = certificate.touched()
    attempt = machine.attempts[attempt_id]
    assert sum(cell.version > attempt.v_start for cell in attempt.cells) == 8
    assert attempt.valid


@pytest.mark.parametrize("name", ["revise", "revise_plus"])
def test_a_revision_of_a_chain_concerns_its_ten_nodes_and_the_scan_finds_the_same_reader(name):
    world = planning.Chains(1_000, name)
    assert world.machine.closable, "the run is finished before it is revised"
    spent = world.probe.planning(world.machine, world.revision(7, 1))
    planned = [entry for entry in world.machine.journal if isinstance(entry, ev.Planned)][-1]
    assert [each.node for each in planned.nodes] == [f"n{i}" for i in range(70, 80)]
    assert spent > 0
    assert world.scan(7) == 1
    world.run_chain(7, 1)
    assert world.machine.closable


def test_planning_is_compared_with_the_peer_and_with_looking_at_everything():
    pytest.importorskip("networkx")
    rows = planning.planning_of("revise", (100, 1_000), 2)
    assert {row.what for row in rows} == {
        "planning", "handle(Revise)", "handle(Start)", "handle(Finish)", "instead of the index",
    }  # fmt: skip
    assert all(row.ratio for row in rows if row.what in ("planning", "instead of the index"))
    assert [row.exponent is not None for row in rows if row.what == "planning"] == [False, True]


@pytest.mark.slow
def test_without_the_peer_the_rows_say_so(monkeypatch):
    monkeypatch.setitem(sys.modules, "networkx", None)
    rows = [row for row in planning.planning_of("revise", (100,), 1) if row.what == "planning"]
    assert rows[0].ratio is None
    assert "peers" in rows[0].note


@pytest.mark.parametrize("name", ["revise", "revise_plus"])
def test_the_events_are_those_of_a_whole_run_with_a_revision_half_way(name):
    make, stream = events.stream(name)
    machine = make()
    for event in stream:
        machine.handle(event)
    assert machine.closable
    assert all(len(run.current.reads) == 8 for run in machine.runs.values())
    kinds = {type(event) for event in stream}
    assert kinds >= {ev.Start, ev.Finish, ev.Observe, ev.Revise}
    assert machine.plan.affected


@pytest.mark.parametrize(("costs", "flat"), [((5.0, 5.1, 5.0), True), ((5.0, 50.0, 500.0), False)])
def test_growth_is_the_slope_between_logarithms_and_is_judged(costs, flat):
    rows = [bench.Row("x", str(cost), 1, cost, cost, budget=1_000.0, met=True) for cost in costs]
    *others, last = samples.with_exponent(rows, (10, 100, 1_000))
    assert last.exponent == pytest.approx(0.0 if flat else 1.0, abs=0.01)
    assert last.met is flat
    assert [row.exponent for row in others] == [None, None]


def test_a_missed_budget_stays_missed_where_growth_is_flat():
    rows = [bench.Row("x", "", 1, 5.0, 5.0, budget=1.0, met=False) for _ in range(2)]
    assert samples.with_exponent(rows, (10, 100))[-1].met is False


def test_the_table_names_budget_and_verdict():
    rows = bench.bench_core("view", quick=True)
    assert [row.budget for row in rows] == [1.5, None, 5.0]
    assert all(0 < row.p50 <= row.p95 for row in rows)
    text = bench.render(rows)
    assert "a level, first read" in text
    assert ("yes" in text) or ("NO" in text)
    assert "is subtracted" in text


def test_rows_are_chosen_by_what_they_say(monkeypatch):
    monkeypatch.setattr(bench, "PARTS", {"view": bench.PARTS["view"]})
    assert len(bench.bench_core(quick=True)) == 3
    assert [row.case for row in bench.bench_core("20 keys", quick=True)] == ["wrapping a mapping of 20 keys"]
    with pytest.raises(ConfigError, match="no row of the benchmark holds 'nothing'"):
        bench.bench_core("nothing", quick=True)
