"""What a loss does to a task: it is told once, it is never left running, and nobody else's cancellation is mistaken."""

from __future__ import annotations

import asyncio
import itertools
import logging
import threading
import time

import pytest

from pglease import LeaseLostError, aio
from tests.support.worlds import Stopwatch, wait_until


async def force_out(leases, lease) -> None:
    """End the hold as an operator would, and let the holder hear of it."""
    assert await leases.force_release(lease.name, lease.fencing_token)
    assert await lease.ensure(1000) is False


async def never() -> None:
    await asyncio.sleep(3600)


def test_a_body_whose_lease_is_lost_is_cancelled_once_and_the_loss_comes_out(leases):
    heard: list[str] = []

    async def main() -> None:
        task = asyncio.current_task()
        with pytest.raises(LeaseLostError) as caught:
            async with leases.acquire("job", on_lost="cancel") as lease:
                forcing = asyncio.create_task(force_out(leases, lease))
                try:
                    await never()
                except asyncio.CancelledError as error:
                    heard.append(str(error))
                    await asyncio.sleep(0.05)  # tidying up is not disturbed
                    heard.append("tidied up")
                    raise
        assert caught.value.reason == "forced"
        assert isinstance(caught.value.__context__, asyncio.CancelledError)
        assert task.cancelling() == 0
        await asyncio.sleep(0)
        await forcing

    asyncio.run(main())

    assert heard == ["the lease 'job' was lost", "tidied up"]


def test_a_body_is_cancelled_at_the_deadline_by_time_alone(leases):
    async def main() -> float:
        with pytest.raises(LeaseLostError):
            async with leases.acquire("job", ttl=0.5, heartbeat=False, on_lost="cancel"):
                watch = Stopwatch()
                await never()
        return watch.seconds

    assert asyncio.run(main()) < 5


@pytest.mark.parametrize("how", ["goes on", "ends"])
def test_a_body_that_swallows_its_cancellation_has_lost_all_the_same(leases, how, monkeypatch):
    monkeypatch.setattr(aio, "GRACE", 0.1)
    cancelled: list[float] = []

    async def main() -> None:
        with pytest.raises(LeaseLostError):
            async with leases.acquire("job", on_lost="cancel") as lease:
                forcing = asyncio.create_task(force_out(leases, lease))
                while len(cancelled) < (3 if how == "goes on" else 1):
                    try:
                        await never()
                    except asyncio.CancelledError:
                        cancelled.append(time.monotonic())
        assert asyncio.current_task().cancelling() == 0
        await asyncio.sleep(0.3)  # no further cancellation comes
        await forcing

    asyncio.run(main())

    assert all(later - earlier >= 0.09 for earlier, later in itertools.pairwise(cancelled))


def test_without_being_asked_nobody_is_cancelled_and_leaving_says_it(leases):
    async def main() -> None:
        with pytest.raises(LeaseLostError):
            async with leases.acquire("job") as lease:
                await force_out(leases, lease)
                await asyncio.sleep(0.05)
                assert lease.lost.is_set()

    asyncio.run(main())


def test_on_lost_log_neither_cancels_nor_raises(leases, caplog):
    async def main() -> None:
        async with leases.acquire("job", on_lost="log") as lease:
            await force_out(leases, lease)
            await asyncio.sleep(0.05)

    asyncio.run(main())

    (told,) = wait_until(lambda: [record for record in caplog.records if "was lost" in record.getMessage()])
    assert told.levelno == logging.ERROR


def test_a_body_that_never_awaits_hears_of_it_when_it_leaves(leases):
    async def main() -> None:
        with pytest.raises(LeaseLostError):
            async with leases.acquire("job", ttl=0.4, heartbeat=False, on_lost="cancel") as lease:
                threading.Event().wait(0.6)
                assert not lease.held
        await asyncio.sleep(0.05)  # and no cancellation comes late

    asyncio.run(main())


def test_an_error_of_the_body_comes_out_and_the_cancellation_is_taken_back(leases):
    async def main() -> None:
        with pytest.raises(ZeroDivisionError) as caught:
            async with leases.acquire("job", on_lost="cancel") as lease:
                forcing = asyncio.create_task(force_out(leases, lease))
                try:
                    await never()
                except asyncio.CancelledError:
                    raise ZeroDivisionError from None
        assert "was lost" in caught.value.__notes__[0]
        assert asyncio.current_task().cancelling() == 0
        await forcing

    asyncio.run(main())


@pytest.mark.parametrize("first", ["the loss", "the other"])
def test_a_cancellation_from_elsewhere_stays_one_whatever_comes_first(leases, first):
    """The task is cancelled by somebody else and by the loss: what comes out is the cancellation, with a note."""
    caught: list[asyncio.CancelledError] = []

    async def body() -> None:
        try:
            async with leases.acquire("job", on_lost="cancel") as lease:
                handles.append(lease)
                entered.set()
                try:
                    await never()
                finally:
                    leaving.set()
                    await asyncio.sleep(0.2)
                    tidied_up.set()
        except asyncio.CancelledError as error:
            caught.append(error)
            raise

    handles: list[aio.AsyncHeldLease] = []
    entered, leaving, tidied_up = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def main() -> None:
        task = asyncio.create_task(body())
        await entered.wait()
        if first == "the other":
            task.cancel("by somebody else")
            await leaving.wait()
        await force_out(leases, handles[0])
        if first == "the loss":
            await leaving.wait()
            task.cancel("by somebody else")
        with pytest.raises(asyncio.CancelledError):
            await task
        assert task.cancelled()
        assert task.cancelling() == 1

    asyncio.run(main())

    assert "was lost" in caught[0].__notes__[0]
    if first == "the other":
        assert tidied_up.is_set(), "the loss disturbed a body that was on its way out"


def test_a_timeout_around_the_block_is_a_timeout_though_the_lease_was_lost_too(leases):
    async def main() -> None:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.3):
                async with leases.acquire("job", on_lost="cancel") as lease:
                    try:
                        await asyncio.gather(force_out(leases, lease), never())
                    finally:
                        await asyncio.sleep(3600)
        assert asyncio.current_task().cancelling() == 0

    asyncio.run(main())


def test_a_timeout_inside_the_block_is_not_taken_for_the_loss(leases):
    async def main() -> None:
        async with leases.acquire("job", on_lost="cancel"):
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.01):
                    await never()

    asyncio.run(main())


def test_a_task_group_inside_the_block_ends_its_tasks_first(leases):
    ended: list[str] = []

    async def child() -> None:
        try:
            await never()
        finally:
            ended.append("child")

    async def main() -> None:
        with pytest.raises(LeaseLostError):
            async with leases.acquire("job", on_lost="cancel") as lease, asyncio.TaskGroup() as group:
                group.create_task(child())
                group.create_task(force_out(leases, lease))
                await never()
        ended.append("block")
        assert asyncio.current_task().cancelling() == 0

    asyncio.run(main())

    assert ended == ["child", "block"]


def test_two_blocks_that_are_lost_at_once_end_in_the_outer_loss(leases):
    async def main() -> None:
        with pytest.raises(LeaseLostError) as caught:
            async with (
                leases.acquire("outer", ttl=0.5, heartbeat=False, on_lost="cancel"),
                leases.acquire("inner", ttl=0.5, heartbeat=False, on_lost="cancel"),
            ):
                await never()
        assert caught.value.name in ("outer", "inner")
        assert asyncio.current_task().cancelling() == 0

    asyncio.run(main())


def test_waiting_for_a_loss_takes_no_thread_and_ends_with_it(leases):
    async def main() -> None:
        async with leases.acquire("job", on_lost="log") as lease:
            assert await lease.lost.wait(0.01) is False
            before = set(threading.enumerate())
            waiting = [asyncio.create_task(lease.lost.wait()) for _ in range(50)]
            await asyncio.sleep(0)
            assert set(threading.enumerate()) <= before
            await force_out(leases, lease)
            assert await asyncio.gather(*waiting) == [True] * 50
            assert await lease.lost.wait(float("inf")) is True

    asyncio.run(main())


def test_a_released_lease_is_not_lost_for_those_who_wait(leases):
    async def main() -> None:
        async with leases.acquire("job", on_lost="cancel") as lease:
            assert await lease.release() is True
            assert await lease.lost.wait(0.05) is False

    asyncio.run(main())


def test_a_loop_that_is_blocked_for_three_ttl_loses_nothing(leases, rival):
    async def main() -> None:
        async with leases.acquire("job", ttl=1, on_lost="cancel") as lease:
            until = time.monotonic() + 3
            while time.monotonic() < until:
                assert rival.try_acquire("job") is False
                threading.Event().wait(0.1)
            assert lease.held
            await asyncio.sleep(0.05)

    asyncio.run(main())


def test_a_closed_client_cancels_the_bodies_of_its_blocks(leases):
    async def main() -> None:
        with pytest.raises(LeaseLostError) as caught:
            async with leases.acquire("job", on_lost="cancel"):
                closing = asyncio.create_task(leases.close())
                await never()
        await closing
        assert caught.value.reason == "closed"

    asyncio.run(main())
