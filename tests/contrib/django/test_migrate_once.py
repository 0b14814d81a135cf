"""Many pods start with a new release: one migrates, the others wait and find nothing to do."""

from __future__ import annotations

import signal
import subprocess
from io import StringIO

import pytest

from pglease import PGLease
from tests.contrib.django.conftest import FIRST, Project, ended
from tests.support.worlds import execute, is_free, wait_until

APPLIED = "Applying shop.0001_initial... OK"


def test_of_eight_processes_one_runs_the_first_migrate_ever_and_the_others_find_nothing_to_do(
    project: Project, dsn: str
) -> None:
    """Both ways to say it exclude each other: they use the same name."""
    by_itself = [project.start("pglease_migrate", "--noinput", "--no-color") for _ in range(6)]
    under_the_cli = [
        project.start("pglease", "run", "migrate", "--wait", "--", "migrate", "--noinput", "--no-color")
        for _ in range(2)
    ]

    said = [ended(process) for process in by_itself + under_the_cli]

    assert sum(APPLIED in each for each in said) == 1
    assert sum("No migrations to apply." in each for each in said) == 7
    assert execute(dsn, "SELECT count(*) FROM django_migrations WHERE app = 'shop'") == [(1,)]
    assert execute(dsn, "SELECT fencing_token FROM pglease_leases WHERE task_name = 'migrate'") == [(8,)]


@pytest.fixture
def long_one(project: Project) -> Project:
    """A project whose migration takes ten minutes."""
    project.write("shop/migrations/0001_initial.py", FIRST.replace("0.5", "600"))
    return project


def at_work(project: Project, dsn: str, *options: str) -> subprocess.Popen[str]:
    """Return a process that is in the middle of its migration."""
    process = project.start("pglease_migrate", "--noinput", "--no-color", "-v0", *options)
    wait_until(lambda: process.poll() is not None or is_sleeping(dsn), within=200)
    assert process.poll() is None, process.communicate()
    return process


def is_sleeping(dsn: str) -> bool:
    rows = execute(
        dsn,
        "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND state = 'active' "
        "AND pid <> pg_backend_pid() AND query LIKE %s",
        "%pg_sleep(600)%",
    )
    return rows != [(0,)]


def test_who_waits_no_longer_ends_with_75_and_says_who_is_at_it(default_database: str, leases: PGLease) -> None:
    from django.core.management import call_command
    from django.core.management.base import CommandError

    assert leases.try_acquire("migrate", ttl=600)
    said = StringIO()

    with pytest.raises(CommandError, match="somebody-else") as refused:
        call_command("pglease_migrate", "--wait", "0.1s", stdout=said)

    assert refused.value.returncode == 75
    assert "Waiting: somebody-else is migrating, for another" in said.getvalue()
    assert execute(default_database, "SELECT to_regclass('django_migrations')") == [(None,)]


def test_a_holder_that_lost_its_lease_is_stopped_in_the_middle_of_a_statement(
    long_one: Project, dsn: str, leases: PGLease
) -> None:
    process = at_work(long_one, dsn, "--ttl", "10s")

    assert leases.force_release("migrate", 1)

    assert "an operator ended it" in ended(process, code=76)
    assert not is_sleeping(dsn)
    assert execute(dsn, "SELECT count(*) FROM django_migrations WHERE app = 'shop'") == [(0,)]


def test_a_pod_that_is_told_to_go_leaves_neither_lease_nor_statement_behind(long_one: Project, dsn: str) -> None:
    process = at_work(long_one, dsn, "--ttl", "10m")

    process.send_signal(signal.SIGTERM)

    process.communicate(timeout=60)
    assert process.returncode == 143
    assert is_free(dsn, "migrate")
    wait_until(lambda: not is_sleeping(dsn))


def test_a_failed_migration_lets_the_next_pod_try(project: Project, dsn: str) -> None:
    execute(dsn, "CREATE TABLE shop_item (other int)")
    process = project.start("pglease_migrate", "--noinput")

    _, err = process.communicate(timeout=120)

    assert process.returncode == 1
    assert "already exists" in err
    assert is_free(dsn, "migrate")
