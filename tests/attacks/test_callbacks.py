"""`on_lease_lost` may do whatever it likes: call back into the client, fail, even try to exit."""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest

from pglease import PGLease
from tests.attacks.world import eventually, is_so_for, sql


def lose(dsn: str, leases: PGLease, name: str = "job") -> None:
    assert leases.try_acquire(name, ttl=1)
    sql(dsn, "DELETE FROM pglease_leases WHERE task_name = %s", (name,))


def test_a_callback_that_releases_is_answered(dsn: str, client: Callable[..., PGLease]) -> None:
    answers: list[Any] = []
    leases: PGLease = client(on_lease_lost=lambda name: answers.append((name, leases.release(name), leases.holding())))

    lose(dsn, leases)

    eventually(lambda: answers == [("job", False, [])])
    assert leases.try_acquire("job", ttl=60)


def test_a_callback_that_closes_the_client_closes_it(dsn: str, client: Callable[..., PGLease]) -> None:
    closed, others = threading.Event(), set(threading.enumerate())
    leases: PGLease = client(on_lease_lost=lambda name: (leases.close(), closed.set()))
    assert leases.try_acquire("other", ttl=60)

    lose(dsn, leases)

    assert closed.wait(10)
    ((held,),) = sql(dsn, "SELECT count(*) FROM pglease_leases WHERE expires_at > clock_timestamp()")
    assert held == 0
    eventually(lambda: not [each for each in {*threading.enumerate()} - others if each.name == "pglease-heartbeat"])


def test_a_callback_that_acquires_again_has_a_lease_that_is_renewed(
    dsn: str, client: Callable[..., PGLease], rival: PGLease
) -> None:
    again: list[bool] = []
    leases: PGLease = client(on_lease_lost=lambda name: again.append(leases.try_acquire(name, ttl=1)))

    lose(dsn, leases)

    eventually(lambda: again == [True])
    assert is_so_for(2.5, lambda: not rival.try_acquire("job") and leases.held("job"))


@pytest.mark.parametrize("way", [RuntimeError("broken"), SystemExit(3), KeyboardInterrupt()], ids=repr)
def test_a_callback_that_fails_is_logged_and_the_other_leases_live_on(
    dsn: str, client: Callable[..., PGLease], caplog: pytest.LogCaptureFixture, way: BaseException
) -> None:
    def fail(name: str) -> None:
        raise way

    leases = client(on_lease_lost=fail)
    assert leases.try_acquire("other", ttl=1)

    with caplog.at_level(logging.ERROR, "pglease"):
        lose(dsn, leases)
        eventually(lambda: [each for each in caplog.records if "on_lease_lost" in each.getMessage()])

    (record,) = [each for each in caplog.records if "on_lease_lost" in each.getMessage()]
    assert record.exc_info is not None
    assert record.exc_info[1] is way
    assert is_so_for(1.5, lambda: leases.held("other"))


def test_a_callback_that_takes_its_time_delays_no_renewal(dsn: str, client: Callable[..., PGLease]) -> None:
    go_on, called = threading.Event(), threading.Event()
    leases = client(on_lease_lost=lambda name: (called.set(), go_on.wait(20)))
    assert leases.try_acquire("other", ttl=1)

    lose(dsn, leases)

    assert called.wait(10)
    assert is_so_for(2.0, lambda: leases.held("other"))
    go_on.set()


def test_a_callback_may_exit_by_the_word_it_was_given(dsn: str, client: Callable[..., PGLease]) -> None:
    names: list[str] = []

    def leave(name: str) -> None:
        names.append(name)
        sys.exit(f"lost {name}")

    leases = client(on_lease_lost=leave)
    for name in ("a", "b"):
        lose(dsn, leases, name)

    eventually(lambda: sorted(names) == ["a", "b"])
