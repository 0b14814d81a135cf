"""Looks at the store, once a tick for all who look at it together. While nobody does, the store is asked nothing.

No task runs in the background: whoever waits for the next look and is the first to find it due, looks for all.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any

from pglease import clock
from pglease.aio import AsyncPGLease
from pglease.errors import BackendError, BackendMisconfigured, PgleaseError
from pglease.records import Lease, Tenure

log = logging.getLogger("pglease")

HOLDS = 200
"""The last so many holds are drawn."""
Hold = tuple[str, int, bool, bool]
"""What changes when a hold begins or ends, and at no renewal."""
PASTS = 64
"""Of so many leases the history is kept at hand."""


@dataclass(frozen=True, slots=True)
class View:
    """What the store said.

    Attributes:
        number: counts the looks, those without an answer too.
        leases: the records by name, ended ones too; those of the last answer, while there is no newer one.
        queues: who queues, by name.
        tenures: the last holds; of a store without history, the last one of each name.
        notes: what could not be read, and why.
        trouble: why there was no answer; empty when there was one.
        made: what was made of it, by what was asked for: once for all who ask for the same.
    """

    number: int = 0
    leases: Mapping[str, Lease] = field(default_factory=dict)
    queues: Mapping[str, Sequence[str]] = field(default_factory=dict)
    tenures: Sequence[Tenure] = ()
    notes: tuple[str, ...] = ()
    trouble: str = ""
    made: dict[tuple[str, ...], Any] = field(default_factory=dict, compare=False, repr=False)

    @property
    def seen_at(self) -> datetime | None:
        """The store's clock at its last answer; None when it has told of nothing yet."""
        return next((lease.seen_at for lease in self.leases.values()), None)


class Lookout:
    """Sees what the store says, for any number of viewers on one event loop.

    Args:
        leases: who asks.
        prefix: the beginning of the names to look at.
        every: seconds between two looks at least.
    """

    def __init__(self, leases: AsyncPGLease, prefix: str, every: float) -> None:
        self.prefix = prefix
        self._leases, self._every = leases, every
        self._traits = leases.client.backend.traits
        self._view = View()
        self._due = 0.0
        self._holds: frozenset[Hold] | None = None
        self._tenures: Sequence[Tenure] = ()
        self._lack: Sequence[str] = ()
        self._past: dict[Hold, Sequence[Tenure]] = {}
        self._turn = asyncio.Lock()
        self._closed = asyncio.Event()

    async def now(self) -> View:
        """Return the last look, or look, when that is a tick ago."""
        if clock.now() >= self._due:
            async with self._turn:
                await self._look_if_due()
        return self._view

    async def after(self, number: int) -> View | None:
        """Wait for the look that comes after the one with this number; None once this is closed."""
        while not self._closed.is_set():
            if self._view.number != number:
                return self._view
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._closed.wait(), max(0.0, self._due - clock.now()))
            async with self._turn:
                if self._view.number == number and not self._closed.is_set():
                    await self._look_if_due()
        return None

    async def history(self, lease: Lease) -> Sequence[Tenure]:
        """Return the last holds of one lease: asked for anew only when a hold has begun or ended."""
        key = _hold(lease)
        async with self._turn:
            if key not in self._past:
                try:
                    found = await self._remembered([lease], lease.name)
                except BackendError as error:
                    log.debug("the history of %r cannot be read for now: %s", lease.name, error)
                    return [_last_hold(lease)]
                self._past[key] = found
                while len(self._past) > PASTS:
                    del self._past[next(iter(self._past))]
            return self._past[key]

    def turn(self) -> None:
        """Let whoever asks next look, however short ago the last look was: something was changed."""
        self._due = 0.0

    def close(self) -> None:
        """Send all viewers away. Idempotent; on the loop's thread."""
        self._closed.set()

    # -- looking -------------------------------------------------------------------------------------------------------

    async def _look_if_due(self) -> None:
        if clock.now() < self._due:
            return
        try:
            view = await self._read()
        except PgleaseError as error:
            view = replace(self._view, trouble=" ".join(str(error).split()))
        self._view = replace(view, number=self._view.number + 1, made={})
        self._due = clock.now() + self._every

    async def _read(self) -> View:
        leases = await self._leases.list_leases(self.prefix, ended=True)
        notes: list[str] = []
        queues: Mapping[str, Sequence[str]] = {}
        if self._traits.fair:
            try:
                queues = await self._leases.queues(self.prefix)
            except BackendMisconfigured as error:
                notes.append(f"who queues cannot be read: {error}")
        holds = frozenset(map(_hold, leases))
        if holds != self._holds:
            self._tenures, self._lack = await self._drawn(leases)
            self._holds = holds
        notes += self._lack
        return View(0, {lease.name: lease for lease in leases}, queues, self._tenures, tuple(notes))

    async def _drawn(self, leases: Sequence[Lease]) -> tuple[Sequence[Tenure], Sequence[str]]:
        try:
            return await self._remembered(leases, None), ()
        except BackendMisconfigured as error:
            return [*map(_last_hold, leases)], [f"past holds cannot be read: {error}"]

    async def _remembered(self, leases: Sequence[Lease], name: str | None) -> Sequence[Tenure]:
        if not self._traits.history:
            return [*map(_last_hold, leases)]
        return await self._leases.history(name, prefix="" if name else self.prefix, limit=HOLDS)


def _hold(lease: Lease) -> Hold:
    return lease.name, lease.fencing_token, lease.given_back, lease.is_expired()


def _last_hold(lease: Lease) -> Tenure:
    """Return the one hold that a record tells of."""
    runs = not lease.is_expired()
    return Tenure(
        lease.name,
        lease.owner_id,
        lease.fencing_token,
        lease.acquired_at,
        None if runs else lease.expires_at,
        None if runs else "released" if lease.given_back else "expired",
        lease.seen_at,
    )
