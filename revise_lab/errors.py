"""One tree of errors.

Every message names the thing, the place and the remedy; ids and context are attributes, so that a caller can act on
them. All of them survive pickling, because they cross process pools.
"""

from __future__ import annotations

from typing import Any


class ReviseLabError(Exception):
    """Root of every error that revise_lab raises on purpose.

    Parameters
    ----------
    message : str
        What went wrong, with which ids, why it matters and what to do.
    **context : Any
        Structured facts (ids, versions, a journal excerpt). Each becomes an attribute.
    """

    def __init__(self, message: str, **context: Any) -> None:
        super().__init__(message)
        self.message = message
        self.context = context

    def __getattr__(self, name: str) -> Any:
        try:
            return self.__dict__["context"][name]
        except KeyError:
            raise AttributeError(name) from None

    def __reduce__(self) -> tuple[Any, ...]:
        return (_rebuild, (type(self), self.message, self.context))


def _rebuild(kind: type[ReviseLabError], message: str, context: dict[str, Any]) -> ReviseLabError:
    return kind(message, **context)


class ValueNotCanonical(ReviseLabError):
    """A value is not JSON-like, so it can be neither frozen nor compared."""


class WorkflowError(ReviseLabError):
    """A workflow cannot be built: a cycle, a name used twice, an unknown parent."""


class RefusedCombination(ReviseLabError):
    """Two settings of the protocol contradict each other; both are named."""


class PathError(ReviseLabError):
    """A path does not lead where an operation needs it to lead."""


class ReadOnlyState(ReviseLabError):
    """A node tried to write through its view of the state."""


class UntrackableRead(ReviseLabError):
    """A read cannot be seen and the attempt cannot be repeated on raw values."""


class UndeclaredRead(ReviseLabError):
    """A node reached for the output of a node that is not among its parents."""


class RevisionRefused(ReviseLabError):
    """A revision was not accepted; nothing changed."""


class StaleBase(RevisionRefused):
    """The revision names a base version that is no longer current."""


class WorkflowClosed(RevisionRefused):
    """The run is sealed; reopen it to revise it."""


class OverrideConflict(ReviseLabError):
    """An override names a place that a new output no longer has."""


class ReentrantRevision(ReviseLabError):
    """A node body or an effect callback awaited the acceptance of its own revision."""


class IllegalEvent(ReviseLabError):
    """An event that the machine's table does not allow in this state; nothing changed."""


class RunFailed(ReviseLabError):
    """A node exhausted its retries; the run can be revised or resumed."""


class RunBlocked(ReviseLabError):
    """An effect needs a person: it could not be undone, or nobody knows what became of it."""


class RunCancelled(ReviseLabError):
    """The run was cancelled."""


class EndpointError(ReviseLabError):
    """A model endpoint did not give a usable answer."""


class ConfigError(ReviseLabError):
    """A config, a parameter or an argument is wrong; file, line and the nearest name are given."""


class ResultsError(ReviseLabError):
    """A results folder cannot be written, read or trusted."""


class CellFailed(ReviseLabError):
    """A sweep cell raised; the other cells are kept."""


class NotebookFailed(ReviseLabError):
    """A notebook did not run to its end or did not write its deliverables."""
