"""What people copy into their own migrations: `python -m pglease.backends.render [directory]` writes it.

The SQL is one text, made in `postgres_schema`; the files under the top-level `migrations/` are it, in three wrappings.
"""

from __future__ import annotations

import sys
from pathlib import Path

from pglease.backends.postgres_schema import ddl, grants, undo
from pglease.schema import TableNames, table_names

_GONE = "-- Leases and their fencing tokens are gone after this: tokens start again at 1.\n"

_DJANGO = '''\
"""The lease table of pglease. Copy this file into the migrations of one of your apps and adjust `dependencies`.

No model stands behind it, so `makemigrations` leaves the table alone. Running it where the table exists already is
harmless; a table of pglease 0.0.x is upgraded in place.
"""

from django.db import migrations

FORWARD = r"""
{forward}"""

BACKWARD = """
{backward}"""


class Migration(migrations.Migration):
    dependencies = []

    operations = [migrations.RunSQL(sql=FORWARD, reverse_sql=BACKWARD)]
'''

_ALEMBIC = '''\
"""The lease table of pglease.

Copy this file into your versions directory and set `down_revision`. Running it where the table exists already is
harmless; a table of pglease 0.0.x is upgraded in place. Autogenerate writes `drop_table` for tables it has no model of:
leave ours out with `include_name` in env.py.
"""

from alembic import op

revision = "pglease_0001"
down_revision = None
branch_labels = None
depends_on = None

FORWARD = r"""
{forward}"""

BACKWARD = """
{backward}"""


def upgrade() -> None:
    op.execute(FORWARD)


def downgrade() -> None:
    op.execute(BACKWARD)
'''


def render_migrations(names: TableNames | None = None) -> dict[str, str]:
    """Return the text of every file under `migrations/`, by its path there."""
    names = table_names() if names is None else names
    forward, backward = ddl(names), _GONE + "".join(f"{statement};\n" for statement in undo(names))
    return {
        "sql/0001_pglease.sql": forward,
        "sql/0001_pglease.down.sql": backward,
        "sql/grants.sql": grants(names),
        "django/0001_pglease.py": _DJANGO.format(forward=forward, backward=backward),
        "alembic/0001_pglease.py": _ALEMBIC.format(forward=forward, backward=backward),
    }


def write(directory: Path) -> None:
    """Write them all below a directory."""
    for path, text in render_migrations().items():
        target = directory / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    write(Path(sys.argv[1] if len(sys.argv) > 1 else "migrations"))
