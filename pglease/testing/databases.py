"""Databases for tests: made empty, dropped afterwards."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

import psycopg
from psycopg import sql
from psycopg.conninfo import make_conninfo

from pglease.backends.postgres import PostgresBackend


@contextmanager
def empty_database(dsn: str) -> Iterator[str]:
    """Make an empty database on a server, and drop it at the end, whoever is still connected.

    Args:
        dsn: the server, as a role that may create databases: a URL, or libpq's `host=… dbname=…`.

    Yields:
        its address, written as the server's was.
    """
    name = f"pglease_test_{secrets.token_hex(6)}"
    with psycopg.connect(dsn, autocommit=True, connect_timeout=10) as server:
        # template0: nobody can be connected to it, so two at once never get in each other's way.
        server.execute(sql.SQL("CREATE DATABASE {} TEMPLATE template0").format(sql.Identifier(name)))
    try:
        yield _within(dsn, name)
    finally:
        with psycopg.connect(dsn, autocommit=True, connect_timeout=10) as server:
            server.execute(sql.SQL("DROP DATABASE IF EXISTS {} WITH (FORCE)").format(sql.Identifier(name)))


def _within(dsn: str, database: str) -> str:
    if "://" in dsn:
        return urlsplit(dsn)._replace(path=f"/{database}").geturl()
    return make_conninfo(dsn, dbname=database)


def load_schema(*, host: str, port: str | int, user: str, dbname: str, password: str | None = None, **_: Any) -> None:
    """Make the lease tables in a template database: for pytest-postgresql.

    postgresql_server = factories.postgresql_noproc(load=[pglease.testing.load_schema])

    Args:
        host, port, user, dbname, password: as pytest-postgresql says them.
    """
    secret = {"password": password} if password else {}
    backend = PostgresBackend(make_conninfo(host=host, port=port, user=user, dbname=dbname, **secret))
    try:
        backend.apply_schema()
    finally:
        backend.close()
