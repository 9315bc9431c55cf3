"""Calibration: the emulator's own parameters are found again, in virtual time and over HTTP, and no more is claimed."""

from __future__ import annotations

import json
import math
import signal
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
import pytest

from revise_lab.errors import ConfigError
from revise_lab.lab.calibrate import conclude, read
from revise_lab.lab.cli import main
from revise_lab.serving.calibrate import PARAMETERS, calibrate
from revise_lab.serving.cost import load
from revise_lab.serving.engine import Cluster
from revise_lab.serving.probes import (
    CLOSED_AFTER_CHUNKS,
    Probe,
    Seen,
    Stream,
    abort_delay,
    interference,
    plan,
    prefix_saving,
    step_rows,
    together,
)
from revise_lab.serving.requests import Request
from revise_lab.serving.server import MODEL, EmbeddedServer

H100 = load("h100-qwen3-14b-sglang")
TRUTH = H100.with_(host_s=0.002, compute_efficiency=0.5, kv_efficiency=0.8, attention_efficiency=1.0, overlap=1.6)
REQUEST_S = 0.004
EVERY_S = 0.001
FITTED_KINDS = ("idle", "decode", "batch")


class VirtualClient:
    """The probes against the pure cluster: chunks of four tokens, seen once a millisecond; each time is noisy."""

    def __init__(self, profile=TRUTH, noise=0.0, request_s=0.0, tokens=4, every_s=EVERY_S, **options):
        self.cluster, self.tokens, self.noise, self.request_s = Cluster(profile, **options), tokens, noise, request_s
        self.every_s = every_s
        self.now_s, self.n_probes = 0.0, 0
        self.rng = np.random.default_rng(5)

    def measure(self, probe):
        n, n_early = len(probe.prompts), len(probe.prompts) - probe.n_late
        served, sent_s, had, chunks = {}, {}, [0] * n, [[] for _ in range(n)]
        closed_s = freed_s = None
        self.n_probes += 1

        def send(numbers):
            for i in numbers:
                key = probe.prompt or f"{self.n_probes}.{i}"
                prefix = ((key, probe.prompts[i] - 1),)
                request = Request((self.n_probes, i), probe.prompts[i], probe.outputs[i], probe.tenant, prefix)
                served[i], sent_s[i] = self.cluster.submit(self.now_s, request), self.now_s - self.request_s

        send(range(n_early))
        while self.cluster.next_event_time() < math.inf or len(served) < n:
            self.now_s = min(self.cluster.next_event_time(), self.now_s + self.every_s)
            events = self.cluster.advance(self.now_s)
            over = {event.served.request.id[1] for event in events if event.is_end}
            if any(event.kind == "aborted" for event in events):
                freed_s = self.now_s
            for i, each in served.items():
                if each.left_s is not None or (each.ended_s is not None and i not in over):
                    continue
                done = each.decoded_tokens if i in over else self.cluster.tokens_at((self.n_probes, i), self.now_s)
                if done and (not had[i] or done - had[i] >= self.tokens or (i in over and done > had[i])):
                    had[i] = done
                    chunks[i].append(self.now_s)
            if all(len(chunks[i]) >= CLOSED_AFTER_CHUNKS for i in range(n_early)):
                send(range(len(served), n))
                for i in range(n - probe.n_closed, n):
                    if served[i].left_s is None and self.cluster.abort(self.now_s, (self.n_probes, i)):
                        closed_s = self.now_s
        by = math.exp(self.noise * self.rng.standard_normal())
        streams = tuple(
            Stream(
                sent_s[i] * by,
                tuple(at_s * by for at_s in chunks[i]),
                probe.prompts[i],
                0 if each.left_s is not None else each.decoded_tokens,
                each.cached_tokens,
            )
            for i, each in sorted(served.items())
        )
        self.now_s += 1.0
        return Seen(probe, streams, closed_s and closed_s * by, freed_s and freed_s * by)


def rows_of(seen):
    fitted = step_rows(each for each in seen if each.probe.kind in FITTED_KINDS)
    return fitted, step_rows(each for each in seen if each.probe.kind == "mixed")


@pytest.fixture(scope="module")
def seen():
    client = VirtualClient(noise=0.01, request_s=REQUEST_S)
    return [client.measure(probe) for probe in plan()]


@pytest.fixture(scope="module")
def found(seen):
    return calibrate(*rows_of(seen), H100)


def test_the_parameters_of_the_emulator_are_found_again(seen, found, capsys):
    n = sum(len(each.probe.prompts) for each in seen)
    with capsys.disabled():
        print(f"\nvirtual time, 1 % noise, {n} requests, held-out error {found.held_out_mape:.2%}")
        for name in PARAMETERS:
            low, high = found.profile.bands.get(name, (math.nan, math.nan))
            print(f"  {name:<21} true {getattr(TRUTH, name):.4g}  fitted {getattr(found.profile, name):.4g}"
                  f"  [{low:.4g}, {high:.4g}]  {found.profile.sources[name]}")  # fmt: skip
        print(f"  outside of it         true {REQUEST_S:.4g}  fitted {found.request_s:.4g}")
        print("  " + "\n  ".join(found.warnings))
    assert set(found.fitted) >= {"host_s", "compute_efficiency", "kv_efficiency", "overlap", "request_s"}
    assert found.profile.weights_efficiency == H100.weights_efficiency
    for name in found.fitted:
        if name != "request_s":
            low, high = found.profile.bands[name]
            assert low <= getattr(TRUTH, name) <= high, name
            assert found.profile.sources[name] == "measured"
    assert found.request_s == pytest.approx(REQUEST_S, rel=0.25)
    assert found.held_out_mape < 0.02


def test_what_cannot_be_told_apart_is_said_and_its_sum_is_right():
    truth = TRUTH.with_(weights_efficiency=0.6)
    client = VirtualClient(truth, noise=0.01)
    found = calibrate(*rows_of([client.measure(probe) for probe in plan(requests=90)]), H100, draws=20)
    assert any("host_s and weights_efficiency cannot be told apart" in each for each in found.warnings)
    assert not {"host_s", "weights_efficiency"} <= set(found.fitted)

    def constant_s(profile):
        weights = 2 * (profile.body_parameters + profile.head_parameters)
        return profile.host_s + weights / (profile.weights_efficiency * profile.memory_bytes_per_s)

    assert constant_s(found.profile) == pytest.approx(constant_s(truth), rel=0.03)
    assert found.held_out_mape < 0.02


def test_a_base_for_another_device_is_scaled_and_said_to_be():
    slow = TRUTH.with_(memory_bytes_per_s=2e11, flops_per_s=2e13, kv_capacity_tokens=100_000)
    client = VirtualClient(slow, noise=0.01, every_s=0.02)
    found = calibrate(*rows_of([client.measure(probe) for probe in plan(2048, 8)]), H100, draws=20)
    assert "something else" in found.warnings[0]
    assert found.held_out_mape < 0.05
    kept = set(PARAMETERS) - set(found.fitted)
    assert all(found.profile.sources[name] == "assumed" for name in kept if name not in ("overlap", "host_s"))


@pytest.mark.parametrize(
    ("context", "slots", "requests"), [(8704, 64, None), (8704, 64, 60), (512, 4, 40), (256, 1, 20)]
)
def test_a_plan_keeps_its_limits_and_holds_requests_out(context, slots, requests):
    probes = plan(context, slots, requests)
    assert sum(len(each.prompts) for each in probes) <= (requests or 205)
    assert max(len(each.prompts) for each in probes) <= max(slots, 1 + min(8, slots - 1))
    assert all(a + b <= context for each in probes for a, b in zip(each.prompts, each.outputs, strict=True))
    held = [each for each in probes if each.kind == "mixed"]
    assert held == [each for each in plan(context, slots, requests) if each.kind == "mixed"]
    assert held != [each for each in plan(context, slots, requests, seed=1) if each.kind == "mixed"]
    assert len(held) / sum(each.kind in (*FITTED_KINDS, "mixed") for each in probes) >= 0.15


def test_a_plan_without_room_is_refused():
    with pytest.raises(ConfigError, match="max_context=128"):
        plan(128)
    with pytest.raises(ConfigError, match="requests=5 leaves none to hold out"):
        plan(requests=5)


def test_a_pace_does_not_depend_on_how_tokens_are_packed():
    paces = {
        tokens: together(VirtualClient(tokens=tokens).measure(Probe("batch", (512,) * 8, (100,) * 8)).streams)
        for tokens in (1, 4, 7)
    }
    for row in paces.values():
        assert row.seconds == pytest.approx(paces[1].seconds, rel=0.02)
        assert row.contexts_sum == pytest.approx(paces[1].contexts_sum, rel=0.01)


def test_streams_that_were_never_all_live_give_no_row():
    early, late = (Stream(0.0, tuple(at_s + 0.1 * i for i in range(20)), 100, 20) for at_s in (1.0, 9.0))
    assert together([early, early]) is not None
    assert together([early, late]) is None
    assert together([early._replace(completion_tokens=4)]) is None


def test_prompts_that_go_first_are_told_from_mixed_ones():
    probe = Probe("interference", (128,) * 4 + (8192,), (128,) * 4 + (2,), n_late=1)
    for options, verdict in (({}, "prefill first"), ({"chunk_tokens": 512}, "mixed")):
        assert interference(VirtualClient(**options).measure(probe))[0] == verdict


@pytest.mark.parametrize("delay_s", [0.0, 0.7, None])
def test_how_long_a_closed_stream_goes_on_is_seen(delay_s):
    probe = Probe("abort", (4096,) * 9, (400,) + (200,) * 8, n_closed=8)
    seen = VirtualClient(TRUTH.with_(abort_delay_s=delay_s)).measure(probe)
    by_asking, how = abort_delay(seen)
    assert how == "asked the server"
    by_pace, how = abort_delay(seen._replace(freed_s=None))
    assert how == "pace of the stream that stayed"
    for value in (by_asking, by_pace):
        assert value is None if delay_s is None else value == pytest.approx(delay_s, abs=0.08)


def test_a_delay_that_shows_nowhere_is_not_made_up():
    seen = VirtualClient().measure(Probe("abort", (128,) * 3, (200,) * 3, n_closed=2))
    assert abort_delay(seen._replace(freed_s=None)) is None


def test_a_prefix_saves_time_for_its_tenant_only(seen):
    saving = prefix_saving([each for each in seen if each.probe.kind == "prefix"])
    assert saving["cached_tokens"] == [0, 4095, 0]
    first, again, other = saving["first_text_s"]
    assert again < 0.2 * first
    assert other == pytest.approx(first, rel=0.1)
    assert not saving["shared_between_tenants"]


SERVER = {"kind": "sglang 0.5.14", "emulated": False, "round_trip_s": 0.0002, "slots": 64} | {
    "kv_capacity_tokens": None,
    "context_tokens": 40960,
}


def raw_file(path, seen, **server):
    head = {"model": "qwen", "date": "2026-01-02T03:04:05+00:00", "flags": "--tp 1", "server": SERVER | server}
    lines = [head | {"context": 8704}, *({"seen": each} for each in seen)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_a_raw_file_gives_a_profile_that_says_where_it_comes_from(seen, tmp_path, capsys):
    raw = raw_file(tmp_path / "raw.jsonl", seen)
    assert main(["calibrate", "--raw", str(raw), "--out", str(tmp_path / "mine.json")]) == 0
    assert "calibrated (qwen-2026-01-02)" in capsys.readouterr().out
    profile = load(str(tmp_path / "mine.json"))
    assert profile.label == "calibrated (qwen-2026-01-02)"
    assert profile.measurement["flags"] == "--tp 1"
    assert profile.measurement["server"]["kind"] == "sglang 0.5.14"
    assert profile.measurement["held_out_mape"] < 0.02
    sources = {name: profile.sources[name] for name in ("host_s", "max_running", "kv_capacity_tokens", "abort_delay_s")}
    assert list(sources.values()) == ["measured", "specified", "assumed", "measured"]
    assert profile.context_tokens == 40960
    assert set(profile.bands) == {*profile.measurement["fitted"], "kv_capacity_tokens", "reserve_share"} - {"request_s"}
    assert profile.with_(host_s=0.0).label.startswith("emulated")
    assert profile.with_(max_running=8).calibrated
    derived = tmp_path / "derived.json"
    change = {"base": str(tmp_path / "mine.json"), "host_s": {"value": 0.001, "source": "assumed"}}
    derived.write_text(json.dumps(change))
    assert not load(str(derived)).calibrated
    derived.write_text(json.dumps(json.loads((tmp_path / "mine.json").read_text()) | {"measurement": {}}))
    with pytest.raises(ConfigError, match="calibrated without a measurement"):
        load(str(derived))


def test_a_profile_that_misses_what_was_held_out_is_not_called_calibrated(seen, tmp_path, capsys):
    def slowed(each):
        return each._replace(chunk_s=tuple(each.sent_s + 1.4 * (at_s - each.sent_s) for at_s in each.chunk_s))

    off = [
        each._replace(streams=tuple(map(slowed, each.streams))) if each.probe.kind == "mixed" else each for each in seen
    ]
    raw = raw_file(tmp_path / "raw.jsonl", off)
    assert main(["calibrate", "--raw", str(raw), "--out", str(tmp_path / "mine.json")]) == 1
    said = capsys.readouterr().out
    profile = load(str(tmp_path / "mine.json"))
    assert profile.label.startswith("emulated")
    (reason,) = profile.measurement["not_calibrated"]
    assert "held-out error" in reason
    assert f"NOT calibrated: {reason}" in said


@pytest.mark.parametrize(
    ("server", "reason"), [({"round_trip_s": 0.03}, "half a token"), ({"emulated": True}, "emulation")]
)
def test_a_server_that_is_far_or_emulated_is_not_called_calibrated(seen, tmp_path, server, reason):
    result, reasons = conclude(*read(raw_file(tmp_path / "raw.jsonl", seen, **server)), H100, draws=5)
    assert len(reasons) == 1
    assert reason in reasons[0]
    assert not result.profile.calibrated


def test_a_batch_that_never_ran_together_is_named(seen, tmp_path):
    def apart(streams):
        return tuple(s._replace(chunk_s=tuple(at_s + 100 * i for at_s in s.chunk_s)) for i, s in enumerate(streams))

    off = [each._replace(streams=apart(each.streams)) if len(each.streams) == 64 else each for each in seen]
    result, _ = conclude(*read(raw_file(tmp_path / "raw.jsonl", off)), H100, draws=5)
    assert any("batch x64" in each and "never all live at once" in each for each in result.warnings)


@contextmanager
def answering(reply):
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_error(404)

        def do_POST(self):
            self.rfile.read(int(self.headers["content-length"]))
            self.send_response(200)
            self.send_header("content-type", "text/event-stream")
            self.end_headers()
            self.wfile.write("".join(f"data: {each}\n\n" for each in (*map(json.dumps, reply), "[DONE]")).encode())

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/v1"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_a_server_that_cannot_be_measured_is_an_error_with_a_remedy(tmp_path, capsys):
    def run(url, model=MODEL):
        code = main(["calibrate", "--base-url", url, "--model", model, "--out", str(tmp_path / "x.json")])
        return code, capsys.readouterr().err

    code, said = run("http://127.0.0.1:9/v1")
    assert code == 1
    assert "start the server" in said
    with EmbeddedServer() as server:
        code, said = run(server.url, "nobody")
    assert code == 2
    assert f"it has {MODEL}" in said
    text = {"index": 0, "delta": {"content": "yes"}, "finish_reason": None}
    with answering([{"choices": [text]}, {"choices": [text | {"delta": {}, "finish_reason": "stop"}]}]) as url:
        code, said = run(url)
    assert code == 1
    assert "include_usage" in said
    assert main(["calibrate"]) == 2
    assert main(["calibrate", "--raw", str(tmp_path / "none.jsonl"), "--out", str(tmp_path / "x.json")]) == 2
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_an_interrupt_keeps_what_was_measured(tmp_path):
    raw = tmp_path / "x.jsonl"
    with EmbeddedServer(ttft_s=0.01, itl_s=0.002) as server:
        command = ["calibrate", "--base-url", server.url, "--model", MODEL, "--out", str(tmp_path / "x.json")]
        child = subprocess.Popen(
            [sys.executable, "-m", "revise_lab.lab.cli", *command],
            stderr=subprocess.PIPE,
            text=True,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # background jobs of a shell ignore it
        )
        limit_s = time.monotonic() + 30
        while not raw.is_file() or len(raw.read_text().splitlines()) < 4:
            assert time.monotonic() < limit_s
            time.sleep(0.02)
        child.send_signal(signal.SIGINT)
        _, said = child.communicate(timeout=20)
    assert child.returncode == 130
    assert f"--raw {raw}" in said
    assert "s left" in said
    about, seen = read(raw)
    assert about["server"]["emulated"]
    assert [each.probe.kind for each in seen][:3] == ["idle"] * 3
    assert not (tmp_path / "x.json").exists()


@pytest.mark.slow
def test_the_parameters_are_found_again_over_http(tmp_path, capsys):
    http = pytest.importorskip("revise_lab.serving.http")
    truth = TRUTH.with_(host_s=0.008, kv_efficiency=0.2, abort_delay_s=0.4)
    out = tmp_path / "found.json"
    with http.ClusterServer(truth, 1) as server:
        command = ["calibrate", "--base-url", server.url, "--model", MODEL, "--out", str(out), "--max-context", "2560"]
        assert main([*command, "--slots", "16", "--requests", "80"]) == 1
    profile = load(str(out))
    with capsys.disabled():
        print(f"\nover HTTP: {capsys.readouterr().out}")
    assert profile.measurement["not_calibrated"][-1] == "the server is an emulation"
    assert profile.host_s == pytest.approx(truth.host_s, rel=0.15)
    assert profile.kv_efficiency == pytest.approx(truth.kv_efficiency, rel=0.25)
    assert profile.abort_delay_s == pytest.approx(truth.abort_delay_s, abs=0.25)
    result, _ = conclude(*read(out.with_suffix(".jsonl")), H100, draws=5)
    assert np.mean(np.abs(result.errors["decode"])) < 0.05
