"""`Bell`: an event for threads and loops, and for signal handlers."""

from __future__ import annotations

import threading

import pytest

from pglease.bell import Bell
from tests.support.interrupts import Interruption, interrupted_at_every_line


@pytest.mark.parametrize("act", ["wait", "set"])
def test_a_signal_handler_may_ring_it_wherever_it_interrupts(act):
    def begin() -> Interruption:
        bell = Bell()
        return Interruption(lambda: getattr(bell, act)(*([30] if act == "wait" else [])), bell.set)

    assert interrupted_at_every_line(begin) > 1


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
