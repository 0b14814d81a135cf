"""`Bell`: an event for threads and loops, and for signal handlers."""

from __future__ import annotations

import itertools
import sys
import threading
from typing import Any

import pytest

from pglease.bell import Bell


@pytest.mark.parametrize("act", ["wait", "set"])
def test_a_signal_handler_may_ring_it_wherever_it_interrupts(act):
    for line in itertools.count():
        bell, lines = Bell(), iter(range(line + 1))
        interrupted: list[bool] = []

        def trace(_frame: Any, event: str, _argument: Any, bell=bell, lines=lines, interrupted=interrupted) -> Any:
            if event == "line" and not interrupted and next(lines, None) is None:
                interrupted.append(True)
                bell.set()  # as a signal handler does before this line of the thread is executed
            return trace

        def body(bell=bell, trace=trace) -> None:
            sys.settrace(trace)
            getattr(bell, act)(*([30] if act == "wait" else []))
            sys.settrace(None)

        thread = threading.Thread(target=body, daemon=True)
        thread.start()
        if act == "wait":
            thread.join(0.5)
            if not interrupted:  # it rests by now, and no line is left to be interrupted
                bell.set()
        thread.join(20)
        assert not thread.is_alive()
        if not interrupted or line > 100:
            break
    assert line >= 1


def test_it_rings_anew_once_it_was_cleared():
    bell = Bell()
    assert not bell.wait(0.01)
    assert not bell.wait(-1)
    bell.set()
    assert bell.wait()
    bell.clear()
    assert not bell.is_set()
    threading.Timer(0.05, bell.set).start()
    assert bell.wait(30)
