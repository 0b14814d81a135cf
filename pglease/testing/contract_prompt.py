"""The part of the contract about holders that die: C19, for stores with the trait `prompt_failover`."""

# ruff: noqa: D102  # the names of the tests are sentences

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from pglease import clock
from pglease.bonds import Bond
from pglease.records import Gone, Granted, Loss
from pglease.testing.clauses import clauses
from pglease.testing.harness import LONG, Hold, Worker, World, budget

SOON = 10.0
"""Seconds within which a store has noticed a death, on a crowded machine; a ttl here is far longer."""


class PromptContract:
    """Clause C19, and what it owes to C1, C3, C5 and C6."""

    @clauses("C19")
    def test_a_store_without_the_trait_binds_nothing(self, world: World) -> None:
        if world.alice.backend.traits.prompt_failover:
            pytest.skip("this store has the trait 'prompt_failover'")

        assert world.alice.hold("job").bond is None
        assert world.bob.is_refused("job").look_every == float("inf")

    @clauses("C19")
    def test_the_holder_is_told_that_its_session_died(self, world: World) -> None:
        hold, told = _bound_hold(world, "job"), _Told()
        assert hold.bond is not None
        hold.bond.when_broken(told)

        world.harness.end_session(world.alice.backend)

        loss = told.within(SOON)
        assert loss.reason == "session_died"
        assert hold.bond.loss is loss
        assert hold.bond.until < clock.now()

    @clauses("C19")
    def test_whoever_listens_too_late_is_told_at_once(self, world: World) -> None:
        hold, told = _bound_hold(world, "job"), _Told()
        world.harness.end_session(world.alice.backend)
        _broken(hold)

        assert hold.bond is not None
        hold.bond.when_broken(told)

        assert told.within(0.0).reason == "session_died"

    @clauses("C19", "C5")
    def test_a_hold_whose_session_died_is_not_renewed(self, world: World) -> None:
        hold = _bound_hold(world, "job")
        world.harness.end_session(world.alice.backend)
        _broken(hold)

        assert hold.renew() == Gone("session_died")
        assert world.bob.sees("job").expires_at == hold.lease.expires_at

    @clauses("C19", "C3", "C23")
    def test_the_name_of_a_dead_holder_is_granted_long_before_its_ttl(self, world: World) -> None:
        hold = _bound_hold(world, "job")

        world.harness.end_session(world.alice.backend)

        assert _granted_soon(world.bob, "job") == hold.token + 1
        assert hold.bond is not None
        assert hold.bond.loss is not None
        if world.harness.history:
            remembering: Any = world.bob.backend
            assert [past.ending for past in remembering.history("job", budget(), limit=2)] == ["died", None]

    @clauses("C19", "C1")
    def test_a_refusal_says_how_often_to_look_for_a_death(self, world: World) -> None:
        _bound_hold(world, "job")

        refused = world.bob.is_refused("job")

        assert 0 < refused.look_every < 1.0

    @clauses("C19", "C1")
    def test_a_living_holder_keeps_its_name_however_often_others_ask(self, world: World) -> None:
        hold = _bound_hold(world, "job")
        until = clock.now() + 1.0

        while clock.now() < until:
            world.bob.is_refused("job")
            world.carol.is_refused("job")

        assert hold.bond is not None
        assert hold.bond.loss is None
        hold.renewed()

    @clauses("C19", "C9")
    def test_one_death_frees_the_holds_of_that_client_and_no_others(self, world: World) -> None:
        first, second = _bound_hold(world, "first"), _bound_hold(world, "second")
        others = _bound_hold(world, "others", world.carol)

        world.harness.end_session(world.alice.backend)

        _broken(first)
        _broken(second)
        assert _granted_soon(world.bob, "first")
        assert _granted_soon(world.bob, "second")
        assert others.bond is not None
        assert others.bond.loss is None
        world.bob.is_refused("others")

    @clauses("C19", "C3")
    def test_the_client_of_a_dead_session_takes_new_leases(self, world: World) -> None:
        _broken_by_the_store(world, "job")

        again = _bound_hold(world, "another")

        assert again.bond is not None
        assert again.bond.loss is None
        assert _granted_soon(world.alice, "job")

    @clauses("C19", "C6")
    def test_a_hold_that_is_only_waited_out_is_bound_to_nobody(self, world: World) -> None:
        _bound_hold(world, "job").released(min_hold=LONG)

        world.harness.end_session(world.alice.backend)

        until = clock.now() + 1.0
        while clock.now() < until:
            world.bob.is_refused("job")

    @clauses("C19", "C15")
    def test_closing_a_client_breaks_no_bond(self, world: World) -> None:
        hold = _bound_hold(world, "job", world.worker("guest"))

        hold.worker.backend.close()

        assert hold.bond is not None
        assert hold.bond.loss is None
        until = clock.now() + 1.0
        while clock.now() < until:
            world.bob.is_refused("job")

    @clauses("C19", "C7")
    def test_a_hold_that_was_taken_from_a_lapsed_one_is_bound_in_time(self, world: World) -> None:
        world.needs("prompt_failover")
        world.lapsed_hold("job")
        hold = world.bob.hold("job")

        _tied(hold)
        world.harness.end_session(world.bob.backend)

        assert _granted_soon(world.carol, "job") == hold.token + 1


class _Told:
    """A listener that remembers."""

    def __init__(self) -> None:
        self._losses: list[Loss] = []
        self._heard = threading.Event()

    def __call__(self, loss: Loss) -> None:
        self._losses.append(loss)
        self._heard.set()

    def within(self, seconds: float) -> Loss:
        assert self._heard.wait(seconds), "nobody was told"
        (loss,) = self._losses
        return loss


def _bound_hold(world: World, name: str, worker: Worker | None = None) -> Hold:
    """Return a hold of alice's (or `worker`'s) that depends on a session."""
    world.needs("prompt_failover")
    hold = (worker or world.alice).hold(name)
    _tied(hold)
    return hold


def _tied(hold: Hold) -> None:
    _soon(hold, lambda bond: bond.anchor is not None)


def _broken(hold: Hold) -> None:
    _soon(hold, lambda bond: bond.loss is not None)


def _soon(hold: Hold, condition: Callable[[Bond], bool]) -> None:
    assert hold.bond is not None
    until = clock.now() + SOON
    while not condition(hold.bond):
        assert clock.now() < until, f"not within {SOON} s"
        time.sleep(0.01)


def _broken_by_the_store(world: World, name: str) -> None:
    hold = _bound_hold(world, name)
    world.harness.end_session(world.alice.backend)
    _broken(hold)


def _granted_soon(worker: Worker, name: str) -> int:
    """Ask, as a waiter does, until the name is granted; return the token."""
    until = clock.now() + SOON
    while clock.now() < until:
        answer = worker.ask(name)
        if isinstance(answer, Granted):
            return answer.lease.fencing_token
        time.sleep(min(answer.look_every, answer.retry_after, 0.2))
    raise AssertionError(f"{name!r} was not free within {SOON} s")
