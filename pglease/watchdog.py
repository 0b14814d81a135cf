"""One thread that never does I/O and so can never be stuck: it acts when a moment on the boot clock has come.

It ends what nothing else can end: a driver's call that waits for a server which is frozen behind a healthy kernel
(neither `tcp_user_timeout` nor Ctrl-C reach it), and a belief whose deadline passed while its renewal hangs.

The thread is made with the first thing to watch, belongs to the whole process, and is made anew in a forked child.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Hashable
from typing import Protocol

from pglease import clock

log = logging.getLogger("pglease")

LONGEST_NAP = 0.5
"""`Condition.wait` counts on a clock that stands still in suspend; short naps notice a wake-up on the boot clock."""


class Watched(Hashable, Protocol):
    """Something that must not outlive a moment."""

    @property
    def due(self) -> float:
        """Seconds on the boot clock; may move at any time, and is read again before acting."""

    def overdue(self) -> None:
        """Act, at once and without I/O; called on the watchdog's thread, at most once for each `watch`."""


class Watchdog:
    """Watches any number of things and calls `overdue` on each whose moment has come."""

    def __init__(self) -> None:
        # A plain lock could deadlock with a signal handler that calls into the library while this thread holds it.
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._watched: dict[Watched, None] = {}
        self._wakes_at = float("inf")
        self._thread: threading.Thread | None = None

    def watch(self, thing: Watched) -> None:
        """Begin to watch. Costs a dictionary entry; the thread is disturbed only for a moment before all others."""
        with self._lock:
            self._watched[thing] = None
            if thing.due < self._wakes_at:
                self._wakes_at = thing.due
                self._changed.notify()
            if self._thread is None:
                self._start()

    def forget(self, thing: Watched) -> None:
        """Stop watching. Harmless for what is not watched."""
        self._watched.pop(thing, None)  # one step of the dictionary's own: it needs no lock

    def _start(self) -> None:
        thread = threading.Thread(target=self._run, name="pglease-watchdog", daemon=True)
        try:
            thread.start()
        except RuntimeError:
            # The interpreter is going down or is out of threads: `held` is computed and stays right without us.
            log.warning("pglease's watchdog cannot start; stuck calls are not cut off", exc_info=True)
            return
        self._thread = thread

    def _run(self) -> None:
        while True:
            for thing in self._await_overdue():
                try:
                    thing.overdue()
                except Exception:
                    log.exception("pglease's watchdog goes on after an error")

    def _await_overdue(self) -> list[Watched]:
        with self._changed:
            while True:
                now = clock.now()
                late, earliest = self._look(now)
                if late:
                    for thing in late:
                        self._watched.pop(thing, None)
                    return late
                # An alarm once set is kept even if what it was for is gone: otherwise every short conversation would
                # set it anew, and disturbing this thread each time would cost more than the conversation.
                self._wakes_at = min(earliest, self._wakes_at) if self._wakes_at > now else earliest
                self._changed.wait(None if self._wakes_at == float("inf") else min(self._wakes_at - now, LONGEST_NAP))

    def _look(self, now: float) -> tuple[list[Watched], float]:
        """Return what is late, and the earliest moment of the rest; asks each once, since there may be thousands."""
        late, earliest = [], float("inf")
        # A copy: a read of `due` may meet the garbage collector, and that a finalizer which forgets something.
        for thing in list(self._watched):
            due = thing.due
            if due <= now:
                late.append(thing)
            elif due < earliest:
                earliest = due
        return late, earliest


_watchdog = Watchdog()


def watch(thing: Watched) -> None:
    """Watch `thing` with the process's own watchdog."""
    _watchdog.watch(thing)


def forget(thing: Watched) -> None:
    """Stop watching `thing`."""
    _watchdog.forget(thing)


def _after_fork_in_child() -> None:
    global _watchdog  # noqa: PLW0603  # threads do not survive a fork, and the lock may have been held by one of them
    _watchdog = Watchdog()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)
