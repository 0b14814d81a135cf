"""The lease that the running code is under, without passing the handle."""

from __future__ import annotations

import asyncio
import copy
import gc
import pickle
import threading

import pytest

import pglease
from pglease import SKIPPED, LeaseLostError, NotOwnedError, assert_held, current_lease


def test_the_innermost_block_is_the_current_one(leases):
    assert current_lease() is None
    with leases.acquire("outer") as outer:
        assert current_lease() is outer
        with leases.acquire("inner") as inner:
            assert current_lease() is inner
            assert current_lease("outer") is outer
            assert current_lease("other") is None
        assert current_lease() is outer
    assert current_lease() is None


def test_a_lock_that_was_entered_again_in_its_own_block_is_still_the_current_one_behind_that(leases):
    lock = leases.lock("job", reentrant=True)

    with lock as outer:
        with lock:
            assert current_lease() is outer
        assert assert_held("job") is outer
    assert current_lease() is None


def test_a_block_that_was_not_granted_changes_nothing(leases, rival):
    rival.try_acquire("job")

    with leases.acquire("job") as lease:
        assert not lease
        assert current_lease() is None


def test_a_decorated_function_is_under_its_lease(leases):
    @leases.singleton_task("job")
    def task() -> int:
        return assert_held("job").fencing_token

    assert task() == 1
    assert current_lease() is None


def test_a_decorated_coroutine_and_its_tasks_are_under_its_lease(leases):
    async def child() -> int:
        return assert_held().fencing_token

    @leases.singleton_task("job")
    async def task() -> int:
        return await asyncio.create_task(child())

    assert asyncio.run(task()) == 1


def test_code_under_no_lease_is_refused(leases):
    with pytest.raises(NotOwnedError, match="must run under the lease 'job': nothing around this call has taken it"):
        assert_held("job")
    with leases.acquire("other"), pytest.raises(NotOwnedError):
        assert_held("job")


def test_code_whose_lease_was_lost_is_told(leases, store):
    with leases.acquire("job", on_lost="log") as lease:
        store.delete("job")
        assert not lease.ensure(100)

        with pytest.raises(LeaseLostError):
            assert_held("job")


def test_code_whose_lease_was_released_is_told(leases):
    with leases.acquire("job") as lease:
        lease.release()

        with pytest.raises(NotOwnedError, match="it was released"):
            assert_held("job")


def test_a_new_thread_is_under_no_lease(leases):
    seen: list[object] = []
    with leases.acquire("job"):
        thread = threading.Thread(target=lambda: seen.append(current_lease()))
        thread.start()
        thread.join()

    assert seen == [None]


def test_a_block_left_by_another_thread_disturbs_nobody(leases):
    block = leases.acquire("job")
    block.__enter__()

    thread = threading.Thread(target=block.__exit__, args=(None, None, None))
    thread.start()
    thread.join()

    with pytest.raises(NotOwnedError):
        assert_held("job")


def test_a_forgotten_handle_is_not_kept_alive(leases, rival):
    with pytest.warns(ResourceWarning):  # noqa: PT031  # both
        leases.acquire("job").__enter__()
        gc.collect()

    assert rival.wait_for_lease("job", timeout=10, poll_interval=0.05)


# -- what became of a call ---------------------------------------------------------------------------------------------


def test_the_last_outcome_tells_skipped_from_none(leases, rival):
    @leases.singleton_task("job")
    def task() -> None:
        return None

    assert task.last_outcome() is None
    task()
    assert task.last_outcome() == "ran"
    rival.try_acquire("job")
    task()
    assert task.last_outcome() == "skipped"


def test_the_last_outcome_is_of_this_thread(leases):
    @leases.singleton_task("job")
    def task() -> None:
        raise KeyError

    def call() -> None:
        with pytest.raises(KeyError):
            task()

    thread = threading.Thread(target=call)
    thread.start()
    thread.join()
    assert task.last_outcome() is None

    with pytest.raises(KeyError):
        task()
    assert task.last_outcome() == "raised"


def test_methods_and_coroutines_have_a_last_outcome_too(leases):
    class Report:
        @leases.singleton_task("job")
        async def run(self) -> int:
            return 1

    async def call() -> object:
        report = Report()
        assert await report.run() == 1
        return report.run.last_outcome()

    assert asyncio.run(call()) == "ran"


def test_skipped_is_one_and_false():
    assert not SKIPPED
    assert repr(SKIPPED) == "SKIPPED"
    assert copy.deepcopy(SKIPPED) is SKIPPED
    assert pickle.loads(pickle.dumps(SKIPPED)) is pglease.SKIPPED
