"""Tables for papers: a LaTeX file with booktabs rules and a CSV beside it, from one frame.

>>> Column("Model calls", unit="calls", digits=1, better="down").heading()
'Model calls (calls)'
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd

from revise_lab.errors import ConfigError
from revise_lab.lab.document import hint, nearest
from revise_lab.lab.files import write_atomic

__all__ = ["Column", "save_table"]

_ARROWS = {"up": r" $\uparrow$", "down": r" $\downarrow$", None: ""}
_LATEX = str.maketrans(
    {
        "\\": r"\textbackslash{}", "&": r"\&", "%": r"\%", "$": r"\$", "#": r"\#", "_": r"\_", "{": r"\{", "}": r"\}",
        "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "<": r"\textless{}", ">": r"\textgreater{}",
    }
)  # fmt: skip
MISSING = "--"


class Column(NamedTuple):
    """How one column of a table is shown.

    Attributes
    ----------
    label : str
        Heading.
    unit : str
        Goes into the heading, in brackets.
    digits : int or None
        Decimals. None: whole numbers as they are; other numbers to two significant digits of their uncertainty (half
        the interval, when `low` and `high` are given), else two decimals.
    better : str or None
        ``up`` or ``down``; the best value is set bold, and so is every value that looks the same when printed.
    low, high : str or None
        Columns with the ends of the interval, printed behind the value.
    """

    label: str
    unit: str = ""
    digits: int | None = None
    better: str | None = None
    low: str | None = None
    high: str | None = None

    def heading(self) -> str:
        """Return label and unit."""
        return f"{self.label} ({self.unit})" if self.unit else self.label


def save_table(
    frame: pd.DataFrame, name: str, folder: str | Path, columns: Mapping[str, Column | str] | None = None
) -> list[Path]:
    """Write a frame as ``name.tex`` (booktabs) and ``name.csv``.

    Parameters
    ----------
    frame : DataFrame
        One row per row of the table.
    name : str
        Stem of the files.
    folder : str or Path
        Created when missing.
    columns : mapping, optional
        Column of the frame -> `Column` or heading; in this order. By default all columns under their own names.

    Returns
    -------
    list of Path
        The .tex and the .csv file. The CSV holds unrounded values and the ends of the intervals.

    Raises
    ------
    ConfigError
        If a column is not in the frame, or `better` is neither up nor down.
    """
    if not name or Path(name).name != name:
        raise ConfigError(f"table name {name!r} must be a file stem without folders; pass the folder apart", name=name)
    chosen = {key: Column(spec) if isinstance(spec, str) else spec for key, spec in (columns or {}).items()}
    chosen = chosen or {str(key): Column(str(key)) for key in frame.columns}
    _check(frame, chosen, name)
    printed = pd.DataFrame({key: _printed(frame, key, spec) for key, spec in chosen.items()}, dtype=object)
    bold = pd.DataFrame({key: _best(frame[key], printed[key], spec) for key, spec in chosen.items()})
    headings = {key: _escape(spec.heading()) + _ARROWS[spec.better] for key, spec in chosen.items()}
    styler = (
        printed.style.format(_escape)
        .apply(lambda _: bold.map(lambda best: "textbf:--rwrap;" if best else ""), axis=None)
        .format_index(lambda key: headings[key], axis=1)
        .hide(axis="index")
    )
    align = "".join("r" if pd.api.types.is_numeric_dtype(frame[key]) else "l" for key in chosen)
    tex = styler.to_latex(hrules=True, column_format=align)
    sources: dict[str, str | None] = {}
    for key, spec in chosen.items():
        sources |= {spec.heading(): key, f"{spec.label} low": spec.low, f"{spec.label} high": spec.high}
    wide = pd.DataFrame({heading: frame[source] for heading, source in sources.items() if source})
    texts = {"tex": tex, "csv": wide.to_csv(index=False, lineterminator="\n")}
    return [write_atomic(Path(folder) / f"{name}.{kind}", text.encode()) for kind, text in texts.items()]


def _check(frame: pd.DataFrame, chosen: Mapping[str, Column], name: str) -> None:
    known = [str(column) for column in frame.columns]
    for key, spec in chosen.items():
        for wanted in filter(None, (key, spec.low, spec.high)):
            if wanted not in known:
                guess = hint(nearest(wanted, known)) or f"; it has {known}"
                raise ConfigError(f"table '{name}': the frame has no column '{wanted}'{guess}", column=wanted)
        if spec.better not in _ARROWS:
            raise ConfigError(f"table '{name}', column '{key}': better={spec.better!r} is neither 'up' nor 'down'")


def _printed(frame: pd.DataFrame, key: str, spec: Column) -> list[str]:
    if not spec.low or not spec.high:
        return [_number(value, spec.digits) for value in frame[key]]
    cells = []
    for numbers in zip(frame[key], frame[spec.low], frame[spec.high], strict=True):
        digits = _digits(*numbers[1:]) if spec.digits is None else spec.digits
        cells.append("{} [{}, {}]".format(*(_number(number, digits) for number in numbers)))
    return cells


def _digits(low: float, high: float) -> int:
    half = (high - low) / 2
    return 2 if not half > 0 or math.isinf(half) else max(0, 1 - math.floor(math.log10(half)))


def _number(value: Any, digits: int | None) -> str:
    if isinstance(value, str | bool):
        return str(value)
    if pd.isna(value):
        return MISSING
    if digits is None:
        digits = 0 if float(value).is_integer() and not isinstance(value, float) else 2
    text = f"{value:,.{digits}f}"
    return text[1:] if text.startswith("-") and not text.strip("-0.,") else text


def _best(values: pd.Series, printed: pd.Series, spec: Column) -> list[bool]:
    if spec.better is None or values.dropna().empty:
        return [False] * len(values)
    best = values.max() if spec.better == "up" else values.min()
    # what a reader cannot tell apart is not told apart: compare as printed, without the interval
    same = printed[values == best].iloc[0].split(" [")[0]
    return [not pd.isna(value) and text.split(" [")[0] == same for value, text in zip(values, printed, strict=True)]


def _escape(text: str) -> str:
    return str(text).translate(_LATEX)
