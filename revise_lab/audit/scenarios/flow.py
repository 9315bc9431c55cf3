"""Who is part of the run: branches, joins, members, failures, overrides, the end, and storms."""

from __future__ import annotations

from revise_lab.audit.scenario import FAILED, Required, Scenario, Step, rev

_DIFF = "revise diff,revise_plus diff"
_IN = {"r": {"f": "a", "g": "1"}}


def _out(**values: object) -> dict[str, dict[str, object]]:
    return {name: {"o": value} for name, value in values.items()}


def _router(*after: str) -> Step:
    return Step("R", ["r.f"], lambda f: {"o": f}, after, branch=((), lambda out: out["o"]))


def _lane(name: str, lane: str, *reads: str) -> Step:
    return Step(name, reads or ("r.g",), when=("R", lane))


_JOIN = Step("J", ["a.o", "b.o"], lambda *seen: {"o": "".join(str(each or "-") for each in seen)}, ("a", "b"))
_FORK = (_router(), _lane("a", "a"), _lane("b", "b"))
_LANES = {"a": {"R": {"o": "a", "lane": {"a": True}}}, "b": {"R": {"o": "b", "lane": {"b": True}}}}


def _team(*seen: object) -> str | None:
    keys = seen[0] if seen else ()
    assert isinstance(keys, tuple)
    return "w #members" if not seen else f"w.{keys[len(seen) - 1]}.o" if len(seen) <= len(keys) else None


_TEAM = (
    Step("P", ["r.m"], lambda m: {"m": m}),
    Step("w", ["P.m.*"], member_of=("P", "m")),
    Step("J", _team, lambda keys, *each: {"o": "+".join(each)}, ("w",), may_read=("P.m #members", "w.o")),
)


def _fragile(f: str) -> dict[str, str]:
    if f == "bad":
        raise ValueError(f)
    return {"o": f}


SCENARIOS = (
    Scenario(
        "flip",
        "the route goes from a to b: what ran on a is stopped or retracted, b starts, the join sees one of them",
        (*_FORK, _JOIN),
        _IN,
        (rev("r1", ("r.f", "b")),),
        Required(
            ({**_LANES["b"], **_out(b="1", J="-1")},),
            {"revise_plus": {"retract a": (0, 1), "start R": (1, 2), "start a": (0, 1), "start b": (1, 1)}},
            (("rev r1", "commit R"), ("rev r1", "commit J"), ("rev r1", "read a r.g", _DIFF)),
        ),
    ),
    Scenario(
        "flip_and_back",
        "a, b, a again in quick succession: nothing of b is left, and a ran for the route that holds",
        _FORK,
        _IN,
        (rev("r1", ("r.f", "b")), rev("r2", ("r.f", "a"))),
        Required(
            ({**_LANES["a"], **_out(a="1")},),
            {"revise_plus": {"start a": (1, 2), "start b": (0, 1), "retract b": (0, 1)}},
            (("rev r1", "commit R"), ("rev r2", "commit R"), ("rev r1", "commit a"), ("rev r2", "read b r.g", _DIFF)),
        ),
    ),
    Scenario(
        "flip_while_recomputing",
        "the route goes elsewhere while a node of the old branch runs again beside the output that it had",
        _FORK,
        _IN,
        (rev("r1", ("r.g", "2")), rev("r2", ("r.f", "b"))),
        Required(
            ({**_LANES["b"], **_out(b="2")},),
            {"revise_plus": {"start a": (0, 2), "retract a": (0, 1)}},
            (("rev r1", "commit R"), ("rev r2", "commit R"), ("rev r1", "start a"), ("rev r2", "read a r.g", _DIFF)),
        ),
    ),
    Scenario(
        "control_read",
        "a decision that reads an input of its own: the read is control, and it is as binding as any",
        (
            Step("R", ["r.g"], branch=(["r.f"], lambda out, f: f)),
            _lane("a", "a"),
            _lane("b", "b"),
        ),
        _IN,
        (rev("r1", ("r.f", "b")),),
        Required(
            ({"R": {"o": "1", "lane": {"b": True}}, **_out(b="1")},),
            {"revise_plus": {"start R": (1, 2), "start a": (0, 1)}},
            (("rev r1", "commit R"), ("rev r1", "read a r.g", _DIFF)),
        ),
    ),
    Scenario(
        "unknown_beside_complete",
        "a node of unknown reads beside one of known reads: it and what follows it run again, its sibling is kept",
        (
            Step("U", ["r.f", "r.g"], unknown=frozenset({"reads"})),
            Step("V", ["U.o"], after=("U",)),
            Step("S", ["r.f"]),
        ),
        _IN,
        (rev("r1", ("r.g", "2")),),
        Required(
            (_out(U="a2", V="a2", S="a"),),
            {
                "revise_plus local": {"start U": (1, 2), "start S": (1, 1)},
                "revise delta global": {"start S": (1, 2), "start U": (1, 2)},
            },
            (("rev r1", "read U r.g"), ("rev r1", "commit S"), ("rev r1", "commit V")),
        ),
    ),
    Scenario(
        "unknown_edges",
        "a node whose edges are unknown: every revision that changes anything means a full restart",
        (Step("U", ["r.f"], unknown=frozenset({"edges"})), Step("S", ["s.x"])),
        {"r": {"f": "a"}, "s": {"x": "1"}},
        (rev("r1", ("r.f", "b")),),
        Required(
            (_out(U="b", S="1"),),
            {"revise,revise_plus": {"start S": (1, 2)}},
            (("rev r1", "commit S"), ("rev r1", "commit U")),
        ),
    ),
    Scenario(
        "revision_at_commit",
        "a revision while a finished child waits for its parents: it meets the child like any other",
        (Step("A", ["r.f"]), Step("C", ["A.k", "r.g"], lambda k, g: {"o": f"{k}{g}"}, ("A",))),
        {"r": {"f": "a", "g": "1"}},
        (rev("r1", ("r.f", "b")), rev("r2", ("r.g", "2"))),
        Required(
            (_out(A="b", C="None2"),),
            {"revise_plus diff": {"start A": (1, 2), "start C": (1, 2)}},
            (("rev r2", "finish C"), ("rev r1", "finish C"), ("rev r2", "commit C"), ("rev r1", "commit A")),
        ),
    ),
    Scenario(
        "retry",
        "a node fails and is tried again while a revision mends it: the new try has the new value, the budget is its own",
        (Step("A", ["r.f"], _fragile, retries=1), Step("C", ["A.o"], after=("A",))),
        {"r": {"f": "bad"}},
        (rev("r1", ("r.f", "good")),),
        Required(
            (_out(A="good", C="good"),),
            {"revise_plus": {"start A": (1, 3), "retry A": (0, 1), "fail A": (0, 1), "start C": (1, 1)}},
            (("rev r1", "start A"), ("rev r1", "read A r.f")),
        ),
    ),
    Scenario(
        "late_result",
        "a call that was stopped returns anyway: its result is discarded, whatever it is",
        (Step("A", ["r.f"], _fragile, sync=True), Step("C", ["A.o"], after=("A",))),
        {"r": {"f": "bad"}},
        (rev("r1", ("r.f", "good")),),
        Required(
            (_out(A="good", C="good"),),
            {"restart": {"discard A": (0, 1)}},
            (("rev r1", "finish A"),),
        ),
    ),
    Scenario(
        "join_one_reused",
        "a join of one reused and one recomputed parent: it pins what it read of both",
        (
            Step("A", ["r.f"]),
            Step("B", ["A.o", "r.g"], after=("A",)),
            Step("C", ["A.o"], after=("A",)),
            Step("J", ["B.o", "C.o"], after=("B", "C")),
        ),
        _IN,
        (rev("r1", ("r.g", "2")),),
        Required(
            (_out(A="a", B="a2", C="a", J="a2a"),),
            {"revise,revise_plus": {"start C": (1, 1), "start A": (1, 1), "start J": (1, 2)}},
            (("rev r1", "commit B"), ("rev r1", "commit C"), ("rev r1", "read J B.o"), ("rev r1", "commit J")),
        ),
    ),
    Scenario(
        "equal_output",
        "a parent is recomputed to an equal output: its child is kept, though the parent's attempt is another",
        (
            Step("G", ["r.f"]),
            Step("P", ["G.o"], lambda _: {"o": "same"}, after=("G",)),
            Step("X", ["P.o"], after=("P",)),
        ),
        _IN,
        (rev("r1", ("r.f", "b")),),
        Required(
            (_out(G="b", P="same", X="same"),),
            {
                "revise_plus digest diff": {"start X": (1, 1), "start P": (1, 2)},
                "revise delta": {"start X": (1, 2), "start P": (1, 2)},
            },
            (("rev r1", "commit P"), ("rev r1", "read X P.o"), ("rev r1", "commit X")),
        ),
    ),
    Scenario(
        "member_spawned",
        "a revision adds a member: it runs once, and those that were there are kept",
        _TEAM,
        {"r": {"m": ["x"]}},
        (rev("r1", ("r.m[0]", "v", "insert")),),
        Required(
            ({"P": {"m": {"v": "v", "x": "x"}}, "w[v]": {"o": "v"}, "w[x]": {"o": "x"}, "J": {"o": "v+x"}},),
            {"revise_plus diff": {"start w[x]": (1, 1), "start w[v]": (1, 1), "start P": (1, 2)}},
            (("rev r1", "commit P"), ("rev r1", "start w[x]"), ("rev r1", "commit J")),
        ),
    ),
    Scenario(
        "member_removed",
        "a revision removes a member: it is stopped or retracted, and the join does not see it",
        _TEAM,
        {"r": {"m": ["x", "y"]}},
        (rev("r1", ("r.m[0]", None, "remove")),),
        Required(
            ({"P": {"m": {"y": "y"}}, "w[y]": {"o": "y"}, "J": {"o": "y"}},),
            {"revise_plus diff": {"start w[y]": (1, 1), "start w[x]": (0, 1), "retract w[x]": (0, 1)}},
            (("rev r1", "commit P"), ("rev r1", "commit J"), ("rev r1", "read w[x] P.m.*", _DIFF)),
        ),
    ),
    Scenario(
        "after_the_end",
        "a revision that comes after the seal is refused; before it, it takes effect as a whole",
        (Step("A", ["r.f"]),),
        _IN,
        (rev("r1", ("r.f", "b")),),
        Required(
            (_out(A="a"), _out(A="b")),
            {"": {"refuse r1": (0, 1), "accept r1": (0, 1)}},
            (("rev r1", "close"), ("rev r1", "commit A")),
        ),
        early_close=True,
    ),
    Scenario(
        "cancelled",
        "the run is cancelled at any time: nothing starts and nothing commits afterwards",
        (Step("A", ["r.f"], deaf=True), Step("C", ["A.o"], after=("A",))),
        _IN,
        (rev("r1", ("r.f", "b")),),
        Required((_out(A="b", C="b"),), {"": {"cancel": (0, 1)}}, (("rev r1", "commit A"), ("rev r1", "cancel"))),
        cancel=True,
    ),
    Scenario(
        "storm",
        "revisions come faster than a node can run: it starts at most once more for each of them, and commits in the end",
        (Step("A", ["r.f"]), Step("C", ["A.o"], after=("A",)), Step("B", ["r.g"])),
        _IN,
        tuple(rev(f"r{i}", ("r.f", value)) for i, value in enumerate("bcd", 1)),
        Required(
            (_out(A="d", B="1", C="d"),),
            {"revise,revise_plus": {"start A": (1, 4), "start C": (1, 4), "start B": (1, 1)}},
            (("rev r3", "start A"), ("rev r3", "commit C"), ("rev r1", "commit A"), ("rev r1", "commit B")),
        ),
    ),
    Scenario(
        "failure_mended",
        "an exception because of a value that a revision mends: the failure was an outcome with a certificate",
        (Step("A", ["r.f", "r.g"], lambda f, g: _fragile(f), silent=True), Step("C", ["A.o"], after=("A",))),
        {"r": {"f": "bad", "g": "1"}},
        (rev("r1", ("r.f", "good")),),
        Required(
            (_out(A="good", C="good"),),
            {"revise_plus": {"start A": (1, 2), "fail A": (0, 1), "start C": (1, 1)}},
            (("rev r1", "finish A"), ("rev r1", "read A r.f"), ("rev r1", "read A r.g")),
        ),
    ),
    Scenario(
        "failure_caused",
        "a revision makes a node fail that had succeeded: nothing below it keeps what it made",
        (Step("A", ["r.f"], _fragile), Step("C", ["A.o"], after=("A",)), Step("B", ["r.g"])),
        {"r": {"f": "good", "g": "1"}},
        (rev("r1", ("r.f", "bad")),),
        Required(
            ({"A": FAILED, **_out(B="1")},),
            {"revise_plus": {"fail A": (1, 1), "start B": (1, 1)}},
            (("rev r1", "read A r.f"),),
        ),
    ),
    Scenario(
        "failure_above_waiting",
        "a parent fails for good while its child waits for it with a finished result: the run has failed, it does not hang",
        (Step("A", ["r.f"], _fragile), Step("C", ["r.g"], after=("A",))),
        {"r": {"f": "good", "g": "1"}},
        (rev("r1", ("r.f", "bad")),),
        Required(
            ({"A": FAILED},),
            {"revise_plus": {"fail A": (1, 1)}},
            (("rev r1", "read A r.f"), ("rev r1", "finish C", _DIFF)),
        ),
        liveness=True,
    ),
    Scenario(
        "pinned",
        "an output is pinned, its node runs again, and the pin is withdrawn: the pin holds exactly in between",
        (Step("A", ["r.f"]), Step("C", ["A.o"], after=("A",))),
        _IN,
        (rev("r1", ("A.o", "pin", "override")), rev("r2", ("r.f", "b"))),
        Required(
            (_out(A="pin", C="pin"),),
            {"revise_plus diff": {"start A": (1, 2), "start C": (1, 2)}},
            (("rev r1", "commit A"), ("rev r1", "read C A.o"), ("rev r2", "commit A"), ("rev r1", "commit C")),
        ),
    ),
    Scenario(
        "pin_withdrawn",
        "a pin comes and goes: what was made from it goes with it",
        (Step("A", ["r.f"]), Step("C", ["A.o"], after=("A",))),
        _IN,
        (rev("r1", ("A.o", "pin", "override")), rev("r2", ("A.o", None, "withdraw"))),
        Required(
            (_out(A="a", C="a"),),
            {"revise_plus": {"start A": (1, 1), "start C": (1, 3)}},
            (("rev r1", "commit A"), ("rev r1", "read C A.o"), ("rev r2", "commit A"), ("rev r2", "commit C")),
        ),
    ),
    Scenario(
        "pinned_members",
        "the entries of a spawner are pinned to fewer: the member that is gone is retracted",
        _TEAM,
        {"r": {"m": ["x", "y"]}},
        (rev("r1", ("P.m", {"x": "x"}, "override")),),
        Required(
            ({"P": {"m": {"x": "x"}}, "w[x]": {"o": "x"}, "J": {"o": "x"}},),
            {"revise_plus": {"start P": (1, 1), "start w[x]": (1, 1), "start w[y]": (0, 1)}},
            (("rev r1", "commit P"), ("rev r1", "commit w[x]"), ("rev r1", "commit J")),
        ),
    ),
    Scenario(
        "pin_conflict",
        "a pinned place of a list is no longer there after the recompute: the node blocks until the pin is withdrawn",
        (Step("A", ["r.l"], lambda entries: {"l": entries}), Step("C", ["A.l"], after=("A",))),
        {"r": {"l": [1, 2]}},
        (rev("r1", ("A.l[1]", 9, "override")), rev("r2", ("r.l[1]", None, "remove"))),
        Required(({"A": FAILED},), {}, (("rev r1", "commit A"),)),
    ),
)
