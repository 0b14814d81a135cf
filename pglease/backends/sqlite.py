"""Leases in a file, for the processes of one host. Nothing beyond the standard library.

What stands in the file is in `sqlite_sql`; how it is opened and shared is in `sqlite_file`. Here a name's row is judged
and changed: under the file's write lock, by the host's boot clock. A wall clock decides nothing, and after a reboot,
whose boot id differs, every hold is over.
"""

from __future__ import annotations

import builtins
import os
import sqlite3
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from pglease import clock, forks, options
from pglease.backends import sqlite_guard, sqlite_turn
from pglease.backends.base import AsksInOne, Budget, Fence, Guard, ParamStyle, RemembersNothing, Traits
from pglease.backends.sqlite_file import LeaseFile
from pglease.backends.sqlite_pipes import Listener, Pipes
from pglease.backends.sqlite_rows import Row, Sight, ns
from pglease.backends.sqlite_turn import Turn
from pglease.errors import BackendMisconfigured, ConfigurationError
from pglease.records import (
    Adoption,
    Change,
    Claim,
    Gone,
    Granted,
    Held,
    InTheWay,
    Lease,
    Place,
    Refused,
    ReleaseOutcome,
    Renewal,
    RenewalOutcome,
    Request,
    Ticket,
)
from pglease.schema import DEFAULT_TABLE, table_names

TRAITS = Traits(
    kind="SQLite",
    clock="host boot clock",
    shared_by="processes",
    durable=True,
    wakes_waiters=True,
    fair=True,
    transactional_fencing=True,
    groups=True,
    slots=True,
    caveat="one host: a reboot frees everything",
)
if TYPE_CHECKING:
    from pglease.backends.checks import Check

T = TypeVar("T")


def _nothing(_: sqlite3.Connection) -> None:
    """Have no answer."""


class SQLiteBackend(RemembersNothing, AsksInOne):
    """Leases in an SQLite file, for the processes of one host. See `Backend` for the verbs.

    Args:
        path: the file; relative to the directory that is current now. It is made at the first use, its directory is
            not. It belongs on a local disk; SQLite keeps `-wal` and `-shm` files beside it.
        table_name: the lease table; one identifier. Default `pglease_leases`.
        auto_initialize: whether a missing file or table is made at the first use. Default True.

    Building it opens nothing. The threads of a process may share one; a forked child goes on with connections of its
    own.

    Raises:
        ConfigurationError: for what is wrong with the arguments, all of it.
    """

    traits = TRAITS

    def __init__(
        self, path: str | os.PathLike[str], *, table_name: str = DEFAULT_TABLE, auto_initialize: bool = True
    ) -> None:
        with options.all_problems() as problems:
            place = problems.check(_place, path)
            names = problems.check(table_names, table_name)
            create = problems.check(options.flag, auto_initialize, "auto_initialize")
        self._file = LeaseFile(place, names, create=create)
        self._sql = self._file.sql
        self._pipes = Pipes(place)
        self._listeners: builtins.list[Listener] = []
        forks.forget_in_children(self, type(self).forget)

    def __repr__(self) -> str:
        return f"<SQLiteBackend {self._file.path}{' closed' if self._file.closed else ''}>"

    @property
    def path(self) -> Path:
        """The lease file."""
        return self._file.path

    # -- the verbs -----------------------------------------------------------------------------------------------------

    def try_acquire(self, request: Request, budget: Budget) -> Granted | Refused:
        """See `Backend.try_acquire`. Whoever is refused has only looked, and took no lock."""

        def look(link: sqlite3.Connection) -> Granted | Refused | None:
            return self._seen(link, request.name).answer(request)

        return self._change(lambda turn: sqlite_turn.take(turn, request), budget, first=look)

    def try_acquire_many(self, requests: Sequence[Request], budget: Budget) -> builtins.list[Granted] | InTheWay | None:
        """See `GroupBackend.try_acquire_many`. Whoever is refused has only looked, and took no lock."""

        def look(link: sqlite3.Connection) -> InTheWay | None:
            for request in requests:
                answer = self._seen(link, request.name).answer(request)
                if isinstance(answer, Refused):
                    return InTheWay(request.name, answer)
            return None

        return self._change(lambda turn: sqlite_turn.take_all(turn, requests), budget, first=look)

    def renew(self, renewals: Sequence[Renewal], budget: Budget) -> builtins.list[RenewalOutcome]:
        """See `Backend.renew`."""
        if not renewals:
            return []
        return self._change(lambda turn: [sqlite_turn.renew(turn, renewal) for renewal in renewals], budget)

    def release(self, name: str, lease_id: str, budget: Budget, *, min_hold: float = 0.0) -> ReleaseOutcome:
        """See `Backend.release`."""
        return self._change(lambda turn: sqlite_turn.release(turn, name, lease_id, min_hold), budget)

    def force_release(self, name: str, fencing_token: int, budget: Budget) -> bool:
        """See `Backend.force_release`."""
        return self._change(lambda turn: sqlite_turn.force(turn, name, fencing_token), budget)

    def adopt(self, adoption: Adoption, budget: Budget) -> Granted | Gone:
        """See `Backend.adopt`."""
        return self._change(lambda turn: sqlite_turn.adopt(turn, adoption), budget)

    def set_metadata(self, name: str, lease_id: str, metadata: Mapping[str, Any], budget: Budget) -> Held | Gone:
        """See `Backend.set_metadata`."""
        return self._change(lambda turn: sqlite_turn.describe(turn, name, lease_id, metadata), budget)

    def get(self, name: str, budget: Budget) -> Lease | None:
        """See `Backend.get`."""
        sight = self._file.read(lambda link: self._seen(link, name), budget)
        return sight.record() if sight.row else None

    def list(self, prefix: str, budget: Budget, *, ended: bool = False) -> builtins.list[Lease]:
        """See `Backend.list`."""
        asked = {"prefix": prefix, "length": len(prefix)}
        rows = self._file.read(lambda link: link.execute(self._sql.list, asked).fetchall(), budget)
        seen = [sight for sight in self._read(rows) if sight.row]
        return [s.record() for s in seen if ended or not s.free or (s.row and s.row.lease_id is not None)]

    def cleanup(self, older_than: float, budget: Budget) -> int:
        """See `Backend.cleanup`."""
        self._pipes.sweep()
        return self._change(lambda turn: sqlite_turn.cleanup(turn, older_than), budget)

    # -- waiting -------------------------------------------------------------------------------------------------------

    def listen(self, budget: Budget) -> Listener | None:
        """See `WakingBackend.listen`. None where the directory cannot be written to."""
        self._file.read(lambda link: self._seen(link, ""), budget)
        listener = self._pipes.listen()
        if listener is not None:
            self._listeners = [each for each in self._listeners if not each.closed]
            self._listeners.append(listener)
            if self._file.closed:
                listener.close()
        return listener

    def mark(self, name: str, seconds: float, budget: Budget) -> bool:
        """See `WakingBackend.mark`."""
        seen = self._file.read(lambda link: self._seen(link, name), budget)
        if seen.row is None or seen.row.waited_until - seen.now > ns(seconds) / 2:
            return seen.row is not None
        return self._change(lambda turn: sqlite_turn.mark(turn, name, seconds), budget)

    def queue(self, ticket: Ticket, budget: Budget) -> Place | None:
        """See `FairBackend.queue`."""
        return self._change(lambda turn: sqlite_turn.queue(turn, ticket), budget)

    def leave_queue(self, name: str, ticket_id: str, budget: Budget) -> bool:
        """See `FairBackend.leave_queue`."""
        return self._change(lambda turn: sqlite_turn.leave(turn, name, ticket_id), budget)

    def queued(self, name: str, budget: Budget) -> builtins.list[str]:
        """See `FairBackend.queued`."""

        def read(link: sqlite3.Connection) -> builtins.list[str]:
            rows = link.execute(self._sql.queued, (name, self._seen(link, name).now)).fetchall()
            return [label for (label,) in rows]

        return self._file.read(read, budget)

    def queues(self, prefix: str, budget: Budget) -> dict[str, builtins.list[str]]:
        """See `FairBackend.queues`."""

        def read(link: sqlite3.Connection) -> dict[str, builtins.list[str]]:
            asked = {"prefix": prefix, "length": len(prefix), "now": self._seen(link, "").now}
            found: dict[str, builtins.list[str]] = {}
            for name, label in link.execute(self._sql.queues, asked):
                found.setdefault(name, []).append(label)
            return found

        return self._file.read(read, budget)

    # -- fencing -------------------------------------------------------------------------------------------------------

    def guard(self, claim: Claim, connection: Any, *, idle: float = 60.0) -> Guard:  # noqa: ARG002
        """See `FencingBackend.guard`. For sqlite3, SQLAlchemy and Django, on the lease file itself.

        A refused guard rolls the transaction back. Nothing bounds how long it may lie idle, and until it ends nobody
        writes to the file: renewals wait too.
        """
        self._file.refuse_closed()
        return sqlite_guard.SQLiteGuard(self._file, claim, connection)

    def fence_sql(self, claim: Claim, paramstyle: ParamStyle, *, start: int = 1) -> Fence:
        """See `FencingBackend.fence_sql`. Whether the hold has run out is judged by the moment of this call."""
        self._file.refuse_closed()
        return sqlite_guard.fence(self._file, claim, paramstyle, start)

    # -- what operators ask for ----------------------------------------------------------------------------------------

    def diagnose(self, *, timeout: float = 10.0) -> Iterator[Check]:
        """Yield one check after the other: what was found, and what to do about it."""
        from pglease.backends import sqlite_doctor

        def take_and_return() -> None:
            request = Request(sqlite_doctor.PROBE_NAME, "pglease doctor", os.urandom(16).hex(), 5.0)
            if isinstance(self.try_acquire(request, Budget.of(timeout, clock.now)), Granted):
                self.release(request.name, request.lease_id, Budget.of(timeout, clock.now))

        yield from sqlite_doctor.diagnose(self._file, self._pipes, take_and_return, timeout)

    # -- the end -------------------------------------------------------------------------------------------------------

    def forget(self) -> None:
        """See `Backend.forget`."""
        self._file.forget()
        for listener in self._listeners:
            listener.forget()
        self._listeners = []

    def close(self) -> None:
        """See `Backend.close`."""
        self._file.close()
        while self._listeners:
            self._listeners.pop().close()

    # -- looking and changing ------------------------------------------------------------------------------------------

    def _change(
        self, act: Callable[[Turn], T], budget: Budget, *, first: Callable[[sqlite3.Connection], T | None] = _nothing
    ) -> T:
        """Let `act` have its turn at the file; when what it did is on the disk, tell whoever listens.

        `first` looks without the lock; if it has an answer, that is all.
        """
        changes: builtins.list[Change] = []

        def talk(link: sqlite3.Connection) -> T:
            changes.clear()  # of a turn that came to nothing
            return act(Turn(link, self._sql, lambda name: self._judged(link, name), changes))

        answer = self._file.write(talk, budget, first=first)
        if changes:
            self._pipes.announce(changes)
        return answer

    def _judged(self, link: sqlite3.Connection, name: str) -> Sight:
        """Look under the write lock; whoever is the first after a reboot moves all rows onto the new time line."""
        ((_, boot_id, wall, *_),) = rows = link.execute(self._sql.look, (name,)).fetchall() or [_unmarked(self.path)]
        host = self._file.host
        if boot_id != host.boot_id:
            here = host.wall_ahead()
            link.execute(self._sql.move, {"shift": wall - here, "now": host.now()})
            link.execute(self._sql.empty_queues)
            link.execute(self._sql.moved, {"boot_id": host.boot_id, "wall": here})
            rows = link.execute(self._sql.look, (name,)).fetchall()
        return self._with_head(link, next(self._read(rows)))

    def _seen(self, link: sqlite3.Connection, name: str) -> Sight:
        return self._with_head(link, next(self._read(link.execute(self._sql.look, (name,)).fetchall())))

    def _with_head(self, link: sqlite3.Connection, sight: Sight) -> Sight:
        """Add who is next in line for a name that is free, if anybody ever stood in line for it."""
        if sight.row is None or not sight.row.last_ticket or not sight.free:
            return sight
        return sight._replace(head=link.execute(self._sql.head, (sight.row.name, sight.now)).fetchone())

    def _read(self, rows: builtins.list[tuple[Any, ...]]) -> Iterator[Sight]:
        """Read what a look returns, by the clock of this moment: never earlier than what the rows say."""
        host = self._file.host
        now = host.now()
        for _, boot_id, wall, token_floor, *columns in rows or [_unmarked(self.path)]:
            row = None if columns[0] is None else Row(*columns)
            if boot_id == host.boot_id:
                yield Sight(row, now, wall, token_floor)
            else:
                here = host.wall_ahead()
                yield Sight(row and row.moved(wall - here, now), now, here, token_floor)


def _unmarked(path: Path) -> tuple[Any, ...]:
    raise BackendMisconfigured(f"{path}: the row that marks the lease table is gone; use another file")


def _place(path: object) -> Path:
    text = str(path) if isinstance(path, str | os.PathLike) else ""
    if not text.strip() or "\0" in text:
        raise ConfigurationError(f"path must be the name of a file, not {path!r}")
    if text == ":memory:" or text.startswith("file:"):
        raise ConfigurationError(f"path must be the name of a file, not {path!r}: leases in memory are memory://")
    return Path.cwd() / text  # as of now: a daemon may change its directory
