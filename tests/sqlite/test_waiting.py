"""Waiters in other processes: woken through a named pipe, asleep until then."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import threading
import time

import pytest

from pglease import PGLease, clock
from pglease.backends import sqlite_pipes, sqlite_turn
from pglease.backends.sqlite import SQLiteBackend
from pglease.errors import BackendClosed, BackendUnavailable
from pglease.records import Change
from pglease.testing.harness import LONG, Worker, budget
from tests.sqlite.test_processes import fork, in_child
from tests.support.sqlite_files import plain
from tests.support.worlds import wait_until

WAITER = """
import sys, time
from pglease import clock
from pglease.backends.sqlite import SQLiteBackend
from pglease.records import Granted
from pglease.testing.harness import Worker
worker = Worker(SQLiteBackend(sys.argv[1]), "waiter")
ear = worker.listens()
assert worker.mark("job")
worker.is_refused("job")
print("waits", flush=True)
used = time.process_time()
changes = ear.subscription.next(60)
heard, used = clock.now(), time.process_time() - used
hold = worker.hold("job")
print(heard, clock.now(), used, flush=True)
hold.released()
"""


class Waiter:
    """Another process that waits for `job` and says when it heard, when it had it, and what the wait had cost."""

    def __init__(self, path) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", WAITER, str(path)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        assert self.process.stdout.readline() == "waits\n", self.process.stderr.read()

    def served(self) -> tuple[float, float, float]:
        out, err = self.process.communicate(timeout=60)
        assert self.process.returncode == 0, err
        heard, had, used = map(float, out.split())
        return heard, had, used


def pipes(path) -> list[str]:
    directory = path.with_name(path.name + "-waiters")
    return sorted(os.listdir(directory)) if directory.exists() else []  # noqa: PTH208


def test_a_waiter_in_another_process_is_served_at_once(path, alice) -> None:
    """Within 50 ms of the release; once is enough: what is measured is the way, not how busy the machine is."""
    took: list[float] = []
    while len(took) < 8 and min(took, default=1) >= 0.05:
        hold = alice.hold("job")
        waiter = Waiter(path)
        released_at = clock.now()
        hold.released()
        _, had, _ = waiter.served()
        took.append(had - released_at)

    assert min(took) < 0.05, took


CLIENT = """
import sys
from pglease import PGLease, clock
with PGLease(f"sqlite:///{sys.argv[1]}") as leases:
    print("asks", flush=True)
    lease = leases.wait_for_lease("job", timeout=100, poll_interval=50)
    print(clock.now(), flush=True)
"""


def test_what_users_call_is_served_at_once_too(path) -> None:
    """`wait_for_lease` in another process, which would look again after fifty seconds."""
    took: list[float] = []
    while len(took) < 8 and min(took, default=1) >= 0.05:
        with PGLease(f"sqlite:///{path}") as leases:
            assert leases.try_acquire("job", ttl=600)
            waiter = subprocess.Popen([sys.executable, "-c", CLIENT, str(path)], stdout=subprocess.PIPE, text=True)
            assert waiter.stdout.readline() == "asks\n"
            wait_until(lambda: waits(path))
            released_at = clock.now()
            leases.release("job")
            out, _ = waiter.communicate(timeout=60)
            took.append(float(out) - released_at)

    assert min(took) < 0.05, took


def waits(path) -> bool:
    """Whether somebody has marked the name, and listens."""
    with plain(path) as connection:
        ((marked,),) = connection.execute(
            "SELECT waited_until_ns FROM pglease_leases WHERE task_name = 'job'"
        ).fetchall()
    return marked / 1e9 > clock.now() and bool(pipes(path))


def test_a_waiter_sleeps(path, alice) -> None:
    """Not a look at the file, and next to no time of a processor, for as long as nothing happens."""
    hold = alice.hold("job")
    waiter = Waiter(path)
    before = path.with_name(path.name + "-shm").read_bytes()

    time.sleep(1.0)

    assert path.with_name(path.name + "-shm").read_bytes() == before
    hold.released()
    assert waiter.served()[2] < 0.1


def test_the_pipe_of_a_listener_that_died_is_removed_by_whoever_finds_it(path, alice) -> None:
    hold = alice.hold("job")
    waiter = Waiter(path)
    assert len(pipes(path)) == 1
    waiter.process.kill()
    waiter.process.communicate()

    hold.released()

    assert pipes(path) == []


def test_a_cleanup_removes_the_pipes_of_the_dead_and_leaves_those_of_the_living(path, alice, bob) -> None:
    alice.hold("job")
    waiter = Waiter(path)
    ear = bob.listens()
    waiter.process.kill()
    waiter.process.communicate()
    assert len(pipes(path)) == 2

    alice.cleanup()

    assert pipes(path) == [ear.subscription.path.name]


def test_a_closed_subscription_leaves_nothing_behind(path, alice) -> None:
    before = len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0  # noqa: PTH112, PTH208
    ears = [alice.listens() for _ in range(5)]
    assert len(pipes(path)) == 5

    for ear in ears:
        ear.close()

    assert pipes(path) == []
    if before:
        assert len(os.listdir("/proc/self/fd")) <= before + 3  # noqa: PTH208  # the connection and its log


def test_nothing_is_said_of_a_name_that_nobody_waits_for(alice, bob, monkeypatch) -> None:
    told = []
    monkeypatch.setattr(sqlite_pipes, "_tell", lambda *what: told.append(what))
    ear = bob.listens()

    alice.hold("job").released()

    assert told == []
    ear.close()


def test_nothing_is_said_of_what_was_not_committed(alice, bob, monkeypatch) -> None:
    alice.hold("job").released()
    bob.mark("job")
    ear = bob.listens()
    real = sqlite_turn.take

    def interrupted(turn, request):
        real(turn, request)
        raise KeyboardInterrupt

    monkeypatch.setattr(sqlite_turn, "take", interrupted)
    with pytest.raises(KeyboardInterrupt):
        alice.ask("job")

    assert list(ear.subscription.next(0.05)) == []
    ear.close()


def test_a_mark_that_lasts_is_not_written_again(alice, bob, monkeypatch) -> None:
    alice.hold("job")
    assert bob.mark("job", 600)
    monkeypatch.setattr(bob.backend._file, "write", None)

    assert bob.mark("job", 600)
    assert bob.mark("job", 60)


def test_a_pipe_that_nobody_reads_is_cut_off_and_its_reader_told_to_look(path, alice, bob) -> None:
    """Ten thousand hints without a reader: nobody waits for it, and it learns that it missed some."""
    alice.hold("job")
    assert bob.mark("job")
    ear = bob.listens()

    alice.backend._pipes.announce([Change("job", "released", 0.0)] * 100)
    for _ in range(100):
        alice.backend._pipes.announce([Change("n" * 255, "released", 0.0)] * 8)

    assert pipes(path) == []
    with pytest.raises(BackendUnavailable, match="look again"):
        while True:
            ear.subscription.next(5)
    ear.close()


def test_what_cannot_be_understood_is_a_reason_to_look_again(path, bob) -> None:
    ear = bob.listens()
    with ear.subscription.path.open("wb", buffering=0) as pipe:
        pipe.write(b'["job", "rel\n')

    with pytest.raises(BackendUnavailable, match="look again"):
        ear.subscription.next(5)
    ear.close()


def test_a_line_that_came_in_two_pieces_is_one(bob) -> None:
    ear = bob.listens()
    with ear.subscription.path.open("wb", buffering=0) as pipe:
        pipe.write(b'["job", "rele')
        assert list(ear.subscription.next(5)) == []
        pipe.write(b'ased", 0.5]\n')

        assert list(ear.subscription.next(5)) == [Change("job", "released", 0.5)]
    ear.close()


def test_what_is_no_pipe_is_not_written_to(path, alice, bob) -> None:
    """Nor is what a symbolic link leads to."""
    alice.hold("job")
    bob.mark("job")
    ear = bob.listens()
    directory = path.with_name(path.name + "-waiters")
    (directory / "plain").write_text("mine")
    (directory / "link").symlink_to(path)
    before = path.read_bytes()

    alice.backend._pipes.announce([Change("job", "released", 0.0)])

    assert (directory / "plain").read_text() == "mine"
    assert path.read_bytes() == before
    assert ear.hears_next().name == "job"
    ear.close()


def test_where_no_pipe_can_be_made_nothing_can_be_heard(path, alice) -> None:
    alice.hold("job")
    path.with_name(path.name + "-waiters").write_text("in the way")

    assert alice.backend.listen(budget()) is None
    alice.hold("other").released()


def test_whoever_may_write_the_file_may_write_the_pipe(path, alice) -> None:
    alice.hold("job")
    path.chmod(0o660)

    ear = alice.listens()

    assert stat.S_IMODE(ear.subscription.path.stat().st_mode) == 0o660
    ear.close()


def test_closing_wakes_a_sleeper_and_closes_what_it_slept_on(bob) -> None:
    ear = bob.listens()
    ended = []

    def sleep() -> None:
        try:
            ear.subscription.next(60)
        except BackendClosed as error:
            ended.append(error)

    thread = threading.Thread(target=sleep)
    thread.start()
    wait_until(ear.subscription._reading.locked)

    ear.close()
    thread.join(10)

    assert len(ended) == 1
    assert (ear.subscription._reader, ear.subscription._writer) == (None, None)


@fork
def test_a_child_leaves_its_parents_subscription_alone(path, alice, bob) -> None:
    hold = alice.hold("job")
    assert bob.mark("job")
    ear = bob.listens()

    assert in_child(lambda: (alice.is_refused("job").held_by, bob.backend.close())) == ("ok", ("alice", None))
    hold.released()

    assert ear.hears("job", "released").left == 0
    assert len(pipes(path)) == 1
    ear.close()


@fork
def test_a_child_may_listen_for_itself(alice) -> None:
    def hear() -> str:
        ear = alice.listens()
        worker = Worker(SQLiteBackend(alice.backend.path), "another")
        hold = worker.hold("job")
        worker.mark("job", LONG)
        hold.released()
        return ear.hears_next().what

    assert in_child(hear) == ("ok", "released")
