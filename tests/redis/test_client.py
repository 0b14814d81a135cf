"""The client on Redis: renewals, loss, crash and crowds, with no word about the kind of store."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import threading

import pytest

from pglease import AcquireTimeout, LeaseLostError, PGLease
from tests.support.worlds import Stopwatch, always, wait_until


@pytest.fixture
def leases(valkey):
    with PGLease(valkey.url, owner_id="alice") as client:
        yield client


@pytest.fixture
def rival(valkey):
    with PGLease(valkey.url, owner_id="bob") as client:
        yield client


def test_a_hold_is_kept_far_beyond_its_ttl(leases, rival):
    """The holder alone decides how long: the renewals go on while it works."""
    with leases.acquire("job", ttl=2.5) as lease:
        always(lambda: lease.held and not rival.try_acquire("job", ttl=1), 6)

    assert rival.try_acquire("job")


def test_a_holder_that_is_killed_frees_its_name_after_the_ttl(valkey, rival):
    code = """
        import sys, threading
        from pglease import PGLease
        leases = PGLease(sys.stdin.readline().strip())
        assert leases.try_acquire("job", ttl=1.5)
        print("held", flush=True)
        threading.Event().wait()
    """
    holder = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        holder.stdin.write(f"{valkey.url}\n")
        holder.stdin.flush()
        assert holder.stdout.readline() == "held\n"
        always(lambda: not rival.try_acquire("job"), 3)
    finally:
        holder.kill()
        holder.communicate()
    watch = Stopwatch()

    wait_until(lambda: rival.try_acquire("job"), 20)

    assert watch.seconds < 10
    assert rival.get_lease("job").fencing_token == 2


def test_a_server_that_dies_loses_no_lease_before_its_time_and_all_of_them_then(fresh):
    server = fresh()
    leases = PGLease(server.url)
    with pytest.raises(LeaseLostError) as caught, leases.acquire("job", ttl=3) as lease:
        server.kill()
        always(lambda: lease.held, 1)
        assert lease.lost.wait(20)
        assert not lease.held
    leases.close()

    assert caught.value.reason == "unreachable"


def test_an_outage_shorter_than_the_ttl_loses_nothing(fresh):
    server = fresh()
    with PGLease(server.url) as leases, leases.acquire("job", ttl=10) as lease:
        server.kill()
        server.start()
        renewed = leases.get_lease("job").heartbeat_at
        wait_until(lambda: leases.get_lease("job").heartbeat_at > renewed, 20)
        assert lease.held


def test_a_hold_that_was_flushed_away_is_lost_at_the_next_renewal(valkey, leases):
    with pytest.raises(LeaseLostError) as caught, leases.acquire("job", ttl=3) as lease:
        valkey.execute("FLUSHALL")
        assert lease.lost.wait(20)

    assert caught.value.reason == "deleted"


def test_a_waiter_that_waits_in_vain_says_who_has_it(leases, rival):
    leases.try_acquire("job")

    with pytest.raises(AcquireTimeout, match="alice"):
        rival.wait_for_lease("job", timeout=0.3)


def test_two_hundred_waiters_share_one_ear_and_a_few_connections_and_all_are_served(fresh):
    server, served, failed = fresh(), [], []
    with PGLease(server.url) as holder, PGLease(server.url, pool_size=3) as leases:
        holder.try_acquire("job", ttl=60)

        def wait():
            try:
                with leases.acquire("job", ttl=30, wait=90) as lease:
                    served.append(lease.fencing_token)
            except Exception as error:
                failed.append(error)

        threads = [threading.Thread(target=wait) for _ in range(200)]
        for thread in threads:
            thread.start()
        wait_until(lambda: listeners(server) == 1, 30)
        wait_until(lambda: b"marked_until" in server.execute("HKEYS", "pglease:1:{job}:lease"), 30)
        connections = server.execute("CLIENT", "LIST").decode().count("name=pglease")
        holder.release("job")
        for thread in threads:
            thread.join(100)

    assert failed == []
    assert connections <= (4 + 1) + (3 + 1 + 1)
    assert served == list(range(2, 202))


def listeners(server):
    return server.execute("CLIENT", "LIST").decode().count("sub=1")


@pytest.mark.parametrize("fair", [False, True])
def test_a_waiter_is_woken_by_the_release_and_not_by_the_clock(valkey, leases, rival, fair):
    hold = leases.wait_for_lease("job", ttl=60)
    took = []

    def wait():
        with rival.acquire("job", ttl=60, wait=60, fair=fair):
            took.append(released.seconds)

    waiting = threading.Thread(target=wait)
    waiting.start()
    wait_until(lambda: valkey.execute("HEXISTS", "pglease:1:{job}:lease", "marked_until"), 20)
    released = Stopwatch()
    hold.release()
    waiting.join(60)

    assert took[0] < 5
