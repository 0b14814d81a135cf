"""asyncio in virtual time: an event loop whose thread is one of the kernel's, and what its tasks do with the library.

The loop is asyncio's own. Its clock is the process's, and where it would ask the system what has happened, it waits as
any other thread here does. Tasks get cancelled, wherever they are.
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from pglease import loops
from pglease.aio import AsyncHeldLease, AsyncPGLease
from pglease.callers import Callers
from pglease.errors import LeaseLostError, PgleaseError
from pglease.primitives.aio import AsyncLeaseGroup, AsyncReadWriteLock, AsyncSemaphore
from pglease.primitives.read_write import ReadWriteLock
from pglease.primitives.semaphore import Semaphore
from tests.simulation import kernel as virtual
from tests.simulation.elections import ROLE
from tests.simulation.shares import LOCK, LONGEST_TALK, SEMAPHORE

if TYPE_CHECKING:
    from tests.simulation.world import Member

LONGEST_LEAVE = 2.0
"""Seconds that leaving a block may take, cancelled or not."""


class Loop(asyncio.BaseEventLoop):
    """asyncio's loop, without files to watch."""

    def __init__(self) -> None:
        super().__init__()
        self._selector = Rest()
        self.set_exception_handler(_complain)

    def time(self) -> float:
        return virtual.clock()

    def _write_to_self(self) -> None:
        self._selector.woken.put(None)

    def _process_events(self, events: object) -> None:
        """Do nothing: there are none."""


class Rest:
    """Stands in for a selector."""

    def __init__(self) -> None:
        self.woken = virtual.SimpleQueue()

    def select(self, timeout: float | None) -> list[object]:
        with contextlib.suppress(queue.Empty):
            self.woken.get(timeout=timeout)
            while True:
                self.woken.get_nowait()
        return []


def _complain(_: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    kernel = virtual._kernel
    if not kernel.over:
        kernel.failures.append(f"the loop says: {context}")


class Asking(Callers):
    """Makes the calls of tasks; one that is marked is cancelled while its next call is under way."""

    def __init__(self, tasks: Tasks) -> None:
        super().__init__(loops.MOST_CALLS, "asking")
        self._tasks = tasks

    def submit(self, function: Callable[[], Any]) -> Future[Any]:
        call = super().submit(function)
        self._tasks.asks()
        return call


class Tasks:
    """The tasks of a process that uses the library on an event loop."""

    def __init__(self, member: Member) -> None:
        self.member, self.world = member, member.world
        self.leases = AsyncPGLease(member.client)
        self.asking = Asking(self)
        self.keeping = Callers(loops.MOST_KEEPERS, "keeping")
        self.loop: Loop | None = None
        self.tasks: list[asyncio.Task[None]] = []
        self.marked = False

    def run(self) -> None:
        """Run the loop until every task has ended."""
        self.loop = Loop()
        for number in range(1, self.world.plan.workers + 1):
            self.tasks.append(self.loop.create_task(self.work(), name=str(number)))
        self.loop.run_until_complete(self.tasks[0] if len(self.tasks) == 1 else self._all())
        self.loop.close()

    async def _all(self) -> None:
        for task in self.tasks:
            await task

    def cancel_one(self) -> None:
        """Cancel some task wherever it is, or while it asks the next time, which is when it matters."""
        running = [task for task in self.tasks if not task.done()]
        if self.world.kernel.random.random() < 0.75:
            self.marked = True
        elif self.loop is not None and running:
            loops.tell_loop(self.loop, self.world.kernel.random.choice(running).cancel)

    def asks(self) -> None:
        """Note that the running task asks the store."""
        loop, task, kernel = self.loop, asyncio.current_task(), self.world.kernel
        if self.marked and loop is not None and task is not None:
            self.marked = False
            seconds = kernel.random.random() * 2 * self.world.server.weather.delay
            kernel.after(seconds, lambda: loops.tell_loop(loop, task.cancel))

    def end(self) -> None:
        """Close what is left when the simulation is over."""
        for task in self.tasks:
            with contextlib.suppress(BaseException):
                task.get_coro().close()  # type: ignore[union-attr]
        self.tasks.clear()

    # -- what a task does ----------------------------------------------------------------------------------------------

    async def work(self) -> None:
        """Take leases and leave them until the time is over; the last one closes the client."""
        world, random, member = self.world, self.world.kernel.random, self.member
        while world.kernel.now < world.until:
            name, ttl = random.choice(world.plan.names), random.choice(world.plan.ttls)
            began = world.kernel.now
            try:
                await self.choose(random)(name, ttl)
                await asyncio.sleep(random.expovariate(2.0 / ttl))
            except LeaseLostError:
                world.judge.counts["blocks that ended in a loss"] += 1
            except PgleaseError as error:
                world.judge.counts[f"refused: {type(error).__name__}"] += 1
                member.came_to_nothing(name)
            except asyncio.CancelledError:
                world.judge.counts["tasks cancelled"] += 1
                self._let_go(began)
        member.busy -= 1
        if not member.busy:
            began = world.kernel.now
            with contextlib.suppress(asyncio.CancelledError):
                await loops.to_the_end(member.client.close)
            member.in_time("close", began, 6.0)

    def _let_go(self, since: float) -> None:
        """Have the judge see that a cancelled task leaves nothing behind, unless another may be asking for the same.

        Where requests are doubled, the copy of one that was refused may be granted later: that lapses.
        """
        plan = self.world.plan
        if plan.workers > 1 or plan.rushes or self.world.server.weather.doubled:
            return
        for name, (lease_id, asked_at) in self.member.link.asked.items():
            if asked_at >= since and not name.startswith(ROLE):
                self.world.judge.given_back(self.member, self.member.link, name, lease_id)

    def choose(self, random: Any) -> Callable[[str, float], Awaitable[None]]:
        """Return what to do next."""
        if self.world.plan.shares and random.random() < 0.8:
            way: Callable[[str, float], Awaitable[None]] = getattr(self, random.choice(self.world.plan.shares))
            return way
        return random.choices([self.block, self.wait, self.owned, self.patient], [4, 4, 2, 2])[0]  # type: ignore[no-any-return]

    async def block(self, name: str, ttl: float) -> None:
        """Ask once, in a block."""
        await self._in_block(self.leases.acquire(name, ttl, on_lost=self._on_lost()))

    async def wait(self, name: str, ttl: float) -> None:
        """Wait, in a block."""
        random = self.world.kernel.random
        fair = self.world.plan.wakes and random.random() < 0.5
        wait = random.random() * 2 * ttl
        await self._in_block(self.leases.acquire(name, ttl, wait=wait, fair=fair, on_lost=self._on_lost()))

    async def _in_block(self, context: Any) -> None:
        """Work in a block; leaving it ends in its time, whatever happened in it."""
        lease, error, kernel = await context.__aenter__(), None, self.world.kernel
        try:
            if lease:
                await self.use(lease)
        except BaseException as raised:
            error = raised
            raise
        finally:
            began = kernel.now
            try:
                await context.__aexit__(type(error) if error else None, error, None)
            finally:
                self.member.in_time("leaving a block", began, LONGEST_LEAVE)

    async def owned(self, name: str, ttl: float) -> None:
        """Ask once; the client owns it."""
        if await self.leases.try_acquire(name, ttl):
            await self._rest_and_release(name, ttl)

    async def patient(self, name: str, ttl: float) -> None:
        """Wait; the client owns it."""
        seconds = self.world.kernel.random.random() * 2 * ttl
        await self.leases.wait_for_lease(name, ttl, timeout=seconds, poll_interval=1.0)
        await self._rest_and_release(name, ttl)

    async def _rest_and_release(self, name: str, ttl: float) -> None:
        try:
            await asyncio.sleep(self.world.kernel.random.random() * 2 * ttl)
        finally:
            await self.leases.release(name)

    async def use(self, lease: AsyncHeldLease) -> None:
        """Work under a lease, looking at it now and then."""
        random = self.world.kernel.random
        ttl = lease._lease._hold.ttl
        for _ in range(random.choice([1, 2, 4])):
            await asyncio.sleep(random.random() * ttl)
            self.world.judge.look()
            if not lease.held:
                return
            chance = random.random()
            if chance < 0.1:
                await lease.renew()
            elif chance < 0.2:
                await lease.ensure(ttl * random.random())
            elif chance < 0.3:
                await lease.release()
            elif chance < 0.35:
                await lease.set_metadata({"at": self.world.kernel.now})

    def _on_lost(self) -> Any:
        return "cancel" if self.world.kernel.random.random() < 0.5 else "raise"

    # -- what is made of several ---------------------------------------------------------------------------------------

    async def group(self, name: str, ttl: float) -> None:
        """Take some names or none."""
        random, shares = self.world.kernel.random, self.world.shares
        names = random.sample(self.world.plan.names, random.choice([1, 2, len(self.world.plan.names)]))
        wait, began, group = self._wait(ttl), self.world.kernel.now, None
        try:
            group = await self.leases.acquire_many(names, ttl, wait=wait).acquire()
        finally:
            if not isinstance(group, AsyncLeaseGroup):
                shares.got_none(self.member, names, began)
        if isinstance(group, AsyncLeaseGroup):
            shares.got_group(group._group, names)
            await self._use_and_release(next(iter(group)), group)

    async def slot(self, name: str, ttl: float) -> None:
        """Take a slot of the semaphore."""
        shares, wait = self.world.shares, self._wait(ttl)
        semaphore = AsyncSemaphore(Semaphore(self.member.client, SEMAPHORE, self.world.limit, ttl))
        with shares.asking(self.world.limit) as ask:
            lease = await semaphore.acquire(wait or 0)
            shares.got_slot(lease._lease, ask)
        await self._use_and_release(lease, lease)

    async def read(self, name: str, ttl: float) -> None:
        """Read under the lock."""
        lease = await AsyncReadWriteLock(ReadWriteLock(self.member.client, LOCK, ttl)).acquire_read(
            self._wait(ttl) or 0
        )
        self.world.shares.got_reading(lease._lease)
        await self._use_and_release(lease, lease)

    async def write(self, name: str, ttl: float) -> None:
        """Write under the lock."""
        lock = AsyncReadWriteLock(ReadWriteLock(self.member.client, LOCK, ttl))
        wait, began = self._wait(ttl), self.world.kernel.now
        try:
            lease = await lock.acquire_write(wait or 0)
        finally:
            self.member.in_time("acquire_write", began, (wait or 0.0) + LONGEST_TALK)
        self.world.shares.got_writing(lease._lease)
        await self._use_and_release(lease, lease)

    def _wait(self, ttl: float) -> float | None:
        random = self.world.kernel.random
        return None if random.random() < 0.3 else random.random() * 2 * ttl

    async def _use_and_release(self, lease: AsyncHeldLease, all_of_it: AsyncHeldLease | AsyncLeaseGroup) -> None:
        try:
            await self.use(lease)
        finally:
            await all_of_it.release()
