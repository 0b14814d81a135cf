"""The lease table. It may exist already: `once` has made it on a new database."""

from alembic import op

import pglease.contrib.alembic  # noqa: F401  # gives `op` two more verbs

revision = "leases"
down_revision = None


def upgrade() -> None:
    op.create_pglease(version=1)


def downgrade() -> None:
    op.drop_pglease()
