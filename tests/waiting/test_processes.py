"""Waiting on PostgreSQL among processes: how fast, how fair, how cheap, and through what it holds."""

from __future__ import annotations

import itertools
import random
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress

import pytest

from pglease import AcquireTimeout, PGLease, PostgresBackend
from pglease.testing.local_postgres import LocalPostgres
from pglease.testing.proxy import Proxy
from tests.support.worlds import Child, all_at_once, child, clients, execute, two_clients, wait_until

PATIENCE = 60.0
TICKET = 6.0
"""Seconds a place in the queue lasts without its waiter."""

WORKER = """
import time
from pglease import waiting
fair, rounds, hold = sys.argv[2] == "fair", int(sys.argv[3]), float(sys.argv[4])
places = []
ended = waiting.Waiter._end
def note(self, found):
    places.append(self.place.number if self.place else 0)
    ended(self, found)
waiting.Waiter._end = note
client = PGLease(dsn)
client.get_lease("job")
say("ready")
hear()
told = []
for _ in range(rounds):
    lease = client.wait_for_lease("job", ttl=60, timeout=120, poll_interval=60, fair=fair)
    got = time.monotonic()
    time.sleep(hold)
    lease.release()
    told.append((lease.fencing_token, got, time.monotonic(), places[-1]))
say(told)
hear()
"""
"""Takes and releases so many times; tells for each hold its token, when it got it, when it had released it, and the
number of its ticket."""

WAITER = """
client = PGLease(dsn, owner_id=sys.argv[2])
say("ready")
try:
    lease = client.wait_for_lease("job", ttl=60, timeout=120, poll_interval=60, fair=True)
    say("held", lease.fencing_token)
    hear()
except BaseException as error:
    say(repr(error))
"""


@contextmanager
def children(script: str, count: int, *arguments: str) -> Iterator[list[Child]]:
    with ExitStack() as life:
        yield [life.enter_context(child(script, *arguments)) for _ in range(count)]


def holds(workers: list[Child], within: float = PATIENCE) -> list[tuple[int, float, float, int]]:
    """What all of them did, in the order of the tokens."""
    for worker in workers:
        assert worker.hear(PATIENCE) == "ready"
    for worker in workers:
        worker.tell("go")
    return sorted(hold for worker in workers for hold in eval(worker.hear(within)))


def hand_overs(told: list[tuple[int, float, float, int]]) -> list[float]:
    """Seconds from the return of each release until the next holder had it."""
    return [max(0.0, after[1] - before[2]) for before, after in itertools.pairwise(told)]


def queued(dsn: str) -> int:
    ((count,),) = execute(dsn, "SELECT count(*) FROM pglease_leases_tickets WHERE expires_at > clock_timestamp()")
    return int(count)


# -- how fast ----------------------------------------------------------------------------------------------------------


def test_among_processes_a_lease_is_handed_over_long_before_anybodys_next_look(dsn: str) -> None:
    with PGLease(dsn) as first, children(WORKER, 6, dsn, "unfair", "5", "0.01") as workers:
        assert first.list_leases() == []

        told = holds(workers)

    assert [token for token, *_ in told] == list(range(1, 31))
    assert statistics.median(hand_overs(told)) < 5


def test_with_notify_off_a_lapsed_hold_is_taken_over_at_its_known_expiry(dsn: str) -> None:
    with PGLease(PostgresBackend(dsn, notify=False)) as holder, PGLease(PostgresBackend(dsn, notify=False)) as waiter:
        assert holder.try_acquire("job", ttl=1.0, heartbeat=False)
        lapses_at = time.monotonic() + 1.0

        waiter.wait_for_lease("job", timeout=PATIENCE, poll_interval=60)

        assert -0.1 < time.monotonic() - lapses_at < 10
    assert execute(dsn, "SELECT count(*) FROM pglease_leases WHERE waited_until IS NOT NULL") == [(0,)]


# -- how fair ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rounds", [5, pytest.param(50, marks=[pytest.mark.long, pytest.mark.timeout(900)])])
def test_fair_waiters_of_many_processes_are_served_without_one_inversion(dsn: str, rounds: int) -> None:
    with PGLease(dsn) as holder, children(WORKER, 8, dsn, "fair", str(rounds), "0.005") as workers:
        assert holder.try_acquire("job", ttl=600)
        for worker in workers:
            assert worker.hear(PATIENCE) == "ready"
            worker.tell("go")
        wait_until(lambda: queued(dsn) == 8, PATIENCE)
        holder.release("job")

        told = sorted(hold for worker in workers for hold in eval(worker.hear(20 * PATIENCE)))

    numbers = [number for *_, number in told]
    assert len(told) == 8 * rounds
    assert numbers == sorted(numbers)
    assert len(set(numbers)) == len(numbers)


def test_the_death_of_the_first_in_the_queue_delays_the_next_by_no_more_than_its_ticket(dsn: str) -> None:
    with PGLease(dsn) as holder, ExitStack() as life:
        assert holder.try_acquire("job", ttl=600)
        waiters = []
        for place, label in enumerate(("first", "second"), 1):
            waiters.append(life.enter_context(child(WAITER, dsn, label)))
            assert waiters[-1].hear(PATIENCE) == "ready"
            wait_until(lambda place=place: queued(dsn) == place, PATIENCE)

        first, second = waiters
        first.process.kill()
        killed = time.monotonic()
        holder.release("job")
        assert second.hear(PATIENCE) == "held 2"

        assert time.monotonic() - killed < TICKET + 0.5 + 8.0  # eight for a busy machine


# -- how cheap ---------------------------------------------------------------------------------------------------------


def test_two_hundred_parked_waiters_cost_next_to_nothing(fresh_postgres: Callable[..., LocalPostgres]) -> None:
    server = fresh_postgres(settings={"log_statement": "all", "log_duration": "on", "log_line_prefix": "%p %x "})
    seconds = 3.0

    def said() -> list[str]:
        return [line for line in server.log_text().splitlines() if " LOG: " in line]

    with PGLease(server.dsn) as holder, clients(server.dsn, 4) as waiting:
        assert holder.try_acquire("job", ttl=600)
        before = len(said())
        cancel = threading.Event()

        def wait(client: PGLease) -> None:
            with suppress(AcquireTimeout):
                client.wait_for_lease("job", ttl=60, timeout=None, cancel=cancel)

        threads = [threading.Thread(target=wait, args=(waiting[place % 4],)) for place in range(200)]
        for thread in threads:
            thread.start()
        wait_until(lambda: sum(len(client.waiting()) for client in waiting) == 200, PATIENCE)
        wait_until(lambda: all(client.taking.room.hearing for client in waiting), PATIENCE)
        quiet_since = len(said())
        while len(said()) > quiet_since:
            quiet_since = len(said())
            cancel.wait(0.5)

        cancel.wait(seconds)  # nothing happens, and that is counted

        while_parked = said()[quiet_since:]
        cancel.set()
        for thread in threads:
            thread.join(PATIENCE)

    statements = [line for line in while_parked if "statement: " in line or "execute " in line]
    ids = {line.split()[1] for line in said()[before : quiet_since + len(while_parked)]} - {"0"}
    assert len(statements) < 5 * seconds
    assert len(ids) <= 2  # of the mark, and of another if two were marking at once


# -- through what it holds ---------------------------------------------------------------------------------------------


def test_with_every_notification_dropped_all_are_served_all_the_same(proxy: Proxy, dsn: str) -> None:
    proxy.drop_notifications()
    through = proxy.through(dsn) + "?sslmode=disable&gssencmode=disable"
    with PGLease(dsn) as holder, clients(through, 3) as waiting:
        assert holder.try_acquire("job", ttl=600)
        threads = [
            threading.Thread(
                target=lambda c=client: c.wait_for_lease("job", timeout=PATIENCE, poll_interval=0.05).release()
            )
            for client in waiting * 2
        ]
        for thread in threads:
            thread.start()
        wait_until(lambda: all(client.taking.room.hearing for client in waiting), PATIENCE)

        holder.release("job")
        for thread in threads:
            thread.join(PATIENCE)

        assert not any(thread.is_alive() for thread in threads)
        assert holder.get_lease("job").transitions == 6  # type: ignore[union-attr]


def test_a_wait_survives_a_restart_of_the_server_and_is_woken_afterwards(
    fresh_postgres: Callable[..., LocalPostgres],
) -> None:
    server = fresh_postgres()
    with two_clients(server.dsn) as (holder, waiter):
        assert holder.try_acquire("job", ttl=600)
        served: list[float] = []

        def wait() -> None:
            waiter.wait_for_lease("job", timeout=PATIENCE, poll_interval=60)
            served.append(time.monotonic())

        thread = threading.Thread(target=wait)
        thread.start()
        wait_until(lambda: waiter.taking.room.hearing, PATIENCE)
        server.restart()
        wait_until(lambda: waiter.taking.room.hearing and not served, PATIENCE)

        holder.release("job")
        released = time.monotonic()
        thread.join(PATIENCE)

        assert served
        assert served[0] - released < 10


# -- what is left ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [60, pytest.param(500, marks=[pytest.mark.long, pytest.mark.timeout(900)])])
def test_waits_cancelled_at_random_moments_leave_nothing_in_the_database(dsn: str, count: int) -> None:
    moments = random.Random(11)
    with PGLease(dsn) as holder, PGLease(dsn, owner_id="waiter") as waiter:
        assert holder.try_acquire("job", ttl=600)
        open_before = connections(dsn)

        def wait(fair: bool) -> None:
            cancel = threading.Event()
            timer = threading.Timer(moments.uniform(0, 0.3), cancel.set)
            timer.start()
            with suppress(AcquireTimeout):
                waiter.wait_for_lease("job", timeout=PATIENCE, cancel=cancel, fair=fair).release()
            timer.join()

        for begin in range(0, count, 30):
            all_at_once([lambda place=place: wait(place % 2 == 0) for place in range(min(30, count - begin))])

        assert waiter.waiting() == []
        wait_until(lambda: execute(dsn, "SELECT count(*) FROM pglease_leases_tickets") == [(0,)], PATIENCE)
        wait_until(lambda: listening(dsn) == 0, PATIENCE)
        assert connections(dsn) <= open_before + 5  # the waiter's own pool
        wait_until(lambda: waiter.taking.room.ear._thread is None, PATIENCE)
        holder.release("job")
        wait_until(lambda: holder.try_acquire("job", ttl=60), PATIENCE)


def connections(dsn: str) -> int:
    ((count,),) = execute(
        dsn, "SELECT count(*) FROM pg_stat_activity WHERE application_name = 'pglease' AND datname = current_database()"
    )
    return int(count)


def listening(dsn: str) -> int:
    ((count,),) = execute(
        dsn, "SELECT count(*) FROM pg_stat_activity WHERE query LIKE 'LISTEN%' AND datname = current_database()"
    )
    return int(count)
