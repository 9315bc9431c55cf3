"""The embedded endpoint: an OpenAI-compatible server on loopback that emulates a Qwen3-14B replica.

Answers are a hash of (prompt, seed), see ``text``; times are constants, named in the constructor. What is real is the
life of a request: it queues for a slot, streams, notices that its client has gone, and stops, at once or after the
delay that real servers were seen to have. The log of requests is the ground truth for the number of model calls.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from revise_lab.errors import ConfigError, EndpointError
from revise_lab.serving.chat import MODEL, Chat, ChatReply, Receive, Send, refusal, tags
from revise_lab.serving.loopback import LoopbackServer

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response

__all__ = ["MODEL", "EmbeddedServer", "LogEntry"]


@dataclass(slots=True)
class LogEntry:
    """One HTTP request as the server saw it; ``tokens`` are those decoded, whether or not anybody read them."""

    id: int
    node: str = ""
    attempt: str = ""
    run: str = ""
    call: str = ""
    prompt_hash: str = ""
    prompt_tokens: int = 0
    stream: bool = False
    fault: str = ""
    status: int = 200
    #: queued, running, completed, aborted (the client left), rejected (an error status) or broken (a fault).
    outcome: str = "queued"
    tokens: int = 0
    #: Decoded after the server saw that its client had gone: work that nobody wanted.
    tokens_after_close: int = 0
    started_s: float = 0.0
    closed_s: float | None = None
    finished_s: float | None = None
    wall_s: float | None = None


class EmbeddedServer(LoopbackServer):
    """An emulated endpoint in a thread of this process.

    Parameters
    ----------
    ttft_s : float
        Time from getting a slot to the first token.
    itl_s : float
        Time between two tokens.
    n_slots : int
        Requests decoded at once; the others queue in order of arrival.
    ctx_tokens : int
        Context; a longer request is a 400. The default is that of Qwen3-14B.
    reply_tokens : int
        Words after which a reply ends by itself.
    coalesce : int
        Tokens in one streamed chunk.
    abort_delay_s : float or None
        How long decoding goes on after the client has gone; None is a server that never stops. SGLang waits 2 s.
    faults : sequence of str or None
        What goes wrong with the first, second, ... request: ``"429:RETRY_AFTER"`` or another status, ``"slow:SECONDS"``,
        ``"cut:TOKENS"``, ``"stall:TOKENS"``, ``"empty_choices"``, ``"html"``. A header ``x-revise-fault`` does the same.
    host : str
        Address to bind.
    port : int
        Port to bind; 0 takes a free one.
    allow_remote : bool
        Must be set to bind anything but loopback: the endpoint has no authentication.

    Raises
    ------
    ConfigError
        For a host that is not loopback without ``allow_remote``, or a number out of range.
    """

    def __init__(
        self,
        *,
        ttft_s: float = 0.02,
        itl_s: float = 0.002,
        n_slots: int = 64,
        ctx_tokens: int = 40_960,
        reply_tokens: int = 32,
        coalesce: int = 1,
        abort_delay_s: float | None = 0.0,
        faults: Sequence[str | None] = (),
        host: str = "127.0.0.1",
        port: int = 0,
        allow_remote: bool = False,
    ) -> None:
        super().__init__(host=host, port=port, allow_remote=allow_remote)
        for name, value, least in (
            ("n_slots", n_slots, 1),
            ("coalesce", coalesce, 1),
            ("reply_tokens", reply_tokens, 1),
        ):
            if value < least:
                raise ConfigError(f"{name}={value} is out of range; give {least} or more", name=name, value=value)
        self.ttft_s, self.itl_s, self.coalesce = ttft_s, itl_s, coalesce
        self.ctx_tokens, self.reply_tokens, self.abort_delay_s = ctx_tokens, reply_tokens, abort_delay_s
        self.n_slots = n_slots
        self._faults = iter(faults)
        self._ids = itertools.count()
        self._log: list[LogEntry] = []
        self._slots: list[LogEntry | None] = [None] * n_slots
        self._free: asyncio.Semaphore | None = None
        self._born = time.perf_counter()

    def __repr__(self) -> str:
        return f"EmbeddedServer({self.url!r}, requests={len(self._log)}, emulated)"

    @property
    def log(self) -> list[LogEntry]:
        """Copies of all requests so far, in order of arrival."""
        return [replace(entry) for entry in list(self._log)]

    def _begin(self) -> None:
        self._free = None

    def _pages(self) -> Mapping[str, Callable[[], Any]]:
        row = {"id": MODEL, "object": "model", "created": 0, "owned_by": "revise_lab (emulated)"}
        return {
            "/v1/models": lambda: {"object": "list", "data": [row]},
            "/health": lambda: {"status": "ok", "emulated": True},
            "/slots": lambda: [
                {"id": i, "is_processing": e is not None, "request": None if e is None else e.id}
                for i, e in enumerate(self._slots)
            ],
            "/metrics": lambda: "".join(f"revise_lab:{name} {value}\n" for name, value in self.metrics().items()),
            "/log": lambda: [asdict(e) for e in self._log],
        }

    def metrics(self) -> dict[str, int]:
        """Give the counters that ``/metrics`` shows.

        Returns
        -------
        dict
            Requests by outcome and decoded tokens.
        """
        log = list(self._log)
        outcomes = ("queued", "running", "completed", "aborted", "rejected", "broken")
        counts = {f"requests_{name}": sum(e.outcome == name for e in log) for name in outcomes}
        return counts | {
            "tokens_total": sum(e.tokens for e in log),
            "tokens_after_close_total": sum(e.tokens_after_close for e in log),
        }

    async def _chat(self, request: Request) -> Response | _Generation:
        from starlette.responses import HTMLResponse

        entry = LogEntry(next(self._ids), started_s=self._now(), **tags(request.headers))
        self._log.append(entry)
        entry.fault = request.headers.get("x-revise-fault") or next(self._faults, None) or ""
        try:
            chat = Chat(await request.body())
            entry.stream, entry.prompt_hash, entry.prompt_tokens = chat.stream, chat.prompt_hash, chat.prompt_tokens
            chat.reply(self.ctx_tokens, self.reply_tokens)
        except EndpointError as error:
            return self._refuse(entry, 400, error.message, code=error.context.get("code"))
        kind, _, argument = entry.fault.partition(":")
        if kind.isdecimal():
            headers = {"retry-after": argument} if argument else {}
            return self._refuse(entry, int(kind), f"injected {kind}", headers=headers)
        if kind == "html":
            self._finish(entry, "broken")
            return HTMLResponse("<html><body>a proxy says hello</body></html>")
        return _Generation(self, entry, chat)

    def _refuse(self, entry: LogEntry, status: int, text: str, **more: Any) -> Response:
        entry.status = status
        self._finish(entry, "rejected")
        return refusal(status, text, **more)

    def _now(self) -> float:
        return time.perf_counter() - self._born

    def _finish(self, entry: LogEntry, outcome: str) -> None:
        if entry.finished_s is not None:
            return
        entry.outcome, entry.finished_s = outcome, self._now()
        entry.wall_s = entry.finished_s - entry.started_s

    @asynccontextmanager
    async def _slot(self, entry: LogEntry) -> AsyncIterator[None]:
        if self._free is None:
            self._free = asyncio.Semaphore(self.n_slots)
        async with self._free:
            slot = self._slots.index(None)
            self._slots[slot], entry.outcome = entry, "running"
            try:
                yield
            finally:
                self._slots[slot] = None


class _CutError(Exception):
    """An injected fault: the connection breaks off."""


class _Generation(ChatReply):
    def __init__(self, server: EmbeddedServer, entry: LogEntry, chat: Chat) -> None:
        super().__init__(chat, entry.id, server._live)
        self.server, self.entry = server, entry

    async def __call__(self, scope: Any, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        except _CutError:
            self.server._finish(self.entry, "broken")

    async def left(self) -> None:
        self.entry.closed_s = self.server._now()
        if self.server.abort_delay_s is None:
            await asyncio.Event().wait()
        else:
            await asyncio.sleep(self.server.abort_delay_s)

    def stopped(self) -> None:
        self.server._finish(self.entry, "aborted")

    def end(self) -> None:
        super().end()
        self.server._finish(self.entry, "completed" if self.entry.closed_s is None else "aborted")

    def usage(self) -> tuple[int, int]:
        return self.entry.tokens, 0

    def choices(self, choice: dict[str, Any]) -> list[dict[str, Any]]:
        return [] if self.entry.fault == "empty_choices" else [choice]

    async def decode(self) -> AsyncGenerator[int]:
        """Spend the time in a slot and yield with every chunk when it is due."""
        server, entry, n = self.server, self.entry, len(self.chat.pieces)
        kind, _, argument = entry.fault.partition(":")
        breaks_at = int(argument or 1) if kind in ("cut", "stall") else n
        clock = asyncio.get_running_loop().time
        async with server._slot(entry):
            begin = clock() + server.ttft_s + (float(argument or 5) if kind == "slow" else 0.0)
            for first in range(0, min(n, breaks_at), server.coalesce):
                have = min(first + server.coalesce, n)
                await asyncio.sleep(max(0.0, begin + server.itl_s * (have - 1) - clock()))
                entry.tokens = have
                if entry.closed_s is not None:
                    entry.tokens_after_close += have - first
                yield have
            if kind == "cut":
                raise _CutError
            if kind == "stall":
                await asyncio.Event().wait()
