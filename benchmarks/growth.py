"""Flat as it grows: cost with more names, and the table under renewals that never end, also beside a snapshot."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from random import Random

import psycopg

import pglease
from benchmarks.bare import Bare, postgres
from benchmarks.figures import Aim, Figure, Section, Spread, late
from benchmarks.timing import Effort, side_by_side
from pglease.testing.local_postgres import LocalPostgres

HOW = """Tables of ten names and of many, in one server, taken in turn: acquire and release of a name drawn at random,
and the renewal of ten of them. For the table that is renewed without end, one process renews live leases in batches of
100 as fast as the given rate, autovacuum on and awake every 10 s; sizes are of the heap."""
FEW = 10
_FILL = """
INSERT INTO {table} (task_name, owner_id, lease_id, fencing_token, acquired_at, heartbeat_at, expires_at)
SELECT 'name ' || n, 'filler', CASE WHEN {held} THEN gen_random_uuid() END, 1, now(), now(),
       CASE WHEN {held} THEN now() + interval '1 day' ELSE now() END
FROM generate_series(0, {count} - 1) n
"""
_STATE = """
SELECT pg_relation_size(relid), n_tup_upd, n_tup_hot_upd, n_dead_tup
FROM pg_stat_user_tables WHERE relname = 'pglease_leases'
"""


def _table(server: LocalPostgres, link: psycopg.Connection, table: str, count: int, *, held: bool) -> None:
    with pglease.PGLease(server.dsn, table_name=table) as client:
        client.get_lease("job")
    link.execute(_FILL.format(table=table, count=count, held=held).encode())
    link.execute(f"VACUUM ANALYZE {table}".encode())


def _with_more_names(effort: Effort) -> list[Figure]:
    """Compare a table of ten names with larger ones."""
    figures = []
    sizes = [size for size in (1000, 100_000) if size <= 10 * effort.many] or [effort.many]
    with ExitStack() as life:
        server = life.enter_context(postgres(flush=False))
        link = life.enter_context(psycopg.connect(server.dsn, autocommit=True))
        calls: dict[str, Callable[[], object]] = {}
        for count in (FEW, *sizes):
            table = f"leases_{count}"
            _table(server, link, table, count, held=False)
            client = life.enter_context(pglease.PGLease(server.dsn, table_name=table))
            calls[f"pair {count}"] = _pair(client, count)
            kept = f"kept_{count}"
            _table(server, link, kept, count, held=True)
            bare = life.enter_context(closing(Bare(server.dsn, table=kept)))
            calls[f"renewal {count}"] = _renewal(bare, link, kept, count)
        took = side_by_side(calls, rounds=effort.rounds // 2, runs=effort.runs)
        for work in ("pair", "renewal"):
            what = "acquire + release" if work == "pair" else "renewal of ten"
            figures += [
                Figure(f"{what}, {count:,} names", "µs", took[f"{work} {count}"], took[f"{work} {FEW}"], "10 names",
                       Aim(1.2))
                for count in sizes
            ]  # fmt: skip
    return figures


def _pair(client: pglease.PGLease, count: int) -> Callable[[], None]:
    chance = Random(count)

    def pair() -> None:
        name = f"name {chance.randrange(count)}"
        client.try_acquire(name, ttl=60)
        client.release(name)

    return pair


def _renewal(bare: Bare, link: psycopg.Connection, table: str, count: int) -> Callable[[], None]:
    ids = dict(link.execute(f"SELECT task_name, lease_id::text FROM {table}".encode()).fetchall())
    chance, names = Random(count), list(ids)

    def renew() -> None:
        few = chance.sample(names, min(FEW, count))
        bare.renew(few, [ids[name] for name in few], 86_400.0)

    return renew


class Renewed:
    """A table of live leases, and who renews them."""

    def __init__(self, dsn: str, link: psycopg.Connection) -> None:
        self.link = link
        self._bare = Bare(dsn)
        rows = link.execute("SELECT task_name, lease_id::text FROM pglease_leases ORDER BY 1").fetchall()
        self._batches = [([r[0] for r in part], [r[1] for r in part]) for part in _parts(rows, 100)]
        self.began_with = self.size()
        self.renewals = 0
        self.took: list[float] = []

    def close(self) -> None:
        self._bare.close()

    def size(self) -> int:
        return self.state()[0]

    def state(self) -> tuple[int, int, int, int]:
        """Return the size of the heap, the updates, those that were HOT, and the dead versions."""
        self.link.execute("SELECT pg_stat_force_next_flush()")
        row = self.link.execute(_STATE).fetchone()
        assert row is not None
        return row

    def renew_for(self, seconds: float, *, a_second: float) -> None:
        """Renew all of them, again and again, at so many a second."""
        began = time.monotonic()
        done = 0
        while (now := time.monotonic()) < began + seconds:
            if done > a_second * (now - began):
                time.sleep(0.001)
                continue
            names, ids = self._batches[(done // 100) % len(self._batches)]
            sent = time.perf_counter()
            self._bare.renew(names, ids, 86_400.0)
            self.took.append(time.perf_counter() - sent)
            done += len(names)
        self.renewals += done


def _parts(rows: list[tuple[str, str]], size: int) -> Iterator[list[tuple[str, str]]]:
    yield from (rows[place : place + size] for place in range(0, len(rows), size))


@contextmanager
def _renewed(count: int) -> Iterator[tuple[LocalPostgres, Renewed]]:
    with (
        postgres(flush=False, autovacuum_naptime="10s") as server,
        psycopg.connect(server.dsn, autocommit=True) as link,
    ):
        link.execute("CREATE EXTENSION pgstattuple")
        _table(server, link, "pglease_leases", count, held=True)
        with closing(Renewed(server.dsn, link)) as table:
            yield server, table


def _without_end(effort: Effort, a_second: float) -> list[Figure]:
    count = min(10_000, effort.many)
    with _renewed(count) as (_, table):
        table.renew_for(60 * effort.minutes, a_second=a_second)
        time.sleep(1.1)  # the server counts a session's work once a second at most
        size, updates, hot, _ = table.state()
    work = f"{count:,} live leases, {table.renewals:,} renewals in {effort.minutes:g} min"
    grown = size / table.began_with
    return [
        Figure(f"{work}: the table grew to", "times", Spread.of([grown]), aim=Aim(2, "ours")),
        Figure(f"{work}: HOT", "%", Spread.of([100 * hot / max(1, updates)]), aim=Aim(95, "ours", at_least=True)),
        Figure(f"{work}: batch of 100, p99", "ms", Spread.of([late(0.99)(table.took) * 1e3])),
    ]


def _beside_a_snapshot(effort: Effort, a_second: float) -> list[Figure]:
    """Renew while a transaction stays open; then see the space won back by one vacuum."""
    count = min(10_000, effort.many)
    with _renewed(count) as (server, table), psycopg.connect(server.dsn) as snapshot:
        snapshot.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
        snapshot.execute("SELECT count(*) FROM pglease_leases")
        table.link.execute("ALTER TABLE pglease_leases SET (autovacuum_enabled = off)")  # the vacuum below is the one
        began_with = table.state()
        table.renew_for(60 * effort.minutes, a_second=a_second)
        time.sleep(1.1)
        grown, dead = table.size() - began_with[0], _dead(table.link)
        version = _version_bytes(table.link)
        snapshot.rollback()
        table.link.execute("VACUUM pglease_leases")
        after = table.size()
        left = _dead(table.link)
        free = _free(table.link)
        renewals = table.renewals
        late_ones = late(0.99)(table.took) * 1e3
        table.took.clear()
        table.renew_for(max(2.0, 6 * effort.minutes), a_second=a_second)
        again = table.size()
    work = f"a transaction open all the time, {renewals:,} renewals"
    return [
        Figure(f"{work}: dead versions for each", "", Spread.of([dead / max(1, renewals)]), aim=Aim(1.001, "ours")),
        Figure(f"{work}: bytes of heap for each", "bytes", Spread.of([grown / max(1, renewals)]),
               remark=f"a version has {version:.0f} bytes, its page's share included"),
        Figure(f"{work}: batch of 100, p99", "ms", Spread.of([late_ones]), aim=Aim(50, "ours")),
        Figure("then one vacuum: dead versions left", "", Spread.of([float(left)]), aim=Aim(0, "ours"),
               remark=f"{100 * free / max(1, after):.0f} % of the heap free for use again"),
        Figure("then renewals go on: the heap grows by", "bytes", Spread.of([float(max(0, again - after))]),
               aim=Aim(0, "ours")),
    ]  # fmt: skip


def _dead(link: psycopg.Connection) -> int:
    """Count the versions that are not live, by reading the table."""
    row = link.execute("SELECT dead_tuple_count FROM pgstattuple('pglease_leases')").fetchone()
    assert row is not None
    return int(row[0])


def _free(link: psycopg.Connection) -> int:
    row = link.execute("SELECT free_space FROM pgstattuple('pglease_leases')").fetchone()
    assert row is not None
    return int(row[0])


def _version_bytes(link: psycopg.Connection) -> float:
    row = link.execute(
        "SELECT table_len / greatest(1, tuple_count + dead_tuple_count) FROM pgstattuple('pglease_leases')"
    )
    found = row.fetchone()
    assert found is not None
    return float(found[0])


def section(effort: Effort) -> Section:
    """Measure."""
    a_second = 1000.0
    figures = _with_more_names(effort) + _without_end(effort, a_second) + _beside_a_snapshot(effort, a_second)
    return Section("Flat as it grows", HOW, figures)
