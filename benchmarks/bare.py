"""The least that anybody could do on PostgreSQL: the same statements, prepared, on one connection of psycopg.

Without a pool, a deadline, a renewer or a record. For a losing try it is a `SELECT` of the holder's record by its key;
for a guard, the plainest statement that locks that row, in the same kind of transaction.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from urllib.parse import quote

import psycopg

from pglease.backends.postgres_connections import OURS_ALONE
from pglease.backends.postgres_sql import Statements
from pglease.schema import PROTOCOL, TableNames
from pglease.testing.local_postgres import LocalPostgres

TABLE = "pglease_leases"
GUARD = "SELECT 1 FROM public.pglease_leases WHERE task_name = %s FOR KEY SHARE"


def statements(table: str = TABLE) -> Statements:
    """Return what pglease says."""
    return Statements.of(TableNames(table, "public"), PROTOCOL)


class Bare:
    """One connection, one name at a time; the table must be there."""

    def __init__(self, dsn: str, name: str = "bare", *, table: str = TABLE) -> None:
        self.link = psycopg.connect(dsn, autocommit=True, prepare_threshold=0)
        self.link.execute(OURS_ALONE)
        self.sql = statements(table)
        self.name = name

    def close(self) -> None:
        self.link.close()

    def acquire(self, name: str, ttl: float = 60.0) -> str | None:
        """Return the id of the hold, or None if somebody else has it."""
        lease_id = os.urandom(16).hex()
        params = {"name": name, "owner": "bare", "lease_id": lease_id, "ttl": ttl, "metadata": None, "in_turn": False}
        rows = self.link.execute(self.sql.try_acquire, params).fetchall()
        return lease_id if rows and rows[0][0] == "granted" else None

    def release(self, name: str, lease_id: str | None) -> None:
        """Give it back; again while a rival's try has the row locked, or it would stay ours until it lapses."""
        params = {"name": name, "lease_id": lease_id, "min_hold": 0.0}
        while self.link.execute(self.sql.release, params).fetchall()[0][0] == "busy":
            pass

    def pair(self) -> None:
        self.pair_of(self.name)

    def pair_of(self, name: str) -> None:
        self.release(name, self.acquire(name))

    def look(self) -> None:
        self.link.execute(self.sql.look, {"name": "held", "lease_id": None}).fetchone()

    def renew(self, names: list[str], lease_ids: list[str | None], ttl: float = 3600.0) -> None:
        params = {"names": names, "lease_ids": lease_ids, "ttls": [ttl] * len(names)}
        self.link.execute(self.sql.renew, params).fetchall()


@contextmanager
def postgres(*, flush: bool, **settings: object) -> Iterator[LocalPostgres]:
    """Start a server whose commits reach the disk, or need not."""
    commit = "on" if flush else "off"
    with LocalPostgres(fsync=flush, settings={"synchronous_commit": commit, **settings}) as server:
        yield server


def by_socket(server: LocalPostgres) -> str:
    """Return its address by Unix socket."""
    return f"postgresql://postgres@/{server.dbname}?host={quote(str(server.socket_dir), safe='')}&port={server.port}"
