"""Beliefs: what a process may conclude from a fact, on its own monotonic clock.

    trusted_until = sent_at + what the store granted - margin

`sent_at` is the moment *before* the first byte of the granting request went out. Counted from the reply instead, two
processes believe they hold the same name as soon as one reply is slow. The store read its clock after we sent, so its
expiry cannot come before `sent_at + granted`; the margin pays for clocks that run at different rates.
"""

from __future__ import annotations

from typing import NamedTuple

from pglease.bonds import Bond
from pglease.records import Lease


class Term(NamedTuple):
    """One confirmed stretch of a hold. A renewal makes a new one.

    Attributes:
        lease: the fact it stands on.
        sent_at: seconds on the boot clock, before the request that was answered with that fact.
        trusted_until: seconds on the boot clock; from then on this process must not act.
        bond: what the hold rests on besides, from its grant to its end; None where it rests on the ttl alone.
    """

    lease: Lease
    sent_at: float
    trusted_until: float
    bond: Bond | None = None

    @classmethod
    def begin(cls, lease: Lease, *, sent_at: float, ttl: float, margin: float, bond: Bond | None = None) -> Term:
        """Conclude from a grant or a renewal.

        A retry that found its own earlier grant has less than `ttl` left in the store, hence the smaller of the two.
        """
        granted = min(ttl, lease.time_remaining())
        return cls(lease, sent_at, sent_at + granted - margin, bond)

    def until(self, moment: float) -> Term:
        """Return the same, trusted until `moment` at the latest."""
        return self._replace(trusted_until=min(self.trusted_until, moment))

    def remaining(self, now: float) -> float:
        """Return the seconds this process may still act, never below 0."""
        return max(0.0, self.trusted_until - now)
