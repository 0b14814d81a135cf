"""Tells a callback who has become the leader, on a thread of its own."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from pglease.errors import BackendClosed, BackendError
from pglease.events import ChangeKind, LeaseChange
from pglease.records import Lease
from pglease.watching import Watch

log = logging.getLogger("pglease")

BEGINNINGS: frozenset[ChangeKind] = frozenset({"present", "acquired", "taken over"})
AFTER_A_REFUSAL = 5.0
"""Seconds until a store that refuses to be read is read again."""


class Herald:
    """Calls `proclaim` with the record of each new leader, until it is closed.

    Args:
        watch: of the election's lease; closed with the herald.
        proclaim: the callback. What it raises is logged.
    """

    def __init__(self, watch: Watch, proclaim: Callable[[Lease], object]) -> None:
        self._watch = watch
        self._proclaim = proclaim
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="pglease-herald", daemon=True)

    def start(self) -> None:
        """Begin, with the present leader."""
        try:
            self._thread.start()
        except RuntimeError:  # no more threads, or the interpreter is going down
            log.exception("nobody can be told who leads: %r", self._watch)

    def close(self) -> None:
        """Call no more; a call that goes on is not waited for."""
        self._closing.set()
        self._watch.close()

    def _run(self) -> None:
        leader = 0
        while not self._closing.is_set():
            change = self._next()
            if change is None or change.kind not in BEGINNINGS or change.lease.is_expired():
                continue  # an end, or a term that was over before anybody saw it
            if change.lease.fencing_token != leader and not self._closing.is_set():
                leader = change.lease.fencing_token
                self._tell(change.lease)

    def _next(self) -> LeaseChange | None:
        try:
            return self._watch.next(float("inf"))
        except BackendClosed:
            self._closing.set()
        except BackendError as error:
            log.warning("nobody can be told who leads for now: %s", error)
            self._closing.wait(AFTER_A_REFUSAL)
        return None

    def _tell(self, record: Lease) -> None:
        try:
            self._proclaim(record)
        except BaseException:  # also SystemExit, which would end this thread in silence
            log.exception("on_new_leader failed for %r", record.task_name, extra={"lease_name": record.task_name})
