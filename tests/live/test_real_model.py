"""The client against a real model on the real llama-server; skipped where they are not installed (see REMEDY)."""

from __future__ import annotations

import asyncio
import statistics
import time

import pytest

from revise_lab.errors import ConfigError, EndpointError
from revise_lab.runtime.endpoint import ContextOverflow, ModelRequest, connect
from revise_lab.runtime.local_server import REMEDY, LocalServer, is_available

pytestmark = [
    pytest.mark.live,
    pytest.mark.skipif(not is_available(), reason=f"the local model is not installed: {REMEDY}"),
]

# Generous: the decoding threads share the machine with whatever else runs. Quiet machines need under 0.1 s.
FREED_WITHIN_S = 3.0
AFTER_CLOSE_TOKENS = 64
LONG = {"max_tokens": 1500, "extra": {"ignore_eos": True}}


@pytest.fixture(scope="module")
def server():
    with LocalServer(n_parallel=2, n_threads=2, ctx=2048) as started:
        yield started


def drive(server, scenario, **options):
    async def run():
        async with connect(server.url, model=server.model, **options) as model:
            return await scenario(model)

    return asyncio.run(run())


async def freed(server, started, limit_s=FREED_WITHIN_S):
    """Wait until no slot decodes; gives the seconds since ``started``."""
    while await asyncio.to_thread(server.busy):
        assert time.perf_counter() - started < limit_s, f"a slot still decodes {limit_s} s after its stream was closed"
        await asyncio.sleep(0.005)
    return time.perf_counter() - started


def test_a_stream_is_complete_and_counted_by_the_server(server):
    before = server.metrics()["tokens_predicted_total"]
    pieces = []
    request = ModelRequest(prompt="Name three rivers of Portugal.", max_tokens=24, seed=1)
    reply = drive(server, lambda model: model.complete(request, on_token=pieces.append))
    assert reply.text
    assert "".join(pieces).strip() == reply.text.strip()
    assert reply.finish_reason in ("stop", "length")
    assert reply.usage.source == "exact"
    assert 1 <= reply.usage.completion_tokens <= 24
    assert reply.usage.prompt_tokens >= 5
    assert server.metrics()["tokens_predicted_total"] - before == reply.usage.completion_tokens


def test_an_aborted_stream_frees_its_slot(server):
    async def abort_one(model, number):
        before = server.metrics()["tokens_predicted_total"]
        seen, enough = [], asyncio.Event()

        def on_token(text):
            seen.append(text)
            if len(seen) == 10:
                enough.set()

        request = ModelRequest(prompt=f"Story {number}: once upon a time", seed=number, **LONG)
        task = asyncio.create_task(model.complete(request, on_token=on_token))
        await asyncio.wait_for(enough.wait(), 60)
        assert await asyncio.to_thread(server.busy) == 1
        cancelled = time.perf_counter()
        task.cancel()
        await asyncio.wait([task])
        assert task.cancelled()
        wall_s = await freed(server, cancelled)
        decoded = server.metrics()["tokens_predicted_total"] - before
        return wall_s, decoded, len(seen), model.calls[-1]

    async def scenario(model):
        return [await abort_one(model, number) for number in range(5)]

    rows = drive(server, scenario)
    walls = [row[0] for row in rows]
    wasted = [decoded - seen for _, decoded, seen, _ in rows]
    print(f"\nslot freed after s: {[round(w, 3) for w in walls]} (median {statistics.median(walls):.3f})")
    print(f"tokens decoded after the last one handed on: {wasted}")
    for _, decoded, seen, call in rows:
        assert (call.outcome, call.usage.source) == ("aborted", "estimated")
        assert seen <= decoded <= seen + AFTER_CLOSE_TOKENS
        assert seen <= call.usage.completion_tokens < LONG["max_tokens"]


def test_aborting_one_of_two_streams_leaves_the_other_alone(server):
    async def scenario(model):
        started = asyncio.Event()
        gone = asyncio.create_task(
            model.complete(ModelRequest(prompt="Count upwards", **LONG), on_token=lambda _: started.set())
        )
        kept = asyncio.create_task(
            model.complete(ModelRequest(prompt="Count downwards", max_tokens=60, extra={"ignore_eos": True}))
        )
        await asyncio.wait_for(started.wait(), 60)
        gone.cancel()
        reply = await asyncio.wait_for(kept, 120)
        await freed(server, time.perf_counter())
        return reply

    reply = drive(server, scenario)
    assert (reply.usage.completion_tokens, reply.finish_reason) == (60, "length")


def test_a_json_schema_is_obeyed(server):
    schema = {
        "type": "object",
        "properties": {"route": {"enum": ["air", "rail"]}, "legs": {"type": "integer"}},
        "required": ["route", "legs"],
        "additionalProperties": False,
    }
    request = ModelRequest(prompt="Plan a trip to Porto. Answer in JSON.", json_schema=schema, max_tokens=60, seed=3)
    value = drive(server, lambda model: model.complete(request)).json
    assert set(value) == {"route", "legs"}
    assert value["route"] in ("air", "rail")
    assert isinstance(value["legs"], int)


def test_a_prompt_beyond_the_context_is_told_as_such(server):
    with pytest.raises(ContextOverflow, match="shorten the prompt"):
        drive(server, lambda model: model.complete(ModelRequest(prompt="river " * 4000, max_tokens=8)))


def test_the_model_is_discovered_and_the_process_ends():
    with LocalServer(n_parallel=1, n_threads=1, ctx=512) as started:
        child = started._child

        async def run():
            async with connect(started.url) as model:
                return model.model

        assert asyncio.run(run()) == started.model
    assert child.poll() is not None
    started.stop()


def test_a_file_that_is_no_model_is_named(tmp_path):
    path = tmp_path / "broken.gguf"
    path.write_bytes(b"GGUF, but not really")
    with pytest.raises(EndpointError, match=r"did not come up with broken\.gguf.*"):
        LocalServer(path).start()
    with pytest.raises(ConfigError, match="pip install xllamacpp"):
        LocalServer(tmp_path / "absent.gguf")
