"""Intervals for what is compared: paired, clustered, ratios of sums, shares.

Every function says what its arrays index, resamples the unit that varies (workflows, not the rows of one workflow), and
keeps n and unit with the interval, so that a caption can name them. Randomness comes from a `numpy.random.Generator`
or a seed that is passed in; equal seeds give equal intervals.

A ``statistic`` takes arrays whose last axis is the sample and returns one number for each of the others: `numpy.mean`,
`numpy.median`, or ``lambda x, axis: numpy.quantile(x, 0.95, axis=axis)``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike, NDArray

from revise_lab.errors import ConfigError

Floats = NDArray[np.float64]
Statistic = Callable[..., Any]

#: Resamples of a bootstrap; the ends of a 95 % interval then move by about 1 % of its width between seeds.
N_RESAMPLES = 4_000

_CHUNK = 2_000_000


@dataclass(frozen=True, slots=True)
class Interval:
    """A value and how well it is known.

    Parameters
    ----------
    value, low, high : float
        The statistic of the sample and the ends of its interval; the ends are NaN where one unit was observed.
    n : int
        Number of units that were resampled, or of trials.
    unit : str
        Unit of the value.
    kind : str
        What the interval is, for a caption: ``"95 % bootstrap over pairs"``.
    """

    value: float
    low: float
    high: float
    n: int
    unit: str = ""
    kind: str = ""

    def __contains__(self, value: float) -> bool:
        return self.low <= value <= self.high

    def as_dict(self) -> dict[str, Any]:
        """Return the fields by name, as a row of a frame or of ``values.json``."""
        return dataclasses.asdict(self)


def bootstrap(
    values: ArrayLike | tuple[ArrayLike, ...],
    statistic: Statistic = np.mean,
    *,
    clusters: ArrayLike | None = None,
    seed: int | np.random.Generator = 0,
    confidence: float = 0.95,
    n_resamples: int = N_RESAMPLES,
    unit: str = "",
    over: str = "samples",
) -> Interval:
    """Percentile bootstrap interval of a statistic of one sample.

    Parameters
    ----------
    values : array, shape (n,), or tuple of such arrays
        Entry i is the observation of unit i, or of a row of it if `clusters` are given. Several arrays, of which the same
        units are drawn, are several arguments of the statistic.
    statistic : callable
        ``statistic(x, axis=-1)``.
    clusters : array, shape (n,), optional
        Label of the unit that entry i belongs to. Whole clusters are resampled: the rows of one workflow, or the
        replicates that shared arrivals, are not independent.
    seed : int or Generator
        Source of the resamples.
    confidence : float
        Between 0 and 1.
    n_resamples : int
        Number of resamples.
    unit : str
        Unit of the values, kept with the interval.
    over : str
        What was resampled, for the caption.

    Returns
    -------
    Interval
        Its ``n`` is the number of clusters, or of values without them.
    """
    arrays = _columns(values if isinstance(values, tuple) and np.ndim(values[0]) else [values])
    level, rng, n = _level(confidence), np.random.default_rng(seed), len(arrays[0])
    if clusters is None:
        size = max(1, _CHUNK // n)
        picks = (rng.integers(n, size=(min(size, n_resamples - at), n)) for at in range(0, n_resamples, size))
    else:
        _, codes = np.unique(np.asarray(clusters), return_inverse=True)
        if codes.shape != arrays[0].shape:
            raise ConfigError(f"{n} values but {codes.size} cluster labels")
        order = np.argsort(codes, kind="stable")
        groups = np.split(order, np.flatnonzero(np.diff(codes[order])) + 1)
        n, over = len(groups), "clusters" if over in ("samples", "pairs") else over
        # clusters differ in size, so resamples do not stack
        picks = (np.concatenate([groups[one] for one in rng.integers(n, size=n)])[None] for _ in range(n_resamples))
    value = float(statistic(*arrays, axis=-1))
    if n == 1:
        return Interval(value, float("nan"), float("nan"), 1, unit, f"none: one of {over}")
    drawn = np.concatenate([statistic(*(array[pick] for array in arrays), axis=-1) for pick in picks])
    low, high = np.quantile(drawn, [(1 - level) / 2, (1 + level) / 2])
    return Interval(value, float(low), float(high), n, unit, f"{level * 100:g} % bootstrap over {over}")


def paired(a: ArrayLike, b: ArrayLike, statistic: Statistic = np.mean, **options: Any) -> Interval:
    """Interval of a statistic of the differences ``a - b`` of pairs that saw the same workload.

    Parameters
    ----------
    a, b : array, shape (n,)
        Entry i of both is workflow i under one and under the other policy.
    statistic : callable
        As for `bootstrap`.
    **options : Any
        The others of `bootstrap`; pairs, or clusters of pairs, are resampled.
    """
    a, b = _columns([a, b])
    return bootstrap(a - b, statistic, **{"over": "pairs"} | options)


def ratio(numerators: ArrayLike, denominators: ArrayLike, **options: Any) -> Interval:
    """Interval of ``sum(numerators) / sum(denominators)``, numerator and denominator resampled together.

    Parameters
    ----------
    numerators, denominators : array, shape (n,)
        Entry i of both belongs to unit i, for instance executions and the hindsight floor of workflow i.
    **options : Any
        As for `bootstrap`, without a statistic.

    Raises
    ------
    ConfigError
        If the denominators sum to 0, in the sample or in a resample.
    """

    def divide(x: Floats, y: Floats, axis: int) -> Floats:
        below = y.sum(axis=axis)
        if np.any(below == 0):
            raise ConfigError("a ratio of sums has a denominator of 0, in the sample or in a resample of it")
        return x.sum(axis=axis) / below

    return bootstrap(tuple(_columns([numerators, denominators])), divide, **options)


def proportion(successes: int, n: int, *, confidence: float = 0.95, unit: str = "share") -> Interval:
    """Clopper-Pearson interval of a share; exact, so 300 of 300 still has a lower bound below 1.

    Parameters
    ----------
    successes : int
        0 to `n`.
    n : int
        Independent trials, at least 1.
    confidence : float
        Two-sided, also where one end is 0 or 1.
    unit : str
        Unit of the value.
    """
    from scipy.stats import beta  # three seconds of import that no notebook without proportions should pay

    if not 0 <= successes <= n or n < 1:
        raise ConfigError(f"{successes} successes of {n} trials is not a share")
    tail = (1 - _level(confidence)) / 2
    low = 0.0 if successes == 0 else float(beta.ppf(tail, successes, n - successes + 1))
    high = 1.0 if successes == n else float(beta.ppf(1 - tail, successes + 1, n - successes))
    return Interval(successes / n, low, high, n, unit, f"{confidence * 100:g} % Clopper-Pearson")


def pairs(frame: pd.DataFrame, on: str, a: Any, b: Any, value: str, match: Sequence[str]) -> tuple[Floats, Floats]:
    """Line up two levels of a column, for instance two policies, over the workloads that they share.

    Parameters
    ----------
    frame : DataFrame
        One row a level and workload.
    on : str
        The column whose levels are compared.
    a, b : Any
        The two levels.
    value : str
        The column compared.
    match : sequence of str
        Columns that identify a workload, for instance ``["seed"]``.

    Returns
    -------
    tuple of array, each of shape (n,)
        Entry i of both belongs to the same workload.

    Raises
    ------
    ConfigError
        If a workload is there twice, or for one of the two only.
    """
    sides = [frame[frame[on] == level].set_index(list(match))[value] for level in (a, b)]
    for level, side in zip((a, b), sides, strict=True):
        if not side.index.is_unique:
            raise ConfigError(f"{on}={level}: {list(match)} does not identify a row; name more columns", match=match)
    alone = sides[0].index.symmetric_difference(sides[1].index)
    if len(alone) or sides[0].empty:
        raise ConfigError(f"{on}: {len(alone)} workloads are there for only one of {a} and {b}", alone=list(alone[:5]))
    return sides[0].to_numpy(float), sides[1].reindex(sides[0].index).to_numpy(float)


def _columns(columns: Sequence[ArrayLike]) -> list[Floats]:
    arrays = [np.asarray(column, dtype=float) for column in columns]
    if any(array.ndim != 1 or array.shape != arrays[0].shape or not array.size for array in arrays):
        raise ConfigError(f"samples must be one-dimensional, equally long and not empty: {[a.shape for a in arrays]}")
    if any(np.isnan(array).any() for array in arrays):
        raise ConfigError("a sample holds NaN; leave such observations out knowingly, and say how many")
    return arrays


def _level(confidence: float) -> float:
    if not 0 < confidence < 1:
        raise ConfigError(f"confidence is {confidence}; it lies between 0 and 1")
    return confidence
