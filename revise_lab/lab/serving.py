"""The commands around serving: an emulated cluster behind an HTTP endpoint."""

from __future__ import annotations

import argparse
import contextlib
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

_SERVE = """\
examples:
  revise-lab serve                                             four replicas, as fast as the profile says
  revise-lab serve --port 8000 --time-scale 2                  a fixed port, everything twice as slow
  revise-lab serve --abort-delay never --log calls.jsonl       a server that ignores clients that leave
  revise-lab serve --fail 429:0.05 --fail 503:0.01 --seed 1    5 % and 1 % of the calls are refused

then, with the base URL that it prints:
  curl -N URL/chat/completions -H 'content-type: application/json' \\
    -d '{"stream": true, "max_tokens": 40, "messages": [{"role": "user", "content": "plan a trip"}]}'
  revise-lab reproduce revise_langgraph --endpoint URL

The words are a hash of prompt and seed, the times come from the profile: no model runs. /metrics, /health and /log tell
how it stands. A header x-revise-fault: 429:2 refuses one call; x-tenant or the field user names the tenant, whose
prompts share a prefix cache. Ctrl-C ends it with exit code 0; calls that are open then are logged as aborted.
"""


def add_commands(command: Callable[..., Any]) -> None:
    """Add the command to a command line."""
    text = "serve an emulated Qwen3-14B cluster over an OpenAI-compatible HTTP endpoint"
    serve = command("serve", _serve, text, _SERVE)
    serve.options(
        profile=("h100-qwen3-14b-sglang", "NAME", "name, or path of a .json file (default: h100-qwen3-14b-sglang)"),
        replicas=(4, "N", "how many (default: 4)"),
        scheduler=("fcfs", ("fcfs", "fair"), "who is next (default: fcfs)"),
        routing=("least_loaded", ("least_loaded", "pinned"),
                 "which replica; pinned keeps a tenant at one (default: least_loaded)"),
        time_scale=(1.0, "X", "real seconds for each emulated one"),
        retry_after=(1, "S", "what refusals ask for (default: 1)"),
        seed=(0, "N", "draws which calls are refused (default: 0)"),
        stream_interval=(4, "N", "tokens in a chunk (default: 4)"),
        reply_tokens=(256, "N", "length of a free reply (default: 256)"),
        log=(Path, "PATH", "new file: a JSON line for each call, no text"),
        host=("127.0.0.1", "HOST", "address to bind (default: 127.0.0.1)"),
        port=(0, "PORT", "port to bind; 0 (default) takes a free one"),
        allow_remote=(False, None, "a host that others reach, without authentication"),
    )  # fmt: skip
    serve.add_argument("--abort-delay", type=_delay, default=argparse.SUPPRESS, metavar="S",
                       help="emulated seconds that a call goes on after its client has left, or never "
                       "(default: the profile's)")  # fmt: skip
    serve.add_argument("--fail", type=_share, action="append", default=[], metavar="STATUS:SHARE",
                       help="refuse a share of the calls, such as 429:0.05; may be repeated")  # fmt: skip


def _delay(text: str) -> float | None:
    if text == "never":
        return None
    with contextlib.suppress(ValueError):
        if 0 <= (delay_s := float(text)) < float("inf"):
            return delay_s
    raise argparse.ArgumentTypeError(f"{text!r} is neither 0 or more seconds nor never")


def _share(text: str) -> tuple[int, float]:
    status, _, share = text.partition(":")
    try:
        return int(status), float(share)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not STATUS:SHARE, such as 429:0.05") from None


_PASSED_ON = (
    "scheduler", "routing", "time_scale", "seed", "stream_interval", "reply_tokens", "host", "port", "allow_remote",
)  # fmt: skip


def _serve(arguments: argparse.Namespace) -> int:
    from revise_lab.serving.cost import load
    from revise_lab.serving.http import ClusterServer

    profile = load(arguments.profile)
    if "abort_delay" in arguments:
        profile = profile.with_(abort_delay_s=arguments.abort_delay)
    if arguments.allow_remote:
        print(f"warning: no authentication, so anybody who reaches {arguments.host} can use this", file=sys.stderr)
    server = ClusterServer(
        profile,
        arguments.replicas,
        fail=dict(arguments.fail),
        retry_after_s=arguments.retry_after,
        log_path=arguments.log,
        **{name: getattr(arguments, name) for name in _PASSED_ON},
    )
    return run_until_interrupted(server)


def run_until_interrupted(server: Any) -> int:
    """Serve until Ctrl-C or SIGTERM, and say what there was.

    Parameters
    ----------
    server : ClusterServer
        Not yet started.

    Returns
    -------
    int
        0: being interrupted is how it ends.
    """
    over = threading.Event()
    before = [(number, signal.signal(number, lambda *_: over.set())) for number in (signal.SIGINT, signal.SIGTERM)]
    try:
        with server:
            print(server.url)
            print(f"emulated, not a real model: {server.label}", server.profile.about, sep="\n", flush=True)
            over.wait()
    finally:
        for number, handler in before:
            signal.signal(number, handler)
    counts = {what: sum(n for (_, name), n in server.counts.items() if name == what) for what in _STATUSES}
    print("stopped; " + ", ".join(f"{n} {what}" for what, n in counts.items()), file=sys.stderr)
    return 0


_STATUSES = ("finished", "aborted", "rejected")
