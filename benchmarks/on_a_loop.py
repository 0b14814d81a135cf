"""How long a lease takes from one task to the next on PostgreSQL: from the return of a release to the grant."""

from __future__ import annotations

import asyncio
import statistics
from contextlib import AsyncExitStack
from time import perf_counter

import pglease
from pglease.testing.local_postgres import LocalPostgres

MEDIAN, WORST = 0.003, 0.1
"""Seconds: the median, and 99 of 100."""


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


def section(rounds: int) -> tuple[str, bool]:
    """Measure; return a section of RESULTS.md, and whether every aim was kept."""
    with LocalPostgres() as server:
        took = {waiters: sorted(asyncio.run(_hand_overs(server.dsn, waiters, rounds))) for waiters in (2, 20)}
    figures = {waiters: (statistics.median(all_), all_[int(0.99 * len(all_))]) for waiters, all_ in took.items()}
    lines = "\n".join(f"| {waiters} | {m * 1e3:.1f} | {w * 1e3:.1f} |" for waiters, (m, w) in figures.items())
    text = f"""
## From task to task

Milliseconds from the return of a release to the next holder's grant; tasks of one loop, each with a client of its own
on PostgreSQL. The aim is a median of {MEDIAN * 1e3:.0f} and {WORST * 1e3:.0f} for 99 of 100.

| tasks | median | p99 |
|---|---|---|
{lines}
"""
    return text, all(median <= MEDIAN and worst <= WORST for median, worst in figures.values())
