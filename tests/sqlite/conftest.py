"""A lease file, and those who work with it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from pglease.backends.sqlite import SQLiteBackend
from pglease.testing.harness import Worker


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Where the lease file is, or will be."""
    return tmp_path / "leases.db"


@pytest.fixture
def worker(path: Path) -> Iterator[Callable[..., Worker]]:
    """Somebody with a client of the file, by label; closed at the end."""
    with ExitStack() as life:

        def enter(label: str = "alice", **knobs) -> Worker:
            backend = SQLiteBackend(path, **knobs)
            life.callback(backend.close)
            return Worker(backend, label)

        yield enter


@pytest.fixture
def alice(worker: Callable[..., Worker]) -> Worker:
    """The first."""
    return worker("alice")


@pytest.fixture
def bob(worker: Callable[..., Worker]) -> Worker:
    """Another, with a client of its own."""
    return worker("bob")
