"""What others on a server do to leases is found: each thing is really broken, and told with what to do."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import psycopg
import pytest

from pglease.backends import postgres_doctor as doctor
from pglease.backends import postgres_neighbours as neighbours
from pglease.backends import postgres_schema as schema
from pglease.backends.checks import Check
from pglease.backends.postgres_link import Link
from pglease.schema import table_names

NAMES = table_names()


@contextmanager
def linked(dsn: str, **options: Any) -> Iterator[Link]:
    with psycopg.connect(dsn, autocommit=True, **options) as connection:
        yield Link(connection)


@pytest.fixture
def made(dsn: str) -> str:
    """A store in order."""
    with linked(dsn) as link:
        schema.ensure(link, NAMES, create=True)
    return dsn


def visit(link: Link, probe: Callable[[], None] | None = None) -> list[Check]:
    @contextmanager
    def lend() -> Iterator[Link]:
        yield link

    return list(doctor.diagnose(lend, NAMES, probe))


def examined(dsn: str, name: str, **options: Any) -> Check:
    """The gravest check of that name."""
    with linked(dsn, **options) as link:
        found = [each for each in visit(link) if each.name == name]
    return max(found, key=lambda each: ("ok", "warn", "fail").index(each.status))


def add(dsn: str, name: str, **columns: str) -> None:
    """Write a record that is held, with SQL for some of its columns."""
    plain = {
        "owner_id": "'somebody'", "acquired_at": "now()", "heartbeat_at": "now()", "fencing_token": "1",
        "expires_at": "now() + interval '1 h'", "transitions": "0",
    } | columns  # fmt: skip
    with linked(dsn) as link:
        link.rows(
            f"INSERT INTO pglease_leases (task_name, {', '.join(plain)}) "
            f"VALUES (%(name)s::text, {', '.join(plain.values())})",
            {"name": name},
        )


# -- standbys ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("waited_for", "commit", "standbys", "status", "said"),
    [
        ("", "on", [], "ok", "none"),
        ("", "on", ["async", None], "ok", "may lose the last grants"),
        ("s1", "on", [], "fail", "none is there"),
        ("s1", "on", ["async", "potential"], "fail", "none is there"),
        ("s1", "on", ["sync"], "ok", "commits wait for s1"),
        ("s1", "on", [None], "ok", "commits wait for s1"),  # a role that may not see which
        ("s1", "local", [], "ok", "none"),
    ],
)
def test_a_standby_that_commits_wait_for_and_that_is_away_fails(waited_for, commit, standbys, status, said):
    found = neighbours._Around(waited_for, commit, standbys, [], "us", None, False, False, None)

    check = neighbours._standbys(found)

    assert check.status == status
    assert said in check.text
    assert bool(check.remedy) is (status != "ok")


# -- limits ------------------------------------------------------------------------------------------------------------


def test_a_database_that_is_nearly_full_of_connections_is_warned_of(made, admin, database):
    admin.execute(f'ALTER DATABASE "{database}" CONNECTION LIMIT 3')

    check = examined(made, "connections")

    assert check.status == "warn"
    assert "the database has room for" in check.text


def test_a_password_that_expires_soon_is_warned_of(made, admin_dsn):
    role = f"role_{uuid.uuid4().hex}"
    with linked(admin_dsn) as link:
        link.script(f"CREATE ROLE {role} VALID UNTIL 'tomorrow'; GRANT SELECT ON ALL TABLES IN SCHEMA public TO {role}")
        try:
            link.script(f"SET SESSION AUTHORIZATION {role}")
            (check,) = [each for each in visit(link) if each.name == "password"]
        finally:
            link.script(f"RESET SESSION AUTHORIZATION; DROP OWNED BY {role}; DROP ROLE {role}")

    assert check.status == "warn"
    assert f"the password of {role} expires in" in check.text
    assert "VALID UNTIL" in check.remedy


# -- rights of others --------------------------------------------------------------------------------------------------


def test_a_table_that_everybody_may_write_to_is_warned_of(made):
    with linked(made) as link:
        link.script("GRANT UPDATE ON pglease_leases TO PUBLIC")

    check = examined(made, "rights")

    assert check.status == "warn"
    assert "everybody who can connect may end leases" in check.text
    assert check.remedy.endswith("FROM PUBLIC")


def test_row_security_that_hides_records_is_warned_of(made):
    with linked(made) as link:
        link.script("ALTER TABLE pglease_leases ENABLE ROW LEVEL SECURITY, FORCE ROW LEVEL SECURITY")

    assert examined(made, "row security").status == "warn"


# -- sessions in the way -----------------------------------------------------------------------------------------------


def test_a_locked_table_fails_without_being_waited_for(made):
    with psycopg.connect(made) as stranger, linked(made) as link:
        stranger.execute("LOCK TABLE pglease_leases IN ACCESS EXCLUSIVE MODE")
        link.script("SET lock_timeout = '60s'")

        checks = visit(link, lambda: pytest.fail("probed"))

        pid = stranger.info.backend_pid
    (locks,) = [each for each in checks if each.name == "locks"]
    assert locks.status == "fail"
    assert f"process {pid} of" in locks.text
    assert f"SELECT pg_terminate_backend({pid})" in locks.remedy
    assert [each.name for each in checks if each.status == "fail"] == ["locks"]


def test_a_lock_that_is_gone_at_the_second_look_is_nothing_to_tell_of(made, monkeypatch):
    looks = iter([[neighbours._Lock(7, "AccessExclusiveLock", "us", "", 0.0)], []])
    monkeypatch.setattr(neighbours, "_ask_for_locks", lambda *_: next(looks))

    assert examined(made, "locks").status == "ok"


def test_a_transaction_that_has_locked_records_for_long_is_warned_of(made, monkeypatch):
    monkeypatch.setattr(neighbours, "LONG", 0.0)
    add(made, "job")
    with psycopg.connect(made) as forgotten:
        forgotten.execute("SELECT 1 FROM pglease_leases FOR UPDATE")

        check = examined(made, "locks")

    assert check.status == "warn"
    assert "may have locked records" in check.text
    assert "pg_terminate_backend" in check.remedy


def test_a_transaction_that_keeps_dead_rows_alive_is_warned_of(made, monkeypatch):
    monkeypatch.setattr(neighbours, "VERY_LONG", 0.0)
    with psycopg.connect(made) as reader:
        reader.execute("BEGIN ISOLATION LEVEL REPEATABLE READ")
        reader.execute("SELECT 1")

        check = examined(made, "snapshots")

        pid = reader.info.backend_pid
    assert check.status == "warn"
    assert f"process {pid}" in check.text
    assert check.remedy == f"SELECT pg_terminate_backend({pid})"


# -- records -----------------------------------------------------------------------------------------------------------


def test_a_clock_that_was_set_back_shows_in_the_records(made):
    add(made, "job", heartbeat_at="now() + interval '1 h'", expires_at="now() + interval '61 min'")

    check = examined(made, "records")

    assert check.status == "warn"
    assert "renewed 60 min in the future: the server's clock was set back" in check.text
    assert "pglease release NAME --token N" in check.remedy


@pytest.mark.parametrize(
    "column",
    [
        {"expires_at": "'infinity'"},
        {"heartbeat_at": "'infinity'"},
        {"fencing_token": "9223372036854775807"},
        {"fencing_token": "-1"},
    ],
)
def test_a_record_that_no_pglease_wrote_is_named(made, column):
    add(made, "in order")
    add(made, "forged", **column)

    check = examined(made, "records")

    assert check.status == "warn"
    assert "1 were not written by pglease, among them that of 'forged'" in check.text


@pytest.mark.parametrize("name", ["", "two\nlines", "x" * 256])
def test_a_name_that_no_pglease_takes_is_found(made, name):
    add(made, name)

    assert examined(made, "records").status == "warn"


def test_a_table_of_names_that_nobody_uses_any_more_is_told_the_cleanup(made, monkeypatch):
    monkeypatch.setattr(neighbours, "MANY_ENDED", 0)
    add(made, "past", expires_at="now() - interval '1 h'")

    check = examined(made, "records")

    assert check.status == "warn"
    assert "pglease cleanup" in check.remedy


def test_what_a_fork_of_postgresql_lacks_keeps_no_other_check_from_being_made(made, monkeypatch):
    monkeypatch.setattr(neighbours, "_AROUND", "SELECT nonsense")

    assert examined(made, "neighbours").status == "warn"
    assert examined(made, "vacuum").status == "ok"
