"""A store where every name is free, always: what `always_acquire` puts in the place of all others."""

from __future__ import annotations

import builtins
import threading
from collections.abc import Generator, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any, Self

from pglease.backends.base import Budget, Fence, ParamStyle, Traits
from pglease.records import (
    Adoption,
    Claim,
    Gone,
    Granted,
    Held,
    Lease,
    Place,
    Released,
    ReleaseOutcome,
    Renewal,
    RenewalOutcome,
    Request,
    Ticket,
)


class FreeForAll:
    """Grants whatever is asked for, to everybody, and refuses no write. A token is larger than the name's last one."""

    traits = Traits(
        kind="free for all",
        clock="process",
        shared_by="threads",
        durable=False,
        fair=True,
        transactional_fencing=True,
        groups=True,
        slots=True,
    )

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._held: dict[str, Lease] = {}
        self._granted: set[str] = set()
        self._last: dict[str, Lease] = {}

    def granted(self, lease_id: str) -> bool:
        """Tell whether that was granted here, whatever became of it."""
        return lease_id in self._granted

    def try_acquire(self, request: Request, budget: Budget) -> Granted:
        """Grant it."""
        budget.sending()
        return Granted(self._begin(request.name, request.owner_id, request.lease_id, request.ttl, request.metadata))

    def _begin(self, name: str, owner: str, lease_id: str, ttl: float, metadata: Mapping[str, Any]) -> Lease:
        with self._lock:
            now, last = datetime.now(UTC), self._last.get(name)
            lease = Lease(
                task_name=name,
                owner_id=owner,
                fencing_token=last.fencing_token + 1 if last else 1,
                acquired_at=now,
                heartbeat_at=now,
                expires_at=now + timedelta(seconds=ttl),
                transitions=last.transitions + 1 if last else 0,
                seen_at=now,
                metadata=metadata,
            )
            self._granted.add(lease_id)
            self._held[lease_id] = self._last[name] = lease
            return lease

    def try_acquire_many(self, requests: Sequence[Request], budget: Budget) -> builtins.list[Granted]:
        """Grant them all."""
        return [self.try_acquire(request, budget) for request in requests]

    def renew(self, renewals: Sequence[Renewal], budget: Budget) -> builtins.list[RenewalOutcome]:
        """Extend whatever was granted."""
        budget.sending()
        return [self._changed(each.lease_id, ttl=each.ttl) for each in renewals]

    def _changed(self, lease_id: str, *, ttl: float | None = None, **changes: Any) -> Held | Gone:
        with self._lock:
            lease = self._held.get(lease_id)
            if lease is None:
                return Gone("deleted")
            now = datetime.now(UTC)
            if ttl is not None:
                changes |= {"heartbeat_at": now, "expires_at": now + timedelta(seconds=ttl)}
            lease = self._held[lease_id] = replace(lease, seen_at=now, **changes)
            self._last[lease.task_name] = lease
            return Held(lease)

    def release(self, name: str, lease_id: str, budget: Budget, *, min_hold: float = 0.0) -> ReleaseOutcome:  # noqa: ARG002
        """End it; the next one is granted at once all the same."""
        budget.sending()
        return Released() if self._held.pop(lease_id, None) else Gone("deleted")

    def force_release(self, name: str, fencing_token: int, budget: Budget) -> bool:  # noqa: ARG002
        """End whoever holds it under that token."""
        with self._lock:
            doomed = [
                key
                for key, lease in self._held.items()
                if (lease.task_name, lease.fencing_token) == (name, fencing_token)
            ]
            for key in doomed:
                del self._held[key]
            return bool(doomed)

    def adopt(self, adoption: Adoption, budget: Budget) -> Granted | Gone:
        """Let a hold go on as the next one."""
        budget.sending()
        with self._lock:
            lease = self._held.pop(adoption.lease_id, None)
            if lease is None:
                return Gone("deleted")
            metadata = lease.metadata
            return Granted(self._begin(adoption.name, adoption.owner_id, adoption.next_id, adoption.ttl, metadata))

    def set_metadata(self, name: str, lease_id: str, metadata: Mapping[str, Any], budget: Budget) -> Held | Gone:  # noqa: ARG002
        """Replace what is attached to it."""
        return self._changed(lease_id, metadata=metadata)

    def get(self, name: str, budget: Budget) -> Lease | None:  # noqa: ARG002
        """Return the record of the last hold."""
        return self._last.get(name)

    def list(self, prefix: str, budget: Budget, *, ended: bool = False) -> builtins.list[Lease]:  # noqa: ARG002
        """Return what is held."""
        held = [lease for lease in self._held.values() if lease.task_name.startswith(prefix)]
        return sorted(held, key=lambda lease: lease.task_name)

    def cleanup(self, older_than: float, budget: Budget) -> int:  # noqa: ARG002
        """Find nothing to do."""
        return 0

    def listen(self, budget: Budget) -> None:
        """Have nothing to say: nobody waits."""

    def mark(self, name: str, seconds: float, budget: Budget) -> bool:  # noqa: ARG002
        """Mark nothing."""
        return False

    def queue(self, ticket: Ticket, budget: Budget) -> Place:  # noqa: ARG002
        """Give everybody the first place."""
        return Place(1, 0)

    def leave_queue(self, name: str, ticket_id: str, budget: Budget) -> bool:  # noqa: ARG002
        """Keep no queue."""
        return False

    def guard(self, claim: Claim, connection: Any, *, idle: float = 60.0) -> Passed:  # noqa: ARG002
        """Let it pass, without a word to the connection."""
        return Passed()

    def fence_sql(self, claim: Claim, paramstyle: ParamStyle, *, start: int = 1) -> Fence:  # noqa: ARG002
        """Return a predicate that is true."""
        return Fence("TRUE", {} if paramstyle in {"pyformat", "named"} else [])

    def forget(self) -> None:
        """Hold nothing in a forked child."""
        self.__init__()  # type: ignore[misc]

    def close(self) -> None:
        """Close nothing."""


class Passed:
    """A guard that has passed."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def __await__(self) -> Generator[Any, None, Self]:
        yield from ()
        return self

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        pass
