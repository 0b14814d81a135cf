"""A library at its own work, in an interpreter and an environment of its own. Started by `benchmarks.peers`.

Each line of standard input is an order, as JSON; each line of output its answer. `["pairs", 20]` acquires and releases
so often and answers with the seconds of each; `["take"]` and `["release"]` answer with the time on CLOCK_MONOTONIC,
which is the same in every process of a machine.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import logging
import os
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

ANSWERS = os.fdopen(os.dup(1), "w")
"""Standard output, which libraries may not write to."""
NAME = "turns"
TTL = 60

Hand = tuple[Callable[[], Any], Callable[[], Any]]
"""How to take it, waiting for it as the library does, and how to release it."""


@contextmanager
def ours(address: str) -> Iterator[Hand]:
    from pglease import PGLease

    with PGLease(address) as client:
        yield lambda ttl=TTL: _taken(client, ttl), lambda: client.release(NAME)


def _taken(client: Any, ttl: float) -> None:
    """Take it as an application would: try, then wait."""
    if not client.try_acquire(NAME, ttl=ttl):
        client.wait_for_lease(NAME, ttl=ttl, timeout=600)


@asynccontextmanager
async def ours_async(address: str) -> AsyncIterator[Hand]:
    from pglease import AsyncPGLease

    async with AsyncPGLease(address) as client:

        async def take() -> None:
            if not await client.try_acquire(NAME, ttl=TTL):
                await client.wait_for_lease(NAME, ttl=TTL, timeout=600)

        async def release() -> None:
            await client.release(NAME)

        yield take, release


@contextmanager
def bare(address: str) -> Iterator[Hand]:
    """The same statements as ours on one connection of psycopg."""
    from benchmarks.bare import Bare
    from pglease import PGLease

    with PGLease(address) as first:
        first.get_lease(NAME)  # the table is there
    link = Bare(address)
    held: list[Any] = []
    yield lambda: held.append(link.acquire(NAME, TTL)), lambda: link.release(NAME, held.pop())
    link.close()


@contextmanager
def pglease_0_0_4(address: str) -> Iterator[Hand]:
    with ours(address) as hand:
        yield hand


@asynccontextmanager
async def grelmicro_0_20(address: str) -> AsyncIterator[Hand]:
    from grelmicro.sync import Lock

    if address.startswith("redis"):
        from grelmicro.sync.redis import RedisSyncBackend as Backend
    else:
        from grelmicro.sync.postgres import PostgresSyncBackend as Backend
    async with Backend(address) as backend:
        lock = Lock(NAME, backend=backend, lease_duration=TTL)
        yield lock.acquire, lock.release


@asynccontextmanager
async def grelmicro(address: str) -> AsyncIterator[Hand]:
    from grelmicro.coordination import Lock

    if address.startswith("redis"):
        from grelmicro.coordination.redis import RedisLockAdapter as Adapter
        from grelmicro.providers.redis import RedisProvider as Provider
    else:
        from grelmicro.coordination.postgres import PostgresLockAdapter as Adapter
        from grelmicro.providers.postgres import PostgresProvider as Provider
    async with Provider(address) as provider, Adapter(provider=provider) as adapter:
        lock = Lock(NAME, backend=adapter)
        yield lock.acquire, lock.release


@contextmanager
def redis_py(address: str) -> Iterator[Hand]:
    import redis

    lock = redis.Redis.from_url(address).lock(NAME, timeout=TTL)
    yield lock.acquire, lock.release


@contextmanager
def python_redis_lock(address: str) -> Iterator[Hand]:
    import redis
    import redis_lock

    lock = redis_lock.Lock(redis.Redis.from_url(address), NAME, expire=TTL)
    yield lock.acquire, lock.release


@contextmanager
def postgresql_lock(address: str) -> Iterator[Hand]:
    import psycopg
    from postgresql_lock import Lock

    with psycopg.connect(address) as connection:
        lock = Lock(connection, NAME)
        yield lock.acquire, lock.release


@contextmanager
def sqlalchemy_dlock(address: str) -> Iterator[Hand]:
    from sqlalchemy import create_engine
    from sqlalchemy_dlock import create_sadlock

    engine = create_engine(address.replace("postgresql://", "postgresql+psycopg://"))
    with engine.connect() as connection:
        lock = create_sadlock(connection, NAME)
        yield lock.acquire, lock.release


@contextmanager
def pals(address: str) -> Iterator[Hand]:
    from pals import Locker

    lock = Locker("benchmark", address.replace("postgresql://", "postgresql+psycopg://")).lock(NAME)
    yield lock.acquire, lock.release


@contextmanager
def django_pglock(address: str) -> Iterator[Hand]:
    from urllib.parse import urlsplit

    import django
    from django.conf import settings

    at = urlsplit(address)
    database = {"ENGINE": "django.db.backends.postgresql", "NAME": at.path[1:], "USER": at.username}
    where = {"HOST": at.hostname, "PORT": at.port}
    settings.configure(DATABASES={"default": database | where}, INSTALLED_APPS=["pgactivity", "pglock"])
    django.setup()
    import pglock

    lock = pglock.advisory(NAME)
    yield lock.acquire, lock.release


def _mithril_backend(address: str) -> Any:
    from mithril import backends

    if address.startswith("redis"):
        import redis

        return backends.RedisBackend(redis.Redis.from_url(address))
    from sqlalchemy import create_engine

    engine = create_engine(address.replace("postgresql://", "postgresql+psycopg2://"))
    return backends.PostgresBackend(engine)


@contextmanager
def mithril(address: str) -> Iterator[Hand]:
    import structlog
    from mithril import Lock

    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING))  # it prints each call
    backend = _mithril_backend(address)
    held: list[Any] = []

    def take() -> None:
        lock = Lock(NAME, backend=backend, ttl=TTL, timeout=600)  # its locks are for one use
        lock.acquire()
        held.append(lock)

    yield take, lambda: held.pop().release()


@contextmanager
def dislock(address: str) -> Iterator[Hand]:
    import psycopg
    from dislock import LeaseLock, LockContext, LockNotAcquiredError

    with psycopg.connect(address, autocommit=True) as link:
        link.execute("CREATE TABLE IF NOT EXISTS key_value (key text PRIMARY KEY, value text NOT NULL, "
                     "expire_at timestamptz NOT NULL)")  # fmt: skip
    context = LockContext(url=address, table_parts=["key_value"], lock_key=NAME, owner=f"player:{os.getpid()}",
                          run_ttl_seconds=float(TTL), lease_interval_seconds=20.0)  # fmt: skip
    held: list[Any] = []

    def take() -> None:
        while True:
            lock = LeaseLock(context)
            try:
                held.append(lock.__enter__())
            except LockNotAcquiredError:
                time.sleep(0.1)  # it only knows how to try
            else:
                return

    yield take, lambda: held.pop().__exit__(None, None, None)


def obey_sync(hand: Hand) -> None:
    take, release = hand
    for line in sys.stdin:
        verb, *arguments = json.loads(line)
        if verb == "pairs":
            _say(_pairs(take, release, *arguments))
        else:
            {"take": take, "release": release}[verb](*arguments)
            _say(time.monotonic())


def _pairs(take: Callable[[], Any], release: Callable[[], Any], rounds: int) -> list[float]:
    seconds = []
    for _ in range(rounds):
        begun = time.perf_counter()
        take()
        release()
        seconds.append(time.perf_counter() - begun)
    return seconds


async def obey(hand: Hand) -> None:
    take, release = hand
    while line := await asyncio.to_thread(sys.stdin.readline):
        verb, *arguments = json.loads(line)
        if verb == "pairs":
            _say(await _async_pairs(take, release, *arguments))
        else:
            await {"take": take, "release": release}[verb]()
            _say(time.monotonic())


async def _async_pairs(take: Callable[[], Any], release: Callable[[], Any], rounds: int) -> list[float]:
    seconds = []
    for _ in range(rounds):
        begun = time.perf_counter()
        await take()
        await release()
        seconds.append(time.perf_counter() - begun)
    return seconds


def _say(answer: object) -> None:
    ANSWERS.write(json.dumps(answer) + "\n")
    ANSWERS.flush()


async def _async_main(library: Any, address: str) -> None:
    async with library(address) as hand:
        await obey(hand)


def main(which: str, address: str) -> None:
    """Serve until standard input ends."""
    os.dup2(2, 1)
    library = globals()[which]
    if inspect.isasyncgenfunction(inspect.unwrap(library)):
        asyncio.run(_async_main(library, address))
        return
    with library(address) as hand:
        obey_sync(hand)


if __name__ == "__main__":
    main(*sys.argv[1:])
