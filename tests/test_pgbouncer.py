"""The private PgBouncer: a real pooler in transaction mode before a test's database."""

import psycopg
import pytest

from pglease.errors import MissingDependencyError
from pglease.testing import processes
from pglease.testing.local_pgbouncer import PgBouncer
from pglease.testing.processes import LocalServerError


def test_sessions_share_one_server_connection_between_transactions(pgbouncer):
    with psycopg.connect(pgbouncer.dsn, autocommit=True) as one, psycopg.connect(pgbouncer.dsn, autocommit=True) as two:
        pids = {connection.execute("SELECT pg_backend_pid()").fetchone() for connection in (one, two, one, two)}

    assert len(pids) == 1


def test_its_console_answers(pgbouncer):
    values = {row["key"]: row["value"] for row in pgbouncer.admin("SHOW CONFIG")}

    assert values["pool_mode"] == "transaction"


def test_the_password_is_asked_for(pgbouncer, canary):
    with pytest.raises(psycopg.OperationalError):
        psycopg.connect(pgbouncer.dsn, password="another")


def test_it_leaves_nothing_behind(dsn, pgbouncer):
    another = PgBouncer(dsn).start()
    directory, pid = another.log_path.parent, another._process.pid

    another.stop()

    assert not directory.exists()
    assert pid not in processes.children_of(1)


def test_a_wrong_setting_is_told_with_its_own_words(dsn, pgbouncer):
    with pytest.raises(LocalServerError, match="pool_mode"):
        PgBouncer(dsn, settings={"pool_mode": "nonsense"}).start()


def test_a_missing_program_is_told(dsn):
    with pytest.raises(MissingDependencyError, match="apt-get install pgbouncer"):
        PgBouncer(dsn, program="/nowhere/pgbouncer").start()
