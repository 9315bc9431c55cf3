"""A process that is killed on its way from staging effects to the close, and the run that goes on without it.

Run as a program, this file keeps a warm process from which victims are forked, one for each line of JSON on its input. A
victim runs a workflow with effects, says over the pipe which point it has reached, and waits there for its end. The points
are put around the journal, the target and whoever allows effects; the package knows nothing of them.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import traceback
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import sqlalchemy as sql

import revise_lab
from revise_lab import Effect, Session, Workflow
from revise_lab.audit.auditor import audit
from revise_lab.errors import ReviseLabError
from revise_lab.records import event as ev
from revise_lab.records.effect import EffectState
from revise_lab.records.revision import Change, Op, Revision
from revise_lab.records.value import thaw
from revise_lab.runtime import session as sessions
from revise_lab.runtime.journal import Journal
from revise_lab.runtime.sql_target import SqlTarget

SENDING = (
    "before staged is written",
    "after staged is written",
    "while allowing is asked for",
    "after authorised is written",
    "before dispatched is written",
    "after dispatched is written",
    "before the target's transaction",
    "within the target's transaction",
    "after the target's commit",
    "before confirmed is written",
    "after confirmed is written",
    "before closed is written",
    "after closed is written",
)
UNDOING = (
    "after a revision was accepted",
    "before compensating is written",
    "after compensating is written",
    "before the target undoes",
    "within the target's undoing",
    "after the target has undone",
    "before compensated is written",
    "after compensated is written",
)
ASKING = ("before the target is asked", "after the target was asked")
"""Points of a run that goes on after a death, and dies again."""
MAY_HAVE_LEFT = frozenset((*SENDING[5:10], *UNDOING[2:7], *ASKING))
"""Points at which nobody but the target can say what became of the call."""

REVISION = Revision("move", (Change("request", Op.SET, ("city",), "Faro"),))
_POLICIES = {"commit": "revise", "close": "revise_plus"}
_IN_FLIGHT = (EffectState.DISPATCHED, EffectState.COMPENSATING, EffectState.UNKNOWN)
_SENT = sql.Table("sent", sql.MetaData(), *(sql.Column(name, sql.Text) for name in ("what", "key", "payload")))


class Order(NamedTuple):
    """How to run a victim, and where it is to die."""

    name: str
    """Of the workflow, and so of all its intents."""
    folder: str
    database: str
    """URL of the target's database."""
    release: str
    revised: bool
    point: str = ""
    """Where to die; nowhere if empty."""
    nth: int = 1
    """Which time that the point is reached."""
    disk: str = ""
    """``full`` or ``off``: the files are on a disk that loses power; ``off`` is a journal that syncs nothing."""
    kept: tuple[str, ...] = ()
    """Files on that disk that are there as they were last written."""


class Death(NamedTuple):
    """Where a victim was killed."""

    reached: bool
    key: str = ""
    """Of the intent that the point was about."""
    accepted: bool = False
    """Whether it had acknowledged the revision."""
    counts: dict[str, int] | None = None
    """How often each point was reached, of one that was left alive."""


class Outcome(NamedTuple):
    """What became of a run that went on after a death."""

    lost: int
    """Effects that are wanted and are not out there, and revisions that were acknowledged and are not in the run."""
    doubled: int
    """Effects beyond those that are wanted, and calls that happened twice."""
    unknown: frozenset[str]
    """Intents that the resumed run had to ask the target about."""
    in_flight: frozenset[str]
    """Intents of which the journal held a call and no answer."""
    wrong: tuple[str, ...] = ()
    """Everything else that is not as it should be."""


# --- what is run ---


def workflow(name: str, gate: asyncio.Event) -> Workflow:
    """Return four effects of two nodes, and a node that reads the confirmation of one and waits for the gate."""
    flow = Workflow(name)

    @flow.node(kind="tool")
    async def plan(state, ctx):
        return {"city": state["request"]["city"]}

    @flow.node(kind="tool", after="plan")
    async def book(state, ctx):
        ctx.stage(Effect("ticket", {"to": state["plan"]["city"]}, "K", "shop"))
        ctx.stage(Effect("seat", {"to": state["plan"]["city"]}, "K", "shop"))
        return {"booked": state["plan"]["city"]}

    @flow.node(kind="tool", after="plan")
    async def stay(state, ctx):
        ctx.stage(Effect("room", {"in": state["plan"]["city"]}, "K", "shop"))
        ctx.stage(Effect("hold", {"in": state["plan"]["city"]}, "R", "shop"))
        return {"stays": state["plan"]["city"]}

    @flow.node(kind="tool", after="book/ticket")
    async def mail(state, ctx):
        await gate.wait()
        return {"text": f"ticket to {state['book/ticket']['payload']['to']}"}

    return flow


def wanted(revised: bool) -> tuple[dict[str, dict[str, str]], Counter[tuple[str, str]]]:
    """Return the outputs and the effects, as (slot, payload), that a run has to end with."""
    city = "Faro" if revised else "Porto"
    outputs = {"plan": {"city": city}, "book": {"booked": city}, "stay": {"stays": city}}
    outputs |= {"mail": {"text": f"ticket to {city}"}}
    to, within = json.dumps({"to": city}), json.dumps({"in": city})
    return outputs, Counter({("ticket", to): 1, ("seat", to): 1, ("room", within): 1, ("hold", within): 1})


class World(SqlTarget):
    """A target whose effects are rows of a table without keys: what happens twice is there twice."""

    def __init__(self, database: str | sql.Engine) -> None:
        super().__init__(database, "shop", apply=self.applied, undo=self.undone)
        _SENT.create(self.engine, checkfirst=True)

    def applied(self, connection, key, payload, what="publish"):
        connection.execute(_SENT.insert().values(what=what, key=key, payload=json.dumps(thaw(payload))))

    def undone(self, connection, key, payload):
        World.applied(self, connection, key, payload, "undo")

    def happened(self, name: str) -> Counter[tuple[str, str, str]]:
        """Count what happened to the effects of a workflow: ``(what, intent key, payload)``."""
        with self.engine.connect() as connection:
            of_this = sql.select(_SENT).where(_SENT.c.key.startswith(f"{name}/", autoescape=True))
            return Counter(map(tuple, connection.execute(of_this)))


def _session(order: Order, gate: asyncio.Event, target: SqlTarget, authorise, path: Path) -> Session:
    flow, inputs = workflow(order.name, gate), {"request": {"city": "Porto"}}
    outside = {"targets": {"shop": target}, "authorise": authorise, "journal": path}
    return Session(flow, inputs, _POLICIES[order.release], release=order.release, endpoint=None, **outside)


# --- the victim ---


class Points:
    """Counts the points that a process comes by, and stops it for good at the one where it is to die."""

    def __init__(self, order: Order, disk=None) -> None:
        self.counts: Counter[str] = Counter()
        self._order, self._disk, self._lock = order, disk, threading.Lock()

    def reach(self, point: str, key: str = "") -> None:
        with self._lock:
            self.counts[point] += 1
            here = (point, self.counts[point]) == (self._order.point, self._order.nth)
        if here:
            if self._disk is not None:
                folder = Path(self._order.folder)
                self._disk.cut(folder, folder / "left", self._order.kept)
            _tell("reached", key, os.getpid())
            os.read(0, 1)  # nothing comes but the end of whoever was to kill this process
            os._exit(3)


def _tell(*words: object) -> None:
    os.write(1, json.dumps(words).encode() + b"\n")


def _marks(entries):
    for entry in entries:
        if isinstance(entry, ev.Effected):
            yield str(entry.state), entry.intent.key
        elif isinstance(entry, ev.Closed):
            yield "closed", ""


def _live(order: Order) -> None:
    """Be the victim: run until the point, or to the end."""
    disk = None
    if order.disk:
        from power_loss import Disk

        disk = Disk()
    points, path = Points(order, disk), Path(order.folder) / "run.journal"

    class PointedJournal(Journal):
        def __init__(self, file, **options):
            super().__init__(file, **options, connect=disk.connect if disk else None)

        def append(self, entries, **options):
            entries = list(entries)
            for state, key in _marks(entries):
                points.reach(f"before {state} is written", key)
            end = super().append(entries, **options)
            if order.disk == "off":
                self._file._synchronous = lambda level: self._file.query("PRAGMA synchronous=OFF")
            for state, key in _marks(entries):
                points.reach(f"after {state} is written", key)
            return end

    class PointedWorld(World):
        def applied(self, connection, key, payload):
            super().applied(connection, key, payload)
            points.reach("within the target's transaction", key)

        def undone(self, connection, key, payload):
            super().undone(connection, key, payload)
            points.reach("within the target's undoing", key)

        def publish(self, intent_key, payload, premises):
            points.reach("before the target's transaction", intent_key)
            receipt = super().publish(intent_key, payload, premises)
            points.reach("after the target's commit", intent_key)
            return receipt

        def compensate(self, intent_key):
            points.reach("before the target undoes", intent_key)
            receipt = super().compensate(intent_key)
            points.reach("after the target has undone", intent_key)
            return receipt

        def find(self, intent_key, **options):
            points.reach("before the target is asked", intent_key)
            found = super().find(intent_key, **options)
            points.reach("after the target was asked", intent_key)
            return found

    def authorise(intent, effect):
        points.reach("while allowing is asked for", intent.key)
        return True

    async def main():
        gate = asyncio.Event()
        session = _session(order, gate, target, authorise, path)
        run = session.resume() if path.exists() else session.start()
        if order.revised and REVISION.id not in run.machine.revisions:
            # A run that goes on is revised at once, a new one when all that leaves early is out.
            n_early = 0 if len(run.journal) > 1 else 4 if order.release == "commit" else 2
            async with contextlib.aclosing(run.watch()) as entries:
                async for _ in entries:
                    if sum(map(len, run.effects().values())) >= n_early:
                        break
            await run.revise(REVISION)
            _tell("accepted")
            points.reach("after a revision was accepted")
        gate.set()
        await run.result()

    sessions.Journal = PointedJournal
    target = PointedWorld(disk.engine(order.database) if disk else order.database)
    asyncio.run(main())
    _tell("counts", points.counts)


def _serve() -> None:
    """Fork a victim for each order that comes in."""
    for line in sys.stdin:
        order = Order(*json.loads(line))
        sql.create_engine(order.database)  # loads the driver here, once, and not in each victim
        if order.disk:
            import power_loss  # noqa: F401
        child = os.fork()
        if not child:
            try:
                _live(order)
                os._exit(0)
            except BaseException:
                traceback.print_exc()
                os._exit(1)
        _tell("ended", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))


# --- the other side ---


class Victims:
    """Makes processes and kills them; the warm process that they are forked from lives as long as the context."""

    def __enter__(self):
        same = os.environ | {"PYTHONPATH": str(Path(revise_lab.__file__).parents[1])}
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self._process = subprocess.Popen([sys.executable, __file__], **pipes, env=same)
        return self

    def __exit__(self, *_):
        self._process.communicate(timeout=30)

    def kill(self, order: Order) -> Death:
        """Run a victim and kill it, with SIGKILL, where it says that it is at its point; or let it come to its end."""
        Path(order.folder).mkdir(parents=True, exist_ok=True)
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        death = Death(reached=False)
        for line in self._process.stdout:
            what, *said = json.loads(line)
            if what == "reached":
                os.kill(said[1], signal.SIGKILL)
                death = death._replace(reached=True, key=said[0])
            elif what == "accepted":
                death = death._replace(accepted=True)
            elif what == "counts":
                death = death._replace(counts=said[0])
            elif what == "ended":
                assert said[0] == (-signal.SIGKILL if death.reached else 0), f"the victim ended by itself: {said[0]}"
                return death
        raise AssertionError("the process that victims are forked from has ended")


def resume(order: Order, death: Death, world: type[World] = World) -> Outcome:
    """Go on with the run of a victim, in this process, and look at what became of its effects."""
    left = Path(order.folder) / "left" if order.disk else Path(order.folder)
    target = world(f"sqlite:///{left}/shop.db" if order.disk else order.database)
    try:
        return asyncio.run(_resume(order, death, target, left / "run.journal"))
    finally:
        target.close()


async def _resume(order: Order, death: Death, target: World, path: Path) -> Outcome:
    with Journal(path) as journal:
        before = list(journal.entries())
    last = {entry.intent.key: entry.state for entry in before if isinstance(entry, ev.Effected)}
    in_flight = frozenset(key for key, state in last.items() if state in _IN_FLIGHT)
    outputs, effects = wanted(order.revised)
    lost, wrong, gate = 0, [], asyncio.Event()
    gate.set()
    session = _session(order, gate, target, lambda intent, effect: True, path)
    # Nothing had been promised yet; whoever was told that a revision is accepted does not send it again.
    run = session.resume() if before else session.start()
    if order.revised and REVISION.id not in run.machine.revisions:
        lost += death.accepted
        if not death.accepted:
            await run.revise(REVISION)
    try:
        result = await asyncio.wait_for(run.result(), 60)
        if result.outputs != outputs:
            wrong.append(f"outputs {result.outputs}")
        wrong += (await run.check_oracle())[1]
    except (ReviseLabError, TimeoutError) as error:
        wrong.append(f"{type(error).__name__}: {error}")
        run.cancel()
        await asyncio.wait_for(run._main, 60)
    with Journal(path) as journal:
        after = list(journal.entries())
    wrong += map(str, audit(after))
    states = last.items() | {(e.intent.key, e.state) for e in after[len(before) :] if isinstance(e, ev.Effected)}
    unknown = frozenset(key for key, state in states if state is EffectState.UNKNOWN)
    happened = target.happened(order.name)
    published = {(key, payload) for what, key, payload in happened if what == "publish"}
    undone = {key for what, key, _ in happened if what == "undo"}
    live = Counter((key.split("/")[2], payload) for key, payload in published if key not in undone)
    twice = happened.total() - len({(what, key) for what, key, _ in happened})
    return Outcome(lost + (effects - live).total(), (live - effects).total() + twice, unknown, in_flight, tuple(wrong))


if __name__ == "__main__":
    _serve()
