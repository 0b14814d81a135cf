"""Observers hear what happens, whatever they did with what they heard before."""

from __future__ import annotations

import sys

from pglease import PGLease
from tests.attacks.world import eventually


def test_an_observer_that_exits_is_told_of_what_happens_next():
    heard = []

    class Exiting:
        def notify(self, event):
            heard.append(event.kind)
            sys.exit(1)

    with PGLease("memory://", observers=[Exiting()]) as leases, leases.acquire("job"):
        pass

    eventually(lambda: heard == ["attempted", "acquired", "released"])
