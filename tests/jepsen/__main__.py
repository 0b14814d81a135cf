"""Run processes and break things: `python -m tests.jepsen --worlds plain --seconds 25 --seed 7`."""

from __future__ import annotations

import argparse
import sys
import time

from tests.jepsen import run
from tests.jepsen.mistakes import MISTAKES
from tests.jepsen.worlds import WORLDS


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.jepsen", description=__doc__)
    parser.add_argument("--worlds", nargs="+", choices=list(WORLDS), default=list(WORLDS))
    parser.add_argument("--seconds", type=float, default=25.0, help="for how long things are broken; default 25")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--mistake", choices=list(MISTAKES), default="", help="put one into the library")
    parser.add_argument("--calm", action="store_true", help="break nothing")
    chosen = parser.parse_args()
    failed = False
    for world in chosen.worlds:
        began = time.perf_counter()
        report = run.run(world, chosen.seed, chosen.seconds, mistake=chosen.mistake, calm=chosen.calm)
        print(f"-- {world}, seed {chosen.seed}: {time.perf_counter() - began:.0f} s, faults {dict(report.faults)}")
        for verdict in report.verdicts:
            print(f"   {verdict.checker}: {'fine' if verdict else 'VIOLATED'} {dict(verdict.seen)}")
        if not report.fine:
            print(report.complaint())
        failed |= not report.fine
    return failed


if __name__ == "__main__":
    sys.exit(main())
