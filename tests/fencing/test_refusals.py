"""What a guard cannot guard, each with an error of its own kind; and what it leaves in the caller's transaction."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import asyncpg
import psycopg
import psycopg2
import pytest
import sqlalchemy

from pglease import BackendMisconfigured, BackendUnavailable, ConfigurationError, FencedError, HeldLease, PGLease
from pglease.backends import postgres_guard, postgres_schema
from pglease.backends.memory import MemoryBackend
from pglease.backends.postgres import PostgresBackend
from pglease.errors import BackendClosed
from pglease.records import Released
from pglease.schema import table_names
from pglease.testing.local_postgres import LocalPostgres
from tests.fencing.kinds import ALCHEMY_DRIVERS, ALCHEMY_IS_OLD, Session, address
from tests.support import django_site
from tests.support.server import RunServer
from tests.support.worlds import budget, execute, expire, locked_row, steal, wait_until

pytestmark = pytest.mark.matrix


@pytest.fixture
def lease(leases: PGLease) -> HeldLease:
    return leases.wait_for_lease("job", ttl=60, timeout=10)


@pytest.fixture
def connection(dsn: str) -> Iterator[psycopg.Connection]:
    with psycopg.connect(dsn) as opened:
        yield opened
        opened.rollback()


def shown(connection: psycopg.Connection, setting: str) -> str:
    found = connection.execute("SELECT current_setting(%s, true)", (setting,)).fetchone()
    assert found is not None
    return found[0]


# -- connections on which nothing could be guarded


def test_autocommit_is_refused_before_anything_is_sent(lease: HeldLease, dsn: str) -> None:
    with psycopg.connect(dsn, autocommit=True) as each, pytest.raises(ConfigurationError, match="autocommit"):
        lease.guard(each)


def test_autocommit_of_psycopg2_is_refused(lease: HeldLease, dsn: str) -> None:
    each = psycopg2.connect(dsn)
    each.autocommit = True

    with pytest.raises(ConfigurationError, match="autocommit"):
        lease.guard(each)

    each.close()


@pytest.mark.parametrize("driver", ALCHEMY_DRIVERS)
def test_autocommit_of_sqlalchemy_is_refused(lease: HeldLease, dsn: str, driver: str) -> None:
    engine = sqlalchemy.create_engine(address(dsn, driver), isolation_level="AUTOCOMMIT")

    with engine.connect() as each, pytest.raises(ConfigurationError, match="autocommit"):
        lease.guard(each)

    engine.dispose()


if ALCHEMY_IS_OLD:

    def test_sqlalchemy_as_of_old_is_refused_outside_a_transaction_since_it_commits_each_write(
        lease: HeldLease, dsn: str
    ) -> None:
        engine = sqlalchemy.create_engine(address(dsn, "psycopg2"))

        with engine.connect() as each:
            with pytest.raises(ConfigurationError, match="autocommit"):
                lease.guard(each)
            with each.begin():
                lease.guard(each)

        engine.dispose()


def test_autocommit_of_sqlalchemy_on_asyncpg_is_refused(lease: HeldLease, dsn: str) -> None:
    from sqlalchemy.ext.asyncio import create_async_engine

    async def guarded() -> None:
        engine = create_async_engine(address(dsn, "asyncpg"), isolation_level="AUTOCOMMIT")
        try:
            async with engine.connect() as each:
                with pytest.raises(ConfigurationError, match="autocommit"):
                    await lease.guard(each)
        finally:
            await engine.dispose()

    asyncio.run(guarded())


def test_asyncpg_outside_a_transaction_is_refused(lease: HeldLease, dsn: str) -> None:
    async def guarded() -> None:
        each = await asyncpg.connect(dsn)
        try:
            with pytest.raises(ConfigurationError, match="autocommit"):
                await lease.guard(each)
        finally:
            await each.close()

    asyncio.run(guarded())


def test_django_outside_of_atomic_is_refused(lease: HeldLease, dsn: str) -> None:
    alias = django_site.alias(dsn)
    from django.db import connections

    with pytest.raises(ConfigurationError, match="autocommit"):
        lease.guard(connections[alias])

    connections[alias].close()


def test_a_failed_transaction_is_told(lease: HeldLease, connection: psycopg.Connection) -> None:
    with pytest.raises(psycopg.errors.DivisionByZero):
        connection.execute("SELECT 1/0")

    with pytest.raises(ConfigurationError, match="roll it back first"):
        lease.guard(connection)


def test_a_failed_transaction_of_asyncpg_is_told(lease: HeldLease, dsn: str) -> None:
    async def guarded() -> None:
        each = await asyncpg.connect(dsn)
        transaction = each.transaction()
        await transaction.start()
        with pytest.raises(asyncpg.DivisionByZeroError):
            await each.execute("SELECT 1/0")
        with pytest.raises(ConfigurationError, match="roll it back first"):
            await lease.guard(each)
        await transaction.rollback()
        await each.close()

    asyncio.run(guarded())


def test_a_closed_connection_is_told(lease: HeldLease, dsn: str) -> None:
    each = psycopg.connect(dsn)
    each.close()

    with pytest.raises(ConfigurationError, match="closed"):
        lease.guard(each)


@pytest.mark.parametrize("thing", [None, "postgresql://x", object()])
def test_what_is_no_connection_is_refused_with_a_list_of_what_is(lease: HeldLease, thing: object) -> None:
    with pytest.raises(ConfigurationError, match=r"guard needs a psycopg 3 or psycopg2 connection, an SQLAlchemy"):
        lease.guard(thing)


def test_sqlalchemy_on_another_database_is_refused(lease: HeldLease) -> None:
    engine = sqlalchemy.create_engine("sqlite://")
    with engine.connect() as each, pytest.raises(ConfigurationError, match="not to sqlit"):
        lease.guard(each)
    engine.dispose()  # what it keeps would be closed by the garbage collector, which Python 3.13 warns of


def test_a_read_only_transaction_is_told(lease: HeldLease, connection: psycopg.Connection) -> None:
    connection.execute("SET TRANSACTION READ ONLY")

    with pytest.raises(ConfigurationError, match="READ ONLY"):
        lease.guard(connection)


# -- another place


def test_a_database_without_the_table_is_another_one(lease: HeldLease, server: RunServer, dsn: str) -> None:
    with (
        server.database() as name,
        psycopg.connect(server.dsn(name)) as elsewhere,
        pytest.raises(ConfigurationError, match="another database or server"),
    ):
        lease.guard(elsewhere)


def with_a_copy_of_the_hold(dsn: str, other: str) -> None:
    """Let a database have the same row, as restoring a dump would."""
    backend = PostgresBackend(other)
    backend.apply_schema()
    backend.close()
    columns = "task_name, owner_id, acquired_at, expires_at, heartbeat_at, lease_id, fencing_token"
    rows = execute(dsn, f"SELECT {columns} FROM pglease_leases")
    with psycopg.connect(other) as copy:
        copy.cursor().executemany(f"INSERT INTO pglease_leases ({columns}) VALUES (%s, %s, %s, %s, %s, %s, %s)", rows)


def matches(connection: psycopg.Connection, lease: HeldLease) -> bool:
    fence = lease.fence_sql()
    return connection.execute(f"SELECT 1 WHERE {fence.sql}", fence.params).fetchall() == [(1,)]  # type: ignore[arg-type]


def assert_is_elsewhere(lease: HeldLease, dsn: str) -> None:
    with psycopg.connect(dsn) as elsewhere:
        with pytest.raises(ConfigurationError, match="another database or server"):
            lease.guard(elsewhere)
        elsewhere.rollback()
        assert not matches(elsewhere, lease)


def test_a_copy_of_the_database_is_another_one_though_the_same_hold_is_in_it(
    lease: HeldLease, dsn: str, server: RunServer
) -> None:
    with server.database() as name:
        with_a_copy_of_the_hold(dsn, server.dsn(name))

        assert_is_elsewhere(lease, server.dsn(name))


def test_a_copy_on_another_server_is_another_one_though_all_its_numbers_are_the_same(
    fresh_postgres: Callable[..., LocalPostgres],
) -> None:
    here, there = fresh_postgres(), fresh_postgres()
    with PGLease(here.dsn) as leases:
        lease = leases.wait_for_lease("job", ttl=60, timeout=10)
        with_a_copy_of_the_hold(here.dsn, there.dsn)
        path = "SELECT pg_relation_filepath('pglease_leases')"
        assert execute(here.dsn, path) == execute(there.dsn, path)

        assert_is_elsewhere(lease, there.dsn)


def test_a_server_that_was_restarted_is_the_same_one(fresh_postgres: Callable[..., LocalPostgres]) -> None:
    here = fresh_postgres()
    with PGLease(here.dsn) as leases:
        lease = leases.wait_for_lease("job", ttl=60, timeout=10)
        with psycopg.connect(here.dsn) as connection:
            lease.guard(connection)
        here.restart()

        with psycopg.connect(here.dsn) as connection:
            lease.guard(connection)
            assert matches(connection, lease)


def test_a_table_whose_file_was_rewritten_is_the_same_one(
    lease: HeldLease, connection: psycopg.Connection, dsn: str
) -> None:
    lease.guard(connection)
    connection.commit()
    execute(dsn, "VACUUM FULL pglease_leases")

    lease.guard(connection)


EVIL = """
    CREATE SCHEMA IF NOT EXISTS evil;
    CREATE TABLE evil.pglease_leases (LIKE public.pglease_leases);
    CREATE FUNCTION evil.clock_timestamp() RETURNS timestamptz LANGUAGE sql AS $$ SELECT '-infinity'::timestamptz $$;
    CREATE FUNCTION evil.always(timestamptz, timestamptz) RETURNS boolean LANGUAGE sql AS $$ SELECT true $$;
    CREATE OPERATOR evil.> (LEFTARG = timestamptz, RIGHTARG = timestamptz, FUNCTION = evil.always);
    CREATE FUNCTION evil.never(text, text) RETURNS boolean LANGUAGE sql AS $$ SELECT false $$;
    CREATE OPERATOR evil.= (LEFTARG = text, RIGHTARG = text, FUNCTION = evil.never);
    CREATE TYPE evil.uuid AS ENUM ('x');
    CREATE TYPE evil.tsquery AS ENUM ('x');
    SET search_path = evil, pg_catalog, public;
"""


@pytest.mark.parametrize("level", ["READ COMMITTED", "REPEATABLE READ"])
def test_a_hostile_search_path_shadows_nothing(
    lease: HeldLease, connection: psycopg.Connection, dsn: str, level: str
) -> None:
    connection.execute(f"SET TRANSACTION ISOLATION LEVEL {level}")  # type: ignore[arg-type]
    connection.execute("SET search_path = evil, pg_catalog, public")
    execute(dsn, EVIL)
    try:
        lease.guard(connection)
        assert matches(connection, lease)
        connection.rollback()

        expire(dsn, "job")

        connection.execute("SET search_path = evil, pg_catalog, public")
        with pytest.raises(FencedError):
            lease.guard(connection)
        connection.rollback()
        connection.execute("SET search_path = evil, pg_catalog, public")
        assert not matches(connection, lease)
    finally:
        connection.rollback()
        execute(dsn, "DROP SCHEMA evil CASCADE")


# -- snapshots


@pytest.mark.parametrize("level", ["REPEATABLE READ", "SERIALIZABLE"])
def test_with_a_snapshot_the_guard_comes_first(lease: HeldLease, connection: psycopg.Connection, level: str) -> None:
    connection.execute(f"SET TRANSACTION ISOLATION LEVEL {level}")  # type: ignore[arg-type]

    with lease.guard(connection):
        lease.renew()
        connection.execute("SELECT body FROM report")


@pytest.mark.parametrize("level", ["REPEATABLE READ", "SERIALIZABLE"])
def test_with_a_snapshot_a_late_guard_is_refused_though_nothing_has_changed(
    lease: HeldLease, connection: psycopg.Connection, data: psycopg.Connection, level: str
) -> None:
    connection.execute(f"SET TRANSACTION ISOLATION LEVEL {level}")  # type: ignore[arg-type]
    connection.execute("SELECT body FROM report")

    with pytest.raises(ConfigurationError, match="first statement"):
        lease.guard(connection)


def test_a_snapshot_older_than_the_last_heartbeat_cannot_prove_anything(
    lease: HeldLease, connection: psycopg.Connection
) -> None:
    connection.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
    connection.execute("SELECT 1")  # takes the snapshot, and leaves no lock by which that could be seen
    lease.renew()

    with pytest.raises(FencedError):
        lease.guard(connection)


def test_a_snapshot_from_before_a_takeover_proves_nothing(
    lease: HeldLease, connection: psycopg.Connection, dsn: str
) -> None:
    connection.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
    connection.execute("SELECT 1")
    steal(dsn, "job")

    with pytest.raises(FencedError, match="snapshot"):
        lease.guard(connection)


# -- others at the row


LOCK_TIMEOUT = "SELECT current_setting('lock_timeout')"
TAKEOVER = "UPDATE pglease_leases SET fencing_token = fencing_token + 1, lease_id = gen_random_uuid()"


def test_a_row_that_a_stranger_keeps_locked_is_refused_and_takes_the_transaction_along(
    lease: HeldLease, plain: Session, dsn: str, body: Callable[[], str]
) -> None:
    plain.begin()
    plain.write("unproven")

    with locked_row(dsn, "job", "UPDATE"), pytest.raises(BackendUnavailable, match="locked"):
        plain.guard(lease)
    with suppress(Exception):
        plain.commit()

    assert body() == "empty"


@contextmanager
def guarding(session: Session, lease: HeldLease, dsn: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Future[None]]:
    """Somebody who is waiting with a guard, for as long as it takes; at the end it must have an answer."""
    monkeypatch.setattr(postgres_guard, "PATIENCE", "10min")
    waits = "SELECT 1 FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'"
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(session.guard, lease)
        wait_until(lambda: execute(dsn, waits))
        yield answer
        answer.exception(60)


@pytest.mark.parametrize("own", ["0", "5min"])
def test_a_guard_waits_for_who_has_the_row_and_leaves_the_callers_own_lock_timeout_as_it_was(
    lease: HeldLease, plain: Session, rival: PGLease, dsn: str, monkeypatch: pytest.MonkeyPatch, own: str
) -> None:
    plain.begin()
    plain.execute(f"SET LOCAL lock_timeout = '{own}'")
    with locked_row(dsn, "job", "UPDATE") as stranger, guarding(plain, lease, dsn, monkeypatch) as answer:
        stranger.rollback()

    assert answer.exception() is None
    assert plain.scalar(LOCK_TIMEOUT) == own
    assert rival.force_release("job", 1)
    assert not rival.try_acquire("job")
    plain.rollback()
    assert rival.try_acquire("job")


@pytest.mark.parametrize("level", ["REPEATABLE READ", "SERIALIZABLE"])
def test_with_a_snapshot_a_guard_that_waited_still_counts_as_the_first_statement(
    lease: HeldLease, plain: Session, dsn: str, monkeypatch: pytest.MonkeyPatch, level: str
) -> None:
    plain.begin()
    plain.execute(f"SET TRANSACTION ISOLATION LEVEL {level}")
    with locked_row(dsn, "job", "UPDATE") as stranger, guarding(plain, lease, dsn, monkeypatch) as answer:
        stranger.rollback()

    assert answer.exception() is None
    plain.write("mine")
    plain.commit()


def test_a_guard_that_waited_for_a_takeover_is_refused_by_it(
    lease: HeldLease, plain: Session, dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain.begin()
    with psycopg.connect(dsn) as successor:
        successor.execute(TAKEOVER)
        with guarding(plain, lease, dsn, monkeypatch) as answer:
            successor.commit()

    assert isinstance(answer.exception(), FencedError)
    plain.rollback()


def test_a_block_that_proves_again_waits_too(
    lease: HeldLease, connection: psycopg.Connection, dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(postgres_guard, "PATIENCE", "20ms")
    connection.execute("SAVEPOINT older")

    with psycopg.connect(dsn) as stranger, pytest.raises(BackendUnavailable, match="locked"), lease.guard(connection):
        connection.execute("ROLLBACK TO SAVEPOINT older")
        stranger.execute("SELECT FROM pglease_leases FOR UPDATE")


def test_a_lock_timeout_of_the_callers_own_that_is_shorter_counts(
    lease: HeldLease, connection: psycopg.Connection, dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(postgres_guard, "PATIENCE", "10min")
    connection.execute("SET lock_timeout = '20ms'")

    with locked_row(dsn, "job", "UPDATE"), pytest.raises(BackendUnavailable, match="locked"):
        lease.guard(connection)


def test_guards_of_several_transactions_stand_beside_each_other(lease: HeldLease, dsn: str) -> None:
    with psycopg.connect(dsn) as one, psycopg.connect(dsn) as two, lease.guard(one), lease.guard(two):
        lease.renew()


# -- rights

ROLES = ("pglease_app", "pglease_guard", "pglease_cleanup", "pglease_read")


@pytest.fixture
def as_role(server: RunServer, dsn: str) -> Iterator[Callable[[str], psycopg.Connection]]:
    """Return what connects in one of the roles, which the test's database knows for as long as the test runs."""
    name = str(psycopg.conninfo.conninfo_to_dict(dsn)["dbname"])
    suffix = f"_{name[-6:]}"
    with server.connect(name) as admin:
        for role in ROLES:
            admin.execute(f"CREATE ROLE {role}{suffix}")  # type: ignore[arg-type]
        grants = postgres_schema.grants(
            table_names(schema="public"), **{short: f"{role}{suffix}" for short, role in zip(SHORT, ROLES, strict=True)}
        )
        admin.execute(grants)  # type: ignore[arg-type]
        opened: list[psycopg.Connection] = []

        def connect(role: str) -> psycopg.Connection:
            opened.append(server.connect(name))
            opened[-1].execute(f"SET ROLE {role}{suffix}")  # type: ignore[arg-type]
            opened[-1].autocommit = False
            return opened[-1]

        yield connect
        for each in opened:
            each.close()
        for role in ROLES:
            admin.execute(f"DROP OWNED BY {role}{suffix}; DROP ROLE {role}{suffix}")  # type: ignore[arg-type]


SHORT = ("app", "guard", "cleanup", "read_only")


def test_the_rights_that_schema_grants_names_for_guards_are_enough(
    lease: HeldLease, as_role: Callable[[str], psycopg.Connection]
) -> None:
    guard = as_role("pglease_guard")

    with lease.guard(guard):
        assert matches(guard, lease)


def test_a_role_without_them_is_told_where_they_are_listed(
    lease: HeldLease, as_role: Callable[[str], psycopg.Connection]
) -> None:
    reader = as_role("pglease_read")

    with pytest.raises(BackendMisconfigured, match="pglease schema grants"):
        lease.guard(reader)


# -- what is left in the caller's transaction


def test_an_idle_guarded_transaction_is_bounded_by_the_ttl_and_nothing_is_left_after_it(
    lease: HeldLease, connection: psycopg.Connection
) -> None:
    lease.guard(connection)

    assert shown(connection, "idle_in_transaction_session_timeout") == "1min"
    if connection.info.server_version >= 170000:
        assert shown(connection, "transaction_timeout") == "1h"
    connection.rollback()
    assert shown(connection, "idle_in_transaction_session_timeout") == "0"
    assert shown(connection, "lock_timeout") == "0"
    assert not shown(connection, "pglease.guard")


@pytest.mark.parametrize(("own", "then"), [("5s", "5s"), ("1h", "1min"), ("1d", "1min"), ("1min", "1min")])
def test_a_bound_of_the_callers_own_is_lowered_and_never_raised(
    lease: HeldLease, connection: psycopg.Connection, own: str, then: str
) -> None:
    connection.execute(f"SET idle_in_transaction_session_timeout = '{own}'")  # type: ignore[arg-type]
    connection.commit()

    lease.guard(connection)

    assert shown(connection, "idle_in_transaction_session_timeout") == then
    connection.rollback()
    assert shown(connection, "idle_in_transaction_session_timeout") == own


@pytest.mark.parametrize("milliseconds", [1000, 1500, 60_000, 90_000, 3_600_000, 86_400_000, 2**31 - 1])
def test_a_bound_is_written_as_the_server_shows_it_so_that_the_next_guard_knows_it_for_ours(
    connection: psycopg.Connection, milliseconds: int
) -> None:
    connection.execute(f"SET idle_in_transaction_session_timeout = {milliseconds}")  # type: ignore[arg-type]

    assert shown(connection, "idle_in_transaction_session_timeout") == postgres_guard.shown(milliseconds)


def test_an_idle_guarded_transaction_is_ended_by_the_server_and_then_the_name_is_free(
    leases: PGLease, rival: PGLease, dsn: str
) -> None:
    lease = leases.wait_for_lease("short", ttl=4, timeout=10)
    assert not rival.try_acquire("short")  # and is connected
    idle = psycopg.connect(dsn)
    lease.guard(idle)
    expire(dsn, "short")

    assert not rival.try_acquire("short")
    wait_until(lambda: rival.try_acquire("short"))

    with pytest.raises(psycopg.Error):
        idle.execute("SELECT 1")
    idle.close()


# -- the call


def test_an_unawaited_guard_is_told(lease: HeldLease, dsn: str) -> None:
    async def forgetful() -> None:
        async with await psycopg.AsyncConnection.connect(dsn) as each:
            with pytest.warns(RuntimeWarning, match="nothing was guarded"):
                lease.guard(each)
            with pytest.raises(ConfigurationError, match="async with"), lease.guard(each):
                pass

    asyncio.run(forgetful())


def test_a_synchronous_guard_is_not_for_async_with(lease: HeldLease, connection: psycopg.Connection) -> None:
    async def mistaken() -> None:
        with pytest.raises(ConfigurationError, match="synchronous"):
            await lease.guard(connection)
        with pytest.raises(ConfigurationError, match="synchronous"):
            async with lease.guard(connection):
                pass

    asyncio.run(mistaken())


def test_a_block_that_raises_keeps_its_error_and_is_told_that_it_was_fenced_too(
    lease: HeldLease, connection: psycopg.Connection, dsn: str
) -> None:
    connection.execute("SAVEPOINT older")
    with pytest.raises(KeyError) as raised, lease.guard(connection):
        connection.execute("ROLLBACK TO SAVEPOINT older")
        steal(dsn, "job")
        raise KeyError("mine")

    assert "was refused" in raised.value.__notes__[0]
    assert connection.info.transaction_status == psycopg.pq.TransactionStatus.INERROR


def test_leaving_a_block_whose_transaction_has_ended_asks_nothing(lease: HeldLease, dsn: str) -> None:
    with psycopg.connect(dsn, autocommit=True) as each:
        each.execute("BEGIN")
        with lease.guard(each):
            each.execute("COMMIT")
            steal(dsn, "job")


def test_a_guard_after_the_end_is_refused_whatever_the_connection_is(lease: HeldLease) -> None:
    lease.release()

    with pytest.raises(FencedError, match="it was released"):
        lease.guard(None)


def test_a_guard_makes_nobody_believe_any_longer(lease: HeldLease, connection: psycopg.Connection, dsn: str) -> None:
    term, record = lease._hold.term, execute(dsn, "SELECT l::text FROM pglease_leases l")

    lease.guard(connection)
    connection.commit()

    assert lease._hold.term is term
    assert execute(dsn, "SELECT l::text FROM pglease_leases l") == record


def test_a_store_that_cannot_fence_says_so() -> None:
    with PGLease(MemoryBackend()) as leases:
        lease = leases.wait_for_lease("job", timeout=5)

        with pytest.raises(ConfigurationError, match="transactional_fencing"):
            lease.guard(None)
        with pytest.raises(ConfigurationError, match="transactional_fencing"):
            lease.fence_sql()


def _release_into_min_hold(lease: HeldLease, dsn: str) -> None:
    backend = PostgresBackend(dsn)
    assert isinstance(backend.release("job", lease._hold.lease_id, budget(), min_hold=60), Released)
    backend.close()


ENDS: dict[str, Callable[[HeldLease, str], object]] = {
    "released, and waited out": _release_into_min_hold,
    "forced": lambda _lease, dsn: execute(dsn, "UPDATE pglease_leases SET lease_id = NULL"),
    "over": lambda _lease, dsn: expire(dsn, "job"),
    "taken": lambda _lease, dsn: steal(dsn, "job"),
    "unknown to the store": lambda _lease, dsn: execute(dsn, "DELETE FROM pglease_leases"),
}


@pytest.mark.parametrize("end", ENDS)
def test_however_a_hold_has_ended_its_guard_is_refused_and_its_fence_matches_no_row(
    lease: HeldLease, connection: psycopg.Connection, dsn: str, end: str
) -> None:
    ENDS[end](lease, dsn)
    assert lease.held, "this test is about what the server says"

    assert not matches(connection, lease)
    with pytest.raises(FencedError):
        lease.guard(connection)


def test_a_guard_is_one_statement_and_one_round_trip(
    lease: HeldLease, connection: psycopg.Connection, tmp_path: Path
) -> None:
    lease.guard(connection)  # from now on it is known where the lease is
    with (tmp_path / "trace").open("w+") as said:
        connection.pgconn.trace(said.fileno())
        lease.guard(connection)
        connection.pgconn.untrace()
        said.seek(0)
        messages = re.findall(r"\t[FB]\t\d+\t(\w+)", said.read())

    assert messages.count("Execute") == messages.count("ReadyForQuery") == 1


def test_a_hold_of_a_closed_client_is_over(lease: HeldLease, leases: PGLease, connection: psycopg.Connection) -> None:
    leases.close()

    with pytest.raises(FencedError) as refused:
        lease.guard(connection)

    assert isinstance(refused.value.__cause__, BackendClosed)


def test_in_a_pipeline_the_answer_is_waited_for(lease: HeldLease, connection: psycopg.Connection, dsn: str) -> None:
    with connection.pipeline():
        connection.execute("SELECT 1")
        lease.guard(connection)
    connection.rollback()
    steal(dsn, "job")

    with pytest.raises(FencedError), connection.pipeline():
        connection.execute("SELECT 1")
        lease.guard(connection)


def test_any_factories_of_rows_and_cursors_do(lease: HeldLease, dsn: str) -> None:
    def refuse(_cursor: Any) -> Any:
        raise AssertionError("these rows are not the caller's")

    with psycopg.connect(dsn, row_factory=refuse, cursor_factory=psycopg.RawCursor) as each:
        lease.guard(each)


# -- atomic blocks in each other


def test_an_inner_atomic_block_that_is_rolled_back_leaves_an_outer_guard_alone_and_takes_its_own_along(
    lease: HeldLease, rival: PGLease, dsn: str
) -> None:
    alias = django_site.alias(dsn)
    from django.db import connections
    from django.db.transaction import atomic

    here = connections[alias]
    with atomic(using=alias):
        with pytest.raises(ZeroDivisionError), atomic(using=alias), lease.guard(here):
            raise ZeroDivisionError
        steal(dsn, "job")  # the guard is gone, and with it all that was written under it

        with pytest.raises(FencedError), atomic(using=alias):
            lease.guard(here)
    with pytest.raises(FencedError), atomic(using=alias):
        lease.guard(here)
    here.close()


def test_a_guard_outside_an_atomic_block_outlives_the_blocks_inside_it(
    lease: HeldLease, rival: PGLease, dsn: str
) -> None:
    alias = django_site.alias(dsn)
    from django.db import connections
    from django.db.transaction import atomic

    with atomic(using=alias), lease.guard(connections[alias]):
        with pytest.raises(ZeroDivisionError), atomic(using=alias):
            raise ZeroDivisionError
        assert rival.force_release("job", 1)
        assert not rival.try_acquire("job")
    assert rival.try_acquire("job")
    connections[alias].close()


# -- the predicate


def test_a_fenced_statement_changes_its_rows_and_a_stale_one_none(
    lease: HeldLease, connection: psycopg.Connection, dsn: str, data: psycopg.Connection
) -> None:
    fence = lease.fence_sql()
    change = f"UPDATE report SET body = %s WHERE id = %s AND {fence.sql}"

    assert connection.execute(change, ["mine", 1, *fence.params]).rowcount == 1  # type: ignore[arg-type]
    connection.commit()
    steal(dsn, "job")
    assert connection.execute(change, ["stale", 1, *fence.params]).rowcount == 0  # type: ignore[arg-type]


def test_a_fence_keeps_others_out_until_the_transaction_ends(
    lease: HeldLease, connection: psycopg.Connection, rival: PGLease
) -> None:
    assert matches(connection, lease)
    assert rival.force_release("job", 1)

    assert not rival.try_acquire("job")
    connection.rollback()
    assert rival.try_acquire("job")


def test_the_fence_of_a_hold_that_is_over_here_matches_nothing(
    lease: HeldLease, connection: psycopg.Connection
) -> None:
    lease.release()

    assert not matches(connection, lease)


def test_each_style_of_parameters_reaches_the_server(lease: HeldLease, dsn: str, data: psycopg.Connection) -> None:
    with psycopg.connect(dsn) as each:
        by_name = lease.fence_sql("pyformat")
        assert each.execute(f"SELECT 1 WHERE {by_name.sql}", by_name.params).fetchall() == [(1,)]  # type: ignore[arg-type]
    engine = sqlalchemy.create_engine(address(dsn, ALCHEMY_DRIVERS[0]))
    with engine.connect() as each_:
        named = lease.fence_sql("named")
        text = sqlalchemy.text(f"UPDATE report SET body = :body WHERE {named.sql}")
        assert each_.execute(text, {"body": "x", **named.params}).rowcount == 1  # type: ignore[dict-item]
    engine.dispose()

    async def numbered() -> None:
        each = await asyncpg.connect(dsn)
        fence = lease.fence_sql("numeric_dollar", start=2)
        assert await each.execute(f"UPDATE report SET body = $1 WHERE {fence.sql}", "y", *fence.params) == "UPDATE 1"
        await each.close()

    asyncio.run(numbered())
    assert lease.fence_sql("qmark").sql.count("?") == 3
    assert ":4" in lease.fence_sql("numeric", start=2).sql
    with pytest.raises(ConfigurationError, match="paramstyle must be one of"):
        lease.fence_sql("percent")  # type: ignore[arg-type]
