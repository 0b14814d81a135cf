"""Plays the main job for real and checks it: processes are killed, the database is asked, nothing is taken for granted.

Three workers contend for one lease. One gets it and renews it past its ttl; it is killed; another takes over with a
larger fencing token; the dead worker's last write, replayed under its old hold, is refused; the second hands over by
stopping in order. Each step is a `Fact`: what should be true, and whether the database and the processes say so.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import secrets
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import psycopg

from pglease import clock
from pglease.backends.base import fencing
from pglease.client import PGLease
from pglease.demo.timeline import Bar
from pglease.demo.worker import WRITE
from pglease.errors import FencedError
from pglease.records import Claim

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from pglease.records import Lease, Tenure

LEASE = "daily-report"
TTL = 3.0
WORKERS = ("worker-1", "worker-2", "worker-3")
PATIENCE = 15.0
"""Seconds any one step may take before the story gives up on it."""
SCENE = 1.6
"""Seconds the later holders work."""
LOOK = 0.05
"""Seconds between two looks at the database."""


@dataclass(frozen=True, slots=True)
class Fact:
    """What should have happened, whether it did, and what was seen."""

    text: str
    true: bool
    seen: dict[str, Any] = field(default_factory=dict)


class StoryError(Exception):
    """A step of the story did not come to pass in its time; what follows it cannot be told."""


class Worker:
    """One worker process, and what it has reported."""

    def __init__(self, name: str, url: str, schema: str, news: queue.Queue[tuple[str, dict[str, Any]]]) -> None:
        self.name = name
        environment = {
            **os.environ,
            "DEMO_URL": url,  # in the environment, not among the arguments: those are for everybody to read
            "DEMO_SCHEMA": schema,
            "DEMO_LEASE": LEASE,
            "DEMO_WORKER": name,
            "DEMO_TTL": str(TTL),
        }
        if not sys.pycache_prefix:
            environment["PYTHONDONTWRITEBYTECODE"] = "1"  # the demo leaves nothing behind
        self.process = subprocess.Popen(  # our own module
            [sys.executable, "-m", "pglease.demo.worker"],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C is for the story, which then ends them in order
        )
        threading.Thread(target=self._listen, args=(news,), daemon=True).start()

    def _listen(self, news: queue.Queue[tuple[str, dict[str, Any]]]) -> None:
        assert self.process.stdout is not None  # it is a pipe
        for line in self.process.stdout:
            with contextlib.suppress(ValueError):
                news.put((self.name, json.loads(line)))

    def alive(self) -> bool:
        """Tell whether the process runs."""
        return self.process.poll() is None

    def end(self, number: int) -> int:
        """Send a signal, wait for the end, and return the exit code (-n when signal n ended it)."""
        self.process.send_signal(number)
        return self.process.wait(PATIENCE)

    def clear_away(self) -> None:
        """Make sure that nothing of it is left."""
        with contextlib.suppress(ProcessLookupError):
            self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()


@dataclass(slots=True)
class Story:
    """The play, on one server.

    Attributes:
        url: the server.
        say: called with each line of the story as it happens.
        facts: what was found true or false.
        bars: who waited and held when, for the timeline.
        tenures: who held the lease, as the store remembers it.
    """

    url: str
    say: Callable[[str], None]
    facts: list[Fact] = field(default_factory=list)
    bars: list[Bar] = field(default_factory=list)
    tenures: list[Tenure] = field(default_factory=list)
    killed: tuple[str, float] = ("", 0.0)
    total: float = 0.0
    _schema: str = field(init=False, default="")
    _began: float = field(init=False, default=0.0)
    _workers: dict[str, Worker] = field(init=False, default_factory=dict)
    _news: queue.Queue[tuple[str, dict[str, Any]]] = field(init=False, default_factory=queue.Queue)
    _waiting_since: dict[str, float] = field(init=False, default_factory=dict)
    _held_since: dict[str, tuple[float, int]] = field(init=False, default_factory=dict)

    def play(self) -> bool:
        """Play it to its end; return whether all of it came true. Leaves no process and nothing in the database."""
        with self._stage() as (leases, table):
            self._began = clock.now()
            try:
                self._perform(leases, table)
            except StoryError as missed:
                self._fact(str(missed), False)
            self.total = self._elapsed()
            self._close_bars()
        gone = not any(worker.alive() for worker in self._workers.values())
        self._fact("no worker process is left", gone)
        return all(fact.true for fact in self.facts)

    @contextlib.contextmanager
    def _stage(self) -> Iterator[tuple[PGLease, psycopg.Connection[Any]]]:
        self._schema = f"pglease_demo_{secrets.token_hex(4)}"
        with psycopg.connect(self.url, autocommit=True) as table:
            table.execute(f"CREATE SCHEMA {self._schema}".encode())
            try:
                table.execute(f"CREATE TABLE {self._schema}.report (token bigint, author text, lines int)".encode())
                table.execute(f"INSERT INTO {self._schema}.report VALUES (0, '', 0)".encode())  # noqa: S608  # the name is ours
                with PGLease(self.url, owner_id="story", schema=self._schema) as leases:
                    leases.get_lease(LEASE)
                    yield leases, table
                    self.tenures = leases.history(LEASE)
            finally:
                for worker in self._workers.values():
                    worker.clear_away()
                with contextlib.suppress(psycopg.Error):  # a server that is gone has nothing left to drop
                    table.execute(f"DROP SCHEMA {self._schema} CASCADE".encode())

    def _perform(self, leases: PGLease, table: psycopg.Connection[Any]) -> None:
        first = self._one_of_three(leases)
        first = self._past_its_ttl(leases, first)
        claim = self._claim(table, first)
        dead = self._kill(leases, first)
        second = self._take_over(leases, dead)
        self._stale_write(leases, table, claim, dead, second)
        self._dwell()
        third = self._hand_over(leases, second)
        self._dwell()
        self._curtain(leases, third)

    def _one_of_three(self, leases: PGLease) -> Lease:
        self._tell(f"three worker processes ask for {LEASE!r} (ttl {TTL:g} s)")
        for name in WORKERS:
            self._workers[name] = Worker(name, self.url, self._schema, self._news)
        self._until(lambda: len(self._waiting_since) == len(WORKERS) and bool(self._held_since), "nobody got the lease")
        lease = self._record(leases)
        holders = list(self._held_since)
        self._tell(f"{lease.owner_id} gets it (fencing token {lease.fencing_token}); the others wait")
        self._fact(
            "exactly one of three workers got the lease, and the database names the same one",
            holders == [lease.owner_id] and all(worker.alive() for worker in self._workers.values()),
            holder=lease.owner_id, token=lease.fencing_token,
        )  # fmt: skip
        return lease

    def _past_its_ttl(self, leases: PGLease, first: Lease) -> Lease:
        def old_enough() -> bool:
            return (self._record(leases).seen_at - first.acquired_at).total_seconds() > 1.5 * TTL

        self._until(old_enough, "time did not pass")
        lease = self._record(leases)
        held = (lease.seen_at - lease.acquired_at).total_seconds()
        self._tell(f"{lease.owner_id} has held it for {held:.1f} s, longer than its ttl, by renewing it")
        self._fact(
            "the holder renewed the lease past its ttl: same holder, same token, still held",
            (lease.owner_id, lease.fencing_token, lease.acquired_at)
            == (first.owner_id, first.fencing_token, first.acquired_at)
            and held > TTL and lease.heartbeat_at > first.heartbeat_at and not lease.is_expired(),
            held=round(held, 2), token=lease.fencing_token,
        )  # fmt: skip
        return lease

    def _kill(self, leases: PGLease, first: Lease) -> Lease:
        code = self._workers[first.owner_id].end(signal.SIGKILL)
        self.killed = (first.owner_id, self._elapsed())
        lease = self._record(leases)
        left = lease.time_remaining()
        self._bar_of(first.owner_id, self._elapsed())
        self.bars.append(Bar(first.owner_id, "running out", self._elapsed(), self._elapsed() + left))
        self._tell(f"kill -9 {first.owner_id}: it could release nothing, so its lease has {left:.1f} s to run")
        self._fact(
            "the holder was killed with kill -9 and its lease stayed in the database",
            code == -signal.SIGKILL and lease.fencing_token == first.fencing_token and not lease.is_expired(),
            exit_code=code, left=round(left, 2),
        )  # fmt: skip
        return lease

    def _take_over(self, leases: PGLease, dead: Lease) -> Lease:
        self._until(
            lambda: self._record(leases).fencing_token != dead.fencing_token,
            "nobody took over after the holder's death",
        )
        lease = self._record(leases)
        after = (lease.acquired_at - dead.expires_at).total_seconds()
        self._tell(
            f"{lease.owner_id} takes over {after * 1000:.0f} ms after that, with fencing token {lease.fencing_token}"
        )
        self._fact(
            "another worker took over, after the dead one's lease had run out, with a larger fencing token",
            lease.owner_id in WORKERS and lease.owner_id != dead.owner_id and after >= 0
            and lease.fencing_token > dead.fencing_token,
            holder=lease.owner_id, token=lease.fencing_token, after=round(after, 3),
        )  # fmt: skip
        return lease

    def _claim(self, table: psycopg.Connection[Any], holder: Lease) -> Claim:
        """Note what the holder shows when it writes, to play its part once it is dead."""
        row = table.execute(f"SELECT lease_id::text FROM {self._schema}.pglease_leases".encode()).fetchone()  # noqa: S608  # the name is ours
        if row is None or row[0] is None:
            raise StoryError("the holder has no id in the table")
        return Claim(LEASE, row[0], holder.fencing_token)

    def _stale_write(
        self, leases: PGLease, table: psycopg.Connection[Any], claim: Claim, dead: Lease, second: Lease
    ) -> None:
        self._until(
            lambda: self._report(table)[:2] == (second.fencing_token, second.owner_id), "the new holder wrote nothing"
        )
        before = self._report(table)
        refused = self._is_refused(leases, table, claim, dead)
        now = self._report(table)
        self._tell(
            f"{dead.owner_id}'s last write arrives late, guarded by token {dead.fencing_token}: "
            + ("PostgreSQL refuses it" if refused else "PostgreSQL TOOK it")
        )
        self._fact(
            "the dead worker's late write was refused by its guard, and the report is the new holder's",
            refused and now[:2] == (second.fencing_token, second.owner_id) and now[2] >= before[2] > 0,
            token=dead.fencing_token, table_token=now[0], author=now[1],
        )  # fmt: skip

    def _is_refused(self, leases: PGLease, table: psycopg.Connection[Any], claim: Claim, dead: Lease) -> bool:
        """Do what the dead worker would have done next."""
        write = WRITE.format(schema=self._schema).encode()
        try:
            with table.transaction():
                fencing(leases.backend, "guard").guard(claim, table)
                table.execute(write, {"token": dead.fencing_token, "author": dead.owner_id})
        except FencedError:
            return True
        return False

    def _hand_over(self, leases: PGLease, second: Lease) -> Lease:
        due = self._record(leases).expires_at
        code = self._workers[second.owner_id].end(signal.SIGTERM)
        self._until(
            lambda: self._record(leases).fencing_token != second.fencing_token, "nobody took over after the release"
        )
        lease = self._record(leases)
        self._until(lambda: lease.owner_id in self._held_since, "the last worker did not say that it holds the lease")
        early = (due - lease.acquired_at).total_seconds()
        self._tell(
            f"{second.owner_id} is told to stop and releases: {lease.owner_id} has it {early:.1f} s before its ttl ends"
        )
        self._fact(
            "a holder that stops in order hands over at once, without waiting for the ttl",
            code == 0 and lease.owner_id in WORKERS and lease.owner_id not in (second.owner_id, self.killed[0])
            and lease.fencing_token > second.fencing_token and early > 0,
            holder=lease.owner_id, token=lease.fencing_token, early=round(early, 3),
        )  # fmt: skip
        return lease

    def _curtain(self, leases: PGLease, third: Lease) -> None:
        code = self._workers[third.owner_id].end(signal.SIGTERM)
        lease = self._record(leases)
        self._until(lambda: third.owner_id not in self._held_since, "the last worker did not say that it released")
        self._tell(f"{third.owner_id} is told to stop as well: the lease is free")
        self._fact(
            "the last holder released the lease when it stopped",
            code == 0 and lease.is_expired() and lease.fencing_token == third.fencing_token,
            exit_code=code,
        )  # fmt: skip

    def _dwell(self) -> None:
        """Let the holder work for a while, for the picture's sake."""
        until = clock.now() + SCENE
        self._until(lambda: clock.now() >= until, "time did not pass")

    def _until(self, true: Callable[[], bool], otherwise: str) -> None:
        """Listen to the workers until something is true."""
        deadline = clock.now() + PATIENCE
        while True:
            self._hear_all()
            if true():
                return
            if clock.now() > deadline:
                raise StoryError(otherwise)
            time.sleep(LOOK)

    def _hear_all(self) -> None:
        with contextlib.suppress(queue.Empty):
            while True:
                self._hear(*self._news.get_nowait())

    def _hear(self, worker: str, report: dict[str, Any]) -> None:
        at = report["at"] - self._began
        if report["event"] == "ready":
            self._waiting_since[worker] = at
        elif report["event"] == "acquired":
            self.bars.append(Bar(worker, "waiting", self._waiting_since.get(worker, at), at))
            self._held_since[worker] = (report["at"], report["token"])
        elif worker in self._held_since:
            self._bar_of(worker, at)
            self._waiting_since.pop(worker, None)

    def _bar_of(self, worker: str, end: float) -> None:
        since, token = self._held_since.pop(worker)
        self.bars.append(Bar(worker, "held", since - self._began, end, f" token {token} "))
        self._waiting_since.pop(worker, None)

    def _close_bars(self) -> None:
        self._hear_all()
        for worker in list(self._held_since):
            self._bar_of(worker, self.total)
        for worker, since in self._waiting_since.items():
            self.bars.append(Bar(worker, "waiting", since, self.total))

    def _record(self, leases: PGLease) -> Lease:
        lease = leases.get_lease(LEASE)
        if lease is None:
            raise StoryError(f"the database knows no lease {LEASE!r}")
        return lease

    def _report(self, table: psycopg.Connection[Any]) -> tuple[int, str, int]:
        row = table.execute(f"TABLE {self._schema}.report".encode()).fetchone()
        if row is None:
            raise StoryError("the report is gone")
        return row[0], row[1], row[2]

    def _elapsed(self) -> float:
        return clock.now() - self._began

    def _tell(self, text: str) -> None:
        self.say(f"{self._elapsed():5.1f} s  {text}")

    def _fact(self, text: str, true: bool, **seen: Any) -> None:
        self.facts.append(Fact(text, bool(true), seen))
