"""Virtual time, and threads that take turns: what runs next is the seed's choice alone.

A thread of a simulated process is a greenlet. It runs until it waits for something; then the kernel goes on to the next
moment at which anything happens. Locks, conditions and queues are stand-ins with the same meaning. A seed may ask for
*stalls*: then a thread about to take a lock, or to put something into a queue, is now and then put aside for a while,
as the system's scheduler would do.

Nothing here knows pglease.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import queue
import random
import sys
import traceback
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any

import greenlet

FOREVER = float("inf")


class Process:
    """One operating-system process: its clock, and whether it runs.

    Args:
        name: for people.
        offset: what its boot clock shows when the simulation begins, in seconds.
        rate: seconds its boot clock counts in one real second.
    """

    def __init__(self, name: str, offset: float = 0.0, rate: float = 1.0) -> None:
        self.name, self.offset, self.rate = name, offset, rate
        self.paused_until = 0.0
        self.paused: list[tuple[float, float]] = []
        self.dead = False
        self.stolen = 0.0

    def clock(self, now: float) -> float:
        """Return what its boot clock shows at a real moment."""
        return self.offset + self.rate * now

    def moment(self, shown: float) -> float:
        """Return the real moment at which its boot clock shows that."""
        return (shown - self.offset) / self.rate

    def stopped(self, since: float, until: float) -> float:
        """Return for how many real seconds it was stopped in a stretch of time."""
        return sum(max(0.0, min(until, b) - max(since, a)) for a, b in self.paused)


class Kernel:
    """The one queue of moments, and whoever is running.

    Args:
        seed: chooses everything.
        stalls: how likely a thread is put aside where it could be.
    """

    def __init__(self, seed: int, stalls: float = 0.0) -> None:
        self.now = 0.0
        self.random = random.Random(seed)
        self.stalls = stalls
        self.longest_stall = 0.02
        self.running: Thread | None = None
        self.acting: Process | None = None
        self.over = False
        self.threads: list[Thread] = []
        self.failures: list[str] = []
        self.numbers = itertools.count(1)
        self._main = greenlet.getcurrent()
        self._moments: list[tuple[float, float, int, Any, Any]] = []
        self._count = itertools.count()

    # -- what happens when ---------------------------------------------------------------------------------------------

    def at(self, when: float, what: Callable[[], object]) -> None:
        """Have something happen at a real moment."""
        heapq.heappush(self._moments, (max(when, self.now), self.random.random(), next(self._count), None, what))

    def after(self, seconds: float, what: Callable[[], object]) -> None:
        """Have something happen in so many real seconds."""
        self.at(self.now + seconds, what)

    def run(self, until: float, done: Callable[[], bool] = lambda: False) -> bool:
        """Let time pass up to a real moment, or until all is done; tell whether it is."""
        moments = self._moments
        while moments and moments[0][0] <= until:
            self.now, _, _, thread, what = heapq.heappop(moments)
            if thread is None:
                what()
            elif thread.turn == what[0] and not thread.process.dead:
                if thread.process.paused_until > self.now:
                    self._push(thread.process.paused_until, thread, what)
                    continue
                thread.turn += 1
                self.running = thread
                thread.greenlet.switch(what[1])
                self.running = None
            if done():
                return True
        self.now = max(self.now, until) if until < FOREVER else self.now
        return done()

    def _push(self, when: float, thread: Thread, what: tuple[int, bool]) -> None:
        heapq.heappush(self._moments, (when, self.random.random(), next(self._count), thread, what))

    def end(self) -> None:
        """End every thread that is left; from now on nothing blocks and nothing starts."""
        self.over = True
        for thread in self.threads:
            if thread.greenlet and not thread.greenlet.dead:
                self.acting = thread.process
                thread.greenlet.throw(greenlet.GreenletExit)
        self.acting = None
        self.threads.clear()
        self._moments.clear()

    # -- what threads do -----------------------------------------------------------------------------------------------

    def clock(self) -> float:
        """Return what the boot clock of whoever runs shows."""
        process = self.running.process if self.running is not None else self.acting
        assert process is not None, "nobody runs who has a clock"
        return process.offset + process.rate * self.now

    def block(self, seconds: float | None = None) -> bool:
        """Let the running thread wait, for at most so many seconds of its clock; True if it was woken."""
        if self.over:
            raise greenlet.GreenletExit
        me = self.running
        assert me is not None, "only a thread can wait"
        if seconds is not None and seconds < FOREVER:
            # Never nothing: a wait that ends a rounding error too early is repeated, and must get somewhere.
            self._push(self.now + max(1e-6, seconds) / me.process.rate, me, (me.turn, False))
        loop = asyncio._get_running_loop()
        if loop is not None:
            return self._leave_a_loop(loop)
        woken: bool = self._main.switch()
        return woken

    def _leave_a_loop(self, loop: asyncio.AbstractEventLoop) -> bool:
        """Let others run, to whose threads no loop belongs: for asyncio all of us are one thread."""
        hooks = sys.get_asyncgen_hooks()
        asyncio._set_running_loop(None)
        sys.set_asyncgen_hooks(None, None)
        try:
            woken: bool = self._main.switch()
        finally:
            asyncio._set_running_loop(loop)
            sys.set_asyncgen_hooks(*hooks)
        return woken

    def wake(self, thread: Thread) -> None:
        """End a thread's wait."""
        thread.turn += 1  # what it waited for is over, and so is its time-out
        self._push(self.now, thread, (thread.turn, True))

    def rest(self, seconds: float) -> None:
        """Let the running thread sleep."""
        self.block(seconds)

    def maybe_stall(self) -> None:
        """Put the running thread aside, if the seed says so."""
        if self.stalls and self.running is not None and not self.over and self.random.random() < self.stalls:
            seconds = self.random.random() * self.longest_stall
            self.running.process.stolen += seconds
            self.block(seconds)


_kernel = Kernel(0)


def use(kernel: Kernel) -> None:
    """Let the stand-ins below belong to this kernel."""
    global _kernel  # noqa: PLW0603  # `threading.Thread(...)` in the code under test says nothing about kernels
    _kernel = kernel


class Thread:
    """Stands in for `threading.Thread`; belongs to the process of whoever makes it, or to `process`."""

    def __init__(
        self,
        target: Callable[..., object],
        args: tuple[Any, ...] = (),
        name: str = "",
        daemon: bool = True,
        *,
        process: Process | None = None,
    ) -> None:
        self.kernel = _kernel
        owner = process or (self.kernel.running.process if self.kernel.running else self.kernel.acting)
        assert owner is not None or self.kernel.over
        self.process: Process = owner  # type: ignore[assignment]
        self.name, self.daemon = name, daemon
        self.number = next(self.kernel.numbers)
        self.turn = 0
        self._ended = False
        self._target, self._args = target, args
        self._joining: list[Thread] = []
        self.greenlet: Any = None

    def start(self) -> None:
        if self.kernel.over:
            return
        self.greenlet = greenlet.greenlet(self._run, parent=self.kernel._main)
        self.kernel.threads.append(self)
        self.kernel._push(self.kernel.now, self, (self.turn, True))

    def _run(self, _: bool) -> None:
        try:
            self._target(*self._args)
        except greenlet.GreenletExit:
            return
        except BaseException:
            self.kernel.failures.append(f"the thread {self.name!r} died\n{traceback.format_exc()}")
        finally:
            self._ended = True
            del self._target, self._args
            for thread in self._joining:
                self.kernel.wake(thread)

    def join(self, timeout: float | None = None) -> None:
        if not self._ended and self.kernel.running is not None:
            self._joining.append(self.kernel.running)
            if not self.kernel.block(timeout):
                self._joining.remove(self.kernel.running)

    def is_alive(self) -> bool:
        return self.greenlet is not None and not self._ended


class RLock:
    """Stands in for `threading.RLock`."""

    __slots__ = ("_count", "_owner", "_waiting")

    def __init__(self) -> None:
        self._owner: Thread | None = None
        self._count = 0
        self._waiting: deque[Thread] = deque()

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        kernel = _kernel
        me = kernel.running
        if self._count and self._owner is me:
            self._count += 1
            return True
        if kernel.stalls:
            kernel.maybe_stall()
        if self._count and not kernel.over and not self._wait(me, blocking, timeout):
            return False
        self._owner = me
        self._count = 1
        return True

    def _wait(self, me: Thread | None, blocking: bool, timeout: float) -> bool:
        until = FOREVER if timeout < 0 else _kernel.clock() + timeout
        assert me is not None
        while self._count:
            left = until - _kernel.clock() if until < FOREVER else FOREVER
            if not blocking or left <= 0:
                return False
            self._waiting.append(me)
            if not _kernel.block(left):
                self._waiting.remove(me)
        return True

    def release(self) -> None:
        self._count -= 1
        if not self._count:
            self._owner = None
            if self._waiting:
                _kernel.wake(self._waiting.popleft())

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()

    def give_up(self) -> int:
        """Release it altogether, for a condition; return how often it was taken."""
        count, self._count = self._count, 1
        self.release()
        return count

    def take_back(self, count: int) -> None:
        """Take it as often as it was taken before."""
        self.acquire()
        self._count = count


class Condition:
    """Stands in for `threading.Condition`."""

    def __init__(self, lock: RLock | None = None) -> None:
        self._lock = lock or RLock()
        self._waiting: list[Thread] = []

    def __enter__(self) -> bool:
        return self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    def wait(self, timeout: float | None = None) -> bool:
        kernel = _kernel
        me = kernel.running
        assert me is not None
        count = self._lock.give_up()
        self._waiting.append(me)
        woken = False
        try:
            woken = kernel.block(timeout)
        finally:
            if not woken and me in self._waiting:
                self._waiting.remove(me)
            self._lock.take_back(count)
        return woken

    def wait_for(self, predicate: Callable[[], bool], timeout: float | None = None) -> bool:
        until = FOREVER if timeout is None else _kernel.clock() + timeout
        while not (found := predicate()):
            left = until - _kernel.clock() if until < FOREVER else FOREVER
            if left <= 0:
                break
            self.wait(left)
        return found

    def notify(self, n: int = 1) -> None:
        for thread in self._waiting[:n]:
            _kernel.wake(thread)
        del self._waiting[:n]

    def notify_all(self) -> None:
        self.notify(len(self._waiting))


class Event:
    """Stands in for `threading.Event`."""

    def __init__(self) -> None:
        self._changed = Condition()
        self._set = False

    def is_set(self) -> bool:
        return self._set

    def set(self) -> None:
        with self._changed:
            self._set = True
            self._changed.notify_all()

    def wait(self, timeout: float | None = None) -> bool:
        with self._changed:
            return self._changed.wait_for(self.is_set, timeout)


class SimpleQueue:
    """Stands in for `queue.SimpleQueue`."""

    def __init__(self) -> None:
        self._things: deque[Any] = deque()
        self._waiting: deque[Thread] = deque()

    def put(self, thing: Any) -> None:
        if _kernel.stalls:
            _kernel.maybe_stall()
        self._things.append(thing)
        if self._waiting:
            _kernel.wake(self._waiting.popleft())

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        until = FOREVER if timeout is None or not block else _kernel.clock() + timeout
        while not self._things:
            left = until - _kernel.clock() if until < FOREVER else FOREVER
            if not block or left <= 0:
                raise queue.Empty
            me = _kernel.running
            assert me is not None
            self._waiting.append(me)
            if not _kernel.block(left):
                self._waiting.remove(me)
        return self._things.popleft()

    def get_nowait(self) -> Any:
        return self.get(block=False)

    def qsize(self) -> int:
        return len(self._things)


class Threading:
    """Stands in for the module `threading`, as far as the code under test uses it."""

    Thread, RLock, Lock, Condition, Event = Thread, RLock, RLock, Condition, Event
    TIMEOUT_MAX = FOREVER

    @staticmethod
    def current_thread() -> Thread | None:
        return _kernel.running

    @staticmethod
    def get_ident() -> int:
        return number()


class Queue:
    """Stands in for the module `queue`."""

    SimpleQueue, Empty = SimpleQueue, queue.Empty


class Time:
    """Stands in for the module `time`."""

    @staticmethod
    def sleep(seconds: float) -> None:
        _kernel.rest(seconds)


class WeakSet(weakref.WeakKeyDictionary[Any, None]):
    """Stands in for `weakref.WeakSet`, in the order of arrival: no address decides who is told first."""

    def add(self, thing: Any) -> None:
        self[thing] = None

    def discard(self, thing: Any) -> None:
        self.pop(thing, None)


class Weakref:
    """Stands in for the module `weakref` where sets are all of it that keeps an order."""

    WeakSet, finalize = WeakSet, weakref.finalize


class Random:
    """Stands in for the module `random`."""

    def __getattr__(self, name: str) -> Any:
        return getattr(_kernel.random, name)


def number() -> int:
    """Return the number of the running thread, 0 outside of all."""
    return _kernel.running.number if _kernel.running is not None else 0


def caller() -> tuple[int, int]:
    """Stand in for `pglease.identity.current_caller`: the running thread, and the task whose turn it is on a loop."""
    task = asyncio.current_task() if asyncio._get_running_loop() is not None else None
    return number(), int(task.get_name()) if task is not None else 0


def clock() -> float:
    """Stand in for `pglease.clock.now`."""
    return _kernel.clock()
