"""Queues and cleanups take a transaction of a few statements. Whoever stands still in one keeps nobody out for long."""

from __future__ import annotations

import signal
from collections.abc import Callable
from contextlib import closing

import pytest

from pglease import BackendUnavailable, PGLease, PostgresBackend, clock
from pglease.backends.base import Budget
from pglease.backends.postgres_link import milliseconds
from tests.support.worlds import child, wait_until

INSIDE = """
from pglease import clock
from pglease.backends.base import Budget
backend = PostgresBackend(dsn)
with backend.connections.lend(Budget.of(30, clock.now)) as link, link.transaction():
    link.rows("SELECT 1 FROM pglease_leases WHERE task_name = 'job' FOR UPDATE")
    say("inside")
    hear()
"""


def answers(ask: Callable[[], object]) -> bool:
    try:
        ask()
    except BackendUnavailable:
        return False
    return True


def test_a_process_that_is_stopped_in_a_transaction_keeps_the_holder_from_renewing_for_two_seconds(dsn: str) -> None:
    with PGLease(dsn, "holder") as leases:
        lease = leases.wait_for_lease("job", ttl="5m")
        with child(INSIDE, dsn) as stopped:
            assert stopped.hear() == "inside"
            stopped.send(signal.SIGSTOP)

            wait_until(lambda: answers(lease.renew), within=60)

        assert lease.held


def test_nothing_that_it_wrote_is_committed_when_it_goes_on(dsn: str) -> None:
    with PGLease(dsn, "holder") as leases, closing(PostgresBackend(dsn)) as backend:
        leases.try_acquire("job", ttl="5m")
        budget = Budget.of(60, clock.now)

        with (
            pytest.raises(BackendUnavailable, match="idle-in-transaction") as told,
            backend.connections.lend(budget) as link,
            link.transaction(),
        ):
            link.rows("UPDATE pglease_leases SET owner_id = 'nobody' WHERE task_name = 'job'")
            wait_until(lambda: answers(lambda: leases.renew("job")), within=60)

        assert not told.value.outcome_unknown
        assert backend.get("job", Budget.of(60, clock.now)).owner_id == "holder"


@pytest.mark.parametrize("seconds", [0.0, 1e-9, 2.0, 1e12, float("inf")])
def test_whatever_the_time_it_is_one_that_the_server_takes(dsn: str, seconds: float) -> None:
    budget = Budget.of(60, clock.now)
    with closing(PostgresBackend(dsn)) as backend, backend.connections.lend(budget) as link:
        link.script(f"SET idle_in_transaction_session_timeout = {milliseconds(seconds)}")

        assert link.rows("SELECT current_setting('idle_in_transaction_session_timeout') <> '0'") == [(True,)]
