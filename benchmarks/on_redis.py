"""What leases on Valkey cost above the bare scripts, and beside redis-py's own lock."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import redis

import pglease
from benchmarks.figures import Aim, Figure, Section
from benchmarks.timing import Effort, side_by_side
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


HOW = f"""*Other* are two EVALSHA of the same scripts through redis-py {redis.__version__}, on Valkey."""


def section(effort: Effort) -> Section:
    """Measure."""
    with _calls() as calls:
        # Ours and theirs in turn: who follows its own kind finds the processor's caches warm.
        sides = {"pair": calls.pair, "lock": calls.lock, "block": calls.block, "bare": calls.bare}
        took = side_by_side(sides, rounds=effort.rounds, runs=effort.runs)
    figures = [
        Figure("try_acquire + release", "µs", took["pair"], took["bare"], "bare EVALSHA", Aim(MOST)),
        Figure("with acquire(): block", "µs", took["block"], took["bare"], "bare EVALSHA", Aim(MOST)),
        Figure("try_acquire + release", "µs", took["pair"], took["lock"], "redis-py's Lock", Aim(1.0)),
    ]
    return Section("On Valkey", HOW, figures)
