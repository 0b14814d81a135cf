"""Connections that the application lends: rows of any shape, both drivers, and its transactions are its own."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from typing import Any

import psycopg
import psycopg2
import psycopg2.extras
import pytest
from psycopg import rows

from pglease import ConfigurationError, PGLease
from pglease.backends.postgres import PostgresBackend
from tests.attacks.world import Child, all_at_once, is_so_for, lapse, sql


def two(dsn: str, autocommit: bool, **options: Any) -> Any:
    connection = psycopg2.connect(dsn, **options)
    connection.autocommit = autocommit
    return connection


def three(dsn: str, autocommit: bool, **options: Any) -> Any:
    return psycopg.connect(dsn, autocommit=autocommit, **options)


DRIVERS = {
    "psycopg2 tuples": (two, {}),
    "psycopg2 real dicts": (two, {"cursor_factory": psycopg2.extras.RealDictCursor}),
    "psycopg2 dict rows": (two, {"cursor_factory": psycopg2.extras.DictCursor}),
    "psycopg2 named tuples": (two, {"cursor_factory": psycopg2.extras.NamedTupleCursor}),
    "psycopg tuples": (three, {}),
    "psycopg dicts": (three, {"row_factory": rows.dict_row}),
    "psycopg named tuples": (three, {"row_factory": rows.namedtuple_row}),
}


def lender(dsn: str, driver: str, autocommit: bool) -> Callable[[], Any]:
    """Return a factory that lends a new connection each time."""
    connect, options = DRIVERS[driver]

    @contextmanager
    def lend() -> Iterator[Any]:
        with closing(connect(dsn, autocommit, **options)) as connection:
            yield connection

    return lend


@pytest.mark.parametrize("autocommit", [True, False], ids=["autocommit", "transactions"])
@pytest.mark.parametrize("driver", DRIVERS)
def test_every_verb_works_with_rows_of_any_shape(
    dsn: str, client: Callable[..., PGLease], rival: PGLease, driver: str, autocommit: bool
) -> None:
    leases = client(PostgresBackend.from_connection_factory(lender(dsn, driver, autocommit)), owner_id="lent")

    assert leases.try_acquire("job", ttl=1.5)
    assert not rival.try_acquire("job")
    assert is_so_for(2.0, lambda: leases.held("job") is not None)  # renewed through the factory
    assert rival.try_acquire("theirs", ttl=60)
    with leases.acquire("theirs") as refused:
        assert not refused
        assert refused.held_by == "rival"
    record = leases.get_lease("job")
    assert record is not None
    assert (record.owner_id, record.fencing_token) == ("lent", 1)
    assert [lease.name for lease in leases.list_leases()] == ["job", "theirs"]
    assert leases.release("job")
    assert leases.cleanup_expired() == 1
    assert leases.try_acquire("job", ttl=60)
    assert rival.get_lease("job").fencing_token == 2  # type: ignore[union-attr]


@pytest.mark.parametrize("autocommit", [True, False], ids=["autocommit", "transactions"])
def test_a_lapsed_lease_has_one_winner_through_borrowed_connections(
    dsn: str, client: Callable[..., PGLease], autocommit: bool
) -> None:
    connections = [two(dsn, autocommit) for _ in range(6)]
    clients = []
    for connection in connections:

        @contextmanager
        def lend(connection: Any = connection) -> Iterator[Any]:
            yield connection

        clients.append(client(PostgresBackend.from_connection_factory(lend)))
    assert [each.try_acquire("job", heartbeat=False) for each in clients] == [True, *[False] * 5]

    for turn in range(40):
        lapse(dsn, "job")
        answers = all_at_once([lambda each=each: each.try_acquire("job", heartbeat=False) for each in clients])
        assert sorted(answers) == [False] * 5 + [True]
        assert clients[0].get_lease("job").fencing_token == turn + 2  # type: ignore[union-attr]
    for each in clients:
        each.close()
    for connection in connections:
        connection.close()


@pytest.mark.parametrize("commit", [True, False], ids=["then committed", "then rolled back"])
@pytest.mark.parametrize("connect", [two, three], ids=["psycopg2", "psycopg"])
def test_a_connection_inside_a_transaction_is_refused_and_the_callers_rows_are_neither_committed_nor_lost(
    dsn: str, client: Callable[..., PGLease], connect: Callable[..., Any], commit: bool
) -> None:
    sql(dsn, "CREATE TABLE work (what text)")
    application = connect(dsn, autocommit=False)

    @contextmanager
    def lend() -> Iterator[Any]:
        yield application

    leases = client(PostgresBackend.from_connection_factory(lend))
    assert leases.try_acquire("before", ttl=60)
    application.cursor().execute("INSERT INTO work VALUES ('mine')")

    for call in (
        lambda: leases.try_acquire("job"),
        lambda: leases.get_lease("before"),
        leases.list_leases,
        leases.cleanup_expired,
    ):
        with pytest.raises(ConfigurationError, match="inside a transaction"):
            call()

    assert sql(dsn, "SELECT * FROM work") == []
    (application.commit if commit else application.rollback)()
    assert sql(dsn, "SELECT * FROM work") == ([("mine",)] if commit else [])
    assert leases.release("before")
    leases.close()
    application.close()


def test_renewals_never_end_the_transaction_of_a_connection_that_is_lent_to_them_too(
    dsn: str, client: Callable[..., PGLease]
) -> None:
    sql(dsn, "CREATE TABLE work (what text)")
    application = two(dsn, autocommit=False)

    @contextmanager
    def lend() -> Iterator[Any]:
        yield application

    leases = client(PostgresBackend.from_connection_factory(lend))
    with leases.acquire("job", ttl=6, on_lost="log"):
        application.cursor().execute("INSERT INTO work VALUES ('mine')")
        time.sleep(2.8)  # longer than a renewal's turn
        assert sql(dsn, "SELECT * FROM work") == []
        application.rollback()
    assert sql(dsn, "SELECT * FROM work") == []
    leases.close()
    application.close()


def test_closing_a_client_leaves_lent_connections_open_and_as_they_were(
    dsn: str, client: Callable[..., PGLease]
) -> None:
    application = three(dsn, autocommit=False)

    @contextmanager
    def lend() -> Iterator[Any]:
        yield application

    leases = client(PostgresBackend.from_connection_factory(lend))
    assert leases.try_acquire("job", ttl=60)
    leases.close()

    assert not application.closed
    assert application.autocommit is False
    assert application.info.transaction_status == psycopg.pq.TransactionStatus.IDLE
    assert application.execute("SHOW transaction_isolation").fetchone() == ("read committed",)
    application.close()


DJANGO = """
    import os
    from contextlib import contextmanager
    from urllib.parse import urlsplit
    import django
    from django.conf import settings
    url = urlsplit(os.environ["PGLEASE_URL"])
    settings.configure(DATABASES={"default": {
        "ENGINE": "django.db.backends.postgresql", "NAME": url.path[1:], "USER": url.username,
        "PASSWORD": url.password, "HOST": url.hostname, "PORT": url.port}})
    django.setup()
    from django.db import connection as django_conn, transaction
    from pglease import ConfigurationError, PGLease
    from pglease.backends.postgres import PostgresBackend

    @contextmanager
    def django_factory():
        django_conn.ensure_connection()
        yield django_conn.connection

    pglease = PGLease(PostgresBackend.from_connection_factory(django_factory))
"""


SAID = "renews its leases on the application's own connections"


def test_an_atomic_block_of_django_keeps_its_promise_around_a_refused_lease(
    dsn: str, child: Callable[..., Child]
) -> None:
    sql(dsn, "CREATE TABLE work (what text)")

    told = child(
        DJANGO
        + """
    try:
        with transaction.atomic():
            django_conn.cursor().execute("INSERT INTO work VALUES ('mine')")
            pglease.try_acquire("job")
    except ConfigurationError as error:
        print("inside a transaction" in str(error))
    pglease.close()
    """
    )

    assert told.rest(logged=SAID) == ["True"]
    assert sql(dsn, "SELECT * FROM work") == []


def test_many_leases_cost_a_django_application_few_connections(dsn: str, child: Callable[..., Child]) -> None:
    told = child(
        DJANGO
        + """
    import time
    for place in range(5):
        assert pglease.try_acquire(f"job-{place}", ttl=3)
    time.sleep(4)
    print(len(pglease.holding()))
    with django_conn.cursor() as cursor:
        cursor.execute("SELECT count(*) FROM pg_stat_activity WHERE datname = current_database()")
        print(cursor.fetchone()[0], flush=True)
    pglease.close()
    os._exit(0)  # Django leaves the connections of other threads to the garbage collector
    """
    )

    held, connections = told.rest(logged=SAID)
    assert held == "5"
    assert int(connections) <= 2
