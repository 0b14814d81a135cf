"""How long a lease takes from one task to the next on PostgreSQL: from the return of a release to the grant."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from time import perf_counter

import pglease
from benchmarks.figures import Aim, Figure, Section, Spread, late
from benchmarks.timing import Effort
from pglease.testing.local_postgres import LocalPostgres

MEDIAN, WORST = 3.0, 100.0
"""Milliseconds: the median, and 99 of 100."""


async def _hand_overs(dsn: str, waiters: int, rounds: int) -> list[float]:
    """Let so many tasks, each with a client of its own, take turns; return the seconds between two holds."""
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
        clients = [await life.enter_async_context(pglease.AsyncPGLease(dsn)) for _ in range(waiters)]
        await clients[0].get_lease("job")
        await asyncio.gather(*(take_turns(leases) for leases in clients))
    return seconds


HOW = """Milliseconds from the return of a release to the next holder's grant; tasks of one loop, each with a client of
its own on PostgreSQL."""


def section(effort: Effort) -> Section:
    """Measure."""
    figures = []
    with LocalPostgres() as server:
        for waiters in (2, min(20, effort.crowd)):
            took = [asyncio.run(_hand_overs(server.dsn, waiters, effort.few * 10))]
            work = f"{waiters} tasks"
            figures += [
                Figure(f"{work}: p50", "ms", Spread.of_seconds(took, "ms"), aim=Aim(MEDIAN, "ours")),
                Figure(f"{work}: p99", "ms", Spread.of_seconds(took, "ms", late(0.99)), aim=Aim(WORST, "ours")),
            ]
    return Section("From task to task", HOW, figures)
