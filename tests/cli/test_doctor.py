"""`doctor`, called in to ten set-ups that were broken on purpose: each is named, with what to do."""

import json
import socket
import time
from contextlib import closing

import psycopg
import pytest

from pglease import PGLease
from pglease.testing.local_replica import LocalReplica
from tests.support.worlds import execute, wait_until


@pytest.fixture
def examine(call):
    """Examine a store: the exit code, and what is not in order by the name of the check."""

    def see(*arguments):
        code, out, err = call("doctor", "--json", *arguments)
        assert err == ""
        checks = [json.loads(line) for line in out.splitlines()]
        wrong = [each for each in checks if each["status"] != "ok"]
        assert all(each["remedy"] for each in wrong if each["check"] != "acquire and release")
        assert code == (1 if any(each["status"] == "fail" for each in checks) else 0)
        return code, {each["check"]: f"{each['status']}: {each['text']} → {each['remedy']}" for each in wrong}

    return see


@pytest.fixture
def made(dsn):
    """A store that is in order."""
    with PGLease(dsn) as leases:
        leases.list_leases()
    return dsn


def asked(dsn, question):
    with psycopg.connect(dsn, autocommit=True) as connection:
        return connection.execute(question).fetchone()[0]


def role_of(dsn):
    return psycopg.conninfo.conninfo_to_dict(dsn)["user"]


def test_in_a_store_that_is_in_order_nothing_is_wrong(examine, made):
    assert examine()[0] == 0


def test_one_a_pooler_in_transaction_mode(examine, made, pgbouncer):
    code, wrong = examine("--dsn", pgbouncer.dsn)

    assert code == 0
    assert "connect directly" in wrong["pooler"]


def test_two_a_replica_and_a_primary_whose_commits_wait_for_one_that_is_away(examine, fresh_postgres):
    primary = fresh_postgres()
    with PGLease(primary.dsn) as leases:
        leases.list_leases()
    with LocalReplica(primary) as replica:
        replica.catch_up()
        code, wrong = examine("--dsn", replica.dsn)

    assert code == 1
    assert "the server is a standby; leases need the primary" in wrong["reachable"]

    execute(primary.admin_dsn, "ALTER SYSTEM SET synchronous_standby_names = 'nosuch'")
    execute(primary.admin_dsn, "SELECT pg_reload_conf()")
    wait_until(lambda: asked(primary.dsn, "SHOW synchronous_standby_names") == "nosuch")
    code, wrong = examine("--dsn", primary.dsn)

    assert code == 1
    assert "each commit waits for a standby" in wrong["standbys"]
    assert "not tried" in wrong["acquire and release"]


def test_three_missing_rights(examine, made):
    execute(made, f'REVOKE INSERT, UPDATE ON pglease_leases FROM "{role_of(made)}"')

    code, wrong = examine()

    assert code == 1
    assert "may not acquire, renew, release" in wrong["rights"]
    assert "GRANT INSERT, UPDATE ON" in wrong["rights"]


def test_four_a_foreign_table(examine, dsn):
    execute(dsn, "CREATE TABLE pglease_leases (id int)")

    code, wrong = examine()

    assert code == 1
    assert "is not a lease table" in wrong["table"]
    assert "choose another table_name or schema" in wrong["table"]


def test_five_a_bad_index(examine, made):
    execute(made, "CREATE INDEX slow ON pglease_leases (expires_at)")

    code, wrong = examine()

    assert code == 0
    assert "slow" in wrong["indexes"]
    assert "DROP INDEX CONCURRENTLY" in wrong["indexes"]


def test_six_a_skewed_clock(examine, made, monkeypatch):
    real = time.time
    monkeypatch.setattr(time, "time", lambda: real() - 7200)

    code, wrong = examine()

    assert code == 0
    assert "2 h ahead of this host" in wrong["clock"] or "120 min ahead of this host" in wrong["clock"]
    assert "NTP" in wrong["clock"]


def test_seven_short_server_timeouts(examine, made):
    database = psycopg.conninfo.conninfo_to_dict(made)["dbname"]
    role = role_of(made)
    execute(made, f'ALTER ROLE "{role}" IN DATABASE "{database}" SET idle_session_timeout = \'1s\'')

    code, wrong = examine()

    assert code == 0
    assert "idle_session_timeout is 1" in wrong["time-outs"]


def test_eight_an_unlogged_table(examine, made):
    execute(made, "ALTER TABLE pglease_leases SET UNLOGGED")

    code, wrong = examine()

    assert code == 0
    assert "unlogged" in wrong["table"]
    assert "SET LOGGED" in wrong["table"]


def test_nine_an_old_schema(examine, dsn):
    execute(
        dsn,
        "CREATE TABLE pglease_leases (task_name varchar(255) PRIMARY KEY, owner_id varchar(255) NOT NULL, "
        "acquired_at timestamptz NOT NULL, expires_at timestamptz NOT NULL, heartbeat_at timestamptz NOT NULL)",
    )

    code, wrong = examine()

    assert code == 1
    assert "pglease 0.0.x" in wrong["table"]
    assert "pglease schema apply" in wrong["table"]


def test_ten_an_unreachable_server(examine):
    with closing(socket.socket()) as nobody:
        nobody.bind(("127.0.0.1", 0))
        port = nobody.getsockname()[1]
        code, wrong = examine("--dsn", f"postgresql://nobody@127.0.0.1:{port}/none?connect_timeout=2")

    assert code == 1
    assert wrong.keys() == {"reachable"}


def test_and_an_eleventh_a_table_from_before_the_history(examine, made):
    execute(made, "DROP TABLE pglease_leases_history")

    code, wrong = examine()

    assert code == 1
    assert "pglease schema apply" in wrong["table"]
