"""A private PgBouncer before some PostgreSQL: what a pooler does to a library is best seen in a real one."""

from __future__ import annotations

import atexit
import os
import shutil
import signal
import socket
import subprocess
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

from pglease.errors import MissingDependencyError
from pglease.testing import processes
from pglease.testing.local_postgres import HOST, PORT_TRIES
from pglease.testing.processes import LocalServerError, PortTaken

PoolMode = Literal["session", "transaction", "statement"]

START_TIMEOUT = 20.0
"""Seconds until it answers; it takes 0.03 on a quiet machine."""
STOP_TIMEOUT = 5.0
"""Seconds it may take to disconnect everybody."""


def find_pgbouncer(program: str | os.PathLike[str] | None = None) -> Path:
    """Return the program's path: as named, or from the PATH, or from the directories that are not on everybody's PATH.

    Raises:
        MissingDependencyError: it is in none of them.
    """
    places = os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/sbin", "/usr/local/sbin", "/opt/homebrew/bin"])
    found = shutil.which(os.fspath(program) if program else "pgbouncer", path=places)
    if found is None:
        raise MissingDependencyError("no pgbouncer program was found: install it (apt-get install pgbouncer)")
    return Path(found)


class PgBouncer:
    """One private PgBouncer; `with PgBouncer(dsn) as bouncer:` starts and stops it.

    It runs as `nobody` where we are root, listens on 127.0.0.1, logs its client in by SCRAM with the password of `dsn`,
    and goes down when this process dies. Every database of the server is reachable through it, as the user of `dsn`.

    Attributes:
        host: 127.0.0.1.
        port: its port.
    """

    def __init__(
        self,
        dsn: str,
        *,
        pool_mode: PoolMode = "transaction",
        settings: Mapping[str, object] | None = None,
        program: str | os.PathLike[str] | None = None,
    ) -> None:
        """Describe a pooler; nothing runs yet.

        Args:
            dsn: the server, the user and the password, over TCP.
            pool_mode: when a server connection goes back to the pool. Default `transaction`, the mode that surprises.
            settings: lines of the [pgbouncer] section, over our own. `{"default_pool_size": 2}`.
            program: where pgbouncer is; default: looked for.
        """
        from psycopg.conninfo import conninfo_to_dict

        self._server: dict[str, Any] = {"port": 5432, "dbname": "postgres", "password": "", **conninfo_to_dict(dsn)}
        self._settings: dict[str, object] = {
            "pool_mode": pool_mode,
            "auth_type": "scram-sha-256",
            "admin_users": self._server["user"],
            "listen_addr": HOST,
            "unix_socket_dir": "",
            "max_client_conn": 400,
            "default_pool_size": 20,
            # What drivers send at the start and a transaction pooler cannot keep.
            "ignore_startup_parameters": "extra_float_digits,options,statement_timeout",
            **(settings or {}),
        }
        self._asked_program = program
        self._process: subprocess.Popen[bytes] | None = None
        self._owner_pid = 0
        self._base: Path | None = None
        self.host = HOST
        self.port = 0

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self.stop()

    def __repr__(self) -> str:
        return f"<PgBouncer {self.host}:{self.port} before {self._server['host']}:{self._server['port']}>"

    @property
    def dsn(self) -> str:
        """The DSN through the pooler, password included."""
        return self.dsn_for(self._server["dbname"])

    def dsn_for(self, dbname: str) -> str:
        """Return the DSN of another database through the pooler."""
        from urllib.parse import quote

        user, password = quote(self._server["user"], safe=""), quote(self._server["password"], safe="")
        return f"postgresql://{user}:{password}@{self.host}:{self.port}/{quote(dbname, safe='')}"

    @property
    def log_path(self) -> Path:
        """The file that holds its log."""
        return self._directory() / "pgbouncer.log"

    def log_text(self) -> str:
        """Return everything it logged."""
        return self.log_path.read_text(errors="replace")

    def admin(self, command: str) -> list[dict[str, Any]]:
        """Run a command of its admin console (`SHOW POOLS`, `PAUSE`, `RECONNECT`) and return the rows, if any."""
        import psycopg
        from psycopg.rows import dict_row

        with psycopg.connect(self.dsn_for("pgbouncer"), autocommit=True, row_factory=dict_row) as connection:
            # No parameters: the console knows only the simple protocol.
            cursor = connection.execute(command.encode())
            return cursor.fetchall() if cursor.description else []

    def move_to(self, dsn: str) -> None:
        """Send its clients to another server from now on, without disconnecting them; the user stays the same."""
        from psycopg.conninfo import conninfo_to_dict

        there = conninfo_to_dict(dsn)
        self._server.update(host=there["host"], port=there["port"])
        self._write_files(processes.unprivileged_user())
        self.admin("RELOAD")
        self.admin("RECONNECT")

    def signal(self, signum: int) -> None:
        """Send it a signal: SIGKILL, SIGSTOP, SIGCONT, SIGHUP."""
        if self._process is None:
            raise LocalServerError("this PgBouncer does not run")
        self._process.send_signal(signum)

    def start(self) -> Self:
        """Start it and return when it takes connections.

        Raises:
            MissingDependencyError: there is no pgbouncer.
            LocalServerError: it did not start; its log is quoted. Nothing of it is left.
        """
        if self._process is not None and self._process.poll() is None:
            return self
        try:
            self._launch(find_pgbouncer(self._asked_program))
        except BaseException:
            self.stop()
            raise
        return self

    def stop(self) -> None:
        """Stop it, disconnecting everybody, and remove its files; harmless when it does not run."""
        if self._owner_pid != os.getpid():
            return  # the child of a fork: the pooler is its parent's
        atexit.unregister(self.stop)
        process, self._process = self._process, None
        base, self._base = self._base, None
        if process is not None:
            # SIGTERM is the immediate stop of 1.18 and a patient one since 1.23; SIGQUIT is immediate there.
            processes.end(process, [(signal.SIGTERM, STOP_TIMEOUT), (signal.SIGQUIT, STOP_TIMEOUT)])
        if base is not None:
            processes.remove_tree(base)

    def _directory(self) -> Path:
        if self._base is None:
            raise LocalServerError("this PgBouncer was not started, or was stopped: it has no directory")
        return self._base

    def _launch(self, program: Path) -> None:
        user = processes.unprivileged_user()
        self._base = processes.make_scratch("pglease-pgbouncer-", user)
        self._owner_pid = os.getpid()
        atexit.register(self.stop)
        for _ in range(PORT_TRIES):
            self.port = processes.free_port()
            configuration = self._write_files(user)
            self._process = processes.spawn(
                [str(program), str(configuration)],
                user=user,
                log=self.log_path,
                cwd=self._base,
                env=processes.clean_environment(),
                death_signal=signal.SIGTERM,
            )
            if self._came_up():
                return
        raise PortTaken(f"{PORT_TRIES} free ports were taken by others before PgBouncer could have one")

    def _came_up(self) -> bool:
        """Wait until it answers; False when it found its port taken."""
        process = self._process
        assert process is not None
        processes.wait_until(lambda: self._answers() or process.poll() is not None, timeout=START_TIMEOUT)
        if process.poll() is None and self._answers():
            return True
        processes.end(process, [(signal.SIGTERM, STOP_TIMEOUT)])
        if "Address already in use" in self.log_text():
            self.log_path.unlink()
            return False
        raise LocalServerError(f"PgBouncer did not start. The end of its log:\n{processes.last_lines(self.log_path)}")

    def _answers(self) -> bool:
        """Whether it says itself that it listens, and does: somebody else's program on its port is not it."""
        if f"listening on {self.host}:{self.port}" not in self.log_text():
            return False
        with socket.socket() as probe:
            return probe.connect_ex((self.host, self.port)) == 0

    def _write_files(self, user: processes.User | None) -> Path:
        base = self._directory()
        users = base / "users.txt"
        users.write_text(f'"{_doubled(self._server["user"])}" "{_doubled(self._server["password"])}"\n')
        lines = ["[databases]", f"* = host={self._server['host']} port={self._server['port']}", "", "[pgbouncer]"]
        settings = {**self._settings, "listen_port": self.port, "auth_file": users}
        lines += [f"{name} = {value}" for name, value in settings.items()]
        configuration = base / "pgbouncer.ini"
        configuration.write_text("\n".join([*lines, ""]))
        for file in (users, configuration):
            file.chmod(0o600)
            if user is not None:
                os.chown(file, user.uid, user.gid)
        return configuration


def _doubled(value: str) -> str:
    return value.replace('"', '""')
