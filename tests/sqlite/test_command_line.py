"""The command line on a lease file: everything but `schema`, with no branch on the kind of store."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from pglease.backends import sqlite_doctor
from pglease.backends.sqlite import SQLiteBackend
from pglease.cli import main
from pglease.testing.harness import Worker
from tests.support.sqlite_files import StoppedWhileWriting, plain


@pytest.fixture
def call(path, monkeypatch, capsys):
    """Run the command line in this process: exit code, standard output, standard error."""
    monkeypatch.setenv("PGLEASE_URL", f"sqlite:///{path}")

    def run(*arguments: str) -> tuple[int, str, str]:
        return main(arguments), *capsys.readouterr()

    return run


def test_facts_and_what_an_operator_does(call, alice) -> None:
    hold = alice.hold("job", metadata={"why": "nightly"})

    assert "job" in call("list")[1]
    assert json.loads(call("show", "job", "--json")[1])["owner_id"] == "alice"
    assert call("check", "-q", "job")[0] == 0
    assert call("wait", "job", "--timeout", "0")[0] == 75
    assert call("release", "job", "--token", str(hold.token + 1))[0] == 1
    assert call("release", "job", "--token", str(hold.token))[0] == 0
    assert call("check", "-q", "job")[0] == 1
    assert call("wait", "job")[0] == 0
    assert call("cleanup")[1] == "1 record removed\n"


def test_run_excludes_another_run(path, alice) -> None:
    argv = [sys.executable, "-m", "pglease", "run", "--dsn", f"sqlite:///{path}", "job", "--ttl", "20"]
    alice.hold("job")
    refused = subprocess.run([*argv, "--", "echo", "ran"], capture_output=True, text=True, check=False, timeout=100)
    alice.force("job", 1)
    command = ["sh", "-c", "echo token $PGLEASE_FENCING_TOKEN"]
    ran = subprocess.run([*argv, "--", *command], capture_output=True, text=True, check=False, timeout=100)

    assert (refused.returncode, refused.stdout) == (75, "")
    assert (ran.returncode, ran.stdout) == (0, "token 2\n")


def test_local_is_a_file_of_this_users(tmp_path, monkeypatch, capsys) -> None:
    for name in ("PGLEASE_URL", "DATABASE_URL", "PGHOST", "PGSERVICE", "PGDATABASE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    assert main(["list"]) == 125  # never without being asked for
    assert not list(tmp_path.iterdir())

    assert main(["run", "--local", "job", "--ttl", "20", "--", "true"]) == 0

    backend = SQLiteBackend(tmp_path / "pglease" / "leases.db")
    assert Worker(backend, "me").sees("job").fencing_token == 1
    backend.close()


def test_a_store_without_a_schema_says_so(call) -> None:
    code, out, err = call("schema")

    assert (code, out) == (125, "")
    assert "SQLite" in err


# -- the doctor --------------------------------------------------------------------------------------------------------


def checks(call) -> dict[str, dict[str, str]]:
    return {check["check"]: check for check in map(json.loads, call("doctor", "--json")[1].splitlines())}


def test_the_doctor_finds_a_good_file_good(call, path, alice) -> None:
    alice.hold("job")

    code, out, _ = call("doctor")

    assert code == 0
    assert [line[:4] for line in out.splitlines()] == ["ok  "] * 7
    assert str(path) in out
    assert alice.names() == ["job"]


def test_the_doctor_names_who_has_the_lock(call, path, alice, monkeypatch) -> None:
    alice.hold("job")
    stopped = StoppedWhileWriting(path)
    real = SQLiteBackend.diagnose
    monkeypatch.setattr(SQLiteBackend, "diagnose", lambda self: real(self, timeout=0.5))

    found = checks(call)["acquire"]
    stopped.end()

    assert found["status"] == "fail"
    if sys.platform == "linux":
        assert f"process {stopped.pid}" in found["text"]
        assert "stopped" in found["text"]


def test_the_doctor_tells_of_a_file_that_cannot_be_used(call, path) -> None:
    path.write_text("dear diary, " * 500)

    code, out, _ = call("doctor")

    assert code == 1
    assert out.startswith("fail  reachable")
    assert "no SQLite file" in out


def test_the_doctor_tells_of_a_wall_clock_that_was_set(call, path, alice) -> None:
    alice.hold("job")
    with plain(path) as connection:
        connection.execute("UPDATE pglease_leases_meta SET wall_ns = wall_ns - 3600000000000")

    found = checks(call)["clock"]

    assert found["status"] == "warn"
    assert "forward by 1:00:00" in found["text"]


def test_the_doctor_tells_of_a_boot_since_the_last_lease(call, path, alice) -> None:
    alice.hold("job")
    with plain(path) as connection:
        connection.execute("UPDATE pglease_leases_meta SET boot_id = 'another'")

    assert "since the last boot" in checks(call)["clock"]["text"]


def test_the_doctor_tells_of_a_file_system_that_is_nearly_full(call, path, alice, monkeypatch) -> None:
    alice.hold("job")
    monkeypatch.setattr(sqlite_doctor, "LITTLE_SPACE", 1 << 62)

    found = checks(call)["space"]

    assert found["status"] == "warn"
    assert "MB are left" in found["text"]
    assert found["remedy"]


def test_the_doctor_tells_of_pipes_that_cannot_be_made(call, path, alice) -> None:
    alice.hold("job")
    path.with_name(path.name + "-waiters").write_text("in the way")

    assert checks(call)["waiters"]["status"] == "warn"


def test_the_doctor_tells_of_a_log_that_grew(call, alice, monkeypatch) -> None:
    alice.hold("job")
    monkeypatch.setattr(sqlite_doctor, "LARGE_LOG", 10)

    assert checks(call)["log"]["status"] == "warn"
