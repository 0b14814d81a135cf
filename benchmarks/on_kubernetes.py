"""What a lease on Kubernetes costs above the bare requests, on the API server of the tests."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from contextlib import ExitStack, closing
from http.client import HTTPConnection
from pathlib import Path
from urllib.parse import urlsplit

import pglease
from benchmarks.figures import Figure, Section
from benchmarks.timing import Effort, side_by_side
from pglease.backends.kubernetes import KubernetesBackend
from pglease.testing.api_server import LEASES, ApiServer

HOW = """Not a cluster: the API server of the tests, on loopback, which flushes nothing; a real one answers in
milliseconds, from etcd. So what counts is what pglease adds. *Other* are the same requests on one connection of
`http.client`: GET and PUT to acquire, PUT to release."""


class Requests:
    """The same requests by hand."""

    def __init__(self, server: ApiServer, name: str) -> None:
        where = urlsplit(server.url)
        assert where.hostname is not None
        self._link = HTTPConnection(where.hostname, where.port)
        self._path = f"{LEASES}default/leases"
        self._name = name
        self._ask("POST", self._path, {"metadata": {"name": name}, "spec": {"leaseTransitions": 0}})

    def close(self) -> None:
        self._link.close()

    def _ask(self, method: str, path: str, body: object = None) -> dict[str, object]:
        sent = None if body is None else json.dumps(body)
        self._link.request(method, path, body=sent, headers={"Content-Type": "application/json"})
        answer: dict[str, object] = json.loads(self._link.getresponse().read())
        return answer

    def pair(self) -> None:
        path = f"{self._path}/{self._name}"
        found = self._ask("GET", path)
        self._ask("PUT", path, self._ask("PUT", path, found))


def section(effort: Effort) -> Section:
    """Measure."""
    with ExitStack() as life:
        folder = Path(life.enter_context(tempfile.TemporaryDirectory()))
        server = life.enter_context(ApiServer())
        config = server.kubeconfig(folder / "config")
        backend = life.enter_context(closing(KubernetesBackend("default", kubeconfig=config)))
        leases = life.enter_context(pglease.PGLease(backend))
        bare = life.enter_context(closing(Requests(server, "bare")))

        def pair() -> None:
            leases.try_acquire("pair", ttl=60)
            leases.release("pair")

        calls: dict[str, Callable[[], object]] = {"ours": pair, "bare": bare.pair}
        took = side_by_side(calls, rounds=max(4, effort.rounds // 10), runs=min(3, effort.runs))
    figure = Figure("try_acquire + release", "µs", took["ours"], took["bare"], "bare requests")
    return Section("On Kubernetes", HOW, [figure])
