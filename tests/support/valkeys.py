"""Several private Valkey servers that know each other: a Cluster, a primary with a replica, sentinels."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Self

from pglease.testing import processes
from pglease.testing.local_valkey import LocalValkey

SLOTS = 16384
PATIENCE = 60.0
RECORDS, TICKETS = b"*:lease", b"*:tickets"
MOMENTS = ("acquired_at", "heartbeat_at", "expires_at", "marked_until")


class LocalCluster:
    """Three primaries, a third of the slots each."""

    def __init__(self, *, password: str | None = None, replicas: int = 0) -> None:
        self._password = password
        self._life = ExitStack()
        self.nodes: list[LocalValkey] = []
        self.replicas = replicas

    def __enter__(self) -> Self:
        with ExitStack() as undo:
            undo.push(self._life.__exit__)
            self.nodes = [self._node() for _ in range(3)]
            for place, node in enumerate(self.nodes):
                first, last = place * SLOTS // 3, (place + 1) * SLOTS // 3 - 1
                node.execute("CLUSTER", "ADDSLOTSRANGE", first, last)
            self._introduce(self.nodes)
            self.await_health()
            undo.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        self._life.close()

    def _node(self) -> LocalValkey:
        settings = {
            "cluster-enabled": "yes",
            "repl-diskless-sync-delay": 0,
            "cluster-port": processes.free_port(),  # by default ten thousand above, which may be no port
            "cluster-node-timeout": 2000 if self.replicas else 60000,
            "cluster-replica-validity-factor": 0,
            **({"masterauth": self._password} if self._password else {}),
        }
        return self._life.enter_context(LocalValkey(settings=settings, password=self._password))

    def _introduce(self, nodes: list[LocalValkey]) -> None:
        hub = self.nodes[0]
        for node in nodes:
            if node is not hub:
                bus = node.execute("CONFIG", "GET", "cluster-port")[1]
                hub.execute("CLUSTER", "MEET", node.host, node.port, int(bus))

    def add_replica(self, of: LocalValkey) -> LocalValkey:
        """Let one more node in, as a replica, and return it once it has everything."""
        replica = self._node()
        self._introduce([replica])
        name = of.execute("CLUSTER", "MYID")
        assert processes.wait_until(lambda: _is_done(replica, "CLUSTER", "REPLICATE", name), timeout=PATIENCE)
        assert processes.wait_until(
            lambda: facts(replica, "replication").get("master_link_status") == "up", timeout=PATIENCE
        )
        self.nodes.append(replica)
        return replica

    def await_health(self) -> None:
        """Return once every node believes in all slots and knows everybody."""
        for node in self.nodes:
            assert processes.wait_until(lambda node=node: self._is_well(node), timeout=PATIENCE), node

    def _is_well(self, node: LocalValkey) -> bool:
        told = dict(line.split(":") for line in node.execute("CLUSTER", "INFO").decode().split())
        return told["cluster_state"] == "ok" and int(told["cluster_known_nodes"]) >= len(self.nodes)

    @property
    def url(self) -> str:
        """The address of one of them."""
        return self.nodes[0].url


def _is_done(server: LocalValkey, *command: object) -> bool:
    import redis

    try:
        server.execute(*command)
    except redis.ResponseError:
        return False
    return True


def facts(server: LocalValkey, section: str) -> dict[str, object]:
    """Return a section of INFO."""
    with server.client() as client:
        found: dict[str, object] = client.info(section)
    return found


def await_sync(replica: LocalValkey) -> None:
    """Return once a replica has everything of its primary."""
    assert processes.wait_until(
        lambda: facts(replica, "replication").get("master_link_status") == "up", timeout=PATIENCE
    )


@contextmanager
def replicated(*, password: str | None = None, **settings: object) -> Iterator[tuple[LocalValkey, LocalValkey]]:
    """Yield a primary, and a replica that has everything of it."""
    shared = {"repl-diskless-sync-delay": 0, **({"masterauth": password} if password else {}), **settings}
    with ExitStack() as life:
        primary, replica = (life.enter_context(LocalValkey(password=password, settings=shared)) for _ in range(2))
        replica.execute("REPLICAOF", primary.host, primary.port)
        await_sync(replica)
        yield primary, replica


def sentinel_of(primary: LocalValkey, *, password: str | None = None) -> LocalValkey:
    """Return a sentinel, not yet started, that watches a primary as the service `leases`."""
    return LocalValkey(
        arguments=("--sentinel",),
        settings={
            "sentinel monitor": ("leases", primary.host, primary.port, 1),
            "sentinel down-after-milliseconds": ("leases", 1000),
            "sentinel failover-timeout": ("leases", 5000),
            **({"sentinel auth-pass": ("leases", password)} if password else {}),
        },
    )


def age(servers: list[LocalValkey], seconds: float) -> None:
    """Move everything that the records of leases have noted into the past."""
    by = round(seconds * 1e6)
    for server in servers:
        with server.client() as client, client.pipeline(transaction=False) as batch:
            for key in dict.fromkeys(client.scan_iter(RECORDS, count=1000)):
                noted = zip(MOMENTS, client.hmget(key, MOMENTS), strict=True)
                batch.hset(key, mapping={name: int(value) - by for name, value in noted if value})
            for key in dict.fromkeys(client.scan_iter(TICKETS, count=1000)):
                batch.zadd(key, {ticket: until - by for ticket, until in client.zrange(key, 0, -1, withscores=True)})
            batch.execute()


def empty(servers: list[LocalValkey]) -> None:
    """Take everything out."""
    for server in servers:
        server.execute("FLUSHALL")
