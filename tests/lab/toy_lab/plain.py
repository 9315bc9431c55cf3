"""The counting experiment without estimates and at a later version of its algorithm."""

from toy_lab.counting import COLUMNS, NOT_IN_SEED, Params, cell, values

__all__ = ["COLUMNS", "NOT_IN_SEED", "Params", "cell", "values"]

ALGORITHM_VERSION = 2
