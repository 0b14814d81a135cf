"""The part of the contract that several names at once rest on: C22, for stores with the trait."""

# ruff: noqa: D102  # the names of the tests are sentences

from __future__ import annotations

import random
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast

import pytest

from pglease.backends.base import GroupBackend
from pglease.errors import ConfigurationError
from pglease.records import Granted, InTheWay, Request
from pglease.testing.clauses import clauses
from pglease.testing.harness import LONG, Hold, Worker, World, budget, new_id


def _requests(worker: Worker, names: Sequence[str]) -> list[Request]:
    return [Request(name, worker.label, new_id(), LONG) for name in names]


def _ask(worker: Worker, requests: Sequence[Request]) -> list[Granted] | InTheWay | None:
    return cast("GroupBackend", worker.backend).try_acquire_many(requests, budget())


def _takes(worker: Worker, *names: str) -> list[Hold]:
    """Take all of them; anything but success fails the test."""
    requests = _requests(worker, names)
    answer = _ask(worker, requests)
    assert isinstance(answer, list), answer
    return [Hold(worker, request, got.lease, got.bond) for request, got in zip(requests, answer, strict=True)]


class GroupContract:
    """Clause C22."""

    @clauses("C22")
    def test_a_store_that_takes_no_groups_says_so_by_the_name_of_the_trait(self, world: World) -> None:
        if world.alice.backend.traits.groups:
            pytest.skip("this store has the trait 'groups'")
        ungrouped: Any = world.alice.backend

        with pytest.raises(ConfigurationError, match="groups"):
            ungrouped.try_acquire_many(_requests(world.alice, ["a"]), budget())

    @clauses("C22", "C3")
    def test_all_are_granted_in_their_order_whether_new_lapsed_or_given_back(self, world: World) -> None:
        world.needs("groups")
        lapsed = world.lapsed_hold("lapsed")
        given_back = world.bob.hold("given back")
        given_back.released()

        holds = _takes(world.alice, "new", "lapsed", "given back", "new, too")

        assert [hold.lease.task_name for hold in holds] == ["new", "lapsed", "given back", "new, too"]
        assert (holds[1].token, holds[2].token) == (lapsed.token + 1, given_back.token + 1)
        for hold in holds:
            assert hold.lease.owner_id == "alice"
            assert hold.lease.acquired_at == hold.lease.heartbeat_at < hold.lease.expires_at
            world.bob.is_refused(hold.name)
            hold.renewed()
            hold.released()
        assert len(_takes(world.bob, "new, too", "new")) == 2

    @clauses("C22", "C1", "C10")
    def test_one_that_is_held_is_named_and_nothing_is_written(self, world: World) -> None:
        world.needs("groups")
        held = world.bob.hold("b")
        world.bob.hold("c").released()
        before = world.carol.sees("c")

        answer = _ask(world.alice, _requests(world.alice, ["a", "b", "c"]))

        assert isinstance(answer, InTheWay)
        assert answer.name == "b"
        assert answer.refused.held_by == "bob"
        assert world.about(answer.refused.retry_after, LONG)
        assert world.carol.names(ended=True) == ["b", "c"]
        assert world.carol.sees("c").fencing_token == before.fencing_token
        held.renewed()

    @clauses("C22", "C13")
    def test_whoever_asks_again_for_all_finds_what_it_was_granted(self, world: World) -> None:
        world.needs("groups")
        world.bob.hold("b").released()
        requests = _requests(world.alice, ["a", "b"])
        first = _ask(world.alice, requests)

        again = _ask(world.alice, requests)

        assert isinstance(first, list)
        assert isinstance(again, list)
        assert [got.lease.fencing_token for got in again] == [got.lease.fencing_token for got in first]

    @clauses("C22", "C17")
    def test_a_name_with_a_queue_is_given_to_nobody_else(self, world: World) -> None:
        world.needs("groups")
        world.needs("fair")
        hold = world.alice.hold("b")
        ticket = world.bob.queue("b")
        hold.released()

        answer = _ask(world.alice, _requests(world.alice, ["a", "b"]))

        assert not isinstance(answer, list)
        assert world.carol.names() == []
        assert ticket.hold().token == hold.token + 1

    @clauses("C22", "C1", "C11")
    def test_of_many_who_ask_in_any_order_nobody_waits_and_nobody_has_a_part(self, world: World) -> None:
        world.needs("groups")
        workers, inside, rounds = [world.alice, world.bob, world.carol] * 2, threading.Lock(), []

        def take_turns(index: int) -> None:
            dice = random.Random(index)
            for _ in range(12):
                names = [f"{number}" for number in range(4)]
                dice.shuffle(names)
                requests = _requests(workers[index], names)
                answer = _ask(workers[index], requests)
                if not isinstance(answer, list):
                    continue
                assert inside.acquire(blocking=False), "two have all of it"
                rounds.append([got.lease.fencing_token for got in answer])
                inside.release()
                for request in requests:
                    workers[index].backend.release(request.name, request.lease_id, budget())

        with ThreadPoolExecutor(len(workers)) as pool:
            list(pool.map(take_turns, range(len(workers))))

        assert rounds, "nobody ever got all"
        assert len(_takes(world.alice, "0", "1", "2", "3")) == 4
