"""Who asks is told apart although the system uses its numbers again; a forked child finds no lock taken."""

from __future__ import annotations

import asyncio
import os
import signal
import threading

import pytest

from pglease import AcquireTimeout, default, identity


def in_a_thread(doing):
    told = []
    thread = threading.Thread(target=lambda: told.append(doing()))
    thread.start()
    thread.join(10)
    return told[0]


def test_a_thread_is_not_taken_for_one_that_has_ended_and_had_its_number(leases):
    def wait():
        try:
            return leases.wait_for_lease("job", timeout=0.05)
        except Exception as error:
            return error

    first = in_a_thread(lambda: (leases.try_acquire("job"), threading.get_ident()))
    for _ in range(20):
        answer, number = in_a_thread(lambda: (wait(), threading.get_ident()))
        assert isinstance(answer, AcquireTimeout)
        if number == first[1]:
            return
    pytest.skip("no number came again")


def test_a_task_is_not_taken_for_one_that_has_ended():
    async def who():
        return identity.current_caller()

    async def main():
        return [await asyncio.create_task(who()) for _ in range(20)]

    assert len(set(asyncio.run(main()))) == 20


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")
def test_a_child_that_is_forked_while_another_thread_makes_the_default_client_can_make_its_own(monkeypatch):
    monkeypatch.setenv("PGLEASE_URL", "memory://review")
    taken, done = threading.Event(), threading.Event()

    def hold():
        with default._lock:
            taken.set()
            done.wait(20)

    thread = threading.Thread(target=hold)
    thread.start()
    assert taken.wait(5)

    pid = os.fork()
    if pid == 0:
        signal.alarm(5)
        default.default_client()
        os._exit(0)
    _, status = os.waitpid(pid, 0)
    done.set()
    thread.join(5)

    assert status == 0
