"""What a driver's error means for us, as a table."""

from __future__ import annotations

import psycopg
import psycopg2
import psycopg_pool
import pytest
from psycopg import errors as sqlstates

from pglease.backends.postgres_errors import is_transport, sqlstate, translated
from pglease.errors import BackendMisconfigured, BackendUnavailable


def three(state: str) -> list[Exception]:
    """One SQLSTATE as psycopg 3, psycopg2 and SQLAlchemy say it."""
    ours = psycopg.errors.lookup(state)("it failed")

    class Two(psycopg2.Error):
        pgcode = state

    class Wrapped(Exception):
        orig = Two("it failed")

    return [ours, Two("it failed"), Wrapped("it failed")]


@pytest.mark.parametrize(
    ("state", "kind", "may_have_been_applied"),
    [
        ("08006", BackendUnavailable, True),  # connection_failure
        ("08P01", BackendUnavailable, True),  # protocol_violation, as poolers say it
        ("57P01", BackendUnavailable, True),  # admin_shutdown
        ("57P02", BackendUnavailable, True),  # crash_shutdown
        ("57P03", BackendUnavailable, True),  # cannot_connect_now
        ("58000", BackendUnavailable, True),  # system_error
        ("XX000", BackendUnavailable, True),  # internal_error
        ("40003", BackendUnavailable, True),  # statement_completion_unknown
        ("25006", BackendUnavailable, False),  # read_only_sql_transaction: a standby after a switchover
        ("25P03", BackendUnavailable, False),  # idle_in_transaction_session_timeout
        ("40001", BackendUnavailable, False),  # serialization_failure
        ("40P01", BackendUnavailable, False),  # deadlock_detected
        ("53100", BackendUnavailable, False),  # disk_full
        ("53200", BackendUnavailable, False),  # out_of_memory
        ("53300", BackendUnavailable, False),  # too_many_connections
        ("55P03", BackendUnavailable, False),  # lock_not_available
        ("57014", BackendUnavailable, False),  # query_canceled, statement_timeout
        ("26000", BackendUnavailable, True),  # a pooler's session without our statement
        ("42P05", BackendUnavailable, False),  # or with it already
        ("0A000", BackendUnavailable, True),  # cached plan must not change result type
        ("22001", BackendMisconfigured, False),  # string_data_right_truncation
        ("23502", BackendMisconfigured, False),  # not_null_violation: somebody else's column
        ("28P01", BackendMisconfigured, False),  # invalid_password
        ("3D000", BackendMisconfigured, False),  # invalid_catalog_name
        ("3F000", BackendMisconfigured, False),  # invalid_schema_name
        ("42501", BackendMisconfigured, False),  # insufficient_privilege
        ("42703", BackendMisconfigured, False),  # undefined_column
        ("42P01", BackendMisconfigured, False),  # undefined_table
        ("54000", BackendMisconfigured, False),  # program_limit_exceeded
    ],
)
def test_the_sqlstate_decides_whichever_driver_gave_it(state, kind, may_have_been_applied):
    for error in three(state):
        ours = translated(error, str, sent=True)

        assert type(ours) is kind
        assert ours.sqlstate == state
        assert getattr(ours, "outcome_unknown", False) is may_have_been_applied


@pytest.mark.parametrize(
    ("state", "advice"), [("42501", "pglease schema grants"), ("42P01", "pglease schema apply"), ("42703", "42703")]
)
def test_what_mends_a_wrong_setup_is_said(state, advice):
    assert advice in str(translated(three(state)[0], str, sent=True))


@pytest.mark.parametrize(
    "error",
    [
        psycopg.OperationalError("consuming input failed"),
        psycopg.InterfaceError("the connection is closed"),
        psycopg2.OperationalError("server closed the connection unexpectedly"),
        psycopg2.InterfaceError("connection already closed"),
        psycopg_pool.PoolTimeout("couldn't get a connection after 1.00 sec"),
        psycopg_pool.PoolClosed("the pool is closed"),
        ConnectionResetError(104, "Connection reset by peer"),
        BrokenPipeError(32, "Broken pipe"),
        TimeoutError("timed out"),
    ],
    ids=lambda error: type(error).__module__ + "." + type(error).__name__,
)
@pytest.mark.parametrize("sent", [True, False])
def test_a_broken_conversation_without_a_sqlstate_is_unavailable(error, sent):
    ours = translated(error, str, sent=sent)

    assert is_transport(error)
    assert type(ours) is BackendUnavailable
    assert ours.outcome_unknown is sent
    assert ours.sqlstate is None


@pytest.mark.parametrize(
    "text",
    [
        'connection failed: FATAL:  password authentication failed for user "me"',
        "fe_sendauth: no password supplied",
        'FATAL:  no pg_hba.conf entry for host "10.0.0.1"',
        'FATAL:  database "shop" does not exist',
        'FATAL:  role "me" is not permitted to log in',
        "FATAL:  unsupported startup parameter: options",
        'invalid sslmode value: "sometimes"',
        'root certificate file "/x" does not exist',
        "server does not support SSL, but SSL was required",
    ],
)
def test_a_connection_that_can_never_be_made_is_misconfigured(text):
    ours = translated(psycopg.OperationalError(text), str, sent=False)

    assert type(ours) is BackendMisconfigured


@pytest.mark.parametrize(
    "text",
    [
        'connection to server at "10.0.0.1", port 5432 failed: Connection refused',
        "could not translate host name to address: Temporary failure in name resolution",
        "FATAL:  the database system is starting up",
        "FATAL:  sorry, too many clients already",
        "connection timeout expired",
        "server closed the connection unexpectedly",
    ],
)
def test_a_connection_that_may_be_made_later_is_unavailable(text):
    ours = translated(psycopg.OperationalError(text), str, sent=False)

    assert type(ours) is BackendUnavailable
    assert ours.outcome_unknown is False


@pytest.mark.parametrize(
    ("text", "sent", "told"),
    [
        ("connection failed: Connection refused", False, True),
        ('connection to socket "/x/.s.PGSQL.5432" failed: No such file or directory', False, True),
        ('could not translate host name "db" to address', False, True),
        ("failed to resolve host 'db'", False, True),
        ("connection timeout expired", False, False),
        ("Connection refused", True, False),
    ],
)
def test_where_nobody_answers_the_door_the_address_is_to_be_looked_at(text, sent, told):
    ours = translated(psycopg.OperationalError(text), str, sent=sent)

    assert ("whether the address is right" in str(ours)) is told


def test_a_statement_that_the_driver_refused_is_misconfigured():
    ours = translated(
        psycopg.ProgrammingError("the query has 0 placeholders but 1 parameters were passed"), str, sent=True
    )

    assert type(ours) is BackendMisconfigured
    assert "ProgrammingError" in str(ours)


def test_only_the_first_line_is_kept_and_scrubbed():
    error = psycopg.OperationalError("connection of hunter22 failed\n\tIs the server running?\n")

    ours = translated(error, lambda text: text.replace("hunter22", "***"), sent=False)

    assert str(ours) == "PostgreSQL cannot be reached: connection of *** failed"


def test_an_error_without_a_text_is_named():
    assert "OperationalError" in str(translated(psycopg.OperationalError(), str, sent=True))


def test_the_sqlstate_is_found_below_sqlalchemys_wrapper_and_not_where_there_is_none():
    assert [sqlstate(error) for error in three("40P01")] == ["40P01"] * 3
    assert sqlstate(ValueError("nothing")) is None
    assert sqlstate(psycopg.OperationalError("nothing")) is None


def test_a_refused_statement_is_no_broken_conversation():
    assert not is_transport(sqlstates.UndefinedTable("nothing"))
    assert not is_transport(ValueError("nothing"))
