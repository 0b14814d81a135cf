"""What observers cost: acquire + release with each of them against without any, on PostgreSQL, in batches A B A B.

Batches, since an observer works on a thread of its own: after a single call, most of its work would be done while the
other side is timed.

`python -m benchmarks.observers` measures this alone.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager

from prometheus_client import CollectorRegistry

import pglease
from pglease.contrib.opentelemetry import LeaseTracing
from pglease.contrib.prometheus import LeaseMetrics
from pglease.testing.local_postgres import LocalPostgres

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


def section(rounds: int, runs: int) -> tuple[str, bool]:
    """Measure; return a section of RESULTS.md, and whether every aim was kept."""
    lines, kept = [], True
    for flush in (False, True):
        with _sides(flush=flush) as sides:
            taken = _measured(sides, max(60, rounds * runs // BATCH // 4))
        bare = taken.pop("nobody")
        for side, seconds in taken.items():
            ratio = statistics.median(one / other for one, other in zip(seconds, bare, strict=True))
            kept = kept and ratio <= MOST
            missed = "" if ratio <= MOST else " (missed)"
            word = "on" if flush else "off"
            lines.append(f"| {side} | {word} | {_each(seconds)} | {_each(bare)} | {ratio:.3f}× | ≤ {MOST}{missed} |")
    table = "\n".join(lines)
    text = f"""
## With observers

`try_acquire` and `release`, {BATCH} of each in a batch, with an observer and without any, round and round. The ratio is
the median of the ratios of batches that were timed next to each other.

| observer | WAL flush | with, µs | without, µs | ratio | aim |
|---|---|---|---|---|---|
{table}
"""
    return text, kept


def _each(seconds: list[float]) -> str:
    return f"{statistics.median(seconds) / BATCH * 1e6:.0f}"


if __name__ == "__main__":
    found, good = section(3000, 5)
    sys.stdout.write(found)
    sys.exit(0 if good else 1)
