"""Backends made by hand, and the connection factories: what the application lends stays the application's."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import psycopg
import pytest

from tests.documented_0_0_x.workers import Worker
from tests.support.worlds import wait_until

ROOT = Path(__file__).resolve().parents[2]

JOB = """
    with pglease.acquire("my-job", ttl=60) as acquired:
        if acquired:
            do_work()
"""

BY_HAND = """
    from pglease.backends.postgres import PostgresBackend

    backend = PostgresBackend(
        "postgresql://user:pass@localhost/db",
        connect_timeout=10,   # Seconds before a connection attempt times out
        pool_size=4,          # Max simultaneous DB connections (default: 1)
    )
    pglease = PGLease(backend)
"""


def test_a_backend_made_by_hand_answers_its_pools_number_of_threads_at_once(
    here: Worker, operator: psycopg.Connection, dsn: str
) -> None:
    here.run("from pglease import PGLease").run(BY_HAND)
    assert here.pglease.list_leases() == []  # the table is there
    busy = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'"
    answers: list[bool] = []
    threads = [
        threading.Thread(target=lambda place=place: answers.append(here.pglease.try_acquire(f"job-{place}")))
        for place in range(4)
    ]

    with psycopg.connect(dsn) as stranger:
        stranger.execute("LOCK TABLE pglease_leases IN ACCESS EXCLUSIVE MODE")
        for thread in threads:
            thread.start()
        assert wait_until(lambda: operator.execute(busy).fetchone() == (4,))
        stranger.rollback()

    for thread in threads:
        thread.join(20)
    assert answers == [True] * 4
    here.pglease.close()
    here.names["backend"].close()


PSYCOPG2_POOL = """
    from contextlib import contextmanager
    from psycopg2 import pool
    from psycopg2.extras import RealDictCursor
    from pglease import PGLease
    from pglease.backends.postgres import PostgresBackend

    pg_pool = pool.ThreadedConnectionPool(
        minconn=2, maxconn=10,
        dsn="postgresql://user:pass@host/db",
        cursor_factory=RealDictCursor,
    )

    @contextmanager
    def borrow():
        conn = pg_pool.getconn()
        try:
            yield conn
        finally:
            pg_pool.putconn(conn)

    backend = PostgresBackend.from_connection_factory(borrow)
    pglease = PGLease(backend)
"""
SQLALCHEMY = """
    from contextlib import contextmanager
    from sqlalchemy import create_engine
    from pglease import PGLease
    from pglease.backends.postgres import PostgresBackend

    engine = create_engine("postgresql+psycopg2://user:pass@host/db")

    @contextmanager
    def sa_conn():
        conn = engine.raw_connection()
        try:
            yield conn
        finally:
            conn.close()  # returns the connection to SQLAlchemy's pool

    backend = PostgresBackend.from_connection_factory(sa_conn)
    pglease = PGLease(backend)
"""
FACTORIES = {
    "psycopg2": (PSYCOPG2_POOL, "borrow", "pg_pool.closeall()"),
    "SQLAlchemy": (SQLALCHEMY, "sa_conn", "engine.dispose()"),
}


def lend(worker: Worker, factory: str) -> tuple[str, str]:
    """Run a factory's snippet; return the name of the factory and how its pool is shut down."""
    pytest.importorskip("psycopg2")
    snippet, name, shutdown = FACTORIES[factory]
    addresses = {"postgresql+psycopg2://user:pass@host/db": worker.dsn.replace("postgresql:", "postgresql+psycopg2:")}
    worker.run(snippet, instead=addresses if "+psycopg2" in snippet else None)
    return name, shutdown


def backends(worker: Worker, factory: str) -> list[int]:
    """The server processes behind two connections of the application's pool that are out at once."""
    with worker.names[factory]() as one, worker.names[factory]() as two:
        pids = []
        for lent in (one, two):
            raw = getattr(lent, "driver_connection", lent)
            assert raw.closed == 0
            pids.append(raw.info.backend_pid)
            lent.rollback()
    return sorted(pids)


@pytest.mark.parametrize("factory", FACTORIES)
def test_a_lent_connection_leases_like_our_own(here: Worker, there: Worker, factory: str) -> None:
    _, shutdown = lend(here, factory)

    def look_and_try() -> None:
        there.run(JOB)
        (lease,) = there.pglease.list_leases()
        assert (lease.task_name, lease.owner_id) == ("my-job", here.pglease.owner_id)
        assert 55 < here.pglease.get_lease("my-job").time_remaining() <= 60  # type: ignore[union-attr]

    there.can("do_work")
    here.can("do_work", meanwhile=look_and_try).run(JOB)
    there.run(JOB)

    assert (here.did, there.did) == (["do_work"], ["do_work"])
    assert here.pglease.cleanup_expired() == 1
    here.pglease.close()
    here.run(shutdown)


@pytest.mark.parametrize("factory", FACTORIES)
def test_a_lease_on_lent_connections_is_renewed(
    here: Worker, there: Worker, operator: psycopg.Connection, factory: str
) -> None:
    _, shutdown = lend(here, factory)
    assert here.pglease.try_acquire("my-job", ttl=2)
    past = "SELECT heartbeat_at > acquired_at + interval '2.1 s' FROM pglease_leases"

    wait_until(lambda: operator.execute(past).fetchone() == (True,))

    assert here.pglease.held("my-job")
    assert there.pglease.try_acquire("my-job") is False
    here.pglease.close()
    here.run(shutdown)


@pytest.mark.parametrize("factory", FACTORIES)
def test_closing_closes_no_connection_of_the_applications(here: Worker, factory: str) -> None:
    name, shutdown = lend(here, factory)
    before = backends(here, name)
    here.can("do_work").run(JOB)
    assert here.pglease.try_acquire("left to close()", ttl=60)

    here.pglease.close()
    here.names["backend"].close()

    assert backends(here, name) == before
    here.run(shutdown)


PLAIN_PSYCOPG2 = """
from contextlib import contextmanager
import psycopg2
from pglease import PGLease
from pglease.backends.postgres import PostgresBackend

# Shared connection pool, created once at application startup
_pool = psycopg2.pool.ThreadedConnectionPool(2, 10, dsn=DATABASE_URL)

@contextmanager
def get_db_conn():
    conn = _pool.getconn()
    try:
        yield conn
    finally:
        _pool.putconn(conn)

# Single PGLease instance reused across all requests
pglease = PGLease(PostgresBackend.from_connection_factory(get_db_conn))
"""
DJANGO = """
from contextlib import contextmanager
from django.db import connection as django_conn
from pglease import PGLease
from pglease.backends.postgres import PostgresBackend

@contextmanager
def django_factory():
    django_conn.ensure_connection()
    yield django_conn.connection
    # pglease commits/rolls back; Django manages the connection lifetime.

backend = PostgresBackend.from_connection_factory(django_factory)
pglease = PGLease(backend)
"""
SETTINGS = """
import os
from urllib.parse import urlsplit
from django.conf import settings
url = urlsplit(os.environ["DATABASE_URL"])
settings.configure(DATABASES={"default": {
    "ENGINE": "django.db.backends.postgresql", "NAME": url.path[1:], "USER": url.username,
    "PASSWORD": url.password, "HOST": url.hostname, "PORT": url.port}})
import django
django.setup()
"""
WORK = """
with PGLease(os.environ["DATABASE_URL"], owner_id="other") as other:
    with pglease.acquire("my-job", ttl=60) as acquired:
        if acquired:
            print("at work", other.try_acquire("my-job"), pglease.try_acquire("my-job"))
    print("afterwards", other.try_acquire("my-job"))
pglease.close()
"""


def run_alone(script: str, dsn: str) -> list[str]:
    """Run a script in a process that has imported nothing yet; return what it says."""
    environment = {**os.environ, "DATABASE_URL": dsn, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-W", "error", "-c", script]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert ran.returncode == 0, ran.stderr
    assert "Traceback" not in ran.stderr
    return ran.stdout.splitlines()


def test_the_pool_of_an_application_that_imports_psycopg2_alone_lends_connections(dsn: str) -> None:
    pytest.importorskip("psycopg2")
    looking = """
with get_db_conn() as conn, conn.cursor() as cursor:
    cursor.execute("SELECT 1")
    print("still open", *cursor.fetchone())
_pool.closeall()
"""

    said = run_alone("import os; DATABASE_URL = os.environ['DATABASE_URL']" + PLAIN_PSYCOPG2 + WORK + looking, dsn)

    assert said == ["at work False False", "afterwards True", "still open 1"]


def test_djangos_own_connection_is_lent_and_stays_open(dsn: str) -> None:
    pytest.importorskip("django")
    looking = """
same = django_conn.connection
with django_conn.cursor() as cursor:
    cursor.execute("SELECT 1")
    print("still open", *cursor.fetchone(), django_conn.connection is same)
django_conn.close()
"""

    said = run_alone(SETTINGS + DJANGO + WORK + looking, dsn)

    assert said == ["at work False False", "afterwards True", "still open 1 True"]
