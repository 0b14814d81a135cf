"""An event that wakes event loops as well as threads, and that a signal handler may ring wherever it interrupts."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from functools import partial


class Bell(threading.Event):
    """Threads wait for it; whoever must not block leaves a callback, which is called when it rings.

    No lock is taken: `threading.Event` has one that its own thread cannot take twice, so a signal handler that closed
    the client while the thread it had interrupted was about to wait would wait for itself.
    """

    def __init__(self) -> None:  # not the parent's: its condition is not used here, and costs more than a whole hold
        self._rung = False
        self._callbacks: dict[Callable[[], None], None] = {}

    def __repr__(self) -> str:
        return f"<Bell: {'set' if self._rung else 'unset'}>"

    def is_set(self) -> bool:
        """Tell whether it has rung."""
        return self._rung

    def set(self) -> None:
        """Ring: wake who waits, and call the callbacks on this thread."""
        self._rung = True
        for callback in tuple(self._callbacks):
            callback()

    def clear(self) -> None:
        """Let it ring anew."""
        self._rung = False

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until it rings, for at most `timeout` seconds (None: for ever); tell whether it has."""
        if self._rung:
            return True
        heard: queue.SimpleQueue[None] = queue.SimpleQueue()  # reentrant, unlike a condition
        wake = partial(heard.put, None)
        self.tell(wake)
        try:
            heard.get(timeout=None if timeout is None else max(0.0, timeout))
        except queue.Empty:
            return self._rung
        finally:
            self.untell(wake)
        return True

    def tell(self, callback: Callable[[], None]) -> None:
        """Call `callback` when it rings, at once if it has; sometimes twice. It must neither block nor raise."""
        self._callbacks[callback] = None
        if self.is_set():
            callback()

    def untell(self, callback: Callable[[], None]) -> None:
        """Call it no more; harmless for what is not known."""
        self._callbacks.pop(callback, None)
