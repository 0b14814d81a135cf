"""What PostgreSQL's catalogs say about our tables, and what of it is missing or odd. Looking changes nothing.

The first look names no table of ours, so that one which is missing makes no error in the server's log, and it needs no
right on them. Schema, apply, diff and doctor all read from it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pglease.backends.postgres_link import Link
from pglease.schema import PROTOCOL, VERSION, TableNames

CHANGING = frozenset({"expires_at", "heartbeat_at", "waited_until", "queued_until"})
"""Columns that heartbeats and waiters write. With an index on one of them no such update is HOT."""

PUBLISHED = {
    "task_name": "text",
    "owner_id": "text",
    "acquired_at": "timestamp with time zone",
    "expires_at": "timestamp with time zone",
    "heartbeat_at": "timestamp with time zone",
}
"""The columns of 0.0.x, which we keep. It had `character varying(255)` for the texts."""
ADDED = {
    "lease_id": "uuid",
    "fencing_token": "bigint",
    "transitions": "bigint",
    "metadata": "jsonb",
    "waited_until": "timestamp with time zone",
    "queued_until": "timestamp with time zone",
    "slot": "timestamp with time zone",
    "session_pid": "integer",
    "session_started": "timestamp with time zone",
}
_META = frozenset({"one", "version", "protocol", "token_floor", "lineage", "quarantined_until"})
_NULLABLE = ADDED.keys() - {"fencing_token", "transitions"}

_TICKET = {"task_name", "ticket_id", "owner_id", "number", "expires_at"}
_TENURE = {"task_name", "fencing_token", "owner_id", "acquired_at", "ended_at", "ending"}

STORAGE = {
    "fillfactor": "50",
    "autovacuum_vacuum_scale_factor": "0",
    "autovacuum_vacuum_threshold": "1000",
    "autovacuum_analyze_threshold": "1000",
    "vacuum_truncate": "off",
}

# Where our tables are: in the schema that was asked for, else in the first one of the search path that has a relation
# of this name, else in the first one where it would be made. Temporary tables do not count.
_LOOK = """
WITH path AS MATERIALIZED (
  SELECT s.name, s.place FROM pg_catalog.unnest(pg_catalog.current_schemas(false)) WITH ORDINALITY AS s(name, place)
  WHERE s.name <> 'pg_catalog' AND s.name <> 'information_schema'
), place AS MATERIALIZED (
  SELECT coalesce(
    %(schema)s::text,
    (SELECT path.name FROM path
     JOIN pg_catalog.pg_namespace n ON n.nspname = path.name
     JOIN pg_catalog.pg_class c ON c.relnamespace = n.oid AND c.relname = %(table)s::text
     ORDER BY path.place LIMIT 1),
    (SELECT path.name FROM path ORDER BY path.place LIMIT 1)) AS name
), space AS MATERIALIZED (
  SELECT n.oid, n.nspname FROM pg_catalog.pg_namespace n, place WHERE n.nspname = place.name
), found AS MATERIALIZED (
  SELECT c.oid, c.relname, pg_catalog.jsonb_build_object(
    'kind', c.relkind, 'persistence', c.relpersistence, 'options', pg_catalog.to_jsonb(c.reloptions),
    'owner', pg_catalog.pg_get_userbyid(c.relowner), 'owned', pg_catalog.pg_has_role(c.relowner, 'USAGE'),
    'rights', (
      SELECT pg_catalog.jsonb_object_agg(r.name, CASE r.name
        WHEN 'LOCK' THEN pg_catalog.has_any_column_privilege(c.oid, 'UPDATE')
        ELSE pg_catalog.has_table_privilege(c.oid, r.name) END)
      FROM pg_catalog.unnest(ARRAY['SELECT', 'INSERT', 'UPDATE', 'DELETE', 'LOCK']) AS r(name)),
    'columns', (
      SELECT pg_catalog.jsonb_object_agg(a.attname, pg_catalog.jsonb_build_object(
        'type', pg_catalog.replace(pg_catalog.format_type(a.atttypid, a.atttypmod), 'pg_catalog.', ''),
        'not_null', a.attnotnull, 'collation', l.collname,
        'optional', NOT a.attnotnull OR a.atthasdef OR a.attidentity <> '' OR a.attgenerated <> ''))
      FROM pg_catalog.pg_attribute a LEFT JOIN pg_catalog.pg_collation l ON l.oid = a.attcollation
      WHERE a.attrelid = c.oid AND a.attnum > 0 AND NOT a.attisdropped),
    'indexes', (
      SELECT pg_catalog.jsonb_agg(pg_catalog.jsonb_build_object(
        'name', x.relname,
        'key', i.indisunique AND i.indisvalid AND i.indimmediate AND i.indpred IS NULL AND i.indexprs IS NULL,
        'columns', (
          SELECT pg_catalog.jsonb_agg(a.attname) FROM pg_catalog.pg_attribute a
          WHERE a.attrelid = c.oid AND a.attnum = ANY (i.indkey)),
        'touches', (
          SELECT pg_catalog.jsonb_agg(DISTINCT a.attname) FROM pg_catalog.pg_attribute a
          LEFT JOIN pg_catalog.pg_depend d ON d.objid = i.indexrelid AND d.refobjid = c.oid AND d.refobjsubid = a.attnum
          WHERE a.attrelid = c.oid AND (a.attnum = ANY (i.indkey) OR d.objid IS NOT NULL))))
      FROM pg_catalog.pg_index i JOIN pg_catalog.pg_class x ON x.oid = i.indexrelid WHERE i.indrelid = c.oid)) AS look
  FROM pg_catalog.pg_class c JOIN space ON space.oid = c.relnamespace
  WHERE c.relname IN (%(table)s::text, %(meta)s::text, %(tickets)s::text, %(history)s::text)
)
SELECT pg_catalog.jsonb_build_object(
  'schema', (SELECT place.name FROM place),
  'schema_exists', EXISTS (SELECT 1 FROM space),
  'may_use', coalesce((SELECT pg_catalog.has_schema_privilege(space.oid, 'USAGE') FROM space), false),
  'may_create', coalesce(
    (SELECT pg_catalog.has_schema_privilege(space.oid, 'CREATE') FROM space),
    pg_catalog.has_database_privilege(pg_catalog.current_database(), 'CREATE')),
  'role', current_user,
  'read_only', pg_catalog.current_setting('transaction_read_only')::boolean,
  'table', (SELECT found.look FROM found WHERE found.relname = %(table)s::text),
  'meta', (SELECT found.look FROM found WHERE found.relname = %(meta)s::text),
  'tickets', (SELECT found.look FROM found WHERE found.relname = %(tickets)s::text),
  'history', (SELECT found.look FROM found WHERE found.relname = %(history)s::text)
)::text AS look
"""

# The mark. Only once the look has found the table and the right to read it.
_MARK = """
SELECT m.version, m.protocol, m.token_floor, m.lineage,
       greatest(0, pg_catalog.date_part('epoch', m.quarantined_until - pg_catalog.clock_timestamp()))
FROM {meta} m
"""


@dataclass(frozen=True, slots=True)
class Mark:
    """The one row of the meta table.

    Attributes:
        version: the layout of the tables.
        protocol: what their rows mean.
        token_floor: new names start above it; its upper half is the epoch.
        lineage: the server that granted last; None when that is not known.
        quarantined: for how many seconds nothing is granted yet.
    """

    version: int
    protocol: int
    token_floor: int
    lineage: str | None
    quarantined: float

    @property
    def epoch(self) -> int:
        """How often tokens had to start above all that may have been granted elsewhere, at least."""
        return self.token_floor >> 32


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that is missing or odd.

    Attributes:
        text: what it is.
        remedy: SQL that mends it, or an instruction.
        blocks: whether leases cannot be kept like this.
        automatic: whether `apply` runs the remedy.
        about_index: whether an index is what is odd.
    """

    text: str
    remedy: str
    blocks: bool = False
    automatic: bool = False
    about_index: bool = False


@dataclass(frozen=True, slots=True)
class Look:
    """What there is. `table`, `meta`, `tickets` and `history` are the catalogs' facts about each, or None."""

    names: TableNames
    schema_exists: bool
    may_use: bool
    may_create: bool
    role: str
    read_only: bool
    table: Mapping[str, Any] | None
    meta: Mapping[str, Any] | None
    tickets: Mapping[str, Any] | None
    history: Mapping[str, Any] | None
    mark: Mark | None

    @property
    def shown(self) -> str:
        """The table's name for a sentence."""
        return f"{self.names.schema}.{self.names.table}"

    @property
    def is_foreign(self) -> bool:
        """Whether a relation of that name is there that neither we nor 0.0.x made."""
        return self.table is not None and bool(self.foreign())

    @property
    def is_published(self) -> bool:
        """Whether this is the table of 0.0.x."""
        return self.table is not None and not self.is_foreign and "fencing_token" not in self.table["columns"]

    def foreign(self) -> str:
        """Say what makes the relation not ours; empty when nothing does."""
        assert self.table is not None
        if self.table["kind"] != "r":
            return "it is not a plain table"
        columns = self.table["columns"] or {}
        differing = [name for name, kind in PUBLISHED.items() if not _is_of_kind(columns.get(name), kind)]
        if differing:
            return f"it has no {', '.join(differing)} of the right type"
        return "" if self.has_key("task_name") else "task_name is not its key"

    def has_key(self, *columns: str) -> bool:
        """Tell whether a unique index stands on exactly these columns."""
        assert self.table is not None
        return any(index["key"] and set(index["columns"]) == set(columns) for index in self.table["indexes"] or ())

    def may(self, right: str, *, of: Mapping[str, Any] | None) -> bool:
        """Tell whether this role has a right on one of the tables; LOCK is UPDATE of any column."""
        return self.may_use and of is not None and bool(of["rights"][right])


def look(link: Link, names: TableNames) -> Look:
    """Look, in one read-only statement, and in a second one at the mark if it is there to be read."""
    beside = {kind: f"{names.table}_{kind}" for kind in ("meta", "tickets", "history")}
    params = {"schema": names.schema, "table": names.table, **beside}
    seen = json.loads(link.rows(_LOOK, params)[0][0])
    found = TableNames(names.table, seen.pop("schema"))
    about = Look(names=found, mark=None, **seen)
    if not about.may("SELECT", of=about.meta) or not _is_meta(about.meta):
        return about
    rows = link.rows(_MARK.format(meta=found.meta))
    return Look(names=found, mark=Mark(*rows[0]) if rows else None, **seen)


def _is_meta(meta: Mapping[str, Any] | None) -> bool:
    return meta is not None and set(meta["columns"] or ()) >= _META


def _is_of_kind(column: Mapping[str, Any] | None, kind: str) -> bool:
    if column is None:
        return False
    found: str = column["type"]
    return found == kind or (kind == "text" and found.startswith("character varying"))


def findings(seen: Look) -> Iterator[Finding]:
    """Yield all that is missing or odd, the gravest first."""
    if seen.table is None:
        yield Finding(f"the table {seen.shown} is missing", "pglease schema apply", blocks=True)
        return
    if seen.is_foreign:
        yield Finding(
            f"{seen.shown} is not a lease table: {seen.foreign()}", "choose another table_name or schema", blocks=True
        )
        return
    if seen.is_published:
        yield Finding(f"{seen.shown} is a table of pglease 0.0.x", "pglease schema apply", blocks=True)
    else:
        yield from _odd_columns(seen)
        yield from _odd_storage(seen)
    yield from _odd_mark(seen)
    yield from _odd_tickets(seen)
    yield from _odd_history(seen)
    yield from _odd_indexes(seen)


def _odd_columns(seen: Look) -> Iterator[Finding]:
    assert seen.table is not None
    columns = seen.table["columns"]
    alter = f"ALTER TABLE {seen.names.leases}"
    for name, kind in {**PUBLISHED, **ADDED}.items():
        column = columns.get(name)
        if column is None:
            default = "" if name in _NULLABLE else " NOT NULL DEFAULT 0"
            yield Finding(f"the column {name} is missing", f"{alter} ADD COLUMN {name} {kind}{default}", True, True)
        elif column["type"] != kind or (name == "task_name" and column["collation"] != "C"):
            wanted = f'{kind} COLLATE "C"' if name == "task_name" else kind
            found = f"{column['type']}{_of_collation(column)}"
            yield Finding(
                f"{name} is {found}, not {wanted}", f"{alter} ALTER COLUMN {name} TYPE {wanted}", name in ADDED, True
            )
        elif column["not_null"] is (name in _NULLABLE):
            word = "DROP" if name in _NULLABLE else "SET"
            yield Finding(
                f"{name} is {'not null' if column['not_null'] else 'nullable'}",
                f"{alter} ALTER COLUMN {name} {word} NOT NULL",
                name in _NULLABLE,
                True,
            )
    if not seen.has_key("task_name", "fencing_token"):
        constraint = f'ADD CONSTRAINT "{seen.names.table}_token_key" UNIQUE (task_name, fencing_token)'
        yield Finding(
            "the key (task_name, fencing_token) is missing: no guard would hold", f"{alter} {constraint}", True, True
        )
    for name in sorted(set(columns) - PUBLISHED.keys() - ADDED.keys()):
        if not columns[name]["optional"]:
            remedy = f'{alter} ALTER COLUMN "{name}" DROP NOT NULL'
            yield Finding(
                f"the column {name} is not ours and has no default: no lease could be made", remedy, blocks=True
            )


def _of_collation(column: Mapping[str, Any]) -> str:
    return f' COLLATE "{column["collation"]}"' if column["collation"] else ""


def _odd_storage(seen: Look) -> Iterator[Finding]:
    assert seen.table is not None
    options = dict(option.split("=", 1) for option in seen.table["options"] or ())
    if missing := {name: value for name, value in STORAGE.items() if name not in options}:
        text = ", ".join(f"{name} = {value}" for name, value in missing.items())
        yield Finding(f"the table lacks {text}", f"ALTER TABLE {seen.names.leases} SET ({text})", automatic=True)
    if (fill := int(options.get("fillfactor", 50))) > 90:
        remedy = f"ALTER TABLE {seen.names.leases} SET (fillfactor = 50)"
        yield Finding(f"fillfactor is {fill}: heartbeats find no room on their page", remedy)
    if options.get("autovacuum_enabled") in {"off", "false"}:
        remedy = f"ALTER TABLE {seen.names.leases} RESET (autovacuum_enabled)"
        yield Finding("autovacuum is off for the table: the dead rows of renewals pile up", remedy)
    if seen.table["persistence"] == "u":
        remedy = f"ALTER TABLE {seen.names.leases} SET LOGGED"
        yield Finding("the table is unlogged: a crash empties it, and tokens start again", remedy)


def _odd_mark(seen: Look) -> Iterator[Finding]:
    if seen.meta is None:
        if not seen.is_published:
            yield Finding(f"the table {seen.shown}_meta is missing", "pglease schema apply", blocks=True)
        return
    if not _is_meta(seen.meta):
        yield Finding(f"{seen.shown}_meta is not ours", "choose another table_name or schema", blocks=True)
        return
    if seen.mark is None:
        if seen.may("SELECT", of=seen.meta):
            yield Finding(f"{seen.shown}_meta has no version mark", "pglease schema apply", blocks=True)
        return
    if seen.mark.protocol != PROTOCOL:
        text = f"{seen.shown} speaks protocol {seen.mark.protocol}, and this pglease {PROTOCOL}"
        yield Finding(text, "run the same pglease everywhere", blocks=True)
    elif seen.mark.version > VERSION:
        text = f"{seen.shown} has layout {seen.mark.version}, newer than this pglease knows ({VERSION})"
        yield Finding(text, "upgrade pglease here", blocks=True)
    elif seen.mark.version < VERSION:
        text = f"{seen.shown} has layout {seen.mark.version}, older than this pglease needs ({VERSION})"
        yield Finding(text, "pglease schema apply", blocks=True)


def _odd_tickets(seen: Look) -> Iterator[Finding]:
    if seen.tickets is None:
        if not seen.is_published:
            yield Finding(f"the table {seen.shown}_tickets is missing: nobody can queue", "pglease schema apply")
    elif not set(seen.tickets["columns"] or ()) >= _TICKET:
        yield Finding(f"{seen.shown}_tickets is not ours: nobody can queue", "choose another table_name or schema")


def _odd_history(seen: Look) -> Iterator[Finding]:
    if seen.history is None:
        if not seen.is_published:
            yield Finding(f"the table {seen.shown}_history is missing", "pglease schema apply", blocks=True)
    elif not set(seen.history["columns"] or ()) >= _TENURE:
        yield Finding(f"{seen.shown}_history is not ours", "choose another table_name or schema", blocks=True)


def _odd_indexes(seen: Look) -> Iterator[Finding]:
    assert seen.table is not None
    for index in seen.table["indexes"] or ():
        if changing := sorted(CHANGING & set(index["touches"] or ())):
            where = f"the index {index['name']} on {', '.join(changing)}"
            text = f"{where} makes every write to it rewrite all indexes (no HOT updates)"
            drop = f'DROP INDEX CONCURRENTLY "{seen.names.schema}"."{index["name"]}"'
            yield Finding(text, drop, about_index=True)
