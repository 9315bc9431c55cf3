"""The emulated cluster over HTTP: its protocol, its prefix cache, and clients that leave, lag or ask too much."""

from __future__ import annotations

import json
import math
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request

import openai
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from revise_lab.errors import ConfigError
from revise_lab.serving.cost import load
from revise_lab.serving.http import BLOCK_TOKENS, ClusterServer, prompt_blocks
from revise_lab.serving.text import hash_text, prompt_text, prompt_tokens

H100 = load("h100-qwen3-14b-sglang")
MESSAGES = [{"role": "user", "content": "plan the trip to Lisbon"}]
LONG = [{"role": "user", "content": "word " * 200}]


# --- prompts and the prefix cache ---


@settings(max_examples=40)
@given(st.lists(st.tuples(st.sampled_from(["user", "system"]), st.text(max_size=60)), min_size=1, max_size=4))
def test_blocks_cover_the_prompt_and_stand_for_all_before_them(parts):
    messages = [{"role": role, "content": text} for role, text in parts]
    blocks = prompt_blocks(messages)
    assert len(blocks) == prompt_tokens(messages) // BLOCK_TOKENS
    longer = prompt_blocks([*messages, *LONG])
    assert longer[: len(blocks)] == blocks
    changed = prompt_blocks([messages[0] | {"content": "x" + messages[0]["content"]}, *messages[1:], *LONG])
    assert not {key for key, _ in changed} & {key for key, _ in longer}
    assert not {key for key, _ in prompt_blocks(messages, "salt")} & {key for key, _ in blocks}
    assert len({key for key, _ in longer}) == len(longer)


def test_a_tenant_meets_its_own_prompts_and_nobody_elses():
    def cached(client, content, **more):
        messages = [*LONG, {"role": "user", "content": content}]
        usage = client.chat.completions.create(model="m", messages=messages, max_tokens=2, **more).usage
        return usage.prompt_tokens_details.cached_tokens

    with ClusterServer(H100, time_scale=0.1) as server, connect(server) as client:
        hit = prompt_tokens([*LONG, {"role": "user", "content": ""}]) // BLOCK_TOKENS * BLOCK_TOKENS
        assert cached(client, "first") == 0
        assert cached(client, "second") == hit
        assert cached(client, "third", user="other") == 0
        assert cached(client, "fourth", extra_headers={"x-tenant": "other"}) == hit
        assert cached(client, "fifth", extra_body={"cache_salt": "mine"}) == 0
        assert [(e.tenant, e.cached_tokens) for e in server.log] == [
            ("", 0),
            ("", hit),
            ("other", 0),
            ("other", hit),
            ("", 0),
        ]
        assert metric(server, "cached_tokens_total") == 2 * hit


# --- the protocol ---


def connect(server):
    return openai.OpenAI(base_url=server.url, api_key="none", max_retries=0, timeout=20)


def page(server, path):
    with urllib.request.urlopen(server.url.removesuffix("/v1") + path, timeout=5) as response:
        return response.read().decode()


def metric(server, name):
    return sum(float(line.split()[-1]) for line in page(server, "/metrics").splitlines() if f":{name}{{" in line)


def until(condition, limit_s=10.0):
    limit = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < limit, "the condition did not come true in time"
        time.sleep(0.005)


def test_stream_and_whole_agree():
    with ClusterServer(H100, time_scale=0.5) as server, connect(server) as client:
        ask = {"model": "m", "messages": MESSAGES, "seed": 3, "max_tokens": 22}
        whole = client.chat.completions.create(**ask)
        chunks = list(client.chat.completions.create(**ask, stream=True, stream_options={"include_usage": True}))
        log = server.log
    text = whole.choices[0].message.content
    assert text == hash_text(prompt_text(MESSAGES), 3, 22)
    parts = [c.choices[0].delta.content for c in chunks if c.choices and c.choices[0].delta.content]
    assert "".join(parts) == text
    assert len(parts) >= 2, "tokens were not sent as they came"
    assert chunks[-2].choices[0].finish_reason == whole.choices[0].finish_reason == "length"
    assert chunks[-1].usage.model_dump() == whole.usage.model_dump()
    assert [(e.status, e.completion_tokens, e.prompt_tokens) for e in log] == [
        ("finished", 22, whole.usage.prompt_tokens)
    ] * 2
    assert chunks[0].id == "chatcmpl-1"


def test_schemas_and_tools_are_answered_in_their_shape():
    parameters = {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}}
    schema = {"type": "json_schema", "json_schema": {"name": "reply", "schema": parameters}}
    tools = [{"type": "function", "function": {"name": "book", "parameters": parameters}}]
    with ClusterServer(H100, time_scale=0.05) as server, connect(server) as client:

        def ask(messages=MESSAGES, **more):
            return client.chat.completions.create(model="m", messages=messages, **more)

        assert set(json.loads(ask(response_format=schema).choices[0].message.content)) == {"city", "days"}
        assert isinstance(json.loads(ask(response_format={"type": "json_object"}).choices[0].message.content), dict)
        choice = ask(tools=tools).choices[0]
        (call,) = choice.message.tool_calls
        assert (choice.finish_reason, choice.message.content, call.function.name) == ("tool_calls", None, "book")
        assert set(json.loads(call.function.arguments)) == {"city", "days"}
        with client.chat.completions.stream(model="m", messages=MESSAGES, tools=tools) as stream:
            for _ in stream:
                pass
            streamed = stream.get_final_completion().choices[0].message.tool_calls[0]
        assert streamed.function.arguments == call.function.arguments
        done = [*MESSAGES, {"role": "tool", "tool_call_id": call.id, "content": "booked"}]
        assert ask(done, tools=tools).choices[0].message.content
        assert ask(tools=tools, tool_choice="none").choices[0].message.content


BAD = [
    ({"max_tokens": 50_000}, "exceeds the available context size"),
    ({"messages": [{"role": "user", "content": "word " * 41_000}]}, "exceeds the available context size"),
    ({"max_tokens": 10**12, "extra_body": {"ignore_eos": True}}, "exceeds the available context size"),
    ({"max_tokens": -1}, "not a chat request"),
    ({"max_tokens": 0}, "not a chat request"),
    ({"max_tokens": None, "max_completion_tokens": 0}, "not a chat request"),
    ({"n": 2}, "n must be 1"),
    ({"messages": []}, "not a chat request"),
    ({"extra_headers": {"x-revise-fault": "cut:3"}}, "STATUS:RETRY_AFTER"),
    *(
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}},
            "not a chat request",
        )
        for schema in (
            {"type": "integer", "minimum": 5, "maximum": 4},
            {"type": "number", "minimum": 10**400},
            {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}},
            {"type": []},
        )
    ),
]


def test_what_cannot_be_served_is_a_400_in_the_shape_of_the_api():
    with ClusterServer(H100) as server, connect(server) as client:
        for more, says in BAD:
            with pytest.raises(openai.BadRequestError, match=says) as caught:
                client.chat.completions.create(**{"model": "m", "messages": MESSAGES} | more)
            assert caught.value.type == "invalid_request_error"
            assert caught.value.code == ("context_length_exceeded" if "context" in says else None)
        assert [(e.code, e.status, e.completion_tokens) for e in server.log] == [(400, "rejected", 0)] * len(BAD)


def test_refusals_on_demand_name_when_to_come_back():
    with ClusterServer(H100) as server, connect(server) as client:
        for status, kind in ((429, openai.RateLimitError), (503, openai.InternalServerError)):
            with pytest.raises(kind) as caught:
                client.chat.completions.create(
                    model="m", messages=MESSAGES, extra_headers={"x-revise-fault": f"{status}:7"}
                )
            assert caught.value.response.headers["retry-after"] == "7"
        assert [(e.code, e.status) for e in server.log] == [(429, "rejected"), (503, "rejected")]
        assert "revise_lab:rejected_total 2\n" in page(server, "/metrics")


def test_half_a_character_leaves_the_log_readable():
    with ClusterServer(H100, time_scale=0.01) as server:
        post(server, {"messages": MESSAGES, "max_tokens": 1, "user": "half: \ud83d"}).close()
        until(lambda: server.log)
        assert json.loads(page(server, "/log"))[0]["tenant"] == "half: \ud83d"


def test_a_digit_that_is_no_number_is_no_status():
    with ClusterServer(H100) as server:
        body = json.dumps({"messages": MESSAGES}).encode()
        asked = urllib.request.Request(f"{server.url}/chat/completions", body, {"x-revise-fault": "\xb2\xb2\xb2"})
        with pytest.raises(urllib.error.HTTPError) as caught, urllib.request.urlopen(asked):
            pass
        with caught.value as refused:
            assert refused.code == 400
        assert [e.status for e in server.log] == ["rejected"]


def test_shares_of_refusals_repeat_with_the_seed():
    def refused(seed):
        with ClusterServer(H100, time_scale=0.001, fail={429: 0.3, 503: 0.2}, seed=seed) as server:
            for _ in range(40):
                post(server, {"messages": MESSAGES, "max_tokens": 1}).close()
            until(lambda: all(e.status != "open" for e in server.log) and len(server.log) == 40)
            return [e.code for e in server.log]

    first = refused(1)
    assert first == refused(1) != refused(2)
    assert 4 <= first.count(429) <= 20
    assert 2 <= first.count(503) <= 16


def test_pages_and_the_log_file_say_how_it_stands(tmp_path):
    path = tmp_path / "calls.jsonl"
    with ClusterServer(H100, 2, time_scale=0.01, log_path=path) as server, connect(server) as client:
        client.chat.completions.create(
            model="m",
            messages=MESSAGES,
            max_tokens=5,
            extra_headers={"x-client-request-id": "mine", "x-revise-node": "a%20b"},
        )
        assert "emulated" in client.models.list().data[0].owned_by
        assert json.loads(page(server, "/health")) == {"status": "ok", "emulated": True, "profile": H100.name}
        shown = page(server, "/metrics")
        (row,) = json.loads(page(server, "/log"))
    assert shown.startswith("# emulated, no real model")
    assert 'sglang:num_running_reqs{model_name="emulated-qwen3-14b",replica="1"} 0\n' in shown
    assert 'sglang:generation_tokens_total{model_name="emulated-qwen3-14b",replica="0"} 5\n' in shown
    assert re.search(r"worst_late_seconds \d", shown)
    assert [json.loads(line) for line in path.read_text().splitlines()] == [row]
    assert (row["client_id"], row["node"], row["status"], row["completion_tokens"]) == ("mine", "a b", "finished", 5)
    assert "Lisbon" not in path.read_text()
    with pytest.raises(ConfigError, match=r"calls.jsonl cannot be written \(File exists\); name a new file"):
        ClusterServer(H100, log_path=path).start()


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"host": "0.0.0.0"}, "not loopback"),
        ({"n_replicas": 0}, "n_replicas=0"),
        ({"port": 70_000}, "port=70000 is out of range"),
        ({"time_scale": 0}, "time_scale=0"),
        ({"fail": {200: 0.5}}, "statuses of errors"),
        ({"fail": {429: 0.7, 503: 0.7}}, "sum to at most 1"),
    ],
)
def test_settings_out_of_range_are_named(options, says):
    with pytest.raises(ConfigError, match=says):
        ClusterServer(H100, **options)


# --- clients that leave or lag ---


def post(server, body, *, receive_bytes=None):
    """Send a request over a bare socket and return it."""
    raw = json.dumps(body).encode()
    client = socket.socket()
    if receive_bytes:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
    client.settimeout(20)
    client.connect(("127.0.0.1", server.port))
    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: {len(raw)}\r\n\r\n"
    client.sendall(head.encode() + raw)
    return client


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("delay_s", [0.0, 2.0, None])
def test_a_closed_connection_frees_its_slot_within_the_delay_of_the_profile(delay_s, stream, capsys):
    scale, n = 0.2, 300 if delay_s is None else 5000
    with ClusterServer(H100.with_(abort_delay_s=delay_s), time_scale=scale) as server:
        client = post(server, {"messages": MESSAGES, "stream": stream, "max_tokens": n, "ignore_eos": True})
        until(lambda: server.log and server.log[0].first_s is not None)
        assert metric(server, "num_running_reqs") == 1
        time.sleep(0.1)
        client.close()
        closed = time.monotonic()
        until(lambda: metric(server, "num_running_reqs") == 0)
        freed_s = time.monotonic() - closed
        (entry,) = server.log
    assert entry.status == "aborted"
    after_s, step_s = entry.ended_s - entry.left_s, 0.0125
    if delay_s is None:
        assert entry.completion_tokens == n
        assert after_s > 2.0
    else:
        assert delay_s <= after_s <= delay_s + 2 * step_s
        assert entry.completion_tokens < n
        assert entry.completion_tokens - entry.tokens_when_left == pytest.approx(delay_s / 0.0113, abs=3)
    assert freed_s < after_s * scale + 1.0
    with capsys.disabled():
        print(
            f"\nslot freed {freed_s:.3f} s after the close ({after_s:.3f} emulated s x {scale}), delay {delay_s}",
            end="",
        )


def test_a_client_that_leaves_the_queue_never_decodes():
    with ClusterServer(H100.with_(max_running=1), time_scale=0.5) as server:
        first = post(server, {"messages": MESSAGES, "stream": True, "max_tokens": 300, "ignore_eos": True})
        until(lambda: server.log and server.log[0].first_s is not None)
        second = post(server, {"messages": MESSAGES, "stream": True, "max_tokens": 300, "ignore_eos": True})
        until(lambda: metric(server, "num_queue_reqs") == 1)
        second.close()
        until(lambda: metric(server, "num_queue_reqs") == 0)
        log = server.log
        assert (log[0].status, log[1].status, log[1].first_s, log[1].completion_tokens) == ("open", "aborted", None, 0)
        first.close()


def test_a_slow_reader_costs_nobody_and_gets_all_of_it_in_larger_chunks():
    n = 12_000
    body = {"messages": MESSAGES, "stream": True, "max_tokens": n, "ignore_eos": True}
    with ClusterServer(H100, time_scale=0.01) as server, connect(server) as client:
        slow = post(server, body, receive_bytes=4096)
        until(lambda: server.log and server.log[0].first_s is not None)
        started = time.monotonic()
        quick = client.chat.completions.create(model="m", messages=LONG, max_tokens=40)
        assert time.monotonic() - started < 3
        assert quick.usage.completion_tokens == 40
        until(lambda: server.log[0].status == "finished")
        raw = b"".join(iter(lambda: slow.recv(65_536), b""))
        slow.close()
        assert server.log[0].completion_tokens == n
    events = re.findall(rb"data: (\{.*\})\n", raw)
    texts = [json.loads(e)["choices"][0]["delta"].get("content", "") for e in events]
    assert len("".join(texts).split()) == n
    assert max(len(text.split()) for text in texts) > 1000, "chunks were kept for a reader that did not read"


def test_stopping_the_server_closes_the_log_of_calls_that_are_open(tmp_path):
    path = tmp_path / "calls.jsonl"
    with ClusterServer(H100, log_path=path) as server:
        client = post(server, {"messages": MESSAGES, "stream": True, "max_tokens": 5000, "ignore_eos": True})
        until(lambda: server.log and server.log[0].first_s is not None)
    client.close()
    (row,) = map(json.loads, path.read_text().splitlines())
    assert row["status"] == "aborted"
    assert 1 <= row["completion_tokens"] < 5000
    assert server.log[0].ended_s == row["ended_s"]


def test_a_body_that_never_comes_is_no_call():
    with ClusterServer(H100) as server, connect(server) as client:
        half = socket.create_connection(("127.0.0.1", server.port))
        half.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n{")
        half.close()
        client.chat.completions.create(model="m", messages=MESSAGES, max_tokens=1)
        assert [e.status for e in server.log] == ["finished"]


# --- the command ---


@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)])
def test_the_command_serves_until_it_is_interrupted(number, tmp_path):
    path = tmp_path / "calls.jsonl"
    command = [sys.executable, "-m", "revise_lab.lab.cli", "serve", "--time-scale", "0.1", "--log", str(path)]
    command += ["--abort-delay", "never", "--fail", "503:0.0", "--scheduler", "fair", "--replicas", "2"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as child:
        url = child.stdout.readline().strip()
        assert "emulated, not a real model" in child.stdout.readline()
        with openai.OpenAI(base_url=url, api_key="none", max_retries=0) as client:
            assert (
                client.chat.completions.create(model="m", messages=MESSAGES, max_tokens=3).usage.completion_tokens == 3
            )
        child.send_signal(number)
        _, said = child.communicate(timeout=20)
    assert child.returncode == 0
    assert "1 finished, 0 aborted, 0 rejected" in said
    assert json.loads(path.read_text())["status"] == "finished"
    assert math.isfinite(json.loads(path.read_text())["ended_s"])
