"""`ReadWriteLock`: many readers, or one writer."""

from __future__ import annotations

import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from pglease import AcquireTimeout, HeldLease, NotOwnedError, ReentrantError, clock
from pglease.options import hold_options
from tests.support.worlds import wait_until


def test_readers_read_together_and_writers_alone(leases, rival):
    ours, theirs = leases.read_write_lock("book"), rival.read_write_lock("book")

    with ours.read() as first, theirs.read() as second:
        assert first.held
        assert second.held
        assert len(ours.readers()) == 2
        with pytest.raises(AcquireTimeout):
            rival.read_write_lock("book").acquire_write(timeout=0)
    with ours.write(timeout=10) as writing:
        assert writing.held
        with pytest.raises(AcquireTimeout, match="held by 'ours'"):
            theirs.acquire_read(timeout=0)
        with pytest.raises(AcquireTimeout, match="held by 'ours'"):
            theirs.acquire_write(timeout=0.5)
    with theirs.read(timeout=10):
        pass


def test_a_writer_waits_for_the_readers(leases, rival):
    reading = rival.read_write_lock("book").acquire_read()

    with ThreadPoolExecutor(1) as pool:
        writing = pool.submit(leases.read_write_lock("book").acquire_write, 30)
        wait_until(lambda: not _may_read(rival))  # the intent keeps new readers out
        assert not writing.done()
        reading.release()
        assert writing.result(20).release()


def _may_read(client) -> bool:
    try:
        return client.read_write_lock("book").acquire_read(timeout=0).release()
    except AcquireTimeout:
        return False


def test_a_writer_that_gave_up_leaves_readers_alone(leases, rival):
    with rival.read_write_lock("book").read():
        with pytest.raises(AcquireTimeout):
            leases.read_write_lock("book").acquire_write(timeout=0.5)
        with rival.read_write_lock("book").read(timeout=10) as reading:
            assert reading.held


def test_never_a_writer_beside_anybody(leases, rival):
    readers, writers = 0, 0
    wrong: list[tuple[int, int]] = []
    counting = threading.Lock()

    def work(number: int) -> None:
        nonlocal readers, writers
        lock = (leases, rival)[number % 2].read_write_lock("book", ttl=600)
        writes = number % 3 == 0
        with lock.write(timeout=90) if writes else lock.read(timeout=90):
            with counting:
                readers, writers = readers + (not writes), writers + writes
                if writers > 1 or (writers and readers):
                    wrong.append((readers, writers))
            time.sleep(random.uniform(0, 0.003))
            with counting:
                readers, writers = readers - (not writes), writers - writes

    with ThreadPoolExecutor(6) as pool:
        list(pool.map(work, range(30)))

    assert wrong == []


def test_as_many_records_as_ever_read_at_once(leases):
    lock = leases.read_write_lock("book")
    for _ in range(20):
        with lock.read():
            pass

    assert len(leases.list_leases("book#reader:", ended=True)) <= 3


def test_a_writer_becomes_a_reader_with_no_writer_in_between(leases, rival):
    lock = leases.read_write_lock("book")
    writing = lock.acquire_write()

    reading = lock.downgrade(writing)

    assert reading.held
    assert not writing.held
    with pytest.raises(AcquireTimeout):
        rival.read_write_lock("book").acquire_write(timeout=0.5)
    with rival.read_write_lock("book").read(timeout=10):
        pass
    with pytest.raises(NotOwnedError):
        lock.downgrade(writing)
    reading.release()


def test_a_reader_cannot_wait_to_be_a_writer(leases):
    lock = leases.read_write_lock("book")
    with lock.read():
        with pytest.raises(ReentrantError):
            lock.acquire_write()
        with pytest.raises(AcquireTimeout):
            lock.acquire_write(timeout=0)
    with lock.write():
        with pytest.raises(ReentrantError):
            lock.acquire_read()
        with pytest.raises(ReentrantError):
            lock.acquire_write()


def test_every_writer_is_another_generation(leases):
    lock = leases.read_write_lock("book")
    assert lock.generation == 0
    with lock.write() as first:
        assert lock.generation == first.fencing_token
    with lock.read():
        assert lock.generation == first.fencing_token
    with lock.write() as second:
        assert second.fencing_token > first.fencing_token


def test_a_writer_that_died_has_poisoned_it(leases, rival):
    lock = rival.read_write_lock("book")
    assert not lock.poisoned
    with lock.write():
        assert not lock.poisoned
    assert not lock.poisoned
    dead = leases.read_write_lock("book", ttl=0.3, on_lost="log").acquire_write()
    leases.heartbeat_manager.end(dead._hold)  # it stands still: nobody renews it

    wait_until(lambda: lock.poisoned)
    assert dead.loss is not None

    with lock.write():
        pass
    assert not lock.poisoned


@pytest.mark.parametrize("ttl", [0.4, 90])
def test_a_writer_that_was_renewed_by_hand_with_another_ttl_and_died_has_poisoned_it(leases, rival, store, ttl):
    lock = rival.read_write_lock("book")
    dead = leases.read_write_lock("book", ttl=30, on_lost="log").acquire_write()
    dead.renew(ttl)
    leases.heartbeat_manager.end(dead._hold)  # it stands still: nobody renews it
    store.lapse("book#writer")

    assert lock.poisoned
    assert dead.release() is False


def test_a_writer_that_died_while_it_waited_has_poisoned_nothing(leases, rival):
    lock = leases.read_write_lock("book", ttl=0.6)
    waiting = leases.taking.take(replace(lock._writer, ttl=lock._intent_ttl, heartbeat=False))

    assert waiting.lost.wait(30)
    wait_until(lambda: rival.get_lease("book#writer").is_expired(), within=30)

    assert not rival.read_write_lock("book").poisoned


def test_whoever_waits_is_woken_by_the_release(leases, rival, looks_seldom):
    for ours, theirs in (("read", "write"), ("write", "read")):
        lock, other = leases.read_write_lock("book"), rival.read_write_lock("book", ttl=600)
        first = getattr(other, f"acquire_{theirs}")()
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(getattr(lock, f"acquire_{ours}"), 120)
            looks_seldom()

            first.release()

            assert waiting.result(60).release()


def test_a_writer_that_died_while_it_waited_keeps_readers_out_for_its_short_intent(leases, rival):
    reading = rival.read_write_lock("book").acquire_read()
    intent = leases.taking.take(hold_options("book#writer", 0.5, heartbeat=False))  # as a writer that waits, and dies

    with rival.read_write_lock("book").read(timeout=20) as another:
        assert another.held
        assert not intent.held
    reading.release()


def test_a_writer_that_lapsed_does_not_become_a_reader_beside_the_next(leases, rival, store):
    lock = leases.read_write_lock("book")
    writing = lock.acquire_write()
    store.lapse("book#writer")  # while its holder was paused, and believes in it still
    with rival.read_write_lock("book").write(timeout=10):
        with pytest.raises(NotOwnedError):
            lock.downgrade(writing)
        wait_until(lambda: not lock.readers())
    with pytest.raises(NotOwnedError):
        writing.renew()


def test_an_intent_that_lapsed_before_it_was_made_long_begins_anew(leases, store, monkeypatch):
    renew, lapses = HeldLease.renew, iter([True])

    def lapse_first(lease, ttl=None):
        if next(lapses, False):
            store.lapse("book#writer")
        renew(lease, ttl)

    monkeypatch.setattr(HeldLease, "renew", lapse_first)
    with leases.read_write_lock("book").write(timeout=20) as writing:
        assert writing.fencing_token == 2


def test_waiting_for_readers_does_not_count_as_holding(leases, rival):
    reading = rival.read_write_lock("book").acquire_read()
    with ThreadPoolExecutor(1) as pool:
        writing = pool.submit(leases.read_write_lock("book", max_hold=600).acquire_write, 30)
        wait_until(lambda: leases.list_leases("book#writer"))
        time.sleep(0.2)
        began = clock.now()
        reading.release()
        written = writing.result(30)

    assert written._hold.max_until >= began + 600
    written.release()
