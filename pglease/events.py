"""What happens to leases, as small frozen records for whoever watches this process. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol, TypeAlias

EventKind: TypeAlias = Literal["acquired", "busy", "renewed", "unknown", "lost", "released", "unconfirmed"]
"""acquired: a hold began · busy: somebody else has it · renewed: a renewal was confirmed · unknown: a renewal's outcome
is not known · lost: a hold was lost · released: its holder ended it · unconfirmed: its holder ended it, the store did
not confirm."""


@dataclass(frozen=True, slots=True)
class Event:
    """One thing that happened.

    Attributes:
        kind: what.
        name: the lease.
        owner_id: our label; for `busy` the holder's, None when the store could not say.
        fencing_token: the hold's.
        reason: why a hold was lost.
        seconds: how long it took to acquire or how long it was held, on the boot clock.
        error: the trouble behind `unknown` and `unconfirmed`.
    """

    kind: EventKind
    name: str
    owner_id: str | None = None
    fencing_token: int | None = None
    reason: str | None = None
    seconds: float | None = None
    error: Exception | None = None


class Observer(Protocol):
    """Is told of events, in order, on a thread of its own: raising or hanging harms nobody else."""

    def notify(self, event: Event) -> None:
        """Take note of one event."""
