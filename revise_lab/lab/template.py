"""Notebooks as templates: their parameters, what they declare, and what keeps one from being a good template.

The parameters cell is read as syntax and never by papermill's inference, which takes an ``=`` inside a text for another
parameter and only logs what it does not know.
"""

from __future__ import annotations

import ast
import io
import numbers
import os
import re
import tokenize
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from revise_lab.errors import ConfigError
from revise_lab.lab.document import hint, nearest

#: Seconds a notebook may take, by profile, unless its metadata says otherwise.
BUDGET_S = {"smoke": 180.0, "quick": 1200.0, "paper": 86400.0}
#: Parameters that every notebook of this project has.
STANDARD = ("profile", "config", "seed", "results_dir", "n_jobs")
MAX_CELLS, MAX_LINES = 12, 15
_TYPES: dict[str, Any] = {"str": str, "int": int, "float": (int, float), "bool": bool, "list": list, "dict": dict}
_REMEDIES = dict.fromkeys(("PathLike", "date", "datetime"), "str(...)")
_REMEDIES |= {"set": "sorted(...)", "frozenset": "sorted(...)", "ndarray": ".tolist()"}
_FORBIDDEN = (
    (re.compile(r"^\s*[%!]+\s*(pip|conda|mamba|uv)\b", re.M), "installs packages"),
    (re.compile(r"^\s*%cd\b|\bchdir\s*\(", re.M), "changes the working folder"),
    (re.compile(r"""['"](?:/[A-Za-z]|~/|[A-Za-z]:[\\/])"""), "holds an absolute path"),
)


class Parameter(NamedTuple):
    """One assignment of a parameters cell.

    Attributes
    ----------
    name, kind, help : str
        Name, annotation (empty when there is none) and trailing comment.
    default : str or None
        Source of the default; None when the parameter must be given.
    """

    name: str
    kind: str
    help: str
    default: str | None


def parameters(path: str | Path) -> dict[str, Parameter]:
    """Read the parameters of a notebook from the syntax tree of its parameters cell.

    Parameters
    ----------
    path : str or Path
        The notebook.

    Returns
    -------
    dict
        Name -> `Parameter`, in the order of the cell.

    Raises
    ------
    ConfigError
        If the file is no notebook, if no cell or several carry the tag ``parameters``, or if that cell is not Python.
    """
    return _parameters_of(read(path), Path(path))


def check_parameters(path: str | Path, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the given parameters as plain JSON values, or refuse them by name.

    Parameters
    ----------
    path : str or Path
        The notebook they are for.
    given : mapping
        Name -> value.

    Returns
    -------
    dict
        Ready to be injected.

    Raises
    ------
    ConfigError
        If a name is unknown to the notebook, a required one is missing, a value is not JSON-like, or it does not have
        the annotated type.
    """
    known = parameters(path)
    stem = Path(path).name
    for name in given:
        if name not in known:
            lower = {one.lower(): one for one in known}  # X for x is the commonest slip, and no letter matches
            near = lower.get(nearest(name.lower(), list(lower)) or "")
            raise ConfigError(
                f"notebook '{stem}' has no parameter {name!r}{hint(near) or '; it has ' + ', '.join(known)}",
                parameter=name,
                nearest=near,
            )
    for name, parameter in known.items():
        if parameter.default is None and name not in given:
            raise ConfigError(f"notebook '{stem}' needs a value for '{name}', which has no default", parameter=name)
    values = {name: plain(value, name) for name, value in given.items()}
    for name, value in values.items():
        _check_type(known[name], value, stem)
    return values


def plain(value: Any, name: str = "value") -> Any:
    """Return a value as plain JSON types, or refuse it by name.

    Parameters
    ----------
    value : Any
        None, bool, number (numpy scalars included), text, list, tuple or mapping with text keys.
    name : str
        What to call it in the message.

    Returns
    -------
    Any
        None, bool, int, float, str, list or dict.

    Raises
    ------
    ConfigError
        For anything else, because it would reach the notebook changed or not at all.
    """
    if getattr(value, "shape", None) == ():  # a scalar of numpy
        value = value.item()
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, numbers.Real):
        number = int(value) if isinstance(value, numbers.Integral) else float(value)
        if number - number != 0:
            raise ConfigError(f"parameter '{name}' is {number}, which JSON cannot hold; pass None", parameter=name)
        return number
    if isinstance(value, list | tuple):
        return [plain(item, f"{name}[{index}]") for index, item in enumerate(value)]
    if isinstance(value, Mapping):
        if other := [key for key in value if not isinstance(key, str)]:
            what = f"has the key {other[0]!r}, which would turn into text; use text keys"
            raise ConfigError(f"parameter '{name}' {what}", parameter=name)
        return {str.__str__(key): plain(item, f"{name}.{key}") for key, item in value.items()}
    kind = "PathLike" if isinstance(value, os.PathLike) else type(value).__name__
    what = f"is a {type(value).__name__}, which a notebook cannot be given; pass {_REMEDIES.get(kind, 'a JSON-like value')}"
    raise ConfigError(f"parameter '{name}' {what}", parameter=name)


def declared(path: str | Path) -> tuple[tuple[str, ...], dict[str, float]]:
    """Return the deliverables that a notebook declares and its budget in seconds per profile."""
    meta = read(path).metadata.get("revise_lab", {})
    return tuple(meta.get("deliverables", ())), {**BUDGET_S, **meta.get("budget_s", {})}


def lint(path: str | Path) -> list[str]:
    """List what keeps a notebook from being a good template.

    Parameters
    ----------
    path : str or Path
        The notebook.

    Returns
    -------
    list of str
        One sentence per finding; empty when there is none.
    """
    path = Path(path)
    notebook = read(path)
    found = []
    if notebook.metadata.get("kernelspec", {}).get("name") != "python3":
        found.append("the kernelspec is not python3")
    if len(notebook.cells) > MAX_CELLS:
        found.append(f"it has {len(notebook.cells)} cells, more than {MAX_CELLS}")
    if "papermill" in notebook.metadata or any("papermill" in cell.metadata for cell in notebook.cells):
        found.append("it carries papermill metadata: strip it")
    for index, cell in enumerate(notebook.cells, 1):
        if cell.cell_type != "code":
            continue
        if cell.get("outputs") or cell.get("execution_count") is not None:
            found.append(f"cell {index} has outputs: strip them")
        lines = cell.source.count("\n") + 1
        if lines > MAX_LINES:
            found.append(f"cell {index} has {lines} lines, more than {MAX_LINES}: move logic into the library")
        found += [f"cell {index} {what}" for pattern, what in _FORBIDDEN if pattern.search(cell.source)]
    try:
        cell = parameters_cell(notebook, path)
        known = _parameters_of(notebook, path)
    except ConfigError as error:
        return [*found, error.message]
    found += [f"the parameters cell lacks '{name}'" for name in STANDARD if name not in known]
    found += [f"parameter '{p.name}' has no help: put a comment behind it" for p in known.values() if not p.help]
    found += [f"parameter '{p.name}' has no annotation" for p in known.values() if not p.kind]
    for node in ast.parse(cell.source).body:
        if not isinstance(node, ast.Assign | ast.AnnAssign) or not _is_literal(node.value):
            source = ast.unparse(node).splitlines()[0]
            found.append(f"the parameters cell holds `{source}`: only literal values; derive after injection")
    return found


def read(path: str | Path) -> Any:
    """Read a notebook file, or say what is wrong with it."""
    import nbformat

    path = Path(path)
    try:
        return nbformat.read(path, as_version=4)
    except FileNotFoundError:
        raise ConfigError(f"there is no notebook '{path}'", path=str(path)) from None
    except Exception as error:
        raise ConfigError(f"'{path.name}' is not a notebook: {error}", path=str(path)) from error


def parameters_cell(notebook: Any, path: Path) -> Any:
    """Return the one cell that is tagged as parameters."""
    tagged = [cell for cell in notebook.cells if "parameters" in cell.metadata.get("tags", [])]
    if len(tagged) != 1:
        count = "no cell" if not tagged else f"{len(tagged)} cells"
        raise ConfigError(
            f"notebook '{path.name}' has {count} tagged 'parameters', so nothing can be injected: it would run with its "
            "own defaults; tag exactly one cell",
            path=str(path),
        )
    return tagged[0]


def _parameters_of(notebook: Any, path: Path) -> dict[str, Parameter]:
    source = parameters_cell(notebook, path).source
    try:
        body = ast.parse(source).body
    except SyntaxError as error:
        raise ConfigError(f"the parameters cell of '{path.name}' is not Python: {error}", path=str(path)) from error
    comments = {
        token.start[0]: token.string.lstrip("# ")
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
        if token.type == tokenize.COMMENT
    }
    found = {}
    for node in body:
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        kind = ast.unparse(node.annotation) if isinstance(node, ast.AnnAssign) else ""
        value = getattr(node, "value", None)
        for target in targets:
            if isinstance(target, ast.Name):
                default = None if value is None else ast.unparse(value)
                found[target.id] = Parameter(target.id, kind, comments.get(node.end_lineno or 0, ""), default)
    return found


def _is_literal(node: ast.expr | None) -> bool:
    with suppress(ValueError):
        if node is not None:
            ast.literal_eval(node)
        return True
    return False


def _check_type(parameter: Parameter, value: Any, stem: str) -> None:
    allowed = [part.split("[")[0].strip() for part in parameter.kind.split("|")]
    if not parameter.kind or any(part not in _TYPES and part != "None" for part in allowed):
        return
    for part in allowed:
        fits = value is None if part == "None" else isinstance(value, _TYPES[part])
        if fits and (not isinstance(value, bool) or part == "bool"):
            return
    raise ConfigError(
        f"notebook '{stem}': parameter '{parameter.name}' is {value!r}, but it is declared {parameter.kind}"
        + (f" ({parameter.help})" if parameter.help else ""),
        parameter=parameter.name,
    )
