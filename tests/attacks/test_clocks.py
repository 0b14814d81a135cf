"""The server's clock decides. A client's wall clock, however wrong, is neither read nor sent."""

from __future__ import annotations

import ast
import time
from collections.abc import Callable
from pathlib import Path

import pytest

import pglease
from pglease import PGLease
from tests.attacks.world import Child, sql

WRONG_CLOCK = """
    import datetime, os, sys, time
    import psycopg  # compiled against the real ones

    skew = float(sys.argv[1])
    real_time, real_ns, real_datetime = time.time, time.time_ns, datetime.datetime

    class Wrong(real_datetime):
        @classmethod
        def now(cls, tz=None):
            return real_datetime.now(tz) + datetime.timedelta(seconds=skew)

        @classmethod
        def utcnow(cls):
            return cls.now(datetime.timezone.utc).replace(tzinfo=None)

        @classmethod
        def today(cls):
            return cls.now()

    time.time = lambda: real_time() + skew
    time.time_ns = lambda: real_ns() + int(skew * 1e9)
    datetime.datetime = Wrong

    from pglease import PGLease

    leases = PGLease(os.environ["PGLEASE_URL"], owner_id="wrong-clock")
"""

ASKS = """
    print(leases.try_acquire("job", ttl=60), leases.cleanup_expired())
    lease = leases.get_lease("job")
    print(lease.is_expired(), 50 < lease.time_remaining() <= 60, lease.is_zombie(30))
    leases.close()
"""

HOLDS = """
    print(leases.try_acquire("job", ttl=float(sys.argv[2])))
    sys.stdin.readline()
    print(leases.held("job").held)
    os._exit(0)
"""

wrong_by = pytest.mark.parametrize("skew", [600, -600], ids=["ten minutes fast", "ten minutes slow"])


@wrong_by
def test_a_client_with_a_wrong_clock_takes_nothing_that_lives_deletes_nothing_and_reads_it_right(
    leases: PGLease, child: Callable[..., Child], skew: int
) -> None:
    assert leases.try_acquire("job", ttl=60)

    stranger = child(WRONG_CLOCK + ASKS, skew)

    assert stranger.rest() == ["False 0", "False True False"]
    held = leases.held("job")
    assert held is not None
    assert held.ensure(30)


@wrong_by
def test_a_holder_with_a_wrong_clock_is_respected_as_long_as_its_ttl_and_no_longer(
    dsn: str, leases: PGLease, child: Callable[..., Child], skew: int
) -> None:
    holder = child(WRONG_CLOCK + HOLDS, skew, 1.5)
    assert holder.line() == "True"
    ((left,),) = sql(dsn, "SELECT extract(epoch FROM expires_at - clock_timestamp())::float8 FROM pglease_leases")
    assert 0 < left <= 1.5

    until = time.monotonic() + 3
    while time.monotonic() < until:
        assert not leases.try_acquire("job", ttl=1.5)
        time.sleep(0.01)
    assert holder.say().rest() == ["True"]

    lease = leases.wait_for_lease("job", ttl=30, timeout=10, poll_interval=0.1)
    assert lease.fencing_token == 2


PACKAGE = Path(pglease.__file__).parent
MAY_KNOW_THE_TIME_OF_DAY = {
    "contrib",
    *("cli", "demo", "testing", "postgres_doctor.py", "redis_doctor.py"),
    "sqlite_host.py",  # adds to the moments of the boot clock, by which it decides, what makes them times of day
    "kubernetes_http.py",  # writes them into the objects, for others to read, until an answer's date is known
}
"""They show it to people, or compare the clocks; none of them decides about a lease."""
WALL_CLOCKS = {"time.time", "time.time_ns", "datetime.now", "datetime.utcnow", "datetime.today", "date.today"}


def calls(module: Path) -> set[str]:
    """Return the dotted ends of what a module calls: `datetime.now` for `datetime.datetime.now(...)`."""
    called = [node.func for node in ast.walk(ast.parse(module.read_text())) if isinstance(node, ast.Call)]
    return {".".join(ast.unparse(function).split(".")[-2:]) for function in called}


def test_nothing_that_decides_about_leases_reads_the_wall_clock() -> None:
    modules = [
        path for path in PACKAGE.rglob("*.py") if not MAY_KNOW_THE_TIME_OF_DAY & set(path.relative_to(PACKAGE).parts)
    ]

    assert len(modules) > 20
    assert {path.name: found for path in modules if (found := calls(path) & WALL_CLOCKS)} == {}
    assert calls(PACKAGE / "backends" / "postgres_doctor.py") & WALL_CLOCKS  # so a call would have been found


def test_statements_stamp_with_the_clock_of_the_server_alone() -> None:
    from dataclasses import astuple

    from pglease.backends.postgres_sql import Statements
    from pglease.schema import table_names

    for statement in astuple(Statements.of(table_names("leases", "public"), 1)):
        spoken = statement.lower().replace("clock_timestamp()", "")
        for other in ("now()", "current_timestamp", "localtimestamp", "%(now)", "statement_timestamp", "timestamptz"):
            assert other not in spoken
