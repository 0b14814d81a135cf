"""Who asks: labels for people, random ids for acquisitions, and which thread or task is running."""

from __future__ import annotations

import itertools
import os
import sys
import threading
import weakref
from typing import Any, TypeAlias

Caller: TypeAlias = tuple[int, int]
"""A thread and, on an event loop, a task: numbers of ours, which are never used again."""

_numbers = itertools.count(1)
_tasks: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()


class _Here(threading.local):
    """This thread's own number. The system gives a thread's identity to the next one as soon as it has ended."""

    def __init__(self) -> None:
        self.number = next(_numbers)


_here = _Here()


def new_lease_id() -> str:
    """Return the id of one acquisition: 32 hex digits of the system's own randomness, which forks do not share."""
    return os.urandom(16).hex()


def default_owner() -> str:
    """Return a label for people: `host:pid:random`."""
    import socket

    return f"{socket.gethostname()[:200] or 'localhost'}:{os.getpid()}:{os.urandom(4).hex()}"


def current_caller() -> Caller:
    """Return what tells this thread, and on an event loop this task, from all others, also from those that ended."""
    asyncio = sys.modules.get("asyncio")  # not loaded: no loop, no task, and no reason to load it
    if asyncio is None:
        return _here.number, 0
    # Without a loop `current_task` alone would raise, which takes ten times as long; this is for whoever makes loops.
    loop = asyncio._get_running_loop()  # noqa: SLF001
    task = None if loop is None else asyncio.current_task(loop)
    return _here.number, _tasks.setdefault(task, next(_numbers)) if task else 0


def threads_are_green() -> str | None:
    """Return who has put greenlets in the place of threads, or None: such a thread runs only when all others let it."""
    gevent, eventlet = sys.modules.get("gevent.monkey"), sys.modules.get("eventlet.patcher")
    if gevent is not None and gevent.is_module_patched("threading"):
        return "gevent"
    return "eventlet" if eventlet is not None and eventlet.is_monkey_patched("thread") else None
