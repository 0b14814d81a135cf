"""What a lease on PostgreSQL costs above the bare driver: one thread, nobody in the way."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import psycopg

import pglease
from benchmarks.bare import GUARD, Bare, by_socket, postgres
from benchmarks.figures import Aim, Figure, Section, Spread
from benchmarks.timing import Effort, side_by_side

HOW = """*Other* is psycopg with the same statements and session settings, prepared, on one connection; for the losing
try a `SELECT` of the record; for `async with` the same block of `PGLease`; for the guard a `SELECT … FOR KEY SHARE`,
both in a transaction that is open."""


def _begin(connection: psycopg.Connection) -> None:
    """End a caller's transaction and begin the next."""
    connection.commit()
    connection.execute("SELECT 1")


class Calls:
    """What users call, and the same by hand."""

    def __init__(self, dsn: str) -> None:
        self._leases = pglease.PGLease(dsn)
        self._rival = pglease.PGLease(dsn)
        self._asynchronous = pglease.AsyncPGLease(self._leases)
        self._loop = asyncio.new_event_loop()
        self._leases.try_acquire("renewal", ttl=3600)
        self._held = self._leases.wait_for_lease("held", ttl=3600)
        self._caller = psycopg.connect(dsn)
        self._plain_caller = psycopg.connect(dsn)
        self.bare = Bare(dsn)
        self._hold = self.bare.acquire("bare renewal", 3600.0)

    def close(self) -> None:
        self._leases.close()
        self._rival.close()
        self._loop.close()
        for link in (self._caller, self._plain_caller, self.bare):
            link.close()

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

    def bare_guard(self) -> None:
        self._plain_caller.execute(GUARD, ("held",)).fetchone()

    def begin(self) -> None:
        _begin(self._caller)

    def bare_begin(self) -> None:
        _begin(self._plain_caller)

    def lose(self) -> None:
        self._rival.try_acquire("held", ttl=60)

    def renew(self) -> None:
        self._leases.renew("renewal")

    def bare_renew(self) -> None:
        self.bare.renew(["bare renewal"], [self._hold])


@contextmanager
def _calls(dsn: str) -> Iterator[Calls]:
    calls = Calls(dsn)
    try:
        yield calls
    finally:
        calls.close()


def section(effort: Effort) -> Section:
    """Measure with the flush of the log off and on, by TCP and by Unix socket."""
    figures: list[Figure] = []
    for flush in (False, True):
        with postgres(flush=flush) as server:
            few = effort.rounds // 4 if flush else effort.rounds
            with _calls(server.dsn) as calls:
                figures += _in_full(calls, flush=flush, rounds=few, runs=effort.runs)
                if not flush:
                    figures.append(_log_of_losing_tries(server.dsn, calls))
            with _calls(by_socket(server)) as calls:
                timings = side_by_side({"ours": calls.pair, "bare": calls.bare.pair}, rounds=few, runs=effort.runs)
                work = f"try_acquire + release, Unix socket; flush {_word(flush)}"
                figures.append(Figure(work, "µs", timings["ours"], timings["bare"], "bare psycopg"))
    return Section("On PostgreSQL, one thread", HOW, figures)


def _word(flush: bool) -> str:  # as f-strings want it
    return "on" if flush else "off"


def _in_full(calls: Calls, *, flush: bool, rounds: int, runs: int) -> list[Figure]:
    figures = []

    def compare(
        work: str,
        sides: tuple[Callable[[], None], Callable[[], None]],
        most: float | None = None,
        beside: str = "bare psycopg",
        before: Mapping[str, Callable[[], object]] | None = None,
    ) -> None:
        mine, theirs = sides
        timings = side_by_side({"ours": mine, "bare": theirs}, rounds=rounds, runs=runs, before=before)
        aim = None if most is None else Aim(most)
        figures.append(Figure(f"{work}; flush {_word(flush)}", "µs", timings["ours"], timings["bare"], beside, aim))

    most = 1.1 if flush else 1.25
    compare("try_acquire + release", (calls.pair, calls.bare.pair), most)
    compare("with acquire(): block", (calls.block, calls.bare.pair), most)
    compare("async with, against with", (calls.asynchronous_block, calls.block), 1.5 if flush else None, "our with")
    compare("renew", (calls.renew, calls.bare_renew))
    if not flush:
        compare("losing try", (calls.lose, calls.bare.look), 1.25, "SELECT of the record")
        before = {"ours": calls.begin, "bare": calls.bare_begin}
        compare("guard", (calls.guard, calls.bare_guard), 1.3, "SELECT … FOR KEY SHARE", before)
    return figures


def _log_of_losing_tries(dsn: str, calls: Calls) -> Figure:
    """Count the bytes of log that a hundred losing tries write: the least of five, since the server writes too."""
    with psycopg.connect(dsn, autocommit=True) as link:

        def written() -> int:
            row = link.execute("SELECT pg_current_wal_insert_lsn() - '0/0'::pg_lsn").fetchone()
            assert row is not None
            return int(row[0])

        def once() -> float:
            before = written()
            for _ in range(100):
                calls.lose()
            return float(written() - before)

        return Figure(
            "log of 100 losing tries", "bytes", Spread.of([min(once() for _ in range(5))]), aim=Aim(0, "ours")
        )
