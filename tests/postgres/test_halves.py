"""Questions that are sent without waiting for the answer, and what may happen to one meanwhile."""

from __future__ import annotations

import os
import select
import threading
from collections.abc import Iterator
from contextlib import closing

import pytest

from pglease.backends.base import Begun
from pglease.backends.postgres import PostgresBackend
from pglease.errors import BackendUnavailable
from pglease.records import Granted, Released, Request
from pglease.testing.contract_halves import heard
from pglease.testing.harness import budget, new_id
from tests.support.worlds import execute


def request(name: str = "job") -> Request:
    return Request(name, "me", new_id(), 60.0)


def settled(store: PostgresBackend) -> PostgresBackend:
    """Have a connection know every statement, so that each is one message."""
    asked = request("settled")
    store.try_acquire(asked, budget())
    store.release("settled", asked.lease_id, budget())
    return store


@pytest.fixture
def store(dsn: str) -> Iterator[PostgresBackend]:
    with closing(PostgresBackend(dsn, pool_size=2)) as backend:
        yield settled(backend)


def begun(store: PostgresBackend, asked: Request, seconds: float = 10.0) -> Begun:
    begun = store.begin_try_acquire(asked, budget(seconds))
    assert begun is not None
    return begun


def end_sessions(dsn: str) -> None:
    execute(dsn, "SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity WHERE application_name = 'pglease'")


def test_before_the_first_use_nothing_is_sent(dsn):
    with closing(PostgresBackend(dsn)) as store:
        assert store.begin_try_acquire(request(), budget()) is None
        assert store.begin_release("job", new_id(), budget()) is None


def test_a_connection_that_has_died_in_the_pool_costs_nothing_but_time(dsn, store):
    end_sessions(dsn)

    answer = begun(store, request())
    heard(answer)

    assert not answer.done
    assert isinstance(answer.finish(), Granted)


def test_a_session_that_ends_under_a_release_may_have_carried_it_out(dsn, store, proxy):
    with closing(PostgresBackend(proxy.through(dsn))) as distant:
        asked = request()
        assert isinstance(settled(distant).try_acquire(asked, budget()), Granted)
        dropped = proxy.drop_next_reply()
        ending = distant.begin_release("job", asked.lease_id, budget())
        assert ending is not None
        assert dropped.wait(10)
        proxy.cut()
        rival = request()
        assert isinstance(store.try_acquire(rival, budget()), Granted)

        heard(ending)

        assert not ending.done
        assert ending.finish() == Released()  # by the try whose answer was lost, and not "taken"


def test_the_answer_to_a_grant_that_was_lost_is_found_again(dsn, proxy):
    with closing(PostgresBackend(proxy.through(dsn))) as distant:
        asked = request()
        settled(distant)
        dropped = proxy.drop_next_reply()
        answer = begun(distant, asked)
        assert dropped.wait(10)
        proxy.cut()

        heard(answer)
        granted = answer.finish()

        assert isinstance(granted, Granted)
        assert granted.lease.fencing_token == 1


def test_a_server_that_is_silent_is_heard_of_by_the_end_of_the_budget(dsn, proxy):
    with closing(PostgresBackend(proxy.through(dsn))) as distant:
        settled(distant)
        proxy.black_hole()
        answer = begun(distant, request(), seconds=0.3)

        readable, _, _ = select.select([answer.fileno()], [], [], 10)

        assert readable
        heard(answer)
        assert not answer.done
        with pytest.raises(BackendUnavailable) as caught:
            answer.finish()
        assert caught.value.outcome_unknown
        proxy.pass_through()
        assert isinstance(distant.try_acquire(request("another"), budget()), Granted)


def test_an_answer_that_was_there_in_time_counts_though_its_socket_was_shut_since(store):
    answer = begun(store, request(), seconds=0.3)
    connection = answer._link.connection
    cutoff = answer._link.cutoff
    while not cutoff.fired:  # nobody looks meanwhile
        threading.Event().wait(0.02)

    heard(answer)

    assert answer.done
    assert isinstance(answer.finish(), Granted)
    assert connection.closed  # and nobody is lent it


def test_a_row_that_somebody_has_locked_is_left_to_a_thread(dsn, store):
    asked = request()
    assert isinstance(store.try_acquire(asked, budget()), Granted)
    locked, go_on = threading.Event(), threading.Event()

    def lock() -> None:
        import psycopg

        with psycopg.connect(dsn) as link:
            link.execute("SELECT 1 FROM pglease_leases FOR UPDATE")
            locked.set()
            go_on.wait(10)

    thread = threading.Thread(target=lock)
    thread.start()
    assert locked.wait(10)
    ending = store.begin_release("job", asked.lease_id, budget())
    assert ending is not None
    heard(ending)

    assert not ending.done
    go_on.set()
    assert ending.finish() == Released()
    thread.join()


def test_a_name_that_is_known_to_be_held_is_only_looked_at_until_it_is_free(dsn, store):
    other = request()
    assert isinstance(store.try_acquire(other, budget()), Granted)
    store.try_acquire(request(), budget())

    for _ in range(3):
        answer = begun(store, request())
        heard(answer)
        assert answer.finish().held_by == "me"

    execute(dsn, "UPDATE pglease_leases SET lease_id = NULL, expires_at = clock_timestamp() WHERE task_name = 'job'")
    store.release("job", other.lease_id, budget())
    answer = begun(store, request())
    heard(answer)
    assert not answer.done  # a look grants nothing
    assert isinstance(answer.finish(), Granted)


def test_what_is_dropped_takes_its_connection_along_and_no_place_of_the_pool(store):
    armed: list[bool] = []
    for number in range(5):
        answer = begun(store, request(f"job-{number}"))
        connection = answer._link.connection
        close, cutoff = connection.close, answer._link.cutoff
        connection.close = lambda close=close, cutoff=cutoff: armed.append(cutoff._armed) or close()
        answer.drop()
        assert connection.closed
        answer.drop()
        store.get("job", budget())
    assert not any(armed)  # or the watchdog might shut a socket that has its number by then


def test_threads_that_wait_for_a_connection_come_first(dsn, store):
    turns: list[None] = []

    def wait_for_a_turn() -> None:
        store.get("job", budget())
        turns.append(None)

    under_way = begun(store, request("first"))
    with store.connections.lend(budget()):
        waiting = threading.Thread(target=wait_for_a_turn)
        waiting.start()
        while not store.connections._queueing:
            threading.Event().wait(0.001)
        assert not turns
    waiting.join(10)
    assert turns
    assert not store.connections._queueing
    store.connections._queueing.append(None)  # a thread that has been woken and did not run yet
    assert store.begin_try_acquire(request("second"), budget()) is None
    store.connections._queueing.pop()
    assert begun(store, request("third")).finish()
    under_way.finish()


def test_a_connection_whose_statements_take_a_transaction_is_not_lent_and_keeps_no_place(dsn):
    with closing(PostgresBackend(dsn, pool_size=1)) as store:
        settled(store)
        with store.connections.lend(budget()) as link:
            link.in_transactions = True

        assert store.begin_try_acquire(request(), budget()) is None
        assert isinstance(store.try_acquire(request(), budget()), Granted)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system cannot fork")
def test_a_forked_child_leaves_the_parents_answer_alone(store):
    answer = begun(store, request())
    pid = os.fork()
    if pid == 0:
        try:
            answer.finish()
        except BackendUnavailable as error:
            answer.drop()
            os._exit(0 if error.outcome_unknown else 1)
        os._exit(2)

    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert isinstance(answer.finish(), Granted)
