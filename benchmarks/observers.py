"""What observers cost: acquire + release with each of them against without any, on PostgreSQL, in batches A B A B.

Batches, since an observer works on a thread of its own: after a single call, most of its work would be done while the
other side is timed.

`python -m benchmarks.observers` measures this alone, and with `--write` writes RESULTS-observers.md.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime
from pathlib import Path

from prometheus_client import CollectorRegistry

import pglease
from pglease.contrib.opentelemetry import LeaseTracing
from pglease.contrib.prometheus import LeaseMetrics
from pglease.testing.local_postgres import LocalPostgres

RESULTS = Path(__file__).with_name("RESULTS-observers.md")
MOST = 1.05
BATCH = 10


class Everything:
    """Wants every event, and keeps the last ones."""

    def __init__(self) -> None:
        self.events: deque[pglease.Event] = deque(maxlen=1000)

    def notify(self, event: pglease.Event) -> None:
        self.events.append(event)


OBSERVERS: dict[str, Callable[[], pglease.Observer]] = {
    "an observer of everything": Everything,
    "`LeaseMetrics`": lambda: LeaseMetrics(CollectorRegistry()),
    "`LeaseTracing`, without an SDK": LeaseTracing,
}


@contextmanager
def _sides(*, flush: bool) -> Iterator[dict[str, Callable[[], None]]]:
    settings = {"synchronous_commit": "on" if flush else "off"}
    with LocalPostgres(fsync=flush, settings=settings) as server, ExitStack() as stack:
        sides = {}
        for side, make in {"nobody": None, **OBSERVERS}.items():
            observers = [] if make is None else [make()]
            client = stack.enter_context(pglease.PGLease(server.dsn, observers=observers))
            sides[side] = _batch(client, side)
        yield sides


def _batch(client: pglease.PGLease, name: str) -> Callable[[], None]:
    def pairs() -> None:
        for _ in range(BATCH):
            client.try_acquire(name, ttl=60)
            client.release(name)

    return pairs


def _measured(sides: Mapping[str, Callable[[], None]], rounds: int) -> dict[str, list[float]]:
    """Return the seconds of each side's batches; in each round all sides, each time beginning with another."""
    taken: dict[str, list[float]] = {side: [] for side in sides}
    names = list(sides)
    for call in sides.values():
        call()
    for number in range(rounds):
        turn = number % len(names)
        for side in names[turn:] + names[:turn]:
            begun = time.perf_counter()
            sides[side]()
            taken[side].append(time.perf_counter() - begun)
    return taken


def _ratios(seconds: list[float], bare: list[float], runs: int) -> list[float]:
    """Return the ratio of each run, sorted: the median of those of batches that were timed next to each other."""
    each = [one / other for one, other in zip(seconds, bare, strict=True)]
    size = max(1, len(each) // runs)
    return sorted(statistics.median(each[at : at + size]) for at in range(0, len(each) - size + 1, size))


def section(rounds: int, runs: int) -> tuple[str, bool]:
    """Measure; return a section of RESULTS.md, and whether every aim was kept."""
    lines, kept = [], True
    for flush in (False, True):
        with _sides(flush=flush) as sides:
            taken = _measured(sides, max(60, rounds * runs // BATCH // 4))
        bare = taken.pop("nobody")
        for side, seconds in taken.items():
            ratios = _ratios(seconds, bare, runs)
            ratio = statistics.median(ratios)
            kept = kept and ratio <= MOST
            missed = "" if ratio <= MOST else " (missed)"
            shown = f"{ratio:.3f}× ({ratios[0]:.3f} to {ratios[-1]:.3f})"
            word = "on" if flush else "off"
            lines.append(f"| {side} | {word} | {_each(seconds)} | {_each(bare)} | {shown} | ≤ {MOST}{missed} |")
    table = "\n".join(lines)
    text = f"""
## With observers

`try_acquire` and `release`, {BATCH} of each in a batch, with an observer and without any, round and round; wall time.
The ratio of a run is the median of the ratios of batches that were timed next to each other; what is said is the median
of {runs} runs, and in brackets the smallest and the largest.

| observer | WAL flush | with, µs | without, µs | ratio | aim |
|---|---|---|---|---|---|
{table}
"""
    return text, kept


def _each(seconds: list[float]) -> str:
    return f"{statistics.median(seconds) / BATCH * 1e6:.0f}"


def main() -> int:
    """Measure, print, and write RESULTS-observers.md if asked to; 1 when an aim was missed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.observers", description=__doc__)
    parser.add_argument("--rounds", type=int, default=3000, help="acquires of each side in a run (default 3000)")
    parser.add_argument("--runs", type=int, default=5, help="runs (default 5)")
    parser.add_argument("--write", action="store_true", help=f"write benchmarks/{RESULTS.name}")
    asked = parser.parse_args()
    found, kept = section(asked.rounds * 4, asked.runs)
    machine = f"Python {platform.python_version()}, {platform.machine()}, {os.cpu_count()} cores"
    written = f"{datetime.now(UTC):%Y-%m-%d}, {machine}. Written by `python -m benchmarks.observers --write`."
    text = f"# What observers cost\n\n{written}\n{found}"
    sys.stdout.write(text)
    if asked.write:
        RESULTS.write_text(text, encoding="utf-8")
    return 0 if kept else 1


if __name__ == "__main__":
    sys.exit(main())
