"""PostgreSQL in the field: what a race and a lost try write to the log that every replica has to read."""

from __future__ import annotations

import functools
import threading

import pytest

from pglease import PGLease
from tests.support.worlds import TABLE, all_at_once, ask, clients, connect, expire, grant, store

QUIET = {
    # No other writer of WAL: what is measured is ours.
    "autovacuum": "off",
    "full_page_writes": "off",
    "wal_level": "minimal",
    "max_wal_senders": 0,
    "checkpoint_timeout": "1h",
    "max_wal_size": "4GB",
    "bgwriter_lru_maxpages": 0,
}
ROUNDS = 40
RACERS = 30


@pytest.fixture
def quiet(fresh_postgres):
    """A server that writes nothing of its own."""
    return fresh_postgres(settings=QUIET)


class Wal:
    """How many bytes of WAL were written since the last look."""

    def __init__(self, dsn: str) -> None:
        self._connection = connect(dsn)
        self._at = self._now()

    def _now(self) -> int:
        statement = "SELECT pg_wal_lsn_diff(pg_current_wal_insert_lsn(), '0/0')::bigint"
        return int(self._connection.execute(statement).fetchone()[0])

    def written(self) -> int:
        before, self._at = self._at, self._now()
        return self._at - before

    def close(self) -> None:
        self._connection.close()


@pytest.mark.parametrize("state", ["new", "expired"])
def test_a_race_writes_what_one_grant_writes(quiet, state):
    """Thirty racers for one name: the winner's grant, and at most 100 bytes on average for all the others.

    What always writes fails it: 29 losers at 96 bytes are 2,784 a round. So do racers who insert in the same instant.
    """
    with clients(quiet.dsn, RACERS) as racers, store(quiet.dsn) as backend:
        for racer in racers:
            racer.get_lease("connected before the start")
        names = [f"name-{number:03}" for number in range(2 * ROUNDS)]
        if state == "expired":
            for name in names:
                grant(backend, name)
                expire(quiet.dsn, name)

        alone = _alone(quiet.dsn, backend, names[::2])
        raced = _raced(quiet.dsn, racers, names[1::2])

    assert (sum(raced) - sum(alone)) / ROUNDS <= 100


SLOW_INDEX = f"""
CREATE FUNCTION slowly(name text) RETURNS text LANGUAGE plpgsql IMMUTABLE AS $$ BEGIN
  PERFORM pg_catalog.pg_sleep(0.2);
  RETURN name;
END $$;
CREATE UNIQUE INDEX slow ON {TABLE} (slowly(task_name));
"""
"""Between the look for a conflict and the insert, everybody takes his time."""


def test_racers_who_insert_in_the_same_instant_write_one_row(quiet):
    """All of them are between look and insert together; those who would write a row and take it back are kept out."""
    with clients(quiet.dsn, 8) as racers, store(quiet.dsn) as backend:
        for racer in racers:
            racer.get_lease("connected before the start")
        with connect(quiet.dsn) as connection:
            connection.execute(SLOW_INDEX)
        (alone,) = _alone(quiet.dsn, backend, ["name-0"])

        (raced,) = _raced(quiet.dsn, racers, ["name-1"])

    assert raced <= alone + 100


def _alone(dsn: str, backend, names: list[str]) -> list[int]:
    """What each grant writes with nobody beside it."""
    wal = Wal(dsn)
    written = []
    for name in names:
        wal.written()
        grant(backend, name)
        written.append(wal.written())
    wal.close()
    return written


def _raced(dsn: str, racers: list[PGLease], names: list[str]) -> list[int]:
    """What each round writes when all race for a name."""
    wal = Wal(dsn)
    written: list[int] = []
    wins: list[bool] = []
    start = threading.Barrier(len(racers), action=wal.written)
    end = threading.Barrier(len(racers), action=lambda: written.append(wal.written()))

    def race(racer: PGLease) -> None:
        for name in names:
            start.wait(60)
            wins.append(racer.try_acquire(name, heartbeat=False))
            end.wait(60)

    all_at_once([functools.partial(race, racer) for racer in racers], within=100)
    wal.close()
    assert sum(wins) == len(names)
    assert len(wins) == len(names) * len(racers)
    return written


def test_a_try_on_a_name_that_is_held_writes_nothing(quiet):
    """Not a byte, and no transaction id: whether or not the client knows of the hold already."""
    dsn = quiet.dsn
    with store(dsn) as backend, clients(dsn, 10) as others:
        grant(backend, "job")
        for other in others:
            other.get_lease("job")
        with connect(dsn) as connection:
            xid = "SELECT pg_snapshot_xmax(pg_current_snapshot())::text"
            before = connection.execute(xid).fetchone()
            wal = Wal(dsn)

            for other in others:
                for _ in range(10):
                    assert other.try_acquire("job") is False
            for _ in range(100):
                answer, _ = ask(backend, "job")
                assert answer.lease.owner_id == "somebody"

            assert wal.written() == 0
            assert connection.execute(xid).fetchone() == before
        wal.close()
