"""The chat protocol, for both emulated endpoints: reading a request, answering it, and sending the answer as it comes."""

from __future__ import annotations

import asyncio
import json
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, MutableMapping
from contextlib import aclosing
from hashlib import blake2b
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

from revise_lab.errors import EndpointError
from revise_lab.serving.text import answer, prompt_text, prompt_tokens

if TYPE_CHECKING:
    from starlette.responses import Response

MODEL = "emulated-qwen3-14b"
TAGS = ("node", "attempt", "run", "call")
"""Who asks; sent as ``x-revise-...`` headers and kept in the logs."""

_TYPES = {429: ("rate_limit_error", "rate_limit_exceeded"), 503: ("server_error", "service_unavailable")}
_ANY_OBJECT = {"type": "object", "properties": {"answer": {"type": "string"}}}

Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]


def tags(headers: Mapping[str, str]) -> dict[str, Any]:
    """Return who asks, out of the headers of a request."""
    return {name: unquote(headers.get(f"x-revise-{name}", "")) for name in TAGS}


def refusal(status: int, text: str, *, code: str | None = None, headers: Mapping[str, str] | None = None) -> Response:
    """Return an error response in the shape of the OpenAI API."""
    from starlette.responses import JSONResponse

    kind, usual = _TYPES.get(status, ("invalid_request_error" if status < 500 else "server_error", None))
    error = {"message": text, "type": kind, "param": None, "code": code or usual}
    return JSONResponse({"error": error}, status_code=status, headers=dict(headers or {}))


class Chat:
    """A chat request as it was read.

    Parameters
    ----------
    raw : bytes
        Body of the request.

    Attributes
    ----------
    pieces : list of str
        Tokens of the reply, after :meth:`reply`.
    reason : str
        Why the reply ends: ``stop``, ``length`` or ``tool_calls``.
    tool : str or None
        Function that is called, in which case the reply is its arguments.

    Raises
    ------
    EndpointError
        The body is no chat request (``status=400``).
    """

    def __init__(self, raw: bytes) -> None:
        self.pieces: list[str] = []
        self.reason = "stop"
        self.tool: str | None = None
        try:
            body = self.body = json.loads(raw)
            self.messages = body["messages"]
            self.prompt = prompt_text(self.messages)
            self.prompt_tokens = prompt_tokens(self.messages)
            self.stream = bool(body.get("stream"))
            self.include_usage = bool((body.get("stream_options") or {}).get("include_usage"))
            limits = (body.get("max_tokens"), body.get("max_completion_tokens"))
            self.max_tokens: int | None = next((limit for limit in limits if limit is not None), None)
            if self.max_tokens is not None and (type(self.max_tokens) is not int or self.max_tokens < 1):
                raise ValueError(f"max_tokens={self.max_tokens!r} is no positive number")
            if not self.messages or body.get("n") not in (None, 1):
                raise ValueError("messages must not be empty, and n must be 1")
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
            raise _unreadable(error) from error

    @property
    def prompt_hash(self) -> str:
        """Name of the prompt in a log, which holds no text."""
        return blake2b(self.prompt.encode(errors="surrogatepass"), digest_size=8).hexdigest()

    def reply(self, ctx_tokens: int, reply_tokens: int) -> None:
        """Find the reply.

        A tool is called where the request demands it, or offers tools and does not end with the result of one (our
        choice: an agent that gives its tools gets one call and then words).

        Parameters
        ----------
        ctx_tokens : int
            Context; prompt and ``max_tokens`` must fit.
        reply_tokens : int
            Words after which a reply ends by itself.

        Raises
        ------
        EndpointError
            The context overflows, or a schema cannot be filled (``status=400``).
        """
        wanted = self.prompt_tokens + (self.max_tokens or 1)
        if wanted > ctx_tokens:
            raise EndpointError(
                f"request ({wanted} tokens) exceeds the available context size ({ctx_tokens} tokens)",
                status=400,
                code="context_length_exceeded",
            )
        stop = self.body.get("stop") or ()
        try:
            self.tool, schema = self._tool() or (None, self._schema())
            self.pieces, self.reason = answer(
                self.messages,
                self.body.get("seed"),
                max_tokens=self.max_tokens,
                reply_tokens=reply_tokens,
                json_schema=schema,
                ignore_eos=bool(self.body.get("ignore_eos")),
                stop=[stop] if isinstance(stop, str) else stop,
            )
        except (ArithmeticError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
            raise _unreadable(error) from error
        room = ctx_tokens - self.prompt_tokens
        if len(self.pieces) > room:
            self.pieces, self.reason = self.pieces[:room], "length"
        if self.tool is not None and self.reason == "stop":
            self.reason = "tool_calls"

    def _schema(self) -> Mapping[str, Any] | None:
        asked = self.body.get("response_format") or {}
        if asked.get("type") == "json_object":
            return _ANY_OBJECT
        schema: Mapping[str, Any] | None = (asked.get("json_schema") or {}).get("schema")
        return schema

    def _tool(self) -> tuple[str, Mapping[str, Any]] | None:
        functions = {tool["function"]["name"]: tool["function"] for tool in self.body.get("tools") or ()}
        choice = self.body.get("tool_choice") or "auto"
        if not functions or choice == "none" or (choice == "auto" and self.messages[-1].get("role") == "tool"):
            return None
        names = [choice["function"]["name"]] if isinstance(choice, dict) else sorted(functions)
        name = names[int(self.prompt_hash, 16) % len(names)]
        return name, functions[name].get("parameters") or {"type": "object"}


def _unreadable(error: Exception) -> EndpointError:
    return EndpointError(f"the body is not a chat request ({type(error).__name__}: {error})", status=400)


class ChatReply(ABC):
    """An ASGI response that sends what has been decoded and watches its client at the same time.

    Tokens are pulled: while a reader is slow nothing is made for it, and its next chunk holds all that exists by then.

    Parameters
    ----------
    chat : Chat
        A request with its reply.
    number : int
        Number of the request; its id is ``chatcmpl-NUMBER``.
    live : set of task
        Where its task stands while it runs.
    """

    def __init__(self, chat: Chat, number: int, live: set[asyncio.Task[None]]) -> None:
        self.chat, self.number, self.live = chat, number, live
        self.ended = False
        self._head = {
            "id": f"chatcmpl-{number}",
            "created": int(time.time()),
            "model": chat.body.get("model") or MODEL,
        }

    async def __call__(self, scope: Any, receive: Receive, send: Send) -> None:
        """Answer, as ASGI wants it."""
        work = asyncio.create_task(self._stream(send) if self.chat.stream else self._whole(send))
        watch = asyncio.create_task(self._watch(receive, work))
        self.live.add(work)
        # Returning with the body unfinished makes the server drop the connection, as a crash would.
        try:
            await work
        except asyncio.CancelledError:
            self.stopped()
        finally:
            self.live.discard(work)
            watch.cancel()

    @abstractmethod
    def decode(self) -> AsyncGenerator[int]:
        """Yield how many tokens exist, whenever there are enough new ones for a chunk."""

    @abstractmethod
    def usage(self) -> tuple[int, int]:
        """Return the tokens decoded, and those of the prompt that were cached."""

    async def left(self) -> None:
        """Take note that the client has left; the answer is given up when this returns, by default at once."""
        await asyncio.sleep(0)

    @abstractmethod
    def stopped(self) -> None:
        """Take note that the answer was given up."""

    def end(self) -> None:
        """Take note that the answer is complete; called before the last bytes leave, so that a log is never behind."""
        self.ended = True

    def choices(self, choice: dict[str, Any]) -> list[dict[str, Any]]:
        """Return the choices of a chunk or of a whole answer."""
        return [choice]

    async def _watch(self, receive: Receive, work: asyncio.Task[None]) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        # The end of a complete response looks like a disconnect too.
        if not self.ended:
            await self.left()
            work.cancel()

    async def _stream(self, send: Send) -> None:
        await self._open(send, "text/event-stream")

        async def event(choices: list[dict[str, Any]], **more: Any) -> None:
            data = self._head | {"object": "chat.completion.chunk", "choices": choices} | more
            await send(
                {"type": "http.response.body", "body": f"data: {json.dumps(data)}\n\n".encode(), "more_body": True}
            )

        sent = 0
        async with aclosing(self.decode()) as counts:
            async for have in counts:
                delta = self._delta("".join(self.chat.pieces[sent:have]), first=not sent)
                await event(self.choices({"index": 0, "delta": delta, "finish_reason": None}))
                sent = have
        if last := self.choices({"index": 0, "delta": {}, "finish_reason": self.chat.reason}):
            await event(last)
        if self.chat.include_usage:
            await event([], usage=self._usage())
        self.end()
        await send({"type": "http.response.body", "body": b"data: [DONE]\n\n", "more_body": False})

    async def _whole(self, send: Send) -> None:
        async for _ in self.decode():
            pass
        message = {"content": None} | self._delta("".join(self.chat.pieces), first=True)
        choices = self.choices({"index": 0, "message": message, "finish_reason": self.chat.reason})
        data = self._head | {"object": "chat.completion", "choices": choices, "usage": self._usage()}
        self.end()
        await self._open(send, "application/json")
        await send({"type": "http.response.body", "body": json.dumps(data).encode(), "more_body": False})

    def _delta(self, text: str, *, first: bool) -> dict[str, Any]:
        role = {"role": "assistant"} if first else {}
        if self.chat.tool is None:
            return role | {"content": text}
        call: dict[str, Any] = {"index": 0, "function": {"arguments": text}}
        if first:
            call |= {"id": f"call_{self.number}", "type": "function"}
            call["function"] = {"name": self.chat.tool, "arguments": text}
        return role | {"tool_calls": [call]}

    def _usage(self) -> dict[str, Any]:
        prompt, (completion, cached) = self.chat.prompt_tokens, self.usage()
        counts = {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}
        return counts | {"prompt_tokens_details": {"cached_tokens": cached}}

    async def _open(self, send: Send, media_type: str) -> None:
        fields = {"content-type": media_type, "cache-control": "no-store", "x-request-id": self._head["id"]}
        headers = [(name.encode(), str(value).encode()) for name, value in fields.items()]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
