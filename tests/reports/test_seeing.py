"""Seeing what happens: quiet when all is well, one level for each kind of news, and no secret in any of it."""

from __future__ import annotations

import logging

from pglease import PGLease
from tests.support.worlds import always, execute, steal, two_clients, wait_until


def levels(caplog) -> set[int]:
    """The levels of what pglease itself has said."""
    return {record.levelno for record in caplog.records if record.name.startswith("pglease")}


def test_a_good_day_is_silent_at_warning(dsn, caplog):
    """Taking, losing a race, waiting, renewing, looking, cleaning, releasing, exiting: nothing."""
    caplog.set_level(logging.WARNING)
    with two_clients(dsn) as (one, other):
        with one.acquire("job", ttl=3) as lease:
            assert not other.try_acquire("job")
            with other.acquire("job") as refused:
                assert not refused
            assert other.singleton_task("job")(str)("x") is None
            always(lambda: lease.held, 1.2, every=0.05)
            lease.renew()
        assert other.wait_for_lease("job", timeout=5).held
        assert other.release("job")
        assert not other.release("job")
        assert other.list_leases() == []
        assert other.cleanup_expired() == 1
        assert one.try_acquire("left to close")

    assert caplog.records == []


def test_contention_is_for_debugging_and_a_skipped_task_is_information(dsn, caplog):
    """Neither is an error; both say which lease and who has it."""
    caplog.set_level(logging.DEBUG, logger="pglease")
    with two_clients(dsn) as (one, other):
        assert one.try_acquire("job")
        other.try_acquire("job")
        wait_until(lambda: any("the lease 'job' is held by 'first'" in each.getMessage() for each in caplog.records))
        assert levels(caplog) == {logging.DEBUG}

        other.singleton_task("job")(str)("x")
        wait_until(lambda: logging.INFO in levels(caplog))
        assert levels(caplog) == {logging.DEBUG, logging.INFO}
        (skipped,) = [record for record in caplog.records if record.levelno == logging.INFO]
        assert "'job'" in skipped.getMessage()
        assert "first" in skipped.getMessage()


def test_an_outage_warns_now_and_then_and_a_loss_is_an_error(dsn, proxy, caplog):
    """Many tries fail in three seconds, and one line says so; then one line says what was lost and why."""
    with PGLease(proxy.through(dsn)) as leases:
        assert leases.try_acquire("job", ttl=3)
        lease = leases.held("job")
        proxy.refuse()
        proxy.cut()
        assert lease.lost.wait(15)
        proxy.pass_through()
    wait_until(lambda: logging.ERROR in levels(caplog))

    records = [(record.levelno, record.getMessage()) for record in caplog.records if record.levelno >= logging.WARNING]
    assert [level for level, _ in records] == [logging.WARNING, logging.ERROR]
    assert all("'job'" in message for _, message in records)


def test_a_theft_is_one_error_and_a_closed_client_none(dsn, caplog):
    """Loss is an error; an end of one's own making is not."""
    with PGLease(dsn, heartbeat_interval=0.2) as leases:
        assert leases.try_acquire("job")
        assert leases.try_acquire("kept")
        lease = leases.held("job")
        steal(dsn, "job")
        assert lease.lost.wait(15)
        wait_until(lambda: caplog.records)

    assert [record.levelno for record in caplog.records if record.levelno >= logging.WARNING] == [logging.ERROR]


def test_nothing_of_ours_is_an_error_in_the_servers_log(dsn, server_log):
    """Neither the first use, which makes the tables, nor anything after it."""
    with two_clients(dsn) as (one, other):
        with one.acquire("job", ttl=3) as lease, other.acquire("job") as refused:
            assert not refused
            always(lambda: lease.held, 0.5, every=0.05)
        other.cleanup_expired()
    execute(dsn, "SELECT 1")

    assert not [line for line in server_log() if any(word in line for word in ("ERROR", "WARNING", "FATAL"))]
