"""PostgreSQL keeps the contract through PgBouncer in transaction mode too: nothing of ours lives in a session."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing

import pytest

from pglease.backends.base import Backend
from pglease.backends.postgres import PostgresBackend
from pglease.testing.contract import BackendContract
from pglease.testing.harness import Harness
from pglease.testing.local_pgbouncer import PgBouncer
from tests.test_postgres_contract import OwnServer, PostgresHarness

pytestmark = [
    pytest.mark.long,  # the whole contract once more: the matrix runs it
    pytest.mark.needs("pgbouncer"),
    pytest.mark.xdist_group("pgbouncer contract"),
]


class PooledHarness(PostgresHarness):
    """The same table, reached through the pooler; time passes and links break behind it."""

    model_runs = 20
    hears = False

    def __init__(self, server: OwnServer, pooler: PgBouncer) -> None:
        self._pooler = pooler
        super().__init__(server)

    def open(self) -> Backend:
        return PostgresBackend(self._pooler.dsn, history=self.history)


@pytest.fixture(scope="module")
def world(canary: str) -> Iterator[tuple[OwnServer, PgBouncer]]:
    with (
        OwnServer(canary) as server,
        PgBouncer(server.dsn) as pooler,
        closing(PostgresBackend(pooler.dsn)) as backend,
    ):
        backend.apply_schema()
        yield server, pooler


class TestPostgresThroughPgBouncer(BackendContract):
    @pytest.fixture
    def harness(self, world: tuple[OwnServer, PgBouncer]) -> Iterator[Harness]:
        harness = PooledHarness(*world)
        yield harness
        harness.close()
