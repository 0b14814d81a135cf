"""A holder that is stopped in its body, on every kind of connection: it comes back too late, and is refused."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import psycopg
import pytest

from pglease import PGLease
from tests.attacks.world import Child
from tests.fencing.kinds import KINDS
from tests.support.worlds import execute, wait_until

HOLDER = """
    import os, sys
    from pglease import FencedError, PGLease
    from tests.fencing.kinds import KINDS

    dsn = os.environ["PGLEASE_URL"]
    leases = PGLease(dsn)
    cast = []
    for name in sys.argv[2:]:
        kind, how = name.split(", ")
        lease = leases.wait_for_lease(name, ttl=float(sys.argv[1]), timeout=60)
        session = KINDS[kind](dsn)
        session.begin()
        session.execute("SELECT 1")
        cast.append((name, how, lease, session))
    print("working")
    sys.stdin.readline()
    for name, how, lease, session in cast:
        if how == "believes":  # as if it had been stopped between its last look and the guard
            lease._hold.loss = None
            lease._hold.term = lease._hold.term._replace(trusted_until=float("inf"))
            assert lease.held
        try:
            session.guard(lease)
            session.execute(f"UPDATE work SET author = 'stale' WHERE name = '{name}'")
            verdict = "written"
        except FencedError as error:
            verdict = f"refused {error.fencing_token}"
        try:
            session.commit()
        except Exception:
            session.rollback()
        print(name, verdict, sep=": ")
        session.close()
    print("done")
    os._exit(0)
"""


NAMES = [f"{kind}, believes" for kind in KINDS] + ["psycopg, knows", "asyncpg, knows"]
"""What the holder thinks when it goes on matters to no connection, so two are enough for the harmless thought."""


@pytest.mark.timeout(600)
def test_a_holder_that_was_stopped_in_its_body_is_refused_after_its_successor_wrote(dsn: str, rival: PGLease) -> None:
    execute(dsn, "CREATE TABLE IF NOT EXISTS work (name text PRIMARY KEY, author text)")
    execute(dsn, "TRUNCATE work")
    with psycopg.connect(dsn) as connection:
        connection.cursor().executemany("INSERT INTO work VALUES (%s, 'nobody')", [(name,) for name in NAMES])
    with stopped_holder(dsn) as go_on:
        for name in NAMES:
            wait_until(lambda name=name: rival.try_acquire(name, ttl=60), every=0.1)  # type: ignore[misc]
            successor = rival.held(name)
            assert successor is not None
            with psycopg.connect(dsn) as connection:
                successor.guard(connection)
                connection.execute("UPDATE work SET author = 'successor' WHERE name = %s", (name,))

        said = go_on()

    assert said == [f"{name}: refused 1" for name in NAMES]
    assert execute(dsn, "SELECT DISTINCT author FROM work") == [("successor",)]


@contextmanager
def stopped_holder(dsn: str) -> Iterator[Callable[[], list[str]]]:
    """A process that holds all the leases and is stopped. Give what lets it go on, and returns what it says."""
    child = Child(HOLDER, dsn, 4.0, *NAMES, warnings="ignore")
    try:
        assert child.line(within=180) == "working"
        child.signal(signal.SIGSTOP)

        def go_on() -> list[str]:
            child.signal(signal.SIGCONT)
            child.say()
            said = []
            while (line := child.line(within=120)) != "done":
                said.append(line)
            return said

        yield go_on
    finally:
        child.bury()
