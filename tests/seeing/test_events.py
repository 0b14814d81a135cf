"""Observers are told of everything, in order, off the path of whoever takes leases, and harm nobody by what they do."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import gc
import logging
import pickle
import threading
from collections.abc import Iterator
from dataclasses import FrozenInstanceError, astuple
from typing import Any, get_args

import pytest

from pglease import AcquireTimeout, AsyncPGLease, BackendUnavailable, Event, LeaseLostError, MemoryBackend, PGLease
from pglease import notices as notices_module
from pglease.events import EventKind, event_of
from pglease.logbook import WARN_EVERY, Logbook
from pglease.testing.fake_clock import FakeClock
from tests.support.worlds import wait_until

SOON = 60.0


class Diary:
    """An observer that remembers."""

    def __init__(self) -> None:
        self.events: list[Event] = []

    def notify(self, event: Event) -> None:
        self.events.append(event)

    def kinds(self) -> list[str]:
        return [event.kind for event in self.events]

    def one(self, kind: str) -> Event:
        (found,) = wait_until(lambda: [event for event in self.events if event.kind == kind], SOON)
        return found


class Troubled(MemoryBackend):
    """A store whose next calls of some verbs fail."""

    def __init__(self, **failures: int) -> None:
        super().__init__()
        self.failures = failures

    def _fail(self, verb: str) -> None:
        if self.failures.get(verb, 0) > 0:
            self.failures[verb] -= 1
            raise BackendUnavailable("the store is away")

    def try_acquire(self, *args: Any) -> Any:
        self._fail("try_acquire")
        return super().try_acquire(*args)

    def renew(self, *args: Any) -> Any:
        self._fail("renew")
        return super().renew(*args)

    def release(self, *args: Any, **options: Any) -> Any:
        self._fail("release")
        return super().release(*args, **options)


@pytest.fixture
def diary() -> Diary:
    return Diary()


@pytest.fixture
def store() -> MemoryBackend:
    return MemoryBackend()


@pytest.fixture
def leases(store: MemoryBackend, diary: Diary) -> Iterator[PGLease]:
    with PGLease(store, "us", observers=[diary]) as client:
        yield client


@pytest.fixture
def rival(store: MemoryBackend) -> Iterator[PGLease]:
    with PGLease(store.another(), "rival") as client:
        yield client


# -- what is told ------------------------------------------------------------------------------------------------------


def test_a_good_day_is_attempted_acquired_renewed_and_released(leases, diary):
    with leases.acquire("job", ttl=30) as lease:
        lease.renew()

    leases.close()
    assert diary.kinds() == ["attempted", "acquired", "renewed", "released"]
    assert {event.name for event in diary.events} == {"job"}
    assert {event.owner_id for event in diary.events} == {"us"}
    assert [event.fencing_token for event in diary.events] == [None, 1, 1, 1]
    assert [event.at for event in diary.events] == sorted(event.at for event in diary.events)
    assert all((event.seconds or 0) >= 0 for event in diary.events)


def test_asking_once_for_what_somebody_has_is_busy_and_waiting_for_it_waited(leases, rival, diary):
    assert rival.try_acquire("job")

    assert not leases.try_acquire("job")
    with pytest.raises(AcquireTimeout):
        leases.wait_for_lease("job", timeout=0.2)

    leases.close()
    assert diary.kinds() == ["attempted", "busy", "attempted", "waited"]
    assert diary.events[1].owner_id == diary.events[3].owner_id == "rival"
    assert diary.events[3].seconds >= 0.2


def test_a_wait_that_is_cancelled_was_waited_too(leases, rival, diary):
    assert rival.try_acquire("job")
    cancel = threading.Event()
    cancel.set()

    with pytest.raises(AcquireTimeout):
        leases.wait_for_lease("job", cancel=cancel)

    assert diary.one("waited").owner_id in {"rival", None}


def test_trouble_with_the_store_is_failed_and_carries_it(diary):
    with PGLease(Troubled(try_acquire=1), observers=[diary]) as leases, pytest.raises(BackendUnavailable):
        leases.try_acquire("job")

    assert diary.kinds() == ["attempted", "failed"]
    assert "away" in str(diary.events[1].error)


def test_a_loss_says_why_and_after_how_long(leases, rival, diary):
    assert leases.try_acquire("job")
    assert rival.force_release("job", 1)
    with contextlib.suppress(Exception):
        leases.renew("job")

    assert diary.one("lost").reason == "forced"
    assert diary.one("lost").seconds >= 0


def test_an_operators_force_is_told_where_it_was_used(leases, rival, diary):
    assert rival.try_acquire("job")
    assert not leases.force_release("job", 7)
    assert leases.force_release("job", 1)

    assert (diary.one("forced").name, diary.one("forced").fencing_token) == ("job", 1)


def test_a_renewal_without_an_answer_is_unknown_and_tells_what_is_left(diary):
    with PGLease(Troubled(renew=1), observers=[diary]) as leases:
        lease = leases.wait_for_lease("job", ttl=30)
        with pytest.raises(BackendUnavailable):
            lease.renew()
        lease.renew()

    unknown = diary.one("unknown")
    assert 0 < unknown.seconds <= 30
    assert "away" in str(unknown.error)
    assert "renewed" in diary.kinds()


def test_a_release_that_the_store_confirms_later_is_released_late(diary):
    with PGLease(Troubled(release=1), observers=[diary]) as leases:
        with leases.acquire("job"):
            pass
        late = diary.one("released_late")

    assert diary.kinds() == ["attempted", "acquired", "unconfirmed", "released_late"]
    assert late.fencing_token == 1


def test_a_handle_that_nobody_remembers_is_released_late(leases, diary):
    context = leases.acquire("job")
    lease = context.__enter__()
    assert lease
    held = [context, lease]
    del lease, context
    with pytest.warns(ResourceWarning, match="was dropped without a release"):
        held.clear()

    assert diary.one("released_late").name == "job"


@pytest.mark.parametrize("declines", [False, True])
def test_of_several_names_the_one_in_the_way_is_told(leases, rival, diary, declines, monkeypatch):
    if declines:
        monkeypatch.setattr(MemoryBackend, "try_acquire_many", lambda *_: None)
    with leases.acquire_many(["a", "b"]) as group:
        assert group
    assert rival.try_acquire("b")
    with leases.acquire_many(["a", "b"]) as group:
        assert not group

    leases.close()
    assert diary.one("busy").name == "b"
    endings = [kind for kind in diary.kinds() if kind in {"acquired", "busy"}]
    assert diary.kinds().count("attempted") == len(endings)


def test_on_a_loop_the_same_is_told_and_a_cancelled_wait_has_failed(store, diary):
    async def main() -> None:
        async with AsyncPGLease(store.another(), "them") as other, AsyncPGLease(store, observers=[diary]) as leases:
            async with leases.acquire("job"):
                pass
            assert await other.try_acquire("job")
            waits = asyncio.create_task(leases.wait_for_lease("job", timeout=None))
            await asyncio.to_thread(wait_until, lambda: len(diary.events) == 4, SOON)
            waits.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await waits

    asyncio.run(main())

    assert diary.kinds() == ["attempted", "acquired", "released", "attempted", "failed"]


def test_an_event_that_is_told_is_one_like_any_other():
    event = Event("lost", "job", "us", 7, "taken", 1.5, at=3.0)

    told = event_of(astuple(event))

    assert type(told) is Event
    assert told == event
    assert pickle.loads(pickle.dumps(told)) == event
    with pytest.raises(FrozenInstanceError):
        told.name = "another"  # type: ignore[misc]


# -- how it is told ----------------------------------------------------------------------------------------------------

WHOSE: contextvars.ContextVar[str] = contextvars.ContextVar("whose", default="nobody's")


def test_everything_is_told_in_the_context_of_whoever_asked_also_what_a_thread_of_ours_found_out():
    told: dict[str, str] = {}

    class Asking:
        def notify(self, event: Event) -> None:
            told[event.kind] = WHOSE.get()

    def task() -> None:
        WHOSE.set("the request's")
        with pytest.raises(LeaseLostError), leases.acquire("job", ttl=0.3, heartbeat=False) as lease:
            assert lease.lost.wait(SOON)

    with PGLease(MemoryBackend(), observers=[Asking()]) as leases:
        contextvars.copy_context().run(task)

    assert told.keys() >= {"attempted", "acquired", "lost"}
    assert set(told.values()) == {"the request's"}


def test_what_an_observer_does_not_want_is_not_told():
    class Choosy(Diary):
        def wants(self, kind: str) -> bool:
            if kind == "released":
                raise RuntimeError("cannot say")
            return kind == "acquired"

    diary = Choosy()
    with PGLease(MemoryBackend(), observers=[diary]) as leases, leases.acquire("job"):
        pass

    assert diary.kinds() == ["acquired", "released"]


def test_an_observer_that_raises_keeps_nothing_from_the_others(store, diary, caplog):
    class Raising:
        def notify(self, event: Event) -> None:
            raise ValueError(event.kind)

    with PGLease(store, observers=[Raising(), diary]) as leases, leases.acquire("job"):
        pass

    assert diary.kinds() == ["attempted", "acquired", "released"]
    assert len([record for record in caplog.records if record.exc_info]) == 3


def test_an_observer_that_hangs_holds_nobody_up(store, diary, monkeypatch, caplog):
    monkeypatch.setattr(notices_module, "MOST_PENDING", 12)
    wake = threading.Event()

    class Hanging:
        def notify(self, event: Event) -> None:
            wake.wait()

    with PGLease(store, observers=[Hanging(), diary]) as leases:
        for told in range(3, 33, 3):
            with leases.acquire("job"):
                pass
            wait_until(lambda: len(diary.events) == told, SOON)  # noqa: B023  # asked at once
        wait_until(lambda: "is too slow: events are dropped" in caplog.text, SOON)
        wake.set()

    assert diary.kinds() == ["attempted", "acquired", "released"] * 10


def test_a_log_that_hangs_delays_neither_a_loss_nor_a_renewal():
    wake, stuck = threading.Event(), threading.Event()

    class Full(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if "was lost" in record.getMessage():
                stuck.set()
                wake.wait(SOON)

    handler = Full()
    logging.getLogger("pglease").addHandler(handler)
    try:
        with PGLease(MemoryBackend(), heartbeat_interval=0.05) as leases:
            kept = leases.wait_for_lease("kept", ttl=30)
            before = kept.lease.heartbeat_at
            for name in ("first", "second"):
                assert leases.try_acquire(name, ttl=0.3, heartbeat=False)
                wait_until(lambda: leases.holding() == [kept], SOON)
            assert stuck.wait(SOON)
            wait_until(lambda: kept.lease.heartbeat_at > before, SOON)
            wake.set()
    finally:
        wake.set()
        logging.getLogger("pglease").removeHandler(handler)


def test_what_is_told_after_the_client_was_closed_is_heard_too_and_leaves_no_thread(diary):
    threads: set[threading.Thread] = set()

    class Noting:
        def notify(self, event: Event) -> None:
            threads.add(threading.current_thread())

    leases = PGLease(MemoryBackend(), observers=[diary, Noting()])
    notices = leases.heartbeat_manager.notices
    leases.close()
    for number in range(50):
        notices.tell("lost", "job", fencing_token=number)

    wait_until(lambda: len(diary.events) == 50, SOON)
    wait_until(lambda: threads and not any(thread.is_alive() for thread in threads), SOON)


def test_the_threads_of_a_client_that_was_dropped_end():
    threads: list[threading.Thread] = []

    class Noting:
        def notify(self, event: Event) -> None:
            threads.append(threading.current_thread())

    leases = PGLease(MemoryBackend(), observers=[Noting()])
    with leases.acquire("job"):
        pass
    del leases
    gc.collect()

    wait_until(lambda: threads and not threads[0].is_alive(), SOON)


# -- the log -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", get_args(EventKind))
def test_every_kind_of_news_is_written_with_its_facts_under_keys_of_our_own(kind, caplog):
    caplog.set_level(logging.DEBUG, "pglease")

    Logbook().notify(Event(kind, "job", "us", 7, seconds=1.5, reason="taken" if kind == "lost" else None))

    (record,) = caplog.records
    assert "job" in record.getMessage()
    assert record.name == "pglease"
    facts = {key: value for key, value in vars(record).items() if key.startswith("lease_")}
    outcome = "taken" if kind == "lost" else kind
    assert facts == {"lease_name": "job", "lease_owner": "us", "lease_token": 7, "lease_outcome": outcome}


def test_the_levels_are_as_promised(caplog):
    caplog.set_level(logging.DEBUG, "pglease")
    book = Logbook()
    for kind in get_args(EventKind):
        book.notify(Event(kind, "job", error=ValueError("trouble")))
    book.notify(Event("lost", "closed", reason="closed"))

    levels = {record.lease_outcome: record.levelno for record in caplog.records}
    assert {kind for kind, level in levels.items() if level > logging.INFO} == {
        "lost", "at_risk", "unknown", "unconfirmed"
    }  # fmt: skip
    assert levels["lost"] == logging.ERROR
    assert levels["closed"] == levels["waiting"] == logging.INFO


@pytest.mark.parametrize(("shown", "kinds"), [("WARNING", {"lost", "unconfirmed"}), ("ERROR", {"lost"})])
def test_what_is_bad_news_is_written_though_the_log_shows_nothing_else(shown, kinds, caplog):
    caplog.set_level(shown, "pglease")
    notices = notices_module.Notices([])

    for kind in ("acquired", "lost", "released", "unconfirmed", "released_late"):
        notices.tell(kind, "job", "us", 7, reason="taken" if kind == "lost" else None, error=ValueError("trouble"))
    notices.close(SOON)

    assert {record.lease_outcome for record in caplog.records} == {
        "taken" if kind == "lost" else kind for kind in kinds
    }


def test_an_outage_warns_of_each_lease_once_in_a_while(caplog):
    book, clock = Logbook(), FakeClock(1000.0)
    for _ in range(50):
        book.notify(Event("unknown", "a", at=clock()))
        book.notify(Event("unknown", "b", at=clock()))
        clock.advance(WARN_EVERY / 25)

    assert [record.lease_name for record in caplog.records] == ["a", "b", "a", "b"]
