from __future__ import annotations

import threading

import pytest

from pglease import clock
from pglease.backends.base import Budget
from pglease.backends.settling import Settling
from pglease.errors import BackendUnavailable


def test_who_waits_in_vain_for_a_look_is_told_what_the_last_one_met() -> None:
    settling = Settling("the lease table")
    with pytest.raises(BackendUnavailable), settling.turn(Budget.of(1, clock.now)):
        raise BackendUnavailable("the server is a standby")
    looking, over = threading.Event(), threading.Event()

    def look() -> None:
        with settling.turn(Budget.of(30, clock.now)):
            looking.set()
            over.wait(30)

    thread = threading.Thread(target=look)
    thread.start()
    looking.wait(30)
    with pytest.raises(BackendUnavailable, match=r"another thread; .*: the server is a standby"):
        settling.turn(Budget.of(0, clock.now)).__enter__()
    for seconds in (30, 0, -4):  # a lock would take -1 for "for ever"
        with settling.turn(Budget.of(seconds, clock.now), patience=seconds / 400) as ours:
            assert not ours
    over.set()
    thread.join(30)

    with settling.turn(Budget.of(30, clock.now), patience=0) as ours:
        assert ours  # it is free again
