"""Serves the pages by uvicorn, until TERM or Ctrl-C."""

from __future__ import annotations

import signal
import socket

from starlette.applications import Starlette

from pglease.errors import MissingDependencyError

try:
    import uvicorn
except ModuleNotFoundError:
    raise MissingDependencyError("serving pages needs the package uvicorn: install the extra, pglease[web]") from None

GRACE = 10
"""Seconds that requests may go on once the server is to end."""


def serve(app: Starlette, listener: socket.socket) -> None:
    """Answer on a socket that listens, and return after TERM or Ctrl-C. On the main thread."""
    for each in (signal.SIGTERM, signal.SIGINT):
        signal.signal(each, lambda *_: None)  # uvicorn raises the signal once more, when it has done what it asks for
    config = uvicorn.Config(
        app,
        lifespan="on",
        ws="none",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=GRACE,
    )
    _Server(config).run([listener])


class _Server(uvicorn.Server):
    """Sends the readers of streams away first: uvicorn waits for each of them."""

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self.config.app.state.lookout.close()  # type: ignore[union-attr]  # it is the one of `serve`
        await super().shutdown(sockets)
