"""Places in the pool, sockets and the watchdog: nothing is lost when somebody is interrupted."""

from __future__ import annotations

import gc
import os
import socket
import threading

import pytest

from pglease import BackendUnavailable, PGLease, clock, watchdog
from pglease.backends.base import Budget
from pglease.backends.cutoff import Cutoff
from pglease.backends.postgres import PostgresBackend
from pglease.backends.postgres_connections import OwnConnections


def once(monkeypatch, owner, name):
    """Have one call of `owner.name` be interrupted before it does anything."""
    real = getattr(owner, name)

    def interrupted(*args, **kwargs):
        monkeypatch.setattr(owner, name, real)
        raise KeyboardInterrupt

    monkeypatch.setattr(owner, name, interrupted)


@pytest.mark.parametrize(
    ("owner", "name"), [(Cutoff, "arm"), (Cutoff, "disarm"), (Budget, "sending"), (OwnConnections, "_checked_out")]
)
def test_an_interrupted_conversation_gives_its_place_and_its_connection_back(dsn, monkeypatch, owner, name):
    with PGLease(dsn, pool_size=1, connect_timeout=2) as leases:
        for number in range(4):
            once(monkeypatch, owner, name)
            with pytest.raises(KeyboardInterrupt):
                leases.get_lease(f"job-{number}")
        monkeypatch.undo()

        assert leases.get_lease("job") is None
        assert leases.backend.connections._places.qsize() == 1
        assert not [thing for thing in watchdog._watchdog._watched if isinstance(thing, Cutoff)]


def test_a_conversation_that_ends_while_the_pool_is_closed_gives_its_place_back(dsn):
    backend = PostgresBackend(dsn)
    connections = backend.connections
    backend.get("job", Budget.of(5, clock.now))

    class Closing:
        """A pool that is closed between a look at it and its use."""

        def __get__(self, instance, owner):
            found = instance.__dict__["_pool"]
            instance.__dict__["_pool"] = None
            return found

        def __set__(self, instance, value):
            instance.__dict__["_pool"] = value

    pool = connections._pool
    loan = connections.lend(Budget.of(5, clock.now))
    loan.__enter__()
    watched = type("Watched", (OwnConnections,), {"_pool": Closing()})
    connections.__class__ = watched
    try:
        loan.__exit__(None, None, None)
    finally:
        connections.__class__ = OwnConnections
        pool.close()

    assert connections._places.qsize() == connections.pool_size


def test_a_stuck_call_is_cut_off_though_no_file_can_be_opened_any_more(monkeypatch):
    ours, theirs = socket.socketpair()

    def too_many(_fd):
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(os, "dup", too_many)
    with ours, theirs:
        cutoff = Cutoff(ours.fileno())
        cutoff.arm(clock.now())
        theirs.settimeout(5)

        assert theirs.recv(1) == b""
        assert cutoff.fired


def test_cutting_off_what_the_other_end_has_cut_off_already_is_no_trouble():
    """`shutdown` says ENOTCONN of a TCP connection that was reset: there is nobody left to wake."""
    with socket.create_server(("127.0.0.1", 0)) as server, socket.socket() as ours:
        cutoff = Cutoff(ours.fileno())  # never connected, which says the same, and says it every time
        cutoff.arm(clock.now() + 60)
        cutoff.overdue()
        cutoff.disarm()

        assert cutoff.fired
        assert ours.connect_ex(server.getsockname()) == 0  # nothing happened to it


def test_an_old_failure_to_connect_is_not_reported_for_a_new_shortage(dsn):
    connections = PostgresBackend(dsn).connections
    connections._report.failed(BackendUnavailable("an old story"))
    with connections.lend(Budget.of(5, clock.now)):
        pass

    with pytest.raises(BackendUnavailable) as caught, connections.lend(Budget.of(0.0, clock.now)):
        pass
    connections.close()

    assert "an old story" not in str(caught.value)


def test_the_watchdog_outlives_a_change_in_the_middle_of_its_look(dsn):
    dog = watchdog.Watchdog()
    bitten = threading.Event()

    class Thing:
        """A read of it meets the garbage collector, which has something else forgotten."""

        due = float("inf")

        def overdue(self):
            bitten.set()

    class Meddler(Thing):
        @property
        def due(self):
            dog.forget(other)
            return float("inf")

    other, late = Thing(), Thing()
    dog.watch(other)
    dog.watch(Meddler())
    dog.watch(other)
    late.due = clock.now()
    dog.watch(late)

    assert bitten.wait(5)
    assert dog._thread.is_alive()


def test_a_client_that_the_collector_finds_takes_no_lock_in_the_collector(dsn, recwarn):
    leases = PGLease(dsn)
    assert leases.try_acquire("job")
    manager, me = leases.heartbeat_manager, threading.get_ident()
    taken = []

    class Told:
        def __init__(self, lock):
            self.lock = lock

        def __enter__(self):
            taken.append(threading.get_ident())
            return self.lock.__enter__()

        def __exit__(self, *args):
            return self.lock.__exit__(*args)

    manager._lock = Told(manager._lock)
    leases.circle = leases
    del leases
    gc.collect()

    assert me not in taken
    assert any("was dropped while it held 1" in str(each.message) for each in recwarn)
