"""`Semaphore`: at most so many at a time, each with a lease of its own."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from pglease import AcquireTimeout, ConfigurationError, NotOwnedError


def test_as_many_hold_as_the_limit_says(leases, rival):
    ours, theirs = leases.semaphore("db", 2), rival.semaphore("db", 2)

    first, second = ours.acquire(), theirs.acquire_nowait()
    third = ours.acquire_nowait()

    assert first
    assert second
    assert not third
    assert third.held_by in {"ours", "rival"}
    assert {record.owner_id for record in ours.holders()} == {"ours", "rival"}
    first.release()
    third = theirs.acquire(timeout=10)
    assert third.held
    third.release()
    second.release()


def test_a_wait_that_is_over_says_who_holds(leases, rival):
    with rival.semaphore("db", 1), pytest.raises(AcquireTimeout, match="held by 'rival'"):
        leases.semaphore("db", 1).acquire(timeout=0.3)


def test_never_more_than_the_limit(leases, rival):
    inside, most = 0, 0
    counting = threading.Lock()

    def work(number: int) -> None:
        nonlocal inside, most
        with (leases, rival)[number % 2].semaphore("db", 3, ttl=600).hold(timeout=60):
            with counting:
                inside += 1
                most = max(most, inside)
            time.sleep(0.002)
            with counting:
                inside -= 1

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(24)))

    assert most <= 3
    assert leases.semaphore("db", 3).holders() == []


def test_a_block_holds_a_slot(leases, rival):
    with leases.semaphore("db", 1) as slot:
        assert slot.fencing_token == 1
        assert not rival.semaphore("db", 1).acquire_nowait()
    with rival.semaphore("db", 1).hold(timeout=0) as slot:
        assert slot.fencing_token == 2


def test_a_smaller_limit_counts_those_who_hold(leases, rival):
    held = [rival.semaphore("db", 3).acquire() for _ in range(3)]
    semaphore = leases.semaphore("db", 3)
    semaphore.limit = 2

    held[0].release()
    assert not semaphore.acquire_nowait()
    held[1].release()
    with semaphore as slot:
        assert slot.held
    held[2].release()


def test_a_larger_limit_makes_room(rival):
    semaphore = rival.semaphore("db", 1)
    with semaphore.hold(timeout=5):
        semaphore.limit = 2
        with semaphore.hold(timeout=5) as second:
            assert second.held
    assert semaphore.limit == 2


def test_names_that_begin_alike_are_other_semaphores(leases):
    with leases.semaphore("db#slot:x", 1):
        assert leases.semaphore("db", 1).holders() == []
        with leases.semaphore("db", 1).hold(timeout=0) as slot:
            assert slot.held


def test_a_block_is_left_by_who_entered_it(leases):
    semaphore = leases.semaphore("db", 1)
    with pytest.raises(NotOwnedError):
        semaphore.__exit__(None, None, None)


@pytest.mark.parametrize("limit", [0, -1, True, 1.5, "3", 10_001])
def test_a_limit_is_a_number(leases, limit):
    with pytest.raises(ConfigurationError, match="limit"):
        leases.semaphore("db", limit)


def test_a_long_name_is_refused(leases):
    with pytest.raises(ConfigurationError, match="name must have at most 240"):
        leases.semaphore("n" * 241, 1)
