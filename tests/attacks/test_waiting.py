"""Waiting: everybody is served, nobody waits behind a lock, and cleaners disturb no one."""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import suppress

import pytest

from pglease import AcquireTimeout, PGLease
from tests.attacks.world import PATIENCE, all_at_once, lapse, row_locked, sql


def test_a_hundred_waiters_are_all_served_one_at_a_time(client: Callable[..., PGLease]) -> None:
    clients = [client() for _ in range(2)]
    inside: list[int] = []
    tokens: list[int] = []

    def work(leases: PGLease) -> None:
        lease = leases.wait_for_lease("job", ttl=30, timeout=60, poll_interval=0.2)
        inside.append(1)
        assert len(inside) == 1
        time.sleep(0.005)
        tokens.append(lease.fencing_token)
        inside.pop()
        assert lease.release()

    all_at_once([lambda place=place: work(clients[place % 2]) for place in range(100)])

    assert tokens == list(range(1, 101))


@pytest.mark.parametrize("lock", ["UPDATE", "KEY SHARE"])
def test_one_try_and_a_short_wait_end_in_their_time_though_the_row_of_a_lapsed_lease_is_locked(
    dsn: str, leases: PGLease, rival: PGLease, lock: str
) -> None:
    assert rival.try_acquire("job", ttl=60)
    assert leases.try_acquire("other", ttl=60)
    lapse(dsn, "job")

    with row_locked(dsn, "job", lock):
        started = time.monotonic()
        assert leases.try_acquire("job", ttl=60) is False
        assert time.monotonic() - started < 10
        started = time.monotonic()
        with pytest.raises(AcquireTimeout):
            leases.wait_for_lease("job", ttl=60, timeout=1, poll_interval=0.1)
        assert 0.9 < time.monotonic() - started < 10

    assert leases.try_acquire("job", ttl=60)


def test_a_try_does_not_wait_behind_an_insert_that_is_not_committed(dsn: str, leases: PGLease) -> None:
    import psycopg

    assert leases.try_acquire("warm-up", ttl=60)
    with psycopg.connect(dsn) as stranger:
        stranger.execute(
            "INSERT INTO pglease_leases (task_name, owner_id, acquired_at, heartbeat_at, expires_at, fencing_token)"
            " VALUES ('job', 'stranger', now(), now(), now() + interval '1 h', 1)"
        )
        started = time.monotonic()
        assert leases.try_acquire("job", ttl=60) is False
        assert time.monotonic() - started < 10
        stranger.rollback()

    assert leases.try_acquire("job", ttl=60)


def test_cleaners_and_takers_work_side_by_side_without_an_error_and_tokens_never_repeat(
    dsn: str, client: Callable[..., PGLease]
) -> None:
    names = [f"job-{place}" for place in range(8)]
    tokens: dict[str, list[int]] = defaultdict(list)
    noting = threading.Lock()
    setup = client()
    assert setup.list_leases() == []
    ((before,),) = sql(dsn, "SELECT deadlocks FROM pg_stat_database WHERE datname = current_database()")
    until = time.monotonic() + 4
    cleaned: list[int] = []

    def take(leases: PGLease) -> None:
        while time.monotonic() < until:
            for name in names:
                with leases.acquire(name, ttl=5, on_lost="log") as lease:
                    if lease:
                        with noting:
                            tokens[name].append(lease.fencing_token)

    def clean(leases: PGLease) -> None:
        while time.monotonic() < until:
            lapse(dsn, names[len(cleaned) % len(names)])
            cleaned.append(leases.cleanup_expired())

    takers, cleaners = [client() for _ in range(4)], [client() for _ in range(2)]
    all_at_once(
        [*(lambda each=each: take(each) for each in takers), *(lambda each=each: clean(each) for each in cleaners)]
    )

    assert sum(cleaned) > 0
    for granted in tokens.values():
        assert len(set(granted)) == len(granted) > 5
    ((after,),) = sql(dsn, "SELECT deadlocks FROM pg_stat_database WHERE datname = current_database()")
    assert after == before


def test_a_cancelled_wait_holds_nothing(leases: PGLease, rival: PGLease) -> None:
    assert rival.try_acquire("job", ttl=60)
    cancel = threading.Event()
    ended: list[BaseException] = []

    def wait() -> None:
        try:
            leases.wait_for_lease("job", timeout=None, poll_interval=60, cancel=cancel)
        except AcquireTimeout as error:
            ended.append(error)

    waiting = threading.Thread(target=wait)
    waiting.start()
    cancel.set()
    waiting.join(PATIENCE)

    assert len(ended) == 1
    assert rival.release("job")
    with suppress(AcquireTimeout):
        assert rival.wait_for_lease("job", timeout=15)


def test_waiting_holds_no_connection_of_the_pool(client: Callable[..., PGLease], rival: PGLease) -> None:
    leases = client(pool_size=1)
    assert rival.try_acquire("job", ttl=60)
    cancel = threading.Event()
    waiters = [threading.Thread(target=lambda: _wait(leases, cancel)) for _ in range(5)]
    for waiter in waiters:
        waiter.start()

    started = time.monotonic()
    for place in range(20):
        assert leases.try_acquire(f"other-{place}", ttl=60)
    assert time.monotonic() - started < 15

    cancel.set()
    for waiter in waiters:
        waiter.join(PATIENCE)


def _wait(leases: PGLease, cancel: threading.Event) -> None:
    with suppress(AcquireTimeout):
        leases.wait_for_lease("job", timeout=30, poll_interval=0.5, cancel=cancel)
