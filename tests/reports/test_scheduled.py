"""Scheduled work: one at a time, one for each period, a ttl for each name, and a say for those who are skipped."""

from __future__ import annotations

import time
from functools import partial

import pytest

from pglease import AcquisitionError, ConfigurationError, PGLease
from tests.support.worlds import Stopwatch, all_at_once, clients, execute, is_free, two_clients, wait_until


@pytest.fixture
def busy(dsn):
    """A client that finds the name taken by `first`."""
    with two_clients(dsn) as (first, second):
        assert first.try_acquire("job")
        yield second


def test_a_skipped_call_returns_what_on_skip_says(busy):
    """A callable is given the refusal and knows the holder; anything else is the value itself."""

    @busy.singleton_task("job", on_skip=lambda refused: refused.held_by)
    def asked() -> str:
        return "ran"

    @busy.singleton_task("job", on_skip="skipped")
    def told() -> str:
        return "ran"

    @busy.singleton_task("job")
    def silent() -> str:
        return "ran"

    assert asked() == "first"
    assert told() == "skipped"
    assert silent() is None


def test_a_skipped_call_raises_when_it_is_told_to(busy):
    """By on_skip itself, or by skip_if_locked=False, which says who has it."""

    def complain(refused) -> None:
        raise RuntimeError(f"{refused.name} is busy")

    with pytest.raises(RuntimeError, match="job is busy"):
        busy.singleton_task("job", on_skip=complain)(print)("never")
    with pytest.raises(AcquisitionError, match="first") as error:
        busy.singleton_task("job", skip_if_locked=False)(print)("never")
    assert error.value.held_by == "first"


def test_a_call_that_is_not_skipped_runs_and_frees_the_name(dsn):
    """on_skip is for the others; what the function returns and raises comes out."""
    with PGLease(dsn) as leases:

        @leases.singleton_task("report:{tenant}", on_skip="skipped")
        def report(tenant: str) -> str:
            if tenant == "bad":
                raise ValueError(tenant)
            return f"{tenant} by {leases.held(f'report:{tenant}').owner_id == leases.owner_id}"

        assert report("acme") == "acme by True"
        assert report(tenant="acme") == "acme by True"
        with pytest.raises(ValueError, match="bad"):
            report("bad")
        assert is_free(dsn, "report:acme")
        assert is_free(dsn, "report:bad")


def test_a_long_task_is_renewed_without_being_asked_to(dsn):
    """Renewal is on by default: a task that outlives its ttl is alone all the while."""
    with two_clients(dsn) as (one, other):

        @one.singleton_task("job", ttl=3)
        def long() -> list[bool]:
            watch, tries = Stopwatch(), []
            while watch.seconds < 4:
                tries.append(other.try_acquire("job"))
                time.sleep(0.01)
            return tries

        tries = long()
        assert len(tries) > 10
        assert not any(tries)
        assert other.try_acquire("job")


def test_every_name_has_its_own_ttl(dsn):
    """Two names of one client expire independently."""
    with two_clients(dsn) as (one, other):
        watch = Stopwatch()
        assert one.try_acquire("short", ttl=1, heartbeat=False)
        assert one.try_acquire("long", ttl=30, heartbeat=False)

        wait_until(lambda: other.try_acquire("short"))

        assert 0.9 < watch.seconds < 10
        assert other.try_acquire("long") is False
        assert one.held("short") is None
        assert one.held("long")


def test_renewing_is_not_acquiring_again(dsn):
    """Five renewals, one of them with another ttl, and a single release frees the name; the token stays."""
    with two_clients(dsn) as (one, other):
        assert one.try_acquire("job", ttl=30)
        lease = one.held("job")
        for _ in range(4):
            one.renew("job")
        one.renew("job", ttl=90)
        record = other.get_lease("job")
        assert record.fencing_token == lease.fencing_token == 1
        assert record.transitions == 0
        assert record.time_remaining() == pytest.approx(90, abs=1)

        assert one.release("job") is True
        assert other.try_acquire("job")


def test_of_three_workers_whose_ticks_come_up_to_a_second_apart_one_runs(dsn):
    """The first has long done its 10 ms when the last one asks."""
    ran = []

    def tick(worker: PGLease, late: float) -> None:
        time.sleep(late)
        with worker.acquire("tick", min_hold=3) as lease:
            if lease:
                time.sleep(0.01)
                ran.append(late)

    with clients(dsn, 3) as workers:
        for worker in workers:
            worker.get_lease("connected before the tick")
        all_at_once([partial(tick, worker, late) for worker, late in zip(workers, (0.0, 0.5, 1.0), strict=True)])

    assert len(ran) == 1


def test_a_short_body_keeps_the_name_for_min_hold(dsn):
    """Counted by the server's clock from the grant: a node that is a little late finds it held."""
    with two_clients(dsn) as (one, other):
        watch = Stopwatch()
        with one.acquire("tick", min_hold=1.0):
            pass
        assert one.held("tick") is None
        assert other.try_acquire("tick") is False

        wait_until(lambda: other.try_acquire("tick"))
        assert 0.9 < watch.seconds < 10
    with (
        PGLease(dsn) as leases,
        pytest.raises(ConfigurationError, match=r"min_hold \(5 s\) must not exceed max_hold \(3 s\)"),
    ):
        leases.acquire("tick", min_hold=5, max_hold=3)
    assert execute(dsn, "SELECT count(*) FROM pglease_leases") == [(1,)]
