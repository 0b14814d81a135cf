"""Connections that die, replies that are lost, servers that are gone for a while, links that swallow everything."""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Callable

import pytest

from pglease import BackendUnavailable, HeldLease, LeaseLostError, PGLease, ReleaseError, clock
from pglease.backends.base import Budget
from pglease.backends.postgres import PostgresBackend
from pglease.testing.local_postgres import LocalPostgres
from pglease.testing.proxy import Proxy
from tests.attacks.world import eventually, is_so_for, kill_connections, sql

FreshPostgres = Callable[..., LocalPostgres]
Clients = Callable[..., PGLease]


@pytest.mark.parametrize(
    "call",
    [
        lambda leases: leases.try_acquire("other", ttl=30),
        lambda leases: leases.get_lease("job").owner_id == leases.owner_id,
        lambda leases: len(leases.list_leases()) == 1,
        lambda leases: leases.release("job"),
        lambda leases: leases.held("job").ensure(30),
        lambda leases: leases.cleanup_expired() == 0,
    ],
    ids=["try_acquire", "get_lease", "list_leases", "release", "renew", "cleanup_expired"],
)
def test_a_call_after_the_server_ended_the_idle_connections_succeeds(
    dsn: str, leases: PGLease, call: Callable[[PGLease], bool]
) -> None:
    assert leases.try_acquire("job", ttl=60)
    assert kill_connections(dsn) >= 1

    assert call(leases)


def test_every_connection_of_a_full_pool_may_die_at_once(dsn: str, client: Clients) -> None:
    leases = client(pool_size=4)
    barrier = threading.Barrier(4)

    def work(place: int) -> None:
        barrier.wait(20)
        assert leases.try_acquire(f"job-{place}", ttl=60)

    for _ in range(3):
        threads = [threading.Thread(target=work, args=(place,)) for place in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
        assert len(leases.holding()) == 4
        kill_connections(dsn)
        for place in range(4):
            assert leases.release(f"job-{place}")


def test_a_body_keeps_its_own_error_when_its_connection_died(dsn: str, leases: PGLease, rival: PGLease) -> None:
    with pytest.raises(KeyError, match="mine"), leases.acquire("job", ttl=60):  # the block is the test
        kill_connections(dsn)
        raise KeyError("mine")

    assert rival.try_acquire("job", ttl=30)


def test_a_body_keeps_its_own_error_when_the_server_is_gone_and_is_told_of_the_lease(
    fresh_postgres: FreshPostgres, client: Clients
) -> None:
    server = fresh_postgres()
    leases = client(server.dsn)

    @leases.singleton_task("decorated", ttl=60)
    def task() -> None:
        server.stop("immediate", keep=True)
        raise KeyError("mine too")

    with pytest.raises(KeyError, match="mine") as caught, leases.acquire("job", ttl=60):
        task()

    notes = " ".join(caught.value.__notes__)
    assert "'decorated'" in notes
    assert "'job'" in notes
    server.start()


def test_a_result_survives_a_release_that_the_server_cannot_confirm_and_the_lease_lapses(
    fresh_postgres: FreshPostgres, client: Clients, caplog: pytest.LogCaptureFixture
) -> None:
    server = fresh_postgres()
    leases, rival = client(server.dsn), client(server.dsn)
    ttl = 4

    @leases.singleton_task("job", ttl=ttl)
    def task() -> str:
        server.stop("immediate", keep=True)
        return "the result"

    with caplog.at_level(logging.WARNING, "pglease"):
        assert task() == "the result"
        eventually(lambda: "could not be confirmed" in caplog.text)

    server.start()
    taken = rival.wait_for_lease("job", ttl=30, timeout=ttl + 3, poll_interval=0.2)
    assert taken.ensure(15)
    assert leases.holding() == []


def test_a_release_by_hand_that_cannot_be_confirmed_says_so_in_time_and_stops_the_renewals(
    fresh_postgres: FreshPostgres, client: Clients
) -> None:
    server = fresh_postgres()
    leases, rival = client(server.dsn), client(server.dsn)
    assert leases.try_acquire("job", ttl=3)
    server.freeze()

    started = time.monotonic()
    with pytest.raises(ReleaseError):
        leases.release("job")

    assert time.monotonic() - started < 15
    assert leases.held("job") is None
    server.thaw()
    assert rival.wait_for_lease("job", ttl=30, timeout=10, poll_interval=0.2)


def test_a_lease_outlives_a_server_that_is_away_for_less_than_its_ttl(
    fresh_postgres: FreshPostgres, client: Clients
) -> None:
    server = fresh_postgres()
    lost: list[str] = []
    leases = client(server.dsn, heartbeat_interval=0.4, on_lease_lost=lost.append)
    rival = client(server.dsn)
    assert leases.try_acquire("job", ttl=12)
    held = leases.held("job")
    assert held is not None

    server.stop("immediate", keep=True)
    assert is_so_for(2.5, lambda: held.held)
    server.start()

    eventually(lambda: held.remaining() > 10)
    assert not rival.try_acquire("job")
    assert lost == []
    assert leases.release("job")


def test_the_first_call_after_a_restart_of_the_server_succeeds(fresh_postgres: FreshPostgres, client: Clients) -> None:
    server = fresh_postgres()
    leases = client(server.dsn)
    for stop in ("fast", "immediate"):
        assert leases.try_acquire("job", ttl=60)
        server.restart(stop)
        assert leases.get_lease("job") is not None
        server.restart(stop)
        assert leases.release("job")


def test_a_grant_whose_reply_was_lost_is_found_again(dsn: str, proxy: Proxy, client: Clients, rival: PGLease) -> None:
    leases = client(proxy.through(dsn))
    for place in range(5):
        assert leases.try_acquire("warm-up", ttl=60)
        leases.release("warm-up")
        dropped = proxy.drop_next_reply(b"job")

        assert leases.try_acquire(f"job-{place}", ttl=60)

        assert dropped.is_set()
        assert not rival.try_acquire(f"job-{place}")
        held = leases.held(f"job-{place}")
        assert held is not None
        assert held.fencing_token == 1
        assert held.ensure(30)


def test_a_release_whose_reply_was_lost_is_still_a_release(
    dsn: str, proxy: Proxy, client: Clients, rival: PGLease
) -> None:
    leases = client(proxy.through(dsn))
    assert leases.try_acquire("job", ttl=60)
    dropped = proxy.drop_next_reply(b"job")

    with leases.acquire("other", ttl=60) as other:
        assert other
    released = leases.release("job")

    assert dropped.is_set()
    assert released is True
    assert rival.try_acquire("job")


def test_a_release_whose_reply_was_lost_is_no_loss_though_a_rival_has_the_lease_already(
    dsn: str, proxy: Proxy, client: Clients, rival: PGLease
) -> None:
    lost: list[str] = []
    leases = client(proxy.through(dsn), on_lease_lost=lost.append)
    got: list[HeldLease] = []
    for place in range(5):
        with leases.acquire(f"job-{place}", ttl=60):
            pass
        with leases.acquire(f"job-{place}", ttl=60):
            waiting = threading.Thread(
                target=lambda name=f"job-{place}": got.append(
                    rival.wait_for_lease(name, timeout=20, poll_interval=0.001)
                )
            )
            waiting.start()
            proxy.drop_next_reply(b"job")
        waiting.join(20)

    assert len(got) == 5
    assert lost == []


def test_a_hold_that_ended_before_its_release_is_a_loss_though_the_reply_was_lost(
    dsn: str, proxy: Proxy, client: Clients, rival: PGLease
) -> None:
    leases = client(proxy.through(dsn))
    for take in (False, True):
        with leases.acquire("job", ttl=60):
            pass
        with pytest.raises(LeaseLostError) as caught, leases.acquire("job", ttl=60) as lease:
            rival.force_release("job", lease.fencing_token)
            if take:
                assert rival.try_acquire("job", ttl=60)
            time.sleep(0.3)  # the loss is older than the release
            proxy.drop_next_reply(b"job")
        assert caught.value.reason == ("taken" if take else "forced")


def test_a_grant_that_nobody_hears_of_is_given_back_or_lapses(
    dsn: str, proxy: Proxy, client: Clients, rival: PGLease
) -> None:
    leases = client(proxy.through(dsn))
    assert leases.try_acquire("warm-up", ttl=60)
    proxy.drop_replies()

    with pytest.raises(BackendUnavailable) as caught, leases.acquire("job", ttl=60, wait=1):
        pytest.fail("nobody could know that it was granted")

    assert caught.value.outcome_unknown
    assert sql(dsn, "SELECT lease_id IS NOT NULL FROM pglease_leases WHERE task_name = 'job'") == [(True,)]
    assert [lease.name for lease in leases.holding()] == ["warm-up"]
    proxy.pass_through()
    proxy.cut()
    assert rival.wait_for_lease("job", ttl=30, timeout=10, poll_interval=0.2)  # long before its ttl


def test_behind_a_black_hole_the_loss_comes_at_the_deadline_and_before_anybody_else_is_let_in(
    dsn: str, proxy: Proxy, client: Clients, rival: PGLease
) -> None:
    told = threading.Event()
    leases = client(proxy.through(dsn), on_lease_lost=lambda name: told.set())
    assert leases.try_acquire("job", ttl=2)
    held = leases.held("job")
    assert held is not None

    proxy.black_hole()
    taken_at: list[float] = []
    taking = threading.Thread(
        target=lambda: (
            rival.wait_for_lease("job", ttl=30, timeout=15, poll_interval=0.02),
            taken_at.append(clock.now()),
        )
    )
    taking.start()
    while held.held:
        time.sleep(0.002)
    lost_at = clock.now()

    assert held.lost.wait(15)
    assert told.wait(15)
    assert held.loss is not None
    assert held.loss.reason == "unreachable"
    taking.join(15)
    assert lost_at < taken_at[0]
    with pytest.raises(LeaseLostError, match="could not be reached"):
        held.raise_if_lost()


def test_what_a_black_hole_swallowed_revives_no_lease_when_it_arrives_at_last(
    dsn: str, proxy: Proxy, client: Clients, rival: PGLease
) -> None:
    lost: list[str] = []
    leases = client(proxy.through(dsn), on_lease_lost=lost.append)
    assert leases.try_acquire("job", ttl=1.5)
    proxy.black_hole()
    expired = "SELECT 1 FROM pglease_leases WHERE expires_at < clock_timestamp() - interval '0.2 s'"
    eventually(lambda: sql(dsn, expired))
    before = sql(dsn, "SELECT * FROM pglease_leases")

    proxy.pass_through()

    assert leases.get_lease("job") is not None
    assert is_so_for(1.0, lambda: sql(dsn, expired))
    assert [row[3:5] for row in sql(dsn, "SELECT * FROM pglease_leases")] == [row[3:5] for row in before]
    assert lost == ["job"]
    assert leases.holding() == []
    assert rival.try_acquire("job", ttl=30)


@pytest.mark.parametrize(
    "verb",
    [
        lambda backend, budget: backend.get("job", budget),
        lambda backend, budget: backend.list("", budget),
        lambda backend, budget: backend.release("job", "0" * 32, budget),
        lambda backend, budget: backend.cleanup(0, budget),
        lambda backend, budget: backend.force_release("job", 1, budget),
    ],
    ids=["get", "list", "release", "cleanup", "force_release"],
)
def test_every_verb_ends_in_its_time_behind_a_black_hole(
    dsn: str, proxy: Proxy, verb: Callable[[PostgresBackend, Budget], object]
) -> None:
    backend = PostgresBackend(proxy.through(dsn))
    assert backend.list("", Budget.of(10, clock.now)) == []
    proxy.black_hole()

    started = time.monotonic()
    with pytest.raises(BackendUnavailable):
        verb(backend, Budget.of(0.7, clock.now))

    assert 0.6 < time.monotonic() - started < 10
    backend.close()


def test_a_connect_timeout_in_the_address_wins() -> None:
    with socket.create_server(("127.0.0.1", 0), backlog=16) as silent:
        backend = PostgresBackend(
            f"postgresql://somebody@127.0.0.1:{silent.getsockname()[1]}/db?connect_timeout=2", connect_timeout=60
        )
        with pytest.raises(BackendUnavailable):
            backend.get("job", Budget.of(5, clock.now))
        silent.settimeout(0)
        tries = 0
        try:
            while True:
                silent.accept()[0].close()
                tries += 1
        except BlockingIOError:
            assert tries >= 2
    backend.close()


def test_a_wait_goes_on_through_lost_connections_and_a_restart(fresh_postgres: FreshPostgres, client: Clients) -> None:
    server = fresh_postgres()
    leases, rival = client(server.dsn), client(server.dsn)
    assert rival.try_acquire("job", ttl=60)
    got: list[object] = []
    waiting = threading.Thread(
        target=lambda: got.append(leases.wait_for_lease("job", ttl=60, timeout=30, poll_interval=0.1))
    )
    waiting.start()

    kill_connections(server.dsn)
    assert is_so_for(0.5, waiting.is_alive)
    server.restart("immediate")
    assert is_so_for(0.5, waiting.is_alive)
    assert rival.release("job")

    waiting.join(10)
    assert got == [leases.held("job")]


def test_releasing_during_an_outage_is_prompt_since_no_retry_is_slept_through(
    dsn: str, proxy: Proxy, client: Clients
) -> None:
    leases = client(proxy.through(dsn))
    assert leases.try_acquire("job", ttl=20)
    assert leases.try_acquire("other", ttl=3)
    proxy.refuse()
    proxy.cut()
    time.sleep(1.5)  # renewals fail meanwhile and back off
    proxy.pass_through()

    started = time.monotonic()
    assert leases.release("job")
    assert leases.release("other")

    assert time.monotonic() - started < 10


def test_a_slow_link_costs_no_lease(dsn: str, proxy: Proxy, client: Clients) -> None:
    lost: list[str] = []
    leases = client(proxy.through(dsn), on_lease_lost=lost.append, pool_size=8)
    proxy.delay(0.005)
    count = 60

    def take(places: range) -> None:
        for place in places:
            assert leases.try_acquire(f"job-{place}", ttl=3)

    threads = [threading.Thread(target=take, args=(range(start, count, 6),)) for start in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)

    assert is_so_for(5.0, lambda: len(leases.holding()) == count)
    assert lost == []


def test_a_forced_release_whose_reply_was_lost_is_still_one(
    dsn: str, proxy: Proxy, client: Clients, rival: PGLease
) -> None:
    operator = client(proxy.through(dsn))
    assert rival.try_acquire("job", ttl=60)
    lease = operator.get_lease("job")
    assert lease is not None
    dropped = proxy.drop_next_reply(b"job")

    forced = operator.force_release("job", lease.fencing_token)

    assert dropped.is_set()
    assert forced is True
    assert operator.force_release("job", lease.fencing_token) is False
