"""`with leases.acquire(...)`: who gets it, for how long, and what leaving means."""

from __future__ import annotations

import contextvars
import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest

from pglease import (
    AcquireTimeout,
    AcquisitionError,
    BackendClosed,
    ConfigurationError,
    HeldLease,
    LeaseLostError,
    NotAcquired,
    PGLease,
    ReentrantError,
)
from tests.support.worlds import Stopwatch, wait_until

FACES = ("threads", "asyncio")


def is_free(leases: PGLease, name: str = "job") -> bool:
    lease = leases.get_lease(name)
    return lease is None or lease.is_expired()


# -- getting it, or not ------------------------------------------------------------------------------------------------


def test_a_block_holds_the_lease_and_leaving_frees_it(leases, rival):
    with leases.acquire("job") as lease:
        assert isinstance(lease, HeldLease)
        assert lease
        assert lease.held
        assert rival.try_acquire("job") is False

    assert not lease.held
    assert not lease.lost.is_set()
    assert rival.try_acquire("job") is True


def test_who_does_not_get_it_is_told_who_has_it_and_when_to_ask_again(leases, rival):
    rival.try_acquire("job", ttl=60)

    with leases.acquire("job") as lease:
        assert isinstance(lease, NotAcquired)
        assert not lease
        assert lease.name == "job"
        assert lease.held_by == "rival"
        assert 0 < lease.retry_after <= 60
        assert lease.lease is not None
        assert lease.lease.fencing_token == rival.held("job").fencing_token
        assert "rival" in repr(lease)


def test_raise_on_failure_raises_on_entering_and_says_who_has_it(leases, rival):
    rival.try_acquire("job")
    context = leases.acquire("job", raise_on_failure=True)

    with pytest.raises(AcquisitionError, match="held by 'rival' until") as caught, context:
        pytest.fail("the body of a block that did not get it")

    assert not isinstance(caught.value, AcquireTimeout)
    assert (caught.value.name, caught.value.held_by) == ("job", "rival")
    assert 0 < caught.value.retry_after <= 60
    assert leases.holding() == []


def test_nothing_is_asked_before_the_block_is_entered(leases, rival):
    leases.acquire("job")

    assert rival.get_lease("job") is None


def test_each_hold_has_a_larger_token_and_counts_as_a_transition(leases, rival):
    seen = []
    for client in (leases, leases, rival, leases):
        with client.acquire("job") as lease:
            seen.append((lease.fencing_token, lease.lease.transitions, lease.owner_id))

    assert seen == [(1, 0, "ours"), (2, 1, "ours"), (3, 2, "rival"), (4, 3, "ours")]


@pytest.mark.parametrize("ttl", [60, 60.0, "60s", "1m", timedelta(minutes=1)])
def test_a_ttl_may_be_said_in_every_way(leases, ttl):
    with leases.acquire("job", ttl) as lease:
        assert 59 < lease.lease.time_remaining() <= 60
        assert 55 < lease.remaining() <= 57


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"name": ""}, "name"),
        ({"name": "a\nb"}, "name"),
        ({"name": "x" * 256}, "name"),
        ({"name": 7}, "name"),
        ({"ttl": 0}, "ttl"),
        ({"ttl": -1}, "ttl"),
        ({"ttl": True}, "ttl"),
        ({"ttl": float("nan")}, "ttl"),
        ({"ttl": float("inf")}, "ttl"),
        ({"ttl": "soon"}, "ttl"),
        ({"wait": -1}, "wait"),
        ({"min_hold": -1}, "min_hold"),
        ({"max_hold": 0}, "max_hold"),
        ({"metadata": {"x": {1, 2}}}, "metadata"),
        ({"metadata": "text"}, "metadata"),
        ({"heartbeat": 1}, "heartbeat"),
        ({"on_lost": "ignore"}, "on_lost"),
        ({"fair": "yes"}, "fair"),
        ({"min_hold": 10, "max_hold": 5}, "max_hold"),
        ({"min_hold": 90, "heartbeat": False}, "heartbeat"),
    ],
)
def test_what_is_wrong_is_said_at_once_by_name(leases, arguments, named):
    with pytest.raises(ConfigurationError, match=named) as caught:
        leases.acquire(**{"name": "job", **arguments})

    assert isinstance(caught.value, ValueError)


def test_all_that_is_wrong_is_said_together(leases):
    with pytest.raises(ConfigurationError) as caught:
        leases.acquire("", -1, wait="x", min_hold=-2)

    assert len(caught.value.problems) == 4


def test_metadata_is_there_for_others_to_read(leases, rival):
    told = {"version": "1.2", "shard": 7, "nested": {"ä": [None, True, 1.5]}}

    with leases.acquire("job", metadata=told) as lease:
        assert lease.metadata == told
        assert rival.get_lease("job").metadata == told
        told["version"] = "changed later"
        assert lease.metadata["version"] == "1.2"

    with leases.acquire("job") as lease:
        assert lease.metadata == {}


# -- waiting -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("wait", [None, 0])
def test_who_does_not_wait_has_the_answer_at_once(leases, rival, wait):
    rival.try_acquire("job")
    watch = Stopwatch()

    with leases.acquire("job", wait=wait) as lease:
        assert not lease

    assert watch.seconds < 10


def test_a_wait_that_ends_in_vain_lasts_as_long_as_it_was_said_to(leases, rival):
    rival.try_acquire("job")
    watch = Stopwatch()

    with leases.acquire("job", wait=0.3) as lease:
        assert not lease
        assert 0.29 <= watch.seconds < 10
        assert lease.held_by == "rival"


def test_a_wait_that_ends_in_vain_may_raise_a_timeout(leases, rival):
    rival.try_acquire("job")

    context = leases.acquire("job", raise_on_failure=True, wait="200ms")
    with pytest.raises(AcquireTimeout, match="still held by 'rival'") as caught, context:
        pytest.fail("the body of a block that did not get it")

    assert isinstance(caught.value, TimeoutError)
    assert isinstance(caught.value, AcquisitionError)
    assert (caught.value.name, caught.value.held_by) == ("job", "rival")


@pytest.mark.parametrize("wait", [10, float("inf"), "10s"])
def test_who_waits_gets_it_soon_after_it_is_given_back(leases, rival, wait):
    rival.try_acquire("job")
    threading.Timer(0.1, rival.release, ["job"]).start()
    watch = Stopwatch()

    with leases.acquire("job", wait=wait) as lease:
        assert lease
        assert lease.fencing_token == 2
        assert watch.seconds < 10


def test_who_waits_gets_what_a_dead_holder_left_as_soon_as_it_lapses(leases, rival):
    rival.try_acquire("job", ttl=0.5, heartbeat=False)
    watch = Stopwatch()

    with leases.acquire("job", wait=10) as lease:
        assert lease
        assert watch.seconds < 10


def test_a_wait_for_ever_ends_with_its_client(store, rival):
    rival.try_acquire("job")
    waiting = store.client("waiting")
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(waiting.acquire("job", wait=float("inf")).__enter__)
        wait_until(asked.running)

        waiting.close()

        with pytest.raises(BackendClosed):
            asked.result(10)


# -- one client, several askers ----------------------------------------------------------------------------------------


def test_asking_once_for_what_one_has_is_simply_not_getting_it(leases):
    with leases.acquire("job") as outer:
        for wait in (None, 0):
            with leases.acquire("job", wait=wait) as inner:
                assert not inner
                assert inner.held_by == "ours"
        assert leases.try_acquire("job") is False
        assert outer.held
        assert leases.held("job") == outer


@pytest.mark.parametrize("wait", [5, float("inf")])
def test_waiting_for_what_one_has_oneself_is_an_error_at_once(leases, wait):
    with leases.acquire("job") as outer:
        watch = Stopwatch()

        with pytest.raises(ReentrantError, match="'job'") as caught, leases.acquire("job", wait=wait):
            pytest.fail("the body of a block that waits for itself")

        assert watch.seconds < 10
        assert caught.value.name == "job"
        assert outer.held
        with pytest.raises(ReentrantError):
            leases.wait_for_lease("job", timeout=5)


def test_another_thread_of_the_same_client_waits_and_gets_it(leases):
    def ask() -> bool:
        with leases.acquire("job", wait=10) as lease:
            return bool(lease)

    with ThreadPoolExecutor(1) as pool:
        with leases.acquire("job"):
            asked = pool.submit(ask)
            wait_until(asked.running)
            assert leases.held("job")

        assert asked.result(10) is True


def test_another_client_in_the_same_thread_waits_in_vain_but_is_no_error(leases, rival):
    with leases.acquire("job"), rival.acquire("job", wait=1) as lease:
        assert not lease


def test_a_hold_that_is_over_is_nothing_to_wait_for_oneself(leases, store):
    lease = leases.acquire("job").__enter__()
    lease.release()

    with leases.acquire("job", wait=5) as again:
        assert again


def test_blocks_of_different_names_nest(leases):
    with leases.acquire("a") as a, leases.acquire("b") as b, leases.acquire("c") as c:
        assert [lease.name for lease in leases.holding()] == ["a", "b", "c"]
        assert a.held
        assert b.held
        assert c.held

    assert leases.holding() == []


def test_a_context_can_be_used_again_after_it_was_left_and_not_before(leases):
    context = leases.acquire("job")

    with context as first:
        assert first
        with pytest.raises(ConfigurationError, match="in use"), context:
            pytest.fail("entered twice")
        assert first.held

    with context as second:
        assert second
        assert second.fencing_token == first.fencing_token + 1
    assert is_free(leases)


def test_a_context_that_did_not_get_it_can_try_again(leases, rival):
    rival.try_acquire("job")
    context = leases.acquire("job")
    with context as lease:
        assert not lease
    rival.release("job")

    with context as lease:
        assert lease


# -- how long ----------------------------------------------------------------------------------------------------------


def test_a_short_body_keeps_the_name_until_min_hold(leases, rival):
    with leases.acquire("job", min_hold=30) as lease:
        pass

    assert not lease.held
    assert rival.try_acquire("job") is False
    assert leases.try_acquire("job") is False
    assert 25 < rival.get_lease("job").time_remaining() <= 30


def test_min_hold_is_counted_from_the_grant_and_a_longer_body_frees_at_once(leases, rival, store):
    with leases.acquire("job", min_hold=0.05):
        wait_until(
            lambda: rival.get_lease("job").seen_at - rival.get_lease("job").acquired_at > timedelta(seconds=0.06)
        )

    assert rival.try_acquire("job") is True


def test_min_hold_above_the_ttl_is_kept_by_renewal(leases, rival):
    with leases.acquire("job", ttl=3, min_hold=20):
        pass

    assert 15 < rival.get_lease("job").time_remaining() <= 20


def test_an_error_of_the_body_does_not_shorten_min_hold(leases, rival):
    with pytest.raises(ZeroDivisionError), leases.acquire("job", min_hold=30):
        raise ZeroDivisionError

    assert rival.try_acquire("job") is False


def test_a_lease_is_renewed_past_its_ttl(leases, rival):
    with leases.acquire("job", ttl=3) as lease:
        born = lease.acquired_at
        wait_until(lambda: rival.get_lease("job").seen_at - born > timedelta(seconds=3.7))

        assert lease.held
        assert rival.try_acquire("job") is False
        assert lease.acquired_at == born


def test_without_heartbeat_it_ends_with_its_ttl_and_that_is_loud(leases, rival):
    with pytest.raises(LeaseLostError) as caught, leases.acquire("job", ttl=0.4, heartbeat=False) as lease:
        assert lease.lost.wait(5)
        assert not lease.held
        assert wait_until(lambda: rival.try_acquire("job"))

    assert (caught.value.name, caught.value.reason) == ("job", "expired")
    assert rival.held("job"), "leaving took the lease from its new holder"


def test_max_hold_ends_it_though_renewals_work(leases, rival):
    with pytest.raises(LeaseLostError) as caught, leases.acquire("job", ttl=2, max_hold=0.3) as lease:
        watch = Stopwatch()
        assert lease.lost.wait(15)
        assert watch.seconds < 10
        assert not lease.held
        assert lease.remaining() == 0.0

    assert caught.value.reason == "max_hold"
    wait_until(lambda: rival.try_acquire("job"))


# -- errors of the body ------------------------------------------------------------------------------------------------


class Mine(Exception):
    pass


@pytest.mark.parametrize("error", [Mine("x"), KeyboardInterrupt(), SystemExit(3), GeneratorExit()])
def test_an_error_of_the_body_comes_out_as_it_is_and_the_lease_is_freed(leases, rival, error):
    with pytest.raises(type(error)) as caught, leases.acquire("job"):
        raise error

    assert caught.value is error
    assert getattr(error, "__notes__", []) == []
    wait_until(lambda: rival.try_acquire("job"))  # on asyncio a closed coroutine cannot wait for the release


def test_a_lease_released_inside_the_block_is_no_loss(leases):
    with leases.acquire("job") as lease:
        assert lease.release() is True
        assert lease.release() is False

    assert lease.loss is None


def test_release_by_name_inside_the_block_is_no_loss(leases):
    with leases.acquire("job") as lease:
        assert leases.release("job") is True

    assert lease.loss is None


def test_an_early_return_frees_it(leases, rival):
    def work() -> str:
        with leases.acquire("job"):
            return "early"

    assert work() == "early"
    assert rival.try_acquire("job") is True


def test_a_loop_over_a_generator_with_a_block_inside_frees_it_at_its_end(leases, rival):
    def rows():
        with leases.acquire("job") as lease:
            assert lease
            yield from range(3)

    reading = rows()
    assert next(reading) == 0
    assert rival.try_acquire("job") is False
    reading.close()

    wait_until(lambda: rival.try_acquire("job"))  # on asyncio a closed coroutine cannot wait for the release


def test_a_lease_may_be_used_and_released_on_any_thread(leases, rival):
    with leases.acquire("job") as lease, ThreadPoolExecutor(4) as pool:
        assert all(pool.map(lambda _: lease.held and lease.ensure(1), range(20)))
        assert pool.submit(lease.release).result(10) is True

    assert rival.try_acquire("job") is True


# -- whose it is, where threads are lent -------------------------------------------------------------------------------


@pytest.mark.threads_only
def test_a_thread_that_serves_another_request_meanwhile_does_not_wait_for_itself(leases):
    """As web frameworks do: a block is entered on a thread of a pool in the context of one request."""
    first, second = contextvars.copy_context(), contextvars.copy_context()
    block, given_up = leases.acquire("job"), threading.Event()
    given_up.set()

    assert first.run(block.__enter__)
    with pytest.raises(ReentrantError):
        first.run(lambda: leases.wait_for_lease("job", cancel=given_up))
    with pytest.raises(AcquireTimeout):
        second.run(lambda: leases.wait_for_lease("job", cancel=given_up))
    first.run(block.__exit__, None, None, None)


@pytest.mark.threads_only
def test_a_thread_that_serves_another_request_meanwhile_is_not_let_in_by_a_reentrant_lock(leases):
    first, second = contextvars.copy_context(), contextvars.copy_context()
    lock = leases.lock("job", reentrant=True)

    first.run(lock.__enter__)
    assert first.run(lock.acquire_nowait).fencing_token == 1
    assert not second.run(lock.acquire_nowait)
    first.run(lock.release)
    first.run(lock.__exit__, None, None, None)
    assert is_free(leases)
