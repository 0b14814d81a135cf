"""Tokens never go back, also where the store has lost what it granted: promoted replicas, restored dumps, snapshots."""

from __future__ import annotations

import functools
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import psycopg
import pytest
from psycopg import sql

from pglease import BackendMisconfigured, NotOwnedError, PGLease, PostgresBackend, identity
from pglease.records import Granted, Held, Refused, Released, Request, Ticket
from pglease.testing.local_pgbouncer import PgBouncer
from pglease.testing.local_postgres import LocalPostgres
from pglease.testing.local_replica import LocalReplica
from tests.support.worlds import (
    TABLE,
    all_at_once,
    ask,
    budget,
    connect,
    execute,
    expire,
    grant,
    renew,
    store,
    wait_until,
)

pytestmark = pytest.mark.matrix

EPOCH = 1 << 32
NAMES = [f"name-{number}" for number in range(8)]


@pytest.fixture
def primary(fresh_postgres) -> LocalPostgres:
    return fresh_postgres()


@contextmanager
def replica_of(primary: LocalPostgres) -> Iterator[LocalReplica]:
    """An asynchronous replica that has all there is so far."""
    with LocalReplica(primary) as replica:
        replica.catch_up()
        yield replica


def take(backend: PostgresBackend, dsn: str, name: str) -> int:
    """Take a name over, whoever had it; return its token."""
    expire(dsn, name)
    return grant(backend, name)[0].fencing_token


def epoch(dsn: str) -> int:
    ((found,),) = execute(dsn, f"SELECT token_floor >> 32 FROM {TABLE}_meta")
    return int(found)


# -- a replica is promoted that does not know of the last grants


@pytest.mark.parametrize("old_primary", ["killed", "alive"])
def test_tokens_rise_over_the_promotion_of_a_replica_that_lost_the_last_grants(primary, old_primary):
    """For names that the replica knows, and for those it has never heard of; also while the old primary grants on."""
    with store(primary.dsn) as before:
        lost = {name: grant(before, name)[0].fencing_token for name in NAMES[::2]}
        with replica_of(primary) as replica:
            replica.cut_off()
            for _ in range(3):
                lost |= {name: take(before, primary.dsn, name) for name in NAMES}
            if old_primary == "killed":
                primary.signal(signal.SIGKILL, backends=True)
            replica.promote()

            with store(replica.dsn) as after:
                found = {name: take(after, replica.dsn, name) for name in NAMES}
                assert all(found[name] > lost[name] for name in NAMES)
                assert set(found.values()) == {EPOCH + 1}
                assert epoch(replica.dsn) == 1

                if old_primary == "alive":  # a split brain: whatever it still grants is older
                    stale = {name: take(before, primary.dsn, name) for name in NAMES}
                    assert all(lost[name] < stale[name] < found[name] for name in NAMES)
                assert {take(after, replica.dsn, name) for name in NAMES} == {EPOCH + 2}


def test_a_client_with_both_addresses_goes_on_with_larger_tokens(primary):
    """The same client before and after; what it held and the replica knows, it holds on."""
    with replica_of(primary) as replica:
        hosts = f"host={primary.host},{replica.host} port={primary.port},{replica.port}"
        with PGLease(f"{hosts} user={primary.user} password={primary.password} dbname=postgres") as leases:
            assert leases.try_acquire("kept", ttl=60)
            replica.catch_up()
            replica.cut_off()
            assert leases.try_acquire("lost", ttl=60)
            kept, lost = leases.held("kept"), leases.held("lost")

            primary.signal(signal.SIGKILL, backends=True)
            replica.promote()

            kept.renew()
            assert (kept.held, kept.fencing_token) == (True, 1)
            with pytest.raises(NotOwnedError):
                lost.renew()
            assert leases.try_acquire("lost")
            assert leases.held("lost").fencing_token == EPOCH + 1


@contextmanager
def lent(connection: psycopg.Connection[Any]) -> Iterator[PostgresBackend]:
    """A store over one connection that the test keeps open."""

    @contextmanager
    def lend() -> Iterator[psycopg.Connection[Any]]:
        yield connection

    backend = PostgresBackend.from_connection_factory(lend, auto_initialize=False)
    yield backend
    backend.close()


def test_a_session_that_began_on_the_standby_outlives_the_promotion_and_is_not_deceived(primary):
    """It has looked at the table before, too."""
    with store(primary.dsn) as before:
        first = grant(before, "job")[0].fencing_token
        with replica_of(primary) as replica, connect(replica.dsn) as session, lent(session) as after:
            assert after.get("job", budget()).fencing_token == first
            replica.cut_off()
            lost = take(before, primary.dsn, "job")

            replica.promote()

            assert take(after, replica.dsn, "job") == EPOCH + 1 > lost


@pytest.mark.needs("pgbouncer")
def test_a_connection_to_a_pooler_outlives_the_failover_and_is_not_deceived(primary):
    """The client never notices that the server behind the pooler is another one."""
    with replica_of(primary) as replica, PgBouncer(primary.dsn) as bouncer, store(bouncer.dsn) as backend:
        grant(backend, "job")
        replica.catch_up()
        replica.cut_off()
        lost = take(backend, primary.dsn, "job")
        with connect(bouncer.dsn, prepare_threshold=None) as session, lent(session) as through:
            assert through.get("job", budget()).fencing_token == lost
            replica.promote()

            bouncer.move_to(replica.dsn)

            expire(replica.dsn, "job")
            assert grant(through, "job")[0].fencing_token == EPOCH + 1
            assert take(backend, replica.dsn, "job") == EPOCH + 2


def test_of_many_who_meet_the_new_primary_at_once_one_raises_the_epoch(primary):
    """And each of their names is granted, on the first try."""
    with replica_of(primary) as replica:
        with store(primary.dsn) as before:
            grant(before, "job")
            replica.catch_up()
        replica.promote()
        backends = [PostgresBackend(replica.dsn) for _ in range(12)]
        for backend in backends:
            backend.get("job", budget())  # connected before the start
        asked = [functools.partial(grant, backend, f"name-{n}") for n, backend in enumerate(backends)]

        tokens = {lease.fencing_token for lease, _ in all_at_once(asked)}

        for backend in backends:
            backend.close()
        assert tokens == {EPOCH + 1}
        assert epoch(replica.dsn) == 1


def test_tokens_rise_over_two_failovers_of_which_the_second_knows_nothing_of_the_firsts_epoch(primary):
    """The timeline, which the last server does know, is a lower bound of the epoch."""
    with store(primary.dsn) as backend:
        grant(backend, "job")
    with replica_of(primary) as first:
        first.promote()
        with replica_of(first) as second:
            second.cut_off()
            with store(first.dsn) as backend:
                lost = take(backend, first.dsn, "job")
            second.promote()

            with store(second.dsn) as backend:
                assert take(backend, second.dsn, "job") == 2 * EPOCH + 1 > lost


def test_a_restart_and_a_crash_begin_no_epoch(primary):
    """The history goes on: tokens rise by one."""
    with store(primary.dsn) as backend:
        assert grant(backend, "job")[0].fencing_token == 1
        primary.restart()
        assert take(backend, primary.dsn, "job") == 2
        primary.signal(signal.SIGKILL, backends=True)
        primary.restart("immediate")
        assert take(backend, primary.dsn, "job") == 3
        assert grant(backend, "new")[0].fencing_token == 1


# -- a dump is restored, a database is copied


def test_tokens_rise_when_a_dump_is_restored_into_another_cluster(primary, fresh_postgres, tmp_path):
    """What was granted after the dump is not in it."""
    elsewhere = fresh_postgres()
    with store(primary.dsn) as before:
        grant(before, "job")
        dumped = dump(primary, "postgres")
        lost = [take(before, primary.dsn, "job"), grant(before, "new")[0].fencing_token]

    restore(elsewhere, "postgres", dumped)

    with store(elsewhere.dsn) as after:
        assert [take(after, elsewhere.dsn, "job"), grant(after, "new")[0].fencing_token] == [EPOCH + 1] * 2
        assert max(lost) < EPOCH


def test_tokens_rise_when_a_dump_is_restored_on_the_spot(primary):
    """The server is the same, and so is its history; the tables are not."""
    with store(primary.dsn) as backend:
        grant(backend, "job")
        dumped = dump(primary, "postgres")
        take(backend, primary.dsn, "job")
        execute(primary.dsn, f"DROP TABLE {TABLE}, {TABLE}_meta, {TABLE}_tickets, {TABLE}_history")

        restore(primary, "postgres", dumped)

        assert take(backend, primary.dsn, "job") == EPOCH + 1


def dump(server: LocalPostgres, dbname: str) -> str:
    return run(server, "pg_dump", "--no-owner", dbname)


def restore(server: LocalPostgres, dbname: str, script: str) -> None:
    run(server, "psql", "-q", "-v", "ON_ERROR_STOP=1", dbname, stdin=script)


def run(server: LocalPostgres, program: str, *arguments: str, stdin: str = "") -> str:
    where = ["-h", server.host, "-p", str(server.port), "-U", "postgres"]
    command = [str(server.bindir / program), *where, *arguments]
    done = subprocess.run(command, input=stdin, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_copy_of_the_database_grants_in_an_epoch_of_its_own(server, database):
    """Made by CREATE DATABASE … TEMPLATE: even the numbers of the tables are the same."""
    copy = f"{database}_copy"
    with store(server.dsn(database)) as backend:
        grant(backend, "job")
    with server.connect() as admin:
        wait_until(lambda: nobody_is_in(admin, database))
        admin.execute(
            sql.SQL("CREATE DATABASE {} OWNER {} TEMPLATE {}").format(
                *map(sql.Identifier, (copy, server.user, database))
            )
        )
        try:
            with store(server.dsn(copy)) as backend:
                assert take(backend, server.dsn(copy), "job") == EPOCH + 1
        finally:
            admin.execute(sql.SQL("DROP DATABASE {} WITH (FORCE)").format(sql.Identifier(copy)))


def nobody_is_in(admin: psycopg.Connection[Any], database: str) -> bool:
    return not admin.execute("SELECT 1 FROM pg_stat_activity WHERE datname = %s", (database,)).fetchall()


# -- by hand, and what it does to rows


def test_a_raised_epoch_makes_every_row_jump_and_a_floor_of_a_cleanup_none(dsn):
    """Names that stay keep counting by one, however high a deleted name had come."""
    with store(dsn) as backend:
        grant(backend, "stays", ttl=60)
        grant(backend, "goes", ttl=60)
        for _ in range(5):
            take(backend, dsn, "goes")
        expire(dsn, "goes")
        assert backend.cleanup(0, budget()) == 1

        assert take(backend, dsn, "stays") == 2
        assert grant(backend, "new")[0].fencing_token == 7

        assert backend.bump_epoch() == 1

        assert take(backend, dsn, "stays") == take(backend, dsn, "new") == EPOCH + 1
        assert take(backend, dsn, "stays") == EPOCH + 2
        assert backend.bump_epoch() == 2
        assert take(backend, dsn, "stays") == 2 * EPOCH + 1


def test_a_hold_goes_on_under_its_token_when_the_epoch_is_raised(dsn):
    """Renewed and released as before; the next one is above."""
    with store(dsn) as backend:
        lease, lease_id = grant(backend, "job")

        backend.bump_epoch()

        outcome = renew(backend, "job", lease_id)
        assert isinstance(outcome, Held)
        assert outcome.lease.fencing_token == lease.fencing_token
        assert isinstance(backend.release("job", lease_id, budget()), Released)
        assert grant(backend, "job")[0].fencing_token == EPOCH + 1


def test_no_epoch_is_left_after_two_thousand_million(dsn):
    with store(dsn) as backend:
        grant(backend, "job")
        execute(dsn, f"UPDATE {TABLE}_meta SET token_floor = 2147483647::bigint << 32")

        with pytest.raises(BackendMisconfigured, match="no epochs left"):
            backend.bump_epoch()
        assert take(backend, dsn, "job") == (2147483647 << 32) + 1


# -- quarantine


def move(dsn: str) -> None:
    """Let the table believe that another server granted last, as after a failover."""
    execute(dsn, f"UPDATE {TABLE}_meta SET lineage = '1/00000001/1/1'")


def test_in_quarantine_nothing_new_is_granted_to_anybody_and_holders_hold_on(dsn):
    """The client that notices the failover decides, and those without the knob keep to it."""
    careful = PostgresBackend(dsn, failover_quarantine="1h")
    with store(dsn) as careless:
        _, lease_id = grant(careless, "held")
        grant(careless, "lapsed")
        expire(dsn, "lapsed")
        move(dsn)

        for backend in (careful, careless):
            for name in ("lapsed", "new"):
                refused, _ = ask(backend, name)
                assert isinstance(refused, Refused)
                assert 3590 < refused.retry_after <= 3600

        assert isinstance(renew(careless, "held", lease_id), Held)
        assert isinstance(careless.release("held", lease_id, budget()), Released)
        assert isinstance(ask(careless, "held")[0], Refused)
        execute(dsn, f"UPDATE {TABLE}_meta SET quarantined_until = clock_timestamp()")
        assert grant(careless, "held")[0].fencing_token == EPOCH + 1
    careful.close()


def test_a_waiter_gets_the_name_when_the_quarantine_is_over(dsn):
    with PGLease(f"{dsn}?pglease.failover_quarantine=400ms") as leases:
        leases.get_lease("job")
        move(dsn)

        with leases.acquire("job", wait=20) as lease:
            assert lease
            assert lease.fencing_token == EPOCH + 1
            ((over,),) = execute(dsn, f"SELECT quarantined_until <= clock_timestamp() FROM {TABLE}_meta")
            assert over


def test_a_quarantine_by_the_table_is_as_long_as_the_longest_ttl_in_it(dsn):
    """And a minute at least. Rows that were forged to run for ever do not count."""
    for longest, expected in ((3.0, 60), (7200.0, 7200)):
        backend = PostgresBackend(dsn, failover_quarantine=True)
        grant(backend, f"job-{longest}", ttl=longest)
        grant(backend, f"forged-{longest}")
        execute(dsn, f"UPDATE {TABLE} SET expires_at = 'infinity' WHERE task_name = %s", f"forged-{longest}")
        move(dsn)

        refused, _ = ask(backend, "new")

        assert expected - 20 < refused.retry_after <= expected
        execute(dsn, f"UPDATE {TABLE}_meta SET quarantined_until = NULL")
        backend.close()


def test_in_quarantine_and_over_a_new_epoch_a_place_in_the_queue_is_kept_until_it_is_served(dsn):
    """Asked in turn and refused for another reason: the ticket stays the first."""
    first, second = (Ticket("job", identity.new_lease_id(), label, 60.0) for label in ("first", "second"))
    with store(dsn) as backend:
        _, lease_id = grant(backend, "job")
        assert [backend.queue(ticket, budget()).ahead for ticket in (first, second)] == [0, 1]
        backend.release("job", lease_id, budget())
        backend.bump_epoch(quarantine=3600)
        asked = Request("job", "first", identity.new_lease_id(), 60.0, ticket_id=first.ticket_id)

        assert isinstance(backend.try_acquire(asked, budget()), Refused)
        assert backend.queue(second, budget()).ahead == 1

        execute(dsn, f"UPDATE {TABLE}_meta SET quarantined_until = NULL")
        move(dsn)
        assert backend.try_acquire(asked, budget()).lease.fencing_token == 2 * EPOCH + 1
        assert backend.queue(second, budget()).ahead == 0


def test_a_new_table_has_no_quarantine(dsn):
    backend = PostgresBackend(dsn, failover_quarantine=True)
    assert isinstance(ask(backend, "job")[0], Granted)
    backend.close()


# -- who may, and who can tell


def test_a_role_that_may_not_raise_the_epoch_is_told_what_mends_it(admin, dsn, server):
    with store(dsn) as owner:
        grant(owner, "job")
        role = f"{server.user}_app"
        admin.execute(sql.SQL("DROP ROLE IF EXISTS {}").format(sql.Identifier(role)))
        admin.execute(sql.SQL("CREATE ROLE {}").format(sql.Identifier(role)))
        try:
            admin.execute(
                sql.SQL("GRANT SELECT, INSERT, UPDATE ON {} TO {}").format(sql.Identifier(TABLE), sql.Identifier(role))
            )
            admin.execute(
                sql.SQL("GRANT SELECT ON {} TO {}").format(sql.Identifier(f"{TABLE}_meta"), sql.Identifier(role))
            )
            admin.execute(sql.SQL("SET ROLE {}").format(sql.Identifier(role)))
            with lent(admin) as app:
                assert grant(app, "new")[0].fencing_token == 1
                move(dsn)

                with pytest.raises(BackendMisconfigured, match=r"run `pglease bump-epoch`.* GRANT SELECT, UPDATE \("):
                    ask(app, "newer")

                owner.bump_epoch()
                assert grant(app, "newer")[0].fencing_token == EPOCH + 1
        finally:
            admin.execute("RESET ROLE")
            admin.execute(
                sql.SQL("DROP OWNED BY {0}; DROP ROLE {0}").format(sql.Identifier(role)).as_string(admin).encode()
            )


def test_a_server_that_cannot_tell_its_timeline_grants_and_says_so(admin, dsn, caplog):
    """As some services of the cloud are. Nothing is noticed there, and `bump_epoch` works."""
    with store(dsn) as backend:
        assert backend.traits.token_survives_loss
        grant(backend, "job")
        assert backend.traits.token_survives_loss
    admin.execute("REVOKE EXECUTE ON FUNCTION pg_catalog.pg_control_system() FROM PUBLIC")

    with store(dsn) as backend:
        assert take(backend, dsn, "job") == 2
        assert grant(backend, "new")[0].fencing_token == 1
        assert not backend.traits.token_survives_loss
        assert "pg_control_system() is missing, or" in caplog.text
        assert "run `pglease bump-epoch`" in caplog.text
        move(dsn)
        assert take(backend, dsn, "job") == 3
        backend.bump_epoch()
        assert take(backend, dsn, "job") == EPOCH + 1


def test_a_table_that_was_made_by_somebody_who_could_not_tell_learns_where_it_is(admin, dsn):
    """Before anything was granted that is all; afterwards nobody knows where, so a new epoch begins."""
    admin.execute("REVOKE EXECUTE ON FUNCTION pg_catalog.pg_control_system() FROM PUBLIC")
    with store(dsn) as unable:
        unable.get("job", budget())
        assert execute(dsn, f"SELECT lineage FROM {TABLE}_meta") == [(None,)]
        admin.execute("GRANT EXECUTE ON FUNCTION pg_catalog.pg_control_system() TO PUBLIC")
        with store(dsn) as able:
            assert grant(able, "job")[0].fencing_token == 1
        execute(dsn, f"UPDATE {TABLE}_meta SET lineage = NULL")
        with store(dsn) as able:
            assert grant(able, "new")[0].fencing_token == EPOCH + 1
