"""Alembic's environment: the usual one, with three things of pglease's."""

import os
from logging.config import fileConfig

from alembic import context
from sqlalchemy import MetaData, create_engine
from sqlalchemy.pool import NullPool

from pglease.contrib import alembic as pglease

fileConfig(context.config.config_file_name, disable_existing_loggers=False)
engine = create_engine(os.environ["DATABASE_URL"], poolclass=NullPool)
target_metadata = MetaData()

if context.is_offline_mode():
    context.configure(url=engine.url, literal_binds=True)
    with context.begin_transaction():
        context.run_migrations()
else:
    with engine.connect() as connection:
        context.configure(
            connection=connection,
            target_metadata=target_metadata,
            include_name=pglease.include_name,  # or autogenerate would drop the lease table
        )
        # Around the transaction: whoever comes next must find what this one has committed.
        with pglease.once(engine, ttl="1m", wait="10m"), context.begin_transaction():
            context.run_migrations()
