"""What the doubles of stores and clocks do at their edges."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pglease import PGLease
from pglease.backends import Backend
from pglease.backends.base import Adoption, Gone, Renewal
from pglease.backends.memory import MemoryBackend
from pglease.testing import always_acquire
from pglease.testing.api_server import ApiServer
from pglease.testing.databases import _within
from pglease.testing.fake_clock import FakeClock
from pglease.testing.free_for_all import FreeForAll
from pglease.testing.harness import Worker, budget
from pglease.testing.proxy import Proxy
from pglease.testing.suite_for_url import UrlHarness
from pglease.testing.world import World


def test_a_clock_of_the_tests_does_not_go_back() -> None:
    with pytest.raises(ValueError, match="time does not go back"):
        FakeClock().advance(-1)


@pytest.mark.parametrize(
    ("dsn", "wanted"),
    [("postgresql://me@here:5/old", "postgresql://me@here:5/new"), ("host=here dbname=old", "dbname=new host=here")],
)
def test_another_database_is_named_in_the_shape_of_the_dsn(dsn: str, wanted: str) -> None:
    assert _within(dsn, "new") == wanted


def test_a_store_that_grants_everything_knows_what_it_never_granted() -> None:
    store = FreeForAll()

    (renewed,) = store.renew([Renewal("job", "nobody's", 60.0)], budget())

    assert renewed == Gone("deleted")
    assert store.adopt(Adoption("job", "nobody's", "me", "next", 60.0), budget()) == Gone("deleted")


def test_a_thief_who_comes_too_late_is_told() -> None:
    now = FakeClock()
    store = MemoryBackend(clock=now)
    world = World(lambda: store, now)
    assert world.one.try_acquire("job", ttl=60)
    expire = world.expire

    def expire_and_lose(name: str, *, noticed: bool = True) -> None:
        expire(name, noticed=noticed)
        Worker(store, "another").hold(name)

    world.expire = expire_and_lose  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="quicker than the thief of 'job'"):
        world.steal("job")
    world.close()


def test_what_was_not_granted_by_the_double_outlives_it() -> None:
    with PGLease(MemoryBackend()) as leases:
        kept = leases.wait_for_lease("kept")
        with always_acquire():
            granted = leases.wait_for_lease("granted")

        assert kept.held
        assert not granted.held


def test_an_api_server_that_does_not_run_has_nothing_to_cut_and_lets_no_stranger_in() -> None:
    server = ApiServer(("jobs",))

    server.cut()
    server.stop()
    assert server.may(None, "get")
    server.tokens = {"token": ("get",)}

    assert not server.may(None, "get")
    assert server.may("token", "get")


def test_a_proxy_may_be_started_twice_and_stopped_before_it_was() -> None:
    proxy = Proxy("127.0.0.1", 1)
    proxy.stop()

    with proxy.start():
        port = proxy.port
        assert proxy.start().port == port


def test_a_hold_that_ends_while_everything_is_granted_is_not_brought_back() -> None:
    with PGLease(MemoryBackend()) as leases:
        with always_acquire():
            before = leases.wait_for_lease("granted")
        first, second = leases.wait_for_lease("first"), leases.wait_for_lease("second")
        with always_acquire():
            assert leases.try_acquire("first")
            assert leases.try_acquire("second")
            first.release()

        assert not before.held
        assert leases.holding() == [second]
        assert second.held


class OneStore(UrlHarness):
    """Its address is that of one store, which others have used."""

    def __init__(self, store: Backend) -> None:
        self.store = store
        super().__init__("memory://")

    def open(self) -> Backend:
        return self.store


def test_the_suite_empties_the_one_store_of_an_address_first_unless_it_keeps_queues() -> None:
    store = MemoryBackend()
    worker = Worker(store, "before")
    worker.hold("held")
    worker.hold("over").released()
    with pytest.raises(pytest.fail.Exception, match="only empty when it is new"):
        OneStore(store)

    store = MemoryBackend()
    worker = Worker(store, "before")
    worker.hold("held")
    worker.hold("over").released()
    store.traits = replace(store.traits, fair=False)
    looks = []
    store.close = lambda: looks.extend(store.list("", budget(), ended=True))  # type: ignore[method-assign]
    OneStore(store)
    assert looks == []
