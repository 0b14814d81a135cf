"""Measures calls side by side: one of each, round and round, so that what disturbs the machine disturbs all of them."""

from __future__ import annotations

import asyncio
import gc
import statistics
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Timing:
    """How long one kind of call took, in microseconds: the median, and the medians of the runs as spread."""

    median: float
    least: float
    most: float

    @classmethod
    def of(cls, runs: list[list[float]]) -> Timing:
        """Summarise the seconds of several runs."""
        medians = [statistics.median(run) * 1e6 for run in runs]
        return cls(statistics.median(medians), min(medians), max(medians))


@contextmanager
def looping() -> Iterator[Callable[[Coroutine[Any, Any, object]], object]]:
    """Yield what runs a coroutine on one event loop, again and again."""
    loop = asyncio.new_event_loop()
    try:
        yield loop.run_until_complete
    finally:
        loop.close()


def _nothing() -> None:
    """Nothing."""


def side_by_side(
    calls: Mapping[str, Callable[[], object]],
    *,
    rounds: int,
    runs: int,
    before: Mapping[str, Callable[[], object]] | None = None,
) -> dict[str, Timing]:
    """Time each of `calls`, `rounds` times in each of `runs` runs, in turn: A B A B; what is its own `before`, untimed.

    What was done last is still warm in the processor's caches, and so is the server's process that did it; so nothing
    of another call may come between what prepares a call and the call.
    """
    before = before or {}
    for name, call in calls.items():
        for _ in range(50):  # connections, prepared statements, caches
            before.get(name, _nothing)()
            call()
    taken: dict[str, list[list[float]]] = {name: [] for name in calls}
    gc.collect()
    gc.disable()
    try:
        for _ in range(runs):
            for name, seconds in _run(calls, rounds, before).items():
                taken[name].append(seconds)
    finally:
        gc.enable()
    return {name: Timing.of(seconds) for name, seconds in taken.items()}


def _run(
    calls: Mapping[str, Callable[[], object]], rounds: int, before: Mapping[str, Callable[[], object]]
) -> dict[str, list[float]]:
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            before.get(name, _nothing)()
            begun = time.perf_counter()
            call()
            seconds[name].append(time.perf_counter() - begun)
    return seconds


def row(work: str, timing: Timing, bare: Timing, most: float | None) -> str:
    """Return one line of a table: both sides, their ratio, and how much it may be."""
    ratio = timing.median / bare.median
    aim = "" if most is None else f"≤ {most}{'' if ratio <= most else ' (missed)'}"
    return f"| {work} | {_shown(timing)} | {_shown(bare)} | {ratio:.2f}× | {aim} |"


def _shown(timing: Timing) -> str:
    return f"{timing.median:.0f} ({timing.least:.0f} to {timing.most:.0f})"
