"""Leases in a file, for the processes of one host. Nothing beyond the standard library.

What stands in the file is in `sqlite_sql`; how it is opened and shared is in `sqlite_file`. Here a name's row is judged
and changed: under the file's write lock, by the host's boot clock. A wall clock decides nothing, and after a reboot,
whose boot id differs, every hold is over.
"""

from __future__ import annotations

import builtins
import json
import os
import sqlite3
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, NamedTuple

from pglease import options
from pglease.backends.base import Budget, FencesNothing, KeepsNoQueue, Traits, WakesNobody
from pglease.backends.sqlite_file import LeaseFile
from pglease.errors import BackendMisconfigured, ConfigurationError
from pglease.records import (
    Gone,
    Granted,
    Held,
    Lease,
    LossReason,
    Refused,
    Released,
    ReleaseOutcome,
    Renewal,
    RenewalOutcome,
    Request,
)
from pglease.schema import DEFAULT_TABLE, table_names

TRAITS = Traits(
    kind="SQLite",
    clock="host boot clock",
    shared_by="processes",
    durable=True,
    slots=True,
    caveat="one host: a reboot frees everything",
)
MOST_TOKEN = 2**63 - 1
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


class _Row(NamedTuple):
    """One name, as it stands in the file. It stays after its hold, with its token; then `lease_id` is None."""

    name: str
    owner_id: str
    lease_id: str | None
    fencing_token: int
    transitions: int
    metadata: str | None
    acquired: int
    heartbeat: int
    expires: int

    def moved(self, shift: int, now: int) -> _Row:
        """Return it on the time line of a later run of the host, in which nothing of it is still to come."""
        return self._replace(
            acquired=min(self.acquired + shift, now),
            heartbeat=min(self.heartbeat + shift, now),
            expires=min(self.expires + shift, now),
        )


@dataclass(frozen=True, slots=True)
class _Sight:
    """What one look saw: the row of a name, the moment, and what makes that moment a wall time."""

    row: _Row | None
    now: int
    wall: int
    token_floor: int

    @property
    def free(self) -> bool:
        return self.row is None or self.row.expires <= self.now

    def held_by(self, lease_id: str) -> bool:
        return self.row is not None and self.row.lease_id == lease_id and not self.free

    def record(self) -> Lease:
        assert self.row is not None
        row = self.row
        return Lease(
            task_name=row.name,
            owner_id=row.owner_id,
            fencing_token=row.fencing_token,
            acquired_at=_moment(self.wall + row.acquired),
            heartbeat_at=_moment(self.wall + row.heartbeat),
            expires_at=_moment(self.wall + row.expires),
            transitions=row.transitions,
            seen_at=_moment(self.wall + self.now),
            metadata=_metadata(row.metadata),
        )

    def answer(self, lease_id: str) -> Granted | Refused | None:
        """Return what one who asks with `lease_id` is told; None when the name is free."""
        if self.free:
            return None
        lease = self.record()
        return Granted(lease) if self.held_by(lease_id) else Refused(lease, lease.time_remaining())

    def gone(self, lease_id: str) -> Gone:
        """Say why the hold of `lease_id` is over."""
        if self.row is None:
            return Gone("deleted")
        mine, ended = self.row.lease_id == lease_id, self.row.lease_id is None
        reason: LossReason = "expired" if mine else "forced" if ended else "taken"
        return Gone(reason, self.record())

    def next_hold(self, request: Request) -> _Row:
        """Return the row of the hold that begins now."""
        last = self.row
        token = (last.fencing_token if last else self.token_floor) + 1
        if token > MOST_TOKEN:
            raise BackendMisconfigured(f"the fencing token of {request.name!r} has no successor: it was set by hand")
        return _Row(
            request.name,
            request.owner_id,
            request.lease_id,
            token,
            last.transitions + 1 if last else 0,
            json.dumps(dict(request.metadata), ensure_ascii=False) if request.metadata else None,
            self.now,
            self.now,
            self.now + _ns(request.ttl),
        )


class SQLiteBackend(WakesNobody, KeepsNoQueue, FencesNothing):
    """Leases in an SQLite file, for the processes of one host. See `Backend` for the verbs.

    Args:
        path: the file; relative to the directory that is current now. It is made at the first use, its directory is
            not. It belongs on a local disk; SQLite keeps `-wal` and `-shm` files beside it.
        table_name: the lease table; one identifier. Default `pglease_leases`.
        auto_initialize: whether a missing file or table is made at the first use.

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

    def __repr__(self) -> str:
        return f"<SQLiteBackend {self._file.path}{' closed' if self._file.closed else ''}>"

    @property
    def path(self) -> Path:
        """The lease file."""
        return self._file.path

    # -- the verbs -----------------------------------------------------------------------------------------------------

    def try_acquire(self, request: Request, budget: Budget) -> Granted | Refused:
        """See `Backend.try_acquire`. Whoever is refused has only looked, and took no lock."""
        look = self._file.read(lambda link: self._seen(link, request.name), budget)
        return look.answer(request.lease_id) or self._file.write(lambda link: self._take(link, request), budget)

    def _take(self, link: sqlite3.Connection, request: Request) -> Granted | Refused:
        sight = self._judged(link, request.name)
        answer = sight.answer(request.lease_id)
        if answer is None:
            row = sight.next_hold(request)
            link.execute(self._sql.put, row)
            answer = Granted(replace(sight, row=row).record())
        return answer

    def renew(self, renewals: Sequence[Renewal], budget: Budget) -> builtins.list[RenewalOutcome]:
        """See `Backend.renew`."""
        if not renewals:
            return []
        return self._file.write(lambda link: [self._renew(link, renewal) for renewal in renewals], budget)

    def _renew(self, link: sqlite3.Connection, renewal: Renewal) -> RenewalOutcome:
        sight = self._judged(link, renewal.name)
        if sight.row is None or not sight.held_by(renewal.lease_id):
            return sight.gone(renewal.lease_id)
        row = sight.row._replace(heartbeat=sight.now, expires=sight.now + _ns(renewal.ttl))
        link.execute(self._sql.renew, (row.heartbeat, row.expires, row.name))
        return Held(replace(sight, row=row).record())

    def release(self, name: str, lease_id: str, budget: Budget, *, min_hold: float = 0.0) -> ReleaseOutcome:
        """See `Backend.release`."""
        return self._file.write(lambda link: self._release(link, name, lease_id, min_hold), budget)

    def _release(self, link: sqlite3.Connection, name: str, lease_id: str, min_hold: float) -> ReleaseOutcome:
        sight = self._judged(link, name)
        if sight.row is None or sight.row.lease_id != lease_id:
            return sight.gone(lease_id)
        if sight.free:
            link.execute(self._sql.end, (sight.row.expires, name))
            return sight.gone(lease_id)
        link.execute(self._sql.end, (max(sight.now, sight.row.acquired + _ns(min_hold)), name))
        return Released()

    def force_release(self, name: str, fencing_token: int, budget: Budget) -> bool:
        """See `Backend.force_release`."""
        return self._file.write(lambda link: self._force(link, name, fencing_token), budget)

    def _force(self, link: sqlite3.Connection, name: str, fencing_token: int) -> bool:
        sight = self._judged(link, name)
        if sight.row is None or sight.free or sight.row.fencing_token != fencing_token:
            return False
        link.execute(self._sql.end, (sight.now, name))
        return True

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
        return self._file.write(lambda link: self._cleanup(link, older_than), budget)

    def _cleanup(self, link: sqlite3.Connection, older_than: float) -> int:
        before = {"before": self._judged(link, "").now - _ns(older_than)}
        link.execute(self._sql.raise_floor, before)
        return link.execute(self._sql.cleanup, before).rowcount

    def forget(self) -> None:
        """See `Backend.forget`."""
        self._file.forget()

    def close(self) -> None:
        """See `Backend.close`."""
        self._file.close()

    # -- looking -------------------------------------------------------------------------------------------------------

    def _judged(self, link: sqlite3.Connection, name: str) -> _Sight:
        """Look under the write lock; whoever is the first after a reboot moves all rows onto the new time line."""
        ((_, boot_id, wall, *_),) = rows = link.execute(self._sql.look, (name,)).fetchall() or [_unmarked(self.path)]
        host = self._file.host
        if boot_id != host.boot_id:
            here = host.wall_ahead()
            link.execute(self._sql.move, {"shift": wall - here, "now": host.now()})
            link.execute(self._sql.moved, {"boot_id": host.boot_id, "wall": here})
            rows = link.execute(self._sql.look, (name,)).fetchall()
        return next(self._read(rows))

    def _seen(self, link: sqlite3.Connection, name: str) -> _Sight:
        return next(self._read(link.execute(self._sql.look, (name,)).fetchall()))

    def _read(self, rows: builtins.list[tuple[Any, ...]]) -> Iterator[_Sight]:
        """Read what a look returns, by the clock of this moment: never earlier than what the rows say."""
        host = self._file.host
        now = host.now()
        for _, boot_id, wall, token_floor, *columns in rows or [_unmarked(self.path)]:
            row = None if columns[0] is None else _Row(*columns)
            if boot_id == host.boot_id:
                yield _Sight(row, now, wall, token_floor)
            else:
                here = host.wall_ahead()
                yield _Sight(row and row.moved(wall - here, now), now, here, token_floor)


def _unmarked(path: Path) -> tuple[Any, ...]:
    raise BackendMisconfigured(f"{path}: the row that marks the lease table is gone; use another file")


def _place(path: object) -> Path:
    text = str(path) if isinstance(path, str | os.PathLike) else ""
    if not text.strip() or "\0" in text:
        raise ConfigurationError(f"path must be the name of a file, not {path!r}")
    if text == ":memory:" or text.startswith("file:"):
        raise ConfigurationError(f"path must be the name of a file, not {path!r}: leases in memory are memory://")
    return Path.cwd() / text  # as of now: a daemon may change its directory


def _ns(seconds: float) -> int:
    return round(seconds * 1e9)


def _moment(ns: int) -> datetime:
    try:
        return _EPOCH + timedelta(microseconds=ns // 1000)
    except OverflowError:  # a row written by hand; reading it must not fail
        return datetime(9999, 12, 31, tzinfo=UTC) if ns > 0 else datetime(1, 1, 1, tzinfo=UTC)


def _metadata(written: str | None) -> dict[str, Any]:
    if not written:
        return {}
    try:
        read = json.loads(written)
    except ValueError:
        return {}
    return read if isinstance(read, dict) else {}
