"""Revise an unmodified LangGraph application while it runs.

The compiled graph is driven in passes. Each pass is LangGraph itself, from START, over a copy of the graph in which a node
returns only what the machine has settled for it: attempts that are still valid are handed back or waited for, the others
run again. A revision breaks the pass off and a new one begins, so reducers, edges, commands and sends are always applied by
LangGraph to what is true now. An adapter that translated the graph into a workflow of ours would have to imitate all that,
and could not know the tasks of a loop or a send beforehand; here the machine is told of each task when it is scheduled and
learns who its parents are from its reads (:mod:`.growing`).

Needs the extra ``langgraph``.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypedDict
from uuid import uuid4

from revise_lab.core.plan import Policy
from revise_lab.errors import ConfigError, RefusedCombination, ReviseLabError
from revise_lab.policies import policy as policy_named
from revise_lab.records.workflow import Graph
from revise_lab.runtime.audit_reads import HiddenRead
from revise_lab.runtime.dispatch import Authorise
from revise_lab.runtime.session import Session
from revise_lab.runtime.target import Target

from .calls import Outgoing
from .graph_run import GraphResult, GraphRun
from .growing import Growing
from .images import fields_of, image
from .reads_audit import audit_reads

__all__ = ["GraphResult", "GraphRun", "Outgoing", "RevisableGraph", "probe"]


class RevisableGraph:
    """A compiled graph, to be run so that it can be revised.

    Parameters
    ----------
    compiled : CompiledStateGraph
        The user's graph; it is not touched.
    policy : str or Policy
        How to recover: ``revise_plus``, ``revise``, ``suffix``, ``restart``, ``wait``.
    effects : mapping of str to Outgoing
        Actions on the world that nodes take by calling a function, by the name of the slot.
    targets : mapping of str to Target
        Where effects are written.
    authorise : callable, optional
        See :class:`revise_lab.Session`.
    **switches : str
        Switches of the policy, when it is given by name.

    Raises
    ------
    RefusedCombination
        The graph was compiled to stop before or after a node: a run would be sealed there, half done.
    """

    def __init__(
        self,
        compiled: Any,
        policy: str | Policy = "revise_plus",
        *,
        effects: Mapping[str, Outgoing] = MappingProxyType({}),
        targets: Mapping[str, Target] = MappingProxyType({}),
        authorise: Authorise | None = None,
        **switches: Any,
    ) -> None:
        for option in ("interrupt_before", "interrupt_after"):
            if getattr(compiled, f"{option}_nodes", ()):
                raise RefusedCombination(
                    f"a graph that was compiled with {option} ends there, and its run would be sealed half done - compile it"
                    " without, and call interrupt() in the node where a person is to be asked"
                )
        how = policy_named(policy, **switches) if isinstance(policy, str) else policy
        self.instrumented: Any = None
        """The graph whose tasks are settled by runs; none if LangGraph cannot be taken apart."""
        self.reduced: frozenset[str] = frozenset()
        self.unseen = probe()
        """Why it cannot."""
        if self.unseen:
            warnings.warn(
                f"LangGraph's internals are not as expected ({self.unseen}); every revision restarts the whole graph",
                RuntimeWarning,
                stacklevel=2,
            )
            how = policy_named("restart", release=how.switches.release)
        else:
            from .instrument import instrument, reduced_keys

            self.instrumented, self.reduced = instrument(compiled), reduced_keys(compiled)
        # an attempt of a task is never moved to a newer state: LangGraph has handed it the values that it sees
        how = how._replace(switches=replace(how.switches, extension="off"))
        self.compiled, self.policy = compiled, how
        self.effects, self.targets, self.authorise = dict(effects), targets, authorise

    def start(
        self,
        input: Any,
        config: Mapping[str, Any] | None = None,
        *,
        journal: str | Path | None = None,
        redact: Callable[[Any], Any] | None = None,
        name: str | None = None,
    ) -> GraphRun:
        """Start a run on the running event loop.

        Parameters
        ----------
        input : mapping, model or dataclass
            What would be given to ``ainvoke``. Its keys are the artifacts that a revision may name.
        config : mapping, optional
            As for ``ainvoke``.
        journal : str or Path, optional
            File in which everything that happens is kept before anything happens because of it: what has left, above all.
            A run over a graph cannot be resumed from it, for the values of the framework are not in it.
        redact : callable, optional
            See :class:`revise_lab.runtime.journal.Journal`.
        name : str, optional
            What targets know the run by, the first part of the keys of its effects; by default one that no other run has.

        Raises
        ------
        ConfigError
            The graph has a checkpointer, and the config names no thread for it.
        """
        raw = _as_mapping(input)
        config = dict(config or {})
        has_saver = not isinstance(self.compiled.checkpointer, bool | None)
        if has_saver and "thread_id" not in config.get("configurable", {}):
            raise ConfigError(
                "the graph has a checkpointer, so its run needs a thread -"
                " start(input, {'configurable': {'thread_id': 'some name'}})"
            )
        images = {key: image(value) for key, value in raw.items()}
        name = name or f"{self.compiled.get_name() or 'graph'} {uuid4().hex[:12]}"
        empty = Graph(name, {}, (), {}, {})
        session = Session(
            empty, images, self.policy, endpoint=None, targets=self.targets, authorise=self.authorise,
            journal=journal, redact=redact,
        )  # fmt: skip
        return GraphRun(self, session, Growing(empty, images, session.policy), raw, config)

    async def audit_reads(self, input: Any, config: Mapping[str, Any] | None = None) -> list[HiddenRead]:
        """Run the graph, change what its nodes did not read, and return those whose output moves all the same.

        See :func:`revise_lab.runtime.adapters.reads_audit.audit_reads`.
        """
        return await audit_reads(self, input, config)


def _as_mapping(input: Any) -> dict[str, Any]:
    if isinstance(input, Mapping):
        return dict(input)
    names = fields_of(input)
    if names is None:
        raise ReviseLabError(f"a run starts from a mapping, a model or a dataclass, not from {type(input).__name__}")
    given = getattr(input, "model_fields_set", names)
    return {name: getattr(input, name) for name in names if name in given}


class _Probe(TypedDict):
    x: int


_PROBED: list[str] = []


def probe(again: bool = False) -> str:
    """Say what has changed in LangGraph's internals since this adapter was written; nothing, if it works.

    A graph of two nodes, one conditional edge between them, is taken apart and looked at; nothing runs.
    """
    if again:
        _PROBED.clear()
    if not _PROBED:
        try:
            _PROBED.append(_probe())
        except Exception as error:  # whatever is missing shows as one
            _PROBED.append(f"{type(error).__name__}: {error}")
    return _PROBED[0]


def _probe() -> str:
    from langgraph.graph import END, START, StateGraph

    from .instrument import _Router, instrument

    builder: Any = StateGraph(_Probe)
    builder.add_node("a", lambda state: {"x": state["x"] + 1})
    builder.add_node("b", lambda state: {"x": state["x"] * 2})
    builder.add_edge(START, "a")
    builder.add_conditional_edges("a", lambda state: "b", ["b"])
    builder.add_edge("b", END)
    compiled = builder.compile()
    made: Any = instrument(compiled)
    branches = [each for each in made.nodes["a"].writers if isinstance(_path_of(each), _Router)]
    if len(branches) != 1:
        return "a conditional edge is not attached as a branch"
    if made.nodes["b"].bound is compiled.nodes["b"].bound:
        return "a node cannot be wrapped"
    return ""


def _path_of(writer: Any) -> Any:
    return getattr(getattr(getattr(writer, "func", None), "__self__", None), "path", None)
