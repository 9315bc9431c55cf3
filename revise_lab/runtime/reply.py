"""What is asked of a model and what comes back: requests, replies, usage, typed errors, and reading of chunks.

Endpoints that speak one protocol differ in what they leave out. Every rule here answers a report about a real server:
choices that are empty, null or missing; a usage that is absent, partial or text; a stream that ends without a finish
reason; an answer that arrives as reasoning, or behind half a think block. Unknown is never turned into zero.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from hashlib import blake2b
from typing import Any, ClassVar, Literal, Protocol

from revise_lab.errors import ConfigError, EndpointError

OnToken = Callable[[str], object]

CHARS_PER_TOKEN = 4  # assumption for estimates; English text under common vocabularies


class EndpointDown(EndpointError):
    """Nobody answers at the URL, or the server says that it cannot serve now."""

    kind: ClassVar[str] = "endpoint_down"
    retryable: ClassVar[bool] = True


class EndpointTimeout(EndpointError):
    """The endpoint was silent for longer than it was given."""

    kind: ClassVar[str] = "endpoint_timeout"
    retryable: ClassVar[bool] = True


class RateLimited(EndpointError):
    """The endpoint asks us to come back later (429)."""

    kind: ClassVar[str] = "rate_limited"
    retryable: ClassVar[bool] = True


class BadRequest(EndpointError):
    """The endpoint refuses the request and would refuse it again."""

    kind: ClassVar[str] = "bad_request"
    retryable: ClassVar[bool] = False


class ContextOverflow(BadRequest):
    """Prompt and ``max_tokens`` together exceed the context of the model."""

    kind: ClassVar[str] = "context_overflow"


class MalformedReply(EndpointError):
    """The endpoint answered with something that is not a usable completion."""

    kind: ClassVar[str] = "malformed_reply"
    retryable: ClassVar[bool] = False


class StreamCut(EndpointError):
    """The stream ended before a finish reason: what came is not an answer."""

    kind: ClassVar[str] = "stream_cut"
    retryable: ClassVar[bool] = True


@dataclass(frozen=True, kw_only=True)
class ModelRequest:
    """One logical model call.

    Parameters
    ----------
    prompt : str
        Text of a single user message; give this or ``messages``.
    messages : sequence of mapping
        Chat messages.
    max_tokens : int, optional
        Limit of the answer; None leaves it to the server.
    seed : int, optional
        Seed of the sampler.
    temperature : float
        Sampling temperature.
    json_schema : mapping, optional
        Schema that the answer must satisfy.
    stop : sequence of str
        Texts before which the answer ends.
    extra : mapping
        Further fields of the body, such as ``chat_template_kwargs``.
    node, attempt, run : str
        Who asks. Sent as headers, so that the log of a server can be joined with the plan; no part of the identity.

    Raises
    ------
    ConfigError
        If neither or both of ``prompt`` and ``messages`` are given.
    """

    prompt: str | None = field(default=None, repr=False)
    messages: Sequence[Mapping[str, Any]] = field(default=(), repr=False)
    max_tokens: int | None = None
    seed: int | None = None
    temperature: float = 0.0
    json_schema: Mapping[str, Any] | None = field(default=None, repr=False)
    stop: Sequence[str] = ()
    extra: Mapping[str, Any] = field(default_factory=dict, repr=False)
    node: str = ""
    attempt: str = ""
    run: str = ""

    def __post_init__(self) -> None:
        if (self.prompt is None) == (not self.messages):
            raise ConfigError(
                f"the model request of node {self.node or '?'!r} needs a prompt or messages, and not both",
                node=self.node,
            )

    @property
    def chat(self) -> list[dict[str, Any]]:
        """The messages; a prompt is one user message."""
        if self.prompt is not None:
            return [{"role": "user", "content": self.prompt}]
        return [dict(message) for message in self.messages]

    def canonical(self) -> dict[str, Any]:
        """Give what identifies the request: everything sent except who asks.

        Returns
        -------
        dict
            JSON-like; a prompt and the same text as one user message are equal.
        """
        fields = {
            "messages": self.chat,
            "max_tokens": self.max_tokens,
            "seed": self.seed,
            "temperature": self.temperature,
            "json_schema": self.json_schema,
            "stop": list(self.stop) or None,
            "extra": dict(self.extra) or None,
        }
        return {name: value for name, value in fields.items() if value is not None}

    @cached_property
    def key(self) -> str:
        """Hash of the canonical request, in hex."""
        text = json.dumps(self.canonical(), sort_keys=True, separators=(",", ":"))
        return blake2b(text.encode(), digest_size=16).hexdigest()


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of one call; a field of None is unknown, which is not 0.

    ``source`` is exact (prompt and completion as the endpoint counted them), estimated (at least one of them from the
    streamed text) or unknown (nothing came that could be counted).
    """

    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cached_tokens: int | None = None
    source: Literal["exact", "estimated", "unknown"] = "unknown"


@dataclass(frozen=True, kw_only=True)
class ModelReply:
    """A complete answer.

    ``text`` is without the think block. ``tries`` counts HTTP requests, of which all but the last gave nothing.
    """

    text: str = field(repr=False)
    finish_reason: str = "stop"
    usage: Usage = Usage()
    tries: int = 1
    wall_s: float = 0.0
    aborted: bool = False

    @property
    def json(self) -> Any:
        """The text as a JSON value; MalformedReply if it is not one."""
        try:
            return json.loads(self.text)
        except ValueError as error:
            remedy = (
                "it was cut at max_tokens: raise it"
                if self.finish_reason == "length"
                else "pass json_schema, or ask for JSON only"
            )
            raise MalformedReply(
                f"the reply ({len(self.text)} characters) is not JSON: {error}; {remedy}",
                finish_reason=self.finish_reason,
            ) from None


@dataclass(slots=True)
class Call:
    """One logical call as the client saw it; models keep a list of them.

    ``outcome`` is running, completed, aborted (the caller was cancelled) or failed, with the ``kind`` of the error.
    """

    id: int
    node: str
    attempt: str
    run: str
    request: dict[str, Any] = field(repr=False)
    outcome: Literal["running", "completed", "aborted", "failed"] = "running"
    kind: str = ""
    usage: Usage = Usage()
    tries: int = 0
    wall_s: float = 0.0

    @classmethod
    def of(cls, request: ModelRequest, number: int) -> Call:
        """Open the record of a request.

        Parameters
        ----------
        request : ModelRequest
            What is asked.
        number : int
            Its place in the list of the model.

        Returns
        -------
        Call
            A running call.
        """
        return cls(number, request.node, request.attempt, request.run, request.canonical())


class Model(Protocol):
    """What the runtime needs of a model: the client and the doubles have it."""

    async def complete(self, request: ModelRequest, *, on_token: OnToken | None = None) -> ModelReply:
        """Answer a request; cancelling the task stops the generation.

        Parameters
        ----------
        request : ModelRequest
            What is asked.
        on_token : callable, optional
            Called with every raw piece of text as it comes, a leading think block included.

        Returns
        -------
        ModelReply
            The complete answer.
        """
        ...

    async def aclose(self) -> None:
        """Free what the model holds."""
        ...


def _is_json(text: str) -> bool:
    if text[:1] not in ("{", "["):
        return False
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


def strip_thinking(text: str) -> str | None:
    """Remove the leading think block of a reply.

    Only a leading block is one: a literal tag later in the text, or inside JSON, is part of the answer. With the opening
    tag lost (some chat templates put it into the prompt) the text is split at the last closing tag.

    Parameters
    ----------
    text : str
        Raw content.

    Returns
    -------
    str or None
        The answer; None if the block never closes, so that there is no answer.
    """
    body = text.lstrip()
    leading = body.startswith("<think>")
    first_close, first_open = body.find("</think>"), body.find("<think>")
    if first_close < 0:
        return None if leading else text
    if _is_json(body) or (not leading and 0 <= first_open < first_close):
        return text
    rests = [rest.lstrip() for rest in _rests(body)]
    for rest in rests:
        if _is_json(rest):
            return rest
    return rests[_matching(body)] if leading else rests[-1]


def _rests(body: str) -> list[str]:
    parts = body.split("</think>")
    return ["</think>".join(parts[i:]) for i in range(1, len(parts))]


def _matching(body: str) -> int:
    """Give the number of the closing tag that ends the leading block; the last one if they do not balance."""
    depth = 0
    for number, part in enumerate(body.split("</think>")[:-1]):
        depth += part.count("<think>") - 1
        if depth == 0:
            return number
    return -1


def _count(value: Any) -> int | None:
    """Read a token count; text counts if it is a number, and anything else is unknown."""
    if isinstance(value, str) and value.strip().isdigit():
        return int(value)
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value < 0:
        return None
    return int(value)


class ReplyReader:
    """Collects the chunks of one try, or the body of one that did not stream, and judges them at the end.

    Parameters
    ----------
    request : ModelRequest
        What was asked.
    """

    def __init__(self, request: ModelRequest) -> None:
        self.request = request
        self.chunks = 0
        self._keys: set[str] = set()
        self._chosen = False
        self._content: list[str] = []
        self._thoughts: list[str] = []
        self._finish_reason: str | None = None
        self._usage: Mapping[str, Any] = {}

    def feed(self, chunk: Any) -> str:
        """Take one chunk.

        Parameters
        ----------
        chunk : Any
            Parsed JSON of the chunk.

        Returns
        -------
        str
            New text of the answer, often empty.

        Raises
        ------
        MalformedReply
            If the chunk is no JSON object.
        """
        if not isinstance(chunk, Mapping):
            raise MalformedReply(
                f"the endpoint sent a {type(chunk).__name__} where a completion object belongs; "
                "check that the URL is an OpenAI-compatible /v1 endpoint"
            )
        self._keys |= set(chunk)
        if isinstance(chunk.get("usage"), Mapping):
            self._usage = chunk["usage"]
        choices = chunk.get("choices")
        # Azure opens with an empty list and every server closes with one when usage is asked for.
        if not choices or not isinstance(choices, Sequence) or not isinstance(choices[0], Mapping):
            return ""
        self._chosen = True
        choice = choices[0]
        self._finish_reason = choice.get("finish_reason") or self._finish_reason
        delta = choice.get("delta") or choice.get("message") or {}
        thought, text = delta.get("reasoning_content") or delta.get("reasoning"), delta.get("content")
        if isinstance(thought, str):
            self._thoughts.append(thought)
        if not isinstance(text, str):
            text = ""
        self._content.append(text)
        self.chunks += bool(thought or text)
        return text

    def usage(self) -> Usage:
        """Give the tokens as far as they are known, also for a stream that was left.

        Returns
        -------
        Usage
            Exact, estimated or unknown.
        """
        streamed = sum(map(len, self._content)) + sum(map(len, self._thoughts))
        details = self._usage.get("prompt_tokens_details")
        cached = _count(details.get("cached_tokens")) if isinstance(details, Mapping) else None
        prompt, completion = _count(self._usage.get("prompt_tokens")), _count(self._usage.get("completion_tokens"))
        if completion == 0 and streamed:
            completion = None  # some proxies fill in zeros
        if prompt and completion is not None:
            return Usage(prompt, completion, cached, "exact")
        if not self._chosen:
            return Usage(prompt or None, completion, cached)
        asked = sum(len(str(message.get("content"))) for message in self.request.chat)
        return Usage(
            prompt or max(1, math.ceil(asked / CHARS_PER_TOKEN)),
            max(1, self.chunks, math.ceil(streamed / CHARS_PER_TOKEN)) if completion is None else completion,
            cached,
            "estimated",
        )

    def reply(self) -> ModelReply:
        """Judge what came.

        Returns
        -------
        ModelReply
            The answer.

        Raises
        ------
        MalformedReply
            If no chunk held a choice, or the answer never left its think block.
        StreamCut
            If nothing came, or it ended without a finish reason.
        """
        if self._keys and not self._chosen:
            keys = ", ".join(sorted(self._keys))
            raise MalformedReply(
                f"the response has no choices (its keys: {keys}); check the model name and the log of the server",
                keys=sorted(self._keys),
            )
        if self._finish_reason in (None, "abort", "error"):
            how = f"with finish reason {self._finish_reason!r}" if self._finish_reason else "without a finish reason"
            raise StreamCut(
                f"the stream ended after {self.chunks} chunks {how}, so it is no answer; "
                "ask again, and look for a proxy or a crash if it repeats",
                usage=self.usage(),
            )
        text = "".join(self._content)
        answer = strip_thinking(text)
        if not text and self._thoughts:
            # A reasoning parser that thinks in vain: without thinking the whole answer lands in the other field.
            answer = strip_thinking("".join(self._thoughts)) if self._finish_reason == "stop" else None
        if answer is None:
            raise MalformedReply(
                f"the reply ended inside its think block (finish reason {self._finish_reason!r}); raise max_tokens "
                f"({self.request.max_tokens}) or turn thinking off with extra={{'chat_template_kwargs': "
                "{'enable_thinking': False}}",
                usage=self.usage(),
            )
        return ModelReply(text=answer, finish_reason=self._finish_reason, usage=self.usage())
