"""Our own connections: what is written below psycopg's cursors is what PostgreSQL reads, on a real server."""

from __future__ import annotations

import os
import signal
import socket
import threading
from collections.abc import Iterator

import psycopg
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from pglease.backends.postgres_connections import OwnConnections
from pglease.backends.postgres_dsn import Dsn
from pglease.backends.postgres_link import Link
from pglease.errors import BackendMisconfigured, BackendUnavailable
from tests.support.worlds import Stopwatch, budget, connect, execute, wait_until

TEXTS = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=40)
AWKWARD = [
    "",
    "NULL",
    "null",
    '"',
    "\\",
    '\\"',
    "{",
    "}",
    "{}",
    ",",
    "a,b",
    "'",
    " ",
    "\n",
    "\t",
    "é",
    "🙂",
    "%",
    "%s",
    "%%",
    "$1",
]


@pytest.fixture(params=["prepared", "unprepared"])
def connections(request, dsn) -> Iterator[OwnConnections]:
    made = OwnConnections(Dsn(dsn), pool_size=2, connect_timeout=10)
    made._report.unprepared = request.param == "unprepared"
    yield made
    made.close()


@pytest.fixture
def link(connections) -> Iterator[Link]:
    with connections.lend(budget(60)) as lent:
        yield lent


# -- what is written is what is read -----------------------------------------------------------------------------------


@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=TEXTS, more=st.lists(TEXTS, max_size=6))
@example(text="".join(AWKWARD), more=AWKWARD)
def test_texts_and_arrays_of_texts_come_back_to_the_letter(link, text, more):
    ((alone, together),) = link.rows(
        "SELECT %(text)s::text, pg_catalog.to_jsonb(%(more)s::text[])::text", {"text": text, "more": more}
    )

    assert alone == text
    assert link.rows("SELECT v FROM pg_catalog.jsonb_array_elements_text(%(j)s::jsonb) AS e(v)", {"j": together}) == [
        (one,) for one in more
    ]


@pytest.mark.parametrize("text", AWKWARD)
def test_awkward_texts_alone_and_in_an_array(link, text):
    ((alone, first, count),) = link.rows(
        "SELECT %(text)s::text, (%(more)s::text[])[1], pg_catalog.cardinality(%(more)s::text[])",
        {"text": text, "more": [text, text]},
    )

    assert (alone, first, count) == (text, text, 2)


def test_none_is_null_alone_and_in_an_array_and_the_word_null_is_a_word(link):
    ((alone, nulls, words),) = link.rows(
        """SELECT %(nothing)s::text, (SELECT count(*) FROM pg_catalog.unnest(%(more)s::text[]) AS u(v) WHERE v IS NULL),
                  (SELECT count(*) FROM pg_catalog.unnest(%(more)s::text[]) AS u(v) WHERE v = 'NULL')""",
        {"nothing": None, "more": [None, "NULL", None]},
    )

    assert (alone, nulls, words) == (None, 2, 1)


def test_an_empty_array_is_empty(link):
    assert link.rows("SELECT pg_catalog.cardinality(%(more)s::text[])", {"more": []}) == [(0,)]


@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    whole=st.integers(-(2**63), 2**63 - 1),
    real=st.floats(allow_nan=False),
    yes=st.booleans(),
    reals=st.lists(st.floats(allow_nan=False), max_size=5),
)
@example(whole=0, real=5e-324, yes=True, reals=[1e308, -0.0, 0.1, float("inf")])
def test_numbers_and_truth_come_back_exactly(link, whole, real, yes, reals):
    found = link.rows(
        """SELECT %(whole)s::bigint, %(real)s::float8, %(yes)s::boolean,
                  (SELECT count(*) FROM pg_catalog.unnest(%(reals)s::float8[]))::int""",
        {"whole": whole, "real": real, "yes": yes, "reals": reals},
    )

    assert found == [(whole, real, yes, len(reals))]
    assert isinstance(found[0][2], bool)


def test_a_parameter_may_stand_several_times_and_in_any_order(link):
    rows = link.rows("SELECT %(b)s::text || %(a)s::text || %(b)s::text", {"a": "1", "b": "2", "unused": "3"})

    assert rows == [("212",)]


def test_a_percent_sign_beside_parameters_is_doubled_as_everywhere(link):
    assert link.rows("SELECT 7 %% 4, %(a)s::text", {"a": "x"}) == [(3, "x")]
    assert link.rows("SELECT 7 % 4") == [(3,)]


def test_rows_of_every_kind_of_statement(link):
    link.script("CREATE TEMP TABLE t (n int); INSERT INTO t VALUES (1), (2)")

    assert link.rows("SELECT n FROM t ORDER BY n") == [(1,), (2,)]
    assert link.rows("SELECT n FROM t WHERE false") == []
    assert link.rows("UPDATE t SET n = n + %(by)s::int", {"by": 1}) == []
    assert link.rows("DELETE FROM t RETURNING n") == [(2,), (3,)]
    assert link.rows("SELECT NULL::int, NULL::boolean, NULL::float8") == [(None, None, None)]


# -- prepared, and not -------------------------------------------------------------------------------------------------


def prepared(link: Link) -> int:
    ((count,),) = link.connection.execute(
        "SELECT count(*) FROM pg_prepared_statements WHERE name LIKE 'pglease%'", prepare=False
    ).fetchall()
    return count


def test_a_statement_is_prepared_once_for_a_connection_unless_that_is_off(connections):
    for _ in range(3):
        with connections.lend(budget()) as link:
            for number in range(3):
                assert link.rows("SELECT %(n)s::int", {"n": number}) == [(number,)]
                assert link.rows("SELECT 1") == [(1,)]

    with connections.lend(budget()) as link:
        assert prepared(link) == (0 if connections._report.unprepared else 2)


def test_a_prepared_statement_that_the_session_lost_is_trouble_that_passes_and_preparing_ends(dsn):
    made = OwnConnections(Dsn(dsn), pool_size=1, connect_timeout=10)
    try:
        with made.lend(budget()) as link:
            link.rows("SELECT %(n)s::int", {"n": 1})
            link.script("DEALLOCATE ALL")
        with pytest.raises(BackendUnavailable) as caught, made.lend(budget()) as link:
            link.rows("SELECT %(n)s::int", {"n": 1})

        assert caught.value.sqlstate == "26000"
        with made.lend(budget()) as link:
            assert link.rows("SELECT %(n)s::int", {"n": 1}) == [(1,)]
            assert prepared(link) == 0
    finally:
        made.close()


# -- errors ------------------------------------------------------------------------------------------------------------


def test_a_refused_statement_is_ours_and_the_connection_stays_usable(connections, dsn):
    with connections.lend(budget()) as link:
        link.rows("SELECT 1")
        pid = link.connection.info.backend_pid

    with pytest.raises(BackendMisconfigured) as caught, connections.lend(budget()) as link:
        link.rows("SELECT nothing FROM nowhere")

    assert caught.value.sqlstate == "42P01"
    assert "nowhere" in str(caught.value)
    with connections.lend(budget()) as link:
        assert link.connection.info.backend_pid == pid
        assert link.rows("SELECT 1") == [(1,)]


def test_an_error_in_a_transaction_rolls_it_back(connections, dsn):
    execute(dsn, "CREATE TABLE t (n int)")

    with pytest.raises(BackendMisconfigured), connections.lend(budget()) as link, link.transaction():
        link.rows("INSERT INTO t VALUES (1)")
        link.rows("SELECT 1 / %(zero)s::int", {"zero": 0})

    assert execute(dsn, "SELECT count(*) FROM t") == [(0,)]
    with connections.lend(budget()) as link, link.transaction():
        link.rows("INSERT INTO t VALUES (1)")
    assert execute(dsn, "SELECT count(*) FROM t") == [(1,)]


def test_a_missing_parameter_is_a_mistake_of_ours_and_nothing_is_sent(connections):
    with pytest.raises(BackendMisconfigured, match="KeyError"), connections.lend(budget()) as link:
        link.rows("SELECT %(missing)s::text", {"other": 1})

    with connections.lend(budget()) as link:
        assert link.rows("SELECT 1") == [(1,)]


def test_a_session_that_was_ended_is_unavailable_and_the_next_conversation_has_another(connections, admin):
    with connections.lend(budget()) as link:
        link.rows("SELECT 1")
        pid = link.connection.info.backend_pid
    admin.execute("SELECT pg_terminate_backend(%s)", (pid,))
    wait_until(lambda: admin.execute("SELECT 1 FROM pg_stat_activity WHERE pid = %s", (pid,)).fetchone() is None)

    with pytest.raises(BackendUnavailable) as caught, connections.lend(budget()) as link:
        link.rows("SELECT 1")
    assert caught.value.outcome_unknown

    with connections.lend(budget()) as link:
        assert link.rows("SELECT 1") == [(1,)]


def test_a_statement_that_outlasts_its_budget_is_cut_off(connections):
    watch = Stopwatch()

    with (
        pytest.raises(BackendUnavailable, match="did not answer in time") as caught,
        connections.lend(budget(0.3)) as link,
    ):
        link.rows("SELECT pg_sleep(30)")

    assert caught.value.outcome_unknown
    assert 0.3 <= watch.seconds < 10
    with connections.lend(budget()) as link:
        assert link.rows("SELECT 1") == [(1,)]


def test_ctrl_c_in_mid_conversation_ends_it_and_its_connection_is_not_used_again(connections, admin):
    """Nobody knows to whom its next answer would belong."""
    with connections.lend(budget()) as link:
        pid = link.connection.info.backend_pid

    def interrupt() -> None:
        wait_until(
            lambda: admin.execute(
                "SELECT 1 FROM pg_stat_activity WHERE pid = %s AND query LIKE '%%pg_sleep%%' AND state = 'active'",
                (pid,),
            ).fetchone()
        )
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt), connections.lend(budget(20)) as link:
            thread.start()
            link.rows("SELECT pg_sleep(10)")
    finally:
        thread.join(10)
        signal.signal(signal.SIGINT, handler)

    with connections.lend(budget()) as link:
        assert link.rows("SELECT 1") == [(1,)]
        assert link.connection.info.backend_pid != pid


def test_an_error_of_the_drivers_never_shows_the_password(dsn, canary):
    made = OwnConnections(Dsn(dsn.replace(canary, canary[:-1])), pool_size=1, connect_timeout=3)
    try:
        loan = made.lend(budget(5))
        with pytest.raises(BackendMisconfigured, match="password authentication failed") as caught, loan as link:
            link.rows("SELECT 1")
        assert canary[:-1] not in str(caught.value) + repr(caught.value)
    finally:
        made.close()


# -- settling in -------------------------------------------------------------------------------------------------------


def test_our_sessions_are_named_and_autocommit_and_look_up_our_names_first(link):
    rows = link.rows("SELECT current_setting('application_name'), current_setting('search_path')")

    assert rows[0][0] == "pglease"
    assert rows[0][1].startswith("pg_catalog")
    assert link.connection.autocommit


@pytest.mark.parametrize("isolation", ["repeatable read", "serializable"])
def test_whatever_isolation_is_the_default_ours_is_read_committed(dsn, admin, database, isolation):
    admin.execute(f"ALTER DATABASE \"{database}\" SET default_transaction_isolation = '{isolation}'")
    made = OwnConnections(Dsn(dsn), pool_size=1, connect_timeout=10)
    try:
        with made.lend(budget()) as link:
            assert link.rows("SELECT current_setting('transaction_isolation')") == [("read committed",)]
    finally:
        made.close()


def test_a_read_only_server_is_unavailable(dsn, admin, database):
    admin.execute(f'ALTER DATABASE "{database}" SET default_transaction_read_only = on')
    made = OwnConnections(Dsn(dsn), pool_size=1, connect_timeout=10)
    try:
        with pytest.raises(BackendUnavailable, match="read-only"), made.lend(budget(2)) as link:
            link.rows("SELECT 1")
    finally:
        made.close()


def test_conversations_beyond_the_pool_wait_their_turn_and_renewals_have_a_connection_of_their_own(dsn):
    made = OwnConnections(Dsn(dsn), pool_size=1, connect_timeout=10)
    try:
        with made.lend(budget()):
            with pytest.raises(BackendUnavailable, match="no connection was free"), made.lend(budget(0.1)):
                pass
            with made.lend(budget(), reserved=True) as link:
                assert link.rows("SELECT 1") == [(1,)]
        with made.lend(budget(0.5)) as link:
            assert link.rows("SELECT 1") == [(1,)]
    finally:
        made.close()


def test_a_hundred_conversations_after_a_failed_one_find_the_pool_whole(connections):
    """No place is lost by an error of any kind."""
    for _ in range(20):
        with pytest.raises(BackendMisconfigured), connections.lend(budget()) as link:
            link.rows("SELECT nothing FROM nowhere")
        with pytest.raises(BackendMisconfigured), connections.lend(budget()):
            raise ZeroDivisionError

    with connections.lend(budget()) as one, connections.lend(budget()) as two:
        assert one.rows("SELECT 1") == two.rows("SELECT 1") == [(1,)]


def test_nothing_is_left_open_after_close(dsn, admin, database):
    made = OwnConnections(Dsn(dsn), pool_size=2, connect_timeout=10)
    with made.lend(budget()) as one, made.lend(budget()) as two:
        assert one.rows("SELECT 1") == two.rows("SELECT 1")

    made.close()
    made.close()

    wait_until(
        lambda: (
            admin.execute(
                "SELECT count(*) FROM pg_stat_activity WHERE datname = %s AND application_name = 'pglease'", (database,)
            ).fetchone()
            == (0,)
        )
    )


def test_closing_while_a_connection_is_made_into_a_hole_is_nothing_to_tell(caplog):
    """Somebody takes the connection and says nothing: the pool's thread is in there for as long as libpq waits."""
    with socket.create_server(("127.0.0.1", 0)) as hole:
        made = OwnConnections(
            Dsn(f"postgresql://me@127.0.0.1:{hole.getsockname()[1]}/db"), pool_size=1, connect_timeout=3
        )
        with pytest.raises(BackendUnavailable), made.lend(budget(0.2)):
            pytest.fail("nobody answers")

        made.close()

    assert caplog.records == []


def test_what_a_plain_connection_of_psycopg_reads_is_the_same(link, dsn):
    statement = "SELECT 1::int, 2::bigint, 1.5::float8, true, 'x'::text, NULL::text"

    with connect(dsn) as plain:
        assert link.rows(statement) == plain.execute(statement).fetchall()
    assert isinstance(link.connection, psycopg.Connection)
