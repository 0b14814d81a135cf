"""What tests look for behind the hybrid backend's back: whose session is which, and which locks there are."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import psycopg

from pglease import PGLease, clock
from pglease.backends.base import Budget
from pglease.backends.hybrid import HybridPostgresBackend
from tests.support.worlds import TABLE, execute, wait_until

LOCKS = """
SELECT a.pid, a.application_name FROM pg_locks k JOIN pg_stat_activity a USING (pid)
WHERE k.locktype = 'advisory' AND k.granted AND a.datname = current_database()
"""


def hybrid(dsn: str) -> str:
    """Return the address of the hybrid backend on that database."""
    return f"hybrid+{dsn}"


@contextmanager
def clients(dsn: str, *labels: str, **arguments: Any) -> Iterator[list[PGLease]]:
    """Hybrid clients that know nothing of each other."""
    opened = [PGLease(hybrid(dsn), owner_id=label, **arguments) for label in labels]
    try:
        yield opened
    finally:
        for client in opened:
            client.close()


@contextmanager
def stores(dsn: str, count: int, **knobs: Any) -> Iterator[list[HybridPostgresBackend]]:
    """Hybrid stores, without a client's heartbeats."""
    opened = [HybridPostgresBackend(dsn, **knobs) for _ in range(count)]
    try:
        yield opened
    finally:
        for backend in opened:
            backend.close()


def advisory_locks(dsn: str) -> list[tuple[Any, ...]]:
    """Return the session and its name of every advisory lock in the database."""
    return execute(dsn, LOCKS)


def pid_of(backend: HybridPostgresBackend) -> int:
    """Return the server's process of a backend's session; it is connected if need be."""
    return backend._keeper.session(Budget.of(20.0, clock.now)).mark.pid


def mark_of(dsn: str, name: str) -> int | None:
    """Return the process of the session that a row is bound to."""
    ((pid,),) = execute(dsn, f"SELECT session_pid FROM {TABLE} WHERE task_name = %s", name)
    return None if pid is None else int(pid)


def is_bound(dsn: str, name: str) -> bool:
    """Tell whether the row has the mark of a session, and that session the lock."""
    return mark_of(dsn, name) in {pid for pid, _ in advisory_locks(dsn)}


def end(dsn: str, pid: int | None) -> None:
    """Have the server end a session; return when it is gone."""
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute("SELECT pg_terminate_backend(%s)", (pid,))
        gone = "SELECT NOT EXISTS (SELECT FROM pg_stat_activity WHERE pid = %s)"
        wait_until(lambda: connection.execute(gone, (pid,)).fetchone() == (True,))


def end_session_of(dsn: str, name: str) -> None:
    """Have the server end the session that a row is bound to."""
    end(dsn, wait_until(lambda: mark_of(dsn, name)))
