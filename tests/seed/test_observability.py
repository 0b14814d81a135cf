"""The 0.0.3 README, told again: reading the store, cleaning it, hearing of losses, and the table it published."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import psycopg
import pytest

from pglease import PGLease

PUBLISHED = """
CREATE TABLE IF NOT EXISTS pglease_leases (
    task_name VARCHAR(255) PRIMARY KEY,
    owner_id VARCHAR(255) NOT NULL,
    acquired_at TIMESTAMPTZ NOT NULL,
    expires_at TIMESTAMPTZ NOT NULL,
    heartbeat_at TIMESTAMPTZ NOT NULL
);
CREATE INDEX IF NOT EXISTS idx_pglease_expires_at ON pglease_leases(expires_at);
"""
REMAINING = """
SELECT task_name, owner_id, expires_at - NOW() AS remaining
FROM pglease_leases WHERE expires_at > NOW();
"""


@pytest.fixture
def database_connection(dsn: str) -> Iterator[psycopg.Connection]:
    """What an operator looks at the database with."""
    with psycopg.connect(dsn, autocommit=True) as connection:
        yield connection


@pytest.fixture
def pglease(dsn: str) -> Iterator[PGLease]:
    """The README's module-level object."""
    with PGLease(dsn, owner_id="pod-xyz-123") as leases:
        yield leases


def test_all_leases_are_listed_with_their_time_left(pglease: PGLease) -> None:
    assert pglease.try_acquire("a", ttl=60)
    assert pglease.try_acquire("b", ttl=120)

    lines = []
    for lease in pglease.list_leases():
        remaining = lease.time_remaining()
        lines.append(f"{lease.task_name}: {lease.owner_id} — {remaining:.0f}s left")

    assert lines == ["a: pod-xyz-123 — 60s left", "b: pod-xyz-123 — 120s left"]


def test_a_zombie_is_recognised_and_is_yet_not_taken_over(
    pglease: PGLease, dsn: str, database_connection: psycopg.Connection
) -> None:
    assert pglease.try_acquire("my-task", ttl=600)
    database_connection.execute("UPDATE pglease_leases SET heartbeat_at = heartbeat_at - interval '40 s'")

    with PGLease(dsn) as other:
        lease = other.get_lease("my-task")
        assert lease is not None
        assert lease.is_zombie(heartbeat_timeout=30)
        assert not lease.is_zombie(heartbeat_timeout=60)
        assert other.try_acquire("my-task", ttl=60) is False

        # What an operator who knows better does:
        assert other.force_release("my-task", lease.fencing_token)
        assert other.try_acquire("my-task", ttl=60) is True


def test_a_fresh_or_an_unknown_lease_is_no_zombie(pglease: PGLease) -> None:
    assert pglease.get_lease("my-task") is None
    assert pglease.try_acquire("my-task", ttl=60)
    lease = pglease.get_lease("my-task")
    assert lease is not None
    assert not lease.is_zombie(heartbeat_timeout=30)


def test_rows_of_crashed_workers_are_cleaned_up_and_counted(
    pglease: PGLease, database_connection: psycopg.Connection
) -> None:
    for place in range(3):
        assert pglease.try_acquire(f"crashed-{place}", ttl=600, heartbeat=False)
    assert pglease.try_acquire("alive", ttl=600)
    database_connection.execute(
        "UPDATE pglease_leases SET expires_at = clock_timestamp() - interval '1 s' WHERE task_name LIKE 'crashed%'"
    )

    deleted = pglease.cleanup_expired()

    assert f"Removed {deleted} stale lease(s)" == "Removed 3 stale lease(s)"
    assert [lease.task_name for lease in pglease.list_leases()] == ["alive"]


def test_a_lost_lease_is_told_by_its_name(dsn: str, database_connection: psycopg.Connection) -> None:
    told, names = threading.Event(), []

    def handle_lost(task_name: str) -> None:
        names.append(task_name)
        told.set()

    with PGLease(dsn, on_lease_lost=handle_lost) as pglease:
        assert pglease.try_acquire("my-task", ttl=1)
        database_connection.execute("DELETE FROM pglease_leases")

        assert told.wait(10)
        assert names == ["my-task"]


def test_a_healthy_system_has_no_zombie_threads(pglease: PGLease) -> None:
    assert pglease.try_acquire("my-task", ttl=1)
    time.sleep(1.2)

    zombies = pglease.heartbeat_manager.get_zombie_threads()

    assert not zombies


def test_the_published_query_says_who_holds_what(pglease: PGLease, database_connection: psycopg.Connection) -> None:
    assert pglease.try_acquire("held", ttl=60)
    assert pglease.try_acquire("given back", ttl=60)
    pglease.release("given back")

    ((name, owner, remaining),) = database_connection.execute(REMAINING).fetchall()

    assert (name, owner) == ("held", "pod-xyz-123")
    assert 50 < remaining.total_seconds() <= 60


def test_the_published_table_is_taken_over_where_it_stands_with_its_rows(
    dsn: str, database_connection: psycopg.Connection
) -> None:
    database_connection.execute(PUBLISHED)
    database_connection.execute(
        "INSERT INTO pglease_leases VALUES ('old', 'a 0.0.3 worker', now() - interval '2 h', now() - interval '1 h',"
        " now() - interval '1 h')"
    )

    with PGLease(dsn, owner_id="pod-xyz-123") as pglease:
        assert pglease.try_acquire("new", ttl=60)
        old = pglease.get_lease("old")
        assert old is not None
        assert (old.owner_id, old.is_expired()) == ("a 0.0.3 worker", True)
        assert pglease.try_acquire("old", ttl=60)

    rows = database_connection.execute("SELECT task_name, owner_id FROM pglease_leases ORDER BY 1").fetchall()
    assert rows == [("new", "pod-xyz-123"), ("old", "pod-xyz-123")]


def test_the_published_index_is_pointed_at_and_not_dropped(dsn: str, database_connection: psycopg.Connection) -> None:
    from pglease.backends.postgres import PostgresBackend

    database_connection.execute(PUBLISHED)
    backend = PostgresBackend(dsn)
    with PGLease(backend) as pglease:
        assert pglease.try_acquire("job", ttl=60)

    (finding,) = [check for check in backend.diagnose() if check.name == "indexes"]
    backend.close()

    assert finding.status == "warn"
    assert "idx_pglease_expires_at" in finding.remedy
    indexes = database_connection.execute("SELECT count(*) FROM pg_indexes WHERE indexname = 'idx_pglease_expires_at'")
    assert indexes.fetchone() == (1,)


def test_running_the_published_statement_again_changes_nothing(
    pglease: PGLease, database_connection: psycopg.Connection
) -> None:
    assert pglease.try_acquire("job", ttl=60)

    database_connection.execute(PUBLISHED.split(";", maxsplit=1)[0])

    held = pglease.held("job")
    assert held is not None
    assert held.ensure(50)
