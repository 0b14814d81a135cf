"""Gunicorn workers with a scheduler each: every tick is run once, also when the worker that runs them is killed."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from pglease.testing import processes
from tests.support.worlds import execute, wait_until

ROOT = Path(__file__).resolve().parents[3]
TICK = 0.5


@pytest.fixture
def gunicorn() -> Iterator[Callable[..., subprocess.Popen[bytes]]]:
    """Start gunicorn with a file of settings; it is gone at the end, and its workers with it."""
    running: list[subprocess.Popen[bytes]] = []

    def start(settings: str, **variables: str) -> subprocess.Popen[bytes]:
        running.append(
            subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "gunicorn",
                    "--config",
                    settings,
                    "--bind",
                    f"127.0.0.1:{processes.free_port()}",
                ],
                cwd=ROOT,
                env={**os.environ, "PYTHONPATH": str(ROOT), **variables},
                stdout=subprocess.PIPE,
                start_new_session=True,
            )
        )
        return running[-1]

    yield start
    for process in running:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def runs(dsn: str) -> list[tuple[float, int]]:
    """Which ticks were run, and by which worker."""
    return [
        (float(at), pid) for at, pid in execute(dsn, "SELECT extract(epoch FROM tick), pid FROM runs ORDER BY tick")
    ]


def next_tick(dsn: str) -> float | None:
    """When the job is due next; None when it is over."""
    due = execute(dsn, "SELECT next_run_time FROM apscheduler_jobs")
    return due[0][0] if due else None


def kill_in_the_middle(dsn: str, ticks: int) -> int:
    """Kill the worker that runs the jobs, between two ticks: in the middle of one nobody can say whether it was run."""

    def killed() -> int | None:
        done = runs(dsn)
        if len(done) < ticks // 3:
            return None
        assert next_tick(dsn) is not None, "all ticks were run at once: the workers were too late"
        start, leader = done[0][0], done[-1][1]
        os.kill(leader, signal.SIGSTOP)
        due = next_tick(dsn)
        if due is not None and len(runs(dsn)) == round((due - start) / TICK):
            os.kill(leader, signal.SIGKILL)
            return leader
        os.kill(leader, signal.SIGCONT)
        return None

    return wait_until(killed, 120, 0.05)


def every_tick_is_run_once(gunicorn: Any, dsn: str, url: str, *, workers: int, ticks: int, ttl: float) -> None:
    execute(dsn, "CREATE TABLE runs (tick timestamptz, pid int)")
    gunicorn(
        "tests/contrib/apscheduler/ticking.py",
        DATABASE_URL=dsn,
        PGLEASE_URL=url,
        TICKS=str(ticks),
        WORKERS=str(workers),
        TTL=str(ttl),
    )
    wait_until(lambda: execute(dsn, "SELECT to_regclass('apscheduler_jobs')") != [(None,)] and runs(dsn), 120)

    killed = kill_in_the_middle(dsn, ticks)

    wait_until(lambda: len(runs(dsn)) >= ticks and next_tick(dsn) is None, 120, 0.05)
    done = runs(dsn)
    assert [at for at, _ in done] == [done[0][0] + TICK * number for number in range(ticks)]
    by = Counter(pid for _, pid in done)
    assert len(by) == 2
    assert ticks // 3 <= by[killed] < ticks


def test_of_two_gunicorn_workers_the_one_that_runs_the_jobs_is_killed_and_every_tick_is_run_once(
    gunicorn: Any, dsn: str
) -> None:
    every_tick_is_run_once(gunicorn, dsn, f"hybrid+{dsn}", workers=2, ticks=12, ttl=15)


@pytest.mark.long
def test_4_gunicorn_workers_20_ticks_20_runs_with_one_killed_in_the_middle(gunicorn: Any, dsn: str) -> None:
    """A lapsed lease: the ticks of the gap are run late, by the next leader, and once."""
    every_tick_is_run_once(gunicorn, dsn, dsn, workers=4, ticks=20, ttl=5)


def test_the_examples_jobs_run_in_one_worker_and_when_that_one_ends_in_another(gunicorn: Any, dsn: str) -> None:
    server = gunicorn("examples/apscheduler_gunicorn.py", DATABASE_URL=dsn, WEB_CONCURRENCY="2")

    def reporter() -> int:
        line = server.stdout.readline().decode()
        assert line.startswith("a report by worker "), line
        return int(line.split()[-1])

    first = reporter()
    assert reporter() == first

    os.kill(first, signal.SIGTERM)

    wait_until(lambda: reporter() != first, 60)
