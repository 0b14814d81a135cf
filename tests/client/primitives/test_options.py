"""The options of the primitives: as checked records, and changed while they are in use."""

from __future__ import annotations

import asyncio
import threading

import pytest

from pglease import (
    AsyncPGLease,
    ConfigurationError,
    LeaderElection,
    LeaderElectionConfig,
    Lock,
    LockConfig,
    MemoryBackend,
    PGLease,
    ReadWriteLock,
    ReadWriteLockConfig,
    Semaphore,
    SemaphoreConfig,
    TaskLock,
    TaskLockConfig,
)
from pglease.primitives.aio import AsyncLock, AsyncSemaphore

BUILT = [
    (Lock, LockConfig(ttl=90, reentrant=True)),
    (TaskLock, TaskLockConfig(ttl="90s", min_hold=10)),
    (ReadWriteLock, ReadWriteLockConfig(ttl=90, on_lost="log")),
    (Semaphore, SemaphoreConfig(limit=2, ttl=90)),
    (LeaderElection, LeaderElectionConfig(ttl=90, metadata={"pod": "web-1"})),
]
KINDS = [kind.__name__ for kind, _ in BUILT]


@pytest.fixture
def here() -> PGLease:
    with PGLease(MemoryBackend()) as client:
        yield client


@pytest.mark.parametrize(("kind", "config"), BUILT, ids=KINDS)
def test_a_checked_record_builds_one_of_any_name_and_asks_no_environment(here, kind, config, monkeypatch):
    for each in ("LOCK", "TASK_LOCK", "READ_WRITE_LOCK", "SEMAPHORE", "LEADER_ELECTION"):
        monkeypatch.setenv(f"PGLEASE_{each}_TTL", "5")

    first, second = (kind.from_config(here, name, config) for name in ("one", "two"))

    assert (first.name, second.name) == ("one", "two")
    assert config == type(config)(**{name: getattr(config, name) for name in config.__dataclass_fields__})


@pytest.mark.parametrize("kind", [kind for kind, _ in BUILT], ids=KINDS)
def test_a_record_of_another_kind_is_refused(here, kind):
    strange = ReadWriteLockConfig() if kind is not ReadWriteLock else LockConfig()

    with pytest.raises(ConfigurationError, match=f"config must be a {kind.__name__}Config, not "):
        kind.from_config(here, "cart", strange)


def test_a_record_says_all_that_is_wrong_with_it_when_it_is_built():
    with pytest.raises(ConfigurationError, match=r"reentrant must be .*ttl must be .*on_lost must be"):
        LockConfig(ttl=-1, reentrant="yes", on_lost="weep")
    with pytest.raises(ConfigurationError, match=r"limit must be .*min_hold \(9 s\) must not exceed"):
        SemaphoreConfig(limit=0, min_hold=9, max_hold=3)
    with pytest.raises(ConfigurationError, match="once_per"):
        TaskLockConfig(once_per=-3)
    with pytest.raises(ConfigurationError, match="defer"):
        LeaderElectionConfig(defer=-1)


def test_who_one_is_cannot_be_reconfigured():
    with pytest.raises(TypeError, match="name"):
        LockConfig(name="other")


def test_a_lock_that_is_held_goes_by_the_new_ttl_at_once(leases, rival):
    lock = leases.lock("cart", ttl=30)
    with lock as held:
        lock.reconfigure(LockConfig(ttl=600, reentrant=True))

        assert held.held
        assert held.remaining() > 500
        assert rival.get_lease("cart").time_remaining() > 500
        with lock as again:
            assert again is held
    with lock as held:
        assert held.remaining() > 500


def test_options_that_cannot_be_kept_change_nothing(leases):
    lock = leases.lock("cart", ttl=30)

    with pytest.raises(ConfigurationError):
        lock.reconfigure(SemaphoreConfig(limit=3))

    with lock as held:
        assert held.remaining() <= 30


def test_a_run_is_refreshed_by_a_new_ttl_and_an_old_one_is_left_alone(leases):
    run = leases.task_lock("job", ttl=30)
    with run as held:
        run.reconfigure(TaskLockConfig(ttl=600, min_hold=5))
        assert held.remaining() > 500
    run.reconfigure(TaskLockConfig(ttl=60))
    assert run._wanted.ttl == 60


def test_a_leader_goes_by_the_new_ttl_at_once_and_leads_on(leases, rival):
    election = leases.leader_election("chief", ttl=30)
    with election:
        assert election.wait_for_leader(30)
        token = election.lease.fencing_token

        election.reconfigure(LeaderElectionConfig(ttl=600))

        assert election.is_leader
        assert election.lease.fencing_token == token
        assert rival.get_lease("chief").time_remaining() > 500


def test_a_semaphore_s_limit_and_a_reader_s_ttl_count_from_the_next_acquire_on(leases):
    room, book = leases.semaphore("db", 1), leases.read_write_lock("book")
    first = room.acquire()
    assert not room.acquire_nowait()

    room.reconfigure(SemaphoreConfig(limit=2))
    book.reconfigure(ReadWriteLockConfig(ttl=600))

    second = room.acquire_nowait()
    assert second
    with book.read() as reading:
        assert reading.remaining() > 500
    first.release()
    second.release()


def test_threads_that_hold_one_lock_in_turn_see_old_or_new_options_and_never_a_mixture(here):
    lock, seen = Lock.from_config(here, "cart", LockConfig(ttl=100, max_hold=1000)), set()

    def hold() -> None:
        for _ in range(50):
            with lock as held:
                seen.add((held._hold.wanted.ttl, held._hold.wanted.max_hold))

    threads = [threading.Thread(target=hold) for _ in range(3)]
    for thread in threads:
        thread.start()
    for round_number in range(20):
        ttl = 100 + round_number % 2
        lock.reconfigure(LockConfig(ttl=ttl, max_hold=10 * ttl))
    for thread in threads:
        thread.join(60)

    assert seen <= {(100.0, 1000.0), (101.0, 1010.0)}


def test_on_asyncio(leases, rival):
    async def story() -> None:
        aleases = AsyncPGLease(leases)
        lock = AsyncLock.from_config(aleases, "cart", LockConfig(ttl=30))
        async with lock:
            await lock.reconfigure(LockConfig(ttl=600))
            assert rival.get_lease("cart").time_remaining() > 500
        room = AsyncSemaphore.from_config(aleases, "db", SemaphoreConfig(limit=1))
        await room.reconfigure(SemaphoreConfig(limit=2))
        async with room, room:
            assert room.limit == 2

    asyncio.run(story())


def test_a_prefix_of_its_own_is_read_by_the_client_s_methods(here, monkeypatch):
    monkeypatch.setenv("SHOP_CART_TTL", "7m")

    with here.lock("cart", env_prefix="SHOP_CART_") as held:
        assert 380 < held.remaining() < 420
