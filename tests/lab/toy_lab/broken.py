"""A module that is no experiment: its column repeats a parameter."""

from revise_lab.lab.experiments import Column
from toy_lab.counting import Params, cell, values

__all__ = ["Params", "cell", "values"]

ALGORITHM_VERSION = 1
COLUMNS = {"load": Column("exact")}
