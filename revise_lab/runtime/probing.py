"""Probes over HTTP: requests of known lengths to one OpenAI-compatible server, and when their text came.

They go through the client that everything else uses, one try each and always streamed. What the server tells of itself
is collected where it has pages for that; nothing depends on them.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import re
import socket
import time
import urllib.error
import urllib.request
from contextlib import suppress
from typing import Any
from urllib.parse import urlsplit

from revise_lab.errors import ConfigError, EndpointError
from revise_lab.runtime.endpoint import KEY_VARIABLE, BadRequest, ModelRequest, OpenAIModel, Usage
from revise_lab.serving.probes import CLOSED_AFTER_CHUNKS, Probe, Seen, Stream

_WORDS = ["one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"]
_EXACT: tuple[dict[str, Any], ...] = (
    {"ignore_eos": True, "min_tokens": True, "chat_template_kwargs": {"enable_thinking": False}},
    {"ignore_eos": True},
    {},
)
"""Fields that make a length exact, most first; a server that knows one refuses none or ignores it."""
_BLOCKS = ("num_gpu_blocks", "block_size")
_RUNNING = re.compile(
    r"^[\w:]*(?:num_requests_running|num_running_reqs|requests_processing|requests_running)(?:\{.*\})?\s+(\S+)$", re.M
)


class Prober:
    """Sends probes to one endpoint and keeps the times.

    Parameters
    ----------
    base_url, model : str
        Where, and what.
    nonce : str
        Begins every prompt, so that no cache knows it from another run.

    Attributes
    ----------
    model : OpenAIModel
        The client.
    """

    def __init__(self, base_url: str, model: str, nonce: str) -> None:
        self.model = OpenAIModel(base_url, model, max_tries=1, first_token_s=600.0, idle_s=120.0)
        self.nonce, self.exact = nonce, _EXACT[0]
        self._root = base_url.rstrip("/").removesuffix("/v1")
        self._sent = 0
        self._fixed_tokens, self._word_tokens = 0.0, 1.0
        self._pages: list[str] = []

    async def warm_up(self) -> dict[str, Any]:
        """Find out what the server is, which fields it takes and how long prompts become; three requests."""
        name = self.model.model
        listed = await asyncio.to_thread(self._json, "/v1/models")
        models = {str(row.get("id")): row for row in (listed or {}).get("data", ()) if isinstance(row, dict)}
        aliases = {alias for row in models.values() for alias in row.get("aliases") or ()}
        if models and name not in {*models, *aliases}:
            raise ConfigError(
                f"the server has no model {name!r}; it has {', '.join(models)} - pass one of them as --model"
            )
        sizes = []
        for n_words in (8, 40, 24):
            sizes.append((n_words, self._counted(await self._fitting(n_words))[0]))
        (a, at_a), (b, at_b), _ = sizes
        self._word_tokens = max(0.5, (at_b - at_a) / (b - a))
        self._fixed_tokens = at_a - self._word_tokens * a
        self._pages = [
            page for page in ("/metrics", "/slots") if await asyncio.to_thread(self._running, page) is not None
        ]
        found = await asyncio.to_thread(self._describe, models.get(name, {}))
        trips = [await asyncio.to_thread(self._round_trip) for _ in range(5)]
        return found | {"round_trip_s": min(trips), "fields": [*self.exact], "running_from": self._pages}

    async def measure(self, probe: Probe) -> Seen:
        """Send one probe and wait until it is over."""
        n, n_early = len(probe.prompts), len(probe.prompts) - probe.n_late
        chunks: list[list[float]] = [[] for _ in range(n)]
        going, over = asyncio.Event(), set()

        def note(i: int | None = None) -> None:
            if i is not None:
                chunks[i].append(time.perf_counter())
            if all(len(chunks[j]) >= CLOSED_AFTER_CHUNKS or j in over for j in range(n_early)):
                going.set()

        async def one(i: int) -> Stream:
            if i >= n_early:
                await going.wait()
            words = (probe.prompts[i] - self._fixed_tokens) / self._word_tokens
            request = self._request(round(words), probe.outputs[i], probe.prompt, probe.tenant)
            sent_s = time.perf_counter()
            try:
                usage = (await self.model.complete(request, on_token=lambda _: note(i))).usage
            except asyncio.CancelledError:
                return Stream(sent_s, tuple(chunks[i]), probe.prompts[i], 0)
            finally:
                over.add(i)
                note()
            return Stream(sent_s, tuple(chunks[i]), *self._counted(usage))

        tasks = [asyncio.create_task(one(i)) for i in range(n)]
        try:
            closed_s, freed_s = await self._close(tasks, going, probe) if probe.n_closed else (None, None)
            return Seen(probe, tuple(await asyncio.gather(*tasks)), closed_s, freed_s)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _close(
        self, tasks: list[asyncio.Task[Stream]], going: asyncio.Event, probe: Probe
    ) -> tuple[float, float | None]:
        """Close the last streams and ask the server, if it can be asked, until it runs without them."""
        await going.wait()
        page = await asyncio.to_thread(self._telling, len(tasks))
        closed_s = time.perf_counter()
        for task in tasks[-probe.n_closed :]:
            task.cancel()
        stay = tasks[: -probe.n_closed]
        limit_s = closed_s + self.model.idle_s
        while page and time.perf_counter() < limit_s and not (stay and all(task.done() for task in stay)):
            running = await asyncio.to_thread(self._running, page)
            if running is not None and running <= len(stay):
                return closed_s, time.perf_counter()
            await asyncio.sleep(0.005)
        return closed_s, None

    def _telling(self, n: int) -> str | None:
        """Return a page that shows as many as we know to be running; some are renewed every few seconds only."""
        for _ in range(10):
            for page in self._pages:
                if self._running(page) == n:
                    return page
            time.sleep(0.02)
        return None

    def _counted(self, usage: Usage) -> tuple[int, int, int]:
        """Return prompt, completion and cached tokens as the server counts them."""
        if usage.source != "exact" or usage.prompt_tokens is None or usage.completion_tokens is None:
            raise EndpointError(
                f"{self.model!r} streams without usage, so tokens cannot be counted - use a server that takes"
                " stream_options.include_usage, and no proxy that drops it"
            )
        return usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens or 0

    async def _fitting(self, n_words: int) -> Usage:
        """Send one request, with fewer special fields while the server refuses them."""
        while True:
            try:
                return (await self.model.complete(self._request(n_words, 16))).usage
            except BadRequest as error:
                later = _EXACT[_EXACT.index(self.exact) + 1 :]
                if error.context.get("status") not in (400, 422) or not later:
                    raise
                self.exact = later[0]

    def _request(self, n_words: int, n_out: int, prompt: str = "", tenant: str = "") -> ModelRequest:
        self._sent += 1
        words = (_WORDS[i % len(_WORDS)] for i in range(max(1, n_words - 1)))
        extra = {name: n_out if name == "min_tokens" else value for name, value in self.exact.items()}
        return ModelRequest(
            prompt=" ".join([f"{self.nonce}{prompt or self._sent:0>4}", *words]),
            max_tokens=n_out,
            extra=extra | ({"user": tenant} if tenant else {}),
        )

    # --- what the server says of itself ------------------------------------------------------------------------------

    def _round_trip(self) -> float:
        """Return what opening a connection takes: one way there and back, and nothing of the server above it."""
        parts = urlsplit(self._root)
        begin = time.perf_counter()
        port = parts.port or (443 if parts.scheme == "https" else 80)
        with suppress(OSError), socket.create_connection((parts.hostname, port), timeout=10):
            pass
        return time.perf_counter() - begin

    def _text(self, path: str) -> str:
        key = os.environ.get(KEY_VARIABLE)
        request = urllib.request.Request(self._root + path, headers={"Authorization": f"Bearer {key}"} if key else {})
        # Straight, without a proxy: it matters for our own machine, and these pages are only good to have elsewhere.
        direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with suppress(urllib.error.URLError, OSError, ValueError), direct.open(request, timeout=10) as answer:
            return str(answer.read(4_000_000).decode(errors="replace"))
        return ""

    def _json(self, path: str) -> dict[str, Any] | None:
        with suppress(ValueError):
            found = json.loads(self._text(path))
            return found if isinstance(found, dict) else None
        return None

    def _running(self, page: str) -> int | None:
        """Return how many requests the server decodes, None if the page does not say."""
        text = self._text(page)
        if page == "/metrics":
            values = _RUNNING.findall(text)
            return int(sum(map(float, values))) if values else None
        with suppress(ValueError, TypeError, AttributeError):
            return sum(bool(slot["is_processing"]) for slot in json.loads(text))
        return None

    def _describe(self, row: dict[str, Any]) -> dict[str, Any]:
        """Collect what SGLang, vLLM, llama-server and our own emulation tell, without paths."""
        health, props = self._json("/health") or {}, self._json("/props") or {}
        info = self._json("/get_server_info") or self._json("/server_info") or {}
        inner: dict[str, Any] = next(iter(info.get("internal_states") or ()), {})
        version = (self._json("/version") or {}).get("version") or info.get("version") or props.get("build_info")
        of_slot = (props.get("default_generation_settings") or {}).get("n_ctx")
        kv = info.get("max_total_num_tokens") or inner.get("max_total_num_tokens")
        metrics = self._text("/metrics")
        blocks = [re.search(rf'cache_config_info\{{.*\b{name}="(\d+)"', metrics) for name in _BLOCKS]
        if all(blocks):
            kv = math.prod(int(each[1]) for each in blocks if each)
        elif of_slot and props.get("total_slots"):
            kv = of_slot * props["total_slots"]
        context = (
            row.get("max_model_len") or (row.get("meta") or {}).get("n_ctx") or of_slot or info.get("context_length")
        )
        kept = ("chunked_prefill_size", "schedule_policy", "kv_cache_dtype", "tp_size", "attention_backend", "dtype")
        return {
            "host": urlsplit(self._root).netloc.rpartition("@")[2],
            "kind": f"{row.get('owned_by') or 'unknown'} {version or ''}".strip(),
            "emulated": bool(health.get("emulated")) or "emulated" in str(row.get("owned_by")),
            "context_tokens": context,
            "kv_capacity_tokens": kv,
            "slots": props.get("total_slots") or info.get("max_running_requests"),
            "settings": {name: info[name] for name in kept if info.get(name) is not None},
        }
