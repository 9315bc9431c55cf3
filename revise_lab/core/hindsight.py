"""The hindsight floor: the fewest executions that any policy could have got away with.

Fix the answers w, and let K(u) be what node u reads in a fresh run on the final inputs. Until the first revision that
changes anything, every policy has started the same attempts A1. A node of the final run is *covered* when A1 holds a
completed attempt with the observations K(u), or a running one whose observations so far are a prefix of K(u): that one
could have been extended. The floor is ``|A1| + |nodes of the final run that nothing in A1 covers|``. It is clairvoyant
after the first revision, so with several revisions more than the floor is not waste that could have been avoided.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from revise_lab.records import event as ev
from revise_lab.records.selector import Read, Selector
from revise_lab.records.value import equal

from .oracle import Truth


class Floor(NamedTuple):
    """The floor of one run and what the run did."""

    floor: int
    executions: int
    covered: tuple[str, ...]
    recomputations_floor: int
    """Executions of the floor beyond one for every node that was ever needed."""

    @property
    def ratio(self) -> float:
        """Executions over the floor; 1 is as good as hindsight."""
        return self.executions / self.floor if self.floor else 1.0


class _Seen(NamedTuple):
    node: str
    reads: list[Read]


def hindsight(journal: Iterable[ev.Entry], truth: Truth) -> Floor:
    """Return the floor of a finished run.

    Parameters
    ----------
    journal : iterable of Entry
        The whole journal of the run, whatever its policy.
    truth : Truth
        The latest-version oracle of the same run.
    """
    early: dict[str, _Seen] = {}
    completed: set[str] = set()
    executions = 0
    revised = False
    for entry in journal:
        if isinstance(entry, ev.Started):
            executions += 1
            if not revised:
                early[entry.attempt] = _Seen(entry.node, list(entry.reads))
        elif isinstance(entry, ev.Observe | ev.Finish | ev.Fail) and not revised:
            early[entry.attempt].reads.extend(entry.reads)
            if not isinstance(entry, ev.Observe):
                completed.add(entry.attempt)
        elif isinstance(entry, ev.Accepted):
            revised = revised or any(entry.deltas)
    final = {*truth.outputs, *truth.failures}
    covered = {
        seen.node
        for attempt, seen in early.items()
        if seen.node in final and _covers(seen.reads, truth.reads[seen.node], whole=attempt in completed)
    }
    floor = len(early) + len(final - covered)
    needed = len({seen.node for seen in early.values()} | final)
    return Floor(floor, executions, tuple(sorted(covered)), floor - needed)


def _covers(reads: list[Read], fresh: tuple[Read, ...], *, whole: bool) -> bool:
    """Say whether observations are those of the fresh run (``whole``) or a beginning of them, in any order of one step."""
    known: dict[Selector, Read] = {read.selector: read for read in fresh}
    for read in reads:
        other = known.get(read.selector)
        if other is None:
            if not _is_activation(read):
                return False
        elif not equal(other.observed, read.observed):
            return False
    return not whole or {read.selector for read in reads} >= known.keys()


def _is_activation(read: Read) -> bool:
    """Say whether the machine recorded a read, not the body; a node of the final run is activated there too."""
    return read.selector.role == "control" and read.selector.marker == "has" and read.observed is True
