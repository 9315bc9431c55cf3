"""What one step of a serving replica costs: a closed form with six parameters, and the profiles that hold them.

A step carries ``n`` prefill tokens and one token for each of ``b`` decoding sequences whose contexts sum to ``C``; ``A``
sums, over the prefill chunks, tokens x (tokens before the chunk + half the chunk). Reading the weights and computing
overlap as a soft maximum; reading the KV cache and the quadratic part of prefill attention add to it::

    W = 2 (body + head) / (weights_efficiency * bandwidth)
    F = (2 body (n + b) + 2 head (b + [n > 0])) / (compute_efficiency * flops)
    t = host_s + (W^s + F^s)^(1/s) + C kv_bytes / (kv_efficiency * bandwidth) + A pair_flops / (attention_efficiency * flops)

Our choice: the form is ours, fitted to tables of measured kernels. Such sums know no scheduler, sampling or network;
``host_s`` stands for all of that and is 0 until somebody calibrates it, hence the profile with a band.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from importlib.resources import files
from pathlib import Path
from typing import Any, NamedTuple

from revise_lab.errors import ConfigError

SOURCES = ("measured", "kernel table", "fitted", "specified", "assumed")
"""``specified``: a data sheet or the configuration of the model."""

FITTED = ("weights_efficiency", "compute_efficiency", "kv_efficiency", "attention_efficiency", "overlap")
_DEVICE = ("memory_bytes_per_s", "flops_per_s")
_MODEL = ("body_parameters", "head_parameters", "kv_bytes_per_token", "pair_flops")
TIMES = {"host_s", *FITTED, *_DEVICE, *_MODEL}
"""What a step takes depends on these."""
PLAIN = ("name", "about", "calibrated", "measurement")
"""What a profile holds besides numbers with a source."""


@dataclass(frozen=True)
class Profile:
    """The numbers that stand for one model on one device under one server.

    Attributes
    ----------
    host_s, weights_efficiency, compute_efficiency, kv_efficiency, attention_efficiency, overlap : float
        The six parameters of the closed form; an efficiency above 1 absorbs curvature and is not physical.
    abort_delay_s : float or None
        How long a request goes on after its client has left; ``None`` is a server that never stops it.
    reserve_share : float
        Share of the output still to come that admission keeps free; below 1 the KV cache can run out (retraction).
    calibrated : bool
        The times were measured on a server and met requests that the fit had not seen; ``measurement`` says which.
    sources, bands : dict
        Where each number comes from, and the low and high end of those that are uncertain.
    measurement : dict
        On what server, when and how well it was measured; empty if it was not.
    """

    name: str
    about: str
    host_s: float
    weights_efficiency: float
    compute_efficiency: float
    kv_efficiency: float
    attention_efficiency: float
    overlap: float
    memory_bytes_per_s: float
    flops_per_s: float
    body_parameters: float
    head_parameters: float
    kv_bytes_per_token: float
    pair_flops: float
    kv_capacity_tokens: int
    context_tokens: int
    max_running: int
    prefill_batch_tokens: int
    reserve_share: float
    abort_delay_s: float | None
    calibrated: bool = False
    sources: dict[str, str] = field(default_factory=dict, compare=False)
    bands: dict[str, tuple[float, float]] = field(default_factory=dict, compare=False)
    measurement: dict[str, Any] = field(default_factory=dict, compare=False)

    @property
    def label(self) -> str:
        """How a result names where its times come from."""
        return f"{'calibrated' if self.calibrated else 'emulated'} ({self.name})"

    def with_(self, source: str = "assumed", **changes: Any) -> Profile:
        """Return a profile with other numbers, each marked with its source; other times are not calibrated any more."""
        if source not in SOURCES:
            raise ConfigError(f"source={source!r} of {', '.join(changes)} - write one of {', '.join(SOURCES)}")
        named = {name: source for name in changes if name not in (*PLAIN, "bands")}
        if TIMES & changes.keys():
            changes = {"calibrated": False} | changes
        return replace(self, **changes, sources={**self.sources, **named})

    def save(self, path: Path) -> None:
        """Write the profile so that :func:`load` reads it, through a temporary file."""
        numbers = asdict(self)
        sources, bands = numbers.pop("sources"), numbers.pop("bands")
        content = {name: value for name, value in numbers.items() if name not in sources}
        for name, source in sources.items():
            content[name] = {"value": numbers[name], "source": source}
            if name in bands:
                content[name]["band"] = list(bands[name])
        part = path.with_name(f".{path.name}.part")
        part.write_text(json.dumps(content, indent=2) + "\n")
        part.replace(path)


def load(name: str) -> Profile:
    """Return a shipped profile by name, or one in a file by a path that ends in ``.json``.

    Raises
    ------
    ConfigError
        There is no such profile, or a number in it is unknown, missing or without a source.
    """
    shipped = files(__package__) / "profiles"
    place = Path(name) if name.endswith(".json") else shipped / f"{name}.json"
    if not place.is_file():
        names = sorted(each.name.removesuffix(".json") for each in shipped.iterdir() if ".table." not in each.name)
        raise ConfigError(f"there is no profile {name!r} - use {', '.join(names)}, or the path of a .json file")
    content = json.loads(place.read_text())
    base = asdict(load(content.pop("base"))) if "base" in content else {}
    sources, bands = base.pop("sources", {}), base.pop("bands", {})
    if TIMES & content.keys():
        base |= {"calibrated": False, "measurement": {}}
    known = {each.name for each in fields(Profile)} - {"sources", "bands"}
    for key, entry in content.items():
        if key not in known or (key not in PLAIN and entry.get("source") not in SOURCES):
            raise ConfigError(f"profile {name!r}: {key}={entry!r} - a known name, with a source out of {SOURCES}")
        if key in PLAIN:
            base[key] = entry
            continue
        base[key], sources[key] = entry["value"], entry["source"]
        if "band" in entry:
            bands[key] = tuple(entry["band"])
    if missing := known - base.keys() - {"calibrated", "measurement"}:
        raise ConfigError(f"profile {name!r} lacks {', '.join(sorted(missing))} - every number must be given")
    if base.get("calibrated") and not base.get("measurement"):
        raise ConfigError(f"profile {name!r} is calibrated without a measurement - revise-lab calibrate writes both")
    return Profile(**base, sources=sources, bands=bands)


def step_s(
    profile: Profile, n_prefill: float, n_decode: float, contexts_sum: float = 0.0, attention: float = 0.0
) -> float:
    """Return the seconds that one step takes.

    Parameters
    ----------
    profile : Profile
        The numbers.
    n_prefill, n_decode : float
        Prefill tokens and decoding sequences in the step.
    contexts_sum : float
        Tokens in the contexts of the decoding sequences.
    attention : float
        Sum over the prefill chunks of tokens x (tokens before + tokens / 2).
    """
    p = profile
    weights_s = 2 * (p.body_parameters + p.head_parameters) / (p.weights_efficiency * p.memory_bytes_per_s)
    flops = 2 * p.body_parameters * (n_prefill + n_decode) + 2 * p.head_parameters * (n_decode + (n_prefill > 0))
    compute_s = flops / (p.compute_efficiency * p.flops_per_s)
    dense_s: float = (weights_s**p.overlap + compute_s**p.overlap) ** (1 / p.overlap)
    pairs_s = p.pair_flops * attention / (p.attention_efficiency * p.flops_per_s)
    return p.host_s + dense_s + contexts_sum * context_s(p) + pairs_s


def context_s(profile: Profile) -> float:
    """Return the seconds that each token of context adds to a decode step."""
    return profile.kv_bytes_per_token / (profile.kv_efficiency * profile.memory_bytes_per_s)


class StepRow(NamedTuple):
    """A step whose time is known from elsewhere: a kernel table or a measurement."""

    n_prefill: float
    n_decode: float
    contexts_sum: float
    attention: float
    seconds: float


def kernel_table(name: str = "h100-qwen3-14b-kernels") -> list[StepRow]:
    """Return the steps of a shipped kernel table: decode by context and batch, prefill of one prompt by its length."""
    content = json.loads((files(__package__) / "profiles" / f"{name}.table.json").read_text())
    rows = [
        StepRow(0, batch, batch * context, 0, ms / 1e3)
        for context, line in zip(content["context_tokens"], content["decode_ms"], strict=True)
        for batch, ms in zip(content["batch"], line, strict=True)
    ]
    prefill = zip(content["prompt_tokens"], content["prefill_ms"], strict=True)
    return rows + [StepRow(n, 0, 0, n * n / 2, ms / 1e3) for n, ms in prefill]


def errors(profile: Profile, rows: Iterable[StepRow]) -> list[float]:
    """Return the relative error of each row, signed."""
    return [step_s(profile, *row[:4]) / row.seconds - 1 for row in rows]


def fit(rows: Sequence[StepRow], start: Profile, free: Sequence[str] = FITTED) -> Profile:
    """Return the profile whose free parameters give the least squared logarithmic error over rows.

    Parameters
    ----------
    rows : sequence of StepRow
        What is known.
    start : Profile
        Where the search starts, and the parameters that stay.
    free : sequence of str
        What is fitted; all stay positive.
    """
    import numpy as np
    from scipy.optimize import least_squares

    def at(x: Any) -> Profile:
        found: dict[str, Any] = {name: float(value) for name, value in zip(free, np.exp(x), strict=True)}
        return replace(start, **found)

    def residuals(x: Any) -> Any:
        return np.log1p(errors(at(x), rows))

    best = at(least_squares(residuals, np.log([max(getattr(start, name), 1e-5) for name in free])).x)
    return start.with_("fitted", **{name: getattr(best, name) for name in free})
