"""Knowing that it is gone: told at once, with a reason, loudly, and never by an old belief."""

from __future__ import annotations

import logging
import time
from contextlib import contextmanager

import pytest

from pglease import LeaseLostError, PGLease
from tests.support.worlds import (
    Stopwatch,
    always,
    delete,
    execute,
    expire,
    heartbeats,
    row,
    steal,
    two_clients,
    wait_until,
)


@contextmanager
def held_lease(dsn: str, ttl: float = 60, **arguments):
    """A lease that is asked about every 0.2 s, and its client."""
    with PGLease(dsn, owner_id="holder", heartbeat_interval=0.2, **arguments) as leases:
        assert leases.try_acquire("job", ttl=ttl)
        yield leases, leases.held("job")


def test_a_theft_is_noticed_at_the_next_heartbeat_in_every_way_there_is(dsn):
    """The event, the flag, the seconds left, the exception, the client's own list."""
    with held_lease(dsn) as (leases, lease):
        steal(dsn, "job")

        assert lease.lost.wait(0.2 + 1)
        assert lease.held is False
        assert lease.remaining() == 0
        assert leases.held("job") is None
        assert leases.holding() == []
        with pytest.raises(LeaseLostError, match="thief") as error:
            lease.raise_if_lost()
        assert (error.value.name, error.value.reason) == ("job", "taken")


def _steal(dsn, leases):
    steal(dsn, "job")


def _delete(dsn, leases):
    delete(dsn, "job")


def _expire(dsn, leases):
    expire(dsn, "job")


def _force(dsn, leases):
    assert leases.force_release("job", leases.held("job").fencing_token)


@pytest.mark.parametrize(
    ("how", "reason", "by"),
    [(_steal, "taken", "thief"), (_delete, "deleted", None), (_expire, "expired", None), (_force, "forced", None)],
)
def test_a_loss_says_why(dsn, how, reason, by):
    """One word of a closed set, and the new holder where there is one; the callback hears of it once."""
    told: list[str] = []
    with held_lease(dsn, on_lease_lost=told.append) as (leases, lease):
        how(dsn, leases)

        assert lease.lost.wait(15)
        assert (lease.loss.reason, lease.loss.taken_by) == (reason, by)
        wait_until(lambda: told)
        always(lambda: told == ["job"], 0.5)


def test_a_loss_by_a_server_that_is_down_says_unreachable_and_with_what_error(fresh_postgres):
    """Only at the deadline: until then nobody knows."""
    server = fresh_postgres()
    with held_lease(server.dsn, ttl=1.5) as (_, lease):
        server.stop("immediate", keep=True)

        assert lease.lost.wait(15)
        assert lease.loss.reason == "unreachable"
        assert "cannot be reached" in str(lease.loss.error)
        server.start()


def test_a_block_whose_client_is_closed_loses_with_closed_and_disturbs_no_callback(dsn):
    """The application did it itself."""
    told: list[str] = []
    leases = PGLease(dsn, on_lease_lost=told.append)
    with pytest.raises(LeaseLostError) as error, leases.acquire("job") as lease:
        leases.close()
        assert lease.loss.reason == "closed"
        assert lease.held is False
    assert error.value.reason == "closed"
    assert told == []


def test_leaving_a_block_after_a_loss_raises_without_any_callback(dsn):
    """Loud unless told otherwise."""
    with (
        PGLease(dsn, heartbeat_interval=0.2) as leases,
        pytest.raises(LeaseLostError) as error,
        leases.acquire("job") as lease,
    ):
        steal(dsn, "job")
        assert lease.lost.wait(15)
    assert error.value.reason == "taken"


def test_a_theft_that_nobody_has_noticed_yet_is_noticed_in_leaving(dsn):
    """The release finds somebody else's row, leaves it alone, and says so."""
    with PGLease(dsn) as leases, pytest.raises(LeaseLostError) as error, leases.acquire("job"):
        steal(dsn, "job")
        before = row(dsn, "job")
    assert error.value.reason == "taken"
    assert row(dsn, "job") == before


def test_with_on_lost_log_only_the_log_says_so(dsn, caplog):
    """The block ends as if nothing had been."""
    with PGLease(dsn, heartbeat_interval=0.2) as leases, leases.acquire("job", on_lost="log") as lease:
        steal(dsn, "job")
        assert lease.lost.wait(15)

    (record,) = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert record.levelno == logging.ERROR
    assert "somebody else holds it now" in record.getMessage()


def test_an_error_of_the_body_comes_out_with_the_loss_as_a_note(dsn):
    """What the body says is the news; the loss explains it."""
    with (
        PGLease(dsn, heartbeat_interval=0.2) as leases,
        pytest.raises(ValueError, match="of the body") as error,
        leases.acquire("job") as lease,
    ):
        steal(dsn, "job")
        assert lease.lost.wait(15)
        raise ValueError("of the body")
    assert any("was lost" in note for note in error.value.__notes__)


def test_a_task_that_lost_its_lease_does_not_return_as_if_nothing_had_been(dsn):
    """The decorator is as loud as the block."""
    with PGLease(dsn) as leases:

        @leases.singleton_task("job")
        def task() -> str:
            steal(dsn, "job")
            return "published"

        with pytest.raises(LeaseLostError):
            task()


def test_leaving_a_block_after_a_loss_does_not_ask_a_server_that_is_silent(dsn, proxy):
    """Known to be lost: there is nothing to give back, so no second is spent on it."""
    with PGLease(proxy.through(dsn), heartbeat_interval=0.2) as leases:
        with pytest.raises(LeaseLostError), leases.acquire("job", ttl=30) as lease:
            steal(dsn, "job")
            assert lease.lost.wait(15)
            proxy.black_hole()
            watch = Stopwatch()
        assert watch.seconds < 1.5
        proxy.pass_through()


@pytest.mark.parametrize("outage", ["cut", "refused", "silent"])
def test_a_connection_that_comes_back_proves_nothing(dsn, proxy, outage):
    """A rival took over during the outage: the first renewal through the new connection finds that out."""
    told: list[str] = []
    with PGLease(proxy.through(dsn), on_lease_lost=told.append, heartbeat_interval=0.3) as leases:
        assert leases.try_acquire("job", ttl=30)
        lease = leases.held("job")
        if outage == "silent":
            proxy.black_hole()
        else:
            proxy.refuse()
        proxy.cut()
        steal(dsn, "job", "rival")
        before = row(dsn, "job")
        proxy.pass_through()

        assert lease.lost.wait(8)
        assert (lease.loss.reason, lease.loss.taken_by) == ("taken", "rival")
        assert row(dsn, "job") == before
        wait_until(lambda: told == ["job"])


def test_a_killed_session_is_no_loss_and_a_rival_in_between_is_one(dsn, admin):
    """The server ends our sessions: as long as the row is ours the hold goes on; when it is not, it is over."""
    with held_lease(dsn) as (_, lease):
        for _ in range(3):
            admin.execute(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
                "WHERE application_name = 'pglease' AND datname = current_database()"
            )
            before = heartbeats(dsn, "job")
            wait_until(lambda: heartbeats(dsn, "job") > before)  # noqa: B023  # asked at once
        assert lease.held

        steal(dsn, "job", "rival")
        admin.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
            "WHERE application_name = 'pglease' AND datname = current_database()"
        )
        assert lease.lost.wait(15)
        assert lease.loss.reason == "taken"


def test_a_loss_is_final_though_the_row_becomes_ours_again(dsn):
    """`held` never turns true again: what was done meanwhile was done without the lease."""
    with held_lease(dsn) as (_, lease):
        ((saved,),) = execute(dsn, "SELECT lease_id FROM pglease_leases")
        steal(dsn, "job")
        assert lease.lost.wait(15)
        execute(dsn, "UPDATE pglease_leases SET lease_id = %s, owner_id = 'holder'", saved)
        always(lambda: not lease.held, 0.6)


def test_a_client_that_lost_a_name_can_have_it_again(dsn):
    """As a newcomer, with a larger token."""
    with two_clients(dsn, heartbeat_interval=0.2) as (first, second):
        assert first.try_acquire("job")
        lost = first.held("job")
        expire(dsn, "job")
        assert second.try_acquire("job")
        assert lost.lost.wait(15)
        assert second.release("job")

        assert first.try_acquire("job")
        assert first.held("job").fencing_token == lost.fencing_token + 2
        assert not lost.held


def test_a_callback_may_call_back_into_its_client(dsn):
    """It runs on a thread of its own: it may take, release and even close."""
    done: list[object] = []

    def on_lost(name: str) -> None:
        done.append(leases.release(name))
        done.append(leases.try_acquire("refuge"))
        leases.close()
        done.append("closed")

    leases = PGLease(dsn, heartbeat_interval=0.2, on_lease_lost=on_lost)
    assert leases.try_acquire("job")
    steal(dsn, "job")
    wait_until(lambda: len(done) == 3)
    assert done == [False, True, "closed"]


def test_an_elector_that_cannot_ask_leads_no_longer_than_its_ttl_and_comes_back_as_a_newcomer(dsn, proxy):
    """Every question raises. Once it can ask again it finds another leader, and follows until that one resigns."""
    with (
        PGLease(proxy.through(dsn), connect_timeout=1) as cut_off,
        PGLease(dsn, owner_id="other") as other,
        cut_off.leader_election("job", ttl=3) as election,
    ):
        wait_until(lambda: election.is_leader)
        first = other.get_lease("job").fencing_token
        proxy.refuse()
        proxy.cut()
        watch, led_for = Stopwatch(), 0.0
        while (asked_at := watch.seconds) < 60 and election.is_leader:
            led_for = asked_at  # read before asking: what this process was kept from running is not counted
            time.sleep(0.01)
        assert led_for < 3
        second = other.wait_for_lease("job", ttl=60)
        assert second.fencing_token > first

        proxy.pass_through()
        always(lambda: not election.is_leader, 1)
        assert other.release("job")
        wait_until(lambda: election.is_leader)
        assert other.get_lease("job").fencing_token > second.fencing_token
