"""A short ttl with a lazy heartbeat, and processes that are stopped in the middle of everything."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable

import pytest

from pglease import PGLease
from tests.attacks.world import Child, eventually, sql

HOLDER = """
    import os, sys, threading, time
    from pglease import PGLease

    told = threading.Event()
    leases = PGLease(os.environ["PGLEASE_URL"], owner_id="sleeper", on_lease_lost=lambda name: told.set())
    leases.try_acquire("job", ttl=1.5)
    lease = leases.held("job")
    print("working")
    worked = time.monotonic()
    while lease.held:
        worked = time.monotonic()
        time.sleep(0.005)
    noticed = time.monotonic()
    lease.lost.wait(10)
    print(lease.loss.reason, told.wait(5), time.monotonic() - noticed < 1.0)
    print(leases.release("job"), leases.holding())
    leases.close()
"""

WATCHED = "SELECT owner_id, heartbeat_at, expires_at FROM pglease_leases WHERE task_name = 'job'"


@pytest.mark.parametrize(("ttl", "interval"), [(1, 10), (1.5, 1.5), (1, 0.1)])
def test_a_lease_is_renewed_three_times_a_ttl_whatever_the_heartbeat_interval_says(
    client: Callable[..., PGLease], rival: PGLease, ttl: float, interval: float
) -> None:
    lost: list[str] = []
    leases = client(heartbeat_interval=interval, on_lease_lost=lost.append)
    assert leases.try_acquire("job", ttl=ttl)

    until = time.monotonic() + 3 * ttl
    while time.monotonic() < until:
        assert not rival.try_acquire("job", ttl=ttl)
        time.sleep(0.01)

    assert leases.held("job") is not None
    assert lost == []


def test_a_process_that_slept_past_its_ttl_stops_before_it_does_anything_and_leaves_the_next_holder_alone(
    child: Callable[..., Child], rival: PGLease
) -> None:
    sleeper = child(HOLDER)
    assert sleeper.line() == "working"
    sleeper.signal(signal.SIGSTOP)
    taken = rival.wait_for_lease("job", ttl=30, timeout=20, poll_interval=0.2)

    sleeper.signal(signal.SIGCONT)

    reason, told, at_once = sleeper.line().split()
    assert reason in {"expired", "taken", "unreachable"}
    assert (told, at_once) == ("True", "True")
    assert sleeper.rest(logged="the lease 'job' was lost") == ["False []"]
    assert taken.ensure(15)
    assert taken.fencing_token == 2


def test_a_process_that_slept_past_its_ttl_does_not_revive_its_lease_though_nobody_took_it(
    dsn: str, child: Callable[..., Child], rival: PGLease
) -> None:
    sleeper = child(HOLDER)
    assert sleeper.line() == "working"
    sleeper.signal(signal.SIGSTOP)
    eventually(lambda: sql(dsn, "SELECT 1 FROM pglease_leases WHERE expires_at < clock_timestamp() - interval '0.3 s'"))
    before = sql(dsn, WATCHED)

    sleeper.signal(signal.SIGCONT)

    assert sleeper.line().split()[1:] == ["True", "True"]
    assert sleeper.rest(logged="the lease 'job' was lost") == ["False []"]
    assert sql(dsn, WATCHED) == before
    assert rival.try_acquire("job", ttl=30)


def test_a_pause_shorter_than_the_ttl_costs_nothing(child: Callable[..., Child], rival: PGLease) -> None:
    script = HOLDER.replace("ttl=1.5", "ttl=6").replace(
        "while lease.held:", "while lease.held and sys.stdin.readline():"
    )
    sleeper = child(script + '\n    print("never")')
    assert sleeper.line() == "working"
    sleeper.signal(signal.SIGSTOP)
    time.sleep(1.0)

    sleeper.signal(signal.SIGCONT)

    for _ in range(20):
        sleeper.say("still there?")
        assert not rival.try_acquire("job")
        time.sleep(0.1)
    record = rival.get_lease("job")
    assert record is not None
    assert record.time_remaining() > 3
