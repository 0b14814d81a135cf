"""The things that leases protect here: registers in the driver's process, which no nemesis reaches.

A *fenced* register refuses tokens below the largest it has seen; a *plain* one takes every write, and each makes its
next version. What arrives is noted in the order of its arrival.
"""

from __future__ import annotations

import json
import socket
import socketserver
import threading
from collections import Counter
from typing import Any, Self

from pglease import clock
from pglease.testing.histories import Scribe, Write


class Registers:
    """Serves registers on a port of its own: `with Registers(scribe) as registers`."""

    def __init__(self, scribe: Scribe) -> None:
        self._scribe = scribe
        self._lock = threading.Lock()
        self._largest: Counter[str] = Counter()
        self._versions: Counter[str] = Counter()
        registers = self

        class Handler(socketserver.StreamRequestHandler):
            def handle(self) -> None:
                try:
                    for line in self.rfile:
                        self.wfile.write(json.dumps(registers.answer(json.loads(line))).encode() + b"\n")
                except (OSError, ValueError):
                    return  # whoever wrote was killed

        class Server(socketserver.ThreadingTCPServer):
            daemon_threads = True

        self._server = Server(("127.0.0.1", 0), Handler)
        self.port = self._server.server_address[1]

    def __enter__(self) -> Self:
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    def answer(self, asked: dict[str, Any]) -> int:
        """Read a version, or write to both registers of a name; return the version read."""
        with self._lock:
            name = asked["name"]
            if "token" not in asked:
                return self._versions[name]
            hold, token, base, at = asked["hold"], asked["token"], asked["base"], clock.now()
            accepted = token >= self._largest[name]
            self._largest[name] = max(self._largest[name], token)
            self._versions[name] += 1
            self._scribe.note(Write("fenced", name, hold, token, at, accepted))
            self._scribe.note(Write("plain", name, hold, token, at, base=base))
            return self._versions[name]


class Pen:
    """One thread's connection to the registers."""

    def __init__(self, port: int) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port))
        self._file = self._socket.makefile("rwb")

    def read(self, name: str) -> int:
        """Return the version of a plain register."""
        return self._ask({"name": name})

    def write(self, name: str, hold: str, token: int, base: int) -> None:
        """Write to both registers, on the strength of the version that was read."""
        self._ask({"name": name, "hold": hold, "token": token, "base": base})

    def _ask(self, asked: dict[str, Any]) -> int:
        self._file.write(json.dumps(asked).encode() + b"\n")
        self._file.flush()
        return int(json.loads(self._file.readline()))
