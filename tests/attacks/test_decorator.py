"""`singleton_task`: one call at a time, for as long as the body really runs."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest

from pglease import AcquisitionError, ConfigurationError, PGLease
from tests.attacks.world import all_at_once


def test_of_six_threads_one_runs(leases: PGLease) -> None:
    gate = threading.Barrier(6)

    @leases.singleton_task("job", ttl=30)
    def task() -> str:
        time.sleep(0.5)
        return "ran"

    def call() -> str | None:
        gate.wait(20)
        return task()

    assert sorted(map(str, all_at_once([call] * 6))) == ["None"] * 5 + ["ran"]


def test_a_coroutine_function_holds_the_lease_until_its_end(leases: PGLease, rival: PGLease) -> None:
    seen: list[bool] = []

    @leases.singleton_task("job", ttl=3)
    async def task() -> str:
        for _ in range(20):
            seen.append(await asyncio.to_thread(rival.try_acquire, "job"))
            await asyncio.sleep(0.2)
        return "ran"

    assert asyncio.run(task()) == "ran"
    assert seen == [False] * 20
    assert rival.try_acquire("job")


def test_of_five_tasks_of_a_loop_one_runs_and_the_others_answer_none(leases: PGLease) -> None:
    @leases.singleton_task("job", ttl=30)
    async def task() -> str:
        await asyncio.sleep(0.5)
        return "ran"

    async def all_of_them() -> list[str | None]:
        return await asyncio.gather(*(task() for _ in range(5)))

    assert sorted(map(str, asyncio.run(all_of_them()))) == ["None"] * 4 + ["ran"]


def test_a_cancelled_task_leaves_no_lease_behind(leases: PGLease, rival: PGLease) -> None:
    @leases.singleton_task("job-{seconds}", ttl=60)
    async def task(seconds: float) -> None:
        await asyncio.sleep(60)

    async def cancel_after(seconds: float) -> None:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(task(seconds), seconds)

    for seconds in (0.0, 0.0005, 0.001, 0.002, 0.004, 0.2):
        asyncio.run(cancel_after(seconds))

    for lease in leases.list_leases():  # those whose grant is on its way back
        assert rival.wait_for_lease(lease.name, ttl=60, timeout=5, poll_interval=0.02)
    assert leases.holding() == []


def test_generators_are_refused_with_advice(leases: PGLease) -> None:
    def generator():
        yield 1

    async def async_generator():
        yield 1

    for function in (generator, async_generator):
        with pytest.raises(ConfigurationError, match="acquire"):
            leases.singleton_task("job")(function)


def test_methods_names_and_results_are_kept(leases: PGLease, rival: PGLease) -> None:
    class Report:
        """One for each tenant."""

        @leases.singleton_task("report:{tenant}", ttl=30)
        def build(self, tenant: int, *, scale: int = 1) -> int:
            """Build it."""
            return tenant * scale

    assert (Report.build.__name__, Report.build.__doc__) == ("build", "Build it.")
    assert rival.try_acquire("report:7", ttl=30)
    assert Report().build(7) is None
    assert Report().build(8, scale=2) == 16


def test_a_skipped_call_may_raise_instead(leases: PGLease, rival: PGLease) -> None:
    assert rival.try_acquire("job", ttl=30)

    @leases.singleton_task("job", ttl=30, skip_if_locked=False)
    def task() -> None:
        pytest.fail("it is held elsewhere")

    with pytest.raises(AcquisitionError) as caught:
        task()
    assert (caught.value.name, caught.value.held_by) == ("job", "rival")


def test_the_error_of_a_task_is_its_callers_and_the_lease_is_free(leases: PGLease, rival: PGLease) -> None:
    @leases.singleton_task("job", ttl=30)
    def task() -> None:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        task()

    assert rival.try_acquire("job")
