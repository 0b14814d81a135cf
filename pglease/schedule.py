"""Which renewals are due, and when the next one is. Pure: everybody hands it `now`.

Leases that come due close together are renewed together: whoever is due pulls along all that would be due within a
quarter of their interval. So hundreds of leases settle into one statement a tick.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)

_PULLED_ALONG = 0.25
_LEAST_RETRY = 0.05
_MOST_RETRY = 1.0
_SHORTEST_SHARED_BOX = 0.5


class RenewalSchedule(Generic[K]):
    """The renewals to come, by key."""

    def __init__(self) -> None:
        self._entries: dict[K, tuple[float, float, float]] = {}
        """Each with its interval, its box, and the moment of its next renewal."""

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, key: K) -> bool:
        return key in self._entries

    def add(self, key: K, *, interval: float, box: float, sent_at: float) -> float:
        """Schedule renewals every `interval` seconds, counted from when a request was *sent*; return the next moment.

        Args:
            key: whatever stands for the lease.
            interval: seconds.
            box: the longest one renewal of it may take, in seconds.
            sent_at: the boot clock before the request that was last answered.
        """
        next_at = sent_at + interval
        self._entries[key] = interval, box, next_at
        return next_at

    def drop(self, key: K) -> None:
        """Renew it no more. Harmless for an unknown key."""
        self._entries.pop(key, None)

    def clear(self) -> None:
        """Renew nothing more."""
        self._entries.clear()

    def next_at(self) -> float:
        """Return when the next renewal is due, or infinity."""
        return min((next_at for _, _, next_at in self._entries.values()), default=float("inf"))

    def due(self, now: float) -> list[K]:
        """Return what to renew now: nothing while nothing is due, else that and what would be due soon after."""
        if self.next_at() > now:
            return []
        return [key for key, (interval, _, at) in self._entries.items() if at <= now + _PULLED_ALONG * interval]

    def box(self, keys: Iterable[K]) -> float:
        """Return how long one conversation about `keys` may take, so that it delays none of the others for too long."""
        entries = self._entries
        own = min((entries[key][1] for key in keys if key in entries), default=_MOST_RETRY)
        everyone = min((box for _, box, _ in entries.values()), default=own)
        return min(own, max(everyone, _SHORTEST_SHARED_BOX))

    def confirmed(self, key: K, *, sent_at: float) -> None:
        """Note a renewal that was sent at `sent_at` and applied."""
        if (entry := self._entries.get(key)) is not None:
            interval, box, _ = entry
            self._entries[key] = interval, box, sent_at + interval

    def unanswered(self, key: K, *, now: float, trusted_until: float, spread: float) -> None:
        """Note a renewal whose outcome is unknown: try again soon, several times before the deadline, not in step.

        Args:
            key: whatever stands for the lease.
            now: the boot clock.
            trusted_until: when belief ends.
            spread: a random number from 0 to 1.
        """
        if (entry := self._entries.get(key)) is not None:
            interval, box, _ = entry
            pause = min(_MOST_RETRY, max(_LEAST_RETRY, (trusted_until - now) / 10))
            self._entries[key] = interval, box, now + pause * (0.5 + spread / 2)
