"""Who may take over what: only the same hold, bound to the same dead session, read twice."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress

import psycopg
import pytest

from pglease import BackendUnavailable, PGLease, clock
from pglease.backends import hybrid, hybrid_keeper
from pglease.backends.hybrid import HybridPostgresBackend
from pglease.backends.hybrid_sql import key_of
from pglease.backends.postgres import PostgresBackend
from pglease.records import Gone, Granted, Held, Refused, Released, Renewal, Request
from pglease.schema import TableNames
from tests.support.hybrid import advisory_locks, clients, end, end_session_of, is_bound, mark_of, pid_of, stores
from tests.support.worlds import Stopwatch, ask, budget, execute, expire, grant, renew, store, wait_until

LONG_DELAY = 1.5
"""Seconds of a handover delay in which a test can do something."""


@pytest.fixture
def two(dsn: str) -> Iterator[list[HybridPostgresBackend]]:
    with stores(dsn, 2) as pair:
        yield pair


@pytest.fixture
def slow(dsn: str) -> Iterator[list[HybridPostgresBackend]]:
    """Two stores that wait long before they take over."""
    with stores(dsn, 2, handover_delay=LONG_DELAY) as pair:
        yield pair


def refused_for(seconds: float, backend: PostgresBackend, name: str = "job") -> None:
    """Ask again and again; anything but refusals fails the test."""
    watch = Stopwatch()
    while watch.seconds < seconds:
        answer, _ = ask(backend, name)
        assert isinstance(answer, Refused), answer


def meanwhile(backend: HybridPostgresBackend, act: Callable[[], object], monkeypatch: pytest.MonkeyPatch) -> None:
    """Let something happen during a backend's handover delay."""
    wait = backend._closing.wait

    def waited(seconds: float) -> bool:
        if seconds == LONG_DELAY:
            act()
        return wait(min(seconds, 0.1))

    monkeypatch.setattr(backend._closing, "wait", waited)


def test_a_dead_session_alone_frees_nothing_before_the_handover_delay(
    dsn: str, slow: list[HybridPostgresBackend]
) -> None:
    holder, heir = slow
    grant(holder, "job")
    pid_of(heir)
    end_session_of(dsn, "job")

    watch = Stopwatch()
    answer, _ = ask(heir, "job")

    assert isinstance(answer, Granted)
    assert watch.seconds >= LONG_DELAY


def test_a_budget_that_ends_before_the_handover_delay_is_a_refusal_at_once(
    dsn: str, slow: list[HybridPostgresBackend]
) -> None:
    holder, heir = slow
    grant(holder, "job")
    pid_of(heir)
    end_session_of(dsn, "job")

    answer = heir.try_acquire(Request("job", "heir", "ab" * 16, 60), budget(1.0))

    assert isinstance(answer, Refused)


CHANGES: dict[str, str] = {
    "another hold": "lease_id = gen_random_uuid(), fencing_token = fencing_token + 1",
    "another session": "session_pid = session_pid + 1",
    "the same number, begun later": "session_started = session_started + interval '1 us'",
    "no session": "session_pid = NULL, session_started = NULL",
    "only waited out": "lease_id = NULL",
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_row_that_changes_during_the_handover_delay_is_let_be(
    dsn: str, slow: list[HybridPostgresBackend], change: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    holder, heir = slow
    grant(holder, "job")
    pid_of(heir)
    end_session_of(dsn, "job")
    locks = []

    def happens() -> None:
        locks.extend(advisory_locks(dsn))
        execute(dsn, f"UPDATE pglease_leases SET {CHANGES[change]}")

    meanwhile(heir, happens, monkeypatch)
    answer, _ = ask(heir, "job")

    assert isinstance(answer, Refused)
    assert len(locks) == 1, "it had the lock, and let it go"
    wait_until(lambda: advisory_locks(dsn) == [])


def test_a_renewal_that_was_under_way_does_not_save_the_hold_of_a_dead_session(
    dsn: str, slow: list[HybridPostgresBackend], monkeypatch: pytest.MonkeyPatch
) -> None:
    holder, heir = slow
    grant(holder, "job")
    pid_of(heir)
    end_session_of(dsn, "job")

    renewed = "UPDATE pglease_leases SET expires_at = expires_at + interval '1 min'"
    meanwhile(heir, lambda: execute(dsn, renewed), monkeypatch)
    answer, _ = ask(heir, "job")

    assert isinstance(answer, Granted)


def test_a_hold_that_was_taken_by_expiry_is_safe_when_the_frozen_predecessors_session_ends(
    dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """H1 stands still, H2 takes by expiry without the lock, H1's session ends: H3 gets the lock, and not the lease."""
    monkeypatch.setattr(hybrid_keeper, "_TIE_AFTER", (3600.0,))
    with stores(dsn, 3) as (first, second, third):
        grant(first, "job", 600)
        pid_of(third)
        expire(dsn, "job")
        lease, lease_id = grant(second, "job", 3)
        assert mark_of(dsn, "job") is None

        end(dsn, pid_of(first))
        watch = Stopwatch()
        refused_for(1.5, third)
        assert isinstance(renew(second, "job", lease_id, 3), Held)
        refused_for(1.5, third)

        taken, took = wait_until(lambda: _granted(third, watch))
        assert taken == lease.fencing_token + 1
        assert took >= 1.5 + 3 - 0.5


def _granted(backend: HybridPostgresBackend, watch: Stopwatch) -> tuple[int, float] | None:
    answer, _ = ask(backend, "job")
    return (answer.lease.fencing_token, watch.seconds) if isinstance(answer, Granted) else None


def test_a_session_is_ended_only_if_it_is_that_one_and_has_the_lock_and_nothing_that_runs_is_bound_to_it(
    dsn: str, two: list[HybridPostgresBackend]
) -> None:
    frozen, heir = two
    _, lease_id = grant(frozen, "running")
    grant(frozen, "lapsed")
    expire(dsn, "lapsed")
    heir.get("running", budget())  # its statements are written
    mark = frozen._keeper.session(budget()).mark
    assert heir._hybrid is not None
    end_errand, key = heir._hybrid.errands.end, key_of(heir._names, "lapsed")
    right = {"pid": mark.pid, "started": mark.started, "key": key}

    with psycopg.connect(dsn, autocommit=True) as connection:

        def ends(**other: object) -> bool:
            return connection.execute(end_errand, right | other).fetchall() == [(True,)]  # type: ignore[arg-type]

        assert not ends()  # a lease that runs is bound to it
        frozen.release("running", lease_id, budget())
        assert not ends(started="2026-01-01T00:00:00Z")  # the number came again
        assert not ends(key=key + 1)  # it has some lock, and not this one
        assert not ends(pid=pid_of(heir))
        assert ends()


def test_a_grant_without_the_lock_is_plain_and_becomes_bound_once_the_lock_is_got(
    dsn: str, two: list[HybridPostgresBackend]
) -> None:
    first, second = two
    grant(first, "job", 600)
    expire(dsn, "job")

    _, lease_id = grant(second, "job")
    seat = second._keeper.seat_of(lease_id)
    assert seat is not None
    assert mark_of(dsn, "job") is None
    assert seat.bond.anchor is None
    end(dsn, pid_of(first))

    wait_until(lambda: mark_of(dsn, "job") == pid_of(second))
    assert seat.bond.anchor is not None


def test_a_renewal_binds_what_has_the_lock_and_unbinds_what_has_not(dsn: str, two: list[HybridPostgresBackend]) -> None:
    first, second = two
    _, lease_id = grant(first, "job")
    execute(dsn, "UPDATE pglease_leases SET session_pid = NULL, session_started = NULL")

    assert isinstance(renew(first, "job", lease_id), Held)
    assert mark_of(dsn, "job") == pid_of(first)

    assert isinstance(renew(second, "job", lease_id), Held)  # somebody continues it who has not the lock
    assert mark_of(dsn, "job") is None


def test_a_retry_finds_its_grant_and_says_anew_whose_session_it_is_bound_to(
    dsn: str, two: list[HybridPostgresBackend]
) -> None:
    first, second = two
    lease, lease_id = grant(first, "job")
    again = second.try_acquire(Request("job", "somebody", lease_id, 60), budget())

    assert isinstance(again, Granted)
    assert again.lease.fencing_token == lease.fencing_token
    assert again.bond is not None
    assert mark_of(dsn, "job") is None  # the first has the lock, and may die


def test_release_and_force_clear_the_mark_and_give_the_lock_back(dsn: str, two: list[HybridPostgresBackend]) -> None:
    backend = two[0]
    _, lease_id = grant(backend, "released")
    lease, _ = grant(backend, "forced")

    assert backend.release("released", lease_id, budget()) == Released()
    assert backend.force_release("forced", lease.fencing_token, budget())

    assert mark_of(dsn, "released") is None
    assert mark_of(dsn, "forced") is None
    assert not is_bound(dsn, "released")


def test_the_lock_of_a_hold_that_somebody_ended_is_given_back_with_the_next_renewal(
    dsn: str, two: list[HybridPostgresBackend]
) -> None:
    holder, other = two
    lease, lease_id = grant(holder, "job")
    other.force_release("job", lease.fencing_token, budget())
    _, its = grant(other, "job")

    assert isinstance(renew(holder, "job", lease_id), Gone)

    wait_until(lambda: is_bound(dsn, "job"))
    assert isinstance(renew(other, "job", its), Held)


def test_two_names_with_one_key_are_held_side_by_side_and_the_second_is_plain(
    dsn: str, two: list[HybridPostgresBackend], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hybrid, "key_of", lambda _names, _name: 42)
    first, second = two
    grant(first, "a")

    grant(second, "b")
    grant(first, "c")

    assert mark_of(dsn, "a") == pid_of(first)
    assert (mark_of(dsn, "b"), mark_of(dsn, "c")) == (None, None)
    refused_for(0.7, second, "a")
    refused_for(0.7, first, "b")


def test_a_collision_costs_time_after_a_death_and_nothing_else(dsn: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hybrid, "key_of", lambda _names, _name: 42)
    with stores(dsn, 3) as (dead, living, heir):
        grant(dead, "a", 4)
        pid_of(living)
        end(dsn, pid_of(dead))
        grant(living, "b", 600)
        wait_until(lambda: is_bound(dsn, "b"))

        refused_for(1.0, heir, "a")

        wait_until(lambda: isinstance(ask(heir, "a")[0], Granted))
        refused_for(0.5, heir, "b")


def test_the_key_depends_on_schema_table_and_name() -> None:
    keys = {
        key_of(TableNames(table, schema), name)
        for schema in ("public", "other")
        for table in ("pglease_leases", "jobs")
        for name in ("a", "b")
    }

    assert len(keys) == 8
    assert all(-(2**63) <= key < 2**63 for key in keys)
    assert key_of(TableNames("pglease_leases", "public"), "job") == 3975515161092546092  # every client computes it


# -- plain and hybrid clients on one table


def test_a_plain_holder_is_waited_for_until_its_ttl(dsn: str, two: list[HybridPostgresBackend]) -> None:
    with store(dsn) as plain:
        grant(plain, "job", 2.5)

        watch = Stopwatch()
        refused_for(1.0, two[0])
        wait_until(lambda: isinstance(ask(two[0], "job")[0], Granted))

        assert watch.seconds > 2.0


def test_a_plain_client_waits_for_everybodys_ttl(dsn: str, two: list[HybridPostgresBackend]) -> None:
    with store(dsn) as plain:
        grant(two[0], "job", 2.5)
        end_session_of(dsn, "job")

        watch = Stopwatch()
        refused_for(1.0, plain)
        wait_until(lambda: isinstance(ask(plain, "job")[0], Granted))

        assert watch.seconds > 1.0
        refused_for(0.7, two[1])  # and is let be itself: it is bound to nobody


def test_a_plain_takeover_clears_the_mark_of_the_hold_before(dsn: str, two: list[HybridPostgresBackend]) -> None:
    with store(dsn) as plain:
        grant(two[0], "job", 600)
        expire(dsn, "job")

        grant(plain, "job", 600)
        end(dsn, pid_of(two[0]))

        assert mark_of(dsn, "job") is None
        refused_for(1.0, two[1])


def test_a_plain_renewal_of_a_bound_hold_keeps_its_mark(dsn: str, two: list[HybridPostgresBackend]) -> None:
    _, lease_id = grant(two[0], "job")
    pid = mark_of(dsn, "job")

    with store(dsn) as plain:
        assert isinstance(plain.renew([Renewal("job", lease_id, 60)], budget())[0], Held)

    assert mark_of(dsn, "job") == pid


def test_plain_and_hybrid_clients_never_both_hold(dsn: str) -> None:
    """Four clients of both kinds want one name, sessions are ended meanwhile; no two handles are ever true at once."""
    overlaps: list[str] = []
    grants: list[int] = []
    give_up_at = clock.now() + 60.0
    with ExitStack() as stack:
        crowd = stack.enter_context(clients(dsn, "h1", "h2"))
        crowd += [stack.enter_context(PGLease(dsn, owner_id=label)) for label in ("p1", "p2")]

        def work(client: PGLease, place: int) -> None:
            while len(grants) < 24 and clock.now() < give_up_at:
                with (
                    suppress(BackendUnavailable),  # the server is busy: no answer, and no grant
                    client.acquire("job", ttl=2, wait=1, on_lost="log") as lease,
                ):
                    if not lease:
                        continue
                    grants.append(lease.fencing_token)
                    watch = Stopwatch()
                    while lease.held and watch.seconds < 0.1:
                        others = [other.held("job") for other in crowd if other is not client]
                        if any(other is not None and other.held for other in others) and lease.held:
                            overlaps.append(client.owner_id)
                    if place < 2 and lease.fencing_token % 3 == 0:
                        end(dsn, mark_of(dsn, "job"))

        threads = [threading.Thread(target=work, args=(client, place)) for place, client in enumerate(crowd)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(100)

    assert overlaps == []
    assert len(grants) == len(set(grants)) >= 8
