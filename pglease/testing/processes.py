"""How the private servers of a test run are started, watched and ended: without root, and never outliving us."""

from __future__ import annotations

import os
import queue
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from pglease.errors import PgleaseError
from pglease.testing import trampoline

LOOK_EVERY = 0.005
"""Seconds between two looks at a condition nobody tells us about."""
LAST_LINES = 20
"""How much of a server's log an error quotes."""


class LocalServerError(PgleaseError):
    """A private server did not start or did not end as asked; the text quotes its log. Afterwards: it does not run."""


class PortTaken(LocalServerError):
    """Somebody else took the port between our look and the server's. Afterwards: another port may do."""


@dataclass(frozen=True)
class User:
    """Whom a server runs as."""

    uid: int
    gid: int

    def run(self, argv: Sequence[str], **options: Any) -> subprocess.CompletedProcess[str]:
        """Run a short command as this user and capture what it says."""
        return subprocess.run(
            argv, user=self.uid, group=self.gid, extra_groups=[], capture_output=True, text=True, check=False, **options
        )


def unprivileged_user() -> User | None:
    """Return `nobody` where we are root, since servers refuse to run as root, else None: stay who we are."""
    if os.geteuid() != 0:
        return None
    import pwd

    nobody = pwd.getpwnam("nobody")
    return User(nobody.pw_uid, nobody.pw_gid)


def run(argv: Sequence[str], user: User | None, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run a short command as `user` and capture what it says."""
    if user is not None:
        return user.run(argv, **options)
    return subprocess.run(argv, capture_output=True, text=True, check=False, **options)


def make_scratch(prefix: str, user: User | None) -> Path:
    """Make a temporary directory that `user` owns and can reach.

    Root's own temporary directory may lie under a home that nobody else enters: then /tmp it is.
    """
    scratch = Path(tempfile.mkdtemp(prefix=prefix))
    if user is None:
        return scratch
    os.chown(scratch, user.uid, user.gid)
    if user.run(["/bin/sh", "-c", 'cd "$0"', str(scratch)], cwd="/").returncode == 0:
        return scratch
    scratch.rmdir()
    scratch = Path(tempfile.mkdtemp(prefix=prefix, dir="/tmp"))
    os.chown(scratch, user.uid, user.gid)
    return scratch


def clean_environment() -> dict[str, str]:
    """Return our environment without what would steer a PostgreSQL program elsewhere, speaking English."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PG", "LC_", "LANG"))}
    return kept | {"LC_ALL": "C"}


def free_port() -> int:
    """Return a TCP port of 127.0.0.1 that is free at this moment; whoever uses it must be ready to find it taken."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def wait_until(condition: Callable[[], bool], *, timeout: float) -> bool:
    """Wait until `condition()` is true, at most `timeout` seconds; return whether it is."""
    deadline = time.monotonic() + timeout
    while not condition():
        if time.monotonic() >= deadline:
            return False
        time.sleep(LOOK_EVERY)
    return True


def children_of(pid: int) -> list[int]:
    """Return the process ids of a process's children."""
    if sys.platform == "linux":
        return [child for child, parent in _parents_from_proc() if parent == pid]
    listing = subprocess.run(["ps", "-A", "-o", "pid=,ppid="], capture_output=True, text=True, check=True)  # noqa: S607
    pairs = (line.split() for line in listing.stdout.splitlines())
    return [int(child) for child, parent in pairs if int(parent) == pid]


def _parents_from_proc() -> Iterator[tuple[int, int]]:
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            # pid (name, which may hold anything) state ppid ...
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue  # it ended while we looked
        yield int(stat.parent.name), int(fields[1])


class _Spawner:
    """Starts processes from a thread that lives as long as this process.

    The kernel's parent-death signal belongs to the parent's *thread*: a server started from a thread that ends dies
    with it.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._orders: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._pid = 0

    def call(self, make: Callable[[], subprocess.Popen[bytes]]) -> subprocess.Popen[bytes]:
        if threading.current_thread() is threading.main_thread():
            return make()
        self._ensure_thread()
        made: queue.SimpleQueue[subprocess.Popen[bytes] | OSError] = queue.SimpleQueue()
        self._orders.put(partial(_answer, made, make))
        result = made.get()
        if isinstance(result, OSError):
            raise result
        return result

    def _ensure_thread(self) -> None:
        with self._lock:
            if self._pid != os.getpid():  # the first time, and in the child of a fork, where no thread is left
                self._pid = os.getpid()
                self._orders = queue.SimpleQueue()
                threading.Thread(target=_obey, args=(self._orders,), name="pglease-spawner", daemon=True).start()


def _answer(
    made: queue.SimpleQueue[subprocess.Popen[bytes] | OSError], make: Callable[[], subprocess.Popen[bytes]]
) -> None:
    try:
        made.put(make())
    except OSError as error:
        made.put(error)


def _obey(orders: queue.SimpleQueue[Callable[[], None]]) -> None:
    while True:
        orders.get()()


_spawner = _Spawner()


def spawn(
    argv: Sequence[str], *, user: User | None, log: Path, cwd: Path, env: Mapping[str, str], death_signal: int
) -> subprocess.Popen[bytes]:
    """Start a server as `user`, in a session of its own, its output appended to `log`, told when we die."""
    uid, gid = (user.uid, user.gid) if user is not None else (-1, -1)
    head = [sys.executable, "-I", "-S", trampoline.__file__]
    orders = [str(uid), str(gid), str(int(death_signal)), str(os.getpid())]
    with log.open("ab") as output:
        # A session of its own: Ctrl-C at the terminal is for us, who then end the server in good order.
        return _spawner.call(
            lambda: subprocess.Popen(
                [*head, *orders, *argv],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                cwd=cwd,
                env=dict(env),
                start_new_session=True,
            )
        )


def last_lines(log: Path) -> str:
    """Return the end of a log, for an error message."""
    text = log.read_text(errors="replace") if log.exists() else ""
    return "\n".join(text.splitlines()[-LAST_LINES:])


def end(process: subprocess.Popen[bytes], steps: Sequence[tuple[int, float]]) -> None:
    """End a process: send each signal and give it its seconds, then SIGKILL. It is gone afterwards."""
    for signum, patience in [*steps, (signal.SIGKILL, 10.0)]:
        if process.poll() is not None:
            return
        process.send_signal(signum)
        process.send_signal(signal.SIGCONT)  # a stopped process hears nothing but this and SIGKILL
        try:
            process.wait(patience)
        except subprocess.TimeoutExpired:
            continue


def remove_tree(path: Path) -> None:
    """Remove a directory, also while a dying process still writes into it."""
    for _ in range(5):
        shutil.rmtree(path, ignore_errors=True)
        if not path.exists():
            return
