"""Alembic: our table left alone by autogenerate, made by a revision, and one of several starting pods that upgrades.

In `env.py`:

    from pglease.contrib import alembic as pglease

    with connectable.connect() as connection, pglease.once(connectable):
        context.configure(connection=connection, target_metadata=target_metadata, include_name=pglease.include_name)
        with context.begin_transaction():
            context.run_migrations()

Importing it also gives revisions `op.create_pglease()` and `op.drop_pglease()`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from alembic import context
from alembic.autogenerate import renderers
from alembic.autogenerate.api import AutogenContext
from alembic.operations import MigrateOperation, Operations
from sqlalchemy.engine import Connection, Engine
from sqlalchemy.schema import SchemaItem

from pglease.backends.postgres import PostgresBackend
from pglease.backends.postgres_schema import ddl, undo
from pglease.client import PGLease
from pglease.contrib.sqlalchemy import MARK
from pglease.errors import ConfigurationError
from pglease.handles import HeldLease
from pglease.options import Duration
from pglease.schema import DEFAULT_TABLE, VERSION, TableNames, table_names

LENT_BY = frozenset({"psycopg", "psycopg2"})
"""The drivers whose connections an engine can lend to our threads; others are addressed instead."""

IncludeName = Callable[[str | None, str, Mapping[str, Any]], bool]
"""What `context.configure(include_name=…)` takes."""


# -- left alone by autogenerate ----------------------------------------------------------------------------------------


def include_name(name: str | None, type_: str, parent_names: Mapping[str, Any]) -> bool:  # noqa: ARG001  # Alembic's
    """Leave our tables out of autogenerate, which would write `drop_table` for them: for `context.configure`.

    Args:
        name, type_, parent_names: as Alembic says them.
    """
    return not (type_ == "table" and name in _tables(DEFAULT_TABLE))


def include_names(table_name: str = DEFAULT_TABLE, *, others: IncludeName | None = None) -> IncludeName:
    """Return an `include_name` for a table of another name, or one that asks yours about everything else.

    Args:
        table_name: the lease table's. Default `pglease_leases`.
        others: your own `include_name`. Default None: everything else is included.
    """
    left_out = _tables(table_names(table_name).table)

    def include(name: str | None, type_: str, parent_names: Mapping[str, Any]) -> bool:
        if type_ == "table" and name in left_out:
            return False
        return others is None or others(name, type_, parent_names)

    return include


def include_object(object_: SchemaItem, name: str | None, type_: str, reflected: bool, compare_to: Any) -> bool:  # noqa: ARG001
    """Leave out also what `pglease.contrib.sqlalchemy.table` has put into the `MetaData`: for `context.configure`.

    Without it autogenerate would write `create_table` for a table that the database has.

    Args:
        object_, name, type_, reflected, compare_to: as Alembic says them.
    """
    return not (type_ == "table" and MARK in object_.info)


def _tables(table: str) -> frozenset[str]:
    return frozenset({table, f"{table}_meta", f"{table}_tickets", f"{table}_history"})


# -- made and taken away by revisions ----------------------------------------------------------------------------------


class _StoreOp(MigrateOperation):
    """What both operations say: which tables, and in which layout."""

    def __init__(self, version: int = 1, table_name: str = DEFAULT_TABLE, schema: str | None = None) -> None:
        if version != VERSION:
            raise ConfigurationError(f"this pglease makes layout {VERSION} of its table, not {version!r}")
        self.version = version
        self.names = table_names(table_name, schema)

    def arguments(self) -> dict[str, Any]:
        """Return what it was made with."""
        return {"version": self.version, "table_name": self.names.table, "schema": self.names.schema}

    def to_diff_tuple(self) -> tuple[Any, ...]:
        """Return how `compare_metadata` shows it."""
        return (type(self).__name__, self.names.leases)


@Operations.register_operation("create_pglease")
class CreatePgleaseOp(_StoreOp):
    """Make the lease table, or upgrade that of pglease 0.0.x in place; harmless where it exists."""

    @classmethod
    def create_pglease(
        cls, operations: Operations, version: int = 1, *, table_name: str = DEFAULT_TABLE, schema: str | None = None
    ) -> None:
        """Make the lease table: `op.create_pglease(version=1)`. Also printed by `upgrade --sql`.

        Args:
            version: the layout. A revision says the one it was written for; 1 is the only one so far.
            table_name, schema: as for `PostgresBackend`.

        Raises:
            ConfigurationError: a layout that this pglease does not make, or a name that is no plain identifier.
        """
        operations.invoke(cls(version, table_name, schema))

    def reverse(self) -> DropPgleaseOp:
        """Return what takes it away."""
        return DropPgleaseOp(**self.arguments())


@Operations.register_operation("drop_pglease")
class DropPgleaseOp(_StoreOp):
    """Drop the lease table and what belongs to it, with all leases: tokens start again at 1 afterwards."""

    @classmethod
    def drop_pglease(
        cls, operations: Operations, version: int = 1, *, table_name: str = DEFAULT_TABLE, schema: str | None = None
    ) -> None:
        """Drop the lease table: `op.drop_pglease()`. Arguments as for `create_pglease`."""
        operations.invoke(cls(version, table_name, schema))

    def reverse(self) -> CreatePgleaseOp:
        """Return what makes it again."""
        return CreatePgleaseOp(**self.arguments())


@Operations.implementation_for(CreatePgleaseOp)
def _create(operations: Operations, operation: CreatePgleaseOp) -> None:
    operations.execute(ddl(operation.names))


@Operations.implementation_for(DropPgleaseOp)
def _drop(operations: Operations, operation: DropPgleaseOp) -> None:
    for statement in undo(operation.names):
        operations.execute(statement)


@renderers.dispatch_for(CreatePgleaseOp)
def _written_create(_: AutogenContext, operation: CreatePgleaseOp) -> str:
    return _written("create_pglease", operation)


@renderers.dispatch_for(DropPgleaseOp)
def _written_drop(_: AutogenContext, operation: DropPgleaseOp) -> str:
    return _written("drop_pglease", operation)


def _written(verb: str, operation: _StoreOp) -> str:
    said = operation.arguments()
    usual = {"table_name": DEFAULT_TABLE, "schema": None}
    return f"op.{verb}({', '.join(f'{key}={value!r}' for key, value in said.items() if value != usual.get(key))})"


# -- upgraded once -----------------------------------------------------------------------------------------------------


@contextmanager
def once(
    connectable: Engine | Connection,
    name: str = "alembic",
    ttl: Duration = 60,
    *,
    wait: Duration = 600,
    table_name: str = DEFAULT_TABLE,
    schema: str | None = None,
) -> Iterator[HeldLease | None]:
    """Let one of several starting pods upgrade, and the others wait: when it is their turn they find nothing to do.

    It goes around `context.begin_transaction()`, never into it: the next pod reads the version as soon as the lease is
    free, and must find what this one has committed. Where the lease table is missing it is made first. A pod that dies
    in the middle keeps the others waiting for ttl.

    Where nothing is migrated (`--sql`, `current`, `check`, `revision --autogenerate`) nobody is kept out and nothing is
    asked of the database.

    Args:
        connectable: the engine, or a connection in no transaction. Connections of psycopg and psycopg2 are lent by the
            engine, one for each request; with other drivers (asyncpg, pg8000) psycopg connects to the engine's address.
        name: the lease. Default "alembic": one for each database.
        ttl: seconds (or "1m") until another pod goes on if this one dies; renewed while it lives. Default 60.
        wait: seconds for the whole wait. Default 600: as long as a migration may take.
        table_name, schema: as for `PostgresBackend`.

    Returns:
        a context manager that binds the lease, or None where nothing is migrated.

    Raises:
        AcquireTimeout: on entering: another pod is still at it.
        ConfigurationError: on entering: the connection is inside a transaction.
        LeaseLostError: on leaving: the lease was lost on the way. What was committed is committed; Alembic's own check
            of the version keeps two from applying the same revision.
        BackendError: on entering: nothing is held.
    """
    if not _migrates():
        yield None
        return
    _refuse_inside_a_transaction(connectable)
    names = table_names(table_name, schema)
    _see_to_the_table(connectable.engine, names)
    # Not made anew when it is missing on leaving: this may have been the downgrade that drops it.
    with (
        PGLease(_store(connectable.engine, names, create=False)) as leases,
        leases.acquire(name, ttl, raise_on_failure=True, wait=wait) as lease,
    ):
        yield lease


def _migrates() -> bool:
    """Tell whether this is about to change a database. Outside of env.py, around `command.upgrade`, it is."""
    try:
        if context.is_offline_mode():
            return False
    except (NameError, AttributeError):  # Alembic's proxy stands for nothing, not yet or no more
        return True
    try:
        context.get_revision_argument()
    except KeyError:  # `current`, `check`, `revision`: no command that goes anywhere
        return False
    return True


def _refuse_inside_a_transaction(connectable: Engine | Connection) -> None:
    if isinstance(connectable, Connection) and connectable.in_transaction():
        raise _inside()
    try:
        migrating = context.get_context().connection
    except Exception:  # noqa: BLE001  # not configured yet, or not in env.py: Alembic has no error of its own for that
        return
    if migrating is not None and migrating.in_transaction():
        raise _inside()


def _inside() -> ConfigurationError:
    return ConfigurationError(
        "once() goes around the transaction of the migrations, not into it: the lease would be free before anybody can "
        "see what was migrated. In env.py: `with once(connectable), context.begin_transaction():`"
    )


def _see_to_the_table(engine: Engine, names: TableNames) -> None:
    with PGLease(_store(engine, names, create=True)) as leases:
        leases.list_leases("alembic")  # any question will do: the first use makes what is missing


def _store(engine: Engine, names: TableNames, *, create: bool) -> PostgresBackend:
    knobs: dict[str, Any] = {"table_name": names.table, "schema": names.schema, "auto_initialize": create}
    if engine.dialect.driver in LENT_BY:
        return PostgresBackend.from_engine(engine, **knobs)
    return PostgresBackend(engine.url.render_as_string(hide_password=False), **knobs)
