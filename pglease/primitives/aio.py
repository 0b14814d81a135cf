"""The primitives for asyncio: faces of those for threads, which keep every rule."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, NoReturn, ParamSpec, Self, TypeVar, final

from pglease import clock, current, identity, loops, mistakes, options
from pglease.aio import GRACE, AsyncHeldLease
from pglease.blocks import Unasked
from pglease.errors import ConfigurationError
from pglease.handles import HeldLease, NotAcquired
from pglease.options import Duration
from pglease.primitives import talk
from pglease.primitives.election import Health, LeaderElection, Term
from pglease.primitives.lock import Lock
from pglease.primitives.many import GroupContext, LeaseGroup
from pglease.primitives.read_write import ReadWriteLock
from pglease.primitives.semaphore import Semaphore
from pglease.primitives.task_lock import TaskLock
from pglease.records import Lease
from pglease.watching import AsyncWatch

if TYPE_CHECKING:
    from pglease.aio import AsyncPGLease
    from pglease.client import PGLease
    from pglease.primitives.configs import (
        LeaderElectionConfig,
        LockConfig,
        ReadWriteLockConfig,
        SemaphoreConfig,
        TaskLockConfig,
    )

P = ParamSpec("P")
R = TypeVar("R")


@asynccontextmanager
async def _held(lease: HeldLease, leases: PGLease) -> AsyncIterator[AsyncHeldLease]:
    """Hold for a block what was taken."""
    lease._hold.in_block = True
    current.enter(lease)
    error: BaseException | None = None
    try:
        yield AsyncHeldLease(lease)
    except BaseException as raised:
        error = raised
        raise
    finally:
        current.leave(lease)
        await leases.taking.aleave(lease._hold, error)


class _Blocks:
    """The handles of the blocks that tasks are in, by task: one object may serve many tasks."""

    def __init__(self) -> None:
        self._of: dict[identity.Caller, list[Any]] = {}

    def enter(self, block: Any) -> None:
        self._of.setdefault(identity.current_caller(), []).append(block)

    def leave(self) -> Any:
        """Return the innermost block of this task; of any, if another task leaves it."""
        caller = identity.current_caller()
        if caller not in self._of:
            caller = next(iter(self._of))
        block = self._of[caller].pop()
        if not self._of[caller]:
            del self._of[caller]
        return block


class AsyncLock:
    """`Lock` for asyncio. Made by `AsyncPGLease.lock`; re-entrancy is a task's."""

    def __init__(self, lock: Lock) -> None:
        self._lock = lock
        self._blocks = _Blocks()

    @classmethod
    def from_config(cls, leases: AsyncPGLease, name: str, config: LockConfig) -> Self:
        """Build one by a checked record; the environment is not asked. See `Lock.from_config`."""
        return cls(Lock.from_config(leases.client, name, config))

    async def reconfigure(self, config: LockConfig) -> None:
        """Go by other options. See `Lock.reconfigure`."""
        await loops.keep(partial(self._lock.reconfigure, config))

    @property
    def name(self) -> str:
        """The lease's name."""
        return self._lock.name

    async def acquire(self, timeout: Duration | None = None) -> AsyncHeldLease:  # noqa: ASYNC109  # as on the other face
        """Wait until it is ours. See `Lock.acquire`."""
        wanted = self._lock._asked(timeout)
        taken = self._lock._again() or await self._lock.leases.taking.atake(wanted)
        return AsyncHeldLease(self._lock._got(taken, wanted))

    async def acquire_nowait(self) -> AsyncHeldLease | NotAcquired:
        """Ask once. See `Lock.acquire_nowait`."""
        wanted = self._lock._asked(0)
        taken = self._lock._again(refuse=True) or await self._lock.leases.taking.atake(wanted)
        return taken if isinstance(taken, NotAcquired) else AsyncHeldLease(self._lock._got(taken, wanted))

    async def locked(self) -> bool:
        """Tell whether anybody holds it, by the store. See `Lock.locked`."""
        return await loops.ask(self._lock.locked)

    def owned(self) -> bool:
        """Tell whether this task holds it through this client. Not awaited."""
        return self._lock.owned()

    async def extend(self, ttl: Duration | None = None) -> AsyncHeldLease:
        """Extend what was acquired. See `Lock.extend`."""
        return AsyncHeldLease(await loops.keep(partial(self._lock.extend, ttl)))

    async def release(self) -> None:
        """End what was acquired. See `Lock.release`; goes to its end also when the task is cancelled."""
        await loops.to_the_end(self._lock.release)

    @asynccontextmanager
    async def hold(self, timeout: Duration | None = None) -> AsyncIterator[AsyncHeldLease]:  # noqa: ASYNC109
        """Return a block that waits for at most `timeout` seconds. See `Lock.hold`."""
        lease = await self.acquire(timeout)
        async with self._block(lease):
            yield lease

    @asynccontextmanager
    async def _block(self, lease: AsyncHeldLease) -> AsyncIterator[None]:
        hold = lease._lease._hold
        hold.in_block = True
        current.enter(lease._lease)
        error: BaseException | None = None
        try:
            yield
        except BaseException as raised:
            error = raised
            raise
        finally:
            current.leave(lease._lease)
            if not hold.unnest():
                await self._lock.leases.taking.aleave(hold, error)

    async def __aenter__(self) -> AsyncHeldLease:
        lease = await self.acquire()
        block = self._block(lease)
        await block.__aenter__()
        self._blocks.enter(block)
        return lease

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        return await _leave(self._blocks.leave(), kind, error, trace)

    def __repr__(self) -> str:
        return repr(self._lock).replace("<Lock", "<AsyncLock", 1)


async def _leave(
    block: Any, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
) -> bool | None:
    left: bool | None = await block.__aexit__(kind, error, trace)
    return left


class AsyncTaskLock:
    """`TaskLock` for asyncio. Made by `AsyncPGLease.task_lock`."""

    def __init__(self, lock: TaskLock) -> None:
        self._lock = lock

    @classmethod
    def from_config(cls, leases: AsyncPGLease, name: str, config: TaskLockConfig) -> Self:
        """Build one by a checked record; the environment is not asked. See `TaskLock.from_config`."""
        return cls(TaskLock.from_config(leases.client, name, config))

    async def reconfigure(self, config: TaskLockConfig) -> None:
        """Go by other options. See `TaskLock.reconfigure`."""
        await loops.keep(partial(self._lock.reconfigure, config))

    @property
    def name(self) -> str:
        """The lease's name."""
        return self._lock.name

    async def acquire(self) -> AsyncHeldLease | NotAcquired:
        """Ask once. See `TaskLock.acquire`."""
        taken = await self._acquire()
        return AsyncHeldLease(taken) if isinstance(taken, HeldLease) else taken

    async def _acquire(self) -> HeldLease | NotAcquired:
        return self._lock._got(await self._lock.leases.taking.atake(self._lock._wanted))

    async def refresh(self, ttl: Duration | None = None) -> AsyncHeldLease:
        """Extend the run. See `TaskLock.refresh`."""
        return AsyncHeldLease(await loops.keep(partial(self._lock.refresh, ttl)))

    async def extend(self, ttl: Duration | None = None) -> AsyncHeldLease:
        """See `refresh`."""
        return await self.refresh(ttl)

    async def locked(self) -> bool:
        """Tell whether the lease is held, or waited out, by the store. See `TaskLock.locked`."""
        return await loops.ask(self._lock.locked)

    async def release(self) -> None:
        """End the run. See `TaskLock.release`."""
        await loops.to_the_end(self._lock.release)

    async def __aenter__(self) -> AsyncHeldLease | NotAcquired:
        self._lock._refuse_if_in_use()
        taken = self._lock._begin_block(await self._acquire())
        return AsyncHeldLease(taken) if isinstance(taken, HeldLease) else taken

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        lease = self._lock._end_block()
        if lease is not None:
            await self._lock.leases.taking.aleave(lease._hold, error)

    def __repr__(self) -> str:
        return repr(self._lock).replace("<TaskLock", "<AsyncTaskLock", 1)


class AsyncReadWriteLock:
    """`ReadWriteLock` for asyncio. Made by `AsyncPGLease.read_write_lock`."""

    def __init__(self, lock: ReadWriteLock) -> None:
        self._lock = lock

    @classmethod
    def from_config(cls, leases: AsyncPGLease, name: str, config: ReadWriteLockConfig) -> Self:
        """Build one by a checked record; the environment is not asked. See `ReadWriteLock.from_config`."""
        return cls(ReadWriteLock.from_config(leases.client, name, config))

    async def reconfigure(self, config: ReadWriteLockConfig) -> None:
        """Go by other options. See `ReadWriteLock.reconfigure`."""
        await loops.keep(partial(self._lock.reconfigure, config))

    @property
    def name(self) -> str:
        """The lock's name."""
        return self._lock.name

    async def acquire_read(self, timeout: Duration | None = None) -> AsyncHeldLease:  # noqa: ASYNC109
        """Hold it together with other readers. See `ReadWriteLock.acquire_read`."""
        return AsyncHeldLease(await self._acquire(self._lock._reading, timeout))

    async def acquire_write(self, timeout: Duration | None = None) -> AsyncHeldLease:  # noqa: ASYNC109
        """Hold it alone. See `ReadWriteLock.acquire_write`."""
        return AsyncHeldLease(await self._acquire(self._lock._writing, timeout))

    async def _acquire(self, conversation: Any, timeout: Duration | None) -> HeldLease:  # noqa: ASYNC109
        wait = options.wait(timeout, "timeout")
        return self._lock._got(await talk.arun(conversation(wait), self._lock.leases), wait)

    @asynccontextmanager
    async def read(self, timeout: Duration | None = None) -> AsyncIterator[AsyncHeldLease]:  # noqa: ASYNC109
        """Return a block for reading. See `ReadWriteLock.read`."""
        async with _held(await self._acquire(self._lock._reading, timeout), self._lock.leases) as lease:
            yield lease

    @asynccontextmanager
    async def write(self, timeout: Duration | None = None) -> AsyncIterator[AsyncHeldLease]:  # noqa: ASYNC109
        """Return a block for writing. See `ReadWriteLock.write`."""
        async with _held(await self._acquire(self._lock._writing, timeout), self._lock.leases) as lease:
            yield lease

    async def downgrade(self, writing: AsyncHeldLease) -> AsyncHeldLease:
        """Turn a writer's hold into a reader's. See `ReadWriteLock.downgrade`."""
        self._lock._check_writer(writing._lease)
        return AsyncHeldLease(await talk.arun(self._lock._downgrading(writing._lease), self._lock.leases))

    async def generation(self) -> int:
        """Return the token of the present or the last writer, by the store. See `ReadWriteLock.generation`."""
        return await loops.ask(lambda: self._lock.generation)

    async def poisoned(self) -> bool:
        """Tell whether the last writer's lease ran out, by the store. See `ReadWriteLock.poisoned`."""
        return await loops.ask(lambda: self._lock.poisoned)

    async def readers(self) -> list[Lease]:
        """Return the records of those who read, by the store. See `ReadWriteLock.readers`."""
        return await loops.ask(self._lock.readers)

    def __repr__(self) -> str:
        return repr(self._lock).replace("<ReadWriteLock", "<AsyncReadWriteLock", 1)


class AsyncSemaphore:
    """`Semaphore` for asyncio. Made by `AsyncPGLease.semaphore`."""

    def __init__(self, semaphore: Semaphore) -> None:
        self._semaphore = semaphore
        self._blocks = _Blocks()

    @classmethod
    def from_config(cls, leases: AsyncPGLease, name: str, config: SemaphoreConfig) -> Self:
        """Build one by a checked record; the environment is not asked. See `Semaphore.from_config`."""
        return cls(Semaphore.from_config(leases.client, name, config))

    async def reconfigure(self, config: SemaphoreConfig) -> None:
        """Go by other options. See `Semaphore.reconfigure`."""
        await loops.keep(partial(self._semaphore.reconfigure, config))

    @property
    def name(self) -> str:
        """The semaphore's name."""
        return self._semaphore.name

    @property
    def limit(self) -> int:
        """How many may hold at a time. May be set."""
        return self._semaphore.limit

    @limit.setter
    def limit(self, limit: int) -> None:
        self._semaphore.limit = limit

    async def acquire(self, timeout: Duration | None = None) -> AsyncHeldLease:  # noqa: ASYNC109
        """Wait for a slot. See `Semaphore.acquire`."""
        return AsyncHeldLease(await self._acquire(timeout))

    async def _acquire(self, timeout: Duration | None) -> HeldLease:  # noqa: ASYNC109
        wait = options.wait(timeout, "timeout")
        taken = await talk.arun(self._semaphore._conversation(wait), self._semaphore.leases)
        return self._semaphore._got(taken, wait)

    async def acquire_nowait(self) -> AsyncHeldLease | NotAcquired:
        """Ask once. See `Semaphore.acquire_nowait`."""
        taken = await talk.arun(self._semaphore._conversation(None), self._semaphore.leases)
        return AsyncHeldLease(taken) if isinstance(taken, HeldLease) else taken

    async def holders(self) -> list[Lease]:
        """Return the records of those who hold a slot, by the store. See `Semaphore.holders`."""
        return await loops.ask(self._semaphore.holders)

    @asynccontextmanager
    async def hold(self, timeout: Duration | None = None) -> AsyncIterator[AsyncHeldLease]:  # noqa: ASYNC109
        """Return a block that waits for at most `timeout` seconds. See `Semaphore.hold`."""
        async with _held(await self._acquire(timeout), self._semaphore.leases) as lease:
            yield lease

    async def __aenter__(self) -> AsyncHeldLease:
        block = _held(await self._acquire(None), self._semaphore.leases)
        lease = await block.__aenter__()
        self._blocks.enter(block)
        return lease

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        return await _leave(self._blocks.leave(), kind, error, trace)

    def __repr__(self) -> str:
        return repr(self._semaphore).replace("<Semaphore", "<AsyncSemaphore", 1)


@final
class AsyncLeaseGroup:
    """Several leases that were taken together, for asyncio: true, in the order of their names. See `LeaseGroup`.

    Made by `AsyncPGLease.acquire_many`.
    """

    def __init__(self, group: LeaseGroup) -> None:
        self._group = group

    def __bool__(self) -> Literal[True]:
        return True

    def __getitem__(self, name: str) -> AsyncHeldLease:
        return AsyncHeldLease(self._group[name])

    def __iter__(self) -> Iterator[AsyncHeldLease]:
        return map(AsyncHeldLease, self._group)

    def __len__(self) -> int:
        return len(self._group)

    @property
    def held(self) -> bool:
        """Whether this process may still act under all of them."""
        return self._group.held

    @property
    def fencing_tokens(self) -> dict[str, int]:
        """The token of each, by name."""
        return self._group.fencing_tokens

    def remaining(self) -> float:
        """Return the seconds this process may still act under all of them."""
        return self._group.remaining()

    def raise_if_lost(self) -> None:
        """Raise for the first that was lost. See `LeaseGroup.raise_if_lost`."""
        self._group.raise_if_lost()

    async def release(self) -> bool:
        """End all of them. See `LeaseGroup.release`."""
        return await loops.to_the_end(self._group.release)

    def __repr__(self) -> str:
        return repr(self._group).replace("<LeaseGroup", "<AsyncLeaseGroup", 1)

    def __reduce__(self) -> NoReturn:
        raise TypeError("an AsyncLeaseGroup belongs to its process and is not pickled or copied")


class AsyncGroupContext(mistakes.NotTheBlockItself, mistakes.OnlyAsyncWith):
    """The block that several leases are held for. Made by `AsyncPGLease.acquire_many`."""

    def __init__(self, context: GroupContext) -> None:
        self._context = context
        self._entered: LeaseGroup | None = None
        self._unasked: Unasked | None = None

    async def acquire(self) -> AsyncLeaseGroup | NotAcquired:
        """Take all, or none; the group's `release` ends them. See `PGLease.acquire_many`."""
        taken = await self._acquire()
        return taken if isinstance(taken, NotAcquired) else AsyncLeaseGroup(taken)

    async def _acquire(self) -> LeaseGroup | NotAcquired:
        return self._context._got(await talk.arun(self._context._conversation(), self._context.leases))

    async def __aenter__(self) -> AsyncLeaseGroup | NotAcquired:
        if self._entered is not None:
            raise ConfigurationError("this acquire_many is in use: a second block needs its own")
        taken = await self._acquire()
        if isinstance(taken, NotAcquired):
            self._unasked = Unasked(taken)
            return taken
        self._entered = taken
        for lease in taken:
            lease._hold.in_block = True
            current.enter(lease)
        return AsyncLeaseGroup(taken)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        group, self._entered = self._entered, None
        unasked, self._unasked = self._unasked, None
        if unasked is not None and error is None:
            unasked.warn()
        taking, stuck = self._context.leases.taking, False
        trouble: Exception | None = None
        cancelled: asyncio.CancelledError | None = None
        for lease in reversed(list(group or ())):
            current.leave(lease)
            try:
                if stuck:
                    taking.leave_later(lease._hold, error)
                else:
                    await taking.aleave(lease._hold, error)
            except asyncio.CancelledError as cancel:  # it comes out when all are ended
                cancelled = cancel
            except Exception as raised:  # noqa: BLE001  # so does this
                trouble = trouble or raised
            stuck = stuck or lease._hold.unconfirmed
        if cancelled is not None:
            raise cancelled
        if trouble is not None:
            raise trouble


class AsyncLeaderElection:
    """`LeaderElection` for asyncio: the campaign stays on its thread, the work is a task. See there for the order.

    Made by `AsyncPGLease.leader_election`. Work is cancelled on loss, on `stop` and on `step_down`, and again every
    five seconds that it goes on; the lease is kept until it has ended.
    """

    def __init__(self, election: LeaderElection) -> None:
        self._election = election
        self._works: set[asyncio.Future[Any]] = set()

    @classmethod
    def from_config(cls, leases: AsyncPGLease, name: str, config: LeaderElectionConfig) -> Self:
        """Build one by a checked record; the environment is not asked. See `LeaderElection.from_config`."""
        return cls(LeaderElection.from_config(leases.client, name, config))

    async def reconfigure(self, config: LeaderElectionConfig) -> None:
        """Go by other options. See `LeaderElection.reconfigure`."""
        await loops.keep(partial(self._election.reconfigure, config))

    @property
    def name(self) -> str:
        """The election's name."""
        return self._election.name

    # -- life ----------------------------------------------------------------------------------------------------------

    def start(self) -> Self:
        """Begin to campaign. Does nothing if it runs already. Not awaited."""
        loops.running_loop()
        self._election.start()
        return self

    async def stop(self, timeout: Duration | None = None) -> bool:  # noqa: ASYNC109  # as on the other face
        """End the campaign: work is cancelled, then the lease is released. See `LeaderElection.stop`."""
        seconds = _seconds(timeout)
        until = None if seconds is None else clock.now() + seconds
        self._election._request_stop()
        if asyncio.current_task() in self._works:
            return False
        cancelled: asyncio.CancelledError | None = None
        while True:
            try:  # on the loop: the work may need every thread of ours to end
                ended = await self._until(self._election._has_ended, None if until is None else until - clock.now())
            except asyncio.CancelledError as error:
                cancelled = error
                continue
            if cancelled is not None:
                raise cancelled
            return ended

    async def __aenter__(self) -> Self:
        return self.start()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, GeneratorExit):  # closed with its loop: nobody is there to wait with
            self._election._request_stop()
            return
        await self.stop()

    # -- what is -------------------------------------------------------------------------------------------------------

    @property
    def is_leader(self) -> bool:
        """Whether this worker may act as the leader."""
        return self._election.is_leader

    def is_leader_confirmed_within(self, seconds: Duration) -> bool:
        """Tell whether this worker leads and the store has confirmed it. Not awaited.

        See `LeaderElection.is_leader_confirmed_within`.
        """
        return self._election.is_leader_confirmed_within(seconds)

    @property
    def lease(self) -> AsyncHeldLease | None:
        """A handle of the present term, or None."""
        lease = self._election.lease
        return None if lease is None else AsyncHeldLease(lease)

    async def record(self) -> Lease | None:
        """Return the record of the present or the last leader, read now. See `LeaderElection.record`."""
        return await loops.ask(lambda: self._election.record)

    def observe(self) -> AsyncWatch:
        """Watch who leads, without ever being a candidate. See `LeaderElection.observe`. Not awaited."""
        return AsyncWatch(self._election.observe())

    async def wait_for_leader(self, timeout: Duration | None = None) -> bool:  # noqa: ASYNC109
        """Wait until this worker leads; False if it does not. See `LeaderElection.wait_for_leader`."""
        await self._until(lambda: self.is_leader or self._election.over, _seconds(timeout))
        return self.is_leader

    async def wait_until_lost(self, timeout: Duration | None = None) -> bool:  # noqa: ASYNC109
        """Wait until this worker does not lead. See `LeaderElection.wait_until_lost`."""
        return bool(await self._until(lambda: not self.is_leader, _seconds(timeout)))

    def health(self) -> Health:
        """Answer a health probe. See `LeaderElection.health`. Not awaited."""
        return self._election.health()

    async def _until(self, met: Callable[[], R], seconds: float | None = None) -> R:
        """Return what `met` says as soon as that is true, or at the end of the time."""
        loop, changed = loops.running_loop(), asyncio.Event()
        listener = partial(loops.tell_loop, loop, changed.set)
        self._election._add_listener(listener)
        try:
            async with asyncio.timeout(None if seconds == float("inf") else seconds):
                while not (answer := met()):
                    await changed.wait()
                    changed.clear()
                return answer
        except TimeoutError:
            return met()
        finally:
            self._election._remove_listener(listener)

    # -- leading -------------------------------------------------------------------------------------------------------

    async def lead(self, work: Callable[[AsyncHeldLease], Coroutine[Any, Any, R]], *, repeat: bool = False) -> R | None:
        """Wait for leadership, then run `work(lease)` as a task, which is cancelled when this worker leads no more.

        Campaigns for as long as this call lasts, unless the election runs already. `repeat`, what is returned and what
        is raised: as for `LeaderElection.lead`.
        """
        begun_here = self._election.over
        self.start()
        try:
            while (term := await self._until(self._begun)) is not None and isinstance(term, Term):
                try:
                    result = await self._work(term, work)
                finally:
                    self._election._end_work(term)
                if not repeat:
                    return result if term.leads else None
                await self._until(partial(self._election._is_over, term))
            return None
        finally:
            if begun_here:
                await self.stop()

    def _begun(self) -> Term | Literal[True] | None:
        """Take part in the present term; True when there is nothing more to wait for."""
        return self._election._begin_work(wait=False) or (True if self._election.over else None)

    async def _work(self, term: Term, work: Callable[[AsyncHeldLease], Coroutine[Any, Any, R]]) -> R | None:
        try:
            return await self._run(term, lambda: work(AsyncHeldLease(term.lease)))
        except BaseException as error:
            task = asyncio.current_task()
            if not isinstance(error, asyncio.CancelledError) or task is None or not task.cancelling():
                self._election._fail(term)  # its own doing, rather than ours who wait for it
            raise

    async def _run(self, term: Term, begin: Callable[[], Awaitable[R]]) -> R | None:
        """Run what only the leader does as a task of its own, cancelled when this worker leads no more: then None."""
        current.enter(term.lease)
        try:
            task = asyncio.ensure_future(begin())
        finally:
            current.leave(term.lease)
        self._works.add(task)
        ending = _Ending(task)
        term.lease._hold.lost.tell(ending.hear)
        cancelled: asyncio.CancelledError | None = None
        try:
            while not task.done():
                try:
                    await asyncio.wait({task})
                except asyncio.CancelledError as error:
                    cancelled = error
                    task.cancel()
        finally:
            term.lease._hold.lost.untell(ending.hear)
            ending.over()
            self._works.discard(task)
        if cancelled is not None:
            if not task.cancelled():
                task.exception()  # seen; what comes out is the cancellation
            raise cancelled
        return None if task.cancelled() and ending.begun else task.result()

    def leader_only(self, function: Callable[P, Awaitable[R]]) -> Callable[P, Coroutine[Any, Any, R | None]]:
        """Decorate a coroutine function so that it runs only while this worker leads; else it answers None.

        A call of `function` runs as a task of its own, and is cancelled when this worker leads no more; then it answers
        None, too.
        """

        @functools.wraps(function)
        async def call(*args: P.args, **kwargs: P.kwargs) -> R | None:
            term = self._election._begin_work(wait=False)
            if term is None:
                return None
            try:
                return await self._run(term, lambda: function(*args, **kwargs))
            finally:
                self._election._end_work(term)

        return call

    def step_down(self, cooldown: Duration | None = None) -> bool:
        """Resign. See `LeaderElection.step_down`. Not awaited: returns at once."""
        return self._election.step_down(cooldown)

    async def request_step_down(self) -> bool:
        """Ask the present leader to step down. See `LeaderElection.request_step_down`."""
        return await loops.ask(self._election.request_step_down)

    def __repr__(self) -> str:
        return repr(self._election).replace("<LeaderElection", "<AsyncLeaderElection", 1)


def _seconds(timeout: Duration | None) -> float | None:
    return None if timeout is None else options.seconds(timeout, "timeout", zero=True, forever=True)


class _Ending:
    """Cancels the work of a leader, and again while it goes on."""

    def __init__(self, task: asyncio.Future[Any]) -> None:
        self._task = task
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self.begun = False

    def hear(self) -> None:
        """Note, on whatever thread, that it is time to end."""
        loops.tell_loop(self._loop, self._begin)

    def _begin(self) -> None:
        if not self.begun and not self._task.done():
            self.begun = True
            self._cancel()

    def _cancel(self) -> None:
        self._task.cancel("this worker leads no more")
        self._timer = self._loop.call_later(GRACE, self._cancel)

    def over(self) -> None:
        """Cancel no more."""
        if self._timer is not None:
            self._timer.cancel()
