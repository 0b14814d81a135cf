"""Whatever it is made of: held for as long as its process lives, free a ttl after that was killed."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from pglease import AcquisitionError, HeldLease, PGLease, clock
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


WRITER = """
leases = PGLease(dsn, "writer")
say("asks")
leases.read_write_lock("book", ttl="2m").acquire_write()
"""


def test_a_killed_writer_that_waited_keeps_readers_out_for_its_short_intent_however_long_its_ttl(dsn):
    with PGLease(dsn, "reader") as readers, child(WRITER, dsn) as process:
        book = readers.read_write_lock("book", ttl=60)
        reading = book.acquire_read()
        assert process.hear() == "asks"
        wait_until(lambda: refused(book.acquire_read), within=20)

        process.process.kill()
        killed_at = clock.now()

        book.acquire_read(timeout=60).release()
        assert clock.now() - killed_at < 60, "no reader waits for two minutes because of a dead writer"
        assert reading.release()
        assert not book.poisoned
