"""From rows to records: what `postgres_sql` says about a lease, read back."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from pglease.backends.postgres_link import Row
from pglease.records import Granted, Lease, Refused, Tenure, lease_of


def answer_in(rows: Sequence[Row]) -> Granted | Refused | None:
    """Read a grant or a refusal; None when the name is free or about to be somebody's."""
    for row in rows:
        if row[0] == "granted":
            return Granted(lease_in(row))
        if row[0] == "held":
            lease = lease_in(row)
            return Refused(lease, lease.time_remaining())
    return None


def lease_in(row: Row) -> Lease:
    """Read what `postgres_sql.RECORD` returns, `verdict` first."""
    _, name, owner, token, transitions, metadata, acquired, heartbeat, expires, seen, given_back = row
    attached = {} if metadata is None else _metadata(metadata)
    read = datetime.fromtimestamp
    try:
        now = read(seen, UTC)
        # What was granted or renewed in this moment says the same time several times: read and kept once.
        renewed = now if heartbeat == seen else read(heartbeat, UTC)
        times = renewed if acquired == heartbeat else read(acquired, UTC), renewed, read(expires, UTC), now
    except (OSError, OverflowError, ValueError):  # a row written by hand may say 'infinity'; reading it must not fail
        times = _moment(acquired), _moment(heartbeat), _moment(expires), _moment(seen)
    begun, renewed, ends, now = times
    return lease_of(
        task_name=name,
        owner_id=sys.intern(owner),
        fencing_token=token,
        acquired_at=begun,
        heartbeat_at=renewed,
        expires_at=ends,
        transitions=transitions,
        seen_at=now,
        metadata=attached,
        given_back=given_back,
    )


def tenure_in(row: Row) -> Tenure:
    """Read what `history` of `postgres_sql` returns."""
    name, owner, token, acquired, ended, ending, seen = row
    ended_at = None if ended is None else _moment(ended)
    return Tenure(name, owner, token, _moment(acquired), ended_at, ending, _moment(seen))


def written(metadata: Mapping[str, Any]) -> str | None:
    """Return metadata as it is sent."""
    return json.dumps(dict(metadata), ensure_ascii=False) if metadata else None


def _moment(epoch: float) -> datetime:
    try:
        return datetime.fromtimestamp(epoch, UTC)
    except (OSError, OverflowError, ValueError):
        return datetime(9999, 12, 31, tzinfo=UTC) if epoch > 0 else datetime(1, 1, 1, tzinfo=UTC)


def _metadata(written: str) -> dict[str, Any]:
    read = json.loads(written)
    return read if isinstance(read, dict) else {}
