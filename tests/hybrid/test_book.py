"""The account of locks: each key once, none too many, all given back."""

from __future__ import annotations

import gc
import logging
import os
import threading
import time
from contextlib import suppress
from typing import Any

import psycopg
import pytest
import sqlalchemy

from pglease import BackendClosed, BackendUnavailable, PGLease, clock
from pglease.backends.hybrid import HybridPostgresBackend
from pglease.backends.hybrid_session import Session
from pglease.backends.hybrid_sql import key_of
from pglease.records import Granted, Released, Request
from pglease.testing.local_postgres import LocalPostgres
from tests.support.hybrid import advisory_locks, clients, end, hybrid, is_bound, mark_of, pid_of, stores
from tests.support.worlds import ask, budget, child, execute, expire, grant, is_free, wait_until


def test_one_session_carries_many_leases_each_locked_once(dsn: str) -> None:
    with clients(dsn, "holder") as (client,):
        for number in range(60):
            assert client.try_acquire(f"job-{number}", ttl=60)
            assert not client.try_acquire(f"job-{number}", ttl=60)

        assert len(advisory_locks(dsn)) == 60
        assert len(set(advisory_locks(dsn))) == 1

        for number in range(60):
            client.release(f"job-{number}")
        wait_until(lambda: advisory_locks(dsn) == [])


def test_a_name_that_was_given_back_is_bound_again_at_once(dsn: str) -> None:
    with stores(dsn, 1) as (backend,):
        for _ in range(5):
            _, lease_id = grant(backend, "job")
            assert mark_of(dsn, "job") == pid_of(backend)
            backend.release("job", lease_id, budget())


@pytest.mark.parametrize("known", [False, True], ids=["asked for", "looked at"])
def test_an_earlier_grant_that_is_found_counts_from_when_it_was_read_however_long_the_mark_takes(
    dsn: str, monkeypatch: pytest.MonkeyPatch, known: bool
) -> None:
    with stores(dsn, 1) as (backend,):
        request = Request("job", "holder", os.urandom(16).hex(), 60.0)
        backend.try_acquire(request, budget())
        if known:
            backend._remember("job", clock.now() + 60)
        again, once = budget(), backend._once

        def slowly(*talk: Any, **how: Any) -> Any:
            answer = once(*talk, **how)
            time.sleep(0.2)
            return answer

        monkeypatch.setattr(backend, "_once", slowly)
        found = backend.try_acquire(request, again)

        assert isinstance(found, Granted)
        assert clock.now() - again.sent_at > 0.4  # two conversations, the first of which has read it
        backend.release("job", request.lease_id, budget())


def test_no_row_says_that_a_lock_is_there_when_it_is_given_back(dsn: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with stores(dsn, 1) as (backend,):
        keeper, request = backend._keeper, Request("job", "holder", os.urandom(16).hex(), 60.0)
        backend._ready(budget())
        said: list[int | None] = []
        ask, unlock = Session.ask, Session.unlock

        def granted_in_the_middle(session: Session, statement: str, params: Any = None) -> Any:
            rows = ask(session, statement, params)
            if keeper.errands is not None and statement == keeper.errands.tie and not rows:
                thread = threading.Thread(target=backend.try_acquire, args=(request, budget()))
                thread.start()
                thread.join()
            return rows

        def watched_unlock(session: Session, key: int) -> None:
            said.append(mark_of(dsn, "job"))
            unlock(session, key)

        monkeypatch.setattr(Session, "ask", granted_in_the_middle)
        monkeypatch.setattr(Session, "unlock", watched_unlock)
        seat = keeper.sit("job", key_of(backend._names, "job"), request.lease_id)
        keeper.rise(seat, clock.now() + 60)  # as after a try of which nobody knows what became of it

        wait_until(lambda: bool(said))
        assert said == [None]
        wait_until(lambda: is_bound(dsn, "job"))
        backend.release("job", request.lease_id, budget())


def test_refused_tries_leave_no_lock(dsn: str) -> None:
    with clients(dsn, "holder", "rival") as (holder, rival), PGLease(dsn) as plain:
        holder.try_acquire("bound", ttl=60)
        plain.try_acquire("plain", ttl=60)

        for name in ("bound", "plain") * 5:
            assert not rival.try_acquire(name)

        wait_until(lambda: len(advisory_locks(dsn)) == 1)


def test_above_max_advisory_new_leases_are_plain_and_say_so(dsn: str, caplog: pytest.LogCaptureFixture) -> None:
    with clients(dsn + "?pglease.max_advisory=2", "holder") as (client,), clients(dsn, "rival") as (rival,):
        for name in "abcd":
            assert client.try_acquire(name, ttl=60)

        assert [mark_of(dsn, name) is not None for name in "abcd"] == [True, True, False, False]
        assert [record.levelno for record in caplog.records if "max_advisory" in record.message] == [logging.WARNING]
        assert not rival.try_acquire("d")

        client.release("a")
        wait_until(lambda: is_bound(dsn, "c") or is_bound(dsn, "d"))


def test_unless_told_otherwise_a_client_binds_a_quarter_of_what_the_server_has_room_for(dsn: str) -> None:
    with stores(dsn, 1) as (backend,):
        session = backend._keeper.session(budget())
        assert [(session.capacity,)] == execute(
            dsn, "SELECT current_setting('max_locks_per_transaction')::int * current_setting('max_connections')::int"
        )
        session.capacity = 8

        for name in "abc":
            grant(backend, name)

        assert [mark_of(dsn, name) is not None for name in "abc"] == [True, True, False]


def test_a_server_without_room_for_locks_costs_no_lease_that_is_held(canary: str) -> None:
    with (
        LocalPostgres(
            user="pglease_test",
            password=canary,
            fsync=False,
            settings={"max_locks_per_transaction": 10, "max_connections": 12},
        ) as server,
        clients(server.dsn + "?pglease.max_advisory=100000", "holder") as (client,),
    ):
        client.try_acquire("before", ttl=60)
        with psycopg.connect(server.admin_dsn, autocommit=True) as greedy:
            with pytest.raises(psycopg.errors.OutOfMemory):  # what it locked until then it keeps
                greedy.execute("SELECT pg_advisory_lock(key) FROM generate_series(1, 100000) AS key")

            with suppress(BackendUnavailable):  # the statements need a little of that room themselves
                client.try_acquire("meanwhile", ttl=60)
            assert client.held("before")

        assert client.try_acquire("afterwards", ttl=60)


def test_closing_gives_every_lock_back_and_ends_no_hold(dsn: str) -> None:
    with stores(dsn, 2) as (first, second):
        grant(first, "job", 600)
        assert is_bound(dsn, "job")

        first.close()

        assert advisory_locks(dsn) == []
        assert mark_of(dsn, "job") is None
        assert not is_free(dsn, "job")
        assert not isinstance(ask(second, "job")[0], Granted)
        with pytest.raises(BackendClosed):
            ask(first, "job")


def test_a_body_that_commits_with_an_engine_of_its_own_leaves_no_lock(dsn: str) -> None:
    engine = sqlalchemy.create_engine(dsn.replace("postgresql://", "postgresql+psycopg://"))
    with clients(dsn, "holder") as (client,), client.acquire("job", ttl=60) as lease:
        assert lease
        for _ in range(3):
            with engine.begin() as connection:
                connection.execute(sqlalchemy.text("SELECT 1"))
    engine.dispose()

    assert advisory_locks(dsn) == []


def test_an_interrupted_try_leaves_no_lock(dsn: str) -> None:
    with clients(dsn, "holder") as (client,), psycopg.connect(dsn) as stranger:
        client.try_acquire("job")
        client.release("job")
        stranger.execute("LOCK TABLE pglease_leases")
        found: list[BaseException] = []

        def attempt() -> None:
            try:
                HybridPostgresBackend.try_acquire(client.backend, _request("other"), budget(0.5))  # type: ignore[arg-type]
            except BackendUnavailable as error:
                found.append(error)

        thread = threading.Thread(target=attempt)
        thread.start()
        thread.join(20)
        stranger.rollback()

        assert found
    assert advisory_locks(dsn) == []


def test_a_grant_whose_reply_was_lost_keeps_its_lock_until_it_is_given_back(
    dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with stores(dsn, 1) as (backend,):
        grant(backend, "warm-up")
        converse = backend._once

        def lose_the_reply(*args: Any, **kwargs: Any) -> Any:
            answer = converse(*args, **kwargs)
            if isinstance(answer, Granted):
                raise BackendUnavailable("the reply was lost", outcome_unknown=True)
            return answer

        with monkeypatch.context() as patch:
            patch.setattr(backend, "_once", lose_the_reply)
            with pytest.raises(BackendUnavailable):
                backend.try_acquire(_request("job"), budget(0.5))

        assert is_bound(dsn, "job")
        assert backend.release("job", "ab" * 16, budget()) == Released()
        wait_until(lambda: len(advisory_locks(dsn)) == 1)


def test_the_lock_of_a_hold_that_lapsed_in_silence_is_given_back(dsn: str) -> None:
    with stores(dsn, 1) as (backend,):
        grant(backend, "job", 0.5)
        assert len(advisory_locks(dsn)) == 1

        wait_until(lambda: advisory_locks(dsn) == [])

        grant(backend, "job", 60)
        assert is_bound(dsn, "job")


def test_a_try_that_goes_on_when_an_earlier_one_of_its_own_would_have_lapsed_keeps_its_lock(dsn: str) -> None:
    """A grant whose reply was lost, asked for again a ttl later: in the middle of that the book is swept."""
    with stores(dsn, 1) as (backend,):
        keeper, key = backend._keeper, key_of(backend._names, "job")
        keeper.rise(keeper.sit("job", key, "an id"), clock.now())

        seat = keeper.sit("job", key, "an id")
        assert keeper.lock(seat, budget())
        keeper._do(lambda: keeper._sweep(clock.now() + 1), budget())
        keeper.ping(budget())  # behind whatever the sweep has left to be done

        assert seat.is_tied
        assert len(advisory_locks(dsn)) == 1
        keeper.rise(seat, clock.now() + 60)
        assert keeper.seat_of("an id") is seat


@pytest.mark.parametrize("granted", [False, True])
def test_a_late_try_of_what_was_given_back_meanwhile_leaves_no_lock_behind(dsn: str, granted: bool) -> None:
    with stores(dsn, 1) as (backend,):
        keeper, key = backend._keeper, key_of(backend._names, "job")
        seat = keeper.sit("job", key, "an id")
        keeper.drop(seat)
        assert keeper.lock(seat, budget())

        keeper.rise(seat, clock.now() + 0.5 if granted else None)

        wait_until(lambda: advisory_locks(dsn) == [])
        assert keeper.seat_of("an id") is None


def test_a_lock_that_vanished_under_a_living_session_ends_that_session(
    dsn: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Our account of the session is wrong then: nothing that is bound to it can be trusted."""
    with stores(dsn, 1) as (backend,):
        _, lease_id = grant(backend, "job")
        seat = backend._keeper.seat_of(lease_id)
        assert seat is not None
        assert seat.session is not None
        backend._keeper._do(lambda: seat.session and seat.session.ask("SELECT pg_advisory_unlock_all()"), budget())

        backend.release("job", lease_id, budget())

        wait_until(lambda: seat.bond.loss is not None or backend._keeper._session is None)


def test_a_forked_child_has_a_session_of_its_own(dsn: str) -> None:
    with clients(dsn, "parent") as (client,):
        client.try_acquire("job of the parent", ttl=60)
        read, write = os.pipe()
        pid = os.fork()
        if pid == 0:  # pragma: no cover
            code = 1
            try:
                mine = client.try_acquire("job of the child", ttl=60) and not client.try_acquire(
                    "job of the parent", ttl=60
                )
                os.write(write, b"%d" % mark_of(dsn, "job of the child"))
                client.close()
                code = 0 if mine else 2
            finally:
                os._exit(code)
        os.close(write)
        _, status = os.waitpid(pid, 0)
        theirs = int(os.read(read, 20))
        os.close(read)

        assert os.waitstatus_to_exitcode(status) == 0
        assert isinstance(client.backend, HybridPostgresBackend)
        assert pid_of(client.backend) != theirs
        assert client.held("job of the parent")
        assert is_bound(dsn, "job of the parent")


def test_a_dropped_backend_gives_its_session_back(dsn: str) -> None:
    backend = HybridPostgresBackend(dsn)
    grant(backend, "job", 600)
    pid = pid_of(backend)

    del backend
    gc.collect()

    wait_until(lambda: execute(dsn, "SELECT 1 FROM pg_stat_activity WHERE pid = %s", pid) == [])


def test_what_lives_in_the_session_is_set_there_and_nowhere_else(dsn: str) -> None:
    with stores(dsn, 1) as (backend,):
        pid_of(backend)
        grant(backend, "job")
        shown = "SELECT current_setting('idle_session_timeout'), current_setting('synchronous_commit')"

        session = backend._keeper._do(lambda: backend._keeper._session.ask(shown), budget())  # type: ignore[union-attr]

        with backend.connections.lend(budget()) as link:
            assert (session, link.rows(shown)) == ([("0", "off")], [("0", "on")])


def test_the_idle_session_timeout_of_the_role_does_not_end_the_session(dsn: str) -> None:
    user = psycopg.conninfo.conninfo_to_dict(dsn)["user"]
    database = psycopg.conninfo.conninfo_to_dict(dsn)["dbname"]
    execute(dsn, f"ALTER ROLE {user} IN DATABASE {database} SET idle_session_timeout = '700ms'")
    with clients(dsn, "holder") as (client,):
        client.try_acquire("job", ttl=60)
        lease = client.held("job")
        assert lease is not None

        assert not lease.lost.wait(2.0)


def test_threads_of_one_client_take_and_leave_at_once(dsn: str) -> None:
    with clients(dsn, "one", "two") as pair:
        done = time.monotonic() + 3
        taken: list[int] = []

        def work(place: int) -> None:
            while time.monotonic() < done:
                with pair[place % 2].acquire(f"job-{place % 3}", ttl=10) as lease:
                    if lease:
                        taken.append(lease.fencing_token)

        threads = [threading.Thread(target=work, args=(place,)) for place in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)

        assert len(taken) > 20
        wait_until(lambda: advisory_locks(dsn) == [])


def test_a_process_that_exits_in_order_leaves_nothing(dsn: str) -> None:
    with child('leases = PGLease("hybrid+" + dsn); leases.try_acquire("job", ttl=600); say("held")', dsn) as process:
        assert process.hear() == "held"
        assert process.end() == (0, "")

    assert is_free(dsn, "job")


def test_a_session_that_was_ended_comes_back_for_what_has_no_lock(dsn: str) -> None:
    with stores(dsn, 2) as (frozen, backend):
        grant(frozen, "job", 600)
        expire(dsn, "job")
        grant(backend, "job", 600)
        end(dsn, pid_of(backend))
        end(dsn, pid_of(frozen))

        wait_until(lambda: is_bound(dsn, "job"))


def _request(name: str) -> Request:
    return Request(name, "somebody", "ab" * 16, 60)


def test_the_address_may_have_the_prefix_in_the_class_too(dsn: str) -> None:
    backend = HybridPostgresBackend(hybrid(dsn))
    try:
        grant(backend, "job")
    finally:
        backend.close()
