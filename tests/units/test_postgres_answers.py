"""What PostgreSQL and its drivers seldom say: told by a link that answers as they would."""

from __future__ import annotations

import asyncio
import errno
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import psycopg
import pytest
from psycopg import errors as states

from pglease.backends import postgres, postgres_asking, postgres_epochs, postgres_guard, postgres_neighbours
from pglease.backends.postgres import PostgresBackend
from pglease.backends.postgres_callers import FAILED, GONE, IDLE, OPEN, _Alchemy, _Asyncpg, _Django
from pglease.backends.postgres_connections import BorrowedConnections, OwnConnections, _Attempt
from pglease.backends.postgres_dsn import Dsn
from pglease.backends.postgres_epochs import Quarantine
from pglease.backends.postgres_fencing import AsyncPostgresGuard, PostgresGuard, Whereabouts
from pglease.backends.postgres_listen import PostgresSubscription, _change
from pglease.backends.postgres_waiting import Listening, in_turn
from pglease.errors import BackendClosed, BackendError, BackendMisconfigured, BackendUnavailable, ConfigurationError
from pglease.records import Claim, Refused, Request
from pglease.schema import PROTOCOL, table_names
from pglease.testing.harness import budget, new_id

NAMES = table_names()
NOWHERE = "postgresql://nobody@127.0.0.1:1/nowhere"
SQL: Any = SimpleNamespace(
    try_acquire="try",
    try_acquire_many="many",
    why="why",
    adopt="adopt",
    head="head",
    turn_lock="lock",
    raise_epoch="raise",
)


class Link:
    """Answers each statement with what stands there for it, the last one for ever; an error is raised."""

    def __init__(self, **answers: list[Any]) -> None:
        self._answers = answers
        self.asked: list[str] = []

    def rows(self, statement: str, params: Any = None) -> Any:
        self.asked.append(statement)
        waiting = self._answers.get(statement) or self._answers["anything"]
        answer = waiting.pop(0) if len(waiting) > 1 else waiting[0]
        if isinstance(answer, Exception):
            raise answer
        return answer

    def transaction(self) -> Any:
        return nullcontext()


def request(name: str = "job", *, owner: str = "me", ticket: str | None = None) -> Request:
    return Request(name, owner, new_id(), 60.0, ticket_id=ticket)


def ask(link: Any, *, pause: Any = lambda _: False, within: float = 60.0) -> Any:
    asked = request()
    params = {"name": asked.name}
    return postgres_asking.ask(link, SQL, asked, params, budget(within), quarantine=Quarantine.of(0), pause=pause)


# -- asking ------------------------------------------------------------------------------------------------------------

CONTENDED = [(PROTOCOL, False, None, True)]
QUIET = [(PROTOCOL, False, None, False)]


def test_a_rivals_statement_is_followed_no_longer_than_there_is_time_and_the_backend_is_open() -> None:
    pauses: list[float] = []

    def closed_at_the_third(seconds: float) -> bool:
        pauses.append(seconds)
        return len(pauses) == 3

    link = Link(why=[CONTENDED], **{"try": [[]]})
    assert isinstance(ask(link, pause=closed_at_the_third), Refused)
    assert pauses == sorted(pauses)
    assert link.asked.count("try") == 3

    link = Link(why=[CONTENDED], **{"try": [[]]})
    assert isinstance(ask(link, within=0.0), Refused)
    assert link.asked == ["try", "why"]


@pytest.mark.parametrize("marks", [[], [(PROTOCOL + 1, False, None, False)]], ids=["no mark", "another's"])
def test_a_table_of_another_protocol_is_refused_while_asking(marks: Any) -> None:
    with pytest.raises(BackendMisconfigured, match=f"this pglease speaks {PROTOCOL}"):
        ask(Link(**{"try": [[]], "why": [marks]}))


def adopt(link: Any) -> Any:
    return postgres_asking.adopt(link, SQL, {"name": "job"}, quarantine=Quarantine.of(0))


def test_a_hold_is_handed_over_in_the_next_epoch_where_the_store_has_moved() -> None:
    link = Link(adopt=[[("held",)], []], why=[[(PROTOCOL, True, None, False)]], **{"raise": [[(2,)]]})

    assert adopt(link).reason == "deleted"

    assert link.asked == ["adopt", "why", "raise", "adopt"]


def test_a_hold_that_cannot_be_handed_over_now_is_trouble_that_passes() -> None:
    with pytest.raises(BackendUnavailable, match="nothing is granted at present"):
        adopt(Link(adopt=[[("held",)]], why=[QUIET]))


@pytest.mark.parametrize("error", [states.UniqueViolation(), states.LockNotAvailable()])
def test_several_leases_of_which_somebody_makes_one_at_this_moment_are_asked_for_otherwise(error: Exception) -> None:
    assert postgres_asking.ask_for_all(Link(many=[error]), SQL, [request()], {}) is None  # type: ignore[arg-type]

    with pytest.raises(psycopg.errors.UndefinedTable):
        postgres_asking.ask_for_all(Link(many=[states.UndefinedTable()]), SQL, [request()], {})  # type: ignore[arg-type]


def test_several_leases_that_are_not_alike_are_asked_for_otherwise() -> None:
    store = PostgresBackend(NOWHERE)

    assert store.try_acquire_many([request(owner="me"), request(owner="you")], budget()) is None

    store.close()


def test_who_comes_to_the_head_of_a_queue_while_its_row_is_locked_is_let_first() -> None:
    link: Any = Link(head=[[(True, None, 0.0)], [(False, "first", 3.0)]], lock=[[(1,)]])

    assert in_turn(link, SQL, request(), {}, lambda _: pytest.fail("asked out of turn")) == Refused(None, 3.0, "first")


# -- epochs and places -------------------------------------------------------------------------------------------------


def test_a_server_whose_functions_fail_cannot_tell_its_lineage_and_any_other_trouble_is_trouble() -> None:
    said = states.FeatureNotSupported("not on this fork\nHINT: none")
    told = postgres_epochs.ask_lineage(Link(anything=[[("me", "")], said]), NAMES)  # type: ignore[arg-type]
    assert (told.present, told.untold) == (None, "not on this fork")

    with pytest.raises(psycopg.errors.AdminShutdown):
        postgres_epochs.ask_lineage(Link(anything=[[("me", "")], states.AdminShutdown()]), NAMES)  # type: ignore[arg-type]


def test_trouble_while_an_epoch_begins_is_no_lack_of_rights() -> None:
    with pytest.raises(psycopg.errors.AdminShutdown):
        postgres_epochs.raise_epoch(Link(**{"raise": [states.AdminShutdown()]}), SQL, Quarantine.of(0))  # type: ignore[arg-type]


def test_a_server_that_does_not_tell_its_identifier_is_told_by_the_rest() -> None:
    found = [("base/5/16400", 5, "2026-01-01", False, "{16400}", None)]
    place = postgres_guard.find(Link(anything=[states.InsufficientPrivilege(), found]), NAMES)  # type: ignore[arg-type]
    assert (place.path, place.system) == ("base/5/16400", None)
    assert "transaction_timeout" not in postgres_guard.guard(place, 60.0).replace("idle_in_transaction", "")

    with pytest.raises(psycopg.errors.AdminShutdown):
        postgres_guard.find(Link(anything=[states.AdminShutdown()]), NAMES)  # type: ignore[arg-type]


# -- guards ------------------------------------------------------------------------------------------------------------


def test_a_guard_that_is_answered_neither_way_has_proved_nothing() -> None:
    claim = Claim("job", new_id(), 1)
    where = Whereabouts(lambda: postgres_guard.Place('"pglease_leases"', "base/5/1", "5", "now", False, "{1}", 7))

    async def unanswered(*_: Any) -> None:
        """No row: the answer of a statement that found nothing to lock."""

    async def awaited() -> None:
        await AsyncPostgresGuard(claim, waiting, None, where, 60.0)

    plain: Any = SimpleNamespace(run=lambda *_: None, state=lambda _: OPEN)
    with pytest.raises(BackendError, match="'job' was not answered"):
        PostgresGuard(claim, plain, None, where, 60.0).prove()
    waiting: Any = SimpleNamespace(run=unanswered, state=lambda _: OPEN)
    with pytest.raises(BackendError, match="'job' was not answered"):
        asyncio.run(awaited())


def test_an_asynchronous_guard_is_proved_once_however_it_is_asked_for() -> None:
    runs: list[int] = []

    async def run(*_: Any) -> Any:
        runs.append(1)
        return (1,)

    where = Whereabouts(lambda: postgres_guard.Place('"pglease_leases"', "base/5/1", "5", "now", False, "{1}", 7))
    caller: Any = SimpleNamespace(run=run, state=lambda _: IDLE)
    guard = AsyncPostgresGuard(Claim("job", new_id(), 1), caller, None, where, 60.0)

    async def use() -> None:
        async with await guard:  # what was committed inside needs no second look
            pass

    asyncio.run(use())

    assert runs == [1]


# -- other people's connections ----------------------------------------------------------------------------------------


def test_djangos_connection_is_known_by_its_vendor_and_what_it_has_been_through() -> None:
    with pytest.raises(ConfigurationError, match="not to sqlite"):
        _Django().state(SimpleNamespace(vendor="sqlite"))
    assert _Django().state(SimpleNamespace(vendor="postgresql", needs_rollback=True)) == FAILED


def test_sqlalchemys_connection_is_known_by_what_became_of_it() -> None:
    dialect = SimpleNamespace(name="postgresql")

    assert _Alchemy().state(SimpleNamespace(dialect=dialect, closed=False, invalidated=True)) == GONE
    old: Any = SimpleNamespace(dialect=dialect, closed=False, invalidated=False, in_transaction=lambda: False)
    assert _Alchemy().state(old) == IDLE


def test_asyncpgs_connection_may_be_closed() -> None:
    assert _Asyncpg().state(SimpleNamespace(is_closed=lambda: True)) == GONE


@contextmanager
def lent(thing: Any) -> Any:
    yield thing


@pytest.mark.parametrize(
    ("thing", "error", "said"),
    [
        (SimpleNamespace(info={}), BackendMisconfigured, "must lend a psycopg or psycopg2 connection"),
        (SimpleNamespace(connection=SimpleNamespace()), BackendMisconfigured, "must lend a psycopg"),
        (
            SimpleNamespace(info=SimpleNamespace(transaction_status=0), closed=True),
            BackendUnavailable,
            "lent a closed connection",
        ),
    ],
    ids=["no driver's", "Django's of no driver", "a closed one"],
)
def test_what_a_factory_may_not_lend(thing: Any, error: type[Exception], said: str) -> None:
    store = PostgresBackend.from_connection_factory(lambda: lent(thing), shared=False)

    with pytest.raises(error, match=said):
        store.get("job", budget(1.0))


@pytest.mark.parametrize(
    ("raised", "error"),
    [
        (psycopg.OperationalError("connection refused"), BackendUnavailable),
        (ConnectionRefusedError(errno.ECONNREFUSED, "refused"), BackendUnavailable),
        (KeyError("no such pool"), BackendMisconfigured),
    ],
)
def test_what_a_factory_raises_is_trouble_of_the_network_or_its_own(raised: Exception, error: type[Exception]) -> None:
    def factory() -> Any:
        raise raised

    with pytest.raises(error), BorrowedConnections(factory).lend(budget(1.0)):
        pass


def test_a_factory_is_something_to_call() -> None:
    with pytest.raises(ConfigurationError, match="factory must be callable, not 'postgresql"):
        PostgresBackend.from_connection_factory(NOWHERE)  # type: ignore[arg-type]


def test_closed_connections_neither_lend_nor_connect() -> None:
    own, borrowed = OwnConnections(Dsn(NOWHERE), pool_size=1, connect_timeout=1), BorrowedConnections(nullcontext)
    own._drop_idle()  # there is nothing to drop yet
    own.close()
    borrowed.close()

    for each in (own, borrowed):
        with pytest.raises(BackendClosed):
            each.connect(budget())
        with pytest.raises(BackendClosed), each.lend(budget()):
            pass


def test_a_pool_that_somebody_else_has_opened_meanwhile_is_used() -> None:
    own = OwnConnections(Dsn(NOWHERE), pool_size=1, connect_timeout=1)
    pool: Any = SimpleNamespace(close=lambda **_: None)
    own._pool = pool

    assert own._opened() is pool


def test_a_connection_that_was_made_as_its_attempt_was_given_up_is_closed() -> None:
    closed: list[int] = []
    attempt = _Attempt(dict, str)
    attempt._made.put(SimpleNamespace(close=lambda: closed.append(1)))  # type: ignore[arg-type]

    attempt._give_up()

    assert closed == [1]


# -- listening ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("said", ["", "renewed 1 job", "released 1", "released soon job"])
def test_what_is_no_announcement_of_ours_is_passed_over(said: str) -> None:
    assert _change(said) is None
    assert _change("granted 5 a job") is not None


@pytest.fixture
def subscription() -> Any:
    """One on a connection that can be selected, and does no more."""
    import socket

    ours, theirs = socket.socketpair()
    connection: Any = SimpleNamespace(pgconn=SimpleNamespace(socket=ours.fileno()), close=lambda: None)
    yield PostgresSubscription(connection, "channel", lambda _: None, lambda _: None)
    ours.close()
    theirs.close()


def test_a_subscription_that_was_closed_meanwhile_says_so_rather_than_that_it_broke(subscription: Any) -> None:
    subscription.close()

    assert isinstance(subscription._broken(OSError("bad file descriptor")), BackendClosed)


def test_a_pooler_that_passes_notifications_is_heard_through(subscription: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(subscription, "_execute", lambda *_: None)
    said: list[str] = []
    monkeypatch.setattr(subscription, "_hear", lambda _: [("another", "")] if not said else [(said[0], "")])

    assert subscription.hears_itself(said.append, budget(), 60.0)
    monkeypatch.setattr(subscription, "_hear", lambda _: [("another", "")])
    assert not subscription.hears_itself(said.append, budget(), 0.01)
    subscription.close()


def test_a_forked_child_leaves_its_parents_subscriptions_alone(monkeypatch: Any) -> None:
    buried: list[Any] = []
    monkeypatch.setattr("pglease.backends.postgres_waiting.forks.bury", buried.append)
    listening = Listening(BorrowedConnections(nullcontext), lambda _: None, wanted=True)
    listening._open.add(theirs := object())  # type: ignore[arg-type]

    listening.forget()

    assert buried == [theirs]
    assert listening._open == set()


# -- the rest of the backend -------------------------------------------------------------------------------------------


def test_names_known_to_be_held_are_not_remembered_without_end() -> None:
    store = PostgresBackend(NOWHERE)
    for number in range(postgres._REMEMBERED + 1):
        store._remember(str(number), 0.0)

    assert list(store._known_held) == [str(postgres._REMEMBERED)]
    store.close()


def test_a_cleanup_goes_on_until_a_batch_is_not_full(monkeypatch: Any) -> None:
    batches = [1000, 1000, 3]
    store = PostgresBackend(NOWHERE)
    monkeypatch.setattr(store, "_converse", lambda *_: batches.pop(0))

    assert store.cleanup(0.0, budget()) == 2003

    store.close()


def test_a_cleanup_names_the_grant_it_lacks_and_hides_no_other_trouble(monkeypatch: Any) -> None:
    def fail(error: BackendError) -> None:
        def raising(*_: Any) -> Any:
            raise error

        monkeypatch.setattr(store, "_converse", raising)
        with pytest.raises(BackendMisconfigured) as told:
            store.cleanup(0.0, budget())
        said.append(str(told.value))

    store, said = PostgresBackend(NOWHERE), list[str]()
    fail(BackendMisconfigured("another protocol"))
    denied = BackendMisconfigured("permission denied")
    denied.sqlstate = "42501"
    fail(denied)

    assert said[0] == "another protocol"
    assert "GRANT DELETE" in said[1]
    store.close()


def test_nothing_is_deleted_where_the_floor_of_the_tokens_cannot_be_kept() -> None:
    sql: Any = SimpleNamespace(cleanup_lock="l", cleanup_table="t", cleanup_tickets="k", cleanup_batch="b")
    link: Any = Link(b=[[(5, False)]], anything=[[]])
    link.script = lambda _: None

    with pytest.raises(BackendMisconfigured, match="the floor of the tokens is missing"):
        postgres._cleanup_batch(link, sql, 0.0)


def test_waiting_in_line_ends_with_the_lock_timeout_and_hides_no_other_trouble() -> None:
    sql: Any = SimpleNamespace(queue_lock="queue")
    busy = [("busy",)]

    waited: Any = Link(release=[busy], queue=[states.LockNotAvailable()])
    assert postgres._first_in_line(waited, sql, "release", {"name": "job"}, budget()) == ("busy",)
    broken: Any = Link(release=[busy], queue=[states.AdminShutdown()])
    with pytest.raises(psycopg.errors.AdminShutdown):
        postgres._first_in_line(broken, sql, "release", {"name": "job"}, budget())


def test_a_doctor_beside_another_one_leaves_the_probes_lease_to_it(monkeypatch: Any) -> None:
    store = PostgresBackend(NOWHERE)
    probes: list[Any] = []

    def diagnose(_: Any, __: Any, probe: Any) -> Any:
        probes.append(probe)
        return iter(())

    monkeypatch.setattr("pglease.backends.postgres_doctor.diagnose", diagnose)
    monkeypatch.setattr(store, "try_acquire", lambda *_: Refused(None, 1.0))
    monkeypatch.setattr(store, "release", lambda *_: pytest.fail("it is another's"))

    assert list(store.diagnose()) == []
    probes[0]()

    store.close()


def test_a_lock_of_a_prepared_transaction_is_ended_by_its_name() -> None:
    lock = postgres_neighbours._Lock(0, "AccessExclusiveLock", None, None, None)

    assert lock.who == "a prepared transaction"
    assert "ROLLBACK PREPARED" in lock.remedy


def test_a_password_that_lasts_is_well() -> None:
    found: Any = SimpleNamespace(user="me", password_lasts=2 * postgres_neighbours.SOON)

    assert postgres_neighbours._password(found).status == "ok"
