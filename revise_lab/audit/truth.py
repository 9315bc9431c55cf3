"""What a scenario comes to by itself: its steps evaluated once, in order, on plain data.

Runs are compared with this. It shares no code with the machine: revisions are applied, branches taken, members counted and
values looked up here, in the plainest way.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cache
from json import dumps
from typing import Any

from revise_lab.errors import ReviseLabError
from revise_lab.records.value import freeze
from revise_lab.records.workflow import LANE

from .plain import patched
from .scenario import FAILED, Scenario, Step, parse_read


def look(state: Any, text: str, key: str | None = None) -> Any:
    """Make one read of a scenario on a view or on plain data."""
    artifact, path, what = parse_read(text)
    value = state
    for step in (artifact, *path):
        if isinstance(value, Mapping):
            value = value.get(key if step == "*" else step)
        elif isinstance(value, list | tuple) and isinstance(step, int):
            try:
                value = value[step]
            except IndexError:
                return None
        else:
            return None
    if not what:
        return freeze(value)
    kind = "object" if isinstance(value, Mapping) else "array" if isinstance(value, list | tuple) else "leaf"
    if what == "kind" or kind == "leaf":
        return kind
    if what == "write":
        try:
            value["written"] = True
        except (TypeError, ReviseLabError):
            return "refused"
        return "written"
    if what.startswith("has:"):
        return what[4:] in value
    return len(value) if what == "len" or kind == "array" else freeze(list(value))


def receipt_of(payload: Any) -> Any:
    """Return what a target answers when it has written a payload."""
    return f"ok {payload}"


def fresh_run(
    scenario: Scenario, inputs: Mapping[str, Any], pins: Mapping[str, Any], effects: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Return what the scenario comes to on given inputs, by evaluating its steps in order and nothing else.

    What the steps stage goes into ``effects``, as ``node/slot`` to payload.
    """
    state: dict[str, Any] = dict(inputs)
    outputs: dict[str, Any] = {}
    staged: dict[str, Any] = {} if effects is None else effects
    down: set[str] = set()
    for step in scenario.steps:
        above = [each.partition("/")[0] for each in step.after]
        above += (each[0] for each in (step.when, step.member_of) if each)
        absent = [name not in state and name not in down for name in above]
        if absent and (any if step.needs == "all" else all)(absent):
            continue
        if step.when and step.when[0] not in down and step.when[1] not in state.get(step.when[0], {}).get(LANE, {}):
            continue
        if down.intersection(above):
            down.add(step.name)
            continue
        keys: Iterable[str | None] = (None,)
        if step.member_of:
            keys = state.get(step.member_of[0], {}).get(step.member_of[1], ())
            state[step.name] = {}
        for key in keys:
            name = step.name if key is None else f"{step.name}[{key}]"
            output = outputs[name] = _fresh_output(scenario, step, state, key, pins.get(name, ()), staged)
            if output == FAILED:
                down.add(step.name)
            elif key is None:
                state[name] = output
            else:
                state[step.name][key] = output
    return outputs


def _fresh_output(
    scenario: Scenario, step: Step, state: Any, key: str | None, pins: Iterable[Any], staged: dict[str, Any]
) -> Any:
    seen: list[Any] = []
    while (text := step.next_read(seen)) is not None:
        seen.append(look(state, text, key))
    try:
        output = freeze(step.out(*seen))
        if step.branch:
            lane = step.branch[1](output, *(look(state, text) for text in step.branch[0]))
            output = freeze({**output, LANE: {} if lane is None else {lane: True}})
        for spawner, items in filter(None, {each.member_of for each in scenario.steps}):
            if spawner == step.name:
                output = freeze({**output, items: _keyed(output[items])})
        for path, value in pins:
            output = freeze(patched(output, "set", path, value))
        effects = step.effects(*seen) if step.effects else ()
    except Exception:
        return FAILED
    for slot, payload, *_ in effects:
        name = f"{step.name if key is None else f'{step.name}[{key}]'}/{slot}"
        staged[name], state[name] = freeze(payload), receipt_of(payload)
    return output


def _keyed(entries: Any) -> Any:
    if isinstance(entries, Mapping):
        return entries
    texts = [entry if isinstance(entry, str) else f"={dumps(entry)}" for entry in entries]
    twins = [texts[:i].count(text) for i, text in enumerate(texts)]
    return {f"{text}#{n}" if n else text: entry for text, n, entry in zip(texts, twins, entries, strict=True)}


@cache
def current_truth(
    scenario: Scenario, accepted: tuple[str, ...]
) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """Return the inputs after some revisions, patched here and now, and what a fresh run makes of them: outputs, effects."""
    inputs = {name: freeze(value) for name, value in scenario.inputs.items()}
    pins: dict[str, dict[Any, Any]] = {}
    known = {each.id: each for group in scenario.arrivals().values() for each in group}
    for change in (change for name in accepted for change in known[name].changes):
        pinned = pins.setdefault(change.artifact, {})
        if change.op in ("override", "withdraw"):
            pinned.pop(change.path, None)
            if change.op == "override":
                pinned[change.path] = freeze(change.value)
        else:
            inputs[change.artifact] = freeze(patched(inputs[change.artifact], change.op, change.path, change.value))
    effects: dict[str, Any] = {}
    pinned = {name: tuple(pinned.items()) for name, pinned in pins.items()}
    return inputs, fresh_run(scenario, inputs, pinned, effects), effects
