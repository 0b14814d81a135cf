"""What has no time in the suite: `make stress`. Seeds, kill list, models, runs under faults, tests marked `long`.

With `--write` the figures of the run go into docs/proof.md, so that the page never says more than was seen.
"""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path

from tests.jepsen import run as runs
from tests.jepsen.worlds import WORLDS
from tests.models.check import CONFIGURATIONS, check
from tests.simulation import runner
from tests.simulation.mutants import KILL_LIST, PATIENCE

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "proof.md"
SEEDS = 20_000
ALL_SEEDS = 200_000
RUN_SECONDS = 20.0
"""For how long each world is broken."""
LONG_WITHIN_BOUNDS = (
    "tests/redis/test_replicas.py",
    "tests/fencing/test_interleavings.py",
    "tests/postgres/test_schema.py",
    "tests/faults",
)
"""Whose long tests the bounded form runs; the models are checked apart."""
BEGIN, END = "<!-- figures of {}: begin -->", "<!-- figures of {}: end -->"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.stress", description=__doc__)
    parser.add_argument("--whole", action="store_true", help="everything: ten times the seeds, every long test")
    parser.add_argument("--seeds", type=int, help=f"how many; default {SEEDS}, with --whole {ALL_SEEDS}")
    parser.add_argument("--run-seed", type=int, help="of the runs under faults; default: the day's number")
    parser.add_argument("--only", choices=list(PARTS), help="one part of it")
    parser.add_argument("--without", choices=list(PARTS), help="all but one part of it")
    parser.add_argument("--write", action="store_true", help="put the figures into docs/proof.md")
    chosen = parser.parse_args()
    failed = []
    for name, part in PARTS.items():
        if chosen.only in {None, name} and name != chosen.without:
            began = time.perf_counter()
            fine, figures = part(chosen)
            print(
                f"\n-- {name}: {'fine' if fine else 'FAILED'}, {time.perf_counter() - began:.0f} s\n{figures}",
                flush=True,
            )
            if not fine:
                failed.append(name)
            elif chosen.write and figures:
                write(name, figures)
    return bool(failed)


def simulation(chosen: argparse.Namespace) -> tuple[bool, str]:
    """Run the seeds."""
    seeds = chosen.seeds or (ALL_SEEDS if chosen.whole else SEEDS)
    began = time.perf_counter()
    tally = runner.run(range(seeds), runner.cores())
    if tally.failures:
        return False, tally.complaint()
    counts, losses, faults = tally.counts, 0, 0
    for what, count in counts.items():
        losses += count if what.startswith("lost: ") else 0
        faults += count if what.startswith("fault: ") else 0
    calls = sum(count for what, count in counts.items() if what.startswith("call: "))
    kinds = ", ".join(
        f"{count:,} {what.removeprefix('fault: ')}"
        for what, count in sorted(counts.items())
        if what.startswith("fault: ")
    )
    return True, (
        f"Seeds 0 to {seeds - 1:,} on {today()}: {tally.seconds:,.0f} simulated seconds in "
        f"{time.perf_counter() - began:,.0f} s; {calls:,} requests applied by the server, {counts['grants']:,} grants, "
        f"{counts['renewals']:,} confirmed renewals, {losses:,} losses.\n"
        f"Faults at a chosen moment: {faults:,} ({kinds}); lost, late and doubled messages, locked rows and stalled "
        "threads are not counted.\n"
        "Violations: 0."
    )


def kill_list(_: argparse.Namespace) -> tuple[bool, str]:
    """Have every mistake noticed."""
    found = runner.hunt_all([mutant.name for mutant in KILL_LIST], runner.cores())
    lines = ["| mistake | what is wrong | noticed at seed | by the rule |", "|---|---|---|---|"]
    for mutant in KILL_LIST:
        where = found[mutant.name]
        seed, rule = (str(where[0]), where[1].partition(":")[0]) if where else (f"not in {PATIENCE}", "")
        lines.append(f"| {mutant.name} | {mutant.mistake} | {seed} | {rule} |")
    return all(found.values()), "\n".join(lines)


def models(_: argparse.Namespace) -> tuple[bool, str]:
    """Have Spin explore every configuration."""
    if not (shutil.which("spin") and shutil.which("gcc")):
        required = os.environ.get("PGLEASE_REQUIRE_ALL") == "1"
        return not required, "" if not required else "this machine lacks spin: apt-get install spin gcc"
    lines, fine = ["| model | says | states | answer |", "|---|---|---|---|"], True
    for one in CONFIGURATIONS:
        found = check(one)
        fine = fine and found.errors == one.errors
        answer = "holds" if not found.errors else "a way is found"
        if found.errors != one.errors:
            answer += ", UNEXPECTED"
        lines.append(f"| `{one}` | {one.says} | {found.states:,} | {answer} |")
    return fine, "\n".join(lines)


def long_tests(chosen: argparse.Namespace) -> tuple[bool, str]:
    """Run tests that are marked `long`."""
    where = ["tests"] if chosen.whole else list(LONG_WITHIN_BOUNDS)
    options = ["-n", "2", "--dist", "loadgroup", "-m", "long", "--timeout", "900", "--durations", "8"]
    command = [sys.executable, "-m", "pytest", *options]
    done = subprocess.run([*command, "--ignore", "tests/test_models.py", *where], cwd=ROOT, check=False)
    return done.returncode == 0, ""


def under_faults(chosen: argparse.Namespace) -> tuple[bool, str]:
    """Run processes under nemeses, two worlds at a time: they wait more than they work."""
    seconds = RUN_SECONDS * (10 if chosen.whole else 1)
    seed = chosen.run_seed if chosen.run_seed is not None else datetime.now(UTC).toordinal()
    with ThreadPoolExecutor(2) as pool:
        reports = list(pool.map(lambda world: runs.run(world, seed, seconds), WORLDS))
    if not all(report.fine for report in reports):
        # On a machine that is busy with other things, what is timed may fail for its sake; exclusion may not.
        excused = not (chosen.whole or chosen.write) and all(report.safe for report in reports)
        return excused, "\n\n".join(report.complaint() for report in reports if not report.fine)
    return True, runs.table(reports, today())


PARTS: dict[str, Callable[[argparse.Namespace], tuple[bool, str]]] = {
    "kill-list": kill_list,
    "models": models,
    "simulation": simulation,
    "runs": under_faults,
    "long-tests": long_tests,
}


def write(name: str, figures: str) -> None:
    """Replace one part's figures in the page."""
    begin, end = BEGIN.format(name), END.format(name)
    before, _, rest = PAGE.read_text("utf-8").partition(begin)
    _, _, after = rest.partition(end)
    PAGE.write_text(f"{before}{begin}\n{figures}\n{end}{after}", "utf-8")


def today() -> str:
    """Return when and where this was run."""
    return f"{datetime.now(UTC):%Y-%m-%d} (CPython {platform.python_version()}, {runner.cores()} cores)"


if __name__ == "__main__":
    sys.exit(main())
