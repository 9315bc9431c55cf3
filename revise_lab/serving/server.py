"""The embedded endpoint: an OpenAI-compatible server on loopback that emulates a Qwen3-14B replica.

Answers are a hash of (prompt, seed), see ``text``; times are constants, named in the constructor. What is real is the
life of a request: it queues for a slot, streams, notices that its client has gone, and stops, at once or after the
delay that real servers were seen to have. The log of requests is the ground truth for the number of model calls.
"""

from __future__ import annotations

import asyncio
import ipaddress
import itertools
import json
import socket
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, MutableMapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import asdict, dataclass, replace
from hashlib import blake2b
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

from revise_lab.errors import ConfigError, EndpointError
from revise_lab.serving.text import answer, prompt_text, prompt_tokens

if TYPE_CHECKING:
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import Response

MODEL = "emulated-qwen3-14b"
START_LIMIT_S = 20.0

Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]


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


class EmbeddedServer:
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
        if not allow_remote and not _is_loopback(host):
            raise ConfigError(
                f"host {host!r} is not loopback and the emulated endpoint has no authentication; "
                "bind 127.0.0.1, or pass allow_remote=True on a network that you trust",
                host=host,
            )
        for name, value, least in (
            ("n_slots", n_slots, 1),
            ("coalesce", coalesce, 1),
            ("reply_tokens", reply_tokens, 1),
        ):
            if value < least:
                raise ConfigError(f"{name}={value} is out of range; give {least} or more", name=name, value=value)
        self.ttft_s, self.itl_s, self.coalesce = ttft_s, itl_s, coalesce
        self.ctx_tokens, self.reply_tokens, self.abort_delay_s = ctx_tokens, reply_tokens, abort_delay_s
        self.host, self.port, self.n_slots = host, port, n_slots
        self._faults = iter(faults)
        self._ids = itertools.count()
        self._log: list[LogEntry] = []
        self._slots: list[LogEntry | None] = [None] * n_slots
        self._live: set[asyncio.Task[None]] = set()
        self._free: asyncio.Semaphore | None = None
        self._thread: threading.Thread | None = None
        self._server: Any = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._born = time.perf_counter()

    def __repr__(self) -> str:
        return f"EmbeddedServer({self.url!r}, requests={len(self._log)}, emulated)"

    @property
    def url(self) -> str:
        """Base URL for a client, with ``/v1``."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.port}/v1"

    @property
    def log(self) -> list[LogEntry]:
        """Copies of all requests so far, in order of arrival."""
        return [replace(entry) for entry in list(self._log)]

    def start(self) -> EmbeddedServer:
        """Bind, start the thread and wait until the server answers.

        Returns
        -------
        EmbeddedServer
            Itself, with the real port.

        Raises
        ------
        EndpointError
            If the port is taken or the server does not come up.
        """
        import uvicorn

        if self._thread is not None:
            return self
        self._free = self._loop = None
        try:
            bound = socket.create_server((self.host, self.port), backlog=1024)
        except OSError as error:
            raise EndpointError(
                f"cannot bind {self.host}:{self.port} ({error.strerror}); choose another port, or 0 for a free one",
                port=self.port,
            ) from error
        self.port = bound.getsockname()[1]
        config = uvicorn.Config(
            self.app(),
            loop="asyncio",
            http="h11",
            ws="none",
            lifespan="off",
            log_config=None,
            log_level="critical",
            access_log=False,
            timeout_graceful_shutdown=2,
        )
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(
            target=self._server.run, kwargs={"sockets": [bound]}, name=f"revise-lab-endpoint-{self.port}", daemon=True
        )
        self._thread.start()
        limit = time.monotonic() + START_LIMIT_S
        while not self._server.started:
            if not self._thread.is_alive() or time.monotonic() > limit:
                bound.close()
                raise EndpointError(f"the embedded endpoint did not come up on {self.url}", port=self.port)
            time.sleep(0.002)
        return self

    def stop(self) -> None:
        """Abort what is running, close all connections and join the thread; twice is fine."""
        thread, self._thread = self._thread, None
        if thread is None:
            return
        self._server.should_exit = True
        if self._loop is not None:
            # The loop may be closed already if the thread ended by itself.
            with suppress(RuntimeError):
                self._loop.call_soon_threadsafe(lambda: [task.cancel() for task in self._live])
        thread.join()

    def __enter__(self) -> EmbeddedServer:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()

    async def __aenter__(self) -> EmbeddedServer:
        return await asyncio.to_thread(self.start)

    async def __aexit__(self, *_: object) -> None:
        await asyncio.to_thread(self.stop)

    def app(self) -> Starlette:
        """Build the ASGI application, for a server of one's own.

        Returns
        -------
        Starlette
            The routes of the endpoint.
        """
        from starlette.applications import Starlette
        from starlette.responses import JSONResponse, PlainTextResponse
        from starlette.routing import Route

        async def models(_: Request) -> Response:
            row = {"id": MODEL, "object": "model", "created": 0, "owned_by": "revise_lab (emulated)"}
            return JSONResponse({"object": "list", "data": [row]})

        async def health(_: Request) -> Response:
            return JSONResponse({"status": "ok", "emulated": True})

        async def slots(_: Request) -> Response:
            return JSONResponse(
                [
                    {"id": i, "is_processing": e is not None, "request": None if e is None else e.id}
                    for i, e in enumerate(self._slots)
                ]
            )

        async def metrics(_: Request) -> Response:
            lines = [f"revise_lab:{name} {value}" for name, value in self.metrics().items()]
            return PlainTextResponse("\n".join(lines) + "\n")

        async def log(_: Request) -> Response:
            return JSONResponse([asdict(e) for e in self._log])

        return Starlette(
            routes=[
                Route("/v1/chat/completions", self._chat, methods=["POST"]),
                Route("/v1/models", models),
                Route("/health", health),
                Route("/slots", slots),
                Route("/metrics", metrics),
                Route("/log", log),
            ]
        )

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

        self._loop = asyncio.get_running_loop()
        entry = LogEntry(next(self._ids), started_s=self._now())
        for name in ("node", "attempt", "run", "call"):
            setattr(entry, name, unquote(request.headers.get(f"x-revise-{name}", "")))
        self._log.append(entry)
        entry.fault = request.headers.get("x-revise-fault") or next(self._faults, None) or ""
        try:
            body = json.loads(await request.body())
            messages = body["messages"]
            entry.stream = bool(body.get("stream"))
            entry.prompt_hash = blake2b(prompt_text(messages).encode(errors="surrogatepass"), digest_size=8).hexdigest()
            entry.prompt_tokens = prompt_tokens(messages)
            wanted = entry.prompt_tokens + (body.get("max_tokens") or 0)
            reply = self._reply(body)
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            return self._refuse(entry, 400, f"the body is not a chat request ({type(error).__name__}: {error})")
        if wanted > self.ctx_tokens:
            text = f"request ({wanted} tokens) exceeds the available context size ({self.ctx_tokens} tokens)"
            return self._refuse(entry, 400, text)
        kind, _, argument = entry.fault.partition(":")
        if kind.isdigit():
            return self._refuse(entry, int(kind), f"injected {kind}", {"retry-after": argument} if argument else {})
        if kind == "html":
            self._finish(entry, "broken")
            return HTMLResponse("<html><body>a proxy says hello</body></html>")
        return _Generation(self, entry, body, reply)

    def _reply(self, body: dict[str, Any]) -> tuple[list[str], str]:
        stop = body.get("stop") or ()
        return answer(
            body["messages"],
            body.get("seed"),
            max_tokens=body.get("max_tokens"),
            reply_tokens=self.reply_tokens,
            json_schema=((body.get("response_format") or {}).get("json_schema") or {}).get("schema"),
            ignore_eos=bool(body.get("ignore_eos")),
            stop=[stop] if isinstance(stop, str) else stop,
        )

    def _refuse(self, entry: LogEntry, status: int, text: str, headers: dict[str, str] | None = None) -> Response:
        from starlette.responses import JSONResponse

        entry.status = status
        self._finish(entry, "rejected")
        return JSONResponse({"error": {"message": text, "code": status}}, status_code=status, headers=headers)

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


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


class _Generation:
    """An ASGI response that decodes and watches its client at the same time."""

    def __init__(self, server: EmbeddedServer, entry: LogEntry, body: dict[str, Any], reply: tuple[list[str], str]):
        self.server, self.entry, self.body = server, entry, body
        self.pieces, self.reason = reply
        self.head = {"id": f"chatcmpl-{entry.id}", "created": int(time.time()), "model": body.get("model", MODEL)}

    async def __call__(self, scope: Any, receive: Receive, send: Send) -> None:
        work = asyncio.create_task(self._work(send))
        watch = asyncio.create_task(self._watch(receive, work))
        self.server._live.add(work)
        # Returning with the body unfinished makes the server drop the connection, as a crash would.
        try:
            await work
        except asyncio.CancelledError:
            self.server._finish(self.entry, "aborted")
        except _CutError:
            self.server._finish(self.entry, "broken")
        finally:
            self.server._live.discard(work)
            watch.cancel()

    async def _watch(self, receive: Receive, work: asyncio.Task[None]) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        # The end of a complete response looks like a disconnect too.
        if self.entry.finished_s is None:
            self.entry.closed_s = self.server._now()
            if self.server.abort_delay_s is not None:
                await asyncio.sleep(self.server.abort_delay_s)
                work.cancel()

    async def _work(self, send: Send) -> None:
        async with self.server._slot(self.entry):
            await (self._stream(send) if self.entry.stream else self._whole(send))

    async def _stream(self, send: Send) -> None:
        await self._open(send, "text/event-stream")
        empty = self.entry.fault == "empty_choices"

        async def event(choices: list[dict[str, Any]], **more: Any) -> None:
            data = self.head | {"object": "chat.completion.chunk", "choices": choices} | more
            await send(
                {"type": "http.response.body", "body": f"data: {json.dumps(data)}\n\n".encode(), "more_body": True}
            )

        async for text in self._decode():
            await event([] if empty else [{"index": 0, "delta": {"content": text}, "finish_reason": None}])
        if not empty:
            await event([{"index": 0, "delta": {}, "finish_reason": self.reason}])
        if (self.body.get("stream_options") or {}).get("include_usage"):
            await event([], usage=self._usage())
        self._end()
        await send({"type": "http.response.body", "body": b"data: [DONE]\n\n", "more_body": False})

    async def _whole(self, send: Send) -> None:
        text = "".join([chunk async for chunk in self._decode()])
        choice = {"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": self.reason}
        choices = [] if self.entry.fault == "empty_choices" else [choice]
        data = self.head | {"object": "chat.completion", "choices": choices, "usage": self._usage()}
        self._end()
        await self._open(send, "application/json")
        await send({"type": "http.response.body", "body": json.dumps(data).encode(), "more_body": False})

    async def _decode(self) -> AsyncIterator[str]:
        """Spend the time and yield every chunk when it is due."""
        server, entry, pieces = self.server, self.entry, self.pieces
        kind, _, argument = entry.fault.partition(":")
        breaks_at = int(argument or 1) if kind in ("cut", "stall") else len(pieces)
        clock = asyncio.get_running_loop().time
        begin = clock() + server.ttft_s + (float(argument or 5) if kind == "slow" else 0.0)
        for first in range(0, min(len(pieces), breaks_at), server.coalesce):
            chunk = pieces[first : first + server.coalesce]
            due = begin + server.itl_s * (first + len(chunk) - 1)
            await asyncio.sleep(max(0.0, due - clock()))
            entry.tokens += len(chunk)
            if entry.closed_s is not None:
                entry.tokens_after_close += len(chunk)
            yield "".join(chunk)
        if kind == "cut":
            raise _CutError
        if kind == "stall":
            await asyncio.Event().wait()

    def _usage(self) -> dict[str, Any]:
        prompt, completion = self.entry.prompt_tokens, self.entry.tokens
        counts = {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}
        return counts | {"prompt_tokens_details": {"cached_tokens": 0}}

    def _end(self) -> None:
        # Entered before the last bytes leave, so that a client that has its answer finds the log complete.
        self.server._finish(self.entry, "completed" if self.entry.closed_s is None else "aborted")

    async def _open(self, send: Send, media_type: str) -> None:
        headers = [(b"content-type", media_type.encode()), (b"cache-control", b"no-store")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
