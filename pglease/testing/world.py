"""A small world for tests: two owners of leases, a clock that can be moved, and what may happen to a holder."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

from pglease import clock
from pglease.backends.base import Backend, Budget
from pglease.backends.memory import MemoryBackend
from pglease.client import PGLease, every_client
from pglease.handles import Hold
from pglease.records import Renewal
from pglease.testing.fake_clock import FakeClock
from pglease.testing.links import Link

PATIENCE = 30.0
"""Seconds that one question of a test's may take."""


class MovableClock(FakeClock):
    """The clock of a memory store, which moves when the test says so, and with it what holders believe.

    It stands still otherwise. Moving it on is like a pause of everything: no renewal happens meanwhile, so a hold that
    has not that much left is lost. Holders hear of it at once, waiters look again.

    Args:
        start: seconds it shows at first. Default 1000.

    Attributes:
        store: the memory store whose time this is; set by whoever makes the store.
    """

    store: MemoryBackend | None = None

    def advance(self, seconds: float) -> None:
        """Go on by `seconds`; never back.

        Raises:
            RuntimeError: no memory store goes by this clock: a server's own cannot be moved.
        """
        if self.store is None:
            raise RuntimeError("no memory store goes by this clock, and a server's own cannot be moved: use expire()")
        super().advance(seconds)
        for hold in _holds_in(self.store):
            hold.max_until -= seconds
            hold.shorten(hold.term.trusted_until - seconds)
            hold.current_loss()
        self.store.wake()


def _holds_in(store: MemoryBackend) -> list[Hold]:
    return [hold for each in every_client() if _is_of(each.backend, store) for hold in list(each.taking.holds.values())]


def _is_of(backend: Backend, store: MemoryBackend) -> bool:
    inner = backend.store if isinstance(backend, Link) else backend
    return isinstance(inner, MemoryBackend) and inner.shares(store)


class World:
    """Two owners on one store, and what can be done to them.

    Args:
        open_store: opens one more client of the store.
        clock_: the store's clock, where it is one that can be moved.

    Attributes:
        one, other: their clients, which know nothing of each other.
        clock: moves the time of a memory store.
    """

    def __init__(self, open_store: Callable[[], Backend], clock_: MovableClock) -> None:
        self.clock = clock_
        self._open = open_store
        self._links = {label: Link(open_store()) for label in ("one", "other")}
        self.one, self.other = (PGLease(cast("Backend", link), owner_id=label) for label, link in self._links.items())
        self._thieves: list[PGLease] = []

    def expire(self, name: str, *, noticed: bool = True) -> None:
        """Let the hold of `name` be over, by the store's clock, as if its ttl had run out.

        Args:
            name: a lease that one of the two holds.
            noticed: whether its holder hears of it at once, as from its next renewal. Default True. False: it goes on
                believing, like one that is paused, until it asks the store.

        Raises:
            LookupError: neither of the two holds it.
        """
        owner, hold = self._holder(name)
        store = self._links[owner.owner_id].store
        store.renew([Renewal(name, hold.lease_id, 0.0)], Budget.of(PATIENCE, clock.now))
        if noticed:
            _notice(owner, hold)

    def steal(self, name: str, owner: str = "thief", *, noticed: bool = True) -> PGLease:
        """Let somebody else have the lease, as if its hold had run out and been taken over.

        Args:
            name: a lease that one of the two holds.
            owner: what the thief is called. Default "thief".
            noticed: as for `expire`.

        Returns:
            the thief's client, which holds it without renewing it: `.release(name)` gives it back.

        Raises:
            LookupError: neither of the two holds it.
        """
        holder, hold = self._holder(name)
        self.expire(name, noticed=False)
        thief = PGLease(self._open(), owner_id=owner)
        self._thieves.append(thief)
        if not thief.try_acquire(name, ttl=600, heartbeat=False):
            raise RuntimeError(f"somebody was quicker than the thief of {name!r}")
        if noticed:
            _notice(holder, hold)
        return thief

    def cut(self, owner: PGLease) -> None:
        """Cut the link between the store and `one` or `other`: renewals, and whatever else it asks, fail from now on.

        What it holds goes on until it no longer trusts it: advance the clock, or wait.

        Args:
            owner: `one` or `other`.
        """
        self._links[owner.owner_id].cut = True
        for hold in list(owner.taking.holds.values()):
            _notice(owner, hold)

    def mend(self, owner: PGLease) -> None:
        """Mend the link of `owner` again."""
        self._links[owner.owner_id].cut = False

    def _holder(self, name: str) -> tuple[PGLease, Hold]:
        for owner in (self.one, self.other):
            hold = owner.taking.holds.get(name)
            if hold is not None and not hold.over:
                return owner, hold
        raise LookupError(f"neither of the two holds {name!r}")

    def close(self) -> None:
        """End it all."""
        for link in self._links.values():
            link.cut = False
        for client in (self.one, self.other, *self._thieves):
            client.close()
            client.backend.close()


def _notice(owner: PGLease, hold: Hold) -> None:
    owner.heartbeat_manager.try_to_extend(hold)
