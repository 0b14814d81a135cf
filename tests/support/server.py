"""The one PostgreSQL of a run: started by the controller, shared by the workers, or an existing one named by
PGLEASE_TEST_DSN."""

from __future__ import annotations

import base64
import hashlib
import hmac
import os
import secrets
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, LiteralString
from urllib.parse import quote

import psycopg
from psycopg import sql

from tests.support.copies import Original

SETTINGS = {
    # Every worker may run a race of dozens of clients at once.
    "max_connections": 400,
    "shared_buffers": "64MB",
    # DROP DATABASE waits for a checkpoint; none of these files outlives the run.
    "max_wal_size": "1GB",
}
EMPTY = "pglease_empty"
"""What each test's database is a copy of: it holds besides what the first to connect to a database has to write."""


def new_canary() -> str:
    """Return a password that cannot stand in any text by chance."""
    return f"canary-s3cr3t-{secrets.token_hex(8)}"


class Kept:
    """One connection of a superuser's for many statements: the server starts a process for each connection.

    Args:
        connect: makes it, when it is first used, and again when something has cost it its life.
    """

    def __init__(self, connect: Callable[[], psycopg.Connection]) -> None:
        self._connect = connect
        self._connection: psycopg.Connection | None = None

    def execute(self, statement: sql.Composed | LiteralString, parameters: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        """Run a statement that may be run twice; return its rows, if any."""
        connection = self._there()
        try:
            return _rows(connection, statement, parameters)
        except psycopg.OperationalError:
            if not connection.closed:
                raise
            return _rows(self._there(), statement, parameters)

    @property
    def server_version(self) -> int:
        """As libpq numbers it: 150004."""
        return self._there().info.server_version

    def _there(self) -> psycopg.Connection:
        if self._connection is None or self._connection.closed:
            self._connection = self._connect()
        return self._connection

    def close(self) -> None:
        """End it; what is run later has another."""
        if self._connection is not None:
            self._connection.close()


def _rows(
    connection: psycopg.Connection, statement: sql.Composed | LiteralString, parameters: Sequence[Any]
) -> list[tuple[Any, ...]]:
    cursor = connection.execute(statement, parameters or None)
    return cursor.fetchall() if cursor.description else []


@dataclass(frozen=True)
class RunServer:
    """Where the run's server is and who may log in. Plain values only: it travels to the workers.

    Attributes:
        host: its address.
        port: its port.
        admin_user: a superuser.
        admin_password: its password, or None where it is trusted.
        user: the role in every test's DSN.
        canary: the password of that role.
        log_path: the server's log, or None when the server is not ours.
        copying: programs that start copies of it, or None when it is not ours or they may not be run.
        kept: this process's own connection to it.
    """

    host: str
    port: int
    admin_user: str
    admin_password: str | None = field(repr=False)
    user: str
    canary: str = field(repr=False)
    log_path: str | None
    copying: str | None
    kept: Kept = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "kept", Kept(self.connect))

    def to_dict(self) -> dict[str, Any]:
        """Return what another process has to know."""
        return {known.name: getattr(self, known.name) for known in fields(self) if known.init}

    def dsn(self, dbname: str) -> str:
        """Return a test's DSN: the canary is in it."""
        return self._url(self.user, self.canary, dbname)

    def admin_dsn(self, dbname: str = "postgres") -> str:
        """Return a superuser's DSN."""
        return self._url(self.admin_user, self.admin_password, dbname)

    def _url(self, user: str, password: str | None, dbname: str) -> str:
        secret = f":{quote(password, safe='')}" if password is not None else ""
        return f"postgresql://{quote(user, safe='')}{secret}@{quote(self.host, safe='')}:{self.port}/{dbname}"

    def log_text(self) -> str:
        """Return everything the server has logged in this run."""
        if self.log_path is None:
            raise LookupError("the log of an existing server is not ours to read")
        return Path(self.log_path).read_text(errors="replace")

    def connect(self, dbname: str = "postgres") -> psycopg.Connection:
        """Connect as the superuser, each statement its own transaction."""
        return psycopg.connect(self.admin_dsn(dbname), autocommit=True, connect_timeout=10)

    @contextmanager
    def database(self) -> Iterator[str]:
        """Make an empty database that belongs to the tests' role; drop it afterwards, whoever is still connected."""
        name = f"pglease_test_{secrets.token_hex(6)}"
        # Nobody can be connected to either, so two workers never get in each other's way.
        template = sql.Identifier(EMPTY if self.log_path else "template0")
        # Copying its files costs a third of writing them to the WAL; until 14 there was no other way.
        copied = sql.SQL("STRATEGY file_copy" if self.kept.server_version >= 150000 else "")
        create = sql.SQL("CREATE DATABASE {} OWNER {} TEMPLATE {} {}")
        self.kept.execute(create.format(sql.Identifier(name), sql.Identifier(self.user), template, copied))
        try:
            yield name
        finally:
            self.kept.execute(sql.SQL("DROP DATABASE IF EXISTS {} WITH (FORCE)").format(sql.Identifier(name)))


@contextmanager
def run_server() -> Iterator[RunServer]:
    """Provide the run's server: the existing one where PGLEASE_TEST_DSN names it, else one of our own."""
    existing = os.environ.get("PGLEASE_TEST_DSN")
    with _existing(existing) if existing else _own() as server:
        yield server


@contextmanager
def _own() -> Iterator[RunServer]:
    canary = new_canary()
    with Original(settings=SETTINGS) as postgres:
        # Where temporary files may not be run, each server is made anew.
        copying = str(postgres.copying) if os.access(postgres.copying / "initdb", os.X_OK) else None
        ours = {"log_path": str(postgres.log_path), "copying": copying}
        server = RunServer(postgres.host, postgres.port, "postgres", None, "pglease_test", canary, **ours)
        hba = postgres.data / "pg_hba.conf"
        hba.write_text(f"host all {server.user} all scram-sha-256\n{hba.read_text()}")
        postgres.execute("SELECT pg_reload_conf()")
        postgres.execute(f"CREATE DATABASE {EMPTY} TEMPLATE template0")
        postgres.execute("SELECT count(*) FROM pg_class", dbname=EMPTY)
        postgres.execute(f"ALTER DATABASE {EMPTY} ALLOW_CONNECTIONS false")
        _create_role(server)
        yield server


@contextmanager
def _existing(dsn: str) -> Iterator[RunServer]:
    with psycopg.connect(dsn, connect_timeout=10) as admin:
        info = admin.info
        # Of this run only: another run may use the same server at the same time, with another password.
        user = f"pglease_test_{secrets.token_hex(4)}"
        server = RunServer(info.host, info.port, info.user, info.password or None, user, new_canary(), None, None)
    _create_role(server)
    try:
        yield server
    finally:
        with server.connect() as admin:
            admin.execute(sql.SQL("DROP ROLE {}").format(sql.Identifier(server.user)))


def _create_role(server: RunServer) -> None:
    role = sql.Identifier(server.user)
    with server.connect() as admin:
        # The password itself never travels in a statement: it could end up in the server's log.
        create = sql.SQL("CREATE ROLE {} LOGIN CREATEDB PASSWORD {}")
        admin.execute(create.format(role, sql.Literal(_verifier(server.canary))))


def _verifier(password: str) -> str:
    """Return what the server keeps of a password (RFC 5803), hashed once and not 4,096 times.

    The tests make tens of thousands of connections, and a password that lives for minutes needs no protection.
    """
    salt = secrets.token_bytes(16)
    salted = hashlib.pbkdf2_hmac("sha256", password.encode(), salt, 1)
    client = hashlib.sha256(hmac.digest(salted, b"Client Key", "sha256")).digest()
    server = hmac.digest(salted, b"Server Key", "sha256")
    shown = [base64.b64encode(part).decode() for part in (salt, client, server)]
    return f"SCRAM-SHA-256$1:{shown[0]}${shown[1]}:{shown[2]}"


def libpq_environment(server: RunServer) -> dict[str, str]:
    """Return what makes `postgresql://localhost/name` reach the run's server."""
    found = {"PGHOST": server.host, "PGPORT": str(server.port), "PGUSER": server.admin_user}
    return found | ({"PGPASSWORD": server.admin_password} if server.admin_password else {})
