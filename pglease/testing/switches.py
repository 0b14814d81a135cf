"""Leases decided by the test, for code that takes them somewhere inside: process-wide, and without any store.

    with pglease.testing.never_acquire():
        assert nightly_report() == "skipped"

For every client there is, also those made earlier and meanwhile; where nothing is configured, for the default one too.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime, timedelta
from typing import Any
from unittest.mock import patch

from pglease import client, default
from pglease.client import PGLease
from pglease.giveback import GiveBack
from pglease.handles import HeldLease, Hold, NotAcquired
from pglease.heartbeat import HeartbeatManager
from pglease.listening import Ear
from pglease.options import HoldOptions
from pglease.records import Lease, Loss, LossReason, Request
from pglease.taking import Taking
from pglease.testing.free_for_all import FreeForAll
from pglease.testing.links import Double
from pglease.waiting import Room

RETRY_AFTER = 60.0
"""Seconds that whoever is refused is told to wait."""
_WHO_ASKS = (
    (PGLease, "backend"),
    (Taking, "backend"),
    (HeartbeatManager, "backend"),
    (Room, "backend"),
    (GiveBack, "_backend"),
    (Ear, "_backend"),
)
"""Whatever talks to a store, and the attribute by which it knows it."""
LOOKS = ("held", "remaining", "ensure", "raise_if_lost", "renew", "progress", "guard", "fence_sql", "lost", "loss")
"""By which a holder notices that its lease was lost."""


@contextmanager
def always_acquire() -> Iterator[None]:
    """Grant every lease to whoever asks, also several times at once; guards pass. Nothing is asked of any store.

    Leases that are held from before go on in their own store. What is still held at the end is over then.
    """
    instead = FreeForAll()
    active = True
    with ExitStack() as stack:
        for cls, attribute in _WHO_ASKS:
            stack.enter_context(_answered_by(cls, attribute, lambda: instead if active else None))
        stack.enter_context(_several_at_once(instead))
        stack.enter_context(_something_to_ask())
        try:
            yield
        finally:
            active = False  # what has kept the double goes on with its own store
            for each in client.every_client():
                _end(each, instead)


@contextmanager
def never_acquire(held_by: str = "somebody else") -> Iterator[None]:
    """Refuse every lease to whoever asks, at once: also who would wait, and however long.

    Args:
        held_by: who has them all, as a refusal says. Default "somebody else".
    """

    def refuse(taking: Taking, wanted: HoldOptions, **_: Any) -> NotAcquired:
        taking.refuse_if_closed()
        return NotAcquired(wanted.name, _held_by(held_by, wanted.name), RETRY_AFTER)

    async def refuse_in_a_task(taking: Taking, wanted: HoldOptions, **_: Any) -> NotAcquired:
        return refuse(taking, wanted)

    def refuse_many(taking: Taking, wanted: list[HoldOptions]) -> NotAcquired:
        return refuse(taking, wanted[0])

    async def refuse_many_in_a_task(taking: Taking, wanted: list[HoldOptions]) -> NotAcquired:
        return refuse(taking, wanted[0])

    answers: dict[str, Any] = {
        "take": refuse,
        "atake": refuse_in_a_task,
        "take_many": refuse_many,
        "atake_many": refuse_many_in_a_task,
    }
    with patch.multiple(Taking, **answers), _something_to_ask():
        yield


@contextmanager
def lose_after(name: str, calls: int = 1, reason: LossReason = "taken") -> Iterator[None]:
    """Have a lease lost after its holder has looked so many times, once.

    A look is a reading of `held`, `lost` or `loss`, or a call of `remaining`, `ensure`, `raise_if_lost`, `renew`,
    `progress`, `guard` or `fence_sql`, on whatever handle of the lease. The next look finds it lost, as do
    `on_lease_lost` and the end of the block.

    Args:
        name: the lease.
        calls: looks that still find it held, 0 or more. Default 1: the first finds it held, the second lost.
        reason: why it is lost. Default "taken".
    """
    counted = _Looks(name, calls, reason)
    looks: dict[str, Any] = {look: counted.counting(getattr(HeldLease, look)) for look in LOOKS}
    with patch.multiple(HeldLease, **looks):
        yield


class _Looks:
    """Counts how often a holder looks."""

    def __init__(self, name: str, calls: int, reason: LossReason) -> None:
        self._name = name
        self._left = calls
        self._reason: LossReason = reason
        self._lock = threading.RLock()
        self._inside = threading.local()  # a look of a look's own is not one more

    def counting(self, look: Any) -> Any:
        """Return the same look, counted."""
        if isinstance(look, property):
            assert look.fget is not None
            return property(self._counted(look.fget), doc=look.__doc__)
        return self._counted(look)

    def _counted(self, look: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(look)
        def looked(lease: HeldLease, *arguments: Any, **keywords: Any) -> Any:
            if lease.name != self._name or getattr(self._inside, "is_so", False):
                return look(lease, *arguments, **keywords)
            self._inside.is_so = True
            try:
                self._count(lease)
                return look(lease, *arguments, **keywords)
            finally:
                self._inside.is_so = False

        return looked

    def _count(self, lease: HeldLease) -> None:
        with self._lock:
            self._left -= 1
            lost = self._left == -1
        if lost:
            lease._hold.lose(Loss(self._reason, lease=lease.lease))


@contextmanager
def _answered_by(cls: type, attribute: str, instead: Callable[[], FreeForAll | None]) -> Iterator[None]:
    """Let every object of a class find a double where its store is; what it has kept of its own stays as it is."""

    def found(this: Any) -> Double:
        kept = vars(this)[attribute]
        return Double(kept.store if isinstance(kept, Double) else kept, instead)

    def keep(this: Any, value: Any) -> None:
        vars(this)[attribute] = value

    before = vars(cls).get(attribute)
    setattr(cls, attribute, property(found, keep))
    try:
        yield
    finally:
        if before is None:
            delattr(cls, attribute)
        else:  # one such context inside another
            setattr(cls, attribute, before)


@contextmanager
def _several_at_once(instead: FreeForAll) -> Iterator[None]:
    """Let a client hold a name more than once, which no store would ever grant it."""
    taken = Taking._taken
    displaced: list[tuple[Taking, Hold]] = []

    def taken_beside(taking: Taking, found: Any, request: Request, *more: Any) -> Any:
        earlier = taking.holds.pop(request.name, None)
        if earlier is not None and not instead.granted(earlier.lease_id):
            displaced.append((taking, earlier))
        return taken(taking, found, request, *more)

    try:
        with patch.object(Taking, "_taken", taken_beside):
            yield
    finally:
        for taking, hold in displaced:
            if not hold.over:
                taking.holds.setdefault(hold.name, hold)


@contextmanager
def _something_to_ask() -> Iterator[None]:
    """Have a default client even where nothing names a store."""
    if default.is_configured():
        yield
        return
    with PGLease("memory://pglease-testing") as nobodys, default.standing_in(nobodys):
        yield


def _end(each: PGLease, instead: FreeForAll) -> None:
    for hold in list(each.taking.holds.values()):
        if instead.granted(hold.lease_id):
            hold.end()
            each.taking.drop(hold)


def _held_by(owner: str, name: str) -> Lease:
    now = datetime.now(UTC)
    return Lease(name, owner, 1, now, now, now + timedelta(seconds=RETRY_AFTER), 0, now)
