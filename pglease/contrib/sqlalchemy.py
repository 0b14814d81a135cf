"""The lease table in a `MetaData`, for those who want to read leases beside their own rows.

    from pglease.contrib import sqlalchemy as leases_in

    leases = leases_in.table(Base.metadata)
    held = select(leases.c.owner_id).where(leases.c.expires_at > func.clock_timestamp())

Taking leases needs none of this: `PGLease.from_engine(engine)` lends an engine's connections, `lease.guard(session)`
fences what a session writes.
"""

from __future__ import annotations

from typing import Any

from sqlalchemy import BigInteger, Column, DateTime, Integer, MetaData, Table, Text, UniqueConstraint, event, text
from sqlalchemy.dialects.postgresql import JSONB, UUID
from sqlalchemy.engine import Connection

from pglease.backends.postgres_schema import ddl, undo
from pglease.schema import DEFAULT_TABLE, TableNames, table_names

MARK = "pglease"
"""The key in a table's `info` by which ours is told from the application's."""


def table(metadata: MetaData, table_name: str = DEFAULT_TABLE, schema: str | None = None) -> Table:
    """Describe the lease table in `metadata`, once; to be read, and written by nobody but pglease.

    `create_all` then makes the whole store, as `pglease schema apply` does, and `drop_all` takes all of it away. For
    Alembic, see `pglease.contrib.alembic.include_object`.

    Args:
        metadata: where.
        table_name, schema: as for `PostgresBackend`.

    Returns:
        the table; the same one when it is described there already.

    Raises:
        ConfigurationError: a name that is no plain identifier.
    """
    names = table_names(table_name, schema)
    key = table_name if schema is None else f"{schema}.{table_name}"
    if key in metadata.tables:
        return metadata.tables[key]
    return _described(metadata, names)


def _described(metadata: MetaData, names: TableNames) -> Table:
    moment = DateTime(timezone=True)
    described = Table(
        names.table,
        metadata,
        Column("task_name", Text(collation="C"), primary_key=True),
        Column("owner_id", Text, nullable=False),
        Column("acquired_at", moment, nullable=False),
        Column("expires_at", moment, nullable=False),
        Column("heartbeat_at", moment, nullable=False),
        Column("lease_id", UUID(as_uuid=True)),
        Column("fencing_token", BigInteger, nullable=False),
        Column("transitions", BigInteger, nullable=False, server_default=text("0")),
        Column("metadata", JSONB),
        Column("waited_until", moment),
        Column("queued_until", moment),
        Column("slot", moment),
        Column("session_pid", Integer),
        Column("session_started", moment),
        UniqueConstraint("task_name", "fencing_token", name=f"{names.table}_token_key"),
        schema=names.schema,
        comment="pglease: one row a lease; lease_id is null when nobody holds it",
        info={MARK: True},
    )

    def make_whole(_table: Table, connection: Connection, **_: Any) -> None:
        # What SQLAlchemy has just made lacks the tables beside it, the storage parameters and the version mark. It is
        # empty and nobody has seen it: our own script makes it anew.
        connection.exec_driver_sql(f"DROP TABLE {names.leases}")
        connection.exec_driver_sql(ddl(names))

    def drop_the_rest(_table: Table, connection: Connection, **_: Any) -> None:
        for statement in undo(names):
            connection.exec_driver_sql(statement)

    event.listen(described, "after_create", make_whole)
    event.listen(described, "after_drop", drop_the_rest)
    return described
