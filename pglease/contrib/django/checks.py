"""What `check --database …` and `migrate` tell about leases, before they are needed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from django.core.checks import CheckMessage, Error
from django.core.checks import Warning as Caution
from django.db import connections, transaction

from pglease import clock
from pglease.backends.base import Budget
from pglease.contrib.django.conf import Conf, conf
from pglease.errors import ConfigurationError

PATIENCE = 10.0
"""Seconds that a check may take to look at the store."""


def check_leases(
    app_configs: Any = None,  # noqa: ARG001  # Django's signature
    databases: Sequence[str] | None = None,
    **_: Any,
) -> list[CheckMessage]:
    """Look at the database the leases are in, if it is one of those that are checked."""
    wanted = conf()
    if wanted.database not in connections.settings:
        return [_no_postgresql(f"PGLEASE['DATABASE'] is {wanted.database!r}, which DATABASES has not")]
    if "://" in wanted.backend or wanted.database not in (databases or ()):
        return []
    if not wanted.in_the_database:
        return list(_atomic_requests(wanted))
    connection = connections[wanted.database]
    if connection.vendor != "postgresql":
        return [_no_postgresql(f"The database {wanted.database!r} is {connection.display_name}, not PostgreSQL")]
    return [*_table(wanted), *_session(wanted)]


def _no_postgresql(text: str) -> CheckMessage:
    hint = "Let PGLEASE['DATABASE'] name one that is, or PGLEASE['BACKEND'] another store."
    return Error(f"{text}.", hint=hint, id="pglease.E001")


def _table(wanted: Conf) -> Iterator[CheckMessage]:
    with connections[wanted.database].cursor() as cursor:
        cursor.execute("SELECT pg_catalog.to_regclass(%s) IS NULL", [wanted.names.leases])
        (is_missing,) = cursor.fetchone()
    if is_missing:
        yield Caution(
            f"The table {wanted.names.leases} is missing in the database {wanted.database!r}.",
            hint="Run `manage.py migrate pglease`; where it was migrated already, `manage.py pglease schema apply`.",
            id="pglease.W001",
        )


def _session(wanted: Conf) -> Iterator[CheckMessage]:
    """Look, for the hybrid store, whether its sessions would be its own."""
    store: Any = wanted.open_store()
    try:
        if not hasattr(store, "examine_session"):
            return
        found = store.examine_session(timeout=PATIENCE)
    finally:
        store.close()
    if found.status == "fail":
        yield Caution(
            f"Hybrid leases do not work on the database {wanted.database!r}: {found.text}.",
            hint="Let PGLEASE['DATABASE'] name an alias that leads to the server itself, or choose 'postgresql'.",
            id="pglease.W002",
        )


def _atomic_requests(wanted: Conf) -> Iterator[CheckMessage]:
    """Do what a view would do: ask for a lease inside the transaction of its request."""
    if not connections[wanted.database].settings_dict.get("ATOMIC_REQUESTS"):
        return
    store = wanted.open_store()
    try:
        with transaction.atomic(using=wanted.database), connections[wanted.database].cursor() as cursor:
            cursor.execute("SELECT 1")  # as a view has looked up its session before
            store.get("pglease:check", Budget.of(PATIENCE, clock.now))
    except ConfigurationError as refused:
        yield Caution(
            f"With ATOMIC_REQUESTS no view can take a lease on the ORM's own connection: {refused}.",
            hint="Leave PGLEASE['BACKEND'] out, for connections of its own, or mark such views non_atomic_requests.",
            id="pglease.W003",
        )
    finally:
        store.close()
