"""Guarded writes in the lease file itself: on sqlite3's own connections, SQLAlchemy's and Django's."""

from __future__ import annotations

import sqlite3
import sys
import threading
from contextlib import closing

import pytest
import sqlalchemy
from sqlalchemy.orm import Session

from pglease import PGLease
from pglease.errors import BackendUnavailable, ConfigurationError, FencedError
from pglease.records import Refused
from pglease.testing.harness import Hold
from tests.support import django_site
from tests.support.sqlite_files import StoppedWhileWriting, plain


@pytest.fixture
def hold(path, alice) -> Hold:
    """A hold of alice's, and in the same file a table of the application's."""
    held = alice.hold("job")
    with plain(path) as connection:
        connection.execute("CREATE TABLE report (body TEXT)")
    return held


@pytest.fixture
def connection(path, hold):
    """The application's connection, as `sqlite3.connect` makes it."""
    with closing(sqlite3.connect(path, timeout=0.3)) as made:
        yield made


def reports(path) -> list[str]:
    with plain(path) as connection:
        return [body for (body,) in connection.execute("SELECT body FROM report")]


def test_a_guarded_write_of_the_holder_is_committed(path, hold, connection) -> None:
    hold.guard(connection)
    connection.execute("INSERT INTO report VALUES ('mine')")
    connection.commit()

    assert reports(path) == ["mine"]


def test_a_refused_guard_takes_what_was_written_before_with_it(path, hold, connection, bob) -> None:
    hold.released()
    bob.hold("job")
    connection.execute("INSERT INTO report VALUES ('stale')")
    connection.rollback()

    connection.execute("INSERT INTO report VALUES ('stale')")
    with pytest.raises(FencedError):
        hold.guard(connection)
    connection.commit()

    assert reports(path) == []


def test_the_rows_of_the_application_may_have_any_shape(hold, connection) -> None:
    connection.row_factory = lambda cursor, row: {"a": row}
    connection.text_factory = bytes

    hold.guard(connection)


def test_a_hold_that_ran_out_while_the_guard_waited_for_the_lock_is_refused(path, alice, bob) -> None:
    """It is judged once the lock is there, not when it was asked for."""
    hold = alice.hold("job", 0.4)
    stopped = StoppedWhileWriting(path)
    timer = threading.Timer(1.0, stopped.end)
    timer.start()

    with closing(sqlite3.connect(path, timeout=20)) as connection, pytest.raises(FencedError):
        hold.guard(connection)

    timer.join()


def test_behind_somebody_who_writes_it_cannot_be_said(path, hold, connection) -> None:
    stopped = StoppedWhileWriting(path)
    try:
        with pytest.raises(BackendUnavailable, match="just now"):
            hold.guard(connection)
    finally:
        stopped.end()


def test_a_snapshot_from_before_somebodys_write_cannot_be_guarded(path, hold, connection, bob) -> None:
    connection.execute("BEGIN")
    connection.execute("SELECT count(*) FROM report").fetchall()
    bob.hold("other")

    with pytest.raises(BackendUnavailable, match="BEGIN IMMEDIATE"):
        hold.guard(connection)

    assert not connection.in_transaction


def test_a_connection_in_autocommit_mode_is_refused(path, hold) -> None:
    with (
        closing(sqlite3.connect(path, isolation_level=None)) as connection,
        pytest.raises(ConfigurationError, match="autocommit"),
    ):
        hold.guard(connection)


@pytest.mark.skipif(sys.version_info < (3, 12), reason="from Python 3.12 on")
@pytest.mark.parametrize("autocommit", [True, False])
def test_the_newer_way_of_transactions_is_understood(path, hold, autocommit) -> None:
    with closing(sqlite3.connect(path, autocommit=autocommit)) as connection:
        if autocommit:
            with pytest.raises(ConfigurationError, match="autocommit"):
                hold.guard(connection)
        else:
            hold.guard(connection)


def test_another_file_is_refused(tmp_path, hold, worker) -> None:
    for place in (tmp_path / "other.db", ":memory:"):
        with closing(sqlite3.connect(place)) as connection, pytest.raises(ConfigurationError, match="another file"):
            hold.guard(connection)


def test_a_connection_that_may_not_write_is_refused(path, hold) -> None:
    with (
        closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as connection,
        pytest.raises(ConfigurationError, match="may not write"),
    ):
        hold.guard(connection)


@pytest.mark.parametrize("thing", [None, 7, object(), "connection"])
def test_what_is_no_connection_is_refused(hold, thing) -> None:
    with pytest.raises(ConfigurationError, match="sqlite3"):
        hold.worker.backend.guard(hold.claim, thing)


def test_a_block_proves_it_again_where_the_transaction_was_begun_anew(path, hold, connection, bob) -> None:
    def write_after_a_rollback() -> None:
        with hold.worker.backend.guard(hold.claim, connection):
            connection.rollback()
            hold.released()
            bob.hold("job")
            connection.execute("INSERT INTO report VALUES ('stale')")

    with pytest.raises(FencedError):
        write_after_a_rollback()

    connection.commit()
    assert reports(path) == []


def test_an_error_of_the_blocks_own_comes_out_as_it_is(hold, connection, bob) -> None:
    with pytest.raises(KeyError) as caught, hold.worker.backend.guard(hold.claim, connection):
        connection.rollback()
        hold.released()
        connection.execute("INSERT INTO report VALUES ('stale')")
        raise KeyError("mine")

    assert "refused" in caught.value.__notes__[0]


def test_nothing_is_to_be_awaited(hold, connection) -> None:
    guard = hold.worker.backend.guard(hold.claim, connection)

    with pytest.raises(ConfigurationError, match="synchronous"):
        guard.__await__()


def test_after_the_commit_the_name_goes_to_whoever_asks(path, hold, connection, bob) -> None:
    hold.guard(connection)
    assert isinstance(bob.ask("job"), Refused)  # whoever only looks does not wait
    connection.commit()
    hold.released()

    bob.hold("job")


def test_a_fence_in_a_statement_writes_for_the_holder_alone(path, hold, connection, bob) -> None:
    fence = hold.worker.backend.fence_sql(hold.claim, "named")
    insert = f"INSERT INTO report SELECT :body WHERE {fence.sql}"
    assert connection.execute(insert, {"body": "mine", **fence.params}).rowcount == 1
    connection.commit()

    hold.released()
    taken = bob.hold("job")
    assert connection.execute(insert, {"body": "stale", **fence.params}).rowcount == 0
    connection.commit()

    assert reports(path) == ["mine"]
    assert taken.token == hold.token + 1


@pytest.fixture
def engine(path, hold):
    made = sqlalchemy.create_engine(f"sqlite:///{path}")
    yield made
    made.dispose()


def test_sqlalchemys_connection(path, hold, engine, bob) -> None:
    with engine.begin() as connection:
        hold.guard(connection)
        connection.exec_driver_sql("INSERT INTO report VALUES ('mine')")
    hold.released()
    bob.hold("job")

    def write() -> None:
        with engine.begin() as connection:
            connection.exec_driver_sql("INSERT INTO report VALUES ('stale')")
            hold.guard(connection)

    with pytest.raises(FencedError):
        write()
    assert reports(path) == ["mine"]


def test_sqlalchemys_session(path, hold, engine, bob) -> None:
    with Session(engine) as session:
        hold.guard(session)
        session.execute(sqlalchemy.text("INSERT INTO report VALUES ('mine')"))
        session.commit()
        hold.released()
        bob.hold("job")

        session.execute(sqlalchemy.text("INSERT INTO report VALUES ('stale')"))
        with pytest.raises(FencedError):
            hold.guard(session)
        session.commit()

    assert reports(path) == ["mine"]


def test_djangos_connection(path, hold, bob) -> None:
    from django.db.backends.sqlite3.base import DatabaseWrapper
    from django.db.transaction import Atomic

    django_site.set_up()
    from django.db import connections

    options = connections.configure_settings({"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": str(path)}})
    connection = DatabaseWrapper(options["default"], "pglease")
    connections["pglease"] = connection
    try:
        with Atomic("pglease", savepoint=True, durable=False):
            hold.guard(connection)
            connection.cursor().execute("INSERT INTO report VALUES ('mine')")
        hold.released()
        bob.hold("job")
        with pytest.raises(FencedError), Atomic("pglease", savepoint=True, durable=False):
            connection.cursor().execute("INSERT INTO report VALUES ('stale')")
            hold.guard(connection)
        with pytest.raises(ConfigurationError, match="atomic"):
            hold.guard(connection)
    finally:
        connection.close()
        del connections["pglease"]

    assert reports(path) == ["mine"]


def test_through_the_client(path) -> None:
    with (
        PGLease(f"sqlite:///{path}") as leases,
        leases.acquire("job", ttl=60) as lease,
        closing(sqlite3.connect(path)) as connection,
    ):
        connection.execute("CREATE TABLE report (body TEXT)")
        with lease.guard(connection):
            connection.execute("INSERT INTO report VALUES ('mine')")
        connection.commit()

    assert reports(path) == ["mine"]
