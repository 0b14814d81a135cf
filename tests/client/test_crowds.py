"""Many at once: exactly one holder at every moment, and nothing left behind."""

from __future__ import annotations

import asyncio
import random
import threading

import pytest

from pglease import HeldLease, MemoryBackend, PGLease, giveback
from pglease.options import hold_options
from tests.support.worlds import all_at_once, wait_until

THREADS = 64
ROUNDS = 200


@pytest.mark.parametrize("one_client", [True, False], ids=["one client", "a client for each thread"])
def test_sixty_four_threads_ask_two_hundred_times_and_one_holds_at_a_time(one_client):
    backend = MemoryBackend()
    shared = PGLease(backend)
    clients = [shared if one_client else PGLease(backend.another()) for _ in range(THREADS)]
    inside: list[int] = []
    tokens: list[int] = []
    crowd = threading.Barrier(THREADS)

    def work(place: int) -> int:
        won = 0
        for number in range(ROUNDS):
            if number % 20 == 0:
                crowd.wait(60)
            with clients[place].acquire("job") as lease:
                if lease:
                    inside.append(place)
                    assert inside == [place], "two are inside"
                    tokens.append(lease.fencing_token)
                    assert lease.held
                    won += 1
                    inside.pop()
        return won

    won = all_at_once([lambda place=place: work(place) for place in range(THREADS)])

    assert sum(won) == len(tokens) == tokens[-1] >= ROUNDS // 20
    assert tokens == sorted(set(tokens))
    assert shared.holding() == []
    for client in clients:
        client.close()


def test_crowds_that_take_renew_look_and_release_through_one_client_do_not_disturb_each_other(leases):
    """Half of them have a name to themselves, the others share four; all are on the same client's books."""

    def work(place: int) -> None:
        name = f"own-{place}" if place % 2 else f"shared-{place % 8}"
        for _ in range(15):
            if leases.try_acquire(name, ttl=30):
                lease = leases.held(name)
                assert lease is not None
                assert lease.ensure(1)
                if place % 2:
                    leases.renew(name)
                assert lease in leases.holding()
                assert leases.release(name)
                assert not lease.held

    all_at_once([lambda place=place: work(place) for place in range(16)])

    assert leases.holding() == []
    assert leases.list_leases() == []
    assert leases.heartbeat_manager.holds() == []


@pytest.mark.parametrize("free", [True, False], ids=["free", "held for a while"])
def test_two_hundred_random_cancellations_leave_no_lease(leases, rival, monkeypatch, free):
    """Whenever a task is cancelled: it got the lease and gave it back, or there is none."""
    monkeypatch.setattr(giveback, "PAUSES", (0.0, 0.05, 0.05, 0.05))
    dice = random.Random(20240229)
    took = 0

    async def one(number: int) -> None:
        nonlocal took
        taking = asyncio.create_task(leases.taking.atake(hold_options(f"job-{number % 10}", 600, wait=30), poll=0.01))
        await asyncio.sleep(dice.choice([0.0, dice.uniform(0, 0.003), dice.uniform(0, 0.03)]))
        taking.cancel()
        try:
            lease = await taking
        except asyncio.CancelledError:
            return
        assert isinstance(lease, HeldLease)
        took += 1
        lease.release()

    async def main() -> None:
        for number in range(0, 200, 10):
            if not free:
                for name in range(0, 10, 2):
                    rival.try_acquire(f"job-{name}", ttl=0.3, heartbeat=False)
            await asyncio.gather(*(one(number + place) for place in range(10)))

    asyncio.run(main())

    wait_until(lambda: not leases.list_leases() or {lease.owner_id for lease in leases.list_leases()} == {"rival"})
    assert leases.holding() == []
    assert leases.heartbeat_manager.holds() == []


def test_two_hundred_random_cancellations_of_a_singleton_task_leave_no_lease(leases, monkeypatch):
    monkeypatch.setattr(giveback, "PAUSES", (0.0, 0.05, 0.05, 0.05))
    dice = random.Random(20240301)
    inside, most = 0, 0

    @leases.singleton_task("job-{place}", ttl=600, wait=30)
    async def task(place: int) -> None:
        nonlocal inside, most
        inside += 1
        most = max(most, inside)
        try:
            await asyncio.sleep(dice.uniform(0, 0.01))
        finally:
            inside -= 1

    async def one(number: int) -> None:
        running = asyncio.create_task(task(number % 10))
        await asyncio.sleep(dice.choice([0.0, dice.uniform(0, 0.005), dice.uniform(0, 0.03)]))
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        assert running.cancelled() or running.exception() is None

    async def main() -> None:
        for number in range(0, 200, 20):
            await asyncio.gather(*(one(number + place) for place in range(20)))

    asyncio.run(main())

    wait_until(lambda: leases.list_leases() == [])
    assert inside == 0
    assert most <= 10
    assert leases.holding() == []
