"""How things end: close, the exit of the process however it comes, and what nobody remembers."""

from __future__ import annotations

import gc
import signal
import threading
import time
import warnings
from collections.abc import Callable

import pytest

from pglease import BackendClosed, LeaseLostError, PGLease
from pglease.backends.postgres import PostgresBackend
from pglease.testing.local_postgres import LocalPostgres
from tests.attacks.world import Child, sql

HELD = "SELECT count(*) FROM pglease_leases WHERE expires_at > clock_timestamp()"


def held_in(dsn: str) -> int:
    ((count,),) = sql(dsn, HELD)
    return int(count)


@pytest.mark.parametrize("pool_size", [1, 4])
def test_close_releases_everything_may_be_repeated_and_then_every_call_is_refused(
    dsn: str, client: Callable[..., PGLease], pool_size: int
) -> None:
    leases = client(pool_size=pool_size)
    for place in range(3):
        assert leases.try_acquire(f"job-{place}", ttl=60)
    handle = leases.held("job-0")
    assert handle is not None

    leases.close()
    leases.close()

    assert held_in(dsn) == 0
    assert not handle.held
    for call in (
        lambda: leases.try_acquire("job"),
        lambda: leases.acquire("job").__enter__(),
        lambda: leases.wait_for_lease("job"),
        lambda: leases.release("job-0"),
        lambda: leases.renew("job-0"),
        lambda: leases.held("job-0"),
        leases.holding,
        lambda: leases.get_lease("job-0"),
        leases.list_leases,
        leases.cleanup_expired,
        lambda: leases.force_release("job-0", 1),
        leases.singleton_task("job")(lambda: None),
    ):
        with pytest.raises(BackendClosed):
            call()


def test_close_leaves_a_backend_that_it_did_not_open_to_its_owner(dsn: str) -> None:
    backend = PostgresBackend(dsn)
    with PGLease(backend) as one:
        assert one.try_acquire("job", ttl=60)
    with PGLease(backend) as other:
        assert other.try_acquire("job", ttl=60)
    backend.close()
    backend.close()
    with pytest.raises(BackendClosed), PGLease(backend) as late:
        late.try_acquire("job")


def test_a_block_whose_client_is_closed_is_told(leases: PGLease, rival: PGLease) -> None:
    with pytest.raises(LeaseLostError) as caught, leases.acquire("job", ttl=60) as lease:
        leases.close()
        assert not lease.held
        assert lease.lost.is_set()

    assert caught.value.reason == "closed"
    assert rival.wait_for_lease("job", timeout=5, poll_interval=0.1)


def test_closing_wakes_those_who_wait(leases: PGLease, rival: PGLease) -> None:
    assert rival.try_acquire("job", ttl=60)
    ended: list[BaseException] = []

    def wait() -> None:
        try:
            leases.wait_for_lease("job", timeout=60, poll_interval=30)
        except BackendClosed as error:
            ended.append(error)

    waiting = threading.Thread(target=wait)
    waiting.start()

    leases.close()

    waiting.join(3)
    assert len(ended) == 1


def test_a_forgotten_handle_is_released_with_a_warning(leases: PGLease, rival: PGLease) -> None:
    context = leases.acquire("job", ttl=60)
    with pytest.warns(ResourceWarning, match="'job' was dropped"):  # noqa: PT031
        context.__enter__()
        del context
        gc.collect()

    assert rival.wait_for_lease("job", ttl=60, timeout=5, poll_interval=0.05)


def test_a_forgotten_client_lets_its_leases_go(dsn: str, rival: PGLease) -> None:
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        forgotten = PGLease(dsn)
        assert forgotten.try_acquire("job", ttl=60)
        del forgotten
        gc.collect()
        assert rival.wait_for_lease("job", ttl=60, timeout=5, poll_interval=0.05)

    assert any(issubclass(each.category, ResourceWarning) for each in seen)


class Worker:
    """Has a client, whose callbacks refer to it."""

    def __init__(self, dsn: str) -> None:
        self.leases = PGLease(dsn, on_lease_lost=self.told, on_at_risk=self.told)

    def told(self, name: str) -> None:
        """Be told."""


def test_a_forgotten_client_whose_callbacks_refer_to_it_lets_its_leases_go(dsn: str, rival: PGLease) -> None:
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        forgotten = Worker(dsn)
        assert forgotten.leases.try_acquire("job", ttl=60)
        del forgotten
        gc.collect()
        assert rival.wait_for_lease("job", ttl=60, timeout=20, poll_interval=0.05)

    assert any(issubclass(each.category, ResourceWarning) for each in seen)


def test_what_the_client_owns_needs_no_handle_to_be_kept(leases: PGLease, rival: PGLease) -> None:
    assert leases.try_acquire("job", ttl=2)
    gc.collect()

    until = time.monotonic() + 3
    while time.monotonic() < until:
        assert not rival.try_acquire("job", ttl=1)
        time.sleep(0.01)


HOLDER = """
    import os, sys, threading, time
    from pglease import PGLease
    leases = PGLease(os.environ["PGLEASE_URL"])
    leases.try_acquire("job", ttl=float(sys.argv[1]))
    print("holds")
"""


def test_a_normal_exit_releases(dsn: str, child: Callable[..., Child]) -> None:
    holder = child(HOLDER, 600)

    assert holder.rest() == ["holds"]
    assert held_in(dsn) == 0


def test_an_exit_by_an_error_releases_and_keeps_its_exit_code(dsn: str, child: Callable[..., Child]) -> None:
    holder = child(HOLDER + "    sys.exit(7)\n", 600)
    assert holder.line() == "holds"

    assert holder.process.wait(20) == 7
    assert holder.errors() == ""
    assert held_in(dsn) == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_process_that_is_ended_by_a_signal_keeps_its_lease_until_its_ttl(
    dsn: str, child: Callable[..., Child], rival: PGLease, number: int
) -> None:
    holder = child(HOLDER + "    sys.stdin.readline()\n", 2)
    assert holder.line() == "holds"

    holder.signal(number)
    assert holder.process.wait(10) == -number
    assert held_in(dsn) == 1

    assert rival.wait_for_lease("job", ttl=60, timeout=5, poll_interval=0.1).fencing_token == 2


def test_exit_does_not_wait_for_a_frozen_server(
    fresh_postgres: Callable[..., LocalPostgres], child: Callable[..., Child]
) -> None:
    server = fresh_postgres()
    holder = child(HOLDER + "    sys.stdin.readline()\n    print('bye')\n", 600, where=server.dsn)
    assert holder.line() == "holds"
    server.freeze()

    started = time.monotonic()
    holder.say()
    assert holder.line() == "bye"
    assert holder.process.wait(20) == 0

    assert time.monotonic() - started < 15
    assert "Traceback" not in holder.errors()
    server.thaw()


def test_work_that_goes_on_in_a_daemon_thread_at_exit_is_not_released_under_its_feet(
    dsn: str, child: Callable[..., Child]
) -> None:
    holder = child(
        HOLDER
        + """
    def work():
        with leases.acquire("block", ttl=600):
            print("in the block")
            time.sleep(60)
    threading.Thread(target=work, daemon=True).start()
    sys.stdin.readline()
    """,
        600,
    )
    assert [holder.line(), holder.line()] == ["holds", "in the block"]

    assert holder.say().rest() == []

    assert sql(dsn, "SELECT task_name FROM pglease_leases WHERE expires_at > clock_timestamp()") == [("block",)]


BUSY = """
    import os, random, sys, threading, time
    from pglease import PGLease
    from pglease.errors import BackendClosed, LeaseLostError
    random.seed(int(sys.argv[1]))
    leases = PGLease(os.environ["PGLEASE_URL"], heartbeat_interval=0.1)
    def churn(place):
        try:
            while True:
                with leases.acquire(f"churn-{place}", ttl=30, on_lost="log") as _:
                    time.sleep(random.random() / 100)
        except BackendClosed:
            pass
    for place in range(3):
        threading.Thread(target=churn, args=(place,), daemon=True).start()
    leases.try_acquire("kept", ttl=60)
    time.sleep(random.random() / 3)
"""


@pytest.mark.parametrize("exits", [10, pytest.param(100, marks=pytest.mark.long)])
def test_the_exit_of_a_busy_process_is_silent_whenever_it_comes(
    dsn: str, child: Callable[..., Child], exits: int
) -> None:
    PGLease(dsn).close()
    for start in range(0, exits, 5):
        for busy in [child(BUSY, seed) for seed in range(start, start + 5)]:
            assert busy.rest(logged="lapses: the backend is closed") == []
