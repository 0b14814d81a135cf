"""The Kubernetes backend keeps the contract: on the suite's own API server, or on a real one.

`PGLEASE_TEST_KUBECONFIG` names the kubeconfig of a real one; the tests make namespaces `pglease-contract-*` there, one
for each worker of a parallel run.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from pglease import clock
from pglease.backends.base import Backend
from pglease.backends.kubernetes import KubernetesBackend
from pglease.testing.api_server import ApiServer
from pglease.testing.contract import BackendContract
from pglease.testing.harness import Harness, budget
from pglease.testing.proxy import Proxy

REAL = os.environ.get("PGLEASE_TEST_KUBECONFIG")
NAMESPACE = f"pglease-contract-{os.environ.get('PYTEST_XDIST_WORKER', 'main')}"

pytestmark = pytest.mark.xdist_group("kubernetes contract")


class KubernetesHarness(Harness):
    """An empty namespace. Each client judges expiry by its own boot clock, which is set forward to let time pass."""

    tick = 30.0  # passes at once: so long that no slow machine spoils a test
    slack = 10.0
    model_runs = 30

    def __init__(self, folder: Path, server: ApiServer | None) -> None:
        self._server = server
        self._ahead = 0.0
        direct = Path(REAL) if server is None else server.kubeconfig(folder / "direct", namespace=NAMESPACE)
        self._proxy, self._kubeconfig = _through_a_proxy(direct, folder / "proxied")
        self._keeper = KubernetesBackend(NAMESPACE, kubeconfig=direct)
        self._empty()

    def _empty(self) -> None:
        leases = self._keeper._leases
        if self._server is None:
            body = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE}}
            leases.wire.ask("POST", "/api/v1/namespaces", budget(), body=body)
        for found in leases.all(budget()):
            metadata = found["metadata"]
            leases.delete(metadata["name"], (metadata["uid"], metadata["resourceVersion"]), budget())

    def now(self) -> float:
        return clock.now() + self._ahead

    def open(self) -> Backend:
        return KubernetesBackend(NAMESPACE, kubeconfig=self._kubeconfig, clock=self.now)

    def pass_time(self, seconds: float) -> None:
        self._ahead += seconds

    def break_link(self) -> None:
        if self._proxy is None:
            super().break_link()
        else:
            self._proxy.black_hole()

    def mend_link(self) -> None:
        if self._proxy is None:
            super().mend_link()
        else:
            self._proxy.pass_through()

    def restart(self) -> None:
        if self._server is None:
            super().restart()
        else:
            self._server.restart()

    def close(self) -> None:
        self._keeper.close()
        if self._proxy is not None:
            self._proxy.stop()


def _through_a_proxy(kubeconfig: Path, path: Path) -> tuple[Proxy | None, Path]:
    """Return a proxy before the server of a kubeconfig, and a kubeconfig of the proxy; a server elsewhere gets none."""
    import yaml

    config = yaml.safe_load(kubeconfig.read_text())
    cluster = config["clusters"][0]["cluster"]
    address = urlsplit(cluster["server"])
    if address.hostname not in {"127.0.0.1", "localhost"} or len(config["clusters"]) > 1:
        return None, kubeconfig
    proxy = Proxy("127.0.0.1", address.port).start()
    cluster["server"] = f"{address.scheme}://{address.hostname}:{proxy.port}{address.path}"
    for place in (cluster, *(each["user"] or {} for each in config.get("users") or ())):
        for key in ("certificate-authority", "client-certificate", "client-key", "tokenFile"):
            if key in place:
                place[key] = str(kubeconfig.parent / place[key])  # relative to where it was written
    path.write_text(json.dumps(config))
    return proxy, path


@pytest.fixture(scope="module")
def api_server() -> Iterator[ApiServer | None]:
    if REAL:
        yield None
        return
    with ApiServer((NAMESPACE,)) as server:
        yield server


class TestKubernetes(BackendContract):
    @pytest.fixture
    def harness(self, api_server: ApiServer | None, tmp_path: Path) -> Iterator[Harness]:
        harness = KubernetesHarness(tmp_path, api_server)
        yield harness
        harness.close()
