"""The page that leads from 0.0.x to here does what it says: its code is run, block by block."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from pglease import PGLease

PAGE = Path(__file__).resolve().parents[2] / "docs" / "migration.md"
BLOCKS = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize("place", range(len(BLOCKS)))
def test_a_block_of_the_migration_page_runs(dsn: str, place: int, monkeypatch: pytest.MonkeyPatch) -> None:
    import atexit

    registered = []
    monkeypatch.setattr(atexit, "register", registered.append)
    with PGLease(dsn) as leases, PGLease(dsn) as other, PGLease(dsn) as dead:
        assert dead.try_acquire("my-task", ttl=600)
        world = {"leases": leases, "other": other}

        exec(compile(BLOCKS[place], str(PAGE), "exec"), world)  # our own page

        for each in registered:
            each()


def test_the_page_has_code_and_names_each_documented_exception() -> None:
    text = PAGE.read_text(encoding="utf-8")

    assert len(BLOCKS) >= 6
    for exception in (
        "zombie recipe answers False",
        "teardown_appcontext",
        "one at a time",
        "min_hold",
        "Developer commands follow our layout",
        "index on `expires_at`",
        "a handle, not a bool",
    ):
        assert exception in text
