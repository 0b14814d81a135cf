"""`HeldLease.guard` on every kind of connection: what passes, what is refused, and what is committed then."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from pglease import FencedError, HeldLease, PGLease
from pglease.backends.postgres import PostgresBackend
from tests.fencing.kinds import Session
from tests.support.worlds import Stopwatch, expire, steal

pytestmark = pytest.mark.matrix


def taken(leases: PGLease, ttl: float = 60) -> HeldLease:
    return leases.wait_for_lease("job", ttl=ttl, timeout=10)


def still_believes(lease: HeldLease) -> None:
    assert lease.held, "this test is about what the server says, not about what the holder knows"


def test_a_guarded_write_of_the_holder_is_committed(leases: PGLease, session: Session, body: Callable[[], str]) -> None:
    lease = taken(leases)

    session.begin()
    session.guard(lease)
    session.write("mine")
    session.commit()

    assert body() == "mine"


def test_a_block_of_the_holder_is_committed(leases: PGLease, session: Session, body: Callable[[], str]) -> None:
    lease = taken(leases)

    session.begin()
    session.write_in_block(lease, "mine")
    session.commit()

    assert body() == "mine"


def test_a_holder_whose_lease_was_taken_is_refused_by_the_server_with_all_it_wrote_before(
    leases: PGLease, session: Session, body: Callable[[], str], dsn: str
) -> None:
    lease = taken(leases)
    steal(dsn, "job")

    session.begin()
    session.write("stale")
    still_believes(lease)
    with pytest.raises(FencedError) as refused:
        session.guard(lease)
    _commit_all_the_same(session)

    assert (refused.value.name, refused.value.fencing_token) == ("job", 1)
    assert body() == "empty"


def test_a_hold_that_lapsed_is_refused_though_nobody_took_it(
    leases: PGLease, session: Session, body: Callable[[], str], dsn: str
) -> None:
    lease = taken(leases)
    expire(dsn, "job")

    session.begin()
    still_believes(lease)
    with pytest.raises(FencedError):
        session.write_in_block(lease, "stale")
    _commit_all_the_same(session)

    assert body() == "empty"


def test_a_hold_that_was_released_is_refused_with_all_that_was_written_before(
    leases: PGLease, session: Session, body: Callable[[], str]
) -> None:
    lease = taken(leases)
    lease.release()

    session.begin()
    session.write("stale")
    with pytest.raises(FencedError):
        session.guard(lease)
    _commit_all_the_same(session)

    assert body() == "empty"


def test_a_block_whose_guard_was_rolled_back_proves_it_again_on_leaving(
    leases: PGLease, session: Session, body: Callable[[], str], dsn: str
) -> None:
    lease = taken(leases)

    session.begin()
    session.execute("SAVEPOINT older")
    session.write_in_block(lease, "mine", before=("ROLLBACK TO SAVEPOINT older",))
    session.commit()

    assert body() == "mine"


def test_a_block_whose_guard_was_rolled_back_is_refused_on_leaving_when_somebody_else_has_the_lease(
    leases: PGLease, session: Session, body: Callable[[], str], dsn: str
) -> None:
    lease = taken(leases)

    session.begin()
    session.execute("SAVEPOINT older")
    with pytest.raises(FencedError):
        session.write_in_block(lease, "stale", before=("ROLLBACK TO SAVEPOINT older", lambda: steal(dsn, "job")))
    _commit_all_the_same(session)

    assert body() == "empty"


def test_a_block_goes_on_to_its_commit_though_its_hold_was_ended_in_the_middle(
    leases: PGLease, plain: Session, body: Callable[[], str], rival: PGLease
) -> None:
    lease = taken(leases)

    plain.begin()
    plain.write_in_block(lease, "mine", before=(lambda: rival.force_release("job", 1),))
    assert not rival.try_acquire("job")
    plain.commit()

    assert body() == "mine"
    assert rival.try_acquire("job")


@pytest.mark.parametrize("how", ["release", "force"])
def test_beside_a_guarded_transaction_a_release_is_done_at_once_and_nobody_else_is_granted_until_it_ends(
    leases: PGLease, plain: Session, body: Callable[[], str], rival: PGLease, how: str
) -> None:
    lease = taken(leases)

    plain.begin()
    plain.guard(lease)
    plain.write("mine")
    took = Stopwatch()
    assert lease.release() if how == "release" else rival.force_release("job", 1)
    assert took.seconds < 10
    assert not rival.try_acquire("job")
    plain.commit()

    assert rival.try_acquire("job")
    assert body() == "mine"


def _commit_all_the_same(session: Session) -> None:
    """Do what nobody should: go on after a refusal. The server makes a rollback of it; some frameworks refuse."""
    try:
        session.commit()
    except Exception:
        session.rollback()


def test_guards_of_ever_other_ttls_leave_no_more_behind_than_those_of_a_few(leases: PGLease) -> None:
    lease = leases.wait_for_lease("job", ttl=60)
    assert isinstance(leases.backend, PostgresBackend)
    whereabouts = leases.backend._whereabouts

    written = {whereabouts.statement(60.0 + number / 8, "at once") for number in range(1000)}

    assert len(written) == 1000
    assert len(whereabouts._statements) <= 256
    assert lease.held
