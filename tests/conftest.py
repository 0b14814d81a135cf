"""One PostgreSQL for the run, one database for each test, and whatever else a test asks for.

`pytest` with no arguments starts everything. `PGLEASE_TEST_DSN` names an existing server (as a superuser) to use
instead.
"""

from __future__ import annotations

import gc
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import psycopg
import pytest
from hypothesis import HealthCheck, settings
from hypothesis.configuration import set_hypothesis_home_dir
from pytest_postgresql import factories

from pglease.testing.local_pgbouncer import PgBouncer
from pglease.testing.local_postgres import LocalPostgres
from pglease.testing.proxy import Proxy
from tests.support import rewritten
from tests.support.scratch import use_memory
from tests.support.server import RunServer, libpq_environment, run_server

pytest_plugins = ["tests.support.needs", "tests.support.canary", "tests.support.measured"]

SERVER = pytest.StashKey[RunServer]()
ROOT = Path(__file__).parent.parent

# What is made up is right or wrong, never too slow: other workers share the machine.
settings.register_profile("busy", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("busy")


def pytest_configure(config: pytest.Config) -> None:
    """Start the run's server, or in a worker learn where the controller's is."""
    use_memory()
    set_hypothesis_home_dir(ROOT / ".venv" / ".cache" / "hypothesis")
    if config.option.collectonly or config.option.help or config.option.version:
        return
    _take_signals_as_on_a_terminal()
    life = ExitStack()
    config.add_cleanup(life.close)
    plain = getattr(config, "workerinput", {}).get("pglease_server")
    if plain is None and getattr(config.option, "numprocesses", None) and not sys.dont_write_bytecode:
        rewritten.ahead(config, ROOT / "tests")
    server = RunServer(**plain) if plain else life.enter_context(run_server())
    config.stash[SERVER] = server
    life.callback(server.kept.close)
    _point_libpq_at(server, config)
    _start_copies_of(server, config)
    _point_pytest_postgresql_at(server, config)
    from tests.support import canary  # not before pytest has loaded it as a plugin

    canary.start(config, server.canary)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[object]:
    """Look for no garbage among the thousands of tests: not while they are made, and not each time a test looks."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.freeze()


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish() -> None:
    """Keep what was covered here: a worker that takes more than ten seconds to end is killed."""
    coverage = sys.modules.get("coverage")
    measuring = coverage and coverage.Coverage.current()
    if measuring:
        measuring.save()


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node) -> None:
    """Tell a worker where the server is."""
    node.workerinput["pglease_server"] = node.config.stash[SERVER].to_dict()


def _take_signals_as_on_a_terminal() -> None:
    """What a shell starts in the background ignores these two, and so would all that the tests start."""
    for number, handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGQUIT, signal.SIG_DFL)):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, handler)


def _point_libpq_at(server: RunServer, config: pytest.Config) -> None:
    undo = pytest.MonkeyPatch()
    config.add_cleanup(undo.undo)
    for name in [name for name in os.environ if name.startswith("PG") and not name.startswith("PGLEASE")]:
        undo.delenv(name)
    for name, value in libpq_environment(server).items():
        undo.setenv(name, value)


def _start_copies_of(server: RunServer, config: pytest.Config) -> None:
    undo = pytest.MonkeyPatch()
    config.add_cleanup(undo.undo)
    if server.copying is not None:
        undo.setenv("PGLEASE_PG_BIN", server.copying)


def _point_pytest_postgresql_at(server: RunServer, config: pytest.Config) -> None:
    config.option.postgresql_host = server.host
    config.option.postgresql_port = str(server.port)
    config.option.postgresql_user = server.admin_user
    config.option.postgresql_password = server.admin_password or ""
    # Of this process only: another run may use the same existing server.
    config.option.postgresql_dbname = f"pglease_plugin_{os.getpid()}"


running_postgresql = factories.postgresql_noproc()
postgresql = factories.postgresql("running_postgresql")
"""pytest-postgresql's own connection fixture, a fresh database for each test."""


@pytest.fixture(scope="session")
def server(pytestconfig: pytest.Config) -> RunServer:
    """The run's PostgreSQL."""
    return pytestconfig.stash[SERVER]


@pytest.fixture(scope="session")
def canary(server: RunServer) -> str:
    """The password in every DSN. It must come out nowhere."""
    return server.canary


@pytest.fixture
def database(server: RunServer) -> Iterator[str]:
    """The name of a fresh, empty database."""
    with server.database() as name:
        yield name


@pytest.fixture
def dsn(server: RunServer, database: str) -> str:
    """A DSN of a fresh, empty database, as its owner, who is no superuser; the canary is the password."""
    return server.dsn(database)


@pytest.fixture
def admin_dsn(server: RunServer, database: str) -> str:
    """A superuser's DSN of the same database, without the canary."""
    return server.admin_dsn(database)


@pytest.fixture
def admin(server: RunServer, database: str) -> Iterator[psycopg.Connection]:
    """A superuser's autocommit connection to the same database."""
    with server.connect(database) as connection:
        yield connection


@pytest.fixture
def server_log(server: RunServer, database: str) -> Callable[[], list[str]]:
    """A function that returns the lines which the server has logged about this test's database."""
    mark = f"@{database} "
    return lambda: [line for line in server.log_text().splitlines() if mark in line]


@pytest.fixture
def fresh_postgres(canary: str) -> Iterator[Callable[..., LocalPostgres]]:
    """A factory of servers of the test's own, to restart, kill or freeze; its options are those of LocalPostgres."""
    with ExitStack() as life:

        def make(**options) -> LocalPostgres:
            return life.enter_context(LocalPostgres(**{"user": "pglease_test", "password": canary} | options))

        yield make


@pytest.fixture
def proxy(server: RunServer) -> Iterator[Proxy]:
    """A TCP proxy before the run's server that breaks connections on demand: `proxy.through(dsn)`."""
    with Proxy(server.host, server.port) as running:
        yield running


@pytest.fixture
def pgbouncer(server: RunServer, dsn: str) -> Iterator[PgBouncer]:
    """A PgBouncer in transaction mode before this test's database: `pgbouncer.dsn`."""
    with PgBouncer(dsn) as running:
        yield running
