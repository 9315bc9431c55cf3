"""Probes of a server: which requests to send, and what the times of their text show.

A lone request shows a step of prefill (the time to its first text) and steps of decoding (the pace of its text); streams
that are live together show the step of a batch. Tokens are those that the server counts, never the chunks in which they
come. Everything here is arithmetic on times that a shell has measured, over HTTP or in virtual time.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from revise_lab.errors import ConfigError

from .cost import StepRow

SHORTEST_TOKENS = 12
"""Tokens over which a pace is worth a row."""
CLOSED_AFTER_CHUNKS = 6


class Probe(NamedTuple):
    """Streams that are sent together.

    ``n_late`` of them wait until the others decode, ``n_closed`` are closed once text has come, both at the end of the
    list. Probes with the same ``prompt`` send the same one, others one that no cache can know.
    """

    kind: str
    prompts: tuple[int, ...]
    outputs: tuple[int, ...]
    n_late: int = 0
    n_closed: int = 0
    prompt: str = ""
    tenant: str = ""

    def __str__(self) -> str:
        sizes = [f"{min(x)}" if min(x) == max(x) else f"{min(x)}..{max(x)}" for x in (self.prompts, self.outputs)]
        return f"{self.kind} x{len(self.prompts)}, {sizes[0]} tokens in, {sizes[1]} out"


class Stream(NamedTuple):
    """What a client saw of one request; ``completion_tokens`` is 0 where the server never told (a closed stream)."""

    sent_s: float
    chunk_s: tuple[float, ...]
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0


class Seen(NamedTuple):
    """What a probe has shown.

    ``closed_s`` is when streams were closed, ``freed_s`` when the server was first seen without them, if it can be asked.
    """

    probe: Probe
    streams: tuple[Stream, ...]
    closed_s: float | None = None
    freed_s: float | None = None


# --- what to send ----------------------------------------------------------------------------------------------------


def plan(max_context: int = 8704, slots: int = 64, requests: int | None = None, seed: int = 0) -> list[Probe]:
    """Return the probes, repeats apart from each other so that a drift of the server meets all of them.

    Parameters
    ----------
    max_context : int
        Longest prompt and answer together, in tokens.
    slots : int
        Most streams at once; should not be more than the server decodes together.
    requests : int, optional
        Most requests in all; repeats go first, then whatever else no longer fits.
    seed : int
        Draws the held-out mixed requests.
    """
    import numpy as np

    out = max(16, min(128, max_context // 4))
    spare = 32 + max_context // 64  # for the template around a prompt, and for lengths that are only nearly met
    longest = max_context - out - spare
    if longest < 128 or slots < 1:
        raise ConfigError(
            f"max_context={max_context}, slots={slots} leaves no room for probes - give 256 and 1 or more"
        )
    sizes = [n for n in (64, 256, 1024, 4096, 8192) if n <= longest]
    if longest > 1.25 * sizes[-1]:
        sizes.append(longest)
    many = sorted({b for b in (1, 4, 16, 32, 64) if b <= slots} | {min(slots, 64)})
    short, middle = min(512, longest // 2), sizes[len(sizes) // 2]
    least = max(48, short // 4)  # a template alone may take 40
    few, wide = min(8, slots - 1), min(16, slots)
    rng = np.random.default_rng(seed)

    def mixed(b: int) -> Probe:
        prompts = np.exp(rng.uniform(np.log(48), np.log(max(64, longest / math.sqrt(b))), b)).astype(int).tolist()
        return Probe("mixed", tuple(prompts), (out,) * b)

    idle = [Probe("idle", (n,), (2,)) for n in sizes]
    decode = [Probe("decode", (n,), (out,)) for n in sorted({min(128, longest // 2), middle, sizes[-1]})]
    batches = [Probe("batch", (short,) * b, (out,) * b) for b in many if b > 1]
    same = [Probe("prefix", (min(4096, longest),), (2,), prompt="same", tenant=who) for who in ("a", "a", "b")]
    held = [[mixed(1), mixed(1), mixed(min(4, slots))], [mixed(1), mixed(min(8, slots)), mixed(wide)]]
    # Who stays outlives the closed ones, so that their end shows if the server lets them run to it.
    last = min(1024, max_context - least - spare)
    abort = Probe("abort", (least,) * (few + 1), (last,) + (last // 2,) * few, n_closed=max(1, few))
    beside = Probe("interference", (least,) * few + (sizes[-1],), (out,) * few + (2,), n_late=1)
    full = Probe("batch", (min(4096, longest),) * wide, (out,) * wide)
    first = [*idle, *decode, *held[0], *batches[:1], abort, *same]
    if slots > 1:
        first += [beside, *batches[1:2], full]
    left, chosen = math.inf if requests is None else requests, []
    for probe in [*first, *idle, *decode, *batches[2:], *held[1], *idle]:
        if len(probe.prompts) <= left:
            left -= len(probe.prompts)
            chosen.append(probe)
    if not any(probe.kind == "mixed" for probe in chosen):
        raise ConfigError(f"requests={requests} leaves none to hold out - give {len(idle) + len(decode) + 6} or more")
    return chosen


# --- what it shows ---------------------------------------------------------------------------------------------------


def together(streams: Sequence[Stream]) -> StepRow | None:
    """Return the step of a batch from the time in which all its streams are live, None if that is too short."""
    if any(len(each.chunk_s) < 3 or each.completion_tokens < SHORTEST_TOKENS for each in streams):
        return None
    begin, end = max(each.chunk_s[0] for each in streams), min(each.chunk_s[-1] for each in streams)
    paces, contexts = [], 0.0
    for each in streams:
        inside = [i for i, at_s in enumerate(each.chunk_s) if begin <= at_s <= end]
        tokens = (each.completion_tokens - 1) / (len(each.chunk_s) - 1)
        if len(inside) < 3 or (inside[-1] - inside[0]) * tokens < SHORTEST_TOKENS - 2:
            return None
        took_s = each.chunk_s[inside[-1]] - each.chunk_s[inside[0]]
        paces.append(took_s / (tokens * (inside[-1] - inside[0])))
        contexts += each.prompt_tokens + 1 + tokens * (inside[0] + inside[-1]) / 2
    return StepRow(0, len(streams), contexts, 0, sum(paces) / len(paces))


def step_rows(seen: Iterable[Seen]) -> list[StepRow]:
    """Return the steps that probes have shown; only those without late or closed streams count."""
    rows = []
    for probe, streams, *_ in seen:
        if probe.n_late or probe.n_closed:
            continue
        if len(streams) == 1 and streams[0].chunk_s:
            (one,) = streams
            n = max(1, one.prompt_tokens - one.cached_tokens)
            rows.append(StepRow(n, 0, 0, n * (one.cached_tokens + n / 2), one.chunk_s[0] - one.sent_s))
        if row := together(streams):
            rows.append(row)
    return rows


def interference(seen: Seen) -> tuple[str, float] | None:
    """Tell how a long prompt meets streams that decode: the longest silence of theirs, as a share of its prefill."""
    *others, late = seen.streams
    if not late.chunk_s:
        return None
    first_s = late.chunk_s[0]
    gaps = [
        (b - a) / (first_s - late.sent_s)
        for each in others
        for a, b in zip(each.chunk_s, each.chunk_s[1:], strict=False)
        if b > late.sent_s and a < first_s
    ]
    return None if not gaps else ("prefill first" if max(gaps) > 0.6 else "mixed", max(gaps))


def prefix_saving(seen: Sequence[Seen]) -> dict[str, Any] | None:
    """Tell what the same prompt costs again, for the same tenant and for another."""
    if len(seen) < 3 or not all(each.streams[0].chunk_s for each in seen):
        return None
    first, again, other = (each.streams[0] for each in seen[:3])
    took_s = [each.chunk_s[0] - each.sent_s for each in (first, again, other)]
    return {
        "prompt_tokens": first.prompt_tokens,
        "cached_tokens": [each.cached_tokens for each in (first, again, other)],
        "first_text_s": took_s,
        "shared_between_tenants": other.cached_tokens > other.prompt_tokens / 2,
    }


def abort_delay(seen: Seen) -> tuple[float | None, str] | None:
    """Return how long closed streams go on (None: to their end) and how that was seen; None if it was not.

    A server that can be asked how many it runs is believed; else the pace of the stream that stays must tell: it picks up
    when the others are gone, if they were many enough to slow it down.
    """
    if seen.closed_s is None or not seen.streams[0].chunk_s:
        return None
    stays, closed_s = seen.streams[0], seen.closed_s
    together_s = max(each.chunk_s[0] for each in seen.streams if each.chunk_s)
    # The last chunk may be a short one.
    chunk_s = [at_s for at_s in stays.chunk_s[:-1] if at_s >= together_s]
    if len(chunk_s) < 2:
        return None
    if seen.freed_s is not None:
        delay_s, how = max(0.0, seen.freed_s - closed_s), "asked the server"
    elif (found := _change(chunk_s, closed_s)) is not None:
        delay_s, how = found, "pace of the stream that stayed"
    else:
        return None
    tokens = (stays.completion_tokens or len(stays.chunk_s)) / len(stays.chunk_s)
    to_the_end_s = (chunk_s[-1] - chunk_s[0]) / (len(chunk_s) - 1) / tokens * seen.probe.outputs[-1]
    return (None if delay_s > 0.7 * to_the_end_s else delay_s), how


def _change(chunk_s: Sequence[float], closed_s: float, least: float = 1.06) -> float | None:
    """Return when, after streams were closed, the pace of another rises for good, by least squares on its gaps."""
    import numpy as np

    at, gaps = np.array(chunk_s[1:]), np.diff(chunk_s)
    after = np.flatnonzero(at > closed_s)
    best: tuple[float, float, float] | None = None
    for i in after[:-4]:
        slow, fast = gaps[:i], gaps[i:]
        if len(slow) < 4:
            continue
        left = float(((slow - slow.mean()) ** 2).sum() + ((fast - fast.mean()) ** 2).sum())
        if best is None or left < best[0]:
            best = left, float(at[i] - gaps[i]), float(slow.mean() / fast.mean())
    return None if best is None or best[2] < least else max(0.0, best[1] - closed_s)
