"""Commit-time revalidation: whether a certificate still holds.

Two checks (arXiv:2609.00643 Eq. 2 and ours). ``delta``: nothing that was read has changed since the start, whatever it
changed to, and every parent is the attempt that was consumed. ``digest``: everything that was read evaluates to what was
observed, so that a revert, a write of the same value and a parent recomputed to an equal output are accepted. With ``none``
nothing is checked beyond what a plan has dropped: for a policy that publishes what may be stale, by its own rule.
"""

from __future__ import annotations

from collections.abc import Mapping

from revise_lab.records.event import Evidence
from revise_lab.records.selector import evaluate, format_path
from revise_lab.records.value import ABSENT, Value, equal

from .table import Attempt


def check(attempt: Attempt, values: Mapping[str, Value], how: str) -> Evidence | None:
    """Return why a certificate does not hold, or ``None`` when it does.

    Parameters
    ----------
    attempt : Attempt
        The attempt, with its reads and their cells in the same order.
    values : mapping
        The current value of every artifact.
    how : str
        ``delta``, ``digest`` or ``none``.

    Notes
    -----
    The loop compares one number a read; only reads whose place changed since the start are compared, with what the place
    shows now.
    """
    if attempt.dropped is not None:
        return attempt.dropped
    if how == "none":
        return None
    start = attempt.v_start
    for at, cell in enumerate(attempt.cells):
        if cell.version > start:
            selector, was = attempt.reads[at]
            if how == "delta" or not equal(cell.look(selector, values), was):
                return Evidence("", format_path(selector.artifact, selector.path), selector)
    if how == "delta":
        for parent, consumed in attempt.parents:
            if (parent.current.id if parent.current else None) != consumed:
                return Evidence("", via=parent.name)
    return None


def recheck(attempt: Attempt, values: Mapping[str, Value]) -> Evidence | None:
    """Evaluate every read again, trusting no version number (the close and the tests use this)."""
    for selector, was in attempt.reads:
        if not equal(evaluate(selector, values.get(selector.artifact, ABSENT)), was):
            return Evidence("", format_path(selector.artifact, selector.path), selector)
    return None
