"""The part of the contract that guarded writes rest on: C18, for stores with the trait."""

# ruff: noqa: D102  # the names of the tests are sentences

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from pglease import clock
from pglease.backends.base import fencing
from pglease.errors import BackendUnavailable, ConfigurationError, FencedError
from pglease.records import Claim, Granted, Lease
from pglease.testing.clauses import clauses
from pglease.testing.harness import LONG, Hold, World, new_id


def _given_back(world: World, *, min_hold: float = 0.0) -> Claim:
    hold = world.alice.hold("job")
    hold.released(min_hold=min_hold)
    return hold.claim


def _forced(world: World) -> Claim:
    hold = world.alice.hold("job")
    assert world.bob.force("job", hold.token)
    return hold.claim


def _taken_over(world: World) -> Claim:
    lapsed = world.lapsed_hold("job")
    world.bob.hold("job")
    return lapsed.claim


def _second_hold(world: World) -> Hold:
    world.alice.hold("job").released()
    return world.alice.hold("job")


STALE: dict[str, Callable[[World], Claim]] = {
    "released": _given_back,
    "released into min_hold": lambda world: _given_back(world, min_hold=LONG),
    "forced": _forced,
    "lapsed": lambda world: world.lapsed_hold("job").claim,
    "taken over": _taken_over,
    "held by another": lambda world: replace(world.alice.hold("job").claim, lease_id=new_id()),
    "of an older token": lambda world: replace(_second_hold(world).claim, fencing_token=1),
    "of a token to come": lambda world: replace(world.alice.hold("job").claim, fencing_token=2),
    "of another name": lambda world: replace(world.alice.hold("job").claim, name="work"),
}
"""Claims that are not current, each with how it came to be so."""
every_stale_claim = pytest.mark.parametrize("stale", STALE)


class FencingContract:
    """Clause C18."""

    @clauses("C18")
    def test_a_store_that_cannot_fence_says_so_by_the_name_of_the_trait(self, world: World) -> None:
        if world.alice.backend.traits.transactional_fencing:
            pytest.skip("this store has the trait 'transactional_fencing'")
        claim = world.alice.hold("job").claim
        unfenced: Any = world.alice.backend

        with pytest.raises(ConfigurationError, match="transactional_fencing"):
            unfenced.guard(claim, None)
        with pytest.raises(ConfigurationError, match="transactional_fencing"):
            unfenced.fence_sql(claim, "format")

    @clauses("C18")
    def test_the_current_hold_passes_as_often_as_it_is_asked(self, world: World) -> None:
        hold = world.alice.hold("job")

        with world.harness.transaction() as connection:
            hold.guard(connection)
            hold.guard(connection)

            assert connection.execute("SELECT 1").fetchall() == [(1,)]

    @clauses("C18")
    def test_a_hold_that_was_renewed_passes(self, world: World) -> None:
        hold = world.alice.hold("job")
        hold.renewed()

        with world.harness.transaction() as connection:
            hold.guard(connection)

    @every_stale_claim
    @clauses("C18")
    def test_a_hold_that_is_not_current_is_refused_and_takes_the_transaction_with_it(
        self, world: World, stale: str
    ) -> None:
        claim = STALE[stale](world)

        with world.harness.transaction() as connection, pytest.raises(FencedError) as refused:
            fencing(world.alice.backend, "guard").guard(claim, connection)

        assert (refused.value.name, refused.value.fencing_token) == (claim.name, claim.fencing_token)

    @clauses("C18", "C1")
    def test_while_a_guarded_transaction_is_open_nobody_else_is_granted(self, world: World) -> None:
        hold = world.alice.hold("job", world.tick)

        with world.harness.transaction() as connection:
            hold.guard(connection)
            world.pass_time(1.1 * world.tick)
            for _ in range(3):
                assert not _is_granted(world)

        assert _sooner_or_later(world).fencing_token == hold.token + 1

    @clauses("C18")
    def test_the_fence_of_the_current_hold_matches(self, world: World) -> None:
        hold = world.alice.hold("job")

        assert _matches(world, hold.claim)

    @every_stale_claim
    @clauses("C18")
    def test_the_fence_of_a_hold_that_is_not_current_matches_nothing(self, world: World, stale: str) -> None:
        claim = STALE[stale](world)

        assert not _matches(world, claim)


def _is_granted(world: World) -> Lease | None:
    """Let bob ask; a store may also say that it is busy."""
    try:
        answer = world.bob.ask("job", within=2.0)
    except BackendUnavailable:
        return None
    return answer.lease if isinstance(answer, Granted) else None


def _sooner_or_later(world: World) -> Lease:
    until = clock.now() + 30
    while clock.now() < until:
        if lease := _is_granted(world):
            return lease
    raise AssertionError("bob was never granted the name")


def _matches(world: World, claim: Claim) -> bool:
    """Tell whether the fence of a claim lets a statement find anything."""
    with world.harness.transaction() as connection:
        fence = fencing(world.alice.backend, "fence_sql").fence_sql(claim, world.harness.paramstyle)
        found: list[Any] = connection.execute(f"SELECT 1 WHERE {fence.sql}", fence.params).fetchall()
        return found == [(1,)]
