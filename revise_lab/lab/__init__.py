"""Experiments from configs: sweep, compare, draw, tabulate, hold against the papers.

>>> from revise_lab import lab
>>> config = lab.load("revise_provenance", profile="smoke")                                 # doctest: +SKIP
>>> frame = lab.sweep(config)                                                               # doctest: +SKIP
>>> lab.scorecard("results")                                                                # doctest: +SKIP

Nothing heavy is imported until a name is used.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import Any

#: Name -> the module that defines it. Two functions are called like the module they live in.
_FUNCTIONS = {
    "Config": "config",
    "RunFolder": "results",
    "Interval": "stats",
    "claims": "scorecard",
    "compare": "results",
    "dry_run": "sweep",
    "load": "config",
    "run_notebook": "notebooks",
    "save_figure": "figures",
    "save_table": "tables",
    "scorecard": "scorecard",
    "sweep": "sweep",
    "verify": "results",
}
_MODULES = ("cli", "config", "experiments", "figures", "live", "notebooks", "results", "stats", "tables")

__all__ = [*sorted(_FUNCTIONS), *_MODULES]


def __getattr__(name: str) -> Any:
    if name in _FUNCTIONS:
        return getattr(importlib.import_module(f"{__name__}.{_FUNCTIONS[name]}"), name)
    if name in _MODULES:
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


class _Lab(ModuleType):
    """Keeps ``lab.sweep`` and ``lab.scorecard`` functions once the modules of these names are imported."""

    def __setattr__(self, name: str, value: Any) -> None:
        # the import system binds a submodule on its package, which would hide the function of the same name
        if isinstance(value, ModuleType) and _FUNCTIONS.get(name) == name:
            value = getattr(value, name)
        super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Lab
