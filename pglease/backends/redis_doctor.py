"""What a server says about itself, and what of it weakens the promises of leases: one `Check` a line.

Most is asked at the first use already; the worst of it is told by the log then.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime

from pglease.backends.checks import Check
from pglease.backends.redis_connections import Link
from pglease.errors import BackendError

PROBE_NAME = "pglease:doctor"
"""What the probe acquires. Always the same name, so that many visits leave one record."""
TOLD_AT_FIRST_USE = ("eviction", "persistence", "replicas")
OLDEST_SERVER = (6, 0)
_SLOW = 0.05
_CLOCK_OFF = 5.0


@dataclass(frozen=True, slots=True)
class Server:
    """The server's answers; what it does not tell (rights, managed services) is missing.

    Attributes:
        info: the lines of INFO.
        fsync: when the append-only file is written through, or None.
        ahead: seconds by which its clock is ahead of ours, to within the round trip.
        round_trip: seconds.
    """

    info: Mapping[str, str]
    fsync: str | None
    ahead: float
    round_trip: float

    @property
    def kind(self) -> str:
        """Its name for people."""
        return "Valkey" if self.info.get("server_name") == "valkey" else "Redis"

    @property
    def version(self) -> str:
        """Its version, or an empty text."""
        return self.info.get("valkey_version") or self.info.get("redis_version", "")

    @property
    def is_cluster(self) -> bool:
        """Whether it is part of a Cluster."""
        return self.info.get("cluster_enabled") == "1"

    def number(self, fact: str) -> int:
        """Return a number, 0 for one that it does not tell."""
        return int(self.info.get(fact, "0"))


def look(link: Link) -> Server:
    """Ask a server about itself, in one round trip."""
    wall, began = time.time(), time.perf_counter()
    info, fsync, now = link.call_many([("INFO",), ("CONFIG", "GET", "appendfsync"), ("TIME",)])
    took = time.perf_counter() - began
    return Server(
        info=_lines(info) if isinstance(info, bytes) else {},
        fsync=fsync[1].decode() if isinstance(fsync, list) and len(fsync) == 2 else None,
        ahead=int(now[0]) + int(now[1]) / 1e6 - wall - took / 2 if isinstance(now, list) else 0.0,
        round_trip=took,
    )


def _lines(info: bytes) -> dict[str, str]:
    pairs = (line.partition(":") for line in info.decode(errors="replace").splitlines() if not line.startswith("#"))
    return {name: value for name, colon, value in pairs if colon}


def settings(server: Server, wait_replicas: int) -> Iterator[Check]:
    """Judge what the server is set to."""
    if not server.info:
        yield Check(
            "settings", "warn", "the server does not let this user ask INFO", "allow it, and run the doctor again"
        )
        return
    yield _eviction(server)
    yield _persistence(server)
    yield _replicas(server, wait_replicas)


def _eviction(server: Server) -> Check:
    policy, limit = server.info.get("maxmemory_policy", "noeviction"), server.number("maxmemory")
    if not policy.startswith("allkeys"):  # the others evict keys with a TTL, and ours have none
        return Check("eviction", "ok", f"maxmemory-policy {policy} evicts nothing of ours")
    if not limit:
        return Check("eviction", "ok", f"maxmemory-policy {policy} evicts nothing while maxmemory is 0")
    return Check(
        "eviction",
        "warn",
        f"maxmemory-policy {policy} may evict leases and fencing tokens when memory runs out",
        "set noeviction, or a policy that begins with volatile-",
    )


def _persistence(server: Server) -> Check:
    if server.info.get("aof_enabled") != "1":
        return Check(
            "persistence",
            "warn",
            "no append-only file: a crash loses leases, and fencing tokens go back",
            "set appendonly yes, with appendfsync always where tokens must never repeat",
        )
    if server.fsync == "always":
        return Check("persistence", "ok", "append-only file, written through before each answer")
    if server.fsync == "no":
        return Check(
            "persistence",
            "warn",
            "append-only file, never written through: the death of the machine loses the grants of half a minute",
            "set appendfsync everysec, or always where tokens must never repeat",
        )
    return Check(
        "persistence",
        "ok",
        "append-only file, written through once a second: the death of the server loses nothing, that of its machine "
        "up to a second of grants (appendfsync always would not)",
    )


def _replicas(server: Server, wait_replicas: int) -> Check:
    there = server.number("connected_slaves")
    if there < wait_replicas:
        return Check(
            "replicas",
            "fail",
            f"wait_replicas is {wait_replicas}, and {there} are connected: no lease will be granted",
            "connect replicas, or lower wait_replicas",
        )
    if not there:
        return Check("replicas", "ok", "none: no failover can lose a grant")
    if wait_replicas:
        return Check("replicas", "ok", f"{there} connected; grants wait for {wait_replicas} of them")
    return Check(
        "replicas",
        "warn",
        f"{there} connected: a failover to one that lacks the last writes grants a lease twice and repeats its token",
        "set wait_replicas to make that rarer; nothing in Redis rules it out",
    )


def diagnose(
    ask: Callable[[Callable[[Link], Server]], Server], probe: Callable[[], None], wait_replicas: int
) -> Iterator[Check]:
    """Look at everything that leases depend on, and yield what was found, one thing at a time.

    Args:
        ask: calls what it is given with a connection.
        probe: acquires and releases `PROBE_NAME` once.
        wait_replicas: how many replicas grants wait for.
    """
    try:
        server = ask(look)
    except BackendError as error:
        yield Check("reachable", "fail", str(error), "is it running, and are address, user and password right?")
        return
    yield Check("reachable", "ok", f"{server.kind} {server.version} answers in {server.round_trip * 1000:.1f} ms")
    yield _version(server)
    if server.is_cluster:
        yield Check("cluster", "ok", "part of a Cluster: each lease lives on the node that has its slot")
    yield from settings(server, wait_replicas)
    yield _clock(server)
    yield _probed(probe)


def _version(server: Server) -> Check:
    found = tuple(map(int, re.findall(r"\d+", server.info.get("redis_version", ""))[:2]))
    if found and found < OLDEST_SERVER:
        return Check("version", "fail", f"{server.version} is older than Redis 6", "upgrade the server")
    return Check("version", "ok", server.version or "unknown")


def _clock(server: Server) -> Check:
    at = datetime.fromtimestamp(time.time() + server.ahead, UTC)
    if abs(server.ahead) > _CLOCK_OFF:
        return Check(
            "clock",
            "warn",
            f"the server's clock says {at:%Y-%m-%d %H:%M:%S} UTC, {abs(server.ahead):.0f} s off ours",
            "leases are judged by the server's alone; let it be kept by NTP, and never stepped",
        )
    return Check("clock", "ok", f"{abs(server.ahead) * 1000:.0f} ms off ours; only the server's counts")


def _probed(probe: Callable[[], None]) -> Check:
    began = time.perf_counter()
    try:
        probe()
    except BackendError as error:
        return Check("acquire", "fail", str(error), "this user needs EVALSHA, SCRIPT LOAD and our keys")
    took = time.perf_counter() - began
    slow = took > _SLOW
    return Check(
        "acquire",
        "warn" if slow else "ok",
        f"a lease was taken and given back in {took * 1000:.1f} ms",
        "look at SLOWLOG and the network" if slow else "",
    )
