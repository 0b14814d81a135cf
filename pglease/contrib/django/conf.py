"""The setting `PGLEASE`, and the store that it describes.

    PGLEASE = {
        "DATABASE": "default",     # an alias of DATABASES
        "BACKEND": "postgresql",   # or "hybrid", or the address of another store, or a function by its dotted path
        "TTL": "60s",              # of a lease for which the code names none
        "OWNER_ID": None,          # a label for people
        "OPTIONS": {},             # knobs of the store: table_name, schema, auto_initialize, pool_size, notify, …
    }

Each may be left out; these are the defaults.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from functools import partial
from typing import Any

from django.conf import settings
from django.core.exceptions import ImproperlyConfigured
from django.db import DEFAULT_DB_ALIAS, connections
from django.utils.module_loading import import_string

from pglease.backends import open_backend
from pglease.backends.base import Backend
from pglease.options import Duration, seconds
from pglease.schema import DEFAULT_TABLE, TableNames, table_names

_IN_THE_DATABASE = {
    "postgresql": "pglease.backends.postgres.PostgresBackend",
    "hybrid": "pglease.backends.hybrid.HybridPostgresBackend",
}
_DRIVERS_OWN = frozenset(
    {"async", "autocommit", "connection_factory", "context", "cursor_factory", "prepare_threshold", "row_factory"}
)
"""What psycopg and psycopg2 take besides libpq's parameters: it says how Django wants to be answered, not where."""


@dataclass(frozen=True, slots=True)
class Conf:
    """What the setting says; see the module."""

    database: str = DEFAULT_DB_ALIAS
    backend: str = "postgresql"
    ttl: Duration = 60
    owner_id: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def in_the_database(self) -> bool:
        """Whether the leases are in the table that the migration makes."""
        return self.backend in _IN_THE_DATABASE

    @property
    def names(self) -> TableNames:
        """What the table is called."""
        return table_names(self.options.get("table_name", DEFAULT_TABLE), self.options.get("schema"))

    @property
    def db_table(self) -> str:
        """The same for a model: Django's quotes make `"schema"."table"` of it."""
        return self.names.leases.removeprefix('"').removesuffix('"')

    def open_store(self, *, create: bool = False) -> Backend:
        """Build the store. It connects to nothing yet.

        Args:
            create: make a missing table whatever `OPTIONS` say: for the command that migrates, and so comes first.
        """
        if "://" in self.backend:
            return open_backend(self.backend, **self.options)
        make = import_string(_IN_THE_DATABASE.get(self.backend, self.backend))
        store: Backend
        if self.in_the_database:
            knobs = {**self.options, **({"auto_initialize": True} if create else {})}
            store = make(partial(connection_parameters, self.database), **knobs)
        else:
            store = make(**self.options)
        return store


def conf() -> Conf:
    """Read the setting.

    Raises:
        ImproperlyConfigured: it has a key that is not known.
        ConfigurationError: a value of it makes no sense.
    """
    given = getattr(settings, "PGLEASE", {})
    known = {each.name.upper() for each in fields(Conf)}
    if unknown := sorted(given.keys() - known):
        raise ImproperlyConfigured(
            f"PGLEASE has {', '.join(map(repr, unknown))}, but knows only {', '.join(sorted(known))}"
        )
    found = Conf(**{key.lower(): value for key, value in given.items()})
    seconds(found.ttl, "PGLEASE['TTL']")
    return found


def connection_parameters(alias: str = DEFAULT_DB_ALIAS) -> dict[str, Any]:
    """Return libpq's parameters of a new connection to one of `DATABASES`, as Django would make it now.

    They come from a copy of Django's connection, never from one that is in use. So everything that `OPTIONS` say about
    it (ssl, service, `assume_role`) holds for it, and what a database back end of another package adds, as a password
    that changes. In a test it is the test database. May be called on any thread; `PostgresBackend` takes it as an
    address: `PGLease(PostgresBackend(connection_parameters), on_lease_lost=…)` is a client of your own.

    Args:
        alias: which of `DATABASES`. Default "default".

    Raises:
        ImproperlyConfigured: it is no database of PostgreSQL.
    """
    copy = connections[alias].copy()
    if copy.vendor != "postgresql":
        raise ImproperlyConfigured(f"pglease needs PostgreSQL, and the database {alias!r} is {copy.display_name}")
    found = {name: value for name, value in copy.get_connection_params().items() if name not in _DRIVERS_OWN}
    if role := copy.settings_dict["OPTIONS"].get("assume_role"):
        escaped = re.sub(r"([\s\\])", r"\\\1", role)
        found["options"] = f"{found.get('options') or ''} -c role={escaped}".strip()
    return found
