"""After every test, no advisory lock is left in its database."""

from __future__ import annotations

from collections.abc import Iterator

import psycopg
import pytest

from pglease.testing.proxy import Proxy
from tests.support.hybrid import advisory_locks
from tests.support.worlds import wait_until


@pytest.fixture(autouse=True)
def no_lock_is_left(dsn: str) -> Iterator[None]:
    yield
    wait_until(lambda: advisory_locks(dsn) == [])


@pytest.fixture
def cut_off(dsn: str) -> Iterator[Proxy]:
    """What stands between a holder and the server."""
    parts = psycopg.conninfo.conninfo_to_dict(dsn)
    with Proxy(str(parts["host"]), int(str(parts["port"]))) as proxy:
        yield proxy
