"""PostgreSQL keeps the contract.

The suite stops, freezes and ages the store, so it has a server of its own, on each worker: on one alone it would take
longer than all the rest.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, closing, contextmanager
from typing import cast

import psycopg
import pytest

from pglease.backends.base import Backend
from pglease.backends.postgres import PostgresBackend
from pglease.testing.contract import BackendContract
from pglease.testing.contract_halves import InHalves
from pglease.testing.harness import Harness
from pglease.testing.local_postgres import LocalPostgres, StopMode
from tests.support.server import Kept

pytestmark = pytest.mark.matrix

EMPTY = """
DELETE FROM pglease_leases; DELETE FROM pglease_leases_tickets; DELETE FROM pglease_leases_history;
UPDATE pglease_leases_meta SET token_floor = 0
"""
AGE = """
UPDATE pglease_leases SET acquired_at = acquired_at - %(by)s, heartbeat_at = heartbeat_at - %(by)s,
                          expires_at = expires_at - %(by)s, waited_until = waited_until - %(by)s,
                          queued_until = queued_until - %(by)s;
UPDATE pglease_leases_tickets SET expires_at = expires_at - %(by)s
"""


@contextmanager
def transaction(dsn: str) -> Iterator[psycopg.Connection]:
    """A transaction of an application's, rolled back at the end."""
    with closing(psycopg.connect(dsn)) as connection:
        yield connection
        connection.rollback()


class OwnServer(LocalPostgres):
    """A server, and a connection for all that the suite does behind the clients' backs."""

    def __init__(self, password: str) -> None:
        super().__init__(user="contract", password=password, dbname="leases")
        self.link = Kept(lambda: psycopg.connect(self.dsn, autocommit=True))

    def stop(self, mode: StopMode = "fast", *, keep: bool = False) -> None:
        self.link.close()
        super().stop(mode, keep=keep)


class PostgresHarness(Harness):
    """A lease table that is emptied first; time passes by moving what it noted into the past."""

    tick = 30.0  # passes at once: so long that no slow machine spoils a test
    slack = 10.0
    model_runs = 200
    history = 4

    def __init__(self, server: OwnServer) -> None:
        self._server = server
        self._frozen = False
        self._server.link.execute(EMPTY)

    def open(self) -> Backend:
        return PostgresBackend(self._server.dsn, history=self.history)

    def pass_time(self, seconds: float) -> None:
        self._server.link.execute(AGE.replace("%(by)s", f"make_interval(secs => {seconds!r})"))

    def transaction(self) -> AbstractContextManager[psycopg.Connection]:
        return transaction(self._server.dsn)

    def break_link(self) -> None:
        self._server.freeze()
        self._frozen = True

    def mend_link(self) -> None:
        self._server.thaw()
        self._frozen = False

    def restart(self) -> None:
        self._server.restart()

    def close(self) -> None:
        if self._frozen:
            self.mend_link()


@pytest.fixture(scope="module")
def own_server(canary: str) -> Iterator[OwnServer]:
    with OwnServer(canary) as server:
        with closing(PostgresBackend(server.dsn)) as backend:
            backend.apply_schema()
        yield server


class TestPostgres(BackendContract):
    @pytest.fixture
    def harness(self, own_server: OwnServer) -> Iterator[Harness]:
        harness = PostgresHarness(own_server)
        yield harness
        harness.close()


class HalvesHarness(PostgresHarness):
    """Everything that can be is said in halves, as event loops do."""

    model_runs = 20

    def open(self) -> Backend:
        return cast("Backend", InHalves(PostgresBackend(self._server.dsn, history=self.history)))


class TestPostgresInHalves(BackendContract):
    @pytest.fixture
    def harness(self, own_server: OwnServer) -> Iterator[Harness]:
        harness = HalvesHarness(own_server)
        yield harness
        harness.close()
