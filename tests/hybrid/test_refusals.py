"""What the hybrid backend does not work with, and says so before it grants anything."""

from __future__ import annotations

from contextlib import closing

import psycopg
import pytest

from pglease import BackendMisconfigured, ConfigurationError, PGLease
from pglease.backends import hybrid_session
from pglease.backends.hybrid import HybridPostgresBackend
from pglease.testing.local_pgbouncer import PgBouncer
from tests.support.hybrid import advisory_locks, hybrid
from tests.support.worlds import execute


def test_a_transaction_pooler_is_refused_before_anything_is_made(dsn: str, pgbouncer: PgBouncer) -> None:
    with (
        PGLease(hybrid(pgbouncer.dsn)) as leases,
        pytest.raises(BackendMisconfigured, match="postgresql://, which works"),
    ):
        leases.try_acquire("job")

    assert execute(dsn, "SELECT to_regclass('pglease_leases')") == [(None,)]


@pytest.mark.needs("pgbouncer")
def test_a_session_pooler_is_refused_too(dsn: str) -> None:
    with (
        PgBouncer(dsn, pool_mode="session") as pooler,
        PGLease(hybrid(pooler.dsn)) as leases,
        pytest.raises(BackendMisconfigured, match="directly"),
    ):
        leases.try_acquire("job")


@pytest.mark.parametrize("sessions", [1, 2, 5])
@pytest.mark.needs("pgbouncer")
def test_a_pooler_that_tells_the_truth_about_its_process_is_found_by_the_second_probe(
    dsn: str, monkeypatch: pytest.MonkeyPatch, sessions: int
) -> None:
    def the_truth(connection: psycopg.Connection) -> int:
        return connection.execute("SELECT pg_backend_pid()").fetchone()[0]

    monkeypatch.setattr(hybrid_session, "claimed_pid", the_truth)
    with (
        PgBouncer(dsn, settings={"default_pool_size": sessions}) as pooler,
        PGLease(hybrid(pooler.dsn), connect_timeout=5) as leases,
    ):
        for _ in range(2):
            with pytest.raises(BackendMisconfigured, match="pooler"):
                leases.try_acquire("job")

        assert advisory_locks(dsn) == []
        with psycopg.connect(pooler.dsn, autocommit=True, prepare_threshold=None) as somebody:
            assert somebody.execute("SHOW synchronous_commit").fetchone() == ("on",)  # nothing of ours was left there


def test_a_lent_connection_is_refused() -> None:
    for lend in ("from_connection_factory", "from_pool", "from_engine"):
        with pytest.raises(ConfigurationError, match="address"):
            getattr(HybridPostgresBackend, lend)(_Lender())


class _Lender:
    def __call__(self) -> None:
        raise AssertionError("nobody connects")

    connection = raw_connection = __call__


def test_every_wrong_argument_is_named_and_the_password_is_not() -> None:
    with pytest.raises(ConfigurationError) as caught:
        HybridPostgresBackend(
            "postgresql://u:hunter22@h:x/db", handover_delay=-1, strict="yes", max_advisory=0, pool_size=0
        )

    text = str(caught.value)
    assert all(name in text for name in ("handover_delay", "strict", "max_advisory", "pool_size", "port"))
    assert "hunter22" not in text


def test_a_knob_that_it_has_not_is_named() -> None:
    with pytest.raises(ConfigurationError, match="nonsense"):
        PGLease("hybrid+postgresql://h/db?pglease.nonsense=1")
    with pytest.raises(ConfigurationError, match="strict"):
        PGLease("postgresql://h/db?pglease.strict=1")


def test_the_knobs_of_the_plain_backend_are_its_own_too(dsn: str) -> None:
    with closing(
        HybridPostgresBackend(dsn, table_name="other", pool_size=2, strict=True, handover_delay="2s")
    ) as store:
        assert store.ddl().count('"other"') > 1


def test_the_doctor_shows_how_many_locks_there_are(dsn: str) -> None:
    with PGLease(hybrid(dsn)) as leases:
        for number in range(7):
            leases.try_acquire(f"job-{number}")
        assert isinstance(leases.backend, HybridPostgresBackend)
        check = next(check for check in leases.backend.diagnose() if check.name == "session")

    assert check.status == "ok"
    assert "advisory locks" in check.text


def test_the_doctor_says_that_a_pooler_stands_in_between(pgbouncer: PgBouncer) -> None:
    with closing(HybridPostgresBackend(pgbouncer.dsn)) as store:
        checks = {check.name: check for check in store.diagnose()}

    assert checks["session"].status == "fail"
    assert "pooler" in checks["session"].text
