"""Rows, rights and settings that somebody made to harm, or made without knowing."""

from __future__ import annotations

import contextlib
from pathlib import Path

import psycopg
import pytest

from pglease import AcquisitionError, BackendError, PGLease
from tests.attacks.world import sql


def test_where_a_policy_hides_the_row_nobody_is_told_that_they_hold_it(dsn: str, leases: PGLease, rival) -> None:
    assert rival.try_acquire("job", ttl=60)
    sql(dsn, "ALTER TABLE pglease_leases ENABLE ROW LEVEL SECURITY")
    sql(dsn, "ALTER TABLE pglease_leases FORCE ROW LEVEL SECURITY")
    sql(dsn, "CREATE POLICY hidden ON pglease_leases USING (false) WITH CHECK (true)")

    try:
        granted = leases.try_acquire("job", ttl=60)
    except BackendError:
        granted = False

    assert granted is False


def test_a_token_at_its_end_is_refused_and_does_not_wrap(dsn: str, leases: PGLease) -> None:
    leases.try_acquire("job")
    leases.release("job")
    sql(dsn, "UPDATE pglease_leases SET fencing_token = 9223372036854775807")

    with pytest.raises(BackendError):
        leases.try_acquire("job")


@pytest.mark.parametrize(
    "forged",
    [
        "expires_at = 'infinity'",
        "acquired_at = '-infinity', heartbeat_at = 'infinity'",
        "owner_id = repeat('x', 1000000)",
        "metadata = '[1, 2]'",
        "metadata = '\"text\"'",
        "metadata = 'null'",
    ],
)
def test_a_row_that_somebody_forged_crashes_no_reader(dsn: str, leases: PGLease, forged: str) -> None:
    leases.try_acquire("job", ttl=60, heartbeat=False)
    with contextlib.suppress(psycopg.errors.CheckViolation, psycopg.errors.StringDataRightTruncation):
        sql(dsn, f"UPDATE pglease_leases SET {forged}")  # unless the table itself refuses it

    record = leases.get_lease("job")

    assert record is not None
    assert record.name == "job"
    assert [each.name for each in leases.list_leases()] == ["job"]
    repr(record)


def test_a_forged_holder_writes_no_line_of_its_own_into_a_log_or_a_terminal(dsn: str, leases: PGLease, rival) -> None:
    rival.try_acquire("job", ttl=60)
    sql(dsn, "UPDATE pglease_leases SET owner_id = E'evil\\nERROR all is lost \\x1b[31m'")

    with pytest.raises(AcquisitionError) as caught, leases.acquire("job", raise_on_failure=True):
        pass

    assert "\n" not in str(caught.value)
    assert "\x1b" not in str(caught.value)


def test_a_password_may_be_kept_where_libpq_looks_for_it(
    server, database: str, canary: str, tmp_path: Path, monkeypatch
) -> None:
    file = tmp_path / "pgpass"
    file.write_text(f"{server.host}:{server.port}:{database}:{server.user}:{canary}\n")
    file.chmod(0o600)
    monkeypatch.setenv("PGPASSFILE", str(file))

    with PGLease(f"postgresql://{server.user}@{server.host}:{server.port}/{database}") as leases:
        assert leases.try_acquire("job")


def test_a_service_may_be_named_where_libpq_looks_for_it(server, dsn: str, tmp_path: Path, monkeypatch) -> None:
    file = tmp_path / "services"
    name = dsn.rpartition("/")[2]
    file.write_text(f"[leases]\nhost={server.host}\nport={server.port}\ndbname={name}\nuser={server.user}\n"
                    f"password={server.canary}\n")  # fmt: skip
    monkeypatch.setenv("PGSERVICEFILE", str(file))

    with PGLease("service=leases") as leases:
        assert leases.try_acquire("job")
