"""Nonsense is refused with one typed error that names it, before anything is sent anywhere."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest

from pglease import ConfigurationError, PGLease

NOWHERE = "postgresql://somebody@127.0.0.1:1/db"
"""Nobody listens there: whatever were sent would fail in another way."""

NAMES: list[Any] = ["", "x" * 256, "x" * 10_000, None, 5, b"", b"job", ["job"], True, "a\0b", "a\nb", "\ud800"]
DURATIONS: list[Any] = [
    0,
    -1,
    -0.0,
    math.nan,
    math.inf,
    -math.inf,
    1e12,
    True,
    False,
    "x",
    "",
    "-5s",
    None,
    b"5",
    [5],
    timedelta(0),
]
CALLS: dict[str, Callable[[PGLease, Any], object]] = {
    "acquire": lambda leases, name: leases.acquire(name),
    "try_acquire": lambda leases, name: leases.try_acquire(name),
    "wait_for_lease": lambda leases, name: leases.wait_for_lease(name),
    "release": lambda leases, name: leases.release(name),
    "renew": lambda leases, name: leases.renew(name),
    "held": lambda leases, name: leases.held(name),
    "get_lease": lambda leases, name: leases.get_lease(name),
    "force_release": lambda leases, name: leases.force_release(name, 1),
    "singleton_task": lambda leases, name: leases.singleton_task(name)(lambda: None),
}


@pytest.fixture
def nowhere() -> Any:
    """Return a client of a server that is not there."""
    with PGLease(NOWHERE) as leases:
        yield leases


@pytest.mark.parametrize("name", NAMES, ids=lambda name: f"{name!a:.12}")
@pytest.mark.parametrize("call", CALLS)
def test_a_name_that_is_none_is_refused_by_every_call(nowhere: PGLease, call: str, name: Any) -> None:
    with pytest.raises(ConfigurationError, match="name"):
        CALLS[call](nowhere, name)


@pytest.mark.parametrize("ttl", DURATIONS, ids=repr)
def test_a_ttl_that_is_none_is_refused_by_every_call(nowhere: PGLease, ttl: Any) -> None:
    for call in (
        lambda: nowhere.acquire("job", ttl=ttl),
        lambda: nowhere.try_acquire("job", ttl=ttl),
        lambda: nowhere.wait_for_lease("job", ttl=ttl),
        lambda: nowhere.singleton_task("job", ttl=ttl),
    ):
        with pytest.raises(ValueError, match="ttl") as caught:
            call()
        assert isinstance(caught.value, ConfigurationError)


@pytest.mark.parametrize("interval", [each for each in DURATIONS if each is not None], ids=repr)
def test_a_heartbeat_interval_that_is_none_is_refused(interval: Any) -> None:
    with pytest.raises(ConfigurationError, match="heartbeat_interval"):
        PGLease(NOWHERE, heartbeat_interval=interval)


@pytest.mark.parametrize("owner", ["", 5, b"me", "x" * 256, "a\0b", True], ids=lambda owner: f"{owner!r:.12}")
def test_an_owner_that_is_none_is_refused(owner: Any) -> None:
    with pytest.raises(ConfigurationError, match="owner_id"):
        PGLease(NOWHERE, owner_id=owner)


@pytest.mark.parametrize("timeout", [0, -5, math.nan, "x", True, -math.inf], ids=repr)
def test_a_timeout_that_is_none_is_refused(nowhere: PGLease, timeout: Any) -> None:
    with pytest.raises(ValueError, match="timeout"):
        nowhere.wait_for_lease("job", timeout=timeout)


@pytest.mark.parametrize("poll", [0, -1, math.nan, math.inf, "x", True, None], ids=repr)
def test_a_poll_interval_that_is_none_is_refused(nowhere: PGLease, poll: Any) -> None:
    with pytest.raises(ConfigurationError, match="poll_interval"):
        nowhere.wait_for_lease("job", poll_interval=poll)


@pytest.mark.parametrize("backend", [None, 5, b"postgresql://h/db", "nonsense", "mysql://h/db", {}], ids=repr)
def test_a_backend_that_is_none_is_refused(backend: Any) -> None:
    with pytest.raises(ConfigurationError):
        PGLease(backend)


@pytest.mark.parametrize("table", ["", "a.b", None, 5, 'x"; DROP TABLE y; --', "x" * 64, "a\0b"], ids=repr)
def test_a_table_name_that_is_no_single_identifier_is_refused(table: Any) -> None:
    with pytest.raises(ConfigurationError, match="table_name"):
        PGLease(NOWHERE, table_name=table)


@pytest.mark.parametrize("size", [0, -1, True, 1.5, "4", None], ids=repr)
def test_a_pool_size_that_is_none_is_refused(size: Any) -> None:
    with pytest.raises(ConfigurationError, match="pool_size"):
        PGLease(NOWHERE, pool_size=size)


def test_everything_that_is_wrong_is_said_at_once() -> None:
    with pytest.raises(ConfigurationError) as caught:
        PGLease(NOWHERE, owner_id="", heartbeat_interval=0, pool_size=0, table_name="a.b")

    for argument in ("owner_id", "heartbeat_interval", "pool_size", "table_name"):
        assert argument in str(caught.value)


@pytest.mark.parametrize(
    "name", ["x" * 255, "😀" * 255, "Ä/z ß", "o'hara", 'say "x"', "100%s %(name)s", "a;b--c", "{brace}", "\\", " "]
)
def test_a_legal_name_is_a_name_whatever_it_holds(leases: PGLease, rival: PGLease, name: str) -> None:
    assert leases.try_acquire(name, ttl=60)

    assert not rival.try_acquire(name)
    assert [lease.name for lease in rival.list_leases()] == [name]
    assert leases.release(name)


@pytest.mark.parametrize("ttl", ["60", "1m", timedelta(minutes=1), 0.5, 300 * 86400.0], ids=repr)
def test_a_legal_ttl_may_be_said_in_any_way(leases: PGLease, ttl: Any) -> None:
    with leases.acquire("job", ttl=ttl) as lease:
        assert lease
        assert 0 < lease.remaining() <= 300 * 86400


def test_names_that_differ_in_anything_are_different_leases(leases: PGLease) -> None:
    names = ["job", "Job", " job", "job ", "jöb", "jo\u0308b", "users:42", "users/42"]

    assert [leases.try_acquire(name, ttl=60) for name in names] == [True] * len(names)


def test_a_timeout_is_kept_to_the_moment(leases: PGLease, rival: PGLease) -> None:
    assert rival.try_acquire("job", ttl=60)

    started = time.monotonic()
    with pytest.raises(TimeoutError, match="rival"):
        leases.wait_for_lease("job", timeout=1, poll_interval=0.3)

    assert 0.95 < time.monotonic() - started < 10
