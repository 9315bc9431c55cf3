"""Rows of the tables of experiments and of ``values.json``.

>>> value_row("R21.tokens.50", 13.0, 100, "%", low=12.0, high=14.0)["source"]
'emulated'
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pandas as pd

    from revise_lab.lab import stats


def grouped(
    frame: pd.DataFrame, keys: Sequence[str], *, sort: bool = True
) -> Iterator[tuple[dict[str, Any], pd.DataFrame]]:
    """Yield the values of each group by name, as a row begins, and its part of the frame."""
    for key, part in frame.groupby(list(keys), sort=sort):
        yield dict(zip(keys, key, strict=True)), part


def beside(
    frame: pd.DataFrame, keys: Sequence[str], against: str = "suffix"
) -> Iterator[tuple[dict[str, Any], pd.DataFrame]]:
    """Yield every setting and policy that ran where another one did, by name, with the rows of both."""
    for named, part in grouped(frame, keys):
        policies = set(part["policy"])
        for policy in sorted(policies - {against}) if against in policies else ():
            yield named | {"policy": policy}, part[part["policy"].isin([policy, against])]


def columns(name: str, found: stats.Interval) -> dict[str, float]:
    """Return an interval as three columns: ``name``, ``name_low`` and ``name_high``."""
    return {name: found.value, f"{name}_low": found.low, f"{name}_high": found.high}


def value_row(
    id: str,
    value: Any,
    n: int,
    unit: str,
    source: str = "emulated",
    low: float | None = None,
    high: float | None = None,
) -> dict[str, Any]:
    """Return a value as a row of ``values.json``.

    Parameters
    ----------
    id : str
        Of the claim that it is held against, or a name of its own.
    value : Any
        What was found.
    n : int
        Of what it was found.
    unit : str
        Unit of the value.
    source : str
        Where it comes from, as in `revise_lab.lab.figures.SOURCES`.
    low, high : float, optional
        Ends of its interval, where it has one.
    """
    return {"id": id, "value": value, "low": low, "high": high, "n": n, "unit": unit, "source": source}
