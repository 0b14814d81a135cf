"""What can happen to a PostgreSQL, beside restarts and failovers."""

from __future__ import annotations

import os
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest

from pglease import BackendError, BackendUnavailable, PGLease, clock
from pglease.testing.local_postgres import LocalPostgres
from tests.attacks.world import eventually, kill_connections

PASSWORD = "first-of-two"  # not the canary: it is changed here


@pytest.fixture(scope="module")
def own_server() -> Iterator[LocalPostgres]:
    """A server whose settings, passwords and disks are these tests' own."""
    with LocalPostgres(user="app", password=PASSWORD, dbname="app") as server:
        yield server


pytestmark = pytest.mark.xdist_group("own-server-of-the-faults")


def test_a_standby_that_is_away_makes_a_grant_unknown_and_not_endless(own_server: LocalPostgres, measured) -> None:
    with PGLease(own_server.dsn, connect_timeout=1.5) as leases:
        leases.get_lease("warm-up")
        own_server.execute("ALTER SYSTEM SET synchronous_standby_names = 'nosuch'")
        own_server.execute("SELECT pg_reload_conf()")
        try:
            began = time.monotonic()
            with pytest.raises(BackendUnavailable) as caught:
                eventually(lambda: not leases.try_acquire(f"job {time.monotonic()}", ttl=2))
            took = time.monotonic() - began
        finally:
            own_server.execute("ALTER SYSTEM RESET synchronous_standby_names")
            own_server.execute("SELECT pg_reload_conf()")

        assert caught.value.outcome_unknown
        measured("a grant that no standby confirms", took, 1.5)
        assert leases.wait_for_lease("job", ttl=2, timeout=30)


def test_a_password_that_was_changed_costs_nothing_until_the_connection_does(own_server: LocalPostgres) -> None:
    with PGLease(own_server.dsn, connect_timeout=1.5) as leases:
        lease = leases.wait_for_lease("rotated", ttl=2)
        own_server.execute("ALTER ROLE app PASSWORD 'second-of-two'")
        try:
            time.sleep(2.5)
            assert lease.held  # on the connections that are open

            kill_connections(own_server.url("app", user="postgres"))
            assert lease.lost.wait(30)
            with pytest.raises(BackendError) as caught:
                leases.try_acquire("another")
        finally:
            own_server.execute(f"ALTER ROLE app PASSWORD '{PASSWORD}'")

    texts = [str(caught.value), repr(caught.value), str(lease.loss), str(caught.value.__cause__)]
    assert not any(PASSWORD in text for text in texts)


@pytest.fixture
def small_disk(own_server: LocalPostgres) -> Iterator[Path]:
    """A file system of 16 MB that the server may write to."""
    place = Path(tempfile.mkdtemp(prefix="pglease-small-disk-"))
    place.chmod(0o755)  # pytest's own folders are for us alone, and the server runs as somebody else
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=16m", "tmpfs", str(place)], check=True)
    try:
        data = place / "data"
        data.mkdir()
        owner = own_server.data.stat()
        os.chown(data, owner.st_uid, owner.st_gid)
        yield data
    finally:
        subprocess.run(["umount", "-l", str(place)], check=True)
        place.rmdir()


@pytest.mark.needs("root", "linux")
def test_a_full_disk_is_trouble_and_leaves_nothing_by_halves(own_server: LocalPostgres, small_disk: Path) -> None:
    own_server.execute(f"CREATE TABLESPACE small LOCATION '{small_disk}'")
    own_server.execute("CREATE DATABASE cramped OWNER app TABLESPACE small")
    admin = own_server.url("cramped", user="postgres")
    try:
        with PGLease(own_server.url("cramped"), connect_timeout=2) as leases:
            assert leases.try_acquire("first", ttl=60)
            with psycopg.connect(admin, autocommit=True) as connection:
                connection.execute("CREATE TABLE filler (text text)")
                with pytest.raises(psycopg.errors.DiskFull):
                    while True:
                        connection.execute("INSERT INTO filler SELECT repeat('x', 1000) FROM generate_series(1, 1000)")
                with pytest.raises(BackendUnavailable):
                    for number in range(2000):
                        leases.try_acquire(f"{'long' * 50} {number}", heartbeat=False)
                assert leases.held("first").held
                connection.execute("DROP TABLE filler")
            assert eventually(lambda: leases.try_acquire("last"))
    finally:
        own_server.execute("DROP DATABASE cramped WITH (FORCE)")
        own_server.execute("DROP TABLESPACE small")


def test_a_table_that_is_locked_as_a_whole_ends_belief_in_time_and_holds_nobody_up(dsn: str, client, measured) -> None:
    leases = client(connect_timeout=1)
    lease = leases.wait_for_lease("job", ttl=2)
    with psycopg.connect(dsn) as connection:
        connection.execute("LOCK TABLE pglease_leases IN ACCESS EXCLUSIVE MODE")

        began = time.monotonic()
        with pytest.raises(BackendUnavailable):
            leases.try_acquire("another")
        measured("a call while the table is locked", time.monotonic() - began, 1.0)
        assert lease.lost.wait(30)
        measured("a loss is told while the table is locked", clock.now() - lease._hold.deadline, 0.05)
        connection.rollback()

    assert leases.wait_for_lease("job", timeout=30)


def test_a_database_that_takes_no_more_connections_costs_no_lease_that_is_held(
    dsn: str, admin, database: str, client
) -> None:
    holder, late = client(pool_size=1), client(connect_timeout=1)
    lease = holder.wait_for_lease("job", ttl=2)
    time.sleep(1.0)  # it has a connection to renew on by now

    admin.execute(f"ALTER DATABASE {database} CONNECTION LIMIT 1")
    with pytest.raises(BackendUnavailable):
        late.try_acquire("another")
    time.sleep(2.5)

    assert lease.held
    admin.execute(f"ALTER DATABASE {database} CONNECTION LIMIT -1")
    assert late.try_acquire("another")


def test_a_primary_that_was_demoted_is_left_and_found_again(dsn: str, admin, database: str, client, measured) -> None:
    leases = client(connect_timeout=1)
    assert leases.try_acquire("job")
    admin.execute(f"ALTER DATABASE {database} SET default_transaction_read_only = on")
    admin.execute("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name LIKE 'pglease%' "
                  "AND datname = current_database()")  # fmt: skip
    with pytest.raises(BackendError):
        leases.try_acquire("another")

    admin.execute(f"ALTER DATABASE {database} RESET default_transaction_read_only")
    began = time.monotonic()
    eventually(lambda: _asked(leases, "another"))

    measured("a primary is found again", time.monotonic() - began, 5.0)


def _asked(leases: PGLease, name: str) -> bool:
    try:
        return leases.try_acquire(name)
    except BackendError:
        return False
