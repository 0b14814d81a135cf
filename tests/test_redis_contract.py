"""Valkey, Redis and a Cluster keep the contract.

The suite stops, freezes and ages its servers, so each class has servers of its own and stays on one worker.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from pglease.backends.base import Backend
from pglease.backends.redis import RedisBackend
from pglease.testing.contract import BackendContract
from pglease.testing.harness import Harness
from pglease.testing.local_valkey import LocalValkey
from tests.support.valkeys import LocalCluster, age, empty


class RedisHarness(Harness):
    """Servers that are emptied first; time passes by moving what they noted into the past."""

    tick = 30.0  # passes at once: so long that no slow machine spoils a test
    slack = 10.0

    def __init__(self, servers: list[LocalValkey], cluster: LocalCluster | None = None) -> None:
        self._servers = servers
        self._cluster = cluster
        self.model_runs = 10 if cluster else 40
        self._frozen = False
        empty(servers)

    def open(self) -> Backend:
        return RedisBackend(self._servers[0].url)

    def pass_time(self, seconds: float) -> None:
        age(self._servers, seconds)

    def break_link(self) -> None:
        for server in self._servers:
            server.freeze()
        self._frozen = True

    def mend_link(self) -> None:
        for server in self._servers:
            server.thaw()
        self._frozen = False

    def restart(self) -> None:
        for server in self._servers:
            server.restart()
        if self._cluster is not None:
            self._cluster.await_health()

    def close(self) -> None:
        if self._frozen:
            self.mend_link()


@pytest.fixture(scope="module")
def valkey(canary: str) -> Iterator[LocalValkey]:
    with LocalValkey(password=canary) as server:
        yield server


@pytest.fixture(scope="module")
def redis(canary: str) -> Iterator[LocalValkey]:
    with LocalValkey(flavour="redis", password=canary) as server:
        yield server


@pytest.fixture(scope="module")
def cluster(canary: str) -> Iterator[LocalCluster]:
    with LocalCluster(password=canary) as cluster:
        yield cluster


@pytest.mark.xdist_group("valkey contract")
class TestValkey(BackendContract):
    @pytest.fixture
    def harness(self, valkey: LocalValkey) -> Iterator[Harness]:
        harness = RedisHarness([valkey])
        yield harness
        harness.close()


@pytest.mark.needs("redis-server")
@pytest.mark.xdist_group("redis contract")
class TestRedis(BackendContract):
    @pytest.fixture
    def harness(self, redis: LocalValkey) -> Iterator[Harness]:
        harness = RedisHarness([redis])
        yield harness
        harness.close()


@pytest.mark.xdist_group("cluster contract")
class TestCluster(BackendContract):
    @pytest.fixture
    def harness(self, cluster: LocalCluster) -> Iterator[Harness]:
        harness = RedisHarness(cluster.nodes, cluster)
        yield harness
        harness.close()
