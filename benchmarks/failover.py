"""How soon the next one has it after `kill -9` of the holder: ours with a ttl, and others at their own."""

from __future__ import annotations

import time
from contextlib import ExitStack

import pglease
from benchmarks import peers
from benchmarks.figures import Figure, Section, Spread
from benchmarks.peers import Peer, Player
from benchmarks.timing import Effort
from pglease.testing.local_postgres import LocalPostgres

HOW = """Seconds from the kill to the grant of one that waits. A lease in a row lapses when its ttl does, so a figure
beside the ttl is all that can be shown; what belongs to a session is free when the server notices, as with `hybrid+`
(its own section). Peers whose ttl is the 60 s of the other sections are left out: there is nothing to compare but
ttls."""
TTL = 3.0
REMARK = "ours waits 0.3 s on purpose: the handover delay"


def _ours(url: str, rounds: int) -> list[float]:
    took = []
    with LocalPostgres() as server:
        for _ in range(rounds):
            with ExitStack() as life:
                holder = life.enter_context(Player(peers.OURS, f"{url}{server.dsn}"))
                holder.do("take", TTL)
                heir = life.enter_context(pglease.PGLease(f"{url}{server.dsn}"))
                assert not heir.try_acquire("turns", ttl=TTL)
                killed_at = time.monotonic()
                holder.kill()
                heir.wait_for_lease("turns", ttl=TTL, timeout=60)
                took.append(time.monotonic() - killed_at)
    return took


def _theirs(peer: Peer, rounds: int) -> list[float]:
    took = []
    with LocalPostgres() as server:
        for _ in range(rounds):
            with ExitStack() as life:
                players, dead = peers.playing(life, [peer] * 2, [server.dsn] * 2)
                if dead:
                    raise RuntimeError(dead[0])
                holder, heir = players
                holder.do("take")
                heir.begin("take")
                time.sleep(0.3)
                killed_at = time.monotonic()
                holder.kill()
                took.append(heir.done() - killed_at)
    return took


def section(effort: Effort) -> Section:
    """Measure."""
    few = max(1, effort.few // 2)
    figures = [Figure(f"a row, ttl {TTL:g} s", "s", Spread.of(_ours("", few)))]
    bound, missing = Spread.of(_ours("hybrid+", few)), []
    if effort.crowd > 2:
        found, missing = peers.installed(peer for peer in peers.ALL if peer.guarantee == peers.SESSION)
        for peer in found:
            try:
                theirs = Spread.of(_theirs(peer, few))
            except RuntimeError as error:
                missing.append(str(error))
            else:
                figures.append(Figure("a session (`hybrid+`)", "s", bound, theirs, peer.versioned, remark=REMARK))
        return Section("After a kill", HOW, figures, missing=missing)
    return Section("After a kill", HOW, [*figures, Figure("a session (`hybrid+`)", "s", bound)])
