"""`python -m benchmarks.waiting`: how long it takes from the return of a release until the next holder has the lease.

One waiting process, beside grelmicro and pglease 0.0.4 as they are released, on the same server in the same run; then a
crowd of twenty, and what parked waiters cost.
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

import psycopg

import pglease
from benchmarks.players import GRELMICRO, SKIPPING, SYNC, Player, installed
from pglease.testing.local_postgres import LocalPostgres

RESULTS = Path(__file__).with_name("RESULTS-waiting.md")
CROWD = 20
CRON = 50
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


def in_turns(dsn: str, python: str, script: str, *, rounds: int, period: float) -> list[float]:
    """Return how long one waiting process waits from the return of a release in another.

    Args:
        dsn: the server.
        python, script: the library's.
        rounds: how often.
        period: seconds between two looks of that library; the release comes at any moment of it.
    """
    late = []
    with ExitStack() as life:
        holder = life.enter_context(Player(python, script, dsn, "holder"))
        holder.do("take")  # pglease 0.0.4 cannot make its table in two processes at once
        holder.do("release")
        waiter = life.enter_context(Player(python, script, dsn, "waiter"))
        waiter.do("take")  # it has started, and connected
        waiter.do("release")
        for _ in range(rounds):
            holder.do("take")
            waiter.begin("wait")
            time.sleep(0.3 + random.uniform(0, period))
            released = holder.do("release")
            late.append(max(0.0, waiter.done() - released))
            waiter.do("release")
    return late


def after_a_kill(dsn: str, rounds: int) -> float:
    """Return the longest time that the next fair waiter waits after a release, when the first one was killed."""
    longest = 0.0
    for _ in range(rounds):
        with ExitStack() as life:
            holder = life.enter_context(pglease.PGLease(dsn))
            assert holder.try_acquire("turns", ttl=600)
            players = [life.enter_context(Player(sys.executable, SYNC, dsn, "fair")) for _ in range(2)]
            for place, player in enumerate(players, start=1):
                player.begin("wait")
                while _queued(dsn) < place:
                    time.sleep(0.01)
            players[0].kill()
            holder.release("turns")
            released = time.monotonic()
            longest = max(longest, players[1].done() - released)
            players[1].do("release")
    return longest


def _queued(dsn: str) -> int:
    with psycopg.connect(dsn) as link:
        ((count,),) = link.execute("SELECT count(*) FROM pglease_leases_tickets WHERE expires_at > clock_timestamp()")
    return int(count)


def losers(dsn: str, rounds: int) -> list[float]:
    """Return how long it takes those who skip to learn that another process of fifty was faster at the same tick."""
    took = []
    with ExitStack() as life:
        players = [_connected(life.enter_context(Player(sys.executable, SKIPPING, dsn, "tick"))) for _ in range(CRON)]
        for _ in range(rounds + 1):
            tick = time.monotonic() + 1.0
            for player in players:
                player.begin(str(tick))
            took.append([seconds for player in players if (seconds := player.done()) >= 0])
    return [seconds for of_a_tick in took[1:] for seconds in of_a_tick]  # in the first one, they connected


def _connected(player: Player) -> Player:
    """Wait until it is: fifty that start at once would be a measure of starting."""
    player.done()
    return player


def database(server: LocalPostgres, number: int) -> str:
    """Return the DSN of a fresh database: what is compared has tables of the same name."""
    with psycopg.connect(server.dsn, autocommit=True) as link:
        link.execute(f"CREATE DATABASE beside{number}")
    return server.dsn.rpartition("/")[0] + f"/beside{number}"


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
    grelmicro, its_version = installed("grelmicro", "grelmicro[postgres]>=0.40")
    earlier, _ = installed("pglease", "pglease==0.0.4", "psycopg2-binary")
    with LocalPostgres(settings={"max_connections": 300}) as server:
        rows = [
            f"| {name} | {shown(in_turns(database(server, number), python, script, rounds=rounds, period=period))} |"
            for number, (name, python, script, rounds, period) in enumerate(
                (
                    ("pglease: one waiting process", sys.executable, SYNC, 200, 0.1),
                    (f"grelmicro {its_version} at its defaults", grelmicro, GRELMICRO, 100, 0.1),
                    ("pglease 0.0.4 at its defaults", earlier, SYNC, 12, 5.0),
                )
            )
        ]
        rows += [
            f"| {name} | {shown(hand_overs(server.dsn, CROWD, how, 20))} |"
            for name, how in (
                (f"pglease: {CROWD} waiting processes", "notify"),
                (f"pglease: {CROWD}, `fair=True`", "fair"),
            )
        ]
        expiry = shown(at_expiry(server.dsn, 20))
        killed = after_a_kill(database(server, len(rows) + 1), 5)
        skipped = shown(losers(database(server, len(rows)), 10))
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
            f"| pglease: after a hold's known end, `notify=False` | {expiry} |",
            f"| pglease: {CRON} processes at one tick, until those who skip know | {skipped} |",
            "",
            f"The first of two fair waiters killed, the next had the lease within {killed:.1f} s, in each of 5 tries.",
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
