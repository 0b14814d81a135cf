"""`Semaphore`: at most so many holders at a time, each with a lease and a token of its own."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from pglease import current, identity, mistakes, options
from pglease.errors import NotOwnedError
from pglease.handles import HeldLease, NotAcquired
from pglease.options import Duration, OnLost
from pglease.primitives import talk
from pglease.primitives.configs import SemaphoreConfig, arguments_of
from pglease.primitives.talk import Deadline, List, Take, Talk
from pglease.primitives.vigil import Vigil
from pglease.records import Lease
from pglease.taking import not_acquired

if TYPE_CHECKING:
    from pglease.client import PGLease

SLOT = "#slot:"
GATE = "#gate"
_NUMBER = re.compile(r"[0-9]+\Z")


class Semaphore:
    """At most `limit` holders at a time, over all processes.

    The slots are leases called `NAME#slot:0`, `NAME#slot:1` and so on. Whoever waits holds `NAME#gate` meanwhile, so
    that one at a time looks for a free slot and the others sleep.

    Args:
        leases: the client.
        name: the semaphore, 1 to 240 characters.
        limit: 1 to 10,000. Processes may disagree: a smaller limit counts everybody who holds, and lets the others end.
        ttl, min_hold, max_hold, metadata, on_lost: as for `PGLease.acquire`, with its defaults.
        fair: serve those who wait in the order of their arrival, on stores that can (`traits.fair`). Default False.

    Attributes:
        leases: the client.
        name: the semaphore's name.

    Raises:
        ConfigurationError: every broken rule at once, also where the store lacks what is asked for.
    """

    def __init__(
        self,
        leases: PGLease,
        name: str,
        limit: int,
        ttl: Duration = 60,
        *,
        min_hold: Duration | None = None,
        max_hold: Duration | None = None,
        metadata: Mapping[str, Any] | None = None,
        fair: bool = False,
        on_lost: OnLost = "raise",
    ) -> None:
        self.leases = leases
        self._blocks: dict[identity.Caller, list[HeldLease]] = {}
        self._configure(
            name,
            limit,
            ttl,
            min_hold=min_hold,
            max_hold=max_hold,
            metadata=metadata,
            fair=fair,
            on_lost=on_lost,
        )

    def _configure(self, name: str, limit: int, ttl: Duration, **hold: Any) -> None:
        with options.all_problems() as problems:
            room = problems.check(options.limit, limit, "limit")
            wanted = problems.check(options.hold_options, name, ttl, **hold)
            problems.check(options.stem, name, "name")
        self.leases._check_traits(wanted)
        self.name = wanted.name
        self._limit = room
        self._slot = replace(wanted, fair=False)
        self._gate = options.HoldOptions(wanted.name + GATE, min(wanted.ttl, 5.0), fair=wanted.fair, on_lost="log")

    @classmethod
    def from_config(cls, leases: PGLease, name: str, config: SemaphoreConfig) -> Self:
        """Build one by a checked record; the environment is not asked.

        Args:
            leases: the client.
            name: the lease's.
            config: its options.

        Raises:
            ConfigurationError: no `SemaphoreConfig`, a name that is none, or options that this store cannot keep.
        """
        return cls(leases, name, **arguments_of(config, SemaphoreConfig))

    def reconfigure(self, config: SemaphoreConfig) -> None:
        """Go by other options from the next acquire on; the name stays.

        Args:
            config: the new options, all of them.

        Raises:
            ConfigurationError: no `SemaphoreConfig`, or one that this store cannot keep; nothing is changed.
        """
        self._configure(self.name, **arguments_of(config, SemaphoreConfig))

    @property
    def limit(self) -> int:
        """How many may hold at a time. May be set, to 1 to 10,000; it counts from the next acquire on."""
        return self._limit

    @limit.setter
    def limit(self, limit: int) -> None:
        self._limit = options.limit(limit, "limit")

    def acquire(self, timeout: Duration | None = None) -> HeldLease:
        """Wait for a slot; the handle's `release` gives it back.

        Args:
            timeout: seconds to wait at most; None (default) waits for ever, 0 asks once.

        Raises:
            ConfigurationError: `timeout` is no duration.
            AcquireTimeout: all slots are taken still. Nothing is held.
            BackendError: nothing is held, or lapses by itself.
        """
        mistakes.refuse_to_be_awaited()
        wait = options.wait(timeout, "timeout")
        return self._got(talk.run(self._conversation(wait), self.leases), wait)

    def _got(self, taken: HeldLease | NotAcquired, wait: float) -> HeldLease:
        """Return what was taken; a refusal is an error."""
        if isinstance(taken, NotAcquired):
            raise not_acquired(taken, replace(self._slot, name=self.name, wait=wait))
        return taken

    def acquire_nowait(self) -> HeldLease | NotAcquired:
        """Ask once: a `HeldLease` (true), or a `NotAcquired` (false) that names one of the holders.

        With `fair=True` also while somebody waits, or has only just got a slot and is on the way in.

        Raises:
            BackendError: nothing is held, or lapses by itself.
        """
        mistakes.refuse_to_be_awaited()
        return talk.run(self._conversation(None), self.leases)

    def holders(self) -> list[Lease]:
        """Return the records of those who hold a slot, by the store. Errors as for `PGLease.list_leases`."""
        return [record for _, record in _live(self.name, self.leases.list_leases(self.name + SLOT))]

    @contextmanager
    def hold(self, timeout: Duration | None = None) -> Iterator[HeldLease]:
        """Return a block that waits for at most `timeout` seconds (None: for ever).

        Raises:
            AcquireTimeout, BackendError: on entering, as for `acquire`.
            LeaseLostError: on leaving, unless the block raised already or `on_lost="log"`.
        """
        lease = self._enter(self.acquire(timeout))
        error: BaseException | None = None
        try:
            yield lease
        except BaseException as raised:
            error = raised
            raise
        finally:
            self._leave(lease, error)

    def __enter__(self) -> HeldLease:
        """Wait for ever, then hold a slot for the block."""
        lease = self._enter(self.acquire())
        self._blocks.setdefault(identity.current_caller(), []).append(lease)
        return lease

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        caller = identity.current_caller()
        if caller not in self._blocks:
            raise NotOwnedError(f"this thread has entered no block of {self.name!r}", name=self.name)
        lease = self._blocks[caller].pop()
        if not self._blocks[caller]:
            del self._blocks[caller]
        self._leave(lease, error)

    def _enter(self, lease: HeldLease) -> HeldLease:
        lease._hold.in_block = True
        current.enter(lease)
        return lease

    def _leave(self, lease: HeldLease, error: BaseException | None) -> None:
        current.leave(lease)
        self.leases.taking.leave(lease._hold, error)

    # -- how a slot is got ---------------------------------------------------------------------------------------------

    def _conversation(self, wait: float | None) -> Talk[HeldLease | NotAcquired]:
        """Return the talk of one acquire."""
        deadline, refusal = Deadline(wait), None
        if not self._gate.fair:  # else nobody gets a slot past those who wait
            taken = yield from self._try_once()
            if isinstance(taken, HeldLease):
                return taken
            refusal = self._refusal(taken)
            if deadline.over():
                return refusal
        gate = yield Take(deadline.of(self._gate))
        if isinstance(gate, NotAcquired):
            return refusal if refusal is not None else (yield from self._behind(gate))
        vigil = Vigil(self.leases)
        try:
            return (yield from self._wait_at(gate, deadline, vigil))
        finally:
            vigil.close()
            talk.abandon(gate, self.leases)

    def _wait_at(self, gate: HeldLease, deadline: Deadline, vigil: Vigil) -> Talk[HeldLease | NotAcquired]:
        """Hold the gate and take the first slot that is free."""
        while True:
            taken = yield from self._try_once()
            if isinstance(taken, HeldLease):
                return taken
            if deadline.over():
                return self._refusal(taken)
            if not gate.held:  # paused for long: others may be at the gate
                return (yield from self._conversation(deadline.left()))
            yield deadline.rest(vigil, taken)

    def _behind(self, gate: NotAcquired) -> Talk[NotAcquired]:
        """Refuse whoever did not get through the gate: name who holds a slot, rather than who waits for one."""
        live = _live(self.name, (yield List(self.name + SLOT)))
        if live:
            return self._refusal([record for _, record in live])
        return NotAcquired(self.name, gate.lease, gate.retry_after)

    def _refusal(self, holders: list[Lease]) -> NotAcquired:
        """Name the holder whose slot may be free first."""
        return talk.refused(self.name, min(holders, key=Lease.time_remaining, default=None))

    def _try_once(self) -> Talk[HeldLease | list[Lease]]:
        """Look for free slots and try them in a random order, since others look too; else return who holds."""
        limit = self._limit
        live = _live(self.name, (yield List(self.name + SLOT)))
        taken = {number for number, _ in live}
        room = limit - len(live)
        free = [number for number in range(limit) if number not in taken]
        for number in random.sample(free, min(len(free), max(0, room), 3)):
            answer = yield Take(replace(self._slot, name=f"{self.name}{SLOT}{number}", wait=None))
            if isinstance(answer, HeldLease):
                if max(taken, default=0) < limit or (yield from self._has_room(answer, limit)):
                    return answer
                break
        return [record for _, record in live]

    def _has_room(self, slot: HeldLease, limit: int) -> Talk[bool]:
        """Count once more with `slot` taken, and give it back if it is one too many.

        Where somebody holds beyond the limit, there are more slots than room, and several may have taken one at once.
        """
        try:
            live = _live(self.name, (yield List(self.name + SLOT)))
        except BaseException:
            talk.abandon(slot, self.leases)
            raise
        if len(live) > limit:
            talk.abandon(slot, self.leases)
        return len(live) <= limit

    def __repr__(self) -> str:
        return f"<Semaphore {self.name!r}, limit {self._limit}>"


def _live(name: str, records: list[Lease]) -> list[tuple[int, Lease]]:
    """Return the slots of this semaphore, and of no other whose name begins alike, that somebody holds."""
    numbered = [(record.task_name[len(name + SLOT) :], record) for record in records]
    return [(int(number), record) for number, record in numbered if _NUMBER.match(number) and not record.is_expired()]
