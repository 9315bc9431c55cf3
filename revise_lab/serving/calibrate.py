"""Turn steps that a server was seen to take into a profile: fit what can be told apart, and check it on other steps."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from revise_lab.errors import ConfigError

from .cost import FITTED, Profile, StepRow, step_s

PARAMETERS = ("host_s", *FITTED)
KINDS = ("prefill", "decode")
MAPE_LIMIT = 0.15
"""Mean error over requests that the fit has not seen, above which a profile is not called calibrated; our choice."""
LEAST_NOISE = 0.01
"""Noise of a time that is assumed where the fit leaves less; nobody measures better than that over HTTP."""
WIDEST = 0.25
"""Standard error of a logarithm above which a parameter cannot be told from the others; our choice."""
REFUTED = 9.0
"""Loss in squared misses, in units of the noise, from which a value that was assumed is refuted: three sigma."""


@dataclass(frozen=True)
class Calibration:
    """A fitted profile and how far it can be trusted.

    Attributes
    ----------
    profile : Profile
        Parameters that were fitted are ``measured``, with 95 % bootstrap intervals as bands.
    request_s : float
        What a request takes outside of the replica, as its client sees it; no part of the profile.
    fitted : tuple of str
        What was fitted; the rest could not be told apart.
    warnings : list of str
        What was kept and why.
    errors : dict
        Signed relative errors: of the rows of the fit, and of the held-out rows of prefill and decoding.
    """

    profile: Profile
    request_s: float
    fitted: tuple[str, ...]
    warnings: list[str]
    errors: dict[str, list[float]] = field(repr=False)

    @property
    def held_out_mape(self) -> float:
        """Mean absolute relative error over the held-out rows."""
        found = self.errors["prefill"] + self.errors["decode"]
        return sum(map(abs, found)) / len(found)


def calibrate(
    rows: Sequence[StepRow], held_out: Sequence[StepRow], base: Profile, *, draws: int = 200, seed: int = 0
) -> Calibration:
    """Fit at most six parameters to rows, by the least squared logarithmic error, and check them on others.

    These are the six of the cost of a step, less those that cannot be told apart, and what a request takes outside. Prefill
    and decoding weigh as they are precise: the pace of a hundred tokens is far better known than one time to a first text.

    Parameters
    ----------
    rows, held_out : sequence of StepRow
        For the fit, and for the check.
    base : Profile
        Device and model; what the rows cannot tell stays as it is there.
    draws, seed : int
        Of the bootstrap, which draws prefill and decoding rows apart.

    Raises
    ------
    ConfigError
        Too few rows.
    """
    prefill, decode = ([row for row in rows if bool(row.n_prefill) == kind] for kind in (True, False))
    if min(len(prefill), len(decode)) < 3 or not held_out:
        raise ConfigError(
            f"{len(prefill)} rows of prefill, {len(decode)} of decoding and {len(held_out)} held out are too few to fit"
            " - send more requests, or see why the server's answers could not be used"
        )
    warnings: list[str] = []
    start = _near(base, prefill, decode, warnings)
    search = _Search(_Rows(base, [*prefill, *decode]), start, warnings)
    while True:
        search.separate()
        bands = search.bootstrap((prefill, decode), draws, seed)
        widest = max(bands, key=lambda name: bands[name][1] / bands[name][0])
        low, high = bands[widest]
        if math.log(high / low) <= 4 * WIDEST or len(bands) == 1:
            break
        search.keep(widest, f"{widest} may be anything from {low:.3g} to {high:.3g}")
    values, fitted = search.values, tuple(search.free)
    bands.pop("request_s", None)
    scaled: dict[str, Any] = {
        name: values[name] for name in PARAMETERS if name not in fitted and values[name] != getattr(base, name)
    }
    profile = base.with_(**scaled).with_("measured", **{name: values[name] for name in bands})
    profile = replace(profile, bands={k: v for k, v in base.bands.items() if k not in PARAMETERS} | bands)
    checked = {"fit": list(rows)} | {k: [r for r in held_out if (r.n_prefill > 0) == (k == "prefill")] for k in KINDS}
    errors = {name: _Rows(base, some).errors(values) if some else [] for name, some in checked.items()}
    return Calibration(profile, values["request_s"], fitted, warnings, errors)


class _Rows:
    """Measured steps, to be met by values of the parameters."""

    def __init__(
        self, base: Profile, rows: Sequence[StepRow], noise: tuple[float, float] = (LEAST_NOISE, LEAST_NOISE)
    ) -> None:
        import numpy as np

        self.base, self.noise = base, noise
        *self.steps, self.seconds = np.array(rows, float).T

    def logs(self, values: Mapping[str, float]) -> Any:
        """Return the logarithm of predicted over measured time, each row."""
        import numpy as np

        outside_s = values["request_s"] * (self.steps[0] > 0)
        return np.log((step_s(_at(self.base, values), *self.steps) + outside_s) / self.seconds)

    def misses(self, values: Mapping[str, float]) -> Any:
        """Return the logarithms in units of the noise of their kind."""
        import numpy as np

        return self.logs(values) / np.where(self.steps[0] > 0, *self.noise)

    def weigh(self, values: Mapping[str, float]) -> None:
        """Take what values leave for the noise of prefill and of decoding."""
        left, prefill = self.logs(values), self.steps[0] > 0
        first, second = (max(LEAST_NOISE, math.sqrt(float((left[k] ** 2).mean()))) for k in (prefill, ~prefill))
        self.noise = first, second

    def errors(self, values: Mapping[str, float]) -> list[float]:
        """Return the relative errors, signed."""
        import numpy as np

        found: list[float] = np.expm1(self.logs(values)).tolist()
        return found

    def fit(self, values: Mapping[str, float], free: Sequence[str]) -> dict[str, float]:
        """Return the values whose free ones give the least squared logarithmic error."""
        import numpy as np
        from scipy.optimize import least_squares

        def at(x: Any) -> dict[str, float]:
            return {**values, **dict(zip(free, np.exp(x).tolist(), strict=True))}

        first = np.log([values[name] for name in free])
        # From adding up to a maximum, to which 8 is near enough; further out it makes no difference and overflows.
        bounds = [np.log((1, 8)) if name == "overlap" else (-50, 50) for name in free]
        low, high = np.array(bounds).T
        first = np.clip(first, low + 1e-6, high - 1e-6)
        best = least_squares(lambda x: self.misses(at(x)), first, bounds=(low, high), xtol=1e-6, ftol=1e-6)
        return at(best.x)

    def spread(self, values: Mapping[str, float], free: Sequence[str]) -> dict[str, float]:
        """Return the standard error of the logarithm of each free value."""
        import numpy as np

        now = self.misses(values)
        slopes = np.array([self.misses({**values, name: values[name] * 1.001}) - now for name in free]) / 1e-3
        _, singular, directions = np.linalg.svd(slopes.T, full_matrices=False)
        # A singular value that is nearly 0 stands for a direction in which nothing changes.
        spread = np.sqrt(((directions.T / np.maximum(singular, 1e-9)) ** 2).sum(axis=1))
        return dict(zip(free, spread.tolist(), strict=True))


def _at(base: Profile, values: Mapping[str, float]) -> Profile:
    changes: dict[str, Any] = {name: values[name] for name in PARAMETERS}
    return replace(base, **changes)


def _near(
    base: Profile, prefill: Sequence[StepRow], decode: Sequence[StepRow], warnings: list[str]
) -> dict[str, float]:
    """Start where the times have the right order of magnitude; a base for another device would leave the search lost."""
    import numpy as np

    values = {name: float(getattr(base, name)) for name in PARAMETERS} | {"request_s": 0.0}
    off = [float(np.median([step_s(base, *row[:4]) / row.seconds for row in rows])) for rows in (prefill, decode)]
    if not all(1 / 3 < each < 3 for each in off):
        for each, names in zip(off, (("compute", "attention"), ("weights", "kv")), strict=True):
            values |= {f"{name}_efficiency": values[f"{name}_efficiency"] * each for name in names}
        warnings.append(
            f"{base.name} is {1 / off[0]:.3g} times off in prefill and {1 / off[1]:.3g} times in decoding: it is a profile"
            " of something else, so what could not be told apart is scaled, not known"
        )
    return values


class _Search:
    """The best values so far, and which of them are still free."""

    def __init__(self, rows: _Rows, start: dict[str, float], warnings: list[str]) -> None:
        self.rows, self.start, self.warnings = rows, start, warnings
        self.free = [*PARAMETERS, "request_s"]
        self.lone_s = float(rows.seconds[rows.steps[1] > 0].min())
        self.values = self._fit(start)
        rows.weigh(self.values)
        self.values = self._fit(start)

    def separate(self) -> None:
        """While a value cannot be told from the others, keep it and fit again."""
        if {"host_s", "weights_efficiency"} <= set(self.free):
            # For a lone stream both are a constant: the device is believed if its weights fit into that step.
            weights_s = step_s(_at(self.rows.base, self.start), 0, 1) - self.start["host_s"]
            name = "weights_efficiency" if 0.5 * self.lone_s < weights_s < self.lone_s else "host_s"
            self.keep(name, "host_s and weights_efficiency cannot be told apart, only their sum is measured")
        while len(self.free) > 1:
            spread = self.rows.spread(self.values, self.free)
            name = max(spread, key=lambda each: spread[each])
            if spread[name] <= WIDEST:
                return
            if name in ("host_s", "request_s") and self.values[name] < 0.01 * self.lone_s:
                why = f"{name} is too small to be seen"
            else:
                factor = math.exp(min(9.0, spread[name]))
                why = f"{name} cannot be told from the rest (uncertain by a factor of {factor:.2g})"
            self.keep(name, why)

    def keep(self, name: str, why: str) -> None:
        """Fit no longer a value: it is what it was at the start, or the best one if the rows speak against that."""
        self.free.remove(name)
        kept = self._fit(self.values | {name: self.start[name]})
        if self._misses(kept) < self._misses(self.values) + REFUTED:
            self.values = kept
            self.warnings.append(f"{why}; {name} is kept at {self.start[name]:.3g}")
        else:
            best = f"the best value is {self.values[name]:.3g}, as {self.start[name]:.3g} is refuted"
            self.warnings.append(f"{why}; {best}")

    def _fit(self, values: dict[str, float]) -> dict[str, float]:
        """Fit from there and from the start: the search may be lost where a value has become next to nothing."""
        bound = {name: values[name] for name in values if name not in self.free}
        least = {name: 0.05 * self.lone_s for name in ("host_s", "request_s") if name in self.free}
        firsts = [{**each, **{k: max(each[k], v) for k, v in least.items()}, **bound} for each in (values, self.start)]
        return min((self.rows.fit(first, self.free) for first in firsts), key=self._misses)

    def _misses(self, values: dict[str, float]) -> float:
        return float((self.rows.misses(values) ** 2).sum())

    def bootstrap(self, kinds: Sequence[Sequence[StepRow]], draws: int, seed: int) -> dict[str, tuple[float, float]]:
        """Return the 95 % interval of each free value, given the others."""
        import numpy as np

        rng, drawn = np.random.default_rng(seed), []
        for _ in range(draws):
            some = [kind[i] for kind in kinds for i in rng.integers(len(kind), size=len(kind))]
            again = _Rows(self.rows.base, some, self.rows.noise).fit(self.values, self.free)
            drawn.append([again[name] for name in self.free])
        low, high = np.percentile(drawn, (2.5, 97.5), axis=0).tolist()
        return {name: (a, b) for name, a, b in zip(self.free, low, high, strict=True)}
