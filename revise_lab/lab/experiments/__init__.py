"""The registry of experiments: one module each, imported when asked for.

An experiment is a module that says what one cell is and computes it. It never reads files, spawns workers or draws:
the sweep does the first two, the notebook the last. A module defines

``ALGORITHM_VERSION``
    a number that is raised by hand whenever the same parameters would give other exact results;
``Params``
    a frozen pydantic model of one cell that forbids extra fields;
``NOT_IN_SEED``
    names of the parameters that must not change the workload (a policy, a coverage), so that comparisons are paired;
``COLUMNS``
    the columns of a row, each a `Column`;
``cell(params, seed, replicate)``
    the rows of one cell, at least one;
``values(frame)``
    the values that are held against claims: id, value, low, high, n, unit, source;
``estimate(params)``
    optional: what a cell will cost, any of ``calls``, ``tokens``, ``wall_s``;
``usage(rows)``
    optional: the ``calls`` and ``tokens`` that a cell has spent; without it they are summed from columns so named.

Other packages register theirs in the entry-point group ``revise_lab.experiments``.
"""

from __future__ import annotations

import functools
import importlib
import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import metadata
from types import ModuleType
from typing import Any, Literal

from pydantic import BaseModel

from revise_lab.errors import ConfigError
from revise_lab.lab.document import hint, nearest

#: The entry-point group in which other packages register experiment modules.
GROUP = "revise_lab.experiments"

#: Columns that the results folder writes itself.
RESERVED = ("cell_id", "replicate", "seed")


@dataclass(frozen=True, slots=True)
class Column:
    """What one column of an experiment's rows holds.

    Parameters
    ----------
    kind : {'exact', 'timed'}
        Exact columns are equal on every machine and are compared by resume and verify; timed ones are clock readings.
    unit : str
        Unit of the values, empty for a count without one or for a label.
    help : str
        One sentence for the legend of a table.
    dtype : {'int', 'float', 'str', 'bool'}, optional
        The type stored; without it the type follows the first values written.
    """

    kind: Literal["exact", "timed"]
    unit: str = ""
    help: str = ""
    dtype: Literal["int", "float", "str", "bool"] | None = None


@dataclass(frozen=True, slots=True)
class Experiment:
    """One experiment, checked: every name that the sweep relies on is there."""

    name: str
    algorithm_version: int
    Params: type[BaseModel]
    not_in_seed: frozenset[str]
    columns: Mapping[str, Column]
    cell: Callable[..., list[dict[str, Any]]]
    values: Callable[..., list[dict[str, Any]]]
    estimate: Callable[..., Mapping[str, float]] | None
    usage: Callable[..., Mapping[str, float]] | None

    @property
    def params(self) -> tuple[str, ...]:
        """Names of the cell parameters, in the order the model declares them."""
        return tuple(self.Params.model_fields)


def names() -> tuple[str, ...]:
    """Names of the experiments that can be loaded; none of them is imported."""
    ours = {module.name for module in pkgutil.iter_modules(__path__) if not module.name.startswith("_")}
    return tuple(sorted(ours | set(_registered())))


def get(name: str) -> Experiment:
    """Import and check the experiment called `name`.

    Parameters
    ----------
    name : str
        The module's name in this package, an entry point's name, or the dotted path of any importable module.

    Raises
    ------
    ConfigError
        If there is no such experiment, if it needs a package that is not installed, or if its module breaks the
        contract above.
    """
    module = _import(name)
    missing = [key for key in ("ALGORITHM_VERSION", "Params", "COLUMNS", "cell", "values") if not hasattr(module, key)]
    if missing:
        raise ConfigError(f"experiment {name!r} does not define {', '.join(missing)}", experiment=name, missing=missing)
    beside = {key: getattr(module, key, None) for key in ("estimate", "usage")}
    kept, columns = frozenset(getattr(module, "NOT_IN_SEED", ())), dict(module.COLUMNS)
    experiment = Experiment(
        name, module.ALGORITHM_VERSION, module.Params, kept, columns, module.cell, module.values, **beside
    )
    if broken := _broken(experiment):
        raise ConfigError(f"experiment {name!r}: {broken}", experiment=name)
    return experiment


@functools.cache
def _registered() -> dict[str, str]:
    return {entry.name: entry.value for entry in metadata.entry_points(group=GROUP)}


def _import(name: str) -> ModuleType:
    path = _registered().get(name) or (name if "." in name and name[0] != "." else f"{__name__}.{name}")
    try:
        return importlib.import_module(path)
    except ModuleNotFoundError as error:
        if error.name and (path == error.name or path.startswith(f"{error.name}.")):
            near = nearest(name, names())
            guess = hint(near) or f"; there are: {', '.join(names()) or 'none'}"
            raise ConfigError(f"no experiment is called {name!r}{guess}", experiment=name, nearest=near) from None
        raise ConfigError(
            f"experiment {name!r} needs the package {error.name!r}, which is not installed; install it, or the extra "
            "of revise_lab that brings it",
            experiment=name,
            package=error.name,
        ) from error


def _broken(experiment: Experiment) -> str | None:
    settings = experiment.Params.model_config
    if not settings.get("frozen") or settings.get("extra") != "forbid":
        return "Params must be frozen and forbid extra fields"
    own, kept = set(experiment.params), set(RESERVED)
    if taken := set(experiment.columns) & (own | kept):
        return f"COLUMNS repeats {sorted(taken)}, which parameters or the results folder already write"
    if reserved := own & kept:
        return f"Params uses the reserved names {sorted(reserved)}"
    if unknown := experiment.not_in_seed - own:
        return f"NOT_IN_SEED names {sorted(unknown)}, which are no parameters"
    return None
