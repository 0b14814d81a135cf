"""The world of the README of 0.0.3: workers that share one database, and somebody who looks at it."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import psycopg
import pytest

pytest.register_assert_rewrite("tests.documented_0_0_x.workers")

from tests.documented_0_0_x.workers import Worker  # noqa: E402  # after it was registered


@pytest.fixture
def worker(dsn: str) -> Iterator[Callable[[], Worker]]:
    """Return what starts workers; they are stopped at the end."""
    working: list[Worker] = []

    def begin() -> Worker:
        working.append(Worker(dsn))
        return working[-1]

    yield begin
    for each in working:
        each.stop()


@pytest.fixture
def here(worker: Callable[[], Worker]) -> Worker:
    """Return a worker that has no client yet."""
    return worker()


@pytest.fixture
def there(worker: Callable[[], Worker]) -> Worker:
    """Return another worker, with a client called `there`."""
    return worker().start(owner_id="there")


@pytest.fixture
def operator(dsn: str) -> Iterator[psycopg.Connection]:
    """Look at the database past the library."""
    with psycopg.connect(dsn, autocommit=True) as connection:
        yield connection
