"""The gap between a session that is ended and a holder that cannot hear of it: open by default, closed by `strict`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from types import SimpleNamespace

import pytest

from pglease import PGLease, clock
from pglease.backends.hybrid import HybridPostgresBackend
from pglease.backends.hybrid_session import Session, SessionDied
from pglease.handles import HeldLease
from pglease.testing.local_postgres import LocalPostgres
from pglease.testing.proxy import Proxy
from tests.support.hybrid import end, hybrid, is_bound, mark_of
from tests.support.worlds import Stopwatch, always, wait_until

DELAY = 2.0


def client(dsn: str, *, strict: bool) -> PGLease:
    return PGLease(f"{hybrid(dsn)}?pglease.strict={int(strict)}&pglease.handover_delay={DELAY if strict else 0.3}")


def held_by(leases: PGLease) -> HeldLease:
    assert leases.try_acquire("job", ttl=60)
    lease = leases.held("job")
    assert lease is not None
    return lease


@pytest.mark.parametrize("strict", [True, False], ids=["strict", "fast"])
def test_a_session_that_is_ended_while_its_holder_is_cut_off(dsn: str, cut_off: Proxy, strict: bool) -> None:
    """Strict: the old holder has stopped believing before the new one begins. Otherwise both believe for a while."""
    with closing(client(cut_off.through(dsn), strict=strict)) as holder, closing(client(dsn, strict=strict)) as heir:
        lease = held_by(holder)
        heir.try_acquire("warm-up")
        wait_until(lambda: is_bound(dsn, "job"))

        cut_off.black_hole()
        end(dsn, mark_of(dsn, "job"))
        successor = heir.wait_for_lease("job", ttl=60, timeout=30)
        believes = lease.held

        assert successor.fencing_token == lease.fencing_token + 1
        assert believes is not strict
        if strict:
            assert lease.lost.wait(20)
            assert lease.loss is not None
            assert lease.loss.reason == "session_died"
        cut_off.cut()


@pytest.fixture
def own_server(canary: str) -> Iterator[LocalPostgres]:
    with LocalPostgres(user="pglease_test", password=canary, fsync=False) as server:
        yield server


def test_a_silent_server_ends_a_strict_hold_in_time_and_no_other(own_server: LocalPostgres) -> None:
    with (
        closing(client(own_server.dsn, strict=True)) as strict,
        closing(PGLease(hybrid(own_server.dsn))) as fast,
    ):
        lease = held_by(strict)
        assert fast.try_acquire("other", ttl=60)
        other = fast.held("other")
        assert other is not None
        assert lease.remaining() < DELAY

        own_server.freeze()
        try:
            watch = Stopwatch()
            assert lease.lost.wait(15)
            assert watch.seconds < DELAY + 9
            assert lease.loss is not None
            assert lease.loss.reason == "session_died"
            assert other.held
        finally:
            own_server.thaw()

        wait_until(lambda: not lease.held and strict.try_acquire("job-after", ttl=60))
        assert other.held


def test_a_strict_hold_lives_on_for_as_long_as_its_session_answers(dsn: str) -> None:
    with closing(client(dsn, strict=True)) as holder:
        lease = held_by(holder)

        always(lambda: lease.held, seconds=2 * DELAY)


def test_a_strict_holder_believes_for_less_than_the_handover_delay_and_any_other_for_its_ttl() -> None:
    backend = HybridPostgresBackend("postgresql://localhost/db", strict=True, handover_delay=4)

    assert backend._keeper._silence < 4
    assert HybridPostgresBackend("postgresql://localhost/db")._keeper._silence == float("inf")


def test_an_answer_that_comes_after_its_time_revives_nothing(dsn: str) -> None:
    with closing(client(dsn, strict=True)) as holder:
        held_by(holder)
        assert isinstance(holder.backend, HybridPostgresBackend)
        session = holder.backend._keeper._session
        assert session is not None

        session.until = clock.now() - 0.001
        with pytest.raises(SessionDied, match="silent"):
            session._answered(clock.now())

        assert session.until < clock.now()


def test_a_session_that_answers_too_late_is_over_at_once() -> None:
    session = Session.__new__(Session)
    session._connection, session._silence = SimpleNamespace(closed=False), 1.0  # type: ignore[assignment]
    session.until, session.died = clock.now(), False

    with pytest.raises(SessionDied, match="silent"):
        session._answered(clock.now() - 1)

    assert session.is_over()
