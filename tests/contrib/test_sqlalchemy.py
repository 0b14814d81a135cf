"""SQLAlchemy as it is: engines that lend, sessions that are guarded, the table in a `MetaData`."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest
import sqlalchemy
from sqlalchemy import func, orm, select
from sqlalchemy.ext.asyncio import create_async_engine
from sqlalchemy.pool import NullPool

from pglease import ConfigurationError, FencedError, PGLease
from pglease.backends.postgres import PostgresBackend
from pglease.contrib.sqlalchemy import table
from tests.support.worlds import execute, steal

DRIVERS = ["psycopg", "psycopg2"]


def address(dsn: str, driver: str) -> str:
    return dsn.replace("postgresql://", f"postgresql+{driver}://")


@pytest.fixture(params=DRIVERS)
def engine(dsn: str, request: pytest.FixtureRequest) -> Iterator[sqlalchemy.Engine]:
    made = sqlalchemy.create_engine(address(dsn, request.param))
    yield made
    made.dispose()


def is_in_order(dsn: str) -> bool:
    backend = PostgresBackend(dsn)
    try:
        return backend.schema_diff() == []
    finally:
        backend.close()


# -- engines that lend


def test_an_engine_lends_a_connection_for_each_request_and_gets_it_back(engine: sqlalchemy.Engine, dsn: str) -> None:
    """Its raw connection has a dict as `.info`, where drivers have what tells of the transaction."""
    with engine.connect() as connection:
        assert isinstance(connection.connection.info, dict)

    with PGLease.from_engine(engine, owner_id="lent") as leases, PGLease(dsn) as other:
        with leases.acquire("job", ttl="1m") as held:
            assert held
            assert other.try_acquire("job") is False
            assert engine.pool.checkedout() == 0  # type: ignore[attr-defined]
            leases.renew("job")
        assert other.try_acquire("job") is True


@pytest.mark.parametrize("shared", [True, False])
def test_an_engine_that_can_be_used_up_is_warned_of(dsn: str, shared: bool, caplog: pytest.LogCaptureFixture) -> None:
    options = {} if shared else {"poolclass": NullPool}
    PGLease.from_engine(sqlalchemy.create_engine(address(dsn, "psycopg"), **options)).close()

    warned = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert ["the application's own connections" in record.getMessage() for record in warned] == [True] * shared


def test_an_engine_that_cannot_lend_is_refused_before_it_is_used() -> None:
    with pytest.raises(ConfigurationError, match="needs a synchronous engine"):
        PGLease.from_engine(create_async_engine("postgresql+asyncpg://user:s3cret@nowhere/db"))
    with pytest.raises(ConfigurationError, match="needs a SQLAlchemy engine, not str"):
        PGLease.from_engine("postgresql://localhost/db")
    with pytest.raises(ConfigurationError, match="PostgreSQL, not of sqlite"):
        PGLease.from_engine(sqlalchemy.create_engine("sqlite://"))


# -- sessions that are guarded


def test_a_sessions_writes_are_refused_once_the_lease_is_somebody_elses(engine: sqlalchemy.Engine, dsn: str) -> None:
    execute(dsn, "CREATE TABLE report (body text)")
    write = sqlalchemy.text("INSERT INTO report VALUES (:body)")

    with PGLease.from_engine(engine) as leases, leases.acquire("report", ttl="1m", on_lost="log") as lease:
        assert lease
        with orm.Session(engine) as session:
            lease.guard(session)
            session.execute(write, {"body": "mine"})
            session.commit()
        steal(dsn, "report")
        with orm.Session(engine) as session:
            session.execute(write, {"body": "stale"})
            with pytest.raises(FencedError, match="report"):
                lease.guard(session)
            session.rollback()

    assert execute(dsn, "SELECT body FROM report") == [("mine",)]


# -- the table in a MetaData


def test_created_with_the_applications_tables_it_is_what_schema_apply_makes(
    engine: sqlalchemy.Engine, dsn: str
) -> None:
    metadata = sqlalchemy.MetaData()
    leases = table(metadata)
    assert table(metadata) is leases

    metadata.create_all(engine)
    metadata.create_all(engine)

    assert is_in_order(dsn)
    with PGLease(dsn, auto_initialize=False) as client:
        assert client.wait_for_lease("job").fencing_token == 1
    metadata.drop_all(engine)
    assert execute(dsn, "SELECT count(*) FROM pg_class WHERE relname ~ '^pglease'") == [(0,)]


def test_it_is_read_beside_ones_own(engine: sqlalchemy.Engine, dsn: str) -> None:
    leases = table(sqlalchemy.MetaData(), table_name="jobs", schema="public")
    held = select(leases.c.task_name, leases.c.metadata["host"].astext).where(
        leases.c.expires_at > func.clock_timestamp()
    )

    with PGLease(dsn, table_name="jobs") as client, engine.connect() as connection:
        client.try_acquire("one", metadata={"host": "a"})
        client.try_acquire("two")
        client.release("two")

        assert connection.execute(held).all() == [("one", "a")]


def test_every_column_is_described_as_it_is(engine: sqlalchemy.Engine, dsn: str) -> None:
    with PGLease(dsn) as client:
        client.list_leases()
    described = table(sqlalchemy.MetaData())
    found = sqlalchemy.Table("pglease_leases", sqlalchemy.MetaData(), autoload_with=engine)

    def shape(of: sqlalchemy.Table) -> list[tuple[str, str, bool | None]]:
        """Without the collation, which SQLAlchemy reads only since 2.1."""
        types = [each.type.compile(engine.dialect).partition(" COLLATE")[0] for each in of.columns]
        return [(each.name, type_, each.nullable) for each, type_ in zip(of.columns, types, strict=True)]

    assert shape(described) == shape(found)
    assert described.comment == found.comment
