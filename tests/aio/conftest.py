"""A client for asyncio and a rival on threads, on a store in memory; PostgreSQL where a test asks for `dsn`."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from pglease import AsyncPGLease, MemoryBackend, PGLease


@pytest.fixture
def backend() -> MemoryBackend:
    return MemoryBackend()


@pytest.fixture
def rival(backend: MemoryBackend) -> Iterator[PGLease]:
    with PGLease(backend.another(), "rival") as client:
        yield client


@pytest.fixture
def leases(backend: MemoryBackend) -> Iterator[AsyncPGLease]:
    made = AsyncPGLease(backend, "ours")
    yield made
    made.client.close()
