"""How long it takes from the return of a release until the next holder has the lease, and what parked waiters cost."""

from __future__ import annotations

import itertools
import random
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress

import pglease
from benchmarks import peers
from benchmarks.figures import Aim, Figure, Section, Spread, late
from benchmarks.peers import Player
from benchmarks.timing import Effort
from pglease.testing.local_postgres import LocalPostgres

HOW = """Milliseconds on one clock. A crowd are processes that take turns and hold for 20 ms each; two hundred waiters
are ten processes of twenty threads. Peers are one process that holds and one that waits, at their defaults, released at
any moment of their period of looking; ours in turn with them, round and round."""
HOLD = 0.02
CRON = 50

_WORKER = """
import sys, threading, time
from pglease import PGLease
how, threads, rounds, hold, dsn = sys.argv[1], *map(float, sys.argv[2:5]), sys.argv[5]
client = PGLease(dsn)
client.get_lease("job")
print("ready", flush=True)
sys.stdin.readline()
lines = []
def take_turns():
    for _ in range(int(rounds)):
        lease = client.wait_for_lease("job", ttl=60, timeout=600, fair=how == "fair")
        got = time.monotonic()
        time.sleep(hold)
        lease.release()
        lines.append(f"{got} {time.monotonic()} {threading.get_ident()}")
crew = [threading.Thread(target=take_turns) for _ in range(int(threads))]
for thread in crew: thread.start()
for thread in crew: thread.join()
print(";".join(lines), flush=True)
client.close()
"""
_SKIPPING = """
import sys, time
from pglease import PGLease
client = PGLease(sys.argv[1])
client.get_lease("tick")
print(time.monotonic(), flush=True)
for tick in sys.stdin:
    time.sleep(max(0.0, float(tick) - time.monotonic()))
    began = time.monotonic()
    won = client.try_acquire("tick", ttl=60)
    print(-1.0 if won else time.monotonic() - began, flush=True)
    if won:
        time.sleep(0.5)
        client.release("tick")
client.close()
"""


def crowd(dsn: str, processes: int, threads: int, how: str, rounds: int) -> list[float]:
    """Return the seconds between each release and the next holder's grant."""
    command = [sys.executable, "-c", _WORKER, how, str(threads), str(rounds), str(HOLD), dsn]
    with ExitStack() as life:
        workers = [life.enter_context(_piped(command)) for _ in range(processes)]
        for worker in workers:
            worker.stdout.readline()
        for worker in workers:
            worker.stdin.write("go\n")
            worker.stdin.flush()
        holds = sorted(
            (float(got), float(gone), (worker.pid, thread))
            for worker in workers
            for got, gone, thread in (line.split() for line in worker.stdout.readline().split(";"))
        )
    return [max(0.0, after[0] - before[1]) for before, after in itertools.pairwise(holds) if after[2] != before[2]]


def _piped(command: Sequence[str]) -> subprocess.Popen[str]:
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def _figures(work: str, seconds: list[list[float]], aim: Aim | None = None, remark: str = "") -> list[Figure]:
    return [
        Figure(f"{work}: p50", "ms", Spread.of_seconds(seconds, "ms"), aim=aim, remark=remark),
        Figure(f"{work}: p99", "ms", Spread.of_seconds(seconds, "ms", late(0.99))),
    ]


def _crowds(effort: Effort) -> list[Figure]:
    figures = []
    with LocalPostgres(settings={"max_connections": 300}) as server:
        with pglease.PGLease(server.dsn) as first:
            first.get_lease("job")
        several = min(20, effort.crowd)
        runs = min(2, effort.runs)
        for work, processes, threads, how, aim in (
            ("1 waiter", 2, 1, "plain", Aim(3, "ours")),
            (f"{several} waiters", several + 1, 1, "plain", Aim(3, "ours")),
            (f"{several} waiters, `fair=True`", several + 1, 1, "fair", None),
            (f"{several * 10} waiters", several // 2, 20, "plain", Aim(3, "ours")),
        ):
            rounds = max(2, effort.few * 20 // (processes * threads))
            figures += _figures(work, [crowd(server.dsn, processes, threads, how, rounds) for _ in range(runs)], aim)
    return figures


def between_two(players: Sequence[Player], rounds: int) -> list[float]:
    """Return how long one waiting process of a library waits from the return of a release in another."""
    holder, waiter = players
    took = []
    for _ in range(rounds):
        holder.do("take")
        waiter.begin("take")
        time.sleep(0.3 + random.uniform(0, holder.peer.period))
        released = holder.do("release")
        took.append(max(0.0, waiter.done() - released))
        waiter.do("release")
    return took


def _peers(effort: Effort) -> tuple[list[Figure], list[str]]:
    found, missing = peers.installed(peer for peer in peers.ALL if peer.store == "postgres")
    figures = []
    for peer in found:
        # A round of one that looks each 5 s takes as long.
        rounds = max(1, effort.few // 3 if peer.period < 1 else effort.few // 5)
        with LocalPostgres() as server, ExitStack() as life:
            ours, _ = peers.playing(life, [peers.OURS] * 2, [server.dsn] * 2)
            theirs, dead = peers.playing(life, [peer] * 2, [peers.database(server, "theirs")] * 2)
            missing += dead
            if dead:
                continue
            took = [(between_two(ours, rounds), between_two(theirs, rounds)) for _ in range(2)]
        spreads = (Spread.of_seconds(side, "ms") for side in zip(*took, strict=True))
        figures.append(Figure("1 waiter, two processes: p50", "ms", *spreads, peer.versioned, remark=peer.guarantee))
    return figures, missing


def _at_expiry(rounds: int) -> list[float]:
    """Return how long after a hold's end the waiter has it, with `notify=False`."""
    took = []
    with LocalPostgres() as server:
        quiet = f"{server.dsn}?pglease.notify=0"
        with pglease.PGLease(quiet) as holder, pglease.PGLease(quiet) as waiter:
            for _ in range(rounds):
                assert holder.try_acquire("lapsing", ttl=1.0, heartbeat=False)
                ends_at = time.monotonic() + 1.0
                lease = waiter.wait_for_lease("lapsing", timeout=60, poll_interval=60)
                took.append(time.monotonic() - ends_at)
                lease.release()
    return took


def _losers(effort: Effort) -> list[float]:
    """Return how long those who skip take to learn that another process was faster at the same tick."""
    took = []
    command = [sys.executable, "-c", _SKIPPING]
    with LocalPostgres() as server, ExitStack() as life:
        players = [life.enter_context(_piped([*command, server.dsn])) for _ in range(min(CRON, effort.crowd))]
        for player in players:
            player.stdout.readline()
        for _ in range(effort.few + 1):
            tick = time.monotonic() + 1.0
            for player in players:
                player.stdin.write(f"{tick}\n")
                player.stdin.flush()
            took.append([seconds for player in players if (seconds := float(player.stdout.readline())) >= 0])
        for player in players:
            player.stdin.close()
    return [seconds for of_a_tick in took[1:] for seconds in of_a_tick]  # in the first one, they connected


def parked(seconds: float, waiters: int) -> tuple[float, int]:
    """Return the statements a second, and the transaction ids, that so many parked waiters of ten clients cost."""
    cancel = threading.Event()

    def wait(client: pglease.PGLease) -> None:
        with suppress(pglease.AcquireTimeout):
            client.wait_for_lease("parked", timeout=None, cancel=cancel)

    settings = {"log_statement": "all", "log_duration": "on", "log_line_prefix": "%p %x "}
    with LocalPostgres(settings=settings) as server, ExitStack() as life:

        def said() -> list[str]:
            return [line for line in server.log_text().splitlines() if " LOG: " in line]

        holder, *clients = [life.enter_context(pglease.PGLease(server.dsn)) for _ in range(11)]
        assert holder.try_acquire("parked", ttl=3600)
        before = len(said())
        threads = [threading.Thread(target=wait, args=(clients[place % 10],)) for place in range(waiters)]
        for thread in threads:
            thread.start()
        time.sleep(min(5, seconds))
        parked_since = len(said())
        time.sleep(seconds)
        lines = said()
        cancel.set()
        for thread in threads:
            thread.join()
    statements = [line for line in lines[parked_since:] if "statement: " in line or "execute " in line]
    return len(statements) / seconds, len({line.split()[1] for line in lines[before:]} - {"0"})


def section(effort: Effort) -> Section:
    """Measure."""
    figures = _crowds(effort)
    beside, missing = _peers(effort) if effort.crowd > 2 else ([], ["peers, in a smoke test"])
    figures += beside
    figures += _figures("after a hold's known end, `notify=False`", [_at_expiry(effort.few)])
    figures += _figures(
        f"{min(CRON, effort.crowd)} processes at one tick, until those who skip know", [_losers(effort)]
    )
    statements, ids = parked(60 * effort.minutes if effort.minutes < 1 else 70.0, 10 * min(20, effort.crowd))
    what = f"{10 * min(20, effort.crowd)} parked waiters of 10 clients"
    figures += [
        Figure(f"{what}: statements a second", "", Spread.of([statements])),
        Figure(f"{what}: transaction ids", "", Spread.of([float(ids)])),
    ]
    return Section("From hand to hand", HOW, figures, missing=missing)
