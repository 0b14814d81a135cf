"""Servers of a test's own begin as copies: `initdb` takes half a second of a core, and the suite starts 130 of them.

The run's server keeps what `initdb` made for it, and a directory of programs that all processes of the suite find by
`PGLEASE_PG_BIN`: the real ones, but for an `initdb` that copies. Each copy has a system identifier of its own.
"""

from __future__ import annotations

import shlex
from pathlib import Path

from pglease.testing import processes
from pglease.testing.local_postgres import LocalPostgres

INITDB = """#!/bin/sh
set -e
[ "$1" = -D ] || exec {real}/initdb "$@"
cp -R {kept} "$2"
# The middle of the identifier, the first number in this file; what it adds up to and the log are then written anew.
dd if=/dev/urandom of="$2/global/pg_control" bs=1 seek=2 count=4 conv=notrunc 2>/dev/null
exec {real}/pg_resetwal -f -D "$2"
"""


class Original(LocalPostgres):
    """A server of which others are copies, for as long as it runs."""

    @property
    def copying(self) -> Path:
        """The directory of programs; what they start has the same roles as a new server: none but the superuser."""
        return self.base / "copying"

    def _initdb(self) -> None:
        super()._initdb()
        kept = self.base / "kept"
        processes.run(["cp", "-R", str(self.data), str(kept)], self._as, cwd=self.base).check_returncode()
        for segment in (kept / "pg_wal").glob("0*"):
            segment.unlink()
        self.copying.mkdir()
        for program in self.bindir.iterdir():
            (self.copying / program.name).symlink_to(program)
        initdb = self.copying / "initdb"
        initdb.unlink()
        initdb.write_text(INITDB.format(real=shlex.quote(str(self.bindir)), kept=shlex.quote(str(kept))))
        initdb.chmod(0o755)
