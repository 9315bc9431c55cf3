"""The commands around serving: an emulated cluster behind an HTTP endpoint."""

from __future__ import annotations

import argparse
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


def add_commands(command: Callable[[str, Any, str], argparse.ArgumentParser]) -> None:
    """Add the command to a command line."""
    serve = command("serve", _serve, "serve an emulated Qwen3-14B cluster over an OpenAI-compatible HTTP endpoint")
    serve.epilog = _SERVE
    serve.add_argument("--profile", default="h100-qwen3-14b-sglang", metavar="NAME",
                       help="name, or path of a .json file (default: h100-qwen3-14b-sglang)")  # fmt: skip
    serve.add_argument("--replicas", type=int, default=4, metavar="N", help="how many (default: 4)")
    serve.add_argument("--scheduler", choices=["fcfs", "fair"], default="fcfs", help="who is next (default: fcfs)")
    serve.add_argument("--routing", choices=["least_loaded", "pinned"], default="least_loaded",
                       help="which replica; pinned keeps a tenant at one (default: least_loaded)")  # fmt: skip
    serve.add_argument("--time-scale", type=float, default=1.0, metavar="X", help="real seconds for each emulated one")
    serve.add_argument("--abort-delay", type=_delay, default=argparse.SUPPRESS, metavar="S",
                       help="emulated seconds that a call goes on after its client has left, or never "
                       "(default: the profile's)")  # fmt: skip
    serve.add_argument("--fail", type=_share, action="append", default=[], metavar="STATUS:SHARE",
                       help="refuse a share of the calls, such as 429:0.05; may be repeated")  # fmt: skip
    serve.add_argument("--retry-after", type=int, default=1, metavar="S", help="what refusals ask for (default: 1)")
    serve.add_argument("--seed", type=int, default=0, help="draws which calls are refused (default: 0)")
    serve.add_argument("--stream-interval", type=int, default=4, metavar="N", help="tokens in a chunk (default: 4)")
    serve.add_argument(
        "--reply-tokens", type=int, default=256, metavar="N", help="length of a free reply (default: 256)"
    )
    serve.add_argument("--log", type=Path, metavar="PATH", help="new file: a JSON line for each call, no text")
    serve.add_argument("--host", default="127.0.0.1", help="address to bind (default: 127.0.0.1)")
    serve.add_argument("--port", type=int, default=0, help="port to bind; 0 (default) takes a free one")
    serve.add_argument("--allow-remote", action="store_true", help="a host that others reach, without authentication")


def _delay(text: str) -> float | None:
    try:
        delay_s = 0.0 if text == "never" else float(text)
    except ValueError:
        delay_s = -1.0
    if not 0 <= delay_s < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is neither 0 or more seconds nor never")
    return None if text == "never" else delay_s


def _share(text: str) -> tuple[int, float]:
    status, _, share = text.partition(":")
    try:
        return int(status), float(share)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not STATUS:SHARE, such as 429:0.05") from None


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
        scheduler=arguments.scheduler,
        routing=arguments.routing,
        time_scale=arguments.time_scale,
        fail=dict(arguments.fail),
        retry_after_s=arguments.retry_after,
        seed=arguments.seed,
        stream_interval=arguments.stream_interval,
        reply_tokens=arguments.reply_tokens,
        log_path=arguments.log,
        host=arguments.host,
        port=arguments.port,
        allow_remote=arguments.allow_remote,
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
