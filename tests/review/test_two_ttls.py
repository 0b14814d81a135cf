"""A renewal by hand with another ttl: belief never outlives the hold, whatever the store heard last."""

from __future__ import annotations

import threading

import pytest

from pglease import BackendUnavailable, MemoryBackend, PGLease, clock
from pglease.backends.base import Budget
from pglease.backends.postgres import PostgresBackend
from tests.attacks.world import sql

LEFT = "SELECT date_part('epoch', expires_at - clock_timestamp()) FROM pglease_leases"


def test_a_shorter_ttl_whose_confirmation_is_lost_shortens_belief_all_the_same(dsn, leases, monkeypatch):
    lease = leases.wait_for_lease("job", ttl=60)
    real = PostgresBackend.renew

    def renew(self, *args, **kwargs):
        real(self, *args, **kwargs)
        raise BackendUnavailable("the reply was lost", outcome_unknown=True)

    monkeypatch.setattr(PostgresBackend, "renew", renew)
    with pytest.raises(BackendUnavailable):
        lease.renew(ttl=5)

    assert lease.remaining() < sql(dsn, LEFT)[0][0] <= 5


def test_a_shortened_hold_whose_confirmation_was_lost_is_renewed_in_time(dsn, leases, monkeypatch):
    lease = leases.wait_for_lease("job", ttl=60)
    real, renewed = PostgresBackend.renew, threading.Event()

    def renew(self, *args, **kwargs):
        monkeypatch.setattr(PostgresBackend, "renew", again)
        raise BackendUnavailable("the request was lost", outcome_unknown=True)

    def again(self, *args, **kwargs):
        try:
            return real(self, *args, **kwargs)
        finally:
            renewed.set()

    monkeypatch.setattr(PostgresBackend, "renew", renew)
    with pytest.raises(BackendUnavailable):
        lease.renew(ttl=1)

    assert renewed.wait(30)
    assert lease.held


def test_a_renewal_in_flight_with_the_old_ttl_does_not_shorten_a_longer_one(dsn, monkeypatch):
    with PGLease(dsn, heartbeat_interval=0.1) as leases:
        heartbeat_asks, hand_has_asked = threading.Event(), threading.Event()
        real = PostgresBackend.renew

        def renew(self, renewals, budget):
            by_hand = threading.current_thread() is threading.main_thread()
            if not by_hand and not heartbeat_asks.is_set():
                heartbeat_asks.set()
                hand_has_asked.wait(0.5)  # the store hears of the old ttl last
                return real(self, renewals, budget)
            answer = real(self, renewals, budget)
            if by_hand:
                hand_has_asked.set()
            return answer

        monkeypatch.setattr(PostgresBackend, "renew", renew)
        lease = leases.wait_for_lease("job", ttl=3)
        assert heartbeat_asks.wait(5)

        leases.heartbeat_manager._interval = None  # no other renewal follows soon
        lease.renew(ttl=60)

        assert lease.held
        believed = lease.remaining()
        assert believed < sql(dsn, LEFT)[0][0]
        assert believed > 50


def test_a_belief_in_the_old_ttl_does_not_come_after_one_in_a_shorter_one(dsn, monkeypatch):
    from pglease.handles import Hold

    with PGLease(dsn, heartbeat_interval=0.1) as leases:
        heartbeat_knows, hand_is_done, heartbeat_believes = threading.Event(), threading.Event(), threading.Event()
        real = Hold.confirm

        def confirm(self, term):
            if threading.current_thread().name == "pglease-heartbeat" and not heartbeat_knows.is_set():
                heartbeat_knows.set()
                hand_is_done.wait(0.5)
                try:
                    return real(self, term)
                finally:
                    heartbeat_believes.set()
            return real(self, term)

        monkeypatch.setattr(Hold, "confirm", confirm)
        lease = leases.wait_for_lease("job", ttl=60)
        assert heartbeat_knows.wait(5)
        leases.heartbeat_manager._interval = None
        lease.renew(ttl=5)
        hand_is_done.set()
        assert heartbeat_believes.wait(5)

        until = lease._hold.due
        assert until - clock.now() < sql(dsn, LEFT)[0][0] <= 5


class Silent(MemoryBackend):
    """A store that the thread can ask by a ttl below 60 just once, unheard; by 60 it is heard, at its time."""

    def __init__(self):
        super().__init__()
        self.heard, self.asked_by_less, self.asked_by_60 = threading.Event(), threading.Event(), threading.Event()
        self.heard.set()

    def renew(self, renewals, budget):
        if threading.current_thread() is threading.main_thread():
            raise BackendUnavailable("the request was lost")
        if renewals[0].ttl < 60 and self.asked_by_less.is_set():
            raise BackendUnavailable("the request was lost")
        answer = super().renew(renewals, budget)
        asked = self.asked_by_60 if renewals[0].ttl == 60 else self.asked_by_less
        asked.set()
        assert self.heard.wait(30)
        if asked is self.asked_by_less:
            raise BackendUnavailable("the reply was lost", outcome_unknown=True)
        return answer


@pytest.fixture
def silent():
    store = Silent()
    with PGLease(store, heartbeat_interval=0.01, margin=0.25) as leases:
        yield store, leases
        store.heard.set()


def test_a_shorter_ttl_that_the_thread_asks_for_unheard_meanwhile_is_believed_in_for_no_longer(silent, monkeypatch):
    store, leases = silent
    lease, real = leases.wait_for_lease("job", ttl=60), leases.heartbeat_manager.margin_for

    def margin_for(ttl):
        """Give the thread time, while the new ttl is being said."""
        if ttl == 20 and threading.current_thread() is threading.main_thread():
            store.heard.clear()
            store.asked_by_less.wait(0.3)
            threading.Timer(0.8, store.heard.set).start()
        return real(ttl)

    monkeypatch.setattr(leases.heartbeat_manager, "margin_for", margin_for)
    with pytest.raises(BackendUnavailable):
        lease.renew(ttl=20)

    assert store.asked_by_less.wait(30)
    until, left = lease._hold.due, leases.get_lease("job").time_remaining()
    assert until - clock.now() < left <= 20


def test_a_shorter_ttl_counts_though_a_renewal_by_the_old_one_is_stuck_and_answered_later(silent):
    store, leases = silent
    lease = leases.wait_for_lease("job", ttl=60)
    store.heard.clear()
    store.asked_by_60.clear()
    assert store.asked_by_60.wait(30)

    assert not leases.heartbeat_manager._change_ttl(lease._hold, 20, Budget.of(0.0, clock.now))
    store.heard.set()

    assert store.asked_by_less.wait(30)
    until, left = lease._hold.due, leases.get_lease("job").time_remaining()
    assert until - clock.now() < left <= 20
