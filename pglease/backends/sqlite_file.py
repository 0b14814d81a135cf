"""The lease file: how it is found fit, opened, shared between threads, and left alone by forks.

Nobody but SQLite may open the file. A process that closes *any* descriptor of a file loses all its POSIX locks on it,
so a look at the first bytes would let two writers in. What has to be known is asked of SQLite and of `stat`.
"""

from __future__ import annotations

import logging
import os
import random
import sqlite3
import stat
import threading
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import quote

from pglease import forks
from pglease.backends.base import Budget
from pglease.backends.sqlite_errors import Busy, TablesChanged, translated
from pglease.backends.sqlite_host import Host, shared_file_system, this_host
from pglease.backends.sqlite_sql import COLUMNS, META_COLUMNS, PROTOCOL, QUEUE_COLUMNS, Statements
from pglease.errors import BackendClosed, BackendMisconfigured, BackendUnavailable
from pglease.schema import TableNames

log = logging.getLogger("pglease")

T = TypeVar("T")
Identity = tuple[int, int]
Talk = Callable[[sqlite3.Connection], T]

OLDEST = (3, 35, 0)
FIRST_PAUSE, LONGEST_PAUSE = 0.0005, 0.02
"""Seconds between two tries at a lock that another process has. A commit takes less than a millisecond, or a few where
a disk is slow; somebody who has the lock for longer is asked for it fifty times a second."""
PATIENCE = 1.0
"""Seconds a fork or a close waits for a call that is under way. One that takes longer is stuck in the file system."""

_OURS = ("PRAGMA synchronous = FULL", "PRAGMA fullfsync = ON", "PRAGMA trusted_schema = OFF")
"""Every commit is on the disk before it is answered; on macOS that takes `fullfsync`."""


class LeaseFile:
    """One path, and two connections to what is there: one for looking, one for writing.

    A long list keeps no renewal waiting, and the threads of a process queue here and not for the file's lock.

    Args:
        path: absolute.
        names: of the tables.
        create: whether a missing file or table is made.
    """

    def __init__(self, path: Path, names: TableNames, *, create: bool) -> None:
        self.path = path
        self._path = str(path)
        self.sql = Statements.of(names)
        self.names = names
        self.create = create
        self._begin()
        forks.rest_at_forks(self)
        # What brings this to rest must wake it, also when its backend has gone.
        forks.forget_in_children(self, type(self).forget)

    def _begin(self) -> None:
        self.reader, self.writer = Link(self), Link(self)
        self._closed = threading.Event()
        self._unfit: str | None = None
        self._unfit_child: str | None = None
        self._mourned: Identity | None = None

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._closed.is_set()

    def refuse_closed(self) -> None:
        """Say so if it was closed."""
        if self.closed:
            raise BackendClosed(f"the store {self.path} was closed")

    @cached_property
    def host(self) -> Host:
        """The host that we run on, asked at the first use."""
        return this_host()

    def read(self, talk: Talk[T], budget: Budget) -> T:
        """Let `talk` look at the file. It sees what was committed when it began."""

        def look(connection: sqlite3.Connection) -> T:
            answer = talk(connection)
            self._refuse_moved(self.reader)
            return answer

        return self._converse(self.reader, look, budget)

    def write(self, talk: Talk[T], budget: Budget, *, first: Talk[T | None] = lambda _: None) -> T:
        """Let `talk` change the file: it has the write lock, and what it did is on the disk when this returns.

        `first` looks without the lock; if it has an answer, that is all.
        """

        def transaction(connection: sqlite3.Connection) -> T:
            answer = first(connection)
            if answer is None:
                connection.execute("BEGIN IMMEDIATE")
                answer = talk(connection)
            self._refuse_moved(self.writer)  # as late as can be: a grant in a file that has gone would exclude nobody
            if connection.in_transaction:
                self.writer.committing = True
                connection.execute("COMMIT")
            return answer

        return self._converse(self.writer, transaction, budget)

    def _converse(self, link: Link, talk: Talk[T], budget: Budget) -> T:
        """Talk; while somebody else has the lock, try again until the budget is spent."""
        pause, again = FIRST_PAUSE, True
        while True:
            self.refuse_closed()
            try:
                return link.lend(talk, budget)
            except Busy as busy:
                left = budget.left()
                if left <= 0:
                    raise BackendUnavailable(f"{busy} that does not let go of it") from busy
            except (TablesChanged, Moved):
                if not again:
                    raise
                again, left = False, budget.left()
                link.drop()
                continue
            self._closed.wait(min(left, pause * random.uniform(0.5, 1)))
            pause = min(2 * pause, LONGEST_PAUSE)

    # -- opening -------------------------------------------------------------------------------------------------------

    def opened(self) -> tuple[sqlite3.Connection, Identity]:
        """Return a new connection to a file that was found fit, and which file that is."""
        self._refuse_unfit()
        before = self._identity_now()
        mode = "rwc" if self.create else "rw"
        connection = sqlite3.connect(
            f"file:{quote(str(self.path))}?mode={mode}",
            uri=True,
            timeout=0,  # we wait ourselves, within the budget
            isolation_level=None,
            check_same_thread=False,
        )
        try:
            for pragma in _OURS:
                connection.execute(pragma)
            self._settle(connection)
            return connection, self._identity_of_one(before)
        except BaseException:
            connection.close()
            raise

    def _refuse_unfit(self) -> None:
        if self._unfit:
            raise BackendMisconfigured(self._unfit)
        if sqlite3.sqlite_version_info < OLDEST:
            raise BackendMisconfigured(f"SQLite {sqlite3.sqlite_version} is too old: leases need 3.35 or newer")
        found = self._stat()
        if found is None and not self.create:
            raise BackendMisconfigured(f"there is no lease file {self.path}, and auto_initialize is off")
        if found is not None and not stat.S_ISREG(found.st_mode):
            raise BackendMisconfigured(f"{self.path} is no regular file, and cannot be a lease file")
        if found is not None and found.st_nlink > 1:
            raise BackendMisconfigured(
                f"{self.path} has more than one name (hard links), under which SQLite would take it for several files"
            )
        kind = shared_file_system(self.path.parent)
        if kind:
            raise BackendMisconfigured(
                f"{self.path} is on a file system of type {kind}, which other hosts may write to and whose locks "
                "cannot be relied on: a lease file belongs on a local disk. For leases between hosts use PostgreSQL"
            )

    def _settle(self, connection: sqlite3.Connection) -> None:
        """Find our tables, or make them in a file that has them not."""
        mode = _journal_mode(connection)
        if mode != "wal":
            empty = connection.execute("SELECT count(*) FROM sqlite_master").fetchone() == (0,)
            mode = _journal_mode(connection)  # between the two somebody else may have made it ours
            if not empty and mode != "wal":
                raise BackendMisconfigured(
                    f"{self.path} is somebody's SQLite file with journal mode {mode!r}, and was left as it is: leases "
                    "need `PRAGMA journal_mode = WAL` on it, or a file of their own"
                )
            (mode,) = connection.execute("PRAGMA journal_mode = WAL").fetchone()
            if mode != "wal":
                raise BackendMisconfigured(f"{self.path}: SQLite cannot use its write-ahead log on this file system")
        connection.execute("BEGIN")  # one snapshot: somebody may be making them
        found = self._found(connection)
        connection.execute("COMMIT")
        if not found:
            self._make(connection)

    def _found(self, connection: sqlite3.Connection) -> bool:
        """Tell whether our tables are there; refuse what only bears their names."""
        table = self.names.table
        wanted = {table: COLUMNS, f"{table}_meta": META_COLUMNS, f"{table}_queue": QUEUE_COLUMNS}
        found = {name: _columns(connection, name) for name in wanted}
        if not any(found.values()):
            return False
        if any(not set(wanted[name]) <= found[name] for name in wanted):
            raise BackendMisconfigured(
                f"{self.path} has a table {table} that is not of this pglease, and was left as it is: "
                "choose another table_name, or another file"
            )
        marks = connection.execute(f"SELECT protocol FROM {self.names.meta}").fetchall()  # noqa: S608  # checked
        if marks != [(PROTOCOL,)]:
            raise BackendMisconfigured(
                f"{self.path} has protocol {[mark[0] for mark in marks]}, this pglease speaks {PROTOCOL}: use the same "
                "version everywhere, or another file"
            )
        return True

    def _make(self, connection: sqlite3.Connection) -> None:
        if not self.create:
            raise BackendMisconfigured(f"{self.path} has no table {self.names.table}, and auto_initialize is off")
        connection.execute("BEGIN IMMEDIATE")
        if not self._found(connection):  # somebody else was faster
            sql = self.sql
            for statement in (sql.create_leases, sql.create_meta, sql.create_queue, sql.create_view):
                connection.execute(statement)
            connection.execute(self.sql.mark, (self.host.boot_id, self.host.wall_ahead()))
        connection.execute("COMMIT")

    # -- the file may go -----------------------------------------------------------------------------------------------

    def _identity_now(self) -> Identity | None:
        found = self._stat()
        return None if found is None else (found.st_dev, found.st_ino)

    def _stat(self) -> os.stat_result | None:
        try:
            return os.stat(self._path)  # noqa: PTH116  # at each verb, and a Path makes its text anew each time
        except OSError:
            return None

    def _identity_of_one(self, before: Identity | None) -> Identity:
        """Return which file is there, if it is the one that was there before it was opened."""
        now = self._identity_now()
        if now is None or (before is not None and before != now):
            raise Moved(f"the lease file {self.path} was deleted or replaced while it was opened")
        return now

    def _refuse_moved(self, link: Link) -> None:
        """Refuse to go on with a file that is no longer the one at our path."""
        if self._identity_now() != link.identity:
            if self._mourned != link.identity:
                self._mourned = link.identity
                log.warning("the lease file %s was deleted or replaced: the holds that were in it are lost", self.path)
            raise Moved(f"the lease file {self.path} was deleted or replaced")

    # -- forks and the end ---------------------------------------------------------------------------------------------

    def rest(self) -> None:
        """Close both connections and keep them closed while the process forks.

        A child would inherit what SQLite knows about this process's locks, without the locks: its own connections would
        then take none, and somebody's last close would delete the log under them.
        """
        for link in (self.reader, self.writer):
            if not link.rest():
                self._unfit_child = (
                    f"this process was forked while its parent was inside SQLite, and cannot use {self.path} safely: "
                    "fork earlier, or start it with spawn"
                )

    def resume(self) -> None:
        """Go on, in the parent."""
        self._unfit_child = None
        for link in (self.reader, self.writer):
            link.resume()

    def forget(self) -> None:
        """Begin anew, in the child."""
        unfit = self._unfit or self._unfit_child
        for link in (self.reader, self.writer):
            link.forget()
        self._begin()
        self._unfit = unfit

    def drop(self) -> None:
        """Close both connections; the next verb opens new ones."""
        for link in (self.reader, self.writer):
            link.drop()

    def close(self) -> None:
        """Close for good."""
        self._closed.set()
        self.drop()


class Moved(BackendUnavailable):
    """The path leads to another file, or to none."""


class Link:
    """One connection, for one thread at a time, opened when it is needed."""

    def __init__(self, file: LeaseFile) -> None:
        self._file = file
        self._lock = threading.Lock()
        self._connection: sqlite3.Connection | None = None
        self._rested_by: int | None = None
        self.identity: Identity | None = None
        self.committing = False

    def lend(self, talk: Talk[T], budget: Budget) -> T:
        """Let `talk` use the connection. SQLite's errors come out as ours; no transaction is left open."""
        if not self._lock.acquire(timeout=max(0.0, budget.left())):
            raise BackendUnavailable(f"{self._file.path}: other threads of this process were at it all the time")
        try:
            connection = self._ready()
            budget.sending()
            return talk(connection)
        except sqlite3.Error as error:
            raise translated(error, self._file.path, committing=self.committing) from error
        finally:
            self._settle()
            if self._file.closed:
                self._shut()
            self._lock.release()

    def _ready(self) -> sqlite3.Connection:
        self._file.refuse_closed()  # again: it may have been closed while we waited for our turn
        if self._connection is None:
            self._connection, self.identity = self._file.opened()
        self._settle()
        return self._connection

    def _settle(self) -> None:
        """Roll back what an error or an interruption left open: it would keep every other process out."""
        self.committing = False
        if self._connection is not None and self._connection.in_transaction:
            try:
                self._connection.rollback()
            except sqlite3.Error:
                self._shut()

    def _shut(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()

    def drop(self) -> None:
        """Close the connection; one that is in use is closed by its user."""
        if self._lock.acquire(timeout=PATIENCE):
            try:
                self._shut()
            finally:
                self._lock.release()

    def rest(self) -> bool:
        """Close the connection and let nobody open it; False if somebody uses it and does not come to an end."""
        if not self._lock.acquire(timeout=PATIENCE):
            return False
        self._rested_by = threading.get_ident()
        self._shut()
        return True

    def resume(self) -> None:
        """Let it be opened again."""
        if self._rested_by == threading.get_ident():
            self._rested_by = None
            self._lock.release()

    def forget(self) -> None:
        """Leave to the parent what is the parent's."""
        if self._connection is not None:
            forks.bury(self._connection)
            self._connection = None


def _journal_mode(connection: sqlite3.Connection) -> str:
    (mode,) = connection.execute("PRAGMA journal_mode").fetchone()
    return str(mode)


def _columns(connection: sqlite3.Connection, table: str) -> set[Any]:
    return {column for (column,) in connection.execute("SELECT name FROM pragma_table_info(?)", (table,))}
