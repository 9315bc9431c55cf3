"""Conditions: what a change evaluates, what an answer means, and that no look goes unrecorded."""

from __future__ import annotations

import copy
import json

import numpy as np
import pytest

from revise_lab import Workflow, simulate
from revise_lab.policies import policy
from revise_lab.policies.conditions import ConditionGraph
from revise_lab.policies.evaluation import evaluate_rule
from revise_lab.policies.replay import Beyond, Laid
from revise_lab.records.condition import (
    Captured,
    Condition,
    ConditionClass,
    ConditionRefused,
    PendingAction,
    RefreshRule,
    Verdict,
    most_severe,
)
from revise_lab.records.revision import Change, Op, Revision
from revise_lab.records.selector import Read, Selector
from revise_lab.records.value import ABSENT, freeze
from revise_lab.runtime.simulator import truth_of

KEEP, REFRESH, REPLAN, BLOCK = Verdict
HARD = [kind for kind in ConditionClass if kind is not ConditionClass.DECISION]
STATE = {"policy": {"limit": 100, "version": 1}, "order": {"amount": 80, "lines": [1, 2]}, "who": {"name": "Ada"}}


def within(state, intent):
    return state["order"]["amount"] <= state["policy"]["limit"]


def rule(validator=within, name="within", version="1", selectors=("policy", "order", "who"), **more):
    return Condition(name, validator, version, selectors, **more)


def held(*rules, refresh=(), state=STATE, **more):
    """Return a graph in which an action with these rules waits, and the verdict it began with."""
    graph = ConditionGraph(**more)
    for artifact, value in state.items():
        graph.apply(artifact, freeze(value))
    return graph, graph.hold(PendingAction("a", {"amount": 80}, rules, refresh, resource="order"))


def change(graph, artifact, **fields):
    """Change fields of an artifact and return the verdict of the action."""
    reached = graph.apply(artifact, freeze({**graph.values[artifact], **fields}))
    verdict = graph.waiting["a"].verdict if "a" in graph.waiting else KEEP
    assert reached in ({}, {"a": verdict})
    return verdict


# --- what can be taken on ---


async def later(state, intent):
    return True


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (lambda: rule("the customer seemed satisfied"), "cannot be called.*give a function"),
        (lambda: rule(None), "cannot be called"),
        (lambda: rule(later), "answers later"),
        (lambda: rule(version=""), "needs a name, a version"),
        (lambda: rule(selectors=()), "at least one selector"),
        (lambda: PendingAction("a", {}, ()), "has no condition"),
        (lambda: PendingAction("a", {}, (rule(), rule())), "repeats"),
        (lambda: PendingAction("a", {}, (RefreshRule("x", within, "1", "policy"),)), "must be Condition"),
    ],
)
def test_what_could_never_be_checked_is_refused(made, message):
    with pytest.raises(ConditionRefused, match=message):
        made()


def test_one_name_and_version_is_one_validator():
    graph, _ = held(rule())
    with pytest.raises(ConditionRefused, match="already waiting"):
        graph.hold(PendingAction("a", {}, (rule(),)))
    with pytest.raises(ConditionRefused, match="another condition 'within' is in force"):
        graph.hold(PendingAction("b", {}, (rule(lambda state, intent: True),)))
    with pytest.raises(ConditionRefused, match=r"changed and is still version 1.*raise its version"):
        graph.deploy([rule(lambda state, intent: True)])
    assert list(graph.waiting) == ["a"]
    twice = [rule(version="2"), rule(lambda state, intent: True, version="3")]
    for given in (lambda: graph.deploy(twice), lambda: ConditionGraph(twice)):
        with pytest.raises(ConditionRefused, match="'within' is given twice"):
            given()


# --- what an answer means ---


def refuse(state, intent):
    raise ValueError("no idea")


@pytest.mark.parametrize("kind", ConditionClass)
@pytest.mark.parametrize(
    ("validator", "reason"),
    [
        (lambda state, intent: False, "false"),
        (refuse, "unverifiable: ValueError: no idea"),
        (lambda state, intent: state["policy"]["missing"], "unverifiable: KeyError"),
        (lambda state, intent: state["nowhere"]["x"], "unverifiable: KeyError"),
        (lambda state, intent: "yes", "unverifiable: it answered a str"),
        (lambda state, intent: 1, "unverifiable: it answered a int"),
        (lambda state, intent: None, "unverifiable: it answered a NoneType"),
    ],
)
def test_false_missing_and_unverifiable_hand_back_a_decision_and_block_all_else(kind, validator, reason):
    graph, verdict = held(rule(validator, kind=kind))
    assert verdict is (REPLAN if kind is ConditionClass.DECISION else BLOCK)
    assert graph.evaluations("a")["within"].reason.startswith(reason)


@pytest.mark.parametrize("kind", ConditionClass)
def test_two_answers_on_the_same_reads_contradict_each_other_until_something_changes(kind):
    answers = iter([True, False, True, True, True])

    def fickle(state, intent):
        return state["who"]["name"] != "" and next(answers)

    graph, verdict = held(rule(fickle, kind=kind))
    assert verdict is KEEP
    assert graph.rescan("a") is rule(kind=kind).failed
    assert "contradictory" in graph.evaluations("a")["within"].reason
    assert graph.rescan("a") is rule(kind=kind).failed, "asking until it agrees is no verification"
    assert change(graph, "who", name="Bo") is KEEP


def test_the_most_severe_verdict_wins_whatever_the_order():
    assert most_severe([]) is KEEP
    for order in ([KEEP, BLOCK, REFRESH, REPLAN], [REPLAN, REFRESH, BLOCK, KEEP]):
        assert [most_severe(order[:n]) for n in (1, 4)] == [order[0], BLOCK]
    assert [verdict.severity for verdict in Verdict] == [0, 1, 2, 3]
    assert [verdict.releases for verdict in Verdict] == [True, True, False, False]
    # One change fires a refresh rule and falsifies what guards the authority.
    label = RefreshRule("label", lambda state, intent: state["who"]["name"], "1", "who")
    known = rule(lambda state, intent: state["who"]["name"] == "Ada", "known", kind="authority")
    graph, verdict = held(rule(), known, refresh=(label,))
    assert verdict is KEEP
    assert change(graph, "who", name="Bo") is BLOCK
    assert {name: each.verdict for name, each in graph.evaluations("a").items()} == {
        "within": KEEP, "known": BLOCK, "label": REFRESH,
    }  # fmt: skip
    assert change(graph, "who", name="Ada") is KEEP, "verdicts are relative to the decision, not to the last change"


def test_a_refresh_rule_renews_what_it_derives_and_decides_nothing():
    label = RefreshRule("label", lambda state, intent: {"to": state["who"]["name"], "n": intent["amount"]}, "1", "who")
    graph, _ = held(rule(), refresh=(label,))
    assert change(graph, "who", name="Bo") is REFRESH
    assert graph.waiting["a"].derived == {"label": {"to": "Bo", "n": 80}}
    graph.apply("who", freeze({}))
    assert graph.waiting["a"].verdict is REPLAN, "what cannot be derived cannot be sent"


# --- versions ---


@pytest.mark.parametrize("kind", ConditionClass)
def test_another_validator_version_is_a_change_and_never_keeps(kind):
    graph, _ = held(rule(kind=kind))
    agrees = rule(lambda state, intent: True, version="2", kind=kind)
    assert graph.deploy([agrees]) == {"a": rule(kind=kind).failed}
    assert "does not supersede" in graph.evaluations("a")["within"].reason
    assert change(graph, "policy", limit=90) is rule(kind=kind).failed
    supersedes = rule(lambda state, intent: True, version="3", kind=kind, supersedes={"1", "2"})
    assert graph.deploy([supersedes]) == {"a": REFRESH}
    assert graph.deploy([supersedes]) == {}
    differs = rule(lambda state, intent: False, version="4", kind=kind, supersedes={"1"})
    assert graph.deploy([differs]) == {"a": rule(kind=kind).failed}


def test_another_policy_version_is_a_change_although_no_field_that_decides_has_moved():
    graph, _ = held(rule(policy="policy.version"))
    assert change(graph, "policy", note="x") is KEEP
    n = graph.n_evaluated
    assert change(graph, "policy", version=2) is REFRESH
    assert graph.n_evaluated == n + 1
    assert "decided under 1" in graph.evaluations("a")["within"].reason
    assert change(graph, "policy", version=1) is KEEP
    graph.apply("policy", freeze({"limit": 100}))
    assert graph.waiting["a"].verdict is REPLAN, "a policy without a version cannot be told from another"


# --- what is evaluated ---


def test_a_change_evaluates_what_it_reaches_and_nothing_else():
    ran = []

    def noting(name, read):
        return rule(lambda state, intent: ran.append(name) or read(state) is not None, name)

    first = noting("first", lambda state: state["policy"]["limit"])
    second = noting("second", lambda state: (state["order"]["amount"], state["policy"]["limit"]))
    members = noting("members", lambda state: len(state["order"]["lines"]))
    absent = noting("absent", lambda state: "gift" in state["order"])
    graph, _ = held(first, second, members, absent)

    def ran_after(artifact, **fields):
        ran.clear()
        change(graph, artifact, **fields)
        return set(ran)

    assert ran_after("policy", limit=99) == {"first", "second"}
    assert ran_after("policy", limit=99) == set(), "nothing changed"
    assert ran_after("policy", note="x") == set(), "a field that nobody read"
    assert ran_after("order", amount=3) == {"second"}
    assert ran_after("order", lines=[1, 3]) == set(), "only the length was read"
    assert ran_after("order", lines=[1, 3, 4]) == {"members"}, "a phantom"
    assert ran_after("order", gift=True) == {"absent"}, "absence is a read"
    assert ran_after("who", name="Bo") == set()
    assert graph.waiting["a"].premises == ("policy", "order")
    graph.drop("a")
    assert ran_after("policy", limit=1) == set()


def test_edges_follow_what_is_read_now():
    """A condition that took another way reads other places; those it no longer needs go at the next full evaluation."""
    ran = []

    def either(state, intent):
        ran.append(1)
        return state["who"]["name"] == "Ada" or state["policy"]["limit"] > 10

    graph, _ = held(rule(either))
    change(graph, "policy", limit=20)
    assert len(ran) == 1
    change(graph, "who", name="Bo")
    assert change(graph, "policy", limit=5) is REPLAN
    assert change(graph, "who", name="Ada") is KEEP
    assert graph.rescan("a") is KEEP
    n = len(ran)
    assert change(graph, "policy", limit=4) is KEEP
    assert len(ran) == n


def test_an_interrupted_evaluation_leaves_nothing_that_counts_as_verified():
    stop = []

    def interruptible(state, intent):
        if stop:
            raise KeyboardInterrupt
        return state["policy"]["limit"] > 10

    graph, _ = held(rule(interruptible, "first"), rule(name="second", kind="safety"))
    stop.append(1)
    with pytest.raises(KeyboardInterrupt):
        graph.apply("policy", freeze({"limit": 50}))
    assert graph.waiting["a"].verdict is BLOCK
    with pytest.raises(KeyboardInterrupt):
        graph.deploy([rule(interruptible, "first", version="2", supersedes="1")])
    with pytest.raises(KeyboardInterrupt):
        graph.hold(PendingAction("b", {}, (rule(lambda state, intent: True, "third"), graph.rules["first"])))
    assert list(graph.waiting) == ["a"]
    stop.clear()
    assert graph.recheck("a") is BLOCK, "80 under a limit of 50"
    assert change(graph, "policy", limit=100) is REFRESH
    assert graph.evaluations("a")["first"].holds


# --- coverage ---


def test_reads_past_the_views_are_covered_by_what_is_declared():
    store = {}

    def helper(state, intent):
        return store["limit"] >= 80

    graph = ConditionGraph()
    graph.apply("policy", freeze({"limit": 100}))
    store["limit"] = 100
    over = rule(helper, selectors="policy.limit", coverage="over-approximated")
    assert graph.hold(PendingAction("a", {}, (over,))) is KEEP
    assert graph.evaluations("a")["within"].coverage is Captured.OVER_APPROXIMATED
    assert graph.waiting["a"].premises == ("policy",)
    store["limit"] = 50
    assert change(graph, "policy", limit=50) is REPLAN
    missed = ConditionGraph()
    missed.apply("policy", freeze({"limit": 100}))
    store["limit"] = 100
    missed.hold(PendingAction("a", {}, (rule(helper, selectors="policy.limit"),)))
    store["limit"] = 50
    assert change(missed, "policy", limit=50) is KEEP, "what is neither seen nor declared is missed: the hole itself"


@pytest.mark.parametrize("kind", ConditionClass)
def test_partial_coverage_never_keeps(kind):
    graph, verdict = held(rule(kind=kind, coverage="partial"))
    assert verdict is rule(kind=kind).failed
    for _ in range(2):
        assert change(graph, "policy", limit=graph.values["policy"]["limit"] + 1) is rule(kind=kind).failed


def test_a_view_that_gives_up_has_read_all_that_it_offers():
    def blind(state, intent):
        # A C-level reader finds nothing in a view; what exposes the whole value reads all of it.
        return len(json.dumps(copy.deepcopy(state["policy"]))) > 0

    graph, _ = held(rule(blind))
    assert [str(each.selector) for each in graph.evaluations("a")["within"].reads][-1] == "policy"
    n = graph.n_evaluated
    change(graph, "policy", anything=1)
    assert graph.n_evaluated == n + 1


# --- the copy of what was read ---


def test_everything_but_a_recorded_member_is_beyond_the_copy():
    noted = []
    laid = Laid()
    laid.noted = noted
    dict.__setitem__(laid, "x", 1)
    assert (laid["x"], laid.get("x")) == (1, 1)
    looks = [
        lambda: laid["y"], lambda: laid.get("y"), lambda: "x" in laid, lambda: len(laid), lambda: bool(laid),
        lambda: list(laid), lambda: dict(laid), lambda: {**laid}, lambda: laid == {}, lambda: laid != {},
        lambda: laid.keys(), lambda: laid.items(), lambda: laid.values(), lambda: repr(laid), lambda: json.dumps(laid),
        lambda: copy.copy(laid), lambda: laid | {}, lambda: copy.deepcopy(laid), lambda: laid.update(y=1),
        lambda: laid.pop("x"), lambda: sorted(laid), lambda: {} | laid, lambda: "{x}".format(**laid),
        lambda: laid.setdefault("x", 2), lambda: reversed(laid), lambda: f"{laid}",
    ]  # fmt: skip
    for n, look in enumerate(looks):
        noted.clear()
        with pytest.raises(Beyond):
            look()
        assert noted, n


@pytest.mark.parametrize(
    "validator",
    [
        within,
        lambda s, i: s["order"].get("amount", 0) <= s["policy"].get("limit", 0),
        lambda s, i: s["policy"]["limit"] > 90 or s["who"]["name"] == "Ada",
        lambda s, i: "limit" in s["policy"] and len(s["order"]["lines"]) < 4,
        lambda s, i: any(line > 2 for line in s["order"]["lines"]) or s["policy"]["version"] == 1,
        lambda s, i: s["policy"] == {"limit": 100, "version": 1} or s["order"]["amount"] > 50,
        lambda s, i: json.dumps(s["policy"], sort_keys=True) != "" and s["policy"]["limit"] > s["order"]["amount"],
        lambda s, i: s["policy"]["limit"] > 90 or {**s["order"]}["amount"] > 50,
    ],
)
def test_the_graph_agrees_with_an_evaluation_from_nothing_after_every_change(validator):
    """Whichever way a validator is asked, its answer and its reads cover those of an evaluation through fresh views."""
    rng = np.random.default_rng(7)
    guarded = rule(validator, kind="safety")
    graph, _ = held(guarded)
    basis = graph.waiting["a"].held["within"].basis
    kinds = set()
    for _ in range(300):
        artifact = ("policy", "order", "who")[rng.integers(3)]
        value = dict(STATE[artifact])
        field = list(value)[rng.integers(len(value))]
        choices = {"name": ["Ada", "Bo"], "lines": [[1], [1, 2], [3, 1, 2], [1, 2, 3, 4]]}.get(
            field, [1, 60, 95, 100, "x"]
        )
        value[field] = choices[rng.integers(len(choices))]
        if rng.random() < 0.1:
            del value[field]
        graph.apply(artifact, freeze(value))
        fresh = evaluate_rule(guarded, graph.waiting["a"].action.intent, graph.values, basis)
        found = graph.evaluations("a")["within"]
        assert (found.holds, found.verdict) == (fresh.holds, fresh.verdict)
        assert set(fresh.reads) <= set(found.reads)
        kinds.add(found.verdict)
    assert kinds == {KEEP, BLOCK}


def test_a_validator_that_swallows_everything_is_asked_through_the_views():
    def swallow(state, intent):
        try:
            return state["policy"]["limit"] > 90 or state["who"]["name"] == "Ada"
        except BaseException:
            return True

    graph, _ = held(rule(swallow), state=STATE | {"who": {"name": "Bo"}})
    assert change(graph, "policy", limit=95) is KEEP
    assert change(graph, "policy", limit=50) is REPLAN, "it looked beyond, caught that, and said True"


# --- workflows, other reads ---


@pytest.mark.parametrize(("control", "limit", "received", "taken"), [
    ("condition", 90, 1, ["pay"]),
    ("reads", 90, 2, ["pay"]),
    ("condition", 50, 2, ["pay", "ask"]),
    ("reads", 50, 2, ["pay", "ask"]),
])  # fmt: skip
def test_a_condition_decides_a_branch_and_only_its_answer_counts(control, limit, received, taken):
    flow, ran = Workflow("desk"), []

    @flow.node(kind="tool")
    def receive(state, ctx):
        ran.append("receive")
        return {"amount": state["order"]["amount"]}

    flow.branch(of="receive")(rule(selectors=("order", "policy")).as_branch("pay", "ask"))

    @flow.node(kind="model", after="receive", when="pay")
    async def pay(state, ctx):
        ran.append("pay")
        await ctx.model(f"pay {state['receive']['amount']}", max_tokens=2)
        return {"paid": True}

    @flow.node(kind="model", after="receive", when="ask")
    async def ask(state, ctx):
        ran.append("ask")
        await ctx.model("ask", max_tokens=2)
        return {"asked": True}

    inputs = {"order": {"amount": 80}, "policy": {"limit": 100}}
    lowered = Revision("r", (Change("policy", Op.SET, ("limit",), limit),))
    run = simulate(flow, inputs, policy("revise_plus", control=control), revisions=[(1.5, lowered)])
    live = list(ran)
    assert not truth_of(run)[1]
    assert (live.count("receive"), [each for each in live if each != "receive"]) == (received, taken)


def test_a_branch_needs_a_clear_answer_from_what_it_can_see():
    with pytest.raises(TypeError, match="a branch needs True or False"):
        rule(lambda state, intent: 1).as_branch("pay", "ask")({})
    for coverage in ("partial", "over-approximated"):
        with pytest.raises(ConditionRefused, match=f"is {coverage}, and a workflow sees only"):
            rule(coverage=coverage).as_branch("pay", "ask")


def test_what_was_read_besides_reaches_nothing_and_is_compared_by_a_rescan():
    graph = ConditionGraph()
    for artifact, value in STATE.items():
        graph.apply(artifact, freeze(value))
    observed = tuple(Read(Selector("who", (f"k{i}",)), ABSENT) for i in range(50))
    graph.hold(PendingAction("a", {"amount": 80}, (rule(),), observed=observed))
    n = graph.n_evaluated
    assert graph.apply("who", freeze({"k3": 1})) == {}
    assert graph.n_evaluated == n
    assert graph.rescan("a") is KEEP
    assert graph.n_evaluated == n + 1


# --- what a hostile user gives ---


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (lambda: PendingAction("a", {}, ("within",)), "must be Condition"),
        (lambda: PendingAction("a", {}, (rule(),), ("label",)), "must be RefreshRule"),
        (lambda: PendingAction("a", {}, (each for each in ())), "has no condition"),
        (lambda: PendingAction("\ud800", {}, (rule(),)), "its key is no text"),
        (lambda: PendingAction(7, {}, (rule(),)), "its key is no text"),
        (lambda: PendingAction("a", {}, (rule(),), reversibility="irreversible"), "no Reversibility - give one of I, R"),
        (lambda: rule(kind="saftey"), "'saftey' is no ConditionClass - give one of decision, safety"),
        (lambda: rule(coverage="all"), "'all' is no Captured"),
        (lambda: rule(selectors=(each for each in ())), "at least one selector"),
        (lambda: rule(name=7), "needs a name"),
    ],
)  # fmt: skip
def test_what_is_no_rule_no_class_or_no_key_is_refused_by_name(made, message):
    with pytest.raises(ConditionRefused, match=message):
        made()


def test_reasons_that_come_from_a_generator_are_kept():
    """A generator is over once it was looked at, and an action without a reason is never stopped."""
    label = RefreshRule("label", lambda state, intent: state["who"]["name"], "1", "who")
    graph, verdict = held(*(), rule(), state=STATE | {"policy": {"limit": 1}})
    assert verdict is REPLAN
    action = PendingAction("b", {}, (each for each in [rule()]), (each for each in [label]), observed=iter(()))
    assert (action.conditions, action.refresh, action.observed) == ((rule(),), (label,), ())
    assert graph.hold(action) is REPLAN
    assert PendingAction("c", {}, rule()).conditions == (rule(),)


def test_a_condition_stays_one_whatever_is_deployed_under_its_name():
    label = RefreshRule("label", lambda state, intent: 1, "1", "who")
    graph, _ = held(rule(), refresh=(label,))
    for other in (
        RefreshRule("within", lambda state, intent: 1, "2", "policy", supersedes="1"),
        rule(lambda state, intent: True, "label", "2", supersedes="1"),
    ):
        with pytest.raises(ConditionRefused, match="would go unguarded, or the other way round - give it another name"):
            graph.deploy([other])
    assert change(graph, "policy", limit=1) is REPLAN


def test_an_error_whose_text_fails_and_a_value_that_cannot_be_sent_are_not_verified():
    class Odd(Exception):
        def __str__(self):
            raise RuntimeError("no text")

    def raises(state, intent):
        raise Odd

    graph, verdict = held(rule(raises), refresh=(RefreshRule("gone", lambda state, intent: ABSENT, "1", "who"),))
    reasons = {name: each.reason for name, each in graph.evaluations("a").items()}
    assert verdict is REPLAN
    assert "unverifiable" in reasons["within"]
    assert "not JSON-like" in reasons["gone"]


def test_what_is_interrupted_before_it_was_looked_up_is_found_again(monkeypatch):
    graph, _ = held(rule())

    def stop(delta):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(graph._index, "touch", stop)
        with pytest.raises(KeyboardInterrupt):
            change(graph, "policy", limit=1)
    assert change(graph, "policy", limit=1) is REPLAN
