"""How a release reaches those who wait in other processes: a named pipe for each listener, beside the lease file.

Whoever listens makes a pipe in the directory `<file>-waiters` and sleeps in `poll` on it. Whoever changes a marked name
writes one line into every pipe there, after its commit: a fraction of a millisecond, no look at the file by anybody who
sleeps, no port, no limit on the length of a path, on Linux and macOS alike, and between containers that share the
directory. A listener that died is found by its pipe having no reader, and its pipe is removed.

A line is written whole or not at all as long as it fits `PIPE_BUF`. A pipe that is full, since nobody reads it, is
removed: its reader sees that it has been cut off, and looks for itself.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import secrets
import select
import stat
import threading
from collections.abc import Iterable, Sequence
from pathlib import Path

from pglease.errors import BackendClosed, BackendUnavailable
from pglease.records import Change

log = logging.getLogger("pglease")

_MOST = 65536
"""Bytes that are read at once; a pipe holds no more on Linux, and less on macOS."""
_NOBODY_READS = (errno.ENXIO, errno.EPIPE, errno.EAGAIN)


class Pipes:
    """The pipes beside one lease file."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self.directory = file.with_name(f"{file.name}-waiters")

    def listen(self) -> Listener | None:
        """Make a pipe and listen on it; None where there can be none."""
        try:
            self.directory.mkdir(exist_ok=True)
            path = self.directory / secrets.token_hex(8)
            begun = path.with_name(f".{path.name}")  # not found before somebody reads: it would pass for a dead one's
            os.mkfifo(begun)
            begun.chmod(self._file.stat().st_mode & 0o666)  # whoever may change the file may say so
            listener = Listener(begun, path)
            begun.rename(path)
            return listener
        except (OSError, AttributeError) as error:  # a directory that is read-only; a system without named pipes
            log.debug("nothing can be heard of %s: %s", self._file, error)
            return None

    def announce(self, changes: Iterable[Change]) -> None:
        """Tell every listener. Never waits, and raises nothing: what is told is a hint."""
        told = b"".join(_line(change) for change in changes)
        if told:
            for pipe in self._found():
                _tell(pipe, told)

    def sweep(self) -> None:
        """Remove the pipes of those who died."""
        for pipe in self._found():
            _tell(pipe, b"")

    def _found(self) -> list[Path]:
        try:
            return [pipe for pipe in self.directory.iterdir() if not pipe.name.startswith(".")]
        except OSError:
            return []


def _line(change: Change) -> bytes:
    return json.dumps([change.name, change.what, change.left], ensure_ascii=False).encode() + b"\n"


def _tell(pipe: Path, line: bytes) -> None:
    try:
        writer = os.open(pipe, os.O_WRONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            if line and stat.S_ISFIFO(os.fstat(writer).st_mode):
                os.write(writer, line)
        finally:
            os.close(writer)
    except OSError as error:
        if error.errno in _NOBODY_READS:
            pipe.unlink(missing_ok=True)


class Listener:
    """A `Subscription`: one pipe and what comes through it.

    Args:
        begun: the pipe's first name.
        path: the name it will have.
    """

    def __init__(self, begun: Path, path: Path) -> None:
        self.path = path
        self._fresh_locks()
        self._closed = False
        self._rest = b""
        self._reader: int | None = os.open(begun, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        # A writer of our own: without any, a pipe that others have written to is at its end and never sleeps again.
        self._writer: int | None = os.open(begun, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)

    @property
    def closed(self) -> bool:
        """Whether it was closed."""
        return self._closed

    def _fresh_locks(self) -> None:
        self._reading = threading.Lock()
        # A number that was closed may be anything's in the next moment, the lease file's too: nobody writes to it then.
        # Reentrant, since a signal handler may close.
        self._writing = threading.RLock()

    def next(self, seconds: float) -> Sequence[Change]:
        """See `Subscription.next`."""
        with self._reading:
            heard = b"" if self._closed else self._heard(seconds)
        if self._closed:
            self._shut()
            raise BackendClosed("this subscription was closed")
        *lines, self._rest = (self._rest + heard).split(b"\n")
        if heard and not self.path.exists():
            raise BackendUnavailable("too much was said at once, and some of it was lost: look again")
        return [_read(line) for line in lines if line]

    def _heard(self, seconds: float) -> bytes:
        assert self._reader is not None
        waiting = select.poll()
        waiting.register(self._reader, select.POLLIN)
        return os.read(self._reader, _MOST) if waiting.poll(max(0.0, seconds) * 1000) else b""

    def close(self) -> None:
        """See `Subscription.close`."""
        self._closed = True
        self.path.unlink(missing_ok=True)
        with self._writing:
            if self._writer is not None:
                with contextlib.suppress(OSError):  # full, so that nobody sleeps
                    os.write(self._writer, b"\n")
        self._shut()

    def _shut(self) -> None:
        """Close both ends, unless somebody reads; then it is theirs to do."""
        if self._reading.acquire(timeout=0):
            try:
                with self._writing:
                    reader, writer, self._reader, self._writer = self._reader, self._writer, None, None
                    for end in (reader, writer):
                        if end is not None:
                            os.close(end)
            finally:
                self._reading.release()

    def forget(self) -> None:
        """Close, in a forked child, the child's ends of it; the pipe is the parent's."""
        self._closed = True
        self._fresh_locks()
        self._shut()


def _read(line: bytes) -> Change:
    try:
        name, what, left = json.loads(line)
        return Change(name, what, left)
    except (ValueError, TypeError):
        raise BackendUnavailable("what was said could not be understood: look again") from None
