"""A network that is cut without a word: three namespaces, a router between the holder and the server goes deaf.

Needs root, Linux and iproute2.
"""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from pglease.backends.hybrid_session import PING_EVERY
from tests.support.worlds import Child

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


@dataclass(frozen=True)
class Network:
    """The holder's host, a router, the server's host."""

    holder: str
    router: str
    server: str

    def cut(self, *, in_an_answer: bool) -> None:
        """Let the router swallow everything from now on; if asked to, first an answer and its acknowledgement."""
        self._swallow("10.231.1.2")
        if in_an_answer:
            time.sleep(1.4 * PING_EVERY)  # the holder asks, is heard, and hears nothing
        self._swallow("10.231.2.2")

    def _swallow(self, address: str) -> None:
        _ip("-n", self.router, "route", "replace", "blackhole", f"{address}/32")


@dataclass(frozen=True)
class Outcome:
    """What became of a hybrid lease of 60 s, in seconds since the cut.

    Attributes:
        told_after: when the holder knew.
        reason: what it was told.
        granted_after: when the next one had it.
    """

    told_after: float
    reason: str
    granted_after: float


def cut_off_a_holder(password: str, *, in_an_answer: bool = False) -> Outcome:
    """Let somebody hold a lease on one host and somebody else wait for it beside the server; cut, and see.

    Args:
        password: the server's.
        in_an_answer: whether the server is to wait for the acknowledgement of an answer, while its keepalives rest;
            else the line is quiet.
    """
    with _network() as network, ExitStack() as stack:
        server = _within(network.server, SERVER, password)
        stack.callback(server.bury)
        port = server.hear(60)
        holder = _within(network.holder, HOLDER, f"postgresql://far:{password}@10.231.2.2:{port}/postgres")
        stack.callback(holder.bury)
        assert holder.hear(60) == "held"
        server.tell()
        time.sleep(1.0)  # everybody is at rest: the line is quiet

        cut_at = time.clock_gettime(time.CLOCK_BOOTTIME)
        network.cut(in_an_answer=in_an_answer)
        granted_at = float(server.hear(100))
        told_at, reason = holder.hear(100).split()
    return Outcome(float(told_at) - cut_at, reason, granted_at - cut_at)


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, timeout=20)


@contextmanager
def _network() -> Iterator[Network]:
    names = [f"pglease{os.getpid()}{host}" for host in ("h", "r", "s")]
    try:
        for name in names:
            _ip("netns", "add", name)
            _ip("-n", name, "link", "set", "lo", "up")
        holder, router, server = names
        for number, host in ((1, holder), (2, server)):
            _ip("-n", host, "link", "add", "eth", "type", "veth", "peer", "name", f"leg{number}", "netns", router)
            _ip("-n", host, "addr", "add", f"10.231.{number}.2/24", "dev", "eth")
            _ip("-n", router, "addr", "add", f"10.231.{number}.1/24", "dev", f"leg{number}")
            _ip("-n", host, "link", "set", "eth", "up")
            _ip("-n", router, "link", "set", f"leg{number}", "up")
            _ip("-n", host, "route", "add", "default", "via", f"10.231.{number}.1")
        forward = "echo 1 > /proc/sys/net/ipv4/ip_forward"
        subprocess.run(["ip", "netns", "exec", router, "sh", "-c", forward], check=True, timeout=20)
        yield Network(holder, router, server)
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True, timeout=20)


def _within(namespace: str, script: str, *arguments: str) -> Child:
    return Child(script.format(root=ROOT), *arguments, prefix=("ip", "netns", "exec", namespace))
