"""Experiment configs: one YAML file, a profile laid over it, and the cells that follow.

A profile is an overlay inside the file: mappings merge, lists replace. Overrides from a notebook or a command line come
last, and where each value came from is kept.

>>> config = load("revise_serving", profile="quick")                                        # doctest: +SKIP
>>> config.with_(grid__load=[0.7, 1.0, 1.3]).cells()[0].id                                  # doctest: +SKIP

Identity: a cell's id is a hash of what decides its result. Executor, folders and profile are not in it, so a cell that
any config of the experiment has computed is never computed again. A cell's seed comes from its content too, without
the parameters that the experiment keeps out of it: every policy meets the same workload.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn
from urllib.parse import urlsplit

import numpy as np
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, PrivateAttr, ValidationError

from revise_lab.errors import ConfigError
from revise_lab.lab import experiments
from revise_lab.lab.document import Document, Place, dotted, find, hint, nearest, override, plain, read
from revise_lab.lab.files import digest

#: Version of the stored rows; part of every cell's id.
RESULT_SCHEMA = 1

PROFILES = ("smoke", "quick", "paper")

_MAX_CELLS = 2_000_000


class Frozen(dict[str, Any]):
    """A mapping of a config; it is changed through `Config.with_` only."""

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise TypeError("a config is frozen; make another with config.with_(grid__name=[...])")

    __setitem__ = __delitem__ = __ior__ = update = pop = popitem = clear = setdefault = _refuse  # type: ignore[assignment]

    def __reduce__(self) -> tuple[Any, ...]:
        return (Frozen, (dict(self),))


Grid = Annotated[dict[str, tuple[Any, ...]], AfterValidator(Frozen)]


class Paper(BaseModel):
    """What of which paper the experiment regenerates."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    id: str
    where: str
    claim: str


@dataclass(frozen=True, slots=True)
class Cell:
    """One sweep point and replicate: the unit of computing, storing and reusing.

    Parameters
    ----------
    id : str
        16 hexadecimal digits, see `cell_id`.
    experiment : str
        Name of the experiment.
    params : mapping
        Every parameter of the experiment's `Params`, defaults included, as plain values.
    replicate : int
        From 0.
    seed : int
        Below 2**63; equal for cells that differ only in parameters outside the seed.
    """

    id: str
    experiment: str
    params: Mapping[str, Any] = field(hash=False)
    replicate: int
    seed: int


class Config(BaseModel):
    """One experiment at one profile, resolved and checked; made by `load`, varied by `with_`."""

    model_config = ConfigDict(frozen=True, extra="forbid", populate_by_name=True)

    schema_version: Literal[1] = Field(alias="schema", description="version of this file format")
    experiment: str = Field(description="name of the experiment")
    title: str = ""
    paper: Paper | None = None
    seed: int = Field(0, ge=0, lt=2**63, description="root of every cell's seed")
    grid: Grid | tuple[Grid, ...] = Field(default_factory=Frozen, description="parameter: its values; or several such")
    fixed: Annotated[dict[str, Any], AfterValidator(Frozen)] = Field(default_factory=Frozen)
    replicates: int = Field(1, ge=1, le=_MAX_CELLS)
    exclusive: bool = Field(False, description="cells are timed, so they run one after another")
    source: str = Field("emulated", min_length=1, description="where values come from: emulated, measured, published")
    figures: tuple[str, ...] = Field((), description="figures that the notebook must write")
    tables: tuple[str, ...] = Field((), description="tables that the notebook must write")
    budget_s: float | None = Field(None, gt=0, description="wall time that the notebook may take")
    profiles: dict[Literal["smoke", "quick", "paper"], dict[str, Any]] = Field(default_factory=dict)
    profile: Literal["smoke", "quick", "paper"] = "smoke"

    _layers: _Layers = PrivateAttr()
    _overrides: dict[str, Any] = PrivateAttr()

    def with_(self, **changes: Any) -> Config:
        """Make a config with some values changed; ``__`` stands for the dot of a path.

        >>> config.with_(grid__load=[0.7, 1.0], seed=3)                                     # doctest: +SKIP
        """
        named = {name.replace("__", "."): value for name, value in changes.items()}
        return _resolve(self._layers.document, self.profile, self._overrides | named)

    def cells(self) -> tuple[Cell, ...]:
        """All cells in the order of the grid, each once."""
        return self._cells

    @property
    def hash(self) -> str:
        """8 hexadecimal digits over everything that can change a result, and nothing else.

        Taken over the ids of the cells: a title, the list of figures or the order of a grid's values leave it alone.
        """
        return digest("".join(sorted(cell.id for cell in self._cells)).encode(), 4)

    @property
    def overrides(self) -> dict[str, Any]:
        """The values set from outside the file, by dotted path."""
        return dict(self._overrides)

    @property
    def origins(self) -> dict[str, str]:
        """Where each value came from: default, file, profile or override, by dotted path."""
        found = {dotted(place): origin for place, origin in self._layers.origins.items() if place[0] != "profiles"}
        keys = {place[0] for place in self._layers.origins} | {"profile", "profiles"}
        given = set(self.fixed).union(*self.grids)
        defaults = [name for name in type(self).model_fields if name not in keys and name != "schema_version"]
        defaults += [f"params.{name}" for name in experiments.get(self.experiment).params if name not in given]
        return found | dict.fromkeys(defaults, "default")

    @property
    def grids(self) -> tuple[Mapping[str, tuple[Any, ...]], ...]:
        """The grid, or the several grids, always as a tuple."""
        return self.grid if isinstance(self.grid, tuple) else (self.grid,)

    @property
    def deliverables(self) -> tuple[str, ...]:
        """The files that the notebook must write below the run folder."""
        figures = [f"figures/{name}.{kind}" for name in self.figures for kind in ("pdf", "svg", "png")]
        return (*figures, *(f"tables/{name}.{kind}" for name in self.tables for kind in ("tex", "csv")))

    def resolved(self) -> dict[str, Any]:
        """Return plain values with the profile and the overrides applied."""
        return self.model_dump(mode="json", by_alias=True, exclude={"profiles"})

    @functools.cached_property
    def _cells(self) -> tuple[Cell, ...]:
        return tuple(_expand(self))


def load(
    name_or_path: str | Path,
    profile: str = "smoke",
    overrides: Mapping[str, Any] | Sequence[str] = (),
    configs_dir: str | Path | None = None,
) -> Config:
    """Read, overlay and check the config of an experiment.

    Parameters
    ----------
    name_or_path : str or Path
        A name such as ``"revise_serving"``, looked up in the configs folder, or the path of a YAML file.
    profile : {'smoke', 'quick', 'paper'}
        Which overlay to lay over the file; a profile that the file does not mention is the file as it stands.
    overrides : mapping or sequence of str
        ``{"grid.load": [0.7, 1.0]}`` or ``["grid.load=[0.7, 1.0]"]``; values of the second form are read as YAML.
    configs_dir : str or Path, optional
        Without it: ``REVISE_LAB_CONFIGS``, else ``./configs`` and the folder beside a checkout's package.

    Raises
    ------
    ConfigError
        With file, line, dotted path, allowed values and the nearest name, as far as they apply.
    """
    document = read(find(name_or_path, configs_dir))
    if isinstance(overrides, str):
        overrides = (overrides,)
    if not isinstance(overrides, Mapping):
        overrides = dict(override(item) for item in overrides)
    for other in PROFILES:  # a slip in an overlay should not wait for the long run to be found
        if other != profile and other in (document.values.get("profiles") or ()):
            _resolve(document, other, {}, expand=False)
    return _resolve(document, profile, overrides)


def cell_id(experiment: str, params: Mapping[str, Any], replicate: int, seed: int, algorithm_version: int) -> str:
    """Hash what decides a cell's exact result; serves a config and a stored row alike.

    Our choice: blake2b over canonical JSON, and `seed` is the cell's own, into which the root seed has gone.
    """
    content = {"experiment": experiment, "params": params, "replicate": replicate, "seed": seed}
    content |= {"algorithm_version": algorithm_version, "result_schema": RESULT_SCHEMA}
    return digest(_canonical(content).encode())


def cell_seed(seed: int, workload: Mapping[str, Any], replicate: int) -> int:
    """Derive the seed of a cell from the root seed, its workload parameters and its replicate."""
    digest = hashlib.blake2b(_canonical([workload, replicate]).encode(), digest_size=16).digest()
    words = np.frombuffer(digest, dtype="<u4").tolist()
    return int(np.random.SeedSequence([seed, *words]).generate_state(1, np.uint64)[0] >> 1)


# --- layers: file, profile, overrides --------------------------------------------------------------------------------


@dataclass
class _Layers:
    """The values of a config as they are laid over each other, with the origin of each."""

    document: Document
    profile: str
    tree: dict[str, Any] = field(default_factory=dict)
    origins: dict[Place, str] = field(default_factory=dict)

    def lay(self, layer: Mapping[str, Any], origin: str) -> None:
        """Merge a layer; its ``fixed`` takes a parameter out of the grid below it, and the other way round."""
        for name in _mapping(layer.get("fixed")) if self.tree else ():
            for place, grid in _grids(self.tree):
                if grid.pop(name, None) is not None:
                    self._forget((*place, name))
        for _, grid in _grids(layer) if self.tree else ():
            for name in set(grid) & set(_mapping(self.tree.get("fixed"))):
                del self.tree["fixed"][name]
                self._forget(("fixed", name))
        self._merge(self.tree, layer, origin, ())

    def _merge(self, tree: dict[str, Any], layer: Mapping[str, Any], origin: str, above: Place) -> None:
        for key, value in layer.items():
            place = (*above, key)
            # the value of a parameter is whole: a mapping under grid or fixed is not a branch
            branch = isinstance(value, dict) and not (above and above[0] in ("grid", "fixed"))
            if branch and isinstance(tree.get(key, {}), dict):
                self._merge(tree.setdefault(key, {}), value, origin, place)
            else:
                tree[key] = json.loads(json.dumps(value))
                self._forget(place)
                self.origins[place] = origin

    def override(self, path: str, value: Any) -> None:
        """Set one value by its dotted path; of several grids, in each that has the parameter."""
        parts = path.split(".")
        value = plain(value, path)
        if parts[0] in ("profiles", "profile", "schema", "experiment"):
            self.document.fail((path,), "not changed by an override", override=True)
        if parts[0] in ("grid", "fixed") and len(parts) > 2:
            self.document.fail((path,), f"the value of a parameter is whole; set {'.'.join(parts[:2])}", override=True)
        if parts[0] == "grid" and len(parts) > 1 and isinstance(self.tree.get("grid"), list):
            grids = _grids(self.tree)
            holders = [(place, grid) for place, grid in grids if parts[1] in grid]
            if not holders:
                known = sorted({name for _, grid in grids for name in grid})
                self.document.fail((path,), "no grid has this parameter", known, parts[1], override=True)
            for place, grid in holders:
                grid[parts[1]] = value
                self.origins[(*place, parts[1])] = "override"
        else:
            self.lay(functools.reduce(lambda inner, part: {part: inner}, reversed(parts), value), "override")

    def fail(self, place: Place, what: str, allowed: Sequence[str] = (), near: str | None = None) -> NoReturn:
        """Raise about a place, in the layer that it came from."""
        known = [place[:length] for length in range(len(place), 0, -1) if place[:length] in self.origins]
        known += [below for below in self.origins if below[: len(place)] == place]  # a branch that a layer has brought
        origin = self.origins[known[0]] if known else "file"
        within: Place = ("profiles", self.profile) if origin == "profile" else ()
        self.document.fail((*within, *place), what, allowed, near, override=origin == "override")

    def check_grid(self, known: Sequence[str]) -> None:
        """Refuse a grid without the right form, and parameters unknown, without a value or given twice."""
        grid, fixed = self.tree.get("grid", {}), self.tree.get("fixed", {})
        if not all(isinstance(one, dict) for one in (grid if isinstance(grid, list) else [grid])):
            self.fail(("grid",), "a grid maps parameters to lists of values; several grids are a list of such mappings")
        if grid == []:
            self.fail(("grid",), "an empty list leaves no cell to run")
        for above, one in _grids(self.tree):
            for name, values in one.items():
                place = (*above, name)
                if name not in known:
                    self.fail(place, "no such parameter", known, name)
                if not isinstance(values, list):
                    self.fail(place, f"a grid lists its values, got {values!r}; a single one belongs under fixed")
                if not values:
                    self.fail(place, "an empty list leaves no cell to run")
                if name in _mapping(fixed):
                    self.fail(place, f"also under fixed.{name}; keep one of them")
        for name in _mapping(fixed):
            if name not in known:
                self.fail(("fixed", name), "no such parameter", known, name)

    def name_source(self) -> None:
        """Call what a real endpoint answers measured, cell after cell, and keep what may be secret out of its URL."""
        named = [(("fixed", "endpoint"), _mapping(self.tree.get("fixed")).get("endpoint"))]
        named += [((*above, "endpoint"), each) for above, one in _grids(self.tree) for each in one.get("endpoint", ())]
        for place, urls in named:
            if not isinstance(urls, str) or urls == "emulated":
                continue
            self.tree |= {"source": "measured", "exclusive": True}
            for url in map(urlsplit, urls.split(",")):
                if url.username or url.password or url.query:
                    what = "its URL holds a user, a password or a query, and results keep it; a key goes into"
                    self.fail(place, f"{what} REVISE_LAB_API_KEY")

    def _forget(self, place: Place) -> None:
        for old in [old for old in self.origins if old[: len(place)] == place]:
            del self.origins[old]


def _resolve(document: Document, profile: str, overrides: Mapping[str, Any], *, expand: bool = True) -> Config:
    if profile not in PROFILES:
        what = f"no profile {profile!r}; allowed: {', '.join(PROFILES)}{hint(nearest(profile, PROFILES))}"
        raise ConfigError(f"{document.file}: {what}", file=document.file, allowed=PROFILES)
    allowed = tuple(info.alias or name for name, info in Config.model_fields.items() if name != "profile")
    if "profile" in document.values:
        document.fail(("profile",), "chosen when a config is loaded, not in the file", allowed, "profiles")
    layers = _Layers(document, profile)
    layers.lay(document.values, "file")
    overlay = _mapping(document.values.get("profiles")).get(profile) or {}
    if not isinstance(overlay, dict):
        document.fail(("profiles", profile), "an overlay is a mapping")
    for key in {"schema", "experiment", "profiles", "profile"} & set(overlay):
        document.fail(("profiles", profile, key), "not changed by a profile")
    layers.lay(overlay, "profile")
    for path, value in overrides.items():
        layers.override(path, value)
    if isinstance(name := layers.tree.get("experiment"), str):
        try:
            layers.check_grid(experiments.get(name).params)
        except ConfigError as error:
            if hasattr(error, "experiment"):
                layers.fail(("experiment",), error.message)
            raise
    layers.name_source()
    try:
        config = Config.model_validate_json(json.dumps(layers.tree | {"profile": profile}), strict=True)
    except ValidationError as error:
        _explain(error, layers, allowed)
    config._layers, config._overrides = layers, dict(overrides)
    if expand:
        config.cells()
    return config


def _grids(tree: Mapping[str, Any]) -> list[tuple[Place, dict[str, Any]]]:
    grid = tree.get("grid")
    if isinstance(grid, list):
        return [(("grid", index), one) for index, one in enumerate(grid) if isinstance(one, dict)]
    return [(("grid",), grid)] if isinstance(grid, dict) else []


def _mapping(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


# --- cells -----------------------------------------------------------------------------------------------------------


def _expand(config: Config) -> Iterator[Cell]:
    experiment = experiments.get(config.experiment)
    seen: set[str] = set()
    for index, grid in enumerate(config.grids):
        above: Place = ("grid", index) if isinstance(config.grid, tuple) else ("grid",)
        if math.prod(map(len, grid.values())) * config.replicates > _MAX_CELLS:
            config._layers.fail(above, f"more than {_MAX_CELLS:,} cells")
        for point in itertools.product(*(enumerate(values) for values in grid.values())):
            at = {name: (*above, name, number) for name, (number, _) in zip(grid, point, strict=True)}
            given = dict(config.fixed) | dict(zip(grid, (value for _, value in point), strict=True))
            try:
                # through JSON and strictly: "0.7" is no number and true no count, yet a list may become a tuple
                model = experiment.Params.model_validate_json(json.dumps(given), strict=True)
            except ValidationError as error:
                _explain(error, config._layers, experiment.params, above, at)
            params = Frozen(json.loads(model.model_dump_json()))
            workload = {name: value for name, value in params.items() if name not in experiment.not_in_seed}
            for replicate in range(config.replicates):
                seed = cell_seed(config.seed, workload, replicate)
                name = cell_id(config.experiment, params, replicate, seed, experiment.algorithm_version)
                if name not in seen:
                    seen.add(name)
                    yield Cell(name, config.experiment, params, replicate, seed)


def _explain(
    error: ValidationError,
    layers: _Layers,
    names: Sequence[str],
    above: Place = (),
    at: Mapping[Any, Place] | None = None,
) -> NoReturn:
    """Turn pydantic's first complaint into ours, about the file or about the parameters of a cell; others are counted."""
    found = error.errors(include_url=False)
    first, loc = found[0], tuple(part for part in found[0]["loc"] if part != "[key]")
    what, allowed, near = f"{first['msg']}, got {first['input']!r}", (), None
    if first["type"] == "extra_forbidden":
        what, allowed, near = "no such name", tuple(names) if len(loc) == 1 else (), str(loc[-1])
    elif first["type"] in ("literal_error", "enum"):
        expected = first["ctx"]["expected"].replace(" or ", ",").split(",")
        what, allowed, near = f"got {first['input']!r}", tuple(one.strip(" '") for one in expected), str(first["input"])
    elif first["type"] == "missing":
        what = "is missing"
    elif first["type"] == "string_type":
        what += "; put it in quotes"
    if len(found) > 1:
        what += f" (and {len(found) - 1} more)"
    if at is not None and loc:
        loc = (*at.get(loc[0], ("fixed", loc[0])), *loc[1:])
    layers.fail(loc or above, what, allowed, near)


def _canonical(value: Any) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
