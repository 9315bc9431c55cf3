"""The calibration of a real small model on the real llama-server: shapes and lifecycle, not accuracy."""

from __future__ import annotations

import json

import pytest

from revise_lab.lab.cli import main
from revise_lab.runtime.local_server import REMEDY, LocalServer, is_available
from revise_lab.serving.calibrate import PARAMETERS
from revise_lab.serving.cost import load

pytestmark = [
    pytest.mark.live,
    pytest.mark.timeout(400),
    pytest.mark.skipif(not is_available(), reason=f"the local model is not installed: {REMEDY}"),
]
CONTEXT, SLOTS, REQUESTS = 512, 4, 40
SMOLLM2 = {
    "memory_bytes_per_s": 2e10,
    "flops_per_s": 1e11,
    "body_parameters": 106e6,
    "head_parameters": 28.3e6,
    "kv_bytes_per_token": 2 * 30 * 3 * 64 * 2,
    "pair_flops": 4 * 30 * 9 * 64,
}


def test_a_real_model_is_measured_and_only_called_calibrated_if_it_is(tmp_path, capsys):
    load("h100-qwen3-14b-sglang").with_("specified", name="cpu-smollm2", **SMOLLM2).save(tmp_path / "cpu.json")
    out = tmp_path / "found.json"
    # One thread: with two, neighbours on this machine stall both.
    with LocalServer(n_parallel=SLOTS, n_threads=1, ctx=CONTEXT) as server:
        command = ["calibrate", "--base-url", server.url, "--model", server.model, "--out", str(out)]
        limits = ["--max-context", "256", "--requests", str(REQUESTS)]
        code = main([*command, "--profile", str(tmp_path / "cpu.json"), *limits])
        assert server.busy() == 0
    shown = capsys.readouterr()
    with capsys.disabled():
        print(f"\n{shown.out}exit code {code}")

    profile = load(str(out))
    about = profile.measurement
    assert (code == 0) == profile.calibrated == (not about["not_calibrated"])
    assert profile.calibrated or about["held_out_mape"] > 0.15 or "half a token" in about["not_calibrated"][0]
    assert profile.label.split()[0] == ("calibrated" if profile.calibrated else "emulated")
    assert about["server"]["kind"].startswith("llamacpp")
    assert about["server"]["slots"] == profile.max_running == SLOTS
    assert profile.kv_capacity_tokens == SLOTS * CONTEXT
    assert profile.sources["kv_capacity_tokens"] == "specified"
    assert {profile.sources[name] for name in about["fitted"] if name in PARAMETERS} <= {"measured"}
    assert profile.sources["abort_delay_s"] == "measured"
    assert profile.abort_delay_s is not None
    assert profile.abort_delay_s < 3.0
    assert about["abort"] == "asked the server"
    # The same prompt again is in the cache, all but its end.
    first, again, _ = about["prefix"]["cached_tokens"]
    assert first < again >= about["prefix"]["prompt_tokens"] - 8

    head, *rows = [json.loads(line) for line in out.with_suffix(".jsonl").read_text().splitlines()]
    assert head["model"] == server.model
    assert all("seen" in row for row in rows), [row for row in rows if "seen" not in row]
    n_sent = 0
    for row in rows:
        (kind, prompts, outputs, *_), streams, closed_s, _ = row["seen"]
        n_sent += len(streams)
        for asked, n_out, (sent_s, chunk_s, prompt_tokens, completion_tokens, _) in zip(
            prompts, outputs, streams, strict=True
        ):
            assert abs(prompt_tokens - asked) <= 8
            assert completion_tokens == n_out or (kind == "abort" and completion_tokens == 0)
            assert [sent_s, *chunk_s] == sorted([sent_s, *chunk_s])
            assert chunk_s
        assert (closed_s is not None) == (kind == "abort")
    assert n_sent <= REQUESTS
    assert f"[{len(rows)}/{len(rows)}]" in shown.err
