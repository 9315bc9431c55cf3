"""Pending actions: released once, on reasons that hold as they land, whoever else is at it and whatever dies in between."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import sqlite3
import subprocess
import sys
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import pytest
import sqlalchemy as sql

from revise_lab.errors import ConfigError, RefusedCombination
from revise_lab.records.condition import Condition, ConditionRefused, PendingAction, RefreshRule, Verdict
from revise_lab.records.effect import Reversibility
from revise_lab.records.selector import Read, Selector
from revise_lab.runtime.local_postgres import REMEDY, LocalPostgres, binaries
from revise_lab.runtime.pending import PendingActions, ReleaseError, Status
from revise_lab.runtime.sql_target import SqlTarget
from revise_lab.runtime.target import ABSENT_TOKEN, Fault, MemoryTarget, OutcomeUnknown
from revise_lab.workloads.desk_trial import MemoryRecords

N_RACES = int(os.environ.get("REVISE_LAB_RACES", "5"))
N_KILLS = int(os.environ.get("REVISE_LAB_KILLS", "6"))
N_RACERS = 8
KEEP, REFRESH, REPLAN, BLOCK = Verdict
ON_POSTGRES = pytest.param("postgres", marks=pytest.mark.postgres)
_PREFIXES = (f"p{i}_" for i in itertools.count())


def within(state, intent):
    return intent["amount"] <= state["policy"]["limit"]


def not_refunded(state, intent):
    return str(intent["order"]) not in state["refunds"]


def named(state, intent):
    return f"to {state['customer']['name']}"


WITHIN = Condition("within", within, "1", "policy")
NOT_REFUNDED = Condition("not refunded", not_refunded, "1", "refunds", kind="irreversible")
NAMED = RefreshRule("named", named, "1", "customer")
RULES = (WITHIN, NOT_REFUNDED, NAMED)
STATE = {"policy": {"limit": 100}, "refunds": {}, "customer": {"name": "Ada"}}


def refund(key="refund/7", order=7, conditions=(WITHIN, NOT_REFUNDED), refresh=(NAMED,), **more):
    intent = {"amount": 80, "order": order}
    return PendingAction(key, intent, conditions, refresh, "", "refunds", Reversibility.IRREVERSIBLE, **more)


@pytest.fixture
def target():
    target = MemoryRecords()
    for resource, value in STATE.items():
        target.set(resource, value)
    return target


@pytest.fixture(scope="module")
def postgres_url():
    if binaries() is None:
        pytest.skip(f"PostgreSQL is not installed: {REMEDY}")
    with LocalPostgres() as server:
        yield server.url


@pytest.fixture
def url(request, tmp_path):
    return request.getfixturevalue("postgres_url") if request.param == "postgres" else f"sqlite:///{tmp_path}/shop.db"


on_databases = pytest.mark.parametrize("url", ["sqlite", ON_POSTGRES], indirect=True)


def shop(url, prefix):
    """Return a target whose publications are counted in a table without keys, and that table."""
    sent = sql.Table(f"{prefix}sent", sql.MetaData(), sql.Column("key", sql.Text))
    target = SqlTarget(
        url, prefix=prefix, apply=lambda connection, key, payload: connection.execute(sent.insert().values(key=key))
    )
    with target.engine.begin() as connection:
        sent.create(connection, checkfirst=True)
    return target, sent


@pytest.fixture
def opened():
    """Return what opens shops with the state in them, closed afterwards."""
    with contextlib.ExitStack() as stack:

        def opened(url, prefix):
            target, sent = shop(url, prefix)
            stack.callback(target.close)
            for resource, value in STATE.items():
                target.set(resource, value)
            return target, sent

        yield opened


@pytest.fixture
def waiting(tmp_path):
    """Return what opens files of pending actions for a target, closed afterwards."""
    with contextlib.ExitStack() as stack:

        def waiting(target, name="pending"):
            pending = PendingActions(target, RULES, tmp_path / f"{name}.db", timeout_s=None)
            stack.callback(pending.close)
            return pending

        yield waiting


def landed(target, sent):
    with target.engine.connect() as connection:
        return Counter(row.key for row in connection.execute(sql.select(sent)))


# --- one action, one process ---


def test_it_is_validated_again_before_it_leaves_though_nobody_told_of_a_change(target):
    pending = PendingActions(target)
    assert pending.propose(refund()) is KEEP
    target.set("customer", {"name": "Bo"})
    assert pending.release("refund/7")[:3] == ("refund/7", REFRESH, Status.RELEASED)
    assert target.happened == [("publish", "refund/7", {"derived": {"named": "to Bo"}, "intent": refund().intent})]
    again = pending.release("refund/7")
    assert (again.status, again.n_tries, len(target.happened)) == (Status.RELEASED, 0, 1)
    for change, verdict, status in (
        (("policy", {"limit": 50}), REPLAN, Status.RETURNED),
        (("refunds", {"8": {}}), BLOCK, Status.BLOCKED),
    ):
        key = f"refund/{status}"
        target.set("policy", {"limit": 90})
        assert pending.propose(refund(key, 8)) is KEEP
        target.set(*change)
        outcome = pending.release(key)
        assert (outcome.verdict, outcome.status, outcome.receipt) == (verdict, status, None)
        target.set("policy", {"limit": 1000})
        target.set("refunds", {})
        assert pending.release(key).status is status, "what was handed back is over; a new plan has a new key"
        with pytest.raises(ConditionRefused, match="proposed before"):
            pending.propose(refund(key, 8))
    assert len(target.happened) == 1


def test_a_change_is_answered_when_it_is_told(target):
    pending = PendingActions(target, RULES)
    pending.propose(refund())
    n = pending.graph.n_evaluated
    target.set("policy", {"limit": 90})
    assert pending.changed("customer", "refunds") == {}
    assert pending.changed("policy") == {"refund/7": KEEP}
    assert pending.graph.n_evaluated == n + 1
    target.set("customer", {"name": "Bo"})
    target.set("policy", {"limit": 9})
    assert pending.changed() == {"refund/7": REPLAN}
    target.set("policy", {"limit": 99})
    assert pending.changed() == {"refund/7": REFRESH}


def test_every_premise_goes_along_and_is_the_one_that_was_validated(target):
    """A token that is read again as the action leaves compares the state with itself."""
    sent = []

    class Watching(MemoryRecords):
        def publish(self, key, payload, premises):
            sent.append(dict(premises))
            return super().publish(key, payload, premises)

    target = Watching()
    tokens = {resource: target.set(resource, value) for resource, value in STATE.items()}
    pending = PendingActions(target)
    pending.propose(refund())
    target.meanwhile.append(lambda: target.set("policy", {"limit": 50}))
    outcome = pending.release("refund/7")
    assert (outcome.verdict, outcome.n_tries, sent) == (REPLAN, 2, [tokens])
    assert not target.happened


def test_tokens_are_equal_or_not_and_have_no_order(target):
    """As text "10" comes before "9"."""
    while target.token("policy") != "9":
        target.set("policy", {"limit": 100})
    pending = PendingActions(target)
    pending.propose(refund())
    target.meanwhile.append(lambda: target.set("policy", {"limit": 50}))
    assert pending.release("refund/7").verdict is REPLAN
    assert (target.token("policy"), target.happened) == ("10", [])


def test_a_retry_reads_and_evaluates_again_and_does_not_go_on_for_ever(target):
    """Trying again with what was read before fails again; reading again without evaluating lets through."""
    pending = PendingActions(target, max_tries=3)
    pending.propose(refund())
    limits = iter(range(99, 80, -1))
    target.meanwhile.extend([lambda: target.set("policy", {"limit": next(limits)})] * 2)
    n = pending.graph.n_evaluated
    outcome = pending.release("refund/7")
    assert (outcome.status, outcome.n_tries, pending.graph.n_evaluated - n) == (Status.RELEASED, 3, 2)
    pending.propose(refund("refund/8", 8))
    target.meanwhile.extend([lambda: target.set("policy", {"limit": next(limits)})] * 3)
    with pytest.raises(ReleaseError, match="changed during each of 3 tries, and nothing was published"):
        pending.release("refund/8")
    assert pending.status("refund/8") is Status.DISPATCHED
    assert pending.release("refund/8").status is Status.RELEASED
    with pytest.raises(ReleaseError, match="no action 'refund/9' was proposed"):
        pending.release("refund/9")


def test_there_and_back_is_no_change_of_a_reason(target):
    pending = PendingActions(target)
    pending.propose(refund())
    for limit in (50, 100):
        target.set("policy", {"limit": limit})
        pending.changed()
    assert pending.release("refund/7").verdict is KEEP


def test_that_something_is_absent_is_a_premise(target):
    """What was not there when it was looked for must not have come to be."""
    no_hold = Condition("no hold", lambda state, intent: "holds/7" not in state, "1", "holds/7", kind="safety")
    pending = PendingActions(target)
    assert pending.propose(refund(conditions=(no_hold,))) is KEEP
    assert pending.graph.waiting["refund/7"].premises == ("holds/7", "customer", "refunds")
    assert pending._tokens["holds/7"] == ABSENT_TOKEN
    target.meanwhile.append(lambda: target.set("holds/7", {"since": 1}))
    assert pending.release("refund/7").verdict is BLOCK


def test_a_target_that_cannot_check_gets_nothing_that_cannot_be_revoked():
    """Without a comparison at the target everything would be overwritten."""
    deaf = MemoryTarget("mailbox", compares_and_sets=False)
    with pytest.raises(RefusedCombination, match="'mailbox' cannot compare and set"):
        PendingActions(deaf).propose(refund())
    elsewhere = PendingAction("a", {}, (WITHIN,), target="another")
    with pytest.raises(ConditionRefused, match="is for 'another' and not for 'desk'"):
        PendingActions(MemoryRecords()).propose(elsewhere)


def test_a_validator_that_takes_too_long_has_not_verified_anything(target):
    wait = threading.Event()
    slow = Condition("slow", lambda state, intent: wait.is_set() or wait.wait(10), "1", "policy", kind="authority")
    pending = PendingActions(target, timeout_s=0.05)
    assert pending.propose(refund(conditions=(slow, WITHIN))) is BLOCK
    assert "TimeoutError: no answer within 0.05 s" in pending.graph.evaluations("refund/7")["slow"].reason
    wait.set()
    assert pending.release("refund/7").verdict is KEEP, "what could not be told is asked again before the release"


@pytest.mark.parametrize(
    "wrong", [{"max_tries": 0}, {"timeout_s": 0}, {"timeout_s": float("nan")}, {"timeout_s": 1e300}]
)
def test_what_could_never_release_is_refused(target, wrong):
    with pytest.raises(ConfigError, match="try at least once, and give a validator a number of seconds"):
        PendingActions(target, **wrong)


@pytest.mark.parametrize("fault", [Fault.NOT_DONE, Fault.ANSWER_LOST])
def test_an_answer_that_is_lost_is_asked_for(target, fault):
    pending = PendingActions(target)
    pending.propose(refund())
    target.faults.append(fault)
    with pytest.raises(OutcomeUnknown):
        pending.release("refund/7")
    target.set("customer", {"name": "Bo"})
    outcome = pending.release("refund/7")
    assert (outcome.status, target.n_publications) == (Status.RELEASED, {"refund/7": 1})
    assert outcome.receipt.payload["derived"] == {"named": "to Ada" if fault is Fault.ANSWER_LOST else "to Bo"}


def test_a_call_on_its_way_cannot_land_behind_a_verdict(target):
    pending = PendingActions(target)
    pending.propose(refund(conditions=(WITHIN,), refresh=()))
    target.faults.append(Fault.HANG)
    with ThreadPoolExecutor(1) as pool:
        call = pool.submit(pending.release, "refund/7")
        while pending.status("refund/7") is not Status.DISPATCHED:
            time.sleep(0.001)
        # What changes is no premise of the target: the rule itself.
        pending.deploy(Condition("within", lambda state, intent: False, "2", "policy"))
        assert pending.release("refund/7").status is Status.RETURNED
        target.resume.set()
        assert call.result(5).status is Status.RETURNED
    assert not target.happened


# --- across restarts ---


def test_a_checkpoint_evaluates_only_what_has_changed_since(target, tmp_path):
    path = tmp_path / "pending.db"
    observed = (Read(Selector("customer", ("mail",)), "x"),)
    first = PendingActions(target, RULES, path)
    first.propose(refund(observed=observed))
    target.set("policy", {"limit": 90})
    first.changed()
    first.close()
    for change, n_evaluated, verdict in (
        (None, 0, KEEP),
        (("customer", {"name": "Ada", "mail": "y"}), 0, KEEP),
        (("policy", {"limit": 85}), 1, KEEP),
        (("refunds", {"7": {}}), 1, BLOCK),
    ):
        if change:
            target.set(*change)
        later = PendingActions(target, RULES, path)
        waiting = later.graph.waiting["refund/7"]
        assert (later.graph.n_evaluated, waiting.verdict) == (n_evaluated, verdict)
        assert waiting.action == refund(observed=observed)
        later.close()
        target.set("refunds", {})


@pytest.mark.parametrize(
    ("rules", "verdict", "reason"),
    [
        ((NOT_REFUNDED, NAMED), REPLAN, "no condition 'within' is in force"),
        ((WITHIN, NAMED), BLOCK, "no condition 'not refunded' is in force"),
        ((Condition("within", within, "2", "policy"), NOT_REFUNDED, NAMED), REPLAN, "does not supersede"),
        ((Condition("within", within, "2", "policy", supersedes="1"), NOT_REFUNDED, NAMED), REFRESH, "decided under 1"),
        ((WITHIN, NOT_REFUNDED), REPLAN, "no condition 'named' is in force"),
        (RULES, KEEP, ""),
    ],
)
def test_after_a_restart_a_version_that_nobody_knows_is_no_reason(target, tmp_path, rules, verdict, reason):
    first = PendingActions(target, RULES, tmp_path / "pending.db")
    first.propose(refund())
    first.close()
    later = PendingActions(target, rules, tmp_path / "pending.db")
    assert later.graph.waiting["refund/7"].verdict is verdict
    assert any(reason in each.reason for each in later.graph.evaluations("refund/7").values())
    assert later.release("refund/7").verdict is verdict


def test_what_is_gone_is_written_down_and_read_again(target, tmp_path):
    """A policy without a version, a read of what is absent, and values of every kind."""
    odd = {"name": None, "tags": ["x", {"y": 1.5}], "mail": {}}
    seen = Condition("seen", lambda s, i: s["customer"]["tags"] == ["x", {"y": 1.5}] and "no" not in s["customer"], "1",
                     "customer", policy="policy.version")  # fmt: skip
    target.set("customer", odd)
    target.set("policy", {"limit": 100, "version": 3})
    first = PendingActions(target, (seen, *RULES), tmp_path / "pending.db")
    assert first.propose(refund(conditions=(seen, *RULES[:2]))) is KEEP
    target.set("policy", {"limit": 100})
    assert first.changed("policy") == {"refund/7": REPLAN}
    before = first.graph.evaluations("refund/7")
    first.close()
    later = PendingActions(target, (seen, *RULES), tmp_path / "pending.db")
    assert later.graph.evaluations("refund/7") == before
    target.set("policy", {"limit": 100, "version": 3})
    assert later.release("refund/7").verdict is KEEP


def test_what_is_settled_stays_settled(target, tmp_path):
    first = PendingActions(target, RULES, tmp_path / "pending.db")
    first.propose(refund())
    first.propose(refund("refund/8", 8))
    other = PendingActions(target, RULES, tmp_path / "pending.db")
    with pytest.raises(ConditionRefused, match="choose another key"):
        other.propose(refund("refund/8", 8))
    first.release("refund/7")
    with pytest.raises(ConditionRefused, match="proposed before"):
        first.propose(refund())
    assert other.release("refund/7").status is Status.RELEASED
    assert set(other.graph.waiting) == {"refund/8"}, "what another process has settled is not evaluated any more"
    first.propose(refund("refund/9", 9))
    assert other.release("refund/9").verdict is KEEP, "proposed by another process after this one began"
    assert list(PendingActions(target, RULES, tmp_path / "pending.db").graph.waiting) == ["refund/8"]
    assert target.n_publications == {"refund/7": 1, "refund/9": 1}


@pytest.mark.parametrize("known", [False, True])
def test_another_version_may_look_where_none_looked_before(target, known):
    """What it looks at is read as it comes into force and before the release, and is a premise."""
    target.set("hold", {"on": False})
    free = Condition("within", lambda state, intent: not state["hold"]["on"], "2", ("policy", "hold"), supersedes="1")
    pending = PendingActions(target)
    if known:
        pending.propose(refund("refund/1", 1, (Condition("other", lambda s, i: not s["hold"]["on"], "1", "hold"),)))
    for n, verdict in enumerate((REFRESH, REPLAN), 7):
        target.set("hold", {"on": False})
        pending.deploy(WITHIN)
        pending.propose(refund(f"refund/{n}", n))
        assert pending.deploy(free)[f"refund/{n}"] is REFRESH
        if verdict is REPLAN:
            target.set("hold", {"on": True})
        elif known:
            target.set("hold", {"on": False, "since": 1})
        assert pending.release(f"refund/{n}").verdict is verdict
    assert target.n_publications == {"refund/7": 1}


def test_what_a_change_interrupts_is_read_again(target, monkeypatch):
    """A token that is kept before its value was looked at hides the value for ever."""
    pending = PendingActions(target)
    pending.propose(refund())
    target.set("policy", {"limit": 1})

    def stop(name, value):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(pending.graph, "apply", stop)
        with pytest.raises(KeyboardInterrupt):
            pending.changed()
    assert pending.release("refund/7").verdict is REPLAN


def test_what_cannot_be_written_down_does_not_wait(target, tmp_path):
    pending = PendingActions(target, RULES, tmp_path / "pending.db")
    with pytest.raises(TypeError):
        pending.propose(refund(observed=(Read(Selector("customer", ("mail",)), {1}),)))
    assert not pending.graph.waiting
    assert pending.propose(refund()) is KEEP


def test_half_a_surrogate_pair_is_written_down(target, tmp_path):
    half = Condition("half", lambda state, intent: state["customer"]["name"] == "\ud800", "1", "customer")
    target.set("customer", {"name": "\ud800"})
    PendingActions(target, (half, *RULES), tmp_path / "pending.db").propose(refund(conditions=(half,)))
    later = PendingActions(target, (half, *RULES), tmp_path / "pending.db")
    assert later.release("refund/7").verdict is KEEP


def test_a_target_whose_resources_cannot_be_read_is_refused():
    with pytest.raises(ConditionRefused, match=r"'memory' has no value\(resource\)"):
        PendingActions(MemoryTarget()).propose(refund())


def test_a_file_that_cannot_be_used_is_named(target, tmp_path):
    (tmp_path / "text.db").write_text("no database" * 1000)
    for path in (tmp_path, tmp_path / "nowhere" / "pending.db", tmp_path / "text.db"):
        with pytest.raises(ReleaseError, match=r"the file of pending actions .* cannot be used.*see that it is"):
            PendingActions(target, RULES, path)
    pending = PendingActions(target, RULES, tmp_path / "pending.db")
    pending.propose(refund())
    pending.close()
    for call in (lambda: pending.release("refund/7"), lambda: pending.propose(refund("refund/8"))):
        with pytest.raises(ReleaseError, match="closed"):
            call()


@pytest.mark.parametrize("body", ["[1", "1", '["tuple", 1]'])
def test_a_damaged_action_is_named(target, tmp_path, body):
    PendingActions(target, RULES, tmp_path / "pending.db").propose(refund())
    with contextlib.closing(sqlite3.connect(tmp_path / "pending.db")) as file:
        file.execute("UPDATE actions SET body = ?", (body,))
        file.commit()
    with pytest.raises(ReleaseError, match="what waits as 'refund/7' is damaged"):
        PendingActions(target, RULES, tmp_path / "pending.db")


def test_a_file_of_another_target_is_refused(target, tmp_path):
    first = PendingActions(target, RULES, tmp_path / "pending.db")
    first.propose(PendingAction("refund/7", {"amount": 80}, (WITHIN,), target="desk"))
    with pytest.raises(ConditionRefused, match="is for 'desk' and not for 'shop' - give each target a file"):
        PendingActions(MemoryRecords("shop"), RULES, tmp_path / "pending.db")
    assert first.release("refund/7").status is Status.RELEASED


def test_a_condition_that_came_back_as_something_else_is_not_in_force(target, tmp_path):
    first = PendingActions(target, RULES, tmp_path / "pending.db")
    first.propose(refund(conditions=(WITHIN,), refresh=()))
    swapped = RefreshRule("within", lambda state, intent: 1, "2", "policy", supersedes="1")
    later = PendingActions(target, (swapped,), tmp_path / "pending.db")
    assert later.release("refund/7").verdict is REPLAN
    assert not target.happened


KILLED = """
import multiprocessing, os, signal, sys
sys.path.insert(0, sys.argv[3])
import test_pending as t

url, path, _, n_kills = *sys.argv[1:4], int(sys.argv[4])
fork = multiprocessing.get_context("fork")

def die(n, where):
    target, _ = t.shop(url, "k_")
    pending = t.PendingActions(target, t.RULES, path, timeout_s=None)
    if pending.propose(t.refund(f"refund/{n}", n)) is not t.KEEP:
        os._exit(3)
    publish, mark = target.publish, pending._mark
    def kill(*_): os.kill(os.getpid(), signal.SIGKILL)
    if where == "before it is written down":
        pending._mark = kill
    elif where == "before the call":
        target.publish = kill
    elif where == "after the call":
        def publish_and_die(*arguments):
            publish(*arguments)
            kill()
        target.publish = publish_and_die
    pending.release(f"refund/{n}")

t.shop(url, "k_")[0].close()  # what is imported on the way need not be imported by every child
places = ("before it is written down", "before the call", "after the call")
for n in range(n_kills):
    child = fork.Process(target=die, args=(n, places[n % 3]))
    child.start()
    child.join()
    assert child.exitcode == -signal.SIGKILL, child.exitcode
    # Some are resumed at once by another process, the others all at the end.
    if n % 2:
        def resume(n):
            target, _ = t.shop(url, "k_")
            assert t.PendingActions(target, t.RULES, path, timeout_s=None).release(f"refund/{n}").status == "released"
        other = fork.Process(target=resume, args=(n,))
        other.start()
        other.join()
        assert other.exitcode == 0
"""


def run_script(script, *arguments):
    here = os.path.dirname(__file__)  # noqa: PTH120
    done = subprocess.run(
        [sys.executable, "-c", script, *map(str, arguments[:2]), here, *map(str, arguments[2:])],
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


@pytest.mark.slow
@pytest.mark.timeout(120 + 4 * N_KILLS)
@on_databases
def test_killed_between_validation_and_release_none_is_lost_and_none_doubled(url, tmp_path, opened, waiting):
    target, sent = opened(url, "k_")
    began = time.perf_counter()
    run_script(KILLED, url, tmp_path / "pending.db", N_KILLS)
    pending = waiting(target)
    statuses = Counter(pending.release(f"refund/{n}").status for n in range(N_KILLS))
    counts = landed(target, sent)
    print(f"{target.engine.dialect.name}: killed {N_KILLS} times, {counts.total()} landed,", end=" ")
    print(f"{N_KILLS - len(counts)} lost, {counts.total() - len(counts)} doubled, {time.perf_counter() - began:.1f} s")
    assert statuses == {Status.RELEASED: N_KILLS}
    assert counts == {f"refund/{n}": 1 for n in range(N_KILLS)}


# --- many at once ---


@pytest.mark.timeout(120 + 2 * N_RACES)
@on_databases
def test_eight_threads_release_one_action(url, opened, waiting):
    """Validating, acting and writing down afterwards lets all eight act."""
    target, sent = opened(url, next(_PREFIXES))
    shared = waiting(target)
    own = [waiting(target) for _ in range(N_RACERS // 2)]
    began = time.perf_counter()
    with ThreadPoolExecutor(N_RACERS) as pool:
        for n in range(N_RACES):
            barrier = threading.Barrier(N_RACERS)
            shared.propose(refund(f"refund/{n}", n))

            def release(i, n=n, barrier=barrier):
                pending = own[i] if i < len(own) else shared
                barrier.wait()
                return pending.release(f"refund/{n}").status

            assert set(pool.map(release, range(N_RACERS))) == {Status.RELEASED}
    counts = landed(target, sent)
    print(f"{target.engine.dialect.name}, {N_RACERS} threads, {N_RACES} actions: {counts.total()} landed,", end=" ")
    print(f"{time.perf_counter() - began:.1f} s")
    assert counts == {f"refund/{n}": 1 for n in range(N_RACES)}


RACERS = """
import multiprocessing, sys
sys.path.insert(0, sys.argv[3])
import test_pending as t

url, path, _, prefix, n_races = *sys.argv[1:5], int(sys.argv[5])
fork = multiprocessing.get_context("fork")
barrier = fork.Barrier(t.N_RACERS)

def run(i):
    target, _ = t.shop(url, prefix)
    pending = t.PendingActions(target, t.RULES, path, timeout_s=None)
    for n in range(n_races):
        if not i:
            pending.propose(t.refund(f"refund/{n}", n))
        barrier.wait()
        assert pending.release(f"refund/{n}").status == "released"

t.shop(url, prefix)[0].close()  # what is imported on the way need not be imported by every racer
racers = [fork.Process(target=run, args=(i,)) for i in range(t.N_RACERS)]
for racer in racers:
    racer.start()
for racer in racers:
    racer.join()
sys.exit(max(abs(racer.exitcode) for racer in racers))
"""


@pytest.mark.slow
@pytest.mark.timeout(120 + 2 * N_RACES)
@on_databases
def test_eight_processes_release_one_action(url, tmp_path, opened):
    prefix = next(_PREFIXES)
    target, sent = opened(url, prefix)
    began = time.perf_counter()
    run_script(RACERS, url, tmp_path / "pending.db", prefix, N_RACES)
    counts = landed(target, sent)
    print(f"{target.engine.dialect.name}, {N_RACERS} processes, {N_RACES} actions: {counts.total()} landed,", end=" ")
    print(f"{time.perf_counter() - began:.1f} s")
    assert counts == {f"refund/{n}": 1 for n in range(N_RACES)}


@pytest.mark.timeout(120 + 2 * N_RACES)
@on_databases
def test_one_of_eight_refunds_of_one_order(url, opened, waiting):
    """Eight actions of their own, each justified because there was no refund; writing it takes the reason away."""
    target, sent = opened(url, next(_PREFIXES))
    note = target._apply

    def apply(connection, key, payload):
        note(connection, key, payload)
        done = json.loads(
            connection.execute(sql.select(target.resources.c.value).filter_by(name="refunds")).scalar_one()
        )
        target.set("refunds", done | {str(payload["intent"]["order"]): {"by": key}}, connection)

    target._apply = apply
    n_races = max(2, N_RACES // 5)
    desks = [waiting(target, f"desk {i}") for i in range(N_RACERS)]
    with ThreadPoolExecutor(N_RACERS) as pool:
        for n in range(n_races):
            barrier = threading.Barrier(N_RACERS)

            def release(i, n=n, barrier=barrier):
                desks[i].propose(refund(f"refund/{n}#{i}", n))
                barrier.wait()
                return str(desks[i].release(f"refund/{n}#{i}").verdict)

            assert Counter(pool.map(release, range(N_RACERS))) == {"KEEP": 1, "BLOCK": N_RACERS - 1}
    assert landed(target, sent).total() == n_races
    print(f"{target.engine.dialect.name}: {N_RACERS} refunds of one order, {n_races} times: {n_races} landed")
