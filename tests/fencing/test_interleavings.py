"""Guarded writes among renewals, lapses, takeovers and releases, in every order: what is committed is never stale."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field

import psycopg
import pytest

from pglease import FencedError
from pglease.backends import postgres_asking
from pglease.backends.base import Guard
from pglease.backends.postgres import PostgresBackend
from pglease.errors import BackendError
from pglease.records import Claim, Granted
from tests.support.worlds import ask, budget, execute, renew, wait_until

LAPSE = "UPDATE pglease_leases SET expires_at = clock_timestamp() - interval '1 ms' WHERE task_name = %s"
WRITE = "INSERT INTO ledger VALUES (%s)"


@dataclass
class Actor:
    """Somebody with a connection, perhaps a hold, and perhaps a transaction in which that was proved."""

    name: str
    connection: psycopg.Connection
    claim: Claim | None = None
    guard: Guard | None = None
    in_place: bool = False
    written: list[int] = field(default_factory=list)


class Play:
    """One name, three actors, random steps one after the other; a model knows what each answer must be."""

    def __init__(
        self,
        backend: PostgresBackend,
        operator: psycopg.Connection,
        connections: list[psycopg.Connection],
        seed: int,
    ) -> None:
        self.backend, self.name, self.operator = backend, f"job-{seed}", operator
        self.random = random.Random(seed)
        self.actors = [Actor(f"actor-{n}", each) for n, each in enumerate(connections)]
        self.current: Claim | None = None
        self.committed: list[int] = []
        self.said: list[str] = []

    def run(self, steps: int) -> None:
        for _ in range(steps):
            actor = self.random.choice(self.actors)
            step = self.random.choice(self.possible(actor))
            self.said.append(f"{actor.name} {step.__name__}")
            step(actor)
        for actor in self.actors:
            if actor.guard is not None:
                self.random.choice((self.commit, self.roll_back))(actor)
        assert self.committed == sorted(self.committed), (self.committed, self.said)

    def possible(self, actor: Actor) -> list[Callable[[Actor], None]]:
        """Return what this actor could do now. To be let in is tried more often than to be put out."""
        if actor.guard is not None:
            return [self.write] * 3 + [self.commit] * 2 + [self.leave, self.roll_back_the_guard, self.lapse, self.force]
        others = [self.acquire, self.lapse, self.force]
        if actor.claim is None:
            return [self.acquire] * 4 + others
        return [self.prove] * 5 + [self.renew, self.release, *others]

    def acquire(self, actor: Actor) -> None:
        guarded = any(each.in_place for each in self.actors)
        answer, lease_id = ask(self.backend, self.name, owner=actor.name)
        granted = isinstance(answer, Granted)
        assert granted == (self.current is None and not guarded), self.said
        if granted:
            self.current = actor.claim = Claim(self.name, lease_id, answer.lease.fencing_token)

    def lapse(self, _actor: Actor) -> None:
        self.operator.execute(LAPSE, (self.name,))
        self.current = None

    def force(self, _actor: Actor) -> None:
        if self.current is not None:
            assert self.backend.force_release(self.name, self.current.fencing_token, budget())
            self.current = None

    def renew(self, actor: Actor) -> None:
        assert actor.claim is not None
        outcome = renew(self.backend, self.name, actor.claim.lease_id)
        assert (type(outcome).__name__ == "Held") == (self.current == actor.claim), self.said

    def release(self, actor: Actor) -> None:
        assert actor.claim is not None
        self.backend.release(self.name, actor.claim.lease_id, budget())
        if self.current == actor.claim:
            self.current = None
        actor.claim = None

    def prove(self, actor: Actor) -> None:
        assert actor.claim is not None
        actor.connection.execute("SAVEPOINT older")
        if self.current == actor.claim:
            actor.guard = self.backend.guard(actor.claim, actor.connection)
            actor.in_place = True
        else:
            with pytest.raises(FencedError):
                self.backend.guard(actor.claim, actor.connection)
            actor.connection.rollback()

    def write(self, actor: Actor) -> None:
        assert actor.claim is not None
        actor.connection.execute(WRITE, (actor.claim.fencing_token,))
        actor.written.append(actor.claim.fencing_token)

    def roll_back_the_guard(self, actor: Actor) -> None:
        actor.connection.execute("ROLLBACK TO SAVEPOINT older")
        actor.in_place, actor.written = False, []

    def leave(self, actor: Actor) -> None:
        assert actor.guard is not None
        if actor.in_place or self.current == actor.claim:
            actor.guard.__exit__(None, None, None)
            actor.in_place = True
        else:
            with pytest.raises(FencedError):
                actor.guard.__exit__(None, None, None)
            self.roll_back(actor)

    def commit(self, actor: Actor) -> None:
        """End a block: leave it, and commit if that was allowed."""
        self.leave(actor)
        if actor.guard is not None:
            actor.connection.commit()
            self.committed += actor.written
            self.over(actor)

    def roll_back(self, actor: Actor) -> None:
        actor.connection.rollback()
        self.over(actor)

    def over(self, actor: Actor) -> None:
        actor.guard, actor.in_place, actor.written = None, False, []


Stage = tuple[PostgresBackend, psycopg.Connection, list[psycopg.Connection]]


@pytest.fixture
def stage(dsn: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Stage]:
    monkeypatch.setattr(postgres_asking, "_PATIENCE", 0.0)  # nobody comes meanwhile whom it would help to wait for
    execute(dsn, "CREATE TABLE IF NOT EXISTS ledger (token bigint)")
    backend = PostgresBackend(dsn)
    operator = psycopg.connect(dsn, autocommit=True)
    connections = [psycopg.connect(dsn) for _ in range(3)]
    yield backend, operator, connections
    for each in [operator, *connections]:
        each.close()
    backend.close()


def play(stage: Stage, seeds: range) -> int:
    """Play one story for each seed; return how many writes were committed in all."""
    committed = 0
    for seed in seeds:
        story = Play(*stage, seed)
        story.run(16)
        committed += len(story.committed)
    return committed


@pytest.mark.parametrize("part", range(2))
def test_interleavings_commit_nothing_stale(stage: Stage, part: int) -> None:
    committed = play(stage, range(150 * part, 150 * (part + 1)))

    assert committed > 30, "hardly anything was written: this proves nothing"


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_ten_thousand_interleavings_commit_nothing_stale(stage: Stage) -> None:
    """Ten thousand more orders than the ones above."""
    assert play(stage, range(1000, 11000)) > 2000


class Race:
    """Workers that take one lease from each other and write under a guard, and what they saw."""

    def __init__(self, dsn: str) -> None:
        self.dsn = dsn
        self.over = threading.Event()
        self.written: list[int] = []
        self.refused: list[FencedError] = []
        self.stale: list[tuple[int, int]] = []

    def work(self, owner: str) -> None:
        backend = PostgresBackend(self.dsn)
        with psycopg.connect(self.dsn) as connection:
            while not self.over.is_set():
                with suppress(BackendError):  # somebody had the row in this instant
                    answer, lease_id = ask(backend, "job", owner=owner)
                    if isinstance(answer, Granted):
                        self.write(backend, connection, Claim("job", lease_id, answer.lease.fencing_token))
                connection.rollback()
        backend.close()

    def write(self, backend: PostgresBackend, connection: psycopg.Connection, claim: Claim) -> None:
        for _ in range(5):
            try:
                backend.guard(claim, connection)
            except FencedError as error:
                self.refused.append(error)
                return
            ((newest,),) = connection.execute("SELECT token FROM newest").fetchall()
            if newest > claim.fencing_token:
                self.stale.append((newest, claim.fencing_token))
            connection.execute("UPDATE newest SET token = %s", (claim.fencing_token,))
            connection.commit()
            self.written.append(claim.fencing_token)


def test_many_at_once_commit_nothing_stale(dsn: str) -> None:
    """Real races, while somebody makes the lease lapse all the time."""
    execute(dsn, "CREATE TABLE IF NOT EXISTS newest (token bigint)")
    execute(dsn, "TRUNCATE newest")
    execute(dsn, "INSERT INTO newest VALUES (0)")
    race = Race(dsn)
    threads = [threading.Thread(target=race.work, args=(f"worker-{n}",)) for n in range(4)]
    for thread in threads:
        thread.start()

    with psycopg.connect(dsn, autocommit=True) as operator:

        def enough() -> bool:
            operator.execute(LAPSE, ("job",))
            return len(race.written) > 200 and len(race.refused) > 20

        wait_until(enough, every=0.003)
    race.over.set()
    for thread in threads:
        thread.join(30)

    assert race.stale == []
    assert execute(dsn, "SELECT token FROM newest") == [(max(race.written),)]
