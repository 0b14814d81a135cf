"""Takes turns: A B A B, so that what disturbs the machine disturbs all sides alike."""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from benchmarks.figures import Spread

FEW = 20
"""Rounds of one process before it is the next one's turn."""

Run = Callable[[int], list[float]]
"""Does some work so many times; returns the seconds of each."""


@dataclass(frozen=True)
class Effort:
    """How much is done.

    Attributes:
        rounds: calls of each kind in a run; where a commit is flushed to disk, a quarter of it.
        runs: runs of each kind.
        seconds: of each measurement of a rate.
        few: repetitions of what takes a second each time.
        many: the largest number of leases and names.
        crowd: the largest number of processes.
        minutes: of the runs that show what only time shows.
        patience: seconds after which a section is given up.
    """

    rounds: int = 800
    runs: int = 5
    seconds: float = 2.0
    few: int = 10
    many: int = 10_000
    crowd: int = 64
    minutes: float = 0.5
    patience: float = 400.0


EFFORTS = {
    "smoke": Effort(rounds=8, runs=1, seconds=0.2, few=1, many=50, crowd=2, minutes=0.02),
    "bench": Effort(),
    "full": Effort(rounds=3000, runs=7, seconds=10.0, few=50, many=100_000, minutes=10.0, patience=10_800.0),
}


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
    unit: str = "µs",
) -> dict[str, Spread]:
    """Time each of `calls`, `rounds` times in each of `runs` runs, in turn; what is its own `before`, untimed.

    What was done last is still warm in the processor's caches, and so is the server's process that did it; so nothing
    of another call may come between what prepares a call and the call.
    """
    before = before or {}
    for name, call in calls.items():
        for _ in range(min(50, rounds)):  # connections, prepared statements, caches
            before.get(name, _nothing)()
            call()
    with undisturbed():
        taken = [_run(calls, rounds, before) for _ in range(runs)]
    return {name: Spread.of_seconds((run[name] for run in taken), unit) for name in calls}


@contextmanager
def undisturbed() -> Iterator[None]:
    """Keep the garbage collector away."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


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


def in_turn(sides: Mapping[str, Run], *, rounds: int, runs: int, unit: str = "µs") -> dict[str, Spread]:
    """Time each side `rounds` times in each of `runs` runs, a few rounds of each in turn."""
    for side in sides.values():
        side(min(100, rounds))
    taken: dict[str, list[list[float]]] = {name: [[] for _ in range(runs)] for name in sides}
    for run in range(runs):
        for _ in range(max(1, rounds // FEW)):
            for name, side in sides.items():
                taken[name][run] += side(min(FEW, rounds))
    return {name: Spread.of_seconds(each, unit) for name, each in taken.items()}


def alternately(sides: Mapping[str, Callable[[], float]], runs: int) -> dict[str, Spread]:
    """Take one number of each side, in each of `runs` runs; for what is measured in bulk."""
    taken: dict[str, list[float]] = {name: [] for name in sides}
    for run in range(runs):
        names = list(sides)
        for name in names[run % len(names) :] + names[: run % len(names)]:
            taken[name].append(sides[name]())
    return {name: Spread.of(numbers) for name, numbers in taken.items()}
