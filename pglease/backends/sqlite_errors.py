"""What SQLite's errors mean for a lease."""

from __future__ import annotations

import os
import sqlite3
from pathlib import Path

from pglease.errors import BackendError, BackendMisconfigured, BackendUnavailable

BUSY, LOCKED, READ_ONLY, INPUT_OUTPUT, CORRUPT, FULL, CANNOT_OPEN, PROTOCOL, CONSTRAINT, NOT_A_DATABASE = (
    *(5, 6, 8, 10, 11, 13, 14, 15, 19, 26),
)
"""SQLite's primary result codes; an extended code has one of them in its low byte."""
PASSING = frozenset((BUSY, LOCKED, PROTOCOL))
"""Somebody else is at work in the file: worth another try."""
_NOMEM, _INTERRUPTED = 7, 9


class Busy(BackendUnavailable):
    """The file's lock is somebody else's just now. Never leaves the backend as this."""


class TablesChanged(BackendMisconfigured):
    """A table of ours has gone since the connection was opened."""


def primary(error: sqlite3.Error) -> int:
    """Return the primary result code; 0 for trouble that is Python's."""
    return getattr(error, "sqlite_errorcode", 0) & 0xFF


def translated(error: sqlite3.Error, path: Path, *, committing: bool = False) -> BackendError:
    """Return our error for one of SQLite's.

    Args:
        error: SQLite's.
        path: the lease file.
        committing: whether it came while a transaction was being committed: what is on the disk is then unknown.
    """
    code, said = primary(error), f"{path}: {error}"
    if code in PASSING:
        return Busy(f"{path} is locked by another process")
    if code == FULL:
        return BackendUnavailable(f"{said}; nothing was written")
    if code in (INPUT_OUTPUT, _NOMEM, _INTERRUPTED):
        return BackendUnavailable(said, outcome_unknown=committing)
    if code == CANNOT_OPEN:
        return _cannot_open(path, said)
    if code == READ_ONLY:
        return BackendMisconfigured(
            f"{path} cannot be written: this user needs write access to the file and to its directory, where SQLite "
            "keeps two more files beside it"
        )
    if code == NOT_A_DATABASE:
        return BackendMisconfigured(f"{path} is no SQLite file, and was left as it is: choose another path")
    if code == CORRUPT:
        return BackendMisconfigured(f"{said}; move it away together with its -wal and -shm files, and start afresh")
    if "no such table" in str(error) or "no such column" in str(error):
        return TablesChanged(said)
    return BackendMisconfigured(said)


def _cannot_open(path: Path, said: str) -> BackendError:
    if not path.parent.is_dir():
        return BackendMisconfigured(f"the directory {path.parent} of the lease file does not exist: make it first")
    if not os.access(path.parent, os.W_OK | os.X_OK) or (path.exists() and not os.access(path, os.R_OK)):
        return BackendMisconfigured(
            f"{path} cannot be opened: this user needs access to the file, and write access to its directory"
        )
    return BackendUnavailable(said)
