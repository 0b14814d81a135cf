"""History: kept if asked for, in the statement that ends a hold, and read back by whoever looks."""

from __future__ import annotations

from collections.abc import Iterator

import psycopg
import pytest

from pglease import AsyncPGLease, ConfigurationError, MemoryBackend, PGLease, Tenure
from pglease.backends.postgres_link import Link
from tests.support.worlds import expire

KEEP = 3


def keeping(dsn: str) -> str:
    return f"{dsn}{'&' if '?' in dsn else '?'}pglease.history={KEEP}"


@pytest.fixture
def leases(dsn: str) -> Iterator[PGLease]:
    with PGLease(keeping(dsn), "keeper") as client:
        yield client


def endings(tenures: list[Tenure]) -> list[str | None]:
    return [tenure.ending for tenure in tenures]


def test_without_being_asked_nothing_is_kept_but_the_last_hold_is_known(dsn):
    with PGLease(dsn, "us") as leases:
        with leases.acquire("job"):
            assert endings(leases.history("job")) == [None]
        assert leases.history("job") == []
        assert leases.try_acquire("job", heartbeat=False)
        expire(dsn, "job")
        assert endings(leases.history("job")) == ["expired"]


def test_whoever_looks_reads_what_others_have_kept(leases, dsn):
    for _ in range(2):
        with leases.acquire("job", ttl=60):
            pass
    assert leases.try_acquire("other")

    with PGLease(dsn) as looking:
        (first, second) = looking.history("job")
        assert [tenure.name for tenure in looking.history()] == ["job", "job", "other"]
        assert [tenure.name for tenure in looking.history(prefix="o")] == ["other"]
        assert looking.history("job", limit=1) == [second] or looking.history("job", limit=1)[0].fencing_token == 2

    assert (first.owner_id, first.fencing_token, first.ending) == ("keeper", 1, "released")
    assert first.ended_at <= second.acquired_at
    assert first.seconds >= 0


def test_a_hold_that_ran_out_is_closed_by_its_successor_who_keeps_a_history(leases, dsn):
    with PGLease(dsn) as careless:
        assert careless.try_acquire("job", heartbeat=False)
        expire(dsn, "job")

        assert leases.try_acquire("job")

    ran_out, running = leases.history("job")
    assert (ran_out.ending, running.ending) == ("expired", None)
    assert ran_out.ended_at <= running.acquired_at


def test_the_end_is_written_by_the_statement_that_ends_the_hold_one_row_and_no_round_trip_more(dsn, monkeypatch):
    sent: list[str] = []
    rows = Link.rows

    def counted(link: Link, statement: str, params=None):
        sent.append(statement)
        return rows(link, statement, params)

    monkeypatch.setattr(Link, "rows", counted)
    trips = {}
    with psycopg.connect(dsn, autocommit=True) as looking:

        def kept() -> int:
            return looking.execute("SELECT count(*) FROM pglease_leases_history").fetchone()[0]

        for address in (dsn, keeping(dsn)):
            with PGLease(address) as leases:
                assert leases.try_acquire("warm")
                taken = []
                for _ in range(2 * KEEP):
                    for change in (lambda: leases.try_acquire("job", ttl=60), lambda: leases.release("job")):
                        before, sent[:] = kept(), []
                        assert change()
                        taken.append(len(sent))
                        assert kept() - before <= 1
                trips[address] = taken
        assert (
            looking.execute("SELECT count(*) FROM pglease_leases_history WHERE task_name = 'job'").fetchone()[0] == KEEP
        )

    bare, keeps = trips.values()
    assert keeps == bare == [1] * len(bare)


def test_a_cleanup_forgets_a_name_altogether(leases):
    with leases.acquire("job"):
        pass

    assert leases.cleanup_expired() == 1
    assert leases.history("job") == []


def test_in_memory_it_is_the_same():
    with PGLease(MemoryBackend(history=2), "us") as leases:
        for _ in range(3):
            with leases.acquire("job"):
                pass
        assert leases.try_acquire("job")

        assert [tenure.fencing_token for tenure in leases.history("job")] == [2, 3, 4]
        assert endings(leases.history("job")) == ["released", "released", None]


def test_on_a_loop_it_is_awaited():
    import asyncio

    async def main() -> list[Tenure]:
        async with AsyncPGLease(MemoryBackend(history=2)) as leases:
            async with leases.acquire("job"):
                pass
            return await leases.history("job")

    assert endings(asyncio.run(main())) == ["released"]


@pytest.mark.parametrize(
    ("wanted", "word"),
    [({"name": "a", "prefix": "b"}, "not of both"), ({"limit": 0}, "limit"), ({"name": ""}, "name")],
)
def test_what_makes_no_sense_is_refused(wanted, word):
    with PGLease(MemoryBackend(history=2)) as leases, pytest.raises(ConfigurationError, match=word):
        leases.history(**wanted)


@pytest.mark.parametrize("history", [-1, True, "many"])
def test_only_a_number_of_holds_can_be_kept(dsn, history):
    from pglease import PostgresBackend

    with pytest.raises(ConfigurationError, match="history"):
        PostgresBackend(dsn, history=history)
    with pytest.raises(ConfigurationError, match="history"):
        MemoryBackend(history=history)


def test_a_store_without_the_trait_says_so(tmp_path):
    with PGLease(f"sqlite:///{tmp_path / 'leases.db'}") as leases, pytest.raises(ConfigurationError, match="history"):
        leases.history("job")
