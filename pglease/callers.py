"""Daemon threads that make blocking calls on behalf of event loops.

Not a `ThreadPoolExecutor`: Python waits for its threads at the end of the process, so that one call into a black hole
would keep a program that has finished from exiting.
"""

from __future__ import annotations

import contextvars
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Any, TypeVar

from pglease.errors import BackendUnavailable

T = TypeVar("T")


class Callers:
    """At most so many threads, made when there is something to do. A call sees the context of who asked for it.

    Args:
        most: how many calls may be under way at once; more wait for their turn.
        name: what the threads' names begin with.
    """

    def __init__(self, most: int, name: str) -> None:
        self._most = most
        self._name = name
        self._lock = threading.RLock()
        self._calls: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]]] = queue.SimpleQueue()
        self._under_way = 0
        self._threads = 0

    @property
    def busy(self) -> bool:
        """Whether a call is under way, or waits for its turn."""
        return self._under_way > 0

    def submit(self, function: Callable[[], T]) -> Future[T]:
        """Have `function` called; the future can be cancelled as long as that has not begun."""
        call: Future[T] = Future()
        with self._lock:
            if self._threads < min(self._most, self._under_way + 1):
                self._start()
            self._under_way += 1
        self._calls.put((call, partial(contextvars.copy_context().run, function)))
        return call

    def _start(self) -> None:
        thread = threading.Thread(target=self._run, name=f"{self._name}-{self._threads}", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:  # no more threads, or the interpreter is going down
            if not self._threads:
                raise BackendUnavailable(f"there is no thread for a call to the store: {error}") from error
        else:
            self._threads += 1

    def _run(self) -> None:
        while True:
            call, function = self._calls.get()
            _carry_out(call, function)
            del call, function  # or what they refer to would live until the next call
            with self._lock:
                self._under_way -= 1


def on_its_own(function: Callable[[], T], name: str) -> Future[T]:
    """Have `function` called on a thread of its own, which ends with it."""
    call: Future[T] = Future()
    work = partial(contextvars.copy_context().run, function)
    try:
        threading.Thread(target=_carry_out, args=(call, work), name=name, daemon=True).start()
    except RuntimeError as error:  # no more threads, or the interpreter is going down
        raise BackendUnavailable(f"there is no thread for a call to the store: {error}") from error
    return call


def _carry_out(call: Future[T], function: Callable[[], T]) -> None:
    if not call.set_running_or_notify_cancel():
        return
    try:
        answer = function()
    except BaseException as error:  # noqa: BLE001  # whoever asked hears of it
        call.set_exception(error)
    else:
        call.set_result(answer)
