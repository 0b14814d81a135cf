"""What the hybrid backend costs, and how soon it notices a death: real processes, really killed, a real network cut."""

from __future__ import annotations

import logging
import secrets
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import psycopg

import pglease
from benchmarks.side_by_side import row, side_by_side
from pglease.testing.local_postgres import LocalPostgres
from tests.support.cut import cut_off_a_holder
from tests.support.needs import NEEDS

TTL = 60
SHORT_TTL = 3
FEW = 5
"""Rounds of what takes seconds each time."""
_HOLDER = """
import sys, pglease
leases = pglease.PGLease(sys.argv[1])
leases.wait_for_lease("job", ttl=float(sys.argv[2]), timeout=60)
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
def _holder(url: str, ttl: float) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-c", _HOLDER, url, str(ttl)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            assert process.stdout.readline() == "held\n"
            yield process
        finally:
            process.kill()


def succeeded(url: str, look: psycopg.Connection, signum: int, ttl: float) -> float:
    """Do something to a holder; return how long it took until somebody who waited had the lease."""
    with pglease.PGLease(url) as heir, _holder(url, ttl) as holder:
        _await(lambda: look.execute(_MARK).fetchone() != (None,))
        heir.try_acquire("job")  # connected, and told that it is held
        begun_at = time.monotonic()
        holder.send_signal(signum)
        heir.wait_for_lease("job", ttl=TTL, timeout=120)
        return time.monotonic() - begun_at


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


def _cut_delays() -> list[Delay]:
    """Measure a cut network; nothing where namespaces cannot be made."""
    if not NEEDS["netns"].is_there():
        return []
    delays = []
    for where in ("on a quiet line", "in an answer"):
        in_an_answer = where == "in an answer"
        outcomes = [cut_off_a_holder(secrets.token_hex(8), in_an_answer=in_an_answer) for _ in range(FEW)]
        delays += [
            Delay(f"holder's notice of a network cut {where}", [outcome.told_after for outcome in outcomes], 4.0),
            Delay(f"next holder after a network cut {where}", [outcome.granted_after for outcome in outcomes], 4.0),
        ]
    return delays


def _costs(rounds: int, runs: int) -> str:
    """Measure what a session costs besides the row."""
    rows = []
    for flush in (False, True):
        with (
            LocalPostgres(fsync=flush, settings={"synchronous_commit": "on" if flush else "off"}) as server,
            pglease.PGLease(f"hybrid+{server.dsn}") as bound,
            pglease.PGLease(server.dsn) as plain,
        ):
            calls = {"bound": partial(_pair, bound, "bound"), "plain": partial(_pair, plain, "plain")}
            timings = side_by_side(calls, rounds=rounds // 4 if flush else rounds, runs=runs)
        work = f"try_acquire + release, WAL flush {'on' if flush else 'off'}"
        rows.append(row(work, timings["bound"], timings["plain"], None))
    return "\n".join(rows)


def _pair(leases: pglease.PGLease, name: str) -> None:
    leases.try_acquire(name, ttl=TTL)
    leases.release(name)


def section(deaths: int, rounds: int, runs: int) -> tuple[str, bool]:
    """Measure, and return the section of the report, and whether every aim was met."""
    logging.getLogger("pglease").setLevel(logging.CRITICAL)  # the losses are what is measured
    costs = _costs(rounds, runs)
    with LocalPostgres(fsync=False) as server, psycopg.connect(server.dsn, autocommit=True) as look:
        url = f"hybrid+{server.dsn}"
        with pglease.PGLease(url) as first:
            first.try_acquire("job")
            first.release("job")
        kills = [succeeded(url, look, signal.SIGKILL, TTL) for _ in range(deaths)]
        stops = [succeeded(url, look, signal.SIGSTOP, SHORT_TTL) for _ in range(FEW)]
        delays = [
            Delay(f"next holder after kill -9, ttl {TTL} s", kills, 1.0),
            Delay("holder's notice after pg_terminate_backend", [terminated(url, look) for _ in range(deaths)], 0.1),
            *_cut_delays(),
            Delay(f"next holder after SIGSTOP, ttl {SHORT_TTL} s", stops, SHORT_TTL + 1.0),
        ]
    said = "\n".join(delay.row() for delay in delays)
    text = f"""
## What the hybrid backend costs

Against plain PostgreSQL: a grant asks the client's own session for the lock first, and the release gives it back later.

| work | hybrid, µs | plain, µs | ratio | aim |
|---|---|---|---|---|
{costs}

## What the hybrid backend notices, and when

Seconds, by rounds. The handover delay of 0.3 s is part of each succession but the last. The network between two hosts
is cut by a router that goes deaf (left out where namespaces cannot be made); a stopped process is waited for until its
ttl ends.

| what | rounds | median | p99 | worst | aim |
|---|---|---|---|---|---|
{said}
"""
    return text, all(delay.kept for delay in delays)
