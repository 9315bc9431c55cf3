"""The scorecard: every published value beside ours, with a standing that follows from a rule fixed beforehand.

Rows come from ``data/claims.yaml``; our values from the ``values.json`` of complete runs, the largest profile and then
the newest first, and from ``results/reference`` where nothing was run. A row never counts as reproduced because nobody
looked: without a value it stands as not run, and says why.

Our choices where the rules leave room: a published 0, a share or ratio of 1 and 100 % speak of every run and must be
met exactly; a published mean or share without an interval gets the Wilson interval of its n, or, when n is not
published either, the half unit of its last digit, with ours at most a quarter of the value to each side.
"""

from __future__ import annotations

import functools
import html
import math
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from revise_lab.errors import ResultsError
from revise_lab.lab import experiments
from revise_lab.lab.document import parse
from revise_lab.lab.results import RunFolder

__all__ = ["STANDINGS", "Scorecard", "claims", "judge", "scorecard"]

#: Where a row may stand; info rows are printed and not judged.
STANDINGS = ("reproduced", "by construction", "same direction", "differs", "not run", "info")
_RANK = {"paper": 0, "quick": 1, "smoke": 2}
_PAPERS = {"R": "REVISE, arXiv:2609.00643", "A": "conditions, arXiv:2609.08015", "S": "absorber, arXiv:2604.23283"}
_TOTAL = "R01.total"
#: (met, what there is to say)
Finding = tuple[bool | None, str]


class Scorecard(list[dict[str, Any]]):
    """Rows of the scorecard; a table in a notebook, text in a terminal."""

    def counts(self) -> dict[str, int]:
        """Return how many rows have each standing."""
        seen = Counter(row["standing"] for row in self)
        return {standing: seen[standing] for standing in STANDINGS}

    def summary(self) -> str:
        """Return the counts in one line."""
        return ", ".join(f"{count} {standing}" for standing, count in self.counts().items()) + f" of {len(self)} rows"

    def values(self) -> list[dict[str, Any]]:
        """Return the counts in the form of ``values.json``."""
        return [
            {"id": f"total.{standing.replace(' ', '_')}", "value": count, "low": count, "high": count, "n": len(self)}
            | {"unit": "rows", "source": "measured"}
            for standing, count in self.counts().items()
        ]

    def frame(self) -> pd.DataFrame:
        """Return the rows with ``published`` and ``ours`` as they are printed."""
        printed = [{**row, "published": str(row["published"]), "ours": _ours(row)} for row in self]
        return pd.DataFrame(printed).astype({"n": "Int64"})

    def __str__(self) -> str:
        """Return the table for a terminal: by experiment, rows without a value collapsed by reason."""
        lines = []
        for experiment, rows in self._groups():
            lines += [f"\n{experiment}", *(_text_row(row) for row in rows if row["standing"] != "not run")]
            reasons = Counter(row["why"] for row in rows if row["standing"] == "not run")
            lines += [f"  {count} row{'s' * (count > 1)} not run: {why}" for why, count in reasons.items()]
        return "\n".join([*lines, "", self.summary()]).lstrip("\n")

    def _repr_html_(self) -> str:
        head = "".join(f"<th>{name}</th>" for name in ("id", "what", "published", "ours", "n", "source", "standing"))
        body = []
        for experiment, rows in self._groups():
            body.append(f'<tr><th colspan="7" style="text-align:left">{html.escape(experiment)}</th></tr>')
            body += [_html_row(row) for row in rows]
        return f"<p>{html.escape(self.summary())}</p><table><tr>{head}</tr>{''.join(body)}</table>"

    def _groups(self) -> list[tuple[str, list[dict[str, Any]]]]:
        groups: dict[str, list[dict[str, Any]]] = {}
        for row in self:
            groups.setdefault(f"{row['experiment']} ({_PAPERS[row['id'][0]]})", []).append(row)
        return list(groups.items())


def claims(path: str | Path | None = None) -> list[dict[str, Any]]:
    """Read the rows of ``data/claims.yaml``.

    Parameters
    ----------
    path : str or Path, optional
        Another file of the same form.

    Returns
    -------
    list of dict
        One mapping per published value; copies, so they may be changed.

    Raises
    ------
    ResultsError
        If the file is not there.
    """
    path = Path(path) if path else Path(__file__).resolve().parents[2] / "data" / "claims.yaml"
    if not path.is_file():
        raise ResultsError(
            f"the published values are not at '{path}'; work in a checkout or pass path=", path=str(path)
        )
    return [dict(row) for row in _claims(path, path.stat().st_mtime_ns)]


@functools.lru_cache(maxsize=4)
def _claims(path: Path, mtime_ns: int) -> list[dict[str, Any]]:
    return parse(path.read_text(encoding="utf-8"), path.name).values


def scorecard(results_dir: str | Path = "results", claims_path: str | Path | None = None) -> Scorecard:
    """Hold every published value against ours.

    Parameters
    ----------
    results_dir : str or Path
        Folder with ``runs/``, and ``reference/`` or else the shipped one is used.
    claims_path : str or Path, optional
        Another file of claims.

    Returns
    -------
    Scorecard
        One mapping per claim: ``id``, ``published``, ``value``, ``low``, ``high``, ``n``, ``unit``, ``source``,
        ``standing``, ``why``, ``where``, ``metric``, ``rule``, ``basis``, ``experiment`` and ``run``.

    Raises
    ------
    ResultsError
        If a ``values.json`` cannot be read.
    """
    results, rows = Path(results_dir), claims(claims_path)
    found = {name: _values(results, name) for name in dict.fromkeys(row["experiment"] for row in rows)}
    ours = {row["id"]: found[row["experiment"]].get(row["id"]) for row in rows}
    if _TOTAL in ours:
        ours[_TOTAL] = _total(ours)
    orders = _orders(rows, ours)
    card = Scorecard()
    for row in rows:
        value = ours[row["id"]]
        standing, why = judge(row, value, same_order=orders.get(row["id"]))
        if value is None and not why:
            why = _why_not(row["experiment"], results, bool(found[row["experiment"]]))
        kept = {key: (value or {}).get(key) for key in ("value", "low", "high", "n", "source", "run")}
        copied = {key: row[key] for key in ("unit", "where", "metric", "rule", "basis", "experiment")}
        card.append({"id": row["id"], "published": row["value"], **kept, **copied, "standing": standing, "why": why})
    return card


def judge(row: dict[str, Any], ours: dict[str, Any] | None, *, same_order: bool | None = None) -> tuple[str, str]:
    """Return the standing of one row and what there is to say about it.

    Parameters
    ----------
    row : dict
        A row of the claims.
    ours : dict or None
        ``value``, ``low``, ``high``, ``n``, ``source``; None when there is none.
    same_order : bool or None
        For the rule ``order``: whether our values rank the methods as published; None while some are missing.

    Returns
    -------
    tuple of str
        The standing, and the reason (empty when there is nothing to add).
    """
    if row["basis"] in ("needs-data", "needs-hardware") and not str((ours or {}).get("source")).startswith("measured"):
        need = "data that you bring" if row["basis"] == "needs-data" else "a real endpoint on the published hardware"
        beside = "" if ours is None else f"; the value beside is {ours.get('source')}"
        return "not run", f"needs {need}{beside}"
    if ours is None:
        return "not run", ""
    value = ours.get("value")
    if value is None or (isinstance(value, float) and not math.isfinite(value)):
        return "not run", f"our value is {value}, which is no number"
    rule = row["rule"]
    if rule == "info":
        return "info", "printed, not judged"
    if rule == "order":
        if same_order is None:
            return "not run", "other methods of the ranking have no value yet"
        return ("same direction", "") if same_order else ("differs", "the methods rank differently")
    met, why = _met(row, ours)
    if rule == "design" and not met:
        return "not run", why
    if met is None:
        return "same direction", why
    if not met:
        return "differs", why
    if row["basis"] == "by-construction":
        return "by construction", why
    return ("same direction" if rule == "sign" else "reproduced"), why


def _met(row: dict[str, Any], ours: dict[str, Any]) -> Finding:
    """Say whether a rule is met; None is nearly."""
    published, value, low, high = row["value"], ours["value"], ours.get("low"), ours.get("high")
    few = (ours.get("n") or 0) < row.get("n", 0)
    match row["rule"]:
        case "design":
            met = value == published
            return met, "" if met else f"the published design takes --profile paper; what ran: {value}"
        case "equal" if isinstance(published, str) or isinstance(value, str):
            return published == value, ""
        case "equal":
            whole = {"share": 1, "ratio": 1, "%": 100}.get(row["unit"])
            met = value == published if published in (0, whole) else abs(value - published) <= _half_digit(published)
            return met, f"n = {ours['n']} of the {row['n']} published" if few else ""
        case _ if low is None or high is None:
            return False, "no interval was given"
        case "sign" if "within" in row:
            return abs(value) < row["within"], f"published as below {row['within']:g} in size"
        case "sign":
            side = row.get("above", 0)
            met = low > side if published > side else high < side
            return met, "" if met else f"our interval does not lie on the published side of {side:g}"
        case "overlap_zero":
            if not low <= 0 <= high:
                return False, "our interval excludes 0"
        case "overlap":
            least, most = _published_interval(row)
            if high < least or low > most:
                return False, f"the intervals do not meet (published {least:.4g} to {most:.4g})"
            width = high - low
            limit = 2 * (most - least) if "ci" in row or "n" in row else abs(published) / 2
            if width > limit:
                return None, f"our interval is {width:.3g} wide, more than the {limit:.3g} allowed"
    return (None, f"n = {ours.get('n')}, fewer than the {row['n']} published") if few else (True, "")


def _half_digit(value: float) -> float:
    text = repr(value)
    decimals = len(text.split(".")[1]) if "." in text else 0
    return 0.5 * 10.0**-decimals * (1 + 1e-9)


def _published_interval(row: dict[str, Any]) -> tuple[float, float]:
    value = float(row["value"])
    if "ci" in row:
        return float(row["ci"][0]), float(row["ci"][1])
    scale = 100.0 if row["unit"] == "%" else 1.0
    if "n" not in row or not 0 <= value <= scale:
        return value - _half_digit(row["value"]), value + _half_digit(row["value"])
    # Wilson; for a mean of values in [0, 1] its width is an upper bound, since none varies more than a coin does
    share, n, z = value / scale, row["n"], 1.959964
    centre = (share + z * z / (2 * n)) / (1 + z * z / n)
    half = z * math.sqrt(share * (1 - share) / n + z * z / (4 * n * n)) / (1 + z * z / n)
    return scale * (centre - half), scale * (centre + half)


def _orders(rows: list[dict[str, Any]], ours: dict[str, Any]) -> dict[str, bool | None]:
    """Say for each row ruled by `order` whether its group (the same id but for the method) ranks as published."""
    groups: dict[tuple[str, ...], list[dict[str, Any]]] = {}
    for row in rows:
        if row["rule"] == "order":
            parts = row["id"].split(".")
            groups.setdefault((parts[0], *parts[2:]), []).append(row)
    verdicts: dict[str, bool | None] = {}
    for group in groups.values():
        values = [(ours[row["id"]] or {}).get("value") for row in group]
        known = not any(value is None or value != value for value in values)
        same = _ranks(row["value"] for row in group) == _ranks(values) if known else None
        verdicts.update({row["id"]: same for row in group})
    return verdicts


def _ranks(values: Iterable[float]) -> list[int]:
    return np.unique(list(values), return_inverse=True)[1].tolist()


def _values(results: Path, experiment: str) -> dict[str, dict[str, Any]]:
    """Return our value for each id, from the first source that has it."""
    best: dict[str, dict[str, Any]] = {}
    for folder in _sources(results, experiment):
        try:
            for value in RunFolder(folder).values():
                best.setdefault(value["id"], {**value, "run": "/".join(folder.parts[-3:])})
        except (OSError, ValueError, KeyError, TypeError) as error:
            remedy = "run its notebook again"
            raise ResultsError(f"the values of '{folder}' cannot be read ({error!r}); {remedy}") from error
    return best


def reference(results_dir: str | Path) -> Path:
    """Return the folder of reference results: the one below `results_dir`, else the one that comes with the code."""
    own = Path(results_dir) / "reference"
    return own if own.is_dir() else Path(__file__).resolve().parents[2] / "results" / "reference"


def _sources(results: Path, experiment: str) -> Iterable[Path]:
    complete = [each for each in _manifests(results, experiment) if each["status"] == "complete"]
    complete.sort(key=lambda manifest: str(manifest.get("finished_utc")), reverse=True)
    complete.sort(key=lambda manifest: _RANK.get(manifest.get("profile", ""), len(_RANK)))
    yield from (manifest["folder"] for manifest in complete if not manifest.get("invalidated"))
    yield from sorted({path.parent for path in (reference(results) / experiment).rglob("values.json")})


def _manifests(results: Path, experiment: str) -> Iterator[dict[str, Any]]:
    """Yield the manifests of an experiment's runs, each with its folder."""
    for path in (results / "runs" / experiment).glob("*/manifest.json"):
        with suppress(ResultsError):  # a torn manifest is no complete run; the next sweep sets it aside
            yield RunFolder(path.parent).manifest | {"folder": path.parent}


def _total(ours: dict[str, Any]) -> dict[str, Any] | None:
    parts = [value for name, value in ours.items() if name.startswith("R01.") and name != _TOTAL]
    if not parts or any(part is None or not part.get("n") for part in parts):
        return None
    n = sum(part["n"] for part in parts)
    good = sum(part["value"] * part["n"] for part in parts)
    sources = ", ".join(dict.fromkeys(str(part.get("source")) for part in parts))
    return {"value": good / n, "low": None, "high": None, "n": n, "source": sources, "run": "sum of the rows above"}


def _why_not(experiment: str, results: Path, other_values: bool) -> str:
    if experiment == "90_scorecard":
        return "waits for the other rows of its table"
    if experiment not in experiments.names():
        return "the experiment is not part of this release yet"
    if other_values:
        return "the runs there are give no value for it"
    started = sorted((str(m.get("started_utc")), m["status"]) for m in _manifests(results, experiment))
    tried = f"its last run is {started[-1][1]}; " if started else ""
    return f"{tried}run: revise-lab reproduce {experiment} --profile quick"


def _shown(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}" if abs(value) < 1e4 else f"{value:,.0f}"
    return str(value)


def _ours(row: dict[str, Any]) -> str:
    if row["value"] is None:
        return "-"
    known = row["low"] is not None and row["high"] is not None and row["low"] != row["high"]
    return _shown(row["value"]) + (f" [{_shown(row['low'])}, {_shown(row['high'])}]" if known else "")


def _text_row(row: dict[str, Any]) -> str:
    published, unit = str(row["published"]), row["unit"]
    n = "" if row["n"] is None else f"n={row['n']}"
    note = f"  ({row['why']})" if row["why"] and row["standing"] != "info" else ""
    return (
        f"  {row['id']:<36} {published:>12} {_ours(row):>28} {unit:<10} {n:<8} "
        f"{row['source'] or '-':<16} {row['standing']}{note}"
    ).rstrip()


def _html_row(row: dict[str, Any]) -> str:
    standing = f"{row['standing']}: {row['why']}" if row["why"] else row["standing"]
    cells = (
        row["id"], f"{row['where']}: {row['metric']}", f"{row['published']} {row['unit']}", _ours(row),
        "" if row["n"] is None else row["n"], row["source"] or "", standing,
    )  # fmt: skip
    return "<tr>" + "".join(f"<td>{html.escape(str(cell))}</td>" for cell in cells) + "</tr>"
