"""The session whose death frees what its holder holds: one direct connection that does nothing else.

PostgreSQL ends a session, and with it its advisory locks, within a millisecond of the death of the process behind it.
It ends one, too, when an administrator says so, when the network is cut, when the server restarts; and then the process
lives and is told nothing. So the session is watched: an end of file wakes whoever waits on its socket, and a ping has
the kernel notice a cut.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import psycopg

from pglease import clock
from pglease.backends.cutoff import Cutoff
from pglease.backends.postgres_link import Row
from pglease.backends.postgres_psycopg import OwnLink
from pglease.errors import BackendMisconfigured, BackendUnavailable

log = logging.getLogger("pglease")

PING_EVERY = 0.5
"""Seconds between two pings of a quiet session, unless strictness asks for more."""

CLIENT_SETTINGS: Mapping[str, Any] = {
    "application_name": "pglease session",
    "keepalives": 1,
    "keepalives_idle": 1,
    "keepalives_interval": 1,
    "keepalives_count": 2,
    "tcp_user_timeout": 1000,
}
"""So a cut is noticed here a little before the server notices it, whose settings follow. The keepalives are for a quiet
line, the time-out for one on which something was sent and not acknowledged; each alone leaves the other case for ten
seconds and more (measured)."""

SERVER_SETTINGS: Mapping[str, str] = {
    "tcp_keepalives_idle": "1",
    "tcp_keepalives_interval": "1",
    "tcp_keepalives_count": "2",
    "tcp_user_timeout": "1500",
    "client_connection_check_interval": "200",
    "idle_session_timeout": "0",
    "statement_timeout": "0",
    "transaction_timeout": "0",
    "lock_timeout": "0",
    "synchronous_commit": "off",
    "default_transaction_isolation": "read committed",
    "default_transaction_read_only": "off",
    "jit": "off",
    "enable_seqscan": "on",
}
"""Only marks are written here, whose loss in a crash is harmless since the crash ends the session; so no commit waits
for a disk or a standby, which would keep the server from noticing that we are gone."""

_SETTLE_IN = """
SELECT pg_catalog.set_config(s.name, w.value, false)
FROM ROWS FROM (pg_catalog.unnest(%(names)s::text[]), pg_catalog.unnest(%(values)s::text[])) AS w(name, value)
JOIN pg_catalog.pg_settings s ON s.name = w.name
"""
"""Those that this server knows."""
_WHO = """
SELECT a.pid, pg_catalog.to_char(a.backend_start AT TIME ZONE 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS.US"Z"'),
       pg_catalog.pg_is_in_recovery(),
       pg_catalog.current_setting('max_locks_per_transaction')::int
         * pg_catalog.current_setting('max_connections')::int
FROM pg_catalog.pg_stat_get_activity(pg_catalog.pg_backend_pid()) a
"""
_PING = "SELECT pg_catalog.pg_backend_pid()"
_TRY_LOCK = "SELECT pg_catalog.pg_try_advisory_lock(%(key)s::bigint)"
_UNLOCK = "SELECT pg_catalog.pg_advisory_unlock(%(key)s::bigint)"


@dataclass(frozen=True, slots=True)
class Mark:
    """Which session: a process id alone comes again.

    Attributes:
        pid: of the server's process.
        started: when it began, as text that PostgreSQL reads back to the microsecond under any setting.
    """

    pid: int
    started: str


class SessionDied(BackendUnavailable):
    """The session is gone. Afterwards: what was bound to it is free for others, or soon will be."""


class Session:
    """One connected session. Used by its keeper's thread alone, but for `until`, `mark` and `interrupt`.

    Attributes:
        mark: which one it is.
        capacity: how many locks the server's shared memory was made for.
        until: the boot clock until which its holds may be believed without another sign of life; infinity unless
            strict.
        vetted: whether it was compared with another connection, and has our settings.
        died: whether it is over.
    """

    def __init__(self, connection: psycopg.Connection[Any], mark: Mark, capacity: int, silence: float) -> None:
        self._connection = connection
        self._link = OwnLink(connection, in_transactions=False)
        self._silence = silence
        self._cutoff = Cutoff(connection.fileno())
        self.mark = mark
        self.capacity = capacity
        self.sent_at = clock.now()
        self.until = self.sent_at + silence
        self.vetted = False
        self.died = False

    @classmethod
    def open(cls, params: Mapping[str, Any], *, silence: float, first: bool) -> Session:
        """Connect, and look whether it is a session of our own on a primary.

        Args:
            params: libpq's.
            silence: seconds after an answer for which the next one may be awaited; infinity for as long as it takes.
            first: whether this backend had no session before: then a standby is a mistake, later it is a failover.

        Raises:
            BackendMisconfigured: a pooler in between; a standby, the first time.
            BackendUnavailable: a standby, later.
        """
        connection = psycopg.Connection.connect("", autocommit=True, prepare_threshold=0, **params)
        try:
            return cls._looked_at(connection, silence=silence, first=first)
        except BaseException:
            connection.close()
            raise

    @classmethod
    def _looked_at(cls, connection: psycopg.Connection[Any], *, silence: float, first: bool) -> Session:
        ((pid, started, in_recovery, capacity),) = connection.execute(_WHO, prepare=False).fetchall()
        if pid != claimed_pid(connection):
            raise pooler_in_between()
        if in_recovery:
            raise _standby(first=first)
        return cls(connection, Mark(pid, started), capacity, silence)

    def settle_in(self) -> None:
        """Make the session's settings ours, once it is known that nobody else will be given it."""
        self.ask(_SETTLE_IN, {"names": list(SERVER_SETTINGS), "values": list(SERVER_SETTINGS.values())})
        self.vetted = True

    def fileno(self) -> int:
        """Return the socket, to be waited on: readable when nobody asked means that it is over."""
        return self._connection.pgconn.socket

    def listen(self) -> None:
        """Read what came unasked; raises the driver's error for an end of file."""
        self._connection.pgconn.consume_input()

    def ask(self, statement: str, params: Mapping[str, Any] | None = None) -> list[Row]:
        """Run one short statement. Raises the driver's errors; see `is_over`."""
        sent_at = clock.now()
        if self._silence == float("inf"):
            rows = self._link.rows(statement, params)
        else:
            rows = self._ask_in_time(statement, params)
        self._answered(sent_at)
        return rows

    def _ask_in_time(self, statement: str, params: Mapping[str, Any] | None) -> list[Row]:
        self._cutoff.arm(self.until)
        try:
            return self._link.rows(statement, params)
        finally:
            self._cutoff.disarm()

    def _answered(self, sent_at: float) -> None:
        """Count on it for longer, from before the question on; never again once that time was over."""
        if clock.now() >= self.until:
            self.died = True  # before anybody gives a lock back, and makes a plain hold of one that is over
            raise SessionDied("the session was silent for too long")
        self.sent_at = sent_at
        self.until = sent_at + self._silence

    @property
    def ping_at(self) -> float:
        """The boot clock when it should be asked for a sign of life."""
        return self.sent_at + min(PING_EVERY, self._silence / 4)

    def ping(self) -> None:
        """Ask for a sign of life."""
        if self.ask(_PING) != [(self.mark.pid,)]:
            raise SessionDied("another session answers on this connection")

    def try_lock(self, key: int) -> bool:
        """Try to get the advisory lock. The caller keeps account: it would be got twice."""
        try:
            return bool(self.ask(_TRY_LOCK, {"key": key})[0][0])
        except psycopg.Error as error:
            if self.is_over():
                raise
            self.ask(_UNLOCK, {"key": key})  # cancelled or out of memory: it may be ours all the same
            log.warning("an advisory lock could not be tried: %s", str(error).partition("\n")[0])
            return False

    def unlock(self, key: int) -> None:
        """Give an advisory lock back. One that was not there means that our account of this session is wrong."""
        if self.ask(_UNLOCK, {"key": key}) != [(True,)]:
            raise SessionDied("an advisory lock of this session was lost")

    def is_over(self) -> bool:
        """Tell whether the connection is of no use any more."""
        return self.died or self._connection.closed

    def interrupt(self) -> None:
        """Wake its thread out of a conversation that nobody answers; callable from any thread."""
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(self.fileno())) as twin:
            twin.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Say goodbye, or just leave."""
        self.died = True
        self._connection.close()

    def abandon(self) -> object:
        """Let go of it in a forked child, which must neither talk on it nor keep it alive; return what to keep.

        The descriptor is pointed elsewhere and not closed: with a copy open in a child, the server would not notice
        its owner's death; and a number that is free would become somebody else's.
        """
        nowhere = os.open(os.devnull, os.O_RDWR)
        os.dup2(nowhere, self.fileno())
        os.close(nowhere)
        return self


def claimed_pid(connection: psycopg.Connection[Any]) -> int:
    """Return what the other end said at login about its process. A pooler makes the number up."""
    return connection.info.backend_pid


def pooler_in_between() -> BackendMisconfigured:
    """Return the error for a connection whose other end is no session of ours."""
    return BackendMisconfigured(
        "a connection pooler stands between us and PostgreSQL: an advisory lock would stay on a session of the "
        "pooler's. Connect directly for hybrid+postgresql://, or use postgresql://, which works through a pooler"
    )


def _standby(*, first: bool) -> Exception:
    if first:
        return BackendMisconfigured(
            "the server is a standby: leases are granted by the primary alone. Connect to the primary, or name all "
            "servers in the address (host=a,b), and the one that takes writes is chosen"
        )
    return BackendUnavailable("the server is a standby; leases need the primary")
