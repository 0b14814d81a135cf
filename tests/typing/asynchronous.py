"""What type checkers know about leases on asyncio. Never run: mypy reads it, with the package."""

from __future__ import annotations

from datetime import timedelta
from typing import assert_type

import pglease.aio
from pglease import AsyncHeldLease, AsyncLeaseContext, AsyncPGLease, Lease, Loss, NotAcquired, PGLease

leases = AsyncPGLease("memory://")


async def a_plain_block() -> None:
    async with leases.acquire("job", ttl="5m", wait=timedelta(seconds=3), on_lost="cancel") as lease:
        assert_type(lease, AsyncHeldLease | NotAcquired)
        if lease:
            assert_type(lease, AsyncHeldLease)
            assert_type(lease.fencing_token, int)
            assert_type(lease.loss, Loss | None)
            assert_type(await lease.ensure(5), bool)
            assert_type(await lease.release(), bool)
            assert_type(await lease.lost.wait("5s"), bool)
        else:
            assert_type(lease.held_by, str | None)
        _ = lease.fencing_token  # type: ignore[union-attr]  # not before one has asked


async def a_block_that_raises() -> None:
    async with leases.acquire("job", raise_on_failure=True) as lease:
        assert_type(lease, AsyncHeldLease)
    async with leases.acquire("job", 60, True, wait=5) as lease:
        assert_type(lease, AsyncHeldLease)
    async with leases.acquire("job", 60, False) as either:
        assert_type(either, AsyncHeldLease | NotAcquired)


def the_context_may_be_kept() -> None:
    assert_type(leases.acquire("job"), AsyncLeaseContext[AsyncHeldLease | NotAcquired])
    assert_type(leases.acquire("job", raise_on_failure=True), AsyncLeaseContext[AsyncHeldLease])


async def a_block_swallows_nothing() -> int:
    async with leases.acquire("job"):
        return 1


async def the_other_verbs() -> None:
    assert_type(await leases.try_acquire("job"), bool)
    assert_type(await leases.wait_for_lease("job", timeout=None), AsyncHeldLease)
    assert_type(await leases.release("job"), bool)
    assert_type(leases.held("job"), AsyncHeldLease | None)
    assert_type(leases.holding(), list[AsyncHeldLease])
    assert_type(await leases.get_lease("job"), Lease | None)
    assert_type(await leases.list_leases(), list[Lease])
    assert_type(await leases.cleanup_expired("1d"), int)
    assert_type(await leases.force_release("job", 7), bool)
    assert_type(AsyncPGLease.from_env(), AsyncPGLease)
    assert_type(AsyncPGLease(PGLease("memory://")).client, PGLease)
    assert_type(await pglease.aio.try_acquire("job"), bool)


@leases.singleton_task("job:{tenant}")
async def task(tenant: str) -> list[int]:
    return []


async def a_call_may_be_skipped() -> None:
    assert_type(await task("acme"), list[int] | None)


async def mistakes() -> None:
    leases.acquire(7)  # type: ignore[call-overload]
    leases.acquire("job", on_lost="ignore")  # type: ignore[call-overload]
    leases.acquire("job", waiting=5)  # type: ignore[call-overload]
    await leases.try_acquire("job", wait=3)  # type: ignore[call-arg]
    with leases.acquire("job"):  # type: ignore[attr-defined]
        pass
    if leases.try_acquire("job"):  # type: ignore[truthy-bool]
        pass
