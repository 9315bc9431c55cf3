"""Running a node's body on a snapshot: what it may see, what it may ask, and the event that it ends with.

Drivers differ only in how a boundary call is answered (:data:`Perform`); everything else about an attempt is here, so
that live runs, simulations and the oracle run the same code.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Iterable, Mapping
from contextlib import suppress
from functools import lru_cache
from inspect import isawaitable, signature
from typing import Any, NamedTuple

from revise_lab.errors import WorkflowError
from revise_lab.records.attempt import Call, Coverage
from revise_lab.records.effect import Effect, Reversibility
from revise_lab.records.event import Execute, Fail, Finish, Observe, Reconsidered
from revise_lab.records.selector import Marker, Path, Read, Selector
from revise_lab.records.value import ABSENT, Obj, Value, canonical_text, freeze, thaw
from revise_lab.records.workflow import LANE, Body, Graph, Node, lanes, with_keys

from .tracking import Group, Recorder, StateView, thawed


class Ask(NamedTuple):
    """A boundary call that a body makes: who, of what kind, with what request, the how-manieth of its like."""

    node: str
    attempt: str
    code_version: str
    kind: str
    request: Value
    occurrence: int
    local: Callable[[], Any] | None = None
    """What answers a tool call in this process, where something does."""

    @property
    def key(self) -> tuple[Any, ...]:
        """The argument of the choice function w."""
        return (self.node, self.code_version, self.kind, self.request, self.occurrence)


Perform = Callable[[Ask], Awaitable[Value]]


class Reply:
    """What a model answered."""

    __slots__ = ("text",)

    def __init__(self, text: str) -> None:
        self.text = text

    @property
    def json(self) -> Any:
        """The text as JSON.

        Raises
        ------
        WorkflowError
            The text is not JSON.
        """
        try:
            return json.loads(self.text)
        except json.JSONDecodeError as error:
            raise WorkflowError(f"the model's reply is not JSON ({error}): {self.text[:80]!r}") from None


class Context:
    """What a body may ask of the world: every call through it is a boundary call.

    Parameters
    ----------
    node : Node
        The declaration.
    name, attempt : str
        The node of the run (with its member key) and the attempt.
    perform : callable
        Answers a boundary call.
    item : Any
        For a member: the view of its own entry.
    key : str, optional
        For a member: its key.
    """

    def __init__(
        self, node: Node, name: str, attempt: str, perform: Perform, item: Any = None, key: str | None = None
    ) -> None:
        self._node = node
        self._name = name
        self._attempt = attempt
        self._perform = perform
        self._seen: dict[tuple[str, str], int] = {}
        self.item = item
        self.key = key
        self.calls: list[Call] = []
        self.effects: list[Effect] = []

    async def model(self, prompt: str, *, max_tokens: int = 64, seed: int = 0, **options: Any) -> Reply:
        """Ask the run's model.

        Parameters
        ----------
        prompt : str
            The whole prompt.
        max_tokens, seed : int
            Passed to the endpoint.
        **options : Any
            ``json_schema``, ``stop``, ``temperature`` and what else the endpoint takes, JSON-like.
        """
        request = {"prompt": prompt, "max_tokens": max_tokens, "seed": seed, **options}
        answer = await self._ask("model", request)
        return Reply(answer)

    async def tool(self, name: str, run: Callable[..., Any] | None = None, /, **arguments: Any) -> Any:
        """Call a tool that reads the world; ``run(**arguments)`` answers it where the driver has no other way."""
        plain = thaw(freeze(arguments))
        local = None if run is None else (lambda: run(**plain))
        return thaw(await self._ask("tool", {"tool": name, "arguments": arguments}, local))

    async def clock(self) -> float:
        """Return the time in seconds; what was read is remembered like any other answer."""
        return float(await self._ask("clock", {}))

    async def random(self) -> float:
        """Return a random number in [0, 1)."""
        return float(await self._ask("random", {}))

    async def pause(self, seconds: float) -> None:
        """Wait; in virtual time nobody does."""
        await self._perform(Ask(self._name, self._attempt, "", "pause", seconds, 0))

    def stage(self, effect: Effect) -> None:
        """Hold back an action on the world until the run may release it.

        Raises
        ------
        WorkflowError
            The attempt has staged another effect in this slot.
        """
        kind = Reversibility(effect.reversibility)
        if type(effect.slot) is not str or not isinstance(effect.premises, Mapping):
            found = f"slot {effect.slot!r} with premises {effect.premises!r}"
            raise WorkflowError(f"node {self._name!r} stages {found} - a slot is a text, and premises are a mapping")
        if any(each.slot == effect.slot for each in self.effects):
            raise WorkflowError(
                f"node {self._name!r} stages two effects in slot {effect.slot!r} - name the slots apart"
            )
        if kind is not Reversibility.INERT:
            payload, premises = freeze(effect.payload), freeze(effect.premises)
            self.effects.append(effect._replace(payload=payload, premises=premises, reversibility=kind))

    async def _ask(self, kind: str, request: Mapping[str, Any], local: Callable[[], Any] | None = None) -> Value:
        asked = freeze(request)
        mark = (kind, canonical_text(asked))
        self._seen[mark] = occurrence = self._seen.get(mark, -1) + 1
        ask = Ask(self._name, self._attempt, self._node.code_version, kind, asked, occurrence, local)
        answer = freeze(await self._perform(ask))
        self.calls.append(Call(self._name, self._node.code_version, kind, asked, occurrence, answer))
        return answer


Loss = Callable[[str, Selector], Coverage]
"""What becomes of a read of (node, selector) in a study of incomplete provenance."""


class Execution:
    """One attempt while its body runs.

    Parameters
    ----------
    graph : Graph
        The workflow.
    order : Execute
        The machine's instruction, with the snapshot.
    perform : callable
        Answers boundary calls.
    loss : callable, optional
        Degrades the record of a read of an input: ``coarse`` keeps only its artifact, ``unknown`` nothing. What the
        body sees is unchanged.
    before_read : callable, optional
        Told of each new read, with this execution and the artifact, before it is made; it may move the snapshot.
    """

    def __init__(
        self,
        graph: Graph,
        order: Execute,
        perform: Perform,
        loss: Loss | None = None,
        before_read: Callable[[Execution, str], None] | None = None,
    ) -> None:
        self.order = order
        self.node = graph.nodes[order.node.partition("[")[0]]
        self.recorder = Recorder()
        if before_read is not None and not self.node.is_sync:
            self.recorder.on_read = lambda selector, _: before_read(self, selector.artifact)
        self._loss = loss
        self._sent = 0
        self._coverage = Coverage.COMPLETE
        self.state = _state(graph, self.node, order, self.recorder, lambda name: self.order.value(name))
        item = None
        if self.node.membership and order.key is not None:
            item = _walk(self.state[self.node.membership.spawner], (*self.node.membership.path, order.key))
        self.context = Context(self.node, order.node, order.attempt, perform, item, order.key)
        self._spawns = tuple(
            each.membership.path
            for each in graph.nodes.values()
            if each.membership and each.membership.spawner == self.node.name
        )

    def move(self, snapshot: Execute) -> None:
        """Go on, on a newer snapshot: views look again at what they have not yet read."""
        self.order = snapshot
        self.recorder.epoch += 1

    def flush(self) -> Observe | None:
        """Return the reads made since the last report, or ``None``."""
        reads, coverage = self._new_reads()
        return Observe(self.order.attempt, reads, coverage) if reads else None

    async def run(self) -> Finish | Fail:
        """Run the body to its end and return the event; an exception is an outcome too.

        Cancellation passes through.
        """
        try:
            output = await self._body()
        except Exception as error:
            return self.failed(error)
        reads, coverage = self._new_reads()
        return Finish(
            self.order.attempt, output, reads, coverage, tuple(self.context.calls), tuple(self.context.effects)
        )

    def failed(self, error: BaseException) -> Fail:
        """Return the event of a body that ended with an exception; an error may say that trying again is vain."""
        reads, coverage = self._new_reads()
        text, retryable = type(error).__name__, True
        with suppress(Exception):  # an error may have no text either
            text, retryable = f"{text}: {error}", bool(getattr(error, "retryable", True))
        return Fail(self.order.attempt, text, retryable, reads, coverage, tuple(self.context.calls))

    async def _body(self) -> Value:
        result: Any = {}
        if self.node.body is not None:
            result = _call(self.node.body, self.state, self.context)
            if isawaitable(result):
                if self.node.is_sync:
                    raise WorkflowError(
                        f"the body of node {self.node.name!r} is a plain function, which runs in a thread, and returned"
                        " something to await - declare it with async def"
                    )
                result = await result
        return self.complete(result)

    def complete(self, result: Any) -> Value:
        """Freeze what a body returned and add what its branch decides and its members' keys."""
        output = freeze({} if result is None else result)
        if self.node.branch is not None:
            if type(output) is not Obj:
                raise WorkflowError(
                    f"node {self.node.name!r} has a branch, so it must return a mapping, not {output!r}"
                )
            if LANE in output:  # made again (R7), the decision could not be told from what the body meant by it
                raise WorkflowError(
                    f"node {self.node.name!r} has a branch, whose decision goes under {LANE!r} - return another key"
                )
            with self.recorder.control():
                decision = _call(self.node.branch, self.state, thaw(output))
            output = freeze({**output, LANE: lanes(decision)})
        for path in self._spawns:
            output = with_keys(output, path)
        return output

    def reconsidered(self, output: Value) -> Reconsidered:
        """Make the decision of a node again, on what its body returned once and the snapshot of now (rule R7).

        A decision that cannot be made comes out as absent, so that its node runs again and shows why.
        """
        result = {key: value for key, value in thaw(output).items() if key != LANE}
        try:
            decided = self.complete(result)
        except Exception:
            decided = ABSENT
        complete = self.recorder.coverage is Coverage.COMPLETE
        reads = tuple(Read(*each) for each in self.recorder.reads.items())
        return Reconsidered(self.order.attempt, decided if complete else ABSENT, reads)

    def _new_reads(self) -> tuple[tuple[Read, ...], Coverage]:
        recorded = list(self.recorder.reads.items())
        fresh, self._sent = recorded[self._sent :], len(recorded)
        if "reads" in self.node.unknown:
            return (), Coverage.UNKNOWN
        if self.recorder.coverage is not Coverage.COMPLETE:
            self._coverage = self.recorder.coverage
        reads = [Read(selector, observed) for selector, observed in fresh]
        if self._loss is not None:
            reads = [kept for read in reads for kept in self._lossy(read, self._loss)]
        return tuple(reads), self._coverage

    def _lossy(self, read: Read, loss: Loss) -> Iterable[Read]:
        selector = read.selector
        if selector.artifact not in self.order.inputs or selector.marker is Marker.KIND:
            return (read,)
        kept = loss(self.order.node, selector)
        if kept is Coverage.COMPLETE:
            return (read,)
        names: Iterable[str] = (selector.artifact,)
        if kept is Coverage.UNKNOWN:
            names = (*self.order.inputs, *self.order.parents)
        if self._coverage is not Coverage.UNKNOWN:
            self._coverage = kept
        role = selector.role
        return [Read(Selector(name, (), Marker.VALUE, role), self.order.value(name)) for name in names]


def _state(graph: Graph, node: Node, order: Execute, recorder: Recorder, fetch: Callable[[str], Value]) -> Any:
    groups: dict[str, Group] = {}
    members: set[str] = set()
    opaque = "reads" in node.unknown
    for parent in graph.ancestors(node.name) if opaque else node.parents:
        membership = graph.nodes[parent].membership
        if membership:
            names = [name for name in order.parents if name.startswith(f"{parent}[")]
            members.update(names)
            keys = tuple(name[len(parent) + 1 : -1] for name in names)
            groups[parent] = Group(membership.spawner, membership.path, tuple(sorted(keys)))
    visible = [name for name in order.parents if name not in members]
    if opaque:
        return thawed(fetch, (*order.inputs, *order.parents), groups)
    hidden = [name for name in graph.nodes if name not in order.parents and name not in groups]
    return StateView(recorder, fetch, inputs=tuple(order.inputs), parents=visible, groups=groups, hidden=hidden)


def _walk(view: Any, path: Path) -> Any:
    for key in path:
        view = view[key]
    return view


def _call(body: Body, *arguments: Any) -> Any:
    return body(*arguments[: _arity(body)])


@lru_cache(maxsize=4096)
def _arity(body: Body) -> int:
    return sum(
        1
        for each in signature(body).parameters.values()
        if each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD)
    )
