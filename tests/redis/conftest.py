"""One Valkey for each worker, emptied for each test; who freezes, kills or sets it otherwise starts an own one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from pglease.backends.redis import RedisBackend
from pglease.testing.harness import Worker
from pglease.testing.local_valkey import LocalValkey
from pglease.testing.proxy import Proxy


@pytest.fixture(scope="session")
def shared_valkey(canary: str) -> Iterator[LocalValkey]:
    """A server that nobody may stop or set otherwise."""
    with LocalValkey(password=canary) as server:
        yield server


@pytest.fixture
def valkey(shared_valkey: LocalValkey) -> LocalValkey:
    """The same, empty."""
    shared_valkey.execute("FLUSHALL")
    return shared_valkey


@pytest.fixture
def fresh(canary: str) -> Iterator[Callable[..., LocalValkey]]:
    """Start servers that a test may do anything to."""
    with ExitStack() as life:

        def start(**settings: object) -> LocalValkey:
            named = {name.replace("_", "-"): value for name, value in settings.items()}
            return life.enter_context(LocalValkey(password=canary, settings=named))

        yield start


@pytest.fixture
def worker() -> Iterator[Callable[..., Worker]]:
    """Let workers in: `worker(url, "alice", pool_size=2)`."""
    opened: list[RedisBackend] = []

    def let_in(url: str, label: str = "alice", **knobs: Any) -> Worker:
        opened.append(RedisBackend(url, **knobs))
        return Worker(opened[-1], label)

    yield let_in
    for backend in opened:
        backend.close()


@pytest.fixture
def before() -> Iterator[Callable[[LocalValkey], tuple[Proxy, str]]]:
    """Put a proxy before a server; return it and the address through it."""
    with ExitStack() as life:

        def put(server: LocalValkey) -> tuple[Proxy, str]:
            proxy = life.enter_context(Proxy(server.host, server.port))
            return proxy, proxy.through(server.url)

        yield put
