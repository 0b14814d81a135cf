"""The guard on a lease file: a proof inside the application's own transaction, on the same file.

SQLite has one write lock for a file. A guard takes it for the caller's transaction and then judges the hold, so nobody
can take the name over, or do anything else with the leases in that file, until that transaction ends. Renewals wait for
it too: a guarded transaction has to be much shorter than the ttl.
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Callable, Generator
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self

from pglease.backends.base import Fence, ParamStyle
from pglease.backends.paramstyles import written
from pglease.backends.sqlite_errors import BUSY, LOCKED, READ_ONLY, primary
from pglease.backends.sqlite_file import LeaseFile
from pglease.errors import BackendError, BackendUnavailable, ConfigurationError, FencedError, PgleaseError
from pglease.records import Claim

# guard: C18. Takes the write lock by changing nothing, and only then is the hold judged.
_LOCK = "UPDATE main.{leases} SET fencing_token = fencing_token WHERE task_name = ?"
_JUDGE = """
SELECT 1 FROM main.{leases} l, main.{meta} m
WHERE l.task_name = ? AND l.fencing_token = ? AND l.lease_id = ? AND l.expires_ns > ? AND m.boot_id = ?
"""

# fence_sql: C18. A statement that writes has the write lock while it reads this.
_FENCE = """EXISTS (
  SELECT 1 FROM main.{leases} l, main.{meta} m
  WHERE l.task_name = %(pglease_name)s AND l.fencing_token = %(pglease_token)s AND l.lease_id = %(pglease_lease_id)s
    AND l.expires_ns > %(pglease_now)s AND m.boot_id = %(pglease_boot_id)s
)"""


class _Caller(NamedTuple):
    """The connection of somebody else's: SQLite's own, and how its owner's transaction is made to fail."""

    driver: sqlite3.Connection
    take_back: Callable[[], object]


class SQLiteGuard:
    """A guard on somebody's connection: proved when it is made, and as a block once more on leaving."""

    def __init__(self, file: LeaseFile, claim: Claim, connection: Any) -> None:
        self._file = file
        self._claim = claim
        self._caller = _caller_of(connection)
        self._refuse_unfit()
        self._prove()

    def _refuse_unfit(self) -> None:
        driver = self._caller.driver
        if not driver.in_transaction and not _begins_by_itself(driver):
            raise self._cannot("in autocommit mode: begin a transaction first, best with BEGIN IMMEDIATE")
        (_, _, main) = _plain(driver).execute("PRAGMA database_list").fetchone()
        if not main or not _same(Path(os.fsdecode(main)), self._file.path):
            raise self._cannot(f"on this connection: it leads to another file than the lease's, {self._file.path}")

    def _prove(self) -> None:
        try:
            current = self._locked_and_judged()
        except sqlite3.Error as error:
            self._caller.take_back()
            raise self._explained(error) from error
        if not current:
            self._caller.take_back()
            raise FencedError(
                f"a write under the lease {self._claim.name!r} (token {self._claim.fencing_token}) was refused: it ran "
                "out, was ended, or somebody else has it",
                name=self._claim.name,
                fencing_token=self._claim.fencing_token,
            )

    def _locked_and_judged(self) -> bool:
        tables = {"leases": self._file.names.leases, "meta": self._file.names.meta}
        cursor, claim, host = _plain(self._caller.driver), self._claim, self._file.host
        cursor.execute(_LOCK.format(**tables), (claim.name,))
        wanted = (claim.name, claim.fencing_token, claim.lease_id, host.now(), host.boot_id)
        return cursor.execute(_JUDGE.format(**tables), wanted).fetchone() is not None

    def _explained(self, error: sqlite3.Error) -> PgleaseError:
        if primary(error) in (BUSY, LOCKED):
            return BackendUnavailable(
                f"the lease {self._claim.name!r} cannot be guarded just now: somebody else writes to "
                f"{self._file.path}, or has since this transaction began to read; BEGIN IMMEDIATE waits its turn"
            )
        if primary(error) == READ_ONLY:
            return self._cannot("on a connection that may not write")
        if "no such table" in str(error):
            return self._cannot(f"on this connection: {self._file.names.leases} is not there")
        return BackendError(f"{self._file.path}: {error}")

    def _cannot(self, why: str) -> ConfigurationError:
        return ConfigurationError(
            f"the lease {self._claim.name!r} (token {self._claim.fencing_token}) cannot be guarded {why}"
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._caller.driver.in_transaction or not (error is None or isinstance(error, Exception)):
            return
        try:
            self._prove()  # the transaction may have been rolled back and begun anew
        except PgleaseError as refused:
            if error is None:
                raise
            error.add_note(f"pglease: {refused}")

    def __await__(self) -> Generator[Any, None, Self]:
        raise ConfigurationError("this connection is synchronous: nothing is to be awaited")

    async def __aenter__(self) -> Self:
        raise ConfigurationError("this connection is synchronous: `with`, not `async with`")

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Nothing: it was not entered."""


def fence(file: LeaseFile, claim: Claim, style: ParamStyle, start: int) -> Fence:
    """Return the predicate for a claim, in one driver's style."""
    values = {
        "pglease_name": claim.name,
        "pglease_token": claim.fencing_token,
        "pglease_lease_id": claim.lease_id,
        "pglease_now": file.host.now(),
        "pglease_boot_id": file.host.boot_id,
    }
    return Fence(*written(_FENCE.format(leases=file.names.leases, meta=file.names.meta), values, style, start))


def _caller_of(connection: Any) -> _Caller:
    """Find SQLite's connection in what an application works with: `sqlite3`, SQLAlchemy, Django."""
    if isinstance(connection, sqlite3.Connection):
        return _Caller(connection, connection.rollback)
    if getattr(connection, "in_atomic_block", False):  # Django; its own rollback is not for use in there
        found = _Caller(connection.connection, lambda: connection.set_rollback(True))
    else:  # SQLAlchemy: a Session has a Connection, which has what its pool has lent
        inner = getattr(connection, "connection", None)
        lent = inner() if callable(inner) and not isinstance(inner, sqlite3.Connection) else connection
        driver = getattr(getattr(lent, "connection", None), "driver_connection", None)
        found = _Caller(driver, getattr(connection, "rollback", lambda: None))  # type: ignore[arg-type]
    if not isinstance(found.driver, sqlite3.Connection):
        raise ConfigurationError(
            "a lease in a file is guarded on a connection of sqlite3's with an open transaction, also SQLAlchemy's or "
            f"Django's (inside atomic()), not on {type(connection).__name__}"
        )
    return found


def _plain(driver: sqlite3.Connection) -> sqlite3.Cursor:
    """Return a cursor whose rows are tuples, whatever the application's are."""
    cursor = driver.cursor()
    cursor.row_factory = None
    return cursor


def _begins_by_itself(driver: sqlite3.Connection) -> bool:
    """Tell whether the first statement that writes begins a transaction."""
    autocommit = getattr(driver, "autocommit", -1)  # from Python 3.12 on; -1 is how it was before
    return autocommit is False or (autocommit == -1 and driver.isolation_level is not None)


def _same(one: Path, other: Path) -> bool:
    try:
        return one.samefile(other)
    except OSError:
        return False
