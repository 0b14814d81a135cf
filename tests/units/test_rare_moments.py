"""What a client does at moments that seldom come: two threads at once, an end in the middle, a second signal."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
import threading
import weakref
from types import SimpleNamespace
from typing import Any

import pytest

from pglease import (
    AsyncPGLease,
    BackendClosed,
    BackendUnavailable,
    ConfigurationError,
    MemoryBackend,
    NotAcquired,
    PGLease,
    cancel_on_signals,
    clock,
    fencing,
    heartbeat,
    identity,
    install_signal_handlers,
    logbook,
)
from pglease.backends.postgres_callers import FAILED
from pglease.callers import Callers
from pglease.client import _wind_up
from pglease.events import Event, Waiting
from pglease.handles import Hold, HoldOptions, Warned
from pglease.records import Change, Loss, Place, Request
from pglease.settings import Settings
from pglease.taking import Taking, _dropper
from pglease.testing.harness import new_id


@pytest.fixture
def leases() -> Any:
    with PGLease(MemoryBackend(), owner_id="me") as client:
        yield client


@pytest.fixture
def lease(leases: PGLease) -> Any:
    return leases.wait_for_lease("job", ttl=60)


# -- one hold ----------------------------------------------------------------------------------------------------------


def test_a_deadline_that_was_moved_meanwhile_ends_nothing(lease: Any) -> None:
    lease._hold.overdue()
    Warned(lease._hold).overdue()

    assert lease.held


def test_a_hold_that_was_lost_before_its_release_is_not_lost_again(lease: Any) -> None:
    lease._hold.lose(Loss("taken"))

    lease._hold.lose_in_release(Loss("expired"))

    assert lease.loss.reason == "taken"


@pytest.mark.parametrize("lost", [False, True], ids=["while it is held", "once it is lost"])
@pytest.mark.parametrize("asked", [False, True], ids=["and nobody has asked", "and somebody waits for its loss"])
def test_a_forked_child_knows_that_its_parents_hold_is_not_its_own(lease: Any, *, lost: bool, asked: bool) -> None:
    bell = lease.lost if asked else None
    if lost:
        lease._hold.lose(Loss("taken"))

    lease._hold.forget(Loss("forked"))

    assert not lease.held
    assert lease.loss.reason == ("taken" if lost else "forked")
    assert lease.lost.is_set()
    assert lease.lost is not bell


# -- the renewer -------------------------------------------------------------------------------------------------------


def test_a_callback_whose_client_has_gone_is_not_called(leases: Any, lease: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(heartbeat.threading, "Thread", lambda **_: pytest.fail("there is nobody to call"))

    leases.heartbeat_manager._call_back(lease._hold, lambda: None, "on_at_risk")


def test_a_renewal_that_is_stuck_beyond_its_box_is_named(leases: Any, lease: Any) -> None:
    manager = leases.heartbeat_manager
    manager._asking = frozenset({lease._hold})

    manager._asking_until = clock.now() + 3600
    assert manager.get_zombie_threads() == []
    manager._asking_until = clock.now() - 1
    assert manager.get_zombie_threads() == ["job"]
    manager._asking = frozenset()


def test_a_renewal_waits_for_another_one_no_longer_than_it_may_take(lease: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(heartbeat, "LONGEST_RENEWAL", 0.05)
    taken, over = threading.Event(), threading.Event()

    def renew() -> None:
        with lease._hold.renewing:
            taken.set()
            over.wait(60)

    thread = threading.Thread(target=renew)
    thread.start()
    taken.wait(60)
    with pytest.raises(BackendUnavailable, match="another renewal of 'job' is still under way"):
        lease.renew()
    over.set()
    thread.join(60)

    assert lease.held


def test_a_ttl_is_not_changed_while_a_renewal_by_the_old_one_is_under_way(
    leases: Any, lease: Any, monkeypatch: Any
) -> None:
    monkeypatch.setattr(leases.heartbeat_manager, "_change_ttl", lambda *_: False)

    with pytest.raises(BackendUnavailable, match="by its old ttl is still under way"):
        lease.renew(120)
    lease.renew(60)

    assert lease._hold.ttl == 60


def test_a_release_that_was_interrupted_before_it_began_has_ended_nothing(lease: Any, monkeypatch: Any) -> None:
    def interrupted(_: Any, **_options: Any) -> bool:
        raise KeyboardInterrupt

    with monkeypatch.context() as meanwhile:
        meanwhile.setattr(Hold, "end", interrupted)
        with pytest.raises(KeyboardInterrupt):
            lease.release()

    assert lease.held
    assert lease.release()


@pytest.mark.parametrize("stopped", [False, True])
def test_a_renewer_that_failed_is_started_anew_unless_it_was_to_stop(
    leases: Any, monkeypatch: Any, caplog: Any, *, stopped: bool
) -> None:
    manager, started = leases.heartbeat_manager, list[int]()

    def fail() -> bool:
        raise RuntimeError("out of memory")

    with monkeypatch.context() as meanwhile, caplog.at_level(logging.CRITICAL):
        meanwhile.setattr(manager, "_listen", fail)
        meanwhile.setattr(manager, "_start", lambda: started.append(1))
        meanwhile.setattr(manager, "_stopped", stopped)
        manager._run()

    assert started == ([] if stopped else [1])
    assert "heartbeat thread failed" in caplog.text


# -- taking and closing ------------------------------------------------------------------------------------------------


class Group(MemoryBackend):
    """A store that is told what to say of several leases at once."""

    error: Exception

    def try_acquire_many(self, *_: Any) -> Any:
        raise self.error


@pytest.mark.parametrize("unknown", [False, True], ids=["refused", "unheard"])
def test_several_leases_are_given_back_only_where_the_store_may_have_granted_them(
    monkeypatch: Any, *, unknown: bool
) -> None:
    let_go: list[str] = []
    monkeypatch.setattr(Taking, "_let_go", lambda _, request: let_go.append(request.name))
    store = Group()
    store.error = BackendUnavailable("no answer", outcome_unknown=unknown)
    with PGLease(store) as leases:
        taking = leases.taking
        asked = [Request(name, "me", new_id(), 60.0) for name in ("a", "b")]
        wanted = [HoldOptions(name, 60.0) for name in ("a", "b")]

        taking._let_all_go(asked, wanted, store.error)

    assert let_go == (["a", "b"] if unknown else [])


def test_of_several_leases_none_is_kept_where_one_could_not_be_renewed(leases: Any, monkeypatch: Any) -> None:
    begin = leases.heartbeat_manager.begin

    def no_threads_for_the_second(hold: Any) -> None:
        if hold.name == "b":
            raise RuntimeError("can't start new thread")
        begin(hold)

    monkeypatch.setattr(leases.heartbeat_manager, "begin", no_threads_for_the_second)

    with pytest.raises(BackendUnavailable, match="nothing could renew it"):
        leases.acquire_many(["a", "b"]).acquire()

    leases.heartbeat_manager.give_back.settle(60)
    assert all(record.is_expired() for record in leases.list_leases(ended=True))


def test_what_was_not_acquired_is_not_given_back(leases: Any) -> None:
    leases.taking._return(NotAcquired("job", None, 1.0))


def test_a_nap_ends_with_the_client() -> None:
    leases = PGLease(MemoryBackend())
    leases.taking.nap(0.0)
    leases.close()

    with pytest.raises(BackendClosed):
        leases.taking.nap(3600)


def test_what_is_lost_after_its_client_has_gone_is_in_no_book(lease: Any) -> None:
    class Book:
        pass

    book: Any = Book()
    drop = _dropper(weakref.ref(book))
    del book

    drop(lease._hold)

    assert lease.held


def test_a_client_without_time_to_close_in_ends_its_holds_here_alone(leases: Any, lease: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(leases.heartbeat_manager, "settle", lambda *_: pytest.fail("there is no time to ask"))

    leases._end_for_good(lease._hold, clock.now() - 1)

    assert not lease.held


def test_a_client_that_was_dropped_gives_back_what_is_not_over_yet() -> None:
    manager: Any = SimpleNamespace(
        holds=lambda: [
            SimpleNamespace(end=lambda: True, name="held", lease_id="1", min_hold=0.0),
            SimpleNamespace(end=lambda: False, name="over"),
        ],
        give_back=SimpleNamespace(
            add=lambda name, *_, **__: given_back.append(name), settle=lambda _: given_back.append("settled")
        ),
        stop=lambda _: None,
        notices=SimpleNamespace(close=lambda _: None),
    )
    given_back: list[str] = []

    _wind_up(manager, None)

    assert given_back == ["held", "settled"]


def test_an_asynchronous_client_that_goes_with_its_loop_waits_for_nothing() -> None:
    async def story() -> bool:
        client = AsyncPGLease(MemoryBackend())
        await client.__aexit__(GeneratorExit, GeneratorExit(), None)
        taken = bool(await client.try_acquire("job"))
        await client.__aexit__(None, None, None)
        return taken

    assert asyncio.run(story())


# -- around them -------------------------------------------------------------------------------------------------------


def test_a_fence_on_a_transaction_that_has_failed_is_refused(monkeypatch: Any) -> None:
    monkeypatch.setattr(fencing, "caller_of", lambda _: SimpleNamespace(state=lambda _: FAILED))

    with pytest.raises(ConfigurationError):
        fencing._caller(object())


def test_trouble_that_is_no_missing_table_of_marks_is_not_explained() -> None:
    fencing._explain(KeyError("anything"), "marks", None)


def test_gevent_is_recognised(monkeypatch: Any) -> None:
    assert identity.threads_are_green() is None

    monkeypatch.setitem(
        sys.modules, "gevent.monkey", SimpleNamespace(is_module_patched=lambda name: name == "threading")
    )

    assert identity.threads_are_green() == "gevent"


def test_whom_the_log_has_warned_of_is_not_remembered_without_end(monkeypatch: Any) -> None:
    monkeypatch.setattr(logbook, "_REMEMBERED", 2)
    book = logbook.Logbook()
    long_ago = clock.now() - 2 * logbook.WARN_EVERY
    for name, at in (("old", long_ago), ("older", long_ago), ("new", clock.now())):
        assert not book._has_warned(Event("unknown", name, at=at))

    assert list(book._warned) == ["new"]


@pytest.mark.parametrize(
    ("waiting", "said"),
    [
        (Waiting("job", "me", 5.0, reserved_for="you"), "reserved for 'you', who waits first"),
        (
            Waiting("job", "me", 5.0, place=Place(7, 3)),
            "held by somebody the store could not name; 3 ahead in the queue",
        ),
    ],
)
def test_a_wait_is_told_with_whom_it_is_for(waiting: Waiting, said: str) -> None:
    assert logbook._told(waiting).endswith(said)


def test_only_the_first_signal_ends_a_program() -> None:
    put_back = install_signal_handlers(signal.SIGUSR2)
    try:
        with pytest.raises(SystemExit) as leaving:
            signal.raise_signal(signal.SIGUSR2)
        signal.raise_signal(signal.SIGUSR2)
    finally:
        put_back()

    assert leaving.value.code == 128 + signal.SIGUSR2


def test_only_the_first_signal_cancels_a_task() -> None:
    async def story() -> int:
        task = asyncio.current_task()
        assert task is not None
        remove = cancel_on_signals(signal.SIGUSR2)
        seen = []
        try:
            for _ in range(2):
                os.kill(os.getpid(), signal.SIGUSR2)
                try:
                    await asyncio.sleep(0.2 if seen else 60)
                except asyncio.CancelledError:
                    seen.append(task.cancelling())
        finally:
            remove()
            task.uncancel()
        return len(seen)

    assert asyncio.run(story()) == 1


def test_calls_go_on_by_the_threads_there_are_and_without_any_they_are_refused(monkeypatch: Any) -> None:
    class NoThread:
        def __init__(self, **_: Any) -> None: ...

        def start(self) -> None:
            raise RuntimeError("can't start new thread")

    callers, go_on = Callers(2, "test-calls"), threading.Event()
    first = callers.submit(lambda: go_on.wait(60))
    with monkeypatch.context() as meanwhile:
        meanwhile.setattr("pglease.callers.threading.Thread", NoThread)
        second = callers.submit(lambda: "done all the same")
        with pytest.raises(BackendUnavailable, match="there is no thread for a call"):
            Callers(2, "test-calls").submit(lambda: None)
    go_on.set()

    assert first.result(60)
    assert second.result(60) == "done all the same"


def test_a_watch_is_woken_by_what_it_watches_alone(leases: Any) -> None:
    for watched, name, woken in (
        ({"name": "job"}, "job", True),
        ({"name": "job"}, "job:2", False),
        ({"prefix": "job"}, "job:2", True),
    ):
        with leases.watch(**watched) as changes:
            changes.woken.clear()
            changes.hear(Change(name, "released", 0.0))
            assert changes.woken.is_set() == woken


def test_what_was_deleted_before_it_was_seen_is_no_change(leases: Any, lease: Any) -> None:
    with leases.watch("job") as changes:
        assert list(changes._changes_of("another", None)) == []
        list(changes._changes_of("job", lease.lease))
        assert [change.kind for change in changes._changes_of("job", None)] == ["deleted"]


def test_variables_are_read_once() -> None:
    settings: Any = Settings({"PGLEASE_LOCK_TTL": "5"})
    found = settings._beginning_with("PGLEASE_LOCK")
    settings._environment = {}

    assert settings._beginning_with("PGLEASE_LOCK") is found
