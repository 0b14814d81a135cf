"""`PGLease`: what users talk to. Takes leases, keeps them alive, gives them back.

It knows no kind of store: every rule about who holds what is the backend's, every rule about belief is `Term`'s.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import inspect
import logging
import os
import threading
import warnings
import weakref
from collections.abc import Callable, Iterable, Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self, Unpack, cast, overload

from pglease import clock, forks, mistakes, options
from pglease.backends import Backend, open_backend
from pglease.backends.base import Budget, FairBackend, lacks, remembering
from pglease.blocks import LeaseContext
from pglease.decorator import TaskDecorator, singleton_decorator
from pglease.errors import BackendError, ConfigurationError, NotOwnedError
from pglease.events import Observer, Waiting
from pglease.handles import HeldLease, Hold, NotAcquired
from pglease.heartbeat import HeartbeatManager
from pglease.options import Duration, HoldOptions
from pglease.records import Handover, Lease, Loss, Tenure
from pglease.schema import DEFAULT_TABLE
from pglease.settings import Settings
from pglease.slots import OncePer
from pglease.slots import once_per as slots_of
from pglease.taking import Taking, not_acquired
from pglease.watching import Watch

if TYPE_CHECKING:
    from pglease.primitives.arguments import (
        ElectionOptions,
        GroupOptions,
        LockOptions,
        ReadWriteOptions,
        SemaphoreOptions,
        TaskLockOptions,
    )
    from pglease.primitives.election import LeaderElection
    from pglease.primitives.lock import Lock
    from pglease.primitives.many import GroupContext
    from pglease.primitives.read_write import ReadWriteLock
    from pglease.primitives.semaphore import Semaphore
    from pglease.primitives.task_lock import TaskLock

log = logging.getLogger("pglease")

CLOSING_BOX = 5.0
EXIT_BOX = 2.0
KNOBS: dict[str, Any] = {
    "table_name": DEFAULT_TABLE,
    "schema": None,
    "auto_initialize": True,
    "connect_timeout": 10,
    "pool_size": 4,
}


class PGLease(mistakes.OnlyWith):
    """Leases for one application: one holder at a time for each name.

    Thread-safe, fork-safe, a context manager, and cheap to keep as a module-level object. Building it connects to
    nothing.

    Args:
        backend: an address, as `postgresql://user:pass@host/db`, `redis://host` or `memory://` (see `open_backend`), or
            a `Backend` object.
        owner_id: a label for people, 1 to 255 characters; default `host:pid:random`, which tells a person where to
            look. Ownership is never judged by it: two workers with the same label exclude each other.
        heartbeat_interval: seconds between renewals at most, more than 0. Default None: a third of each ttl, so that
            two renewals may fail before a lease is lost. However long this is, a lease is renewed three times per ttl.
        on_lease_lost: called with the lease's name, once for each loss, on a thread of its own, in the context
            (`contextvars`) of whoever took it; may call back into the client. Not called for what `close` ends.
            Default None: the handle and the log tell of a loss.
        margin: seconds by which a holder stops believing before the store's expiry, more than 0. Default None: 5 % of
            ttl, which covers a server's clock that is slewed as fast as ntpd ever does it, and at least 0.25 s. Never
            more than a quarter of ttl.
        connect_timeout: seconds one connection attempt may take, and one conversation with the store (`try_acquire`,
            `get_lease`…), restarts and failovers included. Default 10, which most restarts are
            shorter than. With an address only, as the next four.
        table_name, schema, auto_initialize, pool_size: for addresses of stores that have these knobs, with their
            defaults; see `PostgresBackend`.
        on_at_risk: called like `on_lease_lost` when a third of the ttl is left and no renewal has come: while the store
            is in trouble, or work without renewal runs long. Once, until a renewal has come. Default None: nobody is.
        observers: objects whose `notify(event)` is called for what happens to leases, each on a thread of its own; see
            `Observer`. Default: none but the log, the logger `pglease`, which is told in the same way.

    Attributes:
        backend: the store.
        heartbeat_manager: what renews the leases; `get_zombie_threads()` names those whose renewal is stuck.

    Raises:
        ConfigurationError: every broken rule at once, without showing the address. Nothing was opened.
        MissingDependencyError: the store's driver is not installed.
    """

    def __init__(
        self,
        backend: str | Backend,
        owner_id: str | None = None,
        heartbeat_interval: Duration | None = None,
        on_lease_lost: Callable[[str], object] | None = None,
        *,
        margin: Duration | None = None,
        table_name: str = DEFAULT_TABLE,
        schema: str | None = None,
        auto_initialize: bool = True,
        connect_timeout: Duration = 10,
        pool_size: int = 4,
        observers: Iterable[Observer] = (),
        on_at_risk: Callable[[str], object] | None = None,
    ) -> None:
        knobs = {
            "table_name": table_name,
            "schema": schema,
            "auto_initialize": auto_initialize,
            "connect_timeout": connect_timeout,
            "pool_size": pool_size,
        }
        given = {name: value for name, value in knobs.items() if value is not KNOBS[name] and value != KNOBS[name]}
        with options.all_problems() as problems:
            interval = (
                None
                if heartbeat_interval is None
                else problems.check(options.seconds, heartbeat_interval, "heartbeat_interval")
            )
            pause = None if margin is None else problems.check(options.seconds, margin, "margin")
            label = None if owner_id is None else problems.check(options.text, owner_id, "owner_id")
            for callback, argument in ((on_lease_lost, "on_lease_lost"), (on_at_risk, "on_at_risk")):
                if callback is not None:
                    problems.check(_callback, callback, argument)
            box = problems.check(options.seconds, connect_timeout, "connect_timeout")
            store, self._opened = problems.check(_store, backend, given) or (None, False)
        self.backend: Backend = store
        self._box = box
        self.taking = Taking(
            self.backend,
            owner_id=label,
            box=box,
            heartbeat_interval=interval,
            margin=pause,
            on_lease_lost=on_lease_lost,
            on_at_risk=on_at_risk,
            observers=observers,
        )
        self.heartbeat_manager = self.taking.manager
        forks.forget_in_children(self, PGLease._forget)
        _clients.add(self)
        self._campaigns: weakref.WeakSet[LeaderElection] = weakref.WeakSet()
        # Dropped without close(): the finalizer must not refer to the client, or it would never be dropped.
        self._finalizer = weakref.finalize(
            self, _abandon, self.heartbeat_manager, self.backend if self._opened else None
        )
        self._finalizer.atexit = False

    @classmethod
    def from_env(cls, **arguments: Any) -> Self:
        """Build a client for the address in `PGLEASE_URL`, else in `DATABASE_URL`.

        Args:
            arguments: as for the class, but for `backend`.

        Raises:
            ConfigurationError: neither is set, or as for the class.
        """
        url = os.environ.get("PGLEASE_URL") or os.environ.get("DATABASE_URL")
        if not url:
            raise ConfigurationError("set PGLEASE_URL or DATABASE_URL to the address of your PostgreSQL")
        return cls(url, **arguments)

    @classmethod
    def from_engine(cls, engine: Any, **arguments: Any) -> Self:
        """Build a client on a SQLAlchemy engine's connections (psycopg or psycopg2). See `PostgresBackend.from_engine`.

        An engine whose pool the application can use up may cost a lease; an address, or an engine with `NullPool`, not.

        Args:
            engine: whose `close` and `dispose` stay the application's.
            arguments: as for the class, but for `backend` and what is for addresses.

        Raises:
            ConfigurationError: as for the class; or an engine that is asynchronous, or of another database.
        """
        from pglease.backends.postgres import PostgresBackend

        return cls(PostgresBackend.from_engine(engine), **arguments)

    @classmethod
    def from_pool(cls, pool: Any, **arguments: Any) -> Self:
        """Build a client on a `psycopg_pool.ConnectionPool`. See `PostgresBackend.from_connection_factory`.

        Args:
            pool: which stays the application's to close.
            arguments: as for the class, but for `backend` and what is for addresses.

        Raises:
            ConfigurationError: as for the class.
        """
        from pglease.backends.postgres import PostgresBackend

        return cls(PostgresBackend.from_pool(pool), **arguments)

    @property
    def owner_id(self) -> str:
        """The label for people; the default one is made anew in a forked child."""
        return self.taking.owner_id

    # -- taking --------------------------------------------------------------------------------------------------------

    @overload
    def acquire(
        self,
        name: str,
        ttl: Duration = ...,
        *,
        raise_on_failure: Literal[True],
        wait: Duration | None = ...,
        min_hold: Duration | None = ...,
        max_hold: Duration | None = ...,
        metadata: Mapping[str, Any] | None = ...,
        heartbeat: bool = ...,
        fair: bool = ...,
        on_lost: options.OnLost = ...,
        warn_after: Duration | None = ...,
    ) -> LeaseContext[HeldLease]: ...
    @overload
    def acquire(
        self,
        name: str,
        ttl: Duration,
        raise_on_failure: Literal[True],
        *,
        wait: Duration | None = ...,
        min_hold: Duration | None = ...,
        max_hold: Duration | None = ...,
        metadata: Mapping[str, Any] | None = ...,
        heartbeat: bool = ...,
        fair: bool = ...,
        on_lost: options.OnLost = ...,
        warn_after: Duration | None = ...,
    ) -> LeaseContext[HeldLease]: ...
    @overload
    def acquire(
        self,
        name: str,
        ttl: Duration = ...,
        raise_on_failure: bool = ...,
        *,
        wait: Duration | None = ...,
        min_hold: Duration | None = ...,
        max_hold: Duration | None = ...,
        metadata: Mapping[str, Any] | None = ...,
        heartbeat: bool = ...,
        fair: bool = ...,
        on_lost: options.OnLost = ...,
        warn_after: Duration | None = ...,
    ) -> LeaseContext[HeldLease | NotAcquired]: ...
    def acquire(
        self,
        name: str,
        ttl: Duration = 60,
        raise_on_failure: bool = False,
        *,
        wait: Duration | None = None,
        min_hold: Duration | None = None,
        max_hold: Duration | None = None,
        metadata: Mapping[str, Any] | None = None,
        heartbeat: bool = True,
        fair: bool = False,
        on_lost: options.OnLost = "raise",
        warn_after: Duration | None = options.WARN_AFTER,
    ) -> LeaseContext[Any]:
        """Return a context manager that holds the lease for its block.

        It binds a `HeldLease` (true), or a `NotAcquired` (false) when somebody else has it. The lease is renewed in the
        background. Leaving the block releases it; if the store cannot be reached then, that is logged, tried again in
        the background, and the lease lapses by itself. An error of the block's own always comes out as it is.

        Args:
            name: 1 to 255 characters without control characters.
            ttl: seconds (or "5m", a timedelta), at most 100 years, until the lease is free if this process dies; no
                bound for the work, since it is renewed. Default 60: survives a restart or a failover of the store, and
                a crash costs others a minute.
            raise_on_failure: True raises `AcquisitionError` instead of binding a `NotAcquired`. Default False: not
                getting a lease is an answer.
            wait: seconds to wait at most, 0 or more; `float("inf")` for ever. Default None: asks once, since most
                callers have something better to do than to stand in line.
            min_hold: seconds from the grant, 0 or more, during which nobody else gets it even if the block is short.
                Binds the release, not a crash; above ttl it needs renewal, and must not exceed `max_hold`. Default
                None: free at the end of the block.
            max_hold: seconds from the grant, more than 0, after which it is lost (reason `max_hold`) though renewals
                work. Default None: for as long as it is renewed.
            metadata: a JSON object of at most 8192 bytes and 16 levels that others can read. Default None: an empty
                one.
            heartbeat: whether it is renewed. Default True. False: the block must end within ttl.
            fair: whether waiters are served in the order of their arrival, on stores that can (`traits.fair`). Default
                False: a place in the queue has to be kept alive, and a waiter that dies delays those behind it by some
                seconds.
            warn_after: seconds of waiting, more than 0, after which the log tells who has it, since when, until when,
                and the place in the queue; then after twice as long, and so on. Observers get a `waiting` event.
                Default 60; None: never.
            on_lost: "raise" (default, so that no loss goes unnoticed): leaving the block after a loss raises
                `LeaseLostError`, unless the block raised already (then a note is added to its error). "log": only the
                log says so. "exit": a loss ends the process, with code 76, before the store can give the lease to
                anybody; no `finally` runs and nothing is flushed. It is declared a tenth of ttl (at most 2 s) early,
                which is what `on_lease_lost` and the block have left. Where somebody else may have it already, that is
                0.2 s.

        Raises:
            ConfigurationError: at once, for every broken rule, also where the store lacks what is asked for.
            ReentrantError: on entering, by a waiting call of the thread that has the lease through this client. That
                hold goes on.
            AcquisitionError: on entering, with `raise_on_failure`; nothing is held. After a wait it is an
                `AcquireTimeout`.
            BackendError: on entering; nothing is held, or lapses by itself.
            LeaseLostError: on leaving; somebody else may already be working.

        Source:
            `min_hold` is ShedLock's `lockAtLeastFor`.
        """
        mistakes.refuse_to_be_awaited()
        wanted = options.hold_options(
            name,
            ttl,
            wait=wait,
            min_hold=min_hold,
            max_hold=max_hold,
            metadata=metadata,
            heartbeat=heartbeat,
            fair=fair,
            on_lost=on_lost,
            warn_after=warn_after,
        )
        self._check_traits(wanted)
        return LeaseContext(self, wanted, raise_on_failure=raise_on_failure)

    def adopt(
        self,
        handover: Handover | str,
        ttl: Duration | None = None,
        raise_on_failure: bool = False,
        *,
        min_hold: Duration | None = None,
        max_hold: Duration | None = None,
        heartbeat: bool = True,
        on_lost: options.OnLost = "raise",
    ) -> LeaseContext[HeldLease | NotAcquired]:
        """Return a context manager that goes on with a lease that was handed over (`HeldLease.transfer`).

        Entered once, by one process: it binds a `HeldLease` with a token of its own, or a `NotAcquired` (false) where
        somebody else has entered before, or nobody within its ttl. The metadata stays.

        Args:
            handover: what `transfer` answered, or its text.
            ttl: as for `acquire`. Default None: that of the handover.
            raise_on_failure, min_hold, max_hold, heartbeat, on_lost: as for `acquire`.

        Raises:
            ConfigurationError: at once, also for a text that is no handover.
            AcquisitionError: on entering, with `raise_on_failure`; nothing is held.
            BackendError: on entering; nothing is held, or lapses by itself.
            LeaseLostError: on leaving; somebody else may already be working.
        """
        wanted = options.adoption(
            handover, ttl, min_hold=min_hold, max_hold=max_hold, heartbeat=heartbeat, on_lost=on_lost
        )
        return LeaseContext(self, wanted, raise_on_failure=raise_on_failure)

    def try_acquire(
        self,
        name: str,
        ttl: Duration = 60,
        *,
        min_hold: Duration | None = None,
        max_hold: Duration | None = None,
        metadata: Mapping[str, Any] | None = None,
        heartbeat: bool = True,
    ) -> bool:
        """Ask once, without waiting behind anybody: True if the lease is ours now.

        The client owns it: it is renewed until `release(name)`, `close()` or the end of the process. A second call for
        a held name is False, also on the same client. Arguments as for `acquire`.

        Raises:
            ConfigurationError: for every broken rule.
            BackendError: nothing is held, or lapses by itself.
        """
        mistakes.refuse_to_be_awaited()
        wanted = options.hold_options(
            name, ttl, min_hold=min_hold, max_hold=max_hold, metadata=metadata, heartbeat=heartbeat
        )
        return self.taking.own(self.taking.take(wanted)) is not None

    def wait_for_lease(
        self,
        name: str,
        ttl: Duration = 60,
        timeout: Duration | None = 60.0,
        poll_interval: Duration = 5.0,
        *,
        fair: bool = False,
        cancel: threading.Event | None = None,
        min_hold: Duration | None = None,
        max_hold: Duration | None = None,
        metadata: Mapping[str, Any] | None = None,
        warn_after: Duration | None = options.WARN_AFTER,
    ) -> HeldLease:
        """Wait until the lease is ours; the client owns it, as after `try_acquire`.

        It is woken by the release where the store can do that, and beneath that it sleeps until the holder's known
        expiry, with jitter. A look that finds it taken writes nothing; waiting uses no connection of the pool, and all
        waits of this client for one name look as one. Restarts and outages of the store are waited out too.

        Args:
            name, ttl, min_hold, max_hold, metadata, fair, warn_after: as for `acquire`.
            timeout: seconds for the whole wait, more than 0 (`try_acquire` asks once). Default 60; None waits for ever.
            poll_interval: the longest pause between two looks, in seconds, more than 0. Default 5; twelve times as long
                while the store is heard, which then says when to look.
            cancel: an event that ends the wait when it is set. Default None: only time does.

        Raises:
            ConfigurationError: at once, for every broken rule.
            AcquireTimeout: the time ran out or `cancel` was set; says who has it and until when. Nothing is held.
            ReentrantError: this thread has the lease through this client and would wait for itself. That hold goes on.
            BackendUnavailable: the store never answered; nothing is held, or lapses by itself.
            BackendMisconfigured, BackendClosed: nothing is held.
        """
        mistakes.refuse_to_be_awaited()
        wanted, poll = options.waiting_options(
            name,
            ttl,
            timeout,
            poll_interval,
            min_hold=min_hold,
            max_hold=max_hold,
            metadata=metadata,
            fair=fair,
            warn_after=warn_after,
        )
        self._check_traits(wanted)
        taken = self.taking.take(wanted, poll=poll, cancel=cancel)
        if isinstance(taken, NotAcquired):
            raise not_acquired(taken, wanted, cancelled=cancel is not None and cancel.is_set())
        return cast("HeldLease", self.taking.own(taken))

    def singleton_task(
        self,
        name: str | Callable[..., str],
        ttl: Duration = 60,
        skip_if_locked: bool = True,
        *,
        on_skip: Any = None,
        wait: Duration | None = None,
        min_hold: Duration | None = None,
        max_hold: Duration | None = None,
        once_per: OncePer | None = None,
    ) -> TaskDecorator:
        """Decorate a function, method or coroutine function so that one call at a time runs, among all processes.

        Args:
            name: the lease; a template over the call's arguments (`"report:{tenant}"`), or a callable that is given
                them.
            ttl: as for `acquire`.
            skip_if_locked: True (default): a call that does not get the lease returns None (or what `on_skip` says).
                False: it raises `AcquisitionError`.
            on_skip: what a skipped call returns; a callable is called with the `NotAcquired`. Default None. With
                `SKIPPED` it can be told from a call that returned None.
            wait: seconds a call waits before it is skipped, 0 or more. Default None: asks once.
            min_hold: one call per so many seconds: `singleton_task` alone means one *at a time*. Default None.
            max_hold: as for `acquire`.
            once_per: one call per slot of time: a duration ("1h": the hours of the day, by UTC), a cron expression
                ("0 3 * * *", in UTC; extra `cron`), or `Cron("0 3 * * *", "Europe/Berlin")`. The slot is the one in
                which the call began, by the store's clock; a worker that died in the middle of it is taken over. On
                stores that write the times themselves (`traits.slots`). Default None: as often as it is free.

        Returns:
            a decorator. What it makes has `last_outcome()`: see `SingletonTask`.

        Raises:
            ConfigurationError: at decoration; also for generator functions, whose body would run without the lease. At
                a call: the arguments make no name that a lease can have; nothing ran.
            AcquisitionError: at a call, with `skip_if_locked=False`; the body did not run.
            BackendError: at a call; the body did not run.
            LeaseLostError: at the end of a call whose lease was lost; the body ran to its end, beside others perhaps.

        Source:
            ShedLock's `@SchedulerLock`, whose names may be made of the arguments, too.
        """
        checked = name if isinstance(name, str) and not ("{" in name or "}" in name) else "checked at each call"
        slots = None if once_per is None else slots_of(once_per)
        wanted = options.hold_options(checked, ttl, wait=wait, min_hold=min_hold, max_hold=max_hold, once_per=slots)
        self._check_traits(wanted)
        return singleton_decorator(lambda: self, name, wanted, skip_if_locked=skip_if_locked, on_skip=on_skip)

    # -- the primitives: what code leaves open may be set by PGLEASE_* variables, see `pglease.settings`;
    # `env_prefix=` says what those of one object begin with -----------------------------------------------------------

    @functools.cached_property
    def _settings(self) -> Settings:
        return Settings()

    def lock(self, name: str, ttl: Duration | None = None, **wanted: Unpack[LockOptions]) -> Lock:
        """Return a `Lock`; it asks for nothing yet.

        Args:
            name: the lease.
            ttl, wanted: as for the class. What is not said here is taken from the environment (`PGLEASE_LOCK_TTL=30`,
                for this name alone `PGLEASE_LOCK_CART_TTL`), else it is the class's default. With
                `env_prefix="SHOP_CART_"` the variables for this name begin with that.

        Raises:
            ConfigurationError: every broken rule at once; also a variable that cannot be read.
        """
        from pglease.primitives.lock import Lock

        return Lock(self, name, **self._settings.apply("lock", name, wanted, ttl=ttl))

    def task_lock(self, name: str, ttl: Duration | None = None, **wanted: Unpack[TaskLockOptions]) -> TaskLock:
        """Return a `TaskLock`; it asks for nothing yet. See `lock` for what the environment may say.

        Args:
            name: the lease.
            ttl, wanted: as for the class, else from `PGLEASE_TASK_LOCK_…`; and `env_prefix`.

        Raises:
            ConfigurationError: every broken rule at once; also a variable that cannot be read.
        """
        from pglease.primitives.task_lock import TaskLock

        return TaskLock(self, name, **self._settings.apply("task_lock", name, wanted, ttl=ttl))

    def leader_election(
        self, name: str, ttl: Duration | None = None, **wanted: Unpack[ElectionOptions]
    ) -> LeaderElection:
        """Return a `LeaderElection`; it does not campaign yet. See `lock` for what the environment may say.

        Args:
            name: the election.
            ttl, wanted: as for the class, else from `PGLEASE_LEADER_ELECTION_…`; and `env_prefix`.

        Raises:
            ConfigurationError: every broken rule at once; also a variable that cannot be read.
        """
        from pglease.primitives.election import LeaderElection

        return LeaderElection(self, name, **self._settings.apply("leader_election", name, wanted, ttl=ttl))

    def read_write_lock(
        self, name: str, ttl: Duration | None = None, **wanted: Unpack[ReadWriteOptions]
    ) -> ReadWriteLock:
        """Return a `ReadWriteLock`; it asks for nothing yet. See `lock` for what the environment may say.

        Args:
            name: the lock.
            ttl, wanted: as for the class, else from `PGLEASE_READ_WRITE_LOCK_…`; and `env_prefix`.

        Raises:
            ConfigurationError: every broken rule at once; also a variable that cannot be read.
        """
        from pglease.primitives.read_write import ReadWriteLock

        return ReadWriteLock(self, name, **self._settings.apply("read_write_lock", name, wanted, ttl=ttl))

    def semaphore(
        self, name: str, limit: int | None = None, ttl: Duration | None = None, **wanted: Unpack[SemaphoreOptions]
    ) -> Semaphore:
        """Return a `Semaphore`; it asks for nothing yet. See `lock` for what the environment may say.

        Args:
            name: the semaphore.
            limit, ttl, wanted: as for the class, else from `PGLEASE_SEMAPHORE_…`; and `env_prefix`. The limit has no
                default.

        Raises:
            ConfigurationError: every broken rule at once; also where neither code nor environment says a limit.
        """
        from pglease.primitives.semaphore import Semaphore

        found = self._settings.apply("semaphore", name, wanted, limit=limit, ttl=ttl)
        if "limit" not in found:
            raise ConfigurationError(f"the semaphore {name!r} needs a limit")
        return Semaphore(self, name, **found)

    def acquire_many(self, names: Iterable[str], ttl: Duration = 60, **wanted: Unpack[GroupOptions]) -> GroupContext:
        """Return a context manager that holds all of several leases for its block, or none.

        It binds a `LeaseGroup` (true), or the `NotAcquired` (false) of one that somebody else has. Nobody waits while
        it holds a part, so there is no deadlock.

        Args:
            names: 1 to 1000 different names, in any order.
            ttl: as for `acquire`.
            wanted: `raise_on_failure`, `wait`, `max_hold`, `metadata`, `on_lost`, as for `acquire`; `wait` is for all.

        Raises:
            ConfigurationError: at once, for every broken rule.
            AcquisitionError: on entering, with `raise_on_failure`; nothing is held.
            ReentrantError: on entering, by a waiting call of the thread that has one of them through this client.
            BackendError: on entering; nothing is held, or lapses by itself.
            LeaseLostError: on leaving, the first that was lost; all others are released.
        """
        from pglease.primitives.many import GroupContext

        return GroupContext(self, names, ttl, **wanted)

    def _check_traits(self, wanted: HoldOptions) -> None:
        """Refuse what this store cannot do, by the name of the trait."""
        if wanted.fair:
            self._need_trait("fair", "fair=True")
        if wanted.once_per is not None:
            self._need_trait("slots", "once_per")

    def _need_trait(self, trait: str, argument: str) -> None:
        if not getattr(self.backend.traits, trait):
            raise ConfigurationError(
                f"{argument} needs a store with the trait {trait!r}, which {self.backend.traits.kind} lacks"
            )

    # -- what one has --------------------------------------------------------------------------------------------------

    def release(self, name: str) -> bool:
        """End this client's hold of `name`; True if this call ended it, False if there was none. Idempotent.

        With `min_hold` the name stays taken until that is over.

        Raises:
            ReleaseError: the store could not confirm it; over in this process, lapses by its ttl, may be called again.
        """
        hold = self.taking.hold_of(name)
        if hold is None:
            return False
        ended = self.heartbeat_manager.release(hold)
        self.taking.drop(hold)
        return ended

    def renew(self, name: str, ttl: Duration | None = None) -> None:
        """Extend this client's hold of `name`.

        Args:
            name: the lease.
            ttl: seconds from the store's now, now and at later renewals. Default None: as acquired.

        Raises:
            NotOwnedError: this client does not hold it; nothing changed in the store.
            BackendUnavailable: unknown whether it was extended; see `HeldLease.renew`.
            ConfigurationError: `ttl` is no duration; nothing was sent.
        """
        seconds = None if ttl is None else options.seconds(ttl, "ttl")
        hold = self.taking.hold_of(name)
        if hold is None:
            raise NotOwnedError(f"this client does not hold {name!r}", name=name)
        self.heartbeat_manager.renew(hold, seconds)

    def held(self, name: str) -> HeldLease | None:
        """Return the handle this client has for `name`, or None when it holds nothing by that name."""
        hold = self.taking.hold_of(name)
        if hold is None or not hold.held() or hold.handle is None:
            return None
        return hold.handle()

    def holding(self) -> list[HeldLease]:
        """Return the handles of all that this client holds, ordered by name."""
        return [lease for name in self.taking.names() if (lease := self.held(name)) is not None]

    def watch(self, name: str | None = None, *, prefix: str | None = None, poll_interval: Duration = 5.0) -> Watch:
        """Watch a lease, or all whose names begin with `prefix`, without taking part.

        Iterate over it for `LeaseChange`s, in their order and with no duplicates: first how things stand (`present`),
        then `acquired`, `taken over`, `released`, `expired`, `deleted`. Renewals are no changes. After a gap (an
        outage, several holds between two looks) one change has the present record and how many holds were `missed`.

        Args:
            name: the lease. Default None: those of `prefix`.
            prefix: the beginning of names; `""` watches all. Default None: only `name`.
            poll_interval: the longest pause between two looks, in seconds, more than 0, where the store announces
                nothing: for a single name that it announces twelve times as long. Default 5.

        Returns:
            a `Watch`: an iterator with `next(seconds)` and `close()`, also a context manager.

        Raises:
            ConfigurationError: neither or both of `name` and `prefix`, or a broken rule.
            BackendClosed: the client was closed.
        """
        if name is not None and prefix is None:
            what = options.text(name, "name")
        elif prefix is not None and name is None:
            what = options.prefix(prefix)
        else:
            raise ConfigurationError("watch needs either a name or prefix=")
        poll = options.seconds(poll_interval, "poll_interval")
        self.taking.refuse_if_closed()
        return Watch(
            self.taking.room,
            what,
            prefix=name is None,
            poll=poll,
            box=self.taking.box,
            refuse=self.taking.refuse_if_closed,
        )

    def is_alive(self) -> bool:
        """Tell whether what keeps the leases alive runs, and no renewal is stuck in the store; for a health probe.

        Asks no store, and is true of a client that holds nothing. False after `close`.
        """
        manager = self.heartbeat_manager
        return not self.taking.closed.is_set() and manager.is_alive() and not manager.get_zombie_threads()

    def waiting(self) -> list[Waiting]:
        """Return how each wait through this client stands, ordered by name: for what, whom, and how long.

        Raises:
            BackendClosed: the client was closed.
        """
        self.taking.refuse_if_closed()
        return self.taking.room.waits()

    # -- what the store says -------------------------------------------------------------------------------------------

    def get_lease(self, name: str) -> Lease | None:
        """Return the record of the present or the last hold of `name`; None when the store knows none.

        A hold that is over stays readable (`is_expired()` is true) until it is cleaned up. By the time it is read, the
        record is the past: to act, take the lease.

        Raises:
            ConfigurationError: `name` is none.
            BackendError: the store did not answer within `connect_timeout`, or may not be read.
        """
        return self.backend.get(options.text(name, "name"), self._budget())

    def list_leases(self, prefix: str = "", *, ended: bool = False) -> list[Lease]:
        """Return the records of all names that begin with `prefix`, ordered by name.

        Args:
            prefix: the beginning of names. Default: all.
            ended: whether holds that were given back are shown as well. Default False. Those that lapsed are shown in
                any case, until they are cleaned up.

        Raises:
            ConfigurationError: `prefix` cannot begin a name.
            BackendError: as for `get_lease`.
        """
        return self.backend.list(options.prefix(prefix), self._budget(), ended=ended)

    def queued(self, name: str) -> list[str]:
        """Return the labels of those who queue for `name` (`fair=True`), in every process, whoever is next first.

        Others who wait stand in no queue, and only their own client knows of them: `waiting`.

        Raises:
            ConfigurationError: the store keeps no queues (trait `fair`).
            BackendError: as for `get_lease`.
        """
        asked = options.text(name, "name")
        if not self.backend.traits.fair:
            raise lacks(self.backend.traits, "fair", "queued")
        return cast("FairBackend", self.backend).queued(asked, self._budget())

    def queues(self, prefix: str = "") -> dict[str, list[str]]:
        """Return by name who queues, for all names that begin with `prefix` and somebody queues for. See `queued`.

        Raises:
            ConfigurationError: the store keeps no queues (trait `fair`).
            BackendError: as for `get_lease`.
        """
        asked = options.prefix(prefix)
        if not self.backend.traits.fair:
            raise lacks(self.backend.traits, "fair", "queues")
        return cast("FairBackend", self.backend).queues(asked, self._budget())

    def history(self, name: str | None = None, *, prefix: str = "", limit: int = 100) -> list[Tenure]:
        """Return who held `name`, or the names that begin with `prefix`, and how each hold ended; the present one last.

        The store must have been told to keep some: `PostgresBackend(…, history=100)` or `?pglease.history=100` in the
        address, in the clients that take leases; who only looks need not say it. Else there is only the last hold.

        Args:
            name: a lease. Default None: all that begin with `prefix`.
            prefix: the beginning of names. Default: all. Only without `name`.
            limit: how many holds at most, counted from the last; 1 or more. Default 100.

        Raises:
            ConfigurationError: the store cannot remember (trait `history`), or the arguments are wrong.
            BackendError: as for `get_lease`.
        """
        with options.all_problems() as problems:
            most = problems.check(options.count, limit, "limit")
            beginning = problems.check(options.prefix, prefix)
            asked = beginning if name is None else problems.check(options.text, name, "name")
            if name is not None and prefix:
                problems.note("history is asked of a name or of a prefix, not of both")
        store = remembering(self.backend)
        return store.history(asked, self._budget(), limit=most, prefix=name is None)

    def cleanup_expired(self, older_than: Duration = 0) -> int:
        """Delete the records of holds that ended more than `older_than` seconds ago; return how many.

        Fencing tokens never go back because of it. On PostgreSQL it needs the DELETE right. Nothing depends on it: an
        old record costs its row and no more.

        Args:
            older_than: seconds, 0 or more. Default 0: all that are over.

        Raises:
            ConfigurationError: `older_than` is no duration.
            BackendUnavailable: it took longer than six times `connect_timeout`, or the store went away; some may be
                deleted, and it may be called again.
            BackendMisconfigured: this role may not delete; nothing was.
        """
        age = options.seconds(older_than, "older_than", zero=True)
        return self.backend.cleanup(age, self._budget(6 * self._box))

    def force_release(self, name: str, fencing_token: int) -> bool:
        """End somebody's hold, as an operator: False if the token is no longer current or the hold is over.

        Its holder learns of it at its next renewal (reason `forced`) and may work on until then; a guarded write of its
        is refused at once.

        Args:
            name: the lease.
            fencing_token: of the hold that you have looked at, 1 or more: a successor's is never ended by mistake.

        Raises:
            ConfigurationError: no name, or no token.
            BackendUnavailable: it is unknown whether the hold was ended; it may be called again.
        """
        options.text(name, "name")
        options.count(fencing_token, "fencing_token")
        forced = self.backend.force_release(name, fencing_token, self._budget())
        if forced:
            self.heartbeat_manager.notices.tell("forced", name, fencing_token=fencing_token)
        return forced

    def _budget(self, seconds: float | None = None) -> Budget:
        self.taking.refuse_if_closed()
        return Budget.of(self._box if seconds is None else seconds, clock.now)

    # -- the end -------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Release what is held, stop the heartbeats, close what this client opened and nothing else. Idempotent.

        Elections are stopped first: work that leads is told to end, and has 2.5 seconds for that. Holds whose block or
        work is still running then are marked lost with the reason `closed`. Releases that the store does not
        confirm within 5 seconds are left to lapse. Afterwards every call but this and `is_alive` answers
        `BackendClosed`.
        """
        self._close(CLOSING_BOX)

    def _stop_before_closing(self, campaign: LeaderElection) -> None:
        """Have a campaign end before what it rests on."""
        self._campaigns.add(campaign)

    def _stop_campaigns(self, until: float) -> None:
        campaigns = list(self._campaigns)
        for campaign in campaigns:
            campaign.stop(0)  # all are told before the first is waited for
        for campaign in campaigns:
            campaign.stop(max(0.0, until - clock.now()))

    def _close(self, seconds: float, *, blocks: bool = True) -> None:
        until = clock.now() + seconds
        if not self.taking.closed.is_set():
            self._stop_campaigns(until - seconds / 2)
        holds = self.taking.close_book()
        if holds is None:
            return
        manager = self.heartbeat_manager
        for hold in holds:
            if blocks or not hold.in_block:
                self._end_for_good(hold, until)
        manager.give_back.settle(max(0.1, until - clock.now()))
        manager.stop(max(0.1, until - clock.now()))
        manager.notices.close(max(0.1, until - clock.now()))
        self._finalizer.detach()
        _clients.discard(self)
        if self._opened:
            self.backend.close()

    def _end_for_good(self, hold: Hold, until: float) -> None:
        left = until - clock.now()
        if hold.in_block and hold.lose(Loss("closed")):
            self.heartbeat_manager.give_back.add(hold.name, hold.lease_id, min_hold=hold.min_hold)
        elif left > 0:
            with contextlib.suppress(BackendError, ConfigurationError):  # observers are told; it lapses by itself
                self.heartbeat_manager.settle(hold, left)
        else:
            hold.end()

    def _close_at_exit(self) -> None:
        """Release what no running block holds: work that goes on in a daemon thread keeps its lease until it lapses."""
        self._close(EXIT_BOX, blocks=False)

    def _forget(self) -> None:
        """In a forked child: start with nothing; the parent's holds are the parent's."""
        self.taking.forget()
        self.backend.forget()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        state = "closed" if self.taking.closed.is_set() else f"holding {len(self.taking.holds)}"
        return f"<PGLease on {self.backend.traits.kind} as {self.owner_id!r}, {state}>"

    def __reduce__(self) -> Any:
        raise TypeError("a PGLease client belongs to its process and is not pickled or copied")


_clients: weakref.WeakSet[PGLease] = weakref.WeakSet()


def every_client() -> list[PGLease]:
    """Return the clients of this process that were not closed."""
    return list(_clients)


@atexit.register
def _close_clients() -> None:
    for client in every_client():
        try:
            client._close_at_exit()
        except Exception:
            log.exception("%r could not be closed", client)


def _callback(callback: object, argument: str) -> None:
    if not callable(callback):
        raise ConfigurationError(f"{argument} must be callable, not {callback!r}")
    if inspect.iscoroutinefunction(callback):
        raise ConfigurationError(
            f"{argument} must be a plain function, not {callback!r}: it is called on a thread of its own, "
            "where it may use asyncio.run_coroutine_threadsafe"
        )


def _store(backend: str | Backend, given: Mapping[str, Any]) -> tuple[Backend, bool]:
    """Return the store and whether we opened it."""
    if isinstance(backend, str):
        return open_backend(backend, **given), True
    if given:
        raise ConfigurationError(
            *(f"{name} is for addresses; give it to the Backend object instead" for name in sorted(given))
        )
    if isinstance(backend, type) or not isinstance(backend, Backend):
        raise ConfigurationError(f"backend must be an address or a Backend object, not {type(backend).__name__}")
    return backend, False


def _abandon(manager: HeartbeatManager, opened: Backend | None) -> None:
    """Let go of everything of a client that was dropped without `close`."""
    # Called by the garbage collector, at any moment on any thread, whatever lock that has: so no lock is taken here.
    if held := manager.number_of_holds():
        warnings.warn(f"a PGLease client was dropped while it held {held} leases", ResourceWarning, stacklevel=2)
    with contextlib.suppress(RuntimeError):  # the interpreter is going down: they lapse by themselves
        threading.Thread(target=_wind_up, args=(manager, opened), name="pglease-wind-up", daemon=True).start()


def _wind_up(manager: HeartbeatManager, opened: Backend | None) -> None:
    for hold in manager.holds():
        if hold.end():
            manager.give_back.add(hold.name, hold.lease_id, min_hold=hold.min_hold)
    manager.give_back.settle(CLOSING_BOX)
    manager.stop(CLOSING_BOX)
    manager.notices.close(CLOSING_BOX)
    if opened is not None:
        opened.close()
