"""Worlds for the command line: real processes, a real PostgreSQL, and a proxy between them that breaks."""

import contextlib
import os
import subprocess
import sys
import time
from pathlib import Path

import psycopg
import pytest

from pglease import PGLease
from pglease.cli import main

PGLEASE = (sys.executable, "-m", "pglease")
STORE_VARIABLES = ("PGLEASE_URL", "DATABASE_URL", "PGHOST", "PGSERVICE", "PGDATABASE", "PGPASSWORD")


@pytest.fixture
def until():
    """Wait for a condition, with a bound."""

    def wait(condition, seconds=60.0, what="the condition"):
        deadline = time.monotonic() + seconds
        while not (value := condition()):
            assert time.monotonic() < deadline, f"{what} did not come true within {seconds} s"
            time.sleep(0.01)
        return value

    return wait


@pytest.fixture
def environment(dsn):
    """A process environment that names the store and nothing else about it."""
    clean = {name: value for name, value in os.environ.items() if name not in STORE_VARIABLES}
    return {**clean, "PGLEASE_URL": dsn}


@pytest.fixture
def pglease(environment, canary):
    """Run the command line to its end in a process of its own."""

    def call(*arguments, env=None, **options):
        done = subprocess.run(
            [*PGLEASE, *arguments],
            env={**environment, **(env or {})},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
            **options,
        )
        assert "Traceback" not in done.stderr, done.stderr
        assert canary not in done.stdout + done.stderr
        return done

    return call


@pytest.fixture
def start(environment):
    """Start the command line and leave it running; whatever is left of it at the end is killed."""
    running = []

    def begin(*arguments, env=None, prefix=(), **options):
        options = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **options}
        process = subprocess.Popen(
            [*prefix, *PGLEASE, *arguments], env={**environment, **(env or {})}, text=True, **options
        )
        running.append(process)
        return process

    yield begin
    for process in running:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        process.wait()
        for stream in (process.stdin, process.stdout, process.stderr):
            if stream is not None:
                stream.close()


@pytest.fixture
def call(dsn, monkeypatch, capsys, canary):
    """Run the command line in this process: exit code, standard output, standard error."""
    for name in STORE_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PGLEASE_URL", dsn)

    def run(*arguments):
        code = main(arguments)
        out, err = capsys.readouterr()
        assert canary not in out + err
        return code, out, err

    return run


@pytest.fixture
def leases(dsn):
    """Another client of the same store."""
    with PGLease(dsn, owner_id="somebody-else") as client:
        yield client


@pytest.fixture
def sql(dsn):
    """Ask the database, past the library."""
    with psycopg.connect(dsn, autocommit=True) as connection:

        def ask(query, *parameters):
            cursor = connection.execute(query, parameters)
            return cursor.fetchone() if cursor.description else None

        yield ask


@pytest.fixture
def command(tmp_path):
    """A command that says when it has begun; `.group()` is its process group, `.members()` who of it is alive."""
    return Command(tmp_path)


class Command:
    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._pid = directory / "pid"

    def shell(self, script):
        """A shell script that first notes its process id, which is also its group's."""
        return ("sh", "-c", f'echo $$ > "{self._pid}.new"; mv "{self._pid}.new" "{self._pid}"; {script}')

    def has_begun(self):
        return self._pid.exists()

    def group(self):
        return int(self._pid.read_text())

    def members(self):
        return members_of(self.group())


def members_of(group):
    """The living processes of a group."""
    alive = []
    for status in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, _, its_group = status.read_text().rpartition(")")[2].split()[:3]
            if int(its_group) == group and state not in "ZX":
                alive.append(int(status.parent.name))
    return alive


@pytest.fixture
def behind_proxy(proxy, dsn):
    """An environment whose way to the server leads through `proxy`."""
    return {"PGLEASE_URL": proxy.through(dsn)}
