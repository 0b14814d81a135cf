"""Every kind of connection that people have, made to look alike for the tests: begin, write, guard, commit."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any, Self

import asyncpg
import psycopg
import psycopg2
import sqlalchemy
import sqlalchemy.orm
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine

from pglease import HeldLease
from tests.support import django_site

ALCHEMY_IS_OLD = sqlalchemy.__version__.startswith("1.")
ALCHEMY_DRIVERS = ["psycopg2"] if ALCHEMY_IS_OLD else ["psycopg", "psycopg2"]
"""1.4 knows no psycopg 3."""


def write_of(text: str) -> str:
    return f"UPDATE report SET body = '{text}' WHERE id = 1"


class Session:
    """A connection with a transaction on it."""

    raw: Any

    def __init__(self, dsn: str) -> None:
        self.dsn = dsn
        self.open()

    def open(self) -> None:
        raise NotImplementedError

    def execute(self, statement: str) -> None:
        self.raw.execute(statement)

    def scalar(self, statement: str) -> Any:
        """Return the one value that a query answers."""
        return self.raw.execute(statement).fetchone()[0]

    def write(self, text: str) -> None:
        """Change the report."""
        self.execute(write_of(text))

    def begin(self) -> None:
        """Begin a transaction; most drivers do by themselves."""

    def guard(self, lease: HeldLease) -> None:
        lease.guard(self.connection)

    def write_in_block(self, lease: HeldLease, text: str, *, before: Sequence[str | Callable[[], object]] = ()) -> None:
        """Write inside `with lease.guard(...)`, after something else was done: statements, or calls."""
        with lease.guard(self.connection):
            for act in before:
                if isinstance(act, str):
                    self.execute(act)
                else:
                    act()
            self.write(text)

    @property
    def connection(self) -> Any:
        """What is handed to `guard`."""
        return self.raw

    def commit(self) -> None:
        self.raw.commit()

    def rollback(self) -> None:
        self.raw.rollback()

    def close(self) -> None:
        self.raw.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class Psycopg(Session):
    def open(self) -> None:
        self.raw = psycopg.connect(self.dsn)


class PsycopgInABlock(Psycopg):
    """In autocommit mode, with an explicit transaction."""

    def open(self) -> None:
        self.raw = psycopg.connect(self.dsn, autocommit=True)

    def begin(self) -> None:
        self._block: AbstractContextManager[Any] = self.raw.transaction()
        self._block.__enter__()

    def commit(self) -> None:
        self._block.__exit__(None, None, None)

    def rollback(self) -> None:
        self._block.__exit__(psycopg.Rollback, psycopg.Rollback(), None)


class Psycopg2(Session):
    def open(self) -> None:
        self.raw = psycopg2.connect(self.dsn)

    def execute(self, statement: str) -> None:
        with self.raw.cursor() as cursor:
            cursor.execute(statement)


def address(dsn: str, driver: str) -> str:
    return dsn.replace("postgresql://", f"postgresql+{driver}://")


class Alchemy(Session):
    driver = ALCHEMY_DRIVERS[0]

    def open(self) -> None:
        self.engine = sqlalchemy.create_engine(address(self.dsn, self.driver), future=True)
        self.raw = self.engine.connect()

    def execute(self, statement: str) -> None:
        self.raw.execute(sqlalchemy.text(statement))

    def close(self) -> None:
        self.raw.close()
        self.engine.dispose()


class AlchemyPsycopg2(Alchemy):
    driver = "psycopg2"


class AlchemyOfOld(Alchemy):
    """As most code for 1.4 is written."""

    def open(self) -> None:
        self.engine = sqlalchemy.create_engine(address(self.dsn, self.driver))
        self.raw = self.engine.connect()

    def begin(self) -> None:
        self._transaction = self.raw.begin()

    def commit(self) -> None:
        self._transaction.commit()

    def rollback(self) -> None:
        self._transaction.rollback()


class AlchemySession(Alchemy):
    def open(self) -> None:
        self.engine = sqlalchemy.create_engine(address(self.dsn, self.driver))
        self.raw = sqlalchemy.orm.Session(self.engine)


class AlchemyScoped(Alchemy):
    def open(self) -> None:
        self.engine = sqlalchemy.create_engine(address(self.dsn, self.driver))
        self.raw = sqlalchemy.orm.scoped_session(sqlalchemy.orm.sessionmaker(self.engine))


class AlchemyRaw(Psycopg2):
    """The pool's proxy of a driver's connection."""

    def open(self) -> None:
        self.engine = sqlalchemy.create_engine(address(self.dsn, "psycopg2"))
        self.raw = self.engine.raw_connection()

    def execute(self, statement: str) -> None:
        self.raw.cursor().execute(statement)

    def close(self) -> None:
        super().close()
        self.engine.dispose()


class Django(Session):
    """A transaction is an `atomic` block."""

    def open(self) -> None:
        self.alias = django_site.alias(self.dsn)
        from django.db import connections

        self.raw = connections[self.alias]

    def begin(self) -> None:
        from django.db.transaction import atomic

        self._block = atomic(using=self.alias)
        self._block.__enter__()

    def execute(self, statement: str) -> None:
        with self.raw.cursor() as cursor:
            cursor.execute(statement)

    def commit(self) -> None:
        self._block.__exit__(None, None, None)

    def rollback(self) -> None:
        self.raw.set_rollback(True)
        self._block.__exit__(None, None, None)


class Async(Session):
    """An asynchronous connection on a loop of its own."""

    def open(self) -> None:
        self.runner = asyncio.Runner()
        self.run(self.opened())

    def run(self, work: Any) -> Any:
        return self.runner.run(work)

    async def opened(self) -> None:
        raise NotImplementedError

    def execute(self, statement: str) -> None:
        self.run(self.executed(statement))

    async def executed(self, statement: str) -> None:
        await self.raw.execute(statement)

    def guard(self, lease: HeldLease) -> None:
        async def guarded() -> None:
            await lease.guard(self.connection)

        self.run(guarded())

    def write_in_block(self, lease: HeldLease, text: str, *, before: Sequence[str | Callable[[], object]] = ()) -> None:
        async def written() -> None:
            async with lease.guard(self.connection):
                for act in before:
                    if isinstance(act, str):
                        await self.executed(act)
                    else:
                        act()
                await self.executed(write_of(text))

        self.run(written())

    def commit(self) -> None:
        self.run(self.raw.commit())

    def rollback(self) -> None:
        self.run(self.raw.rollback())

    async def closed(self) -> None:
        await self.raw.close()

    def close(self) -> None:
        self.run(self.closed())
        self.runner.close()


class AsyncPsycopg(Async):
    async def opened(self) -> None:
        self.raw = await psycopg.AsyncConnection.connect(self.dsn)


class Asyncpg(Async):
    async def opened(self) -> None:
        self.raw = await asyncpg.connect(self.dsn)

    def scalar(self, statement: str) -> Any:
        return self.run(self.raw.fetchval(statement))

    def begin(self) -> None:
        self.transaction = self.raw.transaction()
        self.run(self.transaction.start())

    def commit(self) -> None:
        self.run(self.transaction.commit())

    def rollback(self) -> None:
        self.run(self.transaction.rollback())


class AsyncpgPool(Asyncpg):
    async def opened(self) -> None:
        self.pool = await asyncpg.create_pool(self.dsn, min_size=1, max_size=1)
        self.raw = await self.pool.acquire()

    async def closed(self) -> None:
        await self.pool.release(self.raw)
        await self.pool.close()


class AsyncAlchemy(Async):
    driver = "asyncpg"

    async def opened(self) -> None:
        self.engine = create_async_engine(address(self.dsn, self.driver))
        self.raw = await self.engine.connect()

    async def executed(self, statement: str) -> None:
        await self.raw.execute(sqlalchemy.text(statement))

    async def closed(self) -> None:
        await self.raw.close()
        await self.engine.dispose()


class AsyncAlchemyPsycopg(AsyncAlchemy):
    driver = "psycopg"


class AsyncAlchemySession(AsyncAlchemy):
    async def opened(self) -> None:
        self.engine = create_async_engine(address(self.dsn, self.driver))
        self.raw = AsyncSession(self.engine)


KINDS: dict[str, type[Session]] = {
    "psycopg": Psycopg,
    "psycopg in a block": PsycopgInABlock,
    "psycopg asynchronous": AsyncPsycopg,
    "psycopg2": Psycopg2,
    "SQLAlchemy": Alchemy,
    "SQLAlchemy on psycopg2": AlchemyPsycopg2,
    "SQLAlchemy session": AlchemySession,
    "SQLAlchemy scoped session": AlchemyScoped,
    "SQLAlchemy raw": AlchemyRaw,
    "SQLAlchemy asynchronous": AsyncAlchemy,
    "SQLAlchemy asynchronous session": AsyncAlchemySession,
    "Django": Django,
    "asyncpg": Asyncpg,
    "asyncpg pool": AsyncpgPool,
}
if ALCHEMY_IS_OLD:
    KINDS["SQLAlchemy as of old"] = AlchemyOfOld
else:
    KINDS["SQLAlchemy asynchronous on psycopg"] = AsyncAlchemyPsycopg
