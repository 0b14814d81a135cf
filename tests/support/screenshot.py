"""The picture of the pages in the documentation: `python -m tests.support.screenshot` writes docs/web.png."""

from __future__ import annotations

import itertools
import socket
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

import uvicorn

from pglease import MemoryBackend, PGLease, clock
from pglease.backends.base import Budget
from pglease.records import Renewal, Request, Ticket
from pglease.testing.fake_clock import FakeClock
from pglease.web import web_app
from tests.support.browser import Chromium, chromium

PICTURE = Path(__file__).resolve().parents[2] / "docs" / "web.png"
WIDTH = 1100
MORNING = (datetime(2026, 12, 1, 9, 30, tzinfo=UTC) - datetime(2000, 1, 1, tzinfo=UTC)).total_seconds()
"""A moment on the clock of a store in memory."""


class Story:
    """Some minutes of a shop, played in a moment: a leader that dies, a report, an import that others queue for."""

    def __init__(self) -> None:
        self.store = MemoryBackend(clock := FakeClock(MORNING), history=20)
        self._pass = clock.advance
        self._ids = (f"{number:032x}" for number in itertools.count(1))

    def take(self, name: str, owner: str, ttl: float) -> str:
        lease_id = next(self._ids)
        self.store.try_acquire(Request(name, owner, lease_id, ttl), _budget())
        return lease_id

    def keep(self, name: str, lease_id: str, ttl: float) -> None:
        self.store.renew([Renewal(name, lease_id, ttl)], _budget())

    def end(self, name: str, lease_id: str) -> None:
        self.store.release(name, lease_id, _budget())

    def wait(self, name: str, owner: str) -> None:
        self.store.queue(Ticket(name, next(self._ids), owner, 3600), _budget())

    def play(self) -> MemoryBackend:
        """Play it to its end; returns the store."""
        leader = self.take("invoices:leader", "web-1", 30)
        report = self.take("daily-report", "worker-a", 300)
        backup = self.take("nightly-backup", "cron-1", 120)
        for _ in range(6):
            self._pass(10)
            self.keep("invoices:leader", leader, 30)
        self.end("daily-report", report)
        self.end("nightly-backup", backup)
        imported = self.take("import:4711", "worker-a", 120)
        self._pass(40)  # the leader has died meanwhile
        leader = self.take("invoices:leader", "web-2", 30)
        self.take("refunds", "worker-c", 25)
        for _ in range(2):
            self._pass(15)
            self.keep("invoices:leader", leader, 30)
        self.end("import:4711", imported)
        self.take("import:4711", "worker-b", 300)
        self.wait("import:4711", "worker-a")
        self.wait("import:4711", "worker-d")
        self._pass(20)
        self.keep("invoices:leader", leader, 30)
        self.take("daily-report", "worker-c", 300)
        self._pass(12)
        self.keep("invoices:leader", leader, 30)
        self._pass(4)
        return self.store


def draw(browser: Chromium, file: Path) -> None:
    """Serve the story's end, and write a picture of the page."""
    with PGLease(Story().play()) as leases, _served(leases) as address:
        page = browser.page(width=WIDTH)
        page.go(address)
        height = page.see("document.querySelector('footer').hidden = true, document.body.offsetHeight")
        page.ask("Emulation.setDeviceMetricsOverride", width=WIDTH, height=height, deviceScaleFactor=1, mobile=False)
        page.picture(file)
        page.go("about:blank")
        assert page.complaints == []


@contextmanager
def _served(leases: PGLease) -> Iterator[str]:
    app = web_app(leases)
    server = uvicorn.Server(uvicorn.Config(app, lifespan="on", ws="none", log_config=None, access_log=False))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=server.run, args=([listener],))
        thread.start()
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}/"
        finally:
            server.should_exit = True
            thread.join()


def _budget() -> Budget:
    return Budget.of(60.0, clock.now)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as directory, chromium(Path(directory)) as started:
        draw(started, PICTURE)
    sys.stdout.write(f"{PICTURE}\n")
