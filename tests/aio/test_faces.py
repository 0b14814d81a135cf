"""Two faces of one client, and what only the asynchronous one has to say."""

from __future__ import annotations

import asyncio
import copy
import gc
import inspect
import pickle
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar

import psycopg
import pytest

import pglease
import pglease.aio
from pglease import (
    AsyncHeldLease,
    AsyncPGLease,
    BackendClosed,
    ConfigurationError,
    FencedError,
    HeldLease,
    MemoryBackend,
    NotAcquired,
    PGLease,
    ReentrantError,
)
from tests.support.worlds import wait_until

PRIMITIVES = {"acquire_many", "leader_election", "lock", "read_write_lock", "semaphore", "task_lock"}
"""Made without asking anybody; what they do is awaited."""


def test_every_public_verb_of_the_client_is_there_and_what_asks_the_store_is_awaited():
    verbs = {name for name, verb in vars(PGLease).items() if callable(verb) and not name.startswith("_")}
    elsewhere = {"check_traits", "forget"}  # the machinery's own

    missing = verbs - set(dir(AsyncPGLease)) - elsewhere
    plain = {
        name for name in verbs & set(dir(AsyncPGLease)) if not inspect.iscoroutinefunction(getattr(AsyncPGLease, name))
    }

    assert missing == set()
    assert (
        plain == {"acquire", "adopt", "singleton_task", "held", "holding", "is_alive", "waiting", "watch"} | PRIMITIVES
    )


def test_everything_a_handle_says_and_does_is_on_both_handles():
    said = {name for name in dir(HeldLease) if not name.startswith("_")}

    assert said == {name for name in dir(AsyncHeldLease) if not name.startswith("_")}
    assert {name for name in said if inspect.iscoroutinefunction(getattr(AsyncHeldLease, name))} == {
        "ensure",
        "renew",
        "release",
        "set_metadata",
        "transfer",
    }


def test_a_guard_is_entered_on_an_asynchronous_connection(dsn):
    async def main() -> None:
        async with (
            AsyncPGLease(dsn) as leases,
            await psycopg.AsyncConnection.connect(dsn) as connection,
            leases.acquire("job", on_lost="log") as lease,
        ):
            await connection.execute("CREATE TABLE report (body text)")
            async with lease.guard(connection):
                await connection.execute("INSERT INTO report VALUES ('kept')")
            await connection.commit()
            fence = lease.fence_sql()
            done = await connection.execute(f"UPDATE report SET body = 'fenced' WHERE {fence.sql}", fence.params)
            assert done.rowcount == 1
            await connection.commit()
            await leases.force_release("job", lease.fencing_token)
            with pytest.raises(FencedError):
                await lease.guard(connection)
            await connection.rollback()

    asyncio.run(main())


@pytest.mark.parametrize("verb", ["try_acquire", "wait_for_lease", "acquire"])
def test_the_arguments_are_those_of_the_other_face(verb):
    ours, theirs = (inspect.signature(getattr(kind, verb)).parameters for kind in (AsyncPGLease, PGLease))

    assert [name for name in theirs if name not in ours] in ([], ["cancel"])
    assert all(ours[name].default == theirs[name].default for name in ours)
    assert [name for name in ours if name not in theirs] == []


def test_both_faces_of_a_client_see_the_same_holds(backend):
    with PGLease(backend) as client:
        leases = AsyncPGLease(client)

        async def main() -> None:
            assert await leases.try_acquire("theirs")
            assert client.try_acquire("ours")
            assert client.try_acquire("theirs") is False
            assert [lease.name for lease in leases.holding()] == ["ours", "theirs"]
            assert leases.held("ours").fencing_token == client.held("ours").fencing_token
            async with leases.acquire("block") as lease:
                assert client.held("block").fencing_token == lease.fencing_token
                assert client.release("block") is True
                assert not lease.held
            assert await leases.release("ours") is True

        asyncio.run(main())
        assert [lease.name for lease in client.holding()] == ["theirs"]


def test_closing_the_face_of_a_client_leaves_the_client_open(backend):
    with PGLease(backend) as client:

        async def main() -> None:
            async with AsyncPGLease(client) as leases:
                await leases.try_acquire("job")

        asyncio.run(main())
        assert client.held("job").held


@pytest.mark.parametrize(
    "argument",
    [
        {"owner_id": "me"},
        {"heartbeat_interval": 1},
        {"on_lease_lost": print},
        {"margin": 1},
        {"schema": "mine"},
        {"pool_size": 7},
        {"observers": [object()]},
    ],
    ids=lambda argument: next(iter(argument)),
)
def test_a_client_has_its_own_arguments_and_others_are_refused(backend, argument):
    with PGLease(backend) as client, pytest.raises(ConfigurationError, match=next(iter(argument))):
        AsyncPGLease(client, **argument)


@pytest.mark.parametrize("nonsense", [None, 7, MemoryBackend, b"memory://"])
def test_what_is_no_store_is_refused(nonsense):
    with pytest.raises(ConfigurationError, match="backend"):
        AsyncPGLease(nonsense)


def test_a_coroutine_function_as_callback_is_refused_with_advice():
    async def on_lost(name: str) -> None: ...

    for kind in (PGLease, AsyncPGLease):
        with pytest.raises(ConfigurationError, match="run_coroutine_threadsafe"):
            kind("memory://", on_lease_lost=on_lost)


def test_from_the_environment(monkeypatch):
    monkeypatch.setenv("PGLEASE_URL", "memory://")

    async def main() -> None:
        async with AsyncPGLease.from_env(owner_id="me") as leases:
            assert await leases.try_acquire("job")
            assert leases.owner_id == "me"
        with pytest.raises(BackendClosed):
            leases.holding()

    asyncio.run(main())


def test_the_module_functions_use_the_default_client():
    async def main() -> None:
        with pglease.configure(MemoryBackend()):
            async with pglease.aio.acquire("job", ttl=60) as lease:
                assert lease
                assert await pglease.aio.try_acquire("job") is False
            assert isinstance(await pglease.aio.wait_for_lease("job", timeout=5), AsyncHeldLease)
            assert pglease.held("job").held
            assert await pglease.aio.release("job") is True

    asyncio.run(main())


def test_handles_of_one_hold_are_equal_and_those_of_others_are_not(leases):
    async def main() -> None:
        first = await leases.wait_for_lease("job")
        other = await leases.wait_for_lease("other")
        assert first == leases.held("job")
        assert {first, leases.held("job"), other} == {first, other}
        assert first != other
        assert first != "job"
        for leak in (pickle.dumps, copy.copy, copy.deepcopy):
            for thing in (first, leases):
                with pytest.raises(TypeError, match="belongs to its process"):
                    leak(thing)
        assert repr(first).startswith("<AsyncHeldLease 'job' token 1, held")
        assert "AsyncPGLease" in repr(leases)

    asyncio.run(main())


def test_the_running_code_is_under_its_lease(leases):
    async def main() -> None:
        async with leases.acquire("job") as lease:
            assert pglease.assert_held("job").fencing_token == lease.fencing_token
            assert await asyncio.create_task(asyncio.to_thread(pglease.current_lease, "job"))
        assert pglease.current_lease() is None

    asyncio.run(main())


def test_a_task_that_waits_for_itself_is_an_error_and_another_task_waits(leases):
    async def main() -> None:
        async with leases.acquire("job"):
            other = asyncio.create_task(leases.wait_for_lease("job", timeout=20, poll_interval=0.05))
            with pytest.raises(ReentrantError):
                await leases.wait_for_lease("job", timeout=5)
        assert (await other).held

    asyncio.run(main())


def test_a_task_cannot_release_what_another_has_meanwhile(leases, backend):
    """Task one's hold lapses, task two takes the name: one's handle ends nothing."""

    async def main() -> None:
        one = await leases.acquire("job", heartbeat=False).__aenter__()
        backend._store.rows["job"].expires_at = backend._store.now()
        async with leases.acquire("job") as two:
            assert two
            assert await one.release() is False
            assert two.held
            assert await two.ensure(10)

    asyncio.run(main())


def test_a_handle_may_be_used_by_any_task_and_any_loop(leases, rival):
    async def take() -> AsyncHeldLease:
        return await leases.acquire("job").__aenter__()

    lease = asyncio.run(take())
    assert asyncio.run(lease.ensure(10)) is True
    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(lambda _: asyncio.run(lease.release()), range(4)))

    assert answers.count(True) == 1
    assert rival.try_acquire("job")


def test_callbacks_run_in_the_context_of_whoever_took_the_lease(backend):
    request: ContextVar[str] = ContextVar("request", default="none")
    heard: dict[str, str] = {}

    async def work(leases: AsyncPGLease, name: str) -> None:
        request.set(f"request {name}")
        lease = await leases.acquire(name, on_lost="log").__aenter__()
        await leases.force_release(name, lease.fencing_token)
        await lease.ensure(1000)

    async def main() -> None:
        async with AsyncPGLease(backend, on_lease_lost=lambda name: heard.setdefault(name, request.get())) as leases:
            await asyncio.gather(*(work(leases, name) for name in ("a", "b")))
            await asyncio.to_thread(wait_until, lambda: len(heard) == 2)

    asyncio.run(main())

    assert heard == {"a": "request a", "b": "request b"}


def test_a_forgotten_handle_is_released_with_a_warning(leases, rival):
    async def main() -> None:
        lease = await leases.acquire("job").__aenter__()
        with pytest.warns(ResourceWarning, match="'job' was dropped without a release"):  # noqa: PT031  # both
            del lease
            gc.collect()

    asyncio.run(main())

    wait_until(lambda: rival.try_acquire("job"))


def test_a_forgotten_client_gives_back_what_it_owned(backend, rival):
    async def main() -> None:
        careless = AsyncPGLease(backend)
        await careless.try_acquire("job", ttl=600)
        with pytest.warns(ResourceWarning, match="dropped while it held 1 lease"):  # noqa: PT031  # both
            del careless
            gc.collect()

    asyncio.run(main())

    wait_until(lambda: rival.try_acquire("job"))


def test_an_asynchronous_generator_that_is_closed_early_gives_its_lease_back(leases, rival):
    async def rows():
        async with leases.acquire("job") as lease:
            assert lease
            for number in range(3):
                yield number

    async def main() -> None:
        reading = rows()
        assert await anext(reading) == 0
        assert rival.try_acquire("job") is False
        await reading.aclose()

    asyncio.run(main())

    wait_until(lambda: rival.try_acquire("job"))


def test_the_body_of_a_block_that_did_not_get_it_can_ask_again(leases, rival):
    async def main() -> None:
        rival.try_acquire("job")
        context = leases.acquire("job")
        async with context as lease:
            assert isinstance(lease, NotAcquired)
        rival.release("job")
        async with context as lease:
            assert lease
            with pytest.raises(ConfigurationError, match="in use"):
                await context.__aenter__()

    asyncio.run(main())


def test_importing_pglease_loads_no_event_loop():
    script = "import sys, pglease; sys.exit('asyncio' in sys.modules or 'concurrent.futures' in sys.modules)"

    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0


def test_the_threads_that_call_are_daemons(leases):
    asyncio.run(leases.list_leases())
    asyncio.run(leases.release("job"))

    calling = [thread for thread in threading.enumerate() if thread.name.startswith(("pglease-asking", "pglease-keep"))]

    assert calling
    assert all(thread.daemon for thread in calling)


def test_both_faces_are_made_with_the_same_arguments():
    assert list(inspect.signature(AsyncPGLease).parameters) == list(inspect.signature(PGLease).parameters)
