"""Alembic as it is: autogenerate, revisions, `--sql`, and pods that start at once."""

from __future__ import annotations

import io
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psycopg
import pytest
import sqlalchemy
from alembic import command
from alembic.autogenerate import compare_metadata, render_python_code
from alembic.config import Config
from alembic.migration import MigrationContext
from alembic.operations import Operations, ops
from sqlalchemy.pool import NullPool

from pglease import AcquireTimeout, ConfigurationError, PGLease
from pglease.backends.postgres import PostgresBackend
from pglease.contrib import alembic as ours
from pglease.contrib.sqlalchemy import table
from pglease.testing.local_pgbouncer import PgBouncer
from tests.support.worlds import execute, wait_until

EXAMPLE = Path(__file__).parents[2] / "examples" / "alembic_pods"
"""The project all of this happens to: one revision makes our table, the next one theirs."""
TABLES = {"pglease_leases", "pglease_leases_meta", "pglease_leases_tickets", "pglease_leases_history"}


def address(dsn: str, driver: str = "psycopg") -> str:
    return dsn.replace("postgresql://", f"postgresql+{driver}://")


@pytest.fixture
def engine(dsn: str) -> Iterator[sqlalchemy.Engine]:
    made = sqlalchemy.create_engine(address(dsn), poolclass=NullPool)
    yield made
    made.dispose()


@pytest.fixture
def project(tmp_path: Path, dsn: str, monkeypatch: pytest.MonkeyPatch) -> Config:
    """A copy of the example."""
    shutil.copytree(EXAMPLE, tmp_path / "here", ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setenv("DATABASE_URL", address(dsn))
    return Config(tmp_path / "here" / "alembic.ini", output_buffer=io.StringIO())


def change_env(project: Config, old: str, new: str) -> None:
    """Write something else in env.py."""
    env = Path(str(project.get_main_option("script_location"))) / "env.py"
    text = env.read_text()
    assert old in text
    env.write_text(text.replace(old, new))


def tables(dsn: str) -> set[str]:
    found = execute(dsn, "SELECT relname FROM pg_class WHERE relkind = 'r' AND relname ~ '^pglease|^orders'")
    return {name for (name,) in found}


def is_in_order(dsn: str) -> bool:
    backend = PostgresBackend(dsn)
    try:
        return backend.schema_diff() == []
    finally:
        backend.close()


def differences(engine: sqlalchemy.Engine, metadata: sqlalchemy.MetaData, **options: object) -> list[tuple[str, str]]:
    """What autogenerate would write: the operation, and the table."""
    with engine.connect() as connection:
        context = MigrationContext.configure(connection, opts={"target_metadata": metadata, **options})
        return sorted((each[0], each[1].name) for each in compare_metadata(context, metadata))


# -- left alone


def test_autogenerate_would_drop_our_table_unless_it_is_told_to_leave_it(dsn: str, engine: sqlalchemy.Engine) -> None:
    with PGLease(dsn) as leases:
        leases.try_acquire("job")
    execute(dsn, "CREATE TABLE theirs ()")

    untold = differences(engine, sqlalchemy.MetaData())
    told = differences(engine, sqlalchemy.MetaData(), include_name=ours.include_name)

    assert {("remove_table", name) for name in TABLES} < set(untold)
    assert told == [("remove_table", "theirs")]


def test_a_table_of_another_name_is_left_alone_and_the_rest_is_asked_of_ones_own(
    dsn: str, engine: sqlalchemy.Engine
) -> None:
    with PGLease(dsn, table_name="jobs") as leases:
        leases.try_acquire("job")
    execute(dsn, "CREATE TABLE theirs ()")
    execute(dsn, "CREATE TABLE hidden ()")

    include = ours.include_names("jobs", others=lambda name, _type, _parents: name != "hidden")

    assert differences(engine, sqlalchemy.MetaData(), include_name=include) == [("remove_table", "theirs")]


def test_our_table_in_their_metadata_is_left_alone_on_both_sides(dsn: str, engine: sqlalchemy.Engine) -> None:
    metadata = sqlalchemy.MetaData()
    table(metadata)
    sqlalchemy.Table("theirs", metadata)
    options = {"include_name": ours.include_name, "include_object": ours.include_object}

    assert differences(engine, metadata, **options) == [("add_table", "theirs")]

    metadata.create_all(engine)
    assert differences(engine, metadata, **options) == []


# -- made by a revision


@pytest.mark.parametrize("driver", ["psycopg", "psycopg2"])
def test_a_revision_makes_the_table_and_takes_it_away(
    project: Config, dsn: str, driver: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DATABASE_URL", address(dsn, driver))

    command.upgrade(project, "leases")
    assert is_in_order(dsn)

    command.upgrade(project, "+1")
    command.downgrade(project, "-1")
    assert is_in_order(dsn)

    command.downgrade(project, "base")
    assert tables(dsn) == set()


def test_offline_it_prints_sql_that_makes_the_table_and_asks_the_database_nothing(project: Config, dsn: str) -> None:
    change_env(project, "    with context.begin", "    with pglease.once(engine), context.begin")

    command.upgrade(project, "head", sql=True)

    assert tables(dsn) == set()
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute(project.output_buffer.getvalue())
    assert is_in_order(dsn)
    assert tables(dsn) == {*TABLES, "orders"}


@pytest.mark.parametrize(
    ("operation", "written"),
    [
        (ours.CreatePgleaseOp(), "op.create_pglease(version=1)"),
        (ours.DropPgleaseOp(schema="jobs"), "op.drop_pglease(version=1, schema='jobs')"),
        (ours.CreatePgleaseOp(table_name="jobs").reverse(), "op.drop_pglease(version=1, table_name='jobs')"),
        (ours.DropPgleaseOp().reverse(), "op.create_pglease(version=1)"),
    ],
)
def test_an_operation_can_be_turned_round_and_written_down(operation: ops.MigrateOperation, written: str) -> None:
    assert written in render_python_code(ops.UpgradeOps([operation]))


def test_a_layout_that_nobody_can_make_is_refused(engine: sqlalchemy.Engine) -> None:
    with engine.connect() as connection, pytest.raises(ConfigurationError, match="layout 1"):
        Operations(MigrationContext.configure(connection)).create_pglease(version=2)


# -- upgraded once


@contextmanager
def pod(project: Config) -> Iterator[subprocess.Popen[str]]:
    """A process that upgrades as it starts."""
    process = subprocess.Popen(
        [sys.executable, "-W", "error", "-m", "alembic", "-c", str(project.config_file_name), "upgrade", "head"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def upgrades_of(process: subprocess.Popen[str]) -> list[str]:
    """The revisions that a pod applied before it ended well."""
    _, said = process.communicate(timeout=200)
    assert process.returncode == 0, said
    return re.findall(r"Running upgrade .*-> (\w+)", said)


def is_in_the_middle(dsn: str) -> bool:
    """Whether somebody's migration waits for the table that another transaction is about to make."""
    waiting = "SELECT query FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'"
    return any("CREATE TABLE orders" in query for (query,) in execute(dsn, waiting))


def test_of_pods_that_start_at_once_on_a_new_database_one_upgrades_and_the_rest_find_nothing_to_do(
    project: Config, dsn: str
) -> None:
    """The first of them is killed in the middle: the next goes on after its ttl, and the last finds all done."""
    change_env(project, 'ttl="1m"', 'ttl="5s"')

    with psycopg.connect(dsn) as gate, pod(project) as one, pod(project) as two, pod(project) as three:
        gate.execute("CREATE TABLE orders ()")
        wait_until(lambda: is_in_the_middle(dsn), within=120)
        ((holder,),) = execute(dsn, "SELECT owner_id FROM pglease_leases WHERE task_name = 'alembic'")
        (killed,) = [each for each in (one, two, three) if f":{each.pid}:" in holder]
        killed.kill()
        gate.rollback()
        applied = [upgrades_of(each) for each in (one, two, three) if each is not killed]

    assert sorted(applied) == [[], ["leases", "orders"]]
    assert execute(dsn, "SELECT fencing_token FROM pglease_leases WHERE task_name = 'alembic'") == [(3,)]
    assert is_in_order(dsn)


def test_what_migrates_nothing_takes_no_lease_and_makes_no_table(project: Config, dsn: str) -> None:
    command.current(project)

    assert tables(dsn) == set()


def test_around_a_command_it_excludes_as_well(engine: sqlalchemy.Engine, dsn: str) -> None:
    with ours.once(engine, "migrations") as lease, PGLease(dsn) as other:
        assert lease
        assert other.try_acquire("migrations") is False

        with pytest.raises(AcquireTimeout, match="migrations"), ours.once(engine, "migrations", wait=3):
            pass

    assert execute(dsn, "SELECT lease_id FROM pglease_leases") == [(None,)]


def test_a_connection_inside_a_transaction_is_refused(engine: sqlalchemy.Engine, dsn: str) -> None:
    with (
        engine.connect() as connection,
        connection.begin(),
        pytest.raises(ConfigurationError, match="around the transaction"),
        ours.once(connection),
    ):
        pass

    assert tables(dsn) == set()


def test_within_the_transaction_of_the_migrations_it_is_refused_since_it_would_end_before_the_commit(
    project: Config, dsn: str
) -> None:
    change_env(project, 'pglease.once(engine, ttl="1m", wait="10m"), context.begin', "context.begin")
    change_env(
        project, "            context.run", "            with pglease.once(engine):\n                context.run"
    )

    with pytest.raises(ConfigurationError, match="around the transaction"):
        command.upgrade(project, "head")

    assert tables(dsn) == set()


def test_an_engine_of_another_driver_is_connected_to_by_its_address(dsn: str) -> None:
    with ours.once(sqlalchemy.create_engine(address(dsn, "asyncpg"))) as lease:
        assert lease


def test_behind_a_transaction_pooler_it_excludes_and_leaves_nothing_on_a_pooled_session(
    pgbouncer: PgBouncer, dsn: str
) -> None:
    """Session locks would stay on some session of the pooler's, and the next deployment would hang."""
    pooled = sqlalchemy.create_engine(address(pgbouncer.dsn), poolclass=NullPool)

    for _ in range(2):
        with ours.once(pooled) as lease, PGLease(dsn) as other:
            assert lease
            assert other.try_acquire("alembic") is False

    assert execute(dsn, "SELECT lease_id, fencing_token FROM pglease_leases") == [(None, 2)]
    here = "locktype = 'advisory' AND database = (SELECT oid FROM pg_database WHERE datname = current_database())"
    assert execute(dsn, f"SELECT count(*) FROM pg_locks WHERE {here}") == [(0,)]
