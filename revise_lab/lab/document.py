"""Reading a config file: YAML 1.2 taken strictly, with the line of every value kept.

What YAML would let pass silently is an error here: a key written twice, a key that is no string (``1`` beside ``"1"``
would collide in JSON), a date, a tag, a second document, ``.nan``. Errors carry file, line, dotted path, allowed values
and the nearest name.
"""

from __future__ import annotations

import difflib
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from ruamel.yaml import YAML
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode

from revise_lab.errors import ConfigError

#: A place in a document: keys and list positions from the top.
Place = tuple[str | int, ...]

_TAG = "tag:yaml.org,2002:"
_SCALARS = {_TAG + name for name in ("null", "bool", "int", "float", "str")}
_MAX_VALUES = 100_000


@dataclass(frozen=True, slots=True)
class Document:
    """A config file as read.

    Parameters
    ----------
    file : str
    values : Any
        Plain JSON-like values.
    lines : mapping
        The line, from 1, on which each place begins.
    """

    file: str
    values: Any
    lines: Mapping[Place, int]

    def line(self, place: Place) -> int:
        """Line of a place, or of the nearest one above it that was written."""
        return next((self.lines[place[:n]] for n in range(len(place), -1, -1) if place[:n] in self.lines), 1)

    def fail(
        self,
        place: Place,
        what: str,
        allowed: Sequence[str] = (),
        near: str | None = None,
        *,
        override: bool = False,
    ) -> NoReturn:
        """Raise `ConfigError` about a place of this file, or about an override of it."""
        line = None if override else self.line(place)
        where = f"{self.file}: override" if override else f"{self.file}:{line}:"
        name = nearest(near, allowed)
        listed = f"; allowed: {', '.join(allowed)}" if allowed else ""
        raise ConfigError(
            f"{where} {dotted(place)}: {what}{listed}{hint(name)}",
            file=self.file,
            line=line,
            path=dotted(place),
            allowed=tuple(allowed),
            nearest=name,
        )


def nearest(name: str | None, names: Sequence[str]) -> str | None:
    """Return the one of `names` that was probably meant, if any is close."""
    found = difflib.get_close_matches(name, names, 1) if name else []
    return found[0] if found else None


def hint(name: str | None) -> str:
    """Phrase the nearest name as the end of a message."""
    return f"; did you mean {name!r}?" if name else ""


def dotted(place: Place) -> str:
    """Write a place as ``grid.load[2]``."""
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in place).removeprefix(".")


def find(name_or_path: str | Path, configs_dir: str | Path | None = None) -> Path:
    """Find a config file by name or path.

    Raises
    ------
    ConfigError
        Listing every path tried and the nearest name there is.
    """
    text = str(name_or_path)
    if isinstance(name_or_path, Path) or text.endswith((".yaml", ".yml")) or os.sep in text:
        folders, tried = [Path(text).parent], [Path(text)]
    else:
        folders = [Path(configs_dir)] if configs_dir is not None else _folders()
        tried = [folder / f"{text}.yaml" for folder in folders]
    for path in tried:
        if path.is_file():
            return path
    there = sorted({path.stem for folder in folders if folder.is_dir() for path in folder.glob("*.yaml")})
    name = nearest(tried[0].stem, there)
    raise ConfigError(
        f"no config {text!r}; tried {', '.join(map(str, tried))}{hint(name) or '; there are: ' + ', '.join(there)}",
        tried=tuple(map(str, tried)),
        nearest=name,
    )


def _folders() -> list[Path]:
    named = os.environ.get("REVISE_LAB_CONFIGS")
    return [Path(named)] if named else [Path("configs"), Path(__file__).resolve().parents[2] / "configs"]


def read(path: Path) -> Document:
    """Read a config file.

    Raises
    ------
    ConfigError
        If the file cannot be read, is not one YAML mapping, or holds what the strict reader refuses.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read as UTF-8 text: {error}", file=str(path)) from None
    document = parse(text, str(path))
    if not isinstance(document.values, dict):
        document.fail((), f"a config is a mapping, not a {type(document.values).__name__}")
    return document


def parse(text: str, file: str) -> Document:
    """Read YAML 1.2 text strictly; `file` is the name used in messages."""
    yaml = YAML(typ="safe", pure=True)
    try:
        root = yaml.compose(text)
    except MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        what = str(error.problem)
        if "another document" in what:
            what = "a second document starts here; a config is one document"
        elif "\\t" in what:
            what = "a tab; YAML is indented with spaces"
        raise ConfigError(f"{file}:{line}: not valid YAML: {what}", file=file, line=line) from None
    except YAMLError as error:
        raise ConfigError(f"{file}: not valid YAML: {error}", file=file, line=None) from None
    if yaml.version is not None:
        raise ConfigError(f"{file}:1: a %YAML line is not accepted; configs are YAML 1.2", file=file, line=1)
    if root is None:
        raise ConfigError(f"{file}:1: the file is empty", file=file, line=1)
    reader = _Reader(yaml, file)
    return Document(file, reader.build(root, (), frozenset()), reader.lines)


class _Reader:
    """Makes plain values of YAML nodes and notes where each was written."""

    def __init__(self, yaml: YAML, file: str) -> None:
        self.yaml, self.lines = yaml, dict[Place, int]()
        self.fail = Document(file, None, self.lines).fail

    def build(self, node: Node, place: Place, around: frozenset[int]) -> Any:
        self.lines.setdefault(place, node.start_mark.line + 1)
        if id(node) in around or len(self.lines) > _MAX_VALUES:
            self.fail(place, "an alias that contains itself, or far too many values")
        tag = str(node.tag)
        if isinstance(node, ScalarNode) and tag in _SCALARS:
            return self.scalar(node, place)
        if isinstance(node, SequenceNode) and tag == f"{_TAG}seq":
            return [self.build(one, (*place, n), around | {id(node)}) for n, one in enumerate(node.value)]
        if isinstance(node, MappingNode) and tag == f"{_TAG}map":
            return self.mapping(node, place, around | {id(node)})
        kind = "date" if tag.endswith(":timestamp") else tag.removeprefix(_TAG)
        return self.fail(place, f"a value of YAML type {kind!r} is not accepted; put a text in quotes")

    def scalar(self, node: ScalarNode, place: Place) -> Any:
        try:
            value = self.yaml.constructor.construct_object(node)
        except (YAMLError, ValueError):
            self.fail(place, f"{node.value!r} is not what its tag says")
        if isinstance(value, float) and not math.isfinite(value):
            self.fail(place, f"{node.value} is not a finite number; write null and give that a meaning")
        return value

    def mapping(self, node: MappingNode, place: Place, around: frozenset[int]) -> dict[str, Any]:
        result: dict[str, Any] = {}
        for key, value in node.value:
            here: Place = (*place, str(key.value) if isinstance(key, ScalarNode) else "?")
            first, self.lines[here] = self.lines.get(here), key.start_mark.line + 1
            if not isinstance(key, ScalarNode) or key.tag != f"{_TAG}str":
                merge = key.tag == f"{_TAG}merge"
                self.fail(here, "merge keys are not accepted" if merge else "a key is a string; put it in quotes")
            if first is not None:
                self.fail(here, f"written twice; first on line {first}")
            result[key.value] = self.build(value, here, around)
        return result


def override(item: str) -> tuple[str, Any]:
    """Split ``grid.load=[0.7, 1.0]`` into a path and a value read as YAML."""
    path, _, text = (part.strip() for part in item.partition("="))
    if not path or not text:
        raise ConfigError(f"override {item!r}: write path=value, for instance grid.load=[0.7,1.0]", override=item)
    return path, parse(text, f"override {path}").values


def plain(value: Any, path: str) -> Any:
    """Turn a Python or numpy value into what YAML would have given, or refuse it."""
    value = value.tolist() if hasattr(value, "tolist") else value
    if isinstance(value, Mapping):
        return {str(key): plain(one, path) for key, one in value.items()}
    if isinstance(value, (set, frozenset)):
        value = sorted(value)
    if isinstance(value, (list, tuple, range)):
        return [plain(one, path) for one in value]
    if isinstance(value, str):
        return str.__str__(value)
    if value is None or isinstance(value, (bool, int)) or (isinstance(value, float) and math.isfinite(value)):
        return value
    raise ConfigError(f"override {path}: {value!r} is not a finite, JSON-like value", path=path)
