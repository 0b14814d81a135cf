"""Two clients that know nothing of each other, on a store in memory and on PostgreSQL: promises hold on both.

A module that says `FACES = BOTH` tells its promises to `PGLease` and to `AsyncPGLease`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from datetime import timedelta
from typing import Any

import pytest

from pglease import AsyncPGLease, MemoryBackend, PGLease
from tests.client import on_a_loop
from tests.support import worlds
from tests.support.server import Kept, RunServer

BOTH = ("threads", "asyncio")


class Store:
    """Where the leases are; the test may reach behind everybody's back."""

    def __init__(self, dsn: str | None, *, face: str = "threads") -> None:
        self.dsn = dsn
        self.face = face
        self._memory = MemoryBackend()
        self._life = ExitStack()
        self._only_loop: on_a_loop.Loop | None = None

    def client(self, owner_id: str | None = None, **arguments: Any) -> Any:
        """Return another client, with this test's face; it is closed at the end of the test."""
        if self.face == "threads":
            return self.rival(owner_id, **arguments)
        asynchronous = AsyncPGLease(self.dsn or self._memory.another(), owner_id, **arguments)
        return self._life.enter_context(on_a_loop.Client(self._loop(), asynchronous))

    def rival(self, owner_id: str | None = None, **arguments: Any) -> PGLease:
        """Return a plain client."""
        return self._life.enter_context(PGLease(self.dsn or self._memory.another(), owner_id, **arguments))

    def _loop(self) -> on_a_loop.Loop:
        if self._only_loop is None:
            self._only_loop = on_a_loop.Loop()
            self._life.callback(self._only_loop.close)
        return self._only_loop

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


@pytest.fixture(scope="session")
def emptied(shared_dsn: str) -> Iterator[Callable[[], None]]:
    """Return what makes the database of these tests as good as new, on one connection."""
    with PGLease(shared_dsn) as client:
        client.list_leases()  # makes the tables
    kept = Kept(functools.partial(worlds.connect, shared_dsn))
    yield lambda: kept.execute(
        f"WITH gone AS (DELETE FROM {worlds.TABLE}) UPDATE {worlds.TABLE}_meta SET token_floor = 0"
    )
    kept.close()


@pytest.fixture
def empty_dsn(shared_dsn: str, emptied: Callable[[], None]) -> str:
    """A DSN of a database without a lease."""
    emptied()
    return shared_dsn


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Tell each promise on every store, and on the faces that its module names."""
    if "store" in metafunc.fixturenames:
        both = getattr(metafunc.module, "FACES", ()) and not metafunc.definition.get_closest_marker("threads_only")
        worlds = [(store, face) for face in (BOTH if both else BOTH[:1]) for store in ("memory", "postgres")]
        ids = [store if face == "threads" else f"{store}-{face}" for store, face in worlds]
        metafunc.parametrize("store", worlds, ids=ids, indirect=True)


@pytest.fixture
def store(request: pytest.FixtureRequest) -> Iterator[Store]:
    kind, face = request.param
    made = Store(request.getfixturevalue("empty_dsn") if kind == "postgres" else None, face=face)
    yield made
    made.close()


@pytest.fixture
def leases(store: Store) -> Any:
    return store.client("ours")


@pytest.fixture
def rival(store: Store) -> PGLease:
    return store.rival("rival")
