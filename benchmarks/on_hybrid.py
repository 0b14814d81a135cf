"""What the hybrid backend costs, and how soon it notices a death: real processes, really killed, a real network cut."""

from __future__ import annotations

import logging
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import psycopg

import pglease
from benchmarks.figures import Aim, Figure, Section, Spread, late
from benchmarks.timing import Effort, side_by_side
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


def _delay(what: str, seconds: list[float], most: float) -> list[Figure]:
    """Return how long something took, each time: the middle, and what 99 of 100 stay below."""
    return [
        Figure(f"{what}: p50 of {len(seconds)}", "s", Spread.of_seconds([seconds], "s")),
        Figure(f"{what}: p99", "s", Spread.of_seconds([seconds], "s", late(0.99)), aim=Aim(most, "ours")),
    ]


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


def _cut_delays(rounds: int) -> list[Figure]:
    """Measure a cut network; nothing where namespaces cannot be made."""
    if not NEEDS["netns"].is_there():
        return []
    figures = []
    for where in ("on a quiet line", "in an answer"):
        in_an_answer = where == "in an answer"
        outcomes = [cut_off_a_holder(secrets.token_hex(8), in_an_answer=in_an_answer) for _ in range(rounds)]
        figures += _delay(f"holder's notice of a network cut {where}", [each.told_after for each in outcomes], 4.0)
        figures += _delay(f"next holder after a network cut {where}", [each.granted_after for each in outcomes], 4.0)
    return figures


def _costs(effort: Effort) -> list[Figure]:
    """Measure what a session costs besides the row."""
    figures = []
    for flush in (False, True):
        with (
            LocalPostgres(fsync=flush, settings={"synchronous_commit": "on" if flush else "off"}) as server,
            pglease.PGLease(f"hybrid+{server.dsn}") as bound,
            pglease.PGLease(server.dsn) as plain,
        ):
            calls = {"bound": partial(_pair, bound, "bound"), "plain": partial(_pair, plain, "plain")}
            rounds = effort.rounds // 4 if flush else effort.rounds
            took = side_by_side(calls, rounds=rounds, runs=effort.runs)
        work = f"try_acquire + release; flush {'on' if flush else 'off'}"
        figures.append(Figure(work, "µs", took["bound"], took["plain"], "our plain rows"))
    return figures


def _pair(leases: pglease.PGLease, name: str) -> None:
    leases.try_acquire(name, ttl=TTL)
    leases.release(name)


HOW = """Against plain PostgreSQL: a grant asks the client's own session for the lock first, and the release gives it
back later. Then what it notices, and when, in seconds. The handover delay of 0.3 s is part of each succession but the
last. The network between two hosts is cut by a router that goes deaf (left out where namespaces cannot be made); a
stopped process is waited for until its ttl ends."""


def section(effort: Effort) -> Section:
    """Measure."""
    logging.getLogger("pglease").setLevel(logging.CRITICAL)  # the losses are what is measured
    figures = _costs(effort)
    several = max(1, min(FEW, effort.few // 3))
    with LocalPostgres(fsync=False) as server, psycopg.connect(server.dsn, autocommit=True) as look:
        url = f"hybrid+{server.dsn}"
        with pglease.PGLease(url) as first:
            first.try_acquire("job")
            first.release("job")
        kills = [succeeded(url, look, signal.SIGKILL, TTL) for _ in range(effort.few)]
        figures += _delay(f"next holder after kill -9, ttl {TTL} s", kills, 1.0)
        ends = [terminated(url, look) for _ in range(effort.few)]
        figures += _delay("holder's notice after pg_terminate_backend", ends, 0.1)
        figures += _cut_delays(several)
        stops = [succeeded(url, look, signal.SIGSTOP, SHORT_TTL) for _ in range(several)]
        figures += _delay(f"next holder after SIGSTOP, ttl {SHORT_TTL} s", stops, SHORT_TTL + 1.0)
    return Section("On hybrid", HOW, figures)
