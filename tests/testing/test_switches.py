"""Leases decided by the test, for code that takes them somewhere inside."""

from __future__ import annotations

import asyncio
import threading
from datetime import timedelta

import pytest

import pglease
from pglease import SKIPPED, AcquireTimeout, AsyncPGLease, LeaseLostError, PGLease
from pglease.testing import always_acquire, lose_after, never_acquire

NOWHERE = "postgresql://nobody@127.0.0.1:1/nowhere"
"""Where a question would fail."""


@pytest.fixture(autouse=True)
def _nothing_is_configured(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PGLEASE_URL", "DATABASE_URL"):
        monkeypatch.delenv(name, raising=False)


@pglease.singleton_task("report:{month}", on_skip=SKIPPED)
def report(month: int) -> str:
    """Somebody's code, deep inside an application."""
    lease = pglease.assert_held()
    return f"{lease.name} under {lease.fencing_token}"


def test_always_and_never_need_no_store_and_no_configuration() -> None:
    with always_acquire():
        assert report(7) == "report:7 under 1"
        assert report(7) == "report:7 under 2"
    with never_acquire():
        assert report(7) is SKIPPED
        assert report.last_outcome() == "skipped"
    with pytest.raises(pglease.ConfigurationError, match="PGLEASE_URL"):
        report(7)


def test_they_are_for_clients_made_before_and_meanwhile() -> None:
    with PGLease(NOWHERE, connect_timeout=0.2) as earlier:
        with always_acquire():
            meanwhile = PGLease(NOWHERE, connect_timeout=0.2)
            assert earlier.try_acquire("job")
            assert meanwhile.try_acquire("job")
            earlier.renew("job", ttl="5m")
            assert [each.task_name for each in earlier.list_leases()] == ["job", "job"]
            assert earlier.release("job")
        with never_acquire():
            assert not earlier.try_acquire("job")

        for each in (earlier, meanwhile):
            with pytest.raises(pglease.BackendUnavailable):
                each.try_acquire("job")
        meanwhile.close()


def test_what_is_still_held_at_the_end_is_over() -> None:
    with PGLease(NOWHERE) as leases:
        with always_acquire():
            lease = leases.wait_for_lease("job")
            assert lease.held
        assert not lease.held
        assert leases.holding() == []
        assert lease.loss is None


def test_what_was_held_before_goes_on_in_its_own_store() -> None:
    with PGLease("memory://{}before") as leases, PGLease("memory://{}before") as other:
        assert leases.try_acquire("second")
        with leases.acquire("job") as before:
            assert before
            with always_acquire(), leases.acquire("job") as inside, leases.acquire("job") as innermost:
                assert inside
                assert innermost
                for each in (before, inside, innermost):
                    each.renew()
                assert leases.release("second")
                assert other.backend.traits.kind == "free for all"
            assert before.held
            assert leases.held("job") is before
            assert not other.try_acquire("job")
            assert other.try_acquire("second")
        assert other.try_acquire("job")


def test_every_verb_of_a_granted_lease_works() -> None:
    with always_acquire(), PGLease(NOWHERE) as leases:
        with leases.acquire("job", metadata={"a": 1}, fair=True, wait=5) as lease:
            assert lease
            lease.set_metadata({"b": 2})
            assert leases.get_lease("job").metadata == {"b": 2}  # type: ignore[union-attr]
            assert lease.ensure(30)
            with lease.guard(object()):
                pass
            assert lease.fence_sql().sql == "TRUE"
            assert lease.acquired_at.utcoffset() == timedelta(0)
        handover = leases.wait_for_lease("baton").transfer("next")
        with leases.adopt(handover) as adopted:
            assert adopted
        with leases.acquire_many(["a", "b"]) as group, leases.lock("c") as locked, leases.semaphore("d", 2):
            assert group
            assert locked.held
        assert leases.try_acquire("forced")
        assert leases.force_release("forced", 1)
        assert leases.cleanup_expired() == 0
        leases.singleton_task("hourly", once_per="1h")(lambda: None)()


def test_never_waits_for_nobody() -> None:
    with never_acquire("the boss"), PGLease(NOWHERE) as leases:
        with leases.acquire("job", wait=float("inf")) as refused:
            assert not refused
            assert refused.held_by == "the boss"
            assert refused.retry_after == 60
        with pytest.raises(AcquireTimeout, match="the boss"):
            leases.wait_for_lease("job", timeout=None)
        with leases.acquire_many(["a", "b"]) as group:
            assert not group


def test_they_are_for_asyncio_as_well() -> None:
    async def ask() -> list[bool]:
        async with AsyncPGLease(NOWHERE) as leases, leases.acquire("job", wait=5) as lease:
            return [bool(lease), await leases.try_acquire("other"), bool(await _many(leases))]

    async def _many(leases: AsyncPGLease) -> bool:
        async with leases.acquire_many(["a", "b"]) as group:
            return bool(group)

    with always_acquire():
        assert asyncio.run(ask()) == [True, True, True]
    with never_acquire():
        assert asyncio.run(ask()) == [False, False, False]


def test_one_inside_another_gives_way_to_it_and_comes_back() -> None:
    with always_acquire():
        with never_acquire():
            assert report(1) is SKIPPED
        with always_acquire():
            assert report(1) == "report:1 under 1"
        assert report(1) == "report:1 under 1"
    with PGLease(NOWHERE, connect_timeout=0.2) as leases, pytest.raises(pglease.BackendUnavailable):
        leases.try_acquire("job")


# -- losing it


def work(steps: int = 10) -> int:
    """A loop of somebody's, which looks before each step."""
    done = 0
    with pglease.acquire("loop", on_lost="log") as lease:
        while lease.held and done < steps:
            done += 1
    return done


@pytest.mark.parametrize("calls", [0, 1, 3])
def test_a_loop_that_looks_ends_when_the_lease_is_lost(calls: int) -> None:
    with always_acquire(), lose_after("loop", calls):
        assert work() == calls
        assert work() == 10  # once
    with always_acquire():
        assert work() == 10


def test_the_loss_is_told_in_every_way() -> None:
    told = threading.Event()
    with (
        always_acquire(),
        PGLease(NOWHERE, on_lease_lost=lambda _: told.set()) as leases,
        lose_after("job", reason="unreachable"),
        pytest.raises(LeaseLostError, match="could not be reached"),
        leases.acquire("job") as lease,
    ):
        assert lease
        lease.raise_if_lost()
        with pytest.raises(LeaseLostError):
            lease.raise_if_lost()
        assert not lease.ensure(1)
        assert lease.lost.is_set()
    assert told.wait(20)


def test_on_asyncio_a_look_is_a_look_too() -> None:
    async def loop() -> int:
        done = 0
        async with AsyncPGLease(NOWHERE) as leases, leases.acquire("loop", on_lost="log") as lease:
            assert lease
            while lease.held and done < 10:
                done += 1
        return done

    with always_acquire(), lose_after("loop", 2):
        assert asyncio.run(loop()) == 2


def test_other_leases_are_not_counted() -> None:
    with always_acquire(), lose_after("another", 0):
        assert work() == 10
