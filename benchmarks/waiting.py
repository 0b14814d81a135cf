"""`python -m benchmarks.waiting`: how long it takes from the return of a release until the next holder has the lease.

One waiter, and a crowd of twenty processes, side by side in one run. Beside ours: loops that ask again and again by the
same statements, every 5 s as pglease 0.0.4 does and every 0.1 s as grelmicro does by default. Then what
parked waiters cost.
"""

from __future__ import annotations

import itertools
import os
import platform
import random
import statistics
import subprocess
import sys
import threading
import time
from contextlib import ExitStack, suppress
from datetime import UTC, datetime
from pathlib import Path

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
        holds = sorted(
            (*map(float, worker.stdout.readline().split()), worker.pid) for worker in workers for _ in range(rounds)
        )
    return [max(0.0, after[0] - before[1]) for before, after in itertools.pairwise(holds) if after[2] != before[2]]


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


def in_turns(dsn: str, how: str, rounds: int) -> list[float]:
    """Return how long one waiter waits from the return of a release that comes at any moment."""
    late = []
    poll = 0.0 if how == "notify" else float(how)
    with pglease.PGLease(dsn) as holder, pglease.PGLease(dsn) as waiter:

        def wait() -> None:
            if how == "notify":
                waiter.wait_for_lease("turns", timeout=60)
            else:
                while not waiter.try_acquire("turns"):
                    time.sleep(poll)
            late.append(time.monotonic())
            waiter.release("turns")

        for _ in range(rounds):
            while not holder.try_acquire("turns"):
                time.sleep(0.01)
            thread = threading.Thread(target=wait)
            thread.start()
            time.sleep(0.1 + random.uniform(0, poll))
            holder.release("turns")
            released = time.monotonic()
            thread.join()
            late[-1] = max(0.0, late[-1] - released)
    return late


def parked(seconds: float) -> tuple[float, int]:
    """Return the statements a second, and the transaction ids, that two hundred parked waiters of ten clients cost."""
    cancel = threading.Event()

    def wait(client: pglease.PGLease) -> None:
        with suppress(pglease.AcquireTimeout):
            client.wait_for_lease("parked", timeout=None, cancel=cancel)

    settings = {"log_statement": "all", "log_duration": "on", "log_line_prefix": "%p %x "}
    with LocalPostgres(settings=settings) as server, ExitStack() as life:

        def said() -> list[str]:
            return [line for line in server.log_text().splitlines() if " LOG: " in line]

        holder, *clients = [life.enter_context(pglease.PGLease(server.dsn)) for _ in range(11)]
        assert holder.try_acquire("parked", ttl=3600)
        before = len(said())
        threads = [threading.Thread(target=wait, args=(clients[place % 10],)) for place in range(200)]
        for thread in threads:
            thread.start()
        time.sleep(5)
        parked_since = len(said())
        time.sleep(seconds)
        lines = said()
        cancel.set()
        for thread in threads:
            thread.join()
    statements = [line for line in lines[parked_since:] if "statement: " in line or "execute " in line]
    return len(statements) / seconds, len({line.split()[1] for line in lines[before:]} - {"0"})


def shown(seconds: list[float]) -> str:
    """Return p50 and p99 in milliseconds, as two cells of a table."""
    ordered = sorted(seconds)
    return f"{statistics.median(ordered) * 1e3:.1f} | {ordered[len(ordered) * 99 // 100] * 1e3:.1f}"


def main() -> None:
    """Measure, print, and with `--write` keep it."""
    with LocalPostgres() as server:
        rows = [
            f"| {name} | {shown(in_turns(server.dsn, how, rounds))} |"
            for name, how, rounds in (
                ("one waiter", "notify", 100),
                ("one that asks every 0.1 s, as grelmicro does by default", "0.1", 50),
                ("one that asks every 5 s, as pglease 0.0.4 does", "5", 20),
            )
        ]
        rows += [
            f"| {name} | {shown(hand_overs(server.dsn, CROWD, how, 20))} |"
            for name, how in ((f"{CROWD} waiting processes", "notify"), (f"{CROWD}, `fair=True`", "fair"))
        ]
        expiry = shown(at_expiry(server.dsn, 10))
    statements, ids = parked(70.0)
    where = f"Python {platform.python_version()}, {platform.machine()}, {os.cpu_count()} cores"
    text = "\n".join(
        [
            "From the return of a release until the next holder has the lease, in milliseconds.",
            f"{datetime.now(UTC):%Y-%m-%d}, {where}. Written by `python -m benchmarks.waiting --write`.",
            "",
            "| | p50 | p99 |",
            "|---|---|---|",
            *rows,
            f"| after a hold's known end, `notify=False` | {expiry} |",
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
