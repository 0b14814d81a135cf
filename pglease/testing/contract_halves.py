"""The part of the contract that event loops rest on: C24, for stores with the trait. With `InHalves`, all of it."""

# ruff: noqa: D102  # the names of the tests are sentences

from __future__ import annotations

import select
import threading
from typing import Any, TypeVar, cast

import pytest

from pglease.backends.base import Begun, Budget, SplitBackend
from pglease.errors import ConfigurationError
from pglease.records import Gone, Granted, Refused, Released, ReleaseOutcome, Request
from pglease.testing.clauses import clauses
from pglease.testing.harness import LONG, PATIENCE, Hold, Worker, World, budget, new_id

T = TypeVar("T")


def _request(worker: Worker, name: str) -> Request:
    return Request(name, worker.label, new_id(), LONG)


def _begins(worker: Worker, request: Request) -> Begun[Granted | Refused]:
    """Send the question; a store that has to wait for something first fails the test."""
    worker.backend.get(request.name, budget())  # by now it has a connection
    begun = cast("SplitBackend", worker.backend).begin_try_acquire(request, budget())
    assert begun is not None
    return begun


def heard(begun: Begun[Any]) -> None:
    """Wait for the answer as an event loop does, by the descriptor, which must show something by the budget's end."""
    while not begun.arrived():
        readable, _, _ = select.select([begun.fileno()], [], [], PATIENCE + 5)
        assert readable, "nothing came, and nothing ended it"


class InHalves:
    """A store whose verbs are said in halves wherever it can: the same contract holds for it.

    Args:
        backend: a store with the trait `in_two_halves`.

    Attributes:
        halves: how many were begun.
    """

    def __init__(self, backend: SplitBackend) -> None:
        self._backend = backend
        self.halves = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    def try_acquire(self, request: Request, budget: Budget) -> Granted | Refused:
        """Begin, hear, finish."""
        begun = self._backend.begin_try_acquire(request, budget)
        return self._backend.try_acquire(request, budget) if begun is None else self._finished(begun)

    def release(self, name: str, lease_id: str, budget: Budget, *, min_hold: float = 0.0) -> ReleaseOutcome:
        """Begin, hear, finish."""
        begun = self._backend.begin_release(name, lease_id, budget, min_hold=min_hold)
        if begun is None:
            return self._backend.release(name, lease_id, budget, min_hold=min_hold)
        return self._finished(begun)

    def _finished(self, begun: Begun[T]) -> T:
        self.halves += 1
        heard(begun)
        return begun.finish()


class HalvesContract:
    """Clause C24."""

    @clauses("C24")
    def test_a_store_that_cannot_send_and_leave_says_so_by_the_name_of_the_trait(self, world: World) -> None:
        if world.alice.backend.traits.in_two_halves:
            pytest.skip("this store has the trait 'in_two_halves'")
        whole: Any = world.alice.backend

        with pytest.raises(ConfigurationError, match="in_two_halves"):
            whole.begin_try_acquire(_request(world.alice, "job"), budget())
        with pytest.raises(ConfigurationError, match="in_two_halves"):
            whole.begin_release("job", new_id(), budget())

    @clauses("C24", "C1", "C3", "C6")
    def test_both_halves_together_are_the_verb(self, world: World) -> None:
        world.needs("in_two_halves")
        earlier = world.bob.hold("job")
        earlier.released()
        request = _request(world.alice, "job")

        begun = _begins(world.alice, request)
        heard(begun)

        assert begun.done
        granted = begun.finish()
        assert isinstance(granted, Granted)
        assert granted.lease.fencing_token == earlier.token + 1
        assert world.bob.is_refused("job").held_by == "alice"
        ending = cast("SplitBackend", world.alice.backend).begin_release("job", request.lease_id, budget())
        assert ending is not None
        heard(ending)
        assert isinstance(ending.finish(), Released)
        world.bob.hold("job")

    @clauses("C24", "C1")
    def test_the_refused_learn_who_holds_it_each_time_they_ask(self, world: World) -> None:
        world.needs("in_two_halves")
        world.bob.hold("job")

        for _ in range(3):
            begun = _begins(world.alice, _request(world.alice, "job"))
            heard(begun)
            refused = begun.finish()
            assert isinstance(refused, Refused)
            assert refused.held_by == "bob"

    @clauses("C24", "C6")
    def test_a_release_of_what_is_over_is_gone(self, world: World) -> None:
        world.needs("in_two_halves")
        hold = world.alice.hold("job")
        hold.released()

        ending = cast("SplitBackend", world.alice.backend).begin_release("job", hold.request.lease_id, budget())

        assert ending is not None
        heard(ending)
        assert isinstance(ending.finish(), Gone)

    @clauses("C24", "C11")
    def test_another_thread_finishes_what_was_begun(self, world: World) -> None:
        world.needs("in_two_halves")
        begun = _begins(world.alice, _request(world.alice, "job"))
        answers: list[Granted | Refused] = []

        thread = threading.Thread(target=lambda: answers.append(begun.finish()))
        thread.start()
        thread.join(10)

        assert isinstance(answers[0], Granted)
        world.bob.is_refused("job")

    @clauses("C24")
    def test_nobody_waits_where_everything_is_in_use(self, world: World) -> None:
        world.needs("in_two_halves")
        store = cast("SplitBackend", world.alice.backend)
        world.alice.backend.get("job", budget())  # by now it has a connection
        under_way = []
        for number in range(100):
            request = _request(world.alice, f"job-{number}")
            begun = store.begin_try_acquire(request, budget())
            if begun is None:
                break
            under_way.append(begun)
        else:
            pytest.fail("a hundred questions were sent, and none was answered")

        assert under_way
        assert all(isinstance(begun.finish(), Granted) for begun in under_way)
        assert world.bob.names() == [f"job-{number}" for number in range(len(under_way))]  # the last was not asked

    @clauses("C24", "C13")
    def test_what_nobody_hears_may_have_been_done_and_is_found_again(self, world: World) -> None:
        world.needs("in_two_halves")
        request = _request(world.alice, "job")
        begun = _begins(world.alice, request)
        heard(begun)

        begun.drop()

        found = world.alice.backend.try_acquire(request, budget())
        assert isinstance(found, Granted)
        Hold(world.alice, request, found.lease, found.bond).released()
