"""Whatever it is made of: held for as long as its process lives, free a ttl after that was killed."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from pglease import AcquisitionError, HeldLease, PGLease
from tests.support.worlds import always, child, wait_until

TTL = 2.0
HOLDER = """
leases = PGLease(dsn, "holder")
kept = [
    leases.lock("lock", ttl=2).acquire(),
    leases.read_write_lock("readers", ttl=2).acquire_read(),
    leases.semaphore("slots", 1, ttl=2).acquire(),
    leases.acquire_many(["one", "two"], ttl=2).__enter__(),
]
say("held")
hear()
"""


def refused(acquire: Callable[..., HeldLease]) -> bool:
    """Ask once; give back what is got."""
    try:
        acquire(timeout=0).release()
    except AcquisitionError:
        return True
    return False


@pytest.mark.long
def test_every_primitive_is_renewed_and_lapses_with_its_process(dsn):
    with PGLease(dsn, "rival") as rival, child(HOLDER, dsn) as process:
        taken = {
            "lock": lambda: not rival.try_acquire("lock"),
            "readers": lambda: refused(rival.read_write_lock("readers", ttl=2).acquire_write),
            "slots": lambda: refused(rival.semaphore("slots", 1, ttl=2).acquire),
            "many": lambda: not rival.try_acquire("two"),
        }
        assert process.hear() == "held"

        always(lambda: all(held() for held in taken.values()), 5 * TTL, every=0.2)
        process.process.kill()

        for what, held in taken.items():
            wait_until(lambda held=held: not held(), within=20), what
