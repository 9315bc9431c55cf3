"""The client for OpenAI-compatible endpoints.

Every call streams, because closing a stream is the one way of stopping a generation that all servers know. Tries are
ours: the library below is told to send each request once, so that the number of tries in the results is the number on
the wire. Once a token has been handed on, a failed try is an error for the caller, who starts a new attempt on what is
true by then; before that it is repeated here.
"""

from __future__ import annotations

import asyncio
import ipaddress
import itertools
import json
import logging
import os
import re
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from email.utils import parsedate_to_datetime
from typing import Any
from urllib.parse import quote, urlsplit

from revise_lab.errors import ConfigError, EndpointError
from revise_lab.runtime.reply import (
    BadRequest,
    Call,
    ContextOverflow,
    EndpointDown,
    EndpointTimeout,
    MalformedReply,
    Model,
    ModelReply,
    ModelRequest,
    OnToken,
    RateLimited,
    ReplyReader,
    StreamCut,
    Usage,
    strip_thinking,
)
from revise_lab.serving.server import MODEL, EmbeddedServer, LogEntry

__all__ = [
    "BadRequest",
    "Call",
    "ContextOverflow",
    "EndpointDown",
    "EndpointTimeout",
    "MalformedReply",
    "Model",
    "ModelReply",
    "ModelRequest",
    "OnToken",
    "OpenAIModel",
    "RateLimited",
    "StreamCut",
    "Usage",
    "connect",
    "strip_thinking",
]

KEY_VARIABLE = "REVISE_LAB_API_KEY"
NO_KEY = "none"
_OVERFLOW = re.compile(
    r"context[ _](?:length|size|window)|maximum context|too (?:long|many tokens)|exceeds? .*context", re.I
)

_log = logging.getLogger(__name__)


class OpenAIModel:
    """A model behind one or more OpenAI-compatible endpoints.

    Parameters
    ----------
    base_url : str or sequence of str
        Base URLs with ``/v1``; several replicas are used in turn.
    model : str
        Name of the model.
    api_key : str, optional
        Key; by default from the environment variable ``REVISE_LAB_API_KEY``. It is kept out of messages and logs.
    connect_s : float
        Longest time for a connection.
    first_token_s : float
        Longest silence before the first chunk, queueing and prefill included.
    idle_s : float
        Longest silence between two chunks.
    total_s : float
        Longest time for one try.
    max_tries : int
        HTTP requests per call.
    backoff_s : float
        Pause before the second try; doubles with each, without jitter, so that runs repeat.
    max_wait_s : float
        Longest pause; an endpoint that asks for more is an error at once.
    headers : mapping, optional
        Further headers.
    server : EmbeddedServer, optional
        The embedded server behind the URL, whose log is then ours.

    Raises
    ------
    ConfigError
        If a URL is not http or https.
    """

    def __init__(
        self,
        base_url: str | Sequence[str],
        model: str,
        *,
        api_key: str | None = None,
        connect_s: float = 5.0,
        first_token_s: float = 120.0,
        idle_s: float = 60.0,
        total_s: float = 900.0,
        max_tries: int = 4,
        backoff_s: float = 0.5,
        max_wait_s: float = 30.0,
        headers: Mapping[str, str] | None = None,
        server: EmbeddedServer | None = None,
    ) -> None:
        self.urls = [base_url] if isinstance(base_url, str) else list(base_url)
        for url in self.urls:
            if urlsplit(url).scheme not in ("http", "https") or not urlsplit(url).hostname:
                raise ConfigError(
                    f"{_shown(url)!r} is no endpoint; give a URL like http://127.0.0.1:8000/v1, or 'emulated'"
                )
        if not self.urls or max_tries < 1:
            raise ConfigError("an endpoint needs at least one URL and max_tries of at least 1")
        self.model = model
        self.server = server
        #: One record for each logical call, in order.
        self.calls: list[Call] = []
        self.connect_s, self.first_token_s, self.idle_s, self.total_s = connect_s, first_token_s, idle_s, total_s
        self.max_tries, self.backoff_s, self.max_wait_s = max_tries, backoff_s, max_wait_s
        self._headers = dict(headers or {})
        self._key = api_key or os.environ.get(KEY_VARIABLE) or NO_KEY
        self._turn = itertools.cycle(self.urls)
        self._clients: dict[str, Any] = {}
        self._loop: asyncio.AbstractEventLoop | None = None

    def __repr__(self) -> str:
        return f"OpenAIModel({', '.join(map(_shown, self.urls))}, model={self.model!r}, {self.source})"

    @property
    def source(self) -> str:
        """Label for results: emulated or measured."""
        return "measured" if self.server is None else "emulated"

    @property
    def log(self) -> list[LogEntry] | None:
        """What the embedded server saw; None if the endpoint is not ours to ask."""
        return None if self.server is None else self.server.log

    async def complete(self, request: ModelRequest, *, on_token: OnToken | None = None) -> ModelReply:
        """Answer a request; cancelling the task closes the stream, so that the server stops.

        Parameters
        ----------
        request : ModelRequest
            What is asked.
        on_token : callable, optional
            Called with every raw piece of text as it comes.

        Returns
        -------
        ModelReply
            The complete answer.

        Raises
        ------
        EndpointError
            One of its kinds here; all name the URL and a remedy.
        """
        call = Call.of(request, len(self.calls))
        self.calls.append(call)
        started = time.perf_counter()
        reader = ReplyReader(request)
        try:
            while True:
                call.tries += 1
                url, reader = next(self._turn), ReplyReader(request)
                try:
                    await self._try(url, call, reader, on_token)
                    reply = reader.reply()
                    break
                except EndpointError as error:
                    failure = self._placed(error, url, request)
                    pause = self._pause(failure, call.tries)
                    if pause is None or reader.chunks:
                        raise failure from None
                    _log.info("try %d at %s: %s; again in %.2f s", call.tries, _shown(url), failure.kind, pause)
                await asyncio.sleep(pause)
        except BaseException as error:
            call.outcome = "aborted" if isinstance(error, asyncio.CancelledError) else "failed"
            call.kind = getattr(error, "kind", "")
            raise
        else:
            call.outcome = "completed"
        finally:
            call.usage, call.wall_s = reader.usage(), time.perf_counter() - started
        return ModelReply(
            text=reply.text,
            finish_reason=reply.finish_reason,
            usage=call.usage,
            tries=call.tries,
            wall_s=call.wall_s,
        )

    async def discover(self) -> str:
        """Ask the first endpoint for the name of its model and take it.

        Returns
        -------
        str
            The name.

        Raises
        ------
        EndpointError
            If the endpoint does not answer or lists no model.
        """
        url = self.urls[0]
        try:
            async with asyncio.timeout(self.first_token_s):
                listed = await self._client(url).models.list()
            self.model = str(listed.data[0].id)
        except (AttributeError, IndexError, TypeError, ValueError):
            raise MalformedReply(
                f"{_shown(url)} lists no models; check the URL (does it end in /v1?) or name the model", url=_shown(url)
            ) from None
        except Exception as error:
            raise self._placed(self._typed(error, "the list of models"), url, None) from None
        return self.model

    async def aclose(self) -> None:
        """Close the connections of this event loop."""
        clients, self._clients = self._clients, {}
        if self._loop is asyncio.get_running_loop():
            for client in clients.values():
                await client.close()

    def _client(self, url: str) -> Any:
        import openai

        loop = asyncio.get_running_loop()
        if self._loop is not loop:
            # Connections belong to a loop; those of one that is gone cannot be closed any more.
            self._clients, self._loop = {}, loop
        if url not in self._clients:
            # A proxy from the environment must not stand between us and our own machine.
            direct = openai.DefaultAsyncHttpxClient(trust_env=False) if _is_local(url) else None
            self._clients[url] = openai.AsyncOpenAI(
                base_url=url,
                api_key=self._key,
                max_retries=0,
                timeout=openai.Timeout(None, connect=self.connect_s),
                default_headers=self._headers,
                http_client=direct,
            )
        return self._clients[url]

    async def _try(self, url: str, call: Call, reader: ReplyReader, on_token: OnToken | None) -> None:
        """Send one HTTP request and feed what comes to the reader."""
        loop, stage = asyncio.get_running_loop(), "the first token"
        last = loop.time() + self.total_s
        handing_on = False
        try:
            async with asyncio.timeout_at(min(last, loop.time() + self.first_token_s)) as limit:
                stream = await self._client(url).chat.completions.create(**self._body(reader.request, call))
                try:
                    media_type = stream.response.headers.get("content-type", "")
                    if "event-stream" not in media_type:
                        chunks = _whole(await stream.response.aread(), media_type)
                    else:
                        chunks = stream
                    async for chunk in chunks:
                        stage = "the next token"
                        limit.reschedule(min(last, loop.time() + self.idle_s))
                        text = reader.feed(chunk.to_dict(warnings=False) if hasattr(chunk, "to_dict") else chunk)
                        if text and on_token is not None:
                            handing_on = True
                            on_token(text)
                            handing_on = False
                finally:
                    await stream.close()
        except EndpointError:
            raise
        except Exception as error:
            if handing_on:
                raise
            raise self._typed(error, stage, streaming=reader.chunks > 0) from None

    def _body(self, request: ModelRequest, call: Call) -> dict[str, Any]:
        body: dict[str, Any] = {
            "model": self.model,
            "messages": request.chat,
            "stream": True,
            "stream_options": {"include_usage": True},
            "temperature": request.temperature,
        }
        optional = {"max_tokens": request.max_tokens, "seed": request.seed, "stop": list(request.stop) or None}
        body |= {name: value for name, value in optional.items() if value is not None}
        if request.json_schema is not None:
            schema = {"name": "reply", "schema": dict(request.json_schema), "strict": True}
            body["response_format"] = {"type": "json_schema", "json_schema": schema}
        who = {"node": request.node, "attempt": request.attempt, "run": request.run, "call": str(call.id)}
        headers = {f"x-revise-{name}": quote(value) for name, value in who.items() if value}
        return body | {"extra_body": dict(request.extra), "extra_headers": headers}

    def _typed(self, error: Exception, stage: str, *, streaming: bool = False) -> EndpointError:
        """Turn whatever the libraries raise into one of our kinds."""
        lineage = {kind.__name__ for kind in type(error).__mro__}
        status = getattr(error, "status_code", None)
        detail = self._scrubbed(str(getattr(error, "message", "") or error))
        if isinstance(status, int):
            said = re.sub(r"^Error code: \d+( - )?", "", detail) or "no reason given"
            return _of_status(status, said, error.response.headers)  # type: ignore[attr-defined]
        if lineage & {"TimeoutError", "APITimeoutError", "TimeoutException"}:
            return EndpointTimeout(
                f"waited for {stage} in vain (connect_s={self.connect_s:g}, first_token_s={self.first_token_s:g}, "
                f"idle_s={self.idle_s:g}, total_s={self.total_s:g}); raise the limit, or see whether the server is stuck"
            )
        if lineage & {"APIConnectionError", "TransportError"}:
            if streaming:
                return StreamCut("the connection broke in the middle of the answer; see whether the server crashed")
            cause = type(error.__cause__ or error).__name__
            return EndpointDown(
                f"nobody answers ({cause}); start the server, correct the URL, or use endpoint='emulated'"
            )
        if "ValueError" in lineage:
            return MalformedReply(f"the response is not JSON ({detail[:120]}); is this an OpenAI-compatible /v1 URL?")
        if "APIError" in lineage:
            body = getattr(error, "body", None)
            code = body.get("code") if isinstance(body, Mapping) else None
            if isinstance(code, int) and 400 <= code < 500:
                return _of_status(code, detail, {})
            return StreamCut(f"the server reported an error in the middle of the answer: {detail}; see its log")
        return MalformedReply(f"the response cannot be read ({type(error).__name__}: {detail})")

    def _placed(self, error: EndpointError, url: str, request: ModelRequest | None) -> Any:
        where = _shown(url) if request is None or not request.node else f"{_shown(url)} for node {request.node!r}"
        return type(error)(
            f"{where}: {error.message}", **{**error.context, "url": _shown(url), "node": request and request.node}
        )

    def _pause(self, error: Any, tries: int) -> float | None:
        """Give the time to wait before the next try; None if there is none."""
        if not error.retryable or tries >= self.max_tries:
            return None
        pause = self.backoff_s * 2.0 ** (tries - 1)
        asked: float | None = error.context.get("retry_after_s")
        if asked is None:
            return min(pause, self.max_wait_s)
        return max(pause, asked) if asked <= self.max_wait_s else None

    def _scrubbed(self, text: str) -> str:
        text = text if self._key == NO_KEY else text.replace(self._key, "***")
        return " ".join(text.split())[:300]


def _of_status(status: int, detail: str, headers: Mapping[str, str]) -> EndpointError:
    more = {"status": status, "retry_after_s": _retry_after_s(headers)}
    if status == 429:
        asked = "" if more["retry_after_s"] is None else f", asks for {more['retry_after_s']:g} s"
        return RateLimited(
            f"too many requests (429{asked}): {detail}; lower the concurrency or raise max_wait_s", **more
        )
    if status == 408 or status == 504:
        return EndpointTimeout(f"the server gave up ({status}): {detail}; lower the load", **more)
    if status >= 500:
        return EndpointDown(f"the server cannot serve ({status}): {detail}; see its log", **more)
    if status in (400, 413, 422) and _OVERFLOW.search(detail):
        return ContextOverflow(f"context overflow ({status}): {detail}; shorten the prompt or lower max_tokens", **more)
    remedy = {
        401: f"set {KEY_VARIABLE}",
        403: f"set {KEY_VARIABLE} to a key with access",
        404: "check the URL (does it end in /v1?) and the model name",
    }.get(status, "correct the request")
    return BadRequest(f"refused ({status}): {detail}; {remedy}", **more)


def _retry_after_s(headers: Mapping[str, str]) -> float | None:
    value = headers.get("retry-after")
    if value is None:
        return None
    with suppress(ValueError):
        return max(0.0, float(value))
    with suppress(ValueError, TypeError):
        return max(0.0, parsedate_to_datetime(value).timestamp() - time.time())
    return None


async def _whole(body: bytes, media_type: str) -> AsyncIterator[Any]:
    """Yield the one completion of an endpoint that answers 200 without streaming."""
    try:
        data = json.loads(body)
    except ValueError:
        raise MalformedReply(
            f"the endpoint answered 200 with {media_type or 'no content type'!r}, {len(body)} bytes that are not JSON; "
            "is there a proxy or a login page before it, or does the URL not end in /v1?"
        ) from None
    error = data.get("error") if isinstance(data, Mapping) else None
    if error:
        text, code = (error.get("message"), error.get("code")) if isinstance(error, Mapping) else (error, None)
        raise _of_status(code if isinstance(code, int) and code >= 400 else 400, str(text)[:300], {})
    yield data


def _shown(url: str) -> str:
    """Give a URL without what could be a secret: user, password and query."""
    parts = urlsplit(url)
    host = parts.netloc.rpartition("@")[2]
    return f"{parts.scheme}://{host}{parts.path}" if parts.scheme and host else url.partition("?")[0]


def _is_local(url: str) -> bool:
    host = urlsplit(url).hostname or ""
    with suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return host == "localhost"


@asynccontextmanager
async def connect(
    endpoint: str = "emulated",
    *,
    model: str | None = None,
    server: Mapping[str, Any] | None = None,
    **options: Any,
) -> AsyncIterator[OpenAIModel]:
    """Open an endpoint, and close what was opened for it.

    Parameters
    ----------
    endpoint : str
        ``"emulated"`` starts the embedded server on loopback; else a base URL, or several with commas between them.
    model : str, optional
        Name of the model; by default the first that the endpoint lists.
    server : mapping, optional
        Arguments of ``EmbeddedServer``.
    **options : Any
        Arguments of ``OpenAIModel``.

    Yields
    ------
    OpenAIModel
        A client; its ``log`` is that of the embedded server, or None.

    Raises
    ------
    ConfigError
        If the endpoint is neither, or server arguments are given for a real one.
    EndpointError
        If the endpoint does not answer.
    """
    if endpoint == "emulated":
        async with EmbeddedServer(**(server or {})) as embedded:
            client = OpenAIModel(embedded.url, model or MODEL, server=embedded, **options)
            try:
                yield client
            finally:
                await client.aclose()
        return
    if server:
        raise ConfigError(f"{_shown(endpoint)} is no embedded server, so {', '.join(server)} cannot be set on it")
    client = OpenAIModel([url.strip() for url in endpoint.split(",")], model or "", **options)
    try:
        if model is None:
            await client.discover()
        yield client
    finally:
        await client.aclose()
