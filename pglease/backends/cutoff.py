"""The bound of a conversation that nothing else bounds: a frozen server's kernel acknowledges what is sent to it."""

from __future__ import annotations

import contextlib
import socket
import threading

from pglease import watchdog


class Cutoff:
    """Shuts one connection's socket when a conversation is overdue. Costs the watchdog a dictionary entry."""

    __slots__ = ("_armed", "_fd", "_lock", "due", "fired")

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._lock = threading.Lock()  # between us and the watchdog: once disarmed, the number may be another socket's
        self._armed = False
        self.due = 0.0
        self.fired = False

    def arm(self, due: float) -> None:
        """Shut the socket at `due`, unless disarmed before."""
        self.due = due
        self._armed = True
        watchdog.watch(self)

    def disarm(self) -> None:
        """Let the socket be."""
        with self._lock:
            self._armed = False
        watchdog.forget(self)

    def overdue(self) -> None:
        """Shut the socket. `shutdown` wakes whoever waits on it, which `close` would not."""
        with self._lock:
            if not self._armed:
                return
            self.fired = True
            twin = socket.socket(fileno=self._fd)  # no duplicate, which a process without free descriptors cannot make
            try:
                with contextlib.suppress(OSError):  # the other end, or the network, has ended it already
                    twin.shutdown(socket.SHUT_RDWR)
            finally:
                twin.detach()
