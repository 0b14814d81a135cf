"""Marks and notifications in PostgreSQL: who is told, what it costs, and where it cannot work."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import psycopg
import pytest

from pglease import PGLease, PostgresBackend, fencing
from pglease.errors import BackendUnavailable
from pglease.identity import new_lease_id
from pglease.records import Granted, Released, Ticket
from pglease.schema import table_names
from pglease.testing.local_pgbouncer import PgBouncer
from pglease.testing.local_postgres import LocalPostgres
from pglease.testing.proxy import Proxy
from tests.support import worlds
from tests.support.worlds import all_at_once, budget, connect, execute, grant, renew, store, wait_until

LONG = 600.0


@contextmanager
def eavesdropper(dsn: str, channel: str = "public.pglease_leases") -> Iterator[Callable[[], list[str]]]:
    """What is notified on a channel, until a bell of our own rings there."""
    with connect(dsn) as connection:
        connection.execute(f'LISTEN "{channel}"')

        def heard() -> list[str]:
            execute(dsn, "SELECT pg_notify(%s, 'bell')", channel)
            said = []
            for notified in connection.notifies(timeout=20):
                if notified.payload == "bell":
                    return said
                said.append(" ".join(notified.payload.split(" ")[::2]))
            raise AssertionError("the bell was not heard")

        yield heard


def untouched(dsn: str) -> str:
    """Every row to the byte, with who wrote and who locked it last."""
    ((rows,),) = execute(dsn, "SELECT string_agg(concat(l::text, xmin, '/', xmax, ctid), ';') FROM pglease_leases l")
    return str(rows)


# -- who is told -------------------------------------------------------------------------------------------------------


def test_renewals_and_a_release_nobody_waits_for_notify_nobody(dsn: str) -> None:
    with store(dsn) as backend:
        _, lease_id = grant(backend, "job")
        with eavesdropper(dsn) as heard:
            for _ in range(200):
                renew(backend, "job", lease_id)
            backend.release("job", lease_id, budget())
            grant(backend, "job")

            assert heard() == []


def test_a_marked_name_is_told_of_once_for_each_release_and_grant_and_never_of_renewals(dsn: str) -> None:
    with store(dsn) as backend:
        _, lease_id = grant(backend, "job")
        assert backend.mark("job", LONG, budget())
        with eavesdropper(dsn) as heard:
            for _ in range(200):
                renew(backend, "job", lease_id)
            backend.release("job", lease_id, budget())
            backend.release("job", lease_id, budget())
            lease, _ = grant(backend, "job")
            worlds.ask(backend, "job")
            assert backend.force_release("job", lease.fencing_token, budget())
            assert not backend.force_release("job", lease.fencing_token, budget())

            assert heard() == ["released job", "granted job", "released job"]


def test_a_mark_ends_by_itself(dsn: str) -> None:
    with store(dsn) as backend:
        _, lease_id = grant(backend, "job")
        assert backend.mark("job", LONG, budget())
        execute(dsn, "UPDATE pglease_leases SET waited_until = clock_timestamp() - interval '1 ms'")
        with eavesdropper(dsn) as heard:
            backend.release("job", lease_id, budget())

            assert heard() == []


def test_many_who_mark_write_once(dsn: str) -> None:
    with store(dsn) as backend:
        grant(backend, "job")
        assert backend.mark("job", LONG, budget())
        before = untouched(dsn)

        assert all(all_at_once([lambda: backend.mark("job", LONG, budget()) for _ in range(20)]))

        assert untouched(dsn) == before


def test_a_mark_in_its_second_half_is_written_anew(dsn: str) -> None:
    with store(dsn) as backend:
        grant(backend, "job")
        assert backend.mark("job", LONG, budget())
        execute(dsn, "UPDATE pglease_leases SET waited_until = clock_timestamp() + interval '299 s'")

        assert backend.mark("job", LONG, budget())

        ((left,),) = execute(dsn, "SELECT extract(epoch FROM waited_until - clock_timestamp()) FROM pglease_leases")
        assert 590 < left <= 600


def test_a_row_that_somebody_has_locked_cannot_be_marked_and_nobody_waits_for_it(dsn: str) -> None:
    with store(dsn) as backend:
        grant(backend, "job")
        with worlds.locked_row(dsn, "job", "UPDATE"), worlds.nobody_waits(dsn):
            assert backend.mark("job", LONG, budget()) is False

        assert backend.mark("job", LONG, budget()) is True


def test_marks_keep_the_updates_hot(dsn: str) -> None:
    with store(dsn) as backend:
        grant(backend, "job")
        for _ in range(50):
            execute(dsn, "UPDATE pglease_leases SET waited_until = NULL")
            assert backend.mark("job", LONG, budget())

    # An idle session tells after ten seconds what it has counted, one that ends tells it at once.
    counted = "SELECT n_tup_hot_upd, n_tup_upd FROM pg_stat_user_tables WHERE relname = 'pglease_leases'"
    wait_until(lambda: execute(dsn, counted)[0][1] >= 100, 30)
    ((hot, all_of_them),) = execute(dsn, counted)
    assert hot >= 0.9 * all_of_them


def test_a_release_that_is_rolled_back_tells_nobody_and_a_lent_connection_tells_in_its_own_transaction(
    dsn: str,
) -> None:
    with connect(dsn) as lent, store(dsn) as other:

        @contextmanager
        def factory() -> Iterator[psycopg.Connection]:
            yield lent

        backend = PostgresBackend.from_connection_factory(factory)
        _, lease_id = grant(backend, "job")
        assert other.mark("job", LONG, budget())
        with eavesdropper(dsn) as heard:
            backend.release("job", lease_id, budget())

            assert heard() == ["released job"]
        assert backend.listen(budget()) is None


def test_what_callers_do_in_transactions_of_their_own_notifies_nobody(dsn: str) -> None:
    with PGLease(dsn) as leases, connect(dsn) as caller, eavesdropper(dsn) as heard:
        lease = leases.wait_for_lease("job", ttl=60, timeout=30)
        assert leases.backend.mark("job", LONG, budget())
        caller.execute(fencing.ddl())
        with caller.transaction():
            lease.guard(caller)
            fence = lease.fence_sql()
            assert caller.execute(f"SELECT 1 WHERE {fence.sql}", fence.params).fetchone()
            assert fencing.accept(caller, "report", lease.fencing_token)

        assert heard() == []
        lease.release()
        assert heard() == ["released job"]


def test_with_notify_off_nobody_is_told_and_nobody_listens(dsn: str) -> None:
    backend = PostgresBackend(dsn, notify=False)
    try:
        _, lease_id = grant(backend, "job")
        assert backend.mark("job", LONG, budget())
        with eavesdropper(dsn) as heard:
            backend.release("job", lease_id, budget())

            assert heard() == []
        assert backend.listen(budget()) is None
    finally:
        backend.close()


def test_tables_of_other_names_have_channels_of_their_own() -> None:
    channels = [table_names("leases", schema).within(schema or "public").channel for schema in (None, "a", "b")]
    channels += [table_names("t" * 53, "s" * 63).channel, table_names("t" * 53, "s" * 62).channel]

    assert len(set(channels)) == 5
    assert all(len(channel) <= 63 for channel in channels)


# -- listening ---------------------------------------------------------------------------------------------------------


def test_a_server_that_restarts_is_told_to_whoever_listens(fresh_postgres: Callable[..., LocalPostgres]) -> None:
    server = fresh_postgres()
    with store(server.dsn) as backend:
        _, lease_id = grant(backend, "job")
        subscription = backend.listen(budget())
        assert subscription is not None
        server.restart()

        with pytest.raises(BackendUnavailable):
            subscription.next(20)

        again = backend.listen(budget(20))
        assert again is not None
        assert backend.mark("job", LONG, budget())
        backend.release("job", lease_id, budget())
        assert [change.what for change in again.next(20)] == ["released"]


def test_a_listening_connection_is_one_and_is_gone_when_it_is_closed(dsn: str) -> None:
    listening = "SELECT count(*) FROM pg_stat_activity WHERE query LIKE 'LISTEN%' AND datname = current_database()"
    with store(dsn) as backend:
        grant(backend, "job")
        subscription = backend.listen(budget())
        assert subscription is not None
        assert execute(dsn, listening) == [(1,)]

        subscription.close()

        wait_until(lambda: execute(dsn, listening) == [(0,)], 10)


def test_connecting_to_listen_ends_in_its_time_though_nobody_answers(proxy: Proxy, dsn: str) -> None:
    with store(proxy.through(dsn)) as backend:
        grant(backend, "job")
        proxy.black_hole()
        began = time.monotonic()

        with pytest.raises(BackendUnavailable):
            backend.listen(budget(0.5))

        assert time.monotonic() - began < 10


@pytest.mark.needs("pgbouncer")
def test_behind_a_transaction_pooler_nobody_listens(pgbouncer: PgBouncer) -> None:
    with store(pgbouncer.dsn) as backend:
        _, lease_id = grant(backend, "job")

        assert backend.listen(budget()) is None
        assert backend.listen(budget()) is None

        assert backend.mark("job", LONG, budget())
        backend.release("job", lease_id, budget())


# -- tickets -----------------------------------------------------------------------------------------------------------


def test_being_refused_a_reserved_name_writes_nothing(dsn: str) -> None:
    with store(dsn) as backend:
        _, lease_id = grant(backend, "job")
        assert backend.queue(Ticket("job", new_lease_id(), "first", LONG), budget())
        backend.release("job", lease_id, budget())
        before = untouched(dsn)

        for _ in range(20):
            assert not isinstance(worlds.ask(backend, "job")[0], Granted)

        assert untouched(dsn) == before


def test_tickets_that_lapsed_are_cleaned_up(dsn: str) -> None:
    with store(dsn) as backend:
        _, lease_id = grant(backend, "job")
        assert backend.queue(Ticket("job", new_lease_id(), "dead", LONG), budget())
        backend.release("job", lease_id, budget())
        execute(dsn, "UPDATE pglease_leases_tickets SET expires_at = clock_timestamp() - interval '1 ms'")
        execute(dsn, "UPDATE pglease_leases SET queued_until = clock_timestamp() - interval '1 ms'")

        assert backend.cleanup(0.0, budget()) == 1

        assert execute(dsn, "SELECT count(*) FROM pglease_leases_tickets") == [(0,)]


def test_whoever_arrives_while_the_row_is_locked_waits_for_its_number_only_so_long(dsn: str) -> None:
    with store(dsn) as backend:
        grant(backend, "job")
        with worlds.locked_row(dsn, "job", "UPDATE"):
            began = time.monotonic()
            with pytest.raises(BackendUnavailable):
                backend.queue(Ticket("job", new_lease_id(), "late", LONG), budget(1.0))
            assert time.monotonic() - began < 10

        assert backend.queue(Ticket("job", new_lease_id(), "late", LONG), budget()) is not None


def test_with_guards_on_the_row_one_may_mark_and_queue(dsn: str) -> None:
    with store(dsn) as backend:
        grant(backend, "job")
        with worlds.locked_row(dsn, "job", "KEY SHARE"):
            assert backend.mark("job", LONG, budget())
            assert backend.queue(Ticket("job", new_lease_id(), "first", LONG), budget()) is not None


def test_takers_queuers_and_cleaners_side_by_side_never_deadlock(dsn: str) -> None:
    ((before,),) = execute(dsn, "SELECT deadlocks FROM pg_stat_database WHERE datname = current_database()")
    until = time.monotonic() + 60
    tokens: list[int] = []

    def going_on() -> bool:
        return len(tokens) < 30 and time.monotonic() < until

    with store(dsn) as backend:
        _, lease_id = grant(backend, "job")
        backend.release("job", lease_id, budget())

        def take() -> None:
            while going_on():
                ticket = Ticket("job", new_lease_id(), "taker", 1.0)
                backend.queue(ticket, budget())
                answer, lease_id = worlds.ask(backend, "job", ticket_id=ticket.ticket_id)
                if isinstance(answer, Granted):
                    tokens.append(answer.lease.fencing_token)
                    backend.release("job", lease_id, budget())
                backend.leave_queue("job", ticket.ticket_id, budget())

        def clean() -> None:
            while going_on():
                with suppress(BackendUnavailable):  # it may not get the table's lock
                    backend.cleanup(0.0, budget())

        all_at_once([take, take, take, clean], within=90)

    assert len(tokens) == len(set(tokens)) >= 30
    ((after,),) = execute(dsn, "SELECT deadlocks FROM pg_stat_database WHERE datname = current_database()")
    assert after == before


def test_a_release_gets_its_turn_though_the_row_is_always_locked_by_somebody(dsn: str) -> None:
    with store(dsn) as backend:
        _, lease_id = grant(backend, "job")
        over = threading.Event()

        def lock_again_and_again() -> None:
            with psycopg.connect(dsn, autocommit=True) as link:
                while not over.is_set():
                    with link.transaction():
                        link.execute("SELECT 1 FROM pglease_leases WHERE task_name = 'job' FOR UPDATE")
                        link.execute("SELECT pg_sleep(0.02)")

        crowd = [threading.Thread(target=lock_again_and_again) for _ in range(4)]
        try:
            for one in crowd:
                one.start()
            wait_until(lambda: waits_for_locks(dsn) >= 3)

            assert isinstance(backend.release("job", lease_id, budget()), Released)
        finally:
            over.set()
            for one in crowd:
                one.join(30)


def waits_for_locks(dsn: str) -> int:
    ((count,),) = execute(
        dsn,
        "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'",
    )
    return int(count)
