"""Carries out the steps of `steps.py`: by calling and sleeping (`run`), or on an event loop (`arun`).

On an event loop each call is made by one of a few threads of our own (`callers.py`), so that a blocked store blocks no
loop; a waiting task parks no thread. All that this library knows of asyncio's ways is in here and in `aio.py`.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Awaitable, Callable, Generator
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from pglease import clock
from pglease.backends.base import Backend, Budget
from pglease.bell import Bell
from pglease.errors import BackendUnavailable, ConfigurationError
from pglease.steps import Answer, Call, Step, Wait

if TYPE_CHECKING:  # asyncio costs more to import than the rest of us together
    import asyncio
    from concurrent.futures import Future

    from pglease.callers import Callers

T = TypeVar("T")

MOST_CALLS = 8
"""How many questions event loops may have under way at once; it bounds tries, not waiters."""
MOST_KEEPERS = 4
"""The same for what renews and releases, which must not queue behind questions that a dead link has swallowed."""
TURN = 10.0
"""Seconds for which a look, or a renewal by hand, waits until one of these threads is free."""
PATIENCE = 2.0
"""The same for what must be done in any case."""


def run(steps: Generator[Step, Answer, T], backend: Backend, pause: Callable[[float], None]) -> T:
    """Carry out `steps` in this thread.

    Args:
        steps: a conversation.
        backend: who is asked.
        pause: sleeps for so many seconds, or less; may raise to end the conversation.
    """
    try:
        step = next(steps)
        while True:
            if isinstance(step, Wait):
                pause(step.seconds)
                answer = Answer(clock.now())
            else:
                answer = call(backend, step, Budget.of(step.seconds, clock.now))
            step = steps.send(answer)
    except StopIteration as end:
        return end.value  # type: ignore[no-any-return]
    finally:
        steps.close()


def call(backend: Backend, step: Call, budget: Budget) -> Answer:
    """Make one call within its time. Trouble that passes is part of the answer; everything else is raised."""
    try:
        value = getattr(backend, step.verb)(*step.args, budget)
    except BackendUnavailable as error:
        return Answer(clock.now(), error=error, sent_at=budget.sent_at)
    return Answer(clock.now(), value, budget.sent_at)


async def arun(
    steps: Generator[Step, Answer, T],
    backend: Backend,
    abandoned: Callable[[Future[Answer]], None],
    pause: Callable[[float], Awaitable[object]],
) -> T:
    """Carry out `steps` on the running event loop.

    Args:
        steps: a conversation.
        backend: who is asked.
        abandoned: called when the task is cancelled while it is unknown what the last call came to: it is under way,
            and goes on to its end on its thread, or its reply was lost. What it was granted has to be given back.
        pause: sleeps for so many seconds, or less; may raise to end the conversation.
    """
    doubtful: Future[Answer] | None = None
    try:
        running_loop()
        step = next(steps)
        while True:
            if isinstance(step, Wait):
                await pause(step.seconds)
                answer = Answer(clock.now())
            else:
                budget = Budget.of(step.seconds, clock.now)
                doubtful = _asking().submit(partial(call, backend, step, budget))
                answer = await _answer(doubtful, step)
                if answer.error is None or not answer.error.outcome_unknown:
                    doubtful = None
            step = steps.send(answer)
    except StopIteration as end:
        return end.value  # type: ignore[no-any-return]
    except Exception:
        raise  # what the store or the conversation says has been said; the caller acts on it
    except BaseException:  # cancelled, or closed with its loop
        if doubtful is not None:
            doubtful.cancel()  # a call that has not begun is not made
            abandoned(doubtful)
        raise
    finally:
        steps.close()


async def _answer(doubtful: Future[Answer], step: Call) -> Answer:
    """Wait for a call that may first have to wait for its turn; both together take no longer than it was given."""
    end = _End(doubtful)
    await end.wait(step.seconds)
    if doubtful.cancel():
        return Answer(clock.now(), error=BackendUnavailable(f"{MOST_CALLS} calls to the store are stuck before us"))
    await end.wait()
    return doubtful.result()


async def ask(function: Callable[[], T], *, turn: float = TURN) -> T:
    """Run what looks at the store off the loop. When this task is cancelled it goes on to its end, unheard.

    Args:
        function: ends within a time of its own.
        turn: seconds it may wait for its turn.

    Raises:
        BackendUnavailable: its turn did not come; it was not run.
    """
    return await _run_off_the_loop(function, _asking, turn)


async def keep(function: Callable[[], T]) -> T:
    """Do the same with what renews."""
    return await _run_off_the_loop(function, _keeping, TURN)


async def _run_off_the_loop(function: Callable[[], T], callers: Callable[[], Callers], turn: float) -> T:
    running_loop()
    doing = callers().submit(function)
    end = _End(doing)
    try:
        await end.wait(turn)
        late = doing.cancel()
        if not late:
            await end.wait()
    except BaseException:
        doing.cancel()
        raise
    if late:
        raise BackendUnavailable("other calls to the store are stuck before us")
    return doing.result()


async def to_the_end(
    function: Callable[[], T], *, seconds: float = PATIENCE, instead: Callable[[], T] | None = None
) -> T:
    """Run a blocking function off the loop and to its end; a cancellation of this task follows only then.

    Args:
        function: ends within a time of its own.
        seconds: how long it may wait for its turn.
        instead: is called here if its turn did not come by then; must not block. None: the function gets a thread of
            its own.

    Raises:
        BackendUnavailable: there is no such thread to be had; the function was not run.
    """
    import asyncio

    from pglease.callers import on_its_own

    running_loop()
    doing = _keeping().submit(function)
    end = _End(doing)
    until: float | None = clock.now() + seconds
    cancelled: asyncio.CancelledError | None = None
    try:
        while not doing.done():
            try:
                await end.wait(None if until is None else until - clock.now())
            except asyncio.CancelledError as error:
                cancelled = error
            if until is not None and clock.now() >= until:
                until = None  # if it runs, its own time is what counts
                if doing.cancel() and instead is None:
                    doing = on_its_own(function, "pglease-to-the-end")
                    end = _End(doing)
        answer = instead if instead is not None and doing.cancelled() else doing.result
        if cancelled is None:
            return answer()
        with contextlib.suppress(Exception):
            answer()
        raise cancelled
    finally:
        del cancelled  # or it would refer to itself through this frame


async def asleep(seconds: float, bell: Bell) -> None:
    """Sleep on the loop for `seconds`, or until the bell rings."""
    loop = running_loop()
    woken = loop.create_future()
    wake = partial(tell_loop, loop, partial(_wake, woken))
    bell.tell(wake)
    try:
        await _for(woken, seconds)
    finally:
        bell.untell(wake)


class _End:
    """Lets a task wait for the end of a call; nothing that happens to the task happens to the call."""

    def __init__(self, call: Future[Any]) -> None:
        self._loop = running_loop()
        self._call = call
        self._woken: asyncio.Future[None] | None = None
        call.add_done_callback(lambda _: tell_loop(self._loop, self._wake))

    async def wait(self, seconds: float | None = None) -> None:
        if not self._call.done():
            self._woken = self._loop.create_future()
            await _for(self._woken, seconds)

    def _wake(self) -> None:
        if self._woken is not None:
            _wake(self._woken)


async def _for(woken: asyncio.Future[None], seconds: float | None) -> None:
    """Wait for a future of ours, for at most `seconds`."""
    if seconds is None or seconds == float("inf"):
        await woken
        return
    timer = woken.get_loop().call_later(max(0.0, seconds), _wake, woken)
    try:
        await woken
    finally:
        timer.cancel()


def _wake(woken: asyncio.Future[None]) -> None:
    if not woken.done():
        woken.set_result(None)


def tell_loop(loop: asyncio.AbstractEventLoop, callback: Callable[[], None]) -> None:
    """Have `callback` called on a loop, from any thread; a loop that is closed has nobody left to tell."""
    with contextlib.suppress(RuntimeError):
        loop.call_soon_threadsafe(callback)


def running_loop() -> asyncio.AbstractEventLoop:
    """Return the running event loop.

    Raises:
        ConfigurationError: there is none, or it is none of asyncio's.
    """
    import asyncio

    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        raise ConfigurationError(
            "AsyncPGLease needs a running asyncio event loop (anyio on asyncio has one, trio has not): under trio use "
            "PGLease in trio.to_thread.run_sync"
        ) from None


_callers_lock = threading.RLock()
_callers: dict[str, Callers] = {}


def _asking() -> Callers:
    """Return the threads that ask: what begins, and what looks."""
    return _callers.get("asking") or _make("asking", MOST_CALLS)


def _keeping() -> Callers:
    """Return the threads that renew, release and close."""
    return _callers.get("keeping") or _make("keeping", MOST_KEEPERS)


def _make(what: str, most: int) -> Callers:
    from pglease.callers import Callers

    with _callers_lock:
        return _callers.setdefault(what, Callers(most, f"pglease-{what}"))


def _after_fork_in_child() -> None:
    global _callers_lock  # noqa: PLW0603  # another thread of the parent may have held it
    _callers_lock = threading.RLock()
    _callers.clear()  # a forked child makes its own


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)
