"""`AsyncPGLease` behind the calls of `PGLease`, so that a promise is told once and kept on both faces.

What a thread asks for is awaited, in turn, in a task of that thread's own; all tasks are on one event loop.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any, Self

from pglease import AsyncHeldLease, AsyncPGLease, HeldLease
from pglease.watching import AsyncWatch

PATIENCE = 60.0


class Loop:
    """An event loop on a thread, with a task for each thread that asks."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._here = threading.local()
        self._tasks: list[asyncio.Task[None]] = []
        self._thread = threading.Thread(target=self._loop.run_forever, name="the loop of a test", daemon=True)
        self._thread.start()

    def run(self, awaited: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
        """Await something in this thread's task."""
        if not hasattr(self._here, "orders"):
            self._here.orders = asyncio.run_coroutine_threadsafe(self._begin(), self._loop).result(PATIENCE)
        answer: Future[Any] = Future()
        self._loop.call_soon_threadsafe(self._here.orders.put_nowait, (awaited, answer))
        return answer.result(PATIENCE)

    async def _begin(self) -> asyncio.Queue[Any]:
        orders: asyncio.Queue[Any] = asyncio.Queue()
        self._tasks.append(asyncio.create_task(_obey(orders)))
        return orders

    def close(self) -> None:
        asyncio.run_coroutine_threadsafe(self._cancel(), self._loop).result(PATIENCE)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(PATIENCE)
        self._loop.close()

    async def _cancel(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


async def _obey(orders: asyncio.Queue[Any]) -> None:
    while True:
        awaited, answer = await orders.get()
        try:
            answer.set_result(await awaited())
        except BaseException as error:
            answer.set_exception(error)
        del awaited, answer  # a handle that nobody else remembers is forgotten here too


class Client:
    """An `AsyncPGLease` whose verbs are called."""

    def __init__(self, loop: Loop, leases: AsyncPGLease) -> None:
        self._loop = loop
        self._leases = leases

    def acquire(self, *args: Any, **kwargs: Any) -> Block:
        return Block(self._loop, self._leases.acquire(*args, **kwargs))

    def held(self, name: str) -> Any:
        return Handle.of(self._loop, self._leases.held(name))

    def holding(self) -> list[Any]:
        return [Handle.of(self._loop, lease) for lease in self._leases.holding()]

    def watch(self, *args: Any, **kwargs: Any) -> Watch:
        return Watch(self._loop, self._leases.watch(*args, **kwargs))

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._leases, name, None) or getattr(self._leases.client, name)
        return _called(self._loop, found) if asyncio.iscoroutinefunction(found) else found

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *how: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return repr(self._leases)

    def __reduce__(self) -> Any:
        return self._leases.__reduce__()


class Block:
    """An `AsyncLeaseContext` for `with`."""

    def __init__(self, loop: Loop, context: Any) -> None:
        self._loop = loop
        self._context = context

    def __enter__(self) -> Any:
        return Handle.of(self._loop, self._loop.run(self._context.__aenter__))

    def __exit__(self, *how: object) -> None:
        self._loop.run(lambda: self._context.__aexit__(*how))


class Handle:
    """An `AsyncHeldLease` whose verbs are called."""

    __slots__ = ("_lease", "_loop")

    def __init__(self, loop: Loop, lease: AsyncHeldLease) -> None:
        object.__setattr__(self, "_loop", loop)
        object.__setattr__(self, "_lease", lease)

    @classmethod
    def of(cls, loop: Loop, taken: Any) -> Any:
        return cls(loop, taken) if isinstance(taken, AsyncHeldLease) else taken

    @property
    def __class__(self) -> type:  # for `isinstance`: the scenarios mean "a handle"
        return HeldLease

    @property
    def lost(self) -> Any:
        return Lost(self._loop, self._lease.lost)

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._lease, name)
        return _called(self._loop, found) if asyncio.iscoroutinefunction(found) else found

    def __setattr__(self, name: str, value: object) -> None:
        setattr(self._lease, name, value)

    def __bool__(self) -> bool:
        return bool(self._lease)

    def __eq__(self, other: object) -> bool:
        return type(other) is Handle and self._lease == other._lease

    def __hash__(self) -> int:
        return hash(self._lease)

    def __repr__(self) -> str:
        return repr(self._lease)

    def __reduce__(self) -> Any:
        return self._lease.__reduce__()


class Watch:
    """An `AsyncWatch` whose `next` is called; of what else there is, the `Watch` behind it tells."""

    def __init__(self, loop: Loop, watch: AsyncWatch) -> None:
        self._loop = loop
        self._asynchronous = watch
        self.close = watch.close

    def next(self, seconds: float) -> Any:
        return self._loop.run(lambda: self._asynchronous.next(seconds))

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Any:
        try:
            return self._loop.run(self._asynchronous.__anext__)
        except StopAsyncIteration:
            raise StopIteration from None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *how: object) -> None:
        self._loop.run(lambda: self._asynchronous.__aexit__(*how))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._asynchronous._watch, name)


class Lost:
    """A `LostEvent` whose `wait` is called."""

    def __init__(self, loop: Loop, lost: Any) -> None:
        self.is_set = lost.is_set
        self.wait = _called(loop, lost.wait)


def _called(loop: Loop, verb: Callable[..., Coroutine[Any, Any, Any]]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        return Handle.of(loop, loop.run(lambda: verb(*args, **kwargs)))

    return call
