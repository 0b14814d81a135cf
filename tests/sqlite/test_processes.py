"""Many processes on one lease file: crowds, the stopped, the killed, the forked."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from pglease import PGLease, clock
from pglease.backends import sqlite_turn
from pglease.backends.sqlite import SQLiteBackend
from pglease.errors import BackendClosed, BackendMisconfigured, BackendUnavailable
from pglease.records import Granted, Held, Refused, Request
from pglease.testing.harness import Worker, budget, new_id
from tests.support.sqlite_files import StoppedInRecovery, StoppedWhileWriting, plain
from tests.support.worlds import Stopwatch, wait_until

CROWD = Path(__file__).with_name("crowd.py")


def crowd(path: Path, processes: int, grants_each: int, seconds: float = 0.0) -> list[tuple[int, float]]:
    """Let many processes take one name in turn; return the tokens and the moments they were granted at."""
    argv = [sys.executable, "-W", "error", str(CROWD), str(path), "turnstile", str(grants_each), str(seconds)]
    running = [
        subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for _ in range(processes)
    ]
    grants = []
    for process in running:
        out, err = process.communicate(timeout=seconds + 100)
        assert (process.returncode, err) == (0, "")
        grants += [(int(token), float(moment)) for token, moment in (line.split() for line in out.splitlines())]
    return sorted(grants)


def check(grants: list[tuple[int, float]]) -> None:
    tokens, moments = [token for token, _ in grants], [moment for _, moment in grants]
    assert tokens == list(range(1, len(grants) + 1)), "a token was given twice, or left out"
    assert moments == sorted(moments), "tokens do not rise in the order of the grants"


def test_of_many_processes_one_is_in_and_tokens_rise(path) -> None:
    """Sixteen, on a file that all of them make at once; nobody sees an error."""
    grants = crowd(path, processes=16, grants_each=5)

    check(grants)
    assert len(grants) == 80


@pytest.mark.long
def test_of_many_processes_one_is_in_and_tokens_rise_for_half_a_minute(path) -> None:
    """The same for thirty seconds: long enough for checkpoints, and for pauses of the machine."""
    grants = crowd(path, processes=16, grants_each=10, seconds=30.0)

    check(grants)
    assert len(grants) > 500


def test_many_processes_make_the_file_at_once(path) -> None:
    code = f"""
import sys
from pglease import PGLease
sys.stdin.readline()
leases = PGLease("sqlite:///{path}")
print(leases.try_acquire("job", ttl=60), flush=True)
sys.stdin.read()  # who got it gives it back when it ends: not before all have asked
"""
    running = [
        subprocess.Popen(
            [sys.executable, "-c", code],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for _ in range(12)
    ]
    for process in running:
        process.stdin.write("\n")
        process.stdin.flush()
    answers = [process.stdout.readline() for process in running]

    assert [process.communicate(timeout=60) for process in running] == [("", "")] * 12
    assert sorted(answers) == ["False\n"] * 11 + ["True\n"]


# -- stopped and killed ------------------------------------------------------------------------------------------------


@pytest.fixture
def writer(path, alice):
    """Somebody who was stopped inside a transaction, and a hold of alice's."""
    alice.hold("job")
    stopped = StoppedWhileWriting(path)
    yield stopped
    stopped.end()


def test_behind_a_stopped_writer_every_call_ends_in_its_time(writer, alice, bob) -> None:
    for act in (lambda: bob.ask("other", within=1.0), lambda: bob.backend.cleanup(0.0, budget(1.0))):
        watch = Stopwatch()
        with pytest.raises(BackendUnavailable) as caught:
            act()
        assert 0.9 < watch.seconds < 10
        assert not caught.value.outcome_unknown
        assert "database is locked" not in str(caught.value)


def test_behind_a_stopped_writer_everybody_can_look_and_the_loser_is_told(writer, bob) -> None:
    watch = Stopwatch()

    assert bob.sees("job").owner_id == "alice"
    assert bob.names() == ["job"]
    assert isinstance(bob.ask("job"), Refused)
    assert watch.seconds < 8


def test_waiting_for_a_stopped_writer_costs_next_to_nothing(writer, bob) -> None:
    before = time.process_time()
    with pytest.raises(BackendUnavailable):
        bob.ask("other", within=2.0)

    assert time.process_time() - before < 0.5


def test_a_writer_that_goes_on_is_waited_for(path, alice, bob) -> None:
    hold = alice.hold("job")
    stopped = StoppedWhileWriting(path)
    timer = threading.Timer(0.3, stopped.end)
    timer.start()

    renewed = hold.renew()

    timer.join()
    assert isinstance(renewed, Held)


def test_a_writer_killed_in_its_transaction_leaves_no_trace(path, alice, bob) -> None:
    hold = alice.hold("job", metadata={"a": 1})
    stopped = StoppedWhileWriting(path)
    stopped.kill()

    assert bob.sees("job").owner_id == "alice"
    hold.renewed()
    hold.released()
    with plain(path) as connection:
        assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)


def test_a_process_killed_at_any_moment_breaks_nothing(path, alice) -> None:
    """Killed in the midst of its work, six times; the file is whole, and tokens go on rising."""
    code = f"""
from pglease import PGLease
leases = PGLease("sqlite:///{path}")
print("in", flush=True)
while True:
    leases.try_acquire("busy", ttl=60)
    leases.renew("busy")
    leases.release("busy")
"""
    tokens: list[int] = []

    def reached(token: int) -> bool:
        lease = alice.backend.get("busy", budget())
        return lease is not None and lease.fencing_token >= token

    for _ in range(6):
        process = subprocess.Popen([sys.executable, "-W", "ignore", "-c", code], stdout=subprocess.PIPE, text=True)
        assert process.stdout.readline() == "in\n"
        wait_until(lambda: reached(tokens[-1] + 3 if tokens else 1))
        process.kill()
        process.communicate(timeout=20)
        left = alice.sees("busy")
        alice.force("busy", left.fencing_token)
        tokens.append(left.fencing_token)

    assert tokens == sorted(set(tokens))
    with plain(path) as connection:
        assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)


def test_a_read_that_finds_somebody_stopped_in_recovery_ends_in_its_time(path, alice, bob) -> None:
    alice.hold("job")
    stopped = StoppedInRecovery(path)
    watch = Stopwatch()
    try:
        with pytest.raises(BackendUnavailable):
            bob.backend.get("job", budget(0.5))
    finally:
        stopped.end()

    assert watch.seconds < 10
    assert bob.sees("job").owner_id == "alice"


def test_a_client_keeps_its_lease_while_a_writer_is_stopped_for_less_than_the_ttl(path) -> None:
    with PGLease(f"sqlite:///{path}") as leases, leases.acquire("job", ttl=6) as lease:
        began = leases.get_lease("job").heartbeat_at
        stopped = StoppedWhileWriting(path)
        try:
            time.sleep(2.5)  # a renewal is due after two seconds, and finds the file locked
            assert lease.held
        finally:
            stopped.end()
        wait_until(lambda: leases.get_lease("job").heartbeat_at > began)

        assert lease.held


def test_a_client_loses_its_lease_in_time_when_nobody_can_write(path) -> None:
    with PGLease(f"sqlite:///{path}", connect_timeout=1) as leases:
        handle = leases.wait_for_lease("job", ttl=2)
        stopped = StoppedWhileWriting(path)
        try:
            assert handle.lost.wait(10)
            assert handle.loss.reason == "unreachable"
        finally:
            stopped.end()


# -- interruptions -----------------------------------------------------------------------------------------------------


def test_an_interruption_in_a_transaction_leaves_the_file_to_others(alice, bob, monkeypatch) -> None:
    alice.names()
    real = sqlite_turn.take

    def interrupted(turn, request):
        real(turn, request)
        raise KeyboardInterrupt

    monkeypatch.setattr(sqlite_turn, "take", interrupted)
    with pytest.raises(KeyboardInterrupt):
        alice.ask("job")
    monkeypatch.undo()

    assert bob.hold("job").token == 1
    alice.is_refused("job")


def test_a_transaction_that_was_left_open_is_rolled_back_by_the_next_call(alice, bob) -> None:
    hold = alice.hold("job")
    alice.backend._file.writer._connection.execute("BEGIN IMMEDIATE")

    hold.renewed()

    bob.hold("other")


def test_a_commit_that_fails_may_have_been_applied_and_says_so(alice, bob, monkeypatch) -> None:
    """The lease id tells afterwards."""
    alice.names()

    class Failing:
        def __init__(self, connection) -> None:
            self._connection = connection

        def __getattr__(self, name):
            return getattr(self._connection, name)

        def execute(self, statement, *parameters):
            answer = self._connection.execute(statement, *parameters)
            if statement == "COMMIT":
                error = sqlite3.OperationalError("disk I/O error")
                error.sqlite_errorcode = 1034
                raise error
            return answer

    hold = alice.hold("other")
    writer = alice.backend._file.writer
    writer._connection = Failing(writer._connection)

    with pytest.raises(BackendUnavailable) as caught:
        alice.ask("job", lease_id="a" * 32)
    assert caught.value.outcome_unknown

    writer._connection = writer._connection._connection
    assert isinstance(alice.ask("job", lease_id="a" * 32), Granted)
    hold.released()


# -- forks -------------------------------------------------------------------------------------------------------------

fork = pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")


def in_child(act, within: float = 30.0):
    """Call `act` in a forked child; return what it returned, or the error's text."""
    context = multiprocessing.get_context("fork")
    answers = context.SimpleQueue()

    def run() -> None:
        try:
            answers.put(("ok", act()))
        except BaseException as error:
            answers.put((type(error).__name__, str(error)))

    child = context.Process(target=run)
    child.start()
    child.join(within)
    assert child.exitcode == 0
    return answers.get()


@fork
def test_a_child_shares_the_file_and_excludes_its_parent(alice) -> None:
    hold = alice.hold("job")

    assert in_child(lambda: (alice.is_refused("job").held_by, alice.hold("other").token)) == ("ok", ("alice", 1))
    assert alice.is_refused("other").held_by == "alice"
    hold.renewed()
    hold.released()


@fork
def test_a_child_takes_locks_of_its_own(alice, bob) -> None:
    """SQLite's notes of the parent's locks would make the child's connections take none at all."""
    alice.hold("job")

    def busy_while_the_child_writes() -> bool:
        with plain(alice.backend.path) as connection:
            connection.execute("BEGIN IMMEDIATE")
            ready.set()
            return done.wait(20)

    context = multiprocessing.get_context("fork")
    ready, done = context.Event(), context.Event()
    child = context.Process(target=busy_while_the_child_writes)
    child.start()
    assert ready.wait(20)

    with pytest.raises(BackendUnavailable):
        bob.ask("other", within=0.3)

    done.set()
    child.join(20)
    bob.hold("other")


@fork
def test_the_last_close_of_a_child_does_not_take_the_log_from_its_parent(alice, bob) -> None:
    hold = alice.hold("job")

    for _ in range(3):
        assert in_child(lambda: (alice.hold("theirs").release(), alice.backend.close()))[0] == "ok"
        hold.renewed()
        assert bob.sees("job").owner_id == "alice"

    with plain(alice.backend.path) as connection:
        assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)


@fork
def test_a_fork_waits_for_a_thread_that_is_inside(alice) -> None:
    """Children are forked all the while other threads write; each of them can use the file."""
    alice.hold("job")
    done = threading.Event()

    def write(index: int) -> None:
        while not done.is_set():
            alice.hold(f"busy-{index}").release()

    threads = [threading.Thread(target=write, args=(index,)) for index in range(3)]
    for thread in threads:
        thread.start()
    try:
        for number in range(5):
            assert in_child(lambda number=number: alice.hold(f"child-{number}").token) == ("ok", 1)
    finally:
        done.set()
        for thread in threads:
            thread.join(20)


@fork
def test_a_child_forked_from_inside_a_call_is_told_why_it_cannot_go_on(alice, monkeypatch) -> None:
    alice.hold("job")
    real = sqlite_turn.take
    answers = []

    def forking(turn, request):
        answers.append(in_child(lambda: alice.sees("job")))
        return real(turn, request)

    monkeypatch.setattr(sqlite_turn, "take", forking)
    alice.hold("other")
    monkeypatch.undo()

    ((kind, said),) = answers
    assert kind == BackendMisconfigured.__name__
    assert "forked while" in said
    alice.hold("another")


@fork
def test_a_grandchild_is_not_kept_waiting_by_a_file_that_nobody_uses_any_more(path) -> None:
    backend = SQLiteBackend(path)
    backend.get("job", budget())
    file = backend._file  # as the garbage collector keeps it for a while
    del backend

    def forks_again():
        locked = file.reader._lock.locked(), file.writer._lock.locked()
        return locked, in_child(lambda: 7)

    assert in_child(forks_again) == ("ok", ((False, False), ("ok", 7))), "locks that the parent took are still taken"
    file.close()


@fork
def test_a_hold_of_the_parents_is_not_the_childs(path) -> None:
    with PGLease(f"sqlite:///{path}") as leases, leases.acquire("job", ttl=30) as lease:
        kind, (held, again) = in_child(lambda: (lease.held, leases.try_acquire("job", ttl=30)))

        assert (kind, held, again) == ("ok", False, False)
        assert lease.held


# -- threads and the end -----------------------------------------------------------------------------------------------


def test_a_long_list_keeps_no_renewal_waiting(alice) -> None:
    hold = alice.hold("job")
    inside, leave = threading.Event(), threading.Event()

    def linger(link):
        link.execute("BEGIN").execute("SELECT count(*) FROM pglease_leases").fetchall()
        inside.set()
        leave.wait(20)

    reader = threading.Thread(target=lambda: alice.backend._file.read(linger, budget(30)))
    reader.start()
    assert inside.wait(10)

    watch = Stopwatch()
    hold.renewed()

    assert watch.seconds < 10
    leave.set()
    reader.join()


def test_a_thread_that_finds_others_inside_gives_up_in_time(alice) -> None:
    alice.names()
    inside, leave = threading.Event(), threading.Event()

    def linger(link) -> None:
        inside.set()
        leave.wait(20)

    writer = threading.Thread(target=lambda: alice.backend._file.write(linger, budget(30)))
    writer.start()
    assert inside.wait(10)

    watch = Stopwatch()
    with pytest.raises(BackendUnavailable, match="other threads"):
        alice.ask("job", within=0.5)

    assert watch.seconds < 10
    leave.set()
    writer.join()


def test_closing_does_not_wait_for_a_call_that_is_stuck(alice) -> None:
    alice.names()
    inside, leave = threading.Event(), threading.Event()

    def linger(link) -> None:
        inside.set()
        leave.wait(20)

    stuck = threading.Thread(target=lambda: alice.backend._file.read(linger, budget(30)))
    stuck.start()
    assert inside.wait(10)

    watch = Stopwatch()
    alice.backend.close()

    assert watch.seconds < 15
    with pytest.raises(BackendClosed):
        alice.names()
    leave.set()
    stuck.join()
    assert alice.backend._file.reader._connection is None


def test_no_descriptor_is_left_open(path) -> None:
    def open_ones() -> int:
        names = list(Path("/proc/self/fd").iterdir())
        return sum(str(name.readlink()).startswith(str(path)) for name in names if name.is_symlink())

    if not Path("/proc/self/fd").exists():
        pytest.skip("needs /proc")
    for _ in range(3):
        backend = SQLiteBackend(path)
        Worker(backend, "alice").hold("job").released()
        assert open_ones() > 0
        backend.close()

    assert open_ones() == 0


def test_ctrl_c_ends_a_wait_behind_a_stopped_writer(path, alice) -> None:
    alice.names()
    stopped = StoppedWhileWriting(path)
    code = f"""
from pglease import PGLease
print("in", flush=True)
PGLease("sqlite:///{path}").try_acquire("job", ttl=60)
"""
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    try:
        assert process.stdout.readline() == "in\n"
        watch = Stopwatch()
        process.send_signal(signal.SIGINT)
        process.wait(20)
        assert watch.seconds < 15
    finally:
        process.kill()
        process.communicate()
        stopped.end()


def test_a_belief_begins_before_the_store_reads_its_clock(alice) -> None:
    box = budget()
    request = Request("job", "alice", new_id(), 60.0)

    answer = alice.backend.try_acquire(request, box)

    assert isinstance(answer, Granted)
    with plain(alice.backend.path) as connection:
        ((acquired,),) = connection.execute("SELECT acquired_ns FROM pglease_leases").fetchall()
    assert box.sent_at <= acquired / 1e9 <= clock.now()
