"""`AsyncPGLease`: the same leases for asyncio. A face of `PGLease`, no second client: every rule is in the core.

Whatever asks the store is awaited and blocks no event loop; what only looks at this process (`held`, `remaining()`) is
not awaited. Heartbeats stay on their thread, so a blocked event loop loses no lease. A task may be cancelled at any
await: a grant that comes too late is given back, and leaving a block ends its release first, in bounded time.

    from pglease import AsyncPGLease

    async with AsyncPGLease("postgresql://user:pass@host/db") as leases:
        async with leases.acquire("daily-report", ttl="5m") as lease:
            if lease:
                await generate_report(fencing_token=lease.fencing_token)
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping
from datetime import datetime
from functools import partial
from types import TracebackType
from typing import (
    TYPE_CHECKING,
    Any,
    Final,
    Generic,
    Literal,
    NoReturn,
    Self,
    TypedDict,
    TypeVar,
    Unpack,
    cast,
    final,
    overload,
)

from pglease import default, loops, mistakes, options
from pglease.backends import Backend
from pglease.backends.base import Fence, Guard, ParamStyle
from pglease.blocks import Block
from pglease.client import KNOBS, PGLease
from pglease.decorator import TaskDecorator
from pglease.errors import ConfigurationError
from pglease.events import Observer, Waiting
from pglease.handles import HeldLease, Hold, NotAcquired
from pglease.heartbeat import HeartbeatManager
from pglease.options import Duration
from pglease.records import Handover, Lease, Loss, Tenure
from pglease.schema import DEFAULT_TABLE
from pglease.slots import OncePer
from pglease.taking import not_acquired
from pglease.watching import AsyncWatch

if TYPE_CHECKING:
    from pglease.primitives.aio import (
        AsyncGroupContext,
        AsyncLeaderElection,
        AsyncLock,
        AsyncReadWriteLock,
        AsyncSemaphore,
        AsyncTaskLock,
    )
    from pglease.primitives.arguments import (
        AsyncElectionOptions,
        GroupOptions,
        LockOptions,
        ReadWriteOptions,
        SemaphoreOptions,
        TaskLockOptions,
    )

GRACE = 5.0
"""Seconds after which a body that goes on in spite of its cancellation is cancelled again."""

T = TypeVar("T")
LeaseT_co = TypeVar("LeaseT_co", bound="AsyncHeldLease | NotAcquired", covariant=True)


class _Wanted(TypedDict, total=False):
    """The keywords of `acquire` that do not matter to its type."""

    wait: Duration | None
    min_hold: Duration | None
    max_hold: Duration | None
    metadata: Mapping[str, Any] | None
    heartbeat: bool
    fair: bool
    on_lost: options.AsyncOnLost
    warn_after: Duration | None


class AsyncPGLease(mistakes.OnlyAsyncWith):
    """Leases for an application on asyncio: `PGLease` with its verbs awaited.

    Any number of event loops may use one, at once and one after another.

    Args:
        backend: an address or a `Backend` object, as for `PGLease`; or a `PGLease`, whose other face this then is: both
            have the same holds, and closing this one leaves that one open.
        owner_id, heartbeat_interval, on_lease_lost, margin, observers, on_at_risk: as for `PGLease`, with its defaults,
            and not together with one.
        table_name, schema, auto_initialize, connect_timeout, pool_size: as for `PGLease`, with its defaults, and not
            together with one.

    Attributes:
        client: the `PGLease` behind it: the synchronous face of the same holds, for threads.

    Raises:
        ConfigurationError: every broken rule at once, without showing the address. Nothing was opened.
        MissingDependencyError: the store's driver is not installed.
    """

    def __init__(
        self,
        backend: str | Backend | PGLease,
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
        arguments: dict[str, Any] = {
            "owner_id": owner_id,
            "heartbeat_interval": heartbeat_interval,
            "on_lease_lost": on_lease_lost,
            "margin": margin,
            "table_name": table_name,
            "schema": schema,
            "auto_initialize": auto_initialize,
            "connect_timeout": connect_timeout,
            "pool_size": pool_size,
            "observers": tuple(observers),
            "on_at_risk": on_at_risk,
        }
        self._made = not isinstance(backend, PGLease)
        if isinstance(backend, PGLease):
            _refuse(arguments)
            self.client = backend
        else:
            self.client = PGLease(backend, **arguments)

    @classmethod
    def from_env(cls, **arguments: Any) -> Self:
        """Build a client for the address in `PGLEASE_URL`, else in `DATABASE_URL`.

        Args:
            arguments: as for the class, but for `backend`.

        Raises:
            ConfigurationError: neither is set, or as for the class.
        """
        this = cls(PGLease.from_env(**arguments))
        this._made = True
        return this

    @property
    def backend(self) -> Backend:
        """The store."""
        return self.client.backend

    @property
    def owner_id(self) -> str:
        """The label for people; the default one is made anew in a forked child."""
        return self.client.owner_id

    @property
    def heartbeat_manager(self) -> HeartbeatManager:
        """What keeps the leases alive."""
        return self.client.heartbeat_manager

    # -- taking --------------------------------------------------------------------------------------------------------

    @overload
    def acquire(
        self, name: str, ttl: Duration = ..., *, raise_on_failure: Literal[True], **wanted: Unpack[_Wanted]
    ) -> AsyncLeaseContext[AsyncHeldLease]: ...
    @overload
    def acquire(
        self, name: str, ttl: Duration, raise_on_failure: Literal[True], **wanted: Unpack[_Wanted]
    ) -> AsyncLeaseContext[AsyncHeldLease]: ...
    @overload
    def acquire(
        self, name: str, ttl: Duration = ..., raise_on_failure: bool = ..., **wanted: Unpack[_Wanted]
    ) -> AsyncLeaseContext[AsyncHeldLease | NotAcquired]: ...
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
        on_lost: options.AsyncOnLost = "raise",
        warn_after: Duration | None = options.WARN_AFTER,
    ) -> AsyncLeaseContext[Any]:
        """Return an asynchronous context manager that holds the lease for its block: `async with`.

        It binds an `AsyncHeldLease` (true), or a `NotAcquired` (false) when somebody else has it. A cancelled wait
        leaves nothing behind. Leaving the block takes at most 2 seconds, 0.5 after an error or a cancellation; what the
        store has not confirmed by then goes on in the background. A cancellation meanwhile comes out afterwards.

        Args:
            name, ttl, raise_on_failure, wait, min_hold, max_hold, metadata, heartbeat, fair, warn_after: as for
                `PGLease.acquire`, with its defaults.
            on_lost: "raise" (default), "log" and "exit" as there. "cancel": the task that entered the block is also
                cancelled as soon as the lease is lost, and again every 5 seconds that its body goes on;
                `LeaseLostError` comes out of the block in the place of that cancellation. A cancellation from elsewhere
                always comes out as it is.

        Raises:
            ConfigurationError: at once, for every broken rule.
            ReentrantError: on entering, by a waiting call of the task that has the lease through this client. That hold
                goes on.
            AcquisitionError: on entering, with `raise_on_failure`; nothing is held.
            BackendError: on entering; nothing is held, or lapses by itself.
            LeaseLostError: on leaving; somebody else may already be working.
        """
        hold = options.hold_options(
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
            in_a_task=True,
        )
        self.client._check_traits(hold)
        return AsyncLeaseContext(self.client, hold, raise_on_failure=raise_on_failure)

    def adopt(
        self,
        handover: Handover | str,
        ttl: Duration | None = None,
        raise_on_failure: bool = False,
        *,
        min_hold: Duration | None = None,
        max_hold: Duration | None = None,
        heartbeat: bool = True,
        on_lost: options.AsyncOnLost = "raise",
    ) -> AsyncLeaseContext[AsyncHeldLease | NotAcquired]:
        """Return an asynchronous context manager that goes on with a lease that was handed over.

        See `PGLease.adopt`, and `acquire` for what the block does.
        """
        wanted = options.adoption(
            handover, ttl, min_hold=min_hold, max_hold=max_hold, heartbeat=heartbeat, on_lost=on_lost, in_a_task=True
        )
        return AsyncLeaseContext(self.client, wanted, raise_on_failure=raise_on_failure)

    async def try_acquire(
        self,
        name: str,
        ttl: Duration = 60,
        *,
        min_hold: Duration | None = None,
        max_hold: Duration | None = None,
        metadata: Mapping[str, Any] | None = None,
        heartbeat: bool = True,
    ) -> bool:
        """Ask once, without waiting behind anybody: True if the lease is ours now. See `PGLease.try_acquire`.

        Cancelled, it leaves nothing behind; what it answered True for is the client's until `release(name)`.
        """
        hold = options.hold_options(
            name, ttl, min_hold=min_hold, max_hold=max_hold, metadata=metadata, heartbeat=heartbeat
        )
        taking = self.client.taking
        return taking.own(await taking.atake(hold)) is not None

    async def wait_for_lease(
        self,
        name: str,
        ttl: Duration = 60,
        timeout: Duration | None = 60.0,  # noqa: ASYNC109  # the same call as on the other face
        poll_interval: Duration = 5.0,
        *,
        fair: bool = False,
        min_hold: Duration | None = None,
        max_hold: Duration | None = None,
        metadata: Mapping[str, Any] | None = None,
        warn_after: Duration | None = options.WARN_AFTER,
    ) -> AsyncHeldLease:
        """Wait until the lease is ours; the client owns it, as after `try_acquire`. See `PGLease.wait_for_lease`.

        A waiting task occupies no thread. To give up, cancel it: nothing is held then.

        Raises:
            ConfigurationError: for every broken rule.
            AcquireTimeout: the time ran out; says who has it and until when. Nothing is held.
            ReentrantError: this task has the lease through this client and would wait for itself. That hold goes on.
            BackendError: nothing is held, or lapses by itself.
        """
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
        self.client._check_traits(wanted)
        taking = self.client.taking
        taken = await taking.atake(wanted, poll=poll)
        if isinstance(taken, NotAcquired):
            raise not_acquired(taken, wanted)
        taking.own(taken)
        return AsyncHeldLease(taken)

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
        """Decorate a coroutine function so that one call at a time runs, among all processes.

        Arguments and errors as for `PGLease.singleton_task`, which this is: a plain function is decorated too, and then
        asks the store on the thread that calls it.
        """
        return self.client.singleton_task(
            name,
            ttl,
            skip_if_locked,
            on_skip=on_skip,
            wait=wait,
            min_hold=min_hold,
            max_hold=max_hold,
            once_per=once_per,
        )

    # -- the primitives ------------------------------------------------------------------------------------------------

    def lock(self, name: str, ttl: Duration | None = None, **wanted: Unpack[LockOptions]) -> AsyncLock:
        """Return an `AsyncLock`; it asks for nothing yet. See `PGLease.lock`."""
        from pglease.primitives.aio import AsyncLock

        return AsyncLock(self.client.lock(name, ttl, **wanted))

    def task_lock(self, name: str, ttl: Duration | None = None, **wanted: Unpack[TaskLockOptions]) -> AsyncTaskLock:
        """Return an `AsyncTaskLock`; it asks for nothing yet. See `PGLease.task_lock`."""
        from pglease.primitives.aio import AsyncTaskLock

        return AsyncTaskLock(self.client.task_lock(name, ttl, **wanted))

    def leader_election(
        self, name: str, ttl: Duration | None = None, **wanted: Unpack[AsyncElectionOptions]
    ) -> AsyncLeaderElection:
        """Return an `AsyncLeaderElection`; it does not campaign yet. See `PGLease.leader_election`."""
        from pglease.primitives.aio import AsyncLeaderElection

        return AsyncLeaderElection(self.client.leader_election(name, ttl, **wanted))

    def read_write_lock(
        self, name: str, ttl: Duration | None = None, **wanted: Unpack[ReadWriteOptions]
    ) -> AsyncReadWriteLock:
        """Return an `AsyncReadWriteLock`; it asks for nothing yet. See `PGLease.read_write_lock`."""
        from pglease.primitives.aio import AsyncReadWriteLock

        return AsyncReadWriteLock(self.client.read_write_lock(name, ttl, **wanted))

    def semaphore(
        self, name: str, limit: int | None = None, ttl: Duration | None = None, **wanted: Unpack[SemaphoreOptions]
    ) -> AsyncSemaphore:
        """Return an `AsyncSemaphore`; it asks for nothing yet. See `PGLease.semaphore`."""
        from pglease.primitives.aio import AsyncSemaphore

        return AsyncSemaphore(self.client.semaphore(name, limit, ttl, **wanted))

    def acquire_many(
        self, names: Iterable[str], ttl: Duration = 60, **wanted: Unpack[GroupOptions]
    ) -> AsyncGroupContext:
        """Return an `async with` block that holds all of several leases, or none. See `PGLease.acquire_many`."""
        from pglease.primitives.aio import AsyncGroupContext

        return AsyncGroupContext(self.client.acquire_many(names, ttl, **wanted))

    # -- what one has --------------------------------------------------------------------------------------------------

    async def release(self, name: str) -> bool:
        """End this client's hold of `name`; True if this call ended it, False if there was none. Idempotent.

        Goes to its end, in bounded time, also when the task is cancelled. See `PGLease.release`.
        """
        loops.running_loop()
        taking = self.client.taking
        hold = taking.hold_of(name)
        if hold is None:
            return False
        ended = await taking.manager.arelease(hold)
        taking.drop(hold)
        return ended

    async def renew(self, name: str, ttl: Duration | None = None) -> None:
        """Extend this client's hold of `name`. See `PGLease.renew`."""
        await loops.keep(partial(self.client.renew, name, ttl))

    def held(self, name: str) -> AsyncHeldLease | None:
        """Return a handle of this client's hold of `name`, or None when it holds nothing by that name. Not awaited."""
        lease = self.client.held(name)
        return None if lease is None else AsyncHeldLease(lease)

    def holding(self) -> list[AsyncHeldLease]:
        """Return handles of all that this client holds, ordered by name. Not awaited."""
        return [AsyncHeldLease(lease) for lease in self.client.holding()]

    def watch(self, name: str | None = None, *, prefix: str | None = None, poll_interval: Duration = 5.0) -> AsyncWatch:
        """Return an asynchronous iterator of what happens to leases; it asks for nothing yet. See `PGLease.watch`."""
        return AsyncWatch(self.client.watch(name, prefix=prefix, poll_interval=poll_interval))

    def is_alive(self) -> bool:
        """Tell whether what keeps the leases alive runs. See `PGLease.is_alive`. Not awaited."""
        return self.client.is_alive()

    def waiting(self) -> list[Waiting]:
        """Return how each wait of this client stands, ordered by name. Not awaited."""
        return self.client.waiting()

    # -- what the store says -------------------------------------------------------------------------------------------

    async def get_lease(self, name: str) -> Lease | None:
        """Return the record of the present or the last hold of `name`. See `PGLease.get_lease`."""
        return await self._ask(partial(self.client.get_lease, name))

    async def list_leases(self, prefix: str = "", *, ended: bool = False) -> list[Lease]:
        """Return the records of all names that begin with `prefix`. See `PGLease.list_leases`."""
        return await self._ask(partial(self.client.list_leases, prefix, ended=ended))

    async def queued(self, name: str) -> list[str]:
        """Return who queues for a lease, in order. See `PGLease.queued`."""
        return await self._ask(partial(self.client.queued, name))

    async def queues(self, prefix: str = "") -> dict[str, list[str]]:
        """Return by name who queues. See `PGLease.queues`."""
        return await self._ask(partial(self.client.queues, prefix))

    async def history(self, name: str | None = None, *, prefix: str = "", limit: int = 100) -> list[Tenure]:
        """Return who held a lease, and how each hold ended. See `PGLease.history`."""
        return await self._ask(partial(self.client.history, name, prefix=prefix, limit=limit))

    async def cleanup_expired(self, older_than: Duration = 0) -> int:
        """Delete the records of holds that ended long ago. See `PGLease.cleanup_expired`."""
        return await self._ask(partial(self.client.cleanup_expired, older_than))

    async def force_release(self, name: str, fencing_token: int) -> bool:
        """End somebody's hold, as an operator. See `PGLease.force_release`."""
        return await self._ask(partial(self.client.force_release, name, fencing_token))

    async def _ask(self, function: Callable[[], T]) -> T:
        return await loops.ask(function, turn=self.client.taking.box)

    # -- the end -------------------------------------------------------------------------------------------------------

    async def close(self) -> None:
        """Release what is held and close what this object opened; a `PGLease` it was given stays open. Idempotent.

        Goes to its end, in bounded time, also when the task is cancelled. See `PGLease.close`.
        """
        if self._made:
            await loops.to_the_end(self.client.close)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not isinstance(error, GeneratorExit):  # closed with its loop: nobody is there to wait with; see `PGLease`
            await self.close()

    def __repr__(self) -> str:
        return f"<AsyncPGLease of {self.client!r}>"

    def __reduce__(self) -> Any:
        return self.client.__reduce__()


def _refuse(arguments: Mapping[str, Any]) -> None:
    """Refuse what was decided when the other client was made; ignored, it would be missed much later."""
    usual = {"observers": (), **KNOBS}
    given = [name for name, value in arguments.items() if value != usual.get(name)]
    if given:
        raise ConfigurationError(*(f"{name} is for addresses and backends; this PGLease has its own" for name in given))


class AsyncLeaseContext(Block, mistakes.OnlyAsyncWith, Generic[LeaseT_co]):
    """The block that a lease is held for. Made by `AsyncPGLease.acquire`; may be entered again once it was left."""

    _body: _Body | None = None

    async def __aenter__(self) -> LeaseT_co:
        self._enter()
        try:
            taken = await self._client.taking.atake(self._wanted)
            self._admit(taken)
        except BaseException:
            self._entered = False
            raise
        if isinstance(taken, NotAcquired):
            return cast("LeaseT_co", taken)
        if self._wanted.on_lost == "cancel":
            self._body = _Body(taken._hold)
        return cast("LeaseT_co", AsyncHeldLease(taken))

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        body, self._body = self._body, None
        lease, unasked, self._unasked = self._leave(), self._unasked, None
        if body is not None and body.leave(error):
            error = None  # it is ours, and says what leaving is going to say
        if lease is not None:
            await self._client.taking.aleave(lease._hold, error)
        elif unasked is not None and error is None:
            unasked.warn()


class _Body:
    """The task inside a block: cancelled on loss, and told apart from a task that somebody else cancels."""

    def __init__(self, hold: Hold) -> None:
        task = asyncio.current_task()
        assert task is not None  # somebody awaits us
        self._task = task
        self._loop = asyncio.get_running_loop()
        self._hold = hold
        self._cancelled_before = task.cancelling()
        self._cancels = 0
        self._again: asyncio.TimerHandle | None = None
        self._left = False
        hold.lost.tell(self._hear)

    def _hear(self) -> None:
        loops.tell_loop(self._loop, self._begin)

    def _begin(self) -> None:
        if self._left or self._again is not None:
            return
        if self._cancelled_elsewhere():  # it is on its way out: a second cancellation would disturb its tidying up
            self._again = self._loop.call_later(GRACE, self._cancel)
        else:
            self._cancel()

    def _cancel(self) -> None:
        self._cancels += 1
        self._task.cancel(f"the lease {self._hold.name!r} was lost")
        self._again = self._loop.call_later(GRACE, self._cancel)

    def _cancelled_elsewhere(self) -> bool:
        return self._task.cancelling() > self._cancelled_before + self._cancels

    def leave(self, error: BaseException | None) -> bool:
        """Cancel no more, take back the cancellations; tell whether `error` is nothing but one of them."""
        self._left = True
        self._hold.lost.untell(self._hear)
        if self._again is not None:
            self._again.cancel()
        ours = self._cancels > 0 and not self._cancelled_elsewhere()
        for _ in range(self._cancels):
            self._task.uncancel()
        return ours and isinstance(error, asyncio.CancelledError)


@final
class AsyncHeldLease:
    """A lease that this process holds, for asyncio: true. It is the same hold as a `HeldLease` of the client.

    Handles of one hold are equal. The last of them that is forgotten releases it, with a `ResourceWarning`, unless the
    client owns it.

    Attributes:
        name: the lease.
        owner_id: the label it was taken with.
        fencing_token: larger with every hold of this name; pass it to whatever is written.
    """

    __slots__ = ("__weakref__", "_lease", "fencing_token", "name", "owner_id")

    def __init__(self, lease: HeldLease) -> None:
        self._lease = lease
        self.name: Final = lease.name
        self.owner_id: Final = lease.owner_id
        self.fencing_token: Final = lease.fencing_token

    def __bool__(self) -> Literal[True]:
        return True

    def __eq__(self, other: object) -> bool:
        return isinstance(other, AsyncHeldLease) and self._lease is other._lease

    def __hash__(self) -> int:
        return hash(self._lease)

    @property
    def acquired_at(self) -> datetime:
        """When this hold began, by the store's clock."""
        return self._lease.acquired_at

    @property
    def metadata(self) -> Mapping[str, Any]:
        """What was attached to it. See `HeldLease.metadata`."""
        return self._lease.metadata

    @property
    def lease(self) -> Lease:
        """The record as last confirmed."""
        return self._lease.lease

    @property
    def held(self) -> bool:
        """Whether this process may still act. Once false, it stays false."""
        return self._lease.held

    def remaining(self) -> float:
        """Return the seconds this process may still act, on the boot clock, margin already taken off; 0.0 once over."""
        return self._lease.remaining()

    @property
    def lost(self) -> LostEvent:
        """Set when the hold was lost; `await lost.wait(seconds)` waits for it. A release does not set it."""
        return LostEvent(self._lease)

    @property
    def loss(self) -> Loss | None:
        """Why it was lost (`.reason`) and the last trouble before (`.error`), or None."""
        return self._lease.loss

    def raise_if_lost(self) -> None:
        """Raise if the hold was lost; not awaited. See `HeldLease.raise_if_lost`."""
        self._lease.raise_if_lost()

    async def ensure(self, seconds: Duration) -> bool:
        """Tell whether at least `seconds` are left, renewing if that helps. See `HeldLease.ensure`."""
        return await loops.keep(partial(self._lease.ensure, seconds))

    async def renew(self, ttl: Duration | None = None) -> None:
        """Extend by hand. See `HeldLease.renew`; cancelled, it is unknown whether that was done."""
        await loops.keep(partial(self._lease.renew, ttl))

    def require_progress(self, within: Duration | None) -> None:
        """Have it renewed only while `progress` is called at least so often. See `HeldLease.require_progress`."""
        self._lease.require_progress(within)

    def progress(self) -> None:
        """Say that the work goes on. Not awaited."""
        self._lease.progress()

    async def set_metadata(self, metadata: Mapping[str, Any]) -> None:
        """Replace what is attached to it, while it is held. See `HeldLease.set_metadata`."""
        await loops.keep(partial(self._lease.set_metadata, metadata))

    async def transfer(self, owner: str, ttl: Duration | None = None) -> Handover:
        """Hand the lease over. See `HeldLease.transfer`; goes to its end also when the task is cancelled."""
        return await loops.to_the_end(partial(self._lease.transfer, owner, ttl))

    async def release(self) -> bool:
        """End the hold (or let it run until `min_hold`); True if this call ended it. Idempotent.

        Goes to its end, in bounded time, also when the task is cancelled. See `HeldLease.release`.
        """
        hold = self._lease._hold
        return await hold.keeper.arelease(hold)

    def guard(self, connection: Any) -> Guard:
        """Have the store refuse a stale holder inside the caller's transaction. See `HeldLease.guard`.

        On asynchronous connections it is awaited or entered: `async with lease.guard(connection):`.
        """
        return self._lease.guard(connection)

    def fence_sql(self, paramstyle: ParamStyle = "format", *, start: int = 1) -> Fence:
        """Return the guard as a predicate for one statement; not awaited. See `HeldLease.fence_sql`."""
        return self._lease.fence_sql(paramstyle, start=start)

    def __repr__(self) -> str:
        return repr(self._lease).replace("<HeldLease", "<AsyncHeldLease", 1)

    def __reduce__(self) -> NoReturn:
        raise TypeError("an AsyncHeldLease belongs to its process and is not pickled or copied")


@final
class LostEvent:
    """Whether a hold was lost, for tasks that wait for it. Made by `AsyncHeldLease.lost`."""

    __slots__ = ("_lease",)

    def __init__(self, lease: HeldLease) -> None:
        self._lease = lease

    def is_set(self) -> bool:
        """Tell whether the hold was lost."""
        return self._lease.lost.is_set()

    async def wait(self, timeout: Duration | None = None) -> bool:  # noqa: ASYNC109  # as threading.Event has it
        """Wait until the hold is lost, for at most `timeout` seconds (None: for ever); tell whether it is."""
        seconds = options.wait(timeout, "timeout")
        if not self.is_set():
            await loops.asleep(seconds, self._lease._hold.lost)
        return self.is_set()


# -- the default client ------------------------------------------------------------------------------------------------


def acquire(
    name: str, ttl: Duration = 60, raise_on_failure: bool = False, **wanted: Unpack[_Wanted]
) -> AsyncLeaseContext[Any]:
    """Hold a lease for a block, with the default client: `async with pglease.aio.acquire(…)`."""
    return _default().acquire(name, ttl, raise_on_failure, **wanted)


async def try_acquire(name: str, ttl: Duration = 60, **wanted: Any) -> bool:
    """Ask once, with the default client. See `AsyncPGLease.try_acquire`."""
    return await _default().try_acquire(name, ttl, **wanted)


async def wait_for_lease(
    name: str,
    ttl: Duration = 60,
    timeout: Duration | None = 60.0,  # noqa: ASYNC109  # the same call as on the other face
    poll_interval: Duration = 5.0,
    **wanted: Any,
) -> AsyncHeldLease:
    """Wait for a lease, with the default client. See `AsyncPGLease.wait_for_lease`."""
    return await _default().wait_for_lease(name, ttl, timeout, poll_interval, **wanted)


async def release(name: str) -> bool:
    """End a hold of the default client. See `AsyncPGLease.release`."""
    return await _default().release(name)


def _default() -> AsyncPGLease:
    return AsyncPGLease(default.default_client())
