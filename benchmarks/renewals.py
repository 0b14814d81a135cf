"""Renewal of many leases: what a batch costs, and what it costs a process to keep thousands alive."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import psycopg

import pglease
from benchmarks.bare import Bare, postgres
from benchmarks.figures import Aim, Figure, Section, Spread
from benchmarks.timing import Effort, side_by_side
from pglease import clock
from pglease.backends.base import Budget
from pglease.backends.postgres import PostgresBackend
from pglease.records import Renewal

HOW = """A batch is one call of the store with so many holds; *other* is the same statement on a bare connection, for
other rows. The keeper is a process of its own that holds so many leases of 30 s through one client while it does
nothing else: a tick comes every 10 s, statements are the server's count of transactions, memory is what the process
grew by while it took and renewed them, so also what one statement for all of them takes for a moment."""
TTL = 30.0

_KEEPER = """
import json, os, resource, sys, threading, time
import pglease
dsn, count, seconds = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
def resident():
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
client = pglease.PGLease(dsn)
client.try_acquire("the first", ttl=30)
before = resident()
for number in range(count):
    client.try_acquire(f"lease {number}", ttl=30)
grown = resident() - before
threads = threading.active_count()
time.sleep(10)  # those that were begun apart have met in one tick by now
print("ready", flush=True)
used = time.process_time()
time.sleep(seconds)
used = time.process_time() - used
print(json.dumps({"cpu": used / seconds, "bytes": grown / count, "threads": threads, "held": len(client.holding())}),
      flush=True)
sys.stdin.readline()
os._exit(0)
"""
_SAID = "SELECT xact_commit + xact_rollback FROM pg_stat_database WHERE datname = current_database()"


def _batches(effort: Effort) -> list[Figure]:
    """Measure one renewal of 1, 100, 1,000 and 10,000 holds."""
    figures = []
    with postgres(flush=False) as server, closing(PostgresBackend(server.dsn)) as backend:
        with pglease.PGLease(server.dsn) as first:
            first.get_lease("job")
        with closing(Bare(server.dsn)) as bare:
            for count in (size for size in (1, 100, 1000, 10_000) if size <= effort.many):
                ours, others = [f"ours {count} {n}" for n in range(count)], [f"bare {count} {n}" for n in range(count)]
                renewals = [Renewal(name, str(bare.acquire(name, 3600.0)), 3600.0) for name in ours]
                held = [bare.acquire(name, 3600.0) for name in others]
                bare.link.execute("VACUUM ANALYZE pglease_leases")

                def renew(renewals: Sequence[Renewal] = renewals) -> None:
                    backend.renew(renewals, Budget.of(60.0, clock.now))

                def by_hand(names: list[str] = others, held: list[str | None] = held) -> None:
                    bare.renew(names, held)

                rounds = max(3, min(effort.rounds, 20_000 // count) // 4)
                timings = side_by_side({"ours": renew, "bare": by_hand}, rounds=rounds, runs=min(3, effort.runs))
                each = Spread(*(part / count for part in _parts(timings["ours"])))
                bare_each = Spread(*(part / count for part in _parts(timings["bare"])))
                figures.append(Figure(f"renewal of {count:,}: each", "µs", each, bare_each, "the bare statement"))
    return figures


def _parts(spread: Spread) -> tuple[float, float, float]:
    return spread.median, spread.least, spread.most


def _keeper(effort: Effort) -> tuple[list[Figure], list[str]]:
    """Let one process hold many leases, and see what it and the server do."""
    count = min(10_000, effort.many)
    seconds = min(30.0, 60 * effort.minutes)
    with postgres(flush=False) as server, psycopg.connect(server.dsn, autocommit=True) as look:
        command = [sys.executable, "-c", _KEEPER, server.dsn, str(count), str(seconds)]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as keeper:
            assert keeper.stdout is not None
            keeper.stdout.readline()
            before = _said(look)
            answer = json.loads(keeper.stdout.readline())
            # The server counts a session's transactions once a second at most, and our own look is among them.
            said = _said(look) - before - 1
            live = look.execute("SELECT count(*) FROM pglease_leases WHERE expires_at > now()").fetchone()
            keeper.kill()
    ticks = max(1.0, seconds / (TTL / 3))
    many = f"{count:,} leases kept, ttl {TTL:g} s"
    figures = [
        Figure(f"{many}: statements a tick", "", Spread.of([said / ticks]), aim=Aim(10, "ours")),
        Figure(f"{many}: share of a core", "%", Spread.of([100 * answer["cpu"]]), aim=Aim(5, "ours")),
        Figure(f"{many}: memory for each", "bytes", Spread.of([answer["bytes"]]), aim=Aim(2048, "ours")),
    ]
    notes = [(f"The keeper had {answer['threads']} threads, of which one renews; {answer['held']:,} leases were held "
             f"at the end, and {live and live[0]:,} live in the table.")]  # fmt: skip
    return figures, notes


def _said(look: psycopg.Connection) -> int:
    row = look.execute(_SAID).fetchone()
    assert row is not None
    return int(row[0])


def section(effort: Effort) -> Section:
    """Measure."""
    figures = _batches(effort)
    if Path("/proc/self/statm").exists():
        kept, notes = _keeper(effort)
        return Section("Renewal", HOW, figures + kept, notes)
    return Section("Renewal", HOW, figures, missing=["memory and CPU of a keeper: they are read from /proc"])
