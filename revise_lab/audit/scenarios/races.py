"""One revision against one attempt: before, between and after its reads; twice, back again, refused, repeated."""

from __future__ import annotations

from revise_lab.audit.scenario import Required, Scenario, Step, rev

_A = Step("A", ["r.f"])
_SILENT = Step("A", ["r.f"], silent=True)
_CHAIN = (_A, Step("C", ["A.o"], after=("A",)))
_IN = {"r": {"f": "a", "g": "1"}}
_TO_B = rev("r1", ("r.f", "b"))


def _out(f: str, **others: str) -> dict[str, dict[str, str]]:
    return {name: {"o": value} for name, value in {"A": f, **others}.items()}


SCENARIOS = (
    Scenario(
        "before_first_read",
        "a revision before the first read: the reader sees the new value, nothing is stopped, nothing is wasted",
        (_A,),
        _IN,
        (_TO_B,),
        Required(
            (_out("b"),),
            {
                "revise_plus digest diff extension": {"start A": (1, 1), "stop A": (0, 0), "reject A": (0, 0)},
                "revise delta": {"start A": (1, 2), "stop A": (0, 0), "reject A": (0, 1)},
            },
            (("rev r1", "start A"),),
        ),
        holds=(("rev r1", "read A r.f"),),
    ),
    Scenario(
        "late_read",
        "a revision of a field that a running node reads only then, from the snapshot that it started on",
        (Step("A", ["r.g", "r.f"]),),
        _IN,
        (_TO_B,),
        Required(
            (_out("1b"),),
            {
                "revise_plus digest diff extension": {"start A": (1, 2), "reject A": (0, 0), "stop A": (0, 1)},
                "revise delta": {"start A": (1, 2), "reject A": (0, 1), "stop A": (0, 1)},
            },
            (("rev r1", "read A r.g"), ("rev r1", "read A r.f"), ("rev r1", "commit A")),
        ),
    ),
    Scenario(
        "revision_first",
        "a revision after the read and before the commit: the attempt is rejected",
        (_SILENT,),
        _IN,
        (_TO_B,),
        Required(
            (_out("b"),),
            {
                "revise": {"start A": (2, 2), "reject A": (1, 1)},
                "revise_plus": {"start A": (2, 2), "reject A": (1, 1)},
                "restart": {"start A": (2, 2), "stop A": (1, 1)},
                "wait": {"start A": (2, 2), "stop A": (0, 0), "reject A": (0, 0)},
            },
        ),
        holds=(("read A r.f", "rev r1"), ("rev r1", "finish A")),
    ),
    Scenario(
        "commit_first",
        "a commit and then the revision: the output is replaced and no consumer keeps it",
        _CHAIN,
        _IN,
        (_TO_B,),
        Required(
            (_out("b", C="b"),),
            {"revise": {"start A": (2, 2), "commit A": (2, 2), "start C": (1, 2)}},
            (("rev r1", "start C"), ("rev r1", "read C A.o"), ("rev r1", "commit C")),
        ),
        holds=(("finish A", "rev r1"),),
    ),
    Scenario(
        "two_of_one_field",
        "two revisions of one field with attempts of all three versions alive: only the last commits, a sibling is kept",
        (Step("A", ["r.f"], deaf=True), Step("B", ["r.g"])),
        _IN,
        (_TO_B, rev("r2", ("r.f", "c"))),
        Required(
            (_out("c", B="1"),),
            {
                "revise": {"start A": (1, 3), "start B": (1, 1), "commit B": (1, 1)},
                "revise_plus": {"start A": (1, 3), "start B": (1, 1), "commit B": (1, 1), "discard A": (0, 2)},
            },
            (
                ("rev r1", "read A r.f"),
                ("rev r1", "commit B"),
                ("rev r2", "late A", "restart,suffix,revise,revise_plus"),
                ("late A", "commit A", "restart,suffix,revise,revise_plus"),
            ),
        ),
    ),
    Scenario(
        "two_fields",
        "two revisions of different fields on disjoint branches: neither undoes what the other left valid",
        (_A, Step("B", ["r.g"])),
        _IN,
        (_TO_B, rev("r2", ("r.g", "2"))),
        Required(
            (_out("b", B="2"),),
            {"revise,revise_plus": {"start A": (1, 2), "start B": (1, 2)}},
            (("rev r1", "rev r2"), ("rev r1", "commit B"), ("rev r2", "commit A"), ("commit A", "commit B")),
        ),
        any_order=True,
    ),
    Scenario(
        "aba_before_commit",
        "there and back before the commit: accepted by value, rejected by change, right either way",
        (_SILENT,),
        _IN,
        (_TO_B, rev("r2", ("r.f", "a"))),
        Required(
            (_out("a"),),
            {
                "revise digest": {"start A": (1, 1), "reject A": (0, 0)},
                "revise_plus digest": {"start A": (1, 1), "reject A": (0, 0)},
                "revise delta": {"start A": (2, 2), "reject A": (1, 1)},
            },
        ),
        holds=(("read A r.f", "rev r1"), ("rev r2", "finish A")),
    ),
    Scenario(
        "aba",
        "there and back at any time, with a reader of the result",
        _CHAIN,
        _IN,
        (_TO_B, rev("r2", ("r.f", "a"))),
        Required(
            (_out("a", C="a"),),
            {"revise_plus digest diff": {"start A": (1, 3), "start C": (1, 3)}},
            (("rev r1", "commit A"), ("rev r2", "read A r.f"), ("rev r2", "commit A"), ("rev r1", "commit C")),
        ),
    ),
    Scenario(
        "aba_together",
        "there and back in one arrival: planned on what it changes together, which is nothing",
        _CHAIN,
        _IN,
        ((_TO_B, rev("r2", ("r.f", "a"))),),
        Required(
            (_out("a", C="a"),),
            {"revise,revise_plus,suffix": {"start A": (1, 1), "start C": (1, 1)}},
            (("rev r1+r2", "read A r.f"), ("rev r1+r2", "commit C")),
        ),
    ),
    Scenario(
        "no_op",
        "a revision that writes the same value: a version, and no work",
        _CHAIN,
        {"r": {"f": "ab"}},
        (rev("r1", ("r.f", "".join("ab"))),),  # an equal string, not the same one
        Required(
            (_out("ab", C="ab"),),
            {"revise,revise_plus,suffix": {"start A": (1, 1), "start C": (1, 1), "accept r1": (1, 1)}},
            (("rev r1", "read A r.f"), ("rev r1", "commit A")),
        ),
    ),
    Scenario(
        "stale_base",
        "two revisions made against the same version: the second to arrive is refused and changes nothing",
        (_A,),
        _IN,
        (rev("r1", ("r.f", "b"), base=0), rev("r2", ("r.g", "2"), ("r.f", "c"), base=0)),
        Required(
            (_out("b"), _out("c")),
            {"": {"refuse r1": (0, 1), "refuse r2": (0, 1), "accept r1": (0, 1), "accept r2": (0, 1)}},
            (("rev r1", "rev r2"), ("rev r1", "read A r.f"), ("rev r2", "commit A")),
        ),
        any_order=True,
    ),
    Scenario(
        "half_refused",
        "a revision whose second change is impossible is refused as a whole",
        (Step("A", ["r.f", "r.g"]),),
        _IN,
        (rev("r1", ("r.f", "b"), ("r.none.x", "2")), rev("r2", ("r.g", "2"))),
        Required(
            (_out("a2"),),
            {"": {"refuse r1": (1, 1), "accept r2": (1, 1)}},
            (("rev r1", "read A r.f"), ("rev r2", "read A r.g")),
        ),
    ),
    Scenario(
        "duplicate",
        "a revision that is delivered twice is applied once",
        (Step("A", ["r.d"]),),
        {"r": {"d": [1]}},
        (rev("r1", ("r.d", 2, "append")), rev("r1", ("r.d", 2, "append"))),
        Required(
            ({"A": {"o": "(1, 2)"}},),
            {
                "": {"accept r1": (1, 1), "duplicate r1": (1, 1)},
                "revise": {"start A": (1, 2)},
                "revise_plus": {"start A": (1, 2)},
            },
            (("rev r1", "read A r.d"), ("rev r1'", "read A r.d"), ("rev r1'", "commit A")),
        ),
    ),
    Scenario(
        "out_of_order",
        "a revision that arrives before the one that it was made after is refused, never applied with a gap",
        (_A,),
        _IN,
        (rev("r1", ("r.f", "b"), base=0), rev("r2", ("r.f", "c"), base=1)),
        Required(
            (_out("c"), _out("b")),
            {"": {"accept r1": (1, 1), "refuse r1": (0, 0), "refuse r2": (0, 1)}},
            (("rev r1", "rev r2"),),
        ),
        any_order=True,
    ),
)
