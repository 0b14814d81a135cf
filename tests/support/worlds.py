"""Small worlds that tests are told in: clients, rows, locks and processes, and waiting for something with a bound."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, TypeVar

import psycopg
from psycopg import sql

from pglease import PGLease, clock, identity
from pglease.backends.base import Budget
from pglease.backends.postgres import PostgresBackend
from pglease.records import Granted, Lease, Renewal, RenewalOutcome, Request

T = TypeVar("T")

TABLE = "pglease_leases"
STEAL = f"""
UPDATE {TABLE} SET owner_id = %s, lease_id = gen_random_uuid(), fencing_token = fencing_token + 1,
  transitions = transitions + 1, acquired_at = clock_timestamp(), heartbeat_at = clock_timestamp(),
  expires_at = clock_timestamp() + interval '60 s'
WHERE task_name = %s
"""
"""What a rival's takeover does to a row, in one step, so that no renewal comes in between."""


# -- waiting for something, with a bound


def wait_until(condition: Callable[[], T], within: float = 60.0, every: float = 0.01) -> T:
    """Return what `condition` returns as soon as it is true; fail after `within` seconds."""
    until = time.monotonic() + within
    while not (found := condition()):
        assert time.monotonic() < until, f"not within {within} s: {condition}, last answer {found!r}"
        time.sleep(every)
    return found


def always(condition: Callable[[], object], seconds: float, every: float = 0.01) -> None:
    """Fail as soon as `condition` is false within the next `seconds`: for what must go on being so."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        found = condition()
        assert found, f"no longer so: {condition}, last answer {found!r}"
        time.sleep(every)


class Stopwatch:
    """Seconds since it was made."""

    def __init__(self) -> None:
        self._since = time.monotonic()

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._since


# -- clients


@contextmanager
def two_clients(dsn: str, **arguments: Any) -> Iterator[tuple[PGLease, PGLease]]:
    """Two clients that know nothing of each other, `first` and `second`."""
    with PGLease(dsn, owner_id="first", **arguments) as first, PGLease(dsn, owner_id="second", **arguments) as second:
        yield first, second


@contextmanager
def clients(dsn: str, count: int, **arguments: Any) -> Iterator[list[PGLease]]:
    """Many clients, `client-0` and so on."""
    with ExitStack() as stack:
        yield [stack.enter_context(PGLease(dsn, owner_id=f"client-{n}", **arguments)) for n in range(count)]


@contextmanager
def store(dsn: str) -> Iterator[PostgresBackend]:
    """The store itself, without a client's heartbeats."""
    backend = PostgresBackend(dsn)
    try:
        yield backend
    finally:
        backend.close()


def budget(seconds: float = 10.0) -> Budget:
    """So long may one verb take."""
    return Budget.of(seconds, clock.now)


def ask(
    backend: PostgresBackend, name: str, ttl: float = 60.0, owner: str = "somebody", ticket_id: str | None = None
) -> tuple[Any, str]:
    """Ask the store once; return the answer and the id of the try."""
    lease_id = identity.new_lease_id()
    return backend.try_acquire(Request(name, owner, lease_id, ttl, ticket_id=ticket_id), budget()), lease_id


def grant(backend: PostgresBackend, name: str, ttl: float = 60.0, owner: str = "somebody") -> tuple[Lease, str]:
    """Take a name that is free; return the record and the id of the hold."""
    answer, lease_id = ask(backend, name, ttl, owner)
    assert isinstance(answer, Granted), answer
    return answer.lease, lease_id


def renew(backend: PostgresBackend, name: str, lease_id: str, ttl: float = 60.0) -> RenewalOutcome:
    """Renew one hold in the store."""
    (outcome,) = backend.renew([Renewal(name, lease_id, ttl)], budget())
    return outcome


def all_at_once(tasks: list[Callable[[], T]], within: float = 60.0) -> list[T]:
    """Run each task on a thread of its own, from a common start; return their answers, or raise what one raised."""
    barrier = threading.Barrier(len(tasks))
    found: list[Any] = [None] * len(tasks)

    def run(place: int) -> None:
        barrier.wait(within)
        try:
            found[place] = tasks[place]()
        except BaseException as error:  # raised below, in the test's own thread
            found[place] = error

    threads = [threading.Thread(target=run, args=(place,)) for place in range(len(tasks))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(within)
        assert not thread.is_alive(), "a task hangs"
    for answer in found:
        if isinstance(answer, BaseException):
            raise answer
    return found


# -- the table, behind everybody's back


def connect(dsn: str, **options: Any) -> psycopg.Connection[Any]:
    """A plain connection of the test's own, autocommit unless told otherwise."""
    return psycopg.connect(dsn, **{"autocommit": True, **options})


def execute(dsn: str, statement: str, *params: Any) -> list[tuple[Any, ...]]:
    """Run one statement on a connection of its own; return its rows."""
    with connect(dsn) as connection:
        cursor = connection.execute(statement, params or None)
        return cursor.fetchall() if cursor.description else []


def steal(dsn: str, name: str, owner: str = "thief") -> None:
    """Let somebody else have the row, as a takeover would."""
    execute(dsn, STEAL, owner, name)


def expire(dsn: str, name: str) -> None:
    """Let the hold be over, by the store's clock."""
    execute(dsn, f"UPDATE {TABLE} SET expires_at = clock_timestamp() - interval '1 ms' WHERE task_name = %s", name)


def delete(dsn: str, name: str) -> None:
    """Take the row away."""
    execute(dsn, f"DELETE FROM {TABLE} WHERE task_name = %s", name)


def row(dsn: str, name: str) -> tuple[Any, ...] | None:
    """The row to the byte, with what tells whether anybody has written it."""
    rows = execute(dsn, f"SELECT l::text, l.ctid::text, l.xmin::text FROM {TABLE} l WHERE task_name = %s", name)
    return rows[0] if rows else None


def is_free(dsn: str, name: str) -> bool:
    """Whether anybody could take it now."""
    ((free,),) = execute(
        dsn, f"SELECT NOT EXISTS (SELECT FROM {TABLE} WHERE task_name = %s AND expires_at > clock_timestamp())", name
    )
    return bool(free)


def heartbeats(dsn: str, name: str) -> float:
    """The moment of the last confirmed renewal, as the store's epoch."""
    ((epoch,),) = execute(
        dsn, f"SELECT extract(epoch FROM heartbeat_at)::float8 FROM {TABLE} WHERE task_name = %s", name
    )
    return float(epoch)


@contextmanager
def locked_row(dsn: str, name: str, strength: str) -> Iterator[psycopg.Connection[Any]]:
    """A stranger's open transaction that has locked the row: `KEY SHARE` as a guard does, `UPDATE` as a rival does."""
    with connect(dsn, autocommit=False) as stranger:
        statement = sql.SQL("SELECT 1 FROM {} WHERE task_name = %s FOR {}").format(
            sql.Identifier(TABLE), sql.SQL(strength)
        )
        assert stranger.execute(statement, (name,)).fetchall() == [(1,)]
        yield stranger
        stranger.rollback()


@contextmanager
def nobody_waits(dsn: str) -> Iterator[None]:
    """Watch all the while that no session of this database waits for a lock; fail at the end if one did."""
    done, looking = threading.Event(), threading.Event()
    seen: list[tuple[Any, ...]] = []

    def watch() -> None:
        with connect(dsn) as connection:
            while not done.is_set():
                seen.extend(
                    connection.execute(
                        "SELECT query, wait_event FROM pg_stat_activity "
                        "WHERE datname = current_database() AND wait_event_type = 'Lock'"
                    ).fetchall()
                )
                looking.set()
                done.wait(0.002)

    thread = threading.Thread(target=watch)
    thread.start()
    assert looking.wait(10), "nobody looks"
    try:
        yield
    finally:
        done.set()
        thread.join(10)
    assert not seen, f"somebody waited for a lock: {seen[0]}"


# -- processes

_PRELUDE = """
import sys
from pglease import *
dsn = sys.argv[1]
def say(*words): print(*words, flush=True)
def hear(): return sys.stdin.readline().strip()
"""


class Child:
    """A Python process that answers line by line. `dsn`, `say` and `hear` are there for its script."""

    def __init__(self, script: str, *arguments: str, first: str = "", prefix: Sequence[str] = ()) -> None:
        self.process = subprocess.Popen(
            [*prefix, sys.executable, "-W", "error", "-c", first + _PRELUDE + script, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def hear(self, within: float = 60.0) -> str:
        """Return the next line it says."""
        assert self.process.stdout is not None
        timer = threading.Timer(within, self.process.kill)
        timer.start()
        try:
            line = self.process.stdout.readline()
        finally:
            timer.cancel()
        if not line:
            self.process.kill()
            raise AssertionError(f"the process said nothing more; its errors: {self.process.stderr.read()}")  # type: ignore[union-attr]
        return line.strip()

    def tell(self, line: str = "") -> None:
        """Give it a line to read."""
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()

    def send(self, signum: int) -> None:
        """Send it a signal."""
        self.process.send_signal(signum)

    def end(self, within: float = 60.0) -> tuple[int, str]:
        """Wait for its end; return its exit code and what it wrote to standard error."""
        _, errors = self.process.communicate(timeout=within)
        return self.process.returncode, errors

    def bury(self, within: float = 10.0) -> None:
        """Kill it, whatever it does."""
        self.process.kill()
        self.process.communicate(timeout=within)


@contextmanager
def child(script: str, *arguments: str, first: str = "") -> Iterator[Child]:
    """A process that is surely gone afterwards; `first` is what it does before it imports pglease."""
    process = Child(script, *arguments, first=first)
    try:
        yield process
    finally:
        process.bury()
