"""Building a client: arguments, the environment, the default client and the functions of the module."""

from __future__ import annotations

import logging
import os
import re
import socket
import threading
from collections.abc import Iterator

import pytest

import pglease
from pglease import ConfigurationError, MemoryBackend, NotAcquired, PGLease, default

URL = "postgresql://user:hunter22@db.example/shop?sslpassword=hunter33"


@pytest.fixture
def no_default(monkeypatch) -> Iterator[None]:
    """No default client before, and none left behind."""
    monkeypatch.setattr(default, "_client", None)
    for name in ("PGLEASE_URL", "DATABASE_URL"):
        monkeypatch.delenv(name, raising=False)
    yield
    if default._client is not None:
        default._client.close()


# -- arguments ---------------------------------------------------------------------------------------------------------


def test_building_a_client_starts_no_thread_and_connects_to_nothing():
    before = set(threading.enumerate())

    client = PGLease("postgresql://nobody@nowhere.invalid/nothing")

    assert set(threading.enumerate()) <= before  # some of another test's may end meanwhile
    client.close()


def test_an_owner_is_made_where_none_is_given():
    with PGLease("memory://") as one, PGLease("memory://") as two:
        assert re.fullmatch(rf"{re.escape(socket.gethostname())}:{os.getpid()}:[0-9a-f]+", one.owner_id)
        assert one.owner_id == one.owner_id
        assert one.owner_id != two.owner_id


def test_two_clients_with_the_same_label_exclude_each_other(store):
    one, two = store.client("worker"), store.client("worker")

    assert one.try_acquire("job") is True
    assert two.try_acquire("job") is False
    assert two.release("job") is False
    assert one.held("job").held


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"owner_id": ""}, "owner_id"),
        ({"owner_id": "a\nb"}, "owner_id"),
        ({"owner_id": 7}, "owner_id"),
        ({"heartbeat_interval": 0}, "heartbeat_interval"),
        ({"heartbeat_interval": "x"}, "heartbeat_interval"),
        ({"on_lease_lost": "not callable"}, "on_lease_lost"),
        ({"margin": -1}, "margin"),
        ({"margin": 0}, "margin"),
        ({"pool_size": 0}, "pool_size"),
        ({"connect_timeout": -1}, "connect_timeout"),
        ({"table_name": "a.b"}, "schema="),
        ({"schema": "a b"}, "schema"),
        ({"auto_initialize": "yes"}, "auto_initialize"),
    ],
)
def test_what_is_wrong_is_named_and_the_address_is_not_shown(arguments, named):
    with pytest.raises(ConfigurationError, match=named) as caught:
        PGLease(URL, **arguments)

    assert "hunter" not in str(caught.value) + repr(caught.value)


def test_everything_that_is_wrong_is_named_at_once():
    with pytest.raises(ConfigurationError) as caught:
        PGLease(URL, owner_id="", heartbeat_interval=-1, margin="x", on_lease_lost=7, pool_size=0, table_name="")

    assert len(caught.value.problems) == 6


def test_neither_client_nor_store_shows_a_secret(caplog):
    caplog.set_level(logging.DEBUG, "pglease")
    with PGLease(URL, "me") as client:
        shown = repr(client) + str(client) + repr(client.backend) + str(vars(client)) + repr(client.backend.connections)

    assert "hunter" not in shown
    assert "hunter" not in caplog.text
    assert repr(client).startswith("<PGLease on PostgreSQL as 'me'")


def test_the_state_of_a_client_can_be_seen(leases):
    assert "holding 0" in repr(leases)
    leases.try_acquire("job")
    assert "holding 1" in repr(leases)
    leases.release("job")
    with leases.acquire("job"):
        assert "holding 1" in repr(leases)
    assert "holding 0" in repr(leases), "what is over is forgotten"


def test_a_backend_of_the_applications_own_stays_open():
    backend = MemoryBackend()

    PGLease(backend).close()

    with PGLease(backend) as client:
        assert client.try_acquire("job")


def test_a_backend_that_the_client_opened_is_closed_with_it():
    client = PGLease("memory://attic-of-this-test")

    client.close()

    assert "closed" in repr(client.backend)


# -- the environment ---------------------------------------------------------------------------------------------------


def test_the_environment_names_the_store(monkeypatch):
    monkeypatch.setenv("DATABASE_URL", "postgresql://database.example/x")
    with PGLease.from_env(owner_id="me", pool_size=2) as client:
        assert client.backend.connections.dsn.get("host") == "database.example"
        assert (client.owner_id, client.backend.connections.pool_size) == ("me", 2)

    monkeypatch.setenv("PGLEASE_URL", "memory://")
    with PGLease.from_env() as client:
        assert isinstance(client.backend, MemoryBackend)


@pytest.mark.parametrize("value", [None, ""])
def test_an_environment_that_names_none_is_an_error_with_the_way_out(monkeypatch, value):
    for name in ("PGLEASE_URL", "DATABASE_URL"):
        monkeypatch.delenv(name, raising=False)
        if value is not None:
            monkeypatch.setenv(name, value)

    with pytest.raises(ConfigurationError, match="PGLEASE_URL or DATABASE_URL"):
        PGLease.from_env()


# -- the default client ------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("no_default")
def test_the_functions_of_the_module_need_no_wiring(monkeypatch):
    monkeypatch.setenv("PGLEASE_URL", "memory://of-this-test")

    with pglease.acquire("job", ttl=60) as lease:
        assert lease
        assert [held.name for held in pglease.holding()] == ["job"]
        assert pglease.held("job") is lease
        assert pglease.try_acquire("job") is False
        assert pglease.get_lease("job").fencing_token == lease.fencing_token
    waited = pglease.wait_for_lease("job", timeout=5)
    pglease.renew("job", 30)
    assert [record.name for record in pglease.list_leases("j")] == ["job"]
    assert pglease.force_release("job", waited.fencing_token) is True
    assert pglease.release("job") is False
    assert pglease.list_leases() == []
    assert len(pglease.list_leases(ended=True)) == 1
    assert pglease.cleanup_expired() == 1

    @pglease.singleton_task("job", on_skip="busy")
    def task() -> object:
        return pglease.singleton_task("job", on_skip="busy")(lambda: "ran")()

    assert task() == "busy"
    assert pglease.default_client() is pglease.default_client()


@pytest.mark.usefixtures("no_default")
def test_a_module_may_decorate_before_anything_is_configured():
    task = pglease.singleton_task("job:{n}")(lambda n: n)

    with pytest.raises(ConfigurationError, match="PGLEASE_URL"):
        task(1)
    pglease.configure(MemoryBackend(), owner_id="me")

    assert task(2) == 2
    assert pglease.get_lease("job:2").owner_id == "me"


@pytest.mark.usefixtures("no_default")
@pytest.mark.parametrize(("arguments", "named"), [({"ttl": 0}, "ttl"), ({"name": ""}, "name"), ({"wait": -1}, "wait")])
def test_the_functions_check_when_decorating_too(arguments, named):
    with pytest.raises(ConfigurationError, match=named):
        pglease.singleton_task(**{"name": "job", **arguments})


@pytest.mark.usefixtures("no_default")
def test_configuring_again_closes_the_earlier_default():
    first = pglease.configure(MemoryBackend())
    pglease.try_acquire("job")

    second = pglease.configure(MemoryBackend())

    assert pglease.default_client() is second is not first
    assert "closed" in repr(first)


@pytest.mark.usefixtures("no_default")
def test_a_configuration_that_is_wrong_leaves_the_earlier_default():
    first = pglease.configure(MemoryBackend())

    with pytest.raises(ConfigurationError):
        pglease.configure("nonsense://")

    assert pglease.default_client() is first
    assert pglease.try_acquire("job") is True


@pytest.mark.usefixtures("no_default")
def test_the_default_is_made_once_though_many_threads_ask_at_once(monkeypatch):
    monkeypatch.setenv("PGLEASE_URL", "memory://")
    found: list[PGLease] = []
    threads = [threading.Thread(target=lambda: found.append(pglease.default_client())) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert len(set(map(id, found))) == 1


def test_the_answer_of_who_did_not_get_it_can_be_shown():
    assert repr(NotAcquired("job", None, 0.0)) == "<NotAcquired 'job', held by None, retry after 0.0 s>"
