"""The unit tests of the README of 0.0.3, word for word, on the `postgresql` fixture of pytest-postgresql."""

import pytest

from pglease import PGLease


@pytest.fixture
def coordinator(postgresql):
    """Provide a test coordinator with clean database"""
    pglease = PGLease(f"postgresql://localhost/{postgresql.info.dbname}")
    yield pglease
    pglease.cleanup_expired()  # Clean up
    pglease.close()


def test_singleton_task(coordinator):
    # First acquisition should succeed
    assert coordinator.try_acquire("test-task", ttl=60) is True

    # Second acquisition should fail (lease held)
    assert coordinator.try_acquire("test-task", ttl=60) is False

    # After release, should succeed again
    coordinator.release("test-task")
    assert coordinator.try_acquire("test-task", ttl=60) is True
