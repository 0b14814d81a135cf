"""`TaskLock`: a lease for scheduled work, which does not wait and is not renewed unless asked."""

from __future__ import annotations

from collections.abc import Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from pglease import current, identity, mistakes, options
from pglease.errors import ConfigurationError, NotOwnedError
from pglease.handles import HeldLease, NotAcquired
from pglease.options import Duration, OnLost
from pglease.primitives.configs import TaskLockConfig, arguments_of, renew_by
from pglease.slots import OncePer
from pglease.slots import once_per as slots_of

if TYPE_CHECKING:
    from pglease.client import PGLease


class TaskLock:
    """Keeps a scheduled task from running twice: asked once, and held for a while after a short run.

    A block binds a `HeldLease` (true), or a `NotAcquired` (false) when another worker has this run. A body that
    outlives ttl has lost the lease: that is logged, and leaving the block raises `LeaseLostError`.

    Args:
        leases: the client.
        name: the lease.
        ttl: seconds after which the lease is free if the worker dies, and the longest run without `refresh`. Default
            60.
        min_hold: seconds from the start during which nobody else runs it, by the store's clock, however short the run.
            At most ttl, unless it is renewed. Default None: free at the end of the run.
        max_hold: seconds after which it is lost, `refresh` or not. Default None: never.
        once_per: one run per slot of time, as for `PGLease.singleton_task`. Default None.
        metadata: as for `PGLease.acquire`.
        heartbeat: True renews it in the background. Default False: a run that hangs loses it.
        on_lost: as for `PGLease.acquire`.

    Attributes:
        leases: the client.

    Raises:
        ConfigurationError: every broken rule at once, also where the store lacks what is asked for.

    Source:
        grelmicro's `TaskLock`, and ShedLock's `lockAtMostFor` and `lockAtLeastFor`.
    """

    __slots__ = ("_blocks", "_lease", "_wanted", "leases")

    def __init__(
        self,
        leases: PGLease,
        name: str,
        ttl: Duration = 60,
        *,
        min_hold: Duration | None = None,
        max_hold: Duration | None = None,
        once_per: OncePer | None = None,
        metadata: Mapping[str, Any] | None = None,
        heartbeat: bool = False,
        on_lost: OnLost = "raise",
    ) -> None:
        self.leases = leases
        self._wanted = options.hold_options(
            name,
            ttl,
            min_hold=min_hold,
            max_hold=max_hold,
            metadata=metadata,
            heartbeat=heartbeat,
            on_lost=on_lost,
            once_per=None if once_per is None else slots_of(once_per),
        )
        leases._check_traits(self._wanted)
        self._lease: HeldLease | None = None
        self._blocks: dict[identity.Caller, list[HeldLease | NotAcquired]] = {}

    @classmethod
    def from_config(cls, leases: PGLease, name: str, config: TaskLockConfig) -> Self:
        """Build one by a checked record; the environment is not asked.

        Args:
            leases: the client.
            name: the lease's.
            config: its options.

        Raises:
            ConfigurationError: no `TaskLockConfig`, a name that is none, or options that this store cannot keep.
        """
        return cls(leases, name, **arguments_of(config, TaskLockConfig))

    def reconfigure(self, config: TaskLockConfig) -> None:
        """Go by other options from the next run on; a run that is under way is refreshed by a new ttl at once.

        The name stays.

        Args:
            config: the new options, all of them.

        Raises:
            ConfigurationError: no `TaskLockConfig`, or one that this store cannot keep; nothing is changed.
            BackendUnavailable: the new options count, and it is unknown whether the run was refreshed.
        """
        self._wanted = type(self).from_config(self.leases, self.name, config)._wanted
        renew_by(self._wanted.ttl, self._lease)

    @property
    def name(self) -> str:
        """The lease's name."""
        return self._wanted.name

    @property
    def lease(self) -> HeldLease | None:
        """The handle of the last run through this object, also if it is over; None before."""
        return self._lease

    def acquire(self) -> HeldLease | NotAcquired:
        """Ask once; `release` ends it.

        Raises:
            BackendError: nothing is held, or lapses by itself.
        """
        mistakes.refuse_to_be_awaited()
        return self._got(self.leases.taking.take(self._wanted))

    def _got(self, taken: HeldLease | NotAcquired) -> HeldLease | NotAcquired:
        """Keep the handle of what was taken; a refusal leaves the run that may be under way its handle."""
        if isinstance(taken, HeldLease):
            self._lease = taken
        return taken

    def refresh(self, ttl: Duration | None = None) -> HeldLease:
        """Extend the run by `ttl` seconds from now (default: its ttl); the token stays.

        Raises:
            ConfigurationError: `ttl` is no duration; nothing was sent.
            NotOwnedError: there is no run, or it has lost the lease. Nothing changed.
            BackendUnavailable: unknown whether it was extended; belief does not grow.
        """
        lease = self._mine()
        lease.renew(ttl)
        return lease

    def extend(self, ttl: Duration | None = None) -> HeldLease:
        """See `refresh`."""
        return self.refresh(ttl)

    def locked(self) -> bool:
        """Tell whether the lease is held, or waited out (`min_hold`, `once_per`), by the store.

        Raises:
            BackendError: as for `PGLease.get_lease`.
        """
        record = self.leases.get_lease(self.name)
        return record is not None and not record.is_expired()

    def release(self) -> None:
        """End the run; the lease is free at once, or when `min_hold` or the slot is over.

        Raises:
            NotOwnedError: there is no run, or it has lost the lease. Nothing changed.
            ReleaseError: the store could not confirm it; over here, lapses there by its ttl.
        """
        if not self._mine().release():
            raise NotOwnedError(f"the run of {self.name!r} had lost its lease before it was released", name=self.name)

    def _mine(self) -> HeldLease:
        lease = self._lease
        if lease is None or not lease.held:
            how = "nothing was acquired through it" if lease is None else "its lease has ended"
            raise NotOwnedError(f"no run of {self.name!r} is under way here: {how}", name=self.name)
        return lease

    def __enter__(self) -> HeldLease | NotAcquired:
        self._refuse_if_in_use()
        return self._begin_block(self.acquire())

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if (lease := self._end_block()) is not None:
            self.leases.taking.leave(lease._hold, error)

    # What both faces are made of.

    def _refuse_if_in_use(self) -> None:
        """Refuse a second block, whose end would be taken for the first one's."""
        if self._lease is not None and self._lease.held:
            raise ConfigurationError(f"this TaskLock({self.name!r}) is in use: a second block needs its own")

    def _begin_block(self, taken: HeldLease | NotAcquired) -> HeldLease | NotAcquired:
        """Let this caller's body run under what was taken."""
        self._blocks.setdefault(identity.current_caller(), []).append(taken)
        if isinstance(taken, HeldLease):
            taken._hold.in_block = True
            current.enter(taken)
        return taken

    def _end_block(self) -> HeldLease | None:
        """Return what this caller's body ran under, to be given back; a run that was late may have a successor here."""
        caller = identity.current_caller()
        if caller not in self._blocks:
            caller = next(iter(self._blocks))  # another caller leaves it
        taken = self._blocks[caller].pop()
        if not self._blocks[caller]:
            del self._blocks[caller]
        if isinstance(taken, NotAcquired):
            return None
        current.leave(taken)
        return taken

    def __repr__(self) -> str:
        return (
            f"<TaskLock {self.name!r}, {'held' if self._lease is not None and self._lease.held else 'not held'} here>"
        )
