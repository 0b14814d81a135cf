"""The real client in simulated time: `tests/simulation`. Many more seeds, and the whole kill list, in `make stress`."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def simulate(*arguments: str, hash_seed: str = "0") -> subprocess.CompletedProcess[str]:
    """Run it in an interpreter of its own: it puts stand-ins under the library's modules."""
    command = [sys.executable, "-m", "tests.simulation", *arguments]
    environment = {**os.environ, "PYTHONHASHSEED": hash_seed}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=110, check=False)


def test_no_seed_breaks_a_promise() -> None:
    done = simulate("--seeds", "0-149", "--workers", "1")

    assert done.returncode == 0, done.stdout + done.stderr
    assert "no violation" in done.stdout
    assert "150 seeds" in done.stdout


@pytest.mark.parametrize("mistake", ["response-anchor", "loop-dies"])
def test_a_mistake_is_noticed_and_the_seed_that_notices_it_can_be_replayed(mistake: str) -> None:
    found = simulate("--kill-list", "--mutant", mistake)
    seed = re.search(r"seed +(\d+)", found.stdout)

    assert seed, found.stdout + found.stderr
    again = simulate("--seeds", seed[1], "--trace", "--mutant", mistake)
    assert again.returncode == 1
    assert "VIOLATION" in again.stdout


def test_a_seed_always_takes_the_same_course() -> None:
    courses = {simulate("--seeds", "8", "--trace", hash_seed=salt).stdout.splitlines()[-2] for salt in ("1", "2")}

    assert len(courses) == 1
    assert courses.pop().startswith("course of events: ")
