"""What can happen inside a process that goes on: to its interpreter, its threads, its log."""

from __future__ import annotations

import ctypes
import logging
import threading
import time
from itertools import pairwise

import pytest

from pglease import PGLease, clock
from tests.attacks.world import eventually

TTL = 2.0


def test_a_holder_whose_interpreter_stands_still_knows_at_once_that_it_lost(client, rival, measured) -> None:
    told: list[float] = []
    holder = client(on_lease_lost=lambda _: told.append(clock.now()))
    lease = holder.wait_for_lease("job", ttl=0.6)

    ctypes.PyDLL(None).usleep(1_500_000)  # with the interpreter's lock: no other thread of ours runs
    resumed = clock.now()

    assert not lease.held
    eventually(lambda: told)
    measured("a loss is told after the interpreter goes on", told[0] - resumed, 0.05)
    assert rival.wait_for_lease("job", ttl=60, timeout=20).fencing_token == lease.fencing_token + 1


class Renewals:
    """Notes when renewals were confirmed."""

    def __init__(self) -> None:
        self.at: list[float] = []

    def notify(self, event) -> None:
        if event.kind == "renewed":
            self.at.append(clock.now())


@pytest.mark.long
def test_threads_that_compute_without_end_delay_no_renewal_for_long(client, measured) -> None:
    renewals, enough = Renewals(), threading.Event()
    leases = client(observers=[renewals])
    lease = leases.wait_for_lease("job", ttl=TTL)

    def compute() -> None:
        while not enough.is_set():
            sum(range(1000))

    threads = [threading.Thread(target=compute, daemon=True) for _ in range(3)]
    for thread in threads:
        thread.start()
    try:
        eventually(lambda: len(renewals.at) >= 4)
    finally:
        enough.set()
        for thread in threads:
            thread.join()

    assert lease.held
    longest = max(later - earlier for earlier, later in pairwise(renewals.at))
    measured("between renewals beside busy threads", longest, TTL / 3 + 0.1)


@pytest.mark.long
def test_a_renewer_that_is_killed_costs_at_most_its_leases_and_is_never_silent(client) -> None:
    """Whether it is made anew or its leases are lost: nobody believes beyond what the store has granted."""
    told = threading.Event()
    leases = client(on_lease_lost=lambda _: told.set())
    lease = leases.wait_for_lease("job", ttl=TTL)
    (renewer,) = [each for each in threading.enumerate() if each.ident == leases.heartbeat_manager._thread.ident]

    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(renewer.ident), ctypes.py_object(SystemExit))
    time.sleep(1.5 * TTL)

    if not lease.held:
        assert told.wait(20)
    else:
        assert not leases.get_lease("job").is_expired()


class Broken(logging.Handler):
    """A handler that fails."""

    def emit(self, record: logging.LogRecord) -> None:
        raise OSError("the disk with the log is full")


def test_a_log_that_fails_stops_neither_renewals_nor_notices(client, rival) -> None:
    log, broken, told = logging.getLogger("pglease"), Broken(), threading.Event()
    leases = client(on_lease_lost=lambda _: told.set())
    log.addHandler(broken)
    try:
        kept = leases.wait_for_lease("kept", ttl=TTL)
        forced = leases.wait_for_lease("forced", ttl=TTL)
        assert rival.force_release("forced", forced.fencing_token)

        assert told.wait(20)
        time.sleep(1.5 * TTL)

        assert kept.held
    finally:
        log.removeHandler(broken)


def test_a_process_whose_threads_never_run_believes_no_longer_than_its_ttl(dsn: str, monkeypatch) -> None:
    """As under uWSGI without `enable-threads`."""
    with PGLease(dsn) as leases:
        monkeypatch.setattr("pglease.heartbeat.HeartbeatManager._run", lambda _: None)
        lease = leases.wait_for_lease("job", ttl=0.8)

        began = clock.now()
        eventually(lambda: not lease.held)

        assert clock.now() - began < 20
        assert lease.loss is not None


@pytest.mark.parametrize("when", ["atexit", "threading"])
def test_asking_while_the_interpreter_goes_down_ends_in_an_answer_or_an_error(child, when: str) -> None:
    script = f"""
import atexit, threading
from pglease import PGLease
leases = PGLease.from_env()
def ask():
    try:
        print("answer", leases.try_acquire("late"), flush=True)
    except Exception as error:
        print("error", type(error).__name__, flush=True)
{"atexit.register(ask)" if when == "atexit" else "threading._register_atexit(ask)"}
"""
    process = child(script, warnings="default")

    assert process.line().split()[0] in {"answer", "error"}
    assert process.process.wait(30) == 0


def test_a_clock_that_jumps_over_the_deadline_ends_belief_at_once(client, monkeypatch) -> None:
    """A machine that was suspended: the boot clock has gone on."""
    lease = client().wait_for_lease("job", ttl=60)
    real = clock.now

    monkeypatch.setattr(clock, "now", lambda: real() + 3600)

    assert not lease.held
    assert lease.remaining() == 0
    assert lease.lost.wait(20)


@pytest.mark.parametrize("uptime", [2.0**31, 2.0**31 / 1000, 2.0**53 / 1e9, 70 * 365 * 86400.0])
def test_a_machine_that_has_been_up_for_long_counts_as_well(client, monkeypatch, uptime: float) -> None:
    real, offset = clock.now, uptime - clock.now()
    monkeypatch.setattr(clock, "now", lambda: real() + offset)

    with client().acquire("job", ttl=30) as lease:
        assert lease.held
        assert 20 < lease.remaining() < 30
        assert not lease.lost.wait(0.05)
