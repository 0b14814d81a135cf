"""Waiting for one of several leases: until one of them is released, where the store says so."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from pglease import clock
from pglease.bell import Bell
from pglease.errors import BackendUnavailable
from pglease.records import Change
from pglease.waiting import AHEAD_OF_ITS_END, mark

if TYPE_CHECKING:
    from pglease.client import PGLease

UNHEARD = 1.0
"""The longest rest in seconds where releases are not heard of."""
HEARD = 15.0
"""The same where they are: looking is only the net beneath."""
BOX = 5.0


class Vigil:
    """Hears of the releases of some names, for one talk. Nothing is heard before the first `mark`.

    Whoever waits marks first, looks afterwards, and rests only then; so no release is missed on a link that holds. What
    was heard is forgotten before a look, never after it: it may be of what that look came too early to see.
    """

    def __init__(self, leases: PGLease) -> None:
        self._leases = leases
        self._room = leases.taking.room
        self._marked: dict[str, float] = {}
        self._all_marked = False
        self._began = False
        self.bell = Bell()

    def mark(self, names: Iterable[str], seconds: float) -> bool:
        """Mark what stands in the way; True when some of it is new, so that one look more is due before a rest.

        Args:
            names: of what is waited for.
            seconds: how long that may take in all, `BOX` at most. What is not marked by then, or once the store is in
                trouble, is looked at as often as what is not heard of.
        """
        if not self._began:
            self._began = True
            self._room.watch(self)
        wanted, now = list(names), clock.now()
        fresh = [name for name in wanted if now >= self._marked.get(name, 0.0) - AHEAD_OF_ITS_END]
        if not self._room.hearing:
            fresh, self._marked = [], {}
        for name in fresh:
            self._marked.pop(name, None)
        self._mark_in_time(fresh, now + min(BOX, seconds))
        self._all_marked = all(name in self._marked for name in wanted)
        return any(name in self._marked for name in fresh)

    def _mark_in_time(self, names: Iterable[str], until: float) -> None:
        for name in names:
            left = until - clock.now()
            if left <= 0:
                return
            try:
                marked_until = mark(self._leases.backend, name, left)
            except BackendUnavailable:
                return  # one of them is enough to wait for
            if marked_until:
                self._marked[name] = marked_until

    def about_to_look(self) -> None:
        """Forget what was heard: what is heard from here on is looked at once more."""
        self.bell.clear()

    def longest(self) -> float:
        """Return how long one may rest without a look."""
        return HEARD if self._all_marked and self._marked and self._room.hearing else UNHEARD

    def close(self) -> None:
        """Hear no more."""
        if self._began:
            self._room.unwatch(self)

    # -- for the client's ear ------------------------------------------------------------------------------------------

    def hear(self, change: Change) -> None:
        """Wake whoever rests, if that is what it waits for."""
        if change.what == "released" and change.name in self._marked:
            self.bell.set()

    def turn(self) -> None:
        """Wake whoever rests: hearing has begun, or ended, or the client was closed."""
        self.bell.set()
