"""What type checkers know about taking leases. Never run: mypy reads it, with the package."""

from __future__ import annotations

from datetime import timedelta
from typing import assert_type

import pglease
from pglease import HeldLease, Lease, LeaseContext, Loss, NotAcquired, PGLease

leases = PGLease("memory://")


def a_plain_block() -> None:
    with leases.acquire("job", ttl="5m", wait=timedelta(seconds=3)) as lease:
        assert_type(lease, HeldLease | NotAcquired)
        if lease:
            assert_type(lease, HeldLease)
            assert_type(lease.fencing_token, int)
            assert_type(lease.loss, Loss | None)
        else:
            assert_type(lease, NotAcquired)
            assert_type(lease.held_by, str | None)
        _ = lease.fencing_token  # type: ignore[union-attr]  # not before one has asked


def a_block_that_raises() -> None:
    with leases.acquire("job", raise_on_failure=True) as lease:
        assert_type(lease, HeldLease)
    with leases.acquire("job", 60, True) as lease:
        assert_type(lease, HeldLease)
    with leases.acquire("job", 60, False) as either:
        assert_type(either, HeldLease | NotAcquired)


def a_block_that_is_told_later(flag: bool) -> None:
    with leases.acquire("job", raise_on_failure=flag) as lease:
        assert_type(lease, HeldLease | NotAcquired)


def the_context_may_be_kept() -> None:
    assert_type(leases.acquire("job"), LeaseContext[HeldLease | NotAcquired])
    assert_type(leases.acquire("job", raise_on_failure=True), LeaseContext[HeldLease])


def a_block_swallows_nothing() -> int:
    with leases.acquire("job"):
        return 1


def the_other_verbs() -> None:
    assert_type(leases.try_acquire("job"), bool)
    assert_type(leases.wait_for_lease("job", timeout=None), HeldLease)
    assert_type(leases.release("job"), bool)
    assert_type(leases.held("job"), HeldLease | None)
    assert_type(leases.holding(), list[HeldLease])
    assert_type(leases.get_lease("job"), Lease | None)
    assert_type(leases.list_leases(), list[Lease])
    assert_type(leases.cleanup_expired("1d"), int)
    assert_type(leases.force_release("job", 7), bool)
    assert_type(PGLease.from_env(), PGLease)


def mistakes() -> None:
    leases.acquire(7)  # type: ignore[call-overload]
    leases.acquire("job", on_lost="ignore")  # type: ignore[call-overload]
    leases.try_acquire("job", wait=3)  # type: ignore[call-arg]
    leases.force_release("job", "7")  # type: ignore[arg-type]


def the_module_functions() -> None:
    assert_type(pglease.try_acquire("job"), bool)
    assert_type(pglease.wait_for_lease("job"), HeldLease)
    assert_type(pglease.held("job"), HeldLease | None)
