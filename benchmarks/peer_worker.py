"""Another library at its own work, in an interpreter and an environment of its own. Started by `benchmarks.peers`.

Each line of standard input is a number of rounds; each line of output are the seconds that each round took.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Awaitable, Callable
from typing import Any

NAME = "job"


async def _grelmicro(backend: Any) -> None:
    from grelmicro.sync import Lock

    async with backend:
        lock = Lock(NAME, backend=backend, lease_duration=60)

        async def pair() -> None:
            async with lock:
                pass

        await _serve(pair)


async def grelmicro_on_postgres(address: str) -> None:
    from grelmicro.sync.postgres import PostgresSyncBackend

    await _grelmicro(PostgresSyncBackend(address))


async def grelmicro_on_redis(address: str) -> None:
    from grelmicro.sync.redis import RedisSyncBackend

    await _grelmicro(RedisSyncBackend(address))


async def python_redis_lock(address: str) -> None:
    import redis
    import redis_lock

    lock = redis_lock.Lock(redis.Redis.from_url(address), NAME, expire=60)

    async def pair() -> None:
        lock.acquire()
        lock.release()

    await _serve(pair)


async def redis_py_lock(address: str) -> None:
    import redis

    lock = redis.Redis.from_url(address).lock(NAME, timeout=60)

    async def pair() -> None:
        lock.acquire()
        lock.release()

    await _serve(pair)


async def _serve(pair: Callable[[], Awaitable[None]]) -> None:
    for line in sys.stdin:
        seconds = []
        for _ in range(int(line)):
            begun = time.perf_counter()
            await pair()
            seconds.append(time.perf_counter() - begun)
        sys.stdout.write(json.dumps(seconds) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    asyncio.run(globals()[sys.argv[1]](sys.argv[2]))
