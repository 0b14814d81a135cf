"""`guarded(lease)`: an atomic block that PostgreSQL refuses to a holder whose lease is over."""

from __future__ import annotations

import signal
import subprocess
import unittest

import pytest

from pglease import ConfigurationError, FencedError
from tests.contrib.django.conftest import Project
from tests.support import django_site
from tests.support.worlds import execute, is_free, steal, wait_until

pytestmark = pytest.mark.matrix


@pytest.fixture
def report(default_database):
    """A model with a table of its own, empty."""
    return django_site.report_model()


def bodies(dsn):
    return [body for (body,) in execute(dsn, "SELECT body FROM papers_report ORDER BY body")]


def test_what_a_holder_writes_is_committed(report, dsn) -> None:
    from pglease.contrib.django import guarded, pglease

    with pglease.acquire("job") as lease, guarded(lease):
        report.objects.create(body="mine")

    assert bodies(dsn) == ["mine"]


def test_what_a_stale_holder_writes_is_rolled_back_and_its_rival_is_not_waited_for(report, dsn) -> None:
    from pglease.contrib.django import guarded, pglease

    with pglease.acquire("job", heartbeat=False, on_lost="log") as lease:
        steal(dsn, "job")

        with pytest.raises(FencedError), guarded(lease):
            report.objects.create(body="stale")

    assert bodies(dsn) == []


def test_nobody_is_granted_the_name_before_the_transaction_has_ended(report, dsn, leases) -> None:
    from django.db import transaction

    from pglease.contrib.django import guarded, pglease

    with pglease.acquire("job", on_lost="log") as lease, transaction.atomic():
        with guarded(lease):
            report.objects.create(body="mine")
        assert leases.force_release("job", lease.fencing_token)
        assert not leases.try_acquire("job")
    assert leases.try_acquire("job")
    assert bodies(dsn) == ["mine"]


def test_inside_another_atomic_block_a_refusal_takes_the_inner_block_alone(report, dsn) -> None:
    from django.db import transaction

    from pglease.contrib.django import guarded, pglease

    with pglease.acquire("job", heartbeat=False, on_lost="log") as lease, transaction.atomic():
        report.objects.create(body="outer")
        steal(dsn, "job")
        with pytest.raises(FencedError), guarded(lease):
            report.objects.create(body="stale")
        report.objects.create(body="outer, later")

    assert bodies(dsn) == ["outer", "outer, later"]


def test_inside_a_test_of_djangos_it_works_as_well(report) -> None:
    """`TestCase` keeps a transaction open around each test."""
    from django.test import TestCase

    from pglease.contrib.django import guarded, pglease

    class Case(TestCase):
        def runTest(self):  # noqa: N802  # unittest's name
            with pglease.acquire("job") as lease, guarded(lease):
                report.objects.create(body="mine")
            assert report.objects.count() == 1

    result = unittest.TestResult()
    unittest.TestSuite([Case()]).run(result)

    assert (result.errors, result.failures) == ([], [])
    assert report.objects.count() == 0


def test_another_database_than_the_leases_is_refused(report, server) -> None:
    from django.db import connections

    from pglease.contrib.django import guarded, pglease

    with server.database() as name:
        other = django_site.alias(server.dsn(name))
        with (
            pglease.acquire("job") as lease,
            pytest.raises(ConfigurationError, match="another database"),
            guarded(lease, using=other),
        ):
            pass
        connections[other].close()


def test_it_may_be_told_to_be_the_outermost_block(report) -> None:
    from django.db import transaction

    from pglease.contrib.django import guarded, pglease

    with (
        pglease.acquire("job") as lease,
        transaction.atomic(),
        pytest.raises(RuntimeError, match="durable"),
        guarded(lease, durable=True),
    ):
        pass


PAUSED = """
import os, signal, sys
import django
django.setup()
from django.db import connection
from pglease import FencedError
from pglease.contrib.django import guarded, pglease

leases = [pglease.acquire(name, ttl=1.5, on_lost="log") for name in ("one", "two", "three")]
held = [lease.__enter__() for lease in leases]
print("held", flush=True)
os.kill(os.getpid(), signal.SIGSTOP)
for lease in held:
    try:
        with guarded(lease), connection.cursor() as cursor:
            cursor.execute("INSERT INTO report VALUES (%s)", [lease.name])
    except FencedError:
        print("refused", lease.name, lease.held)
"""


def test_a_worker_that_was_paused_finds_all_its_leases_lost_and_writes_nothing(project: Project, dsn: str) -> None:
    execute(dsn, "CREATE TABLE report (body text)")
    worker: subprocess.Popen[str] = project.python("-W", "default", "-c", PAUSED, DJANGO_SETTINGS_MODULE="settings")
    assert worker.stdout is not None
    assert worker.stdout.readline() == "held\n"
    wait_until(lambda: is_free(dsn, "one") and is_free(dsn, "two") and is_free(dsn, "three"))

    worker.send_signal(signal.SIGCONT)
    out, err = worker.communicate(timeout=60)

    assert out.splitlines() == ["refused one False", "refused two False", "refused three False"], err
    assert execute(dsn, "SELECT count(*) FROM report") == [(0,)]
