"""What stands in the file about a name, and what one look at it tells. Pure: no file is touched here."""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, NamedTuple

from pglease.errors import BackendMisconfigured
from pglease.records import Gone, Granted, Lease, LossReason, Refused, Request, lease_of

MOST_TOKEN = 2**63 - 1


class Row(NamedTuple):
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
    waited_until: int = 0
    last_ticket: int = 0

    def moved(self, shift: int, now: int) -> Row:
        """Return it on the time line of a later run of the host, in which nothing of it is still to come."""
        return self._replace(
            acquired=min(self.acquired + shift, now),
            heartbeat=min(self.heartbeat + shift, now),
            expires=min(self.expires + shift, now),
            waited_until=0,
        )


class Sight(NamedTuple):
    """What one look saw: the row of a name, the moment, what makes that moment a wall time, and who is next in line."""

    row: Row | None
    now: int
    wall: int
    token_floor: int
    head: tuple[str, str, int] | None = None

    @property
    def free(self) -> bool:
        """Whether nobody holds the name."""
        return self.row is None or self.row.expires <= self.now

    def held_by(self, lease_id: str) -> bool:
        """Tell whether that hold still runs."""
        return self.row is not None and self.row.lease_id == lease_id and not self.free

    def record(self) -> Lease:
        """Return what everybody may know of the name."""
        assert self.row is not None
        row = self.row
        return lease_of(
            task_name=row.name,
            owner_id=row.owner_id,
            fencing_token=row.fencing_token,
            acquired_at=_moment(self.wall + row.acquired),
            heartbeat_at=_moment(self.wall + row.heartbeat),
            expires_at=_moment(self.wall + row.expires),
            transitions=row.transitions,
            seen_at=_moment(self.wall + self.now),
            metadata=_metadata(row.metadata),
            given_back=row.lease_id is None,
        )

    def answer(self, request: Request) -> Granted | Refused | None:
        """Return what one who asks is told; None when the name is free, and not reserved for somebody else."""
        if not self.free:
            lease = self.record()
            return Granted(lease) if self.held_by(request.lease_id) else Refused(lease, lease.time_remaining())
        if self.head is not None and self.head[0] != request.ticket_id:
            _, owner_id, expires = self.head
            return Refused(None, (expires - self.now) / 1e9, owner_id)
        return None

    def left(self) -> float:
        """Return the seconds until the name is free if nothing else happens."""
        return max(0, self.row.expires - self.now) / 1e9 if self.row else 0.0

    def gone(self, lease_id: str) -> Gone:
        """Say why the hold of `lease_id` is over."""
        if self.row is None:
            return Gone("deleted")
        mine, ended = self.row.lease_id == lease_id, self.row.lease_id is None
        reason: LossReason = "expired" if mine else "forced" if ended else "taken"
        return Gone(reason, self.record())

    def next_hold(self, request: Request) -> Row:
        """Return the row of the hold that begins now."""
        last = self.row
        token = (last.fencing_token if last else self.token_floor) + 1
        if token > MOST_TOKEN:
            raise BackendMisconfigured(f"the fencing token of {request.name!r} has no successor: it was set by hand")
        return Row(
            request.name,
            request.owner_id,
            request.lease_id,
            token,
            last.transitions + 1 if last else 0,
            written(request.metadata),
            self.now,
            self.now,
            self.now + ns(request.ttl),
            last.waited_until if last else 0,
            last.last_ticket if last else 0,
        )


def written(metadata: Mapping[str, Any]) -> str | None:
    """Return metadata as it stands in the file."""
    return json.dumps(dict(metadata), ensure_ascii=False) if metadata else None


def ns(seconds: float) -> int:
    """Return seconds as whole nanoseconds."""
    return round(seconds * 1e9)


def _moment(ns: int) -> datetime:
    try:
        return datetime.fromtimestamp(ns // 1000 / 1e6, UTC)  # exact: a double holds more than that until 2242
    except (OverflowError, ValueError, OSError):  # a row written by hand; reading it must not fail
        return datetime(9999, 12, 31, tzinfo=UTC) if ns > 0 else datetime(1, 1, 1, tzinfo=UTC)


def _metadata(written: str | None) -> dict[str, Any]:
    if not written:
        return {}
    try:
        read = json.loads(written)
    except ValueError:
        return {}
    return read if isinstance(read, dict) else {}
