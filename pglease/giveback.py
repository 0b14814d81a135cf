"""Gives back, in the background, what reached nobody: a late grant, a lost reply, a forgotten handle, a left place.

Each is tried a few times, since a request whose connection broke may still be applied after the first try; then it
lapses by itself. A thread of its own, so that a stuck store delays no renewal; it ends when there is nothing left to
do.
"""

from __future__ import annotations

import heapq
import itertools
import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, cast

from pglease import clock
from pglease.backends.base import Backend, Budget, FairBackend
from pglease.errors import BackendClosed, BackendError
from pglease.records import Refused, Released
from pglease.steps import Answer

if TYPE_CHECKING:
    from concurrent.futures import Future

log = logging.getLogger("pglease")

PAUSES = (0.0, 0.5, 2.0, 5.0)
"""Seconds between the tries."""
BOX = 2.0
"""Seconds one try may take."""


@dataclass(order=True, slots=True)
class _Debt:
    at: float
    place: int
    name: str = field(compare=False)
    give: Callable[[Budget], bool] = field(compare=False)
    tries: int = field(compare=False, default=0)


class GiveBack:
    """The leases to give back through one backend."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._fresh()

    def _fresh(self) -> None:
        self._changed = threading.Condition(threading.RLock())
        self._debts: list[_Debt] = []
        self._places = itertools.count()
        self._awaited = 0
        self._thread: threading.Thread | None = None
        self._busy = False
        self._stopping = False

    def add(
        self,
        name: str,
        lease_id: str,
        *,
        min_hold: float = 0.0,
        confirmed: Callable[[], object] = lambda: None,
    ) -> None:
        """Give back the hold with that id, should it exist; call `confirmed` once the store says that it did."""

        def give(budget: Budget) -> bool:
            if not isinstance(self._backend.release(name, lease_id, budget, min_hold=min_hold), Released):
                return False
            confirmed()
            return True

        self._add(name, give)

    def add_ticket(self, name: str, ticket_id: str, *, in_doubt: bool) -> None:
        """Give up the place in the queue with that id; `in_doubt` while the request for it may still be under way."""

        def give(budget: Budget) -> bool:
            return cast("FairBackend", self._backend).leave_queue(name, ticket_id, budget) or not in_doubt

        self._add(name, give)

    def _add(self, name: str, give: Callable[[Budget], bool]) -> None:
        with self._changed:
            heapq.heappush(self._debts, _Debt(clock.now(), next(self._places), name, give))
            if self._thread is None and not self._stopping:
                thread = threading.Thread(target=self._run, name="pglease-give-back", daemon=True)
                try:
                    thread.start()
                except RuntimeError:  # the interpreter is going down: it lapses by itself
                    log.warning("the lease %r is left to lapse by itself", name, extra={"lease_name": name})
                    self._debts.clear()
                    return
                self._thread = thread
            self._changed.notify_all()

    def add_when_known(self, call: Future[Answer], name: str, lease_id: str) -> None:
        """Give back what a call comes to that nobody waits for any more; `settle` waits for it."""

        def known(call: Future[Answer]) -> None:
            if not _left_nothing(call):
                self.add(name, lease_id)
            with self._changed:
                self._awaited -= 1
                self._changed.notify_all()

        with self._changed:
            self._awaited += 1
        call.add_done_callback(known)

    def settle(self, seconds: float) -> None:
        """Wait until every debt was tried once, for at most `seconds`, then try no more."""
        until = clock.now() + seconds
        with self._changed:
            while (self._busy or self._awaited or any(debt.tries == 0 for debt in self._debts)) and clock.now() < until:
                self._changed.wait(max(0.0, min(until - clock.now(), 0.5)))
            self._stopping = True
            self._changed.notify_all()

    def forget(self) -> None:
        """In a forked child: the debts are the parent's."""
        self._fresh()

    def _run(self) -> None:
        while (debt := self._next()) is not None:
            done = self._pay(debt)
            with self._changed:
                self._busy = False
                debt.tries += 1
                if not done and debt.tries < len(PAUSES):
                    debt.at = clock.now() + PAUSES[debt.tries]
                    heapq.heappush(self._debts, debt)
                self._changed.notify_all()

    def _next(self) -> _Debt | None:
        with self._changed:
            while self._debts and not self._stopping:
                left = self._debts[0].at - clock.now()
                if left <= 0:
                    self._busy = True
                    return heapq.heappop(self._debts)
                self._changed.wait(min(left, 0.5))
            self._thread = None
            return None

    def _pay(self, debt: _Debt) -> bool:
        try:
            return debt.give(Budget.of(BOX, clock.now))
        except BackendClosed:
            return True
        except BackendError as error:
            log.debug("giving back %r failed: %s", debt.name, error, extra={"lease_name": debt.name})
            return False
        except Exception:
            log.exception("giving back %r failed", debt.name, extra={"lease_name": debt.name})
            return False


def _left_nothing(call: Future[Answer]) -> bool:
    """Tell whether a call surely left no lease behind."""
    return call.cancelled() or (call.exception() is None and isinstance(call.result().value, Refused | Released))
