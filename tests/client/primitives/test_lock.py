"""`Lock`: in the manner of `threading.Lock`, among all processes."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from pglease import (
    AcquireTimeout,
    ConfigurationError,
    LeaseLostError,
    NotOwnedError,
    ReentrantError,
    current_lease,
)


def test_a_block_holds_it_and_whoever_comes_next_waits(leases, rival):
    inside = threading.Event()
    order: list[str] = []

    def second() -> None:
        inside.wait(10)
        with rival.lock("cart"):
            order.append("second")

    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(second)
        with leases.lock("cart") as held:
            inside.set()
            assert held.held
            assert current_lease() is held
            order.append("first")
        waiting.result(20)

    assert order == ["first", "second"]


def test_acquire_and_release(leases, rival):
    lock = leases.lock("cart", metadata={"who": "us"})

    held = lock.acquire()

    assert held.fencing_token == 1
    assert held.metadata == {"who": "us"}
    assert lock.lease is held
    assert lock.locked()
    assert rival.lock("cart").locked()
    assert lock.owned()
    assert not rival.lock("cart").owned()
    lock.release()
    assert not lock.locked()
    assert not lock.owned()
    assert rival.wait_for_lease("cart").fencing_token == 2


def test_a_bounded_wait_says_who_has_it(leases, rival):
    with rival.lock("cart"), pytest.raises(AcquireTimeout, match="held by 'rival'"):
        leases.lock("cart").acquire(timeout=0.5)


def test_a_timeout_of_nothing_asks_once(leases, rival):
    with rival.lock("cart"):
        began = time.monotonic()
        with pytest.raises(AcquireTimeout):
            leases.lock("cart").acquire(timeout=0)
        assert time.monotonic() - began < 5
    lock = leases.lock("cart")
    assert lock.acquire(timeout=0)
    lock.release()


def test_acquire_nowait_answers_who_has_it(leases, rival):
    with rival.lock("cart"):
        refused = leases.lock("cart").acquire_nowait()

    assert not refused
    assert refused.held_by == "rival"


def test_a_bounded_block(leases, rival):
    with leases.lock("cart").hold(timeout=5) as held:
        assert held.held
        assert not rival.try_acquire("cart")
        with pytest.raises(AcquireTimeout), rival.lock("cart").hold(timeout=0.5):
            pass
    assert rival.try_acquire("cart")


def test_extending_keeps_the_token(leases):
    lock = leases.lock("cart", ttl=10)
    with lock as held:
        extended = lock.extend(600)

        assert extended is held
        assert held.fencing_token == 1
        assert held.remaining() > 500


def test_what_is_not_held_cannot_be_extended_or_released(leases, store):
    lock = leases.lock("cart")
    with pytest.raises(NotOwnedError, match="nothing was acquired"):
        lock.extend()
    with pytest.raises(NotOwnedError, match="nothing was acquired"):
        lock.release()
    lock.acquire()
    store.delete("cart")
    with pytest.raises(NotOwnedError):
        lock.extend()
    with pytest.raises(NotOwnedError, match="its hold has ended"):
        lock.release()


def test_a_second_release_is_refused(leases):
    lock = leases.lock("cart")
    lock.acquire()
    lock.release()

    with pytest.raises(NotOwnedError):
        lock.release()


def test_leaving_a_block_after_a_loss_is_loud(leases, store):
    lock = leases.lock("cart")

    with pytest.raises(LeaseLostError), lock as held:
        store.delete("cart")
        assert not held.ensure(1000)


def test_the_error_of_a_block_comes_out(leases, rival):
    with pytest.raises(ZeroDivisionError), leases.lock("cart"):
        _ = 1 / 0

    assert rival.try_acquire("cart")


# -- nested ------------------------------------------------------------------------------------------------------------


def test_a_nested_acquire_is_refused_also_through_another_object(leases):
    lock = leases.lock("cart")
    with lock:
        for other in (lock, leases.lock("cart")):
            with pytest.raises(ReentrantError, match="already holds 'cart'"):
                other.acquire()
            with pytest.raises(ReentrantError), other:
                pass
            with pytest.raises(ReentrantError):
                other.acquire_nowait()
        assert lock.owned()


def test_a_reentrant_lock_counts_and_keeps_its_token(leases, rival):
    outer, inner = leases.lock("cart", reentrant=True), leases.lock("cart", reentrant=True)

    first = outer.acquire()
    second = inner.acquire()
    third = inner.acquire_nowait()

    assert first is second is third
    inner.release()
    inner.release()
    assert first.held
    assert not rival.lock("cart").acquire_nowait()
    outer.release()
    assert not first.held
    assert rival.try_acquire("cart")


def test_nested_blocks_of_a_reentrant_lock_end_with_the_outermost(leases, rival):
    lock = leases.lock("cart", reentrant=True)

    with lock as outer:
        with lock as inner:
            assert inner is outer
        assert outer.held
        assert not rival.lock("cart").acquire_nowait()

    assert rival.try_acquire("cart")


def test_reentrance_is_this_threads_alone(leases):
    lock = leases.lock("cart", reentrant=True)

    with lock, ThreadPoolExecutor(1) as pool:
        assert not pool.submit(lock.acquire_nowait).result(10)


# -- threads -----------------------------------------------------------------------------------------------------------


def test_another_thread_may_release_it(leases, rival):
    lock = leases.lock("cart")
    lock.acquire()

    with ThreadPoolExecutor(1) as pool:
        pool.submit(lock.release).result(10)

    assert rival.try_acquire("cart")


def test_threads_that_share_one_object_exclude_each_other(leases):
    lock = leases.lock("cart")
    inside, most = 0, 0
    counting = threading.Lock()

    def work(_: int) -> None:
        nonlocal inside, most
        with lock:
            with counting:
                inside += 1
                most = max(most, inside)
            time.sleep(0.001)
            with counting:
                inside -= 1

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(24)))

    assert most == 1
    assert not lock.locked()


def test_a_dropped_lock_gives_its_lease_back(leases, rival):
    with pytest.warns(ResourceWarning, match="dropped without a release"):
        leases.lock("cart").acquire()

    assert rival.wait_for_lease("cart", timeout=60, poll_interval=0.05)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"name": ""}, "name"),
        ({"ttl": 0}, "ttl"),
        ({"reentrant": "yes"}, "reentrant"),
        ({"on_lost": "ignore"}, "on_lost"),
        ({"min_hold": 5, "max_hold": 3}, "min_hold"),
    ],
)
def test_what_is_wrong_is_said_when_it_is_built(leases, arguments, named):
    with pytest.raises(ConfigurationError, match=named):
        leases.lock(**{"name": "cart", **arguments})


@pytest.mark.parametrize("timeout", [-1, float("nan"), "soon", True])
def test_a_timeout_is_a_duration(leases, timeout):
    with pytest.raises(ConfigurationError, match="timeout"):
        leases.lock("cart").acquire(timeout=timeout)
