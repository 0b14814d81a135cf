"""SIGTERM ends a Python process on the spot, whatever it holds. Asked to, we make it end like Ctrl-C: block by block.

Never by default: signal handlers are the application's.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Mapping
from types import FrameType
from typing import Any

from pglease.errors import ConfigurationError


def install_signal_handlers(*signals: int) -> Callable[[], None]:
    """Let these signals end the program in order: blocks are left, work is told to end, leases are released.

    The main thread is interrupted by `SystemExit(128 + n)`, so every `with` and `finally` on its way out runs, and
    clients are closed at the exit; a wait for a lease ends. On asyncio use `cancel_on_signals`.

    Args:
        signals: default SIGTERM. Only the first that comes has an effect.

    Returns:
        what puts the earlier handlers back.

    Raises:
        ConfigurationError: not in the main thread, or a signal that cannot be handled.
    """
    leaving = False

    def leave(number: int, _: FrameType | None) -> None:
        nonlocal leaving
        if not leaving:  # a second one would interrupt a release
            leaving = True
            raise SystemExit(128 + number)

    earlier: dict[int, Any] = {}
    try:
        for number in signals or (signal.SIGTERM,):
            earlier[number] = signal.signal(number, leave)
    except (OSError, ValueError, TypeError) as error:
        _put_back(earlier)
        raise ConfigurationError(f"signals must be some that can be handled, in the main thread: {error}") from None
    return lambda: _put_back(earlier)


def _put_back(earlier: Mapping[int, Any]) -> None:
    for number, handler in earlier.items():
        signal.signal(number, handler)


def cancel_on_signals(*signals: int) -> Callable[[], None]:
    """Let these signals cancel the task that calls this: its blocks are left in order, its leases released.

    Args:
        signals: default SIGTERM. Only the first that comes has an effect.

    Returns:
        what removes the handlers.

    Raises:
        ConfigurationError: as for `install_signal_handlers`, or outside of a task.
    """
    import asyncio

    try:
        task = asyncio.current_task()
    except RuntimeError:  # no event loop runs here
        task = None
    if task is None:
        raise ConfigurationError("cancel_on_signals is called in the task that is to be cancelled")
    loop = task.get_loop()
    handled: list[int] = []

    def cancel() -> None:
        if not task.cancelling():
            task.cancel("a signal asked for the end")

    def remove() -> None:
        for number in handled:
            loop.remove_signal_handler(number)

    try:
        for number in signals or (signal.SIGTERM,):
            loop.add_signal_handler(number, cancel)
            handled.append(number)
    except (OSError, ValueError, TypeError, RuntimeError, NotImplementedError) as error:  # the last: not on Windows
        remove()
        raise ConfigurationError(f"signals must be some that can be handled, in the main thread: {error}") from None
    return remove
