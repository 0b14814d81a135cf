"""Ownership is one acquisition: no shared client and no shared label lets two in, and nobody ends another's hold."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest

from pglease import LeaseLostError, PGLease
from pglease.backends.postgres import PostgresBackend
from tests.attacks.world import all_at_once, eventually, is_so_for, lapse, sql


def test_eight_threads_of_one_client_enter_a_block_one_at_a_time(leases: PGLease) -> None:
    inside: list[int] = []
    most: list[int] = []

    def work() -> int:
        entered = 0
        while entered < 5:
            with leases.acquire("shared", ttl=30) as lease:
                if lease:
                    inside.append(1)
                    most.append(len(inside))
                    time.sleep(0.002)
                    inside.pop()
                    entered += 1
        return entered

    assert all_at_once([work] * 8) == [5] * 8
    assert max(most) == 1


def test_a_small_pool_serves_more_threads_than_it_has_connections(client: Callable[..., PGLease]) -> None:
    leases = client(pool_size=2)

    def work(place: int) -> list[bool]:
        return [leases.try_acquire(f"{place}-{turn}", ttl=2) for turn in range(10)]

    answers = all_at_once([lambda place=place: work(place) for place in range(12)])

    assert answers == [[True] * 10] * 12
    assert is_so_for(2.5, lambda: len(leases.holding()) == 120)


def test_the_same_backend_in_several_clients_keeps_within_its_pool(dsn: str, client: Callable[..., PGLease]) -> None:
    backend = PostgresBackend(dsn, pool_size=2)
    clients = [client(backend) for _ in range(8)]

    answers = all_at_once([lambda each=each: each.try_acquire("one", ttl=30) for each in clients])

    assert sorted(answers) == [False] * 7 + [True]
    ((connections,),) = sql(
        dsn,
        "SELECT count(*) FROM pg_stat_activity WHERE application_name = 'pglease' AND datname = current_database()",
    )
    assert connections <= 3
    for each in clients:
        each.close()
    backend.close()


def test_two_clients_with_one_label_exclude_each_other(client: Callable[..., PGLease]) -> None:
    one, other = client(owner_id="pod-1"), client(owner_id="pod-1")

    assert one.try_acquire("job", ttl=30)
    assert not other.try_acquire("job", ttl=30)
    assert not other.release("job")
    other.close()

    lease = one.get_lease("job")
    assert lease is not None
    assert (lease.owner_id, lease.is_expired()) == ("pod-1", False)


def test_a_restarted_worker_cannot_release_what_it_never_acquired(client: Callable[..., PGLease]) -> None:
    before = client(owner_id="pod-1")
    assert before.try_acquire("job", ttl=30)

    restarted = client(owner_id="pod-1")

    assert restarted.release("job") is False
    assert restarted.held("job") is None
    assert not restarted.try_acquire("job", ttl=30)
    held = before.held("job")
    assert held is not None
    assert held.ensure(15)


def test_a_release_frees_only_what_its_client_holds(client: Callable[..., PGLease]) -> None:
    one, two, three = client(), client(), client()
    assert one.try_acquire("job", ttl=30)
    assert not two.try_acquire("job", ttl=30)
    assert one.release("job") is True
    assert one.release("job") is False
    assert three.try_acquire("job", ttl=30)

    assert two.release("job") is False
    assert one.release("job") is False

    held = three.held("job")
    assert held is not None
    assert held.ensure(15)


def test_every_hold_has_a_larger_token_and_its_own_beginning_also_after_days(
    dsn: str, client: Callable[..., PGLease]
) -> None:
    leases = client(owner_id="pod-1")
    with leases.acquire("job", ttl=30) as first:
        pass
    sql(
        dsn,
        "UPDATE pglease_leases SET acquired_at = acquired_at - interval '3 days',"
        " expires_at = expires_at - interval '2 days'",
    )

    with leases.acquire("job", ttl=30) as again:
        record = leases.get_lease("job")

    assert again.fencing_token == first.fencing_token + 1
    assert record is not None
    assert again.acquired_at == record.acquired_at >= first.acquired_at
    assert record.transitions == 1


def test_a_lease_that_was_taken_meanwhile_is_lost_loudly(dsn: str, leases: PGLease, rival: PGLease) -> None:
    with pytest.raises(LeaseLostError) as caught, leases.acquire("job", ttl=3) as lease:  # the block is the test
        lapse(dsn, "job")
        assert rival.try_acquire("job", ttl=30)
        assert lease.lost.wait(15)
        assert not lease.held

    assert caught.value.reason == "taken"
    held = rival.held("job")
    assert held is not None
    assert held.ensure(15)


def test_a_block_learns_at_its_end_at_the_latest_that_its_lease_was_taken(
    dsn: str, leases: PGLease, rival: PGLease
) -> None:
    with pytest.raises(LeaseLostError), leases.acquire("job", ttl=600):
        lapse(dsn, "job")
        assert rival.try_acquire("job", ttl=30)

    assert leases.held("job") is None


def test_a_body_that_raised_keeps_its_error_and_the_loss_is_a_note_on_it(
    dsn: str, leases: PGLease, rival: PGLease
) -> None:
    with pytest.raises(KeyError, match="mine") as caught, leases.acquire("job", ttl=600):
        lapse(dsn, "job")
        assert rival.try_acquire("job", ttl=30)
        raise KeyError("mine")

    assert "'job' was lost" in caught.value.__notes__[0]


def test_many_leases_are_renewed_by_one_thread_on_few_connections(dsn: str, client: Callable[..., PGLease]) -> None:
    leases = client(pool_size=2)
    before = set(threading.enumerate())
    for place in range(60):
        assert leases.try_acquire(f"many-{place}", ttl=3)

    assert is_so_for(4.0, lambda: len(leases.holding()) == 60)

    beating = [each for each in threading.enumerate() if each.name == "pglease-heartbeat" and each not in before]
    ((connections,),) = sql(
        dsn,
        "SELECT count(*) FROM pg_stat_activity WHERE application_name = 'pglease' AND datname = current_database()",
    )
    assert len(beating) == 1
    assert connections <= 3
    assert len(leases.list_leases("many-")) == 60


def test_lost_leases_leave_no_threads_behind(dsn: str, client: Callable[..., PGLease]) -> None:
    told: list[str] = []
    leases = client(on_lease_lost=told.append)
    assert leases.try_acquire("warm-up", ttl=600)
    before = threading.active_count()

    for place in range(50):
        assert leases.try_acquire(f"lost-{place}", ttl=1)
    sql(dsn, "DELETE FROM pglease_leases WHERE task_name LIKE 'lost-%'")

    eventually(lambda: len(told) == 50)
    eventually(lambda: threading.active_count() <= before)
    assert [lease.name for lease in leases.holding()] == ["warm-up"]
