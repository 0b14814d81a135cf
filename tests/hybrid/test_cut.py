"""A network that is cut without a word: three namespaces, a router between the holder and the server goes deaf."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support.worlds import Child

pytestmark = [pytest.mark.needs("netns", "postgres-programs")]

SERVER = """
import sys
sys.path.insert(0, {root!r})
import time
from pglease import PGLease
from pglease.testing.local_postgres import LocalPostgres
with LocalPostgres(fsync=False, user="far", password=sys.argv[1], settings={{"listen_addresses": "*"}}) as server:
    with PGLease("hybrid+" + server.dsn, owner_id="heir") as heir:
        heir.try_acquire("warm-up")
        print(server.port, flush=True)
        sys.stdin.readline()
        heir.wait_for_lease("job", ttl=60, timeout=100)
        print(time.clock_gettime(time.CLOCK_BOOTTIME), flush=True)
        sys.stdin.readline()
"""
HOLDER = """
import sys, time
sys.path.insert(0, {root!r})
from pglease import PGLease
leases = PGLease("hybrid+" + sys.argv[1], owner_id="holder")
assert leases.try_acquire("job", ttl=60)
lease = leases.held("job")
print("held", flush=True)
lease.lost.wait(100)
print(time.clock_gettime(time.CLOCK_BOOTTIME), lease.loss.reason, flush=True)
sys.stdin.readline()
"""
ROOT = str(Path(__file__).resolve().parents[2])


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, timeout=20)


@dataclass(frozen=True)
class Network:
    """The holder's host, a router, the server's host."""

    holder: str
    router: str
    server: str

    def cut(self) -> None:
        """Let the router swallow everything, in both directions, from now on."""
        for address in ("10.231.1.2", "10.231.2.2"):
            ip("-n", self.router, "route", "replace", "blackhole", f"{address}/32")


@pytest.fixture
def network() -> Iterator[Network]:
    names = [f"pglease{os.getpid()}{host}" for host in ("h", "r", "s")]
    try:
        for name in names:
            ip("netns", "add", name)
            ip("-n", name, "link", "set", "lo", "up")
        holder, router, server = names
        for number, host in ((1, holder), (2, server)):
            ip("-n", host, "link", "add", "eth", "type", "veth", "peer", "name", f"leg{number}", "netns", router)
            ip("-n", host, "addr", "add", f"10.231.{number}.2/24", "dev", "eth")
            ip("-n", router, "addr", "add", f"10.231.{number}.1/24", "dev", f"leg{number}")
            ip("-n", host, "link", "set", "eth", "up")
            ip("-n", router, "link", "set", f"leg{number}", "up")
            ip("-n", host, "route", "add", "default", "via", f"10.231.{number}.1")
        forward = "echo 1 > /proc/sys/net/ipv4/ip_forward"
        subprocess.run(["ip", "netns", "exec", router, "sh", "-c", forward], check=True, timeout=20)
        yield Network(holder, router, server)
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True, timeout=20)


def within(namespace: str, script: str, *arguments: str) -> Child:
    return Child(script.format(root=ROOT), *arguments, prefix=("ip", "netns", "exec", namespace))


def test_a_cut_network_frees_the_lease_within_seconds_and_the_holder_is_told(network: Network, canary: str) -> None:
    with ExitStack() as stack:
        server = within(network.server, SERVER, canary)
        stack.callback(server.bury)
        port = server.hear(60)
        holder = within(network.holder, HOLDER, f"postgresql://far:{canary}@10.231.2.2:{port}/postgres")
        stack.callback(holder.bury)
        assert holder.hear(60) == "held"
        server.tell()
        time.sleep(1.0)  # everybody is at rest: the line is quiet

        cut_at = time.clock_gettime(time.CLOCK_BOOTTIME)
        network.cut()
        granted_after = float(server.hear(100)) - cut_at
        lost_at, reason = holder.hear(100).split()
        lost_after = float(lost_at) - cut_at

        assert reason == "session_died"
        print(f"told after {lost_after:.2f} s, granted after {granted_after:.2f} s")
        assert 0.5 < lost_after < 8
        assert 0.5 < granted_after < 12
