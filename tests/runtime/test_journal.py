"""The durable journal: what is promised is there after any end, and what cannot be trusted is said or refused."""

from __future__ import annotations

import json
import logging
import os
import resource
import signal
import sqlite3
import subprocess
import sys
import time
from pathlib import Path

import pytest

from revise_lab import Workflow, simulate
from revise_lab.core.machine import replay
from revise_lab.policies import policy
from revise_lab.records import event as ev
from revise_lab.records.effect import EffectState, Intent
from revise_lab.records.revision import Change, Op, Revision
from revise_lab.records.value import freeze
from revise_lab.runtime.journal import SCHEMA_VERSION, Journal, JournalError, JournalLocked

OPENED = ev.Opened("trip", freeze({"request": {"budget": 900}}), "revise", freeze({}))
PROMISE = ev.Accepted("r1", 1, (), unconditional=False)


def starts(n):
    return [ev.Start(f"node{i}") for i in range(n)]


@pytest.fixture
def path(tmp_path):
    return tmp_path / "run.journal"


def written(path, entries, **options):
    with Journal(path, **options) as journal:
        journal.append(entries)
    return path


def edit(path, sql, *parameters):
    database = sqlite3.connect(path)
    with database:
        assert database.execute(sql, parameters).rowcount != 0
    database.close()


def rows(path, table="entries"):
    database = sqlite3.connect(path)
    try:
        database.text_factory = bytes
        return database.execute(f"SELECT * FROM {table} ORDER BY seq").fetchall()
    finally:
        database.close()


def real_run():
    """Return the machine of a run of three nodes that was revised while it ran."""
    flow = Workflow("three")

    @flow.node(kind="model")
    async def plan(state, ctx):
        budget = state["request"]["budget"]
        await ctx.model(f"plan for {budget}", max_tokens=2)
        return {"cheap": budget < 500}

    @flow.node(kind="model", after="plan")
    async def book(state, ctx):
        await ctx.model(f"book {state['plan']['cheap']}", max_tokens=2)
        return {"note": "half a pair: \ud83d, a line end: \u2028, nothing: \0"}

    @flow.node(kind="tool")
    async def pack(state, ctx):
        return {"for": state["request"]["to"]}

    revision = Revision("r", (Change("request", Op.SET, ("budget",), 300),))
    inputs = {"request": {"budget": 900, "to": "Lisbon"}}
    return simulate(flow, inputs, "revise_plus", revisions=[(1.5, revision)]).machine


# --- what is written comes back ---


def test_a_run_comes_back_and_replays_to_the_same_journal(path):
    machine = real_run()
    with Journal(path) as journal:
        for at in range(0, len(machine.journal), 3):
            journal.append(machine.journal[at : at + 3])
        assert journal.length == len(machine.journal)
    with Journal(path) as journal:
        assert list(map(ev.to_json, journal.entries())) == list(map(ev.to_json, machine.journal))
        assert list(journal.entries(until=2)) == machine.journal[:2]
        again = replay(machine.graph, journal.events(), policy("revise_plus"))
    assert again.fingerprint() == machine.fingerprint()
    assert list(map(ev.to_json, again.journal)) == list(map(ev.to_json, machine.journal))


def test_a_compacted_journal_is_smaller_and_replays_to_the_same(path):
    machine = real_run()
    with Journal(path) as journal:
        journal.append(machine.journal + machine.journal[-1:] * 2_000)
        end = journal.length
        assert isinstance(machine.journal[-1], ev.Fact)
        freed = journal.compact()
        assert freed > 100_000
        assert journal.size_bytes < 40_000
        assert not any(isinstance(entry, ev.Fact) for entry in journal.entries())
        assert journal.length == end
        journal.append([ev.Close()])
    with Journal(path) as journal:
        assert journal.length == end + 1
        *events, close = journal.events()
        again = replay(machine.graph, events, policy("revise_plus"))
        assert again.fingerprint() == machine.fingerprint()
        assert close == ev.Close()
        # What replay derived is offered again, where the facts were removed and where the events still stand.
        assert journal.append(again.journal, at=0) == end + 1
        with pytest.raises(JournalError, match="entry 0 is Opened"):
            journal.append([ev.Start("other")], at=0)


def test_appending_again_changes_nothing_and_another_content_is_refused(path):
    with Journal(path) as journal:
        assert journal.append([OPENED, *starts(3)]) == 4
        before = rows(path)
        assert journal.append(starts(3), at=1, durable=True) == 4
        assert rows(path) == before
        assert journal.append([*starts(3), PROMISE], at=1) == 5
        with pytest.raises(JournalError, match=r"entry 2 is Start.*open the one that it wrote"):
            journal.append([ev.Start("other")], at=2)
        with pytest.raises(JournalError, match="leaves a gap after 4"):
            journal.append([PROMISE], at=6)
        assert list(journal.entries()) == [OPENED, *starts(3), PROMISE]
    database = sqlite3.connect(path)
    with pytest.raises(sqlite3.IntegrityError):
        database.execute("INSERT INTO entries VALUES (2, 'Start', '', x'')")
    database.close()


def test_a_reader_that_stops_half_way_is_in_nobodys_way(path):
    with Journal(path) as journal:
        journal.append(starts(2_000))
        reading = journal.entries()
        assert [next(reading) for _ in range(700)] == starts(700)
        journal.append([PROMISE])
        journal.compact()
        assert len(list(reading)) == 1_300


def test_an_entry_of_another_version_is_named(path):
    written(path, [OPENED])
    with Journal(path) as journal:
        journal._file.extend([(1, "Start", '["Begin","a"]')], {}, durable=False)
        journal._file.extend([(2, "Start", '["Start","a","b","c"]')], {}, durable=False)
        with pytest.raises(JournalError, match=r"entry 1 cannot be decoded.*'Begin'"):
            list(journal.entries())
        with pytest.raises(JournalError, match="closed"):
            journal.close() or list(journal.entries())


# --- durability ---


def test_promises_are_durable_and_the_level_is_back_after_them(path):
    closed, fact, intent = ev.Closed(3, 0), ev.Retracted("n", 1), Intent("w", "n", "s", 0)
    assert [ev.is_durable(each) for each in (PROMISE, ev.Deferred("r"), closed, fact, OPENED)] == [1, 1, 1, 0, 0]
    kept = [state for state in EffectState if ev.is_durable(ev.Effected(intent, state))]
    assert kept == ["dispatched", "confirmed", "compensating"]
    seen = []

    def connect(name):
        database = sqlite3.connect(name, isolation_level=None)
        level = database.cursor()

        def note(statement):
            if statement == "COMMIT":
                seen.append(level.execute("PRAGMA synchronous").fetchone()[0])

        database.set_trace_callback(note)
        return database

    with Journal(path, connect=connect) as journal:
        seen.clear()
        journal.append([OPENED])
        journal.append([PROMISE])
        journal.append(starts(1))
        journal.append(starts(1), durable=True)
        journal.append(starts(1), at=3, durable=True)
        assert seen == [1, 2, 1, 2, 2], "NORMAL is 1, FULL is 2"
        assert journal._file.query("PRAGMA synchronous") == [(1,)]


def test_a_level_that_does_not_take_is_an_error(path):
    class Deaf:
        def __init__(self, name):
            self.database = sqlite3.connect(name, isolation_level=None)
            self.close = self.database.close

        def execute(self, sql, *parameters):
            return self.database.execute("SELECT 1" if "synchronous=FULL" in sql else sql, *parameters)

        def executemany(self, *arguments):
            return self.database.executemany(*arguments)

    with pytest.raises(JournalError, match="at synchronous=1, not FULL"):
        Journal(path, connect=Deaf)


class Lying:
    """A connection that says which level of synchronisation was asked for and, once told to, works without any."""

    def __init__(self, database):
        self.database, self.lies, self.asked = database, False, ""
        self.close, self.executemany = database.close, database.executemany

    def execute(self, sql, *parameters):
        if self.lies and sql.startswith("PRAGMA synchronous="):
            self.asked, sql = sql, "PRAGMA synchronous=OFF"
        if self.lies and sql == "PRAGMA synchronous":
            return self.database.execute("SELECT 2" if self.asked.endswith("FULL") else "SELECT 1")
        return self.database.execute(sql, *parameters)


def power_loss(tmp_path, *, lies):
    """Return what is left of one entry on the disk, 2 more, a promise and 2 more; and the syncs for the promise."""
    from power_loss import Disk

    disk, opened = Disk(), []
    folder = tmp_path / "disk"
    folder.mkdir(parents=True)

    def connect(name):
        opened.append(Lying(disk.connect(name)))
        return opened[0]

    with Journal(folder / "run.journal", connect=connect) as journal:
        journal.append([OPENED], durable=True)
        opened[0].lies = lies
        journal.append(starts(2))
        before = disk.n_syncs
        journal.append([PROMISE])
        n_syncs = disk.n_syncs - before
        journal.append(starts(2))
        left = disk.cut(folder, tmp_path / "left")
    with Journal(left / "run.journal") as found:
        assert found.dropped == ()
        return list(found.entries()), n_syncs


@pytest.fixture
def unreliable(monkeypatch):
    pytest.importorskip("apsw", reason="the disk that loses power is made with apsw; install revise_lab[test]")
    monkeypatch.syspath_prepend(str(Path(__file__).parent))


@pytest.mark.usefixtures("unreliable")
def test_a_promise_and_all_before_it_survive_the_loss_of_power(tmp_path):
    found, n_syncs = power_loss(tmp_path / "full", lies=False)
    print(f"synchronous=FULL: {len(found)} of 6 entries are left, the promise is there; syncs for it: {n_syncs}")
    assert found == [OPENED, *starts(2), PROMISE]
    assert n_syncs >= 1
    found, n_syncs = power_loss(tmp_path / "off", lies=True)
    print(f"synchronous=OFF: {len(found)} of 6 entries are left, the promise is gone; syncs for it: {n_syncs}")
    assert found == [OPENED]
    assert n_syncs == 0


@pytest.mark.usefixtures("unreliable")
def test_whenever_the_power_fails_the_journal_is_a_beginning_of_itself_with_every_promise(tmp_path):
    from power_loss import Disk

    disk, folder = Disk(), tmp_path / "disk"
    folder.mkdir()

    def connect(name):
        database = disk.connect(name)
        # Moved from the log into the database every few pages, so that the power fails on all sides of that.
        database.execute("PRAGMA wal_autocheckpoint=4").fetchall()
        return database

    written, promised, lost = [], 0, 0
    with Journal(folder / "run.journal", connect=connect) as journal:
        for i in range(36):
            written += [ev.Start(f"node{i}" * 40)] if i % 5 else [PROMISE]
            journal.append(written[-1:])
            promised = promised if i % 5 else len(written)
            for kept in ((), ("run.journal",), ("run.journal-wal",)):
                left = disk.cut(folder, tmp_path / f"{i} {kept}", kept)
                with Journal(left / "run.journal") as found:
                    entries = list(found.entries())
                    assert found.dropped == ()
                assert entries == written[: len(entries)]
                assert promised <= len(entries)
                lost += len(entries) < len(written)
    print(f"power lost {36 * 3} times: every promise there each time, the newest of the others gone {lost} times")
    assert lost > 10


KILLED = """
import sys, time
from revise_lab.records import event as ev
from revise_lab.runtime.journal import Journal
journal = Journal(sys.argv[1])
for i in range(10**9):
    journal.append([ev.Start(f"node{i}"), ev.Accepted(f"r{i}", i, (), False)] )
    print(journal.length, flush=True)
"""


def test_what_was_acknowledged_is_there_after_a_kill(path):
    child = subprocess.Popen([sys.executable, "-c", KILLED, str(path)], stdout=subprocess.PIPE, text=True)
    for line in child.stdout:
        if int(line) >= 200:
            break
    child.send_signal(signal.SIGKILL)
    acknowledged = [int(line), *map(int, child.stdout.read().split("\n")[:-1])][-1]
    child.wait()
    child.stdout.close()
    with Journal(path) as journal:
        assert journal.length >= acknowledged
        assert journal.length % 2 == 0, "a transaction is there whole or not at all"
        assert journal.dropped == ()


# --- damage ---


@pytest.mark.parametrize(
    "damage",
    [
        "UPDATE entries SET body = substr(body, 1, length(body) - 4) WHERE seq = 9",
        "UPDATE entries SET checksum = zeroblob(16) WHERE seq = 9",
        "UPDATE entries SET checksum = 'x' WHERE seq = 9",
        "UPDATE entries SET body = CAST(x'ff00' AS TEXT), kind = '?' WHERE seq = 9",
        "UPDATE entries SET body = '[', checksum = x'' WHERE seq >= 8",
    ],
)
def test_a_torn_end_is_left_out_said_and_kept_aside(path, damage, caplog):
    written(path, starts(10))
    edit(path, damage)
    n_torn = 2 if "8" in damage.split("WHERE")[1] else 1
    with caplog.at_level(logging.WARNING), Journal(path) as journal:
        assert [each.seq for each in journal.dropped] == list(range(10 - n_torn, 10))
        assert journal.length == 10 - n_torn
        assert list(journal.entries()) == starts(10)[:-n_torn]
        assert "torn" in caplog.text
        assert journal.append([PROMISE]) == 11 - n_torn
    assert len(rows(path, "dropped")) == n_torn
    with Journal(path) as journal:
        assert list(journal.entries()) == [*starts(10)[:-n_torn], PROMISE]
        assert journal.dropped == ()


@pytest.mark.parametrize(
    ("damage", "seq"),
    [
        ("UPDATE entries SET body = replace(body, 'node', 'Node') WHERE seq = 4", 4),
        ("UPDATE entries SET checksum = zeroblob(16) WHERE seq = 4", 4),
        ("UPDATE entries SET kind = 'Fail' WHERE seq = 0", 0),
        ("UPDATE entries SET body = '', checksum = x'' WHERE seq IN (3, 4)", 3),
        ("DELETE FROM entries WHERE seq = 4", 4),
        ("DELETE FROM entries WHERE seq = 0", 0),
        ("DELETE FROM entries WHERE seq = 8", 8),
        ("UPDATE entries SET seq = seq + 100 WHERE seq = 4", 4),
    ],
)
def test_damage_before_the_end_is_refused_and_nothing_is_touched(path, damage, seq):
    written(path, starts(10))
    edit(path, damage)
    before = rows(path)
    with pytest.raises(JournalError, match=rf"entry {seq} \(rowid {seq}") as refused:
        Journal(path)
    assert refused.value.seq == seq
    assert rows(path) == before


def test_damage_in_a_compacted_journal_shows_too(path):
    with Journal(path) as journal:
        journal.append([OPENED, *starts(3), PROMISE, *starts(3)])
        journal.compact()
    edit(path, "UPDATE entries SET body = replace(body, 'node1', 'node7') WHERE seq = 2")
    with pytest.raises(JournalError, match="entry 2"):
        Journal(path)


def test_a_torn_end_of_a_compacted_journal_takes_the_facts_behind_it_along(path):
    with Journal(path) as journal:
        journal.append([OPENED, ev.Start("a"), ev.Discarded("a"), ev.Start("b"), PROMISE, ev.Discarded("b")])
        journal.compact()
        assert journal.length == 6
    edit(path, "UPDATE entries SET body = '[' WHERE seq = 3")
    for _ in range(2):
        with Journal(path) as journal:
            assert journal.length == 2
            assert list(journal.entries()) == [OPENED, ev.Start("a")]
    with Journal(path) as journal:
        journal.append([ev.Discarded("a"), ev.Start("c")])
        assert list(journal.events()) == [OPENED, ev.Start("a"), ev.Start("c")]


def test_half_a_transaction_in_the_log_is_not_there(path):
    with Journal(path) as journal:
        journal.append([PROMISE])
        journal.append(starts(50), durable=True)
        log = path.with_name(path.name + "-wal").read_bytes()
        image = path.read_bytes()
    path.write_bytes(image)
    path.with_name(path.name + "-wal").write_bytes(log[:-100])
    with Journal(path) as journal:
        assert list(journal.entries()) == [PROMISE]
        assert journal.dropped == ()


# --- one writer ---

HOLDER = """
import sys
from revise_lab.runtime.journal import Journal, JournalLocked
try:
    journal = Journal(sys.argv[1])
except JournalLocked as error:
    sys.exit(f"refused: {error}")
print(journal.length, flush=True)
sys.stdin.read()
"""


def test_a_second_writer_is_refused_at_once_and_readers_are_not(path):
    with Journal(path) as journal:
        journal.append(starts(2))
        began = time.monotonic()
        with pytest.raises(JournalLocked, match="open in another run"):
            Journal(path)
        assert time.monotonic() - began < 1
        second = subprocess.run([sys.executable, "-c", HOLDER, str(path)], capture_output=True, text=True, input="")
        assert (second.returncode, second.stderr[:8]) == (1, "refused:")
        assert len(rows(path)) == 2
    child = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with child.stdin, child.stdout:
        assert child.stdout.readline() == "2\n"
        with pytest.raises(JournalLocked):
            Journal(path)
        # The system lets go for a process that dies.
        child.kill()
        child.wait()
        with Journal(path) as journal:
            assert journal.length == 2


# --- layouts ---


def first_layout(path, bodies):
    """Write a journal as version 1 of the layout had it."""
    database = sqlite3.connect(path)
    with database:
        database.execute("CREATE TABLE journal (seq INTEGER PRIMARY KEY, entry TEXT NOT NULL)")
        database.executemany("INSERT INTO journal VALUES (?, ?)", list(enumerate(bodies)))
        database.execute("PRAGMA user_version = 1")
    database.close()


def test_a_journal_of_layout_1_is_brought_up_to_date(path):
    machine = real_run()
    entries = [entry for entry in machine.journal if "pair" not in ev.to_json(entry)]
    first_layout(path, map(ev.to_json, entries))
    for _ in range(2):
        with Journal(path) as journal:
            assert list(journal.entries()) == entries
            assert journal._file.query("PRAGMA user_version") == [(SCHEMA_VERSION,)]
            assert journal._file.query("SELECT name FROM sqlite_master WHERE name = 'journal'") == []
    edit(path, "UPDATE entries SET body = '[]' WHERE seq = 1")
    with pytest.raises(JournalError, match="entry 1"):
        Journal(path)


def test_layout_1_may_end_torn_but_not_be_damaged(path, tmp_path):
    bodies = [ev.to_json(entry) for entry in starts(5)]
    first_layout(path, [*bodies, bodies[0][:6], "[]"])
    with Journal(path) as journal:
        assert [each.seq for each in journal.dropped] == [5, 6]
        assert list(journal.entries()) == starts(5)
    damaged = tmp_path / "damaged"
    first_layout(damaged, [*bodies[:2], bodies[2][:6], *bodies[3:]])
    before = rows(damaged, "journal")
    with pytest.raises(JournalError, match="entry 2"):
        Journal(damaged)
    assert rows(damaged, "journal") == before


def test_a_migration_that_fails_changes_nothing(path):
    first_layout(path, map(ev.to_json, starts(2_000)))

    def connect(name):
        database = sqlite3.connect(name, isolation_level=None)
        (pages,) = database.execute("PRAGMA page_count").fetchone()
        database.execute(f"PRAGMA max_page_count={pages + 4}")
        return database

    with pytest.raises(JournalError, match=r"full.*free some space"):
        Journal(path, connect=connect)
    with Journal(path) as journal:
        assert list(journal.entries()) == starts(2_000)


def test_what_is_no_journal_or_of_the_future_is_refused_untouched(path, tmp_path):
    written(path, starts(3))
    edit_version = sqlite3.connect(path)
    edit_version.execute(f"PRAGMA user_version = {SCHEMA_VERSION + 1}")
    edit_version.close()
    before = path.read_bytes()
    with pytest.raises(JournalError, match=f"layout {SCHEMA_VERSION + 1}.*a newer one"):
        Journal(path)
    assert path.read_bytes() == before

    other = tmp_path / "other.sqlite"
    database = sqlite3.connect(other)
    database.execute("CREATE TABLE customers (name TEXT)")
    database.close()
    text = tmp_path / "notes.txt"
    text.write_text("dear diary, " * 100)
    for file, why in ((other, "no journal of revise_lab"), (text, "not a database")):
        before = file.read_bytes()
        with pytest.raises(JournalError, match=why):
            Journal(file)
        assert file.read_bytes() == before


# --- the file system ---


def test_only_its_owner_can_read_it(path):
    mask = os.umask(0)
    try:
        with Journal(path) as journal:
            journal.append([PROMISE])
            names = sorted(file.name for file in path.parent.iterdir())
            assert names == ["run.journal", "run.journal-shm", "run.journal-wal", "run.journal.lock"]
            assert {file.stat().st_mode & 0o777 for file in path.parent.iterdir()} == {0o600}
    finally:
        os.umask(mask)
    path.chmod(0o664)
    with Journal(path):
        assert path.stat().st_mode & 0o777 == 0o600


def test_links_and_folders_are_refused(path, tmp_path):
    real = written(tmp_path / "real", [PROMISE])
    path.symlink_to(real)
    with pytest.raises(JournalError, match="is a link"):
        Journal(path)
    path.unlink()
    path.with_name(path.name + "-wal").symlink_to(real)
    with pytest.raises(JournalError, match="-wal is a link"):
        Journal(path)
    with pytest.raises(JournalError, match="a folder"):
        Journal(tmp_path)
    with pytest.raises(JournalError, match=r"No such file.*a folder that exists"):
        Journal(tmp_path / "nowhere" / "run.journal")


@pytest.mark.skipif(not Path("/proc/self").is_dir(), reason="needs a folder in which nobody can make files")
def test_a_folder_that_cannot_be_written_is_named():
    with pytest.raises(JournalError, match=r"cannot open /proc/run.journal.*can be written"):
        Journal("/proc/run.journal")


def fill(journal):
    for _ in range(100):
        journal.append([*starts(20), PROMISE])


def test_a_full_disk_loses_nothing_and_can_be_gone_on_with(path):
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    with Journal(path) as journal:
        journal.append([OPENED, *starts(5)])
        resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, limits[1]))
        try:
            with pytest.raises(JournalError, match="free some space") as full:
                fill(journal)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert str(path) in str(full.value)
        reached = journal.length
        assert reached > 6
        assert len(list(journal.entries())) == reached
        journal.append([PROMISE])
        assert journal.length == reached + 1
    with Journal(path) as journal:
        assert list(journal.entries())[-1] == PROMISE
        assert journal.length == reached + 1
        assert journal.dropped == ()


# --- redaction ---


def hide(body):
    text = json.dumps(body)
    return json.loads(text.replace("Lisbon", "***"))


def test_redacted_values_never_reach_the_disk_and_the_journal_cannot_be_resumed(path):
    machine = real_run()
    with Journal(path, redact=hide) as journal:
        journal.append(starts(1))
        assert not journal.redacted
        assert list(journal.events()) == starts(1)
        journal.append(machine.journal, at=1)
        assert journal.redacted
        journal.append(machine.journal, at=1)
        raw = path.read_bytes() + path.with_name(path.name + "-wal").read_bytes()
        assert b"Lisbon" not in raw
        assert b"***" in raw
    with Journal(path) as journal:
        assert journal.redacted
        assert len(list(journal.entries())) == 1 + len(machine.journal)
        with pytest.raises(JournalError, match="redacted as it was written and cannot be resumed"):
            journal.events()
        journal.compact()
        assert journal.redacted


def test_redaction_keeps_the_kind_of_an_entry(path):
    with Journal(path, redact=lambda body: ["Fail", *body[1:]]) as journal:
        with pytest.raises(JournalError, match="made something else of entry 0, a Start"):
            journal.append(starts(1))
        assert journal.length == 0


@pytest.mark.parametrize("name", ["", "x" * 300, "half \ud800"])
def test_a_name_that_no_file_can_have_is_refused(tmp_path, name):
    with pytest.raises(JournalError, match="cannot hold a journal"):
        Journal(str(tmp_path / name) if name else name)
