"""What leases in an SQLite file cost above the bare statements, where a commit reaches a disk and where it need not."""

from __future__ import annotations

import os
import sqlite3
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pglease
from benchmarks.figures import Aim, Figure, Section
from benchmarks.timing import Effort, side_by_side
from pglease.backends.sqlite_sql import Statements
from pglease.schema import table_names

MOST = 1.5
IN_MEMORY = Path("/dev/shm")


class Calls:
    """The same work done by us and by hand, on one file."""

    def __init__(self, path: Path) -> None:
        self._leases = pglease.PGLease(f"sqlite:///{path}")
        self._rival = pglease.PGLease(f"sqlite:///{path}")
        self._leases.try_acquire("held", ttl=3600)
        self._link = sqlite3.connect(path, isolation_level=None, timeout=10)
        self._link.execute("PRAGMA synchronous = FULL")
        self._sql = Statements.of(table_names())
        self._token = 0

    def close(self) -> None:
        self._leases.close()
        self._rival.close()
        self._link.close()

    def pair(self) -> None:
        self._leases.try_acquire("pair", ttl=60)
        self._leases.release("pair")

    def block(self) -> None:
        with self._leases.acquire("block", ttl=60):
            pass

    def lose(self) -> None:
        self._rival.try_acquire("held", ttl=60)

    def bare(self) -> None:
        """Two transactions of the same statements, and nothing around them."""
        run, sql = self._link.execute, self._sql
        self._token += 1
        run("BEGIN IMMEDIATE")
        run(sql.look, ("bare",)).fetchall()
        now = time.monotonic_ns()
        held = ("bare", "bare", os.urandom(16).hex(), self._token, self._token, None, now, now, now + 60_000_000_000)
        run(sql.put, (*held, 0, 0))
        run("COMMIT")
        run("BEGIN IMMEDIATE")
        run(sql.look, ("bare",)).fetchall()
        run(sql.end, (now, "bare"))
        run("COMMIT")

    def select(self) -> None:
        self._link.execute(self._sql.look, ("held",)).fetchall()


@contextmanager
def _calls(where: Path | None) -> Iterator[Calls]:
    with tempfile.TemporaryDirectory(dir=where) as directory, closing(Calls(Path(directory) / "leases.db")) as calls:
        yield calls


HOW = f"""*Other* are the same statements in two transactions (BEGIN IMMEDIATE, synchronous=FULL) on one connection of
sqlite3 ({sqlite3.sqlite_version}); for the losing try a `SELECT` of the record. *In memory* is a file on tmpfs, where
nothing has to reach a disk."""


def section(effort: Effort) -> Section:
    """Measure on disk, and where there is no commit to wait for, so that the rest shows."""
    figures: list[Figure] = []
    places: list[tuple[str, Path | None, int, Aim | None]] = [("on disk", None, effort.rounds // 4, Aim(MOST))]
    if sys.platform == "linux" and IN_MEMORY.is_dir():
        places.append(("in memory", IN_MEMORY, effort.rounds, None))
    for place, where, few, aim in places:
        with _calls(where) as calls:
            sides = {name: getattr(calls, name) for name in ("pair", "block", "bare", "lose", "select")}
            took = side_by_side(sides, rounds=few, runs=effort.runs)
        figures += [
            Figure(f"try_acquire + release, {place}", "µs", took["pair"], took["bare"], "bare sqlite3", aim),
            Figure(f"with acquire(): block, {place}", "µs", took["block"], took["bare"], "bare sqlite3", aim),
            Figure(f"losing try, {place}", "µs", took["lose"], took["select"], "SELECT of the record"),
        ]
    return Section("On SQLite", HOW, figures)
