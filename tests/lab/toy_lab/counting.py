"""A small experiment that journals every cell it computes, and fails on request."""

import os
import time
from pathlib import Path
from typing import Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from revise_lab.lab.experiments import Column

ALGORITHM_VERSION = 1
NOT_IN_SEED = frozenset({"policy"})
COLUMNS = {
    "step": Column("exact", "", "position in the workflow"),
    "calls": Column("exact", "calls", "model calls", "int"),
    "tokens": Column("exact", "tokens", "tokens spent"),
    "label": Column("exact"),
}


class Params(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")
    load: float = Field(1.0, gt=0)
    policy: Literal["restart", "suffix", "revise"] = "revise"
    nodes: int = Field(3, ge=1)
    mask: tuple[str, ...] = ()
    fault: Literal["", "raise", "die", "empty", "nested", "unknown_usage", "mixed"] = ""


def cell(params: Params, seed: int, replicate: int) -> list[dict]:
    """Two rows; the journal counts computations across processes."""
    if journal := os.environ.get("TOY_JOURNAL"):
        with Path(journal).open("a") as file:
            file.write(f"{params.load:g} {params.policy} {replicate}\n")
    time.sleep(float(os.environ.get("TOY_SLEEP_S", "0")))
    if params.fault == "die":
        os._exit(3)
    if params.fault == "raise":
        raise ValueError(f"no plan at load {params.load:g}")
    if params.fault == "empty":
        return []
    rng = np.random.default_rng(seed)
    rows = [
        {"step": step, "calls": np.int64(params.nodes), "tokens": rng.normal(100 * params.load), "label": f"s{step}"}
        for step in (2, 1)
    ]
    if params.fault == "nested":
        rows[0]["label"] = ["a", "list"]
    if params.fault == "unknown_usage":
        rows[0]["tokens"] = None
    if params.fault == "mixed":
        rows[0]["calls"] = "three"
    return rows


def estimate(params: Params) -> dict[str, float]:
    """Every cell makes two rows of `nodes` calls."""
    return {"calls": 2 * params.nodes, "wall_s": 30.0}


def values(frame) -> list[dict]:
    """The mean of the tokens, with its range."""
    tokens = frame["tokens"]
    row = {"value": tokens.mean(), "low": tokens.min(), "high": tokens.max(), "n": len(tokens), "unit": "tokens"}
    return [{"id": "toy.tokens", "source": "emulated"} | row, {"id": "toy.cells", "value": frame["cell_id"].nunique()}]
