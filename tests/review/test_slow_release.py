"""A release that the store is slow to take is no loss: the work had ended while the lease was held."""

from __future__ import annotations

import threading
from contextlib import ExitStack

from pglease import PGLease
from tests.support.worlds import locked_row


def test_a_hold_that_lapses_while_its_release_waits_for_a_locked_row_was_not_lost(dsn: str, leases: PGLease) -> None:
    with ExitStack() as lock:
        with leases.acquire("job", ttl=1) as lease:
            lock.enter_context(locked_row(dsn, "job", "UPDATE"))
            unlocking = threading.Timer(1.3, lock.close)
            unlocking.start()
        unlocking.join()

    assert lease
    assert lease.loss is None
    assert leases.try_acquire("job")


def test_a_hold_that_a_rival_took_while_its_release_waited_was_not_lost(
    dsn: str, leases: PGLease, rival: PGLease
) -> None:
    with ExitStack() as lock:
        with leases.acquire("job", ttl=1) as lease:
            lock.enter_context(locked_row(dsn, "job", "UPDATE"))
            taking = threading.Timer(1.2, lambda: (lock.close(), rival.wait_for_lease("job", poll_interval=0.001)))
            taking.start()
        taking.join()

    assert lease.loss is None
    assert rival.held("job")
