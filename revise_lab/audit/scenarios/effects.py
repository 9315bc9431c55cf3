"""Effects: a revision against each step of their way out and back, crashes between the steps, targets that fail."""

from __future__ import annotations

from typing import Any

from revise_lab.audit.scenario import FAILED, Required, Scenario, Step, rev

_IN = {"r": {"f": "a", "g": "1"}}
_TO_B = rev("r1", ("r.f", "b"))
_BACK = rev("r2", ("r.f", "a"))


def _pays(slot: str = "e", kind: str = "K") -> Any:
    """Return effects of one slot whose payload is what the step saw last."""
    return lambda *seen: [(slot, seen[-1], kind)]


def _out(**outputs: str) -> dict[str, dict[str, str]]:
    return {name: {"o": value} for name, value in outputs.items()}


_A = Step("A", ["r.f"], effects=_pays())
_CHAIN = (_A, Step("B", ["A.o"], after=("A",), effects=_pays()))
_RACE = (("rev r1", "dispatched A/e"), ("rev r1", "land A/e"), ("rev r1", "confirmed A/e"))
_COMMIT = tuple((*race, "commit_release") for race in _RACE)

SCENARIOS = (
    Scenario(
        "effect_revised",
        "a revision before, between and after the steps in which an effect leaves: authorisation is no licence",
        (_A,),
        _IN,
        (_TO_B,),
        Required((_out(A="b"),), {"close_release": {"compensated A/e": (0, 0)}}, _COMMIT),
    ),
    Scenario(
        "effect_aba",
        "away and back while an effect is out: it is kept or published again, never lost and never there twice",
        (_A,),
        _IN,
        (_TO_B, _BACK),
        Required(
            (_out(A="a"),),
            {"close_release": {"compensated A/e": (0, 0)}},
            (("rev r2", "compensating A/e", "commit_release"),),
        ),
    ),
    Scenario(
        "effect_kept",
        "what is recomputed asks for the same again: one publication, nothing undone",
        (Step("A", ["r.f", "r.g"], out=lambda f, g: {"o": g}, effects=_pays()),),
        _IN,
        (_TO_B,),
        Required((_out(A="1"),), {"lazy": {"compensating A/e": (0, 0)}}, (("rev r1", "land A/e", "commit_release"),)),
    ),
    Scenario(
        "effects_of_a_chain",
        "two effects, the second made from what the first was made from: undone last sent first, where both must be",
        _CHAIN,
        _IN,
        (_TO_B,),
        Required(
            (_out(A="b", B="b"),),
            {},
            (("dispatched A/e", "dispatched B/e"), ("rev r1", "dispatched B/e", "commit_release")),
        ),
    ),
    Scenario(
        "confirmation_read",
        "a node reads the confirmation of an effect: that leaves before the close, and the reader waits for the right one",
        (_A, Step("C", ["A/e"], after=("A/e",))),
        _IN,
        (_TO_B,),
        Required((_out(A="b", C="ok b"),), {}, (("rev r1", "start C"), ("rev r1", "confirmed A/e"))),
    ),
    Scenario(
        "confirmation_of_irreversible",
        "an irreversible effect whose confirmation is read leaves before the close only with consent; else the run says so",
        (
            Step("A", ["r.f"], effects=lambda f: [("e", "x", "X", True)]),
            Step("D", ["r.g"], effects=lambda g: [("e", g, "X")]),
            Step("C", ["A/e"], after=("A/e",)),
            Step("E", ["D/e"], after=("D/e",)),
        ),
        _IN,
        (),
        Required(
            (_out(A="a", D="1", C="ok x"),),
            {"": {"dispatched D/e": (0, 0), "dispatched A/e": (1, 1)}},
            blocked=("D/e",),
        ),
        switches={"release": "close"},
    ),
    Scenario(
        "effect_of_a_lane",
        "a lane is left: what it has staged never leaves, what is out is undone",
        (
            Step("R", branch=(["r.f"], lambda out, f: {"a": "left", "b": "right"}[f])),
            Step("A", ["r.g"], when=("R", "left"), effects=_pays()),
            Step("B", ["r.g"], when=("R", "right"), effects=_pays()),
        ),
        _IN,
        (_TO_B,),
        Required(
            ({"R": {"o": "", "lane": {"right": True}}, "B": {"o": "1"}},),
            {"close_release": {"dispatched A/e": (0, 0)}},
            (("retract A", "confirmed A/e", "revise commit_release,revise_plus commit_release"),),
        ),
    ),
    Scenario(
        "effect_of_a_member",
        "a member goes: its effect is undone; one comes: its effect leaves once",
        (
            Step("S", ["r.f"], out=lambda f: {"items": {"a": ["p"], "b": ["q"]}[f]}),
            Step("M", ["S.items.*"], member_of=("S", "items"), effects=_pays()),
        ),
        _IN,
        (_TO_B,),
        Required(
            ({"S": {"items": {"q": "q"}}, "M[q]": {"o": "q"}},), {}, (("rev r1", "confirmed M[p]/e", "commit_release"),)
        ),
    ),
    Scenario(
        "effect_and_kill",
        "the process dies before, between and after the steps in which an effect leaves: none lost, none there twice",
        (_A,),
        _IN,
        (),
        Required(
            (_out(A="a"),),
            {},
            (("kill", "land A/e"), ("kill", "dispatched A/e"), ("kill", "confirmed A/e", "commit_release")),
        ),
        crashes=("kill",),
    ),
    Scenario(
        "effect_and_power",
        "the power goes, and with it all that was not yet durable; a revision on top",
        (_A,),
        _IN,
        (_TO_B,),
        Required((_out(A="b"),), {}, (("power", "land A/e"), ("power", "rev r1"))),
        crashes=("power",),
    ),
    Scenario(
        "undo_and_kill",
        "the process dies while an effect is being undone, and what was wanted is wanted again",
        (_A,),
        _IN,
        (_TO_B, _BACK),
        Required((_out(A="a"),), {}, (("kill", "unland A/e", "commit_release"), ("kill", "rev r2"))),
        holds=(("rev r1", "kill"),),
        crashes=("kill",),
    ),
    Scenario(
        "undo_and_power",
        "the power goes while an effect is being undone, and what was wanted is wanted again",
        (_A,),
        _IN,
        (_TO_B, _BACK),
        Required((_out(A="a"),), {}, (("power", "unland A/e", "commit_release"),)),
        holds=(("rev r1", "power"),),
        crashes=("power",),
        switches={"release": "commit"},
    ),
    Scenario(
        "undo_fails",
        "the target cannot undo: the run is blocked and lists what is left, and goes on with everything else",
        (_A, Step("D", ["r.g"], effects=_pays())),
        _IN,
        (_TO_B,),
        Required((_out(A="b", D="1"),), {}, blocked=("A/e",)),
        faults=(("A/e", "stuck"),),
        switches={"release": "commit"},
    ),
    Scenario(
        "undo_hangs",
        "the target says nothing when it is to undo, nor when it is asked: blocked, not guessed",
        (_A,),
        _IN,
        (_TO_B,),
        Required((_out(A="b"),), {}, blocked=("A/e",)),
        faults=(("A/e", "unsure"), ("A/e", "silent")),
        switches={"release": "commit"},
    ),
    Scenario(
        "irreversible_published",
        "a revision makes a published irreversible effect wrong: blocked with the residue; disjoint work goes on",
        (Step("A", ["r.f"], effects=_pays(kind="X")), Step("D", ["r.g"])),
        _IN,
        (_TO_B,),
        Required(
            (_out(A="b", D="1"),),
            {"close_release": {"blocked A/e": (0, 0)}},
            (("rev r1", "land A/e", "commit_release"),),
            blocked=("A/e",),
        ),
    ),
    Scenario(
        "irreversible_aba",
        "what was irreversible and wrong is right again: no residue is left",
        (Step("A", ["r.f"], effects=_pays(kind="X")),),
        _IN,
        (_TO_B, _BACK),
        Required((_out(A="a"),), blocked=("A/e",)),
    ),
    Scenario(
        "zombie_effect",
        "a body that ignores its stop returns anyway: its effects go with its result",
        (Step("A", ["r.f"], effects=_pays(), deaf=True),),
        _IN,
        (_TO_B,),
        Required((_out(A="b"),), {}, (("late A", "dispatched A/e", "revise,revise_plus"),)),
    ),
    Scenario(
        "refused_by_target",
        "a premise changed between the decision and the write: the target refuses, the node decides again",
        (Step("A", ["r.f"], effects=_pays(), retries=1),),
        _IN,
        (_TO_B,),
        Required((_out(A="b"),), {"close_release": {"start A": (1, 3)}, "wait close_release": {"start A": (2, 3)}}),
        faults=(("A/e", "refused"),),
    ),
    Scenario(
        "refused_for_good",
        "a premise changed and the node has no retry left: blocked, not published on an old premise",
        (_A, Step("D", ["r.g"])),
        _IN,
        (),
        Required((_out(A="a", D="1"),), {"": {"blocked A/e": (0, 1)}}, blocked=("A/e",)),
        faults=(("A/e", "refused"),),
    ),
    Scenario(
        "answer_lost",
        "the answer of the target is lost, or the call is: the target is asked, and nothing is sent again without proof",
        (_A,),
        _IN,
        (_TO_B,),
        Required((_out(A="b"),), {}, (("lose A/e", "land A/e"),)),
        faults=(("A/e", "unsure"),),
    ),
    Scenario(
        "answer_never",
        "neither the call nor the question is answered: blocked, not guessed",
        (_A,),
        _IN,
        (),
        Required((_out(A="a"),), blocked=("A/e",)),
        faults=(("A/e", "unsure"), ("A/e", "silent")),
    ),
    Scenario(
        "asked_first",
        "somebody has to allow an effect before it leaves; a revision in between; one denied blocks",
        (_A, Step("D", ["r.g"], effects=_pays())),
        _IN,
        (_TO_B,),
        Required(
            (_out(A="b", D="1"),),
            {},
            (("rev r1", "approve A/e"), ("approve A/e", "dispatched D/e", "commit_release")),
            blocked=("D/e",),
        ),
        faults=(("D/e", "denied"),),
        switches={"approval": "on"},
    ),
    Scenario(
        "effect_of_a_failure",
        "a node fails after a revision: what it had published is undone",
        (Step("A", ["r.f"], out=lambda f: {"o": {"a": 1}[f]}, effects=_pays()),),
        _IN,
        (_TO_B,),
        Required(({"A": FAILED},)),
    ),
    Scenario(
        "tentative_parent",
        "a child never sees an output that has not been committed: there is nothing to take back from it",
        (Step("P", ["r.f"], silent=True), Step("C", ["P.o"], after=("P",), effects=_pays())),
        _IN,
        (_TO_B,),
        Required((_out(P="b", C="b"),), {}, (("rev r1", "start C"),)),
    ),
)
