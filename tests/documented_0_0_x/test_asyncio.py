"""Asyncio: the FastAPI example and the section on `AsyncPGLease`."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import psycopg
import pytest

from pglease import BackendClosed
from tests.documented_0_0_x.workers import Worker
from tests.support.worlds import wait_until

SUPPORT = """
    import asyncio
    from pglease import AsyncPGLease

    async def main():
        async with AsyncPGLease("postgresql://user:pass@localhost/db") as pglease:
            async with pglease.acquire("my-task", ttl=60) as acquired:
                if acquired:
                    await do_async_work()

            # Or wait for the lease asynchronously
            await pglease.wait_for_lease("my-task", ttl=60, timeout=120)
            await do_async_work()

    asyncio.run(main())
"""


def can_await(worker: Worker, *functions: str, meanwhile: Any = lambda: None) -> Worker:
    """Define coroutine functions that the snippets await."""
    worker.can(*functions, meanwhile=meanwhile)

    def awaited(plain: Any) -> Any:
        async def function() -> None:
            await asyncio.to_thread(plain)

        return function

    worker.names.update((name, awaited(worker.names[name])) for name in functions)
    return worker


def test_the_work_is_done_under_the_lease_whether_it_was_asked_or_waited_for(here: Worker, there: Worker) -> None:
    refused: list[bool] = []

    can_await(here, "do_async_work", meanwhile=lambda: refused.append(there.pglease.try_acquire("my-task"))).run(
        SUPPORT
    )

    assert here.did == ["do_async_work"] * 2
    assert refused == [False, False]
    assert there.pglease.try_acquire("my-task") is True, "leaving the client gives it back"


def test_who_does_not_get_it_waits_for_it_without_doing_the_first_part(here: Worker, there: Worker) -> None:
    there.pglease.try_acquire("my-task", ttl=60)
    threading.Timer(0.5, there.pglease.release, ["my-task"]).start()

    can_await(here, "do_async_work").run(SUPPORT)

    assert here.did == ["do_async_work"]


def test_the_loop_goes_on_while_the_store_is_asked_and_while_one_waits(here: Worker, there: Worker) -> None:
    """Dispatched "so they never block the event loop"; "the underlying heartbeat threads continue to run"."""
    there.pglease.try_acquire("my-task", ttl=60)
    turns = 0
    waiting = SUPPORT.replace("asyncio.run(main())", "")
    can_await(here, "do_async_work").run(waiting)

    async def both() -> None:
        nonlocal turns
        working = asyncio.create_task(here.names["main"]())
        while not working.done():
            await asyncio.sleep(0.01)
            turns += 1
            if turns == 20:
                await asyncio.to_thread(there.pglease.release, "my-task")
        await working

    asyncio.run(both())

    assert turns >= 20
    assert here.did == ["do_async_work"]


FASTAPI = """
    # app/main.py
    from pglease import AsyncPGLease  # Use async version
    import os

    pglease = None

    @app.on_event("startup")
    async def startup():
        global pglease
        pglease = AsyncPGLease(os.environ['DATABASE_URL'])

    @app.on_event("shutdown")
    async def shutdown():
        await pglease.close()

    @app.post("/tasks/sync")
    async def sync_task():
        async with pglease.acquire("data-sync", ttl=600) as acquired:
            if acquired:
                await perform_sync()
                return {"status": "completed"}
            return {"status": "skipped"}
"""


class App:
    """What of FastAPI the example needs: it keeps functions."""

    def _keep(self, _what: str) -> Any:
        return lambda function: function

    on_event = post = _keep


def test_of_two_replicas_one_syncs_and_the_other_skips(
    here: Worker, there: Worker, dsn: str, monkeypatch: pytest.MonkeyPatch, operator: psycopg.Connection
) -> None:
    monkeypatch.setenv("DATABASE_URL", dsn)
    replicas = [can_await(here, "perform_sync"), can_await(there, "perform_sync")]
    there.names["pglease"].close()
    gate = asyncio.Event()

    async def main() -> list[dict[str, str]]:
        for replica in replicas:
            replica.names["app"] = App()
            replica.run(FASTAPI)
            await replica.names["startup"]()

            async def perform_sync(replica: Worker = replica) -> None:
                replica.did.append("perform_sync")
                await gate.wait()

            replica.names["perform_sync"] = perform_sync
        first = asyncio.create_task(replicas[0].names["sync_task"]())
        await asyncio.to_thread(wait_until, lambda: here.did)
        second = await replicas[1].names["sync_task"]()
        gate.set()
        answers = [await first, second]
        for replica in replicas:
            await replica.names["shutdown"]()
        with pytest.raises(BackendClosed):
            await replicas[0].names["sync_task"]()
        return answers

    assert asyncio.run(main()) == [{"status": "completed"}, {"status": "skipped"}]
    assert (here.did, there.did) == (["perform_sync"], [])
    for replica in replicas:
        del replica.names["pglease"]
    assert operator.execute("SELECT count(*) FROM pglease_leases WHERE expires_at > now()").fetchone() == (0,)
