"""What happens to leases, as small frozen records for whoever watches this process. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeAlias

from pglease.records import Lease, Place

EventKind: TypeAlias = Literal[
    "attempted",
    "acquired",
    "busy",
    "waited",
    "failed",
    "waiting",
    "renewed",
    "unknown",
    "at_risk",
    "lost",
    "released",
    "unconfirmed",
    "released_late",
    "transferred",
    "forced",
]
"""attempted: somebody asks for a lease; one of the next four says how that ended · acquired: a hold began · busy:
somebody else has it · waited: a wait ended in vain, its time was over or it was cancelled · failed: the store was in
trouble, or the caller was interrupted · waiting: a wait has lasted for its `warn_after`, then for twice that, and so on
· renewed: a renewal was confirmed · unknown: a renewal's outcome is not known · at_risk: a hold ends within a third of
its ttl unless it is renewed · lost: a hold was lost · released: its holder ended it · unconfirmed: its holder ended it,
the store did not confirm · released_late: the store confirmed in the background what it had not at first, or what
nobody waited for · transferred: its holder handed it over · forced: this client ended somebody's hold, as an operator.
"""


@dataclass(frozen=True, slots=True)
class Waiting:
    """How one wait stands.

    Attributes:
        name: the lease that is waited for.
        owner_id: the waiter's label.
        seconds: how long it has waited.
        lease: the holder's record as last seen: who, since when, until when; None when nobody holds it or the store
            could not say.
        place: where it stands in the queue (`fair=True`), as last seen.
        reserved_for: whom a free name is kept for, who waits first.
    """

    name: str
    owner_id: str
    seconds: float
    lease: Lease | None = None
    place: Place | None = None
    reserved_for: str | None = None


ChangeKind: TypeAlias = Literal["present", "acquired", "taken over", "released", "expired", "deleted"]
"""present: how things stood when the watch began · acquired: a hold began · taken over: a hold began, and the end of
the one before was not seen; it lapsed, as it seems · released: a hold was ended, by its holder or by force · expired:
it lapsed · deleted: the record of a hold that was over was cleaned up."""


@dataclass(frozen=True, slots=True)
class LeaseChange:
    """One thing that happened to a lease, as a watcher sees it.

    Attributes:
        kind: what.
        lease: the record it is about.
        missed: how many holds between the last change and this one are not told of, since nobody looked meanwhile.
    """

    kind: ChangeKind
    lease: Lease
    missed: int = 0

    @property
    def name(self) -> str:
        """The lease's name."""
        return self.lease.task_name


@dataclass(frozen=True, slots=True)
class Event:
    """One thing that happened.

    Attributes:
        kind: what.
        name: the lease.
        owner_id: our label; for `busy`, `waited` and `waiting` the holder's, None when the store could not say.
        fencing_token: the hold's.
        reason: why a hold was lost.
        seconds: how long it took to acquire or to fail, how long it was held, or how long was waited, on the boot
            clock; for `at_risk` and `unknown`, how much is left.
        error: the trouble behind `failed`, `unknown`, `unconfirmed` and `lost`.
        waiting: how a wait stands, for `waiting`.
        at: the boot clock when it happened (`pglease.clock.now()`).
    """

    kind: EventKind
    name: str
    owner_id: str | None = None
    fencing_token: int | None = None
    reason: str | None = None
    seconds: float | None = None
    error: Exception | None = None
    waiting: Waiting | None = None
    at: float = 0.0


Facts: TypeAlias = tuple[Any, ...]
"""What an event is made of: its fields, in their order."""


class _Draft:
    """An `Event` in the making: the same fields, and nothing that keeps them from being set."""

    __slots__ = Event.__slots__


def event_of(facts: Facts) -> Event:
    """Return an `Event`: what is frozen sets each of its fields by a call, which takes five times as long."""
    event: Any = _Draft()
    (
        event.kind,
        event.name,
        event.owner_id,
        event.fencing_token,
        event.reason,
        event.seconds,
        event.error,
        event.waiting,
        event.at,
    ) = facts
    event.__class__ = Event
    return event  # type: ignore[no-any-return]


class Observer(Protocol):
    """Is told of events, in order, on a thread of its own: raising or hanging harms nobody else.

    Each is told in the context (`contextvars`) of whoever asked for the lease. An observer may have a second method,
    `wants(kind: str) -> bool`, which is asked on the spot, before an event is made: it must be quick, and what it does
    not want costs next to nothing.
    """

    def notify(self, event: Event) -> None:
        """Take note of one event."""
