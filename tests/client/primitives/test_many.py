"""`acquire_many`: all, or none."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from pglease import (
    AcquisitionError,
    AsyncPGLease,
    BackendUnavailable,
    ConfigurationError,
    LeaseLostError,
    MemoryBackend,
    PGLease,
    current_lease,
    options,
)
from tests.support.worlds import wait_until


def test_all_are_held_for_the_block(leases, rival):
    with leases.acquire_many(["b", "a", "c"], ttl=600) as group:
        assert group
        assert [lease.name for lease in group] == ["a", "b", "c"]
        assert group.held
        assert len(group) == 3
        assert group["b"].fencing_token == 1
        assert group.fencing_tokens == {"a": 1, "b": 1, "c": 1}
        assert group.remaining() > 500
        assert current_lease("b") is group["b"]
        assert [rival.try_acquire(name) for name in "abc"] == [False] * 3

    assert not group.held
    assert [rival.try_acquire(name) for name in "abc"] == [True] * 3


def test_all_are_taken_in_one_step_and_what_is_in_the_way_is_waited_for(leases, rival, store, monkeypatch):
    backend, verbs = leases.backend, []

    def count(verb: str, does) -> None:
        monkeypatch.setattr(backend, verb, lambda *args: verbs.append(verb) or does(*args))

    for verb in ("try_acquire", "try_acquire_many"):
        count(verb, getattr(backend, verb))
    with leases.acquire_many([f"name {number}" for number in range(50)]) as group:
        assert len(group) == 50
    assert verbs[0] == "try_acquire_many"
    assert len(verbs) == (1 if store.dsn else 51)  # in memory each is granted by the verb for one

    held = rival.wait_for_lease("name 7")
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(leases.acquire_many(["name 7", "name 8"], wait=60).acquire)
        wait_until(leases.waiting, within=30)
        held.release()

        group = waiting.result(60)

    assert group.held
    assert group.release()


class Wordless(MemoryBackend):
    """Grants all, and its answer is lost, or late."""

    late = False

    def try_acquire_many(self, requests, budget):
        answer = super().try_acquire_many(requests, budget)
        if self.late:
            budget.sent_at -= 3600
            return answer
        raise BackendUnavailable("the reply was lost", outcome_unknown=True)


@pytest.mark.parametrize("late", [False, True])
def test_what_was_granted_without_an_answer_or_too_late_is_given_back(late):
    backend = Wordless()
    backend.late = late
    with PGLease(backend) as leases, PGLease(MemoryBackend(store=backend._store)) as rival:
        with pytest.raises(BackendUnavailable), leases.acquire_many(["a", "b"]):
            pass

        assert rival.wait_for_lease("a", timeout=30)
        assert rival.wait_for_lease("b", timeout=30)
        assert leases.holding() == []


def test_a_task_that_is_cancelled_while_all_are_granted_leaves_nothing():
    entered, go_on = threading.Event(), threading.Event()

    class Slow(MemoryBackend):
        def try_acquire_many(self, requests, budget):
            entered.set()
            go_on.wait(60)
            return super().try_acquire_many(requests, budget)

    backend = Slow()

    async def story(leases: PGLease) -> None:
        taking = asyncio.ensure_future(AsyncPGLease(leases).acquire_many(["a", "b"]).acquire())
        await asyncio.to_thread(entered.wait, 60)
        taking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await taking
        go_on.set()

    with PGLease(backend) as leases, PGLease(MemoryBackend(store=backend._store)) as rival:
        asyncio.run(story(leases))
        assert rival.wait_for_lease("a", timeout=30)
        assert rival.wait_for_lease("b", timeout=30)


def test_one_that_is_held_leaves_none(leases, rival):
    rival.try_acquire("b")

    with leases.acquire_many(["a", "b", "c"]) as group:
        assert not group
        assert group.name == "b"
        assert group.held_by == "rival"

    assert leases.holding() == []
    assert rival.wait_for_lease("a", timeout=10, poll_interval=0.05)
    assert rival.wait_for_lease("c", timeout=10, poll_interval=0.05)


def test_a_refusal_may_be_an_error(leases, rival):
    rival.try_acquire("b")

    with pytest.raises(AcquisitionError, match="'b' is held by 'rival'"):
        leases.acquire_many(["a", "b"], raise_on_failure=True).acquire()


def test_a_wait_holds_nothing_meanwhile(leases, rival):
    rival.try_acquire("b", ttl=600)

    with ThreadPoolExecutor(1) as pool:
        taking = pool.submit(leases.acquire_many(["a", "b"], ttl=600, wait=60).acquire)
        wait_until(lambda: rival.try_acquire("a"))
        rival.release("a")
        rival.release("b")
        group = taking.result(30)

    assert group
    assert group.release()
    assert not group.release()


def test_many_who_want_the_same_in_another_order_all_get_them(leases, rival):
    def work(number: int) -> bool:
        names = ["a", "b", "c"] if number % 2 else ["c", "b", "a"]
        with (leases, rival)[number % 2].acquire_many(names, ttl=600, wait=90) as group:
            return bool(group) and group.held

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(work, range(12)))


def test_one_that_is_lost_is_told_at_the_end(leases, rival, store):
    with pytest.raises(LeaseLostError, match="'b'"), leases.acquire_many(["a", "b"]) as group:
        store.delete("b")
        assert not group["b"].ensure(1000)
        assert not group.held
        with pytest.raises(LeaseLostError):
            group.raise_if_lost()

    assert rival.try_acquire("a")


@pytest.mark.parametrize("names", [[], "ab", ["a", "a"], ["a", ""], None, [7], [str(n) for n in range(1001)]])
def test_names_are_several_different_names(leases, names):
    with pytest.raises(ConfigurationError, match="name"):
        leases.acquire_many(names)


def test_a_block_is_entered_once(leases):
    block = leases.acquire_many(["a"])
    with block, pytest.raises(ConfigurationError, match="in use"):
        block.__enter__()


def test_a_store_that_confirms_nothing_holds_up_the_end_of_a_block_once(leases, monkeypatch):
    asked: list[str] = []

    def unconfirmed(hold, *_):
        asked.append(hold.name)
        hold.end()
        raise BackendUnavailable("no answer")

    with leases.acquire_many(["a", "b", "c"]):
        monkeypatch.setattr(leases.heartbeat_manager, "settle", unconfirmed)

    assert asked == ["c"]
    assert leases.holding() == []
    monkeypatch.undo()


def test_one_release_that_fails_for_whatever_reason_leaves_no_other_held(leases, rival, monkeypatch):
    settle, failures = leases.heartbeat_manager.settle, iter([ConfigurationError("a lent connection of no use")])

    def fail_once(hold, *more):
        for error in failures:
            hold.end()
            leases.heartbeat_manager.give_back.add(hold.name, hold.lease_id)
            raise error
        return settle(hold, *more)

    monkeypatch.setattr(leases.heartbeat_manager, "settle", fail_once)
    with pytest.raises(ConfigurationError), leases.acquire_many(["a", "b"]):
        pass

    assert leases.holding() == []
    assert rival.wait_for_lease("a", timeout=10, poll_interval=0.05)


@pytest.mark.parametrize("on_a_loop", [False, True], ids=["threads", "asyncio"])
def test_what_fails_after_the_store_has_granted_all_gives_all_of_it_back(monkeypatch, on_a_loop):
    with PGLease(MemoryBackend()) as leases:
        manager, begun = leases.taking.manager, []
        begin = manager.begin

        def begin_one(hold):
            begun.append(hold)
            if len(begun) == 2:
                raise MemoryError
            begin(hold)

        monkeypatch.setattr(manager, "begin", begin_one)
        wanted = [options.hold_options(name, 60) for name in ("a", "b", "c")]
        with pytest.raises(MemoryError):
            asyncio.run(leases.taking.atake_many(wanted)) if on_a_loop else leases.taking.take_many(wanted)

        wait_until(lambda: leases.list_leases() == [])
        assert leases.holding() == []
