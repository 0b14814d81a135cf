"""Other libraries at the same work, each in a process and an environment of its own, in turn with ours: A B A B."""

from __future__ import annotations

import json
import subprocess
import sys
import venv
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from time import perf_counter

import redis

import pglease
from benchmarks.side_by_side import Timing, looping, row
from pglease.testing.local_postgres import LocalPostgres
from pglease.testing.local_valkey import LocalValkey

ENVIRONMENT = Path(__file__).parents[1] / ".venv" / "peers"
PEERS = ("grelmicro==0.20.0", "asyncpg==0.32.0", "python-redis-lock==4.0.1", f"redis=={redis.__version__}")
WORKER = Path(__file__).with_name("peer_worker.py")

FEW = 20
"""Rounds of one side before it is the next one's turn: what disturbs the machine disturbs all of them."""

Run = Callable[[int], list[float]]
"""Does the work so many times; returns the seconds of each."""


def _python() -> Path:
    """Return the interpreter that has the peers, made anew when they are to be others."""
    python, mark = ENVIRONMENT / "bin" / "python", ENVIRONMENT / "peers.txt"
    if not mark.exists() or mark.read_text().split() != list(PEERS):
        venv.create(ENVIRONMENT, clear=True, with_pip=True)
        # What grelmicro needs for its two stores, without the rest of its extras.
        subprocess.run([python, "-m", "pip", "install", "-q", *PEERS, "pydantic-settings"], check=True)
        mark.write_text("\n".join(PEERS))
    return python


@contextmanager
def peer(work: str, address: str) -> Iterator[Run]:
    """Start a peer at one kind of work of `peer_worker.py`."""
    with subprocess.Popen([_python(), WORKER, work, address], stdin=-1, stdout=-1, text=True) as process:
        told, heard = process.stdin, process.stdout
        assert told is not None
        assert heard is not None

        def run(rounds: int) -> list[float]:
            told.write(f"{rounds}\n")
            told.flush()
            seconds: list[float] = json.loads(heard.readline())
            return seconds

        yield run
        told.close()


def ours(call: Callable[[], object]) -> Run:
    """Return the same for a call of this process."""

    def run(rounds: int) -> list[float]:
        seconds = []
        for _ in range(rounds):
            begun = perf_counter()
            call()
            seconds.append(perf_counter() - begun)
        return seconds

    return run


def in_turn(sides: Sequence[Run], *, rounds: int, runs: int) -> list[Timing]:
    """Time each side `rounds` times in each of `runs` runs, a few rounds of each in turn."""
    for side in sides:
        side(100)
    taken: list[list[list[float]]] = [[[] for _ in range(runs)] for _ in sides]
    for run in range(runs):
        for _ in range(rounds // FEW):
            for place, side in enumerate(sides):
                taken[place][run] += side(FEW)
    return [Timing.of(each) for each in taken]


def _on_postgres(rounds: int, runs: int, *, flush: bool) -> tuple[Timing, Timing]:
    with ExitStack() as life:
        settings = {"synchronous_commit": "on" if flush else "off"}
        server = life.enter_context(LocalPostgres(fsync=flush, settings=settings))
        client = life.enter_context(pglease.PGLease(server.dsn))
        leases, run_on = pglease.AsyncPGLease(client), life.enter_context(looping())

        async def block() -> None:
            async with leases.acquire("job", ttl=60):
                pass

        theirs = life.enter_context(peer("grelmicro_on_postgres", server.dsn))
        mine, other = in_turn([ours(lambda: run_on(block())), theirs], rounds=rounds, runs=runs)
    return mine, other


def _on_valkey(rounds: int, runs: int) -> list[Timing]:
    with ExitStack() as life:
        server = life.enter_context(LocalValkey())
        leases = life.enter_context(pglease.PGLease(server.url))

        def pair() -> None:
            leases.try_acquire("ours", ttl=60)
            leases.release("ours")

        works = ("redis_py_lock", "python_redis_lock", "grelmicro_on_redis")
        sides = [ours(pair), *(life.enter_context(peer(work, server.url)) for work in works)]
        return in_turn(sides, rounds=rounds, runs=runs)


def section(rounds: int, runs: int) -> tuple[str, bool]:
    """Measure; return a section of RESULTS.md, and whether every aim was kept."""
    off, on = (_on_postgres(rounds // 4 if flush else rounds, runs, flush=flush) for flush in (False, True))
    pair, *others = _on_valkey(rounds, runs)
    table = [
        ("async with on PostgreSQL, WAL flush off; grelmicro on asyncpg", *off),
        ("async with on PostgreSQL, WAL flush on; grelmicro on asyncpg", *on),
        ("try_acquire + release on Valkey; redis-py's Lock", pair, others[0]),
        ("try_acquire + release on Valkey; python-redis-lock", pair, others[1]),
        ("try_acquire + release on Valkey; grelmicro", pair, others[2]),
    ]
    lines = "\n".join(row(work, mine, theirs, 1.0) for work, mine, theirs in table)
    text = f"""
## Beside other libraries

Each in a process of its own, in turn with ours ({", ".join(PEERS)}). None of them keeps a record of the holder, a
renewer or a fencing token.

| work; peer | pglease, µs | peer, µs | ratio | aim |
|---|---|---|---|---|
{lines}
"""
    return text, all(mine.median <= theirs.median for _, mine, theirs in table)


if __name__ == "__main__":
    sys.stdout.write(section(int(sys.argv[1]), int(sys.argv[2]))[0])
