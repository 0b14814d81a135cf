"""After every test, no advisory lock is left in its database."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.hybrid import advisory_locks
from tests.support.worlds import wait_until


@pytest.fixture(autouse=True)
def no_lock_is_left(dsn: str) -> Iterator[None]:
    yield
    wait_until(lambda: advisory_locks(dsn) == [])
