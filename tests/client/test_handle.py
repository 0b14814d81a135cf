"""The handle: what its holder may believe, and how a loss is heard of."""

from __future__ import annotations

import copy
import logging
import pickle
import threading
from datetime import timedelta

import pytest

from pglease import ConfigurationError, LeaseLostError, NotOwnedError
from tests.support.worlds import wait_until

# -- what it says ------------------------------------------------------------------------------------------------------

FACES = ("threads", "asyncio")


def test_a_handle_says_what_it_is(leases, rival):
    with leases.acquire("job", ttl=30, metadata={"a": 1}) as lease:
        record = rival.get_lease("job")

        assert (lease.name, lease.owner_id, lease.fencing_token) == ("job", "ours", record.fencing_token)
        assert lease.acquired_at == record.acquired_at
        assert lease.metadata == {"a": 1}
        assert lease.lease.expires_at - lease.lease.acquired_at == timedelta(seconds=30)
        assert lease.held is True
        assert bool(lease) is True
        assert lease.loss is None
        lease.raise_if_lost()
        assert "'job'" in repr(lease)
        assert "held" in repr(lease)
    assert "released" in repr(lease)


def test_remaining_has_the_margin_taken_off_and_is_nothing_once_it_is_over(leases, store):
    with leases.acquire("job", ttl=100) as lease:
        assert 90 < lease.remaining() <= 95
    assert lease.remaining() == 0.0

    patient = store.client("patient", margin=20)
    with patient.acquire("job", ttl=100) as lease:
        assert 75 < lease.remaining() <= 80


def test_released_is_not_lost(leases):
    with leases.acquire("job") as lease:
        pass

    assert not lease.held
    assert not lease.lost.is_set()
    assert lease.loss is None
    lease.raise_if_lost()


def test_its_facts_cannot_be_changed(leases):
    with leases.acquire("job") as lease:
        for name in ("held", "loss", "lost", "acquired_at", "metadata", "anything"):
            with pytest.raises(AttributeError):
                setattr(lease, name, 1)


@pytest.mark.parametrize("leak", [pickle.dumps, copy.copy, copy.deepcopy])
def test_neither_handle_nor_client_is_pickled_or_copied(leases, leak):
    with leases.acquire("job") as lease:
        for thing in (lease, leases):
            with pytest.raises(TypeError, match="belongs to its process"):
                leak(thing)


# -- ensure, renew -----------------------------------------------------------------------------------------------------


def test_ensure_renews_only_if_that_is_needed_and_helps(leases):
    with leases.acquire("job", ttl=20, heartbeat=False) as lease:
        first = lease.lease.heartbeat_at

        assert lease.ensure(0) is True
        assert lease.ensure(10) is True
        assert lease.lease.heartbeat_at == first, "there was no need to ask"
        wait_until(lambda: lease.remaining() < 18.8)
        assert lease.ensure(18.8) is True
        assert lease.lease.heartbeat_at > first
        assert lease.ensure(19.5) is False, "the ttl, margin taken off, is shorter"
        assert lease.ensure("2m") is False
        assert lease.held

    assert lease.ensure(0) is False
    assert lease.ensure(1) is False


@pytest.mark.parametrize("seconds", [-1, float("nan"), float("inf"), True, None, "x"])
def test_ensure_names_what_is_no_duration(leases, seconds):
    with leases.acquire("job") as lease, pytest.raises(ConfigurationError, match="seconds"):
        lease.ensure(seconds)


def test_renewing_by_hand_moves_the_expiry_and_keeps_the_token(leases, rival):
    with leases.acquire("job", ttl=30, heartbeat=False) as lease:
        token, first = lease.fencing_token, lease.lease

        lease.renew()
        assert lease.lease.expires_at > first.expires_at
        lease.renew(600)
        assert 560 < lease.remaining() < 600
        assert rival.get_lease("job").time_remaining() > 590
        assert lease.fencing_token == token == rival.get_lease("job").fencing_token


def test_a_shorter_ttl_by_hand_ends_it_sooner(leases, rival):
    with leases.acquire("job", ttl=600) as lease:
        lease.renew(5)

        assert rival.get_lease("job").time_remaining() <= 5
        assert lease.remaining() < 5


def test_what_was_released_is_not_renewed(leases, rival):
    with leases.acquire("job") as lease:
        pass

    with pytest.raises(NotOwnedError, match="it was released"):
        lease.renew()
    assert rival.try_acquire("job") is True


# -- losing ------------------------------------------------------------------------------------------------------------


def test_a_holder_that_was_forced_out_hears_of_it_at_its_next_renewal(leases, rival):
    with pytest.raises(LeaseLostError, match="operator") as caught, leases.acquire("job", ttl=2.4) as lease:
        assert rival.force_release("job", lease.fencing_token) is True
        assert lease.lost.wait(5)
        assert not lease.held

    assert caught.value.reason == lease.loss.reason == "forced"


@pytest.mark.parametrize(
    ("how", "reason"), [("lapse", "expired"), ("delete", "deleted"), ("force", "forced"), ("take", "taken")]
)
def test_a_renewal_by_hand_notices_a_loss_and_says_why(leases, rival, store, how, reason):
    lease = leases.acquire("job", heartbeat=False).__enter__()
    if how == "delete":
        store.delete("job")
    elif how == "force":
        rival.force_release("job", lease.fencing_token)
    else:
        store.lapse("job")
    if how == "take":
        rival.try_acquire("job")

    assert lease.ensure(1000) is False

    assert not lease.held
    assert lease.lost.is_set()
    assert lease.loss.reason == reason
    assert lease.loss.taken_by == ("rival" if how == "take" else None)
    assert reason in repr(lease)
    assert lease.release() is False
    with pytest.raises(NotOwnedError):
        lease.renew()
    with pytest.raises(LeaseLostError) as caught:
        lease.raise_if_lost()
    assert (caught.value.name, caught.value.reason) == ("job", reason)
    if how == "take":
        assert rival.held("job").held


def test_a_loss_that_nobody_noticed_is_noticed_in_leaving(leases, rival, store):
    with pytest.raises(LeaseLostError) as caught, leases.acquire("job", heartbeat=False):
        store.lapse("job")
        rival.try_acquire("job")
        store.set_back_the_grant("job")

    assert caught.value.reason == "taken"
    assert "rival" in str(caught.value)
    assert rival.held("job").held


def test_on_lost_log_leaves_it_to_the_log(leases, store, caplog):
    with leases.acquire("job", heartbeat=False, on_lost="log") as lease:
        store.lapse("job")

    assert lease.loss.reason == "expired"
    (told,) = wait_until(lambda: [record for record in caplog.records if "was lost" in record.getMessage()])
    assert told.levelno == logging.ERROR


def test_an_error_of_the_body_comes_out_with_the_loss_as_a_note(leases, store):
    with pytest.raises(ZeroDivisionError) as caught, leases.acquire("job", heartbeat=False):
        store.lapse("job")
        raise ZeroDivisionError

    (note,) = caught.value.__notes__
    assert "'job' was lost" in note
    assert caught.value.__cause__ is None


def test_on_lost_log_adds_no_note(leases, store):
    with pytest.raises(ZeroDivisionError) as caught, leases.acquire("job", heartbeat=False, on_lost="log"):
        store.lapse("job")
        raise ZeroDivisionError

    assert not hasattr(caught.value, "__notes__")


def test_a_lost_lease_can_be_taken_again_under_a_larger_token(leases, store):
    lease = leases.acquire("job", heartbeat=False).__enter__()
    store.lapse("job")
    lease.ensure(1000)

    with leases.acquire("job") as again:
        assert again.fencing_token == lease.fencing_token + 1
        assert not lease.held
        assert leases.held("job") == again
        assert lease.release() is False
        assert again.held


def test_a_renewal_cannot_bring_a_lost_hold_back(leases, store):
    lease = leases.acquire("job", ttl=0.4, heartbeat=False).__enter__()
    assert lease.lost.wait(5)

    with pytest.raises(NotOwnedError):
        lease.renew(600)

    assert not lease.held
    assert lease.loss.reason == "expired"


# -- the client's callback ---------------------------------------------------------------------------------------------


def test_the_callback_is_called_once_on_a_thread_of_its_own_and_may_call_back(store, rival):
    heard: list[tuple[str, str, bool]] = []

    def on_lost(name: str) -> None:
        heard.append((name, threading.current_thread().name, client.held(name) is None and client.try_acquire("else")))

    client = store.client("ours", on_lease_lost=on_lost)
    client.try_acquire("job", ttl=2.4)
    rival.force_release("job", client.held("job").fencing_token)

    wait_until(lambda: heard)
    assert heard == [("job", "pglease-lost", True)]
    client.close()
    assert len(heard) == 1, "what close ends is no loss"


def test_a_callback_that_fails_is_logged_and_the_others_are_renewed(store, rival, caplog):
    def on_lost(name: str) -> None:
        raise SystemExit("a careless callback")

    client = store.client("ours", on_lease_lost=on_lost)
    client.try_acquire("job", ttl=2.4)
    client.try_acquire("other", ttl=2.4)
    other = client.held("other")
    rival.force_release("job", client.held("job").fencing_token)

    wait_until(lambda: "on_lease_lost failed" in caplog.text)
    first = other.lease.heartbeat_at
    wait_until(lambda: other.lease.heartbeat_at > first)
    assert other.held


def test_a_callback_may_close_its_client(store, rival):
    closed = threading.Event()

    def on_lost(name: str) -> None:
        client.close()
        closed.set()

    client = store.client("ours", on_lease_lost=on_lost)
    client.try_acquire("job", ttl=2.4)
    client.try_acquire("other")
    rival.force_release("job", client.held("job").fencing_token)

    assert closed.wait(10)
    assert rival.try_acquire("other") is True


def test_a_release_is_no_loss_for_the_callback(store):
    heard: list[str] = []
    client = store.client("ours", on_lease_lost=heard.append)
    client.try_acquire("job")
    client.release("job")
    with client.acquire("job"):
        pass
    with pytest.raises(LeaseLostError), client.acquire("job", heartbeat=False):
        store.lapse("job")

    wait_until(lambda: heard)
    assert heard == ["job"]


def test_nobody_is_stuck_in_a_healthy_client(leases):
    leases.try_acquire("job", ttl=2)

    assert leases.heartbeat_manager.get_zombie_threads() == []
    assert leases.heartbeat_manager.is_alive()
