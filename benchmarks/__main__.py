"""`python -m benchmarks`: every figure is a ratio against the bare driver, taken side by side in one run.

The bare driver is psycopg with the same statements, prepared, on one connection in autocommit, without a pool, a
deadline, a renewer or a record: the least that anybody could do. For a losing try it is a `SELECT` of the
holder's record by its key; for a guard, the plainest statement that locks that row, in the same kind of transaction.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import platform
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import psycopg

import pglease
from benchmarks import in_memory, observers, on_a_loop, on_hybrid, on_redis, on_sqlite, peers
from benchmarks.side_by_side import Timing, side_by_side
from pglease.backends.postgres_connections import OURS_ALONE
from pglease.backends.postgres_sql import Statements
from pglease.schema import PROTOCOL, TableNames
from pglease.testing.local_postgres import LocalPostgres

RESULTS = Path(__file__).with_name("RESULTS.md")


@dataclass(frozen=True)
class Figure:
    """One thing that was measured, against what, and how much it may cost."""

    work: str
    flush: str
    ours: Timing
    bare: Timing
    most: float | None

    @property
    def ratio(self) -> float:
        return self.ours.median / self.bare.median

    @property
    def kept(self) -> bool:
        return self.most is None or self.ratio <= self.most


LOCK = "SELECT 1 FROM public.pglease_leases WHERE task_name = %s FOR KEY SHARE"


def begin(connection: psycopg.Connection) -> None:
    """End a caller's transaction and begin the next."""
    connection.commit()
    connection.execute("SELECT 1")


class Bare:
    """The least that anybody could do: the same statements on one connection."""

    def __init__(self, dsn: str) -> None:
        self._link = psycopg.connect(dsn, autocommit=True, prepare_threshold=0)
        self._link.execute(OURS_ALONE)
        self._sql = Statements.of(TableNames("pglease_leases", "public"), PROTOCOL)
        self._hold = self._acquire("bare renewal", 3600.0)
        self._caller = psycopg.connect(dsn)

    def _acquire(self, name: str, ttl: float) -> str:
        lease_id = os.urandom(16).hex()
        params = {"name": name, "owner": "bare", "lease_id": lease_id, "ttl": ttl, "metadata": None, "in_turn": False}
        self._link.execute(self._sql.try_acquire, params).fetchall()
        return lease_id

    def pair(self) -> None:
        lease_id = self._acquire("bare", 60.0)
        self._link.execute(self._sql.release, {"name": "bare", "lease_id": lease_id, "min_hold": 0.0}).fetchall()

    def select(self) -> None:
        self._link.execute(self._sql.look, {"name": "held", "lease_id": None}).fetchone()

    def lock(self) -> None:
        self._caller.execute(LOCK, ("held",)).fetchone()

    def begin(self) -> None:
        begin(self._caller)

    def renew(self) -> None:
        params = {"names": ["bare renewal"], "lease_ids": [self._hold], "ttls": [3600.0]}
        self._link.execute(self._sql.renew, params).fetchall()


class Ours:
    """What users call."""

    def __init__(self, dsn: str) -> None:
        self._leases = pglease.PGLease(dsn)
        self._rival = pglease.PGLease(dsn)
        self._asynchronous = pglease.AsyncPGLease(self._leases)
        self._loop = asyncio.new_event_loop()
        self._leases.try_acquire("renewal", ttl=3600)
        self._held = self._leases.wait_for_lease("held", ttl=3600)
        self._caller = psycopg.connect(dsn)

    def close(self) -> None:
        self._leases.close()
        self._rival.close()
        self._loop.close()

    def block(self) -> None:
        with self._leases.acquire("block", ttl=60):
            pass

    def asynchronous_block(self) -> None:
        self._loop.run_until_complete(self._async_with())

    async def _async_with(self) -> None:
        async with self._asynchronous.acquire("asynchronous block", ttl=60):
            pass

    def pair(self) -> None:
        self._leases.try_acquire("pair", ttl=60)
        self._leases.release("pair")

    def guard(self) -> None:
        self._held.guard(self._caller)

    def begin(self) -> None:
        begin(self._caller)

    def lose(self) -> None:
        self._rival.try_acquire("held", ttl=60)

    def renew(self) -> None:
        self._leases.renew("renewal")


@contextmanager
def _contenders(*, flush: bool) -> Iterator[tuple[Ours, Bare]]:
    with LocalPostgres(fsync=flush, settings={"synchronous_commit": "on" if flush else "off"}) as server:
        ours = Ours(server.dsn)
        try:
            yield ours, Bare(server.dsn)
        finally:
            ours.close()


def measure(rounds: int, runs: int) -> list[Figure]:
    """Measure everything; two servers, one after the other."""
    figures: list[Figure] = []
    for flush in (False, True):
        with _contenders(flush=flush) as (ours, bare):
            word = "on" if flush else "off"
            few = rounds // 4 if flush else rounds

            def compare(
                work: str,
                mine: Callable[[], None],
                theirs: Callable[[], None],
                most: float | None,
                *,
                few: int = few,
                before: Mapping[str, Callable[[], object]] | None = None,
            ) -> None:
                timings = side_by_side({"ours": mine, "bare": theirs}, rounds=few, runs=runs, before=before)
                figures.append(Figure(work, word, timings["ours"], timings["bare"], most))  # noqa: B023

            compare("try_acquire + release", ours.pair, bare.pair, 1.1 if flush else 1.25)
            compare("with acquire(): block", ours.block, bare.pair, 1.1 if flush else 1.25)
            compare("async with, against with", ours.asynchronous_block, ours.block, 1.5 if flush else None)
            compare("renew", ours.renew, bare.renew, None)
            if not flush:
                compare("losing try", ours.lose, bare.select, 1.25)
                compare("guard", ours.guard, bare.lock, 1.3, before={"ours": ours.begin, "bare": bare.begin})
    return figures


def report(figures: list[Figure]) -> str:
    """Write what was measured, where and how."""
    rows = "\n".join(_row(figure) for figure in figures)
    return f"""# What pglease costs

Written by `make bench` on {datetime.now(UTC):%Y-%m-%d}. Each figure is the median of its runs, both sides taken in
turn in one process on one machine; in brackets the smallest and the largest median of a run. *Bare* is psycopg with the
same statements and session settings, prepared, on one connection; for the losing try a `SELECT` of the record; for
`async with` the same block of `PGLease`; for the guard a `SELECT … FOR KEY SHARE`, both in a transaction that is open.

| work | WAL flush | pglease, µs | bare, µs | ratio | aim |
|---|---|---|---|---|---|
{rows}

Machine: {platform.machine()}, {os.cpu_count()} cores, {platform.system()}; Python {platform.python_version()},
psycopg {psycopg.__version__} ({psycopg.pq.__impl__}), PostgreSQL over TCP on the loopback device.
"""


def _row(figure: Figure) -> str:
    aim = "" if figure.most is None else f"≤ {figure.most}{'' if figure.kept else ' (missed)'}"
    times = f"{_shown(figure.ours)} | {_shown(figure.bare)}"
    return f"| {figure.work} | {figure.flush} | {times} | {figure.ratio:.2f}× | {aim} |"


def _shown(timing: Timing) -> str:
    return f"{timing.median:.0f} ({timing.least:.0f} to {timing.most:.0f})"


def main(arguments: list[str]) -> int:
    """Measure, print, and write RESULTS.md; 1 when an aim was missed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--rounds", type=int, default=1500, help="calls of each kind in a run (default 1500)")
    parser.add_argument("--runs", type=int, default=5, help="runs (default 5)")
    parser.add_argument("--deaths", type=int, default=50, help="holders that are killed (default 50)")
    parser.add_argument("--write", action="store_true", help="write benchmarks/RESULTS.md")
    asked = parser.parse_args(arguments)
    figures = measure(asked.rounds, asked.runs)
    sections = [
        on_redis.section(asked.rounds, asked.runs),
        on_sqlite.section(asked.rounds, asked.runs),
        in_memory.section(asked.rounds, asked.runs),
        on_a_loop.section(asked.rounds // 5),
        observers.section(asked.rounds, asked.runs),
        on_hybrid.section(asked.deaths, asked.rounds, asked.runs),
        peers.section(asked.rounds, asked.runs),
    ]
    text = report(figures) + "".join(section for section, _ in sections)
    sys.stdout.write(text)
    if asked.write:
        RESULTS.write_text(text, encoding="utf-8")
    kept = all(kept for _, kept in sections) and all(figure.kept for figure in figures)
    return 0 if kept else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
