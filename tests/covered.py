"""Run the tests under coverage, of branches, in all their processes: `make coverage`.

`--write` puts the figures into docs/proof.md. Whatever else is said goes to pytest.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

from tests.stress import ROOT, today, write

AIM = 95.0
"""Per cent of branches."""


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.covered", description=__doc__)
    parser.add_argument("--report", action="store_true", help="only report what the last run has left")
    parser.add_argument("--write", action="store_true", help="put the figures into docs/proof.md")
    chosen, for_pytest = parser.parse_known_args()
    red = False
    if not chosen.report:
        coverage("erase")
        red = bool(coverage("run", "-m", "pytest", *for_pytest))
        coverage("combine", "--quiet")
    coverage("report")
    found = ROOT / ".venv" / ".cache" / "coverage" / "report.json"
    coverage("json", "--quiet", "-o", str(found))
    share, figures = table(json.loads(found.read_text("utf-8")))
    print(figures)
    if chosen.write and share >= AIM:
        write("coverage", f"On {today()}{', with tests that were red' if red else ''}.\n\n{figures}")
    return red or share < AIM


def coverage(*arguments: str) -> int:
    """Run the tool; of its tracers the one that knows branches on every version of Python."""
    environment = {**os.environ, "COVERAGE_CORE": "ctrace"}
    return subprocess.run(
        [sys.executable, "-m", "coverage", *arguments], cwd=ROOT, env=environment, check=False
    ).returncode


def table(report: dict[str, Any]) -> tuple[float, str]:
    """Return which share of all branches was taken, and the figures of each package."""
    sums: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for name, of_file in report["files"].items():
        package = ".".join(Path(name).parts[:-1])
        counted = {what: of_file["summary"][what] for what in MEASURES}
        sums[package].update(counted)
        sums["all"].update(counted)
    lines = ["| package | branches | taken | statements | run |", "|---|---|---|---|---|"]
    for package, of_package in sorted(sums.items(), key=lambda item: (item[0] == "all", item[0])):
        branches, taken, statements, run = (of_package[what] for what in MEASURES)
        lines.append(
            f"| {package if package == 'all' else f'`{package}`'} | {branches:,} | {percent(taken, branches):.1f} % "
            f"| {statements:,} | {percent(run, statements):.1f} % |"
        )
    return percent(sums["all"]["covered_branches"], sums["all"]["num_branches"]), "\n".join(lines)


MEASURES = ("num_branches", "covered_branches", "num_statements", "covered_lines")


def percent(part: int, whole: int) -> float:
    return 100.0 * part / whole if whole else 100.0


if __name__ == "__main__":
    sys.exit(main())
