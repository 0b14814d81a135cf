"""`python -m benchmarks.waiting`: how long it takes from the return of a release until the next holder has the lease.

Two processes that take turns, and a crowd of twenty, side by side in one run. Beside ours: loops that ask again and
again by the same statements, every 5 s as pglease 0.0.4 does and every 0.1 s as grelmicro does by default. Then what
parked waiters cost.
"""

from __future__ import annotations

import itertools
import os
import platform
import statistics
import subprocess
import sys
import threading
import time
from contextlib import ExitStack, suppress
from datetime import UTC, datetime
from pathlib import Path

import psycopg

import pglease
from pglease.testing.local_postgres import LocalPostgres

RESULTS = Path(__file__).with_name("RESULTS-waiting.md")
CROWD = 20
HOLD = 0.02

WORKER = """
import sys, time
import pglease
from pglease import AcquisitionError, PGLease
how, rounds, hold, dsn = sys.argv[1], int(sys.argv[2]), float(sys.argv[3]), sys.argv[4]
client = PGLease(dsn)
client.get_lease("job")
print("ready", flush=True)
sys.stdin.readline()
for _ in range(rounds):
    if how in ("notify", "fair"):
        lease = client.wait_for_lease("job", ttl=60, timeout=600, fair=how == "fair")
        release = lease.release
    else:
        while not client.try_acquire("job", ttl=60):
            time.sleep(float(how))
        release = lambda: client.release("job")
    got = time.monotonic()
    time.sleep(hold)
    release()
    print(got, time.monotonic(), flush=True)
client.close()
"""


def hand_overs(dsn: str, processes: int, how: str, rounds: int) -> list[float]:
    """Return the seconds between each release and the next holder's grant."""
    with ExitStack() as life:
        workers = [
            life.enter_context(
                subprocess.Popen(
                    [sys.executable, "-c", WORKER, how, str(rounds), str(HOLD), dsn],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    text=True,
                )
            )
            for _ in range(processes)
        ]
        for worker in workers:
            worker.stdout.readline()
        for worker in workers:
            worker.stdin.write("go\n")
            worker.stdin.flush()
        holds = sorted(tuple(map(float, worker.stdout.readline().split())) for worker in workers for _ in range(rounds))
    return [max(0.0, after[0] - before[1]) for before, after in itertools.pairwise(holds)]


def at_expiry(dsn: str, rounds: int) -> list[float]:
    """Return how long after a hold's end the waiter has it, with `notify=False`."""
    quiet = f"{dsn}{'&' if '?' in dsn else '?'}pglease.notify=0"
    late = []
    with pglease.PGLease(quiet) as holder, pglease.PGLease(quiet) as waiter:
        for _ in range(rounds):
            assert holder.try_acquire("lapsing", ttl=1.0, heartbeat=False)
            ends_at = time.monotonic() + 1.0
            lease = waiter.wait_for_lease("lapsing", timeout=60, poll_interval=60)
            late.append(time.monotonic() - ends_at)
            lease.release()
    return late


def parked(dsn: str, seconds: float) -> tuple[float, int]:
    """Return the statements a second, and the transaction ids, that two hundred parked waiters of ten clients cost."""
    cancel = threading.Event()

    def wait(client: pglease.PGLease) -> None:
        with suppress(pglease.AcquireTimeout):
            client.wait_for_lease("parked", timeout=None, cancel=cancel)

    def counts() -> tuple[int, int]:
        with psycopg.connect(dsn, autocommit=True) as link:
            row = link.execute(
                "SELECT xact_commit + xact_rollback, pg_snapshot_xmax(pg_current_snapshot())::text::bigint"
                " FROM pg_stat_database WHERE datname = current_database()"
            ).fetchone()
        return int(row[0]), int(row[1])

    with ExitStack() as life:
        holder, *clients = [life.enter_context(pglease.PGLease(dsn)) for _ in range(11)]
        assert holder.try_acquire("parked", ttl=3600)
        before = counts()[1]
        threads = [threading.Thread(target=wait, args=(clients[place % 10],)) for place in range(200)]
        for thread in threads:
            thread.start()
        time.sleep(5)
        first = counts()
        time.sleep(seconds)
        last = counts()
        cancel.set()
        for thread in threads:
            thread.join()
    return (last[0] - first[0]) / seconds, last[1] - before


def shown(seconds: list[float]) -> str:
    """Return p50 and p99 in milliseconds, as two cells of a table."""
    ordered = sorted(seconds)
    return f"{statistics.median(ordered) * 1e3:.1f} | {ordered[len(ordered) * 99 // 100] * 1e3:.1f}"


def main() -> None:
    """Measure, print, and with `--write` keep it."""
    with LocalPostgres() as server:
        rows = [
            f"| {name} | {processes} | {shown(hand_overs(server.dsn, processes, how, rounds))} |"
            for name, processes, how, rounds in (
                ("pglease", 2, "notify", 100),
                ("asking every 0.1 s (grelmicro's default)", 2, "0.1", 50),
                ("asking every 5 s (pglease 0.0.4)", 2, "5", 5),
                ("pglease", CROWD, "notify", 20),
                ("pglease, `fair=True`", CROWD, "fair", 20),
            )
        ]
        expiry = shown(at_expiry(server.dsn, 10))
        statements, ids = parked(server.dsn, 30.0)
    where = f"Python {platform.python_version()}, {platform.machine()}, {os.cpu_count()} cores"
    text = "\n".join(
        [
            "From the return of a release until the next holder has the lease, in milliseconds.",
            f"{datetime.now(UTC):%Y-%m-%d}, {where}. Written by `python -m benchmarks.waiting --write`.",
            "",
            "| | processes | p50 | p99 |",
            "|---|---|---|---|",
            *rows,
            f"| after a hold's known end, `notify=False` | 1 | {expiry} |",
            "",
            f"200 parked waiters of 10 clients: {statements:.1f} statements a second, {ids} transaction ids in all.",
            "",
        ]
    )
    print(text)
    if "--write" in sys.argv:
        RESULTS.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
