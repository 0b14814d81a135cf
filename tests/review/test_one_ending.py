"""However many end one hold, and wherever they are interrupted: it ends once, and nothing of it is left."""

from __future__ import annotations

import gc
import threading
import time

import pytest

from pglease import BackendClosed, LeaseLostError, PGLease, watchdog
from pglease.backends.postgres import PostgresBackend
from pglease.errors import ConfigurationError
from pglease.handles import Hold
from tests.attacks.world import eventually


def test_two_threads_that_release_one_hold_cause_no_loss_and_one_of_them_is_told_that_it_did(dsn, monkeypatch):
    first_is_on_its_way, second_is_done = threading.Event(), threading.Event()
    real = PostgresBackend.release

    def release(self, *args, **kwargs):
        if threading.current_thread() is not threading.main_thread():
            first_is_on_its_way.set()
            assert second_is_done.wait(10)
        return real(self, *args, **kwargs)

    monkeypatch.setattr(PostgresBackend, "release", release)
    lost: list[str] = []
    answers: list[bool] = []
    with PGLease(dsn, on_lease_lost=lost.append) as leases:
        lease = leases.wait_for_lease("job")
        thread = threading.Thread(target=lambda: answers.append(lease.release()))
        thread.start()
        assert first_is_on_its_way.wait(10)

        answers.append(lease.release())
        second_is_done.set()
        thread.join(10)

        assert lease.loss is None
        assert sorted(answers) == [False, True]
    assert lost == []


def test_a_block_that_is_left_while_a_signal_handler_releases_it_was_not_lost(leases, monkeypatch):
    real = PostgresBackend.release

    def release(self, *args, **kwargs):
        monkeypatch.setattr(PostgresBackend, "release", real)
        leases.release("job")  # as a signal handler would, right before the request leaves
        return real(self, *args, **kwargs)

    with leases.acquire("job") as lease:
        monkeypatch.setattr(PostgresBackend, "release", release)

    assert lease.loss is None


def test_what_is_released_through_its_handle_is_forgotten(leases):
    for number in range(3):
        leases.wait_for_lease(f"job-{number}").release()

    assert leases.taking.holds == {}
    assert leases.taking.owned == {}


def test_what_is_dropped_is_forgotten(leases, recwarn):
    context = leases.acquire("job")
    context.__enter__()
    del context
    gc.collect()

    eventually(lambda: leases.taking.holds == {})


def test_a_hold_whose_end_was_interrupted_is_renewed_no_more(dsn, rival, monkeypatch):
    with PGLease(dsn, heartbeat_interval=0.05) as leases:
        lease = leases.wait_for_lease("job", ttl=3)
        real, renewals = PostgresBackend.renew, []

        def renew(self, *args, **kwargs):
            renewals.append(args)
            return real(self, *args, **kwargs)

        def interrupt(_hold):
            monkeypatch.undo()
            monkeypatch.setattr(PostgresBackend, "renew", renew)
            raise KeyboardInterrupt

        monkeypatch.setattr(watchdog, "forget", interrupt)
        with pytest.raises(KeyboardInterrupt):
            lease.release()

        assert not lease.held
        assert rival.wait_for_lease("job", timeout=10, poll_interval=0.05)
        assert len(renewals) <= 2


def test_a_hold_that_was_released_before_it_was_begun_is_not_renewed(dsn, monkeypatch):
    with PGLease(dsn, heartbeat_interval=0.05) as leases:
        manager = leases.heartbeat_manager
        real = manager.begin

        def begin(hold):
            assert leases.release("job")
            real(hold)

        monkeypatch.setattr(manager, "begin", begin)
        leases.try_acquire("job", ttl=3)

        assert manager.holds() == []
        assert not len(manager._schedule)


def test_a_grant_that_comes_while_the_client_is_being_closed_is_not_left_behind(dsn, rival, monkeypatch):
    leases = PGLease(dsn)
    leases.try_acquire("other")
    granted, told = threading.Event(), []

    def acquire():
        try:
            told.append(leases.try_acquire("job"))
        except BackendClosed as error:
            told.append(error)
        granted.set()

    real = leases._close

    def close(*args, **kwargs):  # between the beginning of close() and whatever it does first
        threading.Thread(target=acquire).start()
        assert granted.wait(10)
        real(*args, **kwargs)

    monkeypatch.setattr(leases, "_close", close)
    leases.close()

    assert rival.try_acquire("job")


def test_a_lost_hold_never_reads_as_held_again(leases, rival, monkeypatch):
    lease = leases.wait_for_lease("job")
    seen = []
    real = Hold._note

    def note(self, loss):
        seen.append(self.held())
        real(self, loss)
        seen.append(self.held())

    leases.force_release("job", lease.fencing_token)
    assert rival.try_acquire("job")
    monkeypatch.setattr(Hold, "_note", note)

    assert lease.release() is False
    assert lease.loss is not None
    assert seen == [False, False]


def test_an_own_new_grant_ends_the_belief_in_an_older_hold_of_that_name(leases):
    older = leases.wait_for_lease("job")
    assert leases.force_release("job", older.fencing_token)

    assert leases.try_acquire("job")
    newer = leases.held("job")

    assert newer is not None
    assert newer.held
    assert not older.held
    assert older.loss is not None
    assert older.loss.reason == "taken"


def test_an_error_of_the_block_comes_out_though_its_release_was_refused(leases, monkeypatch):
    def refuse(*_args, **_kwargs):
        raise ConfigurationError("the connection factory lent a connection that is inside a transaction")

    with pytest.raises(ZeroDivisionError) as caught, leases.acquire("job"):
        monkeypatch.setattr(leases.backend, "release", refuse)
        raise ZeroDivisionError

    assert "inside a transaction" in caught.value.__notes__[0]


def test_close_goes_on_though_a_release_is_refused(dsn, rival, monkeypatch):
    leases = PGLease(dsn)
    leases.try_acquire("a")
    leases.try_acquire("b")
    real = leases.backend.release

    def refuse(name, *args, **kwargs):
        if name == "a":
            raise ConfigurationError("the connection factory lent a connection that is inside a transaction")
        return real(name, *args, **kwargs)

    monkeypatch.setattr(leases.backend, "release", refuse)
    leases.close()

    assert rival.try_acquire("b")
    assert leases.backend.connections._closed


def test_a_context_that_two_threads_enter_while_one_waits_is_refused_to_the_second(leases, rival):
    assert rival.try_acquire("job")
    context = leases.acquire("job", wait=10)
    inside, leave, looked = threading.Event(), threading.Event(), threading.Event()
    held_at_the_end = []
    real = leases.backend.try_acquire

    def look(*args):
        looked.set()
        return real(*args)

    leases.backend.try_acquire = look  # type: ignore[method-assign]

    def block():
        with context as lease:
            inside.set()
            assert leave.wait(10)
            held_at_the_end.append(bool(lease) and lease.held)

    thread = threading.Thread(target=block)
    thread.start()
    assert looked.wait(10)

    with pytest.raises(ConfigurationError, match="in use"), context:
        pass

    rival.release("job")
    assert inside.wait(10)
    leave.set()
    thread.join(10)
    assert held_at_the_end == [True]


def test_a_renewer_whose_backend_was_closed_by_its_owner_does_not_spin(dsn):
    backend = PostgresBackend(dsn)
    with PGLease(backend, heartbeat_interval=0.05) as leases:
        lease = leases.wait_for_lease("job", ttl=2)
        backend.close()

        before, began = time.process_time(), time.monotonic()
        assert lease.lost.wait(10)
        assert time.process_time() - before < 0.3 * (time.monotonic() - began)
        with pytest.raises(LeaseLostError, match="could not be reached"):
            lease.raise_if_lost()
