"""`TaskLock`: asked once, held for a while after a short run, not renewed unless asked."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import pytest

from pglease import ConfigurationError, LeaseLostError, NotOwnedError
from tests.support.worlds import wait_until


def test_a_run_that_another_has_is_not_started(leases, rival):
    with rival.task_lock("nightly") as theirs:
        assert theirs
        with leases.task_lock("nightly") as ours:
            assert not ours
            assert ours.held_by == "rival"


def test_a_short_run_keeps_it_for_min_hold(leases, rival, store):
    with leases.task_lock("nightly", min_hold=15) as run:
        assert run

    assert leases.task_lock("nightly").locked()
    assert not rival.task_lock("nightly").acquire()
    store.lapse("nightly")
    assert rival.try_acquire("nightly")


def test_a_run_is_not_renewed_unless_asked(leases):
    with leases.task_lock("nightly", ttl=600):
        assert leases.heartbeat_manager.is_alive()
        assert len(leases.heartbeat_manager._schedule) == 0


def test_refresh_extends_and_keeps_the_token(leases):
    task = leases.task_lock("nightly", ttl=10)
    with task as run:
        assert task.refresh(600) is run
        assert run.remaining() > 500
        assert task.extend().fencing_token == run.fencing_token == 1


def test_a_body_that_outlives_its_ttl_is_told_at_the_end(leases, caplog):
    task = leases.task_lock("nightly", ttl=0.2)

    with pytest.raises(LeaseLostError, match="ran out before it was renewed"), task as run:
        assert run.lost.wait(10)
        with pytest.raises(NotOwnedError, match="its lease has ended"):
            task.refresh()

    wait_until(lambda: "the lease 'nightly' was lost" in caplog.text)


def test_release_by_hand(leases, rival):
    task = leases.task_lock("nightly")
    assert task.acquire()
    task.release()
    with pytest.raises(NotOwnedError):
        task.release()
    assert rival.try_acquire("nightly")


def test_once_per_slot(leases, rival):
    with leases.task_lock("nightly", once_per="1000h") as run:
        assert run
    with rival.task_lock("nightly", once_per="1000h") as run:
        assert not run


def test_one_object_is_one_run_at_a_time(leases):
    task = leases.task_lock("nightly")
    with task, pytest.raises(ConfigurationError, match="in use"), task:
        pass
    with task as run:
        assert run


def test_min_hold_above_ttl_needs_renewal(leases):
    with pytest.raises(ConfigurationError, match="needs renewal"):
        leases.task_lock("nightly", ttl=10, min_hold=20)
    assert leases.task_lock("nightly", ttl=10, min_hold=20, heartbeat=True)


def test_a_late_run_does_not_end_its_successors_lease(leases, rival, store):
    task = leases.task_lock("nightly")
    with ThreadPoolExecutor(1) as pool, ExitStack() as late:
        first = late.enter_context(task)
        store.lapse("nightly")
        with pytest.raises(NotOwnedError):
            first.renew()
        leaving = threading.Event()

        def run_again() -> bool:
            with task as second:
                leaving.set()
                assert ended.wait(60)
                return second.held and not rival.try_acquire("nightly")

        ended = threading.Event()
        successor = pool.submit(run_again)
        assert leaving.wait(60)
        with pytest.raises(LeaseLostError):
            late.close()
        ended.set()
        assert successor.result(60)


def test_a_refused_run_leaves_the_one_under_way_its_lease(leases, rival):
    task = leases.task_lock("nightly")
    task.acquire()

    assert not task.acquire()

    assert not rival.try_acquire("nightly")
    task.release()
