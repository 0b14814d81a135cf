"""Since when a lease has been as it is, as far as this client can know: expiry by observed change.

The API server judges no expiry, and a Lease's own times are readings of other machines' clocks. What a client can know
is that one version (uid, resourceVersion) was still the present one when it looked again, and how much time its own
boot clock has counted since it first saw it. A hold whose version stands unchanged for its whole ttl has lapsed: its
holder counts the same ttl from before it sent the write, hence from earlier.

So a version that was read counts from when the *reply* arrived, which is never too early to take over. A version that
this client wrote counts from before the request was *sent*, which is never too late to stop believing.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import Any, NamedTuple

Version = tuple[str, str]

_MOST = 100_000
"""Versions and questions that are remembered. Forgetting one costs a wait of another ttl, never safety."""


_EARLIER = 4
"""Versions of one lease that are remembered."""


class Sighting(NamedTuple):
    """One version of one lease.

    Attributes:
        version: uid and resourceVersion.
        at: seconds on the boot clock, since when it is known to be there.
        own: whether this client wrote it.
    """

    version: Version
    at: float
    own: bool = False


class Sightings:
    """What one client remembers of the leases it has seen, and of its own questions."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # a signal handler may call in
        self._seen: OrderedDict[str, tuple[Sighting, ...]] = OrderedDict()
        self._asked: OrderedDict[str, float] = OrderedDict()

    def saw(self, name: str, version: Version, now: float) -> Sighting:
        """Note what a reply said that has just arrived; return since when it is so."""
        with self._lock:
            for known in self._seen.get(name, ()):
                if known.version == version:
                    self._seen.move_to_end(name)
                    return known
            return self._keep(name, Sighting(version, now))

    def wrote(self, name: str, version: Version, sent_at: float) -> Sighting:
        """Note a write of our own, sent at that moment."""
        with self._lock:
            return self._keep(name, Sighting(version, sent_at, own=True))

    def asking(self, lease_id: str, now: float) -> None:
        """Note that a request for a hold is about to be sent; the first counts."""
        with self._lock:
            self._asked.setdefault(lease_id, now)
            _shorten(self._asked)

    def asked_at(self, lease_id: str) -> float | None:
        """Return when a hold was first asked for; None if this client never did."""
        return self._asked.get(lease_id)

    def _keep(self, name: str, sighting: Sighting) -> Sighting:
        # Some earlier ones, too: a reply that was long on its way may still tell of them, and must not seem news.
        self._seen[name] = (sighting, *self._seen.get(name, ())[: _EARLIER - 1])
        self._seen.move_to_end(name)
        _shorten(self._seen)
        return sighting


def _shorten(memory: OrderedDict[str, Any]) -> None:
    while len(memory) > _MOST:
        memory.popitem(last=False)
