"""The rows of finished cells on disk, in parquet parts that are trusted whole or not at all.

A part's name is the hash of its bytes, and all rows of a cell are in one part. So a torn file is known by its name, an
interrupted write leaves no trace, and a cell that two sweeps computed side by side is simply there twice: readers take
the first.
"""

from __future__ import annotations

import contextlib
import io
import json
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute
import pyarrow.parquet as pq

from revise_lab.errors import ResultsError
from revise_lab.lab.config import Cell
from revise_lab.lab.document import hint, nearest
from revise_lab.lab.experiments import Experiment
from revise_lab.lab.files import digest, set_aside, write_atomic

_TYPES = {"int": pa.int64(), "float": pa.float64(), "str": pa.string(), "bool": pa.bool_()}
_ABANDONED_S = 3600
_MERGE_FROM = 8


class Parts:
    """The parts in one folder.

    Parameters
    ----------
    path : Path
        The folder; it need not exist yet.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._schema: pa.Schema | None = None

    def files(self) -> list[Path]:
        """Return the parts' paths in the order in which they are read."""
        return sorted(self.path.glob("cells-*.parquet"))

    def tables(self, columns: Sequence[str] | None = None) -> tuple[list[pa.Table], list[Path]]:
        """Read every sound part; the second list names the torn ones."""
        for _ in range(5):
            sound, torn = [], []
            try:
                for path in self.files():
                    data = path.read_bytes()
                    if path.stem == f"cells-{digest(data)}":
                        sound.append(pq.read_table(io.BytesIO(data), columns=columns))
                    else:
                        torn.append(path)
            except FileNotFoundError:  # another sweep has just merged the parts listed
                continue
            except OSError as error:
                raise ResultsError(f"{self.path} cannot be read: {error}", path=str(self.path)) from error
            return sound, torn
        raise ResultsError(f"{self.path}: its parts keep changing; wait for the other sweep", path=str(self.path))

    def ids(self) -> set[str]:
        """Ids of the cells whose rows are stored and sound."""
        return {name for table in self.tables(["cell_id"])[0] for name in _ids(table)}

    def repair(self, experiment: Experiment) -> set[str]:
        """Set aside what cannot be trusted and return the ids of the cells that can.

        Warns of each part that is torn, or whose columns are not those that the experiment declares now.
        """
        for old in self.path.glob(".*.tmp"):
            with contextlib.suppress(OSError):
                if time.time() - old.stat().st_mtime > _ABANDONED_S:
                    old.unlink()
        for path in self.tables(["cell_id"])[1]:
            set_aside(path, "corrupt", "its bytes are not those written; its cells are computed again")
        for path in self.files():
            with contextlib.suppress(FileNotFoundError):
                if pq.read_schema(path).names != column_names(experiment):
                    what = "COLUMNS have changed under one ALGORITHM_VERSION; its cells are computed again"
                    set_aside(path, "outdated", what)
        return self.ids()

    def rows(self, ids: Collection[str], experiment: Experiment) -> pa.Table | None:
        """Return the rows stored for some cells, each cell once, or None; what is torn or outdated is passed over."""
        names = column_names(experiment)
        return self._once(lambda table: _ids(table) & set(ids) if table.column_names == names else set())

    def append(self, tables: Sequence[pa.Table]) -> Path:
        """Store the rows of finished cells as one part.

        Raises
        ------
        ResultsError
            If a column's type contradicts the rows stored before, or the part cannot be written. The parts written
            before stay as they are.
        """
        if self._schema is None:
            self._schema = pa.schema([])
            for path in self.files():
                with contextlib.suppress(FileNotFoundError):
                    self._schema = _unify(self.path, [self._schema, pq.read_schema(path)])
        self._schema = _unify(self.path, [self._schema, *(table.schema for table in tables)])
        buffer = io.BytesIO()
        pq.write_table(pa.concat_tables(tables, promote_options="permissive"), buffer)
        data = buffer.getvalue()
        return write_atomic(self.path / f"cells-{digest(data)}.parquet", data)

    def merge(self) -> None:
        """Put many small parts into one; a reader meanwhile finds the old, the new or both."""
        files = self.files()
        if len(files) < _MERGE_FROM or self.tables(["cell_id"])[1]:
            return
        merged = self.append([self.table()])
        for path in files:
            if path != merged:
                path.unlink(missing_ok=True)

    def table(self) -> pa.Table:
        """Read all rows that are sound, each cell once."""
        kept = self._once(_ids)
        return pa.table({}) if kept is None else kept

    def _once(self, wanted: Callable[[pa.Table], set[str]]) -> pa.Table | None:
        """Return the rows of the cells that are wanted of each part, from the first part that has them."""
        seen, kept = set[str](), []
        for table in self.tables()[0]:
            if new := wanted(table) - seen:
                kept.append(_only(table, new))
                seen |= new
        return pa.concat_tables(kept, promote_options="permissive") if kept else None


def column_names(experiment: Experiment) -> list[str]:
    """Names of the stored columns, in order."""
    return ["cell_id", *experiment.params, "replicate", "seed", *experiment.columns]


def as_table(experiment: Experiment, cell: Cell, rows: Iterable[Mapping[str, Any]]) -> pa.Table:
    """Check the rows of one cell against the declared columns and give them its id and parameters.

    Raises
    ------
    ResultsError
        If there is no row, a column is not declared, a value is no scalar, or a type is not the declared one.
    """
    rows, what = list(rows), f"cell {cell.id} of {cell.experiment}"
    if not rows:
        raise ResultsError(f"{what} returned no row, so it could not be told from a cell not computed", cell=cell.id)
    for name in sorted({name for row in rows for name in row} - set(experiment.columns)):
        guess = hint(nearest(name, list(experiment.columns)))
        raise ResultsError(f"{what}: column {name!r} is not in COLUMNS{guess}", cell=cell.id, column=name)
    keys = {"cell_id": cell.id, "replicate": cell.replicate, "seed": cell.seed}
    keys |= {k: json.dumps(v, sort_keys=True) if isinstance(v, (list, dict)) else v for k, v in cell.params.items()}
    arrays = []
    for name in column_names(experiment):
        column = experiment.columns.get(name)
        values = [plain_scalar(row.get(name)) for row in rows] if column else [keys[name]] * len(rows)
        try:
            arrays.append(_typed(pa.array(values), column.dtype if column else None))
        except (pa.ArrowException, TypeError, ValueError, OverflowError) as error:
            raise ResultsError(f"{what}: column {name!r}: {error}", cell=cell.id, column=name) from error
    return pa.Table.from_arrays(arrays, column_names(experiment))


def plain_scalar(value: Any) -> Any:
    """Turn a numpy scalar into Python's."""
    return value.item() if isinstance(value, np.generic) else value


def _typed(array: pa.Array, dtype: str | None) -> pa.Array:
    """Give an array its declared type; Arrow itself would cut 2.5 down to 2."""
    if pa.types.is_nested(array.type):
        raise pa.ArrowInvalid("a list or a mapping; give it columns of its own, or store it as JSON text")
    if dtype is None or array.type == _TYPES[dtype]:
        return array
    if pa.types.is_null(array.type) or (dtype == "float" and pa.types.is_integer(array.type)):
        return array.cast(_TYPES[dtype])
    raise pa.ArrowInvalid(f"values of type {array.type}, declared {dtype}")


def _ids(table: pa.Table) -> set[str]:
    return set(table.column("cell_id").unique().to_pylist())


def _only(table: pa.Table, ids: Collection[str]) -> pa.Table:
    return table.filter(pa.compute.is_in(table["cell_id"], pa.array(sorted(ids), pa.string())))


def _unify(path: Path, schemas: Sequence[pa.Schema]) -> pa.Schema:
    try:
        return pa.unify_schemas(schemas, promote_options="permissive")
    except pa.ArrowException as error:
        what = f"{path}: new rows do not fit those stored: {error}; give the column a dtype in COLUMNS"
        raise ResultsError(what, path=str(path)) from error
