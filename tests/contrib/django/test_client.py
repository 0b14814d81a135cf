"""`from pglease.contrib.django import pglease`: the client of the settings, on connections of its own."""

from __future__ import annotations

import asyncio
import os

import psycopg
import pytest

from pglease import AsyncPGLease, ConfigurationError, PGLease
from pglease.errors import BackendMisconfigured
from tests.support import django_site
from tests.support.worlds import execute, heartbeats, is_free, wait_until

pytestmark = pytest.mark.matrix


@pytest.fixture
def pglease(default_database):
    from pglease.contrib.django import pglease

    return pglease


def orm(statement, alias="default"):
    """Ask on the ORM's connection."""
    from django.db import connections

    with connections[alias].cursor() as cursor:
        cursor.execute(statement)
        return cursor.fetchone()[0] if cursor.description else None


def others(dsn):
    """The sessions of this database that are the client's: pid, application, and what it was started with."""
    return execute(
        dsn,
        "SELECT pid, application_name FROM pg_stat_activity WHERE datname = current_database() "
        "AND application_name <> '' AND pid <> pg_backend_pid()",
    )


def test_it_has_the_database_of_the_settings_and_no_wiring(pglease, leases) -> None:
    with pglease.acquire("daily-report") as lease:
        assert lease
        assert not leases.try_acquire("daily-report")

    assert leases.try_acquire("daily-report")


def test_it_is_a_client_to_those_who_ask(pglease) -> None:
    async def report() -> int:
        async with AsyncPGLease(pglease).acquire("async-report") as lease:
            return lease.fencing_token

    assert isinstance(pglease, PGLease)
    assert asyncio.run(report()) == 1


def test_its_connection_is_not_the_orms_and_is_told_what_the_settings_say(dsn) -> None:
    from pglease.contrib.django import pglease

    of_the_orm = {"pool": {"min_size": 1}, "isolation_level": 3, "server_side_binding": True, "prepare_threshold": 3}
    with django_site.default_database(dsn, application_name="shop", options="-c work_mem=1234kB", **of_the_orm):
        with pglease.acquire("job") as lease, pglease.backend.connections.lend(pglease._budget()) as link:
            ((pid, memory),) = link.rows("SELECT pg_backend_pid(), current_setting('work_mem')")
            assert lease
            assert orm("SELECT pg_backend_pid()") != pid

        assert memory == "1234kB"
        assert {name for _, name in others(dsn)} == {"shop"}


def test_it_assumes_the_role_that_the_orm_assumes(dsn, admin, server) -> None:
    from pglease.contrib.django import pglease

    role = f"some role {os.getpid()}"
    admin.execute(f'CREATE ROLE "{role}"')
    admin.execute(f'GRANT "{role}" TO "{psycopg.conninfo.conninfo_to_dict(dsn)["user"]}"')
    admin.execute(f'GRANT CREATE, USAGE ON SCHEMA public TO "{role}"')
    try:
        with django_site.default_database(dsn, assume_role=role):
            assert pglease.try_acquire("job")
            assert orm("SELECT current_user") == role
            assert orm("SELECT tableowner FROM pg_tables WHERE tablename = 'pglease_leases'") == role
    finally:
        admin.execute(f'DROP OWNED BY "{role}"')
        admin.execute(f'DROP ROLE "{role}"')


def test_a_password_that_changes_is_asked_for_with_each_connection(dsn, monkeypatch) -> None:
    """As with a database back end of another package, whose password is a token."""
    from django.db.backends.postgresql.base import DatabaseWrapper

    from pglease.contrib.django import pglease

    plain = DatabaseWrapper.get_connection_params
    given = []

    def with_a_token(wrapper):
        given.append(f"token {len(given)}")
        return plain(wrapper) | {"application_name": given[-1]}

    monkeypatch.setattr(DatabaseWrapper, "get_connection_params", with_a_token)
    with django_site.default_database(dsn):
        assert pglease.try_acquire("job")
        ((pid, first),) = others(dsn)
        execute(dsn, "SELECT pg_terminate_backend(%s)", pid)
        assert pglease.get_lease("job")
        wait_until(lambda: [name for _, name in others(dsn) if name != first])

    assert len(set(given)) == len(given) > 1


def test_a_lease_that_is_taken_in_a_transaction_outlives_its_rollback_and_rolls_nothing_in(pglease, dsn) -> None:
    """A commit on the ORM's connection would have kept the row."""
    from django.db import transaction

    execute(dsn, "CREATE TABLE report (body text)")
    with pytest.raises(ZeroDivisionError), transaction.atomic():
        orm("INSERT INTO report VALUES ('never')")
        assert pglease.try_acquire("job")
        raise ZeroDivisionError

    assert execute(dsn, "SELECT count(*) FROM report") == [(0,)]
    assert pglease.held("job")
    assert not is_free(dsn, "job")


def test_the_orms_connection_is_refused_inside_a_transaction(default_database) -> None:
    """Lent as the documentation of 0.0.x has it; it used to be committed."""
    from contextlib import contextmanager

    from django.db import connection, transaction

    from pglease.backends.postgres import PostgresBackend

    @contextmanager
    def django_factory():
        connection.ensure_connection()
        yield connection.connection

    orm("CREATE TABLE report (body text)")
    with PGLease(PostgresBackend.from_connection_factory(django_factory)) as leases:
        with pytest.raises(ZeroDivisionError), transaction.atomic():
            orm("INSERT INTO report VALUES ('never')")
            with pytest.raises(ConfigurationError, match="inside a transaction"):
                leases.try_acquire("job")
            raise ZeroDivisionError
        assert leases.try_acquire("job")

    assert orm("SELECT count(*) FROM report") == 0


def test_it_is_renewed_while_the_main_thread_is_in_a_transaction(pglease, dsn) -> None:
    from django.db import transaction

    with pglease.acquire("job", ttl=6) as lease, transaction.atomic():
        before = heartbeats(dsn, "job")
        wait_until(lambda: heartbeats(dsn, "job") > before)
        assert lease.held


def test_the_orm_may_commit_as_often_as_it_likes_under_a_hybrid_lease(pglease, configured, dsn) -> None:
    from django.db import transaction

    locks = (
        "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND database = "
        "(SELECT oid FROM pg_database WHERE datname = current_database())"
    )
    with configured(BACKEND="hybrid"):
        with pglease.acquire("job") as lease:
            for _ in range(3):
                with transaction.atomic():
                    orm("SELECT 1")
            assert lease.held
            assert execute(dsn, locks) == [(1,)]
        wait_until(lambda: execute(dsn, locks) == [(0,)])


def test_through_a_transaction_pooler_leases_are_leases(pgbouncer, leases) -> None:
    from pglease.contrib.django import pglease

    with django_site.default_database(pgbouncer.dsn, settings={"DISABLE_SERVER_SIDE_CURSORS": True}):
        with pglease.acquire("job") as lease:
            assert lease
            assert not leases.try_acquire("job")
        assert leases.try_acquire("job")


def test_a_forked_worker_begins_with_nothing(pglease) -> None:
    """As in a server that loads the application before it forks."""
    with pglease.acquire("job") as lease:
        child = os.fork()
        if child == 0:
            try:
                alone = not lease.held and pglease.holding() == [] and pglease.try_acquire("job") is False
                os._exit(0 if alone and pglease.try_acquire("other") else 1)
            except BaseException:
                os._exit(2)
        _, status = os.waitpid(child, 0)

        assert os.waitstatus_to_exitcode(status) == 0
        assert lease.held


def test_the_ttl_of_the_settings_is_for_calls_that_name_none(pglease, configured) -> None:
    with configured(TTL="10m"):

        @pglease.singleton_task("task")
        def task():
            return ttl_of("task")

        def ttl_of(name):
            record = pglease.get_lease(name)
            return (record.expires_at - record.acquired_at).total_seconds()

        assert pglease.try_acquire("plain")
        assert pglease.try_acquire("told", 30)
        with pglease.acquire_many(["a", "b"]):
            assert (ttl_of("plain"), ttl_of("told"), ttl_of("a"), task()) == (600, 30, 600, 600)


def test_a_task_may_be_decorated_before_the_settings_change(pglease, configured) -> None:
    @pglease.singleton_task("task")
    def owner():
        return pglease.get_lease("task").owner_id

    with configured(OWNER_ID="nightly"):
        assert owner() == "nightly"


def test_another_store_is_named_by_its_address(pglease, configured, dsn) -> None:
    with configured(BACKEND="memory://django"):
        assert pglease.try_acquire("job")
        assert execute(dsn, "SELECT to_regclass('pglease_leases')") == [(None,)]


def test_the_store_is_made_by_a_function_of_ones_own(pglease, configured) -> None:
    with configured(BACKEND="pglease.backends.memory.MemoryBackend"):
        assert pglease.try_acquire("job")
        assert pglease.backend.traits.kind == "memory"


def test_what_the_setting_does_not_know_is_refused(pglease, configured) -> None:
    from django.core.exceptions import ImproperlyConfigured

    with configured(ALIAS="default"), pytest.raises(ImproperlyConfigured, match="'ALIAS', but knows only"):
        pglease.try_acquire("job")
    with configured(TTL="5 minutes"), pytest.raises(ConfigurationError, match="TTL"):
        pglease.try_acquire("job")


def test_a_database_that_is_not_postgresql_is_refused_in_a_sentence(pglease, configured) -> None:
    with (
        django_site.lite() as lite,
        configured(DATABASE=lite),
        pytest.raises(BackendMisconfigured, match="'lite' is SQLite"),
    ):
        pglease.try_acquire("job")


def test_closed_it_begins_anew_with_the_next_use(pglease, dsn, leases) -> None:
    assert pglease.try_acquire("job")

    pglease.close()

    wait_until(lambda: [name for _, name in others(dsn) if name == "pglease"] == [])
    assert leases.try_acquire("job")
    assert pglease.try_acquire("another")


def test_a_handler_of_a_signal_may_use_it_while_it_is_being_made(pglease, configured, monkeypatch) -> None:
    from pglease.contrib.django import client

    settings, signals, granted = client.conf, iter(["one"]), []

    def conf():
        if next(signals, None):
            granted.append(pglease.try_acquire("handler"))
        return settings()

    with configured(BACKEND="memory://interrupted"):
        monkeypatch.setattr(client, "conf", conf)

        assert pglease.try_acquire("job")

        assert granted == [True]
        assert {lease.name for lease in pglease.holding()} == {"handler", "job"}
