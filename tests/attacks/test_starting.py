"""First uses: many at once, roles with few rights, odd sessions, odd databases, the wrong server first."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import psycopg
import pytest
from psycopg import sql as compose

from pglease import BackendError, BackendMisconfigured, BackendUnavailable, PGLease
from pglease.testing.local_postgres import LocalPostgres
from pglease.testing.local_replica import LocalReplica
from tests.attacks.world import Child, all_at_once, row_locked, sql

STARTER = """
    import os, sys
    from pglease import PGLease
    print("ready")
    for table in sys.stdin.readline().split():
        leases = PGLease(os.environ["PGLEASE_URL"], table_name=table)
        print(leases.try_acquire("job", ttl=60, heartbeat=False), leases.get_lease("job").fencing_token)
        sys.stdin.readline()
        leases.close()
"""


def option(dsn: str, **settings: str) -> str:
    """Return the DSN with settings for its sessions."""
    text = " ".join(f"-c {name}={value}" for name, value in settings.items())
    return psycopg.conninfo.make_conninfo(dsn, options=text)


@pytest.mark.parametrize("count", [8, pytest.param(20, marks=pytest.mark.long)])
def test_processes_that_start_at_once_on_an_empty_database_make_one_table(
    dsn: str, child: Callable[..., Child], count: int
) -> None:
    starters = [child(STARTER) for _ in range(count)]
    for starter in starters:
        assert starter.line() == "ready"

    tables = ["one", "two"]
    for starter in starters:
        starter.say(" ".join(tables))
    for table in tables:
        answers = sorted(starter.line() for starter in starters)
        assert answers == ["False 1"] * (count - 1) + ["True 1"], table
        for starter in starters:
            starter.say()
    for starter in starters:
        assert starter.rest() == []


@pytest.fixture
def poor_dsn(admin: psycopg.Connection, dsn: str) -> Iterator[str]:
    """A DSN of a role that may log in, and may create nothing."""
    name = f"poor_{admin.info.dbname}"
    admin.execute(compose.SQL("CREATE ROLE {} LOGIN").format(compose.Identifier(name)))
    admin.execute("REVOKE CREATE ON SCHEMA public FROM PUBLIC")
    yield psycopg.conninfo.make_conninfo(dsn, user=name, password="", host=admin.info.host, port=admin.info.port)
    admin.execute(compose.SQL("DROP OWNED BY {}").format(compose.Identifier(name)))
    admin.execute(compose.SQL("DROP ROLE {}").format(compose.Identifier(name)))


def test_a_role_that_may_not_create_uses_the_table_that_its_dba_made(
    dsn: str, poor_dsn: str, client: Callable[..., PGLease]
) -> None:
    PGLease(dsn).list_leases()
    role = psycopg.conninfo.conninfo_to_dict(poor_dsn)["user"]
    grants = "GRANT SELECT, INSERT, UPDATE ON pglease_leases TO {0}; GRANT SELECT ON pglease_leases_meta TO {0}"
    with psycopg.connect(dsn, autocommit=True) as dba:
        dba.execute(grants.format(role).encode())
    leases = client(poor_dsn)

    assert leases.try_acquire("job", ttl=60)
    assert leases.held("job").ensure(30)  # type: ignore[union-attr]
    assert leases.release("job")
    with pytest.raises(BackendMisconfigured, match="DELETE"):
        leases.cleanup_expired()
    sql(dsn, "DROP TABLE pglease_leases, pglease_leases_meta")


def test_a_role_that_may_not_create_is_told_what_is_missing_and_what_mends_it(
    poor_dsn: str, client: Callable[..., PGLease]
) -> None:
    leases = client(poor_dsn)

    with pytest.raises(BackendMisconfigured, match=r"pglease_leases is missing.*may not create.*GRANT CREATE"):
        leases.try_acquire("job")


def test_an_empty_search_path_is_named_and_a_schema_that_is_said_works(
    dsn: str, client: Callable[..., PGLease]
) -> None:
    pathless = option(dsn, search_path="")

    with pytest.raises(BackendMisconfigured, match="search_path"):
        client(pathless).try_acquire("job")
    assert client(pathless, schema="public").try_acquire("job", ttl=60)


def test_a_read_only_session_is_named(dsn: str, client: Callable[..., PGLease]) -> None:
    leases = client(option(dsn, default_transaction_read_only="on"))

    with pytest.raises(BackendUnavailable, match="read-only"), leases.acquire("job", wait=0.5):
        pytest.fail("nothing can be held there")


@pytest.mark.parametrize("isolation", ["serializable", "repeatable\\ read"])
def test_a_stricter_default_isolation_costs_no_call(dsn: str, client: Callable[..., PGLease], isolation: str) -> None:
    clients = [client(option(dsn, default_transaction_isolation=isolation)) for _ in range(6)]
    got: list[int] = []

    def churn(leases: PGLease) -> None:
        for _ in range(40):
            with leases.acquire("churned", ttl=30) as lease:
                if lease:
                    got.append(lease.fencing_token)

    all_at_once([lambda each=each: churn(each) for each in clients])

    assert sorted(got) == list(range(1, len(got) + 1))


@pytest.mark.parametrize("setting", ["statement_timeout", "lock_timeout"])
def test_a_locked_row_is_a_no_also_under_a_time_out_of_the_server(
    dsn: str, client: Callable[..., PGLease], setting: str
) -> None:
    leases = client(option(dsn, **{setting: "500"}))
    assert leases.try_acquire("job", ttl=1, heartbeat=False)
    sql(dsn, "UPDATE pglease_leases SET expires_at = clock_timestamp()")

    with row_locked(dsn, "job"):
        assert client(option(dsn, **{setting: "500"})).try_acquire("job", ttl=60) is False

    assert client(option(dsn, **{setting: "500"})).try_acquire("job", ttl=60)


@contextmanager
def database_with(admin: psycopg.Connection, encoding: str) -> Iterator[str]:
    """A database of that encoding."""
    name = f"{admin.info.dbname}_{encoding.lower()}"
    owner = admin.execute(
        "SELECT pg_get_userbyid(datdba) FROM pg_database WHERE datname = current_database()"
    ).fetchone()
    assert owner is not None
    statement = "CREATE DATABASE {} OWNER {} TEMPLATE template0 ENCODING {} LC_COLLATE 'C' LC_CTYPE 'C'"
    admin.execute(
        compose.SQL(statement).format(compose.Identifier(name), compose.Identifier(owner[0]), compose.Literal(encoding))
    )
    try:
        yield name
    finally:
        admin.execute(compose.SQL("DROP DATABASE {} WITH (FORCE)").format(compose.Identifier(name)))


@pytest.mark.parametrize("encoding", ["SQL_ASCII", "LATIN1", "UTF8"])
def test_a_name_survives_any_encoding_of_the_database_or_is_refused_as_ours(
    admin: psycopg.Connection, dsn: str, encoding: str
) -> None:
    with database_with(admin, encoding) as name, PGLease(dsn.rpartition("/")[0] + f"/{name}") as leases:
        for text in ("plain", "Ärger", "日本語"):
            try:
                assert leases.try_acquire(text, ttl=60)
            except BackendError as error:
                assert (encoding, text) == ("LATIN1", "日本語"), error  # noqa: PT017
            else:
                assert leases.get_lease(text).name == text  # type: ignore[union-attr]
                assert not leases.try_acquire(text)
                assert leases.release(text)


def test_a_table_in_a_schema_of_its_own_is_found_and_kept_apart(dsn: str, client: Callable[..., PGLease]) -> None:
    sql(dsn, 'CREATE SCHEMA "Odd_Schema"')
    odd = client(schema="Odd_Schema", table_name="Odd_Table")
    plain = client()

    assert odd.try_acquire("job", ttl=60)
    assert plain.try_acquire("job", ttl=60)

    assert sql(dsn, 'SELECT task_name FROM "Odd_Schema"."Odd_Table"') == [("job",)]


@pytest.fixture(scope="module")
def primary_and_standby(canary: str) -> Iterator[tuple[str, str]]:
    """The DSNs of a primary and of its standby."""
    with LocalPostgres(user="app", password=canary) as primary, LocalReplica(primary) as standby:
        yield primary.dsn, standby.dsn


beside_a_standby = pytest.mark.xdist_group("primary and standby")


@beside_a_standby
def test_with_the_standby_named_first_the_primary_is_found(primary_and_standby: tuple[str, str]) -> None:
    primary, standby = (psycopg.conninfo.conninfo_to_dict(dsn) for dsn in primary_and_standby)
    both = psycopg.conninfo.make_conninfo(
        primary_and_standby[0],
        host=f"{standby['host']},{primary['host']}",
        port=f"{standby['port']},{primary['port']}",
    )

    with PGLease(both) as leases:
        assert leases.try_acquire("job", ttl=60)
        assert leases.release("job")


@beside_a_standby
def test_a_standby_alone_is_named(primary_and_standby: tuple[str, str]) -> None:
    with (
        PGLease(primary_and_standby[1]) as leases,
        pytest.raises(BackendUnavailable, match="standby"),
        leases.acquire("job", wait=2),
    ):
        pytest.fail("nothing can be held there")


@beside_a_standby
def test_a_standby_alone_is_a_mistake_for_the_hybrid_backend(primary_and_standby: tuple[str, str]) -> None:
    with (
        PGLease(f"hybrid+{primary_and_standby[1]}") as leases,
        pytest.raises(BackendMisconfigured, match="primary"),
    ):
        leases.try_acquire("job")


def test_building_a_client_connects_to_nothing_and_using_it_later_does(dsn: str) -> None:
    made: list[PGLease] = []
    threads = [threading.Thread(target=lambda: made.append(PGLease(dsn))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert sql(
        dsn, "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND application_name = 'pglease'"
    ) == [(0,)]
    assert sorted(all_at_once([lambda each=each: each.try_acquire("job", ttl=60) for each in made])) == [False] * 3 + [
        True
    ]
    for each in made:
        each.close()
