"""What counts as a read: members, sizes, absence, kinds, whole values, hidden reads, and values that change shape."""

from __future__ import annotations

from revise_lab.audit.scenario import Required, Scenario, Step, rev

_READERS = (
    Step("I", ["r.d #members"]),
    Step("L", ["r.d #len"]),
    Step("H", ["r.d #has:k"]),
    Step("O", ["r.d.x"]),
    Step("N", ["r.d #has:q"]),
)
_KEPT = {"start O": (1, 1), "start N": (1, 1)}
_MOVED = {f"start {name}": (1, 2) for name in "ILH"}


def _out(**values: object) -> dict[str, dict[str, object]]:
    return {name: {"o": value} for name, value in values.items()}


def _members(name: str, story: str, before: list[str], change: tuple[str, object, str], after: list[str]) -> Scenario:
    has = str("k" in after)
    return Scenario(
        name,
        story,
        _READERS,
        {"r": {"d": dict.fromkeys(before, 1)}},
        (rev("r1", change),),
        Required(
            (_out(I=str(tuple(after)), L=str(len(after)), H=has, O="1", N="False"),),
            {"revise,revise_plus": {**_KEPT, **_MOVED}},
            (("rev r1", "read I r.d #members"), ("rev r1", "read L r.d #len"), ("rev r1", "read H r.d #has:k")),
        ),
        n_slots=1,
    )


SCENARIOS = (
    _members(
        "member_inserted",
        "a key appears: its iterator, its size and its negative membership are read, another key is not",
        ["x"],
        ("r.d.k", 1, "set"),
        ["k", "x"],
    ),
    _members(
        "member_deleted",
        "a key goes: what was deleted was a member of somebody's iteration",
        ["k", "x"],
        ("r.d.k", None, "delete"),
        ["x"],
    ),
    Scenario(
        "member_replaced",
        "a member is replaced in place: an iterator over the keys is not touched, a reader of the item is",
        (Step("I", ["r.d #members"]), Step("V", ["r.d.x"]), Step("W", ["r.d"])),
        {"r": {"d": {"x": 1}}},
        (rev("r1", ("r.d.x", 2)),),
        Required(
            (_out(I="('x',)", V="2", W="{'x': 2}"),),
            {"revise,revise_plus": {"start I": (1, 1), "start V": (1, 2), "start W": (1, 2)}},
            (("rev r1", "read V r.d.x"), ("rev r1", "commit V"), ("rev r1", "read W r.d"), ("rev r1", "commit I")),
        ),
        n_slots=2,
    ),
    Scenario(
        "list_grows",
        "a list grows and shrinks at its end: its size changes, its first element does not",
        (Step("L", ["r.l #len"]), Step("E", ["r.l[0]"]), Step("Z", ["r.l[1]"])),
        {"r": {"l": [7]}},
        (rev("r1", ("r.l", 8, "append")), rev("r2", ("r.l[1]", None, "remove"))),
        Required(
            (_out(L="1", E="7", Z="None"),),
            {"revise,revise_plus": {"start E": (1, 1), "start L": (1, 3), "start Z": (1, 3)}},
            (("rev r1", "read L r.l #len"), ("rev r2", "read Z r.l[1]"), ("rev r2", "commit L")),
        ),
        n_slots=1,
    ),
    Scenario(
        "ancestor_replaced",
        "a leaf's container becomes a scalar, and then a container again without the leaf",
        (Step("A", ["r.d.x"]), Step("K", ["r.d #kind"])),
        {"r": {"d": {"x": 1}}},
        (rev("r1", ("r.d", 5)), rev("r2", ("r.d", {"y": 1}))),
        Required(
            (_out(A="None", K="object"),),
            {"revise_plus": {"start A": (1, 3), "start K": (1, 3)}},
            (
                ("rev r1", "read A r.d.x"),
                ("rev r2", "commit A"),
                ("rev r1", "read K r.d #kind"),
                ("rev r2", "commit K"),
            ),
        ),
    ),
    Scenario(
        "ancestor_deleted",
        "a leaf's container is deleted while its reader lives",
        (Step("A", ["r.d.x"]), Step("C", ["A.o"], after=("A",))),
        {"r": {"d": {"x": 1}}},
        (rev("r1", ("r.d", None, "delete")),),
        Required((_out(A="None", C="None"),), {}, (("rev r1", "read A r.d.x"), ("rev r1", "commit C"))),
    ),
    Scenario(
        "absent_read",
        "a key that was read as absent appears and goes again",
        (Step("A", ["r.k"]), Step("C", ["A.o"], after=("A",))),
        {"r": {"f": 1}},
        (rev("r1", ("r.k", "new")), rev("r2", ("r.k", None, "delete"))),
        Required(
            (_out(A="None", C="None"),), {}, (("rev r1", "read A r.k"), ("rev r2", "commit A"), ("rev r1", "commit C"))
        ),
    ),
    Scenario(
        "whole_subtree",
        "a node that looks at the whole value has read every leaf of it, by whatever name it came there",
        (Step("W", ["r"]), Step("D", ["r.d"]), Step("O", ["s.x"])),
        {"r": {"d": {"x": 1}}, "s": {"x": 1}},
        (rev("r1", ("r.d.x", 2)),),
        Required(
            (_out(W="{'d': {'x': 2}}", D="{'x': 2}", O="1"),),
            {"revise,revise_plus": {"start W": (1, 2), "start D": (1, 2), "start O": (1, 1)}},
            (("rev r1", "read W r"), ("rev r1", "read D r.d"), ("rev r1", "commit W")),
        ),
        n_slots=2,
    ),
    Scenario(
        "hidden_read",
        "a read that nobody saw: the node is unknown, so it has read everything, and it is never called complete",
        (Step("U", ["r.f", "r.g"], unknown=frozenset({"reads"})), Step("V", ["U.o"], after=("U",))),
        {"r": {"f": "a", "g": 1}},
        (rev("r1", ("r.g", 2)),),
        Required(
            (_out(U="a2", V="a2"),),
            {"revise_plus": {"start U": (1, 2)}},
            (("rev r1", "read U r.f"), ("rev r1", "read U r.g"), ("rev r1", "commit U"), ("rev r1", "commit V")),
        ),
    ),
    Scenario(
        "write_refused",
        "a node that tries to write through its view is refused and changes nothing",
        (Step("A", ["r.d #write", "r.d #members"]), Step("B", ["r.d #members"])),
        {"r": {"d": {"x": 1}}},
        (rev("r1", ("r.d.k", 1)),),
        Required(
            (_out(A="refused('k', 'x')", B="('k', 'x')"),),
            {},
            (("rev r1", "read A r.d #write"), ("rev r1", "read B r.d #members")),
        ),
        liveness=True,
    ),
)
