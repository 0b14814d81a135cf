"""How soon the hybrid backend notices a death: real processes, really killed."""

from __future__ import annotations

import logging
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import psycopg

import pglease
from pglease.testing.local_postgres import LocalPostgres

TTL = 60
_HOLDER = f"""
import sys, pglease
leases = pglease.PGLease(sys.argv[1])
leases.wait_for_lease("job", ttl={TTL}, timeout=60)
print("held", flush=True)
sys.stdin.readline()
"""
_MARK = "SELECT session_pid FROM pglease_leases WHERE task_name = 'job'"


@dataclass(frozen=True)
class Delay:
    """How long something took, each time."""

    what: str
    seconds: list[float]
    most: float

    def percentile(self, share: float) -> float:
        """Return the value that so large a share stays below."""
        return sorted(self.seconds)[min(len(self.seconds) - 1, int(share * len(self.seconds)))]

    @property
    def kept(self) -> bool:
        return self.percentile(0.99) <= self.most

    def row(self) -> str:
        """Return a line of the table."""
        middle, late, worst = statistics.median(self.seconds), self.percentile(0.99), max(self.seconds)
        aim = f"p99 ≤ {self.most:g}{'' if self.kept else ' (missed)'}"
        return f"| {self.what} | {len(self.seconds)} | {middle:.3f} | {late:.3f} | {worst:.3f} | {aim} |"


@contextmanager
def _holder(url: str) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-c", _HOLDER, url]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            assert process.stdout.readline() == "held\n"
            yield process
        finally:
            process.kill()


def killed(url: str, look: psycopg.Connection) -> float:
    """Kill a holder; return how long it took until somebody who waited had the lease."""
    with pglease.PGLease(url) as heir, _holder(url) as holder:
        _await(lambda: look.execute(_MARK).fetchone() != (None,))
        heir.try_acquire("job")  # connected, and told that it is held
        killed_at = time.monotonic()
        holder.send_signal(signal.SIGKILL)
        heir.wait_for_lease("job", ttl=TTL, timeout=120)
        return time.monotonic() - killed_at


def terminated(url: str, look: psycopg.Connection) -> float:
    """End a holder's session; return how long it took until the holder knew."""
    with pglease.PGLease(url) as leases:
        leases.wait_for_lease("job", ttl=TTL)
        lease = leases.held("job")
        assert lease is not None
        _await(lambda: look.execute(_MARK).fetchone() != (None,))
        ended_at = time.monotonic()
        look.execute(f"SELECT pg_terminate_backend(session_pid) FROM ({_MARK}) AS m")
        lease.lost.wait(30)
        took = time.monotonic() - ended_at
    with pglease.PGLease(url) as leases:
        leases.wait_for_lease("job", ttl=TTL)
        leases.release("job")
    return took


def _await(condition: Callable[[], bool]) -> None:
    while not condition():
        time.sleep(0.005)


def section(rounds: int) -> tuple[str, bool]:
    """Measure, and return the section of the report, and whether every aim was met."""
    logging.getLogger("pglease").setLevel(logging.CRITICAL)  # the losses are what is measured
    with LocalPostgres(fsync=False) as server, psycopg.connect(server.dsn, autocommit=True) as look:
        url = f"hybrid+{server.dsn}"
        with pglease.PGLease(url) as first:
            first.try_acquire("job")
            first.release("job")
        delays = [
            Delay(f"next holder after kill -9, ttl {TTL} s", [killed(url, look) for _ in range(rounds)], 1.0),
            Delay("holder's notice after pg_terminate_backend", [terminated(url, look) for _ in range(rounds)], 0.1),
        ]
    rows = "\n".join(delay.row() for delay in delays)
    text = f"""
## What the hybrid backend notices, and when

Seconds, by rounds. The handover delay of 0.3 s is part of the first. A cut network and a stopped process are tests
(`tests/hybrid/`), since they need namespaces or a ttl.

| what | rounds | median | p99 | worst | aim |
|---|---|---|---|---|---|
{rows}
"""
    return text, all(delay.kept for delay in delays)
