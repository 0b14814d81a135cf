"""`manage.py check --database default` tells what would go wrong."""

from __future__ import annotations

from contextlib import contextmanager

import pytest
from django.core.management import call_command
from django.core.management.base import SystemCheckError
from django.db import connection

from pglease.backends.postgres import PostgresBackend
from tests.support import django_site

pytestmark = pytest.mark.matrix


def found():
    from pglease.contrib.django.checks import check_leases

    return [message.id for message in check_leases(databases=["default"])]


@contextmanager
def lend_the_orms():
    connection.ensure_connection()
    yield connection.connection


def on_the_orms_connection(**knobs) -> PostgresBackend:
    return PostgresBackend.from_connection_factory(lend_the_orms, **knobs)


def test_a_database_that_was_migrated_is_in_order(default_database) -> None:
    call_command("migrate", "pglease", verbosity=0)

    assert found() == []


def test_a_missing_table_is_told_with_what_makes_it(default_database, capsys) -> None:
    assert found() == ["pglease.W001"]

    call_command("check", databases=["default"])

    assert "manage.py migrate pglease" in capsys.readouterr().err


def test_plain_check_asks_no_database(default_database, capsys) -> None:
    call_command("check")

    assert "pglease" not in capsys.readouterr().err


def test_another_database_is_not_asked(default_database, configured) -> None:
    from pglease.contrib.django.checks import check_leases

    assert check_leases(databases=["other"]) == []
    assert check_leases() == []


def test_a_database_that_is_not_postgresql_is_an_error(default_database, configured) -> None:
    with (
        django_site.lite() as lite,
        configured(DATABASE=lite),
        pytest.raises(SystemCheckError, match=r"pglease\.E001.*is SQLite"),
    ):
        call_command("check", databases=[lite])


def test_a_database_that_is_not_there_is_an_error(default_database, configured) -> None:
    with configured(DATABASE="nowhere"):
        assert found() == ["pglease.E001"]


def test_a_store_elsewhere_is_none_of_its_business(default_database, configured) -> None:
    with configured(BACKEND="memory://"):
        assert found() == []


def test_hybrid_behind_a_transaction_pooler_is_told(pgbouncer, configured) -> None:
    with django_site.default_database(pgbouncer.dsn):
        call_command("migrate", "pglease", verbosity=0)
        with configured(BACKEND="hybrid"):
            assert found() == ["pglease.W002"]
        with configured(BACKEND="postgresql"):
            assert found() == []


def test_hybrid_on_the_server_itself_is_in_order(default_database, configured) -> None:
    call_command("migrate", "pglease", verbosity=0)

    with configured(BACKEND="hybrid"):
        assert found() == []


def test_leases_on_the_orms_connection_are_told_where_every_view_is_a_transaction(dsn, configured) -> None:
    theirs = f"{__name__}.on_the_orms_connection"
    with configured(BACKEND=theirs):
        with django_site.default_database(dsn, settings={"ATOMIC_REQUESTS": True}):
            assert found() == ["pglease.W003"]
        with django_site.default_database(dsn):
            assert found() == []
