"""What helps while a lease is in danger: warnings, signs of progress, a process that ends with its lease, signals."""

from __future__ import annotations

import asyncio
import signal
import threading

import pytest

import pglease
from pglease import (
    BackendUnavailable,
    ConfigurationError,
    Event,
    HeldLease,
    MemoryBackend,
    PGLease,
    clock,
    install_signal_handlers,
)
from pglease.backends.base import Budget
from tests.support import worlds
from tests.support.worlds import child, wait_until

SOON = 60.0


class Deaf(MemoryBackend):
    """A store that cannot be reached by renewals while it is `deaf`."""

    deaf = True
    renewals = 0

    def renew(self, renewals, budget):
        self.renewals += 1
        if self.deaf:
            raise BackendUnavailable("no answer")
        return super().renew(renewals, budget)


class Late(MemoryBackend):
    """A store whose answers to renewals get lost while it is `late`, and the renewals come to it when they are let."""

    late = False

    def __init__(self) -> None:
        super().__init__()
        self.under_way = []

    def renew(self, renewals, budget):
        if self.late:
            self.under_way.append(renewals)
            raise BackendUnavailable("no answer", outcome_unknown=True)
        return super().renew(renewals, budget)

    def arrive(self) -> None:
        """Let what was given up come to the store."""
        for renewals in self.under_way:
            super().renew(renewals, Budget.of(5, clock.now))


class Stuttering(MemoryBackend):
    """A store that is asked for a renewal twice before it answers."""

    def renew(self, renewals, budget):
        budget.sending()
        return super().renew(renewals, budget)


class Hesitant(MemoryBackend):
    """A store that answers the renewer's thread only when it may, each time."""

    def __init__(self) -> None:
        super().__init__()
        self.asked, self.may_answer = threading.Event(), threading.Semaphore(0)

    def renew(self, renewals, budget):
        budget.sending()
        if threading.current_thread() is not threading.main_thread():
            self.asked.set()
            self.may_answer.acquire(timeout=SOON)
        return [self._renew(renewal, self._store.now()) for renewal in renewals]


class Diary:
    """An observer that remembers."""

    def __init__(self) -> None:
        self.events: list[Event] = []

    def notify(self, event: Event) -> None:
        self.events.append(event)

    def kinds(self) -> list[str]:
        return [event.kind for event in self.events]


def test_a_warning_comes_before_a_loss_to_the_callback_and_to_observers():
    diary, warned = Diary(), []
    backend = Deaf()

    def warn(name: str) -> None:
        warned.append((name, lease.held))

    with PGLease(backend, observers=[diary], on_at_risk=warn) as leases:
        lease = leases.wait_for_lease("job", ttl=1.5)
        assert lease.lost.wait(SOON)
        wait_until(lambda: "lost" in diary.kinds() and warned, SOON)

    assert [name for name, _ in warned] == ["job"]
    kinds = [kind for kind in diary.kinds() if kind in {"at_risk", "lost"}]
    assert kinds == ["at_risk", "lost"]
    (risk,) = [event for event in diary.events if event.kind == "at_risk"]
    assert 0 < risk.seconds <= 0.5


def test_after_a_renewal_the_next_danger_is_told_again():
    told = threading.Semaphore(0)
    backend = Deaf()
    with PGLease(backend, on_at_risk=lambda _: told.release()) as leases:
        lease = leases.wait_for_lease("job", ttl=6)
        assert told.acquire(timeout=SOON)
        backend.deaf = False
        lease.renew()
        backend.deaf = True

        assert told.acquire(timeout=SOON)
        assert lease.held or lease.loss is not None


def test_what_is_renewed_in_time_is_never_at_risk():
    diary = Diary()
    backend = Deaf()
    backend.deaf = False
    with PGLease(backend, observers=[diary]) as leases:
        leases.wait_for_lease("job", ttl=30)
        hold = leases.taking.holds["job"]
        leases.heartbeat_manager.renew(hold, None)

    assert "at_risk" not in diary.kinds()


def lengthened_after_a_renewal_that_is_late(leases: PGLease, store: Late, *, ttl: float) -> HeldLease:
    """A hold of ten minutes, whose earlier renewal by `ttl` is still on its way to the store."""
    lease = leases.wait_for_lease("job", ttl=ttl)
    store.late = True
    with pytest.raises(BackendUnavailable):
        lease.renew()
    store.late = False
    lease.renew(600)
    return lease


def test_a_hold_that_was_lengthened_is_not_believed_for_longer_than_a_late_renewal_leaves_it():
    store = Late()
    with PGLease(store) as leases:
        lease = lengthened_after_a_renewal_that_is_late(leases, store, ttl=60)

        store.arrive()

        assert lease.remaining() < leases.get_lease("job").time_remaining() < 60


def test_it_is_renewed_as_often_as_the_shorter_ttl_needs_and_stays_held():
    store = Late()
    with PGLease(store) as leases:
        lease = lengthened_after_a_renewal_that_is_late(leases, store, ttl=6)

        store.arrive()

        wait_until(lambda: leases.get_lease("job").time_remaining() > 500, SOON)
        assert lease.held


def test_a_renewal_that_the_backend_asked_for_twice_may_be_heard_late_too():
    with PGLease(Stuttering()) as leases:
        lease = leases.wait_for_lease("job", ttl=60)
        lease.renew()
        lease.renew(600)

        assert lease.remaining() < 60


def test_an_answer_to_an_older_question_takes_nothing_from_what_is_believed():
    store, diary = Hesitant(), Diary()
    with PGLease(store, heartbeat_interval=0.1, observers=[diary]) as leases:
        lease = leases.wait_for_lease("job", ttl=60)
        assert store.asked.wait(SOON)
        lease.renew()
        believed = lease._hold.due

        store.may_answer.release()

        wait_until(lambda: diary.kinds().count("renewed") == 2, SOON)
        assert lease._hold.due == believed
        store.may_answer.release(1000)


def test_a_callback_must_be_a_plain_function():
    async def warn(name: str) -> None: ...

    with pytest.raises(ConfigurationError, match="on_at_risk must be a plain function"):
        PGLease(MemoryBackend(), on_at_risk=warn)


def test_work_that_shows_no_progress_is_not_renewed_and_loses_its_lease():
    backend = Deaf()
    backend.deaf = False
    with PGLease(backend) as leases:
        lease = leases.wait_for_lease("job", ttl=1.5)
        lease.require_progress(3600)
        wait_until(lambda: backend.renewals > 1, SOON)
        assert lease.held

        lease._hold.progress_at -= 7200  # an hour without a sign
        assert lease.lost.wait(SOON)

        assert lease.loss.reason == "expired"
        assert leases.wait_for_lease("job", timeout=SOON)


@pytest.mark.parametrize("sign", ["progress", "renew"])
def test_a_sign_of_progress_keeps_it(sign):
    backend = Deaf()
    backend.deaf = False
    with PGLease(backend) as leases:
        lease = leases.wait_for_lease("job", ttl=30)
        lease.require_progress(60)
        lease._hold.progress_at -= 120
        assert lease._hold.stalls

        getattr(lease, sign)()

        assert not lease._hold.stalls
        lease._hold.progress_at -= 120
        lease.require_progress(None)
        assert not lease._hold.stalls


def test_the_renewer_says_that_it_lives():
    with PGLease(MemoryBackend()) as leases:
        assert leases.is_alive()
        leases.try_acquire("job")
        assert leases.is_alive()
    assert not leases.is_alive()


EXITS = """
import sys, time, pglease
leases = pglease.PGLease(dsn, "child", margin=1, on_lease_lost=lambda name: say("lost", name))
with leases.acquire("job", ttl=4, on_lost="exit") as lease:
    say("held")
    if sys.argv[2] == "cut off":
        def silent(*_): raise pglease.BackendUnavailable("no answer")
        leases.backend.renew = silent
    while True:
        try:
            time.sleep(60)
        except BaseException:
            pass
"""


def test_a_process_ends_before_its_lease_can_be_anybody_elses(dsn):
    with PGLease(dsn) as leases, child(EXITS, dsn, "cut off") as process:
        process.hear()
        assert process.hear(SOON) == "lost job"

        assert process.process.wait(SOON) == 76
        assert not leases.get_lease("job").is_expired()


def test_a_process_whose_lease_was_taken_ends_at_once(dsn):
    with PGLease(dsn), child(EXITS, dsn, "") as process:
        process.hear()
        worlds.steal(dsn, "job")

        assert process.process.wait(SOON) == 76


def test_a_block_that_ended_in_time_lets_the_process_live():
    with PGLease(MemoryBackend()) as leases:
        with leases.acquire("job", ttl=5, on_lost="exit") as lease:
            assert 3 < lease.remaining() <= 4.25
        assert leases.try_acquire("job")


SIGNALLED = """
import time, pglease
pglease.install_signal_handlers()
leases = pglease.PGLease(dsn)
with leases.acquire("job", ttl=600), leases.leader_election("chief", ttl=600) as election:
    election.wait_for_leader()
    say("held")
    time.sleep(600)
"""

CANCELLED = """
import asyncio, pglease
async def main():
    pglease.cancel_on_signals()
    leases = pglease.AsyncPGLease(dsn)
    async with leases.acquire("job", ttl=600), leases.leader_election("chief", ttl=600) as election:
        await election.wait_for_leader()
        say("held")
        try:
            await asyncio.sleep(600)
        except asyncio.CancelledError:
            say("cancelled")
            raise
try:
    asyncio.run(main())
except asyncio.CancelledError:
    raise SystemExit(143)
"""


def test_only_a_task_can_be_cancelled_on_signals():
    with pytest.raises(ConfigurationError, match="in the task that is to be cancelled"):
        pglease.cancel_on_signals()


def test_of_signals_of_which_one_cannot_be_handled_none_is():
    async def main() -> None:
        with pytest.raises(ConfigurationError, match="that can be handled"):
            pglease.cancel_on_signals(signal.SIGUSR1, signal.SIGKILL)

        assert asyncio.get_running_loop().remove_signal_handler(signal.SIGUSR1) is False

    asyncio.run(main())


@pytest.mark.parametrize("script", [SIGNALLED, CANCELLED], ids=["threads", "asyncio"])
def test_a_signal_ends_a_program_in_order_and_what_it_held_is_free(dsn, script):
    with PGLease(dsn) as leases, child(script, dsn) as process:
        assert process.hear(SOON) == "held"

        process.send(signal.SIGTERM)

        assert process.process.wait(SOON) == 143
        assert leases.get_lease("job").given_back
        assert leases.get_lease("chief").given_back


def test_the_earlier_handlers_can_be_put_back():
    before = signal.getsignal(signal.SIGTERM)

    undo = install_signal_handlers(signal.SIGTERM, signal.SIGHUP)

    assert signal.getsignal(signal.SIGTERM) is not before
    undo()
    assert signal.getsignal(signal.SIGTERM) is before
    with pytest.raises(ConfigurationError, match="can be handled"):
        install_signal_handlers(signal.SIGKILL)
