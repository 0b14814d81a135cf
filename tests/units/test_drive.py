"""The only two ways to carry out a conversation: by calling and sleeping, or on an event loop."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import threading
import time
from collections.abc import Callable, Coroutine, Generator
from concurrent.futures import Future
from contextvars import ContextVar
from typing import Any

import pytest

from pglease import AsyncPGLease, PGLease, clock, drive, giveback, loops, options
from pglease.backends.base import Budget
from pglease.backends.memory import MemoryBackend
from pglease.bell import Bell
from pglease.errors import BackendMisconfigured, BackendUnavailable
from pglease.handles import HeldLease
from pglease.heartbeat import RELEASE_BOX
from pglease.records import Granted, Refused, Request
from pglease.steps import Answer, Call, Step, Wait
from tests.support.worlds import Stopwatch, always, wait_until


class Gated(MemoryBackend):
    """A real store in memory whose answers can be kept back: before it decides, or on their way to the caller."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.after, self.asked = threading.Event(), threading.Event(), threading.Event()
        self.before.set()
        self.after.set()
        self.threads: list[str] = []
        self.lose_replies = 0

    def try_acquire(self, request: Request, budget: Budget) -> Granted | Refused:
        self.threads.append(threading.current_thread().name)
        self.asked.set()
        self.before.wait(20)
        answer = super().try_acquire(request, budget)
        self.asked.set()
        self.after.wait(20)
        if self.lose_replies:
            self.lose_replies -= 1
            raise BackendUnavailable("the reply was lost", outcome_unknown=True)
        return answer


@pytest.fixture
def backend() -> Gated:
    return Gated()


def asks(name: str = "job", *, then: tuple[Step, ...] = ()) -> Generator[Step, Answer, list[Answer]]:
    """A conversation that takes `name`, and goes on with `then`."""
    answers = [(yield Call("try_acquire", (Request(name, "me", "a" * 32, 60.0),), 5.0))]
    for step in then:
        answers.append((yield step))  # noqa: PERF401  # a comprehension cannot yield
    return answers


def is_free(backend: MemoryBackend, name: str = "job") -> bool:
    lease = backend.get(name, Budget.of(5, clock.now))
    return lease is None or lease.is_expired()


def nobody(future: Future[Answer]) -> None:
    raise AssertionError("nothing was abandoned")


def arun(
    steps: Generator[Step, Answer, Any], backend: MemoryBackend, abandoned: Callable[[Future[Answer]], None] = nobody
) -> Coroutine[Any, Any, Any]:
    return loops.arun(steps, backend, abandoned, asyncio.sleep)


# -- run ---------------------------------------------------------------------------------------------------------------


def test_run_calls_and_pauses_in_turn_and_returns_what_the_conversation_returns(backend):
    pauses: list[float] = []

    taken, waited, freed = drive.run(
        asks(then=(Wait(3.0), Call("release", ("job", "a" * 32), 1.0))), backend, pauses.append
    )

    assert isinstance(taken.value, Granted)
    assert pauses == [3.0]
    assert waited == Answer(waited.now)
    assert freed.value is not None
    assert taken.now <= waited.now <= freed.now
    assert is_free(backend)


def test_a_call_knows_when_its_request_left(backend):
    backend.after.clear()
    threading.Timer(0.1, backend.after.set).start()
    before = clock.now()

    (answer,) = drive.run(asks(), backend, time.sleep)

    assert before <= answer.sent_at < before + 0.05
    assert answer.now >= answer.sent_at + 0.05


def test_trouble_that_passes_is_part_of_the_answer(backend):
    backend.lose_replies = 1

    (answer,) = drive.run(asks(), backend, time.sleep)

    assert answer.value is None
    assert answer.error is not None
    assert answer.error.outcome_unknown


def test_any_other_error_ends_the_conversation_and_closes_it(backend):
    ended: list[bool] = []

    def conversation() -> Generator[Step, Answer, None]:
        try:
            yield Call("get", ("job", "no budget"), 1.0)
        finally:
            ended.append(True)

    with pytest.raises(TypeError):
        drive.run(conversation(), backend, time.sleep)

    assert ended == [True]


def test_a_pause_may_end_the_conversation(backend):
    class Enough(Exception):
        pass

    def stop(seconds: float) -> None:
        raise Enough

    with pytest.raises(Enough):
        drive.run(asks(then=(Wait(1.0),)), backend, stop)


def test_a_conversation_without_a_step_just_returns(backend):
    def silent() -> Generator[Step, Answer, str]:
        return "nothing to ask"
        yield

    assert drive.run(silent(), backend, time.sleep) == "nothing to ask"
    assert asyncio.run(arun(silent(), backend)) == "nothing to ask"


# -- arun --------------------------------------------------------------------------------------------------------------


def test_arun_gives_the_same_answers_as_run(backend):
    steps = (Wait(0.001), Call("release", ("job", "a" * 32), 1.0))

    taken, waited, freed = asyncio.run(arun(asks(then=steps), backend))

    assert isinstance(taken.value, Granted)
    assert waited == Answer(waited.now)
    assert freed.value is not None
    assert is_free(backend)


def test_calls_are_made_on_threads_of_our_own_and_the_loop_goes_on(backend):
    backend.before.clear()

    def refuse(*_: Any) -> None:
        raise AssertionError("the caller's executor was used")

    async def main() -> int:
        asyncio.get_running_loop().run_in_executor = refuse  # type: ignore[method-assign, assignment]
        asking = asyncio.create_task(arun(asks(), backend))
        turns = 0
        while not asking.done():
            await asyncio.sleep(0.001)
            turns += 1
            if turns == 20:
                backend.before.set()
        await asking
        return turns

    assert asyncio.run(main()) >= 20
    assert all(name.startswith("pglease-asking") for name in backend.threads)


def test_hundreds_of_waiting_tasks_park_no_thread(backend):
    def patient() -> Generator[Step, Answer, None]:
        for _ in range(3):
            yield Wait(0.05)
            yield Call("get", ("job",), 1.0)

    async def main() -> int:
        tasks = [asyncio.create_task(arun(patient(), backend)) for _ in range(300)]
        await asyncio.sleep(0.02)
        threads = threading.active_count()
        await asyncio.gather(*tasks)
        return threads

    before = threading.active_count()

    assert asyncio.run(main()) <= before + loops.MOST_CALLS


def test_an_error_of_a_call_comes_out_on_the_loop():
    class Wrong(MemoryBackend):
        def try_acquire(self, request: Request, budget: Budget) -> Granted | Refused:
            raise BackendMisconfigured("no such table")

    with pytest.raises(BackendMisconfigured):
        asyncio.run(arun(asks(), Wrong()))


async def cancelled_at(task: asyncio.Task[Any], moment: Callable[[], object]) -> None:
    """Let the task run until `moment`, cancel it there, and see that it is."""
    until = time.monotonic() + 10
    while not moment():
        assert time.monotonic() < until
        await asyncio.sleep(0.001)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


@pytest.mark.parametrize("where", ["before", "after"])
def test_a_call_under_way_at_a_cancellation_goes_on_and_is_handed_over(backend, where):
    getattr(backend, where).clear()
    abandoned: list[Future[Answer]] = []

    async def main() -> None:
        await cancelled_at(asyncio.create_task(arun(asks(), backend, abandoned.append)), backend.asked.is_set)

    asyncio.run(main())

    (call,) = abandoned
    assert not call.done()
    getattr(backend, where).set()
    assert isinstance(call.result(10).value, Granted)


def test_a_call_that_has_not_begun_when_its_task_is_cancelled_is_not_made(backend):
    """More calls than the executor makes at once: those in the queue end with their tasks."""
    backend.before.clear()

    async def main() -> list[Any]:
        tasks = [
            asyncio.create_task(arun(asks(f"job-{number}"), backend, lambda _: None))
            for number in range(3 * loops.MOST_CALLS)
        ]
        while len(backend.threads) < loops.MOST_CALLS:  # noqa: ASYNC110  # counted on other threads
            await asyncio.sleep(0.001)
        for task in tasks:
            task.cancel()
        return await asyncio.gather(*tasks, return_exceptions=True)

    answers = asyncio.run(main())
    backend.before.set()

    assert all(isinstance(answer, asyncio.CancelledError) for answer in answers)
    loops._asking().submit(lambda: None).result(10)
    assert len(backend.threads) == loops.MOST_CALLS


def test_a_cancellation_in_a_pause_hands_nothing_over_when_the_answer_was_clear(backend):
    async def main() -> None:
        paused = asyncio.Event()

        def conversation() -> Generator[Step, Answer, None]:
            yield Call("get", ("job",), 1.0)
            paused.set()
            yield Wait(60.0)

        await cancelled_at(asyncio.create_task(arun(conversation(), backend)), paused.is_set)

    watch = Stopwatch()
    asyncio.run(main())

    assert watch.seconds < 10


def test_a_cancellation_in_the_pause_after_a_lost_reply_hands_that_call_over(backend):
    backend.lose_replies = 1
    abandoned: list[Future[Answer]] = []

    async def main() -> None:
        paused = asyncio.Event()

        def conversation() -> Generator[Step, Answer, None]:
            yield from asks()
            paused.set()
            yield Wait(60.0)

        await cancelled_at(asyncio.create_task(arun(conversation(), backend, abandoned.append)), paused.is_set)

    asyncio.run(main())

    (call,) = abandoned
    assert call.done()


def test_a_call_that_ends_after_its_loop_was_closed_makes_no_noise(backend, caplog):
    backend.after.clear()
    abandoned: list[Future[Answer]] = []

    async def main() -> None:
        await cancelled_at(asyncio.create_task(arun(asks(), backend, abandoned.append)), backend.asked.is_set)

    asyncio.run(main())
    ended = threading.Event()
    abandoned[0].add_done_callback(lambda _: ended.set())  # the last of those who are told
    backend.after.set()
    assert ended.wait(10)
    gc.collect()

    assert [record for record in caplog.records if record.levelname in ("ERROR", "CRITICAL")] == []


# -- what a cancelled task leaves behind -------------------------------------------------------------------------------


def wanted(wait: float | None = None) -> options.HoldOptions:
    return options.hold_options("job", 60, wait=wait)


@pytest.mark.parametrize("where", ["before", "after"])
def test_a_grant_that_comes_after_the_cancellation_is_given_back(backend, where):
    getattr(backend, where).clear()
    with PGLease(backend) as leases:

        async def main() -> None:
            await cancelled_at(asyncio.create_task(leases.taking.atake(wanted())), backend.asked.is_set)

        asyncio.run(main())
        getattr(backend, where).set()

        wait_until(lambda: backend.get("job", Budget.of(5, clock.now)) is not None and is_free(backend))
        assert leases.holding() == []


def test_a_grant_whose_reply_was_lost_before_the_cancelled_pause_is_given_back(backend):
    backend.lose_replies = 1
    backend.listen = lambda _: None  # else it would look again as soon as it hears the store
    with PGLease(backend) as leases:

        async def main() -> None:
            asking = asyncio.create_task(leases.taking.atake(wanted(wait=60)))
            await cancelled_at(asking, lambda: backend.lose_replies == 0)

        backend.after.set()
        asyncio.run(main())

        wait_until(lambda: is_free(backend))


def test_a_cancelled_wait_for_somebody_elses_lease_gives_nothing_back(backend):
    """It was refused, so there is nothing; asking would disturb the holder's row."""
    released: list[str] = []
    release = backend.release
    backend.release = lambda name, *args, **kwargs: released.append(name) or release(name, *args, **kwargs)
    rival = PGLease(MemoryBackend(store=backend._store))
    with rival, rival.acquire("job"), PGLease(backend) as leases:
        backend.after.clear()

        async def main() -> None:
            await cancelled_at(asyncio.create_task(leases.taking.atake(wanted(wait=60))), backend.asked.is_set)

        asyncio.run(main())
        backend.after.set()

        always(lambda: released == [], 0.1)


def test_a_cancellation_in_the_very_moment_of_the_grant_leaves_nothing(backend, monkeypatch):
    """Cancelled after the call was done and before the task went on: 200 tries around that moment."""
    monkeypatch.setattr(giveback, "PAUSES", (0.0, 0.01, 0.01, 0.01))
    with PGLease(backend) as leases:

        async def once(turns: int) -> None:
            asking = asyncio.create_task(leases.taking.atake(wanted()))
            backend.asked.clear()
            for _ in range(turns):
                await asyncio.sleep(0)
            asking.cancel()
            try:
                lease = await asking
            except asyncio.CancelledError:
                return
            assert isinstance(lease, HeldLease) or not lease
            if isinstance(lease, HeldLease):
                lease.release()

        async def main() -> None:
            for turns in range(200):
                await once(turns % 20)

        asyncio.run(main())

        wait_until(lambda: is_free(backend))
        wait_until(lambda: leases.heartbeat_manager.give_back._debts == [])


# -- more calls than threads -------------------------------------------------------------------------------------------


def test_a_call_whose_turn_does_not_come_within_its_time_is_trouble_and_is_never_made(backend):
    backend.before.clear()

    def one(name: str, seconds: float) -> Generator[Step, Answer, Answer]:
        return (yield Call("try_acquire", (Request(name, "me", "a" * 32, 60.0),), seconds))

    async def main() -> Answer:
        stuck = [asyncio.create_task(arun(one(f"stuck-{n}", 20.0), backend)) for n in range(loops.MOST_CALLS)]
        while len(backend.threads) < loops.MOST_CALLS:  # noqa: ASYNC110  # counted on other threads
            await asyncio.sleep(0.001)
        answer = await arun(one("job", 0.1), backend)
        backend.before.set()
        await asyncio.gather(*stuck)
        return answer

    watch = Stopwatch()
    answer = asyncio.run(main())

    assert watch.seconds < 10
    assert answer.error is not None
    assert not answer.error.outcome_unknown
    assert backend.get("job", Budget.of(5, clock.now)) is None


def test_a_call_that_waited_for_its_turn_has_what_is_left_of_its_time():
    left: list[float] = []
    go_on = threading.Event()

    class Slow(MemoryBackend):
        def get(self, name: str, budget: Budget) -> None:
            if name == "stuck":
                go_on.wait(20)
            else:
                left.append(budget.left())

    def look(name: str, seconds: float) -> Generator[Step, Answer, Answer]:
        return (yield Call("get", (name,), seconds))

    async def main() -> None:
        backend = Slow()
        stuck = [asyncio.create_task(arun(look("stuck", 60.0), backend)) for _ in range(loops.MOST_CALLS)]
        await asyncio.sleep(0)
        late = asyncio.create_task(arun(look("late", 60.0), backend))
        await asyncio.sleep(0.3)  # timers of the loop may come a little early
        go_on.set()
        await asyncio.gather(late, *stuck)

    asyncio.run(main())

    assert left[0] <= 59.8


def test_what_must_go_to_its_end_is_done_otherwise_when_its_turn_does_not_come():
    go_on, done = threading.Event(), []

    async def main() -> None:
        stuck = [asyncio.create_task(loops.to_the_end(lambda: go_on.wait(20))) for _ in range(loops.MOST_KEEPERS)]
        await asyncio.sleep(0)
        answer = await loops.to_the_end(lambda: done.append("late"), seconds=0.05, instead=lambda: "instead")
        assert answer == "instead"
        waiting = asyncio.create_task(
            loops.to_the_end(lambda: done.append("late"), seconds=0.05, instead=lambda: done.append("instead"))
        )
        await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        go_on.set()
        await asyncio.gather(*stuck)

    asyncio.run(main())

    assert done == ["instead"]


def test_what_must_go_to_its_end_and_cannot_be_done_otherwise_gets_a_thread_of_its_own():
    go_on, done = threading.Event(), []

    async def main() -> None:
        stuck = [asyncio.create_task(loops.to_the_end(lambda: go_on.wait(60))) for _ in range(loops.MOST_KEEPERS)]
        await asyncio.sleep(0)
        assert await loops.to_the_end(lambda: "done", seconds=0.05) == "done"
        with pytest.raises(ZeroDivisionError):
            await loops.to_the_end(lambda: 1 / 0, seconds=0.05)
        waiting = asyncio.create_task(loops.to_the_end(lambda: done.append("all the same"), seconds=0.05))
        await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert done == ["all the same"]
        go_on.set()
        await asyncio.gather(*stuck)

    try:
        asyncio.run(main())
    finally:
        go_on.set()


def test_a_block_whose_release_came_to_its_turn_late_is_left_by_the_same_time_as_others():
    began, ends = {}, []

    class Silent(MemoryBackend):
        def release(self, name: str, lease_id: str, budget: Budget, **_: Any) -> Any:
            if threading.current_thread().name.startswith("pglease-keeping"):
                ends.append(budget.until - began[name])
                time.sleep(0.6 * budget.left())
            raise BackendUnavailable("no answer")

    async def leave(leases: AsyncPGLease, name: str) -> None:
        async with leases.acquire(name):
            await asyncio.sleep(0)
            began[name] = clock.now()

    async def main() -> None:
        leases = AsyncPGLease(Silent())
        await asyncio.gather(*(leave(leases, f"job-{number}") for number in range(2 * loops.MOST_KEEPERS)))
        await leases.close()

    asyncio.run(main())

    assert ends  # twice as many as there are threads, unless the machine is too slow for a second turn
    assert max(ends) < RELEASE_BOX + 0.7


def test_a_call_sees_the_context_of_who_asked():
    who: ContextVar[str] = ContextVar("who", default="nobody")

    class Curious(MemoryBackend):
        def get(self, name: str, budget: Budget) -> Any:
            return who.get()

    def look() -> Generator[Step, Answer, Answer]:
        return (yield Call("get", ("job",), 1.0))

    async def main() -> str:
        who.set("the task")
        return str((await arun(look(), Curious())).value)

    assert asyncio.run(main()) == "the task"


@pytest.mark.parametrize("fails", [False, True])
def test_a_forgotten_answer_and_its_errors_make_no_noise(fails, caplog):
    begun, go_on = threading.Event(), threading.Event()

    def work() -> None:
        begun.set()
        go_on.wait(10)
        if fails:
            raise ZeroDivisionError

    async def main() -> None:
        await cancelled_at(asyncio.create_task(loops.ask(work)), begun.is_set)

    asyncio.run(main())
    go_on.set()
    loops._asking().submit(lambda: None).result(10)
    gc.collect()

    assert caplog.records == []


@pytest.mark.parametrize(("run", "most"), [(loops.ask, loops.MOST_CALLS), (loops.keep, loops.MOST_KEEPERS)])
def test_what_waits_for_its_turn_behind_calls_that_are_stuck_is_told_so_in_time_and_not_made(run, most, monkeypatch):
    go_on, made = threading.Event(), []

    async def main() -> None:
        stuck = [asyncio.create_task(run(lambda: go_on.wait(60))) for _ in range(most)]
        await asyncio.sleep(0)
        monkeypatch.setattr(loops, "TURN", 0.1)
        with pytest.raises(BackendUnavailable, match="stuck before us"):
            await (run(made.append) if run is loops.keep else run(made.append, turn=0.1))
        go_on.set()
        assert all(await asyncio.gather(*stuck))

    try:
        asyncio.run(main())
    finally:
        go_on.set()
    assert made == []


def test_a_watch_whose_look_has_to_wait_for_its_turn_goes_on_waiting(monkeypatch):
    go_on = threading.Event()

    async def main() -> None:
        with PGLease(MemoryBackend()) as leases:
            stuck = [asyncio.create_task(loops.ask(lambda: go_on.wait(60))) for _ in range(loops.MOST_CALLS)]
            await asyncio.sleep(0)
            watch = AsyncPGLease(leases).watch("job")
            monkeypatch.setattr(loops.ask, "__kwdefaults__", {"turn": 0.05})
            assert await watch.next(0.2) is None
            go_on.set()
            await asyncio.gather(*stuck)
            leases.try_acquire("job")
            change = await watch.next(60)
            assert change is not None
            assert change.lease.task_name == "job"
            watch.close()

    try:
        asyncio.run(main())
    finally:
        go_on.set()


def test_a_sleeping_task_is_woken_by_a_bell_from_any_thread():
    bell = Bell()

    async def main() -> float:
        asyncio.get_running_loop().call_later(0.05, threading.Thread(target=bell.set).start)
        watch = Stopwatch()
        await loops.asleep(60, bell)
        await loops.asleep(60, bell)
        return watch.seconds

    assert asyncio.run(main()) < 10
    assert bell._callbacks == {}


def test_a_bell_that_rings_after_the_loop_is_gone_disturbs_nobody():
    bell = Bell()
    loop = asyncio.new_event_loop()
    sleeping = loop.create_task(loops.asleep(60, bell))
    loop.run_until_complete(asyncio.sleep(0))
    sleeping.cancel()
    loop.close()

    bell.set()

    with contextlib.suppress(asyncio.CancelledError):
        sleeping.get_coro().close()


# -- to_the_end -------------------------------------------------------------------------------------------------------


def test_to_the_end_returns_what_the_function_returns_and_raises_what_it_raises():
    async def main() -> None:
        assert await loops.to_the_end(lambda: threading.current_thread().name) != threading.current_thread().name
        with pytest.raises(ZeroDivisionError):
            await loops.to_the_end(lambda: 1 / 0)

    asyncio.run(main())


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("cancels", [1, 2, 5])
def test_to_the_end_runs_to_its_end_and_then_the_cancellation_follows(cancels, fails, caplog):
    begun, go_on, done = threading.Event(), threading.Event(), threading.Event()

    def work() -> None:
        begun.set()
        go_on.wait(10)
        done.set()
        if fails:
            raise ZeroDivisionError

    async def main() -> None:
        task = asyncio.create_task(loops.to_the_end(work))
        while not begun.is_set():  # noqa: ASYNC110  # set on another thread
            await asyncio.sleep(0.001)
        for _ in range(cancels):
            task.cancel()
            await asyncio.sleep(0.005)
            assert not task.done()
        go_on.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert done.is_set()

    asyncio.run(main())
    gc.collect()

    assert caplog.records == []


def test_a_cancellation_in_the_very_moment_of_its_end_is_not_swallowed():
    async def main() -> None:
        swallowed = 0
        for turns in range(200):
            task = asyncio.create_task(loops.to_the_end(lambda: None))
            for _ in range(turns % 20):
                await asyncio.sleep(0)
            if task.done():
                continue
            task.cancel()
            try:
                await task
                swallowed += 1
            except asyncio.CancelledError:
                pass
        assert swallowed == 0

    asyncio.run(main())


def test_a_timeout_around_what_goes_to_its_end_is_a_timeout():
    async def main() -> None:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.02):
                await loops.to_the_end(lambda: time.sleep(0.1))

    asyncio.run(main())
