"""Migrations that every replica starts and one applies; the others wait until it is done, then start.

    DATABASE_URL=postgresql://me@db/app python migration_guard.py

The wait has an end that you choose, a failed migration leaves no lease behind, and what is applied is decided *under*
the lease: whoever waited finds nothing left to do.
"""

import os
import sys

import psycopg

from pglease import AcquisitionError, PGLease

MIGRATIONS = {
    1: "CREATE TABLE guarded_accounts (id bigint PRIMARY KEY, email text NOT NULL)",
    2: "CREATE UNIQUE INDEX guarded_accounts_email ON guarded_accounts (email)",
}


def migrate(db: psycopg.Connection) -> list[int]:
    """Apply what is missing, each step in a transaction of its own; return what was applied."""
    db.execute("CREATE TABLE IF NOT EXISTS guarded_migrations (version int PRIMARY KEY)")
    done = {version for (version,) in db.execute("SELECT version FROM guarded_migrations")}
    missing = sorted(MIGRATIONS.keys() - done)
    for version in missing:
        with db.transaction():
            db.execute(MIGRATIONS[version])
            db.execute("INSERT INTO guarded_migrations VALUES (%s)", [version])
    return missing


def main(patience: float = 300) -> int:
    """Migrate under the lease, waiting at most `patience` seconds for another replica to do it."""
    url = os.environ["DATABASE_URL"]
    with PGLease(url) as leases:
        try:
            with (
                leases.acquire("migrations", ttl=60, wait=patience, raise_on_failure=True),
                psycopg.connect(url, autocommit=True) as db,
            ):
                applied = migrate(db)
        except AcquisitionError as busy:
            print(f"{busy.held_by} has been migrating for longer than {patience:g} s", file=sys.stderr)
            return 1
    print(f"applied {applied}" if applied else "nothing to apply")
    return 0


if __name__ == "__main__":
    sys.exit(main(*map(float, sys.argv[1:2])))
