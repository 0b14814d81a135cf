"""What is broken in a run, chosen by seed: each nemesis does its harm, notes it, and mends it."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import psycopg

from pglease import PGLease, clock
from pglease.errors import BackendError
from pglease.testing.histories import Fault, Scribe
from tests.jepsen.crew import Crew
from tests.jepsen.worlds import TTL, World

RECOVERY = 0.5
"""Seconds after a fault that still count as broken: reconnecting, recovery, what was held back and arrives late."""
HOLDERS = "SELECT DISTINCT owner_id FROM pglease_leases WHERE expires_at > clock_timestamp() ORDER BY 1"
SERVERS_OF_OURS = "SELECT pid FROM pg_stat_activity WHERE application_name LIKE 'pglease%' ORDER BY pid"
SERVERS_OF_A_POOLER = "SELECT pid FROM pg_stat_activity WHERE backend_type = 'client backend' ORDER BY pid"


@dataclass
class Chaos:
    """Everything a nemesis needs.

    Attributes:
        world: what is broken.
        crew: the processes.
        scribe: where faults are noted.
        rng: chooses.
        over: set when the run is over: what naps wakes up.
        counts: how many of each kind there were.
    """

    world: World
    crew: Crew
    scribe: Scribe
    rng: random.Random
    over: threading.Event = field(default_factory=threading.Event)
    counts: Counter[str] = field(default_factory=Counter)
    line: threading.Lock = field(default_factory=threading.Lock)
    server: threading.Lock = field(default_factory=threading.Lock)

    @contextlib.contextmanager
    def fault(self, what: str, whom: str = ""):
        """Note something as broken for as long as the block runs, and a little longer."""
        self.counts[what] += 1
        began = clock.now()
        try:
            yield
        finally:
            self.scribe.note(Fault(what, began, clock.now() + (0 if whom else RECOVERY), whom))

    def nap(self, least: float, most: float) -> None:
        """Let some time pass."""
        self.over.wait(self.rng.uniform(least, most))

    def process(self) -> str:
        """Return a process to do something to: mostly one that holds a lease."""
        holders: list[str] = []
        if self.rng.random() < 0.8:
            with contextlib.suppress(psycopg.Error):
                holders = [label for (label,) in self.world.server.execute(HOLDERS)]
        return self.crew.choose(self.rng, holders)

    def backend(self) -> int | None:
        """Return the process of some session that a worker, or its pooler, has."""
        wanted = SERVERS_OF_OURS if self.world.pooler is None else SERVERS_OF_A_POOLER
        with contextlib.suppress(psycopg.Error):
            pids = [pid for (pid,) in self.world.server.execute(wanted)]
            return self.rng.choice(pids) if pids else None
        return None


def kill(chaos: Chaos) -> None:
    """SIGKILL a process and start another."""
    who = chaos.process()
    chaos.counts["kill"] += 1
    now = clock.now()
    chaos.crew.kill(who)
    chaos.scribe.note(Fault("kill", now, now, who))


def stop(chaos: Chaos) -> None:
    """SIGSTOP a process for up to three ttl."""
    who = chaos.process()
    with chaos.fault("stop", who), chaos.crew.stopped(who):
        chaos.nap(0.5 * TTL, 3 * TTL)


def stall_interpreter(chaos: Chaos) -> None:
    """Have C code hold a process's interpreter lock; the process notes for how long."""
    chaos.counts["stall the interpreter"] += 1
    chaos.crew.signal(chaos.process(), signal.SIGUSR1)


def terminate_session(chaos: Chaos) -> None:
    """Have the server end somebody's session."""
    if (pid := chaos.backend()) is not None:
        with chaos.fault("terminate a session"), contextlib.suppress(psycopg.Error):
            chaos.world.server.execute(f"SELECT pg_terminate_backend({pid})")


def stop_session(chaos: Chaos) -> None:
    """SIGSTOP the server's process of a session: the kernel goes on acknowledging."""
    with chaos.server:
        if (pid := chaos.backend()) is None:
            return
        with chaos.fault("stop a session"), contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGSTOP)
            chaos.nap(0.1 * TTL, TTL)
            os.kill(pid, signal.SIGCONT)


def restart(chaos: Chaos) -> None:
    """Crash the server and start it again."""
    with chaos.server, chaos.fault("restart"):
        chaos.world.server.restart("immediate")


def freeze(chaos: Chaos) -> None:
    """SIGSTOP the whole server."""
    with chaos.server, chaos.fault("freeze"):
        chaos.world.server.freeze()
        chaos.nap(0.1 * TTL, 0.7 * TTL)
        chaos.world.server.thaw()


def _on_the_line(what: str, harm: Callable[[Chaos], None], mend: Callable[[Chaos], None]) -> Callable[[Chaos], None]:
    def nemesis(chaos: Chaos) -> None:
        with chaos.line, chaos.fault(what):
            harm(chaos)
            chaos.nap(0.1 * TTL, 0.8 * TTL)
            mend(chaos)

    nemesis.__doc__ = what
    return nemesis


def _pass(chaos: Chaos) -> None:
    for line in chaos.world.lines:
        line.pass_through()


def _cut(chaos: Chaos) -> None:
    for line in chaos.world.lines:
        line.cut()


def _cut_and_pass(chaos: Chaos) -> None:
    _cut(chaos)
    _pass(chaos)


def cut(chaos: Chaos) -> None:
    """Reset every connection."""
    with chaos.line, chaos.fault("cut"):
        _cut(chaos)


def drop_reply(chaos: Chaos) -> None:
    """Have the next request be carried out, and cut the connection before its answer."""
    with chaos.line, chaos.fault("drop a reply"):
        dropped = [line.drop_next_reply() for line in chaos.world.lines]
        dropped[-1].wait(0.2)


def lock_row(chaos: Chaos) -> None:
    """Hold a row in somebody's open transaction."""
    name = chaos.rng.choice(chaos.crew.names)
    with (
        chaos.fault("lock a row"),
        contextlib.suppress(psycopg.Error),
        psycopg.connect(chaos.world.server.admin_dsn, connect_timeout=5) as connection,
    ):
        connection.execute("SET lock_timeout = '2s'")
        connection.execute("SELECT 1 FROM pglease_leases WHERE task_name = %s FOR UPDATE", (name,))
        chaos.nap(0.1 * TTL, TTL)
        connection.rollback()


def clean_up(chaos: Chaos) -> None:
    """Delete the rows of ended holds, again and again."""
    with (
        chaos.fault("clean up"),
        contextlib.suppress(BackendError),
        PGLease(chaos.world.server.admin_dsn, connect_timeout=2) as operator,
    ):
        for _ in range(chaos.rng.randint(3, 20)):
            operator.cleanup_expired()
            chaos.nap(0.0, 0.05)


def step_clock(chaos: Chaos) -> None:
    """Step the server's clock forward, within the margin of one ttl."""
    if chaos.world.clockwork is not None:
        with chaos.server, chaos.fault("step the clock"):
            chaos.world.clockwork.step(chaos.rng.uniform(0.05, 0.2))
            chaos.nap(1.2 * TTL, 1.2 * TTL)


def recycle_pooler(chaos: Chaos) -> None:
    """Have the pooler open its sessions anew, or stand still."""
    pooler = chaos.world.pooler
    assert pooler is not None
    if chaos.rng.random() < 0.5:
        with chaos.fault("recycle the pooler"), contextlib.suppress(psycopg.Error):
            pooler.admin("RECONNECT")
    else:
        with chaos.fault("stop the pooler"):
            pooler.signal(signal.SIGSTOP)
            chaos.nap(0.1 * TTL, 0.8 * TTL)
            pooler.signal(signal.SIGCONT)


black_hole = _on_the_line("black hole", lambda chaos: [line.black_hole() for line in chaos.world.lines], _pass)
one_way = _on_the_line("one way", lambda chaos: [line.drop_replies() for line in chaos.world.lines], _cut_and_pass)
delay = _on_the_line(
    "delay", lambda chaos: [line.delay(chaos.rng.uniform(0.02, 0.5 * TTL)) for line in chaos.world.lines], _pass
)
drip = _on_the_line("drip", lambda chaos: [line.drip(100, 0.01) for line in chaos.world.lines], _pass)

EVERYWHERE = {
    kill: 4,
    stop: 6,
    stall_interpreter: 3,
    terminate_session: 3,
    stop_session: 2,
    drop_reply: 3,
    lock_row: 2,
    clean_up: 2,
    cut: 2,
    delay: 1,
    drip: 1,
    black_hole: 1,
    one_way: 1,
    freeze: 1,
    restart: 1,
}
"""How often each comes, in relation to the others. What befalls everybody comes seldom: else nobody holds a lease."""


def nemeses_of(world: World) -> list[Callable[[Chaos], None]]:
    """Return what may befall a world."""
    wanted = dict(EVERYWHERE)
    if world.clockwork is not None:
        wanted[step_clock] = 1
    if world.pooler is not None:
        wanted[recycle_pooler] = 3
    return [nemesis for nemesis, times in wanted.items() for _ in range(times)]
