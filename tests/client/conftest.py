"""Two clients that know nothing of each other, on a store in memory and on PostgreSQL: promises hold on both."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from datetime import timedelta
from typing import Any

import pytest

from pglease import MemoryBackend, PGLease
from tests.support import worlds
from tests.support.server import RunServer


class Store:
    """Where the leases are; the test may reach behind everybody's back."""

    def __init__(self, dsn: str | None) -> None:
        self.dsn = dsn
        self._memory = MemoryBackend()
        self._life = ExitStack()

    def client(self, owner_id: str | None = None, **arguments: Any) -> PGLease:
        """Return another client; it is closed at the end of the test."""
        return self._life.enter_context(PGLease(self.dsn or self._memory.another(), owner_id, **arguments))

    def lapse(self, name: str) -> None:
        """Let the hold be over by the store's clock, without its holder's knowing.

        It has been for a while: what lapses during a release is no loss, and a busy machine takes its time for one.
        """
        self._set_back(name, "expires_at", "clock_timestamp()")

    def set_back_the_grant(self, name: str) -> None:
        """Let the hold have begun a while ago."""
        self._set_back(name, "acquired_at", "acquired_at")

    def _set_back(self, name: str, column: str, since: str) -> None:
        if self.dsn:
            moment = f"{since} - interval '20 s'"
            worlds.execute(self.dsn, f"UPDATE {worlds.TABLE} SET {column} = {moment} WHERE task_name = %s", name)
        else:
            row, now = self._memory._store.rows[name], self._memory._store.now()
            setattr(row, column, (row.acquired_at if column == since else now) - timedelta(seconds=20))

    def delete(self, name: str) -> None:
        """Take the record away."""
        if self.dsn:
            worlds.delete(self.dsn, name)
        else:
            del self._memory._store.rows[name]

    def close(self) -> None:
        self._life.close()


@pytest.fixture(scope="session")
def shared_dsn(server: RunServer) -> Iterator[str]:
    """A DSN of one database for all of these tests: hundreds of databases would take longer than the tests."""
    with server.database() as name:
        yield server.dsn(name)


@pytest.fixture
def empty_dsn(shared_dsn: str) -> str:
    """A DSN of a database without a lease."""
    with PGLease(shared_dsn) as client:
        client.list_leases()  # makes the tables, if this is the first test
    worlds.execute(shared_dsn, f"DELETE FROM {worlds.TABLE}")
    worlds.execute(shared_dsn, f"UPDATE {worlds.TABLE}_meta SET token_floor = 0")
    return shared_dsn


@pytest.fixture(params=["memory", "postgres"])
def store(request: pytest.FixtureRequest) -> Iterator[Store]:
    made = Store(request.getfixturevalue("empty_dsn") if request.param == "postgres" else None)
    yield made
    made.close()


@pytest.fixture
def leases(store: Store) -> PGLease:
    return store.client("ours")


@pytest.fixture
def rival(store: Store) -> PGLease:
    return store.client("rival")
