"""A PostgreSQL whose wall clock is stepped, or runs at another rate, while everybody else's stays as it is."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pglease.testing.local_postgres import LocalPostgres


def find_libfaketime() -> Path | None:
    """Return the library, or None where it is not installed."""
    return next(iter(sorted(Path("/usr/lib").glob("*/faketime/libfaketime.so.1"))), None)


class Clockwork:
    """What the server's clock reads: the machine's time, and some seconds more; it may run at a rate of its own."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.ahead = 0.0
        self.set(0.0)

    @property
    def environment(self) -> dict[str, str]:
        """What a server needs in its environment to be deceived."""
        return {
            "LD_PRELOAD": str(find_libfaketime()),
            "FAKETIME_TIMESTAMP_FILE": str(self._path),
            "FAKETIME_NO_CACHE": "1",
            "FAKETIME_DONT_FAKE_MONOTONIC": "1",
        }

    def set(self, ahead: float, rate: float = 1.0) -> None:
        """Have it read `ahead` seconds more from now on, and run at `rate`."""
        self.ahead = ahead
        sign = "+" if ahead >= 0 else "-"
        written = self._path.with_suffix(".new")
        written.write_text(f"{sign}{abs(ahead):.3f}" + (f" x{rate:g}" if rate != 1 else ""))
        written.chmod(0o644)
        written.replace(self._path)

    def step(self, seconds: float) -> None:
        """Step it forward, or back."""
        self.set(self.ahead + seconds)


@contextmanager
def stepped_postgres(**options: Any) -> Iterator[tuple[LocalPostgres, Clockwork]]:
    """Start a server and hand out its clock."""
    folder = Path(tempfile.mkdtemp(prefix="pglease-faketime-"))
    folder.chmod(0o755)
    clockwork = Clockwork(folder / "time")
    try:
        with LocalPostgres(environment=clockwork.environment, **options) as server:
            yield server, clockwork
    finally:
        shutil.rmtree(folder, ignore_errors=True)
