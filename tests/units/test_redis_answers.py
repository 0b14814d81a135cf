"""What Redis seldom says, and a client of it seldom does: told without a server."""

from __future__ import annotations

import logging
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
from redis import exceptions

from pglease.backends import redis as redis_backend
from pglease.backends import redis_doctor
from pglease.backends.redis import RedisBackend
from pglease.backends.redis_address import Address
from pglease.backends.redis_connections import Connections
from pglease.backends.redis_doctor import Server
from pglease.backends.redis_errors import translated
from pglease.backends.redis_reader import Reader
from pglease.backends.redis_subscription import RedisSubscription, _change
from pglease.errors import BackendClosed, BackendError, BackendMisconfigured, BackendUnavailable, ConfigurationError
from pglease.records import Renewal
from pglease.testing.harness import budget, new_id

URL = "redis://127.0.0.1:1/0"


@pytest.fixture
def store() -> Any:
    made = RedisBackend(URL)
    yield made
    made.close()


# -- the backend -------------------------------------------------------------------------------------------------------


def test_of_many_renewals_one_that_the_server_refuses_is_trouble_of_its_own(store: Any) -> None:
    renewal = Renewal("job", new_id(), 60.0)

    with pytest.raises(BackendMisconfigured, match="Redis refuses the request"):
        store._renewal(renewal, exceptions.ResponseError("ERR no such thing"))


def test_a_subscription_that_begins_while_the_backend_is_closed_is_closed(store: Any) -> None:
    closed: list[int] = []
    store._subscribed = lambda _: SimpleNamespace(close=lambda: closed.append(1), is_over=False)

    store.listen(budget())
    assert closed == []
    store._closing.set()
    store.listen(budget())
    assert closed == [1]


def test_a_forked_child_forgets_its_parents_subscriptions(store: Any) -> None:
    forgotten: list[int] = []
    store._subscriptions.append(SimpleNamespace(forget=lambda: forgotten.append(1)))

    store.forget()

    assert (forgotten, store._subscriptions) == ([1], [])


def test_looking_at_all_leases_hides_no_error_of_the_server(store: Any) -> None:
    key = store._keys.of("job")[0]
    link: Any = SimpleNamespace(scan=lambda _: [[key]], run_many=lambda *_: [exceptions.ResponseError("ERR no")])

    with pytest.raises(exceptions.ResponseError, match="ERR no"):
        store._scanned(link, SimpleNamespace(keys=1), "", ())


class Nodes:
    """The map of a Cluster, which some nodes tell."""

    def __init__(self, *, tells: bool, has_map: bool) -> None:
        self.tells, self.has_map, self.learnt = tells, has_map, list[Any]()
        self.doubted: list[str] = []

    def known(self) -> list[str]:
        return ["first", "second"]

    def learn(self, slots: Any, _: str) -> None:
        self.learnt.append(slots)

    def doubt(self, node: str) -> None:
        self.doubted.append(node)

    def converse(self, node: str, talk: Any, *_: Any, **__: Any) -> Any:
        if node == "first" or not self.tells:
            raise BackendUnavailable("no answer")
        return talk(SimpleNamespace(call=lambda *_: "the slots"))


@pytest.mark.parametrize("has_map", [True, False], ids=["there is a map", "there is none"])
@pytest.mark.parametrize("tells", [True, False], ids=["the second tells", "none tells"])
def test_the_map_of_a_cluster_is_asked_of_one_node_after_the_other(store: Any, *, tells: bool, has_map: bool) -> None:
    store._routes = nodes = Nodes(tells=tells, has_map=has_map)
    close, store.connections = store.connections.close, SimpleNamespace(converse=nodes.converse, close=lambda: None)

    with nullcontext() if tells or has_map else pytest.raises(BackendUnavailable):
        store._read_map(budget(), reserved=False)

    assert nodes.learnt == (["the slots"] if tells else [])
    assert nodes.doubted == (["first"] if tells else ["first", "second"])
    close()


# -- connections and answers -------------------------------------------------------------------------------------------


def test_only_so_many_connections_are_kept_and_none_after_the_end() -> None:
    connections: Any = Connections(Address(URL), pool_size=1, connect_timeout=1)
    closed: list[int] = []
    links: list[Any] = [
        SimpleNamespace(node="here", close=lambda number=number: closed.append(number)) for number in range(4)
    ]

    for link in links[:3]:
        connections._keep(link)
    assert closed == [2]  # one beside the pool's, for renewals

    connections.close()
    connections._keep(links[3])
    assert sorted(closed) == [0, 1, 2, 3]
    with pytest.raises(BackendClosed):
        connections.one_more("here", budget())


def test_a_text_that_comes_in_pieces_is_waited_for() -> None:
    pieces = [b"$10\r\n1234", b"567890", b"\r", b"\n:1\r\n"]
    source: Any = SimpleNamespace(recv=lambda _: pieces.pop(0))
    reader = Reader(source, exceptions.ResponseError)

    assert reader.next() == b"1234567890"
    assert reader.next() == 1


def test_an_address_is_text() -> None:
    with pytest.raises(ConfigurationError, match="must be text, not int"):
        Address(6379)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("error", "kind"),
    [(exceptions.ResponseError("ERR unknown command"), BackendMisconfigured), (ValueError("odd"), BackendError)],
)
def test_what_errors_mean(error: Exception, kind: type[Exception]) -> None:
    assert isinstance(translated(error, str, sent=False), kind)


def test_what_is_no_announcement_of_ours_is_passed_over() -> None:
    said: list[Any] = [(b"subscribe", b"c", 1), (b"message", b"c", b"hello"), (b"message", b"c", b"released 0 a job")]
    link: Any = SimpleNamespace(heard=lambda _: said.pop(0) if said else None)

    assert [change.name for change in RedisSubscription._heard(link, 1.0)] == ["a job"]
    assert _change(b"released soon job") is None


# -- the doctor --------------------------------------------------------------------------------------------------------


def seen(ahead: float = 0.0, **info: str) -> Server:
    return Server(info, None, ahead, 0.001)


def test_a_policy_that_evicts_is_harmless_where_memory_has_no_end() -> None:
    assert redis_doctor._eviction(seen(maxmemory_policy="allkeys-lru", maxmemory="0")).status == "ok"
    assert redis_doctor._eviction(seen(maxmemory_policy="allkeys-lru", maxmemory="1000")).status == "warn"


def test_an_old_server_fails_and_one_that_does_not_tell_its_age_passes() -> None:
    assert redis_doctor._version(seen(redis_version="5.0.7")).status == "fail"
    assert redis_doctor._version(seen()).text == "unknown"


def test_a_clock_that_is_off_is_warned_of() -> None:
    assert redis_doctor._clock(seen(ahead=3600.0)).status == "warn"
    assert redis_doctor._clock(seen(ahead=0.01)).status == "ok"


@pytest.mark.parametrize("enabled", ["0", "1"])
def test_a_cluster_is_named(enabled: str, monkeypatch: Any) -> None:
    monkeypatch.setattr(redis_doctor, "_probed", lambda _: redis_doctor.Check("acquire and release", "ok", ""))
    server = seen(cluster_enabled=enabled, redis_version="7.2.0")
    checks = redis_doctor.diagnose(lambda _: server, lambda: None, 0)

    assert ("cluster" in [check.name for check in checks]) == (enabled == "1")


def test_what_is_worst_about_a_server_is_logged_at_the_first_use(store: Any, caplog: Any) -> None:
    server = seen(maxmemory_policy="allkeys-lru", maxmemory="1000", redis_version="7.2.0")
    store._at = lambda *_, **__: server

    with caplog.at_level(logging.WARNING, "pglease"):
        store._look_once(budget(), reserved=False)

    assert "may evict leases" in caplog.text
    assert redis_backend.TRAITS.kind
