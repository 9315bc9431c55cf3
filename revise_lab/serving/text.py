"""Text of the emulated model: a hash of (prompt, seed), so equality can be tested exactly.

A real model at temperature zero still answers differently under batching. Claims of equality are made with this text
instead: the same prompt and seed give the same words, and one changed token in the prompt changes them. Our choice.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from hashlib import blake2b
from typing import Any

WORDS = re.findall(
    r"\w+",
    """
    able amber anchor april arch atlas autumn basin beacon birch bridge bright cabin canal cedar circle clear
    clever cobalt copper coral corner crystal dawn delta distant dune early east echo ember evening fair falcon
    fern field first flint forest fresh garden gentle glade golden grain granite green grove harbor hazel hidden
    high hill hollow island ivory jade july juniper kind lake lantern large late laurel leaf level light linen
    little local lotus lunar maple marble march meadow mellow mild mirror modest moss narrow neat new night
    noble north oak ocean olive open orchard pearl pine plain planet pocket prairie quartz quick quiet rain
    rapid reed ridge river rose round sage sand scarlet shadow shore silent silver simple slate slow small
    smooth snow solar south spring steady stone summer sunny swift tall tidal timber twin upper valley velvet
    violet warm west
    """,
)

_PIECE = re.compile(r"\s*(?:\w+|[^\w\s])|\s+")


def split_tokens(text: str) -> list[str]:
    """Cut a text into the emulated tokens: words and marks, each with the space before it.

    Parameters
    ----------
    text : str
        Any text.

    Returns
    -------
    list of str
        Pieces whose concatenation is the text.
    """
    return _PIECE.findall(text)


def count_tokens(text: str) -> int:
    """Count the emulated tokens of a text.

    Parameters
    ----------
    text : str
        Any text.

    Returns
    -------
    int
        Number of pieces; not the count that a real tokenizer would give.
    """
    return sum(1 for _ in _PIECE.finditer(text))


def _stream(prompt: str, seed: int | None) -> Iterator[int]:
    """Yield endless 16-bit numbers that depend on every character of the prompt and on the seed."""
    key = blake2b(f"{seed}\0{prompt}".encode(errors="surrogatepass"), digest_size=32).digest()
    block = 0
    while True:
        digest = blake2b(block.to_bytes(8, "big"), key=key).digest()
        yield from (int.from_bytes(digest[i : i + 2], "big") for i in range(0, len(digest), 2))
        block += 1


def hash_text(prompt: str, seed: int | None, n_tokens: int) -> str:
    """Give the words that the emulated model answers with.

    Parameters
    ----------
    prompt : str
        The whole prompt.
    seed : int or None
        Seed of the request.
    n_tokens : int
        Number of words; a longer answer begins with the shorter one.

    Returns
    -------
    str
        Words that depend on nothing but the arguments.
    """
    numbers = _stream(prompt, seed)
    return " ".join(WORDS[next(numbers) % len(WORDS)] for _ in range(n_tokens))


_LEVELS = 2
"""Levels of a type that holds itself; each may be three times as wide as the one above."""


def hash_json(prompt: str, seed: int | None, schema: Mapping[str, Any]) -> str:
    """Give a JSON text that satisfies a simple schema, filled by the same hash.

    Understood are ``type``, ``enum``, ``const``, ``properties``, ``items`` with ``minItems`` and ``maxItems``,
    ``minimum`` and ``maximum``, ``minLength`` and ``maxLength``, ``anyOf`` and ``oneOf``, and ``$ref`` into ``$defs``.
    All properties are filled, required or not; of a type that holds itself, only what is required from the third level on.

    Parameters
    ----------
    prompt : str
        The whole prompt.
    seed : int or None
        Seed of the request.
    schema : mapping
        JSON schema of the answer.

    Returns
    -------
    str
        JSON text.
    """
    return json.dumps(_fill(schema, _stream(prompt, seed), schema), ensure_ascii=False)


def _fill(schema: Mapping[str, Any], numbers: Iterator[int], root: Mapping[str, Any], level: int = 0) -> Any:
    deep = level > _LEVELS
    if "$ref" in schema:
        target: Any = root
        for part in filter(None, str(schema["$ref"]).removeprefix("#").split("/")):
            target = target[part]
        return _fill(target, numbers, root, level + 1)
    if "const" in schema:
        return schema["const"]
    choices = schema.get("enum") or schema.get("anyOf") or schema.get("oneOf")
    if choices:
        if deep and "enum" not in schema:
            choices = [each for each in choices if "$ref" not in each] or choices
        chosen = choices[next(numbers) % len(choices)]
        return chosen if "enum" in schema else _fill(chosen, numbers, root, level)
    kind = schema.get("type", "object" if "properties" in schema else "string")
    if isinstance(kind, list):
        kind = kind[0]
    if kind == "object":
        required = schema.get("required", ())
        parts = {name: {} for name in required} | schema.get("properties", {})
        return {name: _fill(parts[name], numbers, root, level) for name in (required if deep else parts)}
    if kind == "array":
        low = schema.get("minItems", 0 if deep else 1)
        length = low if deep else low + next(numbers) % (max(schema.get("maxItems", low + 2), low) - low + 1)
        return [_fill(schema.get("items", {}), numbers, root, level) for _ in range(length)]
    if kind in ("integer", "number"):
        return _number(schema, kind, next(numbers))
    if kind == "boolean":
        return next(numbers) % 2 == 0
    if kind == "null":
        return None
    return _string(schema, numbers)


def _number(schema: Mapping[str, Any], kind: str, drawn: int) -> int | float:
    low, high = schema.get("minimum"), schema.get("maximum")
    if low is None:
        low = 0 if high is None else high - 100
    if high is None:
        high = low + 100
    if kind == "integer":
        return int(low) + drawn % (int(high) - int(low) + 1)
    return round(low + (high - low) * drawn / 65_535, 3)


def _string(schema: Mapping[str, Any], numbers: Iterator[int]) -> str:
    text = " ".join(WORDS[next(numbers) % len(WORDS)] for _ in range(2))
    while len(text) < schema.get("minLength", 0):
        text += " " + WORDS[next(numbers) % len(WORDS)]
    return text[: schema.get("maxLength", len(text))]


def prompt_text(messages: Sequence[Mapping[str, Any]]) -> str:
    """Give the one text that stands for a list of chat messages.

    Parameters
    ----------
    messages : sequence of mapping
        Messages with a role and a content.

    Returns
    -------
    str
        JSON of the roles and contents in order; different lists give different texts.
    """
    return json.dumps([[m.get("role"), m.get("content")] for m in messages], sort_keys=True, ensure_ascii=False)


def prompt_tokens(messages: Sequence[Mapping[str, Any]]) -> int:
    """Count the emulated tokens of a list of chat messages.

    Parameters
    ----------
    messages : sequence of mapping
        Messages with a role and a content.

    Returns
    -------
    int
        Tokens of the contents and four for each message, about what a chat template adds (assumption).
    """
    contents = (m.get("content") for m in messages)
    return sum(4 + count_tokens(c if isinstance(c, str) else json.dumps(c, ensure_ascii=False)) for c in contents)


def answer(
    messages: Sequence[Mapping[str, Any]],
    seed: int | None,
    *,
    max_tokens: int | None = None,
    reply_tokens: int = 32,
    json_schema: Mapping[str, Any] | None = None,
    ignore_eos: bool = False,
    stop: Sequence[str] = (),
) -> tuple[list[str], str]:
    """Give the emulated reply to a chat request.

    Parameters
    ----------
    messages : sequence of mapping
        Chat messages.
    seed : int or None
        Seed of the request.
    max_tokens : int, optional
        Limit of the request.
    reply_tokens : int
        Words after which the emulated model ends a reply by itself.
    json_schema : mapping, optional
        Schema that the reply must satisfy.
    ignore_eos : bool
        Go on to ``max_tokens``, as SGLang and vLLM do when told to.
    stop : sequence of str
        Texts before which the reply ends.

    Returns
    -------
    pieces : list of str
        Tokens of the reply.
    finish_reason : str
        ``"stop"``, or ``"length"`` if the limit cut the reply.
    """
    prompt = prompt_text(messages)
    if json_schema is not None:
        text = hash_json(prompt, seed, json_schema)
    else:
        text = hash_text(prompt, seed, max_tokens if ignore_eos and max_tokens else reply_tokens)
    cuts = [text.index(mark) for mark in stop if mark in text]
    pieces = split_tokens(text[: min(cuts)] if cuts else text)
    if max_tokens is not None and (len(pieces) > max_tokens or (ignore_eos and json_schema is None and not cuts)):
        return pieces[:max_tokens], "length"
    return pieces, "stop"
