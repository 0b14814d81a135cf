"""`singleton_task`: one call at a time runs, whatever is decorated."""

from __future__ import annotations

import asyncio
import functools
import inspect
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from pglease import (
    AcquireTimeout,
    AcquisitionError,
    ConfigurationError,
    LeaseLostError,
    NotAcquired,
    ReentrantError,
    current_lease,
)
from tests.support.worlds import Stopwatch, wait_until

# -- functions ---------------------------------------------------------------------------------------------------------


def test_a_call_holds_the_lease_and_returns_what_the_function_returns(leases, rival):
    @leases.singleton_task("job", ttl="5m", min_hold=0)
    def task(a: int, *, b: int) -> tuple[int, int, bool]:
        return a, b, rival.try_acquire("job")

    assert task(1, b=2) == (1, 2, False)
    assert rival.try_acquire("job") is True
    assert leases.holding() == []


def test_a_call_that_does_not_get_it_is_skipped(leases, rival):
    ran: list[int] = []
    task = leases.singleton_task("job")(ran.append)
    rival.try_acquire("job")

    assert task(1) is None
    assert ran == []
    rival.release("job")
    task(2)
    assert ran == [2]


@pytest.mark.parametrize("value", ["busy", 0, False, [], {"status": 409}])
def test_a_skipped_call_returns_what_on_skip_is(leases, rival, value):
    rival.try_acquire("job")

    assert leases.singleton_task("job", on_skip=value)(lambda: "ran")() is value


def test_a_callable_on_skip_is_told_who_has_it(leases, rival):
    told: list[NotAcquired] = []

    def on_skip(refused: NotAcquired) -> str:
        told.append(refused)
        return f"{refused.held_by} has {refused.name}"

    rival.try_acquire("job")

    assert leases.singleton_task("job", on_skip=on_skip)(lambda: "ran")() == "rival has job"
    assert isinstance(told[0], NotAcquired)


def test_a_call_may_raise_instead_of_being_skipped(leases, rival):
    task = leases.singleton_task("job", skip_if_locked=False)(lambda: "ran")
    rival.try_acquire("job")

    with pytest.raises(AcquisitionError, match="'rival'") as caught:
        task()

    assert (caught.value.name, caught.value.held_by) == ("job", "rival")
    rival.release("job")
    assert task() == "ran"


def test_a_call_may_wait_for_its_turn(leases, rival):
    task = leases.singleton_task("job", wait=10)(lambda: "ran")
    rival.try_acquire("job")
    threading.Timer(0.1, rival.release, ["job"]).start()

    assert task() == "ran"


def test_a_wait_in_vain_is_skipped_or_raised(leases, rival):
    rival.try_acquire("job")
    watch = Stopwatch()

    assert leases.singleton_task("job", wait=1)(lambda: "ran")() is None
    assert watch.seconds >= 0.9
    with pytest.raises(AcquireTimeout):
        leases.singleton_task("job", skip_if_locked=False, wait=1)(lambda: "ran")()


def test_a_call_inside_a_call_is_simply_skipped_and_a_waiting_one_is_an_error(leases):
    @leases.singleton_task("job")
    def outer() -> object:
        return inner()

    inner = leases.singleton_task("job")(lambda: "ran")
    assert outer() is None

    inner = leases.singleton_task("job", wait=5)(lambda: "ran")
    with pytest.raises(ReentrantError):
        outer()


def test_min_hold_makes_it_one_call_a_period(leases, rival):
    task = leases.singleton_task("job", min_hold=30)(lambda: "ran")

    assert task() == "ran"
    assert task() is None
    assert rival.singleton_task("job")(lambda: "ran")() is None


def test_an_error_comes_out_and_the_lease_is_freed(leases, rival):
    @leases.singleton_task("job")
    def task() -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        task()

    assert rival.try_acquire("job") is True


def test_a_call_that_lost_its_lease_does_not_return_as_if_nothing_had_been(leases, store):
    @leases.singleton_task("job")
    def task() -> str:
        store.lapse("job")
        return "done"

    with pytest.raises(LeaseLostError):
        task()


def test_max_hold_applies(leases):
    @leases.singleton_task("job", ttl=2, max_hold=0.2)
    def task() -> None:
        assert leases.held("job").lost.wait(5)

    with pytest.raises(LeaseLostError) as caught:
        task()

    assert caught.value.reason == "max_hold"


def test_of_many_threads_one_runs_at_a_time(leases):
    inside, most, ran = 0, 0, 0

    @leases.singleton_task("job", wait=30)
    def task() -> None:
        nonlocal inside, most, ran
        inside += 1
        most = max(most, inside)
        ran += 1
        inside -= 1

    fast = functools.partial(task)
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda _: fast(), range(4)))

    assert (most, ran) == (1, 4)


# -- methods -----------------------------------------------------------------------------------------------------------


def test_methods_of_every_kind(leases, rival):
    class Report:
        tenant = "acme"

        @leases.singleton_task("plain")
        def plain(self, n: int) -> tuple[str, int]:
            return self.tenant, n

        @classmethod
        @leases.singleton_task("class")
        def of_class(cls, n: int) -> tuple[str, int]:
            return cls.tenant, n

        @staticmethod
        @leases.singleton_task("static")
        def static(n: int) -> int:
            return n

        @leases.singleton_task("async")
        async def later(self, n: int) -> tuple[str, int, bool]:
            return self.tenant, n, rival.try_acquire("async")

    report = Report()

    assert report.plain(1) == ("acme", 1)
    assert Report.of_class(2) == report.of_class(2) == ("acme", 2)
    assert Report.static(3) == report.static(3) == 3
    assert asyncio.run(report.later(4)) == ("acme", 4, False)
    rival.try_acquire("plain")
    assert report.plain(1) is None


@pytest.mark.parametrize("kind", [staticmethod, classmethod])
def test_the_wrong_order_of_decorators_is_refused_with_advice(leases, kind):
    with pytest.raises(ConfigurationError, match="goes below @staticmethod and @classmethod"):
        leases.singleton_task("job")(kind(lambda: None))


def test_a_decorated_function_is_still_itself(leases):
    def task(a: int, b: str = "x") -> float:
        """Do it."""
        return 1.0

    decorated = leases.singleton_task("job")(task)

    assert decorated.__name__ == "task"
    assert decorated.__doc__ == "Do it."
    assert decorated.__wrapped__ is task
    assert inspect.signature(decorated) == inspect.signature(task)
    assert decorated.__module__ == task.__module__

    async def later() -> None:
        pass

    assert inspect.iscoroutinefunction(leases.singleton_task("job")(later))
    assert not inspect.iscoroutinefunction(decorated)


def test_callable_objects_and_partials_are_decorated_too(leases, rival):
    class Task:
        def __call__(self, n: int) -> tuple[int, bool]:
            return n, rival.try_acquire("job")

    assert leases.singleton_task("job")(Task())(1) == (1, False)
    assert leases.singleton_task("job-{n}")(functools.partial(Task(), n=2))() == (2, True)


# -- what cannot be decorated ------------------------------------------------------------------------------------------


def generator():
    yield


async def async_generator():
    yield


class GeneratorObject:
    def __call__(self):
        yield


@pytest.mark.parametrize(
    "function",
    [generator, async_generator, functools.partial(generator), GeneratorObject()],
    ids=lambda f: type(f).__name__,
)
def test_generators_are_refused_with_advice(leases, function):
    with pytest.raises(ConfigurationError, match=r"generator .* Put `with acquire"):
        leases.singleton_task("job")(function)


@pytest.mark.parametrize("function", [None, 7, "task"])
def test_what_cannot_be_called_is_refused(leases, function):
    with pytest.raises(ConfigurationError, match="decorates functions"):
        leases.singleton_task("job")(function)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"ttl": 0}, "ttl"),
        ({"wait": -1}, "wait"),
        ({"min_hold": "x"}, "min_hold"),
        ({"max_hold": -1}, "max_hold"),
        ({"once_per": "soon"}, "once_per"),
        ({"once_per": 0}, "once_per"),
        ({"name": ""}, "name"),
        ({"name": "a\nb"}, "name"),
        ({"name": 7}, "name"),
        ({"name": None}, "name"),
    ],
)
def test_what_is_wrong_is_said_when_decorating(leases, arguments, named):
    with pytest.raises(ConfigurationError, match=named):
        leases.singleton_task(**{"name": "job", **arguments})(lambda: None)


def test_a_switch_is_a_switch(leases):
    with pytest.raises(ConfigurationError, match="skip_if_locked"):
        leases.singleton_task("job", 60, "no")(lambda: None)


# -- names -------------------------------------------------------------------------------------------------------------


def held_inside(leases) -> list[str]:
    return [lease.name for lease in leases.holding()]


def test_a_name_may_be_a_template_over_the_calls_arguments(leases):
    @leases.singleton_task("report:{tenant}:{day!r}:{opts[0]}:{n:03}")
    def task(tenant: str, n: int = 7, *opts: str, day: str = "mon") -> list[str]:
        return held_inside(leases)

    assert task("acme", 5, "x", day="tue") == ["report:acme:'tue':x:005"]


def test_defaults_count_as_arguments_and_self_may_be_used(leases):
    class Report:
        tenant = "acme"

        @leases.singleton_task("report:{self.tenant}:{day}")
        def run(self, day: str = "mon") -> list[str]:
            return held_inside(leases)

    assert Report().run() == ["report:acme:mon"]
    assert Report().run("tue") == ["report:acme:tue"]


def test_different_arguments_do_not_exclude_each_other(leases, rival):
    task = leases.singleton_task("report:{tenant}")(lambda tenant: "ran")
    rival.try_acquire("report:acme")

    assert task("acme") is None
    assert task("other") == "ran"


def test_doubled_braces_are_braces(leases):
    assert leases.singleton_task("a{{b}}")(lambda: held_inside(leases))() == ["a{b}"]


def test_a_name_may_be_a_callable_over_the_calls_arguments(leases):
    @leases.singleton_task(lambda tenant, **_: f"import:{tenant}")
    def task(tenant: str, *, fast: bool = False) -> list[str]:
        return held_inside(leases)

    assert task("acme", fast=True) == ["import:acme"]


def test_a_template_may_tell_arguments_by_their_place_however_they_are_passed(leases):
    class Imports:
        @leases.singleton_task("{0}:{1}")
        def both(self, tenant, file="all"):
            return current_lease().name

    @leases.singleton_task("{2}")
    def third(*words):
        return current_lease().name

    assert Imports().both("a", "b") == Imports().both("a", file="b") == Imports().both(file="b", tenant="a") == "a:b"
    assert Imports().both("a") == "a:all"
    assert third("a", "b", "c") == "c"


@pytest.mark.parametrize("template", ["{nobody}", "{}", "{1}", "{nobody.x}", "{tenant", "}", "{tenant}{other[1]}"])
def test_a_template_that_cannot_work_is_refused_when_decorating(leases, template):
    with pytest.raises(ConfigurationError, match="name"):
        leases.singleton_task(template)(lambda tenant: None)


@pytest.mark.parametrize("tenant", ["a\nb", "x" * 300, ""])
def test_a_name_that_a_template_makes_is_checked_at_each_call(leases, tenant):
    ran: list[str] = []
    task = leases.singleton_task("{tenant}")(lambda tenant: ran.append(tenant))  # noqa: PLW0108  # a parameter by that name is wanted

    with pytest.raises(ConfigurationError, match="name"):
        task(tenant)

    assert ran == []


def test_a_callable_that_makes_no_text_is_refused_at_the_call(leases):
    with pytest.raises(ConfigurationError, match="name"):
        leases.singleton_task(lambda: None)(lambda: None)()


def test_a_call_with_wrong_arguments_is_pythons_own_error_and_nothing_is_held(leases):
    task = leases.singleton_task("report:{tenant}")(lambda tenant: "ran")

    with pytest.raises(TypeError):
        task()
    with pytest.raises(TypeError):
        task("a", "b")

    assert leases.list_leases(ended=True) == []


# -- coroutines --------------------------------------------------------------------------------------------------------


def test_a_coroutine_holds_the_lease_until_its_end(leases, rival):
    @leases.singleton_task("job")
    async def task(a: int) -> list[bool]:
        seen = [rival.try_acquire("job")]
        await asyncio.sleep(0.05)
        return [*seen, rival.try_acquire("job"), bool(a)]

    assert asyncio.run(task(1)) == [False, False, True]
    assert rival.try_acquire("job") is True


def test_calling_takes_nothing_before_it_is_awaited(leases):
    @leases.singleton_task("job")
    async def task() -> None:
        pass

    coroutine = task()
    assert leases.get_lease("job") is None
    coroutine.close()
    assert leases.get_lease("job") is None


def test_skipping_waiting_and_raising_are_the_same_for_coroutines(leases, rival):
    async def ran() -> str:
        return "ran"

    async def told(refused: NotAcquired) -> str:
        return f"told of {refused.held_by}"

    async def main() -> None:
        rival.try_acquire("job")
        assert await leases.singleton_task("job")(ran)() is None
        assert await leases.singleton_task("job", on_skip="busy")(ran)() == "busy"
        assert await leases.singleton_task("job", on_skip=lambda refused: refused.held_by)(ran)() == "rival"
        assert await leases.singleton_task("job", on_skip=told)(ran)() == "told of rival"
        with pytest.raises(AcquisitionError):
            await leases.singleton_task("job", skip_if_locked=False)(ran)()
        waiting = asyncio.create_task(leases.singleton_task("job", wait=10)(ran)())
        await asyncio.sleep(0.05)
        assert not waiting.done()
        rival.release("job")
        assert await waiting == "ran"

    asyncio.run(main())


def test_of_many_tasks_of_one_loop_one_runs_at_a_time_and_all_run(leases):
    inside, most, ran = 0, 0, 0

    @leases.singleton_task("job", wait=60)
    async def task() -> None:
        nonlocal inside, most, ran
        inside += 1
        most = max(most, inside)
        await asyncio.sleep(0.001)
        ran += 1
        inside -= 1

    async def main() -> None:
        await asyncio.gather(*(task() for _ in range(3)))

    asyncio.run(main())

    assert (most, ran) == (1, 3)


def test_a_task_that_waits_for_itself_is_an_error_and_another_task_is_not(leases):
    @leases.singleton_task("job", wait=5)
    async def inner() -> str:
        return "ran"

    @leases.singleton_task("job")
    async def outer() -> str | None:
        other = asyncio.create_task(inner())
        await asyncio.sleep(0)
        with pytest.raises(ReentrantError):
            await inner()
        others.append(other)
        return "outer"

    others: list[asyncio.Task[str | None]] = []

    async def main() -> None:
        assert await outer() == "outer"
        assert await others[0] == "ran"

    asyncio.run(main())


def test_cancelling_the_coroutine_frees_the_lease_and_is_not_swallowed(leases, rival):
    begun = asyncio.Event()

    @leases.singleton_task("job")
    async def task() -> None:
        begun.set()
        await asyncio.sleep(60)

    async def main() -> None:
        running = asyncio.create_task(task())
        await begun.wait()
        assert rival.try_acquire("job") is False
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        assert rival.try_acquire("job") is True

    asyncio.run(main())


def test_a_body_that_swallows_its_cancellation_keeps_the_lease_until_it_ends(leases, rival):
    begun = asyncio.Event()

    @leases.singleton_task("job")
    async def task() -> str:
        begun.set()
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            assert rival.try_acquire("job") is False
        return "tidied up"

    async def main() -> None:
        running = asyncio.create_task(task())
        await begun.wait()
        running.cancel()
        assert await running == "tidied up"

    asyncio.run(main())
    assert rival.try_acquire("job") is True


def test_a_coroutine_that_is_closed_in_its_body_frees_the_lease(leases, rival):
    @leases.singleton_task("job")
    async def task() -> None:
        await asyncio.sleep(60)

    async def main() -> None:
        coroutine = task()
        driven = asyncio.ensure_future(_drive(coroutine))
        await asyncio.to_thread(wait_until, lambda: rival.get_lease("job"))
        await asyncio.sleep(0.05)
        driven.cancel()
        with pytest.raises(asyncio.CancelledError):
            await driven

    async def _drive(coroutine) -> None:
        """Drive a coroutine by hand, and close it, rather than throw into it, when this task is cancelled."""
        waiting = coroutine.__await__()
        try:
            async for step in _steps(waiting):
                await step
        finally:
            coroutine.close()

    async def _steps(waiting):
        for future in waiting:
            future._asyncio_future_blocking = False
            yield future

    asyncio.run(main())
    wait_until(lambda: rival.try_acquire("job"))  # in the background: nobody is there to wait with


def test_an_error_of_a_coroutine_comes_out_and_the_lease_is_freed(leases, rival):
    @leases.singleton_task("job")
    async def task() -> None:
        await asyncio.sleep(0)
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        asyncio.run(task())

    assert rival.try_acquire("job") is True


def test_a_coroutine_that_lost_its_lease_does_not_return_as_if_nothing_had_been(leases, store):
    @leases.singleton_task("job")
    async def task() -> str:
        store.lapse("job")
        return "done"

    with pytest.raises(LeaseLostError):
        asyncio.run(task())


def test_an_object_whose_call_is_a_coroutine_holds_the_lease_until_its_end(leases, rival):
    class Task:
        async def __call__(self) -> bool:
            await asyncio.sleep(0)
            return rival.try_acquire("job")

    assert asyncio.run(leases.singleton_task("job")(Task())()) is False


def test_a_store_that_is_slow_does_not_block_the_loop(leases, rival):
    rival.try_acquire("job")

    @leases.singleton_task("job", wait=0.3)
    async def task() -> str:
        return "ran"

    async def main() -> int:
        running = asyncio.create_task(task())
        turns = 0
        while not running.done():
            await asyncio.sleep(0.005)
            turns += 1
        assert running.result() is None
        return turns

    assert asyncio.run(main()) >= 15
