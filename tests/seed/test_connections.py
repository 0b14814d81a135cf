"""The 0.0.3 README, told again: backends by hand, and connections that the application lends."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psycopg2.pool
import pytest
from psycopg2 import pool
from psycopg2.extras import RealDictCursor
from sqlalchemy import create_engine

from pglease import PGLease
from pglease.backends.postgres import PostgresBackend

ROOT = Path(__file__).resolve().parents[2]


def assert_it_leases(pglease: PGLease, dsn: str) -> None:
    """Acquire, contend, read, renew, release."""
    with PGLease(dsn, owner_id="other") as other:
        with pglease.acquire("my-job", ttl=60) as acquired:
            assert acquired
            assert not other.try_acquire("my-job")
            acquired.renew()
        assert other.try_acquire("my-job", ttl=60)
        with pglease.acquire("my-job", ttl=60) as acquired:
            assert not acquired
        assert [lease.owner_id for lease in pglease.list_leases()] == ["other"]
        lease = pglease.get_lease("my-job")
        assert lease is not None
        assert lease.fencing_token == 2


def test_a_backend_by_hand_takes_a_connect_timeout_and_a_pool_size(dsn: str) -> None:
    backend = PostgresBackend(
        dsn,
        connect_timeout=10,  # Seconds before a connection attempt times out
        pool_size=4,  # Max simultaneous DB connections (default: 1)
    )
    pglease = PGLease(backend)

    assert_it_leases(pglease, dsn)
    pglease.close()
    backend.close()


def test_a_psycopg2_pool_of_dicts_lends_connections_and_stays_the_applications(dsn: str) -> None:
    pg_pool = pool.ThreadedConnectionPool(minconn=2, maxconn=10, dsn=dsn, cursor_factory=RealDictCursor)

    @contextmanager
    def borrow() -> Iterator[Any]:
        conn = pg_pool.getconn()
        try:
            yield conn
        finally:
            pg_pool.putconn(conn)

    backend = PostgresBackend.from_connection_factory(borrow)
    pglease = PGLease(backend)

    assert_it_leases(pglease, dsn)
    pglease.close()
    backend.close()
    with borrow() as conn, conn.cursor() as cursor:
        cursor.execute("SELECT 1 AS one")
        assert cursor.fetchone() == {"one": 1}
    pg_pool.closeall()


def test_a_psycopg2_pool_of_plain_rows_lends_connections(dsn: str) -> None:
    _pool = psycopg2.pool.ThreadedConnectionPool(2, 10, dsn=dsn)

    @contextmanager
    def get_db_conn() -> Iterator[Any]:
        conn = _pool.getconn()
        try:
            yield conn
        finally:
            _pool.putconn(conn)

    pglease = PGLease(PostgresBackend.from_connection_factory(get_db_conn))

    assert_it_leases(pglease, dsn)
    pglease.close()
    _pool.closeall()


@pytest.mark.parametrize("driver", ["psycopg2", "psycopg"])
def test_a_sqlalchemy_engine_lends_raw_connections(dsn: str, driver: str) -> None:
    engine = create_engine(dsn.replace("postgresql://", f"postgresql+{driver}://"))

    @contextmanager
    def sa_conn() -> Iterator[Any]:
        conn = engine.raw_connection()
        try:
            yield conn
        finally:
            conn.close()  # returns the connection to SQLAlchemy's pool

    backend = PostgresBackend.from_connection_factory(sa_conn)
    pglease = PGLease(backend)

    assert_it_leases(pglease, dsn)
    pglease.close()
    engine.dispose()


DJANGO = """
import os
from django.conf import settings
settings.configure(DATABASES={"default": {
    "ENGINE": "django.db.backends.postgresql", "NAME": os.environ["DBNAME"], "USER": os.environ["DBUSER"],
    "PASSWORD": os.environ["DBPASS"], "HOST": os.environ["DBHOST"], "PORT": os.environ["DBPORT"]}})
import django
django.setup()

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

with pglease.acquire("my-job", ttl=60) as acquired:
    print(bool(acquired), pglease.try_acquire("my-job"))
print([lease.task_name for lease in pglease.list_leases()], pglease.try_acquire("my-job"))
pglease.close()
with django_conn.cursor() as cursor:
    cursor.execute("SELECT count(*) FROM pglease_leases")
    print(cursor.fetchone())
django_conn.close()
"""


def test_djangos_own_connection_is_lent(dsn: str) -> None:
    url = urlsplit(dsn)
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "DBNAME": url.path[1:],
        "DBUSER": str(url.username),
        "DBPASS": str(url.password),
        "DBHOST": str(url.hostname),
        "DBPORT": str(url.port),
    }

    ran = subprocess.run(
        [sys.executable, "-W", "error", "-c", DJANGO], env=environment, capture_output=True, text=True, check=False
    )

    assert (ran.returncode, ran.stdout.splitlines()) == (0, ["True False", "[] True", "(1,)"]), ran.stderr
    assert "Traceback" not in ran.stderr


def test_closing_a_factory_backend_closes_nothing_of_the_applications(dsn: str) -> None:
    application = psycopg2.connect(dsn)

    @contextmanager
    def lend() -> Iterator[Any]:
        yield application

    backend: Any = PostgresBackend.from_connection_factory(lend)
    pglease = PGLease(backend)
    assert pglease.try_acquire("job", ttl=60)
    pglease.close()
    backend.close()

    assert application.closed == 0
    application.close()
