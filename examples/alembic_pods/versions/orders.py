"""A table of the application's."""

import sqlalchemy as sa
from alembic import op

revision = "orders"
down_revision = "leases"


def upgrade() -> None:
    op.create_table("orders", sa.Column("id", sa.BigInteger, primary_key=True), sa.Column("total", sa.Numeric))


def downgrade() -> None:
    op.drop_table("orders")
