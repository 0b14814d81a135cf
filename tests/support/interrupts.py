"""What a signal handler does, done before each line of what it interrupts, one after the other."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from typing import Any, NamedTuple


class Interruption(NamedTuple):
    """Something to be interrupted, and what interrupts it: that ends it, too, if it rests."""

    body: Callable[[], object]
    handler: Callable[[], object]


def interrupted_at_every_line(begin: Callable[[], Interruption], most: int = 200) -> int:
    """Interrupt a fresh body before its first line, another before its second, and so on; return how many lines.

    Fails when a body does not end, or when the body or the handler raises.
    """
    for line in range(most):
        body, handler = begin()
        countdown, interrupted = iter(range(line + 1)), threading.Event()
        errors: list[BaseException] = []

        def trace(
            _frame: Any,
            event: str,
            _argument: Any,
            countdown=countdown,
            interrupted=interrupted,
            handler=handler,
        ) -> Any:
            if event == "line" and not interrupted.is_set() and next(countdown, None) is None:
                interrupted.set()
                handler()
            return trace

        def run(trace=trace, body=body, errors=errors) -> None:
            sys.settrace(trace)
            try:
                body()
            except BaseException as error:
                errors.append(error)
            finally:
                sys.settrace(None)

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        thread.join(0.1)
        if thread.is_alive() and not interrupted.is_set():
            handler()  # it rests by now, and no line is left to be interrupted
        thread.join(20)
        assert not thread.is_alive(), f"interrupted before its line {line}, it does not end"
        assert errors == []
        if not interrupted.is_set():
            return line
    return most
