"""What takes hours: `make soak`. Load, leaks, mistakes that a run must notice, and runs under faults until time is up.

Each part says its figure beside what is promised. `--write` puts them into docs/proof.md.
"""

from __future__ import annotations

import argparse
import resource
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import psycopg

from pglease import PGLease, clock
from pglease.testing import checkers
from pglease.testing.histories import History
from pglease.testing.local_pgbouncer import find_pgbouncer
from pglease.testing.local_postgres import LocalPostgres
from tests.jepsen import run as runs
from tests.jepsen.mistakes import MISTAKES
from tests.jepsen.worlds import WORLDS
from tests.stress import today, write

ROOT = Path(__file__).parent.parent


class Row(NamedTuple):
    """What was measured, how much it was, what is promised, whether that is kept."""

    what: str
    measured: str
    promised: str
    kept: bool


def row(what: str, measured: str, promised: str, *, kept: bool) -> Row:
    """Return one line of the report, and print it."""
    print(f"{'fine' if kept else 'FAILED':6}  {what}: {measured}; promised: {promised}", flush=True)
    return Row(what, measured, promised, kept)


class Renewals:
    """Notes when the renewals of each lease were confirmed."""

    def __init__(self) -> None:
        self.at: defaultdict[str, list[float]] = defaultdict(list)

    def notify(self, event: Any) -> None:
        """Take note of one."""
        if event.kind == "renewed":
            self.at[event.name].append(clock.now())


def thousand_leases(chosen: argparse.Namespace) -> list[Row]:
    """Hold a thousand leases through one client."""
    ttl, seconds = 10.0, 30.0 if chosen.quick else 60.0
    renewals = Renewals()
    with LocalPostgres() as server, PGLease(server.dsn, observers=[renewals]) as leases:
        threads = threading.active_count()
        held = [leases.wait_for_lease(f"lease-{number:04}", ttl=ttl) for number in range(1000)]
        before = resource.getrusage(resource.RUSAGE_SELF)
        began = time.monotonic()
        time.sleep(seconds)
        used = resource.getrusage(resource.RUSAGE_SELF)
        share = (used.ru_utime + used.ru_stime - before.ru_utime - before.ru_stime) / (time.monotonic() - began)
        lost = sum(not lease.held for lease in held)
        grown = threading.active_count() - threads
        ((connections,),) = server.execute(
            "SELECT count(*) FROM pg_stat_activity WHERE application_name LIKE 'pglease%'"
        )
    gaps = sorted(later - earlier for times in renewals.at.values() for earlier, later in pairwise(times))
    late = gaps[int(0.99 * len(gaps))] - ttl / 3
    return [
        row("1,000 leases on one client, lost", f"{lost}", "0", kept=lost == 0),
        row("renewals late by, 99th percentile", f"{1000 * late:.0f} ms", "250 ms", kept=late < 0.25),
        row("threads for them", f"{grown}", "at most 8", kept=grown <= 8),
        row("connections for them", f"{connections}", "at most 5", kept=connections <= 5),
        row("share of a core for them", f"{100 * share:.0f} %", "30 %", kept=share < 0.3),
    ]


CROWD = """
import json, os, sys, time
from pathlib import Path
from pglease import PGLease, clock
from pglease.testing.histories import Look, Op, Scribe
from dataclasses import replace
url, folder, number = sys.argv[1:]
scribe = Scribe(Path(folder) / f"{number}.jsonl", number)
leases, count = PGLease(url, owner_id=number, pool_size=1), 0
leases.get_lease("job")
print("ready", flush=True)
until = float(sys.stdin.readline())
while clock.now() < until:
    count += 1
    op = scribe.begin(f"{number}.{count}", "acquire", "job")
    with leases.acquire("job", ttl=5) as lease:
        if not lease:
            other = lease.lease
            known = other is not None and not other.is_expired()
            scribe.note(replace(op, ended=clock.now(), outcome="denied", holder=other.fencing_token if known else None))
        else:
            scribe.note(replace(op, ended=clock.now(), outcome="ok", token=lease.fencing_token))
            at = clock.now()
            scribe.note(Look(op.key, at, at + lease.remaining()))
            time.sleep(0.02)
            done = scribe.begin(f"{op.key}:release", "release", "job", lease.fencing_token)
            scribe.note(replace(done, ended=clock.now(), outcome="ok" if lease.release() else "gone"))
    time.sleep(0.02)
"""


def crowd(chosen: argparse.Namespace) -> list[Row]:
    """Let 64 processes ask for one name."""
    with (
        LocalPostgres(settings={"max_connections": 200}) as server,
        tempfile.TemporaryDirectory() as folder,
        PGLease(server.dsn) as leases,
    ):
        leases.get_lease("job")
        processes = [
            subprocess.Popen(
                [sys.executable, "-c", CROWD, server.dsn, folder, f"p{number}"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                cwd=ROOT,
            )
            for number in range(64)
        ]
        for process in processes:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
        until = clock.now() + (20.0 if not chosen.quick else 10.0)
        ended = []
        for process in processes:
            assert process.stdin is not None
            process.stdin.write(f"{until}\n")
            process.stdin.flush()
        for process in processes:
            process.communicate(timeout=300)
            ended.append(process.returncode)
        history = History.read(sorted(Path(folder).glob("*.jsonl")))
    denied = sum(op.outcome == "denied" for op in history.ops)
    wrong = [*checkers.one_believer(history).complaints, *checkers.rising_tokens(history).complaints]
    return [
        row(
            "64 processes on one name",
            f"{len(history.grants):,} grants, {denied:,} refusals, {len(wrong)} violations",
            "one holder at a time",
            kept=not wrong and not any(ended) and len(history.grants) > 0,
        )
    ]


def under_a_held_snapshot(chosen: argparse.Namespace) -> list[Row]:
    """Renew 200,000 times while somebody's snapshot keeps every old version of the row."""
    wanted, took = 20_000 if chosen.quick else 200_000, list[float]()
    with LocalPostgres() as server, PGLease(server.dsn) as leases, psycopg.connect(server.dsn) as reader:
        lease = leases.wait_for_lease("job", ttl=600)
        reader.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
        reader.execute("SELECT count(*) FROM pglease_leases")
        for _ in range(wanted):
            began = time.perf_counter()
            lease.renew()
            took.append(time.perf_counter() - began)
        reader.rollback()
        server.execute("SELECT pg_stat_force_next_flush()")
        leases.release("job")
        time.sleep(1.5)
        ((updates, hot),) = server.execute(
            "SELECT n_tup_upd, n_tup_hot_upd FROM pg_stat_user_tables WHERE relname = 'pglease_leases'"
        )
    last = sorted(took[-wanted // 10 :])[int(0.99 * wanted / 10)]
    return [
        row(
            f"the last of {wanted:,} renewals under a held snapshot, 99th percentile",
            f"{1000 * last:.1f} ms",
            "50 ms",
            kept=last < 0.05,
        ),
        row("HOT updates among them", f"{100 * hot / updates:.1f} %", "95 %", kept=hot > 0.95 * updates),
    ]


def no_growth(chosen: argparse.Namespace) -> list[Row]:
    """Take and give back 10,000 times; compare what is in use after a fifth with what is in the end."""
    with LocalPostgres() as server, PGLease(server.dsn) as leases:
        seen = []
        for number in range(10_000):
            with leases.acquire(f"job-{number % 50}", ttl=60):
                pass
            if number in {1_999, 9_999}:
                ((connections,),) = server.execute(
                    "SELECT count(*) FROM pg_stat_activity WHERE application_name LIKE 'pglease%'"
                )
                seen.append((_memory(), _descriptors(), threading.active_count(), connections))
    before, after = seen
    grown = [later - earlier for earlier, later in zip(before, after, strict=True)]
    return [
        row("memory after 8,000 more acquisitions", f"{grown[0] / 1e6:+.2f} MB", "1 MB", kept=grown[0] < 1e6),
        row("descriptors", f"{grown[1]:+}", "0", kept=grown[1] <= 0),
        row("threads", f"{grown[2]:+}", "0", kept=grown[2] <= 0),
        row("connections", f"{grown[3]:+}", "0", kept=grown[3] <= 0),
    ]


def _memory() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


def _descriptors() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


def mistakes(_: argparse.Namespace) -> list[Row]:
    """Put mistakes into the library; the checker that is meant for each must notice."""
    found = []
    for name, mistake in MISTAKES.items():
        noticed, tries = False, 0
        while not noticed and tries < 3:
            tries += 1
            report = runs.run("plain", tries, 20.0, mistake=name)
            noticed = any(verdict.checker == mistake.checker and not verdict for verdict in report.verdicts)
        found.append(row(f"mistake: {mistake.what}", f"noticed in run {tries}" if noticed else "NOT noticed",
                         f"noticed by {mistake.checker}", kept=noticed))  # fmt: skip
    return found


def under_faults(chosen: argparse.Namespace) -> list[Row]:
    """Run under faults, seed after seed, until time is up."""
    until, seed = time.monotonic() + 3600 * chosen.hours, chosen.seed
    totals, complaints = Counter[str](), []
    while not totals or time.monotonic() < until:
        for world in WORLDS:
            report = runs.run(world, seed, 60.0 if not chosen.quick else 15.0)
            totals["runs"] += 1
            totals["calls"] += len(report.history.ops)
            totals["grants"] += len(report.history.grants)
            totals["faults"] += report.faults.total()
            if not report.fine:
                complaints.append(report.complaint())
                print(complaints[-1], flush=True)
        seed += 1
    facts = ", ".join(f"{count:,} {what}" for what, count in totals.items())
    return [row(f"under faults, seeds {chosen.seed} to {seed - 1}", facts + f", {len(complaints)} complaints",
                "no complaint", kept=not complaints)]  # fmt: skip


PARTS: dict[str, Callable[[argparse.Namespace], list[Row]]] = {
    "thousand-leases": thousand_leases,
    "crowd": crowd,
    "snapshot": under_a_held_snapshot,
    "growth": no_growth,
    "mistakes": mistakes,
    "runs": under_faults,
}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__)
    parser.add_argument("--hours", type=float, default=2.0, help="for how long to run under faults; default 2")
    parser.add_argument("--seed", type=int, default=1, help="of the first run")
    parser.add_argument("--quick", action="store_true", help="a tenth of the load")
    parser.add_argument("--only", nargs="+", choices=list(PARTS), default=list(PARTS))
    parser.add_argument("--write", action="store_true", help="put the figures into docs/proof.md")
    chosen = parser.parse_args()
    if "runs" in chosen.only:
        find_pgbouncer()  # or it would be missed only when all the other parts are done
    rows = [line for name in chosen.only for line in PARTS[name](chosen)]
    if chosen.write and all(line.kept for line in rows):
        lines = [f"| {what} | {measured} | {promised} |" for what, measured, promised, _ in rows]
        write("soak", "\n".join([f"On {today()}.\n", "| what | measured | promised |", "|---|---|---|", *lines]))
    return not all(kept for *_, kept in rows)


if __name__ == "__main__":
    sys.exit(main())
