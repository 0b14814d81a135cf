"""Simulate: `python -m tests.simulation --seeds 0-999`. A seed that fails says how to see it again."""

from __future__ import annotations

import argparse
import sys
import time

from tests.simulation import runner
from tests.simulation.mutants import KILL_LIST


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    parser.add_argument("--seeds", default="0-299", help="which: 17, or 0-19999")
    parser.add_argument("--workers", type=int, default=runner.cores(), help="how many processes; default: one a core")
    parser.add_argument("--trace", action="store_true", help="tell what happens in one seed, step by step")
    parser.add_argument("--mutant", choices=[mutant.name for mutant in KILL_LIST], help="with this mistake")
    parser.add_argument("--kill-list", action="store_true", help="see each mistake of the list noticed")
    chosen = parser.parse_args()
    if chosen.mutant and not (chosen.trace or chosen.kill_list):
        parser.error("--mutant needs --trace, to see it in one seed, or --kill-list, to see it noticed")
    if chosen.kill_list:
        return kill_list([chosen.mutant] if chosen.mutant else [mutant.name for mutant in KILL_LIST], chosen.workers)
    first, _, last = chosen.seeds.partition("-")
    if chosen.trace:
        return trace(int(first), chosen.mutant)
    return seeds(range(int(first), int(last or first) + 1), chosen.workers)


def seeds(wanted: range, workers: int) -> int:
    began = time.perf_counter()
    tally = runner.run(wanted, workers)
    took = time.perf_counter() - began
    print(f"{tally.seeds} seeds, {tally.seconds:,.0f} simulated seconds in {took:.0f} s")
    for what, count in sorted(tally.counts.items()):
        print(f"{count:>12,}  {what}")
    print(tally.complaint() or "no violation")
    return bool(tally.failures)


def trace(seed: int, mistake: str | None) -> int:
    outcome = runner.replay(seed, mistake)
    print("\n".join(outcome.trace or []))
    print(f"course of events: {runner.digest(outcome)}")
    print("\n".join(outcome.violations) or "no violation")
    return bool(outcome.violations)


def kill_list(names: list[str], workers: int) -> int:
    found = runner.hunt_all(names, workers)
    for name, seed in found.items():
        print(f"{name:22} " + (f"seed {seed[0]:3}: {seed[1]}" if seed else "SURVIVES"))
    return not all(found.values())


if __name__ == "__main__":
    sys.exit(main())
