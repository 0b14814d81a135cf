"""Tokens rise while a cleanup hammers, and the schema script leaves them alone."""

from __future__ import annotations

import functools
import itertools
import threading
from collections import defaultdict
from typing import Self

import pytest

from pglease import BackendUnavailable, PostgresBackend, identity
from pglease.backends import postgres_schema as schema
from pglease.backends.postgres_link import Link
from pglease.records import Granted, Request
from pglease.schema import table_names
from tests.support.worlds import TABLE, all_at_once, budget, connect, execute, grant, store, wait_until

pytestmark = pytest.mark.matrix

ASKERS = 6


class Hammer:
    """Cleans up without a pause, in a thread of its own, until it is told to stop."""

    def __init__(self, dsn: str) -> None:
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(dsn,))
        self.deleted = 0

    def _run(self, dsn: str) -> None:
        with store(dsn) as backend:
            while not self._over.is_set():
                try:
                    self.deleted += backend.cleanup(0, budget())
                except BackendUnavailable:
                    continue  # the askers kept it out for ten seconds

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join(30)


def granted_and_released(backend: PostgresBackend, turns: itertools.count[int], wanted: int) -> list[tuple[str, int]]:
    """Take and give back one of a few names until enough was granted to all of us; return the tokens in order."""
    found = []
    while (turn := next(turns)) < wanted:
        name = f"name-{turn % 4}"
        answer = None
        while not isinstance(answer, Granted):
            lease_id = identity.new_lease_id()
            answer = backend.try_acquire(Request(name, "asker", lease_id, 60.0), budget())
        found.append((name, answer.lease.fencing_token))
        backend.release(name, lease_id, budget())
    return found


@pytest.mark.parametrize("wanted", [600, pytest.param(10_000, marks=pytest.mark.long)])
def test_no_token_is_granted_twice_while_a_cleanup_hammers(dsn, wanted):
    """Rows are deleted between any two grants; each asker sees the tokens of a name rise."""
    turns = itertools.count()
    backends = [PostgresBackend(dsn) for _ in range(ASKERS)]
    with Hammer(dsn) as hammer:
        asked = [functools.partial(granted_and_released, backend, turns, wanted) for backend in backends]
        grants = all_at_once(asked, within=300)
    for backend in backends:
        backend.close()

    everything = [each for found in grants for each in found]
    assert len(everything) == wanted
    assert hammer.deleted > wanted / 20  # it did come in between
    assert len(set(everything)) == wanted
    for found in grants:
        by_name = defaultdict(list)
        for name, token in found:
            by_name[name].append(token)
        assert all(tokens == sorted(tokens) for tokens in by_name.values())


HOLD_UP = f"""
CREATE FUNCTION hold_up() RETURNS boolean LANGUAGE plpgsql AS $$ BEGIN
  IF pg_catalog.current_setting('application_name') = 'slow' THEN
    PERFORM pg_catalog.pg_advisory_lock_shared(42);
    PERFORM pg_catalog.pg_advisory_unlock_shared(42);
  END IF;
  RETURN true;
END $$;
CREATE POLICY hold_up ON {TABLE}_meta USING (hold_up());
ALTER TABLE {TABLE}_meta ENABLE ROW LEVEL SECURITY, FORCE ROW LEVEL SECURITY;
"""
"""Whoever is called `slow` stops on the way to the token floor, with a snapshot that is getting old."""


def test_a_cleanup_waits_for_an_insert_that_has_read_the_floor_already(dsn):
    """Between its look and its insert somebody else is granted the name and gives it back: that row has to stay."""
    with store(f"{dsn}?application_name=slow") as slow, store(dsn) as quick, connect(dsn) as gate:
        slow.get("job", budget())
        Link(gate).script(HOLD_UP)
        gate.execute("SELECT pg_advisory_lock(42)")
        answers = []
        thread = threading.Thread(target=lambda: answers.append(grant(slow, "job")))
        thread.start()
        held_up = "SELECT 1 FROM pg_stat_activity WHERE application_name = 'slow' AND wait_event = 'advisory'"
        wait_until(lambda: execute(dsn, held_up))

        first, lease_id = grant(quick, "job")
        quick.release("job", lease_id, budget())
        with pytest.raises(BackendUnavailable):
            quick.cleanup(0, budget(1))
        gate.execute("SELECT pg_advisory_unlock(42)")
        thread.join(20)

        ((second, _),) = answers
        assert second.fencing_token > first.fencing_token


def test_the_schema_script_beside_a_cleanup_does_not_lower_the_floor(dsn):
    """It has read the floor, waits for the cleanup, and must not write back what it read."""
    with store(dsn) as backend, connect(dsn) as migration, connect(dsn) as cleanup:
        grant(backend, "job")
        cleanup.execute("BEGIN")
        cleanup.execute(f"UPDATE {TABLE}_meta SET token_floor = 50")
        thread = threading.Thread(target=Link(migration).script, args=(schema.ddl(table_names()),))
        thread.start()
        waits = "SELECT 1 FROM pg_stat_activity WHERE pid = %s AND wait_event_type = 'Lock'"
        wait_until(lambda: execute(dsn, waits, migration.info.backend_pid))

        cleanup.execute("COMMIT")
        thread.join(20)

        assert grant(backend, "new")[0].fencing_token == 51
