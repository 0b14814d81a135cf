"""The hybrid backend keeps the contract, with the trait `prompt_failover`, and leaves no advisory lock behind.

The suite stops, freezes and ages the store, so it has a server of its own, on each worker.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing

import pytest

from pglease.backends.base import Backend
from pglease.backends.hybrid import HybridPostgresBackend
from pglease.testing.contract import BackendContract
from tests.support.hybrid import LOCKS, pid_of
from tests.support.worlds import wait_until
from tests.test_postgres_contract import OwnServer, PostgresHarness

pytestmark = pytest.mark.matrix


class HybridHarness(PostgresHarness):
    """The same table; each client has a session besides."""

    model_runs = 20

    def open(self) -> Backend:
        return HybridPostgresBackend(self._server.dsn, history=self.history)

    def end_session(self, backend: Backend) -> None:
        assert isinstance(backend, HybridPostgresBackend)
        # A hold depends on the session before its row says so, and without that nobody can tell that it ended with it.
        wait_until(lambda: not any(seat.tying for seat in list(backend._keeper._seats.values())))
        pid = pid_of(backend)
        link = self._server.link
        link.execute("SELECT pg_terminate_backend(%s)", (pid,))
        wait_until(lambda: not link.execute("SELECT 1 FROM pg_stat_activity WHERE pid = %s", (pid,)))


@pytest.fixture(scope="module")
def own_server(canary: str) -> Iterator[OwnServer]:
    with OwnServer(canary) as server:
        with closing(HybridPostgresBackend(server.dsn)) as backend:
            backend.apply_schema()
        yield server


class TestHybrid(BackendContract):
    @pytest.fixture
    def harness(self, own_server: OwnServer) -> Iterator[HybridHarness]:
        harness = HybridHarness(own_server)
        yield harness
        harness.close()

    @pytest.fixture(autouse=True)
    def no_lock_is_left(self, own_server: OwnServer) -> Iterator[None]:
        yield
        wait_until(lambda: own_server.link.execute(LOCKS) == [])
