"""Many at once: acquire + release from threads and processes, one name for all, ten thousand names."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import pglease
from benchmarks import fleet
from benchmarks.bare import Bare, postgres
from benchmarks.figures import Aim, Figure, Section, Spread
from benchmarks.fleet import Done, Work
from benchmarks.timing import Effort, alternately
from pglease.testing.local_postgres import LocalPostgres

HOW = """Pairs of acquire and release a second, for some seconds of each side in turn. Threads share one client with a
connection for each; processes are forked, each with a client of its own. *pgbench* says the same two statements,
prepared, from as many connections: it is the server's own limit on this machine, which clients and server share. So the
one figure with an aim is taken with a core for the clients and the others for the server, as on two machines."""
CROWDS = (1, 4, 16)


def _pair(leases: pglease.PGLease, name: str) -> bool:
    won = leases.try_acquire(name, ttl=60)
    if won:
        leases.release(name)
    return won


def own_names(leases: pglease.PGLease) -> Work:
    """Each worker at a name of its own, through one client."""

    @contextmanager
    def work(worker: int) -> Iterator[Callable[[], object]]:
        yield partial(_pair, leases, f"ours {worker}")

    return work


def client_each(dsn: str, name: Callable[[int], str]) -> Work:
    """Each worker with a client of its own."""

    @contextmanager
    def work(worker: int) -> Iterator[Callable[[], object]]:
        random.seed(worker)
        with pglease.PGLease(dsn) as leases:
            yield lambda: _pair(leases, name(worker))

    return work


def by_hand(dsn: str, name: Callable[[int], str]) -> Work:
    """The same statements on a connection of its own."""

    @contextmanager
    def work(worker: int) -> Iterator[Callable[[], object]]:
        random.seed(worker)
        bare = Bare(dsn)

        def pair() -> bool:
            which = name(worker)
            lease_id = bare.acquire(which)
            if lease_id is not None:
                bare.release(which, lease_id)
            return lease_id is not None

        try:
            yield pair
        finally:
            bare.close()

    return work


class Counted:
    """Runs a fleet, and remembers what it did besides being counted."""

    def __init__(self, run: Callable[[], Done], *, wins: bool = False) -> None:
        self._run = run
        self._wins = wins
        self.cores: list[float] = []
        self.errors: list[str] = []

    def __call__(self) -> float:
        """Return how often a second the work was done, or done with success."""
        done = self._run()
        self.cores.append(done.cores)
        self.errors += done.errors
        return done.successes if self._wins else done.a_second

    def remark(self) -> str:
        """Return what to say about it."""
        used = f"{Spread.of(self.cores).median:.2f} cores used by our side"
        return f"{used}; {len(self.errors)} errors: {self.errors[0]}" if self.errors else used


def section(effort: Effort) -> Section:
    """Measure."""
    figures, missing, notes = [], [], []
    with postgres(flush=False, max_connections=300) as server:
        program = fleet.pgbench(server)
        if program is None:
            missing.append("pgbench is not installed here; the bare driver stands for it")
        with pglease.PGLease(server.dsn) as first:
            first.get_lease("job")  # the table is there
        for number in CROWDS:
            found, note = _of_threads(server, program, number, effort)
            figures += found
            notes += note
        with fleet.a_core_for_the_clients(server) as apart:
            if apart:
                found, note = _of_threads(server, program, max(CROWDS), effort, apart=True)
                figures += found
                notes += note
            else:
                missing.append("threads that share no core with the server: this system cannot pin processes to cores")
        figures += [figure for number in CROWDS for figure in _of_processes(server, program, number, effort)]
        figures += [_one_name(server, effort), _many_names(server, effort)]
    return Section("Many at once", HOW, figures, notes, missing)


def _of_threads(
    server: LocalPostgres, program: str | None, number: int, effort: Effort, *, apart: bool = False
) -> tuple[list[Figure], list[str]]:
    with pglease.PGLease(server.dsn, pool_size=number) as leases:
        ours = Counted(partial(fleet.threads, number, own_names(leases), effort.seconds))
        bare = Counted(partial(fleet.threads, number, by_hand(server.dsn, "bare {}".format), effort.seconds))
        sides: dict[str, Callable[[], float]] = {"ours": ours, "bare psycopg": bare}
        if program is not None:
            sides["pgbench"] = partial(fleet.pairs_of_pgbench, server, program, number, effort.seconds)
        rates = alternately(sides, min(3, effort.runs))
    work = (f"{number} threads" if number > 1 else "1 thread") + (" on a core of their own" if apart else "")
    figures = [
        Figure(work, "a second", rates["ours"], rate, side, remark=ours.remark())
        for side, rate in rates.items()
        if side != "ours"
    ]
    used = Spread.of(ours.cores)
    if apart and "pgbench" in rates:
        share = rates["ours"].median / rates["pgbench"].median
        reached = Spread.of([max(share, used.median)])
        what = f"{work}: pgbench's rate reached, or of one core of Python used"
        remark = f"{share:.2f} of the rate, {used.median:.2f} of a core"
        figures.append(Figure(what, "", reached, aim=Aim(0.85, "ours", at_least=True), remark=remark))
    return figures, [f"{work}: our process used {used.median:.2f} of a core."] if number > 1 else []


def _of_processes(server: LocalPostgres, program: str | None, number: int, effort: Effort) -> list[Figure]:
    ours = Counted(partial(fleet.processes, number, client_each(server.dsn, "ours {}".format), effort.seconds))
    bare = Counted(partial(fleet.processes, number, by_hand(server.dsn, "bare {}".format), effort.seconds))
    sides: dict[str, Callable[[], float]] = {"ours": ours, "bare psycopg": bare}
    if program is not None and number > 1:
        sides["pgbench"] = partial(fleet.pairs_of_pgbench, server, program, number, effort.seconds)
    rates = alternately(sides, min(3, effort.runs))
    work = f"{number} processes" if number > 1 else "1 process"
    return [
        Figure(work, "a second", rates["ours"], rate, side, remark=ours.remark())
        for side, rate in rates.items()
        if side != "ours"
    ]


def _one_name(server: LocalPostgres, effort: Effort) -> Figure:
    def one(_worker: int) -> str:
        return "the one"

    ours = Counted(partial(fleet.processes, effort.crowd, client_each(server.dsn, one), effort.seconds), wins=True)
    bare = Counted(partial(fleet.processes, effort.crowd, by_hand(server.dsn, one), effort.seconds), wins=True)
    rates = alternately({"ours": ours, "bare": bare}, min(3, effort.runs))
    work = f"{effort.crowd} processes fight for one name: grants"
    return Figure(work, "a second", rates["ours"], rates["bare"], "bare psycopg", remark=ours.remark())


def _many_names(server: LocalPostgres, effort: Effort) -> Figure:
    names, number = min(10_000, effort.many), min(16, effort.crowd)

    def any_of_them(_worker: int) -> str:
        return f"name {random.randrange(names)}"

    ours = Counted(partial(fleet.processes, number, client_each(server.dsn, any_of_them), effort.seconds))
    bare = Counted(partial(fleet.processes, number, by_hand(server.dsn, any_of_them), effort.seconds))
    rates = alternately({"ours": ours, "bare": bare}, min(3, effort.runs))
    work = f"{names:,} names over {number} processes"
    return Figure(work, "a second", rates["ours"], rates["bare"], "bare psycopg", remark=ours.remark())
