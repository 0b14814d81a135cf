"""Addresses of Redis: what is read from them, what is refused, and that no password comes out."""

from __future__ import annotations

import copy
import pickle
import sys

import pytest
import redis

from pglease import ConfigurationError, PGLease, open_backend
from pglease.backends.redis import RedisBackend
from pglease.backends.redis_address import Address

SECRET = "hunter22"


@pytest.mark.parametrize(
    "url",
    [
        "redis://",
        "redis://h",
        "redis://h:7000/3",
        "rediss://u:p@h/0",
        "valkey://h/",
        "valkeys://h",
        "redis+sentinel://s1,s2:26380/leases",
        "rediss+sentinel://u:p@[::1]:26379/leases/2",
    ],
)
def test_addresses_of_redis(url):
    backend = open_backend(url)

    assert isinstance(backend, RedisBackend)
    backend.close()


def test_nothing_is_connected():
    backend = open_backend("redis://nobody@nowhere.invalid")
    backend.close()


def test_user_password_database_and_tls_are_read():
    address = Address("rediss://us%40er:hunter%2F22@h:7001/3?ssl_check_hostname=no&client_name=shop")

    made = address._made(address.home, 1.0)

    assert isinstance(made, redis.SSLConnection)
    assert (made.username, made.password, made.db) == ("us@er", "hunter/22", 3)
    assert (made.host, made.port, made.client_name) == ("h", 7001, "shop")
    assert not made.check_hostname


def test_sentinels_have_users_and_passwords_of_their_own():
    address = Address("redis+sentinel://u:p@s1:1,[::2],s3/leases/4?sentinel_password=q&sentinel_username=w")

    assert address.has_sentinels
    assert address._sentinels == [("s1", 1), ("::2", 26379), ("s3", 26379)]
    assert address._sentinel_options == {"username": "w", "password": "q"}
    assert (address._service, address._options["db"], address._options["password"]) == ("leases", 4, "p")


def test_what_says_how_long_and_how_often_is_left_to_the_budget():
    address = Address("redis://h?socket_timeout=99&health_check_interval=30&retry_on_timeout=yes&max_connections=3")

    made = address._made(address.home, 1.5)

    assert (made.socket_timeout, made.health_check_interval) == (1.5, 0)


@pytest.mark.parametrize(
    "url",
    [
        "redis://u:hunter22@h/db",
        "redis://u:hunter22@h/0/1",
        "redis://u:hun/ter22@h",
        "redis://u:hunter@22@h",
        "redis://u:hunter22?x@h",
        "redis://u:hunter22#x@h",
        "redis://h:hunter22",
        "redis://h:99999999",
        "redis://h?colour=hunter22",
        "redis://h?ssl_cert_reqs=hunter22",
        "rediss://h?ssl_cert_reqs=hunter22",
        "rediss://h?ssl_colour=hunter22",
        "redis+unix:///hunter22",
        "redis+sentinel://u:hunter22@s1",
        "redis+sentinel://u:hunter22@s1:x/leases",
        "redis+sentinel://u:hunter22@s1/leases/x",
        "redis://u:hunter22@[::1/0",
    ],
)
def test_a_broken_address_is_refused_and_not_shown(url):
    with pytest.raises(ConfigurationError) as caught:
        open_backend(url)

    assert "Redis" in str(caught.value) or "sentinel" in str(caught.value)
    for piece in ("hunter22", "ter22", "hunter@"):
        assert piece not in str(caught.value) + repr(caught.value) + repr(caught.value.__context__)


def test_no_password_stands_in_any_text():
    backend = open_backend(f"redis://u:{SECRET}@h/1?pglease.pool_size=2")

    assert SECRET not in repr(backend) + repr(backend.connections.address) + str(backend.connections.address)
    assert backend.connections.address.scrub(f"said {SECRET}") == "said ***"
    for make in (copy.copy, pickle.dumps):
        with pytest.raises(TypeError, match="not pickled"):
            make(backend.connections.address)


def test_knobs_stand_in_the_query_or_beside_the_address():
    backend = open_backend("redis://h?pglease.pool_size=2&pglease.prefix=shop&pglease.wait_replicas=1&db=4")

    assert backend.connections.pool_size == 2
    assert backend._wait_replicas == 1
    assert backend._keys.of("job")[0] == b"shop:1:{job}:lease"
    assert backend.connections.address._options["db"] == 4
    assert open_backend("redis://h", connect_timeout="7s").connections._connect_timeout == 7


@pytest.mark.parametrize(
    ("knob", "value"),
    [
        ("prefix", ""),
        ("prefix", "a b"),
        ("prefix", "a{b"),
        ("prefix", 7),
        ("wait_replicas", -1),
        ("wait_replicas", True),
        ("pool_size", 0),
        ("connect_timeout", 0),
    ],
)
def test_a_wrong_knob_is_named(knob, value):
    with pytest.raises(ConfigurationError, match=knob):
        RedisBackend("redis://h", **{knob: value})


def test_all_that_is_wrong_is_said_at_once():
    with pytest.raises(ConfigurationError) as caught:
        RedisBackend("redis://h/x", prefix="", pool_size=0)

    assert len(caught.value.problems) == 3


def test_knobs_of_postgresql_are_refused_by_name():
    with pytest.raises(ConfigurationError, match="Redis has no knob 'table_name'"):
        PGLease("redis://h", table_name="jobs")


def test_without_redis_py_the_extra_is_named(monkeypatch):
    for name in [name for name in sys.modules if name.startswith("pglease.backends.redis")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "redis", None)

    with pytest.raises(ImportError, match=r"pglease\[redis\]"):
        open_backend("redis://h")
