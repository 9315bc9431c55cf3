"""Results on disk: one folder a run, written so that an interruption never costs what is finished.

::

    results/runs/<experiment>/<profile>-<hash>/
      manifest.json     status: started -> complete | failed | partial
      cells-*.parquet   rows of finished cells
      figures/ tables/ values.json notebook.ipynb

Everything is written to a temporary file and renamed. Two sweeps may write into one folder: parts have names of their
own, and of two manifests the last one stands; its counts are taken from the parts.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from revise_lab.errors import ResultsError
from revise_lab.lab import experiments
from revise_lab.lab.config import RESULT_SCHEMA, Config
from revise_lab.lab.files import environment, set_aside, unwritable, utc, write_atomic
from revise_lab.lab.parts import Parts, plain_scalar

_EMPTY = {"status": "started", "finished_utc": None, "cells": {}, "failed": {}, "sweeps": []}


class RunFolder:
    """The folder of one run: its manifest, the rows of its cells and its deliverables.

    Parameters
    ----------
    path : str or Path
        An existing or a future run folder; nothing is read or written yet.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.parts = Parts(self.path)
        self._manifest_path = self.path / "manifest.json"

    def __repr__(self) -> str:
        return f"RunFolder({str(self.path)!r})"

    @classmethod
    def of(cls, config: Config, results_dir: str | Path = "results") -> RunFolder:
        """Return where the run of a config lies, whether or not it exists."""
        return cls(Path(results_dir) / "runs" / config.experiment / f"{config.profile}-{config.hash}")

    @classmethod
    def create(cls, config: Config, results_dir: str | Path = "results") -> RunFolder:
        """Make the folder and its manifest, or take up the ones that are there.

        Raises
        ------
        ResultsError
            If the folder cannot be written; better now than after the first cell.
        """
        run = cls.of(config, results_dir)
        try:
            run.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise unwritable(run.path, error) from error
        before: dict[str, Any] = {}
        if run._manifest_path.exists():
            try:
                before = run.manifest
            except ResultsError as error:
                set_aside(run._manifest_path, "corrupt", f"{error}; it is written anew")
        experiment = experiments.get(config.experiment)
        now = {
            "result_schema": RESULT_SCHEMA,
            "experiment": config.experiment,
            "algorithm_version": experiment.algorithm_version,
            **{name: getattr(config, name) for name in ("profile", "hash", "seed", "source")},
            "config": config.resolved(),
            **{name: getattr(config, name) for name in ("overrides", "origins")},
            "params": list(experiment.params),
            "columns": {name: dataclasses.asdict(column) for name, column in experiment.columns.items()},
        }
        fresh = {**_EMPTY, "started_utc": utc(), "deliverables": {}, "invalidated": None, **environment()}
        run._save(now | {key: before.get(key, value) for key, value in fresh.items()})
        return run

    # --- the manifest ---

    @property
    def manifest(self) -> dict[str, Any]:
        """The manifest as it lies on disk now."""
        try:
            manifest = json.loads(self._manifest_path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise ResultsError(f"{self.path} is no run folder: it has no manifest.json", path=str(self.path)) from None
        except (OSError, ValueError) as error:
            raise ResultsError(f"{self._manifest_path} cannot be read: {error}", path=str(self.path)) from error
        if not isinstance(manifest, dict) or not {"experiment", *_EMPTY} <= manifest.keys():
            raise ResultsError(f"{self._manifest_path} is not the manifest of a run", path=str(self.path))
        return manifest

    def _save(self, manifest: Mapping[str, Any]) -> None:
        text = json.dumps(manifest, indent=1, ensure_ascii=False, allow_nan=False)
        write_atomic(self._manifest_path, f"{text}\n".encode())

    def start(self, **sweep: Any) -> None:
        """Note that a sweep computes cells now, with which code, packages and executor."""
        manifest = self.manifest | environment() | {"status": "started", "finished_utc": None, "invalidated": None}
        entry = {"started_utc": utc(), "finished_utc": None, "git": manifest["git"], **sweep}
        self._save(manifest | {"sweeps": [*manifest["sweeps"], entry]})

    def finish(self, total: int, failed: Mapping[str, Any], **sweep: Any) -> str:
        """Close the last sweep's entry and set the status by what the folder holds.

        Parameters
        ----------
        total : int
            Cells of the config.
        failed : mapping
            For each cell that raised in this sweep, its parameters and message.
        **sweep : Any
            Counts and times of this sweep.

        Returns
        -------
        str
            ``complete``, ``failed`` or ``partial``.
        """
        done = self.parts.ids()
        failed = {name: what for name, what in failed.items() if name not in done}
        status = "complete" if len(done) == total else "failed" if failed else "partial"
        manifest = self.manifest | {"status": status, "finished_utc": utc(), "failed": failed}
        manifest["cells"] = {"total": total, "done": len(done), "failed": len(failed)}
        if manifest["sweeps"]:
            manifest["sweeps"][-1] |= {"finished_utc": manifest["finished_utc"], "failed": len(failed), **sweep}
        self._save(manifest)
        return status

    def invalidate(self, reason: str) -> None:
        """Withdraw the rows of this run for a reason; no sweep reuses them."""
        for path in self.parts.files():
            path.rename(path.with_suffix(".invalidated"))
        self._save(self.manifest | {"status": "partial", "invalidated": reason})

    # --- rows ---

    def frame(self, *, partial: bool = False) -> pd.DataFrame:
        """Read all rows, sorted by parameters and replicate, each cell once.

        Parameters
        ----------
        partial : bool
            Accept a run that is not complete.

        Returns
        -------
        DataFrame
            ``cell_id``, the parameters, ``replicate``, ``seed`` and the experiment's columns. Its ``attrs`` carry
            experiment, profile, hash, source, the names of the exact and the timed columns, and the units.

        Raises
        ------
        ResultsError
            If a part is torn or cells are missing; a sweep repairs both.
        """
        manifest, remedy = self.manifest, "run the sweep again: only what is missing is computed"
        torn = self.parts.tables(["cell_id"])[1]
        if torn:
            names = ", ".join(path.name for path in torn)
            raise ResultsError(f"{self.path}: {names} is corrupt; {remedy}", path=str(self.path))
        table = self.parts.table()
        done = len(table["cell_id"].unique()) if len(table) else 0
        total = manifest["cells"].get("total")
        if not partial and (manifest["status"] != "complete" or done != total):
            what = f"{self.path}: {manifest['status']}, {done} of {total if total else '?'} cells are there"
            raise ResultsError(f"{what}; {remedy}, or pass partial=True", path=str(self.path), done=done, total=total)
        names = ["cell_id", *manifest["params"], "replicate", "seed", *manifest["columns"]]
        frame = table.to_pandas() if len(table) else pd.DataFrame(columns=names)
        order = [*manifest["params"], "replicate"]
        frame = frame.sort_values(order, na_position="first", kind="stable", ignore_index=True)[names]
        kinds = {kind: [n for n, c in manifest["columns"].items() if c["kind"] == kind] for kind in ("exact", "timed")}
        units = {name: column["unit"] for name, column in manifest["columns"].items()}
        labels = {key: manifest[key] for key in ("experiment", "profile", "hash", "source")}
        frame.attrs = labels | kinds | {"units": units}
        return frame

    # --- deliverables ---

    def write(self, name: str, data: bytes | str) -> Path:
        """Write a deliverable below the folder, whole or not at all."""
        path = self.path / name
        if not path.resolve().is_relative_to(self.path.resolve()):
            raise ResultsError(f"{name!r} leaves the run folder {self.path}", path=str(path))
        return write_atomic(path, data.encode() if isinstance(data, str) else data)

    def write_values(self, values: Sequence[Mapping[str, Any]]) -> Path:
        """Write ``values.json``, what the scorecard and the prose quote; a number not known is null, never NaN."""
        rows = [{key: _finite(plain_scalar(value)) for key, value in row.items()} for row in values]
        return self.write("values.json", json.dumps(rows, indent=1, ensure_ascii=False, allow_nan=False) + "\n")

    def values(self) -> list[dict[str, Any]]:
        """Read ``values.json``, or compute the values from the rows where it was not written."""
        path = self.path / "values.json"
        if not path.exists():
            return experiments.get(self.manifest["experiment"]).values(self.frame())
        try:
            rows = json.loads(path.read_text(encoding="utf-8"))
            if not isinstance(rows, list) or any(not isinstance(row, dict) or "id" not in row for row in rows):
                raise ValueError("it is no list of values with an id")
            return rows
        except (OSError, ValueError) as error:
            raise ResultsError(f"{path} cannot be read: {error}; run the notebook again", path=str(path)) from error

    def record_deliverables(self) -> dict[str, str]:
        """Note every file of the folder but rows and manifest, with its SHA-256, in the manifest."""
        found = {}
        for path in sorted(self.path.rglob("*")):
            name = path.relative_to(self.path)
            if path.is_file() and not any(part.startswith((".", "cells-", "manifest.")) for part in name.parts):
                found[name.as_posix()] = hashlib.sha256(path.read_bytes()).hexdigest()
        self._save(self.manifest | {"deliverables": found})
        return found


def compare(a: RunFolder | str | Path, b: RunFolder | str | Path) -> pd.DataFrame:
    """Say which values of two runs of an experiment moved beyond their interval.

    Returns
    -------
    DataFrame
        One row a value: ``id, unit, a, a_low, a_high, b, b_low, b_high, change, moved``; those that moved come first.
        A value moved if each lies outside the other's interval (a value without interval is its own), or if only one
        run has it; one that is a text, if it is another one.
    """
    runs = [run if isinstance(run, RunFolder) else RunFolder(run) for run in (a, b)]
    kinds = [run.manifest["experiment"] for run in runs]
    if kinds[0] != kinds[1]:
        where = f"{runs[0].path} is of {kinds[0]}, {runs[1].path} of {kinds[1]}"
        raise ResultsError(f"{where}: compare runs of one of them")
    sides = []
    for side, run in zip("ab", runs, strict=True):
        frame = pd.DataFrame({row["id"]: row for row in run.values()}, index=["unit", "value", "low", "high"]).T
        sides.append(frame.set_axis([f"{side}_unit", side, f"{side}_low", f"{side}_high"], axis="columns"))
    both = sides[0].join(sides[1], how="outer").rename_axis("id").reset_index()
    numbers = [f"{side}{end}" for side in "ab" for end in ("", "_low", "_high")]
    texts = both[["a", "b"]].map(lambda value: value if isinstance(value, str) else None)
    both[numbers] = both[numbers].apply(pd.to_numeric, errors="coerce")
    both["unit"] = both["a_unit"].combine_first(both["b_unit"]).fillna("")
    both["change"] = both["b"] - both["a"]
    both["moved"] = _outside(both, "a", "b") & _outside(both, "b", "a")
    if texts.notna().any(axis=None):
        both["moved"] |= texts["a"].fillna("") != texts["b"].fillna("")
        both = both.assign(**{side: both[side].astype(object).where(texts[side].isna(), texts[side]) for side in "ab"})
    found = both[["id", "unit", *numbers, "change", "moved"]]
    return found.sort_values(["moved", "id"], ascending=[False, True], ignore_index=True)


def verify(
    a: RunFolder | str | Path | pd.DataFrame, b: RunFolder | str | Path | pd.DataFrame, *, rtol: float = 0.0
) -> pd.DataFrame:
    """List where the exact columns of two runs differ; an empty frame means that they are equal.

    Parameters
    ----------
    a, b : RunFolder, path or DataFrame
        A frame must come from `RunFolder.frame` or a sweep; its ``attrs`` name the exact columns.
    rtol : float
        Relative tolerance of numbers; 0 asks for equality.

    Returns
    -------
    DataFrame
        ``cell_id, row, column, a, b``; a cell or row that only one side has is one line with column ``(row)``.
    """
    frames = []
    for side in (a, b):
        frame = side if isinstance(side, pd.DataFrame) else RunFolder(getattr(side, "path", side)).frame()
        frames.append(frame.set_index(["cell_id", frame.groupby("cell_id").cumcount().rename("row")]))
    exact = [frame.attrs.get("exact") for frame in frames]
    if exact[0] is None or exact[0] != exact[1]:
        raise ResultsError(f"the runs have different exact columns, {exact[0]} and {exact[1]}", columns=exact)
    found: list[tuple[Any, ...]] = []
    for place in frames[0].index.symmetric_difference(frames[1].index):
        found.append((*place, "(row)", *("present" if place in frame.index else "missing" for frame in frames)))
    shared = frames[0].index.intersection(frames[1].index)
    for column in exact[0]:
        ours, theirs = (frame.loc[shared, column].tolist() for frame in frames)
        pairs = zip(shared, ours, theirs, strict=True)
        found += [(*place, column, one, other) for place, one, other in pairs if not _same(one, other, rtol)]
    return pd.DataFrame(found, columns=["cell_id", "row", "column", "a", "b"])


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not np.isfinite(value) else value


def _outside(both: pd.DataFrame, one: str, other: str) -> pd.Series:
    """Whether `one` lies outside the interval of `other`; two unknowns agree, an unknown and a known do not."""
    value, centre = both[one], both[other]
    low, high = (both[other + end].fillna(centre) for end in ("_low", "_high"))
    slack = 1e-12 * np.maximum(value.abs(), centre.abs())
    apart = ~value.between(low - slack, high + slack)
    return apart.where(value.notna() & centre.notna(), value.notna() != centre.notna())


def _same(one: Any, other: Any, rtol: float) -> bool:
    if pd.isna(one) or pd.isna(other):
        return bool(pd.isna(one) and pd.isna(other))
    if rtol and not isinstance(one, str) and not isinstance(other, str):
        return bool(abs(one - other) <= rtol * max(abs(one), abs(other)))
    return bool(one == other)
