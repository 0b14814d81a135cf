"""Hears, for all who wait or watch through one client, what the store says of marked names.

One subscription and one thread, however many there are; opened with the first, closed a moment after the last. Nothing
rests on it: whoever is not told looks when the holder's time is over.
"""

from __future__ import annotations

import logging
import random
import threading
from collections.abc import Callable, Sequence
from typing import cast

from pglease import clock
from pglease.backends.base import Backend, Budget, Subscription, WakingBackend
from pglease.errors import BackendClosed, BackendUnavailable
from pglease.records import Change

log = logging.getLogger("pglease")

BOX = 5.0
"""Seconds that beginning to listen may take."""
LINGER = 1.0
"""Seconds for which the subscription is kept after the last one who needed it: waits often follow each other."""
LONGEST_PAUSE = 2.0
"""Seconds between two tries to listen again, at most."""


class Ear:
    """One client's ear.

    Args:
        backend: who is listened to.
        needed: whether anybody waits or watches.
        heard: told of each change, on the ear's thread.
        turned: told when hearing begins (whoever looked before has to look again) and when it ends.
        rest: asked before each rest for how many seconds it may be.
    """

    def __init__(
        self,
        backend: Backend,
        *,
        needed: Callable[[], bool],
        heard: Callable[[Sequence[Change]], None],
        turned: Callable[[bool], None],
        rest: Callable[[], float],
    ) -> None:
        self._backend = backend
        self._needed = needed
        self._heard = heard
        self._turned = turned
        self._rests = rest
        self.fresh()

    def fresh(self) -> None:
        """Begin anew, in a forked child: thread and subscription are the parent's."""
        self._changed = threading.Condition(threading.RLock())
        self._since = 0.0
        self._thread: threading.Thread | None = None
        self._subscription: Subscription | None = None
        self._hopeless = not self._backend.traits.wakes_waiters
        self._closed = False
        self.hearing = False

    def need(self) -> None:
        """Begin to hear, if that has not begun; it ends by itself a moment after nobody needs it any more."""
        with self._changed:
            if self._thread is None and not self._hopeless and not self._closed:
                thread = threading.Thread(target=self._run, name="pglease-ear", daemon=True)
                try:
                    thread.start()
                except RuntimeError:  # no more threads, or the interpreter is going down: everybody looks
                    return
                self._thread = thread

    def close(self) -> None:
        """Hear no more."""
        with self._changed:
            self._closed = True
            subscription = self._subscription
            self._changed.notify_all()
        if subscription is not None:
            subscription.close()

    def _run(self) -> None:
        failures = 0
        while not self._ends():
            try:
                subscription = cast("WakingBackend", self._backend).listen(Budget.of(BOX, clock.now))
                if subscription is None:
                    self._hopeless = True
                    continue
                failures = 0
                self._listen(subscription)
            except BackendClosed:
                self._hopeless = True
            except BackendUnavailable as error:
                log.debug("nothing can be heard of the store for now: %s", error)
                failures += 1
                self._rest(min(LONGEST_PAUSE, 0.05 * 2**failures) * (0.5 + random.random() / 2))
            except Exception as error:  # noqa: BLE001  # whatever it is, waiting does not rest on us
                log.warning("waiters look on their own, since nothing can be heard of the store: %s", error)
                self._hopeless = True

    def _ends(self) -> bool:
        """Tell whether the thread is to end. Decided under the lock: whoever needs it from then on starts another."""
        with self._changed:
            if self._wanted():
                return False
            self._thread = None
            return True

    def _wanted(self) -> bool:
        now = clock.now()
        if self._needed():
            self._since = now
        return not (self._closed or self._hopeless) and now < self._since + LINGER

    def _rest(self, seconds: float) -> None:
        with self._changed:
            if not self._closed:
                self._changed.wait(seconds)

    def _listen(self, subscription: Subscription) -> None:
        with self._changed:
            self._subscription, self.hearing = subscription, True
        try:
            self._turned(True)
            while self._wanted():
                if changes := subscription.next(min(LINGER, self._rests())):
                    self._heard(changes)
        finally:
            with self._changed:
                self._subscription, self.hearing = None, False
            try:
                subscription.close()
            finally:
                self._turned(False)
