"""Labels for people, random ids for acquisitions, and which thread or task is running."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import re
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from pglease import identity


def test_a_lease_id_is_32_hex_digits_that_never_come_again():
    ids = {identity.new_lease_id() for _ in range(10_000)}

    assert len(ids) == 10_000
    assert all(re.fullmatch("[0-9a-f]{32}", one) for one in ids)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_forked_children_do_not_share_their_randomness():
    context = multiprocessing.get_context("fork")
    answers = context.SimpleQueue()
    children = [
        context.Process(target=lambda: answers.put((identity.new_lease_id(), identity.default_owner())))
        for _ in range(4)
    ]
    for child in children:
        child.start()
    told = [answers.get() for _ in children]
    for child in children:
        child.join(20)

    assert len({lease_id for lease_id, _ in told}) == 4
    assert len({owner for _, owner in told}) == 4


def test_the_default_label_says_host_and_process_and_is_no_two_times_the_same():
    host, pid, random = identity.default_owner().rsplit(":", 2)

    assert host == socket.gethostname()[:200]
    assert int(pid) == os.getpid()
    assert re.fullmatch("[0-9a-f]{8}", random)
    assert identity.default_owner() != identity.default_owner()


@pytest.mark.parametrize(("host", "shown"), [("", "localhost"), ("h" * 300, "h" * 200)])
def test_a_host_without_a_name_and_one_with_an_endless_name_still_make_a_label(monkeypatch, host, shown):
    monkeypatch.setattr(socket, "gethostname", lambda: host)

    label = identity.default_owner()

    assert label.startswith(f"{shown}:")
    assert len(label) <= 255


def test_one_thread_is_one_caller_and_another_thread_is_another():
    here = identity.current_caller()

    assert identity.current_caller() == here
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(identity.current_caller).result() != here


def test_tasks_of_one_loop_are_different_callers():
    async def who() -> tuple[int, int]:
        before = identity.current_caller()
        await asyncio.sleep(0)
        assert identity.current_caller() == before
        return before

    async def main() -> list[tuple[int, int]]:
        return await asyncio.gather(who(), who())

    one, two = asyncio.run(main())

    assert one != two
    assert identity.current_caller() not in {one, two}


def test_a_loop_between_two_tasks_is_nobodys_task():
    async def main() -> tuple[int, int]:
        told: asyncio.Future[tuple[int, int]] = asyncio.get_running_loop().create_future()
        asyncio.get_running_loop().call_soon(lambda: told.set_result(identity.current_caller()))
        return await told

    assert asyncio.run(main())[1] == 0


def test_asking_who_runs_does_not_load_asyncio():
    script = "import sys; from pglease import identity; identity.current_caller(); sys.exit('asyncio' in sys.modules)"

    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0
