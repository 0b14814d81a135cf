"""The part of the contract that looking back rests on: C23, for stores with the trait."""

# ruff: noqa: D102  # the names of the tests are sentences

from __future__ import annotations

from typing import Any, cast

import pytest

from pglease.backends.base import RememberingBackend
from pglease.errors import ConfigurationError
from pglease.records import Request, Tenure
from pglease.testing.clauses import clauses
from pglease.testing.harness import LONG, World, budget, new_id


def _past(world: World, name: str, *, limit: int = 100, prefix: bool = False) -> list[Tenure]:
    backend = cast("RememberingBackend", world.bob.backend)
    return backend.history(name, budget(), limit=limit, prefix=prefix)


def _told(world: World, name: str) -> list[tuple[str, int, str | None]]:
    return [(tenure.owner_id, tenure.fencing_token, tenure.ending) for tenure in _past(world, name)]


def _needs_history(world: World) -> int:
    """Return how many holds are kept; skip where none are."""
    world.needs("history")
    if not world.harness.history:
        pytest.skip("this store was told to keep no history")
    return world.harness.history


class HistoryContract:
    """Clause C23."""

    @clauses("C23")
    def test_a_store_that_remembers_nothing_says_so_by_the_name_of_the_trait(self, world: World) -> None:
        if world.alice.backend.traits.history:
            pytest.skip("this store has the trait 'history'")
        forgetful: Any = world.alice.backend

        with pytest.raises(ConfigurationError, match="history"):
            forgetful.history("job", budget(), limit=1)

    @clauses("C23")
    def test_a_hold_that_runs_has_no_end_and_one_that_was_given_back_has(self, world: World) -> None:
        _needs_history(world)
        assert _past(world, "job") == []
        hold = world.alice.hold("job")
        (running,) = _past(world, "job")
        assert (running.ended_at, running.ending, running.acquired_at) == (None, None, hold.lease.acquired_at)

        hold.released()

        (over,) = _past(world, "job")
        assert (over.owner_id, over.fencing_token, over.ending) == ("alice", hold.token, "released")
        assert over.acquired_at == hold.lease.acquired_at
        assert over.ended_at is not None
        assert hold.lease.acquired_at <= over.ended_at <= over.seen_at

    @clauses("C23")
    def test_a_hold_that_lapsed_is_closed_by_its_successor_at_the_time_it_lapsed(self, world: World) -> None:
        _needs_history(world)
        lapsed = world.lapsed_hold("job")
        (before,) = _past(world, "job")
        assert (before.ending, before.fencing_token) == ("expired", lapsed.token)

        successor = world.bob.hold("job")

        first, second = _past(world, "job")
        assert (first.owner_id, first.ending, first.ended_at) == ("alice", "expired", before.ended_at)
        assert (second.owner_id, second.ending, second.fencing_token) == ("bob", None, successor.token)
        assert first.ended_at is not None
        assert first.ended_at <= second.acquired_at

    @clauses("C23", "C6")
    def test_a_hold_that_is_given_back_too_late_had_lapsed(self, world: World) -> None:
        _needs_history(world)
        lapsed = world.lapsed_hold("job")
        lapsed.release()
        assert _told(world, "job") == [("alice", lapsed.token, "expired")]

        world.bob.hold("job").released()

        assert [ending for _, _, ending in _told(world, "job")] == ["expired", "released"]

    @clauses("C23", "C6")
    def test_an_end_is_kept_once_whoever_ends_it_again(self, world: World) -> None:
        _needs_history(world)
        hold = world.alice.hold("job")
        hold.released(min_hold=world.tick)
        hold.release()
        world.bob.force("job", hold.token)
        world.bob.hold("job")

        assert [ending for _, _, ending in _told(world, "job")] == ["released", None]

    @clauses("C23", "C20")
    def test_force_and_handing_over_are_told_apart(self, world: World) -> None:
        _needs_history(world)
        forced = world.alice.hold("job")
        assert world.bob.force("job", forced.token)
        handed_over = world.alice.hold("job")
        adopted = handed_over.adopted_by(world.carol)

        assert _told(world, "job") == [
            ("alice", forced.token, "forced"),
            ("alice", handed_over.token, "transferred"),
            ("carol", adopted.token, None),
        ]

    @clauses("C23", "C22")
    def test_several_at_once_close_what_had_lapsed(self, world: World) -> None:
        _needs_history(world)
        world.needs("groups")
        world.lapsed_hold("a")
        world.alice.hold("b").released()
        backend: Any = world.bob.backend
        requests = [Request(name, "bob", new_id(), LONG) for name in ("a", "b", "c")]
        assert isinstance(backend.try_acquire_many(requests, budget()), list)

        assert [ending for _, _, ending in _told(world, "a")] == ["expired", None]
        assert [ending for _, _, ending in _told(world, "b")] == ["released", None]
        assert [ending for _, _, ending in _told(world, "c")] == [None]

    @clauses("C23")
    def test_refusals_renewals_and_looks_leave_no_trace(self, world: World) -> None:
        _needs_history(world)
        hold = world.alice.hold("job")
        world.bob.is_refused("job")
        hold.renewed()
        hold.describe({"step": 2})
        world.bob.force("job", hold.token + 1)
        world.bob.list()

        assert _told(world, "job") == [("alice", hold.token, None)]

    @clauses("C23")
    def test_the_last_ones_are_kept_and_names_stay_apart(self, world: World) -> None:
        kept = _needs_history(world)
        world.alice.hold("other").released()
        tokens = []
        for _ in range(kept + 3):
            hold = world.alice.hold("job")
            tokens.append(hold.token)
            hold.released()

        assert [tenure.fencing_token for tenure in _past(world, "job")] == tokens[-kept:]
        assert [tenure.fencing_token for tenure in _past(world, "job", limit=2)] == tokens[-2:]
        assert len(_past(world, "other")) == 1
        assert {tenure.name for tenure in _past(world, "", prefix=True)} == {"job", "other"}
        assert _past(world, "j") == []

    @clauses("C23", "C7")
    def test_a_cleanup_takes_the_history_of_a_name_along_with_its_record(self, world: World) -> None:
        _needs_history(world)
        world.alice.hold("over").released()
        world.alice.hold("held")

        assert world.bob.cleanup() == 1

        assert _past(world, "over") == []
        assert len(_past(world, "held")) == 1
