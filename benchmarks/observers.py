"""What observers cost: acquire + release with each of them against without any, on PostgreSQL, in batches A B A B.

Batches, since an observer works on a thread of its own: after a single call, most of its work would be done when that
is no longer timed. And a pause after each, or what is left of it would be done while another side is timed.
"""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager

from prometheus_client import CollectorRegistry

import pglease
from benchmarks.figures import Aim, Figure, Section, Spread
from benchmarks.timing import Effort
from pglease.contrib.opentelemetry import LeaseTracing
from pglease.contrib.prometheus import LeaseMetrics
from pglease.notices import REST
from pglease.testing.local_postgres import LocalPostgres

MOST = 1.05
BATCH = 200
PAUSE = 2 * REST
"""Seconds in which an observer's thread tells what is left."""


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
            time.sleep(PAUSE)
    return taken


HOW = f"""`try_acquire` and `release`, {BATCH} of each in a batch, with an observer and without any, round and round,
with a pause in between; wall time. The ratio of a run is the median of the ratios of batches that were timed next to
each other; said is the median of the runs, and the remark says the least and the most."""


def _ratios(seconds: list[float], bare: list[float], runs: int) -> list[float]:
    """Return the ratio of each run, sorted: the median of those of batches that were timed next to each other."""
    each = [one / other for one, other in zip(seconds, bare, strict=True)]
    size = max(1, len(each) // runs)
    return sorted(statistics.median(each[at : at + size]) for at in range(0, len(each) - size + 1, size))


def section(effort: Effort) -> Section:
    """Measure."""
    figures = []
    for flush in (False, True):
        with _sides(flush=flush) as sides:
            taken = _measured(sides, max(3, effort.rounds * effort.runs // BATCH))
        bare = taken.pop("nobody")
        for side, seconds in taken.items():
            ratios = _ratios(seconds, bare, effort.runs)
            both = _each(seconds), _each(bare)
            figures.append(
                Figure(
                    f"{side}; flush {'on' if flush else 'off'}",
                    "µs",
                    *both,
                    "nobody",
                    Aim(MOST),
                    exact_ratio=statistics.median(ratios),
                    remark=f"{ratios[0]:.3f}× to {ratios[-1]:.3f}×",
                )
            )
    return Section("With observers", HOW, figures)


def _each(seconds: list[float]) -> Spread:
    return Spread.of_seconds([[batch / BATCH for batch in seconds]], "µs")
