"""Targets: an intent lands once, on premises that hold as it lands, whoever else is at it at the same time."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import subprocess
import sys
import threading
import time
import traceback
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from urllib.parse import unquote

import pytest
import sqlalchemy as sql
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from revise_lab.errors import ConfigError, RefusedCombination
from revise_lab.records.effect import EffectState, Reversibility
from revise_lab.records.value import freeze
from revise_lab.runtime import sql_target as sql_module
from revise_lab.runtime.http_target import HttpTarget
from revise_lab.runtime.local_postgres import REMEDY, LocalPostgres, binaries
from revise_lab.runtime.sql_target import SqlTarget
from revise_lab.runtime.target import (
    ABSENT_TOKEN,
    Fault,
    IntentConflict,
    MemoryTarget,
    OutcomeUnknown,
    PremiseChanged,
    Receipt,
    TargetError,
    check_target,
)

N_RACES = int(os.environ.get("REVISE_LAB_RACES", "50"))
N_RACERS = 8
REFUND = {"order": 7, "amount": 80, "note": "half a pair: \ud83d, nothing: \0"}
CARD = "".join(map(str, range(16)))
ON_POSTGRES = pytest.param("postgres", marks=pytest.mark.postgres)
_PREFIXES = (f"t{i}_" for i in itertools.count())


@pytest.fixture(scope="module")
def postgres_url():
    if binaries() is None:
        pytest.skip(f"PostgreSQL is not installed: {REMEDY}")
    with LocalPostgres() as server:
        yield server.url


@pytest.fixture
def url(request, tmp_path):
    """Return the URL of a database: of a SQLite file or of a real PostgreSQL server."""
    return request.getfixturevalue("postgres_url") if request.param == "postgres" else f"sqlite:///{tmp_path}/shop.db"


on_databases = pytest.mark.parametrize("url", ["sqlite", ON_POSTGRES], indirect=True)


@pytest.fixture
def sql_target():
    """Return what opens targets of its own on a database, each with a list of what happened in a table without keys."""
    with contextlib.ExitStack() as stack:

        def open_target(url, prefix=None, *, also=lambda target, connection, key: None, **options):
            prefix = prefix or next(_PREFIXES)
            sent = sql.Table(f"{prefix}sent", sql.MetaData(), sql.Column("what", sql.Text), sql.Column("key", sql.Text))

            def apply(connection, key, payload):
                connection.execute(sent.insert().values(what="publish", key=key))
                also(target, connection, key)

            def undo(connection, key, payload):
                connection.execute(sent.insert().values(what="compensate", key=key))

            target = SqlTarget(url, prefix=prefix, apply=apply, undo=undo, **options)
            stack.callback(target.close)
            sent.create(target.engine, checkfirst=True)
            target.sent, target.prefix = sent, prefix
            return target

        yield open_target


def happened(target):
    """Count what a target did to the world: ``(what, intent key)``."""
    if isinstance(target, MemoryTarget):
        return Counter((what, key) for what, key, _ in target.happened)
    if isinstance(target, HttpTarget):
        return Counter(target.shop.happened)
    with target.engine.connect() as connection:
        return Counter(map(tuple, connection.execute(sql.select(target.sent))))


# --- a server that heeds preconditions ---


class Shop:
    """A small server: resources with versions, effects by key."""

    def __init__(self):
        self.versions, self.effects, self.happened = {}, {}, []
        self.premise_first = self.weak = self.breaks = False

    def tag(self, name):
        return f'"{self.versions[name]}"' if name in self.versions else None

    async def post(self, request):
        body, name = await request.json(), request.path_params["name"]
        key = unquote(request.headers["idempotency-key"])
        if name == "transactions":
            premises, payload = body["premises"], body["payload"]
            changed = [each for each, token in premises.items() if (self.tag(each) or ABSENT_TOKEN) != token]
        else:
            payload, tag = body, self.tag(name)
            asked = request.headers.get("if-match")
            changed = [name] if (asked and asked != tag) or ("if-none-match" in request.headers and tag) else []
        if changed and self.premise_first:
            return JSONResponse({"changed": changed}, 412)
        if key in self.effects:
            if self.effects[key]["state"] == "dropped":
                return Response(status_code=410)
            same = self.effects[key] == {"payload": payload, "state": "confirmed"}
            return Response(status_code=200 if same else 422)
        if changed:
            return JSONResponse({"changed": changed}, 412)
        self.effects[key] = {"payload": payload, "state": "confirmed"}
        self.happened.append(("publish", key))
        return Response(status_code=500 if self.breaks else 201)

    async def effect(self, request):
        key = request.path_params["key"]
        found = self.effects.get(key)
        if found is None and "close" in request.query_params:
            self.effects[key] = {"payload": None, "state": "dropped"}
        if found and found["state"] == "dropped":
            found = None
        if found and request.method == "DELETE" and found["state"] == "confirmed":
            found["state"] = "compensated"
            self.happened.append(("compensate", key))
        return Response(json.dumps(found)) if found else Response(status_code=404)

    async def resource(self, request):
        name = request.path_params["name"]
        if request.method == "PUT":
            self.versions[name] = self.versions.get(name, 0) + 1
        tag = self.tag(name)
        headers = {"etag": f"W/{tag}" if self.weak else tag} if tag else {}
        return Response(status_code=200 if tag else 404, headers=headers)

    def app(self):
        return Starlette(
            routes=[
                Route("/effects/{key:path}", self.effect, methods=["GET", "DELETE"]),
                Route("/{name:path}", self.post, methods=["POST"]),
                Route("/{name:path}", self.resource, methods=["HEAD", "PUT"]),
            ]
        )


@pytest.fixture(scope="module")
def served():
    shops = {}

    async def app(scope, receive, send):
        await shops["now"](scope, receive, send)

    server = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=0, log_level="error", lifespan="off"))
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started:
        time.sleep(0.005)
    port = server.servers[0].sockets[0].getsockname()[1]
    yield f"http://127.0.0.1:{port}", shops
    server.should_exit = True
    thread.join()


@pytest.fixture
def http_target(served):
    base, shops = served
    shop = Shop()
    shops["now"] = shop.app()
    target = HttpTarget(base, transactions="transactions")
    target.shop = shop
    target.set = lambda name, value: target._client.put(f"/{name}").headers["etag"]
    yield target
    target.close()


@pytest.fixture(params=["memory", "sqlite", ON_POSTGRES, "http"])
def target(request, tmp_path, sql_target):
    if request.param == "memory":
        return MemoryTarget()
    if request.param == "http":
        return request.getfixturevalue("http_target")
    if request.param == "sqlite":
        return sql_target(f"sqlite:///{tmp_path}/shop.db")
    return sql_target(request.getfixturevalue("postgres_url"))


# --- what every target does ---


def test_an_intent_is_published_once_and_compensated_once(target):
    key = "trip/book/slot 1#é/1"
    assert target.find(key) is None
    with pytest.raises(TargetError, match="never published"):
        target.compensate(key)
    receipt = target.publish(key, REFUND, {})
    assert receipt == Receipt(key, freeze(REFUND), EffectState.CONFIRMED)
    assert target.publish(key, dict(reversed(REFUND.items())), {}) == receipt == target.find(key)
    with pytest.raises(IntentConflict, match=r"another payload.*next epoch"):
        target.publish(key, REFUND | {"amount": 81}, {})
    assert happened(target) == {("publish", key): 1}
    undone = target.compensate(key)
    assert undone == receipt._replace(state=EffectState.COMPENSATED) == target.compensate(key) == target.find(key)
    assert happened(target) == {("publish", key): 1, ("compensate", key): 1}
    with pytest.raises(IntentConflict, match="closes its epoch"):
        target.publish(key, REFUND, {})
    assert target.publish(key + "2", REFUND, {}).state is EffectState.CONFIRMED


def test_what_is_asked_for_before_it_arrives_never_does(target):
    assert target.find("late", close=True) is None
    for _ in "12":
        with pytest.raises(TargetError):
            target.publish("late", REFUND, {})
    assert (target.find("late"), target.find("late", close=True)) == (None, None)
    with pytest.raises(TargetError, match="never published"):
        target.compensate("late")
    assert happened(target) == {}
    receipt = target.publish("early", REFUND, {})
    assert target.find("early", close=True) == receipt == target.publish("early", REFUND, {})


def test_premises_are_part_of_the_publication(target):
    tokens = {"policy": target.set("policy", {"limit": 100}), "account": target.set("account", "open")}
    assert {name: target.token(name) for name in tokens} == tokens
    target.set("policy", {"limit": 50})
    with pytest.raises(PremiseChanged, match="policy changed after it was decided") as changed:
        target.publish("refund", REFUND, tokens)
    assert changed.value.names == ("policy",)
    assert target.find("refund") is None
    # Trying again with what was decided on cannot help; deciding again can.
    with pytest.raises(PremiseChanged):
        target.publish("refund", REFUND, tokens)
    tokens["policy"] = target.token("policy")
    receipt = target.publish("refund", REFUND, tokens)
    target.set("policy", {"limit": 10})
    assert target.publish("refund", REFUND, tokens) == receipt, "it has landed; what changed since is another matter"
    assert happened(target) == {("publish", "refund"): 1}


def test_that_something_is_absent_is_a_premise_too(target):
    assert target.token("refunds/7") == ABSENT_TOKEN
    assert target.publish("first", REFUND, {"refunds/7": ABSENT_TOKEN})
    assert target.token("refunds/7") == ABSENT_TOKEN
    target.set("refunds/7", "done elsewhere")
    with pytest.raises(PremiseChanged):
        target.publish("second", REFUND, {"refunds/7": ABSENT_TOKEN})
    with pytest.raises(PremiseChanged):
        target.publish("third", REFUND, {"refunds/8": target.token("refunds/7")})


def test_tokens_have_no_order_and_must_be_there(target):
    for _ in range(10):
        newest = target.set("policy", "x")
    older = newest.replace("10", "9")
    assert older != newest
    with pytest.raises(PremiseChanged):
        target.publish("refund", REFUND, {"policy": older})
    for token in (None, "", 10):
        with pytest.raises(TargetError, match="'policy' with the token"):
            target.publish("refund", REFUND, {"policy": token})
    assert target.find("refund") is None


def test_effects_that_cannot_be_revoked_need_a_target_that_checks(target):
    for reversibility in Reversibility:
        check_target(target, reversibility)
    deaf = MemoryTarget("mailbox", compares_and_sets=False)
    check_target(deaf, Reversibility.REVERSIBLE)
    for reversibility in "KX":
        with pytest.raises(RefusedCombination, match=f"'mailbox' cannot compare and set, .* class {reversibility}"):
            check_target(deaf, Reversibility(reversibility))


# --- failures ---


def test_a_target_in_memory_fails_as_it_is_told():
    target = MemoryTarget()
    target.faults += [Fault.FAIL, Fault.NOT_DONE, Fault.ANSWER_LOST, None, Fault.ANSWER_LOST]
    with pytest.raises(TargetError, match="nothing happened"):
        target.publish("a", 1, {})
    with pytest.raises(OutcomeUnknown):
        target.publish("a", 1, {})
    assert target.find("a") is None
    with pytest.raises(OutcomeUnknown):
        target.publish("a", 1, {})
    assert target.find("a") == target.publish("a", 1, {})
    with pytest.raises(OutcomeUnknown):
        target.compensate("a")
    assert target.find("a").state is EffectState.COMPENSATED
    assert target.n_publications == {"a": 1}
    target.reachable = False
    for ask in (target.find, target.token, target.compensate):
        with pytest.raises(OutcomeUnknown, match="does not answer"):
            ask("a")


def test_a_call_that_hangs_goes_on_when_it_may():
    target = MemoryTarget()
    target.faults.append(Fault.HANG)
    with ThreadPoolExecutor(1) as pool:
        call = pool.submit(target.publish, "a", 1, {})
        with pytest.raises(TimeoutError):
            call.result(0.05)
        assert target.find("a") is None
        target.resume.set()
        assert call.result(5) == target.find("a")


@on_databases
def test_a_publication_that_fails_half_way_leaves_nothing(url, sql_target):
    def fail(target, connection, key):
        target.set("policy", "half", connection)
        if key == "bad":
            raise ValueError("the shop has no such order")

    target = sql_target(url, also=fail)
    with pytest.raises(ValueError, match="no such order"):
        target.publish("bad", REFUND, {"policy": ABSENT_TOKEN})
    assert (target.find("bad"), target.token("policy"), happened(target)) == (None, ABSENT_TOKEN, {})
    target.publish("good", REFUND, {"policy": ABSENT_TOKEN})
    assert (target.value("policy"), happened(target)) == ("half", {("publish", "good"): 1})


def test_a_transaction_that_keeps_losing_is_tried_so_often_and_no_more(tmp_path, sql_target, monkeypatch):
    pauses = []
    monkeypatch.setattr(sql_module.time, "sleep", pauses.append)

    def lose(target, connection, key):
        tries.append(key)
        if len(tries) <= n_losses:
            lost = sql.exc.OperationalError("INSERT", {"card": CARD}, Exception("could not serialize access"))
            lost.orig.sqlstate = "40001"
            raise lost

    target = sql_target(f"sqlite:///{tmp_path}/shop.db", also=lose, max_tries=4)
    tries, n_losses = [], 3
    target.publish("a", {"card": CARD}, {})
    assert len(tries) == 4
    tries, n_losses = [], 4
    with pytest.raises(
        TargetError, match=r"b was refused in 4 tries \(could not serialize access\) - nothing happened"
    ):
        target.publish("b", {"card": CARD}, {})
    assert len(tries) == 4
    assert happened(target) == {("publish", "a"): 1}
    # Losers that come back at once lose to each other again; eight of them lost thirty times in a row.
    assert len(set(pauses)) == len(pauses) == 6
    assert all(0 < pause <= 2.0**n / 1e3 for pause, n in zip(pauses, [1, 2, 3] * 2, strict=True))


def test_a_database_that_cannot_be_used_is_refused_or_unknown(tmp_path, sql_target):
    for url in ("sqlite://", "sqlite:///:memory:"):
        with pytest.raises(ConfigError, match="in memory"):
            SqlTarget(url)
    with pytest.raises(ConfigError, match="try at least once"):
        SqlTarget(f"sqlite:///{tmp_path}/shop.db", max_tries=0)
    with pytest.raises(OutcomeUnknown, match="unable to open"):
        SqlTarget(f"sqlite:///{tmp_path}/nowhere/shop.db")
    path = tmp_path / "shop.db"
    target = sql_target(sql.create_engine(f"sqlite:///{path}", connect_args={"timeout": 0.05}))
    with contextlib.closing(target.engine.raw_connection()) as other:
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(TargetError, match=r"locked.*less busy") as busy:
            target.publish("a", {"card": CARD}, {})
        assert CARD not in "".join(traceback.format_exception(busy.value))
        other.rollback()
    assert target.find("a") is None
    target.engine.dispose()


@pytest.mark.postgres
def test_a_server_that_went_away_leaves_the_outcome_unknown():
    if binaries() is None:
        pytest.skip(f"PostgreSQL is not installed: {REMEDY}")
    with LocalPostgres() as server:
        target = SqlTarget(server.url)
        target.publish("a", {"card": CARD}, {})
    for call in (lambda: target.publish("b", {"card": CARD}, {}), lambda: target.find("a")):
        with pytest.raises(OutcomeUnknown) as unknown:
            call()
        assert CARD not in "".join(traceback.format_exception(unknown.value))
    target.close()


@on_databases
@pytest.mark.parametrize("end", ["commit", "rollback", "close"])
def test_an_apply_that_ends_the_transaction_leaves_the_outcome_unknown(url, sql_target, end):
    """It would be confirmed although it was rolled back, or on premises that nothing holds any more."""
    target = sql_target(url)
    target._apply = lambda connection, key, payload: getattr(connection, end)()
    with pytest.raises(OutcomeUnknown, match="ask what became of it"):
        target.publish("a", REFUND, {})
    assert (target.find("a") is not None) == (end == "commit")


@on_databases
def test_whatever_goes_wrong_in_the_driver_is_said_without_the_payload(url, sql_target):
    target = sql_target(url)
    for apply in (
        lambda connection, key, payload: connection.execute(sql.text("SELECT :a"), payload),
        lambda connection, key, payload: connection.execute(sql.text("SELECT :a"), {"a": payload["card"] + "\ud800"}),
    ):
        target._apply = apply
        with pytest.raises(OutcomeUnknown) as unknown:
            target.publish("a", {"card": CARD}, {})
        assert CARD not in "".join(traceback.format_exception(unknown.value))
        assert target.find("a") is None
    with pytest.raises(OutcomeUnknown):
        target.token("\ud800")
    full = sql_target(sql.create_engine(url, pool_size=1, max_overflow=0, pool_timeout=0.05))
    with full.engine.connect(), pytest.raises(OutcomeUnknown, match=r"no answer for 'a' \(TimeoutError\)"):
        full.publish("a", {"card": CARD}, {})
    full.engine.dispose()


@pytest.mark.parametrize("url", ["no url", "foo://s3cret", "postgresql+psycopg://u:s3cret@h:port/x"])
def test_a_url_without_a_database_is_refused(url):
    with pytest.raises(ConfigError, match="there is no database at its URL") as refused:
        SqlTarget(url)
    assert "s3cret" not in "".join(traceback.format_exception(refused.value))


# --- HTTP ---


class Says:
    """A server that says what it is told to, in order, and then that there is nothing."""

    def __init__(self):
        self.answers = []

    async def __call__(self, scope, receive, send):
        request = Request(scope, receive)
        await request.body()
        await (self.answers.pop(0) if self.answers else Response(status_code=404))(scope, receive, send)


@pytest.fixture
def says(served):
    """Return a target and the list of what its server says next."""
    base, shops = served
    shops["now"] = server = Says()
    target = HttpTarget(base)
    yield target, server.answers
    target.close()


@pytest.mark.parametrize("status", [202, 301, 302, 303])
def test_what_may_be_done_elsewhere_or_later_is_unknown(says, status):
    target, answers = says
    answers.append(Response(status_code=status, headers={"location": "/elsewhere"}))
    with pytest.raises(OutcomeUnknown, match=f"{status}, which does not say that it was published - ask"):
        target.publish("a", REFUND, {})


def test_a_closed_key_is_no_receipt_and_takes_no_publication(says):
    """However a server says it: what never arrived must not be taken for released."""
    target, answers = says
    for closed in (Response(status_code=410), Response('{"payload": null, "state": "dropped"}')):
        answers.append(closed)
        assert target.find("a", close=True) is None
    answers.append(Response(status_code=410))
    with pytest.raises(IntentConflict, match="asked for before it arrived, which closed it"):
        target.publish("a", REFUND, {})


@pytest.mark.parametrize(
    "answer",
    [
        Response("plain", headers={"content-encoding": "gzip"}),
        Response('{"payload": 1, "state": "staged"}'),
        Response('{"payload": ' + "[" * 100_000 + "]" * 100_000 + ', "state": "confirmed"}'),
        Response('{"payload": ' + "[" * 600 + "]" * 600 + ', "state": "confirmed"}'),
    ],
    ids=["encoding", "state", "too deep", "deep"],
)
def test_what_cannot_be_understood_is_unknown(says, answer):
    target, answers = says
    answers.append(answer)
    with pytest.raises(OutcomeUnknown):
        target.find("a")


@pytest.mark.parametrize("tag", [b'"1", "2"', b'"', b'"abc', b'"\xe9"', b"*"])
def test_what_is_not_one_tag_that_can_be_sent_back_is_no_premise(says, tag):
    """``If-Match`` with two tags holds if either does."""
    target, answers = says
    answer = Response()
    answer.raw_headers.append((b"etag", tag))
    answers.append(answer)
    with pytest.raises(TargetError, match="has no strong ETag"):
        target.token("policy")


def test_a_name_of_dots_asks_and_undoes_nothing_else(http_target):
    """A client takes ``/effects/..`` for ``/``."""
    for name in (".", "..", "a/../b"):
        for call in (http_target.token, lambda name: http_target.publish("a", 1, {name: '"1"'})):
            with pytest.raises(TargetError, match=r"would go to another place than it names.*nothing was sent"):
                call(name)
    for call in (http_target.find, http_target.compensate):
        with pytest.raises(TargetError, match="would go to another place"):
            call("..")
    assert http_target.find("a/../b") is None
    with pytest.raises(OutcomeUnknown, match="URL too long"):
        http_target.find("a" * 70_000)


@pytest.mark.parametrize("url", ["http://u:s3cret@h:port", "http://[::1", "ftp://u:s3cret@h"])
def test_an_address_may_hold_a_password(url):
    with pytest.raises(ConfigError, match="is no address") as refused:
        HttpTarget(url)
    target = HttpTarget("http://u:s3cret@127.0.0.1:9")
    with pytest.raises(OutcomeUnknown, match=r"nobody answers at http://127\.0\.0\.1:9 ") as unknown:
        target.find("a")
    target.close()
    assert "s3cret" not in f"{refused.value} {unknown.value}"


def test_http_has_room_for_one_premise_unless_the_server_takes_transactions(http_target):
    tokens = {name: http_target.set(name, 1) for name in ("policy", "account")}
    http_target.publish("both", REFUND, tokens)
    http_target.transactions = None
    with pytest.raises(TargetError, match=r"account, policy, and HTTP can check one.*nothing was sent"):
        http_target.publish("again", REFUND, tokens)
    assert http_target.find("again") is None
    http_target.publish("one", REFUND, {"policy": tokens["policy"]})


def test_a_server_that_checks_the_premise_before_the_key_is_understood(http_target):
    token = http_target.set("policy", 1)
    receipt = http_target.publish("refund", REFUND, {"policy": token})
    http_target.set("policy", 2)
    http_target.shop.premise_first = True
    assert http_target.publish("refund", REFUND, {"policy": token}) == receipt
    with pytest.raises(IntentConflict):
        http_target.publish("refund", 1, {"policy": token})
    with pytest.raises(PremiseChanged):
        http_target.publish("other", REFUND, {"policy": token})


def test_what_a_server_leaves_open_is_unknown_and_what_it_refuses_is_not(http_target):
    http_target.shop.breaks = True
    with pytest.raises(OutcomeUnknown, match="500 - ask"):
        http_target.publish("refund", REFUND, {})
    assert http_target.find("refund").state is EffectState.CONFIRMED
    http_target.shop.weak = True
    http_target.set("policy", 1)
    with pytest.raises(TargetError, match="no strong ETag"):
        http_target.token("policy")
    http_target.shop.effects["odd"] = {"state": "lost"}
    with pytest.raises(OutcomeUnknown, match="cannot be understood"):
        http_target.find("odd")


def test_a_server_that_is_not_there():
    with pytest.raises(ConfigError, match="is no address"):
        HttpTarget("shop.example")
    target = HttpTarget("http://127.0.0.1:9", headers={"authorization": "Bearer s3cret"})
    with pytest.raises(TargetError, match="nobody answers") as refused:
        target.publish("a", 1, {})
    with pytest.raises(TargetError, match="nobody answers"):
        target.compensate("a")
    with pytest.raises(OutcomeUnknown, match="nobody answers"):
        target.find("a")
    assert "s3cret" not in f"{refused.value} {target!r}"
    target.close()


# --- many at once ---


def race(n, do):
    """Run ``do(i)`` in ``n`` threads that start together; return what each returned or raised."""
    barrier = threading.Barrier(n)

    def run(i):
        barrier.wait()
        try:
            return do(i)
        except TargetError as error:
            return type(error)

    with ThreadPoolExecutor(n) as pool:
        return list(pool.map(run, range(n)))


def test_eight_threads_publish_one_intent_in_memory_and_over_http(http_target):
    for target in (MemoryTarget(), http_target):
        for i in range(N_RACES):
            receipts = race(N_RACERS, lambda _, target=target, key=f"refund/{i}": target.publish(key, REFUND, {}))
            assert len(set(receipts)) == 1, receipts
        assert happened(target) == {("publish", f"refund/{i}"): 1 for i in range(N_RACES)}
    careless = MemoryTarget(compares_and_sets=False)
    race(N_RACERS, lambda _: careless.publish("refund", REFUND, {}))
    assert careless.n_publications == {"refund": N_RACERS}, "what happens without"


@on_databases
def test_eight_threads_publish_one_intent(url, sql_target):
    target = sql_target(url)
    premises = {"policy": target.set("policy", 1)}
    began = time.perf_counter()
    for i in range(N_RACES):
        receipts = race(N_RACERS, lambda _, key=f"refund/{i}": target.publish(key, REFUND, premises))
        assert receipts == [Receipt(f"refund/{i}", freeze(REFUND), EffectState.CONFIRMED)] * N_RACERS
    took_s = time.perf_counter() - began
    counts = happened(target)
    print(
        f"{target.engine.dialect.name}, {N_RACERS} threads, {N_RACES} intents: {counts.total()} landed, {took_s:.1f} s"
    )
    assert counts == {("publish", f"refund/{i}"): 1 for i in range(N_RACES)}


RACERS = """
import json, multiprocessing, sys, time
import sqlalchemy as sql
from revise_lab.runtime.sql_target import SqlTarget

url, prefix, payload, n_racers, n_races = *sys.argv[1:3], *map(json.loads, sys.argv[3:])
sent = sql.table(prefix + "sent", sql.column("what"), sql.column("key"))
fork = multiprocessing.get_context("fork")
barrier = fork.Barrier(n_racers)

def run(i):
    def apply(connection, key, payload):
        connection.execute(sent.insert().values(what="publish", key=key))

    target = SqlTarget(url, prefix=prefix, apply=apply)
    premises = {"policy": target.token("policy")}
    for race in range(n_races):
        barrier.wait()
        if not race:
            began = time.perf_counter()
        assert target.publish(f"refund/{race}", payload, premises).state == "confirmed"
    if not i:
        print(time.perf_counter() - began)

racers = [fork.Process(target=run, args=(i,)) for i in range(n_racers)]
for racer in racers:
    racer.start()
for racer in racers:
    racer.join()
sys.exit(max(racer.exitcode for racer in racers))
"""


@on_databases
def test_eight_processes_publish_one_intent(url, sql_target):
    target = sql_target(url)
    target.set("policy", 1)
    numbers = map(json.dumps, (REFUND, N_RACERS, N_RACES))
    done = subprocess.run([sys.executable, "-c", RACERS, url, target.prefix, *numbers], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    took_s, counts = float(done.stdout), happened(target)
    print(
        f"{target.engine.dialect.name}, {N_RACERS} processes, {N_RACES} intents: {counts.total()} landed, {took_s:.1f} s"
    )
    assert counts == {("publish", f"refund/{i}"): 1 for i in range(N_RACES)}


@on_databases
def test_one_of_eight_that_all_found_nothing_there(url, sql_target):
    """Eight refunds, each under an intent of its own, each decided when there was no refund for the order."""
    target = sql_target(url, also=lambda target, connection, key: target.set(key.split("#")[0], key, connection))
    n_races = max(10, N_RACES // 5)
    for order in (f"refunds/{i}" for i in range(n_races)):
        outcomes = race(
            N_RACERS, lambda i, order=order: target.publish(f"{order}#{i}", REFUND, {order: ABSENT_TOKEN}).state
        )
        assert Counter(outcomes) == {EffectState.CONFIRMED: 1, PremiseChanged: N_RACERS - 1}
    counts = happened(target)
    print(
        f"{target.engine.dialect.name}: {N_RACERS} intents that exclude each other, {n_races} times: {counts.total()} landed"
    )
    assert counts.total() == n_races


@on_databases
def test_a_premise_that_changed_after_the_check_is_rejected_a_hundred_times_of_a_hundred(url, sql_target):
    target = sql_target(url)
    landed = {}
    for premises_sent in ("all", "none"):
        target.set("policy", {"limit": 100})
        for i in range(100):
            seen = {"policy": target.token("policy")}
            # The decision is made on what was seen, and then somebody lowers the limit.
            target.set("policy", {"limit": 50 - i})
            with contextlib.suppress(PremiseChanged):
                target.publish(f"{premises_sent}/{i}", REFUND, seen if premises_sent == "all" else {})
        landed[premises_sent] = sum(key.startswith(premises_sent) for _, key in happened(target))
    print(f"{target.engine.dialect.name}: wrong publications with the policy's token {landed['all']} of 100,")
    print(f"  with compare-and-set on the intent alone {landed['none']} of 100")
    assert landed == {"all": 0, "none": 100}


@on_databases
def test_a_premise_cannot_change_between_its_check_and_the_commit(url, sql_target):
    order = []

    def change(name):
        other.set(name, {"limit": 50})
        order.append(f"{name} changed")

    def meddle(target, connection, key):
        writers.extend(pool.submit(change, name) for name in ("policy", "refunds/7"))
        time.sleep(0.2)
        order.append("published")

    writers = []
    target = sql_target(url, also=meddle)
    other = sql_target(url, prefix=target.prefix)
    premises = {"policy": target.set("policy", {"limit": 100}), "refunds/7": ABSENT_TOKEN}
    with ThreadPoolExecutor(2) as pool:
        target.publish("refund", REFUND, premises)
        for writer in writers:
            writer.result(10)
    assert order[0] == "published"
    assert sorted(order[1:]) == ["policy changed", "refunds/7 changed"]
    assert target.token("refunds/7") != ABSENT_TOKEN
