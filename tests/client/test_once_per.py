"""`once_per`: one run per slot among all processes, by the store's clock."""

from __future__ import annotations

import random
import time

import pytest

from pglease import SKIPPED, ConfigurationError, MemoryBackend, PGLease
from pglease.testing.fake_clock import FakeClock
from tests.support.worlds import child


def test_a_second_call_in_a_slot_is_skipped(leases, rival):
    ran: list[str] = []
    ours = leases.singleton_task("job", once_per="1000h", on_skip=SKIPPED)(ran.append)
    theirs = rival.singleton_task("job", once_per="1000h", on_skip=SKIPPED)(ran.append)

    assert ours("ours") is None
    assert theirs("theirs") is SKIPPED
    assert ours("ours again") is SKIPPED
    assert ran == ["ours"]
    assert leases.holding() == []


def test_a_hundred_slots_are_a_hundred_runs_among_fifty_workers():
    clock = FakeClock()
    store = MemoryBackend(clock)
    workers = [PGLease(store.another()) for _ in range(50)]
    ran: list[int] = []

    def job(slot: int) -> None:
        ran.append(slot)
        clock.advance(0.01)

    tasks = [leases.singleton_task("job", once_per=60)(job) for leases in workers]
    dice = random.Random(7)

    for slot in range(100):
        # Clocks that are up to five seconds off: who is early asks in the slot before, and whoever is late, later.
        for task, _ in sorted(((task, dice.uniform(-5, 5)) for task in tasks), key=lambda each: each[1]):
            task(slot)
            clock.advance(0.2)
        clock.advance(50)

    for leases in workers:
        leases.close()
    assert ran == list(range(100))


IN_ANOTHER_YEAR = """
import time, datetime
real = time.time
time.time = lambda: real() + 4 * 365 * 86400
time.time_ns = lambda: int(time.time() * 1e9)
"""
RUNS_ONCE = """
import time
leases = PGLease(dsn)
say("ran" if leases.singleton_task("job", once_per="400d", on_skip=SKIPPED)(lambda: "ran")() == "ran" else "skipped")
say(str(int(time.time())))
"""


def test_a_worker_whose_clock_is_in_another_year_runs_in_the_same_slot_as_all_others(dsn):
    with PGLease(dsn) as leases:
        task = leases.singleton_task("job", once_per="400d", on_skip=SKIPPED)(lambda: "ran")
        assert task() == "ran"

        with child(RUNS_ONCE, dsn, first=IN_ANOTHER_YEAR) as worker:
            assert worker.hear(60) == "skipped"
            assert int(worker.hear(60)) > time.time() + 3 * 365 * 86400

        assert task() is SKIPPED


def test_a_worker_that_died_in_its_slot_is_taken_over():
    clock = FakeClock()
    store = MemoryBackend(clock)
    with PGLease(store.another()) as other:
        dead = PGLease(store.another())
        assert dead.try_acquire("job", ttl=10, heartbeat=False)
        task = other.singleton_task("job", once_per="1h", on_skip=SKIPPED)(lambda: "ran")

        assert task() is SKIPPED
        clock.advance(11)

        assert task() == "ran"
        dead.close()


def test_a_run_longer_than_its_slot_does_not_block_the_next(leases, rival, store):
    def body() -> None:
        store.set_back_the_grant("job")  # by twenty seconds

    assert leases.singleton_task("job", once_per=10)(body)() is None

    assert rival.try_acquire("job") or rival.wait_for_lease("job", timeout=20)


def test_a_run_that_raised_was_the_run_of_its_slot(leases, rival):
    with pytest.raises(ZeroDivisionError):
        leases.singleton_task("job", once_per="1000h")(lambda: 1 / 0)()

    assert rival.try_acquire("job") is False


def test_a_store_that_does_not_write_the_times_itself_says_so(monkeypatch):
    from dataclasses import replace

    store = MemoryBackend()
    monkeypatch.setattr(type(store), "traits", replace(store.traits, slots=False))

    with PGLease(store) as leases, pytest.raises(ConfigurationError, match=r"once_per needs .* 'slots'"):
        leases.singleton_task("job", once_per="1h")
