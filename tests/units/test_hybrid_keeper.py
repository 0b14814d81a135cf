"""The keeper of a hybrid store's session, asked for what seldom happens, on no server."""

from __future__ import annotations

import logging
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import psycopg
import pytest

from pglease.backends.hybrid import HybridPostgresBackend, _Seen
from pglease.backends.hybrid_keeper import _END_AFTER, Errands, Keeper, Seat
from pglease.backends.hybrid_session import Mark, Session, SessionDied, _standby
from pglease.errors import BackendClosed, BackendMisconfigured, BackendUnavailable
from pglease.records import Lease, Loss, Request
from pglease.testing.free_for_all import FreeForAll
from pglease.testing.harness import budget, new_id


class Talking:
    """A session that answers as it is told."""

    def __init__(self, *, over: bool = False, answer: Any = ()) -> None:
        self.mark, self.died, self.over, self.answer = Mark(7, "now"), False, over, answer
        self.ping_at, self.capacity = float("inf"), 100
        self.closed = False
        self.asked: list[str] = []

    def is_over(self) -> bool:
        return self.over

    def ask(self, statement: str, _: Any = None) -> Any:
        self.asked.append(statement)
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer

    def unlock(self, key: int) -> None:
        self.asked.append(f"unlock {key}")

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def keeper() -> Any:
    kept = Keeper(dict, str, silence=float("inf"), most=None)
    kept.errands = Errands("tie", "untie", "end")
    yield kept
    kept._session = None
    kept.close()


def seated(keeper: Any, session: Any, name: str = "job", key: int = 5) -> Seat:
    """A hold whose lock the session has."""
    seat: Seat = keeper.sit(name, key, new_id())
    keeper._session = seat.session = session
    keeper._locks[key] = seat
    seat.bond.tie(session)
    return seat


def test_a_hold_whose_session_is_gone_gets_no_lock_on_the_next_one(keeper: Any) -> None:
    seat = keeper.sit("job", 5, new_id())
    seat.bond.sever(Loss("session_died"))
    session = Talking()

    assert not keeper._try_lock(seat, session)

    assert session.asked == []


def test_a_lock_is_given_back_only_where_it_was_got(keeper: Any) -> None:
    session = Talking()
    keeper._unlock(seated(keeper, session))
    assert session.asked == ["unlock 5"]

    earlier, later = Talking(), Talking()
    seat = seated(keeper, earlier)
    keeper._session = later
    keeper._unlock(seat)
    assert (earlier.asked, later.asked) == ([], [])


@pytest.mark.parametrize("over", [False, True], ids=["it goes on", "it is over"])
def test_a_mark_that_could_not_be_written_gives_the_lock_back_unless_the_session_is_over(
    keeper: Any, *, over: bool
) -> None:
    session = Talking(over=over, answer=psycopg.errors.AdminShutdown())
    seat = seated(keeper, session)

    with pytest.raises(psycopg.errors.AdminShutdown):
        keeper._tie([seat], session)

    assert (seat.session is None) == (not over)


@pytest.mark.parametrize("over", [False, True], ids=["it goes on", "it is over"])
def test_a_rival_that_could_not_be_ended_is_let_be_unless_our_own_session_is_over(keeper: Any, *, over: bool) -> None:
    session = Talking(over=over, answer=psycopg.errors.InsufficientPrivilege())
    seat = keeper.sit("job", 5, new_id())
    seat.rival, seat.tries = Mark(9, "then"), _END_AFTER

    if over:
        with pytest.raises(psycopg.errors.InsufficientPrivilege):
            keeper._end_rival(seat, session)
    else:
        keeper._end_rival(seat, session)

    assert seat.rival is None


@pytest.mark.parametrize("over", [False, True], ids=["it goes on", "it is over"])
def test_an_error_on_the_session_severs_its_holds_only_if_it_is_over(keeper: Any, *, over: bool) -> None:
    session = Talking(over=over, answer=psycopg.OperationalError("cancelled"))
    seat = seated(keeper, session)

    with pytest.raises(psycopg.OperationalError):
        keeper._on_session(lambda present: present.ask("anything"))

    assert (seat.bond.loss is not None) == session.closed == over


def test_a_session_is_lost_once(keeper: Any) -> None:
    first, second = Talking(), Talking()
    seat = seated(keeper, second)

    keeper._lose(first, SessionDied("late news"))

    assert seat.bond.loss is None
    assert keeper._session is second


def test_a_broken_connection_is_noticed_without_being_asked(keeper: Any) -> None:
    session = Talking(over=True)
    seat = seated(keeper, session)
    keeper._reconnect_at = float("inf")

    keeper._tend()

    assert seat.bond.loss is not None
    assert seat.bond.loss.reason == "session_died"


def test_holds_that_could_not_be_made_plain_are_lost_with_the_session_that_is_closed(keeper: Any) -> None:
    session = Talking(answer=psycopg.OperationalError("cancelled"))
    seat = seated(keeper, session)

    keeper._wind_up()

    assert seat.bond.loss is not None
    assert session.closed


@pytest.mark.parametrize("connected", [True, False])
def test_a_keeper_that_fails_loses_its_session_and_says_so(keeper: Any, caplog: Any, *, connected: bool) -> None:
    session = Talking()
    seat = seated(keeper, session)
    if not connected:
        keeper._session, keeper._locks = None, {}

    def fail(*_: Any) -> None:
        raise RuntimeError("no more descriptors")

    keeper._listen = fail
    pipe: Any = SimpleNamespace(close=lambda: None)
    with caplog.at_level(logging.CRITICAL):
        keeper._run(pipe, pipe)

    assert (seat.bond.loss is not None) == connected
    assert "the keeper of pglease's session failed" in caplog.text


def test_another_session_that_answers_is_none_of_ours() -> None:
    session: Any = object.__new__(Session)
    session.mark = Mark(7, "now")
    session.ask = lambda _: [(8,)]

    with pytest.raises(SessionDied, match="another session answers"):
        session.ping()


def test_a_standby_is_a_mistake_at_first_and_a_failover_later() -> None:
    assert isinstance(_standby(first=True), BackendMisconfigured)
    assert isinstance(_standby(first=False), BackendUnavailable)


# -- the backend -------------------------------------------------------------------------------------------------------


@pytest.fixture
def store() -> Any:
    made = HybridPostgresBackend("hybrid+postgresql://nobody@127.0.0.1:1/nowhere")
    made._hybrid = SimpleNamespace(errands=Errands("tie", "untie", "end"), take_over="take over")  # type: ignore[assignment]
    yield made
    made.close()


@pytest.fixture
def theirs() -> Lease:
    asked = Request("job", "them", new_id(), 60.0)
    return FreeForAll().try_acquire(asked, budget()).lease


def seat_with(session: Any) -> Seat:
    seat = Seat("job", new_id(), 5)
    if session is not None:
        seat.session = session
        seat.bond.tie(session)
    return seat


def test_a_session_that_dies_while_a_lease_is_granted_leaves_the_grant_unknown(store: Any, theirs: Lease) -> None:
    seat = seat_with(Talking())
    assert store._bound(theirs, seat).bond is seat.bond

    seat.bond.sever(Loss("session_died"))
    with pytest.raises(BackendUnavailable, match="while a lease was granted") as unknown:
        store._bound(theirs, seat)

    assert unknown.value.outcome_unknown


def test_an_earlier_grant_whose_row_is_locked_by_another_is_not_recognised_yet(store: Any, theirs: Lease) -> None:
    store._once = lambda *_: []

    with pytest.raises(BackendUnavailable, match="locked by another session"):
        store._recognised(SimpleNamespace(lease=theirs), seat_with(None), budget())


def test_a_takeover_ends_with_the_backend_and_with_its_own_session(store: Any, theirs: Lease) -> None:
    seen = _Seen("held", theirs, new_id(), Mark(9, "then"), queued=False)
    asked = Request("job", "me", new_id(), 60.0)
    store._delay = 0.0

    with pytest.raises(BackendUnavailable, match="died during a takeover"):
        store._take_over(asked, seat_with(None), seen, budget())
    store._closing.set()
    with pytest.raises(BackendClosed):
        store._take_over(asked, seat_with(Talking()), seen, budget())


@pytest.mark.parametrize(("used", "status"), [(10, "ok"), (60, "warn")])
def test_a_lock_table_that_is_more_than_half_full_is_warned_of(store: Any, used: int, status: str) -> None:
    link = SimpleNamespace(rows=lambda _: [(used, 100)])
    store.connections = SimpleNamespace(lend=lambda _: nullcontext(link), close=lambda: None)
    store._keeper.session = lambda _: None
    store._vetted = lambda *_: None

    assert store.examine_session().status == status
