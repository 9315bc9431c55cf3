"""The emulated cluster over HTTP: the engine's times and tokens behind an OpenAI-compatible chat endpoint on loopback.

What is emulated: the words (a hash of prompt and seed, see ``text``) and all times (the profile's cost model, see
``engine``). What is real: connections, streams, clients that read slowly or vanish, and the order of everything.
"""

from __future__ import annotations

import asyncio
import json
import logging
import random
from collections import Counter, deque
from collections.abc import AsyncGenerator, Callable, Hashable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from revise_lab.errors import ConfigError, EndpointError

from .chat import MODEL, Chat, ChatReply, refusal, tags
from .cost import Profile
from .engine import Cluster
from .loopback import LoopbackServer
from .requests import Event, Request, Served
from .shell import Shell
from .text import split_tokens

if TYPE_CHECKING:
    from starlette.requests import Request as HttpRequest
    from starlette.responses import Response

_log = logging.getLogger(__name__)

BLOCK_TOKENS = 16
"""Tokens in a block of the prefix cache, as in vLLM."""


@dataclass(slots=True)
class CallEntry:
    """One call as the server saw it, without its text. Times are emulated seconds since the start of the server."""

    id: int
    arrival_s: float
    client_id: str = ""
    """What the client calls it (header ``x-client-request-id``)."""
    tenant: str = ""
    node: str = ""
    attempt: str = ""
    run: str = ""
    call: str = ""
    stream: bool = False
    replica: int | None = None
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    tokens_when_left: int | None = None
    """Those that existed when the client left; what was completed beyond was for nobody."""
    code: int = 200
    status: str = "open"
    """``open``, ``finished``, ``aborted`` (the client left, or the server was stopped) or ``rejected``."""
    first_s: float | None = None
    left_s: float | None = None
    ended_s: float | None = None


def prompt_blocks(messages: Sequence[Mapping[str, Any]], salt: str = "") -> tuple[tuple[str, int], ...]:
    """Cut a prompt into full blocks of tokens, each with a key that stands for everything up to its end.

    Parameters
    ----------
    messages : sequence of mapping
        Chat messages; each counts four tokens for its role, as in ``text.prompt_tokens``.
    salt : str
        Prompts with different salts share nothing.
    """
    tokens: list[str] = []
    for message in messages:
        content = message.get("content")
        text = content if isinstance(content, str) else json.dumps(content, ensure_ascii=False)
        tokens += [str(message.get("role")), "", "", "", *split_tokens(text)]
    seen = blake2b(salt.encode(errors="surrogatepass"), digest_size=8)
    blocks = []
    for end in range(BLOCK_TOKENS, len(tokens) + 1, BLOCK_TOKENS):
        seen.update(json.dumps(tokens[end - BLOCK_TOKENS : end]).encode())
        blocks.append((seen.hexdigest(), BLOCK_TOKENS))
    return tuple(blocks)


class ClusterServer(LoopbackServer):
    """Emulated replicas behind one endpoint, in a thread of this process.

    Parameters
    ----------
    profile : Profile
        What steps cost, what fits, and how long a request goes on after its client has left.
    n_replicas : int
        How many; requests go to the one with the fewest.
    time_scale : float
        Real seconds for each emulated second.
    stream_interval : int
        Most tokens in a chunk while the reader keeps up; the first token comes alone and at once.
    reply_tokens : int
        Words after which a reply ends by itself.
    fail : mapping of int to float
        Share of the calls that are refused with a status, such as ``{429: 0.05}``. A header
        ``x-revise-fault: 429:RETRY_AFTER`` refuses one.
    retry_after_s : int
        What refusals say in ``retry-after``.
    seed : int
        Draws which calls are refused, by their number.
    log_path : Path, optional
        New file for one JSON line for each call that is over.
    log_kept : int
        Calls that are over and stay in memory.
    host, port, allow_remote
        As for :class:`LoopbackServer`.
    **options
        Those of :class:`Cluster`: ``scheduler``, ``routing``, ``chunk_tokens``, ``prefix_cache``.

    Attributes
    ----------
    counts : Counter
        Calls by (replica or None, status), and prompt, cached and generated tokens by replica.

    Raises
    ------
    ConfigError
        A number is out of range, the log exists, or the host is not loopback.
    """

    def __init__(
        self,
        profile: Profile,
        n_replicas: int = 1,
        *,
        time_scale: float = 1.0,
        stream_interval: int = 4,
        reply_tokens: int = 256,
        fail: Mapping[int, float] | None = None,
        retry_after_s: int = 1,
        seed: int = 0,
        log_path: Path | None = None,
        log_kept: int = 1000,
        host: str = "127.0.0.1",
        port: int = 0,
        allow_remote: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(host=host, port=port, allow_remote=allow_remote)
        for name, value in (
            ("n_replicas", n_replicas),
            ("stream_interval", stream_interval),
            ("reply_tokens", reply_tokens),
        ):
            if value < 1:
                raise ConfigError(f"{name}={value} is out of range; give 1 or more", name=name, value=value)
        if not 0 < time_scale < float("inf"):
            raise ConfigError(f"time_scale={time_scale} is out of range; give a positive number of real seconds")
        self.fail = dict(fail or {})
        wrong = [status for status, share in self.fail.items() if not (400 <= status < 600 and 0 <= share <= 1)]
        if wrong or sum(self.fail.values()) > 1:
            raise ConfigError(f"fail={self.fail} must give statuses of errors and shares that sum to at most 1")
        self.profile, self.n_replicas, self.options = profile, n_replicas, options
        self.time_scale, self.stream_interval, self.reply_tokens = time_scale, stream_interval, reply_tokens
        self.retry_after_s = retry_after_s
        self.cluster = Cluster(profile, n_replicas, **options)
        self.shell: Shell | None = None
        self.counts: Counter[tuple[int | None, str]] = Counter()
        self._random = random.Random(seed)
        self._n_calls = 0
        self._open: dict[Hashable, tuple[CallEntry, Served]] = {}
        self._over: deque[CallEntry] = deque(maxlen=log_kept)
        self._log_path = log_path
        self._file: TextIO | None = None

    @property
    def label(self) -> str:
        """Where the times come from."""
        return f"{self.profile.label}, {self.n_replicas} replicas, {self.time_scale:g} real s for each emulated s"

    @property
    def log(self) -> list[CallEntry]:
        """Copies of the calls that are open or still kept, in order of arrival."""
        entries = [*list(self._over), *(entry for entry, _ in list(self._open.values()))]
        return sorted(map(replace, entries), key=lambda entry: entry.id)

    def stop(self) -> None:
        """Abort what is running, close all connections and the log, and join the thread; twice is fine."""
        super().stop()
        if self.shell is not None:
            self.shell.close()
            for entry, served in list(self._open.values()):
                entry.completion_tokens, entry.ended_s = self.shell.count(served), self.shell.now_s()
                self._close(entry, "aborted")
        if self._file is not None:
            self._file.close()
            self._file = None

    def metrics(self) -> str:
        """Return how the replicas stand, as Prometheus reads it, under the names that SGLang uses."""
        loads = list(self.cluster.loads())
        capacity = self.profile.kv_capacity_tokens
        rows: list[tuple[str, str, list[float]]] = [
            ("num_running_reqs", "gauge", [load.n_running for load in loads]),
            ("num_queue_reqs", "gauge", [load.n_queued for load in loads]),
            ("num_used_tokens", "gauge", [load.used_tokens for load in loads]),
            ("token_usage", "gauge", [load.used_tokens / capacity for load in loads]),
            ("prompt_tokens_total", "counter", self._counted("prompt_tokens")),
            ("cached_tokens_total", "counter", self._counted("cached_tokens")),
            ("generation_tokens_total", "counter", [engine.decoded_tokens for engine in self.cluster.engines]),
            ("num_requests_total", "counter", self._counted("finished")),
            ("num_aborted_requests_total", "counter", self._counted("aborted")),
        ]
        lines = [f"# emulated, no real model: {self.label}"]
        for name, kind, values in rows:
            lines.append(f"# TYPE sglang:{name} {kind}")
            lines += [
                f'sglang:{name}{{model_name="{MODEL}",replica="{i}"}} {value:.10g}' for i, value in enumerate(values)
            ]
        late_s = self.shell.late_s if self.shell else 0.0
        lines += [
            f"revise_lab:rejected_total {self.counts[None, 'rejected']}",
            f"revise_lab:worst_late_seconds {late_s:.6f}",
        ]
        return "\n".join(lines) + "\n"

    def _counted(self, what: str) -> list[float]:
        return [self.counts[replica, what] for replica in range(self.n_replicas)]

    def _begin(self) -> None:
        if self._log_path is not None:
            try:
                self._file = self._log_path.open("x", buffering=1, encoding="utf-8")
            except OSError as error:
                raise ConfigError(
                    f"the log {self._log_path} cannot be written ({error.strerror}); name a new file in a folder that exists"
                ) from None
        self.cluster, self.shell = Cluster(self.profile, self.n_replicas, **self.options), None

    def _pages(self) -> Mapping[str, Callable[[], Any]]:
        row = {"id": MODEL, "object": "model", "created": 0, "owned_by": f"revise_lab ({self.label})"}
        row["max_model_len"] = self.profile.context_tokens
        return {
            "/v1/models": lambda: {"object": "list", "data": [row]},
            "/health": lambda: {"status": "ok", "emulated": True, "profile": self.profile.name},
            "/metrics": self.metrics,
            "/log": lambda: [asdict(entry) for entry in self.log],
        }

    async def _chat(self, request: HttpRequest) -> Response | _EngineReply:
        from starlette.requests import ClientDisconnect

        try:
            raw = await request.body()
        except ClientDisconnect:
            return refusal(400, "the body is not complete")
        if self.shell is None:
            loop = asyncio.get_running_loop()
            self.shell = Shell(self.cluster, loop, time_scale=self.time_scale, on_event=self._note)
        headers = request.headers
        client_id = headers.get("x-client-request-id", "")
        entry = CallEntry(self._n_calls, self.shell.now_s(), client_id, **tags(headers))
        self._n_calls += 1
        fault = headers.get("x-revise-fault") or self._draw()
        try:
            if fault:
                raise _on_demand(fault)
            chat = Chat(raw)
            entry.tenant = headers.get("x-tenant") or str(chat.body.get("user") or "")
            entry.stream, entry.prompt_tokens = chat.stream, chat.prompt_tokens
            chat.reply(min(self.profile.context_tokens, self.profile.kv_capacity_tokens - 1), self.reply_tokens)
            blocks = prompt_blocks(chat.messages, str(chat.body.get("cache_salt") or ""))
            asked = Request(entry.id, chat.prompt_tokens, max(1, len(chat.pieces)), entry.tenant, blocks)
            served = self.shell.submit(asked)
        except EndpointError as error:
            return self._refuse(entry, error)
        entry.replica = next(i for i, engine in enumerate(self.cluster.engines) if entry.id in engine.live)
        self._open[entry.id] = entry, served
        return _EngineReply(self, self.shell, entry, served, chat)

    def _draw(self) -> str:
        drawn = self._random.random()
        for status, share in self.fail.items():
            drawn -= share
            if drawn < 0:
                return f"{status}:{self.retry_after_s}"
        return ""

    def _refuse(self, entry: CallEntry, error: EndpointError) -> Response:
        entry.code, entry.ended_s = error.context.get("status", 400), entry.arrival_s
        self._close(entry, "rejected")
        headers = {"x-request-id": f"chatcmpl-{entry.id}"}
        if error.context.get("retry_after_s"):
            headers["retry-after"] = error.context["retry_after_s"]
        return refusal(entry.code, error.message, code=error.context.get("code"), headers=headers)

    def _note(self, event: Event) -> None:
        """Take an event of the engine into the log."""
        entry, served = self._open[event.served.request.id]
        entry.first_s, entry.left_s, entry.ended_s = served.first_s, served.left_s, served.ended_s
        if event.is_end:
            entry.completion_tokens, entry.cached_tokens = served.decoded_tokens, served.cached_tokens
            self._close(entry, event.kind)

    def _close(self, entry: CallEntry, status: str) -> None:
        entry.status = status
        self._open.pop(entry.id, None)
        self._over.append(entry)
        self.counts[entry.replica, status] += 1
        self.counts[entry.replica, "prompt_tokens"] += entry.prompt_tokens
        self.counts[entry.replica, "cached_tokens"] += entry.cached_tokens
        if self._file is not None:
            try:
                self._file.write(json.dumps(asdict(entry)) + "\n")
            except OSError as error:
                _log.error("%s ends before call %d (%s): it is not complete", self._log_path, entry.id, error.strerror)
                self._file = None


def _on_demand(fault: str) -> EndpointError:
    status, _, retry_after_s = fault.partition(":")
    if status.isdecimal() and 400 <= int(status) < 600:
        return EndpointError(f"refused on demand ({status})", status=int(status), retry_after_s=retry_after_s)
    return EndpointError(f"x-revise-fault={fault!r} - write STATUS:RETRY_AFTER, such as 429:1", status=400)


class _EngineReply(ChatReply):
    def __init__(self, server: ClusterServer, shell: Shell, entry: CallEntry, served: Served, chat: Chat) -> None:
        super().__init__(chat, entry.id, server._live)
        self.server, self.shell, self.entry, self.served = server, shell, entry, served

    async def decode(self) -> AsyncGenerator[int]:
        have, total = 0, self.served.request.output_tokens
        while have < total and self.served.state != "aborted":
            step = self.server.stream_interval if self.chat.stream and have else 1
            have = await self.shell.tokens(self.served, min(total, have + step) if self.chat.stream else total)
            yield have

    def usage(self) -> tuple[int, int]:
        # a request that was retracted has met its own prompt again
        return self.served.decoded_tokens, min(self.served.cached_tokens, self.chat.prompt_tokens)

    def stopped(self) -> None:
        have = self.shell.count(self.served)
        if self.shell.abort(self.entry.id):
            self.entry.left_s, self.entry.tokens_when_left = self.served.left_s, have
