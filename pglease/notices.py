"""Tells observers what happens, off everybody's path: a queue and a thread for each observer."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Iterable

from pglease.events import Event, Observer

log = logging.getLogger("pglease")

MOST_PENDING = 10_000
"""Events kept for an observer that is slower than its leases; more are dropped, and that is said."""


class _Desk:
    """One observer's queue and thread."""

    def __init__(self, observer: Observer) -> None:
        self._observer = observer
        self.fresh()

    def fresh(self) -> None:
        self._events: queue.SimpleQueue[Event | None] = queue.SimpleQueue()
        self._lock = threading.RLock()
        self._thread: threading.Thread | None = None
        self._dropped = 0

    def put(self, event: Event) -> None:
        if self._events.qsize() >= MOST_PENDING:
            self._dropped += 1
            if self._dropped == 1:
                log.warning("the observer %r is too slow: events are dropped", self._observer)
            return
        self._dropped = 0
        self._events.put(event)
        if self._thread is None:
            self._start()

    def _start(self) -> None:
        with self._lock:
            if self._thread is None:
                thread = threading.Thread(target=self._run, name="pglease-observer", daemon=True)
                try:
                    thread.start()
                except RuntimeError:  # the interpreter is going down; nobody is left to be told
                    return
                self._thread = thread

    def close(self, seconds: float) -> None:
        thread = self._thread
        self._events.put(None)
        if thread is not None and thread is not threading.current_thread():
            thread.join(seconds)

    def _run(self) -> None:
        while (event := self._events.get()) is not None:
            try:
                self._observer.notify(event)
            except BaseException:  # also SystemExit, which would end this thread in silence
                log.exception("the observer %r failed on %s of %r", self._observer, event.kind, event.name)


class Notices:
    """All observers of one client. Costs nothing when there are none: `if notices: notices.tell(…)`."""

    def __init__(self, observers: Iterable[Observer]) -> None:
        self._desks = [_Desk(observer) for observer in observers]

    def __bool__(self) -> bool:
        return bool(self._desks)

    def tell(self, event: Event) -> None:
        """Queue one event for every observer; returns at once."""
        for desk in self._desks:
            desk.put(event)

    def close(self, seconds: float) -> None:
        """Let the observers hear what is queued, for at most `seconds` each."""
        for desk in self._desks:
            desk.close(seconds)

    def forget(self) -> None:
        """In a forked child: fresh queues, no threads."""
        for desk in self._desks:
            desk.fresh()
