"""Beside guarded transactions heartbeats go on as if there were none."""

from __future__ import annotations

import psycopg

from pglease import PGLease
from pglease.backends.postgres import PostgresBackend
from pglease.records import Claim, Held, Renewal, Unknown
from tests.support.worlds import Stopwatch, budget, execute, grant, locked_row, nobody_waits, renew, wait_until

COUNTS = "SELECT pg_stat_force_next_flush(), n_tup_upd, n_tup_hot_upd FROM pg_stat_user_tables WHERE relname = %s"


def updates(dsn: str) -> tuple[int, int]:
    """Return how many updates the lease table has seen, and how many of them were HOT."""
    ((_, total, hot),) = execute(dsn, COUNTS.replace("pg_stat_force_next_flush()", "1"), "pglease_leases")
    return total, hot


def test_heartbeats_beside_guarded_transactions_are_never_blocked_and_stay_hot(dsn: str) -> None:
    backend = PostgresBackend(dsn)
    lease, lease_id = grant(backend, "job")
    claim = Claim("job", lease_id, lease.fencing_token)
    before = updates(dsn)
    slowest = 0.0

    with psycopg.connect(dsn) as guarded, nobody_waits(dsn):
        for _ in range(100):
            backend.guard(claim, guarded)
            for _ in range(3):
                took = Stopwatch()
                assert isinstance(renew(backend, "job", lease_id), Held)
                slowest = max(slowest, took.seconds)
            guarded.commit()
    backend.close()  # a session tells its counts when it ends

    wait_until(lambda: updates(dsn)[0] >= before[0] + 300)
    total, hot = (now - then for now, then in zip(updates(dsn), before, strict=True))
    assert hot >= 0.95 * total, (hot, total)
    assert slowest < 10


def test_of_twenty_leases_in_a_tick_one_that_is_locked_holds_up_no_other(dsn: str) -> None:
    backend = PostgresBackend(dsn)
    ids = [grant(backend, f"job-{n}")[1] for n in range(20)]

    with locked_row(dsn, "job-7", "UPDATE"):
        took = Stopwatch()
        outcomes = backend.renew([Renewal(f"job-{n}", lease_id, 60) for n, lease_id in enumerate(ids)], budget())
        seconds = took.seconds

    assert [n for n, outcome in enumerate(outcomes) if isinstance(outcome, Unknown)] == [7]
    assert sum(isinstance(outcome, Held) for outcome in outcomes) == 19
    assert seconds < 8
    backend.close()


RENEWED = """
SELECT count(*) FROM pglease_leases WHERE task_name <> 'job-7' AND lease_id IS NOT NULL
  AND heartbeat_at > acquired_at + interval '1 s' AND expires_at > clock_timestamp()
"""


def test_a_client_keeps_nineteen_leases_while_a_stranger_has_the_row_of_the_twentieth(dsn: str) -> None:
    with PGLease(dsn) as leases:
        for n in range(20):
            assert leases.try_acquire(f"job-{n}", ttl=5)
        with locked_row(dsn, "job-7", "UPDATE"):
            wait_until(lambda: leases.held("job-7") is None, within=30)

            assert len(leases.holding()) == 19
            assert execute(dsn, RENEWED) == [(19,)]


def test_overlapping_guards_cannot_keep_a_successor_out_of_a_hold_that_lapsed(dsn: str) -> None:
    backend = PostgresBackend(dsn)
    lease, lease_id = grant(backend, "job", ttl=1.0)
    claim = Claim("job", lease_id, lease.fencing_token)
    one, two = psycopg.connect(dsn), psycopg.connect(dsn)
    try:
        refused = 0
        while refused < 2:  # each guard begins before the other's transaction ends
            for mine, other in ((one, two), (two, one)):
                try:
                    backend.guard(claim, mine)
                except Exception:
                    refused += 1
                other.rollback()

        one.rollback()
        two.rollback()
        assert grant(backend, "job")[0].fencing_token == 2
    finally:
        one.close()
        two.close()
        backend.close()
