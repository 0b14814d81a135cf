"""Deaths: how soon the next holder has the lease, how soon the present one is told."""

from __future__ import annotations

import random
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial

import pytest

from pglease import BackendUnavailable, FencedError, LeaseLostError, PGLease
from pglease.backends import hybrid_keeper
from pglease.handles import HeldLease
from pglease.records import Granted, Refused, Request
from pglease.testing.proxy import Proxy
from tests.support.hybrid import clients, end, end_session_of, hybrid, is_bound, mark_of, pid_of, stores
from tests.support.worlds import Stopwatch, always, ask, budget, child, connect, execute, expire, grant, wait_until

HOLDER = """
leases = PGLease("hybrid+" + dsn, owner_id="holder")
lease = leases.wait_for_lease(sys.argv[2], ttl=float(sys.argv[3]), timeout=20)
say(lease.fencing_token)
hear()
say(lease.held, lease.loss and lease.loss.reason)
hear()
"""
SOON = 15.0
"""Seconds in which a second's worth of work is done on a machine that is much too small; far from a ttl of 60 s."""


@pytest.fixture
def heir(dsn: str) -> Iterator[PGLease]:
    """Somebody who wants what others hold, and is connected already."""
    with clients(dsn, "heir") as (client,):
        client.try_acquire("warm-up")
        client.release("warm-up")
        yield client


def taken_by(client: PGLease, name: str = "job") -> tuple[HeldLease, float]:
    """Wait for a lease; return it, and how long that took."""
    watch = Stopwatch()
    return client.wait_for_lease(name, ttl=60, timeout=30), watch.seconds


@pytest.mark.parametrize("turn", range(3))
def test_a_killed_process_is_succeeded_long_before_its_ttl(dsn: str, heir: PGLease, turn: int) -> None:
    with child(HOLDER, dsn, "job", "60") as process:
        token = int(process.hear())
        wait_until(lambda: is_bound(dsn, "job"))
        assert heir.try_acquire("job") is False

        process.send(signal.SIGKILL)
        lease, took = taken_by(heir)

    assert lease.fencing_token == token + 1
    assert took < SOON, turn


def test_a_waiter_that_was_there_before_the_death_succeeds_as_soon(dsn: str, heir: PGLease) -> None:
    with child(HOLDER, dsn, "job", "60") as process:
        process.hear()
        wait_until(lambda: is_bound(dsn, "job"))
        found: list[float] = []
        waiter = threading.Thread(target=lambda: found.append((taken_by(heir), time.monotonic())[1]))
        waiter.start()
        time.sleep(0.5)  # it polls by now
        assert not found

        killed_at = time.monotonic()
        process.send(signal.SIGKILL)
        waiter.join(30)

    assert found[0] - killed_at < SOON


def _queue_has(dsn: str, length: int) -> bool:
    return execute(dsn, "SELECT count(*) FROM pglease_leases_tickets") == [(length,)]


def test_those_who_queue_for_a_dead_holders_name_are_served_in_their_order(dsn: str) -> None:
    served: list[str] = []
    with child(HOLDER, dsn, "job", "60") as process, clients(dsn, *"abcde") as crowd:
        process.hear()
        wait_until(lambda: is_bound(dsn, "job"))

        def wait(client: PGLease) -> None:
            with client.acquire("job", ttl=60, wait=60, fair=True):
                served.append(client.owner_id)

        threads = []
        for place, client in enumerate(crowd, 1):
            threads.append(threading.Thread(target=wait, args=(client,)))
            threads[-1].start()
            wait_until(partial(_queue_has, dsn, place))
        watch = Stopwatch()
        process.send(signal.SIGKILL)
        wait_until(lambda: served)
        took = watch.seconds
        for thread in threads:
            thread.join(30)

    assert served == list("abcde")
    assert took < SOON


def test_a_forked_child_that_lives_on_keeps_nothing_of_its_parents(dsn: str, heir: PGLease) -> None:
    script = """
import os, time
leases = PGLease("hybrid+" + dsn)
leases.try_acquire("job", ttl=60)
if os.fork() == 0:
    say("child", leases.held("job"))
    for stream in (0, 1, 2):
        os.close(stream)
    time.sleep(50)
    os._exit(0)
hear()
"""
    with child(script, dsn) as process:
        assert process.hear() == "child None"

        process.send(signal.SIGKILL)
        _, took = taken_by(heir)

    assert took < SOON


def test_an_ended_session_is_told_at_once_and_to_every_hold(dsn: str) -> None:
    lost: list[str] = []
    with clients(dsn, "holder", on_lease_lost=lost.append) as (client,):
        for name in ("a", "b", "c"):
            client.try_acquire(name, ttl=60)
        leases = client.holding()
        pid = mark_of(dsn, "a")

        watch = Stopwatch()
        execute(dsn, "SELECT pg_terminate_backend(%s)", pid)
        assert all(lease.lost.wait(15) for lease in leases)

        assert watch.seconds < 10
        assert {lease.loss.reason for lease in leases if lease.loss} == {"session_died"}
        assert client.holding() == []
        wait_until(lambda: sorted(lost) == ["a", "b", "c"])


def test_a_block_whose_session_died_says_so_at_its_end(dsn: str) -> None:
    with (
        clients(dsn, "holder") as (client,),
        pytest.raises(LeaseLostError, match="session") as caught,
        client.acquire("job", ttl=60) as lease,
    ):
        end_session_of(dsn, "job")
        assert lease.lost.wait(20)

    assert caught.value.reason == "session_died"


def test_the_holder_is_told_before_anybody_else_is_granted_the_name(dsn: str) -> None:
    with clients(dsn, "holder", "heir") as (first, heir):
        first.try_acquire("job", ttl=60)
        lease = first.held("job")
        assert lease is not None

        end_session_of(dsn, "job")
        successor, _ = taken_by(heir)

        assert not lease.held
        assert successor.held
        assert successor.fencing_token == lease.fencing_token + 1


def test_a_lost_lease_is_not_locked_again_in_silence(dsn: str) -> None:
    with clients(dsn, "holder") as (client,):
        client.try_acquire("job", ttl=6)
        lease = client.held("job")
        assert lease is not None
        end_session_of(dsn, "job")
        assert lease.lost.wait(20)
        ends = execute(dsn, "SELECT expires_at FROM pglease_leases")

        client.try_acquire("another")  # there is a new session by now
        time.sleep(2.5)  # longer than a heartbeat interval

        assert execute(dsn, "SELECT expires_at FROM pglease_leases WHERE task_name = 'job'") == ends


def test_the_client_can_take_the_name_again_as_a_new_hold(dsn: str) -> None:
    with clients(dsn, "holder") as (client,):
        client.try_acquire("job", ttl=60)
        end_session_of(dsn, "job")
        wait_until(lambda: client.held("job") is None)  # until it hears of it, this thread would wait for itself

        again, took = taken_by(client)

        assert again.fencing_token == 2
        assert took < SOON


def test_a_stopped_process_is_waited_for_until_its_ttl_and_told_when_it_goes_on(dsn: str, heir: PGLease) -> None:
    with child(HOLDER, dsn, "job", "3") as process:
        process.hear()
        wait_until(lambda: is_bound(dsn, "job"))

        process.send(signal.SIGSTOP)
        lease, took = taken_by(heir)

        assert 1.0 < took < 20
        wait_until(lambda: is_bound(dsn, "job"))  # the old session is ended, and ours has the lock
        process.send(signal.SIGCONT)
        process.tell()
        assert process.hear().startswith("False")
        assert lease.held


def test_the_next_holder_of_a_stopped_one_is_protected_by_its_own_death(dsn: str, heir: PGLease) -> None:
    with ExitStack() as stack:
        frozen = stack.enter_context(child(HOLDER, dsn, "job", "2"))
        frozen.hear()
        frozen.send(signal.SIGSTOP)
        second = stack.enter_context(child(HOLDER, dsn, "job", "60"))
        second.hear()
        wait_until(lambda: is_bound(dsn, "job"))

        second.send(signal.SIGKILL)
        lease, took = taken_by(heir)

        assert took < SOON
        assert lease.fencing_token == 3


def test_a_lapsed_hold_does_not_cost_its_session_the_leases_that_run(dsn: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hybrid_keeper, "_SWEEP_EVERY", 3600.0)  # as if it stood still: it keeps the lock
    with stores(dsn, 2) as (busy, rival):
        _, lease_id = grant(busy, "running", 60)
        grant(busy, "lapsed", 60)
        expire(dsn, "lapsed")
        pid = pid_of(busy)

        grant(rival, "lapsed", 60)
        always(lambda: busy._keeper._session is not None and mark_of(dsn, "lapsed") is None, seconds=1.5)
        assert pid_of(busy) == pid

        busy.release("running", lease_id, budget())
        busy.close()
        wait_until(lambda: is_bound(dsn, "lapsed"))


def test_a_retry_of_a_grant_whose_session_died_meanwhile_has_a_bond_of_its_own(dsn: str) -> None:
    with stores(dsn, 1) as (backend,):
        lease, lease_id = grant(backend, "job")
        end_session_of(dsn, "job")

        again = backend.try_acquire(Request("job", "somebody", lease_id, 60), budget())

        assert isinstance(again, Granted)
        assert again.lease.fencing_token == lease.fencing_token
        assert again.bond is not None
        assert again.bond.loss is None
        assert mark_of(dsn, "job") == pid_of(backend)


def test_a_grant_whose_answer_was_lost_in_a_cut_binds_nobody_for_longer_than_the_handover(
    dsn: str, cut_off: Proxy, heir: PGLease
) -> None:
    """The commit happened, its answer did not come, and then the line is dead: for the session, too."""
    with stores(cut_off.through(dsn), 1) as (unlucky,), ThreadPoolExecutor(1) as pool:
        pid_of(unlucky)
        unlucky.get("job", budget())  # connected
        cut_off.refuse()
        dropped = cut_off.drop_next_reply(b"job")
        request = Request("job", "unlucky", "ab" * 16, 60)
        asked = pool.submit(unlucky.try_acquire, request, budget(3.0))
        assert dropped.wait(20)
        assert execute(dsn, "SELECT owner_id, fencing_token FROM pglease_leases WHERE task_name = 'job'") == [
            ("unlucky", 1)
        ]
        assert is_bound(dsn, "job")

        cut_off.cut()
        lease, took = taken_by(heir)

        assert took < 30
        assert lease.fencing_token == 2
        error = asked.exception(60)
        assert isinstance(error, BackendUnavailable)
        assert error.outcome_unknown

        cut_off.pass_through()
        assert isinstance(unlucky.try_acquire(request, budget()), Refused)
        assert lease.held


def test_a_release_into_min_hold_is_waited_for_though_the_session_dies(dsn: str) -> None:
    with stores(dsn, 2) as (first, second):
        _, lease_id = grant(first, "job", 60)
        pid = pid_of(first)
        first.release("job", lease_id, budget(), min_hold=60)

        end(dsn, pid)

        watch = Stopwatch()
        while watch.seconds < 1.0:
            answer, _ = ask(second, "job")
            assert answer.__class__.__name__ == "Refused"


def _kill_sessions(dsn: str, rounds: int, seed: int) -> None:
    """Two clients want one name; the session of whoever has it is ended at a random moment, again and again.

    Each time the holder is told, before the next one begins; and a guarded write passes for the present holder alone.
    """
    spread = random.Random(seed)
    with clients(dsn, "one", "two") as pair:
        before: HeldLease | None = None
        for turn in range(rounds):
            client = pair[turn % 2]
            lease, _ = taken_by(client)
            if before is not None:
                assert not before.held
                assert lease.fencing_token == before.fencing_token + 1
                with connect(dsn, autocommit=False) as stale, pytest.raises(FencedError):
                    before.guard(stale)
            assert lease.held
            with connect(dsn, autocommit=False) as connection:
                lease.guard(connection)
            time.sleep(spread.choice([0.0, 0.001, 0.01, 0.05, 0.3]))
            pid = mark_of(dsn, "job")
            if pid is None:  # not bound yet
                pid = wait_until(lambda: mark_of(dsn, "job"))
            execute(dsn, "SELECT pg_terminate_backend(%s)", pid)
            assert lease.lost.wait(10), turn
            assert lease.loss is not None
            assert lease.loss.reason == "session_died"
            before = lease


def test_a_few_killed_sessions_are_told_every_time(dsn: str) -> None:
    _kill_sessions(dsn, 8, seed=1)


@pytest.mark.long
@pytest.mark.timeout(900)
def test_two_hundred_killed_sessions_are_told_every_time_and_never_two_hold(dsn: str) -> None:
    _kill_sessions(dsn, 200, seed=2)


def test_the_address_names_the_backend(dsn: str) -> None:
    with PGLease(hybrid(dsn) + "?pglease.handover_delay=0.5&pglease.max_advisory=7") as client:
        assert client.backend.traits.prompt_failover
        assert client.try_acquire("job")
        assert is_bound(dsn, "job")
