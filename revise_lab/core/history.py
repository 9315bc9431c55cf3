"""A run on one line, for failures that a person has to read."""

from __future__ import annotations

from collections.abc import Iterable

from revise_lab.records import event as ev


def one_line(journal: Iterable[ev.Entry]) -> str:
    """Return the journal as a line of moves: what was started, read, revised, finished and decided, in order."""
    return "; ".join(filter(None, map(_move, journal)))


def _move(entry: ev.Entry) -> str:
    match entry:
        case ev.Started():
            return f"start {entry.node}"
        case ev.Observe():
            return f"read {_node(entry.attempt)} {' '.join(str(read.selector) for read in entry.reads)}"
        case ev.Revise():
            return f"rev {entry.revision.id} {', '.join(f'{each}={each.value!r}' for each in entry.revision.changes)}"
        case ev.Refused():
            return f"refuse {entry.revision} ({entry.error})"
        case ev.Finish() | ev.Fail():
            reads = " ".join(str(read.selector) for read in entry.reads)
            return f"{type(entry).__name__.lower()} {_node(entry.attempt)}{f' reading {reads}' if reads else ''}"
        case ev.Committed() | ev.Rejected() | ev.Discarded():
            return f"[{type(entry).__name__.lower()} {entry.attempt}]"
        case ev.Stop():
            return f"[stop {entry.attempt}]"
        case ev.Retracted():
            return f"[retract {entry.node}]"
        case ev.Planned():
            affected = " ".join(each.node for each in entry.nodes if each.action in ("cancel", "avoid", "recompute"))
            return f"[plan {entry.scope}: {affected or 'nothing'}]"
        case ev.Cancel() | ev.Close():
            return type(entry).__name__.lower()
    return ""


def _node(attempt: str) -> str:
    return attempt.rpartition("@")[0]
