"""Tells observers what happens, off everybody's path: a queue and a thread for each observer. The log is one of them.

A handler of the log may block as long as any other observer (a full pipe, a slow disk), and none of those who tell may
wait for it: the watchdog, the renewer, whoever takes a lease.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import time
from collections.abc import Callable, Iterable
from contextvars import Context, copy_context
from typing import TYPE_CHECKING, TypeAlias

from pglease import clock
from pglease.events import EventKind, Facts, Observer, Waiting, event_of
from pglease.logbook import LEVELS, Logbook

if TYPE_CHECKING:
    from pglease.handles import Hold

log = logging.getLogger("pglease")

MOST_PENDING = 10_000
"""Events kept for an observer that is slower than its leases; more are dropped, and that is said."""

REST = 0.02
"""Seconds that an observer's thread rests after it has told what there was: to wake it costs those who take leases more
than to queue an event, so of many events in a row few wake it."""

_Message: TypeAlias = tuple[Facts, Context]
"""The observer's thread makes an event of the facts: whoever takes a lease need not."""


class _Desk:
    """One observer's queue and thread."""

    def __init__(self, observer: Observer) -> None:
        self._observer = observer
        self._asked: Callable[[EventKind], bool] | None = getattr(observer, "wants", None)
        self.fresh()

    def fresh(self) -> None:
        self._messages: queue.SimpleQueue[_Message | None] = queue.SimpleQueue()
        self._lock = threading.RLock()
        self._thread: threading.Thread | None = None
        self._dropped = 0
        self._closed = False

    def wants(self, kind: EventKind) -> bool:
        if self._asked is None:
            return True
        try:
            return self._asked(kind)
        except Exception:  # noqa: BLE001  # it is told then, and may fail there, where it is said
            return True

    def put(self, facts: Facts, context: Context) -> None:
        if self._messages.qsize() >= MOST_PENDING:
            self._dropped += 1
            if self._dropped == 1:
                self._complain()
            return
        self._dropped = 0
        self._messages.put((facts, context))
        if self._closed:  # told by a thread that was slower than whoever closed the client
            self.end()
        elif self._thread is None:
            self._begin()

    def _begin(self) -> None:
        with self._lock:
            if self._thread is None:
                self._thread = self._started("pglease-observer", self._run)

    def _started(self, name: str, work: Callable[[], object]) -> threading.Thread | None:
        thread = threading.Thread(target=work, name=name, daemon=True)
        try:
            thread.start()
        except RuntimeError:  # the interpreter is going down; nobody is left to be told
            return None
        return thread

    def _complain(self) -> None:
        """Say that events are dropped, not here: the log may be what hangs."""
        self._started(
            "pglease-complaint",
            lambda: log.warning("the observer %r is too slow: events are dropped", self._observer),
        )

    def end(self) -> None:
        """End the thread once it has told what there is; begin one for what there is if there is none."""
        with self._lock:
            self._closed = True
            anything = self._messages.qsize()
            self._messages.put(None)
            if anything:
                self._begin()

    def join(self, seconds: float) -> None:
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(seconds)

    def _run(self) -> None:
        while (message := self._messages.get()) is not None or not self._is_over():
            if message is not None:
                self._tell(*message)
                if not self._messages.qsize():
                    time.sleep(REST)

    def _is_over(self) -> bool:
        """Tell whether all is told, and if so make way for another thread."""
        with self._lock:
            over = not self._messages.qsize()
            if over:
                self._thread = None
            return over

    def _tell(self, facts: Facts, context: Context) -> None:
        event = event_of(facts)
        try:
            context.run(self._observer.notify, event)
        except BaseException:  # also SystemExit, which would end this thread in silence
            with contextlib.suppress(Exception):  # the log itself may be what failed
                log.exception("the observer %r failed on %s of %r", self._observer, event.kind, event.name)


class Notices:
    """All observers of one client, the log among them. What none of them wants costs next to nothing."""

    def __init__(self, observers: Iterable[Observer]) -> None:
        self._guests = [_Desk(observer) for observer in observers]
        self._has_guests = bool(self._guests)
        self._desks = [_Desk(Logbook()), *self._guests]

    def __bool__(self) -> bool:
        """Whether anybody but the log listens."""
        return self._has_guests

    def wants(self, kind: EventKind) -> bool:
        """Tell whether anybody may want to hear of such an event; most of the time nobody does, and it is not made."""
        return self._has_guests or log.isEnabledFor(LEVELS[kind])

    def tell(
        self,
        kind: EventKind,
        name: str,
        owner_id: str | None = None,
        fencing_token: int | None = None,
        *,
        reason: str | None = None,
        seconds: float | None = None,
        error: BaseException | None = None,
        waiting: Waiting | None = None,
        context: Context | None = None,
    ) -> None:
        """Queue one event for every observer that wants it; returns at once. See `Event` for the arguments.

        Args:
            context: whose doing it is; None is the caller's own.
        """
        facts: Facts | None = None
        for desk in self._desks if log.isEnabledFor(LEVELS[kind]) else self._guests:  # most of the time there is none
            if desk.wants(kind):
                if facts is None:
                    trouble = error if isinstance(error, Exception) else None
                    facts = (kind, name, owner_id, fencing_token, reason, seconds, trouble, waiting, clock.now())
                desk.put(facts, copy_context() if context is None else context.copy())

    def tell_of(
        self,
        kind: EventKind,
        hold: Hold,
        *,
        reason: str | None = None,
        seconds: float | None = None,
        error: BaseException | None = None,
    ) -> None:
        """Tell what became of a hold; `seconds` is how long it was held unless said otherwise."""
        if not self.wants(kind):
            return
        lease = hold.term.lease
        self.tell(
            kind,
            hold.name,
            lease.owner_id,
            lease.fencing_token,
            reason=reason,
            seconds=clock.now() - hold.began_at if seconds is None else seconds,
            error=error,
            context=hold.context,
        )

    def close(self, seconds: float) -> None:
        """Let the observers hear what is queued, for at most `seconds` together."""
        until = clock.now() + seconds
        for desk in self._desks:
            desk.end()
        for desk in self._desks:
            desk.join(max(0.0, until - clock.now()))

    def forget(self) -> None:
        """In a forked child: fresh queues, no threads."""
        for desk in self._desks:
            desk.fresh()
