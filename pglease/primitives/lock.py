"""`Lock`: a lease in the manner of `threading.Lock`, among all processes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from pglease import current, identity, mistakes, options
from pglease.errors import NotOwnedError, ReentrantError
from pglease.handles import HeldLease, Hold, NotAcquired
from pglease.options import Duration, HoldOptions, OnLost
from pglease.primitives.configs import LockConfig, arguments_of, renew_by
from pglease.taking import is_callers, not_acquired

if TYPE_CHECKING:
    from pglease.client import PGLease


class Lock:
    """One holder at a time, and whoever comes next waits. Renewed in the background while it is held.

    It may be shared by threads, kept for long, or built anew for each use (`Lock(leases, f"order:{number}")` costs a
    few microseconds). Whoever holds it may hand it on: any thread may release it.

    Args:
        leases: the client.
        name, ttl, min_hold, max_hold, metadata, heartbeat, fair, on_lost: as for `PGLease.acquire`, with its defaults.
        reentrant: what a nested acquire by the same thread or task does, also through another `Lock` of that name on
            the same client. False (default): `ReentrantError`, for it would wait for itself. True: it is counted, keeps
            token and handle, and as many releases end it.

    Attributes:
        leases: the client.
        name: the lease's name.

    Raises:
        ConfigurationError: every broken rule at once, also where the store lacks what is asked for.

    Source:
        the verbs of `threading.Lock` and of grelmicro's `Lock`.
    """

    __slots__ = ("_blocks", "_checked", "_lease", "_reentrant", "_ttl", "leases", "name")

    def __init__(
        self,
        leases: PGLease,
        name: str,
        ttl: Duration = 60,
        *,
        reentrant: bool = False,
        min_hold: Duration | None = None,
        max_hold: Duration | None = None,
        metadata: Mapping[str, Any] | None = None,
        heartbeat: bool = True,
        fair: bool = False,
        on_lost: OnLost = "raise",
    ) -> None:
        self.leases = leases
        self._reentrant = options.flag(reentrant, "reentrant")
        self.name, self._ttl = name, ttl
        self._checked: HoldOptions | None = None
        extras = (min_hold, max_hold, metadata, heartbeat, fair, on_lost)
        if extras != _USUAL or heartbeat is not True or fair is not False or not options.are_usual(name, ttl):
            self._checked = options.hold_options(
                name,
                ttl,
                min_hold=min_hold,
                max_hold=max_hold,
                metadata=metadata,
                heartbeat=heartbeat,
                fair=fair,
                on_lost=on_lost,
            )
            leases._check_traits(self._checked)
        self._lease: HeldLease | None = None
        self._blocks: dict[identity.Caller, list[HeldLease]] = {}

    @classmethod
    def from_config(cls, leases: PGLease, name: str, config: LockConfig) -> Self:
        """Build one by a checked record; the environment is not asked.

        Args:
            leases: the client.
            name: the lease's.
            config: its options.

        Raises:
            ConfigurationError: no `LockConfig`, a name that is none, or options that this store cannot keep.
        """
        return cls(leases, name, **arguments_of(config, LockConfig))

    def reconfigure(self, config: LockConfig) -> None:
        """Go by other options from the next acquire on; what is held through this object gets the new ttl at once.

        The name stays.

        Args:
            config: the new options, all of them.

        Raises:
            ConfigurationError: no `LockConfig`, or one that this store cannot keep; nothing is changed.
            BackendUnavailable: the new options count, and it is unknown whether what is held was renewed.
        """
        other = type(self).from_config(self.leases, self.name, config)
        self._reentrant, self._checked = other._reentrant, other._wanted
        renew_by(self._wanted.ttl, self._lease)

    @property
    def _wanted(self) -> HoldOptions:
        """What is asked for; the usual is put together when it is asked for, since many a lock is built for nothing."""
        if self._checked is None:
            self._checked = options.hold_options(self.name, self._ttl)
        return self._checked

    # -- taking --------------------------------------------------------------------------------------------------------

    def acquire(self, timeout: Duration | None = None) -> HeldLease:
        """Wait until it is ours; `release` ends it.

        Args:
            timeout: seconds to wait at most; None (default) waits for ever, 0 asks once.

        Raises:
            ConfigurationError: `timeout` is no duration.
            AcquireTimeout: somebody else has it still. Nothing is held.
            ReentrantError: this thread or task has it through this client. That hold goes on.
            BackendError: nothing is held, or lapses by itself.
        """
        mistakes.refuse_to_be_awaited()
        wanted = self._asked(timeout)
        return self._got(self._again() or self.leases.taking.take(wanted), wanted)

    def acquire_nowait(self) -> HeldLease | NotAcquired:
        """Ask once: a `HeldLease` (true), or a `NotAcquired` (false) that says who has it.

        Raises:
            ReentrantError: this thread or task has it through this client. That hold goes on.
            BackendError: nothing is held, or lapses by itself.
        """
        mistakes.refuse_to_be_awaited()
        taken = self._again(refuse=True) or self.leases.taking.take(self._wanted)
        return taken if isinstance(taken, NotAcquired) else self._got(taken, self._wanted)

    # What both faces are made of.

    def _asked(self, timeout: Duration | None) -> HoldOptions:
        """Return what an acquire that waits so long asks for."""
        return replace(self._wanted, wait=options.wait(timeout, "timeout"))

    def _got(self, taken: HeldLease | NotAcquired, wanted: HoldOptions) -> HeldLease:
        """Keep the handle of what was taken; a refusal is an error."""
        if isinstance(taken, NotAcquired):
            raise not_acquired(taken, wanted)
        self._lease = taken
        return taken

    def _again(self, *, refuse: bool = False) -> HeldLease | None:
        """Count one more nested acquire, if that is allowed and this is one; if it is not, perhaps `refuse`."""
        if not self._reentrant:
            if refuse and self.owned():
                raise ReentrantError(f"this thread already holds {self.name!r} through this client", name=self.name)
            return None
        hold = self._own_hold()
        lease = None if hold is None or hold.handle is None else hold.handle()
        if lease is not None:
            lease._hold.nest()
        return lease

    def _own_hold(self) -> Hold | None:
        """Return what this thread or task holds by this name, through whatever object of the client."""
        hold = self.leases.taking.holds.get(self.name)
        return hold if hold is not None and hold.held() and is_callers(hold) else None

    # -- what is -------------------------------------------------------------------------------------------------------

    @property
    def lease(self) -> HeldLease | None:
        """The handle of the last acquire through this object, also if it is over; None before."""
        return self._lease

    def locked(self) -> bool:
        """Tell whether anybody holds it, by the store: a look, which changes nothing.

        Raises:
            BackendError: as for `PGLease.get_lease`.
        """
        record = self.leases.get_lease(self.name)
        return record is not None and not record.is_expired()

    def owned(self) -> bool:
        """Tell whether this thread or task holds it through this client, without asking the store."""
        return self._own_hold() is not None

    def extend(self, ttl: Duration | None = None) -> HeldLease:
        """Extend what was acquired through this object; the token stays. See `HeldLease.renew`.

        Args:
            ttl: seconds from the store's now, now and at later renewals. Default None: as acquired.

        Raises:
            ConfigurationError: `ttl` is no duration; nothing was sent.
            NotOwnedError: nothing is held, or it has ended: lapsed, taken, released. Nothing changed.
            BackendUnavailable: unknown whether it was extended; belief does not grow.
        """
        lease = self._mine()
        lease.renew(ttl)
        return lease

    # -- leaving -------------------------------------------------------------------------------------------------------

    def release(self) -> None:
        """End what was acquired through this object, from any thread; of nested ones the innermost.

        Raises:
            NotOwnedError: nothing is held, or it has ended before: lapsed, taken, released. Nothing changed.
            ReleaseError: the store could not confirm it; over here, lapses there by its ttl.
        """
        lease = self._mine()
        if lease._hold.unnest():
            return
        if not lease.release():
            raise NotOwnedError(f"the lock {self.name!r} had ended before it was released", name=self.name)

    def _mine(self) -> HeldLease:
        lease = self._lease
        if lease is None or not lease.held:
            how = "nothing was acquired through it" if lease is None else "its hold has ended"
            raise NotOwnedError(f"the lock {self.name!r} is not held: {how}", name=self.name)
        return lease

    # -- as a block ----------------------------------------------------------------------------------------------------

    @contextmanager
    def hold(self, timeout: Duration | None = None) -> Iterator[HeldLease]:
        """Return a block that waits for at most `timeout` seconds (None: for ever). Otherwise as `with lock:`.

        Raises:
            AcquireTimeout, ReentrantError, BackendError: on entering, as for `acquire`.
            LeaseLostError: on leaving, unless the block raised already or `on_lost="log"`.
        """
        with _Block(self, self.acquire(timeout)) as lease:
            yield lease

    def __enter__(self) -> HeldLease:
        """Wait for ever, then hold it for the block.

        Leaving after a loss raises `LeaseLostError`, unless the block raised already or `on_lost="log"`.
        """
        lease = _Block(self, self.acquire()).__enter__()
        self._blocks.setdefault(identity.current_caller(), []).append(lease)
        return lease

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _Block(self, self._innermost()).__exit__(kind, error, trace)

    def _innermost(self) -> HeldLease:
        """Return the handle of this caller's innermost block; of any block, if another caller leaves it."""
        caller = identity.current_caller()
        if caller not in self._blocks:
            caller = next(iter(self._blocks))
        lease = self._blocks[caller].pop()
        if not self._blocks[caller]:
            del self._blocks[caller]
        return lease

    def __repr__(self) -> str:
        return f"<Lock {self.name!r}, {'held' if self._lease is not None and self._lease.held else 'not held'} here>"


_USUAL = (None, None, None, True, False, "raise")


class _Block:
    """The stretch during which a handle is held; of nested ones the outermost releases."""

    def __init__(self, lock: Lock, lease: HeldLease) -> None:
        self._lock = lock
        self._lease = lease

    def __enter__(self) -> HeldLease:
        self._lease._hold.in_block = True
        current.enter(self._lease)
        return self._lease

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        current.leave(self._lease)
        hold = self._lease._hold
        if not hold.unnest():
            self._lock.leases.taking.leave(hold, error)
