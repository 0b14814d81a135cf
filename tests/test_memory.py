"""The memory backend keeps the contract, and its own promises."""

from __future__ import annotations

import multiprocessing
import os
import threading
from collections.abc import Iterator

import pytest

from pglease import clock
from pglease.backends.base import Backend
from pglease.backends.memory import MemoryBackend, shared
from pglease.errors import BackendClosed
from pglease.records import Granted, Refused
from pglease.testing.contract import BackendContract
from pglease.testing.fake_clock import FakeClock
from pglease.testing.harness import Harness, Worker, budget


class MemoryHarness(Harness):
    """One store in memory under a clock that stands still."""

    tick = 10.0
    slack = 0.001
    model_runs = 50
    history = 4

    def __init__(self) -> None:
        self.clock = FakeClock()
        self._store = MemoryBackend(clock=self.clock, history=self.history)

    def open(self) -> Backend:
        return self._store.another()

    def pass_time(self, seconds: float) -> None:
        self.clock.advance(seconds)

    def close(self) -> None:
        self._store.close()


class TestMemory(BackendContract):
    @pytest.fixture
    def harness(self) -> Iterator[Harness]:
        harness = MemoryHarness()
        yield harness
        harness.close()


def test_without_a_clock_the_boot_clock_counts() -> None:
    alice = Worker(MemoryBackend(), "alice")

    lease = alice.hold("job", 60).lease

    assert 59 < lease.time_remaining() <= 60
    assert alice.sees("job").seen_at >= lease.seen_at


def test_a_hold_ends_at_the_very_moment_of_its_expiry() -> None:
    now = FakeClock()
    alice = Worker(MemoryBackend(clock=now), "alice")
    alice.hold("job", 10)

    now.advance(9.999)
    assert isinstance(alice.ask("job"), Refused)
    now.advance(0.001)
    assert isinstance(alice.ask("job"), Granted)


def test_a_new_name_starts_right_above_the_greatest_token_that_was_cleaned_up() -> None:
    alice = Worker(MemoryBackend(), "alice")
    for _ in range(7):
        alice.hold("old").released()
    alice.hold("older").released()
    alice.cleanup()

    assert alice.hold("new").token == 8
    assert alice.hold("old").token == 8


def test_clients_of_one_name_share_a_store_and_close_alone() -> None:
    one, two = Worker(shared("shop"), "one"), Worker(shared("shop"), "two")
    hold = one.hold("job")
    assert two.is_refused("job").held_by == "one"

    one.backend.close()

    assert two.sees("job").owner_id == "one"
    assert two.backend.release("job", hold.request.lease_id, budget())
    with pytest.raises(BackendClosed):
        one.sees("job")


def test_a_store_outlives_its_last_client() -> None:
    one = Worker(shared("attic"), "one")
    one.hold("job")
    one.backend.close()

    assert Worker(shared("attic"), "two").is_refused("job").held_by == "one"


def test_stores_of_different_names_know_nothing_of_each_other() -> None:
    Worker(shared("left"), "one").hold("job")

    assert Worker(shared("right"), "two").hold("job").token == 1


def test_two_backends_without_a_name_know_nothing_of_each_other() -> None:
    Worker(MemoryBackend(), "one").hold("job")

    Worker(MemoryBackend(), "two").hold("job")


def test_forget_empties_the_store() -> None:
    alice = Worker(MemoryBackend(), "alice")
    alice.hold("job")

    alice.backend.forget()

    assert alice.names(ended=True) == []
    assert alice.hold("job").token == 1


def test_traits_promise_no_more_than_threads_of_one_process() -> None:
    traits = MemoryBackend().traits

    assert (traits.shared_by, traits.durable, traits.clock) == ("threads", False, "process")


def test_nothing_is_announced_for_a_name_that_is_not_marked_or_no_longer() -> None:
    now = FakeClock()
    alice = Worker(MemoryBackend(clock=now), "alice")
    ear, hold = alice.listens(), alice.hold("job")
    alice.hold("other").released()
    assert alice.mark("job", 10)

    now.advance(10.1)
    hold.released()

    assert list(ear.subscription.next(0)) == []


def test_it_is_a_backend() -> None:
    assert isinstance(MemoryBackend(), Backend)


def test_its_repr_says_whether_it_is_closed() -> None:
    backend = MemoryBackend()
    assert "open" in repr(backend)

    backend.close()

    assert "closed" in repr(backend)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_a_forked_child_starts_with_an_empty_store_though_a_thread_was_inside_it() -> None:
    backend = MemoryBackend()
    alice = Worker(backend, "alice")
    hold = alice.hold("job")
    inside, leave = threading.Event(), threading.Event()

    def linger() -> None:
        with backend._store.lock:
            inside.set()
            leave.wait(30)

    thread = threading.Thread(target=linger)
    thread.start()
    assert inside.wait(10)
    answers = multiprocessing.get_context("fork").SimpleQueue()
    child = multiprocessing.get_context("fork").Process(target=lambda: answers.put(_what_a_child_sees(alice)))
    child.start()
    child.join(20)
    leave.set()
    thread.join()

    assert child.exitcode == 0, "the child is stuck behind a lock of its parent"
    assert answers.get() == ([], 1)
    assert alice.sees("job").fencing_token == hold.token


def _what_a_child_sees(alice: Worker) -> tuple[list[str], int]:
    return list(alice.names(ended=True)), alice.hold("job").token


def test_many_threads_get_through_ten_thousand_verbs_quickly() -> None:
    backend = MemoryBackend()
    began = clock.now()

    threads = [
        threading.Thread(target=_churn, args=(Worker(backend, f"w{index}"), f"job-{index}")) for index in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert clock.now() - began < 20
    assert all(lease.transitions == 799 for lease in backend.list("", budget(), ended=True))


def _churn(worker: Worker, name: str) -> None:
    for _ in range(800):
        hold = worker.hold(name)
        hold.renewed()
        hold.released()
