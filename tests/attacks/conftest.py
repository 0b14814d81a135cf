"""What the attacks are made with. Servers and databases come from the suite's own fixtures."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from pglease import PGLease

pytest.register_assert_rewrite("tests.attacks.world")

from tests.attacks.world import Child  # noqa: E402  # after it was registered


@pytest.fixture
def client(dsn: str) -> Iterator[Callable[..., PGLease]]:
    """Return what makes clients of the test's database; they are closed at the end."""
    made: list[PGLease] = []

    def make(where: Any = dsn, **arguments: Any) -> PGLease:
        made.append(PGLease(where, **arguments))
        return made[-1]

    yield make
    for each in made:
        each.close()


@pytest.fixture
def leases(client: Callable[..., PGLease]) -> PGLease:
    """Return one client."""
    return client()


@pytest.fixture
def rival(client: Callable[..., PGLease]) -> PGLease:
    """Return another client of the same database."""
    return client(owner_id="rival")


@pytest.fixture
def child(dsn: str) -> Iterator[Callable[..., Child]]:
    """Return what starts child processes; they are ended at the end."""
    born: list[Child] = []

    def start(script: str, *args: object, where: str = dsn, warnings: str = "error") -> Child:
        born.append(Child(script, where, *args, warnings=warnings))
        return born[-1]

    yield start
    for each in born:
        each.bury()
