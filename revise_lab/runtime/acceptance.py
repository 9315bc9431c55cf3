"""What a run answers to a revision, and who may wait for it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Generator
from typing import Any

from revise_lab.core.plan import RecoveryPlan
from revise_lab.errors import ReentrantRevision
from revise_lab.records.revision import Revision

from .dispatch import INSIDE


class Acceptance:
    """The answer to a revision, to be awaited: the recovery plan, or the error that refused it.

    A revision that is not awaited is delivered all the same.
    """

    def __init__(self, run_id: str, revision: Revision, answer: asyncio.Future[RecoveryPlan | None]) -> None:
        self.revision = revision
        self._run_id = run_id
        self._answer = answer

    def __await__(self) -> Generator[Any, None, RecoveryPlan | None]:
        if self._run_id in INSIDE.get():
            raise ReentrantRevision(
                f"a node body of run {self._run_id} awaits the acceptance of revision {self.revision.id!r}, which may"
                " stop that very body - call run.revise(...) without await; it is delivered behind the current event"
            )
        return self._answer.__await__()

    def if_refused(self, then: Callable[[], object]) -> None:
        """Call ``then`` if the revision is refused, before anybody who waits for the answer goes on."""

        def look(answer: asyncio.Future[RecoveryPlan | None]) -> None:
            if not answer.cancelled() and answer.exception() is not None:
                then()

        self._answer.add_done_callback(look)


def check_outside(run_id: str) -> None:
    """Refuse to wait for the end of a run within one of its bodies, for which the run waits.

    Raises
    ------
    ReentrantRevision
        This is one of its bodies.
    """
    if run_id in INSIDE.get():
        raise ReentrantRevision(
            f"a node body of run {run_id} awaits the result of that run, which waits for the body - return, and"
            " await it outside"
        )
