"""What other processes do to a lease file: sit on its locks, be stopped, die."""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

LOCKS, LOCKED = 120, 8
"""Where SQLite's eight locks of a write-ahead log are in the -shm file."""

RECOVERY = f"""
import fcntl, os, sys
shm = os.open(sys.argv[1] + "-shm", os.O_RDWR)
fcntl.lockf(shm, fcntl.LOCK_EX, {LOCKED}, {LOCKS})
before = os.pread(shm, 96, 0)
os.pwrite(shm, bytes(96), 0)
print("in", flush=True)
sys.stdin.readline()
os.pwrite(shm, before, 0)
fcntl.lockf(shm, fcntl.LOCK_UN, {LOCKED}, {LOCKS})
"""
WRITE = """
import sqlite3, sys
connection = sqlite3.connect(sys.argv[1], timeout=10, isolation_level=None)
connection.execute("BEGIN IMMEDIATE")
connection.execute("UPDATE pglease_leases SET owner_id = 'nobody'")
print("in", flush=True)
sys.stdin.readline()
connection.execute("ROLLBACK")
connection.close()
"""


class _Stopped:
    """A process that is stopped where it holds a lock."""

    script = ""

    def __init__(self, path: Path) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", self.script, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == "in\n"
        self._process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, self._process.pid, os.WSTOPPED)

    @property
    def pid(self) -> int:
        return self._process.pid

    def end(self) -> None:
        """Let it go on, undo what it did, and end."""
        self._process.send_signal(signal.SIGCONT)
        self._process.communicate("\n", timeout=20)
        assert self._process.returncode == 0

    def kill(self) -> None:
        """Kill it where it is."""
        self._process.kill()
        self._process.communicate(timeout=20)


class StoppedInRecovery(_Stopped):
    """Somebody who was stopped while reading a log after a crash: until they go on nobody can even look."""

    script = RECOVERY


class StoppedWhileWriting(_Stopped):
    """Somebody who was stopped inside a transaction: nobody else can write."""

    script = WRITE


@contextmanager
def plain(path: Path) -> Iterator[sqlite3.Connection]:
    """A connection of nobody's, autocommit, to look behind everybody's back."""
    with closing(sqlite3.connect(path, timeout=10, isolation_level=None)) as connection:
        yield connection
