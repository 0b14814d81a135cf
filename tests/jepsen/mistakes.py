"""Mistakes that are put into the library, to see that a run notices them: a checker that stays green is broken."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import NamedTuple

from pglease import handles
from pglease.heartbeat import HeartbeatManager


class Mistake(NamedTuple):
    """One of them: what is wrong, which checker has to notice, and how it is made."""

    what: str
    checker: str
    make: Callable[[], None]


def _believe_for_ever() -> None:
    handles.Hold.held = lambda hold: not hold.ended
    handles.Hold.remaining = lambda hold: 0.0 if hold.ended else 3600.0


def _tell_late() -> None:
    lost = HeartbeatManager.lost
    HeartbeatManager.lost = lambda *told: threading.Timer(1.0, lost, told).start()


def _tell_twice() -> None:
    lost = HeartbeatManager.lost
    HeartbeatManager.lost = lambda *told: (lost(*told), lost(*told))


MISTAKES = {
    "believes-for-ever": Mistake("belief does not end by time", "C1", _believe_for_ever),
    "tells-late": Mistake("a loss is told a second late", "C5", _tell_late),
    "tells-twice": Mistake("each loss is told twice", "C9", _tell_twice),
}
