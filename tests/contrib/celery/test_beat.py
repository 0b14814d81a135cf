"""One beat at a time, with real beats: under `pglease run`, and by the leased scheduler.

Who sent a message is in it: Celery writes the sender's process id into the header `origin`.
"""

from __future__ import annotations

import json
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from celery.beat import Service

from pglease import PGLease
from pglease.contrib import celery
from pglease.testing import processes
from tests.contrib.celery.beats import Leased
from tests.support.worlds import wait_until

pytestmark = pytest.mark.xdist_group("celery")

Spawn = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def senders(broker: Any) -> Iterator[Callable[[], list[int]]]:
    """Which processes have sent ticks so far, in order."""
    broker.execute("DEL", "ticks")

    def look() -> list[int]:
        messages = [json.loads(each) for each in broker.execute("LRANGE", "ticks", 0, -1)]
        origins = [re.match(r"gen(\d+)@", each["headers"]["origin"]) for each in reversed(messages)]
        return [int(each[1]) for each in origins if each]

    yield look
    broker.execute("DEL", "ticks")


def ticks_of(senders: Callable[[], list[int]], pid: int, number: int = 2) -> None:
    wait_until(lambda: senders().count(pid) >= number, 120, 0.05)


def assert_one_after_the_other(sent: list[int], *order: int) -> None:
    """Nobody sent anything after somebody else had begun to."""
    assert [pid for at, pid in enumerate(sent) if at == 0 or sent[at - 1] != pid] == list(order)


def test_of_two_beats_under_pglease_run_one_beats_and_when_it_is_killed_the_other_goes_on(
    spawn: Spawn, senders: Callable[[], list[int]], dsn: str, tmp_path: Path
) -> None:
    def start(name: str) -> subprocess.Popen[str]:
        under = ["pglease", "run", "celery-beat", "--ttl", "6s", "--wait", "--"]
        beat = ["celery", "-A", "tests.contrib.celery.shop", "beat", "--schedule", str(tmp_path / name)]
        return spawn(*under, sys.executable, "-m", *beat, DATABASE_URL=dsn)

    def beat_of(runner: subprocess.Popen[str]) -> int:
        return wait_until(lambda: [pid for pid in processes.children_of(runner.pid) if pid in senders()], 120)[0]

    one = start("one")
    first = beat_of(one)
    other = start("other")
    ticks_of(senders, first)

    one.kill()

    second = beat_of(other)
    ticks_of(senders, second)
    assert_one_after_the_other(senders(), first, second)


def test_of_three_leased_beats_one_beats_until_it_ends_or_dies_or_loses_the_lease(
    spawn: Spawn, senders: Callable[[], list[int]], dsn: str, tmp_path: Path
) -> None:
    def start(name: str) -> subprocess.Popen[str]:
        scheduler = ["--scheduler", "tests.contrib.celery.beats:Leased", "--schedule", str(tmp_path / name)]
        return spawn("celery", "-A", "tests.contrib.celery.shop", "beat", *scheduler, DATABASE_URL=dsn)

    one = start("one")
    ticks_of(senders, one.pid)
    other = start("other")

    one.send_signal(signal.SIGTERM)
    assert one.wait(60) == 0
    ticks_of(senders, other.pid)
    third = start("third")

    other.kill()
    ticks_of(senders, third.pid)

    with PGLease(dsn) as operator:
        assert operator.force_release("celery-beat", operator.get_lease("celery-beat").fencing_token)
    assert third.wait(60) == 76
    assert_one_after_the_other(senders(), one.pid, other.pid, third.pid)


def test_a_leased_beat_that_stands_by_has_not_opened_the_schedule_and_ends_when_it_is_told_to(
    shop: Any, dsn: str, tmp_path: Path
) -> None:
    with PGLease(dsn) as leader, PGLease(dsn) as leases, pytest.MonkeyPatch.context() as patch:
        patch.setattr(Leased, "leases", leases)
        patch.setattr(celery, "LOOK", 0.1)
        assert leader.try_acquire("celery-beat")
        beat = Service(shop.app, scheduler_cls=Leased, schedule_filename=str(tmp_path / "schedule"))

        assert beat.scheduler.tick() == 0
        assert not beat.scheduler.should_sync()
        beat.sync()  # what a beat does on SIGTERM

        assert list(tmp_path.iterdir()) == []
        leader.release("celery-beat")
        wait_until(lambda: (beat.scheduler.tick(), leases.holding())[1])
        assert leader.get_lease("celery-beat").metadata["worker"] == socket.gethostname()
        beat.sync()
        beat.sync()
        assert leader.get_lease("celery-beat").given_back
        assert list(tmp_path.iterdir()) != []


def test_a_leased_beat_waits_for_a_store_that_is_away(shop: Any, proxy: Any, dsn: str, tmp_path: Path) -> None:
    with PGLease(proxy.through(dsn), connect_timeout=1) as leases, pytest.MonkeyPatch.context() as patch:
        patch.setattr(Leased, "leases", leases)
        patch.setattr(celery, "LOOK", 0.1)
        beat = Service(shop.app, scheduler_cls=Leased, schedule_filename=str(tmp_path / "schedule"))
        proxy.refuse()

        assert beat.scheduler.tick() == 0

        proxy.pass_through()
        wait_until(lambda: (beat.scheduler.tick(), leases.holding())[1])
        beat.sync()
