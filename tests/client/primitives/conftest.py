"""Both clients have their connections before a test begins: a short wait is then not spent on making one."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from pglease.primitives import vigil


@pytest.fixture(autouse=True)
def connected(request: pytest.FixtureRequest) -> None:
    for client in ("leases", "rival"):
        if client in request.fixturenames:
            request.getfixturevalue(client).list_leases()


@pytest.fixture
def looks_seldom(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Let whoever waits for one of several look once an hour; answers once somebody has marked what it waits for."""
    monkeypatch.setattr(vigil, "HEARD", 3600.0)
    rests = threading.Semaphore(0)

    class Told(vigil.Vigil):
        def longest(self) -> float:
            if self._all_marked and self._marked:
                rests.release()
            return super().longest()

    for module in ("semaphore", "read_write"):
        monkeypatch.setattr(f"pglease.primitives.{module}.Vigil", Told)

    def wait() -> None:
        assert rests.acquire(timeout=60), "nobody waits and listens"

    return wait
