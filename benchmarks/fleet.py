"""Many at once: threads of this process or forked ones, all at the same work until the time is over; and pgbench."""

from __future__ import annotations

import multiprocessing
import os
import re
import shutil
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from benchmarks.bare import statements
from pglease.testing.local_postgres import LocalPostgres
from pglease.testing.processes import children_of

Work = Callable[[int], AbstractContextManager[Callable[[], object]]]
"""Given the number of the worker, prepares; yields what is done again and again."""

READY = 120.0
"""Seconds for all of them to get ready."""


@dataclass(frozen=True)
class Done:
    """What a fleet got done.

    Attributes:
        a_second: how often the work was done.
        successes: how often it answered something true, a second.
        cores: how many cores its processes used.
        errors: what was raised, and ended a worker.
    """

    a_second: float
    successes: float
    cores: float
    errors: list[str]


def threads(number: int, work: Work, seconds: float) -> Done:
    """Let so many threads of this process work."""
    start = threading.Barrier(number + 1, timeout=READY)
    counts: list[tuple[int, int, str]] = []

    def run(worker: int) -> None:
        counts.append(_work(worker, work, start, seconds)[:3])

    crew = [threading.Thread(target=run, args=(worker,)) for worker in range(number)]
    for thread in crew:
        thread.start()
    start.wait()
    begun, used = time.monotonic(), time.process_time()
    for thread in crew:
        thread.join()
    cores = (time.process_time() - used) / (time.monotonic() - begun)
    return _sum(counts, cores, seconds)


def processes(number: int, work: Work, seconds: float) -> Done:
    """Let so many forked processes work; nothing is imported anew."""
    context = multiprocessing.get_context("fork")
    start, results = context.Barrier(number, timeout=READY), context.SimpleQueue()
    crew = [
        context.Process(target=lambda worker: results.put(_work(worker, work, start, seconds)), args=(worker,))
        for worker in range(number)
    ]
    for process in crew:
        process.start()
    found = [results.get() for _ in crew]
    for process in crew:
        process.join()
    return _sum([each[:3] for each in found], sum(each[3] for each in found) / seconds, seconds)


def _work(worker: int, work: Work, start: threading.Barrier, seconds: float) -> tuple[int, int, str, float]:
    """Return how often it was done, how often with success, what went wrong, and the seconds of CPU of the process."""
    done = won = 0
    used = 0.0
    trouble = ""
    try:
        with work(worker) as call:
            call()  # connected, prepared
            start.wait()
            until, used = time.monotonic() + seconds, time.process_time()
            while time.monotonic() < until:
                won += bool(call())
                done += 1
            used = time.process_time() - used
    except Exception as error:  # noqa: BLE001  # counted, and shown in the results
        trouble = f"{type(error).__name__}: {error}"
    return done, won, trouble, used


def _sum(counts: list[tuple[int, int, str]], cores: float, seconds: float) -> Done:
    done, won = sum(each[0] for each in counts), sum(each[1] for each in counts)
    return Done(done / seconds, won / seconds, cores, [each[2] for each in counts if each[2]])


@contextmanager
def a_core_for_the_clients(server: LocalPostgres) -> Iterator[bool]:
    """Keep what this thread starts on one core, and the server on the others; yields whether that can be done."""
    cores = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set()
    if len(cores) < 2:
        yield False
        return
    ours = {max(cores)}
    _pin_server(server, cores - ours)
    os.sched_setaffinity(0, ours)
    try:
        yield True
    finally:
        os.sched_setaffinity(0, cores)
        _pin_server(server, cores)


def _pin_server(server: LocalPostgres, cores: set[int]) -> None:
    for pid in (server.pid, *children_of(server.pid)):  # the first before all others, who inherit it
        with suppress(ProcessLookupError):
            os.sched_setaffinity(pid, cores)


def pgbench(server: LocalPostgres) -> str | None:
    """Return where pgbench is: beside the server's programs, in a distribution's folder, on the path."""
    placed = [server.bindir / "pgbench", *Path("/usr/lib/postgresql").glob("*/bin/pgbench")]
    return next((str(path) for path in placed if os.access(path, os.X_OK)), shutil.which("pgbench"))


def pairs_of_pgbench(server: LocalPostgres, program: str, clients: int, seconds: float) -> float:
    """Return how often a second pgbench says our two statements, each of its clients for a name of its own."""
    sql = statements()
    values = {
        "name": ":client_id", "owner": ":owner", "lease_id": ":lease_id", "ttl": "60.0", "metadata": "NULL",
        "in_turn": "false", "min_hold": "0.0",
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "pair.sql"
        text = "\n".join(_spoken(statement, values) for statement in (sql.try_acquire, sql.release))
        script.write_text(text, encoding="utf-8")
        options = [
            "-n",
            "-M",
            "prepared",
            "-c",
            str(clients),
            "-j",
            str(min(clients, 2)),
            "-T",
            f"{max(1, seconds):.0f}",
        ]
        told = ["-D", "owner=pgbench", "-D", "lease_id=00000000-0000-0000-0000-000000000001"]
        settings = "-c plan_cache_mode=force_generic_plan -c enable_seqscan=off -c jit=off"
        answer = subprocess.run(
            [program, *options, *told, "-f", str(script), "-h", server.host, "-p", str(server.port), "-U", "postgres",
             server.dbname],
            env={**os.environ, "PGOPTIONS": settings}, capture_output=True, text=True, check=True,
        )  # fmt: skip
    rate = re.search(r"tps = ([\d.]+)", answer.stdout)
    assert rate is not None, answer.stdout
    return float(rate[1])


def _spoken(statement: str, values: dict[str, str]) -> str:
    """Return a statement of psycopg's as pgbench wants it."""
    said = re.sub(r"%\((\w+)\)s", lambda found: values[found[1]], statement)
    return said.replace("%%", "%").strip() + ";\n"
