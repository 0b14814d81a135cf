"""Event loops: many, of several makes, gone too early; and programs that end however they like."""

from __future__ import annotations

import asyncio
import gc
import subprocess
import sys
import textwrap
import threading
import time
import warnings
from concurrent.futures import ThreadPoolExecutor

import anyio
import pytest

from pglease import AsyncPGLease, BackendClosed, ConfigurationError, PGLease, loops
from tests.support.worlds import TABLE, Stopwatch, execute, is_free, wait_until


async def take_turns(leases: AsyncPGLease, times: int = 5) -> int:
    for _ in range(times):
        async with leases.acquire("job", raise_on_failure=True, wait=30):
            await asyncio.sleep(0)
    return times


def test_one_client_serves_many_loops_at_once_and_one_after_another(leases):
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(lambda _: asyncio.run(take_turns(leases)), range(8))) == [5] * 8

    assert leases.client.get_lease("job").fencing_token == 40


@pytest.mark.needs("uvloop")
def test_uvloop_will_do(leases, rival):
    import uvloop

    async def main() -> None:
        assert await take_turns(leases) == 5
        rival.try_acquire("job")
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.1):
                await leases.wait_for_lease("job", timeout=None)
        with pytest.raises(Exception, match="was lost"):
            async with leases.acquire("lost", ttl=0.5, heartbeat=False, on_lost="cancel") as lease:
                assert await lease.lost.wait(0.01) is False
                await asyncio.sleep(60)
        async with leases.acquire("sleepy") as lease:
            waiting = asyncio.create_task(lease.lost.wait())
            await asyncio.sleep(0)
            waiting.cancel()

    uvloop.run(main())


# -- waiting -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("names", [1, 1000], ids=["one name", "a thousand names"])
def test_a_thousand_waiting_tasks_need_no_more_threads_than_the_few_that_call(leases, rival, names):
    for number in range(names):
        rival.try_acquire(f"job-{number}", heartbeat=False)

    async def main() -> None:
        await leases.list_leases()
        tasks = [
            asyncio.create_task(leases.wait_for_lease(f"job-{n % names}", timeout=None, poll_interval=0.4))
            for n in range(1000)
        ]
        before, most = threading.active_count(), 0
        for _ in range(20):
            await asyncio.sleep(0.05)
            most = max(most, threading.active_count())
        assert most <= before + loops.MOST_CALLS + 4  # the client's own: heartbeat, watchdog, whoever listens
        assert not any(task.done() for task in tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    asyncio.run(main())


def test_closing_ends_every_wait(leases, rival):
    rival.try_acquire("job")

    async def main() -> None:
        waiting = [asyncio.create_task(leases.wait_for_lease("job", timeout=None, poll_interval=60)) for _ in range(50)]
        await asyncio.sleep(0.1)
        await leases.close()  # of a client that is not its own: nothing
        leases.client.close()
        answers = await asyncio.gather(*waiting, return_exceptions=True)
        assert {type(answer) for answer in answers} == {BackendClosed}

    watch = Stopwatch()
    asyncio.run(main())

    assert watch.seconds < 20


def test_a_store_that_is_silent_blocks_no_loop(dsn, proxy):
    with PGLease(proxy.through(dsn), connect_timeout=2) as client:
        leases = AsyncPGLease(client)

        async def main() -> int:
            await leases.list_leases()
            proxy.black_hole()
            asking = [asyncio.create_task(leases.get_lease("job")) for _ in range(5)]
            turns = 0
            while not all(task.done() for task in asking):
                await asyncio.sleep(0.01)
                turns += 1
            await asyncio.gather(*asking, return_exceptions=True)
            return turns

        assert asyncio.run(main()) > 20
        proxy.pass_through()


def test_a_loop_whose_own_executor_is_busy_or_gone_takes_and_keeps_leases_all_the_same(leases, rival):
    done = threading.Event()

    async def main() -> None:
        loop = asyncio.get_running_loop()
        loop.set_default_executor(ThreadPoolExecutor(1))
        blocked = loop.run_in_executor(None, done.wait, 60)
        async with asyncio.timeout(30), leases.acquire("job", ttl=1.5) as lease:
            await asyncio.sleep(2)  # longer than the ttl
            assert lease.held
            assert rival.try_acquire("job") is False
        done.set()
        await blocked
        await loop.shutdown_default_executor()
        assert await leases.try_acquire("job")
        assert await leases.release("job")

    try:
        asyncio.run(main())
    finally:
        done.set()


# -- other houses ------------------------------------------------------------------------------------------------------


def test_anyio_on_asyncio_will_do(leases, rival):
    async def main() -> None:
        assert await take_turns(leases) == 5
        rival.try_acquire("taken")
        with anyio.move_on_after(0.05) as scope:
            await leases.wait_for_lease("taken", timeout=None)
        assert scope.cancelled_caught
        with anyio.move_on_after(0.05) as scope:
            async with leases.acquire("job"):
                await anyio.sleep_forever()
        assert scope.cancelled_caught
        assert rival.try_acquire("job"), "it was released though its scope cancels again and again"
        with anyio.fail_after(30):
            async with anyio.create_task_group() as group:
                for _ in range(5):
                    group.start_soon(leases.try_acquire, "crowd")
        assert leases.held("crowd").held

    anyio.run(main)


@pytest.mark.parametrize("verb", ["try_acquire", "wait_for_lease", "release", "renew", "get_lease"])
def test_trio_is_refused_with_one_sentence_and_nothing_is_asked(leases, rival, verb):
    async def main() -> None:
        with pytest.raises(ConfigurationError, match=r"asyncio event loop.*under trio use PGLease in") as caught:
            await getattr(leases, verb)("job")
        assert len(caught.value.problems) == 1
        with pytest.raises(ConfigurationError, match="trio"):
            async with leases.acquire("job"):
                pytest.fail("a body under trio")

    anyio.run(main, backend="trio")

    assert rival.get_lease("job") is None


# -- loops that end too early ------------------------------------------------------------------------------------------


def test_a_loop_that_is_closed_with_leases_held_takes_nothing_with_it(leases, rival):
    loop = asyncio.new_event_loop()
    loop.run_until_complete(leases.try_acquire("job", ttl=1))
    loop.close()

    assert leases.held("job").held
    assert asyncio.run(leases.release("job")) is True
    assert rival.try_acquire("job")


def test_a_body_that_its_loop_never_finished_gives_its_lease_back_when_it_is_forgotten(leases, rival):
    async def work() -> None:
        async with leases.acquire("job"):
            await asyncio.get_running_loop().create_future()

    loop = asyncio.new_event_loop()
    loop.set_exception_handler(lambda *_: None)  # asyncio's own complaint about the task
    task = loop.create_task(work())
    loop.run_until_complete(asyncio.wait([task], timeout=0.2))
    assert leases.held("job").held
    loop.close()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)  # the handle may be found before the body that has it
        del task
        gc.collect()

    wait_until(lambda: rival.try_acquire("job"))


# -- whole programs ----------------------------------------------------------------------------------------------------


def program(script: str, *arguments: str, within: float = 60.0) -> tuple[int, str, float]:
    """Run a program in development mode with warnings as errors; return its code, complaints and seconds at the end."""
    head = "import asyncio, sys, time\nfrom pglease import *\ndsn = sys.argv[1]\n"
    tail = "\nprint(time.time())\n"
    done = subprocess.run(
        [sys.executable, "-X", "dev", "-W", "error", "-c", head + textwrap.dedent(script) + tail, *arguments],
        capture_output=True,
        text=True,
        timeout=within,
        check=False,
    )
    ended = time.time() - float(done.stdout.split()[-1]) if done.stdout.split() else 0.0
    return done.returncode, done.stderr, ended


ENDINGS = {
    "inside acquire": """
        leases = AsyncPGLease(dsn)
        async def use():
            async with leases.acquire("job", ttl=600):
                await asyncio.sleep(60)
        async def main():
            task = asyncio.create_task(use())
            await asyncio.sleep(0)
        asyncio.run(main())
    """,
    "inside a body": """
        leases = AsyncPGLease(dsn)
        async def use():
            async with leases.acquire("job", ttl=600, on_lost="cancel"):
                entered.set()
                await asyncio.sleep(60)
        async def main():
            global entered
            entered = asyncio.Event()
            task = asyncio.create_task(use())
            await entered.wait()
        asyncio.run(main())
    """,
    "with a lease of the client": """
        leases = AsyncPGLease(dsn)
        asyncio.run(leases.try_acquire("job", ttl=600))
    """,
    "with a lease and its loop closed": """
        leases = AsyncPGLease(dsn)
        loop = asyncio.new_event_loop()
        loop.run_until_complete(leases.wait_for_lease("job", ttl=600))
        loop.close()
    """,
    "while waiting": """
        other = PGLease(dsn)
        other.try_acquire("job", ttl=600)
        leases = AsyncPGLease(dsn)
        async def main():
            tasks = [asyncio.create_task(leases.wait_for_lease("job", timeout=None)) for _ in range(20)]
            await asyncio.sleep(0.2)
        asyncio.run(main())
    """,
    "after a time-out": """
        async def main():
            async with AsyncPGLease(dsn) as leases:
                async with leases.acquire("job", ttl=600):
                    try:
                        async with asyncio.timeout(0.05):
                            await leases.wait_for_lease("other job", timeout=None)
                            await asyncio.sleep(60)
                    except TimeoutError:
                        pass
        asyncio.run(main())
    """,
    "by an error": """
        async def main():
            async with AsyncPGLease(dsn) as leases:
                async with leases.acquire("job", ttl=600):
                    raise SystemExit(0)
        try:
            asyncio.run(main())
        except SystemExit:
            pass
    """,
}


def without_slowness(complaints: str) -> str:
    """Leave out what the development mode says about a busy machine."""
    return "".join(line for line in complaints.splitlines(keepends=True) if not line.startswith("Executing <"))


@pytest.mark.parametrize("script", ENDINGS.values(), ids=ENDINGS)
def test_however_a_program_ends_it_leaves_no_lease_and_says_nothing(dsn, script):
    code, complaints, _ = program(script, dsn)

    assert (code, without_slowness(complaints)) == (0, "")
    wait_until(lambda: execute(dsn, f"SELECT to_regclass('{TABLE}')") == [(None,)] or is_free(dsn, "job"))


def test_a_program_that_ends_without_python_hearing_of_it_holds_its_lease_for_no_longer_than_the_ttl(dsn):
    """`os._exit` runs no finalizer: nothing is released, and nothing is left behind that would renew."""
    script = """
        import os
        async def main():
            async with AsyncPGLease(dsn) as leases:
                async with leases.acquire("job", ttl=1.5):
                    await asyncio.sleep(2)  # it was renewed
                    os._exit(3)
        asyncio.run(main())
    """
    code, complaints, _ = program(script, dsn)

    assert (code, without_slowness(complaints)) == (3, "")
    ((left,),) = execute(dsn, f"SELECT extract(epoch FROM expires_at - clock_timestamp())::float8 FROM {TABLE}")
    assert left < 1.5
    wait_until(lambda: is_free(dsn, "job"))


STUBBORN = {
    "swallows its cancellation": """
        while True:
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                pass
    """,
    "blocks the loop": "time.sleep(60)",
}


@pytest.mark.parametrize("body", STUBBORN.values(), ids=STUBBORN)
def test_a_process_whose_body_heeds_nothing_can_be_ended_by_the_loss(dsn, body):
    script = f"""
leases = AsyncPGLease(dsn)
async def use():
    async with leases.acquire("job", ttl=600, on_lost="exit") as lease:
        PGLease(dsn).force_release("job", lease.fencing_token)
        leases.client.heartbeat_manager.try_to_extend(lease._lease._hold)  # it hears of that now and not in 200 s
{textwrap.indent(textwrap.dedent(body), " " * 8)}
asyncio.run(use())
"""

    code, complaints, _ = program(script, dsn)

    assert code == 76, complaints


def test_a_program_that_gave_up_on_a_silent_store_ends(dsn, proxy):
    """`asyncio.run` comes to its end, and so does the process: no thread is waited for that waits for the store."""
    script = """
        leases = AsyncPGLease(dsn)
        async def main():
            await leases.try_acquire("job", ttl=60)
            print("ready", flush=True); sys.stdin.readline()
            for verb in (leases.get_lease, leases.release, leases.try_acquire):
                try:
                    await asyncio.wait_for(verb("job"), 0.2)
                except TimeoutError:
                    pass
            asyncio.create_task(leases.wait_for_lease("other", timeout=None))
            await asyncio.sleep(0.1)
        asyncio.run(main())
        print("done", flush=True)
    """
    head = "import asyncio, sys\nfrom pglease import *\ndsn = sys.argv[1]\n"
    arguments = [sys.executable, "-X", "dev", "-W", "error", "-c", head + textwrap.dedent(script), proxy.through(dsn)]
    with subprocess.Popen(arguments, stdin=-1, stdout=-1, stderr=-1, text=True) as process:
        try:
            assert process.stdout.readline() == "ready\n"
            proxy.black_hole()
            watch = Stopwatch()
            process.stdin.write("\n")
            process.stdin.flush()
            assert process.stdout.readline() == "done\n"
            assert watch.seconds < 15
            _, complaints = process.communicate(timeout=30)
            assert watch.seconds < 30
        finally:
            process.kill()
    assert process.returncode == 0
    assert [line for line in complaints.splitlines() if "Warning" in line or "Task" in line] == []
