"""The small world of these tests: child processes that talk in lines, crowds of threads, conditions with a bound."""

from __future__ import annotations

import os
import queue
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self, TypeVar

import psycopg

ROOT = Path(__file__).resolve().parents[2]
PATIENCE = 60.0
"""Seconds within which anything that is going to happen has happened, also on a crowded machine."""

T = TypeVar("T")


def eventually(condition: Callable[[], Any], *, within: float = PATIENCE) -> Any:
    """Wait until `condition()` is true and return what it said; fail after `within` seconds."""
    deadline = time.monotonic() + within
    while True:
        answer = condition()
        if answer:
            return answer
        assert time.monotonic() < deadline, f"not within {within:g} s"
        time.sleep(0.01)


def is_so_for(seconds: float, condition: Callable[[], Any]) -> bool:
    """Tell whether `condition()` is true all through `seconds`."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if not condition():
            return False
        time.sleep(0.02)
    return True


def all_at_once(doings: Sequence[Callable[[], T]]) -> list[T]:
    """Do all of it in threads that start together; return the answers in order, or raise the first error."""
    gate = threading.Barrier(len(doings))
    answers: list[Any] = [None] * len(doings)
    errors: list[BaseException] = []

    def do(place: int, doing: Callable[[], T]) -> None:
        gate.wait(PATIENCE)
        try:
            answers[place] = doing()
        except BaseException as error:  # told to the test
            errors.append(error)

    threads = [threading.Thread(target=do, args=each, daemon=True) for each in enumerate(doings)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * PATIENCE)
        assert not thread.is_alive(), "still busy"
    if errors:
        raise errors[0]
    return answers


def sql(dsn: str, statement: str, params: Any = None) -> list[tuple[Any, ...]]:
    """Run one statement on a connection of its own."""
    with psycopg.connect(dsn, autocommit=True) as connection:
        cursor = connection.execute(statement, params)
        return cursor.fetchall() if cursor.description else []


def lapse(dsn: str, name: str) -> None:
    """Let a lease end as if its ttl had run out a second ago."""
    sql(dsn, "UPDATE pglease_leases SET expires_at = clock_timestamp() - interval '1 s' WHERE task_name = %s", (name,))


def kill_connections(dsn: str) -> int:
    """Have the server end every other connection to this database; wait until they are gone and return how many."""
    with psycopg.connect(dsn, autocommit=True) as connection:
        others = (
            "FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid() "
            "AND backend_type = 'client backend'"  # not an autovacuum worker, which is the superuser's
        )
        pids = [pid for (pid, _) in connection.execute(f"SELECT pid, pg_terminate_backend(pid) {others}")]
        left = "SELECT count(*) FROM pg_stat_activity WHERE pid = ANY (%s)"
        eventually(lambda: connection.execute(left, (pids,)).fetchone() == (0,))
    return len(pids)


@contextmanager
def row_locked(dsn: str, name: str, how: str = "UPDATE") -> Iterator[None]:
    """Hold the row of `name` in somebody's open transaction."""
    with psycopg.connect(dsn) as connection:
        connection.execute(f"SELECT 1 FROM pglease_leases WHERE task_name = %s FOR {how}", (name,))
        try:
            yield
        finally:
            connection.rollback()


class Child:
    """A process of its own that runs a script and talks in lines. It finds the store in `PGLEASE_URL`."""

    def __init__(self, script: str, dsn: str, *args: object, warnings: str = "error") -> None:
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115  # closed by `bury`
        self.process = subprocess.Popen(
            [sys.executable, "-W", warnings, "-u", "-c", textwrap.dedent(script), *map(str, args)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            cwd=ROOT,
            env={**os.environ, "PGLEASE_URL": dsn, "PYTHONPATH": str(ROOT)},
        )
        self._lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._lines.put(line.rstrip("\n"))
        self._lines.put(None)

    def line(self, within: float = PATIENCE) -> str:
        """Return the next line it says."""
        try:
            said = self._lines.get(timeout=within)
        except queue.Empty:
            raise AssertionError(f"the child said nothing for {within:g} s: {self.errors()}") from None
        assert said is not None, f"the child has ended: {self.errors()}"
        return said

    def rest(self, within: float = PATIENCE, *, logged: str | None = None) -> list[str]:
        """Wait for its end; return what it still says. It must end well, silent but for lines with `logged` in them."""
        lines: list[str] = []
        while (said := self._lines.get(timeout=within)) is not None:
            lines.append(said)
        code = self.process.wait(within)
        unexpected = [line for line in self.errors().splitlines() if logged is None or logged not in line]
        assert (code, unexpected) == (0, [])
        return lines

    def say(self, line: str = "") -> Self:
        """Send it a line."""
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()
        return self

    def signal(self, number: int) -> None:
        """Send it a signal."""
        self.process.send_signal(number)

    def errors(self) -> str:
        """Return what it wrote to standard error so far."""
        self._errors.seek(0)
        return self._errors.read()

    def bury(self) -> None:
        """End it, whatever it does."""
        self.process.kill()
        self.process.wait()
        self._reader.join(PATIENCE)
        for stream in (self.process.stdin, self.process.stdout, self._errors):
            try:
                if stream is not None:
                    stream.close()
            except BrokenPipeError:  # it was dead when the last line was flushed
                continue
