"""Waiting for one of several leases: no release goes unheard, and to arrange for that takes no longer than the wait."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from pglease import AcquireTimeout, AsyncPGLease, BackendUnavailable, MemoryBackend, PGLease
from pglease.primitives import vigil
from pglease.primitives.vigil import Vigil
from tests.support.worlds import wait_until

LIMIT = 5


class Store(MemoryBackend):
    """A store in which something happens right after a look, and in which a mark may fail."""

    def after_look(self):
        """Nothing, unless a test says so."""

    def before_mark(self, budget):
        """Nothing, unless a test says so."""

    def list(self, *args, **kwargs):
        seen = super().list(*args, **kwargs)
        self.after_look()
        return seen

    def mark(self, name, seconds, budget):
        self.before_mark(budget)
        return super().mark(name, seconds, budget)


@pytest.fixture
def leases():
    with PGLease(Store()) as client:
        yield client


@pytest.fixture
def rival(leases):
    with PGLease(leases.backend.another(), owner_id="rival") as client:
        yield client


def threaded(leases, timeout):
    with leases.semaphore("db", 1).hold(timeout) as slot:
        return slot.fencing_token


def awaited(leases, timeout):
    async def story():
        async with AsyncPGLease(leases).semaphore("db", 1).hold(timeout) as slot:
            return slot.fencing_token

    return asyncio.run(story())


both = pytest.mark.parametrize("token_of_next", [threaded, awaited])


@both
def test_a_release_that_the_last_look_came_too_early_to_see_is_looked_at(leases, rival, monkeypatch, token_of_next):
    monkeypatch.setattr(vigil, "HEARD", 3600.0)
    heard, real = threading.Event(), Vigil.hear
    held = rival.semaphore("db", 1, ttl=600).acquire()
    row = leases.backend._store.rows["db#slot:0"]

    def hear(self, change):
        real(self, change)
        heard.set()

    def release_once_marked():
        if held.held and row.line.marked_until > leases.backend._store.now():
            held.release()
            assert heard.wait(60)

    monkeypatch.setattr(Vigil, "hear", hear)
    monkeypatch.setattr(leases.backend, "after_look", release_once_marked)

    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(token_of_next, leases, 600)
        try:
            assert waiting.result(30) == 2
        finally:
            leases.close()


@both
def test_a_store_that_marks_nothing_is_waited_for_once_a_rest_and_not_beyond_the_wait(
    leases, rival, monkeypatch, token_of_next
):
    holders = rival.semaphore("db", LIMIT, ttl=600)
    held = [holders.acquire() for _ in range(LIMIT)]
    boxes, looks = [], []

    def fail(budget):
        boxes.append(budget.left())
        raise BackendUnavailable("no answer")

    monkeypatch.setattr(leases.backend, "before_mark", fail)
    monkeypatch.setattr(leases.backend, "after_look", lambda: looks.append(1))
    with leases.watch("something else"):
        wait_until(lambda: leases.taking.room.hearing)
        with pytest.raises(AcquireTimeout):
            token_of_next(leases, 1.5)

    assert 0 < len(boxes) < len(looks)
    assert max(boxes) <= 1.5
    assert all(lease.release() for lease in held)
