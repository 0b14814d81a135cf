"""SQLite keeps the contract."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import AbstractContextManager, closing, contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from pglease.backends.base import Backend
from pglease.backends.sqlite import SQLiteBackend
from pglease.backends.sqlite_host import this_host
from pglease.testing.contract import BackendContract
from pglease.testing.harness import Harness, budget
from tests.support.sqlite_files import StoppedInRecovery


@contextmanager
def transaction(path: Path) -> Iterator[sqlite3.Connection]:
    """A transaction of an application's, rolled back at the end."""
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.execute("BEGIN")
        yield connection
        connection.rollback()


class SQLiteHarness(Harness):
    """A new file, on a host whose clock is put forward: the file itself may be somebody's just then."""

    tick = 30.0  # passes at once: so long that no slow machine spoils a test
    slack = 10.0
    model_runs = 60
    paramstyle = "qmark"

    def __init__(self, path: Path) -> None:
        self._path = path
        self._opened: list[SQLiteBackend] = []
        self._stopped: StoppedInRecovery | None = None
        self._host = this_host()

    def open(self) -> Backend:
        backend = SQLiteBackend(self._path)
        backend._file.host = self._host
        self._opened.append(backend)
        return backend

    def pass_time(self, seconds: float) -> None:
        self._host = replace(self._host, ahead=self._host.ahead - round(seconds * 1e9))
        for backend in self._opened:
            backend._file.host = self._host

    def break_link(self) -> None:
        # Somebody else is at work in the file, and stays: otherwise there is no log that one could be stopped in.
        self.open().get("anything", budget())
        self._stopped = StoppedInRecovery(self._path)

    def mend_link(self) -> None:
        assert self._stopped is not None
        self._stopped.end()
        self._stopped = None

    def transaction(self) -> AbstractContextManager[sqlite3.Connection]:
        return transaction(self._path)

    def restart(self) -> None:
        """Let the last connection close: SQLite then writes its log into the file and deletes it."""
        for backend in self._opened:
            backend._file.drop()
        assert not self._path.with_name(self._path.name + "-wal").exists()

    def close(self) -> None:
        if self._stopped is not None:
            self._stopped.end()
        for backend in self._opened:
            backend.close()


class TestSQLite(BackendContract):
    @pytest.fixture
    def harness(self, tmp_path: Path) -> Iterator[Harness]:
        harness = SQLiteHarness(tmp_path / "leases.db")
        yield harness
        harness.close()
