"""Carries out the steps of `steps.py` on an event loop, and all else that is awaited.

A question is sent at once where the store can do that without waiting, and the loop watches for the answer. Every other
call, and what takes more than one answer, is made by one of a few threads of our own (`callers.py`), so that a blocked
store blocks no loop; a waiting task parks no thread. All that this library knows of asyncio's ways is in here and in
`aio.py`; whoever uses threads alone never loads it, since asyncio costs more to import than the rest of us together.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
import weakref
from collections.abc import Awaitable, Callable, Generator
from concurrent.futures import Future
from functools import partial
from typing import Any, TypeVar

from pglease import clock
from pglease.backends.base import Backend, Begun, Budget
from pglease.bell import Bell
from pglease.callers import Callers, on_its_own
from pglease.drive import answer_of, call
from pglease.errors import BackendUnavailable, ConfigurationError
from pglease.steps import Answer, Call, Step, Wait

T = TypeVar("T")

MOST_CALLS = 8
"""How many questions of event loops threads may be asking at once; it bounds tries, not waiters."""
MOST_KEEPERS = 4
"""The same for what renews and releases, which must not queue behind questions that a dead link has swallowed."""
MOST_AT_ONCE = 16
"""Answers in a row that a loop need not wait for, after which its other tasks get their turn all the same."""
TURN = 10.0
"""Seconds for which a look, or a renewal by hand, waits until one of these threads is free."""
PATIENCE = 2.0
"""The same for what must be done in any case."""


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
            and goes on to its end on a thread, or its reply was lost. What it was granted has to be given back.
        pause: sleeps for so many seconds, or less; may raise to end the conversation.
    """
    doubtful: _Asked | None = None
    try:
        running_loop()
        step = next(steps)
        while True:
            if isinstance(step, Wait):
                await pause(step.seconds)
                answer = Answer(clock.now())
            else:
                doubtful = _Asked(backend, step)
                answer = await doubtful.answer()
                if answer.error is None or not answer.error.outcome_unknown:
                    doubtful = None
            step = steps.send(answer)
    except StopIteration as end:
        return end.value  # type: ignore[no-any-return]
    except Exception:
        raise  # what the store or the conversation says has been said; the caller acts on it
    except BaseException:  # cancelled, or closed with its loop
        if doubtful is not None and doubtful.is_ours():
            abandoned(doubtful.left_alone())
        raise
    finally:
        steps.close()


class _Asked:
    """One call that a task waits for: sent from the loop, or made by a thread."""

    def __init__(self, backend: Backend, step: Call) -> None:
        self._backend, self._step = backend, step
        self._budget = Budget.of(step.seconds, clock.now)
        self._begun: Begun[Any] | None = None
        self._made: Future[Answer] | None = None
        self._process = os.getpid()

    def is_ours(self) -> bool:
        """Tell whether this process has asked: a forked child has its parent's tasks, and ends them when it exits."""
        return os.getpid() == self._process

    async def answer(self) -> Answer:
        """Ask, and wait for the answer; a call that has to wait for its turn first takes no longer for that."""
        self._begun = begun = self._begin()
        if begun is not None:
            await _arrived(begun)
            if begun.done:
                return self._finish(begun)
        make = self._call if begun is None else partial(self._finish, begun)
        self._made = made = _asking().submit(make)
        end = _End(made)
        await end.wait(max(0.0, self._budget.left()))
        if made.cancel():
            stuck = f"{MOST_CALLS} calls to the store are stuck before us"
            return Answer(clock.now(), error=BackendUnavailable(stuck, outcome_unknown=begun is not None))
        await end.wait()
        return made.result()

    def left_alone(self) -> Future[Answer]:
        """Return what it comes to when nobody waits for it any more; a call that has not begun is not made."""
        if self._begun is None:
            if self._made is not None:
                self._made.cancel()
                return self._made
        elif self._made is None:
            return _finished(partial(self._finish, self._begun), self._begun)
        return self._made or _unknown()

    def _begin(self) -> Begun[Any] | None:
        """Send the question, where that takes no waiting; not before those whose calls wait for a thread."""
        if not self._backend.traits.in_two_halves or _asking().busy:
            return None
        begin = getattr(self._backend, f"begin_{self._step.verb}", None)
        return None if begin is None else begin(*self._step.args, self._budget)

    def _call(self) -> Answer:
        return call(self._backend, self._step, self._budget)

    def _finish(self, begun: Begun[Any]) -> Answer:
        return answer_of(begun.finish, self._budget)


def _finished(finish: Callable[[], T], begun: Begun[Any]) -> Future[T]:
    """Have a verb that was begun finished on a thread; where there is none, its answer is given up."""
    try:
        return _keeping().submit(finish)
    except BackendUnavailable:
        begun.drop()
        return _unknown()


def _unknown() -> Future[Any]:
    """Return what a call came to of which nobody will hear."""
    made: Future[Any] = Future()
    made.set_exception(BackendUnavailable("nobody waited for the answer", outcome_unknown=True))
    return made


async def _arrived(begun: Begun[Any]) -> None:
    """Wait on this loop for what was begun, if it can be watched. Cancelled, it leaves it as it is."""
    if begun.arrived():
        _turn.at_once += 1
        if _turn.at_once == MOST_AT_ONCE:
            _turn.at_once = 0
            await asyncio.sleep(0)
        return
    _turn.at_once = 0
    loop, watch = asyncio.get_running_loop(), begun.watch
    if not isinstance(watch, _Watch) or not watch.is_of(loop):
        try:
            begun.watch = watch = _Watch(loop, begun.fileno())
        except (OSError, NotImplementedError):  # no descriptor is left, or this kind of loop watches none
            return
    await watch.hear(begun)


class _Turn(threading.local):
    """How many answers in a row this thread's loop had at once."""

    at_once = 0


_turn = _Turn()


class _Watch:
    """A loop's watch over one connection, from answer to answer: to begin one for each costs a tenth of a round trip.

    Threads use the connection too, and close it, at any moment. So the descriptor is a copy that is closed here alone:
    the loop never watches a number that has become somebody else's. What comes while nobody waits ends the watch.
    """

    __slots__ = ("_begun", "_descriptor", "_heard", "_loop")

    def __init__(self, loop: asyncio.AbstractEventLoop, descriptor: int) -> None:
        self._loop = weakref.ref(loop)
        self._begun: Begun[Any] | None = None
        self._heard = loop.create_future()
        self._descriptor = os.dup(descriptor)
        try:
            loop.add_reader(self._descriptor, self._look)
        except BaseException:
            os.close(self._descriptor)
            self._descriptor = -1
            raise

    def is_of(self, loop: asyncio.AbstractEventLoop) -> bool:
        """Tell whether it is that loop's, and goes on."""
        return self._descriptor >= 0 and self._loop() is loop

    async def hear(self, begun: Begun[Any]) -> None:
        """Wait until the answer has arrived."""
        self._begun, self._heard = begun, asyncio.get_running_loop().create_future()
        try:
            await self._heard
        finally:
            if self._begun is begun:  # another task may wait for the next answer already
                self._begun = None

    def _look(self) -> None:
        begun, heard = self._begun, self._heard
        if begun is None:
            self._end()
            return
        try:
            if not begun.arrived():
                return
        except Exception as error:  # noqa: BLE001  # whoever waits hears of it, whatever it is
            if not heard.done():
                heard.set_exception(error)
        self._begun = None
        _wake(heard)

    def _end(self) -> None:
        loop, descriptor, self._descriptor = self._loop(), self._descriptor, -1
        if loop is not None:
            loop.remove_reader(descriptor)
        os.close(descriptor)

    def __del__(self) -> None:
        if getattr(self, "_descriptor", -1) >= 0:  # its loop is gone
            os.close(self._descriptor)


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
    function: Callable[[], T],
    *,
    seconds: float = PATIENCE,
    instead: Callable[[], T] | None = None,
    begun: Begun[Any] | None = None,
) -> T:
    """Run a blocking function off the loop and to its end; a cancellation of this task follows only then.

    Args:
        function: ends within a time of its own.
        seconds: how long it may wait for its turn.
        instead: is called here if its turn did not come by then; must not block. None: the function gets a thread of
            its own.
        begun: what the function finishes. It is waited for here; if that says it all, the function is called here.

    Raises:
        BackendUnavailable: there is no such thread to be had; the function was not run.
    """
    running_loop()
    cancelled: asyncio.CancelledError | None = None
    try:
        if begun is not None:
            cancelled = await _heard_to_the_end(begun, function)
        answer = function
        if begun is None or not begun.done:
            doing = _keeping().submit(function)
            end = _End(doing)
            until: float | None = clock.now() + seconds
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


async def _heard_to_the_end(begun: Begun[Any], function: Callable[[], object]) -> asyncio.CancelledError | None:
    """Wait for what was begun, in spite of cancellations; return the last one."""
    process, cancelled = os.getpid(), None
    try:
        while True:
            try:
                await _arrived(begun)
            except asyncio.CancelledError as error:
                cancelled = error
            else:
                return cancelled
    except BaseException:  # closed with its loop, or in a forked child, which leaves what is its parent's
        if os.getpid() == process:
            _finished(function, begun)
        raise
    finally:
        del cancelled


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
    with _callers_lock:
        return _callers.setdefault(what, Callers(most, f"pglease-{what}"))


def _after_fork_in_child() -> None:
    global _callers_lock  # noqa: PLW0603  # another thread of the parent may have held it
    _callers_lock = threading.RLock()
    _callers.clear()  # a forked child makes its own


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)
