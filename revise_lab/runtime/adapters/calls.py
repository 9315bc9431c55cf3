"""What a node does to the world while it runs: model calls, counted by attempt, and actions, held back.

The current attempt lies in a context variable. Chat models of LangChain report through its own callback hook; the raw
OpenAI client is watched at the method that every call goes through, and a stream that an attempt leaves open is closed when
the attempt ends. Outside an attempt both do what they always did.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache, wraps
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from typing import Any, NamedTuple, Protocol

from revise_lab.records.effect import Effect, Reversibility
from revise_lab.records.value import freeze

from .images import image


class Doing(Protocol):
    """What this module needs of an attempt."""

    @property
    def headers(self) -> dict[str, str]:
        """What tells an endpoint which attempt asks."""

    def count_call(self) -> None:
        """Take note of a model call."""

    def stage(self, effect: Effect) -> None:
        """Hold back an effect."""

    def own(self, stream: Any) -> None:
        """Close a stream when the attempt ends."""


ATTEMPT: ContextVar[Doing | None] = ContextVar("attempt", default=None)
"""The attempt whose body runs here."""
_COUNTER: ContextVar[Any] = ContextVar("call_counter", default=None)


class Outgoing(NamedTuple):
    """An action on the world that nodes take by calling a function, and that the run is to hold back.

    Attributes
    ----------
    owner, name : Any, str
        The object and its attribute that nodes call: a client and its method, a module and its function.
    target : str
        The target that writes it once it may leave.
    reversibility : str
        ``R``, ``K`` or ``X``.
    answer : Any
        What the call returns inside a node; the action itself has not happened then.
    """

    owner: Any
    name: str
    target: str
    reversibility: str = "K"
    answer: Any = None


@contextmanager
def watching(effects: Mapping[str, Outgoing]) -> Iterator[None]:
    """Hold actions back and count calls while a run is in flight."""
    _watch_models()
    _watch_clients()
    undo = [_divert(slot, each) for slot, each in effects.items()]
    try:
        yield
    finally:
        for restore in reversed(undo):
            restore()


def _divert(slot: str, outgoing: Outgoing) -> Callable[[], None]:
    owner, name = outgoing.owner, outgoing.name
    own = name in vars(owner) if hasattr(owner, "__dict__") else True
    original = getattr(owner, name)

    def hold(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        attempt = ATTEMPT.get()
        if attempt is None:
            return False
        bound = inspect.signature(original).bind(*args, **kwargs)
        kind = Reversibility(outgoing.reversibility)
        payload = freeze({key: image(value) for key, value in bound.arguments.items()})
        attempt.stage(Effect(slot, payload, kind, outgoing.target))
        return True

    if inspect.iscoroutinefunction(original):

        @wraps(original)
        async def diverted(*args: Any, **kwargs: Any) -> Any:
            return outgoing.answer if hold(args, kwargs) else await original(*args, **kwargs)
    else:

        @wraps(original)
        def diverted(*args: Any, **kwargs: Any) -> Any:
            return outgoing.answer if hold(args, kwargs) else original(*args, **kwargs)

    setattr(owner, name, diverted)

    def restore() -> None:
        if own:
            setattr(owner, name, original)
        else:
            delattr(owner, name)

    return restore


class Inside:
    """Makes an attempt, or none, the current one in this context, as a ``with`` block; a generator would cost a microsecond.

    Parameters
    ----------
    attempt : Doing or None
        The attempt.
    """

    __slots__ = ("_attempt", "_tokens")

    def __init__(self, attempt: Doing | None) -> None:
        self._attempt = attempt

    def __enter__(self) -> None:
        attempt = self._attempt
        counter = None if attempt is None else _counter_class()(attempt)
        self._tokens = ATTEMPT.set(attempt), _COUNTER.set(counter)

    def __exit__(self, *exc: object) -> None:
        ATTEMPT.reset(self._tokens[0])
        _COUNTER.reset(self._tokens[1])


@cache
def _counter_class() -> Any:
    from langchain_core.callbacks import BaseCallbackHandler

    class Counter(BaseCallbackHandler):
        """Reports each model call of an attempt."""

        run_inline = True

        def __init__(self, attempt: Doing) -> None:
            self.attempt = attempt

        def on_chat_model_start(self, serialized: Any, *args: Any, **kwargs: Any) -> None:
            if "openai" not in str(serialized).lower():  # the client below it counts itself
                self.attempt.count_call()

        on_llm_start = on_chat_model_start

    return Counter


@cache
def _watch_models() -> None:
    """Install the hook, once in a process; it does nothing outside an attempt."""
    from langchain_core.tracers.context import register_configure_hook

    register_configure_hook(_COUNTER, inheritable=True)


_CLIENTS = "openai.resources.chat"


@cache
def _watch_clients() -> None:
    """Watch the raw client, now or as soon as somebody imports it; importing it here would cost all others a second."""
    if _CLIENTS in sys.modules:
        _watch_loaded()
    else:
        sys.meta_path.insert(0, _AtImport())


def _watch_loaded() -> None:
    from openai.resources.chat import completions

    for kind in (completions.Completions, completions.AsyncCompletions):
        _watch_client(kind)


class _AtImport(MetaPathFinder):
    """Lets the client be found as it always is, and watches it once it has been loaded."""

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> ModuleSpec | None:
        if fullname != _CLIENTS:
            return None
        sys.meta_path.remove(self)
        spec = find_spec(fullname)
        loader: Any = None if spec is None else spec.loader
        if loader is not None:
            load = loader.exec_module

            def load_and_watch(module: Any) -> None:
                load(module)
                _watch_loaded()

            loader.exec_module = load_and_watch
        return spec


def _watch_client(kind: Any) -> None:
    original = kind.create

    if inspect.iscoroutinefunction(original):

        @wraps(original)
        async def create(self: Any, *args: Any, **kwargs: Any) -> Any:
            attempt = ATTEMPT.get()
            if attempt is None:
                return await original(self, *args, **kwargs)
            attempt.count_call()
            kwargs["extra_headers"] = {**(kwargs.get("extra_headers") or {}), **attempt.headers}
            answer = await original(self, *args, **kwargs)
            if kwargs.get("stream"):
                attempt.own(answer)
            return answer
    else:

        @wraps(original)
        def create(self: Any, *args: Any, **kwargs: Any) -> Any:
            attempt = ATTEMPT.get()
            if attempt is not None:
                attempt.count_call()
                kwargs["extra_headers"] = {**(kwargs.get("extra_headers") or {}), **attempt.headers}
            answer = original(self, *args, **kwargs)
            if attempt is not None and kwargs.get("stream"):
                attempt.own(answer)
            return answer

    kind.create = create
