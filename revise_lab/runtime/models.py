"""Models without an endpoint: one that follows a script, one that replays a recording, and the recorder."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, TextIO

from revise_lab.errors import ConfigError, EndpointError
from revise_lab.runtime.reply import Call, Model, ModelReply, ModelRequest, OnToken, Usage
from revise_lab.serving.text import answer, count_tokens, hash_text, prompt_tokens, split_tokens

__all__ = ["RecordedModel", "Recorder", "ScriptedModel", "hash_text"]


class _Player:
    """Plays a known reply token by token and keeps the list of calls."""

    def __init__(self, delay_s: float = 0.0) -> None:
        self.delay_s = delay_s
        #: One record for each call, in order.
        self.calls: list[Call] = []

    async def aclose(self) -> None:
        """Do nothing: no connection is held."""

    @asynccontextmanager
    async def _recorded(self, request: ModelRequest) -> AsyncIterator[Call]:
        call = Call.of(request, len(self.calls))
        call.tries, started = 1, time.perf_counter()
        self.calls.append(call)
        try:
            yield call
            call.outcome = "completed"
        except BaseException as error:
            call.outcome = "aborted" if isinstance(error, asyncio.CancelledError) else "failed"
            call.kind = getattr(error, "kind", "")
            raise
        finally:
            call.wall_s = time.perf_counter() - started

    async def _play(self, call: Call, reply: ModelReply, on_token: OnToken | None) -> ModelReply:
        """Hand the reply on piece by piece; what was handed on when a cancellation lands is what it has cost."""
        whole = reply.usage
        call.usage = replace(whole, completion_tokens=0)
        pieces = split_tokens(reply.text)
        for done, piece in enumerate(pieces, start=1):
            await asyncio.sleep(self.delay_s)
            call.usage = replace(whole, completion_tokens=done)
            if on_token is not None:
                on_token(piece)
        if not pieces:
            await asyncio.sleep(self.delay_s)
        call.usage = whole
        return reply


class ScriptedModel(_Player):
    """A model that answers from a script.

    Parameters
    ----------
    replies : list, callable, mapping or None
        A list is used up in order. A callable gets the request. A mapping is asked for the node, then for the prompt,
        then for ``"*"``; its values may be lists or callables again. An answer is a text, a ModelReply, an exception to
        raise, or any other value, which is sent as JSON. None answers with the hash of (prompt, seed), like the
        embedded server.
    delay_s : float
        Time before each token.
    tokens : int
        Length of a hashed answer, if the request does not limit it further.
    """

    def __init__(
        self,
        replies: Sequence[Any] | Callable[[ModelRequest], Any] | Mapping[str, Any] | None = None,
        *,
        delay_s: float = 0.0,
        tokens: int = 32,
    ) -> None:
        super().__init__(delay_s)
        self.tokens = tokens
        self._script = _copied(replies)

    async def complete(self, request: ModelRequest, *, on_token: OnToken | None = None) -> ModelReply:
        """Answer from the script, token by token; cancellable at every token.

        Parameters
        ----------
        request : ModelRequest
            What is asked.
        on_token : callable, optional
            Called with every token.

        Returns
        -------
        ModelReply
            The scripted answer.

        Raises
        ------
        EndpointError
            If the script has no answer for the request.
        """
        async with self._recorded(request) as call:
            said = self._said(self._script, request)
            if isinstance(said, BaseException):
                raise said
            return await self._play(call, said, on_token)

    def _said(self, script: Any, request: ModelRequest) -> Any:
        if script is None:
            pieces, reason = answer(
                request.chat,
                request.seed,
                max_tokens=request.max_tokens,
                reply_tokens=self.tokens,
                json_schema=request.json_schema,
                stop=request.stop,
            )
            return _reply("".join(pieces), request, reason)
        if callable(script):
            return _reply(script(request), request)
        if isinstance(script, list):
            if not script:
                raise _unanswered(request, "the script has no reply left")
            return _reply(script.pop(0), request)
        names = (request.node, request.prompt, "*")
        found = next((name for name in names if name in script), None)
        if found is None:
            raise _unanswered(request, f"the script has replies for {', '.join(map(repr, script))} only")
        inner = script[found]
        return self._said(inner, request) if callable(inner) or isinstance(inner, list) else _reply(inner, request)


class RecordedModel(_Player):
    """A model that replays a recording by the hash of the canonical request.

    A request that was recorded several times gets its replies in the order of the recording, and the last one again
    when they are used up.

    Parameters
    ----------
    recording : path or iterable of mapping
        A file written by ``Recorder``, or its rows.

    Raises
    ------
    ConfigError
        If the file does not exist or a line of it is no recorded reply.
    """

    def __init__(self, recording: str | Path | Iterable[Mapping[str, Any]]) -> None:
        super().__init__()
        self.name = str(recording) if isinstance(recording, str | Path) else "the given rows"
        self._replies: dict[str, list[ModelReply]] = {}
        rows = _rows(Path(recording)) if isinstance(recording, str | Path) else recording
        for number, row in enumerate(rows, start=1):
            try:
                reply = ModelReply(text=row["text"], finish_reason=row["finish_reason"], usage=Usage(**row["usage"]))
                self._replies.setdefault(row["key"], []).append(reply)
            except (KeyError, TypeError) as error:
                raise ConfigError(f"{self.name}, line {number}: no recorded reply ({error}); record it again") from None

    async def complete(self, request: ModelRequest, *, on_token: OnToken | None = None) -> ModelReply:
        """Replay the reply to a request.

        Parameters
        ----------
        request : ModelRequest
            What is asked.
        on_token : callable, optional
            Called with every token.

        Returns
        -------
        ModelReply
            The recorded answer.

        Raises
        ------
        EndpointError
            If the request was never recorded.
        """
        async with self._recorded(request) as call:
            replies = self._replies.get(request.key)
            if replies is None:
                raise _unanswered(request, f"{self.name} has no reply to this request ({request.key}); record it anew")
            return await self._play(call, replies[0] if len(replies) == 1 else replies.pop(0), on_token)


class Recorder:
    """Wraps a model and writes every completed call as a line of JSON: request, reply and usage, no credentials.

    Parameters
    ----------
    model : Model
        The model that answers.
    path : path
        File to write. Lines go to a file beside it that takes the name when the recorder is closed.

    Raises
    ------
    ConfigError
        If the file exists.
    """

    def __init__(self, model: Model, path: str | Path) -> None:
        self.model, self.path = model, Path(path)
        if self.path.exists():
            raise ConfigError(f"{self.path} exists; name another file, or move the old recording away")
        self._part = self.path.with_name(self.path.name + ".part")
        self._file: TextIO | None = None

    async def complete(self, request: ModelRequest, *, on_token: OnToken | None = None) -> ModelReply:
        """Pass the request on and write down the reply.

        Parameters
        ----------
        request : ModelRequest
            What is asked.
        on_token : callable, optional
            Passed on.

        Returns
        -------
        ModelReply
            The answer of the model.
        """
        reply = await self.model.complete(request, on_token=on_token)
        if self._file is None:
            self._part.parent.mkdir(parents=True, exist_ok=True)
            self._file = self._part.open("w", encoding="utf-8")
        row = {
            "key": request.key,
            "node": request.node,
            "attempt": request.attempt,
            "request": request.canonical(),
            "text": reply.text,
            "finish_reason": reply.finish_reason,
            "usage": asdict(reply.usage),
        }
        self._file.write(json.dumps(row) + "\n")
        self._file.flush()
        return reply

    async def aclose(self) -> None:
        """Close the model and give the recording its name."""
        await self.model.aclose()
        if self._file is not None:
            self._file.close()
            self._file = None
            self._part.replace(self.path)


def _copied(script: Any) -> Any:
    """Copy the lists of a script, because they are used up."""
    if isinstance(script, Mapping):
        return {name: _copied(value) if isinstance(value, list) else value for name, value in script.items()}
    return list(script) if isinstance(script, Sequence) and not isinstance(script, str) else script


def _reply(said: Any, request: ModelRequest, reason: str = "stop") -> Any:
    if isinstance(said, ModelReply | BaseException):
        return said
    text = said if isinstance(said, str) else json.dumps(said, ensure_ascii=False)
    usage = Usage(prompt_tokens(request.chat), count_tokens(text), 0, "exact")
    return ModelReply(text=text, finish_reason=reason, usage=usage)


def _unanswered(request: ModelRequest, why: str) -> EndpointError:
    return EndpointError(
        f"no reply for node {request.node or '?'!r}, attempt {request.attempt or '?'!r}: {why}",
        node=request.node,
        attempt=request.attempt,
        key=request.key,
        kind="unanswered",
        retryable=False,
    )


def _rows(path: Path) -> Iterable[Any]:
    if not path.exists():
        raise ConfigError(f"no recording at {path}; write one with Recorder(model, path)", path=str(path))
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            try:
                yield json.loads(line)
            except ValueError as error:
                raise ConfigError(f"{path}, line {number}: not JSON ({error}); record it again") from None
