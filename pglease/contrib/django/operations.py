"""The lease table in a migration."""

from __future__ import annotations

from typing import Any

from django.db import migrations

from pglease.backends.render import render_migrations
from pglease.contrib.django.conf import conf


class LeaseTable(migrations.RunSQL):
    """Makes, upgrades or drops the lease table by the package's own SQL; on PostgreSQL, and nowhere else.

    Running it where the table exists already is harmless; a table of pglease 0.0.x is upgraded in place.

    Args:
        state_operations: as for Django's `RunSQL`.
    """

    def __init__(self, state_operations: list[Any] | None = None) -> None:
        files = render_migrations(conf().names)
        super().__init__(
            files["sql/0001_pglease.sql"],
            files["sql/0001_pglease.down.sql"],
            state_operations=state_operations,
            hints={"model_name": "lease"},
        )

    def deconstruct(self) -> tuple[str, list[Any], dict[str, Any]]:
        """Return how it is written into a squashed migration: the SQL is read from the package again."""
        return type(self).__qualname__, [], {"state_operations": self.state_operations}

    def describe(self) -> str:
        """Say it for `migrate --plan`."""
        return "Make the lease table of pglease"

    def _run_sql(self, schema_editor: Any, sqls: Any) -> None:
        if schema_editor.connection.vendor == "postgresql":
            super()._run_sql(schema_editor, sqls)
