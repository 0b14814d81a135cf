"""Two clients of one database, a table of data, and every kind of connection that a guard works on."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import psycopg
import pytest

from pglease import PGLease

pytest.register_assert_rewrite("tests.fencing.kinds")

from tests.fencing.kinds import KINDS, Session  # noqa: E402  # after it was registered
from tests.support.server import RunServer  # noqa: E402  # likewise


@pytest.fixture(scope="module")
def shared_database(server: RunServer) -> Iterator[str]:
    with server.database() as name:
        dsn = server.dsn(name)
        with psycopg.connect(dsn) as connection:
            connection.execute("CREATE TABLE report (id int PRIMARY KEY, body text)")
        with PGLease(dsn) as leases:
            leases.list_leases()
        yield dsn


@pytest.fixture
def dsn(shared_database: str) -> str:
    """One database for a module, as if it were new: making one takes longer than most of these tests."""
    with psycopg.connect(shared_database, autocommit=True) as connection:
        connection.execute("TRUNCATE pglease_leases, report")
    return shared_database


@pytest.fixture
def leases(dsn: str) -> Iterator[PGLease]:
    with PGLease(dsn, owner_id="holder") as client:
        yield client


@pytest.fixture
def rival(dsn: str) -> Iterator[PGLease]:
    with PGLease(dsn, owner_id="rival") as client:
        yield client


@pytest.fixture
def data(dsn: str) -> Iterator[psycopg.Connection]:
    """What everybody writes to, and a connection that looks at it."""
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute("INSERT INTO report VALUES (1, 'empty')")
        yield connection


@pytest.fixture
def body(data: psycopg.Connection) -> Callable[[], str]:
    """Return what reads the report as it is committed."""

    def read() -> str:
        row = data.execute("SELECT body FROM report").fetchone()
        assert row is not None
        return row[0]

    return read


@pytest.fixture(params=KINDS, ids=str)
def session(request: pytest.FixtureRequest, dsn: str, data: psycopg.Connection) -> Iterator[Session]:
    """A caller's connection, once of each kind."""
    with KINDS[request.param](dsn) as opened:
        yield opened


@pytest.fixture(params=["psycopg", "asyncpg"])
def plain(request: pytest.FixtureRequest, dsn: str, data: psycopg.Connection) -> Iterator[Session]:
    """A caller's connection, synchronous and asynchronous, where the driver makes no difference."""
    with KINDS[request.param](dsn) as opened:
        yield opened
