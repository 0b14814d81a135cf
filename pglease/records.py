"""Facts: what the store said. Frozen, in the store's own time, and free of any conclusion.

What a process may conclude from a fact is a `Term` (`term.py`); what a user holds is a `HeldLease` (`held.py`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias

from pglease.errors import ConfigurationError

if TYPE_CHECKING:
    from pglease.bonds import Bond

LossReason: TypeAlias = Literal[
    "expired", "taken", "deleted", "forced", "unreachable", "max_hold", "session_died", "forked", "closed"
]
"""Why a hold ended without its holder's doing. A closed set.

expired: it lapsed in the store before a renewal arrived · taken: somebody else holds it now · deleted: the store no
longer knows the name · forced: an operator ended it · unreachable: the store could not be asked until the deadline ·
max_hold: it was held as long as it may be · session_died: the session it was bound to is gone · forked: this is a child
process, the hold is its parent's · closed: the client was closed.
"""


@dataclass(frozen=True, slots=True)
class Lease:
    """What the store says about a name: who holds or last held it, since when, until when.

    All times are the store's and timezone-aware; `seen_at` is its clock when the record was read. This process's wall
    clock never enters a judgement. `name`, `holder` and `renewed_at` say the same as `task_name`, `owner_id` and
    `heartbeat_at`, in the words of Kubernetes' leader record.

    Attributes:
        task_name: the lease's name, as given.
        owner_id: the holder's label for people. Ownership itself is a random id of one acquisition.
        fencing_token: larger with every hold of this name; unchanged by renewals.
        acquired_at: when this hold began.
        heartbeat_at: when it was last confirmed.
        expires_at: when it ends unless renewed; in the past once it is over.
        transitions: how often the lease changed hands: 0 for its first hold, +1 with each later one.
        metadata: what the holder attached.
        seen_at: the store's clock at the reading.
        given_back: whether it was ended on purpose, by its holder or an operator, and has not run out.
    """

    task_name: str
    owner_id: str
    fencing_token: int
    acquired_at: datetime
    heartbeat_at: datetime
    expires_at: datetime
    transitions: int
    seen_at: datetime
    metadata: Mapping[str, Any] = field(default_factory=dict, hash=False)
    given_back: bool = False

    @property
    def name(self) -> str:
        """The lease's name: `task_name`."""
        return self.task_name

    @property
    def holder(self) -> str:
        """The holder's label: `owner_id`."""
        return self.owner_id

    @property
    def renewed_at(self) -> datetime:
        """When the hold was last confirmed: `heartbeat_at`."""
        return self.heartbeat_at

    def is_expired(self, now: datetime | None = None) -> bool:
        """Tell whether the hold is over at `now` (store time; default: when the record was read)."""
        return self.expires_at <= (now or self.seen_at)

    def time_remaining(self, now: datetime | None = None) -> float:
        """Return the seconds left at `now` (store time; default: when the record was read), never below 0."""
        return max(0.0, (self.expires_at - (now or self.seen_at)).total_seconds())

    def is_zombie(self, heartbeat_timeout: float = 60.0, now: datetime | None = None) -> bool:
        """Tell whether the hold has not expired though its heartbeat is silent for longer than `heartbeat_timeout`.

        A hint for people. It is no licence to take over: silence is not death, and a takeover is refused until expiry.

        Args:
            heartbeat_timeout: seconds. Default 60, the default ttl: in that time a holder renews three times.
            now: a moment of the store's clock. Default None: when the record was read.
        """
        at = now or self.seen_at
        return not self.is_expired(at) and (at - self.heartbeat_at).total_seconds() > heartbeat_timeout


class _Draft:
    """A `Lease` in the making: the same fields, and nothing that keeps them from being set."""

    __slots__ = Lease.__slots__


def lease_of(
    *,
    task_name: str,
    owner_id: str,
    fencing_token: int,
    acquired_at: datetime,
    heartbeat_at: datetime,
    expires_at: datetime,
    transitions: int,
    seen_at: datetime,
    metadata: Mapping[str, Any],
    given_back: bool,
) -> Lease:
    """Return a `Lease`: what each answer of a store is read into.

    What is frozen sets each of its fields by a call: ten of them, given by name, take 3 µs, and this way half of one.
    """
    lease: Any = _Draft()
    lease.task_name = task_name
    lease.owner_id = owner_id
    lease.fencing_token = fencing_token
    lease.acquired_at = acquired_at
    lease.heartbeat_at = heartbeat_at
    lease.expires_at = expires_at
    lease.transitions = transitions
    lease.seen_at = seen_at
    lease.metadata = metadata
    lease.given_back = given_back
    lease.__class__ = Lease
    return lease  # type: ignore[no-any-return]


class Request(NamedTuple):
    """One acquisition: the question a backend is asked.

    `lease_id` (32 hex digits) is chosen before the first byte is sent, so that a retry recognises its own grant (C13)
    and a grant whose reply was lost can be given back. `ticket_id` is that of the asker's `Ticket`, if it has one: a
    live ticket at the head of the queue reserves a free name (C17).
    """

    name: str
    owner_id: str
    lease_id: str
    ttl: float
    metadata: Mapping[str, Any] = MappingProxyType({})
    ticket_id: str | None = None


@dataclass(frozen=True, slots=True)
class Renewal:
    """One hold that asks for more time: `ttl` seconds from the store's now."""

    name: str
    lease_id: str
    ttl: float


@dataclass(frozen=True, slots=True)
class Adoption:
    """One hold that is to go on as the next one: what is asked when a lease is handed over.

    Attributes:
        name: the lease.
        lease_id: that of the hold that ends.
        next_id: that of the hold that begins; 32 hex digits, chosen before the first byte is sent (C13).
        owner_id: the next holder's label.
        ttl: seconds of the hold that begins.
        unattended: whether nobody holds it yet, who would renew it: then it rests on its ttl alone.
    """

    name: str
    lease_id: str
    next_id: str
    owner_id: str
    ttl: float
    unattended: bool = False


@dataclass(frozen=True, slots=True)
class Handover:
    """A lease on its way to another holder: whoever shows it first goes on with it, and nobody else can.

    `str(handover)` is text for a queue, an environment variable or a file; `PGLease.adopt` takes either. Treat it as a
    secret: it is the lease.

    Attributes:
        name: the lease.
        lease_id: that of the hold that nobody attends to yet.
        owner_id: whom it is meant for; a label for people.
        fencing_token: of that hold; the next holder's is larger.
        ttl: seconds until it lapses unless it is adopted, counted from when it was handed over.
    """

    name: str
    lease_id: str = field(repr=False)
    owner_id: str
    fencing_token: int
    ttl: float

    def __str__(self) -> str:
        facts = (self.name, self.lease_id, self.owner_id, self.fencing_token, self.ttl)
        return _HANDOVER + json.dumps(facts).encode().hex()

    @classmethod
    def read(cls, text: str) -> Handover:
        """Read what `str` wrote.

        Args:
            text: all of it.

        Raises:
            ConfigurationError: it is something else.
        """
        try:
            name, lease_id, owner_id, token, ttl = json.loads(bytes.fromhex(text.removeprefix(_HANDOVER)))
            handover = cls(str(name), lease_id, str(owner_id), int(token), float(ttl))
            if text.startswith(_HANDOVER) and re.fullmatch("[0-9a-f]{32}", lease_id):
                return handover
        except (AttributeError, TypeError, ValueError):
            pass
        raise ConfigurationError(f"this is no handover of pglease's, which begins with {_HANDOVER!r}")


_HANDOVER = "pglease-handover-1:"


Ending: TypeAlias = Literal["released", "expired", "died", "forced", "transferred"]
"""How a hold ended: its holder gave it back, it lapsed, the session that it was bound to died, an operator ended it, or
its holder handed it over."""


@dataclass(frozen=True, slots=True)
class Tenure:
    """One hold of a lease from its beginning to its end, as the store remembers it. Store time only.

    Attributes:
        name: the lease.
        owner_id: the holder's label.
        fencing_token: the hold's.
        acquired_at: when it began.
        ended_at: when it ended; None while it runs.
        ending: how: "released" (its holder gave it back), "expired", "died" (the session that it was bound to; hybrid),
            "forced" (by an operator), "transferred" (to the next); None while it runs.
        seen_at: the store's clock when this was read.
    """

    name: str
    owner_id: str
    fencing_token: int
    acquired_at: datetime
    ended_at: datetime | None
    ending: Ending | None
    seen_at: datetime

    @property
    def seconds(self) -> float:
        """How long it was held, or is held so far, in seconds."""
        return ((self.ended_at or self.seen_at) - self.acquired_at).total_seconds()


@dataclass(frozen=True, slots=True)
class Claim:
    """One hold, as it is named where somebody else's data is written: current only if all three match."""

    name: str
    lease_id: str
    fencing_token: int


@dataclass(frozen=True, slots=True)
class Granted:
    """The name is ours.

    Attributes:
        lease: the record.
        bond: what the hold rests on besides its ttl, on stores with the trait `prompt_failover`.
    """

    lease: Lease
    bond: Bond | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True)
class Refused:
    """Somebody else has it, or waits for it before us; nothing was written.

    Attributes:
        lease: the holder's record, or None when the store could not say or the name is only reserved.
        retry_after: seconds after which asking again may help.
        reserved_for: the label of whoever stands at the head of the queue for a name that nobody holds.
        look_every: seconds between two looks of a waiter that wants to notice the holder's death before its ttl ends;
            infinity where that cannot be noticed.
    """

    lease: Lease | None
    retry_after: float
    reserved_for: str | None = None
    look_every: float = float("inf")

    @property
    def held_by(self) -> str | None:
        """The holder's label."""
        return self.lease.owner_id if self.lease else None


@dataclass(frozen=True, slots=True)
class InTheWay:
    """Of several names that were asked for together, one is not free; nothing was written."""

    name: str
    refused: Refused


@dataclass(frozen=True, slots=True)
class Held:
    """A renewal was applied: the hold goes on until `lease.expires_at`."""

    lease: Lease


@dataclass(frozen=True, slots=True)
class Gone:
    """The hold is over, definitely. `lease` is what the store has under that name now."""

    reason: LossReason
    lease: Lease | None = None


@dataclass(frozen=True, slots=True)
class Unknown:
    """The store did not say: locked, unreachable, too slow. Nothing may be concluded."""

    error: Exception | None = None


RenewalOutcome: TypeAlias = Held | Gone | Unknown


@dataclass(frozen=True, slots=True)
class Change:
    """A hint that the record of a marked name has changed: late, doubled or lost at times, so nothing rests on it.

    Attributes:
        name: which.
        what: "released": the hold was ended, or its end moved closer, or a reservation was given up · "granted":
            somebody got it.
        left: seconds until the name is free if nothing else happens, by the store when it said so; None when it did
            not.
    """

    name: str
    what: Literal["released", "granted"]
    left: float | None = None


@dataclass(frozen=True, slots=True)
class Ticket:
    """A place in the queue for a name: whoever comes first is served first.

    It has a short lease of its own and counts as long as it is renewed, so a waiter that died delays the next by no
    more than that.

    Attributes:
        name: the lease that is waited for.
        ticket_id: 32 hex digits, chosen by the waiter.
        owner_id: its label for people.
        ttl: seconds until the place is lost unless it is renewed.
    """

    name: str
    ticket_id: str
    owner_id: str
    ttl: float


@dataclass(frozen=True, slots=True)
class Place:
    """Where a ticket stands.

    Attributes:
        number: larger than that of every live ticket that came earlier; unchanged by renewals.
        ahead: how many live tickets come before it; 0 is the head.
    """

    number: int
    ahead: int


@dataclass(frozen=True, slots=True)
class Released:
    """The hold ended by our own doing."""


ReleaseOutcome: TypeAlias = Released | Gone


@dataclass(frozen=True, slots=True)
class Loss:
    """Why a hold was lost, and the last trouble seen before.

    Attributes:
        reason: one of `LossReason`.
        error: the last trouble with the store before it; None if there was none.
        lease: what the store said of the name then; None if it was not asked or knows nothing.
    """

    reason: LossReason
    error: Exception | None = None
    lease: Lease | None = None

    @property
    def taken_by(self) -> str | None:
        """The new holder's label, when the store named one."""
        return self.lease.owner_id if self.lease and self.reason == "taken" else None
