"""The embedded endpoint: same words for same prompts, and an honest log of what became of every request."""

from __future__ import annotations

import asyncio
import gc
import json
import threading
import time
import urllib.error
import urllib.request

import pytest

from revise_lab.errors import ConfigError, EndpointError
from revise_lab.serving.server import EmbeddedServer
from revise_lab.serving.text import answer, count_tokens, hash_json, hash_text, prompt_text, split_tokens

MESSAGES = [{"role": "user", "content": "plan the trip to Lisbon"}]


def post(url, body, headers=None, timeout=10):
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    request = urllib.request.Request(
        url + "/chat/completions", data, {"content-type": "application/json"} | (headers or {})
    )
    with urllib.request.urlopen(request, timeout=timeout) as response:
        return response.headers, response.read()


def events(raw):
    lines = [line.removeprefix("data: ") for line in raw.decode().split("\n\n") if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def wait_until(condition, limit_s=5.0):
    limit = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < limit, "the condition did not come true in time"
        time.sleep(0.005)


# --- text ---


def test_one_changed_token_of_the_prompt_changes_the_text():
    base = hash_text("budget 900 for Lisbon", 7, 24)
    assert hash_text("budget 900 for Lisbon", 7, 24) == base
    assert len({base, hash_text("budget 800 for Lisbon", 7, 24), hash_text("budget 900 for Lisbon", 8, 24)}) == 3
    assert hash_text("budget 900 for Lisbon", 7, 40).startswith(base)
    assert count_tokens(base) == 24


def test_the_text_is_the_same_in_every_process_and_release():
    assert hash_text("hello", 0, 4) == "atlas tall lotus grain"


def test_tokens_add_up_to_the_text():
    text = '  {"a": "naïve — x",\n "b": [1, 2.5]}  '
    assert "".join(split_tokens(text)) == text
    assert len(split_tokens(text)) == count_tokens(text)


def test_different_messages_are_different_prompts():
    one = [{"role": "user", "content": "a\nuser: b"}]
    two = [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}]
    assert prompt_text(one) != prompt_text(two)


def test_json_satisfies_its_schema_and_follows_the_prompt():
    schema = {
        "type": "object",
        "properties": {
            "route": {"enum": ["air", "rail"]},
            "legs": {"type": "array", "items": {"$ref": "#/$defs/leg"}, "minItems": 2, "maxItems": 3},
            "price": {"type": "integer", "minimum": 10, "maximum": 20},
            "share": {"type": "number", "minimum": 0, "maximum": 1},
            "note": {"type": ["string", "null"], "maxLength": 12},
            "firm": {"type": "boolean"},
            "kind": {"const": "trip"},
        },
        "required": ["route", "extra"],
        "$defs": {"leg": {"type": "object", "properties": {"to": {"type": "string"}}}},
    }
    texts = {hash_json(f"prompt {i}", 0, schema) for i in range(20)}
    assert len(texts) == 20
    for text in texts:
        value = json.loads(text)
        assert set(value) == {*schema["properties"], "extra"}
        assert value["route"] in ("air", "rail")
        assert value["kind"] == "trip"
        assert 10 <= value["price"] <= 20
        assert 0 <= value["share"] <= 1
        assert len(value["note"]) <= 12
        assert isinstance(value["firm"], bool)
        assert 2 <= len(value["legs"]) <= 3
        assert all(isinstance(leg["to"], str) for leg in value["legs"])
    assert {json.loads(text)["route"] for text in texts} == {"air", "rail"}


@pytest.mark.parametrize("ref", ["#", "#/$defs/node"])
def test_a_type_that_holds_itself_has_an_end(ref):
    node = {
        "type": "object",
        "properties": {
            "name": {"type": "string"},
            "children": {"type": "array", "items": {"$ref": ref}},
            "next": {"anyOf": [{"$ref": ref}, {"type": "null"}]},
            "twin": {"$ref": ref},
        },
        "required": ["name", "children", "next"],
    }
    schema = node if ref == "#" else {"$ref": ref, "$defs": {"node": node}}
    value = json.loads(hash_json("prompt", 0, schema))
    assert {"name", "children", "next", "twin"} == set(value)
    assert len(json.dumps(value)) < 500_000
    with pytest.raises(RecursionError):
        hash_json("prompt", 0, {"type": "object", "properties": {"self": {"$ref": "#"}}, "required": ["self"]})


def test_limits_and_stops_end_an_answer():
    whole, reason = answer(MESSAGES, 0, reply_tokens=10)
    assert (len(whole), reason) == (10, "stop")
    assert answer(MESSAGES, 0, reply_tokens=10, max_tokens=4) == (whole[:4], "length")
    assert answer(MESSAGES, 0, reply_tokens=10, max_tokens=10) == (whole, "stop")
    long, reason = answer(MESSAGES, 0, reply_tokens=10, max_tokens=15, ignore_eos=True)
    assert (len(long), reason, long[:10]) == (15, "length", whole)
    stopped, reason = answer(MESSAGES, 0, reply_tokens=10, stop=[whole[3]])
    assert (stopped, reason) == (whole[:3], "stop")


# --- protocol ---


def test_stream_and_whole_agree_and_count():
    with EmbeddedServer(ttft_s=0, itl_s=0, coalesce=4) as server:
        _, raw = post(server.url, {"messages": MESSAGES, "seed": 3})
        whole = json.loads(raw)
        headers, raw = post(
            server.url, {"messages": MESSAGES, "seed": 3, "stream": True, "stream_options": {"include_usage": True}}
        )
        _, silent = post(server.url, {"messages": MESSAGES, "seed": 3, "stream": True})
        log = server.log
    assert headers["content-type"] == "text/event-stream"
    chunks = events(raw)
    assert len(chunks) == 32 / 4 + 2
    text = "".join(c["choices"][0]["delta"].get("content", "") for c in chunks[:-1])
    assert text == whole["choices"][0]["message"]["content"] == hash_text(prompt_text(MESSAGES), 3, 32)
    assert chunks[-2]["choices"][0]["finish_reason"] == whole["choices"][0]["finish_reason"] == "stop"
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"] == whole["usage"]
    assert whole["usage"]["completion_tokens"] == 32
    assert not any("usage" in c for c in events(silent))
    assert [(e.id, e.outcome, e.tokens, e.stream) for e in log] == [
        (0, "completed", 32, False),
        (1, "completed", 32, True),
        (2, "completed", 32, True),
    ]
    assert len({e.prompt_hash for e in log}) == 1
    assert all(e.closed_s is None for e in log), "the end of a response was taken for a client that left"


def test_status_pages_and_the_log_over_http():
    with EmbeddedServer(ttft_s=0, itl_s=0, n_slots=3) as server:
        post(server.url, {"messages": MESSAGES}, {"x-revise-node": "plan%20%C3%A9", "x-revise-attempt": "7"})

        def get(path):
            with urllib.request.urlopen(server.url.removesuffix("/v1") + path, timeout=5) as response:
                return response.read().decode()

        assert "emulated" in json.loads(get("/v1/models"))["data"][0]["owned_by"]
        assert json.loads(get("/health"))["status"] == "ok"
        assert [slot["is_processing"] for slot in json.loads(get("/slots"))] == [False] * 3
        assert "revise_lab:requests_completed 1\n" in get("/metrics")
        assert "revise_lab:tokens_total 32\n" in get("/metrics")
        (row,) = json.loads(get("/log"))
    assert (row["node"], row["attempt"], row["outcome"], row["tokens"]) == ("plan é", "7", "completed", 32)
    assert row["wall_s"] == pytest.approx(row["finished_s"] - row["started_s"])


def test_time_is_what_the_constants_say():
    with EmbeddedServer(ttft_s=0.1, itl_s=0.01, reply_tokens=11) as server:
        post(server.url, {"messages": MESSAGES})
    assert 0.2 <= server.log[0].wall_s < 0.6


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (b"{not json", "not a chat request"),
        ({"prompt": "x"}, "not a chat request"),
        ({"messages": MESSAGES, "max_tokens": "many"}, "not a chat request"),
        ({"messages": MESSAGES, "max_tokens": 50_000}, "exceeds the available context size (40960 tokens)"),
    ],
)
def test_bad_requests_are_400_and_stand_in_the_log(body, says):
    with EmbeddedServer() as server, pytest.raises(urllib.error.HTTPError) as caught:
        post(server.url, body)
    assert caught.value.code == 400
    assert says in json.loads(caught.value.read())["error"]["message"]
    caught.value.close()
    assert [(e.outcome, e.status, e.tokens) for e in server.log] == [("rejected", 400, 0)]


def test_faults_come_in_order_and_by_header():
    with EmbeddedServer(ttft_s=0, itl_s=0, faults=["503", None]) as server:
        with pytest.raises(urllib.error.HTTPError) as caught:
            post(server.url, {"messages": MESSAGES})
        assert caught.value.code == 503
        caught.value.close()
        post(server.url, {"messages": MESSAGES})
        headers, raw = post(server.url, {"messages": MESSAGES}, {"x-revise-fault": "html"})
    assert headers["content-type"].startswith("text/html")
    assert b"<html>" in raw
    assert [(e.fault, e.outcome) for e in server.log] == [("503", "rejected"), ("", "completed"), ("html", "broken")]


# --- disconnects ---


async def leave(server, *, stream, after_s):
    """Send a request over a bare socket and close it after a while."""
    body = json.dumps({"messages": MESSAGES, "stream": stream, "max_tokens": 400, "ignore_eos": True}).encode()
    _, writer = await asyncio.open_connection("127.0.0.1", server.port)
    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n"
    writer.write(head.encode() + body)
    await writer.drain()
    try:
        await asyncio.sleep(after_s)
    finally:
        writer.close()


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_stops_the_decoding(stream):
    with EmbeddedServer(ttft_s=0.01, itl_s=0.005) as server:
        asyncio.run(leave(server, stream=stream, after_s=0.2))
        wait_until(lambda: server.log[0].finished_s is not None)
        entry = server.log[0]
        assert entry.outcome == "aborted"
        assert 1 <= entry.tokens < 200
        assert entry.tokens_after_close <= 1
        assert entry.finished_s - entry.closed_s < 0.1
        assert server.metrics()["requests_running"] == 0


@pytest.mark.parametrize("stream", [True, False])
def test_a_server_that_never_stops_reports_what_it_wasted(stream):
    with EmbeddedServer(ttft_s=0.01, itl_s=0.002, abort_delay_s=None) as server:
        asyncio.run(leave(server, stream=stream, after_s=0.2))
        wait_until(lambda: server.log[0].finished_s is not None)
    entry = server.log[0]
    assert (entry.outcome, entry.tokens) == ("aborted", 400)
    assert entry.tokens_after_close > 100


def test_a_delayed_abort_wastes_as_long_as_it_waits():
    with EmbeddedServer(ttft_s=0.01, itl_s=0.005, abort_delay_s=0.3) as server:
        asyncio.run(leave(server, stream=True, after_s=0.1))
        wait_until(lambda: server.log[0].finished_s is not None)
    entry = server.log[0]
    assert entry.outcome == "aborted"
    assert 20 <= entry.tokens_after_close <= 75
    assert entry.finished_s - entry.closed_s >= 0.3


def test_a_request_that_leaves_the_queue_takes_no_slot():
    async def scenario(server):
        first = asyncio.create_task(leave(server, stream=True, after_s=0.5))
        await asyncio.sleep(0.1)
        await leave(server, stream=True, after_s=0.1)
        await asyncio.to_thread(wait_until, lambda: server.log[1].finished_s is not None)
        outcome = server.log[0].outcome
        await first
        return outcome

    with EmbeddedServer(ttft_s=0, itl_s=0.01, n_slots=1) as server:
        assert asyncio.run(scenario(server)) == "running"
        assert (server.log[1].outcome, server.log[1].tokens) == ("aborted", 0)
        wait_until(lambda: server.log[0].finished_s is not None)
        post(server.url, {"messages": MESSAGES})


# --- life of the server ---


def test_stop_leaves_no_thread_and_no_socket_even_with_a_stream_open():
    before = set(threading.enumerate())
    server = EmbeddedServer(itl_s=0.05, abort_delay_s=None).start()

    async def hang():
        task = asyncio.create_task(leave(server, stream=True, after_s=5))
        await asyncio.sleep(0.2)
        await asyncio.to_thread(server.stop)
        task.cancel()

    started = time.monotonic()
    asyncio.run(hang())
    assert time.monotonic() - started < 2
    assert server.log[0].outcome == "aborted"
    server.stop()
    gc.collect()
    left = [t for t in threading.enumerate() if t not in before]
    assert not left
    with pytest.raises(OSError):  # noqa: PT011
        post(server.url, {"messages": MESSAGES}, timeout=1)


def test_it_starts_again_and_works_inside_a_running_loop():
    async def cell():
        async with EmbeddedServer(ttft_s=0, itl_s=0) as server:
            await asyncio.to_thread(post, server.url, {"messages": MESSAGES})
        async with server:
            await asyncio.to_thread(post, server.url, {"messages": MESSAGES})
        return server

    assert [e.outcome for e in asyncio.run(cell()).log] == ["completed", "completed"]


def test_two_servers_have_two_ports_and_a_taken_one_is_named():
    with EmbeddedServer() as one, EmbeddedServer() as two:
        assert one.port != two.port
        with pytest.raises(EndpointError, match=f"cannot bind 127.0.0.1:{one.port}.*another port"):
            EmbeddedServer(port=one.port).start()


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.5", "example.org"])
def test_it_stays_on_loopback_unless_told_otherwise(host):
    with pytest.raises(ConfigError, match=r"no authentication.*allow_remote=True"):
        EmbeddedServer(host=host)
    EmbeddedServer(host=host, allow_remote=True)


def test_settings_out_of_range_are_named():
    with pytest.raises(ConfigError, match="n_slots=0"):
        EmbeddedServer(n_slots=0)
