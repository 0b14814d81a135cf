"""Acquire and release beside other libraries, each in a process of its own, a few rounds of each in turn."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack

from benchmarks import peers
from benchmarks.bare import postgres
from benchmarks.figures import Aim, Figure, Section, Spread
from benchmarks.peers import Peer
from benchmarks.timing import Effort, in_turn
from pglease.testing.local_valkey import LocalValkey

HOW = """Every library, ours too, is a process of its own that says what its own documentation says, on a database of
its own in the same server; nobody is in the way. A peer with *the same guarantee* is one whose lease lapses by itself;
what holds an advisory lock writes nothing to the log, so it need not wait for a disk, and is lost with its
connection."""
OURS = (peers.OURS, peers.OURS_ASYNC, peers.OURS_ASYNC_NEWEST, peers.OURS_ON_REDIS)


def section(effort: Effort) -> Section:
    """Measure with the flush of the log off and on, then on Valkey."""
    found, missing = peers.installed((*peers.ALL, peers.OURS_ASYNC_NEWEST))
    figures: list[Figure] = []
    runs = min(3, effort.runs)
    for flush in (False, True):
        with postgres(flush=flush) as server:
            sides = [peers.BARE, peers.OURS, peers.OURS_ASYNC, *(peer for peer in found if peer.store == "postgres")]
            addresses = [peers.database(server, f"p{number}") for number in range(len(sides))]
            rounds = max(min(20, effort.rounds), effort.rounds // (4 if flush else 2))
            where = f"flush {'on' if flush else 'off'}"
            more, dead = _compared(sides, addresses, where, rounds, runs)
            figures += more
            missing += dead if not flush else []
    with LocalValkey() as server:
        sides = [peers.OURS_ON_REDIS, *(peer for peer in found if peer.store == "redis")]
        more, dead = _compared(sides, [server.url] * len(sides), "Valkey", effort.rounds, runs)
    return Section("Beside other libraries", HOW, figures + more, missing=missing + dead)


def _compared(
    sides: Sequence[Peer], addresses: Sequence[str], where: str, rounds: int, runs: int
) -> tuple[list[Figure], list[str]]:
    with ExitStack() as life:
        players, dead = peers.playing(life, sides, addresses)
        took = in_turn({player.peer.versioned: player.pairs for player in players}, rounds=rounds, runs=runs)
    theirs = (player.peer for player in players if player.peer not in OURS)
    return [_figure(peer, where, took) for peer in theirs], dead


def _figure(peer: Peer, where: str, took: dict[str, Spread]) -> Figure:
    """Compare one that is awaited with ours that is, where there is one, on the same interpreter if it can be."""
    like = peers.OURS
    if peer.asynchronous and peers.OURS_ASYNC.versioned in took:
        newest = peer.newest and peers.OURS_ASYNC_NEWEST.versioned in took
        like = peers.OURS_ASYNC_NEWEST if newest else peers.OURS_ASYNC
    same = peer.guarantee == peers.LEASE and peer is not peers.BARE
    return Figure(
        f"{'await ' if like.asynchronous else ''}acquire + release; {where}",
        "µs",
        took[like.versioned],
        took[peer.versioned],
        peer.versioned,
        Aim(1.0) if same else None,
        remark="" if same or peer is peers.BARE else peer.guarantee,
    )
