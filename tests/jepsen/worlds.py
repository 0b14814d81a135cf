"""Where a run takes place: a server, what lies before it, and what can be done to both."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field

from pglease import clock
from pglease.testing.checkers import Span
from pglease.testing.local_pgbouncer import PgBouncer
from pglease.testing.local_postgres import LocalPostgres
from pglease.testing.local_replica import LocalReplica
from pglease.testing.proxy import Proxy
from tests.support.faketime import Clockwork, find_libfaketime, stepped_postgres

TTL = 2.0


@dataclass
class World:
    """One arrangement of servers.

    Attributes:
        url: what workers connect to.
        server: the PostgreSQL that decides.
        lines: the proxies through which workers reach it.
        succession: seconds within which a dead holder is succeeded.
        sessions: whether leases are bound to sessions.
        pooler: what stands between, if anything.
        clockwork: the server's clock, where it can be stepped.
        replica: what will be promoted, where there is one.
        apart: stretches in which two servers granted, or one had lost what the other had granted.
        frail: stretches in which beliefs from before a failover may still be around.
    """

    url: str
    server: LocalPostgres
    lines: list[Proxy]
    succession: float = TTL + 0.6
    sessions: bool = False
    pooler: PgBouncer | None = None
    clockwork: Clockwork | None = None
    replica: LocalReplica | None = None
    apart: list[Span] = field(default_factory=list)
    frail: list[Span] = field(default_factory=list)
    servers: list[LocalPostgres] = field(default_factory=list)

    def logs(self) -> Iterator[str]:
        """Yield every line that any server has written."""
        for server in {id(each): each for each in [self.server, *self.servers]}.values():
            yield from server.log_text().splitlines()

    def fail_over(self, rng: random.Random) -> None:
        """Promote the replica without the last commits; the old primary is dead, or grants on for a while."""
        old, replica = self.server, self.replica
        assert replica is not None
        replica.cut_off()
        time.sleep(rng.uniform(0.1, 0.8))  # what is committed now is lost
        outlives = rng.random() < 0.5
        if not outlives:
            old.stop("immediate", keep=True)
        began = clock.now()
        replica.promote()
        self.server, self.replica = replica, None
        if outlives:
            time.sleep(rng.uniform(0.2, TTL))
            old.stop("immediate", keep=True)
        self.lines[0].refuse()
        self.lines[0].cut()
        self.apart.append((began, clock.now()))
        self.frail.append((began, clock.now() + TTL))


@contextmanager
def plain() -> Iterator[World]:
    """One server, whose clock is stepped where libfaketime is at hand."""
    with ExitStack() as stack:
        clockwork = None
        if find_libfaketime() is None:
            server = stack.enter_context(LocalPostgres())
        else:
            server, clockwork = stack.enter_context(stepped_postgres())
        line = stack.enter_context(Proxy(server.host, server.port))
        yield World(line.through(server.dsn), server, [line], clockwork=clockwork)


@contextmanager
def hybrid() -> Iterator[World]:
    """Leases bound to sessions, strictly: what cuts a holder off must not cost exclusion."""
    with LocalPostgres() as server, Proxy(server.host, server.port) as line:
        url = f"hybrid+{line.through(server.dsn)}?pglease.strict=1&pglease.handover_delay=1.5"
        yield World(url, server, [line], succession=1.5 + 0.4, sessions=True)


@contextmanager
def pooled() -> Iterator[World]:
    """PgBouncer in transaction mode between the workers and the server."""
    with (
        LocalPostgres(user="app", password="behind-the-pooler") as server,
        PgBouncer(server.dsn, settings={"server_login_retry": 1}) as pooler,
        Proxy(pooler.host, pooler.port) as line,
    ):
        yield World(line.through(pooler.dsn), server, [line], pooler=pooler)


@contextmanager
def failover() -> Iterator[World]:
    """A primary, and an asynchronous replica that is promoted without the last commits."""
    with (
        LocalPostgres() as primary,
        LocalReplica(primary) as replica,
        Proxy(primary.host, primary.port) as to_primary,
        Proxy(replica.host, replica.port) as to_replica,
    ):
        hosts = f"{to_primary.host}:{to_primary.port},{to_replica.host}:{to_replica.port}"
        url = f"postgresql://{primary.user}@{hosts}/{primary.dbname}?target_session_attrs=read-write"
        yield World(url, primary, [to_primary, to_replica], replica=replica, servers=[primary, replica])


WORLDS: dict[str, Callable[[], AbstractContextManager[World]]] = {
    "plain": plain,
    "hybrid": hybrid,
    "pooled": pooled,
    "failover": failover,
}
