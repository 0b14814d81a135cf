"""What it costs to build a primitive, for those who build one for each request: `python -m benchmarks.building`."""

from __future__ import annotations

import statistics
import time
import timeit
from collections.abc import Callable

from pglease import Lock, LockConfig, MemoryBackend, PGLease

RUNS, CALLS = 9, 20_000


def measure(build: Callable[[], object]) -> float:
    """Return the microseconds of CPU of one call: the median of the runs."""
    return statistics.median(timeit.repeat(build, timer=time.process_time, number=CALLS, repeat=RUNS)) / CALLS * 1e6


def main() -> None:
    """Print one line for each."""
    numbers = iter(range(10**9))
    config = LockConfig(ttl=30)
    with PGLease(MemoryBackend()) as leases:
        builds: dict[str, Callable[[], object]] = {
            'leases.lock("cart")': lambda: leases.lock("cart"),
            'leases.lock(f"order:{number}"), a new name each time': lambda: leases.lock(f"order:{next(numbers)}"),
            'Lock(leases, "cart")': lambda: Lock(leases, "cart"),
            'Lock.from_config(leases, "cart", config)': lambda: Lock.from_config(leases, "cart", config),
            'leases.semaphore("db", 3)': lambda: leases.semaphore("db", 3),
            'leases.read_write_lock("book")': lambda: leases.read_write_lock("book"),
        }
        for what, build in builds.items():
            print(f"{measure(build):6.2f} us  {what}")  # a table for people


if __name__ == "__main__":
    main()
