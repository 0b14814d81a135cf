"""An event that wakes event loops as well as threads."""

from __future__ import annotations

import threading
from collections.abc import Callable


class Bell(threading.Event):
    """Threads wait for it; whoever must not block leaves a callback, which is called when it rings."""

    def __init__(self) -> None:
        super().__init__()
        self._callbacks: dict[Callable[[], None], None] = {}

    def set(self) -> None:
        """Ring: wake who waits, and call the callbacks on this thread."""
        super().set()
        for callback in tuple(self._callbacks):
            callback()

    def tell(self, callback: Callable[[], None]) -> None:
        """Call `callback` when it rings, at once if it has; sometimes twice. It must neither block nor raise."""
        self._callbacks[callback] = None
        if self.is_set():
            callback()

    def untell(self, callback: Callable[[], None]) -> None:
        """Call it no more; harmless for what is not known."""
        self._callbacks.pop(callback, None)
