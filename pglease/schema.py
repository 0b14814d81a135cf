"""The names of what we keep in PostgreSQL, checked and quoted. Pure text.

Table and schema names are the only text that is ever put *into* a statement, so they are held to plain identifiers and
quoted all the same.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from pglease.errors import ConfigurationError

PROTOCOL = 1
"""What clients of this version agree on about the meaning of a row. A table with another number is refused."""

VERSION = 1
"""The layout of the tables. Older ones are upgraded by `pglease schema apply`."""

DEFAULT_TABLE = "pglease_leases"
_IDENTIFIER = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\Z")
MAX_TABLE = 63 - len("_token_key")
"""PostgreSQL cuts identifiers at 63 bytes; the longest name derived from the table's must still fit."""
MAX_CHANNEL = 63
"""PostgreSQL refuses the name of a channel above this."""


@dataclass(frozen=True, slots=True)
class TableNames:
    """Where the leases are, and beside them three more tables of ours.

    `<table>_meta` has the mark and the token floor, `<table>_tickets` the queues, `<table>_history` past holds.
    """

    table: str
    schema: str | None = None

    @property
    def leases(self) -> str:
        """The quoted name of the lease table."""
        return self._quoted(self.table)

    @property
    def meta(self) -> str:
        """The quoted name of the table that holds version, protocol and token floor."""
        return self._quoted(f"{self.table}_meta")

    @property
    def tickets(self) -> str:
        """The quoted name of the table that holds the tickets of those who queue."""
        return self._quoted(f"{self.table}_tickets")

    @property
    def history(self) -> str:
        """The quoted name of the table that holds what is remembered of holds that have ended."""
        return self._quoted(f"{self.table}_history")

    @property
    def channel(self) -> str:
        """The NOTIFY channel of these tables: their name, or a digest of it where that would be too long."""
        name = f"{self.schema}.{self.table}"
        return name if len(name) <= MAX_CHANNEL else f"pglease {_digest(name)}"

    def _quoted(self, name: str) -> str:
        return f'"{name}"' if self.schema is None else f'"{self.schema}"."{name}"'

    def within(self, schema: str) -> TableNames:
        """Return the same names in a schema found at run time."""
        return TableNames(self.table, schema)


def table_names(table_name: str = DEFAULT_TABLE, schema: str | None = None) -> TableNames:
    """Check a table and a schema name: plain identifiers of letters, digits and `_`.

    Raises:
        ConfigurationError: for anything else; a dot in `table_name` gets the advice to use `schema=`.
    """
    problems = [
        *_broken(table_name, "table_name", MAX_TABLE),
        *(() if schema is None else _broken(schema, "schema", 63)),
    ]
    if problems:
        raise ConfigurationError(*problems)
    return TableNames(table_name, schema)


def _broken(name: str, argument: str, most: int) -> list[str]:
    if not isinstance(name, str):
        return [f"{argument} must be text, not {name!r}"]
    if argument == "table_name" and "." in name:
        return [f"table_name must be one identifier, not {name!r}: give the schema as schema="]
    if not _IDENTIFIER.match(name) or len(name) > most:
        return [
            f"{argument} must be 1 to {most} ASCII letters, digits or _, and not begin with a digit, not {name[:80]!r}"
        ]
    return []


def _digest(text: str) -> str:
    from hashlib import sha256  # it brings OpenSSL along, which nearly nobody needs for this

    return sha256(text.encode()).hexdigest()[:32]
