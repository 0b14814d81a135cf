"""What tests look for behind the hybrid backend's back: whose session is which, and which locks there are."""

from __future__ import annotations

import psycopg

from pglease import clock
from pglease.backends.base import Budget
from pglease.backends.hybrid import HybridPostgresBackend

LOCKS = """
SELECT a.pid, a.application_name FROM pg_locks k JOIN pg_stat_activity a USING (pid)
WHERE k.locktype = 'advisory' AND k.granted AND a.datname = current_database()
"""


def advisory_locks(dsn: str) -> list[tuple[int, str]]:
    """Return the session and its name of every advisory lock in the database."""
    with psycopg.connect(dsn, autocommit=True) as connection:
        return connection.execute(LOCKS).fetchall()


def pid_of(backend: HybridPostgresBackend) -> int:
    """Return the server's process of a backend's session; it is connected if need be."""
    return backend._keeper.session(Budget.of(20.0, clock.now)).mark.pid
