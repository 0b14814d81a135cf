"""`Semaphore`: at most so many at a time, each with a lease of its own."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from pglease import AcquireTimeout, ConfigurationError, NotOwnedError
from pglease.primitives import talk
from tests.support.worlds import wait_until


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


def test_whoever_waits_is_woken_by_the_release(leases, rival, looks_seldom):
    held = [rival.semaphore("db", 2, ttl=600).acquire() for _ in range(2)]
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(leases.semaphore("db", 2).acquire, 120)
        looks_seldom()

        held[1].release()

        assert waiting.result(60).release()
    held[0].release()


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


def test_two_who_ask_at_once_do_not_both_fit_under_a_limit_that_was_lowered(leases, rival):
    slots = [leases.semaphore("db", 4).acquire() for _ in range(4)]
    last = next(slot for slot in slots if slot.name == "db#slot:3")
    for slot in slots:
        if slot is not last:
            slot.release()
    talks = [(client.semaphore("db", 2)._conversation(None), client) for client in (leases, rival)]
    looks = [talk.look(next(conversation), client) for conversation, client in talks]

    taken = [_finish(conversation, look, client) for (conversation, client), look in zip(talks, looks, strict=True)]

    assert sum(map(bool, taken)) <= 1
    for slot in (*filter(None, taken), last):
        slot.release()


def _finish(conversation, answer, client):
    """Carry a talk on from an answer that others have made old."""
    try:
        while True:
            answer = talk._grant(conversation.send(answer), client)
    except StopIteration as end:
        return end.value


def test_whoever_waits_behind_a_waiter_hears_who_holds(leases, rival, store):
    with leases.semaphore("db", 1), ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(rival.semaphore("db", 1).acquire, 20)
        while not leases.list_leases("db#gate"):
            time.sleep(0.01)
        with pytest.raises(AcquireTimeout, match="'db' is still held by 'ours'"):
            store.rival("third").semaphore("db", 1).acquire(timeout=0.3)
        leases.release("db#slot:0")
        waiting.result(30).release()


def _comes_to_the_queue(client, number: int) -> None:
    """Wait until so many wait: the first has the gate, the rest a place in its queue."""

    def there() -> int:
        return len(client.list_leases("db#gate")) + len(client.queues("db#gate").get("db#gate", ()))

    wait_until(lambda: there() == number, within=60)


def test_whoever_waits_fairly_is_served_in_the_order_of_arrival(store):
    holder, served = store.rival("holder"), []
    held = [holder.semaphore("db", 2, ttl=600).acquire() for _ in range(2)]

    def wait(owner: str) -> None:
        lease = store.rival(owner).semaphore("db", 2, ttl=600, fair=True).acquire(timeout=120)
        served.append(owner)
        lease.release()

    with ThreadPoolExecutor(5) as pool:
        waiting = []
        for number in range(1, 6):
            waiting.append(pool.submit(wait, f"waiter-{number}"))
            _comes_to_the_queue(holder, number)
        held[1].release()
        for each in waiting:
            each.result(120)

    assert served == [f"waiter-{number}" for number in range(1, 6)]
    held[0].release()


def test_nobody_who_asks_fairly_gets_past_those_who_wait(leases, rival, store):
    held = rival.semaphore("db", 1, ttl=600).acquire()
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(leases.semaphore("db", 1, ttl=600, fair=True).acquire, 120)
        _comes_to_the_queue(rival, 1)
        hasty = store.rival("hasty").semaphore("db", 1, fair=True)

        refused = hasty.acquire_nowait()
        assert refused.held_by == "rival"
        with pytest.raises(AcquireTimeout, match="'db' is still held by 'rival'"):
            hasty.acquire(timeout=0.2)

        held.release()
        assert waiting.result(120).release()
    assert hasty.acquire(timeout=60).release()
