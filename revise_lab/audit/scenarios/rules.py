"""One scenario for each rule of the protocol: the shortest workflow in which leaving the rule out goes wrong."""

from __future__ import annotations

from revise_lab.audit.scenario import Required, Scenario, Step, rev

_IN = {"r": {"f": "a", "g": "1"}}
_B, _2 = rev("r1", ("r.f", "b")), rev("r2", ("r.g", "2"))
_A, _C = Step("A", ["r.f"]), Step("C", ["A.o"], after=("A",))


def _out(**values: object) -> dict[str, dict[str, object]]:
    return {name: {"o": value} for name, value in values.items()}


_PAIR = Step("P", ["r.f"], lambda f: {"a": f"a{f}", "b": f"b{f}"})
_LATE = Step("X", ["P.a", "r.g", "P.b"], after=("P",))

SCENARIOS = (
    Scenario(
        "chain_of_three",
        "R1: the last of a chain commits while the first is being recomputed and the middle looks current",
        (Step("G", ["r.f"]), Step("P", ["G.o"], after=("G",)), Step("X", ["P.o"], after=("P",))),
        _IN,
        (_B,),
        Required(
            (_out(G="b", P="b", X="b"),),
            {"revise_plus": {"start G": (1, 2), "start P": (1, 2), "start X": (1, 2)}},
            (("rev r1", "commit G"), ("rev r1", "commit P"), ("rev r1", "read X P.o"), ("rev r1", "commit X")),
        ),
    ),
    Scenario(
        "no_gate",
        "R1: a child commits on the output of a parent that a revision has met",
        (_A, _C),
        _IN,
        (_B,),
        Required((_out(A="b", C="b"),), {}, (("rev r1", "commit A"), ("rev r1", "start C"), ("rev r1", "commit C"))),
    ),
    Scenario(
        "not_current",
        "R1, R2: an invalidated attempt is not current; a child that becomes active later must not read it",
        (
            Step("A", ["r.f"]),
            Step("R", ["r.g"], lambda g: {"o": g}, branch=((), lambda out: "go" if out["o"] == "2" else None)),
            Step("C", ["A.o"], after=("A",), when=("R", "go")),
        ),
        _IN,
        (_B, _2),
        Required(
            ({**_out(A="b", C="b"), "R": {"o": "2", "lane": {"go": True}}},),
            {"revise_plus": {"start C": (1, 2), "start A": (1, 2)}},
            (("rev r1", "rev r2"), ("rev r1", "start C"), ("rev r2", "commit A"), ("rev r1", "commit A")),
        ),
        any_order=True,
    ),
    Scenario(
        "state_that_never_was",
        "R2: a child started while its parent is being recomputed would see the old parent beside the new input",
        (_PAIR, Step("X", ["P.a", "r.g"], after=("P",))),
        _IN,
        (_B, _2),
        Required(
            ({"P": {"a": "ab", "b": "bb"}, **_out(X="ab2")},),
            {"revise_plus": {"start X": (1, 3), "start P": (1, 2)}},
            (("rev r1", "start X"), ("rev r2", "start X"), ("rev r2", "read X P.a"), ("rev r2", "commit P")),
        ),
    ),
    Scenario(
        "extension_below_unsettled",
        "R4: an attempt must not move while its parent is being recomputed",
        (
            Step("P", ["r.f"], lambda f: {"a": "same", "b": f"b{f}"}),
            Step("X", ["P.a", "r.g", "P.b"], after=("P",)),
        ),
        _IN,
        (_B, _2),
        Required(
            ({"P": {"a": "same", "b": "bb"}, **_out(X="same2bb")},),
            {"revise_plus digest diff extension": {"start X": (1, 3), "move X": (0, 2)}},
            (("rev r1", "start X"), ("rev r2", "read X r.g"), ("rev r1", "read X r.g"), ("commit P", "read X r.g")),
        ),
    ),
    Scenario(
        "newest_delta_only",
        "R4: an attempt may move only if all that it has read still holds, not if the newest change spares it",
        (_PAIR, _LATE),
        _IN,
        (_B, _2),
        Required(
            ({"P": {"a": "ab", "b": "bb"}, **_out(X="ab2bb")},),
            {"revise_plus": {"start X": (1, 3)}},
            (("rev r1", "read X P.a"), ("rev r2", "read X r.g"), ("rev r1", "read X P.b"), ("rev r2", "commit P")),
        ),
    ),
    Scenario(
        "own_version",
        "R3: an output commit is a change with a version of its own, later than its cause's",
        (_A, Step("C", ["r.g", "A.o"], after=("A",))),
        _IN,
        (_B,),
        Required(
            (_out(A="b", C="1b"),),
            {"revise_plus digest diff extension": {"start C": (1, 2)}},
            (("rev r1", "start C"), ("rev r1", "read C A.o"), ("rev r1", "commit C"), ("rev r1", "commit A")),
        ),
    ),
    Scenario(
        "dead_branch",
        "R6: an attempt of a branch that is no longer taken must not commit",
        (
            Step("R", ["r.f"], lambda f: {"o": f}, branch=((), lambda out: out["o"])),
            Step("a", ["r.g"], when=("R", "a")),
            Step("b", [], lambda: {"o": "b"}, when=("R", "b")),
        ),
        _IN,
        (_B,),
        Required(
            ({"R": {"o": "b", "lane": {"b": True}}, **_out(b="b")},),
            {"revise_plus": {"start a": (0, 1), "retract a": (0, 1)}},
            (("rev r1", "commit R"), ("rev r1", "read a r.g", "revise diff,revise_plus diff")),
        ),
    ),
    Scenario(
        "unknown_there_and_back",
        "R5: an attempt of unknown reads is never moved, for a hidden read would move with it",
        (Step("U", ["r.f", "r.g"], unknown=frozenset({"reads"})), Step("W", ["U.o"], after=("U",))),
        {"r": {"f": "a", "g": 1}},
        (rev("r1", ("r.g", 2)), rev("r2", ("r.g", 1))),
        Required(
            (_out(U="a1", W="a1"),),
            {"revise_plus": {"start U": (1, 3), "move U": (0, 0)}},
            (("rev r1", "read U r.g"), ("rev r2", "read U r.g"), ("rev r2", "commit U"), ("rev r1", "commit W")),
        ),
    ),
    Scenario(
        "unknown_reads_all",
        "R5: an attempt of unknown reads has read every input and every declared ancestor",
        (
            Step("A", ["r.f"]),
            Step("B", ["A.o"], lambda _: {"o": "same"}, after=("A",)),
            Step("U", ["r.g", "B.o", "A.o"], after=("B",), unknown=frozenset({"reads"})),
        ),
        _IN,
        (rev("r1", ("A.o", "pin", "override")),),
        Required(
            (_out(A="pin", B="same", U="1samepin"),),
            {"revise_plus": {"start U": (1, 2)}},
            (("rev r1", "start U"), ("rev r1", "read U A.o"), ("rev r1", "commit U"), ("rev r1", "commit B")),
        ),
    ),
    Scenario(
        "no_livelock",
        "R8: there and back while a child runs on an output that is about to be replaced; everybody comes to an end",
        (_A, Step("C", ["A.o", "r.g"], after=("A",))),
        _IN,
        (_B, rev("r2", ("r.f", "a"))),
        Required(
            (_out(A="a", C="a1"),),
            {"revise_plus": {"start A": (1, 3), "start C": (1, 3)}},
            (("rev r1", "commit C"), ("rev r2", "commit A"), ("rev r2", "read C A.o"), ("rev r1", "read C A.o")),
        ),
        liveness=True,
    ),
    Scenario(
        "one_slot",
        "R8: with one slot, a finished child waits for its parent without holding the slot that the parent needs",
        (_A, Step("C", ["r.g", "A.k"], after=("A",))),
        _IN,
        (_B,),
        Required(
            (_out(A="b", C="1None"),),
            {"revise_plus diff": {"start C": (1, 1)}},
            (("rev r1", "finish C"), ("rev r1", "start C"), ("rev r1", "commit C")),
        ),
        n_slots=1,
        liveness=True,
    ),
    Scenario(
        "parents_first",
        "R1: what an event moves is settled parents first, or a join commits before one of them is seen to be invalid",
        (_A, Step("Q", ["r.g"]), Step("C", ["A.o", "Q.o"], after=("A", "Q"))),
        _IN,
        (_B, rev("r2", ("r.f", "a"), ("r.g", "2"))),
        Required(
            (_out(A="a", Q="2", C="a2"),),
            {"revise_plus diff": {"start A": (1, 3), "start Q": (1, 2), "start C": (1, 3)}},
            (
                ("rev r1", "commit A"),
                ("rev r2", "commit Q"),
                ("rev r1", "start C"),
                ("rev r2", "read C A.o", "revise_plus diff"),
            ),
        ),
    ),
    Scenario(
        "same_decision",
        "what a decision read changes and the decision does not: it is made again by itself and nothing else runs",
        (
            Step("N", ["r.f"], branch=(["r.g"], lambda out, g: "low" if g < "5" else "high")),
            Step("K", ["N.o"], when=("N", "low")),
            Step("L", ["N.o"], when=("N", "high")),
        ),
        {"r": {"f": "a", "g": "1"}},
        (rev("r1", ("r.g", "2")), rev("r2", ("r.g", "3"))),
        Required(
            ({"N": {"o": "a", "lane": {"low": True}}, "K": {"o": "a"}},),
            {
                "revise_plus digest diff extension": {"start N": (1, 1), "start K": (1, 1)},
                "wait": {"start N": (3, 3), "start K": (3, 3)},
            },
            (("rev r1", "commit N"), ("rev r1", "commit K")),
        ),
        switches={"check": "digest", "control": "condition"},
    ),
    Scenario(
        "another_decision",
        "a decision is made again and comes out differently, back again, or cannot be made: its node runs again",
        (
            Step("N", ["r.f"], branch=(["r.g"], lambda out, g: {"1": "low", "2": "low", "7": "high"}[g])),
            Step("K", ["N.o"], when=("N", "low")),
            Step("L", ["N.o"], when=("N", "high")),
        ),
        {"r": {"f": "a", "g": "1"}},
        (rev("r1", ("r.g", "x")), rev("r2", ("r.g", "7")), rev("r3", ("r.f", "b"))),
        Required(
            ({"N": {"o": "b", "lane": {"high": True}}, "L": {"o": "b"}},),
            {},
            (("rev r1", "commit N"), ("rev r3", "commit L")),
        ),
        switches={"check": "digest", "control": "condition"},
    ),
)
