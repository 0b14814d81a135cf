"""What it takes to begin: `import pglease`, and `pglease run` around a command that does nothing."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from benchmarks.figures import Aim, Figure, Section, Spread
from benchmarks.timing import Effort, undisturbed

HOW = """Processes from their start to their end, in turn; the difference of neighbours, so that the interpreter's own
start is not counted. The interpreter has compiled everything before, as pip does at installation."""


def _taken(command: Sequence[str], environment: dict[str, str]) -> float:
    begun = time.perf_counter()
    subprocess.run(command, check=True, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return time.perf_counter() - begun


def _difference(ours: Callable[[], float], other: Callable[[], float], runs: int, rounds: int) -> Spread:
    """Return by how much ours takes longer, in milliseconds."""
    ours(), other()  # compiled, and in the page cache
    with undisturbed():
        differences = [[ours() - other() for _ in range(rounds)] for _ in range(runs)]
    return Spread.of_seconds(differences, "ms")


def section(effort: Effort) -> Section:
    """Measure."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    python, program = sys.executable, str(Path(sys.executable).with_name("pglease"))
    start = partial(_taken, environment=environment)
    with tempfile.TemporaryDirectory() as folder:
        run = [program, "run", "x", "--dsn", f"sqlite:///{folder}/leases.db", "--", "true"]
        nothing = [python, "-c", "pass"]
        commands = (
            ("`import pglease`", [python, "-c", "import pglease"], nothing, Aim(50, "ours")),
            ("`import pglease; pglease.PGLease`", [python, "-c", "import pglease; pglease.PGLease"], nothing, None),
            ("`pglease run x -- true` on SQLite", run, ["true"], Aim(250, "ours")),
            ("`pglease --version`", [program, "--version"], ["true"], None),
        )
        figures = []
        for what, ours, other, aim in commands:
            above = f"{what}, above `{' '.join(Path(word).name for word in other)}`"
            took = _difference(partial(start, ours), partial(start, other), min(3, effort.runs), effort.few)
            figures.append(Figure(above, "ms", took, aim=aim))
    return Section("To begin", HOW, figures)
