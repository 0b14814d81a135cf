"""Two clients of one database."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from pglease import PGLease


@pytest.fixture
def leases(dsn: str) -> Iterator[PGLease]:
    """Return one client."""
    with PGLease(dsn) as client:
        yield client


@pytest.fixture
def rival(dsn: str) -> Iterator[PGLease]:
    """Return another client of the same database."""
    with PGLease(dsn, owner_id="rival") as client:
        yield client
