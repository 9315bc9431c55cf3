"""Hypothesis profiles, and how to draw values: `st.from_type(Obj)` draws a frozen artifact."""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from revise_lab.records.value import Arr, Obj, freeze

_COMMON = {"deadline": None, "print_blob": True, "suppress_health_check": [HealthCheck.too_slow]}
settings.register_profile("ci", derandomize=True, database=None, **_COMMON)
settings.register_profile("deep", max_examples=600, derandomize=True, database=None, **_COMMON)
settings.register_profile("nightly", max_examples=2000, **_COMMON)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))

# few keys and few leaves, so that places and values collide; the leaves are those that Python takes for equal
_KEYS = st.sampled_from(["a", "b", "ab", "a.b", "1", "é"])
_LEAVES = st.sampled_from([None, False, True, 0, 1, -1, 0.0, -0.0, 1.0, float("nan"), float("inf"), "", "1", "a", "#0"])


def _containers(inner):
    return st.lists(inner, max_size=3) | st.dictionaries(_KEYS, inner, max_size=3)


_ANY = st.recursive(_LEAVES, _containers, max_leaves=8)
st.register_type_strategy(Obj, st.dictionaries(_KEYS, _ANY, max_size=4).map(freeze))
st.register_type_strategy(Arr, st.lists(_ANY, max_size=4).map(freeze))
