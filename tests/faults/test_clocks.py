"""The server's clock is stepped or runs wrong, for real: PostgreSQL under libfaketime."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from pglease import PGLease
from pglease.testing.local_postgres import LocalPostgres
from tests.attacks.world import eventually
from tests.support.faketime import Clockwork, stepped_postgres

pytestmark = [pytest.mark.needs("faketime"), pytest.mark.xdist_group("faketime")]


@pytest.fixture(scope="module")
def clockwork_server() -> Iterator[tuple[LocalPostgres, Clockwork]]:
    with stepped_postgres() as both:
        yield both


@pytest.fixture
def server_clock(clockwork_server) -> Iterator[Clockwork]:
    """A clock that reads as everybody's, for now."""
    server, clockwork = clockwork_server
    clockwork.set(0.0)
    server.execute(
        "DROP TABLE IF EXISTS pglease_leases, pglease_leases_meta, pglease_leases_tickets, "
        "pglease_leases_history CASCADE"
    )
    yield clockwork
    clockwork.set(0.0)


@pytest.fixture
def pair(clockwork_server, server_clock) -> Iterator[tuple[PGLease, PGLease]]:
    address = clockwork_server[0].dsn
    with PGLease(address, owner_id="holder") as holder, PGLease(address, owner_id="rival") as rival:
        yield holder, rival


def test_a_step_within_the_margin_costs_no_exclusion(pair, server_clock) -> None:
    holder, rival = pair
    with holder.acquire("job", ttl=4, heartbeat=False, on_lost="log") as lease:
        server_clock.step(0.2)  # the margin is 0.25 s

        while lease.held:
            assert rival.try_acquire("job") is False or not lease.held
    assert rival.wait_for_lease("job", ttl=4, timeout=20).fencing_token == lease.fencing_token + 1


@pytest.mark.long
def test_a_step_beyond_the_margin_is_what_only_the_fence_survives(pair, server_clock, clockwork_server) -> None:
    """Not promised: exclusion. Promised: larger tokens, and a guard that refuses the old holder."""
    holder, rival = pair
    lease = holder.wait_for_lease("job", ttl=6)

    server_clock.step(60)
    heir = rival.wait_for_lease("job", ttl=30, timeout=20)

    assert heir.fencing_token == lease.fencing_token + 1
    assert lease.lost.wait(20)
    assert lease.loss.reason in {"taken", "expired"}


def test_a_step_back_keeps_a_living_holder_and_an_operator_can_end_a_dead_one(pair, server_clock) -> None:
    holder, rival = pair
    living = holder.wait_for_lease("living", ttl=1.5)
    dead = holder.acquire("dead", ttl=1.5, heartbeat=False, on_lost="log").__enter__()

    server_clock.step(-3600)
    time.sleep(2.5)

    assert living.held
    assert not dead.held
    assert rival.try_acquire("dead") is False  # it looks as if it lasted for another hour
    assert rival.force_release("dead", dead.fencing_token)
    assert rival.wait_for_lease("dead", timeout=20).fencing_token == dead.fencing_token + 1


@pytest.mark.long
def test_a_clock_that_runs_four_percent_fast_is_paid_for_by_the_margin(pair, server_clock) -> None:
    holder, rival = pair
    server_clock.set(0.0, rate=1.04)

    with holder.acquire("job", ttl=5, heartbeat=False, on_lost="log") as lease:
        while lease.held:
            assert rival.try_acquire("job") is False or not lease.held
    eventually(lambda: rival.try_acquire("job"))


@pytest.mark.long
def test_a_clock_that_runs_twice_as_fast_is_beyond_what_is_promised_and_the_next_holder_comes_early(
    pair, server_clock
) -> None:
    holder, rival = pair
    server_clock.set(0.0, rate=2.0)

    with holder.acquire("job", ttl=6, heartbeat=False, on_lost="log") as lease:
        heir = rival.wait_for_lease("job", ttl=6, timeout=20)
        assert heir.fencing_token == lease.fencing_token + 1
