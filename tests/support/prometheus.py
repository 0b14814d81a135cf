"""A private Prometheus: on a free port of 127.0.0.1, in a temporary directory, gone with the test."""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pglease.testing import processes
from tests.support.worlds import wait_until


class Prometheus:
    """One server; `ask` runs a query."""

    def __init__(self, port: int) -> None:
        self._base = f"http://127.0.0.1:{port}"

    def get(self, path: str, **parameters: str) -> Any:
        """Return the data behind a path of its API."""
        query = f"?{urllib.parse.urlencode(parameters)}" if parameters else ""
        try:
            with urllib.request.urlopen(f"{self._base}{path}{query}", timeout=30) as answer:
                said = json.load(answer)
        except urllib.error.HTTPError as refused:
            raise AssertionError(f"{parameters}: {refused.read().decode()}") from None
        assert said["status"] == "success", said
        return said["data"]

    def ask(self, expression: str) -> list[Any]:
        """Return what an expression yields now: a list of series."""
        return self.get("/api/v1/query", query=expression)["result"]

    def firing(self) -> set[str]:
        """Return the names of the alerts that fire."""
        alerts = self.get("/api/v1/alerts")["alerts"]
        return {alert["labels"]["alertname"] for alert in alerts if alert["state"] == "firing"}


@contextmanager
def prometheus(folder: Path, targets: dict[str, int], rules: Path) -> Iterator[Prometheus]:
    """Run one that scrapes `targets` (a job and its port each) each second."""
    jobs = [{"job_name": job, "static_configs": [{"targets": [f"127.0.0.1:{port}"]}]} for job, port in targets.items()]
    every = {"scrape_interval": "1s", "scrape_timeout": "1s", "evaluation_interval": "1s"}
    config = folder / "prometheus.yml"  # JSON is YAML
    config.write_text(json.dumps({"global": every, "rule_files": [str(rules)], "scrape_configs": jobs}))
    port = processes.free_port()
    with (folder / "log").open("w") as log:
        server = subprocess.Popen(
            [
                "prometheus",
                f"--config.file={config}",
                f"--storage.tsdb.path={folder / 'data'}",
                f"--web.listen-address=127.0.0.1:{port}",
                "--log.level=warn",
            ],
            stdout=log,
            stderr=log,
        )
        try:
            found = Prometheus(port)

            def is_ready() -> bool:
                assert server.poll() is None, (folder / "log").read_text()
                with contextlib.suppress(OSError, AssertionError):
                    return len(found.ask("up == 1")) == len(targets)
                return False

            wait_until(is_ready, 120, every=0.1)
            yield found
        finally:
            processes.end(server, [(signal.SIGTERM, 10.0)])  # type: ignore[arg-type]


def expressions_of_a_dashboard(text: str) -> list[str]:
    """Return what each panel asks, for all leases."""
    panels = json.loads(text)["panels"]
    asked = [target["expr"] for panel in panels for target in panel["targets"]]
    return [each.replace("$__rate_interval", "1m").replace("$name", ".*") for each in asked]
