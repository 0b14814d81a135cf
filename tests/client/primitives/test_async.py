"""The primitives for asyncio: the same rules, awaited; what is cancelled leaves nothing behind."""

from __future__ import annotations

import asyncio
import random

import pytest

from pglease import (
    AcquireTimeout,
    AsyncPGLease,
    LeaseLostError,
    NotOwnedError,
    ReentrantError,
    current_lease,
    loops,
)

SOON = 30


@pytest.fixture
def aleases(leases) -> AsyncPGLease:
    return AsyncPGLease(leases)


def test_a_lock(aleases, rival):
    async def story() -> None:
        lock = aleases.lock("cart")
        async with lock as held:
            assert held.held
            assert lock.owned()
            assert await lock.locked()
            assert current_lease("cart") is not None
            assert (await lock.extend(600)).fencing_token == held.fencing_token == 1
            assert not rival.try_acquire("cart")
            with pytest.raises(ReentrantError):
                await aleases.lock("cart").acquire()
            with pytest.raises(ReentrantError):
                await aleases.lock("cart").acquire_nowait()
        assert not lock.owned()
        assert rival.try_acquire("cart")
        assert not await lock.acquire_nowait()
        with pytest.raises(AcquireTimeout, match="rival"):
            async with lock.hold(timeout=0.5):
                pass
        with pytest.raises(NotOwnedError):
            await lock.release()

    asyncio.run(story())


def test_a_reentrant_lock_counts_within_a_task(aleases, rival):
    async def another_task(lock) -> bool:
        return bool(await lock.acquire_nowait())

    async def story() -> None:
        lock = aleases.lock("cart", reentrant=True)
        async with lock as outer, lock as inner:
            assert inner == outer
            assert await asyncio.create_task(another_task(lock)) is False
        assert rival.try_acquire("cart")

    asyncio.run(story())


def test_tasks_that_share_a_lock_exclude_each_other(aleases):
    inside, most = 0, 0

    async def work(lock) -> None:
        nonlocal inside, most
        async with lock:
            inside += 1
            most = max(most, inside)
            await asyncio.sleep(0.001)
            inside -= 1

    async def story() -> None:
        lock = aleases.lock("cart", ttl=600)
        await asyncio.gather(*(work(lock) for _ in range(20)))

    asyncio.run(story())
    assert most == 1


def test_a_task_lock(aleases, rival):
    async def story() -> None:
        task = aleases.task_lock("nightly", min_hold=15)
        async with task as run:
            assert run
            assert (await task.refresh(600)).held
        assert await task.locked()
        assert not rival.try_acquire("nightly")
        async with aleases.task_lock("nightly") as run:
            assert not run

    asyncio.run(story())


def test_a_semaphore(aleases):
    inside, most = 0, 0

    async def work() -> None:
        nonlocal inside, most
        async with aleases.semaphore("db", 2, ttl=600):
            inside += 1
            most = max(most, inside)
            await asyncio.sleep(0.002)
            inside -= 1

    async def story() -> None:
        await asyncio.gather(*(work() for _ in range(8)))
        assert await aleases.semaphore("db", 2).holders() == []

    asyncio.run(story())
    assert 1 <= most <= 2


def test_a_read_write_lock(aleases, rival):
    async def story() -> None:
        book = aleases.read_write_lock("book")
        async with book.read(), book.read():
            assert len(await book.readers()) == 2
            with pytest.raises(AcquireTimeout):
                rival.read_write_lock("book").acquire_write(timeout=0)
        writing = await book.acquire_write(timeout=SOON)
        assert await book.generation() == writing.fencing_token
        reading = await book.downgrade(writing)
        assert not writing.held
        assert await reading.release()
        assert not await book.poisoned()

    asyncio.run(story())


def test_several_at_once(aleases, rival, store):
    async def story() -> None:
        async with aleases.acquire_many(["b", "a"]) as group:
            assert [lease.name for lease in group] == ["a", "b"]
            assert group.held
            assert not rival.try_acquire("a")
        assert rival.try_acquire("a")
        async with aleases.acquire_many(["a", "b"]) as group:
            assert not group
        rival.release("a")
        with pytest.raises(LeaseLostError, match="'a'"):
            async with aleases.acquire_many(["a", "b"]) as group:
                store.delete("a")
                assert not await group["a"].ensure(1000)
        assert rival.try_acquire("b")

    asyncio.run(story())


def test_cancelled_tasks_leave_nothing(aleases, rival, monkeypatch):
    from pglease import giveback

    monkeypatch.setattr(giveback, "PAUSES", (0.0, 0.05, 0.05, 0.05))
    dice = random.Random(3)

    async def work(number: int) -> None:
        kind = number % 4
        if kind == 0:
            async with aleases.lock("x", ttl=600):
                await asyncio.sleep(0.002)
        elif kind == 1:
            async with aleases.semaphore("x", 2, ttl=600):
                await asyncio.sleep(0.002)
        elif kind == 2:
            async with aleases.read_write_lock("x", ttl=600).write():
                await asyncio.sleep(0.002)
        else:
            async with aleases.acquire_many(["y", "x"], ttl=600, wait=SOON):
                await asyncio.sleep(0.002)

    async def story() -> None:
        for number in range(60):
            task = asyncio.create_task(work(number))
            await asyncio.sleep(dice.uniform(0, 0.006))
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
                raise asyncio.CancelledError  # it had ended before

    asyncio.run(story())

    for name in ("x", "y", "x#writer", "x#slot:0", "x#slot:1"):
        assert rival.wait_for_lease(name, timeout=SOON, poll_interval=0.05)
    assert aleases.holding() == []


# -- elections ---------------------------------------------------------------------------------------------------------


def test_lead_runs_a_task_and_returns_its_result(aleases, rival):
    async def work(lease) -> int:
        assert current_lease("role") is not None
        await asyncio.sleep(0)
        return lease.fencing_token

    async def story() -> None:
        assert await aleases.leader_election("role").lead(work) == 1
        assert rival.try_acquire("role")

    asyncio.run(story())


def test_work_is_cancelled_when_it_leads_no_more(aleases, store):
    ended: list[str] = []

    async def work(lease) -> None:
        store.delete("role")
        try:
            await asyncio.sleep(SOON)
        except asyncio.CancelledError:
            ended.append("cancelled")
            raise

    async def story() -> None:
        assert await aleases.leader_election("role", ttl=0.6).lead(work) is None

    asyncio.run(story())
    assert ended == ["cancelled"]


def test_lead_runs_again_in_later_terms(aleases):
    tokens: list[int] = []

    async def story() -> None:
        election = aleases.leader_election("role")

        async def work(lease) -> None:
            tokens.append(lease.fencing_token)
            if len(tokens) == 3:
                assert await election.stop() is False
                return
            election.step_down(cooldown=0)
            await asyncio.sleep(SOON)

        assert await election.lead(work, repeat=True) is None

    asyncio.run(story())
    assert tokens == [1, 2, 3]


def test_work_that_raises_ends_the_term(aleases, rival):
    async def work(_lease) -> None:
        raise ZeroDivisionError

    async def story() -> None:
        with pytest.raises(ZeroDivisionError):
            await aleases.leader_election("role").lead(work)

    asyncio.run(story())
    assert rival.try_acquire("role")


def test_a_cancelled_lead_cancels_its_work_and_resigns(aleases, rival):
    ended: list[str] = []

    async def work(_lease) -> None:
        try:
            await asyncio.sleep(SOON)
        finally:
            ended.append("work")

    async def story() -> None:
        election = aleases.leader_election("role")
        leading = asyncio.create_task(election.lead(work))
        await asyncio.sleep(0)  # now it campaigns
        assert await election.wait_for_leader(SOON)
        leading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await leading

    asyncio.run(story())
    assert ended == ["work"]
    assert rival.try_acquire("role")


def test_waiting_and_stepping_down(aleases, rival):
    async def story() -> None:
        async with aleases.leader_election("role", metadata={"pod": "a"}) as election:
            assert await election.wait_for_leader(SOON)
            async with election.observe() as changes:
                change = await changes.next(SOON)
                assert (change.kind, change.lease.metadata) == ("present", {"pod": "a"})
            assert election.is_leader_confirmed_within(60)
            assert election.lease.held
            assert (await election.record()).metadata == {"pod": "a"}
            assert election.health()
            assert not await election.wait_until_lost(0)

            @election.leader_only
            async def only() -> int:
                return 7

            assert await only() == 7
            election.step_down(cooldown=600)
            assert await election.wait_until_lost(SOON)
            assert await only() is None
        assert await election.wait_for_leader(0) is False

    asyncio.run(story())
    assert rival.try_acquire("role")


def test_work_that_leaves_locks_behind_it_ends_however_many_elections_are_stopped_at_once(aleases):
    async def work(lease) -> None:
        lock = aleases.lock(f"lock of {lease.name}")
        await lock.acquire()
        locks.append(lock)
        begun.release()
        try:
            await asyncio.sleep(10 * SOON)
        finally:
            await lock.release()

    locks: list = []
    begun = asyncio.Semaphore(0)

    async def story() -> None:
        elections = [aleases.leader_election(f"role-{number}") for number in range(loops.MOST_KEEPERS)]
        leading = [asyncio.create_task(election.lead(work, repeat=True)) for election in elections]
        async with asyncio.timeout(SOON):
            for _ in elections:
                await begun.acquire()
        async with asyncio.timeout(SOON):
            assert all(await asyncio.gather(*(election.stop() for election in elections)))
            await asyncio.gather(*leading)
        assert not any([await lock.locked() for lock in locks])

    asyncio.run(story())


def test_leader_only_work_may_stop_its_own_election(aleases):
    async def story() -> None:
        election = aleases.leader_election("role").start()
        stopping = election.leader_only(election.stop)
        assert await election.wait_for_leader(SOON)
        assert await asyncio.wait_for(stopping(), SOON) is False
        assert await election.stop()

    asyncio.run(story())


def test_a_grant_that_its_own_slots_cannot_place_is_given_back(aleases, rival):
    class Broken:
        def end(self, moment):
            raise ValueError(moment)

    async def story() -> None:
        with pytest.raises(ValueError, match="2"):
            await aleases.task_lock("nightly", once_per=Broken()).acquire()

    asyncio.run(story())
    assert rival.wait_for_lease("nightly", timeout=10, poll_interval=0.05)


def test_a_call_that_only_the_leader_makes_is_cancelled_when_it_leads_no_more(aleases):
    async def story() -> None:
        async with aleases.leader_election("chief") as election:
            assert await election.wait_for_leader(SOON)
            begun, ended = asyncio.Event(), []

            @election.leader_only
            async def patrol() -> str:
                begun.set()
                try:
                    await asyncio.sleep(SOON)
                except asyncio.CancelledError:
                    ended.append("cancelled")
                    raise
                return "went round"

            patrolling = asyncio.ensure_future(patrol())
            await begun.wait()
            election.step_down(60)

            assert await asyncio.wait_for(patrolling, SOON) is None
            assert ended == ["cancelled"]
            assert await patrol() is None

    asyncio.run(story())


def test_a_call_that_only_the_leader_makes_may_raise_or_be_cancelled_by_others(aleases):
    async def story() -> None:
        async with aleases.leader_election("chief") as election:
            assert await election.wait_for_leader(SOON)
            begun = asyncio.Event()

            @election.leader_only
            async def fails() -> None:
                raise KeyError("ours")

            @election.leader_only
            async def sleeps() -> None:
                begun.set()
                await asyncio.sleep(SOON)

            with pytest.raises(KeyError, match="ours"):
                await fails()
            sleeping = asyncio.ensure_future(sleeps())
            await begun.wait()
            sleeping.cancel()
            with pytest.raises(asyncio.CancelledError):
                await sleeping
            assert election.is_leader

    asyncio.run(story())
