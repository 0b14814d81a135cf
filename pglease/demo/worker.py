"""One worker of the demo, a process of its own: waits for the lease, works while it holds it, reports.

Its work is a counter in a table. Each write is a transaction with a guard in it, so the database itself lets only the
present holder through. It reports on standard output, one JSON object a line.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from contextlib import closing, suppress
from typing import TYPE_CHECKING, Any

import psycopg

from pglease import clock
from pglease.backends import open_backend
from pglease.client import PGLease
from pglease.errors import FencedError

if TYPE_CHECKING:
    from pglease.handles import HeldLease

BEAT = 0.1
"""Seconds between two writes."""
HISTORY = 20
"""Holds that the store remembers, for the picture."""

WRITE = """UPDATE {schema}.report SET token = %(token)s, author = %(author)s, lines = lines + 1"""


def tell(event: str, **facts: Any) -> None:
    """Report one event, with the time on the clock all processes of this machine share."""
    sys.stdout.write(json.dumps({"event": event, "at": clock.now(), **facts}) + "\n")
    sys.stdout.flush()


def die_with_the_story() -> None:
    """End at once when the story does: its end of our standard input closes then, whatever became of it."""
    os.read(0, 1)  # not `sys.stdin`: its lock would be held at the interpreter's end
    os._exit(1)


def work(lease: HeldLease, report: psycopg.Connection[Any], stop: threading.Event) -> None:
    """Write a line again and again while the lease is held."""
    write = WRITE.format(schema=os.environ["DEMO_SCHEMA"])
    while lease.held and not stop.wait(BEAT):
        with suppress(FencedError), report.transaction():  # fenced: `held` is about to turn false
            lease.guard(report)
            report.execute(write.encode(), {"token": lease.fencing_token, "author": lease.owner_id})


def main() -> None:
    """Hold the lease whenever it can be had, until told to stop."""
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    threading.Thread(target=die_with_the_story, daemon=True).start()
    url, schema, name = (os.environ[variable] for variable in ("DEMO_URL", "DEMO_SCHEMA", "DEMO_LEASE"))
    owner, ttl = os.environ["DEMO_WORKER"], float(os.environ["DEMO_TTL"])
    store = open_backend(url, schema=schema, history=HISTORY)
    with closing(store), PGLease(store, owner_id=owner) as leases, psycopg.connect(url, autocommit=True) as report:
        tell("ready")
        while not stop.is_set():
            lease = _wait(leases, name, ttl, stop)
            if lease is None:
                continue
            tell("acquired", token=lease.fencing_token)
            work(lease, report, stop)
            tell("released" if lease.release() else "lost", token=lease.fencing_token)


def _wait(leases: PGLease, name: str, ttl: float, stop: threading.Event) -> HeldLease | None:
    from pglease.errors import AcquisitionError

    try:
        return leases.wait_for_lease(name, ttl=ttl, timeout=None, poll_interval=0.25, cancel=stop)
    except AcquisitionError:
        return None


if __name__ == "__main__":
    main()
