"""Real workers and beats: a broker, a database, and processes that are gone at the end."""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from pglease.testing.local_valkey import LocalValkey

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(autouse=True)
def garbage_waits() -> Iterator[None]:
    """Take the garbage between the tests.

    A result that is collected unsubscribes. If that happens while another result subscribes, and the collector may come
    at any moment, Celery 5.4 and redis-py 5.3 wait for a lock of their own, for ever.
    """
    gc.disable()
    yield
    gc.enable()
    gc.collect()


@pytest.fixture(scope="session")
def broker() -> Iterator[LocalValkey]:
    with LocalValkey() as server:
        yield server


@pytest.fixture(scope="session")
def database_url(server: Any) -> Iterator[str]:
    with server.database() as name:
        yield server.dsn(name)


@pytest.fixture(scope="session")
def shop(broker: LocalValkey, database_url: str) -> Iterator[ModuleType]:
    """The application, as those who send see it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("BROKER_URL", broker.url)
        patch.setenv("DATABASE_URL", database_url)
        module = importlib.import_module("tests.contrib.celery.shop")
    yield module
    sys.modules["examples.celery_import"].leases.close()
    module.app.close()
    module.app.backend.client.close()


@contextlib.contextmanager
def spawning(broker: LocalValkey, database_url: str) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Start Python modules as processes; they are surely gone at the end, and their children with them."""
    running: list[subprocess.Popen[str]] = []
    clean = {name: value for name, value in os.environ.items() if name != "PGLEASE_URL"}

    def start(*arguments: str, **variables: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-m", *arguments],
            cwd=ROOT,
            env={**clean, "BROKER_URL": broker.url, "DATABASE_URL": database_url, **variables},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        running.append(process)
        return process

    yield start
    for process in running:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


@pytest.fixture(scope="module")
def worker(shop: ModuleType, broker: LocalValkey, database_url: str) -> Iterator[subprocess.Popen[str]]:
    """One worker with two pool children, for all tests of a file."""
    arguments = ["worker", "--pool", "prefork", "--concurrency", "2", "--without-gossip", "--without-mingle"]
    with spawning(broker, database_url) as spawn:
        yield spawn("celery", "-A", "tests.contrib.celery.shop", *arguments, SHOP_WORKER="1")


@pytest.fixture
def spawn(broker: LocalValkey, database_url: str) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    with spawning(broker, database_url) as start:
        yield start
