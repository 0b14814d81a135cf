"""A bond: loose, tied, broken, and what a hold makes of it."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from pglease import PGLease, clock
from pglease.backends.base import Budget
from pglease.backends.memory import MemoryBackend
from pglease.bonds import Bond
from pglease.records import Granted, Loss, Refused, Request
from pglease.testing.fake_clock import FakeClock

DIED = Loss("session_died")


@dataclass
class Anchor:
    until: float


class Binding(MemoryBackend):
    """A store whose grants depend on something."""

    def __init__(self, bond: Bond) -> None:
        super().__init__()
        self._bond = bond

    def try_acquire(self, request: Request, budget: Budget) -> Granted | Refused:
        answer = super().try_acquire(request, budget)
        return Granted(answer.lease, self._bond) if isinstance(answer, Granted) else answer


def test_a_loose_bond_limits_nothing() -> None:
    assert Bond().until == float("inf")


def test_a_tied_bond_holds_for_as_long_as_its_anchor() -> None:
    bond, anchor = Bond(), Anchor(5.0)
    bond.tie(anchor)

    assert bond.until == 5.0
    anchor.until = 7.0
    assert bond.until == 7.0


def test_a_broken_bond_is_over_whatever_its_anchor_says() -> None:
    bond = Bond()
    bond.tie(Anchor(5.0))

    bond.sever(DIED)

    assert bond.until == float("-inf")


def test_the_first_reason_stays() -> None:
    bond = Bond()
    bond.sever(DIED)

    bond.sever(Loss("closed"))

    assert bond.loss is DIED


def test_each_listener_is_told_once_and_not_before_it_is_time() -> None:
    bond = Bond()
    told: list[Loss] = []
    bond.when_broken(told.append)
    bond.sever(DIED)
    assert told == []

    bond.tell()
    bond.tell()

    assert told == [DIED]


def test_a_held_lease_is_over_the_moment_its_bond_breaks_though_nobody_was_told() -> None:
    bond = Bond()
    with PGLease(Binding(bond)) as leases:
        leases.try_acquire("job", ttl=60)
        lease = leases.held("job")
        assert lease is not None
        assert lease.held

        bond.sever(DIED)

        assert not lease.held
        assert lease.remaining() == 0
        assert lease.loss == DIED


def test_a_loss_by_the_bond_is_told_like_any_other() -> None:
    bond = Bond()
    lost: list[str] = []
    with PGLease(Binding(bond), on_lease_lost=lost.append) as leases:
        leases.try_acquire("job", ttl=60)
        lease = leases.held("job")
        assert lease is not None

        bond.sever(DIED)
        bond.tell()

        assert lease.lost.wait(5)
        assert leases.held("job") is None
        assert leases.release("job") is False


def test_a_bond_that_broke_before_its_lease_was_begun_is_a_loss() -> None:
    bond = Bond()
    bond.sever(DIED)
    with PGLease(Binding(bond)) as leases:
        leases.try_acquire("job", ttl=60)

        assert leases.held("job") is None


def test_an_anchor_that_is_silent_for_too_long_ends_the_hold_by_time_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    bond = Bond()
    bond.tie(Anchor(clock.now() + 100))
    with PGLease(Binding(bond)) as leases:
        leases.try_acquire("job", ttl=600)
        lease = leases.held("job")
        assert lease is not None
        assert 90 < lease.remaining() <= 100

        later = FakeClock(clock.now() + 101)
        monkeypatch.setattr(clock, "now", later)

        assert not lease.held
        assert lease.loss is not None
        assert lease.loss.reason == "session_died"


class Blinking:
    """An anchor that is over for one look, when asked to be."""

    def __init__(self) -> None:
        self.blinks = 0

    @property
    def until(self) -> float:
        self.blinks -= 1
        return float("-inf") if self.blinks >= 0 else float("inf")


def test_a_hold_that_ends_in_the_moment_in_which_its_anchor_answers_at_last_is_over_and_renewed_no_more() -> None:
    bond, anchor = Bond(), Blinking()
    bond.tie(anchor)
    with PGLease(Binding(bond)) as leases:
        lease = leases.wait_for_lease("job", ttl=60)
        anchor.blinks = 1

        leases.release("job")

        assert not lease.held
        assert leases.heartbeat_manager.holds() == []
