"""Runs many seeds, in processes of their own; and the kill list."""

from __future__ import annotations

import gc
import hashlib
import multiprocessing
import os
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from tests.simulation.mutants import KILL_LIST, PATIENCE, Mutant
from tests.simulation.world import Outcome, Stage, simulate

CHUNK = 100
REPLAY = "python -m tests.simulation --seeds {seed} --trace"


@dataclass
class Tally:
    """What a stretch of seeds came to."""

    seeds: int = 0
    seconds: float = 0.0
    counts: Counter[str] = field(default_factory=Counter)
    failures: list[tuple[int, list[str]]] = field(default_factory=list)

    def add(self, outcome: Outcome) -> None:
        """Count one seed."""
        self.seeds += 1
        self.seconds += outcome.seconds
        self.counts.update(outcome.counts)
        if outcome.violations:
            self.failures.append((outcome.seed, outcome.violations))

    def join(self, other: Tally) -> None:
        """Count another stretch."""
        self.seeds += other.seeds
        self.seconds += other.seconds
        self.counts.update(other.counts)
        self.failures.extend(other.failures)

    def complaint(self) -> str:
        """Say what failed, and how to see it again."""
        return "\n".join(
            f"seed {seed}: {violations[0]}" + (f" (and {len(violations) - 1} more)" if violations[1:] else "")
            + f"\n    replay: {REPLAY.format(seed=seed)}"
            for seed, violations in sorted(self.failures)
        )  # fmt: skip


@contextmanager
def quietly() -> Iterator[None]:
    """Keep the garbage collector from choosing its own moments: a finalizer acts, and a replay must act alike."""
    gc.disable()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ResourceWarning)  # processes that crash drop what they hold
            yield
    finally:
        gc.enable()


def run_chunk(seeds: range) -> Tally:
    """Run a stretch of seeds in this process."""
    tally = Tally()
    with quietly(), Stage() as stage:
        for seed in seeds:
            tally.add(simulate(stage, seed))
            if seed % 25 == 24:
                gc.collect()
    return tally


def run(seeds: range, workers: int) -> Tally:
    """Run seeds in so many processes."""
    chunks = [seeds[at : at + CHUNK] for at in range(0, len(seeds), CHUNK)]
    tally = Tally()
    if workers == 1:
        for chunk in chunks:
            tally.join(run_chunk(chunk))
        return tally
    with multiprocessing.get_context("spawn").Pool(workers) as pool:
        for part in pool.imap_unordered(run_chunk, chunks):
            tally.join(part)
    return tally


def hunt(mutant: Mutant, patience: int = PATIENCE) -> tuple[int, str] | None:
    """Return the first seed that notices a mistake, and what it notices; None if none does."""
    with quietly(), Stage() as stage:
        mutant.make(stage)
        for seed in range(patience):
            if violations := simulate(stage, seed).violations:
                return seed, violations[0]
            if seed % 25 == 24:
                gc.collect()
    return None


def hunt_by_name(name: str) -> tuple[str, tuple[int, str] | None]:
    """Hunt one of the list, in a process of a pool."""
    return name, hunt(next(mutant for mutant in KILL_LIST if mutant.name == name))


def hunt_all(names: list[str], workers: int) -> dict[str, tuple[int, str] | None]:
    """Hunt these of the list."""
    if workers == 1 or len(names) == 1:
        return dict(map(hunt_by_name, names))
    with multiprocessing.get_context("spawn").Pool(workers) as pool:
        found = dict(pool.imap_unordered(hunt_by_name, names))
    return {name: found[name] for name in names}


def replay(seed: int, mistake: str | None = None) -> Outcome:
    """Run one seed and keep what happened in it."""
    with quietly(), Stage() as stage:
        for mutant in KILL_LIST:
            if mutant.name == mistake:
                mutant.make(stage)
        return simulate(stage, seed, trace=True)


def digest(outcome: Outcome) -> str:
    """Return a few letters that tell one course of events from another."""
    return hashlib.sha256("\n".join(outcome.trace or []).encode()).hexdigest()[:16]


def cores() -> int:
    """Return how many processes may run at once."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
