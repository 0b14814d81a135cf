"""Other people's connections: how one statement is run on each kind, in the transaction that is open there.

A kind is known by the names of its classes, so nothing is imported that the caller has not imported. What a connection
knows of itself without asking the server is looked at first: outside a transaction a guard would guard nothing.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Hashable, Mapping
from functools import lru_cache
from typing import Any, Protocol

from pglease.backends.paramstyles import Statement
from pglease.errors import ConfigurationError

IDLE, ACTIVE, OPEN, FAILED, GONE = range(5)
"""What libpq says of a connection's transaction."""
SUPPORTED = (
    "a psycopg 3 or psycopg2 connection, an SQLAlchemy Connection or Session (also their async forms), a Django "
    "connection, or an asyncpg connection"
)


class Caller(Protocol):
    """One kind of connections that people work on.

    Attributes:
        is_async: whether what `run` returns must be awaited.
    """

    is_async: bool

    def state(self, connection: Any) -> int:
        """Return `OPEN`; or `IDLE` where the next statement would be a transaction of its own, `FAILED`, or `GONE`."""

    def run(self, connection: Any, statement: Statement, params: Mapping[str, Any]) -> Any:
        """Run a statement and return its first row, None if it has none, or what is to be awaited for that."""


def caller_of(connection: Any) -> Caller:
    """Return how statements are run on a connection.

    Raises:
        ConfigurationError: it is of no kind that we know.
    """
    cls: Any = type(connection)
    kind = _kind(cls)
    if kind is None:
        raise ConfigurationError(f"guard needs {SUPPORTED}, not {cls.__module__}.{cls.__qualname__}")
    return kind


@lru_cache(maxsize=64)
def _kind(cls: Hashable) -> Caller | None:
    for each in getattr(cls, "__mro__", ()):
        found = _KINDS.get(f"{each.__module__.partition('.')[0]}.{each.__name__}")
        if found is not None:
            return found
    return None


def _status(raw: Any) -> int:
    """Return the state of a psycopg or psycopg2 connection, where one in autocommit is idle however it looks."""
    if raw.closed:
        return GONE
    status = int(raw.info.transaction_status)
    if status == IDLE and not raw.autocommit:
        return OPEN  # the driver begins the transaction with the statement
    return IDLE if status == ACTIVE and raw.autocommit else status


class _Psycopg:
    is_async = False

    def state(self, connection: Any) -> int:
        if connection.pgconn.transaction_status == OPEN:  # the usual answer, at a tenth of the cost
            return OPEN
        return _status(connection)

    def run(self, connection: Any, statement: Statement, params: Mapping[str, Any]) -> Any:
        # Not the connection's own kinds of cursors and rows: they are made for the caller's statements. And fetched,
        # since a pipeline goes on before there is an answer.
        driver = sys.modules["psycopg"]
        cursor = driver.Cursor(connection, row_factory=driver.rows.tuple_row)
        return cursor.execute(statement.encoded, params).fetchone()


class _AsyncPsycopg(_Psycopg):
    is_async = True

    async def run(self, connection: Any, statement: Statement, params: Mapping[str, Any]) -> Any:
        driver = sys.modules["psycopg"]
        cursor = driver.AsyncCursor(connection, row_factory=driver.rows.tuple_row)
        return await (await cursor.execute(statement.encoded, params)).fetchone()


class _Psycopg2:
    is_async = False

    def state(self, connection: Any) -> int:
        return _status(connection)

    def run(self, connection: Any, statement: Statement, params: Mapping[str, Any]) -> Any:
        plain = sys.modules["psycopg2.extensions"].cursor
        with connection.cursor(cursor_factory=plain) as cursor:
            cursor.execute(*statement.written("pyformat", params))
            return cursor.fetchone()


class _Django:
    is_async = False

    def state(self, connection: Any) -> int:
        if connection.vendor != "postgresql":
            raise ConfigurationError(f"guard needs a connection to PostgreSQL, not to {connection.vendor}")
        if connection.needs_rollback:
            return FAILED
        connection.ensure_connection()
        return _status(connection.connection)

    def run(self, connection: Any, statement: Statement, params: Mapping[str, Any]) -> Any:
        with connection.cursor() as cursor:
            cursor.execute(*statement.written("pyformat", params))
            return cursor.fetchone()


class _Alchemy:
    """SQLAlchemy's Connection, of any driver, in 1.4 and 2."""

    is_async = False

    def state(self, connection: Any) -> int:
        if connection.dialect.name != "postgresql":
            raise ConfigurationError(f"guard needs a connection to PostgreSQL, not to {connection.dialect.name}")
        if connection.closed or connection.invalidated:
            return GONE
        if not hasattr(connection, "commit") and not connection.in_transaction():
            return IDLE  # 1.4 without `future=True` commits by itself after each statement that writes
        proxy = connection.connection
        driver = proxy.driver_connection
        if hasattr(getattr(driver, "info", None), "transaction_status"):
            return _status(driver)
        return IDLE if getattr(proxy.dbapi_connection, "autocommit", False) else OPEN

    def run(self, connection: Any, statement: Statement, params: Mapping[str, Any]) -> Any:
        text, values = statement.written(connection.dialect.paramstyle, params)
        return connection.exec_driver_sql(text, values if isinstance(values, Mapping) else tuple(values)).first()


class _AsyncAlchemy:
    """SQLAlchemy's asynchronous Connection and Session: the synchronous ones inside them, on their own terms."""

    is_async = True

    def state(self, connection: Any) -> int:  # noqa: ARG002  # asked where the answer may be waited for
        return OPEN

    async def run(self, connection: Any, statement: Statement, params: Mapping[str, Any]) -> Any:
        def run(inner: Any) -> Any:
            caller = caller_of(inner)
            refuse_unfit(caller.state(inner))
            return caller.run(inner, statement, params)

        return await connection.run_sync(run)


class _Asyncpg:
    is_async = True

    def state(self, connection: Any) -> int:
        if connection.is_closed():
            return GONE
        return OPEN if connection.is_in_transaction() else IDLE

    async def run(self, connection: Any, statement: Statement, params: Mapping[str, Any]) -> Any:
        text, values = statement.written("numeric_dollar", params)
        return await connection.fetchrow(text, *values)


class _Wrapped:
    """What has the connection inside.

    Args:
        unwrap: returns that.
        is_async: whether it is an asynchronous one.
    """

    def __init__(self, unwrap: Callable[[Any], Any], *, is_async: bool = False) -> None:
        self._unwrap = unwrap
        self.is_async = is_async

    def state(self, connection: Any) -> int:
        inner = self._unwrap(connection)
        return caller_of(inner).state(inner)

    def run(self, connection: Any, statement: Statement, params: Mapping[str, Any]) -> Any:
        inner = self._unwrap(connection)
        return caller_of(inner).run(inner, statement, params)


_KINDS: dict[str, Caller] = {
    "psycopg.Connection": _Psycopg(),
    "psycopg.AsyncConnection": _AsyncPsycopg(),
    "psycopg2.connection": _Psycopg2(),
    "sqlalchemy.Connection": _Alchemy(),
    "sqlalchemy.Session": _Wrapped(lambda session: session.connection()),
    "sqlalchemy.scoped_session": _Wrapped(lambda scope: scope()),
    "sqlalchemy.AsyncConnection": _AsyncAlchemy(),
    "sqlalchemy.AsyncSession": _AsyncAlchemy(),
    "sqlalchemy.async_scoped_session": _Wrapped(lambda scope: scope(), is_async=True),
    "sqlalchemy.PoolProxiedConnection": _Wrapped(lambda proxy: proxy.driver_connection),
    "sqlalchemy._ConnectionFairy": _Wrapped(lambda proxy: proxy.driver_connection),
    "django.BaseDatabaseWrapper": _Django(),
    "django.ConnectionProxy": _Django(),
    "asyncpg.Connection": _Asyncpg(),
    "asyncpg.PoolConnectionProxy": _Asyncpg(),
}


def refuse_unfit(state: int) -> None:
    """Refuse a connection on which nothing could be guarded, before anything is sent."""
    if state == IDLE:
        raise ConfigurationError(
            "guard needs an open transaction: this connection is in autocommit mode and in no transaction, so each "
            "statement would be a transaction of its own, and the next one unguarded"
        )
    if state == FAILED:
        raise ConfigurationError("guard needs a transaction that works: this one has failed, roll it back first")
    if state == GONE:
        raise ConfigurationError("guard needs an open connection: this one is closed")
