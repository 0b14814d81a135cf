"""Looking at leases, cleaning up, and the table that was published."""

from __future__ import annotations

import re
import types
from collections.abc import Callable

import psycopg
import pytest

from pglease.backends.postgres import PostgresBackend
from tests.documented_0_0_x.workers import Worker
from tests.support.worlds import expire, wait_until

LISTING = """
    for lease in pglease.list_leases():
        remaining = lease.time_remaining()
        print(f"{lease.task_name}: {lease.owner_id} — {remaining:.0f}s left")
"""


def test_all_leases_are_listed_with_their_holders_and_the_time_left(
    here: Worker, there: Worker, capsys: pytest.CaptureFixture[str]
) -> None:
    here.start()
    assert there.pglease.try_acquire("a", ttl=60)
    assert there.pglease.try_acquire("b", ttl=120)
    assert there.pglease.try_acquire("given back", ttl=60)
    there.pglease.release("given back")

    here.run(LISTING)

    a, b = capsys.readouterr().out.splitlines()
    assert re.fullmatch(r"a: there — (5\d|60)s left", a)
    assert re.fullmatch(r"b: there — 1[12]\ds left", b)


ZOMBIE = """
    lease = pglease.get_lease("my-task")
    if lease and lease.is_zombie(heartbeat_timeout=30):
        # Worker is gone — safe to take over
        pglease.try_acquire("my-task", ttl=60)
"""


def test_a_zombie_is_recognised_and_is_not_taken_over_before_its_ttl_is_over(
    here: Worker, there: Worker, operator: psycopg.Connection, dsn: str
) -> None:
    assert there.pglease.try_acquire("my-task", ttl=600, heartbeat=False)
    operator.execute("UPDATE pglease_leases SET heartbeat_at = heartbeat_at - interval '31 s'")

    here.start().run(ZOMBIE)

    assert here.names["lease"].is_zombie(heartbeat_timeout=30)
    assert not here.names["lease"].is_zombie(heartbeat_timeout=40)
    assert here.pglease.held("my-task") is None
    assert here.pglease.try_acquire("my-task", ttl=60) is False

    expire(dsn, "my-task")
    assert here.pglease.try_acquire("my-task", ttl=60) is True


def test_neither_a_living_holder_nor_nobody_is_a_zombie(here: Worker, there: Worker) -> None:
    here.start().run(ZOMBIE)
    assert here.names["lease"] is None

    assert there.pglease.try_acquire("my-task", ttl=60)
    here.run(ZOMBIE)

    assert not here.names["lease"].is_zombie(heartbeat_timeout=30)
    assert here.pglease.holding() == []


CLEANUP = """
    deleted = pglease.cleanup_expired()
    print(f"Removed {deleted} stale lease(s)")
"""


def test_rows_of_crashed_workers_are_removed_and_those_of_living_ones_stay(
    here: Worker, there: Worker, dsn: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert all(there.pglease.try_acquire(name, heartbeat=False) for name in ("crashed", "crashed too", "alive"))
    for name in ("crashed", "crashed too"):
        expire(dsn, name)

    here.start().run(CLEANUP)

    assert capsys.readouterr().out == "Removed 2 stale lease(s)\n"
    assert [lease.task_name for lease in here.pglease.list_leases()] == ["alive"]


MONITORING = """
    # Detect zombie threads (should be zero in healthy system)
    zombies = pglease.heartbeat_manager.get_zombie_threads()
    if zombies:
        alert(f"Zombie threads detected: {zombies}")

    # List active leases
    for lease in pglease.list_leases():
        print(f"{lease.task_name}: {lease.owner_id} ({lease.time_remaining():.0f}s left)")

    # Clean up expired leases periodically
    deleted = pglease.cleanup_expired()
    logger.info(f"Cleaned up {deleted} expired leases")
"""


def test_monitoring_a_healthy_system_alerts_nobody(
    here: Worker, dsn: str, operator: psycopg.Connection, capsys: pytest.CaptureFixture[str]
) -> None:
    said: list[str] = []
    here.start(owner_id="pod", heartbeat_interval=0.1).can("alert")
    here.names["logger"] = types.SimpleNamespace(info=said.append)
    assert here.pglease.try_acquire("alive", ttl=60)
    assert here.pglease.try_acquire("over", heartbeat=False)
    expire(dsn, "over")
    renewed = "SELECT FROM pglease_leases WHERE task_name = 'alive' AND heartbeat_at > acquired_at"
    wait_until(lambda: operator.execute(renewed).fetchall())

    here.run(MONITORING)

    assert here.did == []
    alive, over = capsys.readouterr().out.splitlines()
    assert re.fullmatch(r"alive: pod \((5\d|60)s left\)", alive)
    assert over == "over: pod (0s left)"
    assert said == ["Cleaned up 1 expired leases"]


QUERY = """
    SELECT task_name, owner_id, expires_at - NOW() AS remaining
    FROM pglease_leases WHERE expires_at > NOW();
"""


def test_the_query_shows_who_holds_what_and_nothing_that_is_over(
    there: Worker, operator: psycopg.Connection, dsn: str
) -> None:
    for name in ("held", "over", "given back"):
        assert there.pglease.try_acquire(name, ttl=60)
    expire(dsn, "over")
    there.pglease.release("given back")

    ((name, owner, remaining),) = operator.execute(QUERY).fetchall()

    assert (name, owner) == ("held", "there")
    assert 50 < remaining.total_seconds() <= 60


# -- the table

TABLE = """
    -- Run this migration on your PostgreSQL database
    CREATE TABLE IF NOT EXISTS pglease_leases (
        task_name VARCHAR(255) PRIMARY KEY,
        owner_id VARCHAR(255) NOT NULL,
        acquired_at TIMESTAMPTZ NOT NULL,
        expires_at TIMESTAMPTZ NOT NULL,
        heartbeat_at TIMESTAMPTZ NOT NULL
    );

    -- Optional: Add index for faster lease expiry queries
    CREATE INDEX IF NOT EXISTS idx_pglease_expires_at ON pglease_leases(expires_at);
"""
ALEMBIC = '''
    def upgrade():
        op.execute("""
            CREATE TABLE IF NOT EXISTS pglease_leases (
                task_name VARCHAR(255) PRIMARY KEY,
                owner_id VARCHAR(255) NOT NULL,
                acquired_at TIMESTAMPTZ NOT NULL,
                expires_at TIMESTAMPTZ NOT NULL,
                heartbeat_at TIMESTAMPTZ NOT NULL
            );
        """)

    def downgrade():
        op.execute("DROP TABLE IF EXISTS pglease_leases;")
'''
FINISHED = (
    "INSERT INTO pglease_leases VALUES ('old', 'a 0.0.3 worker', now() - interval '2 h', now() - interval '1 h',"
    " now() - interval '1 h')"
)


def by_hand(operator: psycopg.Connection, _worker: Worker) -> None:
    operator.execute(TABLE)


def by_alembic(operator: psycopg.Connection, worker: Worker) -> None:
    worker.run(ALEMBIC).names["op"] = operator  # alembic's own op.execute takes the text as well
    worker.names["upgrade"]()


@pytest.mark.parametrize("make", [by_hand, by_alembic])
def test_the_published_table_is_upgraded_where_it_stands_by_the_first_use(
    here: Worker, operator: psycopg.Connection, make: Callable[[psycopg.Connection, Worker], None]
) -> None:
    make(operator, here)
    operator.execute(FINISHED)

    here.start(owner_id="new")

    assert here.pglease.try_acquire("job", ttl=60) is True
    old = here.pglease.get_lease("old")
    assert old is not None
    assert (old.owner_id, old.is_expired(), old.time_remaining()) == ("a 0.0.3 worker", True, 0)
    assert here.pglease.try_acquire("old", ttl=60) is True
    five = "SELECT task_name, owner_id, acquired_at < expires_at, heartbeat_at <= expires_at FROM pglease_leases"
    assert sorted(operator.execute(five).fetchall()) == [("job", "new", True, True), ("old", "new", True, True)]


def test_the_published_statements_may_run_again_on_our_table(there: Worker, operator: psycopg.Connection) -> None:
    assert there.pglease.try_acquire("job", ttl=60)

    operator.execute(TABLE)

    held = there.pglease.held("job")
    assert held is not None
    held.renew()


def test_the_published_index_is_reported_by_the_doctor_and_not_dropped(
    dsn: str, operator: psycopg.Connection, there: Worker
) -> None:
    operator.execute(TABLE)
    assert there.pglease.try_acquire("job", ttl=60)
    backend = PostgresBackend(dsn)

    (finding,) = [check for check in backend.diagnose() if check.name == "indexes"]

    assert finding.status == "warn"
    assert "idx_pglease_expires_at" in str(finding.remedy)
    assert operator.execute("SELECT to_regclass('idx_pglease_expires_at') IS NOT NULL").fetchone() == (True,)
    backend.close()


def test_the_published_downgrade_drops_the_table_and_the_next_use_makes_it_anew(
    here: Worker, worker: Callable[[], Worker], operator: psycopg.Connection
) -> None:
    by_alembic(operator, here)
    here.start()
    assert here.pglease.try_acquire("job", ttl=60)
    here.pglease.release("job")

    here.names["downgrade"]()

    later = worker().start()
    assert later.pglease.try_acquire("job", ttl=60) is True
    assert later.pglease.held("job").fencing_token > 1  # type: ignore[union-attr]
