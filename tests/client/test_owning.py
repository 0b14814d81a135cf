"""Who owns a lease: the client, a block, or whoever has the handle."""

from __future__ import annotations

import gc
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor

import pytest

from pglease import (
    AcquireTimeout,
    AcquisitionError,
    BackendClosed,
    BackendUnavailable,
    ConfigurationError,
    HeldLease,
    NotOwnedError,
    ReentrantError,
    ReleaseError,
)
from pglease.heartbeat import HeartbeatManager
from pglease.records import Loss
from tests.support.worlds import Stopwatch, wait_until

# -- try_acquire -------------------------------------------------------------------------------------------------------

FACES = ("threads", "asyncio")


def test_try_acquire_is_exactly_true_or_false(leases, rival):
    assert leases.try_acquire("job") is True
    assert leases.try_acquire("job") is False
    assert rival.try_acquire("job") is False


def test_what_try_acquire_took_is_renewed_though_nobody_has_its_handle(leases, rival):
    leases.try_acquire("job", ttl=6)
    gc.collect()
    first = rival.get_lease("job")

    wait_until(lambda: rival.get_lease("job").expires_at > first.expires_at)

    assert rival.get_lease("job").fencing_token == first.fencing_token


def test_try_acquire_takes_the_same_options(leases, rival):
    assert leases.try_acquire("job", "5m", min_hold=10, max_hold=100, metadata={"a": 1}, heartbeat=False)

    assert 299 < rival.get_lease("job").time_remaining() <= 300
    assert rival.get_lease("job").metadata == {"a": 1}
    assert leases.held("job").remaining() <= 100
    leases.release("job")
    assert rival.try_acquire("job") is False


def test_two_threads_of_one_client_exclude_each_other(leases):
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda _: leases.try_acquire("job"), range(32)))

    assert answers.count(True) == 1


# -- wait_for_lease ----------------------------------------------------------------------------------------------------


def test_wait_for_lease_returns_a_handle_that_the_client_owns(leases, rival):
    token = leases.wait_for_lease("job").fencing_token
    gc.collect()

    lease = leases.held("job")
    assert isinstance(lease, HeldLease)
    assert lease.fencing_token == token
    assert rival.try_acquire("job") is False
    assert leases.release("job") is True


def test_wait_for_lease_says_who_has_it_and_until_when(leases, rival):
    rival.try_acquire("job", ttl=60)
    watch = Stopwatch()

    with pytest.raises(AcquireTimeout, match=r"still held by 'rival' until .* UTC") as caught:
        leases.wait_for_lease("job", timeout=0.2)

    assert 0.19 <= watch.seconds < 10
    assert isinstance(caught.value, AcquisitionError | TimeoutError)
    assert (caught.value.name, caught.value.held_by) == ("job", "rival")
    assert 0 < caught.value.retry_after <= 60
    assert leases.holding() == []


@pytest.mark.parametrize("timeout", [10, None, "10s", float("inf")])
def test_wait_for_lease_gets_it_as_soon_as_a_look_finds_it_free(leases, rival, timeout):
    rival.try_acquire("job")
    threading.Timer(0.05, rival.release, ["job"]).start()

    lease = leases.wait_for_lease("job", timeout=timeout, poll_interval=0.1)

    assert lease.held


def test_wait_for_lease_does_not_sleep_past_the_known_expiry(leases, rival):
    rival.try_acquire("job", ttl=0.4, heartbeat=False)
    watch = Stopwatch()

    leases.wait_for_lease("job", timeout=20, poll_interval=15)

    assert watch.seconds < 10


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"timeout": 0}, "timeout"),
        ({"timeout": -1}, "timeout"),
        ({"timeout": "x"}, "timeout"),
        ({"poll_interval": 0}, "poll_interval"),
        ({"poll_interval": float("inf")}, "poll_interval"),
        ({"ttl": 0}, "ttl"),
        ({"name": ""}, "name"),
    ],
)
def test_wait_for_lease_names_what_is_wrong(leases, arguments, named):
    with pytest.raises(ValueError, match=named):
        leases.wait_for_lease(**{"name": "job", **arguments})


def test_wait_for_lease_names_everything_that_is_wrong(leases):
    with pytest.raises(ConfigurationError) as caught:
        leases.wait_for_lease("", ttl=-1, timeout=0, poll_interval=-5)

    assert len(caught.value.problems) == 4


@pytest.mark.threads_only
def test_a_cancel_event_ends_the_wait_at_once(leases, rival):
    rival.try_acquire("job")
    cancel = threading.Event()
    threading.Timer(0.1, cancel.set).start()
    watch = Stopwatch()

    with pytest.raises(AcquireTimeout, match="cancelled"):
        leases.wait_for_lease("job", timeout=None, cancel=cancel)

    assert watch.seconds < 10
    assert leases.holding() == []


@pytest.mark.threads_only
def test_a_cancelled_wait_leaves_no_lease_behind(leases, rival):
    rival.try_acquire("job")
    cancel = threading.Event()
    cancel.set()

    with pytest.raises(AcquireTimeout):
        leases.wait_for_lease("job", timeout=5, cancel=cancel)
    rival.release("job")

    assert rival.try_acquire("job") is True


@pytest.mark.threads_only
def test_a_free_lease_is_got_though_the_wait_is_cancelled_already(leases):
    """The first look is made in any case."""
    cancel = threading.Event()
    cancel.set()

    assert leases.wait_for_lease("job", cancel=cancel).held


def test_waiting_for_what_this_client_got_from_try_acquire_in_this_thread_is_an_error(leases):
    leases.try_acquire("job")

    with pytest.raises(ReentrantError):
        leases.wait_for_lease("job", timeout=None)


# -- release, renew, held, holding by name -----------------------------------------------------------------------------


def test_release_frees_at_once_and_is_idempotent(leases, rival):
    leases.try_acquire("job")

    assert leases.release("job") is True
    assert leases.release("job") is False
    assert rival.try_acquire("job") is True


def test_release_of_what_another_has_is_false_and_changes_nothing(leases, rival):
    rival.try_acquire("job")

    assert leases.release("job") is False
    assert rival.held("job").held
    assert leases.try_acquire("job") is False


def test_release_of_what_nobody_knows_is_false(leases):
    assert leases.release("never heard of") is False


@pytest.mark.parametrize("name", ["", "a\nb", 7, ["job"]])
def test_release_of_what_is_no_name_is_refused(leases, name):
    with pytest.raises(ConfigurationError, match="name must"):
        leases.release(name)


def test_what_is_taken_anew_after_a_release_without_an_answer_is_owned_in_its_place(leases, store, monkeypatch):
    assert leases.try_acquire("job")
    with monkeypatch.context() as meanwhile:
        meanwhile.setattr(leases.backend, "release", lambda *_args, **_options: _away())
        meanwhile.setattr(leases.backend, "begin_release", lambda *_args, **_options: None, raising=False)
        with pytest.raises(ReleaseError):
            leases.release("job")
        store.lapse("job")

        assert leases.try_acquire("job")
        (owned,) = leases.taking.owned.values()

    assert owned.fencing_token == 2
    assert leases.release("job")
    assert leases.taking.owned == {}


def test_what_is_lost_before_the_client_could_own_it_is_forgotten(leases, monkeypatch):
    begin = HeartbeatManager.begin

    def begin_and_lose(manager, hold):
        begin(manager, hold)
        hold.lose(Loss("forced"))

    with monkeypatch.context() as meanwhile:
        meanwhile.setattr(HeartbeatManager, "begin", begin_and_lose)
        leases.try_acquire("job")

    assert leases.held("job") is None
    assert leases.taking.owned == {}


def _away():
    raise BackendUnavailable("the store is away")


def test_release_of_a_lease_that_lapsed_and_went_to_another_is_false_and_takes_nothing(leases, rival, store):
    leases.try_acquire("job", heartbeat=False)
    store.lapse("job")
    assert rival.try_acquire("job")

    assert leases.release("job") is False
    assert rival.held("job").held
    assert rival.get_lease("job").owner_id == "rival"


def test_renew_extends_from_now_by_the_ttl_or_by_what_is_said(leases, rival):
    leases.try_acquire("job", ttl=30)
    token = leases.held("job").fencing_token

    leases.renew("job")
    assert 29 < rival.get_lease("job").time_remaining() <= 30
    leases.renew("job", "10m")
    assert 599 < rival.get_lease("job").time_remaining() <= 600
    assert leases.held("job").remaining() > 500

    leases.renew("job")
    assert rival.get_lease("job").time_remaining() > 590, "the longer ttl holds for later renewals too"
    assert leases.held("job").fencing_token == token


def test_renew_of_what_this_client_does_not_hold_is_an_error(leases, rival):
    rival.try_acquire("job")

    for name in ("job", "never heard of"):
        with pytest.raises(NotOwnedError, match="does not hold") as caught:
            leases.renew(name)
        assert caught.value.name == name


def test_renew_of_what_lapsed_is_an_error_and_a_loss(leases, rival, store):
    leases.try_acquire("job", heartbeat=False)
    lease = leases.held("job")
    store.lapse("job")

    with pytest.raises(NotOwnedError, match="ran out"):
        leases.renew("job")

    assert lease.loss.reason == "expired"
    assert leases.held("job") is None
    assert rival.try_acquire("job") is True


@pytest.mark.parametrize("ttl", [0, -1, "x", True, float("inf")])
def test_renew_names_a_wrong_ttl_and_changes_nothing(leases, ttl):
    leases.try_acquire("job")

    with pytest.raises(ConfigurationError, match="ttl"):
        leases.renew("job", ttl)

    assert leases.held("job").held


def test_held_is_the_handle_or_none(leases, rival):
    assert leases.held("job") is None
    leases.try_acquire("job")

    lease = leases.held("job")
    assert lease == leases.held("job")
    assert rival.held("job") is None
    leases.release("job")
    assert leases.held("job") is None
    assert not lease.held


def test_holding_is_everything_in_order_of_names(leases, rival):
    for name in ("b", "c", "a"):
        leases.try_acquire(name)
    rival.try_acquire("d")

    with leases.acquire("aa"):
        assert [lease.name for lease in leases.holding()] == ["a", "aa", "b", "c"]

    leases.release("b")
    assert [lease.name for lease in leases.holding()] == ["a", "c"]


@pytest.mark.parametrize("verb", ["release", "held", "renew", "get_lease"])
@pytest.mark.parametrize("name", ["", "a\0b", None, "x" * 256])
def test_every_verb_refuses_what_is_no_name(leases, verb, name):
    with pytest.raises(ConfigurationError, match="name"):
        getattr(leases, verb)(name)


# -- the handle's own --------------------------------------------------------------------------------------------------


def test_a_handle_outside_a_block_is_dropped_with_a_warning_and_released(leases, rival):
    lease = leases.acquire("job").__enter__()
    assert lease.held

    with pytest.warns(ResourceWarning, match="'job' was dropped without a release"):  # noqa: PT031  # both
        del lease
        gc.collect()

    wait_until(lambda: rival.try_acquire("job"))
    assert leases.holding() == []


def test_a_handle_that_was_released_is_dropped_in_silence(leases):
    lease = leases.acquire("job").__enter__()
    lease.release()

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        del lease
        gc.collect()


def test_a_handle_that_was_lost_is_dropped_in_silence(leases, store):
    lease = leases.acquire("job", heartbeat=False).__enter__()
    store.lapse("job")
    assert lease.ensure(1000) is False
    assert lease.lost.is_set()

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        del lease
        gc.collect()


def test_handles_of_what_the_client_owns_may_be_dropped(leases):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        leases.wait_for_lease("job")
        leases.try_acquire("other")
        gc.collect()

    assert [lease.name for lease in leases.holding()] == ["job", "other"]


@pytest.mark.threads_only
def test_a_client_that_was_dropped_gives_back_what_it_owned(store, rival):
    from pglease import PGLease

    careless = PGLease(store.dsn or store._memory.another(), "careless")
    careless.try_acquire("job", ttl=600)

    with pytest.warns(ResourceWarning, match="dropped while it held 1 lease"):  # noqa: PT031  # both
        del careless
        gc.collect()

    wait_until(lambda: rival.try_acquire("job"))


# -- the end -----------------------------------------------------------------------------------------------------------


def test_close_gives_back_what_the_client_owns_and_every_later_call_says_closed(leases, rival):
    leases.try_acquire("job")
    waited = leases.wait_for_lease("other")

    leases.close()

    assert not waited.held
    assert rival.try_acquire("job") is True
    assert rival.try_acquire("other") is True
    for call in (
        lambda: leases.try_acquire("x"),
        lambda: leases.wait_for_lease("x"),
        lambda: leases.acquire("x").__enter__(),
        lambda: leases.release("x"),
        lambda: leases.renew("x"),
        lambda: leases.held("x"),
        leases.holding,
        lambda: leases.get_lease("x"),
        leases.list_leases,
        leases.cleanup_expired,
        lambda: leases.force_release("x", 1),
        leases.singleton_task("x")(lambda: None),
    ):
        with pytest.raises(BackendClosed, match="closed"):
            call()


def test_a_second_close_is_harmless(leases):
    leases.close()
    leases.close()

    assert "closed" in repr(leases)


def test_many_may_close_at_once(leases, rival):
    leases.try_acquire("job")

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda _: leases.close(), range(16)))

    assert rival.try_acquire("job") is True


def test_a_block_whose_client_is_closed_has_lost_its_lease(leases, rival):
    from pglease import LeaseLostError

    with pytest.raises(LeaseLostError) as caught, leases.acquire("job") as lease:
        leases.close()
        assert not lease.held
        assert lease.lost.is_set()

    assert caught.value.reason == "closed"
    wait_until(lambda: rival.try_acquire("job"))


def test_leaving_a_client_closes_it(store, rival):
    with store.client("short") as client:
        client.try_acquire("job")

    assert rival.try_acquire("job") is True
    with pytest.raises(BackendClosed):
        client.holding()


def test_close_leaves_no_thread_of_ours_behind(store):
    client = store.client("threads")
    client.try_acquire("job", ttl=3)
    mine = client.heartbeat_manager._thread
    assert mine.is_alive()

    client.close()

    assert not mine.is_alive()


def test_min_hold_outlives_the_client(leases, rival):
    leases.try_acquire("job", min_hold=30)

    leases.close()

    assert rival.try_acquire("job") is False
    assert 25 < rival.get_lease("job").time_remaining() <= 30
