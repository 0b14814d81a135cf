"""Whole lives on a cluster: a client that keeps its lease, a process that is killed, a child that is forked."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from pglease import LeaseLostError, PGLease, clock
from pglease.backends.kubernetes import KubernetesBackend
from pglease.records import Refused
from pglease.testing.harness import Worker

CHILD = """
import sys, time
from pglease import PGLease
leases = PGLease(sys.argv[1], owner_id="child")
print(leases.try_acquire("job", ttl=1.5), flush=True)
time.sleep(60)
"""


@pytest.fixture
def address(cluster) -> str:
    return f"kubernetes://jobs?pglease.kubeconfig={cluster.kubeconfig}"


def test_a_lease_is_kept_alive_and_handed_on(cluster, address) -> None:
    with PGLease(address, owner_id="alice") as alice, PGLease(address, owner_id="bob") as bob:
        with alice.acquire("job", ttl=3.0) as lease:
            until = clock.now() + 4
            while clock.now() < until:
                assert lease.held
                assert not bob.try_acquire("job")
                time.sleep(0.1)
        assert bob.wait_for_lease("job", timeout=20).fencing_token == 2


def test_a_killed_process_is_followed_after_its_ttl_and_not_before(cluster, address) -> None:
    child = subprocess.Popen([sys.executable, "-c", CHILD, address], stdout=subprocess.PIPE, text=True)
    try:
        assert child.stdout is not None
        assert child.stdout.readline().strip() == "True"
        with PGLease(address, owner_id="heir") as heir:
            assert not heir.try_acquire("job")
            child.send_signal(signal.SIGKILL)
            child.wait(10)
            killed_at = clock.now()
            lease = heir.wait_for_lease("job", timeout=30, poll_interval=0.2)

            assert lease.fencing_token == 2
            assert clock.now() - killed_at > 0.4, "its last renewal was at most a third of the ttl and a bit ago"
    finally:
        child.kill()
        child.wait(10)
        child.stdout.close()


def test_an_operator_who_ends_a_hold_is_noticed_with_the_next_renewal(cluster, address) -> None:
    lost = threading.Event()
    with (
        PGLease(address, on_lease_lost=lambda _: lost.set()) as leases,
        PGLease(address) as operator,
        pytest.raises(LeaseLostError, match="an operator ended it"),
        leases.acquire("job", ttl=1.0) as lease,
    ):
        assert operator.force_release("job", lease.fencing_token)
        assert lost.wait(20)


def test_an_outage_shorter_than_the_ttl_loses_nothing(cluster, address) -> None:
    with PGLease(address) as leases, leases.acquire("job", ttl=8.0) as lease:
        cluster.server.stop()
        time.sleep(1)
        cluster.server.start()

        lease.renew()
        assert lease.held


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_forked_child_uses_no_connection_of_its_parents(cluster, alice) -> None:
    hold = alice.hold("job")
    answers = multiprocessing.get_context("fork").SimpleQueue()

    def child() -> None:
        answers.put(isinstance(alice.ask("job"), Refused))
        answers.put(Worker(alice.backend, "child").hold("own").token)

    process = multiprocessing.get_context("fork").Process(target=child)
    process.start()
    process.join(30)

    assert process.exitcode == 0
    assert answers.get() is True
    assert answers.get() == 1
    hold.renewed()
    hold.released()


def test_nothing_is_left_open_by_a_client_that_was_closed(cluster) -> None:
    backend = KubernetesBackend(kubeconfig=cluster.kubeconfig)
    worker = Worker(backend, "alice")
    for index in range(20):
        worker.hold(f"job-{index}")
    (connection,) = backend._wire._idle

    backend.close()

    assert connection.sock is None
    assert connection.line.raw.fileno() == -1
    assert not backend._wire._idle


def test_a_waiter_is_served_when_the_holder_gives_back_and_not_when_it_looks_again(cluster, address) -> None:
    with PGLease(address, owner_id="alice") as alice, PGLease(address, owner_id="bob") as bob:
        assert alice.try_acquire("job", ttl=600)
        got: list[float] = []

        def wait() -> None:
            got.append(bob.wait_for_lease("job", ttl=600, timeout=60, poll_interval=50).fencing_token)
            got.append(clock.now())

        thread = threading.Thread(target=wait)
        thread.start()
        until = clock.now() + 20
        while clock.now() < until and not _waits(cluster):
            thread.join(0.02)
        released_at = clock.now()
        alice.release("job")
        thread.join(60)

        assert got[0] == 2
        assert got[1] - released_at < 10, "it would have looked again after 45 seconds at the earliest"


def _waits(cluster) -> bool:
    """Tell whether somebody watches, and has looked again since it began to."""
    asked = [path for _, path in cluster.server.asked]
    began = next((index for index, path in enumerate(asked) if "watch=1" in path), None)
    return began is not None and any("/leases/pglease-job-" in path for path in asked[began:])
