"""Waiting: handed over in milliseconds, one look for all, nothing left behind, and no rest upon being told."""

from __future__ import annotations

import asyncio
import logging
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any

import pytest

from pglease import AcquireTimeout, BackendClosed, BackendUnavailable, HeldLease, PGLease, clock, loops, options
from pglease.backends.base import Budget
from pglease.backends.memory import MemoryBackend
from pglease.records import Change, Request
from pglease.waiting import AHEAD_OF_ITS_END, Nap, Waiter, _Line, _Mark
from tests.support.worlds import all_at_once, always, wait_until

PATIENCE = 30.0


class Spied(MemoryBackend):
    """Memory that counts what it is asked, and whose hints can be lost, late or impossible."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.asked: Counter[str] = Counter()
        self.deaf = False
        self.mute = False
        self.listening: list[Any] = []

    def try_acquire(self, request: Any, budget: Budget) -> Any:
        self.asked["try_acquire"] += 1
        return super().try_acquire(request, budget)

    def mark(self, name: str, seconds: float, budget: Budget) -> bool:
        self.asked["mark"] += 1
        return super().mark(name, seconds, budget)

    def listen(self, budget: Budget) -> Any:
        self.asked["listen"] += 1
        if self.deaf:
            return None
        self.listening.append(Link(super().listen(budget), self))
        return self.listening[-1]


class Link:
    """A subscription that can be broken."""

    def __init__(self, inner: Any, store: Spied) -> None:
        self.inner, self.store, self.broken = inner, store, False

    def next(self, seconds: float) -> Sequence[Change]:
        changes = self.inner.next(min(seconds, 0.05))
        if self.broken:
            raise BackendUnavailable("the link broke")
        return [] if self.store.mute else changes

    def close(self) -> None:
        self.inner.close()


@pytest.fixture
def store() -> Spied:
    return Spied()


@pytest.fixture
def holder(store: Spied) -> Iterator[PGLease]:
    with PGLease(store.another(), owner_id="holder") as client:
        yield client


@pytest.fixture
def waiting(store: Spied) -> Iterator[PGLease]:
    with PGLease(store, owner_id="waiter") as client:
        yield client


class Waits:
    """Waiters on threads of their own, and when each got its lease."""

    def __init__(self, client: PGLease, count: int = 1, name: str = "job", **arguments: Any) -> None:
        self.client = client
        self.served: list[tuple[float, int]] = []  # when, and the fencing token
        self.errors: list[BaseException] = []
        self.arguments = {"timeout": PATIENCE, "poll_interval": PATIENCE, "ttl": 60, **arguments}
        self.threads = [threading.Thread(target=self._wait, args=(name,)) for _ in range(count)]
        for thread in self.threads:
            thread.start()

    def _wait(self, name: str) -> None:
        try:
            lease = self.client.wait_for_lease(name, **self.arguments)
            self.served.append((time.monotonic(), lease.fencing_token))
            lease.release()
        except BaseException as error:
            self.errors.append(error)

    def are_parked(self, count: int | None = None) -> None:
        wait_until(lambda: len(self.client.waiting()) == (count or len(self.threads)), PATIENCE)

    def end(self) -> None:
        for thread in self.threads:
            thread.join(PATIENCE)
            assert not thread.is_alive(), "a waiter hangs"


def is_heard(client: PGLease) -> None:
    """Return once the client hears of the names it waits for, and has marked and looked again."""
    wait_until(lambda: client.taking.room.hearing, PATIENCE)
    wait_until(lambda: client.backend.asked["mark"] >= 1, PATIENCE)


def leaves_nothing(client: PGLease) -> None:
    assert client.waiting() == []
    wait_until(lambda: client.taking.room.ear._thread is None, PATIENCE)


# -- handed over -------------------------------------------------------------------------------------------------------


def test_a_release_wakes_the_waiter_long_before_its_next_look(holder: PGLease, waiting: PGLease) -> None:
    took = []
    for _ in range(20):
        assert holder.try_acquire("job", ttl=600)
        waits = Waits(waiting)
        is_heard(waiting)
        waits.are_parked()
        holder.release("job")
        released = time.monotonic()
        waits.end()
        took.append(waits.served[0][0] - released)

    assert sorted(took)[10] < 2.0
    assert max(took) < 10


@pytest.mark.parametrize("how", ["min_hold", "force"])
def test_a_release_into_min_hold_and_a_forced_one_wake_too(holder: PGLease, waiting: PGLease, how: str) -> None:
    assert holder.try_acquire("job", ttl=600, min_hold=0.5 if how == "min_hold" else 0)
    waits = Waits(waiting)
    is_heard(waiting)

    if how == "min_hold":
        holder.release("job")
    else:
        holder.force_release("job", holder.held("job").fencing_token)  # type: ignore[union-attr]
    waits.end()

    assert len(waits.served) == 1


def test_a_waiter_that_is_told_of_another_holder_knows_its_expiry(holder: PGLease, waiting: PGLease) -> None:
    assert holder.try_acquire("job", ttl=600)
    waits = Waits(waiting)
    is_heard(waiting)
    room = waiting.taking.room
    with room.lock:  # so that the waiter cannot be faster than the other
        holder.release("job")
        with PGLease(holder.backend.another(), owner_id="brief") as brief:
            assert brief.try_acquire("job", ttl=0.5, heartbeat=False)

    waits.end()

    assert len(waits.served) == 1


def test_a_wait_on_an_event_loop_is_handed_over_and_parks_no_thread(holder: PGLease, waiting: PGLease) -> None:
    assert holder.try_acquire("job", ttl=600)
    wanted = options.hold_options("job", 60, wait=PATIENCE)

    async def main() -> float:
        before = threading.active_count()
        tasks = [asyncio.create_task(waiting.taking.atake(wanted)) for _ in range(50)]
        while len(waiting.waiting()) < 50 or not waiting.taking.room.hearing:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        assert threading.active_count() <= before + loops.MOST_CALLS + 4
        holder.release("job")
        released = time.monotonic()
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        took = time.monotonic() - released
        assert len(done) == 1
        for task in tasks:
            task.cancel()
        for found in await asyncio.gather(*tasks, return_exceptions=True):
            if isinstance(found, HeldLease):
                found.release()
        return took

    assert asyncio.run(main()) < 10
    leaves_nothing(waiting)


# -- no herd -----------------------------------------------------------------------------------------------------------


def test_parked_waiters_of_one_client_mark_once_and_do_not_look(
    store: Spied, holder: PGLease, waiting: PGLease
) -> None:
    assert holder.try_acquire("job", ttl=600)
    cancel = threading.Event()
    waits = Waits(waiting, 50, cancel=cancel)
    waits.are_parked()
    is_heard(waiting)
    wait_until(lambda: store.asked["try_acquire"] >= 51, PATIENCE)
    before = store.asked.copy()

    always(lambda: store.asked == before, 1.0)

    assert (store.asked["mark"], store.asked["listen"]) == (1, 1)
    cancel.set()
    waits.end()
    leaves_nothing(waiting)


def test_a_mark_is_renewed_before_it_lapses_however_long_the_pause_between_looks(waiting: PGLease) -> None:
    room = waiting.taking.room
    room.ear.hearing = True
    request = Request("job", "waiter", "ab" * 16, 60.0)
    waiter = Waiter(room, request, Nap(lambda: None), poll=3600, heard_poll=3600, warn_after=None, box=5)
    line = _Line(_Mark(until=1000.0), [waiter], look_at=4000.0)

    assert not room.owes_mark(line, now=900.0)
    assert room.nap(waiter, line, now=900.0) == 1000.0 - AHEAD_OF_ITS_END - 900.0
    assert room.owes_mark(line, now=1000.0 - AHEAD_OF_ITS_END)


def test_a_client_hears_all_the_names_it_waits_for_with_one_ear(
    store: Spied, holder: PGLease, waiting: PGLease
) -> None:
    names = [f"job {number}" for number in range(20)]
    assert all(holder.try_acquire(name, ttl=600) for name in names)
    waits = [Waits(waiting, name=name) for name in names]
    wait_until(lambda: store.asked["mark"] == 20, PATIENCE)

    for name in names:
        holder.release(name)
    for each in waits:
        each.end()

    assert [len(each.served) for each in waits] == [1] * 20
    assert store.asked["listen"] == 1
    leaves_nothing(waiting)


def test_a_release_wakes_one_of_many_and_the_rest_follow_one_by_one(
    store: Spied, holder: PGLease, waiting: PGLease
) -> None:
    assert holder.try_acquire("job", ttl=600)
    waits = Waits(waiting, 20)
    waits.are_parked()
    is_heard(waiting)
    wait_until(lambda: store.asked["try_acquire"] >= 21, PATIENCE)
    before = store.asked["try_acquire"]

    holder.release("job")
    waits.end()

    assert len(waits.served) == 20
    assert store.asked["try_acquire"] - before <= 60  # one of all would have been 210


class Kicks(Nap):
    """A rest that counts how often it was disturbed."""

    def __init__(self) -> None:
        super().__init__(lambda: None)
        self.count = 0

    def kick(self) -> None:
        self.count += 1


@pytest.mark.parametrize("then", ["granted", "nothing", "deaf"])
def test_one_of_a_crowd_is_woken_when_its_turn_comes_and_not_if_somebody_else_was_granted_before(
    waiting: PGLease, monkeypatch: pytest.MonkeyPatch, then: str
) -> None:
    monkeypatch.setattr("random.random", lambda: 0.9)
    room, nap = waiting.taking.room, Kicks()
    room.ear.need = lambda: None  # type: ignore[method-assign]  # the test is the ear
    room.ear.hearing, room._spread = True, 0.05
    request = Request("job", "waiter", "ab" * 16, 60.0)
    line = room.join(Waiter(room, request, nap, poll=3600, heard_poll=3600, warn_after=None, box=5))
    nap.count = 0

    room._heard([Change("job", "released", 0.0)])
    assert 0 < line.look_at - clock.now() <= 0.1
    assert nap.count == 0
    if then == "granted":
        room._heard([Change("job", "granted", 60.0)])
    elif then == "deaf":
        room._turned(False)
    while (rest := room._wake_late_ones()) < PATIENCE:
        time.sleep(rest)

    assert nap.count == (0 if then == "granted" else 1)
    room.leave(line.waiters[0], None)


def test_whoever_is_woken_and_leaves_without_looking_passes_it_on(holder: PGLease, waiting: PGLease) -> None:
    for _ in range(20):
        assert holder.try_acquire("job", ttl=600)
        cancel = threading.Event()
        first = Waits(waiting, cancel=cancel)
        first.are_parked()
        second = Waits(waiting)
        second.are_parked(2)
        is_heard(waiting)

        cancel.set()
        holder.release("job")
        first.end()
        second.end()

        assert len(second.served) == 1, second.errors


def test_a_waiter_that_is_stuck_holds_the_others_up_only_for_a_moment(holder: PGLease, waiting: PGLease) -> None:
    assert holder.try_acquire("job", ttl=600)
    wanted = options.hold_options("job", 60, wait=PATIENCE)
    blocked = threading.Event()

    async def main() -> None:
        task = asyncio.create_task(waiting.taking.atake(wanted))
        while not waiting.waiting():  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        blocked.set()
        time.sleep(3)  # noqa: ASYNC251  # a loop that is blocked, with the first waiter on it
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task

    loop = threading.Thread(target=lambda: asyncio.run(main()))
    loop.start()
    assert blocked.wait(PATIENCE)
    waits = Waits(waiting)
    waits.are_parked(2)
    is_heard(waiting)
    holder.release("job")
    released = time.monotonic()
    waits.end()
    loop.join(PATIENCE)

    assert waits.served[0][0] - released < 2.5


# -- without being told ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["deaf", "mute"])
def test_a_hold_that_lapses_is_taken_over_at_its_known_expiry(
    store: Spied, holder: PGLease, waiting: PGLease, how: str
) -> None:
    setattr(store, how, True)
    assert holder.try_acquire("job", ttl=1.0, heartbeat=False)
    lapses_at = time.monotonic() + 1.0

    waits = Waits(waiting)
    waits.end()

    assert -0.1 < waits.served[0][0] - lapses_at < 1.0


def test_where_nothing_is_heard_one_looks_every_poll_interval(store: Spied, holder: PGLease, waiting: PGLease) -> None:
    store.deaf = True
    assert holder.try_acquire("job", ttl=600)
    waits = Waits(waiting, poll_interval=0.2)
    waits.are_parked()

    holder.release("job")
    waits.end()

    assert len(waits.served) == 1
    assert store.asked["mark"] == 0


def test_where_nothing_is_heard_a_client_still_hears_of_its_own_releases(store: Spied, waiting: PGLease) -> None:
    store.deaf = True
    assert waiting.try_acquire("job", ttl=600)
    waits = Waits(waiting, 10)
    waits.are_parked()

    waiting.release("job")
    waits.end()

    assert len(waits.served) == 10


def test_after_a_break_one_hears_again_and_looks_at_once(store: Spied, holder: PGLease, waiting: PGLease) -> None:
    assert holder.try_acquire("job", ttl=600)
    waits = Waits(waiting)
    is_heard(waiting)
    store.mute = True
    holder.release("job")  # which nobody hears

    store.mute = False
    store.listening[-1].broken = True
    waits.end()

    assert len(waits.served) == 1


def test_a_name_that_was_cleaned_up_and_taken_anew_is_marked_anew(
    store: Spied, holder: PGLease, waiting: PGLease
) -> None:
    assert holder.try_acquire("job", ttl=600)
    waits = Waits(waiting)
    is_heard(waiting)
    store.mute = True
    holder.release("job")
    holder.cleanup_expired()
    assert holder.try_acquire("job", ttl=600)
    store.mute = False
    store.listening[-1].broken = True
    wait_until(lambda: store.asked["mark"] >= 2, PATIENCE)

    holder.release("job")
    waits.end()

    assert len(waits.served) == 1


# -- however it ends ---------------------------------------------------------------------------------------------------


def test_a_wait_that_runs_out_says_who_has_it_and_leaves_nothing(holder: PGLease, waiting: PGLease) -> None:
    assert holder.try_acquire("job", ttl=600)
    began = time.monotonic()

    with pytest.raises(AcquireTimeout, match="holder"):
        waiting.wait_for_lease("job", timeout=0.5)

    assert 0.45 < time.monotonic() - began < 10
    leaves_nothing(waiting)


def test_closing_the_client_ends_its_waits_at_once(holder: PGLease, waiting: PGLease) -> None:
    assert holder.try_acquire("job", ttl=600)
    waits = Waits(waiting, 5, timeout=None)
    waits.are_parked()

    began = time.monotonic()
    waiting.close()
    waits.end()

    assert time.monotonic() - began < 10
    assert [type(error) for error in waits.errors] == [BackendClosed] * 5
    wait_until(lambda: waiting.taking.room.ear._thread is None, PATIENCE)


def test_the_exception_of_a_signal_ends_a_wait_and_leaves_nothing(holder: PGLease, waiting: PGLease) -> None:
    class Alarm(Exception):
        pass

    def ring(number: int, frame: object) -> None:
        raise Alarm

    before = signal.signal(signal.SIGALRM, ring)
    try:
        for _ in range(20):
            assert holder.try_acquire("job", ttl=600)
            # Interrupted while it starts the thread that listens, Python's own `Thread.start` says KeyError instead.
            with pytest.raises((Alarm, KeyError)):
                signal.setitimer(signal.ITIMER_REAL, random.uniform(0.001, 0.05))
                waiting.wait_for_lease("job", timeout=PATIENCE)
            holder.release("job")
            assert waiting.wait_for_lease("job", timeout=PATIENCE).release()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    leaves_nothing(waiting)


@pytest.mark.parametrize("fair", [False, True])
def test_waits_cancelled_at_random_moments_leave_nothing(
    store: Spied, holder: PGLease, waiting: PGLease, fair: bool
) -> None:
    random_moment = random.Random(7)
    assert holder.try_acquire("job", ttl=600)

    def wait() -> None:
        cancel = threading.Event()
        timer = threading.Timer(random_moment.uniform(0, 0.05), cancel.set)
        timer.start()
        with suppress(AcquireTimeout):
            waiting.wait_for_lease("job", timeout=PATIENCE, cancel=cancel, fair=fair).release()
        timer.join()

    async def await_it() -> None:
        wanted = options.hold_options("job", 60, wait=PATIENCE, fair=fair)
        tasks = [asyncio.create_task(waiting.taking.atake(wanted)) for _ in range(30)]
        for task in tasks:
            await asyncio.sleep(random_moment.uniform(0, 0.01))
            task.cancel()
        for found in await asyncio.gather(*tasks, return_exceptions=True):
            if isinstance(found, HeldLease):
                found.release()

    all_at_once([wait] * 30)
    asyncio.run(await_it())

    assert holder.release("job")
    leaves_nothing(waiting)
    wait_until(lambda: holder.try_acquire("job", ttl=60), PATIENCE)
    assert not store._store.rows["job"].line.places


# -- in turn -----------------------------------------------------------------------------------------------------------


def test_fair_waiters_are_served_in_the_order_of_their_arrival(holder: PGLease, waiting: PGLease) -> None:
    other = PGLease(holder.backend.another(), owner_id="other")
    assert holder.try_acquire("job", ttl=600)
    served: list[int] = []

    def wait(client: PGLease, place: int) -> None:
        with client.acquire("job", ttl=60, wait=PATIENCE, fair=True):
            served.append(place)

    threads = []
    for place in range(8):
        client = (waiting, other)[place % 2]
        threads.append(threading.Thread(target=wait, args=(client, place)))
        threads[-1].start()
        wait_until(lambda count=place: sum(queued(c) for c in (waiting, other)) == count + 1, PATIENCE)
    assert [stands.place.ahead for stands in waiting.waiting() if stands.place] == [0, 2, 4, 6]

    holder.release("job")
    for thread in threads:
        thread.join(PATIENCE)

    assert served == list(range(8))
    other.close()


def queued(client: PGLease) -> int:
    return sum(stands.place is not None for stands in client.waiting())


def test_who_releases_and_asks_again_at_once_does_not_pass_a_fair_waiter(holder: PGLease, waiting: PGLease) -> None:
    assert holder.try_acquire("job", ttl=600)
    waits = Waits(waiting, fair=True)
    wait_until(lambda: queued(waiting) == 1, PATIENCE)

    holder.release("job")
    holder.try_acquire("job", ttl=600)
    waits.end()

    assert [token for _, token in waits.served] == [2]


# -- for people --------------------------------------------------------------------------------------------------------


def test_a_long_wait_tells_the_log_and_the_observers_who_has_it_and_where_it_stands(
    store: Spied, holder: PGLease, caplog: pytest.LogCaptureFixture
) -> None:
    events: list[Any] = []

    class Notebook:
        def notify(self, event: Any) -> None:
            events.append(event)

    assert holder.try_acquire("job", ttl=600)
    with (
        PGLease(store.another(), owner_id="waiter", observers=[Notebook()]) as client,
        caplog.at_level(logging.INFO),
        pytest.raises(AcquireTimeout),
    ):
        client.wait_for_lease("job", timeout=1.0, warn_after=0.2, fair=True)

    told = [record for record in caplog.records if "still waiting" in record.getMessage()]
    assert 1 <= len(told) <= 3
    assert {record.levelno for record in told} == {logging.INFO}
    assert all(word in told[0].getMessage() for word in ("'job'", "'holder'", "since", "s left", "0 ahead"))
    (first, *_) = [event for event in events if event.kind == "waiting"]
    assert (first.name, first.owner_id, first.waiting.lease.owner_id) == ("job", "holder", "holder")
    assert 0.15 < first.seconds < 10


def test_a_client_tells_what_it_waits_for(holder: PGLease, waiting: PGLease) -> None:
    assert holder.try_acquire("job", ttl=600)
    assert waiting.waiting() == []
    cancel = threading.Event()
    waits = Waits(waiting, cancel=cancel)
    wait_until(lambda: waiting.waiting() and waiting.waiting()[0].lease, PATIENCE)

    (stands,) = waiting.waiting()

    assert (stands.name, stands.owner_id, stands.place) == ("job", "waiter", None)
    assert stands.lease is not None
    assert stands.lease.owner_id == "holder"
    assert 0 <= stands.seconds < PATIENCE
    cancel.set()
    waits.end()
