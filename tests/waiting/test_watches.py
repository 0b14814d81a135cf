"""Watching: what happens to leases, in order, once each, also when nobody was told."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
import weakref
from collections.abc import Iterator
from typing import Any

import pytest

from pglease import AsyncPGLease, BackendClosed, BackendUnavailable, ConfigurationError, LeaseChange, PGLease
from pglease.backends.base import Budget
from pglease.backends.memory import MemoryBackend
from tests.client import on_a_loop
from tests.support.worlds import wait_until

PATIENCE = 30.0


class Store(MemoryBackend):
    """Memory that can be deaf, and out of reach."""

    deaf = False
    down = False
    on_a_loop = False

    def listen(self, budget: Budget) -> Any:
        return None if self.deaf else super().listen(budget)

    def get(self, name: str, budget: Budget) -> Any:
        if self.down:
            raise BackendUnavailable("down")
        return super().get(name, budget)


@pytest.fixture(params=["heard", "deaf", "asyncio"])
def store(request: pytest.FixtureRequest) -> Store:
    store = Store()
    store.deaf = request.param == "deaf"
    store.on_a_loop = request.param == "asyncio"
    return store


@pytest.fixture
def holder(store: Store) -> Iterator[PGLease]:
    with PGLease(store.another(), owner_id="holder") as client:
        yield client


@pytest.fixture
def watcher(store: Store) -> Iterator[Any]:
    """A client that watches, or its other face."""
    if not store.on_a_loop:
        with PGLease(store, owner_id="watcher") as client:
            yield client
        return
    loop = on_a_loop.Loop()
    with on_a_loop.Client(loop, AsyncPGLease(store, owner_id="watcher")) as face:
        yield face
    loop.close()


def told(watch: Any) -> tuple[str, str, int]:
    """The next change; its absence fails the test."""
    change: LeaseChange | None = watch.next(PATIENCE)
    assert change is not None, "nothing was told"
    return change.kind, change.lease.owner_id, change.lease.fencing_token


def is_silent(watch: Any) -> bool:
    return watch.next(0.3) is None


def is_heard(client: Any, store: Store) -> None:
    if not store.deaf:
        wait_until(lambda: getattr(client, "client", client).taking.room.hearing, PATIENCE)


def test_what_happens_is_told_in_order_and_once(store: Store, holder: PGLease, watcher: Any) -> None:
    assert holder.try_acquire("job", ttl=600)
    with watcher.watch("job", poll_interval=0.1) as watch:
        assert told(watch) == ("present", "holder", 1)
        is_heard(watcher, store)

        holder.renew("job")
        assert is_silent(watch)
        holder.release("job")
        assert told(watch) == ("released", "holder", 1)
        assert holder.try_acquire("job", ttl=0.5, heartbeat=False)
        assert told(watch) == ("acquired", "holder", 2)
        assert told(watch) == ("expired", "holder", 2)
        assert is_silent(watch)
        assert holder.cleanup_expired() == 1
        assert holder.try_acquire("job", ttl=600)
        holder.force_release("job", holder.get_lease("job").fencing_token)  # type: ignore[union-attr]
        kinds = [told(watch)[0]]
        while kinds[-1] != "released":
            kinds.append(told(watch)[0])
        assert kinds in (["deleted", "acquired", "released"], ["acquired", "released"], ["released"])
        assert is_silent(watch)


def test_a_name_that_nobody_had_yet_is_told_of_when_somebody_takes_it(
    store: Store, holder: PGLease, watcher: Any
) -> None:
    with watcher.watch("job", poll_interval=0.1) as watch:
        assert is_silent(watch)
        assert holder.try_acquire("job", ttl=600)
        assert told(watch) == ("acquired", "holder", 1)


def test_a_hold_that_ended_before_the_watch_is_present_and_no_change(
    store: Store, holder: PGLease, watcher: Any
) -> None:
    assert holder.try_acquire("job", ttl=600)
    holder.release("job")
    with watcher.watch("job", poll_interval=0.1) as watch:
        assert told(watch) == ("present", "holder", 1)
        assert is_silent(watch)


def test_a_takeover_of_a_lapsed_hold_is_told(store: Store, holder: PGLease, watcher: Any) -> None:
    assert holder.try_acquire("job", ttl=600, heartbeat=False)
    with watcher.watch("job", poll_interval=0.1) as watch:
        assert told(watch) == ("present", "holder", 1)
        is_heard(watcher, store)
        with PGLease(store.another(), owner_id="next") as another:
            with store._store.lock:  # so that nobody sees it lapsed
                row = store._store.rows["job"]
                row.expires_at = row.heartbeat_at
                watch._seen["job"].lease = row.record("job", row.heartbeat_at)
                assert another.try_acquire("job", ttl=600)
            watch.turn()
            assert told(watch) == ("taken over", "next", 2)
        assert told(watch) == ("released", "next", 2)


def test_after_a_gap_one_change_carries_the_present_record_and_what_was_missed(
    store: Store, holder: PGLease, watcher: Any
) -> None:
    assert holder.try_acquire("job", ttl=600)
    with watcher.watch("job", poll_interval=0.1) as watch:
        assert told(watch) == ("present", "holder", 1)
        store.down = True
        for _ in range(5):
            holder.release("job")
            assert holder.try_acquire("job", ttl=600)
        store.down = False

        change = watch.next(PATIENCE)

        assert change is not None
        assert (change.kind, change.lease.fencing_token, change.missed) == ("acquired", 6, 4)
        assert is_silent(watch)


def test_a_prefix_is_watched_with_names_that_come_later(store: Store, holder: PGLease, watcher: Any) -> None:
    assert holder.try_acquire("shop:a", ttl=600)
    assert holder.try_acquire("other", ttl=600)
    with watcher.watch(prefix="shop:", poll_interval=0.1) as watch:
        assert told(watch) == ("present", "holder", 1)
        is_heard(watcher, store)
        assert holder.try_acquire("shop:b", ttl=600)
        holder.release("other")
        change = watch.next(PATIENCE)
        assert change is not None
        assert (change.name, change.kind) == ("shop:b", "acquired")
        holder.release("shop:a")
        change = watch.next(PATIENCE)
        assert change is not None
        assert (change.name, change.kind) == ("shop:a", "released")
        assert is_silent(watch)


def test_it_is_an_iterator_that_ends_when_it_is_closed(store: Store, holder: PGLease, watcher: Any) -> None:
    assert holder.try_acquire("job", ttl=600)
    watch = watcher.watch("job", poll_interval=60)
    kinds: list[str] = []
    ended = threading.Event()

    def follow() -> None:
        kinds.extend(change.kind for change in watch)
        ended.set()

    thread = threading.Thread(target=follow)
    thread.start()
    wait_until(lambda: kinds, PATIENCE)
    watch.close()

    assert ended.wait(PATIENCE)
    thread.join()
    assert kinds == ["present"]
    assert watch.next(1) is None


def test_closing_the_client_ends_its_watches_with_an_error(store: Store, watcher: Any) -> None:
    watch = watcher.watch("job", poll_interval=60)
    failed: list[BaseException] = []

    def follow() -> None:
        try:
            list(watch)
        except BackendClosed as error:
            failed.append(error)

    thread = threading.Thread(target=follow)
    thread.start()
    began = time.monotonic()
    watcher.close()
    thread.join(PATIENCE)

    assert len(failed) == 1
    assert time.monotonic() - began < 10


def test_a_watch_that_is_forgotten_costs_nothing_any_more(store: Store, watcher: Any) -> None:
    watch = watcher.watch("job", poll_interval=60)
    watch.next(0)
    gone = weakref.ref(watch)

    del watch
    gc.collect()

    assert gone() is None
    wait_until(lambda: getattr(watcher, "client", watcher).taking.room.ear._thread is None, PATIENCE)


@pytest.mark.parametrize(
    "arguments", [{}, {"name": "a", "prefix": "a"}, {"name": ""}, {"name": "a", "poll_interval": 0}]
)
def test_what_makes_no_sense_is_refused(store: Store, watcher: Any, arguments: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError):
        watcher.watch(**arguments)


def test_a_release_is_told_at_once_where_the_store_is_heard() -> None:
    store = Store()
    with PGLease(store.another()) as holder, PGLease(store) as watcher, watcher.watch("job", poll_interval=60) as watch:
        assert holder.try_acquire("job", ttl=600)
        watch.turn()
        assert told(watch)[0] in {"acquired", "present"}
        is_heard(watcher, store)
        watch.next(0.2)  # marks
        holder.release("job")
        released = time.monotonic()
        assert told(watch)[0] == "released"
        assert time.monotonic() - released < 10


# -- on an event loop --------------------------------------------------------------------------------------------------


def test_a_task_that_is_cancelled_while_it_watches_misses_nothing() -> None:
    store = Store()

    async def main(holder: PGLease) -> list[LeaseChange]:
        said: list[Any] = []
        async with AsyncPGLease(store) as leases, leases.watch("job", poll_interval=0.1) as watch:
            await watch.next(0)
            for turn in range(20):
                waiting = asyncio.create_task(watch.next(PATIENCE))
                await asyncio.sleep(0.002 * turn)
                assert (await asyncio.to_thread(holder.try_acquire, "job", 600)) is True
                waiting.cancel()
                said += await asyncio.gather(waiting, return_exceptions=True)
                await asyncio.to_thread(holder.release, "job")
            while (change := await watch.next(0.5)) is not None:
                said.append(change)
        return [change for change in said if isinstance(change, LeaseChange)]

    with PGLease(store.another()) as holder:
        changes = asyncio.run(main(holder))

    tokens = [change.lease.fencing_token for change in changes]
    assert tokens == sorted(tokens)
    assert tokens[-1] == 20
    assert len({(change.kind, change.lease.fencing_token) for change in changes}) == len(changes)
    assert len(set(tokens)) + sum(change.missed for change in changes) == 20


def test_watching_tasks_park_no_threads() -> None:
    store = Store()

    async def main() -> int:
        before = threading.active_count()
        async with AsyncPGLease(store) as leases:
            watches = [leases.watch(f"job {number}", poll_interval=60) for number in range(50)]
            tasks = [asyncio.create_task(watch.next(PATIENCE)) for watch in watches]
            await asyncio.to_thread(wait_until, lambda: all(not watch._watch.woken.is_set() for watch in watches))
            after = threading.active_count()
            for watch in watches:
                watch.close()
            assert await asyncio.gather(*tasks) == [None] * 50
        return after - before

    assert asyncio.run(main()) < 30


def test_an_asynchronous_watch_is_iterated_and_ends_when_it_is_closed() -> None:
    async def main() -> list[str]:
        kinds = []
        async with AsyncPGLease("memory://") as leases:
            assert await leases.try_acquire("job")
            async for change in (watch := leases.watch("job")):
                kinds.append(change.kind)
                if change.kind == "released":
                    watch.close()
                await leases.release("job")
        return kinds

    assert asyncio.run(main()) == ["present", "released"]
