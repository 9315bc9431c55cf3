"""What it costs to answer a change while an action waits: six conditions, of which one is affected and reads two fields."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from revise_lab.errors import ConfigError
from revise_lab.policies.conditions import ConditionGraph
from revise_lab.records.condition import Condition, PendingAction, Verdict, most_severe
from revise_lab.records.selector import Delta, How, Read, Selector, evaluate
from revise_lab.records.value import ABSENT, Value, equal, freeze

from .samples import Row, Still, cube, summary, timed, with_exponent

LIMITS = tuple(freeze({"limit": limit, "note": ""}) for limit in (50, 100))
"""Under the first the action is no longer justified, under the second it is."""


def _within(state: Any, intent: Value) -> bool:
    return bool(state["order"]["amount"] <= state["policy"]["limit"])


def _condition(i: int) -> Condition:
    place = f"other{i}"
    return Condition(place, lambda state, intent: state[place]["a"] == state[place]["b"], "1", place)


def waiting(unrelated: int) -> ConditionGraph:
    """Return a graph in which one action waits, for which ``unrelated`` places were read that no condition reads."""
    graph = ConditionGraph()
    cubic, places = cube(unrelated)
    state = {"policy": LIMITS[1], "order": {"amount": 80, "note": ""}, "aside": cubic}
    state |= {f"other{i}": {"a": 1, "b": 1} for i in range(5)}
    for name, value in state.items():
        graph.apply(name, freeze(value))
    observed = tuple(Read(Selector("aside", place), 0) for place in places)
    conditions = (Condition("within", _within, "1", ("policy", "order")), *(_condition(i) for i in range(5)))
    graph.hold(PendingAction("a", None, conditions, resource="order", observed=observed))
    return graph


def full_rescan(action: PendingAction, values: Mapping[str, Value], reads: Iterable[Read]) -> Verdict:
    """Compare everything that was read and ask every condition, on plain values: what needs neither views nor edges.

    Nothing learns what a condition reads, so nothing could be sent along but all of it.
    """
    for selector, was in reads:
        equal(evaluate(selector, values.get(selector.artifact, ABSENT)), was)

    failed = []
    for each in action.conditions:
        try:
            met = each.validator(values, action.intent)
        except Exception:
            met = None
        if met is not True:
            failed.append(each.failed)
    return most_severe(failed)


class Change:
    """The limit of the policy falls and rises again, so that every change turns the verdict over."""

    def __init__(self, graph: ConditionGraph) -> None:
        self.graph, self.n = graph, 0
        action = graph.waiting["a"].action
        own = (read for each in graph.evaluations("a").values() for read in each.reads)
        self._action, self._reads = action, (*own, *action.observed)

    def affected(self, *, delta: bool = True) -> float:
        """Return the microseconds from a change to the verdict; without its delta the two values are compared first."""
        graph = self.graph
        value = LIMITS[self.n % 2]
        found = Delta("policy", graph.version + 1, ((("limit",), How.LEAF),), ()) if delta else None
        n = graph.n_evaluated
        spent = timed(lambda: graph.apply("policy", value, found))
        assert graph.n_evaluated == n + 1, "one condition of six is affected"
        self._check(graph.waiting["a"].verdict)
        return spent

    def rescan(self) -> float:
        """Return the microseconds of looking at everything that was read and evaluating every condition."""
        self.graph.apply("policy", LIMITS[self.n % 2])
        found: list[Verdict] = []
        spent = timed(lambda: found.append(full_rescan(self._action, self.graph.values, self._reads)))
        self._check(found[0])
        return spent

    def _check(self, verdict: Verdict) -> None:
        if verdict is not (Verdict.REPLAN, Verdict.KEEP)[self.n % 2]:
            raise AssertionError(f"what is timed must turn the verdict over: {verdict} after {self.n} changes")
        self.n += 1


WAYS: dict[str, Callable[[Change], float]] = {
    "affected only": Change.affected,
    "affected only, values compared": lambda change: change.affected(delta=False),
    "full rescan": Change.rescan,
}
"""Ways of answering a change."""


def growth(sizes: Sequence[int], n: int, ways: Iterable[str] = tuple(WAYS)) -> dict[str, list[list[float]]]:
    """Return samples by way of answering, for each number of unrelated reads, all taken in turn in ten rounds.

    A rescan reads everything each time, so there are fewer samples of it: at most 1e6 reads a size, at least ten samples.
    """
    changes = [Change(waiting(size)) for size in sizes]
    found: dict[str, list[list[float]]] = {way: [[] for _ in sizes] for way in ways}
    with Still():
        for change in changes:
            change.affected()
            change.affected()
        for _ in range(10):
            for way, taken in found.items():
                for size, change, samples in zip(sizes, changes, taken, strict=True):
                    most = 100_000 // (size + 40) if way == "full rescan" else n
                    samples += [WAYS[way](change) for _ in range(max(1, min(n // 10, most)))]
    return found


def bench_conditions(text: str | None = None, quick: bool = False) -> list[Row]:
    """Time the answer to a change against the budget of the design (the paper reports 8.8 to 9.3 us).

    Parameters
    ----------
    text : str, optional
        Only the ways of answering whose names hold this text.
    quick : bool
        Fewer samples, and not a million reads.

    Raises
    ------
    ConfigError
        None does.
    """
    ways = [way for way in WAYS if not text or text in way]
    if not ways:
        raise ConfigError(f"no row of the benchmark holds {text!r} - there are: {'; '.join(WAYS)}")
    sizes = (13, 253, 4_093) if quick else (13, 253, 4_093, 1_000_000)
    rows = []
    for way, samples in growth(sizes, 1_000 if quick else 20_000, ways).items():
        budget = 5.0 if way == "affected only" else None
        cases = (f"{way}, {size:,} unrelated reads" for size in sizes)
        timings = zip(cases, samples, strict=True)
        made = with_exponent([summary("conditions", case, taken, budget) for case, taken in timings], sizes)
        rows += made if budget else [*made[:-1], made[-1]._replace(met=None)]
    return rows
