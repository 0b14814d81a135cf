"""The page for those who come from 0.0.x, or from elsewhere: short, complete, and what it advises works."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from pglease import PGLease

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "migration.md").read_text("utf-8")
ROWS = re.findall(r"^\| ([\w-]+) \| `(.+)` \| `(.+)` \|$", PAGE, re.MULTILINE)
CALLS = {who: new for who, _, new in ROWS}


def test_it_is_short() -> None:
    assert len(PAGE.splitlines()) <= 150


@pytest.mark.parametrize(
    "exception",
    [
        "Stop all 0.0.x workers before the upgrade",
        "`pglease schema apply --force`",
        "index on `expires_at`",
        "`get_lease` also returns a name's last, ended hold",
        "a handle, not a bool",
        "Leaving the block after the lease was lost raises `LeaseLostError`",
        "`HeartbeatError` is the same class",
        "`singleton_task` means one at a time",
        "*per period*, say `min_hold`",
        "The zombie recipe answers False",
        "`close()` in Flask's `@app.teardown_appcontext`, as 0.0.x showed it, is a mistake",
        "Developer commands follow our layout",
        "Durations may be text",
    ],
)
def test_it_names_what_differs(exception: str) -> None:
    assert exception in " ".join(PAGE.split())


def test_those_who_come_from_elsewhere_find_their_call() -> None:
    assert list(CALLS) == ["redis-py", "django-pglock", "single-beat", "dislock"]


@pytest.mark.parametrize("who", ["redis-py", "django-pglock"])
def test_the_new_call_in_python_takes_the_lease_for_its_block(who: str, dsn: str) -> None:
    with PGLease(dsn) as leases, PGLease(dsn) as other:
        names = {"leases": leases, "other": other}

        exec(f"{CALLS[who]}\n    inside = other.try_acquire('job')\nafterwards = other.try_acquire('job')", names)

        assert (names["inside"], names["afterwards"]) == (False, True)


@pytest.mark.parametrize("who", ["single-beat", "dislock"])
def test_the_new_command_runs_under_the_lease(who: str, dsn: str) -> None:
    options, command = CALLS[who].split(" -- ")
    assert command in {"celery beat", "./job"}
    program, *arguments = shlex.split(options)
    assert program == "pglease"

    ran = subprocess.run(
        [sys.executable, "-m", "pglease", *arguments, "--", "sh", "-c", "echo $PGLEASE_NAME $PGLEASE_FENCING_TOKEN"],
        env={"PATH": "/usr/bin:/bin", "PGLEASE_URL": dsn, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )

    name = arguments[1]
    assert (ran.returncode, ran.stdout) == (0, f"{name} 1\n"), ran.stderr


def test_dislocks_successor_is_content_where_somebody_else_is_at_it(dsn: str) -> None:
    arguments = shlex.split(CALLS["dislock"])
    with PGLease(dsn) as leases:
        assert leases.try_acquire("job", ttl=60)

        ran = subprocess.run(
            [sys.executable, "-m", *arguments],
            env={"PATH": "/usr/bin:/bin", "PGLEASE_URL": dsn, "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )

    assert ran.returncode == 0
