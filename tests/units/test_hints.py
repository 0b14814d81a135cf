"""Hints that come between a look and its waiter's place in the line."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from pglease import MemoryBackend, PGLease
from pglease.backends.base import Budget
from pglease.records import Granted, Refused, Request
from tests.support.worlds import wait_until


class SlowAnswer(MemoryBackend):
    """A store whose next answer about `job` is held back."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.hold_back, self.answered, self.go_on = threading.Event(), threading.Event(), threading.Event()

    def try_acquire(self, request: Request, budget: Budget) -> Granted | Refused:
        answer = super().try_acquire(request, budget)
        if request.name == "job" and self.hold_back.is_set():
            self.hold_back.clear()
            self.answered.set()
            self.go_on.wait(20)
        return answer


def test_a_release_that_is_announced_while_a_look_is_on_its_way_back_is_not_missed():
    backend = SlowAnswer()
    with PGLease(backend) as leases, PGLease(backend.another(), "rival") as rival, ThreadPoolExecutor(2) as pool:
        rival.try_acquire("other")
        other = pool.submit(leases.wait_for_lease, "other", timeout=30)  # keeps an ear open all the while
        rival.try_acquire("job")
        marking = pool.submit(leases.wait_for_lease, "job", timeout=30)
        wait_until(lambda: len(leases.waiting()) == 2)
        rival.release("job")
        marking.result(20)
        leases.release("job")

        rival.try_acquire("job")
        backend.hold_back.set()
        late = pool.submit(leases.wait_for_lease, "job", timeout=30)
        assert backend.answered.wait(20)
        rival.release("job")
        rival.release("other")
        other.result(20)  # hints are heard in their order: that of `job` was before
        backend.go_on.set()

        assert late.result(10).held
