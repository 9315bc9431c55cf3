"""The published adversarial cases (arXiv:2609.00643, Table 3) with an effect in each.

The paper names six cases and the behaviour that each requires, not the workflows. These are the shortest in which both
orders of the racing pair occur, an effect hangs on what is revised, and a sibling runs beside it, so that a case has
hundreds of orders under every policy. The sixth case, a commit that races with a revision, is ``effects_of_a_chain``.
"""

from __future__ import annotations

from typing import Any

from revise_lab.audit.scenario import Required, Scenario, Step, rev

_IN = {"r": {"f": "a", "g": "1"}}
_TO_B = rev("r1", ("r.f", "b"))
_BESIDE = Step("S", ["r.g"])


def _pays(*seen: Any) -> list[tuple[str, str, str]]:
    return [("e", str(seen[-1]), "K")]


def _out(**outputs: str) -> dict[str, dict[str, str]]:
    return {name: {"o": value} for name, value in outputs.items()}


SCENARIOS = (
    Scenario(
        "published_late_read",
        "a revision of a field that a running node has not read yet, and that its effect is made from",
        (Step("A", ["r.g", "r.f"], effects=_pays), _BESIDE),
        _IN,
        (_TO_B,),
        Required(
            (_out(A="1b", S="1"),),
            {"close_release": {"compensating A/e": (0, 0)}},
            (("rev r1", "read A r.f"), ("rev r1", "commit A"), ("rev r1", "dispatched A/e", "commit_release")),
        ),
        holds=(("read A r.g", "rev r1"),),
    ),
    Scenario(
        "published_consecutive",
        "a second revision of the same field while the first is being recovered from: only the last value is published",
        (Step("A", ["r.f"], effects=_pays), _BESIDE),
        _IN,
        (_TO_B, rev("r2", ("r.f", "c"))),
        Required(
            (_out(A="c", S="1"),),
            {"revise,revise_plus": {"start S": (1, 1)}, "close_release": {"compensating A/e": (0, 0)}},
            (("rev r1", "commit A"), ("rev r2", "commit A"), ("rev r2", "dispatched A/e", "commit_release")),
        ),
    ),
    Scenario(
        "published_unknown",
        "a node of unknown reads publishes: whatever is revised is taken for read; a sibling of known reads beside it",
        (Step("U", ["r.f", "r.g"], unknown=frozenset({"reads"}), effects=_pays), Step("S", ["r.f"])),
        _IN,
        (rev("r1", ("r.g", "2")),),
        Required(
            (_out(U="a2", S="a"),),
            {
                "revise_plus local": {"start S": (1, 1)},
                "revise global": {"start S": (1, 2)},
                "close_release": {"compensating U/e": (0, 0)},
            },
            (("rev r1", "read U r.g"), ("rev r1", "commit U"), ("rev r1", "dispatched U/e", "commit_release")),
        ),
    ),
    Scenario(
        "published_members",
        "a member comes: what was published for all members is replaced, a reader of one of them is kept",
        (Step("I", ["r.d #members"], effects=_pays), Step("O", ["r.d.x"])),
        {"r": {"d": {"x": "1"}}},
        (rev("r1", ("r.d.k", "1")),),
        Required(
            (_out(I="('k', 'x')", O="1"),),
            {"revise,revise_plus": {"start O": (1, 1)}, "close_release": {"compensating I/e": (0, 0)}},
            (("rev r1", "read I r.d #members"), ("rev r1", "commit I"), ("rev r1", "land I/e", "commit_release")),
        ),
    ),
    Scenario(
        "published_route",
        "the route changes: what the lane that was left has published is undone, and the other lane publishes once",
        (
            Step("R", branch=(["r.f"], lambda out, f: {"a": "left", "b": "right"}[f])),
            Step("A", ["r.g"], when=("R", "left"), effects=_pays),
            Step("B", ["r.g"], when=("R", "right"), effects=_pays),
            _BESIDE,
        ),
        _IN,
        (_TO_B,),
        Required(
            ({"R": {"o": "", "lane": {"right": True}}, **_out(B="1", S="1")},),
            {"": {"dispatched B/e": (1, 1)}, "close_release": {"dispatched A/e": (0, 0)}},
            (
                ("rev r1", "commit R"),
                ("retract A", "confirmed A/e", "revise commit_release,revise_plus commit_release"),
            ),
        ),
    ),
)
