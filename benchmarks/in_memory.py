"""What a lease costs where no store has to be asked: all that is left is ours."""

from __future__ import annotations

import pglease
from benchmarks.side_by_side import Timing, side_by_side

MOST = 20.0
"""Microseconds."""


def section(rounds: int, runs: int) -> tuple[str, bool]:
    """Measure; return a section of RESULTS.md, and whether every aim was kept."""
    with pglease.PGLease(pglease.MemoryBackend()) as leases:

        def pair() -> None:
            leases.try_acquire("pair", ttl=60)
            leases.release("pair")

        def block() -> None:
            with leases.acquire("block", ttl=60):
                pass

        took = side_by_side({"try_acquire + release": pair, "with acquire(): block": block}, rounds=rounds, runs=runs)
    lines = "\n".join(_line(work, timing) for work, timing in took.items())
    text = f"""
## In memory

| work | µs | aim |
|---|---|---|
{lines}
"""
    return text, all(timing.median <= MOST for timing in took.values())


def _line(work: str, timing: Timing) -> str:
    missed = "" if timing.median <= MOST else " (missed)"
    return f"| {work} | {timing.median:.1f} ({timing.least:.1f} to {timing.most:.1f}) | ≤ {MOST:.0f}{missed} |"
