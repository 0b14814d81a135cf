"""What every store promises: the contract, said once here and enforced by one suite (`pglease.testing.contract`).

C1   Exclusive. While a name is held by the store's clock, another `try_acquire` is refused and changes nothing, and
     learns the holder's record.
C2   Not re-entrant. That includes the same owner: one grant, one handle.
C3   Rising token. Each new hold's `fencing_token` exceeds every earlier one of that name, across release, expiry,
     force, cleanup, restart; +1 where nothing was cleaned up. A renewal keeps it.
C4   Renewal sets `expires_at` to store-now + ttl and keeps token and `acquired_at`.
C5   Renewal is scoped to one hold. Released, taken or lapsed: refused, nothing changed, nothing created, nothing
     revived.
C6   Release frees at once (or at `acquired_at + min_hold`), keeps the name's token, and is scoped to one hold; a second
     release is a harmless `Gone`.
C7   Expiry needs nobody: no janitor has to run.
C8   Expiry is judged by the clock the trait names. A client's wall clock never matters.
C9   Names are independent, and any legal name survives the round trip byte for byte.
C10  Looking changes nothing.
C11  Every verb may be called from many threads at once.
C12  Trouble is not an answer: transport failure is `BackendUnavailable`, wrong setup `BackendMisconfigured`; nothing
     foreign escapes.
C13  Ambiguity is resolved: a retry with the same `lease_id` recognises its own grant, and an acquire that raises leaves
     at most a hold that lapses by itself.
C14  Every verb is time-boxed: connect, pool wait, statement, lock wait and socket together end within the budget.
C15  `close` is idempotent, frees what it opened, ends no hold.

A backend is synchronous and never hears of asyncio. A verb that a store cannot keep is a trait; asking for it there is
a `ConfigurationError` that names it. Nothing above this floor branches on the kind of store.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, runtime_checkable

from pglease.records import Granted, Lease, Refused, ReleaseOutcome, Renewal, RenewalOutcome, Request


class Budget:
    """How long one verb may take, and when its request went out.

    Args:
        now: reads the boot clock, in seconds.
        until: the moment on that clock by which the verb must have ended, with an answer or with `BackendUnavailable`.
    """

    __slots__ = ("_now", "sent_at", "until")

    def __init__(self, now: Callable[[], float], until: float) -> None:
        self._now = now
        self.until = until
        self.sent_at = now()

    @classmethod
    def of(cls, seconds: float, now: Callable[[], float]) -> Budget:
        """Return a budget that ends `seconds` from now."""
        return cls(now, now() + seconds)

    def left(self) -> float:
        """Return the seconds left, negative once it is over."""
        return self.until - self._now()

    def sending(self) -> None:
        """Note that the request is about to leave: call it after connecting, before the first byte, for each try.

        A holder's belief is counted from here. A backend that never calls it loses a little of each lease, never its
        safety: then belief is counted from the call.
        """
        self.sent_at = self._now()


@dataclass(frozen=True, slots=True)
class Traits:
    """What a store can promise. The table in the README is printed from these.

    Attributes:
        kind: the store's name for people.
        clock: whose clock judges expiry.
        shared_by: how far the exclusion reaches.
        durable: whether leases and tokens survive a restart of the store.
        prompt_failover: whether a dead holder's lease is free before its ttl.
        wakes_waiters: whether a release wakes those who wait.
        fair: whether waiters can be served in the order of their arrival.
        transactional_fencing: whether the store itself can refuse a stale holder's write.
        token_survives_loss: whether tokens go on rising after the store lost acknowledged writes.
        slots: whether `once_per` slots can be judged.
    """

    kind: str
    clock: Literal["server", "host boot clock", "process", "observed change"]
    shared_by: Literal["threads", "processes", "hosts"]
    durable: bool
    prompt_failover: bool = False
    wakes_waiters: bool = False
    fair: bool = False
    transactional_fencing: bool = False
    token_survives_loss: bool = False
    slots: bool = False


@runtime_checkable
class Backend(Protocol):
    """A store of leases. See the module for the clauses."""

    @property
    def traits(self) -> Traits:
        """What this store can promise."""

    def try_acquire(self, request: Request, budget: Budget) -> Granted | Refused:
        """Ask for a name once, without waiting behind anybody. C1 C2 C3 C13.

        Raises:
            BackendUnavailable: with `outcome_unknown` when a grant may exist; release it by its `lease_id`.
            BackendMisconfigured: nothing was granted.
        """

    def renew(self, renewals: Sequence[Renewal], budget: Budget) -> list[RenewalOutcome]:
        """Extend many holds in one conversation; the outcomes stand in the order of `renewals`. C4 C5.

        A row that somebody else has locked is `Unknown`; the others are renewed all the same.

        Raises:
            BackendUnavailable: every one of them is unknown.
        """

    def release(self, name: str, lease_id: str, budget: Budget, *, min_hold: float = 0.0) -> ReleaseOutcome:
        """End one hold, at once or at `acquired_at + min_hold`. C6.

        Raises:
            BackendUnavailable: the store could not confirm; safe to repeat.
        """

    def force_release(self, name: str, fencing_token: int, budget: Budget) -> bool:
        """End whoever holds `name` under that token. False when the token is no longer current or the hold is over."""

    def get(self, name: str, budget: Budget) -> Lease | None:
        """Read the record of the present or the last hold. None when the store does not know the name. C10."""

    def list(self, prefix: str, budget: Budget, *, ended: bool = False) -> list[Lease]:
        """Read the records of all names that begin with `prefix`, ordered by name.

        Holds that were given back are left out unless `ended`; holds that lapsed are shown until they are cleaned up.
        """

    def cleanup(self, older_than: float, budget: Budget) -> int:
        """Delete the records of holds that ended more than `older_than` seconds ago; return how many.

        Tokens never go back.
        """

    def forget(self) -> None:
        """Drop, in a forked child, what belongs to the parent: connections are neither used nor closed."""

    def close(self) -> None:
        """Free what this backend opened. Idempotent; ends no hold. C15."""
