"""`python -m benchmarks`: every figure is taken side by side in one run, A B A B, on servers that it starts itself.

Each section runs in a process of its own, and its figures are kept in `benchmarks/results`; from all that are kept,
`benchmarks/RESULTS.md` and the pictures are written. So a run that is broken off has not been in vain, and a section
can be measured again alone: `python -m benchmarks on_postgres --write`.
"""

from __future__ import annotations

import argparse
import importlib
import os
import platform
import subprocess
import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.draw import drawn
from benchmarks.figures import Figure, Section, from_json, to_json
from benchmarks.timing import EFFORTS

HERE = Path(__file__).parent
RESULTS = HERE / "RESULTS.md"
KEPT = HERE / "results"
SECTIONS = (
    "on_postgres",
    "beside",
    "crowds",
    "hand_over",
    "renewals",
    "growth",
    "starting",
    "failover",
    "on_hybrid",
    "on_redis",
    "on_sqlite",
    "on_kubernetes",
    "in_memory",
    "on_a_loop",
    "observers",
)
"""In the order of their weight: whoever has little time breaks off later ones."""


def measure(name: str, effort: str) -> str:
    """Measure one section in this process; return it as text to keep."""
    begun = time.monotonic()
    section: Section = importlib.import_module(f"benchmarks.{name}").section(EFFORTS[effort])
    took = round(time.monotonic() - begun)
    return to_json(section, effort=effort, date=f"{datetime.now(UTC):%Y-%m-%d}", seconds=took, machine=machine())


def machine() -> str:
    """Return what it ran on."""
    import psycopg

    import pglease

    cores = f"{platform.machine()}, {_processor()}{os.cpu_count()} cores, {platform.system()}"
    driver = f"psycopg {psycopg.__version__} ({psycopg.pq.__impl__}, libpq {psycopg.pq.version() // 10000})"
    return f"{cores}; Python {platform.python_version()}, {driver}, pglease {pglease.__version__}, {_server()}"


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return ""
    return next((line.partition(": ")[2] + ", " for line in lines if line.startswith("model name")), "")


def _server() -> str:
    from pglease.testing.local_postgres import find_bindir

    answer = subprocess.run([find_bindir() / "postgres", "--version"], capture_output=True, text=True, check=False)
    return answer.stdout.strip().replace("postgres (PostgreSQL)", "PostgreSQL") or "PostgreSQL"


def kept() -> dict[str, tuple[Section, dict[str, Any]]]:
    """Return every section that was kept: its newest run, and of one day's runs the longest."""
    runs = [(path.name.split(".")[0], *from_json(path.read_text("utf-8"))) for path in KEPT.glob("*.json")]
    runs.sort(key=lambda run: (run[2]["date"], run[2]["seconds"]))
    newest = {name: (section, facts) for name, section, facts in runs}
    return {name: newest[name] for name in SECTIONS if name in newest}


def report(sections: dict[str, tuple[Section, dict[str, Any]]]) -> str:
    """Write all that was measured, where and how; the targets first."""
    machines = sorted({facts["machine"] for _, facts in sections.values()})
    parts = "\n".join(_part(name, section, facts) for name, (section, facts) in sections.items())
    return f"""# What pglease costs

Written by `make bench` and `make bench-full`. Both sides of each figure were taken in turn in one run on one machine:
the median of its runs, in brackets the least and the most of them. The ratio is ours through the other's. What the
figures mean, and what was tried: [performance](../docs/performance.md).

{chr(10).join(f"* {each}" for each in machines)}

## Targets

{_targets([figure for section, _ in sections.values() for figure in section.figures])}
{parts}"""


def _targets(figures: list[Figure]) -> str:
    aimed = [figure for figure in figures if figure.aim is not None]
    lines = [_target(figure) for figure in sorted(aimed, key=lambda figure: figure.kept)]
    met = sum(figure.kept for figure in aimed)
    head = "| work | beside | figure | target | |\n|---|---|---|---|---|"
    return "\n".join([f"{met} of {len(aimed)} are met; the others come first.", "", head, *lines, ""])


def _target(figure: Figure) -> str:
    assert figure.aim is not None
    shown = f"{figure.ratio:.2f}×" if figure.aim.of == "ratio" else f"{figure.ours.shown()} {figure.unit}".strip()
    verdict = "met" if figure.kept else "**not met**"
    return f"| {figure.work} | {figure.beside} | {shown} | {figure.aim.shown()} | {verdict} |"


def _part(name: str, section: Section, facts: dict[str, Any]) -> str:
    picture = f"![ratios](results/{name}.svg)\n\n" if _drawable(section) else ""
    command = f"python -m benchmarks {name} --effort {facts['effort']}"
    how = f"Measured on {facts['date']} in {facts['seconds']} s by `{command}`."
    return f"## {section.title}\n\n{section.how} {how}\n\n{picture}{section.table()}\n"


def _drawable(section: Section) -> bool:
    return any(figure.ratio for figure in section.figures)


def write() -> None:
    """Write RESULTS.md and the pictures from what is kept."""
    sections = kept()
    RESULTS.write_text(report(sections), encoding="utf-8")
    for name, (section, _) in sections.items():
        if _drawable(section):
            about = (
                "ours through the other's; for rates more is better, else less; blue: the aim; green: kept, or ahead"
            )
            (KEPT / f"{name}.svg").write_text(drawn(section.title, section.figures, about=about), encoding="utf-8")


def main(arguments: list[str]) -> int:
    """Measure section after section; 1 when one failed. A target that is not met is said in the results."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("sections", nargs="*", choices=[*SECTIONS, []], help="which; all by default", metavar="SECTION")
    parser.add_argument("--effort", choices=EFFORTS, default="bench", help="how much is done (default bench)")
    parser.add_argument("--write", action="store_true", help="keep the figures; write RESULTS.md and the pictures")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="begin no section after so many (no limit)")
    parser.add_argument("--alone", action="store_true", help="measure in this process, and print what would be kept")
    parser.add_argument("--install", action="store_true", help="only install the other libraries")
    asked = parser.parse_args(arguments)
    if asked.install:
        return _install()
    if asked.alone:
        sys.stdout.write(measure(asked.sections[0], asked.effort))
        return 0
    failed, until = False, time.monotonic() + 60 * asked.minutes
    for name in asked.sections or SECTIONS:
        if time.monotonic() > until:
            sys.stderr.write(f"{name}: left as it was, for want of time\n")
            continue
        text = _measured_apart(name, asked.effort)
        if text is None:
            failed = True
            continue
        sys.stdout.write(_part(name, *from_json(text)) + "\n")
        sys.stdout.flush()
        if asked.write:
            KEPT.mkdir(exist_ok=True)
            (KEPT / f"{name}.{asked.effort}.json").write_text(text, encoding="utf-8")
            write()
    return int(failed)


def _measured_apart(name: str, effort: str) -> str | None:
    command = [sys.executable, "-m", "benchmarks", name, "--effort", effort, "--alone"]
    patience = EFFORTS[effort].patience
    try:
        answer = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False, timeout=patience)
    except subprocess.TimeoutExpired:
        sys.stderr.write(f"{name}: given up after {patience:.0f} s\n")
        return None
    if answer.returncode:
        sys.stderr.write(f"{name}: failed with {answer.returncode}\n")
        return None
    return answer.stdout


def _install() -> int:
    from benchmarks import peers

    found, missing = peers.installed((*peers.ALL, peers.OURS_ASYNC_NEWEST))
    for peer in found:
        sys.stdout.write(f"{peer.store}: {peer.versioned}\n")
    for line in missing:
        sys.stdout.write(f"not measured: {line}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
