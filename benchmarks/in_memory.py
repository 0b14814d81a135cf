"""What a lease costs where no store has to be asked: all that is left is ours."""

from __future__ import annotations

import pglease
from benchmarks.figures import Aim, Figure, Section
from benchmarks.timing import Effort, side_by_side

MOST = 20.0
"""Microseconds."""


def section(effort: Effort) -> Section:
    """Measure; also what it costs to build a primitive, for those who build one for each request."""
    with pglease.PGLease(pglease.MemoryBackend()) as leases:

        def pair() -> None:
            leases.try_acquire("pair", ttl=60)
            leases.release("pair")

        def block() -> None:
            with leases.acquire("block", ttl=60):
                pass

        took = side_by_side(
            {
                "try_acquire + release": pair,
                "with acquire(): block": block,
                '`leases.lock("cart")`, without using it': lambda: leases.lock("cart"),
                '`leases.semaphore("db", 3)`, without using it': lambda: leases.semaphore("db", 3),
            },
            rounds=effort.rounds,
            runs=effort.runs,
        )
    figures = [
        Figure(work, "µs", spread, aim=None if "without" in work else Aim(MOST, "ours"))
        for work, spread in took.items()
    ]
    return Section("In memory", "No store has to be asked: all that is left is ours.", figures)
