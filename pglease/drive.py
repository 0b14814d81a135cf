"""Carries out the steps of `steps.py`: by calling and sleeping (`run`), or on an event loop (`arun`).

`arun` makes each call on a private executor, so that a blocked store blocks no loop; a waiting task parks no thread.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Generator
from typing import TYPE_CHECKING, TypeVar

from pglease import clock
from pglease.backends.base import Backend, Budget
from pglease.errors import BackendUnavailable
from pglease.steps import Answer, Call, Step, Wait

if TYPE_CHECKING:  # asyncio costs more to import than the rest of us together
    from concurrent.futures import Future, ThreadPoolExecutor

T = TypeVar("T")

MOST_CALLS = 8
"""How many calls event loops may have under way at once; it bounds tries, not waiters."""


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
                answer = call(backend, step)
            step = steps.send(answer)
    except StopIteration as end:
        return end.value  # type: ignore[no-any-return]
    finally:
        steps.close()


def call(backend: Backend, step: Call) -> Answer:
    """Make one call within its time. Trouble that passes is part of the answer; everything else is raised."""
    budget = Budget.of(step.seconds, clock.now)
    try:
        value = getattr(backend, step.verb)(*step.args, budget)
    except BackendUnavailable as error:
        return Answer(clock.now(), error=error, sent_at=budget.sent_at)
    return Answer(clock.now(), value, budget.sent_at)


async def arun(steps: Generator[Step, Answer, T], backend: Backend, abandoned: Callable[[Future[Answer]], None]) -> T:
    """Carry out `steps` on the running event loop.

    Args:
        steps: a conversation.
        backend: who is asked.
        abandoned: called when the task is cancelled while it is unknown what the last call came to: it is under way,
            and goes on to its end on the executor, or its reply was lost. What it was granted has to be given back.
    """
    import asyncio

    doubtful: Future[Answer] | None = None
    try:
        step = next(steps)
        while True:
            if isinstance(step, Wait):
                await asyncio.sleep(step.seconds)
                answer = Answer(clock.now())
            else:
                doubtful = _executor().submit(call, backend, step)
                here = asyncio.wrap_future(doubtful)
                try:
                    answer = await asyncio.shield(here)
                except asyncio.CancelledError:
                    here.cancel()  # a call that has not begun is not made
                    raise
                if answer.error is None or not answer.error.outcome_unknown:
                    doubtful = None
            step = steps.send(answer)
    except StopIteration as end:
        return end.value  # type: ignore[no-any-return]
    except asyncio.CancelledError:
        if doubtful is not None:
            abandoned(doubtful)
        raise
    finally:
        steps.close()


_executor_lock = threading.RLock()
_executors: dict[int, ThreadPoolExecutor] = {}


def _executor() -> ThreadPoolExecutor:
    """Return this process's executor; a forked child makes its own."""
    from concurrent.futures import ThreadPoolExecutor

    with _executor_lock:
        pid = os.getpid()
        if pid not in _executors:
            _executors[pid] = ThreadPoolExecutor(MOST_CALLS, thread_name_prefix="pglease-call")
        return _executors[pid]


def _after_fork_in_child() -> None:
    global _executor_lock  # noqa: PLW0603  # another thread of the parent may have held it
    _executor_lock = threading.RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)


async def in_executor(function: Callable[[], T]) -> T:
    """Run a blocking function off the loop and to its end; a cancellation of this task follows only then."""
    import asyncio

    future = asyncio.ensure_future(asyncio.wrap_future(_executor().submit(function)))
    cancelled: asyncio.CancelledError | None = None
    while not future.done():
        try:
            await asyncio.shield(future)
        except asyncio.CancelledError as error:
            if future.cancelled():
                raise
            cancelled = error
        except Exception:  # noqa: BLE001, S110  # the future's own; read below
            pass
    if cancelled is not None:
        future.exception()
        raise cancelled
    return future.result()
