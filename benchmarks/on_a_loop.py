"""How long a lease takes from one task to the next on PostgreSQL: from the return of a release to the grant."""

from __future__ import annotations

import asyncio
import statistics
from contextlib import AsyncExitStack
from time import perf_counter

import pglease
from benchmarks.figures import Aim, Figure, Section, Spread, late
from benchmarks.timing import Effort
from pglease.testing.local_postgres import LocalPostgres

MEDIAN, WORST = 3.0, 100.0
"""Milliseconds: the median, and 99 of 100."""


async def _hand_overs(dsn: str, tasks: int, clients: int, rounds: int) -> list[float]:
    """Let so many tasks, spread over so many clients, take turns; return the seconds between two holds."""
    released, seconds = 0.0, []

    async def take_turns(leases: pglease.AsyncPGLease) -> None:
        nonlocal released
        while len(seconds) < rounds:
            lease = await leases.wait_for_lease("job", ttl=60, timeout=600)
            if released:
                seconds.append(perf_counter() - released)
            await asyncio.sleep(0.02)  # the next ones begin to wait meanwhile
            await lease.release()
            released = perf_counter()

    async with AsyncExitStack() as life:
        faces = [await life.enter_async_context(pglease.AsyncPGLease(dsn)) for _ in range(clients)]
        await faces[0].get_lease("job")
        await asyncio.gather(*(take_turns(faces[number % clients]) for number in range(tasks)))
    return seconds


HOW = """Milliseconds from the return of a release to the next holder's grant; tasks of one loop on PostgreSQL. They
share a client, as an application's do; besides, each has one of its own, when every release is heard by as many threads
of one interpreter."""


def section(effort: Effort) -> Section:
    """Measure."""
    figures = []
    with LocalPostgres() as server:
        crowd = min(20, effort.crowd)
        for tasks, clients in ((2, 1), (crowd, 1), (2, 2), (crowd, crowd)):
            took = [asyncio.run(_hand_overs(server.dsn, tasks, clients, effort.few * 10))]
            work = f"{tasks} tasks of {'one client' if clients == 1 else 'as many clients'}"
            for word, what, most in (("p50", statistics.median, MEDIAN), ("p99", late(0.99), WORST)):
                aim = Aim(most, "ours") if clients == 1 else None
                figures.append(Figure(f"{work}: {word}", "ms", Spread.of_seconds(took, "ms", what), aim=aim))
    return Section("From task to task", HOW, figures)
