"""What leases on Valkey cost above the bare scripts, and beside redis-py's own lock."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import redis

import pglease
from benchmarks.side_by_side import row, side_by_side
from pglease.backends.redis_lua import RELEASE, TRY_ACQUIRE
from pglease.testing.local_valkey import LocalValkey

MOST = 1.2
KEYS = ("pglease:1:{bare}:lease", "pglease:1:{bare}:token")
CHANNEL = "pglease:1:changes"


class Calls:
    """The same work done by us, by hand, and by redis-py."""

    def __init__(self, server: LocalValkey) -> None:
        self._leases = pglease.PGLease(server.url)
        self._client = redis.Redis(host=server.host, port=server.port)
        self._lock = self._client.lock("theirs", timeout=60)
        for script in (TRY_ACQUIRE, RELEASE):
            self._client.script_load(script.text)

    def close(self) -> None:
        self._leases.close()
        self._client.close()

    def pair(self) -> None:
        self._leases.try_acquire("pair", ttl=60)
        self._leases.release("pair")

    def block(self) -> None:
        with self._leases.acquire("block", ttl=60):
            pass

    def bare(self) -> None:
        """Two EVALSHA of the same scripts, and nothing around them."""
        lease_id = os.urandom(16).hex()
        self._client.evalsha(TRY_ACQUIRE.sha, 2, *KEYS, "bare", lease_id, "bare", 60_000_000, "", "", CHANNEL)
        self._client.evalsha(RELEASE.sha, 1, KEYS[0], "bare", lease_id, 0, CHANNEL, "")

    def lock(self) -> None:
        """`redis.lock.Lock`: no record, no token, no renewal."""
        self._lock.acquire()
        self._lock.release()


@contextmanager
def _calls() -> Iterator[Calls]:
    with LocalValkey() as server:
        calls = Calls(server)
        try:
            yield calls
        finally:
            calls.close()


def section(rounds: int, runs: int) -> tuple[str, bool]:
    """Measure; return a section of RESULTS.md, and whether every aim was kept."""
    with _calls() as calls:
        sides = {"pair": calls.pair, "block": calls.block, "bare": calls.bare, "lock": calls.lock}
        timings = side_by_side(sides, rounds=rounds, runs=runs)
    bare = timings["bare"]
    rows = [
        ("try_acquire + release", timings["pair"], MOST),
        ("with acquire(): block", timings["block"], MOST),
        ("redis-py's Lock, acquire + release", timings["lock"], None),
    ]
    table = "\n".join(row(work, timing, bare, most) for work, timing, most in rows)
    text = f"""
## Valkey

*Bare* are two EVALSHA of the same scripts through redis-py {redis.__version__}.

| work | µs | bare, µs | ratio | aim |
|---|---|---|---|---|
{table}
"""
    return text, all(most is None or timing.median <= most * bare.median for _, timing, most in rows)
