"""What pglease gives to pytest: leases for tests, a world to test losses in, and the contract suite for a store.

Loaded into every run of everybody who has pglease installed, so it imports nothing that it may not need.

pytest --pglease-dsn=postgresql://user@host/postgres        # where the tests' databases are made
pytest --pglease-backend='mystore://host/db?prefix={}'      # the contract suite, on a store of your own
pytest --pglease-backend=mystore://host/db --pglease-harness=mystore.testing:MyHarness
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pglease.backends import Backend
    from pglease.client import PGLease
    from pglease.testing.world import MovableClock, World

_SUITE = Path(__file__).with_name("suite_for_url.py")
MARKER = (
    "pglease(backend='memory'): where `pglease` and `pglease_world` keep their leases: 'memory', 'postgres' "
    "(a database of the test's own), or an address; a {} in it becomes a word that no other test has"
)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options."""
    group = parser.getgroup("pglease", "leases for tests, and the contract suite of pglease")
    group.addoption(
        "--pglease-dsn",
        metavar="DSN",
        help="a PostgreSQL for the fixtures `pglease_dsn` and `pglease_pg`, as a role that may create databases: each "
        "test gets one, which is dropped afterwards. Default: PGLEASE_TEST_DSN, else a private server (extra testing).",
    )
    group.addoption(
        "--pglease-backend",
        metavar="URL",
        help="run the contract suite of pglease on the store of this address, INSTEAD of the tests that would be "
        "collected by default. Each test needs an empty store: {} in the address becomes a word of its own (a table, a "
        "prefix, a file); without it every lease in the store is ended and deleted.",
    )
    group.addoption(
        "--pglease-harness",
        metavar="MODULE:CLASS",
        help="a pglease.testing.harness.Harness, called with the address: it lets time pass at once, breaks and mends "
        "the link, restarts the store. Default: one that can only wait, and leaves the rest out.",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Describe the marker; collect the suite, beside what is named on the command line."""
    config.addinivalue_line("markers", MARKER)
    if config.getoption("pglease_backend"):
        named = config.args if config.args_source is pytest.Config.ArgsSource.ARGS else []
        config.args = [*named, str(_SUITE)]
    elif config.getoption("pglease_harness"):
        raise pytest.UsageError("--pglease-harness goes with --pglease-backend")


# -- on whatever store the test is marked with; in memory otherwise ----------------------------------------------------


@pytest.fixture
def pglease_clock() -> MovableClock:
    """The clock of this test's memory store: `pglease_clock.advance(61)` lets leases run out; their holders know."""
    from pglease.testing.world import MovableClock

    return MovableClock()


@pytest.fixture
def pglease_store(request: pytest.FixtureRequest, pglease_clock: MovableClock) -> Iterator[Callable[[], Backend]]:
    """What opens another client of this test's store, for code that wants a `Backend`. Close what it returns."""
    marker = request.node.get_closest_marker("pglease")
    chosen = marker.kwargs.get("backend", "memory") if marker else "memory"
    if chosen == "memory":
        from pglease.backends.memory import MemoryBackend

        with closing(MemoryBackend(pglease_clock)) as store:
            pglease_clock.store = store
            yield store.another
    else:
        from pglease.backends import open_backend

        address = request.getfixturevalue("pglease_dsn") if chosen == "postgres" else _with_a_word(chosen)
        yield lambda: open_backend(address)


def _with_a_word(address: str) -> str:
    import secrets

    return address.replace("{}", f"t{secrets.token_hex(6)}")


@pytest.fixture
def pglease(pglease_store: Callable[[], Backend]) -> Iterator[PGLease]:
    """A client on an empty store, in memory unless marked otherwise. `pglease.acquire` and its like go to it, too."""
    from pglease import default
    from pglease.client import PGLease

    with (
        closing(pglease_store()) as store,
        PGLease(store, owner_id="the test") as client,
        default.standing_in(client),
    ):
        yield client


@pytest.fixture
def pglease_world(pglease_store: Callable[[], Backend], pglease_clock: MovableClock) -> Iterator[World]:
    """Two owners on the test's store, `one` and `other`, with `expire`, `steal`, `cut` and `clock.advance`."""
    from pglease.testing.world import World

    with closing(World(pglease_store, pglease_clock)) as world:
        yield world


# -- on a real PostgreSQL ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def pglease_server_dsn(pytestconfig: pytest.Config) -> Iterator[str]:
    """The server in which tests get databases: `--pglease-dsn`, PGLEASE_TEST_DSN, or a private one for this run."""
    named = pytestconfig.getoption("pglease_dsn") or os.environ.get("PGLEASE_TEST_DSN")
    if named:
        yield named
        return
    from pglease.testing.local_postgres import LocalPostgres

    with LocalPostgres() as server:
        yield server.dsn


@pytest.fixture
def pglease_dsn(pglease_server_dsn: str) -> Iterator[str]:
    """The address of an empty database of this test's own, dropped afterwards, whoever is still connected."""
    from pglease.testing.databases import empty_database

    with empty_database(pglease_server_dsn) as dsn:
        yield dsn


@pytest.fixture
def pglease_pg(pglease_dsn: str) -> Iterator[PGLease]:
    """A client on a real PostgreSQL, in a database of this test's own: `pglease_dsn`."""
    from pglease.client import PGLease

    with PGLease(pglease_dsn, owner_id="the test") as client:
        yield client
