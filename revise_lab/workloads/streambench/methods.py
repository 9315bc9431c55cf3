"""The methods: what happens to memory and world when the user revises the task, and the loop that runs an agent.

============ ================================================================================================
method       at an injection
============ ================================================================================================
foresight    knows the revised text from the start (published as Oracle)
absorber     back to before the earliest hard act that the new text contradicts; the acts after it are undone
full_restart everything undone and forgotten
naive        the text is appended, nothing else
ignore       the text is dropped
checkpoint_k back to the last multiple of k acts, whatever they say; the acts after it are undone
interrupt    stop, ask, resume the superstep: the last act is made again, and nothing is undone
revise       acts derived from a changed clause, and those derived from them, again (arXiv:2609.00643)
revise_plus  acts that quote a changed clause again; what their results change follows; hard effects wait
============ ================================================================================================

Assumptions where the paper is silent: a superstep is one act; ``k`` is 5; `revise` undoes an effect only where the act made
again wants another one (or is not wanted any more), right before that one. A budget of acts ends a run that does not
converge.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from revise_lab.records.effect import Reversibility
from revise_lab.runtime.reply import CHARS_PER_TOKEN

from . import judges
from .agent import Agent, Call, PlannedAgent, fill_in, plan
from .scenarios import FIRST_OUTWARD, NUMBERS, Scenario
from .stream import (
    Channel,
    Decision,
    Epistemic,
    Event,
    Injection,
    Kind,
    RevisionType,
    Turn,
    best_rollback,
    compatible,
    earliest_conflict,
    reversibility_ratio,
    stale_turns,
)
from .world import World, complaint

PUBLISHED: Final = ("foresight", "absorber", "full_restart", "naive", "ignore", "checkpoint_k", "interrupt")
METHODS: Final = (*PUBLISHED, "revise", "revise_plus")
_SELECTIVE: Final = ("revise", "revise_plus")
CHECKPOINT_ACTS: Final = 5
BUDGET_ACTS: Final = 60


@dataclass
class Run:
    """One run of an agent on a task that is revised once, with what it cost and how it ended.

    ``n_wasted`` counts acts before the injection that were given up, ``n_undone`` the calls that undid an effect
    (compensations and inversions), ``n_stale_kept`` the inert and reversible acts before the injection that are still
    relied upon at the end although what they were derived from has changed, ``n_residue`` effects that no call can undo and
    that a method wanted undone. Tokens of the deterministic agent are estimated at four characters each.
    """

    scenario: Scenario
    method: str
    revision: RevisionType
    world: World
    state: Epistemic
    channel: Channel = field(default_factory=Channel)
    decision: Decision | None = None
    at: int | None = None
    before: tuple[Turn, ...] = ()
    n_acts: int = 0
    n_wasted: int = 0
    n_undone: int = 0
    n_compensated: int = 0
    n_residue: int = 0
    n_tokens: int = 0
    n_malformed: int = 0
    converged: bool = True
    outcome: str = ""
    broken: list[str] = field(default_factory=list)

    @property
    def trace(self) -> list[Event]:
        """All events, in order."""
        return self.channel.events

    @property
    def revised(self) -> dict[str, Any]:
        """The clauses after the revision, whether or not the method looked at it."""
        return {**self.scenario.clauses, **self.scenario.injections[self.revision].changes}

    @property
    def stale_kept(self) -> list[Turn]:
        """The inert and reversible acts from before the injection that are kept although they are stale."""
        return [turn for turn in stale_turns(self.state.turns, self.revised) if turn.early and not turn.hard]

    @property
    def quality(self) -> float:
        """Quality by the deterministic judge, 1 to 5."""
        return judges.quality(self.scenario.name, self.revision, len(self.broken))

    def theorem_3(self) -> bool | None:
        """Whether the earliest-conflict rule is where trying every rollback point leads; None without a revision."""
        if self.at is None:
            return None
        k = earliest_conflict(self.before, lambda turn: compatible(turn, self.revised))
        return k == best_rollback(self.before, self.revised)


class Runner:
    """Runs one agent on one task; see :func:`run`."""

    def __init__(self, run: Run, rho: float, agent: Agent, k: int, at: int) -> None:
        scenario = run.scenario
        self.run, self.scenario, self.method = run, scenario, run.method
        self.agent, self.k, self.at = agent, k, at
        self.classes = scenario.classes(rho)
        self.steps = {step.name: step for step in scenario.steps}
        self.injection = scenario.injections[run.revision]
        self.channel = run.channel = Channel(self._user)
        if run.method == "foresight":
            run.state = Epistemic({**run.state.spec, **self.injection.changes}, [], self.injection, 0)
        self.replaced: dict[str, Turn] = {}
        self.n_chars = len(scenario.task) + len(str(run.state.spec))

    def _user(self, event: Event) -> None:
        """Inject after the chosen act, as a user does who watches the stream."""
        if event.kind is Kind.ACT and self.run.n_acts == self.at and self.run.at is None:
            self.channel.inject(self.injection)

    def loop(self, budget: int) -> Run:
        """Run the agent to its end, or to the end of the budget of acts."""
        run = self.run
        while True:
            call = self._ask()
            self.channel.publish(Kind.THOUGHT, call.tool, call.thought)
            if self._look():
                continue
            if not call.tool:
                break
            self._act(call)
            if run.n_acts + run.n_malformed >= budget:
                run.converged = False
                break
        for turn in reversed(list(self.replaced.values())):
            self._undo(turn)
        run.world.release()
        declared = [
            (turn.step, turn.args) for turn in run.state.by_step().values() if turn.cls is not Reversibility.INERT
        ]
        run.outcome = call.thought if run.converged else "The budget of acts is spent."
        run.broken = judges.broken(self.scenario.name, run.revision, run.world, declared)
        return run

    def _ask(self) -> Call:
        call = self.agent.next(self.run.state)
        if call.n_prompt_tokens is None:
            n_chars = self.n_chars + sum(turn.n_chars for turn in self.run.state.turns) + len(call.thought)
            self.run.n_tokens += n_chars // CHARS_PER_TOKEN
        else:
            self.run.n_tokens += call.n_prompt_tokens + (call.n_output_tokens or 0)
        return call

    def _act(self, call: Call) -> None:
        run, step = self.run, self.steps.get(call.tool)
        wrong = complaint(step.args, call.args, NUMBERS) if step else f"there is no tool {call.tool!r}"
        if wrong or step is None:
            run.n_malformed += 1
            self.channel.publish(Kind.OBSERVATION, call.tool, {"error": wrong})
            self.agent.answered(call, wrong)
            self._look()
            return
        done = run.state.by_step()
        _, reads = fill_in(step, run.state.spec, lambda name: done[name].result if name in done else None)
        clauses: dict[str, Any] = {}
        for read in reads:
            clauses |= {read.field: read.value} if not read.source else getattr(done.get(read.source), "clauses", {})
        cls = self.classes[step.name]
        old = self.replaced.pop(step.name, None)
        entry: int | None
        if old is not None and old.entry is not None and old.args == call.args:
            result, entry = dict(old.result), old.entry  # the effect that is wanted is there already
        elif old is not None and old.entry is not None and not self._undo(old):
            result, entry = dict(old.result), old.entry  # it cannot be undone: doing it again would do it twice
        else:
            staged = self.method == "revise_plus" and cls in (Reversibility.COMPENSABLE, Reversibility.IRREVERSIBLE)
            result, entry = run.world.call(step.name, step.verb, cls, call.args, staged=staged)
        run.n_acts += 1
        n_chars = len(str(call.args)) + len(str(result))
        turn = Turn(step.name, cls, call.args, result, reads, clauses, entry, run.at is None, n_chars)
        run.state.turns = [each for each in run.state.turns if each.step != step.name] + [turn]
        self.channel.publish(Kind.ACT, step.name, call.args)
        self._look()
        self.channel.publish(Kind.OBSERVATION, step.name, result)
        self._look()
        if self.method == "revise_plus" and run.at is not None:
            self._spread(turn)

    def _look(self) -> bool:
        """Look for an injection and absorb it; say whether there was one."""
        injection = self.channel.take()
        if injection is None:
            return False
        run = self.run
        run.at, run.before = run.n_acts, tuple(run.state.turns)
        decision = run.decision = self.decide(injection)
        if self.method in ("foresight", "ignore"):
            return True
        run.n_wasted += len(run.before) - len(decision.kept)
        kept = [run.before[at] for at in decision.kept]
        if self.method in _SELECTIVE:
            self.replaced = {turn.step: turn for turn in run.before if turn not in kept and turn not in decision.undo}
        for turn in decision.undo:
            self._undo(turn)
        run.state = Epistemic(dict(decision.spec), kept, injection, len(kept))
        self.n_chars += len(injection.text)
        return True

    def decide(self, injection: Injection) -> Decision:
        """Return the decision triple of the method."""
        turns, old = self.run.state.turns, self.run.state.spec
        spec, n = {**old, **injection.changes}, len(turns)
        if self.method in ("foresight", "ignore"):
            return Decision.cut(turns, n, old)
        if self.method in _SELECTIVE:
            return self._selective(turns, spec, set(injection.changes))
        if self.method == "interrupt":
            return Decision(tuple(range(max(0, n - 1))), (), spec)
        k = {"naive": n, "full_restart": 0, "checkpoint_k": n - n % self.k}.get(self.method)
        if k is None:
            k = earliest_conflict(turns, lambda turn: self._compatible(turn, spec))
        return Decision.cut(turns, k, spec)

    def _compatible(self, turn: Turn, spec: Mapping[str, Any]) -> bool:
        self.run.n_tokens += (self.n_chars + turn.n_chars) // CHARS_PER_TOKEN
        return self.agent.compatible(turn, spec)

    def _selective(self, turns: Sequence[Turn], spec: Mapping[str, Any], changed: set[str]) -> Decision:
        affected: set[str] = set()
        wanted = {step.name for step in plan(self.scenario, spec)}
        for turn in turns:
            direct = any(not read.source and spec[read.field] != read.value for read in turn.reads)
            # a step that falls away changes its result to nothing, which its readers see at once
            spreads = affected if self.method == "revise" else affected - wanted
            if direct or any(read.source in spreads for read in turn.reads):
                affected.add(turn.step)
        undo = [turn for turn in reversed(turns) if turn.step in affected - wanted and turn.entry is not None]
        return Decision(tuple(at for at, t in enumerate(turns) if t.step not in affected), tuple(undo), spec)

    def _spread(self, turn: Turn) -> None:
        """Make what read another result than this one give way; what read the same settles again."""
        for other in list(self.run.state.turns):
            read = [r for r in other.reads if r.source == turn.step]
            if any(turn.result.get(r.field) != r.value for r in read):
                self.run.state.turns.remove(other)
                self.replaced[other.step] = other
                self.run.n_wasted += other.early

    def _undo(self, turn: Turn) -> bool:
        if turn.entry is None or turn.entry not in self.run.world.entries:
            return True
        staged = self.run.world.entries[turn.entry].state == "staged"
        if not self.run.world.undo(turn.entry):
            self.run.n_residue += 1
            return False
        self.run.n_undone += not staged
        self.run.n_compensated += not staged and turn.hard
        return True


def run(
    scenario: Scenario,
    rho: float,
    revision: RevisionType,
    method: str,
    *,
    seed: int = 0,
    at: int = FIRST_OUTWARD,
    attention: float = 0.0,
    k: int = CHECKPOINT_ACTS,
    budget: int = BUDGET_ACTS,
    agent: Agent | None = None,
) -> Run:
    """Run one agent on one task that is revised once.

    Parameters
    ----------
    scenario : Scenario
        The task.
    rho : float
        Nominal reversibility ratio, see :mod:`.scenarios`.
    revision : RevisionType
        Which of its revisions is injected.
    method : str
        One of `METHODS`.
    seed : int
        Seed of the world, and of what an attentive agent notices.
    at : int
        The act right after which the injection comes; published: the first hard act, the ninth.
    attention : float
        See :class:`.agent.PlannedAgent`.
    k : int
        Acts between two checkpoints.
    budget : int
        Acts after which a run ends without having converged.
    agent : Agent, optional
        By default the deterministic one.
    """
    agent = agent or PlannedAgent(scenario, attention, seed)
    begun = Run(scenario, method, revision, World(seed), Epistemic(dict(scenario.clauses)))
    return Runner(begun, rho, agent, k, at).loop(budget)


def exact_ratio(scenario: Scenario, rho: float) -> float:
    """Return the reversibility ratio over all tools of the unrevised task (Definition 4)."""
    classes = scenario.classes(rho)
    return reversibility_ratio([classes[step.name] for step in scenario.base_steps])
