"""`pglease doctor` on a lease file: what is looked at, what it means, what to do."""

from __future__ import annotations

import shutil
import sqlite3
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path

from pglease import clock
from pglease.backends.base import Budget
from pglease.backends.checks import Check
from pglease.backends.sqlite_file import LeaseFile
from pglease.backends.sqlite_host import holders_of_locks
from pglease.backends.sqlite_pipes import Pipes
from pglease.errors import BackendError

PROBE_NAME = "pglease doctor"
LARGE_LOG = 64 * 1024 * 1024
"""Bytes of a log that some reader has kept from being written back for long."""
LITTLE_SPACE = 16 * 1024 * 1024
"""Bytes that are left on a file system on which writes may soon be refused."""
OFF = 60.0
"""Seconds by which the times that people are shown may be off before that is worth a line."""
SLOW = 0.5


def diagnose(file: LeaseFile, pipes: Pipes, take_and_return: Callable[[], None], timeout: float) -> Iterator[Check]:
    """Yield one check after the other; the first that fails is the last."""
    try:
        version, wall, names = file.read(_look(file), Budget.of(timeout, clock.now))
    except BackendError as error:
        yield Check("reachable", "fail", str(error))
        return
    yield Check("reachable", "ok", f"{file.path}, {names} names, SQLite {version}")
    yield Check("host", "ok", f"for the processes of this host alone, until its next boot ({file.host.boot_id})")
    yield _wall_clock(file, wall)
    yield _log(file.path)
    yield _space(file.path)
    yield _pipes(pipes)
    yield _acquire(file.path, take_and_return)


def _look(file: LeaseFile) -> Callable[[sqlite3.Connection], tuple[str, int | None, int]]:
    def look(link: sqlite3.Connection) -> tuple[str, int | None, int]:
        boot_id, wall = link.execute(f"SELECT boot_id, wall_ns FROM {file.names.meta}").fetchone()  # noqa: S608
        (names,) = link.execute(f"SELECT count(*) FROM {file.names.leases}").fetchone()  # noqa: S608
        return sqlite3.sqlite_version, wall if boot_id == file.host.boot_id else None, names

    return look


def _wall_clock(file: LeaseFile, wall: int | None) -> Check:
    if wall is None:
        return Check("clock", "ok", "nobody has taken a lease since the last boot: all are free")
    off = (file.host.wall_ahead() - wall) / 1e9
    if abs(off) < OFF:
        return Check("clock", "ok", "expiry is judged by the boot clock, which nobody can set")
    moved = timedelta(seconds=round(abs(off)))
    way = "forward" if off > 0 else "back"
    return Check(
        "clock",
        "warn",
        f"the wall clock was set {way} by {moved} since the first lease after the boot, and times are shown as before "
        "that; leases are not concerned",
    )


def _log(path: Path) -> Check:
    log = path.with_name(f"{path.name}-wal")
    size = log.stat().st_size if log.exists() else 0
    if size < LARGE_LOG:
        return Check("log", "ok", f"{size // 1024} kB are still to be written back into the file")
    return Check(
        "log",
        "warn",
        f"{log} has {size // 2**20} MB: somebody has had a look at the file for very long, and keeps it from shrinking",
        "end the program that has a transaction open on it",
    )


def _space(path: Path) -> Check:
    free = shutil.disk_usage(path.parent).free
    if free >= LITTLE_SPACE:
        return Check("space", "ok", f"{free // 2**20} MB are left on its file system")
    text = f"{free // 2**20} MB are left on its file system: once it is full, nothing is granted, renewed or given back"
    return Check("space", "warn", text, "make room, or move the leases to another file system")


def _pipes(pipes: Pipes) -> Check:
    listener = pipes.listen()
    if listener is None:
        return Check(
            "waiters",
            "warn",
            f"no named pipe can be made in {pipes.directory}: waiters look on their own instead of being woken",
            "let this user write to the directory of the lease file",
        )
    listener.close()
    return Check("waiters", "ok", "woken through named pipes")


def _acquire(path: Path, take_and_return: Callable[[], None]) -> Check:
    began = time.monotonic()
    try:
        take_and_return()
    except BackendError as error:
        busy = [f"process {pid} ({name})" for pid, name in holders_of_locks(path.with_name(f"{path.name}-shm"))]
        who = f"; locks on it have {', '.join(busy)}" if busy else ""
        return Check("acquire", "fail", f"{error}{who}", "see what holds the file, and end it")
    took = time.monotonic() - began
    status = "ok" if took < SLOW else "warn"
    remedy = "" if status == "ok" else "a slow disk, or somebody who writes much: give leases a file of their own"
    return Check("acquire", status, f"a lease was taken and given back in {took * 1000:.1f} ms", remedy)  # type: ignore[arg-type]
