"""The scenarios: orderings that break naive recovery, and the histories that each rule of the protocol prevents."""

from __future__ import annotations

from typing import Final

from revise_lab.audit.scenario import Scenario

from . import effects, flow, published, races, rules, structure

SCENARIOS: Final[dict[str, Scenario]] = {
    each.name: each for module in (races, structure, flow, rules, effects, published) for each in module.SCENARIOS
}
"""Every scenario by name."""
