"""Cancelled at any await, by anybody: nothing leaks, and the cancellation is neither swallowed nor turned."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from pglease import AsyncPGLease, LeaseLostError, MemoryBackend, PGLease, ReleaseError, loops
from tests.support.worlds import TABLE, Stopwatch, child, execute, is_free, wait_until

TASKS = 20
NAMES = 6
LONGEST_LIFE = 0.03
"""Seconds until a task is cancelled, at most: about what one needs from its first question to its release."""


def held_in(dsn: str) -> int:
    ((count,),) = execute(dsn, f"SELECT count(*) FROM {TABLE} WHERE expires_at > clock_timestamp()")
    return int(count)


async def use(leases: AsyncPGLease, name: str, way: int, seconds: float) -> None:
    """Take a lease in one of four ways, hold it for a moment, give it back."""
    if way < 2:
        async with leases.acquire(name, wait=(None, 5)[way], on_lost=("raise", "cancel")[way]) as _:
            await asyncio.sleep(seconds)
    elif way == 2:
        if await leases.try_acquire(name):
            try:
                await asyncio.sleep(seconds)
            finally:
                await leases.release(name)
    else:
        lease = await leases.wait_for_lease(name, timeout=5, poll_interval=0.02)
        try:
            await asyncio.sleep(seconds)
        finally:
            await lease.release()


async def by_cancel(use: Callable[[], object], life: float, times: int = 1) -> bool:
    task = asyncio.ensure_future(use())
    await asyncio.wait([task], timeout=life)
    asked = [task.cancel() for _ in range(times)]
    try:
        await task
    except asyncio.CancelledError:
        assert task.cancelled()
        return True
    assert asked == [False] * times, "a cancellation was swallowed"
    return False


async def by_timeout(use: Callable[[], object], life: float) -> bool:
    try:
        async with asyncio.timeout(life) as scope:
            await use()
    except TimeoutError:
        assert scope.expired()
        return True
    assert not scope.expired(), "a time-out was swallowed"
    return False


async def by_group(use: Callable[[], object], life: float) -> bool:
    async def fail() -> None:
        await asyncio.sleep(life)
        raise ZeroDivisionError

    with pytest.raises(ExceptionGroup) as caught:
        async with asyncio.TaskGroup() as group:
            task = group.create_task(use())
            group.create_task(fail())
    assert [type(error) for error in caught.value.exceptions] == [ZeroDivisionError]
    return task.cancelled()


async def cancel_at_random(leases: AsyncPGLease, count: int, chance: random.Random) -> int:
    """Return how many tasks were cancelled before they were through."""

    async def some() -> int:
        cancelled = 0
        for _ in range(count // TASKS):
            name, way, life = f"job-{chance.randrange(NAMES)}", chance.randrange(4), chance.uniform(0, LONGEST_LIFE)
            used = lambda name=name, way=way: use(leases, name, way, chance.uniform(0, 0.005))  # noqa: E731
            how = chance.randrange(4)
            if how == 0:
                cancelled += await by_timeout(used, life)
            elif how == 1:  # in a task of its own, for before 3.13 a group leaves its task marked as cancelled
                cancelled += await asyncio.create_task(by_group(used, life))
            else:
                cancelled += await by_cancel(used, life, times=how - 1)
        assert asyncio.current_task().cancelling() == 0
        return cancelled

    return sum(await asyncio.gather(*(some() for _ in range(TASKS))))


def cancelled_at_random(dsn: str, address: str, count: int) -> None:
    seed = random.randrange(1 << 32)
    with PGLease(address) as client:

        async def main() -> int:
            return await cancel_at_random(AsyncPGLease(client), count, random.Random(seed))

        client.list_leases()  # makes the table
        cancelled = asyncio.run(main())

        assert cancelled > count / 4, "hardly any was cancelled in time"
        wait_until(lambda: held_in(dsn) == 0)
        assert client.holding() == [], f"seed {seed}"
        assert client.taking.owned == {}, f"seed {seed}"


def test_two_thousand_random_cancellations_leave_no_lease(dsn):
    cancelled_at_random(dsn, dsn, 2000)


def test_cancellations_on_a_slow_link_find_calls_under_way_and_leave_no_lease(dsn, proxy):
    with PGLease(dsn) as client:
        client.list_leases()  # makes the table
    proxy.delay(0.004)
    cancelled_at_random(dsn, proxy.through(dsn), 400)


@pytest.mark.parametrize("life", [0.0, 0.005, 0.02, 0.1])
def test_the_end_of_the_loop_leaves_no_lease(dsn, life):
    with PGLease(dsn) as client:
        leases = AsyncPGLease(client)

        async def main() -> None:
            tasks = [asyncio.create_task(use(leases, f"job-{n % 4}", n % 4, 0.01)) for n in range(40)]
            await asyncio.wait(tasks, timeout=life)  # and `asyncio.run` cancels them

        client.list_leases()
        asyncio.run(main())

        wait_until(lambda: held_in(dsn) == 0)
        assert client.holding() == []


def test_a_timeout_around_asking_has_no_say_over_the_hold(leases, rival):
    async def main() -> None:
        async with asyncio.timeout(0.2):
            lease = await leases.wait_for_lease("job", ttl=1)
        await asyncio.sleep(1.5)
        assert lease.held
        assert rival.try_acquire("job") is False

    asyncio.run(main())


def test_a_cancelled_wait_ends_at_once_and_its_name_stays_with_its_holder(leases, rival):
    rival.try_acquire("job")

    async def main() -> None:
        for wait in (leases.wait_for_lease("job", timeout=None), leases.acquire("job", wait=60).__aenter__()):
            watch = Stopwatch()
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.05):
                    await wait
            assert watch.seconds < 5

    asyncio.run(main())

    assert rival.held("job").held
    rival.release("job")
    assert rival.try_acquire("job")


def test_a_cancelled_body_that_takes_its_time_is_held_to_its_end(leases, rival):
    """Heartbeats live as long as the hold, also while everything is shutting down."""
    begun = asyncio.Event()

    async def work() -> None:
        async with leases.acquire("job", ttl=0.6) as lease:
            begun.set()
            try:
                await asyncio.sleep(60)
            finally:
                for _ in range(18):
                    await asyncio.sleep(0.1)
                    assert rival.try_acquire("job") is False
                assert lease.held

    async def main() -> None:
        task = asyncio.create_task(work())
        await begun.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert rival.try_acquire("job") is True

    asyncio.run(main())


# -- while it releases -------------------------------------------------------------------------------------------------


class SlowRelease(MemoryBackend):
    """A store whose releases wait to be let through."""

    def __init__(self) -> None:
        super().__init__()
        self.asked, self.go_on = threading.Event(), threading.Event()

    def release(self, *args, **kwargs):
        self.asked.set()
        self.go_on.wait(20)
        return super().release(*args, **kwargs)


@contextmanager
def a_slow_release() -> Iterator[tuple[SlowRelease, AsyncPGLease, PGLease]]:
    backend = SlowRelease()
    with PGLease(backend, "ours") as client, PGLease(MemoryBackend(store=backend._store), "rival") as rival:
        try:
            yield backend, AsyncPGLease(client), rival
        finally:
            backend.go_on.set()


async def until(event: threading.Event) -> None:
    while not event.is_set():  # noqa: ASYNC110  # set on another thread
        await asyncio.sleep(0.001)


@pytest.mark.parametrize("cancels", [1, 3])
def test_a_cancellation_while_a_block_is_left_follows_its_release(cancels):
    with a_slow_release() as (backend, leases, rival):
        handles = []

        async def work() -> None:
            async with leases.acquire("job") as lease:
                handles.append(lease)

        async def main() -> None:
            task = asyncio.create_task(work())
            await until(backend.asked)
            assert not handles[0].held, "it ends here before the store hears of it"
            for _ in range(cancels):
                task.cancel()
                await asyncio.sleep(0.01)
                assert not task.done()
            backend.go_on.set()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert task.cancelling() == cancels
            assert rival.try_acquire("job") is True

        asyncio.run(main())


def test_a_release_by_hand_goes_to_its_end_and_a_second_one_has_nothing_left_to_do():
    with a_slow_release() as (backend, leases, rival):

        async def main() -> None:
            lease = await leases.wait_for_lease("job")
            task = asyncio.create_task(lease.release())
            await until(backend.asked)
            assert not lease.held
            task.cancel()
            asyncio.get_running_loop().call_later(0.05, backend.go_on.set)
            with pytest.raises(asyncio.CancelledError):
                await task
            assert await lease.release() is False
            assert rival.try_acquire("job") is True

        asyncio.run(main())


def test_a_release_that_the_store_did_not_confirm_is_finished_by_a_second_one(dsn, proxy):
    with PGLease(proxy.through(dsn)) as client:
        leases = AsyncPGLease(client)

        async def main() -> None:
            lease = await leases.acquire("job", ttl=60).__aenter__()
            proxy.black_hole()
            watch = Stopwatch()
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.1):
                    await lease.release()
            assert watch.seconds < 10
            assert not lease.held
            assert lease.fencing_token == 1
            proxy.pass_through()
            proxy.cut()
            for _ in range(20):
                try:
                    await lease.release()
                    break
                except ReleaseError:
                    await asyncio.sleep(0.1)

        asyncio.run(main())
        wait_until(lambda: is_free(dsn, "job"))


def test_an_error_of_the_body_is_out_within_a_second_though_the_store_is_silent(dsn, proxy):
    with PGLease(proxy.through(dsn)) as client:

        async def main() -> float:
            with pytest.raises(ZeroDivisionError) as caught:
                async with AsyncPGLease(client).acquire("job", ttl=60):
                    proxy.black_hole()
                    watch = Stopwatch()
                    raise ZeroDivisionError
            assert "could not be confirmed" in caught.value.__notes__[0]
            return watch.seconds

        assert asyncio.run(main()) < 3  # half a second, and what a busy machine adds
        proxy.pass_through()


def test_a_cancelled_task_stays_cancelled_though_the_store_is_silent(dsn, proxy):
    with PGLease(proxy.through(dsn)) as client:
        leases = AsyncPGLease(client)

        async def work() -> None:
            async with leases.acquire("job", ttl=60):
                begun.set()
                await asyncio.sleep(60)

        begun = asyncio.Event()

        async def main() -> float:
            task = asyncio.create_task(work())
            await begun.wait()
            proxy.black_hole()
            watch = Stopwatch()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            return watch.seconds

        assert asyncio.run(main()) < 3
        proxy.pass_through()


def test_blocks_are_left_in_time_though_every_thread_is_stuck_in_the_store():
    """More blocks than threads, none of whose releases is answered: the others are left to the background."""
    with a_slow_release() as (_, leases, _):
        begun: list[str] = []

        async def work(name: str) -> None:
            async with leases.acquire(name):
                begun.append(name)
                await asyncio.sleep(60)

        async def main() -> float:
            tasks = [asyncio.create_task(work(f"job-{n}")) for n in range(3 * loops.MOST_KEEPERS)]
            while len(begun) < len(tasks):  # noqa: ASYNC110  # counted by many tasks
                await asyncio.sleep(0.01)
            watch = Stopwatch()
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks, timeout=10, return_when=asyncio.FIRST_COMPLETED)
            await asyncio.sleep(0.2)
            assert len([task for task in tasks if task.done()]) == 2 * loops.MOST_KEEPERS
            leases.client.taking.backend.go_on.set()
            answers = await asyncio.gather(*tasks, return_exceptions=True)
            assert {type(answer) for answer in answers} == {asyncio.CancelledError}
            return watch.seconds

        assert asyncio.run(main()) < 10
        wait_until(lambda: all(lease.is_expired() for lease in leases.client.list_leases()))


def test_a_loss_that_is_found_while_leaving_a_cancelled_block_is_a_note(leases, backend):
    async def main() -> None:
        async def work() -> None:
            async with leases.acquire("job", heartbeat=False):
                begun.set()
                await asyncio.sleep(60)

        begun = asyncio.Event()
        task = asyncio.create_task(work())
        await begun.wait()
        await leases.force_release("job", 1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError) as caught:
            await task
        assert any("was lost" in note for note in caught.value.__notes__)

    asyncio.run(main())


def test_a_grant_that_meets_a_closed_client_is_given_back_and_says_so(backend, rival):
    class Late(MemoryBackend):
        def try_acquire(self, *args):
            answer = super().try_acquire(*args)
            client.close()
            return answer

    client = PGLease(Late(store=backend._store))

    async def main() -> None:
        with pytest.raises(Exception, match="closed"):
            await AsyncPGLease(client).try_acquire("job")

    asyncio.run(main())

    assert rival.try_acquire("job") is True


def test_a_grant_under_way_at_the_end_of_the_process_is_given_back(dsn, proxy):
    """The task is cancelled, the program ends at once, the reply comes later."""
    script = """
import asyncio, time
client = PGLease(dsn)
client.list_leases()
async def main():
    say("ready"); hear()
    task = asyncio.create_task(AsyncPGLease(client).try_acquire("job", ttl=600))
    await asyncio.sleep(0.1)
    task.cancel()
asyncio.run(main())
"""
    with child(script, proxy.through(dsn)) as process:
        assert process.hear() == "ready"
        proxy.delay(0.3)
        process.tell()
        code, errors = process.end()

    assert (code, errors) == (0, "")
    assert execute(dsn, f"SELECT count(*) FROM {TABLE}") == [(1,)], "it was granted"
    assert is_free(dsn, "job")


def test_leaving_after_a_loss_asks_nothing(leases, backend, monkeypatch):
    released: list[object] = []
    monkeypatch.setattr(backend, "release", lambda *args, **_: released.append(args))

    async def main() -> None:
        with pytest.raises(LeaseLostError):
            async with leases.acquire("job", ttl=0.4, heartbeat=False) as lease:
                await lease.lost.wait(10)

    asyncio.run(main())

    assert released == []
