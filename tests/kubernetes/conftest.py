"""A cluster of a test's own: an API server, a kubeconfig, workers, and their boot clock, which can be set forward."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self

import pytest

from pglease import clock
from pglease.backends.kubernetes import KubernetesBackend
from pglease.backends.kubernetes_names import object_name
from pglease.testing.api_leases import Json, StatusError
from pglease.testing.api_server import ApiServer, Fault
from pglease.testing.harness import Worker

NAMESPACE = "jobs"
WORKERS_VERBS = ("get", "create", "update")


class Cluster:
    """What a test needs of a cluster."""

    def __init__(self, folder: Path) -> None:
        self.server = ApiServer((NAMESPACE,))
        self.kubeconfig = folder / "kubeconfig"
        self.ahead = 0.0
        self._life = ExitStack()

    def __enter__(self) -> Self:
        self._life.enter_context(self.server)
        self.server.kubeconfig(self.kubeconfig, namespace=NAMESPACE)
        return self

    def __exit__(self, *_: object) -> None:
        self._life.close()

    def now(self) -> float:
        return clock.now() + self.ahead

    def worker(self, label: str, **knobs: Any) -> Worker:
        backend = KubernetesBackend(**{"kubeconfig": self.kubeconfig, "clock": self.now} | knobs)
        self._life.callback(backend.close)
        return Worker(backend, label)

    def pass_time(self, seconds: float) -> None:
        self.ahead += seconds

    def only(self, *verbs: str, token: str = "token-1") -> None:
        """Give out one token, for these verbs alone, and write it into the kubeconfig."""
        self.server.tokens = {token: verbs}
        self.server.kubeconfig(self.kubeconfig, token=token, namespace=NAMESPACE)

    def next(self, method: str, **fault: Any) -> None:
        """Order a fault for the next request with that method."""
        self.server.next(Fault(method, **fault))

    def meanwhile(self, method: str, act: Any, **fault: Any) -> None:
        """Let `act` happen just before the next request with that method is carried out."""
        self.server.next(Fault(method, commit=True, status=None, before=act, **fault))

    def object(self, name: str) -> Json:
        """Return a lease's object as the server has it."""
        return self.server.leases.get(NAMESPACE, object_name(name))

    def exists(self, name: str) -> bool:
        try:
            self.object(name)
        except StatusError:
            return False
        return True

    def put(self, body: Json) -> Json:
        """Replace an object, as another tool does."""
        return self.server.leases.replace(NAMESPACE, body["metadata"]["name"], body)

    def delete(self, name: str) -> None:
        """Delete an object, as an operator does who knows no better."""
        self.server.leases.delete(NAMESPACE, object_name(name), {})

    def asked(self, *methods: str) -> list[str]:
        """Return the methods of the requests that came, or only those."""
        return [method for method, _ in self.server.asked if not methods or method in methods]


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    with Cluster(tmp_path) as cluster:
        yield cluster


@pytest.fixture
def alice(cluster: Cluster) -> Worker:
    return cluster.worker("alice")


@pytest.fixture
def bob(cluster: Cluster) -> Worker:
    return cluster.worker("bob")
