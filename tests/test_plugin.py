"""`pytest --pglease-backend=<url>`: the published suite on a store that nobody here knows."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

QUICK = "renewal_of_an_unknown or release_frees_at_once or refused_to_others or closing_twice or ends_at_once"
"""Some of the suite: what is proved here is the way to it."""

STORE = '''
"""A store of a third party's: the memory store, found by an entry point, which can be made to forget."""
from pglease.backends.memory import MemoryBackend, shared
from pglease.testing.fake_clock import FakeClock
from pglease.testing.harness import Harness

def open_store(address, knobs):
    if knobs.get("broken"):
        return Broken()
    return shared(address)

class Broken(MemoryBackend):
    def release(self, name, lease_id, budget, *, min_hold=0.0):
        from pglease.records import Released
        return Released()

class MyHarness(Harness):
    def __init__(self, url):
        print("harness of", url)
        self.clock = FakeClock()
        self.store = MemoryBackend(clock=self.clock)
    def open(self):
        return self.store.another()
    def pass_time(self, seconds):
        self.clock.advance(seconds)
    def close(self):
        self.store.close()
'''


@pytest.fixture
def elsewhere(tmp_path: Path) -> Path:
    """A directory with a test of somebody's, and a package on the path that brings `mystore://`."""
    (tmp_path / "site" / "mystore-1.0.dist-info").mkdir(parents=True)
    (tmp_path / "site" / "mystore.py").write_text(STORE)
    (tmp_path / "site" / "mystore-1.0.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: mystore\n")
    (tmp_path / "site" / "mystore-1.0.dist-info" / "entry_points.txt").write_text(
        "[pglease.backends]\nmystore = mystore:open_store\n"
    )
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "test_theirs.py").write_text("def test_of_theirs():\n    pass\n")
    return tmp_path


PYTEST = ("pytest", "-p", "no:cacheprovider", "-v")
OURS_ALONE = (*PYTEST, "-p", "pglease.testing.plugin")
"""Without the plugins of others, which take three times as long to load as all the rest."""


def run(elsewhere: Path, *arguments: str, program: tuple[str, ...] = OURS_ALONE):
    """Run pytest, or another program of ours, in that directory."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}
    kept |= {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"} if program is OURS_ALONE else {}
    return subprocess.run(
        [sys.executable, "-m", *program, *arguments],
        cwd=elsewhere / "work",
        env=kept | {"PYTHONPATH": str(elsewhere / "site")},
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )


def test_the_suite_runs_instead_of_what_would_be_collected(elsewhere: Path) -> None:
    done = run(elsewhere, "--pglease-backend=mystore://{}", "-k", QUICK, program=PYTEST)

    assert done.returncode == 0, done.stdout + done.stderr
    assert "test_a_release_frees_at_once_and_keeps_the_record PASSED" in done.stdout
    assert "test_of_theirs" not in done.stdout


def test_what_is_named_beside_it_runs_too(elsewhere: Path) -> None:
    done = run(elsewhere, "--pglease-backend=mystore://{}", "-k", "closing_twice or theirs", "test_theirs.py")

    assert done.returncode == 0, done.stdout + done.stderr
    assert "test_of_theirs PASSED" in done.stdout
    assert "test_closing_twice_is_harmless PASSED" in done.stdout


def test_without_the_option_nothing_is_different(elsewhere: Path) -> None:
    done = run(elsewhere, program=PYTEST)

    assert done.returncode == 0
    assert "1 passed" in done.stdout


def test_a_store_that_breaks_a_clause_fails(elsewhere: Path) -> None:
    done = run(elsewhere, "--pglease-backend=mystore://{}?pglease.broken=1", "-k", "release_frees_at_once")

    assert done.returncode == 1
    assert "test_a_release_frees_at_once_and_keeps_the_record FAILED" in done.stdout


def test_a_harness_of_ones_own_is_called_with_the_address(elsewhere: Path) -> None:
    named = ("--pglease-backend=mystore://shop", "--pglease-harness=mystore:MyHarness")
    done = run(elsewhere, *named, "-s", "-k", QUICK)

    assert done.returncode == 0, done.stdout + done.stderr
    assert "harness of mystore://shop" in done.stdout


@pytest.mark.parametrize("named", ["mystore:Nothing", "nothing:MyHarness", "mystore"])
def test_a_harness_that_is_not_there_says_how_one_is_named(elsewhere: Path, named: str) -> None:
    done = run(elsewhere, "--pglease-backend=mystore://{}", f"--pglease-harness={named}", "-k", "closing_twice")

    assert done.returncode != 0
    assert "mystore.testing:MyHarness" in done.stdout


def test_a_harness_without_a_store_is_wrong_usage(elsewhere: Path) -> None:
    done = run(elsewhere, "--pglease-harness=mystore:MyHarness")

    assert done.returncode == 4
    assert "goes with --pglease-backend" in done.stderr


def test_a_store_that_keeps_queues_must_be_a_new_one_each_time(elsewhere: Path) -> None:
    done = run(elsewhere, "--pglease-backend=mystore://same", "-k", "closing_twice")

    assert done.returncode == 1
    assert "write {} in its address" in done.stdout


def test_the_command_line_finds_the_store_of_another_package_too(elsewhere: Path) -> None:
    done = run(elsewhere, "check", "job", "--dsn", "mystore://shop", program=("pglease",))

    assert (done.returncode, done.stdout) == (1, "'job' is free\n")
