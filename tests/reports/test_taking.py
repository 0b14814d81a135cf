"""Taking a lease: one statement, the store's clock, and a borrowed connection that stays its owner's."""

from __future__ import annotations

import contextlib
import functools
import multiprocessing
import queue
import signal
import threading
from collections.abc import Callable
from contextlib import contextmanager

import psycopg
import psycopg2
import pytest

from pglease import (
    BackendUnavailable,
    ConfigurationError,
    HeldLease,
    NotAcquired,
    NotOwnedError,
    PGLease,
    PostgresBackend,
)
from pglease.records import Held, Released, Renewal, Unknown
from pglease.testing.local_postgres import LocalPostgres
from tests.support.worlds import (
    STEAL,
    TABLE,
    Stopwatch,
    all_at_once,
    ask,
    budget,
    child,
    clients,
    connect,
    execute,
    expire,
    grant,
    locked_row,
    nobody_waits,
    renew,
    row,
    store,
    two_clients,
    wait_until,
)

RACERS = 30
NAMES = 200

STARTER = """
say("ready")
while table := hear():
    try:
        client = PGLease(dsn, table_name=table)
        say(client.get_lease("anything"))
        client.close()
    except BaseException as error:
        say(repr(error))
"""

DYING = """
client = PGLease(dsn, owner_id="dead")
assert client.try_acquire("job", ttl=1)
say(client.held("job").fencing_token)
hear()
"""


@pytest.mark.parametrize("state", ["new", "expired"])
def test_many_who_ask_for_one_name_at_once_are_no_error(dsn, server_log, state):
    """One of twenty gets it, the others get False, and the server's log says nothing."""
    with clients(dsn, 20) as racers:
        if state == "expired":
            racers[0].try_acquire("job", heartbeat=False)
            expire(dsn, "job")
        for racer in racers:
            racer.get_lease("job")  # connected before the start

        answers = all_at_once([functools.partial(racer.try_acquire, "job") for racer in racers])

    assert sorted(answers) == [False] * 19 + [True]
    assert not [line for line in server_log() if "ERROR" in line]


def race(dsn: str, first: int, count: int, start, end, answers) -> None:
    """In a process of its own: `count` clients race for every name, each on its own thread."""

    def one(client: PGLease) -> list[tuple[bool, str, int]]:
        found = []
        for number in range(NAMES):
            block = client.acquire(f"name-{number}", ttl=60)
            start.wait(60)
            got = block.__enter__()
            found.append(
                (bool(got), got.lease.owner_id, got.lease.fencing_token) if got.lease else (False, "nobody", 0)
            )
            end.wait(60)
            block.__exit__(None, None, None)
        return found

    try:
        with clients(dsn, count) as ours:
            for place, client in enumerate(ours):
                client.taking._owner = f"racer-{first + place}"
                client.get_lease("name-0")
            answers.put((first, all_at_once([functools.partial(one, client) for client in ours])))
    except BaseException as error:
        start.abort()
        end.abort()
        answers.put((first, repr(error)))


def _told(answers, running):
    """Wait for one process's answer, as long as none has died."""

    def look():
        assert not any(process.exitcode for process in running), "a racing process died"
        with contextlib.suppress(queue.Empty):
            return answers.get(timeout=0.5)

    return wait_until(look)


def test_thirty_racers_in_processes_have_one_winner_a_round_and_every_loser_knows_him():
    """200 names, half new and half left behind by the dead: one grant each, no error, nothing in the server's log."""
    processes = 5
    context = multiprocessing.get_context("spawn")
    start, end, answers = context.Barrier(RACERS), context.Barrier(RACERS), context.Queue()
    with LocalPostgres() as server:
        with store(server.dsn) as backend:
            for number in range(0, NAMES, 2):
                grant(backend, f"name-{number}", owner="dead")
                expire(server.dsn, f"name-{number}")

        each = RACERS // processes
        running = [
            context.Process(target=race, args=(server.dsn, place * each, each, start, end, answers))
            for place in range(processes)
        ]
        for process in running:
            process.start()
        told = [answers.get(timeout=100) for _ in running]
        for process in running:
            process.join(20)
        log = server.log_text()

    broken = [told_by for told_by in told if isinstance(told_by[1], str)]
    assert not broken
    by_racer = [(first + place, found) for first, all_found in told for place, found in enumerate(all_found)]
    assert len(by_racer) == RACERS
    for number in range(NAMES):
        round_ = [(f"racer-{racer}", *found[number]) for racer, found in by_racer]
        winners = [(label, token) for label, won, _, token in round_ if won]
        assert len(winners) == 1, f"name-{number}: {winners}"
        ((winner, token),) = winners
        others = [(owner, seen) for _, _, owner, seen in round_ if (owner, seen) != (winner, token)]
        assert others == [], f"name-{number}: told of others than {winner}, token {token}"
        assert token == (2 if number % 2 == 0 else 1)
    assert "ERROR" not in log


@pytest.mark.parametrize("autocommit", [True, False])
@pytest.mark.parametrize("driver", [psycopg, psycopg2])
def test_what_a_dead_owner_left_behind_is_taken_over(dsn, driver, autocommit):
    """Also through borrowed connections, autocommit or not; the token grows."""
    with child(DYING, dsn) as dying:
        first = int(dying.hear())
        dying.send(signal.SIGKILL)
        dying.end()

    @contextmanager
    def factory():
        connection = driver.connect(dsn)
        connection.autocommit = autocommit
        try:
            yield connection
        finally:
            connection.close()

    with PGLease(PostgresBackend.from_connection_factory(factory)) as heir:
        lease = wait_until(lambda: heir.try_acquire("job") and heir.held("job"))

        assert lease.fencing_token == first + 1


def test_twelve_processes_that_start_together_on_an_empty_database_all_start(dsn):
    """Twenty rounds, each with tables that are not there yet."""
    processes = [child(STARTER, dsn) for _ in range(12)]
    starters = [process.__enter__() for process in processes]
    try:
        assert {starter.hear(60) for starter in starters} == {"ready"}
        for number in range(20):
            for starter in starters:
                starter.tell(f"leases_{number}")
            assert [starter.hear() for starter in starters] == ["None"] * 12
    finally:
        for process in processes:
            process.__exit__(None, None, None)

    ((tables,),) = execute(dsn, "SELECT count(*) FROM pg_class WHERE relname ~ '^leases_[0-9]+$'")
    assert tables == 20


def test_who_does_not_hold_it_cannot_renew_or_release_it(dsn):
    """Whatever the other tries, with an id or a handle of its own: refused, and the row is the same to the byte."""
    with store(dsn) as backend, two_clients(dsn) as (holder, other):
        assert holder.try_acquire("job", heartbeat=False)
        token = holder.held("job").fencing_token
        assert other.try_acquire("else", heartbeat=False)
        _, foreign_id = grant(backend, "another")
        before = row(dsn, "job")

        assert renew(backend, "job", foreign_id).reason == "taken"
        assert backend.release("job", foreign_id, budget()).reason == "taken"
        assert other.release("job") is False
        with pytest.raises(NotOwnedError):
            other.renew("job")
        assert other.held("job") is None
        for wrong in (token - 1, token + 1):
            if wrong > 0:
                assert other.force_release("job", wrong) is False

        assert row(dsn, "job") == before
        assert holder.held("job")


def test_a_former_holder_cannot_renew_release_or_extend_what_another_has_now(dsn):
    """Its handle is of a hold that is over, though the name is held."""
    with two_clients(dsn) as (former, present):
        assert former.try_acquire("job", heartbeat=False)
        lease = former.held("job")
        expire(dsn, "job")
        assert present.try_acquire("job", heartbeat=False)
        before = row(dsn, "job")

        assert lease.ensure(3600) is False
        with pytest.raises(NotOwnedError):
            lease.renew()
        assert lease.release() is False

        assert row(dsn, "job") == before


@pytest.mark.parametrize("driver", ["psycopg", "psycopg2", "sqlalchemy"])
def test_a_lease_is_refused_inside_the_callers_transaction(dsn, driver):
    """Before any SQL: the caller's row is neither committed nor rolled back."""
    execute(dsn, "CREATE TABLE orders (id int)")
    lend, close = LENDERS[driver](dsn)
    connection = lend()
    connection.cursor().execute("INSERT INTO orders VALUES (1)")

    @contextmanager
    def factory():
        yield connection

    with PGLease(PostgresBackend.from_connection_factory(factory)) as leases:
        for call in (
            lambda: leases.try_acquire("job"),
            lambda: leases.acquire("job").__enter__(),
            lambda: leases.get_lease("job"),
        ):
            with pytest.raises(ConfigurationError, match="inside a transaction"):
                call()

        assert execute(dsn, "SELECT count(*) FROM orders") == [(0,)]
        connection.commit()
        assert execute(dsn, "SELECT count(*) FROM orders") == [(1,)]
        assert leases.try_acquire("job")
    close()


def _psycopg(dsn: str) -> tuple[Callable, Callable]:
    connection = psycopg.connect(dsn)
    return (lambda: connection), connection.close


def _psycopg2(dsn: str) -> tuple[Callable, Callable]:
    connection = psycopg2.connect(dsn)
    return (lambda: connection), connection.close


def _sqlalchemy(dsn: str) -> tuple[Callable, Callable]:
    import sqlalchemy

    engine = sqlalchemy.create_engine(dsn.replace("postgresql:", "postgresql+psycopg:"))
    connection = engine.raw_connection()

    def close() -> None:
        connection.close()
        engine.dispose()

    return (lambda: connection), close


LENDERS = {"psycopg": _psycopg, "psycopg2": _psycopg2, "sqlalchemy": _sqlalchemy}


@pytest.mark.parametrize("name", ["x", "n" * 255, "🐘" * 255, "a b%s'\"\\{}"], ids=["one", "longest", "emoji", "odd"])
def test_any_legal_name_is_held_under_that_very_name(dsn, name):
    """Nothing is cut, folded or hashed."""
    with two_clients(dsn) as (one, other):
        assert one.try_acquire(name)
        assert other.try_acquire(name) is False
        assert one.get_lease(name).task_name == name
        assert [lease.name for lease in other.list_leases()] == [name]
        assert execute(dsn, f"SELECT task_name FROM {TABLE}") == [(name,)]


@pytest.mark.parametrize(
    "name",
    ["", "n" * 256, "n" * 2000, "a\0b", "a\nb", "\ud800", None, 5, b"x"],
    ids=["empty", "256", "2000", "nul", "newline", "surrogate", "none", "number", "bytes"],
)
def test_any_other_name_is_refused_before_anything_is_sent(name):
    """Where a decorator is used, when it is used; there is no server here at all."""
    leases = PGLease("postgresql://nobody@127.0.0.1:9/nowhere")
    try:
        for call in (
            leases.acquire,
            leases.try_acquire,
            leases.wait_for_lease,
            lambda wrong: leases.singleton_task(wrong)(len),
            leases.get_lease,
            leases.release,
            leases.renew,
            leases.held,
            functools.partial(leases.force_release, fencing_token=1),
        ):
            with pytest.raises(ConfigurationError):
                call(name)
    finally:
        leases.close()


# -- a row that somebody else has locked

STRENGTHS = ["KEY SHARE", "UPDATE"]


@contextmanager
def lapsing_row(dsn: str, strength: str, ttl: float = 0.3):
    """A hold that lapses while a stranger has its row locked: the store, record, id, stranger and the lapse."""
    with store(dsn) as backend:
        lease, lease_id = grant(backend, "job", ttl, "first")
        with locked_row(dsn, "job", strength) as stranger, nobody_waits(dsn):

            def lapsed() -> None:
                wait_until(lambda: backend.get("job", budget()).is_expired())

            yield backend, lease, lease_id, stranger, lapsed


def refusal(ask) -> str:
    """What is said of a row that stays locked; asked again where a busy machine did not come as far as the row."""
    while True:
        with pytest.raises(BackendUnavailable) as told:
            ask()
        if "no connection" not in str(told.value):
            return str(told.value)


def is_sane(lease) -> bool:
    """Whether a grant has not been born expired."""
    return not lease.is_expired() and lease.time_remaining() > 0


@pytest.mark.parametrize("strength", STRENGTHS)
def test_asking_for_a_lapsed_name_whose_row_is_locked_is_an_answer_at_once(dsn, strength):
    """Refused with the record; granted, with its whole ttl, once the row is let go."""
    with lapsing_row(dsn, strength) as (backend, first, _, stranger, lapsed):
        refused, _ = ask(backend, "job")
        assert refused.lease.owner_id == "first"
        lapsed()

        watch = Stopwatch()
        busy, _ = ask(backend, "job", owner="second")
        assert watch.seconds < 5
        assert busy.lease.owner_id == "first"
        assert 0 < busy.retry_after < 1

        stranger.rollback()
        second, _ = grant(backend, "job", 60, "second")
        assert is_sane(second)
        assert second.time_remaining() == pytest.approx(60, abs=0.01)
        assert second.fencing_token == first.fencing_token + 1


SLOW_TAKEOVER = STEAL.replace("UPDATE", "WITH rival AS (UPDATE") + " RETURNING 1) SELECT pg_sleep(%s) FROM rival"
SLOW_BIRTH = f"""
WITH rival AS (
  INSERT INTO {TABLE} SELECT %s, %s, now(), now() + interval '60 s', now(), gen_random_uuid(), 1
  WHERE pg_try_advisory_xact_lock(hashtextextended(%s COLLATE "C", '{TABLE}'::regclass::oid::int8)) RETURNING 1
) SELECT pg_sleep(%s) FROM rival
"""


@pytest.mark.parametrize("state", ["new", "expired"])
def test_who_loses_to_a_rival_whose_statement_is_under_way_hears_of_the_rival(dsn, state):
    """However long the rival's commit takes, within two seconds: the loser is told of it, not of who was before."""
    with store(dsn) as backend, connect(dsn) as rival:
        if state == "expired":
            grant(backend, "job", owner="before")
            expire(dsn, "job")
            statement, params = SLOW_TAKEOVER, ("rival", "job", 0.7)
        else:
            backend.get("job", budget())
            statement, params = SLOW_BIRTH, ("job", "rival", "job", 0.7)
        thread = threading.Thread(target=rival.execute, args=(statement, params))
        thread.start()
        asleep = "SELECT 1 FROM pg_stat_activity WHERE pid = %s AND wait_event = 'PgSleep'"
        wait_until(lambda: execute(dsn, asleep, rival.info.backend_pid))

        refused, _ = ask(backend, "job", owner="loser")

        thread.join(10)
        assert refused.lease.owner_id == "rival"
        assert refused.retry_after > 50


def test_a_strangers_idle_transaction_that_has_written_the_row_is_no_rival(dsn):
    """It may stay open for ever: busy, soon, with the record of who was before."""
    with store(dsn) as backend, connect(dsn, autocommit=False) as stranger:
        grant(backend, "job", owner="before")
        expire(dsn, "job")
        stranger.execute(STEAL, ("stranger", "job"))

        watch = Stopwatch()
        busy, _ = ask(backend, "job", owner="second")

        assert watch.seconds < 8
        assert busy.lease.owner_id == "before"
        assert busy.retry_after < 1
        stranger.rollback()
        assert grant(backend, "job")[0].fencing_token == 2


@pytest.mark.parametrize("strength", STRENGTHS)
def test_a_waiter_gets_a_lapsed_name_as_soon_as_its_row_is_let_go(dsn, strength):
    """It waits by looking, never in the server; what it then gets has its whole ttl."""
    named = PGLease(f"{dsn}?application_name=waiter")
    with lapsing_row(dsn, strength) as (_, first, _, stranger, lapsed), named as waiter:
        lapsed()
        waiting = []
        thread = threading.Thread(
            target=lambda: waiting.append(waiter.wait_for_lease("job", ttl=60, timeout=10, poll_interval=0.1))
        )
        thread.start()
        has_looked = (
            "SELECT 1 FROM pg_stat_activity WHERE application_name = 'waiter' AND datname = current_database() "
            "AND state = 'idle' AND query LIKE '%clock_timestamp%'"
        )
        wait_until(lambda: execute(dsn, has_looked))
        stranger.rollback()
        thread.join(5)

        (lease,) = waiting
        assert lease.fencing_token == first.fencing_token + 1
        assert lease.lease.time_remaining() == pytest.approx(60, abs=0.01)


def test_a_renewal_beside_a_guard_goes_through_but_revives_nothing(dsn):
    """KEY SHARE does not stop a heartbeat; once the hold lapsed, no lock revives it."""
    with lapsing_row(dsn, "KEY SHARE", ttl=1) as (backend, first, lease_id, stranger, lapsed):
        held = renew(backend, "job", lease_id, ttl=0.3)
        assert held.lease.fencing_token == first.fencing_token
        assert held.lease.time_remaining() == pytest.approx(0.3, abs=0.01)
        lapsed()

        assert renew(backend, "job", lease_id).reason == "expired"
        stranger.rollback()
        assert renew(backend, "job", lease_id).reason == "expired"
        assert backend.get("job", budget()).is_expired()


def test_a_renewal_of_a_row_that_is_locked_is_unknown_and_revives_nothing(dsn):
    """It neither waits nor stalls the other renewals of its batch; let go after the lapse, the hold is over."""
    with lapsing_row(dsn, "UPDATE") as (backend, _, lease_id, stranger, lapsed):
        _, other_id = grant(backend, "other")
        batch = [Renewal("job", lease_id, 60), Renewal("other", other_id, 60)]
        watch = Stopwatch()
        locked, renewed = backend.renew(batch, budget())
        assert (type(locked), type(renewed)) == (Unknown, Held)
        lapsed()
        locked, renewed = backend.renew(batch, budget())
        assert (type(locked), type(renewed)) == (Unknown, Held)
        assert watch.seconds < 8

        stranger.rollback()
        gone, renewed = backend.renew(batch, budget())
        assert gone.reason == "expired"
        assert isinstance(renewed, Held)
        assert backend.get("job", budget()).is_expired()


def test_a_release_beside_a_guard_frees_the_name(dsn):
    """KEY SHARE does not stop a release, before the lapse; after it, there is nothing to release."""
    with lapsing_row(dsn, "KEY SHARE", ttl=60) as (backend, _, lease_id, _, _):
        assert isinstance(backend.release("job", lease_id, budget()), Released)
        assert backend.get("job", budget()).is_expired()
    execute(dsn, f"DELETE FROM {TABLE}")
    with lapsing_row(dsn, "KEY SHARE") as (backend, _, lease_id, _, lapsed):
        lapsed()
        assert backend.release("job", lease_id, budget()).reason == "expired"


def test_a_release_of_a_row_that_is_locked_is_tried_again_within_its_time(dsn):
    """It ends by its budget and can be repeated; so near its end it waits in no queue of the server."""
    with lapsing_row(dsn, "UPDATE") as (backend, _, lease_id, stranger, lapsed):
        watch = Stopwatch()
        assert "locked by another session" in refusal(lambda: backend.release("job", lease_id, budget(0.5)))
        assert watch.seconds < 8
        lapsed()
        stranger.rollback()
        assert backend.release("job", lease_id, budget()).reason == "expired"
        assert backend.get("job", budget()).is_expired()


@pytest.mark.parametrize("strength", STRENGTHS)
def test_force_release_of_a_row_that_is_locked_neither_waits_nor_revives(dsn, strength):
    """Past the guard it goes; a locked row is tried again within the time; a lapsed hold is nobody's to end."""
    with lapsing_row(dsn, strength, ttl=0.8) as (backend, first, _, stranger, lapsed):
        if strength == "UPDATE":
            said = refusal(lambda: backend.force_release("job", first.fencing_token, budget(0.2)))
            assert "locked by another session" in said
            lapsed()
            stranger.rollback()
            assert backend.force_release("job", first.fencing_token, budget()) is False
        else:
            assert backend.force_release("job", first.fencing_token, budget()) is True
            assert backend.force_release("job", first.fencing_token, budget()) is False
        assert backend.get("job", budget()).is_expired()


@pytest.mark.parametrize("strength", STRENGTHS)
def test_looking_listing_and_cleaning_pass_by_a_locked_row(dsn, strength):
    """They see it, and cleaning leaves it until it is let go."""
    with lapsing_row(dsn, strength) as (backend, _, _, stranger, lapsed):
        lapsed()
        watch = Stopwatch()
        assert backend.get("job", budget()).owner_id == "first"
        assert [lease.name for lease in backend.list("", budget())] == ["job"]
        assert backend.cleanup(0.0, budget()) == 0
        assert watch.seconds < 8
        assert backend.get("job", budget()) is not None

        stranger.rollback()
        assert backend.cleanup(0.0, budget()) == 1
        assert grant(backend, "job")[0].fencing_token == 2


def test_the_body_of_a_block_gets_either_word(dsn):
    """True and the holder, or false and who has it: contention is an answer."""
    with two_clients(dsn) as (one, other), one.acquire("job") as held, other.acquire("job") as refused:
        assert isinstance(held, HeldLease)
        assert isinstance(refused, NotAcquired)
        assert (bool(held), bool(refused), refused.held_by) == (True, False, "first")
