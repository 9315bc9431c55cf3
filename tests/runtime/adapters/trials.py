"""One revised run of a shape, and what must hold of it, by plain means: no selector, no index, no closure of ours."""

from __future__ import annotations

import asyncio
import copy
import pickle
import random
import subprocess
import sys
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from langchain_core.callbacks import BaseCallbackHandler
from shapes import SHAPES, Ask, Outbox, answer_to, changed, plain

from revise_lab.errors import ReviseLabError, WorkflowClosed
from revise_lab.policies import policy as policy_named
from revise_lab.records.value import ABSENT, thaw
from revise_lab.runtime.adapters.langgraph import Outgoing, RevisableGraph
from revise_lab.runtime.target import MemoryTarget

POLICIES = ["revise_plus", "revise", "suffix", "restart", "wait"]
LATE = {"dataclass", "asks", "commands"}
"""Shapes with a node that reads, or is asked, after it has called: one attempt may call in vain whatever is planned."""
COARSE = {"pydantic", "loop", "nested", "nested_saved", "tools", "react", "retries"}
"""Shapes whose answers do not tell every read: the length of a list, messages that are all read where one counts."""


class Planned(NamedTuple):
    """The names that each planner must affect at one revision, seen from plain values and edges."""

    direct: frozenset
    descendants: frozenset
    suffix: frozenset
    active: frozenset
    started: frozenset
    """Attempts that had started; one in a thread may call later, and nobody can stop it."""


class Trial(NamedTuple):
    """A revised run that has ended."""

    name: str
    policy: str
    seed: int
    run: Any
    result: Any
    final: dict
    ask: Ask
    outbox: Outbox
    planned: list


# --- what each planner must affect ---------------------------------------------------------------------------------------


def look(value, path, marker):
    """Return what a read sees of plain data."""
    for key in path:
        here = value if isinstance(value, dict) else dict(enumerate(value)) if isinstance(value, list) else {}
        value = here.get(key, ABSENT)
    kind = {dict: "object", list: "array"}.get(type(value), "absent" if value is ABSENT else "leaf")
    if marker == "members" and kind in ("object", "array"):
        return sorted(value) if kind == "object" else len(value)
    return {"value": value, "has": value is not ABSENT}.get(marker, kind)


def holds(read, values):
    """Say whether a recorded read still sees what it saw."""
    artifact, path, marker, _ = read.selector
    value, was = (each if each is ABSENT else thaw(each) for each in (values.get(artifact, ABSENT), read.observed))
    return repr(look(value, path, str(marker))) == repr(was)


def sets(view, values, started):
    active = {name for name, run in view.runs.items() if run.active is not False}
    live = {name: run.attempt or run.current for name, run in view.runs.items()}
    direct = {name for name, each in live.items() if each and not all(holds(read, values) for read in each.reads)}
    below = set(direct)
    while more := {n for n, run in view.runs.items() if n not in below and any(p.name in below for p in run.parents)}:
        below |= more
    below &= active
    first = min((view.runs[name].position for name in below), default=None)
    suffix = {name for name in active if first is not None and view.runs[name].position >= first}
    return Planned(*map(frozenset, (direct, below, suffix, active, started)))


def watched(policy, planned, get_run):
    """Return a policy that, when asked, has every planner plan on the same view and compares what they affect."""
    how = policy_named(policy)

    def plan(view):
        run = get_run()
        found = sets(view, run.machine.values, [span.attempt for span in run.spans])
        affected = {}
        for name in ("revise_plus", "revise", "suffix", "restart"):
            other = policy_named(name)
            affected[name] = {run.name for run in other.plan(view._replace(switches=other.switches)).affected}
        assert affected["revise_plus"] <= affected["revise"] <= affected["suffix"] <= affected["restart"]
        if not planned:  # later, what is already out of date is no direct hit, and versions remember what values do not
            assert affected == {
                "revise_plus": found.direct, "revise": found.descendants, "suffix": found.suffix, "restart": found.active,
            }  # fmt: skip
        planned.append(found)
        return how.plan(view)

    return how._replace(plan=plan)


# --- a run ---------------------------------------------------------------------------------------------------------------


async def revised(name, seed, policy, *, scale_s=0.1, n_max=3):
    """Run a shape with one to three revisions at times drawn from the seed; questions are answered as they come."""
    build, inputs, choices = SHAPES[name]
    draw = random.Random(f"{name} {seed}")
    ask, outbox, planned = Ask(draw.random(), scale_s), Outbox(), []
    effects = {slot: Outgoing(outbox, slot, "world") for slot in ("book", "file")}
    how = watched(policy, planned, lambda: run)
    graph = RevisableGraph(build(ask, outbox), how, effects=effects, targets={"world": MemoryTarget()})
    given = copy.deepcopy(inputs)
    handlers = [BaseCallbackHandler()] if draw.random() < 0.5 else []
    run = graph.start(given, {"configurable": {"thread_id": "mine"}, "callbacks": handlers})
    ending = asyncio.create_task(_answered(run, draw.random() * scale_s))
    made = []
    for change in [draw.choice(choices) for _ in range(draw.randint(1, n_max))]:
        await asyncio.sleep(scale_s * draw.random() * 3)
        if run.ended or run.machine.state != "open":
            break
        try:
            await run.revise(*change)
        except WorkflowClosed:
            break
        made.append(change)
    result = await ending
    assert plain(given) == plain(inputs), "the caller's input is untouched"
    return Trial(name, policy, seed, run, result, changed(inputs, made), ask, outbox, planned)


async def _answered(run, pause_s):
    while (result := await run.result()).interrupts:
        await asyncio.sleep(pause_s)
        result = await run.result()
        if result.interrupts:
            with suppress(ReviseLabError):  # a revision may have taken the question back
                await run.resume(answer_to(result.interrupts[0].value))
        await asyncio.sleep(0)
    return result


# --- what must hold ------------------------------------------------------------------------------------------------------


def stock(wanted):
    """Return what LangGraph makes of each (shape, inputs), by itself in a fresh process."""
    program = Path(__file__).with_name("stock.py")
    done = subprocess.run([sys.executable, program], input=pickle.dumps(wanted), capture_output=True, check=False)
    assert done.returncode == 0, done.stderr.decode()
    return pickle.loads(done.stdout)


def check(trial, outcome):
    """Hold a run against what LangGraph made of its final inputs."""
    state, sent, answers = outcome
    what = trial.name, trial.seed, trial.policy
    assert plain(trial.result.state) == state, what
    assert trial.outbox.sent == [], ("nothing leaves by itself", what)
    effects = trial.result.effects
    published = [next(iter(payload.values())) for slots in effects.values() for payload in slots.values()]
    assert sorted(published) == sorted(sent), what
    assert trial.run.audit() == [], what
    assert trial.result.late_invalid == 0, what
    _check_counts(trial, Counter(answers), what)


def _check_counts(trial, final, what):
    """Say which node calls how often: what LangGraph asks on the final inputs, and no more than the plan has affected."""
    asked = trial.ask.asked
    assert not final - Counter(answer for *_, answer in asked), ("what counts was asked", what)
    if len(trial.planned) != 1 or trial.policy == "wait":
        return
    planned = trial.planned[0]
    before = [each for each in asked if each[0] in planned.started]
    after = [each for each in asked if each[0] not in planned.started]
    if trial.policy == "revise_plus":
        if trial.name not in COARSE | LATE:
            left = final - Counter(answer for *_, answer in before)
            assert Counter(answer for *_, answer in after) == left, ("nothing is asked twice", what)
        return
    affected = {"revise": planned.descendants, "suffix": planned.suffix, "restart": planned.active}[trial.policy]
    started = {task for _, task, _ in before}
    count = Counter(task for _, task, _ in after)
    last = {run.name for run in trial.run.machine.runs.values()} & {task for _, task, _ in asked}
    expected = {task for task in last if task in affected or task not in started}
    if trial.name not in LATE | {"retries"}:
        assert count == Counter(expected), what
    else:
        assert expected <= count.keys(), what
