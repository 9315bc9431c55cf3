"""A target in a database: premises, intent and what the effect does are one transaction of it."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TypeVar

import sqlalchemy as sql
from sqlalchemy.exc import DBAPIError, IntegrityError, InterfaceError, OperationalError, SQLAlchemyError

from revise_lab.errors import ConfigError
from revise_lab.records.effect import EffectState
from revise_lab.records.value import Value, freeze, thaw
from revise_lab.runtime.target import (
    ABSENT_TOKEN,
    OutcomeUnknown,
    Receipt,
    TargetError,
    arrived,
    check_premises,
    first_receipt,
    not_published,
    premise_changed,
)

_T = TypeVar("_T")
# Lost against another transaction: serialisation, deadlock, and two that made the same row or table first.
_LOST_AGAINST_ANOTHER = ("40001", "40P01", "23505", "42P07")
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.001, 0.1
"""Bounds of the pause before a transaction that lost is tried again (our choice)."""


class SqlTarget:
    """A target in SQLite or PostgreSQL.

    On SQLite a publication is one ``BEGIN IMMEDIATE``, on PostgreSQL one ``SERIALIZABLE`` transaction that also locks the
    rows of its premises: without the locks a premise could change, and be seen to have changed, before the publication
    commits, which is serialisable and still wrong. A premise that something is absent puts a row there to lock. SQLite works
    with ``synchronous=EXTRA``, so that what was answered survives the loss of power.

    Parameters
    ----------
    database : str or sqlalchemy.Engine
        The URL, such as ``sqlite:///refunds.db`` or ``postgresql+psycopg://...``, or an engine.
    name : str
        Its name.
    prefix : str
        Before the names of its two tables, ``effects`` and ``resources``, which are made if need be.
    apply, undo : callable, optional
        Given the connection, the intent key and the payload: do in the same transaction what the effect means to other
        tables, and undo it. It may be called again if the transaction lost against another one, and is rolled back then.
    max_tries : int
        Transactions that are tried while they lose against others, with pauses that grow and are left to chance.

    Raises
    ------
    ConfigError
        It is another kind of database, or one in memory, or is never to be tried.
    """

    compares_and_sets = True

    def __init__(
        self,
        database: str | sql.Engine,
        name: str = "sql",
        *,
        prefix: str = "revise_lab_",
        apply: Callable[[sql.Connection, str, Value], None] | None = None,
        undo: Callable[[sql.Connection, str, Value], None] | None = None,
        max_tries: int = 30,
    ) -> None:
        if max_tries < 1:
            raise ConfigError(f"target {name!r}: max_tries is {max_tries} - try at least once")
        self.name, self.max_tries = name, max_tries
        self._chance = random.Random()
        self._owns_engine = isinstance(database, str)
        try:
            self.engine = sql.create_engine(database) if isinstance(database, str) else database
        except (SQLAlchemyError, ImportError, ValueError) as error:
            raise ConfigError(
                f"target {name!r}: there is no database at its URL ({type(error).__name__}) - give one like"
                " sqlite:///shop.db or postgresql+psycopg://..., with its driver installed"
            ) from None
        self._apply, self._undo = apply, undo
        dialect = self.engine.dialect.name
        in_memory = dialect == "sqlite" and self.engine.url.database in (None, "", ":memory:")
        if dialect not in ("sqlite", "postgresql") or in_memory:
            what = "in memory, which threads cannot share" if in_memory else f"of the kind {dialect}"
            raise ConfigError(
                f"target {name!r}: {self.engine.url} is a database {what} - give a SQLite file or PostgreSQL, or use a"
                " MemoryTarget"
            )
        self._is_sqlite = dialect == "sqlite"
        metadata = sql.MetaData()
        self.effects = sql.Table(
            f"{prefix}effects",
            metadata,
            sql.Column("intent_key", sql.Text, primary_key=True),
            sql.Column("payload", sql.Text, nullable=False),
            sql.Column("state", sql.Text, nullable=False),
        )
        self.resources = sql.Table(
            f"{prefix}resources",
            metadata,
            sql.Column("name", sql.Text, primary_key=True),
            # 0 stands for a resource that is not there.
            sql.Column("version", sql.BigInteger, nullable=False),
            sql.Column("value", sql.Text, nullable=False),
        )
        self._run(f"the tables of {name}", lambda connection: metadata.create_all(connection))

    def __repr__(self) -> str:
        return f"SqlTarget({self.engine.url!s}, name={self.name!r})"

    def close(self) -> None:
        """Close the connections, if the engine is the target's own."""
        if self._owns_engine:
            self.engine.dispose()

    def publish(self, intent_key: str, payload: object, premises: Mapping[str, str]) -> Receipt:
        """Publish an intent if its premises hold; see :class:`revise_lab.runtime.target.Target`."""
        check_premises(self.name, intent_key, premises)
        value = freeze(payload)

        def do(connection: sql.Connection) -> Receipt:
            known = self._receipt(connection, intent_key)
            if known is not None:
                return first_receipt(self.name, known, value)
            # One order for all, so that two publications cannot wait for each other.
            if changed := [name for name in sorted(premises) if self._locked(connection, name) != premises[name]]:
                raise premise_changed(self.name, intent_key, changed)
            row = {"intent_key": intent_key, "payload": _text(value), "state": str(EffectState.CONFIRMED)}
            connection.execute(self.effects.insert().values(row))
            if self._apply is not None:
                self._apply(connection, intent_key, value)
            return Receipt(intent_key, value, EffectState.CONFIRMED)

        return self._run(intent_key, do)

    def find(self, intent_key: str, *, close: bool = False) -> Receipt | None:
        """Say what became of an intent; None if it never arrived, and with ``close`` never will."""

        def do(connection: sql.Connection) -> Receipt | None:
            known = self._receipt(connection, intent_key)
            if known is None and close:
                row = {"intent_key": intent_key, "payload": "null", "state": str(EffectState.DROPPED)}
                connection.execute(self.effects.insert().values(row))
            return arrived(known)

        return self._run(intent_key, do)

    def compensate(self, intent_key: str) -> Receipt:
        """Undo a publication; again is the same as once."""

        def do(connection: sql.Connection) -> Receipt:
            known = arrived(self._receipt(connection, intent_key, lock=True))
            if known is None:
                raise not_published(self.name, intent_key)
            if known.state is EffectState.COMPENSATED:
                return known
            done = known._replace(state=EffectState.COMPENSATED)
            this = self.effects.c.intent_key == intent_key
            connection.execute(self.effects.update().where(this).values(state=str(done.state)))
            if self._undo is not None:
                self._undo(connection, intent_key, known.payload)
            return done

        return self._run(intent_key, do)

    def token(self, resource: str) -> str:
        """Return the present token of a resource."""
        return self._run(resource, lambda connection: _token(self._version(connection, resource)))

    def value(self, resource: str) -> Value:
        """Return the present value of a resource; None if it is not there."""
        query = sql.select(self.resources.c.value).where(self.resources.c.name == resource)
        text = self._run(resource, lambda connection: connection.execute(query).scalar_one_or_none())
        return None if text is None else freeze(json.loads(text))

    def set(self, resource: str, value: object, connection: sql.Connection | None = None) -> str:
        """Give a resource a value and return its new token.

        Parameters
        ----------
        resource : str
            Which one; made if it is not there.
        value : JSON-like
            Its value.
        connection : sqlalchemy.Connection, optional
            Within ``apply`` or ``undo``: theirs, so that it is part of the same transaction.

        Returns
        -------
        str
            The token.
        """
        text = _text(freeze(value))

        def do(connection: sql.Connection) -> str:
            version = self._version(connection, resource, lock=True)
            if version is None:
                connection.execute(self.resources.insert().values(name=resource, version=1, value=text))
                return "1"
            this = self.resources.c.name == resource
            connection.execute(self.resources.update().where(this).values(version=version + 1, value=text))
            return str(version + 1)

        return self._run(resource, do) if connection is None else do(connection)

    def _receipt(self, connection: sql.Connection, intent_key: str, *, lock: bool = False) -> Receipt | None:
        query = sql.select(self.effects).where(self.effects.c.intent_key == intent_key)
        row = connection.execute(query.with_for_update() if lock else query).one_or_none()
        if row is None:
            return None
        return Receipt(row.intent_key, freeze(json.loads(row.payload)), EffectState(row.state))

    def _version(self, connection: sql.Connection, resource: str, *, lock: bool = False) -> int | None:
        query = sql.select(self.resources.c.version).where(self.resources.c.name == resource)
        return connection.execute(query.with_for_update() if lock else query).scalar_one_or_none()

    def _locked(self, connection: sql.Connection, resource: str) -> str:
        """Return the token of a resource that cannot change until the end of the transaction."""
        version = self._version(connection, resource, lock=True)
        if version is None:
            connection.execute(self.resources.insert().values(name=resource, version=0, value="null"))
        return _token(version)

    def _run(self, what: str, do: Callable[[sql.Connection], _T]) -> _T:
        """Run a transaction, again if it lost against another one."""
        tried = 0
        while True:
            tried += 1
            try:
                with self._transaction() as connection:
                    return do(connection)
            except DBAPIError as error:
                code = getattr(error.orig, "sqlstate", None) or getattr(error.orig, "pgcode", None)
                lost = code in _LOST_AGAINST_ANOTHER
                if lost and tried < self.max_tries:
                    # Those that lost together would meet again: who waits how long is left to chance.
                    time.sleep(self._chance.uniform(0.0, min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2.0**tried)))
                    continue
                busy = self._is_sqlite and "locked" in str(error.orig)
                certain = lost or busy or isinstance(error, IntegrityError)
                if not certain and (
                    error.connection_invalidated or isinstance(error, OperationalError | InterfaceError)
                ):
                    raise OutcomeUnknown(
                        f"{self.name}: no answer for {what} ({_said(error)}) - ask what became of it", what=what
                    ) from None
                tries = f" in {self.max_tries} tries" if lost else ""
                raise TargetError(
                    f"{self.name}: {what} was refused{tries} ({_said(error)}) - nothing happened; send it again when the"
                    " database is less busy, or see its log",
                    what=what,
                ) from None
            except (SQLAlchemyError, UnicodeError) as error:  # its text may quote parameters
                raise OutcomeUnknown(
                    f"{self.name}: no answer for {what!r} ({type(error).__name__}) - ask what became of it", what=what
                ) from None

    @contextmanager
    def _transaction(self) -> Iterator[sql.Connection]:
        if not self._is_sqlite:
            with (
                self.engine.connect().execution_options(isolation_level="SERIALIZABLE") as connection,
                connection.begin() as transaction,
            ):
                yield connection
                if not transaction.is_active:
                    raise sql.exc.InvalidRequestError("what was called in the transaction has ended it")
            return
        # Python's driver opens a transaction only at the first write, too late for what was read before.
        with self.engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
            # With FULL the deletion of the rollback journal may be lost with the power, and its return undoes the commit.
            connection.exec_driver_sql("PRAGMA synchronous=EXTRA")
            connection.exec_driver_sql("BEGIN IMMEDIATE")
            try:
                yield connection
                connection.exec_driver_sql("COMMIT")
            except BaseException:
                if connection.connection.dbapi_connection.in_transaction:  # type: ignore[union-attr]
                    connection.exec_driver_sql("ROLLBACK")
                raise


def _token(version: int | None) -> str:
    return str(version) if version else ABSENT_TOKEN


def _text(value: Value) -> str:
    return json.dumps(thaw(value), separators=(",", ":"))


def _said(error: DBAPIError) -> str:
    # Neither str(error) nor the error as a cause: it quotes the parameters, and payloads stay out of messages and logs.
    return " ".join(str(error.orig).split("\n")[0].split())
