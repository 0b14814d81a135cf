"""Questions that a loop sends and hears the answers to, without a thread."""

from __future__ import annotations

import asyncio
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from pglease import AsyncPGLease, LeaseLostError, PGLease, loops
from pglease.callers import Callers
from pglease.testing.local_postgres import LocalPostgres
from tests.support.worlds import TABLE, execute, is_free, wait_until


@pytest.fixture
def ours(dsn):
    with PGLease(dsn, "ours") as client:
        client.get_lease("job")
        yield AsyncPGLease(client)


@pytest.fixture
def by_thread(monkeypatch):
    """Note what threads are asked to do."""
    asked = []
    submit = Callers.submit
    monkeypatch.setattr(Callers, "submit", lambda self, function: asked.append(function) or submit(self, function))
    return asked


def descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def test_nothing_takes_a_thread_while_all_goes_well(ours, by_thread):
    async def main() -> None:
        for _ in range(5):
            async with ours.acquire("job", raise_on_failure=True):
                assert await ours.try_acquire("job") is False
            assert await ours.try_acquire("job")
            assert await ours.release("job")
            assert await ours.release("job") is False
            lease = await ours.wait_for_lease("job")
            assert await lease.release()

    asyncio.run(main())

    assert by_thread == []


def test_a_loop_whose_answers_are_all_there_at_once_gives_others_their_turn(ours, monkeypatch):
    monkeypatch.setattr("pglease.backends.postgres_begun.Begun.arrived", _at_once)

    async def main() -> int:
        turns = 0

        async def count() -> None:
            nonlocal turns
            while True:
                turns += 1
                await asyncio.sleep(0)

        counting = asyncio.create_task(count())
        await asyncio.sleep(0)
        for _ in range(loops.MOST_AT_ONCE):
            assert await ours.try_acquire("job")
            await ours.release("job")
        counting.cancel()
        return turns

    assert asyncio.run(main()) >= 2


def _at_once(self) -> bool:
    """Wait here: what a server that answers at once looks like."""
    while self._asking is not None:
        self._go_on(1)
    return True


def test_threads_and_loops_share_connections_and_leave_no_descriptor(dsn):
    with PGLease(dsn, "ours") as client:
        ours = AsyncPGLease(client)
        client.get_lease("job")

        async def take_turns(times: int) -> None:
            for _ in range(times):
                async with ours.acquire(threading.current_thread().name, raise_on_failure=True):
                    await asyncio.sleep(0)

        def everything(_: int) -> None:
            asyncio.run(take_turns(5))
            with client.acquire(threading.current_thread().name, raise_on_failure=True):
                pass

        with ThreadPoolExecutor(3) as pool:
            list(pool.map(everything, range(6)))
        before = descriptors()
        with ThreadPoolExecutor(3) as pool:
            list(pool.map(everything, range(30)))
        assert descriptors() <= before + 3
    wait_until(lambda: descriptors() < before)  # nothing is left of closed connections either


def test_a_loop_that_goes_on_watches_no_connection_that_threads_use_or_that_was_closed(ours):
    async def main() -> None:
        loop = asyncio.get_running_loop()
        watched = len(loop._selector.get_map())
        for _ in range(5):
            assert await ours.try_acquire("job")
            await ours.release("job")
        with_ours = len(loop._selector.get_map())
        assert with_ours > watched

        for _ in range(10):
            await asyncio.to_thread(ours.client.get_lease, "job")
        assert len(loop._selector.get_map()) <= watched + 1  # what threads use rouses the loop once

        assert await ours.try_acquire("job")
        await asyncio.to_thread(ours.client.close)
        await asyncio.to_thread(wait_until, lambda: len(loop._selector.get_map()) <= watched + 1)

    asyncio.run(main())


@pytest.mark.parametrize("way", ["acquire", "release"])
def test_a_loop_that_is_closed_under_way_leaves_nothing_behind(ours, dsn, proxy, way):
    with PGLease(proxy.through(dsn), "distant") as client:
        client.get_lease("job")
        distant = AsyncPGLease(client)
        if way == "release":
            assert client.try_acquire("job")
        proxy.delay(0.2)
        loop = asyncio.new_event_loop()
        asked = distant.try_acquire("job") if way == "acquire" else distant.release("job")
        task = loop.create_task(asked)
        loop.run_until_complete(asyncio.sleep(0.05))
        assert not task.done()
        loop.close()

        task._log_destroy_pending = False
        asked.close()

        wait_until(lambda: is_free(dsn, "job"))


def test_a_cancelled_release_is_heard_to_its_end(ours, dsn, proxy):
    with PGLease(proxy.through(dsn), "distant") as client:
        client.get_lease("job")
        distant = AsyncPGLease(client)

        async def main() -> None:
            assert await distant.try_acquire("job")
            proxy.delay(0.2)
            releasing = asyncio.create_task(distant.release("job"))
            for _ in range(3):
                await asyncio.sleep(0.02)
                releasing.cancel()
            with pytest.raises(asyncio.CancelledError):
                await releasing
            assert client.held("job") is None
            assert execute(dsn, f"SELECT 1 FROM {TABLE} WHERE expires_at > clock_timestamp()") == []

        asyncio.run(main())


def test_where_a_row_is_locked_leaving_a_block_goes_on_on_a_thread(ours, dsn, by_thread):
    async def main() -> None:
        import psycopg

        async with ours.acquire("job", raise_on_failure=True):
            link = await psycopg.AsyncConnection.connect(dsn)
            await link.execute(f"SELECT 1 FROM {TABLE} FOR UPDATE")
            asyncio.get_running_loop().call_later(0.1, lambda: asyncio.ensure_future(link.close()))
        assert len(by_thread) == 1
        assert await ours.try_acquire("job")

    asyncio.run(main())


def test_where_no_thread_gets_free_for_a_locked_row_the_background_goes_on(ours, dsn, monkeypatch):
    monkeypatch.setattr("pglease.taking.RELEASE_BOX", 0.1)
    stuck, go_on = [], threading.Event()

    async def main() -> None:
        import psycopg

        link = await psycopg.AsyncConnection.connect(dsn)
        async with ours.acquire("job", raise_on_failure=True):
            await link.execute(f"SELECT 1 FROM {TABLE} FOR UPDATE")
            stuck.extend(loops._keeping().submit(lambda: go_on.wait(20)) for _ in range(loops.MOST_KEEPERS))
        assert not any(call.done() for call in stuck)
        await link.close()
        go_on.set()
        await asyncio.to_thread(wait_until, lambda: is_free(dsn, "job"))

    asyncio.run(main())


def test_a_hold_that_was_lost_is_told_of_on_leaving(ours, dsn):
    async def main() -> None:
        with pytest.raises(LeaseLostError, match="an operator ended it"):
            async with ours.acquire("job", raise_on_failure=True) as lease:
                execute(
                    dsn, f"UPDATE {TABLE} SET lease_id = NULL, expires_at = clock_timestamp() WHERE task_name = 'job'"
                )
                assert lease.held

    asyncio.run(main())


def test_tasks_that_take_turns_on_one_connection_all_hear_their_answers(dsn):
    with PGLease(dsn, "ours", pool_size=1) as client:
        ours = AsyncPGLease(client)

        async def work(number: int) -> None:
            for _ in range(20):
                async with ours.acquire(f"job-{number}", raise_on_failure=True):
                    pass

        async def main() -> None:
            async with asyncio.timeout(30):
                await asyncio.gather(*(work(number) for number in range(5)))

        asyncio.run(main())


def test_what_cannot_be_read_is_told_to_whoever_waits_and_given_back(ours, dsn, monkeypatch):
    def read(rows: object) -> None:
        raise ZeroDivisionError

    async def main() -> None:
        assert await ours.try_acquire("job")
        monkeypatch.setattr("pglease.backends.postgres.answer_in", read)
        with pytest.raises(ZeroDivisionError):
            await ours.try_acquire("another")
        monkeypatch.undo()
        await asyncio.to_thread(wait_until, lambda: is_free(dsn, "another"))  # nobody has it, so it is given back

    asyncio.run(main())


def test_what_cannot_be_read_after_a_cancellation_disturbs_nobody(ours, dsn, monkeypatch, caplog):
    async def main() -> None:
        assert await ours.try_acquire("job")
        asking = asyncio.create_task(ours.try_acquire("another"))
        looks = []

        def look(self: object) -> bool:
            looks.append(self)
            if len(looks) == 1:
                return False  # it is waited for
            asking.cancel()
            raise ZeroDivisionError

        monkeypatch.setattr("pglease.backends.postgres_begun.Begun.arrived", look)
        with pytest.raises(asyncio.CancelledError):
            await asking
        monkeypatch.undo()
        await asyncio.to_thread(wait_until, lambda: is_free(dsn, "another"))

    asyncio.run(main())

    assert "Exception in callback" not in caplog.text


@pytest.mark.parametrize("trouble", [OSError("no descriptor is left"), NotImplementedError("no readers")])
def test_a_loop_that_cannot_watch_has_a_thread_wait(ours, by_thread, monkeypatch, trouble):
    def refuse(*_: object) -> None:
        raise trouble

    async def main() -> None:
        monkeypatch.setattr(asyncio.get_running_loop(), "add_reader", refuse)
        for _ in range(50):
            async with ours.acquire("job", raise_on_failure=True):
                pass

    before = descriptors()
    asyncio.run(main())

    assert by_thread  # at least one answer was not there at once
    assert descriptors() <= before + 8  # connections, and no copy for each try


@pytest.mark.needs("uvloop")
def test_uvloop_hears_by_itself(ours, by_thread):
    import uvloop

    async def main() -> None:
        for _ in range(20):
            async with ours.acquire("job", raise_on_failure=True):
                pass

    uvloop.run(main())

    assert by_thread == []


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system cannot fork")
@pytest.mark.parametrize("way", ["acquire", "release"])
def test_a_forked_child_that_ends_the_parents_task_gives_nothing_back(dsn, proxy, way):
    with PGLease(proxy.through(dsn), "distant") as client:
        client.get_lease("job")
        distant = AsyncPGLease(client)

        async def main() -> bool:
            if way == "release":
                assert await distant.try_acquire("job")
            proxy.delay(0.3)
            task = asyncio.create_task(distant.try_acquire("job") if way == "acquire" else distant.release("job"))
            await asyncio.sleep(0.05)
            assert not task.done()
            pid = os.fork()
            if pid == 0:
                task.get_coro().close()
                working = [
                    each.name for each in threading.enumerate() if each.name.startswith(("pglease-g", "pglease-k"))
                ]
                os._exit(len(working))  # nobody was asked to finish or to give back anything
            _, status = await asyncio.to_thread(os.waitpid, pid, 0)
            assert os.waitstatus_to_exitcode(status) == 0
            return await task

        assert asyncio.run(main())
        assert is_free(dsn, "job") == (way == "release")


def test_a_server_that_restarts_under_many_tasks_loses_no_answer():
    with LocalPostgres() as server, PGLease(server.dsn, "ours") as client:
        ours = AsyncPGLease(client)

        async def work(number: int) -> int:
            done = 0
            while not over.is_set():
                async with ours.acquire(f"job-{number}", wait=30, raise_on_failure=True):
                    done += 1
            return done

        async def main() -> list[int]:
            tasks = [asyncio.create_task(work(number)) for number in range(6)]
            await asyncio.to_thread(server.restart)
            await asyncio.sleep(0.3)
            over.set()
            return await asyncio.gather(*tasks)

        over = threading.Event()
        client.get_lease("job")
        assert all(asyncio.run(main()))
        wait_until(lambda: all(is_free(server.dsn, f"job-{number}") for number in range(6)))
