"""Who asks: labels for people, random ids for acquisitions, and which thread or task is running."""

from __future__ import annotations

import os
import sys
import threading


def new_lease_id() -> str:
    """Return the id of one acquisition: 32 hex digits of the system's own randomness, which forks do not share."""
    return os.urandom(16).hex()


def default_owner() -> str:
    """Return a label for people: `host:pid:random`."""
    import socket

    return f"{socket.gethostname()[:200] or 'localhost'}:{os.getpid()}:{os.urandom(4).hex()}"


def current_caller() -> tuple[int, int]:
    """Return what tells this thread, and on an event loop this task, from the others."""
    asyncio = sys.modules.get("asyncio")  # not loaded: no loop, no task, and no reason to load it
    if asyncio is None:
        return threading.get_ident(), 0
    try:
        task = asyncio.current_task()
    except RuntimeError:
        task = None
    return threading.get_ident(), id(task) if task else 0


def threads_are_green() -> str | None:
    """Return who has put greenlets in the place of threads, or None: such a thread runs only when all others let it."""
    gevent, eventlet = sys.modules.get("gevent.monkey"), sys.modules.get("eventlet.patcher")
    if gevent is not None and gevent.is_module_patched("threading"):
        return "gevent"
    return "eventlet" if eventlet is not None and eventlet.is_monkey_patched("thread") else None
