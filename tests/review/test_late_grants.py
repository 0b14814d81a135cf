"""A grant that came too late is given back; whenever that is applied, it ends no later grant."""

from __future__ import annotations

import time

from pglease import BackendUnavailable, clock
from pglease.backends.base import Budget
from pglease.backends.postgres import PostgresBackend


def test_a_release_of_a_late_grant_that_the_store_applies_later_does_not_end_the_next_grant(leases, rival, monkeypatch):
    real_try, real_release = PostgresBackend.try_acquire, PostgresBackend.release
    stuck = []

    def late(self, request, budget):
        answer = real_try(self, request, budget)
        monkeypatch.setattr(PostgresBackend, "try_acquire", real_try)
        time.sleep(1.05)  # longer than the ttl
        return answer

    def unheard(self, name, lease_id, budget, **_kwargs):
        stuck.append((name, lease_id))
        monkeypatch.setattr(PostgresBackend, "release", real_release)
        raise BackendUnavailable("no answer in time", outcome_unknown=True)

    monkeypatch.setattr(PostgresBackend, "try_acquire", late)
    monkeypatch.setattr(PostgresBackend, "release", unheard)
    lease = leases.wait_for_lease("job", ttl=1, timeout=10, poll_interval=0.1)
    lease.renew(ttl=60)

    real_release(leases.backend, *stuck[0], Budget.of(5, clock.now))

    assert lease.held
    assert not rival.try_acquire("job")
