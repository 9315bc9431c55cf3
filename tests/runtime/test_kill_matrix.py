"""A process is killed at each point between staging an effect and the close; the run that goes on loses and doubles nothing.

``REVISE_LAB_KILLS`` says how often at each point.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from revise_lab.runtime.local_postgres import REMEDY, LocalPostgres, binaries

N_KILLS = int(os.environ.get("REVISE_LAB_KILLS", "2"))
VARIANTS = [("commit", True), ("close", True), ("close", False), ("commit", False)]


@pytest.fixture(scope="module")
def matrix():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(Path(__file__).parent))
        import kill_matrix

        yield kill_matrix


@pytest.fixture(scope="module")
def victims(matrix):
    with matrix.Victims() as victims:
        yield victims


@pytest.fixture
def kills(matrix, victims, tmp_path):
    """Return what kills one victim after the other and looks at what became of each."""
    return Kills(matrix, victims, tmp_path)


class Kills:
    def __init__(self, matrix, victims, folder):
        self.matrix, self.victims, self.folder = matrix, victims, folder
        self.n_runs, self.counts = 0, {}

    def order(self, database, release, revised, **options):
        self.n_runs += 1
        folder = self.folder / str(self.n_runs)
        database = database or f"sqlite:///{folder}/shop.db"
        return self.matrix.Order(f"run{self.n_runs}", str(folder), database, release, revised, **options)

    def one(self, database, point, i, **options):
        """Kill one victim at a point, the ``i``-th of its row, and go on with its run."""
        matrix = self.matrix
        variants = VARIANTS[:2] if point in matrix.UNDOING else VARIANTS
        release, revised = variants[i % len(variants)]
        count = self.times(database, release, revised, options.get("disk", ""))
        first = matrix.SENDING[5 + i % 5] if point in matrix.ASKING else point
        # Another effect each time, the last one first.
        nth = count[first] - i // len(variants) % count[first]
        order = self.order(database, release, revised, point=first, nth=nth, **options)
        death = self.victims.kill(order)
        while not death.reached and order.nth > 1:  # how often a transaction is tried again differs from run to run
            shutil.rmtree(order.folder)
            order = self.order(database, release, revised, point=first, nth=order.nth - 1, **options)
            death = self.victims.kill(order)
        if point in matrix.ASKING:
            again = self.victims.kill(order._replace(point=point, nth=1))
            death = again._replace(accepted=death.accepted or again.accepted)
        outcome = matrix.resume(order, death) if death.reached else None
        shutil.rmtree(order.folder)
        return order, death, outcome

    def times(self, database, release, revised, disk):
        """Count how often a run that is left alone comes by each point."""
        key = release, revised, disk
        if key not in self.counts:
            self.counts[key] = self.victims.kill(self.order(database, release, revised, disk=disk)).counts
        return self.counts[key]

    def table(self, title, database, points, also_unknown=(), **options):
        """Kill at each point, print a row for it, and return what is not as it should be."""
        may_have_left = self.matrix.MAY_HAVE_LEFT.union(also_unknown)
        print(f"\n{title}: SIGKILL at each point, {N_KILLS} times; then the run goes on from its journal to its close")
        print(f"{'point':34} reached  lost  doubled  unknown  otherwise wrong")
        faults = []
        for point in points:
            n_reached = n_lost = n_doubled = n_unknown = n_wrong = 0
            for i in range(N_KILLS):
                order, death, outcome = self.one(database, point, i, **options)
                if not death.reached:
                    faults.append(f"{point}: not reached by {order}")
                    continue
                wrong = list(outcome.wrong)
                if outcome.unknown != outcome.in_flight:
                    wrong.append(f"unknown is {set(outcome.unknown)}, in flight was {set(outcome.in_flight)}")
                is_unknown = death.key in outcome.unknown
                if is_unknown != (point in may_have_left):
                    wrong.append(f"{death.key} is {'' if is_unknown else 'not '}unknown")
                if wrong or outcome.lost or outcome.doubled:
                    faults.append(f"{point}: {order}, {outcome.lost} lost, {outcome.doubled} doubled, {wrong}")
                n_reached += 1
                n_lost, n_doubled = n_lost + outcome.lost, n_doubled + outcome.doubled
                n_unknown, n_wrong = n_unknown + is_unknown, n_wrong + bool(wrong)
            print(f"{point:34} {n_reached:3}/{N_KILLS:<3}  {n_lost:4}  {n_doubled:7}  {n_unknown:7}  {n_wrong:15}")
        return faults


@pytest.mark.parametrize("release", ["commit", "close"])
def test_a_process_killed_after_its_call_landed_is_gone_on_from(kills, release):
    order = kills.order("", release, True, point="after the target's commit", nth=5)
    death = kills.victims.kill(order)
    assert death.reached
    assert death.accepted, "the fifth publication is one that the revision asked for"
    outcome = kills.matrix.resume(order, death)
    assert death.key in outcome.unknown
    assert outcome == (0, 0, outcome.in_flight, outcome.in_flight, ())


def test_a_target_that_is_not_asked_what_became_of_a_call_is_found_out(kills):
    class Forgetful(kills.matrix.World):
        def find(self, intent_key, *, close=False):
            return None

    order = kills.order("", "commit", False, point="after the target's commit", nth=1)
    death = kills.victims.kill(order)
    outcome = kills.matrix.resume(order, death, Forgetful)
    print(f"killed after the commit, sent again without being asked for: {outcome.doubled} doubled")
    assert outcome.doubled >= 1


@pytest.mark.slow
@pytest.mark.timeout(120 + 60 * N_KILLS)
@pytest.mark.parametrize("database", ["sqlite", pytest.param("postgres", marks=pytest.mark.postgres)])
def test_wherever_a_process_is_killed_nothing_is_lost_or_doubled(kills, database, tmp_path):
    points = kills.matrix.SENDING + kills.matrix.UNDOING + kills.matrix.ASKING
    if database == "sqlite":
        faults = kills.table("SQLite", f"sqlite:///{tmp_path}/shop.db", points)
    elif binaries() is None:
        pytest.skip(f"PostgreSQL is not installed: {REMEDY}")
    else:
        with LocalPostgres() as server:
            faults = kills.table("PostgreSQL", server.url, points)
    assert not faults, "\n".join(faults)


@pytest.fixture
def unreliable():
    pytest.importorskip("apsw", reason="the disk that loses power is made with apsw; install revise_lab[test]")


@pytest.mark.slow
@pytest.mark.timeout(120 + 60 * N_KILLS)
@pytest.mark.usefixtures("unreliable")
@pytest.mark.parametrize("kept", [(), ("run.journal-wal",)], ids=["synced", "log kept"])
def test_wherever_the_power_fails_nothing_is_lost_or_doubled(kills, kept):
    points = kills.matrix.SENDING + kills.matrix.UNDOING
    title = f"Power lost, SQLite, what was written and not synced is {'there in the log' if kept else 'gone'}"
    # It promises nothing, so it need not be on the disk: the target is asked again whether the effect is undone.
    also_unknown = () if kept else ("after compensated is written",)
    faults = kills.table(title, "", points, also_unknown, disk="full", kept=kept)
    assert not faults, "\n".join(faults)


@pytest.mark.slow
@pytest.mark.usefixtures("unreliable")
def test_a_journal_that_syncs_nothing_is_found_out_when_the_power_fails(kills):
    n_promised = n_found = 0
    points = kills.matrix.SENDING + kills.matrix.UNDOING
    for point in points:
        # The first variant is revised, and the last time is after that: then there is something to lose.
        _, death, outcome = kills.one("", point, 0, disk="off")
        n_promised += death.accepted
        n_found += bool(death.accepted and (outcome.lost or outcome.doubled or outcome.wrong))
    print(f"synchronous=OFF: power lost {n_promised} times after a promise, broken and found out {n_found} times")
    assert n_promised == n_found == len(points)
