"""What was granted but reached nobody is given back in the background."""

from __future__ import annotations

import threading

import pytest

from pglease import giveback
from pglease.backends.base import Budget
from pglease.backends.memory import MemoryBackend
from pglease.errors import BackendUnavailable
from pglease.giveback import GiveBack
from pglease.testing.fake_clock import FakeClock
from pglease.testing.harness import Worker
from tests.support.worlds import Stopwatch, wait_until


class Moody(MemoryBackend):
    """A real store in memory whose link breaks for the next few releases, or hangs."""

    def __init__(self) -> None:
        super().__init__(FakeClock(1000.0))
        self.failures: list[BaseException] = []
        self.asked: list[str] = []
        self.hang = threading.Event()
        self.hang.set()

    def release(self, name: str, lease_id: str, budget: Budget, *, min_hold: float = 0.0):
        self.asked.append(name)
        self.hang.wait(10)
        if self.failures:
            raise self.failures.pop(0)
        return super().release(name, lease_id, budget, min_hold=min_hold)


@pytest.fixture
def backend() -> Moody:
    return Moody()


@pytest.fixture
def alice(backend) -> Worker:
    return Worker(backend, "alice")


@pytest.fixture
def debts(backend, monkeypatch) -> GiveBack:
    monkeypatch.setattr(giveback, "PAUSES", (0.0, 0.01, 0.01, 0.01))
    return GiveBack(backend)


def is_free(alice: Worker, name: str) -> bool:
    lease = alice.sees(name)
    return lease.is_expired()


def test_a_hold_is_given_back(debts, alice):
    hold = alice.hold("job")

    debts.add("job", hold.request.lease_id)

    wait_until(lambda: is_free(alice, "job"))


def test_min_hold_is_kept(debts, alice, backend):
    hold = alice.hold("job", 60)

    debts.add("job", hold.request.lease_id, min_hold=10)

    wait_until(lambda: alice.sees("job").time_remaining() == 10)


def test_trouble_is_tried_again_four_times_in_all(debts, alice, backend):
    hold = alice.hold("job")
    backend.failures = [BackendUnavailable("down")] * 3

    debts.add("job", hold.request.lease_id)

    wait_until(lambda: is_free(alice, "job"))
    assert backend.asked == ["job"] * 4


def test_after_four_tries_it_is_left_to_lapse(debts, alice, backend):
    hold = alice.hold("job")
    backend.failures = [BackendUnavailable("down")] * 4

    debts.add("job", hold.request.lease_id)

    wait_until(lambda: debts._thread is None)
    assert backend.asked == ["job"] * 4
    assert not is_free(alice, "job")


def test_a_grant_that_does_not_exist_yet_is_looked_for_again(debts, alice, backend):
    """Its request may still be on its way."""
    debts.add("job", "f" * 32)
    wait_until(lambda: backend.asked)

    alice.hold("job", lease_id="f" * 32)

    wait_until(lambda: is_free(alice, "job"))


def test_somebody_elses_hold_is_never_touched(debts, alice, backend):
    alice.hold("job")

    debts.add("job", "f" * 32)

    wait_until(lambda: debts._thread is None)
    assert len(backend.asked) == 4
    assert not is_free(alice, "job")


def test_an_unexpected_error_does_not_end_the_others(debts, alice, backend, caplog):
    one, two = alice.hold("one"), alice.hold("two")
    backend.failures = [ValueError("a bug")] * 4

    debts.add("one", one.request.lease_id)
    debts.add("two", two.request.lease_id)

    wait_until(lambda: debts._thread is None)
    assert is_free(alice, "two") or is_free(alice, "one")
    assert "failed" in caplog.text


def test_a_closed_store_ends_it(debts, alice, backend):
    hold = alice.hold("job")
    backend.close()

    debts.add("job", hold.request.lease_id)

    wait_until(lambda: debts._thread is None)
    assert backend.asked == ["job"]


def test_the_thread_ends_with_the_work_and_comes_back_with_more(debts, alice):
    for name in ("one", "two"):
        hold = alice.hold(name)
        debts.add(name, hold.request.lease_id)
        wait_until(lambda: debts._thread is None)
        assert is_free(alice, name)


def test_settle_waits_for_the_first_try_of_each(debts, alice, backend):
    holds = [alice.hold(f"job-{n}") for n in range(20)]
    for hold in holds:
        debts.add(hold.name, hold.request.lease_id)

    debts.settle(5)

    assert all(is_free(alice, hold.name) for hold in holds)


def test_settle_does_not_wait_longer_than_told_behind_a_store_that_hangs(debts, alice, backend):
    hold = alice.hold("job")
    backend.hang.clear()
    debts.add("job", hold.request.lease_id)
    wait_until(lambda: backend.asked)
    watch = Stopwatch()

    debts.settle(0.2)

    assert 0.2 <= watch.seconds < 10
    backend.hang.set()
    wait_until(lambda: is_free(alice, "job"))


def test_after_settling_nothing_more_is_tried(debts, alice, backend):
    debts.settle(1)
    hold = alice.hold("job")

    debts.add("job", hold.request.lease_id)

    assert debts._thread is None
    assert backend.asked == []


def test_in_a_forked_child_the_debts_are_the_parents(debts, alice, backend):
    backend.hang.clear()
    debts.add("job", alice.hold("job").request.lease_id)
    debts.add("other", alice.hold("other").request.lease_id)
    wait_until(lambda: backend.asked)

    debts.forget()

    assert debts._debts == []
    assert debts._thread is None
    backend.hang.set()


def test_at_the_end_of_the_interpreter_it_lapses_by_itself(debts, alice, backend, monkeypatch, caplog):
    def refuse(self: threading.Thread) -> None:
        raise RuntimeError("can't create new thread at interpreter shutdown")

    hold = alice.hold("job")
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        debts.add("job", hold.request.lease_id)

    assert "left to lapse" in caplog.text
    debts.settle(1)
    assert backend.asked == []
