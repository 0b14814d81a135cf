"""A forked child forgets what is its parent's."""

from __future__ import annotations

import gc
import os
import weakref
from collections.abc import Callable

import pytest

from pglease import PGLease, forks, watchdog
from pglease.backends.memory import MemoryBackend
from tests.support.worlds import wait_until

pytestmark = [
    pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork"),
    pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning"),  # Python 3.12 and later: there are threads
]


class Belongings:
    """Something that belongs to the process that made it."""

    def __init__(self) -> None:
        self.forgotten_in: list[int] = []

    def forget(self) -> None:
        self.forgotten_in.append(os.getpid())


def in_child(look: Callable[[], bool]) -> bool:
    """Fork, and tell whether `look` is true in the child."""
    pid = os.fork()
    if pid == 0:
        try:
            os._exit(0 if look() else 1)
        except BaseException:
            os._exit(2)
    done: list[int] = []

    def ended() -> bool:
        found, status = os.waitpid(pid, os.WNOHANG)
        done.append(status)
        return found == pid

    wait_until(ended)
    return os.waitstatus_to_exitcode(done[-1]) == 0


def test_what_is_registered_forgets_in_the_child_and_not_in_the_parent():
    things = Belongings()
    forks.forget_in_children(things, Belongings.forget)

    assert in_child(lambda: things.forgotten_in == [os.getpid()])
    assert things.forgotten_in == []


def test_one_that_cannot_forget_keeps_no_other_from_it():
    stubborn, things = Belongings(), Belongings()
    forks.forget_in_children(stubborn, lambda _: 1 // 0)
    forks.forget_in_children(things, Belongings.forget)

    assert in_child(lambda: things.forgotten_in == [os.getpid()])


def test_a_grandchild_forgets_again():
    things = Belongings()
    forks.forget_in_children(things, Belongings.forget)

    assert in_child(lambda: in_child(lambda: things.forgotten_in == [os.getppid(), os.getpid()]))


def test_registering_keeps_nothing_alive():
    things = Belongings()
    forks.forget_in_children(things, Belongings.forget)
    left = weakref.ref(things)

    del things
    gc.collect()

    assert left() is None


def test_what_is_buried_is_never_collected():
    things = Belongings()
    left = weakref.ref(things)

    forks.bury(things)
    del things
    gc.collect()

    assert left() is not None
    forks._graveyard.remove(left())


def test_a_child_does_not_hold_its_parents_lease_and_says_so():
    with PGLease(MemoryBackend(), owner_id="parent") as leases, leases.acquire("job") as lease:

        def look() -> bool:
            return (
                not lease.held
                and lease.lost.is_set()
                and lease.loss is not None
                and lease.loss.reason == "forked"
                and lease.remaining() == 0.0
                and lease.release() is False
                and leases.holding() == []
                and leases.held("job") is None
            )

        assert in_child(look)
        assert lease.held


def test_a_child_can_use_the_same_client_and_gets_a_label_of_its_own():
    with PGLease(MemoryBackend()) as leases:
        parent = leases.owner_id

        assert in_child(lambda: leases.owner_id != parent and str(os.getpid()) in leases.owner_id)
        assert in_child(lambda: leases.try_acquire("job") and leases.release("job"))
        assert leases.owner_id == parent


def test_a_label_that_was_given_is_kept_in_the_child():
    with PGLease(MemoryBackend(), owner_id="worker") as leases:
        assert in_child(lambda: leases.owner_id == "worker")


def test_a_closed_client_is_closed_in_the_child_too():
    from pglease import BackendClosed

    leases = PGLease(MemoryBackend())
    leases.close()

    def look() -> bool:
        try:
            leases.try_acquire("job")
        except BackendClosed:
            return True
        return False

    assert in_child(look)


def test_a_child_forked_while_every_lock_is_taken_is_not_stuck():
    leases = PGLease(MemoryBackend())
    manager = leases.heartbeat_manager
    with (
        leases,
        leases.acquire("job") as lease,
        leases.taking._lock,
        manager._lock,
        manager.give_back._changed,
        lease._hold._lock,
        watchdog._watchdog._changed,
    ):
        # In the child another thread asks, for which a lock that was merely inherited would be taken for ever.
        def look() -> bool:
            from concurrent.futures import ThreadPoolExecutor

            with ThreadPoolExecutor(1) as pool:
                return pool.submit(lambda: leases.try_acquire("job") and not lease.held).result(10)

        assert in_child(look)


def test_a_child_with_a_lease_of_its_own_renews_it_on_a_thread_of_its_own():
    def look() -> bool:
        with PGLease(MemoryBackend()) as child, child.acquire("mine", ttl=3) as mine:
            first = mine.lease.heartbeat_at
            wait_until(lambda: mine.lease.heartbeat_at > first)
            return mine.held

    with PGLease(MemoryBackend()) as leases, leases.acquire("job", ttl=3) as lease:
        assert in_child(look)
        first = lease.lease.heartbeat_at
        wait_until(lambda: lease.lease.heartbeat_at > first)
