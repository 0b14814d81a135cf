"""Both clients have their connections before a test begins: a short wait is then not spent on making one."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def connected(request: pytest.FixtureRequest) -> None:
    for client in ("leases", "rival"):
        if client in request.fixturenames:
            request.getfixturevalue(client).list_leases()
