"""Leases for the threads of one process, and the reference model that every other store is compared with.

One lock, one dictionary of rows. Time is the boot clock, mapped to datetimes from a fixed day: stepping the wall clock
changes nothing, and nobody mistakes these times for the hour of the day. Nothing is durable, nothing is shared between
processes, and a forked child starts with an empty store.
"""

from __future__ import annotations

import builtins
import json
import queue
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from typing import Any, Literal

from pglease import clock as boot_clock
from pglease import forks, options
from pglease.backends.base import AsksInOne, Budget, FencesNothing, Traits
from pglease.errors import BackendClosed
from pglease.records import (
    Adoption,
    Change,
    Ending,
    Gone,
    Granted,
    Held,
    InTheWay,
    Lease,
    LossReason,
    Place,
    Refused,
    Released,
    ReleaseOutcome,
    Renewal,
    RenewalOutcome,
    Request,
    Tenure,
    Ticket,
    lease_of,
)

_BOOT = datetime(2000, 1, 1, tzinfo=UTC)
_SHIFT = _BOOT.timestamp()
_TRAITS = Traits(
    kind="memory",
    clock="process",
    shared_by="threads",
    durable=False,
    wakes_waiters=True,
    fair=True,
    groups=True,
    history=True,
    slots=True,
)


@dataclass(slots=True)
class _Place:
    """A ticket in the queue."""

    ticket_id: str
    owner_id: str
    number: int
    expires_at: datetime


@dataclass(slots=True)
class _Line:
    """Who waits for a name. It outlives holds."""

    marked_until: datetime = _BOOT
    places: builtins.list[_Place] = field(default_factory=list)
    last_number: int = 0

    def live(self, now: datetime) -> builtins.list[_Place]:
        """Return the places that count, in their order, and drop the others."""
        self.places = [place for place in self.places if place.expires_at > now]
        return self.places

    def labels(self, now: datetime) -> builtins.list[str]:
        """Return who stands at them, and drop nobody: looking changes nothing."""
        return [place.owner_id for place in self.places if place.expires_at > now]

    def drop(self, ticket_id: str) -> bool:
        """Take a ticket away; False when it is not there."""
        before = len(self.places)
        self.places = [place for place in self.places if place.ticket_id != ticket_id]
        return len(self.places) < before


@dataclass(slots=True)
class _Row:
    """One name. It stays after its hold, as a tombstone that keeps the token; then `lease_id` is None."""

    owner_id: str
    lease_id: str | None
    fencing_token: int
    transitions: int
    metadata: str
    acquired_at: datetime
    heartbeat_at: datetime
    expires_at: datetime
    line: _Line

    def over(self, now: datetime) -> bool:
        return self.expires_at <= now

    def tenure(self, name: str, now: datetime, ending: Ending | None) -> Tenure:
        """Return its hold as it is remembered; one that lapsed ended when it did, whoever says so."""
        ended_at = min(self.expires_at, now) if ending else None
        return Tenure(name, self.owner_id, self.fencing_token, self.acquired_at, ended_at, ending, now)

    def held_by(self, lease_id: str, now: datetime) -> bool:
        return self.lease_id == lease_id and not self.over(now)

    def record(self, name: str, now: datetime) -> Lease:
        return lease_of(
            task_name=name,
            owner_id=self.owner_id,
            fencing_token=self.fencing_token,
            acquired_at=self.acquired_at,
            heartbeat_at=self.heartbeat_at,
            expires_at=self.expires_at,
            transitions=self.transitions,
            seen_at=now,
            metadata=json.loads(self.metadata) if self.metadata else {},
            given_back=self.lease_id is None,
        )


@dataclass(eq=False)
class _Store:
    """What all clients of one store share."""

    clock: Callable[[], float]
    keep: int = 0
    lock: threading.RLock = field(default_factory=threading.RLock)  # a signal handler may call in while a verb runs
    rows: dict[str, _Row] = field(default_factory=dict)
    past: dict[str, deque[Tenure]] = field(default_factory=dict)
    token_floor: int = 0
    listeners: builtins.list[_Subscription] = field(default_factory=builtins.list)

    def __post_init__(self) -> None:
        forks.forget_in_children(self, type(self).forget)

    def now(self) -> datetime:
        return datetime.fromtimestamp(self.clock() + _SHIFT, UTC)  # faster than a `timedelta` made of a float

    def forget(self) -> None:
        # The old lock may be held by a thread that does not exist in the child.
        self.lock, self.rows, self.past, self.token_floor, self.listeners = threading.RLock(), {}, {}, 0, []

    def remember(self, name: str, row: _Row, now: datetime, ending: Ending) -> None:
        """Keep how the hold of a row ends, unless that was kept before."""
        if self.keep and row.lease_id is not None:
            lapsed: Ending = "expired"
            past = self.past.setdefault(name, deque(maxlen=self.keep))
            past.append(row.tenure(name, now, lapsed if row.over(now) else ending))

    def announce(self, name: str, row: _Row, what: Literal["released", "granted"], now: datetime) -> None:
        """Tell whoever listens, if somebody waits for the name or watches it."""
        if row.line.marked_until > now:
            left = max(0.0, (row.expires_at - now).total_seconds())
            for listener in tuple(self.listeners):
                listener.put(Change(name, what, left))


class _Subscription:
    """What one client hears; `None` in the queue says that it was closed."""

    def __init__(self, store: _Store) -> None:
        self._store = store
        self._heard: queue.SimpleQueue[Change | None] = queue.SimpleQueue()  # reentrant: a signal handler may put
        with store.lock:
            store.listeners.append(self)

    def put(self, change: Change) -> None:
        self._heard.put(change)

    def next(self, seconds: float) -> Sequence[Change]:
        """See `Subscription.next`."""
        changes: builtins.list[Change] = []
        try:
            change = self._heard.get(timeout=max(0.0, seconds))
            while change is not None:
                changes.append(change)
                change = self._heard.get_nowait()
        except queue.Empty:
            return changes
        self._heard.put(None)  # for whoever asks again
        raise BackendClosed("this subscription was closed")

    def close(self) -> None:
        """See `Subscription.close`."""
        with self._store.lock:
            if self in self._store.listeners:
                self._store.listeners.remove(self)
        self._heard.put(None)


class MemoryBackend(FencesNothing, AsksInOne):
    """A client of a store in this process's memory. See `Backend` for the verbs.

    Args:
        clock: reads the store's time, in seconds. Default: the boot clock. Tests pass a clock that stands still.
        history: how many holds that have ended are remembered for each name, 0 or more. Default 0.
        store: what `another` hands on. Default None: a new one, as everybody else wants it.
    """

    traits = _TRAITS

    def __init__(
        self, clock: Callable[[], float] = boot_clock.now, *, history: int = 0, store: _Store | None = None
    ) -> None:
        self._store = store or _Store(clock, options.count(history, "history", least=0))
        self._subscriptions: builtins.list[_Subscription] = []
        self._closed = False

    def another(self) -> MemoryBackend:
        """Return another client of the same store; closing one leaves the others open."""
        return type(self)(store=self._store)

    def shares(self, other: MemoryBackend) -> bool:
        """Tell whether both are clients of one store."""
        return self._store is other._store

    def wake(self) -> None:
        """Have everybody who waits or watches look again: for whoever has moved the clock on."""
        with self._store.lock:
            for name in self._store.rows:
                for listener in tuple(self._store.listeners):
                    listener.put(Change(name, "released", 0.0))

    def __repr__(self) -> str:
        return f"<MemoryBackend {'closed' if self._closed else 'open'}>"

    def try_acquire(self, request: Request, budget: Budget) -> Granted | Refused:
        """Ask for a name once."""
        with self._store.lock:
            now = self._now(budget)
            row = self._store.rows.get(request.name)
            if row is not None and not row.over(now):
                lease = row.record(request.name, now)
                return Granted(lease) if row.held_by(request.lease_id, now) else Refused(lease, lease.time_remaining())
            if row is not None and (reserved := _reserved(row, request.ticket_id, now)):
                return reserved
            if row is not None:
                self._store.remember(request.name, row, now, "expired")
            row = self._store.rows[request.name] = self._next_hold(row, request, now)
            if request.ticket_id is not None:
                row.line.drop(request.ticket_id)
            self._store.announce(request.name, row, "granted", now)
            return Granted(row.record(request.name, now))

    def try_acquire_many(self, requests: Sequence[Request], budget: Budget) -> builtins.list[Granted] | InTheWay | None:
        """Ask for several names at once."""
        with self._store.lock:
            now = self._now(budget)
            for request in requests:
                row = self._store.rows.get(request.name)
                if row is not None and not row.over(now) and not row.held_by(request.lease_id, now):
                    lease = row.record(request.name, now)
                    return InTheWay(request.name, Refused(lease, lease.time_remaining()))
                if row is not None and row.over(now) and (reserved := _reserved(row, request.ticket_id, now)):
                    return InTheWay(request.name, reserved)
            answers = [self.try_acquire(request, budget) for request in requests]
            return [answer for answer in answers if isinstance(answer, Granted)]

    def _next_hold(self, last: _Row | None, request: Request, now: datetime) -> _Row:
        return _Row(  # in the order of its fields: by their names it would take twice as long
            request.owner_id,
            request.lease_id,
            (last.fencing_token if last else self._store.token_floor) + 1,
            last.transitions + 1 if last else 0,
            _written(request.metadata),
            now,
            now,
            now + _span(request.ttl),
            last.line if last else _Line(),
        )

    def renew(self, renewals: Sequence[Renewal], budget: Budget) -> builtins.list[RenewalOutcome]:
        """Extend many holds; the outcomes stand in the order of `renewals`."""
        with self._store.lock:
            now = self._now(budget)
            return [self._renew(renewal, now) for renewal in renewals]

    def _renew(self, renewal: Renewal, now: datetime) -> RenewalOutcome:
        row = self._store.rows.get(renewal.name)
        if row is None or not row.held_by(renewal.lease_id, now):
            return _gone(renewal.name, renewal.lease_id, row, now)
        row.heartbeat_at, row.expires_at = now, now + _span(renewal.ttl)
        return Held(row.record(renewal.name, now))

    def release(self, name: str, lease_id: str, budget: Budget, *, min_hold: float = 0.0) -> ReleaseOutcome:
        """End one hold, at once or at `acquired_at + min_hold`; one that lapsed is `Gone`, and given back."""
        with self._store.lock:
            now = self._now(budget)
            row = self._store.rows.get(name)
            if row is None or row.lease_id != lease_id:
                return _gone(name, lease_id, row, now)
            lapsed = _gone(name, lease_id, row, now) if row.over(now) else None
            self._store.remember(name, row, now, "released")
            row.lease_id = None
            if lapsed is not None:
                return lapsed
            row.expires_at = max(now, row.acquired_at + _span(min_hold)) if min_hold else now
            self._store.announce(name, row, "released", now)
            return Released()

    def force_release(self, name: str, fencing_token: int, budget: Budget) -> bool:
        """End whoever holds `name` under that token, also a hold that is only waited out (`min_hold`)."""
        with self._store.lock:
            now = self._now(budget)
            row = self._store.rows.get(name)
            if row is None or row.over(now) or row.fencing_token != fencing_token:
                return False
            self._store.remember(name, row, now, "forced")
            row.lease_id, row.expires_at = None, now
            self._store.announce(name, row, "released", now)
            return True

    def adopt(self, adoption: Adoption, budget: Budget) -> Granted | Gone:
        """Let a running hold go on as the next one."""
        with self._store.lock:
            now = self._now(budget)
            row = self._store.rows.get(adoption.name)
            if row is not None and row.held_by(adoption.next_id, now):
                return Granted(row.record(adoption.name, now))
            if row is None or not row.held_by(adoption.lease_id, now):
                return _gone(adoption.name, adoption.lease_id, row, now)
            request = Request(adoption.name, adoption.owner_id, adoption.next_id, adoption.ttl)
            following = self._next_hold(row, request, now)
            following.metadata = row.metadata
            self._store.remember(adoption.name, row, now, "transferred")
            self._store.rows[adoption.name] = following
            self._store.announce(adoption.name, following, "granted", now)
            return Granted(following.record(adoption.name, now))

    def set_metadata(self, name: str, lease_id: str, metadata: Mapping[str, Any], budget: Budget) -> Held | Gone:
        """Replace the metadata of a running hold."""
        with self._store.lock:
            now = self._now(budget)
            row = self._store.rows.get(name)
            if row is None or not row.held_by(lease_id, now):
                return _gone(name, lease_id, row, now)
            row.metadata = _written(metadata)
            return Held(row.record(name, now))

    def get(self, name: str, budget: Budget) -> Lease | None:
        """Read the record of the present or the last hold."""
        with self._store.lock:
            now = self._now(budget)
            row = self._store.rows.get(name)
            return row.record(name, now) if row else None

    def list(self, prefix: str, budget: Budget, *, ended: bool = False) -> builtins.list[Lease]:
        """Read the records of all names that begin with `prefix`, ordered by name."""
        with self._store.lock:
            now = self._now(budget)
            return [
                row.record(name, now)
                for name, row in sorted(self._store.rows.items())
                if name.startswith(prefix) and (ended or row.lease_id is not None or not row.over(now))
            ]

    def cleanup(self, older_than: float, budget: Budget) -> int:
        """Delete the records of holds that ended more than `older_than` seconds ago; new names start above."""
        with self._store.lock:
            now = self._now(budget)
            rows, before = self._store.rows, now - timedelta(seconds=older_than)
            doomed = [name for name, row in rows.items() if row.over(before) and not row.line.live(now)]
            for name in doomed:
                self._store.token_floor = max(self._store.token_floor, rows.pop(name).fencing_token)
                self._store.past.pop(name, None)
            return len(doomed)

    def listen(self, budget: Budget) -> _Subscription:
        """Begin to hear of marked names."""
        with self._store.lock:
            self._now(budget)
            subscription = _Subscription(self._store)
            self._subscriptions = [each for each in self._subscriptions if each in self._store.listeners]
            self._subscriptions.append(subscription)
            return subscription

    def mark(self, name: str, seconds: float, budget: Budget) -> bool:
        """Note that somebody waits for `name` for the next `seconds`."""
        with self._store.lock:
            now = self._now(budget)
            row = self._store.rows.get(name)
            if row is not None:
                row.line.marked_until = max(row.line.marked_until, now + timedelta(seconds=seconds))
            return row is not None

    def queue(self, ticket: Ticket, budget: Budget) -> Place | None:
        """Take a place in the queue, or renew it."""
        with self._store.lock:
            now = self._now(budget)
            row = self._store.rows.get(ticket.name)
            if row is None:
                return None
            places, until = row.line.live(now), now + timedelta(seconds=ticket.ttl)
            for ahead, place in enumerate(places):
                if place.ticket_id == ticket.ticket_id:
                    place.expires_at = until
                    return Place(place.number, ahead)
            row.line.last_number += 1
            places.append(_Place(ticket.ticket_id, ticket.owner_id, row.line.last_number, until))
            return Place(row.line.last_number, len(places) - 1)

    def leave_queue(self, name: str, ticket_id: str, budget: Budget) -> bool:
        """Give a place up; False when there was none."""
        with self._store.lock:
            now = self._now(budget)
            row = self._store.rows.get(name)
            if row is None or not row.line.drop(ticket_id):
                return False
            self._store.announce(name, row, "released", now)
            return True

    def history(self, name: str, budget: Budget, *, limit: int, prefix: bool = False) -> builtins.list[Tenure]:
        """Read the last holds of a name, the present one among them."""
        with self._store.lock:
            now = self._now(budget)
            found: builtins.list[Tenure] = []
            for each, row in self._store.rows.items():
                if each == name or (prefix and each.startswith(name)):
                    found += [replace(tenure, seen_at=now) for tenure in self._store.past.get(each, ())]
                    if row.lease_id is not None:
                        found.append(row.tenure(each, now, "expired" if row.over(now) else None))
            return sorted(found, key=lambda tenure: (tenure.acquired_at, tenure.fencing_token))[-limit:]

    def queued(self, name: str, budget: Budget) -> builtins.list[str]:
        """Return the labels of those who queue, the head first."""
        with self._store.lock:
            now = self._now(budget)
            row = self._store.rows.get(name)
            return row.line.labels(now) if row else []

    def queues(self, prefix: str, budget: Budget) -> dict[str, builtins.list[str]]:
        """Return every queue in which somebody stands."""
        with self._store.lock:
            now = self._now(budget)
            lines = {name: row.line.labels(now) for name, row in self._store.rows.items() if name.startswith(prefix)}
            return {name: labels for name, labels in lines.items() if labels}

    def forget(self) -> None:
        """Empty the store, in a forked child: its holds are the parent's."""
        self._subscriptions = []
        self._store.forget()

    def close(self) -> None:
        """End this client; holds go on."""
        self._closed = True
        while self._subscriptions:
            self._subscriptions.pop().close()

    def _now(self, budget: Budget) -> datetime:
        """Read the store's clock; its lock is held."""
        budget.sending()
        if self._closed:
            raise BackendClosed("this memory store was closed")
        return self._store.now()


@lru_cache(maxsize=64)
def _span(seconds: float) -> timedelta:
    return timedelta(seconds=seconds)


def _written(metadata: Mapping[str, Any]) -> str:
    return json.dumps(dict(metadata)) if metadata else ""


def _reserved(row: _Row, ticket_id: str | None, now: datetime) -> Refused | None:
    """Refuse whoever is not at the head of the queue for a free name."""
    places = row.line.places and row.line.live(now)
    if not places or places[0].ticket_id == ticket_id:
        return None
    return Refused(None, (places[0].expires_at - now).total_seconds(), places[0].owner_id)


def _gone(name: str, lease_id: str, row: _Row | None, now: datetime) -> Gone:
    if row is None:
        return Gone("deleted")
    reason: LossReason = "expired" if row.lease_id == lease_id else "forced" if row.lease_id is None else "taken"
    return Gone(reason, row.record(name, now))


_stores: dict[str, MemoryBackend] = {}


def shared(name: str) -> MemoryBackend:
    """Return a client of this process's store called `name`; the store lives as long as the process."""
    # One step of the dictionary's own, so no lock that a forked child or a signal handler could find taken.
    return (_stores.get(name) or _stores.setdefault(name, MemoryBackend())).another()
