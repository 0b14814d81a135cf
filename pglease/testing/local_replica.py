"""A private asynchronous replica of a private PostgreSQL, to be promoted with or without the primary's last commits."""

from __future__ import annotations

from typing import ClassVar, Self

from pglease.testing import processes
from pglease.testing.local_postgres import SUPERUSER, LocalPostgres
from pglease.testing.processes import LocalServerError

CATCH_UP_TIMEOUT = 60.0
"""Seconds until a replica that is connected has what the primary has. Milliseconds on a quiet machine."""


class LocalReplica(LocalPostgres):
    """A hot standby that streams from `primary`, until it is cut off or promoted.

    `with LocalReplica(primary) as replica:` starts and stops it. Its roles and databases are the primary's, so `dsn`
    and `admin_dsn` read as the primary's do, with another port.
    """

    _READY: ClassVar[tuple[str, ...]] = ("ready", "standby")

    def __init__(self, primary: LocalPostgres) -> None:
        """Describe a replica of a server that runs; nothing is copied yet."""
        super().__init__(bindir=primary.bindir, user=primary.user, password=primary.password, dbname=primary.dbname)
        self.primary = primary

    def start(self) -> Self:
        """Copy the primary and follow it; return when it answers."""
        return super().start()

    def catch_up(self) -> None:
        """Wait until everything that the primary has committed by now is here."""
        ((position,),) = self.primary.execute("SELECT pg_current_wal_lsn()::text")
        behind = f"SELECT coalesce(pg_last_wal_replay_lsn() < '{position}', true)"
        if not processes.wait_until(lambda: not self.execute(behind)[0][0], timeout=CATCH_UP_TIMEOUT):
            raise LocalServerError("the replica did not catch up with its primary")

    def cut_off(self) -> None:
        """Stop following: what the primary commits from now on is not known here."""
        self.execute("ALTER SYSTEM SET primary_conninfo = ''")
        self.execute("SELECT pg_reload_conf()")
        if not processes.wait_until(
            lambda: not self.execute("SELECT 1 FROM pg_stat_wal_receiver"), timeout=CATCH_UP_TIMEOUT
        ):
            raise LocalServerError("the replica did not let go of its primary")

    def promote(self) -> None:
        """Make it a primary of its own, on a new timeline; return when it takes writes."""
        self.execute("SELECT pg_promote(true, 60)")
        if self.execute("SELECT pg_is_in_recovery()") != [(False,)]:
            raise LocalServerError("the replica was not promoted in time")

    def _initdb(self) -> None:
        program = str(self.bindir / "pg_basebackup")
        source = ["-h", str(self.primary.socket_dir), "-p", str(self.primary.port), "-U", SUPERUSER]
        made = processes.run(
            [program, *source, "-D", str(self.data), "-c", "fast", "--no-sync"],
            self._as,
            cwd=self.base,
            env=processes.clean_environment(),
        )
        if made.returncode != 0:
            raise LocalServerError(f"pg_basebackup failed with exit code {made.returncode}: {made.stderr.strip()}")

    def _write_configuration(self) -> None:
        # Not by `pg_basebackup -R`, which writes options that an older libpq beside the server would not know.
        source = f"host={self.primary.socket_dir} port={self.primary.port} user={SUPERUSER}"
        with (self.data / "postgresql.conf").open("a") as configuration:
            configuration.write(f"\nunix_socket_directories = '{self.base}'\nprimary_conninfo = '{source}'\n")
        (self.data / "standby.signal").touch()

    def _create_role_and_database(self) -> None:
        """Nothing to do: they are the primary's."""
